"""Numbers with their units, for people."""

from __future__ import annotations


def size(count: int) -> str:
    """Return bytes: `167 bytes`, `64.0 MiB`, `18.9 GiB`."""
    power = max(count.bit_length() - 1, 0) // 10
    if not power:
        return f"{count} byte{'s' * (count != 1)}"
    return f"{count / (1 << 10 * power):.1f} {'KMGTPE'[power - 1]}iB"


def duration(seconds: float) -> str:
    """Return seconds: `120 us`, `8.0 ms`, `1.3 s`, `31 s`, `4 min`, `2.5 h`, `9 days`."""
    if 0 < seconds < 0.1:
        return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
    if seconds < 600:
        return f"{seconds:.{int(seconds < 10)}f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{round(seconds / 3600, 1):g} h"
    return f"{round(seconds / 86400, 1):g} days"
