"""A log as the same evidence that a live job gives: a `RankEvidence` for each process that shows
something. Pure.

What a log does not tell is left unknown: a process without a rank's number has -1, and a name if
the log has one for it. The line where something stands takes the place of the clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import inf
from signal import SIGABRT, SIGKILL, SIGTERM
from typing import Any

import msgspec

from rallypoint.diagnosis import classify, confidence, rank_kinds, root_cause, stacks
from rallypoint.diagnosis.causes.wording import CRASHES
from rallypoint.diagnosis.classify import Meaning
from rallypoint.diagnosis.error_patterns import python, refused_starts, schedulers
from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    JobEvidence,
    MemoryEvidence,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.log_events import Findings, Place, Sighting, Sign, Speaker
from rallypoint.diagnosis.report import Report
from rallypoint.world import ranks_phrase

SOON = 10
"""Lines after ssh's word within which its caller says that it failed: mpirun's "unable to reliably
start".
"""

AFTER_STOP = 5
"""Lines of others that may stand between a stop and what it ends, beside the launcher's line for
each process. A later run in the same log writes more.
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
    "shared-memory", "host-memory", "disk-full",
)  # fmt: skip
"""Causes that make errors one, though their words and places differ."""

_KILLERS = (
    "Ray", "slurmstepd", "srun", "the kubelet", "LSF", "PBS", schedulers.SERVICE,
)  # fmt: skip
"""Those that end processes for lack of memory, beside the kernel."""
_OF_STARTED = {
    Sign.KILLED_FOR_MEMORY, Sign.INTERRUPTED, Sign.CRASHED, Sign.WATCHDOG, Sign.NCCL, Sign.STALLED,
}  # fmt: skip
"""What only a job has that was started."""
_OF_PROCESSES = {
    Sign.CRASHED, Sign.KILLED_FOR_MEMORY, Sign.WATCHDOG, Sign.NCCL, Sign.LOST, Sign.STALLED, Sign.SAME_RANK,
}  # fmt: skip
"""What tells of a process of the job, and not of its command."""
_LOCAL_RANK = re.compile(r"--local[_-]rank")
_VICTIM = re.compile(r"\bprocess (\d+) \([^)]{1,40}\)")
"""The process that the kernel has killed, its pid and its name."""
_MORE_TIME_PASSED = "the same process wrote many lines after it"
_THREAD_LEFT = "the process exited while a C++ thread still ran; no line with its prefix says why"
_GOES_ON = "the words stand alone in a line, and the log goes on for long after it"


def diagnose(findings: Findings) -> tuple[Report, ...]:
    """Tell the causes that logs have, the first one first; `cause-unknown` rather than a guess.
    Never empty.

    Of a log with restarts what ended the last attempt counts. When that says nothing, what ended
    those before does, though the job went on after it.
    """
    one_log = len({sighting.place.log for sighting in findings.sightings}) == 1
    if not (findings.restarts and one_log):
        return root_cause.diagnose(evidence_of(findings))
    last = findings.restarts[-1].line
    after = tuple(s for s in findings.sightings if s.place.line > last)
    of_last: tuple[Report, ...] = ()
    if after:
        of_last = root_cause.diagnose(
            evidence_of(msgspec.structs.replace(findings, sightings=after))
        )
        if of_last[0].code != "cause-unknown":
            return of_last
    of_all = root_cause.diagnose(evidence_of(findings))
    return (
        of_last if of_last and of_all[0].code == "cause-unknown" else confidence.of_attempts(of_all)
    )


def evidence_of(findings: Findings) -> JobEvidence:
    """Make the evidence of the job that the findings tell of."""
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
    memory = MemoryEvidence(killed_pids=tuple(sorted(log.workers_killed)))
    node = NodeEvidence(tuple(ranks), memory=memory)
    return JobEvidence(log.program, 0, (node,), log=log.findings)


