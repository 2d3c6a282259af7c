"""Every option of `rallypoint run` and `rallypoint serve`, in a table each: parser, `--help` and the reference page are made from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from rallypoint.cli import foreign
from rallypoint.cli.main import filled
from rallypoint.errors import UsageError
from rallypoint.launcher.assignment import Program
from rallypoint.launcher.plan import Options
from rallypoint.launcher.sizes import LARGEST_LOCAL_SIZE

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
    read: Callable[[str], Any] = str  # text to value; ValueError says what is wrong with it, as the end of a sentence
    default: Any = None
    variable: str = ""  # torchrun's PET_*: the default when it is set
    fallback: str = ""  # a second variable, asked when the first is not set
    example: str = ""  # what a good one looks like, for the help of an error
    why: str = ""  # accepted: why it has no effect
    adds_up: bool = False  # it may be given several times, and the value is a tuple of all that was given

    @property
    def key(self) -> str:
        return next(name for name in self.names if name.startswith("--"))[2:].replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All that may be typed: hyphens and underscores."""
        return tuple(dict.fromkeys(s for n in self.names for s in (n, "--" + n[2:].replace("-", "_") if n.startswith("--") else n)))


class Given(msgspec.Struct, frozen=True):
    """A value that was given, and where: for messages."""

    spelling: str  # as typed, or the variable's name
    text: str  # "" for a flag on the command line

    def __str__(self) -> str:
        if self.spelling.startswith("-"):
            return f"{self.spelling} {self.text}" if self.text else self.spelling
        return f"{self.spelling}={self.text}"


class CommandLine(msgspec.Struct, frozen=True):
    """A command line taken apart, its values still text."""

    given: dict[str, tuple[Given, ...]]  # by key, oldest first; from the environment only when not typed
    words: tuple[str, ...]  # the program and its arguments, untouched
    typed: tuple[str, ...] = ()  # what stood before it, untouched: for a line that is to be typed again
    refusal: UsageError | None = None  # what could not be taken apart; `read` raises it, when the wanted error format is known

    @property
    def error_format(self) -> str:
        """As asked; known before any other value is read, so that every complaint can have it."""
        asked = self.given.get("error_format")
        return asked[-1].text if asked else "text"

    @property
    def wants_help(self) -> bool:
        return "help" in self.given


# --- texts to values -------------------------------------------------------------------------------------------------


def _whole(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"is not {what}") from None


def _read_nproc(text: str) -> int | str:
    if text in ("auto", "cpu", "gpu"):
        return text
    if text == "xpu":
        raise ValueError("cannot be counted without torch: give their number")
    count = _whole(text, "a number of ranks, nor auto, cpu or gpu")
    if count < 1:
        raise ValueError("starts no rank")
    if count > LARGEST_LOCAL_SIZE:
        raise ValueError(f"is more than one node can have: at most {LARGEST_LOCAL_SIZE}")
    return count


def _read_count(text: str) -> int:
    count = _whole(text, "a whole number")
    if count < 0:
        raise ValueError("is less than 0")
    return count


def _read_integer(text: str) -> int:
    return _whole(text, "a whole number")


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("is not a number of seconds from 0 up")
    return seconds


def _read_patience(text: str) -> float:
    seconds = _read_seconds(text)
    if seconds < 1:
        raise ValueError("is less than a second, and every rank stands still that long now and then")
    return seconds


def _read_port(text: str) -> int:
    port = _whole(text, "a port number")
    if not 0 <= port <= 65535:
        raise ValueError("is not a port: they go from 1 to 65535, and 0 means any free one")
    return port


def _read_port_range(text: str) -> tuple[int, int]:
    ends = re.fullmatch(r"(\d+)[-:](\d+)", text)
    if not ends:
        raise ValueError("is one port, and a range has two ends" if text.isdecimal() else "is not a range of ports")
    low, high = int(ends[1]), int(ends[2])
    if not 1 <= low <= 65535 or not 1 <= high <= 65535:
        raise ValueError("is not a range of ports: they go from 1 to 65535")
    if low > high:
        raise ValueError("ends before it starts")
    return low, high


def _read_choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}")
        return text

    return read


def _read_modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not is_module_name(name):
            raise ValueError(f"names {name!r}, which is not a module's name")
    return names


def _read_streams(text: str) -> int | dict[int, int]:
    """torchrun's stream maps: `3`, or `0:1,1:2`. torchrun's own stop at local rank 9; ours do not."""
    if text in ("0", "1", "2", "3"):
        return int(text)
    by_rank: dict[int, int] = {}
    for part in text.split(","):
        pair = re.fullmatch(r"\s*(\d+):([0-3])\s*", part)
        if not pair:
            raise ValueError("is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank")
        by_rank[int(pair[1])] = int(pair[2])
    return by_rank


def _read_ranks(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        raise ValueError("is not a list of local ranks") from None
    if min(ranks) < 0:
        raise ValueError("names a rank below 0")
    return tuple(sorted(ranks))


def _read_words(text: str) -> tuple[str, ...]:
    """Comma-separated; two commas stand for one that belongs to a word."""
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(","))


