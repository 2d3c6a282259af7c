"""Starts a job the way a user does, and sees to it that nothing of it is left."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..warm_python import WarmPopen

SCRIPTS = Path(__file__).parent / "scripts"
# `-P`: as the installed command, which has its own folder in sys.path[0] and not the working
# directory.
RALLYPOINT = (sys.executable, "-P", "-m", "rallypoint", "run")
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
# Seconds for a whole job. None of them takes five; a machine that runs other things, too, may need
# several times as long.
DEADLINE = 100.0
# Seconds in which what the launcher left must be gone after its end: the guard, which ends by
# itself, is being reaped.
GONE_AFTER = 5.0
MARKER = "TEST_OF_A_JOB"  # in the environment of every process of a job, the launcher included

# What another launcher, a CI system or a shell's start-up file may have set, and would change what
# is tested.
_FOREIGN = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|RALLYPOINT_.*|TORCHELASTIC_.*|PET_.*|OMP_NUM_THREADS"
    r"|OPENBLAS_NUM_THREADS|PYTHONUNBUFFERED|PYTHONBREAKPOINT|COLUMNS|NO_COLOR|FORCE_COLOR|CUDA_VISIBLE_DEVICES|RES_OPTIONS|SLURM_.*|PYTEST_.*"
)
# How long the import of torch takes the machine decides, and whether torch is built for CUDA.
SLOW_TORCH = re.compile(
    r"^rallypoint: the template has been importing torch for 10 s; .*\n", re.MULTILINE
)
# What gloo of torch 2.8 writes to stdout for each group.
GLOO = re.compile(r"^(?:\[\w+\]:? ?)?\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)
_PREFIX = re.compile(r"\[(\d+)\] ?(.*)")
_VALUE = re.compile(r"\[[a-z]*(\d+)\]:? ?(\{.*\})")  # torchrun's prefix has the role, too


class Result(NamedTuple):
    """What a user sees of a job that has ended."""

    rc: int
    out: str
    err: str
    seconds: float
    state: Path  # XDG_STATE_HOME of the launcher

    @property
    def lines(self) -> list[str]:
        """What was written to stdout."""
        return self.out.splitlines()

    @property
    def everything(self) -> str:
        """For the message of an assertion."""
        return f"exit status {self.rc} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def of(self, rank: int) -> list[str]:
        """The lines of one rank on stdout, without its prefix."""
        found = (_PREFIX.fullmatch(line) for line in self.lines)
        return [match[2] for match in found if match and int(match[1]) == rank]

    def values(self) -> list[Any]:
        """What the ranks printed as JSON, by rank."""
        found = {
            int(match[1]): json.loads(match[2])
            for match in map(_VALUE.fullmatch, self.lines)
            if match
        }
        return [found[rank] for rank in sorted(found)]

    @property
    def run_dir(self) -> Path:
        """The run folder of the only job that was started with this state."""
        (found,) = (
            path for path in (self.state / "rallypoint" / "runs").iterdir() if not path.is_symlink()
        )
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened, from the run folder."""
        return [
            json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()
        ]

    @property
    def report(self) -> str:
        """The report as it was printed, from its headline on; "" when there is none."""
        match = re.search(r"^(error|interrupted)\[", self.err, re.MULTILINE)
        return self.err[match.start() :] if match else ""

    @property
    def prose(self) -> str:
        """The report without its line breaks: where a line ends depends on how long a path, a name
        or a number in it is.
        """
        return " ".join(self.report.split())

    @property
    def codes(self) -> list[str]:
        """The codes of the reports, first cause first."""
        return re.findall(r"^(?:error|interrupted)\[([a-z-]+)\]:", self.err, re.MULTILINE)


def environment(state: Path, marker: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's own environment, without what would change the job."""
    kept = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}
    return {**kept, "XDG_STATE_HOME": str(state), MARKER: marker, **(extra or {})}


def processes(marker: str) -> list[str]:
    """Every living process that was started with this marker: pid, state and command line."""
    entry = f"{MARKER}={marker}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if entry not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        found.append(f"{pid} {words.decode(errors='replace')[:150]}")
    return found


