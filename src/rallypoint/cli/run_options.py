"""What a command line of `rallypoint run` asks for, its options taken together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from rallypoint.cli import args as parser
from rallypoint.cli.args import CommandLine, Given
from rallypoint.cli.commands import RUN
from rallypoint.cli.hints import retyped
from rallypoint.cli.option_values import is_module_name, unknown_signals
from rallypoint.cli.options import BY_KEY, BY_SPELLING
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options
from rallypoint.launcher.program import Program


def read(line: CommandLine) -> Options:
    """Values from their texts, and what they mean together on one node.

    Raises `UsageError`: `option-unknown`, `usage` for a value that is none, `several-nodes` for
    what only several nodes have.
    """
    values = parser.values(line, RUN)
    without_effect = (
        option for option in RUN.options if option.fate == "accepted" and option.key in line.given
    )
    notes = [f"{option.names[0]} has no effect here: {option.why}" for option in without_effect]
    unknown = dict(unknown_signals(values["signals_to_handle"]))
    notes += [f"--signals-to-handle {wrong}: it is left out" for wrong in unknown.values()]
    signals = tuple(name for name in values["signals_to_handle"] if name not in unknown)
    program = _program(line.words, values, line.given, line.typed)
    behind, rest = _behind(line.words)
    address, port, more = _meeting_point(values, line.given)
    return Options(
        program=program,
        nproc=values["nproc_per_node"],
        fresh=values["fresh"],
        preload=values["preload"],
        master_addr=address,
        master_port=port,
        port_range=values["port_range"],
        rendezvous=_place(values),
        run_id="" if values["standalone"] else values["rdzv_id"],
        role=values["role"],
        max_restarts=values["max_restarts"],
        grace=values["grace"]
        if "grace" in line.given or values["shutdown_timeout"] is None
        else values["shutdown_timeout"],
        stall=values["stall"],
        on_failure=values["on_failure"],
        debug_rank=values["debug_rank"],
        run_dir=values["run_dir"],
        log_dir=values["log_dir"],
        redirects=values["redirects"],
        tee=values["tee"],
        local_ranks_filter=values["local_ranks_filter"],
        stdout_filters=values["duplicate_stdout_filters"],
        stderr_filters=values["duplicate_stderr_filters"],
        log_line_prefix_template=values["log_line_prefix_template"],
        virtual_local_rank=values["virtual_local_rank"],
        signals=signals,
        notices=_notices(values["notice_signal"], signals),
        plain=values["plain"],
        quiet=values["quiet"],
        error_format=values["error_format"],
        dry_run=values["dry_run"],
        notes=(*notes, *more),
        behind=shlex.join(behind),
        moved=retyped((*line.typed, *behind), *rest) if behind else "",
    )


def _notices(asked: tuple[str, ...] | None, signals: tuple[str, ...]) -> tuple[str, ...]:
    """The signals that are handed on. `UsageError` for one that is to stop the job as well."""
    if asked is None:
        return tuple(name for name in ("SIGUSR1", "SIGUSR2") if name not in signals)
    for name in asked:
        if name in signals:
            raise UsageError(
                "usage",
                f"--notice-signal names {name}, which stops the job by --signals-to-handle",
                help=(
                    (
                        "leave it out of one of them",
                        f"rallypoint run --signals-to-handle {','.join(one for one in signals if one != name)} ...",
                    ),
                ),
            )
    return asked


def _behind(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Options of ours that stand behind the program, which gets them; and the other words. Whether
    it wants them only it knows.
    """
    found: list[str] = []
    rest = list(words[:1])
    at = 1
    while at < len(words):
        if words[at] == "--":
            return found, [*rest, *words[at:]]
        name, equals, _ = words[at].partition("=")
        option = BY_SPELLING.get(name)
        if option is None or option.key == "help":
            rest.append(words[at])
            at += 1
            continue
        end = at + (2 if option.metavar and not equals else 1)
        found += words[at:end]
        at = end
    return found, rest


