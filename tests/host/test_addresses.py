"""Which addresses others can reach, and what is wrong with names: judged from facts that are made
up, and looked at in real namespaces.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from rallypoint.host import addresses, processes, resolver, system_calls
from rallypoint.host.addresses import Host
from rallypoint.host.interfaces import Interface, InterfaceAddress, Kind, interfaces, scope
from rallypoint.host.resolver import Answer

DEADLINE = 30.0  # seconds for a process that looks; it takes a tenth of one

V4, V6 = InterfaceAddress("127.0.0.1", "host"), InterfaceAddress("::1", "host")


def interface(name: str, *ips: str, kind: Kind = "ethernet", up: bool = True) -> Interface:
    return Interface(name, kind, up, up, tuple(InterfaceAddress(ip, scope(ip)) for ip in ips))


LO = Interface("lo", "loopback", True, True, (V4, V6))
ETH0 = interface("eth0", "10.0.0.5")


def host(
    own: Sequence[str] = ("10.0.0.5",),
    *,
    found: Sequence[Interface] = (LO, ETH0),
    source: Mapping[int, str] | None = None,
    error: str = "",
    **answers: Answer,
) -> Host:
    """A healthy machine, or what is changed about it. `answers`: others, by name with `_`
    for `.`.
    """
    told = {
        "node07": Answer("node07", tuple(own), error, 2.0),
        "localhost": Answer("localhost", ("127.0.0.1",)),
    }
    told |= {answer.asked: answer for answer in answers.values()}
    return Host("node07", tuple(found), "", {4: "10.0.0.5"} if source is None else source, told)


def codes(facts: Host) -> list[str]:
    return [problem.code for problem in facts.problems()]


def test_a_healthy_machine_has_no_problems() -> None:
    facts = host(
        back=Answer("10.0.0.5", ("node07.cluster",)),
        forth=Answer("node07.cluster", ("10.0.0.5",)),
    )
    assert facts.problems() == ()
    assert facts.lines() == (
        "node07 is 10.0.0.5",
        "others may reach it at 10.0.0.5 (eth0, ethernet)",
    )
    assert codes(host(("127.0.1.1",), found=[LO], source={})) == [], (
        "a machine without a network has nobody to mislead"
    )


def test_a_name_that_stands_for_loopback() -> None:
    (problem,) = host(("127.0.1.1",)).problems()
    assert (problem.code, problem.grave) == ("address-loopback", False)
    assert (
        problem.sentence
        == "this machine's own name node07 stands for 127.0.1.1, where no other machine reaches it"
    )
    assert problem.why[:2] == ("127.0.1.1 is an address of lo", "others may reach it at 10.0.0.5")
    assert problem.help[0][1] == "10.0.0.5  node07"
    assert codes(host(("10.0.0.5", "127.0.1.1"))) == [], "the first address counts"


def test_a_name_that_stands_for_the_bridge_of_containers() -> None:
    docker = interface("docker0", "172.17.0.1", kind="bridge")
    facts = host(("172.17.0.1",), found=(LO, docker, ETH0))
    (problem,) = facts.problems()
    assert problem.why[0] == "172.17.0.1 is an address of docker0, a bridge to containers"
    assert [address.ip for _, address in facts.reachable()] == ["10.0.0.5"]
    hypervisor = host(found=(LO, interface("br0", "10.0.0.5", kind="bridge")))
    assert [address.ip for _, address in hypervisor.reachable()] == ["10.0.0.5"], (
        "the default route leaves by it"
    )


def test_a_name_without_an_address_and_a_resolver_that_is_silent() -> None:
    (unknown,) = host((), error="Name or service not known").problems()
    assert unknown.code == "address-unresolved"
    assert (
        unknown.sentence
        == "the resolver has no address for this machine's own name node07 (Name or service not known)"
    )
    assert unknown.help[0][1] == "echo '10.0.0.5  node07' >> /etc/hosts"
    (silent,) = host(()).problems()
    assert (
        silent.sentence
        == "the resolver gave no answer for this machine's own name node07 within 2.0 s"
    )


def test_a_name_that_belongs_to_another_machine() -> None:
    (problem,) = host(("10.0.0.99",)).problems()
    assert problem.code == "address-unavailable"
    assert (
        problem.sentence
        == "this machine's own name node07 stands for 10.0.0.99, which is not one of its addresses"
    )


def test_dns_that_goes_one_way() -> None:
    facts = host(
        back=Answer("10.0.0.5", ("old-name",)),
        forth=Answer("old-name", ("10.0.0.77",)),
    )
    (problem,) = facts.problems()
    assert (problem.code, problem.sentence) == (
        "address-one-way",
        "10.0.0.5 is called old-name, and old-name stands for 10.0.0.77",
    )
    (silent,) = host(back=Answer("10.0.0.5", took=2.0)).problems()
    assert (
        silent.sentence
        == "the resolver gave no answer within 2.0 s when it was asked for the name of 10.0.0.5"
    )
    assert codes(host(back=Answer("10.0.0.5", error="Unknown host"))) == [], (
        "no reverse DNS at all does no harm"
    )


def test_ipv6_that_is_half_there() -> None:
    no_six = Interface("lo", "loopback", True, True, (V4,))
    facts = host(found=(no_six, ETH0), localhost=Answer("localhost", ("::1", "127.0.0.1")))
    (problem,) = facts.problems()
    assert problem.code == "ipv6-half-configured"
    assert (
        problem.sentence
        == "localhost stands for ::1, before any other address, and this machine has no ::1: IPv6 is switched off"
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([ETH0], "there is no loopback interface"),
        ([interface("lo", kind="loopback", up=False), ETH0], "the loopback interface lo is down"),
        (
            [interface("lo", "::1", kind="loopback"), ETH0],
            "the loopback interface lo has no 127.0.0.1",
        ),
    ],
)
def test_loopback_that_cannot_be_used_is_grave(found: Sequence[Interface], sentence: str) -> None:
    problem = host(found=found).problems()[0]
    assert (problem.code, problem.grave, problem.sentence) == ("loopback-down", True, sentence)
    assert problem.help


def test_several_cards_a_vpn_and_a_container() -> None:
    cards = (
        LO,
        interface("eth0", "10.0.0.5"),
        interface("ib0", "10.1.0.5", kind="infiniband"),
        interface("tun0", "10.8.0.2", kind="tunnel"),
    )
    facts = host(found=cards)
    assert [where.name for where, _ in facts.reachable()] == ["eth0", "ib0", "tun0"], (
        "the default route's first, a tunnel last"
    )
    away = host(("10.8.0.2",), found=cards, source={4: "10.8.0.2"})
    assert away.lines()[-1] == "tun0 is a tunnel (VPN): only its other members reach 10.8.0.2"
    inside = host(
        ("172.17.0.2",),
        found=(LO, interface("eth0", "172.17.0.2", kind="container")),
        source={4: "172.17.0.2"},
    )
    assert inside.problems() == ()
    assert (
        inside.lines()[-1]
        == "eth0 leads out of a container: who reaches 172.17.0.2 is decided outside of it"
    )
    unplugged = Interface(
        "eth1", "ethernet", True, False, (InterfaceAddress("10.2.0.5", "global"),)
    )
    linked = interface("eth2", "fe80::1", "169.254.3.4")
    assert [where.name for where, _ in host(found=(LO, ETH0, unplugged, linked)).reachable()] == [
        "eth0"
    ]


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", "GLOO_SOCKET_IFNAME=ib0 names no interface of this machine"),
        (
            "GLOO_SOCKET_IFNAME",
            "eth0,ib0",
            "GLOO_SOCKET_IFNAME=eth0,ib0 names ib0, which is no interface of this machine",
        ),
        ("GLOO_SOCKET_IFNAME", "eth", "GLOO_SOCKET_IFNAME=eth names no interface of this machine"),
        (
            "NCCL_SOCKET_IFNAME",
            "ib,en",
            "NCCL_SOCKET_IFNAME=ib,en names no interface of this machine",
        ),
        (
            "NCCL_SOCKET_IFNAME",
            "=eth",
            "NCCL_SOCKET_IFNAME==eth names no interface of this machine",
        ),
        ("GLOO_SOCKET_IFNAME", "lo,eth0", ""),
        ("NCCL_SOCKET_IFNAME", "eth", ""),
        ("NCCL_SOCKET_IFNAME", "ib,eth", ""),
        ("NCCL_SOCKET_IFNAME", "^docker0", ""),
        ("NCCL_SOCKET_IFNAME", "", ""),
    ],
)
def test_variables_that_name_an_interface(variable: str, value: str, sentence: str) -> None:
    found = addresses.chosen({variable: value}, ["lo", "eth0"])
    assert [problem.sentence for problem in found] == ([sentence] if sentence else [])


# --- this machine
# --------------------------------------------------------------------------------------------------


def test_this_machine_is_looked_at_without_leaving_a_thread_or_a_process() -> None:
    threads, children = threading.enumerate(), psutil.Process().children()
    facts = addresses.look(DEADLINE)
    assert set(threading.enumerate()) <= set(threads)
    assert set(psutil.Process().children()) <= set(children)
    assert facts.name == socket.gethostname()
    assert any(one.kind == "loopback" for one in facts.interfaces)
    assert facts.answers["localhost"].found


def test_without_time_nobody_is_asked() -> None:
    facts = addresses.look(0.0)
    assert {answer.silent for answer in facts.answers.values()} == {True}
    assert facts.interfaces


def test_the_kernel_names_what_psutil_names() -> None:
    ours = {(one.name, address.ip) for one in interfaces() for address in one.addresses}
    theirs = {
        (name, entry.address.partition("%")[0])
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert ours == theirs


def test_names_that_no_resolver_needs_to_be_asked_for() -> None:
    answers = resolver.ask(
        ["127.0.0.1", "no-such-host.invalid", "a..b", "x" * 300, "nul\0"],
        ["127.0.0.1x"],
        timeout=DEADLINE,
    )
    assert answers["127.0.0.1"].found == ("127.0.0.1",)
    assert answers["no-such-host.invalid"].error
    assert {answers[name].error for name in ("a..b", "x" * 300)} == {
        "it cannot be the name of a host"
    }
    assert answers["nul\0"].error
    assert answers["127.0.0.1x"].error
    assert resolver.ask(timeout=0.0) == {}


def test_who_is_killed_while_he_asks_leaves_nobody_behind() -> None:
    """The process that asks waited for the name server on its own, half a minute long."""
    script = """
