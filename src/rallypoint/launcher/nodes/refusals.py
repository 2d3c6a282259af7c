"""Refusals of applicants, in the words of errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.diagnosis.report import TEMPORARY
from rallypoint.launcher.nodes.messages import Applicant, Refused

HOSTS_MOST = 8  # that one line names


def unfit(applicant: Applicant, lead: Applicant) -> Refused | None:
    """Return the refusal of an applicant that was started for another job than the lead, or for a
    place that the job does not have.
    """
    host, node_0, count = applicant.host, f"node 0 ({lead.host})", lead.nnodes
    theirs, ours = applicant.versions, lead.versions
    for name, has, had in (
        ("rallypoint", theirs.rallypoint, ours.rallypoint),
        ("Python", _minor(theirs.python), _minor(ours.python)),
        ("torch", _minor(theirs.torch), _minor(ours.torch)),
    ):
        if has != had:
            what = f"has {name} {has}" if has else f"has no {name}"
            return _skew(
                applicant,
                f"{what}, and {node_0} has {had or 'none'}",
                f"all nodes of a job have the same version of {name}",
                "install the same version on all nodes",
            )
    if applicant.nnodes != count:
        return _skew(
            applicant,
            f"was started with --nnodes {applicant.nnodes}, and {node_0} with --nnodes {count}",
            "the number of nodes is the same on all of them",
            "give the same --nnodes on all nodes",
        )
    if applicant.digest != lead.digest:
        return _skew(
            applicant,
            f"was started with another program, or other arguments, than {node_0}",
            "all nodes of a job are given the same program and arguments, letter by letter",
            "start the same command on all nodes; what differs between them may be an environment "
            "variable",
        )
    rank = applicant.node_rank
    if rank is None or 0 <= rank < count:
        return None
    headline = f"{host} was started with --node-rank {rank}, and the job has {count} nodes"
    help = ((f"give a number from 0 to {count - 1}", ""),)
    return Refused("usage", headline, ("nodes are numbered from 0",), help)


def _skew(applicant: Applicant, what: str, why: str, help: str) -> Refused:
    return Refused("node-skew", f"{applicant.host} {what}", (why,), ((help, ""),))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def duplicate(applicant: Applicant, older: str, rank: int) -> Refused:
    """Return the refusal of the younger of two living applicants for one place. `older`: the host
    of the other one.
    """
    headline = f"{older} and {applicant.host} were both started as node {rank}"
    if older == applicant.host:
        headline = f"two launchers on {older} were started as node {rank}"
    why = f"the place belongs to the one on {older}, which came first"
    help = "give each node a --node-rank of its own, or leave it out on all of them"
    return Refused("node-duplicate", headline, (why,), ((help, ""),))


def two_leads(here: str, there: str, address: str) -> Refused:
    """Return the refusal of a node 0 on host `here`, where all others go to `there`."""
    headline = f"{there} and {here} were both started as node 0"
    why = f"the place belongs to {there}, which answers at {address}"
    help = "give each node a --node-rank of its own"
    return Refused("node-duplicate", headline, (why,), ((help, ""),))


def complete(applicant: Applicant, here: Iterable[Applicant], lead: Applicant) -> Refused:
    """Return the refusal of an applicant that comes when every place is taken by those `here`."""
    headline = f"{applicant.host} has no place in this job: all {lead.nnodes} nodes have come"
    nodes = f"they are {named(here, lead.id)}"
    help = "start as many nodes as --nnodes says, or raise it on all of them"
    return Refused("job-complete", headline, (nodes,), ((help, ""),))


def over(applicant: Applicant, lead: str) -> Refused:
    """Return the refusal of an applicant that comes while the job ends: the next one may be its own."""
    headline = f"{applicant.host} has no place in this job, which ends: a node has left it"
    why = f"node 0 ({lead}) is about to leave, too"
    help = "start it again, as exit status 75 asks for"
    return Refused("job-complete", headline, (why,), ((help, ""),), TEMPORARY)


def patches(applicants: Iterable[Applicant], lead: str) -> tuple[str, ...]:
    """Return a line about applicants whose torch differs in its last number alone, if any does."""
    by_torch: dict[str, list[Applicant]] = {}
    for one in applicants:
        by_torch.setdefault(one.versions.torch, []).append(one)
    if len(by_torch) < 2:
        return ()
    told = ", ".join(f"torch {torch} on {named(them, lead)}" for torch, them in by_torch.items())
    return (f"the nodes differ in torch's last number: {told}",)


def timed_out(because: str, roll: Sequence[str]) -> Refused:
    """Return the refusal of applicants that have waited in vain for the others."""
    is_refused = any(line.startswith("refused: ") for line in roll)
    help = (
        *(("read in the report of the node that was refused what to change", ""),) * is_refused,
        ("start the same command on every node", ""),
        ("or give them more time", "--rdzv-conf join_timeout=1200"),
    )
    return Refused("join-timeout", because, tuple(roll), help, TEMPORARY)


def no_common_address(
    lead: Applicant, reached: Mapping[frozenset[str], Sequence[Applicant]]
) -> Refused:
    """Return the refusal of all when no address of node 0 is `reached` by every node."""
    headline = f"no address of node 0 ({lead.host}) is reached by all nodes"
    why = [
        f"{named(applicants)}: {', '.join(sorted(addresses)) or 'none'}"
        for addresses, applicants in reached.items()
    ]
    help = (
        ("name an address that all nodes reach, on all of them", "--rdzv-endpoint ADDRESS:PORT"),
    )
    return Refused("no-common-address", headline, tuple(why[:HOSTS_MOST]), help)


def unreachable(listens_on: str) -> str:
    """Return that a lead which listens at an address of loopback is reached by no other machine."""
    return (
        f"node 0 listens at {listens_on}, which other machines do not reach: on several machines "
        "--rdzv-endpoint or --master-addr names another address of node 0"
    )


def named(applicants: Iterable[Applicant], lead: str = "") -> str:
    """Return the hosts of applicants, with the places that they asked for, and the processes of
    those on one host. `lead`: the id of the one with place 0.
    """
    every = [*applicants]
    hosts = Counter(one.host for one in every)
    names = []
    for one in every:
        has_place = one.node_rank is not None or one.id == lead
        known = [f"node {one.node_rank or 0}"] if has_place else []
        known += [f"pid {one.pid}"] if hosts[one.host] > 1 else []
        names.append(f"{one.host} ({', '.join(known)})" if known else one.host)
    more = len(names) - HOSTS_MOST
    return ", ".join(names[:HOSTS_MOST]) + (f" and {more} more" if more > 0 else "")
