"""The questions of group A that are about memory which processes share: what they say in
particular.
"""

from __future__ import annotations

import re

import pytest

from .conftest import Program

pytestmark = pytest.mark.torch


def test_four_processes_add_to_one_tensor(program: Program) -> None:
    told, total = program("A1_four_processes_add_to_one_tensor.py")
    assert total == "total 40000"
    assert re.fullmatch(
        r"Process-\d+ \(pid \d+\) died while it held the lock of SharedTensor int64 \(5,\), 40 bytes, so it may be half changed",
        told,
    )


def test_a_lock_for_ten_processes(program: Program) -> None:
    assert program("A2_a_lock_for_ten_processes.py") == ["counted 15000"]