from rallypoint.host import resolver
resolver._PROGRAM = resolver._PROGRAM.replace("socket.getaddrinfo(", "__import__('time').sleep(1000) or socket.getaddrinfo(")
start = resolver._start
def told(questions):
    process = start(questions)
    print(process.pid, flush=True)
    return process
resolver._start = told
resolver.ask(["node08"], timeout=1000.0)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = system_calls.pidfd_open(int(process.stdout.readline()))
        try:
            process.kill()
            assert processes.wait_for_ends([child], DEADLINE)
        finally:
            processes.send(child, signal.SIGKILL)
            os.close(child)


def in_namespace(commands: str, script: str, folder: Path) -> str:
    """What a script prints in a network namespace of its own, with a host name and name service of
    its own.
    """
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    (folder / "resolv.conf").write_text("nameserver 192.0.2.77\n")
    setup = (
        f"set -e; hostname node07; mount --bind {folder}/hosts /etc/hosts; mount --bind {folder}/resolv.conf /etc/resolv.conf\n"
        f"{commands}\nexec {shlex.quote(sys.executable)} -c '{script}'"
    )
    done = subprocess.run(
        ["unshare", "-nmu", "bash", "-c", setup],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"[\d.]+ s\b", "1 s", done.stdout)  # a busy machine waits a little longer


