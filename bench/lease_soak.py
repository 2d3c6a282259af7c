"""`scripts/soak store-leases`: nodes that live keep their sessions, though the machine is overloaded,
their lead stands still, or packets are lost. Stub agents (`jobs/lease_node.py`), real sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import JOBS, environment
from bench.outcome import Outcome

TTL = 2.0  # seconds, of a node's lease
SECONDS = 40.0  # of each repetition
NODES = 8
CROWD = 16  # busy processes for each processor
FREEZE = 1.5  # seconds that the lead stands still
QUOTA = 0.2  # of one processor, for a node and two busy processes
LOSS = 20  # of a hundred packets

LATE = 30.0  # seconds for a process to start or end on a busy machine

_DROP = f"""table inet t {{
 chain i {{
  type filter hook input priority 0
  meta iifname lo numgen random mod 100 < {LOSS} drop
 }}
}}
"""

Way = list[str]
"""What stands before a command, so that it runs in the network of this repetition."""


def leases(
    chance: random.Random,
    number: int,
    folder: Path,
    *,
    nodes: int = NODES,
    seconds: float = SECONDS,
    freeze: float = FREEZE,
) -> Outcome:
    """No node may be lost, nor believe so. Which fault it is goes round with the number."""
    folder.mkdir(parents=True, exist_ok=True)
    fault = list(FAULTS)[number % len(FAULTS)]
    outcome = Outcome(fault)
    log = folder / "output"
    with contextlib.ExitStack() as stack:
        try:
            way = stack.enter_context(_network()) if fault == "loss" else []
        except OSError as error:
            outcome.what = f"{fault}: not here ({error})"
            return outcome
        lead = stack.enter_context(_started(way, log, "lead"))
        port = _line(lead)
        members = [
            stack.enter_context(_started(way, log, "node", port, str(index), str(TTL)))
            for index in range(nodes)
        ]
        for member in members:
            _line(member)
        try:
            with FAULTS[fault](way, members):
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    if fault == "frozen":
                        _stand_still(lead, freeze)
                        time.sleep(chance.uniform(TTL / 4, TTL))
                    else:
                        time.sleep(0.5)
        except OSError as error:
            outcome.what = f"{fault}: not here ({error})"
            return outcome
        ended = time.monotonic()
        found = [json.loads(member.communicate(timeout=LATE)[0]) for member in members]
        told = [json.loads(line) for line in lead.communicate(timeout=LATE)[0].splitlines()]
        lost = [one for one in told if one["at"] < ended]
    outcome.times = {"longest silence": max(TTL - one["least"] for one in found)}
    outcome.counts = {
        "node seconds": round(nodes * seconds),
        "reconnects": sum(one["reconnects"] for one in found),
    }
    if lost:
        outcome.wrong.append(f"{len(lost)} of {nodes} nodes were lost")
    for one in found:
        if one["least"] == 0.0 or one["said"]:
            outcome.wrong.append(f"node {one['name']} believed to be lost: {one['said']}")
    return outcome


@contextlib.contextmanager
def _started(way: Way, log: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A stub, which is killed at the end."""
    command = [*way, sys.executable, str(JOBS / "lease_node.py"), *arguments]
    with log.open("a") as errors, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        env=environment(),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a stub did not start: {process.args!r}")
    return line


def _stand_still(process: subprocess.Popen[str], seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def _network() -> Iterator[Way]:
    """A network of its own, with nothing but the loopback. Raises OSError where none can be made."""
    script = "ip link set lo up && echo made && exec cat"
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"made\n":
            raise OSError("no network namespace can be made")
        yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


@contextlib.contextmanager
def _loss(way: Way, members: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Of all packets, one in five vanishes."""
    command = [*way, "nft", "-f", "-"]
    done = subprocess.run(command, input=_DROP, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    yield
    subprocess.run([*way, "nft", "flush", "ruleset"], check=True)


@contextlib.contextmanager
def _busy(count: int) -> Iterator[list[int]]:
    command = [sys.executable, "-c", "while True: pass"]
    crowd = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [process.pid for process in crowd]
    finally:
        for process in crowd:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _load(way: Way, members: list[subprocess.Popen[str]]) -> Iterator[None]:
    """So many busy processes beside the nodes for each processor."""
    with _busy(CROWD * (os.cpu_count() or 1)):
        yield


@contextlib.contextmanager
def _quota(way: Way, members: list[subprocess.Popen[str]]) -> Iterator[None]:
    """A control group for each node and two busy processes, as a container's is."""
    first = Path("/sys/fs/cgroup/cpu")
    version = 1 if first.is_dir() else 2
    with _busy(2 * len(members)) as crowd, contextlib.ExitStack() as stack:
        for index, member in enumerate(members):
            group = (first if version == 1 else first.parent) / f"lease_soak_{member.pid}"
            group.mkdir()
            stack.callback(group.rmdir)
            if version == 1:
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * QUOTA)))
            else:
                (group / "cpu.max").write_text(f"{round(100_000 * QUOTA)} 100000")
            for pid in (member.pid, *crowd[2 * index : 2 * index + 2]):
                (group / "cgroup.procs").write_text(str(pid))
                stack.callback((group.parent / "cgroup.procs").write_text, str(pid))
        yield


@contextlib.contextmanager
def _frozen(way: Way, members: list[subprocess.Popen[str]]) -> Iterator[None]:
    """The lead stands still again and again: `leases` does that."""
    yield


Fault = Callable[[Way, list[subprocess.Popen[str]]], contextlib.AbstractContextManager[None]]

FAULTS: dict[str, Fault] = {"load": _load, "quota": _quota, "frozen": _frozen, "loss": _loss}
