"""An average among real processes: killed and stopped in every phase, on one host and on several,
and nothing of them is left.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import BarrierBroken, BarrierMismatch, BarrierTimeout, UsageError
from rallypoint.host import memory
from rallypoint.primitives.average import average as averages
from rallypoint.primitives.average import cross_host, participants, segments, sync, work_split
from rallypoint.primitives.average.sync import AverageRound
from rallypoint.primitives.store import Store
from rallypoint.store.client.client import resolve

from ..store.live import DEADLINE
from ..store.processes import ServerProcess
from .test_average import ranked

LARGE = 100_003


class Rank:
    """A forked process with a store and a rank, which runs one function; `result()` is what that
    returned, or raises what it raised.
    """

    def __init__(self, server: ServerProcess, rank: int, does: Callable[[int, Store], Any]) -> None:
        self.rank = rank
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            try:
                told: Any = _run(server, rank, does)
            except BaseException as error:
                traceback.print_exc()
                told = error
            with open(writing, "wb") as file:
                file.write(pickle.dumps(told))
            os._exit(0)
        os.close(writing)
        self._pipe = reading

    def result(self) -> Any:
        """None of a process that was killed."""
        with open(self._pipe, "rb") as pipe:
            told = pipe.read()
        os.waitpid(self.pid, 0)
        found = pickle.loads(told) if told else None
        if isinstance(found, BaseException) and not isinstance(found, rallypoint.RallypointError):
            raise found
        return found


def _run(server: ServerProcess, rank: int, does: Callable[[int, Store], Any]) -> Any:
    signal.alarm(int(DEADLINE))  # whatever happens, it ends
    torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
    logging.getLogger("rallypoint").addHandler(logging.NullHandler())
    options, secret = resolve(
        server.address, secret=server.secret, secret_file=None, job="", timeout=10.0, ttl=10.0, allow_pickle=False, strict=False,
        same_host=True,
    )  # fmt: skip
    with Store(options._replace(rank=rank), secret) as store:
        return does(rank, store)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as made:
        yield made


def results(server: ServerProcess, size: int, does: Callable[[int, Store], Any]) -> list[Any]:
    ranks = [Rank(server, rank, does) for rank in range(size)]
    return [rank.result() for rank in ranks]


def keys(server: ServerProcess) -> list[str]:
    with rallypoint.connect(server.address, secret=server.secret) as store:
        return store.keys()


def mapped() -> int:
    """Segments that this process has mapped, without what a test before it left to the
    collector.
    """
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("/memfd:rallypoint" in line for line in file)


# --- one host ---


def test_processes_of_one_host(server: ServerProcess) -> None:
    """There are two meetings in a round and no more, also the first; in place as well."""

    def does(rank: int, store: Store) -> tuple[bool, int, int]:
        good = True
        for turn in range(3):
            value = {"a": ranked(rank + turn), "b": ranked(rank, 300_000)}
            store.average("w", value, 4, out=value)
            good = (
                good
                and torch.equal(value["a"], ranked(1.5 + turn))
                and torch.equal(value["b"], ranked(1.5, 300_000))
            )
        store.barrier("all have counted", 4)
        return good, store.statistics()["operations"]["Arrive"], 4 <= mapped() <= 8

    assert results(server, 4, does) == [(True, 2 * 3 + 1, True)] * 4
    assert keys(server) == []


def test_different_values_are_named_by_rank(server: ServerProcess) -> None:
    def does(rank: int, store: Store) -> Any:
        return store.average("w", {"a": torch.ones(3 + (rank == 2))}, 4)

    errors = results(server, 4, does)
    assert {type(error) for error in errors} == {BarrierMismatch}
    (headline,) = {error.headline for error in errors}
    assert re.fullmatch(
        r'the average "w" got values that do not match: value\[\'a\'\] is float32 \[3\] in ranks 0-1 and 3 and '
        r"float32 \[4\] in rank 2",
        headline,
    )


# --- death ---

PHASES: dict[str, tuple[Any, str]] = {
    "offering": (averages._AverageCall, "_arrive"),
    "arrived": (AverageRound, "run"),
    "adding": (work_split, "combine"),
    "added": (AverageRound, "_meet"),
}
"""Where to strike: before this is called."""


def strike(phase: str, sign: signal.Signals = signal.SIGKILL) -> None:
    """This process will strike itself there."""
    where, name = PHASES[phase]
    was = getattr(where, name)

    def struck(*arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), sign)
        return was(*arguments, **more)

    setattr(where, name, struck)


@pytest.mark.parametrize("phase", list(PHASES))
def test_a_death_before_it_is_complete_is_told_to_all(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """In place, and what was there is there still; the next round of the others is sound."""
    monkeypatch.setattr(sync, "LOOK", 0.3)

    def does(rank: int, store: Store) -> Any:
        store.barrier("all are there", 3)
        if rank == 1:
            strike(phase)
        value = ranked(rank)
        try:
            store.average("w", value, 3, out=value, timeout=3.0)
        except (BarrierBroken, BarrierTimeout) as error:
            store.barrier("has ended", 2, timeout=DEADLINE)
            assert torch.equal(value, ranked(rank))
            assert torch.equal(store.average("w2", ranked(rank), 2), ranked(1))
            assert not [
                pid
                for pid, _ in segments.cache_of(store)._others
                if not os.path.exists(f"/proc/{pid}/stat")
            ]
            store.barrier("both have looked", 2, timeout=DEADLINE)  # before one of them ends
            return error
        return None

    first, killed, last = results(server, 3, does)
    assert killed is None
    for error in (first, last):
        assert isinstance(error, (BarrierBroken, BarrierTimeout)), error
        assert "rank 1 (pid " in error.headline
        assert error.headline.startswith('the average "w"')
    if phase != "offering":
        assert (first.code, first.headline) == (last.code, last.headline)
        assert "has no result: rank 1 (pid " in first.headline
        assert "died or gave up before it was complete" in first.headline
        assert len(first.present) == 2
    assert keys(server) == []


@pytest.mark.parametrize("phase", list(PHASES))
def test_a_quorum_goes_on_without_the_dead(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(sync, "LOOK", 0.3)

    def does(rank: int, store: Store) -> Any:
        store.barrier("all are there", 4)
        generator = torch.Generator().manual_seed(rank)
        value = {"big": torch.rand(LARGE, generator=generator), "small": ranked(rank, 5)}
        store.average("w", value, 4, quorum=2)  # so that it is known who is there
        if rank == 1:
            strike(phase)
        got = store.average("w", value, 4, quorum=2, timeout=5.0, details=True, out=value)
        assert got.value is value
        once_more = store.average(
            "w", {"big": ranked(rank), "small": ranked(rank, 5)}, 4, quorum=2, timeout=5.0
        )
        assert torch.allclose(once_more["big"], ranked(5 / 3))
        assert not [
            pid
            for pid, _ in segments.cache_of(store)._others
            if not os.path.exists(f"/proc/{pid}/stat")
        ]
        store.barrier("all have looked", 3, timeout=DEADLINE)  # before one of them ends
        return (
            value,
            [identity.rank for identity in got.present],
            [member.rank for member in got.absent],
            got.weight,
        )

    found = results(server, 4, does)
    assert found[1] is None
    expected = torch.stack(
        [
            torch.rand(LARGE, generator=torch.Generator().manual_seed(rank)).double()
            for rank in (0, 2, 3)
        ]
    ).mean(0)
    for rank in (0, 2, 3):
        value, present, absent, weight = found[rank]
        assert (present, absent, weight) == ([0, 2, 3], [1], 3.0)
        assert torch.equal(value["big"], found[0][0]["big"])
        assert torch.allclose(value["big"].double(), expected)
        assert torch.allclose(value["small"], ranked(5 / 3, 5))
    assert keys(server) == []


def test_when_all_who_count_have_died_there_is_no_mean(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "LOOK", 0.3)

    def does(rank: int, store: Store) -> Any:
        store.barrier("all are there", 3)
        if rank == 1:
            strike("adding")
        return store.average("w", ranked(rank), 3, quorum=2, weight=float(rank == 1))

    first, killed, last = results(server, 3, does)
    assert killed is None
    for error in (first, last):
        assert isinstance(error, UsageError), error
        assert re.fullmatch(
            r'the average "w", round \d+: the weights of all who are left in it are 0, and there is no such mean',
            error.headline,
        )


def test_who_dies_after_it_is_complete_is_in_the_mean(server: ServerProcess) -> None:
    """The others have its part mapped, and copy from it what it computed when it lived."""

    def does(rank: int, store: Store) -> Any:
        copy = AverageRound.copy

        def later(self: AverageRound, targets: Any) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            store.wait("it is dead", timeout=DEADLINE)
            copy(self, targets)

        AverageRound.copy = later  # type: ignore[method-assign]
        return torch.equal(store.average("w", ranked(rank), 3), ranked(1))

    ranks = [Rank(server, rank, does) for rank in range(3)]
    assert ranks[1].result() is None
    with rallypoint.connect(server.address, secret=server.secret) as store:
        store["it is dead"] = True
        assert [ranks[0].result(), ranks[2].result()] == [True, True]


@pytest.mark.parametrize("phase", ["adding", "added"])
def test_who_was_stopped_until_the_others_had_gone_on_is_told(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Its own tensors are as they were; what it may have read that was half overwritten nobody
    sees. The next round has it again.
    """
    monkeypatch.setattr(sync, "LOOK", 0.3)
    monkeypatch.setattr(sync, "PATIENCE", 1.0)

    def does(rank: int, store: Store) -> Any:
        was = {place: getattr(*place) for place in PHASES.values()}
        store.barrier("all are there", 3)
        if rank == 1:
            strike(phase, signal.SIGSTOP)
        value = ranked(rank)
        try:
            averaged = store.average("w", value, 3, quorum=2, timeout=3.0, out=value, details=True)
            got: Any = (
                [identity.rank for identity in averaged.present],
                [member.rank for member in averaged.absent],
            )
            assert torch.equal(value, ranked(1))
            for turn in range(3):  # which writes to the same memory
                store.average("w", torch.full((LARGE,), float(turn)), 3, quorum=2, timeout=3.0)
            store["they have gone on"] = True
        except BarrierBroken as error:
            assert torch.equal(value, ranked(rank))
            for place, what in was.items():
                setattr(*place, what)
            got = error
        store.barrier("all are here again", 3)
        assert torch.equal(store.average("again", ranked(rank), 3), ranked(1))
        return got

    ranks = [Rank(server, rank, does) for rank in range(3)]
    os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED)
    with rallypoint.connect(server.address, secret=server.secret) as store:
        store.wait("they have gone on", timeout=DEADLINE)
    os.kill(ranks[1].pid, signal.SIGCONT)
    found = [rank.result() for rank in ranks]
    assert isinstance(found[1], BarrierBroken), found[1]
    assert found[1].code == "barrier-missed"
    assert "was completed without this caller" in found[1].headline
    for got in (found[0], found[2]):
        assert got == ([0, 2], [1])


