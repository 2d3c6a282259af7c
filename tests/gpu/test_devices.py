"""What only a GPU can prove. One is enough for all of it; what needs two says so when it is
skipped.

docs/reference/devices.md says on which machines these have run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.errors import UsageError, WorkerError
from rallypoint.host import devices

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 240.0  # seconds for a program: the first use of CUDA on a machine may take tens of them


def gpus() -> int:
    """How many are visible, by NVML: this process never touches CUDA unless a test says so."""
    return len(devices.find(os.environ, devices.look_closely(30.0)).visible)


def start(folder: Path, *arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    if text:
        (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
    )  # fmt: skip


# --- what is here
# --------------------------------------------------------------------------------------------------


def test_files_and_nvml_agree_with_torch() -> None:
    files, nvml = devices.look(), devices.look_closely(30.0)
    assert nvml.source == "nvml", nvml.problem
    assert len(files.devices) == len(nvml.devices)
    assert files.driver in ("", nvml.driver)
    assert [one.uuid for one in files.devices] == [one.uuid for one in nvml.devices] or not any(
        one.uuid for one in files.devices
    )
    ask = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid, torch.version.cuda)"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    count, uuid, cuda = done.stdout.split()
    assert int(count) == gpus()
    first = devices.resolve(nvml, os.environ).indices[0]
    assert f"GPU-{uuid}" == nvml.devices[first].uuid
    build = devices.torch_build()
    assert build is not None
    assert build.cuda == cuda


def test_looking_makes_no_context() -> None:
    ask = (
        "import os\nfrom rallypoint.host import devices\n"
        "found = devices.look_closely(30.0)\nassert found.devices, found\n"
        "assert not devices.driver_is_loaded() and not devices.cuda_is_up()\n"
        "assert not [one for one in os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{one}')"
        " and 'nvidia' in os.readlink(f'/proc/self/fd/{one}')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("touch", ["torch.cuda.is_available()", "torch.zeros(1, device='cuda')"])
def test_the_check_for_cuda_in_the_template(touch: str) -> None:
    """is_available() may be enough: it initialises the driver."""
    ask = f"import torch\nfrom rallypoint.launcher.template import template\nprint(repr(template.unclean()))\n{touch}\nprint(repr(template.unclean()))"  # noqa: E501
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout.splitlines() == ["''", "'CUDA is initialised'"]


# --- forks
# --------------------------------------------------------------------------------------------------


def test_ranks_of_the_template_use_cuda() -> None:
    def work() -> tuple[int, float]:
        import torch

        return os.getppid(), torch.arange(1000.0, device="cuda").sum().item()

    results = rallypoint.launch(work, nproc=2)
    assert [total for _, total in results] == [499500.0] * 2
    assert len({parent for parent, _ in results}) == 1  # one template, forked


def test_a_caller_that_has_used_cuda(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "questions" / "C1_cuda_in_the_caller.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "2 ranks used cuda while their caller had it in use\n",
    ), done.stderr


def test_a_preload_module_that_touches_cuda(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("import torch\n\nhere = torch.cuda.is_available()\n")
    text = "import time, torch\ntime.sleep(20)\nprint(torch.ones(2, device='cuda').sum().item())\n"
    done = start(tmp_path, "-n", "2", "--preload", "ops", "train.py", text=text)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2.0", "[1] 2.0"]), (
        done.stderr
    )
    assert (
        "[cuda-in-template]: importing ops leaves a process that must not be forked: CUDA is initialised"
        in done.stderr
    )
    assert "where  ops.py:3" in done.stderr


def test_a_loader_forked_after_cuda(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader, Dataset\n\n\n"
        "class Rows(Dataset):\n    def __len__(self):\n        return 4\n\n"
        "    def __getitem__(self, index):\n        return torch.ones(1, device='cuda')\n\n\nheld = torch.ones(1, device='cuda')\n"
        "for row in DataLoader(Rows(), num_workers=1):\n    pass\n"
    )
    done = start(tmp_path, "-n", "1", "train.py", text=text)
    assert done.returncode == 1
    assert "error[cuda-before-fork]" in done.stderr
    assert (
        "why    the process was forked at train.py:14, after train.py:13 had used CUDA\n"
        in done.stderr
    ), done.stderr


# --- process groups
# --------------------------------------------------------------------------------------------------


def adding_up(device: str) -> Callable[[], tuple[str, float]]:
    """A function that is copied into the ranks, which cannot import this file."""

    def add_up() -> tuple[str, float]:
        import torch
        import torch.distributed as dist

        value = torch.full((1000,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(value)
        torch.cuda.synchronize()
        return str(value.device), value.sum().item()

    return add_up


def test_two_ranks_on_one_gpu_with_gloo() -> None:
    assert (
        rallypoint.launch(adding_up("cuda:0"), nproc=2, backend="gloo") == [("cuda:0", 3000.0)] * 2
    )


def test_nccl_with_one_rank() -> None:
    assert rallypoint.launch(adding_up("cuda"), nproc=1, backend="nccl") == [("cuda:0", 1000.0)]


def test_nccl_with_a_gpu_for_each_rank() -> None:
    if gpus() < 2:
        pytest.skip("needs two GPUs")
    assert rallypoint.launch(adding_up("cuda"), nproc=2, backend="nccl") == [
        (f"cuda:{rank}", 3000.0) for rank in range(2)
    ]


def test_more_ranks_than_gpus_are_refused_before_anything_starts() -> None:
    with pytest.raises(
        UsageError, match=r"needs a GPU for each rank: \d+ ranks, and \d+ GPUs? visible"
    ) as refusal:
        rallypoint.launch(adding_up("cuda"), nproc=gpus() + 1, backend="nccl")
    assert refusal.value.code == "device-missing"


SHARED = """\
import os

