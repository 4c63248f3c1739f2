"""Looking rows of a table up, with a gradient that is summed in float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def look_up(table_VE: Float[Array, "V E"], ids: Int[Array, "*N"]) -> Float[Array, "*N E"]:
    """The rows `ids` of the table.

    A frequent token adds thousands of terms to the gradient of its row. Summed in bfloat16, as the
    transpose of a plain lookup of a bfloat16 table would, the sum stops growing after a few
    hundred.
    """
    return _look_up(table_VE.shape[0], str(table_VE.dtype), table_VE, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(rows: int, dtype: str, table_VE: Array, ids: Array) -> Array:
    return jnp.take(table_VE, ids, axis=0)


def _look_up_forward(rows: int, dtype: str, table_VE: Array, ids: Array) -> Any:
    return _look_up(rows, dtype, table_VE, ids), ids


def _look_up_backward(rows: int, dtype: str, ids: Array, g: Array) -> Any:
    zero_VE = lax.full_like(g, 0, jnp.float32, (rows, g.shape[-1]))
    return zero_VE.at[ids].add(g.astype(jnp.float32)).astype(dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
