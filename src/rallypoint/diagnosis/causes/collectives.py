"""Calls that need every rank: who never came, who called another one, what DDP waits for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.causes.case import (
    NOT_KNOWN,
    Case,
    likely,
    located,
    phase_of,
    status_of,
    was,
)
from rallypoint.diagnosis.causes.report_form import account, logs, timeline, told
from rallypoint.diagnosis.causes.wording import HEADLINE_MESSAGE, cut, listed, named
from rallypoint.diagnosis.evidence import Frame, Raised, RankEvidence
from rallypoint.diagnosis.log_events import Collective, Sighting
from rallypoint.diagnosis.report import Help, Report, Said
from rallypoint.world import ranks_phrase


def missing(case: Case, waiters: Sequence[RankEvidence], error: Raised) -> Report:
    """Some waited until their timeout for `case.ranks`."""
    call = error.call or ("init_process_group" if waiters[0].phase == "joining" else "a collective")
    groups = stacks.group({rank.rank: rank.stack for rank in case.ranks})
    first = next(rank for rank in case.ranks if rank.rank == groups[0].ranks[0])
    lines = []
    for group in groups if len(groups) > 1 else ():
        here = next(rank for rank in case.ranks if rank.rank == group.ranks[0])
        lines.append(
            f"{ranks_phrase(group.ranks)}: {stacks.place(group.frames, case.root) or phase_of(here) or NOT_KNOWN}"
        )
    return account(
        case,
        "ranks-missing",
        f"{ranks_phrase(rank.rank for rank in waiters)} waited in {call} until the timeout; {case.subject} never came",
        where=located(stacks.place(groups[0].frames, case.root) or phase_of(first), first),
        why=f"{case.subject} {was(case.ranks)} still elsewhere when the others' time was up",
        evidence=(*listed(lines), f"rank {waiters[0].rank} raised {named(error)}"),
        help=(
            Help(
                "see where each rank is, and for how long, while the job runs", "rallypoint stacks"
            ),
            Help(
                "or, when what it does there takes that long, let the others wait",
                "dist.init_process_group(timeout=timedelta(hours=1))",
            ),
        ),
    )


def collective_mismatch(case: Case, calls: Mapping[int, tuple[str, Frame]]) -> Report:
    """Ranks that waited for each other in different collectives. `calls`: by rank the collective,
    and the program's line.
    """
    together: dict[tuple[str, str], list[int]] = {}
    for number, (name, frame) in sorted(calls.items()):
        together.setdefault((name, stacks.describe(frame, case.root)), []).append(number)
    groups = sorted(
        together.items(), key=lambda item: (len(item[1]), item[1][0])
    )  # the odd one first
    lines = [f"{ranks_phrase(numbers)}: {name} at {place}" for (name, place), numbers in groups]
    names = list(dict.fromkeys(name for name, _ in together))
    told = f"{', '.join(names[:-1])} and {names[-1]}"
    first = next(rank for rank in case.job.ranks if rank.rank == groups[0][1][0])
    return Report(
        code="collective-mismatch",
        headline=f"the ranks waited for each other in different collectives, {told}, until the timeout",
        where=located(groups[0][0][1], first),
        why="a collective returns when every rank of the group has called it, in the same order",
        evidence=listed(lines),
        then="" if len(case.ranks) == len(case.job.ranks) else case.then,
        help=(
            Help(
                "let every rank make the same calls in the same order, outside of branches that only some take"
            ),
        ),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def sizes_differ(case: Case, error: Raised) -> Report:
    """gloo got more than the rank's own call had asked for: at fault is the rank or the peer, and
    gloo does not say which peer.
    """
    found = classify.says("sizes-differ", error.message)
    assert found is not None
    sent, room = int(found[1]), int(found[2])
    report = told(
        case,
        "collective-mismatch",
        f"{case.subject} got {sent} bytes in {error.call or 'a collective'} where its own call had room for {room}",
        error,
        why="the ranks were in different collectives, or in one with tensors of different sizes; gloo does not say which rank sent it",
        help=(
            Help(
                "let torch compare the calls of all ranks before each of them, and say which differs",
                "export TORCH_DISTRIBUTED_DEBUG=DETAIL",
            ),
            Help(
                "let every rank make the same calls in the same order, with tensors of the same shape and dtype"
            ),
        ),
    )
    ended = case.first.ended
    return (
        msgspec.structs.replace(report, exit_status=status_of(case.first))
        if ended is not None and ended.signal
        else report
    )


def calls_differ(case: Case, error: Raised) -> Report:
    """torch compared the calls of the ranks before they were made, and names two that differ."""
    found = classify.says("calls-differ", error.message)
    assert found is not None
    rank, kind, peer, theirs = int(found[1]), found[2], int(found[3]), found[4]
    what = (
        f"{kind} with tensors that do not match"
        if kind == theirs
        else f"{kind}, and rank {peer} in {theirs}"
    )
    whom = (
        f"ranks {min(rank, peer)} and {max(rank, peer)} were in"
        if kind == theirs
        else f"rank {rank} was in"
    )
    return told(
        case,
        "collective-mismatch",
        f"{whom} {what}",
        error,
        why="every rank of a group must make the same collective calls in the same order, with tensors of one shape and dtype",
        help=(
            Help(
                "look for a branch around a collective, or a loop or a batch whose length differs between ranks"
            ),
        ),
    )


def models_differ(case: Case, error: Raised) -> Report:
    """DDP compares how many parameters each rank has, before it begins."""
    found = classify.says("models-differ", error.message)
    assert found is not None
    rank, number, other, others = (int(group) for group in found.groups())
    nothing = 0 in (number, others)
    why = "DDP averages parameter by parameter, so every rank must build the same model"
    if nothing:
        why = (
            "a model without parameters is also what a rank seems to have when their exchange broke"
        )
    report = told(
        likely(case) if nothing else case,
        "collective-mismatch",
        f"rank {rank} gave DDP a model of {number} parameters, rank {other} one of {others}",
        error,
        why=why,
        help=(
            Help(
                "print in each rank what it builds, before DDP",
                "print(rank, sum(1 for _ in model.parameters()))",
            ),
            Help(
                "and look for what the model depends on that differs: the rank, a file, a version, a seed"
            ),
        ),
    )
    return msgspec.structs.replace(report, ranks=tuple(sorted((rank, other))))


def calls_mismatched(case: Case, error: Raised) -> Report:
    """NCCL itself sees that the ranks' calls differ."""
    found = classify.says("calls-mismatched", error.message)
    assert found is not None
    ranks = (int(found["rank"]),) if found["rank"] else ()
    why = "every rank of a group must make the same collective calls in the same order, with the same sizes"
    if found["local"]:  # of one message, whose size NCCL also works out from its own settings
        case = likely(case)
        why = (
            f"one rank was to get {found['local']} bytes where a peer sent {found['remote']}; "
            "settings of NCCL that differ between nodes do that, too"
        )
    around = f" at or around rank {ranks[0]}" if ranks else ""
    report = told(
        case,
        "collective-mismatch",
        f"NCCL met collectives that do not match{around}",
        error,
        why=why,
        help=(
            _COMPARE_CALLS,
            Help(
                "or let NCCL write down each call",
                "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL",
            ),
        ),
    )
    return msgspec.structs.replace(report, ranks=ranks)


