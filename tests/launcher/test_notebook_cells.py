"""A notebook's cells in what people read."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rallypoint.launcher.launch import notebook_cells
from rallypoint.launcher.launch.marshalling import object_path


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"/tmp/ipykernel_7/221.py": ("Cell", "In[4]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=known.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.usefixtures("notebook")
def test_a_cells_file_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        notebook_cells.named("where  /tmp/ipykernel_7/221.py:2 in f") == "where  Cell In[4]:2 in f"
    )
    assert (
        notebook_cells.named('File "/tmp/ipykernel_7/221.py", line 2')
        == 'File "Cell In[4]", line 2'
    )
    assert notebook_cells.named("/tmp/ipykernel_8/221.py:2") == "/tmp/ipykernel_8/221.py:2", (
        "another notebook's"
    )
    assert (
        notebook_cells.named("/tmp/ipykernel_7/x.py and train.py:3")
        == "/tmp/ipykernel_7/x.py and train.py:3"
    )
    monkeypatch.chdir("/tmp")
    assert notebook_cells.named("ipykernel_7/221.py:2") == "Cell In[4]:2", (
        "as a place is shown in a folder above it"
    )


@pytest.mark.usefixtures("notebook")
def test_a_refusal_names_the_cell() -> None:
    """A lock that a function read was "global lock in /tmp/ipykernel_7/221.py"."""
    file = "/tmp/ipykernel_7/221.py"
    assert (
        object_path.global_text("lock", file, "train", file, 4)
        == "global lock, used by train at Cell In[4]:4"
    )


def test_without_a_notebook_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "/tmp/ipykernel_7/221.py:2"
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_cells.named(text) == text
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert notebook_cells.named(text) == text
