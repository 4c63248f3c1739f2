"""Mesh axes that values vary over inside `shard_map`, as `check_vma=True` follows them."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

_T = TypeVar("_T")


def vary_alike(tree: _T) -> _T:
    """Makes all arrays vary over the same manual mesh axes, as loop carries and a VJP must.

    An operation on two arrays casts both to the union of their axes, and sums in the transpose.
    A factor of one brings that about, here and under any version's name for the cast.
    """
    one = jnp.ones((), jnp.int32)
    for x in jax.tree.leaves(tree):
        one = one * lax.full_like(x, 1, jnp.int32, ())
    return jax.tree.map(lambda x: x * one.astype(x.dtype), tree)


def unchecked(kernel: Callable[..., _T], *arrays: Any) -> _T:
    """Calls a Pallas kernel whose outputs do not say which axes they vary over.

    `check_vma=True` refuses such a kernel, and `shard_map` cannot be asked to spare one call. What
    comes out is made to vary like what goes in. `kernel` must not combine `arrays` with constants
    outside the Pallas call: they would not be cast either, and be refused when JAX evaluates the
    trace again.
    """
    # Private, and so looked up only where a kernel needs it.
    from jax._src import config

    with config._check_vma(False):
        outputs = kernel(*arrays)
    return vary_alike((arrays, outputs))[1]
