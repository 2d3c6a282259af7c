from __future__ import annotations

import fcntl
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.host import fd_passing


class File:
    """An object with a descriptor, as a shared tensor is one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _arrived, (fd_passing.add(self.fd),)


def _arrived(index: int) -> File:
    return File(fd_passing.take(index))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def number_of() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_goes_beside_the_pickle(pipe: tuple[int, int]) -> None:
    before = number_of()
    assert not fd_passing.active()
    with fd_passing.collecting() as fds:
        assert fd_passing.active()
        data = pickle.dumps([File(pipe[1]), "x"])
    assert not fd_passing.active()
    assert len(fds) == 1
    assert fds[0] != pipe[1]
    assert fcntl.fcntl(fds[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with fd_passing.arriving(fds):
        file, _ = pickle.loads(data)
    os.write(file.fd, b"hello")
    assert os.read(pipe[0], 10) == b"hello"
    os.close(file.fd)
    assert number_of() == before


def test_what_nobody_takes_is_closed(pipe: tuple[int, int]) -> None:
    before = number_of()
    with fd_passing.collecting() as fds:
        for _ in range(3):
            fd_passing.add(pipe[0])
    with fd_passing.arriving(fds):
        taken = fd_passing.take(1)
        again = fd_passing.take(1)
        assert again != taken
    assert number_of() == before + 2
    os.close(taken)
    os.close(again)


def test_an_exception_closes_what_was_collected(pipe: tuple[int, int]) -> None:
    before = number_of()
    collecting = fd_passing.collecting()
    fds = collecting.__enter__()
    fd_passing.add(pipe[0])
    error = ZeroDivisionError()
    assert not collecting.__exit__(ZeroDivisionError, error, None)
    assert fds == []
    assert number_of() == before
    assert not fd_passing.active()


def test_one_inside_another_is_by_itself(pipe: tuple[int, int]) -> None:
    with fd_passing.collecting() as outer:
        fd_passing.add(pipe[0])
        with fd_passing.collecting() as inner:
            assert fd_passing.add(pipe[0]) == 0
        assert fd_passing.add(pipe[0]) == 1
    assert (len(outer), len(inner)) == (2, 1)
    with fd_passing.arriving(outer):
        os.close(fd_passing.take(0))
        with fd_passing.arriving(inner):
            os.close(fd_passing.take(0))
        os.close(fd_passing.take(1))


def test_each_thread_has_its_own(pipe: tuple[int, int]) -> None:
    found: list[bool] = []
    with fd_passing.collecting():
        thread = threading.Thread(target=lambda: found.append(fd_passing.active()))
        thread.start()
        thread.join()
    assert found == [False]


def test_outside_it_says_so(pipe: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match="outside of"):
        fd_passing.add(pipe[0])
    with pytest.raises(RuntimeError, match="outside of"):
        fd_passing.take(0)
