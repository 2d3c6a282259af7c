"""A log as the same evidence that a live job gives: a `RankEvidence` for each process that shows
something. Pure.

What a log does not tell is left unknown: a process without a rank's number has -1, and a name if
the log has one for it. The line where something stands takes the place of the clock.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from signal import SIGABRT, SIGKILL, SIGTERM
from typing import Any

import msgspec

from rallypoint.diagnosis import classify, confidence, rank_kinds, root_cause, stacks
from rallypoint.diagnosis.causes.wording import CRASHES
from rallypoint.diagnosis.classify import Meaning
from rallypoint.diagnosis.error_patterns import schedulers
from rallypoint.diagnosis.evidence import Ended, JobEvidence, Raised, RankEvidence
from rallypoint.diagnosis.log_events import Findings, Sighting, Sign
from rallypoint.diagnosis.report import Report

SOON = 10
"""Lines after ssh's word within which its caller says that it failed: mpirun's "unable to reliably
start".
"""

# Ranks that a message names as its own.
_NAMED_RANKS = (
    re.compile(r"rank (\d+) and rank (\d+) both on"),
    re.compile(r"\(PID:\d+, Device:\d+, RankID:(\d+)\)"),  # torch_npu
    re.compile(r"did not receive grad for rank (\d+)"),
)
_FINAL = ("ssh-unresolved", "scheme-unknown", "models-differ", "host-unresolved")
"""Causes that no program handles: lines after them are somebody else's."""

_OF_ONE_CAUSE = (
    "kernel-failed", "port-in-use", "device-shared", "cuda-forked", "group-missing", "group-twice",
    "parameters-unused", "device-missing", "calls-differ", "main-unguarded", "gpu-memory",
    "shared-memory", "host-memory",
)  # fmt: skip
"""Causes that make errors one, though their words and places differ."""

_MORE_TIME_PASSED = "the same process wrote many lines after it"


def diagnose(findings: Findings) -> tuple[Report, ...]:
    """The causes that logs tell of, the first one first; `cause-unknown` rather than a guess. Never
    empty.

    Of a log with restarts what ended the last attempt counts. When that says nothing, what ended
    those before does, though the job went on after it.
    """
    one_log = len({sighting.place.log for sighting in findings.sightings}) == 1
    if not (findings.restarts and one_log):
        return root_cause.diagnose(evidence_of(findings))
    last = findings.restarts[-1].line
    after = tuple(s for s in findings.sightings if s.place.line > last)
    if after:
        reports = root_cause.diagnose(
            evidence_of(msgspec.structs.replace(findings, sightings=after))
        )
        if reports[0].code != "cause-unknown":
            return reports
    return confidence.of_attempts(root_cause.diagnose(evidence_of(findings)))


def evidence_of(findings: Findings) -> JobEvidence:
    """The job that the findings tell of."""
    log = _Log(findings)
    ranks = [
        *log.killed_for_memory(),
        *log.raised(),
        *log.ended(),
        *log.not_started(),
        *log.waited(),
        *log.stopped(),
    ]
    ranks.sort(key=lambda rank: rank.order)
    return JobEvidence(log.program, 0, tuple(ranks), log=findings)


