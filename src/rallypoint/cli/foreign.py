"""What users of torch.distributed.launch, mpirun, srun, accelerate and DeepSpeed type, and what means the same here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Foreign(NamedTuple):
    """An option that is not ours. `takes` words follow it; `headline` is why it is not here, as the end of a sentence."""

    headline: str
    help: str
    takes: int = 0
    setting: str = ""  # of the environment, which means the same: `NAME=value`, or a name alone that gets the option's value


_PYTHON = "that is an option of Python's"
_ONE_NODE = "it starts the ranks of this machine alone"
_NO_BINDING = "ranks are not bound to processors"
_ACCELERATE = "that is a setting of accelerate's, which its Accelerator(...) takes too"

SAME = {
    **dict.fromkeys(
        ("--nprocs", "--np", "--num-procs", "--num-processes", "--num-gpus", "--ntasks", "--ntasks-per-node", "--gpus", "--gpus-per-node",
         "--procs", "--ppn", "-ppn", "--npernode", "-npernode", "--n", "--ranks", "--world-size"),
        "--nproc-per-node",
    ),
    **dict.fromkeys(("--num-machines", "--num-nodes", "--nodes"), "--nnodes"),
    "--machine-rank": "--node-rank",
    "--main-process-port": "--master-port",
    "--main-process-ip": "--master-addr",
    **dict.fromkeys(("--bind", "--address", "--addr"), "--host"),
    "-p": "--port",
    **dict.fromkeys(("--all", "-a", "-l"), "--list"),
}  # fmt: skip
"""What others call an option that is here, for the commands that have it. None is near the name that it has here."""

WHOLE = {"--json": "--error-format=json"}
"""What is an option with its value here, of every command."""

DIFFERENT = {
    "-u": Foreign(_PYTHON, "set the variable that means the same", setting="PYTHONUNBUFFERED=1"),
    "-O": Foreign(_PYTHON, "set the variable that means the same", setting="PYTHONOPTIMIZE=1"),
    "-W": Foreign(_PYTHON, "set the variable that means the same", 1, "PYTHONWARNINGS"),
    "--use-env": Foreign("LOCAL_RANK is always in the environment", "leave it out"),
    "--multi-gpu": Foreign("with -n it starts that many ranks, and every rank sees the GPUs", "leave it out"),
    "--cpu": Foreign("the program chooses its device", "leave it out"),
    "--allow-run-as-root": Foreign("root may start jobs", "leave it out"),
    "--oversubscribe": Foreign("it starts as many ranks as -n says", "leave it out"),
    "--tag-output": Foreign("every line has its rank in front", "leave it out"),
    "--bind-to": Foreign(_NO_BINDING, "leave it out", 1),
    "--map-by": Foreign(_NO_BINDING, "leave it out", 1),
    "--cpu-bind": Foreign(_NO_BINDING, "leave it out", 1),
    "--mca": Foreign("there is no MPI in it", "leave it out", 2),
    "-mca": Foreign("there is no MPI in it", "leave it out", 2),
    "-x": Foreign("every rank has the environment of this shell", "leave it out, and set the variable before the command", 1),
    **dict.fromkeys(("-H", "--host", "--hosts", "--hostfile", "-hostfile", "--machinefile"), Foreign(_ONE_NODE, "leave it out", 1)),
    "--config-file": Foreign("it reads no settings of accelerate's", "leave it out, and give the number of ranks with -n", 1),
    "--mixed-precision": Foreign(_ACCELERATE, "set the variable that accelerate sets for it", 1, "ACCELERATE_MIXED_PRECISION"),
    "--dynamo-backend": Foreign(_ACCELERATE, "leave it out", 1),
}
"""What is not here, or goes without saying."""

COMMANDS = {
    **dict.fromkeys(("launch", "start", "exec", "submit", "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun",
                     "torch.distributed.run", "torch.distributed.launch"), "run"),
    **dict.fromkeys(("log", "logs"), "show"),
    **dict.fromkeys(("ps", "status", "top", "list", "ls", "history", "runs"), "show --list"),
    **dict.fromkeys(("check", "diagnose", "env", "info"), "doctor"),
    **dict.fromkeys(("stack", "dump", "py-spy", "where"), "stacks"),
    **dict.fromkeys(("why", "error"), "explain"),
    "store": "serve",
}  # fmt: skip
"""What other tools call a command that is here."""

LIVE = ("ps", "status", "top")
"""Those that elsewhere tell of what is running at this moment."""

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "torch.distributed.run", "torch.distributed.launch")
"""Launchers that somebody writes where the program stands."""

CHECKS = {
    **dict.fromkeys(("gpu", "gpus", "cuda", "nvidia", "driver"), "devices"),
    **dict.fromkeys(("cpu", "cpus", "cores"), "processors"),
    **dict.fromkeys(("disk", "disks", "tmp"), "folders"),
    **dict.fromkeys(("dns", "hosts", "hostname"), "names"),
    **dict.fromkeys(("network", "interfaces"), "addresses"),
    **dict.fromkeys(("torch", "python"), "versions"),
    "ram": "memory",
    "/dev/shm": "shm",
    "ulimit": "limits",
    "time": "clock",
}
"""What somebody calls a check of the doctor's."""

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What a word processor or a web page makes of hyphens: hyphen, non-breaking hyphen, figure, en and em dash, horizontal bar, minus."""


def hyphened(name: str) -> str:
    """An option's name as the tables have it."""
    return name.replace("_", "-")


