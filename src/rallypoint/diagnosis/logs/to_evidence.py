"""A log as the same evidence that a live job gives: a `RankEvidence` for each process that shows
something. Pure.

What a log does not tell is left unknown: a process without a rank's number has -1, and a name if
the log has one for it. The line where something stands takes the place of the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import inf
from signal import SIGABRT, SIGKILL, SIGTERM
from typing import Any

import msgspec

from rallypoint.diagnosis import classify, confidence, rank_kinds, root_cause, stacks
from rallypoint.diagnosis.causes.wording import CRASHES
from rallypoint.diagnosis.classify import Meaning
from rallypoint.diagnosis.error_patterns import (
    known_line,
    launchers,
    python,
    refused_starts,
    shells,
)
from rallypoint.diagnosis.evidence import (
    Ended,
    JobEvidence,
    MemoryEvidence,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.log_events import Findings, Sighting, Sign, Speaker
from rallypoint.diagnosis.logs import same_errors
from rallypoint.diagnosis.logs.ends import (
    OF_PROCESSES,
    ended_by_stop,
    failed_ends,
    is_explained,
    without_the_command,
)
from rallypoint.diagnosis.logs.sighting_facts import (
    as_spoken,
    is_dump,
    is_final,
    is_of_agent,
    is_own,
    is_stronger,
    line_of,
    named_as_torch_does,
    rank_of,
    ranks_of,
    victim,
)
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Report
from rallypoint.world import ranks_phrase

SOON = 10
"""Lines after ssh's word within which its caller says that it failed: mpirun's "unable to reliably
start".
"""

_KILLERS = (
    "Ray", "slurmstepd", "srun", "the kubelet", "LSF", "PBS", known_line.SERVICE,
)  # fmt: skip
"""Those that end processes for lack of memory, beside the kernel."""

_OF_STARTED = {
    Sign.KILLED_FOR_MEMORY, Sign.INTERRUPTED, Sign.CRASHED, Sign.WATCHDOG, Sign.NCCL, Sign.STALLED,
}  # fmt: skip
"""What only a job has that was started."""

_OF_SEVERAL = Pattern(r"--local[_-]rank|\btorch\.distributed\.(?:run|launch)\b|\btorchrun\b")
"""Words in the command of a launcher that starts several ranks, or one of several."""

_RAISED = Pattern(r"(?:\w{1,60}\.){0,9}\w{0,60}Error: ")
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
        by_stop, self._after_stop = ended_by_stop(findings)
        self._ends = without_the_command(failed_ends(findings, by_stop), findings)
        if self._ends:
            self._seen = tuple(s for s in self._seen if not is_of_agent(s.error))
        self._errors = [
            s
            for s in self._seen
            if s.has_error and not classify.is_stop(s.error) and s not in by_stop
        ]
        killed = any(s.sign is Sign.KILLED_FOR_MEMORY and not s.went_on for s in self._seen)
        # What was killed for memory was a child of these, as far as the log tells.
        self._parents = [s for s in self._errors if killed and classify.lost_a_child(s.error)]
        self._errors = [s for s in self._errors if s not in self._parents]
        self._own = [s for s in self._errors if not is_dump(s) and is_own(s.error)]
        self._sure = [s for s in self._own if not s.went_on or is_final(s)]
        remarks = self._remarks()
        self._seen = as_spoken(remarks, self._seen)
        self.findings = msgspec.structs.replace(
            findings, sightings=as_spoken(remarks, findings.sightings)
        )
        self._errors = [s for s in self._errors if s not in remarks]
        self._sure = [s for s in self._sure if s not in remarks]
        self._handled = [s for s in self._own if s not in (*self._sure, *remarks)]
        # ranks that an error of their own ended, of whatever cause
        self._spoke = {rank_of(s) for s in self._errors if not s.went_on}
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
        victims = {victim(s)[0] for s in self._seen if s.sign is Sign.KILLED_FOR_MEMORY}
        self.workers_killed = victims.intersection(pid for pid, _ in workers)
        """DataLoader's workers that the kernel names among those that it killed for memory."""

    # --- exceptions

    def raised(self) -> Iterable[RankEvidence]:
        """Make evidence of exceptions: the processes' own first, then those that speak of others."""
        groups: dict[Hashable, list[Sighting]] = {}
        for sighting in sorted(self._sure, key=line_of):
            groups.setdefault(same_errors.key(sighting.error), []).append(sighting)
        merged = same_errors.absorbed(list(groups.values()))
        for group in merged:
            yield from self._of_group(group, merged)
        handled = [s for s in self._handled if s.did_without != 1] or self._handled
        for sighting in handled[-1:]:
            yield from self._of_one(sighting, went_on=True)
        for sighting in self._errors:
            if sighting not in self._own and not is_dump(sighting):
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
        stronger = [s for s in self._seen if is_stronger(s) and not s.went_on]
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
        numbers = sorted({rank for s in group for rank in ranks_of(s)} - {-1})
        doubt = self._doubt_of(group)
        # what srun counts is no rank where torchrun itself failed
        if not numbers and "elastic/agent" not in error.traceback:
            numbers, why = self._attributed(groups)
            doubt = doubt or why
        yield from self._of_one(
            msgspec.structs.replace(best, place=first.place, error=error),
            numbers=numbers,
            doubt=doubt,
        )

    def _doubt_of(self, group: Sequence[Sighting]) -> str:
        first = group[0]
        if is_final(first):
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
        if len({one[0].place for one in groups if all(rank_of(s) < 0 for s in one)}) != 1:
            return [], self._unprefixed()
        ends = [s for s in self._ends if s.end.code and s.end.rank not in self._spoke]
        # Of a list of tasks the others may have lost the one that raised it.
        lists = Counter(s.place for s in ends if s.end.by == "srun")
        failed = [s.end for s in ends if lists[s.place] < 2]
        doubt = ""
        if len(failed) > 1 and any(rank_of(s) < 0 and s not in self._own for s in self._errors):
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
        error = named_as_torch_does(sighting.error)
        for number in numbers or ranks_of(sighting):
            yield self._rank(sighting, number, raised=error, doubt=doubt, went_on=went_on)

    # --- ends

    def ended(self) -> Iterable[RankEvidence]:
        """Make evidence of the processes of which another says how they ended, where no error of
        theirs explains it.
        """
        lost = [s for s in self._seen if s.sign in (Sign.WATCHDOG, Sign.LOST)]
        by_signal = [s for s in self._ends if s.end.signal]
        by_signal = [s for s in by_signal if not is_explained(s, (*self._errors, *lost))]
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
            if s.end.signal == ends[0].end.signal and rank_of(s) not in told:
                told.add(rank_of(s))
                yield self._of_end(s)

    def killed_for_memory(self) -> Iterable[RankEvidence]:
        """Make evidence of processes that were killed for memory, by the word of the kernel, Slurm
        or Ray.
        """
        words = [s for s in self._seen if s.sign is Sign.KILLED_FOR_MEMORY]
        words = [s for s in words if victim(s)[0] not in self.workers_killed]
        known = {s.end.pid for s in self._ends} - {0}
        words.sort(key=lambda s: victim(s)[0] not in known)  # that names a rank stands first
        if not words:
            return
        killed = [s for s in self._ends if s.end.signal == SIGKILL]
        numbers = sorted({rank for s in (*words, *killed) for rank in ranks_of(s)} - {-1})
        by = {s.end.by for s in words}
        name = next((one for one in _KILLERS if one in by), "the kernel")
        told = tuple(s.text for s in words if s.text)
        ended, first = Ended(signal=int(SIGKILL)), words[0]
        doubt = _GOES_ON if first.went_on else ""
        victims = dict(filter(all, map(victim, words)))
        if not first.speaker.known and (killed or victims or self._parents):
            of = (
                self._name(killed[0]) if killed else next(iter(victims.values()), "a child process")
            )
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
        lost = {rank_of(s) for s in self._seen if s.sign in (Sign.WATCHDOG, Sign.LOST)}
        named = (self._spoke | lost) - {-1}
        aborted = [s.end for s in self._ends if s.end.signal == SIGABRT and s.end.rank not in named]
        nameless = [s for s in self._seen if is_dump(s) and s.has_error and rank_of(s) < 0]
        for sighting in filter(is_dump, self._seen):
            without = python.NO_EXCEPTION in sighting.text
            if without and (self._sure or ((self._errors or lost) and not aborted)):
                continue  # it is how the process of one of these left
            told = (n for name, n in python.SIGNALS.items() if name in sighting.text)
            number = next(filter(CRASHES.__contains__, told), int(SIGABRT))
            if [sighting] == nameless and len(aborted) == 1:
                sighting = msgspec.structs.replace(sighting, end=aborted[0])
            for rank in ranks_of(sighting):
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
            rank_of(sighting),
            ended=Ended(end.code, end.signal, status=end.status),
            left_saying=self._of_argparse() if end.code == 2 else "",
            told_by=told_by,
            went_on=sighting.went_on and end.signal > 0,
            doubt=doubt,
        )

    def _of_processes_before(self, ended: Sighting) -> list[Sighting]:
        told = [s for s in self._seen if s.sign in OF_PROCESSES or s in self._errors]
        return [s for s in told if s.stands_before(ended)]

    def _of_argparse(self) -> str:
        """Return what argparse said in the log, "" for nothing."""
        said = (one.text for one in self._seen if one.end.by == known_line.ARGPARSE)
        return next(said, "").partition(": error: ")[2]

    def _exited(self) -> Iterable[RankEvidence]:
        """Make evidence of the first that exited with a code that nothing explains."""
        exits = self._unexplained()
        # argparse and a launcher tell of the same end: the launcher's line counts.
        exits = [s for s in exits if s.end.by != known_line.ARGPARSE] or exits[:1]
        if exits:
            # each launcher of a job on several nodes has a table
            first = min([s for s in exits if s.end.first] or exits, key=lambda s: s.end.at)
            together = [s for s in exits if s.place == first.place]
            doubt = ""
            if len(exits) > len(together):
                doubt = "other ranks exited, too, and no words of theirs show which one began"
            elif first.end.code == 1 and (
                first.end.by != "the launcher" or _OF_SEVERAL.search(first.text)
            ):
                # 1 is Python's code for any exception. "the launcher" has one process, as a rule.
                doubt = "no line with its prefix in the log says why: it may have lost another rank"
            yield from (self._of_end(s, doubt) for s in together)

    def _unexplained(self) -> list[Sighting]:
        """The ends with a code that is not 0 for which the log has no error that could be
        theirs.
        """
        spoke = {
            rank_of(s)
            for s in self._seen
            # a rank may raise what its watchdog had said
            if not s.went_on
            and (s.has_error or (s.sign is Sign.WATCHDOG and _RAISED.match(s.text)))
        }
        coded = [s for s in self._ends if s.end.code and not s.end.signal]
        if -1 in spoke:
            # Ctrl-C ended what ran after a program that refused its arguments.
            nameless = [s.error for s in self._seen if s.has_error and rank_of(s) < 0]
            stopped = all(map(classify.is_stop, nameless))
            return [s for s in coded if stopped and s.end.by == known_line.ARGPARSE]
        return [s for s in coded if rank_of(s) not in spoke and not (rank_of(s) < 0 and spoke)]

    def not_started(self) -> Iterable[RankEvidence]:
        """Make evidence of the program that could not be started."""
        found = [s for s in self._seen if s.sign is Sign.NOT_STARTED]
        # A script may go on without a step that Slurm did not start.
        found = [s for s in found if not s.went_on or "execve()" in s.text]
        if found and not self._sure and not self._has_run(found[0]):
            self.program, number = shells.not_started(found[0].text)
            doubt, said = _GOES_ON if found[0].went_on else "", (found[0].text,)
            yield self._rank(found[0], -1, not_executed=number, said=said, doubt=doubt)

    def _has_run(self, refusal: Sighting) -> bool:
        """Tell whether something else ended the job than the program that a shell did not find, or
        that somebody refused to start: the same words may be of a command beside the job.
        """
        text, ends = refusal.text, self._ends
        refused = refused_starts.read(text) is not None
        by_launcher = shells.starts_ranks(text) or refused_starts.by_launcher(text)
        if by_launcher:
            ends = [s for s in ends if s.end.by != "the shell" or s.end.pid]
        if not (refused or shells.by_shell(text)):
            return False  # the words of what starts the ranks
        if not refused and any(s.end.code in (126, 127) for s in ends):
            return False  # as a shell ends then
        meant = [classify.meaning(s.error) for s in self._errors if not s.went_on]
        if any(one is not Meaning.WAITED for one in meant):
            return True
        signs = _OF_STARTED - ({Sign.INTERRUPTED} if by_launcher else set())
        coded = any(s.end.code == 1 or (refused and s.end.code) for s in ends)
        by = {s.end.by for s in ends}
        ran = (ends and not coded) or (by & launchers.OF_RANKS and Meaning.WAITED not in meant)
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
            yield self._rank(s, rank_of(s), collective=s.collective, said=(s.text,))

    def stopped(self) -> Iterable[RankEvidence]:
        """Make evidence of ranks that the launcher stopped, and that said nothing of a peer."""
        spoke = {rank_of(s) for s in self._seen if s.has_error} | {s.end.rank for s in self._ends}
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


def _program(errors: Sequence[Sighting]) -> str:
    """Name the program's file, for the command of a help: the outermost frame that is no library's."""
    for sighting in errors[:1]:
        error = sighting.error
        frame = next((one for one in error.frames if not stacks.library(one)), None)
        name = (frame.file if frame is not None else error.filename).rpartition("/")[2]
        if name.endswith(".py"):
            return name
    return "train.py"
