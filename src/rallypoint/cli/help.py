"""The tables of options for people: `--help`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rallypoint.cli.commands import Command
from rallypoint.cli.options import FATES, Option
from rallypoint.cli.output import filled

BESIDE, FEWEST_BESIDE = 32, 40
"""Columns before an option's sentence, and how many it needs to stand there; where there are fewer
it stands below the option.
"""


def text(command: Command, columns: int) -> str:
    """Return what `--help` prints on so many columns. Options of several fates stand apart."""
    parts = [filled(command.head, columns)]
    if command.words == "message":  # its head has the option
        return parts[0]
    present = {option.fate for option in command.options}
    for fate, title in FATES.items():
        if fate in present:
            parts += [f"{title}:"] if len(present) > 1 else []
            parts += _rows((one for one in command.options if one.fate == fate), columns)
            parts.append("")
    foot = command.foot()
    return "\n".join([*parts, *([filled(foot, columns)] if foot else [])])


def _rows(options: Iterable[Option], columns: int) -> list[str]:
    parts = []
    beside = columns - BESIDE >= FEWEST_BESIDE
    indent = BESIDE if beside else 6
    for option in options:
        names = f"  {', '.join(option.names)} {option.metavar}".rstrip()
        default = default_of(option)
        told = f"{option.sentence} (default:\0{default})" if default else option.sentence
        wrapped = textwrap.wrap(told, width=columns - indent, break_long_words=False)
        sentence = [line.replace("\0", " ") for line in wrapped]
        if len(names) <= BESIDE - 2 and beside:
            names = f"{names:<{BESIDE}}{sentence.pop(0)}"
        parts += [names, *(" " * indent + line for line in sentence)]
    return parts


def default_of(option: Option) -> str:
    """Return the default as one would type it; "" for none, or one that the sentence tells."""
    default = option.default
    if default in (None, "", (), ("", 0)):
        return ""
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
