"""The options of `rallypoint run` taken together: what the launcher is asked for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from rallypoint.cli.args import CommandLine, Given
from rallypoint.cli.commands import RUN
from rallypoint.cli.hints import retyped
from rallypoint.cli.option_values import is_module_name, read_seconds, unknown_signals
from rallypoint.cli.options import BY_KEY, BY_SPELLING
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import (
    COORDINATION_PORT,
    COORDINATION_PORTS,
    MASTER_PORT,
    Nodes,
    Options,
)
from rallypoint.launcher.program import Program

if TYPE_CHECKING:
    from rallypoint.clusters.cluster import Cluster

_SAME_NAME = (
    *("fresh", "preload", "port_range", "role", "max_restarts", "stall", "on_failure"),
    *("debug_rank", "run_dir", "log_dir", "redirects", "tee", "local_ranks_filter"),
    *("log_line_prefix_template", "virtual_local_rank", "plain", "quiet", "error_format"),
    *("dry_run", "engine"),
)
"""Fields of `Options` that are an option's value as it is, and have its name."""


_PLACE = ("rdzv_endpoint", "master_addr")
"""Options of which each says where the nodes find each other."""


FOR_THE_REPORT = 5.0
"""Seconds that are kept of those that a cluster leaves between SIGTERM and SIGKILL."""


def read(line: CommandLine, detect: Callable[[], Cluster | None] = lambda: None) -> Options:
    """Return what is asked for: values from their texts, and what they mean together.

    `detect` returns the cluster that has started this process; it fills in what was not given. It
    is not called where the options ask for one node.

    Raises `UsageError`: `option-unknown`, `usage` for a value that is none, `several-nodes` for
    a way to meet that is not built, `cluster-unclear`.
    """
    values, given = line.values(), line.given
    one_node = values["standalone"] or ("nnodes" in given and values["nnodes"] == 1)
    cluster = None if one_node or values["engine"] == "ray" else detect()
    lines = _fill_in(values, given, cluster) if cluster is not None else []
    notes = [
        f"{option.names[0]} has no effect here: {option.why}"
        for option in RUN.options
        if option.fate == "accepted" and option.key in given
    ]
    unknown = dict(unknown_signals(values["signals_to_handle"]))
    notes += [f"--signals-to-handle {wrong}: it is left out" for wrong in unknown.values()]
    signals = tuple(name for name in values["signals_to_handle"] if name not in unknown)
    program = _program(line, values)
    behind, rest = _behind(line.words)
    nodes, more = _nodes(values, given, cluster)
    if nodes is not None and values["engine"] == "ray":  # for --dry-run: no launcher of a node
        nodes = msgspec.structs.replace(nodes, exchange="ray")
    address, port, ignored = _meeting_point(values, given, cluster)
    by_other_name = "grace" not in given and values["shutdown_timeout"] is not None
    return Options(
        **{name: values[name] for name in _SAME_NAME},
        program=program,
        nproc=values["nproc_per_node"],
        master_addr=address,
        master_port=port,
        rendezvous="" if nodes is not None else _place(values),
        nodes=nodes,
        cluster=cluster,
        run_id="" if values["standalone"] else values["rdzv_id"],
        grace=values["shutdown_timeout" if by_other_name else "grace"],
        stdout_filters=values["duplicate_stdout_filters"],
        stderr_filters=values["duplicate_stderr_filters"],
        signals=signals,
        notices=_notices(values["notice_signal"], signals),
        notes=(*notes, *lines, *ignored, *more),
        behind=shlex.join(behind),
        moved=retyped((*line.typed, *behind), *rest) if behind else "",
    )


