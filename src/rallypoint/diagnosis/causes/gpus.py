"""GPUs: not there, not free, given twice, and kernels that failed on them."""

from __future__ import annotations

import re

from rallypoint.diagnosis.causes.case import Case, again, likely, python_of, subject
from rallypoint.diagnosis.causes.report_form import account, told
from rallypoint.diagnosis.causes.wording import first_line, listed, named
from rallypoint.diagnosis.evidence import JobEvidence, Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.host import devices
from rallypoint.host.devices import Found
from rallypoint.world import ranks_phrase


def kernel_failed(case: Case, error: Raised) -> Report:
    """A kernel asserted, or wrote where it must not; seldom noticed on the line that caused it."""
    asserted = re.search(
        r"\b(\w{1,100}\.cu:\d+): .{0,300}?Assertion `(.{0,300}?)` ?failed",
        error.message + "\n" + error.traceback,
    )
    words = first_line(error.message)
    if asserted:
        what = f"the assertion {asserted.group(2)} failed at {asserted.group(1)}"
    else:
        found = re.search(
            r"device-side assert triggered|illegal memory access|misaligned address|unspecified launch failure",
            words,
        )
        what = found.group(0) if found else words
    if "uncorrectable ECC error" in words:
        return told(
            case,
            "cuda-kernel-failed",
            f"the memory of a GPU failed in {case.subject}: uncorrectable ECC error",
            error,
            why="the GPU counts errors in its own memory, and met one that it cannot correct: no program causes that",
            help=(
                Help("see which GPU it was", "nvidia-smi -q -d ECC"),
                Help(
                    "reset that GPU, or have it replaced if it happens again",
                    "sudo nvidia-smi --gpu-reset -i INDEX",
                ),
            ),
        )
    index = bool(asserted and re.search(r"[Ii]ndex|t >= 0|cur_target", asserted.group(2)))
    return told(
        case,
        "cuda-kernel-failed",
        f"a CUDA kernel failed in {case.subject}: {what}",
        error,
        why="an index lies outside of what it points into: a label, a token or an embedding's row that is not there"
        if index
        else "kernels run behind the program: the line in the traceback is where it was noticed, mostly not where it was caused",
        help=(
            Help(
                "run once more with each kernel waited for: then the traceback has the line",
                "export CUDA_LAUNCH_BLOCKING=1",
            ),
            Help(
                "or run the same step on the CPU, which checks what it is given", 'model.to("cpu")'
            ),
        ),
    )


def device_missing(case: Case, error: Raised) -> Report:
    """The GPU, or torch's support for one, is not there."""
    found, program = case.job.devices, case.job.program
    why, facts = lack_and_facts(found)
    helps: list[Help] = []
    if found is not None and found.visible.stopped:
        helps.append(
            Help(
                "list GPUs that there are, or let the job see all of them",
                "unset CUDA_VISIBLE_DEVICES",
            )
        )
    if "NCCL" in error.message:
        helps.append(Help("use the backend that needs no GPU", 'dist.init_process_group("gloo")'))
    elif (
        "without CUDA" in why
        or "no attribute '_cuda_" in error.message
        or "not compiled" in error.message
    ):
        helps.append(
            Help(
                "run on the CPU",
                'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
            )
        )
    elif "invalid device ordinal" in error.message:
        number = len(found.visible) if found is not None and not why else 0
        line = again(case.job, number) if number else f"rallypoint run -n gpu {program}"
        helps.append(Help("start one rank for each GPU", line))
        helps.append(
            Help(
                "or use the rank's own number",
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            )
        )
        why = why or (
            f"a program here sees {devices.count(number)}, and numbers {'them ' if number > 1 else 'it '}from 0"
            if number
            else ""
        )
    if (
        found is not None
        and found.look.devices
        and devices.missing(found)
        and not found.visible.stopped
    ):
        helps.append(
            Help(
                "or install the torch that fits these GPUs and their driver",
                "https://pytorch.org/get-started/locally/",
            )
        )
    if not helps:
        helps.append(
            Help(
                "see what torch finds",
                f"{python_of(case.job)} -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'",
            )
        )
    headline = f"{case.subject} asked for a device that is not there: {named(error)}"
    return told(
        case, "device-missing", headline, error, why=why, evidence=facts, help=tuple(helps[:3])
    )


