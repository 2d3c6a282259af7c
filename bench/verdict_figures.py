"""The verdict matrix as a table: how often the first cause of a report was the fault that had been
put into the job. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from bench.samples import Case, Sample
from bench.tables import Bound, Row, Table
from bench.verdict_faults import FAULTS

RIGHT, NOT_KNOWN, WRONG = "right", "not known", "wrong"
RIGHT_AT_LEAST = 98.0  # percent of all cells


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """One table of all faults, and the sum."""
    measured = [cases[name] for name in FAULTS if name in cases]
    rows = [_fault(case, who) for case in measured for who in case.who()]
    if rows:
        rows.append(_sum(measured))
    return [
        Table(
            "Does the report name the fault",
            "A fault is put into one rank of four, or beside the job, in a phase of it (before the ranks meet, in a loop of all_reduce, "
            "after it); seeds choose the rank, the moment and the form. It is the truth; judged is the first cause that the report names: "
            "code, rank and words. Not known: another cause, which was said to be only likely or possible, or `cause-unknown`. Wrong: "
            "another cause that was said to be certain, no report, or exit status 0. The last lines are jobs without a fault: there "
            "anything that is reported is wrong.",
            ("fault", "phases", "jobs", "right", "not known", "wrong", "said instead"),
            tuple(rows),
        )
    ]


def count(samples: Iterable[Sample]) -> dict[str, int]:
    """Cells by grade. One in which nothing could be done to the job has none."""
    grades = [sample.values.get("grade") for sample in samples]
    return {name: grades.count(name) for name in (RIGHT, NOT_KNOWN, WRONG)}


def _fault(case: Case, who: str) -> Row:
    mine = [sample for sample in case.samples if sample.who == who]
    counted = count(mine)
    phases = ", ".join(dict.fromkeys(str(sample.values["phase"]) for sample in mine))
    others = [
        str(sample.values.get("code") or "nothing")
        for sample in mine
        if sample.values.get("grade") in (NOT_KNOWN, WRONG)
    ]
    said = ", ".join(f"{code} {others.count(code)} x" for code in dict.fromkeys(others))
    return Row(
        (who, phases, str(sum(counted.values())), *map(str, counted.values()), said or "-"),
        (),
        case,
    )


def _sum(measured: list[Case]) -> Row:
    counted = count(sample for case in measured for sample in case.samples)
    cells = sum(counted.values())
    share = {name: 100 * number / cells if cells else 0.0 for name, number in counted.items()}
    bounds = (
        Bound(f">= {RIGHT_AT_LEAST:g} % right", share[RIGHT], RIGHT_AT_LEAST, at_least=True),
        Bound("0 % wrong", share[WRONG], 0),
    )
    words = [f"{number} ({share[name]:.1f} %)" for name, number in counted.items()]
    return Row(
        ("**all**", "", str(cells), *words, ""),
        bounds,
        replace(measured[-1], command="scripts/bench verdict"),
    )
