"""Numbers with their units."""

from __future__ import annotations

import pytest

from rallypoint.units import duration, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (512, "512 bytes"),
        (4096, "4.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 40, "2.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (120e-6, "120 us"),
        (0.008, "8.0 ms"),
        (1.34, "1.3 s"),
        (31.4, "31 s"),
        (250.0, "250 s"),
        (1200.0, "20 min"),
        (9000.0, "2.5 h"),
        (10800.0, "3 h"),
        (9 * 86400.0, "9 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
