"""The README's examples of a user's own attention run as they stand, and are exact."""

import re
from pathlib import Path

import jax
import numpy as np

from ulysses_jax import AttentionSpec, attention_function
from ulysses_jax.attention import reference

README = Path(__file__).parents[1] / "README.md"


def _examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_attention_example_equals_plain_attention():
    example, _ = _examples()
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = {
        name: jax.random.normal(key, (2, 12, 8, 5)) for name, key in zip("qkv", keys, strict=True)
    }
    names = dict(inputs)
    exec(example, names)
    expected, _ = reference.attend(*inputs.values(), AttentionSpec(causal=True), 5**-0.5)
    np.testing.assert_allclose(names["out"], expected, atol=1e-5)


def test_the_spec_of_everything_is_one_that_attention_takes():
    _, example = _examples()
    S = 70
    names = {
        "S": S,
        "ids": np.repeat([[0, 1]], S // 2, axis=1),
        "lengths": np.array([60]),
        "mask": np.ones((1, 1, S, S), bool),
        "bias": np.ones((1, 2, S, S), np.float32),
        "key": jax.random.key(0),
    }
    exec(example, names)
    q = jax.random.normal(jax.random.key(1), (1, S, 2, 4))
    out, _ = attention_function("blockwise")(q, q, q, names["spec"], 0.5)
    expected, _ = reference.attend(q, q, q, names["spec"], 0.5)
    np.testing.assert_allclose(out, expected, atol=1e-5)
