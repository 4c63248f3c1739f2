"""What a verification found: one row for each check, and the table of them."""

import io
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

GRADIENT = "gradient of "
"""What the name of a gradient's check begins with."""

_WIDTH = 100
_GRADIENTS_SHOWN = 16


@dataclass(frozen=True)
class Check:
    """One row of a report.

    Attributes:
      name: what was compared, such as "gradient of embedding.tokens".
      passed: whether it is as it must be.
      measured: the error, or how many were found; not finite where the values were not.
      limit: what `measured` was held against; None for a row that only informs.
      detail: the first place where it went wrong, or what was seen.

    Example:
      >>> Check("loss", passed=False, measured=0.5, limit=1e-5, detail="1 instead of 2").limit
      1e-05
    """

    name: str
    passed: bool
    measured: float
    limit: float | None
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that `verify` checked.

    `print(report)` shows it as a table with failed checks first, where many gradients that passed
    share a row; a rich console prints the report itself at its own width.

    Attributes:
      title: the model and the meshes that were compared.
      checks: the rows, in the order in which they were made.

    Example:
      >>> report = Report("two runs", (Check("loss", False, 0.5, 1e-5, "1 instead of 2"),))
      >>> report.passed
      False
      >>> [check.name for check in report.failed]
      ['loss']
    """

    title: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def require(self) -> None:
        """Raises AssertionError, with the table, unless every check passed."""
        if not self.passed:
            raise AssertionError(f"the sharded model is not the single-device model\n{self}")

    def __rich__(self) -> Table:
        table = Table(title=Text(f"{self.title}: {self._verdict()}"), title_justify="left")
        for column in ("", "check", "measured", "limit", "where"):
            table.add_column(column, overflow="fold")
        for check in [*self.failed, *_summed_up([c for c in self.checks if c.passed])]:
            mark = Text("ok", "green") if check.passed else Text("FAIL", "bold red")
            limit = "" if check.limit is None else f"{check.limit:.3g}"
            # As Text: the brackets of an index would be read as markup.
            cells = (check.name, f"{check.measured:.3g}", limit, check.detail)
            table.add_row(mark, *(Text(cell) for cell in cells))
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH).print(self)
        return text.getvalue().rstrip("\n")

    def _verdict(self) -> str:
        if self.passed:
            return f"passed, all {len(self.checks)} checks"
        return f"FAILED, {len(self.failed)} of {len(self.checks)} checks"


def _summed_up(passed: list[Check]) -> list[Check]:
    """`passed` with one row in place of its gradients, if these are many."""
    gradients = [check for check in passed if check.name.startswith(GRADIENT)]
    if len(gradients) <= _GRADIENTS_SHOWN:
        return passed
    worst = max(gradients, key=lambda check: check.measured)
    row = replace(
        worst,
        name=f"{len(gradients)} gradients",
        detail=f"the largest error is that of {worst.name.removeprefix(GRADIENT)}",
    )
    first = passed.index(gradients[0])
    return [*passed[:first], row, *(check for check in passed[first:] if check not in gradients)]
