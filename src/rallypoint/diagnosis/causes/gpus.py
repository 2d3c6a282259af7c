"""GPUs: not there, not free, given twice, and kernels that failed on them."""

from __future__ import annotations

import re

from msgspec.structs import replace

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.causes.case import Case, again, likely, python_of, subject
from rallypoint.diagnosis.causes.report_form import account
from rallypoint.diagnosis.causes.wording import cut, first_line, listed, named
from rallypoint.diagnosis.error_patterns import nvidia, torch
from rallypoint.diagnosis.evidence import Meeting, Raised
from rallypoint.diagnosis.log_events import Findings
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report
from rallypoint.host import devices
from rallypoint.host.devices import Found
from rallypoint.world import ranks_phrase

_ASSERTED = Pattern(r"\b(\w{1,100}\.cu:\d+): .{0,300}?Assertion `(.{0,300}?)` ?failed")
_FAULT = Pattern(
    r"device-side assert triggered|illegal memory access|misaligned address|unspecified launch failure"
)


_OF_ROCM = Pattern(r"\bby GPU \**node-\d|\bHSA_STATUS_|\bHIP error|\bhipError")
_OF_CANN = Pattern(
    r"\bai(?:core|vec|vector|cpu) error|(?:aicore|vector core) execution is abnormal"
)
_ASK_DRIVER = Help("see what the driver reports about the GPUs", "sudo dmesg -T | grep -i nvrm")


def kernel_failed(case: Case, error: Raised) -> Report:
    """Tell of a kernel that asserted, or wrote where it must not; seldom noticed on the line that
    caused it.
    """
    words = first_line(error.message)
    if "uncorrectable ECC error" in error.message:
        replaced = "reset that GPU, or have it replaced if it happens again"
        return account(
            case,
            "cuda-kernel-failed",
            f"the memory of a GPU failed in {case.subject}: uncorrectable ECC error",
            error,
            why="the GPU counts errors in its own memory, and met one that it cannot correct: no program causes that",
            help=(
                Help("see which GPU it was", "nvidia-smi -q -d ECC"),
                Help(replaced, "sudo nvidia-smi --gpu-reset -i INDEX"),
            ),
        )
    if re.search(torch.CUDA_UNKNOWN, words):
        return account(
            likely(case),
            "cuda-kernel-failed",
            f"CUDA failed in {case.subject}: unknown error",
            error,
            why="CUDA gives no reason: mostly the GPU or its driver is at fault, and seldom the program",
            help=(_ASK_DRIVER,),
        )
    fault = _FAULT.search(words)
    what = fault[0] if fault else words
    why = "kernels run behind the program: the line in the traceback is where it was noticed, mostly not where it was caused"
    asserted = _ASSERTED.search(f"{error.message}\n{error.traceback}")
    if asserted:
        what = f"the assertion {asserted[2]} failed at {asserted[1]}"
        if re.search(r"[Ii]ndex|t >= 0|cur_target", asserted[2]):
            why = "an index lies outside of what it points into: a label, a token or an embedding's row that is not there"
    again = "run once more with each kernel waited for: then the traceback has the line"
    kind, wait = "a CUDA", "export CUDA_LAUNCH_BLOCKING=1"
    if _OF_ROCM.search(words):
        kind, wait = "a GPU", "export AMD_SERIALIZE_KERNEL=3"
    elif (found := _OF_CANN.search(words)) is not None:
        kind, wait, what = "an NPU", "export ASCEND_LAUNCH_BLOCKING=1", found[0]
    return account(
        case,
        "cuda-kernel-failed",
        f"{kind} kernel failed in {case.subject}: {what}",
        error,
        why=why,
        help=(
            Help(again, wait),
            Help(
                "or run the same step on the CPU, which checks what it is given", 'model.to("cpu")'
            ),
        ),
    )