def _read_signals(text: str) -> tuple[str, ...]:
    import signal

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in signal.Signals.__members__:
            near = _nearest(name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}", signal.Signals.__members__)
            raise ValueError(f"names {name!r}, which is not a signal" + (f"; the nearest is {near}" if near else ""))
        if name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):  # the last one tells the launcher of its children
            raise ValueError(f"names {name}, which no launcher can take for this")
    return names


def _read_nodes(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    ends = [_whole(part, "a number of nodes, nor MIN:MAX") for part in text.split(":")]
    if len(ends) > 2:
        raise ValueError("is not a number of nodes, nor MIN:MAX")
    low, high = ends[0], ends[-1]
    if low < 1:
        raise ValueError("is less than one node")
    if high < low:
        raise ValueError("ends before it starts")
    return low, high


def _read_endpoint(text: str) -> tuple[str, int]:
    """`HOST[:PORT]` with the port 0 when there is none; `[::1]:29500` for IPv6. A URL stands for itself."""
    text = text.strip()
    if not text:
        return "", 0
    if "://" in text:
        return _checked_place(text), 0
    parts = re.fullmatch(r"(?:\[([^\]]+)\]|([\w.-]+|[0-9a-fA-F:]*::[0-9a-fA-F:.]*))(?::(\d+))?", text)
    if not parts:
        raise ValueError("is not HOST or HOST:PORT")
    return parts[1] or parts[2], _read_port(parts[3] or "0")


def _checked_place(url: str) -> str:
    """A URL as it was given. Of `file://` ones the path must be whole; other schemes are for several nodes, and refused later."""
    if url.startswith("file://"):
        path = url.removeprefix("file://")
        if not path.startswith("/"):
            raise ValueError(f"takes {path.partition('/')[0]!r} for a host: a whole path has three slashes, file:///{path}")
        if not path.strip("/"):
            raise ValueError("names no place")
    return url


def _read_address(text: str) -> str:
    text = text.strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _read_host(text: str) -> str:
    host = _read_address(text)
    if not host:
        raise ValueError("is not an address to listen on")
    return host


def _read_size(text: str) -> int:
    from rallypoint.store.limits import size

    try:
        return size(text)
    except UsageError:
        raise ValueError("is not a size in bytes") from None


def _read_settings(text: str) -> tuple[str, ...]:
    settings = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if not all(re.fullmatch(r"[^=]+=.+", setting) for setting in settings):
        raise ValueError("is not KEY=VALUE,KEY=VALUE")
    return settings


def _read_checks(text: str) -> tuple[str, ...]:
    """Names of the doctor's lines."""
    from rallypoint.diagnosis.doctor import NAMES

    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in NAMES:
            near = _nearest(name, NAMES)
            raise ValueError(f"names no check {name!r}" + (f"; the nearest is {near}" if near else f": there are {', '.join(NAMES)}"))
    return names


def _read_peer(text: str) -> tuple[str, int]:
    """`HOST:PORT`, both said."""
    try:
        host, port = _read_endpoint(text) if text.strip() else ("", 0)
    except ValueError as error:
        raise ValueError(str(error).partition(", and 0")[0]) from None  # any free port, on another machine, is nobody's
    if "://" in host or not host or not port:
        raise ValueError("is not HOST:PORT, of a machine where rallypoint doctor --listen PORT runs")
    return host, port


def is_module_name(text: str) -> bool:
    """Whether `text` could be imported: identifiers with dots between."""
    return all(part.isidentifier() for part in text.split("."))


# --- the table -------------------------------------------------------------------------------------------------------

TABLE: tuple[Option, ...] = (
    Option(
        names=("-n", "--nproc-per-node"), metavar="N", read=_read_nproc, variable="PET_NPROC_PER_NODE", example="-n 4",
        sentence="ranks on this node: a number, cpu, gpu, or auto (gpu if there are any, else cpu); without it 1",
    ),
    Option(
        names=("--preload",), metavar="MODULE,...", read=_read_modules, default=(), example="--preload transformers,datasets",
        sentence="import these modules once, before the ranks are forked",
    ),
    Option(names=("--fresh",), sentence="start every rank as a new interpreter instead of forking it from a template"),
    Option(
        names=("--port-range",), metavar="A-B", read=_read_port_range, example="--port-range 20000-20100",
        sentence="listen on a port of this range only",
    ),
    Option(
        names=("--grace",), metavar="S", read=_read_seconds, default=30.0, example="--grace 30",
        sentence="seconds between asking a rank to stop and SIGKILL",
    ),
    Option(
        names=("--stall",), metavar="S", read=_read_patience, example="--stall 300",
        sentence="report it when no rank has moved for S seconds, and where each stands; nothing is stopped. Longer than the longest step",
    ),
    Option(
        names=("--on-failure",), metavar="stop|continue", read=_read_choice("stop", "continue"), default="stop",
        example="--on-failure stop",
        sentence="when a rank fails: stop the others, or let them finish; the exit status is the failure's either way",
    ),
    Option(
        names=("--debug-rank",), metavar="R", read=_read_count, example="--debug-rank 0",
        sentence="the rank that has stdin and breakpoint(); without it rank 0",
    ),
    Option(
        names=("--run-dir",), metavar="DIR", default="", example="--run-dir runs/today",
        sentence="folder for this run's logs, events and report; without it one under the user's state folder",
    ),
    Option(names=("--plain",), sentence="do not look into the workers: no phases, no roll call, no wrap of init_process_group"),
    Option(names=("--quiet",), sentence="say nothing of our own but errors"),
    Option(
        names=("--error-format",), metavar="text|json", read=_read_choice("text", "json"), default="text", example="--error-format json",
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
        names=("--max-restarts",), metavar="N", fate="same", read=_read_count, default=0, variable="PET_MAX_RESTARTS",
        example="--max-restarts 3",
        sentence="how often all ranks are started again after a failure",
    ),
    Option(
        names=("--master-addr",), metavar="ADDR", fate="same", read=_read_address, default="", variable="PET_MASTER_ADDR",
        sentence="must be this machine; ranks on one node meet at 127.0.0.1", example="--master-addr 127.0.0.1",
    ),
    Option(
        names=("--master-port",), metavar="PORT", fate="same", read=_read_port, variable="PET_MASTER_PORT", example="--master-port 29500",
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
        names=("-r", "--redirects"), metavar="MAP", fate="same", read=_read_streams, default=0, variable="PET_REDIRECTS",
        example="-r 0:1,1:3",
        sentence="write streams to files instead of the terminal: 1 stdout, 2 stderr, 3 both; or for each local rank, 0:3,12:1",
    ),
    Option(
        names=("-t", "--tee"), metavar="MAP", fate="same", read=_read_streams, default=0, variable="PET_TEE", example="-t 3",
        sentence="write streams to files and to the terminal; MAP as for --redirects",
    ),
    Option(
        names=("--local-ranks-filter",), metavar="R,...", fate="same", read=_read_ranks, default=(), variable="PET_LOCAL_RANKS_FILTER",
        example="--local-ranks-filter 0,1", sentence="show the words of these local ranks only on the terminal",
    ),
    Option(
        names=("--duplicate-stdout-filters",), metavar="WORD,...", fate="same", read=_read_words, default=(),
        variable="PET_DUPLICATE_STDOUT_FILTERS", sentence="copy stdout lines with one of these words to filtered_stdout.log; ,, is a comma",
    ),
    Option(
        names=("--duplicate-stderr-filters",), metavar="WORD,...", fate="same", read=_read_words, default=(),
        variable="PET_DUPLICATE_STDERR_FILTERS", sentence="copy stderr lines with one of these words to filtered_stderr.log; ,, is a comma",
    ),
    Option(
        names=("--signals-to-handle",), metavar="SIG,...", fate="same", read=_read_signals,
        default=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"),
        variable="PET_SIGNALS_TO_HANDLE", example="--signals-to-handle SIGTERM,SIGUSR1",
        sentence="the signals that stop the job; SIGINT always does",
    ),
    Option(
        names=("--shutdown-timeout",), metavar="S", fate="same", read=_read_seconds, variable="PET_SHUTDOWN_TIMEOUT",
        fallback="TORCH_ELASTIC_SHUTDOWN_TIMEOUT", example="--grace 30",
        sentence="torchrun's name for --grace",
    ),
    Option(
        names=("--virtual-local-rank",), fate="same", variable="PET_VIRTUAL_LOCAL_RANK",
        sentence="every rank has LOCAL_RANK=0 and sees one GPU, its own, in CUDA_VISIBLE_DEVICES",
    ),
    # torchrun's, for several nodes
    Option(
        names=("--nnodes",), metavar="N|MIN:MAX", fate="several-nodes", read=_read_nodes, default=(1, 1), variable="PET_NNODES",
        example="--nnodes 1",
        sentence="number of nodes; here 1 or 1:1",
    ),
    Option(
        names=("--node-rank",), metavar="R", fate="several-nodes", read=_read_integer, default=0, variable="PET_NODE_RANK",
        example="--node-rank 0",
        sentence="which node this is; here 0",
    ),
    Option(
        names=("--rdzv-backend",), metavar="NAME", fate="several-nodes", default="static", variable="PET_RDZV_BACKEND",
        example="--rdzv-backend c10d",
        sentence="how nodes meet; here static or c10d, which are the same on one node",
    ),
    Option(
        names=("--rdzv-endpoint",), metavar="HOST[:PORT]", fate="several-nodes", read=_read_endpoint, default=("", 0),
        variable="PET_RDZV_ENDPOINT",
        example="--rdzv-endpoint localhost:29500",
        sentence="where nodes meet; here a name of this machine, and the port as for --master-port. file:///shared/dir/job (not "
        "torchrun's): that place is this job's alone while it runs",
    ),
    # torchrun's, without effect here
    Option(
        names=("--rdzv-conf",), metavar="K=V,...", fate="accepted", read=_read_settings, default=(), variable="PET_RDZV_CONF",
        example="--rdzv-conf timeout=900",
        sentence="settings of the meeting of nodes", why="one node has nobody to wait for",
    ),
    Option(
        names=("--local-addr",), metavar="ADDR", fate="accepted", variable="PET_LOCAL_ADDR",
        sentence="the address of this node for the others", why="ranks on one node meet at 127.0.0.1",
    ),
    Option(
        names=("--monitor-interval",), metavar="S", fate="accepted", read=_read_seconds, variable="PET_MONITOR_INTERVAL",
        example="--monitor-interval 0.1",
        sentence="how often torchrun looks whether a worker has ended", why="a rank's end is seen at once, without looking at intervals",
    ),
    Option(
        names=("--start-method",), metavar="NAME", fate="accepted", read=_read_choice("spawn", "fork", "forkserver"),
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
        names=("--numa-binding",), metavar="MODE", fate="accepted", read=_read_choice("node", "socket", "exclusive", "core-complex"),
        example="--numa-binding node", sentence="bind ranks to the processors near their GPU", why="binding to processors is not built yet",
    ),
)  # fmt: skip

BY_KEY = {option.key: option for option in TABLE}
BY_SPELLING = {spelling: option for option in TABLE for spelling in option.spellings}

SERVE: tuple[Option, ...] = (
    Option(
        names=("--host",), metavar="H", read=_read_host, default="127.0.0.1", example="--host 127.0.0.1",
        sentence="the address to listen on, and no other; 0.0.0.0 or :: for all of this machine's; without it only clients on this host",
    ),
    Option(names=("--port",), metavar="P", read=_read_port, default=0, example="--port 29500", sentence="the port; 0 is any free one"),
    msgspec.structs.replace(BY_KEY["port_range"], sentence="take the free port from this range only"),
    Option(
        names=("--port-file",), metavar="F", example="--port-file port",
        sentence="write the port's number into this file when clients may come; the file is whole or absent",
    ),
    Option(
        names=("--secret-file",), metavar="F", example="--secret-file secret",
        sentence="a file (mode 0600) with the secret that clients must know; without it one is made, and its path printed",
    ),
    Option(
        names=("--max-bytes",), metavar="N", read=_read_size, example="--max-bytes 2GiB",
        sentence="what keys and values may take in all; without it a quarter of this machine's memory",
    ),
    BY_KEY["error_format"],
    BY_KEY["help"],
)  # fmt: skip

STACKS: tuple[Option, ...] = (
    msgspec.structs.replace(BY_KEY["error_format"], sentence="how the ranks are written to stdout, and errors to stderr"),
    BY_KEY["help"],
)

DOCTOR: tuple[Option, ...] = (
    Option(
        names=("--listen",), metavar="PORT", read=_read_port, example="--listen 29500",
        sentence="wait for other machines' doctor --peer at this port, and check the way to each of them; 0 is any free one",
    ),
    Option(
        names=("--peer",), metavar="HOST:PORT", read=_read_peer, default=(), adds_up=True, example="--peer node08:29500",
        sentence="check the way to a machine where doctor --listen PORT runs, and back; may be given several times",
    ),
    msgspec.structs.replace(
        BY_KEY["port_range"], sentence="with --listen or --peer: this side listens on ports of this range only, as a firewall may ask for"
    ),
    Option(
        names=("--only",), metavar="NAME,...", read=_read_checks, default=(), adds_up=True, example="--only limits,shm",
        sentence="these checks and no others",
    ),
    Option(
        names=("--skip",), metavar="NAME,...", read=_read_checks, default=(), adds_up=True, example="--skip job",
        sentence="all checks but these",
    ),
    msgspec.structs.replace(
        BY_KEY["error_format"], sentence="how findings are written to stdout, and errors to stderr; json is one object a line"
    ),
    BY_KEY["help"],
)  # fmt: skip

SHOW: tuple[Option, ...] = (
    Option(names=("--list",), sentence="the runs that are kept, newest first, a line each"),
    Option(
        names=("--error-format",), metavar="text|json", read=_read_choice("text", "json"), default="text", example="--error-format json",
        sentence="json: what is shown is one JSON document, for a program",
    ),
    BY_KEY["help"],
)  # fmt: skip


# --- a command line to options ---------------------------------------------------------------------------------------


def take_apart(argv: Sequence[str], environ: Mapping[str, str], command: str = "run", table: tuple[Option, ...] = TABLE) -> CommandLine:
    """Separate our options from the program's words, without reading any value. Raises nothing: `read` and `values` do."""
    import argparse

    typed: dict[str, tuple[Given, ...]] = {}

    class Take(argparse.Action):
        def __call__(self, _parser: object, _namespace: object, value: Any, spelling: str | None = None) -> None:
            given = Given(spelling=spelling or "", text=value if isinstance(value, str) else "")
            typed[self.dest] = (*typed.get(self.dest, ()), given)

    parser = argparse.ArgumentParser(prog=f"rallypoint {command}", add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in table:
        parser.add_argument(*option.spellings, dest=option.key, action=Take, nargs=None if option.metavar else 0, default=argparse.SUPPRESS)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    words: list[str] = []
    typed_words: list[str] = []
    refusal = None
    try:
        namespace, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        refusal = _incomplete(error, command, table)
    else:
        words = namespace.words[1:] if namespace.words[:1] == ["--"] else namespace.words
        typed_words = list(argv[: len(argv) - len(namespace.words)])
        unfit = unknown or [word for word in typed_words if command == "run" and foreign.is_one_dashed(word)]
        refusal = _swallowed(typed, argv) if command == "run" else None
        if refusal is None and unfit:
            refusal = _unknown(unfit[0], argv, command, table)
    given = dict(typed)
    for option in table:
        variable = next((name for name in (option.variable, option.fallback) if name and name in environ), "")
        if variable and option.key not in given:
            given[option.key] = (Given(spelling=variable, text=environ[variable]),)
    return CommandLine(given=given, words=tuple(words), typed=tuple(typed_words), refusal=refusal)


def take_apart_anywhere(argv: Sequence[str], command: str, table: tuple[Option, ...]) -> tuple[CommandLine, tuple[str, ...]]:
    """For a command whose words are its own, and no program's arguments: options may stand before them and after. The words come apart."""
    line, words = take_apart(argv, {}, command, table), []
    while line.words and line.refusal is None:
        words.append(line.words[0])
        rest = take_apart(line.words[1:], {}, command, table)
        line = CommandLine(given={**line.given, **rest.given}, words=rest.words, refusal=rest.refusal)
    return line, tuple(words)


def _incomplete(refusal: Any, command: str, table: tuple[Option, ...]) -> UsageError:
    spelling = (refusal.argument_name or "").split("/")[0]
    option = next(option for option in table if spelling in option.spellings)
    if option.metavar:
        return UsageError("usage", f"{spelling} lacks its value, {option.metavar}", help=_example(option, command))
    return UsageError("usage", f"{spelling} is a flag and takes no value", help=(("give it alone", spelling),))


def _swallowed(typed: Mapping[str, tuple[Given, ...]], argv: Sequence[str]) -> UsageError | None:
    """`-n train.py`: an option without its value has taken the program for it."""
    for key, given in typed.items():
        option, last = BY_KEY[key], given[-1]
        if not (option.metavar and option.example and last.text.endswith(".py") and last.text in argv):
            continue
        try:
            option.read(last.text)
        except ValueError:
            at = list(argv).index(last.text)
            return UsageError(
                "usage",
                f"{last.spelling} lacks its value, {option.metavar}: {last.text} stands in its place",
                help=(("give, for example", retyped((*argv[:at], option.example.rpartition(" ")[2]), *argv[at:])),),
            )
    return None


ALIKE = 0.7
"""How alike two names must be, by difflib's measure: a letter left out, doubled or swapped leaves 0.8 and more, and `config-file` has 0.67
in common with `on-failure`."""


def _unknown(word: str, argv: Sequence[str], command: str, table: tuple[Option, ...]) -> UsageError:
    """Name the nearest option, or why there is none, and show the command as it must be."""
    name, _, _ = word.partition("=")
    stranger = foreign.DIFFERENT.get(foreign.hyphened(name)) if command == "run" else None
    if stranger is not None:
        help = [(stranger.help, mended(argv, command, table))]
        return UsageError("option-unknown", f"rallypoint run has no option {name}: {stranger.headline}", help=tuple(help))
    near = foreign.WHOLE.get(word) or _nearest_option(name, table)
    helps = []
    if near:
        helps.append((f"use {near}", mended(argv, command, table)))
    if command == "run" and not (foreign.is_one_dashed(word) or foreign.hyphened(name) in foreign.SAME or word in foreign.WHOLE):
        helps.append(("put the program's own options after its name", _behind_the_program(word, argv)))
    helps = helps or [("see the options", f"rallypoint {command} --help")]
    nearest = f"; the nearest is {near}" if near else ""
    return UsageError("option-unknown", f"rallypoint {command} has no option {name}{nearest}", help=tuple(helps))


def mended(argv: Sequence[str], command: str = "run", table: tuple[Option, ...] = TABLE) -> str:
    """The command without the options that it lacks, each in the words that it has for it; those that it has none for stay."""
    import shlex

    argv, in_front, at = list(argv), "", 0
    while at < len(argv):
        word = argv[at]
        name, equals, value = word.partition("=")
        option = next((option for option in table if name in option.spellings), None)
        if word == "--" or not word.startswith("-"):
            if command != "run" or not foreign.is_python(word) or argv[at + 1 :] == [] or {*argv[:at]} & {*BY_KEY["no_python"].spellings}:
                break  # here the program begins: what follows is its own
            del argv[at]
            continue
        if option is not None:
            at += 2 if option.metavar and not equals else 1
        elif command == "run" and foreign.is_mpi_count(word):
            argv = foreign.counted(argv, at)
        elif command == "run" and (stranger := foreign.DIFFERENT.get(foreign.hyphened(name))) is not None:
            in_front += foreign.in_front(argv, at, stranger)
            argv = foreign.without(argv, at, stranger)
        elif word in foreign.WHOLE:
            argv[at] = foreign.WHOLE[word]
        elif near := _nearest_option(name, table):
            argv[at] = f"{near}{equals}{value}"
        else:
            at += 1
    return f"{in_front}rallypoint {command} {shlex.join(argv)}"


def _behind_the_program(word: str, argv: Sequence[str]) -> str:
    """The command with an option, and its value if it has one, behind the program, where that can be made out."""
    import shlex

    at = argv.index(word) if word in argv else len(argv)
    after = range(at + 1, len(argv))
    program = next((i for i in after if argv[i].endswith((".py", ".pyc")) or argv[i - 1] in BY_KEY["module"].spellings), None)
    if program is None:
        return f"rallypoint run train.py {word}"
    end = at + 1 + (at + 1 < program and "=" not in word and not argv[at + 1].startswith("-"))
    return "rallypoint run " + shlex.join([*argv[:at], *argv[end:], *argv[at:end]])


def _nearest_option(name: str, table: tuple[Option, ...]) -> str:
    hyphened = foreign.hyphened(name)
    names = [n for option in table for n in option.names if n.startswith("--")]
    if foreign.is_mpi_count(hyphened) and "--nproc-per-node" in names:
        return "-n"
    if foreign.SAME.get(hyphened) in names:
        return foreign.SAME[hyphened]
    hyphened = f"--{hyphened.lstrip('-')}"
    if len(hyphened) > 3:  # an abbreviation, which torchrun takes: `--nproc`
        started = [n for n in names if n.startswith(hyphened)]
        if started:
            return min(started, key=len)
    near = _nearest(hyphened.lstrip("-"), [n[2:] for n in names])  # without the dashes, which are alike in all
    return f"--{near}" if near else ""


def _nearest(word: str, words: Any) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=ALIKE)), "")


