"""Who has come to init_process_group and who has not; and what is certain to keep those who have
come from meeting.

Certain means: it follows from what the ranks have asked for and from where all of them are now.
Ranks that made the same number of calls before are compared, and no others: one that opens its
second group while another is still in the first disagrees with nobody. Groups of some of the ranks,
and meeting points where processes outside this job may come, too, are left to the roll call, which
only says what is there.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import rendezvous, report_form, wording
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.evidence import Frame, JobEvidence, Meeting, Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

# of ranks that are not there yet, a line each: with its first and its last line a roll call fills
# half a small terminal
PLACES_MOST = 8
LINE_CHARACTERS = 200  # of one line: two rows of a wide terminal
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1"))
# Their groups are complete without the others (torch's own stand-in for tests), or ask somebody
# else who they are.
_ALONE = frozenset(("fake", "mpi"))

Code = Literal["address-differs", "rank-duplicate", "backend-differs", "world-size-differs"]


class Caller(msgspec.Struct, frozen=True):
    """A rank that is inside init_process_group now."""

    rank: int
    meeting: Meeting
    held: bool = False  # it looks for the others where the launcher holds a socket

    @property
    def place(self) -> tuple[str, str]:
        """Where it looks for the others: ("net", "loopback:29500"), ("file", "/tmp/meet"); ("", "")
        when that cannot be compared.
        """
        return _place(self.meeting.method, self.meeting.address, self.meeting.backend)


@functools.lru_cache(
    maxsize=64
)  # with each rank that comes all are compared, and mostly all have the same one
def _place(method: str, address: str, backend: str) -> tuple[str, str]:
    if not address or method == "store" or backend.lower() in _ALONE:
        return "", ""
    if method.startswith("file:"):
        return "file", posixpath.normpath(address)
    host, _, port = address.rpartition(":")
    host = host.strip("[]").lower()
    return "net", f"{'loopback' if is_loopback(host) else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own to itself alone, as far as it can be told
    without asking anybody.
    """
    return host.strip("[]").lower() in _LOOPBACK


class Misfit(msgspec.Struct, frozen=True):
    """Why these ranks will never meet. Certain."""

    code: Code
    ranks: tuple[
        int, ...
    ]  # those that do not fit, or all of them where none is more wrong than another
    because: str
    callers: tuple[
        Caller, ...
        # what everybody had asked for by then: one that fails at once may ask for something else
    ] = ()


def whole(meeting: Meeting, world_size: int) -> bool:
    """Whether a group needs every rank of the job."""
    return meeting.world_size == world_size > 1 and meeting.backend.lower() not in _ALONE


def misfit(
    callers: Sequence[Caller], world_size: int, *, through: Sequence[Caller] = (), all_there: bool
) -> Misfit | None:
    """What keeps these ranks, which wait now, from meeting; None when nothing is certain to.
    `through`: those that have left their last call well; NCCL waits for nobody until the first
    collective. `all_there`: no rank of the job that could still come is elsewhere."""
    turns: dict[int, list[Caller]] = {}
    for caller in callers:
        if caller.place[0]:
            turns.setdefault(caller.meeting.turn, []).append(caller)
    for turn, together in turns.items():
        before = [
            one for one in through if one.meeting.turn == turn and whole(one.meeting, world_size)
        ]
        found = (
            _apart(together, world_size) or _duplicate(together) or _backends([*before, *together])
        )
        if found is None and all_there and len(together) == len(callers):
            found = _sizes(together, world_size)
        if found is not None:
            return msgspec.structs.replace(found, callers=(*before, *together))
    return None


def _apart(together: Sequence[Caller], world_size: int) -> Misfit | None:
    """Every group needs the whole job, and they look for it at different places. A host has several
    names: it is the port that tells.
    """
    places = {_port(caller): caller for caller in together if whole(caller.meeting, world_size)}
    if len(places) < 2:
        return None
    ranks = tuple(caller.rank for caller in together if whole(caller.meeting, world_size))
    return Misfit("address-differs", ranks, "the ranks would meet at different addresses")


def _port(caller: Caller) -> tuple[str, str]:
    kind, place = caller.place
    return kind, place if kind == "file" else place.rpartition(":")[2]