def cuda_init_failed(case: Case, error: Raised) -> Report:
    """There may be a GPU, and CUDA does not start on it."""
    found = case.job.devices
    why, facts = lack_and_facts(found)
    why = why or (found.look.problem if found is not None else "")
    helps: tuple[Help, ...] = ()
    if "too old" in error.message or "insufficient" in error.message or "knows CUDA up to" in why:
        helps = (
            Help(
                "install a torch that was built for what this driver knows, or a newer driver",
                "https://pytorch.org/get-started/locally/",
            ),
        )
    elif "not yet initialized" in error.message:
        helps = (
            Help(
                "start the service that connects the GPUs of this machine",
                "sudo systemctl start nvidia-fabricmanager",
            ),
        )
    elif found is not None and "mismatch" in found.look.problem:
        helps = (
            Help(
                "the driver was updated while the old one is loaded: load the new one",
                "sudo reboot",
            ),
        )
    helps = helps or (
        Help("see whether the driver answers at all", "nvidia-smi"),
        Help("and whether the device files are there, nvidia-uvm among them", "ls /dev/nvidia*"),
    )
    headline = f"CUDA could not be started in {case.subject}: {named(error)}"
    return told(
        case,
        "cuda-init-failed",
        headline,
        error,
        why=why,
        evidence=(*facts, *strangers_of(case)),
        help=helps,
    )


def device_busy(case: Case, error: Raised) -> Report:
    """The GPU serves one process at a time, and another one has it."""
    strangers = strangers_of(case)
    why = (
        "the GPU was set to serve one process at a time, and another one has it"
        if not strangers
        else strangers[0]
    )
    return told(
        case,
        "device-busy",
        f"{case.subject} did not get its GPU: {named(error)}",
        error,
        why=why,
        evidence=(*strangers[1:], *lack_and_facts(case.job.devices)[1]),
        help=(
            Help(
                "see who uses the GPUs, and in which mode they are",
                "nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv",
            ),
            Help("or take others, by index or UUID", _again_on(case.job, "1,3")),
        ),
    )


def _again_on(job: JobEvidence, gpus: str) -> str:
    """The line that starts the same job on other GPUs."""
    return (
        "export CUDA_VISIBLE_DEVICES=" + gpus
        if job.function
        else f"CUDA_VISIBLE_DEVICES={gpus} rallypoint run -n gpu {job.program}"
    )


_HOW = {
    "chosen": ", which the program chose",
    "given": ", which is LOCAL_RANK's",
    "used": ", because the program had put something on it before it joined",
    "short": ", because there is none for its LOCAL_RANK",
}
"""How a rank came to its GPU, after its name (`launcher/worker/cuda.py`)."""


def device_shared(case: Case, error: Raised | None) -> Report:
    """Ranks of one group of NCCL's have the same GPU. `error`: NCCL's own refusal, when it came to
    that.
    """
    job, found = case.job, case.job.devices
    by_device: dict[str, list[RankEvidence]] = {}
    for rank in job.ranks:
        if rank.meeting is not None and rank.meeting.device:
            by_device.setdefault(rank.meeting.device, []).append(rank)
    groups = {device: ranks for device, ranks in by_device.items() if len(ranks) > 1}
    ways: dict[tuple[str, str, str], list[int]] = {}
    for device, ranks in groups.items():
        for rank in ranks:
            if rank.meeting is not None:
                ways.setdefault(
                    (rank.meeting.device_name, device, rank.meeting.device_how), []
                ).append(rank.rank)
    evidence = [
        f"{ranks_phrase(numbers)}: {name} ({device}){_HOW.get(how, '')}"
        for (name, device, how), numbers in ways.items()
    ]
    number = len(found.visible) if found is not None else 0
    helps: tuple[Help, ...] = ()
    if number and number < job.world_size:
        helps = (Help("start one rank for each GPU", again(job, number)),)
    else:
        helps = (
            Help(
                "give each rank its own GPU, before the first use of CUDA",
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            ),
        )
    helps += (
        Help(
            "or, for ranks that share one, take the backend that allows it",
            'dist.init_process_group("gloo")',
        ),
    )
    at_fault = tuple(rank for ranks in groups.values() for rank in ranks)
    who = (
        subject(sorted(rank.rank for rank in at_fault), job.world_size)
        if at_fault
        else case.subject
    )
    meeting = (at_fault or case.ranks)[0].meeting
    why = "NCCL refuses two ranks of one group on the same GPU, at their first collective"
    facts = (*listed(evidence), *(found.facts() if found is not None else ()))
    headline = f"{who} joined a group of NCCL's with the same GPU"
    if error is not None:
        return told(case, "device-shared", headline, error, why=why, evidence=facts, help=helps)
    return account(
        case,
        "device-shared",
        headline,
        where=meeting.line if meeting is not None else "",
        why=why,
        evidence=facts,
        help=helps,
    )


