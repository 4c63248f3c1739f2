"""Names for the implementations of local attention."""

from typing import Protocol

from jaxtyping import Array, Float, Float32

from ulysses_jax.attention import blockwise, reference
from ulysses_jax.attention.spec import AttentionSpec


class LocalAttention(Protocol):
    """What one device computes on whole sequences; see `reference.attend` for what it returns."""

    def __call__(
        self,
        q_BShD: Float[Array, "B S h D"],
        k_BTgD: Float[Array, "B T g D"],
        v_BTgD: Float[Array, "B T g D"],
        spec: AttentionSpec,
        scale: float,
    ) -> tuple[Float[Array, "B S h D"], Float32[Array, "B h S"]]: ...


def attention_function(name: str) -> LocalAttention:
    """The implementation called `name`.

    Raises:
        ValueError: there is none of that name.
    """
    implementations: dict[str, LocalAttention] = {
        "blockwise": blockwise.attend,
        "reference": reference.attend,
    }
    if name not in implementations:
        raise ValueError(
            f"there is no attention called {name!r}: choose one of {', '.join(implementations)}"
        )
    return implementations[name]
