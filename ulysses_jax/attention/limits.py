"""What kernels that others keep refuse alike, and why."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ulysses_jax.attention.shapes import AttentionSizes
from ulysses_jax.attention.spec import AttentionSpec


def compute_capability() -> float | None:
    """That of the first NVIDIA GPU here (8.0 Ampere, 9.0 Hopper); None where there is none.

    Without one, as when compiling for GPUs that are elsewhere, a kernel may count only on what
    every generation from Ampere on can do.

    Raises:
        NotImplementedError: the GPU is not NVIDIA's.
    """
    if jax.default_backend() != "gpu":
        return None
    capability = str(jax.local_devices()[0].compute_capability)
    if not capability.replace(".", "", 1).isdecimal():
        raise NotImplementedError(f"this kernel is for NVIDIA GPUs, not for {capability}")
    return float(capability)


def refuse_before_ampere(kernel: str) -> None:
    """Refuses GPUs older than Ampere, and those that are not NVIDIA's.

    Raises:
        NotImplementedError: naming the compute capability.
    """
    capability = compute_capability()
    if capability is not None and capability < 8:
        raise NotImplementedError(
            f"{kernel} needs an NVIDIA GPU of compute capability 8.0 (Ampere), not {capability}"
        )


def refuse_pairwise(kernel: str, spec: AttentionSpec) -> None:
    """Refuses what is given for each pair: mask, bias, block layout and dropout.

    Raises:
        NotImplementedError: the spec has one of them.
    """
    for name in ("mask", "bias", "block_layout", "dropout"):
        if getattr(spec, name) is not None:
            raise NotImplementedError(
                f"{kernel} cannot apply AttentionSpec.{name}: its kernels know causality and "
                "ranges of keys only"
            )


def refuse_dtypes(kernel: str, allowed: tuple[str, ...], *arrays: Array) -> None:
    """Refuses arrays that are not all of one of the `allowed` dtypes.

    Raises:
        NotImplementedError: naming the dtypes.
    """
    dtypes = [x.dtype for x in arrays]
    if len(set(dtypes)) > 1 or dtypes[0] not in [jnp.dtype(name) for name in allowed]:
        found = ", ".join(str(dtype) for dtype in dtypes)
        raise NotImplementedError(
            f"{kernel} needs q, k and v all in {' or '.join(allowed)}, not {found}"
        )


def refuse_head_dim(kernel: str, sizes: AttentionSizes, multiple: int, largest: int) -> None:
    """Refuses a head dim that is not a multiple of `multiple` up to `largest`.

    Raises:
        NotImplementedError: naming the head dim and the limits.
    """
    if sizes.head_dim % multiple or sizes.head_dim > largest:
        raise NotImplementedError(
            f"{kernel} needs a head dim that is a multiple of {multiple} up to {largest}, "
            f"not {sizes.head_dim}"
        )


def static_window(kernel: str, spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The sides of the attended band as numbers; causality is a right side of 0 at most.

    Raises:
        NotImplementedError: a side is traced.
    """
    sides: list[int | None] = []
    for side in spec.window or (None, None):
        if side is not None and not isinstance(side, int | np.integer):
            raise NotImplementedError(
                f"{kernel} compiles the window into the program, but AttentionSpec.window is "
                "traced: make the spec inside the jitted function, from Python ints"
            )
        sides.append(None if side is None else int(side))
    left, right = sides
    if spec.causal:
        right = 0 if right is None else min(right, 0)
    return left, right
