"""The two all-to-alls of Ulysses: all heads of part of the sequence ↔ part of the heads, whole.

Blocks for one device lie next to each other in what is sent, and arrive next to each other: the
collective itself moves no element within a device, and the transposes around it are ordinary ones
that XLA fuses with what is before and after. With one batch row the sequence arrives in order.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def seq_to_heads(x_BsHD: Shaped[Array, "B s H D"], axis: str) -> Shaped[Array, "B S h D"]:
    """Gathers the sequence and scatters the heads over the manual mesh axis `axis`.

    Device i of P gives its tokens [i·s, (i+1)·s) and receives heads [i·h, (i+1)·h), h = H/P, of
    every token, in order. P must divide H. Transposes to `heads_to_seq` (paper, section 3.1).

    Example:
      >>> heads = jax.shard_map(
      ...     lambda x_BsHD: seq_to_heads(x_BsHD, "seq"),
      ...     mesh=make_mesh(1, 4),
      ...     in_specs=PartitionSpec("data", "seq"),
      ...     out_specs=PartitionSpec("data", None, "seq"),
      ... )
      >>> heads(jnp.ones((1, 12, 8, 2))).addressable_shards[0].data.shape
      (1, 12, 2, 2)
    """
    (x_BShD,) = seq_to_heads_together([x_BsHD], axis)
    return x_BShD


def seq_to_heads_together(
    arrays: Sequence[Shaped[Array, "B s _ D"]], axis: str
) -> list[Shaped[Array, "B S _ D"]]:
    """`seq_to_heads` of arrays that differ only in their number of heads, in one all-to-all."""
    ways = lax.axis_size(axis)
    sent = [_by_device(x_BsHD, ways, dim=2) for x_BsHD in arrays]
    x_PBsnD = jnp.concatenate(sent, axis=3) if len(sent) > 1 else sent[0]
    x_PBsnD = lax.all_to_all(x_PBsnD, axis, split_axis=0, concat_axis=0, tiled=True)
    _, B, s, _, D = x_PBsnD.shape
    x_BSnD = x_PBsnD.transpose(1, 0, 2, 3, 4).reshape(B, ways * s, -1, D)
    received, start = [], 0
    for x_BsHD in arrays:
        stop = start + x_BsHD.shape[2] // ways
        received.append(x_BSnD[:, :, start:stop])
        start = stop
    return received


def heads_to_seq(x_BShD: Shaped[Array, "B S h D"], axis: str) -> Shaped[Array, "B s H D"]:
    """Scatters the sequence and gathers the heads: the inverse of `seq_to_heads`.

    P must divide S.

    Example:
      >>> there_and_back = jax.shard_map(
      ...     lambda x_BsHD: heads_to_seq(seq_to_heads(x_BsHD, "seq"), "seq"),
      ...     mesh=make_mesh(1, 4),
      ...     in_specs=PartitionSpec("data", "seq"),
      ...     out_specs=PartitionSpec("data", "seq"),
      ... )
      >>> x = jnp.arange(12.0 * 8).reshape(1, 12, 8, 1)
      >>> bool((there_and_back(x) == x).all())
      True
    """
    ways = lax.axis_size(axis)
    x_PBshD = _by_device(x_BShD, ways, dim=1)
    x_PBshD = lax.all_to_all(x_PBshD, axis, split_axis=0, concat_axis=0, tiled=True)
    _, B, s, _, D = x_PBshD.shape
    return x_PBshD.transpose(1, 2, 0, 3, 4).reshape(B, s, -1, D)


def _by_device(x: Shaped[Array, "..."], ways: int, dim: int) -> Shaped[Array, "..."]:
    """Cuts dimension `dim` into one part for each device, and puts the parts first."""
    x = x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)
