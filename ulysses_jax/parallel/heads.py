"""The head plan: which device computes which query and key/value heads between the exchanges."""

from dataclasses import dataclass
from functools import cache, cached_property

import jax.numpy as jnp
from jaxtyping import Array, Shaped


@dataclass(frozen=True)
class HeadPlan:
    """Heads of one attention call spread over the `ways` devices of a sequence group.

    Each device computes `own_heads` query heads that follow one another, and is sent the
    `own_kv_heads` key/value heads they use (query head j uses j // (heads / kv_heads)). What is
    sent is a row of slots, device by device: `query_slots` and `kv_slots` make it. Where the
    devices do not divide the heads, some query slots are padding: zeros that are computed and
    dropped. Where there are more devices than key/value heads, these are sent more than once, each
    device getting only those it needs.

    Attributes:
      heads: query heads H of the model.
      kv_heads: key/value heads K.
      ways: P, the size of the sequence axis.
      own_heads: query slots of each device.
      groups: how many parts of equal size the query heads are padded in: each key/value head's
        queries alone (K), or all together (1).
      starts: the first query head of each device. An idle one starts at `heads`.
      stops: one past the last query head of each device.

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
    groups: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    @cache
    def of(cls, heads: int, kv_heads: int, ways: int) -> "HeadPlan":
        """The plan for H query and K key/value heads on `ways` devices.

        Of three ways to spread them (whole groups, in order, each group apart) the one with the
        fewest query slots; of these the one that sends the fewest key/value heads.

        Raises:
          ValueError: H is not a multiple of K.
        """
        if heads % kv_heads:
            raise ValueError(
                f"{heads} query heads are not a multiple of {kv_heads} key/value heads: give every "
                "key/value head the same number of query heads"
            )
        whole_groups = -(-kv_heads // ways) * (heads // kv_heads)
        plans = [cls._in_order(heads, kv_heads, ways, n) for n in (whole_groups, -(-heads // ways))]
        if kv_heads < min(ways, heads):
            plans.insert(0, cls._by_group(heads, kv_heads, ways))
        return min(plans, key=lambda p: (p.own_heads, p.own_kv_heads, p.own_heads // p.sharing))

    @classmethod
    def _in_order(cls, heads: int, kv_heads: int, ways: int, own: int) -> "HeadPlan":
        starts = tuple(min(heads, i * own) for i in range(ways))
        stops = tuple(min(heads, start + own) for start in starts)
        return cls(heads, kv_heads, ways, own, 1, starts, stops)

    @classmethod
    def _by_group(cls, heads: int, kv_heads: int, ways: int) -> "HeadPlan":
        """Every device has queries of one key/value head only."""
        queries, devices = heads // kv_heads, ways // kv_heads
        own = -(-queries // devices)
        starts, stops = [heads] * ways, [heads] * ways
        for i in range(kv_heads * devices):
            group, part = divmod(i, devices)
            start, stop = group * queries + part * own, (group + 1) * queries
            starts[i], stops[i] = min(start, stop), min(start + own, stop)
        return cls(heads, kv_heads, ways, own, kv_heads, tuple(starts), tuple(stops))

    @cached_property
    def kv_starts(self) -> tuple[int, ...]:
        """The first key/value head that each device is sent; padding from `kv_heads` on."""
        if self.groups > 1:
            devices = self.ways // self.kv_heads
            return tuple(min(i // devices, self.kv_heads - 1) for i in range(self.ways))
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

    def query_slots(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """`x` with its H heads, along `axis`, put into ways × own_heads slots, zeros where none."""
        if self.groups > 1:
            x = _split(x, axis, self.groups)
            x = _pad(x, axis + 1, self.ways // self.groups * self.own_heads)
            x = _merge(x, axis)
        return _pad(x, axis, self.ways * self.own_heads)

    def from_query_slots(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """The inverse of `query_slots`: drops what is padding."""
        if self.groups > 1:
            each = self.ways // self.groups * self.own_heads
            x = _split(_first(x, axis, self.groups * each), axis, self.groups)
            return _merge(_first(x, axis + 1, self.heads // self.groups), axis)
        return _first(x, axis, self.heads)

    def kv_slots(self, x_BtKD: Shaped[Array, "B t K D"]) -> Shaped[Array, "B t slots D"]:
        """The key/value heads in ways × own_kv_heads slots, repeated as the devices need them."""
        own = self.own_kv_heads
        if self.groups > 1:
            return _pad(jnp.repeat(x_BtKD, self.ways // self.kv_heads, axis=2), 2, self.ways)
        if self._kv_in_order:
            return _pad(x_BtKD, 2, self.ways * own)
        # Slices, whose transposes are sums: what a gather would scatter, GPUs add up in any order.
        return jnp.concatenate([x_BtKD[:, :, kv : kv + own] for kv in self.kv_starts], axis=2)

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


def _split(x: Array, axis: int, parts: int) -> Array:
    return x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])


def _merge(x: Array, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _pad(x: Array, axis: int, length: int) -> Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


def _first(x: Array, axis: int, length: int) -> Array:
    return x if x.shape[axis] == length else x[(slice(None),) * axis + (slice(length),)]
