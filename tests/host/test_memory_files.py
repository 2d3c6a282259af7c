"""Files in memory, whatever one call of the kernel moves."""

from __future__ import annotations

import os

import pytest

from rallypoint.host import memory_files


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves no more than 2 GiB at once; here no more than 7 bytes."""
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:7]), at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 7), at))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("size", [0, 7, 50])
def test_what_one_call_does_not_move_is_not_cut(size: int) -> None:
    """Over 2 GiB from an actor of Ray's came as 2 GiB."""
    content = os.urandom(size)
    fd = memory_files.create("test", content)
    try:
        assert memory_files.content(fd) == content
        memory_files.replace(fd, content[:3] * 4)
        assert memory_files.content(fd) == content[:3] * 4
    finally:
        os.close(fd)


@pytest.mark.usefixtures("few")
def test_a_sealed_memory_file_is_read_and_never_written() -> None:
    fd = memory_files.create_sealed("test", b"0123456789")
    try:
        assert memory_files.content(fd) == memory_files.content(fd) == b"0123456789"
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
