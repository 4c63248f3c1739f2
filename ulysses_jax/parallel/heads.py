"""The head plan: which device computes which query and key/value heads between the exchanges."""

from dataclasses import dataclass
from functools import cache, cached_property

import jax.numpy as jnp
from jaxtyping import Array, Shaped


@dataclass(frozen=True)
class HeadPlan:
    """Heads of one attention call spread over the `ways` devices of a sequence group.

    Each device computes `own_heads` query heads that follow one another, and is sent
    `own_kv_heads` key/value heads that follow one another, those they use among them (query head j
    uses j // (heads / kv_heads)). What is sent is a row of slots, device by device: `query_slots`
    and `kv_slots` make it. Where the devices do not divide the heads, some slots are padding: zeros
    that are computed and dropped. A key/value head that several devices use is sent to each.

    Attributes:
      heads: query heads H of the model.
      kv_heads: key/value heads K.
      ways: P, the size of the sequence axis.
      own_heads: query slots of each device.
      cuts: the first query head of each device, and H. An idle device starts at H.

    Example:
      >>> plan = HeadPlan.of(heads=28, kv_heads=4, ways=8)
      >>> print(plan)
      28 query and 4 key/value heads on 8 devices: 4 and 1 a device; 8 key/value heads are sent; \
1.14 × the query heads are computed
      >>> plan.starts
      (0, 4, 7, 11, 14, 18, 21, 25)
    """

    heads: int
    kv_heads: int
    ways: int
    own_heads: int
    cuts: tuple[int, ...]

    @classmethod
    @cache
    def of(cls, heads: int, kv_heads: int, ways: int) -> "HeadPlan":
        """The plan for H query and K key/value heads on `ways` devices.

        No device computes more than ceil(H / P) heads, and of the plans in which none does this
        one sends the fewest key/value heads.

        Raises:
          ValueError: H is not a multiple of K.
        """
        if heads % kv_heads:
            raise ValueError(
                f"{heads} query heads are not a multiple of {kv_heads} key/value heads: give every "
                "key/value head the same number of query heads"
            )
        own, queries = -(-heads // ways), heads // kv_heads
        for own_kv in range(1, kv_heads + 1):
            # Each device takes what it may: if the heads are not used up then, they cannot be.
            cuts = [0]
            for _ in range(ways):
                last = (cuts[-1] // queries + own_kv) * queries
                cuts.append(min(heads, cuts[-1] + own, last))
            if cuts[-1] == heads:
                break
        return cls(heads, kv_heads, ways, own, tuple(cuts))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first query head of each device."""
        return self.cuts[:-1]

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last query head of each device."""
        return self.cuts[1:]

    @cached_property
    def kv_starts(self) -> tuple[int, ...]:
        """The first key/value head that each device is sent; padding from `kv_heads` on."""
        if self._kv_in_order:
            return tuple(i * self.own_kv_heads for i in range(self.ways))
        queries = self.heads // self.kv_heads
        last = self.kv_heads - self.own_kv_heads
        return tuple(min(start // queries, last) for start in self.starts)

    @cached_property
    def _kv_in_order(self) -> bool:
        """Whether each key/value head is sent once at most, as if dealt out in turn."""
        queries = self.heads // self.kv_heads
        return all(
            start // queries == i * self.own_kv_heads
            for i, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True))
            if start < stop
        )

    @cached_property
    def own_kv_heads(self) -> int:
        """Key/value heads that each device is sent: the most that one of them needs."""
        queries = self.heads // self.kv_heads
        return max(
            (stop - 1) // queries - start // queries + 1
            for start, stop in zip(self.starts, self.stops, strict=True)
            if start < stop
        )

    @cached_property
    def sharing(self) -> int:
        """How many neighbouring query slots use one key/value head, on every device."""
        return self._sharing(self.own_heads)

    def _sharing(self, slots: int) -> int:
        """The same where so many slots are computed at a time."""
        queries = self.heads // self.kv_heads

        def fits(count: int) -> bool:
            return all(
                first // queries == (min(first + count, stop) - 1) // queries
                for start, stop in zip(self.starts, self.stops, strict=True)
                for first in range(start, stop, count)
            )

        return next(n for n in range(slots, 0, -1) if slots % n == 0 and fits(n))

    def kv_of_slots(self, first: int, count: int) -> tuple[tuple[int, ...], ...]:
        """Which of its own key/value heads, counted from 0, each device's slots use.

        One number for each run of query slots that share a head, from slot `first` on for `count`
        slots; all runs have the same length, as grouped attention needs it.
        """
        queries = self.heads // self.kv_heads
        share = self._sharing(count)
        rows = []
        for start, kv in zip(self.starts, self.kv_starts, strict=True):
            used = ((start + slot) // queries - kv for slot in range(first, first + count, share))
            rows.append(tuple(min(n, self.own_kv_heads - 1) for n in used))
        busy = [row for row, start in zip(rows, self.starts, strict=True) if start < self.heads]
        # What an idle device computes is dropped: it may as well do as the others.
        return tuple(rows) if len(set(busy)) > 1 else (busy[0],) * self.ways

    @cached_property
    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first, stop, padding): heads that follow one another, and empty slots after them."""
        runs: list[tuple[int, int, int]] = []
        first = 0
        for start, stop in zip(self.starts, self.stops, strict=True):
            padding = self.own_heads - (stop - start)
            if padding and first == stop and runs:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + padding)
            elif padding:
                runs.append((first, stop, padding))
                first = stop
        if first < self.heads:
            runs.append((first, self.heads, 0))
        return tuple(runs)

    # Slices, whose transposes are sums: what a gather would scatter, GPUs add up in any order.

    def query_slots(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """`x` with its H heads, along `axis`, put into ways × own_heads slots, zeros where none."""
        parts = [
            _pad(_cut(x, axis, first, stop), axis, stop - first + padding)
            for first, stop, padding in self._runs
        ]
        return _joined(parts, axis)

    def from_query_slots(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """The inverse of `query_slots`: drops what is padding."""
        parts, slot = [], 0
        for first, stop, padding in self._runs:
            parts.append(_cut(x, axis, slot, slot + stop - first))
            slot += stop - first + padding
        return _joined(parts, axis)

    def kv_slots(self, x_BtKD: Shaped[Array, "B t K D"]) -> Shaped[Array, "B t slots D"]:
        """The key/value heads in ways × own_kv_heads slots, repeated as the devices need them."""
        own = self.own_kv_heads
        if self._kv_in_order:
            return _pad(x_BtKD, 2, self.ways * own)
        each, uneven = divmod(self.ways, self.kv_heads)
        if not uneven and self.kv_starts == tuple(i // each for i in range(self.ways)):
            return jnp.repeat(x_BtKD, each, axis=2)
        return _joined([_cut(x_BtKD, 2, kv, kv + own) for kv in self.kv_starts], 2)

    @property
    def waste(self) -> float:
        """Computed query heads ÷ query heads of the model: 1 where nothing is padding."""
        return self.ways * self.own_heads / self.heads

    def elements_moved(self, tokens: int, head_dim: int) -> int:
        """Elements that one device holds of q, k, v and out for one layer's forward exchanges.

        `tokens` counts those of this device's part of the batch, B·S/P. Where P divides K = H this
        is the 4Nh/P of the paper's table 1; each exchange sends (P−1)/P of it over the wires.
        """
        return tokens * head_dim * 2 * self.ways * (self.own_heads + self.own_kv_heads)

    def __str__(self) -> str:
        parts = [
            f"{self.heads} query and {self.kv_heads} key/value heads on {self.ways} devices: "
            f"{self.own_heads} and {self.own_kv_heads} a device"
        ]
        sent = self.ways * self.own_kv_heads
        if sent != self.kv_heads:
            parts.append(f"{sent} key/value heads are sent")
        if self.waste > 1:
            parts.append(f"{self.waste:.2f} × the query heads are computed")
        return "; ".join(parts)


def _cut(x: Array, axis: int, first: int, stop: int) -> Array:
    if (first, stop) == (0, x.shape[axis]):
        return x
    return x[(slice(None),) * axis + (slice(first, stop),)]


def _pad(x: Array, axis: int, length: int) -> Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def _joined(parts: list[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
