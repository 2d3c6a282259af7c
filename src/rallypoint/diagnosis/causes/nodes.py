"""Nodes of a job: lost, cut off, left by the lead."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from rallypoint.diagnosis.causes.case import Case, likely, whereabouts
from rallypoint.diagnosis.causes.report_form import account
from rallypoint.diagnosis.causes.wording import listed
from rallypoint.diagnosis.evidence import JobEvidence, LostNode, RankEvidence
from rallypoint.diagnosis.report import TEMPORARY, Help, Report
from rallypoint.world import ranges, ranks_phrase

HOSTS_MOST = 4  # nodes that are named because they told nothing

_HOW = {
    "goodbye": "its launcher left the job by itself: it had lost contact with node 0, or was stopped for a while; see the report of that node",
    "connection ended": "the connection of its launcher ended, and it did not come back",
    "lease over": "nothing was heard of its launcher for {0:.1f} s",
}

_SEEN = {
    "gone": "{0} answers: the host is up, its launcher is gone",
    "back": "{0} answers: the host is up, and the launcher is stopped, or was cut off for a while",
    "lead back": "{0} answers, and its launcher does not run: it was killed, or it ended the job because it had heard nothing from this node",
    "listening": "{0} takes connections again: the network failed for a while, or the launcher was stopped",
    "silent": "{0} takes connections, and does not answer: its launcher is stopped, or has no processor time",
    "dropped": "{0} answers no packet: the host is off, or something between drops packets",
    "unreachable": "the network has no way to {0}: its link is down, or this node's",
}
"""What a look at a node's host showed, and what follows from it."""

_OPEN = ("goodbye", "back", "lead back", "listening")
"""Looks that leave it open whether the launcher has failed, or the network for a while."""


def lost(case: Case, standing: Sequence[RankEvidence]) -> Report:
    """Tell of nodes from which nothing is heard any more. `standing`: ranks of other nodes that
    show nothing but where they were.
    """
    job, nodes = case.job, case.job.lost
    why, *more = dict.fromkeys(_why(node) for node in nodes)
    lines = [f"{_named(node)}: {_why(node)}" for node in nodes]
    if not more:
        lines = []
    seen = [rank for rank in standing if rank.stack]
    return account(
        likely(case) if any(_shown(node) in _OPEN for node in nodes) else case,
        "node-lost",
        f"{_subject(nodes)} lost{_clock_time(job, min(node.at for node in nodes))}",
        why="they fell silent" if more else why,
        evidence=(*listed(lines), *whereabouts(job, seen, case.root)),
        help=_help(nodes[0]),
        ranks=tuple(rank for node in nodes for rank in node.ranks),
        exit_status=TEMPORARY,
    )


def lost_then(job: JobEvidence) -> str:
    """Return that the nodes were lost after something else had failed."""
    return f"{_subject(job.lost)} lost afterwards"


def with_unheard(reports: tuple[Report, ...], hosts: Sequence[str]) -> tuple[Report, ...]:
    """Return the reports, of which the first one names the hosts that told nothing in time."""
    if not hosts:
        return reports
    first, named = reports[0], ", ".join(hosts[:HOSTS_MOST])
    more = len(hosts) - HOSTS_MOST
    others = f"{named} and {more} more nodes" if more > 0 else named
    then = "; ".join(filter(None, (first.then, f"nothing was told by {others} in time")))
    return (replace(first, then=then), *reports[1:])


def _named(node: LostNode) -> str:
    ranks = f", {ranks_phrase(node.ranks)}" if node.ranks else ""
    return f"node {node.node} ({node.host}{ranks})"


def _subject(nodes: Sequence[LostNode]) -> str:
    if len(nodes) == 1:
        return f"{_named(nodes[0])} was"
    ranks = [rank for node in nodes for rank in node.ranks]
    hosts = list(dict.fromkeys(node.host for node in nodes))
    named = ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} hosts"
    held = f"; {ranks_phrase(ranks)}" if ranks else ""
    return f"nodes {ranges(node.node for node in nodes)} ({named}{held}) were"


def _clock_time(job: JobEvidence, at: float) -> str:
    """Return the time of the day by the lead's clock."""
    lead = next((node for node in job.nodes if node.node == 0), None)
    if lead is None or not lead.began:
        return ""
    return datetime.fromtimestamp(lead.began + at).strftime(" at %H:%M:%S")


def _why(node: LostNode) -> str:
    how, seen = _HOW[node.how].format(node.silent), _SEEN.get(_shown(node), "")
    return "; ".join(filter(None, (how, seen.format(node.address or node.host))))


def _shown(node: LostNode) -> str:
    """Return what the look shows beside how the node was lost. Only on node 0 does it matter what
    listens: on another host it is none of the job's.
    """
    if node.how == "goodbye":
        return "goodbye"
    if node.looked == "refused" or (node.looked == "listening" and node.node):
        back = "back" if node.node else "lead back"
        return "gone" if node.how == "connection ended" else back
    return node.looked


def _help(node: LostNode) -> list[Help]:
    shown, host = _shown(node), node.host or node.address
    help = []
    if shown in _OPEN:
        failed = "see on both hosts whether a link failed for a while"
        help.append(Help(failed, "sudo dmesg -T | grep -i link"))
    if shown in ("gone", "lead back"):
        ended = "see on that host whether the kernel killed the launcher for lack of memory"
        help.append(Help(ended, f"ssh {host} \"sudo dmesg -T | grep -i 'killed process'\""))
    elif shown in ("silent", "back"):
        still = "see whether the launcher is stopped there (state T)"
        help.append(Help(still, f"ssh {host} ps -eo pid,stat,args"))
    return help or [
        Help(
            "see whether the host is up, and can be reached from here",
            f"ping -c 3 {node.address or host}",
        )
    ]


def lead_lost(node: LostNode, buddy: str = "") -> Report:
    """Tell on another node that node 0, which led the job, is gone. `buddy`: another node's address
    that answers: while node 0's host does not, this node is not the one that is cut off.
    """
    is_open = _shown(node) in _OPEN
    return Report(
        code="lead-lost",
        headline=f"node 0 ({node.host}), which leads the job, was lost",
        why=_why(node),
        confidence="likely" if is_open else "certain",
        evidence=(f"{buddy}, another node of the job, answers: this node is not cut off",)
        if buddy and not is_open
        else (),
        then="the ranks of this node were stopped: nobody else can tell what goes on, or start them again",
        help=tuple(_help(node)),
        exit_status=TEMPORARY,
    )


def node_isolated(
    host: str, lead: str, *, silent: float, tried: Sequence[str] = (), still: float = 0.0
) -> Report:
    """Tell on a node that it reaches nobody of its job. `lead`: host of node 0; `tried`: a line for
    each address that was tried, with what came of it. `still`: seconds that this launcher itself
    stood still, which is then the reason.
    """
    why = f"no answer has come from node 0 ({lead}) for {silent:.1f} s"
    if still:
        why = f"its launcher stood still for {still:.1f} s (a signal, a debugger, a suspended machine): the others could not wait for it"
    elif tried:
        why += ", and the others do not answer either"
    return Report(
        code="node-isolated",
        headline=f"this node ({host}) has lost all others of the job",
        why=why,
        evidence=() if still else listed(tried),
        then="its ranks were stopped, so that no two halves of a job write the same checkpoint",
        help=()
        if still
        else (
            Help("see whether its link is up, and carries packets", "ip -s -brief link"),
            Help("and whether it reaches node 0", f"ping -c 3 {lead}"),
        ),
        exit_status=TEMPORARY,
    )
