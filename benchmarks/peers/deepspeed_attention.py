"""Contestant: DeepSpeed's DistributedAttention over torch's scaled dot product, one rank of it."""

from typing import Any

from attention_inputs import check, inputs
from contestant import Facts, Run, serve
from peers.gloo import join

_WORLD = 2


def local_attention() -> Any:
    """Causal attention of torch on [B, S, h, D], as the module that DistributedAttention wants."""
    import torch

    class LocalAttention(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2)

    return LocalAttention()


def prepare(seq: int, heads: int, dim: int, rank: int, rendezvous: str) -> tuple[Run, Facts]:
    """Makes this rank's part of q, k and v; a run is forward and backward on both ranks."""
    comm = join(rank, _WORLD, rendezvous)
    import torch
    from deepspeed.sequence.layer import DistributedAttention

    part = slice(rank * seq // _WORLD, (rank + 1) * seq // _WORLD)
    q, k, v, d_out = (
        torch.from_numpy(x[:, part].copy()).requires_grad_(n < 3)
        for n, x in enumerate(inputs(seq, heads, dim))
    )
    attention = DistributedAttention(
        local_attention(), torch.distributed.group.WORLD, scatter_idx=2, gather_idx=1
    )

    def forward_and_backward() -> Any:
        q.grad = k.grad = v.grad = None
        out = attention(q, k, v, 0)
        out.backward(d_out)
        return out

    def run() -> None:
        forward_and_backward()
        comm.barrier()

    out = forward_and_backward().detach()
    results = (out, q.grad, k.grad, v.grad)
    return run, {"work": 1, "check": check(x.numpy() for x in results)}


if __name__ == "__main__":
    serve(prepare, ["torch", "deepspeed"])