def _duplicate(together: Sequence[Caller]) -> Misfit | None:
    """Two that ask for one seat of one group."""
    seats: dict[Hashable, list[int]] = {}
    for caller in together:
        if caller.meeting.rank >= 0 and caller.meeting.world_size > 1:
            seats.setdefault(
                (caller.place, caller.meeting.world_size, caller.meeting.rank), []
            ).append(caller.rank)
    ranks = tuple(
        sorted(rank for numbers in seats.values() if len(numbers) > 1 for rank in numbers)
    )
    return (
        Misfit(
            "rank-duplicate",
            ranks,
            f"{ranks_phrase(ranks)} have come as a rank that another is, too",
        )
        if ranks
        else None
    )


def _backends(together: Sequence[Caller]) -> Misfit | None:
    """Two of one group that would talk through different libraries. Texts that name a backend per
    device may overlap: nothing is said.
    """
    groups: dict[Hashable, dict[str, list[int]]] = {}
    for caller in together:
        backend = caller.meeting.backend.lower()
        if backend.isidentifier() and caller.meeting.world_size > 1:
            groups.setdefault((caller.place, caller.meeting.world_size), {}).setdefault(
                backend, []
            ).append(caller.rank)
    for backends in groups.values():
        if len(backends) > 1:
            ranks = tuple(sorted(rank for numbers in backends.values() for rank in numbers))
            return Misfit(
                "backend-differs",
                ranks,
                f"the ranks would meet with different backends: {', '.join(sorted(backends))}",
            )
    return None


def _sizes(together: Sequence[Caller], world_size: int) -> Misfit | None:
    """Everybody waits, nobody is left to come, and no group among them will be complete."""
    groups: dict[tuple[Hashable, int], list[Caller]] = {}
    for caller in together:
        groups.setdefault((caller.place, caller.meeting.world_size), []).append(caller)
    if any(
        size < 1 or {one.meeting.rank for one in came} >= set(range(size))
        for (_, size), came in groups.items()
    ):
        return None
    sizes = sorted({size for _, size in groups})
    # Where the launcher does not hold the socket, ranks of a job on another machine may be on their
    # way.
    if len(sizes) < 2 and (
        sizes == [world_size]
        or not all(one.held and one.place[1].startswith("loopback:") for one in together)
    ):
        return None
    ranks = tuple(sorted(one.rank for one in together if one.meeting.world_size != world_size))
    return Misfit(
        "world-size-differs", ranks, f"the ranks wait for groups of {' and '.join(map(str, sizes))}"
    )


# --- reports
# --------------------------------------------------------------------------------------------------


def report(found: Misfit, job: JobEvidence) -> Report:
    """What does not fit, with every rank's own line."""
    asked = {caller.rank: caller.meeting for caller in found.callers}
    job = msgspec.structs.replace(
        job,
        ranks=tuple(
            msgspec.structs.replace(rank, meeting=asked.get(rank.rank)) for rank in job.ranks
        ),
    )
    at_fault = tuple(rank for rank in job.ranks if rank.rank in found.ranks)
    return _REPORTS[found.code](Case(job, at_fault, _then(job, found.ranks)))


def _address_differs(case: Case) -> Report:
    meetings: dict[Hashable, tuple[Meeting, list[int]]] = {}
    for rank, meeting in _met(case.ranks):
        meetings.setdefault(_port(Caller(rank.rank, meeting)), (meeting, []))[1].append(rank.rank)
    return rendezvous.address_differs(
        case, [(meeting, tuple(numbers)) for meeting, numbers in meetings.values()]
    )


