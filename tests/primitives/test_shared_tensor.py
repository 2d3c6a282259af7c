"""A tensor that processes share: what it is, what its lock says, and that its changes are whole or
absent.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rallypoint import LockAbandoned, LockTimeout, SharedTensor, UsageError, WouldDeadlock
from rallypoint.host import processes
from rallypoint.host.record_lock import RecordLock
from rallypoint.primitives import shared_tensor, shared_tensor_lock

pytestmark = pytest.mark.usefixtures("torch_in_parts")

torch = pytest.importorskip("torch")

DEADLINE = 60.0
SCRIPTS = Path(__file__).with_name("scripts")


class Child:
    """A fork that runs something with the other end of a socket, and is killed at the end."""

    def __init__(self, run: Callable[[socket.socket], object]) -> None:
        self.end, its = socket.socketpair()
        self.end.settimeout(DEADLINE)
        its.settimeout(DEADLINE)
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            status = 1
            try:
                processes.die_with(parent)
                self.end.close()
                torch.set_num_threads(1)
                run(its)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        its.close()

    def hear(self) -> None:
        assert self.end.recv(1), "it is gone"

    def say(self) -> None:
        self.end.sendall(b".")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


@contextmanager
def child(run: Callable[[socket.socket], object]) -> Iterator[Child]:
    one = Child(run)
    with one.end:
        try:
            yield one
        finally:
            if one.pid:
                one.kill()


def hold(
    shared: SharedTensor, change: Callable[[Any], object] = lambda tensor: None
) -> Callable[[socket.socket], None]:
    def run(end: socket.socket) -> None:
        with shared.locked() as tensor:
            change(tensor)
            end.sendall(b".")
            end.recv(1)

    return run


def open_memory() -> list[str]:
    gc.collect()
    links = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    ]
    return sorted(link for link in links if "memfd:rallypoint" in link)


# -- a tensor
# --------------------------------------------------------------------------------------------------


SHAPES = [(), (0,), (3, 0), (1,), (7,), (2, 3, 4)]
TYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int8", "uint8", "uint16", "bool", "complex64",
    "complex128",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_every_shape_and_type(shape: tuple[int, ...], name: str) -> None:
    dtype = getattr(torch, name)
    shared = SharedTensor(shape, dtype)
    assert (shared.tensor.shape, shared.tensor.dtype, shared.tensor.device.type) == (
        shape,
        dtype,
        "cpu",
    )
    assert (shared.shape, shared.dtype, shared.nbytes) == (
        shape,
        dtype,
        shared.tensor.numel() * dtype.itemsize,
    )
    assert shared.tensor.is_contiguous()
    assert (
        shared.tensor.float().abs().sum() == 0
        if not dtype.is_complex
        else shared.tensor.abs().sum() == 0
    )
    values = torch.randint(0, 2, shape).to(dtype)
    assert shared.copy_(values) is shared
    assert torch.equal(
        shared.tensor.view(torch.uint8) if shape else shared.tensor,
        values.view(torch.uint8) if shape else values,
    )


def test_a_fork_reads_every_shape_and_type() -> None:
    shared = [SharedTensor(shape, getattr(torch, name)) for shape in SHAPES for name in TYPES]
    values = [torch.randint(0, 2, one.shape).to(one.dtype) for one in shared]

    def read(end: socket.socket) -> None:
        for one, expected in zip(shared, values, strict=True):
            assert torch.equal(one.tensor.to(torch.complex128), expected.to(torch.complex128))

    for one, expected in zip(shared, values, strict=True):
        one.copy_(expected)
    with child(read) as process:
        assert process.join() == 0


def test_the_default_type_and_other_spellings_of_a_shape() -> None:
    assert SharedTensor(3).tensor.shape == (3,)
    assert SharedTensor([2, 3]).dtype is torch.get_default_dtype()
    assert SharedTensor(torch.Size((2, 3)), torch.int8).tensor.shape == (2, 3)
    assert SharedTensor(torch.tensor(4).item()).shape == (4,)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("abc",), TypeError, "a shape is an int or a sequence of ints, not a str"),
        ((2.0,), TypeError, "a shape is an int or a sequence of ints, not a float"),
        (((2, -1),), UsageError, "the shape (2, -1) has a negative length"),
        ((2, "float32"), TypeError, "dtype='float32': a torch.dtype, not a str"),
        ((2, torch.quint8), UsageError, "a SharedTensor cannot be quantized (torch.quint8)"),
    ],
)
def test_what_cannot_be_one(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        SharedTensor(*arguments)


def test_from_a_tensor() -> None:
    source = torch.arange(6.0, requires_grad=True).reshape(2, 3).t()
    shared = SharedTensor.from_tensor(source)
    assert torch.equal(shared.tensor, source.detach())
    assert not shared.tensor.requires_grad
    assert shared.tensor.is_contiguous()
    shared.add_(1)
    assert source[0, 0] == 0


def test_it_says_what_it_is_and_who_has_it() -> None:
    shared = SharedTensor((2, 3))
    assert repr(shared) == "<SharedTensor float32 (2, 3), 24 bytes, free>"
    with shared.locked():
        assert repr(shared) == "<SharedTensor float32 (2, 3), 24 bytes, held by this thread>"
        shown: list[str] = []
        thread = threading.Thread(target=lambda: shown.append(repr(shared)))
        thread.start()
        thread.join(DEADLINE)
        assert re.fullmatch(
            r"<SharedTensor float32 \(2, 3\), 24 bytes, held by another thread of this process for \d+\.\d s>",
            shown[0],
        )
    with child(hold(shared)) as other:
        other.hear()
        pid = other.pid
        assert re.fullmatch(
            rf"<SharedTensor float32 \(2, 3\), 24 bytes, held by pid {pid} for \d+\.\d s>",
            repr(shared),
        )
        other.kill()
        assert (
            repr(shared)
            == f"<SharedTensor float32 (2, 3), 24 bytes, free: pid {pid} died with the lock>"
        )


def test_the_tensor_is_one_object_at_one_address() -> None:
    shared = SharedTensor(4)
    tensor, address = shared.tensor, shared.tensor.data_ptr()
    shared.add_(1).copy_([1, 2, 3, 4])
    assert shared.tensor is tensor
    assert tensor.data_ptr() == address
    assert tensor.tolist() == [1, 2, 3, 4]
    tensor.requires_grad_()
    shared.add_(1)
    assert tensor.tolist() == [2, 3, 4, 5]


def test_the_memory_goes_with_its_last_user() -> None:
    before = open_memory()
    shared = SharedTensor(1000)
    shared.add_(1)
    assert len(open_memory()) > len(before)
    tensor = shared.tensor
    del shared
    assert tensor.sum() == 1000, "it lives for as long as the tensor"
    del tensor
    assert open_memory() == before


def test_it_takes_nothing_from_dev_shm_and_its_size_once() -> None:
    def shared_memory() -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem"))

    megabytes = 32 << 20
    before, there = shared_memory(), set(os.listdir("/dev/shm"))
    shared = SharedTensor(megabytes // 4)
    shared.tensor.fill_(1.0)
    assert 0.9 * megabytes < shared_memory() - before < 1.5 * megabytes, (
        "what stands beside is not there before it is needed"
    )
    shared.add_(1)
    assert shared_memory() - before < 2.5 * megabytes
    assert set(os.listdir("/dev/shm")) <= there
    del shared
    gc.collect()
    assert shared_memory() - before < 0.1 * megabytes


def test_a_saved_tensor_is_no_larger_than_it_is(tmp_path: Path) -> None:
    shared = SharedTensor(1000)
    shared.add_(1)
    torch.save(shared.tensor, tmp_path / "saved.pt")
    assert (tmp_path / "saved.pt").stat().st_size < 4000 + 2000


def test_made_under_another_default_device_and_inference_mode() -> None:
    with torch.device("meta"):
        shared = SharedTensor(2)
        shared.add_(1)
        shared.copy_([1, 2])
    assert shared.tensor.tolist() == [1, 2]
    with torch.inference_mode():
        shared = SharedTensor(2)
        shared.add_(torch.ones(2))
    shared.add_(1)
    shared.tensor.mul_(2)
    assert shared.tensor.tolist() == [4, 4]


# -- add_ and copy_
# --------------------------------------------------------------------------------------------------


def test_they_do_what_torchs_own_do() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        for x in (
            2,
            torch.tensor(3),
            torch.arange(3),
            torch.arange(6).reshape(3, 2).t(),
            torch.ones(2, 1, dtype=torch.bool),
        ):
            for alpha in (1, -2):
                shared, plain = SharedTensor((2, 3), dtype), torch.zeros(2, 3, dtype=dtype)
                for _ in range(2):
                    assert torch.equal(
                        shared.add_(x, alpha=alpha).tensor, plain.add_(x, alpha=alpha)
                    )
                assert torch.equal(shared.copy_(x).tensor, plain.copy_(torch.as_tensor(x)))


def test_inputs_of_every_kind() -> None:
    shared = SharedTensor(3)
    x = torch.ones(3, requires_grad=True)
    shared.add_(x * 2).add_(torch.nn.Parameter(torch.ones(3)))
    assert not shared.tensor.requires_grad
    assert shared.tensor.tolist() == [3, 3, 3]
    shared.copy_(shared.tensor.flip(0)).add_(shared.tensor)
    assert shared.tensor.tolist() == [6, 6, 6]
    shared.copy_([1.5, 2, 3])
    shared.copy_(7)
    shared.add_(0.5, alpha=2)
    assert shared.tensor.tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda to: to.add_(torch.ones(4)),
        lambda to: to.add_(torch.ones(2, 3)),
        lambda to: to.copy_(torch.ones(2, 3)),
        lambda to: to.add_(torch.ones(3), alpha=1j),
        lambda to: to.add_("x"),
    ],
)
def test_what_torch_refuses_is_refused_with_its_own_words_and_changes_nothing(
    wrong: Callable[[Any], object],
) -> None:
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        wrong(torch.ones(3))
    shared = SharedTensor.from_tensor(torch.ones(3))
    with pytest.raises(torchs.type) as ours:
        wrong(shared)
    if torchs.type is RuntimeError:
        assert str(ours.value) == str(torchs.value)
    assert shared.tensor.tolist() == [1, 1, 1]
    assert repr(shared).endswith("free>")
    shared.add_(1)
    assert shared.tensor.tolist() == [2, 2, 2]


def test_a_float_does_not_go_into_integers() -> None:
    with pytest.raises(RuntimeError, match="can't be cast"):
        SharedTensor(2, torch.int64).add_(0.5)


def test_in_the_block_they_use_the_lock_that_is_held() -> None:
    shared = SharedTensor(2)
    with shared.locked() as tensor:
        shared.add_(1, timeout=0.0)
        shared.copy_(tensor * 2)
        assert tensor.tolist() == [2, 2]
        assert repr(shared).endswith("held by this thread>")
    assert repr(shared).endswith("free>")


@pytest.mark.torch
def test_a_change_is_whole_or_absent_wherever_its_writer_is_killed() -> None:
    """Each way is tried in a tensor of its own, both after one import of torch."""
    told = script("killed.py", "6")
    assert re.findall(r"^(.*): \d+ finished for the dead$", told, re.MULTILINE) == ["add_", "copy_"]


@pytest.mark.torch
def test_a_fork_of_a_process_that_has_computed_with_several_threads() -> None:
    """torch's own operations hang there, since OpenMP waits for threads that did not come along;
    ours must not, with the lock held.
    """
    assert script("after_openmp.py") == "10000000 3.0\n"


@pytest.mark.parametrize("note", [0, 1])
def test_a_writer_that_is_killed_before_the_copy_and_in_it(
    note: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its note it has changed nothing; after it the next holder finishes, whatever was
    copied so far.
    """
    shared = SharedTensor(1000)
    shared.copy_(1)

    leave_note = RecordLock.leave_note

    def run(end: socket.socket) -> None:
        def die(value: int) -> None:
            if note:
                leave_note(shared._lock, 1)
                shared.tensor[:500] = 5
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(type(shared._lock), "leave_note", lambda self, value: die(value))
        shared.copy_(5)

    with child(run) as one:
        assert one.join() == -signal.SIGKILL
    if note:
        assert shared.tensor[499] == 5
        assert shared.tensor[500] == 1
    with shared.locked() as tensor:
        assert tensor.eq(5 if note else 1).all()
    assert shared.add_(1).tensor.eq(6 if note else 2).all()


