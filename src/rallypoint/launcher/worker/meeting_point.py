"""Meeting point of a process group: read from a call of init_process_group, and compared with the
one that the agent holds.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis import init_method
from rallypoint.diagnosis.evidence import Meeting
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host.loopback import is_loopback
from rallypoint.launcher import exception_capture

# Seconds for the name of this machine that a program gives beside the held port: torch would ask
# for it next.
RESOLVE_TIMEOUT = 2.0


class HeldPoint:
    """Address that the agent holds for this worker, and the calls that lead there or elsewhere."""

    def __init__(self, held: str, began: float) -> None:
        """`held`: host:port, "" for none. `began`: wall clock of the attempt's start."""
        self.held = held
        self._given_back = ""  # what was held, when the program has it now
        self._began = began
        # As the launcher set them.
        self._job_rank, self.job_size = (
            _integer(os.environ.get(name)) for name in ("RANK", "WORLD_SIZE")
        )
        self._one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        # By host: why it is not this machine, None when it is.
        self._elsewhere: dict[str, tuple[str, str] | None] = {}

    def give_back(self) -> None:
        """Note that the program has the port now."""
        self._given_back, self.held = self.held, ""

    def meeting(self, given: dict[str, Any], frame: FrameType | None) -> Meeting:
        """Return the meeting point of a call with these arguments; raise for one that
        cannot work.
        """
        meeting = self._by_another_name(self._described(given, frame))
        self._check(meeting)
        _check_store(given.get("store"), meeting)
        return msgspec.structs.replace(meeting, timeout=_patience(given, meeting))

    def _described(self, given: dict[str, Any], frame: FrameType | None) -> Meeting:
        backend, line = str(given.get("backend") or ""), exception_capture.line_of(frame)
        rank, size = (
            value if isinstance(value, int) else -1
            for value in (given.get("rank"), given.get("world_size"))
        )
        method = given.get("init_method") or "env://"
        if given.get("store") is not None or not isinstance(method, str):
            return Meeting("store", "", rank, size, backend, line)
        # As in torch's own rendezvous handlers, the query counts where no argument is given.
        url = urlsplit(method)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        rank = rank if rank >= 0 else _integer(query.get("rank"))
        size = size if size >= 0 else _integer(query.get("world_size"))
        address = method
        if method.startswith("env://"):
            method = "env://"
            rank = rank if rank >= 0 else _integer(os.environ.get("RANK"))
            size = size if size >= 0 else _integer(os.environ.get("WORLD_SIZE"))
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            address = f"{host}:{port}" if host and port else ""
            if address and not _same_address(address, self.held):
                line = _setting_line(frame) or line
        elif method.startswith("tcp://"):
            address = url.netloc.rpartition("@")[2]
        elif method.startswith("file://"):
            address = url.path
        return Meeting(method, address, rank, size, backend, line)

    def differs(self, meeting: Meeting) -> bool:
        """Return whether ranks meet over TCP somewhere else than at the held address."""
        return (
            meeting.method.startswith(("env://", "tcp://"))
            and bool(meeting.address)
            and not _same_address(meeting.address, self.held or self._given_back)
        )

    def _by_another_name(self, meeting: Meeting) -> Meeting:
        """Replace this machine's own name beside the held port (`MASTER_ADDR=socket.gethostname()`,
        tcp://) by the held address, where `arguments_of_store` leads. Raise for a MASTER_ADDR of
        another machine: the port is held here."""
        if not meeting.method.startswith(("env://", "tcp://")) or not self._one_node:
            return meeting
        host, _, port = meeting.address.rpartition(":")
        if port != self.held.rpartition(":")[2] or _same_address(meeting.address, self.held):
            return meeting
        if (why := self._why_elsewhere(host.strip("[]"))) is None:
            return msgspec.structs.replace(meeting, address=self.held)
        if meeting.method.startswith("tcp://"):  # another machine's port may have the same number
            return meeting
        code, sentence = why
        raise EnvironmentProblem(
            code, f"the ranks cannot meet at MASTER_ADDR={host}: {sentence}",
            why=(f"set at {meeting.line}", f"the meeting point is {self.held}, which rallypoint holds; only MASTER_ADDR was changed"),
            help=(
                ("leave MASTER_ADDR as it was set", ""),
                ("or ask this machine's resolver", f"getent hosts {host}"),
            ),
        )  # fmt: skip

    def arguments_of_store(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for a `TCPStore`. At the held port of this machine, whatever name it
        is given, there is a store already: the new one becomes its client, as in torch where an
        agent has the port."""
        host, port = given.get("host_name"), given.get("port")
        if (
            not self.held
            or not self._one_node
            or given.get("master_listen_fd") is not None
            or not isinstance(host, str)
        ):
            return given
        if str(port) != self.held.rpartition(":")[2]:
            return given
        if not _same_address(f"{host}:{port}", self.held) and self._why_elsewhere(host) is not None:
            return given
        return {**given, "host_name": self.held.rpartition(":")[0].strip("[]"), "is_master": False}

    def _why_elsewhere(self, host: str) -> tuple[str, str] | None:
        """Return the result of `probe.elsewhere`, which is asked once for each host."""
        if host not in self._elsewhere:
            from rallypoint.host import probe

            self._elsewhere[host] = probe.elsewhere(host, RESOLVE_TIMEOUT)
        return self._elsewhere[host]

    def _check(self, meeting: Meeting) -> None:
        """Raise for a meeting point at which the ranks cannot meet."""
        # A store was given, and no URL.
        wrong = init_method.check(meeting.method) if meeting.method != "store" else None
        if wrong is not None:
            raise UsageError(
                "init-method-invalid", wrong.headline, why=(f"given at {meeting.line}", *filter(None, (wrong.why,))),
                help=tuple((one.sentence, one.command) for one in wrong.help),
            )  # fmt: skip
        # MPI gives the ranks itself.
        if meeting.rank >= meeting.world_size > 0 and meeting.backend.lower() not in (
            "mpi",
            "fake",
        ):
            last = meeting.world_size - 1
            raise UsageError(
                "rank-out-of-range",
                f"init_process_group was called with rank={meeting.rank} and world_size={last + 1}: the last rank of that group is {last}",
                why=(f"the launcher gave RANK={self._job_rank} and WORLD_SIZE={self.job_size}",),
                help=(
                    (
                        "take the numbers that the launcher gave",
                        'rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
                    ),
                    ("or leave rank= and world_size= out", ""),
                ),
            )
        port = meeting.address.rpartition(":")[2]
        if (
            meeting.method == "env://"
            and meeting.address
            and not init_method.is_port(port)
            and (port != "0" or meeting.world_size > 1)
        ):
            zero = "with 0 the kernel gives rank 0 a free port, and no other rank learns which"
            raise UsageError(
                "port-invalid", f"MASTER_PORT={port} is no port at which ranks can meet: 1 to 65535",
                why=(f"set at {meeting.line}", *([zero] if port == "0" else [])),
                help=(("leave MASTER_PORT as it was set: rallypoint holds a free port for init_process_group", ""),),
            )  # fmt: skip
        if meeting.method.startswith("file://"):
            self._check_file(meeting)

    def _check_file(self, meeting: Meeting) -> None:
        folder = os.path.dirname(meeting.address) or "/"
        if not os.path.isdir(folder):
            raise EnvironmentProblem(
                "init-method-invalid", f"the folder of the rendezvous file {meeting.address} does not exist",
                why=(f"given at {meeting.line}",), help=(("make the folder, the same for all ranks", f"mkdir -p {folder}"),),
            )  # fmt: skip
        try:
            found = os.stat(meeting.address)
        except FileNotFoundError:
            return
        if not found.st_size:
            return
        age = age_before(found.st_mtime, self._began, _now_on(folder), Clock().wall())
        if age > 0:
            raise EnvironmentProblem(
                "store-file-stale", f"the rendezvous file {meeting.address} is left over from an earlier run",
                why=(
                    f"it was last written {age:.0f} s before this attempt began and holds {found.st_size} bytes",
                    f"given at {meeting.line}; its ranks would look for processes that are gone",
                ),
                help=(
                    ("remove the file, or use a new name for each run", f"rm {meeting.address}"),
                    ("or leave out init_method: the launcher's own meeting point needs no file", ""),
                ),
            )  # fmt: skip


def _check_store(store: object, meeting: Meeting) -> None:
    """Raise for a store that no other process sees, behind a PrefixStore or not."""
    private = type(getattr(store, "underlying_store", store)).__name__ == "HashStore"
    # Groups of a test's threads have a backend of their own. "cpu:gloo,cuda:nccl" is two.
    backends = {one.rpartition(":")[2] for one in meeting.backend.lower().split(",")}
    if private and meeting.world_size > 1 and backends <= {"", "gloo", "nccl"}:
        raise UsageError(
            "address-differs", f"a HashStore cannot bring ranks together: each of the {meeting.world_size} processes has its own",
            why=(f"given at {meeting.line}",),
            help=(
                ("leave store= out: rallypoint sets MASTER_ADDR and MASTER_PORT", ""),
                ("or give every rank the job's store", "store=rallypoint.connect().c10d()"),
            ),
        )  # fmt: skip


def age_before(written: float, began: float, now_there: float, now: float) -> float:
    """Return how many seconds before an attempt began a file was written; less than 0 for after
    it. `written` and `now_there` are by the clock of the disk's machine, which may be another one.
    """
    return (now_there - written) - (now - began)


def _now_on(folder: str) -> float:
    """Return the time by the clock that a folder's disk has; this machine's where nothing can be
    written.
    """
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return Clock().wall()


def arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name; none for a call that torch refuses, with its own
    words.
    """
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}


