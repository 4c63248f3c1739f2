"""Evaluation over the whole held-out part, each token once, on any mesh."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

import jax
from jaxtyping import Array

from ulysses_jax.data.batches import Batch, EvalBatches
from ulysses_jax.data.feed import device_batches
from ulysses_jax.data.store import TokenStore
from ulysses_jax.parallel.backend import compiler_options
from ulysses_jax.parallel.sharding import ShardingPolicy
from ulysses_jax.train.step import Program


@dataclass(frozen=True)
class EvalResult:
    """The outcome of one evaluation.

    Attributes:
      loss: mean cross-entropy in nats per token.
      tokens: how many tokens were predicted.
    """

    loss: float
    tokens: int

    @property
    def bits_per_token(self) -> float:
        """The loss in bits."""
        return self.loss / math.log(2)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates parameters on one held-out part; called with them, it returns an `EvalResult`."""

    loss_sum: Callable[[Any, Batch], tuple[Array, Array]]
    batches: EvalBatches
    shape: tuple[int, int]
    policy: ShardingPolicy

    @classmethod
    def of(cls, program: Program, heldout: TokenStore, rows: int, masked: bool) -> Self:
        """Makes one; nothing is read or compiled before it is called.

        Args:
          program: model, placement and sizes.
          heldout: the tokens.
          rows: sequences a batch; a multiple of the mesh's 'data' axis.
          masked: whether documents are kept apart.

        Raises:
          ValueError: the held-out part has no token to predict.
        """
        arch, policy = program.arch, program.policy
        batches = EvalBatches(heldout, arch.max_seq_len, rows, masked, arch.vocab_size)
        options = compiler_options(policy.mesh.devices.flat[0])
        loss_sum = jax.jit(program.loss_sum, compiler_options=options)
        return cls(loss_sum, batches, (rows, arch.max_seq_len), policy)

    def __call__(self, params: dict[str, Any]) -> EvalResult:
        feed = device_batches(self.batches.read, self.shape, self.policy.batch(), 0, self.steps)
        total, tokens = 0.0, 0
        with closing(feed) as arrays:
            waiting = self.loss_sum(params, next(arrays))
            # Each result is read after the next batch was dispatched, so that neither waits.
            for batch in arrays:
                done, waiting = waiting, self.loss_sum(params, batch)
                loss, count = jax.device_get(done)
                total, tokens = total + float(loss), tokens + int(count)
            loss, count = jax.device_get(waiting)
        tokens += int(count)
        return EvalResult((total + float(loss)) / tokens, tokens)

    @property
    def steps(self) -> int:
        """Batches in one evaluation."""
        return len(self.batches)
