"""Which parts of torch may be imported before the program begins."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rallypoint.launcher import late_variables, preload_parts


@pytest.mark.parametrize(
    ("name", "brought", "early"),
    [
        (
            "torch._dynamo",
            {
                "torch._dynamo",
                "sympy.core",
                "numpy.random",
                "json.decoder",
                "_remote_module_non_scriptable",
            },
            True,
        ),
        ("torch.distributed.fsdp", {"torch.distributed.fsdp"}, True),
        ("torch.some_part", {"torch.some_part", "absl.logging"}, False),
        (
            "torch.utils.tensorboard",
            {"torch.utils.tensorboard"},
            False,
        ),  # tensorboard itself was there before
        ("torch.onnx._internal", {"torch.onnx._internal"}, False),
        ("torch.onnxlike", {"torch.onnxlike"}, True),
    ],
)
def test_only_what_brings_nobody_elses_package(name: str, brought: set[str], early: bool) -> None:
    assert preload_parts.may_be_early(name, brought) is early


READS = """
import gc, os, sys
gc.disable()  # a sixth of what these imports take
import torch, torch.distributed
names, original = set(), type(os.environ).__getitem__
def read(self, name):
    frame = sys._getframe(1)
    if frame.f_code.co_name in ("get", "__contains__", "pop", "setdefault"):
        frame = frame.f_back
    if "_collections_abc" not in frame.f_code.co_filename:  # a walk through all of them
        names.add(name)
    return original(self, name)
type(os.environ).__getitem__ = read
import torch._dynamo, torch._inductor.compile_fx
print(*names)
"""

# What tells where a home or a temporary folder is, or that this is CI: a program that changes these
# for torch._dynamo alone is not known.
HARMLESS = {
    "CI", "HOME", "LNAME", "LOGNAME", "PYTHONUSERBASE", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME", "_NETWORKX_BUILDING_DOCS_",
    "_PYTHON_PROJECT_BASE", "_PYTHON_SYSCONFIGDATA_NAME", "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip


def test_every_variable_that_the_parts_read_is_known() -> None:
    """A script that sets TORCHDYNAMO_DISABLE was not heard when torch._dynamo had been imported for
    it.
    """
    done = subprocess.run(
        [sys.executable, "-c", READS], capture_output=True, text=True, timeout=300, check=True
    )
    names = set(done.stdout.split())
    assert "TORCH_COMPILE_DISABLE" in names
    assert {name for name in names if not late_variables.is_of_parts(name)} <= HARMLESS
