"""Judgement of an attempt that has failed, from the evidence of all its nodes. Pure."""

from __future__ import annotations

from rallypoint.launcher.job_diagnosis import Diagnosis, FailedAttempt
from rallypoint.launcher.nodes.messages import Sentence
from rallypoint.launcher.plan import Plan


def judge(plan: Plan, failed: FailedAttempt) -> Sentence:
    """Return the reports about an attempt, from the evidence of its nodes. Pure; the lead's thread
    calls it.
    """
    found = Diagnosis(plan).judge(failed)
    return Sentence(found.reports, found.status, found.same, found.at, found.followed)
