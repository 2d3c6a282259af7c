"""What else a log has changes no verdict: lines above, below and around those that tell a cause."""

from __future__ import annotations

import random

import pytest
from bench.log_soak import KINDS, difference, logs, told


def test_logs_of_the_corpus_with_something_beside_them() -> None:
    """The short form of `scripts/soak logs-changed`: of 45,000 pairs, the same 400 each time."""
    chance = random.Random("logs")
    pairs = [
        (one, text, kind, name) for one, text in logs() for kind in KINDS for name in KINDS[kind]
    ]
    wrong = [difference(*pair) for pair in chance.sample(pairs, 400)]
    assert [one for one in wrong if one] == []


_TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/srv/train.py", line 9, in <module>\n'
    "    main()\n"
    "KeyError: 'lr'\n"
)
_SYNTAX = '  File "/srv/train.py", line 2\n    for i in x\n              ^\nSyntaxError: bad\n'
_ABORTED = "free(): invalid pointer\n"
_NCCL = "gpu07:1:2 [0] misc/ibvwrap.cc:94 NCCL WARN Call to ibv_open_device failed\n"
_EXITED = (
    "E1122 10:00:00.0 12 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
    "(exitcode: 3) local_rank: 1 (pid: 41) of binary: /usr/bin/python\n"
)
_UNREACHED = (
    "[W socket.cpp:663] [c10d] The IPv4 network addresses of (node-0, 29500) cannot be retrieved "
    "(gai error: -2 - Name or service not known).\n"
)
_SLOTS = (
    "There are not enough slots available in the system to satisfy the 6\n"
    "slots that were requested by the application:\n\n  /usr/bin/python3\n\n"
    + "\n".join(f"Either request fewer slots, or make more available ({i})." for i in range(20))
    + "\n"
)
_BAD_ALLOC = (
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
)


@pytest.mark.parametrize("prefix", ["gpu07: ", "10.0.0.7: ", "[2026-11-22 10:00:00] ", "10:00:00 "])
@pytest.mark.parametrize("text", [_TRACEBACK, _SYNTAX, _EXITED + "step 1\n", _BAD_ALLOC, _SLOTS])
def test_a_prefix_that_all_lines_have(prefix: str, text: str) -> None:
    before, after = told(text), told("".join(map(prefix.__add__, text.splitlines(True))))
    assert (after.code, after.confidence) == (before.code, before.confidence)


def test_what_is_no_prefix() -> None:
    """Who speaks in each line tells the cause: srun, and a rank that torch names."""
    srun = "srun: error: n1: task 3: Exited with exit code 7\n" * 2
    assert told(srun).ranks == (3,)
    python = "python3: can't open file '/srv/train.py': [Errno 2] No such file or directory\n" * 2
    assert told(python).code == "start-failed"


@pytest.mark.parametrize("indent", ["  ", "    ", " " * 12])
@pytest.mark.parametrize("text", [_TRACEBACK, _SYNTAX, _BAD_ALLOC, _SLOTS])
def test_an_indentation_of_all_lines(indent: str, text: str) -> None:
    whole = "".join(map(indent.__add__, text.splitlines(True)))
    assert told(whole).headline == told(text).headline


_WEAK = [(_ABORTED, "rank-crashed"), (_NCCL, "nccl-failed"), (_UNREACHED, "address-unresolved")]


@pytest.mark.parametrize(("text", "code"), _WEAK)
def test_the_end_of_the_command_is_not_that_of_a_process(text: str, code: str) -> None:
    """Who ran the whole command says that it failed."""
    exited = "##[error]Process completed with exit code 1.\n"
    assert told(text + exited).code == code
    assert told("Error: no space\n" + exited).code == "rank-exited"


@pytest.mark.parametrize("word", ["Killed", "Terminated"])
def test_the_shells_word_after_that_of_a_launcher(word: str) -> None:
    """The shell tells of the launcher, which somebody ended later."""
    assert told(f"{_EXITED}{word}\n").headline.startswith("local rank 1 exited with code 3")
    killed = told(f"{_NCCL}Killed\n")
    assert (killed.code, killed.confidence) == ("rank-killed", "likely")
    cut = _TRACEBACK.rpartition("KeyError")[0]  # whose last line is missing
    assert told(f"{cut}{word}\n").code != "rank-raised"


