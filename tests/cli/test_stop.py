"""`rallypoint stop` where there is nothing to stop, and what it does to a real job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from rallypoint.cli import main as cli
from rallypoint.cli import stacks
from rallypoint.host import kernel_files, ports

from ..warm_python import WarmPopen

RUN = (sys.executable, "-P", "-m", "rallypoint", "run")
SAVES = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save if sys.argv[1:] != ["deaf"] else signal.SIG_IGN)
print("is up", flush=True)
while True:
    time.sleep(1000)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "rallypoint" / "runs"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SAVES)
    return path


class Job:
    """A running job of two ranks that are up, or half of one of two nodes."""

    def __init__(self, *words: str, ranks: int = 2) -> None:
        self.process = WarmPopen(
            [*RUN, "-n", str(ranks), *words],
            env=os.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        assert self.process.stdout is not None
        while ranks == 2 and self.said.count("is up") < 2:
            line = self.process.stdout.readline()
            assert line, (self.said, self.process.communicate(timeout=60))  # nothing stays open
            self.said += line

    def end(self) -> int:
        rest, _ = self.process.communicate(timeout=60)
        self.said += rest
        return self.process.returncode


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.process.kill()
        job.process.communicate()


@pytest.mark.parametrize(
    ("words", "headline"),
    [([], "no job of this user is running here"), (["a", "b"], "stop takes one run, and got 2")],
)
def test_there_is_nothing_to_stop(
    state: Path, words: list[str], headline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stop", *words]) == 2
    assert f"error[usage]: {headline}" in capsys.readouterr().err


def test_no_job_is_found_where_proc_names_no_sockets(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With /proc mounted subset=pid there is no /proc/net: an internal error."""

    def missing(path: str, *_: object, **__: object) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory", path)

    for module in (stacks, kernel_files):
        monkeypatch.setattr(module, "open", missing, raising=False)
    assert cli.main(["stop"]) == 2
    assert "error[usage]: no job of this user is running here" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["newest", "name", "part", "folder elsewhere", "name elsewhere"])
@pytest.mark.usefixtures("without_torch")
def test_a_job_is_stopped_in_good_order(
    state: Path,
    program: Path,
    jobs: list[Job],
    where: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The handlers run, and when the command returns the job is over."""
    elsewhere = ["--run-dir", str(tmp_path / "own")] if "elsewhere" in where else []
    jobs.append(Job(*elsewhere, "--grace", "60", str(program)))
    name = "" if elsewhere else os.readlink(state / "latest")
    if where == "name elsewhere":
        name = json.loads((tmp_path / "own" / "plan.json").read_bytes())["job"]
    words = {"newest": [], "part": [name[-4:]], "folder elsewhere": [str(tmp_path / "own")]}.get(
        where, [name]
    )
    assert cli.main(["stop", *words]) == 0
    said = capsys.readouterr().out
    assert "SIGTERM to ranks 0-1, which may take up to 60 s" in said
    assert "has ended with exit status 143" in said
    assert not elsewhere or f"rallypoint show {tmp_path / 'own'}\n" in said
    assert jobs[0].end() == 143
    assert jobs[0].said.count("saved") == 2
    assert "rallypoint: rallypoint stop ends this job" in jobs[0].said
    if not elsewhere:
        assert cli.main(["stop", name]) == 2
        assert "is over" in capsys.readouterr().err


@pytest.mark.parametrize("own", [True, False], ids=["its own folder", "folder of runs"])
@pytest.mark.usefixtures("without_torch")
def test_the_folder_of_a_job_of_two_nodes_names_it(
    state: Path, program: Path, jobs: list[Job], own: bool, tmp_path: Path
) -> None:
    """The folder that was given was told as one of a job that is over, and the job went on."""
    secret, port = tmp_path / "secret", ports.hold_port(0, "127.0.0.1", (20000, 28999))
    secret.write_text("a secret of a test, long enough")
    secret.chmod(0o600)
    port.release()
    place = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port.port}"]
    for rank in range(2):
        folder = ["--run-dir", str(tmp_path / f"own{rank}")] if own else []
        words = [*place, "--secret-file", str(secret), "--node-rank", str(rank), *folder]
        jobs.append(Job(*words, str(program), ranks=1))
    for job in jobs:
        assert job.process.stdout is not None
        while "is up" not in job.said:
            job.said += job.process.stdout.readline() or pytest.fail(job.said)
    named = tmp_path / "own1" if own else (state / "latest").resolve().parent
    assert cli.main(["stop", str(named)]) == 0
    assert [job.end() for job in jobs] == [143, 143]


@pytest.mark.usefixtures("without_torch")
def test_a_job_whose_run_folder_was_removed_is_named(
    state: Path, program: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """It was hidden: "no job of this user is running here"."""
    jobs.append(Job(str(program)))
    name = os.readlink(state / "latest")
    shutil.rmtree(state)
    for words in (["stop"], ["stop", name[-4:]], ["stacks", name], ["stacks", str(state / name)]):
        assert cli.main(words) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert f"[launcher-silent]: job {name} runs, and its run folder is gone" in said
        assert f"kill {jobs[0].process.pid}" in said
    jobs[0].process.terminate()
    assert jobs[0].end() == 143


@pytest.mark.usefixtures("without_torch")
def test_a_job_that_nobody_named_is_not_disturbed(
    state: Path,
    program: Path,
    jobs: list[Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which jobs have no run folder was asked of every launcher, and it asked its ranks by a signal:
    a rank that torch had connecting wrote 60 lines of an interrupted system call.
    """
    jobs.append(Job(str(program)))
    folder = state / os.readlink(state / "latest")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert cli.main(["stacks", "no-such-job"]) == 2
    jobs[0].process.terminate()
    assert jobs[0].end() == 143
    asked = [line for line in (folder / "events.jsonl").read_text().splitlines() if "asks" in line]
    assert asked == []


@pytest.mark.usefixtures("without_torch")
def test_a_second_one_kills(
    state: Path, program: Path, jobs: list[Job], capfd: pytest.CaptureFixture[str]
) -> None:
    jobs.append(Job("--grace", "300", str(program), "deaf"))
    name = os.readlink(state / "latest")
    with WarmPopen([*RUN[:-1], "stop", name], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith(f"stopping job {name}")
        time.sleep(1.0)  # not to synchronise: what comes sooner is no other wish
        assert cli.main(["stop"]) == 0
        assert "has ended with exit status 143" in first.stdout.read()
    assert first.returncode == 0
    assert jobs[0].end() == 143
    assert "did not end and were killed" in jobs[0].said
    assert (
        f"job {name} was being stopped, and what is left of it is killed" in capfd.readouterr().out
    )


@pytest.mark.usefixtures("torch_in_parts")
def test_the_holder_of_a_port_is_ended_as_the_error_says(
    state: Path, program: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `kill PID`, of the process that serves torch's store, which ignores SIGTERM: the port
    stayed taken, and the job ran on.
    """
    port = ports.hold_port(0, "127.0.0.1", (20000, 28999))  # of which the kernel gives nobody one
    number = port.port
    port.release()
    program.write_text(
        f"import torch.distributed as dist\ndist.init_process_group('gloo')\n{SAVES}"
    )
    jobs.append(Job("--master-port", str(number), str(program)))
    assert cli.main(["run", "-n", "2", "--master-port", str(number), str(program)]) == 1
    said = capsys.readouterr().err
    command = next(line for line in said.splitlines() if "rallypoint stop" in line).split()
    assert cli.main(command[1:]) == 0
    assert jobs[0].end() == 143
    ports.hold_port(number, "127.0.0.1", None).release()
