"""What a table of the page is: cells, targets, and the command that reproduces each line. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bench.samples import Case, spread


@dataclass(frozen=True)
class Bound:
    """A target: `number` must be at most (or, with `at_least`, at least) `limit`. None: it was not
    measured.
    """

    says: str
    number: float | None
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """None when nothing was measured."""
        if self.number is None:
            return None
        return self.number >= self.limit if self.at_least else self.number <= self.limit


@dataclass(frozen=True)
class Row:
    """One line of a table: its cells, and the targets that belong to it."""

    cells: tuple[str, ...]
    bounds: tuple[Bound, ...]
    case: Case


@dataclass(frozen=True)
class Table:
    """A heading, what the columns are, and the lines that were measured."""

    title: str
    about: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]


def seconds(case: Case, who: str, name: str = "seconds") -> str:
    """`1.31 s (1.28-1.40)`: the median, and least and most when there are several; `-` and the
    reason when there is none.
    """
    numbers = case.numbers(who, name)
    if not numbers:
        return "not measured" if who in case.who() else "-"
    middle = case.median(who, name)
    least, most = spread(numbers)
    return f"{middle:.2f} s ({least:.2f}-{most:.2f})" if len(numbers) > 1 else f"{middle:.2f} s"


def times(ratio: float | None) -> str:
    """`12.3 x`, and below ten `1.45 x`."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.1f} x"


def text(table: Table) -> str:
    """A table in Markdown, its targets and commands at the end of each line."""
    header = (*table.header, "must be", "met", "command")
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in table.rows:
        must = "; ".join(bound.says for bound in row.bounds) or "-"
        met = "; ".join(_met(bound) for bound in row.bounds) or "-"
        lines.append(f"| {' | '.join((*row.cells, must, met, f'`{row.case.command}`'))} |")
    return "\n".join(lines) + "\n"


def _met(bound: Bound) -> str:
    if bound.met is None:
        return "not measured"
    return "yes" if bound.met else "**no**"