@pytest.mark.parametrize(
    "stop",
    [
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T10:00:00 ***\n",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***\n",
    ],
)
@pytest.mark.parametrize(
    ("text", "code"),
    [
        *_WEAK[:2],
        (_EXITED, "rank-exited"),
        (_SLOTS, "start-failed"),
        (_BAD_ALLOC, "rank-out-of-memory"),
    ],
)
def test_a_stop_after_a_failure(text: str, code: str, stop: str) -> None:
    report = told(text + stop)
    assert report.code == code
    if code == "nccl-failed":
        assert "after that, Slurm stopped the job" in report.then
        assert told(stop + text).code == "interrupted"


@pytest.mark.parametrize(
    "stop",
    [
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO PREEMPTION ***\n",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 2\n",
    ],
)
def test_a_stop_that_no_failure_leads_to(stop: str) -> None:
    assert told(_NCCL + stop).code == "interrupted"


def test_a_stop_long_after_a_failure() -> None:
    """The job went on without what NCCL warned of, or with what a helper had refused."""
    steps = "".join(f"step {i} loss 0.5\n" for i in range(300))
    helper = "prepare.py: error: the following arguments are required: --data\n"
    limit = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***\n"
    for text in (_NCCL, helper, _UNREACHED, "step exited with exit code 1\n"):
        report = told(text + steps + limit)
        assert (report.code, report.confidence) == ("interrupted", "certain"), text


def test_an_error_in_a_line_alone_is_a_remark_beside_a_traceback() -> None:
    """A program that ends by an exception writes its traceback."""
    remark = "ValueError: no cache was found, starting without one\n"
    assert told(remark + "step 1\n" * 5 + _TRACEBACK).headline.endswith("KeyError: 'lr'")
    assert told(remark + "step 1\n" * 5 + _SLOTS).code == "start-failed"
    assert told(remark).headline.endswith(remark.strip())
    caught = "ValueError: Caught KeyError in DataLoader worker process 0.\n"
    assert told(caught + _TRACEBACK).logs == ("x.log:1",)


def test_conda_in_a_script_before_the_job() -> None:
    conda = "CondaError: Run 'conda init' before 'conda activate'\n"
    report = told(conda + _TRACEBACK)
    assert report.headline.endswith("KeyError: 'lr'")
    assert "line 1, before it, speaks of a failure" in report.why
    assert told(conda).code == "cause-unknown"


_OWN = "".join(f"2026-11-22 10:00:00,123 - INFO - trainer - step {i} loss 0.1\n" for i in range(60))
_SKIPPED = (
    "2026-11-22 10:00:00,123 - WARNING - trainer - OSError: image file is truncated; skipped\n"
)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("srun: error: gpu03: task 3: Segmentation fault\n", "rank-crashed"),
        ("srun: error: gpu03: task 3: Killed\n", "rank-killed"),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***\n",
            "interrupted",
        ),
        ("2026-11-22 10:00:00,123 - INFO - trainer - Training finished\n", "cause-unknown"),
    ],
)
def test_what_a_programs_own_logger_says_is_no_end(end: str, code: str) -> None:
    """A logger that writes all lines of a log may be the program's: of another level than most, a
    line has its words and its head.
    """
    assert told(f"{_OWN}{_SKIPPED}{end}").code == code


@pytest.mark.parametrize(("level", "shown"), [("CRITICAL", True), ("ERROR", True), ("INFO", False)])
def test_levels_of_a_logger(level: str, shown: bool) -> None:
    steps = "".join(_OWN.splitlines(True)[:5])
    line = f"2026-11-22 10:00:00,123 - {level} - trainer - Failed to import it, stopping\n"
    assert told(steps + line).headline.startswith("line 6 speaks of a failure") is shown


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("./run.sh: line 12:  4242 Killed                  python train.py", "rank-killed"),
        (_EXITED.strip(), "rank-exited"),
        ("Fatal Python error: Segmentation fault", "rank-crashed"),
        ("[2026-11-22] CUDA out of memory", "rank-out-of-memory"),
    ],
)
def test_what_follows_a_frame_without_its_indentation(line: str, code: str) -> None:
    """The line below such a frame is its source, unless it tells something itself."""
    frames = "Traceback (most recent call last):\n" + 'File "/app/train.py", line 60, in main\n'
    assert told(f"{frames}{line}\n").code == code
