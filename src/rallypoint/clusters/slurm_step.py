"""Step of Slurm's that the launcher in a batch script starts on all nodes of the job.

The launcher in the script is no node of its job: it starts srun, stops the step as it is stopped
itself, and ends as srun does. Where node 0 listens, and the secret, travel from node 0 to the
script's launcher by a Unix socket of this user, and from there to all nodes on srun's standard
input, which is Slurm's own authenticated stream.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rallypoint.clusters.slurm import OWN_STEP
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import system_calls, unix_sockets
from rallypoint.host.signals import SignalLog

SRUN = (
    "srun", "--quiet", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--overlap",
    "--cpu-bind=none", "--mpi=none", "--input=all", "--export=ALL",
)  # fmt: skip
"""One launcher on each node of the job, which has all that the job has there, and of which none is
ended because another one has ended.
"""

ASKED_OF_TASKS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK"),
    *("SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION"),
    "SLURM_STEP",
)
"""Beginnings of variables that are options of srun's too: of the job's tasks, and a launcher is
none of these.
"""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)

TALK = 5.0
"""Seconds for a command of Slurm's that asks its controller."""

LINGER = 5.0
"""Seconds that srun gets to end once node 0's launcher has: of a node that is lost Slurm knows only
after minutes. As long again after each signal that then ends it.
"""

TRY_AGAIN = 75
"""Exit status of a job that may do better elsewhere (EX_TEMPFAIL)."""

_script: socket.socket | None = None
"""Connection of node 0's launcher to the one in the batch script, until it has said its status."""


def command(name: str, launcher: Sequence[str]) -> list[str]:
    """Return the command that starts `launcher` on all nodes of a job, in a step of this name."""
    return [*SRUN, f"--job-name={name}", *launcher]


