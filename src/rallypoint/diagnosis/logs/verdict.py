"""What was seen in logs, to causes.

As for the jobs of `rallypoint run`, evidence counts by its kind before it counts by its place: a signal that nobody of the launcher sent
and an error that mentions no lost peer are causes; a lost connection, a timeout of NCCL's watchdog and whatever the launcher ended
afterwards are consequences. The order of lines decides only among what is of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from signal import SIGABRT, SIGKILL, SIGTERM

import msgspec

from rallypoint.diagnosis import reading, stacks
from rallypoint.diagnosis.accounts import wording
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.logs import accounts, certainty, known, phrases
from rallypoint.diagnosis.logs.accounts import Cause
from rallypoint.diagnosis.logs.sightings import Collective, End, Findings, Place, Sighting, Sign
from rallypoint.diagnosis.reading import Meaning
from rallypoint.diagnosis.report import Confidence, Report
from rallypoint.world import ranks_phrase

MOST_REPORTS = 3  # causes told in full, as for jobs of our own

_OTHER_RANKS = re.compile(r"rank (\d+) and rank (\d+) both on")
_RANK_ID = re.compile(r"\(PID:\d+, Device:\d+, RankID:(\d+)\)")  # torch_npu, of who speaks
_UNUSED_IN = re.compile(r"did not receive grad for rank (\d+)")


def diagnose(findings: Findings) -> tuple[Report, ...]:
    """The causes that logs tell of, the first one first; `cause-unknown` rather than a guess. Never empty."""
    of_attempts = findings.restarts and len({s.place.log for s in findings.sightings}) == 1
    reports = _of_attempts(findings) if of_attempts else _of_one_attempt(findings)
    return (_placed(reports[0], findings), *reports[1:])


def _placed(report: Report, findings: Findings) -> Report:
    """A cause before which the log speaks of another failure, in words that are not known here, is not certain to be the first one."""
    if report.confidence != "certain" or not report.logs:
        return report
    log, _, line = report.logs[0].rpartition(":")
    spoken = [s for s in findings.sightings if s.sign is Sign.SPOKEN and not phrases.of_slurms_stop(s.text)]
    before = certainty.of_place(report.code, Place(log, int(line)), spoken)
    if before is None:
        return report
    told = f"line {before.place.line}: {wording.cut(before.text, 200)}"
    why = f"line {before.place.line}, before it, speaks of a failure, too, in words that are not known here"
    return msgspec.structs.replace(report, confidence="likely", why=why, evidence=(told, *report.evidence))


def _of_attempts(findings: Findings) -> tuple[Report, ...]:
    """What ended the last attempt. When that says nothing, what ended those before, which did not end the job."""
    last = findings.restarts[-1].line
    after = tuple(s for s in findings.sightings if s.place.line > last)
    if after:
        reports = _of_one_attempt(msgspec.structs.replace(findings, sightings=after))
        if reports[0].code != "cause-unknown":
            return reports
    doubt = "the launcher started all ranks again after it, and the log does not say what came of that"
    return tuple(
        msgspec.structs.replace(report, confidence="likely", why=doubt)
        if report.confidence == "certain" and report.exit_status == 0
        else report
        for report in _of_one_attempt(findings)
    )


def _of_one_attempt(findings: Findings) -> tuple[Report, ...]:
    ends = _ends(findings)
    errors = [sighting for sighting in findings.sightings if sighting.error is not None]
    own = [s for s in errors if _meaning(s) is Meaning.OWN and not _is_nccl(s) and not _is_stop(s) and not _only_crashed(s)]
    of_memory = [sighting for sighting in findings.sightings if sighting.sign is Sign.KILLED_FOR_MEMORY]
    stops = [s for s in findings.sightings if s.sign is Sign.INTERRUPTED] + [s for s in errors if _is_stop(s)]
    lost = [s for s in errors if _meaning(s) is not Meaning.OWN] + [s for s in findings.sightings if s.sign in (Sign.WATCHDOG, Sign.LOST)]
    reported = [s for s in findings.sightings if s.sign is Sign.REPORTED]
    if reported:
        return tuple(accounts.reported(_cause(findings, [s], ())) for s in reported[:MOST_REPORTS])
    dumps = [s for s in findings.sightings if s.sign is Sign.CRASHED and (s.error is None or not phrases.says_why(s.error))]
    aborts = [s for s in dumps if s.error is None and ("Aborted" in s.text or s.text.startswith("terminate called"))]
    dumps = [s for s in dumps if s not in aborts]
    not_started = [s for s in findings.sightings if s.sign is Sign.NOT_STARTED]
    unresolved = [s for s in own if s.error is not None and phrases.unresolved(s.error)]
    models = [s for s in own if s.error is not None and phrases.models_differ(s.error.message)]
    schemes = [s for s in own if s.error is not None and phrases.scheme_unknown(s.error.message)]
    by_ssh = [s for s in own if s.error is not None and phrases.ssh_host(s.error.message)]
    own = [s for s in own if s not in unresolved and s not in models and s not in schemes and s not in by_ssh]
    collectives = [s for s in findings.sightings if s.sign is Sign.NCCL and phrases.mismatched(s.text) is not None]

    strong: list[tuple[Sighting, Callable[[], tuple[Report, ...]]]] = []
    if of_memory:
        killed = [s for s in ends if s.end is not None and s.end.signal == SIGKILL]
        strong.append((of_memory[0], lambda: (_of_memory(findings, of_memory, killed),)))
    sure = [s for s in own if not s.went_on]
    handled = [s for s in own if s.went_on]
    if not sure and handled and _unexplained(ends, errors):
        sure, handled = handled[-1:], []  # somebody ended with an error, and this is the last one that the log has
    if sure:
        strong.append((sure[0], lambda: _raised(findings, sure, ends, handled=own[-1].went_on)))
    if unresolved:
        strong.append((unresolved[0], lambda: (accounts.unreached(_cause(findings, unresolved, ends), phrases.host_of(unresolved), 0),)))
    if by_ssh:
        strong.append((by_ssh[0], lambda: (known.ssh_unresolved(_cause(findings, by_ssh, ends)),)))
    if schemes:
        strong.append((schemes[0], lambda: (accounts.no_handler(_cause(findings, schemes, ends)),)))
    if models:
        strong.append((models[0], lambda: (accounts.models_differ(_cause(findings, models, ends)),)))
    if collectives:
        strong.append((collectives[0], lambda: (accounts.nccl_mismatch(_cause(findings, collectives, ends)),)))
    if not_started and not sure:
        strong.append((not_started[0], lambda: (accounts.not_started(_cause(findings, not_started, ends)),)))
    by_signal = [s for s in ends if s.end is not None and s.end.signal and s.end.signal != SIGTERM and not _explained(s, errors, lost)]
    words_alone = [s for s in by_signal if s.went_on]
    by_signal = [s for s in by_signal if not s.went_on]
    kills = [s for s in by_signal if s.end is not None and s.end.signal not in wording.CRASHES]
    if kills and not of_memory:
        strong.append((kills[0], lambda: (accounts.killed(_cause(findings, _same_signal(kills), ends)),)))
    crashes = [s for s in by_signal if s.end is not None and s.end.signal in wording.CRASHES]
    hard = [s for s in crashes if s.end is not None and s.end.signal != SIGABRT]
    if dumps or hard:
        strong.append(((*dumps, *hard)[0], lambda: (accounts.crashed(_cause(findings, [*dumps, *_same_signal(hard or crashes)], ends)),)))

    strong.sort(key=lambda one: _order(one[0], findings))
    stops = [s for s in stops if not certainty.answers(s, [*ends, *lost])]
    stops.sort(key=lambda one: _order(one, findings))
    if stops and not strong:
        return (accounts.interrupted(_cause(findings, _with_end(stops), [])),)
    if stops and _order(stops[0], findings) < _order(strong[0][0], findings):
        doubt = "it stands first; what failed after it may be a consequence, or of a later run in the same log"
        stopped = accounts.interrupted(_cause(findings, _with_end(stops), [], confidence="likely", doubt=doubt))
        return (stopped, *(report for _, tell in strong for report in tell()))[:MOST_REPORTS]
    if strong:
        return _with_consequences(findings, strong, ends, lost)
    return _weak(findings, [s for s in ends if s not in words_alone], errors, lost, [*aborts, *crashes], handled, words_alone)


def _with_consequences(
    findings: Findings,
    strong: Sequence[tuple[Sighting, Callable[[], tuple[Report, ...]]]],
    ends: Sequence[Sighting],
    lost: Sequence[Sighting],
) -> tuple[Report, ...]:
    reports = tuple(report for _, tell in strong for report in tell())[:MOST_REPORTS]
    blamed = {rank for report in reports for rank in report.ranks}
    first, *others = reports
    first = msgspec.structs.replace(first, then=_then(findings, ends, lost, blamed))
    if others and first.confidence == "certain":
        # Each of them happened. Which one brought down the job is told by the order of the lines alone.
        first = msgspec.structs.replace(first, confidence="likely", why=first.why or "it stands first in the log")
    return (first, *others)


def _weak(
    findings: Findings,
    ends: Sequence[Sighting],
    errors: Sequence[Sighting],
    lost: Sequence[Sighting],
    crashes: Sequence[Sighting],
    handled: Sequence[Sighting],
    words_alone: Sequence[Sighting],
) -> tuple[Report, ...]:
    """No strong evidence: what is left, from an exit code that nobody explains to consequences alone."""
    unexplained = _unexplained(ends, errors)
    if unexplained:
        first = [s for s in unexplained if s.end is not None and s.end.first] or unexplained
        doubt = "other ranks exited, too, and nothing shows which one began" if len(unexplained) > 1 else ""
        if not doubt and first[0].end is not None and first[0].end.code == 1:  # Python's own, for whatever was raised
            doubt = "why it did so is not in the log: it may have lost another rank"
        cause = _cause(findings, first[:1], ends, confidence="likely" if doubt else "certain", doubt=doubt)
        return (_then_told(accounts.exited(cause), findings, ends, lost),)
    nccl = [s for s in errors if _is_nccl(s)] + [s for s in findings.sightings if s.sign is Sign.NCCL]
    if nccl:
        nccl.sort(key=lambda one: _order(one, findings))
        doubt = "" if _says_more_than_lost(nccl) else "NCCL also fails where another rank has died, and the log shows none"
        cause = _cause(findings, nccl, ends, confidence="likely", doubt=doubt or "no rank shows another cause before it")
        return (_then_told(accounts.nccl(cause), findings, ends, [s for s in lost if s not in nccl]),)
    differ = _different_calls(findings)
    if differ is not None:
        seen, calls, sure = differ
        cause = _cause(
            findings,
            seen,
            (),
            confidence="certain" if sure else "likely",
            doubt="" if sure else "the log does not say that both are of one group",
        )
        odd = min(calls, key=lambda call: len(call[0]))[0]
        if len(calls) > 1 and len({len(ranks) for ranks, _ in calls}) == 1:  # as many on each side: none is the odd one
            odd = tuple(sorted(rank for ranks, _ in calls for rank in ranks))
        return (accounts.mismatch(msgspec.structs.replace(cause, ranks=odd), calls),)
    refused = [s for s in findings.sightings if s.sign is Sign.TOO_LARGE]
    if refused and lost:
        cause = msgspec.structs.replace(_cause(findings, refused, ()), ranks=_cut_off(lost))
        return (_then_told(accounts.too_large(cause, *phrases.too_large(refused[0].text)), findings, ends, lost),)
    reached = _unreached(findings, errors, lost)
    if reached is not None:
        return (reached,)
    aborted = [s for s in crashes if s.end is None or s.end.signal == SIGABRT]
    if aborted:
        silent = all(s.sign is Sign.ENDED for s in aborted)
        doubt = "torch aborts, too, when another rank has failed, and the words of this one are not in the log" if silent else ""
        cause = _cause(findings, aborted, ends, confidence="likely" if doubt else "certain", doubt=doubt)
        return (_then_told(accounts.crashed(cause), findings, ends, lost),)
    if handled:
        doubt = "the same process wrote many lines after it, so it may have been handled"
        cause = _cause(findings, handled[-1:], ends, confidence="possible", doubt=doubt)
        return (accounts.raised(cause),)
    if words_alone and not lost:
        doubt = "the words stand alone in a line, and the log goes on for long after it"
        cause = _cause(findings, _same_signal(words_alone), ends, confidence="possible", doubt=doubt)
        end = words_alone[0].end
        crashed = end is not None and end.signal in wording.CRASHES
        return (accounts.crashed(cause) if crashed else accounts.killed(cause),)
    stalled = [s for s in findings.sightings if s.sign is Sign.STALLED]
    if stalled and not lost:
        doubt = "it is a warning: they may have come later, and the log does not say that the job ended"
        return (accounts.stalled(_cause(findings, stalled[:1], (), confidence="likely", doubt=doubt)),)
    same = [s for s in findings.sightings if s.sign is Sign.SAME_RANK]
    if same:
        return (_then_told(known.same_rank(_cause(findings, same, ())), findings, ends, lost),)
    late = [s for s in errors if _meaning(s) is Meaning.WAITED and s.error is not None]
    by_rank = {reading.not_met(s.error.message): s.error for s in late if s.error is not None}  # who was waited for
    unmet = sorted(by_rank.keys() - {-1} - {s.speaker.rank for s in late})
    if unmet:
        cause = _cause(findings, late, (), confidence="likely")
        return (msgspec.structs.replace(accounts.not_met(cause, unmet, by_rank[unmet[0]]), ranks=tuple(unmet)),)
    barred = {rank for s in late if s.error is not None for rank in reading.not_at_barrier(s.error.message)}
    if barred:
        doubt = "why they did not come is not in the log"
        cause = _cause(findings, late, (), confidence="likely", doubt=doubt)
        cause = msgspec.structs.replace(cause, ranks=tuple(sorted(barred)))
        return (accounts.not_at_barrier(cause, cause.ranks),)
    short = [counted for s in late if s.error is not None and (counted := reading.came_short(s.error.message)) is not None]
    if short and len(short) == len(late):
        doubt = "who did not come, and why, is not in the log"
        cause = msgspec.structs.replace(_cause(findings, late, (), confidence="likely", doubt=doubt), ranks=())
        return (accounts.came_short(cause, *max(short)),)
    never_set = [s for s in late if s.error is not None and _waits_for_own_key(s.error)]
    if never_set and len(never_set) == len(late):
        doubt = "nothing in the log shows who was to set that key"
        return (accounts.raised(_cause(findings, never_set, ends, confidence="likely", doubt=doubt)),)
    absent = _absent(findings, ends, errors)
    waited = [s for s in errors if _meaning(s) is Meaning.WAITED and s.error is not None and s.speaker.rank >= 0]
    if absent and waited and waited[0].error is not None:
        cause = _cause(findings, waited, (), confidence="likely")
        report = accounts.missing(cause, absent, waited[0].error)
        return (msgspec.structs.replace(report, ranks=absent),)
    consequences = sorted(lost, key=lambda one: _order(one, findings))
    return (accounts.unknown(findings, consequences, ends),)


# --- kinds -----------------------------------------------------------------------------------------------------------


def _meaning(sighting: Sighting) -> Meaning:
    """What an error says of other ranks. A bare broken connection under torch is a lost peer; elsewhere it may be anything."""
    error = sighting.error
    assert error is not None
    meaning = reading.meaning(error.type, error.message, error.call)
    if reading.producer_gone(error) and not any(_LOADER.search(frame.file) for frame in error.frames):
        return Meaning.OWN  # a DataLoader's worker that breaks off is another matter: something ended it
    if meaning is not Meaning.OWN:
        return meaning
    if re.search(r"connect\(\) timed out|rendezvous.{0,300}timed? ?out|RendezvousTimeout", error.message + error.type, re.IGNORECASE):
        return Meaning.WAITED
    return Meaning.LOST if _GONE.search(f"{error.type}: {error.message}") else meaning


_LOADER = re.compile(r"(^|/)torch/utils/data/dataloader\.py$")
# What Horovod, Ray and torchrun's rendezvous raise in those that are left when another one has gone.
_GONE = re.compile(
    r"Horovod has been shut ?down|HorovodInternalError|RendezvousClosedError|\b(?:ActorDied|RayActor|ActorUnavailable|WorkerCrashed"
    r"|NodeDied|OwnerDied|ObjectLost)Error\b|\bEngineDeadError\b"
)


def _is_nccl(sighting: Sighting) -> bool:
    return sighting.error is not None and reading.nccl_gave_up(sighting.error.type, sighting.error.message)


def _only_crashed(sighting: Sighting) -> bool:
    """An exception of C++ that nobody caught, and whose words name no cause: it is told as the crash that it led to."""
    return sighting.sign is Sign.CRASHED and sighting.error is not None and not phrases.says_why(sighting.error)


def _is_stop(sighting: Sighting) -> bool:
    return sighting.error is not None and sighting.error.type.endswith("KeyboardInterrupt")


def _says_more_than_lost(nccl: Sequence[Sighting]) -> bool:
    words = " ".join(s.text or (s.error.message if s.error is not None else "") for s in nccl)
    return not reading.nccl_names_peer(words)


def _ends(findings: Findings) -> list[Sighting]:
    """How processes failed, once each: torchrun tells it in a line and again in its table. Those that the launcher stopped did not."""
    by_pid: dict[Hashable, Sighting] = {}
    for sighting in findings.sightings:
        end = sighting.end
        if sighting.sign is not Sign.ENDED or end is None or (end.code == 0 and end.signal == 0):
            continue
        if end.signal == SIGTERM or (end.pid in findings.stopped and end.signal in (SIGTERM, SIGKILL)):
            continue
        key: Hashable = ("pid", end.pid) if end.pid else (sighting.place, end.rank)
        known = by_pid.get(key)
        if known is not None and known.end is not None:
            merged = msgspec.structs.replace(
                known.end, rank=max(known.end.rank, end.rank), host=known.end.host or end.host, first=known.end.first or end.first
            )
            by_pid[key] = msgspec.structs.replace(known, end=merged)
        else:
            by_pid[key] = sighting
    return list(by_pid.values())


def _rank(sighting: Sighting) -> int:
    if sighting.speaker.rank >= 0:
        return sighting.speaker.rank
    return sighting.end.rank if sighting.end is not None else -1


def _explained(ended: Sighting, errors: Sequence[Sighting], lost: Sequence[Sighting]) -> bool:
    """Whether a process that aborted says why: torch aborts after a timeout, and after an error that nobody caught."""
    if ended.end is None or ended.end.signal != SIGABRT:
        return False
    said = [s for s in (*errors, *lost)]
    return any(_rank(s) == ended.end.rank or _rank(s) < 0 or ended.end.rank < 0 for s in said)


def _unexplained(ends: Sequence[Sighting], errors: Sequence[Sighting]) -> list[Sighting]:
    """Those that ended with a code that is not 0, and of whom the log has no error that could be theirs."""
    free = any(_rank(error) < 0 and not error.went_on for error in errors)
    spoke = {_rank(error) for error in errors if not error.went_on}
    found = [s for s in ends if s.end is not None and s.end.code and not s.end.signal]
    return [s for s in found if not free and _rank(s) not in spoke and not (_rank(s) < 0 and spoke)]


def _order(sighting: Sighting, findings: Findings) -> tuple[int, int]:
    logs = list(dict.fromkeys(one.place.log for one in findings.sightings))
    return (logs.index(sighting.place.log) if sighting.place.log in logs and len(logs) == 1 else 0, sighting.place.line)


def _same_signal(found: Sequence[Sighting]) -> list[Sighting]:
    return [s for s in found if s.end is not None and found[0].end is not None and s.end.signal == found[0].end.signal]


def _with_end(stops: Sequence[Sighting]) -> list[Sighting]:
    """The one that says by what it was stopped, of those that tell of one stop."""
    return sorted(stops, key=lambda one: (one.place.line, one.end is None))


# --- causes ----------------------------------------------------------------------------------------------------------


def _cause(
    findings: Findings, seen: Sequence[Sighting], ends: Sequence[Sighting], *, confidence: Confidence = "certain", doubt: str = ""
) -> Cause:
    ranks = {_rank(s) for s in seen if _rank(s) >= 0} | {rank for s in seen for rank in s.ranks}
    for s in seen:
        if s.error is not None:
            ranks |= {int(number) for pair in _OTHER_RANKS.findall(s.error.message) for number in pair}
            ranks |= {int(number) for number in _RANK_ID.findall(s.error.message) if _rank(s) < 0}
            ranks |= {int(number) for number in _UNUSED_IN.findall(s.error.message) if _rank(s) < 0}
    return Cause(findings, tuple(seen), tuple(sorted(ranks)), "", confidence, doubt)


def _of_memory(findings: Findings, seen: Sequence[Sighting], killed: Sequence[Sighting]) -> Report:
    cause = _cause(findings, [*seen, *killed], ())
    return accounts.killed_for_memory(msgspec.structs.replace(cause, seen=tuple(seen)))


def _raised(findings: Findings, own: Sequence[Sighting], ends: Sequence[Sighting], *, handled: bool) -> tuple[Report, ...]:
    """A report for each error; ranks that show the same, and a message beside its traceback, are one."""
    groups: dict[Hashable, list[Sighting]] = {}
    for sighting in sorted(own, key=lambda one: _order(one, findings)):
        groups.setdefault(_same(sighting), []).append(sighting)
    merged = _absorbed(list(groups.values()))
    told = []
    for group in merged[:MOST_REPORTS]:
        cause = _cause(findings, _speaking_first(group), ends)
        if not cause.ranks:
            cause = msgspec.structs.replace(cause, ranks=_attributed(findings, ends, own, group, merged))
        if handled and group[0].went_on:
            doubt = "it is the last error that the log has before a rank ended; the same process wrote many lines after it"
            cause = msgspec.structs.replace(cause, confidence="likely", doubt=doubt)
        elif all(s.followed for s in group) and not ends and not findings.failed:
            doubt = "lines of the same process follow it, and nothing says that it ended: it may have been handled"
            cause = msgspec.structs.replace(cause, confidence="likely", doubt=doubt)
        told.append(_earned(known.told(cause) or accounts.raised(cause), cause))
    return tuple(told)


def _earned(report: Report, cause: Cause) -> Report:
    """An exception that is not plainly the program's own is raised as told; whose fault it was is another matter."""
    error = cause.first.error
    if report.code != "rank-raised" or report.confidence != "certain" or error is None:
        return report
    doubt = certainty.of_error(error)
    return msgspec.structs.replace(report, confidence="likely", why=doubt) if doubt else report


