"""Every page's script produces its code: the erroneous example of an explanation is compiled, so to
speak.

A page names its command in `<!-- produces: ... -->` and has its files as fenced blocks, "python
NAME" after the fence. The command is `rallypoint run ...`, whose report has the code in brackets,
or `python script.py`, a plain program that an exception of ours leaves: then Python prints the code
in the last line of the traceback. A program that calls `rallypoint doctor` has it below the line of
the check.

Ranks that are started without any option but their number are forked from a warm template in place
of the command, and plain programs are run in one process: torch, or rallypoint, would be imported
for each page.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

from rallypoint.diagnosis.catalogue import CATALOGUE, page

from ..one_process import OneProcess
from .conftest import RunWarm

DEADLINE = 100.0  # seconds for one script; most take two

_COMMAND = re.compile(r"^<!-- produces: (.+) -->$", re.MULTILINE)
_FILE = re.compile(r"^```python (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEEDS_TORCH = ("torch", "Tensor", '"doctor"')
_ALSO = {"spawn-inside-run": "rallypoint run -n 1 script.py\n"}  # what else the report says
_PLAIN = re.compile(r"rallypoint run -n (\d) script\.py")
# Their reports have the command in them, or they are of the launcher's own start or end.
_BY_COMMAND = {"spawn-inside-run", "start-failed", "port-in-use", "launcher-died"}
PAGES = {code: found.group(1) for code in CATALOGUE if (found := _COMMAND.search(page(code)))}


def _starts_ranks(code: str) -> bool:
    return "rallypoint run" in PAGES[code]


def _asks_the_doctor(code: str) -> bool:
    return '"doctor"' in page(code)


def _run(code: str, folder: pathlib.Path) -> tuple[int, str]:
    """Run the command of a page: its exit status, and all that it says."""
    python = shlex.quote(sys.executable)
    command = re.sub(r"(?<![\w/-])rallypoint run", f"{python} -P -m rallypoint run", PAGES[code])
    command = re.sub(r"(?<![\w/-])python script", f"{python} script", command)
    command = command.replace("PYTHONPATH=.", 'PYTHONPATH=".:$PYTHONPATH"')
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
    }
    environment = {**kept, "XDG_STATE_HOME": str(folder / "state")}
    job = subprocess.Popen(
        ["/bin/bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        told, _ = job.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)
        told, _ = job.communicate(timeout=DEADLINE)
        pytest.fail(f"not ended within {DEADLINE} s:\n{told}")
    assert job.returncode >= 0, f"the launcher was ended by signal {-job.returncode}:\n{told}"
    return job.returncode, told


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=pytest.mark.torch if _starts_ranks(code) else ()) for code in PAGES],
)
def test_the_script_of_a_page_produces_its_code(
    code: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    files = _FILE.findall(page(code))
    for name, text in files:
        (tmp_path / name).write_text(text)
    text = "".join(text for _, text in files)
    plain = _PLAIN.fullmatch(PAGES[code])
    if plain and code not in _BY_COMMAND:
        run_warm: RunWarm = request.getfixturevalue("run_warm")
        result = run_warm(tmp_path / "script.py", nproc=int(plain[1]))
        status, told = result.rc, result.out + result.err
    elif PAGES[code] == "python script.py" and not re.search(r"import subprocess|os\.exec", text):
        one_process: OneProcess = request.getfixturevalue("one_process")
        done = one_process.run(tmp_path / "script.py")
        status, told = done.returncode, done.stdout + done.stderr
    else:
        needs_torch = any(word in text for word in _NEEDS_TORCH)
        request.getfixturevalue("torch_in_parts" if needs_torch else "without_torch")
        status, told = _run(code, tmp_path)
    label = CATALOGUE[code].label
    if _starts_ranks(code):
        assert f"{label}[{code}]: " in told, told
        assert _ALSO.get(code, "") in told, told
    elif _asks_the_doctor(code):
        assert re.search(rf"^ +more   rallypoint explain {code}$", told, re.MULTILINE), told
        assert status == ("\n[x]" in f"\n{told}"), told
        return
    else:
        # Python 3.13 prints each line of a group's message with the mark of its level.
        assert re.search(rf"^[ |]+more   rallypoint explain {code}$", told, re.MULTILINE), told
    assert (status == 0) == (label == "warning" or code == "cuda-in-template"), told
    assert "internal-error" not in told or code == "internal-error"
