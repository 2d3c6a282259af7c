"""The GPUs: which are here, whether torch can use them, who else has their memory."""

from __future__ import annotations

import os
import shlex
import sys

from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, size
from rallypoint.host.devices import BUSY_SHARE, Device, Found, count, find, look_closely, missing


def check() -> tuple[Finding, ...]:
    return judge(find(os.environ, look_closely()))


def judge(found: Found) -> tuple[Finding, ...]:
    """`found`: what `rallypoint.host.devices` says of this machine."""
    look = found.look
    if not (look.devices or look.driver or look.hidden):
        return (ok("no NVIDIA GPU and no driver: ranks compute on the processors"),)
    lack = missing(found)
    facts = found.facts()
    if lack:
        help = (("see the GPUs and the driver", "nvidia-smi"),)
        if found.build is not None and not found.build.cuda:  # a choice that somebody made, perhaps on purpose
            return (
                note(
                    "device-missing",
                    f"{count(len(look.devices))} and {lack}",
                    ("install a torch for CUDA, if it is to use them", f"{shlex.quote(sys.executable)} -m pip install torch"),
                    why=facts,
                ),
            )
        return (fault("device-missing", lack, *help, why=facts),)
    if look.problem:
        return (
            note(
                "check-overrun",
                f"{count(len(look.devices))} by /dev, and the driver did not say more: {look.problem}",
                ("ask it yourself", "nvidia-smi"),
                why=facts,
            ),
        )
    busy = [(index, device) for index, device in _visible(found) if device.memory and device.used >= BUSY_SHARE * device.memory]
    named = ", ".join(dict.fromkeys(device.name for device in look.devices if device.name))
    shown = f"{count(len(look.devices))} ({named}), driver {look.driver}" + (
        f", {len(found.visible)} visible" if len(found.visible) < len(look.devices) else ""
    )
    if not busy:
        return (ok(f"{shown}; nobody holds a tenth of a visible one's memory"),)
    which = ", ".join(f"GPU {index}: {size(device.used)} of {size(device.memory)} in use" for index, device in busy)
    strangers = found.strangers(())
    return (
        note(
            "device-busy",
            which,
            ("see who it is", "nvidia-smi"),
            *_leave_out(found, {index for index, _ in busy}),
            why=(shown, *(strangers or ("the driver names no process: it may be in another container",))),
        ),
    )


def _visible(found: Found) -> list[tuple[int, Device]]:
    return [(index, found.look.devices[index]) for index in found.visible.indices if index >= 0]


def _leave_out(found: Found, busy: set[int]) -> list[tuple[str, str]]:
    """The visible GPUs without those; nothing to type when none would be left, or when their numbers are not CUDA's."""
    others = [str(index) for index in found.visible.indices if index >= 0 and index not in busy]
    alike = len({device.name for device in found.look.devices}) <= 1 or found.visible.by_bus
    return (
        [("or leave it out", f"export CUDA_VISIBLE_DEVICES={','.join(others)}")] if others and alike and not found.visible.instance else []
    )
