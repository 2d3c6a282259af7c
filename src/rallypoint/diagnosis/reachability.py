"""Why the ranks could not meet: torch's words about the meeting point, and what was seen there,
told as one of several causes.

torch says the same of a port where nobody listens, a name without an address and a host that drops
packets: "The client socket has timed out after 3000ms while trying to connect to (node07, 29500)".
So the launcher looks for itself (`host/probe.py`), and what it saw is the cause. Pure: `where` says
whether and where to look, `report` judges what was seen.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import report_form, wording
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.evidence import Meeting, Raised, RankEvidence
from rallypoint.diagnosis.log_events import Sighting
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report
from rallypoint.host import probe
from rallypoint.host.probe import Reached, Tried
from rallypoint.host.socket_addresses import address_of
from rallypoint.units import size
from rallypoint.world import ranks_phrase

LOOK_TIMEOUT = 0.3
"""Seconds for a look. A report is promised half a second after the ranks' own deadline, and a host
in the same building answers, or refuses, in a thousandth of that. What answers in none of it has
not answered the ranks either, which tried for longer."""

_NONCE = 0x7A11
_VALIDATE, _MAGIC, _PING = (
    0,
    0x3C85F7CE,
    13,
)  # torch 2.3 to 2.13, TCPStoreBackend.hpp: what every client of its store says first

GREETING = struct.pack("<BIBI", _VALIDATE, _MAGIC, _PING, _NONCE)
"""What a look says: the same as the ranks' torch said there before."""

ANSWER = struct.pack("<I", _NONCE)
"""What torch's store answers to that: the number again."""

_CONNECTING = Pattern(
    r"The (?:client )?socket has (?:timed out|failed to connect)[^(]*?\(\[?([^(),]+?)\]?, (\d{1,5})\)"
    r"|failed to connect/validate to host \[?([^ ]+?)\]?:(\d{1,5}) - timed out",
    re.IGNORECASE,
)
_PING_FAILED = Pattern(
    r"Ping failed, invalid (?:nonce returned|value returned from server\. Expected: \d+, Got: (-?\d+))"
)
_BROKEN = Pattern(
    r"Failed to recv, got 0 bytes|Broken pipe|Connection reset by peer", re.IGNORECASE
)
_REMOTE = Pattern(
    r"\bfailed on SocketImpl\(.{0,300}remote=\[(?:::ffff:)?([^\]]{1,300})\]:(\d{1,5})\)"
)
_TIMEOUT = Pattern(r"timed out after (\d+) ?ms", re.IGNORECASE)


def where(error: Raised, meeting: Meeting | None) -> tuple[str, int] | None:
    """Return the host and port that torch could not reach, by the error's own words or the
    meeting's; None when that is not what it says.
    """
    found = _CONNECTING.search(error.message)
    if found is not None:
        return found[1] or found[3], int(found[2] or found[4])
    return place(meeting) if meeting is not None and _PING_FAILED.search(error.message) else None


def place(meeting: Meeting) -> tuple[str, int] | None:
    """Return the host and port of a meeting over TCP."""
    host, _, port = meeting.address.rpartition(":")
    over_tcp = meeting.method.startswith(("env://", "tcp://"))
    return (host.strip("[]"), int(port)) if over_tcp and host and port.isdigit() else None


def store_of(error: Raised, said: Sequence[str]) -> tuple[str, int] | None:
    """Return the host and port of the store of torch's whose connection broke in the middle, by
    torch's own log; None for any other error.
    """
    of_store = not error.call and error.type.endswith("DistNetworkError")
    if not of_store or not _BROKEN.search(error.message):
        return None
    found = [match for line in said if (match := _REMOTE.search(line)) is not None]
    return (found[-1][1], int(found[-1][2])) if found else None


