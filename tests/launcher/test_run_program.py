"""How a program leaves by itself, and what is told of it."""

from __future__ import annotations

import py_compile
import re
from functools import partial
from pathlib import Path

import pytest

from ..real import job
from ..real.job import Result

run_job = partial(job.run_job, fork=True)

PARSER = """\
import argparse, os, sys

parser = argparse.ArgumentParser(prog="train")
parser.add_argument("--lr", type=float, required=True)

def main():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    args = parser.parse_args([[], ["--lr", "x"], ["--lr=-1"], ["--lr=1"]][attempt])
    if args.lr < 0:
        parser.error(f"--lr: {args.lr} is below 0")
    sys.exit("no data: /data is empty\\nmount it first")

main()
"""


LEFT_BY = [
    ("exited with code 2: the following arguments are required: --lr", "train.py:8 in main"),
    ("exited with code 2: argument --lr: invalid float value: 'x'", "train.py:8 in main"),
    ("exited with code 2: --lr: -1.0 is below 0", "train.py:10 in main"),
    ("exited with code 1: no data: /data is empty", "train.py:11 in main"),
]


def reports(result: Result) -> list[str]:
    """Take the reports of a job's attempts apart."""
    return re.split(r"^(?=error\[)", result.report, flags=re.MULTILINE)[1:]


@pytest.mark.usefixtures("without_torch")
def test_what_the_program_left_by_is_told_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PARSER)
    options = ["-n", "2", "--max-restarts", str(len(LEFT_BY) - 1)]
    result = run_job([*options, "train.py"], state=tmp_path, cwd=tmp_path)
    for (headline, place), report in zip(LEFT_BY, reports(result), strict=True):
        assert re.match(
            rf"error\[rank-exited\]: (both ranks|rank [01]) {re.escape(headline)}\n", report
        ), result.everything
        assert f"  where  {place}, pid " in report, result.everything


LOST_THREAD = """\
import os, queue, sys, threading

full = queue.Queue()

def load():
    raise OSError("shard 3 is corrupt")

class Leaves:
    def __del__(self):
        raise KeyError("closed")

thread = threading.Thread(target=load)
thread.start()
thread.join()
Leaves()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit("no batch came")
full.get(timeout=0)
"""


@pytest.mark.usefixtures("without_torch")
def test_a_thread_that_an_exception_ended_is_told_with_what_came_of_it(tmp_path: Path) -> None:
    """The report had the consequence alone: the queue that the thread was to fill. And the exception
    of `__del__`, after which Python goes on, was told as the cause, and not the words of sys.exit.
    """
    (tmp_path / "train.py").write_text(LOST_THREAD)
    options = ["-n", "2", "--max-restarts", "1"]
    result = run_job([*options, "train.py"], state=tmp_path, cwd=tmp_path)
    waits, gives_up = reports(result)
    assert "raised _queue.Empty\n" in waits, result.everything
    told = "had died of OSError: shard 3 is corrupt, at train.py:6 in load: it may have led to this (likely)"
    assert told in " ".join(waits.split()), result.everything
    assert " exited with code 1: no batch came\n" in gives_up, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_compiled_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    """It was compiled as source: a SyntaxError about null bytes."""
    (tmp_path / "train.py").write_text(
        "print(__name__, __file__, __loader__.get_source('__main__'))"
    )
    py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "train.pyc"))
    result = run_job(["train.pyc"], state=tmp_path, cwd=tmp_path)
    assert result.out == f"__main__ {tmp_path}/train.pyc None\n", result.everything


STAND_INS = """\
import os, sys

rank = os.environ["RANK"]
copy = open(f"copy{rank}", "w", buffering=1)

class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        copy.write(text)
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()

def both(write):
    return lambda text: (copy.write(text), write(text))[1]

if rank == "0":
    sys.stderr = Tee(sys.stderr)
elif rank == "1":
    sys.stderr.write = both(sys.stderr.write)
elif rank == "2":
    os.dup2(copy.fileno(), 2)
print("before", file=sys.stderr)
raise ValueError("nan in " + rank)
"""


