"""`rallypoint doctor` as people type it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rallypoint.cli import doctor as command
from rallypoint.cli import main as cli
from rallypoint.cli import options
from rallypoint.diagnosis.doctor import doctor
from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok, unknown

DOCTOR = (sys.executable, "-P", "-m", "rallypoint", "doctor")
DEADLINE = 60.0  # seconds; each of these takes a fraction of one


@pytest.mark.parametrize(
    ("argv", "headline"),
    [
        (
            ["--onyl", "shm"],
            "error[option-unknown]: rallypoint doctor has no option --onyl; the nearest is --only",
        ),
        (
            ["--only", "limit"],
            "error[usage]: --only limit names no check 'limit'; the nearest is limits",
        ),
        (
            ["--skip", "everything"],
            "error[usage]: --skip everything names no check 'everything': there are versions, processors,",
        ),
        (["--only", "shm", "--skip", "shm,job"], "error[usage]: --only and --skip leave no check"),
        (["--peer", "node08"], "error[usage]: --peer node08 is not HOST:PORT"),
        (["--peer", "node08:0"], "error[usage]: --peer node08:0 is not HOST:PORT"),
        (
            ["--peer", "node08:70000"],
            "error[usage]: --peer node08:70000 is not a port: they go from 1 to 65535\n",
        ),
        (["--peer", ":29500"], "error[usage]: --peer :29500 is not HOST:PORT, of a machine"),
        (
            ["--list"],
            "error[option-unknown]: rallypoint doctor has no option --list; the nearest is --listen\n\n  help   use --listen:\n"
            "             rallypoint doctor --listen\n",
        ),
        (["--peer", ""], "error[usage]: --peer '' is not HOST:PORT"),
        (["--listen", "http"], "error[usage]: --listen http is not a port number"),
        (["--listen"], "error[usage]: --listen lacks its value, PORT"),
        (
            ["--listen", "1234", "--peer", "node08:1234"],
            "error[usage]: --listen and --peer exclude each other",
        ),
        (["--port-range", "20000-20100"], "error[usage]: --port-range is for --listen and --peer"),
        (
            ["--listen", "29500"],
            "error[secret-missing]: a check between two machines needs a secret that both have",
        ),
        (
            ["--listen", "1234", "--only", "shm"],
            "error[usage]: --only and --skip choose among the checks of this machine",
        ),
        (
            ["node08:29500"],
            "error[usage]: rallypoint doctor takes options only, and got node08:29500",
        ),
        (["--error-format", "xml"], "error[usage]: --error-format xml is not one of text, json"),
    ],
)
def test_wrong_usage(argv: list[str], headline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(headline)


@pytest.mark.usefixtures("secret")
def test_a_port_outside_the_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--listen", "29500", "--port-range", "20000-20100"]) == 2
    headline = "error[port-invalid]: port 29500 lies outside the allowed range 20000-20100"
    assert capsys.readouterr().err.startswith(headline)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["ports", "shm"], "--only ports,shm"),
        (["--skip", "job", "shm"], "--skip job --only shm"),
        (["shm", "everything"], "--help"),
    ],
)
def test_checks_without_their_option(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *argv]) == 2
    assert f"rallypoint doctor {line}" in [
        line.strip() for line in capsys.readouterr().err.splitlines()
    ]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], doctor.NAMES),
        (["--only", "shm,limits", "--only", "job"], ("shm", "limits", "job")),
        (
            ["--skip", "job, devices"],
            tuple(name for name in doctor.NAMES if name not in ("job", "devices")),
        ),
        (["--only", "shm,limits", "--skip", "shm"], ("limits",)),
    ],
)
def test_which_checks_are_made(
    argv: list[str], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def examine(wanted: tuple[str, ...], screen: object) -> int:
        asked.append(wanted)
        return 0

    monkeypatch.setattr(command, "examine", examine)
    assert cli.main(["doctor", *argv]) == 0
    assert asked == [names]


@pytest.mark.parametrize(
    ("findings", "status", "last"),
    [
        ([ok("a", "shm")], 0, "1 ok"),
        ([ok("a", "shm"), note("limit-low", "b")], 0, "1 note, 1 ok"),
        ([ok("a", "shm"), unknown("b", "firewall")], 0, "1 ok, 1 not known"),
        ([fault("limit-low", "b"), ok("a", "shm"), fault("shm-small", "c")], 1, "2 faults, 1 ok"),
    ],
)
def test_the_exit_status_says_whether_there_is_a_fault(
    findings: list[Finding],
    status: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(
        checks: Iterable[doctor.Check], wanted: Iterable[str], starting: object
    ) -> Iterator[Finding]:
        yield from findings

    monkeypatch.setattr(doctor, "run", run)
    assert cli.main(["doctor"]) == status
    out, err = capsys.readouterr()
    assert (out.splitlines()[-1], err) == (last, "")
    assert cli.main(["doctor", "--error-format", "json"]) == status
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["mark"], line["fact"], line["code"]) for line in lines[:-1]] == [
        (one.mark, one.fact, one.code) for one in findings
    ]
    assert lines[-1]["exit_status"] == status


def test_a_check_of_this_machine_and_a_standard_output_that_takes_nothing() -> None:
    done = subprocess.run(
        [*DOCTOR, "--only", "loopback"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[ok] loopback    127.0.0.1 can be bound and connected to\n1 ok\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*DOCTOR, "--only", "loopback"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "rallypoint: cannot write to stdout: No space left on device\n",
    )


def test_standard_descriptors_that_are_closed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *DOCTOR, "--only", "loopback,clock"],
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that RALLYPOINT_SECRET_FILE names in this test."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("known to both machines")
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(path))
    return path


def test_a_port_that_is_taken_cannot_be_listened_on(
    secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert cli.main(["doctor", "--listen", str(other.getsockname()[1])]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error[port-in-use]: ")
    assert f"(pid {os.getpid()}" in " ".join(err.split())
    assert f"rallypoint doctor --listen 0 --secret-file {secret}" in err
    assert "--master-port" not in err


def test_a_terminal_shows_what_is_waited_for(tmp_path: Path) -> None:
    primary, secondary = os.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environ.pop("NO_COLOR", None)
    done = subprocess.run(
        [*DOCTOR, "--only", "loopback"],
        env=environ,
        stdout=secondary,
        timeout=DEADLINE,
        check=False,
    )
    os.close(secondary)
    shown = os.read(primary, 1 << 16).decode()
    os.close(primary)
    assert done.returncode == 0
    assert shown.startswith(
        "\r\x1b[K     loopback ...\r\x1b[K\x1b[32m[ok]\x1b[0m loopback    127.0.0.1"
    )


def test_help_has_every_option_and_check_and_loads_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(name in out for option in options.DOCTOR for name in option.names)
    assert all(name in out for name in doctor.NAMES)
    assert max(map(len, out.splitlines())) <= 118
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *DOCTOR[1:], "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert not loaded & {"torch", "numpy", "rich", "psutil", "asyncio", "subprocess"}


def test_the_process_that_prints_loads_no_more_than_the_first_line_needs() -> None:
    """What a check needs is imported in its child: the first line is there within 0.15 s of the
    start.
    """
    arguments = ["-X", "importtime", *DOCTOR[1:], "--only", "versions"]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    loaded = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "rallypoint.diagnosis.doctor.doctor" in loaded
    assert not loaded & {
        "torch",
        "numpy",
        "psutil",
        "asyncio",
        "subprocess",
        "rallypoint.launcher.agent.agent",
        "rallypoint.host.addresses",
    }
