"""Words for places of a sequence, by the part of the mesh axis that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sequences:
    """How a mesh axis cuts sequences into contiguous parts.

    Attributes:
      length: S, in tokens.
      parts: P, the devices of the axis. Where it does not divide S, the last parts are shorter.
    """

    length: int
    parts: int

    @property
    def part_length(self) -> int:
        """Tokens of the first part."""
        return -(-self.length // self.parts)

    def name(self, token: int) -> str:
        """A token by its number and part, as "token 4, the first of part 1 of 4"."""
        if self.parts == 1:
            return f"token {token}"
        part, offset = divmod(token, self.part_length)
        if offset == 0:
            where = "the first of"
        elif offset == self.part_length - 1 or token == self.length - 1:
            where = "the last of"
        else:
            where = "in"
        return f"token {token}, {where} part {part} of {self.parts}"

    def name_place(self, index: Sequence[int]) -> str:
        """An index into [B, S, ...] by its row and token."""
        return f"{list(index)}: row {index[0]}, {self.name(index[1])}"
