"""Padding of one axis to whole blocks."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def pad_to_multiple(
    x: Shaped[Array, "..."], axis: int, multiple: int, value: float | None = 0
) -> Shaped[Array, "..."]:
    """Pads the end of `axis` with `value`, or with its last entries where that is None."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    if value is None:
        return jnp.pad(x, widths, mode="edge")
    return jnp.pad(x, widths, constant_values=value)
