"""A short, seeded form of each soak of the store, and that each can fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from bench.outcome import Outcome

from bench import store_soak


def test_adds_through_resets_of_one_side_and_a_black_hole(tmp_path: Path) -> None:
    outcome = store_soak.adds(
        random.Random(1), 0, tmp_path, clients=3, each=150, hole=1.0, limit=90.0
    )
    assert outcome.wrong == []
    assert "all adds" in outcome.times


@pytest.mark.parametrize("number", range(len(store_soak.FAULTS)))
def test_histories_have_one_order(tmp_path: Path, number: int) -> None:
    outcome = store_soak.histories(random.Random(number), number, tmp_path, count=25)
    assert outcome.wrong == []
    assert outcome.what.startswith(store_soak.FAULTS[number])


@pytest.mark.parametrize("number", [0, 1])
def test_reconnects_leave_nothing(tmp_path: Path, number: int) -> None:
    outcome = store_soak.reconnects(random.Random(1), number, tmp_path, count=15)
    assert outcome.wrong == []


def test_strangers_do_not_keep_a_client_waiting(tmp_path: Path) -> None:
    outcome = store_soak.strangers(
        random.Random(1), 0, tmp_path, count=200, seconds=0.5, worst=10.0
    )
    assert outcome.wrong == []
    assert outcome.times["get beside them, slowest"] > 0


@pytest.mark.parametrize("number", [0, 1])
def test_calls_end_at_their_deadline(tmp_path: Path, number: int) -> None:
    outcome = store_soak.deadlines(
        random.Random(number), number, tmp_path, deadline=2.0, slack=10.0
    )
    assert outcome.wrong == []


# --- that they can fail


def operations(*results: int) -> list[list[object]]:
    return [
        [0, "add", "sum", [1], result, float(at), at + 0.5, "answered", ""]
        for at, result in enumerate(results)
    ]


def test_a_history_without_an_order_is_wrong() -> None:
    good, bad = Outcome("h"), Outcome("h")
    store_soak.judge(operations(1, 2, 3), good)
    store_soak.judge(operations(1, 1, 2), bad)
    assert good.wrong == []
    assert ["no order explains key 'sum'" in wrong for wrong in bad.wrong] == [True]


def test_an_add_that_is_said_not_to_have_happened_and_did_is_wrong() -> None:
    outcome = Outcome("h")
    history = operations(1, 3)
    history.append([1, "add", "sum", [1], None, 0.0, 0.2, "did not happen", "StoreTimeout"])
    store_soak.judge(history, outcome)
    assert outcome.wrong != []
    unknown = Outcome("h")
    store_soak.judge(
        [*operations(1, 3), [1, "add", "sum", [1], None, 0.0, 0.2, "unknown", "StoreTimeout"]],
        unknown,
    )
    assert unknown.wrong == []


def test_a_client_that_fails_is_wrong_and_says_why() -> None:
    outcome = Outcome("adds")
    process = store_soak.client(
        "adds", {"address": "tcp://127.0.0.1:1", "secret": "00" * 16, "timeout": 0.1, "count": 1}
    )
    assert store_soak.answer(process, 60.0, outcome) is None
    assert ["nobody listens" in wrong or "refused" in wrong for wrong in outcome.wrong] == [True]


def test_an_exception_is_a_wrong_outcome_and_the_output_is_kept(tmp_path: Path) -> None:
    outcome = Outcome("something")
    with store_soak.written(outcome, tmp_path / "0"):
        raise RuntimeError("it broke")
    assert outcome.wrong == ["RuntimeError: it broke"]
    assert "WRONG: RuntimeError: it broke" in (tmp_path / "0" / "output").read_text()


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_soak, "JOBS", tmp_path)
    (tmp_path / "store_server.py").write_text("raise SystemExit('no server today')\n")
    with pytest.raises(RuntimeError, match="no server today"):
        store_soak.ServerProcess(tmp_path)