_SHOWN = 3  # lines of the driver
# What has its cause in its words: an assert is always the program's.
_EXPLAINED = Pattern(r"uncorrectable ECC error|device-side assert|: the assertion ")
_OF_CUDA = Pattern(r"cuda-(?:kernel|init)-failed|device-(?:busy|missing)|nccl-failed")


def with_xids(report: Report, log: Findings) -> Report:
    """Return the report of an error of CUDA's with what NVIDIA's driver says in the same log: a
    fault of a GPU is told before an error that it may have led to.
    """
    if not (
        _OF_CUDA.match(report.code) or re.search(r"\bCUDA error\b|\bCU\w+_STATUS_", report.headline)
    ):
        return report
    told = [(s, found) for s in log.sightings if (found := nvidia.XID.search(s.text)) is not None]
    lines = [f"line {s.place.line}: {cut(s.text, 200)}" for s, _ in told]
    report = replace(report, evidence=(*lines[:_SHOWN], *report.evidence))
    faults = [(f["gpu"], f["xid"]) for _, f in told if f["xid"] in nvidia.FAULTS]
    if not faults or _EXPLAINED.search(report.headline):
        return report
    gpu, xid = faults[0]
    look = "see whether the driver still has that GPU, and its counts of errors"
    return replace(
        report,
        confidence="likely",
        headline=f"the GPU {gpu} {nvidia.FAULTS[xid]} (Xid {xid}), and {report.headline}",
        why="the driver reports it, and no program causes it; whether this rank uses that GPU is not in the log",
        help=(
            Help(look, f"nvidia-smi -q -i {gpu}{'' if '.' in gpu else '.0'}"),
            Help(
                "keep jobs off that machine until the GPU was reset; have the GPU checked when the error comes again"
            ),
        ),
    )


_GET_TORCH = "https://pytorch.org/get-started/locally/"
_OWN_GPU = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'


def device_missing(case: Case, error: Raised) -> Report:
    """Tell that the GPU, or torch's support for one, is not there."""
    found, message = case.node.devices, error.message
    why, facts = lack_and_facts(found)
    stopped = found is not None and bool(found.visible.stopped)
    helps: list[Help] = []
    if stopped:
        see = "list GPUs that there are, or let the job see all of them"
        helps.append(Help(see, "unset CUDA_VISIBLE_DEVICES"))
    if "NCCL" in message:
        helps.append(Help("use the backend that needs no GPU", 'dist.init_process_group("gloo")'))
    elif "without CUDA" in why or "no attribute '_cuda_" in message or "not compiled" in message:
        on_cpu = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'
        helps.append(Help("run on the CPU", on_cpu))
    elif "invalid device ordinal" in message:
        number = len(found.visible) if found is not None and not why else 0
        line = again(case.job, number or "gpu")
        helps += (
            Help("start one rank for each GPU", line),
            Help("or use the rank's own number", _OWN_GPU),
        )
        if number:
            them = "them " if number > 1 else "it "
            why = f"a program here sees {devices.count(number)}, and numbers {them}from 0"
    if found is not None and found.look.devices and devices.missing(found) and not stopped:
        fit = "or install the torch that fits these GPUs and their driver"
        helps.append(Help(fit, _GET_TORCH))
    if not helps:
        look = "-c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'"
        helps.append(Help("see what torch finds", f"{python_of(case.job)} {look}"))
    headline = f"{case.subject} asked for {'NCCL, which torch lacks' if ' have NCCL ' in message else 'a device that is not there'}: {named(error)}"
    return account(case, "device-missing", headline, error, why=why, evidence=facts, help=helps[:3])


