"""What stopped a job when no rank shows a cause: somebody, its time, the launcher, or nobody knows what."""

from __future__ import annotations

import signal as signals

import msgspec

from rallypoint.diagnosis import reading
from rallypoint.diagnosis.accounts import resources
from rallypoint.diagnosis.accounts.cases import Case, how_ended, status_of, where, whereabouts
from rallypoint.diagnosis.accounts.children import mixed_up, spawns
from rallypoint.diagnosis.accounts.form import SAID_LINES, of_end, traceback_said
from rallypoint.diagnosis.accounts.wording import CRASHES, cut, signal_name
from rallypoint.diagnosis.evidence import JobEvidence, Raised
from rallypoint.diagnosis.report import Help, Report, Said


def unknown(case: Case, error: Raised | None) -> Report:
    """Nothing but consequences: what was ruled out, and who was the first."""
    job = case.job
    if not case.ranks:
        return Report(
            code="cause-unknown",
            headline="the job was stopped, and no rank shows why",
            why=job.stop_reason or "the cause is not known",
            then=case.then,
            logs=(job.run_dir,) if job.run_dir else (),
        )
    launchers = [rank.rank for rank in job.ranks if spawns(rank)]
    if error is not None and reading.in_process(error) is not None and len(launchers) > 1:
        return mixed_up(case, error, launchers)
    ruled_out = ["no rank was ended by a signal from outside, and none raised an error of its own"]
    if job.memory.counted and not job.memory.oom_kills:
        ruled_out.append("the kernel killed nothing in this cgroup for lack of memory")
    unanswered = error is not None and "connectFullMesh" in error.message
    if unanswered:
        ruled_out.append("gloo had the other ranks' addresses from the store, and one of them did not answer")
    did = "did not reach" if unanswered else "lost"
    what = f"{did} another rank ({reading.in_short(error)})" if error else how_ended(job, case.first)
    report = of_end(
        case,
        "cause-unknown",
        f"{case.subject} {what}; the cause is not known",
        where=where(case, case.first, error) if error else "",
        why="every rank that failed says that it lost another one; this one was the first",
        evidence=tuple(ruled_out),
        status=status_of(case.first),
        quote=error is None,
    )
    stale: tuple[Help, ...] = ()
    if unanswered and case.first.meeting is not None and case.first.meeting.method != "env://":
        stale = (Help("start the store anew, or meet at another port: one that an earlier job has used keeps the addresses of its ranks"),)
    helps = (
        *stale,
        Help("read the last lines of every rank", "rallypoint show"),
        Help("or run it again with what torch knows of its connections in them", "export TORCH_CPP_LOG_LEVEL=INFO"),
    )
    return msgspec.structs.replace(report, said=traceback_said(case.first, error) if error else report.said, help=helps)


def interrupted(job: JobEvidence, seen: tuple[str, ...] = ()) -> Report:
    """Somebody wanted the job to stop: where each rank was. `seen`: what keeps those who wait from meeting."""
    name = job.interrupted_by
    lines = whereabouts(job, job.ranks, Case(job, job.ranks, "").root)
    number = getattr(signals, name, signals.SIGTERM) if name.startswith("SIG") else signals.SIGTERM
    by = "Ctrl-C" if name == "SIGINT" else name
    after = f", {job.now:.1f} s after its start" if job.now else ""
    return Report(
        code="interrupted",
        headline=f"the job was stopped by {by}{after}",
        why="where the ranks were:" if lines else "no rank had been started",
        evidence=(*lines, *seen),
        logs=(job.run_dir,) if job.run_dir else (),
        exit_status=128 + int(number),
    )


def overdue(job: JobEvidence, seen: tuple[str, ...] = ()) -> Report:
    """The time that the whole job was given is over: where each rank was. `seen` as above."""
    lines = whereabouts(job, job.ranks, Case(job, job.ranks, "").root)
    returned = sum(rank.ended is not None and rank.ended.code == rank.ended.signal == 0 for rank in job.ranks)
    return Report(
        code="launch-timeout",
        headline=f"{job.program} had returned in {returned} of {job.world_size} ranks when its {job.overdue:g} s were over",
        why="where the ranks were:" if lines else "no rank had been started",
        evidence=(*lines, *seen),
        then="" if not lines else "the others were stopped" if returned else "they were stopped",
        help=(Help("give it more time, or None for as long as it takes", "rallypoint.launch(..., timeout=None)"),),
        logs=(job.run_dir,) if job.run_dir else (),
        exit_status=75,
    )


def launcher_died(job: JobEvidence, then: str) -> Report:
    """The template, the guard or the c10d host ended by itself."""
    lost = job.helper
    assert lost is not None
    ended = lost.ended
    by_signal = ended.signal and ended.signal not in CRASHES
    how = f"was ended by {signal_name(ended.signal)}" if ended.signal else f"exited with code {ended.code}"
    evidence = [f"it had pid {lost.pid} and ended {ended.at:.2f} s after the job's start"]
    why = "a job cannot go on without it"
    for_memory = ended.signal == signals.SIGKILL and resources.for_memory(job.memory, lost.pid)
    certain = lost.pid in job.memory.killed_pids or not for_memory
    if for_memory:
        why = (
            "the kernel killed it for lack of memory: its log names the pid" if certain else resources.why_killed(job.memory, certain=False)
        )
        evidence += resources.kills_known(job.memory, "")
    elif by_signal:
        evidence.append("rallypoint ends it with no signal while a job runs, so the signal came from outside")
    helps = () if by_signal else (Help("if it happens again, report it with this text and the logs"),)
    if for_memory:
        helps = (
            Help("give the job more memory: a process that has imported torch holds a few hundred MiB", "docker run --memory=64g ..."),
        )
    return Report(
        code="launcher-died",
        headline=f"rallypoint's {lost.name} {how}",
        why=why,
        evidence=tuple(evidence),
        then=then,
        said=(Said(f"the {lost.name}", tuple(cut(line) for line in lost.words[-SAID_LINES:])),) if lost.words else (),
        help=helps,
        logs=(job.run_dir,) if job.run_dir else (),
        confidence="certain" if certain else "likely",
        exit_status=128 + ended.signal if by_signal else 70,
    )
