"""One tiny turn of each case of the primitives' bench, in real processes; and what is made of the
figures.
"""

from __future__ import annotations

from importlib import metadata
from itertools import islice

import pytest
from bench.primitives import BLOCK, GLOO, SIZES, SPINNING, STANDARD, WHOLE
from bench.samples import Case, Sample, Value
from bench.store import OURS, PEER, TCP
from bench.tables import text

from bench import figures, primitives, store

from ..python_path import WITHOUT_TORCH, python_path

pytestmark = pytest.mark.usefixtures("torch_in_parts")

MACHINE = {
    "cores": 2,
    "cpu": "a cpu",
    "memory_gib": 4.0,
    "kernel": "6.1",
    "python": "3.11.9",
    "torch": "2.13.0",
    "rallypoint": "0.1.0",
}


def has_torch() -> bool:
    try:
        return bool(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False


with_torch = pytest.mark.skipif(not has_torch(), reason="torch is not installed")


def case(name: str, *taken: Sample) -> Case:
    command = f"scripts/bench primitives --only {name}"
    return Case(name, command, "2026-01-02T03:04:05+00:00", MACHINE, (0.1, 0.2), list(taken))


def lines(found: Case) -> list[str]:
    return [
        line
        for table in figures.tables({found.name: found})
        for line in text(table).splitlines()[2:]
    ]


# --- in real processes


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_everybody_passes_a_barrier() -> None:
    turn = primitives.barrier(2, 1, count=5)
    with pytest.MonkeyPatch.context() as patch:  # the first two parties are ours
        patch.setenv("PYTHONPATH", python_path(WITHOUT_TORCH))
        samples = list(islice(turn, 2))
    samples += turn
    assert [sample.who for sample in samples] == [OURS, TCP, PEER, GLOO]
    for sample in samples:
        assert sample.note == ""
        assert isinstance(sample.values["seconds"], float)
        assert sample.values["seconds"] > 0


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("party", [OURS, SPINNING])  # PAUSING is SPINNING with a sleep
@with_torch
def test_a_lock_is_handed_over(party: str, request: pytest.FixtureRequest) -> None:
    if party == OURS:
        request.getfixturevalue("without_torch")
    # each process of the other party imports torch, and of its lock the rate alone is asked for
    outcome = store.crowd(party, "lock", 2 if party == OURS else 1, 100.0, trips=3, seconds=0.1)
    assert "error" not in outcome, outcome["error"]
    found = primitives.handed_over(outcome)
    assert isinstance(found["rate"], float)
    assert found["rate"] > 0
    if party == OURS:
        assert isinstance(found["handover_p50"], float)
        assert found["handover_p50"] > 0
        assert found["fairness"] is not None, "one of them never had it"


@pytest.mark.torch
@pytest.mark.slow
@with_torch
def test_no_addition_to_a_shared_tensor_is_lost() -> None:
    samples = list(primitives.shared(2, 1, seconds=0.02))
    assert [(sample.who, sample.note) for sample in samples] == [
        (WHOLE, ""),
        (BLOCK, ""),
        (STANDARD, ""),
    ]
    assert all(set(sample.values) == {f"rate_{size}" for size in SIZES} for sample in samples)


# --- figures


def one(*had: float) -> dict[str, object]:
    return {"began": 0.0, "until": 10.0, "had": list(had), "cpu": 0.5, "trips": [0.25, 0.25]}


def test_a_hand_over_is_between_two_and_counts_while_all_want_it() -> None:
    phases = [{"cpu": 1.0}, {"cpu": 1.0}, {"cpu": 3.0}, {"cpu": 9.0}]
    found = primitives.handed_over(
        {"results": [one(1.0, 2.0, 4.0), one(2.5, 4.5, 11.0)], "phases": phases}
    )
    assert found["handover_p50"] == 500_000  # 2 to 2.5, 2.5 to 4, 4 to 4.5; not 1 to 2
    assert found["handover_trips"] == 2.0
    assert (found["most"], found["least"], found["fairness"], found["rate"]) == (3, 2, 1.5, 0.5)
    assert found["server_cpu"] == pytest.approx(2e6 / 6)


def test_who_never_has_the_lock_is_no_fairness() -> None:
    found = primitives.handed_over(
        {"results": [one(1.0, 2.0), one()], "phases": [{"cpu": 0.0}] * 4}
    )
    assert found["fairness"] is None
    assert "handover_p50" not in found


def test_a_barrier_has_targets_at_64_and_no_gloo_above() -> None:
    seconds = ((OURS, 0.002), (TCP, 0.003), (PEER, 0.002), (GLOO, 0.012))
    samples = [Sample(who, 0, {"seconds": value}) for who, value in seconds]
    assert [line.count("| yes; yes |") for line in lines(case("barrier-64", *samples))] == [1, 0]
    first, _ = lines(case("barrier-512", *samples[:3]))
    assert first.startswith("| 512 | Unix socket | 2 ms | 2 ms | - | 1.00 x | - | - | - |")


def test_a_lock_has_targets_for_ours_only() -> None:
    values: dict[str, Value] = {
        "handover_p50": 90.0,
        "handover_p99": 300.0,
        "trip": 50.0,
        "handover_trips": 1.8,
        "rate": 9000.0,
        "most": 12,
        "least": 10,
    }
    unfair: dict[str, Value] = {**values, "handover_trips": 2.5, "fairness": 6.0, "least": 2}
    ours, tcp, spinning, pausing = lines(
        case(
            "lock-64",
            Sample(OURS, 0, {**values, "fairness": 1.2}),
            Sample(TCP, 0, unfair),
            Sample(SPINNING, 0, unfair),
        )
    )
    assert ours.startswith(
        "| 64 | rallypoint, Unix socket | 90 us | 300 us | 50 us | 1.8 | 9000 /s | 12 / 10 |"
    )
    assert "| yes; yes |" in ours
    assert "| **no**; **no** |" in tcp
    assert "must be" not in spinning
    assert "| - | - |" in pausing


def test_an_average_and_a_shared_tensor() -> None:
    samples = [Sample(OURS, 0, {"seconds": 0.010}), Sample(GLOO, 0, {"seconds": 0.030})]
    [line] = lines(case("average-2x25", *samples))
    assert line.startswith("| 2 | 25 MB | 10 ms | 30 ms | 3.00 x | >= 3 x faster than gloo | yes |")
    [line] = lines(
        case("average-4x25", *(Sample(sample.who, 0, {"seconds": 0.01}) for sample in samples))
    )
    assert ">= 2.5 x faster than gloo | **no** |" in line
    rates: dict[str, Value] = {f"rate_{size}": 40_000.0 for size in SIZES}
    small, large = lines(
        case("shared-2", *(Sample(who, 0, rates) for who in (WHOLE, BLOCK, STANDARD)))
    )
    assert small.startswith("| 2 | 4 KiB | 40 k/s | 40 k/s | 40 k/s | 1.00 x | 1.00 x |")
    assert large.startswith("| 2 | 1 MiB |")
