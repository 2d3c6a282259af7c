"""Pool of warm agents of the calling program: each is started when it is first needed, used again,
and ends with the program.

For each agent the calling program has a child, its pidfd and a socket, and nothing else: no thread,
no signal handler. Threads that launch at the same time have an agent each.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint.host import process_status, processes, system_calls
from rallypoint.host.fd_passing import OwnedFds, file_behind
from rallypoint.launcher import late_variables, spawn

IDLE_MOST = 2
"""Maximum agents that are kept, with the one at work: a program that alternates between two (with
and without `preload`, one rank and several) finds both warm. Each has an interpreter with torch."""

DISCARD_PATIENCE = 10.0
"""Maximum seconds in which a discarded agent ends: it kills its ranks in milliseconds, or in 2 s if
one is in the kernel."""


class AgentKey(NamedTuple):
    """Properties by which an idle agent is chosen: the variables that its template has read, and
    its modules."""

    python: str
    preload: tuple[str, ...]
    paths: tuple[str, ...]  # where those were looked for
    loaded: tuple[tuple[str, str], ...]  # variables that libraries read when they load
    user: int  # a program may have given up root since


def _pair() -> list[socket.socket]:
    """Return two connected sockets, as `protocol.pair()`, which is not loaded yet.

    Their descriptors are above those of the standard streams: what a program writes to one that it
    has closed must not go into them, and the standby has streams of its own.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        return [
            socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
            for end in (near, far)
        ]


class PooledAgent:
    """A standby process and the socket to it. `environment`: that of its template."""

    def __init__(self, key: AgentKey, environment: Mapping[str, str]) -> None:
        self.line, theirs = _pair()
        self.key = key
        self.environment = dict(environment)
        self.pid = 0
        self._pidfd = OwnedFds()
        self._files = [file_behind(self.line.fileno())]
        self._parent = os.getpid()
        line = theirs.fileno()
        try:
            self.pid = spawn.spawn(
                ["-c", spawn.STANDBY % (line, self._parent)],
                self.environment,
                # A descriptor that is put where it is loses its close-on-exec flag, in the new
                # process alone: no process that another thread starts meanwhile gets it.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, line, line),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT],
                setsigmask=spawn.NOTICES,  # until it has handlers for them
            )
            self._files.append(file_behind(self._pidfd.add(system_calls.pidfd_open(self.pid))))
        except BaseException:
            if self.pid:
                _leaving[self.pid] = self._pidfd
            self.line.close()
            raise
        finally:
            theirs.close()
        _agents.add(self)

    def __repr__(self) -> str:
        return f"<PooledAgent pid {self.pid}>"

    @property
    def ends(self) -> Sequence[int]:
        """Descriptors that are readable when the process has ended; none once it was reaped.

        The socket may not tell: a process that another thread forks while the agent is being
        started has the agent's end of it, too.
        """
        return self._pidfd.fds

    @property
    def usable(self) -> bool:
        """Tell whether the agent still listens, as far as that can be seen without asking it."""
        self._forget_lost()
        poll = select.poll()
        for pidfd in self._pidfd.fds:
            poll.register(pidfd, select.POLLIN)
        if poll.poll(0):
            return False
        try:
            self.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # between two calls it sends nothing: it has closed the line, or failed

    def continue_if_stopped(self) -> None:
        """Continue the agent if it is stopped (SIGSTOP), and print a line about it.

        A call without a timeout would not end otherwise. When the whole program is suspended, the
        caller is stopped, too, and does not come here.
        """
        if process_status.is_stopped(self.pid):
            sys.stderr.write(
                f"rallypoint: the launcher's process (pid {self.pid}) was stopped (SIGSTOP): it is continued\n"
            )
            for pidfd in self._pidfd.fds:
                processes.send(pidfd, signal.SIGCONT)

    def discard(self, patience: float | None = None) -> None:
        """End the agent and its ranks, and wait for that. May be called twice.

        After `patience` seconds (DISCARD_PATIENCE without it) the agent is killed, and its guard
        ends its ranks. In a forked child only the descriptors are closed.
        """
        self.abandon()
        if os.getpid() == self._parent:
            if not processes.wait_for_ends(
                self._pidfd.fds, DISCARD_PATIENCE if patience is None else patience
            ):
                for pidfd in self._pidfd.fds:
                    processes.send(pidfd, signal.SIGKILL)
                processes.wait_for_ends(self._pidfd.fds, DISCARD_PATIENCE)
            _reap()

    def abandon(self) -> None:
        """End the agent and its ranks without waiting."""
        self._forget_lost()
        if os.getpid() != self._parent:
            self._pidfd.close()
        else:
            if self._pidfd.fds:
                _leaving[self.pid] = self._pidfd
            with contextlib.suppress(OSError):  # it has ended
                # A child that was forked meanwhile may have the socket, too.
                self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()

    def _forget_lost(self) -> None:
        """Forget the descriptors if the program has closed one of them, as daemons do: its own
        files may have the numbers. The agent ends with its line."""
        fds = self.line.fileno(), *self._pidfd.fds
        files = [file_behind(fd) for fd in fds]
        if fds[0] >= 0 and files != self._files:
            _leaving[self.pid] = OwnedFds()
            self._pidfd.give()
            if files[0] != self._files[0]:
                self.line.detach()
            self.line.close()

    def __del__(self) -> None:
        """Abandon an agent that was not returned: an exception (Ctrl-C, at any moment) came before."""
        if hasattr(self, "_parent") and self.line.fileno() >= 0:
            self.abandon()


