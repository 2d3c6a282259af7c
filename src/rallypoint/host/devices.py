"""Accelerators of this machine: found, free, visible to a rank.

Two looks at them. `look` reads files only (`/dev/nvidia<n>`, `/proc/driver/nvidia`) and takes
microseconds. `look_closely` asks NVML, the driver's own library for that, which creates no CUDA
context; it does so in a child process with a deadline, because a driver that hangs holds its caller
in the kernel. What both find is data (`Look`), and everything that is concluded from it is pure:
which GPUs CUDA_VISIBLE_DEVICES leaves (`resolve`), reasons against using them (`missing`),
processes that hold their memory (`Found.strangers`).

Only NVIDIA so far. Another vendor is another `Look` with its own two ways to make one, and another
variable for `resolve`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rallypoint.host import visible_devices
from rallypoint.host.kernel_files import text_of
from rallypoint.host.visible_devices import Visible
from rallypoint.units import size

DEADLINE = 5.0
"""Seconds for NVML. It answers in 0.1 s when the driver is loaded, in 2 s where a GPU must wake up
first (no persistence mode)."""

KILL_PATIENCE = 0.1
"""Seconds for the child to end after SIGKILL. One that a driver holds in the kernel does not end,
and is left to die on its own."""

BUSY_SHARE = 0.1
"""Share of a GPU's memory that a stranger must hold to be worth a line: a desktop or a bare context
holds less."""

# The first driver of each major version of CUDA. Within one, a program built for a later minor
# version runs on an earlier driver. Source: NVIDIA, "CUDA Compatibility", minor version
# compatibility.
_CUDA_OF_DRIVER = ((580, 13), (525, 12), (450, 11), (410, 10))


class Process(msgspec.Struct, frozen=True):
    """A process that has memory of a GPU."""

    pid: int
    # bytes; 0: the driver does not tell (in a container, or on a GPU that is cut into instances)
    memory: int = 0
    command: str = ""  # "" when it is not ours to see
    session: int = 0  # the leader of its session: that of a rank, for what a rank has started


class Device(msgspec.Struct, frozen=True):
    """One GPU."""

    uuid: str = ""  # "GPU-5f3c...", "" when not known
    name: str = ""
    memory: int = 0  # bytes; 0: not known
    used: int = 0
    # what it is cut into (MIG): UUIDs, "" for each that has none known
    instances: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()


class Look(msgspec.Struct, frozen=True):
    """GPUs that were found, in the order of the PCI bus: a GPU's place in `devices` is its index
    for NVML, and mostly for CUDA."""

    devices: tuple[Device, ...] = ()
    driver: str = ""  # "550.54.14"; "": none was seen
    # the newest CUDA that this driver knows: "12.4" from NVML, "12" by the driver's number
    cuda: str = ""
    source: Literal["files", "nvml"] = "files"
    problem: str = ""  # why NVML told nothing
    # there are GPUs that no file shows (Windows' Linux): only NVML could count them
    hidden: bool = False
    # a newer library may stand before this driver (package cuda-compat): its number then says
    # little
    newer: bool = False


class Build(msgspec.Struct, frozen=True):
    """The torch that is installed, as its own version.py says."""

    version: str
    cuda: str = ""  # the CUDA it was built for: "12.6"; "": none
    other: str = ""  # another vendor's that it was built for: "ROCm 6.2"

    def described(self) -> str:
        """`torch 2.13.0+cpu was built without CUDA`."""
        vendor = f"CUDA {self.cuda}" if self.cuda else self.other
        made_for = f"for {vendor}" if vendor else "without CUDA"
        return f"torch {self.version} was built {made_for}"


class Found(msgspec.Struct, frozen=True):
    """The whole picture, for a report."""

    look: Look
    visible: Visible
    build: Build | None = None

    def facts(self) -> tuple[str, ...]:
        """Return what was found where, a line each: torch, driver, GPUs, the variable."""
        named = [self.build.described()] if self.build is not None else []
        return (
            *named,
            _of_driver(self.look),
            _of_devices(self.look),
            *visible_devices.described(self.look, self.visible),
        )

    def strangers(self, own: Iterable[int]) -> tuple[str, ...]:
        """Return the other processes that hold a tenth or more of a visible GPU's memory, a line
        each. `own`: pids of the job's ranks, and their sessions."""
        ours = set(own)
        lines = []
        for index in self.visible.indices:
            device = self.look.devices[index] if index >= 0 else Device()
            for one in device.processes:
                if {one.pid, one.session} & ours or one.memory < BUSY_SHARE * device.memory:
                    continue
                what = f" ({one.command[:60]})" if one.command else ""
                lines.append(
                    f"GPU {index}: pid {one.pid}{what} holds {size(one.memory)} of its {size(device.memory)}"
                )
        return tuple(lines)


