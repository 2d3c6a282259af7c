"""Tracebacks in a log that the library Rich drew in a box. Source: rich/traceback.py, versions 10 to
14.
"""

from __future__ import annotations

from rallypoint.diagnosis.error_patterns import failure_words, read_line
from rallypoint.diagnosis.logs.block import ANOTHERS, HEADER, MESSAGE_LINES
from rallypoint.diagnosis.logs.traceback_blocks import BECAUSE, DURING, Traceback
from rallypoint.diagnosis.pattern import Pattern

_HEAD = Pattern(r"^\s*╭─+ Traceback \(most recent call last\)? ?─+╮\s*$")
_PLACE = Pattern(r"(?P<file>\S.*):(?P<line>\d+) ?in ?(?P<function>[\w<>.]+)$")
_SOURCE = Pattern(r"(?P<here>❱ {0,9})?\d+ [│ ]*(?P<source>.*)$")
_EDGES = ("╭", "│", "╰")
_WIDEST = 100  # columns of a box; the message below is as wide as the terminal
_LONGEST = 1000  # characters of a place that are kept


class RichTraceback(Traceback):
    """A traceback in a box, its chain, and the message below, which Rich breaks between words at
    the width of the terminal. Its lines are read as those that Python writes.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, HEADER)
        self._margin = len(text) - len(text.lstrip())  # a logger's columns stand there
        # columns of the terminal, at least and at most
        self._narrow = self._wide = len(text.strip())
        self._place = ""  # the beginning of a place that is longer than the box
        self._in_box = True
        self._above = ""  # the line of the message that may go on
        self._broken = 0  # lines that went on

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        return "╭" in text and _HEAD.match(text) is not None

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        body = text[self._margin :].rstrip() if text[: self._margin].isspace() else text.rstrip()
        if self.begins(text):
            self._in_box, self._above = True, ""
            return super().take(number, HEADER)
        if not self._in_box and (self._ended or not body.startswith(_EDGES)):
            return self._below(number, body)
        if not body.startswith(_EDGES):
            return super().take(number, body)
        # A SyntaxError has its line in a second box.
        self._in_box, self._above = not body.startswith("╰"), ""
        if body.startswith("│"):
            self._inside_box(number, body.strip("│").strip(" "))
        self.last = number
        return True

    def _inside_box(self, number: int, body: str) -> None:
        source = _SOURCE.match(body)
        if not body or source is not None or body.startswith(_EDGES):
            self._place = ""
            if source is not None and source["here"]:
                super().take(number, f"    {source['source']}")
            return
        self._place = (self._place + body)[-_LONGEST:]
        if (place := _PLACE.match(self._place)) is not None:
            file, line, function = place.groups()
            super().take(number, f'  File "{file}", line {line}, in {function}')
            self._place = ""

    def _below(self, number: int, body: str) -> bool:
        """Take a line below the box: the rest of the message, or of the words between two
        exceptions, where its first word had no room in the line above.
        """
        above, self._above = self._above, ""
        word = body.partition(" ")[0]
        if self._wide == _WIDEST < len(above):
            self._narrow, self._wide = len(above), len(above) + len(word)
        fits = len(above) + 1 + len(word) <= self._narrow or len(above) > self._wide
        if above and word and not fits and self._broken < MESSAGE_LINES and not _begins(body):
            self._broken += 1
            self._above = body
            if (joint := f"{above} {body}") in (DURING, BECAUSE):
                return super().take(number, joint)
            # A word that is longer than the terminal is broken within.
            within = len(above) == self._narrow and " " not in above
            self.go_on(number, body if within else f" {body}")
            return True
        taken = super().take(number, body)
        if taken or DURING.startswith(body) or BECAUSE.startswith(body):
            self._above = body
        return taken


def _begins(body: str) -> bool:
    """Tell whether a line begins something of its own."""
    known = ANOTHERS.match(body) or body.startswith(_EDGES) or HEADER in body
    return bool(known or failure_words.exception(body) or read_line.told_by(body))
