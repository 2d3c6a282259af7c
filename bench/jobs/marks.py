"""A rank writes down when it came to a point: one line `name rank attempt pid seconds` in the file
that BENCH_MARKS names.
"""

from __future__ import annotations

import os
import time


def mark(name: str) -> None:
    """Append the point, with the time of CLOCK_MONOTONIC, which all processes share. One write:
    lines of several ranks do not mix.
    """
    at = time.monotonic()
    line = f"{name} {os.environ.get('RANK', -1)} {os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0} {os.getpid()} {at!r}\n"
    fd = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


def wait_for(name: str) -> None:
    """Until the harness makes a file of that name in BENCH_FOLDER."""
    path = os.path.join(os.environ["BENCH_FOLDER"], name)
    while not os.path.exists(path):
        time.sleep(0.005)
