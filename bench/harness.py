"""Start a launcher, watch it from outside, clean up after it. Shared by the bench and the soak.

Times are CLOCK_MONOTONIC, which all processes of a machine share: a rank writes down when it came
to a point (`jobs/marks.py`), and the harness, which knows when the command was started, subtracts.
"""

from __future__ import annotations

import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "bench" / "jobs"

# in the environment of every process of a run, of any launcher: how what is left of it is found
MARK = "BENCH_RUN"
# seconds between two looks at a file: no measured time hangs on it, and looking costs the ranks a
# hundredth of a processor
LOOK = 0.005


def take_signals_as_usual() -> None:
    """Started in the background, or with nohup, this process ignores SIGINT and SIGHUP, and so
    would the launchers that it signals.
    """
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def rallypoint() -> list[str]:
    """The command `rallypoint` of this Python: installed, or out of the source tree."""
    return _script("rallypoint", "rallypoint")


def torchrun() -> list[str]:
    """The command `torchrun` of this Python."""
    return _script("torchrun", "torch.distributed.run")


def _script(name: str, module: str) -> list[str]:
    beside = Path(sys.executable).parent / name
    return [str(beside)] if beside.exists() else [sys.executable, "-m", module]


def environment(**extra: str) -> dict[str, str]:
    """What a launcher starts with: the caller's, without anything that a launcher around us has
    set.
    """
    left_out = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RALLYPOINT_JOB",
        MARK,
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith(("PET_", "TORCHELASTIC_"))
    }
    path = [str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    # One thread per rank, as torchrun and rallypoint choose by themselves: the bare peers must not
    # lose by what they leave unsaid.
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **extra}


class Marked(NamedTuple):
    """A point that a process came to: `at` in seconds of CLOCK_MONOTONIC."""

    name: str
    rank: int
    attempt: int
    pid: int
    at: float


