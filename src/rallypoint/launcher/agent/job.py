"""State that the agent's parts share, and the parts themselves: each reaches the others through
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.diagnosis import render
from rallypoint.diagnosis.evidence import Ended, HelperLost
from rallypoint.diagnosis.report import Report
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.event_loop import Loop
from rallypoint.launcher.agent.supervisor import Action, JobEvent, State, Supervisor
from rallypoint.launcher.plan import Plan

if TYPE_CHECKING:
    from rallypoint.errors import RallypointError
    from rallypoint.launcher.agent.attempt import Attempt
    from rallypoint.launcher.agent.console import Console
    from rallypoint.launcher.agent.evidence_gatherer import EvidenceGatherer
    from rallypoint.launcher.agent.hang_monitor import HangMonitor
    from rallypoint.launcher.agent.helper_handles import TemplateHandle
    from rallypoint.launcher.agent.helper_processes import HelperProcesses
    from rallypoint.launcher.agent.launch_request import LaunchRequest
    from rallypoint.launcher.agent.other_nodes import OtherNodes
    from rallypoint.launcher.agent.preloaded_parts import PreloadedParts
    from rallypoint.launcher.agent.process_handles import RankHandle
    from rallypoint.launcher.agent.rank_endings import RankEndings
    from rallypoint.launcher.agent.rank_starter import RankStarter
    from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
    from rallypoint.launcher.agent.reporter import Reporter
    from rallypoint.launcher.agent.spawned_ranks import SpawnedRanks
    from rallypoint.launcher.agent.worker_messages import WorkerMessages
    from rallypoint.world import Seat


class Job:
    """One node's share of a job. A part tells the supervisor what it has seen (`feed`), and never
    what to do about it.
    """

    # The parts, set by the agent once there is a job.
    rendezvous: RendezvousMonitor
    hang_monitor: HangMonitor
    spawn_monitor: SpawnedRanks
    messages: WorkerMessages
    endings: RankEndings
    starter: RankStarter

    def __init__(
        self,
        plan: Plan,
        loop: Loop,
        attempt: Attempt,
        decider: Supervisor,
        act: Callable[[Action], None],
        *,
        helpers: HelperProcesses,
        parts: PreloadedParts,
        console: Console,
        reporter: Reporter,
        evidence: EvidenceGatherer,
        request: LaunchRequest | None = None,
        others: OtherNodes | None = None,
    ) -> None:
        """`act` carries out an action of the supervisor's."""
        self.plan = plan
        self.loop = loop
        self.attempt = attempt  # the present one; without ranks before the first
        self.supervisor = decider
        self.helpers = helpers
        self.parts = parts
        self.console = console
        self.reporter = reporter
        self.evidence = evidence
        self.request = request  # the call of `launch` that the job carries out
        self.others = others  # of a job on several nodes
        self.problem: Report | None = None  # why nothing could be started
        self.lost: HelperLost | None = None
        self._act = act

    @property
    def seat(self) -> Seat:
        """This node's place in the present attempt."""
        return self.attempt.seat

    @property
    def ranks(self) -> list[RankHandle]:
        """The ranks of this node in this attempt, by local rank; none before the first."""
        return self.attempt.ranks

    def rank(self, number: int) -> RankHandle | None:
        """Return this node's rank with this number; None when it has no handle (yet)."""
        return next((handle for handle in self.ranks if handle.rank == number), None)

    @property
    def template(self) -> TemplateHandle:
        """The template, which there is as long as the job goes on."""
        assert self.helpers.template is not None
        return self.helpers.template

    @property
    def spawned(self) -> list[RankHandle]:
        """The processes that the only rank has spawned, by index; [] when none of them lives."""
        found = self.attempt.spawned
        return found if any(one.alive for one in found) else []

    @property
    def members(self) -> list[RankHandle]:
        """The processes that are to meet in init_process_group: the ranks, or what the only rank
        has spawned for that.
        """
        return self.spawned or self.ranks

    @property
    def size(self) -> int:
        """Number of `members` when all have been started."""
        return self.attempt.spawned_size if self.spawned else self.seat.world.size

    @property
    def state(self) -> State:
        """State of the job."""
        return self.supervisor.state

    @property
    def is_running(self) -> bool:
        """Whether nothing has failed so far and no end was asked for."""
        return self.state is State.RUNNING

    def feed(self, event: JobEvent) -> None:
        """Tell the supervisor of an event, and do what it decides."""
        for action in self.supervisor.handle(event, self.loop.now):
            self._act(action)
        if self.others is not None:
            self.others.note(event)

    def helper_lost(self, name: str, pid: int, code: int, signal: int) -> None:
        """End the job because a helper process has ended by itself."""
        self.lost = HelperLost(name, pid, Ended(code, signal, self.loop.now))
        self.reporter.event(
            "ended", because=f"the {name} ended by itself", pid=pid, code=code, signal=signal
        )
        self.feed(supervisor.HelperEnded(name))

    def impossible(self, problem: RallypointError | Report, because: str = "") -> None:
        """End the job because it cannot be started."""
        self.problem = problem if isinstance(problem, Report) else render.report_of(problem)
        self.feed(supervisor.Impossible(because or str(problem)))