def test_who_is_stopped_while_it_copies_copies_what_it_should(server: ServerProcess) -> None:
    """It is in the mean, and the others, who go on without it, leave it the memory from which it
    still reads.
    """

    def does(rank: int, store: Store) -> Any:
        store.average("w", ranked(rank), 3, quorum=2, timeout=DEADLINE)
        copy = AverageRound.copy

        def stopped(self: AverageRound, targets: Any) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)
            copy(self, targets)

        if rank == 1:
            AverageRound.copy = stopped  # type: ignore[method-assign]
        got = store.average("w", ranked(rank + 1), 3, quorum=2, timeout=DEADLINE)
        if rank != 1:
            for turn in range(6):
                for name in "xw":
                    mean = store.average(
                        name, torch.full((LARGE,), float(rank + turn)), 3, quorum=2, timeout=2.0
                    )
                    assert torch.equal(mean, torch.full((LARGE,), 1.0 + turn))
            store["they have gone on"] = True
        AverageRound.copy = copy  # type: ignore[method-assign]
        store.barrier("all are here again", 3)
        assert torch.equal(store.average("again", ranked(rank), 3), ranked(1))
        return torch.equal(got, ranked(2))

    ranks = [Rank(server, rank, does) for rank in range(3)]
    os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED)
    with rallypoint.connect(server.address, secret=server.secret) as store:
        store.wait("they have gone on", timeout=DEADLINE)
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert [rank.result() for rank in ranks] == [True] * 3


