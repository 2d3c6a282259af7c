"""What a user reads when a call of `launch` goes wrong: each program, and every word of it.

A story is a file of `launch_stories/`: the program, the command, and what it prints.
`UPDATE_STORIES=1 pytest` writes the last part anew, and a person reads it. Times, pids and folders
are left out, and of our own frames the lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from .job import SLOW_TORCH

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

STORIES = sorted((Path(__file__).parent / "launch_stories").glob("*.txt"))
COMMAND = "$ python program.py\n"
DEADLINE = 100.0

PRINTED_ALIKE = """\
import sys, traceback
sys.excepthook = lambda kind, error, tb: traceback.print_exception(error)  # the interpreter's own, of 3.11, indents a group otherwise
"""

_LEFT_OUT = (
    (SLOW_TORCH, ""),
    (re.compile(r"^[ |]*[~^]+\n", re.MULTILINE), ""),
    (
        re.compile(r"[ ]+$", re.MULTILINE),
        "",
    ),  # marks below a source line: other Pythons set them otherwise
    (re.compile(r'File "[^"]*/(rallypoint/[^"]+)", line \d+, (in \w+)\n[ |]+.*'), r'File "\1" \2'),
    (re.compile(r'File "[^"]*/lib/python[^"/]*/([^"]+)", line \d+'), r'File "\1", line N'),
    (re.compile(r"\bpid \d+"), "pid PID"),
    (
        re.compile(r" {3,}\+\d+\.\d+s"),
        "   +TIMEs",
    ),  # they end in one column: before one of ten seconds a shorter one has more blanks
    (re.compile(r"\+\d+\.\d+ s"), "+TIME s"),
    (re.compile(r"\S+/runs/\d{8}-\d{6}-[0-9a-f]{16}-\d+"), "RUN"),
    (re.compile(r"Connection (closed|reset) by peer"), "Connection lost to peer"),
)


def told(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RALLYPOINT", "PYTEST"))
    }
    (folder / "sitecustomize.py").write_text(PRINTED_ALIKE)
    path = os.pathsep.join([str(folder), environ.get("PYTHONPATH", "")])
    environ |= {"XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "100", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    text = done.stdout.replace(f"{folder}/", "")
    for pattern, instead in _LEFT_OUT:
        text = pattern.sub(instead, text)
    return f"{text}(exit status {done.returncode})\n"


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_whole_text(story: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program, _, text = story.read_text(encoding="utf-8").partition(COMMAND)
    if "torch" not in program:
        request.getfixturevalue("without_torch")
    elif version("torch").startswith(("2.8.", "2.9.")):
        pytest.skip("gloo of torch 2.8 and 2.9 writes a line of its own into the logs of ranks")
    found = told(program, tmp_path)
    if os.environ.get("UPDATE_STORIES"):
        story.write_text(program + COMMAND + found, encoding="utf-8")
    assert (text if not os.environ.get("UPDATE_STORIES") else found) == found


def test_there_are_stories() -> None:
    assert len(STORIES) > 15
