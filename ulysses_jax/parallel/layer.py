"""Sequence-parallel attention as one function for any model: in global view or a manual region."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Literal, overload

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.dropout import Dropout
from ulysses_jax.attention.key_ranges import Bound
from ulysses_jax.attention.shapes import attention_sizes
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.call import Call, Results, split_window
from ulysses_jax.parallel.region import DEFAULT_BATCH_AXES, check_devices, region_of
from ulysses_jax.parallel.ulysses import Exchange, check_exchange


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
    window: tuple[Bound | None, Bound | None] | None = ...,
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
    window: tuple[Bound | None, Bound | None] | None = ...,
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
    window: tuple[Bound | None, Bound | None] | None = None,
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
        `jax.nn.dot_product_attention`, which is given what it has keywords for. Such a function
        is compiled anew in every call outside `jax.jit`.
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
      nothing to attend to gives 0 and −inf, and has no gradient. Differentiable once, in reverse
      mode.

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
    check_devices(region, {"q": q, "k": k, "v": v}, spec)
    static, spec = split_window(spec)
    call = Call(
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
    out, lse = _runner(call)(call, q, k, v, spec)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _runner(call: Call) -> Callable[..., Results]:
    """Compiles a call as a whole also where it is eager: a region runs one operation at a time."""
    if call.region.seq is not None and not call.region.made:
        return _run  # Within a region, which is being compiled.
    if isinstance(call.attention, str):
        return _compiled
    # A function may see other values the next time, of its attributes or of what it closes over:
    # what was compiled for it is not kept.
    return lambda _, *arrays: jax.jit(lambda *inner: call.run(*inner))(*arrays)


def _run(call: Call, q: Array, k: Array, v: Array, spec: AttentionSpec) -> Results:
    return call.run(q, k, v, spec)


_compiled = jax.jit(_run, static_argnums=0)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"scale is {scale}, but it is compiled in: give a Python number")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}: use a finite number, such as head_dim**-0.5")
    return float(scale)


def _dropout(rate: float, key: PRNGKeyArray | None, broadcast: bool) -> Dropout | None:
    if isinstance(rate, numbers.Real):
        rate = float(rate)
        if rate == 0:
            return None
    if key is None:
        raise ValueError(
            f"dropout_rate is {rate}, but dropout_rng is None: give a key, as from jax.random.key"
        )
    return Dropout(rate=rate, key=key, broadcast=broadcast)
