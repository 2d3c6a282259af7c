"""Where our options end, and the program's words begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli import args, options, run_options
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options


def parse(line: str | list[str], **environ: str) -> Options:
    argv = line.split() if isinstance(line, str) else line
    return run_options.read(args.take_apart(argv, environ))


@pytest.mark.parametrize(
    "rest",
    [
        [],
        ["--"],
        ["--", "x", "--"],
        ["--help"],
        ["-h"],
        ["-n", "8"],
        ["--nproc", "8"],
        ["--nproc-per-node=two"],
        ["--no-such"],
        ["--dry-run"],
        ["-1"],
        [""],
        ["a b", "--x=y z"],
        ["--module", "-m"],
    ],
)
@pytest.mark.parametrize("before", [[], ["-n", "2"], ["-n2", "--fresh"], ["--"], ["-n", "2", "--"]])
def test_words_after_the_program_are_untouched(before: list[str], rest: list[str]) -> None:
    wanted = parse([*before, "train.py", *rest])
    assert (wanted.program.target, list(wanted.program.args)) == ("train.py", rest)
    assert wanted.nproc == (2 if "2" in "".join(before) else None)
    assert not wanted.dry_run


@given(
    st.lists(
        st.text(max_size=6)
        | st.sampled_from(["--", "-n", "--help", "--fresh", "-m", "--nproc=3", "-x"])
    )
)
def test_any_words_after_the_program_are_untouched(rest: list[str]) -> None:
    assert list(parse(["-n", "3", "train.py", *rest]).program.args) == rest


@given(
    st.lists(
        st.text(max_size=8) | st.sampled_from([*options.BY_SPELLING, "4", "train.py", "--", "0:1"]),
        max_size=5,
    )
)
def test_any_command_line_is_read_or_refused(argv: list[str]) -> None:
    line = args.take_apart(argv, {})
    try:
        run_options.read(line)
    except UsageError as refusal:
        error = refusal
    else:
        return
    assert error.headline
    assert error.help


def test_help_is_ours_before_the_program_only() -> None:
    assert args.take_apart(["-n", "2", "--help"], {}).wants_help
    assert args.take_apart(["-h", "train.py"], {}).wants_help
    assert not args.take_apart(["train.py", "--help"], {}).wants_help
