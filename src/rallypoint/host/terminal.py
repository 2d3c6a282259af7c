"""Width of a terminal, and how wide prose on it should be."""

from __future__ import annotations

import os

WIDEST = 100  # columns: prose that is wider is hard to read
# columns: where there are fewer, no sentence can be filled, and the terminal may break the lines
# itself
NARROWEST = 20
UNKNOWN = 92  # columns of prose where there is no terminal: a log, a pipe


def columns(fd: int) -> int | None:
    """Columns of what is behind a descriptor: COLUMNS, else the terminal's own number; None when
    there is neither."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdecimal() and given.strip("0"):
        return int(given) if len(given) < 9 else WIDEST
    try:
        return os.get_terminal_size(fd).columns or None
    except OSError:  # no terminal, or closed
        return None


def is_in_background(fd: int) -> bool:
    """Tell whether a descriptor is this process's terminal, and another group of its session has it
    now: a shell, for a job started with `&`."""
    try:
        return os.tcgetpgrp(fd) != os.getpgrp()
    except OSError:  # no terminal, or another session's
        return False


def prose_columns(found: int | None) -> int:
    """Columns to fill prose to, on so many, or where it is not known."""
    return max(NARROWEST, min(UNKNOWN if found is None else found, WIDEST))


def wants_color(is_terminal: bool) -> bool:
    """Tell whether to use colours: NO_COLOR and FORCE_COLOR when set and not empty
    (https://no-color.org, https://force-color.org), else on terminals."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (
        is_terminal and os.environ.get("TERM", "dumb") != "dumb"
    )
