"""Runs many commands quickly, each in a fork of a process that has imported the command line: JSON
on stdin, JSON on stdout.

The input is a list of (arguments, variables); the output is a list of (exit status, stdout,
stderr).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from importlib.metadata import entry_points


def run(arguments: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(variables)
            sys.argv = ["rallypoint", *arguments]
            status = 99
            try:
                status = main() or 0
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


(script,) = entry_points(group="console_scripts", name="rallypoint")
main = script.load()
tasks = json.load(sys.stdin)
saved = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
saved_errors = os.dup(2)
os.dup2(1, 2)
# What the commands import is imported once: that of a plan, of an error, of its JSON and of logs.
for words in (
    ["run", "--fresh", "--dry-run", __file__],
    ["run", "--stall", ""],
    ["run", "--error-format", "json", "--stall", ""],
    ["explain", __file__],
):
    sys.argv = ["rallypoint", *words]
    with contextlib.suppress(SystemExit):
        main()
sys.stderr.flush()
os.dup2(saved_errors, 2)
sys.stdout.flush()
os.dup2(saved, 1)
json.dump([run(*task) for task in tasks], sys.stdout)