class _Log:
    """What was seen, apart by kind, and the processes that show it."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        seen = findings.sightings
        self._ends = _ends(findings)
        stops = [s for s in seen if s.error is not None and classify.is_stop(s.error)]
        self._errors = [s for s in seen if s.error is not None and s not in stops]
        own = [s for s in self._errors if s.sign is not Sign.CRASHED or _says_why(s)]
        self._own = [s for s in own if _meaning(s) is Meaning.OWN and not _is_nccl(s)]
        self._sure = [s for s in self._own if not s.went_on or _is_final(s)]
        self._handled = [s for s in self._own if s not in self._sure]
        self._promoted = bool(not self._sure and self._handled and self._unexplained())
        if (
            self._promoted
        ):  # somebody ended with an error, and this is the last one that the log has
            self._sure, self._handled = self._handled[-1:], []
        self.program = _program(self._sure or self._errors)

    # --- exceptions

    def raised(self) -> Iterable[RankEvidence]:
        """The processes with an exception: their own first, then those that speak of others."""
        groups: dict[Hashable, list[Sighting]] = {}
        for sighting in sorted(self._sure, key=_line):
            groups.setdefault(_same(sighting), []).append(sighting)
        merged = _absorbed(list(groups.values()))
        for group in merged:
            yield from self._of_group(group, merged)
        if self._handled:
            yield from self._of_one(self._handled[-1], went_on=True)
        for sighting in self._errors:
            if sighting not in self._own and (
                sighting.sign is not Sign.CRASHED or _says_why(sighting)
            ):
                yield from self._of_one(sighting, went_on=sighting.went_on)
        for sighting in self._findings.sightings:
            if sighting.sign is Sign.NCCL:
                error = Raised(classify.NCCL_WARNING, sighting.text, (), "\n".join(sighting.lines))
                yield from self._of_one(msgspec.structs.replace(sighting, error=error))

    def _of_group(
        self, group: Sequence[Sighting], groups: Sequence[Sequence[Sighting]]
    ) -> Iterable[RankEvidence]:
        """The ranks that show one error, with the best traceback of it, and the place of
        the first.
        """
        best = next((s for s in group if s.error is not None and s.error.frames), group[0])
        error = best.error
        assert error is not None
        extra = group[0].error
        if best is not group[0] and extra is not None and classify.fits("kernel-failed", error):
            error = msgspec.structs.replace(error, traceback=f"{error.traceback}\n{extra.message}")
        first = msgspec.structs.replace(best, place=group[0].place, error=error)
        numbers = sorted({rank for s in group for rank in _numbers(s)} - {-1})
        numbers = numbers or self._attributed(group, groups)
        yield from self._of_one(first, numbers=numbers, doubt=self._doubt_of(group))

    def _doubt_of(self, group: Sequence[Sighting]) -> str:
        first = group[0]
        if _is_final(first):
            spoken = (s.place for s in self._findings.sightings if s.sign is Sign.SPOKEN)
            at = first.place
            followed = any(p.log == at.log and 0 < p.line - at.line <= SOON for p in spoken)
            by_ssh = first.error is not None and classify.fits("ssh-unresolved", first.error)
            if by_ssh and first.went_on and not followed:
                return "the log goes on for long after it, and does not say that it ended the job"
            return ""
        if self._promoted:
            return f"it is the last error that the log has before a rank ended; {_MORE_TIME_PASSED}"
        if all(s.followed for s in group) and not self._ends and not self._findings.failed:
            return "lines of the same process follow it, and nothing says that it ended: it may have been handled"
        return ""

    def _attributed(
        self, group: Sequence[Sighting], groups: Sequence[Sequence[Sighting]]
    ) -> list[int]:
        """Those of whom the launcher says that they failed, when there is but one nameless error
        for them.
        """
        spoke = {_rank(s) for s in self._sure} - {-1}
        failed = {s.end.rank for s in self._ends if s.end is not None and s.end.code} - spoke - {-1}
        nameless = [one for one in groups if all(_rank(s) < 0 for s in one)]
        return sorted(failed) if len(nameless) == 1 else []

    def _of_one(
        self,
        sighting: Sighting,
        *,
        numbers: Sequence[int] = (),
        doubt: str = "",
        went_on: bool = False,
    ) -> Iterable[RankEvidence]:
        error = sighting.error
        assert error is not None
        if went_on:
            doubt = f"{_MORE_TIME_PASSED}, so it may have been handled"
        for number in numbers or _numbers(sighting):
            yield self._rank(
                sighting,
                number,
                raised=_named_as_torch_does(error),
                doubt=doubt,
                went_on=went_on,
            )

    # --- ends

    def ended(self) -> Iterable[RankEvidence]:
        """The processes of which somebody says how they ended, where no error of theirs explains
        it.
        """
        seen = self._findings.sightings
        lost = [s for s in self._errors if _meaning(s) is not Meaning.OWN]
        lost += [s for s in seen if s.sign in (Sign.WATCHDOG, Sign.LOST)]
        explains = [*self._errors, *lost]
        by_signal = [s for s in self._ends if s.end is not None and s.end.signal]
        by_signal = [s for s in by_signal if not _explained(s, explains)]
        words_alone = [s for s in by_signal if s.went_on]
        by_signal = [s for s in by_signal if not s.went_on]
        kills = [s for s in by_signal if s.end is not None and s.end.signal not in CRASHES]
        if not any(s.sign is Sign.KILLED_FOR_MEMORY for s in seen):
            yield from map(self._of_end, _same_signal(kills))
        crashes = [s for s in by_signal if s.end is not None and s.end.signal in CRASHES]
        hard = [s for s in crashes if s.end is not None and s.end.signal != SIGABRT]
        dumps = list(self._dumps())
        yield from dumps
        if hard or not all(map(rank_kinds.only_aborted, dumps)):
            yield from map(self._of_end, _same_signal(hard or crashes))
        else:
            yield from map(self._of_end, crashes)
        yield from map(self._of_end, _same_signal(words_alone))
        yield from self._exited()

    def killed_for_memory(self) -> Iterable[RankEvidence]:
        """The processes that were killed for memory, by the word of the kernel, Slurm or Ray."""
        words = [s for s in self._findings.sightings if s.sign is Sign.KILLED_FOR_MEMORY]
        killed = [s for s in self._ends if s.end is not None and s.end.signal == SIGKILL]
        if not words:
            return
        numbers = sorted({rank for s in (*words, *killed) for rank in _numbers(s)} - {-1})
        by = {s.end.by for s in words if s.end is not None}
        who = next((name for name in ("Ray", "slurmstepd", "srun") if name in by), "the kernel")
        told = tuple(s.text for s in words if s.text)
        for number in numbers or [-1]:
            yield self._rank(
                words[0], number, ended=Ended(signal=int(SIGKILL)), killed_by=who, said=told
            )

    def _dumps(self) -> Iterable[RankEvidence]:
        """What native code left: faulthandler's dumps, exceptions of C++ that nobody caught."""
        for sighting in self._findings.sightings:
            if sighting.sign is not Sign.CRASHED or (
                sighting.error is not None and _says_why(sighting)
            ):
                continue
            number = next((n for name, n in _DUMPED.items() if name in sighting.text), int(SIGABRT))
            for rank in _numbers(sighting):
                yield self._rank(
                    sighting,
                    rank,
                    ended=Ended(signal=number),
                    uncaught=sighting.error,
                    stack_text="\n".join(sighting.lines),
                    said=sighting.lines,
                )

    def _of_end(self, sighting: Sighting) -> RankEvidence:
        end = sighting.end
        assert end is not None
        ended = Ended(end.code, end.signal, status=end.status)
        told_by = ""
        if end.by:
            where = f" on {end.host}" if end.host else ""
            pid = f", pid {end.pid}" if end.pid else ""
            told_by = f"{end.by} says so{where}{pid}"
        doubt = ""
        if sighting.went_on:
            doubt = "the words stand alone in a line, and the log goes on for long after it"
        return self._rank(
            sighting,
            _rank(sighting),
            ended=ended,
            told_by=told_by,
            went_on=sighting.went_on,
            doubt=doubt,
        )

    def _exited(self) -> Iterable[RankEvidence]:
        """The first that exited with a code that nothing explains."""
        exits = self._unexplained()
        if not exits:
            return
        first = next((s for s in exits if s.end is not None and s.end.first), exits[0])
        doubt = ""
        if len(exits) > 1:
            doubt = "other ranks exited, too, and nothing shows which one began"
        elif first.end is not None and first.end.code == 1:  # Python's own, for whatever was raised
            doubt = "why it did so is not in the log: it may have lost another rank"
        yield msgspec.structs.replace(self._of_end(first), doubt=doubt)

    def _unexplained(self) -> list[Sighting]:
        """Those that ended with a code that is not 0, and of whom the log has no error that could
        be theirs.
        """
        errors = [s for s in self._findings.sightings if s.error is not None and not s.went_on]
        spoke = {_rank(error) for error in errors}
        coded = [s for s in self._ends if s.end is not None and s.end.code and not s.end.signal]
        if -1 in spoke:
            return []
        return [s for s in coded if _rank(s) not in spoke and not (_rank(s) < 0 and spoke)]

    def not_started(self) -> Iterable[RankEvidence]:
        """The program that could not be started."""
        found = [s for s in self._findings.sightings if s.sign is Sign.NOT_STARTED]
        if not found or self._sure:
            return
        self.program, number = schedulers.not_started(found[0].text)
        yield self._rank(found[0], -1, not_executed=number, said=(found[0].text,))

    # --- those that speak of others

    def waited(self) -> Iterable[RankEvidence]:
        """Ranks of which NCCL's watchdog, or a line of torch's, says that others did not come or
        are gone.
        """
        seen = self._findings.sightings
        signs = {Sign.WATCHDOG, Sign.LOST}
        if all(sighting.sign is Sign.UNREACHED for sighting in seen):  # the log has nothing else
            signs, seen = {Sign.UNREACHED}, seen[-1:]
        for sighting in seen:
            if sighting.sign in signs:
                yield self._rank(
                    sighting, _rank(sighting), collective=sighting.collective, said=(sighting.text,)
                )

    def stopped(self) -> Iterable[RankEvidence]:
        """Ranks that the launcher stopped, and that said nothing at all of a peer."""
        ends = [s for s in self._findings.sightings if s.end is not None]
        by_launcher = [s for s in ends if s.end is not None and s.end.signal == SIGTERM]
        spoke = {_rank(s) for s in self._findings.sightings if s.error is not None}
        spoke |= {s.end.rank for s in self._ends if s.end is not None}
        for sighting in by_launcher:
            if (
                sighting.end is not None
                and sighting.end.rank >= 0
                and sighting.end.rank not in spoke
            ):
                spoke.add(sighting.end.rank)
                yield self._rank(
                    sighting,
                    sighting.end.rank,
                    sent=("SIGTERM",),
                    ended=Ended(signal=int(SIGTERM)),
                )

    def _rank(self, sighting: Sighting, number: int, **shown: Any) -> RankEvidence:
        place = sighting.place
        known = RankEvidence(
            number,
            number,
            0,
            "",
            name=self._name(sighting),
            order=place.line,
            log=place.log,
            log_line=place.line if place.log else 0,
        )
        return msgspec.structs.replace(known, **shown)

    def _name(self, sighting: Sighting) -> str:
        if sighting.speaker.known:
            return sighting.speaker.name
        if sighting.end is not None and sighting.end.local_rank >= 0:
            return f"local rank {sighting.end.local_rank}"
        return "a rank" if self._findings.ranks else "the program"


