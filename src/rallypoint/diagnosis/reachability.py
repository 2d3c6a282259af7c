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
from rallypoint.diagnosis.report import Help, Report
from rallypoint.host import probe
from rallypoint.host.probe import Reached, Tried
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

_CONNECTING = re.compile(
    r"The (?:client )?socket has (?:timed out|failed to connect)[^(]*?\(\[?([^(),]+?)\]?, (\d{1,5})\)"
    r"|failed to connect/validate to host \[?([^ ]+?)\]?:(\d{1,5}) - timed out",
    re.IGNORECASE,
)
_PING_FAILED = re.compile(
    r"Ping failed, invalid value returned from server\. Expected: \d+, Got: (-?\d+)"
)
_NOT_RESOLVED = re.compile(
    r"addresses of \(\[?([^,\]]{1,255})\]?, \d+\) cannot be retrieved \(gai error: -?\d+ - ([^)]{1,300})\)"
)
_BROKEN = re.compile(
    r"Failed to recv, got 0 bytes|Broken pipe|Connection reset by peer", re.IGNORECASE
)
_REMOTE = re.compile(
    r"\bfailed on SocketImpl\(.{0,300}remote=\[(?:::ffff:)?([^\]]{1,300})\]:(\d{1,5})\)"
)
_TIMEOUT = re.compile(r"timed out after (\d+) ?ms", re.IGNORECASE)


def where(error: Raised, meeting: Meeting | None) -> tuple[str, int] | None:
    """The host and port that torch could not reach, by the error's own words or the meeting's; None
    when that is not what it says.
    """
    found = _CONNECTING.search(error.message)
    if found is not None:
        host, port = (found[1], found[2]) if found[1] else (found[3], found[4])
        return host, int(port)
    return place(meeting) if meeting is not None and _PING_FAILED.search(error.message) else None


def place(meeting: Meeting) -> tuple[str, int] | None:
    """The host and port of a meeting over TCP."""
    if not meeting.method.startswith(("env://", "tcp://")):
        return None
    host, _, port = meeting.address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def store_of(error: Raised, said: Sequence[str]) -> tuple[str, int] | None:
    """The host and port of the store of torch's whose connection broke in the middle, by torch's
    own log; None for any other error.
    """
    if (
        error.call
        or not error.type.endswith("DistNetworkError")
        or not _BROKEN.search(error.message)
    ):
        return None
    found = [match for line in said if (match := _REMOTE.search(line)) is not None]
    return (found[-1][1], int(found[-1][2])) if found else None


