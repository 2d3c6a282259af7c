"""Ray as a cluster: one launcher on each node, in an actor that has the node's CPUs and GPUs."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rallypoint.clock import Clock
from rallypoint.clusters.cluster import Cluster, Files
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import memory_files, processes

MARK = "RALLYPOINT_RAY"
"""Variable of a launcher in an actor: the actor's pid, its node, their number, three descriptors."""

READ_PATIENCE = 0.2
"""Seconds in which an actor waits for something to tell: it hears of a signal after that."""

END_PATIENCE = 10.0
"""Seconds without a word that the other nodes get when one has ended: our lead ends them together,
and Ray takes longer to see that a node is gone.
"""

CONNECT_TIMEOUT = 5.0
"""Seconds for the head of the cluster to accept a connection: as long as Ray gives it at once."""

PLACE_PATIENCE = 600.0
"""Seconds in which Ray must have the CPUs and GPUs free: as long as nodes may take to join."""

SAY_WAITING = 5.0
"""Seconds after which a person is told that Ray has them not, then twice as many."""

Show = Callable[[int, bytes], None]  # descriptor (1 or 2) and what goes there


# --- in the launcher of a node


def look(environ: Mapping[str, str], files: Files) -> Cluster | None:
    """Return what the actor of this launcher has told it."""
    _, node, nodes, *_ = map(int, environ[MARK].split())
    said = f"node {node} of {nodes}, from {MARK}"
    return Cluster(
        name="Ray", nodes=nodes, node=node, exchange="ray", one_screen=True, because=(said,)
    )


def share(environ: Mapping[str, str], text: str, timeout: float) -> str:
    """Return what node 0 has given as `text`: it goes through the actors. Raises EnvironmentProblem
    `join-timeout` when it has not come within `timeout` seconds.
    """
    *_, told, heard, _ = map(int, environ[MARK].split())
    if text:
        os.write(told, f"{text}\n".encode())
    if not select.select([heard], [], [], timeout)[0]:
        raise EnvironmentProblem(
            "join-timeout", f"node 0 has not told where it is within {timeout:g} s"
        )
    with open(heard, closefd=False) as file:
        return file.readline()


def begin() -> int:
    """Have this process, a launcher, end with its actor. Returns the memfd of its input and result."""
    processes.die_with(int(os.environ[MARK].split()[0]))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT
    return int(os.environ[MARK].split()[-1])


# --- in an actor


class LauncherOutput(NamedTuple):
    """Words of a launcher since the last look, and its end."""

    output: list[tuple[int, bytes]]
    offer: str = ""  # what node 0 tells the others
    status: int | None = None
    result: bytes = b""


