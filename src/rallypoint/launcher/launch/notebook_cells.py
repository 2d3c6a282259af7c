"""Names of a notebook's cells as people know them: `Cell In[4]`, not
/tmp/ipykernel_24594/221512147.py."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_FILE = re.compile(r"ipykernel_\d{1,20}/\d{1,20}\.py")  # the end of its path
_BEFORE_A_PATH = frozenset(" \t\n\r\"':")


def named(text: str) -> str:
    """Replace the files of cells of this process's notebook by IPython's names for the cells."""
    if "ipykernel_" not in text or "IPython" not in sys.modules:
        return text
    compiler: Any = getattr(sys.modules["IPython"].get_ipython(), "compile", None)
    if not hasattr(compiler, "format_code_name"):  # no shell is running, or one from before 2021
        return text

    said, done = [], 0
    for found in _FILE.finditer(text):
        start = _start_of_path(text, found.start(), done)
        path = text[start : found.end()]  # relative where the program stands above it
        said += [
            text[done:start],
            " ".join(compiler.format_code_name(os.path.abspath(path)) or (path,)),
        ]
        done = found.end()
    return "".join((*said, text[done:]))


def _start_of_path(text: str, end: int, least: int) -> int:
    """Return where the folders before `end` begin, at `least` or later; `end` if there are none.

    A pattern for it would be quadratic.
    """
    start = end
    while start > least and text[start - 1] not in _BEFORE_A_PATH:
        start -= 1
    first = text.find("/", start, end)
    return first if first >= 0 and text[end - 1] == "/" else end
