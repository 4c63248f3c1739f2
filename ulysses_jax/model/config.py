"""What a model looks like: the `model.*` keys and the complete architecture they resolve to."""

import difflib
import math
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from ulysses_jax.model.presets import PRESETS, Mlp, Norm, Positions

Dtype = Literal["bfloat16", "float32"]
Attention = Literal["auto", "blockwise", "reference", "cudnn", "tokamax", "pallas", "splash"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class ParameterCounts:
    """Scalar parameters of each part of a model, before any padding for a mesh."""

    embedding: int
    """Token table and, where positions are learned, the position table."""
    layer: int
    """One transformer layer."""
    num_layers: int
    """Layers, all of the same size."""
    head: int
    """Final norm and, where the head is untied, the output matrix."""

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.embedding + self.num_layers * self.layer + self.head


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A complete model shape: every choice made, every width known.

    Raises ValueError where the choices contradict each other.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int
    positions: Positions
    norm: Norm
    mlp: Mlp
    biases: bool
    tied_head: bool
    dropout_rate: float
    rope_theta: float
    norm_eps: float
    dtype: Dtype
    attention: Attention

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "embed_dim",
            "mlp_dim",
            "max_seq_len",
        ):
            _require_positive(name, getattr(self, name))
        _require_choice("dtype", self.dtype, get_args(Dtype))
        _require_choice("attention", self.attention, get_args(Attention))
        _require_choice("positions", self.positions, get_args(Positions))
        _require_choice("norm", self.norm, get_args(Norm))
        _require_choice("mlp", self.mlp, get_args(Mlp))
        if self.num_heads * self.head_dim != self.embed_dim:
            raise ValueError(
                f"model.embed_dim is {self.embed_dim}, which model.num_heads = {self.num_heads} "
                f"does not divide; use {nearest_multiples(self.embed_dim, self.num_heads)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads is {self.num_heads}, which model.num_kv_heads = "
                f"{self.num_kv_heads} does not divide; use model.num_kv_heads = "
                f"{nearest_divisors(self.num_heads, self.num_kv_heads)}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            even = nearest_multiples(self.embed_dim, 2 * self.num_heads)
            raise ValueError(
                f"model.embed_dim is {self.embed_dim}, which gives each of the {self.num_heads} "
                f"heads {self.head_dim} dimensions, but model.positions = rope rotates them in "
                f"pairs; use {even}"
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(
                f"model.dropout_rate is {self.dropout_rate}; use a number from 0 to below 1"
            )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"model.{name} is {value}; use a finite number above 0")

    def parameter_counts(self) -> ParameterCounts:
        """Counts the scalar parameters part by part."""
        embedding = self.vocab_size * self.embed_dim
        if self.positions == "learned":
            embedding += self.max_seq_len * self.embed_dim
        kv_dim = self.num_kv_heads * self.head_dim
        up_matrices = 2 if self.mlp == "swiglu" else 1
        weights = 2 * self.embed_dim * (self.embed_dim + kv_dim)
        weights += (up_matrices + 1) * self.embed_dim * self.mlp_dim
        biases = 2 * self.embed_dim + 2 * kv_dim + up_matrices * self.mlp_dim + self.embed_dim
        norm = self.embed_dim * (2 if self.norm == "layernorm" else 1)
        head = norm + (0 if self.tied_head else self.vocab_size * self.embed_dim)
        return ParameterCounts(
            embedding=embedding,
            layer=weights + (biases if self.biases else 0) + 2 * norm,
            num_layers=self.num_layers,
            head=head,
        )

    @property
    def matmul_precision(self) -> str | None:
        """Precision of matrix products, for `jax.default_matmul_precision`.

        In float32 the full one: GPUs would otherwise round the factors to 10 bits (TF32).
        """
        return "highest" if self.dtype == "float32" else None

    def num_parameters(self) -> int:
        """Scalar parameters of the whole model."""
        return self.parameter_counts().total


@dataclass(frozen=True)
class ModelConfig:
    """The model; a key left at null takes the preset's value."""

    preset: str = "quickstart"
    """Named shape: quickstart, gpt2, gpt-1.2b, gpt-7b, gpt-30b or llama3-8b."""
    vocab_size: int | None = None
    """Tokens in the vocabulary (count); every token id of the data must be below it."""
    num_layers: int | None = None
    """Transformer layers (count)."""
    num_heads: int | None = None
    """Query heads (count); must divide embed_dim."""
    num_kv_heads: int | None = None
    """Key/value heads (count); must divide num_heads."""
    embed_dim: int | None = None
    """Width of the residual stream (scalars per token)."""
    mlp_dim: int | None = None
    """Inner width of the MLP (scalars per token)."""
    dtype: Dtype = "float32"
    """Type of the computation; parameters and optimizer state are float32 always."""
    attention: Attention = "auto"
    """Local attention: cudnn, tokamax and pallas are kernels for NVIDIA GPUs, splash for TPUs;
    blockwise runs everywhere, in O(S) memory; auto takes the first that can and says which;
    reference needs O(S x S) memory and is for tests."""
    positions: Positions | None = None
    """Position information: a learned table of train.seq_len rows, or rotary (rope)."""
    norm: Norm | None = None
    """Normalisation before attention, MLP and head."""
    mlp: Mlp | None = None
    """MLP: gelu has two matrices, swiglu three."""
    biases: bool | None = None
    """Whether the projections of attention and MLP add a bias."""
    tied_head: bool | None = None
    """Whether the output matrix is the token embedding."""
    dropout_rate: float = 0.0
    """Share of activations dropped in training (0 to below 1; 0 is off)."""
    rope_theta: float | None = None
    """Base of the rotary frequencies (positions)."""
    norm_eps: float | None = None
    """Number added to the variance in every norm."""

    def architecture(self, seq_len: int) -> Architecture:
        """Resolves the preset and the overrides for sequences of `seq_len` tokens.

        Raises ValueError for an unknown preset or a shape that contradicts itself.
        """
        if self.preset not in PRESETS:
            near = difflib.get_close_matches(self.preset, PRESETS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"model.preset is {self.preset!r}; did you mean {near}? "
                f"The presets are {', '.join(PRESETS)}"
            )
        preset = PRESETS[self.preset]
        num_heads = _given(self.num_heads, preset.num_heads)
        embed_dim = _given(self.embed_dim, preset.embed_dim)
        _require_positive("num_heads", num_heads)
        return Architecture(
            vocab_size=_given(self.vocab_size, preset.vocab_size),
            num_layers=_given(self.num_layers, preset.num_layers),
            num_heads=num_heads,
            num_kv_heads=_given(self.num_kv_heads, _given(preset.num_kv_heads, num_heads)),
            embed_dim=embed_dim,
            head_dim=embed_dim // num_heads,
            mlp_dim=_given(self.mlp_dim, _given(preset.mlp_dim, 4 * embed_dim)),
            max_seq_len=seq_len,
            positions=_given(self.positions, preset.positions),
            norm=_given(self.norm, preset.norm),
            mlp=_given(self.mlp, preset.mlp),
            biases=_given(self.biases, preset.biases),
            tied_head=_given(self.tied_head, preset.tied_head),
            dropout_rate=self.dropout_rate,
            rope_theta=_given(self.rope_theta, preset.rope_theta),
            norm_eps=_given(self.norm_eps, preset.norm_eps),
            dtype=self.dtype,
            attention=self.attention,
        )


def nearest_multiples(value: int, divisor: int) -> str:
    """The positive multiples of `divisor` on either side of `value`, for an error message."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def nearest_divisors(value: int, near: int) -> str:
    """The divisors of `value` on either side of `near`, for an error message."""
    divisors = [divisor for divisor in range(1, value + 1) if value % divisor == 0]
    below = [divisor for divisor in divisors if divisor <= near][-1:]
    above = [divisor for divisor in divisors if divisor > near][:1]
    return " or ".join(str(divisor) for divisor in below + above)


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"model.{name} is {value}; use 1 or more")
    if value >= 2**31:
        raise ValueError(f"model.{name} is {value}; use {2**31 - 1} or less")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"model.{name} is {value!r}; use {' or '.join(choices)}")
