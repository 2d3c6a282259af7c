"""The end of a forked rank: what a program counts on when it ends, compared with plain `python`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..python_path import python_path
from .conftest import Run, Write
from .job import DEADLINE, environment

pytestmark = pytest.mark.usefixtures("torch_in_parts")

ENDINGS = Path(__file__).parent / "scripts" / "endings.py"


# What Python 3.12 and 3.13 say of an exit status that C cannot hold; 3.13's words depend on the
# caller's frames.
OVERFLOW = (
    r"|^OverflowError: Python int too large to convert to C long\n"
    r"|^Exception ignored on threading shutdown:\n"
    r"(?:Traceback.*\n(?:  .*\n)+)?(?:Overflow|System)Error: .*\n"
)


def left(folder: Path) -> dict[str, str]:
    """What the programs have left, by file; without what differs from process to process."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    return {
        str(path.relative_to(folder)): re.sub(
            r"(?m) at 0x[0-9a-f]+|^(?:USDT|ERROR):.*\n" + OVERFLOW, "", path.read_text()
        ).replace(str(folder), "FOLDER")
        for path in files
    }


def test_a_rank_ends_as_a_program_does(run: Run, tmp_path: Path) -> None:
    """Each rank spent 0.27 s of processor time on taking apart what the template had imported. That
    is left out now; all else that happens at the end of a program happens still: exit status,
    finalizers, handlers, files, C's streams."""
    alone, rank = tmp_path / "alone", tmp_path / "rank"
    alone.mkdir()
    rank.mkdir()
    given = environment(tmp_path, "alone", {})
    python = [sys.executable, "-u", str(ENDINGS), str(alone)]
    with subprocess.Popen(python, stdin=subprocess.DEVNULL, env=given) as process:
        result = run("-n", "1", ENDINGS, rank)
        assert process.wait(DEADLINE) == 0
    assert (result.rc, result.out, result.err) == (0, "", ""), result.everything
    assert left(rank) == left(alone)


@pytest.mark.usefixtures("without_torch")
def test_the_templates_modules_are_left_to_the_kernel(run: Run, write: Write) -> None:
    """A finalizer of a module that the template has imported would run if the interpreter took that
    module apart.
    """
    write(
        "shared/pkg-packages/held.py",
        "class Held:\n    def __del__(self): print('taken apart')\nheld = Held()\n",
    )
    write("own.py", "class Own:\n    def __del__(self): print('own taken apart')\n")
    program = write("train.py", "import held, own\nown.own = own.Own()\n")
    folder = program.parent / "shared" / "pkg-packages"
    result = run(
        "-n", "1", "--preload", "held,own", program, env={"PYTHONPATH": python_path(folder)}
    )
    assert (result.rc, result.out) == (0, "own taken apart\n"), result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_preloaded_module_may_ignore_the_end_of_children(run: Run, write: Write) -> None:
    """The kernel reaped the ranks then, and the template ended with a traceback of its own."""
    write("own.py", "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")
    ends = "import own, signal, sys\nsys.exit(2 + signal.getsignal(signal.SIGCHLD))\n"
    result = run("-n", "1", "--preload", "own", write("train.py", ends))
    assert (result.rc, "exited with code 3" in result.err) == (3, True), result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_preloaded_module_may_take_epoll_away(run: Run, write: Write) -> None:
    """As gevent's monkey.patch_all() does: it was told as a death of rallypoint's template."""
    write("own.py", "import select\ndel select.epoll\n")
    result = run("-n", "1", "--preload", "own", write("train.py", "print('here')\n"))
    assert (result.rc, result.out) == (0, "here\n"), result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("ends", ["os.abort()", "os._exit(3)"])
