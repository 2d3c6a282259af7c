"""Joining: every node of a job finds the others, or is told by name why not."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ..python_path import WITHOUT_TORCH, python_path
from .conftest import MakeCluster
from .jobs import NO_SECRET, PORT, STAY, TELL, Jobs, codes, told
from .netns import LOCALHOST, Cluster, Process, wait_until


@pytest.fixture
def two(make_cluster: MakeCluster, tmp_path: Path) -> Jobs:
    return Jobs(make_cluster(2), tmp_path)


@pytest.fixture
def four(cluster: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(cluster, tmp_path)


def well(processes: list[Process]) -> list[dict[str, Any]]:
    """Wait for all to end well; return what the ranks told."""
    statuses = [one.wait() for one in processes]
    said = "\n".join(f"{one!r}\n{one.output()}" for one in processes)
    assert statuses == [0] * len(processes), said
    ranks = told(processes)
    assert [int(one["RANK"]) for one in ranks] == list(range(len(ranks))), said
    return ranks


def ended(process: Process, code: str, status: int = 2) -> None:
    assert process.wait() == status, process.output()
    assert codes(process) == [code], process.output()


# --- the world


def test_nodes_of_different_numbers_of_ranks_are_one_world(four: Jobs) -> None:
    nodes = zip(four.cluster.nodes, (1, 3, 2), strict=False)
    ranks = well(
        [
            four.start(node, TELL, "--node-rank", str(node.number), nnodes=3, ranks=count)
            for node, count in nodes
        ]
    )
    assert {one["WORLD_SIZE"] for one in ranks} == {"6"}
    assert [one["LOCAL_RANK"] for one in ranks] == ["0", "0", "1", "2", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in ranks] == ["1", "3", "3", "3", "2", "2"]
    assert [one["GROUP_RANK"] for one in ranks] == ["0", "1", "1", "1", "2", "2"]
    assert {one["GROUP_WORLD_SIZE"] for one in ranks} == {"3"}
    assert {one["MASTER_ADDR"] for one in ranks[1:]} == {four.cluster[0].address}
    assert len({one["MASTER_PORT"] for one in ranks}) == 1
    assert len({one["TORCHELASTIC_RUN_ID"] for one in ranks}) == 1
    assert {one["GLOO_SOCKET_IFNAME"] for one in ranks} == {"eth0"}


def test_static_command_lines_of_torchrun(two: Jobs) -> None:
    started = []
    for node in reversed(two.cluster.nodes):
        where = ["--node-rank", str(node.number), "--master-addr", two.cluster[0].address]
        started.append(two.start(node, where=[*where, "--master-port", "29500"]))
    ranks = well(started)
    assert [one["GROUP_RANK"] for one in ranks] == ["0", "1"]
    assert {one["MASTER_PORT"] for one in ranks} == {"29500"}
    for number, one in enumerate(reversed(started)):
        assert told([one])[0]["RANK"] == str(number)


def test_the_name_of_node_0_is_known_late_and_it_comes_last(two: Jobs) -> None:
    known = two.cluster.hosts()
    two.cluster[1].forget_names()
    first = two.start(two.cluster[1], TELL, "--node-rank", "1")
    with pytest.raises(TimeoutError):
        first.wait(2.0)  # nobody has the name
    assert first.output() == ""
    two.cluster[1].set_hosts(known)
    with pytest.raises(TimeoutError):
        first.wait(2.0)  # nobody listens there
    well([first, two.start(two.cluster[0], TELL, "--node-rank", "0")])


_ANSWERS_LATE = """
import socket, threading
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("is up", flush=True)
def answer(query, asker):
    number, end = query[17:18], query.index(0, 12) + 5  # nodeK
    known = query[13:17] == b"node" and query[end - 3] == 1  # an A record
    said = b"\\x85\\x80\\0\\1\\0" + bytes([known]) + bytes(4) + query[12:end]
    if known:
        said += b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\0\\0\\4" + bytes([10, 77, 0, int(number) + 1])
    server.sendto(query[:2] + said, asker)