class Run:
    """One command in a session of its own, its output read and timed as it comes. Use it in `with`:
    it leaves no process behind.
    """

    def __init__(self, command: Sequence[str], *, folder: Path | None = None, **extra: str) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="rallypoint-bench-"))
        self._own_folder = folder is None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.command = list(command)
        self.id = uuid.uuid4().hex
        self._marks = self.folder / "marks"
        self._chunks: list[tuple[float, bytes]] = []
        variables = environment(
            **{
                MARK: self.id,
                "BENCH_MARKS": str(self._marks),
                "BENCH_FOLDER": str(self.folder),
                **extra,
            }
        )
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables, cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self.process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.ended: float | None = None

    def __repr__(self) -> str:
        return f"<Run {' '.join(self.command[:3])}...: status {self.process.poll()}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()

    def _read(self) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while data := os.read(fd, 65536):
            self._chunks.append((time.monotonic(), data))

    # --- what it did

    def marks(self, name: str, attempt: int | None = None) -> list[Marked]:
        """The points of that name so far, in the order in which they were written."""
        try:
            text = self._marks.read_text()
        except FileNotFoundError:
            return []
        found = []
        for line in text.splitlines():
            fields = line.split()
            if len(fields) == 5 and fields[0] == name and attempt in (None, int(fields[2])):
                found.append(
                    Marked(name, int(fields[1]), int(fields[2]), int(fields[3]), float(fields[4]))
                )
        return found

    def wait_for_marks(
        self, name: str, count: int, timeout: float, attempt: int | None = None
    ) -> list[Marked]:
        """Until `count` processes have come to the point; fewer when the launcher ended or the time
        is up.
        """
        until = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            found = self.marks(name, attempt)
            if len(found) >= count or ended or time.monotonic() > until:
                return found
            time.sleep(LOOK)

    def wait(self, timeout: float) -> int | None:
        """The launcher's exit status (negative: its signal), None when it has not ended in time.
        Notes when it ended.
        """
        if self.ended is None:
            poll = select.poll()  # not Popen.wait(timeout): it looks every 50 ms
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(timeout * 1000):
                return None
            self.ended = time.monotonic()
        return self.process.wait()

    def output(self, settle: float = 1.0) -> str:
        """All that was printed. Waits up to `settle` seconds for the end of it once the launcher
        has ended.
        """
        if self.process.poll() is not None:
            self._reader.join(settle)
        return b"".join(data for _, data in self._chunks).decode("utf-8", "replace")

    def printed_at(self, pattern: str) -> float | None:
        """When what was printed first matched a regular expression (searched over lines, `.`
        without line ends).
        """
        looked_for, seen = re.compile(pattern.encode(), re.MULTILINE), b""
        for at, data in list(self._chunks):
            seen += data
            if looked_for.search(seen):
                return at
        return None

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Whether a condition came true within `timeout` seconds."""
        until = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(LOOK)
        return True

    # --- who belongs to it

    def living(self) -> list[int]:
        """Every living process that was started under this run, in whatever session it is."""
        return processes_with(f"{MARK}={self.id}")

    def wait_until_gone(self, timeout: float) -> tuple[float, list[int]]:
        """(seconds until no process was left, the launcher included, those that were left at the
        end).
        """
        began = time.monotonic()
        while True:
            ended = (
                self.process.poll() is not None
            )  # one that is just ending has no environment any more, and is none of the living
            left = self.living()
            took = time.monotonic() - began
            if (ended and not left) or took > timeout:
                return took, left if ended else sorted({self.pid, *left})
            time.sleep(0.01)

    def children(self) -> dict[str, int]:
        """The launcher's helpers by name, those that are there: `template`, `guard`. Only of
        rallypoint's run.
        """
        found = {}
        for pid in children(self.pid):
            line = command_line(pid)
            if "rallypoint.launcher.template.template_main" in line:
                found["template"] = pid
            elif line == command_line(self.pid):
                found["guard"] = pid
        return found

    def clean_up(self) -> None:
        """Kill what is left, whatever it is, and wait for it. May be called twice."""
        if self._pidfd < 0:
            return
        until = time.monotonic() + 30
        while left := self.living():
            for pid in left:
                send(pid, signal.SIGKILL)
            self.process.poll()
            if time.monotonic() > until:
                raise RuntimeError(f"processes that SIGKILL does not end: {left}")
            time.sleep(0.01)
        self.process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        self._reader.join(5)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def send(pid: int, number: int) -> bool:
    """Signal a process; False when it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def processes_with(entry: str) -> list[int]:
    """Living processes that have `NAME=value` in the environment they were started with. Zombies
    are not alive.
    """
    looked_for, found = entry.encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if looked_for not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    found.append(int(name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def command_line(pid: int) -> str:
    """With spaces between; "" when the process is gone."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
            .strip()
        )
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process from smaps_rollup: `pss` (shared pages divided among their users) and
    `private`.
    """
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            sizes[name] = int(rest.split()[0]) * 1024
    return {"pss": sizes["Pss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def machine() -> dict[str, str | int | float]:
    """What the figures were taken on."""
    model = next(
        (v.strip() for k, _, v in _lines("/proc/cpuinfo") if k.strip() == "model name"),
        platform.processor(),
    )
    total = next(
        (int(v.split()[0]) * 1024 for k, _, v in _lines("/proc/meminfo") if k == "MemTotal"), 0
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_gib": round(total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "rallypoint": _version(),
    }


def _version() -> str:
    from rallypoint import __version__

    return __version__


def _lines(path: str) -> list[tuple[str, str, str]]:
    try:
        return [line.partition(":") for line in Path(path).read_text().splitlines()]
    except OSError:
        return []


def now() -> str:
    """The clock's date and time, with the zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def load() -> float:
    """Processes that wanted a processor over the last minute: more than our own share of it, and a
    figure is not to be trusted.
    """
    return round(os.getloadavg()[0], 2)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
