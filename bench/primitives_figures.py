"""The tables of the primitives: samples of `bench/primitives.py` beside what they must be. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bench.primitives import BLOCK, GLOO, PAUSING, SIZES, SPINNING, STANDARD, WHOLE
from bench.samples import Case
from bench.store import OURS, PEER, TCP
from bench.store_figures import PAIRED, WAYS, missing, quantity, size_of
from bench.tables import Bound, Row, Table, times

MEMBERS = (2, 8, 64, 512)
TARGET_MEMBERS = 64
"""The size for which the design has figures."""

AVERAGE_TARGETS = {2: 3.0, 4: 2.5, 8: 2.5}
"""So many times faster than gloo, by the number of ranks."""


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """Every table, also those without a row."""
    return [_barrier(cases), _lock(cases), _average(cases), _shared(cases)]


def _barrier(cases: Mapping[str, Case]) -> Table:
    rows = []
    for members in MEMBERS:
        case = cases.get(f"barrier-{members}")
        for who in (OURS, TCP) if case is not None else ():
            assert case is not None
            slower, faster = case.ratio(who, PEER, "seconds"), case.ratio(GLOO, who, "seconds")
            bounds = (
                (
                    Bound("<= 1.2 x TCPStore.barrier", slower, 1.2),
                    Bound(">= 5 x faster than gloo", faster, 5, at_least=True),
                )
                if members == TARGET_MEMBERS
                else ()
            )
            shown = [quantity(case, one, "seconds", "ms", 1e3) for one in (who, PEER, GLOO)]
            rows.append(
                Row((str(members), WAYS[who], *shown, times(slower), times(faster)), bounds, case)
            )
    return Table(
        "A barrier",
        "So many processes pass one barrier right after the other: time per barrier. `TCPStore.barrier` and gloo's `dist.barrier` have the "
        f"same processes; gloo has at most 64. {PAIRED} What many members on few processors cost is what each touches when its turn comes: "
        "see 'A small request' in [decisions.md](decisions.md), which counts it.",
        (
            "members",
            "rallypoint by",
            "rallypoint",
            "TCPStore.barrier",
            "gloo dist.barrier",
            "rallypoint / TCPStore",
            "gloo / rallypoint",
        ),
        tuple(rows),
    )


def _lock(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        if not name.startswith("lock-"):
            continue
        for who in (OURS, TCP, SPINNING, PAUSING):
            ours = who in WAYS
            trips, fairness = case.median(who, "handover_trips"), case.median(who, "fairness")
            bounds = (
                (
                    Bound("hand-over <= 2 round trips", trips, 2),
                    Bound("most / least <= 1.2", fairness, 1.2),
                )
                if ours
                else ()
            )
            most, least = case.median(who, "most"), case.median(who, "least")
            cells = (
                name.removeprefix("lock-"),
                f"rallypoint, {WAYS[who]}" if ours else who,
                quantity(case, who, "handover_p50"),
                quantity(case, who, "handover_p99"),
                quantity(case, who, "trip"),
                "-" if trips is None else f"{trips:.2g}",
                quantity(case, who, "rate", "/s")
                if case.numbers(who, "rate")
                else missing(case, who),
                "-" if most is None or least is None else f"{most:.0f} / {least:.0f}",
            )
            rows.append(Row(cells, bounds, case))
    return Table(
        "A lock that many want",
        "So many processes want one lock, again and again, and give it back at once. Hand-over: from when one begins to give it back until "
        "another one has it. A round trip is a small `get` of one of these processes after it has slept, as those have that wait. How "
        "often it was had, and how often by who had it most and least. The lock of a TCPStore is what can be built on its `compare_set`: "
        "everybody tries until it is free, without a pause or with one; who gets it is a matter of luck, and one that dies keeps it for "
        "ever. Ours is first come, first served, leased and fenced.",
        ("contenders", "lock of", "hand-over p50", "p99", "round trip", "round trips", "had", "most / least"),
        tuple(rows),
    )  # fmt: skip


def _average(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        if not name.startswith("average-"):
            continue
        ranks, _, megabytes = name.removeprefix("average-").partition("x")
        faster = case.ratio(GLOO, OURS, "seconds")
        limit = AVERAGE_TARGETS.get(int(ranks))
        bounds = (
            (Bound(f">= {limit:g} x faster than gloo", faster, limit, at_least=True),)
            if limit is not None
            else ()
        )
        shown = [quantity(case, who, "seconds", "ms", 1e3) for who in (OURS, GLOO)]
        rows.append(Row((ranks, f"{megabytes} MB", *shown, times(faster)), bounds, case))
    return Table(
        "An average",
        f"A float32 tensor is averaged over so many processes of one host: time per call. `dist.all_reduce` of gloo sums it. {PAIRED} "
        "It is the memory's speed that decides, and so the machine: an Intel one had 1.80, 1.73, 2.03 x for 100 MB and 2, 4, 8 ranks. "
        "What was tried is in [decisions.md](decisions.md).",
        ("ranks", "tensor", "store.average", "gloo all_reduce", "gloo / rallypoint"),
        tuple(rows),
    )


def _shared(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        if not name.startswith("shared-"):
            continue
        for size in SIZES:
            value = f"rate_{size}"
            shown = [quantity(case, who, value, "k/s", 1e-3) for who in (WHOLE, BLOCK, STANDARD)]
            ratios = [times(case.ratio(who, STANDARD, value)) for who in (WHOLE, BLOCK)]
            rows.append(
                Row((name.removeprefix("shared-"), size_of(size), *shown, *ratios), (), case)
            )
    return Table(
        "A shared tensor",
        "So many processes add a tensor of ones to one in shared memory, in turn by its lock: additions per second of all together. "
        "`SharedTensor.add_` is whole or absent when its process is killed, for which it writes everything twice; beside it a plain `add_` "
        "in a `with shared.locked()` block, and the same under a `multiprocessing.Lock`, which stays locked for ever when its holder is "
        f"killed. {PAIRED}",
        (
            "processes", "tensor", "SharedTensor.add_", "locked(), add_", "multiprocessing.Lock, add_", "add_ / Lock", "locked() / Lock",
        ),
        tuple(rows),
    )  # fmt: skip