SAY = "from rallypoint.host import addresses; h = addresses.look(1.0); print(*h.lines(), *(p.sentence for p in h.problems()), sep=chr(10))"


@pytest.mark.root
def test_a_namespace_without_loopback(tmp_path: Path) -> None:
    said = in_namespace("", SAY, tmp_path).splitlines()
    assert said[1] == "no address that another machine could reach"
    assert said[2] == "the loopback interface lo is down"


@pytest.mark.root
def test_a_bridge_a_pair_and_a_name_server_that_swallows_questions(tmp_path: Path) -> None:
    """The address of the name server belongs to nobody on the pair's network, and its neighbour
    entry is made up: packets are lost.
    """
    network = (
        "ip link set lo up; ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up\n"
        "ip link add eth0 type veth peer name far; ip address add 192.0.2.5/24 dev eth0; ip link set eth0 up; ip link set far up\n"
        "ip route add default via 192.0.2.1; ip neigh add 192.0.2.77 lladdr 02:00:00:00:00:77 dev eth0"
    )
    said = in_namespace(network, SAY, tmp_path).splitlines()
    assert said[:3] == [
        "node07: no answer within 1 s",
        "others may reach it at 192.0.2.5 (eth0, container)",
        "eth0 leads out of a container: who reaches 192.0.2.5 is decided outside of it",
    ]
    assert "the resolver gave no answer for this machine's own name node07 within 1 s" in said
    assert (
        "the resolver gave no answer within 1 s when it was asked for the name of 192.0.2.5" in said
    )


