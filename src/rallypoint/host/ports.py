"""Hold a port until its user has it; if it is taken, name the process that has it.

A number that was free a moment ago means nothing: between closing a probe socket and binding again
anyone may take it. What is handed over here is the listening socket itself.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import socket
from collections.abc import Collection, Sequence
from types import TracebackType

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host.kernel_files import number_in, text_of
from rallypoint.host.port_holder import PortHolder, described, same_place, user_name
from rallypoint.host.socket_addresses import address_of, numeric
from rallypoint.host.tcp_table import LISTENING, TIME_WAIT, TcpSocket, owners_of, tcp_sockets

BACKLOG = 65535
"""Connections that may wait to be accepted: as many as the kernel allows (it takes min(this,
net.core.somaxconn)), because every rank of a big job connects in the same moment and one that does
not fit waits a second for its second try."""

TRIES = 32
"""Number of times that another free port is asked for when somebody was quicker to listen on the
same one. Seen: once or twice beside a process that binds every port it can."""

RESOLVE_TIMEOUT = 5.0
"""Seconds for the resolver, when a name was given to listen on: as long as it waits itself before
it asks a silent name server again."""


class HeldPort:
    """A port that is ours: a listening socket, not a number. Use it as a context manager, or
    `release` it."""

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
        return address_of(self.host, self.port)

    def fileno(self) -> int:
        """Return the descriptor of the listening socket (close-on-exec). `ValueError` after
        `release` or `detach`."""
        if self._state != "listening":
            raise ValueError(f"the port {self.address} is no longer held here: {self._state}")
        return self._socket.fileno()

    def detach(self) -> int:
        """Hand the descriptor over: the caller closes it from now on, and the port stays taken
        until then."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def hold_port(
    port: int = 0, host: str = "127.0.0.1", port_range: tuple[int, int] | None = None
) -> HeldPort:
    """Bind and listen, and keep it. `port` 0 is any free one, of `port_range` (both ends included)
    if given.

    Raises `UsageError` `port-invalid` for a number that is none or lies outside the range,
    `EnvironmentProblem`: `port-in-use` (its `why` names the holders), `ports-exhausted`,
    `port-forbidden` (below 1024 without the privilege), `address-unavailable` (no such address
    here), `address-unresolved`, `loopback-down` (nobody could connect to it), `port-unavailable`
    (anything else, descriptors).
    """
    _check(port, port_range)
    family, ip = _resolve(host)
    check_loopback(ip)
    if port:
        try:
            return _try(family, ip, port)
        except OSError as error:
            raise _problem(error, ip, port) from error
    if port_range is None:
        # With SO_REUSEADDR the kernel may give one number to two binders; then only the first of
        # them may listen.
        held = _first(family, ip, [0] * TRIES)
        low, high = ephemeral_range()
    else:
        low, high = port_range
        # In random order: jobs that start together do not queue up at the same number.
        held = _first(family, ip, random.sample(range(low, high + 1), high - low + 1))
    if held is None:
        raise _exhausted(ip, low, high, port_range is not None)
    return held


def holders(port: int) -> list[PortHolder]:
    """Return the holders of this TCP port on this machine, listeners first; empty if none is seen.

    Not seen are other network namespaces (containers with a network of their own), which are no
    hindrance, and sockets that are bound and do not listen. Takes milliseconds; reads every
    process's descriptors only until all are found.
    """
    return _holders_of(list(tcp_sockets(port, port)))


def held_by(low: int, high: int) -> list[tuple[str, int]]:
    """Count the ports of this range that each process holds, the largest number first: `python
    train.py (pid 5112, user ada)`. TIME_WAIT does not count."""
    ports: dict[str, set[int]] = {}
    for holder in _holders_of(
        [entry for entry in tcp_sockets(low, high) if entry.state != TIME_WAIT]
    ):
        name = f"processes of user {holder.user}"
        if holder.pid:
            name = f"{holder.command} (pid {holder.pid}, user {holder.user})"
        ports.setdefault(name, set()).add(holder.port)
    return sorted(((name, len(held)) for name, held in ports.items()), key=lambda item: -item[1])


