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
from rallypoint.diagnosis.doctor.finding import Finding
from rallypoint.store.discovery import derived
from rallypoint.store.server.server import Server

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

SECRET = b"known to both machines"


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the secret, which the doctors of this test are told by the environment."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(path))
    return path


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


def test_a_way_that_is_well_is_ok_both_ways_on_both_machines(secret_file: Path) -> None:
    with listening() as (listener, port, command):
        assert command.endswith(f":{port} --secret-file {shlex.quote(str(secret_file))}")
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert listener.stderr is not None
            assert "turned away ::ffff:127.0.0.1: an HTTP request" in listener.stderr.readline()
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


@pytest.mark.parametrize("options", [("--listen", "0"), ("--peer", "127.0.0.1:29500")])
def test_without_a_secret_nothing_is_said_to_anybody(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*DOCTOR, *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "RALLYPOINT_SECRET_FILE"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[secret-missing]: ")
    assert "head -c 32 /dev/urandom | base64 > ~/rallypoint-secret" in done.stderr
    assert f"rallypoint doctor {options[0]} " in done.stderr


def test_a_machine_with_another_secret_is_told_so(secret_file: Path) -> None:
    with listening() as (_, port, _):
        secret_file.write_bytes(b"another secret, as long")
        status, (found,) = examined("--peer", f"127.0.0.1:{port}")
    assert (status, found["mark"], found["code"]) == (1, "fault", "wrong-secret")


@pytest.mark.usefixtures("secret_file")
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


def test_the_listener_ends_by_itself() -> None:
    *_, last = peer_check.run_server(0, SECRET, first_wait=0.2)
    assert (last.mark, last.code) == ("fault", "address-unreachable")
    assert last.fact.endswith("within 0 s")
    lines = peer_check.run_server(0, SECRET, linger=0.1)
    found = called(port_of(next(lines)))
    assert [one.mark for one in lines] == ["ok"]
    assert [one.mark for one in found()] == ["ok"]


def port_of(first: Finding) -> int:
    port = re.search(r"port (\d+)", first.fact)
    assert port
    return int(port[1])


def called(port: int) -> Callable[[], list[Finding]]:
    """Call at a listener, beside; returns what waits for the findings."""
    found: list[Finding] = []
    thread = threading.Thread(
        target=lambda: found.extend(peer_check.run_client("127.0.0.1", port, SECRET))
    )
    thread.start()

    def wait() -> list[Finding]:
        thread.join(DEADLINE)
        assert not thread.is_alive()
        return found

    return wait


@pytest.mark.usefixtures("secret_file")
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
    assert (
        found[0]["help"][0]["command"] == f"rallypoint doctor --listen {refusing} --secret-file F"
    )
    assert "ok both ways" in found[2]["fact"]


def test_a_store_that_is_no_doctor_and_one_where_none_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_check, "TURN", 0.2)
    for job, said in (("job7", "job7"), (peer_check.JOB, "no answer came in time")):
        with Server(secret=derived(SECRET, "doctor"), job=job, local=False) as server:
            port = int(server.address.rpartition(":")[2])
            (found,) = peer_check.run_client("127.0.0.1", port, SECRET)
        assert (found.mark, found.code) == ("fault", "peer-foreign")
        assert said in found.fact


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


SBIN = "PATH=$PATH:/usr/sbin:/sbin"
"""For `sh`: nft lies there, which an ordinary user's PATH leaves out."""


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


@pytest.mark.nodes
def test_a_firewall_and_packets_that_are_too_large(secret_file: Path) -> None:
    """What drops: first all new connections to the caller, then everything above 1000 bytes."""
    table = "nft add table inet t; nft add chain inet t in '{ type filter hook input priority 0; }'"
    with two_machines() as (here, there), listening(there) as (listener, port, _):
        for rule, code, fact in (
            ("ct state new drop", "peer-one-way", " does not reach node07 at 10.77.0.1:"),
            ("meta length 1000-65535 drop", "large-packets-lost", "256.0 KiB at a time do not"),
        ):
            script = f"{SBIN}; {table}; nft add rule inet t in iif != lo {rule}"
            subprocess.run([*here, "sh", "-c", script], check=True)
            status, (found, *_) = examined("--peer", f"10.77.0.2:{port}", before=here)
            assert (status, found["mark"], found["code"]) == (1, "fault", code), found
            assert fact in found["fact"]
            assert line(listener)["code"] == code
            subprocess.run([*here, "sh", "-c", f"{SBIN}; nft flush ruleset"], check=True)


@pytest.mark.root
def test_two_machines_with_a_cable_between_them(secret_file: Path) -> None:
    with two_machines() as (here, there), listening(there) as (listener, port, command):
        assert command == f"rallypoint doctor --peer 10.77.0.2:{port} --secret-file {secret_file}"
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
