"""The functions of one run, and the abstract values that they are compiled for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from ulysses_jax.data.batches import Batch
from ulysses_jax.parallel.backend import compiler_options
from ulysses_jax.train.config import Config
from ulysses_jax.train.optimizer import learning_rate_schedule, make_optimizer
from ulysses_jax.train.state import (
    TrainState,
    abstract_state,
    make_init,
    sharding_policy,
    state_shardings,
)
from ulysses_jax.train.step import Program, make_train_step


@dataclass(frozen=True)
class Trainer:
    """What trains one model on one mesh.

    Attributes:
      program: the model, where its state lives, and the sizes of its parts.
      step: the jitted train step (state, batch, key) → (state, metrics); donates the state.
      init: the jitted key → first state.
      state, batch: abstract arguments of `step`.
    """

    program: Program
    step: Any
    init: Callable[[jax.Array], TrainState]
    state: TrainState
    batch: Batch

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> Self:
        """Makes the functions; nothing is compiled or allocated."""
        arch = config.model.architecture(config.train.seq_len)
        policy = sharding_policy(arch, mesh, config.train.zero_stage)
        program = Program(arch, policy, config.train.remat, config.train.loss_chunk)
        optimizer = make_optimizer(config.optimizer, config.train.steps)
        schedule = learning_rate_schedule(config.optimizer, config.train.steps)
        step = jax.jit(
            make_train_step(program, optimizer, schedule),
            donate_argnums=0,
            out_shardings=(state_shardings(policy, optimizer), policy.whole),
            compiler_options=compiler_options(mesh.devices.flat[0]),
        )
        parts = config.train.accumulate
        shape = (parts, config.train.global_batch // parts, config.train.seq_len)
        array: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=policy.batch(leading=1))
        return cls(
            program=program,
            step=step,
            init=make_init(arch, policy, optimizer),
            state=abstract_state(arch, policy, optimizer),
            batch=Batch(array, array, array, array if config.data.document_mask else None),
        )

    def compile(self) -> Any:
        """Compiles the step without any array."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        whole = self.program.policy.whole
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
        return self.step.lower(self.state, self.batch, key).compile()
