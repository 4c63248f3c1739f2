"""One optimizer step: a single manual region for loss and gradients, plain optax outside it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ulysses_jax.attention.select import attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.data.batches import Batch
from ulysses_jax.model.config import Architecture
from ulysses_jax.model.dropout import Dropout
from ulysses_jax.model.gpt import Attend, hidden_states
from ulysses_jax.parallel.mesh import AXES, DATA, SEQ
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.parallel.ulysses import exchanged_attention
from ulysses_jax.parallel.weights import make_fetch, rejoin, split_for_gradient
from ulysses_jax.train.loss import count_labels, token_loss_sum
from ulysses_jax.train.remat import remat_wrapper
from ulysses_jax.train.state import TrainState


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "grad_norm", "learning_rate", "labels", "applied"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepMetrics:
    """Scalars of one step, equal on every device.

    Attributes:
      loss: mean cross-entropy over the global batch's valid labels, in nats.
      grad_norm: global norm of the gradient before clipping.
      learning_rate: of this update.
      labels: how many labels counted.
      applied: false if the update was skipped, because the loss, the gradient or the update was
        not finite, or no label counted.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    labels: Int[Array, ""]
    applied: Array


@dataclass(frozen=True)
class Program:
    """Everything that the compiled functions of one run are made from.

    Attributes:
      arch: the model.
      policy: where its state lives.
      remat: `none`, `exchange` or `full`.
      loss_chunk: tokens per chunk of logits on each device.
    """

    arch: Architecture
    policy: ShardingPolicy
    remat: str
    loss_chunk: int

    def _attend(self, segments_Bs: Array | None) -> Attend:
        segments_BS = None
        if segments_Bs is not None:
            segments_BS = lax.all_gather(segments_Bs, SEQ, axis=1, tiled=True)
        # Documents are numbered along a row, so none comes back after another.
        spec = AttentionSpec(causal=True, q_segment_ids=segments_BS, contiguous_segments=True)
        platform = self.policy.mesh.devices.flat[0].platform
        return partial(
            exchanged_attention,
            spec=spec,
            local=attention_function(self.arch.attention, platform),
            axis=SEQ,
            scale=self.arch.head_dim**-0.5,
        )

    def _dropout(self, key: PRNGKeyArray, micro: Array, batch: Batch) -> Dropout | None:
        if self.arch.dropout_rate == 0.0:
            return None
        B, s = batch.tokens_BS.shape
        shards = lax.axis_size(DATA)
        row_B = (micro * shards + lax.axis_index(DATA)) * B + jnp.arange(B)
        column_s = lax.axis_index(SEQ) * s + jnp.arange(s)
        return Dropout(key, row_B, column_s, self.arch.dropout_rate)

    def _local_loss_sum(self, params: Any, batch: Batch, dropout: Dropout | None) -> Array:
        x_BsE, table_VE = hidden_states(
            self.arch,
            params,
            batch.tokens_BS,
            batch.positions_BS,
            self._attend(batch.segments_BS),
            make_fetch(self.policy, self.arch.dtype),
            remat_wrapper(self.remat),
            dropout,
        )
        return token_loss_sum(x_BsE, table_VE, batch.labels_BS, self.loss_chunk)

    def loss_and_gradients(
        self, params: dict[str, Any], batch: Batch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], dict[str, Any], Int[Array, ""]]:
        """Mean loss, its gradients and the number of labels of a global batch.

        Args:
          params: stored parameters.
          batch: arrays [A, B, S], A micro-batches accumulated one after the other.
          key: of this step's dropout.

        Returns:
          The loss summed over all valid labels ÷ their number, float32; gradients like the
          stored parameters, placed by `policy.gradient_specs`; the number of labels.
        """
        policy = self.policy

        def region(params: Any, batch: Batch, key: PRNGKeyArray) -> Any:
            labels = lax.psum(count_labels(batch.labels_BS), AXES)
            share = 1.0 / jnp.maximum(labels, 1).astype(jnp.float32)
            free, whole = split_for_gradient(policy, params)

            def micro(batch: Batch, index: Array) -> Any:
                dropout = self._dropout(key, index, batch)

                def loss(free: Any) -> Array:
                    stored = rejoin(policy, free, whole)
                    return self._local_loss_sum(stored, batch, dropout) * share

                return jax.value_and_grad(loss)(free)

            count = batch.tokens_BS.shape[0]
            loss, gradients = micro(jax.tree.map(lambda x: x[0], batch), jnp.int32(0))
            if count > 1:
                rest = jax.tree.map(lambda x: x[1:], batch)

                def add(total: Any, xs: Any) -> Any:
                    return jax.tree.map(jnp.add, total, micro(*xs)), None

                (loss, gradients), _ = lax.scan(
                    add, (loss, gradients), (rest, jnp.arange(1, count))
                )
            return lax.psum(loss, AXES), gradients, labels

        batch_spec = policy.batch(leading=1).spec
        sharded = jax.shard_map(
            region,
            mesh=policy.mesh,
            in_specs=(policy.param_specs, batch_spec, PartitionSpec()),
            out_specs=(PartitionSpec(), policy.gradient_specs, PartitionSpec()),
        )
        with jax.default_matmul_precision(self.arch.matmul_precision):
            return sharded(params, batch, key)

    def loss_sum(self, params: dict[str, Any], batch: Batch) -> tuple[Array, Array]:
        """Sum of token losses (float32 nats) and number of labels of a [B, S] batch."""

        def region(params: Any, batch: Batch) -> Any:
            free, whole = split_for_gradient(self.policy, params)
            local = self._local_loss_sum(rejoin(self.policy, free, whole), batch, None)
            return lax.psum((local, count_labels(batch.labels_BS)), AXES)

        sharded = jax.shard_map(
            region,
            mesh=self.policy.mesh,
            in_specs=(self.policy.param_specs, self.policy.batch().spec),
            out_specs=PartitionSpec(),
        )
        with jax.default_matmul_precision(self.arch.matmul_precision):
            return sharded(params, batch)


