"""Place of an agent in a job, with the lead in the same process."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint.clock import Clock
from rallypoint.clusters.secret_source import key_path
from rallypoint.diagnosis.evidence import LostNode, NodeEvidence
from rallypoint.errors import RallypointError, UsageError
from rallypoint.host import ports
from rallypoint.launcher.job_diagnosis import FailedAttempt
from rallypoint.launcher.nodes import endpoint, messages
from rallypoint.launcher.nodes.lead_runner import NAP, LeadRunner, StoodStill
from rallypoint.launcher.nodes.membership import (
    BEFORE_NEXT_TRY,
    Heard,
    LeadLost,
    Membership,
    NotReached,
)
from rallypoint.launcher.nodes.messages import (
    Applicant,
    EvidenceOf,
    Failing,
    Judge,
    Missing,
    Over,
    Refused,
    Seated,
    Sentence,
    Versions,
)
from rallypoint.launcher.plan import Nodes
from rallypoint.store.address import set_forwarded
from rallypoint.store.client.member import Member
from rallypoint.store.limits import ORPHAN
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy

from ..test_plan import plan

SECRET = b"a secret of a test, long enough"


def _free_port() -> int:
    held = ports.hold_port(0, "127.0.0.1", (20000, 28999))  # the kernel gives nobody these
    held.release()
    return held.port


def _nodes(**asked: Any) -> Nodes:
    given = {"host": "127.0.0.1", "timeout": 2.0, "join_timeout": 20.0, **asked}
    return Nodes(**given)


Join = Callable[..., Membership]


@pytest.fixture
def join() -> Iterator[Join]:
    made: weakref.WeakSet[Membership] = weakref.WeakSet()

    def join(
        judge: Callable[[FailedAttempt], Sentence],
        master_port: int = 0,
        rank: int = 0,
        ports: tuple[int, ...] = (),
        clock: Clock | None = None,
        count: int = 1,
        id: str = "0",
        timeout: float = 2.0,
    ) -> Membership:
        nodes = _nodes(count=count, rank=rank, ports=ports or (_free_port(),), timeout=timeout)
        made_for = plan(nodes=nodes, master_port=master_port, max_restarts=1, grace=1.0)
        here = os.uname().nodename, os.getpid()  # by which the lead knows a session's process
        applicant = Applicant(id, *here, 1, count, Versions("1", "", "3.11"), "", node_rank=rank)
        membership = Membership(made_for, SECRET, applicant, judge, clock or Clock())
        made.add(membership)
        return membership

    yield join
    for one in list(made):
        one.close(1.0)


def _heard(membership: Membership) -> Heard:
    """Return the next thing that is heard."""
    while True:
        assert select.select([membership], [], [], 20.0)[0]
        for one in membership.read():
            return one


def _of_kind(membership: Membership, kind: type[Heard]) -> Heard:
    while not isinstance(heard := _heard(membership), kind):
        continue
    return heard


def test_nothing_is_left_of_a_place_in_a_job_that_is_over(join: Join) -> None:
    def take() -> None:
        membership = join(lambda failed: Sentence((), 1))
        _of_kind(membership, Seated)
        membership.close(1.0)

    before = len(os.listdir("/proc/self/fd"))
    take()
    until = time.monotonic() + 20.0
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < until
        gc.collect()


@pytest.mark.parametrize("threads", range(8))
def test_a_lead_that_gets_too_few_threads_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Its port stayed taken: the next try of this node to lead found itself there."""
    start, started = threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    nodes = _nodes(count=2, rank=0, ports=(_free_port(),))
    claim = endpoint.claim(nodes, None)
    assert claim is not None
    applicant = Applicant("0", "gpu00", 100, 1, 2, Versions("1", "", "3.11"), "")
    before = len(os.listdir("/proc/self/fd")) - 1  # what an earlier test left may go meanwhile
    faults: list[Exception] = []
    monkeypatch.setattr(threading.Thread, "start", begin)
    try:
        lead = LeadRunner(
            claim, plan(nodes=nodes), SECRET, applicant, no_judge, Clock(), faults.append
        )
    except (RallypointError, RuntimeError):
        assert len(started) > threads
    else:
        assert len(started) <= threads
        lead.close(1.0)
    for thread in started[:threads]:
        thread.join(20.0)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert faults == []


