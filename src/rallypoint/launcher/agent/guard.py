"""A tiny process that outlives the others long enough to clean up.

Forked from the agent before anything else is started, in a session of its own. It watches the agent
by pidfd (a pipe's end may be held by a forked child). When the agent ends without a farewell it
kills every process of the job and says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from rallypoint.host import processes, system_calls, unix_sockets
from rallypoint.launcher import protocol
from rallypoint.launcher.protocol import Farewell, Forget, Inherit, Register

# Seconds in which the guard reads when its socket is full. It is continued before that if it was
# stopped, see `HELPER_PATIENCE`.
SEND_DEADLINE = 5.0


class Guard:
    """The agent's side: the guard's process and the line to it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.pidfd = system_calls.pidfd_open(pid)
        self._sock = sock
        protocol.limit_sends(sock, SEND_DEADLINE)

    def _tell(self, message: protocol.Packet, fds: Sequence[int] = ()) -> None:
        """Send a message. A guard that does not read is killed: the job ends with that, since
        nothing would clean up after it.
        """
        try:
            protocol.send(self._sock, message, fds)
        except BlockingIOError:
            processes.send(self.pidfd, signal.SIGKILL)
        except OSError:  # the guard is gone; its pidfd tells the agent's loop so
            return

    def register(self, pid: int, pidfd: int, *, is_template: bool = False) -> None:
        """Have the guard look after this process from now on: the packet is in its socket even if
        this process is killed the next moment.
        """
        self._tell(Register(pid, is_template), [pidfd])

    def inherit(self, path: str) -> None:
        """Have the guard remove this socket and its folder if this process is killed, instead of
        the one of this name that came before.
        """
        self._tell(Inherit(path))

    def forget(self, pid: int) -> None:
        """Have the guard forget a process that is being reaped: its number, and its session's, may
        soon be a stranger's.
        """
        self._tell(Forget(pid))

    def farewell(self) -> None:
        """Let the guard leave, since the job is over and clean. Waits for it, and kills it when it
        does not: it was stopped, mostly.
        """
        if self.pidfd >= 0:
            with contextlib.suppress(
                OSError
            ):  # it has just ended by itself; or it was stopped and its socket is full
                protocol.send(self._sock, Farewell(), flags=socket.MSG_DONTWAIT)
            if not processes.wait_for_ends([self.pidfd], processes.KILL_DEADLINE):
                processes.send(self.pidfd, signal.SIGKILL)
            self.reap()
        self._sock.close()

    def reap(self) -> tuple[int, int]:
        """Wait for its end: (exit code, signal). (0, 0) when it does not come, though it was
        killed.
        """
        pidfd, self.pidfd = self.pidfd, -1
        return processes.reap(self.pid, pidfd) or (0, 0)


def start(marker: bytes) -> Guard:
    """Fork the guard. The caller must have one thread. `marker` is the environment entry that every
    process beneath the agent has.
    """
    agent = system_calls.pidfd_open(os.getpid())
    ours, theirs = protocol.pair()
    pid = processes.in_child(lambda: _watch(agent, theirs, marker))
    os.close(agent)
    theirs.close()
    return Guard(pid, ours)


class _Charges:
    """Processes and sockets that the agent has put into the guard's hands."""

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}  # pid -> pidfd
        self.template = 0  # the pid of the present one
        self.sockets: dict[str, str] = {}  # by name: of the attempt's store, of the job's door


def _watch(agent: int, sock: socket.socket, marker: bytes) -> None:
    os.setsid()
    processes.continue_at_end_of_parent()
    signal.set_wakeup_fd(-1)
    # Slurm and systemd signal every process of a job. The agent decides what that means; this
    # process leaves when the agent does.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    processes.close_others({agent, sock.fileno(), 2})
    charges = _Charges()
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.register(sock, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if sock.fileno() in ready and not _listen(sock, charges):
            poll.unregister(sock)
        if agent in ready:
            while _listen(sock, charges):
                pass
            break
    _clean_up(charges, marker)


def _listen(sock: socket.socket, charges: _Charges) -> bool:
    """Act on one packet; return False when there is none (any more). A farewell ends the process."""
    try:
        message, fds = protocol.receive(sock, flags=socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    if isinstance(message, Farewell):
        os._exit(0)
    if isinstance(message, Register):
        charges.processes[message.pid] = fds[0]
        charges.template = message.pid if message.is_template else charges.template
    if isinstance(message, Inherit):
        charges.sockets[os.path.basename(message.path)] = message.path
    if isinstance(message, Forget) and (pidfd := charges.processes.pop(message.pid, -1)) >= 0:
        os.close(pidfd)
    return message is not None


def _clean_up(charges: _Charges, marker: bytes) -> None:
    # The template last: what the ranks have left without a parent is found beneath it.
    template = charges.template if charges.template in charges.processes else 0
    alive = len(charges.processes)
    for pid, pidfd in charges.processes.items():
        if pid != template:
            processes.send(pidfd, signal.SIGKILL)
    if template:
        processes.kill_family(b"", (), ancestor=template)
        processes.send(charges.processes[template], signal.SIGKILL)
    left = processes.kill_family(marker, charges.processes)
    for path in charges.sockets.values():
        unix_sockets.remove(path)
    text = f"\nrallypoint: the launcher was killed; its {'process was' if alive == 1 else f'{alive} processes were'} stopped\n"
    for one in left:
        text += f"rallypoint: pid {one.pid} ({one.name}) would not die: state {one.state}\n"
    try:
        os.write(2, text.encode())
    except OSError:  # the terminal went away with the launcher: nobody is left to tell
        sys.exit(1)
