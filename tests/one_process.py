"""Runs programs one after the other in one process, each as `__main__` and in its folder: they
share what the import of torch takes, there and in the template of `launch`.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

PARTS = Path(__file__).parent / "torch_without_compiler"

DEADLINE = 100.0
"""Seconds for one program, on a busy machine; most take three."""


def environment(state: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT")}
    return {**kept, "XDG_STATE_HOME": str(state)}


class OneProcess:
    """A process in which programs that import torch are run one after the other."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._start()

    def _start(self) -> None:
        env = environment(self._state)
        if not os.environ.get("RALLYPOINT_WHOLE_TORCH"):
            paths = filter(None, [str(PARTS), env.get("PYTHONPATH")])
            env["PYTHONPATH"] = os.pathsep.join(paths)
        # Without a pool of threads, which no process that is forked after it could use.
        env["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )

    def run(self, program: Path) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        if self._process.poll() is not None:  # after a failure
            self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(program, file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], DEADLINE)[0]:
            self._process.kill()
            self._process.communicate()
            raise AssertionError(f"{program.name} was not over after {DEADLINE:g} s")
        answer = self._process.stdout.readline()
        assert answer, f"{program.name} has ended the process: status {self._process.wait(10)}"
        found = json.loads(answer)
        return subprocess.CompletedProcess(
            program, found["status"], found["stdout"], found["stderr"]
        )

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=DEADLINE)


def _run(program: str) -> dict[str, object]:
    """Return the exit status and what the program, and the processes that it started, have said."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        status, before = 0, dict(os.environ)
        sys.argv[:] = [program]
        sys.path[0] = os.path.dirname(program)
        os.chdir(sys.path[0])
        try:
            runpy.run_path(program, run_name="__main__")
        except BaseException:
            status = 1
            traceback.print_exc()
        os.environ.clear()
        os.environ.update(before)
        sys.stdout.flush()
        sys.stderr.flush()
        said = {}
        for name, file in (("stdout", out), ("stderr", err)):
            file.seek(0)
            said[name] = file.read().decode()
        return {"status": status, **said}


if __name__ == "__main__":
    # Programs come by standard input, an answer for each goes to standard output.
    with open(os.dup(1), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(_run(line.rstrip("\n"))), file=answers, flush=True)