def cuda_init_failed(case: Case, error: Raised) -> Report:
    """Tell that CUDA does not start on a GPU that there may be."""
    found, message = case.node.devices, error.message
    why, facts = lack_and_facts(found)
    problem = found.look.problem if found is not None else ""
    why = why or problem
    helps = [
        Help("see whether the driver answers at all", "nvidia-smi"),
        Help("and whether the device files are there, nvidia-uvm among them", "ls /dev/nvidia*"),
    ]
    if "too old" in message or "insufficient" in message or "knows CUDA up to" in why:
        fit = "install a torch that was built for what this driver knows, or a newer driver"
        helps = [Help(fit, _GET_TORCH)]
    elif "not yet initialized" in message:
        service = "start the service that connects the GPUs of this machine"
        helps = [Help(service, "sudo systemctl start nvidia-fabricmanager")]
    elif "mismatch" in problem:
        load = "the driver was updated while the old one is loaded: load the new one"
        helps = [Help(load, "sudo reboot")]
    return account(
        case,
        "cuda-init-failed",
        f"CUDA could not be started in {case.subject}: {named(error)}",
        error,
        why=why,
        evidence=(*facts, *strangers_of(case)),
        help=helps,
    )


def not_built_for(case: Case, error: Raised) -> Report:
    """Tell that torch, or an extension of it, holds no kernels for the GPU that is there."""
    return account(
        case,
        "versions-differ",
        f"what {case.subject} runs was not built for its GPU: {named(error)}",
        error,
        help=(
            Help(
                "compare the GPU with what torch was built for; an extension has a list of its own",
                f"{python_of(case.job)} -c 'import torch; print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())'",
            ),
        ),
    )


def device_busy(case: Case, error: Raised) -> Report:
    """Tell that the GPU serves one process at a time, and another one has it."""
    strangers = strangers_of(case)
    why = "the GPU was set to serve one process at a time, and another one has it"
    others = "CUDA_VISIBLE_DEVICES=1,3"
    other_gpus = f"{others} {again(case.job, 'gpu')}"
    if case.job.function:
        other_gpus = f"export {others}"
    return account(
        case,
        "device-busy",
        f"{case.subject} did not get its GPU: {named(error)}",
        error,
        why=strangers[0] if strangers else why,
        evidence=(*strangers[1:], *lack_and_facts(case.node.devices)[1]),
        help=(
            Help(
                "see who uses the GPUs, and in which mode they are",
                "nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv",
            ),
            Help("or take others, by index or UUID", other_gpus),
        ),
    )


_HOW = {
    "chosen": ", which the program chose",
    "given": ", which is LOCAL_RANK's",
    "used": ", because the program had put something on it before it joined",
    "short": ", because there is none for its LOCAL_RANK",
}
"""How a rank came to its GPU, after its name (`launcher/worker/cuda.py`)."""


def device_shared(case: Case, error: Raised | None) -> Report:
    """Tell that ranks of one group of NCCL's have the same GPU. `error`: NCCL's own refusal, when
    it came to that.
    """
    job, node, found = case.job, case.node, case.node.devices
    by_device: dict[str, list[tuple[int, Meeting]]] = {}
    for rank in node.ranks:
        if rank.meeting is not None and rank.meeting.device:
            by_device.setdefault(rank.meeting.device, []).append((rank.rank, rank.meeting))
    at_fault = [one for ranks in by_device.values() if len(ranks) > 1 for one in ranks]
    ways: dict[str, list[int]] = {}
    for number, meeting in at_fault:
        how = f"{meeting.device_name} ({meeting.device}){_HOW.get(meeting.device_how, '')}"
        ways.setdefault(how, []).append(number)
    evidence = listed([f"{ranks_phrase(numbers)}: {how}" for how, numbers in ways.items()])
    gpus = len(found.visible) if found is not None else 0
    own = Help("give each rank its own GPU, before the first use of CUDA", _OWN_GPU)
    if 0 < gpus < job.world_size:
        own = Help("start one rank for each GPU", again(job, gpus))
    allow = "or, for ranks that share one, take the backend that allows it"
    who = case.subject
    first = case.first.meeting
    if at_fault:
        who = subject(sorted(number for number, _ in at_fault), job.world_size)
        first = at_fault[0][1]
    headline = f"{who} joined a group of NCCL's with the same GPU"
    why = "NCCL refuses two ranks of one group on the same GPU, at their first collective"
    facts = (*evidence, *(found.facts() if found is not None else ()))
    helps = (own, Help(allow, 'dist.init_process_group("gloo")'))
    if error is not None:
        return account(case, "device-shared", headline, error, why=why, evidence=facts, help=helps)
    where = first.line if first is not None else ""
    return account(
        case, "device-shared", headline, where=where, why=why, evidence=facts, help=helps
    )


