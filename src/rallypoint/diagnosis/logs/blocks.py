"""Blocks of lines that tell one thing together: tracebacks with their chains and long messages,
dumps of crashes, the launcher's own summary.

Each takes one line after the other and says whether it belongs to it. Ranks that share a terminal
write into each other's tracebacks: what is no part of one is left to the others, and two headers
wait for two last lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from math import nan
from signal import SIGTERM

import msgspec

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.error_patterns import schedulers
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.log_events import (
    Collective,
    End,
    Place,
    Sighting,
    Sign,
    Speaker,
    of_rank,
)
from rallypoint.diagnosis.raised import joined

HEADER = "Traceback (most recent call last):"
# lines after an exception's last line in which its message, or the next of a chain, may still come
TAIL = 16
STRAY = 40  # lines of others that may stand inside a traceback before it is taken for cut off
KEPT = 400  # lines of one traceback; of a deeper one the middle is left out
MESSAGE_LINES = 14  # NCCL's and DDP's messages have up to ten
WORDS = 400  # characters of one line that are kept
# Numbers of signals that MPICH gives as an exit code.
FATAL_SIGNALS = frozenset((4, 6, 7, 8, 9, 11))
GRACE = 30  # seconds after its SIGTERM until torchrun sends SIGKILL

_DURING = "During handling of the above exception, another exception occurred:"
_BECAUSE = "The above exception was the direct cause of the following exception:"
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in ?(?P<function>\S*))?$')
_DEEPER = re.compile(r'^( {3,40})File "[^"]*", line \d+')
_TYPED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_SURE = re.compile(
    r"(?:Error|Exception(?:Group)?|Interrupt|Exit|Warning|Timeout|Failure|Fault|Iteration|Empty|Full|Abort\w{0,20})$"
)
_LONG = re.compile(
    r"NCCL [Ee]rror|HCCL error|error: Hccl|NPU (?:function )?error[,:]|waiting for$"
    r"|CUDA error|finished reduction|killed by signal|Failed to initialize NVML|You requested gpus?: "
)
_RAISING = re.compile(r"raise (?P<type>[A-Z][\w.]*)\([rf]?[\"'](?P<message>[^{]*)")
_RAY_TASK = re.compile(r"ray\.exceptions\.RayTaskError\(((?!Dist)\w+)\): ")
_CARETS = re.compile(r"^[\s~^]+$")
_ANOTHERS = re.compile(
    r"^(?:\[?[EWIF]\d{3,4} |\[\d{4}-|\[[EWI] |(?:INFO|WARNING|ERROR|CRITICAL)[: ]|Exception raised from|frame #\d+|[-=*]{20})"
)
NOT_COMPILED = (
    "SyntaxError",
    "IndentationError",
    "TabError",
)  # which have no header, but their place before them
# What a program catches to go another way: that this failed, too, is the cause. A group that is
# closed after a failure is no other way.
_TRIED = ("ImportError", "ModuleNotFoundError")
_CLOSING = re.compile(
    r"Process group cannot be None|Default process group (?:has not been|is not) initialized"
)
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with the following error:")
# torch.distributed.checkpoint gathers what ranks raised into one exception, which all of them
# raise: "ranks:dict_keys([0, 3])", and below it the traceback of each.
_GATHERED = re.compile(r"^CheckpointException ranks:dict_keys\(\[(?P<ranks>[\d, ]+)\]\)")
_OF_RANK = re.compile(r"\(RANK (\d+)\)$")
_WHAT = re.compile(r"^ *what\(\): *(.*)$")
# glog's and absl's last words, and TensorFlow's
_CHECK = re.compile(
    r"^(?:F\d{4} .{0,60}?|\d{4}-\S+ \S+: F )(?P<place>[\w./-]+:\d+)\] (?P<words>Check failed: .+)$"
)
_CHECKS_TRACE = re.compile(r"^\*\*\* Check failure|^ +@ ")
_DUMP = re.compile(r'^(?:Current thread|Thread 0x|  File "|  \.\.\.|  <|Extension modules:)')
_NATIVE = re.compile(r"^frame #\d+|^Exception raised from |^<omitting python frames>")


def _goes_on(message: list[str]) -> bool:
    """Tell whether the next line may belong to a message: what ends with a colon has one more."""
    most = MESSAGE_LINES if _LONG.search(message[0]) else 1 + message[0].rstrip().endswith(":")
    return len(message) < most


def spawned(text: str) -> int:
    """Read the rank of the traceback that mp.spawn shows below a line; -1 for other lines."""
    found = _SPAWNED.match(text)
    return int(found[1]) if found is not None else -1


def native(text: str) -> bool:
    """Tell whether a line is part of a C++ trace, which says where torch noticed a failure, and
    never why.
    """
    return bool(_NATIVE.match(text))


def _path(file: str) -> str:
    """A path of Windows' with the slashes that everything here looks for, and that Windows takes as
    well.
    """
    return file.replace("\\", "/") if re.match(r"[A-Za-z]:\\", file) else file


def headless(text: str) -> bool:
    """Tell whether a line is a frame of a traceback whose first lines were not pasted."""
    return _FRAME.match("  " + text.lstrip()) is not None and len(text) - len(text.lstrip()) <= 4


class Block:
    """Lines of one process that tell one thing together."""

    rank = -1  # that the words name, as mp.spawn's do
    ranks: tuple[int, ...] = ()  # that the words count
    stray = 0  # lines of others that stand inside
    ignored = False  # Python says that it is: of `__del__`, or while the interpreter closes down

    def __init__(self, number: int) -> None:
        self.start = self.last = number
        self.done = False

    def error(self) -> Raised | None:
        """Return the exception that the block tells of; None for none."""
        return None

    def errors(self) -> list[Raised]:
        """Return the exceptions that the block tells of."""
        error = self.error()
        return [error] if error is not None else []


class Traceback(Block):
    """A traceback, with those that it was raised from."""

    def __init__(self, number: int, text: str, *, headless: bool = False) -> None:
        super().__init__(number)
        # its first lines were not pasted: the line that names the exception is where it begins then
        self._headless = headless
        self.begun_by: Raised | None = None  # the exception that began it, of those that are read
        # ranks that an exception counts, and what each of them raised, where that is shown
        self._gathered: dict[int, tuple[str, str] | None] = {}
        self._of = -1  # the rank among these whose traceback is read now
        # how the exception that is read now, and the next one, hang together with the one before
        self._link = self._joint = ""
        self._begin(text)

    def _begin(self, text: str) -> None:
        head = text[: text.find("Traceback")]
        self._indent = len(head) if head.isspace() else 0
        self._frames: list[Frame] = []
        self._lines = [text[len(head) :]]
        # NumPy's notice shows where it was imported, and no exception
        self._of_numpy = f'{HEADER}  File "' in text
        self.stray = self._tail = self._blank = 0
        self._ended = False
        self._doubtful: tuple[str, str, int] | None = None
        self._kind, self._message = "", [""]
        self._task = ""  # the type of what a task of Ray's raised; its own traceback is below

    @classmethod
    def of_gathered(cls, number: int, kind: str, message: str) -> Traceback | None:
        """Make one whose own lines are missing, and that begins with what
        torch.distributed.checkpoint gathered; None for other messages.
        """
        if _GATHERED.match(message) is None:
            return None
        block = cls(number, HEADER)
        block._end(kind, message, number)
        block._keep(f"{kind}: {message}")
        return block

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to this traceback."""
        if self._of_numpy:
            self.done = not text.startswith("  ")
            return not self.done
        if not self._frames and not self._indent and (deeper := _DEEPER.match(text)) is not None:
            self._indent = len(deeper[1]) - 2  # of a table or a page that was indented as a whole
        body = text[self._indent :] if text[: self._indent].isspace() else text
        taken = self._after(number, body) if self._ended else self._inside(number, body)
        if taken:
            self.last = number
        return taken

    def _inside(self, number: int, body: str) -> bool:
        if MpiExit.begins(body):  # the launcher raised what it tells
            self.done = True
            return False
        frame = _FRAME.match(body) or _FRAME.match(f"  {body}")  # a page may drop the indentation
        if frame is not None:
            self._doubtful = None
            new = Frame(_path(frame["file"]), int(frame["line"]), frame["function"] or "")
            if new not in self._frames[-2:]:  # another rank's, or a recursion
                self._frames.append(new)
        elif HEADER in body:  # another rank's, without a prefix
            return True
        elif self._doubtful is not None and not body.startswith("    "):
            self._end(*self._doubtful)
            return self._after(number, body)
        elif body.startswith("    "):
            self._doubtful = None
            if self._frames and not self._frames[-1].source and not _CARETS.match(body):
                last = self._frames[-1]
                self._frames[-1] = Frame(last.file, last.line, last.function, body.strip())
        elif not body.strip():
            return True
        elif not body.startswith(" "):
            return self._unindented(number, body)
        self._keep(body)
        return True

    def _unindented(self, number: int, body: str) -> bool:
        typed = _TYPED.match(body)
        name = typed["type"].rpartition(".")[2] if typed else ""
        if (
            typed
            and self._frames
            and (
                _SURE.search(name)
                or ("." in typed["type"] and not typed["type"].startswith("self."))
            )
        ):
            self._end(typed["type"], typed["message"] or "", number)
        elif (
            typed
            and self._frames
            and name[:1].isupper()
            and not (name.isupper() or schedulers.told_by(body))
        ):
            # "Epoch: 3" of another rank looks like one, too; a level ("ERROR") is none, nor is
            # a shell's "Killed".
            self._doubtful = (typed["type"], typed["message"] or "", number)
        elif classify.recognised(body):
            self._end("", body, number)
        elif (task := _RAY_TASK.match(body)) is not None:
            self._task = task[1]
        else:
            self.stray += not native(body)
            self.done = self.stray > STRAY
            return False
        self._keep(body)
        return True

    def _end(self, kind: str, message: str, number: int) -> None:
        self._kind, self._message, self._ended, self._doubtful = kind, [message], True, None
        self.last = number
        if self._headless and not kind.endswith(NOT_COMPILED):
            self.start = number
        self._headless = False
        if (gathered := _GATHERED.match(message)) is not None:
            self._gathered = {int(rank): None for rank in re.findall(r"\d+", gathered["ranks"])}
        elif self._of in self._gathered:
            self._gathered[self._of] = (kind, message)
        # Those that show the same error as the first one, or none.
        shown = next(filter(None, self._gathered.values()), None)
        same = (rank for rank, one in self._gathered.items() if one in (shown, None))
        self.ranks = tuple(sorted(same))

    def _after(self, number: int, body: str) -> bool:
        self._tail += 1
        self.done = self._tail > TAIL
        if body in (_DURING, _BECAUSE):
            self._joint = "during" if body == _DURING else "because"
            return True
        if (rank := spawned(body)) >= 0:
            self.rank, self._joint = rank, "inside"
            return True
        if HEADER in body:
            inner = "Original Traceback" in body
            of_rank = _OF_RANK.search(body) if self._gathered else None
            alone = not self._joint and not inner and of_rank is None
            if alone or GroupTraceback.HEAD.search(body.partition(HEADER)[0]):
                self.ignored |= body.startswith("Original ")  # a group of a DataLoader's worker
                self.done = True
                return False
            self._choose()
            self._link, self._joint = "inside" if inner else self._joint, ""
            if of_rank is not None:
                self._link, self._of = "gathered" if self._of >= 0 else "inside", int(of_rank[1])
            self._begin(body)
            return True
        if not body.strip():
            self._blank += 1
            return self._blank <= 3
        # A message that begins on the line after its type: indented, or in words that are known.
        below = not self._message[0] and (
            body.startswith("    ") or (self._tail == 1 and classify.recognised(body))
        )
        room = not self._blank and len(self._message) < MESSAGE_LINES
        long = room and (below or _goes_on(self._message))
        if long and not _ANOTHERS.match(body) and schedulers.told_by(body) is None:
            self._message.append(body)
            self._keep(body)
            return True
        self.stray += not native(body)
        self.done = self.done or self.stray > 2
        return False

    def take_member(self, number: int, text: str, bar: re.Match[str] | None) -> bool:
        """Take a line of a member of an exception group; return whether it belongs to it. Of a
        member that was never raised only the name is shown. Further lines of a message have no bar.
        """
        if bar is None:
            return (self._ended or text.startswith("    ")) and self.take(number, text)
        body = text[bar.end() :]
        typed = None if self._frames or self._ended else _TYPED.match(body)
        if typed is not None:
            self._end(typed["type"], typed["message"] or "", number)
            self._keep(body)
        elif not (self.done or (body.endswith(HEADER) and not self._ended)):
            self.take(number, body)
        return True

    @property
    def says_little(self) -> bool:
        """It is at its end, and names no cause."""
        return self._ended and not classify.names_cause(self._message[0])

    def break_off(self) -> bool:
        """Take the exception from the source line that raises it, or from Ray's word for it, where
        the log ends before its name; tell whether it has one now.
        """
        raising = _RAISING.match(self._frames[-1].source) if self._frames else None
        if raising is not None and not (self._ended or self._doubtful):
            self._end(raising["type"], raising["message"].rstrip("\"') "), self.last)
        elif self._task and not (self._ended or self._doubtful):
            self._end(self._task, "", self.last)
        return bool(self._ended or self._doubtful or self.begun_by)

    def _keep(self, body: str) -> None:
        if len(self._lines) >= KEPT:
            del self._lines[KEPT // 2]
        self._lines.append(body)

    def error(self) -> Raised | None:
        """Return the exception that began it."""
        if self._doubtful is not None:
            self._end(*self._doubtful)
        if self._ended:
            self._choose()
        return self.begun_by

    def _choose(self) -> None:
        """Take, of exceptions raised while one was handled, the first, and of those wrapped the one
        that says more.
        """
        chosen, error = self.begun_by, self._raised()
        if chosen is None:
            self.begun_by = error
        elif self._link == "inside":
            frames = joined(chosen.frames, error.frames)
            self.begun_by = msgspec.structs.replace(error, frames=frames)
        elif self._link == "during":
            closing = _CLOSING.search(error.message)
            if (chosen.type in _TRIED and not closing) or schedulers.of_launcher(chosen):
                self.begun_by = error
                return
            is_open = not closing and classify.meaning(error) is classify.Meaning.OWN
            self.begun_by = msgspec.structs.replace(
                chosen,
                is_open=chosen.is_open or is_open,
                frames=joined(error.frames, chosen.frames),
            )
        elif self._link == "because" and not classify.says_why(chosen):
            self.begun_by = chosen if schedulers.of_launcher(error) else error

    def _raised(self) -> Raised:
        frames, filename = self._frames, ""
        if self._kind.endswith(NOT_COMPILED) and frames and not frames[-1].function:
            filename = f"{frames[-1].file}"
            frames = frames[:-1]
        own = tuple(frame for frame in frames if not stacks.hidden(frame))
        message = "\n".join(self._message)
        if filename:
            message += f" ({filename.rpartition('/')[2]}, line {self._frames[-1].line})"
        return Raised(
            self._kind, message, own, "\n".join(self._lines), call=_call(own), filename=filename
        )


_CALLS = re.compile(
    r"torch/distributed/(?:distributed_c10d|rendezvous|utils)\.py$|torch/cuda/__init__\.py$|torch/nn/parallel/distributed\.py$"
)


def _call(frames: tuple[Frame, ...]) -> str:
    """Name the call of torch's that an exception left, as the hooks of `rallypoint run` name it."""
    for frame in frames:
        if _CALLS.search(frame.file) and frame.function not in stacks.WRAPPERS:
            return (
                "init_process_group"
                if frame.file.endswith("rendezvous.py")
                else frame.function.strip("_")
            )
    return ""


class Message(Block):
    """A line that tells of an exception without a traceback, and what its message goes on with."""

    def __init__(self, number: int, kind: str, message: str, filename: str = "") -> None:
        super().__init__(number)
        self._kind, self._filename = kind, filename
        self._message = [message]
        self._broken = message.rstrip().endswith("signal:")  # by a terminal, or a page

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line goes on with the message."""
        more = (
            text.strip()
            and _goes_on(self._message)
            and not (HEADER in text or _ANOTHERS.match(text) or _FRAME.match(text))
        )
        if not more or schedulers.told_by(text) is not None:
            self.done = True
            return False
        self._message.append(text)
        self.last = number
        return True

    def error(self) -> Raised:
        """Return the exception that it tells of."""
        words = "\n".join(self._message)
        traceback = f"{self._kind}: {words}" if self._kind else words
        message = words.replace("\n", " ") if self._broken else words
        return Raised(self._kind, message, (), traceback, filename=self._filename)


class GroupTraceback(Block):
    """Traceback of an exception group. Its lines begin with a bar, and the tracebacks of its members
    follow. Its first lines may be missing in a paste.
    """

    # what stands before the word "Traceback" in its first line
    HEAD = re.compile(r"\+ Exception Group $|^[ |]*\| (?:Exception Group )?$")
    BAR = re.compile(r"^(?: *\|)+(?: |$)")
    _MEMBER = re.compile(r"^[ |]*(?P<first>\+-)?\+-{16} (?:\d+|\.{3}) -{16}$")
    _CLOSED = re.compile(r"^[ |]*\+-{36}$")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._members = [Traceback(number, HEADER)]  # until members come, that of the group itself
        self._outer: list[Traceback] = []  # of groups that have members
        self._closed = False

    def take(self, number: int, text: str) -> bool:
        """Take a line; return whether it belongs to this traceback. Python closes groups inside each
        other by one line. Below it the next member of an outer group may come.
        """
        if (member := self._MEMBER.match(text)) is not None:
            self._closed = False
            self._outer += [self._members.pop()] if member["first"] else []
            self._members.append(Traceback(number, HEADER))
            self.done = len(self._members + self._outer) > KEPT
        elif self._closed:
            self.done = True
            return False
        elif self._CLOSED.match(text) is not None:
            self._closed = True
        elif not self._members[-1].take_member(number, text, self.BAR.match(text)):
            self.stray += 1
            self.done = self.stray > STRAY
            return False
        self.last = number
        return True

    def errors(self) -> list[Raised]:
        """Return the exceptions of the innermost members, and those before a group: where some speak
        of no other rank, these. The group itself where no member is shown.
        """
        members = [one.error() for one in self._members]
        alone = [one.error() for one in self._outer[-1:] if not any(members)]
        shown = (*(one.begun_by for one in self._outer), *members, *alone)
        errors = [one for one in shown if one is not None]
        return [one for one in errors if not classify.is_consequence(one)] or errors


class Crash(Block):
    """A report of native code: faulthandler's dump of the stacks, or the last words of an exception
    of C++, or of a check that failed.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self.lines = [text]
        self._what: list[str] = []
        self._dump = "Fatal Python error" in text
        self._check = _CHECK.match(text)
        if self._check is not None:
            self._what = [f"{self._check['words']} ({self._check['place']})"]
        self._blank = 0

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        told = "Fatal Python error: " in text or text.lstrip().startswith("terminate called")
        return told or ("Check failed: " in text and _CHECK.match(text) is not None)

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        self._blank += not text.strip()
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
        told = schedulers.told_by(text)
        of_others = _ANOTHERS.match(text) or (told and told[0] in (Sign.ENDED, Sign.INTERRUPTED))
        return room and bool(text.strip()) and not of_others

    def error(self) -> Raised | None:
        """Return the exception of C++; None for a dump."""
        if not self._what:
            return None
        kind = re.search(r"instance of '([^']+)'", self.lines[0])
        words = "\n".join(self._what)
        return Raised(kind[1] if kind else "", words, (), "\n".join(self.lines))


class Failure:
    """A paragraph of torchrun's table."""

    def __init__(self, line: int, first: bool) -> None:
        self.line, self.first = line, first
        self.fields: dict[str, str] = {}
        self.traceback: Traceback | GroupTraceback | None = None

    @property
    def at(self) -> float:
        """Return when it was, in seconds; nan when its line was not pasted."""
        try:
            return datetime.strptime(self.fields.get("time", ""), "%Y-%m-%d_%H:%M:%S").timestamp()
        except ValueError:
            return nan


class Summary(Block):
    """The table of failures that torchrun prints: one paragraph for each rank that failed."""

    _FIELD = re.compile(r"^ *(time|host|rank|exitcode|error_file|traceback) *: ?(.*)$")

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self._root = number if "Root Cause" in text else 0  # the line of that heading
        self._failures: list[Failure] = []
        self._strays = 0
        if self._FIELD.match(text):  # what stands above it was not pasted
            self.take(number, text)

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        if re.match(r"^ *rank +: \d+ \(local_rank: \d+\)$", text):
            return True
        return text == "Failures:" or "Root Cause (first observed failure)" in text

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        self.last = number
        field = self._FIELD.match(text)
        inner = self._failures[-1].traceback if self._failures else None
        if inner is not None and not inner.done and field is None and text.startswith("  "):
            inner.take(number, text)
        elif text.startswith("Root Cause"):
            self._root = number
        elif text.startswith("====="):
            self.done = bool(self._failures)
        elif re.match(r"^ *\[\d+\]:$", text) is not None:
            self._failures.append(Failure(self._root or number, self._root > 0))
        elif field is not None:
            name, value = field.groups()
            if not self._failures or name in self._failures[-1].fields:
                self._failures.append(Failure(self._root or number, self._root > 0))
            self._failures[-1].fields[name] = value
            if HEADER in value:
                group = GroupTraceback.HEAD.search(value.partition(HEADER)[0])
                inner = GroupTraceback(number) if group else Traceback(number, "  " + HEADER)
                self._failures[-1].traceback = inner
        elif text.strip() and not text.startswith(("---", "Failures:", "  <NO_OTHER")):
            self._strays += 1
            self.done = self._strays > 8
            return False
        return True

    def sightings(self, speaker: Speaker, log: str) -> Iterator[Sighting]:
        """Tell how each rank ended, and what it raised."""
        began = next((one.at for one in self._failures if one.first), nan)
        for failure in self._failures:
            fields = failure.fields
            rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", fields.get("rank", ""))
            status = re.match(r"(-?\d+) *(?:\(pid: (\d+)\)|$)", fields.get("exitcode", ""))
            if rank is None or status is None:
                continue
            number, local, code, pid = (int(x or -1) for x in (*rank.groups(), *status.groups()))
            place, host = Place(log, failure.line, self.last), fields.get("host", "")
            ends = (max(code, 0), max(-code, 0), number, local, max(pid, 0), host, "torchrun")
            stopped = failure.at - began >= GRACE - 1  # the table's times are whole seconds
            yield Sighting(Sign.ENDED, place, end=End(*ends, failure.first, stopped=stopped))
            for error in failure.traceback.errors() if failure.traceback is not None else ():
                if not schedulers.of_launcher(error, number):
                    yield Sighting(Sign.RAISED, place, of_rank(number), error=error)


class MpiExit(Block):
    """The paragraph of mpirun (Open MPI) or mpiexec (MPICH, Intel MPI) on the first process that
    ended badly.
    """

    _BEGINS = re.compile(
        r"detected that one or more processes exited with non-zero"
        r"|(?P<mpich>BAD TERMINATION OF ONE OF YOUR)|MPI_ABORT was invoked on rank (?P<rank>\d+)"
    )
    _FACTS = tuple(
        re.compile(words)
        for words in (
            r"(?P<last>with errorcode|Exit code:) +(?P<code>-?\d+)",
            r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]",
            r"^= +(?:RANK (?P<rank>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)",
            r"^= +EXIT CODE: (?P<code>\d+)",
            r"^= +KILLED BY SIGNAL: (?P<signal>\d+)",
            r"(?P<last>TERMINATED WITH THE EXIT STRING): .{0,100}\(signal (?P<signal>\d+)\)",
        )
    )

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        found = self._BEGINS.search(text)
        assert found is not None
        self._told: dict[str, str] = {"rank": found["rank"] or "-1"}
        by = "Horovod" if "Horovod" in text else "mpirun"
        self._by = "mpiexec" if found["mpich"] else "MPI_ABORT" if found["rank"] else by
        self._lines = 0

    @classmethod
    def begins(cls, text: str) -> bool:
        """Tell whether the line is the first of one."""
        return cls._BEGINS.search(text) is not None

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        self._lines += 1
        for found in filter(None, (words.search(text) for words in self._FACTS)):
            self._told.update({name: told for name, told in found.groupdict().items() if told})
        self.done = "last" in self._told or self._lines > 10 or text.startswith("-----")
        self.last = number
        return True

    def sightings(self, speaker: Speaker, log: str) -> Iterator[Sighting]:
        """Tell how the process ended, where the paragraph does."""
        told = self._told
        code, signal = int(told.get("code", 0)), int(told.get("signal", 0))
        # MPICH names in its last line the signal by which it ended the others, too.
        if signal == SIGTERM and code not in (0, SIGTERM):
            signal = code if self._by == "mpiexec" and code in FATAL_SIGNALS else 0
        if code > 0 or signal:
            end = msgspec.structs.replace(
                End(signal=signal) if signal else schedulers.exit_of(code),
                rank=int(told["rank"]),
                pid=int(told.get("pid", 0)),
                host=told.get("host", ""),
                by=self._by,
                first=True,
            )
            yield Sighting(Sign.ENDED, Place(log, self.start, self.last), end=end)