_DUMPED = {
    "Segmentation fault": 11,
    "Bus error": 7,
    "Floating point exception": 8,
    "Illegal instruction": 4,
}
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOADER = re.compile(r"(^|/)torch/utils/data/dataloader\.py$")


def _line(sighting: Sighting) -> int:
    return sighting.place.line


def _rank(sighting: Sighting) -> int:
    if sighting.speaker.rank >= 0:
        return sighting.speaker.rank
    return sighting.end.rank if sighting.end is not None else -1


def _numbers(sighting: Sighting) -> list[int]:
    """The ranks that a sighting is about, [-1] when the log does not tell."""
    numbers = {_rank(sighting), *sighting.ranks}
    if sighting.error is not None:
        shared, *own = (pattern.findall(sighting.error.message) for pattern in _NAMED_RANKS)
        numbers |= {int(number) for pair in shared for number in pair}
        if _rank(sighting) < 0:
            numbers |= {int(number) for found in own for number in found}
    return sorted(numbers - {-1}) or [-1]


def _says_why(sighting: Sighting) -> bool:
    return sighting.error is not None and classify.says_why(sighting.error)


def _meaning(sighting: Sighting) -> Meaning:
    """What an error says of other ranks; a DataLoader's worker that breaks off was ended by
    something.
    """
    error = sighting.error
    assert error is not None
    through_loader = any(_LOADER.search(frame.file) for frame in error.frames)
    if classify.fits("producer-gone", error) and not through_loader:
        return Meaning.OWN
    return classify.meaning(error)


