"""Eight simulated CPU devices for every test, and the tiny model and batches that tests share."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from ulysses_jax.model.config import Architecture

# Tiny programs gain nothing from optimised code, and compile several times as fast without.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def tiny_architecture() -> Callable[..., Architecture]:
    """Makes a Llama-shaped model whose widths 6 devices do not divide; overrides by name."""

    def make(**overrides: Any) -> Architecture:
        fields: dict[str, Any] = {
            "vocab_size": 37,
            "num_layers": 2,
            "num_heads": 8,
            "num_kv_heads": 8,
            "embed_dim": 16,
            "mlp_dim": 21,
            "max_seq_len": 24,
            "positions": "rope",
            "norm": "rmsnorm",
            "mlp": "swiglu",
            "biases": False,
            "tied_head": False,
            "dropout_rate": 0.0,
            "rope_theta": 100.0,
            "norm_eps": 1e-5,
            "dtype": "float32",
            "attention": "blockwise",
        } | overrides
        return Architecture(head_dim=fields["embed_dim"] // fields["num_heads"], **fields)

    return make


@pytest.fixture(scope="session")
def packed_batch() -> Callable[..., Any]:
    """Makes a [A, B, S] batch of packed documents with unevenly ignored labels, in numpy."""

    def make(shape: tuple[int, int, int] = (1, 24, 24), masked: bool = True, seed: int = 0) -> Any:
        from ulysses_jax.data.batches import Batch

        draw = np.random.default_rng(seed)
        tokens = draw.integers(0, 37, (*shape[:-1], shape[-1] + 1), dtype=np.int32)
        labels = tokens[..., 1:].copy()
        # Rows and columns that one device of a mesh holds alone go without any label.
        labels[:, ::3, : shape[-1] // 3] = -100
        labels[:, 1, :] = -100
        position = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        if not masked:
            return Batch(tokens[..., :-1], labels, position.copy(), None)
        cut = draw.integers(1, shape[-1], (*shape[:-1], 1), dtype=np.int32)
        segments = (position >= cut).astype(np.int32)
        return Batch(tokens[..., :-1], labels, position - segments * cut, segments)

    return make
