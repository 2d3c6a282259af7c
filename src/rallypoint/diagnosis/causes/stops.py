"""What stopped a job when no rank shows a cause: somebody, its time, the launcher, or nobody knows
what.
"""

from __future__ import annotations

import re
import shlex
import signal as signals
from collections.abc import Sequence
from typing import Unpack

from rallypoint.diagnosis import classify, reachability
from rallypoint.diagnosis.causes import collectives, resources
from rallypoint.diagnosis.causes.case import Case, how_ended, node_name, where, whereabouts
from rallypoint.diagnosis.causes.report_form import (
    SAID_LINES,
    Fields,
    account,
    of_end,
    said,
    traceback_said,
    words_before,
)
from rallypoint.diagnosis.causes.wording import CRASHES, EVIDENCE_LINES, cut, signal_name
from rallypoint.diagnosis.error_patterns import known_line, launchers, read_line, slurm_words, torch
from rallypoint.diagnosis.evidence import JobEvidence, Raised, RankEvidence
from rallypoint.diagnosis.log_events import Findings, Sighting, Sign
from rallypoint.diagnosis.report import Help, Report, Said
from rallypoint.world import ranks_phrase


def unknown(case: Case, error: Raised | None) -> Report:
    """Tell that there is nothing but consequences: what was ruled out, and who was the first."""
    job = case.job
    if not case.ranks:
        return account(
            case,
            "cause-unknown",
            "the job was stopped, and no rank shows why",
            why=job.stop_reason or "the cause is not known",
            confidence="certain",
        )
    first = case.first
    evidence = ["no rank was ended by a signal from outside, and none raised an error of its own"]
    if all(node.memory.counted and not node.memory.oom_kills for node in job.nodes):
        evidence.append("the kernel killed nothing in this cgroup for lack of memory")
    helps = [
        Help("read the last lines of every rank", "rallypoint show"),
        Help(
            "or run it again with what torch knows of its connections in them",
            "export TORCH_CPP_LOG_LEVEL=INFO",
        ),
    ]
    did, what = "lost", how_ended(job, first)
    if error is not None and "connectFullMesh" in error.message:
        did = "did not reach"
        evidence.append(
            "gloo had the other ranks' addresses from the store, and one of them did not answer"
        )
        if first.meeting is not None and first.meeting.method != "env://":
            anew = "start the store anew, or meet at another port: one that an earlier job has used keeps the addresses of its ranks"
            helps.insert(0, Help(anew))
    elif error is not None and classify.meaning(error) is classify.Meaning.WAITED:
        did = "waited in vain for"
    if error is not None:
        what = f"{did} another rank ({classify.in_short(error)})"
    return of_end(
        case,
        "cause-unknown",
        f"{case.subject} {what}; the cause is not known",
        where=where(case, first, error) if error else "",
        why="every rank that failed says that it lost another one, or waited for it in vain; this one was the first",
        evidence=evidence,
        said=traceback_said(first, error) if error else said(first, first.said),
        help=helps,
    )


def interrupted(job: JobEvidence, seen: tuple[str, ...] = ()) -> Report:
    """Tell that somebody wanted the job to stop, and where each rank was. `seen`: what keeps those
    who wait from meeting.
    """
    name = job.interrupted_by
    number = getattr(signals, name, signals.SIGTERM) if name.startswith("SIG") else signals.SIGTERM
    by = "Ctrl-C" if name == "SIGINT" else name
    after = f", {job.now:.1f} s after its start" if job.now else ""
    headline = f"the job was stopped by {by}{after}"
    if job.several and job.stop_reason:  # which of the launchers got it
        headline = f"{headline}: {job.stop_reason}"
    return _cut_short(job, "interrupted", headline, seen, exit_status=128 + int(number))


def overdue(job: JobEvidence, seen: tuple[str, ...] = ()) -> Report:
    """Tell that the time of the whole job is over, and where each rank was. `seen` as above."""
    ends = [rank.ended for rank in job.ranks if rank.ended is not None]
    returned = sum(ended.code == ended.signal == 0 for ended in ends)
    more = "give it more time, or None for as long as it takes"
    return _cut_short(
        job,
        "launch-timeout",
        f"{job.program} had returned in {returned} of {job.world_size} ranks when its {job.overdue:g} s were over",
        seen,
        then="the others were stopped" if returned else "they were stopped" if job.ranks else "",
        help=[Help(more, "rallypoint.launch(..., timeout=None)")],
        exit_status=75,
    )


