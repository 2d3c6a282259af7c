"""Who has come to init_process_group and who has not; and what is certain to keep those who have
come from meeting.

Certain means: it follows from what the ranks have asked for and from where all of them are now.
Ranks that made the same number of calls before are compared, and no others: one that opens its
second group while another is still in the first disagrees with nobody. Groups of some of the ranks,
and meeting points where processes outside this job may come, too, are left to the roll call, which
only says what is there.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import rendezvous, report_form, wording
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.evidence import Frame, JobEvidence, Meeting, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.host.loopback import is_loopback
from rallypoint.world import ranks_phrase

# of ranks that are not there yet, a line each: with its first and its last line a roll call fills
# half a small terminal
PLACES_MOST = 8
LINE_CHARACTERS = 200  # of one line: two rows of a wide terminal
MISFIT_SETTLE = 2.0
"""Seconds that ranks which cannot meet must be seen to wait. A call that torch refuses (a backend
that is not there, a port that is taken) raises in less, most of the time spent on starting CUDA,
and the program may have something else to try."""

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
        """Where it looks for the others: ("loopback", "29500"), ("", "/tmp/meet"); ("", "") when
        that cannot be compared.
        """
        method, address = self.meeting.method, self.meeting.address
        if not address or method == "store" or self.meeting.backend.lower() in _ALONE:
            return "", ""
        if method.startswith("file:"):
            return "", posixpath.normpath(address)
        host, _, port = address.rpartition(":")
        return "loopback" if is_loopback(host) else host.strip("[]").lower(), port


class Misfit(msgspec.Struct, frozen=True):
    """Why these ranks will never meet. Certain."""

    code: Code
    # those that do not fit, or all of them where none is more wrong than another
    ranks: tuple[int, ...]
    because: str
    # what everybody had asked for by then: one that fails at once may ask for something else
    callers: tuple[Caller, ...] = ()


def whole(meeting: Meeting, world_size: int) -> bool:
    """Tell whether a group needs every rank of the job."""
    return meeting.world_size == world_size > 1 and meeting.backend.lower() not in _ALONE


def misfit(
    callers: Sequence[Caller], world_size: int, *, through: Sequence[Caller] = (), all_there: bool
) -> Misfit | None:
    """Return what keeps these ranks, which wait now, from meeting; None when nothing is certain to.

    `through`: those that have left their last call well; NCCL waits for nobody until the first
    collective. `all_there`: no rank of the job that could still come is elsewhere.
    """
    turns: dict[int, list[Caller]] = {}
    for caller in callers:
        if caller.place[1]:
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
            return replace(found, callers=(*before, *together))
    return None


def _apart(together: Sequence[Caller], world_size: int) -> Misfit | None:
    """Find ranks whose groups need the whole job, and which look for it at different places. A host
    has several names: it is the port that tells.
    """
    callers = [caller for caller in together if whole(caller.meeting, world_size)]
    if len({caller.place[1] for caller in callers}) < 2:
        return None
    ranks = tuple(caller.rank for caller in callers)
    return Misfit("address-differs", ranks, "the ranks would meet at different addresses")


def _groups(together: Sequence[Caller]) -> dict[tuple[Hashable, int], list[Caller]]:
    """Return the callers by the group that they come to: its place and size."""
    groups: dict[tuple[Hashable, int], list[Caller]] = {}
    for caller in together:
        groups.setdefault((caller.place, caller.meeting.world_size), []).append(caller)
    return groups


def _duplicate(together: Sequence[Caller]) -> Misfit | None:
    """Find two that ask for one seat of one group."""
    ranks: list[int] = []
    for (_, size), came in _groups(together).items():
        seats = Counter(one.meeting.rank for one in came)
        ranks += [
            one.rank
            for one in came
            if seats[one.meeting.rank] > 1 and one.meeting.rank >= 0 and size > 1
        ]
    because = f"{ranks_phrase(ranks)} have come as a rank that another is, too"
    return Misfit("rank-duplicate", tuple(sorted(ranks)), because) if ranks else None


def _backends(together: Sequence[Caller]) -> Misfit | None:
    """Find two of one group that would talk through different libraries. Texts that name a backend
    per device may overlap: nothing is said of them.
    """
    for (_, size), came in _groups(together).items():
        named = {one.rank: one.meeting.backend.lower() for one in came}
        named = {rank: backend for rank, backend in named.items() if backend.isidentifier()}
        backends = sorted(set(named.values()))
        if size > 1 and len(backends) > 1:
            because = f"the ranks would meet with different backends: {', '.join(backends)}"
            return Misfit("backend-differs", tuple(sorted(named)), because)
    return None


def _sizes(together: Sequence[Caller], world_size: int) -> Misfit | None:
    """Find groups none of which will be complete, where everybody waits and nobody is left to
    come.
    """
    groups = _groups(together)
    for (_, size), came in groups.items():
        if size < 1 or {one.meeting.rank for one in came} >= set(range(size)):
            return None
    sizes = sorted({size for _, size in groups})
    # Where the launcher does not hold the socket, ranks of a job on another machine may be on their
    # way.
    own = all(one.held and one.place[0] == "loopback" for one in together)
    if len(sizes) < 2 and (sizes == [world_size] or not own):
        return None
    ranks = tuple(sorted(one.rank for one in together if one.meeting.world_size != world_size))
    because = f"the ranks wait for groups of {' and '.join(map(str, sizes))}"
    return Misfit("world-size-differs", ranks, because)


# --- reports
# --------------------------------------------------------------------------------------------------


def report(found: Misfit, job: JobEvidence) -> Report:
    """Return what does not fit, with every rank's own line."""
    asked = {caller.rank: caller.meeting for caller in found.callers}
    ranks = tuple(replace(rank, meeting=asked.get(rank.rank)) for rank in job.ranks)
    job = job.with_ranks(ranks)
    others = [rank.rank for rank in ranks if rank.ended is None and rank.rank not in found.ranks]
    were, they_are = ("was", "it is") if len(others) == 1 else ("were", "they are")
    then = f"{ranks_phrase(others)} {were} stopped; {they_are} not at fault" if others else ""
    case = Case(job, tuple(rank for rank in ranks if rank.rank in found.ranks), then)
    if found.code != "address-differs":
        return _REPORTS[found.code](case)
    places: dict[str, tuple[Meeting, list[int]]] = {}
    for rank, meeting in _met(case.ranks):
        places.setdefault(Caller(rank.rank, meeting).place[1], (meeting, []))[1].append(rank.rank)
    told = [(meeting, tuple(numbers)) for meeting, numbers in places.values()]
    return rendezvous.address_differs(case, told)