# -- the lock
# --------------------------------------------------------------------------------------------------


def test_twice_in_one_thread() -> None:
    shared = SharedTensor(2)
    with shared.locked():
        with pytest.raises(WouldDeadlock) as caught, shared.locked():
            pass
        with pytest.raises(WouldDeadlock), pickle.loads(pickle.dumps(shared)).locked():
            pass
        assert repr(shared).endswith("held by this thread>")
    assert caught.value.code == "lock-twice"
    assert "SharedTensor float32 (2,), 8 bytes, held by this thread" in str(caught.value)


def test_a_timeout_names_the_holder() -> None:
    shared = SharedTensor((2, 3))
    with child(hold(shared)) as other:
        other.hear()
        with pytest.raises(LockTimeout) as caught, shared.locked(timeout=0.05):
            pass
        error = caught.value
        assert (error.code, error.holder) == ("lock-timeout", f"pid {other.pid}")
        assert 0.05 <= error.held_for < DEADLINE
        pattern = rf"the lock of SharedTensor float32 \(2, 3\), 24 bytes was not had within 0.05 s: pid {other.pid} holds it for \d\.\d s"
        assert re.fullmatch(pattern, str(error))
        assert error.why == ()
        assert isinstance(error, TimeoutError)
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        with pytest.raises(LockTimeout) as caught:
            shared.add_(1, timeout=0.0)
        assert caught.value.why == (f"pid {other.pid} is stopped (SIGSTOP, Ctrl-Z, a debugger)",)
        os.kill(other.pid, signal.SIGCONT)
        other.say()
        shared.add_(1, timeout=DEADLINE)
    assert shared.tensor.eq(1).all()


