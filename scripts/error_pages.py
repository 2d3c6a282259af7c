"""Write the page of each error code, and an index by owner, for readers of the documentation.

Run by scripts/docs. The pages are those that `rallypoint explain CODE` prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rallypoint.diagnosis.catalogue import CATALOGUE, Affair, page
from rallypoint.diagnosis.pages import without_note

OWNERS: dict[Affair, str] = {
    "program": "Your program",
    "usage": "How rallypoint was called",
    "machine": "This machine",
    "person": "Somebody wanted it",
    "launcher": "rallypoint itself",
}


def write(folder: Path) -> None:
    """Write README.md, the index, and CODE.md for each code."""
    folder.mkdir(parents=True, exist_ok=True)
    index = ["# Errors", "", "Codes are never renamed, and never used for anything else."]
    for affair, title in OWNERS.items():
        causes = [cause for cause in CATALOGUE.values() if cause.affair == affair]
        rows = [f"| [{cause.code}]({cause.code}.md) | {cause.meaning} |" for cause in causes]
        index += ["", f"## {title}", "", "| code | meaning |", "|---|---|", *rows]
    (folder / "README.md").write_text("\n".join(index) + "\n", encoding="utf-8")
    for code in CATALOGUE:
        text = without_note(page(code)) + "\n---\n\n[all errors](README.md)\n"
        (folder / f"{code}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
