"""Version of the torch that is installed here, without importing it."""

from __future__ import annotations

import os
import sys


def torch_version() -> str:
    """Return the installed torch by its metadata; "" when there is none, "unknown" when it has no
    metadata."""
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
