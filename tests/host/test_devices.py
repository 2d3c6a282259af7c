"""What is concluded from the answers of NVML, of files and of torch's version.py.

Nothing here needs a GPU, and nothing here was recorded on one: the answers in devices/*.json are
constructed after NVML's reference. The way from the driver's library to a `Look` is gone once with
a library made from a few lines of C.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.host import devices, nvml
from rallypoint.host.devices import Build, Device, Found, Look, missing, resolve
from rallypoint.host.visible_devices import Visible

ANSWERS = Path(__file__).parent / "devices"
GIB = 1 << 30


class ReplayedError(Exception):
    """NVML's refusals."""


class Replayed:
    """Answers as module pynvml would, from a file."""

    NVMLError = ReplayedError

    def __init__(self, name: str) -> None:
        self._told: dict[str, Any] = json.loads(
            (ANSWERS / f"{name}.json").read_text(encoding="utf-8")
        )

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self._told["nvmlSystemGetDriverVersion"])

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return int(self._told["nvmlSystemGetCudaDriverVersion"])

    def nvmlDeviceGetCount(self) -> int:
        return len(self._told["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._unless_refused(self._told["devices"][index])

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(handle if isinstance(handle, str) else handle["nvmlDeviceGetUUID"])

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle["nvmlDeviceGetName"])

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        return SimpleNamespace(**handle["nvmlDeviceGetMemoryInfo"])

    def nvmlDeviceGetMigMode(self, handle: Any) -> Any:
        return self._unless_refused(handle["nvmlDeviceGetMigMode"])

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, place: int) -> str:
        if place >= len(handle["instances"]) or handle["instances"][place] is None:
            raise ReplayedError("Not Found")
        return str(handle["instances"][place])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(**one) for one in handle["nvmlDeviceGetComputeRunningProcesses"]]

    @staticmethod
    def _unless_refused(answer: Any) -> Any:
        if isinstance(answer, str):
            raise ReplayedError(answer)
        return answer


def replayed(name: str) -> Look:
    return nvml.read(Replayed(name))


def found(look: Look, listed: str | None = None, build: Build | None = None, **more: str) -> Found:
    environ = more if listed is None else {**more, "CUDA_VISIBLE_DEVICES": listed}
    return Found(look, resolve(look, environ), build)


# --- NVML's answers
# --------------------------------------------------------------------------------------------------


def test_four_gpus() -> None:
    look = replayed("four-h100")
    assert (look.driver, look.cuda, look.source, look.problem) == ("550.54.14", "12.4", "nvml", "")
    assert [device.uuid[:12] for device in look.devices] == [
        "GPU-000000a0",
        "GPU-000000a1",
        "GPU-000000b2",
        "GPU-000000b3",
    ]
    assert {device.name for device in look.devices} == {"NVIDIA H100 80GB HBM3"}
    assert [round(device.used / GIB, 1) for device in look.devices] == [0.0, 0.0, 70.5, 0.0]
    assert not any(device.instances for device in look.devices)


def test_a_gpu_that_others_use() -> None:
    here = found(replayed("four-h100"))
    (other,) = here.strangers([1, 2])  # and not the desktop's 20 MiB
    # This machine may have a process of that number: then its name is told.
    assert re.fullmatch(r"GPU 2: pid 4711( \(.+\))? holds 70\.1 GiB of its 79\.6 GiB", other)
    assert here.strangers([4711]) == ()  # a rank of ours
    assert found(replayed("four-h100"), "0,1").strangers([]) == ()  # of no concern


def test_what_a_rank_has_started_is_no_stranger() -> None:
    process = devices.Process(99, 10 * GIB, "python loader.py", session=7)
    here = found(Look((Device("GPU-1", "H100", 80 * GIB, 10 * GIB, processes=(process,)),)))
    assert here.strangers([7]) == ()
    assert here.strangers([8]) == (
        "GPU 0: pid 99 (python loader.py) holds 10.0 GiB of its 80.0 GiB",
    )


def test_a_gpu_in_parts() -> None:
    look = replayed("mig-a100")
    assert [device.instances for device in look.devices] == [
        (),
        ("MIG-11111111-aaaa", "MIG-22222222-bbbb", "MIG-22333333-cccc"),
    ]
    for listed in (
        None,
        "1",
        "0,1",
        "MIG-11111111-aaaa,MIG-22222222-bbbb",
    ):  # CUDA shows a process one part, whatever is listed
        assert len(resolve(look, {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed})) == 1
    assert resolve(look, {"CUDA_VISIBLE_DEVICES": "0"}) == Visible("0", (0,))
    assert resolve(look, {"CUDA_VISIBLE_DEVICES": "MIG-223"}) == Visible(
        "MIG-223", (1,), instance=True
    )
    assert resolve(look, {"CUDA_VISIBLE_DEVICES": "MIG-22"}).stopped == "MIG-22 fits 2 GPUs"
    assert found(look).facts()[-2:] == (
        "CUDA_VISIBLE_DEVICES is not set",
        "CUDA shows a process one instance (MIG) only",
    )