def _cut_short(
    job: JobEvidence,
    code: str,
    headline: str,
    seen: tuple[str, ...],
    **fields: Unpack[Fields],
) -> Report:
    """Make a report about a job that was stopped, with a line for each place where ranks were."""
    case = Case(job, (), "")
    lines = whereabouts(job, job.ranks, case.root)
    fields["why"] = "where the ranks were:" if lines else "no rank had been started"
    fields["evidence"] = (*lines, *seen)
    return account(case, code, headline, **fields)


def launcher_died(job: JobEvidence, then: str) -> Report:
    """Tell that the template, the guard or the c10d host ended by itself."""
    lost = job.helper
    assert lost is not None
    there = next(node for node in job.nodes if node.helper is lost)
    memory, at = there.memory, f" on {node_name(job, there.node)}" if job.several else ""
    ended = lost.ended
    name = signal_name(ended.signal) if ended.signal else ""
    by_signal = bool(name) and ended.signal not in CRASHES
    evidence = [f"it had pid {lost.pid} and ended {ended.at:.2f} s after the job's start"]
    why, certain = "a job cannot go on without it", True
    helps = [Help("if it happens again, report it with this text and the logs")]
    if ended.signal == signals.SIGKILL and resources.for_memory(memory, lost.pid):
        certain = lost.pid in memory.killed_pids
        why = resources.why_killed(memory, certain=False)
        if certain:
            why = "the kernel killed it for lack of memory: its log names the pid"
        evidence += resources.kills_known(memory, "")
        more = "give the job more memory: a process that has imported torch holds a few hundred MiB"
        helps = [Help(more, "docker run --memory=64g ...")]
    elif by_signal:
        helps.clear()
        evidence.append(
            "rallypoint ends it with no signal while a job runs, so another process sent the signal"
        )
    elif memory.address_space:
        evidence.append(resources.may_map(memory))
        helps = [resources.MAP_MORE]
    words = tuple(cut(line) for line in lost.words[-SAID_LINES:])
    return account(
        Case(job, (), then),
        "launcher-died",
        f"rallypoint's {lost.name}{at} {f'was ended by {name}' if name else f'exited with code {ended.code}'}",
        why=why,
        evidence=evidence,
        said=(Said(f"the {lost.name}", words),) if words else (),
        help=helps,
        confidence="certain" if certain else "likely",
        exit_status=128 + ended.signal if by_signal else 70,
    )


# --- of a log
# --------------------------------------------------------------------------------------------------

MOST_SPOKEN = 4  # lines in words that are not known that a report shows
_MORE_TIME = {
    "salloc": ("Slurm", "salloc --time=2-00:00:00"),
    "exceeded": ("PBS", "#PBS -l walltime=48:00:00"),
    "TERM_": ("LSF", "#BSUB -W 48:00"),
    "user-provided": ("mpirun", "mpirun --timeout 172800"),
    "": ("Slurm", "#SBATCH --time=2-00:00:00"),
}
"""Schedulers, by a word of what they say at a job's time limit, and how to ask them for more time."""
_WHOLE_LOG = Help("give the whole log, or the logs of all ranks", "rallypoint explain logs/*.log")
_UNKNOWN_WORDS = "these words name no cause that is known here"


def interrupted_in_log(stop: Sighting) -> Report:
    """Tell that somebody, or the end of the job's time, stopped it, by a log."""
    by, number = stop.end.by, stop.end.signal
    why = f"the log says: {cut(stop.text.strip(), 200)}"
    if by == "A NODE":
        return Report("node-lost", "a node of the job was lost", why=why, logs=stop.place.shown)
    helps = []
    # vLLM raises a KeyboardInterrupt for SIGTERM, too
    what = f"the job was stopped by {'SIGTERM' if stop.error.message == 'terminated' else 'Ctrl-C'}"
    if by == "TIME LIMIT":
        word = next(word for word in _MORE_TIME if word in stop.text)
        what = f"{_MORE_TIME[word][0]} stopped the job: its time was over"
        helps = [Help("ask for more time", _MORE_TIME[word][1])]
    elif by == known_line.SERVICE:
        what = f"{by} stopped the job"
    elif by:
        what = f"Slurm stopped the job: {by.lower()}"
        if host := stop.end.host:
            what = f"{what} on {host}"
            helps = [Help("start it without that node", f"sbatch --exclude={shlex.quote(host)}")]
    elif "First task exited" in stop.text:
        what = "srun ended the job: a rank had left, and the others went on for too long"
        helps = [Help("see what follows from that", "rallypoint explain rank-left-early")]
    elif slurm_words.is_stop(stop.text):
        what = "Slurm stopped the job; for whom is not in the log"
        look = "sacct -j JOBID --format JobID,State,ExitCode,Reason"
        helps = [Help("see how the job and its steps ended", look)]
    elif number == signals.SIGHUP:
        what = "the launcher was stopped by SIGHUP, as when a terminal or ssh connection closes"
        helps = [Help("start it so that it outlives the terminal", "tmux new -s train")]
    elif number and number != signals.SIGINT:
        what = f"the launcher was stopped by {signal_name(number)}"
    why = why if by == known_line.SERVICE else ""
    return Report("interrupted", what, why=why, help=tuple(helps), logs=stop.place.shown)


