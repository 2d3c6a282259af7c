"""CUDA in jobs on a machine without a GPU: with a driver made from a few lines of C, and with
torch.cuda's answers replaced.

What needs a real one is in tests/gpu.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from .conftest import Run, RunWarm, Write

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

# Says that it is up after cuInit, as the real one does. It opens nothing and starts nothing: that
# it is up shows in no other way.
DRIVER = r"""
static int up = 0;
int cuInit(unsigned flags) { up = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return up ? 0 : 3; }
"""
EXTENSION = r"""
#include <Python.h>
int cuInit(unsigned);
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fast", 0, -1, 0};
PyMODINIT_FUNC PyInit_fast(void) { cuInit(0); return PyModule_Create(&module); }
"""
BY_CTYPES = """\
import ctypes

driver = ctypes.CDLL("libcuda.so.1")


def begin():
    driver.cuInit(0)


begin()
"""
BY_TORCH = (
    "import torch\n\nscale = 2\ntorch.cuda._initialized = True  # as a real call would leave it\n"
)


def compile_c(source: Path, target: Path, *flags: str) -> None:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", target, source, *flags], check=True)


@pytest.fixture
def driver(write: Write, tmp_path: Path) -> dict[str, str]:
    """The environment in which a libcuda is found."""
    compile_c(write("driver.c", DRIVER), tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    return {"LD_LIBRARY_PATH": str(tmp_path)}


def told_by(act: Run, program: Path, extra: dict[str, str]) -> str:
    """A job that waits for the notice, which waits for the line."""
    said: list[bytes] = []

    def wait(process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        assert process.stdin is not None
        while not said or b"rallypoint explain" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], b"".join(said)
        process.stdin.write(b"\n")

    result = act(
        "-n",
        "2",
        "--preload",
        "outer",
        program,
        cwd=program.parent,
        stdin="\n",
        act=wait,
        env=extra,
    )
    assert (result.rc, sorted(result.lines)) == (0, ["[0] done", "[1] done"]), result.everything
    return b"".join(said).decode()


PROGRAM = "import sys\nsys.stdin.readline()\nprint('done')\n"
NOTICE = "[cuda-in-template]: importing outer leaves a process that must not be forked: CUDA is initialised"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.compiler
def test_a_driver_opened_with_ctypes(run: Run, write: Write, driver: dict[str, str]) -> None:
    write("ops.py", BY_CTYPES)
    write("outer.py", "import json\nimport ops\n")
    text = told_by(run, write("train.py", PROGRAM), driver)
    assert NOTICE in text, text


@pytest.mark.usefixtures("without_torch")
@pytest.mark.compiler
def test_a_driver_that_is_loaded_only_does_no_harm(
    run: Run, write: Write, driver: dict[str, str]
) -> None:
    write("outer.py", "import ctypes\ndriver = ctypes.CDLL('libcuda.so.1')\n")
    result = run(
        "-n",
        "2",
        "--preload",
        "outer",
        write("train.py", "print('done')\n"),
        cwd=write("x", "").parent,
        env=driver,
    )
    assert (result.rc, sorted(result.lines), result.err) == (0, ["[0] done", "[1] done"], ""), (
        result.everything
    )


@pytest.mark.usefixtures("without_torch")
@pytest.mark.compiler
def test_a_compiled_extension(
    run: Run, write: Write, driver: dict[str, str], tmp_path: Path
) -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no Python.h")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    include = f"-I{sysconfig.get_path('include')}"
    compile_c(
        write("fast.c", EXTENSION),
        tmp_path / f"fast{suffix}",
        include,
        f"-L{tmp_path}",
        "-l:libcuda.so.1",
    )
    write("outer.py", "import json\n\nimport fast\n")
    text = told_by(run, write("train.py", PROGRAM), driver)
    assert NOTICE in text, text


def test_torch_itself(run: Run, write: Write) -> None:
    write("ops.py", BY_TORCH)
    write("outer.py", "import ops\n")
    text = told_by(run, write("train.py", PROGRAM), {})
    assert NOTICE in text, text


# --- one GPU for two ranks
# -------------------------------------------------------------------------------------------

SHARED = """\
from types import SimpleNamespace

import torch
import torch.distributed as dist

cuda = torch.cuda
cuda.is_initialized = cuda.is_available = lambda: True
cuda.device_count = lambda: 2
cuda.current_device = lambda: 0
cuda.memory_allocated = lambda device=None: 4096
cuda.get_device_properties = lambda index: SimpleNamespace(uuid="5f3c")
dist.init_process_group()
dist.barrier()
import time; time.sleep(600)
"""


def test_two_ranks_with_one_gpu_are_stopped_before_a_collective_fails(
    run_warm: RunWarm, write: Write
) -> None:
    result = run_warm(write("train.py", SHARED))
    assert result.rc == 1, result.everything
    assert result.codes == ["device-shared"]
    assert "both ranks joined a group of NCCL's with the same GPU" in result.report
    assert "- rank 0: cuda:0 (GPU-5f3c), which is LOCAL_RANK's\n" in result.report
    assert (
        "- rank 1: cuda:0 (GPU-5f3c), because the program had put something on it before it\n"
        in result.report
    )


# --- a fork after CUDA is up
# -----------------------------------------------------------------------------------------

REPLACED = """\
import os

import torch

pid = os.getpid()
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_init = lambda: None
torch.cuda._cudart = object()
torch.cuda._is_in_bad_fork = lambda: os.getpid() != pid
torch.cuda._queued_calls.clear()
torch.cuda._lazy_seed_tracker.get_calls = lambda: []
"""
LOADER = """\
import fake_cuda
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        USE
        return index


def train():
    torch.cuda.init()
    for row in DataLoader(Rows(), num_workers=1):
        pass


train()
print("trained")
"""
CHILD = """\
import os

import fake_cuda
import torch

torch.cuda.init()
pid = os.fork()
if pid == 0:
    torch.cuda.init()
os.waitpid(pid, 0)
print("parent")
"""


def test_a_loader_that_uses_cuda(run_warm: RunWarm, write: Write) -> None:
    write("fake_cuda.py", REPLACED)
    program = write("train.py", LOADER.replace("USE", "torch.cuda.init()"))
    result = run_warm(program, nproc=1)
    assert result.codes == ["cuda-before-fork"], result.everything
    assert (
        "why    the process was forked at train.py:17, after train.py:16 had used CUDA\n"
        in result.report
    )


def test_a_loader_that_leaves_cuda_alone(run_warm: RunWarm, write: Write) -> None:
    write("fake_cuda.py", REPLACED)
    result = run_warm(write("train.py", LOADER.replace("USE", "pass")), nproc=1)
    assert (result.rc, result.lines, result.err) == (0, ["trained"], ""), result.everything


def test_a_forked_process_says_both_lines_itself(run_warm: RunWarm, write: Write) -> None:
    write("fake_cuda.py", REPLACED)
    program = write("train.py", CHILD)
    result = run_warm(program, nproc=1)
    assert "RuntimeError: Cannot re-initialize CUDA in forked subprocess." in result.err, (
        result.everything
    )
    assert "\nthis process was forked at train.py:7, after train.py:6 had used CUDA\n" in result.err