def _same(sighting: Sighting) -> Hashable:
    error = sighting.error
    assert error is not None
    code = "fork" if reading.cuda_after_fork(error) else _code(error)
    if code:
        return code
    frame = stacks.own_frame(error.frames)
    return (error.type, (frame.file, frame.line) if frame is not None else error.message[:80])


def _code(error: Raised) -> str:
    """What makes errors one though their words differ: the texts that name a cause."""
    asked = {
        "kernel": reading.kernel_failed, "port": reading.port_in_use, "shared": reading.device_shared, "fork": reading.cuda_forked,
        "group": reading.group_missing, "twice": reading.group_twice, "unused": reading.parameters_unused,
        "missing": reading.device_missing, "calls": reading.calls_differ, "unguarded": reading.main_unguarded,
    }  # fmt: skip
    memory = reading.out_of_memory(error.type, error.message)
    return next((name for name, one in asked.items() if one(error.message)), memory and f"memory {memory}")


def _absorbed(groups: list[list[Sighting]]) -> list[list[Sighting]]:
    """Without those that only repeat another: the line that a logger wrote of an exception which has its traceback, too, and that a
    DataLoader's worker has ended which is known to have been killed."""
    errors = [s.error for group in groups for s in group if s.error is not None]
    messages = {error.message.partition("\n")[0] for error in errors if error.frames}
    killed = {worker[0] for error in errors if (worker := reading.loader_killed(error)) is not None}

    def repeats(error: Raised) -> bool:
        if killed.intersection(reading.loader_gone(error.message)):
            return reading.loader_killed(error) is None
        return not error.frames and error.message.partition("\n")[0] in messages

    return [group for group in groups if any(s.error is not None and not repeats(s.error) for s in group)] or groups