def _rank_duplicate(case: Case) -> Report:
    taken: dict[tuple[int, int], list[int]] = {}
    for rank, meeting in _met(case.ranks):
        taken.setdefault((meeting.rank, meeting.world_size), []).append(rank.rank)
    (number, size), ranks = next(iter(taken.items()))
    missing = sorted(
        set(range(size))
        - {meeting.rank for _, meeting in _met(case.job.ranks) if meeting.world_size == size}
    )
    all_in = sum(meeting.world_size == size for _, meeting in _met(case.job.ranks)) == size
    nobody = f"; nobody has come as {ranks_phrase(missing)}" if missing and all_in else ""
    return _report(
        case,
        "rank-duplicate",
        f"{ranks_phrase(ranks)} called init_process_group as the same rank, {number} of {size}",
        f"a group has each rank from 0 to {size - 1} once{nobody}",
        lambda meeting: f"rank={meeting.rank}, world_size={meeting.world_size}",
        Help(
            "take the number that the launcher gave to each process",
            'rank = int(os.environ["RANK"])',
        ),
    )


def _backend_differs(case: Case) -> Report:
    names = _in_order(meeting.backend.lower() for _, meeting in _met(case.ranks))
    return _report(
        case,
        "backend-differs",
        f"the ranks called init_process_group with different backends: {', '.join(names)}",
        "the ranks of a group reach each other only through the same backend",
        lambda meeting: meeting.backend.lower(),
        Help(
            "choose the backend by what is the same for all ranks, not by what one of them finds",
            'dist.init_process_group("gloo")',
        ),
    )


def _world_size_differs(case: Case) -> Report:
    job, met = case.job, _met(case.job.ranks)
    sizes = _in_order(str(meeting.world_size) for _, meeting in met)
    if len(sizes) > 1:
        headline = (
            f"the ranks called init_process_group with different world sizes: {', '.join(sizes)}"
        )
    else:
        who = cases.subject([rank.rank for rank, _ in met], job.world_size)
        headline = f"{who} called init_process_group with world_size={sizes[0]}, and the job has {job.world_size} ranks"
    return _report(
        case,
        "world-size-differs",
        headline,
        "a group is complete when as many ranks have come as its world_size says; everybody waits, and nobody is left to come",
        lambda meeting: f"world_size={meeting.world_size}",
        Help(
            "take the number of processes that the launcher has started",
            'world_size = int(os.environ["WORLD_SIZE"])',
        ),
        everybody=True,
    )


_REPORTS: dict[Code, Callable[[Case], Report]] = {
    "address-differs": _address_differs,
    "rank-duplicate": _rank_duplicate,
    "backend-differs": _backend_differs,
    "world-size-differs": _world_size_differs,
}


def _report(
    case: Case,
    code: Code,
    headline: str,
    why: str,
    told: Callable[[Meeting], str],
    help: Help,
    *,
    everybody: bool = False,
) -> Report:
    """`told`: what a rank asked for. The ranks that asked for the same at the same line share a
    line of evidence.
    """
    asked: dict[tuple[str, str], list[int]] = {}
    for rank, meeting in _met(case.job.ranks if everybody else case.ranks):
        asked.setdefault((told(meeting), meeting.line), []).append(rank.rank)
    lines = [
        f"{ranks_phrase(ranks)}: {what}" + (f", at {line}" if line else "")
        for (what, line), ranks in asked.items()
    ]
    first = case.first.meeting
    return report_form.account(
        case,
        code,
        headline,
        where=first.line if first is not None else "",
        why=why,
        evidence=tuple(_few(lines)),
        help=(
            help,
            *(
                [Help("or leave rank= and world_size= out: rallypoint sets both")]
                if code != "backend-differs"
                else []
            ),
        ),
    )


def _met(ranks: Iterable[RankEvidence]) -> list[tuple[RankEvidence, Meeting]]:
    return [(rank, rank.meeting) for rank in ranks if rank.meeting is not None]


def _then(job: JobEvidence, at_fault: Sequence[int]) -> str:
    others = [rank.rank for rank in job.ranks if rank.ended is None and rank.rank not in at_fault]
    if not others:
        return ""
    were, they_are = ("was", "it is") if len(others) == 1 else ("were", "they are")
    return f"{ranks_phrase(others)} {were} stopped; {they_are} not at fault"


