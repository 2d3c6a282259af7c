"""A job that failed because its ranks waited for each other in different collectives."""

from __future__ import annotations

from rallypoint.diagnosis import render, root_cause
from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    JobEvidence,
    NodeEvidence,
    Raised,
    RankEvidence,
)

SITE = "/venv/lib/python3.11/site-packages/torch/distributed"


def stack(call: str, line: int, *inside: str) -> tuple[Frame, ...]:
    return (
        Frame("/home/ada/train.py", line, "step"),
        Frame(f"{SITE}/c10d_logger.py", 83, "wrapper"),
        *(Frame(f"{SITE}/distributed_c10d.py", 2936, name) for name in (call, *inside)),
    )


def timed_out(rank: int, call: str, line: int, *inside: str) -> RankEvidence:
    message = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms for recv operation to complete"
    last = (call, *inside)[-1]
    error = Raised(
        "RuntimeError",
        message,
        stack(call, line, *inside),
        f"Traceback\nRuntimeError: {message}\n",
        at=9.0 + rank,
        call=last,
    )
    return RankEvidence(
        rank, rank, 4000 + rank, "running", ended=Ended(1, at=9.1 + rank, order=rank), raised=error
    )


def waiting(rank: int, frames: tuple[Frame, ...]) -> RankEvidence:
    return RankEvidence(rank, rank, 4000 + rank, "running", stack=frames, sent=("SIGTERM",))


def report(*ranks: RankEvidence) -> str:
    (only,) = root_cause.diagnose(JobEvidence("train.py", len(ranks), (NodeEvidence(ranks),)))
    return render.text(only)


def test_two_that_time_out_in_different_calls() -> None:
    text = report(
        timed_out(0, "broadcast", 50),
        timed_out(1, "all_reduce", 42),
        timed_out(2, "all_reduce", 42),
    )
    told = "the ranks waited for each other in different collectives, broadcast and all_reduce, until the timeout"
    assert text.startswith(f"error[collective-mismatch]: {told}\n")
    assert "(likely)" in text
    assert "- rank 0: broadcast at train.py:50 in step\n" in text
    assert "- ranks 1-2: all_reduce at train.py:42 in step\n" in text


def test_one_that_times_out_while_the_others_still_wait_elsewhere() -> None:
    """They did come, though not to the same call: nobody is missing."""
    text = report(
        timed_out(0, "barrier", 50),
        waiting(1, stack("all_reduce", 42)),
        waiting(2, stack("all_reduce", 42)),
    )
    assert text.startswith("error[collective-mismatch]: ")
    assert "where  train.py:50 in step, pid 4000" in text


def test_a_rank_that_is_elsewhere_is_missing() -> None:
    text = report(
        timed_out(0, "barrier", 50),
        waiting(1, stack("all_reduce", 42)),
        waiting(2, (Frame("/home/ada/train.py", 7, "load"),)),
    )
    assert "collective-mismatch" not in text


def test_what_is_inside_a_call_of_objects_is_no_other_call() -> None:
    """torch says `all_gather` of the `all_gather_object` that it times out in."""
    text = report(
        timed_out(0, "all_gather_object", 42, "all_gather"),
        waiting(1, stack("all_gather_object", 42, "all_gather")),
    )
    assert "collective-mismatch" not in text


def test_one_collective_on_different_lines_is_not_blamed() -> None:
    assert "collective-mismatch" not in report(
        timed_out(0, "broadcast", 50), timed_out(1, "broadcast", 42)
    )


def test_a_cause_of_its_own_comes_before() -> None:
    error = Raised(
        "ValueError", "bad", (Frame("/home/ada/train.py", 9, "f"),), "ValueError: bad\n", at=1.0
    )
    failed = RankEvidence(2, 2, 4002, "running", ended=Ended(1, at=1.1), raised=error)
    assert report(timed_out(0, "broadcast", 50), timed_out(1, "all_reduce", 42), failed).startswith(
        "error[rank-raised]: rank 2"
    )
