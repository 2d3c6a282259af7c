"""The stack of one thread of a process that is alive, as faulthandler and py-spy write it."""

from __future__ import annotations

import sys

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.logs.block import Block
from rallypoint.diagnosis.pattern import Pattern

# py-spy names the thread. faulthandler does not before Python 3.15, and writes the main one last.
_HEAD = Pattern(
    r"^(?:Current thread|Thread) 0x[0-9a-f]+ .{0,40}\(most recent call first\):$"
    r'|^Thread \w+ \((?:active|idle)\b[^)]{0,40}\)(?:: "(?P<name>.{1,100})")?$'
)
_OF_PY_SPY = Pattern(r"^ {4}(?P<function>\S.{0,200}) \((?P<file>[^()]{1,400}):(?P<line>\d+)\)$")
_OF_PYTHON = Pattern(
    r'^  File "(?P<file>[^"]{1,400})", line (?P<line>\d+) in (?P<function>\S.{0,200})$'
)
# py-spy leaves out the folder in which a module was found.
_LIBRARIES = frozenset(
    (*sys.stdlib_module_names, "torch", "accelerate", "deepspeed", "lightning", "transformers")
)


class StackDump(Block):
    """Frames of one thread, the innermost first."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        found = _HEAD.match(text)
        self.is_main = found is not None and found["name"] in (None, "MainThread")
        self._frames: list[Frame] = []

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        return text.endswith((":", ")", '"')) and _HEAD.match(text) is not None

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        found = _OF_PYTHON.match(text) or _OF_PY_SPY.match(text)
        if found is None:
            self.done = True
            return False
        file = found["file"]
        if not file.startswith("/") and file.partition("/")[0].removesuffix(".py") in _LIBRARIES:
            file = f"/site-packages/{file}"
        self._frames.append(Frame(file, int(found["line"]), found["function"] or ""))
        self.last = number
        return True

    @property
    def place(self) -> str:
        """`train.py:42 in step (torch all_reduce)`; "" without frames."""
        return stacks.place(tuple(reversed(self._frames)))
