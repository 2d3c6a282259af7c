"""The stand-in's devices: none."""

from __future__ import annotations


def set_device(device: object) -> None:
    raise NotImplementedError("this is a stand-in for torch: the test's program needs torch itself")


def is_initialized() -> bool:
    return False
