"""Pallas GPU attention: its kernels, interpreted on the CPU, against the definition; refusals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention import pallas
from ulysses_jax.attention.spec import AttentionSpec

Run = Callable[..., dict[str, np.ndarray]]
Check = Callable[..., None]
IDS = np.stack([np.resize([4, 4, 1], 137), np.repeat([7, 0, 7], [100, 30, 7])]).astype(np.int32)
LENGTHS = np.array([3], np.int32)


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(q_segment_ids=IDS), AttentionSpec(causal=True)],
    ids=["recurring segments", "causal"],
)
def test_results_and_gradients_equal_the_definition_for_prime_lengths(
    differentiated: Callable[..., Run],
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
    spec: AttentionSpec,
) -> None:
    arrays = cases["causal"]._replace(sizes=(2, 137, 137, 2, 2, 8), spec=spec).arrays()
    compute = jax.jit(differentiated(partial(pallas.attend, interpret=True)))
    assert_equal(compute(arrays, spec), definition(arrays, spec), 1e-5)


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
            AttentionSpec(q_segment_ids=IDS[:1, :8], kv_segment_ids=IDS[:1, :8]),
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
