"""Hold a port until its user has it; if taken, say by whom.

A number that was free a moment ago means nothing: between closing a probe socket and binding again anyone may
take it. What is handed over here is the listening socket itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from rallypoint.clock import Clock
from rallypoint.errors import EnvironmentProblem, UsageError

BACKLOG = 65535
"""Connections that may wait to be accepted: as many as the kernel allows (it takes min(this, net.core.somaxconn)), because
every rank of a big job connects in the same moment and one that does not fit waits a second for its second try."""

TRIES = 32
"""How often another free port is asked for when somebody was quicker to listen on the same one. Seen: once or twice beside
a process that binds every port it can."""

LISTENING, TIME_WAIT = 0x0A, 0x06  # include/net/tcp_states.h


class HeldPort:
    """A port that is ours: a listening socket, not a number. Use it as a context manager, or `release` it."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self._state = "listening"

    def __repr__(self) -> str:
        fd = f", fd {self._socket.fileno()}" if self._state == "listening" else ""
        return f"<HeldPort {self.address}: {self._state}{fd}>"

    @property
    def address(self) -> str:
        """`127.0.0.1:41235`, `[::1]:41235`."""
        return _address(self.host, self.port)

    def fileno(self) -> int:
        """The descriptor of the listening socket (close-on-exec). `ValueError` after `release` or `detach`."""
        if self._state != "listening":
            raise ValueError(f"the port {self.address} is no longer held here: {self._state}")
        return self._socket.fileno()

    def detach(self) -> int:
        """Hand the descriptor over: the caller closes it from now on, and the port stays taken until then."""
        fd = self.fileno()
        self._socket.detach()
        self._state = "handed over"
        return fd

    def release(self) -> None:
        """Close the socket. May be called twice, and after `detach` (then nothing happens)."""
        if self._state == "listening":
            self._socket.close()
            self._state = "released"

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Holder(NamedTuple):
    """Who has a port. `pid` 0: not visible to us; `uid` is the socket's owner, which everyone may see."""

    port: int
    host: str
    state: str  # "listening", "connected", "time-wait"
    uid: int
    pid: int = 0
    command: str = ""
    started: float = 0.0  # seconds since 1970, 0 if unknown
    peer: str = ""

    @property
    def user(self) -> str:
        """The owner's name, or number where there is none."""
        return _user(self.uid)

    def line(self, now: float | None = None) -> str:
        """`python train.py (pid 5112, user ada, started 3 h ago) is listening on 127.0.0.1:29500`."""
        address = _address(self.host, self.port)
        if self.state == "time-wait":
            return f"a connection that was closed on {address} is still in TIME_WAIT, at most 60 s"
        does = f"is listening on {address}" if self.state == "listening" else f"is connected from {address} to {self.peer}"
        if not self.pid:
            why = "in another container" if os.geteuid() == 0 or self.uid == os.geteuid() else "only that user and root see which"
            return f"a process of user {self.user} ({why}) {does}"
        since = f", started {_ago((Clock().wall() if now is None else now) - self.started)}" if self.started else ""
        return f"{self.command or 'a process'} (pid {self.pid}, user {self.user}{since}) {does}"


def hold_port(port: int = 0, host: str = "127.0.0.1", port_range: tuple[int, int] | None = None) -> HeldPort:
    """Bind and listen, and keep it. `port` 0 is any free one, of `port_range` (both ends included) if given.

    Raises `UsageError` `port-invalid` for a number that is none or lies outside the range, `EnvironmentProblem`:
    `port-in-use` (its `why` names the holders), `ports-exhausted`, `port-forbidden` (below 1024 without the privilege),
    `address-unavailable` (no such address here), `address-unresolved`, `port-unavailable` (anything else, descriptors).
    """
    _check(port, port_range)
    family, ip = _resolve(host)
    if port:
        try:
            return _try(family, ip, port)
        except OSError as error:
            raise _problem(error, ip, port) from error
    if port_range is None:
        # With SO_REUSEADDR the kernel may give one number to two binders; then only the first of them may listen.
        held = _first(family, ip, [0] * TRIES)
        low, high = _ephemeral()
    else:
        low, high = port_range
        # In random order: jobs that start together do not queue up at the same number.
        held = _first(family, ip, random.sample(range(low, high + 1), high - low + 1))
    if held is None:
        raise _exhausted(ip, low, high, "the kernel gives out ports" if port_range is None else "--port-range allows")
    return held


