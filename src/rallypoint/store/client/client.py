"""Ask, wait, time out, reconnect; never do a thing twice.

`Client` is a dict whose values live in a server. It turns values into bytes and replies into values
or exceptions; everything about the conversation is in `session.py`. What users hold is a `Store`
(`primitives/store.py`): this, and what is built on it.
"""

from __future__ import annotations

import atexit
import os
import stat
import sys
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec

from rallypoint.clock import Clock
from rallypoint.errors import (
    LimitExceeded,
    RallypointError,
    StoreClosed,
    StorePickled,
    StoreTimeout,
    UpdateLost,
    UpdateLostWarning,
    UsageError,
    ValueUnsupported,
)
from rallypoint.host import fd_passing
from rallypoint.store import discovery
from rallypoint.store.address import Address, parse
from rallypoint.store.client.arguments import described, key_of, number, positive, seconds_of
from rallypoint.store.client.connect import OpenSocket
from rallypoint.store.client.connection import Answer
from rallypoint.store.client.failures import failure, refused
from rallypoint.store.client.lease import Figures, Lease
from rallypoint.store.client.session import (
    BYE_SECONDS,
    CLOSED,
    Options,
    Session,
    leave,
    stay_when_leaving,
)
from rallypoint.store.client.slots import Asked, ReplyKeeper
from rallypoint.wire import messages as wire
from rallypoint.wire import values
from rallypoint.wire.messages import (
    TAGS,
    Absent,
    Add,
    AnyReply,
    Changes,
    CompareAndSet,
    Delete,
    Done,
    Exists,
    Failed,
    Get,
    Identity,
    Integer,
    Keys,
    Names,
    Request,
    Set,
    State,
    Status,
    TimedOut,
    Value,
    Watch,
)
from rallypoint.wire.values import Parts

SEEN_KEYS = 10_000
"""Keys whose last read revision is remembered, to notice a lost update. The oldest are forgotten.
"""

SEEN_LOCKS = 1000
"""Names of locks of which `statistics` knows. The oldest are forgotten."""

WATCH_SECONDS = 60.0
"""Seconds that one request of a watch waits on the server; then it is asked anew. Only shortens
what a dead server costs."""

TOKEN, REVISION = "the token of a lock", "a revision of this store"


ABSENT: Final = values.ABSENT
"""Stands for "there is no such key"."""

_stores: weakref.WeakValueDictionary[int, Client] = weakref.WeakValueDictionary()
"""Open stores of this process, and in a forked child those of its parent until they are used there.
"""

_ending_in = 0  # the process in which multiprocessing is to end them; 0: it was never told


def _opened() -> list[Client]:
    """These stores. (Nothing weak can be gone through while another thread makes a store or closes
    one; but it can be copied.)
    """
    return [store for ref in _stores.valuerefs() if (store := ref()) is not None]


def _end_all() -> None:
    """End all stores when the interpreter leaves: what the sessions hold is to be released now, not
    when their leases are over."""
    leave()
    clock = Clock()
    for store in _opened():
        store._end(max(0.0, BYE_SECONDS - clock.elapsed()))


def _end_with_the_process() -> None:
    """Have all stores end with the process. `atexit` is enough for most; the children of
    multiprocessing leave in a way of their own."""
    global _ending_in
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _ending_in != os.getpid():
        if _ending_in == 0:
            util.register_after_fork(_end_all, _end_with_the_child)
        _ending_in = os.getpid()
        util.Finalize(
            None, _end_all, exitpriority=-100
        )  # below 0: after its own children were waited for


def _end_with_the_child(_: object) -> None:
    """Arrange it again in a child of multiprocessing, which has forgotten what is to be done at its
    end: also what it was told while its arguments, a store among them, arrived."""
    global _ending_in
    _ending_in = -1
    _end_with_the_process()


def _after_fork() -> None:
    for store in _opened():
        store._leave_to_parent()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_after_fork)


class Entry(NamedTuple):
    """A value and the revision of the store at which it was written."""

    value: Any
    revision: int


class Change(NamedTuple):
    """One change of a key. `value` is ABSENT when the key was removed."""

    key: str
    value: Any
    revision: int


