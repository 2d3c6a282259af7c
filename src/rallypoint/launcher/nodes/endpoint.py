"""Place where the agents of a job's nodes find each other: the lead, its ports, the secret."""

from __future__ import annotations

import os
import socket

from rallypoint.errors import EnvironmentProblem
from rallypoint.host import addresses, ports, probe, resolver
from rallypoint.host.ports import HeldPort
from rallypoint.launcher import rendezvous_file
from rallypoint.launcher.plan import Nodes
from rallypoint.launcher.rendezvous_file import RendezvousFile
from rallypoint.store.discovery import needed_secret

RESOLVE_TIMEOUT = 2.0
"""Seconds for the name of the endpoint. One that gives no answer by then is asked again."""

_LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}


def job_secret(nodes: Nodes) -> bytes:
    """Return the secret of the job. It never travels: each purpose has one that is derived from it.

    Raises UsageError `secret-missing` when no file was named, and what `secret_from_file` raises
    for a file that is no good.
    """
    return needed_secret(
        nodes.secret_file,
        f"a job on {nodes.count} nodes needs a secret that all of them have, and none was named",
        "whoever can reach the lead's port could join the job without one",
        "rallypoint run ...",
    )


def job_name(nodes: Nodes) -> str:
    """Return the name by which the job's nodes know its lead: of two jobs without an --rdzv-id the
    ports may overlap.
    """
    first, last = nodes.ports[0], nodes.ports[-1]
    return nodes.job or ("none" if first == last else f"at ports {first}-{last}")


def own_address(nodes: Nodes) -> str:
    """Return the numeric address from which this node is to connect, "" for the kernel's choice.
    Raises EnvironmentProblem when it is none of this machine's.
    """
    if not nodes.local_addr:
        return ""
    held = ports.hold_port(0, nodes.local_addr)
    held.release()
    return held.host


class Claim:
    """Right of this node to lead: a listening socket at the endpoint, and the place on a shared
    disk if there is one.
    """

    def __init__(self, held: HeldPort, file: RendezvousFile | None = None) -> None:
        self.held = held
        self._file = file

    def release(self) -> None:
        """Give both back. May be called twice."""
        self.held.release()
        if self._file is not None:
            self._file.give_back()
            self._file = None


def claim(nodes: Nodes, port_range: tuple[int, int] | None) -> Claim | None:
    """Bind the endpoint when this node leads; None when another one does, or when that cannot be
    known yet because the endpoint's name has no address so far.

    With a given place node 0 leads. Without one the node leads that can bind the endpoint: names
    are not compared, because a host may have many. Raises EnvironmentProblem when node 0 cannot
    bind it.
    """
    if nodes.is_host is False or (nodes.rank or 0) > 0:
        return None
    if nodes.folder:
        return _claim_folder(nodes, port_range)
    must = nodes.rank == 0 or bool(nodes.is_host)
    host = _listening_address(nodes.host, must)
    if not host:
        return None
    # Two agents of one machine that may both lead must not hold a port each.
    for port in nodes.ports if must else nodes.ports[:1]:
        try:
            return Claim(ports.hold_port(port, host))
        except EnvironmentProblem as problem:
            if problem.code != "port-in-use" or (must and port == nodes.ports[-1]):
                raise
    return None  # another agent of this machine leads, or a stranger has the port: dialling tells


def _claim_folder(nodes: Nodes, port_range: tuple[int, int] | None) -> Claim | None:
    """Take the place on a shared disk, and write there where this node is to be reached."""
    try:
        file = rendezvous_file.take(nodes.folder, nodes.job or f"pid {os.getpid()}")
    except EnvironmentProblem as problem:
        if problem.code == "rendezvous-in-use" and nodes.rank is None:
            return None
        raise
    held = None
    try:
        held = ports.hold_port(0, "0.0.0.0", port_range)
        own = [address.ip for _, address in addresses.look(RESOLVE_TIMEOUT).reachable()]
        places = (probe.address_of(ip, held.port) for ip in (*own, "127.0.0.1"))
        file.publish(0, ",".join(places))
    except BaseException:
        if held is not None:
            held.release()
        file.give_back()
        raise
    return Claim(held, file)


def _listening_address(host: str, must: bool) -> str:
    """Return the address on which the lead listens at this endpoint, "" when it is not this
    machine's, or has no address.

    The lead listens on all addresses: nodes may reach it by different ones. An endpoint on loopback
    is for agents of this machine alone.
    """
    if found := _LOOPBACK.get(host.lower()):
        return found
    places = probe.numeric(host, 0)
    if not places:
        answer = resolver.ask([host], timeout=RESOLVE_TIMEOUT)[host]
        places = [place for ip in answer.found for place in probe.numeric(ip, 0)]
    if not (must or any(probe.is_own(family, str(at[0])) for family, at in places)):
        return ""
    is_ipv6 = bool(places) and all(family == socket.AF_INET6 for family, _ in places)
    return "::" if is_ipv6 else "0.0.0.0"


def places(nodes: Nodes) -> list[tuple[str, int]]:
    """Return where the lead may be, to be tried together; [] when the shared disk does not say yet."""
    if not nodes.folder:
        return [(nodes.host, port) for port in nodes.ports]
    found = []
    for text in rendezvous_file.address_in(nodes.folder).split(","):
        host, _, port = text.rpartition(":")
        if port.isdigit():
            found.append((host.strip("[]"), int(port)))
    return found
