"""The running job's door: whoever of this user asks where its ranks stand is answered by the agent's loop.

A Unix socket in a private folder, whose path stands in the run folder. A visitor sends one line and gets a memory file with the answer, so
the loop never waits for anybody who reads slowly, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.stall import Stall, Watch
from rallypoint.diagnosis.standing import Missing, RankStanding, Standing
from rallypoint.host import processes, sockets
from rallypoint.host.processes import Activity
from rallypoint.host.signals import EVIDENCE_SIGNAL
from rallypoint.launcher import words
from rallypoint.launcher.exits import describe
from rallypoint.launcher.handles import RankHandle
from rallypoint.launcher.plan import Plan

# Seconds over which the use of processors is measured when somebody asks: the kernel counts in hundredths, so this tells 4 % from 0.
MEASURED = 0.25
# Seconds for all ranks to write their stacks. A person waits, and 64 ranks share two processors with us; what has not answered by then
# is stopped, in the kernel, or another program, and /proc says which.
ANSWERS_WITHIN = 1.5
# Seconds between looks whether the dumps are whole: each look reads a file per thread of a rank.
ANSWERS_LOOK = 0.02
# Seconds that a visitor waits for the answer: what the launcher allows itself, and as much again twice for a busy machine.
VISIT_DEADLINE = 5.0
VISITORS_MOST = 16  # at a time; the oldest of more is sent away: it has probably been forgotten by its own maker
ROOM = 16  # descriptors that stay free for the job: answering takes three, and to end a rank the launcher needs a few, too
QUESTION = b"rallypoint stacks 1\n"  # the number changes when the answer does


class DoorClosed(Exception):
    """Nobody listens there (any more)."""


class SentAway(DoorClosed):
    """The launcher took the connection and closed it: the job is over, or it has no descriptor for a visitor, or too many came."""


class LauncherSilent(Exception):
    """The launcher took the connection and did not answer in time. `pid`: who listens there, 0 when it cannot be seen."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"pid {pid} did not answer")
        self.pid = pid


class OtherVersion(Exception):
    """What answered speaks otherwise: the job was started by another version of rallypoint."""


# --- outside ---------------------------------------------------------------------------------------------------------


def ask(path: str, timeout: float = VISIT_DEADLINE) -> Standing:
    """Where the ranks of the job behind this door stand. `DoorClosed`, `LauncherSilent` after `timeout` seconds, `OtherVersion`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        connected = False
        try:
            sock.connect(path)
            connected = True
            if os.geteuid() != 0 and not sockets.is_same_user(sock):
                raise DoorClosed
            if processes.is_stopped(listener := sockets.listener_of(sock)):  # the kernel took the connection for it
                raise LauncherSilent(listener)
            sock.sendall(QUESTION)
            said, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except (TimeoutError, BlockingIOError):  # BlockingIOError: as many wait already as may
            raise LauncherSilent(sockets.listener_of(sock)) from None
        except OSError:
            raise (SentAway if connected else DoorClosed) from None
    if not fds:
        raise OtherVersion if said else SentAway
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        try:
            return msgspec.msgpack.decode(file.read(), type=Standing)
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise OtherVersion from None


# --- in the agent ----------------------------------------------------------------------------------------------------


class Door:
    """Takes visitors in. Nothing here waits. `EnvironmentProblem` ("socket-unavailable") when there is no folder for the socket."""

    def __init__(self) -> None:
        self._listener, self.path = sockets.private_socket("door.sock")
        self._listener.setblocking(False)
        self._visitors: list[socket.socket] = []

    def fileno(self) -> int:
        """Readable when somebody comes."""
        return self._listener.fileno()

    def come_in(self) -> socket.socket | None:
        """The next visitor; None when it has gone again, is somebody else's process, or would take a descriptor that the job may need.
        `OSError` (EMFILE) when there is none left at all."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        # The kernel gives the lowest free number: one near the limit means that few are left.
        if not sockets.is_same_user(sock) or sock.fileno() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - ROOM:
            sock.close()
            return None
        sock.setblocking(False)
        self._visitors.append(sock)
        return sock

    def surplus(self) -> socket.socket | None:
        """The visitor who has to leave because too many are here; None when there is room."""
        return self._visitors[0] if len(self._visitors) > VISITORS_MOST else None

    def listen(self, visitor: socket.socket) -> bool | None:
        """Whether it asks what we can answer: False when it does not, or has gone; None when there is nothing to read yet."""
        try:
            said = visitor.recv(len(QUESTION) + 1)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if said and said != QUESTION:
            with contextlib.suppress(OSError):
                visitor.send(b"?")
        return said == QUESTION

    def answer(self, visitors: Sequence[socket.socket], standing: Standing) -> None:
        """Hand them the answer, and see them off."""
        content = msgspec.msgpack.encode(standing)
        for visitor in visitors:
            with contextlib.suppress(OSError):  # it did not wait, or was sent away; or nothing can be opened: it reads that nobody answers
                fd = processes.memory_file("rallypoint-standing")
                try:
                    os.write(fd, content)
                    socket.send_fds(visitor, [b"."], [fd])
                finally:
                    os.close(fd)
            self.see_off(visitor)

    def see_off(self, visitor: socket.socket) -> None:
        """Close the line to a visitor. May be called twice."""
        if visitor in self._visitors:
            self._visitors.remove(visitor)
        visitor.close()

    def close(self) -> None:
        """Nobody is at home any more: the socket goes, with its folder."""
        for visitor in list(self._visitors):
            self.see_off(visitor)
        self._listener.close()
        sockets.remove(self.path)


