"""Every option of every command, in a table each: parser, `--help` and the reference page are made
from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rallypoint.cli import option_values

Fate = Literal["ours", "same", "accepted", "several-nodes"]
FATES: dict[Fate, str] = {
    "ours": "rallypoint's own",
    "same": "torchrun's, meaning the same",
    "accepted": "torchrun's, without effect here: accepted, and one line says why",
    "several-nodes": "torchrun's, for several nodes: accepted when they ask for this node alone",
}


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Every `--long-name` may be typed `--long_name` too."""

    names: tuple[str, ...]  # the first long one names the value
    sentence: str  # for --help and the reference page
    fate: Fate = "ours"
    metavar: str = ""  # "" for a flag
    read: Callable[[str], Any] = (
        str  # text to value; ValueError says what is wrong with it, as the end of a sentence
    )
    default: Any = None
    variable: str = ""  # torchrun's PET_*: the default when it is set
    fallback: str = ""  # a second variable, asked when the first is not set
    example: str = ""  # what a good one looks like, for the help of an error
    why: str = ""  # accepted: why it has no effect
    alone: bool = False  # no words of the command's beside it
    adds_up: bool = (
        False  # it may be given several times, and the value is a tuple of all that was given
    )

    @property
    def key(self) -> str:
        return next(name for name in self.names if name.startswith("--"))[2:].replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All that may be typed: hyphens and underscores."""
        return tuple(
            dict.fromkeys(
                s
                for n in self.names
                for s in (n, "--" + n[2:].replace("-", "_") if n.startswith("--") else n)
            )
        )


RUN: tuple[Option, ...] = (
    Option(
        names=("-n", "--nproc-per-node"), metavar="N", read=option_values.read_nproc, variable="PET_NPROC_PER_NODE", example="-n 4",
        sentence="ranks on this node: a number, cpu, gpu, or auto (gpu if there are any, else cpu); without it 1",
    ),
    Option(
        names=("--preload",), metavar="MODULE,...", read=option_values.read_modules, default=(), example="--preload transformers,datasets",
        sentence="import these modules once, before the ranks are forked; none: no part of torch unasked",
    ),
    Option(names=("--fresh",), sentence="start every rank as a new interpreter instead of forking it from a template"),
    Option(
        names=("--port-range",), metavar="A-B", read=option_values.read_port_range, example="--port-range 20000-20100",
        sentence="listen on a port of this range only",
    ),
    Option(
        names=("--grace",), metavar="S", read=option_values.read_seconds, default=30.0, example="--grace 30",
        sentence="seconds between asking a rank to stop (a second Ctrl-C cuts them short) and SIGKILL",
    ),
    Option(
        names=("--notice-signal",), metavar="SIG,...", read=option_values.read_notices, example="--notice-signal USR1",
        sentence="signals that do not stop the job and are handed to the ranks, which are told by rallypoint.preempted() as well; "
        "none: no signal; without it USR1,USR2, unless --signals-to-handle names them",
    ),
    Option(
        names=("--stall",), metavar="S", read=option_values.read_patience, example="--stall 300",
        sentence="report where each rank is when none has moved for S seconds (0: never; several ranks: 300); nothing is stopped",
    ),
    Option(
        names=("--on-failure",), metavar="stop|continue", read=option_values.read_choice("stop", "continue"), default="stop",
        example="--on-failure stop",
        sentence="when a rank fails: stop the others, or let them finish; the exit status is the failure's either way",
    ),
    Option(
        names=("--debug-rank",), metavar="R", read=option_values.read_count, example="--debug-rank 0",
        sentence="the rank that has stdin and breakpoint(); without it rank 0",
    ),
    Option(
        names=("--run-dir",), metavar="DIR", default="", example="--run-dir runs/today",
        sentence="folder for this run's logs, events and report; without it one under the user's state folder",
    ),
    Option(
        names=("--log-line-prefix-template",), metavar="TEXT", variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        example="--log-line-prefix-template '${role_name}${rank}: '",
        sentence="what stands before each line of a rank: a text with ${rank}, ${local_rank} and ${role_name}; '' for nothing, "
        "as a program behind | may want it. Without it [rank] when there are several",
    ),
    Option(names=("--plain",), sentence="do not look into the workers: no phases, no roll call, no wrap of init_process_group"),
    Option(names=("--quiet",), sentence="say nothing of our own but errors"),
    Option(
        names=("--error-format",), metavar="text|json", read=option_values.read_choice("text", "json"), default="text",
        example="--error-format json",
        sentence="how errors and reports are written to stderr",
    ),
    Option(names=("--dry-run",), sentence="print what would start, where and with what environment, and start nothing"),
    Option(names=("-h", "--help"), sentence="print this"),
    # torchrun's own, meaning the same
    Option(
        names=("-m", "--module"), fate="same", variable="PET_MODULE",
        sentence="the program is a module, run as python -m would",
    ),
    Option(
        names=("--no-python",), fate="same", variable="PET_NO_PYTHON",
        sentence="the program is an executable of any kind, not a Python script",
    ),
    Option(
        names=("--run-path",), fate="same", variable="PET_RUN_PATH",
        sentence="the program is a script; takes precedence over --no-python and -m",
    ),
    Option(
        names=("--standalone",), fate="same", variable="PET_STANDALONE",
        sentence="this node alone, on a free port: --rdzv-* and --master-* are ignored (a free port is the default here)",
    ),
    Option(
        names=("--max-restarts",), metavar="N", fate="same", read=option_values.read_count, default=0, variable="PET_MAX_RESTARTS",
        example="--max-restarts 3",
        sentence="how often all ranks are started again after a failure, unless the same one comes three times at once",
    ),
    Option(
        names=("--master-addr",), metavar="ADDR", fate="same", read=option_values.read_address, default="", variable="PET_MASTER_ADDR",
        sentence="must be this machine; ranks on one node meet at 127.0.0.1", example="--master-addr 127.0.0.1",
    ),
    Option(
        names=("--master-port",), metavar="PORT", fate="same", read=option_values.read_port, variable="PET_MASTER_PORT",
        example="--master-port 29500",
        sentence="listen on this port; it is bound before any rank starts (without it any free one)",
    ),
    Option(
        names=("--rdzv-id",), metavar="ID", fate="same", default="", variable="PET_RDZV_ID",
        sentence="the job's name in TORCHELASTIC_RUN_ID and in --log-dir; without it the id of this run",
    ),
    Option(
        names=("--role",), metavar="NAME", fate="same", default="default", variable="PET_ROLE",
        sentence="the workers' ROLE_NAME",
    ),
    Option(
        names=("--log-dir",), metavar="DIR", fate="same", default="", variable="PET_LOG_DIR", example="--log-dir logs",
        sentence="folder for <id>_<random>/attempt_<n>/<local rank>/stdout.log and stderr.log; /dev/null for none",
    ),
    Option(
        names=("-r", "--redirects"), metavar="MAP", fate="same", read=option_values.read_streams, default=0, variable="PET_REDIRECTS",
        example="-r 0:1,1:3",
        sentence="write streams to files instead of the terminal: 1 stdout, 2 stderr, 3 both; or for each local rank, 0:3,12:1",
    ),
    Option(
        names=("-t", "--tee"), metavar="MAP", fate="same", read=option_values.read_streams, default=0, variable="PET_TEE", example="-t 3",
        sentence="write streams to files and to the terminal; MAP as for --redirects",
    ),
    Option(
        names=("--local-ranks-filter",), metavar="R,...", fate="same", read=option_values.read_ranks, default=(),
        variable="PET_LOCAL_RANKS_FILTER",
        example="--local-ranks-filter 0,1", sentence="show the words of these local ranks only on the terminal",
    ),
    Option(
        names=("--duplicate-stdout-filters",), metavar="WORD,...", fate="same", read=option_values.read_words, default=(),
        variable="PET_DUPLICATE_STDOUT_FILTERS", sentence="copy stdout lines with one of these words to filtered_stdout.log; ,, is a comma",
    ),
    Option(
        names=("--duplicate-stderr-filters",), metavar="WORD,...", fate="same", read=option_values.read_words, default=(),
        variable="PET_DUPLICATE_STDERR_FILTERS", sentence="copy stderr lines with one of these words to filtered_stderr.log; ,, is a comma",
    ),
    Option(
        names=("--signals-to-handle",), metavar="SIG,...", fate="same", read=option_values.read_signals,
        default=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"),
        variable="PET_SIGNALS_TO_HANDLE", example="--signals-to-handle SIGTERM,SIGUSR1",
        sentence="the signals that stop the job; SIGINT always does",
    ),
    Option(
        names=("--shutdown-timeout",), metavar="S", fate="same", read=option_values.read_seconds, variable="PET_SHUTDOWN_TIMEOUT",
        fallback="TORCH_ELASTIC_SHUTDOWN_TIMEOUT", example="--grace 30",
        sentence="torchrun's name for --grace",
    ),
    Option(
        names=("--virtual-local-rank",), fate="same", variable="PET_VIRTUAL_LOCAL_RANK",
        sentence="every rank has LOCAL_RANK=0 and sees one GPU, its own, in CUDA_VISIBLE_DEVICES",
    ),
    # torchrun's, for several nodes
    Option(
        names=("--nnodes",), metavar="N|MIN:MAX", fate="several-nodes", read=option_values.read_nodes, default=(1, 1),
        variable="PET_NNODES",
        example="--nnodes 1",
        sentence="number of nodes; here 1 or 1:1",
    ),
    Option(
        names=("--node-rank",), metavar="R", fate="several-nodes", read=option_values.read_integer, default=0, variable="PET_NODE_RANK",
        example="--node-rank 0",
        sentence="which node this is; here 0",
    ),
    Option(
        names=("--rdzv-backend",), metavar="NAME", fate="several-nodes", read=option_values.read_backend, default="static",
        variable="PET_RDZV_BACKEND",
        example="--rdzv-backend c10d",
        sentence="how nodes meet; here static or c10d, which are the same on one node",
    ),
    Option(
        names=("--rdzv-endpoint",), metavar="HOST[:PORT]", fate="several-nodes", read=option_values.read_endpoint, default=("", 0),
        variable="PET_RDZV_ENDPOINT",
        example="--rdzv-endpoint localhost:29500",
        sentence="where nodes meet; here a name of this machine, and the port as for --master-port. file:///shared/dir/job (not "
        "torchrun's): that place is this job's alone while it runs",
    ),
    # torchrun's, without effect here
    Option(
        names=("--rdzv-conf",), metavar="K=V,...", fate="accepted", read=option_values.read_settings, default=(), variable="PET_RDZV_CONF",
        example="--rdzv-conf timeout=900",
        sentence="settings of the meeting of nodes", why="one node has nobody to wait for",
    ),
    Option(
        names=("--local-addr",), metavar="ADDR", fate="accepted", variable="PET_LOCAL_ADDR",
        sentence="the address of this node for the others", why="ranks on one node meet at 127.0.0.1",
    ),
    Option(
        names=("--monitor-interval",), metavar="S", fate="accepted", read=option_values.read_seconds, variable="PET_MONITOR_INTERVAL",
        example="--monitor-interval 0.1",
        sentence="how often torchrun looks whether a worker has ended", why="a rank's end is seen at once, without looking at intervals",
    ),
    Option(
        names=("--start-method",), metavar="NAME", fate="accepted", read=option_values.read_choice("spawn", "fork", "forkserver"),
        variable="PET_START_METHOD",
        example="--start-method spawn",
        sentence="how torchrun starts functions; never had an effect on scripts",
        why="it is for functions; scripts are forked from the template, or --fresh",
    ),
    Option(
        names=("--event-log-handler",), metavar="NAME", fate="accepted", variable="PET_EVENT_LOG_HANDLER",
        sentence="where torchrun's events go", why="what happened stands in events.jsonl of the run folder",
    ),
    Option(
        names=("--logs-specs",), metavar="NAME", fate="accepted",
        sentence="torchrun's plug-in for log folders", why="torchrun's plug-ins are not loaded; --log-dir, -r and -t say where logs go",
    ),
    Option(
        names=("--numa-binding",), metavar="MODE", fate="accepted",
        read=option_values.read_choice("node", "socket", "exclusive", "core-complex"),
        example="--numa-binding node", sentence="bind ranks to the processors near their GPU", why="binding to processors is not built yet",
    ),
)  # fmt: skip


BY_KEY = {option.key: option for option in RUN}
BY_SPELLING = {spelling: option for option in RUN for spelling in option.spellings}


SERVE: tuple[Option, ...] = (
    Option(
        names=("--host",), metavar="H", read=option_values.read_host, default="127.0.0.1", example="--host 127.0.0.1",
        sentence="the address to listen on, and no other; 0.0.0.0 or :: for all of this machine's; without it only clients on this host",
    ),
    Option(
        names=("--port",), metavar="P", read=option_values.read_port, default=0, example="--port 29500",
        sentence="the port; 0 is any free one",
    ),
    msgspec.structs.replace(BY_KEY["port_range"], sentence="take the free port from this range only"),
    Option(
        names=("--port-file",), metavar="F", read=option_values.read_path, example="--port-file port",
        sentence="write the port's number into this file when clients may come; the file is whole or absent",
    ),
    Option(
        names=("--secret-file",), metavar="F", read=option_values.read_path, example="--secret-file secret",
        sentence="a file (mode 0600) with the secret that clients must know; without it one is made, and its path printed",
    ),
    Option(
        names=("--max-bytes",), metavar="N", read=option_values.read_size, example="--max-bytes 2GiB",
        sentence="what keys and values may take in all; without it a quarter of this machine's memory",
    ),
    BY_KEY["error_format"],
    BY_KEY["help"],
)  # fmt: skip


STACKS: tuple[Option, ...] = (
    msgspec.structs.replace(
        BY_KEY["error_format"], sentence="how the ranks are written to stdout, and errors to stderr"
    ),
    BY_KEY["help"],
)


STOP: tuple[Option, ...] = (
    msgspec.structs.replace(BY_KEY["error_format"], sentence="how errors are written to stderr"),
    BY_KEY["help"],
)


DOCTOR: tuple[Option, ...] = (
    Option(
        names=("--listen",), metavar="PORT", read=option_values.read_port, example="--listen 29500",
        sentence="wait for other machines' doctor --peer at this port, and check the way to each of them; 0 is any free one",
    ),
    Option(
        names=("--peer",), metavar="HOST:PORT", read=option_values.read_peer, default=(), adds_up=True, example="--peer node08:29500",
        sentence="check the way to a machine where doctor --listen PORT runs, and back; may be given several times",
    ),
    msgspec.structs.replace(
        BY_KEY["port_range"], sentence="with --listen or --peer: this side listens on ports of this range only, as a firewall may ask for"
    ),
    Option(
        names=("--only",), metavar="NAME,...", read=option_values.read_checks, default=(), adds_up=True, example="--only limits,shm",
        sentence="these checks and no others",
    ),
    Option(
        names=("--skip",), metavar="NAME,...", read=option_values.read_checks, default=(), adds_up=True, example="--skip job",
        sentence="all checks but these",
    ),
    msgspec.structs.replace(
        BY_KEY["error_format"], sentence="how findings are written to stdout, and errors to stderr; json is one object a line"
    ),
    BY_KEY["help"],
)  # fmt: skip


SHOW: tuple[Option, ...] = (
    Option(names=("--list",), alone=True, sentence="the runs that are kept, newest first, a line each"),
    Option(
        names=("--error-format",), metavar="text|json", read=option_values.read_choice("text", "json"), default="text",
        example="--error-format json",
        sentence="json: what is shown is one JSON document, for a program",
    ),
    BY_KEY["help"],
)  # fmt: skip

EXPLAIN: tuple[Option, ...] = (BY_KEY["error_format"], BY_KEY["help"])
