"""Contestant: the train step of DeepSpeed ZeRO-3 with DistributedAttention, one rank of it.

ZeRO-3 is DeepSpeed's default one: it keeps parameters of fewer than 100,000 entries whole. The
optimizer is torch's fused AdamW.
"""

from typing import Any

import train_step_sizes as sizes
from contestant import Facts, Run, serve
from peers.deepspeed_attention import local_attention
from peers.gloo import join


def prepare(rank: int, rendezvous: str) -> tuple[Run, Facts]:
    """Takes the checked steps; a run is a few more, on both ranks."""
    join(rank, sizes.WORLD, rendezvous)
    import deepspeed
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(sizes.WORLD)
    model = _model(parallel_state_sp.get_sequence_parallel_group())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_optimizer(model),
        mpu=parallel_state_sp,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": sizes.CLIP_NORM,
            "zero_optimization": {"stage": 3},
        },
    )
    share = sizes.TOKENS // sizes.WORLD
    part = slice(rank * share, (rank + 1) * share)
    tokens, labels = (
        torch.from_numpy(x[:, part].astype("int64")) for x in sizes.tokens_and_labels()
    )
    positions = torch.arange(part.start, part.stop)

    def step() -> float:
        loss = engine(tokens, labels, positions)
        engine.backward(loss)
        engine.step()
        return float(loss.detach()) / sizes.WORLD

    def run() -> None:
        for _ in range(sizes.STEPS_A_RUN):
            step()
        deepspeed.comm.barrier()

    losses = [step() for _ in range(sizes.CHECKED_STEPS)]
    return run, {"work": sizes.STEPS_A_RUN, "check": losses}


def _model(group: Any) -> Any:
    import torch
    from deepspeed.sequence.layer import DistributedAttention
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(sizes.WIDTH, eps=sizes.NORM_EPS)
            self.query = nn.Linear(sizes.WIDTH, sizes.WIDTH)
            self.key = nn.Linear(sizes.WIDTH, sizes.WIDTH)
            self.value = nn.Linear(sizes.WIDTH, sizes.WIDTH)
            self.output = nn.Linear(sizes.WIDTH, sizes.WIDTH)
            self.mlp_norm = nn.LayerNorm(sizes.WIDTH, eps=sizes.NORM_EPS)
            self.up = nn.Linear(sizes.WIDTH, sizes.MLP_WIDTH)
            self.down = nn.Linear(sizes.MLP_WIDTH, sizes.WIDTH)
            self.attention = DistributedAttention(local_attention(), group, 2, 1)

        def forward(self, x: Any) -> Any:
            normed = self.attention_norm(x)
            heads = (*x.shape[:2], sizes.HEADS, -1)
            q, k, v = (f(normed).view(heads) for f in (self.query, self.key, self.value))
            x = x + self.output(self.attention(q, k, v, 0).reshape(x.shape))
            hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
            return x + self.down(hidden)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(sizes.VOCABULARY, sizes.WIDTH)
            self.positions = nn.Embedding(sizes.TOKENS, sizes.WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(sizes.LAYERS))
            self.norm = nn.LayerNorm(sizes.WIDTH, eps=sizes.NORM_EPS)
            self.table = nn.Linear(sizes.WIDTH, sizes.VOCABULARY, bias=False)

        def forward(self, tokens: Any, labels: Any, positions: Any) -> Any:
            x = self.tokens(tokens) + self.positions(positions)
            for layer in self.layers:
                x = layer(x)
            logits = self.table(self.norm(x))
            # The mean of this rank's tokens: DeepSpeed averages gradients over the ranks.
            return functional.cross_entropy(logits[0], labels[0])

    model = Model()
    ours = {name: torch.from_numpy(x) for name, x in sizes.parameters().items()}
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(_ours_for(name, ours))
    return model


def _ours_for(name: str, ours: dict[str, Any]) -> Any:
    """Our parameter that torch calls `name`; its linear layers are transposed to ours."""
    whole = {
        "tokens.weight": "embedding.tokens",
        "positions.weight": "embedding.positions",
        "norm.weight": "head.norm.scale",
        "norm.bias": "head.norm.bias",
        "table.weight": "head.table",
    }
    if name in whole:
        return ours[whole[name]]
    _, layer, module, part = name.split(".")
    if part == "bias":
        return ours[f"blocks.{module}.bias"][int(layer)]
    if module.endswith("norm"):
        return ours[f"blocks.{module}.scale"][int(layer)]
    return ours[f"blocks.{module}.kernel"][int(layer)].T


def _optimizer(model: Any) -> Any:
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": sizes.WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=sizes.LEARNING_RATE,
        betas=sizes.BETAS,
        eps=sizes.EPS,
        fused=True,
    )


if __name__ == "__main__":
    serve(prepare, ["torch", "deepspeed"])
