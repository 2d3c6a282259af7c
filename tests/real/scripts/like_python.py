"""Things that work in a program which `python` runs, and depend on what __main__ is. Prints what worked."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import os
import pickle
import sys
import threading
import time
import typing


@dataclasses.dataclass
class Point:
    x: int
    y: typing.Optional[int] = None  # noqa: UP045 - as older programs write it


def double(value: int) -> Point:
    return Point(value * 2)


def say(text: str, queue: typing.Any) -> None:
    queue.put((text, os.getppid()))


def workers_of(method: str) -> str:
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.map(double, [1, 2, 3]) == [Point(2), Point(4), Point(6)]
    queue = context.SimpleQueue()
    process = context.Process(target=say, args=("hello", queue))
    process.start()
    assert queue.get()[0] == "hello"
    process.join()
    assert process.exitcode == 0
    return f"multiprocessing {method}"


def main() -> None:
    multiprocessing.set_start_method("spawn")
    print("set_start_method", flush=True)
    assert pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
    assert pickle.loads(pickle.dumps(double)) is double
    assert dataclasses.replace(Point(1), y=2) == Point(1, 2)
    assert typing.get_type_hints(Point) == {"x": int, "y": typing.Optional[int]}  # noqa: UP045
    print("classes of __main__", flush=True)
    for method in ("fork", "spawn", "forkserver"):
        print(workers_of(method), flush=True)

    atexit.register(print, "atexit")
    unclosed = open(sys.argv[1], "w")  # noqa: SIM115 - it is the interpreter that flushes and closes it
    unclosed.write("flushed")
    atexit.register(lambda: unclosed)

    def late() -> None:
        time.sleep(0.2)
        print("thread joined", flush=True)

    threading.Thread(target=late).start()


if __name__ == "__main__":
    main()
