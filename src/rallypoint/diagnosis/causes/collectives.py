"""Calls that need every rank: who never came, who called another one, what DDP waits for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.causes import resources
from rallypoint.diagnosis.causes.case import (
    NOT_KNOWN,
    Case,
    likely,
    located,
    phase_of,
    status_of,
    subject,
    was,
)
from rallypoint.diagnosis.causes.report_form import account, timeline
from rallypoint.diagnosis.causes.wording import HEADLINE_MESSAGE, cut, listed, named
from rallypoint.diagnosis.error_patterns import python
from rallypoint.diagnosis.evidence import Frame, Raised, RankEvidence
from rallypoint.diagnosis.log_events import Collective, Sighting
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report, Said
from rallypoint.world import ranks_phrase


def missing(
    case: Case, waiters: Sequence[RankEvidence], error: Raised, late: Mapping[int, float]
) -> Report:
    """Tell that ranks waited for `case.ranks` until their timeout. `late`: by rank, seconds from
    that timeout until it came; a rank that never came is not in it.
    """
    call = error.call or ("init_process_group" if waiters[0].phase == "joining" else "a collective")
    by_rank = {rank.rank: rank for rank in case.ranks}
    places = [
        (group.ranks, stacks.place(group.frames, case.root) or phase_of(by_rank[group.ranks[0]]))
        for group in stacks.group({rank.rank: rank.stack for rank in case.ranks})
    ]
    lines = [f"{ranks_phrase(ranks)}: {place or NOT_KNOWN}" for ranks, place in places]
    (first, *_), place = places[0]
    helps = [
        Help("see where each rank is, and for how long, while the job runs", "rallypoint stacks"),
        Help(
            "or, when what it does there takes that long, let the others wait",
            "dist.init_process_group(timeout=timedelta(hours=1))",
        ),
    ]
    wait_too = not late and all(stacks.in_distributed(rank.stack) for rank in case.ranks)
    if wait_too or any(rank.halted_by or rank.dead_child for rank in case.ranks):
        del helps[1]  # no time is enough
    if any(rank.dead_child and stacks.waits_in_pool(rank.stack) for rank in case.ranks):
        broken = "use a pool that raises BrokenProcessPool when it loses a process"
        helps = [Help(broken, "concurrent.futures.ProcessPoolExecutor()")]
    came = "did not come in time" if late else "never came"
    came = "came too late" if late.keys() >= by_rank.keys() else came
    still = "elsewhere when the others' time was up"
    if waiters[0].phase != "joining" and all(rank.phase == "joining" for rank in case.ranks):
        still = "in init_process_group, which a rank leaves when it has reached all others"
    return account(
        case,
        "ranks-missing",
        f"{ranks_phrase(rank.rank for rank in waiters)} waited in {call} until the timeout; {case.subject} {came}",
        where=located(place, by_rank[first]),
        why=f"{case.subject} {was(case.ranks)} still {still}",
        evidence=(
            *(listed(lines) if len(lines) > 1 else ()),
            *(f"rank {rank} came {s:.2f} s after the timeout" for rank, s in late.items()),
            f"rank {waiters[0].rank} raised {named(error)}",
        ),
        help=helps,
    )


def collective_mismatch(case: Case, calls: Mapping[int, tuple[str, Frame]]) -> Report:
    """Tell of ranks that waited for each other in different collectives. `calls`: by rank the
    collective, and the program's line.
    """
    root = case.root
    together: dict[tuple[str, str], list[int]] = {}
    for number, (name, frame) in sorted(calls.items()):
        together.setdefault((name, stacks.describe(frame, root)), []).append(number)
    # The odd one first.
    groups = sorted(together.items(), key=lambda item: (len(item[1]), item[1][0]))
    (_, place), (odd, *_) = groups[0]
    names = list(dict.fromkeys(name for name, _ in together))
    first = next(rank for rank in case.job.ranks if rank.rank == odd)
    return account(
        case,
        "collective-mismatch",
        f"the ranks waited for each other in different collectives, {', '.join(names[:-1])} and {names[-1]}, until the timeout",
        where=located(place, first),
        why="a collective returns when every rank of the group has called it, in the same order",
        evidence=listed([f"{ranks_phrase(ranks)}: {name} at {at}" for (name, at), ranks in groups]),
        then="" if len(case.ranks) == len(case.job.ranks) else case.then,
        help=[
            Help(
                "let every rank make the same calls in the same order, outside of branches that only some take"
            )
        ],
    )


def sizes_differ(case: Case, error: Raised) -> Report:
    """Tell that gloo got more than the rank's own call had asked for: at fault is the rank or the
    peer, and gloo does not say which peer.
    """
    found = classify.words_of("sizes-differ", error)
    ended = case.first.ended
    return account(
        case,
        "collective-mismatch",
        f"{case.subject} got {found[1]} bytes in {error.call or 'a collective'} where its own call had room for {found[2]}",
        error,
        why="the ranks were in different collectives, or in one with tensors of different sizes; gloo does not say which rank sent it",
        help=(
            Help(
                "let torch compare the calls of all ranks, and say which differs (not with DDP: torch 2.13 with gloo crashes)",
                "export TORCH_DISTRIBUTED_DEBUG=DETAIL",
            ),
            Help(
                "let every rank make the same calls in the same order, with tensors of the same shape and dtype"
            ),
        ),
        exit_status=status_of(case.first) if ended is not None and ended.signal else 1,
    )


def calls_differ(case: Case, error: Raised) -> Report:
    """Tell that torch compared the calls of the ranks before they were made, and names two that
    differ.
    """
    found = classify.words_of("calls-differ", error)
    rank, kind, peer, theirs = found.groups()
    headline = f"rank {rank} was in {kind}, and rank {peer} in {theirs}"
    if peer is None:
        headline = f"rank {rank} was in {kind}, and another rank in another call, or with a tensor that does not match"
    elif kind == theirs:
        headline = (
            f"{ranks_phrase((int(rank), int(peer)))} were in {kind} with tensors that do not match"
        )
    places: dict[str, list[int]] = {}
    for one in case.job.ranks if case.job.log is None else ():
        frames = one.raised.frames if one.raised is not None else one.stack
        places.setdefault(stacks.place(frames, case.root) or NOT_KNOWN, []).append(one.rank)
    odd_first = sorted(places.items(), key=lambda item: len(item[1]))
    look = "look for a branch around a collective, or a loop or a batch whose length differs between ranks"
    return account(
        case,
        "collective-mismatch",
        headline,
        error,
        why="every rank of a group must make the same collective calls in the same order, with tensors of one shape and dtype",
        evidence=listed([f"{ranks_phrase(ranks)}: {at}" for at, ranks in odd_first]),
        help=[Help(look)],
    )


def models_differ(case: Case, error: Raised) -> Report:
    """Tell that DDP compared the parameters of the ranks, before it began, and they differ."""
    found = classify.words_of("models-differ", error)
    rank, number, other, others = (int(one or -1) for one in found.groups()[:4])
    nothing = 0 in (number, others)
    why = "DDP averages parameter by parameter, so every rank must build the same model"
    if nothing:
        why = "no parameters are also what a rank seems to have when their exchange broke"
    headline = f"rank {rank} gave DDP a model of {number} parameters, rank {other} one of {others}"
    if found["which"]:
        there = f"{found['which']} has {found['sizes']} there"
        headline = f"{case.subject} gave DDP another model than the group's first rank: {there}"
    build = "print(rank, [tuple(one.shape) for one in model.parameters()])"
    differs = (
        "and look for what the model depends on that differs: the rank, a file, a version, a seed"
    )
    return account(
        likely(case) if nothing else case,
        "collective-mismatch",
        headline,
        error,
        why=why,
        help=(Help("print in each rank what it builds, before DDP", build), Help(differs)),
        ranks=case.numbers if found["which"] else tuple(sorted((rank, other))),
    )


def calls_mismatched(case: Case, error: Raised) -> Report:
    """Tell that a library itself sees that the ranks' calls differ, mostly NCCL."""
    found = classify.words_of("calls-mismatched", error)
    rank = found["rank"]
    why = "every rank of a group must make the same collective calls in the same order, with the same sizes"
    if found["local"]:  # of one message, whose size NCCL also works out from its own settings
        case = likely(case)
        sent = f"one rank was to get {found['local']} bytes where a peer sent {found['remote']}"
        why = f"{sent}; settings of NCCL that differ between nodes do that, too"
    headline = (
        f"NCCL met collectives that do not match{f' at or around rank {rank}' if rank else ''}"
    )
    if found["told"]:
        headline = f"the ranks gave one call tensors that do not match: {found['told']}"
    write = Help(
        "or let NCCL write down each call", "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL"
    )
    return account(
        case,
        "collective-mismatch",
        headline,
        error,
        why=why,
        help=(_COMPARE_CALLS, write),
        ranks=(int(rank),) if rank else (),
    )


