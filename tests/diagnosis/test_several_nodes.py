"""Jobs on several nodes: the first cause wherever it was, what became of the others, and how it
is told.

The texts are tests/stories/nodes/<name>.txt; `UPDATE_STORIES=1 pytest` writes them, a person reads
them.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import render
from rallypoint.diagnosis.causes import nodes as node_causes
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.evidence import (
    Ended,
    HelperLost,
    How,
    JobEvidence,
    Look,
    LostNode,
    Meeting,
    NodeEvidence,
    RankEvidence,
)
from rallypoint.diagnosis.report import Report
from rallypoint.diagnosis.root_cause import MOST_REPORTS, diagnose, same_again

from ..search import tries
from .test_root_cause import (
    ALL_REDUCE,
    COUNTED,
    LOADING,
    MEMORY,
    lost,
    raised,
    rank,
    stopped,
    waited,
)

STORIES = pathlib.Path(__file__).parent.parent / "stories" / "nodes"
VALUE = raised("ValueError", "bad batch", at=1.2)
NOON = 1_767_182_671.0  # 12:04:31 in UTC


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of the day in reports are those of the machine."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def node(number: int, *ranks: RankEvidence, **more: Any) -> NodeEvidence:
    home = f"/home/u/.local/state/rallypoint/runs/job7/node{number}"
    ranks = tuple(
        msgspec.structs.replace(one, log=f"{home}/rank{one.rank}.log") if one.log else one
        for one in ranks
    )
    told = {"host": f"gpu0{number + 1}", "run_dir": home, "now": 4.5, **more}
    return NodeEvidence(ranks, number, began=NOON - 4.0, **told)


def job(*nodes: NodeEvidence, gone: Sequence[LostNode] = (), **more: Any) -> JobEvidence:
    ranks = {one.rank for at in nodes for one in at.ranks} | {n for one in gone for n in one.ranks}
    return JobEvidence("train.py", len(ranks), nodes, tuple(gone), **more)


def gone(number: int, *ranks: int, **more: Any) -> LostNode:
    seen: dict[str, Any] = {"how": "lease over", "at": 4.0, "silent": 2.0, "looked": "dropped"}
    address = f"10.0.0.{number + 1}"
    return LostNode(number, f"gpu0{number + 1}", ranks, **{**seen, "address": address, **more})


def lead(how: How, looked: Look) -> LostNode:
    return gone(0, how=how, looked=looked)


def here(reports: tuple[Report, ...], at: NodeEvidence, after: float) -> tuple[Report, ...]:
    part = render.own_part(reports[0], at.node, at.host, [one.rank for one in at.ranks], after)
    return (msgspec.structs.replace(reports[0], here=part), *reports[1:])


def at_home(number: int) -> Meeting:
    return Meeting("env://", "localhost:29500", number, 4, "gloo", line="train.py:7")


OTHERS = (4, 6, 7)
RAISED = job(
    node(0, *(lost(i, at=1.3) for i in range(4))),
    node(1, *(stopped(i) for i in OTHERS), rank(5, 1, raised=VALUE, at=1.4)),
)
WAITING = node(0, *(stopped(i) for i in range(4)))
KILLED = job(
    node(0, stopped(0), lost(1), memory=COUNTED),
    node(1, rank(2, sig=9, at=1.0), lost(3), memory=MEMORY),
)
CLOCKS = job(
    node(0, stopped(0), rank(1, 1, raised=raised("KeyError", "'step'", at=4.5), at=4.6), error=0.0),
    node(1, stopped(2), rank(3, 1, raised=VALUE, at=1.4), offset=3.0, error=0.005),
)


class Story(NamedTuple):
    name: str
    job: JobEvidence
    code: str
    ranks: tuple[int, ...]
    confidence: str = "certain"
    status: int = 1
    others: tuple[str, ...] = ()


STORIES_TOLD = [
    Story("a-rank-raises-on-another-node", RAISED, "rank-raised", (5,)),
    Story(
        "a-node-is-lost-while-others-wait",
        job(WAITING, gone=[gone(1, 4, 5, 6, 7)]),
        "node-lost",
        (4, 5, 6, 7),
        status=75,
    ),
    Story(
        "a-launcher-is-killed-and-peers-lose-its-ranks",
        job(
            node(0, *(lost(i, at=3.9) for i in range(4))),
            gone=[gone(1, 4, 5, 6, 7, how="connection ended", silent=0.5, looked="refused")],
        ),
        "node-lost",
        (4, 5, 6, 7),
        status=75,
    ),
    Story(
        "a-network-fails-for-a-moment-and-a-node-gives-itself-up",
        job(WAITING, gone=[gone(1, 4, 5, 6, 7, how="goodbye", silent=0.0, looked="refused")]),
        "node-lost",
        (4, 5, 6, 7),
        confidence="likely",
        status=75,
    ),
    Story(
        "a-silent-node-answers-again",
        job(WAITING, gone=[gone(1, 4, 5, 6, 7, looked="refused")]),
        "node-lost",
        (4, 5, 6, 7),
        confidence="likely",
        status=75,
    ),
    Story(
        "two-nodes-are-lost-at-once",
        job(
            node(0, *(stopped(i) for i in range(2))),
            gone=[gone(1, 2, 3), gone(2, 4, 5, looked="unreachable")],
        ),
        "node-lost",
        (2, 3, 4, 5),
        status=75,
    ),
    Story(
        "a-rank-raised-before-its-node-was-lost",
        job(
            node(0, *(stopped(i) for i in range(2))),
            node(1, rank(2, 1, raised=VALUE, at=1.3), stopped(3)),
            gone=[gone(2, 4, 5)],
        ),
        "rank-raised",
        (2,),
    ),
    Story(
        "a-rank-raises-while-a-node-falls-silent",
        job(
            node(
                0,
                stopped(0),
                rank(1, 1, raised=msgspec.structs.replace(VALUE, at=3.0), at=3.1),
            ),
            gone=[gone(1, 2, 3, looked="silent")],
        ),
        "node-lost",
        (2, 3),
        confidence="likely",
        status=75,
        others=("rank-raised",),
    ),
    Story(
        "a-rank-raises-just-after-a-launcher-was-killed",
        job(
            node(
                0,
                stopped(0),
                rank(1, 1, raised=msgspec.structs.replace(VALUE, at=3.6), at=3.7),
            ),
            gone=[gone(1, 2, 3, how="connection ended", silent=0.5, looked="refused")],
        ),
        "node-lost",
        (2, 3),
        confidence="likely",
        status=75,
        others=("rank-raised",),
    ),
    Story("a-rank-is-killed-for-memory-on-its-node", KILLED, "rank-out-of-memory", (2,), status=137),
    Story(
        "a-rank-is-killed-and-memory-ran-out-elsewhere",
        job(
            node(0, rank(0, sig=9, at=1.0), lost(1), memory=COUNTED),
            node(1, stopped(2), lost(3), memory=MEMORY),
        ),
        "rank-killed",
        (0,),
        status=137,
    ),
    Story(
        "a-rank-on-another-node-left-early",
        job(
            node(0, lost(0, at=2.0), lost(1, at=2.0, order=2)),
            node(1, rank(2, 0, at=1.4, phase="done"), stopped(3)),
        ),
        "rank-left-early",
        (2,),
        confidence="likely",
    ),
    Story("clocks-differ-by-three-seconds", CLOCKS, "rank-raised", (3,), others=("rank-raised",)),
    Story(
        "an-exit-on-another-node-at-the-moment-of-an-exception",
        job(
            node(0, stopped(0), rank(1, 3, at=4.212)),
            node(1, stopped(2), rank(3, 1, raised=VALUE, at=1.4), offset=3.0, error=0.02),
        ),
        "rank-raised",
        (3,),
        confidence="likely",
    ),
    Story(
        "somebody-stops-a-job-on-six-nodes",
        job(
            *(node(i, stopped(2 * i), stopped(2 * i + 1, LOADING)) for i in range(6)),
            interrupted_by="SIGTERM",
        ),
        "interrupted",
        (),
        status=143,
    ),
    Story(
        "all-ranks-of-two-nodes-of-one-host-raise",
        job(
            node(0, *(rank(i, 1, raised=VALUE, at=1.3) for i in range(2)), host="box"),
            node(1, rank(2, 1, raised=VALUE, at=1.3), stopped(3), host="box"),
        ),
        "rank-raised",
        (0, 1, 2),
    ),
    Story(
        "ranks-look-for-rank-0-on-their-own-machine",
        job(
            node(0, *(rank(i, meeting=at_home(i), phase="joining") for i in (0, 1))),
            node(1, waited(2, meeting=at_home(2)), rank(3, meeting=at_home(3), phase="joining")),
        ),
        "address-loopback",
        (2, 3),
    ),
    Story(
        "a-helper-of-one-node-is-killed",
        job(
            node(0, stopped(0), lost(1, at=2.1)),
            node(
                1,
                rank(2, sig=9, at=2.0),
                rank(3, sig=9, at=2.0),
                helper=HelperLost("template", 4711, Ended(signal=9, at=2.0)),
                memory=COUNTED,
            ),
        ),
        "launcher-died",
        (),
        status=137,
    ),
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES_TOLD, ids=lambda story: story.name)
def test_the_first_cause_is_found_wherever_it_was(story: Story) -> None:
    first, *more = diagnose(story.job)
    assert (first.code, first.ranks, first.confidence, first.exit_status) == (
        story.code,
        story.ranks,
        story.confidence,
        story.status,
    )
    assert tuple(report.code for report in more) == story.others


@pytest.mark.parametrize("story", STORIES_TOLD, ids=lambda story: story.name)
def test_what_node_0_shows(story: Story) -> None:
    told = render.text(here(diagnose(story.job), story.job.nodes[0], 0.4)) + "\n"
    path = STORIES / f"{story.name}.txt"
    if os.environ.get("UPDATE_STORIES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(told)
    assert told == path.read_text()


def test_every_story_has_its_job() -> None:
    assert {path.stem for path in STORIES.glob("*.txt")} == {story.name for story in STORIES_TOLD}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            node_causes.lead_lost(lead("connection ended", "refused"), "10.0.0.3"),
            ("error[lead-lost]: node 0 (gpu01)", "its launcher is gone", "10.0.0.3, another node"),
        ),
        (
            node_causes.lead_lost(lead("lease over", "dropped")),
            ("nothing was heard of its launcher for 2.0 s", "10.0.0.1 answers no packet"),
        ),
        (
            node_causes.lead_lost(lead("lease over", "refused"), "10.0.0.3"),
            (
                "or it ended the job because it had heard nothing from this node (likely)",
                "help see on both hosts whether a link failed",
                "killed process",
            ),
        ),
        (
            node_causes.lead_lost(lead("lease over", "listening")),
            ("for 2.0 s; 10.0.0.1 takes connections again", "or the launcher was stopped (likely)"),
        ),
        (
            node_causes.lead_lost(lead("goodbye", "refused")),
            ("its launcher left the job by itself", "see the report of that node (likely)"),
        ),
        (
            node_causes.node_isolated("gpu02", "gpu01", silent=2.0, tried=("10.0.0.3: no answer",)),
            ("error[node-isolated]: this node (gpu02)", "- 10.0.0.3: no answer"),
        ),
    ],
)
def test_a_node_tells_by_itself_that_the_lead_or_the_network_is_gone(
    report: Report, words: tuple[str, ...]
) -> None:
    assert report.exit_status == 75
    told = " ".join(render.text(report).split())
    assert [word for word in words if word not in told] == []


def test_ranks_share_a_gpu_only_within_a_node() -> None:
    """Two hosts may have GPUs with one name, and each rank has its own all the same."""
    meeting = Meeting("env://", "10.0.0.1:29500", 0, 2, "nccl", device="GPU-0")
    ranks = [rank(i, meeting=msgspec.structs.replace(meeting, rank=i), stack=ALL_REDUCE) for i in (0, 1)]  # fmt: skip
    apart = job(node(0, ranks[0]), node(1, ranks[1]))
    assert diagnose(apart)[0].code == "cause-unknown"
    assert diagnose(job(node(0, *ranks)))[0].code == "device-shared"


def test_nodes_of_one_machine_may_meet_at_its_own_address() -> None:
    joining = [rank(i, meeting=at_home(i), phase="joining") for i in range(4)]
    met = job(node(0, *joining[:2], host="box"), node(1, *joining[2:], host="box"))
    assert diagnose(met)[0].code == "cause-unknown"


def test_a_port_is_held_only_by_processes_of_its_own_node() -> None:
    """A rank of another node may have the pid of the process that holds the port."""
    error = raised("OSError", "[Errno 98] Address already in use", at=1.0)
    failed = rank(0, 1, raised=error, at=1.1)
    there = msgspec.structs.replace(stopped(1), pid=77)
    holder = "python serve.py (pid 77, user ada) is listening on 0.0.0.0:6006"
    (report,) = diagnose(job(node(0, failed, holders=(holder,)), node(1, there)))
    assert (report.code, report.why) == ("port-in-use", holder)


def test_the_same_failure_on_another_node_is_the_same() -> None:
    reports = [
        diagnose(job(node(0, *ranks[:2]), node(1, *ranks[2:])))[0]
        for ranks in (
            [rank(0, 1, raised=VALUE), stopped(1), stopped(2), stopped(3)],
            [stopped(0), stopped(1), stopped(2), rank(3, 1, raised=VALUE)],
        )
    ]
    assert len({same_again(report) for report in reports}) == 1
    assert [report.headline for report in reports] == [
        "rank 0 on gpu01 raised ValueError: bad batch",
        "rank 3 on gpu02 raised ValueError: bad batch",
    ]


@pytest.mark.parametrize(
    ("words", "alike"),
    [("node reclaimed after epoch {}", False), ("<Batch at 0x{}f8> is bad", True)],
)
def test_a_failure_at_another_step_is_another(words: str, alike: bool) -> None:
    """A job that came one epoch further in each attempt was given up after three."""
    errors = [raised("RuntimeError", words.format(number)) for number in (1, 2)]
    reports = [diagnose(job(node(0, rank(0, 1, raised=error))))[0] for error in errors]
    assert (same_again(reports[0]) == same_again(reports[1])) == alike


@pytest.mark.parametrize("how", ["connection ended", "lease over"])
@pytest.mark.parametrize(
    ("raised_at", "told", "confidence"),
    [
        (3.2, ["rank-raised"], "certain"),
        (3.493, ["rank-raised"], "certain"),
        (3.497, ["node-lost", "rank-raised"], "likely"),  # as long as word takes from node to node
        (3.6, ["node-lost", "rank-raised"], "likely"),
        (3.99, ["node-lost", "rank-raised"], "likely"),
        (4.1, ["node-lost"], "certain"),
    ],
)
def test_a_loss_begins_with_the_silence_and_not_with_its_decision(
    how: How, raised_at: float, told: list[str], confidence: str
) -> None:
    """A launcher was killed, a rank of another node raised 0.1 s later, and the report said for
    certain that the node was lost after that.
    """
    error = msgspec.structs.replace(VALUE, at=raised_at)
    failed = node(0, stopped(0), rank(1, 1, raised=error, at=raised_at + 0.05))
    reports = diagnose(job(failed, gone=[gone(1, 2, 3, how=how, silent=0.5)]))
    assert ([one.code for one in reports], reports[0].confidence) == (told, confidence)


@pytest.mark.parametrize(("exited_at", "told"), [(3.2, "rank-exited"), (3.6, "node-lost")])
def test_a_rank_that_leaves_because_of_a_lost_node_is_not_the_cause(
    exited_at: float, told: str
) -> None:
    failed = node(0, stopped(0), rank(1, 3, at=exited_at))
    loss = gone(1, 2, 3, how="connection ended", silent=0.5)
    assert [one.code for one in diagnose(job(failed, gone=[loss]))] == [told]


def test_a_stop_from_outside_is_no_loss_of_a_node() -> None:
    """A batch system ends all nodes of a job, and some are gone before the report is made."""
    (report,) = diagnose(job(WAITING, gone=[gone(1, 4, 5)], interrupted_by="SIGTERM"))
    assert report.code == "interrupted"


def test_nodes_that_told_nothing_in_time_are_named() -> None:
    hosts = tuple(f"gpu{i:02}" for i in range(2, 8))
    failed = job(node(0, rank(0, 1, raised=VALUE), stopped(1)), unheard=hosts)
    told = [node_causes.with_unheard(diagnose(failed), hosts[:count])[0] for count in (1, 6)]
    assert [report.headline for report in told] == [
        "rank 0 on gpu01 raised ValueError: bad batch"
    ] * 2
    assert [report.then.rpartition("; ")[2] for report in told] == [
        "nothing was told by gpu02 in time",
        "nothing was told by gpu02, gpu03, gpu04, gpu05 and 2 more nodes in time",
    ]


@pytest.mark.parametrize("size", [64, 1024])
def test_ranks_that_left_are_listed_once_and_not_for_each_rank(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 1,024 ranks made the list of those that had left anew: 0.23 s, and four times that
    for twice as many.
    """
    asked = 0
    numbers: Callable[[Case], tuple[int, ...]] = vars(Case)["numbers"].fget

    def counted(case: Case) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        return numbers(case)

    monkeypatch.setattr(Case, "numbers", property(counted))
    ranks = [rank(i, 0, at=1.0 + i / 1e4, order=i, phase="done") for i in range(size)]
    nodes = [node(k, *ranks[k::8], offset=k * 0.001, error=0.001) for k in range(8)]
    (report,) = diagnose(job(*nodes, node(8, lost(size, at=3.0))))
    assert (report.code, len(report.ranks)) == ("rank-left-early", size)
    assert asked < 12


