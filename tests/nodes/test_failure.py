"""Failures: every node that lives names the first cause wherever it was, in time, and is free."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..python_path import WITHOUT_TORCH, python_path
from .conftest import MakeCluster
from .jobs import STAY, TELL, Jobs, codes, told
from .netns import Cluster, Node, Process, wait_until

LATE = 20.0
"""Seconds that something may be later than promised on a busy machine."""

NODES = 3
"""The lead, a node that fails and one that sees it; each more costs every test a fifth."""

RANKS = 2


class Running:
    """A job of as many ranks on each node, all of which stand in the program. `count`: how many of
    the first nodes it has, all of them without.
    """

    def __init__(
        self,
        jobs: Jobs,
        program: str = STAY,
        *options: str,
        ranks: int = 1,
        count: int | None = None,
        **more: Any,
    ) -> None:
        self.jobs = jobs
        self.cluster = jobs.cluster
        self.each: list[Process] = jobs.start_all(
            program, *options, ranks=ranks, count=count, **more
        )
        for one in self.each:
            here = wait_until(lambda one=one: len(told([one])) == ranks, 30)  # type: ignore[misc]
            assert here, f"{one!r}\n{one.output()}"
        self.pids = {int(one["RANK"]): one["pid"] for one in told(self.each)}

    def others(self, number: int) -> list[Process]:
        return [one for one in self.each if one.node.number != number]


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(cluster, tmp_path)


def all_say(processes: list[Process], code: str, words: str, since: float, within: float) -> None:
    """Check that each ends in time with one report: its code, and words of its headline."""
    for one in processes:
        one.wait(within + 10)
        assert codes(one) == [code], f"{one!r}\n{one.output()}"
        headline = re.search(rf"\[{code}\]: (.*)", one.output())
        assert headline is not None
        assert re.search(words, headline[1]), f"{one!r}\n{one.output()}"
    took = time.monotonic() - since
    assert took < within + LATE, f"{took:.1f} s"


RAISES = (
    TELL
    + """
import time
name = os.environ["RANK"]
if name == "5":
    while not os.path.exists("FOLDER/now"):
        time.sleep(0.01)
    def train_step(): raise ValueError("the batch is bad")
    train_step()
time.sleep(600)
"""
)


# --- ranks


def test_a_rank_that_raises_or_is_killed_is_named_on_every_node(jobs: Jobs) -> None:
    """One raises in the first attempt, and another is killed in the second."""
    program = RAISES.replace("FOLDER", str(jobs.folder)).replace(
        'if name == "5"', 'if name + os.environ["TORCHELASTIC_RESTART_COUNT"] == "50"'
    )
    running = Running(jobs, program, "--max-restarts", "1", ranks=RANKS)
    jobs.write("now", "")
    for one in running.each:
        one.wait_for(r"^error\[rank-raised\]: .*rank 5\b.*ValueError: the batch is bad")
        here = wait_until(lambda one=one: len(told([one])) == 2 * RANKS, 30)  # type: ignore[misc]
        assert here, f"{one!r}\n{one.output()}"
        assert "node2" in one.output()  # where it was
        assert "train_step" in one.output()  # its traceback
    second = [one for one in told(running.each) if one["TORCHELASTIC_RESTART_COUNT"] == "1"]
    at = time.monotonic()
    os.kill(next(one["pid"] for one in second if one["RANK"] == "3"), signal.SIGKILL)
    assert {one.wait() for one in running.each} == {137}
    assert time.monotonic() - at < 1.0 + LATE
    for one in running.each:
        assert codes(one) == ["rank-raised", "rank-killed"], f"{one!r}\n{one.output()}"
        assert re.search(r"\[rank-killed\]: .*rank 3\b", one.output()), one.output()


TOGETHER = (
    TELL
    + """
import sys, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"FOLDER/{attempt}-{os.environ['RANK']}", "w").close()
while any(not os.path.exists(f"FOLDER/{attempt}-{rank}") for rank in range(6)): time.sleep(0.01)
"""
)
"""Program whose ranks go on when all have told their environment."""


def test_a_restart_is_one_of_all_nodes(jobs: Jobs) -> None:
    """A node whose ranks are done waits for the others, then and in any attempt."""
    program = (
        TOGETHER
        + """
if attempt == "0":
    if os.environ["RANK"] == "2": sys.exit(3)
    time.sleep(600)
