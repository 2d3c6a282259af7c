"""The same store as a torch.distributed.Store.

`Store.c10d()` makes one for `init_process_group(store=...)`. Whatever a program does with torch's
TCPStore it can do with this; what is different is different on purpose, is listed in
`docs/guides/from-tcpstore.md`, and was measured against torch 2.13 in the tests.

How torch calls it, found out by experiment with torch 2.13: its C++ half asks the Python half by
name, with str keys, bytes values and timedelta timeouts, for `set`, `get`, `add`, `check`, `wait`,
`compare_set`, `append`, `multi_get`, `multi_set`, `has_extended_api`, `clone`, and, under these
spellings, `deleteKey` and `getNumKeys`. `barrier` is C++ that uses `add`, `set` and `wait`; the
timeout is kept there, for a PrefixStore reads and sets it without asking Python. Queues and
`list_keys` exist for Python callers only: through a PrefixStore they are a NotImplementedError of
torch's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from rallypoint.clock import Clock
from rallypoint.errors import (
    EnvironmentProblem,
    RallypointError,
    SessionLost,
    StoreClosed,
    StoreTimeout,
    StoreUnreachable,
    UsageError,
)
from rallypoint.store.client.client import Client
from rallypoint.store.client.failures import refused
from rallypoint.store.client.slots import Asked
from rallypoint.wire.messages import (
    Absent,
    Add,
    AnyReply,
    Append,
    CompareAndSet,
    Delete,
    Done,
    Exists,
    Failed,
    Get,
    Integer,
    Keys,
    Length,
    Names,
    Pop,
    Push,
    Request,
    Set,
    TimedOut,
    Value,
)
from rallypoint.wire.values import Parts

T = TypeVar("T")

_kept: list[Any] = []
"""Every c10d store of this process. torch's C++ holds only its own half of one, which without the
Python half aborts every later call ("Not implemented", measured with
`init_process_group(store=store.c10d())`), and does not say when it lets go. So they are kept, and
the client with them: some hundred bytes for each call of `c10d` and each clone, of which a process
group makes a handful."""

_INT64 = 1 << 63

WAITED_KEYS = 1024
"""Keys that one request waits for. Of more, all must come before the next ones are looked at: the
server serves others in between.
"""

CHECKED_KEYS = 16_384
"""Keys that one request asks about, for the same reason."""


def c10d(store: Client, prefix: str = "c10d/") -> Any:
    """Make a `torch.distributed.Store` whose keys and queues are those of `store` under `prefix`;
    its timeout is torch's, 300 s.

    Works from any thread; one that waits does not hold up another. It keeps `store` alive until the
    process ends or closes it.
    """
    kept: Any = _class()(store, _text(prefix))
    _kept.append(kept)
    return kept


@functools.cache
def _class() -> type:
    import torch.distributed as dist

    class C10dStore(_Operations, dist.Store):  # type: ignore[name-defined, misc]
        """A store of rallypoint as one of torch's."""

        def __init__(self, store: Client, prefix: str) -> None:
            dist.Store.__init__(self)  # type: ignore[attr-defined]
            _Operations.__init__(self, store, prefix)

    C10dStore.__qualname__ = C10dStore.__name__
    return C10dStore


def _arrived(store: Client, prefix: str, timeout: timedelta) -> Any:
    """Unpickled: in a new process."""
    there = c10d(store, prefix)
    there.set_timeout(timeout)
    return there


