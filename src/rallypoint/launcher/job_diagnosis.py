"""Diagnosis of a whole job: from what each node's agent has gathered, and what the plan says."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rallypoint.diagnosis import rendezvous_mismatch, root_cause
from rallypoint.diagnosis.causes.nodes import with_unheard
from rallypoint.diagnosis.evidence import JobEvidence, LostNode, NodeEvidence
from rallypoint.diagnosis.rendezvous_mismatch import Misfit
from rallypoint.diagnosis.report import Report
from rallypoint.launcher import exception_capture
from rallypoint.launcher.plan import Plan


class FailedAttempt(NamedTuple):
    """All that is known about an attempt that has failed, beside the plan."""

    evidence: Mapping[int, NodeEvidence]  # by node: of those that have answered
    lost: tuple[LostNode, ...] = ()
    unheard: tuple[str, ...] = ()  # hosts of nodes that live and told nothing in time
    misfit: Misfit | None = None  # why the ranks could not meet; their errors came after it
    because: str = ""
    signal: str = ""  # that ended the job from outside
    world_size: int = 1
    attempt: int = 0
    held_address: str = ""  # where the ranks meet
    overdue: float = 0.0  # seconds that the job was given, when they are over


def folder_of_task(plan: Plan) -> str:
    """Return the folder of a caller of `launch`: paths are shown relative to it. "" for a program,
    which has a place of its own.
    """
    return os.path.join(plan.task.folder, "") if plan.task is not None else ""


class Judgement(msgspec.Struct, frozen=True):
    """Reports that come of one look at the evidence, the cause first."""

    reports: tuple[Report, ...]
    followed: tuple[str, ...] = ()  # a line each: ranks that lost one of those at fault
    at: float = 0.0  # when it began, in seconds since the lead's start; 0: not known
    # of the attempt's first cause, which an earlier look may have shown:
    status: int = 1  # what the job leaves with when this is its end
    same: str = ""  # what an equal failure shares; "" for one that may not come again


class Diagnosis:
    """Rules of diagnosis beside what they have told so far of the present attempt."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._attempt = 0
        self._told: set[int] = set()  # ranks with a failure that stands in a report
        self._reports: tuple[Report, ...] = ()

    def judge(self, failed: FailedAttempt, *, all_again: bool = True) -> Judgement:
        """Return what comes of the evidence. Unless `all_again`, only what is new in this attempt."""
        plan = self._plan
        job = JobEvidence(
            program=exception_capture.sayable(plan.program.target),
            world_size=failed.world_size,
            nodes=tuple(failed.evidence[node] for node in sorted(failed.evidence)),
            lost=tuple(sorted(failed.lost, key=lambda one: one.node)),
            unheard=tuple(sorted(failed.unheard)),
            attempt=failed.attempt,
            max_restarts=plan.max_restarts,
            held_address=failed.held_address,
            interrupted_by=failed.signal,
            overdue=failed.overdue,
            stop_reason=failed.because,
            on_failure=plan.on_failure,
            function=plan.task is not None,
            behind=plan.behind,
            moved=plan.moved,
            folder=folder_of_task(plan),
            python=shlex.quote(sys.executable) if sys.executable else "",
        )
        if job.attempt != self._attempt:
            self._attempt, self._told, self._reports = job.attempt, set(), ()
        followed: tuple[str, ...] = ()
        problems = [self._of_problem(node) for node in job.nodes if node.problem is not None]
        if problems:
            reports: tuple[Report, ...] = (problems[0],)
        elif failed.misfit is not None:
            reports = (rendezvous_mismatch.report(failed.misfit, job),)
        elif not self._told or all_again:
            reports = with_unheard(root_cause.diagnose(job), job.unheard)
        else:
            blamed = {rank for report in self._reports for rank in report.ranks}
            news = root_cause.news(job, self._told, blamed)
            reports, followed = news.reports, news.followed
        self._told |= {rank.rank for rank in job.ranks if root_cause.has_failed(rank)}
        self._reports = root_cause.cause_first((*self._reports, *reports))
        first = self._reports[0]
        return Judgement(
            reports,
            followed,
            root_cause.beginning(job, self._reports),
            first.exit_status,
            root_cause.same_again(first),
        )

    def _of_problem(self, node: NodeEvidence) -> Report:
        """Return the report on a node where no rank could be started."""
        problem = node.problem
        assert problem is not None
        if self._plan.nodes is None:
            return problem
        return msgspec.structs.replace(problem, headline=f"on {node.host} {problem.headline}")
