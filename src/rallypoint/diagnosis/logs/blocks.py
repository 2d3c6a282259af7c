"""Lines to what they tell together: tracebacks with their chains and long messages, dumps of
crashes, the launcher's own summary.

Each takes one line after the other and says whether it belongs to it. Ranks that share a terminal
write into each other's tracebacks: what is no part of one is left to the others, and two headers
wait for two last lines.
"""

from __future__ import annotations

import itertools
import re

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.error_patterns import schedulers
from rallypoint.diagnosis.evidence import Frame, Raised

HEADER = "Traceback (most recent call last):"
# lines after an exception's last line in which its message, or the next of a chain, may still come
TAIL = 16
STRAY = 40  # lines of others that may stand inside a traceback before it is taken for cut off
KEPT = 400  # lines of one traceback; of a deeper one the middle is left out
MESSAGE_LINES = 14  # NCCL's and DDP's messages have up to ten

_DURING = "During handling of the above exception, another exception occurred:"
_BECAUSE = "The above exception was the direct cause of the following exception:"
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_DEEPER = re.compile(r'^( {3,40})File "[^"]*", line \d+')
_TYPED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_SURE = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failure|Fault|Iteration|Empty|Full|Abort\w{0,20})$"
)
_LONG = re.compile(
    r"NCCL [Ee]rror|HCCL error|CUDA error|finished reduction|killed by signal|Failed to initialize NVML|You requested gpus?: "
)
_CARETS = re.compile(r"^[\s~^]+$")
_ANOTHERS = re.compile(
    r"^(?:\[?[EWIF]\d{3,4} |\[\d{4}-|\[[EWI] |(?:INFO|WARNING|ERROR|CRITICAL)[: ]|Exception raised from|frame #\d+|[-=*]{20})"
)
_NOT_COMPILED = (
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
_NATIVE = re.compile(r"^frame #\d+|^Exception raised from |^<omitting python frames>")


def native(text: str) -> bool:
    """Whether a line is part of a C++ trace, which tells where torch noticed a failure, and never
    why.
    """
    return bool(_NATIVE.match(text))


def _path(file: str) -> str:
    """A path of Windows' with the slashes that everything here looks for, and that Windows takes as
    well.
    """
    return file.replace("\\", "/") if re.match(r"[A-Za-z]:\\", file) else file


def headless(text: str) -> bool:
    """Whether a line is a frame of a traceback whose first lines were not pasted."""
    return _FRAME.match("  " + text.lstrip()) is not None and len(text) - len(text.lstrip()) <= 2


class Traceback:
    """One traceback, with what it was raised from."""

    def __init__(
        self, number: int, text: str, *, ignored: bool = False, headless: bool = False
    ) -> None:
        self.start = self.last = number
        # its first lines were not pasted: the line that names the exception is where it begins then
        self._headless = headless
        self.ignored = (
            ignored  # Python says that it is: of `__del__`, or while the interpreter closes down
        )
        self.times = 1
        self.rank = -1  # that the words name, as mp.spawn's do
        self.done = False
        self._open = 1  # headers that wait for their last line
        self._chain: list[tuple[str, Raised]] = []
        self._gathered: dict[
            int, tuple[str, str]
        ] = {}  # ranks that an exception counts, and what each of them raised, where that is shown
        self._of = -1  # the rank among these whose traceback is read now
        self._joint = ""  # how the next one of the chain hangs together with the one before
        self._begin(text)

    def _begin(self, text: str) -> None:
        head = text[: text.find("Traceback")]
        self._indent = len(head) if head.isspace() else 0
        self._frames: list[Frame] = []
        self._lines = [text[len(head) :]]
        self.stray = self._tail = self._blank = 0
        self._ended = False
        self._doubtful: tuple[str, str, int] | None = None
        self._kind, self._message, self._file = "", [""], ""

    @classmethod
    def of_gathered(cls, number: int, kind: str, message: str) -> Traceback | None:
        """One whose own lines are missing, and that begins with what torch.distributed.checkpoint
        gathered; None for other messages.
        """
        if _GATHERED.match(message) is None:
            return None
        block = cls(number, HEADER)
        block._end(kind, message, number)
        block._keep(f"{kind}: {message}")
        return block

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that raised, where the words count them: those that show the same error as the
        first one, or none.
        """
        told = next((one for one in self._gathered.values() if one != ("", "")), ("", ""))
        return tuple(
            sorted(rank for rank, one in self._gathered.items() if one in (told, ("", "")))
        )

    def take(self, number: int, text: str) -> bool:
        """Whether the line belongs to this traceback; `done` afterwards when no more can come."""
        if not self._frames and not self._indent and (deeper := _DEEPER.match(text)) is not None:
            self._indent = len(deeper[1]) - 2  # of a table or a page that was indented as a whole
        body = text[self._indent :] if text[: self._indent].isspace() else text
        taken = self._after(number, body) if self._ended else self._inside(number, body)
        if taken:
            self.last = number
        return taken

    def _inside(self, number: int, body: str) -> bool:
        if (frame := _FRAME.match(body)) is not None:
            self._doubtful = None
            new = Frame(_path(frame["file"]), int(frame["line"]), frame["function"] or "")
            if self._open == 1 or new not in self._frames[-2:]:
                self._frames.append(new)
        elif HEADER in body:
            self._open += 1
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
        if typed and self._frames and (_SURE.search(name) or "." in typed["type"]):
            self._end(typed["type"], typed["message"] or "", number)
        elif typed and self._frames and name[:1].isupper():
            self._doubtful = (
                typed["type"],
                typed["message"] or "",
                number,
            )  # "Epoch: 3" of another rank looks like one, too
        elif classify.recognised(body):
            self._end("", body, number)
        else:
            self.stray += not native(body)
            self.done = self.stray > STRAY
            return False
        self._keep(body)
        return True

    def _end(self, kind: str, message: str, number: int) -> None:
        self._kind, self._message, self._ended, self._doubtful = kind, [message], True, None
        self.last = number
        if self._headless and not kind.endswith(_NOT_COMPILED):
            self.start = number
        self._headless = False
        if (gathered := _GATHERED.match(message)) is not None:
            self._gathered = {int(rank): ("", "") for rank in re.findall(r"\d+", gathered["ranks"])}
        elif self._of in self._gathered:
            self._gathered[self._of] = (kind, message)

    def _after(self, number: int, body: str) -> bool:
        self._tail += 1
        self.done = self._tail > TAIL
        if body in (_DURING, _BECAUSE):
            self._joint = "during" if body == _DURING else "because"
            return True
        if (spawned := _SPAWNED.match(body)) is not None:
            self.rank, self._joint = int(spawned.group(1)), "inside"
            return True
        if HEADER in body:
            inner = "Original Traceback" in body
            of_rank = _OF_RANK.search(body) if self._gathered else None
            if not self._joint and not inner and of_rank is None:
                self.done = True
                return False
            joint = "inside" if inner else self._joint
            if of_rank is not None:
                joint, self._of = "gathered" if self._of >= 0 else "inside", int(of_rank[1])
            self._chain.append((joint, self._raised()))
            self._joint = ""
            self._begin(body)
            return True
        if not body.strip():
            self._blank += 1
            return self._blank <= 3
        typed = _TYPED.match(body)
        if (
            self._open > 1
            and typed
            and (typed["type"], typed["message"] or "") == (self._kind, self._message[0])
        ):
            self._open -= 1
            self.times += 1
            return True
        if self._open > 1 and (_FRAME.match(body) or body.startswith("    ")):
            return True
        # A message that begins on the line after its type: indented, or in words that are known.
        below = not self._message[0] and (
            body.startswith("    ") or (self._tail == 1 and classify.recognised(body))
        )
        long = (
            (below or _LONG.search(self._message[0]))
            and not self._blank
            and len(self._message) < MESSAGE_LINES
        )
        if long and not _ANOTHERS.match(body) and schedulers.told_by(body) is None:
            self._message.append(body)
            self._keep(body)
            return True
        self.stray += not native(body)
        self.done = self.done or self.stray > 2 + 6 * (self._open > 1)
        return False

    def _keep(self, body: str) -> None:
        if len(self._lines) >= KEPT:
            del self._lines[KEPT // 2]
        self._lines.append(body)

    @property
    def ended(self) -> bool:
        """Whether the line that names the exception has come."""
        return self._ended or self._doubtful is not None or bool(self._chain)

    def error(self) -> Raised | None:
        """The exception that began it: of those raised while one was handled the first, of those
        wrapped the one that says more.
        """
        if self._doubtful is not None:
            self._end(*self._doubtful)
        errors = [*self._chain]
        if self._ended:
            errors.append(("", self._raised()))
        if not errors:
            return None
        chosen = errors[0][1]
        for (joint, _), (_, error) in itertools.pairwise(errors):
            other_way = (
                joint == "during" and chosen.type in _TRIED and not _CLOSING.search(error.message)
            )
            if (
                joint == "inside"
                or other_way
                or (
                    joint == "because"
                    and not classify.says_why(chosen)
                    and not schedulers.of_launcher(error.type)
                )
            ):
                chosen = error
        return chosen

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def _raised(self) -> Raised:
        frames, filename = self._frames, ""
        if self._kind.endswith(_NOT_COMPILED) and frames and not frames[-1].function:
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
    """The call of torch's that an exception left, as the hooks of `rallypoint run` name it."""
    for frame in frames:
        if _CALLS.search(frame.file) and frame.function not in stacks.WRAPPERS:
            return (
                "init_process_group"
                if frame.file.endswith("rendezvous.py")
                else frame.function.strip("_")
            )
    return ""


class Message:
    """A line that tells of an exception without a traceback, and what its message goes on with."""

    def __init__(self, number: int, kind: str, message: str, filename: str = "") -> None:
        self.start = self.last = number
        self.frames: tuple[Frame, ...] = ()
        self.filename = filename
        self.kind = kind
        self.message = [message]
        self.done = False
        self.long = bool(_LONG.search(message) or message.rstrip().endswith("signal:"))

    def take(self, number: int, text: str) -> bool:
        """Whether the line goes on with the message."""
        more = (
            self.long
            and text.strip()
            and len(self.message) < MESSAGE_LINES
            and HEADER not in text
            and not _ANOTHERS.match(text)
        )
        if not more or schedulers.told_by(text) is not None or _FRAME.match(text):
            self.done = True
            return False
        self.message.append(text)
        self.last = number
        return True

    def error(self) -> Raised:
        lines = [
            f"{self.kind}: {self.message[0]}" if self.kind else self.message[0],
            *self.message[1:],
        ]
        joint = (
            " " if self.message[0].endswith("signal:") else "\n"
        )  # a terminal, or a page, has broken that line
        return Raised(
            self.kind,
            joint.join(self.message),
            self.frames,
            "\n".join(lines),
            filename=self.filename,
        )


class Crash:
    """What native code leaves: faulthandler's dump of the stacks, or the last words of an exception
    of C++.
    """

    def __init__(self, number: int, text: str) -> None:
        self.start = self.last = number
        self.lines = [text]
        self.what: list[str] = []
        self.done = False
        self._dump = "Fatal Python error" in text
        self._blank = 0

    def take(self, number: int, text: str) -> bool:
        if len(self.lines) > KEPT or native(text) or HEADER in text:
            self.done = True
            return False
        if not self._dump:
            return self._more_of_what(number, text)
        if not text.strip():
            self._blank += 1
            self.done = self._blank > 3
            return True
        if not re.match(
            r'^(?:Current thread|Thread 0x|  File "|  \.\.\.|  <|Extension modules:|Current thread\'s)',
            text,
        ):
            self.done = True
            return False
        self.lines.append(text)
        self.last = number
        return True

    def _more_of_what(self, number: int, text: str) -> bool:
        found = re.match(r"^ *what\(\): *(.*)$", text)
        if found is not None:
            self.what = [found.group(1)]
        elif (
            not self.what
            or not text.strip()
            or len(self.what) >= MESSAGE_LINES
            or _ANOTHERS.match(text)
        ):
            self.done = True
            return False
        else:
            self.what.append(text)
        self.lines.append(text)
        self.last = number
        return True


class Summary:
    """torchrun's own account: one paragraph for each rank that failed, in its table of failures."""

    _FIELD = re.compile(r"^ *(time|host|rank|exitcode|error_file|traceback) *: ?(.*)$")

    def __init__(self, number: int, text: str) -> None:
        self.start = self.last = number
        self.done = False
        self.first = number if "Root Cause" in text else 0  # the line of that heading
        self.failures: list[dict[str, str]] = []
        self.tracebacks: list[tuple[int, Traceback]] = []  # by the index of the failure
        self._stray = 0

    def take(self, number: int, text: str) -> bool:
        self.last = number
        if self.tracebacks and self.tracebacks[-1][0] == len(self.failures) - 1:
            inner = self.tracebacks[-1][1]
            if not inner.done and text.startswith("  ") and self._FIELD.match(text) is None:
                inner.take(number, text)
                return True
        if text.startswith("Root Cause"):
            self.first = number
        elif text.startswith("====="):
            self.done = bool(self.failures)
        elif re.match(r"^ *\[\d+\]:$", text) is not None:
            self.failures.append(
                {"first": "yes" if self.first else "", "line": str(self.first or number)}
            )
        elif (field := self._FIELD.match(text)) is not None:
            if not self.failures or field.group(1) in self.failures[-1]:
                self.failures.append(
                    {"first": "yes" if self.first else "", "line": str(self.first or number)}
                )
            self.failures[-1][field.group(1)] = field.group(2)
            if field.group(1) == "traceback" and HEADER in text:
                self.tracebacks.append((len(self.failures) - 1, Traceback(number, "  " + HEADER)))
        elif text.strip() and not text.startswith(("---", "Failures:", "  <NO_OTHER")):
            self._stray += 1
            self.done = self._stray > 8
            return False
        return True


class MpiExit:
    """The paragraph of mpirun (Open MPI) or mpiexec (MPICH, Intel MPI) on the first process that
    ended badly.
    """

    _ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+)")

    def __init__(self, number: int, text: str) -> None:
        self.start = self.last = number
        self.done = False
        self.rank = self.code = -1
        self.signal = self.pid = 0
        self.host = ""
        self.by = "mpiexec" if "BAD TERMINATION" in text else "mpirun"
        self._lines = 0
        if (found := self._ABORT.search(text)) is not None:
            self.rank, self.by = int(found[1]), "MPI_ABORT"

    @classmethod
    def begins(cls, text: str) -> bool:
        """Whether the line is the first of one."""
        known = (
            "detected that one or more processes exited with non-zero",
            "BAD TERMINATION OF ONE OF YOUR",
        )
        return any(words in text for words in known) or (
            "MPI_ABORT" in text and cls._ABORT.search(text) is not None
        )

    def take(self, number: int, text: str) -> bool:
        self._lines += 1
        if (found := re.search(r"with errorcode (-?\d+)", text)) is not None:
            self.code, self.done = int(found[1]), True
        elif (found := re.search(r"Process name: \[\[\d+,\d+\],(\d+)\]", text)) is not None:
            self.rank = int(found.group(1))
        elif (found := re.search(r"Exit code: +(\d+)", text)) is not None:
            self.code = int(found.group(1))
            self.done = True
        elif (
            found := re.search(
                r"^= +(?:RANK (?P<rank>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)", text
            )
        ) is not None:
            self.rank, self.pid, self.host = (
                int(found["rank"] or -1),
                int(found["pid"]),
                found["host"],
            )
        elif (found := re.search(r"^= +(EXIT CODE|KILLED BY SIGNAL): (\d+)", text)) is not None:
            self.code, self.signal = (
                (int(found[2]), 0) if found[1] == "EXIT CODE" else (0, int(found[2]))
            )
        elif (
            found := re.search(r"TERMINATED WITH THE EXIT STRING: .{0,100}\(signal (\d+)\)", text)
        ) is not None:
            self.signal, self.code, self.done = int(found[1]), 0, True
        elif self._lines > 10 or text.startswith("-----"):
            self.done = True
        self.last = number
        return True


class Stall:
    """Horovod's list of the calls that some ranks are in and others are not."""

    _CALL = re.compile(r"^\s*(?P<call>\S+) \[(?P<which>ready|missing) ranks: (?P<ranks>[\d, ]+)\]")

    def __init__(self, number: int, text: str) -> None:
        self.start = self.last = number
        self.done = False
        self.lines = [text]
        self.call = ""
        self.ready: set[int] = set()  # of the first call
        self.missing: set[int] = set()

    def take(self, number: int, text: str) -> bool:
        found = self._CALL.match(text)
        if found is None and "Stalled ops:" not in text:
            self.done = True
            return False
        if found is not None:
            self.call = self.call or found["call"]
            if found["call"] == self.call:
                ranks = self.ready if found["which"] == "ready" else self.missing
                ranks.update(int(rank) for rank in re.findall(r"\d+", found["ranks"]))
        self.last = number
        self.lines.append(text)
        self.done = len(self.lines) > MESSAGE_LINES
        return True