def _patience(given: dict[str, Any], meeting: Meeting) -> float:
    """Return the seconds that the rank gives torch to meet the others over TCP: `timeout`, or
    torch's default; 0: unknown.
    """
    if not meeting.method.startswith(("env://", "tcp://")):
        return 0.0
    timeout = given.get("timeout")
    limits: Any = sys.modules.get("torch.distributed.constants")
    usual = getattr(
        limits,
        "default_pg_nccl_timeout" if meeting.backend.lower() == "nccl" else "default_pg_timeout",
        None,
    )
    seconds = getattr(timeout if timeout is not None else usual, "total_seconds", None)
    return float(seconds()) if seconds is not None else 0.0


def _integer(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        return -1


def _same_address(one: str, other: str) -> bool:
    if one == other:
        return True
    (host, _, port), (held, _, held_port) = one.rpartition(":"), other.rpartition(":")
    return port == held_port and is_loopback(host) and is_loopback(held)


_SETTING = re.compile(
    r"""MASTER_(?:PORT|ADDR)["']\s*\]\s*=[^=]|(?:setdefault|putenv)\(\s*["']MASTER_(?:PORT|ADDR)|["']?MASTER_PORT["']?\s*[:=][^=]"""
)


def _setting_line(frame: FrameType | None) -> str:
    """Return the line of the program that sets MASTER_PORT or MASTER_ADDR, `train.py:7`; "" when
    none is found.
    """
    seen: set[str] = set()
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in seen and not exception_capture.is_ours(name) and "site-packages" not in name:
            seen.add(name)
            lines = linecache.getlines(name)
            hits = [number for number, text in enumerate(lines, 1) if _SETTING.search(text)]
            ports = [number for number in hits if "MASTER_PORT" in lines[number - 1]]
            if hits:
                return f"{exception_capture.shown_path(name)}:{(ports or hits)[0]}"
        frame = frame.f_back
    return ""