def _is_nccl(sighting: Sighting) -> bool:
    return sighting.error is not None and classify.nccl_gave_up(sighting.error)


def _is_final(sighting: Sighting) -> bool:
    return sighting.error is not None and classify.cause_of(sighting.error) in _FINAL


def _ends(findings: Findings) -> list[Sighting]:
    """How processes failed, once each: torchrun tells it in a line and again in its table.

    Those that the launcher stopped did not fail.
    """
    by_pid: dict[Hashable, Sighting] = {}
    for sighting in findings.sightings:
        end = sighting.end
        if sighting.sign is not Sign.ENDED or end is None or not findings.has_failed(end):
            continue
        key: Hashable = ("pid", end.pid) if end.pid else (sighting.place, end.rank)
        known = by_pid.get(key)
        if known is not None and known.end is not None:
            rank, host = max(known.end.rank, end.rank), known.end.host or end.host
            first = known.end.first or end.first
            merged = msgspec.structs.replace(known.end, rank=rank, host=host, first=first)
            sighting = msgspec.structs.replace(known, end=merged)
        by_pid[key] = sighting
    return list(by_pid.values())


def _explained(ended: Sighting, said: Iterable[Sighting]) -> bool:
    """Tell whether a process that aborted says why: torch aborts after a timeout, and after an
    uncaught error.
    """
    if ended.end is None or ended.end.signal != SIGABRT:
        return False
    rank = ended.end.rank
    return any(_rank(s) == rank or _rank(s) < 0 or rank < 0 for s in said)


