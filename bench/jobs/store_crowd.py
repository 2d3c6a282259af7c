"""One turn of one party: a server in a process of its own, and clients in processes of theirs,
forked from this one, which has torch.

Argument: what to do, as JSON: `party`, `task`, `clients`, and what the task takes. The outcome goes
to `result.json` in BENCH_FOLDER: `results` (one per client), `phases` (at every moment when all
clients had come to a point: the time, and the server's CPU time and memory), or `error`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from store_clients import barrier_of_many, connect, repeat
from store_server import open_files

Spec = dict[str, Any]


class Line:
    """A client's line to the one who counts."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def ready(self) -> None:
        """Wait until all clients have come to this point."""
        self._sock.sendall(b"r")
        if not self._sock.recv(1):
            os._exit(1)  # it was given up

    def done(self, result: dict[str, Any]) -> None:
        self._sock.sendall(b"d" + json.dumps(result).encode())


# --- what a client does: (spec, where the server is, its number, its line) -> its result


def latency(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    client = connect(spec["party"], where)
    client.operation("set", "key")()
    found: dict[str, Any] = {}
    for name in ("get", "set", "add"):
        act = client.operation(name, "count" if name == "add" else "key")
        repeat(act, 0, least=spec["warm"])
        line.ready()
        cpu = time.thread_time()
        times = repeat(act, 0, least=spec["count"])
        cpu = time.thread_time() - cpu
        line.ready()
        found[name] = {
            "p50": statistics.median(times),
            "p99": percentile(times, 0.99),
            "cpu": cpu / len(times),
            "count": len(times),
        }
    return found


def throughput(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    client = connect(spec["party"], where)
    client.operation("set", "key")()
    found: dict[str, Any] = {}
    for name in ("get", "add"):
        act = client.operation(name, "count" if name == "add" else "key")
        repeat(act, 0, least=spec["warm"])
        line.ready()
        began, cpu = time.monotonic(), time.thread_time()
        count = len(repeat(act, spec["seconds"]))
        found[name] = {
            "began": began,
            "ended": time.monotonic(),
            "count": count,
            "cpu": time.thread_time() - cpu,
        }
        line.ready()
    return found


def values(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    import torch

    client, found = connect(spec["party"], where), {}
    for size in spec["sizes"]:
        value, key = client.value(size), f"value-{size}"
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        copy = torch.empty_like(tensor)
        began = time.perf_counter()
        client.put(key, value)
        first = time.perf_counter() - began
        if not client.equal(client.get(key), value):
            raise AssertionError(f"{size} bytes came back changed")
        many = {"seconds": spec["seconds"], "most": spec["most"]}
        writes = repeat(partial(client.put, key, value), **many)
        reads = repeat(partial(client.get, key), **many)
        copies = repeat(partial(copy.copy_, tensor), **many)
        found[str(size)] = {
            "first": first, "set": statistics.median(writes), "get": statistics.median(reads), "memcpy": statistics.median(copies)
        }  # fmt: skip
        del value, tensor, copy
        client.operation("set", key)()  # the next size needs the room
    return found


def mixed(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    """Client 0 reads something small; the others, 0, 1, ... of them at a time, write large
    values.
    """
    client, found = connect(spec["party"], where), {}
    small, value = client.operation("get", "key"), client.value(spec["size"]) if number else None
    client.operation("set", "key")()
    if number:
        client.put(f"bulk-{number}", value)
    for uploaders in range(spec["clients"]):
        line.ready()
        if number == 0:
            times = repeat(small, spec["seconds"], least=20)[10:]
            found[str(uploaders)] = {
                "p50": statistics.median(times),
                "p99": percentile(times, 0.99),
                "count": len(times),
            }
        elif number <= uploaders:
            began = time.perf_counter()
            count = len(
                repeat(lambda: client.put(f"bulk-{number}", value), spec["seconds"], least=1)
            )
            found[str(uploaders)] = {"rate": count * spec["size"] / (time.perf_counter() - began)}
    line.ready()
    return found


def barrier(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    size = spec["clients"]
    client = connect(spec["party"], where, number, size)
    for turn in range(spec["warm"]):
        client.barrier("warm", size, turn)
    line.ready()
    began, cpu = time.monotonic(), time.process_time()
    for turn in range(spec["count"]):
        client.barrier("barrier", size, turn)
    ended, cpu = time.monotonic(), time.process_time() - cpu
    line.ready()
    return {"began": began, "ended": ended, "cpu": cpu}


def lock(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    """First each asks for something small now and then, as one who has slept; then all want the
    lock, again and again.
    """
    client = connect(spec["party"], where)
    client.operation("set", "key")()
    acquire, release = client.lock("lock", number)
    if number == 0 and spec["party"].startswith("TCPStore"):
        release()  # a key that nobody has written is not free
    ask, trips, chance = client.operation("get", "key"), [], random.Random(number)
    line.ready()
    for _ in range(spec["trips"]):
        time.sleep(chance.uniform(0.0, 0.002 * spec["clients"]))
        trips += repeat(ask, 0, least=1)
    line.ready()
    clock = time.monotonic
    had: list[float] = []
    began, cpu = clock(), time.process_time()
    until = began + spec["seconds"]
    while clock() < until:
        acquire()
        had.append(clock())  # which is when it begins to give it back, too
        release()
    cpu = time.process_time() - cpu
    line.ready()
    return {"began": began, "until": until, "had": had, "cpu": cpu, "trips": trips}


def join(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    """Connect, and pass a barrier of all."""
    line.ready()
    began = time.monotonic()
    client = connect(spec["party"], where)
    connected = time.monotonic()
    client.barrier("joined", spec["clients"], 0)
    ended = time.monotonic()
    line.ready()
    return {"began": began, "connected": connected, "ended": ended}


def storm(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    """Connect with all the others at once, so many times."""
    rounds: list[dict[str, Any]] = []
    for _ in range(spec["count"]):
        line.ready()
        began, failure, client = time.monotonic(), "", None
        try:
            client = connect(spec["party"], where)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        rounds.append({"began": began, "ended": time.monotonic(), "failure": failure})
        line.ready()
        if client is not None:
            client.close()
    return {"rounds": rounds}


def sessions(spec: Spec, where: Spec, number: int, line: Line) -> dict[str, Any]:
    """This process holds its share of the sessions; all of them pass one barrier."""
    share = spec["sessions"] // spec["clients"]
    line.ready()
    began = time.monotonic()
    clients = [connect(spec["party"], where) for _ in range(share)]
    connected = time.monotonic()
    line.ready()
    passing = time.monotonic()
    barrier_of_many(clients, "all", share * spec["clients"])
    passed = time.monotonic()
    line.ready()
    return {
        "began": began,
        "connected": connected,
        "passing": passing,
        "passed": passed,
        "sessions": share,
    }


TASKS: dict[str, Callable[[Spec, Spec, int, Line], dict[str, Any]]] = {
    task.__name__: task
    for task in (latency, throughput, values, mixed, barrier, lock, join, storm, sessions)
}


def percentile(times: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


# --- the crowd


def start_server(party: str) -> tuple[subprocess.Popen[bytes], Spec]:
    kind = "rallypoint" if party.startswith("rallypoint") else "TCPStore"
    kind = party if party.endswith("TLS") else kind
    command = [sys.executable, str(Path(__file__).parent / "store_server.py"), kind]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    said = server.stdout.readline()
    if not said:
        raise SystemExit(f"the server of {party} did not start; what it wrote stands above")
    return server, json.loads(said)


def client_process(spec: Spec, where: Spec, number: int, sock: socket.socket) -> None:
    line = Line(sock)
    try:
        result = TASKS[spec["task"]](spec, where, number, line)
    except BaseException:
        result = {"error": traceback.format_exc()}
    line.done(result)
    os._exit(
        0
        # 512 interpreters that finalise take minutes on two processors, and are none of what is
        # measured
    )


def fork_clients(spec: Spec, where: Spec) -> dict[int, tuple[int, socket.socket]]:
    """Their pids and lines, by number."""
    made: dict[int, tuple[int, socket.socket]] = {}
    for number in range(spec["clients"]):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in made.values():
                other.close()
            client_process(spec, where, number, theirs)
        theirs.close()
        made[number] = (pid, ours)
    return made


def place(server: int, placed: str) -> None:
    """Where server and clients run: `one processor`, `two processors` (the server has one for
    itself), or as the kernel likes.
    """
    processors = sorted(os.sched_getaffinity(0))
    if not placed or len(processors) < 2:
        return
    for thread in os.listdir(f"/proc/{server}/task"):
        os.sched_setaffinity(int(thread), processors[:1])
    os.sched_setaffinity(0, processors[:1] if placed == "one processor" else processors[1:])


class Failed(Exception):
    """A client did not do what it should."""


def conduct(
    lines: dict[int, socket.socket], server: int
) -> tuple[list[Any], list[dict[str, float]]]:
    """Let the clients go on whenever all have come to a point, until each has told its result."""
    phases: list[dict[str, float]] = []
    said: dict[int, bytes] = {}
    results: dict[int, Any] = {}
    poll = select.poll()
    numbers = {sock.fileno(): number for number, sock in lines.items()}
    for sock in lines.values():
        poll.register(sock, select.POLLIN)
    ready: set[int] = set()
    while len(results) < len(lines):
        for fd, _ in poll.poll():
            number = numbers[fd]
            data = lines[number].recv(65536)
            if data == b"r" and number not in said:
                ready.add(number)
            elif data:
                said[number] = said.get(number, b"") + data
            elif number in said:
                poll.unregister(fd)
                results[number] = json.loads(said[number][1:])
                if "error" in results[number]:
                    raise Failed(f"client {number}: {results[number]['error']}")
            else:
                raise Failed(f"client {number} ended before it was done")
        if len(ready) == len(lines):
            ready.clear()
            phases.append({"at": time.monotonic(), **usage(server)})
            for sock in lines.values():
                sock.sendall(b"g")
    return [results[number] for number in sorted(results)], phases


def usage(pid: int) -> dict[str, float]:
    """Seconds of processor time and bytes of memory that a process takes."""
    cpu = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            cpu += int(
                Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes().split()[0]
            )  # nanoseconds; `stat` counts hundredths
        except FileNotFoundError:  # it has just ended; so little it has done
            continue
    resident = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": cpu / 1e9, "resident": resident}


def main() -> int:
    spec: Spec = json.loads(sys.argv[1])
    open_files()
    server, where = start_server(spec["party"])
    place(server.pid, spec.get("placed", ""))
    import torch.distributed  # once, for all clients

    torch.set_num_threads(1)
    if spec["party"].startswith("rallypoint"):
        # As torch is: the clients' own import is not what is measured.
        import rallypoint.primitives.barrier
        import rallypoint.primitives.lock
        import rallypoint.primitives.store
        import rallypoint.store.client.encrypted_socket  # noqa: F401
    gc.collect()
    gc.freeze()
    clients = fork_clients(spec, where)
    try:
        results, phases = conduct(
            {number: sock for number, (_, sock) in clients.items()}, server.pid
        )
        outcome: dict[str, Any] = {"results": results, "phases": phases}
    except Failed as failed:
        outcome = {"error": str(failed)}
    for pid, _ in clients.values():
        os.kill(pid, signal.SIGKILL)
    for pid, _ in clients.values():
        os.waitpid(pid, 0)
    server.kill()
    server.wait()
    fresh = Path(os.environ["BENCH_FOLDER"]) / "result.new"
    fresh.write_text(json.dumps(outcome))
    fresh.rename(fresh.with_suffix(".json"))
    return 1 if "error" in outcome else 0


if __name__ == "__main__":
    sys.exit(main())