# --- any job, on one node or on several

MAKERS: dict[str, Callable[[int, float], RankEvidence]] = {
    "raised": lambda i, at: rank(i, 1, raised=msgspec.structs.replace(VALUE, at=at), at=at + 0.01),
    "key": lambda i, at: rank(i, 1, raised=raised("KeyError", "'a'", at=at), at=at + 0.01),
    "lost": lambda i, at: lost(i, at=at),
    "killed": lambda i, at: rank(i, sig=signal.SIGKILL, at=at),
    "crashed": lambda i, at: rank(i, sig=signal.SIGSEGV, at=at),
    "exited": lambda i, at: rank(i, 3, at=at),
    "ended": lambda i, at: rank(i, 0, at=at, phase="done"),
    "stopped": lambda i, at: stopped(i),
    "alive": lambda i, at: rank(i, stack=ALL_REDUCE),
}


def apart(
    ranks: Sequence[RankEvidence], at: Sequence[int], offsets: Sequence[float]
) -> JobEvidence:
    """Make the evidence of these ranks, each on a node, by its clock and in its order."""
    nodes = []
    for number in sorted(set(at)):
        own = [one for one, there in zip(ranks, at, strict=True) if there == number]
        own.sort(key=lambda one: one.ended.at if one.ended is not None else 0.0)
        shifted = [ended_at(one, -offsets[number], order) for order, one in enumerate(own)]
        nodes.append(node(number, *shifted, offset=offsets[number], error=0.001, memory=COUNTED))
    return job(*nodes)