def environment(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the environment of the step: without what was asked for the job's tasks."""
    kept = {name: text for name, text in environ.items() if not name.startswith(ASKED_OF_TASKS)}
    tasks = environ.get("SLURM_TASKS_PER_NODE", "") if "SLURM_NTASKS" in environ else ""
    return {**kept, OWN_STEP: f"{tasks or 1} {path}"}


def start(environ: Mapping[str, str]) -> int:
    """Run this same command as a step on all nodes; return its exit status.

    Raises EnvironmentProblem `cluster-unclear` where srun cannot be started.
    """
    launcher = [sys.executable, *sys.orig_argv[1:]]
    step = f"rallypoint-{secrets.token_hex(4)}"
    listener, path = unix_sockets.private_socket("step")
    signals = SignalLog((*STOPS, *NOTICES))
    srun: subprocess.Popen[bytes] | None = None
    try:
        srun = subprocess.Popen(
            command(step, launcher),
            stdin=subprocess.PIPE,
            env=environment(environ, path),
            process_group=0,  # a signal for the group of this launcher would end srun at once
        )
        return _Step(environ, step, srun).run(listener, signals)
    except OSError as error:
        if srun is not None:
            raise
        raise EnvironmentProblem(
            "cluster-unclear",
            f"srun cannot be started: {os.strerror(error.errno or 0)}",
            why=("the launcher in a batch script of Slurm's starts one on each node with it",),
            help=(("run on this node alone", "rallypoint run --nnodes 1 ..."),),
        ) from error
    finally:
        if srun is not None and srun.returncode is None:
            srun.terminate()  # nobody follows the step any more
        signals.close()
        listener.close()
        unix_sockets.remove(path)


class _Step:
    """Step that runs, as the launcher in the batch script sees it."""

    def __init__(
        self, environ: Mapping[str, str], name: str, srun: subprocess.Popen[bytes]
    ) -> None:
        self._job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
        self._name = name
        self._srun = srun
        self._asked = False  # to stop
        self._status = b""  # of node 0's launcher, as it says it
        self._ending = [signal.SIGTERM, signal.SIGKILL]  # for srun, when it stays too long

    def run(self, listener: socket.socket, signals: SignalLog) -> int:
        """Hand on what node 0 says, and signals, until srun has ended; return the exit status.

        That is the one of node 0's launcher: srun has the greatest of all, and the launcher of a
        node that is lost has 137.
        """
        ended = system_calls.pidfd_open(self._srun.pid)
        waiting: list[int | socket.socket] = [ended, signals.fileno(), listener]
        node: socket.socket | None = None
        over = False  # node 0's launcher has ended
        try:
            while True:
                ready, _, _ = select.select(waiting, (), (), LINGER if over else None)
                for number in signals.read():
                    self._hand_on(number)
                # Before the end of srun: both may have come while a signal was handed on.
                if node is not None and node in ready:
                    more = node.recv(64)
                    self._status += more
                    if not more:
                        over = True
                        waiting.remove(node)
                if ended in ready:
                    return self._result(over)
                if listener in ready:
                    node, _ = listener.accept()
                    waiting[2] = node
                    self._tell_all(node)
                elif over and not ready and self._ending:
                    self._srun.send_signal(self._ending.pop(0))
        finally:
            os.close(ended)
            if node is not None:
                node.close()

    def _result(self, over: bool) -> int:
        """Return the exit status of the job, once srun has ended."""
        status = self._srun.wait()
        if self._status.strip().isdigit():
            return int(self._status)
        status = status if status >= 0 else 128 - status
        if over and not self._asked and status == 128 + signal.SIGKILL:
            # Node 0's launcher was killed; or it has refused to start, and the others waited for it.
            return TRY_AGAIN if len(self._ending) == 2 else 1
        return status

    def _tell_all(self, node: socket.socket) -> None:
        """Give all nodes what node 0 says at first. Where it stands still instead, they are told
        nothing, and end.
        """
        node.settimeout(TALK)
        try:
            # Unbuffered: the status may have come behind it.
            with node.makefile("rb", buffering=0) as text:
                said = text.readline()
        except TimeoutError:
            said = b""
        assert self._srun.stdin is not None
        try:
            self._srun.stdin.write(said)
            self._srun.stdin.close()
        except BrokenPipeError:
            pass  # srun has ended: that is told by its status

    def _hand_on(self, number: signal.Signals) -> None:
        """Have the launchers of the step get a signal that this one got.

        srun itself hands on what means nothing to it, and ends the step with SIGKILL for the rest.
        Where Slurm is ending the job the launchers have had SIGTERM already: it refuses another.
        """
        if number in NOTICES:
            self._srun.send_signal(number)
        elif self._asked:
            self._srun.send_signal(signal.SIGTERM)
        else:
            self._asked = True
            steps = self._ask("squeue", "--noheader", f"--jobs={self._job}", "--steps",
                              "--format=%i %j")  # fmt: skip
            own = [line.split()[0] for line in steps if line.split()[1:] == [self._name]]
            if own:
                self._ask("scancel", f"--signal={number.name.removeprefix('SIG')}", *own)
            elif self._srun.poll() is None:
                self._srun.send_signal(signal.SIGTERM)

    @staticmethod
    def _ask(*argv: str) -> list[str]:
        """Return the lines that a command of Slurm's prints; [] when it fails."""
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, timeout=TALK, check=False, process_group=0,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []


def share(environ: Mapping[str, str], text: str, timeout: float) -> str:
    """Return what node 0 has said (`text` on node 0, "" elsewhere), as srun's standard input has it.

    Raises EnvironmentProblem `join-timeout` when that says nothing for so many seconds,
    `cluster-unclear` when it ends.
    """
    global _script
    path = environ[OWN_STEP].partition(" ")[2]
    os.environ.pop(OWN_STEP, None)  # what a rank starts is no launcher of this step
    if text:
        try:
            _script = socket.socket(socket.AF_UNIX)
            _script.connect(path)
            _script.sendall(text.encode() + b"\n")
        except OSError as error:
            raise _unheard(
                f"node 0 cannot reach it here: {os.strerror(error.errno or 0)}"
            ) from error
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([0], (), (), timeout)[0]:
            raise EnvironmentProblem(
                "join-timeout", f"node 0 of the job was not heard of in {timeout:g} s"
            )
        more = os.read(0, 1)  # no more than the line: the rest is the program's
        if not more:
            raise _unheard("standard input ended before node 0 was heard of")
        said += more
    return said.decode().strip()


def tell_status(status: int) -> None:
    """Tell the launcher in the batch script how the job has ended, if this is node 0's."""
    if _script is not None:
        with _script:
            try:
                _script.sendall(b"%d\n" % status)
            except OSError:
                pass  # it was killed


def _unheard(why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        "cluster-unclear",
        "the launcher in the batch script does not tell where node 0 is",
        why=(why,),
        help=(("let srun start one on each node", "srun --ntasks-per-node=1 rallypoint run ..."),),
    )
