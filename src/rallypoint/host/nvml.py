"""The look at GPUs through NVML, in a process of its own: a driver that hangs holds its caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from rallypoint.host.devices import Device, Look, Process


def main() -> None:
    """Ask NVML in the child, write the answer as JSON to stdout."""
    sys.stdout.buffer.write(msgspec.json.encode(_through_library()))


def _through_library() -> Look:
    try:
        import pynvml
    except ImportError:
        return Look(problem="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Look(problem=f"NVML: {str(error).rstrip('.')}")
    return read(pynvml)


def read(nvml: Any) -> Look:
    """Ask an NVML that is initialised (module pynvml, or what answers like it). An answer that is
    refused is left out."""
    number = _answer(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion)
    devices = [_device(nvml, index) for index in range(_answer(nvml, 0, nvml.nvmlDeviceGetCount))]
    return Look(
        devices=tuple(devices),
        driver=_words(_answer(nvml, "", nvml.nvmlSystemGetDriverVersion)),
        cuda=f"{number // 1000}.{number % 1000 // 10}" if number else "",
        source="nvml",
    )


def _device(nvml: Any, index: int) -> Device:
    handle = _answer(nvml, None, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:  # fallen off the bus, or not this user's
        return Device()
    memory = _answer(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Device(
        uuid=_words(_answer(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_words(_answer(nvml, "", nvml.nvmlDeviceGetName, handle)),
        memory=memory.total if memory is not None else 0,
        used=memory.used if memory is not None else 0,
        instances=tuple(_parts(nvml, handle)),
        processes=tuple(
            _process(one)
            for one in _answer(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        ),
    )


def _parts(nvml: Any, handle: Any) -> Iterable[str]:
    now, _ = _answer(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
    for place in range(_answer(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) if now else 0):
        part = _answer(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if part is not None:
            yield _words(_answer(nvml, "", nvml.nvmlDeviceGetUUID, part))


def _process(told: Any) -> Process:
    from rallypoint.host.process_status import command_line

    try:
        session = os.getsid(told.pid)
    except OSError:
        session = 0
    return Process(told.pid, told.usedGpuMemory or 0, command_line(told.pid), session)


def _answer(nvml: Any, instead: Any, ask: Any, *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except nvml.NVMLError:  # not supported by this GPU or driver, not allowed, no such instance
        return instead


def _words(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text
