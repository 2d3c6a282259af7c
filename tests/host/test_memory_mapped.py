"""Segments that several processes have mapped: opened by process and descriptor, and by nobody who
means another one.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from typing import NoReturn

import pytest

from rallypoint.host import memory
from rallypoint.host.memory import Mapped, Unfit, attach, published

SIZE = 200_000


def maps() -> int:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("/memfd:rallypoint " in line for line in file)  # and no lock's


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_another_process_sees_what_is_written_and_keeps_it_when_the_owner_is_killed() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        own = Mapped(SIZE)
        own.memory[100:105] = b"hello"
        os.write(writing, b"%d %d\n" % (own.fd, own.inode))
        signal.pause()
    with open(reading, "rb") as pipe:
        os.close(writing)
        fd, inode = map(int, pipe.readline().split())
    before = files()
    theirs = attach(child, fd, inode, SIZE)
    assert files() == before  # a mapping, and no descriptor
    assert published(child, fd, inode)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not published(child, fd, inode)
    assert bytes(theirs[100:105]) == b"hello"
    theirs[100:105] = b"there"
    with pytest.raises(FileNotFoundError):
        attach(child, fd, inode, SIZE)
    assert maps() == 1
    del theirs
    gc.collect()
    assert maps() == 0


def test_a_mapping_lives_as_long_as_a_view_of_it() -> None:
    own = Mapped(SIZE)
    part = own.memory[10:20]
    own.close()
    own.close()
    del own
    gc.collect()
    part[:] = b"0123456789"
    assert maps() == 1
    del part
    gc.collect()
    assert maps() == 0


def test_a_descriptor_that_is_something_else_is_refused_without_being_opened() -> None:
    own = Mapped(SIZE)
    reading, writing = os.pipe()
    try:
        with pytest.raises(Unfit, match="another one by now"):
            attach(os.getpid(), reading, own.inode, SIZE)
        with pytest.raises(Unfit, match="not the segment that was published"):
            attach(os.getpid(), own.fd, own.inode, own.capacity + 1)
    finally:
        os.close(reading)
        os.close(writing)
    plain = os.memfd_create("rallypoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(plain, SIZE)
        with pytest.raises(
            Unfit, match="not the segment that was published"
        ):  # it could be shrunk under whoever maps it
            attach(os.getpid(), plain, os.fstat(plain).st_ino, SIZE)
    finally:
        os.close(plain)


def test_a_segment_keeps_its_size() -> None:
    own = Mapped(SIZE)
    assert fcntl.fcntl(own.fd, fcntl.F_GET_SEALS) & memory.SEALS == memory.SEALS
    assert repr(own) == f"<Mapped {own.capacity} bytes, fd {own.fd}>"
    with pytest.raises(PermissionError):
        os.ftruncate(own.fd, 10)


def test_the_scope_is_the_same_in_a_child() -> None:
    here = memory.scope()
    assert len(here) == 16
    child = os.fork()
    if child == 0:
        os._exit(0 if memory.scope() == here else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.root
def test_without_what_proc_tells_nobody_shares_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """With /proc mounted subset=pid there is no boot_id: `store.average` of more than 48 KB ended
    with a bare FileNotFoundError.
    """

    def missing(*_: object) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory", "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(memory, "open", missing, raising=False)
    assert memory.scope() != memory.scope()


def test_another_user_has_another_scope() -> None:
    here = memory.scope()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(0 if memory.scope() != here else 1)
    assert os.waitpid(child, 0)[1] == 0