class Stall(Block):
    """The list that Horovod prints of the calls that some ranks are in and others are not."""

    _CALL = re.compile(r"^\s*(?P<call>\S+) \[(?P<which>ready|missing) ranks: (?P<ranks>[\d, ]+)\]")

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self._lines = [text]
        self._call = ""
        self._ranks: dict[str, set[int]] = {"ready": set(), "missing": set()}  # of the first call

    @staticmethod
    def begins(text: str) -> bool:
        """Tell whether the line is the first of one."""
        return schedulers.stalls(text)

    def take(self, number: int, text: str) -> bool:
        """Tell whether the line belongs to it."""
        found = self._CALL.match(text)
        if found is None and "Stalled ops:" not in text:
            self.done = True
            return False
        if found is not None:
            self._call = self._call or found["call"]
            if found["call"] == self._call:
                self._ranks[found["which"]].update(map(int, re.findall(r"\d+", found["ranks"])))
        self.last = number
        self._lines.append(text)
        self.done = len(self._lines) > MESSAGE_LINES
        return True

    def sightings(self, speaker: Speaker, log: str) -> Iterator[Sighting]:
        """Tell the first call, and the ranks that are missing there."""
        ranks = tuple(sorted(self._ranks["missing"] or self._ranks["ready"]))
        yield Sighting(
            Sign.STALLED,
            Place(log, self.start, self.last),
            speaker,
            self._lines[0][:WORDS],
            collective=Collective(0, self._call),
            lines=tuple(self._lines),
            ranks=ranks,
        )


Table = Summary | MpiExit | Stall
"""Blocks in which a launcher tells of other processes."""
