"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half against half like Llama."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x_BsHD: Float[Array, "B s H D"], positions_Bs: Int[Array, "B s"], theta: float
) -> Float[Array, "B s H D"]:
    """Rotates each head's pairs (i, i + D/2) by the angle position · theta^(−2i/D).

    Positions are global, never those of a shard (they are data here, so a shard cannot get it
    wrong). Angles are float32: bfloat16 positions would collide above 256.
    """
    half = x_BsHD.shape[-1] // 2
    frequency_d = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_Bs1d = positions_Bs[:, :, None, None].astype(jnp.float32) * frequency_d
    cos, sin = jnp.cos(angle_Bs1d), jnp.sin(angle_Bs1d)
    first, second = jnp.split(x_BsHD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BsHD.dtype)
