"""Who came and who did not: found out from sessions, ranks and what the launcher saw, and put into
words. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rallypoint.store.state.replies import Session
from rallypoint.wire.messages import Identity, Member
from rallypoint.world import ranks_phrase

NAMED = 4
"""So many processes a text describes one by one; more fold into one line ("ranks 3-15")."""


class Sighting(NamedTuple):
    """What the launcher saw of a rank last."""

    host: str
    pid: int  # 0: it has not been started
    phase: (
        str  # in words, with since when: "importing for 41 s", "ended 2.0 s ago with exit code 3"
    )


Roster = Callable[[], Mapping[int, Sighting]]
"""All ranks of the job, asked for when somebody is missing."""


def absent(
    now: float,
    size: int,
    present: Sequence[Identity],
    former: Sequence[Session] | None,
    sessions: Collection[Session],
    ended: Mapping[int, Session],
    roster: Mapping[int, Sighting] | None,
) -> tuple[Member, ...]:
    """Who of `size` is not present, as far as that can be told: never a guess.

    `former`: who was at the last complete round of the same size. Without one it is told by the
    ranks, when each of those present is another rank below `size`, and no rank is known that is
    not. `ended`: the last session of each rank that is over. `roster`: all ranks of the job, when
    the launcher is asked.
    """
    if len(present) >= size:
        return ()
    missing: list[Session] = []
    if former is not None:
        here = Counter(present)
        missing = [one for one in former if not _taken(here, one.identity)]
        if len(missing) > size - len(present):
            missing = []  # some have been replaced: by whom is not known
    if len(missing) < size - len(present):
        by_rank = _by_rank(now, size, present, sessions, ended, roster)
        if by_rank:
            return by_rank
    return tuple(
        _known(
            now, one, None if one.identity.rank is None else (roster or {}).get(one.identity.rank)
        )
        for one in missing
    )


def _by_rank(
    now: float, size: int, present: Sequence[Identity], sessions: Collection[Session], ended: Mapping[int, Session],
    roster: Mapping[int, Sighting] | None,
) -> tuple[Member, ...]:  # fmt: skip
    ranks = {
        identity.rank
        for identity in present
        if identity.rank is not None and 0 <= identity.rank < size
    }
    if len(ranks) != len(present):
        return ()
    living: dict[int, Session] = {}
    for session in sessions:
        rank = session.identity.rank
        if rank is None:
            continue
        if rank >= size:
            return ()  # ranks beyond this barrier: it is for some of them, and which is not known
        if rank not in ranks and (rank not in living or living[rank].heard < session.heard):
            living[rank] = session
    if roster is not None and any(rank >= size for rank in roster):
        return ()
    return tuple(
        _of_rank(now, rank, living.get(rank) or ended.get(rank), roster) for rank in range(size) if rank not in ranks
    )  # fmt: skip


def _taken(here: Counter[Identity], identity: Identity) -> bool:
    """Whether he is among these, who are fewer by him then: the threads of one process take a seat
    each.
    """
    if here[identity] <= 0:
        return False
    here[identity] -= 1
    return True


def _of_rank(
    now: float, rank: int, session: Session | None, roster: Mapping[int, Sighting] | None
) -> Member:
    if roster is not None and rank not in roster:
        return Member(None, rank, "this job has no such rank")
    seen = roster[rank] if roster is not None else None
    if session is not None:
        return _known(now, session, seen)
    if seen is None:
        return Member(None, rank)
    return Member(Identity(seen.host, seen.pid, rank) if seen.pid else None, rank, seen.phase)


def _known(now: float, session: Session, seen: Sighting | None) -> Member:
    identity = session.identity
    phase = seen.phase if seen is not None else ""
    if not session.ended:
        return Member(identity, identity.rank, phase, max(0.0, now - session.heard))
    return Member(
        identity,
        identity.rank,
        phase,
        None,
        f"{now - session.ended_at:.1f} s ago: {session.because}",
    )


# --- in words ---


def who(them: Iterable[Identity]) -> str:
    """The subject of a sentence: "rank 3 (pid 812 on node07)", "ranks 0-13 and 15", "pid 4 on a, 2
    in pid 5 on a and 7 more".
    """
    seats = Counter(them)
    if len(seats) == 1:
        [(identity, times)] = seats.items()
        return str(identity) if times == 1 else f"{times} in {identity}"
    ranks = {identity.rank for identity in seats if identity.rank is not None}
    if len(ranks) == seats.total():
        return ranks_phrase(ranks)
    return _folded(
        [
            str(identity) if times == 1 else f"{times} in {identity}"
            for identity, times in seats.items()
        ]
    )


def attendance(
    size: int, arrived: int, present: Sequence[Identity], absent: Sequence[Member]
) -> str:
    """ "3 arrived (ranks 0-2), missing: rank 3 (pid 812 on node07, running for 38 s, last heard of
    0.4 s ago)".

    `arrived` may be more than `present` names.
    """
    more = f" and {arrived - len(present)} more" if arrived > len(present) else ""
    came = f"{arrived} arrived ({who(present)}{more})" if present else f"{arrived} arrived"
    left = size - arrived
    if left <= 0:
        return came
    if not absent:
        return f"{came}, {left} {'is' if left == 1 else 'are'} missing"
    more = f" and {left - len(absent)} more" if left > len(absent) else ""
    return f"{came}, missing: {_missing(absent)}{more}"


def _missing(absent: Sequence[Member]) -> str:
    """Who is missing: those of whom the same is known together, a few others one by one, and the
    rest folded.
    """
    alike: dict[str, list[int]] = {}
    told: list[str] = []
    for member in absent:
        if member.identity is None and member.rank is not None:
            alike.setdefault(member.phase or "not connected to the store", []).append(member.rank)
        else:
            told.append(str(member))
    groups = [f"{ranks_phrase(ranks)} ({known})" for known, ranks in alike.items()]
    if len(told) <= NAMED:
        return ", ".join(told + groups)
    rest = [member for member in absent if member.identity is not None][NAMED - 1 :]
    ranks = [member.rank for member in rest if member.rank is not None]
    folded = ranks_phrase(ranks) if len(ranks) == len(rest) else f"{len(rest)} more"
    return ", ".join([*told[: NAMED - 1], folded, *groups])


def _folded(words: list[str]) -> str:
    if len(words) <= NAMED:
        return f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{', '.join(words[: NAMED - 1])} and {len(words) - NAMED + 1} more"
