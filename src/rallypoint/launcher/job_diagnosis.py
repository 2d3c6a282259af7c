"""Diagnosis of a whole job: from what each node's agent has gathered, and what the plan says."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable

import msgspec

from rallypoint.diagnosis import rendezvous_mismatch, root_cause
from rallypoint.diagnosis.evidence import JobEvidence, LostNode, NodeEvidence
from rallypoint.diagnosis.rendezvous_mismatch import Misfit
from rallypoint.diagnosis.report import Report
from rallypoint.launcher import exception_capture
from rallypoint.launcher.plan import Plan


def job_evidence(
    plan: Plan,
    nodes: Iterable[NodeEvidence],
    *,
    world_size: int,
    lost: Iterable[LostNode] = (),
    unheard: Iterable[str] = (),
    attempt: int = 0,
    held_address: str = "",
    interrupted_by: str = "",
    overdue: float = 0.0,
    stop_reason: str = "",
) -> JobEvidence:
    """Return what the rules of diagnosis are given. `nodes`: those that have answered; `lost`:
    those that are gone; `unheard`: hosts of others. The rest is as in `JobEvidence`.
    """
    return JobEvidence(
        program=exception_capture.sayable(plan.program.target),
        world_size=world_size,
        nodes=tuple(sorted(nodes, key=lambda one: one.node)),
        lost=tuple(sorted(lost, key=lambda one: one.node)),
        unheard=tuple(sorted(unheard)),
        attempt=attempt,
        max_restarts=plan.max_restarts,
        held_address=held_address,
        interrupted_by=interrupted_by,
        overdue=overdue,
        stop_reason=stop_reason,
        on_failure=plan.on_failure,
        function=plan.task is not None,
        behind=plan.behind,
        moved=plan.moved,
        folder=folder_of_task(plan),
        python=shlex.quote(sys.executable) if sys.executable else "",
    )


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

    def __init__(self) -> None:
        self._attempt = 0
        self._told: set[int] = set()  # ranks with a failure that stands in a report
        self._reports: tuple[Report, ...] = ()

    def judge(
        self, job: JobEvidence, misfit: Misfit | None = None, *, all_again: bool = True
    ) -> Judgement:
        """Return what comes of the evidence. `misfit`: why the ranks could not meet; their errors
        came after it. Unless `all_again`, only what is new in this attempt.
        """
        if job.attempt != self._attempt:
            self._attempt, self._told, self._reports = job.attempt, set(), ()
        before = tuple(self._told)
        self._told |= {rank.rank for rank in job.ranks if root_cause.has_failed(rank)}
        followed: tuple[str, ...] = ()
        if misfit is not None:
            reports: tuple[Report, ...] = (rendezvous_mismatch.report(misfit, job),)
        elif not before or all_again:
            reports = root_cause.diagnose(job)
        else:
            blamed = {rank for report in self._reports for rank in report.ranks}
            news = root_cause.news(job, before, blamed)
            reports, followed = news.reports, news.followed
        self._reports = root_cause.cause_first((*self._reports, *reports))
        first = self._reports[0]
        return Judgement(
            reports,
            followed,
            root_cause.beginning(job, self._reports),
            first.exit_status,
            root_cause.same_again(first),
        )