def test_refused_answers_are_left_out() -> None:
    look = replayed("lost-gpu")
    assert look.devices[1] == Device()
    assert look.devices[0].processes[0].memory == 0
    assert found(look).facts()[:2] == (
        "the NVIDIA driver is 470.82.01, which knows CUDA up to 11.4",
        "2 GPUs: Tesla T4, a GPU whose name is not known",
    )


def test_two_numberings_are_said() -> None:
    look = replayed("two-kinds")
    note = "CUDA numbers the fastest GPU first, nvidia-smi by the bus: with CUDA_DEVICE_ORDER=PCI_BUS_ID they agree"
    assert found(look, "1").facts() == (
        "the NVIDIA driver is 580.65.06, which knows CUDA up to 13.0",
        "2 GPUs: NVIDIA GeForce RTX 3060, NVIDIA GeForce RTX 4090",
        "CUDA_VISIBLE_DEVICES='1' leaves GPU 1",
        note,
    )
    assert note not in found(look, "1", CUDA_DEVICE_ORDER="PCI_BUS_ID").facts()


# --- CUDA_VISIBLE_DEVICES
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "indices", "stopped"),
    [
        ("0", (0,), ""),
        ("3,1", (3, 1), ""),
        (" 0 , 2 ", (0, 2), ""),
        ("", (), "it is empty"),
        ("-1", (), "there is no GPU -1"),
        ("0,-1,1", (0,), "there is no GPU -1"),
        ("0,9,1", (0,), "there is no GPU 9"),
        ("NoDevFiles", (), "'NoDevFiles' names no GPU"),
        ("0,,1", (0,), "'' names no GPU"),
        ("1,2,1", (), "1 stands in it twice, and CUDA then shows none"),
        ("1gpu2,2ampere", (1, 2), ""),  # as strtoul reads
        ("GPU-000000b3-1111-2222-3333-0000000000b3", (3,), ""),
        ("GPU-000000b3,GPU-000000a1", (3, 1), ""),
        ("GPU-000000a,GPU-000000a1", (), "GPU-000000a fits 2 GPUs"),
        ("GPU-000000b3,GPU-dead,GPU-000000a1", (3,), "GPU-dead is none of the GPUs here"),
        ("GPU-000000b3,0", (3,), "'0' does not begin with GPU- as the first entry does"),
        ("0,GPU-000000b3", (0,), "'GPU-000000b3' names no GPU"),
        ("MIG-1", (), "no GPU here is cut into instances (MIG)"),
    ],
)
def test_the_list_is_read_as_cuda_reads_it(
    listed: str, indices: tuple[int, ...], stopped: str
) -> None:
    visible = resolve(replayed("four-h100"), {"CUDA_VISIBLE_DEVICES": listed})
    assert (visible.indices, visible.stopped) == (indices, stopped)
    assert resolve(Look(), {"CUDA_VISIBLE_DEVICES": listed}).indices == ()


def test_without_a_list_all_are_visible() -> None:
    assert resolve(replayed("four-h100"), {}) == Visible(None, (0, 1, 2, 3))
    assert resolve(Look(), {}) == Visible(None, ())


def test_a_name_that_cannot_be_looked_up_counts() -> None:
    """Files may show a GPU without its UUID: whether a given one is among them cannot be known."""
    visible = resolve(Look((Device(), Device())), {"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"})
    assert (visible.indices, visible.stopped) == ((-1, -1), "")


def test_the_variable_as_given_and_as_resolved() -> None:
    assert found(replayed("four-h100"), "2,7,1").facts()[-1] == (
        "CUDA_VISIBLE_DEVICES='2,7,1' leaves GPU 2: there is no GPU 7, and what follows is not read"
    )


# --- what speaks against using them
# ----------------------------------------------------------------------------------

CUDA_11, CUDA_12, CUDA_13 = (
    Build("2.7.0+cu118", "11.8"),
    Build("2.13.0+cu126", "12.6"),
    Build("2.13.0+cu130", "13.0"),
)