def all_waited(case: Case, call: str, error: Raised) -> Report:
    """Tell that all ranks stood in calls of one name until the timeout: calls that did not match, or
    packets that did not arrive.
    """
    steps = Help("and compare how many steps, and which shapes, each rank has at that line")
    return account(
        case,
        "cause-unknown",
        f"{case.subject} waited in {call} until the timeout; the cause is not known",
        error,
        why="every rank was in the call: their calls may not match (different numbers of steps or tensor sizes), or the network drops packets",
        help=(_COMPARE_CALLS, steps),
    )


_COMPARE_CALLS = Help(
    "let torch compare the calls, and name them (not with DDP: torch 2.13 with gloo crashes)",
    "export TORCH_DISTRIBUTED_DEBUG=DETAIL",
)


def described(call: Collective) -> str:
    """Return `ALLREDUCE of 64 elements, call 7`."""
    size = f" of {call.elements} elements" if call.elements >= 0 else ""
    return f"{call.kind}{size}, call {call.sequence}"


def watched_calls_differ(
    case: Case, calls: Sequence[tuple[tuple[int, ...], Collective]], odd: tuple[int, ...]
) -> Report:
    """Tell that NCCL's watchdogs name different calls under one number."""
    (some, one), (others, other) = calls[:2]
    headline = f"{ranks_phrase(some)} stood in {one.kind}, {ranks_phrase(others)} in {other.kind}, as call {one.sequence} of one group"
    if one.kind == other.kind:
        brought = f"{ranks_phrase(some)} brought {one.elements} elements, {ranks_phrase(others)} {other.elements}"
        headline = f"{brought}, to {one.kind}, call {one.sequence}"
    sure = case.confidence == "certain"
    look = "look for a branch around a collective, or a loop whose length differs between ranks"
    return account(
        case,
        "collective-mismatch",
        headline,
        why="every rank of a group must make the same collective calls in the same order, with as much in each"
        if sure
        else "the log does not say that both are of one group",
        evidence=[f"{ranks_phrase(ranks)}: {described(call)}" for ranks, call in calls],
        then="",
        help=(Help(look), _COMPARE_CALLS),
        ranks=odd,
    )


