"""No regular expression of the package needs quadratic time for any text that a program or a log
may contain, and none more than a tenth of a second for what reaches it of a text of 1 MB.

Version 0.1 had forty that did: one exception message of 48 KB of brackets stopped the launcher's
loop for 36 s, and with it the job's store, so that healthy ranks lost their sessions; `rallypoint
explain` needed 30 s for three lines.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import rallypoint
from rallypoint.diagnosis.pattern import Pattern as LatePattern

Pattern = re.Pattern[str] | re.Pattern[bytes]

SOURCE = Path(rallypoint.__file__).parent

EXEMPT = {
    "cli/option_values.py": "options of the command line",
    "host/firewall.py": "the output of nft and iptables",
    "host/devices.py": "files of the NVIDIA driver in /proc",
    "diagnosis/pages.py": "pages of the package's own",
    "diagnosis/error_patterns/failure_words.py:_FAILURE": "lines of at most 1500 characters",
    "testing/": "for tests, not part of a job",
}
"""Parts whose patterns never meet text of a program or of a log, and what they meet instead."""

SHORT, LONG = 4_000, 16_000
"""Characters of the two inputs whose times are compared: linear is 4 times as long, quadratic 16
times.
"""

QUICK = 0.0005  # seconds of processor time for the short input: 1 MB would take an eighth of one
GROWTH = 9.0  # of the time between the two
# Of the time from a quarter of the short input on: what grows more than GROWTH behind it grows 5.8
# before it, and only that is tried at the long input, which takes most of the time.
STEADY = 5.0
LONGEST = 5.0  # seconds for 1 MB, of which `LARGEST` is looked at; other processes slow it down

_UNITS = (
    *"a0 _-.:,/\\\"'[](){}<>|=~^\t\n#@",
    "a ", "a.", "a/", "a:", "a-", ", ", ". ", "0.", "0, ", "1-2,", "[a] ", "[[1, 2], ", "(a", "\\n", "::", " at ", " on ",
    'File "', '  File "a", line 1, in a\n', "rank 0 ", "[rank0]: ", "Rank 0 ", "ranks ", "Error", "Error: ", "a.Error: ", "error ",
    "x.py:1 ", "x.cu:1: ", "[pair.cc:1]", "Connection ", "OpType=", "timed out ", "--a ", "a=", "0x1 ", "127.0.0.1:1 ", "\x1b[", "\x1b]",
)  # fmt: skip


def _compiled(value: object, depth: int = 3) -> Iterator[Pattern]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, LatePattern):
        yield value.compiled
    elif depth and isinstance(value, dict):
        for one in (*value.keys(), *value.values()):
            yield from _compiled(one, depth - 1)
    elif depth and isinstance(value, tuple | list | set | frozenset):
        for one in value:
            yield from _compiled(one, depth - 1)


def _at_the_start(pattern: Pattern) -> Pattern:
    """The pattern as `match` tries it: at the start of a text alone."""
    if isinstance(pattern.pattern, bytes):
        return re.compile(b"\\A(?:%s)" % pattern.pattern, pattern.flags)
    return re.compile(rf"\A(?:{pattern.pattern})", pattern.flags)


def _sources() -> Iterator[tuple[str, str]]:
    for file in SOURCE.rglob("*.py"):
        yield str(file.relative_to(SOURCE)), file.read_text()


def _only_matched() -> set[str]:
    """Names of patterns that are tried at the start of a text alone. A name in a comment counts: it
    makes the test stricter.
    """
    calls: dict[str, set[str]] = {}
    for path, text in _sources():
        for name, method in re.findall(r"\b(\w+)\.(?=(\w+))", text):
            calls.setdefault(f"{path}:{name}", set()).add(method)
    return {name for name, methods in calls.items() if methods <= {"match", "fullmatch", "pattern"}}


def _of_modules() -> Iterator[tuple[str, str, Pattern]]:
    """Patterns that stand in a module, in a table of it, or in one of its classes: file, name,
    pattern.
    """
    for module in pkgutil.walk_packages(rallypoint.__path__, "rallypoint."):
        if module.name.endswith("__main__"):
            continue
        loaded = importlib.import_module(module.name)
        path = str(Path(loaded.__file__ or "").relative_to(SOURCE))
        for name, value in vars(loaded).items():
            inside = (
                vars(value).items()
                if isinstance(value, type) and value.__module__ == module.name
                else ((name, value),)
            )
            for inner, one in inside:
                for pattern in _compiled(one):
                    yield path, inner, pattern


def _of_calls() -> Iterator[tuple[str, str, Pattern]]:
    """Patterns that are given to a function of `re` where they are used, `re.search(r"...", text)`:
    file, function, pattern.
    """
    calls = (
        (path, node)
        for path, text in _sources()
        if re.search(r"\bre\.", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    )
    for path, node in calls:
        if not (isinstance(node.func, ast.Attribute) and node.args):
            continue
        if not (
            isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and isinstance(node.args[0], ast.Constant)
        ):
            continue
        if not isinstance(node.args[0].value, str | bytes):
            continue
        words = [part.attr for one in (*node.args[1:], *(k.value for k in node.keywords)) for part in ast.walk(one)
                 if isinstance(part, ast.Attribute) and part.attr.isupper()]  # fmt: skip
        flags = re.NOFLAG
        for word in words:
            flags |= getattr(re, word)
        yield path, node.func.attr, re.compile(node.args[0].value, flags)


@cache
def _patterns() -> list[tuple[str, Pattern]]:
    """Every pattern once, with a file where it stands. To find them takes a second, which is left to
    the tests: each process of a suite collects all of them.
    """
    found: dict[Pattern, tuple[str, Pattern]] = {}
    matched = _only_matched()
    of_modules = list(_of_modules())
    for path, name, pattern in of_modules:
        if not f"{path}:{name}".startswith(tuple(EXEMPT)):
            found.setdefault(
                pattern, (path, _at_the_start(pattern) if f"{path}:{name}" in matched else pattern)
            )
    seen = {pattern for _, _, pattern in of_modules}
    for path, call, pattern in _of_calls():
        if pattern not in seen and not path.startswith(tuple(EXEMPT)):
            found.setdefault(
                pattern,
                (path, _at_the_start(pattern) if call in ("match", "fullmatch") else pattern),
            )
    return list(found.values())


def _literals(pattern: str) -> list[str]:
    """What a text must hold to get anywhere in the pattern: its runs of plain characters, as they
    are written in it.
    """
    bare = re.sub(
        r"\\([.\[\](){}|+*?^$/])", r"\1", re.sub(r"\(\?(?:P<\w+>|[:=!]|<[=!])", "(", pattern)
    )
    return list(dict.fromkeys(re.findall(r"[A-Za-z/\[\]().:'\" -]{3,}", bare)))[:12]


def _inputs(pattern: str) -> Iterator[tuple[str, str]]:
    """What is repeated, and what stands before it."""
    literals = _literals(pattern)
    for unit in (
        *_UNITS,
        *literals,
        *(f"{one} " for one in literals[:4]),
        *(f"{one}1" for one in literals[:4]),
    ):
        yield "", unit
    for head in literals[:6]:
        for unit in ("a", "0", " ", "[", ".", "a ", "a.", "1, ", *literals[:2]):
            yield head, unit


def _time(pattern: Pattern, head: str, unit: str, length: int) -> float:
    text = (head + unit * (length // len(unit) + 1))[:length] + "\x01"
    subject = text.encode() if isinstance(pattern.pattern, bytes) else text
    start = time.thread_time()
    pattern.search(subject)  # type: ignore[arg-type]
    return time.thread_time() - start


def _grows(pattern: Pattern, head: str, unit: str) -> bool:
    """Whether the time for a text grows with more than its length."""
    short = _time(pattern, head, unit, SHORT)
    if short < QUICK:
        return False
    if short > LONGEST / 5:
        return True
    steady = short <= STEADY * _time(pattern, head, unit, SHORT // 4)
    if steady and short * 1_000_000 / SHORT <= LONGEST:
        return False
    long = _time(pattern, head, unit, LONG)
    return long > GROWTH * short or long * 1_000_000 / LONG > LONGEST


def _slow(pattern: Pattern) -> str:
    source = (
        pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    )
    # What other processes do to the caches makes one comparison of five look slow, and not each.
    grows = (one for one in _inputs(source) if all(_grows(pattern, *one) for _ in range(5)))
    slow = list(itertools.islice(grows, 4))
    return f"{source!r} needs more than linear time for {slow!r}" if slow else ""


FOLDERS = sorted({str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS)
def test_time_grows_with_the_length_of_the_text_alone(folder: str) -> None:
    told = {
        f"{path}: {slow}"
        for path, pattern in _patterns()
        if str(Path(path).parent) == folder and (slow := _slow(pattern))
    }
    assert not told, "\n".join(sorted(told))


LARGEST = 100_000
"""Characters that may reach a pattern: of 323 the dearest one needs 0.9 s for a million, on the
machine of 2 cores of docs/benchmarks.md, and 30 need more than 0.1 s.
"""

_SPY = """
import json, os, re, sys

