"""Several nodes: how soon their ranks meet, and how soon each node knows of a fault and is free.

The nodes are network namespaces of this machine (`tests/nodes/netns.py`). `rallypoint run` and
torchrun get the same command lines, but for the secret that rallypoint asks for.
"""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.nodes.netns import Cluster, Node

from bench import harness, store
from bench.harness import JOBS, Run, rallypoint, say, torchrun
from bench.samples import Sample, Value

OURS, C10D, STATIC = "rallypoint", "torchrun c10d", "torchrun static"

IMPORT = "import torch"
"""An interpreter per processor that imports torch: no launcher can start ranks sooner."""

TLS = "rallypoint, TLS"
"""A client from another host with `--tls`; without it that is `store.TCP`."""

PORT = 29500

START_TIMEOUT = 120.0
"""Seconds for sixteen ranks to come up on two processors under the slowest peer, three times over."""

WAIT = 40.0
"""Seconds after a fault in which a node must know and be free; then it counts as still waiting."""

REPORT = {
    OURS: r"^(error|stopped)\[[a-z-]+\]: ",
    C10D: r"^Root Cause \(first observed failure\)",
    STATIC: r"^Root Cause \(first observed failure\)",
}


def command(who: str, node: Node, ranks: int, job: str, folder: Path, script: str) -> list[str]:
    """Return the command line of one node."""
    cluster = node.cluster
    options = ["--nnodes", str(cluster.count), "--nproc-per-node", str(ranks)]
    options += ["--node-rank", str(node.number)]  # torchrun's c10d gives places as nodes come
    if who == STATIC:
        options += ["--master-addr", cluster[0].address, "--master-port", str(PORT)]
    else:
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{cluster[0].name}:{PORT}"]
        options += ["--rdzv-id", job]
    if who == OURS:
        secret = folder / "secret"
        if not secret.exists():
            secret.touch(0o600)
            secret.write_text(secrets.token_hex(32))
        return [*rallypoint(), "run", *options, "--secret-file", str(secret), str(JOBS / script)]
    return [*torchrun(), *options, str(JOBS / script)]


@dataclass
class Job:
    """One job on all nodes: a run per node, and when each knew and was free."""

    cluster: Cluster
    who: str
    ranks: int  # of each node
    runs: list[Run] = field(default_factory=list)

    @property
    def began(self) -> float:
        """Moment of the last command."""
        return max(run.began for run in self.runs)

    def wait_for_marks(self, name: str, timeout: float = START_TIMEOUT) -> list[harness.Marked]:
        """Return the marks of that name, of all ranks of all nodes; fewer when one has ended or the
        time is up.
        """
        until = time.monotonic() + timeout
        found: list[harness.Marked] = []
        for run in self.runs:
            found += run.wait_for_marks(name, self.ranks, max(0.0, until - time.monotonic()))
        return found

    @property
    def complete(self) -> int:
        """Number of ranks of all nodes."""
        return self.ranks * self.cluster.count

    def watch_ends(self, timeout: float) -> list[float | None]:
        """Return, for each node, the moment at which no process of it was left; None: there is
        one.
        """
        ended: list[float | None] = [None] * len(self.runs)
        until = time.monotonic() + timeout
        while None in ended and time.monotonic() < until:
            for run in self.runs:
                run.process.poll()
            at, living = time.monotonic(), self.cluster.processes()
            for number, node in enumerate(self.cluster.nodes):
                if ended[number] is None and not living[node]:
                    ended[number] = at
            time.sleep(harness.LOOK)
        return ended

    def reported(self) -> list[float | None]:
        """Return, for each node, the moment of its report."""
        for run in self.runs:
            run.output()
        return [run.printed_at(REPORT[self.who]) for run in self.runs]

    def said(self) -> str:
        """Return the first line that each node printed, once."""
        lines = [run.output().strip().partition("\n")[0][:120] for run in self.runs]
        return " | ".join(dict.fromkeys(filter(None, lines)))


@contextmanager
def own_cluster(count: int) -> Iterator[Cluster]:
    """Make a cluster in a folder of its own, which goes with it."""
    with (
        tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as folder,
        Cluster(count, Path(folder) / "cluster") as made,
    ):
        yield made


@contextmanager
def job(
    cluster: Cluster, who: str, ranks: int, script: str, *options: str, **extra: str
) -> Iterator[Job]:
    """Start a job on all nodes, node 0 first; afterwards the cluster is as new."""
    folder = Path(tempfile.mkdtemp(prefix="rallypoint-nodes-", dir=cluster.folder))
    name = secrets.token_hex(4)
    with ExitStack() as stack:
        stack.callback(cluster.reset, 0.0)
        made = Job(cluster, who, ranks)
        for node in cluster.nodes:
            argv = command(who, node, ranks, name, folder, script)
            argv[-1:-1] = options
            inside = node.inside(argv, folder)
            own = folder / node.name
            run = Run(inside, folder=own, HOME=str(node.home), BENCH_FOLDER=str(folder), **extra)
            made.runs.append(stack.enter_context(run))
        yield made


# --- the start