def _same_signal(found: Sequence[Sighting]) -> list[Sighting]:
    signals = [s.end.signal for s in found if s.end is not None]
    return [s for s in found if s.end is not None and s.end.signal == signals[0]]


def _same(sighting: Sighting) -> Hashable:
    """What makes the errors of two processes one cause."""
    error = sighting.error
    assert error is not None
    cause = classify.cause_of(error)
    if cause in _OF_ONE_CAUSE:
        return cause
    frame = stacks.own_frame(error.frames)
    place = (frame.file, frame.line) if frame is not None else error.message[:80]
    return (error.type, place)


def _absorbed(groups: list[list[Sighting]]) -> list[list[Sighting]]:
    """The groups without those that only repeat another.

    These are the line that a logger wrote of an exception which has its traceback, too, and the
    news that a DataLoader's worker has ended which is known to have been killed.
    """
    errors = [s.error for group in groups for s in group if s.error is not None]
    messages = {error.message.partition("\n")[0] for error in errors if error.frames}
    workers = (classify.loader_killed(error) for error in errors)
    killed = {worker[0] for worker in workers if worker is not None}

    def repeats(error: Raised) -> bool:
        if killed.intersection(classify.loader_gone(error.message)):
            return classify.loader_killed(error) is None
        return not error.frames and error.message.partition("\n")[0] in messages

    def says_more(group: list[Sighting]) -> bool:
        return any(s.error is not None and not repeats(s.error) for s in group)

    return [group for group in groups if says_more(group)] or groups


def _named_as_torch_does(error: Raised) -> Raised:
    """A program that reads a launcher's variable itself gets a KeyError where init_process_group
    has a sentence.
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


def _program(errors: Sequence[Sighting]) -> str:
    """The program's file, for the command of a help: the outermost frame that is no library's."""
    for sighting in errors[:1]:
        error = sighting.error
        assert error is not None
        frame = next((one for one in error.frames if not stacks.library(one)), None)
        name = (frame.file if frame is not None else error.filename).rpartition("/")[2]
        if name.endswith(".py"):
            return name
    return "train.py"
