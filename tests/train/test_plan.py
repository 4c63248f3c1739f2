"""The plan's figures: state and activations by part, and the two ways to count FLOPs."""

import pytest
from jax.sharding import AbstractMesh

from ulysses_jax.model.config import ModelConfig
from ulysses_jax.parallel.mesh import AXES
from ulysses_jax.train.config import Config, MeshConfig, TrainConfig
from ulysses_jax.train.flops import device_peak, paper_flops, useful_flops
from ulysses_jax.train.plan import kept_activation_bytes, plan_state
from ulysses_jax.train.state import sharding_policy

A100 = 312e12


class _Device:
    def __init__(self, kind):
        self.device_kind = kind


@pytest.mark.parametrize(
    ("gpus", "tokens", "milliseconds", "teraflops"),
    [
        (64, 131072, 32432.13, 165.53),
        (128, 131072, 17052.51, 157.41),
        (256, 131072, 9886.70, 136.09),
        (64, 65536, 9676.76, 161.36),
        (256, 262144, 33486.50, 147.40),
    ],
)
def test_paper_flops_reproduce_its_tables_2_and_3(gpus, tokens, milliseconds, teraflops):
    arch = ModelConfig(preset="gpt-7b").architecture(tokens)
    per_gpu = paper_flops(arch, 8, tokens) / (milliseconds / 1000) / gpus / 1e12
    assert per_gpu == pytest.approx(teraflops, rel=0.003)
    # The same runs by useful work are at a fifth to a quarter of the peak.
    useful = useful_flops(arch, 8, tokens) / (milliseconds / 1000) / gpus
    assert 0.15 < useful / A100 < 0.26


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_device_kind_or_null(kind, peak):
    assert device_peak(_Device(kind)) == peak


@pytest.mark.parametrize(("stage", "copies"), [(0, 4), (1, 2 + 2 / 8), (2, 1 + 3 / 8), (3, 4 / 8)])
def test_state_falls_with_the_stage(stage, copies):
    arch = ModelConfig(preset="gpt2").architecture(1024)
    policy = sharding_policy(arch, AbstractMesh((2, 4), AXES), stage)
    state = plan_state(policy, "adamw")
    assert state.total == pytest.approx(4 * arch.num_parameters() * copies, rel=1e-3)
    assert state.whole == ()


def test_kept_activations_are_inputs_and_with_exchange_also_what_it_made():
    arch = ModelConfig(preset="gpt-7b", dtype="bfloat16").architecture(131072)
    policy = sharding_policy(arch, AbstractMesh((1, 32), AXES), 3)

    def kept(remat):
        train = TrainConfig(seq_len=131072, global_batch=1, remat=remat)
        return kept_activation_bytes(Config(MeshConfig(1, 32), train=train), arch, policy)

    tokens, layers = 131072 // 32, 32
    inputs = layers * tokens * 4096 * 2
    assert kept("none") is None
    assert kept("full") == inputs
    # q, k, v, the output before and after its exchange, and two float32 statistics of the softmax.
    assert kept("exchange") == inputs * 6 + layers * tokens * 32 * 4 * 2