def _holders_of(sockets: Sequence[TcpSocket]) -> list[PortHolder]:
    owners = owners_of({entry.inode for entry in sockets if entry.inode})
    names = {LISTENING: "listening", TIME_WAIT: "time-wait"}
    found = []
    for entry in sockets:
        pids = owners.get(entry.inode, [])
        state = names.get(entry.state, "connected" if entry.inode else "ownerless")
        plain = PortHolder(entry.port, entry.host, state, entry.uid, peer=entry.peer)
        found += [described(plain, pid) for pid in pids] or [plain]
    order = ("listening", "connected", "ownerless", "time-wait")
    return sorted(found, key=lambda holder: (order.index(holder.state), holder.pid))


def check_loopback(ip: str) -> None:
    """Raise EnvironmentProblem (`loopback-down`) for an address of the loopback interface when that
    is switched off.

    Listening there works all the same, and whoever connects gets no farther. A datagram socket asks
    the kernel for the way, and sends nothing.
    """
    if not (ip == "::1" or ip.startswith("127.")):
        return
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM
        ) as probe:
            probe.connect((ip, 9))
    except OSError as error:
        if error.errno != errno.ENETUNREACH:
            return  # whatever else is wrong is said when the address is bound
        raise EnvironmentProblem(
            "loopback-down",
            f"nobody can connect to {ip}: the loopback interface of this machine, container or sandbox is switched off",
            help=(("switch it on, as root", "ip link set lo up"),),
        ) from error


def _try(family: socket.AddressFamily, ip: str, port: int) -> HeldPort:
    """Bind and listen; `OSError` as the kernel says it."""
    # Close-on-exec, as Python makes all its sockets.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # SO_REUSEADDR: connections of an earlier job in TIME_WAIT do not count. Never SO_REUSEPORT:
        # with it a stranger could share the port and take half of the connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return HeldPort(listener)


def _first(family: socket.AddressFamily, ip: str, ports: Sequence[int]) -> HeldPort | None:
    """Return the first of these that is free; None if all are taken. Any other trouble is raised in
    our words: of ports that this user may not bind only when there are no others."""
    forbidden: dict[int, OSError] = {}
    for port in ports:
        try:
            return _try(family, ip, port)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM) and port:
                forbidden[port] = error
            elif error.errno != errno.EADDRINUSE:
                raise _problem(error, ip, port) from error
    if forbidden:
        raise _forbidden(sorted(ports), set(forbidden)) from next(iter(forbidden.values()))
    return None


