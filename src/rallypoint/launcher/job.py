"""What the agent's parts share: the loop, the account, the present attempt, and the one who decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.launcher.loop import Loop
from rallypoint.launcher.plan import Plan
from rallypoint.launcher.supervisor import Action, Event, State, Supervisor, Timer

if TYPE_CHECKING:
    from rallypoint.launcher.account import Account
    from rallypoint.launcher.attempt import Attempt
    from rallypoint.launcher.handles import RankHandle


class Job:
    """One node's share of a job. A part tells the supervisor what it has seen (`feed`), and never what to do about it."""

    def __init__(
        self, plan: Plan, loop: Loop, account: Account, attempt: Attempt, supervisor: Supervisor, act: Callable[[Action], None]
    ) -> None:
        """`act` does what the supervisor says."""
        self.plan = plan
        self.loop = loop
        self.account = account
        self.attempt = attempt  # the present one; empty before the first
        self._supervisor = supervisor
        self._act = act

    @property
    def ranks(self) -> list[RankHandle]:
        """The ranks of this attempt, by rank; none before the first."""
        return self.attempt.ranks

    @property
    def spawned(self) -> list[RankHandle]:
        """The processes that the only rank has spawned, by index; [] when none of them lives."""
        found = self.attempt.spawned
        return found if any(one.alive for one in found) else []

    @property
    def members(self) -> list[RankHandle]:
        """Who is to meet in init_process_group: the ranks or, where the only rank has spawned processes for that, these."""
        return self.spawned or self.ranks

    @property
    def size(self) -> int:
        """How many `members` there are when all have been started."""
        return self.attempt.spawned_size if self.spawned else self.plan.world.size

    @property
    def state(self) -> State:
        """Where the job is."""
        return self._supervisor.state

    @property
    def is_running(self) -> bool:
        """Whether nothing has gone wrong so far, and nobody wants it to end."""
        return self.state is State.RUNNING

    def feed(self, event: Event) -> None:
        """Something has happened: do what follows from it."""
        for action in self._supervisor.handle(event, self.loop.now):
            self._act(action)

    def remind(self, name: str, when: float) -> None:
        """The supervisor wants to hear of this time."""
        self.loop.at(name, when, lambda now: self.feed(Timer(name)))
