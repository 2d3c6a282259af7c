"""A pytest of its own, in which rallypoint's plugin is installed: what the tests of fixtures and
markers run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE = 100.0  # seconds; without ranks it takes one, with a template three


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """What pip leaves of our entry point, in a folder for PYTHONPATH: the suite also runs where
    rallypoint is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path / "site"
    info = folder / "rallypoint-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rallypoint\nVersion: 0\n")
    points = "".join(
        f"{name} = {target}\n" for name, target in project["entry-points"]["pytest11"].items()
    )
    (info / "entry_points.txt").write_text(f"[pytest11]\n{points}")
    return folder


def run_pytest(folder: Path, installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Under CI pytest shows more of a failed assertion, and the whole of its summary.
    away = ("PYTEST", "RALLYPOINT", "CI", "BUILD_NUMBER")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(away)}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(installed), str(ROOT / "src"), os.environ.get("PYTHONPATH")])
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *("-p", "no:hypothesispytest", "-p", "no:anyio"),  # half of what an empty run takes
        "-W",
        "error",
        "--rootdir",
        str(folder),
        *arguments,
    ]
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
