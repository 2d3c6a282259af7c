"""Answers to a command line that is refused: the nearest option or command, what to type."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli.option_values import hint_at, nearest
from rallypoint.cli.options import BY_KEY, Option
from rallypoint.errors import Advice, UsageError

if TYPE_CHECKING:
    from rallypoint.cli.commands import Command

_NPROC = (
    "-ppn", "-npernode", "--gpus", "--gpus-per-node", "--n", "--np", "--npernode", "--nprocs",
    "--ntasks", "--ntasks-per-node", "--num-gpus", "--num-processes", "--num-procs", "--ppn",
    "--procs", "--ranks", "--world-size",
)  # fmt: skip

SYNONYMS = {
    "-np": "-n",
    **dict.fromkeys(_NPROC, "--nproc-per-node"),
    **dict.fromkeys(("--num-machines", "--num-nodes", "--nodes"), "--nnodes"),
    "--machine-rank": "--node-rank",
    "--main-process-port": "--master-port",
    "--main-process-ip": "--master-addr",
    **dict.fromkeys(("--bind", "--address", "--addr"), "--host"),
    "-p": "--port",
    **dict.fromkeys(("--all", "-a", "-l"), "--list"),
    "--json": "--error-format=json",
}
"""Options of mpirun, srun, accelerate and DeepSpeed, and the option here that means the same."""

_ONE_NODE = "it starts the ranks of this machine alone"
_NO_BINDING = "ranks are not bound to processors"

NOT_HERE = {
    **dict.fromkeys(("-u", "-O", "-W"), "that is an option of Python's"),
    "--use-env": "LOCAL_RANK is always in the environment",
    "--multi-gpu": "with -n it starts that many ranks, and every rank sees the GPUs",
    "-x": "every rank has the environment of this shell",
    **dict.fromkeys(("--mca", "-mca"), "there is no MPI in it"),
    **dict.fromkeys(("--bind-to", "--map-by", "--cpu-bind"), _NO_BINDING),
    **dict.fromkeys(("-H", "--host", "--hosts", "--hostfile", "--machinefile"), _ONE_NODE),
    "--config-file": "it reads no settings of accelerate's",
    "--mixed-precision": "that is a setting of accelerate's, which its Accelerator(...) takes too",
}
"""Options of other launchers that have no counterpart in `run`, each with the reason."""

LAUNCHERS = (
    "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "torch.distributed.run",
    "torch.distributed.launch",
)  # fmt: skip

ELSEWHERE = {
    "-c": ("code is started by Python itself", "rallypoint run --no-python python -c ..."),
    "--version": ("ask without a command", "rallypoint --version"),
}
"""Options of Python's, and of ours without a command, with what to do; a program may have such."""

COMMANDS = {
    "-v": "--version",
    **{name: f"--{name}" for name in ("version", "help")},
    **dict.fromkeys((*LAUNCHERS, "launch", "start", "exec", "submit"), "run"),
    **dict.fromkeys(("log", "logs"), "show"),
    **dict.fromkeys(("ps", "status", "top", "list", "ls", "history", "runs"), "show --list"),
    **dict.fromkeys(("check", "diagnose", "env", "info"), "doctor"),
    **dict.fromkeys(("stack", "dump", "py-spy", "where"), "stacks"),
    **dict.fromkeys(("why", "error"), "explain"),
    "store": "serve",
}
"""Commands of other tools, and the command here that means the same."""

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Dashes that a word processor or a web page makes of hyphens."""


def hyphened(name: str) -> str:
    """Return an option's name as the tables have it."""
    return name.replace("_", "-")


def is_python(word: str) -> bool:
    """Tell whether a word is an interpreter, which other launchers want before the script."""
    return os.path.basename(word).startswith("python")


_PYTHON_FLAG = re.compile(r"-(?!m$|c$)(?=\w)[^\WWX]*(?:[WX](?P<value>.*))?")


def without_launchers(words: Sequence[str]) -> list[str]:
    """Return a command without the interpreter, its flags and the launchers at its beginning."""
    rest = list(words)
    while rest:
        if is_python(rest[0]):
            del rest[0]
            while rest and (flag := _PYTHON_FLAG.fullmatch(rest[0])) is not None:
                del rest[: 1 + (flag["value"] == "")]  # the value of -W and -X may be the next word
        elif rest[0] == "-m" and rest[1:2] and rest[1] in LAUNCHERS:
            del rest[:2]
        elif os.path.basename(rest[0]) in LAUNCHERS:
            del rest[: 1 + (rest[:2] == ["accelerate", "launch"])]
        else:
            break
    return rest


def is_one_dashed(word: str) -> bool:
    """Tell whether `-np` or `-nnodes` was typed, which is a `-n` without a number here."""
    return word.startswith(("-np", "-nn"))


def is_option(word: str, argv: Sequence[str]) -> bool:
    """Tell whether a word with dashes is meant as an option, not as a part of a message: it begins
    the line, or is near an option.
    """
    is_named = re.fullmatch(r"--?[a-z][\w-]*(=\S*)?", word)
    near = _nearest_option(word.partition("=")[0], ("--error-format", "--help"))
    return bool(is_named and (word == argv[0] or near))


def retyped(typed: Sequence[str], *words: str, as_script: bool = False) -> str:
    """Return the command again, with these words behind its options.

    `as_script`: without the options that make the program something else than a script.
    """
    kinds = ("module", "no_python", "run_path") if as_script else ()
    left_out = {spelling for key in kinds for spelling in BY_KEY[key].spellings}
    return shlex.join(("rallypoint", "run", *(one for one in typed if one not in left_out), *words))


def example(option: Option, command: Command) -> Advice:
    """Return the help for a value that is missing or wrong."""
    if option.example:
        return (("give, for example", option.example),)
    return _see_options(command)


