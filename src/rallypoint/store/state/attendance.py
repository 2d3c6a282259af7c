"""Presence at a barrier: found out from sessions, ranks and the launcher's sightings, and put into
words. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rallypoint.store.state.quotas import quoted
from rallypoint.store.state.replies import Session
from rallypoint.wire.messages import Identity, Lock, Member
from rallypoint.world import ranks_phrase

NAMED = 4
"""Processes that a text describes one by one; more fold into one line ("ranks 3-15")."""


class Sighting(NamedTuple):
    """The launcher's last knowledge of a rank."""

    host: str
    pid: int  # 0: it has not been started
    # in words, with since when: "importing for 41 s", "ended 2.0 s ago with exit code 3"
    phase: str


Roster = Callable[[], Mapping[int, Sighting]]
"""A function that returns all ranks of the job, called when somebody is missing."""


def absent_members(
    now: float,
    size: int,
    present: Sequence[Identity],
    former: Sequence[Session] | None,
    sessions: Collection[Session],
    ended: Mapping[int, Session],
    roster: Mapping[int, Sighting] | None,
) -> tuple[Member, ...]:
    """Return the members of a barrier of `size` that are not present, as far as that is certain.

    `former`: the sessions at the last complete round of the same size. Without one the ranks tell,
    when each of those present is another rank below `size`, and no other rank is known. `ended`:
    the last session of each rank that is over. `roster`: all ranks of the job, from the launcher.
    """
    if len(present) >= size:
        return ()
    here = Counter(present)
    missing: list[Session] = []
    for session in former or ():
        if here[session.identity] > 0:  # the threads of one process take a seat each
            here[session.identity] -= 1
        else:
            missing.append(session)
    surplus = len(missing) - (size - len(present))
    if surplus:
        by_rank = _absent_ranks(now, size, present, sessions, ended, roster)
        if by_rank or surplus > 0:  # some were replaced: by whom is not known
            return by_rank
    return tuple(_member(now, one, one.identity.rank, roster) for one in missing)


def _absent_ranks(
    now: float, size: int, present: Sequence[Identity], sessions: Collection[Session], ended: Mapping[int, Session],
    roster: Mapping[int, Sighting] | None,
) -> tuple[Member, ...]:  # fmt: skip
    ranks = {one.rank for one in present if one.rank is not None and 0 <= one.rank < size}
    if len(ranks) != len(present):
        return ()
    latest: dict[int, Session] = {}
    for session in sorted(sessions, key=lambda one: one.heard):
        if session.identity.rank is not None:
            latest[session.identity.rank] = session
    if any(rank >= size for rank in (*latest, *(roster or ()))):
        return ()  # the barrier is for some of the ranks: which is not known
    return tuple(
        _member(now, latest.get(rank) or ended.get(rank), rank, roster)
        for rank in range(size)
        if rank not in ranks
    )


def _member(
    now: float, session: Session | None, rank: int | None, roster: Mapping[int, Sighting] | None
) -> Member:
    """Return all that is known of one that is missing."""
    seen = roster.get(rank) if roster is not None and rank is not None else None
    phase = seen.phase if seen is not None else ""
    if session is None:
        if seen is None:
            return Member(None, rank, "" if roster is None else "this job has no such rank")
        return Member(Identity(seen.host, seen.pid, rank) if seen.pid else None, rank, phase)
    identity = session.identity
    if not session.ended:
        locks = [one.request.name for one in session.waiting.values() if type(one.request) is Lock]
        if locks:  # if a process that has arrived holds it, neither can go on
            phase = ", ".join(filter(None, (phase, f"waits for the lock {quoted(locks[0])}")))
        return Member(identity, identity.rank, phase, max(0.0, now - session.heard))
    ended = f"{now - session.ended_at:.1f} s ago: {session.because}"
    return Member(identity, identity.rank, phase, None, ended)


# --- in words ---


def who(identities: Iterable[Identity]) -> str:
    """Return the subject of a sentence: "rank 3 (pid 812 on node07)", "ranks 0-13 and 15", "pid 4 on
    a, 2 in pid 5 on a and 7 more"."""
    seats = Counter(identities)
    ranks = {identity.rank for identity in seats if identity.rank is not None}
    if 1 < len(ranks) == seats.total():
        return ranks_phrase(ranks)
    names = [f"{one}" if times == 1 else f"{times} in {one}" for one, times in seats.items()]
    if len(names) > NAMED:
        names[NAMED - 1 :] = [f"{len(names) - NAMED + 1} more"]
    return " and ".join([part for part in (", ".join(names[:-1]), names[-1]) if part])


def attendance(
    size: int, arrived: int, present: Sequence[Identity], absent: Sequence[Member]
) -> str:
    """Return "3 arrived (ranks 0-2), missing: rank 3 (pid 812 on node07, running for 38 s, last
    heard of 0.4 s ago)"."""
    came = f"{arrived} arrived ({who(present)})" if present else f"{arrived} arrived"
    left = size - arrived
    if left <= 0:
        return came
    if not absent:
        return f"{came}, {left} {'is' if left == 1 else 'are'} missing"
    more = f" and {left - len(absent)} more" if left > len(absent) else ""
    return f"{came}, missing: {_missing(absent)}{more}"


def _missing(absent: Sequence[Member]) -> str:
    """Describe a few members one by one, and fold the others."""
    alike: dict[str, list[int]] = {}
    known: list[Member] = []
    for member in absent:
        if member.identity is None and member.rank is not None:
            alike.setdefault(member.phase or "not connected to the store", []).append(member.rank)
        else:
            known.append(member)
    groups = [f"{ranks_phrase(ranks)} ({phase})" for phase, ranks in alike.items()]
    told = [str(member) for member in known]
    if len(told) > NAMED:
        ranks = [member.rank for member in known[NAMED - 1 :] if member.rank is not None]
        rest = len(told) - NAMED + 1
        told[NAMED - 1 :] = [ranks_phrase(ranks) if len(ranks) == rest else f"{rest} more"]
    return ", ".join(told + groups)