def _example(option: Option, command: str = "run") -> tuple[tuple[str, str], ...]:
    return (("give, for example", option.example),) if option.example else (("see the options", f"rallypoint {command} --help"),)


def _as_options(line: CommandLine, command: str, table: tuple[Option, ...]) -> tuple[str, str]:
    """Words that somebody gave to a command that takes none, as the options that were meant, where that can be made out."""
    import shlex

    first, *rest = line.words
    meant: list[str] = []
    if any(f"--{first}" in option.spellings for option in table):
        meant = [f"--{first}", *rest]
    elif command == "serve" and first.isdecimal():
        meant = ["--port", *line.words]
    elif command == "doctor":
        from rallypoint.diagnosis.doctor import NAMES

        if set(line.words) <= set(NAMES):
            asked = [word for given in line.given.get("only", ()) for word in given.text.split(",")]
            return "name the checks after --only", f"rallypoint doctor --only {','.join((*asked, *line.words))}"
    if meant:
        return "it is an option", f"rallypoint {command} {shlex.join((*line.typed, *meant))}"
    return "see the options", f"rallypoint {command} --help"


def values(line: CommandLine, command: str, table: tuple[Option, ...]) -> dict[str, Any]:
    """The values of a command that takes options alone, by key. Raises `UsageError`: `option-unknown`, or `usage`."""
    if line.refusal:
        raise line.refusal
    if line.words:
        raise UsageError(
            "usage",
            f"rallypoint {command} takes options only, and got {line.words[0]}",
            help=(_as_options(line, command, table),),
        )
    return {option.key: _value(option, line.given.get(option.key, ()), command) for option in table}