@pytest.mark.parametrize(
    ("name", "listed", "build", "reason"),
    [
        (
            "four-h100",
            None,
            CUDA_12,
            "",
        ),  # 12.6 on a driver that knows 12.4: within a major version it runs
        ("four-h100", None, CUDA_11, ""),
        ("four-h100", None, None, ""),
        ("four-h100", None, Build("2.13.0+cpu"), "torch 2.13.0+cpu was built without CUDA"),
        (
            "four-h100",
            None,
            CUDA_13,
            "the driver 550.54.14 knows CUDA up to 12.4, and torch 2.13.0+cu130 was built for CUDA 13.0",
        ),
        (
            "lost-gpu",
            None,
            CUDA_12,
            "the driver 470.82.01 knows CUDA up to 11.4, and torch 2.13.0+cu126 was built for CUDA 12.6",
        ),
        (
            "four-h100",
            "",
            CUDA_12,
            "CUDA_VISIBLE_DEVICES='' leaves none of the 4 GPUs: it is empty",
        ),
        (
            "four-h100",
            "8",
            CUDA_12,
            "CUDA_VISIBLE_DEVICES='8' leaves none of the 4 GPUs: there is no GPU 8",
        ),
    ],
)
def test_why_cuda_cannot_be_used(
    name: str, listed: str | None, build: Build | None, reason: str
) -> None:
    assert missing(found(replayed(name), listed, build)) == reason


def test_a_machine_without_gpus() -> None:
    assert missing(found(Look())) == "no NVIDIA driver is loaded, and no GPU is here"
    assert missing(found(Look(driver="550.54.14", cuda="12"))) == "no NVIDIA GPU is here"
    assert (
        missing(found(Look(), None, Build("2.13.0+rocm6.4", other="ROCm 6.4"))) == ""
    )  # not ours to judge
    assert missing(found(Look(hidden=True), None, CUDA_12)) == ""
    assert found(Look(), None, Build("2.13.0+cpu")).facts() == (
        "torch 2.13.0+cpu was built without CUDA",
        "no NVIDIA driver was found",
        "no NVIDIA GPU: there is no /dev/nvidia<n>",
        "CUDA_VISIBLE_DEVICES is not set",
    )


# --- files
# --------------------------------------------------------------------------------------------------

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version:  gcc version 11.4.0 (Ubuntu)\n"
OPEN_VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"


def machine(root: Path, minors: list[int], told: dict[str, int], version: str = VERSION) -> Path:
    """A tree as the driver shows it. `told`: PCI address -> minor number."""
    (root / "dev").mkdir()
    for name in (
        "nvidiactl",
        "nvidia-uvm",
        "nvidia",
        "null",
        *(f"nvidia{minor}" for minor in minors),
    ):
        (root / "dev" / name).touch()
    driver = root / "proc" / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text(version)
    for address, minor in told.items():
        (driver / "gpus" / address).mkdir(parents=True)
        (driver / "gpus" / address / "information").write_text(
            f"Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 138\nGPU UUID: \t GPU-0000000{minor}-aaaa\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {minor}\n"
        )
    return root


def test_gpus_from_files(tmp_path: Path) -> None:
    """A GPU's number is its place on the bus, not the minor number of its device file."""
    look = devices.look(str(machine(tmp_path, [0, 1], {"0000:0f:00.0": 1, "0000:b7:00.0": 0})))
    assert [device.uuid for device in look.devices] == ["GPU-00000001-aaaa", "GPU-00000000-aaaa"]
    assert (look.driver, look.cuda, look.source) == ("550.54.14", "12", "files")
    assert look.devices[0].name == "NVIDIA A100-SXM4-40GB"


def test_a_container_has_the_gpus_that_it_was_given(tmp_path: Path) -> None:
    look = devices.look(
        str(machine(tmp_path, [5], {"0000:0f:00.0": 1, "0000:b7:00.0": 5}, OPEN_VERSION))
    )
    assert [device.uuid for device in look.devices] == ["GPU-00000005-aaaa"]
    assert (look.driver, look.cuda) == ("580.65.06", "13")


def test_device_files_alone(tmp_path: Path) -> None:
    look = devices.look(str(machine(tmp_path, [0, 11], {}, "")))
    assert (len(look.devices), look.driver, look.cuda) == (2, "", "")
    assert missing(found(look, None, CUDA_13)) == ""  # nothing is known that speaks against it


def test_instances_from_files(tmp_path: Path) -> None:
    root = machine(tmp_path, [0], {"0000:0f:00.0": 0})
    for part in ("gi7/ci0", "gi8/ci0", "gi8/ci1"):
        (root / "proc/driver/nvidia/capabilities/gpu0/mig" / part).mkdir(parents=True)
    look = devices.look(str(root))
    assert look.devices[0].instances == ("", "", "")
    assert len(resolve(look, {})) == len(resolve(look, {"CUDA_VISIBLE_DEVICES": "MIG-1"})) == 1


