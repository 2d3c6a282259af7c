"""The tables of the coordination store: samples of `bench/store.py` beside what they must
be. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.samples import Case, spread
from bench.store import BULK_BYTES, OURS, PEER, PEER_BULK_BYTES, PEER_BYTES, SIZES, TCP
from bench.tables import Bound, Row, Table, times

WAYS = {OURS: "Unix socket", TCP: "TCP"}
THROUGHPUT = (8, 64)
TARGET_BYTES = 7 * 10**6  # the size for which the design has figures

PAIRED = "Everyone runs once in each turn, one right after the other; ratios are medians of the turns' ratios."


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """Every table, also those without a row."""
    return [_latency(cases), _throughput(cases), _values(cases), _mixed(cases), _many(cases)]


def quantity(case: Case, who: str, name: str, unit: str = "us", scale: float = 1.0) -> str:
    """`24.5 us (23.0-33.1)`: the median, and least and most when there are several; or why there is
    none.
    """
    numbers = [number * scale for number in case.numbers(who, name)]
    if not numbers:
        return missing(case, who)
    middle = (case.median(who, name) or 0.0) * scale
    least, most = spread(numbers)
    return (
        f"{_short(middle)} {unit} ({_short(least)}-{_short(most)})"
        if len(numbers) > 1
        else f"{_short(middle)} {unit}"
    )


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def missing(case: Case, who: str) -> str:
    """In the place of a figure: the reason, or "-" for one who took no part."""
    notes = [note.strip().splitlines()[-1][:80] for note in case.notes(who)]
    if notes:
        return "; ".join(dict.fromkeys(notes))
    return "not measured" if who in case.who() else "-"


def rate(bytes_per_second: float | None) -> str:
    """`9.79 GB/s`, `37.1 MB/s`."""
    if bytes_per_second is None:
        return "-"
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_second >= scale:
            return f"{bytes_per_second / scale:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"


def _latency(cases: Mapping[str, Case]) -> Table:
    case = cases.get("latency")
    rows: list[Row] = []
    for suffix, placed in (("", "two"), ("_together", "one")):
        for operation, limit in (("get", 0.6), ("add", 1.3), ("set", None)):
            for who in (OURS, TCP) if case is not None else ():
                assert case is not None
                name = f"{operation}_p50{suffix}"
                ratio = case.ratio(who, PEER, name)
                cells = (
                    operation,
                    WAYS[who],
                    placed,
                    quantity(case, who, name),
                    quantity(case, who, f"{operation}_p99{suffix}"),
                    _processor(case, who, operation, suffix),
                    quantity(case, PEER, name),
                    quantity(case, PEER, f"{operation}_p99{suffix}"),
                    _processor(case, PEER, operation, suffix),
                    times(ratio) if limit is not None else "-",
                )
                bounds = (
                    (Bound(f"<= {limit} x TCPStore", ratio, limit),) if limit is not None else ()
                )
                rows.append(Row(cells, bounds, case))
    return Table(
        "One client, small operations",
        f"Values of 32 bytes, thousands of calls of a warm client, in one turn. {PAIRED} Server and client have a processor each, or share "
        "one: a kernel that is free to choose does now this, now that, and the waking of another processor costs more than either store. "
        "Processor time per call: the client's, then the server's. TCPStore's `set` is not acknowledged: it returns when the kernel has "
        "the bytes, and is lost silently when the server is gone. Ours returns when the server has it, so the two are not compared.",
        (
            "operation", "rallypoint by", "processors", "p50", "p99", "processor time", "TCPStore p50", "p99", "processor time",
            "p50 / TCPStore",
        ),
        tuple(rows),
    )  # fmt: skip


def _processor(case: Case, who: str, operation: str, suffix: str) -> str:
    ends = [case.median(who, f"{operation}_{end}_cpu{suffix}") for end in ("client", "server")]
    return (
        " + ".join(f"{end:.0f}" for end in ends if end is not None) + " us"
        if None not in ends
        else "-"
    )


def _throughput(cases: Mapping[str, Case]) -> Table:
    rows = []
    for clients in THROUGHPUT:
        case = cases.get(f"throughput-{clients}")
        for operation, limit in (("get", 1.5), ("add", 0.7)) if case is not None else ():
            assert case is not None
            for who in (OURS, TCP):
                name = f"{operation}_rate"
                ratio = case.ratio(who, PEER, name)
                bounds = (
                    (Bound(f">= {limit} x TCPStore", ratio, limit, at_least=True),)
                    if clients == 8
                    else ()
                )
                mine, theirs = (
                    quantity(case, who, name, "k/s", 1e-3),
                    quantity(case, PEER, name, "k/s", 1e-3),
                )
                cells = (
                    str(clients), operation, WAYS[who], mine, _processor(case, who, operation, ""), theirs,
                    _processor(case, PEER, operation, ""), times(ratio),
                )  # fmt: skip
                rows.append(Row(cells, bounds, case))
    return Table(
        "Many clients, small operations",
        f"Operations per second of all clients together, a process each, each calling without a pause. {PAIRED} Processor time per "
        "operation: the client's, then the server's.",
        (
            "clients", "operation", "rallypoint by", "rallypoint", "processor time", "TCPStore", "processor time", "rallypoint / TCPStore",
        ),
        tuple(rows),
    )  # fmt: skip


def size_of(size: int) -> str:
    """`64 KiB`, `7 MB`."""
    for scale, unit in ((10**9, "GB"), (2**20, "MiB"), (10**6, "MB"), (2**10, "KiB")):
        if size >= scale and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"


def _values(cases: Mapping[str, Case]) -> Table:
    case = cases.get("values")
    rows = []
    for size in SIZES:
        if case is None or case.median(OURS, f"set_{size}") is None:
            continue
        bounds: tuple[Bound, ...] = ()
        if size == TARGET_BYTES:
            bounds = tuple(
                Bound(f"{way} {name} >= {limit} GB/s", None if (speed := case.median(who, f"{name}_{size}")) is None else speed / 1e9,
                      limit, at_least=True)
                for who, way, limit in ((OURS, "same host", 5), (TCP, "TCP", 2)) for name in ("set", "get")
            )  # fmt: skip
        refused = size > PEER_BYTES
        cells = [
            size_of(size),
            *(
                rate(case.median(who, f"{name}_{size}"))
                for who in (OURS, TCP)
                for name in ("set", "get", "first")
            ),
            *(
                "over its limit" if refused else rate(case.median(PEER, f"{name}_{size}"))
                for name in ("set", "get")
            ),
            rate(case.median(OURS, f"memcpy_{size}")),
        ]
        rows.append(Row(tuple(cells), bounds, case))
    return Table(
        "Values",
        "One client writes one key over and over, then reads it over and over: bytes of the value per second, the median of the calls, "
        "and of the turns. The first write is shown apart: later ones use its memory again. Ours are torch tensors, "
        "read into a new tensor each time; TCPStore takes bytes, "
        f"at most {size_of(PEER_BYTES)} of them, and each of its writes is followed by a `check`, whose answer says that it has arrived. "
        "On one host, large values go through shared memory. memcpy: one tensor into another, by one thread of the client, the limit for "
        "any store that copies once.",
        (
            "size", "same host: set", "get", "first set", "TCP: set", "get", "first set", "TCPStore: set", "get", "memcpy",
        ),
        tuple(rows),
    )  # fmt: skip


def _mixed(cases: Mapping[str, Case]) -> Table:
    case = cases.get("mixed")
    rows = []
    for who in (OURS, TCP, PEER) if case is not None else ():
        assert case is not None
        for uploaders in range(3):
            name = f"p50_{uploaders}"
            bounds = (
                (Bound("p50 <= 300 us", case.median(who, name), 300),)
                if uploaders == 2 and who != PEER
                else ()
            )
            cells = (
                WAYS.get(who, who),
                f"{uploaders} of {size_of(PEER_BULK_BYTES if who == PEER else BULK_BYTES)}",
                quantity(case, who, name),
                quantity(case, who, f"p99_{uploaders}"),
                rate(case.median(who, f"upload_{uploaders}")) if uploaders else "-",
            )
            rows.append(Row(cells, bounds, case))
    return Table(
        "A small get beside uploads",
        "One client reads 32 bytes over and over, while others write a large value over and over, all in processes of their own. What the "
        "uploaders wrote together is beside it. Those of TCPStore write values that it takes.",
        ("rallypoint by, or peer", "uploaders", "get p50", "p99", "uploaded"),
        tuple(rows),
    )


def _many(cases: Mapping[str, Case]) -> Table:
    rows: list[Row] = []
    for name, case in cases.items():
        kind, _, count = name.rpartition("-")
        for who in (OURS, TCP) if kind in ("connect", "sessions", "storm") else ():
            ratio, extra, words = case.ratio(who, PEER, "seconds"), "-", ""
            mine, theirs = quantity(case, who, "seconds", "s"), quantity(case, PEER, "seconds", "s")
            bounds: tuple[Bound, ...] = ()
            if kind == "connect":
                words = f"{count} processes connect and pass a barrier; no name server answers"
                bounds = (Bound("<= 5 s", case.median(who, "seconds"), 5),)
            elif kind == "sessions":
                words = f"{count} sessions of 8 processes join and pass a barrier"
                memory = case.median(who, "server_bytes")
                extra = (
                    f"{memory / 1000:.1f} kB of the server's memory each"
                    if memory is not None
                    else "-"
                )
                bounds = (
                    Bound("<= 2 x TCPStore", ratio, 2), Bound("<= 40 kB a session", memory / 1000 if memory is not None else None, 40)
                )  # fmt: skip
            else:
                words = f"{count} processes connect at the same moment, 5 times in a row: the median time"
                failures = case.numbers(who, "failures")
                extra = (
                    f"worst {quantity(case, who, 'worst_seconds', 's')}; {sum(failures):.0f} failures"
                    if failures
                    else "-"
                )
                bounds = (Bound("no failure", sum(failures) if failures else None, 0),)
            rows.append(Row((words, WAYS[who], mine, theirs, times(ratio), extra), bounds, case))
    return Table(
        "Very many clients",
        "Seconds until the last is through. No name server answers: TCPStore looks up the names of its peers' addresses and waits for it, "
        "which is measured in the first line only; in all other tables a look-up fails at once. The members of the large barrier arrive "
        "before any is waited for; those of TCPStore add and wait, since its own barrier blocks. Memory: what the server's resident "
        "memory grew by.",
        ("what", "rallypoint by", "rallypoint", "TCPStore", "rallypoint / TCPStore", "beside that"),
        tuple(rows),
    )