def _in_order(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# --- the roll call
# --------------------------------------------------------------------------------------------------


def absent(
    ranks: Sequence[RankEvidence], waiting: Sequence[int], world_size: int
) -> tuple[int, ...]:
    """The ranks that somebody in `waiting` waits for: elsewhere, or ended, and not already through
    the same group.
    """
    turns = {
        rank.meeting.turn
        for rank in ranks
        if rank.rank in waiting and rank.meeting and whole(rank.meeting, world_size)
    }
    return tuple(
        rank.rank
        for rank in ranks
        if turns and rank.rank not in waiting and not _is_through(rank, turns, world_size)
    )


def _is_through(rank: RankEvidence, turns: set[int], world_size: int) -> bool:
    """It has left the call that others are still in: backends that connect at the first collective
    do not wait for everybody.
    """
    left = rank.phase in ("running", "finishing", "done")
    return (
        left
        and rank.meeting is not None
        and rank.meeting.turn in turns
        and whole(rank.meeting, world_size)
    )


def lines(
    ranks: Sequence[RankEvidence],
    waiting: Sequence[int],
    states: Mapping[int, str],
    world_size: int,
    now: float,
    root: str = "",
) -> tuple[str, ...]:
    """The roll call: who waits, and where those are who have not come. The first line is a
    sentence; () when nobody waits.

    `waiting`: ranks that are inside init_process_group. `states`: of ranks that did not tell where
    they are, why ("stopped (SIGSTOP)"). `now`: seconds since the job's start. `root`: the folder
    that paths are shown relative to, with a "/" at its end.
    """
    by_rank = {rank.rank: rank for rank in ranks}
    inside = [by_rank[number] for number in waiting]
    together = [
        rank for rank in inside if rank.meeting is not None and whole(rank.meeting, world_size)
    ]
    said = _partial(inside, now, world_size)
    if together:
        elsewhere = [
            f"{ranks_phrase([rank.rank])} in another group: {_asked(rank.meeting)}"
            for rank in inside
            if rank not in together
        ]
        missing = [by_rank[number] for number in absent(ranks, waiting, world_size)]
        places = _few([*_places(missing, states, now, root), *elsewhere])
        differing = _few(_differing(together))
        count = (
            f"all {world_size} ranks"
            if len(together) == world_size
            else f"{len(together)} of {world_size} ranks"
        )
        longest = now - min(rank.phase_at for rank in together)
        head = f"{count} {'has' if len(together) == 1 else 'have'} been waiting in init_process_group for {longest:.0f} s"
        head += "; not there yet:" if places else ", and nobody is missing"
        said = [head, *(f"  {line}" for line in places)]
        said += (
            ["  those who wait were told:", *(f"    {line}" for line in differing)]
            if differing
            else []
        )
    return tuple(
        line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 4] + " ..."
        for line in said
    )


def _partial(inside: Sequence[RankEvidence], now: float, world_size: int) -> list[str]:
    """Groups of some ranks, or of more than this job has: who of them came."""
    groups: dict[Hashable, list[tuple[RankEvidence, Meeting]]] = {}
    for rank, meeting in _met(inside):
        groups.setdefault((Caller(rank.rank, meeting).place, meeting.world_size), []).append(
            (rank, meeting)
        )
    said = []
    for came in groups.values():
        meeting, size = came[0][1], came[0][1].world_size
        missing = sorted(set(range(max(size, 0))) - {one.rank for _, one in came})
        longest = now - min(rank.phase_at for rank, _ in came)
        who, verb = ranks_phrase(rank.rank for rank, _ in came), "has" if len(came) == 1 else "have"
        nobody = (
            f"; no rank of this job has joined as {ranks_phrase(missing)}"
            if missing
            else ", and nobody is missing"
        )
        said.append(
            f"{who} {verb} been waiting in init_process_group for {longest:.0f} s, for a group of {size} ({_asked(meeting)}){nobody}"
        )
        if size > world_size:
            has = f"this job has {world_size} rank{'s' * (world_size != 1)}"
            said.append(
                f"  {has}: start {size} of them (-n {size}), and leave rank= and world_size= out"
            )
    return _few(said)


