"""Job of Kubernetes, as the environment of a pod's container tells it.

LeaderWorkerSet and the operators of Kubeflow set variables of their own. Pods of an indexed Job, of
a JobSet and of a StatefulSet have a number in their host name, and a headless service gives each of
them a name in the DNS. No variable has the number of these pods: the manifest has to say it.
Kubeflow Trainer's TrainJob is a JobSet in which torchrun's PET_* variables say what is missing.
"""

from __future__ import annotations

import re

from rallypoint.clusters.cluster import Cluster, Environ, Files, Unclear
from rallypoint.errors import Advice

SECRET_HELP = (
    (
        "make one, once for each namespace",
        "head -c 32 /dev/urandom | base64 | kubectl create secret generic rallypoint --from-file=secret=/dev/stdin",
    ),
    (
        "and mount it at /etc/rallypoint in every pod: docs/guides/kubernetes.md has the lines",
        "",
    ),
)

_COUNT_LINE = '- {name: PET_NNODES, value: "2"}'
_PLACE = ("rdzv_endpoint",)


def look(environ: Environ, files: Files) -> Cluster | None:
    """Return what Kubernetes tells of the job of this pod; None in a pod that is not one of several."""
    # The kubelet sets the first in every container. A shell there may start without it.
    if not any(
        name in environ for name in ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", *_LWS)
    ):
        return None
    return (
        _leader_worker_set(environ, files)
        or _pytorch_job(environ, files)
        or _numbered_pod(environ, files)
    )


def _job(
    kind: str,
    told: _Numbers,
    host: str,
    *,
    node: int | None,
    nodes: int | None = None,
    slots: int | None = None,
    job: str = "",
) -> Cluster:
    return Cluster(
        name="Kubernetes",
        nodes=nodes,
        node=node,
        slots=slots,
        host=host,
        own_homes=True,
        job=job or host,  # no variable has another name that all pods of the job know
        because=(kind, *told.because),
        unclear=tuple(told.unclear),
        secret_help=SECRET_HELP,
    )


# --- LeaderWorkerSet


_LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")


def _leader_worker_set(environ: Environ, files: Files) -> Cluster | None:
    if not any(name in environ for name in _LWS):
        return None
    told = _Numbers(environ)
    leader = environ.get("LWS_LEADER_ADDRESS", "")
    nodes = told.read("LWS_GROUP_SIZE", ("nnodes",))
    node = _place_behind(leader, files.host())
    if node is None or "LWS_WORKER_INDEX" in environ:  # set from version 0.6 on
        node = told.read("LWS_WORKER_INDEX", ("node_rank",))
    if leader:
        told.because.append(f"node 0 is {leader}, from LWS_LEADER_ADDRESS")
    else:
        told.miss("LWS_LEADER_ADDRESS", _PLACE)
    return _job("a pod of a LeaderWorkerSet", told, leader, nodes=nodes, node=node)


def _place_behind(leader: str, host: str) -> int | None:
    """Return the number that a worker's host name adds to its leader's: "serve-0-3" and "serve-0"."""
    first, pod = leader.split(".")[0], host.split(".")[0]
    if first and pod == first:
        return 0
    number = pod.removeprefix(f"{first}-")
    return int(number) if first and number != pod and number.isdecimal() else None


# --- PyTorchJob


