"""Plan of a job: one pure function makes it from the options and the facts of the machine."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from datetime import datetime
from string import Template
from typing import TYPE_CHECKING, Literal

import msgspec

from rallypoint.clusters.cluster import Cluster
from rallypoint.errors import UsageError
from rallypoint.host import devices
from rallypoint.host.loopback import LOOPBACK
from rallypoint.launcher import preload_parts
from rallypoint.launcher.program import Program, Task
from rallypoint.launcher.sizes import threads_of_a_rank
from rallypoint.world import Seat, World, ranges

if TYPE_CHECKING:
    from rallypoint.record.preload_history import Learnt

OLDEST_TORCH = (
    2,
    8,
    # the first whose TCPStore, by default with libuv, takes a socket that listens already:
    # `master_listen_fd`
)
# seconds; more than most steps, evaluations and checkpoints take, and less than a person waits
# before looking
STALL = 300.0
# ports that a machine should have for its connections; 64 ranks of gloo's take 4,032 at once
FEWEST_EPHEMERAL = 8192
# Seconds in init_process_group after which the ranks that have not come are named. Imports and data
# of healthy ranks differ by less, and people who wait longer begin to look for themselves. Each
# following call comes after twice the time: torch's 30 minutes are seven calls.
ROLL_CALL = 30.0
COORDINATION_PORT = 29400
"""Port of the lead where none is given with --rdzv-endpoint: torchrun's."""
MASTER_PORT = 29500
"""Port where ranks of several nodes meet, where none is given with --master-port: torchrun's."""
COORDINATION_PORTS = 8
"""Ports behind --master-port of which the lead takes the first free one: the agents of one machine's
jobs seldom hold more than two or three neighbours.
"""
JOIN_TIMEOUT = 600.0
"""Seconds in which all nodes of a job must come: torchrun's."""
NODE_TIMEOUT = 2.0
"""Seconds without a sign of life after which a node is lost. Signs come three times in it: two may
be lost on the way. bench/ has what an overloaded node needs.
"""
STDOUT, STDERR = 1, 2  # bits of torchrun's --redirects and --tee


class LogPlan(msgspec.Struct, frozen=True):
    """Places of each local rank's output besides the run folder; torchrun's flags, per local rank."""

    redirects: tuple[int, ...]
    tee: tuple[int, ...]
    console: tuple[int, ...]  # local ranks whose words reach the terminal
    # folder of <run id>_<random>/attempt_<n>/<local rank>/stdout.log; "": no torchrun-style files
    log_dir: str = ""
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    # template of what stands before each line of a rank; None: `[rank] ` with several ranks
    prefix: str | None = None


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """Several nodes of one job, and how the agents that run on them find each other: torchrun's
    options. `launcher/nodes/` carries them out.
    """

    count: int
    rank: int | None = None  # this node's place, when the user gave it; 0 leads
    is_host: bool | None = None  # of --rdzv-conf: this node leads, or does not; None: not said
    # Where the lead listens: a name or an address, and the ports that are tried in this order.
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (COORDINATION_PORT,)
    by_cluster: bool = False  # a cluster has told all this, and no flag
    exchange: str = ""  # module of clusters/ that hands the lead's place to all nodes instead
    lead: tuple[str, ...] = ()  # addresses of the lead, once it was handed over
    folder: str = ""  # on a shared disk, where the lead writes its addresses instead
    folder_once: bool = False  # no other job has that folder
    local_addr: str = ""  # address of this node from which it connects; "": the kernel's choice
    job: str = ""  # --rdzv-id: nodes of another job are refused
    secret_file: str = ""
    tls: bool = False  # between the launchers, and to the job's store
    call: int = 0  # number of earlier calls of `launch`: a lead of one may still be about to leave
    join_timeout: float = JOIN_TIMEOUT  # seconds until all nodes must have come
    # seconds without a sign of life after which a node is lost
    timeout: float = NODE_TIMEOUT


class SettledNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of a call of `launch`, with all that is known before an agent starts."""

    nodes: Nodes
    secret: bytes
    cluster: Cluster | None = None  # that has started the caller
    listens: bool = False  # the caller has the listener of the lead


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the user's that the plan takes over as they are."""

    program: Program
    nodes: Nodes | None = None  # None: this node alone
    cluster: Cluster | None = None  # that has started this launcher
    master_port: int = 0  # 0: any free one
    port_range: tuple[int, int] | None = None
    run_id: str = ""  # "": the job's id
    role: str = "default"
    rendezvous: str = ""  # a folder that this job alone has while it runs; see rendezvous_file.py
    max_restarts: int = 0
    grace: float = 30.0  # seconds between asking a rank to stop and SIGKILL
    # seconds for which no rank moves before that is reported; 0: never; None: see `patience`
    stall: float | None = None
    on_failure: Literal["stop", "continue"] = "stop"
    plain: bool = False
    quiet: bool = False
    error_format: Literal["text", "json"] = "text"
    notices: tuple[str, ...] = ()  # signals that are handed to the ranks while the job goes on
    behind: str = ""  # options of ours that stand behind the program and so are its own, as typed
    moved: str = ""  # the command with these before the program


class Plan(Chosen, frozen=True, kw_only=True):
    """Everything that is decided before anything starts. `--dry-run` prints it; the agent carries
    it out.
    """

    job: str  # unique id of this run; also RALLYPOINT_JOB in every rank
    slots: int  # ranks that this node has
    # forked from the template · new interpreters · a program of any kind
    start: Literal["template", "fresh", "exec"]
    preload: tuple[str, ...]
    # variables that we set or change for every worker, and for the template, whatever the world is
    environment: dict[str, str]
    rank_environment: tuple[dict[str, str], ...]  # the same by local rank, without the template
    local_ranks: tuple[int, ...]  # LOCAL_RANK of this node's ranks
    local_size: int  # LOCAL_WORLD_SIZE
    master_addr: str
    debug_rank: int  # the rank that has stdin and breakpoint()
    run_dir: str
    run_dir_asked: bool  # the user named it, and wants all that can be kept in it
    logs: LogPlan
    signals: tuple[str, ...]  # names of the signals that stop the job, besides SIGINT
    notes: tuple[str, ...] = ()  # said once at the start, a line each
    remarks: tuple[str, ...] = ()  # choices that nobody asked for; said by --dry-run only
    parts: tuple[str, ...] = ()  # of torch: imported late by the program, once in the template
    learns: bool = False  # the parts of torch that all ranks import are remembered
    memory: str = ""  # the file where that is kept, "" when it is not
    # installed version by metadata, "" when there is none (then no TCPStore of torch can be served)
    torch: str = ""
    task: Task | None = None  # function that the ranks of `launch` run
    # seconds in init_process_group after which the ranks that have not come are named
    roll_call: float = ROLL_CALL
    cwd: str = ""  # where it was started: the program's path is relative to it

    @property
    def hooks(self) -> bool:
        """Whether the ranks are looked into, and tell more than their end."""
        return not self.plain and self.start != "exec"

    def patience(self, size: int) -> float | None:
        """Seconds in which none of `size` ranks moves, after which a stall is reported; None: it is
        not.

        Without `--stall` a single rank is left alone: a server, or a program that waits for a
        person, may stand still for hours.
        """
        if not self.hooks or (self.stall is None and size == 1):
            return None
        return STALL if self.stall is None else self.stall or None


# DDP's constructor, and every optimizer at its first use, import torch._dynamo: one to three
# seconds, in every rank.
_USES_DYNAMO = re.compile(
    rb"optim|DistributedDataParallel|fully_shard|FullyShardedDataParallel|torch\.compile|accelerate|lightning"
)
# What a program sets before torch._dynamo is imported, because that reads it:
# `os.environ["TORCHDYNAMO_DISABLE"] = "1"`.
_SETS_DYNAMO = re.compile(rb"""["'](TORCHDYNAMO_|TORCHINDUCTOR_(?!CACHE_DIR)|TORCH_COMPILE)""")