while True:
    threading.Timer(3.0, answer, server.recvfrom(512)).start()
"""


def test_a_name_server_that_takes_3_s(two: Jobs) -> None:
    """Nobody led, and where a place was given the nodes lost each other: each new connection of a
    launcher asked for the name. Where the first of two name servers is off, each answer takes 5 s.
    """
    for node in two.cluster.nodes:
        node.set_hosts(LOCALHOST)
        node.set_resolver("nameserver 127.0.0.1\n")
        node.start([sys.executable, "-c", _ANSWERS_LATE]).wait_for("is up")
    well([two.start(node, TELL + "import time; time.sleep(4)\n") for node in two.cluster.nodes])
    for node in two.cluster.nodes:
        node.started[0].kill()


def test_nodes_of_ipv6_alone(make_cluster: MakeCluster, tmp_path: Path) -> None:
    jobs = Jobs(make_cluster(2, ipv6=True), tmp_path)
    ranks = well(jobs.start_all())
    assert ranks[1]["MASTER_ADDR"] == jobs.cluster[0].address


def test_node_0_of_ipv6_alone_does_not_find_its_own_name(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """A pod's name comes into the DNS after the pod has started: node 0 listened at 0.0.0.0."""
    jobs = Jobs(make_cluster(2, ipv6=True), tmp_path)
    jobs.cluster[0].forget_names()
    where = ["--rdzv-endpoint", jobs.endpoint, "--rdzv-backend", "c10d"]
    well(jobs.start_all(TELL, "--rdzv-conf", "join_timeout=20", where=where))


