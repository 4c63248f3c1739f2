"""Sequence-parallel attention where the mesh axes are manual, by the route that moves less."""

import warnings
from typing import Literal, TypeAlias, get_args

from jax import lax
from jaxtyping import Array, Float, Float32

from ulysses_jax.attention.announce import announce
from ulysses_jax.attention.select import LocalAttention
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.halo import Halo, attend_with_halo, halo_of
from ulysses_jax.parallel.head_exchange import attend_by_heads
from ulysses_jax.parallel.heads import HeadPlan

Exchange: TypeAlias = Literal["auto", "all_to_all", "halo"]

_WASTE_WARNED = 1.5


def exchanged_attention(
    q_BsHD: Float[Array, "B s H D"],
    k_BtKD: Float[Array, "B t K D"],
    v_BtKD: Float[Array, "B t K D"],
    spec: AttentionSpec,
    *,
    local: LocalAttention,
    axis: str,
    scale: float,
    exchange: Exchange = "auto",
    chunks: int = 1,
) -> Float[Array, "B s H D"]:
    """Attention over the whole sequence from inside a `shard_map` region (paper, section 3.1).

    Any number of heads: see `HeadPlan` for what devices compute that do not divide them.

    Args:
      q_BsHD, k_BtKD, v_BtKD: this device's contiguous part of the sequences, all heads.
      spec: what is attended, described over the whole sequence and all heads: its arrays are
        [B, S] and [B|1, H|1, S|1, T|1], not this device's part of them. B are the rows of this
        region: where they are split over another axis and dropout is given, `first_row` says
        which they are, as in `lax.axis_index("data") * B`.
      local: attention on one device, such as `attention_function("blockwise")`.
      axis: the manual mesh axis over which the sequence is split.
      scale: factor of the scores, usually D^(−1/2).
      exchange: `all_to_all`: whole sequences for part of the heads. `halo`: windowed
        self-attention over the device's own keys and those just outside, O(window) to move.
        `auto`: the one that moves less.
      chunks: groups of heads that are exchanged one after the other, so that one group's exchange
        can run beside another's attention, and at most two groups are whole at a time. A divisor
        of a device's query heads.

    Raises:
      ValueError: the heads or the spec do not fit, or the exchange cannot do what the spec says.

    The output is named `attn_exchanged` for remat policies, unless nothing was exchanged for it:
    with a halo, and on an axis of size 1.

    Example:
      >>> def part(x_BsHD):
      ...     spec, local = AttentionSpec(causal=True), attention_function("blockwise")
      ...     q = k = v = x_BsHD
      ...     return exchanged_attention(q, k, v, spec, local=local, axis="seq", scale=0.5)
      >>> split = PartitionSpec("data", "seq")
      >>> whole = jax.shard_map(part, mesh=make_mesh(2, 2), in_specs=split, out_specs=split)
      >>> jax.jit(whole)(jnp.ones((2, 6, 4, 4))).shape
      (2, 6, 4, 4)
    """
    ways = lax.axis_size(axis)
    lengths = ways * q_BsHD.shape[1], ways * k_BtKD.shape[1]
    return attend_in_region(
        q_BsHD,
        k_BtKD,
        v_BtKD,
        spec,
        local=local,
        axis=axis,
        scale=scale,
        lengths=lengths,
        exchange=exchange,
        chunks=chunks,
        return_lse=False,
    )[0]


