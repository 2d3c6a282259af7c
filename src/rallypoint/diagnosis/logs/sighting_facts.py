"""Facts of one sighting in a log: its rank, its line, and the kind of its error."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGTERM

import msgspec

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.classify import Meaning
from rallypoint.diagnosis.error_patterns import known_line, refused_starts
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import Sighting, Sign
from rallypoint.diagnosis.pattern import Pattern

# Ranks that a message names as its own.
_NAMED_RANKS = (
    Pattern(r"rank (\d+) and rank (\d+) both on"),
    Pattern(r"\(PID:\d+, Device:\d+, RankID:(\d+)\)"),  # torch_npu
    Pattern(r"did not receive grad for rank (\d+)"),
)

_VICTIM = Pattern(r"\bprocess (\d+) \([^)]{1,40}\)")
"""The process that the kernel has killed, its pid and its name."""

_FINAL = ("ssh-unresolved", "scheme-unknown", "models-differ", "host-unresolved")
"""Causes that no program handles: lines after them are somebody else's."""

_LOADER = Pattern(r"(^|/)torch/utils/data/dataloader\.py$")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def line_of(sighting: Sighting) -> int:
    """Return the line where a sighting begins."""
    return sighting.place.line


def rank_of(sighting: Sighting) -> int:
    """Return the rank that speaks, or that ended; -1 when the log does not tell."""
    return sighting.speaker.rank if sighting.speaker.rank >= 0 else sighting.end.rank


def ranks_of(sighting: Sighting) -> list[int]:
    """List the ranks that a sighting is about, [-1] when the log does not tell."""
    numbers = {rank_of(sighting), *sighting.ranks}
    shared, *own = (pattern.findall(sighting.error.message) for pattern in _NAMED_RANKS)
    # NCCL names the rank that speaks first. Where that is another, it counts in a smaller group.
    unnamed = rank_of(sighting) < 0
    pairs = (pair for pair in shared if unnamed or str(rank_of(sighting)) in pair)
    numbers.update(int(number) for pair in pairs for number in pair)
    if unnamed:
        numbers.update(int(number) for found in own for number in found)
    return sorted(numbers - {-1}) or [-1]


def victim(sighting: Sighting) -> tuple[int, str]:
    """Return the pid of the process that the kernel killed for memory, and what names it; 0 and ""
    when the words name none.
    """
    found = _VICTIM.search(sighting.text)
    return (int(found[1]), found[0]) if found is not None else (0, "")


def is_worker_stopped(error: Raised) -> bool:
    """Tell whether a DataLoader says that its worker ended, by no signal or by SIGTERM."""
    worker = classify.loader_killed(error)
    return worker[1] == SIGTERM if worker else bool(classify.loader_gone(error.message))


def is_dump(sighting: Sighting) -> bool:
    """Tell whether native code crashed there, in words that say nothing of why."""
    return sighting.sign is Sign.CRASHED and not classify.says_why(sighting.error)


def is_own(error: Raised) -> bool:
    """Tell whether an error is the process's own, and speaks of no other rank. A DataLoader's
    worker that breaks off was ended by something.
    """
    through_loader = any(_LOADER.search(frame.file) for frame in error.frames)
    if classify.fits("producer-gone", error) and not through_loader:
        return True
    return classify.meaning(error) is Meaning.OWN and not classify.nccl_gave_up(error)


def is_of_agent(error: Raised) -> bool:
    """Tell whether torchrun's agent waited in vain for the other nodes, after its own ranks had
    ended.
    """
    return any(frame.function == "_exit_barrier" for frame in error.frames)


def as_spoken(remarks: Sequence[Sighting], sightings: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """Return the sightings with those that are remarks as lines that speak of a failure."""

    def spoken(remark: Sighting) -> Sighting:
        words = f"{remark.error.type}: {remark.error.message}".partition("\n")[0]
        return Sighting(Sign.SPOKEN, remark.place, remark.speaker, words, went_on=remark.went_on)

    return tuple(spoken(s) if s in remarks else s for s in sightings)


def is_stronger(sighting: Sighting) -> bool:
    """Tell whether it is a stronger word of a rank's end than an error in a line alone."""
    end, text = sighting.end, sighting.text
    ended = (end.first and end.signal) or end.by == known_line.ARGPARSE
    refused = sighting.sign is Sign.NOT_STARTED and refused_starts.by_launcher(text)
    of_memory = sighting.sign is Sign.KILLED_FOR_MEMORY
    return bool(ended) or refused or of_memory or (is_dump(sighting) and sighting.has_error)


def is_final(sighting: Sighting) -> bool:
    """Tell whether it has a cause that no program handles."""
    return classify.cause_of(sighting.error) in _FINAL


def named_as_torch_does(error: Raised) -> Raised:
    """Give a KeyError of a program that reads a launcher's variable itself the sentence of
    init_process_group.
    """
    variable = error.message.strip("'\"")
    reads = any(
        "environ" in frame.source
        or (frame.file.endswith("/os.py") and frame.function == "__getitem__")
        for frame in error.frames
    )
    if error.type != "KeyError" or variable not in _VARIABLES or not reads:
        return error
    words = f"environment variable {variable} expected, but not set"
    return msgspec.structs.replace(error, message=words)