_COMPARE_CALLS = Help(
    "let torch compare the calls, and name them", "export TORCH_DISTRIBUTED_DEBUG=DETAIL"
)


def described(call: Collective) -> str:
    """`ALLREDUCE of 64 elements, call 7`."""
    size = f" of {call.elements} elements" if call.elements >= 0 else ""
    return f"{call.kind}{size}, call {call.sequence}"


def watched_calls_differ(case: Case, calls: Sequence[tuple[tuple[int, ...], Collective]]) -> Report:
    """NCCL's watchdogs name different calls under one number."""
    (some, one), (others, other) = calls[:2]
    headline = f"{ranks_phrase(some)} stood in {one.kind}, {ranks_phrase(others)} in {other.kind}, as call {one.sequence} of one group"
    if one.kind == other.kind:
        brought = f"{ranks_phrase(some)} brought {one.elements} elements"
        headline = f"{brought}, {ranks_phrase(others)} {other.elements}, to {one.kind}, call {one.sequence}"
    sure = case.confidence == "certain"
    return account(
        case,
        "collective-mismatch",
        headline,
        why="every rank of a group must make the same collective calls in the same order, with as much in each"
        if sure
        else "the log does not say that both are of one group",
        evidence=tuple(f"{ranks_phrase(ranks)}: {described(call)}" for ranks, call in calls),
        help=(
            Help(
                "look for a branch around a collective, or a loop whose length differs between ranks"
            ),
            _COMPARE_CALLS,
        ),
    )


def missing_in_log(case: Case, waiters: Case, error: Raised, why: str) -> Report:
    """The same where a log tells it: `case` has those who did not come, `waiters` those who
    waited.
    """
    call, who = error.call or "a collective", waiters.subject
    key = classify.keys_waited_for(error.message)
    if classify.not_met(error.message) >= 0:
        call = "init_process_group"
        why = f"the key that was waited for, {key}, is where rank {case.numbers[0]} leaves its address"
    elif classify.not_at_barrier(error.message):
        call, who = "monitored_barrier", "rank 0"  # only its rank 0 names others
    return Report(
        code="ranks-missing",
        headline=f"{who} waited in {call} until the timeout; {case.subject} never came",
        why=why,
        evidence=(f"{waiters.subject} raised {named(error)}",),
        then=case.then,
        help=(
            Help("see where every rank is while it hangs", "rallypoint run --stall 60 ..."),
            Help(
                "or look into the logs of all ranks and machines", "rallypoint explain logs/*.log"
            ),
        ),
        logs=logs(waiters),
        ranks=case.numbers,
        confidence="likely",
    )


