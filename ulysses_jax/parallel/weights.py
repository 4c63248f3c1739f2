"""How a layer's whole weights come from what is stored, and how their gradient goes back.

Runs where both mesh axes are manual. Weights travel in the compute dtype; gradients are summed
over devices in float32, so that the error of a bfloat16 run does not grow with their number.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ulysses_jax.parallel.mesh import AXES
from ulysses_jax.parallel.sharding import Placement, ShardingPolicy


class Tapped(NamedTuple):
    """A whole weight beside a shard-shaped slot that its gradient flows to (ZeRO-2)."""

    whole: Float[Array, "..."]
    slot: Float[Array, "..."]


def _pad(x: Array, dim: int, length: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, length - x.shape[dim])
    return jnp.pad(x, widths)


def _scatter(gradient: Array, dim: int, stored: int) -> Array:
    padded = _pad(gradient.astype(jnp.float32), dim, stored)
    return lax.psum_scatter(padded, AXES, scatter_dimension=dim, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(shard: Array, dim: int, logical: int, stored: int, dtype: str) -> Array:
    whole = lax.all_gather(shard.astype(dtype), AXES, axis=dim, tiled=True)
    return lax.slice_in_dim(whole, 0, logical, axis=dim)


def _gather_forward(shard: Array, dim: int, logical: int, stored: int, dtype: str) -> Any:
    return _gather(shard, dim, logical, stored, dtype), None


def _gather_backward(dim: int, logical: int, stored: int, dtype: str, _: None, g: Array) -> Any:
    return (_scatter(g, dim, stored),)


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _tap(whole: Array, slot: Array, dim: int, logical: int, dtype: str) -> Array:
    cast = lax.slice_in_dim(whole.astype(dtype), 0, logical, axis=dim)
    return lax.pcast(cast, AXES, to="varying")


def _tap_forward(whole: Array, slot: Array, dim: int, logical: int, dtype: str) -> Any:
    return _tap(whole, slot, dim, logical, dtype), jax.ShapeDtypeStruct(whole.shape, whole.dtype)


def _tap_backward(dim: int, logical: int, dtype: str, whole: jax.ShapeDtypeStruct, g: Array) -> Any:
    return jnp.zeros(whole.shape, whole.dtype), _scatter(g, dim, whole.shape[dim])


_tap.defvjp(_tap_forward, _tap_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _replicated(whole: Array, logical: tuple[int, ...], dtype: str) -> Array:
    cast = lax.slice(whole.astype(dtype), (0,) * whole.ndim, logical)
    return lax.pcast(cast, AXES, to="varying")


def _replicated_forward(whole: Array, logical: tuple[int, ...], dtype: str) -> Any:
    return _replicated(whole, logical, dtype), jax.ShapeDtypeStruct(whole.shape, whole.dtype)


def _replicated_backward(
    logical: tuple[int, ...], dtype: str, whole: jax.ShapeDtypeStruct, g: Array
) -> Any:
    summed = lax.psum(g.astype(jnp.float32), AXES)
    return (jnp.pad(summed, [(0, s - n) for s, n in zip(whole.shape, logical, strict=True)]),)


_replicated.defvjp(_replicated_forward, _replicated_backward)


def make_fetch(policy: ShardingPolicy, dtype: str) -> Any:
    """The `Fetch` of a sharded model: makes one part's stored weights whole for its layer.

    "blocks" get their placement with the stacked layer dimension taken off, because the layer
    loop hands in one layer at a time.
    """

    def whole(placement: Placement, stored: Any, layer: bool) -> Array:
        lead = 1 if layer else 0
        logical, dim = placement.logical[lead:], placement.dim
        if dim is None:
            return _replicated(stored, logical, dtype)
        dim -= lead
        if policy.stage == 2:
            return _tap(stored.whole, stored.slot, dim, logical[dim], dtype)
        if policy.stage == 3:
            return _gather(stored, dim, logical[dim], placement.stored[dim + lead], dtype)
        return _replicated(stored, logical, dtype)

    def fetch(part: str, stored: Any) -> Any:
        return jax.tree.map(
            lambda p, w: whole(p, w, part == "blocks"), policy.placements[part], stored
        )

    return fetch


def split_for_gradient(policy: ShardingPolicy, params: Any) -> tuple[Any, Any]:
    """Splits local parameters into (what gradients are taken for, what rides along).

    At stage 2 gradients are taken for shard-shaped slots, so that they leave the backward pass
    reduce-scattered although the parameters are whole. `rejoin` puts the two together.
    """
    if policy.stage != 2:
        return params, None

    def slot(placement: Placement, whole: Array) -> Array:
        if placement.dim is None:
            return whole
        size = placement.stored[placement.dim] // policy.mesh.size
        start = lax.axis_index(AXES) * size
        return lax.dynamic_slice_in_dim(whole, start, size, axis=placement.dim)

    return jax.tree.map(slot, policy.placements, params), params


def rejoin(policy: ShardingPolicy, slots: Any, params: Any) -> Any:
    """Inverse of `split_for_gradient`: the tree that `make_fetch`'s function reads."""
    if policy.stage != 2:
        return slots
    return jax.tree.map(
        lambda p, slot, whole: slot if p.dim is None else Tapped(lax.stop_gradient(whole), slot),
        policy.placements,
        slots,
        params,
    )
