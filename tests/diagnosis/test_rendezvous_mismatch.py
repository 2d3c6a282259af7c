"""Who fits together and who does not, from what the ranks asked for; and the words of the roll
call.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.diagnosis import rendezvous_mismatch
from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    JobEvidence,
    Meeting,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.rendezvous_mismatch import Caller
from rallypoint.diagnosis.report import Report

HELD = "127.0.0.1:41235"
SIZE = 4


def caller(process: int, *, held: bool = True, **changes: Any) -> Caller:
    """A rank that calls as most programs do, but for these."""
    meeting = Meeting(
        "env://", HELD, rank=process, world_size=SIZE, backend="gloo", line="train.py:7"
    )
    return Caller(process, msgspec.structs.replace(meeting, **changes), held)


def code(*callers: Caller, all_there: bool | None = None, through: tuple[Caller, ...] = ()) -> str:
    found = rendezvous_mismatch.misfit(
        callers,
        SIZE,
        through=through,
        all_there=len(callers) == SIZE if all_there is None else all_there,
    )
    return found.code if found is not None else ""


def all_but(*others: Caller) -> list[Caller]:
    return [
        *(caller(rank) for rank in range(SIZE) if rank not in {one.rank for one in others}),
        *others,
    ]


# --- what is certain
# ------------------------------------------------------------------------------------------------


def test_ranks_that_fit() -> None:
    assert code(*all_but()) == ""


def test_two_that_ask_for_one_seat() -> None:
    callers = (caller(1), caller(3, rank=1))
    found = rendezvous_mismatch.misfit(
        callers, SIZE, all_there=False
    )  # the others need not be there: it is wrong already
    assert found == rendezvous_mismatch.Misfit(
        "rank-duplicate", (1, 3), "ranks 1 and 3 have come as a rank that another is, too", callers
    )


def test_backends_that_differ() -> None:
    assert code(caller(0), caller(1, backend="nccl")) == "backend-differs"
    assert code(caller(0), caller(1, backend="GLOO")) == ""
    assert code(caller(0), caller(1, backend="cpu:gloo,cuda:nccl")) == ""  # on a CPU they meet
    assert code(caller(0), caller(1, backend="")) == ""  # torch chooses, by what there is


def test_a_backend_that_waits_for_nobody_has_been_here() -> None:
    nccl = caller(0, backend="nccl")
    assert code(caller(1), through=(nccl,)) == "backend-differs"
    assert code(caller(1, turn=1), through=(nccl,)) == ""  # rank 0 may yet come a second time
    assert (
        code(caller(1, world_size=2), through=(caller(0, backend="nccl", world_size=2),)) == ""
    )  # two groups, one after the other


def test_world_sizes_that_differ_are_told_when_nobody_is_left_to_come() -> None:
    callers = all_but(caller(1, world_size=3))
    assert code(*callers) == "world-size-differs"
    assert code(*callers, all_there=False) == ""
    assert code(*callers[:3], caller(1, world_size=3, turn=1)) == ""


def test_a_group_of_some_that_is_complete_goes_on() -> None:
    """Ranks 0 and 1 have a group of two first; all four come together after it."""
    assert code(caller(0, world_size=2), caller(1, world_size=2), caller(2), caller(3)) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "world-size-differs"), ({"held": False}, ""), ({"address": "10.0.0.5:29500"}, "")],
)
def test_a_job_that_expects_more_ranks_than_there_are(
    changes: dict[str, Any], expected: str
) -> None:
    """Where other machines can reach the meeting point their ranks may be on the way."""
    assert code(*(caller(rank, world_size=8, **changes) for rank in range(SIZE))) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("127.0.0.1:29500", "127.0.0.1:29501", "address-differs"),
        ("127.0.0.1:29500", "localhost:29500", ""),
        ("127.0.0.1:29500", "[::1]:29500", ""),
        ("127.0.0.1:29500", "node07:29500", ""),  # a name of this very host, perhaps
        ("10.0.0.5:29500", "10.0.0.6:29500", ""),  # two interfaces of one, perhaps
    ],
)
def test_addresses(one: str, other: str, expected: str) -> None:
    assert code(caller(0, address=one), caller(1, address=other)) == expected


def test_files() -> None:
    def at(rank: int, path: str) -> Caller:
        return caller(rank, method=f"file://{path}", address=path)

    assert code(at(0, "/tmp/a"), at(1, "/tmp//x/../a")) == ""
    assert code(at(0, "/tmp/a"), at(1, "/tmp/b")) == "address-differs"
    assert code(at(0, "/tmp/a"), caller(1)) == "address-differs"


def test_what_cannot_be_compared() -> None:
    assert (
        code(caller(0), caller(1, address="127.0.0.1:29999", turn=1)) == ""
    )  # rank 1 is in its second group, where rank 0 will come, too
    assert (
        code(
            caller(0, world_size=2, rank=0),
            caller(2, world_size=2, rank=0, address="127.0.0.1:29999"),
        )
        == ""
    )  # two groups of two
    assert (
        code(caller(0, method="store", address=""), caller(1, rank=0, method="store", address=""))
        == ""
    )
    assert code(caller(0, backend="fake"), caller(1, rank=0, backend="fake")) == ""
    assert (
        code(caller(0, world_size=1, rank=0), caller(1, world_size=1, rank=0)) == ""
    )  # each alone


@given(st.data())
def test_no_job_that_meets_is_accused(data: st.DataObject) -> None:
    """Any split into groups, each complete and at a place of its own, its seats in any order, with
    any of the ranks there so far.
    """
    size = data.draw(st.integers(2, 6))
    groups = [data.draw(st.integers(0, 2)) for _ in range(size)]
    turns = [data.draw(st.integers(0, 1)) for _ in range(3)]
    callers = []
    for number in range(3):
        members = [rank for rank in range(size) if groups[rank] == number]
        seats = data.draw(st.permutations(range(len(members))))
        host = data.draw(st.sampled_from(["127.0.0.1", "localhost", "node07"]))
        for rank, seat in zip(members, seats, strict=True):
            place = {
                "address": f"{host}:{29500 + number}",
                "world_size": len(members),
                "turn": turns[number],
            }
            callers.append(caller(rank, held=number == 0, rank=seat, **place))
    there = data.draw(st.lists(st.sampled_from(callers), unique_by=lambda one: one.rank))
    through = [one for one in callers if one not in there]
    assert (
        rendezvous_mismatch.misfit(there, size, through=through, all_there=len(there) == size)
        is None
    )


# --- the reports
# --------------------------------------------------------------------------------------------------


def evidence(rank: int, meeting: Meeting | None = None, **more: Any) -> RankEvidence:
    defaults: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "pid": 4000 + rank,
        "phase": "joining" if meeting else "importing",
    }
    return RankEvidence(**{**defaults, "meeting": meeting, **more})


def report(*callers: Caller, through: tuple[Caller, ...] = ()) -> Report:
    found = rendezvous_mismatch.misfit(
        callers, SIZE, through=through, all_there=len(callers) == SIZE
    )
    assert found is not None
    ranks = [
        evidence(one.rank, one.meeting)
        for one in sorted((*callers, *through), key=lambda one: one.rank)
    ]
    ranks += [evidence(rank) for rank in range(SIZE) if rank not in {one.rank for one in ranks}]
    return rendezvous_mismatch.report(
        found, JobEvidence("train.py", SIZE, (NodeEvidence(tuple(ranks)),))
    )


def test_the_report_of_a_duplicate_names_who_is_missing() -> None:
    told = report(*all_but(caller(3, rank=1, line="train.py:9")))
    assert told.headline == "ranks 1 and 3 called init_process_group as the same rank, 1 of 4"
    assert told.why == "a group has each rank from 0 to 3 once; nobody has come as rank 3"
    assert told.evidence == (
        "rank 1: rank=1, world_size=4, at train.py:7",
        "rank 3: rank=1, world_size=4, at train.py:9",
    )
    assert told.then == "ranks 0 and 2 were stopped; they are not at fault"
    assert (told.ranks, told.where, told.exit_status) == ((1, 3), "train.py:7", 1)
    assert (
        report(caller(1), caller(2, rank=1)).why == "a group has each rank from 0 to 3 once"
    )  # the others may be on their way


def test_the_report_says_what_was_asked_for_then() -> None:
    """Rank 2 could not listen on a port that rank 1 has, and has called again before the report is
    made.
    """
    found = rendezvous_mismatch.misfit([caller(1), caller(2, rank=1)], SIZE, all_there=False)
    assert found is not None
    again = evidence(2, caller(2, rank=2, turn=1).meeting)
    told = rendezvous_mismatch.report(
        found,
        JobEvidence("train.py", SIZE, (NodeEvidence((evidence(1, caller(1).meeting), again)),)),
    )
    assert told.evidence == ("ranks 1-2: rank=1, world_size=4, at train.py:7",)


def test_the_report_of_backends() -> None:
    told = report(caller(1), caller(2), through=(caller(0, backend="nccl"),))
    assert (
        told.headline == "the ranks called init_process_group with different backends: nccl, gloo"
    )
    assert told.evidence == ("rank 0: nccl, at train.py:7", "ranks 1-2: gloo, at train.py:7")
    assert told.then == "rank 3 was stopped; it is not at fault"


def test_the_report_of_world_sizes() -> None:
    told = report(*all_but(caller(1, world_size=3)))
    assert told.headline == "the ranks called init_process_group with different world sizes: 4, 3"
    assert told.evidence == (
        "ranks 0 and 2-3: world_size=4, at train.py:7",
        "rank 1: world_size=3, at train.py:7",
    )
    assert told.ranks == (1,)
    same = report(*(caller(rank, world_size=8) for rank in range(SIZE)))
    assert (
        same.headline
        == "all 4 ranks called init_process_group with world_size=8, and the job has 4 ranks"
    )
    assert same.then == ""


def test_the_report_of_addresses() -> None:
    told = report(caller(0), caller(1, address="127.0.0.1:29999"))
    assert told.code == "address-differs"
    assert told.evidence == (
        f"rank 0: {HELD}, from train.py:7",
        "rank 1: 127.0.0.1:29999, from train.py:7",
    )


# --- the roll call
# --------------------------------------------------------------------------------------------------

ROOT = "/home/ada/exp/"
TOP = Frame(ROOT + "train.py", 3, "<module>")
IMPORTS = (TOP, Frame("/venv/lib/python3.11/site-packages/datasets/__init__.py", 22, "<module>"))
BUILDS = (Frame(ROOT + "train.py", 9, "<module>"), Frame(ROOT + "data.py", 88, "build_index"))
MEETS = Meeting("env://", HELD, rank=0, world_size=16, backend="gloo", line="train.py:12")


def roll(
    *missing: RankEvidence,
    states: dict[int, str] | None = None,
    size: int = 16,
    meets: Meeting = MEETS,
    now: float = 42.0,
    others: tuple[RankEvidence, ...] = (),
) -> tuple[str, ...]:
    away = {one.rank for one in missing}
    waiting = [
        evidence(r, msgspec.structs.replace(meets, rank=r), phase_at=12.0)
        for r in range(size)
        if r not in away
    ]
    inside = [*(one.rank for one in waiting), *(one.rank for one in others)]
    return rendezvous_mismatch.lines(
        [*waiting, *missing, *others], inside, states or {}, size, now, ROOT
    )


def test_the_roll_call_says_where_the_missing_are() -> None:
    assert roll(
        evidence(5, stack=IMPORTS, phase_at=1.0), evidence(11, stack=BUILDS, phase_at=4.0)
    ) == (
        "14 of 16 ranks have been waiting in init_process_group for 30 s; not there yet:",
        "  rank 5 importing for 41 s: train.py:3 <module> > datasets/__init__.py:22",
        "  rank 11 running for 38 s: data.py:88 in build_index",
    )


def test_ranks_at_one_place_share_a_line_and_a_large_job_is_as_short_as_a_small_one() -> None:
    together = roll(
        *(evidence(rank, stack=IMPORTS, phase_at=1.0) for rank in range(1, 64)),
        size=64,
        meets=MEETS,
    )
    assert together[1:] == ()  # the meeting is one of 16: see below
    meets = msgspec.structs.replace(MEETS, world_size=64)
    together = roll(
        *(evidence(rank, stack=IMPORTS, phase_at=1.0 + rank) for rank in range(1, 64)),
        size=64,
        meets=meets,
    )
    assert together == (
        "1 of 64 ranks has been waiting in init_process_group for 30 s; not there yet:",
        "  ranks 1-63 importing for 40 s: train.py:3 <module> > datasets/__init__.py:22",
    )
    apart = [
        evidence(rank, stack=(Frame(ROOT + "data.py", rank, "build"),), phase_at=1.0)
        for rank in range(1, 64)
    ]
    said = roll(*apart, size=64, meets=meets)
    assert len(said) == 1 + rendezvous_mismatch.PLACES_MOST
    assert said[-1] == "  and 56 more lines like these"


def test_an_error_that_was_caught_stands_beside_the_rank() -> None:
    clause = Frame(ROOT + "train.py", 14, "main")
    error = Raised(
        "RuntimeError",
        "CUDA error: invalid device ordinal\nmore",
        (),
        "",
        at=5.0,
        call="set_device",
        caught_at=clause,
    )
    _, line = roll(evidence(2, stack=BUILDS, phase_at=1.0, handled=(error,)))
    assert line == (
        "  rank 2 running for 41 s: data.py:88 in build_index;"
        " set_device had raised RuntimeError: CUDA error: invalid device ordinal, which train.py:14 caught"
    )
    failed = msgspec.structs.replace(error, call="init_process_group", at=32.0)
    _, line = roll(evidence(2, MEETS, stack=BUILDS, phase_at=12.0, handled=(failed,)))
    assert line.startswith(
        "  rank 2 running for 10 s: data.py:88 in build_index; init_process_group had raised"
    )
    recovered = evidence(2, MEETS, phase="running", phase_at=6.0, stack=BUILDS, handled=(error,))
    assert (
        roll(recovered, meets=msgspec.structs.replace(MEETS, turn=1))[1]
        == "  rank 2 running for 36 s: data.py:88 in build_index"
    )


def test_who_cannot_say_where_it_is() -> None:
    stopped = "stopped (SIGSTOP), pid 4005: kill -CONT 4005 lets it go on"
    _, first, second = roll(
        evidence(5, phase_at=1.0), evidence(6, phase="preparing"), states={5: stopped, 6: ""}
    )
    assert first == f"  rank 5 running for 41 s: {stopped}"
    assert second == "  rank 6 starting for 42 s"


def test_who_has_ended_will_not_come() -> None:
    _, killed, left = roll(
        evidence(3, ended=Ended(signal=9, at=40.0)), evidence(4, ended=Ended(at=30.0))
    )
    assert (killed, left) == (
        "  rank 3 died: SIGKILL, 2 s ago",
        "  rank 4 exited with code 0, 12 s ago",
    )


def test_who_is_through_is_not_missing() -> None:
    through = evidence(3, msgspec.structs.replace(MEETS, rank=3), phase="running", phase_at=13.0)
    assert (
        roll(through)[0]
        == "15 of 16 ranks have been waiting in init_process_group for 30 s, and nobody is missing"
    )
    again = roll(
        through, meets=msgspec.structs.replace(MEETS, turn=1)
    )  # it was in the first group, and these are in the second
    assert again[1] == "  rank 3 running for 29 s"


def test_all_are_there_and_were_not_told_the_same() -> None:
    host = msgspec.structs.replace(MEETS, address="node07:41235", rank=1, world_size=2)
    ranks = [
        evidence(0, msgspec.structs.replace(MEETS, world_size=2), phase_at=12.0),
        evidence(1, host, phase_at=12.0),
    ]
    assert rendezvous_mismatch.lines(ranks, [0, 1], {}, 2, 42.0) == (
        "both ranks have been waiting in init_process_group for 30 s, and nobody is missing",
        "  those who wait were told:",
        f"    rank 0: {HELD}, gloo, from train.py:12",
        "    rank 1: node07:41235, gloo, from train.py:12",
    )


def test_spawned_processes_are_not_started_by_an_option_of_the_launcher() -> None:
    larger = msgspec.structs.replace(MEETS, world_size=4, address="127.0.0.1:29501")
    ranks = [
        evidence(rank, msgspec.structs.replace(larger, rank=rank), phase_at=12.0) for rank in (0, 1)
    ]
    for spawned, advice in ((False, "-n 4"), (True, "nprocs=4")):
        said = rendezvous_mismatch.lines(ranks, [0, 1], {}, 2, 42.0, spawned=spawned)
        assert advice in said[1]


def test_all_are_there_and_one_has_tried_before() -> None:
    ranks = [
        evidence(rank, msgspec.structs.replace(MEETS, world_size=2, turn=rank), phase_at=12.0)
        for rank in (0, 1)
    ]
    assert rendezvous_mismatch.lines(ranks, [0, 1], {}, 2, 42.0)[2:] == (
        f"    rank 0: {HELD}, gloo, from train.py:12, call 1 of that rank",
        f"    rank 1: {HELD}, gloo, from train.py:12, call 2 of that rank",
    )


def test_a_group_of_some_names_the_seat_that_is_empty() -> None:
    some = msgspec.structs.replace(MEETS, world_size=2, address="127.0.0.1:29501")
    ranks = [
        evidence(0, some, phase_at=12.0),
        *(evidence(rank, phase="running", phase_at=2.0) for rank in (1, 2, 3)),
    ]
    assert rendezvous_mismatch.lines(ranks, [0], {}, 4, 42.0) == (
        "rank 0 has been waiting in init_process_group for 30 s, for a group of 2 (127.0.0.1:29501, gloo, from train.py:12);"
        " no rank of this job has joined as rank 1",
    )


def test_a_group_that_is_larger_than_the_job_has_a_way_out() -> None:
    """The README's own first mistake, rank=1 and world_size=2 in a program that was started once:
    it waited on without advice.
    """
    alone = [
        evidence(
            0,
            msgspec.structs.replace(MEETS, world_size=2, rank=1, address="localhost:12355"),
            phase_at=12.0,
        )
    ]
    said = rendezvous_mismatch.lines(alone, [0], {}, 1, 42.0)
    assert len(said) == 2
    assert "-n 2" in said[1]


def test_who_waits_in_another_group_is_not_there_either() -> None:
    other = evidence(
        3, msgspec.structs.replace(MEETS, world_size=2, address="127.0.0.1:29501"), phase_at=12.0
    )
    away = evidence(2, stack=BUILDS, phase_at=2.0)
    inside = [
        evidence(rank, msgspec.structs.replace(MEETS, world_size=4, rank=rank), phase_at=12.0)
        for rank in (0, 1)
    ]
    said = rendezvous_mismatch.lines([*inside, away, other], [0, 1, 3], {}, 4, 42.0, ROOT)
    assert said[1:] == (
        "  rank 2 running for 40 s: data.py:88 in build_index",
        "  rank 3 in another group: 127.0.0.1:29501, gloo, from train.py:12",
    )


def test_nobody_waits() -> None:
    assert rendezvous_mismatch.lines([evidence(0), evidence(1)], [], {}, 2, 42.0) == ()


def test_the_place_of_a_rank_that_imports() -> None:
    deep = (
        *IMPORTS,
        Frame("/venv/lib/python3.11/site-packages/datasets/load.py", 5, "<module>"),
        Frame("/usr/lib/python3.11/ssl.py", 9, "read"),
    )
    assert rendezvous_mismatch.place(deep, ROOT) == "train.py:3 <module> > datasets/load.py:5"
    own = (
        TOP,
        Frame(ROOT + "model.py", 2, "<module>"),
        Frame("/venv/lib/python3.11/site-packages/six.py", 7, "<module>"),
    )
    assert rendezvous_mismatch.place(own, ROOT) == "model.py:2 <module> > six.py:7"
    in_function = (Frame(ROOT + "train.py", 3, "train"), IMPORTS[1])  # a function of `launch`
    assert (
        rendezvous_mismatch.place(in_function, ROOT) == "train.py:3 train > datasets/__init__.py:22"
    )
