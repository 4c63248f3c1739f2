"""A Linen encoder with padded rows, made sequence-parallel by one changed line.

    python examples/linen_model.py

trains it on one device and on a mesh of four (simulated on CPUs, where there are no others), and
prints both losses side by side. The model learns to write its input backwards.
"""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ulysses_jax
from ulysses_jax.parallel.collectives import collectives

# The model: Flax's own attention, mask and layers. ------------------------------------------------

VOCABULARY, PADDING, WIDTH, LENGTH = 19, 0, 32, 24


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4,
            attention_fn=ulysses_jax.make_attention_fn(),  # <- the one changed line: it is new
        )
        x += attention(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Encoder(nn.Module):
    """Logits [B, S, V] for each place of `tokens` [B, S]."""

    layers: int = 1

    @nn.compact
    def __call__(self, tokens):
        embed, place = nn.Embed(VOCABULARY, WIDTH), nn.Embed(LENGTH, WIDTH)
        x = embed(tokens) + place(jnp.arange(tokens.shape[1]))
        seen = tokens != PADDING
        for _ in range(self.layers):
            x = Block()(x, nn.make_attention_mask(seen, seen))
        return embed.attend(nn.LayerNorm()(x))


# Its training: nothing in it but the place of the batch knows of the mesh. ------------------------


def make_batch(rows=4):
    """Rows of 8 to LENGTH tokens, and the same backwards."""
    draw = np.random.default_rng(0)
    place, count = np.arange(LENGTH), draw.integers(8, LENGTH + 1, (rows, 1))
    tokens = np.where(place < count, draw.integers(1, VOCABULARY, (rows, LENGTH)), PADDING)
    backwards = np.take_along_axis(tokens, (count - 1 - place) % LENGTH, axis=1)
    return {"tokens": tokens.astype(np.int32), "labels": backwards.astype(np.int32)}


def train(params, mesh: Mesh | None, steps: int = 5) -> tuple[list[float], int]:
    """The losses of some steps on `mesh`, or on one device, and the all-to-alls of a step."""
    model, optimizer, batch = Encoder(), optax.sgd(0.3), make_batch()
    if mesh is not None:
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data", "seq")))

    def loss_of(params, batch):
        logits = model.apply(params, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(losses, where=batch["labels"] != PADDING)

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


def main() -> tuple[list[float], list[float]]:
    """The losses on one device, and on a mesh."""
    params = jax.jit(Encoder().init)(jax.random.key(0), make_batch()["tokens"])
    alone, _ = train(params, None)
    spread, exchanges = train(params, ulysses_jax.make_mesh(data=2, seq=2))
    print("step  one device  mesh 2 x 2")
    for i, losses in enumerate(zip(alone, spread, strict=True)):
        print("{:4}  {:10.6f}  {:10.6f}".format(i, *losses))
    print(f"{exchanges} all-to-alls a step on the mesh")
    return alone, spread


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # of no effect where there are GPUs or TPUs
    main()
