"""The same inputs of attention for every contestant, and a check of what it made of them."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


def inputs(seq: int, heads: int, dim: int) -> Iterator[NDArray[np.float32]]:
    """q, k, v and the cotangent of the output, each [1, seq, heads, dim], one at a time."""
    draw = np.random.default_rng(0)
    for _ in range(4):
        yield draw.standard_normal((1, seq, heads, dim), dtype=np.float32)


def check(results: Iterable[NDArray[np.float32]]) -> list[float]:
    """Sums of squares of the output and the gradients; parts of a sequence add up to the whole."""
    return [float(np.sum(np.square(x, dtype=np.float64))) for x in results]


def useful_flops(seq: int, heads: int, dim: int) -> float:
    """Of causal attention forward and backward: 4·S²·H·D/2, and 2.5 times that backward."""
    return 3.5 * 4 * seq**2 * heads * dim / 2
