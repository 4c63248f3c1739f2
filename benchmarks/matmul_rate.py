"""Contestant: XLA's own float32 matrix product, the rate that attention is measured against."""

import jax
import jax.numpy as jnp
from contestant import Facts, Run, serve

_SIZE = 2048
_PRODUCTS = 8


def prepare() -> tuple[Run, Facts]:
    """Compiles one product of two square matrices; a run is several, one after the other."""
    x = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), jnp.float32)
    product = jax.jit(lambda x, y: jnp.dot(x, y, precision="highest")).lower(x, x).compile()

    def run() -> None:
        for _ in range(_PRODUCTS):
            product(x, x).block_until_ready()

    run()
    return run, {"work": _PRODUCTS * 2 * _SIZE**3}


if __name__ == "__main__":
    serve(prepare, ["jax", "jaxlib"])