def _fill_in(
    values: dict[str, Any], given: Mapping[str, tuple[Given, ...]], cluster: Cluster
) -> list[str]:
    """Put what a cluster tells in the place of what was not given; return lines about the rest.
    Raises UsageError `cluster-unclear`.
    """
    placed = _place_given(values, given)
    for gap in cluster.unclear:
        by_place = (*_PLACE, "node_rank") if placed else ()
        if not all(key in given or key in by_place for key in gap.flags):
            raise UsageError("cluster-unclear", gap.headline, why=gap.why, help=gap.help)
    if cluster.kill_after is not None and not {"grace", "shutdown_timeout"} & given.keys():
        # The report is written after the grace.
        values["grace"] = min(values["grace"], max(1.0, cluster.kill_after - FOR_THE_REPORT))
    lines = list(cluster.notes)
    told = {"nnodes": cluster.nodes, "nproc_per_node": cluster.slots, "rdzv_id": cluster.job}
    if not placed:  # else nobody knows whether node 0 of the cluster is at that place
        told["node_rank"] = cluster.node
    for key, value in told.items():
        if value in (None, ""):
            continue
        if key not in given:
            values[key] = value
        elif values[key] != value and key != "rdzv_id":
            says = f"{BY_KEY[key].names[0]} {value}"
            lines.append(f"{given[key][-1]} wins over {cluster.name}, which says {says}")
    if placed and values["nnodes"] > 1 and cluster.host:
        lines.append(f"{placed} wins over {cluster.name}, which says that node 0 is {cluster.host}")
    if values["nnodes"] > 1 and not (placed or cluster.host or cluster.exchange or cluster.folder):
        raise UsageError(
            "cluster-unclear",
            f"{cluster.name} does not say where node 0 of the job is",
            why=cluster.because,
            help=(("name it, the same on each node", "--rdzv-endpoint node0:29400"),),
        )
    if (values["node_rank"] or 0) >= values["nnodes"] and "node_rank" not in given:
        raise UsageError(
            "cluster-unclear",
            f"this is node {cluster.node} for {cluster.name}, and the job has {values['nnodes']}, counted from 0",
            why=cluster.because,
            help=(
                (
                    "start as many as the job has",
                    f"--nnodes {cluster.nodes or values['node_rank'] + 1}",
                ),
            ),
        )
    return lines


def _place_given(values: Mapping[str, Any], given: Mapping[str, tuple[Given, ...]]) -> Given | None:
    """Return the option that says where the nodes find each other, None without one. An empty
    variable says nothing.
    """
    none = ("", ("", 0))
    return next(
        (given[key][-1] for key in _PLACE if key in given and values[key] not in none), None
    )


def _usage(headline: str, *help: tuple[str, str]) -> UsageError:
    return UsageError("usage", headline, help=help)


def _notices(asked: tuple[str, ...] | None, signals: tuple[str, ...]) -> tuple[str, ...]:
    """Return the signals that are handed on. `UsageError` for one that is to stop the job too."""
    if asked is None:
        return tuple(name for name in ("SIGUSR1", "SIGUSR2") if name not in signals)
    if both := next((name for name in asked if name in signals), ""):
        left = ",".join(name for name in signals if name != both)
        raise _usage(
            f"--notice-signal names {both}, which stops the job by --signals-to-handle",
            ("leave it out of one of them", f"rallypoint run --signals-to-handle {left} ..."),
        )
    return asked