longest = 0

class Spied:
    def __init__(self, pattern):
        self._pattern = pattern

    def __getattr__(self, name):
        found = getattr(self._pattern, name)
        if not callable(found):
            return found

        def looks(*given, **more):
            note(given, *given[2:] if name in ("search", "match", "fullmatch") else ())
            return found(*given, **more)

        return looks

def note(given, *end):
    global longest
    longest = max(longest, *(min(len(one), *end, len(one)) for one in given if isinstance(one, (str, bytes))))

def spied(function):
    def called(pattern, *given, **more):
        ours = sys._getframe(1).f_globals["__name__"].startswith("rallypoint")
        if ours and function is not compiled:
            note(given)
        told = function(pattern, *given, **more)
        return Spied(told) if ours and function is compiled else told

    return called

compiled = re.compile
for name in ("compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"):
    setattr(re, name, spied(getattr(re, name)))

import rallypoint.cli.explain, rallypoint.diagnosis.logs.to_evidence  # once for all commands
from rallypoint.__main__ import main

for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        sys.argv[1:] = words
        status = main()
        print("the longest text had", longest, "characters", file=sys.stderr)
        sys.exit(status)
    os.waitpid(child, 0)
"""
"""A program that runs commands, and tells what the longest text of each was that a pattern was
tried at.
"""

_MILLION = "[[1, 2], (bind(errno: " * 45_455
_FRAMES = 'Traceback (most recent call last):\n  File "/a/train.py", line 9, in main\n    run()\n'
_LOGS = {
    "a line": f"{_FRAMES}ValueError: {_MILLION}\n",
    "a line further down": "step\n" * 60 + f"ValueError: {_MILLION}\n",
    "a line without an end": f"ValueError: {_MILLION}",
    "many lines": _FRAMES + "ValueError: " + "\n".join(re.findall(".{1,100}", _MILLION)),
    "a message of long lines": f"{_FRAMES}RuntimeError: CUDA error: device-side assert triggered\n"
    + "\n".join(re.findall(".{1,60000}", _MILLION)),
    "an exception of C++": "terminate called after throwing an instance of 'std::runtime_error'\n"
    f"  what():  NCCL error {_MILLION}\n" + "\n".join(re.findall(".{1,60000}", _MILLION)),
    "a dump": "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
    + "\n".join(re.findall(".{1,60000}", _MILLION.replace("[[1, 2], ", '  File "x", line 1 in '))),
    "an object of JSON": f'{{"message": "ValueError: {_MILLION}", "rank": 3}}\n',
    "torchrun's table": "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n"
    f"  exitcode  : 1 (pid: 7)\n  traceback : {_FRAMES}  ValueError: {_MILLION}\n",
}


def _longest(*commands: Sequence[str]) -> tuple[list[int], str]:
    """Run commands, and return how many characters the longest text of each had that met a pattern,
    and what they wrote to stderr.
    """
    ended = subprocess.run(
        [sys.executable, "-c", _SPY, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = re.findall(r"the longest text had (\d+) characters", ended.stderr)
    assert len(told) == len(commands), ended.stderr[-2000:]
    return [int(one) for one in told], ended.stderr


@pytest.fixture(scope="module")
def longest_of_logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The longest text of each log that met a pattern."""
    paths = [tmp_path_factory.mktemp("log") / "train.log" for _ in _LOGS]
    for path, text in zip(paths, _LOGS.values(), strict=True):
        path.write_text(text)
    found, _ = _longest(*(["explain", str(path)] for path in paths))
    return dict(zip(_LOGS, found, strict=True))