def ended_by_a_stop(end: Sighting) -> Report:
    """Tell that SIGTERM ended a process, which is all that a log has."""
    return Report(
        "interrupted",
        "a process was stopped by SIGTERM",
        why=f"{end.end.by} says so; who sent it, and whether that was the whole job, is not in the log",
        confidence="likely",
        evidence=(cut(end.text, 200),),
        logs=end.place.shown,
    )


def reported(headline: Sighting) -> Report:
    """Tell of a report of rallypoint's own, which stands in the log of a job that it ran."""
    found = re.search(read_line.REPORTED, headline.text)
    assert found is not None
    again = "see it again, with its timeline and the logs of all ranks"
    return Report(
        code=found[1],
        headline=found[2],
        why="rallypoint's own report stands there, with what led to it",
        help=tuple(Help(again, f"rallypoint show {shlex.quote(one)}") for one in headline.lines),
        logs=headline.place.shown,
    )


def same_rank(count: Sighting) -> Report:
    """Tell that as many processes as the group has came, some of them as the same rank: the others
    stay away.
    """
    return Report(
        code="rank-duplicate",
        headline=f"more than one process came as {ranks_phrase(count.ranks)}, by the lines of Lightning",
        why="each says its rank once, before it meets the others; of an earlier attempt in the same log there is no word",
        evidence=(f"{count.text}; a group waits for each of its ranks",),
        help=(
            Help(
                "see what each process is given, by the same launcher",
                "srun env | grep -e SLURM_PROCID -e SLURM_NTASKS -e NODE_RANK",
            ),
            Help(
                "and start them either by Slurm, one task for each GPU, or by Lightning, one task for each node"
            ),
        ),
        logs=count.place.shown,
        ranks=count.ranks,
        confidence="likely",
    )


def unknown_in_log(case: Case, error: Raised | None) -> Report:
    """Tell that nothing in a log names a cause: what it has, and what is ruled out. `case`: who
    shows a consequence.
    """
    findings = case.job.log
    assert findings is not None
    spoken = [sighting for sighting in findings.sightings if sighting.sign is Sign.SPOKEN]
    if not case.ranks:
        return _in_unknown_words(findings, spoken) if spoken else _nothing(findings)
    first = case.first
    evidence = ["no rank shows an error of its own, and none was ended by a signal from outside"]
    calls: dict[str, list[int]] = {}
    for rank in case.ranks:
        if rank.collective is not None and rank.rank >= 0:
            calls.setdefault(collectives.described(rank.collective), []).append(rank.rank)
    evidence += [f"{ranks_phrase(ranks)} timed out in {call}" for call, ranks in calls.items()]
    before = [s for s in spoken if s.place.log == first.log and s.place.line < first.order]
    evidence[EVIDENCE_LINES:] = [
        f"line {s.place.line}, before that: {cut(s.text, 200)}" for s in before[:MOST_SPOKEN]
    ]
    helps = [_WHOLE_LOG]
    if any(sighting.end.by == "torchrun" for sighting in findings.sightings):
        left = "see whether a rank left early: one that torchrun does not list ended with exit code 0, or is on another node"
        helps.append(Help(left, "rallypoint explain rank-left-early"))
    at = reachability.unreached_at(_words(first, error))
    if at is not None:
        evidence[0] = "refused, dropped and unknown names look the same in torch's message"
        helps = [Help("see whether something answers there", f"nc -vz {at[0]} {at[1]}")]
        if re.search("[A-Za-z]", at[0]):
            helps.insert(0, Help("see whether the name has an address", f"getent hosts {at[0]}"))
    elif calls:
        helps = [
            Help(
                "let NCCL's record of calls be written at the next timeout",
                "export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
            ),
            Help("or see where every rank stands", "rallypoint run --stall 60 ..."),
        ]
    alike = next((ranks for ranks in calls.values() if first.rank in ranks), case.numbers)
    return account(
        case,
        "cause-unknown",
        f"{ranks_phrase(alike) if alike else 'a rank'} {_in_short(case, error)}; the cause is not known",
        why="all that the log has are consequences; this is the first",
        evidence=evidence,
        said=(
            *(traceback_said(first, error) if error is not None else said(first, first.said)),
            *words_before(case, first=True),
        ),
        help=helps,
        ranks=(),
    )