class Client:
    """A store's client.

    Works from any thread, in a forked child (which gets a session of its own), and as an argument
    of `multiprocessing.Process`. Every method may raise `StoreTimeout`, `SessionLost`,
    `StoreClosed`, `StoreUnreachable` (all three latter are ConnectionErrors) and `LimitExceeded`;
    what a call leaves behind after each is in `docs/reference/store.md`. `timeout` of the store
    bounds every answer that waits for nobody; a large value may take longer for as long as its
    bytes move.
    """

    def __init__(
        self, options: Options, secret: bytes, open_socket: OpenSocket | None = None
    ) -> None:
        """Connect. `options` and `secret` as `resolve` returns them; see there for what it
        raises."""
        self._options = options
        self._secret = secret
        self._open_socket = open_socket
        self._closed = False
        self._lost_updates = 0
        self._figures: OrderedDict[str, Figures] = OrderedDict()  # of locks, by name
        self._warned: set[str] = set()
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._making = threading.RLock()  # a session, in a forked child
        self._session = self._connected()
        _stores[id(self)] = self

    def _connected(self) -> Session:
        """Make a session of this process, with its first connection."""
        session = Session(self._options, self._secret, self._open_socket)
        self._close_with_this(session)  # first: a signal handler may raise behind any of these
        try:
            session.connect()
            _end_with_the_process()
        except BaseException as error:
            session.close(0.0)
            self._finalizer.detach()
            if isinstance(error, RallypointError):
                # it has told of all attempts: their own tracebacks would only bury it
                raise error from None
            raise
        return session

    def _close_with_this(self, session: Session) -> None:
        self._finalizer = weakref.finalize(
            self, session.close, 0.0
        )  # wherever the collector runs: it must not wait there
        self._finalizer.atexit = False

    def _leave_to_parent(self) -> None:
        """Leave the session to the parent, in a forked child, which has no other thread: close the
        descriptors of the parent's connections, and count anew."""
        self._finalizer.detach()
        self._making = threading.RLock()
        self._session.abandon()
        self._seen.clear()
        self._figures.clear()
        self._lost_updates = 0

    def _live(self) -> Session:
        """Return the session in which to ask. Raises what became of the last one, if nobody was
        told."""
        session = self._session
        return session if session.end is None else self._next_session()

    def _next_session(self) -> Session:
        """Replace the last session, which is over: it was lost or closed, or this process is a
        child of the one that connected."""
        with self._making:
            former = self._session
            if former.end is None:
                return former
            if self._closed or former.was_closed:
                stay_when_leaving()
                raise StoreClosed("store-closed", CLOSED, outcome="did not happen")
            if former.foreign:
                session = self._connected()
            else:
                if not former.end.told:
                    former.end.told = True
                    raise former.end.error(None)
                session = Session(self._options, self._secret, self._open_socket, former)
            if self._session is not former:  # a signal handler used the store meanwhile
                session.close()
                return self._session
            before = self._finalizer
            self._close_with_this(session)
            before.detach()
            self._session = session
            return session

    # --- asking ---

    def ask(
        self,
        kind: type[Request],
        *fields: Any,
        wait: float | None = None,
        into: ReplyKeeper | None = None,
        session: Session | None = None,
    ) -> Answer:
        """Send a request, for what is built on the store: one of `wire/messages.py`, and return its
        reply and the bytes of a large value.

        `fields` are those after `seq` and `acked`; an encoded value (`values.encode`) stands at its
        place, large or not. `wait` is the number of seconds that stands in the request's `timeout`
        as well (math.inf: for ever), None when it waits for nobody. `into` gets the reply as well;
        after an exception it is there, or what it would have handed over is taken back. `session`:
        the one that has a lease, where no other will do. `Failed` is raised; `TimedOut` is
        returned.
        """
        chosen = session or self._session
        if session is None and chosen.end is not None:
            chosen = self._next_session()
        ((reply, body),) = chosen.request([(kind, fields)], wait, into)
        if type(reply) is Failed:
            raise refused(kind, fields, reply)
        return reply, body

    def ask_many(self, requests: list[Asked]) -> list[Answer]:
        """Like `ask` for several requests that wait for nobody, without waiting in between.
        `Failed` is returned.
        """
        session, answers = self._live(), list[Answer]()
        while len(answers) < len(requests):
            answers += session.request(requests[len(answers) :])
        return answers

    def lease(self, name: str, ttl: float) -> Lease:
        """Make, for what is built on the store, the lease of a lock that is to be asked for with
        this `ttl`. From `Lease.begin` on signs of life are given often enough, until `Lease.drop`.
        Set its `token` and `state` when it is granted; if it is over by then, the grant may be,
        too."""
        session = self._live()
        figures = self._figures.get(name)
        if figures is None:
            figures = self._figures.setdefault(
                name, Figures()
            )  # another thread may have been quicker
            if len(self._figures) > SEEN_LOCKS:
                self._figures.popitem(last=False)
        what = f"the lock {values.shown(name)}"
        return Lease(session.leases, name, what, ttl, figures)

    def encoded(self, value: object, key: str | None = None, *, called: str = "") -> bytes | Parts:
        """Return the value's bytes. Raises ValueUnsupported; LimitExceeded when the server would
        not take it for its size. `key`: for which it is, to be named by the error; `called`: what
        else it is for, as the error is to name it."""
        limits = self._session.limits
        limit = limits.value_bytes if limits is not None else None
        try:
            data = values.encode(value, allow_pickle=self._options.allow_pickle, limit=limit)
        except ValueUnsupported as error:
            called = _called(key, called)
            if not called:
                raise
            inside = error.headline.removeprefix(
                "value"
            )  # "value["a"]: a function cannot be stored"
            headline = called + inside if key is not None else f"{called}: {error.headline}"
            raise ValueUnsupported(
                error.code, headline, why=error.why, help=error.help
            ) from error.__cause__
        except values.TooLarge as error:
            raise _too_large(_called(key, called), str(error), limit) from None
        if type(data) is Parts and limit is not None and data.size > limit:
            raise _too_large(_called(key, called), f"a value of {data.size} bytes", limit)
        return data

    def decoded(self, reply: Value, body: memoryview | None, device: Any = None) -> Any:
        """Return the value of a reply. `device`: where its tensors are to be, None: on the CPU."""
        return values.decode(
            reply.value if body is None else body,
            allow_pickle=self._options.allow_pickle,
            device=device,
        )

    # --- as a dict ---

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key. Raises KeyError when there is none."""
        value = self.get(key, ABSENT)
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: object) -> None:
        """Write a key; returns when the server has it. See `set`."""
        self._write(key, value)

    def __delitem__(self, key: str) -> None:
        """Remove a key. Raises KeyError when there is none."""
        if not self.delete(key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        """Tell whether the key exists."""
        return isinstance(key, str) and bool(_names(self.ask(Exists, (key_of(key),))[0]))

    def __len__(self) -> int:
        """Count the keys."""
        reply, _ = self.ask(Keys, "", True)
        assert isinstance(reply, Integer)
        return reply.number

    def __bool__(self) -> bool:
        """True, also when it is empty: a store is no container that one tests for content."""
        return True

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of one revision, sorted."""
        return iter(self.keys())

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, at one revision, sorted."""
        return sorted(_names(self.ask(Keys, key_of(prefix))[0]))

    def items(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """(key, value) for the keys of one revision; the values are read as the iteration goes on,
        and a key that was removed meanwhile is left out."""
        keys = self.keys(prefix)
        for start in range(0, len(keys), 64):
            batch = keys[start : start + 64]
            yield from (
                (key, value)
                for key, value in zip(batch, self.get_many(batch, ABSENT), strict=True)
                if value is not ABSENT
            )

    def values(self, prefix: str = "") -> Iterator[Any]:
        """Iterate over the values of `items`."""
        return (value for _, value in self.items(prefix))

    # --- keys ---

    def get(self, key: str, default: Any = None, *, device: Any = None) -> Any:
        """Return the value of a key, `default` when there is none: it never waits (torch's stores
        do; see `wait`).

        `device`: where tensors in it are to be; they arrive on the CPU otherwise.
        """
        reply, body = self.ask(Get, key_of(key))
        if type(reply) is Value:
            self._saw(key, reply.modified)
            return self.decoded(reply, body, device)
        self._saw(key, 0)
        return default

    def read(self, key: str, *, device: Any = None) -> Entry:
        """Return the value of a key and the revision at which it was written, for
        `compare_and_set(..., revision=)`; (ABSENT, 0) without one."""
        reply, body = self.ask(Get, key_of(key))
        if type(reply) is Value:
            return Entry(self.decoded(reply, body, device), reply.modified)
        return Entry(ABSENT, 0)

    def wait(
        self, key: str, timeout: float | timedelta | None = None, *, device: Any = None
    ) -> Any:
        """Return the value of a key, as soon as there is one. Raises StoreTimeout (`wait-timeout`,
        a TimeoutError) after `timeout` seconds; None: for as long as the server lives. Nothing is
        left behind by either."""
        seconds = seconds_of(timeout)
        reply, body = self.ask(Get, key_of(key), seconds, wait=seconds)
        if type(reply) is Value:
            self._saw(key, reply.modified)
            return self.decoded(reply, body, device)
        raise StoreTimeout(
            "wait-timeout",
            f"nobody set {values.shown(key)} in the store at {self.address} within {seconds:g} s",
        )

    def set(
        self,
        key: str,
        value: object,
        *,
        ttl: float | timedelta | None = None,
        ephemeral: bool = False,
        fence: int | None = None,
    ) -> int:
        """Write a key, and return the revision of that. `ttl`: seconds after which the key goes;
        `ephemeral`: it goes with this session. `fence`: the token of a lock; raises FenceStale, and
        writes nothing, unless that is held now.

        When it replaces a change that somebody else made after this store last read the key, that
        update is lost: UpdateLostWarning, once per key, or, with `strict`, UpdateLost (the write
        has happened).
        """
        return self._write(key, value, ttl, ephemeral, fence)

    def _write(
        self,
        key: str,
        value: object,
        ttl: float | timedelta | None = None,
        ephemeral: bool = False,
        fence: int | None = None,
    ) -> int:
        """Write a key; see `set`. Called by what the user calls, so that a warning finds the user's
        line."""
        seconds = positive("ttl", ttl) if ttl is not None else None
        fence = number("fence", fence, TOKEN)
        if not isinstance(ephemeral, bool):
            raise TypeError(
                f"ephemeral={ephemeral!r}: whether the key goes with this session is True or False, not {described(ephemeral)}"
            )
        key = key_of(key)
        data = self.encoded(value, key)
        seen = self._seen.pop(key, None)
        reply, _ = self.ask(Set, key, data, 0, seconds, ephemeral, fence, seen)
        assert isinstance(reply, Done)
        if reply.by:
            self._lost_update(key, reply.by)
        return reply.revision

    def set_many(
        self, mapping: Mapping[str, object], *, ttl: float | timedelta | None = None
    ) -> None:
        """Write several keys without waiting for each answer; returns when the server has all. Not
        one change: others may see some of them first. What an exception leaves written is in
        `docs/reference/store.md`."""
        if not hasattr(mapping, "items"):
            raise TypeError(
                f"set_many() takes a dict, not {described(mapping)}: make it one with dict(...)"
            )
        seconds = positive("ttl", ttl) if ttl is not None else None
        requests: list[Asked] = []
        for key, value in mapping.items():
            key = key_of(key)
            requests.append((Set, (key, self.encoded(value, key), 0, seconds)))
        for _, fields in requests:
            self._seen.pop(fields[0], None)
        for (kind, fields), (reply, _) in zip(requests, self.ask_many(requests), strict=True):
            if isinstance(reply, Failed):
                raise refused(kind, fields, reply)

    def get_many(
        self, keys: Iterable[str], default: Any = None, *, device: Any = None
    ) -> list[Any]:
        """Return the values of several keys in the same order, `default` where there is none,
        without waiting for each answer."""
        if isinstance(keys, str):
            raise TypeError(
                "get_many() takes several keys, not a str: one key is store.get(key), or [key]"
            )
        found = []
        for reply, body in self.ask_many([(Get, (key_of(key),)) for key in keys]):
            if isinstance(reply, Failed):
                raise failure(reply)
            found.append(self.decoded(reply, body, device) if type(reply) is Value else default)
        return found

    def delete(self, key: str, *, fence: int | None = None) -> bool:
        """Remove a key; whether there was one."""
        key = key_of(key)
        self._seen.pop(key, None)
        return not isinstance(
            self.ask(Delete, key, False, number("fence", fence, TOKEN))[0], Absent
        )

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a key and return what it was; `default`, if given, when there is none, else
        KeyError. Of several callers one gets it.
        """
        if len(default) > 1:
            raise TypeError(
                f"pop() takes a key and at most one default, not {1 + len(default)} arguments"
            )
        key = key_of(key)
        self._seen.pop(key, None)
        reply, body = self.ask(Delete, key, True)
        if type(reply) is Value:
            return self.decoded(reply, body)
        if default:
            return default[0]
        raise KeyError(key)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to an integer of 64 bits, exactly once, and return the sum; a missing key counts as
        0. Raises WrongType.
        """
        if type(amount) is not int:
            right = "x.item()" if hasattr(amount, "item") else "int(x)"
            raise TypeError(f"add() takes an int, not {described(amount)}: give it as {right}")
        if not -(1 << 63) <= amount < 1 << 63:
            raise OverflowError(f"add() counts in 64 bits: {amount} is outside them")
        reply, _ = self.ask(Add, key_of(key), amount)
        assert isinstance(reply, Integer)
        return reply.number

    def compare_and_set(
        self,
        key: str,
        expected: Any,
        new: object,
        *,
        revision: int | None = None,
        fence: int | None = None,
    ) -> tuple[bool, Any]:
        """Write `new` if the key holds `expected` (ABSENT: if there is no such key); returns
        whether it did, and the value now.

        With `revision`, from `read`, it is that which is compared, and `expected` does not matter.
        Values are compared by their bytes: 1, 1.0 and True differ, and so do dicts in another
        order. `fence`: as in `set`.
        """
        key = key_of(key)
        fence, revision = number("fence", fence, TOKEN), number("revision", revision, REVISION)
        data = self.encoded(new, key)
        self._seen.pop(key, None)
        while True:
            compared: bytes | None = None
            modified = revision
            if revision is None:
                before = None if expected is ABSENT else self.encoded(expected, key)
                if isinstance(
                    before, Parts
                ):  # too large to send twice: compare here, by revision there
                    found, body = self.ask(Get, key)
                    if type(found) is not Value or values.join(before) != (
                        found.value if body is None else body
                    ):
                        return False, self.decoded(found, body) if type(found) is Value else ABSENT
                    modified = found.modified
                else:
                    compared = before
            reply, body = self.ask(CompareAndSet, key, data, 0, compared, modified, None, fence)
            if isinstance(reply, Done):
                return True, new
            if revision is None and modified is not None:
                continue  # it changed between the two
            return False, self.decoded(reply, body) if type(reply) is Value else ABSENT

    def update(
        self, key: str, fn: Callable[[Any], Any], default: Any = None, *, fence: int | None = None
    ) -> Any:
        """Replace a value by `fn(value)`, as one change that nobody comes between, and return the
        new value; `default` is given to `fn` when there is no such key. `fn` is called again
        whenever somebody else was quicker, so it must have no effect of its own. `fence`: as in
        `set`."""
        key, fence = key_of(key), number("fence", fence, TOKEN)
        self._seen.pop(key, None)
        reply, body = self.ask(Get, key)
        while True:
            there = type(reply) is Value
            new = fn(self.decoded(reply, body) if isinstance(reply, Value) else default)
            data = self.encoded(new, key)
            modified = reply.modified if isinstance(reply, Value) and there else 0
            reply, body = self.ask(CompareAndSet, key, data, 0, None, modified, None, fence)
            if isinstance(reply, Done):
                return new

    def watch(
        self,
        prefix: str = "",
        since: int | None = None,
        *,
        timeout: float | timedelta | None = None,
    ) -> Iterator[Change]:
        """Iterate over the changes of keys that begin with `prefix`, in order and without a gap,
        from now on or after revision `since`, for ever.

        A value over 64 KiB is read when it is its turn, and is then the newest. Raises Compacted
        when `since` is too long ago, and StoreTimeout when nothing changes for `timeout` seconds
        (the iterator can be asked again).
        """
        prefix = key_of(prefix)
        seconds, since = seconds_of(timeout), number("since", since, REVISION)
        if since is None:
            reply, _ = self.ask(Watch, prefix, None, 0.0)
            since = reply.revision
        return _Changes(self, prefix, since, seconds)

    # --- about ---

    @property
    def address(self) -> str:
        """Address of the server, as `connect` was given it."""
        return str(self._session.address)

    @property
    def timeout(self) -> float:
        """Seconds within which the server must answer what waits for nobody."""
        return self._options.timeout

    @property
    def identity(self) -> Identity:
        """Identity of this process for others."""
        return self._options.identity

    def status(self) -> dict[str, int]:
        """Return what the server holds: keys, bytes, sessions, waiting requests, and its limits."""
        reply, _ = self.ask(Status)
        assert isinstance(reply, State)
        return {
            "revision": reply.revision,
            "keys": reply.keys,
            "used_bytes": reply.used_bytes,
            "sessions": reply.sessions,
            "waiting": reply.waiting,
            "max_bytes": reply.limits.store_bytes,
            "max_value_bytes": reply.limits.value_bytes,
            "max_keys": reply.limits.keys,
        }

    def statistics(self) -> dict[str, Any]:
        """Return what this store object did in this process: operations by kind, bytes (shared
        memory apart), reconnects, lost updates, and of each lock (the last 1000 names) how often it
        was had, not had in time and lost, and the seconds of waiting and holding."""
        counts, sent, received = self._session.totals()
        return {
            "operations": {
                name: count
                for name, tag in sorted((kind.__name__, tag) for kind, tag in TAGS.items())
                if (count := counts[tag])
            },
            "bytes_sent": sent,
            "bytes_received": received,
            "reconnects": self._session.reconnects,
            "sessions": self._session.number,
            "lost_updates": self._lost_updates,
            "locks": {
                name: msgspec.structs.asdict(found) for name, found in sorted(self._figures.items())
            },
        }

    def c10d(self, prefix: str = "c10d/") -> Any:
        """Return this store as a `torch.distributed.Store`, for `init_process_group(store=...)`;
        its keys begin with `prefix`."""
        from rallypoint.store.c10d import c10d

        return c10d(self, prefix)

    def __repr__(self) -> str:
        session = self._session
        connection = session.slots.connection if session.end is None else None
        if self._closed or session.was_closed:
            how = "closed"
        elif connection is None:
            how = "not connected"  # in this process yet
        elif connection.local:
            how = "connected by a Unix socket" + (", shared memory" if connection.shared else "")
        else:
            how = "connected by TCP"
        return f"<Store {self.address}: {how}, {self.identity}>"

    def __reduce__(self) -> tuple[Any, ...]:
        import multiprocessing.context
        import multiprocessing.process

        if not fd_passing.active() and multiprocessing.context.get_spawning_popen() is None:
            raise StorePickled(
                "store-pickled",
                "a store is pickled only on its way into a new process: it carries its secret, which must not end up in a file or a queue",
                help=(
                    (
                        "give it to the process when that starts",
                        "multiprocessing.Process(target=work, args=(store,))",
                    ),
                    (
                        "to a pool, by its initializer",
                        "multiprocessing.Pool(initializer=begin, initargs=(store,))",
                    ),
                    ("or connect there", "rallypoint.connect(address, secret_file=...)"),
                ),
            )
        return type(self), (self._options, self._secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session: what it holds is released at once. Threads that wait here get
        StoreClosed. May be called again.
        """
        self._end(BYE_SECONDS)

    def _end(self, wait: float) -> None:
        """End the session; see `close`. `wait`: seconds for the server's answer."""
        self._closed = True
        self._session.close(wait)
        self._finalizer.detach()  # not before: a signal handler may raise in here
        _stores.pop(id(self), None)
        self._session.news.flush()

    def _saw(self, key: str, revision: int) -> None:
        seen = self._seen
        seen[key] = revision
        if len(seen) > SEEN_KEYS:
            seen.popitem(last=False)

    def _lost_update(self, key: str, by: str) -> None:
        self._lost_updates += 1
        text = f"{key!r} was changed by {by} between this read and write; use add() or update()"
        if self._options.strict:
            raise UpdateLost(
                "update-lost", text, why=("the write has happened, and what it replaced is gone",)
            )
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"update-lost: {text}", UpdateLostWarning, stacklevel=4)


