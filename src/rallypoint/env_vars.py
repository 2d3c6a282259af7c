"""Every environment variable read or set, each with its sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Variable(NamedTuple):
    """One variable; a name that ends with `*` stands for a family."""

    name: str
    use: Literal["read", "set", "read and set"]
    sentence: str


VARIABLES: tuple[Variable, ...] = (
    # ours
    Variable(
        "RALLYPOINT_JOB",
        "read and set",
        "The id of the run, in every process that belongs to it, and what rallypoint.connect() tells a store.",
    ),
    Variable(
        "RALLYPOINT_STORE",
        "read and set",
        "The address of the store that rallypoint.connect() means. In a job's ranks, new for every attempt, the job's own, and a"
        " line says so when another one was exported; not set by --no-python, whose programs get no secret.",
    ),
    Variable(
        "RALLYPOINT_SECRET_FILE",
        "read",
        "A file with the secret of the store that RALLYPOINT_STORE names, for its owner only (mode 0600). Ranks need none, and it is taken"
        " out of their environment: their secret comes as a descriptor.",
    ),
    Variable(
        "RALLYPOINT_FORWARDED",
        "read and set",
        "Addresses of stores, separated by commas, at which something passes connections on (a tunnel, a published port, NAT), and is meant"
        " to: others are refused there. Set by a ChaosProxy while it is open.",
    ),
    Variable("RALLYPOINT_KEPT_BYTES", "read", "What all kept runs together may take, 500MiB or 4GiB for instance; without it 1GiB."),
    Variable(
        "RALLYPOINT_LOG",
        "read",
        "debug, info, warning or error: print what the store's client and server log, from that level on, to stderr.",
    ),
    # torchrun's options
    Variable("PET_*", "read", "The default of torchrun's option of that name: PET_MAX_RESTARTS for --max-restarts."),
    Variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "read", "The default of --log-line-prefix-template."),
    Variable("TORCHELASTIC_ENABLE_FILE_TIMER", "read", "torchrun's watchdog by file timers: not built, and one line says so."),
    Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "read", "The default of --grace, after PET_SHUTDOWN_TIMEOUT."),
    Variable("PYTHON_EXEC", "read", "torchrun's other interpreter for the workers: not used, and one line says so."),
    # what a worker finds, as under torchrun
    Variable("RANK", "set", "The rank in the job, from 0."),
    Variable("LOCAL_RANK", "set", "The rank on this node, from 0; 0 on every rank with --virtual-local-rank."),
    Variable("GROUP_RANK", "set", "The number of the node, from 0."),
    Variable("ROLE_RANK", "set", "The rank among those of the same role: all of them."),
    Variable("ROLE_NAME", "set", "What --role says, or default."),
    Variable("WORLD_SIZE", "set", "The number of ranks in the job."),
    Variable("LOCAL_WORLD_SIZE", "set", "The number of ranks on this node."),
    Variable("GROUP_WORLD_SIZE", "set", "The number of nodes."),
    Variable("ROLE_WORLD_SIZE", "set", "The number of ranks of the same role: all of them."),
    Variable("MASTER_ADDR", "set", "The address of the socket that is held for init_process_group."),
    Variable("MASTER_PORT", "set", "Its port; a new one for every attempt, unless --master-port names it."),
    Variable("TORCHELASTIC_RESTART_COUNT", "set", "The attempt, from 0."),
    Variable("TORCHELASTIC_MAX_RESTARTS", "set", "What --max-restarts says."),
    Variable("TORCHELASTIC_RUN_ID", "set", "What --rdzv-id says, or the id of the run."),
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE",
        "set",
        "True: every rank is a client of the store at MASTER_ADDR and MASTER_PORT. False for a lone rank, whose own processes may be"
        " ranks.",
    ),
    Variable("TORCHELASTIC_SIGNALS_TO_HANDLE", "set", "What --signals-to-handle says."),
    Variable(
        "TORCHELASTIC_ERROR_FILE",
        "read and set",
        "Where torch's @record writes the exception of this rank. The launcher's own, when it is set, gets that of the cause.",
    ),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "set", "1, unless it is set already."),
    Variable(
        "TORCH_DIST_INIT_BARRIER",
        "read and set",
        "1 while launch(backend=...) opens the process group, unless it is set: no rank goes on before all have joined.",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "read and set",
        "Read for -n gpu, for NCCL and for reports; set for each rank with --virtual-local-rank only.",
    ),
    Variable("CUDA_DEVICE_ORDER", "read", "Whether CUDA numbers GPUs as nvidia-smi does: said in reports about GPUs that differ."),
    Variable("LD_LIBRARY_PATH", "read", "A folder of cuda-compat in it: then an old driver's number is not taken for its limit."),
    Variable("LD_PRELOAD", "read", "Set: the interpreter of each rank takes everything apart at its end, as a library there may want."),
    Variable("GLOO_SOCKET_IFNAME", "read", "Never set; when it names an interface that is not there, a line says so at the start."),
    Variable("NCCL_SOCKET_IFNAME", "read", "The same."),
    # threads and names
    Variable(
        "OMP_NUM_THREADS",
        "read and set",
        "Set in the workers when there are several and it is not set: each rank's share of the processors, at least 1 (torchrun sets 1).",
    ),
    Variable(
        "OPENBLAS_NUM_THREADS", "read and set", "1 in the template, which must have one thread; the workers get the user's own value back."
    ),
    Variable("GOTO_NUM_THREADS", "read", "OpenBLAS's older name for its number of threads, honoured for the workers as OpenBLAS does."),
    Variable(
        "RES_OPTIONS",
        "read and set",
        "Set to timeout:1 attempts:1 in the process that serves torch's store, when it is not set: torch asks DNS for 127.0.0.1's name.",
    ),
    # the terminal and files
    Variable("NO_COLOR", "read", "Set and not empty: no colours."),
    Variable("FORCE_COLOR", "read", "Set and not empty: colours also where there is no terminal; NO_COLOR wins."),
    Variable("COLUMNS", "read", "The width to write reports in; at most 100 is used."),
    Variable("TERM", "read", "dumb: no colours, and no line that redraws itself."),
    Variable("PYTHONBREAKPOINT", "read", "Set by the user: breakpoint() is left as it says."),
    Variable("XDG_STATE_HOME", "read", "The folder in which rallypoint/runs is kept; without it ~/.local/state."),
    Variable("HOME", "read", "The home folder, for ~/.local/state."),
    Variable("XDG_RUNTIME_DIR", "read", "The folder in which a store's Unix socket gets a private folder of its own."),
    Variable("TMPDIR", "read", "The same where XDG_RUNTIME_DIR is not set or will not do; after it /tmp."),
    Variable("PATH", "read", "Where the program of --no-python is looked for."),
)


def covers(name: str) -> bool:
    """Whether a row stands for `name`, a family's row included."""
    return any(name == v.name or (v.name.endswith("*") and name.startswith(v.name[:-1])) for v in VARIABLES)


def reference() -> str:
    """The table of docs/reference/environment.md."""
    rows = [f"| `{variable.name}` | {variable.use} | {variable.sentence} |" for variable in VARIABLES]
    return "\n".join(["| variable | | meaning |", "|---|---|---|", *rows]) + "\n"