while os.environ["RANK"] == "5" and not os.path.exists("FOLDER/now"): time.sleep(0.01)
"""
    )
    each = jobs.start_all(
        program.replace("FOLDER", str(jobs.folder)), "--max-restarts", "1", ranks=RANKS
    )
    for one in each:
        one.wait_for(r'^[^|\n]*"TORCHELASTIC_RESTART_COUNT": "1"')
    with pytest.raises(TimeoutError):
        each[0].wait(4.0)
    jobs.write("now", "")
    assert [one.wait() for one in each] == [0] * NODES
    for one in each:
        counts = [each["TORCHELASTIC_RESTART_COUNT"] for each in told([one])]
        assert sorted(counts) == ["0", "0", "1", "1"]


def test_a_rank_that_exits_gives_its_status_to_every_launcher(jobs: Jobs) -> None:
    """Restarts are counted once for the job, not by each agent on its own (pytorch #147064)."""
    program = (
        TOGETHER
        + """
if os.environ["RANK"] == str(3 + 2 * int(attempt)): sys.exit(41 + int(attempt))
time.sleep(600)
"""
    )
    each = jobs.start_all(
        program.replace("FOLDER", str(jobs.folder)), "--max-restarts", "1", ranks=RANKS
    )
    assert each[0].wait() == 42, each[0].output()
    assert {one.wait() for one in each} == {42}
    for one in each:
        counts = [each["TORCHELASTIC_RESTART_COUNT"] for each in told([one])]
        assert sorted(counts) == ["0", "0", "1", "1"]
        assert codes(one) == ["rank-exited", "rank-exited"], one.output()
        assert re.search(r"\[rank-exited\]: .*rank 5\b", one.output()), one.output()


def a_signal_stops_all(running: Running, number: int, how: signal.Signals) -> None:
    running.each[number].send(how)
    for one in running.each:
        assert one.wait(10) == 128 + how, one.output()
        assert codes(one) == ["interrupted"]
        assert f"the launcher on {running.each[number].node.name} got {how.name}" in one.output()


def test_a_signal_to_the_leads_launcher_stops_all(jobs: Jobs) -> None:
    a_signal_stops_all(Running(jobs, ranks=RANKS), 0, signal.SIGTERM)


# --- nodes


def test_a_killed_node_is_named_by_the_others(jobs: Jobs) -> None:
    running = Running(jobs)
    at = time.monotonic()
    jobs.cluster[2].kill()
    all_say(running.others(2), "node-lost", r"node 2\b", at, 1.5)
    assert {one.wait() for one in running.others(2)} == {75}


@pytest.mark.parametrize("how", ["launcher", "all"])
def test_a_killed_lead_is_named_by_the_others(jobs: Jobs, how: str) -> None:
    running = Running(jobs)
    at = time.monotonic()
    if how == "launcher":
        running.each[0].kill()
    else:
        jobs.cluster[0].kill()
    all_say(running.others(0), "lead-lost", r"node 0\b", at, 1.5)
    assert {one.wait() for one in running.others(0)} == {75}
    for one in running.others(0):
        assert re.search(rf"logs +{one.node.name}:/", one.output()), one.output()


def test_a_rank_that_raises_just_after_a_launcher_was_killed_is_not_told_as_earlier(
    jobs: Jobs,
) -> None:
    """The lead decides half a second after the connection's end, and rank 1 raises before that. Here
    it decides 0.9 s later, so that a busy machine's rank comes before.
    """
    program = RAISES.replace('"5"', '"1"').replace("FOLDER", str(jobs.folder))
    jobs.write("sitecustomize.py", "from rallypoint.store import limits\nlimits.ORPHAN = 1.4\n")
    running = Running(jobs, program, env={"PYTHONPATH": python_path(jobs.folder, WITHOUT_TORCH)})
    running.each[2].kill()
    time.sleep(0.5)  # the case itself
    jobs.write("now", "")
    for one in running.others(2):
        assert one.wait(LATE) == 75, one.output()
        assert codes(one) == ["node-lost", "rank-raised"], one.output()
        assert re.search(r"\[node-lost\]: .*node 2\b", one.output()), one.output()


# What members know of each kind of cut, of the lead's too, test_members shows.
CUTS: dict[str, Callable[[Node], None]] = {
    "link down": lambda node: node.unplug(),
    "dropped": lambda node: node.drop(),
    "sent packets dropped": lambda node: node.drop(received=False),
    "received packets dropped": lambda node: node.drop(sent=False),
}


@pytest.mark.parametrize("cut", ["link down", "received packets dropped"])
def test_a_node_that_is_cut_off_is_named_and_ends_by_itself(jobs: Jobs, cut: str) -> None:
    running = Running(jobs)
    at = time.monotonic()
    CUTS[cut](jobs.cluster[1])
    all_say(running.others(1), "node-lost", r"node 1\b", at, 3.0)
    all_say([running.each[1]], "node-isolated", r"node 1\b|node1|this node", at, 3.0)
    assert {one.wait() for one in running.each} == {75}


@pytest.mark.parametrize("cut", ["dropped", "sent packets dropped"])
def test_a_lead_that_is_cut_off_is_named_and_ends_by_itself(jobs: Jobs, cut: str) -> None:
    running = Running(jobs)
    at = time.monotonic()
    CUTS[cut](jobs.cluster[0])
    all_say(running.others(0), "lead-lost", r"node 0\b", at, 3.0)
    running.each[0].wait(10)
    assert codes(running.each[0]) in (["node-lost"], ["node-isolated"]), running.each[0].output()


def test_a_link_that_was_down_for_a_moment_is_no_death_of_a_launcher(jobs: Jobs) -> None:
    """Node 1 said for certain that the lead's launcher was gone, which had only heard nothing of
    this node: all hosts answer again when they are looked at.
    """
    running = Running(jobs, count=2)
    jobs.cluster[1].unplug()
    time.sleep(1.5)  # TCP is heard again after the lease of 2 s
    jobs.cluster[1].plug()
    assert {one.wait(LATE) for one in running.each} == {75}
    (found,) = re.findall(r"logs +node1:(.*)", running.each[1].output())
    (report,) = json.loads((Path(found) / "report.json").read_text())
    assert (report["code"], report["confidence"]) == ("lead-lost", "likely"), report


def test_a_node_that_is_cut_off_before_a_restart_ends_the_job_on_all(jobs: Jobs) -> None:
    """The lead ended with 75 and said nothing, the other node with the status of its exception."""
    program = RAISES.replace('"5"', '"1"').replace("FOLDER", str(jobs.folder))
    save = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: time.sleep(6) or exit())"
    running = Running(jobs, f"{save}\n{program}", "--max-restarts", "1", count=2)
    jobs.write("now", "")
    for one in running.each:
        one.wait_for(r"^error\[rank-raised\]")
    jobs.cluster[1].drop()
    assert [one.wait(LATE) for one in running.each] == [75, 75], running.each[1].output()
    said = r"^rallypoint: not started again: node 1 \(node1\) was lost"
    assert re.search(said, running.each[0].output(), re.MULTILINE), running.each[0].output()
    assert codes(running.each[1]) == ["rank-raised", "node-isolated"]


