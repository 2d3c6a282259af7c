"""`rallypoint doctor` on machines that are really so: a loopback that is down, few files, a small
/dev/shm, no torch, no /proc; and between two machines, which are network namespaces with a cable
between them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rallypoint.diagnosis.doctor import peer_check
from rallypoint.diagnosis.doctor.peer_check import (
    PeerConversation,
    PeerHello,
    PeerStep,
    this_side,
)

DOCTOR = (sys.executable, "-P", "-m", "rallypoint", "doctor")
DEADLINE = 100.0  # seconds; the job alone takes 3 on a machine that does nothing else


def examined(
    *arguments: str, before: Sequence[str] = (), env: dict[str, str] | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and findings of a doctor."""
    done = subprocess.run(
        [*before, *DOCTOR, "--error-format", "json", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.stderr == ""
    *findings, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last["exit_status"] == done.returncode
    return done.returncode, findings


def within(setup: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """A doctor in namespaces of its own for network and mounts, after `setup`."""
    return examined(
        *arguments, before=["unshare", "-nm", "bash", "-c", f'set -e; {setup}; exec "$@"', "bash"]
    )


# --- this machine
# --------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_the_trial_job_is_a_real_one_and_leaves_nothing(tmp_path: Path) -> None:
    status, (job,) = examined(
        "--only", "job", env={"DOCTOR_TEST": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    )
    assert (status, job["mark"], job["code"]) == (0, "ok", ""), job
    assert re.fullmatch(
        r"2 ranks over gloo: all_reduce of one number takes .*, of 16\.0 MiB .* GB/s\); the job took .* s",
        job["fact"],
    )
    _until(lambda: not _marked(f"DOCTOR_TEST={tmp_path}"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.torch
def test_the_report_of_a_job_that_fails_is_the_doctor_s() -> None:
    """An interface that is not there: gloo says so in every rank."""
    status, (job,) = examined("--only", "job", env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert (status, job["mark"]) == (1, "fault")
    assert job["fact"].startswith("2 ranks over gloo ")
    assert job["code"]
    assert "nosuch0" in json.dumps(job)


def test_few_files() -> None:
    status, (found,) = examined("--only", "limits", before=["prlimit", "--nofile=64:64"])
    assert (status, found["mark"], found["code"]) == (1, "fault", "limit-low")
    assert found["fact"] == "a process may have 64 files open"


@pytest.mark.root
def test_a_loopback_that_is_down_and_the_job_that_needs_it() -> None:
    status, (loopback, job) = within("true", "--only", "loopback,job")
    assert (status, loopback["mark"], loopback["code"]) == (1, "fault", "loopback-down")
    assert loopback["help"] == [
        {"sentence": "switch it on, as root", "command": "ip link set lo up"}
    ]
    assert (job["mark"], job["fact"]) == (
        "note",
        "left out: it needs what loopback has found broken",
    )


@pytest.mark.root
def test_a_small_dev_shm() -> None:
    status, (found,) = within("mount -t tmpfs -o size=4m tmpfs /dev/shm", "--only", "shm")
    assert (status, found["mark"], found["code"]) == (1, "fault", "shm-small")
    assert found["fact"] == "/dev/shm has 4.0 MiB, 4.0 MiB of it free"


@pytest.mark.root
def test_a_full_disk_and_one_that_is_read_only(tmp_path: Path) -> None:
    place = shlex.quote(str(tmp_path))
    full = f"mount -t tmpfs -o size=64k tmpfs {place}; dd if=/dev/zero of={place}/x bs=64k count=2 2>/dev/null || true"
    for setup, problem in (
        (full, "No space left on device"),
        (f"mount -t tmpfs -o ro tmpfs {place}", "Read-only file system"),
    ):
        status, found = examined(
            "--only",
            "folders",
            env={"XDG_STATE_HOME": str(tmp_path)},
            before=["unshare", "-m", "bash", "-c", f'{setup}; exec "$@"', "bash"],
        )
        assert (status, found[0]["mark"], found[0]["code"]) == (0, "note", "run-folder-unwritable")
        assert problem in found[0]["fact"]


@pytest.mark.root
def test_without_proc_every_check_still_has_its_line() -> None:
    _, found = within("mount -t tmpfs tmpfs /proc", "--skip", "job")
    assert [
        one["check"] for one in found if one["code"] in ("internal-error", "check-overrun")
    ] == []
    assert {"memory", "limits", "ports", "clock", "devices"} <= {one["check"] for one in found}


def test_without_torch(tmp_path: Path) -> None:
    """An interpreter that finds rallypoint and what it needs, and nothing else."""
    for module in ("rallypoint", "msgspec", "psutil", "cloudpickle"):
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin
        (tmp_path / module).symlink_to(Path(spec.origin).parent)
    program = f"import sys; sys.path.append({str(tmp_path)!r}); from rallypoint.__main__ import main; sys.exit(main())"
    arguments = ["doctor", "--error-format", "json", "--only", "versions,job"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    versions, job, _ = [json.loads(line) for line in done.stdout.splitlines()]
    assert (
        (versions["mark"], versions["code"])
        == (job["mark"], job["code"])
        == ("note", "torch-missing")
    )
    assert "torch is not installed in" in versions["fact"]
    assert (job["fact"], job["help"][0]["command"]) == (
        "left out: there is no torch, which its ranks import",
        f"{shlex.quote(sys.executable)} -m pip install torch",
    )


@pytest.mark.torch
def test_ctrl_c_in_the_job_leaves_nothing(tmp_path: Path) -> None:
    marker = f"DOCTOR_TEST={tmp_path}"
    environ = {**os.environ, "DOCTOR_TEST": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    command = [*DOCTOR, "--only", "loopback,job"]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as doctor:
        assert doctor.stdout is not None
        assert doctor.stdout.readline().startswith("[ok] loopback")
        _until(lambda: len(_marked(marker)) >= 4)  # the doctor, the check, the agent, its template
        os.kill(doctor.pid, signal.SIGINT)
        assert doctor.wait(DEADLINE) == -signal.SIGINT
    _until(lambda: not _marked(marker))


def _marked(marker: str) -> list[str]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if marker.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(name)
        except OSError:
            continue
    return found


def _until(there: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(DEADLINE / 0.05)):
        if there():
            return
        waiting.wait(0.05)
    raise AssertionError("it did not come to that")


# --- two machines
# --------------------------------------------------------------------------------------------------


@contextmanager
def listening(
    before: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A doctor that listens: the process, the port, and its first line."""
    command = [*before, *DOCTOR, "--listen", "0", *arguments, "--error-format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        port = re.search(r"listens on port (\d+) ", first["fact"])
        assert port
        yield process, int(port[1]), first["help"][0]["command"]
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_a_way_that_is_well_is_ok_both_ways_on_both_machines() -> None:
    with listening() as (listener, port, _):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            noted = line(listener)
        assert (noted["mark"], noted["code"]) == ("note", "peer-foreign")
        assert noted["why"] == [r"it said first: 'GET / HTTP/1.1\r\n\r\n'"]
        status, (there,) = examined("--peer", f"127.0.0.1:{port}")
        here = line(listener)
        assert (status, there["mark"], here["mark"]) == (0, "ok", "ok"), (there, here)
        assert there["fact"].startswith(
            f"127.0.0.1:{port} ({socket.gethostname()}): ok both ways; round trip "
        )
        assert here["fact"].startswith(
            f"127.0.0.1 ({socket.gethostname()}): ok both ways; round trip "
        )
        listener.send_signal(signal.SIGINT)
        assert listener.wait(DEADLINE) == -signal.SIGINT


def test_both_sides_listen_within_their_ranges() -> None:
    """What a firewall between them lets through."""
    low, high = _free_range(8)
    with listening(arguments=["--port-range", f"{low}-{low + 3}"]) as (listener, port, _):
        assert low <= port <= low + 3
        status, (there,) = examined(
            "--peer", f"127.0.0.1:{port}", "--port-range", f"{low + 4}-{high}"
        )
        assert (status, there["mark"], line(listener)["mark"]) == (0, "ok", "ok"), there
        with contextlib.ExitStack() as stack:
            for number in range(low + 4, high + 1):
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
            status, (there,) = examined(
                "--peer", f"127.0.0.1:{port}", "--port-range", f"{low + 4}-{high}"
            )
    assert (status, there["mark"], there["code"]) == (1, "fault", "ports-exhausted"), there


def _free_range(count: int) -> tuple[int, int]:
    """So many ports one after the other that nobody has. Below those that the kernel gives out: no
    connection takes one meanwhile.
    """
    for low in random.sample(range(15000, 30000, count), 200):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(low, low + count):
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
            return low, low + count - 1
    raise AssertionError("no free range")


def test_a_caller_that_asks_too_much_is_left() -> None:
    with listening() as (listener, port, _), socket.create_connection(("127.0.0.1", port)) as sock:
        spoken = PeerConversation(sock)
        spoken.send(PeerHello(this_side(), 1, "token"))
        spoken.receive()
        for _ in range(peer_check.PINGS):
            spoken.send(PeerStep("ping"))
            spoken.expect("pong")
        spoken.send(PeerStep("ping"))
        found = line(listener)
        assert (found["mark"], found["code"]) == ("fault", "peer-foreign")
        assert found["fact"].endswith("ended the conversation early: another step came than coming")


def test_the_listener_ends_by_itself() -> None:
    *_, last = peer_check.run_server(0, first_wait=0.2)
    assert (last.mark, last.code) == ("fault", "address-unreachable")
    assert last.fact.endswith("within 0 s")
    lines = peer_check.run_server(0, linger=0.1)
    port = re.search(r"port (\d+)", next(lines).fact)
    assert port
    visitor = threading.Thread(target=lambda: peer_check.run_client("127.0.0.1", int(port[1])))
    visitor.start()
    assert [one.mark for one in lines] == ["ok"]
    visitor.join()


def test_several_peers_each_told_apart() -> None:
    with socket.socket() as held, listening() as (_, port, _):
        held.bind(("127.0.0.1", 0))  # bound, and not listening
        refusing = held.getsockname()[1]
        asked = [f"127.0.0.1:{refusing}", "node08.invalid:29500", f"localhost:{port}"]
        status, found = examined(*(word for one in asked for word in ("--peer", one)))
    assert status == 1
    assert [(one["mark"], one["code"]) for one in found[:3]] == [
        ("fault", "port-refused"),
        ("fault", "address-unresolved"),
        ("ok", ""),
    ]
    assert found[0]["help"][0]["command"] == f"rallypoint doctor --listen {refusing}"
    assert "ok both ways" in found[2]["fact"]


@contextmanager
def other_machine(talk: Callable[[PeerConversation, PeerHello], None]) -> Iterator[int]:
    """Somebody who speaks the protocol up to a point; the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                spoken = PeerConversation(sock)
                hello = spoken.receive()
                assert isinstance(hello, PeerHello)
                talk(spoken, hello)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(DEADLINE)
        assert not thread.is_alive()


def polite(spoken: PeerConversation, hello: PeerHello, port: int, token: str = "") -> None:
    """Everything but the bulk, as a doctor would; `port` is where the caller shall come to."""
    spoken.send(PeerHello(this_side(), port, token, "127.0.0.1"))
    until_called(spoken, "it did not come")
    spoken.send(PeerStep("called", peer_check.come_to("127.0.0.1", hello.port, hello.token)))


def until_called(spoken: PeerConversation, problem: str) -> None:
    """Answer as a doctor would, until the caller wants to be called."""
    for _ in range(peer_check.PINGS):
        spoken.expect("ping", DEADLINE)
        spoken.send(PeerStep("pong"))
    spoken.expect("coming", DEADLINE)
    spoken.send(PeerStep("came", problem))
    spoken.expect("call me", DEADLINE)


def test_one_direction_that_is_closed() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, and not listening

        def talk(spoken: PeerConversation, hello: PeerHello) -> None:
            polite(spoken, hello, held.getsockname()[1])
            spoken.expect("bulk")
            spoken.send(PeerStep("bulk"))

        with other_machine(talk) as port:
            (found,) = peer_check.run_client("127.0.0.1", port)
    name = socket.gethostname()
    assert (found.mark, found.code) == ("fault", "peer-one-way")
    assert found.fact.endswith(
        f"{name} does not reach {name} at 127.0.0.1:{held_port(found.fact)}: nothing listens there"
    )


def held_port(fact: str) -> str:
    return str(re.findall(r"127\.0\.0\.1:(\d+)", fact)[-1])


def test_words_that_come_through_and_many_bytes_that_do_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def let_in() -> None:
            sock, _ = listener.accept()
            with sock:
                assert sock.recv(5) == b"token"

        def talk(spoken: PeerConversation, hello: PeerHello) -> None:
            thread = threading.Thread(target=let_in)
            thread.start()
            spoken.send(PeerHello(this_side(), listener.getsockname()[1], "token", "127.0.0.1"))
            until_called(spoken, "")
            thread.join()
            spoken.send(
                PeerStep("called", peer_check.come_to("127.0.0.1", hello.port, hello.token))
            )  # and now the cable is pulled

        with other_machine(talk) as port:
            (found,) = peer_check.run_client("127.0.0.1", port)
    assert (found.mark, found.code) == ("fault", "large-packets-lost")
    assert (
        f"127.0.0.1:{port}: single words come through, and 256.0 KiB at a time do not" in found.fact
    )


def test_another_version_of_the_protocol_and_an_end_in_the_middle() -> None:
    def newer(spoken: PeerConversation, hello: PeerHello) -> None:
        spoken.send(PeerHello(this_side(), 1, "", "", peer_check.PROTOCOL + 1))

    def early(spoken: PeerConversation, hello: PeerHello) -> None:
        spoken.send(PeerHello(this_side(), 1, "", "127.0.0.1"))

    with other_machine(newer) as port:
        (found,) = peer_check.run_client("127.0.0.1", port)
    assert (found.code, "install the same on both" in found.fact) == ("peer-foreign", True)
    with other_machine(early) as port:
        (found,) = peer_check.run_client("127.0.0.1", port)
    assert found.code == "peer-foreign"
    assert "ended the conversation early" in found.fact


def _has_link(machine: Sequence[str], name: str) -> bool:
    """The kernel tells of it some time after both ends are up."""
    return (
        " UP "
        in subprocess.run(
            [*machine, "ip", "-brief", "link", "show", name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2, each with a name:
    how a command is started in each.
    """
    start = "ip link set lo up; echo ready; exec sleep 1000"
    machines = [
        subprocess.Popen(
            ["unshare", "-nu", "sh", "-c", f"hostname {name}; {start}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("node07", "node08")
    ]
    try:
        for one in machines:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        here, there = (["nsenter", "-t", str(one.pid), "-n", "-u"] for one in machines)
        subprocess.run(
            [
                *here,
                "ip",
                "link",
                "add",
                "a0",
                "type",
                "veth",
                "peer",
                "name",
                "b0",
                "netns",
                str(machines[1].pid),
            ],
            check=True,
        )
        for machine, name, address in ((here, "a0", "10.77.0.1/24"), (there, "b0", "10.77.0.2/24")):
            subprocess.run(
                [
                    *machine,
                    "sh",
                    "-c",
                    f"ip address add {address} dev {name} && ip link set {name} up",
                ],
                check=True,
            )
        _until(
            lambda: all(_has_link(machine, name) for machine, name in ((here, "a0"), (there, "b0")))
        )
        yield here, there
    finally:
        for one in machines:
            one.kill()
            one.communicate()


@pytest.mark.root
def test_two_machines_with_a_cable_between_them() -> None:
    with two_machines() as (here, there), listening(there) as (listener, port, command):
        assert command == f"rallypoint doctor --peer 10.77.0.2:{port}"
        status, (well, *notes) = examined("--peer", f"10.77.0.2:{port}", before=here)
        assert (status, well["mark"]) == (0, "ok"), well
        assert well["fact"].startswith(f"10.77.0.2:{port} (node08): ok both ways; round trip ")
        assert "in packets of up to 1448 bytes" in well["fact"]
        assert [
            (
                one["code"],
                "node08, by which that machine knows itself, has no address here" in one["fact"],
            )
            for one in notes
        ] == [("address-unresolved", True)]
        seen = line(listener)
        assert (seen["mark"], seen["fact"].startswith("10.77.0.1 (node07): ok both ways")) == (
            "ok",
            True,
        )
        subprocess.run([*here, "ip", "route", "add", "unreachable", "10.77.0.2/32"], check=True)
        status, (cut,) = examined("--peer", f"10.77.0.2:{port}", before=here)
        assert (status, cut["code"], cut["fact"]) == (
            1,
            "address-unreachable",
            f"10.77.0.2:{port}: No route to host",
        )
