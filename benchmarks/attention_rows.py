"""The rows of the attention benchmark: what is measured, against whom, and what must be reached."""

from dataclasses import dataclass
from typing import Any, Literal

from interleaving import Side

Figure = Literal["seconds", "temporary_bytes", "wire_bytes", "peak_rss_bytes"]
Ratio = Literal["against / ours", "ours / against", "ours"]


@dataclass(frozen=True)
class Goal:
    """One number of a row and its bound.

    Attributes:
      figure: what is compared; seconds are the median, for one unit of each side's work.
      ratio: what the number is.
      bound: what it must reach: at least this for "against / ours", else at most this.
      aim: what would be better still.
    """

    figure: Figure
    ratio: Ratio
    bound: float
    aim: float | None = None


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      name: how `--only` calls it.
      work: what is computed, in words.
      ours, against: the two sides; against None is the machine.
      goals: what must be reached.
      rounds: how often each side runs, in turn.
    """

    name: str
    work: str
    ours: Side
    against: Side | None
    goals: tuple[Goal, ...]
    rounds: int


def rows() -> list[Row]:
    """Every row; all attention is of one batch row, float32, forward and backward."""
    return [
        *_inside_the_exchange(),
        *(_deepspeed_attention(dim) for dim in (32, 64)),
        *(_matmul_rate(seq, dim) for seq in (4096, 16384) for dim in (64, 128)),
        _window(),
        _causal(),
        _documents(),
        _train_step(),
        _million_tokens(),
    ]


def _attention(name: str, peer: bool = False, **arguments: Any) -> Side:
    return Side(name, "jax_attention", arguments, peer=peer)


def _faster(times: float, aim: float | None = None) -> Goal:
    return Goal("seconds", "against / ours", times, aim)


def _inside_the_exchange() -> list[Row]:
    sizes: dict[str, Any] = {"seq": 4096, "heads": 8, "dim": 64, "devices": 8}
    work = "S 4096, H 8, D 64, causal, P 8"
    ours = _attention("ours", **sizes)
    return [
        # A device's whole part as one block, and the blocks that are fastest here.
        *(_ring_attention(work, ours, block, sizes) for block in (512, 128)),
        Row(
            "jax.nn",
            work,
            ours,
            _attention("jax.nn xla, same exchange", local="jax.nn", **sizes),
            (_faster(5), Goal("temporary_bytes", "ours / against", 1 / 10)),
            rounds=3,
        ),
        Row(
            "tokamax",
            work,
            ours,
            _attention("tokamax xla_chunked, same exchange", peer=True, local="tokamax", **sizes),
            (_faster(3),),
            rounds=5,
        ),
    ]


def _ring_attention(work: str, ours: Side, block: int, sizes: dict[str, Any]) -> Row:
    name = f"ringattention 0.1.2, blocks of {block}"
    return Row(
        f"ringattention-b{block}",
        work,
        ours,
        _attention(name, peer=True, local="ring", ring_block=block, **sizes),
        (
            _faster(1.7, aim=2.2),
            Goal("temporary_bytes", "ours / against", 1 / 4),
            Goal("wire_bytes", "ours / against", 7 / 48),
        ),
        rounds=7,
    )


def _deepspeed_attention(dim: int) -> Row:
    sizes = {"seq": 4096, "heads": 8, "dim": dim}
    return Row(
        f"deepspeed-d{dim}",
        f"S 4096, H 8, D {dim}, causal, P 2",
        _attention("ours", devices=2, **sizes),
        Side(
            "DeepSpeed DistributedAttention, 2 gloo processes",
            "peers.deepspeed_attention",
            sizes,
            processes=2,
            peer=True,
        ),
        (_faster(1, aim=1.3),),
        rounds=11,
    )


def _matmul_rate(seq: int, dim: int) -> Row:
    return Row(
        f"matmul-s{seq}-d{dim}",
        f"S {seq}, H 8, D {dim}, causal, P 1: useful FLOP/s",
        _attention("ours", seq=seq, heads=8, dim=dim, work="flops", warm_up=seq < 8192),
        Side("XLA's 2048×2048 product", "matmul_rate"),
        (_faster(0.50, aim=0.65),),
        rounds=5 if seq < 8192 else 3,
    )


def _window() -> Row:
    sizes: dict[str, Any] = {"heads": 8, "dim": 32, "devices": 8, "window": 1024, "work": "tokens"}
    return Row(
        "window",
        "window 1024, H 8, D 32, P 8: per token at S 131072 against S 32768",
        _attention("S 131072", seq=131072, warm_up=False, **sizes),
        _attention("S 32768", seq=32768, warm_up=False, **sizes),
        (Goal("seconds", "ours / against", 1.10),),
        rounds=3,
    )


def _causal() -> Row:
    sizes: dict[str, Any] = {"seq": 16384, "heads": 8, "dim": 32, "devices": 8, "warm_up": False}
    return Row(
        "causal",
        "S 16384, H 8, D 32, P 8: causal against not",
        _attention("causal", **sizes),
        _attention("not causal", causal=False, **sizes),
        (Goal("seconds", "ours / against", 0.56),),
        rounds=3,
    )


def _documents() -> Row:
    sizes: dict[str, Any] = {"seq": 131072, "heads": 1, "dim": 16, "warm_up": False}
    return Row(
        "documents",
        "S 131072, H 1, D 16, causal, P 1: 8 equal documents against 1",
        _attention("8 documents", documents=8, **sizes),
        _attention("1 document", documents=1, **sizes),
        (Goal("seconds", "ours / against", 0.16),),
        rounds=3,
    )


def _train_step() -> Row:
    return Row(
        "train-step",
        "train step: 4 layers × 256, 8 heads, V 256, S 2048, ZeRO-3, AdamW, clipping, P 2",
        Side("ours, remat exchange", "train_step", {"remat": "exchange"}),
        Side("DeepSpeed ZeRO-3, 2 gloo processes", "peers.deepspeed_step", processes=2, peer=True),
        (_faster(1),),
        rounds=5,
    )


def _million_tokens() -> Row:
    # On one device: the exchange of several would hold q, k, v and their gradients twice.
    sizes: dict[str, Any] = {"seq": 2**20, "heads": 8, "dim": 16}
    return Row(
        "million",
        "S 1048576, window 1024, H 8, D 16, P 1",
        _attention("ours", window=1024, warm_up=False, **sizes),
        None,
        (Goal("peak_rss_bytes", "ours", 6e9), Goal("seconds", "ours", 180)),
        rounds=1,
    )
