"""Variables that libraries read when they load: a value that the program itself sets comes too late
for libraries that the template has loaded.

The list was found by watching every `getenv` of `import torch, torch.distributed` (2.13, CPU), and
each entry by setting it before and after that import: before it takes effect, after it has none.
docs/concepts/template.md has the ones that were tried and do not belong here.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable, Mapping

_FAMILIES = ("OMP_", "GOMP_")  # libgomp reads all of its variables as it is loaded
# Families of which libraries read some variables as they load.
_LOADED = (
    "CUDA_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
)
_NAMES = frozenset(
    {
        "GOTO_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTORCH_JIT",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_TRACE",
    }
)

# What parts of torch that are imported late read as they load: of `import torch._dynamo,
# torch._inductor.compile_fx` (2.13) every look at os.environ. A test asks for it again.
_OF_PARTS = (
    "AOTINDUCTOR_", "AOT_", "CUTEDSL_", "CUTLASS_", "ENABLE_", "FAKE_ALLOW_META", "INDUCTOR_", "LOG_AUTOTUNE_RESULTS", "LOG_TLPARSE",
    "LOGLEVEL", "MPMATH_", "NETWORKX_", "PARTITIONER_", "PT2_", "PYTORCH_REORDER_", "PYTORCH_SINK_", "SAGE_ROOT", "SYMPY_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_CACHING_", "TORCH_COMPILE", "TORCH_DYNAMO_", "TORCH_FAKE_", "TORCH_STRICT_", "TRITON_",
    "UNSAFE_SKIP_FSDP_", "CXX", "DUMP_AOTI_",
)  # fmt: skip
# Read whenever they are needed; torch sets them itself, too.
_READ_AGAIN = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})

parts_are_loaded = False
"""Presence of late parts of torch: true in forks of a template that had imported some."""

_read: dict[str, str] | None = None
"""Environment that the libraries have read; None when none was loaded before the program."""

_folder = ""


def read_when_loaded(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of an environment that libraries read as they load: a template that has
    read other values fits no other environment."""
    return tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name in _NAMES or name.startswith((*_LOADED, *_OF_PARTS))
        )
    )


def remember(folder: str) -> None:
    """Remember the environment that the libraries have read, as the program begins in a fork.
    `folder`: the program's."""
    global _read, _folder, parts_are_loaded
    _read, _folder = dict(os.environ), os.path.join(folder, "")
    parts_are_loaded |= "torch._dynamo" in sys.modules  # --preload may have brought it


def is_of_parts(name: str) -> bool:
    """Tell whether a part of torch that is imported late reads this variable as it loads."""
    return name.startswith(_OF_PARTS) and name not in _READ_AGAIN


def set_for_parts() -> dict[str, str]:
    """Return the variables for parts of torch that the program has given another value by now:
    variable -> where it is set, or ""."""
    return _changed(is_of_parts)


def set_late() -> dict[str, str]:
    """Return the variables that the program has given another value than the libraries have read:
    variable -> where it is set (`train.py:3`), or ""."""
    late = _changed(lambda name: name in _NAMES or name.startswith(_FAMILIES))
    return late | set_for_parts() if parts_are_loaded else late


def _changed(matters: Callable[[str], bool]) -> dict[str, str]:
    if _read is None:
        return {}
    names = sorted(filter(matters, _read.keys() | os.environ.keys()))
    return {name: _place(name) for name in names if _read.get(name) != os.environ.get(name)}


def _place(name: str) -> str:
    """Return the first line in the program's own files that sets the variable, as far as the words
    of a line can tell."""
    from rallypoint.launcher import exception_capture

    quoted = rf"""["']{name}["']"""
    sets = re.compile(
        rf"{quoted}\s*\]\s*=[^=]|{quoted}\s*:|(?:putenv|unsetenv|setdefault|pop)\(\s*{quoted}|\bdel\b.*{quoted}|update\(.*\b{name}\s*="
    )
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(_folder) and path.endswith(".py") and "-packages" + os.sep not in path:
            for number, text in enumerate(linecache.getlines(path), 1):
                if sets.search(text):
                    return f"{exception_capture.shown_path(path)}:{number}"
    return ""