class Round:
    """One question to every living rank: what /proc shows before and after, and the stacks in between."""

    def __init__(self, plan: Plan, ranks: Sequence[RankHandle], watch: Watch, now: float, *, hooks: bool) -> None:
        """Asks them all. `hooks`: whether they are looked into, and can answer."""
        self._plan = plan
        self._ranks = list(ranks)
        self._watch = watch
        self._hooks = hooks
        self._asked_at = now
        before = activities(ranks)
        watch.look(before, now)
        self._cpu = {handle.rank: processes.cpu_seconds(handle.pid) for handle in ranks if handle.alive}
        self._asked = {handle.rank for handle in ranks if handle.alive and hooks and _can_answer(handle, before)}
        self._waiting = [handle for handle in ranks if handle.rank in self._asked]

    def is_over(self, now: float) -> bool:
        """Whether every rank has answered, or its time is up."""
        self._waiting = [handle for handle in self._waiting if handle.alive and not handle.answered()]
        return now >= self._asked_at + (ANSWERS_WITHIN if self._waiting else MEASURED)

    def standings(self, now: float) -> tuple[RankStanding, ...]:
        """Where they stand, by rank."""
        after = activities(self._ranks)
        return tuple(self._standing(handle, after.get(handle.rank), now) for handle in self._ranks)

    def _standing(self, handle: RankHandle, activity: Activity | None, now: float) -> RankStanding:
        frames = stacks.main_frames(handle.answer()) if handle.rank in self._asked and handle.alive else ()
        stands_for = self._watch.still_for(handle.rank, now)
        if frames and activity is not None:
            stands_for = self._watch.stood(handle.rank, stacks.trimmed(frames), activity, self._asked_at, now)
        missing, detail = self._why_not(handle, activity, frames)
        used = processes.cpu_seconds(handle.pid) - self._cpu[handle.rank] if handle.alive and handle.rank in self._cpu else 0.0
        return RankStanding(
            rank=handle.rank,
            pid=handle.pid,
            phase=handle.phase,
            phase_for=max(0.0, now - handle.phase_at),
            state=activity.state if activity is not None else "",
            kernel=processes.kernel_wait(handle.pid) if activity is not None and activity.state in "SD" else "",
            cpu=max(0.0, used / max(now - self._asked_at, MEASURED)),
            frames=frames,
            stands_for=stands_for,
            missing=missing,
            detail=detail,
        )

    def _why_not(self, handle: RankHandle, activity: Activity | None, frames: tuple[Frame, ...]) -> tuple[Missing, str]:
        if frames:
            return "", ""
        if handle.ended is not None:
            return "ended", describe(handle.ended.code, handle.ended.signal)
        if not handle.pid:
            return "not started", ""
        if activity is None or activity.state in "ZX":
            return "ended", "a status that is not known yet"
        if activity.state in "Tt":
            return ("stopped" if activity.state == "T" else "held"), ""
        if self._plan.start == "exec":
            return "other program", processes.command_line(handle.pid)
        if not self._hooks:
            return "not looked into", ""
        if handle.rank in self._asked:
            return ("kernel" if activity.state == "D" else "no answer"), ""
        if handle.phase == "preparing" or processes.handles(handle.pid, EVIDENCE_SIGNAL):  # by now
            return "starting", ""
        if handle.phase in ("finishing", "done"):  # the interpreter takes the handler down; what C++ libraries do after that may take long
            return "closing", ""
        return "other program", processes.command_line(handle.pid)  # an exec has replaced ours, and its handler with it