_SPAWN = Help(
    "start processes that use CUDA with spawn",
    'torch.multiprocessing.get_context("spawn").Process(...)',
)


_FORKED = Pattern(
    r"this process was forked at (\S+?)(?:, after (\S+) had used CUDA|,|$)", re.MULTILINE
)


def cuda_before_fork(case: Case, error: Raised) -> Report:
    """Tell that torch refuses CUDA in a process that was forked with CUDA up; a loader's worker
    hands that to the rank.
    """
    words = error.message + error.traceback
    forks = [fork for rank in case.ranks for fork in rank.cuda_forks]
    at = _FORKED.search(words)
    line, first = (at[1], at[2]) if at else forks[-1] if forks else ("", "")
    where = f" at {line}" if line else ""
    after = f"{first} had used CUDA" if first else "CUDA had been used"
    helps = [_SPAWN, Help("or fork before CUDA is used for the first time")]
    if "DataLoader" in words or "torch/utils/data/" in words:
        hand_over = "let the loader's workers hand over CPU tensors, and move them in the loop"
        anew = 'DataLoader(..., multiprocessing_context="spawn")'
        helps = [
            Help(hand_over, "batch = batch.to(device, non_blocking=True)"),
            Help("or give it workers that start anew", anew),
        ]
    return account(
        case,
        "cuda-before-fork",
        f"{case.subject} used CUDA in a process that was forked after CUDA was up",
        error,
        why=f"the process was forked{where}, after {after}",
        help=helps,
    )


def cuda_perhaps_forked(case: Case, error: Raised) -> Report:
    """Tell that CUDA could not be started in a child of `multiprocessing`, of which it is not known
    how it was started.
    """
    return account(
        likely(case),
        "cuda-before-fork",
        f"{case.subject} could not start CUDA in a process of multiprocessing, as when that was forked after CUDA was up",
        error,
        why="CUDA says no more than that it could not be started; how the process was started is not known",
        help=[_SPAWN],
    )


def npu_busy(case: Case, error: Raised) -> Report:
    """Tell that an earlier job may still have the device, by the word of Ascend's driver or
    Gaudi's.
    """
    of_gaudi = classify.words_of("npu-busy", error)["failed"]
    headline = f"{case.subject} did not get its NPU: an earlier job still has it, says its driver"
    if of_gaudi:
        headline = f"{case.subject} did not get its Gaudi: {named(error)}"
    return account(
        likely(case),
        "device-busy",
        headline,
        error,
        why="Gaudi does not say why: mostly another process has it"
        if of_gaudi
        else 'the driver says "Maybe"',
        help=(
            Help("see who has it", "hl-smi" if of_gaudi else "npu-smi info"),
            Help("end what is left of the earlier job, and wait for some seconds"),
        ),
    )


def lack_and_facts(found: Found | None) -> tuple[str, tuple[str, ...]]:
    """Return what speaks against using CUDA here, and what was found; nothing when nobody
    looked.
    """
    if found is None:
        return "", ()
    lack = devices.missing(found)
    return lack, tuple(fact for fact in found.facts() if fact != lack)


def strangers_of(case: Case) -> tuple[str, ...]:
    """Return who else uses these GPUs, a line each; () when nobody looked."""
    if case.node.devices is None:
        return ()
    return listed(case.node.devices.strangers(rank.pid for rank in case.node.ranks))