def make_train_step(
    program: Program, optimizer: optax.GradientTransformation, schedule: optax.Schedule
) -> Callable[[TrainState, Batch, PRNGKeyArray], tuple[TrainState, StepMetrics]]:
    """The update as a function to be jitted with `state_shardings` and its state donated.

    The optimizer works on shards of parameters, gradients and moments; XLA adds the scalar
    all-reduces of the norm and, at stages 1 and 2, the gather of the new parameters.
    """
    policy = program.policy
    moment_shardings = policy.shardings(policy.moment_specs)

    def as_moments(tree: Any) -> Any:
        return lax.with_sharding_constraint(tree, moment_shardings)

    def train_step(
        state: TrainState, batch: Batch, key: PRNGKeyArray
    ) -> tuple[TrainState, StepMetrics]:
        step_key = jax.random.fold_in(key, state.step)
        loss, gradients, labels = program.loss_and_gradients(state.params, batch, step_key)
        gradients, params = as_moments(gradients), as_moments(state.params)
        norm = optax.tree.norm(gradients)
        updates, moments = optimizer.update(gradients, state.moments, params)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        applied = finite & (labels > 0)
        updated = as_moments(optax.apply_updates(params, updates))

        def kept(new: Array, old: Array) -> Array:
            return jnp.where(applied, new, old)

        metrics = StepMetrics(
            loss, norm, jnp.asarray(schedule(_count(state.moments))), labels, applied
        )
        return TrainState(
            state.step + 1,
            jax.tree.map(kept, updated, params),
            jax.tree.map(kept, moments, state.moments),
        ), metrics

    return train_step


def _count(moments: Any) -> Array:
    """Updates applied so far, from the schedule's own counter in the optax state."""
    return optax.tree.get(moments, "count", filtering=_is_schedule_count)


def _is_schedule_count(path: Any, _: Any) -> bool:
    return any(getattr(entry, "tuple_name", "") == "ScaleByScheduleState" for entry in path)