def _can_answer(handle: RankHandle, before: Mapping[int, Activity]) -> bool:
    """Asks it. One that is stopped is not asked: it would answer long after everybody has gone."""
    activity = before.get(handle.rank)
    return activity is not None and activity.state not in "TtZX" and handle.ask()


def activities(ranks: Sequence[RankHandle]) -> dict[int, Activity]:
    """What /proc shows of the living ranks' main threads."""
    return dict(_activities(ranks))


def _activities(ranks: Sequence[RankHandle]) -> Iterator[tuple[int, Activity]]:
    for handle in ranks:
        found = processes.activity(handle.pid) if handle.alive else None
        if found is not None:
            yield handle.rank, found


class Inquiry:
    """All that the agent keeps for it: the door, the watch, the round that is on, and who waits for its result."""

    def __init__(self, plan: Plan, *, hooks: bool) -> None:
        self._plan = plan
        self._hooks = hooks
        self.door: Door | None = None
        self._watch = self._new_watch()
        self._began = 0.0
        self._round: Round | None = None
        self._waiting: list[socket.socket] = []

    def _new_watch(self) -> Watch:
        return Watch(os.sysconf("SC_CLK_TCK"), self._plan.stall)

    def next_look(self, now: float) -> float:
        """When to look again."""
        return now + self._watch.interval(now - self._began)

    @property
    def is_asking(self) -> bool:
        """Whether a round is on."""
        return self._round is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a visitor waits for the result."""
        return bool(self._waiting)

    def begin_attempt(self, now: float) -> None:
        """Other processes: nothing that was seen is of them."""
        self._watch, self._began = self._new_watch(), now
        self._round = None

    def look(self, ranks: Sequence[RankHandle], now: float) -> bool:
        """Look at /proc. True when there is reason to ask the ranks for their stacks."""
        if self._round is not None:
            return False
        self._watch.look(activities(ranks), now)
        return self._watch.wants_stacks(now)

    def moved(self) -> tuple[int, ...]:
        """The ranks that ended a stall which was told; () while it lasts."""
        return self._watch.moved()

    def expect(self, visitor: socket.socket) -> None:
        """A visitor who waits for the result of the round that is on, or of the next one."""
        self._waiting.append(visitor)

    def ask(self, ranks: Sequence[RankHandle], now: float) -> None:
        """Begin a round, if none is on."""
        if self._round is None:
            self._round = Round(self._plan, ranks, self._watch, now, hooks=self._hooks)

    def finish(self, now: float, attempt: int, run_dir: str) -> Standing | None:
        """The result, when the round is over; None until then. Whoever waits has it by then. `now`: seconds since the job's start."""
        if self._round is None or not self._round.is_over(now):
            return None
        plan = self._plan
        standing = Standing(
            job=words.sayable(plan.job if not run_dir else run_dir if plan.run_dir_asked else os.path.basename(run_dir)),
            program=words.sayable(plan.program.target),
            world_size=plan.world.size,
            ranks=self._round.standings(now),
            age=now,
            attempt=attempt,
            run_dir=words.sayable(run_dir),
            folder=words.sayable(os.path.join(plan.task.folder, "")) if plan.task is not None else "",
            launcher=os.getpid(),
        )
        self._round = None
        waiting, self._waiting = self._waiting, []
        if self.door is not None:
            self.door.answer([visitor for visitor in waiting if visitor.fileno() >= 0], standing)
        return standing

    def judge(self, standing: Standing, now: float, *, debugging: bool) -> Stall | None:
        """The stall that this shows, once; None when there is none, or a person holds a rank in a debugger."""
        debugged = debugging or any(stacks.debugged(rank.frames) for rank in standing.ranks)
        return self._watch.judge(now, debugged=debugged)

    def close(self) -> None:
        """The job is over. May be called twice."""
        self._waiting = []
        if self.door is not None:
            self.door.close()
            self.door = None