def _behind(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return options of ours that stand behind the program, which gets them, and the other words.
    Only the program knows whether it wants them.
    """
    found: list[str] = []
    rest: list[str] = list(words[:1])
    left = list(words[1:])
    while left and left[0] != "--":
        name, equals, _ = left[0].partition("=")
        option = BY_SPELLING.get(name)
        if option is None or option.key == "help":
            rest.append(left.pop(0))
        else:
            count = 2 if option.metavar and not equals else 1
            found += left[:count]
            del left[:count]
    return found, [*rest, *left]


def _program(line: CommandLine, values: Mapping[str, Any]) -> Program:
    words, typed = line.words, line.typed
    if not words or not words[0]:
        raise _no_program(values, typed)
    target, args = words[0], words[1:]
    if values["run_path"]:
        return Program("script", target, args)
    if values["module"] and values["no_python"]:
        both = " and ".join(str(line.given[key][-1]) for key in ("module", "no_python"))
        raise _usage(
            f"{both} exclude each other: a module needs Python",
            ("leave one of the two out", ""),
        )
    if values["module"] and (not is_module_name(target) or target.endswith(".py")):
        option = line.given["module"][-1]
        if not option.typed:
            raise _usage(
                f"{target} is not a module's name, and {option} says that the program is one",
                ("leave that to -m", f"unset {option.spelling}"),
            )
        dotted = target.removesuffix(".py").strip("./").replace("/", ".")
        helps = []
        if is_module_name(dotted):
            helps.append(
                ("name the module with dots, and without .py", retyped(typed, dotted, *args))
            )
        if not helps or os.path.exists(target):
            helps.append(("a file is given without -m", retyped(typed, *words, as_script=True)))
        raise _usage(f"-m {target} is not a module's name", *helps)
    if values["module"]:
        return Program("module", target, args)
    if values["no_python"]:
        return Program("command", target, args)
    if target == "-":
        raise _usage(
            "a script from standard input cannot be read by every rank",
            ("save it to a file first", ""),
        )
    return Program("script", target, args)


def _no_program(values: Mapping[str, Any], typed: tuple[str, ...]) -> UsageError:
    before = typed or ("-n", "4")
    headline = "rallypoint run needs a program"
    if values["no_python"]:
        return _usage(headline, ("give one", retyped(before, "./program")))
    plain = [word for word in before if word not in BY_KEY["module"].spellings]
    return _usage(
        headline,
        ("give a script", retyped(plain, "train.py")),
        ("or a module", retyped((*plain, "-m"), "package.train")),
    )


def _nodes(
    values: Mapping[str, Any],
    given: Mapping[str, tuple[Given, ...]],
    cluster: Cluster | None,
) -> tuple[Nodes | None, list[str]]:
    """Return how the nodes of the job find each other, None for one node; and what to say."""
    count, rank, backend = values["nnodes"], values["node_rank"], values["rdzv_backend"]
    if rank is not None and rank >= count:
        raise _usage(
            f"{given['node_rank'][-1]} is not a node of this job: it has {count}, counted from 0",
            ("name one of them, for example the last", f"--node-rank {count - 1}"),
            ("or say how many nodes there are", f"--nnodes {rank + 1}"),
        )
    if backend not in ("static", "c10d") and not values["standalone"]:
        raise UsageError(
            "several-nodes",
            f"{given['rdzv_backend'][-1]}: rallypoint knows static and c10d",
            help=(("let the nodes find each other at one of them", "--rdzv-backend c10d"),),
        )
    if count == 1:
        return None, [
            f"{BY_KEY[key].names[0]} has no effect: the job has one node"
            for key in ("secret_file", "tls", "node_timeout", "local_addr", "rdzv_conf")
            if key in given and given[key][-1].typed
        ]
    if values["standalone"]:
        raise _usage(
            f"--standalone is for one node, and {given['nnodes'][-1]} asks for {count}",
            ("leave one of the two out", ""),
        )
    host, port = values["rdzv_endpoint"]
    by_cluster = cluster if not _place_given(values, given) else None
    static = backend == "static" and not host.startswith("file://")
    if "://" in host and not host.startswith("file://"):
        raise _usage(
            f"{given['rdzv_endpoint'][-1]} is not a place where nodes can meet",
            ("name the lead's address", "--rdzv-endpoint node0:29400"),
        )
    if static or by_cluster is not None:
        port = port or values["master_port"] or MASTER_PORT
        first = port + 1
        # The last one first: the next port is where another job's --master-port may be.
        ports = tuple(range(first, min(first + COORDINATION_PORTS, 1 << 16)))[::-1]
        if not ports:
            raise _usage(
                f"the launchers of several nodes meet at a port after {port}, and there is none",
                ("choose a port further down", f"--master-port {MASTER_PORT}"),
            )
        host = host or values["master_addr"]
    else:
        ports = (port or COORDINATION_PORT,)
    if by_cluster is not None:
        host, ports = by_cluster.host, by_cluster.ports or ports
    if values["tls"] and find_spec("cryptography") is None:
        raise _usage(
            "--tls needs the package cryptography, which is not installed here",
            ("install it on every node", "python -m pip install 'rallypoint[tls]'"),
        )
    settings, more = _settings(values["rdzv_conf"])
    nodes = Nodes(
        count=count,
        rank=rank,
        host=host or "127.0.0.1",
        ports=ports,
        folder=by_cluster.folder if by_cluster is not None else _place(values),
        folder_once=bool(by_cluster and by_cluster.folder),
        local_addr=values["local_addr"],
        job=values["rdzv_id"],
        secret_file=values["secret_file"] or (cluster.secret if cluster is not None else ""),
        by_cluster=by_cluster is not None and count == by_cluster.nodes,
        exchange=by_cluster.exchange if by_cluster is not None else "",
        tls=values["tls"],
        timeout=values["node_timeout"],
        **settings,
    )
    return nodes, more


def _settings(pairs: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of --rdzv-conf that have a meaning here, and lines about the others."""
    found: dict[str, Any] = {}
    notes: list[str] = []
    for key, _, text in (pair.partition("=") for pair in pairs):
        try:
            if key == "is_host":
                found[key] = text.lower() in ("1", "true", "t", "yes", "y")
            elif key in ("join_timeout", "timeout"):
                found["join_timeout"] = read_seconds(text)
            else:
                notes.append(f"--rdzv-conf {key}={text} has no effect here")
        except ValueError as error:
            raise _usage(
                f"--rdzv-conf {key}={text} {error}",
                ("give seconds", "--rdzv-conf join_timeout=600"),
            ) from None
    return found, notes


def _meeting_point(
    values: Mapping[str, Any],
    given: Mapping[str, tuple[Given, ...]],
    cluster: Cluster | None,
) -> tuple[str, int, list[str]]:
    """Return address and port where the ranks meet, as asked ("" and 0: not asked), and what to
    say. Which of torchrun's options wins is torchrun's rule.
    """

    def ignored(because: str, *keys: str) -> list[str]:
        told = (given[key][-1] for key in (*keys, "master_addr", "master_port") if key in given)
        return [f"{one} is ignored with {because}, as torchrun does" for one in told]

    backend, (host, port) = values["rdzv_backend"], values["rdzv_endpoint"]
    if values["standalone"]:
        more = ignored("--standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
        return "", 0, more
    if host.startswith("file://"):  # a place, not an address: see `_place`
        return "", 0, ignored("--rdzv-endpoint")
    several = values["nnodes"] > 1
    if several and cluster is not None and not _place_given(values, given):
        return "", values["master_port"] or 0, []  # else any free port: a host may have many jobs
    if several and backend == "c10d":  # the endpoint's port is the lead's
        return "", 0, ignored("--rdzv-backend c10d")
    if several:
        return "", port or values["master_port"] or MASTER_PORT, []
    if "://" in host:
        raise UsageError(
            "several-nodes",
            f"{given['rdzv_endpoint'][-1]} is not a place where ranks can meet",
            help=(("on one node leave it out, or say", BY_KEY["rdzv_endpoint"].example),),
        )
    if host:
        return host, port, ignored("--rdzv-endpoint")
    if backend == "c10d":
        return "", 0, ignored("--rdzv-backend c10d")
    address = values["master_addr"]
    if "nnodes" in given and address and not given["master_addr"][-1].typed:
        # Kubeflow Trainer sets the name of node 0 for a job of one node, too; it resolves late.
        address = ""
    return address, values["master_port"] or 0, []


def _place(values: Mapping[str, Any]) -> str:
    """Return the folder of `--rdzv-endpoint file://`, one for each --rdzv-id; "" when another kind
    was asked for, or none.
    """
    url: str = values["rdzv_endpoint"][0]
    if values["standalone"] or not url.startswith("file://"):
        return ""
    id = re.sub(r"[^A-Za-z0-9_.-]", "_", values["rdzv_id"])
    return url.removeprefix("file://").rstrip("/") + (f".{id}" if id else "")
