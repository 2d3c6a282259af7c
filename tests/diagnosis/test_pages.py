"""A code's page on a terminal of any width."""

from __future__ import annotations

import re

import pytest

from rallypoint.diagnosis import pages
from rallypoint.diagnosis.catalogue import CATALOGUE, page

PAGE = """\
# rank-lost

<!-- produces: rallypoint run -n 2 script.py -->

## What you see

    error[rank-lost]: a line that is longer than the terminal is wide

A paragraph that was
broken raggedly, with `some code` at the end of it.
And one sentence more.

- An item that goes on
  in a second line.
- Another:
1. `rallypoint run -n 2 train.py`

```python script.py
import os

if os.environ["RANK"] == "1":
    raise SystemExit(1)
```

Run it.
"""


def test_a_page_on_a_narrow_terminal() -> None:
    assert (
        pages.shown(PAGE, 40)
        == """\
# rank-lost

## What you see

    error[rank-lost]: a line that is longer than the terminal is wide

A paragraph that was broken raggedly,
with `some code` at the end of it. And
one sentence more.

- An item that goes on in a second line.
- Another:
1. `rallypoint run -n 2 train.py`

-- script.py --------------------
import os

if os.environ["RANK"] == "1":
    raise SystemExit(1)
---------------------------------

Run it.
"""
    )


def test_short_code_is_not_parted() -> None:
    text = "# x\n\nOne two three `rallypoint show --list` four.\n"
    assert pages.shown(text, 30) == "# x\n\nOne two three\n`rallypoint show --list` four.\n"


def test_headings_stand_out() -> None:
    assert pages.shown("# x\n\nwords\n", 40, bold=True) == "\x1b[1m# x\x1b[0m\n\nwords\n"


@pytest.mark.parametrize("columns", [1, 20, 40, 92])
def test_every_page_on_any_terminal(columns: int) -> None:
    """No fence, no note, no second empty line; every word is there, and prose is as wide as it may
    be.
    """
    for code in CATALOGUE:
        text = pages.shown(page(code), columns)
        assert "```" not in text, code
        assert "<!--" not in text, code
        outside = re.sub(r"^-- \S+\.py --+$.*?^--+$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^# .*\n\n\n", outside), code
        kept = re.sub(r"^```.*$", "", pages.without_note(page(code)), flags=re.MULTILINE)
        assert (
            re.sub(r"^(-- \S+\.py )?--+$", "", text, flags=re.MULTILINE).split() == kept.split()
        ), code
        for line in outside.splitlines():
            indented = line.startswith(("    ", "|", "#"))
            assert (
                indented or len(line) <= max(columns, 20) or len(line.split()) <= 2 or "`" in line
            ), (code, line)