def test_a_fault_in_the_thread_of_the_lead_reaches_the_agent(join: Join) -> None:
    def judge(failed: FailedAttempt) -> Sentence:
        raise ZeroDivisionError

    membership = join(judge)
    _of_kind(membership, Seated)
    membership.send(Failing(0, "rank 0 ended"))
    membership.send(EvidenceOf(0, NodeEvidence()))
    _of_kind(membership, ZeroDivisionError)


def test_a_node_that_says_that_it_leaves_is_not_told_as_killed(join: Join) -> None:
    """A node gave itself up after its network had failed for 1.9 s, and the lead told for certain
    that its launcher was gone, and how to look for a kill by the kernel."""
    lost: list[LostNode] = []

    def judge(failed: FailedAttempt) -> Sentence:
        lost.extend(failed.lost)
        return Sentence((), 75)

    at = (_free_port(),)
    lead = join(judge, ports=at, count=2)
    node = join(no_judge, rank=1, ports=at, count=2, id="1")
    for one in (lead, node):
        _of_kind(one, Seated)
    node.close(1.0)
    _of_kind(lead, Judge)
    lead.send(EvidenceOf(0, NodeEvidence()))
    _of_kind(lead, Sentence)
    assert [(one.node, one.how) for one in lost] == [(1, "goodbye")]


def test_a_loss_began_when_the_connections_ended_and_not_when_it_was_decided(join: Join) -> None:
    """A rank of another node raised between the two, and the loss was told as later than that."""
    lost: list[LostNode] = []

    def judge(failed: FailedAttempt) -> Sentence:
        lost.extend(failed.lost)
        return Sentence((), 75)

    at, clock = (_free_port(),), Clock()
    lead = join(judge, ports=at, count=2, clock=clock)
    with ChaosProxy(("127.0.0.1", at[0])) as proxy:
        way = (int(proxy.address.rpartition(":")[2]),)
        node = join(no_judge, rank=1, ports=way, count=2, id="1")
        for one in (lead, node):
            _of_kind(one, Seated)
        before = clock.elapsed()
    lead.send(Failing(0, "rank 0 raised ValueError"))
    lead.send(EvidenceOf(0, NodeEvidence()))
    _of_kind(lead, Sentence)
    (loss,) = lost
    assert (loss.node, loss.how) == (1, "connection ended")
    assert before < loss.at - loss.silent
    assert loss.at <= clock.elapsed()
    assert loss.silent > ORPHAN - 0.01


def test_a_message_that_is_none_reaches_the_agent_as_a_fault(join: Join) -> None:
    membership = join(lambda failed: Sentence((), 1))
    _of_kind(membership, Seated)
    membership.send("no message")  # type: ignore[arg-type]
    assert isinstance(_heard(membership), Exception)


def test_a_port_that_is_taken_before_a_restart_is_told_by_node_0(join: Join) -> None:
    membership = join(lambda failed: Sentence((), 1), master_port=_free_port())
    first = _of_kind(membership, Seated)
    assert isinstance(first, Seated)
    assert membership.lead is not None
    meeting, store = membership.lead.take(0)
    assert meeting is not None
    assert store is not None
    try:
        membership.send(Failing(0, "rank 0 ended"))
        membership.send(EvidenceOf(0, NodeEvidence()))
        membership.send(Over(0, well=False))
        second = _of_kind(membership, Seated)
        assert isinstance(second, Seated)
        assert second.seat.attempt == 1
        assert second.seat.master_port == first.seat.master_port
        assert membership.lead.take(1) == (None, None)
    finally:
        meeting.release()
        store.release()


def no_judge(attempt: FailedAttempt) -> Sentence:
    raise AssertionError(attempt)


