"""The optimizer: optax AdamW or SGD with warmup-cosine and clipping by the true global norm."""

from typing import Any

import jax
import optax

from ulysses_jax.train.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warmup to the peak, then a cosine down to its final fraction at the end.

    The first update already has a rate: peak / (warmup + 1).

    A warmup of `steps` or more is shortened to `warmup_used(config, steps)`.
    """
    warmup = warmup_used(config, steps)
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )


def warmup_used(config: OptimizerConfig, steps: int) -> int:
    """The warmup of a run of `steps` steps: what was asked, or all but the last step."""
    return min(config.warmup_steps, max(steps - 1, 0))


def is_weight_matrix(params: dict[str, Any]) -> dict[str, Any]:
    """True for leaves that are matrices: a norm scale stacked over layers is not one."""
    return {
        part: jax.tree.map(lambda w, stack=part == "blocks": w.ndim - stack >= 2, tree)
        for part, tree in params.items()
    }


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW (decay on weight matrices only) or plain SGD, on the schedule."""
    schedule = learning_rate_schedule(config, steps)
    if config.name == "sgd":
        update = optax.sgd(schedule)
    else:
        update = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=is_weight_matrix,
        )
    if config.clip_norm == 0:
        return optax.chain(update)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
