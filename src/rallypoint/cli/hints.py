"""Answers to a command line that is refused: the nearest option or command, and what to type."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli.option_values import nearest
from rallypoint.cli.options import BY_KEY, Option
from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.cli.commands import Command

SYNONYMS = {
    **dict.fromkeys(
        (
            *("-ppn", "-npernode", "--gpus", "--gpus-per-node", "--n", "--np", "--npernode"),
            *("--nprocs", "--ntasks", "--ntasks-per-node", "--num-gpus", "--num-processes"),
            *("--num-procs", "--ppn", "--procs", "--ranks", "--world-size"),
        ),
        "--nproc-per-node",
    ),
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
    *("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun"),
    *("torch.distributed.run", "torch.distributed.launch"),
)

COMMANDS = {
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


def is_one_dashed(word: str) -> bool:
    """Tell whether `-np` or `-nnodes` was typed, which is a `-n` without a number here."""
    return word.startswith(("-np", "-nn"))


def retyped(typed: Sequence[str], *words: str, as_script: bool = False) -> str:
    """Return the command again, with these words behind its options.

    `as_script`: without the options that make the program something else than a script.
    """
    kinds = ("module", "no_python", "run_path") if as_script else ()
    left_out = {spelling for key in kinds for spelling in BY_KEY[key].spellings}
    kept = [word for word in typed if word not in left_out]
    return "rallypoint run " + shlex.join([*kept, *words])


def example(option: Option, command: Command) -> tuple[tuple[str, str], ...]:
    """Return the help for a value that is missing or wrong."""
    if option.example:
        return (("give, for example", option.example),)
    return (("see the options", f"rallypoint {command.name} --help"),)


def incomplete(spelling: str, whole: str, command: Command) -> UsageError:
    """Return the error for an option without its value, or a flag with one.

    `whole`: one of its names, when it was abbreviated.
    """
    option = next(option for option in command.options if whole in option.spellings)
    if option.metavar:
        headline = f"{spelling} lacks its value, {option.metavar}"
        return UsageError("usage", headline, help=example(option, command))
    headline = f"{spelling} is a flag and takes no value"
    return UsageError("usage", headline, help=(("give it alone", spelling),))


def swallowed(option: Option, spelling: str, text: str, argv: Sequence[str]) -> UsageError | None:
    """Return the error for `-n train.py`: an option without a value has taken the program
    for it.
    """
    if not (option.metavar and option.example and text.endswith(".py") and text in argv):
        return None
    try:
        option.read(text)
    except ValueError:
        at = list(argv).index(text)
        value = option.example.rpartition(" ")[2]
        return UsageError(
            "usage",
            f"{spelling} lacks its value, {option.metavar}: {text} stands in its place",
            help=(("give, for example", retyped((*argv[:at], value), *argv[at:])),),
        )
    return None


def unknown(word: str, argv: Sequence[str], command: Command) -> UsageError:
    """Return the error for an option that is not there: the nearest one, or why there is none."""
    name, equals, value = word.partition("=")
    headline = f"rallypoint {command.name} has no option {name}"
    is_run = command.name == "run"
    if is_run and hyphened(name) in NOT_HERE:
        headline = f"{headline}: {NOT_HERE[hyphened(name)]}"
        return UsageError("option-unknown", headline, help=(("leave it out", ""),))
    flag = hyphened(name).replace("--no-", "--", 1)
    flags = [one for option in command.options if not option.metavar for one in option.names]
    if flag != hyphened(name) and flag in flags:
        headline = f"{headline}: {flag} is off unless it is given"
        return UsageError("option-unknown", headline, help=(("leave it out", ""),))
    if count := re.fullmatch(r"-np=?(\d*)", word) if is_run else None:
        near, instead = "-n", ["-n", count[1]] if count[1] else ["-n"]
    else:
        near = _nearest_option(name, command)
        instead = [f"{near}{equals}{value}"]
    helps = []
    if near:
        at = argv.index(word) if word in argv else len(argv)
        line = shlex.join([*argv[:at], *instead, *argv[at + 1 :]])
        helps.append((f"use {near}", f"rallypoint {command.name} {line}"))
    if is_run and not is_one_dashed(word) and hyphened(name) not in SYNONYMS:
        sentence = "put the program's own options after its name"
        helps.append((sentence, f"rallypoint run train.py {word}"))
    named = f"; the nearest is {near}" if near else ""
    see = (("see the options", f"rallypoint {command.name} --help"),)
    return UsageError("option-unknown", f"{headline}{named}", help=tuple(helps) or see)


def _nearest_option(name: str, command: Command) -> str:
    name = hyphened(name)
    names = [one for option in command.options for one in option.names if one.startswith("--")]
    known = SYNONYMS.get(name, "")
    if known.partition("=")[0] in names:
        return known
    long = f"--{name.lstrip('-')}"
    begun = [one for one in names if one.startswith(long)] if len(long) > 3 else []
    if begun:  # an abbreviation, which torchrun takes: `--nproc`
        return min(begun, key=len)
    near = nearest(long[2:], [one[2:] for one in names])  # the dashes are alike in all
    if near:
        return f"--{near}"
    beginnings = {
        one[: len(long)]: one for one in sorted(names, key=len, reverse=True)
    }  # a typing error in an abbreviation
    near = nearest(long[2:], [one[2:] for one in beginnings], alike=0.8) if len(long) > 5 else ""
    return beginnings[f"--{near}"] if near else ""


def no_word(word: str, argv: Sequence[str], command: Command) -> UsageError | None:
    """Return the error for a word that was meant as an option, from a document or from quotes."""
    at = argv.index(word)
    name = word.lstrip(_DASHES + "-")
    if name and word[0] in _DASHES:
        plain = name.translate(dict.fromkeys(map(ord, _DASHES), "-"))
        instead = f"{'-' if len(name.partition('=')[0]) == 1 else '--'}{plain}"
        code = f"U+{ord(word[0]):04X}"
        end = "text programs change options like that"
        headline = f"{word} begins with a dash ({code}) that is no hyphen: {end}"
        line = shlex.join([*argv[:at], instead, *argv[at + 1 :]])
        help = (("type it with hyphens", f"rallypoint {command.name} {line}"),)
        return UsageError("option-unknown", headline, help=help)
    words = word.split()
    spellings = {spelling for option in command.options for spelling in option.spellings}
    if len(words) > 1 and words[0] in spellings:
        line = shlex.join([*argv[:at], *words, *argv[at + 1 :]])
        return UsageError(
            "usage",
            f"{word} is one word with a blank in it, and no option",
            help=(("give each word of it by itself", f"rallypoint {command.name} {line}"),),
        )
    return None


def no_words(words: Sequence[str], typed: Sequence[str], command: Command) -> UsageError:
    """Return the error for words that were given to a command that takes options only."""
    first, *rest = words
    help = ("see the options", f"rallypoint {command.name} --help")
    if any(f"--{first}" in option.spellings for option in command.options):
        line = shlex.join((*typed, f"--{first}", *rest))
        help = ("it is an option", f"rallypoint {command.name} {line}")
    elif command.name == "doctor":
        from rallypoint.diagnosis.doctor.doctor import NAMES

        if set(words) <= set(NAMES):
            line = shlex.join((*typed, "--only", ",".join(words)))
            help = ("name the checks after --only", f"rallypoint doctor {line}")
    headline = f"rallypoint {command.name} takes options only, and got {first}"
    return UsageError("usage", headline, help=(help,))


def no_command(words: Sequence[str], commands: Collection[str]) -> UsageError:
    """Return the error for a first word that is no command."""
    from rallypoint.diagnosis.catalogue import CATALOGUE

    name, rest = words[0], list(words[1:])
    missing = f"rallypoint has no command {name or repr(name)}"
    near = "--version" if name == "-v" else ""
    if name.startswith("--") and (like := nearest(name[2:], ("version", "help"))):
        near = f"--{like}"
    if near:
        headline = f"rallypoint has no option {name}; the nearest is {near}"
        return UsageError("option-unknown", headline, help=((f"use {near}", f"rallypoint {near}"),))
    if (name.startswith("-") and rest) or name.endswith(".py") or os.sep in name:
        line = f"rallypoint run {shlex.join(words)}"
        headline = f"rallypoint {name}: no command is given"
        return UsageError("usage", headline, help=(("say what to do with it", line),))
    if name in ("help", "version"):
        line = (
            f"rallypoint {shlex.join([*[one for one in rest[:1] if one in commands], f'--{name}'])}"
        )
        return UsageError("usage", missing, help=(("it is an option", line),))
    if name in CATALOGUE or name.endswith((".log", ".out", ".err")):
        near, rest = "explain", list(words)
    elif is_python(name):
        near = "run"
    else:
        near = COMMANDS.get(name) or nearest(name.lower(), commands, alike=0.6)
    if not near:
        return UsageError("usage", missing, help=(("see the commands", "rallypoint --help"),))
    line = f"rallypoint {near} {shlex.join(rest)}".rstrip()
    helps = [(f"leave {name} out" if name in LAUNCHERS else f"use {near}", line)]
    if name in ("ps", "status", "top"):
        helps.append(("or, for a job that is running", "rallypoint stacks"))
    return UsageError("usage", f"{missing}; the nearest is {near}", help=tuple(helps))
