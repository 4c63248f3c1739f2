"""Splash attention: its windows, interpreted on the CPU, against the definition; its refusals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

from ulysses_jax.attention import splash
from ulysses_jax.attention.spec import AttentionSpec

Run = Callable[..., dict[str, np.ndarray]]
Check = Callable[..., None]
interpreted = partial(splash.attend, interpret=True)


def test_blocks_outside_the_window_are_skipped_and_the_rest_is_exact(
    monkeypatch: pytest.MonkeyPatch,
    differentiated: Callable[..., Run],
    definition: Run,
    assert_equal: Check,
    cases: dict[str, Any],
) -> None:
    monkeypatch.setattr(splash, "_LARGEST_BLOCK", 128)
    ids = np.repeat(np.array([[5, 2, 5]], np.int32), [150, 40, 200], axis=1)
    spec = AttentionSpec(q_segment_ids=ids, window=(70, 9))
    arrays = cases["causal"]._replace(sizes=(1, 390, 390, 1, 1, 4), spec=spec).arrays()
    actual = jax.jit(lambda arrays: differentiated(interpreted)(arrays, spec))(arrays)
    assert_equal(actual, definition(arrays, spec), 1e-5)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (0, 5), (7, 2), (40, 40)])
def test_the_band_sorts_blocks_as_its_pairs_do(window: tuple[int, int]) -> None:
    shape = (24, 18)
    band = splash._Band(shape, window, offset=0)
    pairs = mask_lib.LocalMask(shape, window, offset=0)[0:24, 0:18]
    for i, j in np.ndindex(6, 6):
        block = slice(4 * i, 4 * i + 4), slice(3 * j, 3 * j + 3)
        assert band[block].any() == pairs[block].any()
        assert band[block].all() == pairs[block].all()


@pytest.mark.parametrize(
    ("dtype", "dim", "spec", "message"),
    [
        ("float16", 128, AttentionSpec(), "bfloat16 or float32, not float16"),
        ("bfloat16", 96, AttentionSpec(), "multiple of 128 up to 256, not 96"),
        ("float32", 64, AttentionSpec(window=(np.array(3), 0)), "window is traced"),
        ("float32", 64, AttentionSpec(mask=np.ones((1, 1, 1, 1), bool)), "AttentionSpec.mask"),
    ],
)
def test_what_splash_cannot_do_is_refused_with_the_reason(
    dtype: str, dim: int, spec: AttentionSpec, message: str
) -> None:
    q = jnp.zeros((1, 8, 1, dim), dtype)
    with pytest.raises(NotImplementedError, match=message):
        splash.attend(q, q, q, spec, 1.0)
