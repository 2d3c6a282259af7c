"""CUDA in a rank: the GPU that it joins with, the line that first used CUDA, and forks that came
after that.

Nothing here initialises CUDA in a program that would not do so itself: the rank's device is looked
at when the program joins a group whose backend needs one, and the first use is seen in torch's own
`_lazy_init`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, NamedTuple

from rallypoint.launcher import exception_capture
from rallypoint.launcher.worker.function_hooks import wrap

How = Literal["", "chosen", "given", "used", "short"]
"""Reason why a rank has its GPU: the program chose it; it is LOCAL_RANK's; the program had put
something on it; LOCAL_RANK has none.
"""


class RankDevice(NamedTuple):
    """The GPU that a rank joins with. Empty when its group needs none."""

    uuid: str = ""  # "GPU-...", or another text that is equal only for the same one on this node
    name: str = ""  # as torch calls it: "cuda:1"
    how: How = ""


_STANDARD = os.path.dirname(os.__file__) + os.sep  # the standard library

_chosen = False  # the program has called torch.cuda.set_device
_first_use = ""  # "train.py:12"
_fork_line = ""  # in a forked child: where it was forked, if CUDA was up
_refusal = ""  # in a forked child: note of an error when it tries to use CUDA


def chosen() -> None:
    """Note that the program has chosen this rank's device."""
    global _chosen
    _chosen = True


def take_device(backend: str) -> RankDevice:
    """Give this rank its own GPU before it joins a group with this backend ("": torch's default),
    and return which it has.

    A program that chose is left alone, and one that has put something on a GPU already, too: what
    "cuda" means must not change under it. Else LOCAL_RANK's GPU becomes the current one, if there
    are so many. No `device_id` is passed to init_process_group: bound to a device, a group of
    NCCL's refuses tensors on another one, which a program is free to choose later.
    """
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is None or not _needs_gpu(backend, up=cuda.is_initialized()) or not cuda.is_available():
        return RankDevice()
    local = os.environ.get("LOCAL_RANK", "")
    rank = int(local) if local.isdecimal() else 0
    index = cuda.current_device()
    how: How = "given"
    if _chosen or index != 0:
        how = "chosen"
    elif rank >= cuda.device_count():
        how = "short"
    elif rank and cuda.memory_allocated(0):
        how = "used"
    elif rank:
        # Not the wrapped one: the program has not chosen.
        getattr(cuda.set_device, "__wrapped__", cuda.set_device)(rank)
        index = rank
    return RankDevice(_uuid(cuda, index), f"cuda:{index}", how)


def _needs_gpu(backend: str, *, up: bool) -> bool:
    """Tell whether collectives will run on GPUs. torch's default backend serves CPU and GPU; a
    program that has not touched CUDA by then uses the CPU."""
    return up if not backend else backend == "nccl" or "cuda:" in backend


def _uuid(cuda: Any, index: int) -> str:
    """Return a text that tells one GPU from another on this node."""
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)  # not in every torch
    if uuid is not None:
        return f"GPU-{uuid}"
    listed = [
        entry.strip()
        for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if entry.strip()
    ]
    return listed[index] if index < len(listed) else str(index)


# --- the first use, and forks after it ---


def watch_first_use(failed: Callable[[Exception], None]) -> None:
    """Remember the line that initialises CUDA in this process. torch's refusal to do so in a forked
    child of the program's says where the fork was.

    `failed` is told of an error, except those of `set_device`, which has a hook.
    """
    import torch.cuda

    module: Any = torch.cuda

    def lazy_init(original: Callable[[], None]) -> None:
        global _first_use
        try:
            original()
        except Exception as error:
            if _refusal:
                error.add_note(_refusal)
            if sys._getframe(2).f_code.co_name != "set_device":
                failed(error)
            raise
        if not _first_use and module.is_initialized():
            _first_use = exception_capture.line_of(exception_capture.user_frame(sys._getframe(1)))

    wrap(module, "_lazy_init", lazy_init, "torch.cuda")  # torch's own name, not public


def about_to_fork() -> tuple[str, str]:
    """Note a fork of the program's; return (its line, the line that first used CUDA) when CUDA is up,
    ("", "") when the child may use it."""
    global _fork_line
    # The attribute is not there while another thread imports torch.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return "", ""
    _fork_line = exception_capture.line_of(_forker())
    return _fork_line, _first_use


def _forker() -> FrameType | None:
    """Return the program's frame that forks, and not the library's between (multiprocessing,
    subprocess)."""
    frame = nearest = exception_capture.user_frame(sys._getframe(1))
    while (
        frame is not None
        and frame.f_code.co_filename.startswith(_STANDARD)
        and "-packages" not in frame.f_code.co_filename
    ):
        frame = exception_capture.user_frame(frame.f_back)
    return frame or nearest


def in_forked_child() -> None:
    """Prepare the note of torch's refusal to use CUDA in a child of the program's: where the fork
    was, and what had used CUDA before it."""
    global _refusal
    if _fork_line:
        first = f"{_first_use} had used CUDA" if _first_use else "CUDA had been used"
        _refusal = f"this process was forked at {_fork_line}, after {first}\nmore: rallypoint explain cuda-before-fork"