def _rank_duplicate(case: Case) -> Report:
    taken: dict[tuple[int, int], list[int]] = {}
    for rank, meeting in _met(case.ranks):
        taken.setdefault((meeting.rank, meeting.world_size), []).append(rank.rank)
    (number, size), ranks = next(iter(taken.items()))
    came = [meeting.rank for _, meeting in _met(case.job.ranks) if meeting.world_size == size]
    missing = set(range(size)) - set(came)
    nobody = ""
    if missing and len(came) == size:
        nobody = f"; nobody has come as {ranks_phrase(missing)}"
    return _report(
        case,
        "rank-duplicate",
        f"{ranks_phrase(ranks)} called init_process_group as the same rank, {number} of {size}",
        f"a group has each rank from 0 to {size - 1} once{nobody}",
        [
            (meeting, f"rank={meeting.rank}, world_size={meeting.world_size}", rank)
            for rank, meeting in _met(case.ranks)
        ],
        Help(
            "take the number that the launcher gave to each process",
            'rank = int(os.environ["RANK"])',
        ),
        _LEAVE_OUT,
    )


def _backend_differs(case: Case) -> Report:
    asked = [(meeting, meeting.backend.lower(), rank) for rank, meeting in _met(case.ranks)]
    names = dict.fromkeys(name for _, name, _ in asked)
    return _report(
        case,
        "backend-differs",
        f"the ranks called init_process_group with different backends: {', '.join(names)}",
        "the ranks of a group reach each other only through the same backend",
        asked,
        Help(
            "choose the backend by what is the same for all ranks, not by what one of them finds",
            'dist.init_process_group("gloo")',
        ),
    )


def world_size_differs(case: Case) -> Report:
    """Tell of ranks that wait for a group of another size than the job."""
    job, met = case.job, _met(case.job.ranks)
    sizes = list(dict.fromkeys(str(meeting.world_size) for _, meeting in met))
    who = cases.subject([rank.rank for rank, _ in met], job.world_size)
    headline = f"{who} called init_process_group with world_size={sizes[0]}, and the job has {job.world_size} ranks"
    if len(sizes) > 1:
        headline = (
            f"the ranks called init_process_group with different world sizes: {', '.join(sizes)}"
        )
    return _report(
        case,
        "world-size-differs",
        headline,
        "a group is complete when as many ranks have come as its world_size says; everybody waits, and nobody is left to come",
        [(meeting, f"world_size={meeting.world_size}", rank) for rank, meeting in met],
        Help(
            "take the number of processes that the launcher has started",
            'world_size = int(os.environ["WORLD_SIZE"])',
        ),
        _LEAVE_OUT,
    )


