"""How often `rallypoint explain` names the cause that a log of somebody's tells, and how fast it
reads.

The logs are in tests/logs: texts of errors from public issues, and logs made here with torch,
Lightning and the launchers. What must be said of each stands in expected.toml, written before the
code had read those that are held out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.harness import ROOT, say
from bench.samples import Sample
from bench.verdict_figures import NOT_KNOWN, RIGHT, WRONG

FOLDER = ROOT / "tests" / "logs"
HALVES = (
    "held_out",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "developed",
)

SIZE = 256 << 20
"""Bytes of the log for the speed: it is read in some seconds, and start-up is less than a twentieth
of that.
"""

TIMEOUT = 300.0  # seconds for one reading: fifty times what it takes


@dataclass(frozen=True)
class Expected:
    """What must be said of one log."""

    half: str
    name: str
    code: str
    line: int  # where the cause begins; 0: nowhere, since the log tells of no failure
    ranks: tuple[int, ...]  # at fault; empty when the log does not tell, or that is not judged
    source: str
    also: tuple[str, ...] = ()  # other codes that are as right, where the pages of two overlap

    @property
    def path(self) -> Path:
        return FOLDER / self.half / f"{self.name}.log"


@cache
def expected() -> tuple[Expected, ...]:
    """Every log of the corpus."""
    told = tomllib.loads((FOLDER / "expected.toml").read_text(encoding="utf-8"))
    return tuple(
        Expected(
            half,
            name,
            one["code"],
            one["line"],
            tuple(one["ranks"]),
            one["source"],
            tuple(one.get("also", ())),
        )
        for half in HALVES
        for name, one in sorted(told[half].items())
    )


def first_readings() -> list[dict[str, int | str]]:
    """What logs that the code had never read were told the first time, before anything was mended:
    in the order of time.
    """
    readings: list[dict[str, int | str]] = tomllib.loads(
        (FOLDER / "expected.toml").read_text(encoding="utf-8")
    )["first_readings"]
    return readings


def corpus(turns: int) -> Iterator[Sample]:
    """One sample for each log, and one for each first reading. The reading depends on nothing else,
    so one turn is enough.
    """
    from rallypoint.diagnosis.logs.reader import Reader
    from rallypoint.diagnosis.logs.to_evidence import diagnose

    for one in expected():
        report = diagnose(Reader(one.name).read([one.path.read_bytes()]))[0]
        right = report.code in (one.code, *one.also) and (
            not one.ranks or report.ranks == one.ranks
        )
        sure = report.confidence == "certain" and report.code != "cause-unknown"
        grade = RIGHT if right else WRONG if sure else NOT_KNOWN
        if not right:
            say(f"{one.half}/{one.name}: {report.code} ({report.confidence}), not {one.code}")
        yield Sample(
            one.half,
            1,
            {
                "grade": grade,
                "log": one.name,
                "code": report.code,
                "expected": one.code,
                "confidence": report.confidence,
            },
        )
    for i, reading in enumerate(first_readings()):
        yield Sample("first reading", i + 1, {**reading})


def speed(turns: int) -> Iterator[Sample]:
    """Read a long log of a training, in a process of its own: seconds, and the memory it took."""
    with tempfile.TemporaryDirectory(prefix="log-speed-") as folder:
        for who, line in _KINDS.items():
            path = Path(folder) / "train.log"
            block = b"".join(line % (i % 8, i % 60, i, 1 / (i + 1)) for i in range(8000))
            with open(path, "wb") as file:
                while file.tell() < SIZE:
                    file.write(block)
                file.write(_END)
            for turn in range(1, turns + 1):
                yield Sample(who, turn, _read(path))


_END = b'[rank3]: Traceback (most recent call last):\n[rank3]:   File "train.py", line 3, in <module>\n[rank3]: ValueError: x\n'
_STAMP = b"[rank%d]: 2026-11-22 06:54:%02d,123 "
_KINDS = {
    "lines of a training": _STAMP
    + b"INFO step %d loss %.4f lr 1.0e-4 tokens/s 18231 grad_norm 0.77 mem 34.1GiB\n",
    "each with the words of errors": _STAMP
    + b"WARNING step %d val_error %.4f memory 34.1GiB signal ok, exit code 0\n",
}


def _read(path: Path) -> dict[str, float | int | bool | str | None]:
    size = path.stat().st_size
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "explain", str(path)],
        stdout=subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        _, status, used = os.wait4(child.pid, 0)
    finally:
        child.returncode = 0  # it is reaped
    seconds = time.monotonic() - began
    assert seconds < TIMEOUT
    assert os.waitstatus_to_exitcode(status) == 0
    return {
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "bytes": size,
        "peak": used.ru_maxrss * 1024,
    }
