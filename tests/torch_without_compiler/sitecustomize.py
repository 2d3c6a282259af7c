"""Torch in parts (`../torch_in_parts`), in processes that compile nothing: torch._dynamo is a
stand-in.

Optimizers and DistributedDataParallel import it to mark functions that are not to be compiled, and
it takes more time than the rest of torch.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location

FOLDER = os.path.dirname(__file__)
runpy.run_path(os.path.join(FOLDER, "..", "torch_in_parts", "sitecustomize.py"))


class _StandInFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch._dynamo":
            return None
        return spec_from_file_location(name, os.path.join(FOLDER, "dynamo.py"))


sys.meta_path.insert(0, _StandInFinder)
