"""The format, and that nothing a program prints can spoil it."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import render
from rallypoint.diagnosis.report import Help, Moment, Report, Said
from rallypoint.errors import EnvironmentProblem, InternalError, UsageError

FULL = Report(
    code="rank-out-of-memory",
    headline="rank 2 on node07 was killed by the kernel for using too much memory",
    where="step 1840, all_reduce #5520, train.py:88 in train_step (pid 24316, gpu 2)",
    why="the cgroup reached its 64.0 GiB limit while 4 ranks held 15.1, 15.2, 18.9 and 14.7 GiB",
    evidence=(
        "memory.events oom_kill went from 0 to 1",
        "rank 2 died of SIGKILL and this launcher had sent none",
    ),
    confidence="likely",
    then="ranks 0-1 and 3-15 lost their connection to rank 2 and were stopped; they are not at fault",
    timeline=(
        Moment(2811.402, "rank 2", "18.9 GiB resident"),
        Moment(2812.01, "launcher", "stopped the other 15 ranks"),
        Moment(3, "x", "y"),
    ),
    said=(Said("rank 2", ("a", "", "    b")),),
    help=(Help("lower what each rank keeps", "DataLoader(...)"), Help("or ask for more memory")),
    logs=("runs/rank2.log:41822", "runs/events.jsonl"),
)

EXPECTED = """\
error[rank-out-of-memory]: rank 2 on node07 was killed by the kernel for using too much memory

  where  step 1840, all_reduce #5520, train.py:88 in train_step (pid 24316, gpu 2)
  why    the cgroup reached its 64.0 GiB limit while 4 ranks held 15.1, 15.2, 18.9 and 14.7
         GiB (likely)
         - memory.events oom_kill went from 0 to 1
         - rank 2 died of SIGKILL and this launcher had sent none
  then   ranks 0-1 and 3-15 lost their connection to rank 2 and were stopped; they are not
         at fault

  +2811.402s  rank 2    18.9 GiB resident
  +2812.010s  launcher  stopped the other 15 ranks
     +3.000s  x         y

  rank 2 said:
    | a
    |
    |     b

  help   lower what each rank keeps:
             DataLoader(...)
  help   or ask for more memory

  logs   runs/rank2.log:41822
         runs/events.jsonl
  more   rallypoint explain rank-out-of-memory"""


def test_the_whole_format() -> None:
    assert render.text(FULL) == EXPECTED


def test_several_causes_are_counted_first() -> None:
    told = render.text([FULL, Report("usage", "x")])
    assert told.startswith("2 causes\n\nerror[rank-out-of-memory]")
    assert told.endswith("error[usage]: x\n\n  more   rallypoint explain usage")


def test_colour_adds_nothing_but_colour() -> None:
    coloured = render.text(FULL, color=True)
    assert coloured.startswith("\x1b[1;31merror[rank-out-of-memory]:\x1b[0m rank 2")
    assert "\n".join(render.plain(line) for line in coloured.splitlines()) == EXPECTED


def test_a_warning_and_a_wish_are_called_no_errors() -> None:
    assert render.text(Report("spawn-inside-run", "x")).startswith("warning[spawn-inside-run]: x")
    assert render.text(Report("interrupted", "x")).startswith("stopped[interrupted]: x")


def test_what_may_be_copied_is_never_broken() -> None:
    path = "/very" * 60
    told = render.text(
        Report("usage", "x" * 300, where=path, help=(Help("type", "run " + path),), logs=(path,)),
        width=60,
    )
    assert "x" * 300 in told
    assert told.count(path) == 3


def test_json_is_one_object_on_one_line() -> None:
    told = render.json([FULL, Report("usage", "x", exit_status=2)])
    assert "\n" not in told
    read = json.loads(told)
    assert read["exit_status"] == 1
    assert [report["code"] for report in read["reports"]] == ["rank-out-of-memory", "usage"]
    assert read["reports"][0]["timeline"][0] == {
        "at": 2811.402,
        "who": "rank 2",
        "what": "18.9 GiB resident",
    }


def test_control_sequences_are_taken_out() -> None:
    assert render.plain("\x1b[31mred\x1b[0m \x1b]0;title\x07end") == "red end"
    assert render.plain("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\") == "link"
    assert render.plain(" 10%\r 50%\r100%\r") == "100%"
    assert render.plain("a\x00b\x08c\u202ed\x9b2Je") == "a b c de"
    assert render.plain("tab\tstays, ümläut 漢字 too") == "tab\tstays, ümläut 漢字 too"


def test_an_exception_of_ours() -> None:
    error = UsageError(
        "option-unknown", "no option --foo", why=("a", "b"), help=(("use", "--bar"),)
    )
    assert (
        render.text(render.report_of(error))
        == """\
error[option-unknown]: no option --foo

  why    a
         - b

  help   use:
             --bar

  more   rallypoint explain option-unknown"""
    )
    assert [
        render.report_of(kind("x", "y")).exit_status
        for kind in (UsageError, EnvironmentProblem, InternalError)
    ] == [2, 1, 70]


@pytest.mark.parametrize("width", range(30, 120))
def test_a_number_stays_with_its_noun_wherever_the_line_breaks(width: int) -> None:
    words = "python train.py (pid 4711, user ada) is connected from rank 12, errno 111, on port 29500 of node 3"
    lines = render.wrapped(words, width)
    assert " ".join(lines) == words
    for pair in ("pid 4711", "rank 12", "errno 111", "port 29500", "node 3"):
        assert any(pair in line for line in lines), lines


anything = some.text(max_size=60) | some.text(alphabet="\x1b[]0;m\r\n\x07 ab\x9b", max_size=40)
lines = some.lists(anything, max_size=3).map(tuple)
reports = some.builds(
    Report,
    anything,
    anything,
    anything,
    anything,
    some.sampled_from(["certain", "likely", "possible"]),
    lines,
    anything,
    some.lists(some.builds(Moment, some.floats(0, 1e6), anything, anything), max_size=2).map(tuple),
    some.lists(some.builds(Said, anything, lines), max_size=2).map(tuple),
    some.lists(some.builds(Help, anything, anything), max_size=2).map(tuple),
    lines,
)


@given(reports, some.integers(0, 200))
def test_no_text_breaks_the_format(report: Report, width: int) -> None:
    told = render.text(report, width=width)
    assert not any(
        unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t" for sign in told
    )
    assert told.encode()
    assert all(not line or line.startswith(("error[", "  ")) for line in told.split("\n"))
    assert json.loads(render.json(report))["reports"][0]["exit_status"] == 1
