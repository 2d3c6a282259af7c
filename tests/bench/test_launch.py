"""The bench of `launch`, once, with two ranks; the soak, twenty times; the table of made-up
samples.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from bench.samples import Case, Sample
from bench.tables import text

from bench import launch, launch_figures

pytestmark = pytest.mark.torch


def test_everyone_takes_part() -> None:
    pytest.importorskip("torchrunx")
    samples = {sample.who: sample for sample in launch.measure(2, 1)}
    assert list(samples) == [launch.IMPORT, launch.OURS, launch.TORCHRUNX, launch.SPAWN]
    for who, sample in samples.items():
        wanted = {"first"} if who == launch.IMPORT else {"first", "again"}
        assert sample.values.keys() == wanted, sample.note
        assert all(
            isinstance(seconds, float) and 0 < seconds < launch.LIMIT
            for seconds in sample.values.values()
        )


def test_twenty_launches_leave_nothing(tmp_path: Path) -> None:
    outcome = launch.often(random.Random(1), 0, tmp_path / "0", count=20)
    assert outcome.wrong == []
    counted = {note.rpartition(" -> ")[0].rsplit(" ", 1)[0] for note in outcome.notes}
    assert counted >= {
        "descriptors",
        "threads",
        "memory",
        *(["shared"] if launch.has_own_shared_memory() else []),
    }


def test_the_table() -> None:
    samples = [
        Sample(launch.IMPORT, 0, {"first": 1.0}),
        Sample(launch.OURS, 0, {"first": 1.2, "again": 0.5}),
        Sample(launch.TORCHRUNX, 0, {"first": 12.0, "again": 10.0}),
        Sample(launch.SPAWN, 0, {}, "it did not end"),
    ]
    case = Case(
        "launch-8", "scripts/bench launch --only launch-8", "today", {}, (0.1, 0.2), samples
    )
    (table,) = launch_figures.tables({"launch-8": case})
    line = text(table).splitlines()[-1]
    assert (
        "| 1.20 s | 1.00 s | 12.00 s | not measured | 1.20 x | 0.50 s | 10.00 s | not measured | 10.0 x | 20.0 x |"
        in line
    )
    assert line.endswith(
        "| first <= 1.3 x one import; second <= 0.4 s | yes; **no** | `scripts/bench launch --only launch-8` |"
    )
