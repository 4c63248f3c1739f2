"""Local attention by a user's own function, of the signature of `jax.nn.dot_product_attention`."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from ulysses_jax.attention.key_ranges import lengths_within
from ulysses_jax.attention.pairs import attended_pairs
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.shapes import AttentionSizes, attention_sizes
from ulysses_jax.attention.spec import AttentionSpec

_CAUSAL, _WINDOW, _LENGTHS = "is_causal", "local_window_size", "key_value_seq_lengths"
_KEYWORDS = frozenset({_CAUSAL, _WINDOW, _LENGTHS, "mask", "bias", "scale"})
# Fields of a spec that a mask can say, and the keyword that says them without one.
_SAYABLE = {
    "causal": _CAUSAL,
    "window": _WINDOW,
    "kv_lengths": _LENGTHS,
    "q_segment_ids": None,
    "block_layout": None,
    "mask": None,
}


def from_jax_nn(function: Callable[..., Array]) -> LocalAttention:
    """Local attention by `function`, which is called as `jax.nn.dot_product_attention` is.

    A call passes only the keywords that it needs: `is_causal`, `key_value_seq_lengths` [B],
    `local_window_size` (two ints), `mask` (bool [B|1, h|1, S, T]), `bias`, and `scale` unless it
    is D^(−1/2). What has no keyword, or none that the function takes, goes into a dense mask:
    segments, block layouts, traced windows. So a function may take some of them only, or none;
    the calls that need more are refused.

    The function never meets a query with nothing to attend to: it is shown keys, and its result
    is replaced by a 0 that passes no gradient on. Where a bias is -inf it gets a finite one so
    low that the weight is 0.

    Args:
        function: takes q [B, S, h, D], k, v [B, T, g, D] and keywords; query head i uses
            key/value head `i // (h // g)`. Keywords that a `functools.partial` fixes stay so; a
            function with `**kwargs` is given any of the above, and must not ignore them.

    Returns:
        Local attention whose second result, the log-sum-exp, is None. It raises
        NotImplementedError, naming the function and the keyword, for a call that needs a keyword
        which the function does not take, and for dropout; ValueError if the shapes do not fit
        together, or the result is not one array of the shape of q.

    Raises:
        ValueError: `function` cannot be called.

    Example:
        >>> import jax
        >>> from ulysses_jax import AttentionSpec
        >>> from ulysses_jax.attention.jax_nn import from_jax_nn
        >>> attend = from_jax_nn(jax.nn.dot_product_attention)
        >>> q = k = v = jax.numpy.ones((1, 5, 2, 4))
        >>> out, _ = attend(q, k, v, AttentionSpec(causal=True), scale=0.5)
        >>> out.shape
        (1, 5, 2, 4)
    """
    if not callable(function):
        raise ValueError(
            f"attention is {function!r}: use a name, or a function that is called as "
            "jax.nn.dot_product_attention is"
        )
    accepted = _Accepted.by(function)

    def attend(
        q_BShD: Float[Array, "B S h D"],
        k_BTgD: Float[Array, "B T g D"],
        v_BTgD: Float[Array, "B T g D"],
        spec: AttentionSpec,
        scale: float,
    ) -> tuple[Float[Array, "B S h D"], None]:
        sizes = attention_sizes(q_BShD, k_BTgD, v_BTgD)
        spec.check(sizes.batch, sizes.q_len, sizes.kv_len, sizes.heads)
        keywords, empty_BhS = _lowered(spec, sizes, accepted)
        if not math.isclose(scale, sizes.head_dim**-0.5):
            accepted.demand("scale", f"a scale of {scale}, not D^(−1/2),")
            keywords["scale"] = scale
        q_BShD = checkpoint_name(q_BShD, "attn_q")
        k_BTgD = checkpoint_name(k_BTgD, "attn_k")
        v_BTgD = checkpoint_name(v_BTgD, "attn_v")
        out_BShD = function(q_BShD, k_BTgD, v_BTgD, **keywords)
        found = getattr(out_BShD, "shape", f"a {type(out_BShD).__name__}")
        if found != q_BShD.shape:
            raise ValueError(
                f"attention {accepted.name} returned {found}, but it is to return one array of "
                f"the shape of q, {q_BShD.shape}"
            )
        if empty_BhS is not None:
            out_BShD = jnp.where(empty_BhS.swapaxes(1, 2)[..., None], 0, out_BShD)
        return checkpoint_name(out_BShD.astype(q_BShD.dtype), "attn_out"), None

    return attend


@dataclasses.dataclass(frozen=True)
class _Accepted:
    """The keywords that the function called `name` takes."""

    name: str
    keywords: frozenset[str]

    @classmethod
    def by(cls, function: Callable[..., Array]) -> "_Accepted":
        inner, fixed = function, set()
        while isinstance(inner, functools.partial):
            fixed |= set(inner.keywords)
            inner = inner.func
        parameters = inspect.signature(function).parameters.values()
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        taken = _KEYWORDS if any(p.kind == p.VAR_KEYWORD for p in parameters) else named
        name = getattr(inner, "__name__", type(inner).__name__)
        return cls(name, (_KEYWORDS & taken) - fixed)

    def demand(self, keyword: str, need: str, instead: str = "") -> None:
        if keyword not in self.keywords:
            raise NotImplementedError(
                f"attention {self.name} does not take the keyword {keyword!r}{instead}, which "
                f"{need} needs: give the function that keyword, or use attention='auto'"
            )


def _lowered(
    spec: AttentionSpec, sizes: AttentionSizes, accepted: _Accepted
) -> tuple[dict[str, Any], Bool[Array, "#B #h S"] | None]:
    """Keywords that show every query some key, and which queries have none in truth."""
    if spec.dropout is not None:
        raise NotImplementedError(
            f"attention {accepted.name} cannot apply AttentionSpec.dropout: functions of jax.nn's "
            "signature have no keyword for it; use attention='auto', or no dropout"
        )
    keywords, rest = _said_directly(spec, sizes, accepted.keywords)
    masked = False
    for field, keyword in _SAYABLE.items():
        value = getattr(rest, field)
        if value is not None and value is not False:
            instead = f", or {keyword!r}" if keyword and keyword not in accepted.keywords else ""
            accepted.demand("mask", f"AttentionSpec.{field}", instead)
            masked = True
    if spec.bias is not None:
        accepted.demand("bias", "AttentionSpec.bias")
        lowest = float(jnp.finfo(spec.bias.dtype).min) / 2
        keywords["bias"] = jnp.where(spec.bias == -jnp.inf, lowest, spec.bias)

    if masked or spec.bias is not None:
        pairs_BhST = attended_pairs(spec, sizes)
        if spec.bias is not None:
            pairs_BhST &= spec.bias != -jnp.inf
        empty_BhS = ~jnp.any(pairs_BhST, axis=-1)
        if masked:
            keywords["mask"] = attended_pairs(rest, sizes) | empty_BhS[..., None]
        return keywords, empty_BhS
    if spec.kv_lengths is None:
        return keywords, None
    empty_B11 = (spec.kv_lengths <= 0)[:, None, None]
    return keywords, jnp.broadcast_to(empty_B11, (sizes.batch, 1, sizes.q_len))


def _said_directly(
    spec: AttentionSpec, sizes: AttentionSizes, accepted: frozenset[str]
) -> tuple[dict[str, Any], AttentionSpec]:
    """Causality, window and lengths as keywords, as far as each query keeps a key, and the rest."""
    keywords: dict[str, Any] = {}
    rest = dataclasses.replace(spec, bias=None)
    static = all(side is None or isinstance(side, int | np.integer) for side in spec.window or ())
    left, right = (spec.window or (None, None)) if static else (None, None)
    # A side that reaches over the ends is none. Without this, sums of position and side overflow.
    left = None if left is None or left >= sizes.q_len - 1 else int(left)
    right = None if right is None or right >= sizes.kv_len - 1 else int(right)
    # A window that ends at the query is causal. cuDNN asks to be told so.
    if (spec.causal or right == 0) and _CAUSAL in accepted:
        keywords[_CAUSAL], right = True, None
        rest = dataclasses.replace(rest, causal=False)
    if spec.kv_lengths is not None and _LENGTHS in accepted:
        # Where a length is 0, one key is shown.
        lengths_B = jnp.maximum(lengths_within(spec.kv_lengths, sizes.kv_len), 1)
        keywords[_LENGTHS] = lengths_B.astype(jnp.int32)
        rest = dataclasses.replace(rest, kv_lengths=None)
    if not static:
        return keywords, rest
    if left is None and right is None:
        return keywords, dataclasses.replace(rest, window=None)
    # Past the last key and the left side, a query has none; lengths are known too late to tell.
    always = left is None or (_LENGTHS not in keywords and left >= sizes.q_len - sizes.kv_len)
    if always and _WINDOW in accepted:
        if right is None:
            right = 0 if _CAUSAL in keywords else sizes.kv_len
        keywords[_WINDOW] = (sizes.q_len if left is None else left, right)
        rest = dataclasses.replace(rest, window=None)
    return keywords, rest