class _Changes(Iterator[Change]):
    """Iterator of `Client.watch`."""

    def __init__(self, store: Client, prefix: str, since: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._timeout = timeout
        self._ready: deque[wire.Change] = deque()
        self.revision = since  # up to which everything was asked for

    def __next__(self) -> Change:
        left = self._timeout
        while not self._ready:
            seconds = min(left, WATCH_SECONDS)
            reply, _ = self._store.ask(Watch, self._prefix, self.revision, seconds, wait=seconds)
            if isinstance(reply, TimedOut):
                self.revision = (
                    reply.revision
                )  # nothing changed here up to then; an older one would be forgotten one day
                left -= seconds
                if left <= 0:
                    raise StoreTimeout(
                        "wait-timeout",
                        f"nothing that begins with {values.shown(self._prefix)} changed within {self._timeout:g} s",
                    )
            elif isinstance(reply, Changes):
                self._ready, self.revision = deque(reply.changes), reply.until
        key, revision, value, large = msgspec.structs.astuple(self._ready[0])
        if large:
            value = self._store.read(key).value
        elif value is not None:
            value = self._store.decoded(Value(0, 0, 0, value), None)
        else:
            value = ABSENT
        # not before: an exception while it was read leaves it to be read again
        self._ready.popleft()
        return Change(key, value, revision)


def resolve(
    address: str | None,
    *,
    secret: bytes | str | None,
    secret_file: str | os.PathLike[str] | None,
    job: str,
    timeout: float | timedelta,
    ttl: float | timedelta,
    allow_pickle: bool,
    strict: bool,
    same_host: bool,
) -> tuple[Options, bytes]:
    """Return the options and the secret of a client, from the arguments of `rallypoint.connect` and
    what this process knows of a store of its own."""
    seconds, lease = positive("timeout", timeout), positive("ttl", ttl)
    here = discovery.current()
    rank = here.rank if here is not None else None
    if address is None:
        given = secret is not None or secret_file is not None
        if here is not None or given:
            address = (
                here.address
                if here is not None and here.rank is not None
                else discovery.exported_address()
            )
        if not address:
            raise discovery.no_store()
        job = job or (here.job if here is not None else os.environ.get("RALLYPOINT_JOB", ""))
    parsed = _address(address)
    if secret is not None and secret_file is not None:
        raise UsageError("usage", "secret= and secret_file= are both given: one of them is enough")
    if secret is not None:
        key = discovery.checked_secret(secret)
    elif secret_file is not None:
        key = discovery.secret_from_file(os.fspath(secret_file))
    elif here is not None and here.address in (address, str(parsed)):
        key = here.secret()
    elif path := os.environ.get("RALLYPOINT_SECRET_FILE"):
        key = discovery.secret_from_file(path)
    else:
        raise UsageError(
            "secret-missing",
            f"the store at {parsed} cannot be joined without its secret",
            help=(
                ("give what the server has", "rallypoint.connect(address, secret=server.secret)"),
                (
                    "or the file that rallypoint serve names",
                    "rallypoint.connect(address, secret_file=...)",
                ),
            ),
        )
    return Options(parsed, rank, job, seconds, lease, allow_pickle, strict, same_host), key


def _address(given: object) -> Address:
    """Check and parse the address that `connect` was given."""
    if not isinstance(given, str):
        if isinstance(getattr(given, "address", None), str):
            raise TypeError(f"an address is a str, not {described(given)}: give server.address")
        if isinstance(given, os.PathLike):
            raise TypeError(
                f"an address is a str, not {described(given)}: give unix://{os.path.abspath(given)!s}"
            )
        raise TypeError(
            f'an address is a str such as "tcp://127.0.0.1:29500", not {described(given)}'
        )
    address = parse(given)
    try:
        mode = os.stat(address.path).st_mode if address.path else stat.S_IFSOCK
    except OSError:
        return address  # not there yet, perhaps
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            "address-malformed",
            f"{given!r} is not the address of a store: {address.path} is a {'folder' if stat.S_ISDIR(mode) else 'file'}, not a Unix socket",
            help=(("give the address that the server prints", ""),),
        )
    return address


def _called(key: str | None, called: str) -> str:
    """Name a value for an error: by the key for which it is, if there is one."""
    return called if key is None else f"store[{values.shown(key)}]"


def _too_large(called: str, what: str, limit: int | None) -> LimitExceeded:
    return LimitExceeded(
        "value-too-large",
        f"{called}{': ' if called else ''}{what} is more than the store takes: the limit is {limit} bytes (max_bytes=)",
        help=(
            (
                "give the store more memory",
                "rallypoint.serve(max_bytes=...), rallypoint serve --max-bytes ...",
            ),
        ),
    )


def _names(reply: AnyReply) -> tuple[str, ...]:
    assert isinstance(reply, Names)
    return reply.names