def read(line: CommandLine) -> Options:
    """Values from their texts, and what they mean together on one node.

    Raises `UsageError`: `option-unknown`, `usage` for a value that is none, `several-nodes` for what only several nodes have.
    """
    if line.refusal:
        raise line.refusal
    values = {option.key: _value(option, line.given.get(option.key, ())) for option in TABLE}
    notes = [
        f"{option.names[0]} has no effect here: {option.why}" for option in TABLE if option.fate == "accepted" and option.key in line.given
    ]
    program = _program(line.words, values, line.given, line.typed)
    address, port, more = _meeting_point(values, line.given)
    return Options(
        program=program,
        nproc=values["nproc_per_node"],
        fresh=values["fresh"],
        preload=values["preload"],
        master_addr=address,
        master_port=port,
        port_range=values["port_range"],
        rendezvous=_place(values),
        run_id="" if values["standalone"] else values["rdzv_id"],
        role=values["role"],
        max_restarts=values["max_restarts"],
        grace=values["grace"] if "grace" in line.given or values["shutdown_timeout"] is None else values["shutdown_timeout"],
        stall=values["stall"],
        on_failure=values["on_failure"],
        debug_rank=values["debug_rank"],
        run_dir=values["run_dir"],
        log_dir=values["log_dir"],
        redirects=values["redirects"],
        tee=values["tee"],
        local_ranks_filter=values["local_ranks_filter"],
        stdout_filters=values["duplicate_stdout_filters"],
        stderr_filters=values["duplicate_stderr_filters"],
        virtual_local_rank=values["virtual_local_rank"],
        signals=values["signals_to_handle"],
        plain=values["plain"],
        quiet=values["quiet"],
        error_format=values["error_format"],
        dry_run=values["dry_run"],
        notes=(*notes, *more),
    )


