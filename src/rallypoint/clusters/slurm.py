"""Job of Slurm's, as the variables of a step tell it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rallypoint.clusters.cluster import Cluster, Files, Unclear

PORTS = 16
"""Ports that the lead tries: jobs of one host have them from their numbers, and may overlap."""


def look(environ: Mapping[str, str], files: Files) -> Cluster | None:
    """Return what Slurm tells of the step to which this process belongs."""
    job = environ["SLURM_JOB_ID"]
    if "SLURM_STEP_ID" not in environ:
        return Cluster(
            name="Slurm",
            nodes=1,
            because=(f"one node: job {job} has not started this process by srun",),
        )
    told, unclear = {}, []
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"):
        text = environ.get(name, "")
        if text.isdecimal():
            told[name] = int(text)
        else:
            unclear.append(
                Unclear(
                    ("nnodes", "node_rank", "rdzv_endpoint"),
                    f"{name} is {text!r}, and no number"
                    if text
                    else f"{name} is not set in a step of Slurm's",
                )
            )
    nodes = told.get("SLURM_STEP_NUM_NODES")
    tasks = told.get("SLURM_STEP_NUM_TASKS")
    if nodes is not None and tasks is not None and nodes != tasks:
        unclear.append(
            Unclear(
                ("nnodes", "node_rank", "rdzv_endpoint"),
                f"SLURM_STEP_NUM_TASKS={tasks} and SLURM_STEP_NUM_NODES={nodes}: not one task on each node",
                help=(("start one task on each node", "srun --ntasks-per-node=1 ..."),),
            )
        )
    listed = environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", listed)
    host = "".join(part or "" for part in first.groups()) if first else ""
    if not host and nodes != 1:
        unclear.append(
            Unclear(("rdzv_endpoint",), "SLURM_STEP_NODELIST is not set in a step of Slurm's")
        )
    start = 20000 + int(job) * PORTS % 10000 if job.isdecimal() else 20000
    return Cluster(
        name="Slurm",
        nodes=nodes,
        node=told.get("SLURM_NODEID"),
        host=host,
        ports=tuple(range(start, start + PORTS)),
        job=f"{job}.{environ['SLURM_STEP_ID']}",
        one_screen=True,
        because=(
            *(f"{name}={number}" for name, number in told.items()),
            f"node 0 is {host or 'not known'}, from SLURM_STEP_NODELIST={listed}",
        ),
        unclear=tuple(unclear),
    )