def kill(marker: str) -> None:
    """SIGKILL for whatever is left of a job."""
    for line in processes(marker):
        try:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            continue


def end_of(process: subprocess.Popen[bytes], marker: str) -> None:
    """Leave nothing of a job whose launcher has not ended, since its test has failed."""
    if process.poll() is None:
        kill(marker)
        process.wait()


def left_behind(marker: str) -> list[str]:
    """What is left of a job whose launcher has ended, after a moment for the last one to be
    gone.
    """
    until = time.monotonic() + GONE_AFTER
    while (left := processes(marker)) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def run_job(
    arguments: Sequence[str | Path],
    *,
    state: Path,
    launcher: Sequence[str] = RALLYPOINT,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    cwd: str | Path | None = None,
    timeout: float = DEADLINE,
    before: Callable[[], None] | None = None,
    pass_fds: Sequence[int] = (),
    errors: str = "replace",
    fork: bool = False,
    act: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Result:
    """Run a job to its end. Fails when it takes longer than `timeout` (then it is killed), or when
    a process of it is left.

    `act` is called once with the running launcher; `before` runs in the child before the launcher
    (umask, signals). `fork`: the launcher is a fork of a warm Python, for tests to which it is the
    same how it begins.
    """
    marker = uuid.uuid4().hex
    began = time.monotonic()
    data = stdin.encode() if isinstance(stdin, str) else stdin
    popen: type[subprocess.Popen[Any]] = WarmPopen if fork else subprocess.Popen
    process = popen(
        [*launcher, *map(str, arguments)],
        stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(state, marker, env),
        cwd=cwd or SCRIPTS,
        preexec_fn=before,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    try:
        if act is not None:
            act(process)
        out, err = process.communicate(data, timeout=timeout)
    except subprocess.TimeoutExpired:
        listed = "\n".join(processes(marker))
        kill(marker)
        out, err = process.communicate()
        words = f"{out.decode(errors='replace')}\n---\n{err.decode(errors='replace')}"
        raise AssertionError(
            f"not over after {timeout:g} s; killed:\n{listed}\n\nit had said:\n{words}"
        ) from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        left = left_behind(marker)
        kill(marker)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:  # still open when `act` has failed: a later test would see that
                pipe.close()
    result = Result(
        process.returncode,
        GLOO.sub("", out.decode(errors=errors)),
        SLOW_TORCH.sub("", err.decode(errors=errors)),
        time.monotonic() - began,
        state,
    )
    assert not left, f"left behind: {left}\n{result.everything}"
    return result


def on_terminal(
    arguments: Sequence[str | Path],
    folder: Path,
    *,
    launcher: Sequence[str] = RALLYPOINT,
    env: Mapping[str, str] | None = None,
    typed: bytes = b"",
    react: Callable[[bytes, int], object] = lambda shown, keyboard: None,
) -> tuple[int, str]:
    """Run a job on a terminal to its end, in `folder`: its exit status, and what the terminal
    showed. Fails when it takes longer than DEADLINE, or when a process of it is left.

    `typed` is typed before it begins; `react` sees all that it has shown so far, and may type at
    the descriptor that it gets.
    """
    marker = str(folder)
    ours, theirs = pty.openpty()
    shown, until = b"", time.monotonic() + DEADLINE
    try:
        os.write(ours, typed)
        process = subprocess.Popen(
            [*launcher, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder,
            start_new_session=True, env={**environment(folder / "state", marker, env), "TERM": "xterm"},
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        while select.select([ours], [], [], max(0.0, until - time.monotonic()))[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:  # EIO: nobody has the terminal open any more
                break
            shown += data
            react(shown, ours)
        else:
            raise AssertionError(f"not over after {DEADLINE:g} s; it had shown:\n{shown!r}")
        status = process.wait(DEADLINE)
    finally:
        os.close(ours)
        end_of(process, marker)
    assert left_behind(marker) == []
    return status, shown.decode(errors="replace")
