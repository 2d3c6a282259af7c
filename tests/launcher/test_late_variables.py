"""A variable that is set after it was read is noticed, with the line that sets it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from rallypoint.launcher import late_variables


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_variables, "_read", None)
    monkeypatch.setattr(late_variables, "_folder", "")
    for name in ("OMP_NUM_THREADS", "TORCH_LOGS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is loaded, and lies in the working directory."""
    module = ModuleType("the_program_of_this_test")
    module.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['OMP_NUM_THREADS'] = '2'",
        'os.environ["OMP_NUM_THREADS"]=str(n)',
        "os.environ.setdefault('OMP_NUM_THREADS', '2')",
        "os.environ.update({'OMP_NUM_THREADS': '2'})",
        "os.environ.update(OMP_NUM_THREADS='2')",
        "os.putenv('OMP_NUM_THREADS', '2')",
        "del os.environ['OMP_NUM_THREADS']",
    ],
)
def test_the_line_is_found(program: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    program.write_text(
        f"import os\nprint(os.environ.get('OMP_NUM_THREADS'), os.environ['OMP_NUM_THREADS'] == '2')\n{line}\n"
    )
    late_variables.remember(str(program.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert late_variables.set_late() == {"OMP_NUM_THREADS": "train.py:3"}


def test_a_line_that_is_not_found_is_not_made_up(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_text("for name in names:\n    os.environ[name] = '2'\n")
    late_variables.remember(str(program.parent))
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    assert late_variables.set_late() == {"TORCH_LOGS": ""}


def test_only_a_value_that_differs_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    late_variables.remember(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("MKL_NUM_THREADS")
    assert [*late_variables.set_late()] == ["MKL_NUM_THREADS"]


def test_only_what_is_read_at_load_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late_variables.remember(str(tmp_path))
    for name in (
        "NCCL_DEBUG",
        "CUDA_VISIBLE_DEVICES",
        "ATEN_CPU_CAPABILITY",
        "MASTER_PORT",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(name, "1")
    assert late_variables.set_late() == {}


def test_a_fresh_interpreter_has_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert late_variables.set_late() == {}