def _pytorch_job(environ: Environ, files: Files) -> Cluster | None:
    """Look for a PyTorchJob (kubeflow.org/v1). RANK is the pod's number; WORLD_SIZE counts pods or,
    in operators that set PET_NNODES beside it, ranks.
    """
    named = [name for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE") if name in environ]
    if len(named) < 2 or "LOCAL_RANK" in environ:  # the last is of a rank, whoever has started it
        return None
    told = _Numbers(environ)
    node = told.read("PET_NODE_RANK" if "PET_NODE_RANK" in environ else "RANK", ("node_rank",))
    nodes, slots = _sizes(environ, told)
    host = environ.get("MASTER_ADDR", "")
    if host in ("localhost", "127.0.0.1") and nodes != 1:  # as old operators told the master
        host = files.host() if node == 0 else ""
    if host:
        told.because.append(f"node 0 is {host}, from MASTER_ADDR={environ['MASTER_ADDR']}")
    elif nodes != 1:
        told.miss("MASTER_ADDR", _PLACE)
    return _job("a pod of a PyTorchJob", told, host, nodes=nodes, node=node, slots=slots)


def _sizes(environ: Environ, told: _Numbers) -> tuple[int | None, int | None]:
    """Return the pods of a PyTorchJob, and the ranks of each if they are known by now."""
    each = environ.get("PET_NPROC_PER_NODE", "")
    if "PET_NNODES" in environ:
        nodes = told.read("PET_NNODES", ("nnodes",))
        size = environ.get("WORLD_SIZE", "")
        if not nodes or each or not size.isdecimal() or int(size) == nodes or int(size) % nodes:
            return nodes, None
        told.because.append(f"{int(size) // nodes} ranks in each, from WORLD_SIZE={size}")
        return nodes, int(size) // nodes
    if each.isdecimal() and int(each) > 1:
        headline = "WORLD_SIZE of a PyTorchJob may count pods or ranks: PET_NNODES is not set"
        told.unclear.append(Unclear(("nnodes",), headline, help=(_COUNT,)))
        return None, None
    return told.read("WORLD_SIZE", ("nnodes",)), None


# --- indexed Job, JobSet, TrainJob, StatefulSet


def _numbered_pod(environ: Environ, files: Files) -> Cluster | None:
    told = _Numbers(environ)
    indexed = "JOB_COMPLETION_INDEX" in environ
    pod, _, domain = files.host().partition(".")
    domain = domain or _domain(pod, files.text("/etc/hosts"))
    stem, _, number = pod.rpartition("-")
    named = int(number) if stem and number.isdecimal() else None
    if indexed:
        node = told.read("JOB_COMPLETION_INDEX", ("node_rank",))
        kind = "a pod of an indexed Job"
    elif named is not None and domain:
        node = named
        kind = "a pod of a StatefulSet"
        told.because.append(f"node {node}, from the host name {pod}")
    else:
        return None
    if "PET_NNODES" in environ:
        told.because.append(f"{environ['PET_NNODES']} nodes, from PET_NNODES")
    else:
        told.unclear.append(_without_count(kind, pod, environ))
    host = ""
    given = environ.get("PET_MASTER_ADDR") or environ.get("PET_RDZV_ENDPOINT")
    if given:
        told.because.append(f"node 0 is {given}, from the PET_* variables")
    elif why := _not_named(pod, node, named, domain, environ):
        told.unclear.append(why)
    else:
        host = f"{stem}-0.{domain}"
        told.because.append(f"node 0 is {host}, after the name of this pod")
    return _job(kind, told, host, job=given or "", node=node)


def _domain(pod: str, hosts: str) -> str:
    """Return what stands behind a pod's name in /etc/hosts, where the kubelet writes the whole name
    of a pod that has a subdomain.
    """
    for line in hosts.splitlines():
        for name in line.partition("#")[0].split()[1:]:
            first, _, rest = name.partition(".")
            if first == pod and rest:
                return rest
    return ""


_COUNT = ("say how many pods there are, in the manifest, below env", _COUNT_LINE)
_NAME = ("name it, the same in every pod", "- {name: PET_MASTER_ADDR, value: ...}")
_FILLS = {
    "nnodes": _COUNT,
    "node_rank": ("say which pod this is, from 0", "- {name: PET_NODE_RANK, value: ...}"),
    "rdzv_endpoint": ("name the host of node 0, the same in every pod", _NAME[1]),
}
"""Help for an option that a variable of the pod did not tell."""


def _without_count(kind: str, pod: str, environ: Environ) -> Unclear:
    index = environ.get("JOB_COMPLETION_INDEX")
    source = f"the host name {pod}" if index is None else f"JOB_COMPLETION_INDEX={index}"
    return Unclear(
        ("nnodes",),
        "the number of pods of this job is not told: PET_NNODES is not set",
        why=(f"{source} shows {kind}, and nothing in a pod has the number of them",),
        help=(
            _COUNT,
            ("pods that each work alone are jobs on one node", "rallypoint run --nnodes 1 ..."),
        ),
    )


def _not_named(
    pod: str, node: int | None, named: int | None, domain: str, environ: Environ
) -> Unclear | None:
    """Return why the name of node 0 cannot be made from this pod's, None where it can."""
    help: Advice = (_NAME,)
    rank = environ.get("PET_NODE_RANK", "")
    if rank and rank != str(node):
        headline = f"this is node {rank} by PET_NODE_RANK and pod {node} by its name: the address of node 0 is not told"
    elif named != node:
        headline = f"the address of node 0 is not told: this pod's host name is {pod}, which does not end in its number, {node}"
    elif not domain:
        headline = f"the pods of this job have no names in the DNS: {pod} has no subdomain"
        help = (
            ("name a headless Service in the pods' spec", "subdomain: ..."),
            ("a headless Service of that name has to be there: docs/guides/kubernetes.md", ""),
        )
    else:
        return None
    return Unclear(_PLACE, headline, help=help)


# --- numbers


class _Numbers:
    """Numbers read from variables, with lines about them, and what is unclear of them."""

    def __init__(self, environ: Environ) -> None:
        self._environ = environ
        self.because: list[str] = []
        self.unclear: list[Unclear] = []

    def read(self, name: str, flags: tuple[str, ...]) -> int | None:
        """Return the number in a variable; None, and an `Unclear` more, where there is none."""
        text = self._environ.get(name, "")
        if re.fullmatch(r"[0-9]{1,9}", text):
            self.because.append(f"{name}={text}")
            return int(text)
        self.miss(name, flags)
        return None

    def miss(self, name: str, flags: tuple[str, ...]) -> None:
        """Note that a variable has no value that can be used."""
        text = self._environ.get(name)
        gap = "is not set" if text is None else f"is {text!r}, which cannot be used"
        self.unclear.append(
            Unclear(flags, f"{name} {gap} in this pod", help=tuple(_FILLS[flag] for flag in flags))
        )
