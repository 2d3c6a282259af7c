"""Snapshots of where the ranks stand, while they run: asked for by a visitor (`rallypoint stacks`),
or made because no rank has moved for a while (`--stall`).

Here a visitor also has the job stopped (`rallypoint stop`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from rallypoint.diagnosis import held_ranks, stacks
from rallypoint.diagnosis.causes.wording import named
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.hang_detector import Watch
from rallypoint.diagnosis.rank_snapshot import Missing, RankStanding, Standing, stalled
from rallypoint.errors import EnvironmentProblem
from rallypoint.host import process_status
from rallypoint.host.process_status import Activity
from rallypoint.host.signals import EVIDENCE_SIGNAL
from rallypoint.launcher import exception_capture
from rallypoint.launcher.agent.evidence_collection import StackQuestion
from rallypoint.launcher.agent.guard import Guard
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.query_socket import QuerySocket, Stopping
from rallypoint.launcher.agent.supervisor import KILL_PATIENCE, State
from rallypoint.launcher.exits import describe
from rallypoint.record import run_list

# Seconds over which the use of processors is measured when somebody asks: the kernel counts in
# hundredths, so this tells 4 % from 0.
MEASURED = 0.25
# Seconds for all ranks to write their stacks. A person waits, and 64 ranks share two processors
# with us; what has not answered by then is stopped, in the kernel, or another program, and /proc
# says which.
ANSWERS_WITHIN = 1.5
# Seconds between looks whether the dumps are whole: each look reads a file per thread of a rank.
ANSWERS_LOOK = 0.02

# Seconds for which all that is left of a job must have stood still before it is said that the
# others have ended well. torch's store, which is not a rank's here and so outlives them, keeps
# ranks that wait for their keys for all of its timeout: half an hour, mostly.
LEFT_BEHIND = 60.0

# Seconds for the lead to tell where the ranks of all nodes stand: it gives them 2.5 s.
LEAD_ANSWERS_WITHIN = 4.0


class StackSampler:
    """One question to every living rank: what /proc shows before and after, and the stacks in
    between.
    """

    def __init__(self, job: Job, watch: Watch) -> None:
        self._plan = job.plan
        self._ranks = list(job.members)
        self._watch = watch
        self._asked_at = job.loop.now
        before = activities(self._ranks)
        watch.look(before, self._asked_at)
        self._cpu = {
            handle.rank: process_status.cpu_seconds(handle.pid)
            for handle in self._ranks
            if handle.alive
        }
        self._question = StackQuestion(
            job, [one for one in self._ranks if job.plan.hooks and _can_answer(one, before)]
        )
        self._asked = {handle.rank for handle in self._question.asked}

    def is_over(self, now: float) -> bool:
        """Return whether every rank has answered, or its time is up."""
        return now >= self._asked_at + (
            MEASURED if self._question.is_answered() else ANSWERS_WITHIN
        )

    def standings(self, now: float) -> tuple[RankStanding, ...]:
        """Return where they stand, by rank."""
        after = activities(self._ranks)
        return tuple(self._standing(handle, after.get(handle.rank), now) for handle in self._ranks)

    def _standing(self, handle: RankHandle, activity: Activity | None, now: float) -> RankStanding:
        asked = handle.rank in self._asked and handle.alive
        frames = stacks.main_frames(handle.answer()) if asked else ()
        stands_for = self._watch.still_for(handle.rank, now)
        if frames and activity is not None:
            stands_for = self._watch.stood(
                handle.rank, stacks.trimmed(frames), activity, self._asked_at, now
            )
        missing, detail = self._why_not(handle, activity, frames)
        state = activity.state if activity is not None else ""
        used = 0.0
        if handle.alive and handle.rank in self._cpu:
            used = process_status.cpu_seconds(handle.pid) - self._cpu[handle.rank]
        return RankStanding(
            rank=handle.rank,
            pid=handle.pid,
            phase=handle.phase,
            phase_for=max(0.0, now - handle.phase_at),
            state=state,
            kernel=process_status.kernel_wait(handle.pid) if state in ("S", "D") else "",
            cpu=max(0.0, used / max(now - self._asked_at, MEASURED)),
            frames=frames,
            stands_for=stands_for,
            missing=missing,
            detail=detail,
            handles=held_ranks.in_hand(handle.handles),
            lost=_lost(handle),
        )

    def _why_not(
        self, handle: RankHandle, activity: Activity | None, frames: tuple[Frame, ...]
    ) -> tuple[Missing, str]:
        if frames:
            return "", ", ".join(handle.threads)
        if handle.ended is not None:
            return "ended", describe(handle.ended.code, handle.ended.signal)
        if not handle.pid:
            return "not started", ""
        if activity is None or activity.state in "ZX":
            return "ended", "a status that is not known yet"
        if activity.state in "Tt":
            return ("stopped" if activity.state == "T" else "held"), ""
        if handle.rank in self._asked:
            return ("kernel" if activity.state == "D" else "no answer"), ""
        if not self._plan.hooks and self._plan.start != "exec":
            return "not looked into", ""
        if self._plan.hooks:
            # by now it has a handler
            if handle.phase == "preparing" or process_status.handles(handle.pid, EVIDENCE_SIGNAL):
                return "starting", ""
            # The interpreter takes the handler down; what C++ libraries do after that may take
            # long.
            if handle.phase in ("finishing", "done"):
                return "closing", ""
        # or an exec has replaced ours, and its handler with it
        return "other program", process_status.command_line(handle.pid)


def _lost(handle: RankHandle) -> str:
    """Return what of a rank has failed while it goes on, "" for nothing."""
    if handle.in_thread is not None:
        return f"a thread died of {named(handle.in_thread)}"
    child = handle.failed_child()
    return f"its process {child[0]} ended with {describe(*child[1:])}" if child else ""


def _can_answer(handle: RankHandle, before: Mapping[int, Activity]) -> bool:
    """Return whether a rank runs. One that is stopped would answer long after everybody has
    gone.
    """
    activity = before.get(handle.rank)
    return activity is not None and activity.state not in "TtZX"


def activities(ranks: Sequence[RankHandle]) -> dict[int, Activity]:
    """Return what /proc shows of the living ranks' main threads."""
    found = {one.rank: process_status.activity(one.pid) for one in ranks if one.alive}
    return {rank: activity for rank, activity in found.items() if activity is not None}


