"""Job of Slurm's, as the variables of a batch script and of a step tell it.

A step's variables come before the job's: they say which nodes and tasks this process belongs to.
Variables alone do not say by which of both this process was started: `sbatch` hands on those of the
shell that it was typed in, also where that is in a step. The process of Slurm's above this one,
slurmstepd, has the step in its title.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.clusters.cluster import Cluster, Environ, Files, Unclear

Item = TypeVar("Item")

PORTS = 16
"""Ports that node 0 tries: jobs of one host have them from their numbers, and may overlap."""

FIRST_PORT, LAST_PORT = 20_000, 32_767
"""Range below the ports that Linux gives out by itself."""

MOST_HOSTS = 1 << 16
"""Bound of a host list and of a list of task counts. Slurm has it too."""

CONFS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Places of Slurm's configuration; the second is slurmd's own copy of it."""

KILL_WAIT = 30.0
"""Seconds of KillWait where the configuration does not say it."""

OWN_STEP = "RALLYPOINT_OWN_STEP"
"""Variable of a step that the launcher in a batch script has started: the tasks of each node of the
job, as Slurm lists them. The place of node 0 and the secret are on standard input.
"""

OWN = "slurm_step"
"""Module that starts such a step, and that reads in it what it was handed."""

_NO_SRUN = {"4294967290": "interactive", "4294967291": "batch", "4294967292": "extern"}
"""Numbers of the steps that are none of srun's."""

_PLACED = ("nnodes", "node_rank", "rdzv_endpoint")
"""Options that together say what a step's variables say."""

_BY_HAND = (
    ("start the launcher with srun, which sets it", "srun --ntasks-per-node=1 rallypoint run ..."),
    ("or run on this node alone", "rallypoint run --nnodes 1 ..."),
)

_SECRET_HELP = (
    ("leave srun out: the launcher starts its step itself, and hands a secret over",
     "rallypoint run ..."),
    ("or make a secret, once, where all nodes can read it",
     "(umask 077 && head -c 32 /dev/urandom | base64 > ~/rallypoint-secret)"),
    ("and name it", "srun --ntasks-per-node=1 rallypoint run --secret-file ~/rallypoint-secret ..."),
)  # fmt: skip


def look(environ: Environ, files: Files) -> Cluster | None:
    """Return what Slurm tells of the batch script or step to which this process belongs."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    step = _step_above(files)
    if step is None:
        step = _step_of(environ)
    if step == "batch":
        return _batch(environ, files, job)
    if step.isdecimal() or (step == "" and _step_of(environ).isdecimal()):
        found = _step(environ, files, job)
        if step or found.unclear:  # what is left over of a step is whole
            return found
    why = f"srun has not started this process, and SLURM_JOB_ID={job} is its shell's"
    several = environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    line = f"one node: {why}; `{_BY_HAND[0][1]}` starts one launcher on each node"
    return Cluster(
        name="Slurm",
        nodes=1,
        left_over=True,
        because=(f"nodes 1: {why}",),
        notes=(line,) if several else (),
    )


def hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `a[1-3,07],b2`. ValueError says what is wrong with it."""
    found: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"(?:[\w.:-]|\[[^\[\]]*\])+", item):
            raise ValueError(f"{item or 'an empty name'} is not a host")
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            parts = [plain] if plain else _range(ranges)
            if len(found) + len(names) * len(parts) > MOST_HOSTS:
                raise ValueError(f"it has more than {MOST_HOSTS} hosts")
            names = [name + part for name in names for part in parts]
        found += names
    return found


def _range(ranges: str) -> list[str]:
    """Return the numbers between brackets, as wide as the first of each range is written."""
    found: list[str] = []
    for text in ranges.split(","):
        both = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if both is None:
            raise ValueError(f"[{ranges}] is not a range of numbers")
        first, last = int(both[1]), int(both[2] or both[1])
        if not first <= last < first + MOST_HOSTS:
            raise ValueError(f"{text} is not a range of up to {MOST_HOSTS} numbers")
        found += [f"{number:0{len(both[1])}}" for number in range(first, last + 1)]
    return found


def counts(text: str) -> list[int]:
    """Return the numbers of a list such as `2(x3),1`. ValueError says what is wrong with it."""
    found: list[int] = []
    for item in text.split(","):
        parts = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if parts is None or len(found) + (times := int(parts[2] or 1)) > MOST_HOSTS:
            raise ValueError(f"{item or 'nothing'} is not a number of tasks")
        found += [int(parts[1])] * times
    return found


