"""The agent's hold on each process that it has: template, c10d host, ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Ended, Frame, Meeting, Raised
from rallypoint.host import processes
from rallypoint.host.signals import EVIDENCE_SIGNAL
from rallypoint.launcher import boot, channel
from rallypoint.launcher.channel import Go, Message, Released, Setup

_FUTEX = 202 if os.uname().machine == "x86_64" else 98  # the system call that a C++ wait sits in


class TemplateHandle:
    """The template: started with a clean environment, ordered through one socket, watched by pidfd."""

    def __init__(self, setup: Setup, environment: Mapping[str, str]) -> None:
        ours, theirs = channel.pair()
        setup_fd = processes.memory_file("rallypoint-setup")
        os.write(setup_fd, channel.exact(setup))
        for fd in (setup_fd, theirs.fileno()):
            os.set_inheritable(fd, True)
        self.imports = setup.imports
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-u", "-c", boot.TEMPLATE % (setup_fd, theirs.fileno())],
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
            setsigmask=signal.valid_signals(),  # what a scheduler sends to every process of the job is the agent's to act on
        )
        self.pidfd = os.pidfd_open(self.pid)
        os.close(setup_fd)
        theirs.close()
        self.socket = ours

    def order(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send an order. When the template is gone nothing happens here: its pidfd tells the loop."""
        try:
            channel.send(self.socket, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            return

    def reap(self) -> tuple[int, int]:
        """Wait for its end: (exit code, signal). (0, 0) when it was reaped before."""
        if self.pidfd < 0:
            return 0, 0
        info = os.waitid(os.P_PID, self.pid, os.WEXITED)
        os.close(self.pidfd)
        self.pidfd = -1
        return processes.ended(info) if info else (0, 0)

    def end(self) -> None:
        """SIGKILL and reap; nothing when it has ended already."""
        if self.pidfd >= 0:
            processes.send(self.pidfd, signal.SIGKILL)
            self.reap()
        self.socket.close()


class HostHandle:
    """A c10d host and the attempt's listening address."""

    def __init__(self, address: str) -> None:
        self.address = address  # host:port
        self.port = int(address.rpartition(":")[2])
        self.pid = 0
        self.pidfd = -1

    def started(self, pid: int) -> None:
        """The template has forked it."""
        self.pid, self.pidfd = pid, os.pidfd_open(pid)

    def end(self) -> None:
        """SIGKILL, and wait until its socket is closed (it is, when the process has ended)."""
        if self.pidfd >= 0:
            processes.send(self.pidfd, signal.SIGKILL)
            processes.wait_for_ends([self.pidfd], 2.0)
            os.close(self.pidfd)
            self.pidfd = -1


class RankHandle:
    """One rank's process, and all that it has told."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.control, self.their_control = channel.pair()
        self.evidence = processes.memory_file(f"rallypoint-rank{rank}")
        self.pid = 0
        self.pidfd = -1
        self.ordered = False  # the template has been told to fork it
        self.phase = "preparing"
        self.phase_at = 0.0
        self.joined_at: float | None = None
        self.ended: Ended | None = None
        self.reaped = False
        self.told = False  # its failure stands in a report
        self.raised: Raised | None = None
        self.traceback_printed = False
        self.caught: dict[int, Raised] = {}
        self.left_at = ""
        self.meeting: Meeting | None = None
        self.sent: list[str] = []
        self.cuda_forks: list[tuple[str, str]] = []
        self.not_executed = 0
        self.resident = 0
        self.error_file = ""
        self.log_line = 0
        self.imports: dict[str, float] = {}
        self.left_at_exit: float | None = None  # when it ended well with processes left in its group, until they are named
        self._asked = False
        self._place: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<RankHandle {self.rank}: pid {self.pid}, {self.phase}{', ended' if self.ended else ''}>"

    @property
    def alive(self) -> bool:
        """Whether its process runs (it was forked, and no end was seen)."""
        return self.pid > 0 and self.ended is None

    def forked(self, pid: int) -> None:
        """The template has forked it."""
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.their_control.close()

    def go(self) -> None:
        """Let the program start."""
        self._tell(Go())

    def released(self) -> None:
        """Tell the worker that the held port is free."""
        self._tell(Released())

    def _tell(self, message: Message) -> None:
        try:
            channel.send(self.control, message)
        except OSError:  # it has ended; the template tells so
            return

    def ask(self) -> bool:
        """Ask for its stacks; False when it cannot answer (no handler: another program, or not that far yet)."""
        self.resident = processes.resident(self.pid)
        self._asked = processes.handles(self.pid, EVIDENCE_SIGNAL) and processes.send(self.pidfd, EVIDENCE_SIGNAL)
        return self._asked

    def answered(self) -> bool:
        """Whether the dump that `ask` asked for is whole."""
        return not self._asked or not processes.is_handling(self.pid, EVIDENCE_SIGNAL)

    def dump(self) -> str:
        """All that faulthandler has written: answers, and what it wrote at a crash."""
        size = os.fstat(self.evidence).st_size if self.evidence >= 0 else 0
        return os.pread(self.evidence, size, 0).decode("utf-8", "replace") if size else ""

    def stack(self) -> tuple[Frame, ...]:
        """The main thread's frames in the last dump, or the crashing thread's."""
        text = self.dump()
        if self.ended and self.ended.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            return stacks.current_frames(text)
        return stacks.main_frames(text)

    def signal_group(self, name: str) -> None:
        """Signal its whole group, and remember where its main thread stood."""
        self._place = processes.main_thread_place(self.pid)
        self.sent.append(name)
        processes.send_group(self.pid, signal.Signals[name])
        processes.send_group(self.pid, signal.SIGCONT)  # one that was stopped could not act on it

    def is_stuck(self) -> bool:
        """Whether its main thread cannot have seen the last signal: it stands in the same call of torch's as before.

        Python's own waits (sleep, select, locks) return to the interpreter at a signal, so a rank in one has run its handler; a
        wait inside torch does not. Which of the two it is, the stack tells.
        """
        if self._place is None or processes.main_thread_place(self.pid) != self._place:
            return False
        frames = stacks.main_frames(self.dump())
        if not frames:
            return False
        innermost = frames[-1].file
        in_torch = f"{os.sep}torch{os.sep}" in innermost
        in_library = innermost.startswith(sys.base_prefix + os.sep) or "<frozen" in innermost
        return in_torch or (not in_library and self._place[0].split(" ")[0] == str(_FUTEX))

    def close(self) -> None:
        """Give every descriptor back."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        if self.evidence >= 0:
            os.close(self.evidence)
        self.pidfd = self.evidence = -1
        self.control.close()
        self.their_control.close()
