"""One call of a command, as all that have a table of options share it: take the line apart, answer --help, and show what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rallypoint.cli import parser
from rallypoint.cli.command_line import CommandLine
from rallypoint.cli.commands import Command
from rallypoint.cli.guard import guarded
from rallypoint.cli.terminal import help_width, write_out


def invoke(
    command: Command, argv: Sequence[str], act: Callable[[CommandLine], int], environ: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Do `act` with the command line; the exit status. Errors are printed in the format that the line asks for, and not raised.

    `environ`: where variables may stand for options.
    """
    line = parser.take_apart(argv, environ, command)

    def answer() -> int:
        if line.wants_help:
            from rallypoint.cli import help_page

            write_out(help_page.text(command, help_width()))
            return 0
        return act(line)

    return guarded(answer, lambda: line.error_format)
