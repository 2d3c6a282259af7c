"""An exception that left the program, or that it caught: which account tells of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from rallypoint.diagnosis import classify, reachability, stacks, tracebacks
from rallypoint.diagnosis.causes import children, collectives, gpus, rendezvous, resources
from rallypoint.diagnosis.causes.case import (
    Case,
    again,
    phase_of,
    python_of,
    went_home,
    where,
    whereabouts,
)
from rallypoint.diagnosis.causes.exception_help import help_for
from rallypoint.diagnosis.causes.report_form import account, timeline
from rallypoint.diagnosis.causes.wording import HEADLINE_OURS, first_line, listed, named
from rallypoint.diagnosis.evidence import Raised, RankEvidence
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase


def raised(case: Case, error: Raised | None) -> Report:
    """Tell of an exception that left the program: by what it says, one of several codes."""
    assert error is not None
    rank = case.first
    if (foreign := reachability.of_words(error, rank.meeting)) is not None:
        reached = case.node.reached
        if reached is None or reached.outcome != "answered":
            reached = foreign
        return reachability.report(case, reached, error)
    # torch says it a moment later: in the rank's last words, or in what its signal handler raised
    # over the exception that began the chain. Or a moment before: what the handler raises in the
    # middle of a library is sometimes caught there, and only logged.
    gone = classify.fits("producer-gone", error)
    worker = classify.says_loader_killed((*rank.said, *error.traceback.splitlines()))
    if worker is not None and (gone or worker[0] in classify.loader_gone(error.message)):
        return children.loader_killed(case, error, *worker)
    if gone and any(classify.says("files-exhausted", line) for line in rank.said):
        return resources.files_exhausted(case, error)
    if error.code:
        return _known(case, error)
    if (inside := tracebacks.in_process(error)) is not None:
        return _in_process(case, *inside)
    if (asked := tracebacks.by_rpc(error)) is not None:
        return _by_rpc(case, *asked)
    tell = _TELLS.get(classify.cause_of(error))
    if tell is not None:
        return tell(case, error)
    if starts_nothing(case.job.program, error):
        return _start_failed(case, error)
    kind, colon, words = named(error).partition(": ")
    evidence = [*listed(_words_of_others(case, error))]
    speaker = f", rank {rank.rank}" if evidence and colon and rank.rank >= 0 else ""
    headline = f"{case.subject} raised {kind}{speaker}{colon}{words}"
    helps, memory, why = help_for(error, case.job), case.node.memory, ""
    killed = _KILLED.search(error.message)
    if killed and memory.oom_kills:
        why = resources.why_killed(memory, certain=False)
        evidence += resources.kills_known(memory, "")
        helps = (*resources.less_memory(case.job), *helps)
    elif killed:
        evidence += resources.no_kill_known(memory, "a process")
        helps = (*resources.ask_the_kernel(memory), *helps)
    return account(case, "rank-raised", headline, error, why=why, evidence=evidence, help=helps)


_KILLED = Pattern(r"signal SIGKILL|Signals\.SIGKILL|exit ?code[:=]? ?-9\b|[Kk]illed by signal 9")
"""Words about a process that SIGKILL ended, as mp.spawn, subprocess and libraries have them."""


def _words_of_others(case: Case, error: Raised) -> list[str]:
    """Return the messages of other ranks that raised the same type at the same line, where they
    differ from the first rank's: "rank 2: sample 7 is bad". Memory addresses are not compared.
    """
    told: dict[str, list[int]] = {}
    for rank in case.ranks:
        own = rank.raised if told else error
        if own is not None and own.type == error.type:
            said = re.sub("0x[0-9a-f]+", "0x", first_line(own.message))
            told.setdefault(said, []).append(rank.rank)
    _, *others = told.items()
    return [
        f"{'another' if ranks[0] < 0 else ranks_phrase(ranks)}: {words}"
        for words, ranks in others
        if words
    ]


def _no_input(case: Case, error: Raised) -> Report:
    """Tell of `input()` in a rank, or of a debugger: there is one terminal, and many ranks."""
    why = "rank 0 reads the launcher's standard input (--debug-rank chooses another rank), and all others read /dev/null"
    ask = "ask in that rank alone, or before, and give the others the answer"
    command = "dist.broadcast_object_list(answer)"
    if case.job.function:
        why = "a rank's standard input is /dev/null"
        ask = "ask before the launch, and pass the answer to the function"
        command = "rallypoint.launch(train, (answer,), nproc=2)"
    elif case.numbers == (0,):
        why = "rank 0 reads the launcher's standard input (--debug-rank chooses another rank): it was at its end, as in cron and under nohup"
        ask = "start it from a terminal, or write the answers into its input"
        command = "printf 'yes\\n' | rallypoint run ..."
    return account(
        case,
        "rank-raised",
        f"{case.subject} raised {named(error)}",
        error,
        why=why,
        help=[Help(ask, command)],
    )


def never_set(case: Case, error: Raised) -> Report:
    """Tell of a wait for a key of torch's store, while nobody shows that it was to set that key."""
    report, keys = raised(case, error), classify.keys_of_program(error.message)
    if not keys:
        return report
    named = ", ".join(f'"{key}"' for key in keys)
    what = f"nobody set {named}" if len(keys) == 1 else f"{named} were not all set"
    return replace(report, why=f"{what} in time, and no rank shows who was to")


