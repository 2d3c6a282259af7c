"""The reference pages say what the tables say. `UPDATE_DOCS=1 pytest tests/cli/test_docs.py` writes
them anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.cli import help, options

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def reference() -> str:
    """Return the tables of docs/reference/run.md."""
    parts = []
    for fate, title in options.FATES.items():
        is_accepted = fate == "accepted"
        last = "why it has no effect" if is_accepted else "default"
        parts += [f"### {title}", "", f"| option | variable | meaning | {last} |"]
        parts.append("|---|---|---|---|")
        for option in options.RUN:
            if option.fate == fate:
                metavar = f" `{_cell(option.metavar)}`" if option.metavar else ""
                names = ", ".join(f"`{name}`" for name in option.names) + metavar
                variables = filter(None, (option.variable, option.fallback))
                cells = (
                    names,
                    ", ".join(f"`{name}`" for name in variables),
                    _cell(option.sentence),
                    _cell(option.why if is_accepted else help.default_of(option)),
                )
                parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


@pytest.mark.parametrize(("page", "section", "made"), [("run.md", "options", reference)])
def test_reference_page_has_the_table(page: str, section: str, made: Callable[[], str]) -> None:
    path = REFERENCE / page
    text = path.read_text()
    begin, end = f"<!-- begin: {section} -->\n", f"<!-- end: {section} -->\n"
    head, _, rest = text.partition(begin)
    written, _, tail = rest.partition(end)
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(head + begin + made() + end + tail)
        return
    assert written == made(), f"{page} is older than its table: UPDATE_DOCS=1 pytest {__file__}"


def test_every_variable_of_an_option_is_documented() -> None:
    variables = [
        name for option in options.RUN for name in (option.variable, option.fallback) if name
    ]
    assert variables
    page = (REFERENCE / "environment.md").read_text()
    missing = [
        name for name in variables if f"| `{name}` |" not in page and not name.startswith("PET_")
    ]
    assert missing == []
