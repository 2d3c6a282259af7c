"""Plan of a job as `--dry-run` prints it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rallypoint.clusters.cluster import Cluster
from rallypoint.launcher.plan import Nodes, Plan, alone, prefixes, variables_of
from rallypoint.world import ranges

_OWN = ("RANK", "LOCAL_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES")
_OF_ATTEMPT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


def describe(plan: Plan) -> str:
    """Return the plan, a line for each fact, and below them what the ranks are given."""
    text = [f"{name:<12}{value}" for name, value in _facts(plan)]
    for title, lines in (
        ("every rank's environment, besides what it inherits", _of_every_rank(plan)),
        ("each rank's own", _of_each_rank(plan)),
        ("notes", plan.notes),
        ("chosen without being asked", plan.remarks),
    ):
        if lines:
            text += ["", f"{title}:", *(f"  {line}" for line in lines)]
    return "\n".join(text) + "\n"


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    flags = {"script": "", "module": "-m ", "command": "--no-python ", "function": ""}
    torch = f"torch {plan.torch}" if plan.torch else "no torch installed"
    preloaded = "".join(f", {module}" for module in (*plan.parts, *plan.preload))
    start = {
        "template": f"forked from one process that has imported {torch}{preloaded}",
        "fresh": f"a new interpreter each ({torch})",
        "exec": "the program itself, without an interpreter of ours",
    }
    yield "job", plan.job
    typed = shlex.join([plan.program.target, *plan.program.args])
    yield "program", flags[plan.program.kind] + typed
    if plan.cluster is not None:
        yield from _cluster(plan.cluster)
    yield "ranks", f"{plan.slots} on this node"
    yield "start", start[plan.start]
    port = str(plan.master_port) if plan.master_port else "any free port"
    if plan.port_range and not plan.master_port:
        port = "a free port of {}-{}".format(*plan.port_range)
    if plan.nodes is not None:
        yield from _nodes(plan, plan.nodes, port)
    else:
        host = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
        yield "meet at", f"{host}, {port}, a new one for every attempt"
    if plan.rendezvous:
        yield "place", f"{plan.rendezvous}, this job's alone while it runs"
    yield "restarts", str(plan.max_restarts)
    yield "on failure", plan.on_failure
    yield "grace", f"{plan.grace:g} s between asking a rank to stop and SIGKILL"
    if patience := plan.patience(plan.slots):
        yield "stall", f"reported when no rank has moved for {patience:g} s"
    yield "signals", ", ".join(("SIGINT", *plan.signals))
    if plan.notices:
        yield "notices", f"{', '.join(plan.notices)}: handed to the ranks, the job goes on"
    yield "stdin", f"rank {plan.debug_rank}"
    yield "run folder", f"{plan.run_dir}/node<its number>" if plan.nodes else plan.run_dir
    yield from _logs(plan)
    if plan.plain:
        yield "plain", "the workers are not looked into"


def _of_every_rank(plan: Plan) -> list[str]:
    if plan.nodes is not None:
        known = "RANK, WORLD_SIZE, MASTER_ADDR and the like are known when all nodes have come"
        return [*_assignments(plan.environment), known]
    given = variables_of(plan, alone(plan), 0)
    every = {name: value for name, value in given.items() if name not in (*_OWN, *_OF_ATTEMPT)}
    store = "" if plan.start == "exec" else "RALLYPOINT_STORE, "  # see launcher/agent/attempt.py
    names = (
        f"MASTER_ADDR, MASTER_PORT, {store}TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_ERROR_FILE"
    )
    return [*_assignments(every), f"{names} are set for each attempt"]


def _of_each_rank(plan: Plan) -> list[str]:
    if plan.nodes is not None:
        return []
    lines = []
    for rank in range(plan.slots):
        given = variables_of(plan, alone(plan), rank)
        own = {name: given[name] for name in _OWN if name in given}
        lines.append(f"{rank}  {' '.join(_assignments(own))}")
    return lines


def _cluster(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the facts that the cluster has told, each with its source."""
    place = f"task {cluster.local[0]} of {cluster.local[1]} on this host" if cluster.local else ""
    told = (*cluster.because, *([place] if place else []))
    return [("started by", cluster.name), *(("", line) for line in told)]


def _nodes(plan: Plan, nodes: Nodes, port: str) -> Iterator[tuple[str, str]]:
    if nodes.exchange:
        place = f"where node 0 says by {nodes.exchange}"
    elif nodes.folder:
        place = f"in the folder {nodes.folder}"
    elif len(nodes.ports) == 1:
        place = f"at {nodes.host}, port {nodes.ports[0]}"
    else:
        ports = f"{min(nodes.ports)}-{max(nodes.ports)}"
        place = f"at {nodes.host}, the highest free port of {ports}"
    this = "the one that can listen there leads"
    if nodes.rank is not None:
        this = f"this is node {nodes.rank}: {'node 0' if nodes.rank else 'it'} leads"
    yield "nodes", f"{nodes.count}, which find each other {place}; {this}"
    yield "secret", nodes.secret_file or _other_secret(plan, nodes)
    if nodes.tls:
        yield "encrypted", "what the launchers say, and the job's store"
    yield "meet at", f"an address of node 0 that all nodes reach, {port}"
    yield "lost", f"a node without a sign of life for {nodes.timeout:g} s"


def _other_secret(plan: Plan, nodes: Nodes) -> str:
    """Return where the secret is looked for when no file was named."""
    from rallypoint.clusters.secret_source import MOUNT

    if nodes.exchange:
        last = f"node 0 says it by {nodes.exchange}"
    elif plan.cluster is not None and not plan.cluster.own_homes:
        last = "the key file of this user, which is made when there is none"
    else:
        last = "none: the job cannot start without one"
    return f"{MOUNT} if that is there, else {last}"


def _logs(plan: Plan) -> Iterator[tuple[str, str]]:
    logs = plan.logs
    if logs.console != tuple(range(plan.slots)):
        yield "terminal", f"local ranks {ranges(logs.console)} only" if logs.console else "no rank"
    if logs.log_dir:
        yield "log folder", logs.log_dir
    for title, streams in (("redirected", logs.redirects), ("teed", logs.tee)):
        if any(streams):
            named = {1: "stdout", 2: "stderr", 3: "stdout and stderr"}
            parts = [
                (ranges(r for r, s in enumerate(streams) if s == bits), name)
                for bits, name in named.items()
            ]
            yield (
                title,
                "; ".join(f"{name} of local ranks {ranks}" for ranks, name in parts if ranks),
            )
    if (before := prefixes(plan, alone(plan))) is not None:
        yield "prefixes", ", ".join(map(repr, before))
    for title, words in (
        ("stdout with", logs.stdout_filters),
        ("stderr with", logs.stderr_filters),
    ):
        if words:
            yield title, " or ".join(repr(word) for word in words)


def _assignments(variables: Mapping[str, str]) -> list[str]:
    from rallypoint.record.run_folder import without_secrets

    return [f"{name}={shlex.quote(value)}" for name, value in without_secrets(variables).items()]
