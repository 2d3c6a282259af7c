"""A run on several nodes, read back as one: from the run folders of the nodes that are on this
disk.
"""

from __future__ import annotations

import os

from msgspec.structs import replace

from rallypoint.record import past_run
from rallypoint.record.events import Event
from rallypoint.record.past_run import KeptRun
from rallypoint.record.run_list import NODE
from rallypoint.record.timeline import is_launchers


def find(root: str, word: str = "") -> str:
    """Return the folder of the run that `word` names, as `past_run.find`; of a job on several nodes
    the folder that has theirs, unless one of them is named.
    """
    inside = os.path.join(root, word)
    if word not in ("", ".", "..", "latest") and _nodes_in(inside):
        return inside
    path = past_run.find(root, word)
    newest = word in ("", "latest") and NODE.fullmatch(os.path.basename(path))
    return os.path.dirname(path) if newest else path


def read(path: str) -> KeptRun:
    """Return all that is kept of a run, or of the nodes of one. Raises as `past_run.read`."""
    nodes = [past_run.read(os.path.join(path, name)) for name in _nodes_in(path)]
    if not nodes or os.path.exists(os.path.join(path, "plan.json")):
        return past_run.read(path)
    hosts = [host_of(node) for node in nodes]
    names = [
        host if hosts.count(host) == 1 else f"{os.path.basename(node.path)} ({host})"
        for node, host in zip(nodes, hosts, strict=True)
    ]
    found = (e for node, name in zip(nodes, names, strict=True) for e in _placed(node, name))
    return KeptRun(
        path=path,
        plan=nodes[0].plan,
        began=min(node.began for node in nodes),
        running=any(node.running for node in nodes),
        events=tuple(sorted(found, key=lambda event: event.at)),
        report=next((node.report for node in nodes if node.report), b""),
        logs=tuple(sorted(log for node in nodes for log in node.logs)),
        damage=tuple(
            f"{os.path.basename(node.path)}: {line}" for node in nodes for line in node.damage
        ),
        events_cut=any(node.events_cut for node in nodes),
        nodes=tuple(nodes),
    )


def host_of(node: KeptRun) -> str:
    """Return the host of a node, its folder's name when that is not known."""
    return str(node.started.get("host", os.path.basename(node.path)))


def _nodes_in(path: str) -> list[str]:
    """Return the names of the nodes' run folders in a job's folder, in order."""
    try:
        names = [name for name in os.listdir(path) if NODE.fullmatch(name)]
    except OSError:
        return []
    kept = (name for name in names if os.path.exists(os.path.join(path, name, "plan.json")))
    return sorted(kept, key=lambda name: int(name.removeprefix("node")))


def _placed(node: KeptRun, name: str) -> list[Event]:
    """Return the node's events at their times by the lead's clock, with the node's name beside what
    the launcher there did.
    """
    offset = node.started.get("offset", 0.0)
    late = offset if isinstance(offset, float) else 0.0
    return [
        replace(
            event,
            at=event.at + late,
            details={**event.details, "launcher_host": name}
            if is_launchers(event)
            else event.details,
        )
        for event in node.events
    ]
