"""Sequence and tensor parallelism together, on a ('data', 'tensor', 'seq') mesh.

    python examples/tensor_parallel.py

trains a layer on one device and on a mesh of eight (simulated on CPUs, where there are no others),
and prints both losses side by side. Heads and MLP lie over 'tensor' by ordinary annotations; the
attention is told so by `head_axes`, and exchanges the heads of each part over 'seq' alone.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ulysses_jax
from ulysses_jax.parallel.collectives import collectives

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, DIM, HIDDEN = 4, 32, 24, 8, 4, 6, 96
# How each parameter lies on the mesh: projections by their heads, the MLP by its hidden layer.
PLACES = {
    "query": P(None, "tensor"),
    "key": P(None, "tensor"),
    "value": P(None, "tensor"),
    "out": P("tensor"),
    "up": P(None, "tensor"),
    "down": P("tensor"),
}
TOKENS = P("data", "seq")


def make_params() -> dict[str, jax.Array]:
    shapes = {
        "query": (WIDTH, HEADS, DIM),
        "key": (WIDTH, KV_HEADS, DIM),
        "value": (WIDTH, KV_HEADS, DIM),
        "out": (HEADS, DIM, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    draw = np.random.default_rng(0)
    return {
        name: jnp.asarray(draw.standard_normal(shape) / np.sqrt(WIDTH), jnp.float32)
        for name, shape in shapes.items()
    }


def layer(params, x, mesh):
    query, key, value = (
        jnp.einsum("bse,ehd->bshd", x, params[name]) for name in ("query", "key", "value")
    )
    attended = ulysses_jax.ulysses_attention(
        query, key, value, mesh, head_axes=() if mesh is None else ("tensor",), is_causal=True
    )
    x += jnp.einsum("bshd,hde->bse", attended, params["out"])
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def train(mesh: Mesh | None, steps: int = 5) -> tuple[list[float], Counter[str]]:
    """The losses of some steps, and how often a step runs each kind of collective."""
    draw = np.random.default_rng(1)
    x, target = draw.standard_normal((2, BATCH, LENGTH, WIDTH)).astype(np.float32)
    params = make_params()
    if mesh is not None:
        x, target = jax.device_put((x, target), NamedSharding(mesh, TOKENS))
        places = {name: NamedSharding(mesh, place) for name, place in PLACES.items()}
        params = jax.device_put(params, places)

    def loss_of(params, x, target):
        return jnp.mean((layer(params, x, mesh) - target) ** 2)

    def step(params, _, x, target):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, target)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    @jax.jit
    def run(params, x, target):
        one_step = functools.partial(step, x=x, target=target)
        return jax.lax.scan(one_step, params, length=steps)[1]

    compiled = run.lower(params, x, target).compile()
    runs: Counter[str] = Counter()
    for collective in collectives(compiled.as_text()):
        runs[collective.kind] += (collective.runs or 0) // steps
    return compiled(params, x, target).tolist(), runs


def main() -> tuple[list[float], list[float]]:
    """The losses on one device, and on a mesh."""
    devices = np.asarray(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "tensor", "seq"), axis_types=(AxisType.Auto,) * 3)
    alone, _ = train(None)
    spread, runs = train(mesh)
    print("step  one device  mesh 2 x 2 x 2")
    for i, losses in enumerate(zip(alone, spread, strict=True)):
        print("{:4}  {:10.6f}  {:14.6f}".format(i, *losses))
    print("a step on the mesh:", ", ".join(f"{n} {kind}s" for kind, n in runs.items()))
    return alone, spread


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # of no effect where there are GPUs or TPUs
    main()