def problem_of(nodes: Nodes, secret: bytes) -> RallypointError:
    """Return why a node is not let in."""
    applicant = Applicant("a1", "gpu01", 100, 2, 2, Versions("1", "2", "3"), "digest")
    membership = Membership(plan(nodes=nodes), secret, applicant, no_judge, Clock())
    try:
        assert select.select([membership.fileno()], [], [], 10.0)[0]
        (heard,) = membership.read()
    finally:
        membership.close(1.0)
    assert isinstance(heard, LeadLost)
    assert heard.problem is not None
    return heard.problem


@pytest.mark.parametrize(
    ("secret", "job", "tls", "code", "option"),
    [
        (b"another secret, of another file", "7", False, "wrong-secret", "my secret"),
        (SECRET, "8", False, "wrong-job", "--rdzv-id"),
        (SECRET, "7", True, "tls-mismatch", "--tls"),
    ],
)
def test_one_that_is_not_let_in(secret: bytes, job: str, tls: bool, code: str, option: str) -> None:
    """It was told of rallypoint.connect(), which no user of `run` has called."""
    with Server(secret=SECRET, job="7", local=False) as server:
        port = int(server.address.rpartition(":")[2])
        nodes = _nodes(count=2, rank=1, ports=(port,), secret_file="my secret", tls=tls, job=job)
        problem = problem_of(nodes, secret)
    assert problem.code == code
    assert option in problem.headline
    assert isinstance(problem, UsageError)  # nothing but another command helps


def test_a_published_port_of_the_lead_is_told_at_once() -> None:
    """It was tried for ten minutes, and told in the end as a port at which nothing listens."""
    with Server(secret=SECRET, job="7", local=False) as server, ChaosProxy(server.address) as proxy:
        set_forwarded(proxy.address, False)
        port = int(proxy.address.rpartition(":")[2])
        problem = problem_of(_nodes(count=2, rank=1, ports=(port,), job="7"), SECRET)
    assert problem.code == "store-relayed"
    assert any("RALLYPOINT_FORWARDED" in command for _, command in problem.help)


class Jumping(Clock):
    """The real clock of a process that stood still for some seconds."""

    stood = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.stood


@pytest.mark.parametrize(("seconds", "lost"), [(15.0, False), (25.0, True)])
def test_a_lead_that_stood_still_blames_itself(join: Join, seconds: float, lost: bool) -> None:
    """It judged the other nodes, whose sessions ended because of it."""
    clock = Jumping()
    membership = join(lambda failed: Sentence((), 1), clock=clock, timeout=20.0)
    _of_kind(membership, Seated)
    clock.stood = seconds
    membership.send(Failing(0, "rank 0 ended"))
    heard = _heard(membership)
    assert isinstance(heard, StoodStill) is lost, heard
    assert not isinstance(heard, StoodStill) or heard.seconds >= seconds


def test_a_lead_that_takes_long_to_judge_has_not_stood_still(join: Join) -> None:
    """In place of the report of a large job it said that it stood still."""
    clock = Jumping()

    def judge(failed: FailedAttempt) -> Sentence:
        clock.stood = 25.0
        return Sentence((), 1)

    membership = join(judge, clock=clock, timeout=20.0)
    _of_kind(membership, Seated)
    membership.send(Failing(0, "rank 0 ended"))
    membership.send(EvidenceOf(0, NodeEvidence()))
    _of_kind(membership, Sentence)
    assert not select.select([membership], [], [], 5 * NAP)[0], membership.read()


class Ahead(Clock):
    """A clock that somebody has set wrongly."""

    def wall(self) -> float:
        return super().wall() + 3.0


@pytest.mark.parametrize(
    ("clock", "told"), [(Clock(), ""), (Ahead(), "the clock of gpu01 is 3.0 s ahead of")]
)
def test_clocks_that_differ_are_told(join: Join, clock: Clock, told: str) -> None:
    port = _free_port()
    join(lambda failed: Sentence((), 1), ports=(port,), count=2)
    nodes = _nodes(count=2, rank=1, ports=(port,))
    applicant = Applicant("1", "gpu01", 100, 1, 2, Versions("1", "", "3.11"), "")
    membership = Membership(plan(nodes=nodes), SECRET, applicant, no_judge, clock)
    heard: list[Heard] = []
    try:
        while not any(isinstance(one, Seated) for one in heard):
            assert select.select([membership], [], [], 20.0)[0]
            heard += membership.read()
    finally:
        membership.close(1.0)
    lines = [one.lines[0] for one in heard if isinstance(one, Missing)]
    assert [line for line in lines if "clock" not in line] == []
    assert told in str(lines)
    assert bool(lines) is bool(told)


