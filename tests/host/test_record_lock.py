"""A lock of processes: who dies with it frees it, threads respect it, nothing that a program does
by accident drops it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from rallypoint.errors import UsageError, WouldDeadlock
from rallypoint.host import process_status, processes, record_lock
from rallypoint.host.record_lock import RecordLock

DEADLINE = 30.0  # seconds: for what takes milliseconds on a quiet machine


class Line:
    """One end of a conversation between a test and its child."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.settimeout(DEADLINE)

    def say(self) -> None:
        self._end.sendall(b".")

    def hear(self) -> None:
        assert self._end.recv(1) == b".", "the other one is gone"


class Child(Line):
    def __init__(self, end: socket.socket, pid: int) -> None:
        super().__init__(end)
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def child(run: Callable[[Line], object]) -> Iterator[Child]:
    """Run it in a fork; SIGKILL at the end, if it still runs."""
    ours, its = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            processes.die_with(parent)
            ours.close()
            run(Line(its))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    its.close()
    with ours:
        one = Child(ours, pid)
        yield one
        if one.pid:
            one.kill()


def holding(lock: RecordLock, who: str = "") -> Callable[[Line], None]:
    """For a child: get the lock, say so, give it back when told to, and say so."""

    def run(line: Line) -> None:
        assert lock.acquire(DEADLINE, who)
        line.say()
        line.hear()
        lock.release()
        line.say()
        line.hear()

    return run


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def lock() -> RecordLock:
    return RecordLock.create()


def test_processes_exclude_each_other(lock: RecordLock) -> None:
    with child(holding(lock, "rank 3")) as other:
        other.hear()
        assert not lock.acquire(0.0)
        assert not lock.acquire(0.05)
        held = lock.holder()
        assert held is not None
        assert (held.pid, held.who, held.holds, held.runs) == (other.pid, "rank 3", True, True)
        assert repr(lock) == f"<RecordLock: held by rank 3, pid {other.pid}>"
        other.say()
        other.hear()
        assert lock.acquire(DEADLINE)
        assert lock.left is None
        assert lock.mine
        lock.release()
        assert not lock.mine
        assert lock.holder() is None
        assert repr(lock) == "<RecordLock: free>"


@pytest.mark.parametrize("timeout", [math.inf, DEADLINE], ids=["no end", "with an end"])
def test_the_next_one_is_woken_by_a_release(lock: RecordLock, timeout: float) -> None:
    with child(holding(lock)) as other:
        other.hear()
        threading.Timer(0.1, other.say).start()
        assert lock.acquire(timeout)
        assert lock.left is None
        lock.release()


@pytest.mark.parametrize("timeout", [math.inf, DEADLINE], ids=["no end", "with an end"])
def test_the_next_one_is_woken_by_death_and_told_of_it(lock: RecordLock, timeout: float) -> None:
    with child(holding(lock, "rank 1")) as other:
        other.hear()
        pid = other.pid
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        began = time.monotonic()
        assert lock.acquire(timeout, "rank 2")
        assert time.monotonic() - began < DEADLINE / 2
        left = lock.left
        assert left is not None
        assert (left.pid, left.who, left.holds) == (pid, "rank 1", False)
        assert 0.0 <= began - left.since < DEADLINE
        lock.settled()
        lock.release()
        assert lock.acquire(0.0)
        assert lock.left is None, "it is told once"
        lock.release()


def test_whoever_waits_while_it_dies_sees_a_dead_process(lock: RecordLock) -> None:
    """The kernel frees a process's locks before the process is gone; that is death, too, and not a
    living one that lost its lock.
    """

    def run(line: Line) -> None:
        assert lock.acquire()
        line.say()
        line.hear()
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(30):
        with child(run) as other:
            other.hear()
            other.say()
            assert lock.acquire()
            assert lock.left is not None
            assert not lock.left.runs
            lock.settled()
            lock.release()


def test_death_is_told_of_until_somebody_deals_with_it(lock: RecordLock) -> None:
    with child(holding(lock)) as other:
        other.hear()
        pid = other.pid
        other.kill()
    assert repr(lock) == f"<RecordLock: left behind by somebody, pid {pid}>"
    for _ in range(2):
        assert lock.acquire()
        assert lock.left is not None
        assert lock.left.pid == pid
        assert not lock.left.runs
        lock.release()