class _Log:
    """The sightings of a log, apart by kind, and the processes that show them."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._seen = findings.sightings
        self._after_stop: set[Place] = set()
        """The lines that stand soon after a stop of the job."""
        by_stop = self._ended_by_stop()
        self._ends = _without_the_command(_ends(findings, by_stop), findings)
        if self._ends:
            self._seen = tuple(s for s in self._seen if not _is_of_agent(s.error))
        self._errors = [
            s
            for s in self._seen
            if s.has_error and not classify.is_stop(s.error) and s not in by_stop
        ]
        self._own = [s for s in self._errors if not _is_dump(s) and _is_own(s.error)]
        self._sure = [s for s in self._own if not s.went_on or _is_final(s)]
        remarks = self._remarks()
        self._seen = tuple(_as_spoken(s) if s in remarks else s for s in self._seen)
        self.findings = msgspec.structs.replace(
            findings,
            sightings=tuple(_as_spoken(s) if s in remarks else s for s in findings.sightings),
        )
        self._errors = [s for s in self._errors if s not in remarks]
        self._sure = [s for s in self._sure if s not in remarks]
        self._handled = [s for s in self._own if s not in (*self._sure, *remarks)]
        # ranks that an error of their own ended, of whatever cause
        self._spoke = {_rank(s) for s in self._errors if not s.went_on}
        others = (Sign.NOT_STARTED, Sign.KILLED_FOR_MEMORY)
        told = any(s.sign in others and not s.went_on for s in self._seen)
        by_python = any(s.end.code == 1 for s in self._unexplained())  # its code for exceptions
        handled = [s for s in self._handled if by_python or s.did_without != 1]
        self._promoted = bool(not (self._sure or told) and handled and self._unexplained())
        if self._promoted:
            # A process ended with an error, and this is the last one that the log has.
            self._sure, self._handled = handled[-1:], []
        self.program = _program(self._sure or self._errors)
        workers = filter(None, (classify.loader_killed(s.error) for s in self._errors))
        victims = {_victim(s)[0] for s in self._seen if s.sign is Sign.KILLED_FOR_MEMORY}
        self.workers_killed = victims.intersection(pid for pid, _ in workers)
        """DataLoader's workers that the kernel names among those that it killed for memory."""

    def _ended_by_stop(self) -> list[Sighting]:
        """List ends by SIGKILL soon after the job was stopped, which whoever stops a job sends to
        what has not ended yet. Where no failure stands before the stop, only those in the next
        lines: others may be of a later step. Also a DataLoader's words that its worker ended, by no
        signal or by SIGTERM: that goes to all processes of a job. What follows one of these soon is
        of the same stop.
        """
        stops = {s.place.log for s in self._seen if s.sign is Sign.INTERRUPTED}
        found: list[Sighting] = []
        until: dict[str, int] = {}
        failed = stopped = False
        next_line = 0
        for s in sorted(self._seen, key=_line):
            at = s.place
            soon = at.line <= until.get(at.log, -1)
            of_its_own = s.has_error and not classify.is_stop(s.error) and not s.went_on
            ended = s.sign is not Sign.INTERRUPTED and self._findings.has_failed(s)
            failed = failed or (not soon and (ended or of_its_own))
            if soon or s.sign is Sign.INTERRUPTED:
                last = max(at.line, at.last) + AFTER_STOP + len(self._findings.stopped)
                until[at.log] = max(last, until.get(at.log, 0))
                self._after_stop.add(at)
                stopped = stopped or (
                    s.sign is Sign.INTERRUPTED and not schedulers.is_for_a_task(s.text)
                )
            of_stop = failed or (stopped and at.line <= next_line)
            next_line = max(at.line, at.last) + 1
            killed = soon and of_stop and s.sign is Sign.ENDED and s.end.signal == SIGKILL
            if killed or ((soon or stops - {at.log}) and _is_worker_stopped(s.error)):
                found.append(s)
        return found

    # --- exceptions

    def raised(self) -> Iterable[RankEvidence]:
        """Make evidence of exceptions: the processes' own first, then those that speak of others."""
        groups: dict[Hashable, list[Sighting]] = {}
        for sighting in sorted(self._sure, key=_line):
            groups.setdefault(_same(sighting.error), []).append(sighting)
        merged = _absorbed(list(groups.values()))
        for group in merged:
            yield from self._of_group(group, merged)
        handled = [s for s in self._handled if s.did_without != 1] or self._handled
        for sighting in handled[-1:]:
            yield from self._of_one(sighting, went_on=True)
        for sighting in self._errors:
            if sighting not in self._own and not _is_dump(sighting):
                yield from self._of_one(sighting, went_on=sighting.went_on)
        well = all(s.went_on or s.sign is Sign.NCCL for s in self._seen)
        for sighting in self._seen:
            # NCCL fell back to sockets and nothing failed: its warning is no cause then.
            fell_back = well and sighting.went_on and not self._findings.failed
            if sighting.sign is Sign.NCCL and not fell_back:
                error = Raised(classify.NCCL_WARNING, sighting.text, (), "\n".join(sighting.lines))
                yield from self._of_one(msgspec.structs.replace(sighting, error=error))

    def _remarks(self) -> list[Sighting]:
        """List errors that are a line alone, of no known process and with no text that names a
        cause, where the log has a stronger word of what ended a rank after that.
        """
        # A rank that exited with 1 may have written the line.
        stronger = [s for s in self._seen if _is_stronger(s) and not s.went_on]
        stronger = [] if any(s.end.code == 1 for s in self._ends) else stronger
        alone = [
            s
            for s in self._sure
            if not (s.error.frames or s.speaker.known or s.ranks or classify.cause_of(s.error))
            and not self._introduces(s)
        ]
        stronger += [s for s in self._sure if s not in alone]
        return [s for s in alone if any(s.stands_before(one, inf) for one in stronger)]

    def _introduces(self, alone: Sighting) -> bool:
        """Tell whether a traceback of the error that a line names begins right below the line."""
        place, words = alone.place, f"{alone.error.type}: {alone.error.message}"
        last = max(place.line, place.last) + confidence.INTRODUCES + 1
        below = [s for s in self._seen if s.error.frames and s.place.log == place.log]
        below = [s for s in below if place.line < s.place.line <= last]
        return any(s.error.type in words for s in below)

    def _of_group(
        self, group: Sequence[Sighting], groups: Sequence[Sequence[Sighting]]
    ) -> Iterable[RankEvidence]:
        """Make evidence of the ranks that show one error, with the best traceback of it, and the
        place of the first.
        """
        first = group[0]
        best = next((s for s in group if s.error.frames), first)
        error = best.error
        if best is not first and classify.fits("kernel-failed", error):
            traceback = f"{error.traceback}\n{first.error.message}"
            error = msgspec.structs.replace(error, traceback=traceback)
        numbers = sorted({rank for s in group for rank in _numbers(s)} - {-1})
        doubt = self._doubt_of(group)
        if not numbers:
            numbers, why = self._attributed(groups)
            doubt = doubt or why
        yield from self._of_one(
            msgspec.structs.replace(best, place=first.place, error=error),
            numbers=numbers,
            doubt=doubt,
        )

    def _doubt_of(self, group: Sequence[Sighting]) -> str:
        first = group[0]
        if _is_final(first):
            at = first.place
            spoken = (
                s.place for s in self._seen if s.sign is Sign.SPOKEN and s.place.log == at.log
            )
            followed = any(0 < place.line - at.line <= SOON for place in spoken)
            by_ssh = classify.fits("ssh-unresolved", first.error)
            if by_ssh and first.went_on and not followed:
                return "the log goes on for long after it, and does not say that it ended the job"
        elif self._promoted:
            return f"it is the last error that the log has before a rank ended; {_MORE_TIME_PASSED}"
        elif all(s.followed for s in group) and not self._ends and not self._findings.failed:
            return "lines of the same process follow it, and nothing says that it ended: it may have been handled"
        return ""

    def _attributed(self, groups: Sequence[Sequence[Sighting]]) -> tuple[list[int], str]:
        """Return the ranks that failed by the launcher's word and show no error that ended them,
        when there is one nameless error for them, or one exception group. Where others have no
        name either, the one that the launcher says was the first: it may be another's, as ranks may
        end in any order. Also return what speaks against it.
        """
        # members of one exception group have its place
        if len({one[0].place for one in groups if all(_rank(s) < 0 for s in one)}) != 1:
            return [], self._unprefixed()
        ends = [s for s in self._ends if s.end.code and s.end.rank not in self._spoke]
        # Of a list of tasks the others may have lost the one that raised it.
        lists = Counter(s.place for s in ends if s.end.by == "srun")
        failed = [s.end for s in ends if lists[s.place] < 2]
        doubt = ""
        if len(failed) > 1 and any(_rank(s) < 0 and s not in self._own for s in self._errors):
            failed = [end for end in failed if end.first] or failed
            doubt = "its traceback has no prefix of a rank, and more than one rank failed"
        numbers = sorted({end.rank for end in failed} - {-1})
        return numbers, doubt if numbers else self._unprefixed()

    def _unprefixed(self) -> str:
        """Return what speaks against a rank's exit by an error without a name: torch names the rank
        in what ends it, and not in what ends a thread or a child process.
        """
        named, others = self._spoke - {-1}, set(self._findings.ranks) - self._spoke
        if not named:
            return ""
        rest = f", and {ranks_phrase(others)} {'has' if len(others) == 1 else 'have'} none"
        told = (
            f"its traceback has no prefix of a rank: {ranks_phrase(named)} failed by another error"
        )
        return told + (rest if others else "")

    def _of_one(
        self,
        sighting: Sighting,
        *,
        numbers: Sequence[int] = (),
        doubt: str = "",
        went_on: bool = False,
    ) -> Iterable[RankEvidence]:
        if went_on:
            doubt = f"{_MORE_TIME_PASSED}, so it may have been handled"
        error = _named_as_torch_does(sighting.error)
        for number in numbers or _numbers(sighting):
            yield self._rank(sighting, number, raised=error, doubt=doubt, went_on=went_on)

    # --- ends

    def ended(self) -> Iterable[RankEvidence]:
        """Make evidence of the processes of which another says how they ended, where no error of
        theirs explains it.
        """
        lost = [s for s in self._seen if s.sign in (Sign.WATCHDOG, Sign.LOST)]
        by_signal = [s for s in self._ends if s.end.signal]
        by_signal = [s for s in by_signal if not _is_explained(s, (*self._errors, *lost))]
        sure = [s for s in by_signal if not s.went_on]
        if not any(s.sign is Sign.KILLED_FOR_MEMORY for s in self._seen):
            yield from self._of_ends([s for s in sure if s.end.signal not in CRASHES])
        dumps = list(self._dumps())
        yield from dumps
        crashes = [s for s in sure if s.end.signal in CRASHES]
        hard = [s for s in crashes if s.end.signal != SIGABRT]
        if hard or not all(map(rank_kinds.only_aborted, dumps)):
            crashes = hard or crashes
        yield from self._of_ends(crashes)
        yield from self._of_ends([s for s in by_signal if s.went_on])
        yield from self._exited()

    def _of_ends(self, ends: Sequence[Sighting]) -> Iterable[RankEvidence]:
        """Make evidence of those that ended by the same signal as the first, once each."""
        told: set[int] = set()
        for s in ends:
            if s.end.signal == ends[0].end.signal and _rank(s) not in told:
                told.add(_rank(s))
                yield self._of_end(s)

    def killed_for_memory(self) -> Iterable[RankEvidence]:
        """Make evidence of processes that were killed for memory, by the word of the kernel, Slurm
        or Ray.
        """
        words = [s for s in self._seen if s.sign is Sign.KILLED_FOR_MEMORY]
        words = [s for s in words if _victim(s)[0] not in self.workers_killed]
        known = {s.end.pid for s in self._ends} - {0}
        words.sort(key=lambda s: _victim(s)[0] not in known)  # that names a rank stands first
        if not words:
            return
        killed = [s for s in self._ends if s.end.signal == SIGKILL]
        numbers = sorted({rank for s in (*words, *killed) for rank in _numbers(s)} - {-1})
        by = {s.end.by for s in words}
        name = next((one for one in _KILLERS if one in by), "the kernel")
        told = tuple(s.text for s in words if s.text)
        ended, first = Ended(signal=int(SIGKILL)), words[0]
        doubt = _GOES_ON if first.went_on else ""
        victims = dict(filter(all, map(_victim, words)))
        if not first.speaker.known and (killed or victims):
            of = self._name(killed[0]) if killed else next(iter(victims.values()))
            first = msgspec.structs.replace(first, speaker=Speaker(name=of))
        if victims and known and not known & victims.keys():
            pids = " and ".join(map(str, sorted(known)))
            doubt = (
                doubt
                or f"it names {' and '.join(victims.values())}, and what the launcher saw end had pid {pids}"
            )
        for number in numbers or [-1]:
            yield self._rank(first, number, ended=ended, killed_by=name, said=told, doubt=doubt)

    def _dumps(self) -> Iterable[RankEvidence]:
        """Make evidence of what native code left: faulthandler's dumps, uncaught exceptions of
        C++.
        """
        lost = {_rank(s) for s in self._seen if s.sign in (Sign.WATCHDOG, Sign.LOST)}
        named = (self._spoke | lost) - {-1}
        aborted = [s.end for s in self._ends if s.end.signal == SIGABRT and s.end.rank not in named]
        nameless = [s for s in self._seen if _is_dump(s) and s.has_error and _rank(s) < 0]
        for sighting in filter(_is_dump, self._seen):
            without = schedulers.NO_EXCEPTION in sighting.text
            if without and (self._sure or ((self._errors or lost) and not aborted)):
                continue  # it is how the process of one of these left
            told = (n for name, n in python.SIGNALS.items() if name in sighting.text)
            number = next(filter(CRASHES.__contains__, told), int(SIGABRT))
            if [sighting] == nameless and len(aborted) == 1:
                sighting = msgspec.structs.replace(sighting, end=aborted[0])
            for rank in _numbers(sighting):
                yield self._rank(
                    sighting,
                    rank,
                    ended=Ended(signal=number),
                    uncaught=sighting.error if sighting.has_error else None,
                    stack_text="\n".join(sighting.lines),
                    said=sighting.lines,
                    doubt=_THREAD_LEFT if without else "",
                )

    def _of_end(self, sighting: Sighting, doubt: str = "") -> RankEvidence:
        end = sighting.end
        told_by = ""
        if end.by:
            where = f" on {end.host}" if end.host else ""
            pid = f", pid {end.pid}" if end.pid else ""
            told_by = f"{end.by} says so{where}{pid}"
        if sighting.went_on:
            doubt = _GOES_ON
        elif end.signal in (*CRASHES, SIGKILL) and sighting.place in self._after_stop:
            doubt = "the job was being stopped when it ended"
        elif end.by == "the shell" and (before := self._of_processes_before(sighting)):
            doubt = f"line {before[0].place.line}, before it, tells of a rank in trouble"
        return self._rank(
            sighting,
            _rank(sighting),
            ended=Ended(end.code, end.signal, status=end.status),
            left_saying=self._of_argparse() if end.code == 2 else "",
            told_by=told_by,
            went_on=sighting.went_on and end.signal > 0,
            doubt=doubt,
        )

    def _of_processes_before(self, ended: Sighting) -> list[Sighting]:
        told = [s for s in self._seen if s.sign in _OF_PROCESSES or s in self._errors]
        return [s for s in told if s.stands_before(ended)]

    def _of_argparse(self) -> str:
        """Return what argparse said in the log, "" for nothing."""
        said = (one.text for one in self._seen if one.end.by == schedulers.ARGPARSE)
        return next(said, "").partition(": error: ")[2]

    def _exited(self) -> Iterable[RankEvidence]:
        """Make evidence of the first that exited with a code that nothing explains."""
        exits = self._unexplained()
        # argparse and a launcher tell of the same end: the launcher's line counts.
        exits = [s for s in exits if s.end.by != schedulers.ARGPARSE] or exits[:1]
        if exits:
            first = next((s for s in exits if s.end.first), exits[0])
            together = [s for s in exits if s.place == first.place]
            doubt = ""
            if len(exits) > len(together):
                doubt = "other ranks exited, too, and nothing shows which one began"
            elif first.end.code == 1 and (
                first.end.by != "the launcher" or _LOCAL_RANK.search(first.text)
            ):
                # 1 is Python's code for any exception. "the launcher" has one process, as a rule.
                doubt = "no line with its prefix in the log says why: it may have lost another rank"
            yield from (self._of_end(s, doubt) for s in together)

    def _unexplained(self) -> list[Sighting]:
        """The ends with a code that is not 0 for which the log has no error that could be
        theirs.
        """
        spoke = {_rank(s) for s in self._seen if s.has_error and not s.went_on}
        coded = [s for s in self._ends if s.end.code and not s.end.signal]
        if -1 in spoke:
            return []
        return [s for s in coded if _rank(s) not in spoke and not (_rank(s) < 0 and spoke)]

    def not_started(self) -> Iterable[RankEvidence]:
        """Make evidence of the program that could not be started."""
        found = [s for s in self._seen if s.sign is Sign.NOT_STARTED and not s.went_on]
        if found and not self._sure and not self._has_run(found[0]):
            self.program, number = schedulers.not_started(found[0].text)
            yield self._rank(found[0], -1, not_executed=number, said=(found[0].text,))

    def _has_run(self, refusal: Sighting) -> bool:
        """Tell whether something else ended the job than the program that a shell did not find, or
        that somebody refused to start: the same words may be of a command beside the job.
        """
        text, ends = refusal.text, self._ends
        refused = refused_starts.read(text) is not None
        by_launcher = schedulers.starts_ranks(text) or refused_starts.by_launcher(text)
        if by_launcher:
            ends = [s for s in ends if s.end.by != "the shell" or s.end.pid]
        if not (refused or schedulers.by_shell(text)):
            return False  # the words of what starts the ranks
        if not refused and any(s.end.code in (126, 127) for s in ends):
            return False  # as a shell ends then
        meant = [classify.meaning(s.error) for s in self._errors if not s.went_on]
        if any(one is not Meaning.WAITED for one in meant):
            return True
        signs = _OF_STARTED - ({Sign.INTERRUPTED} if by_launcher else set())
        coded = any(s.end.code == 1 or (refused and s.end.code) for s in ends)
        by = {s.end.by for s in ends}
        ran = (ends and not coded) or (by & schedulers.OF_RANKS and Meaning.WAITED not in meant)
        return bool(ran) or any(s.sign in signs and not s.went_on for s in self._seen)

    # --- those that speak of others

    def waited(self) -> Iterable[RankEvidence]:
        """Make evidence of ranks of which NCCL's watchdog, or a line of torch's, says that others
        did not come or are gone.
        """
        told = [s for s in self._seen if s.sign in (Sign.WATCHDOG, Sign.LOST)]
        if not told and (unreached := self._findings.only_unreached()):
            told = unreached[-1:]
        for s in told:
            yield self._rank(s, _rank(s), collective=s.collective, said=(s.text,))

    def stopped(self) -> Iterable[RankEvidence]:
        """Make evidence of ranks that the launcher stopped, and that said nothing of a peer."""
        spoke = {_rank(s) for s in self._seen if s.has_error} | {s.end.rank for s in self._ends}
        for sighting in self._seen:
            if sighting.sign is not Sign.ENDED or sighting.end.signal not in (SIGKILL, SIGTERM):
                continue
            for rank in {sighting.end.rank, *sighting.ranks} - spoke - {-1}:
                spoke.add(rank)
                ended = Ended(signal=sighting.end.signal)
                sent = ("SIGTERM", "SIGKILL")[: 1 + (ended.signal == SIGKILL)]
                yield self._rank(sighting, rank, sent=sent, ended=ended)

    def _rank(self, sighting: Sighting, number: int, **shown: Any) -> RankEvidence:
        place = sighting.place
        return RankEvidence(
            number,
            number,
            0,
            "",
            name=self._name(sighting),
            order=place.line,
            log=place.log,
            log_line=place.line if place.log else 0,
            **shown,
        )

    def _name(self, sighting: Sighting) -> str:
        if sighting.speaker.known:
            return sighting.speaker.name
        if sighting.end.local_rank >= 0:
            return f"local rank {sighting.end.local_rank}"
        return "a rank" if self._findings.ranks else "the program"


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOADER = re.compile(r"(^|/)torch/utils/data/dataloader\.py$")


