"""Runs several programs one after the other in every rank, each as `__main__`: what they import is imported once. stderr says
which one begins. An argument is a program with its own arguments."""

import os
import runpy
import shlex
import sys

for command in sys.argv[1:]:
    program, *arguments = shlex.split(command)
    print("--", program, file=sys.stderr, flush=True)
    sys.argv[:] = [program, *arguments]
    runpy.run_path(os.path.join(os.path.dirname(__file__), program), run_name="__main__")
