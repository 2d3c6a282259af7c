"""Calls that need every rank: who never came, who called another one, what DDP waits for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from rallypoint.diagnosis import reading, stacks
from rallypoint.diagnosis.accounts.cases import NOT_KNOWN, Case, located, phase_of, status_of, was
from rallypoint.diagnosis.accounts.form import logs, timeline, told
from rallypoint.diagnosis.accounts.wording import HEADLINE_MESSAGE, cut, listed, named
from rallypoint.diagnosis.evidence import Frame, Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase


def missing(case: Case, waiters: Sequence[RankEvidence], error: Raised) -> Report:
    """Some waited until their timeout for `case.ranks`."""
    call = error.call or ("init_process_group" if waiters[0].phase == "joining" else "a collective")
    groups = stacks.group({rank.rank: rank.stack for rank in case.ranks})
    first = next(rank for rank in case.ranks if rank.rank == groups[0].ranks[0])
    lines = []
    for group in groups if len(groups) > 1 else ():
        here = next(rank for rank in case.ranks if rank.rank == group.ranks[0])
        lines.append(f"{ranks_phrase(group.ranks)}: {stacks.place(group.frames, case.root) or phase_of(here) or NOT_KNOWN}")
    return Report(
        code="ranks-missing",
        headline=f"{ranks_phrase(rank.rank for rank in waiters)} waited in {call} until the timeout; {case.subject} never came",
        where=located(stacks.place(groups[0].frames, case.root) or phase_of(first), first),
        why=f"{case.subject} {was(case.ranks)} still elsewhere when the others' time was up",
        evidence=(*listed(lines), f"rank {waiters[0].rank} raised {named(error)}"),
        then=case.then,
        help=(
            Help("see where each rank is, and for how long, while the job runs", "rallypoint stacks"),
            Help("or, when what it does there takes that long, let the others wait", "dist.init_process_group(timeout=timedelta(hours=1))"),
        ),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def collective_mismatch(case: Case, calls: Mapping[int, tuple[str, Frame]]) -> Report:
    """Ranks that waited for each other in different collectives. `calls`: by rank the collective, and the program's line."""
    together: dict[tuple[str, str], list[int]] = {}
    for number, (name, frame) in sorted(calls.items()):
        together.setdefault((name, stacks.describe(frame, case.root)), []).append(number)
    groups = sorted(together.items(), key=lambda item: (len(item[1]), item[1][0]))  # the odd one first
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
        help=(Help("let every rank make the same calls in the same order, outside of branches that only some take"),),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def sizes_differ(case: Case, error: Raised, sent: int, room: int) -> Report:
    """gloo got more than the rank's own call had asked for: at fault is the rank or the peer, and gloo does not say which peer."""
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
            Help("let every rank make the same calls in the same order, with tensors of the same shape and dtype"),
        ),
    )
    ended = case.first.ended
    return msgspec.structs.replace(report, exit_status=status_of(case.first)) if ended is not None and ended.signal else report


def calls_differ(case: Case, error: Raised, one: tuple[int, str], other: tuple[int, str]) -> Report:
    """torch compared the calls of the ranks before they were made. Each of the two is a rank and its collective."""
    (rank, kind), (peer, theirs) = one, other
    what = f"{kind} with tensors that do not match" if kind == theirs else f"{kind}, and rank {peer} in {theirs}"
    whom = f"ranks {min(rank, peer)} and {max(rank, peer)} were in" if kind == theirs else f"rank {rank} was in"
    return told(
        case,
        "collective-mismatch",
        f"{whom} {what}",
        error,
        why="every rank of a group must make the same collective calls in the same order, with tensors of one shape and dtype",
        help=(Help("look for a branch around a collective, or a loop or a batch whose length differs between ranks"),),
    )


_NCCL_CONNECT = re.compile(r"[Cc]onnect(?:ion)? (?:to|with|from) \S+ failed")


def nccl_failed(case: Case, error: Raised) -> Report:
    """NCCL returned an error, and no rank shows another cause: its own last words are all there is."""
    words = reading.nccl_words(error.message)
    lost = reading.nccl_names_peer(error.message)
    why = "NCCL also fails where another rank has died, and no rank shows that" if lost else "no rank shows another cause before it"
    report = told(
        case if case.confidence != "certain" else msgspec.structs.replace(case, confidence="likely"),
        "nccl-failed",
        f"NCCL failed in {case.subject}: {cut(words, HEADLINE_MESSAGE)}",
        error,
        why=why,
        help=nccl_helps(words),
    )
    return msgspec.structs.replace(report, timeline=timeline(case))


def nccl_helps(words: str) -> tuple[Help, ...]:
    """What to do by NCCL's own words."""
    more = Help("run again with its own words", "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET")
    if _NCCL_CONNECT.search(words):
        return (Help("name the network interface that the machines reach each other by", "export NCCL_SOCKET_IFNAME=eth0"), more)
    if "/dev/shm" in words:
        return (
            Help("see how large shared memory is, and what fills it", "df -h /dev/shm"),
            Help("give the container more of it", "docker run --shm-size=8g ..."),
            more,
        )
    return (more,)


def parameters_unused(case: Case, error: Raised) -> Report:
    """DDP waits in each step for the gradients of the step before, and some were never made."""
    names = re.search(r"Parameters which did not receive grad for rank \d+: *([^\n]+)", error.message)
    numbers = re.search(r"Parameter indices which did not receive grad for rank \d+: *([\d ]+)", error.message)
    which = names.group(1) if names else f"parameters number {', '.join(numbers.group(1).split())}" if numbers else ""
    evidence = (f"without gradient: {cut(which, HEADLINE_MESSAGE)}",) if which else ()
    helps: tuple[Help, ...] = (
        Help("let every parameter take part in the loss, or freeze those that do not, before DDP", "parameter.requires_grad_(False)"),
        Help("or let DDP look for them in every step, which costs a pass over the graph", "DDP(model, find_unused_parameters=True)"),
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
