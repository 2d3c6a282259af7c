"""Command lines of `run`, as what they ask for."""

from __future__ import annotations

import pytest

from rallypoint.cli import args, run_options
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options


def parse(line: str | list[str], **environ: str) -> Options:
    argv = line.split() if isinstance(line, str) else line
    return run_options.read(args.take_apart(argv, environ))


def refused(line: str | list[str], **environ: str) -> UsageError:
    argv = line.split() if isinstance(line, str) else line
    with pytest.raises(UsageError) as refusal:
        run_options.read(args.take_apart(argv, environ))
    return refusal.value