_leaving: dict[int, OwnedFds] = {}  # pid -> pidfd of discarded agents that are not reaped yet


def _reap() -> None:
    """Reap discarded agents that have ended."""
    for pid, pidfd in list(_leaving.items()):
        try:
            done = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:  # the program reaps all its children itself
            done = True
        if done:
            _leaving.pop(pid, None)
            pidfd.close()


_agents: weakref.WeakSet[PooledAgent] = weakref.WeakSet()  # all that there are
_idle: list[
    PooledAgent
    # without a lock, which Ctrl-C or a fork could leave locked: what a thread does to it is one
    # step each
] = []


def acquire(preload: tuple[str, ...], environment: Mapping[str, str]) -> PooledAgent:
    """Return an idle agent that fits, or a new one. It is the caller's until `release` or
    `PooledAgent.discard`. `EnvironmentProblem` as `check_machine`."""
    paths = tuple(path for path in sys.path if isinstance(path, str)) if preload else ()
    loaded = late_variables.read_when_loaded(environment)
    key = AgentKey(sys.executable, preload, paths, loaded, os.geteuid())
    _reap()
    for agent in list(_idle):
        if agent.key == key and _taken(agent):
            if agent.usable:
                return agent
            agent.discard()  # it was killed since
    # Others have another environment or preload, which the program has mostly left behind.
    for agent in list(_idle)[: 1 - IDLE_MOST]:
        if _taken(agent):
            agent.discard()
    processes.check_machine()  # what the agent itself says, nobody expects
    return PooledAgent(key, environment)


def _taken(agent: PooledAgent) -> bool:
    """Take an idle agent; tell whether it is this thread's, and no other was faster."""
    try:
        _idle.remove(agent)
    except ValueError:
        return False
    return True


def release(agent: PooledAgent) -> None:
    """Return an agent to the pool."""
    _idle.append(agent)
    for spare in _idle[:-IDLE_MOST]:
        if _taken(spare):
            spare.discard()


def _after_fork() -> None:
    """Close a forked child's copies of the sockets: with them open, the agents would not see the
    end of the parent."""
    _idle.clear()
    for agent in list(_agents):  # also those that other threads of the parent use
        agent.abandon()
    _leaving.clear()


os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """End the agents with the program: the collector would warn of an open socket."""
    while _idle:
        _idle.pop().abandon()


atexit.register(_at_exit)
