"""The GPU kernels inside the exchange, compiled for A100 and H100 clusters without a GPU.

Skipped unless these are installed, with jax's version for the first two:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cudnn-cu12 nvidia-cuda-nvcc-cu12
    pip install 'ulysses_jax[tokamax]'

Nothing runs on a GPU here: what is tested is the compiled program.
"""

import importlib.metadata
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ulysses_jax.attention.select import LocalAttention, attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.parallel.ulysses import exchanged_attention
from ulysses_jax.train.remat import EXCHANGED

PACKAGES = ("jax-cuda12-plugin", "nvidia-cudnn-cu12", "nvidia-cuda-nvcc-cu12", "tokamax")
S, HEADS, HEAD_DIM = 8192, 16, 128


def _missing(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


pytestmark = pytest.mark.skipif(any(map(_missing, PACKAGES)), reason=f"needs {', '.join(PACKAGES)}")


def _mesh(gpu: str) -> jax.sharding.Mesh:
    targets = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gpu_targets.py"))
    return make_mesh(1, 8, targets["gpu_cluster"](targets[gpu], 8).devices)


def _program(
    gpu: str,
    local: LocalAttention,
    kv_heads: int = HEADS,
    segments: bool = False,
    lse_used: bool = False,
    rows: int = 1,
    **spec: Any,
) -> str:
    """The compiled forward and backward pass of one exchanged attention on 8 GPUs."""

    def attend(*arrays: Any) -> Any:
        def seen(q: Any, k: Any, v: Any, spec: AttentionSpec, scale: float) -> Any:
            out, lse = local(q, k, v, spec, scale)
            return (out * lse.swapaxes(1, 2)[..., None] if lse_used else out), lse

        def layer(q: Any, k: Any, v: Any) -> Any:
            ids = arrays[3] if segments else None
            described = AttentionSpec(q_segment_ids=ids, contiguous_segments=segments, **spec)
            return exchanged_attention(
                q, k, v, described, local=seen, axis="seq", scale=HEAD_DIM**-0.5
            )

        policy = jax.checkpoint_policies.save_only_these_names(*EXCHANGED)

        def loss(*qkv: Any) -> jax.Array:
            return jnp.sum(jax.checkpoint(layer, policy=policy)(*qkv) ** 2)

        return jax.grad(loss, (0, 1, 2))(*arrays[:3])

    mesh = _mesh(gpu)
    split, whole = PartitionSpec(None, "seq"), PartitionSpec()
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(split, split, split, whole), out_specs=split
    )
    arguments = [
        jax.ShapeDtypeStruct(
            (rows, S, heads, HEAD_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, split)
        )
        for heads in (HEADS, kv_heads, kv_heads)
    ]
    ids = jax.ShapeDtypeStruct((rows, S), np.int32, sharding=NamedSharding(mesh, whole))
    return jax.jit(sharded).lower(*arguments, ids).compile().as_text()


def _assert_fused(program: str, calls: dict[str, int]) -> None:
    """Each kernel is called as often as said, and no buffer is S x S."""
    assert {name: len(re.findall(name, program)) for name in calls} == calls
    for dims in re.findall(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]+)\]", program):
        assert sum(int(dim) >= S for dim in dims.split(",")) < 2, f"a buffer of [{dims}]"


# The names that the kernels have in the compiled program, forward and backward.
CUDNN = {r'target="__cudnn\$fmhaSoftmax"': 1, r'target="__cudnn\$fmhaSoftmaxBackward"': 1}
TRITON = {r'name = \\?"pallas_flash_attention_fwd': 1, r'name = \\?"pallas_flash_attention_vjp': 1}
PALLAS = {r'name = \\?"mha_forward': 1, r'name = \\?"mha_backward': 1}
# No names there: one forward and two backward.
MOSAIC = {r'target="mosaic_gpu': 3}
both = pytest.mark.parametrize("gpu", ["A100", "H100"])


@both
@pytest.mark.parametrize("spec", [{"causal": True}, {"causal": True, "window": (1024, 0)}], ids=str)
def test_cudnn_is_called_once_a_pass(gpu: str, spec: dict[str, Any]) -> None:
    local = attention_function("cudnn", "gpu")
    _assert_fused(_program(gpu, local, kv_heads=8, **spec), CUDNN)


@both
def test_the_gradient_of_the_log_sum_exp_is_one_more_backward_kernel(gpu: str) -> None:
    program = _program(gpu, attention_function("cudnn", "gpu"), causal=True, lse_used=True)
    _assert_fused(program, {**CUDNN, r'target="__cudnn\$fmhaSoftmaxBackward"': 2})


@both
def test_tokamax_is_called_once_a_pass(gpu: str) -> None:
    program = _program(gpu, attention_function("tokamax", "gpu"), kv_heads=8, causal=True)
    _assert_fused(program, TRITON)


@both
def test_pallas_keeps_packed_segments_apart_without_a_mask(gpu: str) -> None:
    program = _program(gpu, attention_function("pallas", "gpu"), segments=True, causal=True)
    _assert_fused(program, PALLAS)


@pytest.mark.parametrize("given", [{"segments": True}, {"window": (1024, 0)}], ids=str)
def test_tokamax_on_hopper_takes_key_ranges_without_a_mask(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    from tokamax._src import config, gpu_utils

    from ulysses_jax.attention import tokamax

    # tokamax asks the GPU at hand what it is.
    monkeypatch.setattr(tokamax, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(gpu_utils, "is_sm90", lambda device=None: True)
    with config.cross_compile(True):
        program = _program("H100", tokamax.attend, kv_heads=8, causal=True, **given)
    _assert_fused(program, MOSAIC)


def test_auto_takes_cudnn_and_for_packed_rows_another_kernel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    auto = attention_function("auto", "gpu")
    _assert_fused(_program("A100", auto, causal=True), CUDNN)
    _assert_fused(_program("A100", auto, causal=True, segments=True), PALLAS)
    said = capsys.readouterr().err
    assert "auto takes cudnn on gpu" in said
    assert "auto takes pallas on gpu\n  not cudnn: " in said


@pytest.mark.parametrize("rows", [1, 2])
def test_one_kernel_cuts_q_k_and_v_out_of_what_was_exchanged_and_puts_rows_in_order(rows):
    program = _program("A100", attention_function("cudnn", "gpu"), rows=rows, causal=True)
    entry = program[program.index("ENTRY") :]
    between = entry[entry.index("all-to-all-done(") : entry.index("__cudnn$fmhaSoftmax")]
    assert re.findall(r" (fusion|copy|transpose|slice|all-to-all)\(", between) == ["fusion"]
