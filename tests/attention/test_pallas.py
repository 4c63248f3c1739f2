"""Pallas GPU attention: what it refuses, and why. `test_implementations` has its results."""

import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention import pallas
from ulysses_jax.attention.spec import AttentionSpec

IDS = np.array([[4, 4, 1, 4, 4, 1, 4, 4]], np.int32)
LENGTHS = np.array([3], np.int32)


@pytest.mark.parametrize(
    ("sizes", "dtype", "spec", "message"),
    [
        ((8, 8, 2, 2, 16), "float32", AttentionSpec(), "bfloat16 or float16, not float32"),
        ((8, 8, 2, 2, 12), "bfloat16", AttentionSpec(), "multiple of 8 up to 128, not 12"),
        ((8, 8, 2, 2, 256), "bfloat16", AttentionSpec(), "multiple of 8 up to 128, not 256"),
        ((8, 8, 2, 1, 16), "bfloat16", AttentionSpec(), "each query head, not 1 for 2"),
        ((8, 9, 2, 2, 16), "bfloat16", AttentionSpec(), "as many queries as keys, not 8 and 9"),
        ((8, 8, 1, 1, 8), "bfloat16", AttentionSpec(kv_lengths=LENGTHS), "kv_lengths"),
        ((8, 8, 1, 1, 8), "bfloat16", AttentionSpec(window=(1, 1)), "AttentionSpec.window"),
        (
            (8, 8, 1, 1, 8),
            "bfloat16",
            AttentionSpec(q_segment_ids=IDS, kv_segment_ids=IDS),
            "kv_segment_ids",
        ),
        (
            (8, 8, 1, 1, 8),
            "bfloat16",
            AttentionSpec(bias=np.zeros((1, 1, 1, 1), np.float32)),
            "AttentionSpec.bias",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_the_reason(
    sizes: tuple[int, ...], dtype: str, spec: AttentionSpec, message: str
) -> None:
    q_len, kv_len, heads, kv_heads, dim = sizes
    q = jnp.zeros((1, q_len, heads, dim), dtype)
    k = jnp.zeros((1, kv_len, kv_heads, dim), dtype)
    with pytest.raises(NotImplementedError, match=message):
        pallas.attend(q, k, k, spec, 1.0)
