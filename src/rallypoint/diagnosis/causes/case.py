"""What every account is told of: the job, the ranks at fault, and the words for where they were and
how they ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis import stacks, tracebacks
from rallypoint.diagnosis.causes.wording import ending, listed, since
from rallypoint.diagnosis.evidence import Frame, JobEvidence, NodeEvidence, Raised, RankEvidence
from rallypoint.diagnosis.report import Confidence
from rallypoint.units import size
from rallypoint.world import ranks_phrase

PHASES = {
    "started": "",  # all that is known of a program which is not looked into (--plain, --no-python)
    "preparing": "before the program began",
    "importing": "before init_process_group, in the program",
    "joining": "in init_process_group",
    "running": "while running",
    "finishing": "while the interpreter was closing down",
    "done": "after the program's last line",
}

NODES_NAMED = 3  # of the ranks in one sentence; of more only the number
NOT_KNOWN = "where it was is not known"


class Case(msgspec.Struct, frozen=True):
    """What a report needs: the job, the ranks at fault (first one first), what the others did, how
    sure we are.
    """

    job: JobEvidence
    ranks: tuple[RankEvidence, ...]
    then: str
    confidence: Confidence = "certain"

    @property
    def first(self) -> RankEvidence:
        return self.ranks[0]

    @property
    def node(self) -> NodeEvidence:
        """The node of the first rank at fault."""
        return self.job.node_of(self.first.rank if self.ranks else -1)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted({rank.rank for rank in self.ranks if rank.rank >= 0}))

    @property
    def subject(self) -> str:
        if self.ranks and not self.numbers:
            return self.first.name
        if len(self.ranks) == self.job.world_size > 1:
            return subject(self.numbers, self.job.world_size)
        return placed(self.job, self.numbers)

    @property
    def root(self) -> str:
        """The folder that paths are shown relative to. It may look at all ranks: not for a loop."""
        ranks = self.job.ranks
        errors = [error for rank in ranks for error in (rank.raised, *rank.handled) if error]
        frames = [*(error.frames for error in errors), *(rank.stack for rank in ranks)]
        return self.job.folder or stacks.root_of(self.job.program, chain.from_iterable(frames))


def who(rank: RankEvidence) -> str:
    """Return `rank 2`, or what a log calls a process whose rank it does not tell."""
    return f"rank {rank.rank}" if rank.rank >= 0 else rank.name


def likely(case: Case) -> Case:
    """Return the same case, told as likely."""
    return replace(case, confidence="likely")


def subject(ranks: Sequence[int], world_size: int) -> str:
    """Return `rank 2`, `ranks 0-1 and 3`, `all 4 ranks`."""
    if len(ranks) == world_size > 1:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    return ranks_phrase(ranks)


def node_name(job: JobEvidence, number: int) -> str:
    """Return what a report calls a node: its host, when no other node is there, too."""
    hosts = {node.node: node.host for node in job.nodes} | {one.node: one.host for one in job.lost}
    return name_among(hosts, number)


def name_among(hosts: Mapping[int, str], number: int) -> str:
    """Return what a node is called, given the host of each: its own, if no other is there."""
    host = hosts.get(number, "")
    if host and list(hosts.values()).count(host) == 1:
        return host
    return f"node {number} ({host})" if host else f"node {number}"


def placed(job: JobEvidence, ranks: Sequence[int]) -> str:
    """Return `ranks 0-1 and 3`, of several nodes `ranks 0-1 on gpu01 and rank 3 on gpu02`."""
    if not job.several:
        return ranks_phrase(ranks)
    there: dict[int, list[int]] = {}
    for rank in ranks:
        there.setdefault(job.node_of(rank).node, []).append(rank)
    return on_nodes({node_name(job, node): there[node] for node in sorted(there)})


def on_nodes(there: Mapping[str, Sequence[int]]) -> str:
    """Return `ranks 0-1 on gpu01 and rank 3 on gpu02` from the ranks on each node, by its name."""
    if len(there) > NODES_NAMED:
        ranks = sorted(rank for some in there.values() for rank in some)
        return f"{ranks_phrase(ranks)} on {len(there)} nodes"
    parts = [f"{ranks_phrase(some)} on {name}" for name, some in there.items()]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def again(job: JobEvidence, ranks: int | str) -> str:
    """Return the line that starts the same job with so many ranks on a node, or "gpu": one for
    each.
    """
    if job.function and isinstance(ranks, int):
        return f"rallypoint.launch({job.program}, nproc={ranks})"
    return f"rallypoint run {'... ' if job.several else ''}-n {ranks} {job.program}"


def python_of(job: JobEvidence) -> str:
    """Return the ranks' Python in a line to type: with its whole path, since the shell's `python`
    may be another, or none.
    """
    return job.python or "python"


HOME = ("returned", "ended with exit code 0")


def went_home(job: JobEvidence, rank: RankEvidence) -> str:
    """Return what a rank did that ended well. A function returned only if the rank said so: it may
    have left by os._exit."""
    return HOME[not (job.function and rank.phase in ("finishing", "done"))]


def where(case: Case, rank: RankEvidence, error: Raised) -> str:
    """Return the program's innermost line, and the process; of what a DataLoader's worker raised,
    the line there.
    """
    inner = tracebacks.from_loader(error)
    if inner is not None and not all(stacks.library(frame) for frame in inner.frames):
        whose = f"pid {rank.pid}" if rank.pid else who(rank)
        return f"{stacks.place(inner.frames, case.root)}, in a DataLoader worker of {whose}"
    place = stacks.place(error.frames, case.root or stacks.root_of(case.job.program, error.frames))
    if not place and error.filename:
        line = re.search(r", line (\d+)\)$", error.message)  # SyntaxError's own words for the place
        place = error.filename + (f":{line[1]}" if line else "")
    return located(place or phase_of(rank), rank)


def whereabout(case: Case, rank: RankEvidence) -> str:
    """Return where a rank stands, or stood at its end, and the process. What libraries do while the
    interpreter closes down is no place.
    """
    place = stacks.place(_of_program(rank, stacks.last_stack(rank)), case.root)
    return located(place or phase_of(rank), rank)


def _of_program(rank: RankEvidence, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames of a rank, () when they are but what libraries, ours among them, do once
    the program is over.
    """
    libraries = {stacks.library(frame) for frame in frames}
    over = rank.phase in ("finishing", "done") or libraries == {"rallypoint"}
    return () if over and "" not in libraries else frames