def _program(
    words: tuple[str, ...],
    values: Mapping[str, Any],
    given: Mapping[str, tuple[Given, ...]],
    typed: tuple[str, ...] = (),
) -> Program:
    if not words or not words[0]:
        raise _no_program(values, typed)
    target, args = words[0], words[1:]
    if values["run_path"]:
        return Program(kind="script", target=target, args=args)
    if values["module"] and values["no_python"]:
        both = " and ".join(str(given[key][-1]) for key in ("module", "no_python"))
        raise UsageError(
            "usage",
            f"{both} exclude each other: a module needs Python",
            help=(("leave one of the two out", ""),),
        )
    if values["no_python"]:
        return Program(kind="command", target=target, args=args)
    if values["module"]:
        if not is_module_name(target) or target.endswith(".py"):
            if not given["module"][-1].spelling.startswith("-"):
                variable = given["module"][-1]
                raise UsageError(
                    "usage",
                    f"{target} is not a module's name, and {variable} says that the program is one",
                    help=(("leave that to -m", f"unset {variable.spelling}"),),
                )
            dotted = target.removesuffix(".py").strip("./").replace("/", ".")
            helps = [("a file is given without -m", retyped(typed, *words, as_script=True))]
            if is_module_name(dotted):
                helps.insert(
                    0, ("name the module with dots, and without .py", retyped(typed, dotted, *args))
                )
            raise UsageError("usage", f"-m {target} is not a module's name", help=tuple(helps))
        return Program(kind="module", target=target, args=args)
    if target == "-":
        raise UsageError(
            "usage",
            "a script from standard input cannot be read by every rank",
            help=(("save it to a file first", ""),),
        )
    return Program(kind="script", target=target, args=args)


def _no_program(values: Mapping[str, Any], typed: tuple[str, ...]) -> UsageError:
    before = typed or ("-n", "4")
    if values["no_python"]:
        help = (("give one", retyped(before, "./program")),)
        return UsageError("usage", "rallypoint run needs a program", help=help)
    without_kind = [word for word in before if word not in BY_KEY["module"].spellings]
    return UsageError(
        "usage",
        "rallypoint run needs a program",
        help=(
            ("give a script", retyped(without_kind, "train.py")),
            ("or a module", retyped((*without_kind, "-m"), "package.train")),
        ),
    )


def _meeting_point(
    values: Mapping[str, Any], given: Mapping[str, tuple[Given, ...]]
) -> tuple[str, int, list[str]]:
    """Address and port as asked ("" and 0: not asked), and what to say; which of torchrun's options
    wins is torchrun's rule.
    """
    for key, alone in (
        ("nnodes", values["nnodes"] == (1, 1)),
        ("node_rank", values["node_rank"] == 0),
    ):
        if not alone:
            raise _several_nodes(str(given[key][-1]), BY_KEY[key].example)
    if values["standalone"]:
        return (
            "",
            0,
            _ignored(
                ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port"),
                "--standalone",
                given,
            ),
        )
    if values["rdzv_backend"] not in ("static", "c10d"):
        raise _several_nodes(str(given["rdzv_backend"][-1]), "--rdzv-backend c10d")
    host, port = values["rdzv_endpoint"]
    if host.startswith("file://"):  # a place, not an address: see `_place`
        return "", 0, _ignored(("master_addr", "master_port"), "--rdzv-endpoint", given)
    if "://" in host:
        raise _several_nodes(str(given["rdzv_endpoint"][-1]), "--rdzv-endpoint localhost:29500")
    if host:
        return host, port, _ignored(("master_addr", "master_port"), "--rdzv-endpoint", given)
    if values["rdzv_backend"] == "c10d":
        return "", 0, _ignored(("master_addr", "master_port"), "--rdzv-backend c10d", given)
    return values["master_addr"], values["master_port"] or 0, []


def _place(values: Mapping[str, Any]) -> str:
    """The folder of `--rdzv-endpoint file://`, one for each --rdzv-id; "" when another kind was
    asked for, or none.
    """
    url = "" if values["standalone"] else values["rdzv_endpoint"][0]
    if not url.startswith("file://"):
        return ""
    path = url.removeprefix("file://").rstrip("/")
    return (
        f"{path}.{re.sub(r'[^A-Za-z0-9_.-]', '_', values['rdzv_id'])}"
        if values["rdzv_id"]
        else path
    )


def _ignored(
    keys: tuple[str, ...], because: str, given: Mapping[str, tuple[Given, ...]]
) -> list[str]:
    return [
        f"{given[key][-1]} is ignored with {because}, as torchrun does"
        for key in keys
        if key in given
    ]


def _several_nodes(asked: str, instead: str) -> UsageError:
    return UsageError(
        "several-nodes",
        f"{asked} asks for several nodes: that comes with multi-node support, and this version starts the ranks of one node",
        help=(("on one node leave it out, or say", instead),),
    )
