"""`rallypoint explain`: the page of a code, or the list of codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rallypoint.cli.main import write_out
from rallypoint.diagnosis.causes import CATALOGUE, nearest, page
from rallypoint.errors import UsageError

HELP = """\
usage: rallypoint explain [CODE]

Without CODE: every code with what it means. With it: what you see, why it happens, how to make sure, how to fix it.
A code is the word in brackets of a report: error[rank-killed].
Not yet: reading another launcher's log or a message; explain reads codes only.
"""


def main(argv: Sequence[str]) -> int:
    """Print what was asked for on stdout. Raises `UsageError` for what is no code."""
    words = list(argv)
    if any(word in ("-h", "--help") for word in words):
        write_out(HELP)
        return 0
    if not words:
        write_out(_list())
        return 0
    if len(words) > 1:
        raise UsageError(
            "usage",
            f"explain takes one code, and got {len(words)} words",
            why=("not yet: explain reads codes only, no messages",),
            help=(("see the codes", "rallypoint explain"),),
        )
    code = _code(words[0])
    if code not in CATALOGUE:
        raise _unknown(words[0], code)
    terminal = bool(sys.stdout) and sys.stdout.isatty()
    write_out(_shown(page(code), terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"))
    return 0


def _code(word: str) -> str:
    """`rank-killed` from `error[rank-killed]:`, `rank_killed` or `RANK-KILLED`."""
    _, bracket, inner = word.partition("[")
    return (inner.partition("]")[0] if bracket else word).strip().lower().replace("_", "-")


def _unknown(word: str, code: str) -> UsageError:
    if word == "-" or os.path.exists(word) or any(mark in word for mark in " :/"):
        return UsageError(
            "usage",
            "explain cannot read files or messages yet: it reads codes only",
            help=(("see the codes", "rallypoint explain"),),
        )
    near = nearest(code)
    helps = tuple(("the nearest is" if i == 0 else "or", f"rallypoint explain {name}") for i, name in enumerate(near))
    return UsageError("usage", f"there is no code {word}", help=helps or (("see the codes", "rallypoint explain"),))


def _list() -> str:
    wide = max(map(len, CATALOGUE)) + 2
    return "".join(f"{cause.code:<{wide}}{cause.meaning}\n" for cause in CATALOGUE.values())


def _shown(text: str, bold: bool) -> str:
    """The page without its note for the test suite; headings in bold on a terminal."""
    lines = [line for line in text.splitlines() if not line.startswith("<!--")]
    if bold:
        lines = [f"\x1b[1m{line}\x1b[0m" if line.startswith("#") else line for line in lines]
    return "\n".join(lines).strip("\n") + "\n"
