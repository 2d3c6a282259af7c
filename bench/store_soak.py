"""The soaks of the coordination store: faults, thousands of times, and nothing lost, doubled, left
behind or late.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import JOBS, environment
from bench.outcome import Outcome

Spec = dict[str, Any]

START_SECONDS = 30.0  # for a process of ours to come up on a busy machine


class ServerProcess:
    """A store in a process of its own. Use it in `with`: it is killed at the end, frozen or not."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "server"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(JOBS / "store_server.py"), "rallypoint"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment(RALLYPOINT_LOG="WARNING"),
            )  # fmt: skip
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self._reap()
            raise RuntimeError(f"the server did not start: {self._log.read_text()[-500:]}")
        where = json.loads(said)
        self.pid = self._process.pid
        self.address: str = where["address"]
        self.secret: str = where["secret"]

    def __repr__(self) -> str:
        return f"<ServerProcess {self.pid} at {self.address}>"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def send(self, number: int) -> None:
        """A signal. The process is reaped only at the end, so that its number stays its own."""
        os.kill(self.pid, number)

    def log(self) -> str:
        """What it wrote on stderr."""
        return self._log.read_text()

    def open(self) -> dict[str, int]:
        """Its descriptors and threads."""
        return {
            "descriptors": len(os.listdir(f"/proc/{self.pid}/fd")),
            "threads": len(os.listdir(f"/proc/{self.pid}/task")),
        }

    def connect(self, **options: Any) -> Any:
        """A client of it here, without any fault in between."""
        import rallypoint

        return rallypoint.connect(self.address, secret=bytes.fromhex(self.secret), **options)


def client(deed: str, spec: Spec) -> subprocess.Popen[str]:
    """A client process: see `jobs/store_soaker.py`."""
    command = [sys.executable, str(JOBS / "store_soaker.py"), deed, json.dumps(spec)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )  # fmt: skip


def heard(process: subprocess.Popen[str], word: str) -> bool:
    """Whether that is its next line; why not comes with its `answer`."""
    assert process.stdout is not None
    return process.stdout.readline().strip() == word


