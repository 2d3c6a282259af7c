"""Every option of every command, in a table each: parser, `--help` and the reference page are made
from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rallypoint.cli.option_values import (
    read_address,
    read_backend,
    read_checks,
    read_choice,
    read_count,
    read_endpoint,
    read_host,
    read_log_dir,
    read_modules,
    read_node_timeout,
    read_nodes,
    read_notices,
    read_nproc,
    read_path,
    read_patience,
    read_peer,
    read_port,
    read_port_range,
    read_ranks,
    read_seconds,
    read_settings,
    read_signals,
    read_size,
    read_streams,
    read_words,
)

Fate = Literal["ours", "same", "accepted"]
FATES: dict[Fate, str] = {
    "ours": "rallypoint's own",
    "same": "torchrun's, meaning the same",
    "accepted": "torchrun's, without effect here: accepted, and one line says why",
}


class Option(msgspec.Struct, frozen=True):
    """Row of a table of options. Every `--long-name` may be typed `--long_name` too."""

    spelled: str  # names, with blanks between; the first long one names the value
    sentence: str  # for --help and the reference page
    fate: Fate = "ours"
    metavar: str = ""  # "" for a flag
    read: Callable[[str], Any] = str  # ValueError says what is wrong, as the end of a sentence
    default: Any = None
    other_variable: str = ""  # in the place of torchrun's, or where torchrun has none
    fallback: str = ""  # a second variable, asked when the first is not set
    example: str = ""  # a good one, for the help of an error
    why: str = ""  # accepted: why it has no effect
    adds_up: bool = False  # may be given several times; the tuples that `read` returns are joined

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.spelled.split())

    @property
    def key(self) -> str:
        return self.names[-1][2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """Name of the variable that gives the default when it is set; "" for none."""
        torchruns = f"PET_{self.key.upper()}" if self.fate == "same" else ""
        return self.other_variable or torchruns

    @property
    def spellings(self) -> tuple[str, ...]:
        """All that may be typed: hyphens and underscores."""
        return tuple(dict.fromkeys((*self.names, f"--{self.key}")))


_torchruns = functools.partial(Option, fate="same")

RUN: tuple[Option, ...] = (
    Option(
        "-n --nproc-per-node",
        "ranks on this node: a number, cpu, gpu, or auto (gpu if there are any, else cpu); "
        "without it 1",
        metavar="N", read=read_nproc, other_variable="PET_NPROC_PER_NODE", example="-n 4",
    ),
    Option(
        "--preload",
        "import these modules once, before the ranks are forked; none: no part of torch unasked",
        metavar="MODULE,...", read=read_modules, default=(), adds_up=True,
        example="--preload transformers,datasets",
    ),
    Option("--fresh", "start every rank as a new interpreter instead of forking it from a template"),
    Option(
        "--port-range", "listen on a port of this range only",
        metavar="A-B", read=read_port_range, example="--port-range 20000-20100",
    ),
    Option(
        "--grace",
        "seconds between asking a rank to stop (a second Ctrl-C cuts them short) and SIGKILL",
        metavar="S", read=read_seconds, default=30.0, example="--grace 30",
    ),
    Option(
        "--notice-signal",
        "signals that do not stop the job and are handed to the ranks, which are told by "
        "rallypoint.preempted() as well; none: no signal; without it USR1,USR2, unless "
        "--signals-to-handle names them",
        metavar="SIG,...", read=read_notices, example="--notice-signal USR1",
    ),
    Option(
        "--stall",
        "report where each rank is when none has moved for S seconds (0: never; several ranks: "
        "300); nothing is stopped",
        metavar="S", read=read_patience, example="--stall 300",
    ),
    Option(
        "--on-failure",
        "when a rank fails: stop the others, or let them finish; the exit status is the "
        "failure's either way",
        metavar="stop|continue", read=read_choice("stop", "continue"), default="stop",
        example="--on-failure stop",
    ),
    Option(
        "--debug-rank", "the rank that has stdin and breakpoint(); without it rank 0",
        metavar="R", read=read_count, example="--debug-rank 0",
    ),
    Option(
        "--run-dir",
        "folder for this run's logs, events and report; without it one under the user's state "
        "folder",
        metavar="DIR", default="", example="--run-dir runs/today",
    ),
    Option(
        "--log-line-prefix-template",
        "what stands before each line of a rank: a text with ${rank}, ${local_rank} and "
        "${role_name}; '' for nothing, as a program behind | may want it. Without it [rank] when "
        "there are several",
        metavar="TEXT", other_variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        example="--log-line-prefix-template '${role_name}${rank}: '",
    ),
    Option(
        "--plain",
        "do not look into the workers: no phases, no roll call, no wrap of init_process_group",
    ),
    Option("--quiet", "say nothing of our own but errors"),
    Option(
        "--error-format", "how errors and reports are written to stderr",
        metavar="text|json", read=read_choice("text", "json"), default="text",
        example="--error-format json",
    ),
    Option(
        "--dry-run", "print what would start, where and with what environment, and start nothing",
    ),
    Option("-h --help", "print this"),
    # torchrun's own, meaning the same
    _torchruns("-m --module", "the program is a module, run as python -m would"),
    _torchruns("--no-python", "the program is an executable of any kind, not a Python script"),
    _torchruns("--run-path", "the program is a script; takes precedence over --no-python and -m"),
    _torchruns(
        "--standalone",
        "this node alone, on a free port: --rdzv-* and --master-* are ignored (a free port is "
        "the default here)",
    ),
    _torchruns(
        "--max-restarts",
        "how often all ranks are started again after a failure; no more when the same exception "
        "has ended three attempts within 10 s each",
        metavar="N", read=read_count, default=0, example="--max-restarts 3",
    ),
    _torchruns(
        "--master-addr",
        "with several nodes the address of node 0; on one node its own: ranks meet at 127.0.0.1",
        metavar="ADDR", read=read_address, default="", example="--master-addr 127.0.0.1",
    ),
    _torchruns(
        "--master-port",
        "node 0 listens on this port; it is bound before any rank starts (without it any free one)",
        metavar="PORT", read=read_port, example="--master-port 29500",
    ),
    _torchruns(
        "--rdzv-id",
        "the job's name in TORCHELASTIC_RUN_ID and in --log-dir; without it the id of this run. "
        "Nodes that name another job are refused",
        metavar="ID", default="",
    ),
    _torchruns(
        "--role", "the workers' ROLE_NAME",
        metavar="NAME", default="default",
    ),
    _torchruns(
        "--log-dir",
        "folder for <id>_<random>/attempt_<n>/<local rank>/stdout.log and stderr.log; /dev/null "
        "for none",
        metavar="DIR", read=read_log_dir, default="", example="--log-dir logs",
    ),
    _torchruns(
        "-r --redirects",
        "write streams to files instead of the terminal: 1 stdout, 2 stderr, 3 both; or for each "
        "local rank, 0:3,12:1",
        metavar="MAP", read=read_streams, default=0, example="-r 0:1,1:3",
    ),
    _torchruns(
        "-t --tee", "write streams to files and to the terminal; MAP as for --redirects",
        metavar="MAP", read=read_streams, default=0, example="-t 3",
    ),
    _torchruns(
        "--local-ranks-filter", "show the words of these local ranks only on the terminal",
        metavar="R,...", read=read_ranks, default=(), example="--local-ranks-filter 0,1",
    ),
    _torchruns(
        "--duplicate-stdout-filters",
        "copy stdout lines with one of these words to filtered_stdout.log; ,, is a comma",
        metavar="WORD,...", read=read_words, default=(),
    ),
    _torchruns(
        "--duplicate-stderr-filters",
        "copy stderr lines with one of these words to filtered_stderr.log; ,, is a comma",
        metavar="WORD,...", read=read_words, default=(),
    ),
    _torchruns(
        "--signals-to-handle", "the signals that stop the job; SIGINT always does",
        metavar="SIG,...", read=read_signals,
        default=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"),
        example="--signals-to-handle SIGTERM,SIGUSR1",
    ),
    _torchruns(
        "--shutdown-timeout", "torchrun's name for --grace",
        metavar="S", read=read_seconds,
        fallback="TORCH_ELASTIC_SHUTDOWN_TIMEOUT", example="--grace 30",
    ),
    _torchruns(
        "--virtual-local-rank",
        "every rank has LOCAL_RANK=0 and sees one GPU, its own, in CUDA_VISIBLE_DEVICES",
    ),
    # torchrun's, for several nodes
    _torchruns(
        "--nnodes",
        "number of nodes of the job; one rallypoint run is started on each",
        metavar="N", read=read_nodes, default=1, example="--nnodes 2",
    ),
    Option(
        "--engine",
        "what starts the nodes: local, each node's own command; ray, one command, which starts a "
        "launcher on so many nodes of a Ray cluster",
        metavar="local|ray", read=read_choice("local", "ray"), default="local",
        example="--engine ray",
    ),
    _torchruns(
        "--node-rank",
        "place of this node; node 0 leads. Without it, the node whose address --rdzv-endpoint "
        "names leads, and the others get places as they come",
        metavar="R", read=read_count, example="--node-rank 0",
    ),
    _torchruns(
        "--rdzv-backend",
        "how nodes find each other: static (at --master-addr and --master-port) or c10d (at "
        "--rdzv-endpoint)",
        metavar="NAME", read=read_backend, default="static", example="--rdzv-backend c10d",
    ),
    _torchruns(
        "--rdzv-endpoint",
        "where nodes find each other. file:///shared/dir/job (not torchrun's): by a folder on a "
        "disk that all share; on one node that place is this job's alone while it runs",
        metavar="HOST[:PORT]", read=read_endpoint, default=("", 0),
        example="--rdzv-endpoint node0:29400",
    ),
    _torchruns(
        "--rdzv-conf",
        "join_timeout=S (or timeout=S): seconds in which all nodes must come, 600 without it; "
        "is_host=1: this node leads",
        metavar="K=V,...", read=read_settings, default=(), example="--rdzv-conf join_timeout=900",
    ),
    _torchruns(
        "--local-addr", "the address of this node from which it reaches the others",
        metavar="ADDR", read=read_address, default="", example="--local-addr 10.0.0.2",
    ),
    Option(
        "--secret-file",
        "with several nodes: a file (mode 0600) with the secret of the job, the same on all",
        metavar="F", default="", other_variable="RALLYPOINT_SECRET_FILE",
        example="--secret-file secret",
    ),
    Option(
        "--tls",
        "with several nodes: encrypt what the launchers say to each other, and the job's store; on all nodes or on none. "
        "Needs rallypoint[tls]",
    ),
    Option(
        "--node-timeout",
        "seconds without a sign of life after which a node is lost, and the job ends",
        metavar="S", read=read_node_timeout, default=2.0, example="--node-timeout 10",
    ),
    # torchrun's, without effect here
    Option(
        "--monitor-interval", "how often torchrun looks whether a worker has ended",
        metavar="S", fate="accepted", read=read_seconds, other_variable="PET_MONITOR_INTERVAL",
        example="--monitor-interval 0.1",
        why="a rank's end is seen at once, without looking at intervals",
    ),
    Option(
        "--start-method", "how torchrun starts functions; never had an effect on scripts",
        metavar="NAME", fate="accepted", read=read_choice("spawn", "fork", "forkserver"),
        other_variable="PET_START_METHOD", example="--start-method spawn",
        why="it is for functions; scripts are forked from the template, or --fresh",
    ),
    Option(
        "--event-log-handler", "where torchrun's events go",
        metavar="NAME", fate="accepted", other_variable="PET_EVENT_LOG_HANDLER",
        why="what happened stands in events.jsonl of the run folder",
    ),
    Option(
        "--logs-specs", "torchrun's plug-in for log folders",
        metavar="NAME", fate="accepted",
        why="torchrun's plug-ins are not loaded; --log-dir, -r and -t say where logs go",
    ),
    Option(
        "--numa-binding", "bind ranks to the processors near their GPU",
        metavar="MODE", fate="accepted",
        read=read_choice("node", "socket", "exclusive", "core-complex"),
        example="--numa-binding node", why="binding to processors is not built yet",
    ),
)  # fmt: skip


BY_KEY = {option.key: option for option in RUN}
BY_SPELLING = {spelling: option for option in RUN for spelling in option.spellings}


def _reworded(key: str, sentence: str) -> Option:
    """Return an option of `run` for another command, where it means a little else."""
    return msgspec.structs.replace(BY_KEY[key], sentence=sentence)


SERVE = (
    Option(
        "--host",
        "the address to listen on, and no other; 0.0.0.0 or :: for all of this machine's; "
        "without it only clients on this host",
        metavar="H", read=read_host, default="127.0.0.1", example="--host 127.0.0.1",
    ),
    Option(
        "--port", "the port; 0 is any free one",
        metavar="P", read=read_port, default=0, example="--port 29500",
    ),
    _reworded("port_range", "take the free port from this range only"),
    Option(
        "--port-file",
        "write the port's number into this file when clients may come; the file is whole or "
        "absent",
        metavar="F", read=read_path, example="--port-file port",
    ),
    Option(
        "--secret-file",
        "a file (mode 0600) with the secret that clients must know; without it one is made, and "
        "its path printed",
        metavar="F", read=read_path, example="--secret-file secret",
    ),
    Option(
        "--max-bytes",
        "what keys and values may take in all; without it a quarter of the memory that this process "
        "may use",
        metavar="N", read=read_size, example="--max-bytes 2GiB",
    ),
    BY_KEY["error_format"],
    BY_KEY["help"],
)  # fmt: skip

STACKS = (
    _reworded("error_format", "how the ranks are written to stdout, and errors to stderr"),
    BY_KEY["help"],
)

STOP = (_reworded("error_format", "how errors are written to stderr"), BY_KEY["help"])

DOCTOR = (
    Option(
        "--listen",
        "wait for other machines' doctor --peer at this port, and check the way to each of them; "
        "0 is any free one",
        metavar="PORT", read=read_port, example="--listen 29500",
    ),
    Option(
        "--peer",
        "check the way to a machine where doctor --listen PORT runs, and back; may be given "
        "several times",
        metavar="HOST:PORT", read=read_peer, default=(), example="--peer node08:29500",
        adds_up=True,
    ),
    _reworded("secret_file", "with --listen or --peer: a file (mode 0600) with the secret that both machines have, as a job on both needs it"),
    _reworded("port_range", "with --listen or --peer: this side listens on ports of this range only, as a firewall may ask for"),
    Option(
        "--only", "these checks and no others",
        metavar="NAME,...", read=read_checks, default=(), example="--only limits,shm",
        adds_up=True,
    ),
    Option(
        "--skip", "all checks but these",
        metavar="NAME,...", read=read_checks, default=(), example="--skip job", adds_up=True,
    ),
    _reworded("error_format", "how findings are written to stdout, and errors to stderr; json is one object a line"),
    BY_KEY["help"],
)  # fmt: skip

SHOW = (
    Option("--list", "the runs that are kept, newest first, a line each"),
    _reworded("error_format", "json: what is shown is one JSON document, for a program"),
    BY_KEY["help"],
)

EXPLAIN = (BY_KEY["error_format"], BY_KEY["help"])
