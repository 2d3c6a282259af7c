"""Cluster that has started this process, if any: found by the variables that it sets."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.host.fd_passing import is_open
from rallypoint.host.kernel_files import text_of

if TYPE_CHECKING:
    from rallypoint.clusters.cluster import Cluster, Files

MARKS = (
    ("ray", ("RALLYPOINT_RAY",)),
    ("mpi", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK")),
    ("slurm", ("SLURM_JOB_ID", "SLURM_JOBID")),
    ("kubernetes", ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "LWS_GROUP_SIZE")),
)
"""Modules of clusters, the innermost first, and variables of which each sets one at least."""


class ThisMachine:
    """The `Files` of the machine that this process runs on."""

    def text(self, path: str) -> str:
        return text_of(path, most=-1)

    def is_open(self, fd: int) -> bool:
        return is_open(fd)

    def host(self) -> str:
        return os.uname().nodename


def detect(environ: Mapping[str, str], files: Files | None = None) -> Cluster | None:
    """Return the innermost cluster that has started this process, None for none.

    A module is loaded only when one of its variables is there. A process of a job of ours has been
    given its place by that job: what the cluster told the job's launcher is not its own.
    RALLYPOINT_JOB alone may be a user's: a launcher sets RALLYPOINT_FAMILY beside it.
    """
    marked = [module for module, names in MARKS if any(name in environ for name in names)]
    if not marked:
        return None
    found = _innermost(marked, environ, files or ThisMachine())
    if found is None or not {"RALLYPOINT_JOB", "RALLYPOINT_FAMILY"} <= environ.keys():
        return found
    if found.left_over or (found.nodes == 1 and not found.unclear):
        return None
    from rallypoint.clusters.cluster import Cluster

    # sbatch hands on the variables of a rank that submits the next job.
    why = f"RALLYPOINT_JOB={environ['RALLYPOINT_JOB']} and RALLYPOINT_FAMILY are a rank's"
    line = f"one node: {why}; the script of a job that a rank has submitted begins with `unset RALLYPOINT_FAMILY`"
    return Cluster(name=found.name, nodes=1, left_over=True, because=(line,), notes=(line,))


def _innermost(marked: Sequence[str], environ: Mapping[str, str], files: Files) -> Cluster | None:
    import msgspec

    found: Cluster | None = None
    for module in marked:
        look = importlib.import_module(f"rallypoint.clusters.{module}").look
        cluster: Cluster | None = look(environ, files)
        if cluster is None:
            continue
        if found is None or found.left_over:
            found = cluster
        elif not cluster.left_over and (cluster.nodes != 1 or cluster.unclear):
            outer = f"inside {cluster.name}: {found.name} has started this process, and is asked"
            return msgspec.structs.replace(found, because=(*found.because, outer))
    return found
