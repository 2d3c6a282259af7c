"""A client process of a soak of the store. Arguments: what to do, and how, as JSON. Its outcome is
one line of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import rallypoint
from rallypoint import RallypointError

Spec = dict[str, Any]


def connect(spec: Spec) -> rallypoint.Store:
    return rallypoint.connect(
        spec["address"],
        secret=bytes.fromhex(spec["secret"]),
        timeout=spec.get("timeout", 10.0),
        ttl=spec.get("ttl", 10.0),
        same_host=spec.get("same_host", False),
    )


def adds(spec: Spec) -> Spec:
    """Every sum that was returned: all processes together must have got each number once."""
    store = connect(spec)
    sums = [store.add("sum", 1) for _ in range(spec["count"])]
    return {
        "sums": sums,
        "reconnects": store.statistics()["reconnects"],
        "sessions": store.statistics()["sessions"],
    }


def history(spec: Spec) -> Spec:
    """What its threads asked of a few keys, and what they were told: [client, kind, key, arguments,
    result, start, end, "answered" or what the error says about the outcome, the error]."""
    operations: list[Any] = []
    stores = [connect(spec)] if spec["shared"] else [connect(spec) for _ in range(spec["threads"])]
    print("connected", flush=True)
    sys.stdin.readline()  # the others are, too, and the faults begin
    threads = [
        threading.Thread(target=_ask, args=(stores[index % len(stores)], spec, index, operations))
        for index in range(spec["threads"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"operations": operations}


def _ask(store: rallypoint.Store, spec: Spec, index: int, operations: list[Any]) -> None:
    client = spec["first"] + index
    chance = random.Random(f"{spec['seed']}-{client}")
    seen: dict[str, Any] = {}
    for number in range(spec["count"]):
        fresh = client * 10_000 + number  # every value is written once
        kind = chance.choice(("get", "set", "add", "add", "cas", "delete"))
        key = "sum" if kind == "add" else chance.choice("xy")
        arguments: list[Any] = {
            "set": [fresh],
            "add": [chance.randint(1, 9)],
            "cas": [seen.get(key), fresh],
        }.get(kind, [])
        act = {
            "get": lambda key=key: store.get(key),
            "set": lambda key=key, arguments=arguments: store.set(key, arguments[0]) and None,
            "add": lambda key=key, arguments=arguments: store.add(key, arguments[0]),
            "delete": lambda key=key: store.delete(key),
            "cas": lambda key=key, arguments=arguments: store.compare_and_set(
                key, rallypoint.ABSENT if arguments[0] is None else arguments[0], arguments[1]
            )[0],
        }[kind]
        time.sleep(chance.uniform(0.0, spec["pause"]))  # or it would be over before the first fault
        start = time.monotonic()
        error = ""
        try:
            result = act()
            outcome = "answered"
        except RallypointError as raised:
            result, error = None, f"{type(raised).__name__}: {raised}"
            outcome = getattr(raised, "outcome", "did not happen")
        operations.append(
            [client, kind, key, arguments, result, start, time.monotonic(), outcome, error]
        )
        if kind == "get":
            seen[key] = result


def reconnects(spec: Spec) -> Spec:
    """Ask until so many connections were lost; then what is open and what runs, beside what was at
    the beginning.
    """
    store = connect(spec)
    value = b"x" * spec["size"]
    number = 0

    def turn() -> None:
        nonlocal number
        number += 1
        store.set("value", value)
        assert store.get("value") == value
        assert store.add("sum", 1) == number

    for _ in range(3):  # one key written over and over has two segments of shared memory
        turn()
    before = _open(store)
    print("ready", flush=True)
    # the resets have begun: a connection that is lost takes its segments with it
    sys.stdin.readline()
    while store.statistics()["reconnects"] < spec["count"]:
        turn()
    print("enough", flush=True)
    sys.stdin.readline()  # the resets are over
    for _ in range(3):  # the last connection has its segments again
        turn()
    after = _open(store)
    found = store.statistics()
    store.delete("value")  # in shared memory it is a descriptor of the server's
    store.close()
    return {
        "before": before,
        "after": after,
        "reconnects": found["reconnects"],
        "sessions": found["sessions"],
        "turns": number,
    }


def _is_segment(fd: str) -> bool:
    try:
        return "memfd" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # it has been closed since
        return False


def _open(store: rallypoint.Store) -> Spec:
    """After a moment in which what is being closed gets closed: a thread that reconnects, a
    descriptor in a finalizer. Idle connections are not counted: the keep-alive has one of its own
    when it is due while a call is under way, and it is used again.
    """
    least = {"descriptors": 10**9, "segments": 10**9, "threads": 10**9}
    for _ in range(50):
        segments = [fd for fd in os.listdir("/proc/self/fd") if _is_segment(fd)]
        others = len(os.listdir("/proc/self/fd")) - len(segments) - store._session.slots.idle
        now = {
            "descriptors": others,
            "segments": len(segments),
            "threads": len(os.listdir("/proc/self/task")),
        }
        least = {name: min(least[name], count) for name, count in now.items()}
        time.sleep(0.01)
    return least


DEEDS: dict[str, Callable[[Spec], Spec]] = {
    deed.__name__: deed for deed in (adds, history, reconnects)
}

if __name__ == "__main__":
    print(json.dumps(DEEDS[sys.argv[1]](json.loads(sys.argv[2]))), flush=True)