class HangMonitor:
    """Socket for visitors, watch over all ranks, and the round of questions that is on."""

    def __init__(self, job: Job, *, stop: Callable[[], None]) -> None:
        """`stop` is called when a visitor wants the job to end."""
        self._job = job
        self._stop = stop
        self._door: QuerySocket | None = None
        self._watch = self._new_watch()
        self._began = 0.0
        self._round: StackSampler | None = None
        self._waiting: list[socket.socket] = []
        self._owed = 0  # number of the lead's question, until it is answered
        self._here: tuple[RankStanding, ...] = ()  # what the last round has shown
        self._left_told = False

    def _new_watch(self) -> Watch:
        return Watch(os.sysconf("SC_CLK_TCK"), self._job.plan.patience(self._job.size))

    def begin(self) -> None:
        """Begin another attempt, with other processes: nothing that was seen is of them."""
        now = self._job.loop.now
        self._watch, self._began, self._round, self._left_told = self._new_watch(), now, None, False
        self._job.loop.at("looks", self._next_look(now), self._look)
        if self._is_asked:  # their round was about ranks that are gone
            self._ask()

    def close(self) -> None:
        """Let no visitor in any more: the job is over. May be called twice."""
        self._waiting = []
        if self._door is not None:
            self._door.close()

    def end(self) -> None:
        """Tell visitors that had the job stopped that all of it is written down. After `close`."""
        if self._door is not None:
            self._door.end()
            self._door = None

    # --- visitors

    def open_door(self, guard: Guard) -> None:
        """Let visitors of this user in. Where no folder takes a socket the job goes on without."""
        reporter = self._job.reporter
        if not reporter.run_dir:  # nobody could find it
            return
        try:
            self._door = door = QuerySocket()
        except EnvironmentProblem as problem:
            reporter.event("door-missing", because="; ".join((problem.headline, *problem.why)))
            return
        reporter.announce(door.path)
        guard.inherit(door.path)
        self._job.loop.watch(door.fileno(), lambda: self._on_visitor(door))

    def _on_visitor(self, door: QuerySocket) -> None:
        try:
            visitor = door.accept_visitor()
        except OSError:  # no descriptor is left for it
            self._job.loop.unwatch(door.fileno())
            return
        if visitor is not None:
            self._job.loop.watch(visitor.fileno(), lambda: self._on_question(door, visitor))

    def _on_question(self, door: QuerySocket, visitor: socket.socket) -> None:
        asks = door.listen(visitor)
        if asks is None:
            return
        self._job.loop.unwatch(visitor.fileno())
        if not asks:
            door.hang_up(visitor)
            return
        if asks == "stop":
            self._on_stop(door, visitor)
            return
        if asks == "name":
            door.answer([visitor], self._standing((), self._job.loop.now))
            return
        self._job.reporter.event("evidence-asked", because="rallypoint stacks asks")
        self._waiting.append(visitor)
        if self._job.others is not None:
            self._here = ()
            self._job.others.ask_where_all_stand()
            loop = self._job.loop
            loop.by("all standings", loop.now + LEAD_ANSWERS_WITHIN, self._answer_alone)
        self._ask()

    def _on_stop(self, door: QuerySocket, visitor: socket.socket) -> None:
        """Answer, then stop the job: one with nothing to end is over with that."""
        again = self._job.state is State.STOPPING
        grace = self._job.plan.grace
        living = tuple(handle.rank for handle in self._job.ranks if handle.ended is None)
        door.answer([visitor], Stopping(living, grace, grace + KILL_PATIENCE, again), stay=True)
        self._stop()

    # --- several nodes

    def answer_lead(self, number: int) -> None:
        """Have the lead told where the ranks of this node stand: its question has this number."""
        self._owed = number
        self._ask()

    def answer_of_all(self, ranks: tuple[RankStanding, ...]) -> Standing:
        """Tell visitors where the ranks of all nodes stand, and return it."""
        standing = self._standing(ranks, self._job.loop.now)
        self._job.loop.cancel("all standings")
        self._answer(standing)
        return standing

    def _answer_alone(self, now: float) -> None:
        """Tell visitors of this node, and that nothing was heard of the others."""
        from rallypoint.launcher.nodes.all_standings import unheard

        seat = self._job.seat
        nodes = [
            self._here if node == seat.node and self._here else unheard(seat.world, node)
            for node in range(seat.world.nodes)
        ]
        self.answer_of_all(tuple(one for ranks in nodes for one in ranks))

    # --- a round

    @property
    def _is_asked(self) -> bool:
        """Whether somebody waits for a round of this node's."""
        return bool(self._owed or (self._waiting and not self._here))

    def _ask(self) -> None:
        """Begin a round, if none is on; its end is looked for."""
        now = self._job.loop.now
        # While a failure is judged the report waits for the answers to its own question: another
        # one now could cost it those.
        if self._round is None and self._job.state is not State.JUDGING:
            self._round = StackSampler(self._job, self._watch)
        self._job.loop.by("standing", now, self._look_for_answers)

    def _look_for_answers(self, now: float) -> None:
        if self._round is not None and self._round.is_over(now):
            ranks, self._round = self._round.standings(now), None
            if self._job.others is None:
                self._answer(self._standing(ranks, now))
            if self._job.is_running:  # else it is being stopped, which is no stall
                self._judge(ranks, now)
            if self._job.others is not None:
                self._here, number, self._owed = ranks, self._owed, 0
                if number:  # after the news of a rank that has moved
                    self._job.others.stand_there(number, ranks)
            return
        if self._round is None and self._is_asked:
            self._ask()
        if self._round is not None or self._is_asked:
            self._job.loop.at("standing", now + ANSWERS_LOOK, self._look_for_answers)

    def _answer(self, standing: Standing) -> None:
        waiting, self._waiting = self._waiting, []
        if self._door is not None:
            self._door.answer([visitor for visitor in waiting if visitor.fileno() >= 0], standing)

    def _standing(self, ranks: tuple[RankStanding, ...], now: float) -> Standing:
        plan, run_dir = self._job.plan, self._job.reporter.run_dir
        name = run_list.name_of(run_dir) if run_dir else plan.job
        return Standing(
            job=exception_capture.sayable(run_dir if plan.run_dir_asked and run_dir else name),
            program=exception_capture.sayable(plan.program.target),
            world_size=self._job.size,
            ranks=ranks,
            age=now,
            attempt=self._job.attempt.number,
            run_dir=exception_capture.sayable(run_dir),
            folder=exception_capture.sayable(os.path.join(plan.task.folder, ""))
            if plan.task is not None
            else "",
            launcher=os.getpid(),
        )

    # --- a stall

    def _next_look(self, now: float) -> float:
        return now + self._watch.interval(now - self._began)

    def _look(self, now: float) -> None:
        """Look at /proc, which disturbs no rank; ask the ranks when that gives a reason to."""
        self._job.loop.at("looks", self._next_look(now), self._look)
        if self._job.is_running and self._round is None:
            self._watch.look(activities(self._job.members), now)
            if self._watch.wants_stacks(now):
                self._ask()
            self._tell_left_behind(now)
        self._tell_moved()

    def _tell_left_behind(self, now: float) -> None:
        """Say, once, that some ranks have ended well, and that no other has moved for a while. No
        rank is asked: it may well have work of its own.
        """
        ended = {
            handle.rank: handle.ended for handle in self._job.ranks if handle.ended is not None
        }
        living = [handle for handle in self._job.ranks if handle.alive]
        if (
            self._left_told
            or not ended
            or not living
            or any(one.code or one.signal for one in ended.values())
        ):
            return
        since = now - max(one.at for one in ended.values())
        still = min(since, *(self._watch.still_for(handle.rank, now) or 0.0 for handle in living))
        if still >= LEFT_BEHIND and not any(handle.halted() for handle in living):
            self._left_told = True
            self._job.console.say_left_behind(
                list(ended), [handle.rank for handle in living], still
            )

    def _judge(self, ranks: tuple[RankStanding, ...], now: float) -> None:
        """Say the stall that this shows, once; none while a person holds a rank in a debugger. Of
        several nodes the lead judges: it is told that this one stands still.
        """
        debugging = any(handle.debugging for handle in self._job.ranks) or any(
            stacks.debugged(rank.frames) for rank in ranks
        )
        stall = self._watch.judge(now, debugged=debugging)
        if stall is not None and self._job.others is not None:
            self._job.others.stand_still(stall)
        elif stall is not None:
            standing = self._standing(ranks, now)
            self._job.reporter.report_stall(stalled(standing, stall.seconds, seen=stall.looks))
        self._tell_moved()

    def _tell_moved(self) -> None:
        """Say, once, that a stall which was told is over."""
        moved = self._watch.moved()
        if not moved or not self._job.is_running:
            return
        if self._job.others is not None:
            self._job.others.go_on(moved)
        else:
            self._job.reporter.report_moved(moved)