def _speaking_first(group: Sequence[Sighting]) -> list[Sighting]:
    """The one with a traceback, and of these the first, but with the place of the very first."""
    best = next((s for s in group if s.error is not None and s.error.frames), group[0])
    if best is group[0]:
        return list(group)
    error = best.error
    extra = group[0].error
    if error is not None and extra is not None and reading.kernel_failed(error.message):
        error = msgspec.structs.replace(error, traceback=f"{error.traceback}\n{extra.message}")
    return [msgspec.structs.replace(best, place=group[0].place, error=error), *(s for s in group if s is not best)]


def _attributed(
    findings: Findings, ends: Sequence[Sighting], own: Sequence[Sighting], group: Sequence[Sighting], groups: Sequence[Sequence[Sighting]]
) -> tuple[int, ...]:
    """Whose error it was, when no line says so: those of whom the launcher says that they failed, when there is but one error for them."""
    spoke = {_rank(s) for s in own if _rank(s) >= 0}
    failed = {s.end.rank for s in ends if s.end is not None and s.end.code and s.end.rank >= 0} - spoke
    nameless = [one for one in groups if all(_rank(s) < 0 for s in one)]
    return tuple(sorted(failed)) if len(nameless) == 1 else ()


# --- consequences, and what only they tell -----------------------------------------------------------------------------