def test_a_node_that_stands_still_is_named_and_ends_when_it_goes_on(jobs: Jobs) -> None:
    running = Running(jobs, count=2)
    at = time.monotonic()
    jobs.cluster[1].freeze()
    all_say(running.others(1), "node-lost", r"node 1\b", at, 3.0)
    jobs.cluster[1].thaw()
    all_say([running.each[1]], "node-isolated", "", time.monotonic(), 2.0)
    assert "stood still" in running.each[1].output()


def test_a_lead_that_stands_still_is_named_and_ends_when_it_goes_on(jobs: Jobs) -> None:
    running = Running(jobs, count=2)
    at = time.monotonic()
    jobs.cluster[0].freeze()
    all_say(running.others(0), "lead-lost", r"node 0\b", at, 3.0)
    jobs.cluster[0].thaw()
    all_say([running.each[0]], "node-isolated", "", time.monotonic(), 2.0)
    assert "stood still" in running.each[0].output()


def test_a_signal_to_a_node_whose_lead_stands_still_is_named(jobs: Jobs) -> None:
    """No report comes from the lead: the launcher's own names the signal that it got."""
    running = Running(jobs, STAY, "--node-timeout", "20", count=2)
    jobs.cluster[0].freeze()
    running.each[1].send(signal.SIGTERM)
    running.each[1].wait_for(r"^stopped\[interrupted\]: .*SIGTERM", 15)
    running.each[1].send(signal.SIGTERM)
    jobs.cluster[0].kill()
    assert running.each[1].wait() == 143
    assert "cause is not known" not in running.each[1].output()


