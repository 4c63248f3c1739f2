"""Makes a local attention of a forward and a backward kernel that others keep.

Their own differentiation rules hide the residuals from remat policies, drop the gradient of the
log-sum-exp without a word, and give NaN or an average where a query has nothing to attend to. Here
the rule is ours and the two kernels are called as plain functions.
"""

from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Float32

from ulysses_jax.attention.varying import vary_alike

Outputs: TypeAlias = tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]
Gradients: TypeAlias = tuple[
    Float[Array, "B S h D"], Float[Array, "B T g D"], Float[Array, "B T g D"]
]

# As the log-sum-exp of a query, above every score: all its weights are exactly 0 in the backward
# pass. Finite, so that no kernel takes the difference of two infinities.
NOTHING_ATTENDED = 1e30

# Below every score of two float32 or bfloat16 vectors that is not overflowing itself.
_LOWEST = -1e37


class FusedKernel(Protocol):
    """Two kernels and their static parameters; hashable.

    `masks` are the kernel's own integer arrays (lengths, ranges, ids). What the kernels give for a
    query with nothing to attend to does not matter if it is told by `empty_BS`, or by a log-sum-exp
    near the least float32, as results from masking scores with that.
    """

    def forward(
        self,
        q_BShD: Float[Array, "B S h D"],
        k_BTgD: Float[Array, "B T g D"],
        v_BTgD: Float[Array, "B T g D"],
        masks: tuple[Array, ...],
    ) -> Outputs:
        """The output and the natural log-sum-exp of the scaled scores."""

    def backward(
        self,
        q_BShD: Float[Array, "B S h D"],
        k_BTgD: Float[Array, "B T g D"],
        v_BTgD: Float[Array, "B T g D"],
        masks: tuple[Array, ...],
        out_BShD: Float[Array, "B S h D"],
        lse_BhS: Float32[Array, "B h S"],
        dout_BShD: Float[Array, "B S h D"],
    ) -> Gradients:
        """With p = exp(scores - lse): dv = p^T dout; dq and dk from p (dout v^T - dout . out)."""


def fused_attention(
    kernel: FusedKernel,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    masks: tuple[Array, ...],
    empty_BS: Bool[Array, "B S"] | None,
) -> Outputs:
    """Attention by `kernel`, differentiable in q, k and v through both results.

    Keeps the residuals under the names `attn_q`, `attn_k`, `attn_v`, `attn_out` and `attn_lse`.
    Differentiating the log-sum-exp costs one more backward kernel; where it is not used that is
    known at trace time, and costs nothing.

    Args:
        kernel: the two kernels.
        q_BShD, k_BTgD, v_BTgD: what the kernels accept; checking is the caller's.
        masks: integer arrays handed to the kernels.
        empty_BS: queries with nothing to attend to; None if the log-sum-exp tells. They give 0
            and -inf, and pass nothing on.
    """
    return _attend(kernel, *vary_alike((q_BShD, k_BTgD, v_BTgD, masks, empty_BS)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    kernel: FusedKernel,
    q_BShD: Array,
    k_BTgD: Array,
    v_BTgD: Array,
    masks: tuple[Array, ...],
    empty_BS: Array | None,
) -> Outputs:
    out_BShD, lse_BhS = kernel.forward(q_BShD, k_BTgD, v_BTgD, masks)
    empty_BhS = lse_BhS < _LOWEST
    if empty_BS is not None:
        empty_BhS = empty_BhS | empty_BS[:, None]
    out_BShD = jnp.where(empty_BhS.swapaxes(1, 2)[..., None], 0, out_BShD)
    return out_BShD, jnp.where(empty_BhS, -jnp.inf, lse_BhS)


def _attend_forward(
    kernel: FusedKernel, q: Any, k: Any, v: Any, masks: Any, empty: Any
) -> tuple[Outputs, tuple[Any, ...]]:
    # Each argument comes with whether it is differentiated, which does not matter here.
    q, k, v, masks, empty = jax.custom_derivatives.custom_vjp_primal_tree_values(
        (q, k, v, masks, empty)
    )
    q_BShD = checkpoint_name(q, "attn_q")
    k_BTgD = checkpoint_name(k, "attn_k")
    v_BTgD = checkpoint_name(v, "attn_v")
    out_BShD, lse_BhS = _attend(kernel, q_BShD, k_BTgD, v_BTgD, masks, empty)
    outputs = checkpoint_name(out_BShD, "attn_out"), checkpoint_name(lse_BhS, "attn_lse")
    return outputs, (q_BShD, k_BTgD, v_BTgD, masks, outputs)


def _attend_backward(
    kernel: FusedKernel, residuals: tuple[Any, ...], cotangents: tuple[Any, Any]
) -> tuple[Array, Array, Array, None, None]:
    q_BShD, k_BTgD, v_BTgD, masks, (out_BShD, lse_BhS) = residuals
    dout_BShD, dlse_BhS = cotangents
    empty_BhS = lse_BhS == -jnp.inf
    empty_BSh1 = empty_BhS.swapaxes(1, 2)[..., None]
    lse_BhS = jnp.where(empty_BhS, NOTHING_ATTENDED, lse_BhS)

    def gradients(v_BTgD: Array, out_BShD: Array, dout_BShD: Array) -> Gradients:
        # A constant's cotangent means nothing, and may be NaN.
        dout_BShD = jnp.where(empty_BSh1, 0, dout_BShD)
        return kernel.backward(q_BShD, k_BTgD, v_BTgD, masks, out_BShD, lse_BhS, dout_BShD)

    dq_BShD, dk_BTgD, dv_BTgD = jax.tree.map(jnp.zeros_like, (q_BShD, k_BTgD, v_BTgD))
    if not isinstance(dout_BShD, SymbolicZero):
        dq_BShD, dk_BTgD, dv_BTgD = gradients(v_BTgD, out_BShD, dout_BShD)
    if not isinstance(dlse_BhS, SymbolicZero):
        # The gradient of a score is p (dout v^T - dout . out + dlse). With v = (1, 0, 0, ...) for
        # every key, out = 0 and dout = (dlse, 0, 0, ...), the kernel gives the last term alone.
        first_D = jnp.zeros(q_BShD.shape[3], q_BShD.dtype).at[0].set(1)
        dlse_BSh1 = dlse_BhS.swapaxes(1, 2)[..., None].astype(q_BShD.dtype)
        ones_BTgD = jnp.broadcast_to(first_D, v_BTgD.shape)
        dq, dk, _ = gradients(ones_BTgD, jnp.zeros_like(q_BShD), dlse_BSh1 * first_D)
        dq_BShD, dk_BTgD = dq_BShD + dq, dk_BTgD + dk
    return *vary_alike((dq_BShD, dk_BTgD, dv_BTgD)), None, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