def _then_told(report: Report, findings: Findings, ends: Sequence[Sighting], lost: Sequence[Sighting]) -> Report:
    return msgspec.structs.replace(report, then=_then(findings, ends, lost, set(report.ranks)))


def _then(findings: Findings, ends: Sequence[Sighting], lost: Sequence[Sighting], blamed: set[int]) -> str:
    """What the others said, folded."""
    waited = {_rank(s) for s in lost if s.sign is Sign.WATCHDOG or (s.error is not None and _meaning(s) is Meaning.WAITED)} - blamed - {-1}
    gone = {_rank(s) for s in lost} - waited - blamed - {-1}
    parts = []
    if gone:
        parts.append(f"{ranks_phrase(gone)} lost the connection to a peer or to the store")
    if waited:
        parts.append(f"{ranks_phrase(waited)} waited for a peer until the timeout")
    if len(gone | waited) > 0:
        parts.append("not at fault")
    if findings.stopped:
        count = len(set(findings.stopped))
        parts.append(f"the launcher stopped {count} other{'s' * (count != 1)}")
    return "; ".join(parts)


# Collectives to which every rank of the group brings as much; the others may rightly differ.
_OF_ONE_SIZE = {"ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BROADCAST", "REDUCE"}


def _different_calls(findings: Findings) -> tuple[list[Sighting], list[tuple[tuple[int, ...], Collective]], bool] | None:
    """Ranks whose watchdog names another call under the same number; and whether the log says that they are of one group."""
    last: dict[int, Sighting] = {}
    for sighting in findings.sightings:
        if sighting.sign is Sign.WATCHDOG and sighting.collective is not None and sighting.speaker.rank >= 0:
            last.setdefault(sighting.speaker.rank, sighting)
    for number in sorted({s.collective.sequence for s in last.values() if s.collective is not None}):
        calls: dict[tuple[str, int], list[Sighting]] = {}
        for sighting in last.values():
            call = sighting.collective
            if call is not None and call.sequence == number:
                calls.setdefault((call.kind, call.elements), []).append(sighting)
        kinds = {kind for kind, _ in calls}
        if len(kinds) < 2 and not (len(calls) > 1 and kinds <= _OF_ONE_SIZE and all(elements >= 0 for _, elements in calls)):
            continue
        groups = [{s.collective.group for s in seen if s.collective is not None and s.collective.group} for seen in calls.values()]
        if any(a and b and not a & b for a in groups for b in groups):
            continue
        told = [(tuple(sorted(s.speaker.rank for s in seen)), seen[0].collective) for seen in calls.values()]
        told.sort(key=lambda one: len(one[0]))
        calls_told = [(ranks, call) for ranks, call in told if call is not None]
        return [s for seen in calls.values() for s in seen], calls_told, all(groups)
    return None


