"""Check of the GPUs: which are here, whether torch can use them, and which processes have their
memory."""

from __future__ import annotations

import os
import shlex
import sys

from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok
from rallypoint.host.devices import BUSY_SHARE, Found, count, find, look_closely, missing
from rallypoint.units import size


def devices() -> list[Finding]:
    """Check the GPUs of this machine."""
    return [judge_devices(find(os.environ, look_closely()))]


def judge_devices(found: Found) -> Finding:
    """`found`: what `rallypoint.host.devices` says of this machine."""
    look, facts = found.look, found.facts()
    if not (look.devices or look.driver or look.hidden):
        return ok("no NVIDIA GPU and no driver: ranks compute on the processors")
    there = count(len(look.devices))
    if lack := missing(found):
        if found.build is not None and not found.build.cuda:  # chosen, perhaps on purpose
            install = f"{shlex.quote(sys.executable)} -m pip install torch"
            return note(
                "device-missing",
                f"{there} and {lack}",
                ("install a torch for CUDA, if it is to use them", install),
                why=facts,
            )
        return fault(
            "device-missing", lack, ("see the GPUs and the driver", "nvidia-smi"), why=facts
        )
    if look.problem:
        silent = f"{there} by /dev, and the driver did not say more: {look.problem}"
        return note("check-overrun", silent, ("ask it yourself", "nvidia-smi"), why=facts)
    visible = {index: look.devices[index] for index in found.visible.indices if index >= 0}
    busy = {
        index: device
        for index, device in visible.items()
        if device.memory and device.used >= BUSY_SHARE * device.memory
    }
    named = list(dict.fromkeys(device.name for device in look.devices if device.name))
    part = f", {len(found.visible)} visible" if len(found.visible) < len(look.devices) else ""
    shown = f"{there} ({', '.join(named)}), driver {look.driver}{part}"
    if not busy:
        return ok(f"{shown}; nobody holds a tenth of a visible one's memory")
    help = [("see who it is", "nvidia-smi")]
    others = ",".join(str(index) for index in visible if index not in busy)
    # else the numbers are not CUDA's
    alike = len({device.name for device in look.devices}) <= 1 or found.visible.by_bus
    if others and alike and not found.visible.instance:
        help.append(("or leave it out", f"export CUDA_VISIBLE_DEVICES={others}"))
    holders = found.strangers(()) or (
        "the driver names no process: it may be in another container",
    )
    which = ", ".join(
        f"GPU {index}: {size(device.used)} of {size(device.memory)} in use"
        for index, device in busy.items()
    )
    return note("device-busy", which, *help, why=(shown, *holders))
