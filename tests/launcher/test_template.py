"""The pure parts of the template and its workers: when a process may be forked, and what a worker
puts back.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint.host import process_status
from rallypoint.launcher import protocol
from rallypoint.launcher.protocol import StartWorker
from rallypoint.launcher.template import template
from rallypoint.launcher.worker import worker


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the test run itself (a timer of pytest-timeout's, one of another test that is
    about to end) do not count; nor does a torch that another test imported.
    """
    others = set(os.listdir("/proc/self/task"))
    monkeypatch.setattr(
        process_status, "threads", lambda: len(set(os.listdir("/proc/self/task")) - others) + 1
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: False))


def test_a_clean_process() -> None:
    assert template.unclean() == ""


def test_another_thread() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert template.unclean() == "2 threads"
    finally:
        end.set()
        thread.join()


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: True))
    assert template.unclean() == "CUDA is initialised"


def test_an_open_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidia0"
    monkeypatch.setattr(template, "_DEVICE_FILES", (str(tmp_path / "nvidia"),))
    with device.open("w"):
        assert template.unclean() == f"{device} is open"
    assert template.unclean() == ""


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "99"}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "4", "GOTO_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4", "GOTO_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}, 2),
        ({"OPENBLAS_DEFAULT_NUM_THREADS": "5"}, 5),
        ({"OPENBLAS_DEFAULT_NUM_THREADS": "5", "OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_the_threads_that_openblas_would_take(environment: dict[str, str], threads: int) -> None:
    assert worker._openblas_threads(environment, 8) == threads


def test_a_setup_is_read_once() -> None:
    """And leaves no descriptor behind."""
    from rallypoint.launcher.protocol import Reap

    fd = template._memory(Reap(7))
    assert protocol.read_struct(fd, Reap) == Reap(7)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_descriptors_in_their_order() -> None:
    def rest(fds: list[int], *, has_secret: bool) -> tuple[int, int]:
        order = StartWorker(
            rank=0,
            local_rank=0,
            environment={},
            ignored=(),
            takes_traceback=False,
            stderr_is_kept=False,
            debugger=False,
            held="",
            began=0.0,
            single=True,
            store="127.0.0.1:1" if has_secret else "",
        )
        found = worker.Descriptors(order, fds)
        return found.secret, found.terminal

    assert rest([3, 4, 5, 6, 7], has_secret=False) == (-1, -1)
    assert rest([3, 4, 5, 6, 7, 8], has_secret=False) == (-1, 8)
    assert rest([3, 4, 5, 6, 7, 8], has_secret=True) == (8, -1)
    assert rest([3, 4, 5, 6, 7, 8, 9], has_secret=True) == (8, 9)