def came_short(case: Case, error: Raised) -> Report:
    """torch's store counts who comes, and does not say who."""
    came, every = classify.came_short(error.message) or (0, 0)
    return Report(
        code="ranks-missing",
        headline=f"{came} of {every} ranks came to init_process_group before the timeout",
        why="who did not come, and why, is not in the log",
        then=case.then,
        help=(
            Help("see how far each rank comes", "rallypoint run --stall 60 ..."),
            Help(
                "or look into the logs of all ranks and machines", "rallypoint explain logs/*.log"
            ),
        ),
        logs=logs(case),
        confidence="likely",
    )


def stalled(stall: Sighting) -> Report:
    """Horovod lists the calls that some ranks are in; whom it waits for it says in newer versions
    only.
    """
    call = stall.collective.kind if stall.collective is not None else ""
    named = any("[missing ranks" in line for line in stall.lines)
    whom = ranks_phrase(stall.ranks) if stall.ranks else "some ranks"
    what = "have not come" if named else "wait for the others"
    where = f" to {call}" if named and call else f" in {call}" if call else ""
    return Report(
        code="ranks-missing",
        headline=f"{whom} {what}{where}, by Horovod's list of what stalls",
        why="it is a warning: they may have come later, and the log does not say that the job ended",
        said=(Said(stall.speaker.name or "Horovod", tuple(cut(line) for line in stall.lines)),),
        help=(
            Help("see where every rank is while it hangs", "py-spy dump --pid PID"),
            Help(
                "or end the job when that happens, so that it does not wait for ever",
                "export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=600",
            ),
        ),
        logs=stall.place.shown,
        ranks=stall.ranks if named else (),
        confidence="likely",
    )


_NCCL_CONNECT = re.compile(r"[Cc]onnect(?:ion)? (?:to|with|from) \S+ failed")


def nccl_failed(case: Case, error: Raised) -> Report:
    """NCCL returned an error, and no rank shows another cause: its own last words are all
    there is.
    """
    warning = error.type == classify.NCCL_WARNING
    words = error.message if warning else classify.nccl_words(error.message)
    lost = classify.nccl_names_peer(error.message)
    why = (
        "NCCL also fails where another rank has died, and no rank shows that"
        if lost
        else "no rank shows another cause before it"
    )
    report = told(
        case if case.confidence != "certain" else likely(case),
        "nccl-failed",
        f"NCCL failed in {case.subject}: {cut(words, HEADLINE_MESSAGE)}",
        error,
        why=why,
        evidence=("the log has NCCL's own warning",) if warning else (),
        help=nccl_helps(words),
    )
    return msgspec.structs.replace(report, timeline=timeline(case))


def nccl_helps(words: str) -> tuple[Help, ...]:
    """What to do by NCCL's own words."""
    more = Help("run again with its own words", "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET")
    if _NCCL_CONNECT.search(words):
        return (
            Help(
                "name the network interface that the machines reach each other by",
                "export NCCL_SOCKET_IFNAME=eth0",
            ),
            more,
        )
    if "/dev/shm" in words:
        return (
            Help("see how large shared memory is, and what fills it", "df -h /dev/shm"),
            Help("give the container more of it", "docker run --shm-size=8g ..."),
            more,
        )
    return (more,)


def parameters_unused(case: Case, error: Raised) -> Report:
    """DDP waits in each step for the gradients of the step before, and some were never made."""
    names = re.search(
        r"Parameters which did not receive grad for rank \d+: *([^\n]+)", error.message
    )
    numbers = re.search(
        r"Parameter indices which did not receive grad for rank \d+: *([\d ]+)", error.message
    )
    which = (
        names.group(1)
        if names
        else f"parameters number {', '.join(numbers.group(1).split())}"
        if numbers
        else ""
    )
    evidence = (f"without gradient: {cut(which, HEADLINE_MESSAGE)}",) if which else ()
    helps: tuple[Help, ...] = (
        Help(
            "let every parameter take part in the loss, or freeze those that do not, before DDP",
            "parameter.requires_grad_(False)",
        ),
        Help(
            "or let DDP look for them in every step, which costs a pass over the graph",
            "DDP(model, find_unused_parameters=True)",
        ),
    )
    if not names:
        helps = (Help("see their names", "export TORCH_DISTRIBUTED_DEBUG=DETAIL"), *helps)
    return told(
        case,
        "parameters-unused",
        f"DDP in {case.subject} waits for gradients that the last step did not make",
        error,
        why="some parameters of the model took no part in the loss of the step before, and DDP averages all of them",
        evidence=evidence,
        help=helps,
    )
