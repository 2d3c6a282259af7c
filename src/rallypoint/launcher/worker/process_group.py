"""The process group that `launch(backend=...)` opens around the function, and closes after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rallypoint.launcher.worker.worker_hooks import Hooks, Variable


def called(
    work: Callable[[], Any], backend: str, timeout: float | None, line: str, hooks: Hooks
) -> Any:
    """Call a function in the default group, which is opened with this rank's device if the backend
    needs one, and closed, also when the function raises. It may have closed it itself. `line`:
    where `launch` was called.

    No context manager: contextlib fails with an exception that refuses attributes."""
    import torch
    import torch.distributed as dist

    chosen = _backend(backend)
    options: dict[str, Any] = {"backend": chosen}
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    if "nccl" in chosen:  # there is one for each rank, or nothing would have started (plan.py)
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        options["device_id"] = device  # the group is ours to open, and its device stays the rank's
    # A rank whose function needs no collective must not close its end of the mesh while others
    # still connect to it.
    with Variable("TORCH_DIST_INIT_BARRIER", os.environ.get("TORCH_DIST_INIT_BARRIER", "1")):
        dist.init_process_group(**options)
    hooks.opened_at = line or "launch"
    try:
        return work()
    finally:
        hooks.opened_at = ""
        if dist.is_initialized():
            dist.destroy_process_group()


def _backend(asked: str) -> str:
    """Return the backend; for `auto` NCCL where every rank of this machine has a GPU of its own, gloo
    elsewhere."""
    if asked != "auto":
        return asked
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_WORLD_SIZE"])
    # The count first: it asks NVML where it can, and a rank that ends up with gloo has not touched
    # CUDA.
    enough = dist.is_nccl_available() and torch.cuda.device_count() >= local
    return "nccl" if enough and torch.cuda.is_available() else "gloo"