def _value(option: Option, given: tuple[Given, ...], command: str = "run") -> Any:
    """The value of one option: the last one given counts, except that modules to preload add up."""
    if not given:
        return option.default if option.metavar else False
    if option.adds_up:
        return tuple(dict.fromkeys(_checked(option, one, command) for one in given))
    if option.key == "preload":
        return tuple(dict.fromkeys(module for one in given for module in _checked(option, one)))
    return _checked(option, given[-1], command)


def _checked(option: Option, given: Given, command: str = "run") -> Any:
    if not option.metavar:
        if given.spelling.startswith("-"):
            return True
        try:
            return bool(int(given.text))
        except ValueError:
            raise UsageError("usage", f"{given} is neither 0 nor 1", help=(("unset it, or set", f"{given.spelling}=1"),)) from None
    try:
        return option.read(given.text)
    except ValueError as refusal:
        shown = given if given.text else f"{given.spelling} ''"
        raise UsageError("usage", f"{shown} {refusal}", help=_example(option, command)) from None


def retyped(typed: Sequence[str], *words: str, as_script: bool = False) -> str:
    """The command again, with these words behind its options. `as_script`: without the options that make the program something else."""
    import shlex

    others = {spelling for key in ("module", "no_python", "run_path") for spelling in BY_KEY[key].spellings} if as_script else set()
    return "rallypoint run " + shlex.join([*(word for word in typed if word not in others), *words])


