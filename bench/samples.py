"""What was measured, as data: samples of one case, kept raw, and the arithmetic over them. Nothing
here starts anything.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Value = float | int | bool | str | None


@dataclass(frozen=True)
class Sample:
    """One measurement. Samples of one `turn` were taken one right after the other: their ratio is
    the ratio of a pair.
    """

    who: str  # "rallypoint", "torchrun", ...
    turn: int
    values: dict[str, Value]
    note: str = ""  # why a value is missing


@dataclass(frozen=True)
class Case:
    """One case of one run: when, on what, by which command, and every sample."""

    name: str
    command: str
    taken: str
    machine: dict[str, Any]
    load: tuple[float, float]  # the load average before and after
    samples: list[Sample] = field(default_factory=list)

    def who(self) -> list[str]:
        """Everyone measured, in the order of their first sample."""
        return list(dict.fromkeys(sample.who for sample in self.samples))

    def numbers(self, who: str, name: str) -> list[float]:
        """Every number of that name, in order; what could not be measured is left out."""
        return [
            number
            for sample in self.samples
            if sample.who == who and (number := _number(sample, name)) is not None
        ]

    def median(self, who: str, name: str) -> float | None:
        """None when nothing was measured."""
        numbers = self.numbers(who, name)
        return statistics.median(numbers) if numbers else None

    def ratio(self, one: str, other: str, name: str, other_name: str = "") -> float | None:
        """The median, over the turns in which both were measured, of one / other. None when there
        is no such turn.
        """
        ratios = []
        for turn in dict.fromkeys(sample.turn for sample in self.samples):
            first, second = self._at(one, turn, name), self._at(other, turn, other_name or name)
            if first is not None and second:
                ratios.append(first / second)
        return statistics.median(ratios) if ratios else None

    def count(self, who: str, name: str) -> tuple[int, int]:
        """(how often a yes-or-no value was yes, how often it was asked)."""
        values = [
            sample.values.get(name)
            for sample in self.samples
            if sample.who == who and sample.values.get(name) is not None
        ]
        return sum(value is True for value in values), len(values)

    def notes(self, who: str) -> list[str]:
        """Why values of it are missing, each reason once."""
        return list(
            dict.fromkeys(
                sample.note for sample in self.samples if sample.who == who and sample.note
            )
        )

    def _at(self, who: str, turn: int, name: str) -> float | None:
        return next(
            (
                _number(sample, name)
                for sample in self.samples
                if (sample.who, sample.turn) == (who, turn)
            ),
            None,
        )


def _number(sample: Sample, name: str) -> float | None:
    value = sample.values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read(path: Path) -> dict[str, Case]:
    """The cases of a file of results by name; empty when there is none yet."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return {name: _case(one) for name, one in found.items()}


def _case(found: dict[str, Any]) -> Case:
    first, last = found["load"]
    return Case(
        **{
            **found,
            "load": (first, last),
            "samples": [Sample(**sample) for sample in found["samples"]],
        }
    )


def write(path: Path, cases: Iterable[Case]) -> None:
    """Put cases into a file of results, each in the place of an older one of its name; the others
    stay, with their own date.
    """
    kept = {**read(path), **{case.name: case for case in cases}}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: asdict(kept[name]) for name in sorted(kept, key=_order)}, indent=1)
    fresh = path.with_suffix(".new")
    fresh.write_text(text + "\n")
    fresh.replace(path)


def _order(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)


def spread(numbers: Sequence[float]) -> tuple[float, float]:
    """(least, most)."""
    return min(numbers), max(numbers)
