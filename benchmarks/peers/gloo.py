"""Joins the torch processes of one contestant over gloo, one thread each, for DeepSpeed on CPU."""

import os
from typing import Any


def join(rank: int, world: int, rendezvous: str) -> Any:
    """Returns DeepSpeed's communication module, started; call it before any import of DeepSpeed.

    Args:
      rank: of this process.
      world: how many there are.
      rendezvous: path of a file that does not exist yet, the same in all.
    """
    # DeepSpeed looks these up wherever it likes; nothing else here reads the environment.
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
    }
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    return deepspeed.comm