def first_all_reduce(nodes: int, ranks: int, turns: int, peers: Sequence[str]) -> Iterator[Sample]:
    """Seconds from the last node's command to the end of the last rank's first all_reduce."""
    with own_cluster(nodes) as cluster:
        for turn in range(turns):
            yield imports(turn)
            for who in (OURS, *peers):
                with job(cluster, who, ranks, "first_all_reduce.py") as started:
                    marks = started.wait_for_marks("reduced")
                    values: dict[str, Value] = {"seconds": None}
                    note = ""
                    if len(marks) == started.complete:
                        values["seconds"] = max(mark.at for mark in marks) - started.began
                        values["status"] = max(run.wait(60) or 0 for run in started.runs)
                    else:
                        note = f"{len(marks)} of {started.complete} ranks came: {started.said()}"
                say(f"  turn {turn}  {who:<15} {shown(values)}{note}")
                yield Sample(who, turn, values, note)


def imports(turn: int) -> Sample:
    """Measure an interpreter per processor that imports torch, all at the same time."""
    with ExitStack() as stack:
        alone = [sys.executable, str(JOBS / "only_import.py")]
        runs = [stack.enter_context(Run(alone)) for _ in range(2)]
        marks = [mark for run in runs for mark in run.wait_for_marks("imported", 1, 60)]
        began = max(run.began for run in runs)
    complete = len(marks) == len(runs)
    values: dict[str, Value] = {
        "seconds": max(mark.at for mark in marks) - began if complete else None
    }
    say(f"  turn {turn}  {IMPORT:<15} {shown(values)}")
    return Sample(IMPORT, turn, values)


# --- faults


def _kill_rank(job: Job, number: int) -> None:
    first = min(job.runs[number].marks("looping"), key=lambda mark: mark.rank)
    harness.send(first.pid, signal.SIGKILL)


FAULTS: Mapping[str, Callable[[Job, int], None]] = {
    "rank-killed": _kill_rank,
    "agent-killed": lambda job, number: job.runs[number].process.kill(),
    "node-killed": lambda job, number: job.cluster[number].kill(),
    "node-frozen": lambda job, number: job.cluster[number].freeze(),
    "link-down": lambda job, number: job.cluster[number].unplug(),
    "dropped": lambda job, number: job.cluster[number].drop(),
    "sent-dropped": lambda job, number: job.cluster[number].drop(received=False),
    "received-dropped": lambda job, number: job.cluster[number].drop(sent=False),
}
"""Name of a fault, and how it is done to a node while all ranks reduce."""

CASES: Mapping[str, tuple[str, int]] = {
    **{name: (name, 1) for name in FAULTS if name != "received-dropped"},
    "lead-killed": ("node-killed", 0),
}
"""Name of a case, its fault and the number of the node to which it happens."""


def fault(name: str, nodes: int, ranks: int, turns: int, peers: Sequence[str]) -> Iterator[Sample]:
    """Seconds from a fault until every other node has said so, until no process of it is left, and
    until none is left of the node to which it happened.
    """
    what, hit = CASES[name]
    with own_cluster(nodes) as cluster:
        for turn in range(turns):
            for who in (OURS, *peers):
                with job(cluster, who, ranks, "loop.py") as started:
                    marks = started.wait_for_marks("looping")
                    if len(marks) < started.complete:
                        note = f"{len(marks)} of {started.complete} ranks came: {started.said()}"
                        say(f"  turn {turn}  {who:<15} {note}")
                        yield Sample(who, turn, {}, note)
                        continue
                    at = time.monotonic()
                    FAULTS[what](started, hit)
                    ended = started.watch_ends(WAIT)
                    values = _times(at, hit, ended, started.reported())
                say(f"  turn {turn}  {who:<15} {shown(values)}")
                yield Sample(who, turn, values)


def _times(
    at: float, hit: int, ended: list[float | None], told: list[float | None]
) -> dict[str, Value]:
    """Seconds after the fault: `known` and `free` of the slowest other node, `gone` of the hit one;
    None: not within WAIT.
    """

    def last(moments: list[float | None]) -> float | None:
        seconds = [moment - at for moment in moments if moment is not None]
        return max(seconds) if len(seconds) == len(moments) else None

    def others(moments: list[float | None]) -> list[float | None]:
        return [moment for number, moment in enumerate(moments) if number != hit]

    return {
        "known": last(others(told)),
        "free": last(others(ended)),
        "gone": last([ended[hit]]),
        "waiting": sum(moment is None for moment in others(ended)),
    }


# --- TLS


def joining(clients: int, turns: int) -> Iterator[Sample]:
    """Seconds until so many processes have connected to one server, and passed a barrier: as the
    launchers of a job do at the lead, here over loopback.
    """

    def one(party: str, turn: int) -> Sample:
        return store.sampled(
            party, turn, store.crowd(party, "join", clients, limit=300.0), store.joined
        )

    yield from store.take_turns(turns, (store.TCP, TLS), one)


def values(turns: int, *, seconds: float = 1.0) -> Iterator[Sample]:
    """Bytes per second of one client that writes a large value, and reads it."""
    sizes = (store.BULK_BYTES,)

    def one(party: str, turn: int) -> Sample:
        outcome = store.crowd(party, "values", 1, sizes=sizes, seconds=seconds, most=2000)
        return store.sampled(party, turn, outcome, store.bytes_per_second)

    yield from store.take_turns(turns, (store.TCP, TLS), one)


def shown(values: Mapping[str, Value]) -> str:
    """Return values of a sample as a line of progress."""
    shown = {
        name: f"{value:.3f} s" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }
    return "  ".join(f"{name} {text}" for name, text in shown.items())
