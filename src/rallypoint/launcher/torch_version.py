"""Version of the torch that is installed here, without importing it."""

from __future__ import annotations

import glob
import os
import re
import sys


def torch_version() -> str:
    """Return the installed torch by its metadata; "" when there is none, "unknown" when it has no
    metadata."""
    # The metadata's folder has the version in its name. Python's own reader, which is asked about
    # any other form, takes 20 ms of processor time to be imported and to read the file.
    for folder in sys.path:
        for name in glob.glob("torch[-.]*-info", root_dir=folder or "."):
            found = re.fullmatch(r"torch-([^-_]+)\.dist-info", name)
            return found[1] if found else _by_reading()
    return _by_reading()


def _by_reading() -> str:
    from importlib.machinery import PathFinder
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("torch")
    except PackageNotFoundError:
        # A source build on PYTHONPATH has no metadata. The working directory does not count: a
        # user's own torch.py is no torch.
        elsewhere = [
            folder for folder in sys.path if folder and os.path.abspath(folder) != os.getcwd()
        ]
        return "unknown" if PathFinder.find_spec("torch", elsewhere) else ""