def with_parts(plan: Plan, source: bytes, learnt: Learnt, memory: str) -> Plan:
    """Return the plan, with the parts of torch in the template that this program will want: `learnt`
    is what its earlier runs have shown, kept in the file `memory`; `source` is its text.

    The text is a guess for the first run, which costs one import when it is wrong, and saves one in
    each rank when it is right. Only for several forked ranks, and none where the text names
    variables that torch._dynamo reads; what was learnt not under `--plain`, where nobody looks what
    the ranks import.
    """
    if (
        plan.start != "template"
        or plan.slots == 1
        or not plan.learns
        or _SETS_DYNAMO.search(source)
    ):
        return msgspec.structs.replace(plan, learns=False)
    remarks = list(plan.remarks)
    parts: list[str] = []
    if _USES_DYNAMO.search(source) and "torch._dynamo" not in (*learnt.parts, *learnt.spoilt):
        parts.append("torch._dynamo")
        remarks.append(
            "torch._dynamo is imported once, before the ranks are forked: the program's optimizer or DDP would import it in each of them"
        )
    plan = msgspec.structs.replace(plan, learns=not plan.plain, memory="" if plan.plain else memory)
    if plan.learns:
        parts += learnt.parts
        remarks += [
            f"{name} is imported once, before the ranks are forked: in an earlier run each of them did"
            for name in learnt.parts
        ]
        remarks += [f"{name} is left to the ranks: {why}" for name, why in learnt.spoilt.items()]
    return msgspec.structs.replace(plan, parts=tuple(parts), remarks=tuple(remarks))


class Options(Chosen, frozen=True, kw_only=True):
    """Options of the user's: each value valid by itself, not yet held against this machine."""

    nproc: int | Literal["auto", "cpu", "gpu"] | None = None  # None: not asked
    engine: Literal["local", "ray"] = "local"  # what starts the nodes
    backend: str = ""  # that `launch` opens for the function; "": none
    fresh: bool = False
    preload: tuple[str, ...] = ()
    master_addr: str = ""  # "": not asked
    debug_rank: int | None = None
    run_dir: str = ""
    log_dir: str = ""
    redirects: int | dict[int, int] = 0  # for every local rank, or by local rank
    tee: int | dict[int, int] = 0
    local_ranks_filter: tuple[int, ...] = ()  # (): all
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str | None = None  # None: not asked
    virtual_local_rank: bool = False
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    dry_run: bool = False
    notes: tuple[str, ...] = ()


class Machine(msgspec.Struct, frozen=True):
    """Facts about this machine that a plan depends on. Gathered by the caller: `make` is pure."""

    cpus: int  # that this process may use
    gpus: devices.Look
    names: tuple[str, ...]  # names and addresses that are this machine, loopback aside
    python: str  # the interpreter that workers run
    torch: str  # its torch by metadata, "" when there is none
    now: datetime
    suffix: str  # a few random characters
    cwd: str
    runs: str  # the folder of the user's runs
    build: devices.Build | None = None  # what its torch was built for
    interfaces: tuple[str, ...] = ()  # names of its network interfaces; () when they are not known
    # The ports of which the kernel gives one to each connection.
    ephemeral: tuple[int, int] = (32768, 60999)
    all_cpus: int = 0  # that it has; 0: not known