import torch
import torch.distributed as dist

{choice}
dist.init_process_group("nccl")
value = torch.ones(1, device="cuda")
dist.all_reduce(value)
torch.cuda.synchronize()
print("added up")
"""


def test_two_ranks_on_one_gpu_with_nccl(tmp_path: Path) -> None:
    """Named from the comparison of devices, whether or not NCCL has refused by then."""
    done = start(
        tmp_path, "-n", "2", "train.py", text=SHARED.format(choice="torch.cuda.set_device(0)")
    )
    assert done.returncode == 1
    assert (
        "error[device-shared]: both ranks joined a group of NCCL's with the same GPU" in done.stderr
    ), done.stderr
    assert "which the program chose" in done.stderr


def test_a_rank_that_has_not_chosen_gets_its_own(tmp_path: Path) -> None:
    count = gpus()
    done = start(tmp_path, "-n", str(max(2, count)), "train.py", text=SHARED.format(choice=""))
    if count > 1:
        assert (done.returncode, len(done.stdout.splitlines())) == (0, count), done.stderr
    else:
        assert "error[device-shared]" in done.stderr, done.stderr
        assert "because there is none for its LOCAL_RANK" in done.stderr
        assert "rallypoint run -n 1 train.py" in done.stderr


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    done = start(tmp_path, "-n", "1", "train.py", text="import torch\ntorch.cuda.set_device(99)\n")
    assert "error[device-missing]: rank 0 asked for a device that is not there" in done.stderr, (
        done.stderr
    )
    assert "the NVIDIA driver is " in done.stderr
    assert "was built for CUDA" in done.stderr


def test_memory_that_runs_out() -> None:
    def hold() -> Any:
        import torch

        return torch.empty(1 << 50, dtype=torch.uint8, device="cuda").shape

    with pytest.raises(WorkerError) as failure:
        rallypoint.launch(hold, nproc=1)
    report: Any = failure.value.report
    assert report.code == "rank-out-of-memory"


def test_digits_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    done = start(tmp_path, "-n", "gpu", EXAMPLES / "digits_ddp.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert "on cuda:0" in done.stdout