def _words(rank: RankEvidence, error: Raised | None) -> str:
    return error.message if error is not None else " ".join(rank.said)


def _in_short(case: Case, error: Raised | None) -> str:
    call, words = case.first.collective, _words(case.first, error)
    if call is not None:
        return f"waited in {collectives.described(call)} until the timeout of {call.milliseconds / 1000:.0f} s"
    came = torch.CAME_SHORT.search(words)
    if came is not None and came["came"] and int(came["came"]) > int(came["all"]):
        count = f"{came['came']} processes at the store of a group of {came['all']}"
        return f"found {count}: others use it, too, or did before"
    at = reachability.unreached_at(words)
    if at is not None:
        return f"could not reach {at[0]}:{at[1]} in time"
    if error is not None:
        short = classify.in_short(error).removesuffix(": ")
        if launchers.LOST.search(f"{error.type}: {error.message}"):
            return f"failed after something else had ({short})"
        waited = classify.meaning(error) is classify.Meaning.WAITED
        return f"{'waited in vain' if waited else 'lost another rank'} ({short})"
    if case.first.ended is not None:
        ends = [one.ended for one in case.ranks if one.ended is not None]
        told = (signal_name(end.signal) if end.signal else f"exit code {end.code}" for end in ends)
        return f"ended with {' or '.join(dict.fromkeys(told))}"
    short = classify.in_short(Raised("", words, (), "")).removeprefix(": ")
    return f"lost another rank or the store ({cut(short, 160)})"


def _nothing(findings: Findings) -> Report:
    headline = f"nothing in these {findings.lines} lines says that something failed"
    if findings.lines == 1:
        headline = "nothing in this line says why"
    elif findings.failed:
        headline = f"the launcher says that the job failed, and nothing in these {findings.lines} lines says why"
    why = "no exception, no signal, no error of torch, NCCL, Slurm or MPI was recognised"
    helps: tuple[Help, ...] = (_WHOLE_LOG,)
    if findings.stood:
        headline += "; the stacks in it show where the program stood"
        why = "a stack shows where a process waits, and not for what"
        helps = (Help("get those of all ranks: one may stand elsewhere", "py-spy dump --pid PID"),)
    evidence = findings.stood[-EVIDENCE_LINES:]
    return Report("cause-unknown", headline, why=why, evidence=evidence, help=helps)


def in_unknown_words(report: Report) -> bool:
    """Tell whether a report only shows lines that speak of a failure."""
    return report.why == _UNKNOWN_WORDS


def _in_unknown_words(findings: Findings, spoken: Sequence[Sighting]) -> Report:
    """Show the first lines that speak of a failure, where that is all that there is."""
    first = spoken[0]
    helps = [_WHOLE_LOG]
    if any(classify.loader_gone(sighting.text) for sighting in spoken):
        load = "load in the rank itself: then the traceback has the line that failed"
        helps.insert(0, Help(load, "DataLoader(..., num_workers=0)"))
    elif any("eartbeat monitor" in s.text or "watchdog got stuck" in s.text for s in spoken):
        look = (
            "see where every rank stands when it hangs: something holds the GPU, or Python's lock"
        )
        helps.insert(0, Help(look, "py-spy dump --pid PID"))
    several = f", and {len(spoken) - 1} more after it" if len(spoken) > 1 else ""
    headline = f"line {first.place.line} speaks of a failure{several}; the cause is not known"
    if findings.lines == 1:
        headline = "this line speaks of a failure, and does not say why"
    handled = all(sighting.went_on for sighting in spoken)
    lines = tuple(f"{s.place.line}: {cut(s.text, 300)}" for s in spoken[:MOST_SPOKEN])
    return Report(
        "cause-unknown",
        headline,
        why="the log goes on for long after it, so it may have been handled"
        if handled
        else _UNKNOWN_WORDS,
        said=(Said(first.speaker.name or "the log", lines),),
        help=tuple(helps),
        logs=first.place.shown,
    )
