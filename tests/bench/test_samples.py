from __future__ import annotations

from pathlib import Path

import pytest
from bench.samples import Case, Sample

from bench import samples

MACHINE = {
    "cores": 2,
    "cpu": "a cpu",
    "memory_gib": 4.0,
    "kernel": "6.1",
    "python": "3.11.9",
    "torch": "2.13.0",
    "rallypoint": "0.1.0",
}


def case(name: str, *taken: Sample) -> Case:
    return Case(
        name,
        f"scripts/bench start --only {name}",
        "2026-01-02T03:04:05+00:00",
        MACHINE,
        (0.1, 0.2),
        list(taken),
    )


def test_median_leaves_out_what_could_not_be_measured() -> None:
    one = case(
        "start-4",
        *(
            Sample("torchrun", turn, {"seconds": s})
            for turn, s in enumerate([5.0, None, 3.0, 40.0])
        ),
    )
    assert one.median("torchrun", "seconds") == 5.0
    assert one.median("rallypoint", "seconds") is None


def test_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() -> None:
    mine, theirs = [1.0, 2.0, 4.0], [10.0, 10.0, 10.0]
    one = case(
        "start-4",
        *(Sample("rallypoint", turn, {"seconds": s}) for turn, s in enumerate(mine)),
        *(Sample("torchrun", turn, {"seconds": s}) for turn, s in enumerate(theirs)),
    )
    assert one.ratio("torchrun", "rallypoint", "seconds") == 5.0
    unpaired = case(
        "start-4",
        Sample("rallypoint", 0, {"seconds": 1.0}),
        Sample("torchrun", 1, {"seconds": 9.0}),
    )
    assert unpaired.ratio("torchrun", "rallypoint", "seconds") is None


def test_yes_and_no_are_counted_and_are_no_numbers() -> None:
    one = case(
        "restart-4",
        Sample("a", 0, {"ok": True}),
        Sample("a", 1, {"ok": False}),
        Sample("a", 2, {"ok": None}),
        Sample("a", 3, {}),
    )
    assert one.count("a", "ok") == (1, 2)
    assert one.numbers("a", "ok") == []


def test_a_case_measured_again_replaces_itself_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results" / "start.json"
    samples.write(
        path,
        [
            case("start-16", Sample("a", 0, {"seconds": 1.0})),
            case("start-4", Sample("a", 0, {"seconds": 2.0})),
        ],
    )
    samples.write(path, [case("start-16", Sample("a", 0, {"seconds": 3.0}, "slow"))])
    found = samples.read(path)
    assert list(found) == ["start-4", "start-16"]
    assert found["start-16"].samples == [Sample("a", 0, {"seconds": 3.0}, "slow")]
    assert found["start-4"] == case("start-4", Sample("a", 0, {"seconds": 2.0}))


def test_no_results_are_no_cases(tmp_path: Path) -> None:
    assert samples.read(tmp_path / "none.json") == {}


@pytest.mark.parametrize("numbers", [[1.0], [3.0, 1.0, 2.0]])
def test_spread(numbers: list[float]) -> None:
    assert samples.spread(numbers) == (1.0, max(numbers))
