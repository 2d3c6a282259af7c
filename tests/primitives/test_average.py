"""An average among threads, each with a store of its own or all with one: the mean, or the same
refusal for all.
"""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import BarrierBroken, BarrierMismatch, BarrierTimeout, UsageError
from rallypoint.primitives.average import average as averages
from rallypoint.primitives.average import segments
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server
from rallypoint.testing import Network
from rallypoint.wire.messages import State, Status

from ..store.live import DEADLINE, Thread, ended_well
from ..store.situations import Interruption, alarm, eventually

LARGE = 100_003
"""Elements of float32 that travel in shared memory; no round number of pages."""


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve(max_bytes="512MiB") as made:
        yield made


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def connected(**options: Any) -> Store:
        made.append(rallypoint.connect(server.address, secret=server.secret, **options))
        return made[-1]

    yield connected
    for store in made:
        store.close()


def together(stores: list[Store], does: Callable[[int, Store], Any]) -> list[Any]:
    """What `does(rank, store)` returns or raises in a thread each."""
    threads = [Thread(_caught, does, rank, store) for rank, store in enumerate(stores)]
    return [thread.result() for thread in threads]


def _caught(does: Callable[[int, Store], Any], rank: int, store: Store) -> Any:
    try:
        return does(rank, store)
    except Exception as error:
        return error


def waiting(store: Store) -> int:
    """Requests that wait at the server."""
    reply, _ = store.ask(Status)
    assert isinstance(reply, State)
    return reply.waiting