def _line(sighting: Sighting) -> int:
    return sighting.place.line


def _rank(sighting: Sighting) -> int:
    return sighting.speaker.rank if sighting.speaker.rank >= 0 else sighting.end.rank


def _numbers(sighting: Sighting) -> list[int]:
    """List the ranks that a sighting is about, [-1] when the log does not tell."""
    numbers = {_rank(sighting), *sighting.ranks}
    shared, *own = (pattern.findall(sighting.error.message) for pattern in _NAMED_RANKS)
    # NCCL names the rank that speaks first. Where that is another, it counts in a smaller group.
    unnamed = _rank(sighting) < 0
    pairs = (pair for pair in shared if unnamed or str(_rank(sighting)) in pair)
    numbers.update(int(number) for pair in pairs for number in pair)
    if unnamed:
        numbers.update(int(number) for found in own for number in found)
    return sorted(numbers - {-1}) or [-1]


def _victim(sighting: Sighting) -> tuple[int, str]:
    """Return the pid of the process that the kernel killed for memory, and what names it; 0 and ""
    when the words name none.
    """
    found = _VICTIM.search(sighting.text)
    return (int(found[1]), found[0]) if found is not None else (0, "")


def _is_worker_stopped(error: Raised) -> bool:
    worker = classify.loader_killed(error)
    return worker[1] == SIGTERM if worker else bool(classify.loader_gone(error.message))


