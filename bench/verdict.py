"""`scripts/bench verdict`: a fault is put into a job, and the report must name it. The fault is the
truth, the first cause is judged.

A cell is a fault (`verdict_faults.py`), a phase of the job and a seed, which chooses the rank, the
moment and the form. The folder of every cell that was not right is kept, with all that was printed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import JOBS, Run, rallypoint, say
from bench.samples import Sample
from bench.verdict_faults import BROKEN, LONGEST_DELAY, RANKS, Fault, Phase, grade

SEEDS = 10
JOBS_AT_ONCE = 2
# Seconds for one job of four ranks on a busy machine; most take two, those that wait for a time-out
# of torch's a few more.
RUN_TIMEOUT = 60.0
# Seconds over which the moment is spread at which a process of the launcher's own is ended while
# the job starts: one import of torch.
STARTING = 0.8
# Bytes of the file system that is to be full: room for plan.json and the first events, so that the
# run folder can be made.
FULL_DISK_BYTES = 16384

SOURCES = {BROKEN: "def f(:\n    pass\n", "verdict_endless.py": "import time\n\ntime.sleep(600)\n"}
"""What the jobs import, and what stands among the jobs neither for a linter nor for a test that
imports them all.
"""


@dataclass(frozen=True)
class Cell:
    """One job with one fault."""

    fault: Fault
    phase: Phase
    seed: int

    def __str__(self) -> str:
        return f"{self.fault.name}, {self.phase}, seed {self.seed}"

    @property
    def chance(self) -> random.Random:
        """The same for the same cell, whatever was run before."""
        return random.Random(str(self))

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w]+", "-", str(self)).strip("-").lower()


@dataclass
class Beside:
    """What is there while a job runs: values for its VERDICT, a command that starts it, where its
    run folder is.
    """

    job: dict[str, Any] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    run_dir: str = "run"


# --- what is beside the job


@contextmanager
def _free_port(folder: Path) -> Iterator[Beside]:
    """Nobody listens there, and nobody else gets it: it is bound, in a way that lets a rank bind
    it, too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield Beside({"port": held.getsockname()[1]})


@contextmanager
def _silent_server(folder: Path) -> Iterator[Beside]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Beside({"port": server.getsockname()[1]})


@contextmanager
def _web_server(folder: Path) -> Iterator[Beside]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        yield Beside({"port": server.getsockname()[1]})
        server.shutdown(socket.SHUT_RDWR)  # what wakes the thread


