"""The tables of options for people: `--help`, and the tables of docs/reference/run.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rallypoint.cli.commands import RUN, Command
from rallypoint.cli.options import FATES, Option
from rallypoint.cli.output import filled

BESIDE, FEWEST_BESIDE = 32, 40
"""Columns before an option's sentence, and how many it needs to stand there; where there are fewer
it stands below the option.
"""


def text(command: Command, columns: int) -> str:
    """What `--help` prints on so many columns. Options of several fates stand apart."""
    parts = [filled(command.head, columns)]
    present = {option.fate for option in command.options}
    for fate, title in FATES.items():
        if fate in present:
            parts += [f"{title}:"] if len(present) > 1 else []
            parts += [
                *_rows((option for option in command.options if option.fate == fate), columns),
                "",
            ]
    foot = command.foot()
    return "\n".join([*parts, *([filled(foot, columns)] if foot else [])])


def _rows(options: Iterable[Option], columns: int) -> list[str]:
    parts = []
    beside = columns - BESIDE >= FEWEST_BESIDE
    indent = BESIDE if beside else 6
    for option in options:
        names = f"  {', '.join(option.names)} {option.metavar}".rstrip()
        default = (
            _default(option) if option.fate != "several-nodes" else ""
        )  # the sentence says what it must be
        told = f"{option.sentence} (default:\0{default})" if default else option.sentence
        sentence = [
            line.replace("\0", " ")
            for line in textwrap.wrap(told, width=columns - indent, break_long_words=False)
        ]
        if len(names) > BESIDE - 2 or not beside:
            parts.append(names)
        else:
            parts.append(f"{names:<{BESIDE}}{sentence.pop(0)}")
        parts += [f"{'':{indent}}{line}" for line in sentence]
    return parts


def reference() -> str:
    """The tables of docs/reference/run.md."""
    parts = []
    for fate, title in FATES.items():
        last = "why it has no effect" if fate == "accepted" else "default"
        parts += [
            f"### {title}",
            "",
            f"| option | variable | meaning | {last} |",
            "|---|---|---|---|",
        ]
        for option in RUN.options:
            if option.fate == fate:
                names = ", ".join(f"`{name}`" for name in option.names) + (
                    f" `{_cell(option.metavar)}`" if option.metavar else ""
                )
                variables = ", ".join(
                    f"`{name}`" for name in (option.variable, option.fallback) if name
                )
                end = option.why if fate == "accepted" else _default(option)
                parts.append(f"| {names} | {variables} | {_cell(option.sentence)} | {_cell(end)} |")
        parts.append("")
    return "\n".join(parts)


def _default(option: Option) -> str:
    """As one would type it; "" for none, or one that the sentence tells."""
    if option.default in (None, "", (), ("", 0)):
        return ""
    if option.key == "nnodes":
        return "1"
    return (
        ",".join(option.default)
        if isinstance(option.default, tuple)
        else format(option.default, "g" if option.key == "grace" else "")
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
