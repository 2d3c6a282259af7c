"""Place where the agents of a job's nodes find each other: the lead, its ports, the secret."""

from __future__ import annotations

import importlib
import math
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from rallypoint.clusters import secret_source
from rallypoint.errors import (
    Advice,
    EnvironmentProblem,
    RallypointError,
    StoreUnreachable,
    UsageError,
)
from rallypoint.host import addresses, ports
from rallypoint.host.loopback import LOOPBACK
from rallypoint.host.ports import HeldPort
from rallypoint.host.socket_addresses import address_of, is_own, places_of
from rallypoint.launcher import rendezvous_file
from rallypoint.launcher.plan import Nodes
from rallypoint.launcher.rendezvous_file import RendezvousFile
from rallypoint.store.discovery import needed_secret, new_secret

if TYPE_CHECKING:
    from rallypoint.clusters.cluster import Cluster

RESOLVE_TIMEOUT = 2.0
"""Seconds for the name of the endpoint, where this node leads whatever it is."""

PATIENCE = 12.0
"""Seconds for it where the name decides which node leads. One that gives no answer by then is asked
again; the resolver waits 5 s for each name server that is off before it asks the next one."""


def secret_file(nodes: Nodes, cluster: Cluster | None, environ: Mapping[str, str]) -> str:
    """Return the file with the secret of the job, "" without one: the one that was named, else a
    mounted one, else the key file of the user where the nodes of a cluster may share it.
    """
    found = nodes.secret_file or secret_source.mounted()
    if found or nodes.exchange or cluster is None or cluster.own_homes:
        return found
    return secret_source.user_key(environ)


def job_secret(nodes: Nodes, cluster: Cluster | None = None) -> bytes:
    """Return the secret of the job. It never travels: each purpose has one that is derived from it.

    Raises UsageError `secret-missing` when there is no file, and what `secret_from_file` raises for
    a file that is no good.
    """
    return needed_secret(
        nodes.secret_file,
        f"a job on {nodes.count} nodes needs a secret that all of them have, and none was named",
        "whoever can reach the lead's port could join the job without one",
        "rallypoint run ...",
        cluster.secret_help if cluster is not None else (),
    )


def settled(
    nodes: Nodes, cluster: Cluster | None, port_range: tuple[int, int] | None
) -> tuple[Nodes, bytes, HeldPort | None]:
    """Return the nodes with what has to be known before a launcher starts anything: the secret, and
    where a cluster hands the place over, that and the listener of node 0. Raises as `job_secret`.
    """
    secret, held = b"", None
    file = secret_file(nodes, cluster, os.environ)
    nodes = msgspec.structs.replace(nodes, local_addr=own_address(nodes), secret_file=file)
    if file or not nodes.exchange:
        secret = job_secret(nodes, cluster)
    if nodes.exchange:
        nodes, new, held = handed_over(nodes, port_range, os.environ)
        secret = secret or new
    return nodes, secret, held


def handed_over(
    nodes: Nodes, port_range: tuple[int, int] | None, environ: Mapping[str, str]
) -> tuple[Nodes, bytes, HeldPort | None]:
    """Have node 0 tell all nodes where it listens, and a secret, by the means of the cluster.

    Returns the nodes with that place, the secret, and on node 0 the listener. The module that
    `nodes.exchange` names has `share(environ, text, timeout)`: it returns what node 0 has given to
    it, on every node; the others give "".
    """
    held, offer = None, ""
    if nodes.rank == 0:
        held, own = _listener(port_range)
        offer = f"{new_secret().hex()} {held.port} {','.join(own)}"
    try:
        share = importlib.import_module(f"rallypoint.clusters.{nodes.exchange}").share
        return (*_read_offer(share(environ, offer, nodes.join_timeout), nodes), held)
    except BaseException:
        if held is not None:
            held.release()
        raise