_LEAVE_OUT = Help("or leave rank= and world_size= out: rallypoint sets both")


_REPORTS: dict[Code, Callable[[Case], Report]] = {
    "rank-duplicate": _rank_duplicate,
    "backend-differs": _backend_differs,
    "world-size-differs": world_size_differs,
}


def _report(
    case: Case,
    code: Code,
    headline: str,
    why: str,
    asked: Iterable[tuple[Meeting, str, RankEvidence]],
    *help: Help,
) -> Report:
    """Make a report in which ranks that `asked` for the same at the same line share a line."""
    told: dict[str, list[int]] = {}
    for meeting, what, rank in asked:
        at = f", at {meeting.line}" if meeting.line else ""
        told.setdefault(what + at, []).append(rank.rank)
    lines = [f"{ranks_phrase(ranks)}: {what}" for what, ranks in told.items()]
    where = case.first.meeting.line if case.first.meeting is not None else ""
    return report_form.account(
        case, code, headline, where=where, why=why, evidence=_few(lines), help=help
    )


def _met(ranks: Iterable[RankEvidence]) -> list[tuple[RankEvidence, Meeting]]:
    return [(rank, rank.meeting) for rank in ranks if rank.meeting is not None]


# --- the roll call
# --------------------------------------------------------------------------------------------------


def absent(
    ranks: Sequence[RankEvidence], waiting: Sequence[int], world_size: int
) -> tuple[int, ...]:
    """Return the ranks that somebody in `waiting` waits for: elsewhere, or ended, and not already
    through the same group. (Backends that connect at the first collective do not wait for all.)
    """
    turns = {
        rank.rank: rank.meeting.turn
        for rank in ranks
        if rank.meeting and whole(rank.meeting, world_size)
    }
    awaited = {turns[number] for number in waiting if number in turns}
    left = ("running", "finishing", "done")
    return tuple(
        rank.rank
        for rank in ranks
        if awaited
        and rank.rank not in waiting
        and not (rank.phase in left and turns.get(rank.rank) in awaited)
    )


def lines(
    ranks: Sequence[RankEvidence],
    waiting: Sequence[int],
    states: Mapping[int, str],
    world_size: int,
    now: float,
    root: str = "",
    named: Callable[[Iterable[int]], str] = ranks_phrase,
    *,
    spawned: bool = False,
) -> tuple[str, ...]:
    """Return the roll call: who waits, and where those are who have not come. The first line is a
    sentence; () when nobody waits.

    `waiting`: ranks that are inside init_process_group. `states`: of ranks that did not tell where
    they are, why ("stopped (SIGSTOP)"). `now`: seconds since the job's start. `root`: the folder
    that paths are shown relative to, with a "/" at its end. `named`: how ranks are called. `spawned`: they are
    processes that the program has started with mp.spawn.
    """
    by_rank = {rank.rank: rank for rank in ranks}
    inside = _met(by_rank[number] for number in waiting)
    together = [(rank, at) for rank, at in inside if whole(at, world_size)]
    elsewhere = [(rank, at) for rank, at in inside if not whole(at, world_size)]
    said = _partial(inside, now, world_size, spawned=spawned)
    if together:
        missing = [by_rank[number] for number in absent(ranks, waiting, world_size)]
        places = _places(missing, states, now, root, named)
        places += (f"{named([rank.rank])} in another group: {_asked(at)}" for rank, at in elsewhere)
        count = cases.subject(range(world_size), world_size)
        if len(together) < world_size:
            count = f"{len(together)} of {world_size} ranks"
        head = _waits(count, [rank for rank, _ in together], now)
        said = [head + ("; not there yet:" if places else ", and nobody is missing")]
        said += (f"  {line}" for line in _few(places))
        if differing := _few(_differing(together, named)):
            said += ("  those who wait were told:", *(f"    {line}" for line in differing))
    return tuple(wording.shortened(line, LINE_CHARACTERS) for line in said)


def _waits(who: str, ranks: Sequence[RankEvidence], now: float) -> str:
    longest = now - min(rank.phase_at for rank in ranks)
    have = "has" if len(ranks) == 1 else "have"
    return f"{who} {have} been waiting in init_process_group for {longest:.0f} s"


