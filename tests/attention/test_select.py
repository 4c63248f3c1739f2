"""Implementations are found by name, and `auto` takes the first that can and says so."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from ulysses_jax.attention import blockwise, pallas, reference, splash
from ulysses_jax.attention.announce import announce
from ulysses_jax.attention.select import MissingPackageError, attention_function
from ulysses_jax.attention.spec import AttentionSpec

SPEC = AttentionSpec(causal=True)


@pytest.fixture(autouse=True)
def announced_nothing_yet() -> None:
    announce.cache_clear()


@pytest.fixture
def without_tokamax(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in `sys.modules` is what a package that is not there looks like.
    for name in ("tokamax", "tokamax._src"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ulysses_jax.attention.tokamax", raising=False)


def _q(dtype: str = "bfloat16", heads: int = 2) -> jnp.ndarray:
    return jnp.ones((1, 5, heads, 8), dtype)


def test_names_give_their_implementation() -> None:
    assert attention_function("blockwise") is blockwise.attend
    assert attention_function("reference") is reference.attend
    assert attention_function("pallas", "gpu") is pallas.attend
    assert attention_function("pallas", "cuda") is pallas.attend
    assert attention_function("splash", "tpu") is splash.attend


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    message = "'flash': choose one of auto, blockwise, reference, cudnn, tokamax, pallas, splash"
    with pytest.raises(ValueError, match=message):
        attention_function("flash")


@pytest.mark.parametrize("name", ["cudnn", "tokamax", "pallas", "splash"])
def test_a_kernel_for_other_devices_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"'{name}' runs on [GT]PUs, .* for a CPU"):
        attention_function(name)


@pytest.mark.usefixtures("without_tokamax")
def test_a_missing_package_is_named_with_the_command_that_brings_it() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'ulysses_jax\[tokamax\]'"):
        attention_function("tokamax", "gpu")


def test_auto_on_cpu_is_blockwise_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    auto = attention_function("auto")
    for _ in range(2):
        out, lse = auto(*[_q()] * 3, SPEC, 0.5)
    expected_out, expected_lse = blockwise.attend(*[_q()] * 3, SPEC, 0.5)
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)
    assert capsys.readouterr().err == "attention: auto takes blockwise on cpu\n"


@pytest.mark.usefixtures("without_tokamax")
def test_auto_takes_the_first_kernel_that_can_and_says_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = _q(), jnp.zeros((1, 2, 5))
    monkeypatch.setattr(pallas, "fused_attention", lambda *_, **__: results)
    spec = AttentionSpec(q_segment_ids=np.zeros((1, 5), np.int32))
    assert attention_function("auto", "gpu")(*[_q()] * 3, spec, 0.5) is results
    first, cudnn, tokamax = capsys.readouterr().err.splitlines()
    assert first == "attention: auto takes pallas on gpu"
    assert cudnn.startswith("  not cudnn: cuDNN attention cannot keep segments apart")
    assert tokamax.startswith("  not tokamax: ")
    assert "pip install 'ulysses_jax[tokamax]'" in tokamax


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_auto_comes_down_to_blockwise_where_no_kernel_can(
    platform: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = AttentionSpec(bias=np.ones((1, 1, 5, 5), np.float32))
    out, _ = attention_function("auto", platform)(*[_q()] * 3, spec, 0.5)
    np.testing.assert_array_equal(out, blockwise.attend(*[_q()] * 3, spec, 0.5)[0])
    assert f"auto takes blockwise on {platform}\n  not " in capsys.readouterr().err


def test_a_mistake_is_not_taken_for_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    spec = AttentionSpec(kv_lengths=np.ones(7, np.int32))
    with pytest.raises(ValueError, match=r"kv_lengths"):
        attention_function("auto", "gpu")(*[_q()] * 3, spec, 0.5)
    assert capsys.readouterr().err == ""