def swallowed(case: Case, error: Raised | None) -> Report:
    """Tell of an error in a shared call that the program caught before it went home."""
    assert error is not None
    rank, clause = case.first, error.caught_at
    call = error.call or "a call of torch.distributed"
    did, seen = f"caught an error of {call} and left: {named(error)}", f"{call} was called"
    if error.on_its_way:
        did, seen = f"caught {named(error)} and left", "it was raised"
    code = rank.ended.code if rank.ended is not None else 0
    left = f"ended with exit code {code}" if code else went_home(case.job, rank)
    by = f"{stacks.shown(clause.file, case.root)}:{clause.line}" if clause else "the program"
    evidence = [gpus.lack_and_facts(case.node.devices)[0]]
    # The traceback of an exception that is still on its way has no frame of the program: it begins
    # at the call.
    if any(not stacks.library(frame) for frame in error.frames):
        evidence.insert(0, f"{seen} at {stacks.place(error.frames, case.root)}")
    at = f"{stacks.describe(clause, case.root)}, pid {rank.pid}" if clause else ""
    return account(
        case,
        "error-swallowed",
        f"{case.subject} {did}",
        error,
        where=at or where(case, rank, error),
        why=f"{by} caught it; the rank then {left} while others waited",
        evidence=filter(None, evidence),
        help=[
            Help("let the exception leave the program, or end with a code that is not 0", "raise")
        ],
        timeline=timeline(case),
    )


def on_its_way(case: Case, error: Raised | None) -> Report:
    """Tell of an exception that was seen while the program closed its group, and the others lost
    the rank, or waited where they did not come. It has not left the program yet.
    """
    assert error is not None
    report = raised(case, error)
    told = f"it was on its way when {case.subject} closed the process group, which ends the others' collectives"
    if not error.on_its_way:
        place = stacks.place(case.first.stack, case.root)
        told = f"{case.subject} came to {place} while it handled it; the others waited elsewhere"
    evidence = [*report.evidence, told]
    if error.caught_at is not None:
        evidence.append(f"{stacks.describe(error.caught_at, case.root)} may catch it")
    why = report.why or "it had not left the program yet when the others had failed"
    return replace(report, why=why, evidence=tuple(evidence), confidence="likely")


def starts_nothing(program: str, error: Raised) -> bool:
    """Tell whether the exception says that the program itself could not begin: it does not compile,
    or is not found.
    """
    short = error.type.rpartition(".")[2]
    typed = program.removeprefix("./")
    if short in ("SyntaxError", "IndentationError", "TabError"):
        return error.filename == program or error.filename.endswith("/" + typed)
    if not all(stacks.hidden(frame) for frame in error.frames):
        return False
    if short in ("ModuleNotFoundError", "ImportError"):
        return program.split(".")[0] in re.split(r"[\s'.]+", error.message)
    missing = short in ("FileNotFoundError", "PermissionError", "IsADirectoryError")
    return missing and error.filename.endswith(typed)


