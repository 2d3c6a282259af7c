"""Names of a notebook's cells as people know them: `Cell In[4]`, not
/tmp/ipykernel_24594/221512147.py."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_WORD = re.compile(r"""[^\s"':()\\]+""")  # a backslash ends a path in JSON
_FILE = re.compile(r"ipykernel_\d{1,20}/\d{1,20}\.py\Z")  # the end of a cell's path


def named(text: str) -> str:
    """Replace the files of cells of this process's notebook by IPython's names for the cells."""
    if "ipykernel_" not in text or "IPython" not in sys.modules:
        return text
    compiler: Any = getattr(sys.modules["IPython"].get_ipython(), "compile", None)
    if not hasattr(compiler, "format_code_name"):  # no shell is running, or one from before 2021
        return text

    def name(word: re.Match[str]) -> str:
        if not _FILE.search(word[0]):
            return word[0]
        # The path is relative where the program stands above it.
        return " ".join(compiler.format_code_name(os.path.abspath(word[0])) or (word[0],))

    return _WORD.sub(name, text)