def _see_options(command: Command) -> Advice:
    return (("see the options", f"rallypoint {command.name} --help"),)


def incomplete(error: argparse.ArgumentError, argv: Sequence[str], command: Command) -> UsageError:
    """Return the error for an option without its value, or a flag with one."""
    spellings = (error.argument_name or "").split("/")
    option = next(option for option in command.options if option.names[0] in spellings)
    typed = (name for word in argv if (name := word.partition("=")[0]) in spellings)
    spelling = next(typed, option.names[0])
    if option.metavar:
        return UsageError(
            "usage",
            f"{spelling} lacks its value, {option.metavar}",
            help=example(option, command),
        )
    return UsageError(
        "usage", f"{spelling} is a flag and takes no value", help=(("give it alone", spelling),)
    )


def unknown(word: str, argv: Sequence[str], command: Command) -> UsageError:
    """Return the error for an option that is not there: the nearest one, or why there is none."""
    name, equals, value = word.partition("=")
    headline = f"rallypoint {command.name} has no option {name}"
    is_run = command.name == "run"
    by_name = {one: option for option in command.options for one in option.names}
    near = _nearest_option(name, by_name)
    why_not = NOT_HERE.get(hyphened(name), "") if is_run else ""
    if near == hyphened(name).replace("--no-", "--", 1) and not by_name[near].metavar:
        why_not = f"{near} is off unless it is given"
    if why_not:
        return UsageError("option-unknown", f"{headline}: {why_not}", help=(("leave it out", ""),))
    helps = []
    if near:
        at = argv.index(word)
        again = (*argv[:at], f"{near}{equals}{value}", *argv[at + 1 :])
        line = shlex.join(("rallypoint", command.name, *again))
        helps.append((f"use {near}", line))
    if is_run and not is_one_dashed(word) and hyphened(name) not in SYNONYMS:
        if word in ELSEWHERE:
            helps.append(ELSEWHERE[word])
        helps.append(
            ("put the program's own options after its name", f"rallypoint run train.py {word}")
        )
    help = tuple(helps) or _see_options(command)
    return UsageError("option-unknown", f"{headline}{hint_at(near)}", help=help)


def _nearest_option(name: str, names: Collection[str]) -> str:
    """Return the option that a name means: a synonym, an abbreviation, or a typing error in either.
    "" for none.
    """
    name = hyphened(name)
    known = SYNONYMS.get(name, "")
    if known.partition("=")[0] in names:
        return known
    typed = name.lstrip("-")  # the dashes are alike in all
    long = {one[2:]: one for one in sorted(names, key=len, reverse=True) if one.startswith("--")}
    if len(typed) > 1:
        begun = {one[: len(typed)]: whole for one, whole in long.items()}
        if typed in begun:
            return begun[typed]
        long = {**begun, **long} if len(typed) > len("gpu") else long
    return long.get(nearest(typed, long), "")


def no_word(word: str, command: Command) -> UsageError | None:
    """Return the error for a word that was meant as an option, from a document or from quotes, or
    that a variable of the shell left empty.
    """
    if not word and command.words == "own":
        help = (("see what is kept", "rallypoint show --list"),)
        return UsageError("usage", f"{command.name} takes a run, and got an empty word", help=help)
    name, *rest = word.split() or [""]
    if rest and any(name in option.spellings for option in command.options):
        return UsageError(
            "usage",
            f"{word} is one word with a blank in it, and no option",
            help=(("give each word of it by itself", word),),
        )
    if not word.startswith(tuple(_DASHES)):
        return None
    return UsageError(
        "option-unknown",
        f"{word} begins with a dash (U+{ord(word[0]):04X}) that is no hyphen: text programs change options like that",
        help=(("type it with hyphens", ""),),
    )


def no_words(words: Sequence[str], typed: Sequence[str], command: Command) -> UsageError:
    """Return the error for words that were given to a command that takes options only."""
    help = _see_options(command)
    if command.name == "doctor":
        from rallypoint.diagnosis.doctor.doctor import NAMES

        if set(words) <= set(NAMES):
            again = ("rallypoint", "doctor", *typed, "--only", ",".join(words))
            help = (("name the checks after --only", shlex.join(again)),)
    return UsageError(
        "usage", f"rallypoint {command.name} takes options only, and got {words[0]}", help=help
    )


def no_command(words: Sequence[str], commands: Collection[str]) -> UsageError:
    """Return the error for a first word that is no command."""
    from rallypoint.diagnosis.catalogue import CATALOGUE

    name, *rest = words
    near = COMMANDS.get(name, "")
    if not near and ((name.startswith("-") and rest) or name.endswith(".py") or os.sep in name):
        return UsageError(
            "usage",
            f"rallypoint {name}: no command is given",
            help=(("say what to do with it", shlex.join(("rallypoint", "run", *words))),),
        )
    if name in CATALOGUE or name.endswith((".log", ".out", ".err")):
        near, rest = "explain", list(words)
    elif is_python(name):
        near = "run"
    names = {one.lstrip("-"): one for one in (*commands, "--version", "--help")}
    near = near or names.get(nearest(name.lower().lstrip("-"), names, alike=0.6), "")
    code, kind = ("option-unknown", "option") if name.startswith("-") else ("usage", "command")
    missing = f"rallypoint has no {kind} {name or repr(name)}{hint_at(near)}"
    if not near:
        return UsageError(code, missing, help=(("see the commands", "rallypoint --help"),))
    line = f"rallypoint {near} {shlex.join(rest)}".rstrip()
    helps = [(f"leave {name} out" if name in LAUNCHERS else f"use {near}", line)]
    if near == "show --list":
        helps.append(("or, for a job that is running", "rallypoint stacks"))
    return UsageError(code, missing, help=tuple(helps))