@pytest.mark.root
def test_a_name_to_listen_on_does_not_wait_for_ever(tmp_path: Path) -> None:
    network = (
        "ip link set lo up; ip link add eth0 type veth peer name far; ip address add 192.0.2.5/24 dev eth0; ip link set eth0 up\n"
        "ip link set far up; ip neigh add 192.0.2.77 lladdr 02:00:00:00:00:77 dev eth0"
    )
    script = (
        "from rallypoint.errors import EnvironmentProblem; from rallypoint.host import ports; ports.RESOLVE_TIMEOUT = 1.0\n"
        'try: ports.hold_port(host="node08")\nexcept EnvironmentProblem as error: print(error.code, error)'
    )
    assert in_namespace(network, script, tmp_path) == (
        "address-unresolved the host name node08 has no address: the resolver gave no answer within 1 s\n"
    )


# A name server of the smallest kind: one question, one answer (RFC 1035). "" is NXDOMAIN, None no
# answer at all.
NAME_SERVER = """
import ctypes, json, signal, socket, struct, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
zone = json.loads(sys.argv[1])
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("192.0.2.77", 53))
with open(sys.argv[2], "w") as ready:
    ready.write("ready")
def labels(name):
    return b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + bytes(1)
while True:
    packet, whom = server.recvfrom(512)
    parts, at = [], 12
    while packet[at]:
        parts.append(packet[at + 1 : at + 1 + packet[at]].decode())
        at += 1 + packet[at]
    kind, end = packet[at + 1 : at + 3], at + 5
    if kind not in (b"\\0\\x01", b"\\0\\x0c"):  # A and PTR; of others there is nothing
        found = []
    else:
        found = zone.get(".".join(parts), "")
        if found is None:
            continue
        found = [found] if found else []
    code = 0 if found or ".".join(parts) in zone else 3
    answer = packet[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(found), 0, 0) + packet[12:end]
    for one in found:
        data = socket.inet_aton(one) if kind == b"\\0\\x01" else labels(one)
        answer += b"\\xc0\\x0c" + kind + struct.pack(">HIH", 1, 60, len(data)) + data
    server.sendto(answer, whom)
"""

BACK = "5.2.0.192.in-addr.arpa"  # the question for the name of 192.0.2.5


@pytest.mark.root
@pytest.mark.parametrize(
    ("zone", "said"),
    [
        (
            {"node07": "192.0.2.5", BACK: "node07"},
            "[ok] names 192.0.2.5 is node07; the resolver answered within 1 s",
        ),
        (
            {"node07": "192.0.2.5"},
            "[ok] names 192.0.2.5 has no name (Unknown host); the resolver answered within 1 s",
        ),
        (
            {"node07": "192.0.2.5", BACK: "old.cluster"},
            "[!] names 192.0.2.5 is called old.cluster, and that name has no address (Name or service not known)",
        ),
        (
            {"node07": "192.0.2.5", BACK: "old.cluster", "old.cluster": "192.0.2.99"},
            "[!] names 192.0.2.5 is called old.cluster, and old.cluster stands for 192.0.2.99",
        ),
        (
            {"node07": "192.0.2.5", BACK: "old.cluster", "old.cluster": None},
            "[!] names 192.0.2.5 is called old.cluster, and the resolver gave no answer for that name within 1 s",
        ),
        (
            {"node07": "192.0.2.5", BACK: None},
            "[!] names the resolver gave no answer within 1 s when it was asked for the name of 192.0.2.5",
        ),
    ],
    ids=[
        "both-ways",
        "no-way-back",
        "no-way-forth",
        "another-way-forth",
        "silent-forth",
        "silent-back",
    ],
)
def test_a_name_server_that_answers_one_way(
    zone: Mapping[str, str | None], said: str, tmp_path: Path
) -> None:
    (tmp_path / "server.py").write_text(NAME_SERVER)
    commands = (
        "ip link set lo up; ip address add 192.0.2.77/32 dev lo; ip link add eth0 type veth peer name far\n"
        "ip address add 192.0.2.5/24 dev eth0; ip link set eth0 up; ip link set far up; ip route add default via 192.0.2.1\n"
        f"mkfifo {tmp_path}/ready\n"
        f"{shlex.quote(sys.executable)} {tmp_path}/server.py '{json.dumps(zone)}' {tmp_path}/ready > /dev/null 2>&1 &\n"
        f"read -r line < {tmp_path}/ready || true; test $line = ready"
    )
    shown = in_namespace(
        commands,
        'import sys; from rallypoint.cli.main import main; main(["doctor", "--only", "names"])',
        tmp_path,
    )
    assert " ".join(shown.split()).startswith(said), shown