def attend_in_region(
    q_BsHD: Float[Array, "B s H D"],
    k_BtKD: Float[Array, "B t K D"],
    v_BtKD: Float[Array, "B t K D"],
    spec: AttentionSpec,
    *,
    local: LocalAttention,
    axis: str,
    scale: float,
    lengths: tuple[int, int],
    exchange: Exchange,
    chunks: int,
    return_lse: bool,
) -> tuple[Float[Array, "B s H D"], Float32[Array, "B H s"] | None]:
    """`exchanged_attention`, for sequences that end before the devices' parts do.

    `lengths` are S and T. The log-sum-exp is of this device's queries; None unless `return_lse`.
    """
    ways = lax.axis_size(axis)
    check_exchange(exchange, chunks)
    if ways == 1:
        return local(q_BsHD, k_BtKD, v_BtKD, spec, scale)
    rows, own, heads, head_dim = q_BsHD.shape
    # Before the heads are cut: a part of too few would be taken from the wrong place.
    spec.check(rows, *lengths, heads)
    plan = HeadPlan.of(heads, k_BtKD.shape[2], ways)
    halo = _halo(exchange, chunks, spec, plan, lengths, (rows, own, head_dim))
    if halo is not None:
        try:
            return attend_with_halo(
                q_BsHD,
                k_BtKD,
                v_BtKD,
                spec,
                halo,
                local=local,
                axis=axis,
                scale=scale,
                length=lengths[0],
            )
        except NotImplementedError as refusal:
            if exchange == "halo":
                raise
            announce(f"exchange: auto takes all-to-alls, for with a halo {refusal}")
    _report(plan)
    return attend_by_heads(
        q_BsHD,
        k_BtKD,
        v_BtKD,
        spec,
        plan,
        local=local,
        axis=axis,
        scale=scale,
        lengths=lengths,
        chunks=chunks,
        return_lse=return_lse,
    )


def check_exchange(exchange: str, chunks: int) -> None:
    """Raises ValueError unless these are an exchange and a number of chunks."""
    if exchange not in get_args(Exchange):
        raise ValueError(
            f"there is no exchange called {exchange!r}: choose one of "
            f"{', '.join(get_args(Exchange))}"
        )
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks is {chunks!r}: use an integer of at least 1")
    if exchange == "halo" and chunks > 1:
        raise ValueError(
            f"chunks = {chunks} splits the heads of an all-to-all, but exchange is 'halo', which "
            "exchanges no heads: use chunks = 1"
        )


def _halo(
    exchange: Exchange,
    chunks: int,
    spec: AttentionSpec,
    plan: HeadPlan,
    lengths: tuple[int, int],
    sizes: tuple[int, int, int],
) -> Halo | None:
    """The halo to fetch, or None where the heads are exchanged."""
    if exchange == "all_to_all" or (exchange == "auto" and chunks > 1):
        return None
    rows, own, head_dim = sizes
    halo: Halo | str = f"there are {lengths[0]} queries but {lengths[1]} keys"
    if lengths[0] == lengths[1]:
        halo = halo_of(spec, own, plan.ways)
    if isinstance(halo, str):
        if exchange == "halo":
            raise ValueError(
                f"exchange 'halo' is for self-attention in a window of static size, but {halo}: "
                "use exchange='auto' or 'all_to_all'"
            )
        return None
    if exchange == "auto":
        fetched = halo.elements_moved(rows, plan.kv_heads, head_dim)
        held = plan.elements_moved(rows * own, head_dim)
        # A device keeps its own share of what the all-to-alls hold.
        exchanged = held * (plan.ways - 1) // plan.ways
        if fetched >= exchanged:
            return None
        announce(
            f"exchange: auto fetches {halo.before} keys before and {halo.after} after each part "
            f"of {own} tokens ({fetched / exchanged:.2g} of what all-to-alls would move)"
        )
    return halo


def _report(plan: HeadPlan) -> None:
    """Says how the heads are spread, where that is not the plain case."""
    if plan.waste == 1 and plan.own_kv_heads * plan.ways == plan.kv_heads:
        return
    announce(f"exchange: {plan}")
    if plan.waste > _WASTE_WARNED:
        warnings.warn(
            f"{plan.ways} devices for {plan.heads} query heads compute {plan.waste:.2f} × the "
            f"attention of the model: use a sequence axis that divides {plan.heads}",
            stacklevel=3,
        )