class LauncherActor:
    """Actor with the launcher of one node."""

    def __init__(self, words: Sequence[str], folder: str, threads: str, box: bytes) -> None:
        """`words`: behind the interpreter. `threads`: OMP_NUM_THREADS, in the place of Ray's."""
        self._words = words
        self._folder = folder if os.path.isdir(folder) else None
        self._environ = {**os.environ, "OMP_NUM_THREADS": threads}
        self._box = memory_files.create("rallypoint-box", box)

    def start(self, node: int, nodes: int) -> None:
        """Start the launcher."""
        self._told, told = os.pipe()
        heard, self._heard = os.pipe()
        fds = (told, heard, self._box)
        mark = " ".join(map(str, (os.getpid(), node, nodes, *fds)))
        self._launcher = subprocess.Popen(
            [sys.executable, *self._words],
            env={**self._environ, MARK: mark},
            cwd=self._folder,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.close(told)
        os.close(heard)
        assert self._launcher.stdout is not None
        assert self._launcher.stderr is not None
        self._streams = {self._launcher.stdout.fileno(): 1, self._launcher.stderr.fileno(): 2}
        self._streams[self._told] = 0
        self._poll = select.poll()
        self._end = os.pidfd_open(self._launcher.pid)
        for fd in (*self._streams, self._end):
            self._poll.register(fd, select.POLLIN)

    def tell(self, offer: str) -> None:
        """Hand over what node 0 has told."""
        os.write(self._heard, offer.encode())

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        self._launcher.send_signal(number)

    def read(self) -> LauncherOutput:
        """Return what there is, after a short wait for it."""
        output: list[tuple[int, bytes]] = []
        offer, wait = "", READ_PATIENCE * 1000
        while ready := {fd for fd, _ in self._poll.poll(wait)} - {self._end}:
            for fd in ready:
                data = os.read(fd, 1 << 16)
                if not data:
                    self._poll.unregister(fd)
                elif self._streams[fd]:
                    output.append((self._streams[fd], data))
                else:
                    offer += data.decode()
            if sum(len(data) for _, data in output) > 1 << 20:
                return LauncherOutput(output, offer)
            wait = 0
        status = self._launcher.poll()
        if output or offer or status is None:
            return LauncherOutput(output, offer)
        return LauncherOutput([], "", status, memory_files.content(self._box))


# --- in the driver


def launch_on_nodes(
    words: Callable[[int], Sequence[str]],
    *,
    nnodes: int,
    nproc: int | str | None,
    box: bytes = b"",
    show: Show,
) -> list[tuple[int, bytes] | None]:
    """Start a launcher on each of `nnodes` nodes, and show what they write until they have ended.

    `words` returns the arguments of the interpreter for so many ranks of a node. Returns exit
    status and result of each node, None for one that is lost. Raises EnvironmentProblem
    `ray-unavailable`, and KeyboardInterrupt when the nodes have not ended at the third
    Ctrl-C.
    """
    ray, is_ours = _connected()
    actors: list[Any] = []
    group = None
    signals = _SignalsAsInterrupts()  # Ray has set a handler as it connected
    try:
        cpus, gpus = share_of(
            [node["Resources"] for node in ray.nodes() if node["Alive"]], nnodes, nproc
        )
        placing = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        wanted = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        group = placing.placement_group([wanted] * nnodes, strategy="STRICT_SPREAD")
        _wait_for(ray, group, wanted, nnodes)
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # a CPU is asked for each rank
        for index in range(nnodes):
            at = strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            kind = ray.remote(LauncherActor).options(
                num_cpus=cpus, num_gpus=gpus, scheduling_strategy=at
            )
            actors.append(kind.remote(list(words(cpus)), os.getcwd(), threads, box))
        return _Followed(ray, actors, show).ends()
    except ray.exceptions.RayError as error:
        raise EnvironmentProblem(
            "ray-unavailable",
            "Ray did not start the launchers on its nodes",
            why=(str(error).strip().splitlines()[-1],),
            help=(("each node needs rallypoint, torch and Ray in the same place", ""),),
        ) from error
    finally:
        signals.close()
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            placing.remove_placement_group(group)
        if is_ours:
            ray.shutdown()


def share_of(
    nodes: Sequence[Mapping[str, float]], nnodes: int, nproc: int | str | None
) -> tuple[int, int]:
    """Return the CPUs and GPUs to ask for on each node: a CPU for each rank, and a GPU where the
    cluster has them. Raises EnvironmentProblem `ray-unavailable` where it has not enough of them.
    """
    most = {
        kind: sorted((int(node.get(kind, 0)) for node in nodes), reverse=True)[nnodes - 1 : nnodes]
        for kind in ("CPU", "GPU")
    }
    each = {kind: found[0] if found else 0 for kind, found in most.items()}
    ranks = nproc if isinstance(nproc, int) else 1
    if nproc in ("gpu", "auto", "cpu"):
        ranks = each["CPU" if nproc == "cpu" or (nproc == "auto" and not each["GPU"]) else "GPU"]
    gpus = ranks if each["GPU"] >= ranks else 0
    enough = sum(node.get("CPU", 0) >= ranks and node.get("GPU", 0) >= gpus for node in nodes)
    if ranks and enough >= nnodes:
        return ranks, gpus
    has = "; ".join(
        ", ".join(f"{node.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if node.get(kind))
        or "none"
        for node in nodes
    )
    asked = f"{ranks} CPUs" if ranks else "a GPU"
    raise EnvironmentProblem(
        "ray-unavailable",
        f"the Ray cluster has not {nnodes} {'node' if nnodes == 1 else 'nodes'} with {asked} each",
        why=(
            f"its nodes have: {has}",
            "each rank needs a CPU, and each node is a machine of Ray's",
        ),
        help=(("ask for less, or start Ray on more nodes", "ray start --address=HEAD:6379"),),
    )


def _connected() -> tuple[Any, bool]:
    """Return Ray, connected to a cluster, and whether this call has connected it."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise EnvironmentProblem(
            "ray-unavailable",
            f"Ray is not installed in {sys.executable}",
            help=(
                ("install it on each node", f"{sys.executable} -m pip install 'rallypoint[ray]'"),
            ),
        ) from None
    if ray.is_initialized():
        return ray, False
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "//" not in host:  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        ray.shutdown()  # of a version that does not fit it has connected a half
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise EnvironmentProblem(
            "ray-unavailable",
            "no Ray cluster can be joined"
            if address == "auto"
            else f"the Ray cluster at RAY_ADDRESS={address} cannot be joined",
            why=tuple(lines[:8]),
            help=(
                ("start one, with the same versions of Ray and Python", "ray start --head"),
                ("or name one", "export RAY_ADDRESS=HEAD:6379"),
            ),
        ) from error
    return ray, True


def _wait_for(ray: Any, group: Any, wanted: Mapping[str, int], nnodes: int) -> None:
    """Wait until Ray has the CPUs and GPUs free."""
    clock, told = Clock(), SAY_WAITING
    while not group.wait(1):
        free = ray.available_resources()
        has = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in wanted)
        if clock.elapsed() >= PLACE_PATIENCE:
            raise EnvironmentProblem(
                "ray-unavailable",
                f"Ray had no place for the job within {PLACE_PATIENCE:g} s",
                why=(f"free in the whole cluster: {has}",),
                help=(("look who has them", "ray status"),),
            )
        if clock.elapsed() >= told:
            told = 2 * clock.elapsed()
            asked = " and ".join(f"{number} {kind}" for kind, number in wanted.items())
            sys.stderr.write(
                f"rallypoint: waits for Ray: {asked} on each of {nnodes} nodes; free in the whole cluster: {has}\n"
            )


class _Followed:
    """Launchers on the nodes of a job, followed by the driver until they have ended."""

    def __init__(self, ray: Any, actors: Sequence[Any], show: Show) -> None:
        self._ray = ray
        self._actors = actors
        self._show = show
        self._ends: list[tuple[int, bytes] | None] = [None] * len(actors)
        self._lines: dict[tuple[int, int], bytes] = {}  # by node and descriptor, without their end
        self._clock = Clock()
        self._heard_at = 0.0

    def ends(self) -> list[tuple[int, bytes] | None]:
        ray, actors = self._ray, self._actors
        ray.get([actor.start.remote(node, len(actors)) for node, actor in enumerate(actors)])
        reading = {actor.read.remote(): node for node, actor in enumerate(actors)}
        interrupts = 0
        while reading:
            try:
                self._read(reading)
            except KeyboardInterrupt as interrupt:
                interrupts += 1
                if interrupts > 2:
                    raise
                for node in reading.values():
                    actors[node].signal.remote((*interrupt.args, signal.SIGINT)[0])
        for (_, fd), rest in self._lines.items():
            self._show(fd, rest)
        return self._ends

    def _read(self, reading: dict[Any, int]) -> None:
        ray, now = self._ray, self._clock.elapsed
        ready, _ = ray.wait(list(reading), timeout=1.0)
        for one in ready:
            node = reading[one]
            try:
                said: LauncherOutput = ray.get(one)
            except ray.exceptions.RayActorError:
                del reading[one]
                continue
            self._heard_at = now() if said.output or said.status is not None else self._heard_at
            for fd, data in said.output:
                self._write(node, fd, data)
            if said.offer:
                for actor in self._actors:
                    actor.tell.remote(said.offer)
            del reading[one]
            if said.status is None:
                reading[self._actors[node].read.remote()] = node
            else:
                self._ends[node] = said.status, said.result
        if any(self._ends) and now() - self._heard_at > END_PATIENCE:
            reading.clear()

    def _write(self, node: int, fd: int, data: bytes) -> None:
        """Show whole lines: the nodes' must not mix."""
        data = self._lines.pop((node, fd), b"") + data
        whole = 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))
        if rest := data[whole:]:
            self._lines[node, fd] = rest
        if whole:
            self._show(fd, data[:whole])


class _SignalsAsInterrupts:
    """Handlers that raise KeyboardInterrupt(number) in a program's main thread, at SIGTERM, and at
    SIGINT where the program has no handler for it.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGTERM or signal.getsignal(number) is signal.SIG_DFL:
                with contextlib.suppress(ValueError):  # another thread
                    self._before[number] = signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
