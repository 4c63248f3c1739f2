"""The head plan: which device computes which query and key/value heads between the exchanges."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadPlan:
    """Heads of one attention call spread over the `ways` devices of a sequence group.

    Device i computes query heads [i·h, (i+1)·h) and key/value heads [i·g, (i+1)·g), so each
    query head meets the key/value head it belongs to (query head j uses j // (heads/kv_heads)).

    Attributes:
      heads: query heads H of the model.
      kv_heads: key/value heads K.
      ways: P, the size of the sequence axis.
    """

    heads: int
    kv_heads: int
    ways: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, ways: int) -> "HeadPlan":
        """The plan for H query and K key/value heads on `ways` devices.

        Raises:
          ValueError: P does not divide H or K, or K does not divide H.
        """
        if heads % kv_heads:
            raise ValueError(
                f"{heads} query heads are not a multiple of {kv_heads} key/value heads"
            )
        for kind, count in (("query heads", heads), ("key/value heads", kv_heads)):
            if count % ways:
                raise ValueError(
                    f"a sequence axis of {ways} devices does not divide {count} {kind}; "
                    f"use a number of {kind} that is a multiple of {ways}, or fewer devices"
                )
        return cls(heads, kv_heads, ways)

    def elements_moved(self, tokens: int, head_dim: int) -> int:
        """Elements that one device holds of q, k, v and out for one layer's forward exchanges.

        `tokens` counts those of this device's part of the batch, B·S/P. With K = H this is the
        4Nh/P of the paper's table 1; each exchange sends (P−1)/P of it over the wires.
        """
        return tokens * head_dim * 2 * (self.heads + self.kv_heads)