def make(options: Options, environ: Mapping[str, str], machine: Machine) -> Plan:
    """Decide everything about a job on one node. Pure.

    Raises `UsageError`: `device-missing` (more was asked than there is), `torch-missing`,
    `torch-too-old`, `several-nodes` (a meeting point on another machine), `usage` (options that
    contradict each other).
    """
    notes = list(options.notes)
    start = _start(options, machine)
    if options.stall and (start == "exec" or options.plain):
        flag = "--plain" if options.plain else "--no-python"
        raise UsageError(
            "usage",
            f"--stall has no meaning with {flag}: where the ranks stand is seen by looking into them",
            help=(("leave one of the two out", ""),),
        )
    size, note = _local_size(options, environ, machine)
    notes += note
    job = f"{machine.now:%Y%m%d-%H%M%S}-{machine.suffix}"
    run_dir = (
        os.path.join(machine.cwd, options.run_dir)
        if options.run_dir
        else os.path.join(machine.runs, job)
    )
    address, note = _meeting_address(options.master_addr, machine)
    notes += note
    if (
        options.port_range
        and options.master_port
        and not options.port_range[0] <= options.master_port <= options.port_range[1]
    ):
        low, high = options.port_range
        raise UsageError(
            "usage",
            f"--master-port {options.master_port} is not in --port-range {low}-{high}",
            help=(("give one of the two", ""),),
        )
    debug_rank = options.debug_rank or 0
    if options.nodes is not None and options.on_failure == "continue":
        raise UsageError(
            "usage",
            "--on-failure continue is for one node: the nodes of a job end together",
            help=(("leave it out, or start each node's ranks as a job of its own", ""),),
        )
    if options.nodes is None and debug_rank >= size:
        raise UsageError(
            "usage",
            f"--debug-rank {debug_rank} is not a rank of this job: {_ranks_there_are(size)}",
            help=(("give a rank that there is", "--debug-rank 0"),),
        )
    local_ranks, local_size, remarks = _local_ranks(options, environ, size, machine)
    is_bound = machine.cpus < machine.all_cpus  # else all launchers of this host share them
    sharers = size if is_bound else local_size
    environment, note = _environment(options, environ, sharers, machine.cpus)
    remarks += note
    remarks += _ports_of_the_ranks(options, machine)
    notes += _interfaces_that_are_missing(environ, machine)
    logs, note = _logs(options, size, run_dir, machine)
    notes += note
    if environ.get("PYTHON_EXEC", machine.python) != machine.python and start != "exec":
        notes.append(f"PYTHON_EXEC is not used: the workers run {machine.python}")
    if environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        notes.append(
            "TORCHELASTIC_ENABLE_FILE_TIMER has no effect here: torchrun's watchdog by file timers is not built; --stall SECONDS reports "
            "ranks that stand still"
        )
    # In a rank the variable is its own job's.
    if environ.get("RALLYPOINT_STORE") and "RALLYPOINT_JOB" not in environ and start != "exec":
        notes.append(
            "RALLYPOINT_STORE is not used: a job has its own store; to join that one, give connect() its address and secret_file="
        )
    return Plan(
        **{name: getattr(options, name) for name in Chosen.__struct_fields__},
        job=job,
        slots=size,
        start=start,
        preload=tuple(name for name in options.preload if name != preload_parts.NONE),
        learns=preload_parts.NONE not in options.preload,
        environment=environment,
        rank_environment=_rank_environment(options, environ, local_ranks, local_size),
        local_ranks=tuple(local_ranks),
        local_size=local_size,
        master_addr=address,
        debug_rank=debug_rank,
        run_dir=run_dir,
        run_dir_asked=bool(options.run_dir),
        logs=logs,
        signals=tuple(name for name in options.signals if name != "SIGINT"),
        notes=tuple(notes),
        remarks=tuple(remarks),
        torch=machine.torch,
        cwd=machine.cwd,
    )


def _start(options: Options, machine: Machine) -> Literal["template", "fresh", "exec"]:
    """Return how workers are started. Raises when the torch that this needs is not installed."""
    if options.program.kind == "command":
        if options.preload:
            raise UsageError(
                "usage",
                "--preload has no meaning with --no-python: the program is not forked from a template",
                help=(("leave one of the two out", ""),),
            )
        return "exec"
    if options.fresh and options.preload:
        raise UsageError(
            "usage",
            "--preload has no meaning with --fresh: there is no template to preload into",
            help=(("leave one of the two out", ""),),
        )
    install = f"{machine.python} -m pip install"
    if not machine.torch:
        if options.fresh:
            return "fresh"  # a script that needs no torch; nobody serves a TCPStore for it
        raise UsageError(
            "torch-missing",
            f"torch is not installed in {machine.python}",
            why=("workers are forked from one process that has imported torch",),
            help=(
                (
                    "if another environment has torch, install rallypoint there, and start it from there",
                    "python -m pip install rallypoint && python -m rallypoint run ...",
                ),
                ("install torch there", f"{install} torch"),
                (
                    "without a GPU the CPU build is smaller",
                    f"{install} torch --index-url https://download.pytorch.org/whl/cpu",
                ),
            ),
        )
    # No match: a version we cannot judge, left to the user.
    found = re.match(r"(\d+)\.(\d+)", machine.torch)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(
            "torch-too-old",
            f"torch {machine.torch} in {machine.python} is older than {oldest}",
            help=(("install a newer torch", f"{install} 'torch>={oldest}'"),),
        )
    return "fresh" if options.fresh else "template"


