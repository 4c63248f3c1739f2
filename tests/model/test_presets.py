"""The presets have the sizes of the models they are named after, and bad shapes are refused."""

import dataclasses

import pytest

from ulysses_jax.model.config import ModelConfig
from ulysses_jax.model.presets import PRESETS

PRIME_SHAPE = {
    "vocab_size": 13,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "embed_dim": 24,
    "mlp_dim": 7,
}


@pytest.mark.parametrize(
    ("preset", "seq_len", "parameters"),
    [("gpt2", 1024, 124_439_808), ("llama3-8b", 8192, 8_030_261_248)],
)
def test_parameter_count_is_that_of_the_published_model(preset, seq_len, parameters):
    assert ModelConfig(preset=preset).architecture(seq_len).num_parameters() == parameters


@pytest.mark.parametrize(
    ("preset", "layers", "width", "billions"),
    [("gpt-1.2b", 24, 2048, 1.31), ("gpt-7b", 32, 4096, 6.65), ("gpt-30b", 48, 7168, 29.96)],
)
def test_paper_models_have_the_papers_shape_and_size(preset, layers, width, billions):
    architecture = ModelConfig(preset=preset).architecture(2**20)
    assert (architecture.num_layers, architecture.embed_dim) == (layers, width)
    assert architecture.mlp_dim == 4 * width
    assert architecture.vocab_size == 50257
    assert architecture.num_parameters() / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("mlp", "norm", "biases", "positions", "tied", "embedding", "layer", "head"),
    [
        # q, k, v, o: 24x24, 24x8, 24x8, 24x24; two MLP matrices 24x7; two norms of scale and bias.
        ("gelu", "layernorm", False, "learned", True, 24 * (13 + 11), 1536 + 336 + 96, 48),
        # Three MLP matrices; biases 24, 8, 8, 24 and 7, 7, 24; two norms of scale only.
        ("swiglu", "rmsnorm", True, "rope", False, 24 * 13, 1536 + 504 + 102 + 48, 24 + 24 * 13),
        ("gelu", "rmsnorm", True, "rope", True, 24 * 13, 1536 + 336 + 95 + 48, 24),
    ],
)
def test_parameter_counts_add_up_part_by_part(
    mlp, norm, biases, positions, tied, embedding, layer, head
):
    model = ModelConfig(
        **PRIME_SHAPE, mlp=mlp, norm=norm, biases=biases, positions=positions, tied_head=tied
    )
    counts = model.architecture(11).parameter_counts()
    assert (counts.embedding, counts.layer, counts.head) == (embedding, layer, head)
    assert counts.total == embedding + 3 * layer + head


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves_completely(preset):
    architecture = ModelConfig(preset=preset).architecture(64)
    assert None not in dataclasses.astuple(architecture)
    assert architecture.num_heads * architecture.head_dim == architecture.embed_dim
    assert architecture.max_seq_len == 64


def test_every_given_key_overrides_the_preset():
    given = {
        **PRIME_SHAPE,
        "dtype": "bfloat16",
        "attention": "reference",
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "biases": True,
        "tied_head": False,
        "dropout_rate": 0.25,
        "rope_theta": 17.0,
        "norm_eps": 0.125,
    }
    assert {field.name for field in dataclasses.fields(ModelConfig)} == {"preset", *given}
    resolved = dataclasses.asdict(ModelConfig(**given).architecture(11))
    assert resolved == {**given, "head_dim": 4, "max_seq_len": 11}


def test_derived_widths_follow_an_overridden_width():
    architecture = ModelConfig(preset="gpt2", num_heads=2, embed_dim=8).architecture(11)
    assert (architecture.num_kv_heads, architecture.mlp_dim) == (2, 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "gpt-7"}, "model.preset is 'gpt-7'; did you mean gpt-7b?"),
        ({"num_heads": 5}, "embed_dim is 128, which model.num_heads = 5 .*; use 125 or 130"),
        ({"num_heads": 256}, "embed_dim is 128, which model.num_heads = 256 .*; use 256"),
        ({"num_kv_heads": 3}, "num_heads is 8, which model.num_kv_heads = 3 .* = 2 or 4"),
        ({"num_kv_heads": 16}, "num_heads is 8, which model.num_kv_heads = 16 .* = 8"),
        ({"num_heads": 0}, "model.num_heads is 0; use 1 or more"),
        ({"num_layers": -1}, "model.num_layers is -1; use 1 or more"),
        ({"vocab_size": 0}, "model.vocab_size is 0; use 1 or more"),
        ({"embed_dim": 24}, "model.embed_dim is 24, .* 3 dimensions, .*; use 16 or 32"),
        ({"dropout_rate": 1.0}, "model.dropout_rate is 1.0; use a number from 0 to below 1"),
        ({"dropout_rate": float("nan")}, "model.dropout_rate is nan"),
        ({"norm_eps": 0.0}, "model.norm_eps is 0.0; use a finite number above 0"),
        ({"rope_theta": float("inf")}, "model.rope_theta is inf"),
        ({"dtype": "float16"}, "model.dtype is 'float16'; use bfloat16 or float32"),
        ({"attention": "flash"}, "model.attention is 'flash'; use auto or blockwise or reference"),
    ],
)
def test_impossible_model_is_refused_with_value_and_fix(given, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**given).architecture(11)
