"""Processes of ours are found, signalled and ended; nobody else's are."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rallypoint.host import process_status, processes, system_calls

MARKER = f"RALLYPOINT_JOB=test-of-processes-{os.getpid()}"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process with our marker, in a session of its own, that has said it is up."""
    program = "import sys, time; print('up', flush=True); time.sleep(1000)"
    name, _, value = MARKER.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, name: value},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_a_group_that_is_not_ours_is_refused() -> None:
    """`killpg(0)` is the caller's own group: it once took the user's shell along."""
    for leader in (-1, 0, 1):
        with pytest.raises(ValueError, match="leads no group of ours"):
            processes.send_group(leader, signal.SIGKILL)


def test_status_of_a_process(child: subprocess.Popen[bytes]) -> None:
    found = process_status.status(child.pid)
    assert found is not None
    assert (found.pid, found.parent, found.session) == (child.pid, os.getpid(), child.pid)
    assert found.started > 0
    assert "sleep(1000)" in process_status.command_line(child.pid)
    assert process_status.resident(child.pid) > 1_000_000


def test_a_command_of_several_lines_is_one_line() -> None:
    """A line that named such a process had become several."""
    pipe = subprocess.PIPE
    command = ["sh", "-c", "echo\nread line\nexit"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as several:
        assert several.stdout is not None
        several.stdout.readline()  # until then the kernel may have no command line of it yet
        assert process_status.command_line(several.pid) == "sh -c echo read line exit"


def test_a_main_thread_that_does_not_run_shows_the_same_activity_twice(
    child: subprocess.Popen[bytes],
) -> None:
    """And one that ran does not: this process's own, which waited in between."""
    until = time.monotonic() + 30.0
    before = process_status.activity(child.pid)
    while (
        (after := process_status.activity(child.pid)) != before
        or before is None
        or before.state != "S"
    ):  # it may be on its way to sleep
        assert time.monotonic() < until
        before = after
    own = process_status.activity(os.getpid())
    select.select([], [], [], 0.01)
    later = process_status.activity(os.getpid())
    assert own is not None
    assert later is not None
    assert later.waits > own.waits
    assert later.switches - own.switches >= later.waits - own.waits
    assert process_status.cpu_seconds(os.getpid()) > 0


def wait_until_stopped(pid: int) -> None:
    until = time.monotonic() + 30.0
    while not process_status.is_stopped(pid):
        assert time.monotonic() < until


def test_a_stopped_process_keeps_a_signal_pending(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    wait_until_stopped(child.pid)
    found = process_status.activity(child.pid)
    assert found is not None
    assert found.state == "T"
    assert not process_status.is_pending(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGTERM)
    assert process_status.is_pending(child.pid, signal.SIGTERM)


def test_status_of_none() -> None:
    assert process_status.activity(2**22 + 1) is None
    assert process_status.kernel_wait(2**22 + 1) == ""
    assert process_status.cpu_seconds(2**22 + 1) == 0.0
    assert process_status.status(2**22 + 1) is None
    assert process_status.resident(2**22 + 1) == 0
    assert process_status.command_line(2**22 + 1) == ""


def test_the_family_is_found_by_marker_and_by_session(child: subprocess.Popen[bytes]) -> None:
    by_marker = processes.family(MARKER.encode(), [])
    assert [one.pid for one in by_marker] == [child.pid]
    by_session = processes.family(b"NO=SUCH", [child.pid])
    assert [one.pid for one in by_session] == [child.pid]
    assert processes.family(b"NO=SUCH", []) == []
    assert processes.family(MARKER.encode(), [child.pid], spare=[child.pid]) == []


def test_the_family_is_ended(child: subprocess.Popen[bytes]) -> None:
    assert processes.kill_family(MARKER.encode(), [], deadline=20) == []
    assert child.wait(20) == -signal.SIGKILL


def test_who_cleans_up_after_the_family_ends_by_itself(child: subprocess.Popen[bytes]) -> None:
    """Torch's manager of shared memory removes it 2 s after its last user; it was killed."""
    environment = dict([MARKER.split("=", 1)])
    with subprocess.Popen(
        ["torch_shm_manager"], executable="/bin/cat", stdin=subprocess.PIPE, env=environment
    ) as manager:
        assert processes.kill_family(MARKER.encode(), [], deadline=20) == []
        assert child.wait(20) == -signal.SIGKILL
        assert manager.poll() is None
        os.kill(manager.pid, signal.SIGSTOP)  # it would stay
        wait_until_stopped(manager.pid)
        assert processes.kill_family(MARKER.encode(), [], deadline=20) == []
        assert manager.wait(20) == -signal.SIGKILL


def test_the_family_is_ended_when_one_of_it_goes_meanwhile(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that was reaped, and whose number is still that of a session, Linux before 6.15
    says "invalid argument". That ended the launcher in the middle of its clean-up.
    """
    opened = system_calls.pidfd_open

    def first_refused(pid: int) -> int:
        monkeypatch.setattr(system_calls, "pidfd_open", opened)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(system_calls, "pidfd_open", first_refused)
    assert processes.kill_family(MARKER.encode(), [], deadline=20) == []
    assert child.wait(20) == -signal.SIGKILL


def test_a_family_of_more_processes_than_descriptors_is_ended() -> None:
    """The launcher died of "too many open files" where its ranks had left more processes than it may
    open descriptors, and those lived on: its guard has the same limit.
    """
    program = """
import resource, subprocess
from rallypoint.host import processes
children = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(40)]
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
print(processes.kill_family(b"", [child.pid for child in children], deadline=20))
print({child.wait() for child in children})
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("[]\n{-9}\n", "")


def test_members_of_a_group_without_its_leader() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 1000 & echo $!; exit"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        info = os.waitid(
            os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT
        )  # not reaped: its group's number is still its own
        assert info is not None
        assert processes.ended(info) == (0, 0)
        assert [one.pid for one in processes.group_members(leader.pid)] == [pid]
        pidfd = os.pidfd_open(pid)
        assert processes.send_group(leader.pid, signal.SIGKILL)
        assert processes.wait_for_ends([pidfd], 20)
        os.close(pidfd)


def test_a_process_that_has_no_group_of_its_own_yet_is_signalled_itself() -> None:
    """A stop in the moment after the fork was lost: the rank ran until its grace was over."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        was_sent = processes.send_group(child.pid, signal.SIGTERM)
        child.kill()
    assert was_sent
    assert not processes.send_group(child.pid, signal.SIGTERM)


def test_a_wait_for_ends_has_an_end(child: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(child.pid)
    assert not processes.wait_for_ends([pidfd], 0.01)
    assert processes.send(pidfd, signal.SIGKILL)
    assert processes.wait_for_ends([pidfd], 20)
    child.wait()
    assert not processes.send(
        pidfd, signal.SIGKILL
    )  # it is gone, and the pidfd cannot mean anybody else
    os.close(pidfd)


def test_whether_a_signal_is_handled(child: subprocess.Popen[bytes]) -> None:
    assert process_status.handles(child.pid, signal.SIGINT)  # Python's KeyboardInterrupt
    assert not process_status.handles(child.pid, signal.SIGURG)
    assert not process_status.is_handling(child.pid, signal.SIGINT)


def test_a_pending_signal_is_being_handled(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    os.kill(child.pid, signal.SIGINT)
    assert process_status.is_handling(child.pid, signal.SIGINT)


def test_where_a_main_thread_stands(child: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 20
    while (
        first := process_status.main_thread_place(child.pid)
    ) is None:  # it has said "up" and is on its way to sleep
        assert time.monotonic() < until
    assert process_status.main_thread_place(child.pid) == first
    assert process_status.main_thread_place(2**22 + 1) is None


def test_a_child_dies_with_its_parent() -> None:
    """The whole chain: a parent is killed, its child had asked to go with it."""
    program = (
        "import os, sys, time\nfrom rallypoint.host import processes\nparent = os.getpid()\npid = os.fork()\n"
        "if pid == 0:\n    processes.die_with(parent)\n    print(os.getpid(), flush=True)\n    time.sleep(1000)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.kill()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(20_000)
        os.close(pidfd)


def test_the_sockets_of_a_process() -> None:
    with socket.socket() as one, socket.socket() as two:
        inodes = {os.fstat(sock.fileno()).st_ino for sock in (one, two)}
        assert inodes <= process_status.sockets(os.getpid())
    assert not inodes & process_status.sockets(os.getpid())
    assert process_status.sockets(2**22) == set()  # nobody: the largest pid there is lies below


def test_a_signal_that_the_main_thread_holds_back() -> None:
    assert not process_status.blocks(os.getpid(), signal.SIGUSR2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        assert process_status.blocks(os.getpid(), signal.SIGUSR2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_what_is_left_of_a_call_is_the_same_call() -> None:
    restart = "219" if os.uname().machine == "x86_64" else "128"
    # arguments, stack, instruction
    rest = "0x7ffe4d3b00f8 0x1 0x1b7740 0x0 0x0 0x0 0x7ffe4d3b0090 0x7efd73f1a26f\n"
    assert process_status.is_same_call(f"7 {rest}", f"7 {rest}")
    assert process_status.is_same_call(f"7 {rest}", f"{restart} {rest}")
    assert process_status.is_same_call(f"{restart} {rest}", f"7 {rest}")
    assert not process_status.is_same_call(f"7 {rest}", f"202 {rest}")
    assert not process_status.is_same_call(
        f"7 {rest}", f"{restart} {rest.replace('0x1b7740', '0x1b7741')}"
    )
    assert not process_status.is_same_call("do_poll", "futex_wait"), (
        "where only the name of the place is told"
    )


def test_threads_of_another_pid_namespace_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc shows other processes than ours, the threads of one that happened to have the
    same number were taken for a rank's.
    """
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert process_status.other_threads(os.getpid())
        monkeypatch.setattr(process_status, "_PROC", "/proc/of-another-namespace")
        assert process_status.other_threads(os.getpid()) == {}
    finally:
        done.set()
        thread.join()
