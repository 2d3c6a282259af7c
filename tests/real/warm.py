"""Runs programs in ranks of one warm template, one job after the other: what torch's import costs,
all of them pay once. They are started by `rallypoint.launch`, not by `rallypoint run`; how they are
judged is the same.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from .job import (
    DEADLINE,
    GLOO,
    GONE_AFTER,
    SCRIPTS,
    SLOW_TORCH,
    Result,
    end_of,
    environment,
    kill,
    left_behind,
    processes,
)


def children(pid: int) -> set[int]:
    """Processes whose parent this is."""
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:  # it has just ended
        return set()


class WarmLauncher:
    """A process that calls `rallypoint.launch`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = env
        self._calls = 0
        self._start()

    def _start(self) -> None:
        self._marker = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPTS / "warm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(self._folder, self._marker, self._env),
            start_new_session=True,
        )

    def run(self, program: Path, *arguments: str, nproc: int = 2, **options: object) -> Result:
        """Run a program to its end, in its folder. The exit status is 0 or 1."""
        if self._process.poll() is not None:  # after a failure
            self._start()
        self._calls += 1
        began = time.monotonic()
        state = self._folder / f"state{self._calls}"
        asked = {
            "state": str(state),
            "folder": str(program.parent),
            "program": [str(program), *arguments],
            "options": {"nproc": nproc, **options},
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], DEADLINE)[0]:
            kill(self._marker)
            self._process.communicate()
            raise AssertionError(f"{program.name} was not over after {DEADLINE:g} s")
        answer = self._process.stdout.readline()
        assert answer, f"{program.name} has ended the launcher: status {self._process.wait(10)}"
        found = json.loads(answer)
        return Result(
            found["rc"],
            GLOO.sub("", found["out"]),
            SLOW_TORCH.sub("", found["err"]),
            time.monotonic() - began,
            state,
        )

    def left_behind(self) -> list[str]:
        """What there is beside the launcher's own processes, after a moment for it to be gone."""
        until = time.monotonic() + GONE_AFTER
        while (left := self._beside_the_launcher()) and time.monotonic() < until:
            time.sleep(0.02)
        return left

    def _beside_the_launcher(self) -> list[str]:
        """Every process that is neither the launcher, nor an agent of it, nor a child of one."""
        agents = {*children(self._process.pid)}
        own = {self._process.pid, *agents}.union(*map(children, agents))
        return [line for line in processes(self._marker) if int(line.split()[0]) not in own]

    def close(self) -> None:
        """End it, and all that it has started with it."""
        try:
            self._process.communicate(timeout=GONE_AFTER)
            assert left_behind(self._marker) == []
        finally:
            end_of(self._process, self._marker)