def _read_offer(text: str, nodes: Nodes) -> tuple[Nodes, bytes]:
    """Return the nodes with the place of node 0, and the secret. Raises UsageError
    `cluster-unclear` for a text that no launcher of ours has given.
    """
    try:
        secret, port, addresses = text.split()
        lead = tuple(addresses.split(","))
        met = msgspec.structs.replace(nodes, lead=lead, host=lead[0], ports=(int(port),))
        return met, bytes.fromhex(secret)
    except ValueError:
        raise UsageError(
            "cluster-unclear",
            "the place of node 0 did not arrive as rallypoint gives it",
            why=("each task of the cluster must be a rallypoint of the same version",),
            help=(("say where node 0 is", "--rdzv-endpoint node0:29400 --secret-file ..."),),
        ) from None


def _listener(port_range: tuple[int, int] | None) -> tuple[HeldPort, list[str]]:
    """Bind a port on all addresses of the family by which others are likeliest to reach this node.

    Returns it and these addresses, loopback at the end: agents of one machine have nothing else
    where it has no network.
    """
    found = [address for _, address in addresses.look(RESOLVE_TIMEOUT).reachable()]
    version = found[0].version if found else 4
    everywhere, loopback = ("::", "::1") if version == 6 else ("0.0.0.0", "127.0.0.1")
    own = [address.ip for address in found if address.version == version]
    return ports.hold_port(0, everywhere, port_range), [*own, loopback]


def job_name(nodes: Nodes) -> str:
    """Return the name by which the job's nodes know its lead: of two jobs without an --rdzv-id the
    ports may overlap.
    """
    first, last = min(nodes.ports), max(nodes.ports)
    name = nodes.job or ("none" if first == last else f"at ports {first}-{last}")
    return f"{name}, call {nodes.call}" if nodes.call else name


def own_address(nodes: Nodes) -> str:
    """Return the numeric address from which this node is to connect, "" for the kernel's choice.
    Raises EnvironmentProblem when it is none of this machine's.
    """
    if not nodes.local_addr:
        return ""
    held = ports.hold_port(0, nodes.local_addr)
    held.release()
    return held.host


class Claim(msgspec.Struct):
    """Right of this node to lead: a listening socket at the endpoint, and the place on a shared
    disk if there is one. `remove`: no other job has that place, and it goes with this one.
    """

    held: HeldPort
    file: RendezvousFile | None = None
    remove: bool = False

    def release(self) -> None:
        """Give both back. May be called twice."""
        self.held.release()
        if self.file is not None:
            self.file.give_back(remove=self.remove)
            self.file = None


def claim(
    nodes: Nodes,
    port_range: tuple[int, int] | None,
    held: HeldPort | None = None,
    left: float = math.inf,
) -> Claim | None:
    """Bind the endpoint when this node leads; None when another one does, or when that cannot be
    known yet because the endpoint's name has no address so far.

    With a given place node 0 leads. Without one the node leads that can bind the endpoint: names
    are not compared, because a host may have many. `held`: the listener that this node has
    announced already. `left`: seconds that the name may take, if they are few. Raises
    EnvironmentProblem when node 0 cannot bind the endpoint.
    """
    if held is not None:
        return Claim(held)
    if nodes.is_host is False or (nodes.rank or 0) > 0:
        return None
    if nodes.folder:
        return _claim_folder(nodes, port_range)
    must = nodes.rank == 0 or bool(nodes.is_host)
    host = _listening_address(nodes.host, must, min(RESOLVE_TIMEOUT if must else PATIENCE, left))
    if not host:
        return None
    # Two agents of one machine that may both lead must not hold a port each.
    for port in nodes.ports if must else nodes.ports[:1]:
        try:
            return Claim(ports.hold_port(port, host))
        except EnvironmentProblem as problem:
            if problem.code != "port-in-use":
                raise
            if must and port == nodes.ports[-1]:
                other = ("give every node the same endpoint with another port", "")
                help = (other, *problem.help[1:])  # without a port it would not be a free one
                raise EnvironmentProblem(
                    problem.code, problem.headline, why=problem.why, help=help
                ) from None
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
        held, own = _listener(port_range)
        file.publish(0, ",".join(address_of(ip, held.port) for ip in own))
    except BaseException:
        if held is not None:
            held.release()
        file.give_back()
        raise
    return Claim(held, file, remove=nodes.folder_once)