def _is_dump(sighting: Sighting) -> bool:
    """Tell whether native code crashed there, in words that say nothing of why."""
    return sighting.sign is Sign.CRASHED and not classify.says_why(sighting.error)


def _is_own(error: Raised) -> bool:
    """Tell whether an error is the process's own, and speaks of no other rank. A DataLoader's
    worker that breaks off was ended by something.
    """
    through_loader = any(_LOADER.search(frame.file) for frame in error.frames)
    if classify.fits("producer-gone", error) and not through_loader:
        return True
    return classify.meaning(error) is Meaning.OWN and not classify.nccl_gave_up(error)


def _is_of_agent(error: Raised) -> bool:
    """Tell whether torchrun's agent waited in vain for the other nodes, after its own ranks had
    ended.
    """
    return any(frame.function == "_exit_barrier" for frame in error.frames)


def _as_spoken(remark: Sighting) -> Sighting:
    """Return an error in a line alone as a line that speaks of a failure."""
    words = f"{remark.error.type}: {remark.error.message}".partition("\n")[0]
    return Sighting(Sign.SPOKEN, remark.place, remark.speaker, words, went_on=remark.went_on)


def _is_stronger(sighting: Sighting) -> bool:
    """Tell whether it is a stronger word of a rank's end than an error in a line alone."""
    end, text = sighting.end, sighting.text
    ended = (end.first and end.signal) or end.by == schedulers.ARGPARSE
    refused = sighting.sign is Sign.NOT_STARTED and refused_starts.by_launcher(text)
    of_memory = sighting.sign is Sign.KILLED_FOR_MEMORY
    return bool(ended) or refused or of_memory or (_is_dump(sighting) and sighting.has_error)