def with_hyphens(word: str) -> str:
    """An option that was copied from a text which has made another dash of its hyphens; "" for any other word."""
    name = word.lstrip(_DASHES + "-")
    if not name or word[0] not in _DASHES:
        return ""
    return f"{'-' if len(name.partition('=')[0]) == 1 else '--'}{name.translate(dict.fromkeys(map(ord, _DASHES), '-'))}"


def is_mpi_count(word: str) -> bool:
    """`-np`, as mpirun has it, alone or with the number: for us it is a `-n` with a number that begins with p."""
    return bool(_MPI_COUNT.fullmatch(word))


_MPI_COUNT = re.compile(r"-np(=?\d+)?")


def is_one_dashed(word: str) -> bool:
    """`-nproc_per_node`, `-nnodes`: for us a `-n` whose number begins with a letter that no number of ranks begins with."""
    return word.startswith(("-np", "-nn"))


def is_python(word: str) -> bool:
    """`python`, `/usr/bin/python3.11`: other launchers want it before the script."""
    return word.rpartition("/")[2].startswith("python")


def after_launcher(words: Sequence[str]) -> list[str]:
    """What follows a launcher's name, which is two words for accelerate's."""
    return list(words[2:] if list(words[:2]) == ["accelerate", "launch"] else words[1:])


def without(argv: Sequence[str], at: int, foreign: Foreign) -> list[str]:
    """The words without the option at `at` and what belongs to it. A variable that takes its place is put in front by `in_front`."""
    takes = 0 if "=" in argv[at] and foreign.takes == 1 else foreign.takes
    return [*argv[:at], *argv[at + 1 + takes :]]


def in_front(argv: Sequence[str], at: int, foreign: Foreign) -> str:
    """What has to stand before the command in its place, with a blank behind: `NAME=value `; "" for nothing."""
    import shlex

    name, equals, value = argv[at].partition("=")
    if not equals:
        value = argv[at + 1] if foreign.takes and at + 1 < len(argv) else ""
    if "=" in foreign.setting:
        return f"{foreign.setting} "
    if foreign.setting:
        return f"{foreign.setting}={shlex.quote(value)} "
    if name == "-x" and "=" in value:  # mpirun's: -x NAME=value sets it, -x NAME hands it on
        variable, _, set_to = value.partition("=")
        return f"{variable}={shlex.quote(set_to)} "
    return ""


def counted(argv: Sequence[str], at: int) -> list[str]:
    """The words with `-np 4`, `-np4` or `-np=4` as `-n 4`."""
    number = argv[at][3:].removeprefix("=")
    return [*argv[:at], "-n", *([number] if number else []), *argv[at + 1 :]]
