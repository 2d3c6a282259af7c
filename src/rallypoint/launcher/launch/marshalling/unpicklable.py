"""Kinds of objects that cannot be sent to another process: why, and what to write instead.

Some of them pickle would refuse with a bare "cannot pickle '_thread.lock' object"; some it would
copy in silence, into a lock or a queue that no other process knows (an `asyncio.Lock`, a pipe's
descriptor number, a file that is read to its end).
"""

from __future__ import annotations

import copyreg
from typing import Literal, NamedTuple

Code = Literal["lock-in-wrong-scope", "mp-object-in-launch", "launch-argument"]
Help = tuple[str, str]


class UnpicklableKind(NamedTuple):
    """Kind of object that cannot be sent.

    `name`: with its article; `reason`: a clause behind it; `wrong` and `right` stand side by side.
    """

    code: Code
    name: str
    reason: str
    wrong: str = ""
    right: str = ""
    advice: str = ""

    @property
    def help(self) -> tuple[Help, ...]:
        """Lines of help that show what to write instead."""
        given: list[Help] = []
        if self.right:
            wrong = [f"wrong:  {line}" for line in self.wrong.splitlines()]
            right = [f"right:  {line}" for line in self.right.splitlines()]
            given.append((self.advice or "write it like this", "\n".join(wrong + right)))
        elif self.advice:
            given.append((self.advice, ""))
        if self.code == "lock-in-wrong-scope":
            given.append(
                ("if it is for threads inside one rank, make it where only ranks come by", _INSIDE)
            )
        return tuple(given)


class ObjectRefused(Exception):
    """Refusal of an object that cannot be sent. `place`: where it is, if that is known where this
    is raised."""

    def __init__(self, kind: UnpicklableKind, place: str = "") -> None:
        super().__init__(kind.name)
        self.kind = kind
        self.place = place


_INSIDE = "def train():\n    lock = threading.Lock()"
_NOT_BETWEEN = "does not guard anything between processes"
_STORE = "rallypoint.connect()"


def _threads(name: str, wrong: str, right: str, reason: str = _NOT_BETWEEN) -> UnpicklableKind:
    return UnpicklableKind(
        "lock-in-wrong-scope",
        name,
        reason,
        wrong,
        right,
        "take what the store has, which all ranks share",
    )


def _multiprocessing(
    name: str,
    wrong: str,
    right: str,
    advice: str = "take what the store has, which all ranks share",
) -> UnpicklableKind:
    return UnpicklableKind(
        "mp-object-in-launch",
        name,
        "reaches only processes that multiprocessing itself starts",
        wrong,
        right,
        advice,
    )


def _argument(
    name: str, reason: str, advice: str, wrong: str = "", right: str = ""
) -> UnpicklableKind:
    return UnpicklableKind("launch-argument", name, reason, wrong, right, advice)


_LOCK = f'with {_STORE}.lock("lock"): ...'
_SHARED = "shared = rallypoint.SharedTensor((4,), torch.float64)   # and: with shared.locked(): shared.tensor += 1"
_QUEUE = f'{_STORE}.queue("q").put(item)'
_MIDDLE = "cannot be copied: it stands in the middle of a function"
_OWN = "belongs to the process that made it"