def _step_above(files: Files) -> str | None:
    """Return the step that has started this process ("0", "batch", "extern", "interactive"), "" for
    none, None where processes are hidden, as in a container.
    """
    pid = "self"
    while pid != "0":
        stat = files.text(f"/proc/{pid}/stat")
        if not stat:
            return None
        if " (slurmstepd) " in stat:
            title = re.match(r"slurmstepd: \[[^\]]*?\.(\w+)", files.text(f"/proc/{pid}/cmdline"))
            return title[1] if title else None
        pid = stat.rpartition(")")[2].split()[1]
    return "" if files.text("/proc/2/comm") == "kthreadd\n" else None


def _step_of(environ: Environ) -> str:
    """Return the same from the variables, which may be those of an outer step."""
    if step := _number_of_step(environ):
        return _NO_SRUN.get(step, step)
    by_slurmd = any(name in environ for name in ("SLURMD_NODENAME", "SLURM_NODEID"))
    return "batch" if by_slurmd else ""  # salloc sets neither


def _number_of_step(environ: Environ) -> str:
    return environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID", "")


class _Variables:
    """Variables of Slurm's that have been read, and what is wrong with them."""

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        self.unclear: list[Unclear] = []

    def number(self, name: str, *flags: str) -> int | None:
        """Return a number, None when it is not set. With `flags` it is needed, unless they are
        given."""
        text = self.environ.get(name, "")
        if text.isdecimal():
            return int(text)
        if text:
            self.wrong(f"{name}={text} is not a number")
        elif flags:
            self.wrong(f"{name} is not set in this step of Slurm's", flags)
        return None

    def listed(self, name: str, read: Callable[[str], list[Item]], what: str) -> list[Item]:
        """Return the items of a list; [] when it is not set, or wrong."""
        text = self.environ.get(name, "")
        try:
            return read(text) if text else []
        except ValueError as error:
            self.wrong(f"{name}={text} is not a {what}: {error}")
            return []

    def hosts(self, name: str) -> list[str]:
        """Return the hosts of a list."""
        return self.listed(name, hosts, "host list")

    def same(self, name: str, number: int | None, other: str, found: int) -> int | None:
        """Return a number that two variables tell, either of which may be missing (None, 0)."""
        if number is not None and found and number != found:
            values = " and ".join(f"{one}={self.environ.get(one, '')}" for one in (name, other))
            self.wrong(f"{values} contradict each other")
        return found or None if number is None else number

    def wrong(self, headline: str, flags: Sequence[str] = _PLACED) -> None:
        """Note a gap that these options fill."""
        self.unclear.append(Unclear(tuple(flags), headline, help=_BY_HAND))


def _batch(environ: Environ, files: Files, job: str) -> Cluster:
    """Return the facts of a batch script: on several nodes this process starts a step of its own.

    The variables of a step are those of another one. The nodes of a heterogeneous job are listed
    by component.
    """
    told = _Variables(environ)
    names: list[str] = []
    each = _components(environ)
    told.same("SLURM_HET_SIZE", told.number("SLURM_HET_SIZE"), each[-1], len(each))
    total = 0
    for name in each:
        listed = told.hosts(name)
        sized = name.replace("NODELIST", "NUM_NODES")
        count = told.same(sized, told.number(sized), name, len(listed))
        if count is None:
            told.wrong(f"{sized} is not set in a batch script of Slurm's")
        total += count or 0
        names += listed
    slots = _asked_tasks(environ) if len(each) == 1 else []
    if len(each) > 1:
        # The standard input of srun reaches the tasks of one component.
        told.unclear.append(
            Unclear(
                _PLACED,
                f"{each[-1]} is a component of a heterogeneous job, whose step the launcher does not start",
                help=(
                    (
                        "start it with srun",
                        f"srun --het-group=0-{len(each) - 1} --ntasks-per-node=1 rallypoint run ...",
                    ),
                ),
            )
        )
    tasks = f"ranks {slots[0]} here, from SLURM_TASKS_PER_NODE" if slots else ""
    return Cluster(
        name="Slurm",
        nodes=total,
        node=0,
        slots=slots[0] if slots else None,
        host=names[0] if names else "",
        exchange=OWN if total != 1 else "",
        starts=total != 1,
        job=_named(environ, job),
        ends=_ends(environ),
        kill_after=_kill_after(environ, files),
        because=tuple(filter(None, (f"nodes {total} from {', '.join(each)}", tasks))),
        unclear=tuple(told.unclear),
        secret_help=_SECRET_HELP,
    )


def _components(environ: Environ) -> list[str]:
    """Return the variables that list the nodes of a job: one for each component of it."""
    name = "SLURM_JOB_NODELIST"
    found = [one for one in environ if re.fullmatch(rf"{name}_HET_GROUP_\d+", one)]
    return sorted(found, key=lambda one: int(one.rpartition("_")[2])) or [name]


