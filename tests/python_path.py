"""PYTHONPATH of jobs that tests start, and the stand-ins for torch and scikit-learn found there."""

from __future__ import annotations

import os
from pathlib import Path

WITHOUT_TORCH = Path(__file__).parent / "without_torch"
TORCH_IN_PARTS = Path(__file__).parent / "torch_in_parts"
TORCH_WITHOUT_COMPILER = Path(__file__).parent / "torch_without_compiler"
DIGITS_ALONE = Path(__file__).parent / "digits_alone"


def python_path(*folders: Path) -> str:
    """Return this process' PYTHONPATH with `folders` in front."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))
