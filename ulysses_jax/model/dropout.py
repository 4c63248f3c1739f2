"""Dropout whose mask depends on the global token and not on the mesh that computes it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclass(frozen=True)
class Dropout:
    """One step's residual dropout.

    Attributes:
      key: the step's random key, the same on every device.
      row_B: global index in the batch of each local row.
      column_s: global index in the sequence of each local token.
      rate: share of the entries set to zero, in [0, 1).
    """

    key: PRNGKeyArray
    row_B: Int[Array, " B"]
    column_s: Int[Array, " s"]
    rate: float

    def __call__(self, x_BsE: Float[Array, "B s E"], site: Int[Array, ""]) -> Float[Array, "B s E"]:
        """Zeroes entries of `x_BsE` and scales the rest by 1 / (1 − rate).

        `site` numbers the places where dropout is applied, so that no two share a mask.
        """
        at_site = jax.random.fold_in(self.key, site)

        def keep_E(row: Array, column: Array) -> Array:
            token = jax.random.fold_in(jax.random.fold_in(at_site, row), column)
            return jax.random.bernoulli(token, 1.0 - self.rate, x_BsE.shape[-1:])

        over_columns = jax.vmap(keep_E, in_axes=(None, 0))
        keep_BsE = jax.vmap(over_columns, in_axes=(0, None))(self.row_B, self.column_s)
        return jnp.where(keep_BsE, x_BsE / (1.0 - self.rate), 0).astype(x_BsE.dtype)
