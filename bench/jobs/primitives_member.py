"""A process that uses the primitives of a store and writes down what it asked and what it was told.
Argument: how, as JSON.

It does what it is told on stdin, one line of JSON per call (`Member.obey`), and says "done" and
what came of it; or, with `seconds`, what chance tells its threads. Every call is a line in its
history when it begins, and again when it has ended: a process that is killed has written what it
was about to do. What the fields are is with `tests/primitives/histories.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import rallypoint
from rallypoint import (
    BarrierBroken,
    BarrierMismatch,
    BarrierTimeout,
    FenceStale,
    LeaseLost,
    LockTimeout,
    OnceFailed,
    RallypointError,
    SessionLost,
    StoreTimeout,
    WouldDeadlock,
)

Spec = dict[str, Any]
Event = dict[str, Any]

TRIES = 200
"""A thread gives up when so many calls in a row had no answer: the store is gone."""


class History:
    """A file with what this process did."""

    def __init__(self, path: str, who: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._who = who
        self._count = itertools.count(1)

    def begin(self, kind: str, name: str, **more: Any) -> Event:
        """`session`: of what belongs together, a lock and its release: the real session may have
        changed in between.
        """
        number = next(self._count)
        event = {
            "id": number,
            "who": f"{self._who}.{threading.current_thread().name}",
            "kind": kind,
            "name": name,
            **more,
        }
        event.setdefault("session", f"{self._who}-{number}")
        event["start"] = time.monotonic()
        self._write(event)
        return event

    def end(self, event: Event, told: str, **more: Any) -> str:
        if told not in ("unknown", "not done"):
            event["end"] = time.monotonic()
        event.update(told=told, **more)
        self._write(event)
        return told

    def failed(self, event: Event, error: RallypointError) -> str:
        """Nothing came back but this."""
        sure = getattr(error, "outcome", "did not happen") == "did not happen"
        return self.end(
            event, "not done" if sure else "unknown", error=f"{type(error).__name__}: {error}"[:300]
        )

    def _write(self, event: Event) -> None:
        os.write(self._fd, json.dumps(event).encode() + b"\n")


class Member:
    """One thread of this process, with what it holds."""

    def __init__(self, store: rallypoint.Store, history: History, spec: Spec) -> None:
        self.store = store
        self.history = history
        self.spec = spec
        self.locks: dict[
            str, tuple[Any, Any, str]
        ] = {}  # the Lock, its Grant, and what the history calls it
        self.taken: list[tuple[Any, Any, str]] = []

    def obey(self, do: str, **fields: Any) -> str:
        """Make a call, and say what came of it in one word."""
        act: Callable[..., str] = getattr(self, f"do_{do}")
        return act(**fields)

    # --- locks

    def do_lock(self, name: str, ttl: float = 10.0, timeout: float | None = None) -> str:
        history = self.history
        event = history.begin(
            "lock", name, leased=True
        )  # its lease may be over before the session is
        lock = self.store.lock(name, ttl=ttl, timeout=timeout)
        try:
            grant = lock.acquire()
        except LockTimeout:
            return history.end(event, "timed out", left=event["start"] + (timeout or 0.0))
        except WouldDeadlock:
            return history.end(event, "refused")
        except RallypointError as error:
            return history.failed(event, error)
        self.locks[name] = (lock, grant, event["session"])
        return history.end(event, "granted", token=grant.token, revision=grant.token)

    def do_write(self, name: str) -> str:
        _, grant, session = self.locks[name]
        value = f"{session} {time.monotonic_ns()}"
        event = self.history.begin("write", name, session=session, token=grant.token, value=value)
        try:
            self.store.set(f"data/{name}", value, fence=grant.token)
        except FenceStale:
            return self.history.end(event, "refused")
        except RallypointError as error:
            return self.history.failed(event, error)
        return self.history.end(event, "done")

    def do_unlock(self, name: str) -> str:
        lock, grant, session = self.locks.pop(name)
        event = self.history.begin("unlock", name, session=session, token=grant.token)
        try:
            lock.release()
        except LeaseLost as error:  # the server may have had it still, and has not now
            return self.history.end(event, "unknown", error=str(error)[:300])
        except RallypointError as error:
            return self.history.failed(event, error)
        return self.history.end(event, "done")

    def do_lost(self, name: str, timeout: float) -> str:
        """Whether its holder learns that it is lost."""
        return "lost" if self.locks[name][1].lost.wait(timeout) else "held"

    # --- barriers

    def do_arrive(self, name: str, size: int, timeout: float | None) -> str:
        history = self.history
        event = history.begin("arrive", name, size=size)
        try:
            generation = self.store.barrier(name, size, timeout)
        except BarrierTimeout:
            return history.end(event, "timed out")
        except BarrierMismatch:
            return history.end(event, "mismatch")
        except BarrierBroken as error:
            return history.end(
                event,
                "missed" if error.code == "barrier-missed" else "broken",
                error=str(error)[:500],
            )
        except RallypointError as error:
            return history.failed(event, error)
        return history.end(event, "passed", token=generation, revision=generation)

    # --- queues

    def do_put(self, name: str, value: Any) -> str:
        event = self.history.begin("put", name, value=value)
        try:
            self.store.queue(name).put(value)
        except RallypointError as error:
            return self.history.failed(event, error)
        return self.history.end(event, "done")

    def do_take(self, name: str, timeout: float | None) -> str:
        history = self.history
        event = history.begin("take", name, held=True)
        taken = self.store.queue(name).take(timeout)
        try:
            value = taken.__enter__()
        except SessionLost as error:
            return history.failed(event, error)
        except StoreTimeout as error:
            if error.code != "wait-timeout":
                return history.failed(event, error)
            return history.end(event, "timed out", left=event["start"] + (timeout or 0.0))
        except RallypointError as error:
            return history.failed(event, error)
        self.taken.append((taken, value, event["session"]))
        return history.end(
            event, "value", value=value, token=value
        )  # no two items are equal: that is as good as its number

    def do_settle(self, accept: bool, name: str) -> str:
        taken, value, session = self.taken.pop()
        event = self.history.begin(
            "accept" if accept else "return", name, session=session, token=value
        )
        problem = None if accept else RuntimeError("it is given back")
        try:
            taken.__exit__(type(problem) if problem else None, problem, None)
        except SessionLost as error:
            # An answer, but none that shows that it was held until now: another `session`.
            told = "absent" if error.outcome == "did not happen" else "unknown"
            return self.history.end(event, told, session=f"{session}, lost", error=str(error)[:300])
        except RallypointError as error:
            return self.history.failed(event, error)
        return self.history.end(
            event, "done" if accept else "unknown"
        )  # whether it was still ours to give back, it does not say

    # --- once

    def do_once(self, name: str, seconds: float = 0.0, timeout: float | None = 5.0) -> str:
        history = self.history
        claim = history.begin("claim", name)
        value = f"{claim['session']} {time.monotonic_ns()}"
        resolve: Event = {}

        def compute() -> str:
            history.begin("sign", "computes")
            time.sleep(seconds)
            resolve.update(history.begin("resolve", name, session=claim["session"], value=value))
            return value

        try:
            found = self.store.once(name, compute, timeout=timeout)
        except OnceFailed as error:
            return history.end(claim, "unknown", error=str(error)[:300])
        except RallypointError as error:
            return history.failed(claim, error)
        if found == value:
            return history.end(resolve, "done")
        return history.end(claim, "value", value=found)

    # --- whatever comes

    def at_random(self, chance: random.Random, until: float) -> None:
        failures = 0
        while time.monotonic() < until and failures < TRIES:
            told = self._something(chance)
            failures = failures + 1 if told in ("unknown", "not done") else 0
            if told in ("unknown", "not done"):
                time.sleep(0.01)  # the store is away
        for name in list(self.locks):
            self.do_unlock(name)
        while self.taken:
            self.do_settle(True, "items")

    def _something(self, chance: random.Random) -> str:
        if (self.locks or self.taken) and chance.random() < 0.1:
            time.sleep(chance.uniform(0.0, 0.1))  # some work, in which it may be struck
        if self.locks and chance.random() < 0.6:
            name = chance.choice(list(self.locks))
            return self.do_write(name) if chance.random() < 0.6 else self.do_unlock(name)
        if self.taken and chance.random() < 0.6:
            return self.do_settle(chance.random() < 0.8, "items")
        what = chance.random()
        if what < 0.35:
            ttl = self.spec["lease"] * chance.choice((1.0, 2.0))
            return self.do_lock(chance.choice(("a", "b")), ttl, chance.choice((0.0, 0.3, 2.0)))
        if what < 0.5:
            return self.do_arrive(
                "three", 3 + (chance.random() < 0.03), chance.choice((0.0, 0.2, 1.0))
            )
        if what < 0.7:
            return self.do_put(
                "items",
                f"{self.spec['who']} {threading.current_thread().name} {time.monotonic_ns()}",
            )
        if what < 0.9:
            return self.do_take("items", chance.choice((0.0, 0.2)))
        return self.do_once(f"value {chance.randrange(4)}", chance.choice((0.0, 0.1)), 2.0)


def main() -> None:
    spec: Spec = json.loads(sys.argv[1])
    history = History(spec["history"], spec["who"])
    store = rallypoint.connect(
        spec["address"],
        secret=bytes.fromhex(spec["secret"]),
        timeout=spec.get("timeout", 10.0),
        ttl=spec["ttl"],
        same_host=spec["same_host"],
    )
    print("connected", flush=True)
    if "seconds" in spec:
        sys.stdin.readline()
        until = time.monotonic() + spec["seconds"]
        threads = []
        for number in range(spec["threads"]):
            member = Member(store, history, spec)
            chance = random.Random(f"{spec['seed']} {number}")
            threads.append(
                threading.Thread(target=member.at_random, args=(chance, until), name=str(number))
            )
            threads[-1].start()
        for thread in threads:
            thread.join()
    else:
        member = Member(store, history, spec)
        for line in sys.stdin:
            print(json.dumps({"told": member.obey(**json.loads(line))}), flush=True)
    store.close()
    print(json.dumps(store.statistics()), flush=True)


if __name__ == "__main__":
    main()
