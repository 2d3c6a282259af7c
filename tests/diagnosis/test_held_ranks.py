"""Ranks that wait for others with an exception of their own in hand: which of them are blamed."""

from __future__ import annotations

import pytest

from rallypoint.diagnosis import held_ranks
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.rank_snapshot import RankStanding, Standing, stalled

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
STEP = Frame("/home/ada/exp/train.py", 12, "step")
REDUCE = (STEP, Frame(TORCH, 2936, "all_reduce"))
BARRIER = (Frame("/home/ada/exp/train.py", 18, "<module>"), Frame(TORCH, 5120, "barrier"))
LOAD = (Frame("/home/ada/exp/train.py", 30, "load"),)
HELD = "KeyError: 'x', raised at /home/ada/exp/train.py:11 in step"


@pytest.mark.parametrize(
    ("places", "holding", "expected"),
    [
        ({0: REDUCE, 1: BARRIER}, (1,), ((1,), True)),
        ({0: LOAD, 1: BARRIER}, (1,), ((1,), False)),
        ({0: (), 1: BARRIER}, (1,), ((1,), False)),
        # an except clause in which one rank trains on
        ({0: REDUCE, 1: REDUCE}, (1,), ((), True)),
        ({0: REDUCE, 1: REDUCE, 2: LOAD}, (1,), ((), False)),
        ({0: (STEP,), 1: REDUCE}, (1,), ((), False)),
        ({0: REDUCE, 1: LOAD}, (1,), ((), True)),
        # all ranks train in one
        ({0: REDUCE, 1: BARRIER}, (0, 1), ((), False)),
        ({0: REDUCE, 1: BARRIER, 2: BARRIER}, (1, 2), ((1, 2), True)),
    ],
)
def test_who_holds_the_others_up(
    places: dict[int, tuple[Frame, ...]],
    holding: tuple[int, ...],
    expected: tuple[tuple[int, ...], bool],
) -> None:
    ranks, sure = held_ranks.apart(places, holding)
    assert (ranks, sure if ranks else None) == (expected[0], expected[1] if ranks else None)


def test_what_speaks_of_a_lost_peer_is_not_a_ranks_own() -> None:
    own = Raised("KeyError", "'x'", (STEP,), "")
    lost = Raised("RuntimeError", "Connection closed by peer [10.0.0.7]:3461", REDUCE, "")
    assert (
        held_ranks.in_hand(own, "/home/ada/exp/") == "KeyError: 'x', raised at train.py:12 in step"
    )
    assert held_ranks.in_hand(lost) == held_ranks.in_hand(None) == ""


def _standing(*ranks: tuple[tuple[Frame, ...], str]) -> Standing:
    there = (
        RankStanding(
            number,
            4000 + number,
            "running",
            33.0,
            state="S",
            frames=frames,
            stands_for=31.0,
            handles=held,
        )
        for number, (frames, held) in enumerate(ranks)
    )
    return Standing("20260101-120000-ab12", "train.py", len(ranks), tuple(there), 35.0)


def test_a_stall_is_laid_to_an_exception_whose_finally_waits() -> None:
    """The stall was told as a mismatch of collectives alone, and the exception by nobody."""
    report = stalled(_standing((REDUCE, ""), (BARRIER, HELD), (REDUCE, "")), 31.0)
    assert (report.code, report.confidence) == ("collective-mismatch", "likely")
    assert "rank 1 " in report.why
    assert "KeyError: 'x', raised at train.py:11 in step" in report.why
    assert report.where.startswith("train.py:18 ")


def test_a_stall_of_ranks_of_which_one_trains_on_in_an_except_clause() -> None:
    """It says what that rank has in hand, and lays the stall to the rank that is elsewhere."""
    report = stalled(_standing((REDUCE, ""), (REDUCE, HELD), (LOAD, "")), 31.0)
    assert (report.code, report.ranks) == ("job-stalled", (2,))
    assert "KeyError" not in report.why + report.headline
    assert sum("KeyError: 'x'" in line for line in report.evidence) == 1
