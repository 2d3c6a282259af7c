"""The ground itself: nodes are apart, each fault does what it says, and nothing stays behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from .conftest import MakeCluster
from .netns import Cluster, Node, NodesUnavailable, wait_until

SILENT = 0.05
"""Seconds without an answer after which a packet counts as lost; one needs 0.1 ms."""

SLEEP = ["sleep", "600"]


class Echo:
    """A UDP socket of each node, by which the test sends packets from one to another."""

    def __init__(self, cluster: Cluster) -> None:
        self.family = socket.AF_INET6 if cluster.ipv6 else socket.AF_INET
        self.sockets: dict[Node, socket.socket] = {}
        for node in cluster.nodes:
            with node.entered():
                self.sockets[node] = one = socket.socket(self.family, socket.SOCK_DGRAM)
            one.bind((node.address, 7))

    def arrives(self, source: Node, target: Node, timeout: float = 5.0) -> bool:
        """Return whether one packet comes from a node to another."""
        what = os.urandom(8)
        self.sockets[target].settimeout(timeout)
        try:
            self.sockets[source].sendto(what, (target.address, 7))
            while self.sockets[target].recv(64) != what:
                pass  # one that waited in a queue since an earlier fault
        except OSError:
            return False
        return True

    def is_lost(self, source: Node, target: Node) -> bool:
        """Return whether a packet has not come when it should have been there for long."""
        return not self.arrives(source, target, SILENT)

    def close(self) -> None:
        for one in self.sockets.values():
            one.close()


@contextmanager
def echo_of(cluster: Cluster) -> Iterator[Echo]:
    with closing(Echo(cluster)) as made:
        yield made


@pytest.fixture
def echo(cluster: Cluster) -> Iterator[Echo]:
    with echo_of(cluster) as made:
        yield made


def links() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def all_arrive(echo: Echo, cluster: Cluster) -> bool:
    return all(
        echo.arrives(one, other) for one in cluster.nodes for other in cluster.nodes if one != other
    )


# --- what a node is


def test_every_node_reaches_every_other(cluster: Cluster, echo: Echo) -> None:
    assert all_arrive(echo, cluster)


def test_nodes_of_ipv6_alone(make_cluster: MakeCluster) -> None:
    made = make_cluster(2, ipv6=True)
    with echo_of(made) as echo:
        assert all_arrive(echo, made)
    with made[0].entered(), pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("10.77.0.2", 7), timeout=1)


def test_a_node_has_its_own_name_address_files_and_home(cluster: Cluster) -> None:
    script = (
        "hostname; cat /etc/hosts; echo $HOME; cat /proc/sys/kernel/random/boot_id; ls /dev/shm"
    )
    said = [node.run(["bash", "-c", script]) for node in cluster.nodes[:2]]
    assert [status for status, _ in said] == [0, 0]
    first, second = (text.splitlines() for _, text in said)
    assert (first[0], second[0]) == ("node0", "node1")
    assert first[1:7] == second[1:7] == cluster.hosts().splitlines()
    assert first[7:9] != second[7:9]
    assert len(first) == 9  # nothing lies in /dev/shm
    assert socket.gethostname() not in ("node0", "node1")


def test_nodes_may_share_a_home(make_cluster: MakeCluster) -> None:
    made = make_cluster(2, shared_home=True)
    assert made[0].run(["sh", "-c", "echo hello > ~/file"]) == (0, "")
    assert made[1].run(["cat", "file"]) == (0, "hello\n")


def test_a_node_sees_the_machines_cgroups(cluster: Cluster) -> None:
    status, said = cluster[0].run(["ls", "/sys/fs/cgroup"])
    assert status == 0
    assert said.split() == sorted(os.listdir("/sys/fs/cgroup"))


def test_names_are_found_by_the_files_of_the_node(cluster: Cluster) -> None:
    ask = ["getent", "ahostsv4"]
    assert cluster[0].run([*ask, "node3"])[1].split()[0] == "10.77.0.4"
    cluster[0].forget_names()
    assert cluster[0].run([*ask, "node3"]) == (2, "")
    cluster[1].call_itself_loopback()
    assert cluster[1].run([*ask, "node1"])[1].split()[0] == "127.0.1.1"
    assert cluster[1].run([*ask, "node0"])[1].split()[0] == "10.77.0.1"


def test_a_thread_enters_a_node_and_comes_back(cluster: Cluster) -> None:
    outside = socket.gethostname()
    with cluster[2].entered():
        assert socket.gethostname() == "node2"
        server = socket.create_server((cluster[2].address, 0))
    assert socket.gethostname() == outside
    with server, cluster[0].entered():
        socket.create_connection(server.getsockname(), timeout=5).close()


def test_output_and_status_of_a_process(cluster: Cluster) -> None:
    one = cluster[0].start(["bash", "-c", "echo ready; exec sleep 600"])
    one.wait_for("^ready$")
    with pytest.raises(TimeoutError, match="ready"):
        one.wait(0.01)
    assert one.running()
    assert one.kill() == -9
    two = cluster[0].start(["bash", "-c", "echo $WORD >&2; exit 3"], env={"WORD": "said"})
    assert two.wait() == 3
    assert two.output() == "said\n"
    with pytest.raises(TimeoutError, match="did not print"):
        two.wait_for("nothing")


# --- faults


def test_a_link_that_is_down(cluster: Cluster, echo: Echo) -> None:
    carrier = ["ip", "-br", "link", "show", "eth0"]
    cluster[1].unplug()
    assert echo.is_lost(cluster[0], cluster[1])
    assert echo.is_lost(cluster[1], cluster[0])
    assert "NO-CARRIER" in cluster[1].run(carrier)[1]
    assert echo.arrives(cluster[0], cluster[2])
    cluster[1].plug()
    assert wait_until(lambda: all_arrive(echo, cluster), 10)


def test_packets_are_dropped_both_ways(cluster: Cluster, echo: Echo) -> None:
    cluster[1].drop()
    assert echo.is_lost(cluster[0], cluster[1])
    assert echo.is_lost(cluster[1], cluster[0])
    assert echo.arrives(cluster[2], cluster[3])
    cluster.heal()
    assert all_arrive(echo, cluster)


def test_packets_are_dropped_one_way(cluster: Cluster, echo: Echo) -> None:
    assert all_arrive(echo, cluster)  # each knows the other's hardware address
    cluster[1].drop(received=False)
    assert echo.is_lost(cluster[1], cluster[0])
    assert echo.arrives(cluster[0], cluster[1])


def test_two_nodes_do_not_reach_each_other_and_reach_the_others(
    cluster: Cluster, echo: Echo
) -> None:
    cluster[1].drop(peer=cluster[2])
    assert echo.is_lost(cluster[1], cluster[2])
    assert echo.is_lost(cluster[2], cluster[1])
    for other in (cluster[0], cluster[3]):
        assert echo.arrives(other, cluster[1])
        assert echo.arrives(other, cluster[2])


def test_a_share_of_the_packets_is_lost(cluster: Cluster, echo: Echo) -> None:
    assert all_arrive(echo, cluster)
    cluster[1].drop(received=False, percent=20)
    here, there = echo.sockets[cluster[1]], echo.sockets[cluster[0]]
    arrived = 0
    for patience in (*[SILENT] * 4, 1.0):  # what is late in one round is counted in the next
        there.settimeout(patience)
        for _ in range(100):  # fewer than its buffer holds
            here.sendto(b"x", (cluster[0].address, 7))
        with suppress(TimeoutError):
            while there.recv(8):
                arrived += 1
    assert 350 < arrived < 450  # five standard deviations of 500 tries with 80 %


def test_a_slow_link(cluster: Cluster) -> None:
    with cluster[0].entered():
        server = socket.create_server((cluster[0].address, 0))

    def seconds(size: int) -> float:
        with cluster[1].entered():
            here = socket.create_connection(server.getsockname(), timeout=10)
        there, _ = server.accept()
        with here, there:
            began = time.monotonic()
            here.sendall(bytes(size))
            left = size
            while left:
                left -= len(there.recv(1 << 16))
            return time.monotonic() - began

    with server:
        cluster[1].limit_rate("8mbit")  # a megabyte a second
        assert seconds(50_000) > 0.03
        cluster[1].unlimit_rate()
        assert min(seconds(50_000) for _ in range(10)) < 0.03, "a busy machine is late now and then"


def test_an_interface_on_which_nobody_answers(cluster: Cluster, echo: Echo) -> None:
    cluster[1].add_dead_interface("10.99.0.2/24")
    with cluster[1].entered():
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with one:
        one.bind(("10.99.0.2", 7))
        one.settimeout(SILENT)
        one.sendto(b"x", ("10.99.0.1", 7))
        with pytest.raises(TimeoutError):
            one.recv(1)
    assert "UP" in cluster[1].run(["ip", "-br", "link", "show", "eth1"])[1]
    assert echo.arrives(cluster[0], cluster[1])


def test_a_node_is_frozen_and_goes_on(cluster: Cluster) -> None:
    count = "n=0; while :; do n=$((n+1)); echo $n; done"
    one = cluster[0].start(["bash", "-c", f"setsid bash -c '{count}' & {count}"])
    one.wait_for("^100$")
    cluster[0].freeze()
    before = one.output()
    assert len(cluster[0].processes()) == 2
    for pid in cluster[0].processes():
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    assert one.output() == before
    cluster[0].thaw()
    assert wait_until(lambda: len(one.output()) > len(before), 5)
    cluster[0].kill()


def test_every_process_of_a_node_is_killed_and_no_other(cluster: Cluster) -> None:
    family = "setsid sleep 600 & (sleep 600 & sleep 600) & echo ready; wait"
    one = cluster[0].start(["bash", "-c", family])
    other = cluster[1].start(SLEEP)
    one.wait_for("ready")
    cluster[0].kill()
    assert cluster[0].processes() == []
    assert one.wait() == -9
    assert other.running()
    other.kill()


def test_a_quota_of_processors(cluster: Cluster) -> None:
    try:
        cluster[0].limit_cpu(0.1)
    except NodesUnavailable as reason:
        pytest.skip(str(reason))
    busy = cluster[0].start(["bash", "-c", "while :; do :; done"])
    group = Path(f"/proc/{busy.pid}/cgroup")
    assert wait_until(lambda: "rallypoint-" in group.read_text(), 5)
    [line] = [one for one in group.read_text().splitlines() if "rallypoint-" in one]
    folder = Path("/sys/fs/cgroup/cpu") / line.rpartition("/")[2]
    assert wait_until(lambda: "nr_throttled 0\n" not in (folder / "cpu.stat").read_text(), 10)
    busy.kill()


# --- what stays behind


def test_a_process_that_the_test_leaves_is_named_and_ended(make_cluster: MakeCluster) -> None:
    made = make_cluster(2)
    one = made[1].start(SLEEP)
    two = made[1].start(["bash", "-c", "setsid sleep 601 & echo ready"])
    assert two.wait() == 0
    assert wait_until(lambda: any(line.endswith("sleep 601") for line in made.living()), 5)
    left = made.reset(patience=0.0)
    assert [line.partition(": pid ")[0] for line in left] == ["node1", "node1"]
    assert any(line.endswith("sleep 601") for line in left)
    assert one.wait() == -9
    assert made.living() == []


def test_a_reset_takes_back_every_fault(make_cluster: MakeCluster) -> None:
    made = make_cluster(2)
    with echo_of(made) as echo:
        made[0].drop()
        made[0].limit_rate("1mbit")
        made[0].add_dead_interface("10.99.0.1/24")
        made[1].unplug()
        made[1].forget_names()
        (made[0].home / "file").touch()
        made[0].kill()
        assert made.reset() == []
        assert all_arrive(echo, made)
    for node in made.nodes:
        assert node.run(["cat", "/etc/hosts"]) == (0, made.hosts())
        assert "eth1" not in node.run(["ip", "-br", "link"])[1]
        assert "tbf" not in node.run(["tc", "qdisc"], env={"PATH": "/usr/sbin:/sbin"})[1]
        assert os.listdir(node.home) == []


def test_a_closed_cluster_leaves_nothing(tmp_path: Path) -> None:
    before = links()
    with Cluster(4, tmp_path / "cluster") as made:
        one = made[0].start(["bash", "-c", "trap '' TERM HUP; setsid sleep 600 & sleep 600"])
        assert wait_until(lambda: len(made[0].processes()) == 3, 5)
        holders = [node.pid for node in made.nodes]
        assert links() == before
    assert one.wait() == -9
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)
    assert links() == before


def test_a_cluster_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from tests.nodes.netns import Cluster
made = Cluster(2, Path(sys.argv[1]))
print(*(node.pid for node in made.nodes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cluster")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    holders = done.stdout.split()
    assert len(holders) == 2
    assert wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in holders), 5)
