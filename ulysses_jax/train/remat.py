"""What a layer's backward pass recomputes: the remat policies by name."""

from collections.abc import Callable
from typing import Any

import jax

EXCHANGED = ("attn_q", "attn_k", "attn_v", "attn_out", "attn_lse", "attn_exchanged")
"""What the exchanges and the local attention kernel made, by the names they give."""

# Weights made whole from shards must never be kept for the backward pass: all layers' together
# are the whole model. They come from a gather and a slice; other slices are cheap to redo.
_NEVER_KEPT = {"all_gather", "slice"}


def _keep_all_but_weights(primitive: Any, *avals: Any, **_: Any) -> bool:
    if primitive.name == "convert_element_type":
        # Activations have batch, sequence and more; what has less is a weight being cast.
        return avals[0].ndim > 2
    return primitive.name not in _NEVER_KEPT


def remat_wrapper(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The wrapper of the layer function for `train.remat`.

    - `none`: keeps every activation; only weights are gathered again.
    - `exchange`: keeps what `EXCHANGED` names, so the backward pass repeats no all-to-all and no
      attention: 8 all-to-alls a layer and step.
    - `full`: keeps the layer's input only: 12 all-to-alls a layer and step.
    """
    policies: dict[str, Any] = {
        "none": _keep_all_but_weights,
        "exchange": jax.checkpoint_policies.save_only_these_names(*EXCHANGED),
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    policy = policies[name]
    # Inside a scan, common subexpressions cannot be merged across the passes anyway.
    return lambda layer: jax.checkpoint(layer, policy=policy, prevent_cse=False)