def _is_final(sighting: Sighting) -> bool:
    return classify.cause_of(sighting.error) in _FINAL


def _ends(findings: Findings, by_stop: Sequence[Sighting]) -> list[Sighting]:
    """Join the ends of processes, once each: torchrun tells one in a line and again in its table,
    and srun those of several ranks in one line.

    Those that the launcher stopped did not fail.
    """
    by_pid: dict[Hashable, Sighting] = {}
    for sighting in findings.sightings:
        end = sighting.end
        if sighting.sign is not Sign.ENDED or sighting in by_stop:
            continue
        if not findings.has_failed(sighting):
            continue
        if len(sighting.ranks) > 1:
            for rank in sighting.ranks:
                one = msgspec.structs.replace(end, rank=rank)
                one_of = msgspec.structs.replace(sighting, end=one, ranks=())
                by_pid[sighting.place, rank] = one_of
            continue
        key: Hashable = end.pid or (sighting.place, end.rank)
        if (known := by_pid.get(key)) is not None:
            rank, host = max(known.end.rank, end.rank), known.end.host or end.host
            first = known.end.first or end.first
            merged = msgspec.structs.replace(known.end, rank=rank, host=host, first=first)
            sighting = msgspec.structs.replace(known, end=merged)
        by_pid[key] = sighting
    return list(by_pid.values())