@pytest.mark.usefixtures("without_torch")
@pytest.mark.torch
@pytest.mark.parametrize("way", [(), ("--fresh",)], ids=["template", "fresh"])
def test_a_traceback_reaches_what_stands_for_stderr_and_the_terminal_once(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    """The launcher took the tracebacks of several ranks and printed the cause: none was in the
    files of `-r` and `-t`, in a logger that the program had put into `sys.stderr` or around its
    `write`, or in a file that it had opened for descriptor 2."""
    (tmp_path / "train.py").write_text(STAND_INS)
    flags = (
        "-n",
        "5",
        "-r",
        "3:2",
        "-t",
        "4:3",
        "--log-dir",
        "logs",
        "--duplicate-stderr-filters",
        "nan",
        "--on-failure",
        "continue",
    )
    result = run_job([*way, *flags, "train.py"], state=tmp_path, cwd=tmp_path)
    (attempt,) = (tmp_path / "logs").glob("*/attempt_0")
    texts = [(tmp_path / f"copy{rank}").read_text() for rank in range(3)]
    texts += [(attempt / str(rank) / "stderr.log").read_text() for rank in (3, 4)]
    for rank, text in enumerate(texts):
        assert text.startswith("before\nTraceback (most recent call last):\n"), (rank, text)
        assert text.endswith(f"\nValueError: nan in {rank}\n"), (rank, text)
    assert "[default4]:ValueError: nan in 4\n" in (attempt / "filtered_stderr.log").read_text()
    assert sorted(line for line in result.err.splitlines() if line.startswith("[")) == [
        "[0] before",
        "[1] before",
        "[4] before",
    ]
    for rank in range(5):
        log = (result.run_dir / f"rank{rank}.log").read_text()
        assert log.count(f"\nValueError: nan in {rank}\n") == 1, log


STAND_IN = """\
import os, sys, threading

class Tee:
    def write(self, text):
        if text.startswith("Traceback"):
            writer = threading.Thread(target=os.write, args=(2, b"of another thread\\n"))
            writer.start()
            writer.join()
        os.write(2, text.encode())
    def flush(self):
        pass

class Logger:
    def write(self, text):
        raise OSError("the disk is full")

sys.stderr = Tee() if os.environ["RANK"] < "2" else Logger()
raise ValueError("nan")
"""


@pytest.mark.usefixtures("without_torch")
def test_a_stand_in_for_stderr_that_cannot_write_or_flush_does_not_take_the_exceptions_place(
    tmp_path: Path,
) -> None:
    """And what another thread writes beside a traceback is not lost: descriptor 2 leads elsewhere
    while a stand-in gets it.
    """
    (tmp_path / "train.py").write_text(STAND_IN)
    result = run_job(
        ["-n", "4", "--on-failure", "continue", "train.py"], state=tmp_path, cwd=tmp_path
    )
    assert (result.rc, set(result.codes)) == (1, {"rank-raised"}), result.everything
    assert "raised ValueError: nan" in result.report, result.everything
    assert "disk is full" not in result.err, result.everything
    said = sorted(line for line in result.err.splitlines() if line.startswith(("[0]", "[1]")))
    assert said == ["[0] of another thread", "[1] of another thread"], result.everything


SPOILT = {
    "__str__": "<message cannot be shown: SystemExit>",
    "__getattribute__": "<message cannot be shown>",
    "__dict__": "<message cannot be shown>",
}


@pytest.mark.usefixtures("without_torch")
def test_an_exception_whose_class_raises_wherever_it_is_looked_at_is_named(tmp_path: Path) -> None:
    """The second one was looked at as the first, and so on, a thousand times: minutes."""
    program = ["import os"]
    for attempt, method in enumerate(SPOILT):
        text = f"""\
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "{attempt}":
    class Odd(Exception):
        @property
        def {method}(self, *_):
            raise {"SystemExit(9)" if method == "__str__" else "RuntimeError"}

    raise Odd("nan")
"""
        program.append(text if method == "__dict__" else text.replace("        @property\n", ""))
    (tmp_path / "train.py").write_text("\n".join(program))
    options = ["-n", "2", "--max-restarts", "2"]
    result = run_job([*options, "train.py"], state=tmp_path, cwd=tmp_path)
    assert (result.rc, result.codes) == (1, ["rank-raised"] * 3), result.everything
    for message, report in zip(SPOILT.values(), reports(result), strict=True):
        assert f"raised Odd: {message}\n" in report, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_lone_rank_whose_stderr_goes_to_a_file_has_its_traceback_in_the_report_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('nan')\n")
    result = run_job(["-r", "2", "--log-dir", "logs", "train.py"], state=tmp_path, cwd=tmp_path)
    (log,) = (tmp_path / "logs").glob("*/attempt_0/0/stderr.log")
    assert log.read_text().endswith("\nValueError: nan\n")
    assert "    | ValueError: nan\n" in result.report, result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("program", "refusal"),
    [
        (
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n",
            "unrecognized arguments: -n 2",
        ),
        (
            "import sys\nprint('Error: No such option: -n', file=sys.stderr)\nsys.exit(2)\n",
            "No such option: -n",
        ),
    ],
    ids=["argparse", "click"],
)
def test_an_option_behind_the_program_that_the_program_refuses(
    tmp_path: Path, program: str, refusal: str
) -> None:
    """`rallypoint run train.py -n 2`: the report said what argparse says, and not that -n belongs
    before the program.
    """
    (tmp_path / "train.py").write_text(program)
    result = run_job(["train.py", "--lr", "1", "-n", "2"], state=tmp_path, cwd=tmp_path)
    assert result.rc == 2, result.everything
    assert refusal in result.err, result.everything
    assert "-n 2 stands behind the program" in result.prose, result.everything
    assert "rallypoint run -n 2 train.py --lr 1\n" in result.report, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_submodule_that_is_misspelt_is_answered_with_the_nearest(tmp_path: Path) -> None:
    """The help was to install the package, which is there."""
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/train.py"):
        (tmp_path / name).touch()
    near = "pkg.sub.train"
    # Of a package that cannot be started, and where no name is near, the modules are told.
    for typed, way in (
        ("pkg.sub.trian", ["--fresh"]),
        ("pkg.sbu.train", []),
        ("pkg.sub", []),
        ("pkg.sub.nothing", []),
    ):
        result = run_job([*way, "-m", typed], state=tmp_path / typed, cwd=tmp_path)
        assert (result.rc, result.codes) == (2, ["start-failed"]), result.everything
        assert f"             -m {near}\n" in result.report, result.everything
        assert "pip install" not in result.report, result.everything
