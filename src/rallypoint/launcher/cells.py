"""Names of a notebook's cells as people know them: `Cell In[4]`, not /tmp/ipykernel_24594/221512147.py."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_FILE = re.compile(r"(?:/[^\s\"':]*/)?ipykernel_\d+/\d+\.py")  # relative where the program stands above it


def named(text: str) -> str:
    """The text with each file that stands for a cell of this process's notebook replaced by IPython's name for the cell."""
    if "ipykernel_" not in text or "IPython" not in sys.modules:
        return text
    compiler: Any = getattr(sys.modules["IPython"].get_ipython(), "compile", None)
    if not hasattr(compiler, "format_code_name"):  # no shell is running, or one from before 2021
        return text

    def name(found: re.Match[str]) -> str:
        return " ".join(compiler.format_code_name(os.path.abspath(found[0])) or (found[0],))

    return _FILE.sub(name, text)
