"""Which lines of a long traceback a report keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis.causes.short_traceback import abridged

TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules"
HEADER = "Traceback (most recent call last):"
DIRECT = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


def frame(file: str, line: int, function: str) -> list[str]:
    return [f'  File "{file}", line {line}, in {function}', f"    {function}_()"]


def own(line: int, function: str) -> list[str]:
    return frame("/home/ada/train.py", line, function)


def library(*lines: int) -> list[str]:
    return [words for line in lines for words in frame(f"{TORCH}/module.py", line, "_call_impl")]


CHAIN = [
    HEADER, *own(7, "prepare"), *own(4, "load"), "KeyError: 'x'", "", DIRECT, "",
    HEADER, *own(15, "<module>"), *own(11, "main"), *own(9, "prepare"), "ValueError: the configuration is not complete",
]  # fmt: skip
DEEP = [
    HEADER, *own(15, "<module>"), *own(13, "main"), *own(10, "step"), *library(1, 2), *own(8, "forward"), *library(3, 4, 5, 6),
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x3)",
]  # fmt: skip


@pytest.mark.parametrize("most", [8, 12])
def test_what_the_first_of_a_chain_said_and_where_is_kept(most: int) -> None:
    kept = abridged(CHAIN, "ValueError", most)
    assert len(kept) <= most
    assert kept[-1] == "ValueError: the configuration is not complete"
    assert "KeyError: 'x'" in kept
    assert {*own(9, "prepare")} <= {*kept}
    assert DIRECT in kept
    assert ({*own(4, "load")} <= {*kept}) == (most == 12)


@pytest.mark.parametrize("most", [8, 12])
def test_the_programs_own_frames_are_kept_before_those_of_libraries(most: int) -> None:
    kept = abridged(DEEP, "RuntimeError", most, " in rank1.log:1")
    assert len(kept) <= most
    assert kept[0] == HEADER
    assert kept[-2:] == ["... 8 more lines", DEEP[-1]]
    assert {*own(8, "forward"), *own(15, "<module>")} <= {*kept}
    assert ({*own(13, "main"), *own(10, "step")} <= {*kept}) == (most == 12)
    assert not any(TORCH in line for line in kept)
    assert sum("rank1.log:1" in line for line in kept) == 1


def test_where_a_library_raised_is_kept_when_there_is_room() -> None:
    kept = abridged(
        [HEADER, *own(15, "<module>"), *library(*range(20)), "RuntimeError: x"], "RuntimeError", 8
    )
    assert kept == [
        HEADER,
        *own(15, "<module>"),
        "... 38 more lines",
        *library(19),
        "RuntimeError: x",
    ]


def test_the_programs_last_frame_stands_before_those_of_a_compiled_library() -> None:
    """Of six frames of a program that read a bad file with pandas the report showed the first."""
    parser = [
        words
        for name in ("read_low_memory", "_read_rows", "_tokenize_rows", "raise_parser_error")
        for words in frame("pandas/_libs/parsers.pyx", 9, f"pandas._libs.parsers.{name}")
    ]
    calls = [words for line in range(1, 7) for words in own(line, f"call{line}")]
    kept = abridged([HEADER, *calls, *parser, "pandas.errors.ParserError: x"], "pandas.errors", 8)
    assert {*own(5, "call5"), *own(6, "call6")} <= {*kept}


def test_what_was_raised_while_the_cause_was_handled_gives_way() -> None:
    later = [
        "",
        DURING,
        "",
        HEADER,
        *own(30, "close"),
        *own(31, "close_all"),
        "AssertionError: no group",
    ]
    kept = abridged([*DEEP, *later], "RuntimeError", 12)
    assert DEEP[-1] in kept
    assert kept[-1] == later[-1]
    assert {*own(8, "forward")} <= {*kept}
    assert not {*own(31, "close_all")} & {*kept}


def test_a_message_of_many_lines_keeps_its_first_ones() -> None:
    mismatch = [f"\tsize mismatch for {name}.weight" for name in "abcdefgh"]
    lines = [
        HEADER,
        *own(9, "main"),
        *library(1),
        "RuntimeError: Error(s) in loading state_dict for Model:",
        *mismatch,
    ]
    kept = abridged(lines, "RuntimeError", 8, " in rank1.log:1")
    assert kept[-4:] == [*lines[5:8], "... 6 more lines"]
    assert abridged([HEADER, *own(9, "main"), *lines[5:]], "RuntimeError", 8)[-1] == kept[-1]
    native = [
        "Exception raised from wait at store.cpp:1 (most recent call first):",
        "frame #0: c10::Error",
        "frame #1: wait",
    ]
    assert abridged([*lines[:6], *native, "", "again"], "RuntimeError", 7)[-1] == lines[5]


def test_a_line_that_introduces_another_does_not_stand_alone() -> None:
    lines = [
        HEADER,
        *own(9, "main"),
        *library(1, 2, 3),
        "NcclError: failed",
        "first",
        "Last error:",
        "no memory",
        "",
        "bye",
    ]
    assert abridged(lines, "NcclError", 8)[-3:] == [
        "NcclError: failed",
        "first",
        "... 4 more lines",
    ]
    assert abridged(lines, "NcclError", 9)[-5:] == [
        "NcclError: failed",
        "first",
        "Last error:",
        "no memory",
        "... 2 more lines",
    ]


def test_what_is_short_stays_as_it_is() -> None:
    assert abridged(CHAIN, "ValueError", len(CHAIN)) == CHAIN


def test_of_something_else_than_frames_the_ends_are_kept() -> None:
    group = [
        "  + Exception Group Traceback (most recent call last):",
        *(f"  | line {i}" for i in range(40)),
        "  +----",
    ]
    kept = abridged(group, "ExceptionGroup", 8)
    assert (len(kept), kept[0], kept[-1]) == (8, group[0], group[-1])


@given(
    some.lists(
        some.sampled_from(
            [
                HEADER,
                DIRECT,
                DURING,
                "",
                "KeyError: 'x'",
                "Last error:",
                *own(4, "load"),
                *library(3),
            ]
        ),
        max_size=40,
    ),
    some.sampled_from(["KeyError", "Nothing"]),
    some.integers(8, 12),
)
def test_any_lines_give_so_many_of_their_own_in_their_order(
    lines: list[str], kind: str, most: int
) -> None:
    kept = abridged(lines, kind, most)
    assert len(kept) <= most
    rest = iter(lines)
    assert all(line in rest for line in kept if not line.startswith("... "))