def test_a_timeout_because_of_another_thread() -> None:
    shared = SharedTensor(2)
    errors: list[LockTimeout] = []

    def run() -> None:
        try:
            with shared.locked(timeout=0.01):
                pass
        except LockTimeout as error:
            errors.append(error)

    with shared.locked():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(DEADLINE)
    assert errors[0].holder == "another thread of this process"


def test_a_holder_that_dies_is_named_to_the_next_one_once() -> None:
    shared = SharedTensor(2)
    with child(hold(shared, lambda tensor: tensor.fill_(7))) as other:
        other.hear()
        pid = other.pid
        other.kill()
    with pytest.raises(LockAbandoned) as caught, shared.locked():
        pytest.fail("the block must not run")
    error = caught.value
    assert error.code == "lock-abandoned"
    assert (
        str(error)
        == f"pid {pid} died while it held the lock of SharedTensor float32 (2,), 8 bytes, so it may be half changed"
    )
    assert re.fullmatch(r"it took the lock \d+\.\d s ago, and did not give it back", error.why[0])
    assert repr(shared).endswith("free>")
    with shared.locked(timeout=0.0) as tensor:
        assert tensor.tolist() == [7, 7]


def test_a_holder_that_dies_is_told_of_though_the_next_one_dies_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That one, in an `add_`, would have left nothing half changed by itself, and was killed before
    it could say what it found.
    """
    shared = SharedTensor(4)
    with child(hold(shared, lambda tensor: tensor[:2].fill_(1))) as first:
        first.hear()
        first.kill()

    def run(end: socket.socket) -> None:
        publish = RecordLock._publish

        def die(self: RecordLock, who: str, doing: str) -> None:
            publish(self, who, doing)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(RecordLock, "_publish", die)
        shared.add_(1)

    with child(run) as second:
        assert second.join() == -signal.SIGKILL
    with pytest.raises(LockAbandoned, match="may be half changed"), shared.locked():
        pass
    assert shared.add_(1).tensor.tolist() == [2, 2, 1, 1]


def test_what_a_holder_does_is_told_also_when_the_former_one_died() -> None:
    shared = SharedTensor(4)
    with child(hold(shared)) as first:
        first.hear()
        first.kill()
    shared._take(0.0, "continue", "add_")
    holder = shared._lock.holder()
    assert holder is not None
    assert holder.doing == "add_"
    shared._give_back()


def test_who_can_go_on_goes_on() -> None:
    shared = SharedTensor(2)
    for change in (shared.add_, shared.copy_):
        with child(hold(shared)) as other:
            other.hear()
            other.kill()
        change(1, on_abandoned="continue")
    with child(hold(shared)) as other:
        other.hear()
        other.kill()
    with shared.locked(on_abandoned="continue") as tensor:
        assert tensor.tolist() == [1, 1]
    with shared.locked():
        pass
    with pytest.raises(UsageError, match="on_abandoned='ignore' is neither"):
        shared.locked(on_abandoned="ignore")  # type: ignore[arg-type]


def test_add_and_copy_tell_of_a_dead_holder_and_change_nothing() -> None:
    shared = SharedTensor(2)
    for change in (shared.add_, shared.copy_):
        with child(hold(shared)) as other:
            other.hear()
            other.kill()
        with pytest.raises(LockAbandoned):
            change(1)
        assert shared.tensor.tolist() == [0, 0]


def test_a_rank_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedTensor(2)

    def run(end: socket.socket) -> None:
        monkeypatch.setattr(shared_tensor_lock, "_rank_or_name", lambda: "rank 3")
        hold(shared)(end)

    with child(run) as other:
        other.hear()
        assert f"held by rank 3 (pid {other.pid})" in repr(shared)
        pid = other.pid
        other.kill()
    with pytest.raises(LockAbandoned, match=rf"^rank 3 \(pid {pid}\) died while"):
        shared.add_(1)


def test_a_rank_knows_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from rallypoint.store import discovery

    assert shared_tensor_lock._rank_or_name() == ""
    monkeypatch.setattr(discovery, "_place", discovery.Place("unix:///x", "job", 5, bytes))
    assert shared_tensor_lock._rank_or_name() == "rank 5"


def test_leaving_the_block_in_a_forked_child() -> None:
    shared = SharedTensor(2)

    def leave(end: socket.socket) -> None:
        with pytest.raises(UsageError, match="its parent held when it forked"):
            block.__exit__(None, None, None)
        block.__exit__(
            ValueError, ValueError(), None
        )  # the program's own error is not covered by ours
        with pytest.raises(LockTimeout), shared.locked(timeout=0.0):
            pass

    block = shared.locked()
    with block:
        with child(leave) as one:
            assert one.join() == 0
        assert repr(shared).endswith("held by this thread>")
    assert repr(shared).endswith("free>")


class Interrupted(Exception):
    """What the signal handler raises."""


def test_a_signal_handler_that_raises_in_the_block_or_around_it() -> None:
    def run(end: socket.socket) -> None:
        sys.unraisablehook = lambda unraisable: None
        import random

        chance = random.Random(3)
        stormy, raised = False, 0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal raised
            if stormy:
                raised += 1
                raise Interrupted

        signal.signal(signal.SIGALRM, handle)
        shared.copy_(0)
        for turn in range(3000):
            signal.setitimer(signal.ITIMER_REAL, 0)  # the last turn's: only one is to raise
            try:
                stormy = True
                signal.setitimer(signal.ITIMER_REAL, 0.000005 + chance.random() * 0.00006)
                if turn % 2:
                    with shared.locked(timeout=10.0):
                        pass
                else:
                    shared.add_(1)
                stormy = False
            except Interrupted:
                stormy = False
            low, high = torch.aminmax(shared.tensor)
            assert low == high, "whole or absent"
            assert not shared._lock.mine, turn
        assert raised > 50, raised
        end.sendall(b".")
        end.recv(1)

    shared = SharedTensor(1000)
    shared.add_(1)
    with child(run) as one:
        one.hear()
        with shared.locked(timeout=DEADLINE):
            pass


def test_no_interruption_is_lost() -> None:
    """What a handler raises in a destructor is: each change had one, and 1 in 100 of the Ctrl-C
    between two of them did nothing.
    """

    def run(end: socket.socket) -> None:
        import random

        chance = random.Random(5)
        stormy, raised, caught = False, 0, 0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal raised
            if stormy:
                raised += 1
                raise Interrupted

        signal.signal(signal.SIGALRM, handle)
        for _ in range(2000):
            try:
                stormy = True
                signal.setitimer(signal.ITIMER_REAL, 0.000005 + chance.random() * 0.0001)
                for _ in range(20):
                    shared.add_(1)
                stormy = False
            except Interrupted:
                stormy = False
                caught += 1
        assert caught == raised > 200, (caught, raised)

    shared = SharedTensor(10)
    shared.add_(1)
    with child(run) as one:
        assert one.join() == 0


def test_what_is_written_after_an_interrupted_change_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a block that goes on after Ctrl-C: what was interrupted, complete beside the tensor, was
    copied over it at the end.
    """
    shared = SharedTensor(4)
    leave_note, compute = RecordLock.leave_note, shared_tensor._compute
    struck = 0

    def strike(at: int) -> None:
        """A handler that raises at the n-th moment of those at which one may run between two steps
        of a change.
        """
        moments = 0

        def moment() -> None:
            nonlocal moments, struck
            moments += 1
            if moments == at:
                struck += 1
                raise Interrupted

        def note(self: RecordLock, number: int) -> None:
            moment()
            self.note = number
            moment()
            leave_note(self, number)
            moment()

        def computed(step: Callable[[], object]) -> None:
            compute(step)
            moment()

        monkeypatch.setattr(RecordLock, "leave_note", note)
        monkeypatch.setattr(shared_tensor, "_compute", computed)

    for at in range(1, 10):
        shared.copy_(0)
        with shared.locked() as tensor:
            strike(at)
            try:
                shared.add_(1)
            except Interrupted:
                pass
            finally:
                monkeypatch.undo()
            assert tensor.tolist() in ([0.0] * 4, [1.0] * 4)
            tensor.fill_(7)
        with shared.locked() as tensor:
            assert tensor.tolist() == [7.0] * 4, at
    assert struck == 8


