"""An exception that left the program, or that it caught: which account tells of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from rallypoint.diagnosis import classify, stacks, tracebacks
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
from rallypoint.diagnosis.causes.report_form import account, timeline, told
from rallypoint.diagnosis.causes.wording import HEADLINE_OURS, first_line, listed, named
from rallypoint.diagnosis.evidence import JobEvidence, Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase


def raised(case: Case, error: Raised) -> Report:
    """An exception left the program: by what it says, one of several codes."""
    if error.code:
        return _known(case, error)
    if (inside := tracebacks.in_process(error)) is not None:
        return _in_process(case, *inside)
    tell = _TELLS.get(classify.cause_of(error))
    if tell is not None:
        return tell(case, error)
    if starts_nothing(case.job.program, error):
        return _start_failed(case, error)
    if (
        error.type == "bdb.BdbQuit" and case.first.raised is None
    ):  # with our hooks a person has left the debugger
        return _debugger_without_input(case, error)
    headline = f"{case.subject} raised {named(error)}"
    return told(case, "rank-raised", headline, error, help=_help_for(error, case.job))


def _no_input(case: Case, error: Raised) -> Report:
    """`input()` in a rank, whose standard input is mostly /dev/null: a terminal is one, and the
    ranks are many.
    """
    why = "rank 0 reads what the launcher reads (--debug-rank chooses another), and all others read /dev/null"
    helps: tuple[Help, ...] = (
        Help(
            "ask in that rank alone, and give the others the answer",
            "dist.broadcast_object_list(answer)",
        ),
    )
    if case.job.function:
        why = "a rank's standard input is /dev/null"
        helps = (
            Help(
                "ask before, and pass the answer",
                f"rallypoint.launch({case.job.program}, (answer,))",
            ),
        )
    elif case.numbers == (0,):
        why, helps = "rank 0 reads what the launcher reads, and that was at its end", ()
    return told(
        case, "rank-raised", f"{case.subject} raised {named(error)}", error, why=why, help=helps
    )


def _debugger_without_input(case: Case, error: Raised) -> Report:
    """`pdb.set_trace()` in a rank that the launcher does not look into (`--plain`)."""
    why = "a debugger raises it when its standard input ends, and a rank's is mostly /dev/null"
    helps = (
        Help(
            "leave --plain out: rank 0, or that of --debug-rank, then has the terminal",
            "breakpoint()",
        ),
    )
    return told(
        case, "rank-raised", f"{case.subject} raised {named(error)}", error, why=why, help=helps
    )


def swallowed(case: Case, error: Raised) -> Report:
    """An error in a shared call that the program caught before it went home."""
    call = error.call or "a call of torch.distributed"
    headline = (
        f"caught {named(error)} and left"
        if error.on_its_way
        else f"caught an error of {call} and left: {named(error)}"
    )
    clause = error.caught_at
    ended = case.first.ended
    how = (
        f"ended with exit code {ended.code}"
        if ended is not None and ended.code
        else went_home(case.job)
    )
    left = f"the rank then {how} while others waited"
    # The traceback of an exception that is still on its way has no frame of the program: it begins
    # at the call.
    raised_at = (
        stacks.place(error.frames, case.root)
        if any(not stacks.library(frame) for frame in error.frames)
        else ""
    )
    seen = (
        ""
        if not raised_at
        else f"it was raised at {raised_at}"
        if error.on_its_way
        else f"{call} was called at {raised_at}"
    )
    report = told(
        case,
        "error-swallowed",
        f"{case.subject} {headline}",
        error,
        why=f"{stacks.shown(clause.file, case.root)}:{clause.line} caught it; {left}"
        if clause
        else f"the program caught it; {left}",
        evidence=tuple(filter(None, (seen, gpus.lack_and_facts(case.job.devices)[0]))),
        help=(
            Help("let the exception leave the program, or end with a code that is not 0", "raise"),
        ),
    )
    if clause is not None:
        report = msgspec.structs.replace(
            report, where=f"{stacks.describe(clause, case.root)}, pid {case.first.pid}"
        )
    return msgspec.structs.replace(report, timeline=timeline(case))


def on_its_way(case: Case, error: Raised) -> Report:
    """An exception that was seen while the program closed its group: the others lost the rank then,
    and it has not left the program yet.
    """
    report = raised(case, error)
    evidence = [
        *report.evidence,
        f"it was on its way when {case.subject} closed the process group, which ends the others' collectives",
    ]
    if error.caught_at is not None:
        evidence.append(f"{stacks.describe(error.caught_at, case.root)} may catch it")
    why = report.why or "it had not left the program yet when the others had failed"
    return msgspec.structs.replace(report, why=why, evidence=tuple(evidence), confidence="likely")


def starts_nothing(program: str, error: Raised) -> bool:
    """True when the exception says that the program itself could not begin: it does not compile, or
    is not found.
    """
    short = error.type.rpartition(".")[2]
    typed = program.removeprefix("./")
    if short in ("SyntaxError", "IndentationError", "TabError"):
        return bool(error.filename) and (
            error.filename == program or error.filename.endswith("/" + typed)
        )
    own = [frame for frame in error.frames if not stacks.hidden(frame)]
    if short in ("ModuleNotFoundError", "ImportError"):
        return not own and program.split(".")[0] in re.split(r"[\s'.]+", error.message)
    return (
        short in ("FileNotFoundError", "PermissionError", "IsADirectoryError")
        and not own
        and error.filename.endswith(typed)
    )


def _start_failed(case: Case, error: Raised) -> Report:
    helps: tuple[Help, ...] = ()
    if error.type == "ModuleNotFoundError" and (
        near := re.search(r"; the nearest is ([\w.]+)$", error.message)
    ):
        helps = (Help("take the nearest name", f"-m {near[1]}"),)
    elif error.type == "ModuleNotFoundError":
        helps = (
            Help(
                "start from the folder that holds the package, or install it",
                f"{python_of(case.job)} -m pip install -e .",
            ),
        )
    report = told(
        case,
        "start-failed",
        f"{case.job.program} cannot be started: {named(error)}",
        error,
        help=helps,
    )
    # That it happened in every rank says nothing: they all began the same file.
    report = msgspec.structs.replace(
        report, then="", where="" if not error.frames and not error.filename else report.where
    )
    return (
        msgspec.structs.replace(report, exit_status=2) if helps else report
    )  # as for a script that is not there


def _known(case: Case, error: Raised) -> Report:
    """An exception of ours, raised in the rank, or one that our hook recognised: it brings its own
    words.
    """
    if error.code == "group-twice":
        return rendezvous.group_twice(case, error)
    if error.code == "main-unguarded":
        return children.main_unguarded(case, error)
    why, evidence = error.why[:1], error.why[1:]
    if case.confidence != "certain":  # one of the store's that another rank may have caused
        came = classify.came_to_barrier(error.message)
        here = came or {rank.rank for rank in case.job.ranks if _waited_too(rank)}
        others = [
            rank
            for rank in case.job.ranks
            if rank.rank not in case.numbers and rank.rank not in here
        ]
        why = (_AFTER_ANOTHER.get(error.code, "no rank shows why the store gave no answer"),)
        seen = any(rank.stack or rank.ended or phase_of(rank) for rank in others)
        evidence = (*error.why, *(whereabouts(case.job, others, case.root) if seen else ()))
    if error.code in classify.SAID_TO_ALL and (calls := _calls(case, error.code)):
        why, evidence = why or ("the ranks made the call at different places",), (*evidence, *calls)
    return account(
        case,
        error.code,
        f"{case.subject}: {first_line(error.message, HEADLINE_OURS)}",
        where=where(case, case.first, error),
        why="".join(why),
        evidence=evidence,
        help=tuple(Help(sentence, command) for sentence, command in error.help[:3]),
    )


def _waited_too(rank: RankEvidence) -> bool:
    """Whether a rank shows that it was where the others waited: it got such an error itself."""
    return rank.raised is not None and rank.raised.code in classify.AFTER_ANOTHER


def _calls(case: Case, code: str) -> tuple[str, ...]:
    """A line for each place from which ranks made the call that did not fit together; () for one
    place.
    """
    places: dict[str, list[int]] = {}
    for rank in sorted(case.ranks, key=lambda one: one.rank):
        error = next(
            (one for one in (rank.raised, *rank.handled) if one is not None and one.code == code),
            None,
        )
        place = stacks.place(error.frames, case.root) if error is not None else ""
        if place:
            places.setdefault(place, []).append(rank.rank)
    return (
        listed([f"{ranks_phrase(ranks)}: {place}" for place, ranks in places.items()])
        if len(places) > 1
        else ()
    )


_AFTER_ANOTHER = {
    "wait-timeout": "whoever was to do it was elsewhere when the time was up",
    "once-failed": "the function was called in another rank, and failed there",
    "barrier-timeout": "whoever did not come was elsewhere when the time was up",
    "barrier-broken": "somebody else at the barrier gave up or died, and no rank shows why",
}
"""What an error of the store that mostly comes of another rank says of that one; the store's own
silence has no rank to blame.
"""


def _in_process(case: Case, number: str, error: Raised) -> Report:
    """What a process of `mp.spawn` raised: torch wraps its traceback into the message of another
    exception.
    """
    report = raised(case, error)
    inside = f"it was process {number} of those that mp.spawn had started in {case.subject}"
    helps = report.help
    if report.code == "port-in-use" and case.job.world_size > 1:
        helps = (
            Help(
                "start the program once, and let it spawn: of several, all ask for that port",
                again(case.job, 1),
            ),
        )
    return msgspec.structs.replace(report, evidence=(inside, *report.evidence), help=helps)


PACKAGES = {
    "accelerate": "accelerate", "bs4": "beautifulsoup4", "cv2": "opencv-python", "datasets": "datasets", "dateutil": "python-dateutil",
    "deepspeed": "deepspeed", "dotenv": "python-dotenv", "einops": "einops", "faiss": "faiss-cpu", "h5py": "h5py", "hydra": "hydra-core",
    "lightning": "lightning", "matplotlib": "matplotlib", "mpi4py": "mpi4py", "numpy": "numpy", "omegaconf": "omegaconf",
    "pandas": "pandas", "PIL": "pillow", "psutil": "psutil", "pytorch_lightning": "pytorch-lightning", "safetensors": "safetensors",
    "scipy": "scipy", "skimage": "scikit-image", "sklearn": "scikit-learn", "tensorboard": "tensorboard", "tensorboardX": "tensorboardX",
    "timm": "timm", "torchaudio": "torchaudio", "torchvision": "torchvision", "tqdm": "tqdm", "transformers": "transformers",
    "wandb": "wandb", "yaml": "pyyaml",
}  # fmt: skip
"""The packages of modules that training programs import. Of a module that is not here no command is
shown: under the name of an import another package may wait (`pip install sklearn` fails on purpose,
and others are worse)."""


def _install(module: str, python: str) -> tuple[Help, ...]:
    """How to get a module that is not there. `python`: that of the ranks, "" when it is not
    known.
    """
    name = module.partition(".")[0]
    package = PACKAGES.get(name)
    look = Help(
        "see which Python the ranks run, and whether it has the module",
        f"python -c 'import sys, {name}; print(sys.executable)'",
    )
    if package is None:
        sentence = f"find the package that has the module {name} (its name may be another), and install it for the Python of the ranks"
        return (Help(sentence),) if python else (look, Help(sentence))
    if python:
        return (
            Help(
                "install it for the Python that the ranks run", f"{python} -m pip install {package}"
            ),
        )
    return look, Help("install it there", f"python -m pip install {package}")


_HELPS = (
    (
        re.compile(r"^context has already been set"),
        (
            Help(
                "choose the start method once, below the line that is false in an import",
                'if __name__ == "__main__":',
            ),
            Help(
                "or ask for a context of its own, which changes nothing for others",
                'context = torch.multiprocessing.get_context("spawn")',
            ),
        ),
    ),
    (
        re.compile(
            r"No backend type associated with device type cpu|Tensors must be CUDA|from the 'CPU' backend"
        ),
        (
            Help(
                "move the tensor to the rank's GPU: NCCL takes no others",
                'tensor.to(f"cuda:{local_rank}")',
            ),
            Help(
                "or open the group for both kinds", 'dist.init_process_group("cpu:gloo,cuda:nccl")'
            ),
        ),
    ),
    (
        re.compile(r"No backend type associated with device type cuda"),
        (
            Help(
                "open the group for both kinds of tensors",
                'dist.init_process_group("cpu:gloo,cuda:nccl")',
            ),
        ),
    ),
    (
        re.compile(r"Expected all tensors to be on the same device"),
        (
            Help(
                "move the batch to where the model is",
                "batch = batch.to(next(model.parameters()).device)",
            ),
        ),
    ),
    (
        re.compile(r"Can't pickle local object|Can't pickle <function|Can't get local object"),
        (
            Help(
                "define the function at the top of a module: a new process finds it there by its name"
            ),
        ),
    ),
)
"""What to do where torch's or Python's words are clear and only the way out is not."""

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_SCHEDULERS = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "PMI_RANK": "RANK",
    "PMI_SIZE": "WORLD_SIZE",
}


def _help_for(error: Raised, job: JobEvidence) -> tuple[Help, ...]:
    """What to do, for the few exceptions where that is known."""
    short = error.type.rpartition(".")[2]
    if classify.loader_gone(error.message):
        return (
            Help(
                "load in the rank itself: then the traceback has the line that failed",
                "DataLoader(..., num_workers=0)",
            ),
        )
    if short == "ModuleNotFoundError" and (
        found := re.search(r"No module named '([\w.]+)'", error.message)
    ):
        return _install(found.group(1), job.python)
    for pattern, helps in _HELPS:
        if pattern.search(error.message):
            return helps
    if short == "KeyError" and (ours := _SCHEDULERS.get(error.message.strip("'\""))):
        return (
            Help(
                "this is another launcher's variable; read the one that rallypoint and torchrun set",
                f'os.environ["{ours}"]',
            ),
        )
    if short == "KeyError" and error.message.strip("'\"") in _VARIABLES:
        return (
            Help(
                "start the program with a launcher, which sets it",
                f"rallypoint run -n 2 {job.program}",
            ),
        )
    return ()


def library_differs(case: Case, error: Raised) -> Report:
    """A shared library misses a symbol: it, or the torch that is there, is another version."""
    found = classify.symbol_missing(error)
    assert found is not None
    library, symbol, of_torch = found
    built = "it was built for another torch"
    helps: tuple[Help, ...] = (
        Help(
            "build or install it for the torch that is there",
            f"{python_of(case.job)} -c 'import torch; print(torch.__version__)'",
        ),
    )
    if of_torch:
        built = "a library that was loaded is not the version that torch was built with"
        helps = (
            Help(
                "see whether another copy is found first: the loader takes that",
                'echo "$LD_LIBRARY_PATH"',
            ),
            Help("and install what this torch wants", f"{python_of(case.job)} -m pip check"),
        )
    return told(
        case,
        "versions-differ",
        f"{library.rpartition('/')[2]} misses {symbol}: {built}",
        error,
        why="the name is looked up when the library is loaded, in those that are there, and none of them has it",
        help=helps,
    )


_TELLS: dict[str, Callable[[Case, Raised], Report]] = {
    "library-differs": library_differs,
    "url-incomplete": rendezvous.url_incomplete,
    "address-cut": rendezvous.address_cut,
    "npu-busy": gpus.npu_busy,
    "producer-gone": children.producer_gone,
    "loader-killed": children.loader_was_killed,
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
    "gpu-memory": resources.memory_refused,
    "shared-memory": resources.memory_refused,
    "host-memory": resources.memory_refused,
    "device-shared": gpus.device_shared,
    "cuda-forked": gpus.cuda_before_fork,
    "cuda-perhaps-forked": gpus.cuda_perhaps_forked,
    "device-busy": gpus.device_busy,
    "device-missing": gpus.device_missing,
    "cuda-init-failed": gpus.cuda_init_failed,
    "port-forbidden": rendezvous.port_forbidden,
    "group-missing": rendezvous.group_missing,
    "parameters-unused": collectives.parameters_unused,
    "models-differ": collectives.models_differ,
    "kernel-failed": gpus.kernel_failed,
    "interface-missing": rendezvous.interface_missing,
    "calls-differ": collectives.calls_differ,
    "calls-mismatched": collectives.calls_mismatched,
    "nccl-failed": collectives.nccl_failed,
    "sizes-differ": collectives.sizes_differ,
    "no-input": _no_input,
}
"""By the cause that an exception names the function that tells of it."""
