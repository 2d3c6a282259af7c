"""The way of a rank's exception to the printed report: short enough to be read."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import rallypoint

pytestmark = pytest.mark.usefixtures("torch_in_parts")

SOURCE = str(Path(rallypoint.__file__).parent)

MOST_FUNCTIONS = 36
"""Functions of rallypoint that hand a rank's exception on, from the rank to the screen, as
`Recorder` counts them. It may only become smaller: two of them came with the bound on what is
searched in an exception (`Raised.__post_init__`)."""

MOST_LINES = 60

FORMS = frozenset(
    (
        "Raised", "Uncaught", "RankRaised", "AskEvidence", "EvidenceIn", "MakeReport", "RankEvidence",
        "NodeEvidence", "FailedAttempt", "JobEvidence", "Verdict", "Case", "Judgement", "Report",
    )
)  # fmt: skip
"""Classes of what is made of the exception on its way, one from the other."""

PROGRAM = f"""
import atexit, os, signal, sys
import torch.distributed as dist

sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_path_of_exception import Recorder

recorder = Recorder()

def end():
    sys.setprofile(None)
    recorder.write("rank.json")
    signal.sigwait({{signal.SIGTERM}})  # which the launcher sends after the report

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    atexit.register(end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
    recorder.begin(sys._getframe())
    raise ValueError("bad batch")
dist.barrier()
"""


class Recorder:
    """Profiler that notes the functions which hand the exception on.

    A function does when something made of the exception is seen for the first time as its argument
    or its result, or when it hands the exception to another process or to the screen; and so do its
    callers. Functions that only answer a question about the exception (yes or no, a word, a number)
    are not counted, nor are those that ran before it came: the loop. A function inside another one
    is a part of that one.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}  # of each function that hands it on
        self.all: set[str] = set()  # that ran, for whatever reason
        self._seen: dict[int, object] = {}  # kept, so that no other object gets its number
        self._before: set[int] = set()
        self._is_on = self._is_over = False

    def begin(self, frame: FrameType) -> None:
        """Count from here on, without the functions that run now."""
        self._is_on = True
        self._before = {id(one) for one in _callers(frame)}
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(SOURCE):
            return
        if self._is_over or not (self._is_on or _has_come(code, result)):
            return
        if not self._is_on:
            self.begin(next(one for one in _callers(frame) if one.f_code.co_name == "turn"))
        self.all.add(_name(code))
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals[name] for name in code.co_varnames[:count] if event == "call"]
        made = [one for value in (*given, result) for one in _forms(value)]
        new = [one for one in made if id(one) not in self._seen]
        self._seen |= {id(one): one for one in new}
        self._is_over = _name(code) == "record/log_pump.py: LogPump.say" and "error[" in given[-1]
        is_sent = bool(made) and _name(code) == "launcher/protocol.py: send"
        if new or is_sent or self._is_over:
            since = itertools.takewhile(lambda one: id(one) not in self._before, _callers(frame))
            for one in reversed([one.f_code for one in since]):
                if one.co_filename.startswith(SOURCE):
                    self.lines[_name(one)] = max(self.lines.get(_name(one), 0), _lines_of(one))

    def write(self, path: str) -> None:
        Path(path).write_text(json.dumps([self.lines, sorted(self.all)]))


def _has_come(code: CodeType, result: Any) -> bool:
    """Return whether the agent has just received the exception."""
    kinds = [type(one).__name__ for one in _forms(result)]
    return code.co_name == "receive" and "Uncaught" in kinds


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _forms(value: Any) -> Iterator[object]:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if type(one).__name__ in FORMS:
            yield one


def _name(code: CodeType) -> str:
    function = code.co_qualname.partition(".<locals>")[0]
    return f"{code.co_filename.removeprefix(SOURCE + os.sep)}: {function}"


def _lines_of(code: CodeType) -> int:
    """Return the length of a function, with its docstring."""
    return max(line or 0 for *_, line in code.co_lines()) - code.co_firstlineno + 1


def test_an_exception_is_handed_on_by_few_functions_and_none_is_long(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, __file__, "run", "-n", "2", "--grace", "1", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "error[rank-raised]: rank 1 raised ValueError: bad batch" in done.stderr
    found: dict[str, int] = {}
    ran: set[str] = set()
    for process in ("rank", "agent"):
        lines, every = json.loads((tmp_path / f"{process}.json").read_text())
        found |= {f"{process}: {name}": count for name, count in lines.items()}
        ran |= {f"{process}: {name}" for name in every}
    assert "rank: launcher/protocol.py: send" in found
    assert "agent: record/log_pump.py: LogPump.say" in found
    assert len(found) <= MOST_FUNCTIONS, "\n".join([*found, f"{len(ran)} ran in all"])
    assert {name: count for name, count in found.items() if count > MOST_LINES} == {}


if __name__ == "__main__":  # the launcher of the test
    from rallypoint.__main__ import main

    recorder = Recorder()
    sys.setprofile(recorder.note)
    status = main()
    sys.setprofile(None)
    recorder.write("agent.json")
    sys.exit(status)
