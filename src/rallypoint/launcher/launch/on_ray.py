"""Call of `launch` on the nodes of a Ray cluster: each has an agent, and node 0 returns the results."""

from __future__ import annotations

import os
import sys

import msgspec

from rallypoint.clock import Clock
from rallypoint.clusters import ray
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host import memory_files
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.launcher import protocol
from rallypoint.launcher.launch import agent_pool, launch, several_nodes
from rallypoint.launcher.launch.call import CallEnd, LaunchCall
from rallypoint.launcher.launch.marshalling.payload import Packed
from rallypoint.launcher.protocol import Call, Outcome, Verdict

CHILD = "from rallypoint.launcher.launch import on_ray; on_ray.main()"


class CallOnRay(msgspec.Struct):
    """Call as it travels to the nodes."""

    call: bytes
    payload: bytes
    nodes: int
    env: dict[str, str | None]


class EndOnRay(msgspec.Struct):
    """End of the call on a node, as it travels back."""

    verdict: bytes
    outcomes: list[tuple[Outcome, bytes]]
    interrupted: bool


def carry_out(request: Call, packed: Packed, nodes: int, env: dict[str, str | None]) -> CallEnd:
    """Have the nodes carry the request out; return the end of node 0, or of one that has outlived
    it. Raises as `ray.launch_on_nodes`.
    """
    if len(packed.fds) > 1:
        raise UsageError(
            "launch-argument",
            "the arguments have shared memory or descriptors, which do not leave this machine",
            help=(("give a copy", "tensor.clone()"),),
        )
    data = memory_files.content(packed.fds[0])
    box = msgspec.msgpack.encode(CallOnRay(protocol.exact(request), data, nodes, env))
    ends = ray.launch_on_nodes(
        lambda ranks: ["-c", CHILD], nnodes=nodes, nproc=request.nproc, box=box, show=_show
    )
    for end in ends:
        if end is not None and end[0] == 0:
            found = msgspec.msgpack.decode(end[1], type=EndOnRay)
            outcomes = {one.rank: (one, _payload(data)) for one, data in found.outcomes}
            return CallEnd(protocol.from_exact(found.verdict, Verdict), outcomes, found.interrupted)
    raise EnvironmentProblem(
        "ray-unavailable",
        "no node of the job has told how it ended",
        why=tuple(
            f"node {node}: {f'its launcher left with {end[0]}' if end else 'it is lost'}"
            for node, end in enumerate(ends)
        ),
    )


def main() -> None:
    """Carry the call out on this node, and leave its end for the driver."""
    box = ray.begin()
    found = msgspec.msgpack.decode(memory_files.content(box), type=CallOnRay)
    call = protocol.from_exact(found.call, Call)
    folder = call.task.folder if os.path.isdir(call.task.folder) else os.getcwd()
    nodes, listener = several_nodes.settle(found.nodes, None, "", "", call.timeout, call.port_range)
    environment = launch.environment_of_ranks(found.env, call.nproc)
    del environment[ray.MARK]
    sys.path[:] = call.task.paths
    with _payload(found.payload) as payload, listener:
        agent = agent_pool.acquire(call.preload, environment)
        call = msgspec.structs.replace(
            call,
            asked=Clock().monotonic(),
            nodes=nodes,
            task=msgspec.structs.replace(call.task, folder=folder),
        )
        request = launch.request_to(agent, call, environment)
        end = LaunchCall(agent).run(request, [*payload.fds, *listener.fds])
    outcomes = []
    for one, held in end.outcomes.values():
        with held:
            outcomes.append((one, memory_files.content(held.fds[0]) if held.fds else b""))
    told = EndOnRay(protocol.exact(end.verdict), outcomes, end.interrupted)
    memory_files.replace(box, msgspec.msgpack.encode(told))


def _payload(data: bytes) -> OwnedFds:
    return OwnedFds([memory_files.create("rallypoint-payload", data)])


def _show(fd: int, data: bytes) -> None:
    stream = sys.stdout if fd == 1 else sys.stderr
    if stream is not None:
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()