# By full name: none of these modules is imported for it. The first base of a type that is here
# decides.
_BY_NAME: dict[str, UnpicklableKind] = {
    "_thread.lock": _threads("a threading.Lock", "with lock: ...", _LOCK),
    "_thread.RLock": _threads("a threading.RLock", "with lock: ...", _LOCK),
    "threading._RLock": _threads("a threading.RLock", "with lock: ...", _LOCK),
    "threading.Condition": _threads(
        "a threading.Condition",
        "with ready: ready.wait()",
        f'{_STORE}.wait("ready")',
        "tells nobody anything in another process",
    ),
    "threading.Semaphore": _threads("a threading.Semaphore", "with slots: ...", _LOCK),
    "threading.Event": _threads(
        "a threading.Event",
        "ready.wait()\nready.set()",
        f'{_STORE}.wait("ready")\n{_STORE}["ready"] = True',
        "tells nobody anything in another process",
    ),
    "threading.Barrier": _threads(
        "a threading.Barrier",
        "barrier.wait()",
        f'{_STORE}.barrier("epoch", size=world_size)',
        "does not meet anybody in another process",
    ),
    "queue.Queue": _threads(
        "a queue.Queue", "q.put(item)", _QUEUE, "brings nothing from one process to another"
    ),
    "_queue.SimpleQueue": _threads(
        "a queue.SimpleQueue", "q.put(item)", _QUEUE, "brings nothing from one process to another"
    ),
    "queue._PySimpleQueue": _threads(
        "a queue.SimpleQueue", "q.put(item)", _QUEUE, "brings nothing from one process to another"
    ),
    "asyncio.locks.Lock": _threads("an asyncio.Lock", "async with lock: ...", _LOCK),
    "asyncio.locks.Condition": _threads(
        "an asyncio.Condition", "await ready.wait()", f'{_STORE}.wait("ready")'
    ),
    "asyncio.locks.Semaphore": _threads("an asyncio.Semaphore", "async with slots: ...", _LOCK),
    "asyncio.locks.Event": _threads(
        "an asyncio.Event", "await ready.wait()", f'{_STORE}.wait("ready")'
    ),
    "asyncio.locks.Barrier": _threads(
        "an asyncio.Barrier", "await barrier.wait()", f'{_STORE}.barrier("epoch", size=world_size)'
    ),
    "asyncio.queues.Queue": _threads(
        "an asyncio.Queue",
        "await q.put(item)",
        _QUEUE,
        "brings nothing from one process to another",
    ),
    "multiprocessing.synchronize.Lock": _multiprocessing(
        "a multiprocessing.Lock", "with lock: ...", _LOCK
    ),
    "multiprocessing.synchronize.RLock": _multiprocessing(
        "a multiprocessing.RLock", "with lock: ...", _LOCK
    ),
    "multiprocessing.synchronize.SemLock": _multiprocessing(
        "a multiprocessing.Semaphore", "with slots: ...", _LOCK
    ),
    "multiprocessing.synchronize.Condition": _multiprocessing(
        "a multiprocessing.Condition", "ready.wait()", f'{_STORE}.wait("ready")'
    ),
    "multiprocessing.synchronize.Event": _multiprocessing(
        "a multiprocessing.Event",
        "ready.wait()\nready.set()",
        f'{_STORE}.wait("ready")\n{_STORE}["ready"] = True',
    ),
    "multiprocessing.synchronize.Barrier": _multiprocessing(
        "a multiprocessing.Barrier", "barrier.wait()", f'{_STORE}.barrier("epoch", size=world_size)'
    ),
    "multiprocessing.queues.Queue": _multiprocessing(
        "a multiprocessing.Queue", "q.put(item)", _QUEUE
    ),
    "multiprocessing.queues.SimpleQueue": _multiprocessing(
        "a multiprocessing.SimpleQueue", "q.put(item)", _QUEUE
    ),
    "multiprocessing.connection._ConnectionBase": _multiprocessing(
        "an end of a multiprocessing.Pipe", "end.send(item)", _QUEUE
    ),
    "multiprocessing.connection.Listener": _multiprocessing(
        "a multiprocessing Listener", "listener.accept()", _QUEUE
    ),
    "multiprocessing.sharedctypes.SynchronizedBase": _multiprocessing(
        "a multiprocessing.Value or Array",
        'total = multiprocessing.Value("d")',
        _SHARED,
        "take a shared tensor, which has a lock of its own",
    ),
    "multiprocessing.shared_memory.SharedMemory": _multiprocessing(
        "a multiprocessing SharedMemory",
        "block = SharedMemory(create=True, size=32)",
        _SHARED,
        "take a shared tensor",
    ),
    "multiprocessing.shared_memory.ShareableList": _multiprocessing(
        "a multiprocessing ShareableList",
        "numbers = ShareableList([0] * 4)",
        _SHARED,
        "take a shared tensor",
    ),
    "multiprocessing.managers.BaseManager": _multiprocessing(
        "a multiprocessing.Manager", 'd = manager.dict(); d["n"] = 1', f'{_STORE}["n"] = 1'
    ),
    "multiprocessing.managers.BaseProxy": _multiprocessing(
        "an object of a multiprocessing.Manager", 'd["n"] = 1', f'{_STORE}["n"] = 1'
    ),
    "multiprocessing.pool.Pool": _multiprocessing(
        "a multiprocessing.Pool",
        "def train(pool): ...",
        "def train():\n    with multiprocessing.Pool(4) as pool: ...",
        "make it in the rank",
    ),
    "multiprocessing.process.BaseProcess": _argument(
        "a process", _OWN, "give what it is about, not the process; start it in the rank"
    ),
    "subprocess.Popen": _argument(
        "a subprocess.Popen", _OWN, "start it in the rank, or give its pid"
    ),
    "threading.Thread": _argument("a thread", _OWN, "start it in the rank"),
    "_thread._local": _argument(
        "a threading.local", "has another content in every thread", "make it in the rank"
    ),
    "concurrent.futures._base.Executor": _argument(
        "an executor of concurrent.futures",
        _OWN,
        "make it in the rank",
        "def train(pool): ...",
        "def train():\n    with ThreadPoolExecutor() as pool: ...",
    ),
    "concurrent.futures._base.Future": _argument(
        "a future", _OWN, "give its result", "args=(future,)", "args=(future.result(),)"
    ),
    "asyncio.events.AbstractEventLoop": _argument(
        "an event loop",
        _OWN,
        "make it in the rank",
        "loop.run_until_complete(f())",
        "asyncio.run(f())",
    ),
    "_asyncio.Future": _argument(
        "an asyncio future or task", _OWN, "await it first, and give its result"
    ),
    "_io._IOBase": _argument(
        "an open file",
        _OWN,
        "give the path, and open it in the rank",
        'args=(open("data.txt"),)',
        'args=("data.txt",)   # def train(path):  with open(path) as file: ...',
    ),
    "_socket.socket": _argument("a socket", _OWN, "give the address, and connect in the rank"),
    "mmap.mmap": _argument(
        "an mmap", _OWN, "take a shared tensor", "memory = mmap.mmap(-1, 32)", _SHARED
    ),
    "generator": _argument(
        "a generator", _MIDDLE, "make a list of it", "args=(batches,)", "args=(list(batches),)"
    ),
    "coroutine": _argument(
        "a coroutine",
        _MIDDLE,
        "give the function, and run it in the rank",
        "args=(load(),)",
        "args=(load,)   # asyncio.run(load())",
    ),
    "async_generator": _argument(
        "an asynchronous generator", _MIDDLE, "give the function that makes it"
    ),
    "sqlite3.Connection": _argument(
        "a database connection", _OWN, "give the path, and connect in the rank"
    ),
}

