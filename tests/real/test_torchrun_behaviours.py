"""What torchrun does for a program on one node, `rallypoint run` does, too; where it differs, the
difference is written down here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..python_path import WITHOUT_TORCH, python_path
from .conftest import Run, Write
from .job import DEADLINE, MARKER, RALLYPOINT, TORCHRUN, Result, on_terminal, run_job

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

# Everything that is not torch's own is the same in a forked and in a new interpreter; the second
# one starts in 0.2 s.
WAYS = pytest.mark.parametrize("way", [(), ("--fresh",)], ids=["template", "fresh"])
ARGUMENTS = (
    "--lr",
    "0.1",
    "-n",
    "3",
    "--nproc-per-node",
    "9",
    "--help",
    "--",
    "x",
    "a b",
    "",
    "*",
    "-",
    "é",
)
MEETING = (
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
    "--rdzv-id",
    "job7",
)  # without a backend torchrun takes no id
FLAGS = ("--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "2", *MEETING)


# --- what a program finds
# -------------------------------------------------------------------------------------------


FOREIGN_FD = 200  # open in the launcher, and inheritable, as shells and build tools leave them


def set_umask() -> None:
    os.umask(0o027)


def facts(state: Path, *launcher: str, torch: str) -> list[dict[str, Any]]:
    """What the two ranks of scripts/facts.py saw; `torch`: those that import it, and look at it."""
    env = {
        "SOMETHING": "of the user's",
        "UNICODE": "ä\n",
        "FACTS_OF_TORCH": torch,
    }
    os.dup2(2, FOREIGN_FD)
    try:
        result = run_job(
            ["facts.py", *ARGUMENTS],
            state=state,
            launcher=launcher,
            env=env,
            before=set_umask,
            pass_fds=[FOREIGN_FD],
        )
    finally:
        os.close(FOREIGN_FD)
    assert result.rc == 0, result.everything
    found = result.values()
    assert len(found) == 2, result.everything
    return found


SET_BY_THE_SHELL = {"_", "SHLVL", "OLDPWD"}
DIFFERENT_VALUES = {
    "MASTER_ADDR",  # a name there
    "MASTER_PORT",  # any free one in both
    "TORCHELASTIC_ERROR_FILE",  # in the run folder
    "FACTS_OF_TORCH",
    MARKER,
    "XDG_STATE_HOME",
}
SINCE_2_9 = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}  # torchrun of 2.8 sets it for nobody
OURS_ALONE = {
    "RALLYPOINT_FAMILY",  # what it is found by
    "RALLYPOINT_JOB",  # whose process it is
    "RALLYPOINT_STORE",  # the job's store
}


def same_environment(way: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        mine_env, other_env = mine["env"], other["env"]
        assert (
            set(mine_env) - SET_BY_THE_SHELL - OURS_ALONE
            == (set(other_env) | SINCE_2_9) - SET_BY_THE_SHELL
        ), way
        same = set(other_env) - SET_BY_THE_SHELL - DIFFERENT_VALUES
        assert {name: mine_env[name] for name in same} == {
            name: other_env[name] for name in same
        }, way
        assert mine_env["MASTER_ADDR"] == "127.0.0.1"
        assert mine_env["MASTER_PORT"].isdigit()
        assert mine_env["TORCHELASTIC_RUN_ID"] == "job7"
    assert [one["env"]["RANK"] for one in ours] == ["0", "1"]
    assert len({one["env"]["TORCHELASTIC_ERROR_FILE"] for one in ours}) == 2


DIFFERENT_FACTS = {
    "env",
    "torch seed",
    "descriptors",  # ours has three; compared below
    "inherited by its children",
    "orig_argv",  # compared below
}


FACTS_OF_TORCH = {"torch threads", "torch seed"}
"""What a new interpreter's torch finds in its environment, or draws, as torchrun's ranks do."""


def no_other_difference(way: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        names = (set(mine) | set(other)) - DIFFERENT_FACTS
        if way != "template":
            names -= FACTS_OF_TORCH
        else:  # what the first rank has found, holds for both
            other = {**other, **{name: theirs[0][name] for name in FACTS_OF_TORCH}}
        different = {
            name: (mine.get(name), other.get(name))
            for name in names
            if mine.get(name) != other.get(name)
        }
        assert different == {}, way
        assert mine["argv"] == ["facts.py", *ARGUMENTS]
        assert mine["orig_argv"] == other["orig_argv"], way


def no_descriptor_of_somebody_elses(
    way: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (other["descriptors"], other["inherited by its children"]) == ([], [])
        assert mine["inherited by its children"] == [], way
        assert FOREIGN_FD not in mine["descriptors"], way
        assert len(mine["descriptors"]) <= 3, (
            "the control channel, where stacks are written, and the secret of the job's store",
            way,
        )


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE)
def test_a_program_finds_what_it_finds_under_torchrun(tmp_path: Path) -> None:
    """torchrun puts no rank in front of a line unless it copies it."""
    # Each rank of torchrun's imports torch anew.
    theirs = facts(tmp_path / "torchrun", *TORCHRUN, *FLAGS, "--tee", "3", torch="0")
    for way, flags in (("template", ()), ("fresh", ("--fresh",)), ("plain", ("--plain",))):
        forked = way == "template"
        ours = facts(tmp_path / way, *RALLYPOINT, *FLAGS, *flags, torch="01" if forked else "")
        same_environment(way, theirs, ours)
        no_other_difference(way, theirs, ours)
        no_descriptor_of_somebody_elses(way, theirs, ours)
        assert not forked or ours[0]["torch seed"] != ours[1]["torch seed"]


# --- how a program ends
# ---------------------------------------------------------------------------------------------

GOOD = ("pass", "sys.exit(0)", "sys.exit(None)")
BAD = {
    "raises": ("raise ValueError('seven')", 1, "rank-raised", "rank 1 raised ValueError: seven"),
    # Nobody pressed Ctrl-C and nobody of us sent SIGINT: it is an exception as any other.
    "interrupt": (
        "raise KeyboardInterrupt", 1, "rank-raised", "rank 1 raised KeyboardInterrupt"
    ),
    "exit-3": ("sys.exit(3)", 3, "rank-exited", "rank 1 exited with code 3"),
    "exit-text": ("sys.exit('no data found')", 1, "rank-exited", "rank 1 exited with code 1"),
    "os-exit-5": ("os._exit(5)", 5, "rank-exited", "rank 1 exited with code 5"),
    "sigkill": ("os.kill(os.getpid(), 9)", 137, "rank-killed", "rank 1 was killed by SIGKILL"),
    "sigterm": ("os.kill(os.getpid(), 15)", 143, "rank-killed", "rank 1 was killed by SIGTERM"),
    "segfault": (
        "import ctypes; ctypes.string_at(0)",
        139,
        "rank-crashed",
        "rank 1 crashed with SIGSEGV in train.py:LINE in <module>",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_every_way_to_end_well_is_silent(run: Run, write: Write, way: tuple[str, ...]) -> None:
    lines = [f"if os.environ['RANK'] == '{rank}': {code}" for rank, code in enumerate(GOOD)]
    program = write("train.py", "\n".join(["import os, sys", *lines]))
    result = run(*way, "-n", str(len(GOOD)), program)
    assert (result.rc, result.out, result.err) == (0, "", ""), result.everything


# Each attempt ends otherwise, and the exit status is that of the last one.
@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("way", "endings"),
    [
        ((), list(BAD)),
        (("--fresh",), ["raises", "interrupt", "exit-text", "sigkill", "segfault"]),
        *(((), [one]) for one in ("raises", "exit-3", "sigkill")),
        (("--fresh",), ["os-exit-5"]),
    ],
    ids=["template", "fresh", "template-raises", "template-exit-3", "template-sigkill", "fresh-5"],
)
def test_the_exit_status_is_the_failing_ranks(
    run: Run, write: Write, endings: list[str], way: tuple[str, ...]
) -> None:
    program = ["import os, sys, time", "if os.environ['RANK'] == '0': time.sleep(60)"]
    for attempt, ending in enumerate(endings):
        program.append(f"elif os.environ['TORCHELASTIC_RESTART_COUNT'] == '{attempt}':")
        program.append(f"    {BAD[ending][0]}")
    script = write("train.py", "\n".join(program))
    restarts = ["--max-restarts", str(len(endings) - 1)]
    result = run(*way, "-n", "2", *restarts, "train.py", cwd=script.parent)
    _, statuses, codes, headlines = zip(*(BAD[one] for one in endings), strict=True)
    assert (result.rc, result.codes) == (statuses[-1], [*codes]), result.everything
    reports = re.split(r"^(?=error\[)", result.report, flags=re.MULTILINE)[1:]
    for attempt, (headline, report) in enumerate(zip(headlines, reports, strict=True)):
        assert headline.replace("LINE", str(4 + 2 * attempt)) in report, result.everything
        assert len(report.splitlines()) <= 25, result.everything
    if "exit-text" in endings:
        assert "[1] no data found" in result.err, result.everything


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_a_traceback_shows_the_programs_frames_only(
    run: Run, write: Write, way: tuple[str, ...]
) -> None:
    program = write(
        "train.py",
        "import os, time\n\ndef step():\n    raise KeyError('lr')\n\nif os.environ['RANK'] == '0':\n    time.sleep(60)\nstep()\n",
    )
    result = run(*way, "-n", "2", "train.py", cwd=program.parent)
    traceback = [
        "Traceback (most recent call last):",
        f'  File "{program}", line 8, in <module>',
        "    step()",
        f'  File "{program}", line 4, in step',
        "    raise KeyError('lr')",
        "KeyError: 'lr'",
    ]
    log = result.run_dir / "rank1.log"
    marks = r"^[ |]+[~^]+\n"  # below a source line: Python 3.13 sets them where 3.11 sets none
    assert re.sub(marks, "", log.read_text(), flags=re.MULTILINE).splitlines() == traceback
    pid = next(
        event["details"]["pid"]
        for event in result.events
        if event["what"] == "worker-started" and event["rank"] == 1
    )
    assert re.sub(marks, "", result.report, flags=re.MULTILINE).splitlines() == [
        "error[rank-raised]: rank 1 raised KeyError: 'lr'",
        "",
        f"  where  train.py:4 in step, pid {pid}",
        "  then   rank 0 was stopped; it is not at fault",
        "",
        "  rank 1 said:",
        *(f"    | {line}" for line in traceback),
        "",
        f"  logs   {log}:1",
        "  more   rallypoint explain rank-raised",
    ], result.everything


@pytest.mark.usefixtures("without_torch")
def test_alone_on_the_terminal_a_traceback_is_printed_once(run: Run, write: Write) -> None:
    program = write("train.py", "def step():\n    raise KeyError('lr')\n\nstep()\n")
    result = run(program)
    assert result.rc == 1
    assert result.err.count("Traceback (most recent call last)") == 1, result.everything
    assert "runpy" not in result.err, result.everything
    assert "rallypoint/launch" not in result.err, result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("way", [("--fresh",), ("--no-python",)], ids=["fresh", "program"])
def test_what_cannot_start_is_said_once(run: Run, tmp_path: Path, way: tuple[str, ...]) -> None:
    result = run(*way, "-n", "2", "missing.py", cwd=tmp_path)
    assert result.rc != 0
    assert result.codes == ["start-failed"], result.everything
    assert len(result.err.splitlines()) <= 12, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_syntax_error_is_said_once(run: Run, write: Write) -> None:
    result = run("-n", "2", write("train.py", "print('a'\n"))
    assert result.rc == 1
    assert result.codes == ["start-failed"], result.everything
    assert result.err.count("was never closed") <= 2, (
        result.everything
    )  # the headline, and Python's own words


# --- kinds of programs
# ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_a_module(run: Run, write: Write, way: tuple[str, ...]) -> None:
    write("job/__init__.py", "import sys\nseen = sys.argv[0]\n")
    program = write(
        "job/train.py",
        "import sys\nimport job\nprint(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], job.seen)\n"
        "from . import seen\nassert sys.modules['__main__'].__dict__ is globals()\n",
    )
    folder = program.parent.parent
    arguments = ["--lr", "0.1", "-m"]
    result = run(*way, "-n", "2", "-m", "job.train", *arguments, cwd=folder)
    plain = subprocess.run(
        [sys.executable, "-m", "job.train", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.rc == 0, result.everything
    assert [*result.of(0), *result.of(1)] == plain.stdout.splitlines() * 2, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_program_that_is_not_python(run: Run, write: Write) -> None:
    program = write(
        "program.sh", '#!/bin/bash\necho "$RANK of $WORLD_SIZE: $*"; exit $((RANK * 4))\n'
    )
    program.chmod(0o755)
    result = run(
        "--no-python", "--nproc_per_node=2", "./program.sh", "-x", "a b", cwd=program.parent
    )
    assert result.of(0) == ["0 of 2: -x a b"]
    assert result.of(1) == ["1 of 2: -x a b"]
    assert result.rc == 4, result.everything
    assert result.codes == ["rank-exited"], result.everything
    found = run("--no-python", "-n", "2", "/bin/bash", "-c", "echo $LOCAL_RANK")
    assert (found.rc, found.of(0), found.of(1)) == (0, ["0"], ["1"]), found.everything


@pytest.mark.usefixtures("without_torch")
def test_run_path(run: Run, write: Write) -> None:
    program = write("train.py", "import sys\nprint(__name__, sys.argv[1:])\n")
    result = run("--fresh", "--run-path", "-n", "2", program, "--run-path")
    assert result.rc == 0, result.everything
    assert result.of(1) == ["__main__ ['--run-path']"]


@pytest.mark.usefixtures("without_torch")
def test_variables_stand_in_for_flags(run: Run, write: Write) -> None:
    program = write(
        "train.py",
        "import os\nprint(os.environ['WORLD_SIZE'], os.environ['ROLE_NAME'], os.environ['TORCHELASTIC_RUN_ID'])\n",
    )
    env = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "trainer", "PET_RDZV_ID": "job8"}
    result = run("--role", "tester", program, env=env)
    assert (result.rc, result.of(0), result.of(1)) == (0, ["2 tester job8"], ["2 tester job8"]), (
        result.everything
    )


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_where_the_script_lies(run: Run, write: Write, way: tuple[str, ...]) -> None:
    """A path with blanks, relative, by a symbolic link, without the right to execute; its own
    folder is first on the path.
    """
    program = write(
        "a folder/the script.py",
        "import os, sys, beside\nprint([sys.argv[0], __file__, sys.path[0], os.getcwd(), beside.x])\n",
    )
    write("a folder/beside.py", "x = 7\n")
    program.chmod(0o444)
    folder = program.parent.parent
    (folder / "a link").mkdir()
    typed = "a link/to it.py"
    (folder / typed).symlink_to("../a folder/the script.py")
    result = run(*way, "-n", "2", typed, cwd=folder)
    plain = subprocess.run(
        [sys.executable, typed], cwd=folder, capture_output=True, text=True, check=True
    )
    assert result.rc == 0, result.everything
    assert [*result.of(0), *result.of(1)] == plain.stdout.splitlines() * 2, result.everything


@WAYS
def test_modules_beside_the_script_do_not_get_between_torch_and_its_imports(
    run: Run, write: Write, way: tuple[str, ...]
) -> None:
    for name in (
        "socket",
        "logging",
        "select",
        "queue",
        "typing_extensions",
        "msgspec",
        "rallypoint",
    ):
        write(f"{name}.py", "raise RuntimeError('the user\\'s own')\n")
    write("random.py", "mine = True\n")
    write("re.py", "mine = True\n")
    write("torch_utils.py", "mine = True\n")
    program = write("train.py", "import torch_utils\nprint(torch_utils.mine)\n")
    env = (
        {"PYTHONPATH": python_path(WITHOUT_TORCH)} if way else {}
    )  # the program of a fresh rank imports none
    result = run(*way, "-n", "2", "train.py", cwd=program.parent, env=env)
    assert (result.rc, result.of(0), result.of(1)) == (0, ["True"], ["True"]), result.everything


@pytest.mark.usefixtures("without_torch")
def test_what_depends_on_main_works(run: Run, tmp_path: Path) -> None:
    result = run("like_python.py", tmp_path / "unclosed")
    assert result.lines == [
        "set_start_method",
        "classes of __main__",
        "multiprocessing fork",
        "multiprocessing spawn",
        "multiprocessing forkserver",
        "thread joined",
        "atexit",
    ], result.everything
    assert (result.rc, result.err) == (0, ""), result.everything
    assert (tmp_path / "unclosed").read_text() == "flushed"


@pytest.mark.slow
def test_loaders_of_every_kind(run: Run) -> None:
    result = run("loaders.py")
    assert result.lines == [
        "torch.save",
        "DataLoader fork",
        "DataLoader spawn",
        "DataLoader forkserver",
    ], result.everything
    assert (result.rc, result.err) == (0, ""), result.everything


# --- words
# --------------------------------------------------------------------------------------------------

WORDS = """\
import os, sys
rank = os.environ['LOCAL_RANK']
print(f'out {rank}')
print(f'err {rank}', file=sys.stderr)
print('kept a' if rank == '1' else 'dropped')
"""


def under(folder: Path) -> dict[str, str]:
    """The files below a folder, with the folder of the run, which has a random name, left out."""
    (run_folder,) = folder.iterdir()
    assert run_folder.name.startswith("job7_")
    return {
        str(path.relative_to(run_folder)): path.read_text()
        for path in sorted(run_folder.rglob("*"))
        if path.is_file()
    }


LOGGED = ("-n", "2", "--rdzv-id", "job7", "-r", "0:3", "-t", "1:1")


# Those of a new interpreter are compared with torchrun's in the next test.
@pytest.mark.usefixtures("without_torch")
def test_redirects_and_tee(run: Run, write: Write, tmp_path: Path) -> None:
    result = run(*LOGGED, "--log-dir", tmp_path / "logs", write("train.py", WORDS))
    assert result.rc == 0, result.everything
    assert (result.of(0), result.of(1)) == ([], ["out 1", "kept a"]), result.everything
    assert result.err.splitlines() == ["[1] err 1"], result.everything
    assert under(tmp_path / "logs") == {
        "attempt_0/0/stdout.log": "out 0\ndropped\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stdout.log": "out 1\nkept a\n",
    }


def test_the_files_are_those_of_torchrun(run: Run, write: Write, tmp_path: Path) -> None:
    program = write("train.py", WORDS)
    filters: tuple[str, ...] = ()
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    if "--duplicate-stdout-filters" in (Path(torch.origin).parent / "distributed/run.py").read_text(
        "utf-8"
    ):  # torch 2.8 has none
        filters = ("--duplicate-stdout-filters", "kept", "--duplicate-stderr-filters", "err 0")
    flags = ("--nproc-per-node", "2", *MEETING, "-r", "0:3", "-t", "1:3", *filters)
    theirs = run(*flags, "--log-dir", tmp_path / "theirs", program, launcher=TORCHRUN)
    env = {"PYTHONPATH": python_path(WITHOUT_TORCH)}
    ours = run("--fresh", *flags, "--log-dir", tmp_path / "ours", program, env=env)
    assert (theirs.rc, ours.rc) == (0, 0), theirs.everything + ours.everything
    expected, found = under(tmp_path / "theirs"), under(tmp_path / "ours")
    assert set(found) == set(expected)
    assert {name: text for name, text in found.items() if "filtered" not in name} == {
        name: text for name, text in expected.items() if "filtered" not in name
    }
    filtered = {"attempt_0/filtered_stdout.log", "attempt_0/filtered_stderr.log"}
    assert {name for name in found if "filtered" in name} == (filtered if filters else set())
    for name in filtered if filters else ():
        assert re.sub(r"^\[.*?\]:? ?", "", found[name]) == re.sub(
            r"^\[.*?\]:? ?", "", expected[name]
        ), (found[name], expected[name])


@pytest.mark.usefixtures("without_torch")
def test_only_some_ranks_on_the_terminal(run: Run, write: Write) -> None:
    result = run("-n", "3", "--local-ranks-filter", "1", write("train.py", WORDS))
    assert result.lines == ["[1] out 1", "[1] kept a"], result.everything
    assert result.err.splitlines() == ["[1] err 1"], result.everything
    assert sorted((result.run_dir / "rank0.log").read_text().splitlines()) == [
        "dropped",
        "err 0",
        "out 0",
    ]


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_any_bytes_get_through_and_stdin_goes_to_rank_0(
    run: Run, write: Write, way: tuple[str, ...]
) -> None:
    program = write(
        "train.py",
        "import sys\nprint('grüße 你好')\nsys.stdout.buffer.write(b'\\xff\\x00\\x80\\n')\n"
        "print(repr(sys.stdin.read()))\nprint('last', end='')\n",
    )
    result = run(*way, "-n", "2", program, errors="surrogateescape", stdin="one\ntwo\n")
    assert result.rc == 0, result.everything
    raw = result.out.encode(errors="surrogateescape")
    for rank, read in ((b"[0] ", b"'one\\ntwo\\n'"), (b"[1] ", b"''")):
        lines = [line[4:] for line in raw.splitlines() if line.startswith(rank)]
        assert lines[0].decode() == "grüße 你好"
        assert lines[1] == b"\xff\x00\x80"
        assert lines[2:] == [read, b"last"]


@pytest.mark.usefixtures("without_torch")
def test_ten_ranks_write_whole_lines(run: Run, write: Write) -> None:
    program = write(
        "train.py", "import os\nfor n in range(50):\n    print(os.environ['RANK'], n, 'x' * 100)\n"
    )
    result = run("-n", "10", program)
    assert result.rc == 0
    for rank in range(10):
        assert result.of(rank) == [f"{rank} {n} {'x' * 100}" for n in range(50)]


# --- attempts
# --------------------------------------------------------------------------------------------------


# That a group meets again in every attempt, test_supervision.py shows.
COUNTS = """\
import os, sys
import rallypoint
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(attempt)
rallypoint.connect().barrier(f"printed in attempt {attempt}", 2)
sys.exit(3)
"""


@pytest.mark.usefixtures("without_torch")
def test_attempts_are_counted(run: Run, write: Write) -> None:
    program = write("train.py", COUNTS)
    result = run("-n", "2", "--max-restarts", "1", program)
    assert result.rc == 3, result.everything
    assert (result.of(0), result.of(1)) == (["0", "1"], ["0", "1"]), result.everything


# --- signals
# --------------------------------------------------------------------------------------------------

HANDLING = """\
import os, signal, sys, time
def tidy(number, frame):
    print('tidied after', signal.Signals(number).name, flush=True)
    sys.exit(0)
