"""The commands: their options, the kind of their words, and the text of `--help` around the
options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from rallypoint.cli import options
from rallypoint.cli.options import Option

Words = Literal["program", "own", "message", "none"]
"""Kind of the words that are no options: a program and its arguments, behind our options and
untouched; the command's own words, among its options; the same, and dashes may begin them; none.
"""


def _nothing() -> str:
    return ""


def _checks() -> str:
    from rallypoint.diagnosis.doctor.doctor import NAMES

    return f"The checks: {', '.join(NAMES)}."


def _run_ends() -> str:
    return (
        "The exit status is 0 when every rank ended with 0, else that of the first cause: 1 when the program raised, or the job could "
        "not be started on this machine; 75 when a node was lost or did not come; a rank's own exit code; "
        "128+n when signal n ended a rank or stopped the job (130: Ctrl-C); "
        "2 for wrong usage, or a program that is not there; 70 for a fault of rallypoint's own."
    )


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One command."""

    name: str
    options: tuple[Option, ...]
    words: Words
    head: str  # of `--help`, before the options
    foot: Callable[[], str] = _nothing  # behind them


RUN = Command(
    name="run",
    options=options.RUN,
    words="program",
    foot=_run_ends,
    head="""\
usage: rallypoint run [options] script.py [arguments of the script]
       rallypoint run [options] -m package.module [arguments]
       rallypoint run [options] --no-python ./program [arguments]

Start the ranks (processes) of a PyTorch job on this machine, bring them together, and say what happened when one fails.
On several nodes the same command is given on each, with --nnodes, --rdzv-endpoint and --secret-file.
What stands after the program's name belongs to the program. Options may be written with _ for - inside, and
torchrun's may be abbreviated. torchrun's PET_* variables set its options too.
""",
)

SHOW = Command(
    name="show",
    options=options.SHOW,
    words="own",
    head="""\
usage: rallypoint show [options] [RUN]

A run again: how it was started and how it ended, what happened when, the report as it was, and where the logs are.
RUN is a run's name, a part of it that only one run has, or the path of a run folder; without it the newest run.
""",
)

SERVE = Command(
    name="serve",
    options=options.SERVE,
    words="none",
    head="""\
usage: rallypoint serve [options]

Start a coordination store and keep it running until Ctrl-C or SIGTERM. Whoever knows the secret may use it:
rallypoint.connect() with RALLYPOINT_STORE and RALLYPOINT_SECRET_FILE set as this command prints them.
""",
)

STACKS = Command(
    name="stacks",
    options=options.STACKS,
    words="own",
    head="""\
usage: rallypoint stacks [RUN] [options]

Where every rank of a running job is: one sentence, then the Python stacks, ranks at the same place together and the odd
ones first. RUN is a run's name or a part of it, its folder (of a job with --run-dir), or nothing: the newest that runs.
Nothing is stopped; each rank is asked once, by a signal, and goes on.
""",
)

STOP = Command(
    name="stop",
    options=options.STOP,
    words="own",
    head="""\
usage: rallypoint stop [RUN] [options]

End a running job in good order, as SIGTERM to its launcher does: its ranks get SIGTERM and have --grace seconds to save
and end. RUN is a run's name or a part of it, its folder (of a job with --run-dir), or nothing: the newest that runs.
Returns when the job is over. A second one, or Ctrl-C in the job's terminal, kills what is left.
""",
)

DOCTOR = Command(
    name="doctor",
    options=options.DOCTOR,
    words="none",
    foot=_checks,
    head="""\
usage: rallypoint doctor [options]
       rallypoint doctor --listen PORT --secret-file F     on one machine,
       rallypoint doctor --peer HOST:PORT --secret-file F  and on another

Look at this machine before a job does: a line for each check, [ok], [?] for what could not be looked at, [!] for what a
job may run into and [x] for what is broken or will break most, with what to do. The exit status is 1 after any [x].
Nothing is changed, and no GPU is used but for the trial job at the end, which starts two ranks and times an all_reduce.
""",
)

EXPLAIN = Command(
    name="explain",
    options=options.EXPLAIN,
    words="message",
    head="""\
usage: rallypoint explain [CODE]
       rallypoint explain QUESTION
       rallypoint explain FILE ...
       rallypoint explain MESSAGE
       ... 2>&1 | rallypoint explain

Without anything: every code with what it means. With a code (the word in brackets of a report: error[rank-killed]): what
you see, why it happens, how to make sure, how to fix it. The last ones of the list are questions, which have a page each.

With logs, of whatever launcher: the cause, found among its consequences, with its line. torchrun, accelerate, DeepSpeed,
Lightning, mpirun, srun, Slurm, Kubernetes, docker, a traceback, one message; .gz, .bz2, .xz; several files are the logs of
one job. `-` is stdin.

  --error-format text|json    how the report is written

The exit status is 0 when a cause is named (or a page was shown), 1 when the log does not tell it, 2 for what cannot be read.
""",
)

BY_NAME = {one.name: one for one in (RUN, SHOW, SERVE, STACKS, STOP, DOCTOR, EXPLAIN)}
