"""The agent's hold on each process that it has: template, c10d host, ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Ended, Frame, Meeting, Raised
from rallypoint.host import processes, system_calls
from rallypoint.host.signals import EVIDENCE_SIGNAL
from rallypoint.launcher import boot, channel
from rallypoint.launcher.channel import Go, Message, Released, Setup

# Bytes of dumps that are kept when a rank is asked once more: a job that is looked at every minute for days must not fill the memory.
# What a rank writes when it crashes comes after all answers.
EVIDENCE_KEPT = 256 * 1024

_SILENCE = {
    "T": "stopped (SIGSTOP), pid {0}: kill -CONT {0} lets it go on",
    "t": "held by a debugger (ptrace), pid {0}",
    "D": "in a call that the kernel does not interrupt (state D), pid {0}",
}
# Ticks of processor time that a main thread may use and count as not having moved: the kernel wakes it for the signal, Python writes that
# down, and the call goes on. It takes some ten microseconds, which may be the ones that fill a tick.
WOKEN_TICKS = 1

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
        self.pid = boot.spawn(
            ["-u", "-c", boot.TEMPLATE % (setup_fd, theirs.fileno())],
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
            setsigmask=signal.valid_signals(),  # what a scheduler sends to every process of the job is the agent's to act on
        )
        self.pidfd = system_calls.pidfd_open(self.pid)
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
        self.pid, self.pidfd = pid, system_calls.pidfd_open(pid)

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
        self.failed_to_join = False  # an error left the init_process_group that `phase` speaks of
        self.debugging = False  # its debugger waits for a person
        self.ended: Ended | None = None
        self.reaped = False
        self.told = False  # its failure stands in a report
        self.raised: Raised | None = None
        self.traceback_printed = False
        self.caught: dict[int, Raised] = {}
        self.left_at = ""
        self.meeting: Meeting | None = None
        self.at_held = False  # it meets the others where the agent holds a socket
        self.sent: list[str] = []
        self.cuda_forks: list[tuple[str, str]] = []
        self.not_executed = 0
        self.resident = 0
        self.error_file = ""
        self.log_line = 0
        self.imports: dict[str, float] = {}
        self.left_at_exit: float | None = None  # when it ended well with processes left in its group, until they are named
        self._asked = False
        self._asked_from = 0  # where in the evidence the answer begins
        self._place: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<RankHandle {self.rank}: pid {self.pid}, {self.phase}{', ended' if self.ended else ''}>"

    @property
    def alive(self) -> bool:
        """Whether its process runs (it was forked, and no end was seen)."""
        return self.pid > 0 and self.ended is None

    @property
    def waiting(self) -> bool:
        """Whether it is inside init_process_group."""
        return self.alive and self.phase == "joining" and not self.failed_to_join

    def forked(self, pid: int) -> None:
        """The template has forked it."""
        self.pid, self.pidfd = pid, system_calls.pidfd_open(pid)
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
        if self._asked and processes.is_pending(self.pid, EVIDENCE_SIGNAL):  # it is stopped, or in the kernel: one question is enough
            return True
        self._asked_from = os.fstat(self.evidence).st_size
        if self._asked_from > EVIDENCE_KEPT:  # its place in the file is ours, too: the descriptor was handed over, not opened twice
            os.ftruncate(self.evidence, 0)
            os.lseek(self.evidence, 0, os.SEEK_SET)
            self._asked_from = 0
        self._asked = processes.handles(self.pid, EVIDENCE_SIGNAL) and processes.send(self.pidfd, EVIDENCE_SIGNAL)
        return self._asked

    def disregard(self) -> None:
        """What it has answered so far counts no more: it has gone on since."""
        if self.evidence >= 0:
            self._asked_from = os.fstat(self.evidence).st_size

    def halted(self) -> bool:
        """Whether it is sure not to answer for now: it was stopped, or waits for a person at its debugger."""
        return self.debugging or processes.is_stopped(self.pid)

    def silence(self) -> str:
        """Why it says nothing of where it is, as far as that is seen from outside."""
        if self.debugging:
            return f"its debugger waits for a line, pid {self.pid}"
        status = processes.status(self.pid)
        return _SILENCE.get(status.state if status is not None else "", "does not answer, pid {0}").format(self.pid)

    def answered(self) -> bool:
        """Whether the dump that `ask` asked for is whole."""
        return not self._asked or not processes.is_handling(self.pid, EVIDENCE_SIGNAL)

    def dump(self) -> str:
        """All that faulthandler has written: answers, and what it wrote at a crash."""
        return self._written(0)

    def answer(self) -> str:
        """What it has written since it was last asked; "" when it did not answer that."""
        return self._written(self._asked_from)

    def _written(self, start: int) -> str:
        size = os.fstat(self.evidence).st_size - start if self.evidence >= 0 else 0
        return os.pread(self.evidence, size, start).decode("utf-8", "replace") if size > 0 else ""

    @property
    def _crashed(self) -> bool:
        crashes = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
        return self.ended is not None and self.ended.signal in crashes

    def last_words(self) -> str:
        """What faulthandler wrote of where it is or was at last: its answer, or all of what it wrote if it crashed."""
        return self.dump() if self._crashed else self.answer()

    def stack(self) -> tuple[Frame, ...]:
        """The main thread's frames when it was last asked, () when it did not answer; the crashing thread's of one that crashed."""
        if self._crashed:
            return stacks.current_frames(self.dump())
        return stacks.main_frames(self.answer())

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
        place = processes.main_thread_place(self.pid)
        if self._place is None or place is None or place[0] != self._place[0] or place[1] > self._place[1] + WOKEN_TICKS:
            return False
        frames = stacks.main_frames(self.answer())
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
