from __future__ import annotations

from bench.nodes_soak import truths
from bench.samples import Case, Sample, Value
from bench.tables import text

from bench import nodes, nodes_figures, store


def lines(name: str, **taken: list[dict[str, Value]]) -> list[str]:
    found = Case(name, f"scripts/bench nodes --only {name}", "", {}, (0.0, 0.0))
    for who, each in taken.items():
        rows = [Sample(who.replace("_", " "), turn, values) for turn, values in enumerate(each)]
        found.samples.extend(rows)
    made = nodes_figures.tables({name: found})
    return [line for table in made for line in text(table).splitlines()[2:]]


def test_a_start_is_compared_with_the_import_and_with_torchrun() -> None:
    [line] = lines(
        "nodes-2x8",
        import_torch=[{"seconds": 1.0}],
        rallypoint=[{"seconds": 2.0}],
        torchrun_c10d=[{"seconds": 11.0}],
    )
    assert "| 2 x 8 | 2.00 s | 1.00 s | 11.00 s | - | 2.00 x | 5.50 x |" in line
    assert "| **no**; yes |" in line


def test_every_case_of_a_fault_has_words_and_figures() -> None:
    assert nodes.CASES.keys() == nodes_figures.WORDS.keys()
    assert nodes.CASES.keys() == nodes_figures.KNOWN_FREE_GONE.keys()


def test_a_node_that_once_was_not_free_has_missed_its_target() -> None:
    once: list[dict[str, Value]] = [
        {"known": 1.0, "free": 2.0, "gone": 2.0},
        {"known": 1.0, "free": None, "gone": 2.0},
    ]
    mine, theirs, late = lines(
        "link-down",
        rallypoint=once,
        torchrun_c10d=[{"known": None, "free": None, "gone": None}],
        torchrun_static=[{}],
    )
    assert "| yes; not measured; yes |" in mine
    assert "| torchrun c10d | not within 40 s | not within 40 s | not within 40 s |" in theirs
    assert "| did not start | did not start | did not start |" in late


def test_times_are_of_the_slowest_other_node() -> None:
    found = nodes._times(100.0, 1, [101.0, 109.0, 103.0], [100.5, None, 100.7])
    assert found == {"known": 0.7000000000000028, "free": 3.0, "gone": 9.0, "waiting": 0}
    found = nodes._times(100.0, 0, [None, None, 103.0], [None, 100.5, None])
    assert (found["known"], found["free"], found["gone"]) == (None, None, None)
    assert found["waiting"] == 1


def test_tls_is_compared_with_none() -> None:
    case = Case("tls-joining-512", "command", "", {}, (0.0, 0.0))
    case.samples.extend(
        [
            Sample(nodes.TLS, 0, {"seconds": 3.0}),
            Sample(store.TCP, 0, {"seconds": 2.0}),
        ]
    )
    rates = Case("tls-values", "command", "", {}, (0.0, 0.0))
    key = str(store.BULK_BYTES)
    rates.samples.extend(
        [
            Sample(nodes.TLS, 0, {f"set_{key}": 0.5e9, f"get_{key}": 0.3e9}),
            Sample(store.TCP, 0, {f"set_{key}": 2e9, f"get_{key}": 1e9}),
        ]
    )
    made = nodes_figures.tables({case.name: case, rates.name: rates})[-1]
    joining, written, read = text(made).splitlines()[2:]
    assert "| 512 clients join | 3.00 s | 2.00 s | 1.50 x | <= 2 x without | yes |" in joining
    assert "| 0.50 GB/s | 2.00 GB/s | 0.25 x | >= 0.4 GB/s | yes |" in written
    assert "| **no** |" in read


def test_who_must_say_what_after_a_fault() -> None:
    killed = truths("rank-killed", 2, 1)
    assert {node: truth.rank for node, truth in killed.items()} == {0: 2, 1: 2}
    assert {node: truth.codes for node, truth in truths("node-killed", 3, 0).items()} == {
        1: ("lead-lost",),
        2: ("lead-lost",),
    }
    cut = truths("link-down", 3, 1)
    assert cut[0].codes == cut[2].codes == ("node-lost",)
    assert "node-isolated" in cut[1].codes
