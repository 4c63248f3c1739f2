"""Shapes that do not make an attention call are refused with the numbers that clash."""

import jax.numpy as jnp
import pytest

from ulysses_jax.attention.shapes import attention_sizes


def test_sizes_are_read_off_the_arrays() -> None:
    k = jnp.zeros((2, 5, 3, 7))
    assert attention_sizes(jnp.zeros((2, 11, 6, 7)), k, k) == (2, 11, 5, 6, 3, 7)


def test_integers_are_refused() -> None:
    x = jnp.zeros((1, 2, 1, 4))
    with pytest.raises(ValueError, match="k is int32, but attention needs floating point"):
        attention_sizes(x, x.astype(int), x)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape", "message"),
    [
        ((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8), "4 query heads cannot share 3"),
        ((2, 5, 4, 8), (2, 5, 4, 8), (2, 6, 4, 8), r"v \[2, 6, 4, 8\]"),
        ((2, 5, 4, 8), (3, 5, 4, 8), (3, 5, 4, 8), "agree in batch"),
        ((2, 5, 4, 8), (2, 5, 4, 9), (2, 5, 4, 9), "head dim"),
        ((5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8), r"q \[5, 4, 8\]"),
        ((2, 5, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8), "at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attention_sizes(jnp.zeros(q_shape), jnp.zeros(k_shape), jnp.zeros(v_shape))
