"""The verdict matrix: what counts as right, and a few of its cells for real."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.__main__ import CASES, verdict_plans
from bench.harness import JOBS
from bench.samples import Case, Sample
from bench.tables import text
from bench.verdict_faults import BROKEN, FAULTS, NAMES, RANKS, Fault, grade, named

from bench import figures, verdict, verdict_figures
from rallypoint.diagnosis.catalogue import CATALOGUE

from .test_tiny_run import has_torch

pytestmark = pytest.mark.usefixtures("torch_in_parts")

needs_torch = pytest.mark.skipif(not has_torch(), reason="torch is not installed")

IT = Fault("one", "raises", ("rank-raised",), says="ValueError")
RIGHT = {
    "code": "rank-raised",
    "ranks": [2],
    "headline": "rank 2 raised ValueError: x",
    "confidence": "certain",
}


@pytest.mark.parametrize(
    ("changed", "status", "expected"),
    [
        ({}, 1, "right"),
        ({"confidence": "likely"}, 1, "right"),
        ({"ranks": [1]}, 1, "wrong"),
        ({"ranks": [1], "confidence": "likely"}, 1, "not known"),
        ({"ranks": [1, 2]}, 1, "wrong"),
        ({"code": "rank-killed"}, 137, "wrong"),
        ({"code": "rank-killed", "confidence": "possible"}, 137, "not known"),
        ({"code": "cause-unknown"}, 1, "not known"),
        ({"headline": "rank 2 raised KeyError: 'x'"}, 1, "wrong"),
        ({}, 0, "wrong"),
        ({}, None, "wrong"),
    ],
)
def test_what_is_right(changed: dict[str, Any], status: int | None, expected: str) -> None:
    given, why = grade(IT, 2, 3, [{**RIGHT, **changed}, RIGHT], status)
    assert given == expected
    assert (why == "") == (expected == "right")


@pytest.mark.parametrize(
    ("reports", "status", "expected"),
    [([], 0, "right"), ([RIGHT], 0, "wrong"), ([], 1, "wrong"), ([], None, "wrong")],
)
def test_where_nothing_is_wrong_a_report_is(
    reports: list[dict[str, Any]], status: int | None, expected: str
) -> None:
    assert grade(Fault("none", "is well", ()), 2, 3, reports, status)[0] == expected


def test_a_job_that_says_nothing_is_wrong() -> None:
    assert grade(IT, 2, 3, [], 1) == ("wrong", "no report, exit status 1")


@pytest.mark.parametrize(
    ("blames", "ranks", "expected"),
    [
        ("with it", [0, 2], "right"),
        ("with it", [], "wrong"),
        ("one of two", [3], "right"),
        ("one of two", [2, 3], "right"),
        ("one of two", [1, 2], "wrong"),
        ("one of two", [], "wrong"),
        ("anybody", [], "right"),
    ],
)
def test_whom_it_names(blames: Any, ranks: list[int], expected: str) -> None:
    assert (
        grade(
            Fault("one", "raises", ("rank-raised",), blames=blames),
            2,
            3,
            [{**RIGHT, "ranks": ranks}],
            1,
        )[0]
        == expected
    )


def test_every_fault_expects_a_code_that_there_is_and_runs_a_script_that_there_is() -> None:
    faults = [named(name) for name in NAMES]
    assert len({*NAMES}) == len(NAMES) > 50
    unknown = {
        fault.name: [code for code in fault.codes if code not in CATALOGUE] for fault in faults
    }
    assert {name: codes for name, codes in unknown.items() if codes} == {}
    assert all(
        (JOBS / fault.script).exists() or fault.script == BROKEN or fault.codes == ("start-failed",)
        for fault in faults
    )
    assert all(fault.act in verdict.ACTS and fault.beside in verdict.BESIDE for fault in faults)
    assert not any("," in name for name in NAMES)  # --only takes them with commas between


def test_each_case_has_a_name_of_its_own() -> None:
    counted = Counter(name for cases in CASES.values() for name in cases) + Counter(NAMES)
    assert [name for name, count in counted.items() if count > 1] == []
    assert {*verdict_plans(2, None)} == {*FAULTS, *NAMES}


def test_a_seed_chooses_the_same_again_and_another_one_something_else() -> None:
    [first, second] = verdict.cells([IT], 2)[:2]
    assert (
        first.chance.random() == verdict.cells([IT], 1)[0].chance.random() != second.chance.random()
    )
    ranks = {tuple(cell.chance.sample(range(RANKS), 2)) for cell in verdict.cells([IT], 10)}
    assert {rank for rank, _ in ranks} == {*range(RANKS)}
    folders = [cell.folder for name in NAMES for cell in verdict.cells([named(name)], 10)]
    assert len({*folders}) == len(folders)


def test_the_table_has_the_sum_and_what_was_said_instead() -> None:
    grades = [
        ("right", "rank-raised", "start"),
        ("right", "rank-raised", "run"),
        ("wrong", "rank-killed", "run"),
        ("not known", None, "run"),
    ]
    samples = [
        Sample("exception", i, {"grade": given, "code": code, "phase": phase})
        for i, (given, code, phase) in enumerate(grades)
    ]
    samples.append(
        Sample("exception", 9, {"phase": "run"}, "it ended before anything was done to it")
    )
    case = Case(
        "verdict-program",
        "scripts/bench verdict --only verdict-program",
        "",
        {},
        (0.0, 0.0),
        samples,
    )
    [table] = verdict_figures.tables({case.name: case})
    [_, _, one, total] = text(table).splitlines()
    assert one.startswith(
        "| exception | start, run | 4 | 2 | 1 | 1 | rank-killed 1 x, nothing 1 x |"
    )
    assert total.startswith("| **all** |  | 4 | 2 (50.0 %) | 1 (25.0 %) | 1 (25.0 %) |")
    assert "| >= 98 % right; 0 % wrong | **no**; **no** |" in total
    assert [one.title for one in figures.tables({case.name: case})] == [table.title]


@pytest.mark.torch
@needs_torch
def test_some_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fault of each kind that is done in another way: from outside, beside the job, to the
    launcher. The test below has one that is done by the rank. Two ranks are enough for either.
    """
    monkeypatch.setattr(verdict, "RANKS", 2)
    asked = [
        ("SIGKILL from outside", "start"),
        ("addresses differ", "start"),
        ("template killed", "run"),
    ]
    samples = []
    for name, phase in asked:
        cell = verdict.Cell(named(name), phase, 1)  # type: ignore[arg-type]
        samples.append(verdict.judge(cell, tmp_path / name))
    assert [(sample.values["grade"], sample.note) for sample in samples] == [("right", "")] * len(
        asked
    )
    assert [sample.values["code"] for sample in samples] == [
        "rank-killed",
        "address-differs",
        "launcher-died",
    ]
    assert list(tmp_path.iterdir()) == []  # nothing is kept of what was right


@pytest.mark.torch
@needs_torch
def test_a_cell_that_is_not_right_keeps_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "RANKS", 2)
    mistaken = Fault("exception", "raises", ("rank-killed",), phases=("start",))
    [sample] = verdict.measure([mistaken], 1, jobs=1, keep=tmp_path)
    assert (sample.values["grade"], sample.values["code"]) == ("wrong", "rank-raised")
    kept = tmp_path / "exception-start-seed-0" / "output"
    assert f"see {kept}\n" in capsys.readouterr().err
    assert "error[rank-raised]: rank " in kept.read_text()