def tell(process: subprocess.Popen[str], word: str) -> None:
    """Say something to it, if it is still there."""
    assert process.stdin is not None
    try:
        process.stdin.write(word + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has failed, and says so in its answer


def answer(process: subprocess.Popen[str], timeout: float, outcome: Outcome) -> Spec | None:
    """What it found; None, and why in `outcome`, when it failed or is not done in time."""
    try:
        said, complained = process.communicate(timeout=max(0.0, timeout))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        outcome.wrong.append(f"a client was not done after {timeout:.0f} s more")
        return None
    if process.returncode != 0:
        outcome.wrong.append(
            f"a client ended with status {process.returncode}: {complained[-1000:]}"
        )
        return None
    found: Spec = json.loads(said.splitlines()[-1])
    return found


@contextmanager
def written(outcome: Outcome, folder: Path) -> Iterator[None]:
    """At the end, what there is to say about a repetition lies in its folder; an exception is a
    wrong outcome.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    said = [outcome.what, *outcome.notes, *(f"WRONG: {wrong}" for wrong in outcome.wrong)]
    (folder / "output").write_text("\n".join(said) + "\n")


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- adds


def adds(
    chance: random.Random,
    number: int,
    folder: Path,
    *,
    clients: int = 8,
    each: int = 10_000,
    hole: float = 30.0,
    limit: float = 600.0,
) -> Outcome:
    """Client processes add 1, through a proxy that resets all connections every 50 ms, is a black
    hole once, and resets one side twice.

    Every sum must have been returned to exactly one of them: nothing lost, nothing done twice.
    """
    from rallypoint.testing import ChaosProxy

    outcome, total = Outcome("adds"), clients * each
    with (
        written(outcome, folder),
        ServerProcess(folder) as server,
        ChaosProxy(server.address, seed=chance.getrandbits(32)) as proxy,
    ):
        watching = server.connect()
        began = time.monotonic()
        spec = {
            "address": proxy.address,
            "secret": server.secret,
            "count": each,
            "timeout": 2 * hole + 60,
            "ttl": 2 * hole + 60,
        }
        processes = [client("adds", spec) for _ in range(clients)]

        def done(share: float) -> bool:
            return bool(watching.get("sum", 0) >= share * total) or all(
                process.poll() is not None for process in processes
            )

        resets = proxy.reset_every(0.05)
        for share, fault in (
            (0.25, "reset of the server's side"),
            (0.4, "reset of the client's side"),
            (0.5, "black hole"),
        ):
            if not until(lambda share=share: done(share), limit):  # type: ignore[misc]
                outcome.wrong.append(f"no {fault}: after {limit:g} s not even {share:.0%} was done")
                break
            if fault == "black hole":
                resets.heal()  # it would tell the clients what a black hole never tells
                with proxy.black_hole():
                    time.sleep(hole)
                resets = proxy.reset_every(0.05)
            else:
                proxy.reset(to="server" if "server" in fault else "client")
        found = [
            answer(process, began + limit - time.monotonic(), outcome) for process in processes
        ]
        outcome.times["all adds"] = time.monotonic() - began
        proxy.heal()
        seen = proxy.statistics()
        outcome.notes.append(
            f"{seen.connections} connections, {seen.resets} resets, hole of {hole:g} s"
        )
        sums = [one for result in found if result is not None for one in result["sums"]]
        if seen.resets < clients:
            outcome.wrong.append(f"only {seen.resets} resets: nothing was tested")
        if sum(result["sessions"] for result in found if result) > len(
            [result for result in found if result]
        ):
            outcome.wrong.append("a session was lost")
        if sorted(sums) != list(range(1, total + 1)):
            outcome.wrong.append(
                f"{len(sums)} adds returned {len(set(sums))} different sums of {total}"
            )
        if watching.get("sum") != total:
            outcome.wrong.append(f"the sum is {watching.get('sum')} and not {total}")
        outcome.what = f"{total} adds by {clients} processes, {seen.resets} resets"
        watching.close()
    return outcome


# --- histories


def histories(chance: random.Random, number: int, folder: Path, *, count: int = 40) -> Outcome:
    """Two processes with two threads each ask for a few keys while something happens to their
    connections, or to the server: there must be one order that explains every answer."""
    from rallypoint.testing import ChaosProxy

    fault = FAULTS[number % len(FAULTS)]
    shared = chance.random() < 0.5
    outcome = Outcome(f"{fault}{', a store for two threads' if shared else ''}")
    with (
        written(outcome, folder),
        ServerProcess(folder) as server,
        ChaosProxy(server.address, seed=chance.getrandbits(32)) as proxy,
    ):
        spec = {
            "address": proxy.address, "secret": server.secret, "seed": chance.getrandbits(32), "threads": 2, "count": count,
            "shared": shared, "timeout": chance.choice((0.3, 20.0)), "ttl": 5.0, "pause": 0.02,
        }  # fmt: skip
        processes = [client("history", {**spec, "first": 2 * index}) for index in range(2)]
        for process in processes:
            heard(process, "connected")
        for process in processes:
            tell(process, "go")
        over = threading.Event()
        making = threading.Thread(target=make_faults, args=(fault, chance, proxy, server, over))
        making.start()
        found = [answer(process, 120.0, outcome) for process in processes]
        over.set()
        making.join()
        operations = [
            operation
            for result in found
            if result is not None
            for operation in result["operations"]
        ]
        judge(operations, outcome)
        outcome.notes.append(f"{spec}")
        if outcome.wrong:
            (folder / "history.json").write_text(json.dumps(operations))
    return outcome


FAULTS = (
    "resets",
    "resets of one side",
    "jitter",
    "black holes",
    "a frozen network",
    "a stopped server",
)


def make_faults(
    fault: str, chance: random.Random, proxy: Any, server: ServerProcess, over: threading.Event
) -> None:
    """Of one kind, at random moments, until it is over."""
    if fault == "jitter":
        proxy.latency(0.002, 0.002)
        proxy.reset_every(0.5)
        over.wait()
    while not over.wait(chance.uniform(0.0, 0.1)):
        side = chance.choice(("server", "client"))
        if fault == "resets":
            proxy.reset()
        elif fault == "resets of one side":
            proxy.reset(to=side)
        elif fault == "a stopped server":
            server.send(signal.SIGSTOP)
            over.wait(chance.uniform(0.0, 1.0))
            server.send(signal.SIGCONT)
        else:
            with proxy.black_hole(to=side) if fault == "black holes" else proxy.freeze(to=side):
                over.wait(chance.uniform(0.0, 1.0))
    proxy.heal()


def judge(operations: list[list[Any]], outcome: Outcome) -> None:
    """Whether there is one order, with the checker that the tests use."""
    import math

    from tests.store.linearizability import Operation, check

    # "Happened" is of no more use than "unknown" here: the answer is lost.
    history = [
        Operation(
            client,
            kind,
            key,
            tuple(arguments),
            result,
            start,
            end if told == "answered" else math.inf,
        )
        for client, kind, key, arguments, result, start, end, told, _ in operations
        if told != "did not happen"
    ]
    unknown = sum(operation.end == math.inf for operation in history)
    not_done = len(operations) - len(history)
    outcome.notes.append(
        f"{len(history)} operations, {unknown} of them with an unknown outcome; and {not_done} that did not happen"
    )
    outcome.what += ", some outcomes unknown" if unknown else ""
    verdict = check(history)
    if verdict.outcome == "unknown":
        outcome.what += ": the search was too long"  # no pass, and no failure: it is counted apart
    elif not verdict:
        outcome.wrong.append(f"no order explains key {verdict.key!r}: {verdict.blame}")


# --- reconnects


def reconnects(chance: random.Random, number: int, folder: Path, *, count: int = 100) -> Outcome:
    """A client loses its connection so many times, by TCP or by the Unix socket with shared memory.
    Nothing is left on either side.
    """
    from rallypoint.testing import ChaosProxy

    local = bool(number % 2)
    outcome = Outcome("Unix socket, shared memory" if local else "TCP")
    with written(outcome, folder), ServerProcess(folder) as server:
        with server.connect() as here:
            connection = here._session.slots.connection
            path = connection.where if local and connection else ""
        target, listen = (
            (f"unix://{path}", f"unix://{folder.resolve()}/proxy")
            if local
            else (server.address, "tcp://127.0.0.1:0")
        )
        at_first = at_rest(server)
        with ChaosProxy(target, seed=chance.getrandbits(32), listen=listen) as proxy:
            size = 2 * 2**20 if local else 1000
            spec = {
                "address": proxy.address,
                "secret": server.secret,
                "count": count,
                "size": size,
                "same_host": local,
            }
            process = client("reconnects", {**spec, "timeout": 60.0, "ttl": 60.0})
            if heard(process, "ready"):
                tell(process, "begin")
            began = time.monotonic()
            resets = proxy.reset_every(0.02 if local else 0.01)
            enough = heard(process, "enough")
            resets.heal()
            outcome.times["reconnects"] = time.monotonic() - began
            if enough:
                tell(process, "over")
            found = answer(process, 60.0, outcome)
        if found is not None:
            outcome.notes.append(json.dumps(found))
            for what, before in found["before"].items():
                if found["after"][what] > before + (SPARE_SEGMENTS if what == "segments" else 0):
                    outcome.wrong.append(
                        f"the client has {found['after'][what]} {what}, and had {before}"
                    )
            if found["sessions"] != 1:
                outcome.wrong.append(f"{found['sessions']} sessions instead of one")
        if not until(lambda: server.open() == at_first, 10.0):
            outcome.wrong.append(f"the server has {server.open()}, and had {at_first}")
    return outcome


SPARE_SEGMENTS = 2
"""Segments of shared memory that a client may have more than before: whether the server has said in
time that one is free, or another had to be made, is a matter of luck. More than these would be
growth."""


def at_rest(server: ServerProcess) -> dict[str, int]:
    """What the server has open when it has closed what it is closing."""
    before = server.open()
    while True:
        time.sleep(0.3)
        now = server.open()
        if now == before:
            return now
        before = now


# --- strangers


def strangers(
    chance: random.Random,
    number: int,
    folder: Path,
    *,
    count: int = 10_000,
    seconds: float = 20.0,
    worst: float = 1.0,
) -> Outcome:
    """So many connections that prove nothing, while a client measures its latency and new ones come
    in.

    No call may fail or take `worst` seconds, and afterwards the server has forgotten the strangers.
    """
    from rallypoint.store.address import parse

    outcome = Outcome(f"{count} strangers")
    with (
        written(outcome, folder),
        ServerProcess(folder) as server,
        server.connect(timeout=10.0) as store,
    ):
        store["key"] = b"v" * 32
        at_first = at_rest(server)
        alone = measured(store, min(1.0, seconds))
        where = parse(server.address)
        command = [
            sys.executable,
            str(JOBS / "store_strangers.py"),
            where.host,
            str(where.port),
            str(count),
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        ) as crowd:
            assert crowd.stdout is not None
            assert crowd.stdin is not None
            arriving = measured(store, min(2.0, seconds))
            crowd.stdout.readline()
            beside = [*arriving, *measured(store, seconds)]
            joined = []
            for same_host in (True, False):
                began = time.monotonic()
                server.connect(same_host=same_host, timeout=10.0).close()
                joined.append(time.monotonic() - began)
            held = server.open()["descriptors"]
            crowd.stdin.close()
            outcome.notes.append(crowd.stdout.read().strip())
        outcome.times |= {
            "get alone, p50": statistics.median(alone), "get beside them, p50": statistics.median(beside),
            "get beside them, slowest": max(beside), "a new client": max(joined),
        }  # fmt: skip
        outcome.notes.append(
            f"{len(beside)} gets beside them; the server had {held} descriptors, and wrote {len(server.log())} bytes"
        )
        if max(beside) >= worst:
            outcome.wrong.append(f"a get took {max(beside):.2f} s")
        if len(server.log()) > 20_000:
            outcome.wrong.append(f"the server wrote {len(server.log())} bytes about strangers")
        if not until(lambda: server.open()["descriptors"] <= at_first["descriptors"], 15.0):
            outcome.wrong.append(
                f"the server has {server.open()} when they are gone, and had {at_first}"
            )
    return outcome


def measured(store: Any, seconds: float) -> list[float]:
    """Seconds of each of many gets."""
    until, times = time.monotonic() + seconds, []
    while (began := time.monotonic()) < until:
        store.get("key")
        times.append(time.monotonic() - began)
    return times


# --- deadlines


DEADLINE = 2.0  # seconds of every call; a tenth of it is what a busy machine may add
LARGE = 32 * 2**20
# seconds for which the kernel goes on taking bytes for one who has stopped, as late
# acknowledgements let it grow its buffers
KERNEL = 0.4


def deadlines(
    chance: random.Random,
    number: int,
    folder: Path,
    *,
    deadline: float = DEADLINE,
    slack: float = 0.0,
) -> Outcome:
    """The server is stopped or killed at a random moment, in whatever call: that and the following
    ones end at their deadline, or a tenth later. `slack`: seconds beyond that, for a machine that
    is busy with a test suite."""
    import rallypoint
    from rallypoint.store.client.call import GRACE

    killed, same_host = bool(number % 2), chance.random() < 0.5
    allowed = 1.1 * deadline + slack
    kind = chance.choice(("get", "add", "set large", "get large", "get many", "wait"))
    most = allowed + GRACE * (kind == "wait")  # the client waits for the server's answer
    outcome = Outcome(
        f"{'killed' if killed else 'frozen'}, {kind}, {'Unix socket' if same_host else 'TCP'}"
    )
    with written(outcome, folder), ServerProcess(folder) as server:
        store = server.connect(timeout=deadline, ttl=30.0, same_host=same_host)
        value = bytes(LARGE) if "large" in kind else b""
        store["large"], store["key"] = value, 1
        acts: dict[str, Callable[[], object]] = {
            "get": lambda: store.get("key"), "add": lambda: store.add("sum"), "set large": lambda: store.set("large", value),
            "get large": lambda: store.get("large"), "get many": lambda: store.get_many(["key"] * 1000),
            "wait": lambda: store.wait("never", deadline),
        }  # fmt: skip
        delay = chance.uniform(0.0, 0.2)
        outcome.notes.append(f"after {delay:.4f} s")
        strike = Strike(delay, lambda: server.send(signal.SIGKILL if killed else signal.SIGSTOP))
        failed = 0
        while failed < 2:
            before, began = strike.at is not None, time.monotonic()
            took, error = timed(acts[kind])
            # seconds of the call in which bytes could move: its deadline is for a standstill
            moving = 0.0
            if error is not None:
                failed += 1
                outcome.times[
                    "until the error" if before else "until the error, struck in the call"
                ] = took
                outcome.notes.append(f"{took:.3f} s: {type(error).__name__}: {error}")
                if not isinstance(
                    error,
                    rallypoint.StoreTimeout | rallypoint.SessionLost | rallypoint.StoreUnreachable,
                ):
                    outcome.wrong.append(f"{type(error).__name__}: {error}")
                if not before and ("large" in kind or kind == "get many"):
                    moving = max(0.0, (strike.at or began) - began) + KERNEL
            if took > most + moving:
                outcome.wrong.append(
                    f"{kind} took {took:.3f} s instead of {deadline:g}, and was struck {moving:.3f} s after it began"
                )
        strike.join()
        took, error = timed(lambda: server.connect(timeout=deadline))
        if error is None or took > allowed:
            outcome.wrong.append(f"connecting took {took:.3f} s instead of {deadline:g}: {error}")
        began = time.monotonic()
        store.close()
        outcome.times["close"] = time.monotonic() - began
        if outcome.times["close"] > allowed:
            outcome.wrong.append(f"closing took {outcome.times['close']:.3f} s")
    return outcome


class Strike(threading.Thread):
    """Does something to the server once, `delay` seconds from now; `at` is when that was, None
    until then.
    """

    def __init__(self, delay: float, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.at: float | None = None
        self._delay = delay
        self._act = act
        self.start()

    def run(self) -> None:
        time.sleep(self._delay)
        self._act()
        self.at = time.monotonic()


def timed(act: Callable[[], object]) -> tuple[float, Exception | None]:
    """How long it took, and what it raised."""
    began = time.monotonic()
    try:
        act()
    except Exception as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None
