"""Folders and archives that Python runs as it runs a script: by the `__main__.py` in them."""

from __future__ import annotations

import os
import zipimport


def main_of(path: str) -> str:
    """`folder/__main__.py` or `app.zip/__main__.py`; "" when `path` is a script, or has none."""
    inside = os.path.join(path, "__main__.py")
    if os.path.isdir(path):
        return inside if os.path.isfile(inside) else ""
    if path.endswith(".py"):
        return ""
    try:
        return inside if zipimport.zipimporter(path).find_spec("__main__") is not None else ""
    except (zipimport.ZipImportError, OSError):  # no archive, or a broken one
        return ""