def test_a_short_break_of_a_link_is_borne_and_a_signal_to_a_node_then_stops_all(jobs: Jobs) -> None:
    running = Running(jobs, ranks=RANKS)
    for node in jobs.cluster.nodes[:2]:
        node.unplug()
        time.sleep(0.4)  # a fifth of a lease
        node.plug()
    time.sleep(3.0)  # a lease, and what a loss takes to be told
    assert all(one.running() for one in running.each), [one.output() for one in running.each]
    a_signal_stops_all(running, 2, signal.SIGINT)


def test_a_rank_that_raised_before_its_node_died_is_the_cause(jobs: Jobs) -> None:
    """The node is killed as soon as another one has begun to judge."""
    program = RAISES.replace('"5"', '"1"').replace("FOLDER", str(jobs.folder))
    running = Running(jobs, program, count=2)
    jobs.write("now", "")
    running.each[0].wait_for(r"^error\[", timeout=10)
    jobs.cluster[1].kill()
    (lead,) = running.others(1)
    lead.wait(10)
    assert codes(lead)[0] == "rank-raised", lead.output()


# --- with torch

REDUCES = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert int(total) == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {int(total)}", flush=True)
while os.path.exists("FOLDER/loop"): dist.all_reduce(total)
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.usefixtures("torch_in_parts")
def test_torchruns_static_command_lines_of_two_nodes(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    jobs = Jobs(make_cluster(2), tmp_path)
    jobs.torch = True
    started = []
    for node in jobs.cluster.nodes:
        where = ["--node-rank", str(node.number), "--master-addr", "node0"]
        where += ["--master-port", "1234"]
        program = REDUCES.replace("FOLDER", str(tmp_path))
        started.append(jobs.start(node, program, ranks=2, where=where))
    for one in started:
        assert one.wait(60) == 0, one.output()
    said = "".join(one.output() for one in started)
    assert sorted(re.findall(r"rank (\d) of 4: 4$", said, re.MULTILINE)) == ["0", "1", "2", "3"]


@pytest.mark.torch
@pytest.mark.usefixtures("torch_in_parts")
def test_ranks_that_lost_a_peer_on_another_node_are_not_at_fault(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Their connection breaks, and they raise; the rank that was killed is the cause. The nodes met
    by torchrun's own command lines of c10d.
    """
    jobs = Jobs(make_cluster(2), tmp_path)
    jobs.torch = True
    loop = jobs.write("loop", "")
    program = TELL + REDUCES.replace("FOLDER", str(tmp_path))
    where = ["--rdzv-id", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400"]
    started = [jobs.start(node, program, ranks=2, where=where) for node in jobs.cluster.nodes]
    for one in started:
        one.wait_for(r"of 4: 4\n(.*\n)*.*of 4: 4$", timeout=60)  # both ranks of the node
    said = "".join(one.output() for one in started)
    assert sorted(re.findall(r"rank (\d) of 4: 4$", said, re.MULTILINE)) == ["0", "1", "2", "3"]
    pids = {int(one["RANK"]): one["pid"] for one in told(started)}
    os.kill(pids[3], signal.SIGKILL)
    for one in started:
        one.wait(30)
        assert codes(one) == ["rank-killed"], one.output()
        assert re.search(r"rank-killed\]: rank 3\b", one.output()), one.output()
    loop.unlink()


@pytest.mark.parametrize("way", ["iifname", "oifname"])
def test_a_network_that_drops_large_packets_hides_no_cause(
    make_cluster: MakeCluster, tmp_path: Path, way: str
) -> None:
    """Behind a tunnel: what a node said of its failure, more than one packet takes, never came, and
    the lead was told as lost, or the cause as unknown."""
    jobs = Jobs(make_cluster(2), tmp_path)
    for node in jobs.cluster.nodes:
        node.ip("link set dev eth0 gso_max_segs 1")  # each packet is as large as on a wire
    program = RAISES.replace("the batch is bad", "the batch is bad" + " and long" * 1000)
    running = Running(jobs, program.replace('"5"', '"1"').replace("FOLDER", str(tmp_path)))
    jobs.cluster.drops.append(f'{way} "{jobs.cluster[1].port}" meta length > 1400 drop')
    jobs.cluster.filter()
    at = time.monotonic()
    jobs.write("now", "")
    all_say(running.each, "rank-raised", "rank 1 on node1 raised ValueError", at, 10)
    assert {one.wait() for one in running.each} == {1}
