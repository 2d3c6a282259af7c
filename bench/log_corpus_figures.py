"""The corpus of logs as tables: how often the cause was named, and how fast long logs are read.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.samples import Case
from bench.tables import Bound, Row, Table
from bench.verdict_figures import NOT_KNOWN, RIGHT, WRONG, count

NAMES = {
    "held_out": "held out",
    "third": "third set, mended after its first reading",
    "fourth": "fourth set, mended after its first reading",
    "fifth": "fifth set, mended after its first reading",
    "sixth": "47 excerpts, expectations written afterwards",
    "seventh": "seventh set, made up, mended after its first reading",
    "eighth": "eighth set, excerpts, mended after its first reading",
    "ninth": "ninth set, excerpts, mended after its first reading",
    "tenth": "tenth set, excerpts, mended after its first reading",
    "eleventh": "eleventh set, excerpts, mended after its first reading",
    "twelfth": "twelfth set, excerpts, mended after its first reading",
    "thirteenth": "thirteenth set, excerpts that are right by now, mended after its first reading",
    "fourteenth": "fourteenth set, short excerpts that are right by now, mended after its first reading",
    "fifteenth": "fifteenth set, of whole logs, mended after its first reading",
    "sixteenth": "sixteenth set, of ordinary users and clusters, mended after its first reading",
    "seventeenth": "seventeenth set, of shells, macOS, MPI and launchers' stops, mended after its first reading",
    "eighteenth": "eighteenth set, of words behind bars, in Chinese and of MPI's networks, mended after its first reading",
    "nineteenth": "nineteenth set, of the echo of Ctrl-C, marks of a page and torn words, mended after its first reading",
    "developed": "developed on",
}
GIB_A_MINUTE = 1.0  # what a log of ten GiB takes must be a matter of minutes


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """Those for which there is something measured."""
    return [_corpus(cases), _speed(cases)]


def _corpus(cases: Mapping[str, Case]) -> Table:
    case = cases.get("log-corpus")
    rows = []
    for half, words in NAMES.items() if case else ():
        assert case is not None
        mine = [sample for sample in case.samples if sample.who == half]
        if not mine:
            continue
        counted = count(mine)
        said = [
            f"{s.values['log']}: {s.values['code']}" for s in mine if s.values.get("grade") != RIGHT
        ]
        bounds = (Bound("0 wrong", counted[WRONG], 0),) if half == "held_out" else ()
        grades = [str(counted[grade]) for grade in (RIGHT, NOT_KNOWN, WRONG)]
        rows.append(Row((words, str(len(mine)), *grades, ", ".join(said) or "-"), bounds, case))
    for sample in case.samples if case else ():
        if sample.who == "first reading":
            assert case is not None
            numbers = [str(sample.values[name]) for name in ("logs", "right", "not_known", "wrong")]
            rows.append(
                Row(
                    (
                        f"first reading: {sample.values['what']}",
                        *numbers,
                        str(sample.values["said"]),
                    ),
                    (),
                    case,
                )
            )
    return Table(
        "Does `explain` name the cause in somebody else's log",
        "Logs from public issues (messages verbatim, the rest shortened and renamed) and made here with torchrun, "
        "accelerate, Lightning and mp.spawn: tests/logs. What must be said was written before the code had read the logs that are held "
        "out. Right: the code, and the ranks where the log names them. Not known: `cause-unknown`, or another cause said to be only likely "
        "or possible. Wrong: another code, said to be certain; that includes a coarser one at the right line (`rank-raised` for "
        "`env-missing`). First reading: what the code said of logs that it had never seen, before anything was mended; the first set was "
        "then developed on, the second is the one that is held out; the third and the fourth are of logs that "
        "people collected who had not read the code, the fifth of such for which the codes were written down before any was read; "
        "what all three brought to light was mended afterwards.",
        ("logs", "number", "right", "not known", "wrong", "said instead"),
        tuple(rows),
    )


def _speed(cases: Mapping[str, Case]) -> Table:
    case = cases.get("log-speed")
    rows = []
    for who in case.who() if case else ():
        assert case is not None
        size, seconds = case.median(who, "bytes"), case.median(who, "processor_seconds")
        wall, peak = case.median(who, "seconds"), case.median(who, "peak")
        if not size or not seconds or not wall or not peak:
            continue
        pace = size / seconds * 60 / 2**30
        cells = (
            who,
            f"{size / 2**20:.0f} MiB",
            f"{wall:.1f} s",
            f"{seconds:.1f} s",
            f"{pace:.1f} GiB",
            f"{peak / 2**20:.0f} MiB",
        )
        bounds = (
            Bound(">= 1 GiB a minute", pace, GIB_A_MINUTE, at_least=True),
            Bound("<= 64 MiB", peak / 2**20, 64),
        )
        rows.append(Row(cells, bounds, case))
    return Table(
        "How fast `explain` reads",
        "A long log with one traceback at its end. The pace is by processor time; the memory is the process's peak, which does not grow "
        "with the log.",
        ("lines", "size", "time", "processor time", "a minute of it reads", "peak memory"),
        tuple(rows),
    )