def test_gpus_that_no_file_shows(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    assert devices.look(str(tmp_path)) == Look(hidden=True)


def test_a_newer_library_before_the_driver(tmp_path: Path) -> None:
    root = machine(tmp_path, [0], {})
    assert missing(found(devices.look(str(root)), None, CUDA_13))
    (root / "usr/local/cuda/compat").mkdir(parents=True)
    assert missing(found(devices.look(str(root)), None, CUDA_13)) == ""


def test_an_empty_root(tmp_path: Path) -> None:
    assert devices.look(str(tmp_path)) == Look()


# --- torch, by its version.py
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "build"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
            Build("2.13.0+cpu"),
        ),
        (
            "__version__ = '2.7.1+cu126'\ncuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n",
            Build("2.7.1+cu126", "12.6"),
        ),
        (
            "__version__ = '2.7.1+rocm6.3'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.3.4'\n",
            Build("2.7.1+rocm6.3", "", "ROCm 6.3.4"),
        ),
        (
            "__version__ = '2.8.0+xpu'\ncuda = None\nxpu: Optional[str] = '20250101'\n",
            Build("2.8.0+xpu", "", "XPU 20250101"),
        ),
        ("something = 'else'\n", None),
    ],
)
def test_the_build_of_torch(lines: str, build: Build | None, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(lines)
    assert devices.torch_build([str(tmp_path)]) == build
    assert devices.torch_build([str(tmp_path / "nowhere")]) is None


# --- the child that asks NVML
# ----------------------------------------------------------------------------------------

LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
int nvmlInitWithFlags(unsigned flags) { if (getenv("HANGS")) pause(); return getenv("REFUSES") ? 18 : 0; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "550.54.14", size); return 0; }
int nvmlSystemGetCudaDriverVersion(int *number) { *number = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)1; return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { strncpy(text, "GPU-00000001-aaaa", size); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { strncpy(text, "NVIDIA H100", size); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) { memory->total = 80ull << 30; memory->used = 40ull << 30; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *list) {
    if (*count < 1) { *count = 1; return 7; }
    *count = 1; list[0].pid = (unsigned)getppid(); list[0].used = 39ull << 30; list[0].gi = list[0].ci = 0xffffffffu;
    return 0;
}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvml.c").write_text(LIBRARY)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    subprocess.run(
        [
            *compiler,
            "-shared",
            "-fPIC",
            "-w",
            "-o",
            tmp_path / "libnvidia-ml.so.1",
            tmp_path / "nvml.c",
        ],
        check=True,
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.compiler
@pytest.mark.usefixtures("library")
def test_through_the_library_of_the_driver() -> None:
    """Without functions of newer drivers (MIG), as with an old one."""
    look = devices._ask(30.0)
    assert look.problem == ""
    (device,) = look.devices
    assert (look.driver, look.cuda, device.uuid, device.name) == (
        "550.54.14",
        "12.4",
        "GPU-00000001-aaaa",
        "NVIDIA H100",
    )
    (process,) = device.processes
    assert (process.pid, process.memory, process.session) == (os.getpid(), 39 * GIB, os.getsid(0))
    assert process.command


@pytest.mark.compiler
@pytest.mark.usefixtures("library")
def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "1")
    assert devices._ask(30.0).problem == "NVML: RM has detected an NVML/RM version mismatch"


@pytest.mark.compiler
@pytest.mark.usefixtures("library")
def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGS", "1")
    assert devices._ask(0.2).problem == "the driver gave no answer within 0.2 s"


def test_a_problem_is_kept_beside_what_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Look((Device(),), "550.54.14", "12")
    monkeypatch.setattr(devices, "look", lambda: files)
    refused = Look(problem="NVML: Driver/library version mismatch")
    monkeypatch.setattr(devices, "_ask", lambda deadline: refused)
    look = devices.look_closely()
    assert (look.devices, look.driver, look.source) == (files.devices, "550.54.14", "files")
    assert found(look).facts()[0] == (
        "the NVIDIA driver is 550.54.14, which knows CUDA up to 12 (NVML: Driver/library version mismatch)"
    )


def test_where_nothing_shows_a_gpu_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", Look)
    monkeypatch.setattr(devices, "_ask", lambda deadline: pytest.fail("asked"))
    assert devices.look_closely() == Look()


# --- whether CUDA is up in a process
# ---------------------------------------------------------------------------------

DRIVER = r"""
static int up = 0;
int cuInit(unsigned flags) { up = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return up ? 0 : 3; }
"""

ASK = """
import ctypes
from rallypoint.host.devices import cuda_is_up
print(cuda_is_up())
driver = ctypes.CDLL("libcuda.so.1")
print(cuda_is_up())
driver.cuInit(0)
print(cuda_is_up())
"""


@pytest.mark.compiler
def test_cuda_that_somebody_else_has_initialised(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [
            *compiler,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            library,
            tmp_path / "driver.c",
        ],
        check=True,
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["False", "False", "True"], "")


def test_without_a_driver_cuda_is_not_up() -> None:
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        assert not devices.cuda_is_up()
    else:
        pytest.skip("this process has the driver's library loaded")