def _asked_tasks(environ: Environ) -> list[int]:
    """Return the tasks of each node of a job for which several on a node were asked for, else [].

    Without that the list has what fits, or the number was handed on by an outer step.
    """
    try:
        found = counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    except ValueError:
        return []
    return found if environ.get("SLURM_NTASKS", "") == str(sum(found)) and max(found) > 1 else []


def _step(environ: Environ, files: Files, job: str) -> Cluster:
    """Return the facts of a step: a launcher on each node, or one for each rank."""
    told = _Variables(environ)
    names = told.hosts("SLURM_STEP_NODELIST")
    each = told.listed("SLURM_STEP_TASKS_PER_NODE", counts, "list of tasks")
    nodes = told.same(
        "SLURM_STEP_NUM_NODES", told.number("SLURM_STEP_NUM_NODES"),
        "SLURM_STEP_NODELIST", len(names),
    )  # fmt: skip
    tasks = told.same(
        "SLURM_STEP_NUM_TASKS", told.number("SLURM_STEP_NUM_TASKS"),
        "SLURM_STEP_TASKS_PER_NODE", sum(each),
    )  # fmt: skip
    if nodes is None or tasks is None:
        missing = "NODES" if nodes is None else "TASKS"
        told.wrong(f"SLURM_STEP_NUM_{missing} is not set in this step of Slurm's")
    node, local, slots = None, None, None
    because = [f"nodes {nodes} from SLURM_STEP_NUM_NODES"]
    if nodes is not None and tasks is not None and tasks > nodes:
        node, local = _place_of_task(told, each, nodes)
        because = [f"one rank for each of {tasks} tasks, from SLURM_STEP_NUM_TASKS"]
        nodes, slots = tasks, 1
    elif nodes != 1:
        node = told.number("SLURM_NODEID", "node_rank")
    own = OWN_STEP in environ
    if own and node is not None and max(per := counts(environ[OWN_STEP].split()[0])) > 1:
        slots = per[node]
        because.append(f"ranks {slots} here, from the job's SLURM_TASKS_PER_NODE")
    pmi = environ.get("PMI_FD", "")
    exchange = OWN if own else ""
    if not own and nodes != 1 and pmi.isdecimal() and files.is_open(int(pmi)):
        exchange = "pmi"
        because.append(f"node 0 is told by PMI, from PMI_FD={pmi}")
    if nodes != 1 and not names and not exchange:
        told.wrong("SLURM_STEP_NODELIST is not set in this step of Slurm's", ("rdzv_endpoint",))
    step = _number_of_step(environ)
    return Cluster(
        name="Slurm",
        nodes=nodes,
        node=node,
        slots=slots,
        local=local,
        host=names[0] if names else "",
        ports=_ports(job, step),
        exchange=exchange,
        job=_named(environ, f"{job}.{step}"),
        one_screen=True,
        ends=_ends(environ),
        kill_after=_kill_after(environ, files),
        because=(*because, *([f"node 0 is {names[0]}, from SLURM_STEP_NODELIST"] if names else [])),
        unclear=tuple(told.unclear),
        secret_help=_SECRET_HELP,
    )


def _place_of_task(
    told: _Variables, each: Sequence[int], nodes: int
) -> tuple[int | None, tuple[int, int] | None]:
    """Return the number of this task, and its place among those on this host."""
    rank = told.number("SLURM_PROCID", "node_rank")
    at = told.number("SLURM_NODEID", *_PLACED)
    place = told.number("SLURM_LOCALID", *_PLACED)
    if at is None or place is None:
        return rank, None
    if len(each) != nodes or at >= nodes or place >= each[at]:
        told.wrong(f"SLURM_STEP_TASKS_PER_NODE does not have task {place} of node {at}")
        return rank, None
    return rank, (place, each[at])


def _named(environ: Environ, job: str) -> str:
    """Return the name of a job: one that was requeued has the same number."""
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return job if again == "0" else f"{job}.{again}"


def _ports(job: str, step: str) -> tuple[int, ...]:
    blocks = (LAST_PORT + 1 - FIRST_PORT) // PORTS
    first = FIRST_PORT + sum(int(text) for text in (job, step) if text.isdecimal()) % blocks * PORTS
    return tuple(range(first, first + PORTS))[::-1]  # as --dry-run tells of all: the highest first


def _ends(environ: Environ) -> float | None:
    """Return when Slurm ends the job: 23.02 and newer tell it."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdecimal() else None


def _kill_after(environ: Environ, files: Files) -> float:
    """Return the seconds between SIGTERM and SIGKILL when a job ends: KillWait of slurm.conf."""
    for path in (environ.get("SLURM_CONF", ""), *CONFS):
        if found := re.search(r"(?im)^[ \t]*KillWait[ \t]*=[ \t]*(\d+)", files.text(path)):
            return float(found[1])
    return KILL_WAIT