def holders(port: int) -> list[Holder]:
    """Who has this TCP port on this machine, listeners first; empty if nobody is seen.

    Not seen are sockets that were bound and do not listen (the kernel lists them nowhere in /proc) and other network
    namespaces, which are no hindrance. Takes milliseconds; reads every process's descriptors only until all are found.
    """
    return _holders_of(list(_sockets(port, port)))


def _try(family: socket.AddressFamily, ip: str, port: int) -> HeldPort:
    """Bind and listen; `OSError` as the kernel says it."""
    # Close-on-exec, as Python makes all its sockets.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # SO_REUSEADDR: connections of an earlier job in TIME_WAIT do not count. Never SO_REUSEPORT: with it a stranger
        # could share the port and take half of the connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return HeldPort(listener)


def _first(family: socket.AddressFamily, ip: str, ports: Iterable[int]) -> HeldPort | None:
    """The first of these that is free; None if all are taken. Any other trouble is raised in our words."""
    for port in ports:
        try:
            return _try(family, ip, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _problem(error, ip, port) from error
    return None


def _check(port: int, port_range: tuple[int, int] | None) -> None:
    if not 0 <= port <= 65535:
        raise UsageError("port-invalid", f"{port} is no port number: 1-65535, or 0 for any free one")
    if port_range is None:
        return
    low, high = port_range
    if not 1 <= low <= high <= 65535:
        raise UsageError("port-invalid", f"{low}-{high} is no range of ports: two numbers from 1 to 65535, the smaller first")
    if port and not low <= port <= high:
        raise UsageError("port-invalid", f"port {port} lies outside the allowed range {low}-{high}")


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The family and the numeric address; names are looked up, numbers are not."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return family, host
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise EnvironmentProblem("address-unresolved", f"the host name {host} has no address: {error.strerror or error}") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][0], str(found[0][4][0])