def store_lost(case: Case, reached: Reached, error: Raised) -> Report | None:
    """Tell of a store of torch's that broke a connection: it is gone, or it is there and will not
    have what it was sent. None: not known.
    """
    quoted = report_form.traceback_said(case.first, error)
    at = cases.where(case, case.first, error)
    if reached.outcome == "refused":
        return report_form.account(
            case,
            "store-closed",
            f"{case.subject} lost torch's store at {reached.address}: whoever served it is gone",
            where=at,
            why="nothing listens there any more",
            evidence=_seen(case, reached),
            said=quoted,
            help=(
                Help("let the process that serves the store outlive those that use it"),
                Help(
                    "or use the job's own store, which rallypoint serves as long as the job lasts",
                    "store = rallypoint.connect()",
                ),
            ),
        )
    if explains(reached):
        return None
    return report_form.account(
        case,
        "value-too-large",
        f"torch's store at {reached.address} closed the connection of {case.subject}, and goes on serving others",
        where=at,
        why="it does that to whoever sends a value of more than 8 MiB, or a key of more than 8 KiB",
        evidence=["a new connection to it is answered as torch's store does"],
        confidence="likely",
        said=quoted,
        help=_OTHER_WAYS,
    )


def of_words(error: Raised, meeting: Meeting | None) -> Reached | None:
    """Return what torch's own words say of a foreign service, for want of a look: the four bytes
    that it read as a number.
    """
    found = _PING_FAILED.search(error.message)
    if found is None:
        return None
    host, port = (place(meeting) if meeting is not None else None) or ("the meeting point", 0)
    # torch 2.8 does not say what it read.
    first = struct.pack("<I", int(found[1]) & 0xFFFFFFFF) if found[1] else b""
    return Reached(host, port, (Tried(address_of(host, port), "answered", first=first),))


def unreached_at(words: str) -> tuple[str, str] | None:
    """Return the host and port that torch says it was connecting to when its time was up."""
    found = _UNREACHED.search(words)
    return (found[1] or found[3], found[2] or found[4]) if found is not None else None


_UNREACHED = Pattern(
    r"(?:while trying to connect to|to any network address of) \(([^,]{1,300}), (\d+)\)"
    r"|while trying to connect to ([\w.-]{1,300}):(\d+)"
)


_ATTEMPT = Pattern(
    r"failed to connect to (?P<where>\S{1,300}) \(errno: (?P<errno>\d+)"
    r"|addresses of \((?P<host>[^,]{1,300}), (?P<port>\d+)\)(?: cannot be retrieved \(gai error: -?\d+ - (?P<why>[^)]{1,300}))?"
)
_BY_ERRNO: dict[int, probe.Outcome] = {110: "dropped", 111: "refused", 113: "unreachable"}


def attempted(text: str) -> Reached | None:
    """Return what torch's own words tell of a connection that did not come about; None for other
    words.
    """
    found = _ATTEMPT.search(text)
    if found is None:
        return None
    if found["host"]:
        return Reached(found["host"], int(found["port"]), unresolved=found["why"] or "gai error")
    where = found["where"].replace("[::ffff:", "[").replace("[", "").replace("]", "")
    outcome, (host, _, port) = _BY_ERRNO.get(int(found["errno"])), where.rpartition(":")
    if outcome is None or not port.isdigit():
        return None
    return Reached(host, int(port), (Tried(where, outcome, int(found["errno"])),))


def too_large_in_log(case: Case, refused: Sighting) -> Report:
    """Tell of a connection that torch's store closed for the size of what came; the log does not
    say whose it was.
    """
    found = re.search(r"size: (\d+), max: (\d+)", refused.text)
    sent, most = (size(int(number)) for number in found.groups()) if found else ("0", "0")
    who = ranks_phrase(case.numbers) if case.numbers else "a rank"
    return report_form.account(
        case,
        "value-too-large",
        f"{who} sent {sent} in one value to torch's store, which takes no more than {most}, and was cut off",
        evidence=[wording.cut(refused.text, 200)],
        help=_OTHER_WAYS,
        logs=refused.place.shown,
    )


_OTHER_WAYS = (
    Help(
        "use the job's own store, which takes tensors and larger values",
        'rallypoint.connect()["key"] = value',
    ),
    Help("or send it with a collective", "dist.broadcast_object_list([value], src=0)"),
)


def explains(reached: Reached) -> bool:
    """Tell whether what was seen says why nobody meets there: everything but a store of torch's
    that answers.
    """
    return not reached.first.startswith(ANSWER)