def _answer(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # it was shut down
            return
        with client:
            client.settimeout(5.0)
            try:
                client.recv(4096)
                client.sendall(
                    b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\nContent-Length: 0\r\n\r\n"
                )
            except OSError:  # a client that has gone
                continue


@contextmanager
def _full_disk(folder: Path) -> Iterator[Beside]:
    """A small file system in a mount namespace of the job's own. Needs root."""
    (folder / "disk").mkdir()
    mount = f'mount -t tmpfs -o size={FULL_DISK_BYTES} tmpfs disk && exec "$@"'
    yield Beside(prefix=("unshare", "--mount", "sh", "-c", mount, "sh"), run_dir="disk/run")


@contextmanager
def _nothing(folder: Path) -> Iterator[Beside]:
    yield Beside()


BESIDE: Mapping[str, Callable[[Path], AbstractContextManager[Beside]]] = {
    "": _nothing,
    "a free port": _free_port,
    "a silent server": _silent_server,
    "a web server": _web_server,
    "a full disk": _full_disk,
}


# --- what is done to it


def _to_the_rank(number: signal.Signals) -> Callable[[Run, Cell], bool]:
    def act(run: Run, cell: Cell) -> bool:
        armed = run.wait_for_marks("armed", 1, RUN_TIMEOUT)
        if not armed:
            return False
        time.sleep(cell.chance.uniform(0, LONGEST_DELAY[cell.phase]))
        return harness.send(armed[0].pid, number)

    return act


def _to_the_launcher(number: signal.Signals, who: str = "") -> Callable[[Run, Cell], bool]:
    """A signal for the launcher or one of its processes: while it starts, or when all ranks run."""

    def act(run: Run, cell: Cell) -> bool:
        if cell.phase == "run":
            run.wait_for_marks("met", RANKS, RUN_TIMEOUT)
            time.sleep(cell.chance.uniform(0, LONGEST_DELAY["run"]))
        else:
            run.wait_until(
                lambda: "template" in run.children() or run.process.poll() is not None, RUN_TIMEOUT
            )
            time.sleep(cell.chance.uniform(0, STARTING))
        pid = _processes(run).get(who)
        return pid is not None and run.process.poll() is None and harness.send(pid, number)

    return act


def _processes(run: Run) -> dict[str, int]:
    """The launcher ("") and its helpers. The c10d host is the template's child that is no rank."""
    found = {"": run.pid, **run.children()}
    ranks = {mark.pid for mark in run.marks("here")}
    children = harness.children(found["template"]) if "template" in found else []
    hosts = [pid for pid in children if pid not in ranks]
    if len(ranks) == RANKS and len(hosts) == 1:
        found["c10d host"] = hosts[0]
    return found


ACTS: Mapping[str, Callable[[Run, Cell], bool]] = {
    "": lambda run, cell: True,
    "kill the rank": _to_the_rank(signal.SIGKILL),
    "terminate the rank": _to_the_rank(signal.SIGTERM),
    "interrupt the rank": _to_the_rank(signal.SIGINT),
    "kill the template": _to_the_launcher(signal.SIGKILL, "template"),
    "kill the c10d host": _to_the_launcher(signal.SIGKILL, "c10d host"),
    "stop the c10d host": _to_the_launcher(signal.SIGSTOP, "c10d host"),
    "kill the guard": _to_the_launcher(signal.SIGKILL, "guard"),
    "terminate the launcher": _to_the_launcher(signal.SIGTERM),
    "interrupt the launcher": _to_the_launcher(signal.SIGINT),
}


# --- one cell


def judge(cell: Cell, folder: Path) -> Sample:
    """Run the job with its fault; the grade and what was said. The folder stays when the first
    cause is not right.
    """
    fault, chance = cell.fault, cell.chance
    rank, other = chance.sample(range(RANKS), 2)
    asked = {
        "rank": rank, "other": other, "does": fault.does, "phase": cell.phase, "delay": chance.uniform(0, LONGEST_DELAY[cell.phase]),
        "variant": cell.seed, "status": chance.randrange(2, 100), "timeout": fault.timeout, **fault.job,
    }  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier run of the same cell kept
    folder.mkdir(parents=True)
    for name, source in SOURCES.items():
        (folder / name).write_text(source)
    script = folder / BROKEN if fault.script == BROKEN else JOBS / fault.script
    with BESIDE[fault.beside](folder) as beside:
        options = [option.format(**beside.job) for option in fault.options]
        command = [
            *beside.prefix,
            *rallypoint(),
            "run",
            "-n",
            str(RANKS),
            "--error-format",
            "json",
            *options,
        ]
        command += ["--run-dir", beside.run_dir, str(script)]
        with Run(command, folder=folder, VERDICT=json.dumps({**asked, **beside.job})) as run:
            done = ACTS[fault.act](run, cell)
            status = run.wait(RUN_TIMEOUT)
            output, seconds = run.output(), (run.ended or time.monotonic()) - run.began
    reports = printed(output)
    if not done:
        (folder / "output").write_text(
            f"{cell}: nothing was done to it; exit status {status}\n\n{output}"
        )
        return Sample(
            fault.name, cell.seed, {"phase": cell.phase}, "it ended before anything was done to it"
        )
    given, wrong = grade(fault, rank, other, reports, status)
    if given == "right":
        shutil.rmtree(folder)
    else:
        told = [
            f"{cell}: {given}: {wrong}",
            f"VERDICT {asked}",
            f"$ {' '.join(command)}",
            f"exit status {status}",
            "",
            output,
            "",
        ]
        (folder / "output").write_text("\n".join([*told, *shown(reports)]))
    first = reports[0] if reports else {}
    values = {
        "phase": cell.phase,
        "grade": given,
        "code": first.get("code"),
        "confidence": first.get("confidence"),
        "seconds": seconds,
    }
    return Sample(fault.name, cell.seed, values, wrong)


def printed(output: str) -> list[dict[str, Any]]:
    """The reports of the first failure, as `--error-format json` prints them: one object on a line
    of its own.
    """
    for line in output.splitlines():
        if line.startswith('{"exit_status"'):
            found: list[dict[str, Any]] = json.loads(line)["reports"]
            return found
    return []


def shown(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same as a person reads them."""
    import msgspec

    from rallypoint.diagnosis import render
    from rallypoint.diagnosis.report import Report

    return [render.text(msgspec.convert(dict(report), Report)) + "\n" for report in reports]


# --- many


def cells(faults: Sequence[Fault], seeds: int) -> list[Cell]:
    """Every fault in every phase of it, with seeds from 0 up."""
    return [
        Cell(fault, phase, seed)
        for fault in faults
        for phase in fault.phases
        for seed in range(seeds)
    ]


def measure(faults: Sequence[Fault], seeds: int, *, jobs: int, keep: Path) -> Iterator[Sample]:
    """Samples in the order of the faults, `jobs` cells at a time. Says what was not right, and
    where its output is.
    """
    wanted = [cell for cell in cells(faults, seeds) if _possible(cell.fault)]
    right = 0
    with ThreadPoolExecutor(jobs) as pool:
        for number, (cell, sample) in enumerate(
            zip(wanted, pool.map(lambda one: judge(one, keep / one.folder), wanted), strict=True), 1
        ):
            right += sample.values.get("grade") == "right"
            if sample.note:
                given = sample.values.get("grade", "not done")
                say(f"  {cell}: {given}: {sample.note}; see {keep / cell.folder / 'output'}")
            if number % 10 == 0 or number == len(wanted):
                say(f"  {number} of {len(wanted)} cells, {right} right")
            yield sample


def _possible(fault: Fault) -> bool:
    """A file system is mounted by root only."""
    possible = fault.beside != "a full disk" or os.geteuid() == 0
    if not possible:
        say(f"  {fault.name}: left out, since it needs root")
    return possible