for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    if signal.getsignal(one) is not signal.SIG_IGN:
        signal.signal(one, tidy)
print('ready', signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)
time.sleep(60)
"""


def when_ready(*numbers: signal.Signals, ranks: int = 2) -> Any:
    """Send the launcher signals as soon as all ranks are ready."""

    def act(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for _ in range(ranks):
            line = process.stdout.readline()
            assert b"ready" in line, line
        for number in numbers:
            process.send_signal(number)

    return act


def tidied(result: Result, number: signal.Signals) -> None:
    assert result.rc == 128 + number, result.everything
    assert sorted(result.lines) == [f"[{rank}] tidied after {number.name}" for rank in range(2)], (
        result.everything
    )
    assert "interrupted" in result.err, result.everything


# A new interpreter is sent SIGINT below, where its launcher had it blocked before.
@pytest.mark.usefixtures("without_torch")
def test_a_rank_may_tidy_up(run: Run, write: Write) -> None:
    result = run("-n", "2", write("train.py", HANDLING), act=when_ready(signal.SIGINT))
    tidied(result, signal.SIGINT)


@pytest.mark.usefixtures("without_torch")
def test_the_signals_that_stop_the_job_can_be_chosen(run: Run, write: Write) -> None:
    result = run(
        "-n",
        "2",
        "--signals-to-handle",
        "SIGUSR1",
        write("train.py", HANDLING),
        act=when_ready(signal.SIGUSR1),
    )
    assert result.rc == 128 + signal.SIGUSR1, result.everything
    assert len([line for line in result.lines if "tidied" in line]) == 2, result.everything


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_nohup(run: Run, write: Write, way: tuple[str, ...]) -> None:
    """SIGHUP was ignored when the job began: it stays so, in the launcher and in the ranks. SIGTERM
    lets them tidy up.
    """

    def before() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    seen: list[bytes] = []

    def act(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        seen.extend(process.stdout.readline() for _ in range(2))
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)

    result = run(*way, "-n", "2", write("train.py", HANDLING), before=before, act=act)
    assert sorted(seen) == [b"[0] ready True\n", b"[1] ready True\n"]
    tidied(result, signal.SIGTERM)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("way", "number"),
    [((), signal.SIGTERM), (("--fresh",), signal.SIGINT)],
    ids=["template-SIGTERM", "fresh-SIGINT"],
)
def test_a_blocked_signal_stops_the_job(
    run: Run, write: Write, way: tuple[str, ...], number: signal.Signals
) -> None:
    """A thread that blocks signals had started the launcher, which was deaf to SIGTERM then."""

    def before() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})

    result = run(
        *way, "-n", "2", write("train.py", HANDLING), before=before, act=when_ready(number)
    )
    tidied(result, number)


# --- the terminal
# --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
@WAYS
def test_one_rank_has_the_terminal_itself(
    tmp_path: Path, write: Write, way: tuple[str, ...]
) -> None:
    program = write(
        "train.py",
        "import os, sys\nprint([os.isatty(n) for n in range(3)], os.environ.get('TERM'))\nname = input('name? ')\nprint('hello', name)\n",
    )
    status, shown = on_terminal([*way, program], tmp_path, typed=b"Ada\n")
    assert status == 0, shown
    assert "[True, True, True] xterm" in shown
    assert "name? " in shown
    assert "hello Ada" in shown
    assert "[0]" not in shown


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
def test_several_ranks_on_a_terminal(tmp_path: Path, write: Write) -> None:
    """Rank 0 has the keyboard; the words of all come with their rank, and the live line
    goes away.
    """
    program = write(
        "train.py",
        "import os\nif os.environ['RANK'] == '0':\n    print('hello', input())\nprint('done')\n",
    )
    status, shown = on_terminal(["-n", "2", program], tmp_path, typed=b"Ada\n")
    assert status == 0, shown
    for line in ("[0] hello Ada", "[0] done", "[1] done"):
        assert line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown), shown
