from __future__ import annotations

import pytest
from bench.samples import Case, Sample, Value
from bench.tables import Bound, text

from bench import figures

MACHINE = {
    "cores": 2,
    "cpu": "a cpu",
    "memory_gib": 4.0,
    "kernel": "6.1",
    "python": "3.11.9",
    "torch": "2.13.0",
    "rallypoint": "0.1.0",
}


def case(name: str, **taken: list[dict[str, Value]]) -> Case:
    rows = [
        Sample(who.replace("_", " "), turn, values)
        for who, each in taken.items()
        for turn, values in enumerate(each)
    ]
    return Case(
        name,
        f"scripts/bench start --only {name}",
        "2026-01-02T03:04:05+00:00",
        MACHINE,
        (0.1, 0.2),
        rows,
    )


def lines(found: Case) -> list[str]:
    return [
        line
        for table in figures.tables({found.name: found})
        for line in text(table).splitlines()[2:]
    ]


def start_16(mine: float) -> Case:
    return case(
        "start-16",
        import_torch=[{"seconds": 1.0}] * 3,
        rallypoint=[{"seconds": mine}] * 3,
        torchrun=[{"seconds": 14.0}] * 3,
    )


@pytest.mark.parametrize(
    ("number", "at_least", "met"),
    [
        (1.0, False, True),
        (1.1, False, False),
        (1.0, True, True),
        (0.9, True, False),
        (None, False, None),
    ],
)
def test_bound(number: float | None, at_least: bool, met: bool | None) -> None:
    assert Bound("a bound", number, 1.0, at_least).met is met


def test_start_says_what_it_must_be_and_that_it_is() -> None:
    [line] = lines(start_16(1.4))
    assert line.startswith(
        "| 16 | 1.40 s (1.40-1.40) | 1.00 s (1.00-1.00) | 14.00 s (14.00-14.00) | - | - | 1.40 x | 10.0 x | 3 |"
    )
    assert line.endswith(
        "| <= 1.5 x one import; >= 8 x faster than torchrun | yes; yes | `scripts/bench start --only start-16` |"
    )


def test_a_target_that_is_missed_is_published() -> None:
    [line] = lines(start_16(2.0))
    assert "| **no**; **no** |" in line


def test_a_peer_that_never_finished_is_not_measured_rather_than_left_out() -> None:
    [line] = lines(case("start-4", rallypoint=[{"seconds": 1.0}], torchrun=[{"seconds": None}]))
    assert "| not measured |" in line


def test_restart_counts_the_runs_that_did_not_recover() -> None:
    mine, theirs = lines(
        case(
            "restart-4",
            rallypoint=[{"recovered": True, "seconds": 0.4}, {"recovered": False, "seconds": None}],
            torchrun=[{"recovered": False}],
        )
    )
    assert "| rallypoint | 1 of 2 | 0.40 s |" in mine
    assert "| **no**; yes |" in mine
    assert "| torchrun | 0 of 1 | not measured |" in theirs


def test_death_counts_wrong_causes_and_takes_the_most_lines() -> None:
    found = case(
        "raised",
        rallypoint=[
            {"report_seconds": 0.1, "exit_seconds": 0.2, "right": r, "lines": n}
            for r, n in ((True, 20), (False, 26))
        ],
    )
    [line] = lines(found)
    assert "| 1 of 2 | 20-26 |" in line
    assert "| yes; **no**; **no** |" in line


def test_memory_is_in_the_unit_of_the_target() -> None:
    values: dict[str, Value] = {
        f"{point}_{kind}": 11_900_000
        for point in ("imported", "met")
        for kind in ("pss", "private")
    }
    idle, met = lines(case("memory-16", rallypoint=[values], torchrun=[values]))
    assert (
        "| 11.9 MB, 11.9 MB | 11.9 MB, 11.9 MB | 1.00 x | <= 12 MB PSS at 16 ranks | yes |" in idle
    )
    assert "| - | - |" in met


def test_the_page_names_the_machine_and_the_date() -> None:
    page = figures.page({"start-16": start_16(1.4)})
    assert (
        "2 cores (a cpu), 4.0 GiB, Linux 6.1, Python 3.11.9, torch 2.13.0, rallypoint 0.1.0: `start-16`"
        in page
    )
    assert "| `start-16` | 2026-01-02T03:04:05+00:00 | 0.1, 0.2 |" in page
    assert "A restart" not in page  # nothing was measured of it
