"""The README's example of a user's own attention runs as it stands, and is exact."""

import re
from pathlib import Path

import jax
import numpy as np

from ulysses_jax import AttentionSpec
from ulysses_jax.attention import reference

README = Path(__file__).parents[1] / "README.md"


def test_the_attention_example_equals_plain_attention():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = {
        name: jax.random.normal(key, (2, 12, 8, 5)) for name, key in zip("qkv", keys, strict=True)
    }
    names = dict(inputs)
    exec(example, names)
    expected, _ = reference.attend(*inputs.values(), AttentionSpec(causal=True), 5**-0.5)
    np.testing.assert_allclose(names["out"], expected, atol=1e-5)
