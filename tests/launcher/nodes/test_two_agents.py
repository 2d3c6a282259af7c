"""Jobs of several real agents on one machine, without torch."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.host import ports
from rallypoint.launcher.nodes import messages
from rallypoint.store.client.member import Member
from rallypoint.store.discovery import derived, secret_from_file

from ...warm_python import WarmPopen

pytestmark = pytest.mark.usefixtures("without_torch")

PATIENCE = 20.0
"""Seconds for what takes less than one on a machine that has nothing else to do."""


class Agent:
    """One `rallypoint run`, and what it has printed."""

    def __init__(self, folder: Path, *words: str, **more: str) -> None:
        command = [sys.executable, "-m", "rallypoint", "run", *words]
        self._process = WarmPopen(
            command,
            cwd=folder,
            env=os.environ | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.said = ""

    def await_line(self, pattern: str) -> None:
        """Return when something printed so far matches."""
        assert self._process.stdout is not None
        until = time.monotonic() + PATIENCE
        while not re.search(pattern, self.said):
            ready, _, _ = select.select([self._process.stdout], [], [], until - time.monotonic())
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"{pattern!r} was not said: {self.said}"
            self.said += data.decode()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Return the exit status and all that was printed."""
        try:
            rest, _ = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it goes on: {self.said}") from None
        self.said += rest.decode()
        return self._process.returncode, self.said

    def kill(self) -> None:
        """Kill it and all that it has started: the guard does the latter."""
        if self._process.poll() is None:
            self._process.kill()
        said, _ = self._process.communicate(timeout=PATIENCE)
        self.said += said.decode()


class Nodes:
    """Starter of agents of one job on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[Agent] = []
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text("c2VjcmV0IG9mIGEgdGVzdCwgbG9uZyBlbm91Z2g=\n")
        held = ports.hold_port(0, "127.0.0.1", (20000, 28999))  # the kernel gives nobody these
        self.port = held.port
        held.release()
        self._watcher: Member | None = None

    def start(self, program: str, *options: str, nodes: int = 2, **more: str) -> Agent:
        """Start another agent of the job, whose ranks run this program."""
        path = self.folder / "program.py"
        if not path.exists():
            path.write_text(program)
        agent = Agent(
            self.folder,
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--secret-file=secret",
            *options,
            str(path),
            **more,
        )
        self.agents.append(agent)
        return agent

    def await_applicants(self, count: int) -> list[messages.Applicant]:
        """Return the agents that wait for the others, when there are as many."""
        if self._watcher is None:
            secret = derived(secret_from_file(str(self.folder / "secret")), "coordination")
            at = [("127.0.0.1", self.port)]
            self._watcher = Member.join(at, secret, job="none", ttl=60.0, timeout=PATIENCE)
        until = time.monotonic() + PATIENCE
        changes = self._watcher.watch(messages.NODES, timeout=PATIENCE)
        while len(found := dict(self._watcher.items(messages.NODES))) != count:
            assert time.monotonic() < until
            next(changes)
        applicants = map(messages.decode, found.values())
        return [one for one in applicants if isinstance(one, messages.Applicant)]

    def close(self) -> None:
        """End all agents."""
        for agent in self.agents:
            agent.kill()
        if self._watcher is not None:
            self._watcher.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    started.close()


WAITS = """
import os, time
print("rank", os.environ["RANK"], "is up", flush=True)
time.sleep(60)
"""


def test_a_node_connects_from_its_local_address(nodes: Nodes) -> None:
    nodes.start("", nodes=3)
    nodes.await_applicants(1)
    nodes.start("", "--local-addr=127.0.0.5", nodes=3)
    applicants = nodes.await_applicants(2)
    assert {one.addresses for one in applicants} == {("127.0.0.1",), ("127.0.0.5",)}


def test_a_local_address_of_another_machine_is_refused_before_anything_starts(
    nodes: Nodes,
) -> None:
    status, said = nodes.start("", "--local-addr=192.0.2.1").end()
    assert status == 1
    assert "address-unavailable" in said


def test_a_notice_while_others_are_waited_for_is_handed_on(nodes: Nodes) -> None:
    program = """
import os, rallypoint, time
until = time.monotonic() + 30  # the other node's ranks may start before it hears of the notice
while not rallypoint.preempted() and time.monotonic() < until:
    time.sleep(0.01)
print("noticed", rallypoint.preempted(), "of", os.environ["WORLD_SIZE"], flush=True)
"""
    lead = nodes.start(program)
    nodes.await_applicants(1)
    lead.signal(signal.SIGUSR1)
    other = nodes.start(program)
    for agent in (lead, other):
        status, said = agent.end()
        assert status == 0
        assert "noticed True of 2" in said
        assert said.count("SIGUSR1 came") == 1


def test_a_notice_to_one_launcher_is_handed_to_the_ranks_of_all(nodes: Nodes) -> None:
    program = """