def test_a_module_whose_import_ends_the_template_is_named(
    run: Run, write: Write, ends: str
) -> None:
    """It was told as a fault of rallypoint's own, and no module was named."""
    write("own.py", f"import os\n{ends}\n")
    result = run("--preload", "own", write("train.py", ""))
    assert (result.rc, result.codes) == (1, ["start-failed"]), result.everything
    assert "import own" in result.err, result.everything


@pytest.mark.usefixtures("without_torch")
def test_an_interpreter_that_does_not_start_is_no_fault_of_ours(run: Run, write: Write) -> None:
    """With --fresh it was told as a death of rallypoint's template, exit status 70."""
    ends = "import os, sys\nif '-c' in sys.orig_argv: os._exit(3)\n"
    path = python_path(write("start/sitecustomize.py", ends).parent)
    result = run("--fresh", "-n", "2", write("train.py", ""), env={"PYTHONPATH": path})
    assert (result.rc, result.codes) == (1, ["start-failed"]), result.everything


def test_a_torch_that_the_server_of_its_store_cannot_import_is_no_fault_of_ours(
    run: Run, write: Write
) -> None:
    """With --fresh it was told as a death of rallypoint's c10d host, exit status 70."""
    torch = write("broken/torch/__init__.py", "raise ImportError('libcudart.so.12')\n").parent
    path = python_path(torch.parent)
    program = write("train.py", "import time\ntime.sleep(60)\n")
    result = run("--fresh", "-n", "2", program, env={"PYTHONPATH": path})
    assert (result.rc, result.codes) == (1, ["start-failed"]), result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_profilers_end_is_the_interpreters(run: Run, write: Write) -> None:
    """`-m cProfile` writes its table, and a library that came by LD_PRELOAD may have handlers older
    than the fork.
    """
    program = write("train.py", "print('trained')\n")
    result = run("-n", "1", "-m", "cProfile", program)
    assert result.rc == 0, result.everything
    assert "function calls" in result.out, result.everything
    result = run("-n", "1", program, env={"LD_PRELOAD": "libc.so.6"})
    assert (result.rc, result.out) == (0, "trained\n"), result.everything


@pytest.mark.usefixtures("without_torch")
def test_the_same_failure_is_said_in_one_line_and_ends_the_restarts(run: Run, write: Write) -> None:
    """`--max-restarts` and a typing error printed the same fourteen lines after each attempt."""
    result = run("-n", "2", "--max-restarts", "9", write("train.py", "raise KeyError('always')\n"))
    assert result.rc == 1, result.everything
    assert result.err.count("error[rank-raised]") == 1, result.everything
    assert result.err.count("rallypoint: the same again: ") == 2, result.everything
    assert "restarting both ranks, attempt 2 of 9" in result.err, result.everything
    assert "attempt 3" not in result.err, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_restart_without_its_working_directory_is_one_that_cannot_start(
    run: Run, write: Write
) -> None:
    """Ranks ended with a traceback of ours then, which was told as an exception of the program's."""
    program = write("job/train.py", "import os, shutil\nshutil.rmtree(os.getcwd())\n1 / 0\n")
    result = run("--max-restarts", "1", program.name, cwd=program.parent)
    assert (result.rc, result.codes) == (1, ["rank-raised", "start-failed"]), result.everything


@pytest.mark.usefixtures("without_torch")
def test_the_atexit_handlers_of_a_rank_that_raised_may_save_something(
    run: Run, write: Write
) -> None:
    """As what keeps track of experiments does, and a writer of checkpoints in the background: the
    rank was ended by SIGTERM as soon as its exception was reported.
    """
    program = write(
        "train.py",
        "import atexit, os, time\n"
        "def upload():\n"
        "    time.sleep(1)\n"
        "    print('uploaded')\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(upload)\n"
        "    raise ValueError('bad')\n"
        "time.sleep(60)\n",
    )
    result = run("-n", "2", program)
    assert (result.rc, result.out) == (1, "[1] uploaded\n"), result.everything
    assert "rank 1 raised ValueError: bad" in result.err, result.everything