_IN_LOGS = (
    Help("see where every rank is while it hangs", "rallypoint run --stall 60 ..."),
    Help("or look into the logs of all ranks and machines", "rallypoint explain logs/*.log"),
)


def missing_in_log(case: Case, absent: tuple[int, ...], error: Raised, why: str) -> Report:
    """Tell the same where a log tells it: `case` has those who waited, `absent` the others."""
    call, who = error.call or "a collective", case.subject
    if classify.not_met(error.message) >= 0:
        key = classify.keys_waited_for(error.message)
        call = "init_process_group"
        why = f"the key that was waited for, {key}, is where rank {absent[0]} leaves its address"
    elif classify.not_at_barrier(error.message):
        call, who = "monitored_barrier", "rank 0"  # only its rank 0 names others
    return account(
        likely(case),
        "ranks-missing",
        f"{who} waited in {call} until the timeout; {subject(absent, case.job.world_size)} never came",
        why=why,
        evidence=[f"{case.subject} raised {named(error)}"],
        help=_IN_LOGS,
        ranks=absent,
    )


def came_short(case: Case, error: Raised) -> Report:
    """Tell how many ranks came by torch's store, which counts them, and does not say which."""
    came, every = classify.came_short(error.message) or (0, 0)
    return account(
        likely(case),
        "ranks-missing",
        f"{came} of {every} ranks came to init_process_group before the timeout",
        why="who did not come, and why, is not in the log",
        help=_IN_LOGS,
        ranks=(),
    )


