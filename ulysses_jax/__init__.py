"""Ulysses sequence parallelism for training transformers on long sequences in JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_jax.attention.block_layout import BlockLayout
    from ulysses_jax.attention.dropout import Dropout
    from ulysses_jax.attention.select import attention_function
    from ulysses_jax.attention.spec import AttentionSpec
    from ulysses_jax.model.gpt import GPT
    from ulysses_jax.parallel.exchange import heads_to_seq, seq_to_heads
    from ulysses_jax.parallel.flax import make_attention_fn
    from ulysses_jax.parallel.heads import HeadPlan
    from ulysses_jax.parallel.layer import ulysses_attention
    from ulysses_jax.parallel.mesh import make_mesh
    from ulysses_jax.parallel.ulysses import exchanged_attention
    from ulysses_jax.verification.case import Case
    from ulysses_jax.verification.report import Check, Report
    from ulysses_jax.verification.verify import verify

__all__ = [
    "GPT",
    "AttentionSpec",
    "BlockLayout",
    "Case",
    "Check",
    "Dropout",
    "HeadPlan",
    "Report",
    "attention_function",
    "exchanged_attention",
    "heads_to_seq",
    "make_attention_fn",
    "make_mesh",
    "seq_to_heads",
    "ulysses_attention",
    "verify",
]

# Imported when first used: parsing a config imports this package, and must not import JAX.
_HOMES = {
    "GPT": "model.gpt",
    "AttentionSpec": "attention.spec",
    "BlockLayout": "attention.block_layout",
    "Case": "verification.case",
    "Check": "verification.report",
    "Dropout": "attention.dropout",
    "HeadPlan": "parallel.heads",
    "Report": "verification.report",
    "attention_function": "attention.select",
    "exchanged_attention": "parallel.ulysses",
    "heads_to_seq": "parallel.exchange",
    "make_attention_fn": "parallel.flax",
    "make_mesh": "parallel.mesh",
    "seq_to_heads": "parallel.exchange",
    "ulysses_attention": "parallel.layer",
    "verify": "verification.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
