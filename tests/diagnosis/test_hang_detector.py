"""Since when main threads stand, and when their stacks are worth asking for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.hang_detector import LOOK_EVERY, Stall, Watch
from rallypoint.host.process_status import Activity

TICKS = 100
HERE, THERE = (Frame("/train.py", 42, "step"),), (Frame("/train.py", 30, "load"),)

Life = Callable[[float], Activity]
"""A main thread's activity at a time."""


def asleep(now: float) -> Activity:
    return Activity("S", 50, 7, 9)


def polling(now: float) -> Activity:
    """A loader's wait: it wakes every 5 s."""
    return Activity("S", 50, 7 + int(now / 5), 9 + int(now / 5))


def polling_often(now: float) -> Activity:
    """`while not path.exists(): time.sleep(0.05)`: 0.2 ms of processor time each."""
    return Activity("S", 50 + int(now * 20 * 0.02), 7 + int(now * 20), 9 + int(now * 20))


def spinning(now: float) -> Activity:
    """A wait of NCCL's: always on a processor, and pushed off it now and then."""
    return Activity("R", int(now * TICKS), 7, 9 + int(now * 10))


def training(now: float) -> Activity:
    """Work, with 20 waits in a second."""
    return Activity("R", int(now * TICKS / 2), int(now * 20), int(now * 30))


class Job:
    """Looks, asks and judges as the agent does."""

    def __init__(self, patience: float | None, *lives: Life) -> None:
        self.watch = Watch(TICKS, patience)
        self.patience = patience
        self.lives = list(lives)
        self.places = [HERE] * len(lives)
        self.asked: list[float] = []
        self.told: list[tuple[float, Stall]] = []
        self.moved: list[tuple[float, tuple[int, ...]]] = []
        self.debugged = False
        self.now = 0.0

    def until(self, end: float) -> Job:
        while self.now + self.watch.interval(self.now) <= end:
            self.now += self.watch.interval(self.now)
            self.watch.look(
                {rank: life(self.now) for rank, life in enumerate(self.lives)}, self.now
            )
            self._tell_moved()
            if self.watch.wants_stacks(self.now):
                self.ask()
                if stall := self.watch.judge(self.now, debugged=self.debugged):
                    self.told.append((self.now, stall))
            self._tell_moved()
        return self

    def ask(self) -> list[float | None]:
        self.asked.append(self.now)
        watch, now = self.watch, self.now
        watch.look({rank: life(now) for rank, life in enumerate(self.lives)}, now)
        return [
            watch.stood(rank, self.places[rank], life(now), now, now + 0.25)
            for rank, life in enumerate(self.lives)
        ]

    def _tell_moved(self) -> None:
        if ranks := self.watch.moved():
            self.moved.append((self.now, ranks))


def test_ranks_that_do_not_run_are_told_in_time_and_asked_once() -> None:
    job = Job(60.0, asleep, asleep).until(600.0)
    ((when, stall),) = job.told
    assert 60.0 <= when <= 60.0 * 9 / 8 + LOOK_EVERY
    assert stall.seconds >= 60.0
    assert stall.looks == 0  # that they have not run shows it
    assert len(job.asked) == 1


def test_a_job_that_works_is_never_asked() -> None:
    assert Job(60.0, training, training, asleep).until(3600.0).asked == []


def test_waits_that_poll_or_spin_are_found_at_one_place_more_than_once() -> None:
    for life in (polling, polling_often, spinning):
        job = Job(60.0, asleep, life).until(600.0)
        ((when, stall),) = job.told
        assert 60.0 <= when <= 120.0
        assert stall.looks >= 2
        assert stall.seconds >= 60.0


def test_who_is_found_somewhere_else_each_time_is_not_standing() -> None:
    job = Job(60.0, asleep, spinning)
    for i in range(100):
        job.places[1] = (Frame("/train.py", i, "step"),)
        job.until(job.now + 20.0)
    assert job.asked
    assert job.told == []
    assert (
        min(b - a for a, b in zip(job.asked, job.asked[1:], strict=False)) >= 30.0
    )  # it may be healthy: it is not asked too often


def test_a_rank_in_a_debugger_pauses_it() -> None:
    job = Job(60.0, asleep, asleep)
    job.debugged = True
    assert job.until(600.0).told == []
    job.debugged = False
    assert len(job.until(700.0).told) == 1