def _unreached(findings: Findings, errors: Sequence[Sighting], lost: Sequence[Sighting]) -> Report | None:
    """The reason why a connection that was given up did not come about, when the log has it: retries that ended well say nothing."""
    told = [(s, s.error.message if s.error is not None else s.text) for s in (*errors, *lost)]
    given_up = [s for s, words in told if "timed out" in words or "failed to connect to any network address" in words]
    reasons = [(s, s.text) for s in findings.sightings if s.sign is Sign.UNREACHED]
    reasons = reasons or [(s, words) for s, words in told if phrases.unreached(words)[0]]
    if not given_up or not reasons:
        return None
    where, number = phrases.unreached(reasons[-1][1])
    if number not in (0, 110, 111, 113):
        return None
    cause = _cause(findings, [reasons[-1][0]], (), confidence="certain")
    return accounts.unreached(msgspec.structs.replace(cause, ranks=()), where, number)


def _cut_off(lost: Sequence[Sighting]) -> tuple[int, ...]:
    """The rank whose connection to torch's store was reset; () when no rank says so, or several do."""
    errors = [s for s in lost if s.error is not None and s.error.type.endswith("DistNetworkError") and "reset by peer" in s.error.message]
    ranks = {_rank(s) for s in errors} - {-1}
    return tuple(ranks) if len(ranks) == 1 else ()


def _absent(findings: Findings, ends: Sequence[Sighting], errors: Sequence[Sighting]) -> tuple[int, ...]:
    """Ranks that the launcher stopped, and that said nothing at all of a peer."""
    stopped = {s.end.rank for s in findings.sightings if s.end is not None and s.end.signal == SIGTERM and s.end.rank >= 0}
    spoke = {_rank(error) for error in errors}
    return tuple(sorted(stopped - spoke - {_end_rank(s.end) for s in ends}))


def _waits_for_own_key(error: Raised) -> bool:
    """Whether the program itself waited for a key: the call that raised stands in its own line."""
    own = bool(error.frames) and not stacks.library(error.frames[-1])
    return own and bool(reading.keys_of_program(error.message))


def _end_rank(end: End | None) -> int:
    return end.rank if end is not None else -1
