"""A command line taken apart, and the values of its options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rallypoint.cli import hints
from rallypoint.cli.commands import RUN, Command
from rallypoint.cli.error_exit import guarded
from rallypoint.cli.options import Option
from rallypoint.cli.output import width, write_out
from rallypoint.errors import UsageError

LONGEST_SHOWN = 200
"""Characters of a value in a message: two lines of a terminal tell which value it was."""


class Given(msgspec.Struct, frozen=True):
    """A value that was given, and where: for messages."""

    spelling: str  # as typed, or the variable's name
    text: str  # "" for a flag on the command line

    @property
    def typed(self) -> bool:
        return self.spelling.startswith("-")

    def __str__(self) -> str:
        if self.typed:
            return f"{self.spelling} {self.text}".rstrip()
        return f"{self.spelling}={self.text}"


class CommandLine(msgspec.Struct, frozen=True):
    """A command line taken apart, its values still text."""

    command: Command
    given: dict[str, tuple[Given, ...]]  # by key, oldest first; variables only when not typed
    words: tuple[str, ...]  # the program and its arguments, untouched; or the command's own words
    typed: tuple[str, ...] = ()  # the options, untouched: for a line that is to be typed again
    wrong: UsageError | None = None  # makes its values meaningless
    unknown: UsageError | None = None  # of an option or a word that is not understood

    @property
    def error_format(self) -> str:
        """As asked; known before any other value is read, so that every complaint can have it."""
        asked = self.given.get("error_format")
        return asked[-1].text if asked else "text"

    @property
    def wants_help(self) -> bool:
        return "help" in self.given

    def values(self) -> dict[str, Any]:
        """Return the value of every option, by key. Raises `UsageError`: `option-unknown`, or
        `usage`.
        """
        if self.wrong:
            raise self.wrong
        command = self.command
        found = {
            option.key: _value(option, self.given.get(option.key, ()), command)
            for option in command.options
        }
        if self.unknown:
            raise self.unknown
        if self.words and command.words == "none":
            raise hints.no_words(self.words, self.typed, command)
        return found


def take_apart(
    argv: Sequence[str], environ: Mapping[str, str], command: Command = RUN
) -> CommandLine:
    """Separate options from words, without reading any value. Raises nothing: `values` does."""
    given: dict[str, tuple[Given, ...]] = {}

    class Take(argparse.Action):
        def __call__(
            self, _parser: object, _namespace: object, value: Any, spelling: str | None = None
        ) -> None:
            before = given.get(self.dest, ())
            given[self.dest] = (*before, Given(spelling or "", value or ""))

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    short = _abbreviations(argv, command)
    for option in command.options:
        parser.add_argument(
            *option.spellings,
            *short.get(option.key, ()),
            dest=option.key,
            action=Take,
            nargs=None if option.metavar else 0,
            default=argparse.SUPPRESS,
        )
    is_program = command.words == "program"  # its arguments are its own, however they look
    parser.add_argument("words", nargs=argparse.REMAINDER if is_program else "*")
    parse = parser.parse_known_args if is_program else parser.parse_known_intermixed_args
    words: list[str] = []
    unread: list[str] = []
    wrong = unknown = None
    try:
        namespace, unread = parse(list(argv))
        words = list(namespace.words or ())
    except argparse.ArgumentError as error:
        wrong = hints.incomplete(error, argv, command)
    if is_program:
        own = list(argv[: len(argv) - len(words)])
        ended = words[:1] == ["--"] or own[-1:] == ["--"]  # what follows is a word
        words = words[1:] if words[:1] == ["--"] else words
        own = own[:-1] if own[-1:] == ["--"] else own
        suspects = [] if ended else words[:1]
        if typo := next(filter(hints.is_one_dashed, own), None):
            wrong = hints.unknown(typo, argv, command)
    else:
        own = [word for word in argv if word not in words]
        suspects = [] if "--" in argv or command.words == "message" else words
    if command.words == "message":
        words = [word for word in argv if word in (*words, *unread)]
        unread = [word for word in unread if hints.is_option(word, argv)]
    if unread:
        unknown = hints.unknown(unread[0], argv, command)
    elif not wrong:
        found = (hints.no_word(word, command) for word in suspects)
        unknown = next(filter(None, found), None)
    for option in command.options:
        for name in (option.variable, option.fallback):
            if name and name in environ and option.key not in given:
                given[option.key] = (Given(name, environ[name]),)
    return CommandLine(command, given, tuple(words), tuple(own), wrong, unknown)


def _abbreviations(argv: Sequence[str], command: Command) -> dict[str, set[str]]:
    """Return the words that begin a name of torchrun's and no other option's, by option: torchrun
    takes them, too. Ours have none: a new option would make one ambiguous.
    """
    known = {name: option for option in command.options for name in option.spellings}
    found: dict[str, set[str]] = {}
    for typed in {word.partition("=")[0] for word in argv if word.startswith("--")}:
        if typed in known or typed == "--":
            continue
        begun = {option.key: option for name, option in known.items() if name.startswith(typed)}
        for key, option in begun.items() if len(begun) == 1 else ():
            if option.fate != "ours" or option.variable.startswith("PET_"):
                found.setdefault(key, set()).add(typed)
    return found


def _value(option: Option, given: tuple[Given, ...], command: Command) -> Any:
    """Return the value of one option: the last one given counts, unless they add up."""
    if not given:
        return option.default if option.metavar else False
    if option.adds_up:
        return tuple(dict.fromkeys(part for one in given for part in _read(option, one, command)))
    return _read(option, given[-1], command)


def _read(option: Option, given: Given, command: Command) -> Any:
    if not option.metavar:
        if given.typed or given.text.removeprefix("-").isdecimal():
            return given.typed or bool(int(given.text))
        mend = (("unset it, or set", f"{given.spelling}=1"),)
        raise UsageError("usage", f"{given} is neither 0 nor 1", help=mend)
    try:
        return option.read(given.text)
    except ValueError as refusal:
        shown = str(given) if given.text else f"{given.spelling} ''"
        shown = f"{shown[:LONGEST_SHOWN]}..." if len(shown) > LONGEST_SHOWN else shown
        headline = f"{shown} {refusal}"
        if given.typed and given.text.endswith(".py"):  # the program stands in its place
            headline = f"{given.spelling} lacks its value, {option.metavar}: it got {given.text}"
        raise UsageError("usage", headline, help=hints.example(option, command)) from None


def invoke(command: Command, argv: Sequence[str], act: Callable[[CommandLine], int]) -> int:
    """Do `act` with the command line and return the exit status; answer --help, and print
    errors."""
    line = take_apart(argv, os.environ, command)

    def answer() -> int:
        if line.wants_help:
            from rallypoint.cli import help

            write_out(help.text(command, width(sys.stdout)))
            return 0
        return act(line)

    return guarded(answer, lambda: line.error_format)
