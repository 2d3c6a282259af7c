"""Job of mpirun or mpiexec, as the variables of a task tell it: Open MPI, MPICH, Intel MPI."""

from __future__ import annotations

import hashlib
import os.path
import re

import msgspec

from rallypoint.clusters.cluster import Cluster, Environ, Files, Unclear
from rallypoint.clusters.secret_source import key_path
from rallypoint.errors import EnvironmentProblem, UsageError

FLAGS = "--rdzv-backend c10d --rdzv-endpoint node0:29400 --secret-file ~/rallypoint-secret"
"""Options that tell where node 0 is, when mpirun does not: the same in each task."""

OLDEST_PMIX = 4
"""Major version of the first PMIx that Open MPI does not keep inside itself: that of Open MPI 4 can be
called by nobody else.
"""

DEPTH = 8
"""Processes between mpirun's daemon and this one that are looked at: shells, and what they start."""

_OPEN_MPI = {
    "size": "OMPI_COMM_WORLD_SIZE",
    "rank": "OMPI_COMM_WORLD_RANK",
    # OMPI_COMM_WORLD_NODE_RANK is no number of a node: it is the place of the task on its host, as
    # LOCAL_RANK is, counted over all programs of the job.
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_HYDRA = {
    "size": "PMI_SIZE",
    "rank": "PMI_RANK",
    "local_rank": "MPI_LOCALRANKID",
    "local_size": "MPI_LOCALNRANKS",
}
_PLACE = "rdzv_endpoint", ("say where node 0 is, the same in each task", FLAGS)
_RANKS = "nproc_per_node", ("say how many ranks this task has", "-n 1")
_FILLED_BY = {
    "size": ("nnodes", ("say how many tasks there are", "--nnodes 2")),
    "rank": _PLACE,
    "local_rank": _RANKS,
    "local_size": _RANKS,
}
"""Options with which a job starts although a variable is missing, with the help that says so."""


def look(environ: Environ, files: Files) -> Cluster | None:
    """Return what mpirun tells of the task that this process is."""
    if any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        cluster = _open_mpi(environ)
        bound = _bound(files) if cluster.node == 0 else ""  # it is said once on the one screen
        return _replaced(cluster, notes=(bound,)) if bound else cluster
    if "SLURM_STEP_ID" in environ and "MPI_LOCALNRANKS" not in environ:
        return None  # srun --mpi=pmi2 sets PMI's variables: the task is Slurm's own
    return _hydra(environ, files)


def _open_mpi(environ: Environ) -> Cluster:
    cluster = _tasks("Open MPI", _OPEN_MPI, environ)
    if cluster.nodes == 1:
        return cluster
    namespace = environ.get("PMIX_NAMESPACE", "")
    major = environ.get("PMIX_VERSION", "").partition(".")[0]
    lead_daemon = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if major.isdecimal() and int(major) >= OLDEST_PMIX and namespace:
        said = f"node 0 is told by PMIx {environ['PMIX_VERSION']}"
        return _replaced(cluster, exchange="pmix", job=namespace, because=said)
    if lead_daemon:
        # Its ports make it unlike that of any other job; OMPI_MCA_orte_precondition_transports is
        # random under mpirun alone, and no secret.
        job = f"mpirun-{hashlib.sha256(lead_daemon.encode()).hexdigest()[:16]}"
        folder = os.path.join(os.path.dirname(key_path(environ)), job)
        said = f"node 0 is told by the folder {folder}, from OMPI_MCA_orte_hnp_uri"
        return _replaced(cluster, folder=folder, job=job, because=said)
    return _without_exchange(cluster, "PMIX_NAMESPACE" if major.isdecimal() else "PMIX_VERSION")


def _hydra(environ: Environ, files: Files) -> Cluster:
    name = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH"
    fd = environ.get("PMI_FD", "")
    if fd.isdecimal() and not files.is_open(int(fd)):
        line = f"one node: PMI_FD={fd} is closed, so this process is no task of {name}'s"
        return Cluster(name=name, nodes=1, left_over=True, because=(line,), notes=(line,))
    cluster = _tasks(name, _HYDRA, environ)
    if cluster.nodes == 1:
        return cluster
    if fd.isdecimal():
        return _replaced(
            cluster, exchange="pmi", because=f"node 0 is told by PMI, from PMI_FD={fd}"
        )
    return _without_exchange(cluster, "PMI_FD")


def _without_exchange(cluster: Cluster, missing: str) -> Cluster:
    said = f"{missing} is not set in a task of {cluster.name}'s: node 0 cannot tell the others where it is"
    return _replaced(cluster, unclear=(*cluster.unclear, _gap(_PLACE, said)))


def _gap(filled_by: tuple[str, tuple[str, str]], headline: str) -> Unclear:
    flag, help = filled_by
    return Unclear((flag,), headline, help=(help,))


def _tasks(name: str, names: Environ, environ: Environ) -> Cluster:
    """Return what the numbers of the tasks say: one task for each rank, or one for each node."""
    told: dict[str, int] = {}
    unclear: list[Unclear] = []
    for key, variable in names.items():
        text = environ.get(variable, "")
        if text.isdecimal():
            told[key] = int(text)
            continue
        what = f"is {text!r}, and no number" if text else f"is not set in a task of {name}'s"
        unclear.append(_gap(_FILLED_BY[key], f"{variable} {what}"))
    local = None
    if "local_rank" in told and told.get("local_size", 1) > 1:
        local = (told["local_rank"], told["local_size"])
    return Cluster(
        name=name,
        nodes=told.get("size"),
        node=told.get("rank"),
        slots=1 if local else None,
        local=local,
        one_screen=True,
        because=tuple(f"{names[key]}={number}" for key, number in told.items()),
        unclear=tuple(unclear),
    )


def _replaced(cluster: Cluster, *, because: str = "", **more: object) -> Cluster:
    return msgspec.structs.replace(
        cluster, because=(*cluster.because, *([because] if because else [])), **more
    )


def _bound(files: Files) -> str:
    """Return a line when mpirun has left one processor to the task, "" otherwise. That is its default
    for one or two tasks on a host; torch's threads, loaders, and all ranks of a launcher share it.
    """
    own = files.text("/proc/self/status")
    if re.search(r"^Cpus_allowed_list:\t\d+$", own, re.MULTILINE) is None:
        return ""
    status = own
    for _ in range(DEPTH):
        parent = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
        status = files.text(f"/proc/{parent[1]}/status") if parent else ""
        if re.search(r"^Name:\t(prted|prterun|orted|mpirun)$", status, re.MULTILINE):
            free = re.search(r"^Cpus_allowed_list:\t(.*)$", status, re.MULTILINE)
            if free is None or free[1].isdecimal():
                return ""  # the host, or mpirun itself, has no more
            return f"mpirun has bound each task to one of the processors {free[1]}; with --bind-to none a task has all of them"
    return ""


# --- errors of the exchanges
# --------------------------------------------------------------------------------------------------


def not_answered(step: str, *why: str) -> UsageError:
    """Return the error for an exchange that cannot go on."""
    return UsageError(
        "cluster-unclear",
        f"node 0 cannot tell the others where it is: {step}",
        why=why,
        help=_PLACE[1:],
    )


def not_all_came(timeout: float) -> EnvironmentProblem:
    """Return the error for tasks that did not come to the exchange."""
    return EnvironmentProblem(
        "join-timeout",
        f"not every task has come to the exchange within {timeout:g} s",
        why=("each task must be a rallypoint run, and none may end before",),
        help=(("give them more time", "--rdzv-conf join_timeout=1200"),),
    )
