"""`scripts/soak logs-changed`: logs of the corpus with what other logs of the same failure have
beside it, and the verdict must stay.

A rule about one line must hold whatever else the log has: what a script wrote above it, what ends
the rest of the job below it, and what a collector of logs puts before each line.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.log_corpus import Expected, expected
from bench.outcome import Outcome
from rallypoint.diagnosis.logs import prefixes
from rallypoint.diagnosis.logs.line_filter import as_utf8
from rallypoint.diagnosis.logs.reader import BEGINNING, Reader
from rallypoint.diagnosis.logs.to_evidence import diagnose
from rallypoint.diagnosis.report import Report

_STEPS = tuple(f"step {i} loss {1 / (i + 1):.4f} lr 1.0e-4" for i in range(300))
_IMPORT = (
    "Traceback (most recent call last):",
    '  File "/srv/train/model.py", line 12, in <module>',
    "    import flash_attn",
    "ModuleNotFoundError: No module named 'flash_attn'",
    "flash_attn was not found: using sdpa",
)
ABOVE = {
    "a module that is not there": ("bash: module: command not found",),
    "a file that is not there": ("cp: cannot stat '/data/cache.tar': No such file or directory",),
    "an environment that is not there": (
        "job.sh: line 4: /opt/env/bin/activate: No such file or directory",
    ),
    "a tool that is not there": ("/bin/sh: 1: nvidia-smi: not found",),
    "conda": ("CondaError: Run 'conda init' before 'conda activate'",),
    "git": ("fatal: not a git repository (or any of the parent directories): .git",),
    "a folder that is not there": (
        "slurmstepd: error: couldn't chdir to `/home/a': No such file or directory: going to /tmp instead",
    ),
    "pip": (
        "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
        "tensorboard 2.1 requires protobuf<4, but you have protobuf 5.1 which is incompatible.",
    ),
    "TensorFlow": (
        "2026-11-22 06:54:01.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] "
        "Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one "
        "has already been registered",
    ),
    "torchrun's threads": (
        "*****************************************",
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid "
        "your system being overloaded, please further tune the variable for optimal performance in "
        "your application as needed.",
        "*****************************************",
    ),
    "Weights & Biases": ("wandb: ERROR Error while calling W&B API: run exceeded quota (403)",),
    "pkill": ("pkill: killing pid 4242 failed: Operation not permitted",),
    "NCCL": (
        "gpu07:123:456 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "gpu07:123:456 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.",
    ),
    "a training": _STEPS,
    "a module that is optional": (*_IMPORT, *_STEPS[:200]),
}
"""Lines that no failure of the job's is told by."""

BELOW = {
    "make": ("make: *** [Makefile:7: train] Error 1",),
    "GitHub": ("##[error]Process completed with exit code 1.",),
    "GitLab": ("ERROR: Job failed: exit code 1",),
    "kubectl": ("command terminated with exit code 1",),
    "conda": (
        "ERROR conda.cli.main_run:execute(47): `conda run python train.py` failed. (See above for error)",
    ),
    "a tracker": (
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: "
        "There appear to be 6 leaked semaphore objects to clean up at shutdown",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    ),
    "Weights & Biases": ("wandb: Waiting for W&B process to finish... (failed 1).",),
    "a prompt": ("root@gpu07:/workspace# ",),
    "the end of a script": ("Job finished at Sun Nov 22 10:00:00 UTC 2026",),
    "torch's warning": (
        "[rank0]:[W1122 10:00:00.000000 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group "
        "has NOT been destroyed before we destruct ProcessGroupNCCL.",
    ),
    "torchrun's stop": (
        "W1122 10:00:00.000000 123 torch/distributed/elastic/multiprocessing/api.py:900] Sending "
        "process 4243 closing signal SIGTERM",
    ),
}
"""Lines that follow a failure, or any end."""

_CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T10:00:00"
STOPS = {
    "Slurm's stop": (
        f"{_CANCELLED} ***",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: error: n1: tasks 0-7: Killed",
    ),
    "Slurm's time limit": (f"{_CANCELLED} DUE TO TIME LIMIT ***",),
    "srun's": ("srun: Terminating StepId=7.0",),
}
"""Lines of a stop, which a failure may have led to: a likely cause may give way to it."""

EACH: dict[str, Callable[[str], str]] = {
    "kubectl --prefix": lambda line: f"[pod/train-0/pytorch] {line}",
    "docker compose": lambda line: f"worker-1  | {line}",
    "a container's time": lambda line: f"2026-11-22T10:00:00.123456789Z {line}",
    "syslog": lambda line: f"Nov 22 10:11:12 gpu07 train[41]: {line}",
    "a time in brackets": lambda line: f"[2026-11-22 10:00:00] {line}",
    "a time alone": lambda line: f"10:00:00.123 {line}",
    "a host": lambda line: f"gpu07: {line}",
    "cri-o": lambda line: f"2026-11-22T10:00:00.123456789+00:00 stderr F {line}",
    "Airflow": lambda line: f"[2026-11-22, 10:00:00 UTC] {{subprocess.py:93}} INFO - {line}",
    "Prefect": lambda line: f"10:00:00.123 | INFO    | prefect.flow_runs - {line}",
    "Celery": lambda line: f"[2026-11-22 10:00:00,123: WARNING/ForkPoolWorker-1] {line}",
    "Dask": lambda line: f"2026-11-22 10:00:00,123 - distributed.nanny - ERROR - {line}",
    "loguru": lambda line: f"2026-11-22 10:00:00.123 | ERROR    | run:main:12 - {line}",
    "a logger": lambda line: f"ERROR:root:{line}",
    "a logger that strips": lambda line: f"2026-11-22 10:00:00,123 INFO {line.strip()}",
    "a worker": lambda line: f"worker-3: {line}",
    "colours": lambda line: f"\x1b[31m{line}\x1b[0m",
    "Windows' ends": lambda line: f"{line}\r",
    "a quotation": lambda line: f"> {line}",
    "an indentation": lambda line: f"    {line}",
    "Ray": lambda line: f"\x1b[36m(TrainWorker pid=4242, ip=10.0.0.7)\x1b[0m {line}",
    "docker's JSON": lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"}),
    "an empty line": lambda line: f"{line}\n",
    "spaces behind it": lambda line: f"{line}  ",
}
"""What stands before, behind or around each line."""

