"""The installed torch, in this module's place, without its meta kernels in Python.

They serve compilers and tensors without data, and are a quarter of what the import of torch takes.
Process groups, stores and plain tensors are torch's own. What imports torch._dynamo fails:
DistributedDataParallel, optimizers, workers of a DataLoader.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).parents[1]
KERNELS = "torch._meta_registrations"  # `torch/__init__.py` imports it at its end, for its effects


def become_torch() -> None:
    spec = PathFinder.find_spec("torch", [one for one in sys.path if Path(one).absolute() != HERE])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    sys.modules["torch"] = torch = importlib.util.module_from_spec(spec)
    sys.modules[KERNELS] = types.ModuleType(KERNELS)
    spec.loader.exec_module(torch)


become_torch()