def _problem(error: OSError, ip: str, port: int) -> EnvironmentProblem:
    """A refused bind or listen in our words."""
    address = _address(ip, port)
    if error.errno == errno.EADDRINUSE:
        found = holders(port)
        blocking = [holder for holder in found if holder.state != "time-wait"] or found
        why = tuple(holder.line() for holder in blocking)
        first = f": {why[0]}" if why else ""
        return EnvironmentProblem(
            "port-in-use",
            f"port {port} on {ip} is taken{first}",
            why=why or ("nobody is listening on it: a process has bound it without listening, which /proc does not show",),
            help=(("leave --master-port out: the launcher then holds a free port from the start", ""),),
        )
    if error.errno in (errno.EACCES, errno.EPERM) and port:
        first_free = _number("/proc/sys/net/ipv4/ip_unprivileged_port_start", 1024)
        return EnvironmentProblem(
            "port-forbidden",
            f"port {port} may not be bound by user {_user(os.geteuid())}",
            why=(f"ports below {first_free} need root or CAP_NET_BIND_SERVICE",),
            help=((f"choose a port from {first_free} to 65535, or none", "--master-port 0"),),
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return EnvironmentProblem(
            "address-unavailable",
            f"{ip} is not an address of this machine",
            why=(os.strerror(error.errno),),
            help=(("list this machine's addresses", "ip -brief address"),),
        )
    return EnvironmentProblem("port-unavailable", f"cannot listen on {address}: {os.strerror(error.errno or 0)}")


def _exhausted(ip: str, low: int, high: int, who: str) -> EnvironmentProblem:
    """No port left: who holds how many."""
    counts: dict[str, int] = {}
    for holder in _holders_of([entry for entry in _sockets(low, high) if entry.state == LISTENING]):
        name = f"{holder.command} (pid {holder.pid}, user {holder.user})" if holder.pid else f"processes of user {holder.user}"
        counts[name] = counts.get(name, 0) + 1
    by_count = sorted(counts.items(), key=lambda item: -item[1])
    why = tuple(f"{name} holds {count}" for name, count in by_count[:5])
    return EnvironmentProblem(
        "ports-exhausted",
        f"none of the {high - low + 1} ports {low}-{high} is free on {ip}",
        why=(f"{who} {low}-{high}", *why),
        help=(("allow more ports", "--port-range A-B"),),
    )


class _Socket(NamedTuple):
    """A line of /proc/net/tcp."""

    host: str
    port: int
    peer: str
    state: int
    uid: int
    inode: int


def _sockets(low: int, high: int) -> Iterator[_Socket]:
    """The TCP sockets on these ports of this network namespace, as far as the kernel lists them (proc_net_tcp.txt)."""
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(path, encoding="ascii") as file:
                lines = file.readlines()[1:]
        except OSError:  # IPv6 switched off
            continue
        for line in lines:
            fields = line.split()
            if not low <= int(fields[1][-4:], 16) <= high:  # a busy server has tens of thousands of others
                continue
            host, port = _decode(fields[1])
            yield _Socket(host, port, _address(*_decode(fields[2])), int(fields[3], 16), int(fields[7]), int(fields[9]))


def _decode(text: str) -> tuple[str, int]:
    """`0100007F:733C` -> ("127.0.0.1", 29500): 32-bit words in the machine's byte order."""
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, raw), int(port, 16)


def _holders_of(sockets: Sequence[_Socket]) -> list[Holder]:
    owners = _owners({entry.inode for entry in sockets if entry.inode})
    names = {LISTENING: "listening", TIME_WAIT: "time-wait"}
    found = []
    for entry in sockets:
        pids = owners.get(entry.inode, [])
        plain = Holder(entry.port, entry.host, names.get(entry.state, "connected"), entry.uid, peer=entry.peer)
        found += [_described(plain, pid) for pid in pids] or [plain]
    order = ("listening", "connected", "time-wait")
    return sorted(found, key=lambda holder: (order.index(holder.state), holder.pid))


def _owners(inodes: set[int]) -> dict[int, list[int]]:
    """Which processes have these sockets open. The first of each family that shares one is enough for every inode, but a
    forked worker and its parent are both told, if they are met before all inodes are found."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if wanted else ():
        if not name.isdecimal():
            continue
        for link in _links(f"/proc/{name}/fd"):
            inode = wanted.get(link)
            if inode is not None and int(name) not in owners.setdefault(inode, []):
                owners[inode].append(int(name))
        if len(owners) == len(wanted):
            break
    return owners


def _links(folder: str) -> Iterable[str]:
    try:
        fds = os.listdir(folder)
    except OSError:  # another user's, or gone
        return
    for fd in fds:
        with contextlib.suppress(OSError):
            yield os.readlink(f"{folder}/{fd}")


def _described(holder: Holder, pid: int) -> Holder:
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return holder._replace(pid=pid, command=_short(process.cmdline() or [process.name()]), started=process.create_time())
    except psutil.Error:  # it ended between the two looks
        return holder._replace(pid=pid)


def _short(argv: Sequence[str]) -> str:
    """A command as a person would say it: no folder before the program, one line, not endless."""
    text = " ".join([os.path.basename(argv[0]), *argv[1:]])
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (seconds >= size and unit != "days"):
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@functools.cache
def _ephemeral() -> tuple[int, int]:
    """The range from which the kernel chooses (ip(7), ip_local_port_range)."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low, high = file.read().split()
    return int(low), int(high)


def _number(path: str, default: int) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
