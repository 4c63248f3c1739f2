"""Evaluation over the whole held-out part, each token once, on any mesh."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array

from ulysses_jax.data.batches import Batch, EvalBatches
from ulysses_jax.data.feed import device_batches
from ulysses_jax.parallel.sharding import ShardingPolicy


@dataclass(frozen=True)
class EvalResult:
    """Attributes:
    loss: mean cross-entropy in nats per token.
    tokens: how many tokens were predicted.
    """

    loss: float
    tokens: int

    @property
    def bits_per_token(self) -> float:
        """The loss in bits."""
        return self.loss / math.log(2)


def evaluate(
    loss_sum: Callable[[Any, Batch], tuple[Array, Array]],
    params: dict[str, Any],
    batches: EvalBatches,
    shape: tuple[int, int],
    policy: ShardingPolicy,
) -> EvalResult:
    """Runs `loss_sum`, the jitted `Program.loss_sum`, over all of `batches`, of `shape` [B, S]."""
    results = []
    with closing(device_batches(batches.read, shape, policy.batch(), 0, len(batches))) as arrays:
        for batch in arrays:
            results.append(loss_sum(params, batch))
    fetched = jax.device_get(results)
    tokens = sum(int(count) for _, count in fetched)
    return EvalResult(sum(float(total) for total, _ in fetched) / tokens, tokens)
