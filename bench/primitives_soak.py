"""The soaks of locks, barriers, queues and `once`: their users are killed, frozen and cut off, and
nobody may be told what is not so.

`histories` has no processes: a simulation decided by a seed (`tests/primitives/simulation.py`),
very often. `kills` has real ones: each writes down what it asked and was told, and the same checker
(`tests/primitives/histories.py`) looks at all of it together.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.harness import JOBS, ROOT, environment
from bench.outcome import Outcome
from bench.store_soak import START_SECONDS, ServerProcess, until, written

Spec = dict[str, Any]

ANSWER_SECONDS = 30.0
"""For a call that nothing holds up, on a busy machine. A member that has not answered by then is
stuck, which is wrong.
"""

PASSED_ON = 0.050
"""Seconds from SIGKILL of a process on this host until the next one has what it held: the promise
of the design.
"""

LATE = 0.10
"""Of its lease: so much later than that the next one may have what was held by a process that was
stopped.
"""


# --- histories


def histories(chance: random.Random, number: int, folder: Path, *, count: int = 1000) -> Outcome:
    """So many simulated histories, in a process of its own."""
    first = chance.getrandbits(40)
    outcome = Outcome("simulated histories", notes=[f"seeds {first} to {first + count - 1}"])
    with written(outcome, folder):
        began = time.monotonic()
        variables = environment()
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables["PYTHONPATH"]])
        command = [sys.executable, "-m", "tests.primitives.simulation", str(first), str(count)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=variables, cwd=folder, check=False
        )
        outcome.times[f"{count} histories"] = time.monotonic() - began
        if done.returncode not in (0, 1) or not done.stdout:
            outcome.wrong.append(f"exit status {done.returncode}: {done.stderr[-1000:]}")
            return outcome
        found = json.loads(done.stdout)
        outcome.counts = {"histories": found["checked"], **found["counts"]}
        for seed, reasons in found["wrong"].items():
            replay = f"PYTHONPATH=src:. python -m tests.primitives.simulation {seed}"
            outcome.wrong.append(f"seed {seed} (replay: {replay}): {reasons[0]}")
    return outcome


# --- processes


class MemberProcess:
    """A user of the primitives, in a process of its own: `jobs/primitives_member.py`. Use it in
    `with`.
    """

    def __init__(
        self,
        folder: Path,
        who: str,
        address: str,
        secret: str,
        *,
        same_host: bool,
        ttl: float,
        **more: Any,
    ) -> None:
        self.who = who
        self.history = folder / f"history-{who}"
        spec = {
            "who": who, "history": str(self.history), "address": address, "secret": secret, "same_host": same_host, "ttl": ttl, **more
        }  # fmt: skip
        self._log = folder / f"log-{who}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(JOBS / "primitives_member.py"), json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(),
            )  # fmt: skip
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> MemberProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # it was killed with a word on its way

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        except ValueError:
            pass  # it was closed while it was read: the member is not needed any more
        self._lines.put("")

    def line(self, timeout: float = ANSWER_SECONDS) -> str:
        """What it says next. Raises RuntimeError when it says nothing in time, or has ended."""
        try:
            said = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"member {self.who} said nothing for {timeout:g} s") from None
        if not said:
            raise RuntimeError(f"member {self.who} has ended: {self._log.read_text()[-500:]}")
        return said.strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def begin(self, do: str, **fields: Any) -> None:
        """Let it make a call; `told` has the answer."""
        self.tell(json.dumps({"do": do, **fields}))

    def told(self, timeout: float = ANSWER_SECONDS) -> str:
        """What it was told, in one word."""
        said: dict[str, str] = json.loads(self.line(timeout))
        return said["told"]

    def call(self, do: str, **fields: Any) -> str:
        self.begin(do, **fields)
        return self.told()

    def send(self, number: int) -> None:
        """A signal; nothing when it has ended."""
        self._process.send_signal(number)

    def leave(self) -> None:
        """Let it close its store and end; nothing when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def wait(self, timeout: float) -> int | None:
        """Its exit status; None when it does not end in time."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


class Scene:
    """A server, its members, and what is known beside what they wrote."""

    def __init__(self, chance: random.Random, folder: Path, stack: ExitStack, *, tcp: bool) -> None:
        from rallypoint.testing import ChaosProxy

        self.chance = chance
        self.folder = folder
        self.tcp = tcp
        self.members: list[MemberProcess] = []
        self.in_line: dict[str, float] = {}  # since when the last call of a member surely waits
        self._numbers: dict[str, int] = {}
        self._stack = stack
        self.server = stack.enter_context(ServerProcess(folder))
        self.new_proxy: Callable[[], ChaosProxy] = lambda: stack.enter_context(
            ChaosProxy(self.server.address, seed=chance.getrandbits(32))
        )
        self.proxy = self.new_proxy()
        self.observer = stack.enter_context(self.server.connect())
        self._since = self.observer.watch("data/").revision

    def join(self, *, ttl: float = 10.0, proxy: Any = None, **more: Any) -> MemberProcess:
        """A new member, connected; through the proxy if this is about TCP."""
        who = f"m{len(self.members)}"
        proxy = proxy or (self.proxy if self.tcp else None)
        address = proxy.address if proxy is not None else self.server.address
        member = MemberProcess(
            self.folder, who, address, self.server.secret, same_host=proxy is None, ttl=ttl, **more
        )
        self.members.append(self._stack.enter_context(member))
        if member.line(START_SECONDS) != "connected":
            raise RuntimeError(f"member {who} did not connect")
        return member

    def waits(self, member: MemberProcess, count: int) -> None:
        """Return when so many requests wait at the server, the last of them this member's."""
        if not until(lambda: self.observer.status()["waiting"] == count, ANSWER_SECONDS):
            raise RuntimeError(
                f"{self.observer.status()['waiting']} requests wait instead of {count}"
            )
        self.in_line[member.who] = time.monotonic()

    def events(self) -> list[Any]:
        """What all have written, and when each write became the newest, as the store says."""
        import msgspec
        from tests.primitives.histories import Event

        found: list[Event] = []
        for member in self.members:
            events: dict[int, Spec] = {}
            for line in member.history.read_text().splitlines() if member.history.exists() else ():
                event = json.loads(line)
                events[event.pop("id")] = event
            for event in events.values():
                event.pop("error", None)
                if isinstance(event.get("token"), str):
                    event["token"] = self._number(event["token"])
                found.append(msgspec.convert(event, Event))
        written_at = self._written()
        for event in found:
            if event.kind == "write" and event.value in written_at:
                event.told, event.revision = "done", written_at[event.value]
            event.value = json.dumps(event.value) if isinstance(event.value, list) else event.value
        return found

    def _number(self, item: str) -> int:
        """What stands for an item's number, which its taker is not told: no two items are equal."""
        return self._numbers.setdefault(item, len(self._numbers) + 1)

    def _written(self) -> dict[str, int]:
        """The revision of every write to what the locks protect."""
        end = f"the end {time.monotonic()}"
        self.observer.set("data/end", end)
        found: dict[str, int] = {}
        for change in self.observer.watch("data/", since=self._since, timeout=ANSWER_SECONDS):
            if change.value == end:
                break
            found[change.value] = change.revision
        return found

    def drain(self, name: str) -> list[Any]:
        """What is still in the queue, as taken by an observer."""
        from tests.primitives.histories import Event

        import rallypoint

        found: list[Any] = []
        while True:
            start = time.monotonic()
            try:
                value = self.observer.queue(name).get_nowait()
            except rallypoint.StoreTimeout:
                return found
            found.append(
                Event(
                    "observer",
                    "observer",
                    "take",
                    name,
                    start,
                    time.monotonic(),
                    "value",
                    token=self._number(value),
                    value=value,
                )
            )

    def judge(self, outcome: Outcome, events: Sequence[Any]) -> None:
        """Whether all of it can be."""
        from tests.primitives.histories import check

        for event in events:
            name = f"{event.kind} {event.told}"
            outcome.counts[name] = outcome.counts.get(name, 0) + 1
        outcome.wrong += [str(violation) for violation in check(events)]
        if outcome.wrong:
            import msgspec

            (self.folder / "history.json").write_bytes(msgspec.json.encode(events))


