"""A code's page as a terminal shows it: paragraphs filled to its columns, code as it
stands. Pure.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from rallypoint.diagnosis.pattern import Pattern

FEWEST = 20  # columns: with fewer no sentence can be filled

_BOLD, _OFF = "\x1b[1m", "\x1b[0m"
_ITEM = Pattern(r"(?:[-*]|\d+\.) ")
_CODE = Pattern(r"`[^`]+`")
_FENCE = "```"
_MOST_GLUED = 30  # characters of `code` that are kept on one line, where there is room for them


def without_note(text: str) -> str:
    """Return the page without its note for the test suite, and without the empty line that would be
    left of it.
    """
    return re.sub(r"^<!--.*-->\n\n?", "", text, flags=re.MULTILINE).strip("\n") + "\n"


def shown(text: str, columns: int, *, bold: bool = False) -> str:
    """Return the page on so many columns, with a newline at its end. `bold`: headings stand out.

    What is indented, tables and the program at the end stay as they are, each line: they are there
    to be copied. The program stands between two rules in place of the fences, with its name in the
    first.
    """
    columns = max(columns, FEWEST)
    return (
        "\n".join(
            line
            for block in _blocks(without_note(text))
            for line in _laid_out(block, columns, bold)
        )
        + "\n"
    )


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield runs of lines that are laid out together: a heading, a paragraph, an item of a list,
    lines of code, one that is empty.
    """
    block: list[str] = []
    fenced = False
    for line in text.splitlines():
        if fenced:
            block.append(line)
            fenced = not line.startswith(_FENCE)
            continue
        alone = (
            not line.strip()
            or line.startswith(("#", "|", "    ", _FENCE))
            or bool(_ITEM.match(line))
        )
        if block and (
            alone or not block[-1].strip() or block[-1].startswith(("#", "|", "    ", _FENCE))
        ):
            yield block
            block = []
        block.append(line)
        fenced = line.startswith(_FENCE)
    if block:
        yield block


def _laid_out(block: list[str], columns: int, bold: bool) -> list[str]:
    first = block[0]
    if first.startswith("#"):
        return [f"{_BOLD}{first}{_OFF}" if bold else first]
    if first.startswith(_FENCE):
        wide = min(columns, max(map(len, block)) + 4)
        return [f"-- {first.split()[-1]} ".ljust(wide, "-"), *block[1:-1], "-" * wide]
    if not first.strip() or first.startswith(("|", "    ")):
        return block
    item = _ITEM.match(first)
    return _filled(
        " ".join(line.strip() for line in block), columns, len(item.group()) if item else 0
    )


def _filled(words: str, columns: int, hang: int) -> list[str]:
    """Return the words in lines. Short `code` stays whole: it is there to be copied, too."""
    most = min(_MOST_GLUED, columns - hang)
    glued = _CODE.sub(
        lambda code: code.group().replace(" ", "\0") if len(code.group()) <= most else code.group(),
        words,
    )
    lines = textwrap.wrap(
        glued, columns, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]