_GROUP = _argument(
    "a process group",
    _OWN,
    'use the one that launch opens in every rank (backend="gloo"), or make it there with dist.new_group()',
)
_TORCH = {
    "ProcessGroup": _GROUP,
    "Backend": _GROUP,
    "Work": _argument("a pending collective", _OWN, "wait for it first"),
    "Store": _argument(
        "a store of torch.distributed", _OWN, f"connect in the rank: {_STORE}.c10d()"
    ),
}
# The classes have either module, by torch's version.
for _module in ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d"):
    _BY_NAME.update({f"{_module}.{_name}": _kind for _name, _kind in _TORCH.items()})

_BUILTIN = frozenset({"generator", "coroutine", "async_generator"})
_IN_MEMORY = frozenset({"_io.StringIO", "_io.BytesIO"})  # no file

CUDA = _argument(
    "a tensor on an accelerator",
    "cannot cross",
    "copy it to the host, or make it in the function",
    "args=(x,)",
    "args=(x.cpu(),)",
)
NOT_A_LEAF = _argument(
    "a tensor with a graph behind it",
    "cannot cross: requires_grad is set and it was computed from others, and autograd does not reach into another process",
    "give its numbers", "args=(loss,)", "args=(loss.detach(),)   # or loss.item()",
)  # fmt: skip
SHARED_NAMELESS = _argument(
    "a tensor in shared memory",
    "cannot cross as the same memory: this process has no descriptor of that memory any more, and its file is gone",
    "make it with share_memory_(), or as a rallypoint.SharedTensor",
)
SHARED_PART = _argument(
    "a tensor in shared memory",
    "cannot cross as the same memory: it is not a plain tensor, and does not begin where its file does",
    'share it with torch\'s strategy "file_descriptor", or as a rallypoint.SharedTensor',
)
COMPILED = _argument(
    "a function that torch.compile made", "cannot cross", "compile it in the rank",
    "rallypoint.launch(torch.compile(train))", "def train():\n    step = torch.compile(one_step)",
)  # fmt: skip
RAW_CTYPES = _multiprocessing(
    "a multiprocessing.RawValue or RawArray",
    'total = multiprocessing.RawArray("d", 4)',
    _SHARED,
    "take a shared tensor",
)


def kind_of(kind: type) -> UnpicklableKind | None:
    """Return the kind of a type whose instances cannot be sent; None when they can.

    A subclass that says itself how it is pickled is sent.
    """
    if kind in copyreg.dispatch_table:
        return None
    for base in kind.__mro__:
        name = (
            base.__qualname__
            if base.__module__ == "builtins"
            else f"{base.__module__}.{base.__qualname__}"
        )
        found = _BY_NAME.get(name)
        if found is not None and (base.__module__ != "builtins" or name in _BUILTIN):
            return found
        if name in _IN_MEMORY:
            return None
        if base is not object and base.__module__ not in _LOOKED_THROUGH and _says_how(base):
            return None
    return None


_LOOKED_THROUGH = frozenset({"threading", "queue", "socket", "io", "_io", "multiprocessing.synchronize", "multiprocessing.queues",
                             "multiprocessing.managers", "multiprocessing.connection", "multiprocessing.process",
                             "multiprocessing.shared_memory", "multiprocessing.sharedctypes", "multiprocessing.context",
                             "multiprocessing.pool", "concurrent.futures.thread", "concurrent.futures.process"})  # fmt: skip


def _says_how(base: type) -> bool:
    return any(name in base.__dict__ for name in ("__reduce__", "__reduce_ex__", "__getstate__"))
