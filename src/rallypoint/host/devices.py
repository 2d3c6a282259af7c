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
    instances: tuple[
        str, ...
    ] = ()  # what it is cut into (MIG): UUIDs, "" for each that has none known
    processes: tuple[Process, ...] = ()


class Look(msgspec.Struct, frozen=True):
    """GPUs that were found, in the order of the PCI bus: a GPU's place in `devices` is its index
    for NVML, and mostly for CUDA."""

    devices: tuple[Device, ...] = ()
    driver: str = ""  # "550.54.14"; "": none was seen
    cuda: str = (
        ""  # the newest CUDA that this driver knows: "12.4" from NVML, "12" by the driver's number
    )
    source: Literal["files", "nvml"] = "files"
    problem: str = ""  # why NVML told nothing
    hidden: bool = (
        False  # there are GPUs that no file shows (Windows' Linux): only NVML could count them
    )
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


class Visible(msgspec.Struct, frozen=True):
    """GPUs that CUDA_VISIBLE_DEVICES leaves."""

    given: str | None
    indices: tuple[
        int, ...
        # of `Look.devices`, in the order in which CUDA numbers them; -1: one that could not be
        # looked up
    ]
    instance: bool = (
        False  # what is visible is a part of a GPU (MIG), and CUDA shows a process one such part
    )
    stopped: str = ""  # why entries were not read, a clause
    # CUDA numbers as the bus does (CUDA_DEVICE_ORDER=PCI_BUS_ID); else the fastest comes first
    by_bus: bool = False

    def __len__(self) -> int:
        return len(self.indices)


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
            *_of_variable(self.look, self.visible),
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
                    f"GPU {index}: pid {one.pid}{what} holds {_size(one.memory)} of its {_size(device.memory)}"
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
    visible = _read_list(environ.get("CUDA_VISIBLE_DEVICES"), look)
    return msgspec.structs.replace(visible, by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def _read_list(given: str | None, look: Look) -> Visible:
    if given is None:
        cut = [index for index, device in enumerate(look.devices) if device.instances]
        return (
            Visible(None, (cut[0],), instance=True)
            if cut
            else Visible(None, tuple(range(len(look.devices))))
        )
    if not look.devices:
        return Visible(given, (), stopped="" if given else "it is empty")
    kind = next((prefix for prefix in ("GPU-", "MIG-") if given.startswith(prefix)), "")
    found: list[int] = []
    seen: list[str | int] = []
    for entry in (part.strip() for part in given.split(",")):
        index, why = _entry(entry, kind, look)
        if why:
            return Visible(
                given, *_numbered(found, look, kind), stopped=why if given else "it is empty"
            )
        mark = index if not kind else entry
        if mark in seen:
            return Visible(
                given, (), stopped=f"{entry} stands in it twice, and CUDA then shows none"
            )
        seen.append(mark)
        found.append(index)
    return Visible(given, *_numbered(found, look, kind))


def _entry(entry: str, kind: str, look: Look) -> tuple[int, str]:
    """Return the device that an entry names, or why it names none."""
    if not kind:
        number = re.match(r"[+-]?\d+", entry)
        if number is None:
            return -1, f"{entry!r} names no GPU"
        index = int(number[0])
        return (index, "") if 0 <= index < len(look.devices) else (-1, f"there is no GPU {index}")
    if not entry.startswith(kind):
        return -1, f"{entry!r} does not begin with {kind} as the first entry does"
    uuids = [
        (index, one)
        for index, device in enumerate(look.devices)
        for one in (device.instances if kind == "MIG-" else (device.uuid,))
    ]
    if not all(one for _, one in uuids) or not uuids:
        return -1, "" if kind == "GPU-" or any(
            device.instances for device in look.devices
        ) else "no GPU here is cut into instances (MIG)"
    hits = [index for index, one in uuids if one.startswith(entry)]
    if len(hits) == 1:
        return hits[0], ""
    return -1, f"{entry} fits {len(hits)} GPUs" if hits else f"{entry} is none of the GPUs here"


def _numbered(found: list[int], look: Look, kind: str) -> tuple[tuple[int, ...], bool]:
    """Return the indices and whether they are instances: of those CUDA shows a process one only."""
    cut = kind == "MIG-" or any(index >= 0 and look.devices[index].instances for index in found)
    return (tuple(found[:1]), bool(found)) if cut else (tuple(found), False)


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
        return (
            "no NVIDIA GPU is here"
            if look.driver
            else "no NVIDIA driver is loaded, and no GPU is here"
        )
    if build is not None and _major(build.cuda) > _major(look.cuda) > 0 and not look.newer:
        return f"the driver {look.driver} knows CUDA up to {look.cuda}, and torch {build.version} was built for CUDA {build.cuda}"
    if not found.visible.indices:
        return f"CUDA_VISIBLE_DEVICES={found.visible.given!r} leaves none of the {count(len(look.devices))}: {found.visible.stopped}"
    return ""


def count(number: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{number} GPU{'s' * (number != 1)}"


def _of_driver(look: Look) -> str:
    if not look.driver:
        return "no NVIDIA driver was found" + (f" ({look.problem})" if look.problem else "")
    knows = f", which knows CUDA up to {look.cuda}" if look.cuda else ""
    return f"the NVIDIA driver is {look.driver}{knows}" + (
        f" ({look.problem})" if look.problem else ""
    )


def _of_devices(look: Look) -> str:
    if not look.devices:
        return (
            "GPUs that no file shows"
            if look.hidden and look.source == "files"
            else "no NVIDIA GPU: there is no /dev/nvidia<n>"
        )
    names = dict.fromkeys(device.name or "a GPU whose name is not known" for device in look.devices)
    cut = sum(len(device.instances) for device in look.devices)
    return f"{count(len(look.devices))}: {', '.join(names)}" + (
        f", cut into {cut} instances (MIG)" if cut else ""
    )


def _of_variable(look: Look, visible: Visible) -> tuple[str, ...]:
    more = ("CUDA shows a process one instance (MIG) only",) * visible.instance
    if len({device.name for device in look.devices}) > 1 and not visible.by_bus:
        more += (
            "CUDA numbers the fastest GPU first, nvidia-smi by the bus: with CUDA_DEVICE_ORDER=PCI_BUS_ID they agree",
        )
    if visible.given is None:
        return ("CUDA_VISIBLE_DEVICES is not set", *more)
    which = ", ".join("one" if index < 0 else str(index) for index in visible.indices)
    left = f"{'an instance of ' * visible.instance}GPU {which}" if which else "no GPU"
    why = f": {visible.stopped}" if visible.stopped else ""
    why += ", and what follows is not read" if why and which else ""
    return (f"CUDA_VISIBLE_DEVICES={visible.given!r} leaves {left}{why}", *more)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


# --- the look at files
# -----------------------------------------------------------------------------------------------


def look(root: str = "/") -> Look:
    """Return what files say. Opens no device, loads nothing, cannot hang. `root` is for tests."""
    dev, driver_folder = os.path.join(root, "dev"), os.path.join(root, "proc/driver/nvidia")
    minors = [int(name[6:]) for name in _names(dev) if re.fullmatch(r"nvidia\d+", name)]
    told: dict[int, tuple[int, Device]] = {}  # by minor number: place on the bus, and the device
    # The folders are named by PCI address, so they are in the bus's order.
    for place, folder in enumerate(_names(os.path.join(driver_folder, "gpus"))):
        text = _text(os.path.join(driver_folder, "gpus", folder, "information"))
        fields = {key.strip(): value.strip() for key, value in re.findall("(.*?):(.*)", text)}
        if fields.get("Device Minor", "").isdigit():
            uuid = fields.get("GPU UUID", "")
            uuid = uuid if re.fullmatch(r"GPU-[0-9a-f-]+", uuid) else ""
            told[int(fields["Device Minor"])] = place, Device(uuid, fields.get("Model", ""))
    devices = []
    for minor in sorted(minors, key=lambda one: (told.get(one, (one,))[0], one)):
        parts = _instances(os.path.join(driver_folder, "capabilities", f"gpu{minor}", "mig"))
        _, device = told.get(minor, (0, Device()))
        devices.append(msgspec.structs.replace(device, instances=("",) * parts))
    version = _text(os.path.join(driver_folder, "version"))
    numbered = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", version)
    driver = numbered[1] if numbered else ""
    hidden = not devices and "dxg" in _names(dev)
    newer = "compat" in os.environ.get("LD_LIBRARY_PATH", "") or os.path.isdir(
        os.path.join(root, "usr/local/cuda/compat")
    )
    return Look(tuple(devices), driver, _cuda_of(driver), hidden=hidden, newer=newer)


def _instances(folder: str) -> int:
    """Return how many compute instances a GPU is cut into: mig/gi<n>/ci<n>."""
    return sum(
        name.startswith("ci")
        for part in _names(folder)
        if part.startswith("gi")
        for name in _names(os.path.join(folder, part))
    )


def _cuda_of(driver: str) -> str:
    return next((str(cuda) for least, cuda in _CUDA_OF_DRIVER if _major(driver) >= least), "")


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


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
    text = _text(os.path.join(os.path.dirname(spec.origin), "version.py"))
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
    answer, problem = _ask(deadline)
    return (
        msgspec.structs.replace(files, problem=problem)
        if answer is None
        else msgspec.structs.replace(answer, newer=files.newer)
    )


def _ask(deadline: float) -> tuple[Look | None, str]:
    """Return the child's answer, or why there is none. A child that does not end is left to die on
    its own: in the kernel nothing can kill it."""
    import subprocess

    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return None, f"NVML was not asked: {error.strerror}"
    assert child.stdout is not None
    try:
        data = child.communicate(timeout=deadline)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_PATIENCE)
        return None, f"the driver gave no answer within {deadline:g} s"
    try:
        answer = msgspec.json.decode(data, type=Look)
    except msgspec.DecodeError:
        return None, "NVML could not be asked: the process that asks it failed"
    return (None, answer.problem) if answer.problem else (answer, "")


_CHILD = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\nfrom rallypoint.host.devices import main\nmain()"


def main() -> None:
    """Ask NVML in the child, write the answer as JSON to stdout."""
    sys.stdout.buffer.write(msgspec.json.encode(_through_library()))


def _through_library() -> Look:
    try:
        import pynvml
    except ImportError:
        return Look(problem="the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Look(problem=f"NVML: {str(error).rstrip('.')}")
    return read(pynvml)


def read(nvml: Any) -> Look:
    """Ask an NVML that is initialised (module pynvml, or what answers like it). An answer that is
    refused is left out."""
    number = _answer(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion)
    devices = [_device(nvml, index) for index in range(_answer(nvml, 0, nvml.nvmlDeviceGetCount))]
    return Look(
        devices=tuple(devices),
        driver=_words(_answer(nvml, "", nvml.nvmlSystemGetDriverVersion)),
        cuda=f"{number // 1000}.{number % 1000 // 10}" if number else "",
        source="nvml",
    )


def _device(nvml: Any, index: int) -> Device:
    handle = _answer(nvml, None, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:  # fallen off the bus, or not this user's
        return Device()
    memory = _answer(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Device(
        uuid=_words(_answer(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        name=_words(_answer(nvml, "", nvml.nvmlDeviceGetName, handle)),
        memory=memory.total if memory is not None else 0,
        used=memory.used if memory is not None else 0,
        instances=tuple(_parts(nvml, handle)),
        processes=tuple(
            _process(one)
            for one in _answer(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        ),
    )


def _parts(nvml: Any, handle: Any) -> Iterable[str]:
    now, _ = _answer(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)
    for place in range(_answer(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) if now else 0):
        part = _answer(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if part is not None:
            yield _words(_answer(nvml, "", nvml.nvmlDeviceGetUUID, part))


def _process(told: Any) -> Process:
    from rallypoint.host.processes import command_line

    try:
        session = os.getsid(told.pid)
    except OSError:
        session = 0
    return Process(told.pid, told.usedGpuMemory or 0, command_line(told.pid), session)


def _answer(nvml: Any, instead: Any, ask: Any, *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except nvml.NVMLError:  # not supported by this GPU or driver, not allowed, no such instance
        return instead


def _words(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


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
