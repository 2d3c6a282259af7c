"""The table of `launch`: samples of `bench/launch.py` beside what they must be. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bench.launch import IMPORT, OURS, SPAWN, TORCHRUNX
from bench.samples import Case
from bench.tables import Bound, Row, Table, seconds, times

TARGET_RANKS = 8
"""The size for which the design has figures."""


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """Every table, also those without a row."""
    rows = []
    for name, case in cases.items():
        if not name.startswith("launch-"):
            continue
        ranks = int(name.removeprefix("launch-"))
        imports = case.ratio(OURS, IMPORT, "first")
        bounds = (
            (
                Bound("first <= 1.3 x one import", imports, 1.3),
                Bound("second <= 0.4 s", case.median(OURS, "again"), 0.4),
            )
            if ranks == TARGET_RANKS
            else ()
        )
        first = [seconds(case, who, "first") for who in (OURS, IMPORT, TORCHRUNX, SPAWN)]
        again = [seconds(case, who, "again") for who in (OURS, TORCHRUNX, SPAWN)]
        faster = [times(case.ratio(TORCHRUNX, OURS, point)) for point in ("first", "again")]
        rows.append(Row((str(ranks), *first, times(imports), *again, *faster), bounds, case))
    return [
        Table(
            "A function, from Python",
            '`rallypoint.launch(fn, nproc=N, backend="gloo")` from a program with threads, an event loop and torch imported: '
            "seconds from the call to its return, with every rank's result. The function does one all_reduce. First: the first call of a "
            "program; again: a further one. torchrunx has the same interface and starts new interpreters for every call; so does "
            "`torch.multiprocessing.spawn`. Everyone runs once in each turn, beside one interpreter that does nothing but `import torch`; "
            "ratios are medians of the turns' ratios.",
            (
                "ranks",
                "first: rallypoint",
                "`import torch`",
                "torchrunx",
                "mp.spawn",
                "rallypoint / import",
                "again: rallypoint",
                "torchrunx",
                "mp.spawn",
                "torchrunx / rallypoint, first",
                "again",
            ),
            tuple(rows),
        )
    ]