def located(place: str, rank: RankEvidence) -> str:
    """Return a place and the process: "train.py:88 in step, pid 4711"."""
    process = f"rank {rank.rank}" if place and rank.rank >= 0 else ""
    if rank.pid:
        process = f"pid {rank.pid}"
    return ", ".join(filter(None, (place, process)))


def whereabouts(job: JobEvidence, ranks: Sequence[RankEvidence], root: str) -> tuple[str, ...]:
    """Return a line for each place at which ranks stand, or for what is known instead: "ranks 1-2
    train.py:6 in build".
    """
    placed = {rank.rank: frames for rank in ranks if (frames := _of_program(rank, rank.stack))}
    groups = stacks.group(placed)
    lines = [(ranks_phrase(group.ranks), stacks.place(group.frames, root)) for group in groups]
    elsewhere: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.rank not in placed:
            ended = rank.ended is not None and not rank.sent
            at = how_ended(job, rank) if ended else phase_of(rank)
            elsewhere.setdefault(at or NOT_KNOWN, []).append(rank.rank)
    lines += [(ranks_phrase(numbers), at) for at, numbers in elsewhere.items()]
    wide = max((len(who) for who, _ in lines), default=0)
    return listed([f"{who.ljust(wide)}  {at}" for who, at in lines])


def phase_of(rank: RankEvidence) -> str:
    """Return how far a rank had come, in words, and since when, or what has halted it; "" when
    nothing is known of it.
    """
    if rank.halted_by:
        return rank.halted_by
    words = PHASES.get(rank.phase, rank.phase)
    if rank.phase_at and rank.phase in ("joining", "running", "importing"):
        words += f" (since {since(rank.phase_at)})"
    return words


def was(ranks: Sequence[RankEvidence]) -> str:
    """Return "was" or "were"."""
    return "was" if len(ranks) == 1 else "were"


def pids(ranks: Iterable[RankEvidence]) -> str:
    """Return "pid 4711", "pids 4711, 4712"."""
    return process_ids([rank.pid for rank in ranks])


def process_ids(numbers: Sequence[int]) -> str:
    """Return the same of processes that are no ranks."""
    return f"pid{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def resident(ranks: Iterable[RankEvidence]) -> list[str]:
    """Return a line of evidence with what these ranks held in memory when last looked at; [] when
    nobody looked.
    """
    held = [f"rank {rank.rank} {size(rank.resident)}" for rank in ranks if rank.resident]
    more = ", ..." if len(held) > 8 else ""
    return [f"resident at the last look: {', '.join(held[:8])}{more}"] if held else []


def how_ended(job: JobEvidence, rank: RankEvidence) -> str:
    """Return how a process ended, in words."""
    ended = rank.ended
    if ended is None:
        return "has not ended"
    well = ended.code == ended.signal == 0
    return went_home(job, rank) if job.function and well else ending(ended)


def status_of(rank: RankEvidence) -> int:
    """Return the exit status that a rank's end gives the job: its code, or 128 and its signal; 1
    for one that ended well or not at all.
    """
    if rank.ended is None:
        return 1
    return 128 + rank.ended.signal if rank.ended.signal else rank.ended.code or 1