def store_lost(case: Case, reached: Reached, error: Raised) -> Report | None:
    """A store of torch's that broke a connection: it is gone, or it is there and will not have what
    it was sent. None: not known.
    """
    if reached.outcome == "refused":
        return report_form.account(
            case,
            "store-closed",
            f"{case.subject} lost torch's store at {reached.address}: whoever served it is gone",
            where=cases.where(case, case.first, error),
            why="nothing listens there any more",
            evidence=_seen(case, reached),
            said=report_form.traceback_said(case.first, error),
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
    return Report(
        code="value-too-large",
        headline=f"torch's store at {reached.address} closed the connection of {case.subject}, and goes on serving others",
        where=cases.where(case, case.first, error),
        why="it does that to whoever sends a value of more than 8 MiB, or a key of more than 8 KiB",
        evidence=("a new connection to it is answered as torch's store does",),
        confidence="likely",
        then=case.then,
        said=report_form.traceback_said(case.first, error),
        help=_OTHER_WAYS,
        logs=report_form.logs(case),
        ranks=case.numbers,
    )


def of_words(error: Raised, meeting: Meeting | None) -> Reached | None:
    """What torch's own words say of a foreign service, for want of a look: the four bytes that it
    read as a number.
    """
    found = _PING_FAILED.search(error.message)
    if found is None:
        return None
    host, port = (place(meeting) if meeting is not None else None) or ("the meeting point", 0)
    first = struct.pack("<I", int(found[1]) & 0xFFFFFFFF)
    return Reached(host, port, (Tried(probe.address_of(host, port), "answered", first=first),))


def unreached_at(words: str) -> tuple[str, str] | None:
    """The host and port that torch says it was connecting to when its time was up."""
    found = re.search(
        r"(?:while trying to connect to|to any network address of) \(([^,]{1,300}), (\d+)\)", words
    )
    found = found or re.search(r"while trying to connect to ([\w.-]{1,300}):(\d+)", words)
    return (found[1], found[2]) if found is not None else None


_ATTEMPT = re.compile(
    r"failed to connect to (?P<where>\S{1,300}) \(errno: (?P<errno>\d+)"
    r"|addresses of \((?P<host>[^,]{1,300}), (?P<port>\d+)\)(?: cannot be retrieved \(gai error: -?\d+ - (?P<why>[^)]{1,300}))?"
)
_BY_ERRNO = {0: "unresolved", 110: "dropped", 111: "refused", 113: "unreachable"}


def attempted(text: str) -> Reached | None:
    """What torch's own words tell of a connection that did not come about; None for other words."""
    found = _ATTEMPT.search(text)
    if found is None:
        return None
    if found["host"]:
        return Reached(found["host"], int(found["port"]), unresolved=found["why"] or "gai error")
    where = found["where"].replace("[::ffff:", "[").replace("[", "").replace("]", "")
    outcome, (host, _, port) = _BY_ERRNO.get(int(found["errno"])), where.rpartition(":")
    if outcome is None or not port.isdigit():
        return None
    return Reached(host, int(port), (Tried(where, outcome, int(found["errno"])),))  # type: ignore[arg-type]


def too_large_in_log(case: Case, refused: Sighting) -> Report:
    """torch's store closed a connection for the size of what came, and does not say whose
    it was.
    """
    found = re.search(r"size: (\d+), max: (\d+)", refused.text)
    sent, most = (wording.size(int(number)) for number in found.groups()) if found else ("0", "0")
    who = ranks_phrase(case.numbers) if case.numbers else "a rank"
    return Report(
        code="value-too-large",
        headline=f"{who} sent {sent} in one value to torch's store, which takes no more than {most}, and was cut off",
        evidence=(wording.cut(refused.text, 200),),
        then=case.then,
        help=_OTHER_WAYS,
        logs=refused.place.shown,
        ranks=case.numbers,
    )


_OTHER_WAYS = (
    Help(
        "use the job's own store, which takes tensors and larger values",
        'rallypoint.connect()["key"] = value',
    ),
    Help("or send it with a collective", "dist.broadcast_object_list([value], src=0)"),
)


def explains(reached: Reached) -> bool:
    """Whether what was seen says why nobody meets there: everything but a store of torch's that
    answers.
    """
    return not reached.first.startswith(ANSWER)


def in_short(reached: Reached, line: str) -> str:
    """What was seen at a meeting point, for the roll call: ranks have waited there for a while, and
    may yet meet. `line` names it.
    """
    if reached.outcome == "unresolved":
        said = reached.unresolved
        seen = (
            f"for {reached.host} {said}"
            if reached.unanswered
            else f"{reached.host} has no address" + (f" ({said})" if said else "")
        )
    elif reached.outcome == "answered":
        seen = f"a foreign service is at {reached.address}: it answers {probe.shown(reached.first)}"
    else:
        seen = str(next(one for one in reached.tried if one.outcome == reached.outcome))
    return f"seen from here: {seen}" + (f"; {line} names it" if line else "")


def report(case: Case, reached: Reached, error: Raised | None) -> Report:
    """The cause. `case.ranks`: those that could not reach it; `error`: what the first of them
    raised, if it came to that.
    """
    rank = case.first
    torch_said = (
        (f"torch's own words: {wording.first_line(error.message)}",) if error is not None else ()
    )
    line = (
        rank.meeting.line
        if rank.meeting is not None and place(rank.meeting) == (reached.host, reached.port)
        else ""
    )
    code, headline, why, helps = _judged(case, reached, error, line)
    evidence = (*_seen(case, reached), *_rules(reached), *_hosts(case, reached), *torch_said)
    return Report(
        code=code,
        headline=headline,
        where=cases.where(case, rank, error) if error is not None else cases.whereabout(case, rank),
        why=why,
        confidence="likely" if _doubtful(reached) else case.confidence,
        evidence=evidence,
        then=""
        if reached.stopped and any(one.pid == reached.stopped for one in case.job.ranks)
        else case.then,  # it is no bystander
        help=helps,
        logs=report_form.logs(case),
        ranks=case.numbers,
    )


def _doubtful(reached: Reached) -> bool:
    """Whether what was seen may have another reason than the one that is told."""
    if reached.outcome == "silent":
        return (
            not reached.stopped
        )  # a store on a machine that is far too busy may be silent for as long as a look takes
    return (
        reached.outcome == "refused"
        and reached.rejected is not None
        and not reached.rejected.certain
    )


def _judged(
    case: Case, reached: Reached, error: Raised | None, line: str
) -> tuple[str, str, str, tuple[Help, ...]]:
    """Code, headline, why and help."""
    who, address, host = case.subject, reached.address, reached.host
    one_command = "or start the ranks with one command, which needs no address"
    leave_out = Help(one_command, "rallypoint run -n 2 train.py")
    if case.job.log is None:
        named = f" ({line})" if line else ""
        leave_out = Help(
            f"or leave the address out of the program{named}: rallypoint holds a meeting point for init_process_group"
        )
    outcome = reached.outcome
    if outcome == "unresolved":
        said = _resolvers_words(case, host) or ("" if reached.unanswered else reached.unresolved)
        return (
            "address-unresolved",
            f"{who} could not reach {address}: "
            + (
                f"{host} has no address here ({said})"
                if said
                else f"for {host} {reached.unresolved}"
            ),
            f"{line} names it" if line else "",
            (
                Help("ask this machine's resolver", f"getent hosts {host}"),
                Help("or give the address instead of the name"),
                leave_out,
            ),
        )
    if outcome == "refused" and reached.rejected is not None:
        return (
            "firewall-blocks",
            f"{who} could not reach {address}: the connection is refused, and somebody listens there",
            str(reached.rejected),
            (
                Help("see the rule among the others, as root", "nft list ruleset; iptables-save"),
                leave_out,
            ),
        )
    if outcome == "refused":
        return (
            "port-refused",
            f"{who} found nobody at {address}: nothing listens there",
            f"rank 0 of the group is who listens at its meeting point, and nobody did{_within(case, error)}",
            (
                Help(
                    "let rank 0 of the group listen there before the others give up, with the same address and port in all of them"
                ),
                leave_out,
            ),
        )
    if outcome in ("unreachable", "dropped"):
        how = (
            "no answer at all: packets to it are dropped, or it is off"
            if outcome == "dropped"
            else str(reached.tried[0]).partition(": ")[2]
        )
        return (
            "address-unreachable",
            f"{who} could not reach {address}: {how}",
            f"{line} names it" if line else "",
            (
                Help(
                    "see which way packets to it go, and whether a firewall drops them",
                    f"ip route get {_first_ip(reached)}",
                ),
                leave_out,
            ),
        )
    if outcome == "answered":
        return (
            "store-foreign",
            f"{who} met a foreign service at {address}: it answered {probe.shown(reached.first)}",
            _holders(case, reached)[0]
            if reached.holders
            else "what answers there is no store of torch's",
            (
                Help("choose a port that no other service has" + (f" ({line})" if line else "")),
                leave_out,
            ),
        )
    said = (
        "it accepts the connection, and says nothing"
        if outcome == "silent"
        else "it accepts the connection, and closes it"
    )
    helps: tuple[Help, ...] = (
        Help("see what it is", f"ss -ltnp 'sport = :{reached.port}'"),
        leave_out,
    )
    why = (
        _holders(case, reached)[0]
        if reached.holders
        else "a store of torch's answers in a millisecond"
    )
    if reached.stopped:
        said, helps = (
            f"its process (pid {reached.stopped}) is stopped (state T)",
            (Help("let it go on", f"kill -CONT {reached.stopped}"),),
        )
    return "store-silent", f"{who} got no answer at {address}: {said}", why, helps


def _seen(case: Case, reached: Reached) -> tuple[str, ...]:
    """What was tried, a line for each address; who has the port on this machine, where that is not
    said already.
    """
    tried = tuple(str(one) for one in reached.tried)
    if reached.outcome == "refused" and reached.rejected is not None:
        tried = tuple(line.replace(": nothing listens there", ": refused") for line in tried)
    holders = _holders(case, reached)
    said = holders[1:] if reached.outcome in ("answered", "silent", "closed") else holders
    return (
        *tried[:4],
        *([f"and {len(tried) - 4} more addresses"] if len(tried) > 4 else []),
        *said,
    )


def _rules(reached: Reached) -> tuple[str, ...]:
    if reached.outcome != "dropped":
        return ()
    return (
        reached.rules
        if reached.here
        else ("which firewall drops it, if one does, cannot be seen from here",)
    )


def _holders(case: Case, reached: Reached) -> tuple[str, ...]:
    """Who listens on that port on this machine: strangers by their command, our own by what they
    are.
    """
    ranks = {rank.pid: rank.rank for rank in case.job.ranks}
    lines = []
    for line in reached.holders:
        found = re.search(r"\(pid (\d+),", line)
        if found and int(found[1]) in ranks:
            line = f"rank {ranks[int(found[1])]} of this job (pid {found[1]}) is listening on it"
        elif reached.address == case.job.held_address:
            line = f"it is the meeting point that rallypoint holds{f' (pid {found[1]})' if found else ''}"
        lines.append(line)
    return tuple(dict.fromkeys(lines))


def _hosts(case: Case, reached: Reached) -> tuple[str, ...]:
    """Whether a rank of the job came to listen there: the group's rank 0 does."""
    if reached.outcome not in ("refused", "dropped"):
        return ()
    there = [(rank, rank.meeting) for rank in case.job.ranks if rank.meeting is not None]
    came = [
        rank.rank
        for rank, meeting in there
        if meeting.rank == 0 and place(meeting) == (reached.host, reached.port)
    ]
    numbers = sorted(meeting.rank for _, meeting in there if meeting.rank >= 0)
    if came or not numbers:
        return ()
    sizes = {meeting.world_size for _, meeting in there}
    of = f" of {sizes.pop()}" if len(sizes) == 1 and min(sizes) > 0 else ""
    return (
        f"no rank of this job came as rank 0: they called init_process_group as {ranks_phrase(numbers)}{of}",
    )


def _resolvers_words(case: Case, host: str) -> str:
    """What the resolver told torch of that name, by torch's own log: it had more time for its
    answer than a look has.
    """
    found = [
        match
        for rank in case.ranks
        for line in rank.said
        if (match := _NOT_RESOLVED.search(line)) is not None and match[1] == host
    ]
    return str(found[-1][2]) if found else ""


def _within(case: Case, error: Raised | None) -> str:
    found = _TIMEOUT.search(error.message) if error is not None else None
    seconds = (
        int(found[1]) / 1000
        if found
        else case.first.meeting.timeout
        if case.first.meeting is not None
        else 0.0
    )
    return f" within {seconds:g} s" if seconds else ""


def _first_ip(reached: Reached) -> str:
    return reached.tried[0].where.rpartition(":")[0].strip("[]") if reached.tried else reached.host


def waits_at(rank: RankEvidence, reached: Reached) -> bool:
    """Whether a rank waits, without a word so far, at the place that was looked at."""
    if rank.ended is None and rank.unanswered == (reached.host, reached.port):
        return True
    if rank.ended is not None or rank.phase != "joining" or rank.meeting is None:
        return False
    return place(rank.meeting) == (reached.host, reached.port)
