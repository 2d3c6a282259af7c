"""docs/errors/: the pages of `explain/` as files for readers, and the index of them by whose affair each is."""

from __future__ import annotations

from rallypoint.diagnosis.causes import CATALOGUE, Affair, page
from rallypoint.diagnosis.page_text import without_note

AFFAIRS: dict[Affair, tuple[str, str]] = {
    "program": ("Your program", "Something in the program, or in what its ranks did to each other."),
    "usage": ("How rallypoint was called", "An option, an argument, a file that was named: nothing was started, or the call did nothing."),
    "machine": ("This machine", "A port, an address, a device, memory, a disk, or what is installed."),
    "person": ("Somebody wanted it", "No error: a person or a scheduler ended the job."),
    "launcher": ("rallypoint itself", "A process of rallypoint's own, or a fault in it."),
}

INTRODUCTION = """\
# Errors

Every report of rallypoint has a code. `rallypoint explain CODE` prints its page, which is also here: what you see, why it happens, how
to make sure, how to fix it. Codes are never renamed, and never used for anything else.

Made from the pages in the package by `UPDATE_DOCS=1 python -m pytest tests/diagnosis/test_causes.py`; do not edit.
"""


def files() -> dict[str, str]:
    """Every file of docs/errors/ with its content."""
    return {"README.md": index(), **{f"{code}.md": written(code) for code in CATALOGUE}}


def index() -> str:
    """The list of all codes, a table for each affair."""
    parts = [INTRODUCTION]
    for affair, (title, about) in AFFAIRS.items():
        rows = [f"| [{cause.code}]({cause.code}.md) | {cause.meaning} |" for cause in CATALOGUE.values() if cause.affair == affair]
        parts.append("\n".join([f"## {title}\n", f"{about}\n", "| code | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def written(code: str) -> str:
    """A page as it stands there: without its note for the test suite, and with the way back."""
    return without_note(page(code)) + "\n---\n\n[all errors](README.md)\n"