def _local_size(
    options: Options, environ: Mapping[str, str], machine: Machine
) -> tuple[int, list[str]]:
    """Return the number of ranks on this node, and notes about it."""
    # Another program has a torch of its own, or none.
    build = None if options.program.kind == "command" else machine.build
    found = devices.Found(machine.gpus, devices.resolve(machine.gpus, environ), build)
    lack = devices.missing(found)
    gpus = 0 if lack else len(found.visible)
    if "nccl" in options.backend:
        _check_backend(options, found, lack)
    if options.nproc is None:
        return 1, [f"{gpus} GPUs visible, 1 used; -n gpu"] if gpus > 1 else []
    if options.nproc == "cpu" or (options.nproc == "auto" and gpus == 0):
        return machine.cpus, []
    if options.nproc == "auto":
        return gpus, []
    if options.nproc == "gpu":
        if gpus == 0:
            seen = len(machine.gpus.devices)
            help = [("give a number, or count processors", "-n cpu")]
            if seen and not found.visible and found.visible.given is not None:
                help.insert(0, ("let the job see the GPUs", "unset CUDA_VISIBLE_DEVICES"))
            elif seen and lack:
                help.insert(
                    0,
                    (
                        "install a torch that can use them",
                        "https://pytorch.org/get-started/locally/",
                    ),
                )
            what = (
                f"-n gpu: the {devices.count(seen)} here cannot be used"
                if found.visible
                else "-n gpu: no NVIDIA GPU is visible here"
            )
            raise UsageError("device-missing", what, why=_with_facts(lack, found), help=tuple(help))
        return gpus, []
    return options.nproc, []


def _check_backend(options: Options, found: devices.Found, lack: str) -> None:
    """Refuse NCCL without a GPU for each rank. A case that cannot be known from here (another
    vendor's torch, GPUs that no file shows) is let through."""
    size = options.nproc if isinstance(options.nproc, int) else 1
    visible = len(found.visible)
    gloo = ("or take the backend that needs no GPU", f'launch(..., nproc={size}, backend="gloo")')
    if lack:
        raise UsageError(
            "device-missing",
            f"backend={options.backend!r} needs a GPU for each rank, and none can be used here",
            why=_with_facts(lack, found),
            help=(("take the backend that needs no GPU", gloo[1]),),
        )
    unknown = (found.build is not None and found.build.other) or (
        found.look.hidden and not found.look.devices
    )
    if size > visible and not unknown:
        raise UsageError(
            "device-missing",
            f"backend={options.backend!r} needs a GPU for each rank: {size} ranks, and {devices.count(visible)} visible",
            why=found.facts(),
            help=(
                (
                    "start a rank for each GPU",
                    f"launch(..., nproc={visible}, backend={options.backend!r})",
                ),
                gloo,
            ),
        )


def _with_facts(lack: str, found: devices.Found) -> tuple[str, ...]:
    """Return the reason first, and once: it may be one of the facts."""
    return tuple(dict.fromkeys((lack, *found.facts()) if lack else found.facts()))


def _meeting_address(asked: str, machine: Machine) -> tuple[str, list[str]]:
    """Return the address to listen on: always loopback, because every rank is here."""
    name = asked.lower()
    if not name or name in LOOPBACK:
        return LOOPBACK.get(name, "127.0.0.1"), []
    if name in (known.lower() for known in machine.names):
        return "127.0.0.1", [
            f"{asked} is this machine, and every rank runs on it: they meet at 127.0.0.1"
        ]
    raise UsageError(
        "several-nodes",
        f"{asked} is not known as an address of this machine, and the job has one node",
        why=(f"this machine is {', '.join(machine.names) or 'without a name'}",),
        help=(
            ("for several nodes, say how many there are", "--nnodes 2"),
            ("on one node leave the address out: its ranks meet at 127.0.0.1", ""),
        ),
    )


