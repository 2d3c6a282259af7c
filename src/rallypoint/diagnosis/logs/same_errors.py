"""Errors of a log that are one: several ranks show it, or another line repeats it."""

from __future__ import annotations

import re
from collections.abc import Hashable

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.error_patterns import python
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.log_events import Sighting

_OF_ONE_CAUSE = (
    "kernel-failed", "port-in-use", "device-shared", "cuda-forked", "group-missing", "group-twice",
    "parameters-unused", "device-missing", "calls-differ", "main-unguarded", "gpu-memory",
    "shared-memory", "host-memory", "disk-full",
)  # fmt: skip
"""Causes that make errors one, though their words and places differ."""


def key(error: Raised) -> Hashable:
    """Return a key that errors of one cause share."""
    cause = classify.cause_of(error)
    if cause in _OF_ONE_CAUSE:
        return cause
    frame = stacks.own_frame(error.frames)
    place = (frame.file, frame.line) if frame is not None else error.message[:80]
    return (error.type, place)


def _is_spawning(frame: Frame) -> bool:
    return re.search(r"multiprocessing[/\\]spawn\.py$", frame.file) is not None


def absorbed(groups: list[list[Sighting]]) -> list[list[Sighting]]:
    """Drop groups that only repeat another.

    These are the line that a logger wrote of an exception which has its traceback, too, the news
    that a DataLoader's worker has ended which is known to have been killed, or to have met a full
    /dev/shm, and the end of the input of a child for which its parent could not pickle something.
    """
    errors = [s.error for group in groups for s in group]
    messages = {error.message.partition("\n")[0] for error in errors if error.frames}
    killed = {worker[0] for worker in map(classify.loader_killed, errors) if worker is not None}

    full = any(classify.says("shared-memory", error.message) for error in errors)
    unpickled = any(python.NOT_PICKLED.search(error.message) for error in errors)

    def repeats(error: Raised) -> bool:
        gone = classify.loader_gone(error.message)
        if killed.intersection(gone) or (full and gone):
            return classify.loader_killed(error) is None
        if unpickled and error.type == "EOFError" and any(map(_is_spawning, error.frames)):
            return True
        return not error.frames and error.message.partition("\n")[0] in messages

    return [group for group in groups if not all(repeats(s.error) for s in group)] or groups