def test_the_children_of_a_dead_holder_do_not_keep_it(lock: RecordLock) -> None:
    """What flock(2) and open file description locks do wrong: they belong to the open file, which a
    fork shares.
    """

    def run(line: Line) -> None:
        assert lock.acquire()
        if os.fork() == 0:
            line.say()
            line.hear()
            os._exit(0)
        signal.pause()

    with child(run) as other:
        other.hear()  # the grandchild lives
        assert not lock.acquire(0.0)
        other.kill()
        assert lock.acquire(DEADLINE)
        assert lock.left is not None
        lock.release()
        other.say()


def test_threads_exclude_each_other(lock: RecordLock) -> None:
    inside = 0
    most = 0

    def run() -> None:
        nonlocal inside, most
        for _ in range(300):
            assert lock.acquire(DEADLINE)
            inside += 1
            most = max(most, inside)
            time.sleep(0)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert most == 1


def test_a_thread_waits_for_another_one_no_longer_than_it_said(lock: RecordLock) -> None:
    assert lock.acquire()
    results: list[bool] = []
    for timeout in (0.0, 0.05):
        thread = threading.Thread(
            target=lambda timeout=timeout: results.append(lock.acquire(timeout))
        )
        thread.start()
        thread.join(DEADLINE)
    assert results == [False, False]
    held = lock.holder()
    assert held is not None
    assert (held.pid, held.holds) == (os.getpid(), True)
    lock.release()


def test_twice_in_one_thread_is_an_error_and_no_deadlock(lock: RecordLock) -> None:
    assert lock.acquire()
    with pytest.raises(WouldDeadlock) as caught:
        lock.acquire()
    assert caught.value.code == "lock-twice"
    assert lock.mine
    lock.release()


def test_only_the_holder_gives_it_back(lock: RecordLock) -> None:
    with pytest.raises(UsageError, match="does not hold"):
        lock.release()
    assert lock.acquire()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            lock.release()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(DEADLINE)
    assert "another thread" in str(errors[0])

    def forked(line: Line) -> None:
        with pytest.raises(UsageError, match="its parent held when it forked"):
            lock.release()
        assert not lock.acquire(0.0)

    with child(forked) as one:
        assert one.join() == 0
    with child(lambda line: lock.acquire(0.0) and os._exit(1)) as one:
        assert one.join() == 0, "it is the parent's still"
    lock.release()


def test_a_child_that_was_forked_while_a_thread_held_it(lock: RecordLock) -> None:
    """The thread did not come along; the child waits for the parent, not for a thread lock that
    nobody releases.
    """
    held, go_on = threading.Event(), threading.Event()

    def run() -> None:
        assert lock.acquire()
        held.set()
        go_on.wait(DEADLINE)
        lock.release()

    thread = threading.Thread(target=run)
    thread.start()
    assert held.wait(DEADLINE)

    def forked(line: Line) -> None:
        assert not lock.acquire(0.0)
        line.say()
        assert lock.acquire(DEADLINE)
        assert lock.left is None
        lock.release()

    with child(forked) as one:
        one.hear()
        go_on.set()
        assert one.join() == 0
    thread.join(DEADLINE)


def test_a_wait_with_an_end_takes_no_processor_time(lock: RecordLock) -> None:
    with child(holding(lock)) as other:
        other.hear()
        used, began = time.process_time(), time.monotonic()
        assert not lock.acquire(1.0)
        assert time.monotonic() - began >= 1.0
        assert time.process_time() - used < 0.1


def test_who_has_given_up_is_not_in_the_way(lock: RecordLock) -> None:
    def gives_up(line: Line) -> None:
        assert not lock.acquire(0.05)
        line.say()
        line.hear()

    with child(holding(lock)) as holder:
        holder.hear()
        with child(gives_up) as one:
            one.hear()
            holder.say()
            holder.hear()
            assert lock.acquire(DEADLINE)
            lock.release()
            one.say()


