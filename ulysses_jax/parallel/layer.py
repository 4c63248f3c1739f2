"""Sequence-parallel attention as one function for any model: in global view or a manual region."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.jax_nn import from_jax_nn
from ulysses_jax.attention.select import LocalAttention, attention_function
from ulysses_jax.attention.shapes import attention_sizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.head_exchange import NO_LSE
from ulysses_jax.parallel.region import (
    DEFAULT_BATCH_AXES,
    Region,
    check_devices,
    index_over,
    region_of,
)
from ulysses_jax.parallel.ulysses import Exchange, attend_in_region, check_exchange

_Bound: TypeAlias = int | Int[Array, ""] | None
_Side: TypeAlias = int | Literal["traced"] | None
_Window: TypeAlias = tuple[_Side, _Side] | None
_Results: TypeAlias = tuple[Float[Array, "B S H D"], Float32[Array, "B H S"] | None]


@overload
def ulysses_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mesh: Mesh | AbstractMesh | None = ...,
    seq_axis: str = ...,
    batch_axes: str | Sequence[str] = ...,
    head_axes: str | Sequence[str] = ...,
    is_causal: bool = ...,
    window: tuple[_Bound, _Bound] | None = ...,
    q_segment_ids: Int[Array, "B S"] | None = ...,
    kv_segment_ids: Int[Array, "B T"] | None = ...,
    kv_lengths: Int[Array, " B"] | None = ...,
    block_layout: BlockLayout | None = ...,
    mask: Bool[Array, "#B #H #S #T"] | None = ...,
    bias: Float[Array, "#B #H #S #T"] | None = ...,
    scale: float | None = ...,
    dropout_rate: float = ...,
    dropout_rng: PRNGKeyArray | None = ...,
    attention: str | Callable[..., Array] = ...,
    *,
    return_lse: Literal[True],
    broadcast_dropout: bool = ...,
    contiguous_segments: bool = ...,
    exchange: Exchange = ...,
    chunks: int = ...,
) -> tuple[Float[Array, "B S H D"], Float32[Array, "B H S"]]: ...


@overload
def ulysses_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mesh: Mesh | AbstractMesh | None = ...,
    seq_axis: str = ...,
    batch_axes: str | Sequence[str] = ...,
    head_axes: str | Sequence[str] = ...,
    is_causal: bool = ...,
    window: tuple[_Bound, _Bound] | None = ...,
    q_segment_ids: Int[Array, "B S"] | None = ...,
    kv_segment_ids: Int[Array, "B T"] | None = ...,
    kv_lengths: Int[Array, " B"] | None = ...,
    block_layout: BlockLayout | None = ...,
    mask: Bool[Array, "#B #H #S #T"] | None = ...,
    bias: Float[Array, "#B #H #S #T"] | None = ...,
    scale: float | None = ...,
    dropout_rate: float = ...,
    dropout_rng: PRNGKeyArray | None = ...,
    attention: str | Callable[..., Array] = ...,
    return_lse: Literal[False] = ...,
    *,
    broadcast_dropout: bool = ...,
    contiguous_segments: bool = ...,
    exchange: Exchange = ...,
    chunks: int = ...,
) -> Float[Array, "B S H D"]: ...


def ulysses_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mesh: Mesh | AbstractMesh | None = None,
    seq_axis: str = "seq",
    batch_axes: str | Sequence[str] = DEFAULT_BATCH_AXES,
    head_axes: str | Sequence[str] = (),
    is_causal: bool = False,
    window: tuple[_Bound, _Bound] | None = None,
    q_segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    block_layout: BlockLayout | None = None,
    mask: Bool[Array, "#B #H #S #T"] | None = None,
    bias: Float[Array, "#B #H #S #T"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    attention: str | Callable[..., Array] = "auto",
    return_lse: bool = False,
    *,
    broadcast_dropout: bool = False,
    contiguous_segments: bool = False,
    exchange: Exchange = "auto",
    chunks: int = 1,
) -> Float[Array, "B S H D"] | tuple[Float[Array, "B S H D"], Float32[Array, "B H S"]]:
    """Attention over sequences that a mesh axis splits, exactly as one device would compute it.

    An all-to-all over `seq_axis` turns part of the sequence into part of the heads, `attention`
    runs on whole sequences, and a second all-to-all turns its output back (paper, section 3.1).
    Shapes, head grouping and the alignment of masks are those of `jax.nn.dot_product_attention`.

    In global view, in `jax.jit` or eagerly, the arrays are whole, and the result lies split over
    the mesh: [B over `batch_axes`, S over `seq_axis`, H over `head_axes`]. In a `shard_map` where
    `seq_axis` is manual, q, k and v are the device's parts, all of one length; what describes the
    pairs is of the device's rows and heads but of whole sequences; the dropout key is the same
    everywhere. Axes in `batch_axes` and `head_axes` that are manual there are taken to split rows
    and heads, so that dropout and layouts count them globally. Without a mesh, or where the axis
    has one device, it is plain attention.

    Nothing has to divide anything. Sequences are padded; heads are spread as `HeadPlan` says, which
    is printed once, with a warning where padding makes more than 1.5 × the work; a batch or heads
    that an axis does not divide are computed alike by all its parts, which is printed too.

    Args:
      q: [B, S, H, D] queries.
      k, v: [B, T, K, D] keys and values; H is a multiple of K, query head i uses head i // (H/K).
      mesh: a mesh with `seq_axis`. None: that of `jax.set_mesh`, or the one that q is known to lie
        on, or none.
      seq_axis, batch_axes, head_axes: names of its axes. 'data' may be missing from the mesh.
      is_causal: query i attends to keys j <= i, both counted from 0.
      window: (left, right), keys on each side of the query; None is a side without limit.
      q_segment_ids: [B, S] integers; a query attends to keys of its own id.
      kv_segment_ids: [B, T] integers; None: those of the queries.
      kv_lengths: [B] integers; only the first `kv_lengths[b]` keys of row b exist.
      block_layout: a static table of attended blocks, for all heads or each.
      mask: [B|1, H|1, S|1, T|1] booleans, True where attended.
      bias: [B|1, H|1, S|1, T|1], added to the scaled scores; has a gradient.
      scale: factor of the scores, a Python number; D^(−1/2) by default.
      dropout_rate: probability with which a softmax weight is dropped.
      dropout_rng: its key. Which weights are dropped depends on no mesh.
      attention: a name (see `attention_function`), or a function with the signature of
        `jax.nn.dot_product_attention`, which is given what it has keywords for.
      return_lse: also return the log-sum-exp of the scaled scores before dropout.
      broadcast_dropout: all rows and heads drop the same weights, as Flax does by default.
      contiguous_segments: promises that no segment id comes back after another one in a row, which
        more kernels can do.
      exchange: `all_to_all`; `halo`: for self-attention in a static window, fetches just the keys
        outside a device's own part; `auto`: whichever of them moves less.
      chunks: groups of heads, exchanged one after the other beside the attention of the one
        before; at most two groups are whole at a time. A divisor of a device's query heads.

    Returns:
      [B, S, H, D] in the dtype of q, and with `return_lse` [B, H, S] in float32. A query with
      nothing to attend to gives 0 and −inf, and has no gradient.

    Raises:
      ValueError: shapes, axes or options do not fit, or an array was put on other devices.
      NotImplementedError: the kernel asked for by name cannot do this call.

    Example:
      >>> import jax.numpy as jnp
      >>> from ulysses_jax import make_mesh, ulysses_attention
      >>> q, kv = jnp.ones((2, 12, 6, 8)), jnp.ones((2, 12, 2, 8))
      >>> ulysses_attention(q, kv, kv, mesh=make_mesh(2, 4), is_causal=True).shape
      (2, 12, 6, 8)
    """
    check_exchange(exchange, chunks)
    sizes = attention_sizes(q, k, v)
    region = region_of(q, mesh, seq_axis, batch_axes, head_axes)
    spec = AttentionSpec(
        causal=is_causal,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=kv_lengths,
        window=window,
        contiguous_segments=contiguous_segments,
        block_layout=block_layout,
        mask=mask,
        bias=bias,
        dropout=_dropout(dropout_rate, dropout_rng, broadcast_dropout),
    )
    parts = region.ways if region.seq is not None and not region.splits_seq else 1
    lengths = parts * sizes.q_len, parts * sizes.kv_len
    spec.check(sizes.batch, *lengths, sizes.heads)
    check_devices(
        region, q=q, k=k, v=v, mask=mask, bias=bias, q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids, kv_lengths=kv_lengths,
    )  # fmt: skip
    static, spec = _split_window(spec)
    call = _Call(
        region=region,
        attention=attention,
        scale=_scale(scale, sizes.head_dim),
        kv_heads=sizes.kv_heads,
        lengths=lengths,
        window=static,
        exchange=exchange,
        chunks=chunks,
        return_lse=return_lse,
    )
    # Compiled as a whole also where it is called eagerly: a region would run one operation at a
    # time. In a region there is nothing to compile.
    run = _compiled if region.made or region.seq is None else _Call.__call__
    out, lse = run(call, q, k, v, spec)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


@dataclass(frozen=True)
class _Call:
    """The static part of a call.

    `window` holds what is known of it when compiling; a side that is not stays in the spec, which
    goes with the arrays and would make tracers of all.
    """

    region: Region
    attention: str | Callable[..., Array]
    scale: float
    kv_heads: int
    lengths: tuple[int, int]
    window: _Window
    exchange: Exchange
    chunks: int
    return_lse: bool

    def __call__(self, q: Array, k: Array, v: Array, spec: AttentionSpec) -> _Results:
        region = self.region
        if not region.made:
            return self._in_region(q, k, v, spec)
        tokens = region.tokens()
        kv_tokens = self._kv_tokens()
        specs = self._spec_of(spec, q)
        # JAX 0.10 gives residuals of a nested region the axes of the outer one too, and then fails
        # to lower them. Inputs are no such residuals, so the backward pass starts from these.
        run = jax.checkpoint(self._in_region) if region.nested else self._in_region
        inside = jax.shard_map(
            run,
            mesh=region.mesh,
            in_specs=(tokens, kv_tokens, kv_tokens, specs),
            out_specs=(tokens, PartitionSpec(tokens[0], tokens[2], tokens[1]))
            if self.return_lse
            else (tokens, None),
            axis_names=set(region.made),
            # A loop or Pallas kernel written for one device does not say which axes it varies over.
            # Within a region that checks it, its gradients would be refused.
            check_vma=isinstance(self.attention, str) or region.nested,
        )
        q = self._padded(q, tokens)
        k, v = self._padded(k, kv_tokens), self._padded(v, kv_tokens)
        spec = jax.tree.map(region.reshard, spec, specs)
        out, lse = inside(q, k, v, spec)
        if out.shape[1] == self.lengths[0]:
            return out, lse
        whole = PartitionSpec(tokens[0], None, tokens[2])
        out = region.reshard(out, whole)[:, : self.lengths[0]]
        if lse is not None:
            whole = PartitionSpec(tokens[0], tokens[2])
            lse = region.reshard(lse, whole)[:, :, : self.lengths[0]]
        return out, lse

    def _in_region(self, q: Array, k: Array, v: Array, spec: AttentionSpec) -> _Results:
        region = self.region
        spec = _joined_window(self.window, spec)
        if spec.dropout is not None:
            spec = dataclasses.replace(spec, first_row=index_over(region.rows) * q.shape[0])
        if spec.dropout is not None or spec.block_layout is not None:
            spec = dataclasses.replace(spec, first_head=index_over(region.heads) * q.shape[2])
        local = self._local()
        if region.seq is None:
            out, lse = local(q, k, v, spec, self.scale)
        else:
            if region.made:
                k, v = self._own_kv(q, k, v)
            out, lse = attend_in_region(
                q, k, v, spec, local=local, axis=region.seq, scale=self.scale,
                lengths=self.lengths, exchange=self.exchange, chunks=self.chunks,
                return_lse=self.return_lse,
            )  # fmt: skip
        if self.return_lse and lse is None:
            raise ValueError(NO_LSE)
        return out, lse if self.return_lse else None

    def _local(self) -> LocalAttention:
        if isinstance(self.attention, str):
            return attention_function(self.attention, self.region.platform)
        return from_jax_nn(self.attention)

    def _kv_tokens(self) -> PartitionSpec:
        """Of k and v: over the head axes only where these divide their heads too."""
        tokens = self.region.tokens()
        return tokens if self.kv_heads % self.region.head_ways == 0 else PartitionSpec(*tokens[:2])

    def _own_kv(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """The key/value heads of this device's query heads, where the head axes split only q."""
        made = self.region.own(self.region.heads)
        if made is None or self.kv_heads % self.region.head_ways == 0:
            return k, v
        own, queries = q.shape[2], q.shape[2] * self.region.head_ways // k.shape[2]
        share = math.gcd(own, queries)
        first = index_over(made) * own
        used = [(first + slot) // queries for slot in range(0, own, share)]

        def pick(x: Array) -> Array:
            return jnp.concatenate(
                [lax.dynamic_slice_in_dim(x, kv, 1, axis=2) for kv in used], axis=2
            )

        return pick(k), pick(v)

    def _padded(self, x: Array, spec: PartitionSpec) -> Array:
        """`x` [B, S, H, D] made longer, so that every device has a part of the same length."""
        more = -x.shape[1] % self.region.ways if self.region.splits_seq else 0
        if more:
            x = self.region.reshard(x, PartitionSpec(spec[0], None, *spec[2:]))
            x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
        return self.region.reshard(x, spec)

    def _spec_of(self, spec: AttentionSpec, q: Array) -> AttentionSpec:
        """Where the arrays of `spec` lie: split with the batch and the head axes, else whole."""
        rows, heads = self.region.own(self.region.rows), self.region.own(self.region.heads)

        def of_pairs(x: Array | None) -> PartitionSpec | None:
            if x is None:
                return None
            return PartitionSpec(
                rows if x.shape[0] == q.shape[0] else None,
                heads if x.shape[1] == q.shape[2] else None,
            )

        def of_rows(x: Array | None) -> PartitionSpec | None:
            return None if x is None else PartitionSpec(rows)

        whole = jax.tree.map(lambda _: PartitionSpec(), spec)
        return dataclasses.replace(
            whole,
            q_segment_ids=of_rows(spec.q_segment_ids),
            kv_segment_ids=of_rows(spec.kv_segment_ids),
            kv_lengths=of_rows(spec.kv_lengths),
            mask=of_pairs(spec.mask),
            bias=of_pairs(spec.bias),
        )


_compiled = jax.jit(_Call.__call__, static_argnums=0)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"scale is {scale}, but it is compiled in: give a Python number")
    return float(scale)


def _dropout(rate: float, key: PRNGKeyArray | None, broadcast: bool) -> Dropout | None:
    if isinstance(rate, int | float) and rate == 0:
        return None
    if key is None:
        raise ValueError(
            f"dropout_rate is {rate}, but dropout_rng is None: give a key, as from jax.random.key"
        )
    return Dropout(rate=rate, key=key, broadcast=broadcast)


def _split_window(spec: AttentionSpec) -> tuple[_Window, AttentionSpec]:
    """What is known of the window when compiling, and the spec with the rest of it."""
    if spec.window is None:
        return None, spec

    def known(side: _Bound) -> _Side:
        if side is None:
            return None
        return int(side) if isinstance(side, int | np.integer) else "traced"

    left, right = spec.window
    static = known(left), known(right)
    rest = left if static[0] == "traced" else None, right if static[1] == "traced" else None
    return static, dataclasses.replace(spec, window=rest)


def _joined_window(static: _Window, spec: AttentionSpec) -> AttentionSpec:
    """The inverse of `_split_window`."""
    if static is None or spec.window is None:
        return spec
    left, right = (
        rest if known == "traced" else known
        for known, rest in zip(static, spec.window, strict=True)
    )
    return dataclasses.replace(spec, window=(left, right))