@pytest.mark.parametrize("log", _LOGS)
def test_of_a_log_no_long_text_reaches_a_pattern(log: str, longest_of_logs: dict[str, int]) -> None:
    """A message of sixteen lines of 60 KB was searched as a whole, 900 KB, by a hundred patterns."""
    assert 90 < longest_of_logs[log] <= LARGEST


def test_of_a_message_that_is_pasted_no_long_text_reaches_a_pattern() -> None:
    (found,), _ = _longest(["explain", f"RuntimeError: {_MILLION[:120_000]}"])
    assert 10_000 < found <= LARGEST


# Each attempt raises another one: a line, many lines, long lines.
_RAISES = """\
import json, os
text = '[[1, 2], (bind(errno: ' * 45_455
text, error = [
    (text, ValueError), (text.replace(' ', chr(10)), TypeError), (chr(10).join([text[:60_000]] * 16), KeyError)
][int(os.environ['TORCHELASTIC_RESTART_COUNT'])]
if file := os.environ.get('TORCHELASTIC_ERROR_FILE'):
    with open(file, 'w') as f:
        json.dump({'message': {'message': error.__name__ + ': ' + text[:900_000]}}, f)
raise error(text)
"""


@pytest.mark.parametrize("option", ["--fresh", "--plain"])
@pytest.mark.usefixtures("without_torch")
def test_of_what_a_rank_raises_no_long_text_reaches_a_pattern(option: str, tmp_path: Path) -> None:
    """`--plain`: the rank's own words, and the file of `@record`, tell of the exception."""
    program = tmp_path / "train.py"
    program.write_text(_RAISES)
    options = [option, "--max-restarts", "2", "--run-dir", str(tmp_path / "run"), "-n", "2"]
    (found,), said = _longest(["run", *options, str(program)])
    assert 100 <= found <= LARGEST
    # Of a rank that is stopped before it has told of its exception only the log is left, whose end
    # has no frame of a message this long: then there are two causes.
    assert said.count("error[rank-raised]") >= 3, said[-2000:]


def test_every_part_that_is_exempt_is_there() -> None:
    assert all((SOURCE / part.partition(":")[0]).exists() for part in EXEMPT)
