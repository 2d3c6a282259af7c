"""The files of this process's control group and of those above it, versions 2 and 1: a limit anywhere on the way up holds."""

from __future__ import annotations

import os
from collections.abc import Iterator

NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest number that is a multiple of a page; nobody has an exbibyte."""


def folders(controller: str, root: str = "/") -> Iterator[tuple[str, bool]]:
    """The folders of this process's group for a controller, innermost first, and whether it is version 2.

    In a container the group's path may lie outside what is mounted: those folders are not there, and reading their files gives "".
    `root` is for tests.
    """
    mounts = os.path.join(root, "sys/fs/cgroup")
    for line in text(os.path.join(root, "proc/self/cgroup")).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        unified = hierarchy == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        places = (mounts, os.path.join(mounts, "unified")) if unified else (os.path.join(mounts, controller),)
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield from ((os.path.join(place, *parts[:depth]), unified) for place in places)


def number(path: str) -> int:
    """The number in a file; 0 where there is none, or no limit ("max")."""
    words = text(path).strip()
    return int(words) if words.isdigit() and int(words) < NO_LIMIT else 0


def text(path: str) -> str:
    """What a small file says, "" when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