def _interfaces_that_are_missing(environ: Mapping[str, str], machine: Machine) -> list[str]:
    """Return notes about interfaces that the user has set and that are not there. Nothing is set
    here: on one node gloo's and NCCL's own choice always works."""
    if not any(name in environ for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")):
        return []
    from rallypoint.host.addresses import chosen  # here: it loads what most starts do without

    return [
        f"{problem.sentence}: {', '.join(machine.interfaces)}"
        for problem in chosen(environ, machine.interfaces)
    ]


def _ports_of_the_ranks(options: Options, machine: Machine) -> list[str]:
    """Return a note about ports that --port-range does not reach: gloo and NCCL listen on a port of
    their own in every rank, and neither can be told which."""
    if options.port_range is None:
        return []
    (low, high), (first, last) = options.port_range, machine.ephemeral
    if low <= first and last <= high:
        return []
    narrow = f"sysctl -w net.ipv4.ip_local_port_range='{low} {min(65535, max(high, low + FEWEST_EPHEMERAL - 1))}'"
    return [
        f"--port-range {low}-{high} holds for what rallypoint listens on; gloo and NCCL take ports of {first}-{last} in every rank, "
        f"which the kernel chooses: {narrow} (as root, for every program of this machine) moves them"
    ]


def _environment(
    options: Options, environ: Mapping[str, str], size: int, cpus: int
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that every rank gets in any world, and remarks about them."""
    variables = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(options.signals),
    }
    remarks = []
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environ:
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    if size > 1 and "OMP_NUM_THREADS" not in environ:
        threads = threads_of_a_rank(cpus, size)
        variables["OMP_NUM_THREADS"] = str(threads)
        shared = f"{size} ranks share {cpus} processors"
        remarks.append(
            f"OMP_NUM_THREADS={threads}: it was not set, and {shared} (torchrun sets 1 whatever there is)"
        )
    return variables, remarks


def _local_ranks(
    options: Options, environ: Mapping[str, str], size: int, machine: Machine
) -> tuple[range, int, list[str]]:
    """Return LOCAL_RANK of the ranks of this launcher and LOCAL_WORLD_SIZE, and a remark.

    A cluster may start several launchers on a host, and numbers them. Where it gives each of them
    GPUs of its own, their numbers begin at 0 in each, and LOCAL_RANK has to as well.
    """
    cluster = options.cluster
    task, tasks = (cluster and cluster.local) or (0, 1)
    gpus = len(devices.resolve(machine.gpus, environ))
    if size <= gpus < size * tasks:
        remark = (
            f"LOCAL_RANK counts from 0 in each of {tasks} tasks on this host: "
            f"{devices.count(gpus)} of it can be seen here"
        )
        return range(size), size, [remark]
    return range(task * size, (task + 1) * size), size * tasks, []


def _rank_environment(
    options: Options, environ: Mapping[str, str], local_ranks: range, local_size: int
) -> tuple[dict[str, str], ...]:
    """Return the variables that differ between local ranks in any world."""
    rows = []
    for rank in local_ranks:
        row = {"LOCAL_RANK": str(rank)}
        if options.virtual_local_rank:
            row["LOCAL_RANK"] = "0"
            listed = environ.get("CUDA_VISIBLE_DEVICES")
            row["CUDA_VISIBLE_DEVICES"] = _own_gpu(listed, rank, local_size)
        rows.append(row)
    return tuple(rows)


def _own_gpu(listed: str | None, local_rank: int, local_size: int) -> str:
    """Return the one GPU that a rank sees under --virtual-local-rank: its own entry of the list that
    we were given."""
    if listed is None:
        return str(local_rank)
    entries = [entry.strip() for entry in listed.split(",")]
    if local_rank >= len(entries) or not entries[local_rank]:
        there = len([entry for entry in entries if entry])
        raise UsageError(
            "device-missing",
            f"--virtual-local-rank gives each of {local_size} ranks a GPU, and CUDA_VISIBLE_DEVICES={listed!r} lists {there}",
            help=(("start as many ranks as there are GPUs, or list more", f"-n {max(there, 1)}"),),
        )
    return entries[local_rank]


def _logs(options: Options, size: int, run_dir: str, machine: Machine) -> tuple[LogPlan, list[str]]:
    """Apply torchrun's log flags to each local rank. Ranks that a map names and the job has not are
    said, not refused: as torchrun."""
    notes = []
    for flag, asked in (
        ("-r", options.redirects),
        ("-t", options.tee),
        ("--local-ranks-filter", options.local_ranks_filter),
    ):
        absent = [rank for rank in asked if rank >= size] if not isinstance(asked, int) else []
        if absent:
            notes.append(
                f"{flag} names local ranks that this job has not: {ranges(absent)}; {_ranks_there_are(size)}"
            )
    redirects, tee = _by_rank(options.redirects, size), _by_rank(options.tee, size)
    folder = ""
    if options.log_dir == os.path.devnull:  # torchrun's way to say: no files at all
        redirects = tee = (0,) * size
    elif options.log_dir or any(redirects) or any(tee):
        folder = (
            os.path.join(machine.cwd, options.log_dir)
            if options.log_dir
            else os.path.join(run_dir, "logs")
        )
    console = tuple(
        rank
        for rank in range(size)
        if not options.local_ranks_filter or rank in options.local_ranks_filter
    )
    if not console:
        notes.append(
            "--local-ranks-filter leaves no rank to show: their words are in the logs alone"
        )
    plan = LogPlan(
        redirects=redirects,
        tee=tee,
        console=console,
        log_dir=folder,
        stdout_filters=options.stdout_filters,
        stderr_filters=options.stderr_filters,
        prefix=options.log_line_prefix_template,
    )
    return plan, notes


def _by_rank(asked: int | dict[int, int], size: int) -> tuple[int, ...]:
    return (
        (asked,) * size
        if isinstance(asked, int)
        else tuple(asked.get(rank, 0) for rank in range(size))
    )


def _ranks_there_are(size: int) -> str:
    return f"its ranks are 0-{size - 1}" if size > 1 else "its only rank is 0"


def alone(plan: Plan) -> Seat:
    """Return the seat of a job's only node, before its meeting point is held."""
    return Seat(0, 0, World.of([plan.slots]), plan.master_addr, 0)


def at_node(plan: Plan, seat: Seat, job: str, max_restarts: int) -> Plan:
    """Return the plan of one of several nodes, with what the lead has told. Its run folder is one
    of several in the job's. Raises UsageError for a --debug-rank that the job has not.
    """
    if plan.debug_rank >= seat.world.size:
        raise UsageError(
            "usage",
            f"--debug-rank {plan.debug_rank} is not a rank of this job: {_ranks_there_are(seat.world.size)}",
            help=(("give a rank that there is", "--debug-rank 0"),),
        )
    # Calls of `launch` in one program are one job, and have a folder each.
    name = f"{job}-{plan.nodes.call + 1}" if plan.nodes and plan.task else job
    folder = (
        plan.run_dir if plan.run_dir_asked else os.path.join(os.path.dirname(plan.run_dir), name)
    )
    return msgspec.structs.replace(
        plan,
        job=job,
        run_dir=os.path.join(folder, f"node{seat.node}"),
        max_restarts=max_restarts,
    )


def variables_of(plan: Plan, seat: Seat, local_rank: int) -> dict[str, str]:
    """Return the variables that we set for a rank in one attempt: torchrun's contract, and ours."""
    rank, size = str(seat.ranks[local_rank]), str(seat.world.size)
    # See torch_hooks.py: a program that spawns its own ranks must find torch's plain meaning.
    plain = not plan.torch or (seat.world.size == 1 and plan.hooks)
    return {
        "RALLYPOINT_JOB": plan.job,
        "GROUP_RANK": str(seat.node),
        "ROLE_NAME": plan.role,
        "LOCAL_WORLD_SIZE": str(plan.local_size),
        "WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": str(seat.world.nodes),
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": plan.run_id or plan.job,
        **plan.environment,
        **plan.rank_environment[local_rank],
        **({"TORCHELASTIC_USE_AGENT_STORE": "False"} if plain else {}),
        "RANK": rank,
        "ROLE_RANK": rank,
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": str(seat.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(seat.attempt),
    }


def prefixes(plan: Plan, seat: Seat) -> tuple[str, ...] | None:
    """Return the prefix of each line of a local rank, from torchrun's template; unknown names in it
    stay as they are. None: no template was given."""
    if plan.logs.prefix is None:
        return None
    template = Template(plan.logs.prefix)
    return tuple(
        template.safe_substitute(role_name=plan.role, rank=rank, local_rank=local_rank)
        for local_rank, rank in zip(plan.local_ranks, seat.ranks, strict=True)
    )
