"""The tables of options: every row says enough, and holds what it says."""

from __future__ import annotations

import pytest

from rallypoint.cli import args, options, run_options
from rallypoint.launcher.plan import Options


def parse(line: str | list[str], **environ: str) -> Options:
    argv = line.split() if isinstance(line, str) else line
    return run_options.read(args.take_apart(argv, environ))


def test_keys_and_spellings_are_unique() -> None:
    assert len(options.BY_KEY) == len(options.RUN)
    assert len(options.BY_SPELLING) == sum(len(option.spellings) for option in options.RUN)


def test_every_row_says_enough() -> None:
    for option in options.RUN:
        assert option.sentence, option.names
        assert (option.fate == "accepted") == bool(option.why), option.names
        if option.metavar and option.read is not str:
            assert (
                option.example
                or not option.metavar[0].isalpha()
                or option.key.startswith("duplicate")
            ), option.names


def test_every_example_is_a_good_one() -> None:
    for option in options.RUN:
        if option.example:
            parse([*option.example.split(), "train.py"])


@pytest.mark.parametrize(
    "option", [o for o in options.RUN if any("-" in n[2:] for n in o.names)], ids=lambda o: o.key
)
def test_underscores_are_hyphens(option: options.Option) -> None:
    hyphened = next(name for name in option.names if "-" in name[2:])
    underscored = "--" + hyphened[2:].replace("-", "_")
    if not option.metavar:
        taken = args.take_apart([underscored, "x"], {})
        assert option.key in taken.given
    elif option.example:
        text = option.example.split()[1]
        assert (
            parse([underscored, text, "x.py"])
            == parse([hyphened, text, "x.py"])
            == parse([f"{underscored}={text}", "x.py"])
        )