def test_waiting_starts_no_thread(lock: RecordLock) -> None:
    with child(holding(lock)) as holder:
        holder.hear()
        threads = process_status.threads()
        for _ in range(20):
            assert not lock.acquire(0.001)
        assert process_status.threads() <= threads


def test_a_stopped_one_in_the_queue_is_not_in_the_way(lock: RecordLock) -> None:
    """The wake-up that it swallows is for the others, too."""

    def run(line: Line) -> None:
        line.say()
        lock.acquire()

    assert lock.acquire()
    with child(run) as first, child(run) as second:
        first.hear()
        second.hear()
        os.kill(first.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        lock.release()
        assert second.join() == 0
        os.kill(first.pid, signal.SIGCONT)
        assert first.join() == 0


class Interrupted(Exception):
    """What the signal handler raises."""


@contextlib.contextmanager
def alarm(handler: Callable[[], None], first: float, then: float = 0.0) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        handler()

    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, first, then)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("timeout", [math.inf, 600.0], ids=["no end", "with an end"])
def test_a_signal_handler_that_raises_ends_the_wait(lock: RecordLock, timeout: float) -> None:
    def interrupt() -> None:
        raise Interrupted

    with child(holding(lock)) as other:
        other.hear()
        began = time.monotonic()
        with alarm(interrupt, 0.1), pytest.raises(Interrupted):
            lock.acquire(timeout)
        assert time.monotonic() - began < DEADLINE
        assert not lock.mine
        other.say()
        other.hear()
        assert lock.acquire(DEADLINE)
        lock.release()
        with child(holding(lock)) as third:
            third.hear()  # it is not held in secret


@pytest.mark.parametrize("timeout", [math.inf, 600.0], ids=["no end", "with an end"])
def test_a_signal_handler_that_returns_does_not(lock: RecordLock, timeout: float) -> None:
    ran: list[float] = []
    with child(holding(lock)) as other:
        other.hear()

        def handler() -> None:
            with pytest.raises(WouldDeadlock):
                lock.acquire()  # this thread is asking for it already
            ran.append(time.monotonic())
            if len(ran) == 3:
                other.say()

        with alarm(handler, 0.2, 0.02):  # while it waits
            assert lock.acquire(timeout)
        assert len(ran) >= 3
        lock.release()


def test_a_storm_of_signals_leaves_no_lock_behind(lock: RecordLock) -> None:
    """A handler that raises at any moment of acquire and release: whoever is through holds
    nothing.
    """

    def run(line: Line) -> None:
        sys.unraisablehook = lambda unraisable: None
        chance = random.Random(7)
        stormy = False
        raised = 0

        def handler() -> None:
            nonlocal raised
            if stormy and chance.random() < 0.5:
                raised += 1
                if raised % 2:  # a second one comes while what the first broke off is undone
                    signal.setitimer(signal.ITIMER_REAL, 0.000001 + chance.random() * 0.00002)
                raise Interrupted

        with alarm(handler, 1.0):
            for turn in range(3000):
                signal.setitimer(signal.ITIMER_REAL, 0.0)  # the last turn's would be a third
                try:
                    stormy = True
                    signal.setitimer(signal.ITIMER_REAL, 0.000005 + chance.random() * 0.00004)
                    if lock.acquire((math.inf, 0.01, 0.0)[turn % 3]):
                        lock.release()
                    stormy = False
                except Interrupted:
                    stormy = False
                if lock.mine:  # it came between the two calls
                    lock.release()
        assert raised > 50, raised
        line.say()
        line.hear()

    def contends(line: Line) -> None:
        while True:
            assert lock.acquire()
            assert lock.left is None
            lock.release()
            time.sleep(0.0001)

    with child(contends), child(run) as one:
        one.hear()
        assert lock.acquire(DEADLINE), repr(lock)
        assert lock.left is None
        lock.release()


