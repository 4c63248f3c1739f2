"""Contestant: attention forward and backward in JAX, the sequence split over simulated devices.

`local` says what attends: `blockwise` is ours; `jax.nn` (its XLA path) and `tokamax` (xla_chunked)
stand in its place between the same two exchanges; `ring` is PyPI's ringattention.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_inputs import check, inputs, useful_flops
from contestant import Facts, Run, serve
from jax.sharding import PartitionSpec as P

from ulysses_jax.attention.select import attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.backend import Processes, compiler_options, start_backend
from ulysses_jax.parallel.collectives import collectives
from ulysses_jax.parallel.mesh import SEQ, make_mesh
from ulysses_jax.parallel.ulysses import exchanged_attention

_FLOAT32_BYTES = 4


def prepare(
    seq: int,
    heads: int,
    dim: int,
    devices: int = 1,
    local: str = "blockwise",
    ring_block: int = 0,
    work: str = "run",
    causal: bool = True,
    window: int | None = None,
    documents: int | None = None,
    warm_up: bool = True,
) -> tuple[Run, Facts]:
    """Compiles out and gradients of one batch row.

    Args:
      seq, heads, dim: S, H and D of q, k and v.
      devices: simulated devices that share the sequence.
      local: what attends.
      ring_block: tokens in a block of the ring, a divisor of S/P.
      work: what a run amounts to: `run` is 1, `tokens` S, `flops` the useful FLOPs.
      causal: whether a query attends to earlier keys only.
      window: how many keys, its own included, a query attends to.
      documents: equal documents packed into the row.
      warm_up: whether to run once and check the results before any timing.
    """
    start_backend(devices, Processes())
    mesh = make_mesh(1, devices)
    documented = None if documents is None else jnp.arange(seq)[None] * documents // seq

    def region(q: Any, k: Any, v: Any, d_out: Any, ids_BS: Any) -> Any:
        conditions: dict[str, Any] = {"causal": causal}
        if window is not None:
            conditions["window"] = (window - 1, 0)
        if documents is not None:
            conditions |= {"q_segment_ids": ids_BS, "contiguous_segments": True}
        attend = _attention(local, AttentionSpec(**conditions), dim**-0.5, ring_block)
        out, gradients = jax.vjp(attend, q, k, v)
        return out, *gradients(d_out)

    split = P(None, SEQ)
    # Neither the ring nor tokamax's chunks tell over which mesh axes their results vary.
    sharded = jax.shard_map(
        region,
        mesh=mesh,
        in_specs=(split, split, split, split, P()),
        out_specs=split,
        check_vma=local in ("blockwise", "jax.nn"),
    )
    sharding = jax.sharding.NamedSharding(mesh, split)
    arrays = [jax.device_put(x, sharding) for x in inputs(seq, heads, dim)]
    options = compiler_options(mesh.devices.flat[0])
    compiled = jax.jit(sharded, compiler_options=options).lower(*arrays, documented).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*arrays, documented))

    facts: Facts = {
        "work": {"run": 1, "tokens": seq, "flops": useful_flops(seq, heads, dim)}[work],
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "wire_bytes": _wire_bytes(compiled.as_text(), devices),
    }
    if warm_up:
        facts["check"] = check(np.asarray(x) for x in compiled(*arrays, documented))
    return run, facts


def _attention(local: str, spec: AttentionSpec, scale: float, block: int) -> Callable[..., Any]:
    if local == "ring":
        from peers.ring_attention import ring_attention

        return lambda q, k, v: ring_attention(q, k, v, axis=SEQ, block=block)
    locals_: dict[str, Any] = {"jax.nn": _jax_nn, "tokamax": _tokamax}
    attend = locals_[local] if local in locals_ else attention_function(local)
    return lambda q, k, v: exchanged_attention(q, k, v, spec, local=attend, axis=SEQ, scale=scale)


def _jax_nn(q: Any, k: Any, v: Any, spec: AttentionSpec, scale: float) -> Any:
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=spec.causal, scale=scale, implementation="xla"
    )
    return out, None


def _tokamax(q: Any, k: Any, v: Any, spec: AttentionSpec, scale: float) -> Any:
    import tokamax

    out = tokamax.dot_product_attention(
        q, k, v, is_causal=spec.causal, scale=scale, implementation="xla_chunked"
    )
    return out, None


def _wire_bytes(program: str, devices: int) -> float:
    """Bytes that a device sends to others in one run of a compiled float32 program."""
    sent = 0.0
    for collective in collectives(program):
        if collective.runs is None:
            raise ValueError(f"no trip count is known of the loop around {collective}")
        # An all-to-all keeps one part at home; a permutation of the ring sends everything.
        share = 1.0 if collective.kind == "collective-permute" else 1 - 1 / devices
        sent += collective.elements * collective.runs * share * _FLOAT32_BYTES
    return sent


if __name__ == "__main__":
    serve(prepare, ["jax", "jaxlib", "numpy"])
