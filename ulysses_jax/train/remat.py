"""What a layer's backward pass recomputes: the remat policies by name."""

from collections.abc import Callable
from typing import Any

import jax

EXCHANGED = ("attn_q", "attn_k", "attn_v", "attn_out", "attn_lse", "attn_exchanged")
"""What the exchanges and the local attention kernel made, by the names they give."""


def _keep_all_but_weights(_: Any, *inputs: Any, **__: Any) -> bool:
    """Keeps what is computed from activations, which have a batch, a sequence and a width.

    What comes from weights alone is redone: kept, the gathered weights of all layers would be the
    whole model.
    """
    return any(len(x.shape) > 2 for x in inputs)


def remat_wrapper(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The wrapper of the layer function for `train.remat`.

    - `none`: keeps every activation; only weights are gathered again.
    - `exchange`: keeps what `EXCHANGED` names, so the backward pass repeats no all-to-all and no
      attention: 4 all-to-alls a layer and step.
    - `full`: keeps the layer's input only: 6 all-to-alls a layer and step.
    """
    policies: dict[str, Any] = {
        "none": _keep_all_but_weights,
        "exchange": jax.checkpoint_policies.save_only_these_names(*EXCHANGED),
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    policy = policies[name]
    # Inside a scan, common subexpressions cannot be merged across the passes anyway.
    return lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)
