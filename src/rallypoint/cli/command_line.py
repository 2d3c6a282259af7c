"""A command line taken apart, its values still text."""

from __future__ import annotations

import msgspec

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

    given: dict[str, tuple[Given, ...]]  # by key, oldest first; from the environment only when not typed
    words: tuple[str, ...]  # the program and its arguments, untouched
    typed: tuple[str, ...] = ()  # what stood before it, untouched: for a line that is to be typed again
    refusal: UsageError | None = None  # what could not be taken apart; `read` raises it, when the wanted error format is known

    @property
    def error_format(self) -> str:
        """As asked; known before any other value is read, so that every complaint can have it."""
        asked = self.given.get("error_format")
        return asked[-1].text if asked else "text"

    @property
    def wants_help(self) -> bool:
        return "help" in self.given
