"""A model to verify: its function, inputs and parameters, and what its caller declares of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ulysses_jax.parallel.region import DEFAULT_BATCH_AXES

ModelFn: TypeAlias = Callable[
    [Any, dict[str, Any], Mesh | None], tuple[Float[Array, ""], Float[Array, "B S ..."]]
]
"""(params, inputs, mesh) → (loss, outputs); mesh None is the single-device run."""


@dataclass(frozen=True)
class Case:
    """A model with everything that `verify` needs but a mesh.

    The function that `python -m ulysses_jax verify --model FILE.py:NAME` names returns one.

    Attributes:
      model_fn: `model_fn(params, inputs, mesh)` returns (loss, outputs): a scalar, and
        [B, S, ...]. It is traced within `jax.jit`, with mesh=None for one device, and with the
        mesh under `jax.set_mesh(mesh)`: a model that finds the mesh there has no need of the
        argument, and none may set one itself.
      inputs: arrays by name; those of [B, S, ...] are split over the batch and sequence axes where
        these divide them, those of [B] over the batch axes, all others are whole on every device.
      params: a tree of arrays.
      tokens: name of the [B, S] integer token ids in `inputs`, which the probes change.
      causal: declares that no output depends on a later token.
      segments: name of [B, S] integers; declares that no output depends on a token of another id.
      valid: name of a [B, S] bool; declares that nothing depends on the tokens where it is False.
      lengths: name of [B] integers; as `valid`, for the tokens from `lengths[b]` on.
      seq_axis: the mesh axis over which the sequence is split.
      batch_axes: those over which the batch is split; "data" only if the mesh has it.
      param_shardings: a tree, or a prefix of one, of PartitionSpecs or shardings for `params`;
        None: whole on every device.
      tolerance: largest error of the loss, the outputs and each gradient, as a share of the
        largest entry. 1e-5 is for float32; a bfloat16 model needs about 2e-2. A gradient that is
        everywhere below 1% of the largest of all is held to that 1%: it may be rounding alone.
      probes: the (row, token) places to perturb; None: chosen at the borders of shards, inside
        one, at both ends and at the last segment.

    Example:
      >>> case = Case(
      ...     model_fn=lambda params, inputs, mesh: (jnp.float32(0), inputs["tokens"]),
      ...     inputs={"tokens": jnp.arange(12).reshape(2, 6), "lengths": jnp.array([6, 4])},
      ...     params={},
      ...     lengths="lengths",
      ... )
      >>> case.valid_BS.sum()
      np.int64(10)
    """

    model_fn: ModelFn
    inputs: dict[str, Any]
    params: Any
    tokens: str = "tokens"
    causal: bool = False
    segments: str | None = None
    valid: str | None = None
    lengths: str | None = None
    seq_axis: str = "seq"
    batch_axes: str | Sequence[str] = DEFAULT_BATCH_AXES
    param_shardings: Any = None
    tolerance: float = 1e-5
    probes: Sequence[tuple[int, int]] | None = None

    @property
    def tokens_BS(self) -> Int[np.ndarray, "B S"]:
        """The token ids."""
        return np.asarray(self.inputs[self.tokens])

    @property
    def segments_BS(self) -> Int[np.ndarray, "B S"] | None:
        """The segment ids, if declared."""
        return None if self.segments is None else np.asarray(self.inputs[self.segments])

    @property
    def padded(self) -> bool:
        """Whether padding is declared."""
        return self.valid is not None or self.lengths is not None

    @property
    def valid_BS(self) -> Bool[np.ndarray, "B S"]:
        """True at the places that count: all of them, unless padding is declared."""
        rows, length = self.tokens_BS.shape
        valid_BS = np.ones((rows, length), bool)
        if self.valid is not None:
            valid_BS &= np.asarray(self.inputs[self.valid])
        if self.lengths is not None:
            lengths_B = np.asarray(self.inputs[self.lengths])
            valid_BS &= np.arange(length) < lengths_B[:, None]
        return valid_BS

    def batch_axes_of(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes of `mesh` over which the batch is split."""
        axes = (self.batch_axes,) if isinstance(self.batch_axes, str) else tuple(self.batch_axes)
        return tuple(axis for axis in axes if axis in mesh.shape or axes != DEFAULT_BATCH_AXES)

    def check(self, mesh: Mesh) -> None:
        """Refuses what cannot be verified on `mesh`.

        Raises:
          ValueError: an axis or an input does not exist, has the wrong shape or dtype, or leaves
            nothing to probe.
        """
        self._check_mesh(mesh)
        self._check_tokens()
        shape = self.tokens_BS.shape
        self._check_input("segments", self.segments, shape, np.integer)
        self._check_input("valid", self.valid, shape, np.bool_)
        self._check_input("lengths", self.lengths, shape[:1], np.integer)
        valid_BS = self.valid_BS
        if not valid_BS.any():
            raise ValueError("every token is padding; give inputs with valid tokens")
        if self.padded and valid_BS.all():
            raise ValueError(
                f"{' and '.join(name for name in (self.valid, self.lengths) if name)} leave no "
                "padding to probe; give inputs with padded places, or declare no valid and lengths"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; use a number between 0 and 1")
        for probe in self.probes or ():
            if len(probe) != 2 or not all(0 <= i < n for i, n in zip(probe, shape, strict=True)):
                raise ValueError(
                    f"probe {probe} is no (row, token) of tokens of shape {shape}; use rows below "
                    f"{shape[0]} and tokens below {shape[1]}"
                )

    def _check_mesh(self, mesh: Mesh) -> None:
        for kind, axis in (
            ("seq_axis", self.seq_axis),
            *(("batch_axes", axis) for axis in self.batch_axes_of(mesh)),
        ):
            if axis not in mesh.shape:
                axes = ", ".join(map(repr, mesh.axis_names))
                raise ValueError(
                    f"{kind} {axis!r} is no axis of the mesh, which has {axes}; name one of them"
                )
        if any(d.process_index != jax.process_index() for d in mesh.devices.flat):
            raise ValueError(
                "the mesh has devices of other processes; verify on a mesh of one process's own"
            )

    def _check_tokens(self) -> None:
        if not isinstance(self.inputs, dict):
            raise ValueError(
                f"inputs is a {type(self.inputs).__name__}; give a dict of arrays by name"
            )
        tokens_BS = self._input("tokens", self.tokens)
        if tokens_BS.ndim != 2 or not np.issubdtype(tokens_BS.dtype, np.integer):
            raise ValueError(
                f"inputs[{self.tokens!r}] is {tokens_BS.dtype} of shape {tokens_BS.shape}; tokens "
                "must be integers of [B, S], because the probes exchange one id for another"
            )
        if tokens_BS.size == 0 or tokens_BS.min() == tokens_BS.max():
            raise ValueError(
                f"inputs[{self.tokens!r}] of shape {tokens_BS.shape} holds fewer than two "
                "different ids, so a probe cannot change one; give tokens that differ"
            )

    def _check_input(
        self, keyword: str, name: str | None, shape: tuple[int, ...], kind: type
    ) -> None:
        if name is None:
            return
        found = self._input(keyword, name)
        if found.shape != shape or not np.issubdtype(found.dtype, kind):
            wanted = "bool" if kind is np.bool_ else "integers"
            raise ValueError(
                f"{keyword} {name!r} is {found.dtype} of shape {found.shape}; give {wanted} of "
                f"shape {shape}"
            )

    def _input(self, keyword: str, name: str) -> np.ndarray:
        if name not in self.inputs:
            raise ValueError(
                f"{keyword} {name!r} is not in inputs, which has "
                f"{', '.join(map(repr, self.inputs)) or 'nothing'}; name one of its arrays"
            )
        return np.asarray(self.inputs[name])