def test_a_name_without_an_answer_does_not_make_joining_longer() -> None:
    """The name server was asked for two seconds again and again, beside the time that was left."""
    nodes = Nodes(count=2, host="nobody.invalid", ports=(29400,), join_timeout=0.5, job="7")
    applicant = Applicant("a1", "gpu01", 100, 2, 2, Versions("1", "2", "3"), "digest")
    clock = Clock()
    membership = Membership(plan(nodes=nodes), SECRET, applicant, no_judge, clock)
    try:
        lost = _of_kind(membership, LeadLost)
    finally:
        membership.close(1.0)
    assert isinstance(lost, LeadLost)
    assert lost.problem is not None
    assert lost.problem.code == "join-timeout"


def test_another_lead_is_told_that_has_not_said_yet_who_it_is(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look ended for ever at a lead that had just begun, and both waited for the others."""
    job = endpoint.job_name(_nodes(count=2))
    with Server(secret=SECRET, job=job, local=False) as server:
        place = "127.0.0.1", int(server.address.rpartition(":")[2])
        monkeypatch.setattr(endpoint, "is_elsewhere", lambda nodes: True)
        monkeypatch.setattr(endpoint, "places", lambda nodes: [place])
        member = join(lambda failed: Sentence((), 1), count=2)
        with Member.join([place], SECRET, job=job, ttl=20.0, timeout=20.0) as store:
            until = time.monotonic() + 20.0
            while not store.status()["waiting"]:
                assert time.monotonic() < until, "nobody looks"
            other = Applicant("1", "gpu01", 1, 1, 2, Versions("1", "", "3.11"), "", node_rank=0)
            store.set(messages.LEADER, messages.encode(other))
            told = _of_kind(member, Refused)
    assert isinstance(told, Refused)
    assert told.code == "node-duplicate"
    assert "gpu01" in told.headline


def test_another_job_at_one_of_several_ports_is_passed_by(join: Join) -> None:
    """Other jobs have both ports: where nobody listens at one, a try takes as long as it may."""
    with (
        Server(secret=SECRET, job="other", local=False) as one,
        Server(secret=SECRET, job="a third", local=False) as another,
    ):
        at = tuple(int(server.address.rpartition(":")[2]) for server in (one, another))
        member = join(lambda failed: Sentence((), 1), count=2, rank=1, ports=at)
        heard, until = 0, time.monotonic() + 10 * BEFORE_NEXT_TRY
        while time.monotonic() < until:
            if select.select([member], [], [], BEFORE_NEXT_TRY)[0]:
                told = member.read()
                assert all(isinstance(one, NotReached) for one in told), told
                heard += len(told)
    assert heard > 1, "it does not ask again"
    assert heard <= 12, "it asks without a pause"


def test_jobs_without_a_name_are_told_apart_by_their_ports() -> None:
    one, two = (Nodes(count=2, ports=tuple(range(at, at + 8))) for at in (29501, 29502))
    assert endpoint.job_name(one) != endpoint.job_name(two)
    assert endpoint.job_name(Nodes(count=2, job="7")) == "7"


def test_a_key_file_that_differs_is_a_home_that_is_not_shared() -> None:
    """Each node has made a key of its own, and the user has named no file that could be copied."""
    with Server(secret=SECRET, job="7", local=False) as server:
        port = int(server.address.rpartition(":")[2])
        nodes = _nodes(count=2, rank=1, ports=(port,), secret_file=key_path(os.environ), job="7")
        problem = problem_of(nodes, b"of another home's key file")
    assert "home folder may not be shared" in str(problem.why)
