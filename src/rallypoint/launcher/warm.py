"""The caller's warm agents: started when they are first needed, used again, gone with the caller.

The calling program has one child, its pidfd and one socket of ours for each, and nothing else: no thread, no signal handler. Of several
threads that launch at the same time each has an agent of its own.
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

from rallypoint.host import processes, system_calls
from rallypoint.host.held import Held
from rallypoint.launcher import boot, variables

IDLE_MOST = 2
"""Agents that are kept, the one at work counted in: a program that goes to and fro between two (with and without `preload`, one rank
and several) finds both warm. Each holds an interpreter with torch."""

importing = ""
"""What is being imported for a call of `launch`, in a process of ours: "mine, to be preloaded". A call from there would call itself."""

DISMISS_PATIENCE = 10.0
"""Seconds in which an agent has ended that was told to: it kills its ranks, which takes milliseconds, or 2 s with one in the kernel."""


class Key(NamedTuple):
    """An agent whose key is another one cannot be used: its template has read other variables, or imported other modules."""

    python: str
    preload: tuple[str, ...]
    paths: tuple[str, ...]  # where those were looked for
    loaded: tuple[tuple[str, str], ...]  # variables that libraries read when they load


class Agent:
    """A standby process and the line to it. `environment` is what its template has."""

    def __init__(self, key: Key, environment: Mapping[str, str]) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # `channel.pair()`, which is not loaded yet
        self.key = key
        self.environment = dict(environment)
        self.pid = 0
        self._pidfd = Held()
        self._continued = False  # this was said
        self._parent = os.getpid()
        passed = Held()
        try:
            line = passed.add(fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))  # not where its standard streams will be
            self.pid = boot.spawn(
                ["-c", boot.STANDBY % (line, self._parent)],
                self.environment,
                # A descriptor that is put where it is loses its close-on-exec flag, in the new process alone: nobody whom another thread
                # starts meanwhile gets it.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, line, line),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT],
                setsigmask=boot.NOTICES,  # until it has handlers for them
            )
            self._pidfd.add(system_calls.pidfd_open(self.pid))
        except BaseException:
            if self.pid:
                _leaving[self.pid] = self._pidfd
            self.line.close()
            raise
        finally:
            passed.close()
            theirs.close()
        _here.add(self)

    def __repr__(self) -> str:
        return f"<Agent pid {self.pid}>"

    @property
    def ends(self) -> Sequence[int]:
        """What is readable when its process has ended; nothing once it was reaped. The line may not tell: whatever another thread forks
        while the agent is being started has the agent's end of it, too."""
        return self._pidfd.fds

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        poll = select.poll()
        for pidfd in self._pidfd.fds:
            poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def usable(self) -> bool:
        """Whether it still listens, as far as can be told without asking."""
        if self.has_ended:
            return False
        try:
            return bool(self.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) and False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def go_on(self) -> None:
        """Continue it when it was stopped (SIGSTOP). Whoever suspends the whole program stops the caller, too, who then does not look."""
        if processes.is_stopped(self.pid) and not self._continued:
            self._continued = True
            sys.stderr.write(f"rallypoint: the launcher's process (pid {self.pid}) was stopped (SIGSTOP): it is continued\n")
        if processes.is_stopped(self.pid):
            for pidfd in self._pidfd.fds:
                processes.send(pidfd, signal.SIGCONT)

    def dismiss(self, patience: float | None = None) -> None:
        """Let it go: it ends what it has in hand, and itself; this waits for it. One that does not (it was stopped) is killed, and
        its guard ends what it had in hand. `patience`: seconds before that, DISMISS_PATIENCE without it. In a forked child only what is
        open here is closed. May be called twice."""
        self.abandon()
        if os.getpid() == self._parent:
            if not processes.wait_for_ends(self._pidfd.fds, DISMISS_PATIENCE if patience is None else patience):
                for pidfd in self._pidfd.fds:
                    processes.send(pidfd, signal.SIGKILL)
                processes.wait_for_ends(self._pidfd.fds, DISMISS_PATIENCE)
            _bury()

    def abandon(self) -> None:
        """The same without waiting."""
        if os.getpid() == self._parent:
            if self._pidfd.fds:
                _leaving[self.pid] = self._pidfd
            self._hang_up()
        else:
            self.line.close()
            self._pidfd.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.line.shutdown(socket.SHUT_RDWR)  # a child that was forked meanwhile may have the socket, too
        self.line.close()

    def __del__(self) -> None:
        """An exception came (Ctrl-C does at any moment) when nobody had it in hand."""
        if hasattr(self, "_parent") and self.line.fileno() >= 0:
            self.abandon()


_leaving: dict[int, Held] = {}  # pid -> pidfd of those that were let go and are not reaped yet


def _bury() -> None:
    """Reap those that have ended."""
    for pid, pidfd in list(_leaving.items()):
        try:
            done = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:  # the program reaps all its children itself
            done = True
        if done:
            _leaving.pop(pid, None)
            pidfd.close()


_here: weakref.WeakSet[Agent] = weakref.WeakSet()  # all that there are
_idle: list[Agent] = []  # without a lock, which Ctrl-C or a fork could leave locked: what a thread does to it is one step each


def hire(preload: tuple[str, ...], environment: Mapping[str, str]) -> Agent:
    """An agent whose template fits: an idle one, or a new one. It is the caller's until `keep` or `Agent.dismiss`."""
    paths = tuple(path for path in sys.path if isinstance(path, str)) if preload else ()
    key = Key(sys.executable, preload, paths, variables.read_when_loaded(environment))
    _bury()
    for agent in list(_idle):
        if agent.key == key and _taken(agent):
            if agent.usable:
                return agent
            agent.dismiss()  # it was killed since
    for agent in list(_idle)[: 1 - IDLE_MOST]:  # the environment or the preload differs now, and mostly stays so
        if _taken(agent):
            agent.dismiss()
    return Agent(key, environment)


def _taken(agent: Agent) -> bool:
    """Whether this thread has it now; False when another was faster."""
    try:
        _idle.remove(agent)
    except ValueError:
        return False
    return True


def keep(agent: Agent) -> None:
    """It has no more work, and may be hired again."""
    _idle.append(agent)
    for spare in _idle[:-IDLE_MOST]:
        if _taken(spare):
            spare.dismiss()


def _after_fork() -> None:
    """A forked child has none: it closes its copies of the lines, or the agents would not see the parent's end of them."""
    _idle.clear()
    for agent in list(_here):  # also those that other threads of the parent's had in hand
        agent.abandon()
    _leaving.clear()


os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    """The program ends, and its agents with it: nothing is to be left for the collector, which would warn of an open socket."""
    while _idle:
        _idle.pop().abandon()


atexit.register(_at_exit)
