"""The named model shapes that `model.preset` selects.

The `gpt-*` shapes are those that reproduce the DeepSpeed-Ulysses paper's FLOPs (arXiv 2309.14509,
Tables 2 and 3): GPT-2 layers with an MLP of four times the width. The paper states neither head
counts nor positions. The head counts are ours, so that up to 32 or 64 devices divide them.
Positions are rotary, because a learned table for 1M tokens would hold 2.1B parameters, more than
the rest of the 1.2B model; the paper's FLOPs count no position table, so both forms agree with it.
Their rope_theta of 500000 gives the slowest rotation a period of about 3M positions, so that none
of the paper's lengths wraps around.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu"]

GPT2_VOCAB_SIZE = 50257


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The fields of a model shape; each can be overridden by the `model.*` key of its name.

    `num_kv_heads` None means one per query head, and `mlp_dim` None four times the width, so that
    both follow an overridden `num_heads` or `embed_dim`.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    positions: Positions = "rope"
    norm: Norm = "layernorm"
    mlp: Mlp = "gelu"
    biases: bool = True
    tied_head: bool = True
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "quickstart": Preset(
            vocab_size=256,
            num_layers=4,
            num_heads=8,
            embed_dim=128,
            mlp_dim=352,
            norm="rmsnorm",
            mlp="swiglu",
            biases=False,
            rope_theta=10_000.0,
        ),
        "gpt2": Preset(
            vocab_size=GPT2_VOCAB_SIZE,
            num_layers=12,
            num_heads=12,
            embed_dim=768,
            positions="learned",
        ),
        "gpt-1.2b": Preset(vocab_size=GPT2_VOCAB_SIZE, num_layers=24, num_heads=32, embed_dim=2048),
        "gpt-7b": Preset(vocab_size=GPT2_VOCAB_SIZE, num_layers=32, num_heads=32, embed_dim=4096),
        "gpt-30b": Preset(vocab_size=GPT2_VOCAB_SIZE, num_layers=48, num_heads=64, embed_dim=7168),
        "llama3-8b": Preset(
            vocab_size=128_256,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            embed_dim=4096,
            mlp_dim=14336,
            norm="rmsnorm",
            mlp="swiglu",
            biases=False,
            tied_head=False,
        ),
    }
)