def _without_the_command(ends: list[Sighting], findings: Findings) -> list[Sighting]:
    """Leave out how the whole command ended, by the word of the service or the shell that ran it,
    where the log says before that how a process of it failed.
    """
    of_shell = [s for s in ends if s.end.by == "the shell" and not s.end.pid]
    of_service = [s for s in ends if s.end.by == schedulers.SERVICE and s.end.code]
    of_service = [s for s in of_service if s.end.rank < 0]
    sure = [s for s in ends if not s.went_on and s.end.by != schedulers.ARGPARSE]
    inner = [s for s in sure if s not in of_shell]
    others = [s for s in sure if s not in of_service]
    told = [s for s in findings.sightings if s.sign in _OF_PROCESSES and not s.went_on]
    told += findings.only_unreached()
    return [
        s
        for s in ends
        if not (s in of_shell and any(one.stands_before(s) for one in inner))
        and not (s in of_service and any(one.stands_before(s) for one in (*others, *told)))
    ]


def _is_explained(ended: Sighting, said: Iterable[Sighting]) -> bool:
    """Tell whether a process that aborted says why: torch aborts after a timeout, and after an
    uncaught error.
    """
    rank = ended.end.rank
    if ended.end.by == "the C library":  # it names the reason
        return False
    return ended.end.signal == SIGABRT and any(rank < 0 or _rank(s) in (rank, -1) for s in said)


