"""The examples train alike on one device and on a mesh, and one line makes them do so."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ulysses_jax import make_mesh
from ulysses_jax.verification.command import load_case
from ulysses_jax.verification.verify import verify_case

EXAMPLES = Path(__file__).parents[1] / "examples"
CHANGED = "the one changed line"


def _run(source: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "example", "exec"), module)
    return module


@pytest.mark.parametrize("name", ["linen_model", "nnx_model", "tensor_parallel"])
def test_an_example_has_the_same_losses_on_one_device_and_on_its_mesh(name, capsys):
    source = (EXAMPLES / f"{name}.py").read_text()
    alone, spread = _run(source)["main"]()
    np.testing.assert_allclose(spread, alone, rtol=1e-5)
    assert spread[-1] < 0.9 * spread[0]
    (count,) = re.findall(r"(\d+) all-to-alls", capsys.readouterr().out)
    assert int(count) >= 2
    changed = [line for line in source.splitlines() if CHANGED in line]
    if name == "tensor_parallel":
        assert not changed
        return
    # Without that one line it is a model that knows nothing of this package.
    (line,) = changed
    ordinary = source.replace(f"{line}\n", "")
    _run(ordinary)
    assert "attention_fn" in line
    assert "attention_fn" not in ordinary


def test_the_case_of_an_example_is_verified():
    report = verify_case(load_case(f"{EXAMPLES / 'nnx_model.py'}:case"), make_mesh(2, 4))
    report.require()
