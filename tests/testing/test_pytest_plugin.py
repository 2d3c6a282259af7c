"""The fixtures that users of pytest get: found by themselves, as the reference shows them, and at
no cost to who does not use them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import ROOT, run_pytest

PAGE = (
    (ROOT / "docs" / "reference" / "testing.md")
    .read_text(encoding="utf-8")
    .partition("## Fixtures for pytest")[2]
    .partition("\n## ")[0]
)
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FIXTURES = {"store", "store_server", "chaos_proxy", "manual_clock"}


def test_every_fixture_works_as_its_example_says(tmp_path: Path, installed: Path) -> None:
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"test_{number}.py").write_text(example)
    done = run_pytest(tmp_path, installed)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"{len(EXAMPLES)} passed" in done.stdout
    assert {
        name
        for name in FIXTURES
        if any(re.search(rf"def test.*\b{name}\b", example) for example in EXAMPLES)
    } == FIXTURES


def test_each_test_has_a_store_of_its_own_and_nothing_is_left(
    tmp_path: Path, installed: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os, threading\n"
        "def pytest_runtest_logfinish(nodeid):\n"
        "    ours = [one for one in threading.enumerate() if one.name.startswith('rallypoint')]\n"
        "    for one in ours: one.join(10)  # what close() has told to end may still be on its way out\n"
        "    sockets = [name for name in os.listdir('/proc/self/fd') if 'socket' in _link(name)]\n"
        "    left = [one.name for one in ours if one.is_alive()]\n"
        "    assert (sockets, left) == ([], []), (sockets, left)\n"
        "def _link(name):\n"
        "    try: return os.readlink(f'/proc/self/fd/{name}')\n"
        "    except OSError: return ''\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_empty(store, store_server, chaos_proxy, number):\n"
        "    assert len(store) == 0\n"
        "    store['a'] = number\n"
        "    assert store.address == store_server.address != chaos_proxy.address\n"
    )
    done = run_pytest(tmp_path, installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_who_does_not_use_them_pays_for_nothing(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_unconfigure(config): print(*sys.modules, file=sys.stderr)\n"
    )
    (tmp_path / "test_it.py").write_text("def test(manual_clock): pass\n")
    done = run_pytest(tmp_path, installed)
    assert done.returncode == 0, done.stdout
    loaded = set(done.stderr.split())
    assert "rallypoint.testing.pytest_plugin" in loaded
    heavy = {
        "torch",
        "numpy",
        "psutil",
        "rich",
        "cloudpickle",
        "msgspec",
        "rallypoint.store",
        "rallypoint.testing.proxy",
    }
    assert loaded.isdisjoint(heavy), loaded & heavy


def test_the_names_of_the_package_are_there_and_no_others() -> None:
    import rallypoint.testing

    assert all(
        getattr(rallypoint.testing, name).__name__ == name for name in rallypoint.testing.__all__
    )
    assert {*rallypoint.testing.__all__} <= {*dir(rallypoint.testing)}
    with pytest.raises(
        AttributeError, match=r"module 'rallypoint\.testing' has no attribute 'nothing'"
    ):
        rallypoint.testing.nothing  # noqa: B018
