"""`rallypoint`: which command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rallypoint import __version__
from rallypoint.cli.error_exit import guarded
from rallypoint.cli.output import write_err, write_out
from rallypoint.launcher import exits

COMMANDS = {
    "run": "start a job on this node (torchrun's options work)",
    "show": "a run again: its timeline, logs, report",
    "serve": "the coordination store alone",
    "explain": "what an error means",
    "stacks": "where every rank of a running job is, grouped",
    "stop": "end a running job in good order",
    "doctor": "check this machine, and the way to others, before a job does",
}

HELP = """\
usage: rallypoint run [options] script.py [arguments of the script]
{commands}
       rallypoint --version

{listed}

To begin: rallypoint run -n 4 train.py
The options of a command: rallypoint run --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status it ends with. Never raises, `SystemExit` aside."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: dispatch(words))


def dispatch(words: list[str]) -> int:
    """Find the command and hand it the rest. Raises `UsageError` when there is no such command."""
    if not words:
        write_err(help_text())
        return exits.USAGE
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        if rest[:1] and rest[0] in COMMANDS:
            return dispatch([rest[0], "--help"])
        write_out(help_text())
        return 0
    if name in ("-V", "--version"):
        write_out(f"rallypoint {__version__}\n")
        return 0
    if name in COMMANDS:  # only the module of this command is loaded
        from importlib import import_module

        from rallypoint.cli import args, commands

        act = import_module(f"rallypoint.cli.{name}").main
        return args.invoke(commands.BY_NAME[name], rest, act)
    from rallypoint.cli import hints

    raise hints.no_command(words, COMMANDS)


def help_text() -> str:
    width = max(map(len, COMMANDS)) + 3
    commands = "\n".join(f"       rallypoint {name} ..." for name in COMMANDS if name != "run")
    return HELP.format(
        commands=commands,
        listed="\n".join(f"  {name:<{width}}{sentence}" for name, sentence in COMMANDS.items()),
    )
