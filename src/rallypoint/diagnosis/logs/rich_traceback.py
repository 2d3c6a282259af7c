"""Tracebacks in a log that the library Rich drew in a box. Source: rich/traceback.py, versions 10 to
14.
"""

from __future__ import annotations

import re

from rallypoint.diagnosis.error_patterns import read_line
from rallypoint.diagnosis.logs.block import ANOTHERS, HEADER
from rallypoint.diagnosis.logs.traceback_blocks import Traceback

_HEAD = re.compile(r"^\s*╭─+ Traceback \(most recent call last\) ─+╮\s*$")
_PLACE = re.compile(r"(?P<file>\S.*):(?P<line>\d+) ?in ?(?P<function>[\w<>.]+)$")
_SOURCE = re.compile(r"(?P<here>❱ {0,9})?\d+ [│ ]*(?P<source>.*)$")
_LOCALS = ("╭", "│", "╰")
_WIDEST = 100  # columns of a box; the message below is as wide as the terminal


class RichTraceback(Traceback):
    """A traceback in a box, its chain, and the message below, which Rich breaks between words at
    the width of the box. Its lines are read as those that Python writes.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, HEADER)
        self._margin = len(text) - len(text.lstrip())  # a logger's columns stand there
        self._width = len(text.strip())
        self._place = ""  # the beginning of a place that is longer than the box
        self._in_box = True
        self._above = ""  # the line of the message that may go on

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
        if not self._in_box:
            return self._below(number, body)
        if body.startswith("╰"):
            self._in_box, self._above = False, ""
        elif body.startswith("│"):
            self._inside_box(number, body.strip("│").strip(" "))
        else:
            return super().take(number, body)
        self.last = number
        return True

    def _inside_box(self, number: int, body: str) -> None:
        source = _SOURCE.match(body)
        if not body or source is not None or body.startswith(_LOCALS):
            self._place = ""
            if source is not None and source["here"]:
                super().take(number, f"    {source['source']}")
            return
        self._place += body
        if (place := _PLACE.match(self._place)) is not None:
            file, line, function = place.groups()
            super().take(number, f'  File "{file}", line {line}, in {function}')
            self._place = ""

    def _below(self, number: int, body: str) -> bool:
        """Take a line below the box: the rest of the message where its first word had no room in
        the line above.
        """
        above, self._above = self._above, body
        word = body.partition(" ")[0]
        width = max(self._width, len(above)) if self._width == _WIDEST else self._width
        wrapped = above and word and len(above) <= width < len(above) + 1 + len(word)
        if wrapped and not ANOTHERS.match(body) and read_line.told_by(body) is None:
            # A word that is longer than the box is broken within.
            self.go_on(number, body if len(above) == width and " " not in above else f" {body}")
            return True
        return super().take(number, body)