def ended_at(one: RankEvidence, by: float, order: int) -> RankEvidence:
    end, error = one.ended, one.raised
    return msgspec.structs.replace(
        one,
        ended=end and msgspec.structs.replace(end, at=end.at + by, order=order),
        raised=error and msgspec.structs.replace(error, at=error.at + by),
    )


@tries(300)
@given(
    some.lists(some.sampled_from([*MAKERS]), min_size=8, max_size=8),
    some.permutations(range(1, 9)),
    some.lists(some.integers(0, 3), min_size=8, max_size=8),
    some.lists(some.floats(-50, 50), min_size=4, max_size=4),
)
def test_the_first_cause_does_not_depend_on_which_rank_is_on_which_node(
    kinds: list[str], turns: list[int], at: list[int], offsets: list[float]
) -> None:
    ranks = [MAKERS[kind](i, 100 + turn / 2) for i, (kind, turn) in enumerate(zip(kinds, turns, strict=True))]  # fmt: skip
    on_one = diagnose(apart(ranks, [0] * 8, [0.0]))
    on_some = diagnose(apart(ranks, at, offsets))
    assert [(one.code, one.ranks, one.confidence, one.exit_status) for one in on_some] == [
        (one.code, one.ranks, one.confidence, one.exit_status) for one in on_one
    ]
    assert 0 < len(on_some) <= MOST_REPORTS
    assert render.text(on_some)


