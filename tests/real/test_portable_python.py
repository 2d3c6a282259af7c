"""On a Python like conda's and uv's, which were built against a C library of 2012: it lacks what
newer kernels can do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..python_path import TORCH_IN_PARTS, python_path

pytestmark = pytest.mark.torch

PARTS = TORCH_IN_PARTS / "sitecustomize.py"

LACKS = """
import fcntl, os, signal, subprocess

for module, names in (
    (os, ["pidfd_open", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "P_PIDFD"]),
    (signal, ["pidfd_send_signal"]),
    (fcntl, ["F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE"]),
):
    for name in names:
        delattr(module, name)
spawn = os.posix_spawn

def posix_spawn(*arguments, setsid=False, **more):
    if setsid:
        raise NotImplementedError("The 'setsid' option is not supported by the system")
    return spawn(*arguments, **more)

os.posix_spawn = posix_spawn
"""


def run(folder: Path, *arguments: str, program: str) -> subprocess.CompletedProcess[str]:
    whole = os.environ.get("RALLYPOINT_WHOLE_TORCH")
    parts = "" if whole else f"import runpy; runpy.run_path({str(PARTS)!r})\n"
    (folder / "sitecustomize.py").write_text(parts + LACKS)
    (folder / "program.py").write_text(textwrap.dedent(program))
    environ = {
        **os.environ,
        "PYTHONPATH": python_path(folder),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_job(tmp_path: Path) -> None:
    done = run(
        tmp_path, "-m", "rallypoint", "run", "-n", "2", "program.py",
        program="""
            import os
            import torch
            import torch.distributed as dist
            import rallypoint

            assert not hasattr(os, "pidfd_open") and os.getsid(os.getppid()) == os.getppid() != os.getsid(0)
            dist.init_process_group("gloo")
            store = rallypoint.connect()
            store[f"of rank {dist.get_rank()}"] = torch.ones(1_000_000)
            assert store.average("w", torch.full((1_000_000,), float(dist.get_rank())), size=2)[0] == 0.5
            if dist.get_rank() == 1:
                raise ValueError("the end")
            dist.barrier()
        """,
    )  # fmt: skip
    assert "error[rank-raised]: rank 1 raised ValueError: the end" in done.stderr, done.stderr
    assert done.returncode == 1


def test_a_launch(tmp_path: Path) -> None:
    done = run(
        tmp_path, "program.py",
        program="""
            import torch
            import rallypoint

            shared = rallypoint.SharedTensor((4,))

            def add(rank):
                shared.add_(torch.full((4,), float(rank)))
                return torch.ones(1_000_000)

            assert [float(one.sum()) for one in rallypoint.launch(add, nproc=2, pass_rank=True)] == [1e6, 1e6]
            print(shared.tensor.tolist())
        """,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("[1.0, 1.0, 1.0, 1.0]\n", 0), done.stderr
