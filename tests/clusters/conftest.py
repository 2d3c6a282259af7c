"""What jobs on clusters are spared."""

from __future__ import annotations

import os

import pytest

from ..python_path import DIGITS_ALONE, TORCH_WITHOUT_COMPILER, python_path


@pytest.fixture
def digits_quickly(torch_in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of jobs what the digits do not need: torch's compiler, and most of scikit-learn."""
    parts = [] if os.environ.get("RALLYPOINT_WHOLE_TORCH") else [TORCH_WITHOUT_COMPILER]
    monkeypatch.setenv("PYTHONPATH", python_path(DIGITS_ALONE, *parts))
