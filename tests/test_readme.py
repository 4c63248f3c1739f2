"""The README's examples of a user's own model run as they stand, and are exact."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax import AttentionSpec, Dropout, make_mesh, ulysses_attention
from ulysses_jax.attention import reference
from ulysses_jax.attention.block_layout import bigbird

README = Path(__file__).parents[1] / "README.md"


def _examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


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

    def apply(params, tokens, mesh):
        x = params[tokens]
        place = jnp.arange(tokens.shape[1])
        if local_positions and mesh is not None:
            place %= tokens.shape[1] // mesh.shape["seq"]
        q = x[:, :, None] * jnp.cos(place)[None, :, None, None]
        return ulysses_attention(q, q, q, mesh, is_causal=True, attention="reference")[:, :, 0]

    tokens = np.arange(16).reshape(2, 8)
    names = {
        "apply": apply,
        "loss": lambda logits, labels: jnp.mean((logits - labels[..., None]) ** 2),
        "inputs": {"tokens": tokens, "labels": tokens / 16},
        "params": jax.random.normal(jax.random.key(0), (16, 4)),
        "make_mesh": make_mesh,
    }
    exec(example, names)
    assert names["report"].passed is not local_positions
