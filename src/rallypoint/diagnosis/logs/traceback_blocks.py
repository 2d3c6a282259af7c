"""Tracebacks in a log, with their chains, groups and long messages; messages without one."""

from __future__ import annotations

import re

import msgspec

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.error_patterns import launchers, mpi_words, read_line
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.logs.block import (
    ANOTHERS,
    FRAME,
    HEADER,
    KEPT,
    MESSAGE_LINES,
    STRAY,
    Block,
    goes_on,
    native,
)
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.raised import joined

# lines after an exception's last line in which its message, or the next of a chain, may still come
TAIL = 16
DURING = "During handling of the above exception, another exception occurred:"
BECAUSE = "The above exception was the direct cause of the following exception:"
_DEEPER = Pattern(r'^( {3,40})File "[^"]*", line \d+')
_TYPED = Pattern(r"^(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")

_SURE = Pattern(
    r"(?:Error|Exception(?:Group)?|Interrupt|Exit|Warning|Timeout|Failure|Fault|Iteration|Empty|Full|Abort\w{0,20})$"
)

_RAISING = Pattern(r"raise (?P<type>[A-Z][\w.]*)\((?:[rf]?[\"'](?P<message>[^{]*)|$)")
# Ranks that share a terminal write the parts of a line into each other.
_WOVEN = Pattern(
    r"(?:(?P<module>\w[\w.]{0,99}?)(?P=module)+\.+)?(?P<type>\w{1,60}?(?:Error|Exception))(?P=type)+"
)
_RAY_TASK = Pattern(r"ray\.exceptions\.RayTaskError\(((?!Dist)\w+)\): ")
_CARETS = Pattern(r"^[\s~^]+$")

NOT_COMPILED = (
    "SyntaxError",
    "IndentationError",
    "TabError",
)  # which have no header, but their place before them

# What a program catches to go another way: that this failed, too, is the cause. A group that is
# closed after a failure is no other way.
_TRIED = ("ImportError", "ModuleNotFoundError")

_CLOSING = Pattern(
    r"Process group cannot be None|Default process group (?:has not been|is not) initialized"
)

_SPAWNED = Pattern(
    r"^(?:-- Process (?=\d+ terminated with the following error:)"
    r"|Process process (?=\d+:$)"  # torch's own tests
    # of torch.distributed.rpc: a worker's own print, or what its caller raises
    r"|(?:[\w.]+: )?On WorkerInfo\(id=(?=\d+, name=.+\):$))(\d+)"
)

# torch.distributed.checkpoint gathers what ranks raised into one exception, which all of them
# raise: "ranks:dict_keys([0, 3])", and below it the traceback of each.
_GATHERED = Pattern(r"^CheckpointException ranks:dict_keys\(\[(?P<ranks>[\d, ]+)\]\)")
_OF_RANK = Pattern(r"\(RANK (\d+)\)$")


def spawned(text: str) -> int:
    """Read the rank of the traceback that a line of mp.spawn's, of a worker's of rpc, or of a
    process named after its rank, stands above; -1 for other lines.
    """
    found = _SPAWNED.match(text)
    return int(found[1]) if found is not None else -1


def _path(file: str) -> str:
    """A path of Windows' with the slashes that everything here looks for, and that Windows takes as
    well.
    """
    return file.replace("\\", "/") if re.match(r"[A-Za-z]:\\", file) else file


def _is_source(body: str) -> bool:
    """Tell whether a line below a frame may be its source, though it is not indented."""
    others = _TYPED.match(body) or ANOTHERS.match(body) or native(body)
    return not (
        others
        or classify.recognised(body)
        or read_line.told_by(body)
        or "Fatal Python error: " in body
    )