_CUT = re.compile(r"\s|File \"")


_SENSITIVE = {
    "a-pdsh-no-route": "begins inside a traceback",
    "d-clock-before-rank-fchmod": "begins inside a traceback",
    "a-neox-open-files-torn": "begins inside a traceback",
    "a-lmdeploy-triton-shared-memory": "begins inside a traceback",
    "a-kubeflow-download-no-dns": "begins inside a traceback",
    "c-caffe2-ctrl-c-glog": "ends by a line that counts as the last one alone",
    "slurm-unresolve": "ends by a line that counts as the last one alone",
    "accelerate-bar-nan": "has a bar and a traceback in one line",
    "store-value-too-large": "has more frames of C++ below its cause than a stop may follow",
    "a-xla-cancelled-teardown": "has lines with two forms of prefixes",
    "accelerate-in-use": "has a message that a page broke into lines",
    "ds-in-use-wrapped": "has a message that a page broke into lines",
    "a-lightning-devices": "has a traceback with a time of its own in each line",
}
"""Logs that are not changed, and why."""


class Change(NamedTuple):
    """A log with something beside it, and whether its verdict must stay as it was."""

    what: str
    text: str
    holds: bool  # the code
    ranks: bool  # the ranks, too


def changed(text: str, report: Report, kind: str, name: str) -> Change:
    """Change a log that is told as `report`."""
    what = f"{kind} {name}"
    lines = text.rstrip("\n").split("\n")
    known = report.code != "cause-unknown" and report.confidence != "possible"
    # The first line of a paste may be one of the middle, which is read in that place alone.
    whole = _CUT.match(prefixes.split(lines[0])[1]) is None
    if kind == "each":
        # Three lines show a host, in a log that is short. The text of a JSON object is changed.
        count = sum(bool(line.strip()) for line in lines)
        fits = 3 <= count < BEGINNING if name in ("a host", "a worker") else count > 1
        many = fits and not text.startswith("{")
        return Change(what, "\n".join(map(EACH[name], lines)), whole and many, False)
    if kind == "above":
        optional = name.startswith("a module that is o")
        # An exit by 1 may be of an import that failed long before.
        longer = optional and (report.confidence != "certain" or report.code == "rank-exited")
        return Change(what, "\n".join((*ABOVE[name], text)), known and whole and not longer, whole)
    text = text.rstrip("\n")
    last = report.code == "interrupted" and report.confidence == "likely"
    if kind == "below":
        return Change(what, "\n".join((text, *BELOW[name], "")), known and not last, True)
    sure = known and report.confidence == "certain"
    return Change(what, "\n".join((text, *STOPS[name], "")), sure, False)


KINDS: dict[str, tuple[str, ...]] = {
    "above": (*ABOVE,),
    "below": (*BELOW,),
    "stop": (*STOPS,),
    "each": (*EACH,),
}
"""Names of the changes, by kind."""


@cache
def logs() -> tuple[tuple[Expected, str], ...]:
    """Return the logs of the corpus as text."""
    return tuple(
        (one, b"".join(as_utf8([one.path.read_bytes()])).decode(errors="replace"))
        for one in expected()
        if one.name not in _SENSITIVE
    )


def told(text: str) -> Report:
    """Tell the cause of a log."""
    return diagnose(Reader("x.log").read([text.encode()]))[0]


def difference(one: Expected, text: str, kind: str, name: str) -> str:
    """Return how the verdict of a changed log differs where it must not; "" where it holds."""
    text = text.replace("\r\n", "\n")
    before = told(text)
    change = changed(text, before, kind, name)
    after = told(change.text) if change.holds else before
    same = after.code == before.code and (not change.ranks or after.ranks == before.ranks)
    if same:
        return ""
    was, now = ((r.code, r.confidence, r.ranks) for r in (before, after))
    return f"{one.half}/{one.name}, {change.what}: {was} became {now}"


def logs_changed(chance: random.Random, number: int, folder: Path) -> Outcome:
    """Read every log with one change of each kind."""
    folder.mkdir(parents=True)
    outcome = Outcome("logs", counts={"readings": 0})
    for one, text in logs():
        for kind, names in KINDS.items():
            wrong = difference(one, text, kind, chance.choice(list(names)))
            outcome.counts["readings"] += 1
            outcome.wrong += [wrong] if wrong else []
    (folder / "output").write_text("\n".join(outcome.wrong))
    return outcome