def _partial(
    inside: Sequence[tuple[RankEvidence, Meeting]], now: float, world_size: int, *, spawned: bool
) -> list[str]:
    """Return a line for each group of some ranks, or of more than this job has: who of them
    came.
    """
    said = []
    ranks = {rank.rank: rank for rank, _ in inside}
    for (_, size), came in _groups([Caller(rank.rank, at) for rank, at in inside]).items():
        missing = set(range(size)) - {one.meeting.rank for one in came}
        nobody = ", and nobody is missing"
        if missing:
            nobody = f"; no rank of this job has joined as {ranks_phrase(missing)}"
        there = [ranks[one.rank] for one in came]
        waits = _waits(ranks_phrase(one.rank for one in came), there, now)
        said.append(f"{waits}, for a group of {size} ({_asked(came[0].meeting)}){nobody}")
        if size > world_size:
            has = f"this job has {world_size} rank{'s' * (world_size != 1)}"
            start = f"start {size} of them (-n {size}), and leave rank= and world_size= out"
            if spawned:
                has = f"the program has spawned {world_size}"
                start = (
                    f"give mp.spawn nprocs={size}, or init_process_group world_size={world_size}"
                )
            said.append(f"  {has}: {start}")
    return _few(said)


def _places(
    missing: Sequence[RankEvidence],
    states: Mapping[int, str],
    now: float,
    root: str,
    named: Callable[[Iterable[int]], str],
) -> list[str]:
    """Return a line for all that are at one place, with the time of the one that has been there
    longest.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    since: dict[tuple[str, str], float] = {}
    for rank in missing:
        at = rank.phase_at
        if rank.ended is not None:
            key, at = ("", wording.ending(rank.ended)), rank.ended.at
        else:
            known = [states.get(rank.rank) or place(rank.stack, root)]
            # The last error on the way into the group, unless the rank has come further since.
            tries = ("init_process_group", "set_device")
            caught = [one for one in rank.handled if one.call in tries and one.at >= at]
            for error in caught[-1:]:
                known.append(f"{error.call} had raised {wording.named(error)}")
                if error.caught_at is not None:
                    clause = f"{stacks.shown(error.caught_at.file, root)}:{error.caught_at.line}"
                    known[-1] += f", which {clause} caught"
                at = error.at if rank.phase == "joining" else at
            doing = "importing" if _imported(rank.stack) >= 0 else "running"
            key = (_DOING.get(rank.phase, doing), "; ".join(filter(None, known)))
        groups.setdefault(key, []).append(rank.rank)
        since[key] = min(at, since.get(key, at))
    found = []
    for key, ranks in groups.items():
        word, known_of = key
        who, seconds = named(ranks), now - since[key]
        told = f"{who} {word} for {seconds:.0f} s" + (f": {known_of}" if known_of else "")
        found.append(told if word else f"{who} {known_of}, {seconds:.0f} s ago")
    return found


_DOING = {
    "started": "starting",
    "preparing": "starting",
    "finishing": "closing down",
    "done": "closing down",
}


def place(frames: tuple[Frame, ...], root: str = "") -> str:
    """Return where a rank stands: `data.py:88 in build_index`; while it imports, from where and how
    far in: `train.py:3 <module> > datasets/__init__.py:22`. "" for ()."""
    index = _imported(frames)
    if index < 0:
        return stacks.place(frames, root)
    own = [frame for frame in frames[:index] if not stacks.library(frame)]
    begins, module = own[-1] if own else frames[0], frames[index]
    inside = stacks.library_path(stacks.shown(module.file, root))
    return f"{stacks.describe(begins, root).replace(' in ', ' ')} > {inside}:{module.line}"


def _imported(frames: tuple[Frame, ...]) -> int:
    """Return the index of the innermost module that is being imported; -1 when none is. The
    outermost one is the program.
    """
    modules = [i for i, frame in enumerate(frames) if i and frame.function == "<module>"]
    return max(modules, default=-1)


def _differing(
    together: Sequence[tuple[RankEvidence, Meeting]], named: Callable[[Iterable[int]], str]
) -> list[str]:
    """Return what each was told, where they were not all told the same."""
    told: dict[str, list[int]] = {}
    # torch's keys count the calls, failed ones included.
    several = len({meeting.turn for _, meeting in together}) > 1
    for rank, meeting in together:
        turn = f", call {meeting.turn + 1} of that rank" if several else ""
        told.setdefault(_asked(meeting) + turn, []).append(rank.rank)
    lines = [f"{named(ranks)}: {what}" for what, ranks in told.items()]
    return lines if len(lines) > 1 else []


def _asked(meeting: Meeting) -> str:
    """Return `127.0.0.1:29500, gloo, from train.py:7`."""
    line = f"from {meeting.line}" if meeting.line else ""
    return ", ".join(
        filter(None, (meeting.address or meeting.method, meeting.backend.lower(), line))
    )


def _few(lines: Sequence[str]) -> list[str]:
    if len(lines) <= PLACES_MOST:
        return list(lines)
    more = f"and {len(lines) - PLACES_MOST + 1} more lines like these"
    return [*lines[: PLACES_MOST - 1], more]