def _start_failed(case: Case, error: Raised) -> Report:
    helps = []
    if error.type == "ModuleNotFoundError":
        near = re.search(r"; (?:the nearest is|it has) ([\w.]+)", error.message)
        install = "start from the folder that holds the package, or install it"
        helps = [
            Help("name a module that is there", f"-m {near[1]}")
            if near
            else Help(install, f"{python_of(case.job)} -m pip install -e .")
        ]
    located = error.frames or error.filename
    return account(
        case,
        "start-failed",
        f"{case.job.program} cannot be started: {named(error)}",
        error,
        where=where(case, case.first, error) if located else "",
        # That it happened in every rank says nothing: they all began the same file.
        then="",
        help=helps,
        exit_status=2 if helps else 1,  # 2: as for a script that is not there
    )


def _known(case: Case, error: Raised) -> Report:
    """Tell of an exception of ours, raised in the rank, or one that our hook recognised: it brings
    its own words.
    """
    if error.code in ("group-twice", "main-unguarded"):
        return _TELLS[error.code](case, error)
    why, evidence = "".join(error.why[:1]), error.why[1:]
    if case.confidence != "certain":  # one of the store's that another rank may have caused
        came = classify.came_to_barrier(error.message)
        here = came or {rank.rank for rank in case.job.ranks if _waited_too(rank)}
        others = [rank for rank in case.job.ranks if rank.rank not in {*case.numbers, *here}]
        why = _AFTER_ANOTHER.get(error.code, "no rank shows why the store gave no answer")
        seen = any(rank.stack or rank.ended or phase_of(rank) for rank in others)
        evidence = (*error.why, *(whereabouts(case.job, others, case.root) if seen else ()))
    if error.code in classify.SAID_TO_ALL and (calls := _calls(case, error.code)):
        why = why or "the ranks made the call at different places"
        evidence = (*evidence, *calls)
    return account(
        case,
        error.code,
        f"{case.subject}: {first_line(error.message, HEADLINE_OURS)}",
        where=where(case, case.first, error),
        why=why,
        evidence=evidence,
        help=[Help(*one) for one in error.help[:3]],
    )


def _waited_too(rank: RankEvidence) -> bool:
    """Tell whether a rank was where the others waited: it got such an error itself."""
    return rank.raised is not None and rank.raised.code in classify.AFTER_ANOTHER


def _calls(case: Case, code: str) -> tuple[str, ...]:
    """Return a line for each place from which ranks made the call that did not fit together; () for
    one place.
    """
    root = case.root
    places: dict[str, list[int]] = {}
    for rank in sorted(case.ranks, key=lambda one: one.rank):
        errors = [one for one in (rank.raised, *rank.handled) if one is not None]
        frames = next((one.frames for one in errors if one.code == code), ())
        places.setdefault(stacks.place(frames, root), []).append(rank.rank)
    places.pop("", None)
    lines = [f"{ranks_phrase(ranks)}: {place}" for place, ranks in places.items()]
    return listed(lines) if len(lines) > 1 else ()


_AFTER_ANOTHER = {
    "wait-timeout": "whoever was to do it was elsewhere when the time was up",
    "lock-timeout": "the holder had not released it when the time was up",
    "once-failed": "the function was called in another rank, and failed there",
    "barrier-timeout": "whoever did not come was elsewhere when the time was up",
    "barrier-broken": "somebody else at the barrier gave up or died, and no rank shows why",
}
"""What an error of the store that mostly comes of another rank says of that one; the store's own
silence has no rank to blame.
"""


def _in_process(case: Case, where: str, error: Raised) -> Report:
    """Tell what a process of `mp.spawn` or a task of Ray raised: its traceback is in the message of
    another exception.
    """
    report = raised(case, error)
    inside = f"it was raised in {where} {case.subject}"
    helps = report.help
    if report.code == "port-in-use" and case.job.world_size > 1:
        once = "start the program once, and let it spawn: of several, all ask for that port"
        helps = (Help(once, again(case.job, 1)),)
    return replace(report, evidence=(inside, *report.evidence), help=helps)