def test_a_caller_that_was_interrupted_in_the_middle_breaks_the_round(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "LOOK", 0.3)

    def does(rank: int, store: Store) -> Any:
        combine = work_split.combine

        def interrupted(*arguments: Any, **more: Any) -> bool:
            raise KeyboardInterrupt

        if rank == 1:
            work_split.combine = interrupted
            with pytest.raises(KeyboardInterrupt):
                store.average("w", ranked(rank), 3)
            work_split.combine = combine
            error: Any = None
        else:
            with pytest.raises(
                BarrierBroken, match=r"has no result: rank 1 \(pid .* died or gave up"
            ) as caught:
                store.average("w", ranked(rank), 3)
            error = caught.value
        assert torch.equal(store.average("w", ranked(rank), 3), ranked(1))
        return error

    clock = Clock()
    results(server, 3, does)
    assert clock.elapsed() < sync.PATIENCE


def test_what_fails_in_one_rank_is_told_to_the_others(server: ServerProcess) -> None:
    def does(rank: int, store: Store) -> Any:
        def full(*_: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        if rank == 1:
            AverageRound._reduce = full  # type: ignore[method-assign,assignment]
            with pytest.raises(OSError, match="Cannot allocate"):
                store.average("w", ranked(rank), 3)
            return None
        with pytest.raises(
            BarrierBroken, match=r"failed in rank 1 \(pid .*\): OSError: .*Cannot allocate memory"
        ):
            store.average("w", ranked(rank), 3)
        return None

    assert results(server, 3, does) == [None] * 3


# --- several hosts ---


def on_host(number: int) -> None:
    """From now on this process looks as if it were on another host."""
    memory.scope = lambda: b"host %d" % number
    participants.scope.cache_clear()


@pytest.mark.parametrize("placed", [[0, 1], [0, 0, 1], [0, 1, 0, 2, 2]])
def test_several_hosts(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, placed: list[int]
) -> None:
    """One contribution for each; several chunks, more than hosts; all dtypes; weights; and no key
    is left.
    """
    monkeypatch.setattr(cross_host, "CHUNK_BYTES", 64 * 1024)
    monkeypatch.setattr(cross_host, "SMALLEST_CHUNK", 64 * 1024)
    size = len(placed)

    def does(rank: int, store: Store) -> Any:
        on_host(placed[rank])
        found = []
        for turn in range(2):
            generator = torch.Generator().manual_seed(rank + 100 * turn)
            value = {
                "a": torch.randn(LARGE, generator=generator),
                "h": torch.randn(LARGE, generator=generator).bfloat16(),
                "z": torch.randn(7, generator=generator, dtype=torch.complex128),
            }
            store.average("w", value, size, weight=1 + rank, out=value)
            found.append(value)
        return found

    found = results(server, size, does)
    total = size * (size + 1) / 2
    for turn in range(2):
        exact: dict[str, Any] = {"a": 0.0, "h": 0.0, "z": 0.0}
        for rank in range(size):
            generator = torch.Generator().manual_seed(rank + 100 * turn)
            exact["a"] += torch.randn(LARGE, generator=generator).double() * (1 + rank) / total
            exact["h"] += (
                torch.randn(LARGE, generator=generator).bfloat16().double() * (1 + rank) / total
            )
            exact["z"] += (
                torch.randn(7, generator=generator, dtype=torch.complex128) * (1 + rank) / total
            )
        for rank in range(size):
            for key, value in found[rank][turn].items():
                assert torch.equal(value, found[0][turn][key]), (key, rank)
                assert torch.allclose(
                    value.to(exact[key].dtype),
                    exact[key],
                    rtol=1e-2 if key == "h" else 1e-5,
                    atol=1e-2 if key == "h" else 1e-6,
                )
    assert keys(server) == []


@pytest.mark.parametrize("bad", [1, 3])
def test_several_hosts_and_a_nan(server: ServerProcess, bad: int) -> None:
    def does(rank: int, store: Store) -> Any:
        on_host(rank // 2)
        value = ranked(rank)
        if rank == bad:
            value[77] = torch.nan
        got = store.average("w", value, 4, details=True)
        assert got.value.isnan().nonzero().tolist() == [[77]]
        return [(identity.rank, leaves) for identity, leaves in got.not_finite]

    assert results(server, 4, does) == [[(bad, ("value",))]] * 4


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_several_hosts_and_a_death(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Of the first of a host (0) and of others: in the middle of the exchange, or before it. The
    session of the dead one ends, and with it its keys; the others begin again."""
    monkeypatch.setattr(sync, "LOOK", 0.3)
    monkeypatch.setattr(sync, "PATIENCE", 30.0)
    monkeypatch.setattr(cross_host, "LOOK", 0.2)

    def does(rank: int, store: Store) -> Any:
        on_host(rank // 2)
        store.barrier("all are there", 4)
        if rank == victim:
            where = cross_host.Exchange if rank == 0 else AverageRound
            name = "_complete" if rank == 0 else "_reduce"

            def struck(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(where, name, struck)
        got = store.average("w", ranked(rank), 4, quorum=3, timeout=30.0, details=True)
        store.barrier("all survivors", 3, timeout=DEADLINE)
        return got.value, [identity.rank for identity in got.present]

    found = results(server, 4, does)
    survivors = [rank for rank in range(4) if rank != victim]
    for rank in survivors:
        value, present = found[rank]
        assert present == survivors
        assert torch.allclose(value, ranked(sum(survivors) / 3))
        assert torch.equal(value, found[survivors[0]][0])
    clock = Clock()
    while keys(server):  # what the dead one wrote goes with its session
        assert clock.elapsed() < 30.0
        threading.Event().wait(0.05)


def test_several_hosts_and_one_death_after_the_other(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leads a host dies in the exchange, and then who leads it instead: the other host hears of
    the second death, too.
    """
    monkeypatch.setattr(sync, "LOOK", 0.3)
    monkeypatch.setattr(
        sync, "PATIENCE", 15.0
    )  # after which the survivors would give up on each other
    monkeypatch.setattr(cross_host, "LOOK", 0.2)

    def does(rank: int, store: Store) -> Any:
        on_host(rank // 3)
        store.barrier("all are there", 4)
        if rank < 2:

            def struck(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            cross_host.Exchange._complete = struck  # type: ignore[assignment,method-assign]
        got = store.average("w", ranked(rank), 4, quorum=2, timeout=10.0, details=True)
        store.barrier("all survivors", 2, timeout=DEADLINE)
        return got.value, [identity.rank for identity in got.present]

    found = results(server, 4, does)
    for rank in (2, 3):
        value, present = found[rank]
        assert present == [2, 3]
        assert torch.allclose(value, ranked(2.5))


def test_memory_that_cannot_be_opened_is_told_to_all(server: ServerProcess) -> None:
    def does(rank: int, store: Store) -> Any:
        def refused(*_: Any) -> memoryview:
            raise PermissionError(13, "Permission denied")

        if rank == 1:
            memory.attach = refused  # type: ignore[assignment]
        try:
            return store.average("w", ranked(rank), 3)
        except PermissionError:
            return "its own error"

    first, blind, last = results(server, 3, does)
    assert blind == "its own error"
    for error in (first, last):
        assert isinstance(error, BarrierBroken)
        assert "failed in rank 1" in error.headline
    assert keys(server) == []


def test_a_long_round_names_the_ranks_that_it_waits_for(server: ServerProcess) -> None:
    def does(rank: int, store: Store) -> str:
        text = io.StringIO()
        log = logging.getLogger("rallypoint")
        log.addHandler(logging.StreamHandler(text))
        log.setLevel("INFO")
        sync.QUIET, sync.LOOK = 0.001, 0.1
        if rank == 1:
            combine = work_split.combine

            def slow(*arguments: Any) -> bool:
                store.wait("the other waits", timeout=DEADLINE)
                return combine(*arguments)

            work_split.combine = slow  # type: ignore[assignment]
        else:
            describe = AverageRound._who

            def told(self: AverageRound, ranks: Any) -> str:
                store["the other waits"] = True
                return describe(self, ranks)

            AverageRound._who = told  # type: ignore[method-assign,assignment]
        store.average("w", ranked(rank, 5_000_000), 2)
        return text.getvalue()

    waiter, _ = results(server, 2, does)
    assert "waits for rank 1 (pid " in waiter


def test_the_name_of_a_round_is_in_its_errors(server: ServerProcess) -> None:
    def does(rank: int, store: Store) -> Any:
        return store.average("w", ranked(0), 2, weight=0.0)

    for error in results(server, 2, does):
        assert isinstance(error, UsageError)
        assert (
            error.headline
            == 'the average "w": the weights of ranks 0-1 are all 0, and there is no such mean'
        )
