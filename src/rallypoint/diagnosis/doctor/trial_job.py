"""Check by a real job: two ranks that meet over a backend, and the time of an all_reduce.

The function that starts the ranks is passed in.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok
from rallypoint.diagnosis.report import Help, Report
from rallypoint.errors import Advice
from rallypoint.units import duration, size

RANKS = 2

PATIENCE = 60.0
"""Seconds for the whole job. It takes 3 with torch on a local disk; importing torch from a cold
network file system takes half a minute."""

MEETING = 30.0
"""Seconds for torch's waits in it: less than the whole, so that what torch says of a hang comes
before the ranks are stopped for it."""

LARGE = 16 << 20
"""Bytes of the tensor whose sum is timed: the gradients of 4 million parameters. A loaded laptop
can do it, and it is enough for a rate."""

ROUNDS = 5
"""Number of timings of each size; the best counts, since others tell what else the machine did."""

Backend = Literal["gloo", "nccl"]


class Measured(msgspec.Struct, frozen=True):
    """Times that one rank measured. Seconds."""

    rank: int
    small: float  # an all_reduce of one number
    large: float  # of LARGE bytes
    right: bool  # the sum was what it must be
    library: str = ""  # NCCL's version, as it says itself


class TrialOutcome(NamedTuple):
    """Result of the trial job."""

    seconds: float  # from the start to the last rank's end
    measured: tuple[Measured, ...] = ()  # by rank, when it went well
    reports: tuple[Report, ...] = ()  # why it did not
    problem: str = ""  # one sentence, when it failed before there were ranks
    code: str = ""  # of that problem
    why: tuple[str, ...] = ()
    help: Advice = ()


Trial = Callable[[Backend, int, float], TrialOutcome]
"""Function that starts `measure` in so many ranks over a backend, within so many seconds."""


def measure() -> Measured:
    """Time an all_reduce of one number and of LARGE bytes. Runs in every rank, with the process
    group open."""
    import torch
    import torch.distributed as dist

    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    ranks = dist.get_world_size()
    timings = []
    right = True
    for numbers in (1, LARGE // 4):
        times = []
        for _ in range(ROUNDS):
            tensor = torch.full((numbers,), float(dist.get_rank() + 1), device=device)
            dist.barrier()
            clock = Clock()
            dist.all_reduce(tensor)
            if cuda:
                torch.cuda.synchronize()
            times.append(clock.elapsed())
            right = right and bool((tensor == ranks * (ranks + 1) / 2).all())
        timings.append(min(times))
    library = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""  # type: ignore[no-untyped-call]
    return Measured(dist.get_rank(), timings[0], timings[1], right, library)


def job(trial: Trial) -> list[Finding]:
    """Run the trial job on this machine."""
    from rallypoint.host import devices

    def count_gpus() -> int:
        found = devices.find(os.environ, devices.look_closely())
        return 0 if devices.missing(found) else len(found.visible)

    return run_trial(trial, devices.torch_build() is not None, count_gpus)


def run_trial(trial: Trial, has_torch: bool, count_gpus: Callable[[], int]) -> list[Finding]:
    """Run the job over gloo, and over NCCL where two GPUs are visible."""
    if not has_torch:
        install = f"{shlex.quote(sys.executable)} -m pip install torch"
        return [
            note(
                "torch-missing",
                "left out: there is no torch, which its ranks import",
                ("install it, and call doctor again", install),
            )
        ]
    backends: Sequence[Backend] = ("gloo", "nccl") if count_gpus() >= RANKS else ("gloo",)
    found = []
    for backend in backends:
        found.append(judge_trial(backend, trial(backend, RANKS, PATIENCE)))
        if found[-1].mark == "fault":
            break  # what failed without a GPU fails with one
    return found


_LOUDER = (
    Help(
        "let torch say more while it tries",
        "TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL rallypoint doctor --only job",
    ),
)


def judge_trial(backend: Backend, outcome: TrialOutcome) -> Finding:
    over = f"{RANKS} ranks over {backend}"
    if outcome.reports:
        first, *rest = outcome.reports
        if first.code == "launch-timeout":  # more time is not what it lacks
            first = msgspec.structs.replace(first, help=_LOUDER)
        finding = fault(first.code, f"{over} failed: {first.headline}")
        return msgspec.structs.replace(finding, reports=(first, *rest))
    if outcome.problem:
        fact = f"{over} did not start: {outcome.problem}"
        return fault(outcome.code, fact, *outcome.help, why=outcome.why)
    wrong = [one.rank for one in outcome.measured if not one.right]
    if wrong or not outcome.measured:
        ranks = ", ".join(map(str, wrong))
        return fault("cause-unknown", f"{over}: all_reduce gave a wrong sum in rank {ranks}")
    small = max(one.small for one in outcome.measured)
    large = max(one.large for one in outcome.measured)
    library = f" {outcome.measured[0].library}".rstrip()
    rate = f"{LARGE / max(large, 1e-9) / 1e9:.1f} GB/s"
    times = f"all_reduce of one number takes {duration(small)}, of {size(LARGE)} {duration(large)} ({rate})"
    return ok(f"{over}{library}: {times}; the job took {outcome.seconds:.1f} s")
