"""What importing costs is added up by package, and nothing of it can be seen by what is
imported.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.launcher.protocol import Imported
from rallypoint.launcher.worker import import_times
from rallypoint.launcher.worker.import_times import ImportTimes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place to import from, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ImportTimes:
    """At work, with every package slow, and a program that lies elsewhere."""
    monkeypatch.setattr(import_times, "SLOW", 0.0)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    found = ImportTimes(str(tmp_path / "program"))
    found.install()
    return found


def names(times: ImportTimes) -> list[str]:
    return sorted(imported.name for imported in times.slow())


def test_the_outermost_import_has_the_time(folder: Path, times: ImportTimes) -> None:
    (folder / "outermost.py").write_text("import innermost\n")
    (folder / "innermost.py").write_text("import time\ntime.sleep(0.05)\n")
    importlib.import_module("outermost")
    (found,) = times.slow()
    assert found.name == "outermost"
    assert 0.05 <= found.seconds < 5


def test_a_package_is_named_by_its_slowest_module(folder: Path, times: ImportTimes) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "late.py").write_text("import time\ntime.sleep(0.5)\n")
    importlib.import_module("package.late")
    assert names(times) == ["package.late"]


def test_the_programs_own_modules_are_looked_through(folder: Path, times: ImportTimes) -> None:
    program = folder / "program"
    program.mkdir()
    (program / "own.py").write_text("import others\n")
    (folder / "others.py").write_text("")
    inside = program / "venv" / "site-packages"
    inside.mkdir(parents=True)
    (inside / "installed.py").write_text("")
    sys.path[:0] = [str(program), str(inside)]
    try:
        importlib.import_module("own")
        importlib.import_module("installed")
    finally:
        del sys.path[:2]
    assert names(times) == ["installed", "others"]


def test_a_quick_package_is_not_told(
    folder: Path, times: ImportTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_times, "SLOW", 60.0)
    (folder / "quick.py").write_text("")
    importlib.import_module("quick")
    assert list(times.slow()) == []


def test_of_torch_the_late_part_is_named() -> None:
    assert import_times._package("torch._dynamo.config") == "torch._dynamo"
    assert import_times._package("transformers.models.auto") == "transformers"


def test_a_module_finds_its_loader_untouched(folder: Path, times: ImportTimes) -> None:
    (folder / "plain.py").write_text(
        "seen = dict(vars(__loader__)), __spec__.loader is __loader__, __loader__.exec_module.__qualname__\n"
    )
    module = importlib.import_module("plain")
    attributes, same, name = module.seen
    assert "exec_module" not in attributes
    assert same
    assert name == "_LoaderBasics.exec_module"
    assert "exec_module" not in vars(importlib.reload(module).__loader__)


@pytest.mark.parametrize(
    "text",
    ["import absent_module_zz", "1 / 0", "x = (", "import deeper", "from deeper import nothing"],
)
def test_the_traceback_of_a_failed_import_is_the_same(
    folder: Path, times: ImportTimes, text: str
) -> None:
    (folder / "failing.py").write_text(text + "\n")
    (folder / "deeper.py").write_text("import failing_too\n")
    (folder / "failing_too.py").write_text("raise OSError('for a reason')\n")

    def attempt() -> str:
        try:
            __import__("failing")
        except Exception:
            return traceback.format_exc()
        raise AssertionError("it was imported")

    with_us = attempt()
    sys.meta_path.remove(times)
    assert with_us == attempt()


def test_a_finder_that_refuses_is_heard(folder: Path, times: ImportTimes) -> None:
    class Refuses:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> None:
            if name == "refused":
                raise ImportError("not here")

    sys.meta_path.insert(1, Refuses)
    with pytest.raises(ImportError, match="not here") as caught:
        __import__("refused")
    assert [
        frame.name for frame in caught.traceback if str(frame.path) == import_times.__file__
    ] == []


def test_looking_for_a_module_costs_nothing(folder: Path, times: ImportTimes) -> None:
    """`importlib.util.find_spec`, with which libraries see what is installed, runs nothing; nor
    does it disturb a later import.
    """
    (folder / "looked_for.py").write_text("")
    assert importlib.util.find_spec("looked_for") is not None
    assert importlib.util.find_spec("not_there_zz") is None
    assert list(times.slow()) == []
    importlib.import_module("looked_for")
    assert names(times) == ["looked_for"]


def test_the_finder_is_quick(times: ImportTimes) -> None:
    """Within an import each further module costs one call; 100,000 of them less than a second even
    on a busy machine.
    """
    times._busy = True
    began = time.thread_time()
    for _ in range(100_000):
        times.find_spec("anything", None)
    assert time.thread_time() - began < 1.0


def test_what_is_told(folder: Path, times: ImportTimes) -> None:
    (folder / "told.py").write_text("")
    importlib.import_module("told")
    (found,) = times.slow()
    assert isinstance(found, Imported)