def _listening_address(host: str, must: bool, timeout: float) -> str:
    """Return the address on which the lead listens at this endpoint, "" when it is not this
    machine's, or has no address.

    The lead listens on all addresses: nodes may reach it by different ones. An endpoint on loopback
    is for agents of this machine alone.
    """
    if found := LOOPBACK.get(host.lower()):
        return found
    places = places_of(host, timeout)
    if not (must or is_own(places)):
        return ""
    if places:
        versions = {6 if family == socket.AF_INET6 else 4 for family, _ in places}
    else:  # a name that is not known yet will have an address of this machine's
        versions = {address.version for _, address in addresses.look(timeout).reachable()}
    return "::" if versions == {6} else "0.0.0.0"


def why_it_leads(nodes: Nodes, host: str) -> str:
    """Return why the node on this host leads, "" where the user or a cluster has said it."""
    if nodes.rank == 0 or nodes.is_host or nodes.lead:
        return ""
    if nodes.folder:
        return (
            f"{host} leads since no other node has written into {nodes.folder}: all must share it"
        )
    return f"{host} leads since it has the address {nodes.host}: one node alone must have it"


def is_elsewhere(nodes: Nodes) -> bool:
    """Return whether the address at which node 0 is to be reached is none of this machine's: what
    it leads to may be a way back, or another node 0.
    """
    found = places_of(nodes.host, RESOLVE_TIMEOUT)
    return bool(found) and not is_own(found)


def places(nodes: Nodes) -> list[tuple[str, int]]:
    """Return where the lead may be, to be tried together; [] when the shared disk does not say yet."""
    if nodes.lead:
        return [(ip, nodes.ports[0]) for ip in nodes.lead]
    if not nodes.folder:
        return [(nodes.host, port) for port in nodes.ports]
    found = []
    for text in rendezvous_file.address_in(nodes.folder).split(","):
        host, _, port = text.rpartition(":")
        if port.isdigit():
            found.append((host.strip("[]"), int(port)))
    return found


def not_let_in(nodes: Nodes, error: StoreUnreachable) -> RallypointError:
    """Return a refusal by the lead's store in the words of a job on several nodes."""
    kind: type[RallypointError] = UsageError
    why: tuple[str, ...] = (error.headline,)
    help = error.help
    match error.code:
        case "wrong-secret":
            file = nodes.secret_file
            headline = f"the lead of the job has another secret than {file or 'that'} of this node"
            help = (("copy node 0's file to this node", ""),)
            if file == secret_source.key_path(os.environ):
                why += (
                    "the home folder may not be shared: each node has a key file of its own then",
                )
                same = "or name a file that is the same on all nodes"
                help += ((same, "rallypoint run --secret-file ..."),)
        case "wrong-job":
            headline = (
                "another job is at this endpoint: its nodes were started with another --rdzv-id"
            )
            help = (("give each job an endpoint of its own", "--rdzv-endpoint node0:29401"),)
        case "tls-mismatch":
            here, there = "this node", "the lead of the job"
            has, lacks = (here, there) if nodes.tls else (there, here)
            headline = f"{has} was started with --tls, and {lacks} was not"
            help = (("start all nodes with the same options", ""),)
        case "tls-intercepted":
            kind = EnvironmentProblem
            headline = "something between this node and the lead of the job opens the connection and reads it"
        case _:
            kind, headline, why = EnvironmentProblem, error.headline, error.why
    return kind(error.code, headline, why=why, help=help)


def lead_not_reached(nodes: Nodes, *why: str, help: Advice = ()) -> EnvironmentProblem:
    """Return that the lead was not reached in time, with what the last tries said."""
    return EnvironmentProblem(
        "join-timeout",
        f"the lead of the job, at {nodes.folder or nodes.host}, was not reached within {nodes.join_timeout:g} s",
        why=why,
        help=(
            *help,
            ("look whether the launcher of node 0 runs, and whether a firewall is between", ""),
            ("or give it more time", "--rdzv-conf join_timeout=1200"),
        ),
    )
