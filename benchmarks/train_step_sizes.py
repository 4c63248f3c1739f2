"""The train step that two systems are compared on: its sizes, first parameters, and tokens."""

import numpy as np
from numpy.typing import NDArray

LAYERS = 4
HEADS = 8
WIDTH = 256
MLP_WIDTH = 4 * WIDTH
VOCABULARY = 256
TOKENS = 2048
WORLD = 2

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
NORM_EPS = 1e-5

STEPS_A_RUN = 4
CHECKED_STEPS = 4

_SPREAD = 0.02
_SHAPES = {
    "embedding.tokens": (VOCABULARY, WIDTH),
    "embedding.positions": (TOKENS, WIDTH),
    "blocks.attention_norm.scale": (LAYERS, WIDTH),
    "blocks.attention_norm.bias": (LAYERS, WIDTH),
    **{
        f"blocks.{name}.{part}": (LAYERS, *shape[start:])
        for name, shape in {
            "query": (WIDTH, WIDTH),
            "key": (WIDTH, WIDTH),
            "value": (WIDTH, WIDTH),
            "output": (WIDTH, WIDTH),
            "up": (WIDTH, MLP_WIDTH),
            "down": (MLP_WIDTH, WIDTH),
        }.items()
        for part, start in (("kernel", 0), ("bias", 1))
    },
    "blocks.mlp_norm.scale": (LAYERS, WIDTH),
    "blocks.mlp_norm.bias": (LAYERS, WIDTH),
    "head.norm.scale": (WIDTH,),
    "head.norm.bias": (WIDTH,),
    "head.table": (VOCABULARY, WIDTH),
}


def parameters() -> dict[str, NDArray[np.float32]]:
    """The first parameters by the path of our tree, those of the layers stacked."""
    draw = np.random.default_rng(1)
    return {
        name: _SPREAD * draw.standard_normal(shape, dtype=np.float32) + name.endswith(".scale")
        for name, shape in _SHAPES.items()
    }


def tokens_and_labels() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The same batch for every step: TOKENS inputs and the token that follows each, [1, S]."""
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (1, TOKENS + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]
