from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import socket
import threading

import pytest

from rallypoint.host import memory
from rallypoint.host.memory import Pool, Segment, Unfit, capacity_for, create, received

MIB = 1024 * 1024


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def inode(segment: Segment) -> int:
    return os.fstat(segment.fileno()).st_ino


def test_what_is_written_is_read() -> None:
    pool = Pool()
    segment = pool.take(100_000)
    data = os.urandom(100_000)
    segment.write(data[:40_000], 0)
    segment.write(data[40_000:], 40_000)
    into = bytearray(200_000)
    assert segment.read(memoryview(into), 0) == 100_000
    assert into[:100_000] == data
    assert segment.read(memoryview(into)[:10], 99_995) == 5
    assert segment.read(memoryview(into), 100_000) == 0
    with pytest.raises(ValueError, match="do not fit"):
        segment.write(b"x", segment.capacity)
    del segment
    pool.close()


def test_a_segment_keeps_its_size() -> None:
    fd = create(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert not fcntl.fcntl(fd, fcntl.F_GETFD) & ~fcntl.FD_CLOEXEC
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_the_pool_uses_memory_again_and_is_bounded() -> None:
    before = open_files()
    pool = Pool(keep_bytes=3 * MIB)
    first = pool.take(MIB)
    number = inode(first)
    del first
    again = pool.take(MIB - 1000)
    assert inode(again) == number
    assert again.size == MIB - 1000
    several = [pool.take(MIB) for _ in range(10)]
    assert len({inode(segment) for segment in several} | {number}) == 11
    del several, again
    pool.tidy()
    assert open_files() == before + 3
    pool.close()
    assert open_files() == before


def test_a_pool_that_is_closed_takes_nothing_back() -> None:
    before = open_files()
    pool = Pool()
    kept = pool.take(MIB)
    pool.take(MIB)
    pool.close()
    pool.close()
    assert open_files() == before + 1
    del kept
    assert open_files() == before


def test_small_segments_are_bounded_in_number() -> None:
    before = open_files()
    pool = Pool()
    many = [pool.take(1) for _ in range(memory.POOL_SEGMENTS + 20)]
    del many
    pool.tidy()
    assert open_files() == before + memory.POOL_SEGMENTS
    pool.close()


def test_segments_may_be_dropped_by_any_thread() -> None:
    pool = Pool()
    segments = [[pool.take(MIB)] for _ in range(20)]
    threads = [threading.Thread(target=box.clear) for box in segments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pool.dropped) == 20
    pool.close()


def test_an_abandoned_segment_is_not_used_again() -> None:
    pool = Pool()
    segment = pool.take(MIB)
    number = inode(segment)
    copy = os.dup(segment.fileno())
    segment.abandon()
    del segment
    assert inode(pool.take(MIB)) != number
    os.close(copy)
    pool.close()


def test_close_closes_once() -> None:
    pool = Pool()
    segment = pool.take(MIB)
    before = open_files()
    segment.close()
    segment.close()
    del segment
    assert open_files() == before - 1
    assert not pool.dropped


def test_a_close_that_a_signal_handler_interrupts_closes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python runs a signal handler when `os.close` has returned: the descriptor is closed, and the
    next statement may never run. A second close would meet what another thread has opened."""
    segment = Segment(create(100), 100, 100)
    close = os.close

    def interrupted(fd: int) -> None:
        close(fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segment.close()
    monkeypatch.undo()
    others = os.open(os.devnull, os.O_RDONLY)
    segment.close()
    del segment
    os.close(others)


@pytest.mark.parametrize(
    "size", [1, 65536, 65537, MIB, MIB + 1, 7_000_000, 64 * MIB + 100, 3 * 1024 * MIB]
)
def test_capacity(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity <= max(memory.SMALLEST, size * 9 // 8 + 1)
    assert capacity_for(capacity) == capacity


def test_a_received_segment() -> None:
    told: list[tuple[int, int]] = []
    segment = received(create(MIB), 1000, lambda fd, capacity: told.append((fd, capacity)))
    assert (segment.size, segment.capacity) == (1000, MIB)
    fd = segment.fileno()
    del segment
    assert told == [(fd, MIB)]
    os.close(fd)


def test_what_is_no_segment_is_refused_and_closed() -> None:
    before = open_files()
    plain = os.memfd_create("plain")
    with pytest.raises(Unfit, match="not sealed"):
        received(plain, 1)
    with pytest.raises(Unfit, match="not a memfd"):
        received(os.open("/dev/null", os.O_RDWR), 1)
    for size in (0, -1, MIB + 1):
        with pytest.raises(Unfit, match="are announced"):
            received(create(MIB), size)
    assert open_files() == before


def test_memory_dies_with_its_last_user() -> None:
    """A process that is killed with a segment in its hands, and one on its way to us,
    leaves none.
    """

    def used(number: int) -> list[str]:
        """What of this process holds the segment, which the kernel frees with the last of it. How
        much shared memory the machine has says less: others take and free some meanwhile.
        """
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the folder's own
                link = os.readlink(f"/proc/self/fd/{name}")
                if "memfd:" in link and os.stat(int(name)).st_ino == number:
                    found.append(link)
        with open("/proc/self/maps", encoding="utf-8") as lines:
            return found + [line for line in lines if "memfd:" in line and f" {number} " in line]

    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        fd = create(64 * MIB)
        for at in range(64):
            os.pwrite(fd, bytes(MIB), at * MIB)
        socket.send_fds(theirs, [b"x"], [fd])
        signal.pause()
        os._exit(0)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    segment = received(fds[0], 64 * MIB)
    number = inode(segment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    into = bytearray(MIB)
    assert segment.read(memoryview(into), 63 * MIB) == MIB, "it lives as long as we use it"
    gc.collect()
    assert used(number), "we hold it"
    segment.close()
    assert used(number) == []
    ours.close()
