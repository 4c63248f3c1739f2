"""Floating-point work of a step, counted two ways, and the peaks it is compared with."""

import jax

from ulysses_jax.model.config import Architecture

# Dense bfloat16 peak in FLOP/s, from NVIDIA's and Google's data sheets, by JAX's device kind.
_PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
}


def device_peak(device: jax.Device) -> float | None:
    """Peak bfloat16 FLOP/s of `device`; None where it is not known, as on a CPU."""
    kind = device.device_kind
    known = [name for name in _PEAKS if kind.startswith(name)]
    return _PEAKS[max(known, key=len)] if known else None


def useful_flops(arch: Architecture, sequences: int, seq_len: int) -> float:
    """FLOPs that a training step needs: forward and twice as much backward, nothing recomputed.

    Matrix products only. Attention is causal, so half of the pairs count, also where a document
    mask needs fewer; embedding lookups do not.
    """
    tokens = sequences * seq_len
    projections = 2 * arch.embed_dim * (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    mlp = (3 if arch.mlp == "swiglu" else 2) * arch.embed_dim * arch.mlp_dim
    matrices = arch.num_layers * (projections + mlp) + arch.vocab_size * arch.embed_dim
    attention = arch.num_layers * 2 * seq_len * arch.num_heads * arch.head_dim
    return 3.0 * tokens * (2 * matrices + attention)


def paper_flops(arch: Architecture, sequences: int, seq_len: int) -> float:
    """FLOPs as the DeepSpeed-Ulysses paper counts them: 96·B·N·L·h²·(1 + N/(6h) + V/(16·L·h)).

    Megatron's formula, with the recomputation of activations, non-causal attention, and an MLP
    four times as wide as the model whatever the model's own.
    """
    B, N, L, h, V = sequences, seq_len, arch.num_layers, arch.embed_dim, arch.vocab_size
    return 96.0 * B * N * L * h**2 * (1 + N / (6 * h) + V / (16 * L * h))
