"""Evidence of a whole job: from what each node's agent has gathered, and what the plan says."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable

from rallypoint.diagnosis.evidence import JobEvidence, LostNode, NodeEvidence
from rallypoint.launcher import exception_capture
from rallypoint.launcher.plan import Plan


def of_nodes(
    plan: Plan,
    nodes: Iterable[NodeEvidence],
    *,
    world_size: int,
    lost: Iterable[LostNode] = (),
    attempt: int = 0,
    held_address: str = "",
    interrupted_by: str = "",
    overdue: float = 0.0,
    stop_reason: str = "",
) -> JobEvidence:
    """Return what the rules of diagnosis are given. `nodes`: those that have answered;
    `lost`: those that are gone. The rest is as in `JobEvidence`.
    """
    return JobEvidence(
        program=exception_capture.sayable(plan.program.target),
        world_size=world_size,
        nodes=tuple(sorted(nodes, key=lambda one: one.node)),
        lost=tuple(sorted(lost, key=lambda one: one.node)),
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
    whose own place tells.
    """
    return os.path.join(plan.task.folder, "") if plan.task is not None else ""
