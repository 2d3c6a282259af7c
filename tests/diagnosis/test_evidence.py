"""Memory counters from trees of files as the kernel writes them."""

from __future__ import annotations

import os
import pathlib
import resource

import pytest

from rallypoint.diagnosis.evidence import (
    MemoryCounters,
    difference,
    kernel_oom_kills,
    memory_counters,
)


def write(root: pathlib.Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_version_2(tmp_path: pathlib.Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "sys/fs/cgroup/user.slice/job/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 1\n",
            "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job/memory.current": "5\n",
            "sys/fs/cgroup/user.slice/memory.events": "oom_kill 9\n",
            "sys/fs/cgroup/user.slice/memory.max": "1073741824\n",
            "sys/fs/cgroup/user.slice/memory.current": "1000000000\n",
        },
    )
    counters = memory_counters(root)
    assert (counters.oom_kills, counters.limit, counters.current) == (3, 1 << 30, 1000000000)
    assert counters.path.endswith("job/memory.events")


def test_a_container_that_sees_only_its_own_part(tmp_path: pathlib.Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../elsewhere\n",
        "sys/fs/cgroup/memory.events": "oom_kill 1\n",
        "sys/fs/cgroup/memory.max": "4096\n",
    }
    counters = memory_counters(write(tmp_path, files))
    assert (counters.oom_kills, counters.limit) == (1, 4096)


def test_version_1(tmp_path: pathlib.Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
        },
    )
    counters = memory_counters(root)
    assert (counters.oom_kills, counters.limit, counters.current) == (2, 8192, 4096)


def test_a_system_that_tells_nothing(tmp_path: pathlib.Path) -> None:
    assert memory_counters(str(tmp_path)) == MemoryCounters()
    assert not difference(MemoryCounters(), MemoryCounters()).counted


def test_the_difference_of_two_looks() -> None:
    seen = difference(MemoryCounters(1, path="a"), MemoryCounters(3, 4096, 5, path="a"), (7,), True)
    assert (seen.oom_kills, seen.counted, seen.limit, seen.killed_pids) == (2, True, 4096, (7,))
    assert not difference(MemoryCounters(1, path="a"), MemoryCounters(3, path="b")).counted


def test_the_limits_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL comes at the second of the two limits on processor time."""
    limits = {resource.RLIMIT_AS: (4096, -1), resource.RLIMIT_CPU: (30, 60)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    seen = difference(MemoryCounters(), MemoryCounters())
    assert (seen.address_space, seen.processor_time) == (4096, 60)


def test_the_kernels_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1000000,-;Memory cgroup out of memory: Killed process 11 (python)\n"
        "3,2,90000000,-;Out of memory: Killed process 22 (python) total-vm:1kB\n"
        " SUBSYSTEM=memory\n"
        "3,3,91000000,-,caller=T1;Memory cgroup out of memory: Killed process 33 (python)\n"
        "6,4,92000000,-;usb 1-1: new device\n"
    )
    assert kernel_oom_kills(80.0, str(log)) == ((22, 33), True)
    assert kernel_oom_kills(80.0, str(tmp_path / "none")) == ((), False)


def test_a_log_that_says_nothing_now_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    try:
        assert kernel_oom_kills(0.0, str(fifo)) == ((), True)
    finally:
        os.close(writer)


def test_this_very_machine() -> None:
    counters = memory_counters()
    assert counters.oom_kills >= 0
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read here")
    assert isinstance(kernel_oom_kills(0.0)[1], bool)