def ranked(rank: float, count: int = LARGE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different in every rank and element, and small enough that sums are exact in float32."""
    return (torch.arange(count) % 251 + 1000 * rank).to(dtype)


# --- the mean ---


@pytest.mark.parametrize("count", [0, 1, 5, 12_288, 12_289, LARGE, 1_500_000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_in_the_form_of_the_value(
    connect: Callable[..., Store], size: int, count: int
) -> None:
    stores = [connect() for _ in range(size)]
    for _ in range(2):
        for mean in together(
            stores, lambda rank, store: store.average("w", ranked(rank, count), size)
        ):
            assert torch.equal(mean, ranked((size - 1) / 2, count))


def test_threads_of_one_store_take_a_seat_each(connect: Callable[..., Store]) -> None:
    store = connect()
    for count in (3, LARGE):

        def does(rank: int, store: Store, count: int = count) -> Any:
            return store.average("w", ranked(rank, count), 4)

        for mean in together([store] * 4, does):
            assert torch.equal(mean, ranked(1.5, count))


@pytest.mark.parametrize("scale", [1, 20_000])
def test_a_tree_of_everything(connect: Callable[..., Store], scale: int) -> None:
    """Dicts in dicts, every dtype, views, no elements, no dimensions; numpy and plain numbers."""

    def value(rank: int) -> dict[Any, Any]:
        return {
            "layer": OrderedDict(
                weight=torch.nn.Parameter(ranked(rank, 6 * scale).view(2, -1)), bias=ranked(rank, 3)
            ),
            "turned": ranked(rank, 12 * scale).view(4, -1).t(),
            "every other": ranked(rank, 10 * scale)[::2],
            "half": ranked(rank / 1000, 7 * scale, torch.float16),
            "brain": torch.full((3,), float(rank), dtype=torch.bfloat16),
            "double": torch.tensor(rank / 3, dtype=torch.float64),
            "complex": torch.full((2, 2), complex(rank, -rank)),
            "conjugate": torch.full((2,), complex(rank, -rank)).conj(),
            "eighth": torch.full((5,), float(rank)).to(torch.float8_e5m2),
            "none": torch.empty(0, 3),
            "array": numpy.full((2, 3), float(rank), order="F"),
            "backwards": numpy.arange(4.0)[::-1] + rank,
            7: [float(rank), (rank * 1j,)],
        }

    def check(mean: dict[Any, Any]) -> None:
        assert [*mean] == [*value(0)]
        assert type(mean["layer"]) is OrderedDict
        assert type(mean["layer"]["weight"]) is torch.Tensor
        assert torch.equal(mean["layer"]["weight"], ranked(1, 6 * scale).view(2, -1))
        assert torch.equal(mean["turned"], ranked(1, 12 * scale).view(4, -1).t())
        assert torch.equal(mean["every other"], ranked(1, 10 * scale)[::2])
        assert mean["half"].dtype == torch.float16
        assert torch.allclose(mean["half"].float(), ranked(0.001, 7 * scale), atol=0.1)
        assert torch.equal(mean["brain"], torch.ones(3, dtype=torch.bfloat16))
        assert mean["double"].item() == pytest.approx(1 / 3, abs=1e-16)
        assert torch.equal(mean["complex"], torch.full((2, 2), 1 - 1j))
        assert torch.equal(mean["conjugate"], torch.full((2,), 1 + 1j))
        assert mean["eighth"].float().tolist() == [1.0] * 5
        assert mean["none"].shape == (0, 3)
        assert (mean["array"] == numpy.ones((2, 3))).all()
        assert mean["backwards"].tolist() == [4.0, 3.0, 2.0, 1.0]
        assert mean[7] == [1.0, (1j,)]

    for mean in together(
        [connect() for _ in range(3)], lambda rank, store: store.average("w", value(rank), 3)
    ):
        check(mean)


@pytest.mark.parametrize("count", [100, LARGE])
def test_half_precision_is_summed_in_single(connect: Callable[..., Store], count: int) -> None:
    """In bfloat16 itself 256 + 1 is 256, and the sum of two values near its end is infinite in
    float16.
    """
    values = [256.0, 1.0, 1.0, 1.0]
    found = together(
        [connect() for _ in range(4)],
        lambda rank, store: store.average(
            "w",
            {
                "b": torch.full((count,), values[rank]).bfloat16(),
                "h": torch.full((count,), 6e4).half(),
            },
            4,
        ),
    )
    for mean in found:
        assert mean["b"].unique().tolist() == [torch.tensor(259 / 4).bfloat16().item()]
        assert mean["h"].unique().tolist() == [torch.tensor(6e4).half().item()]


@pytest.mark.parametrize("count", [100, LARGE])
def test_weights(connect: Callable[..., Store], count: int) -> None:
    weights = [1.0, 3.0, 0.0]

    def does(rank: int, store: Store) -> Any:
        value = (
            ranked(rank, count) if weights[rank] else torch.full((count,), math.nan)
        )  # who does not count may bring what he likes
        return store.average("w", value, 3, weight=weights[rank], details=True)

    for got in together([connect() for _ in range(3)], does):
        assert torch.allclose(got.value, ranked(0.75, count))
        assert (got.weight, len(got.present), got.absent, got.not_finite) == (4.0, 3, (), ())


@pytest.mark.parametrize("count", [100, LARGE])
@pytest.mark.parametrize("unit", [1e-320, 1e-50, 1e39, 1e308], ids=str)
def test_weights_of_any_size(connect: Callable[..., Store], count: int, unit: float) -> None:
    """Likelihoods, say. In float32, in which the sums are kept, they are 0 or infinite."""
    value = [1.0, 5.0, math.nan]
    weights = [0.25 * unit, 0.75 * unit, 0.0]
    ratio = weights[1] / weights[0]  # of numbers that small it is not 3

    def does(rank: int, store: Store) -> Any:
        return store.average(
            "w", torch.full((count,), value[rank]), 3, weight=weights[rank], details=True
        )

    for got in together([connect() for _ in range(3)], does):
        assert torch.allclose(got.value, torch.full((count,), (1 + 5 * ratio) / (1 + ratio)))
        assert (got.weight, got.not_finite) == (weights[0] + weights[1], ())


def test_weights_whose_sum_is_beyond_all_numbers(connect: Callable[..., Store]) -> None:
    for equal in (True, False):

        def does(rank: int, store: Store, equal: bool = equal) -> Any:
            return store.average(
                "w",
                torch.full((3,), float(rank)),
                2,
                weight=1e308 if equal or rank else 1.5e308,
                details=True,
            )

        for got in together([connect() for _ in range(2)], does):
            assert torch.allclose(got.value, torch.full((3,), 0.5 if equal else 0.4))
            assert got.weight == math.inf


@pytest.mark.parametrize("count", [100, LARGE])
def test_weights_that_are_all_zero(connect: Callable[..., Store], count: int) -> None:
    stores = [connect() for _ in range(2)]
    for error in together(
        stores, lambda rank, store: store.average("w", ranked(rank, count), 2, weight=0)
    ):
        assert isinstance(error, UsageError)
        assert "are all 0, and there is no such mean" in str(error)
    for mean in together(stores, lambda rank, store: store.average("w", ranked(rank, count), 2)):
        assert torch.equal(mean, ranked(0.5, count))


@pytest.mark.parametrize("count", [100, LARGE])
def test_out_is_written_and_returned_also_when_it_is_the_value(
    connect: Callable[..., Store], count: int
) -> None:
    stores = [connect() for _ in range(2)]

    def in_place(rank: int, store: Store) -> bool:
        value = {"a": torch.nn.Parameter(ranked(rank, count)), "b": ranked(rank, count)[::3]}
        where = value["a"].data_ptr()
        got = store.average("w", value, 2, out=value)
        assert got is value
        assert torch.equal(value["b"], ranked(0.5, count)[::3])
        return (
            value["a"].data_ptr() == where
            and value["a"].requires_grad
            and torch.equal(value["a"].detach(), ranked(0.5, count))
        )

    def beside(rank: int, store: Store) -> bool:
        value, out = numpy.asarray(ranked(rank, count)), numpy.zeros(2 * count, ">f4")[::2]
        assert store.average("w", value, 2, out=out) is out
        return bool(
            (value == ranked(rank, count).numpy()).all()
            and (out == ranked(0.5, count).numpy()).all()
        )

    assert together(stores, in_place) == [True, True]
    assert together(stores, beside) == [True, True]


def test_everybody_gets_the_same_bits(connect: Callable[..., Store]) -> None:
    for count in (1000, LARGE):
        generator = torch.Generator().manual_seed(count)
        values = [torch.randn(count, generator=generator) for _ in range(3)]

        def does(rank: int, store: Store, values: list[torch.Tensor] = values) -> Any:
            return store.average("w", values[rank], 3)

        found = together([connect() for _ in range(3)], does)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert torch.allclose(found[0].double(), torch.stack(values).double().mean(0), atol=1e-6)


def test_names_sizes_and_forms_one_after_the_other(connect: Callable[..., Store]) -> None:
    """Nothing of one round is seen in another, whatever memory it has: growing and shrinking, two
    names in turn, two threads at once.
    """
    stores = [connect() for _ in range(3)]

    def does(rank: int, store: Store) -> None:
        for turn in range(12):
            for name, count in (("a", 20_000 * (1 + turn % 5)), ("b", 300_000 // (1 + turn))):
                mean = store.average(name, ranked(rank + turn, count), 3)
                assert torch.equal(mean, ranked(1 + turn, count)), (name, turn)

    def many(rank: int, store: Store) -> None:
        other = Thread(lambda: [store.average("c", ranked(rank + turn), 3) for turn in range(12)])
        does(rank, store)
        assert all(torch.equal(mean, ranked(1 + turn)) for turn, mean in enumerate(other.result()))

    assert together(stores, many) == [None] * 3


def test_no_name_of_a_barrier_or_another_average_is_in_its_way(
    connect: Callable[..., Store],
) -> None:
    """Its meetings have names in the same book."""
    names = ["w/done/2", "done/2/w", "average/w", "w/described"]
    stores = [connect() for _ in range(3)]
    threads = [
        Thread(
            lambda name=name: stores[2].average(name, torch.full((2,), 1.0), 2, timeout=DEADLINE)
        )
        for name in names
    ]
    threads += [Thread(stores[2].barrier, f"average/{name}", 2, DEADLINE) for name in ("w", *names)]
    eventually(lambda: waiting(stores[0]) == len(threads))
    for mean in together(stores[:2], lambda rank, store: store.average("w", ranked(rank), 2)):
        assert torch.equal(mean, ranked(0.5))
    for error in together(
        stores[:2], lambda rank, store: store.average("w", ranked(rank, 3 + rank), 2)
    ):
        assert isinstance(error, BarrierMismatch), error
        assert "got values that do not match" in str(error)
        assert "float32 [3] in " in str(error)
    for name in names:
        assert stores[0].average(name, torch.full((2,), 3.0), 2).tolist() == [2.0, 2.0]
    for name in ("w", *names):
        stores[0].barrier(f"average/{name}", 2)
    for thread in threads:
        thread.result()


def test_the_memory_is_used_again_and_goes_with_the_store(
    connect: Callable[..., Store], server: Server
) -> None:
    def count() -> int:
        return sum(
            os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:rallypoint")
            for fd in _descriptors()
        )

    gc.collect()
    before = count()
    stores = [
        rallypoint.connect(server.address, secret=server.secret, same_host=False) for _ in range(2)
    ]
    together(stores, lambda rank, store: [store.average("w", ranked(rank), 2) for _ in range(3)])
    assert before + 2 <= count() <= before + 4
    together(stores, lambda rank, store: [store.average("w", ranked(rank), 2) for _ in range(20)])
    assert before + 2 <= count() <= before + 4  # two each, which are lent in turn
    stores[0].close()  # though the object is still here
    gc.collect()
    assert count() <= before + 2
    stores.clear()
    gc.collect()
    assert count() == before


def _descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.stat(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found.append(int(name))
    return found


def test_an_average_of_many_names_does_not_pile_up_memory(connect: Callable[..., Store]) -> None:
    stores = [connect() for _ in range(2)]
    together(
        stores,
        lambda rank, store: [store.average(f"epoch {turn}", ranked(rank), 2) for turn in range(50)],
    )
    for store in stores:
        held = segments.cache_of(store)
        assert len(held._free) <= 2
        assert len(held._others) <= 4
        assert len(store) == 0


def test_averages_that_fail_do_not_pile_up_memory(connect: Callable[..., Store]) -> None:
    """One rank alone, with values that grow: none of the segments before fits."""
    store = connect()
    for times in range(1, 13):
        with pytest.raises(BarrierTimeout):
            store.average("w", torch.ones(times * 50_000), 2, timeout=0)
    assert len(segments.cache_of(store)._free) <= segments.KEPT


def test_a_forked_child_averages_with_memory_of_its_own(connect: Callable[..., Store]) -> None:
    stores = [connect() for _ in range(2)]
    together(stores, lambda rank, store: store.average("w", ranked(rank), 2))
    child = os.fork()
    if child == 0:
        torch.set_num_threads(
            1
        )  # OpenMP's threads are not there after a fork, and torch would wait for them
        good = False
        try:
            good = torch.equal(stores[0].average("w", ranked(5), 2), ranked(3))
        finally:
            os._exit(0 if good else 1)
    assert torch.equal(stores[1].average("w", ranked(1), 2), ranked(3))
    assert ended_well(child)
    for mean in together(stores, lambda rank, store: store.average("w", ranked(rank), 2)):
        assert torch.equal(mean, ranked(0.5))


# --- what is told ---


def test_details_introduce_themselves(connect: Callable[..., Store]) -> None:
    got = connect().average("w", 2.0, 1, details=True)
    assert isinstance(got, rallypoint.Averaged)
    assert repr(got) == f"<Averaged: round {got.round}, 1 ranks of weight 1>"
    assert got.value == 2.0
    assert got.present[0].pid == os.getpid()


@pytest.mark.parametrize("count", [100, LARGE])
def test_nan_and_infinity_spread_and_are_told_by_rank(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    def does(rank: int, store: Store) -> Any:
        value = {
            "good": ranked(rank, count),
            "bad": ranked(rank, count),
            "worse": ranked(rank, count),
        }
        if rank == 1:
            value["bad"][count // 2] = math.nan
            value["worse"][-1] = math.inf
        return store.average("w", value, 3, details=True)

    with Network() as network, caplog.at_level(logging.WARNING, "rallypoint"):
        found = together([network.connect(rank=rank, timeout=DEADLINE) for rank in range(3)], does)
    for got in found:
        assert torch.equal(got.value["good"], ranked(1, count))
        assert got.value["bad"].isnan().nonzero().tolist() == [[count // 2]]
        assert got.value["worse"].isinf().nonzero().tolist() == [[count - 1]]
        assert [(identity.rank, leaves) for identity, leaves in got.not_finite] == [
            (1, ("value['bad']", "value['worse']"))
        ]
    assert any(
        "has NaN or infinite elements: rank 1" in line and "value['bad'], value['worse']" in line
        for line in caplog.messages
    )


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_nan_of_weight_0_is_not_named_beside_one_that_counts(count: int) -> None:
    def does(rank: int, store: Store) -> Any:
        value = torch.full((count,), 1.0 if rank == 2 else math.nan)
        return store.average("w", value, 3, weight=float(rank > 0), details=True)

    with Network() as network:
        stores = [network.connect(rank=rank, timeout=DEADLINE) for rank in range(3)]
        for got in together(stores, does):
            assert [identity.rank for identity, _ in got.not_finite] == [1]


@pytest.mark.parametrize("count", [1, LARGE])
def test_of_many_parts_with_a_nan_the_first_twenty_are_named(
    connect: Callable[..., Store], count: int
) -> None:
    value = {f"p{number:02}": torch.full((count,), math.nan) for number in range(30)}
    ((_, leaves),) = connect().average("w", value, 1, details=True).not_finite
    assert leaves == tuple(f"value['p{number:02}']" for number in range(20))


def test_a_sum_beyond_the_dtype_is_infinite_and_nobodys(connect: Callable[..., Store]) -> None:
    for got in together(
        [connect() for _ in range(2)],
        lambda rank, store: store.average("w", torch.full((LARGE,), 3e38), 2, details=True),
    ):
        assert got.value.isinf().all()
        assert got.not_finite == ()


# --- refusals ---


@pytest.mark.parametrize("count", [100, LARGE])
def test_values_that_do_not_match_are_refused_everywhere_with_the_key(
    connect: Callable[..., Store], count: int
) -> None:
    stores = [connect() for _ in range(3)]

    def does(rank: int, store: Store) -> Any:
        value = {"a": ranked(rank, count), "b": ranked(rank, 4)}
        if rank == 2:
            value["b"] = value["b"].view(2, 2)
        return store.average("w", value, 3)

    errors = together(stores, does)
    for error in errors:
        assert isinstance(error, BarrierMismatch)
        assert error.code == "average-mismatch"
        assert error.headline.startswith(
            "the average \"w\" got values that do not match: value['b'] is float32 ["
        )
        assert "float32 [4] in 2 in pid" in error.headline
        assert "float32 [2, 2] in pid" in error.headline
    assert len({error.headline for error in errors}) == 1
    for mean in together(stores, lambda rank, store: store.average("w", ranked(rank, count), 3)):
        assert torch.equal(mean, ranked(1, count))


def test_a_key_that_one_has_and_another_dtype(connect: Callable[..., Store]) -> None:
    def does(rank: int, store: Store) -> Any:
        return store.average(
            "w", {"a": 1.0, "b": ranked(rank)} if rank else {"a": torch.ones(1)}, 2
        )

    for error in together([connect() for _ in range(2)], does):
        assert isinstance(error, BarrierMismatch)
        said = "\n".join((error.headline, *error.why))
        assert "value['a'] is " in said
        assert "float64 []" in said
        assert "float32 [1]" in said
        assert "value['b'] is " in said
        assert "nothing in" in said


def test_a_size_that_differs(connect: Callable[..., Store]) -> None:
    for error in together(
        [connect() for _ in range(2)], lambda rank, store: store.average("w", 1.0, 2 + rank)
    ):
        assert isinstance(error, BarrierMismatch)
        assert error.code == "barrier-size"
        assert error.headline.startswith('the average "w" has no one size')


@pytest.mark.parametrize("count", [100, LARGE])
def test_a_timeout_names_who_came_and_costs_nothing(
    connect: Callable[..., Store], count: int
) -> None:
    stores = [connect() for _ in range(3)]
    clock = Clock()
    errors = together(
        stores[:2], lambda rank, store: store.average("w", ranked(rank, count), 3, timeout=2.0)
    )
    assert 1.9 < clock.elapsed() < 20.0
    timed_out = [error for error in errors if isinstance(error, BarrierTimeout)]
    broken = [error for error in errors if isinstance(error, BarrierBroken)]
    assert len(timed_out) >= 1, errors
    assert len(timed_out) + len(broken) == 2
    assert timed_out[0].headline.startswith('the average "w" of 3 timed out after 2.0 s: 2 arrived')
    assert all(error.headline.startswith('the average "w" of 3 is broken') for error in broken)
    with pytest.raises(
        BarrierBroken, match='the average "w" of 3 is broken'
    ):  # it comes to a round that is over
        stores[2].average("w", ranked(0, count), 3)
    for mean in together(stores, lambda rank, store: store.average("w", ranked(rank, count), 3)):
        assert torch.equal(mean, ranked(1, count))


@pytest.mark.parametrize("count", [100, LARGE])
def test_a_quorum_goes_on_without_who_does_not_come(
    connect: Callable[..., Store], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At the deadline in the first round; who missed it is told so, and is waited for again."""
    stores = [connect() for _ in range(3)]

    def does(rank: int, store: Store) -> Any:
        return store.average(
            "w", ranked(rank, count), 3, quorum=2, timeout=2.0, details=True, weight=1 + rank
        )

    with caplog.at_level(logging.WARNING, "rallypoint"):
        for got in together(stores[:2], does):
            assert torch.allclose(got.value, ranked(2 / 3, count))
            assert (len(got.present), got.weight) == (2, 3.0)
    assert any("is complete without all of 3: 2 arrived" in line for line in caplog.messages)
    with pytest.raises(
        BarrierBroken, match=rf'round {got.round} of the average "w" was complete with 2 of 3'
    ) as caught:
        does(2, stores[2])
    assert caught.value.code == "barrier-missed"
    for got in together(
        stores,
        lambda rank, store: store.average("w", ranked(rank, count), 3, quorum=2, details=True),
    ):
        assert torch.equal(got.value, ranked(1, count))
        assert (len(got.present), got.absent) == (3, ())


def test_a_quorum_that_is_not_there(connect: Callable[..., Store]) -> None:
    with pytest.raises(
        BarrierTimeout,
        match=r'the average "w" of 3 with a quorum of 2 timed out after 0\.2 s: 1 arrived',
    ):
        connect().average("w", 1.0, 3, quorum=2, timeout=0.2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"size": 0}, "size=0"),
        ({"weight": -1.0}, "weight=-1.0 is no number from 0"),
        ({"weight": math.nan}, "weight=nan is no number from 0"),
        ({"weight": math.inf}, "weight=inf is no number from 0"),
        ({"quorum": 3}, "quorum=3 is none of 2"),
        ({"quorum": 0}, "quorum=0 is none of 2"),
        ({"timeout": -1}, "timeout=-1"),
        ({"out": 1.0}, "out is a float that cannot change"),
    ],
)
def test_wrong_arguments(connect: Callable[..., Store], given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        connect().average("w", 1.0, **({"size": 2} | given))


@pytest.mark.parametrize(
    "given", [{"size": 2.0}, {"size": True}, {"weight": "1"}, {"quorum": 1.5}, {"name": 3}]
)
def test_wrong_types(connect: Callable[..., Store], given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"name": "w", "value": 1.0, "size": 2} | given
    with pytest.raises(TypeError):
        connect().average(**arguments)


def test_a_timedelta_is_a_timeout(connect: Callable[..., Store]) -> None:
    assert connect().average("w", 1.0, 1, timeout=timedelta(seconds=3)) == 1.0


def test_who_is_interrupted_breaks_the_round_at_once(connect: Callable[..., Store]) -> None:
    stores = [connect() for _ in range(2)]
    clock = Clock()
    other = Thread(_caught, lambda rank, store: store.average("w", ranked(rank), 3), 1, stores[1])

    def interrupt() -> None:
        raise Interruption

    with alarm(0.3, interrupt), pytest.raises(Interruption):
        stores[0].average("w", ranked(0), 3)
    error = other.result()
    assert isinstance(error, BarrierBroken)
    assert error.headline.startswith('the average "w" of 3 is broken: ')
    assert clock.elapsed() < 20.0


def test_gpu_and_gradients_stay_out(connect: Callable[..., Store]) -> None:
    weight = torch.ones(LARGE, requires_grad=True)
    mean = connect().average("w", weight * 2, 1)
    assert not mean.requires_grad


def test_small_means_below_the_limit_of_a_meeting() -> None:
    assert averages.SMALL_BYTES + 4096 < 64 * 1024


@pytest.mark.usefixtures("torch_in_parts")
def test_a_spawned_process_with_the_store_as_its_argument(connect: Callable[..., Store]) -> None:
    store = connect()
    process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(store,))
    process.start()
    assert torch.equal(store.average("w", ranked(0), 2), ranked(0.5))
    process.join(60)
    assert process.exitcode == 0


def _spawned(store: Store) -> None:
    assert torch.equal(store.average("w", ranked(1), 2), ranked(0.5))
