"""The age of a rendezvous file, by the clock of the disk that keeps it."""

from __future__ import annotations

import pytest

from rallypoint.launcher.worker.meeting_point import age_before

BEGAN, NOW = 100.0, 102.0


@pytest.mark.parametrize("ahead", [-30.0, 0.0, 30.0])  # seconds of the disk's clock before ours
def test_a_disk_with_another_clock(ahead: float) -> None:
    """A file of this run was taken for an old one where the disk's clock was some seconds behind."""
    assert age_before(101.0 + ahead, BEGAN, NOW + ahead, NOW) == -1.0
    assert age_before(90.0 + ahead, BEGAN, NOW + ahead, NOW) == 10.0