# --- conclusions: pure
# -----------------------------------------------------------------------------------------------


def resolve(look: Look, environ: Mapping[str, str]) -> Visible:
    """Return the GPUs that a program would see: CUDA stops reading CUDA_VISIBLE_DEVICES at the
    first entry that names none.

    As torch reads it (`torch.cuda._parse_visible_devices`): the first entry decides whether the
    list has numbers, `GPU-...` or `MIG-...`; a UUID may be cut short as long as it is unique; a
    device that is named twice empties the list. Sources: CUDA C++ Programming Guide, "CUDA
    Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
    """
    visible = visible_devices.read_list(environ.get("CUDA_VISIBLE_DEVICES"), look)
    return replace(visible, by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def missing(found: Found) -> str:
    """Return why no program here could use CUDA, a clause; "" when nothing that was seen speaks
    against it."""
    look, build = found.look, found.build
    if build is not None and build.other:
        return ""  # another vendor's, of which nothing was looked at
    if build is not None and not build.cuda:
        return build.described()
    if look.hidden and look.source == "files":
        return ""
    if not look.devices:
        driver = "" if look.driver else "driver is loaded, and no "
        return f"no NVIDIA {driver}GPU is here"
    if build is not None and _major(build.cuda) > _major(look.cuda) > 0 and not look.newer:
        return f"the driver {look.driver} knows CUDA up to {look.cuda}, and torch {build.version} was built for CUDA {build.cuda}"
    if not found.visible.indices:
        return f"CUDA_VISIBLE_DEVICES={found.visible.given!r} leaves none of the {count(len(look.devices))}: {found.visible.stopped}"
    return ""


def count(number: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{number} GPU{'s' * (number != 1)}"


def _of_driver(look: Look) -> str:
    problem = f" ({look.problem})" if look.problem else ""
    if not look.driver:
        return f"no NVIDIA driver was found{problem}"
    knows = f", which knows CUDA up to {look.cuda}" if look.cuda else ""
    return f"the NVIDIA driver is {look.driver}{knows}{problem}"


def _of_devices(look: Look) -> str:
    if not look.devices and look.hidden and look.source == "files":
        return "GPUs that no file shows"
    if not look.devices:
        return "no NVIDIA GPU: there is no /dev/nvidia<n>"
    names = dict.fromkeys(device.name or "a GPU whose name is not known" for device in look.devices)
    cut = sum(len(device.instances) for device in look.devices)
    parts = f", cut into {cut} instances (MIG)" if cut else ""
    return f"{count(len(look.devices))}: {', '.join(names)}{parts}"


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


# --- the look at files
# -----------------------------------------------------------------------------------------------


def look(root: str = "/") -> Look:
    """Return what files say. Opens no device, loads nothing, cannot hang. `root` is for tests."""
    dev, driver_folder = os.path.join(root, "dev"), os.path.join(root, "proc/driver/nvidia")
    minors = [int(name[6:]) for name in _names(dev) if re.fullmatch(r"nvidia\d+", name)]
    told: dict[int, tuple[int, Device]] = {}  # by minor number: place on the bus, and the device
    # The folders are named by PCI address, so they are in the bus's order.
    for place, folder in enumerate(_names(os.path.join(driver_folder, "gpus"))):
        text = text_of(driver_folder, "gpus", folder, "information")
        fields = {key.strip(): value.strip() for key, value in re.findall("(.*?):(.*)", text)}
        if fields.get("Device Minor", "").isdigit():
            uuid = fields.get("GPU UUID", "")
            uuid = uuid if re.fullmatch(r"GPU-[0-9a-f-]+", uuid) else ""
            told[int(fields["Device Minor"])] = place, Device(uuid, fields.get("Model", ""))
    devices = []
    for minor in sorted(minors, key=lambda one: (told.get(one, (one,))[0], one)):
        parts = _instances(os.path.join(driver_folder, "capabilities", f"gpu{minor}", "mig"))
        _, device = told.get(minor, (0, Device()))
        devices.append(replace(device, instances=("",) * parts))
    version = text_of(driver_folder, "version")
    numbered = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", version)
    driver = numbered[1] if numbered else ""
    hidden = not devices and "dxg" in _names(dev)
    newer = "compat" in os.environ.get("LD_LIBRARY_PATH", "") or os.path.isdir(
        os.path.join(root, "usr/local/cuda/compat")
    )
    cuda = next((str(cuda) for least, cuda in _CUDA_OF_DRIVER if _major(driver) >= least), "")
    return Look(tuple(devices), driver, cuda, hidden=hidden, newer=newer)


def _instances(folder: str) -> int:
    """Return how many compute instances a GPU is cut into: mig/gi<n>/ci<n>."""
    return sum(
        name.startswith("ci")
        for part in _names(folder)
        if part.startswith("gi")
        for name in _names(os.path.join(folder, part))
    )


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def torch_build(folders: Sequence[str] | None = None) -> Build | None:
    """Return the torch that `import torch` would find, by reading its version.py: torch itself is
    not imported. None: there is none.

    `folders`: what to search instead of sys.path. The working directory does not count: a user's
    own torch.py is no torch.
    """
    from importlib.machinery import PathFinder

    here = os.getcwd() if folders is None else ""
    searched = [
        folder
        for folder in (sys.path if folders is None else folders)
        if folder and os.path.abspath(folder) != here
    ]
    spec = PathFinder.find_spec("torch", searched)
    if spec is None or not spec.origin:
        return None
    text = text_of(os.path.dirname(spec.origin), "version.py")
    told = dict(re.findall(r"^(\w+)\s*(?::[^=\n]+)?=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    if "__version__" not in told:
        return None
    other = next(
        (f"{name} {told[key]}" for key, name in (("hip", "ROCm"), ("xpu", "XPU")) if told.get(key)),
        "",
    )
    return Build(told["__version__"], told.get("cuda", ""), other)


def find(environ: Mapping[str, str], seen: Look) -> Found:
    """Return everything that can be said of this machine after a look at it."""
    return Found(seen, resolve(seen, environ), torch_build())


# --- the look through NVML
# -------------------------------------------------------------------------------------------


def look_closely(deadline: float = DEADLINE) -> Look:
    """Return what NVML says, within `deadline` seconds; what files say, with `problem`, when it
    says nothing. Never raises, never hangs.

    Where no file shows a trace of a GPU it is not asked.
    """
    files = look()
    if not (files.devices or files.driver or files.hidden):
        return files
    answer = _ask(deadline)
    if answer.problem:
        return replace(files, problem=answer.problem)
    return replace(answer, newer=files.newer)


def _ask(deadline: float) -> Look:
    """Return the child's answer, or the problem. A child that does not end is left to die on its
    own: in the kernel nothing can kill it."""
    import subprocess

    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return Look(problem=f"NVML was not asked: {error.strerror}")
    assert child.stdout is not None
    try:
        data = child.communicate(timeout=deadline)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_PATIENCE)
        return Look(problem=f"the driver gave no answer within {deadline:g} s")
    try:
        return msgspec.json.decode(data, type=Look)
    except msgspec.DecodeError:
        return Look(problem="NVML could not be asked: the process that asks it failed")


_CHILD = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\nfrom rallypoint.host.nvml import main\nmain()"


# --- this process
# --------------------------------------------------------------------------------------------------

_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED
_driver: Any = None


def driver_is_loaded() -> bool:
    """Tell whether CUDA's driver library is in this process: loaded by torch, ctypes, a compiled
    extension. It is not loaded for this."""
    global _driver
    if _driver is None:
        import ctypes

        try:
            _driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            return False
    return True


def cuda_is_up() -> bool:
    """Tell whether this process has initialised CUDA's driver, by whomever: a fork from here on
    could not use CUDA.

    The library itself is asked, if it is loaded, and asking does not initialise it.
    """
    if not driver_is_loaded() or not hasattr(_driver, "cuDeviceGetCount"):
        return False
    import ctypes

    return int(_driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALISED
