"""The two all-to-alls of Ulysses: all heads of part of the sequence ↔ part of the heads, whole."""

from jax import lax
from jaxtyping import Array, Shaped


def seq_to_heads(x_BsHD: Shaped[Array, "B s H D"], axis: str) -> Shaped[Array, "B S h D"]:
    """Gathers the sequence and scatters the heads over the manual mesh axis `axis`.

    Device i of P gives its tokens [i·s, (i+1)·s) and receives heads [i·h, (i+1)·h), h = H/P, of
    every token, in order. P must divide H. Transposes to `heads_to_seq` (paper, section 3.1).
    """
    return lax.all_to_all(x_BsHD, axis, split_axis=2, concat_axis=1, tiled=True)


def heads_to_seq(x_BShD: Shaped[Array, "B S h D"], axis: str) -> Shaped[Array, "B s H D"]:
    """Scatters the sequence and gathers the heads: the inverse of `seq_to_heads`.

    P must divide S.
    """
    return lax.all_to_all(x_BShD, axis, split_axis=1, concat_axis=2, tiled=True)
