"""Names for the implementations of local attention, and the choice among them."""

import functools
from importlib import import_module
from typing import Protocol

import jax
from jaxtyping import Array, Float, Float32

from ulysses_jax.attention import blockwise, reference
from ulysses_jax.attention.announce import announce
from ulysses_jax.attention.spec import AttentionSpec

# What a kernel runs on, and the extra of this package that brings it; its module has its name and
# is imported when it is asked for.
_KERNELS = {
    "cudnn": ("gpu", "cuda12"),
    "tokamax": ("gpu", "tokamax"),
    "pallas": ("gpu", "cuda12"),
    "splash": ("tpu", "tpu"),
}
_AUTO = "auto"


class LocalAttention(Protocol):
    """What one device computes on whole sequences; see `reference.attend` for what it returns."""

    def __call__(
        self,
        q_BShD: Float[Array, "B S h D"],
        k_BTgD: Float[Array, "B T g D"],
        v_BTgD: Float[Array, "B T g D"],
        spec: AttentionSpec,
        scale: float,
    ) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"] | None]: ...


class MissingPackageError(ValueError):
    """An implementation was asked for by name whose package is not installed."""


def attention_function(name: str, platform: str | None = None) -> LocalAttention:
    """The implementation called `name`.

    - `blockwise`: pure JAX, on every platform, everything an `AttentionSpec` can say.
    - `reference`: dense, O(S x T) memory, for tests.
    - `cudnn`, `tokamax`, `pallas` (NVIDIA GPUs), `splash` (TPUs): kernels that others keep. When
      called with what its kernel cannot do, each raises NotImplementedError with the reason.
    - `auto`: the first of the platform's kernels, in this order, that can do the call at hand;
      else `blockwise`. It says on stderr which one it took, and why not those before.

    Args:
        name: one of the above.
        platform: "cpu", "gpu" or "tpu", to compile for devices that are elsewhere; None is
            `jax.default_backend()`.

    Raises:
        ValueError: there is none of that name, or (`MissingPackageError`) its package is missing.
        NotImplementedError: it does not run on the platform.

    Example:
        >>> q = jnp.ones((1, 6, 4, 8))
        >>> attend = attention_function("blockwise")
        >>> out, lse = attend(q, q, q, AttentionSpec(causal=True), 8**-0.5)
        >>> out.shape, lse.shape
        ((1, 6, 4, 8), (1, 4, 6))
    """
    fixed: dict[str, LocalAttention] = {
        "blockwise": blockwise.attend,
        "reference": reference.attend,
    }
    if name in fixed:
        return fixed[name]
    if name == _AUTO:
        return functools.partial(_first_that_can, _normal(platform))
    if name not in _KERNELS:
        raise ValueError(
            f"there is no attention called {name!r}: choose one of "
            f"{', '.join([_AUTO, *fixed, *_KERNELS])}"
        )
    return _kernel(name, platform)


def _kernel(name: str, platform: str | None) -> LocalAttention:
    needed, extra = _KERNELS[name]
    present = _normal(platform)
    if present != needed:
        raise NotImplementedError(
            f"attention {name!r} runs on {needed.upper()}s, but this program is for a "
            f"{present.upper()}: use 'auto' or 'blockwise'"
        )
    try:
        return import_module(f"ulysses_jax.attention.{name}").attend
    except ImportError as error:
        raise MissingPackageError(
            f"attention {name!r} cannot be imported ({error}): pip install 'ulysses_jax[{extra}]'"
        ) from error


def _normal(platform: str | None) -> str:
    platform = platform or jax.default_backend()
    if platform not in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"there is no platform {platform!r}: use cpu, gpu or tpu")
    return "gpu" if platform in ("cuda", "rocm") else platform


def _first_that_can(
    platform: str | None,
    q_BShD: Float[Array, "B S h D"],
    k_BTgD: Float[Array, "B T g D"],
    v_BTgD: Float[Array, "B T g D"],
    spec: AttentionSpec,
    scale: float,
) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"] | None]:
    present = _normal(platform)
    refusals = []
    for name, (needed, _) in _KERNELS.items():
        if needed != present:
            continue
        try:
            results = _kernel(name, platform)(q_BShD, k_BTgD, v_BTgD, spec, scale)
        except (NotImplementedError, MissingPackageError) as refusal:
            refusals.append(f"not {name}: {refusal}")
        else:
            _announce(name, present, refusals)
            return results
    _announce("blockwise", present, refusals)
    return blockwise.attend(q_BShD, k_BTgD, v_BTgD, spec, scale)


def _announce(name: str, platform: str, refusals: list[str]) -> None:
    announce("\n  ".join([f"attention: auto takes {name} on {platform}", *refusals]))