def test_a_waiting_call_runs_signal_handlers() -> None:
    shared = SharedTensor(2)
    for timeout in (None, 600.0):
        with child(hold(shared)) as other:
            other.hear()
            former = signal.signal(signal.SIGALRM, lambda *_: other.say())
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            try:
                shared.add_(1, timeout=timeout)
            finally:
                signal.signal(signal.SIGALRM, former)


# -- many of them
# --------------------------------------------------------------------------------------------------


def test_processes_and_threads_lose_nothing() -> None:
    shared = SharedTensor(1, torch.int64)

    def work(end: socket.socket) -> None:
        def loop() -> None:
            for _ in range(300):
                with shared.locked() as tensor:
                    tensor[0] += 1

        thread = threading.Thread(target=loop)
        thread.start()
        loop()
        thread.join()

    children = [Child(work) for _ in range(4)]
    for one in children:
        with one.end:
            assert one.join() == 0
    assert shared.tensor.item() == 4 * 2 * 300


# -- into other processes
# --------------------------------------------------------------------------------------------------


def script(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_every_way_into_another_process() -> None:
    ways = script("passing.py").splitlines()
    assert ways == [
        f"{method}{way}"
        for method in ("fork", "spawn", "forkserver")
        for way in ("", ", a queue", ", a pool's initializer", ", a pool's arguments")
    ] + ["torch.multiprocessing.spawn", "os.fork and cloudpickle", "no descriptor more"]


def test_in_one_process_it_is_one_object() -> None:
    shared = SharedTensor(2)
    before = open_memory()
    assert pickle.loads(pickle.dumps(shared)) is shared
    assert copy.copy(shared) is shared
    assert copy.deepcopy({"a": shared})["a"] is shared
    assert open_memory() == before


def test_sent_and_let_go_before_it_arrived() -> None:
    data = pickle.dumps(SharedTensor(2))
    gc.collect()
    with pytest.raises(UsageError) as caught:
        pickle.loads(data)
    assert re.match(
        rf"shared memory that pid {os.getpid()} on \S+ sent cannot be taken over: ",
        str(caught.value),
    )


def test_a_tensor_that_torch_has_moved_is_noticed() -> None:
    """With torch's other sharing strategy, sending `shared.tensor` puts a copy in its place."""

    def run(end: socket.socket) -> None:
        shared.tensor.untyped_storage()._share_filename_cpu_()
        for call in (lambda: shared.tensor, lambda: shared.add_(1), lambda: pickle.dumps(shared)):
            with pytest.raises(UsageError, match=r"torch\.multiprocessing has moved it"):
                call()
        assert repr(shared).endswith("free>")

    shared = SharedTensor(2)
    with child(run) as one:
        assert one.join() == 0