def test_when_a_rank_moves_it_is_over_and_a_second_stall_is_told() -> None:
    job = Job(60.0, asleep, asleep).until(200.0)
    job.lives[1] = training
    job.until(400.0)
    assert [ranks for _, ranks in job.moved] == [(1,)]
    job.lives[1] = lambda now: training(400.0)
    job.until(600.0)
    assert len(job.told) == 2


def test_a_rank_that_moved_on_to_another_wait_has_moved() -> None:
    job = Job(60.0, asleep, asleep).until(200.0)
    job.places[1] = THERE
    job.lives[1] = lambda now: Activity("S", 51, 8, 10)
    job.until(300.0)
    assert [ranks for _, ranks in job.moved] == [(1,)]


def test_a_rank_that_ends_has_moved() -> None:
    job = Job(60.0, asleep, asleep).until(200.0)
    del job.lives[1]
    job.until(210.0)
    assert [ranks for _, ranks in job.moved] == [(1,)]


def test_without_patience_nobody_is_asked_and_since_when_is_known_all_the_same() -> None:
    job = Job(None, asleep, training).until(60.0)
    assert job.asked == []
    assert job.watch.still_for(0, job.now) is not None
    assert job.watch.still_for(1, job.now) is None  # it has just run
    first, second = job.ask()
    assert first is not None
    assert 54.0 <= first <= 60.5
    assert second is None


def test_our_own_question_does_not_count_as_movement() -> None:
    job = Job(None, asleep).until(60.0)
    job.ask()
    woken = Activity("S", 51, 8, 10)
    job.watch.stood(0, HERE, woken, job.now, job.now + 0.25)
    job.lives[0] = lambda now: woken
    job.until(120.0)
    (since,) = job.ask()
    assert since is not None
    assert since >= 110.0


def test_young_jobs_are_looked_at_more_often() -> None:
    watch = Watch(TICKS)
    assert watch.interval(0.0) < 0.5
    assert watch.interval(3600.0) == LOOK_EVERY
    assert Watch(TICKS, 8.0).interval(3600.0) == 1.0


@given(
    some.lists(
        some.tuples(some.floats(0, 5), some.integers(0, 9), some.integers(0, 9), some.booleans()),
        max_size=60,
    ),
    some.floats(1, 9),
)
def test_a_stall_is_never_told_of_a_thread_that_worked_meanwhile(
    steps: list[tuple[float, int, int, bool]], patience: float
) -> None:
    """Whatever the looks show: between a moment of work and the telling there are at least as many
    seconds as asked for.
    """
    watch, now, worked, cpu, waits = Watch(TICKS, patience), 0.0, 0.0, 0, 0
    for passed, used, more, asks in steps:
        now, cpu, waits = now + passed, cpu + used * 20, waits + more * 20
        if used and more and used * 20 > max(1.0, 0.02 * passed * TICKS):
            worked = now
        activity = Activity("S", cpu, waits, waits)
        watch.look({0: activity}, now)
        if asks or watch.wants_stacks(now):
            watch.stood(0, HERE, activity, now, now)
            stall = watch.judge(now, debugged=False)
            assert stall is None or now - worked >= patience > 0


@pytest.mark.parametrize("patience", [1.0, 2.0, 5.0])
@pytest.mark.parametrize(
    ("sleeps", "works"), [(0.3, 0.1), (0.3, 0.3), (0.1, 0.3), (0.05, 0.05), (0.9, 0.9)]
)
def test_who_works_and_waits_in_one_line_is_not_standing(
    patience: float, sleeps: float, works: float
) -> None:
    """Each look saw only the one or only the other, and what changed while the answer was on its
    way was taken for our own doing.
    """
    for phase in range(20):

        def life(now: float, begun: float = phase * 0.037) -> Activity:
            turns, within = divmod(now + begun, sleeps + works)
            worked = turns * works + max(0.0, within - sleeps)
            return Activity(
                "S" if within < sleeps else "R",
                int(worked * TICKS),
                int(turns) + 1,
                2 * int(turns) + 1 + (within > sleeps),
            )

        watch, now = Watch(TICKS, patience), 0.0
        while now < 10 * patience:
            now += watch.interval(now)
            watch.look({0: life(now)}, now)
            if watch.wants_stacks(now):
                asked, now = now, now + 0.26
                watch.stood(0, HERE, life(now), asked, now)
                assert watch.judge(now, debugged=False) is None, (phase, now)
