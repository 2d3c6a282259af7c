"""Evidence of a node that travels to another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rallypoint.diagnosis import tracebacks
from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    HelperLost,
    JobEvidence,
    Meeting,
    MemoryEvidence,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.node_evidence import (
    FAILED_BYTES,
    NODE_BYTES,
    RANK_BYTES,
    cut,
    of_one_clock,
)
from rallypoint.host.devices import Build, Device, Found, Look, Process
from rallypoint.host.probe import Reached, Tried
from rallypoint.host.visible_devices import Visible

FRAMES = tuple(Frame(f"/home/ada/exp/part{i}.py", i, "step", "x" * 60) for i in range(300))
TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "{frame.file}", line {frame.line}, in step\n' for frame in FRAMES
)
ERROR = Raised("ValueError", "bad batch\n" * 9_000, FRAMES, f"{TRACEBACK}ValueError: bad", at=2.0)
DUMP = "Thread 0x1 (most recent call first):\n" + '  File "a.py", line 1 in f\n' * 9_000


def rank(number: int, **more: Any) -> RankEvidence:
    return RankEvidence(number, number, 4000 + number, "running", 1.0, **more)


FULL = NodeEvidence(
    (
        rank(4, raised=ERROR, handled=(ERROR,) * 9, ended=Ended(1, at=2.5), left_when=2.4),
        rank(5, stack=FRAMES, stack_text=DUMP, said=("word " * 9_000,) * 40, closed_at=1.5),
        rank(
            6,
            ended=Ended(1, at=2.5),
            error_file=json.dumps({"message": {"message": "KeyError: " + "k" * 99_000}}),
            meeting=Meeting("env://", "gpu01:29500", 6, 8, "nccl"),
            cuda_forks=(("train.py:3", "train.py:1"),),
            unanswered=("gpu01", 29500),
        ),
    ),
    node=1,
    host="gpu02",
    memory=MemoryEvidence(1, True, killed_pids=tuple(range(60))),
    devices=Found(
        Look(
            devices=tuple(
                Device(f"GPU-{i}", processes=(Process(i, 1, "python " + "a" * 900),) * 40)
                for i in range(8)
            )
        ),
        Visible(None, tuple(range(8))),
        Build("2.5.0"),
    ),
    holders=("python other.py (pid 77) is listening on it",) * 500,
    helper=HelperLost("template", 3, Ended(signal=9, at=2.0), ("x" * 900,) * 90),
    reached=Reached("gpu01", 29500, (Tried("10.0.0.1:29500", "dropped", first=b"no"),)),
    now=3.0,
    offset=10.0,
    error=0.001,
)


def test_evidence_travels_as_msgpack() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FULL), type=NodeEvidence) == FULL


def test_what_is_too_long_is_cut_and_what_is_short_stays() -> None:
    short = cut(FULL)
    sizes = [len(msgspec.msgpack.encode(one)) for one in short.ranks]
    assert [
        size <= most
        for size, most in zip(sizes, (FAILED_BYTES, RANK_BYTES, FAILED_BYTES), strict=True)
    ] == [True] * 3
    assert min(sizes[0], sizes[2]) > RANK_BYTES / 4  # as much as there is room for
    assert len(msgspec.msgpack.encode(msgspec.structs.replace(short, ranks=()))) <= NODE_BYTES
    assert short.devices is not None
    assert len(short.devices.look.devices) == len(short.devices.visible)
    raised = short.ranks[0].raised
    assert raised is not None
    assert raised.traceback.startswith("Traceback")
    assert raised.traceback.endswith("ValueError: bad")
    assert raised.frames[0] == FRAMES[0]
    assert raised.frames[-1] == FRAMES[-1]
    recorded = tracebacks.error_file(short.ranks[2].error_file)
    assert recorded is not None
    assert recorded.type == "KeyError"
    assert cut(short) == short
    small = msgspec.structs.replace(FULL, ranks=(rank(4),), devices=None, holders=(), helper=None)
    assert cut(small) == small


@pytest.mark.parametrize("length", [5_000, 20_000, 400_000])
def test_a_long_message_of_one_line_is_known_by_its_beginning(length: int) -> None:
    """Its line was left out, and the one in the log was then told as another traceback."""
    line = f"ValueError: {'x' * length}"
    text = f"{TRACEBACK[: TRACEBACK.index('part9')]}py\n{line}\n"
    error = Raised("ValueError", "x" * length, FRAMES[:9], text, at=2.0)
    (short,) = cut(NodeEvidence((rank(0, raised=error, said=(text.split("\n")[0], line)),))).ranks
    assert short.raised is not None
    assert f"\n{line[:300]}" in short.raised.traceback
    assert tracebacks.other_traceback(short.said, short.raised.traceback) == ""


def test_an_error_file_that_nobody_can_read_is_left_out() -> None:
    node = NodeEvidence((rank(0, error_file="[" * 99_000, ended=Ended(1)),))
    assert cut(node).ranks[0].error_file == ""


def test_what_is_cut_most_can_be_read_all_the_same() -> None:
    """Of a pair one part was left, so a node's evidence with very much text was no evidence."""
    long = "x" * 900
    frames = (Frame(long, 3, long, long),) * 9
    error = Raised(
        long, long, frames, long, 2.0, long, (5.0, 0.1), frames[0], filename=long, code=long,
        module_folder=long, why=(long,) * 9, help=((long, long),) * 9,
    )  # fmt: skip
    many = rank(
        0, handled=(error,) * 9, in_thread=error, stack=frames, stack_text=long, said=(long,) * 9,
        cuda_forks=((long, long),) * 9, unanswered=(long, 29500), log=long, left_at=long,
    )  # fmt: skip
    short = cut(NodeEvidence((many,)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(short), type=NodeEvidence) == short


def moments(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for one in value:
            yield from moments(one)
    elif isinstance(value, msgspec.Struct) and not isinstance(value, (Found, Reached)):
        for name in value.__struct_fields__:
            if name in ("at", "phase_at", "left_when", "closed_at", "now"):
                yield getattr(value, name)
            else:
                yield from moments(getattr(value, name))


@pytest.mark.parametrize("offset", [10.0, -7.5])
def test_times_of_a_node_are_told_by_the_leads_clock(offset: float) -> None:
    there = msgspec.structs.replace(FULL, offset=offset)
    here = NodeEvidence((rank(0),), now=2.0)
    job = of_one_clock(JobEvidence("train.py", 8, (here, there)))
    assert job.nodes[0] == here
    assert list(moments(job.nodes[1])) == [at and at + offset for at in moments(there)]
    assert of_one_clock(job) == job
    assert job.now == max(2.0, 3.0 + offset)


def test_ranks_are_in_order_and_each_is_on_its_node() -> None:
    nodes = (NodeEvidence((rank(1), rank(3))), NodeEvidence((rank(0), rank(2)), node=1))
    job = JobEvidence("train.py", 4, nodes)
    assert [one.rank for one in job.ranks] == [0, 1, 2, 3]
    assert [job.node_of(number).node for number in range(4)] == [1, 0, 1, 0]
    some = job.with_ranks((rank(3), rank(2)))
    assert [[one.rank for one in node.ranks] for node in some.nodes] == [[3], [2]]