def _by_rpc(case: Case, number: int, name: str, error: Raised) -> Report:
    """Tell what a function raised that the rank had another one call. The number of an RPC worker
    is its rank, as torch gives it.
    """
    callers, there = case.subject, tuple(one for one in case.job.ranks if one.rank == number)
    report = raised(replace(case, ranks=there, then="") if there else case, error)
    asked = f"{callers} made this call on {name}, by torch.distributed.rpc"
    return replace(report, evidence=(asked, *report.evidence))


def library_differs(case: Case, error: Raised) -> Report:
    """Tell of a shared library that misses a symbol: it, or the torch that is there, is another
    version.
    """
    found = classify.symbol_missing(error)
    assert found is not None
    library, symbol, of_torch = found
    python, built = python_of(case.job), "it was built for another torch"
    helps = [
        Help(
            "build or install it for the torch that is there",
            f"{python} -c 'import torch; print(torch.__version__)'",
        )
    ]
    if of_torch:
        built = "a library that was loaded is not the version that torch was built with"
        look = "see whether another copy is found first: the loader takes that"
        helps = [
            Help(look, 'echo "$LD_LIBRARY_PATH"'),
            Help("and install what this torch wants", f"{python} -m pip check"),
        ]
    return account(
        case,
        "versions-differ",
        f"{library.rpartition('/')[2]} misses {symbol}: {built}",
        error,
        why="the name is looked up when the library is loaded, in those that are there, and none of them has it",
        help=helps,
    )


def _rank_out_of_range(case: Case, error: Raised) -> Report:
    """Tell that NCCL was given a rank that the group does not have."""
    rank, size = map(int, classify.words_of("rank-out-of-range", error).groups())
    return account(
        case,
        "rank-out-of-range",
        f"NCCL in {case.subject} was given the rank {rank} for a group of {size}: the last rank of that group is {size - 1}",
        error,
        help=(
            Help(
                "take both from the launcher: leave rank= and world_size= out",
                'dist.init_process_group("nccl")',
            ),
            Help("or see what the launcher gives each process", "env | grep -E 'RANK|WORLD_SIZE'"),
        ),
    )


_TELLS: dict[str, Callable[[Case, Raised], Report]] = {
    "library-differs": library_differs,
    "url-incomplete": rendezvous.url_incomplete,
    "address-cut": rendezvous.address_cut,
    "npu-busy": gpus.npu_busy,
    "producer-gone": children.producer_gone,
    "loader-killed": children.loader_was_killed,
    "pool-broken": children.pool_broken,
    "files-exhausted": resources.files_exhausted,
    "main-unguarded": children.main_unguarded,
    "not-pickled": children.not_pickled,
    "variable-missing": rendezvous.variable_missing,
    "parameter-missing": rendezvous.parameter_missing,
    "scheme-unknown": rendezvous.scheme_unknown,
    "store-waits": rendezvous.store_waits,
    "group-twice": rendezvous.group_twice,
    "port-in-use": rendezvous.port_in_use,
    "host-unresolved": rendezvous.host_unresolved,
    "ssh-unresolved": rendezvous.ssh_unresolved,
    "ssh-failed": rendezvous.ssh_failed,
    "gpu-memory": resources.memory_refused,
    "shared-memory": resources.memory_refused,
    "host-memory": resources.memory_refused,
    "device-shared": gpus.device_shared,
    "cuda-forked": gpus.cuda_before_fork,
    "cuda-perhaps-forked": gpus.cuda_perhaps_forked,
    "device-busy": gpus.device_busy,
    "device-missing": gpus.device_missing,
    "cuda-init-failed": gpus.cuda_init_failed,
    "gpu-not-built-for": gpus.not_built_for,
    "port-forbidden": rendezvous.port_forbidden,
    "group-missing": rendezvous.group_missing,
    "parameters-unused": collectives.parameters_unused,
    "models-differ": collectives.models_differ,
    "kernel-failed": gpus.kernel_failed,
    "interface-missing": rendezvous.interface_missing,
    "rank-out-of-range": _rank_out_of_range,
    "calls-differ": collectives.calls_differ,
    "calls-mismatched": collectives.calls_mismatched,
    "nccl-failed": collectives.nccl_failed,
    "sizes-differ": collectives.sizes_differ,
    "no-input": _no_input,
    "disk-full": resources.disk_full,
}
"""By the cause that an exception names the function that tells of it."""
