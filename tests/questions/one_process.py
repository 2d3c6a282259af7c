"""Runs programs one after the other in one process, each as `__main__`: they share what the import
of torch takes, there and in the template of `launch`. Their names come by standard input, an answer
for each goes to standard output.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback


def run(program: str) -> dict[str, object]:
    """Return the exit status and what the program, and the processes that it started, have said."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        status = 0
        sys.argv[:] = [program]
        sys.path[0] = os.path.dirname(program)
        try:
            runpy.run_path(program, run_name="__main__")
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        said = {}
        for name, file in (("stdout", out), ("stderr", err)):
            file.seek(0)
            said[name] = file.read().decode()
        return {"status": status, **said}


if __name__ == "__main__":
    with open(os.dup(1), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(run(line.rstrip("\n"))), file=answers, flush=True)