def test_processes_that_wait_for_each_other_in_a_circle_but_have_threads() -> None:
    """A thread that waits is not the thread that holds."""
    first, second = RecordLock.create(), RecordLock.create()
    assert first.acquire()

    def run(line: Line) -> None:
        assert second.acquire()
        got = threading.Event()

        def wait() -> None:
            assert first.acquire()
            got.set()
            first.release()

        threading.Thread(target=wait, daemon=True).start()
        line.say()
        line.hear()
        second.release()
        assert got.wait(DEADLINE)

    with child(run) as other:
        other.hear()
        assert not second.acquire(0.1)
        threading.Timer(0.1, other.say).start()
        assert second.acquire()
        second.release()
        first.release()
        assert other.join() == 0


def test_a_note_outlives_its_writer(lock: RecordLock) -> None:
    def run(line: Line) -> None:
        assert lock.acquire()
        lock.leave_note(200)
        os.kill(os.getpid(), signal.SIGKILL)

    with child(run) as other:
        assert other.join() == -signal.SIGKILL
    assert lock.acquire()
    assert lock.note == 200
    lock.leave_note(0)
    lock.release()


class Arriving:
    """A descriptor as it comes out of a pickle."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        return os.dup(self.fd)


def test_a_second_descriptor_does_not_drop_the_lock(lock: RecordLock) -> None:
    before = descriptors()

    def is_held(line: Line) -> None:
        assert not lock.acquire(0.0)

    assert lock.acquire()
    assert record_lock._arrived(lock.token, Arriving(lock.fileno())) is lock
    os.close(os.dup(lock.fileno()))
    assert descriptors() == before
    with child(is_held) as one:
        assert one.join() == 0
    lock.release()


def test_one_object_per_process_however_it_arrives(lock: RecordLock) -> None:
    before = descriptors()
    for _ in range(100):
        assert pickle.loads(pickle.dumps(lock)) is lock
    assert descriptors() == before


def test_a_lock_that_goes_and_comes_again() -> None:
    lock = RecordLock.create()
    fd = os.dup(lock.fileno())
    token = lock.token
    del lock
    gc.collect()
    before = descriptors()
    again = record_lock._arrived(token, Arriving(fd))
    assert again.acquire()
    with child(lambda line: again.acquire(0.0) and os._exit(1)) as one:
        assert one.join() == 0
    again.release()
    assert descriptors() == before + 1
    os.close(fd)


def test_it_goes_to_a_process_that_has_it_not() -> None:
    """Through a pickle, while its sender lives; and when that has let it go, the error says so."""
    lock = RecordLock.create()
    data = pickle.dumps(lock)
    program = f"""
import pickle, sys
lock = pickle.loads({data!r})
assert not lock.acquire(0.05)
print(lock.holder().who)
"""
    assert lock.acquire(who="rank 7")
    assert run_python(program) == (0, "rank 7\n", "")
    lock.release()
    del lock
    gc.collect()
    rc, _, error = run_python(program)
    assert rc == 1
    assert (
        f"UsageError: shared memory that pid {os.getpid()} on {os.uname().nodename} sent cannot be taken over: "
        in error
    )


def run_python(program: str) -> tuple[int, str, str]:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


DROPS = """
import threading
from rallypoint.host.record_lock import RecordLock
locks, have, gone = [RecordLock.create()], threading.Event(), threading.Event()
other = RecordLock.create()
def work():
    locks[0].acquire()
    have.set()
    gone.wait()
    other.acquire()
    other.release()
    print("went on")
thread = threading.Thread(target=work)
thread.start()
have.wait()
locks.clear()
gone.set()
thread.join()
"""


def test_a_lock_that_another_thread_drops_stays_for_its_holder() -> None:
    """It was unmapped, and the holder's next lock ended the process by SIGSEGV."""
    assert run_python(DROPS) == (0, "went on\n", "")


def test_a_program_that_closes_our_descriptor_harms_nothing(lock: RecordLock) -> None:
    def run(line: Line) -> None:
        assert lock.acquire()
        os.close(lock.fileno())
        other = os.memfd_create("somebody else's")
        os.write(other, b"precious")
        line.say()
        line.hear()
        lock.release()
        assert os.pread(other, 100, 0) == b"precious"

    with child(run) as one:
        one.hear()
        assert not lock.acquire(0.0)
        one.say()
        assert lock.acquire(DEADLINE)
        assert lock.left is None
        lock.release()
        assert one.join() == 0