def _same(error: Raised) -> Hashable:
    """Return a key that errors of one cause share."""
    cause = classify.cause_of(error)
    if cause in _OF_ONE_CAUSE:
        return cause
    frame = stacks.own_frame(error.frames)
    place = (frame.file, frame.line) if frame is not None else error.message[:80]
    return (error.type, place)


def _is_spawning(frame: Frame) -> bool:
    return re.search(r"multiprocessing[/\\]spawn\.py$", frame.file) is not None


def _absorbed(groups: list[list[Sighting]]) -> list[list[Sighting]]:
    """Drop groups that only repeat another.

    These are the line that a logger wrote of an exception which has its traceback, too, the news
    that a DataLoader's worker has ended which is known to have been killed, or to have met a full
    /dev/shm, and the end of the input of a child for which its parent could not pickle something.
    """
    errors = [s.error for group in groups for s in group]
    messages = {error.message.partition("\n")[0] for error in errors if error.frames}
    killed = {worker[0] for worker in map(classify.loader_killed, errors) if worker is not None}

    full = any(classify.says("shared-memory", error.message) for error in errors)
    unpickled = any(python.NOT_PICKLED.search(error.message) for error in errors)

    def repeats(error: Raised) -> bool:
        gone = classify.loader_gone(error.message)
        if killed.intersection(gone) or (full and gone):
            return classify.loader_killed(error) is None
        if unpickled and error.type == "EOFError" and any(map(_is_spawning, error.frames)):
            return True
        return not error.frames and error.message.partition("\n")[0] in messages

    return [group for group in groups if not all(repeats(s.error) for s in group)] or groups


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
    """Name the program's file, for the command of a help: the outermost frame that is no library's."""
    for sighting in errors[:1]:
        error = sighting.error
        frame = next((one for one in error.frames if not stacks.library(one)), None)
        name = (frame.file if frame is not None else error.filename).rpartition("/")[2]
        if name.endswith(".py"):
            return name
    return "train.py"