def expect(outcome: Outcome, what: str, told: str, *right: str) -> None:
    if told not in right:
        outcome.wrong.append(f"{what}: {told} instead of {' or '.join(right)}")


def _bounded(outcome: Outcome, what: str, seconds: float, limit: float) -> None:
    outcome.times[what] = seconds
    if seconds > limit:
        outcome.wrong.append(
            f"{what}: {seconds:.3f} s instead of {limit:.3f}, at a load average of {os.getloadavg()[0]:.1f}"
        )


def _late(outcome: Outcome, what: str, seconds: float, lease: float, slack: float) -> None:
    """What a lease decides may come a little later than that; a sign of life was given a little
    before, too.
    """
    _bounded(outcome, f"{what}, less the lease", seconds - lease, LATE * lease + slack)


def _end_of(scene: Scene, member: MemberProcess, told: str) -> float:
    """When the member's last event that was told so had ended, by its own account."""
    ends = [json.loads(line) for line in member.history.read_text().splitlines()]
    return max(float(event["end"]) for event in ends if event.get("told") == told)


# --- one thing goes wrong


def killed_holder(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """The holder of a lock is SIGKILLed while three wait."""
    # Over TCP nothing but its lease tells a dead process from a network that is away.
    lease = scene.chance.uniform(0.3, 0.8) if scene.tcp else 10.0
    holder, waiting = _line(scene, outcome, lease)
    struck = time.monotonic()
    holder.send(signal.SIGKILL)
    expect(outcome, "the first in line", waiting[0].told(), "granted")
    seconds = _end_of(scene, waiting[0], "granted") - struck
    if scene.tcp:
        _late(outcome, "SIGKILL to the next grant, TCP", seconds, lease, slack)
    else:
        _bounded(outcome, "SIGKILL to the next grant", seconds, PASSED_ON + slack)
    _rest(scene, outcome, waiting)


def stopped_holder(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """The holder of a lock is SIGSTOPped for longer than its lease, goes on, and writes with its
    old token.
    """
    lease = scene.chance.uniform(0.3, 0.8)
    holder, waiting = _line(scene, outcome, lease)
    struck = time.monotonic()
    holder.send(signal.SIGSTOP)
    expect(outcome, "the first in line", waiting[0].told(), "granted")
    seconds = _end_of(scene, waiting[0], "granted") - struck
    _late(outcome, "SIGSTOP to the next grant", seconds, lease, slack)
    _comes_back(scene, outcome, holder, lambda: holder.send(signal.SIGCONT))
    _rest(scene, outcome, waiting)


def cut_holder(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """The holder's network becomes a black hole for longer than its lease."""
    lease = scene.chance.uniform(0.4, 0.8)
    proxy = scene.new_proxy()
    holder, waiting = _line(scene, outcome, lease, proxy)
    struck = time.monotonic()
    hole = proxy.black_hole()
    holder.begin("lost", name="a", timeout=ANSWER_SECONDS)
    expect(outcome, "the first in line", waiting[0].told(), "granted")
    seconds = _end_of(scene, waiting[0], "granted") - struck
    _late(outcome, "black hole to the next grant", seconds, lease, slack)
    expect(outcome, "the holder, cut off", holder.told(), "lost")
    _comes_back(scene, outcome, holder, hole.heal)
    _rest(scene, outcome, waiting)


def reset_holder(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """The holder's connection is reset again and again, for less than its lease each time: it keeps
    the lock.
    """
    proxy = scene.new_proxy()
    holder, waiting = _line(scene, outcome, 5.0, proxy)
    resets = proxy.reset_every(0.05)
    for _ in range(20):
        expect(outcome, "a write between two resets", holder.call("write", name="a"), "done")
    resets.heal()
    expect(outcome, "the holder", holder.call("unlock", name="a"), "done")
    expect(outcome, "the first in line", waiting[0].told(), "granted")
    _rest(scene, outcome, waiting)


def _line(
    scene: Scene, outcome: Outcome, lease: float, proxy: Any = None
) -> tuple[MemberProcess, list[MemberProcess]]:
    """One that holds the lock and has written, and three that stand in line one behind the
    other.
    """
    ttl = scene.chance.choice((lease, 10.0))  # of the session: the lock's own lease may be shorter
    outcome.notes.append(f"lease {lease:.3f} s, session {ttl:.3f} s")
    holder, *waiting = [scene.join(ttl=ttl, proxy=proxy), *(scene.join() for _ in range(3))]
    expect(outcome, "the holder", holder.call("lock", name="a", ttl=lease), "granted")
    expect(outcome, "the holder's write", holder.call("write", name="a"), "done")
    for count, member in enumerate(waiting, 1):
        member.begin("lock", name="a", timeout=ANSWER_SECONDS)
        scene.waits(member, count)
    time.sleep(scene.chance.uniform(0.0, 0.3))  # some moment between two signs of life
    expect(outcome, "the holder's second write", holder.call("write", name="a"), "done")
    return holder, waiting


def _comes_back(
    scene: Scene, outcome: Outcome, holder: MemberProcess, wake: Callable[[], None]
) -> None:
    """The former holder goes on as if nothing had been: it must not be able to write."""
    wake()
    if scene.chance.random() < 0.5:
        expect(
            outcome,
            "the former holder",
            holder.call("lost", name="a", timeout=ANSWER_SECONDS),
            "lost",
        )
    told = holder.call("write", name="a")
    expect(outcome, "the former holder's write", told, "refused", "not done")
    if told == "not done":  # the session was lost, which is said once
        expect(
            outcome, "the former holder's second write", holder.call("write", name="a"), "refused"
        )
    expect(outcome, "the former holder's release", holder.call("unlock", name="a"), "unknown")


def _rest(scene: Scene, outcome: Outcome, waiting: list[MemberProcess]) -> None:
    """Whoever has it now writes and gives it back, and the next one does."""
    for member, following in zip(waiting, [*waiting[1:], None], strict=True):
        expect(outcome, f"the write of {member.who}", member.call("write", name="a"), "done")
        expect(outcome, f"the release of {member.who}", member.call("unlock", name="a"), "done")
        if following is not None:
            expect(outcome, f"{following.who} in line", following.told(), "granted")


def killed_at_barrier(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """One of three that wait for a fourth is killed: the others learn it, the fourth is told when
    it comes, and the next round is one.
    """
    lease = scene.chance.uniform(0.3, 0.8) if scene.tcp else 10.0
    members = [scene.join(ttl=lease) for _ in range(4)]
    for _ in range(2):
        for member in members:
            member.begin("arrive", name="b", size=4, timeout=ANSWER_SECONDS)
        for member in members:
            expect(outcome, f"the first rounds of {member.who}", member.told(), "passed")
    for count, member in enumerate(members[:3], 1):
        member.begin("arrive", name="b", size=4, timeout=ANSWER_SECONDS)
        scene.waits(member, count)
    struck = time.monotonic()
    members[1].send(signal.SIGKILL)
    for member in (members[0], members[2]):
        expect(outcome, member.who, member.told(), "broken")
        seconds = _end_of(scene, member, "broken") - struck
        if scene.tcp:
            _late(outcome, "SIGKILL to the broken barrier, TCP", seconds, lease, slack)
        else:
            _bounded(outcome, "SIGKILL to the broken barrier", seconds, PASSED_ON + slack)
    expect(
        outcome,
        "the late comer",
        members[3].call("arrive", name="b", size=4, timeout=ANSWER_SECONDS),
        "broken",
    )
    scene.in_line.clear()  # they make another call now
    again = [members[0], members[2], members[3], scene.join()]
    for member in again:
        member.begin("arrive", name="b", size=4, timeout=ANSWER_SECONDS)
    for member in again:
        expect(outcome, f"the next round of {member.who}", member.told(), "passed")


def killed_taker(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """Who has taken an item dies, and whoever waits gets it. The first of the two is only stopped,
    and accepts it too late.
    """
    lease = scene.chance.uniform(0.3, 0.8)
    taker, waiting = scene.join(ttl=lease), scene.join(ttl=10.0)
    other = scene.join(ttl=lease if scene.tcp else 10.0)
    expect(outcome, "put", waiting.call("put", name="items", value="one"), "done")
    expect(outcome, "take", taker.call("take", name="items", timeout=5.0), "value")
    other.begin("take", name="items", timeout=ANSWER_SECONDS)
    scene.waits(other, 1)
    struck = time.monotonic()
    taker.send(signal.SIGSTOP)
    expect(outcome, "the next taker", other.told(), "value")
    seconds = _end_of(scene, other, "value") - struck
    _late(outcome, "SIGSTOP to the next taker", seconds, lease, slack)
    taker.send(signal.SIGCONT)
    expect(outcome, "the former taker", taker.call("settle", name="items", accept=True), "absent")
    waiting.begin("take", name="items", timeout=ANSWER_SECONDS)
    scene.waits(waiting, 1)
    struck = time.monotonic()
    other.send(signal.SIGKILL)
    expect(outcome, "the last taker", waiting.told(), "value")
    seconds = _end_of(scene, waiting, "value") - struck
    if scene.tcp:
        _late(outcome, "SIGKILL to the next taker, TCP", seconds, lease, slack)
    else:
        _bounded(outcome, "SIGKILL to the next taker", seconds, PASSED_ON + slack)
    expect(
        outcome, "the last taker's end", waiting.call("settle", name="items", accept=True), "done"
    )


def killed_computer(scene: Scene, outcome: Outcome, *, slack: float) -> None:
    """Who computes a value for all is killed: the next one in line computes it, and the last one
    gets what that made.
    """
    lease = scene.chance.uniform(0.3, 0.8) if scene.tcp else 10.0
    members = [scene.join(ttl=lease), scene.join(), scene.join()]
    members[0].begin("once", name="value", seconds=600.0, timeout=None)
    if not until(lambda: '"computes"' in members[0].history.read_text(), ANSWER_SECONDS):
        outcome.wrong.append("nobody computes")
    for count, member in enumerate(members[1:], 1):
        member.begin("once", name="value", seconds=0.05, timeout=ANSWER_SECONDS)
        scene.waits(member, count)
    members[0].send(signal.SIGKILL)
    expect(outcome, "the next one", members[1].told(), "done")
    expect(outcome, "the last one", members[2].told(), "value")


# --- everything at once


LEASE = 0.4
SESSION = 0.6


def crowd(scene: Scene, outcome: Outcome, *, seconds: float = 3.0, members: int = 4) -> None:
    """Processes with two threads each do what chance tells them, while they are killed, stopped and
    cut off.
    """
    chance = scene.chance

    def newcomer() -> MemberProcess:
        member = scene.join(
            ttl=SESSION,
            timeout=2.0,
            lease=LEASE,
            seconds=seconds,
            threads=2,
            seed=chance.getrandbits(32),
        )
        member.tell("go")
        return member

    living = [newcomer() for _ in range(members)]
    stopped: dict[MemberProcess, float] = {}
    hole: Any = None
    until_healed = 0.0
    counts = {"killed": 0, "stopped": 0, "reset": 0, "cut off": 0}
    over = time.monotonic() + seconds
    while (now := time.monotonic()) < over:
        for member in [member for member, at in stopped.items() if at <= now]:
            member.send(signal.SIGCONT)
            del stopped[member]
        if hole is not None and until_healed <= now:
            hole.heal()
            hole = None
        what = chance.choice(
            ("kill", "stop", "stop", "reset", "hole") if scene.tcp else ("kill", "stop", "stop")
        )
        if what == "kill":
            member = living.pop(chance.randrange(len(living)))
            stopped.pop(member, None)
            member.send(signal.SIGKILL)
            scene.proxy.heal()  # it could not connect
            hole = None
            living.append(newcomer())
            counts["killed"] += 1
        elif what == "stop":
            member = chance.choice(living)
            member.send(signal.SIGSTOP)
            stopped[member] = now + chance.choice((0.1, 1.5, 3.0)) * LEASE
            counts["stopped"] += 1
        elif what == "reset":
            scene.proxy.reset()
            counts["reset"] += 1
        elif hole is None:
            hole = scene.proxy.black_hole(to=chance.choice(("server", "client", "both")))
            until_healed = now + chance.choice((0.1, 1.5, 3.0)) * LEASE
            counts["cut off"] += 1
        time.sleep(chance.uniform(0.02, 0.3))
    for member in stopped:
        member.send(signal.SIGCONT)
    scene.proxy.heal()
    outcome.counts |= counts
    deadline = time.monotonic() + 2 * ANSWER_SECONDS
    for member in living:
        status = member.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            outcome.wrong.append(
                f"member {member.who} is not done {2 * ANSWER_SECONDS:g} s after the end"
            )
        elif status != 0:
            outcome.wrong.append(f"member {member.who} ended with status {status}")


# --- all of them


Scenario = Callable[..., None]

KINDS: tuple[tuple[str, Scenario, bool], ...] = (
    ("a killed holder, Unix socket", killed_holder, False),
    ("a crowd, Unix socket", crowd, False),
    ("a stopped holder, Unix socket", stopped_holder, False),
    ("a crowd, TCP", crowd, True),
    ("a holder cut off", cut_holder, True),
    ("a barrier's member killed, Unix socket", killed_at_barrier, False),
    ("a killed holder, TCP", killed_holder, True),
    ("a taker killed, Unix socket", killed_taker, False),
    ("a holder's connection reset", reset_holder, True),
    ("who computes is killed, Unix socket", killed_computer, False),
    ("a stopped holder, TCP", stopped_holder, True),
    ("a crowd, TCP", crowd, True),
    ("a barrier's member killed, TCP", killed_at_barrier, True),
    ("a taker killed, TCP", killed_taker, True),
    ("who computes is killed, TCP", killed_computer, True),
    ("a crowd, Unix socket", crowd, False),
)


def kills(
    chance: random.Random, number: int, folder: Path, *, slack: float = 0.0, seconds: float = 3.0
) -> Outcome:
    """One scene with processes that are killed, stopped or cut off. `slack`: seconds that a promise
    may be missed by, on a busy machine; `seconds`: of a crowd."""
    name, scenario, tcp = KINDS[number % len(KINDS)]
    outcome = Outcome(name)
    with written(outcome, folder), _scene(chance, folder, tcp=tcp) as scene:
        if scenario is crowd:
            crowd(scene, outcome, seconds=seconds)
        else:
            scenario(scene, outcome, slack=slack)
        for member in scene.members:
            member.leave()
        # What the dead held is released by their leases, at the latest.
        if not until(lambda: scene.observer.status()["sessions"] == 1, ANSWER_SECONDS):
            outcome.wrong.append(f"sessions of dead processes are left: {scene.observer.status()}")
        events = scene.events() + scene.drain("items")
        for event in events:
            if (
                event.kind in ("lock", "take", "arrive")
                and event.who.split(".")[0] in scene.in_line
                and event.told in WAITED
            ):
                since = scene.in_line[event.who.split(".")[0]]
                event.queued = since if event.start < since < event.end else event.queued
        scene.judge(outcome, events)
        if complaints := scene.server.log():
            outcome.notes.append(complaints[-2000:])
    return outcome


WAITED = ("granted", "value", "passed", "broken", "unknown")


@contextmanager
def _scene(chance: random.Random, folder: Path, *, tcp: bool) -> Iterator[Scene]:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield Scene(chance, folder, stack, tcp=tcp)
