"""The README's examples of a user's own model run as they stand, and are exact."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ulysses_jax import AttentionSpec, Dropout, make_attention_fn, make_mesh, ulysses_attention
from ulysses_jax.attention import reference
from ulysses_jax.attention.block_layout import bigbird

ROOT = Path(__file__).parents[1]


def _examples(page="README.md"):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_module_with_the_new_line_attends_as_without_it():
    example, _, _ = _examples()
    plain = nn.MultiHeadDotProductAttention(num_heads=8)
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    names = {"x": x, "params": plain.init(jax.random.key(1), x)}
    exec(example, names)
    np.testing.assert_allclose(names["y"], plain.apply(names["params"], x), atol=1e-5)
    assert len(names["y"].sharding.device_set) == 8


def test_the_call_with_everything_equals_plain_attention():
    _, example, _ = _examples()
    S, draw = 70, np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(draw.standard_normal((2, S, heads, 4)), jnp.float32) for heads in (6, 3, 3)
    )
    names = {
        "q": q,
        "k": k,
        "v": v,
        "S": S,
        "ids": np.repeat([[0, 1]], S // 2, axis=1).repeat(2, axis=0),
        "lengths": np.array([60, 70]),
        "mask": draw.random((2, 1, S, S)) < 0.9,
        "bias": draw.standard_normal((1, 6, S, S)).astype(np.float32),
        "key": jax.random.key(0),
    }
    exec(example, names)
    spec = AttentionSpec(
        causal=True,
        window=(1023, None),
        q_segment_ids=names["ids"],
        kv_lengths=names["lengths"],
        block_layout=bigbird(S, block=64),
        mask=names["mask"],
        bias=names["bias"],
        dropout=Dropout(rate=0.1, key=names["key"]),
    )
    expected, _ = reference.attend(q, k, v, spec, 0.5)
    np.testing.assert_allclose(names["out"], expected, atol=1e-5)


@pytest.mark.parametrize("local_positions", [False, True])
def test_the_model_is_verified(local_positions):
    _, _, example = _examples()

    class Model:
        def apply(self, params, tokens):
            x = params[tokens]
            place = jnp.arange(tokens.shape[1])
            mesh = jax.sharding.get_abstract_mesh()
            if local_positions and not mesh.empty:
                place %= tokens.shape[1] // mesh.shape["seq"]
            q = x[:, :, None] * jnp.cos(place)[None, :, None, None]
            return ulysses_attention(q, q, q, is_causal=True, attention="reference")[:, :, 0]

    tokens = np.arange(16).reshape(2, 8)
    names = {
        "model": Model(),
        "loss": lambda logits, labels: jnp.mean((logits - labels[..., None]) ** 2),
        "inputs": {"tokens": tokens, "labels": tokens / 16},
        "params": jax.random.normal(jax.random.key(0), (16, 4)),
    }
    exec(example, names)
    assert names["report"].passed is not local_positions


def test_modules_take_the_padding_and_packing_of_a_batch():
    (example,) = _examples("docs/layer.md")
    x, lengths = jax.random.normal(jax.random.key(0), (2, 6, 32)), jnp.array([6, 4])
    names = {"jnp": jnp, "nn": nn, "nnx": nnx, "make_attention_fn": make_attention_fn}
    names |= {"x": x, "lengths": lengths}
    exec(example, names)
    linen, of_nnx, keys, packed = (names[n] for n in ("linen", "of_nnx", "keys", "Packed"))
    ids = jnp.array([[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 0, 0]])
    params, of_packed = linen.init(jax.random.key(1), x), packed().init(jax.random.key(1), x, ids)
    with jax.set_mesh(make_mesh(2, 4)):
        found = (
            jax.jit(linen.apply)(params, x, mask=keys),
            nnx.jit(lambda module, x, keys: module(x, mask=keys))(of_nnx, x, keys),
            jax.jit(packed().apply)(of_packed, x, ids),
        )
    causal = nn.make_causal_mask(x[..., 0])
    (inner,) = of_packed["params"].values()
    plain = nn.MultiHeadDotProductAttention(num_heads=8)
    expected = (
        plain.apply(params, x, mask=causal * keys),
        nnx.MultiHeadAttention(8, 32, decode=False, rngs=nnx.Rngs(0))(x, mask=causal * keys),
        plain.apply(
            {"params": inner}, x, mask=causal * nn.make_attention_mask(ids, ids, jnp.equal)
        ),
    )
    for out, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(out, wanted, atol=1e-5)
