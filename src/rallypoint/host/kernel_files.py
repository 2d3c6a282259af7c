"""Files of the kernel: their texts and numbers, and the folders of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator

_CGROUP_NO_LIMIT = 1 << 60
"""Version 1 of control groups writes "no limit" as the largest multiple of a page."""


def cgroup_folders(controller: str, root: str = "/") -> Iterator[tuple[str, bool]]:
    """Yield the folders of this process's control group for a controller, innermost first, and
    whether each is version 2.

    A limit anywhere on the way up holds. In a container the path may lie outside what is mounted:
    these folders do not exist, and reading their files gives "". `root` is for tests.
    """
    mounts = os.path.join(root, "sys/fs/cgroup")
    for line in text_of(root, "proc/self/cgroup").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        unified = hierarchy == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        places = (
            (mounts, os.path.join(mounts, "unified"))
            if unified
            else (os.path.join(mounts, controller),)
        )
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield from ((os.path.join(place, *parts[:depth]), unified) for place in places)


def text_of(*path: str, most: int = 1 << 16) -> str:
    """Read a file up to so many characters, -1: all; "" when it cannot be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def number_in(*path: str, default: int = 0) -> int:
    """Read the number in a file; `default` where there is none, or no limit ("max")."""
    words = text_of(*path).strip()
    return int(words) if words.isdigit() and int(words) < _CGROUP_NO_LIMIT else default