def _check(port: int, port_range: tuple[int, int] | None) -> None:
    if not 0 <= port <= 65535:
        raise UsageError(
            "port-invalid", f"{port} is no port number: 1-65535, or 0 for any free one"
        )
    if port_range is None:
        return
    low, high = port_range
    if not 1 <= low <= high <= 65535:
        raise UsageError(
            "port-invalid",
            f"{low}-{high} is no range of ports: two numbers from 1 to 65535, the smaller first",
        )
    if port and not low <= port <= high:
        raise UsageError("port-invalid", f"port {port} lies outside the allowed range {low}-{high}")


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the numeric address, IPv4 before IPv6; names are looked up, numbers are
    not. "" is every address of this machine."""
    if not host:
        return socket.AF_INET, "0.0.0.0"
    for family, sockaddr in numeric(host, 0):
        return family, str(sockaddr[0])
    from rallypoint.host import resolver

    answer = resolver.ask([host], timeout=RESOLVE_TIMEOUT)[host]
    if not answer.found:
        said = (
            f"the resolver gave no answer within {answer.took:.0f} s"
            if answer.silent
            else answer.error
        )
        raise EnvironmentProblem(
            "address-unresolved",
            f"the host name {host} has no address: {said}",
            help=(
                ("ask this machine's resolver", f"getent hosts {host}"),
                ("or give the address instead of the name", ""),
            ),
        )
    ip = next((ip for ip in answer.found if ":" not in ip), answer.found[0])
    return socket.AF_INET6 if ":" in ip else socket.AF_INET, ip


def _problem(error: OSError, ip: str, port: int) -> EnvironmentProblem:
    """Translate a refused bind or listen into an error of ours."""
    address = address_of(ip, port)
    if error.errno == errno.EADDRINUSE:
        blocking = [
            holder
            for holder in holders(port)
            if holder.state != "time-wait" and same_place(holder.host, ip)
        ]
        # Of a process that listens its connections say nothing more.
        listening = {one.pid for one in blocking if one.pid and one.state == "listening"}
        blocking = [one for one in blocking if one.state == "listening" or one.pid not in listening]
        why = tuple(holder.line() for holder in blocking)
        first = f": {why[0]}" if why else ""
        helps = [("leave the port out: a free one is then held from the start", "")]
        holder = blocking[0] if blocking else None
        if holder and holder.pid not in (0, os.getpid()) and holder.uid == os.geteuid():
            # What listens for a job is a helper of its launcher, which heeds no SIGTERM.
            end = f"rallypoint stop {holder.job}" if holder.job else f"kill {holder.pid}"
            helps.append(("or end who holds it, if nobody needs it any more", end))
        return EnvironmentProblem(
            "port-in-use",
            f"port {port} on {ip} is taken{first}",
            why=why[1:]
            if why
            else ("a process has bound it without listening: the kernel does not show which",),
            help=tuple(helps),
        )
    if error.errno in (errno.EACCES, errno.EPERM) and port:
        return _forbidden([port], {port})
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return EnvironmentProblem(
            "address-unavailable",
            f"{ip} is not an address of this machine",
            why=(os.strerror(error.errno),),
            help=(("list this machine's addresses", "ip -brief address"),),
        )
    return EnvironmentProblem(
        "port-unavailable", f"cannot listen on {address}: {os.strerror(error.errno or 0)}"
    )


def _forbidden(ports: Sequence[int], forbidden: Collection[int]) -> EnvironmentProblem:
    """Report that the kernel refuses some of these ports, which are in ascending order, and
    somebody has the others. It does so for low numbers (ip(7)), and for any number by a rule of
    this machine's."""
    first_free = number_in("/proc/sys/net/ipv4/ip_unprivileged_port_start", default=1024)
    low_ones = os.geteuid() != 0 and max(forbidden) < first_free
    taken = len(ports) - len(forbidden)
    which = (
        f"none of the ports {ports[0]}-{ports[-1]} may"
        if len(ports) > 1
        else f"port {ports[0]} may not"
    )
    why = (
        f"ports below {first_free} need root or CAP_NET_BIND_SERVICE"
        if low_ones
        else "a rule of this machine's forbids it: SELinux, Landlock, BPF or the filter of a container"
    )
    others = (f"others hold the {taken} of the range that are not forbidden",) if taken else ()
    help = (
        f"choose from {first_free} to 65535; without a port or a range any free one is taken"
        if low_ones
        else "try other ports; without a port or a range the kernel chooses"
    )
    return EnvironmentProblem(
        "port-forbidden" if low_ones else "port-unavailable",
        f"{which} be bound by user {user_name(os.geteuid())}",
        why=(why, *others),
        help=((help, ""),),
    )


def _exhausted(ip: str, low: int, high: int, asked: bool) -> EnvironmentProblem:
    """Report that no port is left, and how many each process holds."""
    size = high - low + 1
    first, last = ephemeral_range()
    why = [f"{name} holds {count}" for name, count in held_by(low, high)[:5]]
    if not asked:
        why.insert(0, f"the kernel gives out ports {low}-{high} (net.ipv4.ip_local_port_range)")
        help = (
            "let the kernel give out more ports, as root",
            "sysctl -w net.ipv4.ip_local_port_range='10240 65535'",
        )
    else:
        if low <= last and first <= high:
            why.append(
                f"every outgoing connection of this machine takes a port of {first}-{last}, too"
            )
        low_end, high_end = low, min(65535, low + 10 * size - 1)
        if low + size > 65535:
            low_end, high_end = max(1024, high - 10 * size + 1), high
        help = ("allow more ports (in Python port_range=)", f"--port-range {low_end}-{high_end}")
    return EnvironmentProblem(
        "ports-exhausted",
        f"none of the {size} ports {low}-{high} is free on {ip}"
        if size > 1
        else f"port {low}, the only one of the range, is not free on {ip}",
        why=tuple(why),
        help=(help,),
    )


@functools.cache
def ephemeral_range(root: str = "/") -> tuple[int, int]:
    """Return the ports, both ends included, of which the kernel gives one to every outgoing
    connection, and to a program that asks for any (ip(7))."""
    # In a sandbox without the file: what Linux has when nobody changed it.
    words = text_of(root, "proc/sys/net/ipv4/ip_local_port_range").split() or ("32768", "60999")
    return int(words[0]), int(words[1])
