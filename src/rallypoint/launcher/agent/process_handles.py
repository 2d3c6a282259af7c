"""Handles of the ranks: their processes, and all that they have told."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Literal

import msgspec

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Ended, Frame, Meeting, Raised
from rallypoint.host import memory_files, process_status, processes, system_calls
from rallypoint.host.fd_passing import close_fds
from rallypoint.host.process_status import ThreadActivity
from rallypoint.host.signals import ATTENTION_SIGNAL, EVIDENCE_SIGNAL
from rallypoint.launcher import protocol
from rallypoint.launcher.protocol import ChildrenFailed, Go, Noticed, Packet, Released, TerminalLeft

# Bytes of dumps that are kept when a rank is asked once more: a job that is looked at every minute
# for days must not fill the memory. What a rank writes when it crashes comes after all answers.
EVIDENCE_KEPT = 256 * 1024


_SILENCE = {
    "T": "stopped (SIGSTOP), pid {0}: kill -CONT {0} lets it go on",
    "t": "held by a debugger (ptrace), pid {0}",
    "D": "in a call that the kernel does not interrupt (state D), pid {0}",
}
# Ticks of processor time that a main thread may use and count as not having moved: the kernel wakes
# it for the signal, Python writes that down, and the call goes on. It takes some ten microseconds,
# which may be the ones that fill a tick.
WOKEN_TICKS = 1
# Looks in which a main thread outside torch's Python code has slept with the same stack, until it
# counts as one that heeds no signal: a library may write a checkpoint for a second or two before it
# returns to Python, and torch's store waits for minutes.
DEAF_LOOKS = 10
# Share of a processor that a process uses at most which does nothing but wait: gloo's thread, which
# wakes 100 times a second, uses 0.005.
IDLE_SHARE = 0.05
# The thread of gloo's that carries messages. It wakes by a clock while a process waits, so only
# that it runs tells nothing.
GLOO_LOOP = "gloo_tcp_loop"


class ActivitySample(msgspec.Struct, frozen=True):
    """Work that a process had done at one moment. Two of them say whether it has done anything but
    wait in between.
    """

    at: float = 0.0
    cpu: int = 0  # clock ticks that it has used
    others: Mapping[int, ThreadActivity] = {}  # its threads but the main one

    @classmethod
    def of(cls, pid: int, now: float) -> ActivitySample:
        """Take the sample of a process at this moment."""
        found = process_status.status(pid)
        return cls(now, found.cpu if found is not None else 0, process_status.other_threads(pid))

    def idle_since(self, before: ActivitySample) -> bool:
        """Return whether it has used no processor time to speak of."""
        return self.cpu - before.cpu <= WOKEN_TICKS + IDLE_SHARE * os.sysconf("SC_CLK_TCK") * (
            self.at - before.at
        )

    def still_since(self, before: ActivitySample) -> bool:
        """Return whether no thread of it but the main one has run or is about to: then no message
        is on its way to it.
        """
        return before.others.keys() == self.others.keys() and all(
            _stands(before.others[number], one) for number, one in self.others.items()
        )


def _stands(before: ThreadActivity, now: ThreadActivity) -> bool:
    if (
        now.name == GLOO_LOOP
    ):  # one that had no turn since the last look may have something to carry
        return now.state == "S" or now.switches != before.switches
    return now.state == "S" and now.switches == before.switches


class RankHandle:
    """Process of a rank, and all that it has told."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.control, self.their_control = protocol.pair()
        self.evidence = memory_files.create(f"rallypoint-rank{rank}")
        self.pid = 0
        self.pidfd = -1
        self.ordered = False  # the template has been told to fork it
        self.phase = "preparing"
        self.phase_at = 0.0
        self.threads: tuple[str, ...] = ()  # for which the end of its program waits
        self.joined_at: float | None = None
        self.failed_to_join = False  # an error left the init_process_group that `phase` speaks of
        self.debugging = False  # its debugger waits for a person
        self.ended: Ended | None = None
        self.log_rank = local_rank  # the local rank whose log has its words
        self.reaped = False
        self.raised: Raised | None = None
        self.dead_child: tuple[int, int, int] | None = None  # not looked at when it raised
        self.in_thread: Raised | None = None
        self.traceback_printed = False
        self.caught: dict[int, Raised] = {}
        self.handles: Raised | None = None  # what it had in hand when it last began to wait
        self.exit_line = ""
        self.left_at = ""
        self.left_when = 0.0
        self.left_saying = ""
        # when the program closed its process group, and where; 0: it has not, or has opened another
        # one since
        self.closed_at = 0.0
        self.closed_line = ""
        self.meeting: Meeting | None = None
        # where torch's store has left it without an answer for all of its time
        self.unanswered: tuple[str, int] | None = None
        self.at_held = False  # it meets the others where the agent holds a socket
        self.sent: list[str] = []
        self.cuda_forks: list[tuple[str, str]] = []
        self.children = ChildrenFailed((), 0)
        self.not_executed = 0
        self.resident = 0
        self.halted_by = ""  # why it was sure not to answer when it was last asked
        self.error_file = ""
        self.log_line = 0
        self.parts: list[str] = []  # of torch, that it has imported after the fork
        self.imports: dict[str, float] = {}
        # when it ended well with processes left in its group, until they are named
        self.left_at_exit: float | None = None
        self._asked = False
        self._asked_from = 0  # where in the evidence the answer begins
        # where its main thread was when it was last asked
        self._stood: tuple[str, int] | None = None
        self._place: tuple[str, int] | None = None  # and when it was last signalled
        self._frames: tuple[Frame, ...] = ()
        self._called = False  # it was asked whether its main thread heeds signals
        self._looks = 0  # in which it seemed deaf, since it was last signalled
        self._before = ActivitySample()  # what it had done when it was last looked at

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

    def errors(self) -> tuple[Raised, ...]:
        """Return the exception that left its program, if one has, and those that it may have
        caught.
        """
        return tuple(filter(None, (self.raised, *self.caught.values())))

    def forked(self, pid: int) -> None:
        """The template has forked it."""
        self.pid, self.pidfd = pid, system_calls.pidfd_open(pid)
        self.their_control.close()

    def adopt(self, pid: int, pidfd: int, evidence: int, starter: int) -> None:
        """Stand for a process that local rank `starter` has spawned: with these descriptors of its own,
        and no line to the agent but that rank's.
        """
        os.close(self.evidence)
        self.control.close()
        self.their_control.close()
        self.pid, self.pidfd, self.evidence, self.log_rank = pid, pidfd, evidence, starter

    def go(self, *, noticed: bool) -> None:
        """Let the program start. `noticed`: a notice came before."""
        self._tell(Go())
        if noticed:
            self._tell(Noticed())

    def notice(self, name: str) -> bool:
        """Hand a notice on, and the signal itself if there is a handler for it: without one it
        would end the process. Returns whether there is."""
        self._tell(Noticed())
        number = signal.Signals[name]
        return process_status.handles(self.pid, number) and processes.send(self.pidfd, number)

    def released(self) -> None:
        """Tell the worker that the held port is free."""
        self._tell(Released())

    def terminal_left(self) -> None:
        """Tell the worker's debugger that it may write."""
        self._tell(TerminalLeft())

    def _tell(self, message: Packet) -> None:
        try:
            protocol.send(self.control, message)
        except OSError:  # it has ended; the template tells so
            return

    def ask(self) -> bool:
        """Ask for its stacks; False when it cannot answer (no handler: another program, or not that
        far yet).
        """
        self.resident = process_status.resident(self.pid)
        self.halted_by = self.silence().partition(", pid")[0] if self.halted() else ""
        self._stood = process_status.main_thread_place(self.pid)
        if self._asked and process_status.is_pending(
            self.pid, EVIDENCE_SIGNAL
        ):  # it is stopped, or in the kernel: one question is enough
            return True
        self._asked_from = os.fstat(self.evidence).st_size
        if (
            self._asked_from > EVIDENCE_KEPT
        ):  # its place in the file is ours, too: the descriptor was handed over, not opened twice
            os.ftruncate(self.evidence, 0)
            os.lseek(self.evidence, 0, os.SEEK_SET)
            self._asked_from = 0
        self._asked = process_status.handles(self.pid, EVIDENCE_SIGNAL) and processes.send(
            self.pidfd, EVIDENCE_SIGNAL
        )
        return self._asked

    def disregard(self) -> None:
        """Forget what it has answered so far: it has gone on since."""
        if self.evidence >= 0:
            self._asked_from = os.fstat(self.evidence).st_size

    def halted(self) -> bool:
        """Return whether it is sure not to answer for now: it was stopped, or waits for a person at
        its debugger.
        """
        return self.debugging or process_status.is_stopped(self.pid)

    def silence(self) -> str:
        """Say why it does not answer, as far as that is seen from outside."""
        if self.debugging:
            return f"its debugger waits for a line, pid {self.pid}"
        status = process_status.status(self.pid)
        return _SILENCE.get(
            status.state if status is not None else "", "does not answer, pid {0}"
        ).format(self.pid)

    def failed_child(self) -> tuple[int, int, int] | None:
        """Return pid, exit code and signal of a process that its program has started and that has
        failed, where the program has not looked at that end.
        """
        # The children of a rank that was sent a signal got the same one.
        if self.alive and not self.sent and (found := process_status.failed_child(self.pid)):
            return found
        lost = self.children.children  # those that a Pool has lost and reaped
        if lost and self.alive and self.raised is None:
            return lost[0].pid, lost[0].code, lost[0].signal
        return None

    def answered(self) -> bool:
        """Return whether the dump that `ask` asked for is whole."""
        return not self._asked or not process_status.is_handling(self.pid, EVIDENCE_SIGNAL)

    def dump(self) -> str:
        """Return all that faulthandler has written: answers, and what it wrote at a crash."""
        return self._written(0)

    def answer(self) -> str:
        """Return what it has written since it was last asked; "" when it did not answer that."""
        return self._written(self._asked_from)

    def _written(self, start: int) -> str:
        size = os.fstat(self.evidence).st_size - start if self.evidence >= 0 else 0
        return os.pread(self.evidence, size, start).decode("utf-8", "replace") if size > 0 else ""

    @property
    def _crashed(self) -> bool:
        crashes = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
        return self.ended is not None and self.ended.signal in crashes

    def last_words(self) -> str:
        """Return what faulthandler wrote of where it is or was at last: its answer, or all of what
        it wrote if it crashed.
        """
        return self.dump() if self._crashed else self.answer()

    def stack(self) -> tuple[Frame, ...]:
        """Return the main thread's frames when it was last asked, () when it did not answer; the crashing
        thread's of one that crashed.
        """
        if self._crashed:
            return stacks.current_frames(self.dump())
        return stacks.main_frames(self.answer())

    def signal_group(self, name: str, now: float) -> None:
        """Signal its whole group (SIGKILL: it alone), and remember where its main thread stood."""
        # On a busy machine it may still be on its way back from answering where it is: then it
        # counts where it stood before.
        self._place = process_status.main_thread_place(self.pid) or self._stood
        self._frames = stacks.main_frames(self.answer())
        self._looks, self._before = 0, ActivitySample.of(self.pid, now)
        self.sent.append(name)
        if name == "SIGKILL":  # its trackers of shared memory end after it
            processes.send(self.pidfd, signal.SIGKILL)
        else:
            processes.send_group(self.pid, signal.Signals[name])
        if process_status.handles(self.pid, ATTENTION_SIGNAL):
            self._called = processes.send(self.pidfd, ATTENTION_SIGNAL)
        processes.send_group(self.pid, signal.SIGCONT)  # one that was stopped could not act on it

    def may_wait(self) -> bool:
        """Return whether its main thread sleeps though the last signal has reached it."""
        reached = (signal.Signals[self.sent[-1]], ATTENTION_SIGNAL)
        return self._sleeps() and not any(
            process_status.is_pending(self.pid, number) for number in reached
        )

    def may_be_deaf(self) -> bool:
        """Return whether its main thread sleeps though the last signal has reached it, and has not
        been seen to heed it.
        """
        return self.may_wait() and not self._heeded()

    def _heeded(self) -> bool:
        """Return whether Python handlers have run since the last signal."""
        return self._called and process_status.blocks(self.pid, ATTENTION_SIGNAL)

    def waits(self, now: float, *, together: bool) -> Literal["", "deaf", "waiting"]:
        """Judge whether its main thread waits in C code, by the stack that it told after `may_wait`:
        "deaf", so that it cannot heed the last signal, or "waiting" in a call of torch.distributed,
        perhaps after it has heeded the signal.

        Python's own waits (sleep, select, locks) return to the interpreter at a signal, which runs
        the handlers; a wait in C code does not. Of the two signals that were sent it heeds the
        program's first, so while the program's handler runs the other one is not heeded either; but
        then the handler is on the stack. `together`: whether the process must rest with all its
        threads, so that nothing is on its way that could end the wait.
        """
        place, frames = (
            process_status.main_thread_place(self.pid),
            stacks.main_frames(self.answer()),
        )
        place_before, rests = self._place, True
        if together:
            before, self._before, self._place = (
                self._before,
                ActivitySample.of(self.pid, now),
                place,
            )
            rests = self._before.still_since(before)
            if not self._before.idle_since(before):
                self._looks = 0
                return ""
        if not self._sleeps() or place is None or place_before is None or not frames:
            return ""
        same_call = (
            process_status.is_same_call(place_before[0], place[0])
            and place[1] <= place_before[1] + WOKEN_TICKS
        )
        in_torch = f"{os.sep}torch{os.sep}" in frames[-1].file
        if (
            not self._called
        ):  # another program's interpreter, or one that does not show what it heeds
            return "deaf" if same_call and rests and in_torch else ""
        if frames != self._frames or self._heeded():
            in_group = f"{os.sep}torch{os.sep}distributed{os.sep}" in frames[-1].file
            return "waiting" if same_call and rests and in_group else ""
        self._looks += 1
        return "deaf" if (same_call and rests and in_torch) or self._looks >= DEAF_LOOKS else ""

    def _sleeps(self) -> bool:
        """Return whether its main thread waits for something, and not for a disk, which the kernel
        does not interrupt.
        """
        status = process_status.status(f"{self.pid}/task/{self.pid}")
        return status is not None and status.state == "S"

    def close(self) -> None:
        """Give every descriptor back."""
        fds, self.pidfd, self.evidence = (self.pidfd, self.evidence), -1, -1
        close_fds(*fds)
        self.control.close()
        self.their_control.close()