def in_short(reached: Reached, line: str) -> str:
    """Return what was seen at a meeting point, for the roll call: ranks have waited there for a
    while, and may yet meet. `line` names it.
    """
    seen = _no_address(reached)
    if reached.outcome == "answered":
        seen = f"a foreign service is at {reached.address}: it answers {probe.shown(reached.first)}"
    elif not seen:
        seen = str(next(one for one in reached.tried if one.outcome == reached.outcome))
    return f"seen from here: {seen}" + (f"; {line} names it" if line else "")


def _no_address(reached: Reached) -> str:
    """Return what the resolver said of a name; "" when it has an address."""
    if reached.outcome != "unresolved":
        return ""
    if reached.unanswered:
        return f"for {reached.host} {reached.unresolved}"
    said = f" ({reached.unresolved})" if reached.unresolved else ""
    return f"{reached.host} has no address here{said}"


def report(case: Case, reached: Reached, error: Raised | None) -> Report:
    """Tell why a meeting point could not be reached. `case.ranks`: those that could not reach it;
    `error`: what the first of them raised, if it came to that.
    """
    rank, meeting = case.first, case.first.meeting
    at = (reached.host, reached.port)
    line = meeting.line if meeting is not None and place(meeting) == at else ""
    code, said, why, helps = _judged(case, reached, error, line)
    evidence = [*_seen(case, reached), *_rules(reached), *_hosts(case, reached)]
    where = cases.whereabout(case, rank)
    if error is not None:
        evidence.append(f"torch's own words: {wording.first_line(error.message)}")
        where = cases.where(case, rank, error)
    # The process that is stopped is no bystander.
    guilty = reached.stopped and any(one.pid == reached.stopped for one in case.node.ranks)
    return report_form.account(
        case,
        code,
        f"{case.subject} {said}",
        where=where,
        why=why,
        confidence="likely" if _is_doubtful(reached) else case.confidence,
        evidence=evidence,
        then="" if guilty else case.then,
        help=helps,
    )


def _is_doubtful(reached: Reached) -> bool:
    """Tell whether what was seen may have another reason than the one that is told."""
    if reached.outcome == "silent":
        # A store on a machine that is far too busy may be silent for as long as a look takes.
        return not reached.stopped
    rejected = reached.rejected if reached.outcome == "refused" else None
    return rejected is not None and not rejected.certain


def _judged(
    case: Case, reached: Reached, error: Raised | None, line: str
) -> tuple[str, str, str, tuple[Help, ...]]:
    """Return code, headline without its subject, why and help."""
    address, outcome = reached.address, reached.outcome
    could_not = f"could not reach {address}:"
    names = f"{line} names it" if line else ""
    leave_out = Help(
        f"or leave the address out of the program{f' ({line})' if line else ''}: rallypoint holds a meeting point for init_process_group"
    )
    if case.job.log is not None:
        one_command = "or start the ranks with one command, which needs no address"
        leave_out = Help(one_command, "rallypoint run -n 2 train.py")
    if outcome == "unresolved":
        ask = Help("ask this machine's resolver", f"getent hosts {reached.host}")
        instead = Help("or give the address instead of the name")
        said = f"{could_not} {_no_address(reached)}"
        return "address-unresolved", said, names, (ask, instead, leave_out)
    if outcome == "refused" and reached.rejected is not None:
        said = f"{could_not} the connection is refused, and somebody listens there"
        see = Help("see the rule among the others, as root", "nft list ruleset; iptables-save")
        return "firewall-blocks", said, str(reached.rejected), (see, leave_out)
    if outcome == "refused":
        listen = "let rank 0 of the group listen there before the others give up, with the same address and port in all of them"
        within = _within(case, error)
        return (
            "port-refused",
            f"found nobody at {address}: nothing listens there",
            f"rank 0 of the group is who listens at its meeting point, and nobody did{within}",
            (Help(listen), leave_out),
        )
    if outcome in ("unreachable", "dropped"):
        tried = reached.tried[0]
        how = str(tried).partition(": ")[2]
        if outcome == "dropped":
            how = "no answer at all: packets to it are dropped, or it is off"
        route = f"ip route get {tried.where.rpartition(':')[0].strip('[]')}"
        see = Help("see which way packets to it go, and whether a firewall drops them", route)
        return "address-unreachable", f"{could_not} {how}", names, (see, leave_out)
    holders = _holders(case, reached)
    if outcome == "answered":
        answered = f": it answered {probe.shown(reached.first)}" if reached.first else ""
        said = f"met a foreign service at {address}{answered}"
        why = holders[0] if holders else "what answers there is no store of torch's"
        other = Help(f"choose a port that no other service has{f' ({line})' if line else ''}")
        return "store-foreign", said, why, (other, leave_out)
    how = "says nothing" if outcome == "silent" else "closes it"
    said = f"got no answer at {address}: it accepts the connection, and {how}"
    helps: tuple[Help, ...] = (
        Help("see what it is", f"ss -ltnp 'sport = :{reached.port}'"),
        leave_out,
    )
    if reached.stopped:
        said = (
            f"got no answer at {address}: its process (pid {reached.stopped}) is stopped (state T)"
        )
        helps = (Help("let it go on", f"kill -CONT {reached.stopped}"),)
    why = holders[0] if holders else "a store of torch's answers in a millisecond"
    return "store-silent", said, why, helps