def stalled(stall: Sighting) -> Report:
    """Tell of the calls that Horovod lists. Newer versions name the ranks that are missing."""
    call = stall.collective.kind if stall.collective is not None else ""
    named = any("[missing ranks" in line for line in stall.lines)
    whom = ranks_phrase(stall.ranks) if stall.ranks else "some ranks"
    what = "have not come to" if named else "wait for the others in"
    return Report(
        "ranks-missing",
        f"{whom} {what} {call or 'a collective'}, by Horovod's list of what stalls",
        why="it is a warning: they may have come later, and the log does not say that the job ended",
        said=(Said(stall.speaker.name or "Horovod", tuple(map(cut, stall.lines))),),
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


_NCCL_CONNECT = Pattern(r"[Cc]onnect(?:ion)? (?:to|with|from) \S+ failed")


def nccl_failed(case: Case, error: Raised) -> Report:
    """Tell that NCCL returned an error, and no rank shows another cause than its last words."""
    warning = error.type == classify.NCCL_WARNING
    words = error.message if warning else classify.nccl_words(error.message)
    why = "no rank shows another cause before it"
    if classify.nccl_names_peer(error.message):
        why = "NCCL also fails where another rank has died, and no rank shows that"
    more = Help("run again with its own words", "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET")
    helps = [more]
    if _NCCL_CONNECT.search(words):
        name = "name the network interface that the machines reach each other by"
        helps = [Help(name, "export NCCL_SOCKET_IFNAME=eth0"), more]
    elif python.NOT_LOCKED.search(words):
        why = "NCCL locks the network card's buffers in memory; mostly the limit on locked memory (ulimit -l) is too low for that"
        helps = [*resources.LOCK_MORE]
    elif "/dev/shm" in words or "shared memory segment" in words:
        helps = [
            Help("see how large shared memory is, and what fills it", "df -h /dev/shm"),
            Help("give the container more of it", "docker run --shm-size=8g ..."),
            more,
        ]
    return account(
        case if case.confidence != "certain" else likely(case),
        "nccl-failed",
        f"NCCL failed in {case.subject}: {cut(words, HEADLINE_MESSAGE)}",
        error,
        why=why,
        evidence=["the log has NCCL's own warning"] if warning else (),
        help=helps,
        timeline=timeline(case),
    )


def parameters_unused(case: Case, error: Raised) -> Report:
    """Tell that DDP waits in each step for the gradients of the step before, and some were never
    made.
    """
    names = re.search(
        r"Parameters which did not receive grad for rank \d+: *([^\n]+)", error.message
    )
    numbers = re.search(
        r"Parameter indices which did not receive grad for rank \d+: *([\d ]+)", error.message
    )
    which = names[1] if names else ""
    if numbers and not names:
        which = f"parameters number {', '.join(numbers[1].split())}"
    helps = [
        Help(
            "let every parameter take part in the loss, or freeze those that do not, before DDP",
            "parameter.requires_grad_(False)",
        ),
        Help(
            "or let DDP look for them in every step, which costs a pass over the graph",
            "DDP(model, find_unused_parameters=True)",
        ),
    ]
    if not names:
        helps.insert(0, Help("see their names", "export TORCH_DISTRIBUTED_DEBUG=INFO"))
    return account(
        case,
        "parameters-unused",
        f"DDP in {case.subject} waits for gradients that the last step did not make",
        error,
        why="some parameters of the model took no part in the loss of the step before, and DDP averages all of them",
        evidence=[f"without gradient: {cut(which, HEADLINE_MESSAGE)}"] if which else (),
        help=helps,
    )
