"""`rallypoint serve` as people start it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.cli import main as cli
from rallypoint.cli import options
from rallypoint.store.discovery import secret_from_file
from rallypoint.wire.messages import Add, Closing

from ..store.raw import Raw

SOURCE = Path(cli.__file__).parents[2]
DEADLINE = 30.0  # seconds; each of these takes a tenth of one


@contextmanager
def served(*argv: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error", **variables}
    command = [sys.executable, "-m", "rallypoint", "serve", *argv]
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()  # killed, it would leave its secret's folder behind
        try:
            process.communicate(timeout=DEADLINE)
        finally:
            process.kill()


def announced(process: subprocess.Popen[str]) -> tuple[str, dict[str, str]]:
    assert process.stdout is not None
    said, line = process.stdout.readline(), process.stdout.readline()
    word, *settings = shlex.split(line)
    assert word == "export", process.stderr.read() if process.stderr else ""
    return said, dict(setting.split("=", 1) for setting in settings)


def test_two_lines_say_how_to_connect_and_sigterm_ends_it(tmp_path: Path) -> None:
    with served(XDG_RUNTIME_DIR=str(tmp_path)) as process:
        said, variables = announced(process)
        address, path = variables["RALLYPOINT_STORE"], variables["RALLYPOINT_SECRET_FILE"]
        assert re.fullmatch(
            r"the store is at tcp://127\.0\.0\.1:\d+, for at most .* GiB; .*rallypoint\.connect\(\) after\n",
            said,
        )
        assert address in said
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        with Raw(address, secret_from_file(path)) as client:
            added = client.ask(Add, "n", 3)
            assert added.number == 3
            process.send_signal(signal.SIGTERM)
            assert client.reply() == Closing(0, added.revision, "rallypoint serve got SIGTERM")
        assert process.communicate(timeout=DEADLINE) == ("", "")
        assert process.returncode == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_signals(number: signal.Signals, status: int) -> None:
    with served("--max-bytes", "64MiB") as process:
        said, variables = announced(process)
        assert "64.0 MiB" in said
        process.send_signal(number)
        assert process.communicate(timeout=DEADLINE) == ("", "")
        assert process.returncode == status
        assert not os.path.exists(os.path.dirname(variables["RALLYPOINT_SECRET_FILE"]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_clients_get_an_address_that_is_not_every_one(host: str) -> None:
    """On another machine, 0.0.0.0 is that machine."""
    with served("--host", host) as process:
        said, variables = announced(process)
        assert host in said
        address = variables["RALLYPOINT_STORE"]
        assert not address.startswith(("tcp://0.0.0.0:", "tcp://[::]:"))
        with Raw(address, secret_from_file(variables["RALLYPOINT_SECRET_FILE"])) as client:
            assert client.ask(Add, "n", 1).number == 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)


def test_a_secret_and_a_port_file_of_the_users_own(tmp_path: Path) -> None:
    secret, port = tmp_path / "the secret", tmp_path / "port"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o600)
    with served("--secret-file", str(secret), "--port-file", str(port)) as process:
        _, variables = announced(process)
        assert port.read_text() == variables["RALLYPOINT_STORE"].rpartition(":")[2] + "\n"
        assert variables["RALLYPOINT_SECRET_FILE"] == str(secret)
        with Raw(f"tcp://127.0.0.1:{port.read_text().strip()}", b"0123456789abcdef") as client:
            assert client.ask(Add, "n", 1).number == 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert sorted(os.listdir(tmp_path)) == ["the secret"], "the port is nobody's any more"


@pytest.mark.parametrize(
    ("argv", "headline"),
    [
        (["--max-bytes", "3Q"], "error[usage]: --max-bytes 3Q is not a size in bytes"),
        (
            ["--max-bytes", "2"],
            "error[usage]: a store of 2 bytes holds nothing: the least is 1048576",
        ),
        (
            ["--prot", "1"],
            "error[option-unknown]: rallypoint serve has no option --prot; the nearest is --port",
        ),
        (["--port"], "error[usage]: --port lacks its value, P"),
        (
            ["--port", "70000"],
            "error[usage]: --port 70000 is not a port: they go from 1 to 65535, and 0 means any free one",
        ),
        (["train.py"], "error[usage]: rallypoint serve takes options only, and got train.py"),
        (["--host", ""], "error[usage]: --host '' is not an address to listen on"),
        (["--host", "a b"], "error[usage]: --host a b is not an address to listen on"),
        (
            ["--host", "node07:29500"],
            "error[usage]: --host node07:29500 is an address with a port, and the port is given with --port",
        ),
        (
            ["--host", "a..b"],
            "error[usage]: --host a..b names no host: a label between its dots is empty, longer than 63 letters, or no text",
        ),
        (["--secret-file", ""], "error[usage]: --secret-file '' is not a file's name"),
        (["--port-file", ""], "error[usage]: --port-file '' is not a file's name"),
    ],
)
def test_wrong_usage(argv: list[str], headline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == headline


@pytest.mark.parametrize("host", ["\udcff", "a" * 64, f"{'a' * 64}.example", "a..b"])
def test_a_host_that_no_resolver_can_be_asked_for_is_no_fault_of_ours(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--host", host]) == 2
    assert "names no host" in capsys.readouterr().err
    assert cli.main(["doctor", "--peer", f"{host}:29500"]) == 2
    assert cli.main(["run", "--master-addr", host, "--dry-run", __file__]) == 2
    assert "names no host" in capsys.readouterr().err
    assert cli.main(["run", "--rdzv-endpoint", f"{host}:29500", "--dry-run", __file__]) == 2


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["29500"], "--help"),
        (["-p", "29500"], "--port 29500"),
        (["--bind", "0.0.0.0"], "--host 0.0.0.0"),
        (["--port", "29500", "29501"], "--help"),
    ],
)
def test_an_address_without_its_options(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *argv]) == 2
    assert f"rallypoint serve {meant}" in [
        line.strip() for line in capsys.readouterr().err.splitlines()
    ]


def test_problems_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    assert cli.main(["serve", "--secret-file", str(secret)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        f"error[secret-unreadable]: the secret in {secret} cannot be used: No such file"
    )
    assert f"(umask 077 && head -c 32 /dev/urandom | base64 > {secret})" in err
    assert cli.main(["serve", "--port", "29500", "--port-range", "20000-20001"]) == 2
    assert "leave --port out" in capsys.readouterr().err
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o644)
    assert cli.main(["serve", "--secret-file", str(secret)]) == 1
    assert f"chmod 600 {secret}" in capsys.readouterr().err
    secret.chmod(0o600)
    assert cli.main(["serve", "--max-bytes", "2"]) == 2
    assert "give the unit: --max-bytes 2GiB" in " ".join(capsys.readouterr().err.split())
    assert (
        cli.main(
            ["serve", "--secret-file", str(secret), "--port-file", str(tmp_path / "no" / "port")]
        )
        == 2
    )
    assert "No such file or directory" in capsys.readouterr().err
    with served() as process:
        _, variables = announced(process)
        port = variables["RALLYPOINT_STORE"].rpartition(":")[2]
        assert cli.main(["serve", "--port", port, "--error-format", "json"]) == 1
        err = capsys.readouterr().err
        assert f"pid {process.pid}" in err
        assert "--port 0" in err
        assert cli.main(["serve", "--port-range", f"{port}-{port}"]) == 1
        err = capsys.readouterr().err
        assert err.startswith(
            f"error[ports-exhausted]: port {port}, the only one of the range, is not free on 127.0.0.1\n"
        )
        assert f"(pid {process.pid}, user " in " ".join(err.split())
    with served("--port-range", "16000-16999") as process:
        _, variables = announced(process)
        assert 16000 <= int(variables["RALLYPOINT_STORE"].rpartition(":")[2]) <= 16999
    assert sorted(os.listdir(tmp_path)) == ["secret"]


def started(port: Path) -> list[str]:
    return ["serve", "--port-file", str(port)]


@pytest.mark.parametrize("content", ["precious", "29500\n29501\n", "123456\n", "", "29500 \n"])
def test_a_file_that_is_not_a_port_s_is_left_alone(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    assert cli.main(started(path)) == 2
    assert f"{path} holds something else than a port" in capsys.readouterr().err
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder", "device"])
def test_nothing_but_a_regular_file_is_replaced_by_a_port(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "port", tmp_path / "other"
    if kind == "link":
        other.write_text("29500\n")
    if kind.endswith("link"):
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/full")
    before = os.lstat(path), sorted(os.listdir(tmp_path))
    assert cli.main(started(path)) == 2
    assert f"error[usage]: {path} is no regular file" in capsys.readouterr().err
    found = os.lstat(path)
    assert (found.st_ino, found.st_mode) == (before[0].st_ino, before[0].st_mode)
    assert sorted(os.listdir(tmp_path)) == before[1]
    assert kind != "link" or other.read_text() == "29500\n"


def test_the_port_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    port = tmp_path / "port"
    port.write_text("1\n")
    with served("--port-file", str(port)) as process:
        _, variables = announced(process)
        assert variables["RALLYPOINT_STORE"].endswith(f":{port.read_text().strip()}")
        assert port.stat().st_mode & 0o111 == 0
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert os.listdir(tmp_path) == []


def test_the_port_file_of_another_server_is_left_to_it(tmp_path: Path) -> None:
    port = tmp_path / "port"
    with served("--port-file", str(port)) as first:
        announced(first)
        with served("--port-file", str(port)) as second:
            _, variables = announced(second)
            first.send_signal(signal.SIGTERM)
            first.communicate(timeout=DEADLINE)
            assert variables["RALLYPOINT_STORE"].endswith(f":{port.read_text().strip()}")
            second.send_signal(signal.SIGTERM)
            second.communicate(timeout=DEADLINE)
            assert not port.exists()


def test_what_somebody_has_written_into_the_port_file_is_left_to_him(tmp_path: Path) -> None:
    port = tmp_path / "port"
    with served("--port-file", str(port)) as process:
        announced(process)
        port.write_text("precious")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert port.read_text() == "precious"


def test_a_standard_output_that_is_full(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "rallypoint", "serve"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            env=environ,
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
    assert os.listdir(tmp_path) == []


def test_help_has_every_option_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(name in out for option in options.SERVE for name in option.names)
    assert max(map(len, out.splitlines())) <= 110
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-X", "importtime", "-m", "rallypoint", "serve", "--help"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    loaded = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert not loaded & {
        "torch",
        "numpy",
        "rich",
        "psutil",
        "asyncio",
        "logging",
        "socket",
        "subprocess",
    }