def headless(text: str) -> bool:
    """Tell whether a line is a frame of a traceback whose first lines were not pasted."""
    return FRAME.match("  " + text.lstrip()) is not None and len(text) - len(text.lstrip()) <= 4


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
        self._flat = False  # the line above is a frame without its indentation
        self._lines = [text[len(head) :]]
        # NumPy's notice shows where it was imported, and no exception
        self._of_numpy = f'{HEADER}  File "' in text
        self.stray = self._tail = self._blank = 0
        self._ended = False
        self._doubtful: tuple[str, str, int] | None = None
        self._kind, self._message = "", [""]
        self._said = ""  # first line of others inside: a hook may show a message without its type
        # the type of what a task of Ray's raised (its own traceback is below), or Ctrl-C
        self._task = "KeyboardInterrupt" if "^C" in head else ""

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
        if mpi_words.EXIT.search(body):  # the launcher raised what it tells
            self.done = True
            return False
        frame, flat = FRAME.match(body), FRAME.match(f"  {body}")  # a page may drop the indentation
        below_flat, self._flat = self._flat, frame is None and flat is not None
        if (frame := frame or flat) is not None:
            self._doubtful = None
            new = Frame(_path(frame["file"]), int(frame["line"]), frame["function"] or "")
            if new not in self._frames[-2:]:  # another rank's, or a recursion
                self._frames.append(new)
        elif HEADER in body:  # another rank's, without a prefix
            return True
        elif self._doubtful is not None and not body.startswith("    "):
            self._end(*self._doubtful)
            return self._after(number, body)
        elif body.startswith("    ") or (below_flat and _is_source(body)):
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
            and not (name.isupper() or read_line.told_by(body))
        ):
            # "Epoch: 3" of another rank looks like one, too; a level ("ERROR") is none, nor is
            # a shell's "Killed".
            self._doubtful = (typed["type"], typed["message"] or "", number)
        elif classify.recognised(body):
            self._end("", body, number)
        elif (task := _RAY_TASK.match(body)) is not None:
            self._task = task[1]
        else:
            self._said = self._said or body
            self.stray += not native(body)
            self.done = self.stray > STRAY
            return False
        self._keep(body)
        return True

    def _end(self, kind: str, message: str, number: int) -> None:
        if (woven := _WOVEN.fullmatch(kind)) is not None:
            kind, message = woven["type"], message.lstrip(": ")
            one = message[: len(message) // woven[0].count(kind)]
            message = one if message.replace(one, "") == "" else message
        self._kind, self._message, self._ended, self._doubtful = kind, [message], True, None
        self.last = number
        if self._headless and not kind.endswith(NOT_COMPILED):
            self.start = number
        self._headless = False
        if (rank := spawned(message)) >= 0:
            self.rank, self._joint = rank, "inside"
        elif (gathered := _GATHERED.match(message)) is not None:
            self._gathered = {int(rank): None for rank in re.findall(r"\d+", gathered["ranks"])}
        elif self._of in self._gathered:
            self._gathered[self._of] = (kind, message)
        # Those that show the same error as the first one, or none.
        shown = next(filter(None, self._gathered.values()), None)
        same = (rank for rank, one in self._gathered.items() if one in (shown, None))
        self.ranks = tuple(sorted(same))

    def go_on(self, number: int, words: str) -> None:
        """Add words to the last line of the message."""
        if self._doubtful is not None:
            kind, message, _ = self._doubtful
            self._doubtful = kind, message + words, number
        self._message[-1] += words
        self._lines[-1] += words
        self.last = number

    def _after(self, number: int, body: str) -> bool:
        self._tail += 1
        self.done = self._tail > TAIL
        if body == '"""':  # the end of what a process of a pool raised: see `tracebacks.in_process`
            self._joint = "remote"
            return True
        if body in (DURING, BECAUSE):
            self._joint = "during" if body == DURING else self._joint or "because"
            return True
        if (rank := spawned(body)) >= 0:
            self.rank, self._joint = rank, "inside"
            return True
        # What ends with a colon shows what it was raised for.
        inside = body.startswith("    ") and self._message[0].rstrip().endswith(":")
        typed = _TYPED.match(body.lstrip()) if inside else None
        if typed and _SURE.search(typed["type"]):
            self._end(typed["type"], typed["message"] or "", number)
            return True
        if HEADER in body:
            if self._tail <= 2 and self._message[-1].rstrip().endswith(":"):
                self._joint = self._joint or "below"
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
        # A message goes on in lines that are indented; below a bare type also in words that are known.
        below = self._tail == len(self._message) and (
            _INDENTED.match(body) or (self._message == [""] and classify.recognised(body))
        )
        room = not self._blank and len(self._message) < MESSAGE_LINES
        long = room and (below or goes_on(self._message))
        if long and not ANOTHERS.match(body) and read_line.told_by(body) is None:
            self._message.append(body)
            self._keep(body)
            return True
        self.stray += not (native(body) or inside)
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
            message = raising["message"] or self._said
            self._end(raising["type"], message.rstrip("\"') "), self.last)
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
        elif self._link == "inside" or (
            # another rank's, without a prefix, may stand below a colon, too
            self._link == "below" and classify.meaning(error) is classify.Meaning.OWN
        ):
            frames = joined(chosen.frames, error.frames)
            self.begun_by = msgspec.structs.replace(error, frames=frames)
        elif self._link == "remote":
            frames = joined(error.frames, chosen.frames)
            self.begun_by = msgspec.structs.replace(chosen, frames=frames)
        elif self._link == "during":
            closing = _CLOSING.search(error.message)
            if (chosen.type in _TRIED and not closing) or launchers.of_launcher(chosen):
                self.begun_by = error
                return
            is_open = not closing and classify.meaning(error) is classify.Meaning.OWN
            self.begun_by = msgspec.structs.replace(
                chosen,
                is_open=chosen.is_open or is_open,
                frames=joined(error.frames, chosen.frames),
            )
        elif self._link == "because" and not classify.says_why(chosen):
            self.begun_by = chosen if launchers.of_launcher(error) else error

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


_INDENTED = Pattern(r'(?:\t|  )\s*(?!File "|\d+%\||[~^|+])\S')
"""A further line of a message: no frame or marker of another traceback, no progress bar."""

_CALLS = Pattern(
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
            and goes_on(self._message)
            and not (HEADER in text or ANOTHERS.match(text) or FRAME.match(text))
        )
        if not more or read_line.told_by(text) is not None:
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
    HEAD = Pattern(r"\+ Exception Group $|^[ |]*\| (?:Exception Group )?$")
    BAR = Pattern(r"^(?: *\|)+(?: |$)")
    _MEMBER = Pattern(r"^[ |]*(?P<first>\+-)?\+-{16} (?:\d+|\.{3}) -{16}$")
    _CLOSED = Pattern(r"^[ |]*\+-{36}$")

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