class _Operations:
    """Operations of torch 2.13's stores, as requests. Values are bytes; str and bytearray are taken
    as well, as torch takes them.

    Where torch waits, so does this, for at most `timeout`, and then raises DistStoreError.
    DistNetworkError is raised when the server cannot be asked, or is closed, or gives no answer;
    the RallypointError with all that is known about it is its `__cause__`.
    """

    timeout: timedelta  # torch's

    def __init__(self, store: Client, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._now = Clock().monotonic

    def __repr__(self) -> str:
        return f"<C10dStore {self._prefix!r} of {self._store!r}, timeout {self.timeout.total_seconds():g} s>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._store, self._prefix, self.timeout)  # as picklable as the store is

    # --- keys ---

    def set(self, key: str, value: bytes | str) -> None:
        """Write a key. When this returns, the server has it."""
        name = self._name(key)
        self._ask(Set, name, self._encoded(_bytes(value), name))

    def get(self, key: str) -> bytes:
        """Return the value of a key, as soon as there is one."""
        seconds = self._seconds(None)
        reply, body = self._ask(Get, self._name(key), seconds, wait=seconds)
        if type(reply) is Value:
            return self._decoded(reply, body)
        self._timed_out(seconds, [key])

    def add(self, key: str, amount: int) -> int:
        """Add to a number kept as decimal digits, and return the sum; a missing key counts as 0."""
        if isinstance(amount, float):
            raise TypeError("add(): the amount is an int, not a float")
        number = operator.index(amount)
        if not -_INT64 <= number < _INT64:
            raise TypeError(f"add(): an amount has 64 bits, and {number} does not fit")
        reply, _ = self._ask(Add, self._name(key), number, True)
        assert isinstance(reply, Integer)
        return reply.number

    def check(self, keys: Iterable[str]) -> bool:
        """Tell whether all these keys exist now."""
        names = self._names(keys)
        for start in range(0, len(names), CHECKED_KEYS):
            some = names[start : start + CHECKED_KEYS]
            reply, _ = self._ask(Exists, some)
            assert isinstance(reply, Names)
            if len(reply.names) < len(some):
                return False
        return True

    def wait(self, keys: Iterable[str], timeout: timedelta | float | None = None) -> None:
        """Return when all these keys exist."""
        names = self._names(keys)
        self._wait(names, self._seconds(timeout), names)

    def compare_set(self, key: str, expected: bytes | str, new: bytes | str) -> bytes:
        """Write `new` if the key holds `expected`, where b"" also means that there is none; returns
        what is there then. As in torch's stores `expected` comes back when there is no key, and
        nothing is written: `Client.compare_and_set` tells the two apart."""
        name, wanted, value = self._name(key), _bytes(expected), _bytes(new)
        data, compared = self._encoded(value, name), self._encoded(wanted, name)
        while True:
            modified: int | None = None
            if not wanted or isinstance(compared, Parts):
                # By revision: b"" is two cases, and what is large is not sent to be compared.
                found, body = self._ask(Get, name)
                if isinstance(found, Value):
                    current = self._decoded(found, body)
                    if current != wanted:
                        return current
                    modified = found.modified
                elif wanted:
                    return wanted
                else:
                    modified = 0
            reply, body = self._ask(
                CompareAndSet, name, data, 0, None if modified is not None else compared, modified
            )
            if isinstance(reply, Done):
                return value
            if modified is None:
                return self._decoded(reply, body) if isinstance(reply, Value) else wanted

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether there was one."""
        return not isinstance(self._ask(Delete, self._name(key))[0], Absent)

    def num_keys(self) -> int:
        """Count the keys."""
        reply, _ = self._ask(Keys, self._prefix, True)
        assert isinstance(reply, Integer)
        return reply.number

    def list_keys(self) -> list[str]:
        """Return all keys."""
        reply, _ = self._ask(Keys, self._prefix)
        assert isinstance(reply, Names)
        return [name[len(self._prefix) :] for name in reply.names]

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a value; a missing key counts as empty."""
        name, data = self._name(key), _bytes(value)
        if not isinstance(self._encoded(data, name), Parts):
            try:
                self._ask(Append, name, data)
                return
            except _torch("DistStoreError") as error:
                if getattr(error.__cause__, "code", "") != "value-too-large":
                    raise
        # The server does not append to what is large, or something large: read, join and write
        # here, unless somebody came between.
        while True:
            found, body = self._ask(Get, name)
            before, modified = (
                (self._decoded(found, body), found.modified)
                if isinstance(found, Value)
                else (b"", 0)
            )
            if isinstance(
                self._ask(
                    CompareAndSet, name, self._encoded(before + data, name), 0, None, modified
                )[0],
                Done,
            ):
                return

    # --- several at once ---

    def has_extended_api(self) -> bool:
        """Tell that `append`, `multi_get` and `multi_set` are there."""
        return True

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of all these keys, as soon as all exist."""
        names = self._names(keys)
        seconds = self._seconds(None)
        deadline = self._now() + seconds
        found: dict[str, bytes] = {}
        missing = tuple(dict.fromkeys(names))
        while missing:
            for name, (reply, body) in zip(
                missing, self._ask_many([(Get, (name,)) for name in missing]), strict=True
            ):
                if isinstance(reply, Value):
                    found[name] = self._decoded(reply, body)
            missing = tuple([name for name in missing if name not in found])
            if missing:
                self._wait(missing, max(0.0, deadline - self._now()), missing, seconds)
        return [found[name] for name in names]

    def multi_set(self, keys: Iterable[str], values: Iterable[bytes | str]) -> None:
        """Write several keys, one after the other, without waiting for each answer. When this
        returns, the server has all.
        """
        names = self._names(keys)
        given = [_bytes(value) for value in _several(values)]
        if len(names) != len(given):
            raise _torch("DistStoreError")(
                f"multi_set(): {len(names)} keys and {len(given)} values"
            )
        self._ask_many(
            [
                (Set, (name, self._encoded(value, name)))
                for name, value in zip(names, given, strict=True)
            ]
        )

    # --- queues ---

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Put a value at the end of a queue. Queues have names of their own: no key is made by
        this.
        """
        name = self._name(key)
        self._ask(Push, name, self._encoded(_bytes(value), name))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, waiting for one if `block`, otherwise
        QueueEmptyError.
        """
        seconds = self._seconds(None) if block else None
        reply, body = self._ask(Pop, self._name(key), seconds, wait=seconds)
        if isinstance(reply, Value):
            return self._decoded(reply, body)
        if seconds is None:
            raise _torch("QueueEmptyError")("queue is empty")
        self._timed_out(seconds, [key])

    def queue_len(self, key: str) -> int:
        """Count the values in a queue."""
        reply, _ = self._ask(Length, self._name(key))
        assert isinstance(reply, Integer)
        return reply.number

    # --- for torch ---

    def clone(self) -> Any:
        """Another store over the same keys, with a timeout of its own. Both use one connection, on
        which nobody holds up another.
        """
        return _arrived(self._store, self._prefix, self.timeout)

    deleteKey = delete_key  # how C++ calls them
    getNumKeys = num_keys

    # --- asking ---

    def _name(self, key: object) -> str:
        return self._prefix + _text(key)

    def _names(self, keys: object) -> tuple[str, ...]:
        return tuple([self._name(key) for key in _several(keys)])

    def _seconds(self, timeout: timedelta | float | None) -> float:
        """Return how long to wait; None: the store's timeout. As in TCPStore 0 does not wait; below
        0 does not either."""
        if timeout is None:
            timeout = self.timeout
        return max(
            0.0, timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        )

    def _ask(
        self, kind: type[Request], *fields: Any, wait: float | None = None
    ) -> tuple[AnyReply, memoryview | None]:
        try:
            return _again(self._store.ask, kind, *fields, wait=wait)
        except (EnvironmentProblem, UsageError) as error:
            _raise(error)

    def _ask_many(self, requests: list[Asked]) -> list[tuple[AnyReply, memoryview | None]]:
        try:
            many = self._store.ask_many
            # Of several changes some may have happened.
            reads = requests and not requests[0][0].changes
            replies = _again(many, requests) if reads else many(requests)
            for (kind, fields), (reply, _) in zip(requests, replies, strict=True):
                if isinstance(reply, Failed):
                    raise refused(kind, fields, reply)
        except (EnvironmentProblem, UsageError) as error:
            _raise(error)
        return replies

    def _wait(
        self,
        names: tuple[str, ...],
        seconds: float,
        missing: tuple[str, ...],
        allowed: float | None = None,
    ) -> None:
        """Wait for these keys. `missing` and `allowed` are for the error."""
        until = self._now() + seconds
        for start in range(0, len(names), WAITED_KEYS):
            left = max(0.0, until - self._now()) if start else seconds
            reply, _ = self._ask(Exists, names[start : start + WAITED_KEYS], left, wait=left)
            if isinstance(reply, TimedOut):
                cut = len(self._prefix)
                self._timed_out(
                    seconds if allowed is None else allowed,
                    [name[cut:] for name in reply.missing or missing],
                )

    def _timed_out(self, seconds: float, keys: list[str]) -> NoReturn:
        # TCPStore's words: what reads logs knows them.
        raise _torch("DistStoreError")(
            f"wait timeout after {round(seconds * 1000)}ms, keys: {', '.join(map(str, keys))}"
        )

    def _encoded(self, value: bytes, name: str) -> bytes | Parts:
        """Encode a value. `name`: of the key, or the queue, that it is for."""
        try:
            return self._store.encoded(value, name)
        except (EnvironmentProblem, UsageError) as error:
            _raise(error)

    def _decoded(self, reply: Value, body: memoryview | None) -> bytes:
        try:
            value = self._store.decoded(reply, body)
        except (EnvironmentProblem, UsageError) as error:
            _raise(error)
        if type(value) is not bytes:
            raise _torch("DistStoreError")(
                f"the value is no bytes but a {type(value).__name__}: something else than a c10d store wrote it"
            )
        return value


def _again(ask: Callable[..., T], *given: Any, **named: Any) -> T:
    """Ask, and once more when it is known that the session was over before: this process stood
    still for too long. Nothing that torch keeps here goes with a session, so it need not know.
    """
    try:
        return ask(*given, **named)
    except SessionLost as lost:
        if not lost.same_server or lost.outcome != "did not happen":
            raise
        return ask(*given, **named)


def _text(key: object) -> str:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, bytes | bytearray):
        return key.decode()
    raise TypeError(f"a key is a str, not a {type(key).__name__}")


def _bytes(value: object) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"a value of a c10d store is bytes or str, not a {type(value).__name__}")


def _several(things: object) -> Iterable[Any]:
    if isinstance(things, Iterable) and not isinstance(things, str | bytes | bytearray):
        return things
    raise TypeError(f"a list is wanted here, not a {type(things).__name__}")


def _torch(name: str) -> type[Exception]:
    import torch.distributed as dist

    found: type[Exception] = getattr(dist, name)
    return found


def _raise(error: RallypointError) -> NoReturn:
    """Raise it as one of torch's errors. Network: nobody answered. Store: the server refused."""
    network = isinstance(error, StoreUnreachable | SessionLost | StoreClosed | StoreTimeout)
    raise _torch("DistNetworkError" if network else "DistStoreError")(
        f"{error.headline} ({error.code})"
    ) from error
