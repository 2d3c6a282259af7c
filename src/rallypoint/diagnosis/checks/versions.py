"""Python, torch, CUDA, NCCL and the driver: which are here, and whether they are those that torch was built for."""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import NamedTuple

from rallypoint import __version__
from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok
from rallypoint.host.devices import Build, look, torch_build

PACKAGE_INDEX_CPU = "https://download.pytorch.org/whl/cpu"


class Package(NamedTuple):
    """A library that torch's metadata asks for in one version: `nvidia-nccl-cu12==2.27.3`."""

    name: str
    wanted: str
    installed: str


class Facts(NamedTuple):
    """What is installed, by files and metadata: nothing of it is imported."""

    python: str  # the interpreter's path
    python_version: str
    system: str  # the kernel
    torch: Build | None
    packages: tuple[Package, ...] = ()
    driver: str = ""  # NVIDIA's, "" for none


def check(oldest_torch: tuple[int, int]) -> tuple[Finding, ...]:
    return judge(gather(), oldest_torch)


def gather() -> Facts:
    return Facts(
        python=sys.executable,
        python_version=platform.python_version(),
        system=f"{os.uname().sysname} {os.uname().release}",
        torch=torch_build(),
        packages=_packages(),
        driver=look().driver,
    )


def _packages() -> tuple[Package, ...]:
    """NVIDIA's libraries that the installed torch names with a version, where they are installed."""
    from importlib.metadata import PackageNotFoundError, requires, version

    found = []
    try:
        wanted = requires("torch") or []
    except PackageNotFoundError:
        return ()
    for requirement in wanted:
        named = re.match(r"(nvidia-[\w-]+)\s*==\s*([\w.]+)", requirement)
        if named:
            try:
                found.append(Package(named[1], named[2], version(named[1])))
            except PackageNotFoundError:  # for another system, or part of this build of torch
                continue
    return tuple(found)


def judge(facts: Facts, oldest_torch: tuple[int, int]) -> tuple[Finding, ...]:
    here = f"rallypoint {__version__}, Python {facts.python_version}, {facts.system}"
    install = f"{facts.python} -m pip install"
    if facts.torch is None:
        return (
            note(
                "torch-missing",
                f"{here}; torch is not installed in {facts.python}",
                ("install it there", f"{install} torch"),
                ("without a GPU the CPU build is smaller", f"{install} torch --index-url {PACKAGE_INDEX_CPU}"),
            ),
        )
    shown = f"{here}, {_described(facts.torch)}{_nccl(facts)}{f', driver {facts.driver}' if facts.driver else ''}"
    number = re.match(r"(\d+)\.(\d+)", facts.torch.version)
    if number and (int(number[1]), int(number[2])) < oldest_torch:
        oldest = ".".join(map(str, oldest_torch))
        return (
            fault("torch-too-old", f"{shown}; rallypoint needs torch {oldest}", ("install a newer torch", f"{install} 'torch>={oldest}'")),
        )
    wrong = [package for package in facts.packages if package.installed != package.wanted]
    if wrong:
        return (
            note(
                "versions-differ",
                f"{shown}; {_listed(wrong)}",
                ("install what this torch was built with", f"{install} {' '.join(f'{one.name}=={one.wanted}' for one in wrong)}"),
                why=("another version of a library can crash, or behave otherwise than the one that torch was tested with",),
            ),
        )
    return (ok(shown),)


def _described(build: Build) -> str:
    made_for = f"for CUDA {build.cuda}" if build.cuda else f"for {build.other}" if build.other else "without CUDA"
    return f"torch {build.version} ({made_for})"


def _nccl(facts: Facts) -> str:
    return next((f", NCCL {one.installed}" for one in facts.packages if one.name.startswith("nvidia-nccl")), "")


def _listed(wrong: list[Package]) -> str:
    return ", ".join(f"{one.name} is {one.installed} and torch wants {one.wanted}" for one in wrong)
