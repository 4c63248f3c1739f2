"""What one attention layer becomes on GPUs: its kernels and memory, by XLA, without any GPU.

    pip install --no-deps jax-cuda12-plugin==<jax's version> jax-cuda12-pjrt==<jax's version> \\
        nvidia-cudnn-cu12 nvidia-cuda-nvcc-cu12
    JAX_PLATFORMS=cpu python benchmarks/gpu_layer.py

Projections, exchange, cuDNN's attention, exchange back and output projection of a causal layer in
bfloat16, for a node of eight A100-SXM4-80GB. Prints one JSON line a row: the temporary memory of a
device in bytes, forward and in training, and what runs forward, in XLA's order, matrix products and
slices left out.
"""

import json
import re
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from gpu_targets import A100, gpu_cluster
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ulysses_jax import ulysses_attention
from ulysses_jax.parallel.backend import compiler_options

DEVICES, HEADS, HEAD_DIM, EMBED = 8, 64, 128, 1024


def compiled(
    mesh: Mesh, rows: int, tokens: int, chunks: int, training: bool
) -> jax.stages.Compiled:
    """The layer for [rows, tokens, EMBED], or the gradients of all its inputs."""

    def layer(x: jax.Array, weights: list[jax.Array], out: jax.Array) -> jax.Array:
        q, k, v = ((x @ w).reshape(rows, tokens, HEADS, HEAD_DIM) for w in weights)
        attended = ulysses_attention(
            q, k, v, mesh, is_causal=True, attention="cudnn", chunks=chunks
        )
        return attended.reshape(rows, tokens, -1) @ out

    def loss(*inputs: jax.Array) -> jax.Array:
        return jnp.sum(layer(*inputs).astype(jnp.float32))

    def array(spec: PartitionSpec, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    whole, width = PartitionSpec(), HEADS * HEAD_DIM
    inputs = (
        array(PartitionSpec("data", "seq"), rows, tokens, EMBED),
        [array(whole, EMBED, width)] * 3,
        array(whole, width, EMBED),
    )
    function: Callable[..., jax.Array] = jax.grad(loss, argnums=(0, 1, 2)) if training else layer
    options = compiler_options(mesh.devices.flat[0])
    return jax.jit(function, compiler_options=options).lower(*inputs).compile()


def kernels(program: str) -> list[str]:
    """What the compiled program runs, in order; matrix products and slices are left out."""
    entry = program[program.index("ENTRY") :]
    kinds = "all-to-all-start|all-to-all-done|all-to-all|custom-call|fusion|copy|transpose"
    found = re.findall(rf"%([\w.\-]+) = .*? ({kinds})\(", entry)
    names = [name if kind == "fusion" else kind for name, kind in found]
    return [n for n in names if not re.search(r"gemm|slice|select|convert", n)]


def main() -> int:
    """Compiles each row and prints it."""
    devices = np.asarray(gpu_cluster(A100, DEVICES).devices).reshape(1, DEVICES)
    mesh = Mesh(devices, ("data", "seq"))
    for rows, tokens, chunks in [(1, 65536, n) for n in (1, 2, 4, 8)] + [(2, 65536, 1)]:
        forward, training = (compiled(mesh, rows, tokens, chunks, t) for t in (False, True))
        row = {
            "rows": rows,
            "tokens": tokens,
            "chunks": chunks,
            "forward_bytes": forward.memory_analysis().temp_size_in_bytes,
            "training_bytes": training.memory_analysis().temp_size_in_bytes,
            "kernels": kernels(forward.as_text()),
        }
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
