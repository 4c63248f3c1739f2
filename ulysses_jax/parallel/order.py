"""Makes one array wait for another, where XLA would be free to compute it first."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ulysses_jax.attention.varying import vary_alike

_T = TypeVar("_T")


def after(tree: _T, awaited: Float[Array, "..."]) -> _T:
    """`tree` of floating-point arrays, bit for bit, but not before `awaited` is computed.

    In the backward pass the gradient of `awaited` waits for those of `tree`. An
    `optimization_barrier` does not do it: XLA takes it away before it schedules. So an element of
    `awaited` is turned into a zero, which is added.
    """
    tree, element = vary_alike((tree, awaited.ravel()[0]))
    return _after(tree, element)


@jax.custom_vjp
def _after(tree: _T, element: Float[Array, ""]) -> _T:
    return jax.tree.map(lambda x: x + _zero(element).astype(x.dtype), tree)


def _after_forward(tree: _T, element: Float[Array, ""]) -> tuple[_T, None]:
    return _after(tree, element), None


def _after_backward(_: None, gradients: _T) -> tuple[_T, Float[Array, ""]]:
    first, *_others = jax.tree.leaves(gradients)
    return gradients, _zero(first.ravel()[0])


_after.defvjp(_after_forward, _after_backward)


def _zero(element: Float[Array, ""]) -> Float[Array, ""]:
    """-0, the number that changes no other when added, in a form that XLA does not fold."""
    minus_zero = jnp.asarray(-0.0, element.dtype)
    return lax.select(jnp.isfinite(element), -jnp.abs(element) * 0, minus_zero)
