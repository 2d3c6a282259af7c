"""What is refused before anything starts: whole messages, by path."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import multiprocessing
import multiprocessing.shared_memory
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.launcher.launch.marshalling import importable as modules
from rallypoint.launcher.launch.marshalling import inspection, payload

pytestmark = pytest.mark.usefixtures("torch_in_parts")


def refused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        payload.pack_call(fn, args, kwargs).close()
    return caught.value


def accepted(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    payload.pack_call(fn, args, kwargs).close()


def whole(error: UsageError) -> str:
    return "\n".join((str(error), *error.__notes__))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Writes modules beside each other, and imports them as a script in that folder would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: list[str] = []

    def make(**sources: str) -> ModuleType:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
            names.append(name)
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in sources][-1]

    yield make
    for name in names:
        sys.modules.pop(name, None)


# --- bind ---


def train(model: object, lr: float = 0.1) -> None: ...


def train_rank(rank: int, model: object) -> None: ...


async def train_async() -> None: ...


def train_by_step() -> Iterator[int]:
    yield 1


class Trainer:
    def fit(self, epochs: int) -> None: ...

    def __call__(self, epochs: int) -> None: ...

    async def fit_async(self) -> None: ...


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "name"),
    [
        (train, ("m",), None, "train"), (train, ["m"], {"lr": 1}, "train"), (functools.partial(train, lr=2), ("m",), {}, "train"),
        (Trainer().fit, (3,), {}, "Trainer.fit"), (Trainer(), (3,), {}, "Trainer"), (lambda x: x, (1,), {}, "<lambda>"),
        (print, (1, 2), {}, "print"),
        (Trainer, (), {}, "Trainer"), (max, ([1, 2],), {}, "max"),
    ],
)  # fmt: skip
def test_what_can_be_called(fn: Any, args: Any, kwargs: Any, name: str) -> None:
    called = inspection.bind(fn, args, kwargs)
    assert (called.args, called.kwargs, called.name) == (tuple(args), kwargs or {}, name)


def test_the_rank_is_bound_too() -> None:
    assert inspection.bind(train_rank, ("m",), {}, pass_rank=True).args == ("m",)


def unbound(fn: Any, args: Any = (), kwargs: Any = None, *, pass_rank: bool = False) -> str:
    with pytest.raises(UsageError) as caught:
        inspection.bind(fn, args, kwargs, pass_rank=pass_rank)
    assert caught.value.code == "usage"
    return whole(caught.value).replace("\n  more   rallypoint explain usage", "")


def test_a_function_that_wants_the_rank() -> None:
    assert unbound(train_rank, ("m",)) == (
        "train_rank(rank, model) wants the rank in front, which is given only on request\n"
        "  help   write it like this:\n"
        "             wrong:  rallypoint.launch(train_rank, args=('m',))\n"
        "             right:  rallypoint.launch(train_rank, args=('m',), pass_rank=True)"
    )


def test_a_function_that_does_not() -> None:
    text = unbound(Trainer().fit, (3,), pass_rank=True)
    assert text.startswith("Trainer.fit(epochs) does not want the rank in front\n")
    assert "right:  rallypoint.launch(Trainer.fit, args=(3,))" in text


def test_arguments_that_do_not_fit() -> None:
    text = unbound(train, (1, 2, 3), {"x": 4})
    assert text.startswith(
        "train(model, lr=0.1) cannot be called with these arguments: too many positional arguments\n"
    )
    assert "missing a required argument: 'model'" in unbound(train)
    assert "unexpected keyword argument 'momentum'" in unbound(train, ("m",), {"momentum": 0.9})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: None, "launch takes a function, and was given None"),
        (
            lambda: train_by_step(),
            "launch takes a function, and was given the generator that train_by_step() returned",
        ),
        (
            lambda: train_async(),
            "launch takes a function, and was given the coroutine that train_async() returned",
        ),
        (lambda: 3, "launch takes a function, and was given an int"),
        (lambda: "train", "launch takes a function, and was given a str"),
    ],
)
def test_a_call_instead_of_a_function(make: Callable[[], Any], text: str) -> None:
    assert unbound(make()).startswith(text)


def test_a_generators_function_is_named() -> None:
    assert (
        "wrong:  rallypoint.launch(train_by_step())\n             right:  rallypoint.launch(train_by_step)"
        in unbound(train_by_step())
    )


@pytest.mark.parametrize("fn", [train_async, Trainer().fit_async, functools.partial(train_async)])
def test_an_async_function(fn: Any) -> None:
    assert "is an async function: calling it only makes a coroutine" in unbound(fn)
    assert "right:  rallypoint.launch(lambda: asyncio.run(" in unbound(fn)


def test_a_generator_function() -> None:
    assert "right:  rallypoint.launch(lambda: list(train_by_step()))" in unbound(train_by_step)


@pytest.mark.parametrize(
    ("args", "right"),
    [(5, "args=(5,)"), ("m", "args=('m',)"), (object(), "args=(x,)"), ({"a": 1}, "args=(x,)")],
)
def test_args_that_are_no_tuple(args: Any, right: str) -> None:
    assert f"right:  {right}" in unbound(train, args)


def test_kwargs_that_are_no_dict() -> None:
    assert unbound(train, (), [1]).startswith("kwargs is a dict, and was given a list")
    assert unbound(train, (), {1: 2}).startswith("kwargs has a key that is no name: 1")


# --- locks ---


@dataclasses.dataclass
class Model:
    lock: Any = None
    parts: Any = None


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((1, Model(lock=threading.Lock())), {}, "args[1].lock"),
        ((), {"cfg": {"hook": threading.Lock()}}, 'kwargs["cfg"]["hook"]'),
        (([1, (2, {"a b": [threading.Lock()]})],), {}, 'args[0][1][1]["a b"][0]'),
        ((Model(parts=[Model(), Model(lock=threading.Lock())]),), {}, "args[0].parts[1].lock"),
        ((deque([threading.Lock()]),), {}, "fn or its arguments"),
        ((functools.partial(print, threading.Lock()),), {}, "args[0].args[0]"),
        (({3: {threading.Lock()}},), {}, "args[0][3] (an element)"),
    ],
)
def test_a_lock_is_named_by_its_path(args: Any, kwargs: Any, path: str) -> None:
    error = refused(print, *args, **kwargs)
    assert error.code == "lock-in-wrong-scope"
    assert str(error) == f"a threading.Lock does not guard anything between processes: {path}"


def test_the_whole_message_of_a_lock() -> None:
    assert whole(refused(print, threading.Lock())) == (
        "a threading.Lock does not guard anything between processes: args[0]\n"
        "  help   take what the store has, which all ranks share:\n"
        "             wrong:  with lock: ...\n"
        '             right:  with rallypoint.connect().lock("lock"): ...\n'
        "  help   if it is for threads inside one rank, make it where only ranks come by:\n"
        "             def train():\n"
        "                 lock = threading.Lock()\n"
        "  more   rallypoint explain lock-in-wrong-scope"
    )


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock, threading.RLock, threading.Condition, threading.Semaphore, threading.BoundedSemaphore, threading.Event,
        functools.partial(threading.Barrier, 2), queue.Queue, queue.PriorityQueue, queue.SimpleQueue, asyncio.Lock, asyncio.Event,
        asyncio.Queue,
        asyncio.Semaphore, asyncio.Condition,
    ],
)  # fmt: skip
def test_everything_that_guards_threads_only(make: Callable[[], Any]) -> None:
    assert refused(print, make()).code == "lock-in-wrong-scope"


def test_a_closure_and_a_default() -> None:
    model = Model(lock=threading.Lock())
    here = os.path.relpath(__file__)

    def step() -> object:
        return model.lock

    def default(lock: Any = threading.Lock()) -> None: ...  # noqa: B008

    line = step.__code__.co_firstlineno
    name = "test_a_closure_and_a_default.<locals>"
    assert str(refused(step)).endswith(
        f"model.lock (closure variable model in {name}.step at {here}:{line})"
    )
    assert str(refused(default)).endswith(
        f"default of lock in {name}.default at {here}:{default.__code__.co_firstlineno}"
    )
    assert "closure variable step in" in str(
        refused(lambda: step(), 1)
    ) or "closure variable model in" in str(refused(lambda: step(), 1))


def test_a_bound_methods_own_lock() -> None:
    trainer = Trainer()
    trainer.lock = threading.Lock()  # type: ignore[attr-defined]
    assert str(refused(trainer.fit, 1)).endswith(": fn.__self__.lock")


LOCK = threading.Lock()


def read_lock() -> None:
    with LOCK:
        pass


def test_a_global_of_a_file_that_goes_by_value() -> None:
    here = os.path.relpath(__file__)
    line = read_lock.__code__.co_firstlineno
    assert str(refused(read_lock)).endswith(
        f": global LOCK in {here}:{line - 3}, used by read_lock at {here}:{line + 1}"
    )


def test_a_global_of_an_imported_module(program: Callable[..., ModuleType]) -> None:
    found = program(
        train="import threading\n\n\ncount = 0\n\nlock = threading.Lock()\n\ndef increment():\n    with lock:\n        pass\n"
    )
    error = refused(found.increment)
    assert error.code == "lock-in-wrong-scope"
    assert str(error).endswith(": global lock in train.py:6, used by increment at train.py:9")


INDIRECT = {
    "called": ("lock = threading.Lock()\ndef inner():\n    with lock: pass\n", "from state import inner\ndef train():\n    inner()\n",
               "global lock in state.py:2, used by inner at state.py:4"),
    "attribute": ("lock = threading.Lock()\n", "import state\ndef train():\n    state.lock.acquire()\n",
                  "state.lock (global lock in state.py:2, used by train at train.py:4)"),
    "nested function": ("lock = threading.Lock()\n", "from state import lock\ndef train():\n    return [lock for _ in range(2)]\n",
                        "global lock in train.py:2, used by train"),
    "method": ("lock = threading.Lock()\nclass Log:\n    def write(self):\n        with lock: pass\n",
               "from state import Log\ndef train():\n    Log().write()\n",
               "global lock in state.py:2, used by Log.write at state.py:5"),
    "instance": ("class Log: pass\nlog = Log()\nlog.lock = threading.Lock()\n",
                 "from state import log\ndef train():\n    with log.lock: pass\n",
                 "log.lock (global lock, used by train at train.py:4)"),
    "decorated": ("import functools\nlock = threading.Lock()\n@functools.cache\ndef inner():\n    with lock: pass\n",
                  "from state import inner\ndef train():\n    inner()\n", "global lock in state.py:3, used by inner at state.py:6"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDIRECT)
def test_a_lock_that_is_reached_by_detours(program: Callable[..., ModuleType], case: str) -> None:
    state, source, text = INDIRECT[case]
    found = program(state=f"import threading\n{state}", train=f"import threading\n{source}")
    error = refused(found.train)
    assert error.code == "lock-in-wrong-scope"
    assert text in str(error)
    del error
    assert "state" in sys.modules
    # The same, reached from a function that goes by value.
    assert text.partition(",")[0] in str(refused(lambda: found.train()))


def test_a_lock_that_nobody_reads_or_that_is_not_the_users_is_left_alone(
    program: Callable[..., ModuleType],
) -> None:
    found = program(
        train="import threading, logging, functools\nlock = threading.Lock()\nlog = logging.getLogger('x')\n\n"
        "@functools.cache\ndef own():\n    return threading.Lock()\n\n"
        "def train():\n    log.info('x')\n    with own(): pass\n    lock = 5\n    return logging._lock, lock\n"
    )
    accepted(found.train)


def test_an_object_that_leaves_its_lock_at_home_may_go() -> None:
    class Careful:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __getstate__(self) -> dict[str, int]:
            return {}

    class Event(threading.Event):
        def __reduce__(self) -> Any:
            return Event, ()

    accepted(print, Careful(), Event(), logging.getLogger("x"), sys.stdout)


def test_a_librarys_object_that_holds_a_lock_is_itself_the_matter() -> None:
    error = refused(print, {"handlers": [logging.StreamHandler()]})
    assert error.code == "launch-argument"
    assert whole(error).startswith(
        'args[0]["handlers"][0]: a logging.StreamHandler cannot cross into another process\n'
        '  why    it holds a threading.RLock: args[0]["handlers"][0].lock\n'
    )


# --- multiprocessing ---


def test_objects_of_multiprocessing() -> None:
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    block = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    given: list[tuple[Any, str]] = [
        (context.Lock(), ".lock("), (context.RLock(), ".lock("), (context.Semaphore(), ".lock("), (context.Event(), ".wait("),
        (context.Condition(), ".wait("), (context.Barrier(2), ".barrier("), (context.Queue(), ".queue("),
        (context.SimpleQueue(), ".queue("), (context.JoinableQueue(), ".queue("), (ends[0], ".queue("),
        (context.Value("d"), "SharedTensor"), (context.Array("d", 3), "SharedTensor"), (context.RawArray("d", 3), "SharedTensor"),
        (context.RawValue("i"), "SharedTensor"), (block, "SharedTensor"),
    ]  # fmt: skip
    try:
        for value, right in given:
            error = refused(print, [value])
            assert error.code == "mp-object-in-launch", value
            assert str(error).endswith(": args[0][0]")
            assert right in whole(error).partition("right:")[2], value
    finally:
        for end in ends:
            end.close()
        block.close()
        block.unlink()
        for value, _ in given[6:9]:
            if hasattr(value, "join_thread"):
                value.close()
                value.join_thread()


def test_a_queue_of_an_imported_module(program: Callable[..., ModuleType]) -> None:
    found = program(
        train="import multiprocessing\nq = multiprocessing.get_context('spawn').SimpleQueue()\ndef train():\n    q.put(1)\n"
    )
    error = refused(found.train)
    assert whole(error) == (
        "a multiprocessing.SimpleQueue reaches only processes that multiprocessing itself starts: "
        "global q in train.py:2, used by train at train.py:4\n"
        "  help   take what the store has, which all ranks share:\n"
        "             wrong:  q.put(item)\n"
        '             right:  rallypoint.connect().queue("q").put(item)\n'
        "  more   rallypoint explain mp-object-in-launch"
    )


# --- everything else ---


async def coroutine() -> None: ...


def test_other_things_that_cannot_cross(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("x")
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(contextlib.closing(coroutine()))
        connection = stack.enter_context(contextlib.closing(socket.socket()))
        pool = stack.enter_context(ThreadPoolExecutor())
        child = subprocess.Popen(["true"])
        child.wait()
        given: list[tuple[Any, str]] = [
            (stack.enter_context(open(path)), "an open file belongs to the process that made it"),
            (
                stack.enter_context(open(path, "rb")),
                "an open file belongs to the process that made it",
            ),
            (
                stack.enter_context(open(path, "wb", buffering=0)),
                "an open file belongs to the process that made it",
            ),
            (connection, "a socket belongs to the process that made it"),
            (
                train_by_step(),
                "a generator cannot be copied: it stands in the middle of a function",
            ),
            (waiting, "a coroutine cannot be copied: it stands in the middle of a function"),
            (threading.Thread(), "a thread belongs to the process that made it"),
            (multiprocessing.Process(), "a process belongs to the process that made it"),
            (child, "a subprocess.Popen belongs to the process that made it"),
            (pool, "an executor of concurrent.futures belongs to the process that made it"),
            (Future[int](), "a future belongs to the process that made it"),
            (threading.local(), "a threading.local has another content in every thread"),
            (
                sys._getframe(),
                "a frame cannot cross into another process: TypeError: cannot pickle 'frame' object",
            ),
        ]
        for value, text in given:
            error = refused(print, a={"b": value})
            assert (error.code, str(error)) == ("launch-argument", f'kwargs["a"]["b"]: {text}')
            assert "\n  help   " in whole(error)
    accepted(print, io.StringIO("x"), io.BytesIO(b"x"), sys.stderr)


def test_an_object_whose_own_pickling_raises() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise RuntimeError("I stay here")

    error = refused(print, [Model(parts={"x": Stubborn()})])
    assert str(error).startswith('args[0][0].parts["x"]: a')
    assert str(error).endswith(
        "Stubborn cannot cross into another process: RuntimeError: I stay here"
    )
    assert isinstance(error.__cause__, RuntimeError)


def test_plain_data_is_not_walked_in_order_to_name_what_is_wrong() -> None:
    data = {
        "numbers": list(range(2_000_000)),
        "texts": {str(n): n for n in range(500_000)},
        "bad": threading.Lock(),
    }
    before = time.monotonic()
    assert str(refused(print, data)).endswith('args[0]["bad"]')
    assert time.monotonic() - before < 20


def test_cycles_and_depth() -> None:
    loop: dict[str, Any] = {"lock": threading.Lock()}
    loop = {"self": loop, "more": loop}
    loop["self"]["back"] = loop
    assert str(refused(print, loop)).endswith('args[0]["self"]["lock"]')
    node: Any = threading.Lock()
    for _ in range(100):
        node = Model(parts=node)
    path = str(refused(print, node)).rpartition(": ")[2]
    assert path.startswith("args[0].parts.parts")
    assert " ... " in path
    assert len(path) < 200


@pytest.mark.torch
def test_tensors_that_cannot_cross() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(2))
    assert whole(refused(print, {"loss": (weight * 2).sum()})) == (
        'args[0]["loss"]: a tensor with a graph behind it cannot cross: requires_grad is set and it was computed from others, and autograd '
        "does not reach into another process\n"
        "  help   give its numbers:\n"
        "             wrong:  args=(loss,)\n"
        "             right:  args=(loss.detach(),)   # or loss.item()\n"
        "  more   rallypoint explain launch-argument"
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    error = refused(print, model)
    assert error.code in {"lock-in-wrong-scope", "launch-argument"}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*is deprecated")  # what torch.compile imports
def test_process_groups_and_compiled_functions() -> None:
    torch = pytest.importorskip("torch")
    dist: Any = torch.distributed
    store = dist.HashStore()
    assert (
        str(refused(print, store))
        == "args[0]: a store of torch.distributed belongs to the process that made it"
    )
    group = dist.ProcessGroup(0, 1)
    assert str(refused(print, group)).startswith(
        "args[0]: a process group belongs to the process that made it"
    )
    assert str(refused(torch.compile(lambda x: x + 1))).endswith(
        "a function that torch.compile made cannot cross"
    )


# --- which modules a rank finds ---


def test_which_modules_are_importable(program: Callable[..., ModuleType], tmp_path: Path) -> None:
    program(near="x = 1\n")
    importable = modules.Importable()
    assert importable("json.decoder")
    assert importable("pytest")
    assert importable("rallypoint.errors")
    assert importable("near")
    assert not importable("__main__")
    assert not importable(__name__)  # pytest has rewritten its asserts
    made = ModuleType("made_in_memory")
    sys.modules["made_in_memory"] = made
    spec = importlib.util.spec_from_file_location("by_hand", tmp_path / "near.py")
    assert spec is not None
    sys.modules["by_hand"] = importlib.util.module_from_spec(spec)
    shadow = ModuleType("near")
    shadow.__file__ = str(tmp_path / "elsewhere.py")
    try:
        assert not importable("made_in_memory")
        assert not importable("by_hand")
        sys.modules["near"] = shadow
        assert not modules.Importable()("near")
        assert modules.is_users("made_in_memory")
    finally:
        for name in ("made_in_memory", "by_hand"):
            del sys.modules[name]
    assert not modules.is_users("json")
    assert not modules.is_users("pytest")
    assert not modules.is_users("rallypoint.errors")
    assert modules.is_users("__main__")
