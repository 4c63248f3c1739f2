"""The loss curves of a run as a PNG."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_losses(records: list[dict[str, Any]], references: dict[str, float], path: Path) -> None:
    """Draws training and held-out loss over the steps, in bits per token.

    Args:
      records: lines of metrics.jsonl.
      references: bits per token to mark with a horizontal line, by name.
      path: the PNG to write.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    train = [r for r in records if "loss" in r]
    held_out = [r for r in records if "eval_loss" in r]
    axes.plot(
        [r["step"] for r in train],
        [r["loss"] / math.log(2) for r in train],
        color="tab:blue",
        linewidth=1,
        label="training",
    )
    axes.plot(
        [r["step"] for r in held_out],
        [r["bits_per_token"] for r in held_out],
        color="tab:orange",
        marker="o",
        label="held out",
    )
    for name, bits in references.items():
        axes.axhline(bits, color="gray", linestyle="--", linewidth=1, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