def _places(
    missing: Sequence[RankEvidence], states: Mapping[int, str], now: float, root: str
) -> list[str]:
    """A line for all that are at one place, with the time of the one that has been there
    longest.
    """
    groups: dict[tuple[str, str], list[RankEvidence]] = {}
    for rank in missing:
        known = "; ".join(
            filter(None, (states.get(rank.rank) or place(rank.stack, root), _hid(rank, root)))
        )
        groups.setdefault(
            ("", _end(rank)) if rank.ended is not None else (_word(rank), known), []
        ).append(rank)
    found = []
    for (word, known), members in groups.items():
        who = ranks_phrase(rank.rank for rank in members)
        since = now - min(_since(rank) for rank in members)
        told = f"{who} {word} for {since:.0f} s" + (f": {known}" if known else "")
        found.append(told if word else f"{who} {known}, {since:.0f} s ago")
    return found


def _word(rank: RankEvidence) -> str:
    if rank.phase in ("preparing", "started"):
        return "starting"
    if rank.phase in ("finishing", "done"):
        return "closing down"
    return "importing" if _imported(rank.stack) >= 0 else "running"


def _end(rank: RankEvidence) -> str:
    assert rank.ended is not None
    return (
        f"died: {wording.signal_name(rank.ended.signal)}"
        if rank.ended.signal
        else f"exited with code {rank.ended.code}"
    )


def _since(rank: RankEvidence) -> float:
    if rank.ended is not None:
        return rank.ended.at
    error = _caught(rank)
    return error.at if error is not None and rank.phase == "joining" else rank.phase_at


def _hid(rank: RankEvidence, root: str) -> str:
    """The error that it caught, without which it would be here."""
    error = _caught(rank)
    if error is None:
        return ""
    clause = (
        f", which {stacks.shown(error.caught_at.file, root)}:{error.caught_at.line} caught"
        if error.caught_at is not None
        else ""
    )
    return f"{error.call} had raised {wording.named(error)}{clause}"


def _caught(rank: RankEvidence) -> Raised | None:
    """The last error on the way into the group, unless the rank has come further since."""
    errors = [
        error
        for error in rank.handled
        if error.call in ("init_process_group", "set_device") and error.at >= rank.phase_at
    ]
    return errors[-1] if errors else None


def place(frames: tuple[Frame, ...], root: str = "") -> str:
    """Where a rank stands: `data.py:88 in build_index`; while it imports, from where and how far
    in: `train.py:3 <module> > datasets/__init__.py:22`. "" for ()."""
    index = _imported(frames)
    if index < 0:
        return stacks.place(frames, root)
    own = [frame for frame in frames[:index] if not stacks.library(frame)]
    begins, module = own[-1] if own else frames[0], frames[index]
    inside = stacks.library_path(stacks.shown(module.file, root))
    return f"{stacks.shown(begins.file, root)}:{begins.line} {begins.function} > {inside}:{module.line}"


def _imported(frames: tuple[Frame, ...]) -> int:
    """The index of the innermost module that is being imported; -1 when none is. The outermost one
    is the program.
    """
    return max(
        (i for i, frame in enumerate(frames) if i and frame.function == "<module>"), default=-1
    )


def _differing(together: Sequence[RankEvidence]) -> list[str]:
    """What each was told, where they were not all told the same."""
    told: dict[str, list[int]] = {}
    several = (
        len({meeting.turn for _, meeting in _met(together)}) > 1
    )  # torch's keys count the calls, failed ones included
    for rank, meeting in _met(together):
        told.setdefault(
            _asked(meeting) + (f", call {meeting.turn + 1} of that rank" if several else ""), []
        ).append(rank.rank)
    return (
        [f"{ranks_phrase(ranks)}: {what}" for what, ranks in told.items()] if len(told) > 1 else []
    )


def _asked(meeting: Meeting | None) -> str:
    """`127.0.0.1:29500, gloo, from train.py:7`."""
    if meeting is None:
        return "not known"
    return ", ".join(
        filter(
            None,
            (
                meeting.address or meeting.method,
                meeting.backend.lower(),
                f"from {meeting.line}" if meeting.line else "",
            ),
        )
    )


def _few(lines: Sequence[str]) -> list[str]:
    return (
        list(lines)
        if len(lines) <= PLACES_MOST
        else [
            *lines[: PLACES_MOST - 1],
            f"and {len(lines) - PLACES_MOST + 1} more lines like these",
        ]
    )
