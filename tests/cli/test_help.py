"""`--help` of the commands that have a table of options."""

from __future__ import annotations

import pytest

from rallypoint.cli import commands, help, main, options


@pytest.mark.parametrize("name", [name for option in options.RUN for name in option.names])
def test_help_names_every_option(name: str) -> None:
    assert any(
        line.startswith("  -") and name in line.replace(",", " ").split()
        for line in help.text(commands.RUN, 92).splitlines()
    )


def test_help_is_readable_on_a_narrow_terminal() -> None:
    for columns, widest in (
        (92, 92),
        (80, 80),
        (50, 77),
    ):  # the lines of use, and options' names, are not parted
        for command in (
            commands.RUN,
            commands.SERVE,
            commands.STACKS,
            commands.DOCTOR,
            commands.SHOW,
        ):
            assert max(map(len, help.text(command, columns).splitlines())) <= widest


@pytest.mark.parametrize("columns", ["1", "19", "\u00b2", "0", "-5", "9" * 5000, "x"])
@pytest.mark.parametrize(
    "argv", [["run", "--help"], ["doctor", "--help"], ["explain", "--help"], ["run"]]
)
def test_any_width_will_do(
    argv: list[str],
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main.main(argv) == (0 if "--help" in argv else 2)
    out, err = capsys.readouterr()
    assert "internal-error" not in err
    assert "Traceback" not in err
    assert max(len(line) for line in (out + err).splitlines()) <= 100


def test_defaults_and_exit_statuses_are_told() -> None:
    told = " ".join(help.text(commands.RUN, 92).split())
    for words in (
        "SIGKILL (default: 30)",
        "either way (default: stop)",
        "within 10 s each (default: 0)",
        "exit status is 0 when every rank",
    ):
        assert words in told
    assert "here 0 (default" not in told  # the sentence has it
    assert "\0" not in told
