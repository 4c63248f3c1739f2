"""`ulysses_attention` as the `attention_fn` of Flax's own attention modules, Linen and NNX."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from ulysses_jax.attention.block_layout import BlockLayout
from ulysses_jax.attention.key_ranges import Bound
from ulysses_jax.parallel.layer import ulysses_attention
from ulysses_jax.parallel.region import DEFAULT_BATCH_AXES
from ulysses_jax.parallel.ulysses import Exchange

_Precision: TypeAlias = (
    str | jax.lax.Precision | tuple[str, str] | tuple[jax.lax.Precision, jax.lax.Precision] | None
)


def make_attention_fn(
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
    scale: float | None = None,
    attention: str | Callable[..., Array] = "auto",
    *,
    contiguous_segments: bool = False,
    exchange: Exchange = "auto",
    chunks: int = 1,
) -> Callable[..., Array]:
    """An `attention_fn` that makes Flax's own attention modules sequence-parallel.

    For `nn.MultiHeadDotProductAttention` and `nn.MultiHeadAttention` of Linen and for
    `nnx.MultiHeadAttention`, with their masks, dropout, grouped heads and decoding. Parameters,
    inputs and results stay what they are, but for two things: a query with nothing to attend to
    gives 0, not the mean of all values; and dropout, whose draw depends on no mesh, drops other
    pairs than Flax does from the same key.

    Masks that a module is called with are arrays [..., S, T], those of `nn.make_causal_mask` too.
    `is_causal`, `window` and segments given here need no such memory.

    Args:
        mesh, seq_axis, batch_axes, head_axes, scale, attention, contiguous_segments, exchange,
            chunks: as `ulysses_attention` takes them.
        is_causal, window, q_segment_ids, kv_segment_ids, kv_lengths, block_layout: as
            `ulysses_attention` takes them, for every call; B are all leading dimensions together.
            They restrict further what a module passes. A call with a mask, one query and more
            keys is a step of decoding, where query 0 is not the first of the sequence:
            `is_causal` given here adds nothing to the mask of the cache then.

    Returns:
        attention_fn(query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate,
        deterministic, dtype, precision, module, ...), with every keyword of Flax's two
        `dot_product_attention`: query [..., S, H, D], key and value [..., T, K, D]; bias and mask
        broadcast to [..., H, S, T], a mask of numbers attends where it is not 0. The softmax is
        float32 whatever `dtype`. Float32 products have full precision, whatever `precision`,
        which rules only what a function given as `attention` leaves open.

        It raises ValueError for what cannot be done: weights to be sown, einsums of one's own, a
        `window` given here in a step of decoding, dropout without a key, shapes that do not fit.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> from ulysses_jax import make_attention_fn
        >>> layer = nn.MultiHeadDotProductAttention(
        ...     num_heads=2, attention_fn=make_attention_fn(is_causal=True)
        ... )
        >>> x_BSE = jnp.ones((1, 6, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x_BSE), x_BSE).shape
        (1, 6, 8)
    """
    attend: Callable[..., Any] = partial(
        ulysses_attention,
        mesh=mesh,
        seq_axis=seq_axis,
        batch_axes=batch_axes,
        head_axes=head_axes,
        window=window,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=kv_lengths,
        block_layout=block_layout,
        scale=scale,
        attention=attention,
        contiguous_segments=contiguous_segments,
        exchange=exchange,
        chunks=chunks,
    )
    always_causal = is_causal

    # Linen passes only keywords that it finds in the signature, and a `**kwargs` would lose the
    # mask; NNX passes all of its own. So each is named, in the order of Flax's functions.
    def attention_fn(
        query: Float[Array, "*B S H D"],
        key: Float[Array, "*B T K D"],
        value: Float[Array, "*B T K D"],
        bias: Float[Array, "..."] | None = None,
        mask: Shaped[Array, "..."] | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: PRNGKeyArray | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: _Precision = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Array] | None = None,
        qk_attn_weights_einsum: Callable[..., Array] | None = None,
        attn_weights_value_einsum: Callable[..., Array] | None = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
    ) -> Float[Array, "*B S H D"]:
        """See `make_attention_fn`."""
        if module is not None:
            raise ValueError(
                "sow_weights=True asks for the attention weights, which are never built as a "
                "whole: call the module without it, or leave attention_fn as it was for that call"
            )
        _refuse_products(
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if promote_dtype is None:
            dtype = jnp.result_type(query, key, value) if dtype is None else dtype
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        batch = _leading(query, key, value)
        decoding = mask is not None and query.shape[-3] == 1 < key.shape[-3]
        if decoding and window is not None:
            raise ValueError(
                f"window={window} was given to make_attention_fn, but in a step of decoding the "
                "query's position is known to the mask alone: put the window into the mask, and "
                "decode with an attention_fn made without it"
            )
        dropped = not deterministic and dropout_rate != 0.0
        with _matmul_precision(precision):
            out = attend(
                *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
                is_causal=is_causal or (always_causal and not decoding),
                mask=None if mask is None else _over_batch("mask", _attended(mask), batch),
                bias=None if bias is None else _over_batch("bias", bias, batch),
                dropout_rate=dropout_rate if dropped else 0.0,
                dropout_rng=dropout_rng if dropped else None,
                broadcast_dropout=broadcast_dropout,
            )
        return out.reshape(query.shape)

    return attention_fn


def _refuse_products(**given: Callable[..., Array] | None) -> None:
    for name, function in given.items():
        if function is not None:
            raise ValueError(
                f"{name} is {function!r}, but products of attention are computed in blocks and "
                "not by a function of one's own: leave it None, or give attention= an attention "
                "function that uses it"
            )


def _leading(*qkv: Shaped[Array, "..."]) -> tuple[int, ...]:
    """The leading dimensions, which all three share."""
    shapes = [x.shape for x in qkv]
    if min(map(len, shapes)) < 3 or len({shape[:-3] for shape in shapes}) > 1:
        q, k, v = (list(shape) for shape in shapes)
        raise ValueError(
            f"query {q}, key {k} and value {v} are to be [..., S, H, D] and twice [..., T, K, D], "
            "with the same leading dimensions"
        )
    return shapes[0][:-3]


def _attended(mask: Any) -> Bool[Array, "..."]:
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0


def _over_batch(
    name: str, pairs: Shaped[Array, "..."], batch: tuple[int, ...]
) -> Shaped[Array, "B|1 H|1 S|1 T|1"]:
    """What broadcasts to [*batch, H, S, T] with one batch dimension; what is 1 stays 1."""
    missing = len(batch) + 3 - pairs.ndim
    shape = (1,) * missing + pairs.shape
    rows, rest = shape[: len(batch)], shape[len(batch) :]
    if missing < 0 or any(n not in (1, limit) for n, limit in zip(rows, batch, strict=True)):
        raise ValueError(
            f"{name} {list(pairs.shape)} does not broadcast to the leading dimensions "
            f"{list(batch)} of the query, then heads, queries and keys"
        )
    if math.prod(rows) == 1:
        return pairs.reshape(1, *rest)
    return jnp.broadcast_to(pairs.reshape(shape), (*batch, *rest)).reshape(-1, *rest)


def _matmul_precision(precision: _Precision) -> contextlib.AbstractContextManager[Any]:
    """For the products in it that ask for no precision of their own."""
    if precision is None:
        return contextlib.nullcontext()
    both = precision if isinstance(precision, tuple) else (precision, precision)
    names = {x.name.lower() if isinstance(x, jax.lax.Precision) else x for x in both}
    if len(names) > 1:
        raise ValueError(
            f"precision is {precision!r}, but both operands of attention's products have one and "
            "the same: use one precision"
        )
    return jax.default_matmul_precision(names.pop())