@tries(100)
@given(
    some.lists(some.sampled_from(["lost", "stopped", "alive"]), min_size=1, max_size=7),
    some.sampled_from(["", "refused", "silent", "dropped", "unreachable"]),
    some.sampled_from(["connection ended", "lease over"]),
)
def test_a_lost_node_beats_every_consequence_of_its_peers(
    kinds: list[str], looked: Any, how: Any
) -> None:
    ranks = [MAKERS[kind](i, 3.0 + i) for i, kind in enumerate(kinds)]
    nodes = [node(i, one) for i, one in enumerate(ranks)]
    (report,) = diagnose(job(*nodes, gone=[gone(8, 8, looked=looked, how=how)]))
    assert (report.code, report.ranks, report.exit_status) == ("node-lost", (8,), 75)
    assert "not at fault" in report.then or set(kinds) == {"alive"}


def test_which_launcher_was_stopped_is_said() -> None:
    """A node that is drained, or a pod that is evicted, is the cause of the whole job's end."""
    stopped_by = job(
        WAITING,
        node(1, *(stopped(i) for i in OTHERS)),
        interrupted_by="SIGTERM",
        stop_reason="the launcher on gpu02 got SIGTERM",
    )
    (report,) = diagnose(stopped_by)
    assert report.code == "interrupted"
    assert "gpu02" in report.headline