import os, signal, sys, time
def noticed(number, frame):
    print("rank", os.environ["RANK"], "was told", flush=True)
    sys.exit()
signal.signal(signal.SIGUSR1, noticed)
print("rank", os.environ["RANK"], "is up", flush=True)
time.sleep(60)
"""
    agents = [nodes.start(program), nodes.start(program)]
    for agent in agents:
        agent.await_line(r"rank \d is up")
    agents[1].signal(signal.SIGUSR1)
    for agent in agents:
        status, said = agent.end()
        assert status == 0, said
        assert len(re.findall(r"rank \d was told", said)) == 1
        assert said.count("SIGUSR1 came") == 1


def test_a_lead_that_is_stopped_while_it_waits_sends_the_others_home(nodes: Nodes) -> None:
    """Ctrl-Z suspends it; it goes on with a Ctrl-C."""
    lead = nodes.start(WAITS, nodes=3)
    nodes.await_applicants(1)
    other = nodes.start(WAITS, nodes=3)
    nodes.await_applicants(2)
    began = time.monotonic()
    lead.signal(signal.SIGTSTP)
    os.waitid(os.P_PID, lead.pid, os.WSTOPPED)
    lead.signal(signal.SIGINT)
    lead.signal(signal.SIGCONT)
    assert lead.end()[0] == 128 + signal.SIGINT
    status, said = other.end()
    assert status == 75
    assert "node 0 has left the job" in said
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("leads", [True, False])
def test_a_template_that_dies_while_others_are_waited_for_ends_its_node_alone(
    nodes: Nodes, leads: bool
) -> None:
    lead = nodes.start(WAITS, nodes=3)
    nodes.await_applicants(1)
    other = nodes.start(WAITS, nodes=3)
    nodes.await_applicants(2)
    victim = lead if leads else other
    children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
    template = int(children[-1])
    os.kill(template, signal.SIGKILL)
    status, said = victim.end()
    assert status == 128 + signal.SIGKILL
    assert "launcher-died" in said
    if leads:
        assert other.end()[0] == 75
    else:
        nodes.await_applicants(1)


def test_a_launcher_that_comes_while_the_job_ends_is_to_be_started_again(nodes: Nodes) -> None:
    program = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: print("saves", flush=True))
print("rank", os.environ["RANK"], "is up", flush=True)
while True:
    time.sleep(60)
"""
    lead, other = nodes.start(program), nodes.start(program)
    for agent in (lead, other):
        agent.await_line(r"rank \d is up")
    os.kill(other.pid if "rank 1" in other.said else lead.pid, signal.SIGKILL)
    left = lead if "rank 0" in lead.said else other
    left.await_line("saves")
    status, said = nodes.start(program).end()
    assert (status, "job-complete" in said) == (75, True), said


def test_a_lost_node_of_the_leads_own_machine_is_not_taken_for_a_host_that_is_off(
    nodes: Nodes,
) -> None:
    """The lead looks at the node's host, which is its own here, and must not find itself there: its
    store would wait for a client's first words, longer than the report waits for the look.
    """
    program = """
import os, socket
end = socket.socket(socket.AF_UNIX)
if os.environ["RANK"] == "1":
    end.bind("peer")
    end.listen()
    print("rank 1 is up", flush=True)
    end.accept()[0].recv(1)
while end.connect_ex("peer"):
    pass
print("rank 0 is up", flush=True)
end.recv(1)
raise RuntimeError("Connection closed. This is typically caused by a remote worker crashing.")
"""
    agents = nodes.start(program), nodes.start(program)
    for agent in agents:
        agent.await_line(r"rank \d is up")
    lead, other = sorted(agents, key=lambda agent: "rank 1" in agent.said)
    os.kill(other.pid, signal.SIGKILL)
    status, said = lead.end()
    assert status == 75
    assert "the host is up, its launcher is gone" in " ".join(said.split())


def test_a_failure_that_no_lead_has_judged_stands_beside_the_loss_of_the_lead(
    nodes: Nodes,
) -> None:
    """The exception of its own rank was not told on the node that had lost the lead."""
    program = """
import os, time
print("rank", os.environ["RANK"], "is up", flush=True)
while os.environ["RANK"] != "1" or not os.path.exists("now"):
    time.sleep(0.01)
raise ValueError("the batch is bad")
"""
    agents = nodes.start(program), nodes.start(program)
    for agent in agents:
        agent.await_line(r"rank \d is up")
    lead, other = sorted(agents, key=lambda agent: "rank 1" in agent.said)
    lead.signal(signal.SIGSTOP)
    (nodes.folder / "now").touch()
    status, said = other.end()
    assert (status, re.findall(r"^error\[(.*?)\]", said, re.MULTILINE)) == (
        75,
        ["lead-lost", "rank-raised"],
    ), said
    lead.signal(signal.SIGCONT)
