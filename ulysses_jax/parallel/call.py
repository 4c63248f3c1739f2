"""One call of the layer as a program: its arrays placed over the mesh, and what its region does."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from ulysses_jax.attention.jax_nn import from_jax_nn
from ulysses_jax.attention.key_ranges import Bound
from ulysses_jax.attention.select import LocalAttention, attention_function
from ulysses_jax.attention.spec import AttentionSpec
from ulysses_jax.parallel.region import Region, index_over
from ulysses_jax.parallel.ulysses import Exchange, attend_in_region

_Side: TypeAlias = int | Literal["traced"] | None
Window: TypeAlias = tuple[_Side, _Side] | None
Results: TypeAlias = tuple[Float[Array, "B S H D"], Float32[Array, "B H S"] | None]


@dataclass(frozen=True)
class Call:
    """The static part of a call, to be run with its arrays.

    Attributes:
      attention: as `ulysses_attention` takes it.
      scale: factor of the scores.
      kv_heads: key/value heads of the call, over all head axes that it makes manual.
      lengths: S and T of the whole sequences.
      window: what is known of it when compiling. A side that is not stays in the spec, which goes
        with the arrays and would make tracers of all.
      region, exchange, chunks, return_lse: see `Region` and `ulysses_attention`.
    """

    region: Region
    attention: str | Callable[..., Array]
    scale: float
    kv_heads: int
    lengths: tuple[int, int]
    window: Window
    exchange: Exchange
    chunks: int
    return_lse: bool

    def run(self, q: Array, k: Array, v: Array, spec: AttentionSpec) -> Results:
        """The output and, with `return_lse`, the log-sum-exp; see `ulysses_attention`."""
        region = self.region
        if not region.made:
            return self._in_region(q, k, v, spec)
        tokens = region.tokens()
        kv_tokens = self._kv_tokens()
        specs = self._spec_of(spec, q)
        # JAX 0.10 gives residuals of a nested region the axes of the outer one too, and then fails
        # to lower them. Inputs are no such residuals, so the backward pass starts from these.
        run = jax.checkpoint(self._in_region) if region.nested else self._in_region
        inside = jax.shard_map(
            run,
            mesh=region.mesh,
            in_specs=(tokens, kv_tokens, kv_tokens, specs),
            out_specs=(tokens, PartitionSpec(tokens[0], tokens[2], tokens[1]))
            if self.return_lse
            else (tokens, None),
            axis_names=set(region.made),
            # A loop or Pallas kernel written for one device does not say which axes it varies over.
            # Within a region that checks it, its gradients would be refused.
            check_vma=isinstance(self.attention, str) or region.nested,
        )
        q = self._padded(q, tokens)
        k, v = self._padded(k, kv_tokens), self._padded(v, kv_tokens)
        spec = jax.tree.map(region.reshard, spec, specs)
        out, lse = inside(q, k, v, spec)
        if out.shape[1] == self.lengths[0]:
            return out, lse
        whole = PartitionSpec(tokens[0], None, tokens[2])
        out = region.reshard(out, whole)[:, : self.lengths[0]]
        if lse is not None:
            whole = PartitionSpec(tokens[0], tokens[2])
            lse = region.reshard(lse, whole)[:, :, : self.lengths[0]]
        return out, lse

    def _in_region(self, q: Array, k: Array, v: Array, spec: AttentionSpec) -> Results:
        region = self.region
        spec = _joined_window(self.window, spec)
        if spec.dropout is not None:
            spec = dataclasses.replace(spec, first_row=index_over(region.rows) * q.shape[0])
        if spec.dropout is not None or spec.block_layout is not None:
            spec = dataclasses.replace(spec, first_head=index_over(region.heads) * q.shape[2])
        local = self._local()
        if region.seq is None:
            out, lse = local(q, k, v, spec, self.scale)
        else:
            if region.made:
                k, v = self._own_kv(q, k, v)
            out, lse = attend_in_region(
                q,
                k,
                v,
                spec,
                local=local,
                axis=region.seq,
                scale=self.scale,
                lengths=self.lengths,
                exchange=self.exchange,
                chunks=self.chunks,
                return_lse=self.return_lse,
            )
        return out, lse if self.return_lse else None

    def _local(self) -> LocalAttention:
        if isinstance(self.attention, str):
            return attention_function(self.attention, self.region.platform)
        if self.return_lse:
            raise ValueError(
                "return_lse is True, but a function of your own gives no log-sum-exp that has a "
                "gradient: use an attention of ours by name, such as 'blockwise'"
            )
        return from_jax_nn(self.attention)

    def _kv_tokens(self) -> PartitionSpec:
        """Of k and v: over the head axes only where these divide their heads too."""
        tokens = self.region.tokens()
        return tokens if self.kv_heads % self.region.head_ways == 0 else PartitionSpec(*tokens[:2])

    def _own_kv(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """The key/value heads of this device's query heads, where the head axes split only q."""
        made = self.region.own(self.region.heads)
        if made is None or self.kv_heads % self.region.head_ways == 0:
            return k, v
        own, queries = q.shape[2], q.shape[2] * self.region.head_ways // k.shape[2]
        share = math.gcd(own, queries)
        first = index_over(made) * own
        used = [(first + slot) // queries for slot in range(0, own, share)]

        def pick(x: Array) -> Array:
            return jnp.concatenate(
                [lax.dynamic_slice_in_dim(x, kv, 1, axis=2) for kv in used], axis=2
            )

        return pick(k), pick(v)

    def _padded(self, x: Array, spec: PartitionSpec) -> Array:
        """`x` [B, S, H, D] made longer, so that every device has a part of the same length."""
        more = -x.shape[1] % self.region.ways if self.region.splits_seq else 0
        if more:
            x = self.region.reshard(x, PartitionSpec(spec[0], None, *spec[2:]))
            x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
        return self.region.reshard(x, spec)

    def _spec_of(self, spec: AttentionSpec, q: Array) -> AttentionSpec:
        """Where the arrays of `spec` lie: split with the batch and the head axes, else whole."""
        rows, heads = self.region.own(self.region.rows), self.region.own(self.region.heads)

        def of_pairs(x: Array | None) -> PartitionSpec | None:
            if x is None:
                return None
            return PartitionSpec(
                rows if x.shape[0] == q.shape[0] else None,
                heads if x.shape[1] == q.shape[2] else None,
            )

        def of_rows(x: Array | None) -> PartitionSpec | None:
            return None if x is None else PartitionSpec(rows)

        whole = jax.tree.map(lambda _: PartitionSpec(), spec)
        return dataclasses.replace(
            whole,
            q_segment_ids=of_rows(spec.q_segment_ids),
            kv_segment_ids=of_rows(spec.kv_segment_ids),
            kv_lengths=of_rows(spec.kv_lengths),
            mask=of_pairs(spec.mask),
            bias=of_pairs(spec.bias),
        )


def split_window(spec: AttentionSpec) -> tuple[Window, AttentionSpec]:
    """What is known of the window when compiling, and the spec with the rest of it."""
    if spec.window is None:
        return None, spec

    def known(side: Bound | None) -> _Side:
        if side is None:
            return None
        return int(side) if isinstance(side, int | np.integer) else "traced"

    left, right = spec.window
    static = known(left), known(right)
    rest = left if static[0] == "traced" else None, right if static[1] == "traced" else None
    return static, dataclasses.replace(spec, window=rest)


def _joined_window(static: Window, spec: AttentionSpec) -> AttentionSpec:
    """The inverse of `_split_window`."""
    if static is None or spec.window is None:
        return spec
    left, right = (
        rest if known == "traced" else known
        for known, rest in zip(static, spec.window, strict=True)
    )
    return dataclasses.replace(spec, window=(left, right))
