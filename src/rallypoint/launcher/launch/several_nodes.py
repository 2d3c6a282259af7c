"""Nodes of a call of `launch` that programs on several nodes make together."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from rallypoint.clusters.detect import detect
from rallypoint.errors import UsageError
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.launcher import rendezvous_file
from rallypoint.launcher.nodes import endpoint
from rallypoint.launcher.plan import (
    COORDINATION_PORT,
    COORDINATION_PORTS,
    JOIN_TIMEOUT,
    MASTER_PORT,
    Nodes,
    SettledNodes,
)


def settle(
    count: int,
    rank: int | None,
    place: str,
    secret_file: str,
    timeout: float | None,
    port_range: tuple[int, int] | None,
) -> tuple[bytes, OwnedFds]:
    """Return `SettledNodes` for the agent, and the listener of the lead where a cluster has told
    the others of it.

    The arguments of the call win over the environment, and that over a cluster. Raises UsageError
    `several-nodes` where none of them says where node 0 is, `cluster-unclear` where the cluster has
    another number of nodes, and what `endpoint.settled` raises.
    """
    global _calls
    environ = os.environ
    place = place or environ.get("PET_RDZV_ENDPOINT", "")
    if rank is None and (text := environ.get("PET_NODE_RANK", "")):
        rank = _number("PET_NODE_RANK", text)
    earlier = None if place else _handed_over
    cluster = earlier.cluster if earlier is not None else None if place else detect(environ)
    nodes = Nodes(
        count=count,
        rank=rank,
        job=environ.get("PET_RDZV_ID", ""),
        secret_file=secret_file or environ.get("RALLYPOINT_SECRET_FILE", ""),
        join_timeout=min(JOIN_TIMEOUT, timeout or JOIN_TIMEOUT),
    )
    if place:
        host, port = _endpoint(place)
        nodes = replace(nodes, host=host, ports=(port,))
    elif cluster is None or cluster.starts or cluster.left_over:
        raise _nowhere(count)
    else:
        for gap in cluster.unclear:
            raise UsageError("cluster-unclear", gap.headline, why=gap.why, help=gap.help)
        if cluster.nodes != count:
            raise UsageError(
                "cluster-unclear",
                f"nnodes={count}, and {cluster.name} has started {cluster.nodes} launchers",
                why=cluster.because,
                help=(("give the number that it has started", f"nnodes={cluster.nodes}"),),
            )
        behind = tuple(range(MASTER_PORT + 1, MASTER_PORT + 1 + COORDINATION_PORTS))
        nodes = replace(
            nodes,
            rank=cluster.node if rank is None else rank,
            host=cluster.host,
            ports=cluster.ports or behind,
            folder=cluster.folder,
            folder_once=bool(cluster.folder),
            exchange=cluster.exchange,
            job=nodes.job or cluster.job,
            secret_file=nodes.secret_file or cluster.secret,
        )
        if nodes.folder_once:
            rendezvous_file.make_above(nodes.folder)
    if nodes.rank is not None and not 0 <= nodes.rank < count:
        raise UsageError(
            "usage",
            f"node_rank={nodes.rank} is not a node of this job: it has {count}, counted from 0",
        )
    if earlier is not None:
        met = {
            name: getattr(earlier.nodes, name) for name in ("host", "ports", "lead", "local_addr")
        }
        nodes, secret = replace(nodes, **met), earlier.secret
        fds = [os.dup(fd) for fd in _listener.fds]
    else:
        nodes, secret, held = endpoint.settled(nodes, cluster, port_range)
        fds = [held.detach()] if held is not None else []
    # Last: a call that is refused here is none, and the other nodes do not count it.
    nodes = replace(nodes, call=_calls)
    _calls += 1
    found = SettledNodes(nodes=nodes, secret=secret, cluster=cluster, listens=bool(fds))
    if nodes.exchange and earlier is None:
        _keep(found, fds)
    return msgspec.msgpack.encode(found), OwnedFds(fds)


_calls = 0  # of launch over several nodes, so far: all nodes make the same, in one order


def uncount() -> None:
    """Forget the last call, in which the nodes did not come together: others may have made none."""
    global _calls
    _calls -= 1


# What a cluster has handed over, which it does once for each process, and node 0's listener: the
# calls that follow meet there, too.
_handed_over: SettledNodes | None = None
_listener = OwnedFds()


def _keep(found: SettledNodes, fds: Sequence[int]) -> None:
    global _handed_over
    _handed_over = found
    for fd in fds:
        _listener.add(os.dup(fd))


def _endpoint(place: str) -> tuple[str, int]:
    parts = re.fullmatch(r"(?:\[([^\]]+)\]|([^\[\]:/]+))(?::(\d+))?", place)
    if parts is None:
        raise UsageError("usage", f"rdzv_endpoint={place!r} is not HOST or HOST:PORT")
    port = _number("the port of rdzv_endpoint", parts[3]) if parts[3] else COORDINATION_PORT
    return parts[1] or parts[2], port


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError("usage", f"{name} is {text!r}, and no number from 0 to 65535")
    return int(text)


def _nowhere(count: int) -> UsageError:
    return UsageError(
        "several-nodes",
        f"nnodes={count}, and nothing says where the nodes find each other",
        help=(
            (
                "start the program on each node by srun or mpirun, or name the host of node 0 in each call",
                f'rallypoint.launch(..., nnodes={count}, rdzv_endpoint="node0:29400")',
            ),
            (
                "or have Ray start the nodes",
                f'rallypoint.launch(..., nnodes={count}, engine="ray")',
            ),
        ),
    )