def _program(
    words: tuple[str, ...], values: Mapping[str, Any], given: Mapping[str, tuple[Given, ...]], typed: tuple[str, ...] = ()
) -> Program:
    if not words or not words[0]:
        raise UsageError(
            "usage",
            "rallypoint run needs a program",
            help=(
                ("give a script", retyped(typed or ("-n", "4"), "train.py")),
                ("or a module", retyped((*(typed or ("-n", "4")), "-m"), "package.train")),
            ),
        )
    target, args = words[0], words[1:]
    if values["run_path"]:
        return Program(kind="script", target=target, args=args)
    if values["module"] and values["no_python"]:
        both = " and ".join(str(given[key][-1]) for key in ("module", "no_python"))
        raise UsageError("usage", f"{both} exclude each other: a module needs Python", help=(("leave one of the two out", ""),))
    if values["no_python"]:
        return Program(kind="command", target=target, args=args)
    if values["module"]:
        if not is_module_name(target) or target.endswith(".py"):
            dotted = target.removesuffix(".py").strip("./").replace("/", ".")
            helps = [("a file is given without -m", retyped(typed, *words, as_script=True))]
            if is_module_name(dotted):
                helps.insert(0, ("name the module with dots, and without .py", retyped(typed, dotted, *args)))
            raise UsageError("usage", f"-m {target} is not a module's name", help=tuple(helps))
        return Program(kind="module", target=target, args=args)
    if target == "-":
        raise UsageError("usage", "a script from standard input cannot be read by every rank", help=(("save it to a file first", ""),))
    return Program(kind="script", target=target, args=args)