def test_a_thread_that_ended_with_it_is_told_apart_from_a_dead_process(lock: RecordLock) -> None:
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join(DEADLINE)
    assert lock.acquire(DEADLINE)
    assert lock.left is not None
    assert lock.left.runs
    lock.settled()
    lock.release()


def test_a_process_that_ends_by_itself_with_it_frees_it(lock: RecordLock) -> None:
    """Python unmaps what it has mapped when it ends, before the kernel looks whether a thread holds
    the mutex there.
    """
    program = f"""
import pickle
lock = pickle.loads({pickle.dumps(lock)!r})
assert lock.acquire(who="rank 3")
"""
    assert run_python(program) == (0, "", "")
    assert lock.acquire(DEADLINE)
    assert lock.left is not None
    assert (lock.left.who, lock.left.runs) == ("rank 3", False)
    lock.release()


def test_one_that_is_forgotten_while_it_is_held_does_no_harm() -> None:
    lock, other = RecordLock.create(), RecordLock.create()
    assert lock.acquire()
    del lock
    gc.collect()
    for _ in range(3):
        assert other.acquire()
        other.release()


def test_descriptors_and_threads_do_not_grow(lock: RecordLock) -> None:
    gc.collect()
    before, threads = descriptors(), process_status.threads()
    for turn in range(1000):
        assert lock.acquire((0.0, 1.0, math.inf)[turn % 3])
        lock.release()
    assert descriptors() == before
    assert process_status.threads() <= threads  # one of an earlier test may have been about to end
    locks = [RecordLock.create() for _ in range(50)]
    assert descriptors() == before + 50
    del locks
    assert descriptors() == before


def test_a_name_of_any_length(lock: RecordLock) -> None:
    assert lock.acquire(who="ä" * 100, doing="doing something at length")
    held = lock.holder()
    assert held is not None
    assert (held.who, held.doing) == ("ä" * 24, "doing something ")
    lock.release()


@pytest.mark.parametrize("seed", range(2))
def test_nobody_is_ever_beside_anybody_while_holders_are_killed(
    lock: RecordLock, seed: int
) -> None:
    """Four processes with two threads each; one after the other is killed, wherever it is, and
    replaced.
    """
    chance = random.Random(seed)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    view = memoryview(page).cast("Q")  # 0: who is inside; 1: entries, 2: met somebody inside

    def work(line: Line) -> None:
        def loop(me: int) -> None:
            own = random.Random(me)
            while True:
                if not lock.acquire(own.choice((math.inf, 0.001, 0.0))):
                    continue
                if view[0] != 0 and lock.left is None:
                    view[2] += 1
                lock.settled()
                view[0] = me
                entered = view[1]
                for _ in range(own.randrange(100)):
                    pass
                if view[0] != me:
                    view[2] += 1
                view[1] = entered + 1
                view[0] = 0
                lock.release()

        me = os.getpid() * 10
        threading.Thread(target=loop, args=(me + 1,), daemon=True).start()
        line.say()
        loop(me)

    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(child(work)) for _ in range(4)]
        for _ in range(6):
            victim = workers.pop(0)
            victim.hear()
            seen = view[1]
            until(lambda seen=seen: view[1] > seen + chance.randrange(50))  # type: ignore[misc]
            victim.kill()
            workers.append(stack.enter_context(child(work)))
    assert view[2] == 0
    assert lock.acquire(DEADLINE)
    lock.release()
    view.release()


def test_a_c_library_that_knows_only_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc before 2.30, as on RHEL 8, and musl have no pthread_mutex_clocklock."""
    monkeypatch.setattr(record_lock, "_clocklock", None)
    lock = RecordLock.create()
    assert lock.acquire()
    outcome: list[bool] = []
    waiter = threading.Thread(target=lambda: outcome.append(lock.acquire(timeout=0.1)))
    waiter.start()
    waiter.join()
    assert outcome == [False]

    def take() -> None:
        outcome.append(lock.acquire(timeout=30))
        lock.release()

    second = threading.Thread(target=take)
    second.start()
    lock.release()
    second.join()
    assert outcome == [False, True]
