"""Last words of native code in a log: dumps, exceptions of C++, checks that failed."""

from __future__ import annotations

import re

from rallypoint.diagnosis.error_patterns import python, read_line
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import Sign
from rallypoint.diagnosis.logs.block import ANOTHERS, HEADER, KEPT, MESSAGE_LINES, Block, native
from rallypoint.diagnosis.pattern import Pattern

# LLVM's library has the message in the line that names the type.
_WHAT = Pattern(
    rf"^ *(?:what\(\):|libc\+\+abi(?:\.dylib)?: terminating .{{1,30}} exception of type \S+:|(?:/\S{{0,400}}/)?(?={python.GAVE_UP})) *(.*)$"
)

# glog's and absl's last words, and TensorFlow's
_CHECK = Pattern(
    r"^(?:F\d{4} .{0,60}?|\d{4}-\S+ \S+: F )(?P<place>[\w./-]+:\d+)\] (?P<words>Check failed: .+)$"
)

# faulthandler's; a code without a name is often handled
_FATAL = Pattern(r"Fatal Python error: |Windows fatal exception: (?!code )")
_CHECKS_TRACE = Pattern(r"^\*\*\* Check failure|^ +@ ")
_DUMP = Pattern(r'^(?:Current thread|Thread 0x|  File "|  \.\.\.|  <|Extension modules:)')


class Crash(Block):
    """A report of native code: faulthandler's dump of the stacks, or the last words of an exception
    of C++, or of a check that failed.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self.lines = [text]
        self._what = _WHAT.findall(text)
        self._dump = _FATAL.search(text) is not None
        if (found := _CHECK.match(text)) is not None:
            self._what = [f"{found['words']} ({found['place']})"]
        self._check = bool(self._what)  # one line tells all
        self._blank = 0

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        told = _FATAL.search(text) or text.lstrip().startswith("terminate called")
        told = bool(told) or re.match(python.GAVE_UP, text.lstrip()) is not None
        return told or ("Check failed: " in text and _CHECK.match(text) is not None)

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        self._blank += not text.strip()
        # MLIR, of which Triton makes use, shows what it compiled, and the program gets an exception.
        if "LLVM ERROR: " in self.lines[0] and text.startswith(("#", "module ")):
            self.ignored = self.done = True
            return False
        if self._dump and not text.strip():
            self.done = self._blank > 3
            return True
        what = _WHAT.match(text)
        if what is not None and not self._dump:
            self._what = [what[1]]
        elif self._torn(text):
            pass
        elif native(text) or HEADER in text or len(self.lines) > KEPT or not self._goes_on(text):
            self.done = True
            return False
        elif not self._dump and not self._check:
            self._what.append(text)
        self.lines.append(text)
        self.last = number
        return True

    def _torn(self, text: str) -> bool:
        """Tell whether the line is a piece of the first one, which several ranks wrote at once."""
        piece = text.endswith("'") or text.startswith("terminate called")
        return piece and not (self._dump or self._what) and len(self.lines) < MESSAGE_LINES

    def _goes_on(self, text: str) -> bool:
        if self._dump or self._check:
            return (_DUMP if self._dump else _CHECKS_TRACE).match(text) is not None
        room = 0 < len(self._what) < MESSAGE_LINES
        told = read_line.told_by(text)
        of_others = ANOTHERS.match(text) or (told and told[0] in (Sign.ENDED, Sign.INTERRUPTED))
        return room and bool(text.strip()) and not of_others

    def error(self) -> Raised | None:
        """Return the exception of C++; None for a dump."""
        if not self._what:
            return None
        kind = re.search(
            r"(?:instance of '|exception of type )([^':]{1,200}(?:::[^':]{1,200}){0,9})",
            self.lines[0],
        )
        words = "\n".join(self._what)
        return Raised(kind[1] if kind else "", words, (), "\n".join(self.lines))
