"""Starts one program after the other with `rallypoint.launch`: all their ranks are forked from one template. `tests/real/warm.py` asks for them."""

import io
import json
import os
import runpy
import sys
import traceback

import rallypoint


def run_program(path: str, *arguments: str) -> None:
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def answer(state: str, folder: str, program: list[str], options: dict[str, object]) -> dict[str, object]:
    os.environ["XDG_STATE_HOME"] = state
    os.chdir(folder)
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    failed = False
    try:
        rallypoint.launch(run_program, program, **options)
    except rallypoint.WorkerError as error:
        failed = True
        print(error, file=sys.stderr)
    except Exception:
        failed = True
        traceback.print_exc()
    return {"rc": int(failed), "out": sys.stdout.getvalue(), "err": sys.stderr.getvalue()}


if __name__ == "__main__":
    told = sys.stdout
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=told, flush=True)
