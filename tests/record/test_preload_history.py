"""What is remembered of a program from run to run, and that nothing wrong with the file can
hurt.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rallypoint.record import preload_history
from rallypoint.record.preload_history import FORGOTTEN_AFTER, Learnt

NOW = time.time()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "learnt" / "0123.json")


def add(path: str, *parts: str, spoilt: dict[str, str] | None = None, now: float = NOW) -> None:
    preload_history.add(path, "train.py", "2.13.0", parts, spoilt or {}, now)
    os.utime(path, (now, now))


def test_what_runs_have_shown_adds_up(path: str) -> None:
    assert preload_history.read(path, NOW) == Learnt()
    add(path, "torch._dynamo")
    add(path, "torch._inductor.compile_fx", "torch._dynamo")
    assert preload_history.read(path, NOW).parts == ("torch._dynamo", "torch._inductor.compile_fx")


def test_what_has_spoilt_a_template_is_never_learnt_again(path: str) -> None:
    add(path, "torch._dynamo", "torch.export")
    add(path, spoilt={"torch.export": "2 threads"})
    add(path, "torch.export")
    assert preload_history.read(path, NOW) == Learnt(
        "train.py", "2.13.0", ("torch._dynamo",), {"torch.export": "2 threads"}
    )


def test_it_is_private(path: str) -> None:
    add(path, "torch._dynamo")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"parts": ["torch._dyn',
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"parts": "torch._dynamo"}',
        b'{"parts": [1]}',
        b'{"parts": ["os.path"]}',
        b'{"parts": ["torch"]}',
        b'{"parts": ["torch._dynamo", "antigravity"]}',
        b'{"parts": ["torch.x; import os"]}',
        b'{"parts": [], "more": 1}',
        b" " * 100_000 + b'{"parts": ["torch._dynamo"]}',
    ],
)
def test_a_damaged_file_is_none_and_is_replaced(path: str, text: bytes) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(text)
    assert preload_history.read(path, NOW) == Learnt()
    add(path, "torch._dynamo")
    assert preload_history.read(path, NOW).parts == ("torch._dynamo",)


def test_what_is_no_file_is_not_read(path: str) -> None:
    """A named pipe would hold the launcher up for ever."""
    os.makedirs(os.path.dirname(path))
    os.mkfifo(path)
    assert preload_history.read(path, NOW) == Learnt()
    os.unlink(path)
    os.mkdir(path)
    assert preload_history.read(path, NOW) == Learnt()
    os.rmdir(path)
    add(path + ".other", "torch._dynamo")
    os.symlink(path + ".other", path)
    assert preload_history.read(path, NOW) == Learnt()


def test_somebody_elses_file_is_not_trusted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, "torch._dynamo")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert preload_history.read(path, NOW) == Learnt()


def test_a_month_later_it_is_learnt_anew(path: str) -> None:
    add(path, "torch._dynamo", spoilt={"torch.export": "2 threads"})
    later = NOW + FORGOTTEN_AFTER + 1
    assert preload_history.read(path, later) == Learnt()
    other = path.replace("0123", "4567")
    add(other, "torch._dynamo", now=later)
    assert os.listdir(os.path.dirname(path)) == ["4567.json"]


def test_where_nothing_can_be_written_that_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "learnt").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        add(str(tmp_path / "learnt" / "0123.json"), "torch._dynamo")


def test_two_jobs_that_end_at_the_same_moment_leave_a_whole_file(path: str) -> None:
    """The last one counts; a reader in between sees one or the other, never half of one."""
    add(path, "torch._dynamo")
    seen: set[tuple[str, ...]] = set()
    ends = threading.Barrier(3)

    def job(name: str) -> None:
        ends.wait(10)
        for number in range(50):
            preload_history.add(path, "train.py", f"{name}{number}", [f"torch.{name}"], {}, NOW)

    def reads() -> None:
        ends.wait(10)
        for _ in range(200):
            seen.add(preload_history.read(path, NOW).parts)

    work = [threading.Thread(target=job, args=(name,)) for name in "ab"] + [
        threading.Thread(target=reads)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert all(parts[:1] == ("torch._dynamo",) for parts in seen)
    assert os.listdir(os.path.dirname(path)) == ["0123.json"]


def test_each_program_and_environment_has_its_own() -> None:
    given = ["module", "train", "/home/ada", "2.13.0"]
    home = {"HOME": "/home/ada"}
    paths = {preload_history.path_for(home, *given)}
    for place, other in enumerate(("function", "eval", "/home/bob", "2.14.0")):
        changed = list(given)
        changed[place] = other
        paths.add(preload_history.path_for(home, *changed))
    assert len(paths) == 5
    assert {os.path.dirname(path) for path in paths} == {"/home/ada/.local/state/rallypoint/learnt"}
    assert preload_history.path_for(
        {"XDG_STATE_HOME": "/s"}, "script", "/tmp/\udcff.py", "/p", "2"
    ).startswith("/s/rallypoint/learnt/")