_SPAWN = Help(
    "start processes that use CUDA with spawn",
    'torch.multiprocessing.get_context("spawn").Process(...)',
)


def cuda_before_fork(case: Case, error: Raised) -> Report:
    """torch refuses CUDA in a process that was forked with CUDA up; a loader's worker hands that to
    the rank.
    """
    forks = [fork for rank in case.ranks for fork in rank.cuda_forks]
    at = re.search(
        r"this process was forked at (\S+?)(?:, after (\S+) had used CUDA|,|$)",
        error.message + error.traceback,
        re.MULTILINE,
    )
    line, first = (at[1], at[2] or "") if at else forks[-1] if forks else ("", "")
    why = f"the process was forked at {line}" if line else "the process was forked"
    why += f", after {first} had used CUDA" if first else ", after CUDA had been used"
    loader = re.search("DataLoader|torch/utils/data/", error.message + error.traceback) is not None
    helps = (
        (
            Help(
                "let the loader's workers hand over CPU tensors, and move them in the loop",
                "batch = batch.to(device, non_blocking=True)",
            ),
            Help(
                "or give it workers that start anew",
                'DataLoader(..., multiprocessing_context="spawn")',
            ),
        )
        if loader
        else (
            _SPAWN,
            Help("or fork before CUDA is used for the first time"),
        )
    )
    return told(
        case,
        "cuda-before-fork",
        f"{case.subject} used CUDA in a process that was forked after CUDA was up",
        error,
        why=why,
        help=helps,
    )


def cuda_perhaps_forked(case: Case, error: Raised) -> Report:
    """CUDA could not be started in a child of `multiprocessing`, and how that was started is not
    known.
    """
    return told(
        likely(case),
        "cuda-before-fork",
        f"{case.subject} could not start CUDA in a process of multiprocessing, as when that was forked after CUDA was up",
        error,
        why="CUDA says no more than that it could not be started; how the process was started is not known",
        help=(_SPAWN,),
    )


def npu_busy(case: Case, error: Raised) -> Report:
    """Ascend's driver says that an earlier job may still have the device."""
    return told(
        likely(case),
        "device-busy",
        f"{case.subject} did not get its NPU: an earlier job still has it, says its driver",
        error,
        why='the driver says "Maybe"',
        help=(
            Help("see who has it", "npu-smi info"),
            Help("end what is left of the earlier job, and wait for some seconds"),
        ),
    )


def lack_and_facts(found: Found | None) -> tuple[str, tuple[str, ...]]:
    """What speaks against using CUDA here, and what was found; nothing when nobody looked."""
    if found is None:
        return "", ()
    lack = devices.missing(found)
    return lack, tuple(fact for fact in found.facts() if fact != lack)


def strangers_of(case: Case) -> tuple[str, ...]:
    """Who else uses these GPUs, a line each; () when nobody looked."""
    if case.job.devices is None:
        return ()
    return listed(case.job.devices.strangers(rank.pid for rank in case.job.ranks))
