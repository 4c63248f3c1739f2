"""An NNX language model, made sequence-parallel by one changed line.

    python examples/nnx_model.py

trains it on one device and on a mesh of four (simulated on CPUs, where there are no others), and
prints both losses side by side. The model learns a text by heart.

    python -m ulysses_jax verify --model examples/nnx_model.py:case \\
        --mesh.data 2 --mesh.seq 4 --mesh.simulated_devices 8

compares its loss, outputs and gradients on a mesh with those of one device.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ulysses_jax
from ulysses_jax.parallel.collectives import collectives

# The model: Flax's own attention and layers. ------------------------------------------------------

WIDTH, HEADS, KV_HEADS, LENGTH = 32, 4, 2, 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            in_features=WIDTH,
            attention_fn=ulysses_jax.make_attention_fn(),  # <- the one changed line: it is new
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nnx.Module):
    """Logits [B, S, 256] of the next byte of `tokens` [B, S]."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 1):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


# Its training: nothing in it but the place of the batch knows of the mesh. ------------------------

TEXT = b"All-to-alls move each token once, and every head then sees the whole of its sequence."


def make_batch(rows=2):
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(TEXT, np.uint8), LENGTH + 1)
    rows = windows[:: len(windows) // rows][:rows].astype(np.int32)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def train(model, mesh: Mesh | None, steps: int = 5) -> tuple[list[float], int]:
    """The losses of some steps on `mesh`, or on one device, and the all-to-alls of a step."""
    graph, params = nnx.split(model, nnx.Param)
    optimizer, batch = optax.sgd(0.1), make_batch()
    if mesh is not None:
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data", "seq")))

    def loss_of(params, batch):
        logits = nnx.merge(graph, params)(batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(losses)

    def step(carry, _, batch):
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def run(params, batch):
        carry = params, optimizer.init(params)
        return jax.lax.scan(functools.partial(step, batch=batch), carry, length=steps)[1]

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        compiled = run.lower(params, batch).compile()
        losses = compiled(params, batch)
    exchanges = [c.runs for c in collectives(compiled.as_text()) if c.kind == "all-to-all"]
    return losses.tolist(), sum(exchanges) // steps


def case() -> ulysses_jax.Case:
    """What `verify` runs, under `jax.set_mesh(mesh)`: the model has no need of its argument."""
    graph, params = nnx.split(LanguageModel(nnx.Rngs(0)), nnx.Param)

    def model_fn(params, inputs, mesh):
        logits = nnx.merge(graph, params)(inputs["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["labels"])
        return jnp.mean(losses), logits

    return ulysses_jax.Case(model_fn=model_fn, inputs=make_batch(), params=params, causal=True)


def main() -> tuple[list[float], list[float]]:
    """The losses on one device, and on a mesh."""
    model = LanguageModel(nnx.Rngs(0))
    alone, _ = train(model, None)
    spread, exchanges = train(model, ulysses_jax.make_mesh(data=2, seq=2))
    print("step  one device  mesh 2 x 2")
    for i, losses in enumerate(zip(alone, spread, strict=True)):
        print("{:4}  {:10.6f}  {:10.6f}".format(i, *losses))
    print(f"{exchanges} all-to-alls a step on the mesh")
    return alone, spread


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # of no effect where there are GPUs or TPUs
    main()