def _seen(case: Case, reached: Reached) -> tuple[str, ...]:
    """Return what was tried, a line for each address; who has the port on this machine, where that
    is not said already.
    """
    tried = [str(one) for one in reached.tried[:4]]
    if reached.outcome == "refused" and reached.rejected is not None:
        tried = [line.replace(": nothing listens there", ": refused") for line in tried]
    if len(reached.tried) > 4:
        tried.append(f"and {len(reached.tried) - 4} more addresses")
    said = reached.outcome in ("answered", "silent", "closed")
    return (*tried, *_holders(case, reached)[said:])


def _rules(reached: Reached) -> tuple[str, ...]:
    if reached.outcome != "dropped":
        return ()
    if reached.here:
        return reached.rules
    return ("which firewall drops it, if one does, cannot be seen from here",)


def _holders(case: Case, reached: Reached) -> tuple[str, ...]:
    """Return who listens on that port on this machine: strangers by their command, our own by what
    they are.
    """
    ranks = {str(rank.pid): rank.rank for rank in case.node.ranks}
    lines = []
    for line in reached.holders:
        found = re.search(r"\(pid (\d+),", line)
        pid = found[1] if found else ""
        if pid in ranks:
            line = f"rank {ranks[pid]} of this job (pid {pid}) is listening on it"
        elif reached.address == case.job.held_address:
            line = f"it is the meeting point that rallypoint holds{f' (pid {pid})' if pid else ''}"
        lines.append(line)
    return tuple(dict.fromkeys(lines))


def _hosts(case: Case, reached: Reached) -> tuple[str, ...]:
    """Return that no rank of the job came to listen there: the group's rank 0 does."""
    there = [rank.meeting for rank in case.job.ranks if rank.meeting is not None]
    at = (reached.host, reached.port)
    came = any(meeting.rank == 0 and place(meeting) == at for meeting in there)
    numbers = [meeting.rank for meeting in there if meeting.rank >= 0]
    if came or not numbers or reached.outcome not in ("refused", "dropped"):
        return ()
    sizes = {meeting.world_size for meeting in there}
    of = f" of {max(sizes)}" if len(sizes) == 1 and max(sizes) > 0 else ""
    return (
        f"no rank of this job came as rank 0: they called init_process_group as {ranks_phrase(numbers)}{of}",
    )


def _within(case: Case, error: Raised | None) -> str:
    meeting = case.first.meeting
    seconds = meeting.timeout if meeting is not None else 0.0
    found = _TIMEOUT.search(error.message) if error is not None else None
    if found:
        seconds = int(found[1]) / 1000
    return f" within {seconds:g} s" if seconds else ""


def waits_at(rank: RankEvidence, reached: Reached) -> bool:
    """Tell whether a rank waits, without a word so far, at the place that was looked at."""
    at, meeting = (reached.host, reached.port), rank.meeting
    joining = rank.phase == "joining" and meeting is not None and place(meeting) == at
    return rank.ended is None and (rank.unanswered == at or joining)
