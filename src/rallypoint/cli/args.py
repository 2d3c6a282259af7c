"""A command line taken apart, and the values of its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from rallypoint.cli import hints
from rallypoint.cli.commands import RUN, Command
from rallypoint.cli.error_exit import guarded
from rallypoint.cli.options import BY_KEY, Option
from rallypoint.cli.output import help_width, write_out
from rallypoint.errors import UsageError


class Given(msgspec.Struct, frozen=True):
    """A value that was given, and where: for messages."""

    spelling: str  # as typed, or the variable's name
    text: str  # "" for a flag on the command line

    def __str__(self) -> str:
        if self.spelling.startswith("-"):
            return f"{self.spelling} {self.text}" if self.text else self.spelling
        return f"{self.spelling}={self.text}"


class CommandLine(msgspec.Struct, frozen=True):
    """A command line taken apart, its values still text."""

    given: dict[
        str, tuple[Given, ...]
    ]  # by key, oldest first; from the environment only when not typed
    words: tuple[str, ...]  # the program and its arguments, untouched
    typed: tuple[
        str, ...
    ] = ()  # what stood before it, untouched: for a line that is to be typed again
    refusal: UsageError | None = (
        # what could not be taken apart; `read` raises it, when the wanted error format is known
        None
    )

    @property
    def error_format(self) -> str:
        """As asked; known before any other value is read, so that every complaint can have it."""
        asked = self.given.get("error_format")
        return asked[-1].text if asked else "text"

    @property
    def wants_help(self) -> bool:
        return "help" in self.given


def take_apart(
    argv: Sequence[str], environ: Mapping[str, str], command: Command = RUN
) -> CommandLine:
    """Separate options from words, without reading any value. Raises nothing: `values` does."""
    if command.words == "own":
        return _take_apart_anywhere(argv, environ, command)
    return _take_apart(argv, environ, command)


def _take_apart(
    argv: Sequence[str], environ: Mapping[str, str], command: Command, before: Sequence[str] = ()
) -> CommandLine:
    """Options end at the first word. `before`: words that stand in front of these, for a line to
    type again.
    """
    typed: dict[str, tuple[Given, ...]] = {}

    class Take(argparse.Action):
        def __call__(
            self, _parser: object, _namespace: object, value: Any, spelling: str | None = None
        ) -> None:
            given = Given(spelling=spelling or "", text=value if isinstance(value, str) else "")
            typed[self.dest] = (*typed.get(self.dest, ()), given)

    parser = argparse.ArgumentParser(
        prog=f"rallypoint {command.name}", add_help=False, allow_abbrev=False, exit_on_error=False
    )
    short = _abbreviations(command)
    for option in command.options:
        parser.add_argument(
            *option.spellings,
            *short.get(option.key, ()),
            dest=option.key,
            action=Take,
            nargs=None if option.metavar else 0,
            default=argparse.SUPPRESS,
        )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    words: list[str] = []
    typed_words: list[str] = []
    refusal = None
    try:
        namespace, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        spellings = (error.argument_name or "").split("/")
        typed_so = (
            spelling
            for word in argv
            for spelling in spellings
            if word.partition("=")[0] == spelling
        )
        refusal = hints.incomplete(next(typed_so, spellings[0]), spellings[0], command)
    else:
        words = namespace.words[1:] if namespace.words[:1] == ["--"] else namespace.words
        typed_words = list(argv[: len(argv) - len(words)])
        told_to_end = typed_words[-1:] == ["--"]  # what follows is a word, however it looks
        typed_words = typed_words[:-1] if told_to_end else typed_words
        unfit = unknown or [
            word for word in typed_words if command is RUN and hints.is_one_dashed(word)
        ]
        refusal = _swallowed(typed, argv) if command is RUN else None
        if refusal is None and unfit:
            refusal = hints.unknown(unfit[0], (*before, *argv), command)
        if refusal is None and words and not told_to_end:
            refusal = hints.no_word(words[0], (*before, *argv), command)
    given = dict(typed)
    for option in command.options:
        variable = next(
            (name for name in (option.variable, option.fallback) if name and name in environ), ""
        )
        if variable and option.key not in given:
            given[option.key] = (Given(spelling=variable, text=environ[variable]),)
    return CommandLine(given=given, words=tuple(words), typed=tuple(typed_words), refusal=refusal)


def _swallowed(typed: Mapping[str, tuple[Given, ...]], argv: Sequence[str]) -> UsageError | None:
    found = (
        hints.swallowed(BY_KEY[key], given[-1].spelling, given[-1].text, argv)
        for key, given in typed.items()
    )
    return next(filter(None, found), None)


def _abbreviations(command: Command) -> dict[str, list[str]]:
    """By option: the beginnings of torchrun's names that begin no other option's, which torchrun's
    parser takes, too.
    """
    if command is not RUN:
        return {}
    begun: dict[str, set[str]] = {}
    for option in command.options:
        for name in option.spellings:
            for end in range(len("--x"), len(name)):
                begun.setdefault(name[:end], set()).add(option.key)
    found: dict[str, list[str]] = {}
    for beginning, keys in begun.items():
        key = next(iter(keys))
        if (
            len(keys) == 1
            and BY_KEY[key].fate != "ours"
            and hints.hyphened(beginning) not in (*hints.SYNONYMS, *hints.NOT_HERE)
        ):
            found.setdefault(key, []).append(beginning)
    found["nproc_per_node"] = [
        name for name, keys in begun.items() if keys == {"nproc_per_node"}
    ]  # torchrun's long name, our short one
    return found


def _take_apart_anywhere(
    argv: Sequence[str], environ: Mapping[str, str], command: Command
) -> CommandLine:
    """The words are the command's own, and no program's arguments: options may stand before them
    and after.
    """
    line, words = _take_apart(argv, environ, command), []
    while line.words and line.refusal is None:
        words.append(line.words[0])
        rest = _take_apart(
            line.words[1:], environ, command, argv[: len(argv) - len(line.words) + 1]
        )
        line = CommandLine(
            given={**line.given, **rest.given}, words=rest.words, refusal=rest.refusal
        )
    return CommandLine(given=line.given, words=tuple(words), refusal=line.refusal)


def values(line: CommandLine, command: Command) -> dict[str, Any]:
    """The value of every option, by key. Raises `UsageError`: `option-unknown`, or `usage`."""
    if line.refusal:
        raise line.refusal
    if line.words and command.words == "none":
        raise hints.no_words(line.words, line.typed, command)
    return {
        option.key: _value(option, line.given.get(option.key, ()), command)
        for option in command.options
    }


def _value(option: Option, given: tuple[Given, ...], command: Command) -> Any:
    """The value of one option: the last one given counts, except that modules to preload add up."""
    if not given:
        return option.default if option.metavar else False
    if option.adds_up:
        return tuple(dict.fromkeys(_checked(option, one, command) for one in given))
    if option.key == "preload":
        return tuple(
            dict.fromkeys(module for one in given for module in _checked(option, one, command))
        )
    return _checked(option, given[-1], command)


def _checked(option: Option, given: Given, command: Command) -> Any:
    if not option.metavar:
        if given.spelling.startswith("-"):
            return True
        try:
            return bool(int(given.text))
        except ValueError:
            raise UsageError(
                "usage",
                f"{given} is neither 0 nor 1",
                help=(("unset it, or set", f"{given.spelling}=1"),),
            ) from None
    try:
        return option.read(given.text)
    except ValueError as refusal:
        shown = _shortened(str(given)) if given.text else f"{given.spelling} ''"
        raise UsageError(
            "usage", f"{shown} {refusal}", help=hints.example(option, command)
        ) from None


LONGEST_SHOWN = (
    200  # characters of what was given, in a message: two lines of a terminal tell which it was
)


def _shortened(text: str) -> str:
    """A text for the middle of a sentence."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def invoke(
    command: Command,
    argv: Sequence[str],
    act: Callable[[CommandLine], int],
    environ: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Do `act` with the command line and return the exit status; answer --help, and print errors.

    `environ`: where variables may stand for options.
    """
    line = take_apart(argv, environ, command)

    def answer() -> int:
        if line.wants_help:
            from rallypoint.cli import help

            write_out(help.text(command, help_width()))
            return 0
        return act(line)

    return guarded(answer, lambda: line.error_format)