def test_a_folder_that_nodes_of_ipv6_alone_share(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The lead listened at 0.0.0.0, on IPv4 alone, and wrote addresses of IPv6 into the folder."""
    jobs = Jobs(make_cluster(2, ipv6=True), tmp_path)
    well(jobs.start_all(where=["--rdzv-endpoint", f"file://{tmp_path}/meeting"]))


def test_every_node_calls_itself_loopback(two: Jobs) -> None:
    """Its own name is 127.0.1.1 there, as Debian's installer writes it; elsewhere it is right."""
    for node in two.cluster.nodes:
        node.call_itself_loopback()
    ranks = well(two.start_all())
    assert ranks[1]["MASTER_ADDR"] == two.cluster[0].address
    assert {one["GLOO_SOCKET_IFNAME"] for one in ranks} == {"eth0"}


def test_one_of_two_interfaces_is_dead(two: Jobs) -> None:
    """The name of node 0 has the address of the dead one, too, and first."""
    for node in two.cluster.nodes:
        node.add_dead_interface(f"10.99.0.{node.number + 1}/24")
        node.set_hosts("10.99.0.1 node0\n" + two.cluster.hosts())
    ranks = well(two.start_all())
    assert ranks[1]["MASTER_ADDR"] == two.cluster[0].address
    assert ranks[1]["GLOO_SOCKET_IFNAME"] == "eth0"


def test_nodes_without_names(two: Jobs) -> None:
    for node in two.cluster.nodes:
        node.forget_names()
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{two.cluster[0].address}:{PORT}"]
    well(two.start_all(where=where))


def test_a_home_and_a_folder_that_all_nodes_share(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """They meet in the folder, and keep their records apart in the home."""
    jobs = Jobs(make_cluster(2, shared_home=True), tmp_path)
    well(jobs.start_all(where=["--rdzv-endpoint", f"file://{tmp_path}/meeting"]))
    runs = jobs.cluster[0].home / ".local" / "state" / "rallypoint" / "runs"
    found = {path.parent.resolve().name for path in runs.glob("*/*/events.jsonl")}
    assert found == {"node0", "node1"}


def test_two_launchers_of_one_host_are_two_nodes(four: Jobs) -> None:
    node = four.cluster[0]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{PORT}"]
    ranks = well([four.start(node, nnodes=2, where=where) for _ in range(2)])
    assert {one["WORLD_SIZE"] for one in ranks} == {"2"}


# --- who is refused


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_secret(two: Jobs, number: int) -> None:
    one = two.start(two.cluster[number], secret=NO_SECRET)
    ended(one, "secret-missing")
    assert "--secret-file" in one.output()


def test_secrets_differ(two: Jobs) -> None:
    lead = two.start(two.cluster[0], STAY, "--rdzv-conf", "join_timeout=5")
    other = two.start(two.cluster[1], STAY, secret=two.make_secret("other"))
    ended(other, "wrong-secret")
    ended(lead, "join-timeout", 75)
    said = " ".join(lead.output().split())
    assert "refused: 10.77.0.2: it has another secret: it left after this side's proof" in said


def test_a_secret_that_is_too_short(two: Jobs) -> None:
    secret = two.write("short", "abc")
    secret.chmod(0o600)
    ended(two.start(two.cluster[1], secret=secret), "secret-too-short")


def test_a_secret_that_others_can_read(two: Jobs) -> None:
    one = two.start(two.cluster[1], secret=two.make_secret("open", 0o644))
    assert one.wait() != 0
    assert len(codes(one)) == 1
    assert "chmod" in one.output()


DIFFERS = """
import platform, rallypoint, rallypoint.launcher.torch_version as installed
{}
"""
"""What a node has at the start of Python; the versions are read from there."""

VERSIONS = {
    "rallypoint": "rallypoint.__version__ = '9.0.0'",
    "Python": "platform.python_version = lambda: '3.99.1'",
    "torch": "installed.torch_version = lambda: '2.99.0'",
}


DIFFERENT: list[dict[str, Any]] = [
    {"nnodes": 3},
    {"program": TELL + "print()\n"},
    {"arguments": ["--lr", "1"]},
]


def test_a_node_that_does_not_fit_is_refused_by_name(two: Jobs) -> None:
    """Of other versions, of another job, or a second node 0: the one that is not at --master-addr
    says so. The lead waits for node 1 all the while.
    """
    zero = ["--node-rank", "0", "--master-addr", "node0"]
    where = ["--node-rank", "1", "--master-addr", "node0"]
    lead, second = (two.start(node, where=zero) for node in two.cluster.nodes)
    others = {}
    for name, line in VERSIONS.items():
        folder = two.folder / name
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(DIFFERS.format(line))
        path = python_path(folder, WITHOUT_TORCH)
        others[name] = two.start(two.cluster[1], where=where, env={"PYTHONPATH": path})
    ended(second, "node-duplicate")
    assert "node0 and node1 were both started as node 0" in second.output()
    for name, one in others.items():
        ended(one, "node-skew")
        assert f"node1 has {name} " in one.output()
    for other in [two.start(two.cluster[1], where=where, **how) for how in DIFFERENT]:
        ended(other, "node-skew")
        assert two.cluster[1].name in other.output()
    well([lead, two.start(two.cluster[1], where=where)])


def test_one_place_is_asked_for_twice(four: Jobs) -> None:
    lead = four.start(four.cluster[0], STAY, "--node-rank", "0", nnodes=3)
    first = four.start(four.cluster[1], STAY, "--node-rank", "1", nnodes=3)
    connected = f":{PORT:04X} 01 "  # to the lead, in the kernel's words
    assert wait_until(lambda: connected in four.cluster[1].run(["cat", "/proc/net/tcp"])[1], 30)
    second = four.start(four.cluster[2], STAY, "--node-rank", "1", nnodes=3)
    ended(second, "node-duplicate")
    assert "node1" in second.output()
    assert "node2" in second.output()
    lead.send(signal.SIGINT)
    assert lead.wait() == 130
    assert first.wait() != 0


def test_two_jobs_at_ports_that_are_neighbours(two: Jobs) -> None:
    """Each takes a port behind its --master-port, which must not be the other one's own."""
    jobs = []
    for port in ("29500", "29501"):
        where = ["--master-addr", "node0", "--master-port", port]
        nodes = two.cluster.nodes
        stay = two.folder / "stay"
        program = TELL + f"import os, time\nwhile os.path.exists('{stay}'): time.sleep(0.01)"
        stay.touch()
        jobs.append(
            [two.start(n, program, "--node-rank", str(n.number), where=where) for n in nodes]
        )
        for one in jobs[-1]:
            one.wait_for("env ")
    stay.unlink()
    for started in jobs:
        well(started)


def test_a_place_that_the_job_does_not_have(two: Jobs) -> None:
    one = two.start(two.cluster[1], STAY, "--node-rank", "2")
    assert one.wait() == 2
    assert len(codes(one)) == 1


def test_a_node_too_many_and_one_of_another_job(four: Jobs) -> None:
    """Two run; the others are refused, one of them by the name of its job."""
    one = [four.start(node, STAY, "--rdzv-id", "one", nnodes=2) for node in four.cluster.nodes[:2]]
    for process in one:
        process.wait_for("env ")
    three = four.start(four.cluster[2], STAY, "--rdzv-id", "one", nnodes=2)
    two = four.start(four.cluster[3], STAY, "--rdzv-id", "two", nnodes=2)
    ended(three, "job-complete")
    assert two.wait() != 0
    assert codes(two) == ["wrong-job"]
    assert "one" in two.output()
    one[1].send(signal.SIGINT)
    for process in one:
        assert process.wait() == 130


@pytest.mark.parametrize(
    "options",
    [
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", "node0:2379"],
        ["--standalone"],
    ],
    ids=["etcd", "standalone"],
)
def test_options_that_do_not_fit(two: Jobs, options: list[str]) -> None:
    one = two.start(two.cluster[0], where=options)
    assert one.wait() == 2
    assert len(codes(one)) == 1


# --- who does not come


def test_a_lead_that_does_not_come(two: Jobs) -> None:
    one = two.start(two.cluster[1], TELL, "--rdzv-conf", "join_timeout=3")
    ended(one, "join-timeout", 75)
    assert "node0" in one.output()


def test_an_endpoint_that_nobody_has(two: Jobs) -> None:
    """Neither the node with this name nor another one leads there."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.99:{PORT}"]
    one = two.start(two.cluster[0], TELL, "--rdzv-conf", "join_timeout=3", where=where)
    ended(one, "join-timeout", 75)
    assert "10.77.0.99" in one.output()


def test_node_0_has_too_few_ports(two: Jobs) -> None:
    """One for the ranks, and none for the job's store."""
    options = ["--port-range", "29510-29510", "--rdzv-conf", "join_timeout=3"]
    ended(two.start(two.cluster[0], TELL, *options), "ports-exhausted", 1)


def test_a_node_has_no_port_to_connect_from(two: Jobs) -> None:
    node = two.cluster[1]
    hold = "import socket, time; s = socket.create_server(('', 40000)); print('ok'); time.sleep(60)"
    held = node.start([sys.executable, "-u", "-c", hold])
    held.wait_for("ok")
    range_of = "/proc/sys/net/ipv4/ip_local_port_range"
    assert node.run(["sh", "-c", f"echo 40000 40000 > {range_of}"])[0] == 0
    lead, other = two.start_all(TELL, "--rdzv-conf", "join_timeout=3")
    ended(other, "join-timeout", 75)
    assert "Cannot assign requested address" in " ".join(other.output().split())
    assert node.run(["sh", "-c", f"echo 32768 60999 > {range_of}"])[0] == 0
    held.kill()
    ended(lead, "join-timeout", 75)


def test_no_address_of_node_0_is_reached_by_all(make_cluster: MakeCluster, tmp_path: Path) -> None:
    jobs = Jobs(make_cluster(3), tmp_path)
    zero, _, two = jobs.cluster.nodes
    zero.ip("addr add 10.78.0.1/24 dev eth0")
    two.ip("addr add 10.78.0.3/24 dev eth0", "addr del 10.77.0.3/24 dev eth0")
    two.set_hosts("10.78.0.1 node0\n127.0.0.1 localhost\n")
    for one in jobs.start_all():
        ended(one, "no-common-address")
        said = " ".join(one.output().split())
        assert "node1 (node 1): 10.77.0.1" in said
        assert "node2 (node 2): 10.78.0.1" in said


def test_a_name_that_is_never_known(two: Jobs) -> None:
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"nobody:{PORT}"]
    one = two.start(two.cluster[1], TELL, "--rdzv-conf", "join_timeout=3", where=where)
    ended(one, "join-timeout", 75)
    assert "nobody" in one.output()


def test_another_service_at_the_endpoint(two: Jobs) -> None:
    serve = [sys.executable, "-u", "-m", "http.server", str(PORT)]
    service = two.cluster[0].start(serve)
    service.wait_for("Serving")
    for one in two.start_all(TELL, "--rdzv-conf", "join_timeout=3"):
        assert one.wait() != 0
        [code] = codes(one)
        assert code in ("store-foreign", "port-in-use", "join-timeout"), one.output()
    service.kill()


def test_what_is_borne_while_others_are_waited_for(four: Jobs) -> None:
    """Ctrl-Z and `fg`, or a node that died: nothing has begun, so nothing is lost, and the place is
    free. A roll call names who has not come.
    """
    waiting = [four.start(node, nnodes=4) for node in four.cluster.nodes[:3]]
    tables = [Path(f"/proc/{one.node.pid}/net/tcp") for one in waiting]
    there = re.compile(f":{PORT:04X} 01 ")  # a connection to the lead
    assert wait_until(lambda: all(there.search(one.read_text()) for one in tables), 30)
    with pytest.raises(TimeoutError):
        waiting[0].wait(1.0)  # all have come by then
    for one in waiting[:2]:
        one.send(signal.SIGTSTP)
        with pytest.raises(TimeoutError):
            one.wait(4.0)  # twice what the others wait for a sign of life
        one.send(signal.SIGCONT)
        with pytest.raises(TimeoutError):
            one.wait(1.0)
    for one in waiting:
        one.wait_for("3 of 4", timeout=20)
    four.cluster[2].kill()
    with pytest.raises(TimeoutError):
        waiting[0].wait(2.0)  # the session of the dead one is over by then
    well([*waiting[:2], *(four.start(four.cluster[number], nnodes=4) for number in (3, 2))])


def test_ctrl_c_while_others_are_waited_for(two: Jobs) -> None:
    one = two.start(two.cluster[0])
    with pytest.raises(TimeoutError):
        one.wait(1.5)
    one.send(signal.SIGINT)
    assert one.wait() in (130, -signal.SIGINT)


def test_homes_that_cannot_be_written(four: Jobs) -> None:
    """The run folder of one node cannot be made, and the disk of another is full; they say so."""
    said_of = {1: ("ro", "Read-only file system"), 2: ("size=4k", "No space left on device")}
    nodes = four.cluster.nodes[:3]
    for number, (how, _) in said_of.items():
        home = nodes[number].home
        mounted, said = nodes[number].run(
            ["mount", "-t", "tmpfs", "-o", how, "none", str(home)], cwd=Path("/")
        )
        assert mounted == 0, said
        if how != "ro":
            filled, _ = nodes[number].run(["dd", "if=/dev/zero", f"of={home}/full"], cwd=Path("/"))
            assert filled != 0
    started = [four.start(node, TELL, "--node-rank", str(node.number), nnodes=3) for node in nodes]
    well(started)
    for number, (_, words) in said_of.items():
        assert re.search(f"no record of this run is kept: .*{words}", started[number].output())
        umounted = nodes[number].run(["umount", str(nodes[number].home)], cwd=Path("/"))
        assert umounted == (0, "")
    assert "no record" not in started[0].output()