def _meeting_point(values: Mapping[str, Any], given: Mapping[str, tuple[Given, ...]]) -> tuple[str, int, list[str]]:
    """Address and port as asked ("" and 0: not asked), and what to say; which of torchrun's options wins is torchrun's rule."""
    for key, alone in (("nnodes", values["nnodes"] == (1, 1)), ("node_rank", values["node_rank"] == 0)):
        if not alone:
            raise _several_nodes(str(given[key][-1]), BY_KEY[key].example)
    if values["standalone"]:
        return "", 0, _ignored(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port"), "--standalone", given)
    if values["rdzv_backend"] not in ("static", "c10d"):
        raise _several_nodes(str(given["rdzv_backend"][-1]), "--rdzv-backend c10d")
    host, port = values["rdzv_endpoint"]
    if host.startswith("file://"):  # a place, not an address: see `_place`
        return "", 0, _ignored(("master_addr", "master_port"), "--rdzv-endpoint", given)
    if "://" in host:
        raise _several_nodes(str(given["rdzv_endpoint"][-1]), "--rdzv-endpoint localhost:29500")
    if host:
        return host, port, _ignored(("master_addr", "master_port"), "--rdzv-endpoint", given)
    if values["rdzv_backend"] == "c10d":
        return "", 0, _ignored(("master_addr", "master_port"), "--rdzv-backend c10d", given)
    return values["master_addr"], values["master_port"] or 0, []


def _place(values: Mapping[str, Any]) -> str:
    """The folder of `--rdzv-endpoint file://`, one for each --rdzv-id; "" when another kind was asked for, or none."""
    url = "" if values["standalone"] else values["rdzv_endpoint"][0]
    if not url.startswith("file://"):
        return ""
    path = url.removeprefix("file://").rstrip("/")
    return f"{path}.{re.sub(r'[^A-Za-z0-9_.-]', '_', values['rdzv_id'])}" if values["rdzv_id"] else path


def _ignored(keys: tuple[str, ...], because: str, given: Mapping[str, tuple[Given, ...]]) -> list[str]:
    return [f"{given[key][-1]} is ignored with {because}, as torchrun does" for key in keys if key in given]


def _several_nodes(asked: str, instead: str) -> UsageError:
    return UsageError(
        "several-nodes",
        f"{asked} asks for several nodes: that comes with multi-node support, and this version starts the ranks of one node",
        help=(("on one node leave it out, or say", instead),),
    )


# --- the table for people --------------------------------------------------------------------------------------------

HELP_HEAD = """\
usage: rallypoint run [options] script.py [arguments of the script]
       rallypoint run [options] -m package.module [arguments]
       rallypoint run [options] --no-python ./program [arguments]

Start the ranks (processes) of a PyTorch job on this machine, bring them together, and say what happened when one fails.
What stands after the program's name belongs to the program. Options may be written with _ for - inside, and
not abbreviated. torchrun's PET_* variables set its options too.
"""


SHOW_HEAD = """\
usage: rallypoint show [options] [RUN]

A run again: how it was started and how it ended, what happened when, the report as it was, and where the logs are.
RUN is a run's name, a part of it that only one run has, or the path of a run folder; without it the newest run.
"""


SERVE_HEAD = """\
usage: rallypoint serve [options]

Start a coordination store and keep it running until Ctrl-C or SIGTERM. Whoever knows the secret may use it:
rallypoint.connect() with RALLYPOINT_STORE and RALLYPOINT_SECRET_FILE set as this command prints them.
"""

STACKS_HEAD = """\
usage: rallypoint stacks [RUN] [options]

Where every rank of a running job is: one sentence, then the Python stacks, ranks at the same place together and the odd
ones first. RUN is a run's name or a part of it, its folder (of a job with --run-dir), or nothing: the newest that runs.
Nothing is stopped; each rank is asked once, by a signal, and goes on.
"""

DOCTOR_HEAD = """\
usage: rallypoint doctor [options]
       rallypoint doctor --listen PORT       on one machine, and
       rallypoint doctor --peer HOST:PORT    on another: the way between them

Look at this machine before a job does: a line for each check, [ok], [?] for what could not be looked at, [!] for what a
job may run into and [x] for what is broken or will break most, with what to do. The exit status is 1 after any [x].
Nothing is changed, and no GPU is used but for the trial job at the end, which starts two ranks and times an all_reduce.
"""


def help_text(columns: int) -> str:
    """What `rallypoint run --help` prints on so many columns."""
    parts = [filled(HELP_HEAD, columns)]
    for fate, title in FATES.items():
        parts += [f"{title}:", *_rows((option for option in TABLE if option.fate == fate), columns), ""]
    return "\n".join(parts)


def serve_help_text(columns: int) -> str:
    """What `rallypoint serve --help` prints."""
    return "\n".join([filled(SERVE_HEAD, columns), *_rows(SERVE, columns), ""])


def stacks_help_text(columns: int) -> str:
    """What `rallypoint stacks --help` prints."""
    return "\n".join([filled(STACKS_HEAD, columns), *_rows(STACKS, columns), ""])


def doctor_help_text(columns: int) -> str:
    """What `rallypoint doctor --help` prints."""
    from rallypoint.diagnosis.doctor import NAMES

    return "\n".join([filled(DOCTOR_HEAD, columns), *_rows(DOCTOR, columns), "", filled(f"The checks: {', '.join(NAMES)}.", columns)])


def show_help_text(columns: int) -> str:
    """What `rallypoint show --help` prints."""
    return "\n".join([filled(SHOW_HEAD, columns), *_rows(SHOW, columns), ""])


BESIDE, FEWEST_BESIDE = 32, 40
"""Columns before an option's sentence, and how many it needs to stand there; where there are fewer it stands below the option."""


def _rows(options: Iterable[Option], columns: int) -> list[str]:
    import textwrap

    parts = []
    beside = columns - BESIDE >= FEWEST_BESIDE
    indent = BESIDE if beside else 6
    for option in options:
        names = f"  {', '.join(option.names)} {option.metavar}".rstrip()
        sentence = textwrap.wrap(option.sentence, width=columns - indent, break_long_words=False)
        if len(names) > BESIDE - 2 or not beside:
            parts.append(names)
        else:
            parts.append(f"{names:<{BESIDE}}{sentence.pop(0)}")
        parts += [f"{'':{indent}}{line}" for line in sentence]
    return parts


def reference() -> str:
    """The tables of docs/reference/run.md."""
    parts = []
    for fate, title in FATES.items():
        last = "why it has no effect" if fate == "accepted" else "default"
        parts += [f"### {title}", "", f"| option | variable | meaning | {last} |", "|---|---|---|---|"]
        for option in TABLE:
            if option.fate == fate:
                names = ", ".join(f"`{name}`" for name in option.names) + (f" `{_cell(option.metavar)}`" if option.metavar else "")
                variables = ", ".join(f"`{name}`" for name in (option.variable, option.fallback) if name)
                end = option.why if fate == "accepted" else _default(option)
                parts.append(f"| {names} | {variables} | {_cell(option.sentence)} | {_cell(end)} |")
        parts.append("")
    return "\n".join(parts)


def _default(option: Option) -> str:
    if option.default in (None, "", (), ("", 0)):
        return ""
    if option.key == "nnodes":
        return "1"
    return ",".join(option.default) if isinstance(option.default, tuple) else format(option.default, "g" if option.key == "grace" else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
