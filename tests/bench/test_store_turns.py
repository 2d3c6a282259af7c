"""One tiny turn of each case of the store's bench, in real processes."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
from bench.samples import Sample
from bench.store import OURS, PEER, TCP

from bench import store


def has_torch() -> bool:
    try:
        return bool(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.usefixtures("torch_in_parts"),
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not has_torch(), reason="torch is not installed"),
]


def one(party: str, task: str, clients: int, **spec: Any) -> store.Outcome:
    outcome = store.crowd(party, task, clients, 100.0, **spec)
    assert "error" not in outcome, outcome["error"]
    return outcome


@pytest.mark.usefixtures("without_torch")
def test_latency() -> None:
    outcome = one(TCP, "latency", 1, warm=3, count=50, placed=store.APART)
    found = store.latency_values(outcome, "")
    assert len(found) == 12
    assert all(isinstance(value, float) and value >= 0 for value in found.values())
    assert isinstance(found["get_p50"], float)
    assert isinstance(found["get_p99"], float)
    assert 0 < found["get_p50"] <= found["get_p99"]


def test_values_come_back_as_they_were() -> None:
    found = store.bytes_per_second(one(OURS, "values", 1, sizes=[32, 2**21], seconds=0.01, most=10))
    assert {
        f"{name}_{size}" for name in ("first", "set", "get", "memcpy") for size in (32, 2**21)
    } == set(found)


def test_mixed_counts_what_was_uploaded() -> None:
    found = store.beside(one(OURS, "mixed", 2, size=2**20, seconds=0.05))
    assert found["upload_0"] == 0
    assert isinstance(found["upload_1"], float)
    assert found["upload_1"] > 0


def test_the_peer_takes_part() -> None:
    taken = one(PEER, "throughput", 1, warm=3, seconds=0.03)
    assert len(taken["results"]) == 1


@pytest.mark.usefixtures("without_torch")
def test_rates_and_many_sessions_of_ours() -> None:
    rates = store.rates(one(OURS, "throughput", 2, warm=3, seconds=0.03))
    assert all(isinstance(rate, float) and rate > 0 for rate in rates.values())
    outcome = one(OURS, "sessions", 2, sessions=20)
    assert [result["sessions"] for result in outcome["results"]] == [10, 10]
    assert len(outcome["phases"]) == 3


@pytest.mark.usefixtures("without_torch")
def test_a_storm_and_joining_where_no_name_server_answers() -> None:
    assert store.connected(one(OURS, "storm", 4, count=2))["failures"] == 0
    found = store.joined(one(OURS, "join", 4, dns="silent"))
    assert isinstance(found["seconds"], float)
    assert found["seconds"] < 60


@pytest.mark.usefixtures("without_torch")
def test_who_fails_or_is_late_is_not_measured_and_says_why() -> None:
    late = store.crowd(OURS, "storm", 2, 0.0, count=1)
    assert late["error"] == "not done within 0 s"
    wrong = store.crowd(OURS, "nothing", 1, 100.0)
    assert "KeyError" in wrong["error"]
    assert store.sampled(OURS, 0, late, store.rates) == Sample(OURS, 0, {}, "not done within 0 s")
