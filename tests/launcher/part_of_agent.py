"""A job without processes: a clock that is moved by hand, the real supervisor, and stand-ins for
console and reporter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rallypoint.diagnosis.evidence import Meeting
from rallypoint.launcher.agent import supervisor as sv
from rallypoint.launcher.agent.attempt import Attempt
from rallypoint.launcher.agent.event_loop import Loop
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.supervisor import Supervisor
from rallypoint.launcher.plan import alone
from rallypoint.testing.clock import ManualClock

from .test_plan import plan


class Words:
    """Stands for the console, the reporter and the evidence of the ranks."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.pump = SimpleNamespace(interrupts=False)
        self.said: list[tuple[Any, ...]] = []
        self.lost: tuple[str, int] | None = None  # what a rank's error speaks of
        self.missing: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("say", "event", "announce", "report")):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.said.append((name, *args, *kwargs.values()))

    def unmet(self, ranks: object) -> tuple[str, int] | None:
        return self.lost

    def absent(self, ranks: object, size: int) -> tuple[int, ...]:
        return self.missing

    def roll_call(
        self, ranks: object, size: int, asked: list[Any], seen: object, *, spawned: bool
    ) -> tuple[Any, ...]:
        return (asked, seen)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [said[1:] for said in self.said if said[0] == name]


class Rank:
    """A rank's handle, as the questions to it need one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.alive = self.answers = True
        self.stopped = self.asked = False
        self.waiting = self.debugging = self.sleeps = self.deaf = False
        self.meeting: Meeting | None = None
        self.pid = 0
        self.raised = self.ended = self.unanswered = None
        self.sent = ["SIGTERM"]

    def ask(self) -> bool:
        self.asked = True
        return True

    def answered(self) -> bool:
        return self.answers

    def may_wait(self) -> bool:
        return self.sleeps

    def may_be_deaf(self) -> bool:
        return self.sleeps

    def waits(self, now: float, *, together: bool) -> str:
        return "deaf" if self.deaf else ""

    def halted(self) -> bool:
        return self.stopped


class Scene:
    """A running job of `size` ranks, whose handles are real ones without a process unless others
    are given.
    """

    def __init__(
        self,
        size: int = 2,
        ranks: list[Any] | None = None,
        *,
        held: str = "127.0.0.1:29500",
        run_dir: str = "",
        **asked: Any,
    ) -> None:
        self.clock = ManualClock()
        self.loop = Loop(self.clock)
        self.words = Words(run_dir)
        self.ranks: list[Any] = (
            [RankHandle(rank, rank) for rank in range(size)] if ranks is None else ranks
        )
        self.supervisor = Supervisor(range(size), max_restarts=0, grace=30.0, on_failure="stop")
        self.actions: list[sv.Action] = []
        asked_for = plan(nproc=size, **asked)
        attempt = cast(
            Attempt,
            SimpleNamespace(
                ranks=self.ranks,
                seat=alone(asked_for),
                spawned=[],
                spawned_size=0,
                held=held,
                number=0,
                host=None,
            ),
        )
        words = cast(Any, self.words)
        self.job = Job(
            asked_for,
            self.loop,
            attempt,
            self.supervisor,
            self.actions.append,
            helpers=cast(Any, None),
            parts=cast(Any, None),
            console=words,
            reporter=words,
            evidence=words,
        )
        self.job.feed(sv.Prepared())
        self.actions.clear()

    def close(self) -> None:
        for handle in self.ranks:
            if isinstance(handle, RankHandle):
                handle.close()
        self.loop.close()

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and call for all that has become due or readable."""
        self.clock.advance(seconds)
        self.turn()

    def turn(self) -> None:
        """One turn of the loop, which waits for nothing."""
        self.loop.at("the test's own", self.loop.now, lambda now: None)
        self.loop.turn()

    def of(self, kind: type[Any]) -> list[Any]:
        """The supervisor's actions of a kind."""
        return [action for action in self.actions if isinstance(action, kind)]
