"""Judgement of an attempt that has failed, from the evidence of all its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rallypoint.diagnosis.causes.nodes import with_unheard
from rallypoint.diagnosis.evidence import LostNode, NodeEvidence
from rallypoint.diagnosis.rendezvous_mismatch import Misfit
from rallypoint.launcher.job_diagnosis import Diagnosis, job_evidence
from rallypoint.launcher.nodes.messages import Sentence
from rallypoint.launcher.plan import Plan


class FailedAttempt(NamedTuple):
    """All that is known about an attempt that has failed."""

    evidence: Mapping[int, NodeEvidence]  # by node
    lost: tuple[LostNode, ...] = ()
    unheard: tuple[str, ...] = ()  # hosts of nodes that live and told nothing in time
    misfit: Misfit | None = None
    because: str = ""
    signal: str = ""  # that ended the job from outside
    world_size: int = 1
    attempt: int = 0
    held_address: str = ""  # where the ranks meet


def judge(plan: Plan, failed: FailedAttempt) -> Sentence:
    """Return the reports about an attempt, from the evidence of its nodes. Pure; the lead's thread
    calls it.
    """
    job = job_evidence(
        plan,
        failed.evidence.values(),
        world_size=failed.world_size,
        lost=failed.lost,
        unheard=failed.unheard,
        attempt=failed.attempt,
        held_address=failed.held_address,
        interrupted_by=failed.signal,
        stop_reason=failed.because,
    )
    problems = [node for node in job.nodes if node.problem is not None]
    if problems:
        return _of_problem(problems[0])
    found = Diagnosis().judge(job, failed.misfit)
    reports = found.reports if failed.misfit else with_unheard(found.reports, job.unheard)
    return Sentence(reports, found.status, found.same, found.at, found.followed)


def _of_problem(node: NodeEvidence) -> Sentence:
    """Return the report on a node where no rank could be started."""
    assert node.problem is not None
    headline = f"on {node.host} {node.problem.headline}"
    report = msgspec.structs.replace(node.problem, headline=headline)
    return Sentence((report,), report.exit_status)
