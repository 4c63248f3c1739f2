"""What a user may get wrong in an attention spec: each mistake said with its value, limit, fix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ulysses_jax.attention.dropout import Dropout


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a plain bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, but it is static: use True or False")


def check_integers(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` holds integers of exactly this shape."""
    if not _is_array(array) or array.shape != shape or not _is_integer(array):
        raise ValueError(
            f"{name} is {_described(array)}, but this call needs integers of shape {list(shape)}"
        )
    if isinstance(array, np.ndarray) and array.size:
        limits = np.iinfo(np.int32)
        for value in (array.min(), array.max()):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{name} holds {value}, which is no 32-bit integer: renumber it")


def check_segments(q_ids: Any, kv_ids: Any, batch: int, q_len: int, kv_len: int) -> None:
    """Raises ValueError unless each query and key has an id, or none has."""
    if q_ids is None:
        if kv_ids is not None:
            raise ValueError(
                "kv_segment_ids are given without q_segment_ids, so no query has a segment: "
                "give q_segment_ids too"
            )
        return
    check_integers("q_segment_ids", q_ids, (batch, q_len))
    if kv_ids is not None:
        check_integers("kv_segment_ids", kv_ids, (batch, kv_len))
    elif q_len != kv_len:
        raise ValueError(
            f"q_segment_ids alone describe self-attention, but there are {q_len} queries "
            f"and {kv_len} keys: give kv_segment_ids too"
        )


def check_contiguous(name: str, ids: Any) -> None:
    """Raises ValueError if ids known on the host break the promise of `contiguous_segments`."""
    if not isinstance(ids, np.ndarray):
        return
    for row, ids_T in enumerate(ids):
        opens = np.flatnonzero(np.diff(ids_T)) + 1
        runs, counts = np.unique(ids_T[np.append(0, opens)], return_counts=True)
        if counts.max() > 1:
            raise ValueError(
                f"{name} has id {runs[counts.argmax()]} in {counts.max()} separate runs of row "
                f"{row}, but contiguous_segments promises 1 run an id: give each run an id of its "
                "own, or leave contiguous_segments False to join them"
            )


def check_window(window: Any) -> None:
    """Raises ValueError unless `window` is None or a pair of sides."""
    if window is None:
        return
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            f"window is {window!r}, but it is a pair (left, right): use ({window!r}, 0) for that "
            "many keys before the query, and None for a side without limit"
        )
    for name, side in zip(("left", "right"), window, strict=True):
        if side is not None:
            _check_index(f"the {name} side of window", side, "use 0 or more keys, or None")


def check_offset(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is the index of a row or head."""
    _check_index(name, value, "use the global index, 0 or more")


def check_pairs(name: str, array: Any, dtype: Any, shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless `array` is of `dtype`'s kind and broadcasts to [B, h, S, T]."""
    kind = "bool" if dtype is jnp.bool_ else "floating point"
    if not _is_array(array) or not jnp.issubdtype(array.dtype, dtype) or array.ndim != 4:
        raise ValueError(
            f"{name} is {_described(array)}, but this call needs {kind} of shape {list(shape)}, "
            "where any dimension may be 1"
        )
    for axis, given, limit in zip(
        ("batch rows", "heads", "queries", "keys"), array.shape, shape, strict=True
    ):
        if given not in (1, limit):
            raise ValueError(
                f"{name} {list(array.shape)} has {given} {axis}, but this call has {limit}: give "
                f"it 1 or {limit}"
            )


def check_dropout(dropout: Any) -> None:
    """Raises ValueError unless `dropout` is None or a Dropout with one key."""
    if dropout is None:
        return
    if not isinstance(dropout, Dropout):
        raise ValueError(f"dropout is {dropout!r}: use Dropout(rate=..., key=...)")
    key = dropout.key
    if _is_array(key):
        is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
        if is_key or (key.dtype == jnp.uint32 and key.shape in ((2,), (4,))):
            return
    raise ValueError(f"the dropout key is {_described(key)}, but it is one key: use jax.random.key")


def _check_index(name: str, value: Any, fix: str) -> None:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer and not (_is_array(value) and value.shape == () and _is_integer(value)):
        raise ValueError(f"{name} is {_described(value)}, but it is one integer: {fix}")
    if isinstance(value, int | np.integer | np.ndarray) and value < 0:
        raise ValueError(f"{name} is {value}: {fix}")


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _is_integer(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.integer))


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if _is_array(value) else repr(value)
