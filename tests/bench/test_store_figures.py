from __future__ import annotations

import pytest
from bench.samples import Case, Sample, Value
from bench.store import OURS, PEER, TCP
from bench.tables import text

from bench import figures, store, store_figures

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
        f"scripts/bench store --only {name}",
        "2026-01-02T03:04:05+00:00",
        MACHINE,
        (0.1, 0.2),
        list(taken),
    )


def lines(found: Case) -> list[str]:
    return [
        line
        for table in figures.tables({found.name: found})
        for line in text(table).splitlines()[2:]
    ]


def values(base: float, suffix: str = "") -> dict[str, Value]:
    made: dict[str, Value] = {}
    for operation in ("get", "set", "add"):
        made |= {f"{operation}_p50{suffix}": base, f"{operation}_p99{suffix}": 2 * base}
        made |= {f"{operation}_{end}_cpu{suffix}": base / 2 for end in ("client", "server")}
    return made


def test_latency_has_a_line_for_each_way_and_placement_and_bounds_for_get_and_add() -> None:
    samples = [
        Sample(who, 0, values(base) | values(base, "_together"))
        for who, base in ((OURS, 30.0), (TCP, 65.0), (PEER, 50.0))
    ]
    found = lines(case("latency", *samples))
    assert len(found) == 12
    assert found[0].startswith(
        "| get | Unix socket | two | 30 us | 60 us | 15 + 15 us | 50 us | 100 us | 25 + 25 us | 0.60 x | <= 0.6 x"
    )
    assert "| yes | `scripts/bench store --only latency` |" in found[0]
    assert [line.split(" | ")[0] for line in found] == 2 * (
        2 * ["| get"] + 2 * ["| add"] + 2 * ["| set"]
    )
    assert "| 1.30 x | <= 1.3 x TCPStore | yes |" in found[3]
    assert "| - | - | - |" in found[4], "an unacknowledged set is no measure for one that is"


def test_a_missed_ratio_is_published() -> None:
    samples = [
        Sample(who, 0, {"get_rate": get, "add_rate": add})
        for who, get, add in ((OURS, 3e4, 3e4), (TCP, 2e4, 9e4), (PEER, 2e4, 4e4))
    ]
    first, second, third, fourth = lines(case("throughput-8", *samples))
    assert (
        "| 8 | get | Unix socket | 30 k/s | - | 20 k/s | - | 1.50 x | >= 1.5 x TCPStore | yes |"
        in first
    )
    assert "| **no** |" in second
    assert "| 0.75 x | >= 0.7 x TCPStore | yes |" in third
    assert "| 90 k/s | - | 40 k/s | - | 2.25 x |" in fourth
    assert "must be" not in lines(case("throughput-64", *samples))[0]


def test_values_have_a_line_for_each_size_and_say_where_the_peer_ends() -> None:
    speeds: dict[str, Value] = {
        f"{name}_{size}": 6e9
        for size in (7_000_000, 2**26)
        for name in ("set", "get", "first", "memcpy")
    }
    slow: dict[str, Value] = {**speeds, "get_7000000": 1.9e9}
    seven, sixty_four = lines(
        case(
            "values",
            Sample(OURS, 0, speeds),
            Sample(TCP, 0, slow),
            Sample(PEER, 0, {"set_7000000": 4e8}),
        )
    )
    assert seven.startswith(
        "| 7 MB | 6 GB/s | 6 GB/s | 6 GB/s | 6 GB/s | 1.9 GB/s | 6 GB/s | 400 MB/s | - | 6 GB/s |"
    )
    assert "| yes; yes; yes; **no** |" in seven
    assert "over its limit | over its limit" in sixty_four


def test_a_peer_that_was_given_up_says_so_in_its_cell() -> None:
    late = Sample(PEER, 0, {}, "Traceback:\nnot done within 300 s")
    [mine, _] = lines(
        case(
            "connect-512", Sample(OURS, 0, {"seconds": 1.5}), Sample(TCP, 0, {"seconds": 6.0}), late
        )
    )
    assert "| 1.5 s | not done within 300 s | - | - | <= 5 s | yes |" in mine


def test_many_clients_and_mixed() -> None:
    sessions = case(
        "sessions-10000",
        *(Sample(who, 0, {"seconds": 2.0, "server_bytes": 41_000.0}) for who in (OURS, TCP, PEER)),
    )
    assert (
        "| 1.00 x | 41.0 kB of the server's memory each | <= 2 x TCPStore; <= 40 kB a session | yes; **no** |"
        in lines(sessions)[0]
    )
    storm = case(
        "storm-512",
        *(
            Sample(who, 0, {"seconds": 2.0, "worst_seconds": 3.0, "failures": 1})
            for who in (OURS, TCP, PEER)
        ),
    )
    assert "| worst 3 s; 1 failures | no failure | **no** |" in lines(storm)[0]
    mixed = case("mixed", Sample(OURS, 0, {"p50_2": 301.0, "p99_2": 400.0, "upload_2": 2e9}))
    assert (
        "| Unix socket | 2 of 64 MiB | 301 us | 400 us | 2 GB/s | p50 <= 300 us | **no** |"
        in lines(mixed)[2]
    )


def test_nothing_measured_is_no_table() -> None:
    assert figures.tables({}) == []


@pytest.mark.parametrize(
    ("size", "words"),
    [(32, "32 B"), (1024, "1 KiB"), (7 * 10**6, "7 MB"), (64 * 2**20, "64 MiB"), (10**9, "1 GB")],
)
def test_sizes(size: int, words: str) -> None:
    assert store_figures.size_of(size) == words


def test_who_begins_changes_from_turn_to_turn() -> None:
    taken = store.take_turns(3, ("a", "b", "c"), lambda party, turn: Sample(party, turn, {}))
    assert "".join(sample.who for sample in taken) == "abcbcacab"


def test_phases_give_the_server_its_share() -> None:
    result = {
        name: {"p50": 1e-5, "p99": 2e-5, "cpu": 5e-6, "count": 100}
        for name in ("get", "set", "add")
    }
    phases = [
        {"at": 0.0, "cpu": cpu, "resident": 0} for cpu in (0.0, 0.001, 0.5, 0.502, 0.6, 0.603)
    ]
    found = store.latency_values({"results": [result], "phases": phases}, "")
    assert [round(float(found[f"{name}_server_cpu"] or 0)) for name in ("get", "set", "add")] == [
        10,
        20,
        30,
    ]
    assert found["get_p50"] == pytest.approx(10.0)
