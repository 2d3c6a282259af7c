"""GPUs that CUDA_VISIBLE_DEVICES leaves a program, and what the variable does, in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rallypoint.host.devices import Look


class Visible(msgspec.Struct, frozen=True):
    """GPUs that CUDA_VISIBLE_DEVICES leaves."""

    given: str | None
    # places in `Look.devices`, as CUDA numbers them; -1: one that could not be looked up
    indices: tuple[int, ...]
    instance: bool = False  # a part of a GPU (MIG), of which CUDA shows a process one
    stopped: str = ""  # why entries were not read, a clause
    # CUDA numbers as the bus does (CUDA_DEVICE_ORDER=PCI_BUS_ID); else the fastest comes first
    by_bus: bool = False

    def __len__(self) -> int:
        return len(self.indices)


def read_list(given: str | None, look: Look) -> Visible:
    """Return what CUDA makes of the variable's text."""
    if given is None:
        cut = [index for index, device in enumerate(look.devices) if device.instances]
        indices = (cut[0],) if cut else tuple(range(len(look.devices)))
        return Visible(None, indices, instance=bool(cut))
    if not look.devices or not given:
        return Visible(given, (), stopped="" if given else "it is empty")
    kind = next((prefix for prefix in ("GPU-", "MIG-") if given.startswith(prefix)), "")
    found: list[int] = []
    seen: list[str | int] = []
    stopped = ""
    for entry in (part.strip() for part in given.split(",")):
        index, stopped = _entry(entry, kind, look)
        if stopped:
            break
        mark = entry if kind else index
        if mark in seen:
            twice = f"{entry} stands in it twice, and CUDA then shows none"
            return Visible(given, (), stopped=twice)
        seen.append(mark)
        found.append(index)
    # Of instances CUDA shows a process one only.
    is_part = kind == "MIG-" or any(index >= 0 and look.devices[index].instances for index in found)
    if is_part:
        return Visible(given, tuple(found[:1]), instance=bool(found), stopped=stopped)
    return Visible(given, tuple(found), stopped=stopped)


def _entry(entry: str, kind: str, look: Look) -> tuple[int, str]:
    """Return the device that an entry names, or why it names none."""
    if not kind:
        number = re.match(r"[+-]?\d+", entry)
        if number is None:
            return -1, f"{entry!r} names no GPU"
        index = int(number[0])
        return (index, "") if 0 <= index < len(look.devices) else (-1, f"there is no GPU {index}")
    if not entry.startswith(kind):
        return -1, f"{entry!r} does not begin with {kind} as the first entry does"
    uuids = [
        (index, one)
        for index, device in enumerate(look.devices)
        for one in (device.instances if kind == "MIG-" else (device.uuid,))
    ]
    if not uuids:
        return -1, "no GPU here is cut into instances (MIG)"
    if not all(one for _, one in uuids):
        return -1, ""
    hits = [index for index, one in uuids if one.startswith(entry)]
    if len(hits) == 1:
        return hits[0], ""
    return -1, f"{entry} fits {len(hits)} GPUs" if hits else f"{entry} is none of the GPUs here"


def described(look: Look, visible: Visible) -> tuple[str, ...]:
    """Return what the variable leaves, and what is odd about it, a line each."""
    more = ("CUDA shows a process one instance (MIG) only",) * visible.instance
    if len({device.name for device in look.devices}) > 1 and not visible.by_bus:
        more += (
            "CUDA numbers the fastest GPU first, nvidia-smi by the bus: with CUDA_DEVICE_ORDER=PCI_BUS_ID they agree",
        )
    if visible.given is None:
        return ("CUDA_VISIBLE_DEVICES is not set", *more)
    which = ", ".join("one" if index < 0 else str(index) for index in visible.indices)
    left = f"{'an instance of ' * visible.instance}GPU {which}" if which else "no GPU"
    why = f": {visible.stopped}" if visible.stopped else ""
    why += ", and what follows is not read" if why and which else ""
    return (f"CUDA_VISIBLE_DEVICES={visible.given!r} leaves {left}{why}", *more)
