"""Exceptions whose words, with the place that they left, are one fact that a job of our own does not need: what each is told as.

`told` is asked before the account of exceptions in general; None leaves it to that.
"""

from __future__ import annotations

import re

import msgspec

from rallypoint.diagnosis import reading, stacks
from rallypoint.diagnosis.accounts import wording
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.logs import phrases
from rallypoint.diagnosis.logs.accounts import Cause, account, words_of
from rallypoint.diagnosis.logs.sightings import Sign
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

SOON = 10
"""Lines after ssh's word within which whoever called it says that it failed: mpirun's "unable to reliably start one or more daemons"."""


def told(cause: Cause) -> Report | None:
    """The report on the cause's first error, when it is one of these."""
    error = cause.first.error
    assert error is not None
    for tell in (_library_differs, _no_host, _address_cut, _npu_busy, _shared_memory_full, _perhaps_forked):
        report = tell(cause, error)
        if report is not None:
            return report
    return None


def _library_differs(cause: Cause, error: Raised) -> Report | None:
    found = phrases.symbol_missing(error)
    if found is None:
        return None
    library, symbol, of_torch = found
    name = library.rpartition("/")[2]
    helps = (
        (
            Help("see whether another copy is found first: the loader takes that", 'echo "$LD_LIBRARY_PATH"'),
            Help("and install what this torch wants", "python -m pip check"),
        )
        if of_torch
        else (Help("build or install it for the torch that is there", "python -c 'import torch; print(torch.__version__)'"),)
    )
    built = "a library that was loaded is not the version that torch was built with" if of_torch else "it was built for another torch"
    return _at(
        account(
            cause,
            "versions-differ",
            f"{name} misses {symbol}: {built}",
            why="the name is looked up when the library is loaded, in those that are there, and none of them has it",
            help=helps,
            said=words_of(cause.first, cause.who),
        ),
        error,
    )


def _no_host(cause: Cause, error: Raised) -> Report | None:
    missing = phrases.url_lacks(error)
    if not missing:
        return None
    return _at(
        account(
            cause,
            "init-method-invalid",
            f"init_method names no {missing}",
            why="torch takes it for tcp://HOST:PORT, or for file:///absolute/path",
            help=(
                Help("print what is given as init_method, just before", "print(repr(init_method))"),
                Help("or leave init_method out: a launcher sets what env:// reads", 'dist.init_process_group("gloo")'),
            ),
            said=words_of(cause.first, cause.who),
        ),
        error,
    )


def _address_cut(cause: Cause, error: Raised) -> Report | None:
    sizes = phrases.address_cut(error.message)
    if sizes is None:
        return None
    whole, piece = sizes
    report = account(
        cause,
        "world-size-differs",
        f"gloo got an address of {piece} bytes, where each has {whole}: a peer was given {'a smaller' if piece < whole else 'another'} "
        "world_size",
        help=(Help("print it in each process, just before", "print(rank, world_size)"),),
        said=words_of(cause.first, cause.who),
    )
    why = "each rank writes one address for each other rank, and gloo cuts what a peer wrote by its own world_size; the log has no number"
    return _at(msgspec.structs.replace(report, confidence="likely", why=why, ranks=()), error)


def _npu_busy(cause: Cause, error: Raised) -> Report | None:
    if not phrases.npu_busy(error.message):
        return None
    report = account(
        cause,
        "device-busy",
        f"{cause.who} did not get its NPU: an earlier job still has it, says its driver",
        help=(
            Help("see who has it", "npu-smi info"),
            Help("end what is left of the earlier job, and wait for some seconds"),
        ),
        said=words_of(cause.first, cause.who),
    )
    return _at(msgspec.structs.replace(report, confidence="likely", why='the driver says "Maybe"'), error)


def _shared_memory_full(cause: Cause, error: Raised) -> Report | None:
    if not reading.shared_memory_full(error):
        return None
    return _at(
        account(
            cause,
            "rank-out-of-memory",
            f"{cause.who} ran out of shared memory (/dev/shm): {wording.named(error)}",
            why="semaphores and shared blocks of multiprocessing are files there",
            help=(
                Help("see how large it is, and what it has", "df -h /dev/shm; ls -l /dev/shm"),
                Help("give the container more of it", "docker run --shm-size=8g ..."),
            ),
            said=words_of(cause.first, cause.who),
        ),
        error,
    )


def _perhaps_forked(cause: Cause, error: Raised) -> Report | None:
    if not reading.cuda_perhaps_after_fork(error):
        return None
    report = account(
        cause,
        "cuda-before-fork",
        f"{cause.who} could not start CUDA in a process of multiprocessing, as when that was forked after CUDA was up",
        help=(Help("start processes that use CUDA with spawn", 'torch.multiprocessing.get_context("spawn").Process(...)'),),
        said=words_of(cause.first, cause.who),
    )
    why = "CUDA says no more than that it could not be started; how the process was started is not in the log"
    return _at(msgspec.structs.replace(report, confidence="likely", why=why), error)


def ssh_unresolved(cause: Cause) -> Report:
    """ssh, by which mpirun, pdsh and others start processes elsewhere, found no address."""
    error = cause.first.error
    host = phrases.ssh_host(error.message) if error is not None else ""
    alone, colon, _ = host.partition(":")
    at = cause.first.place
    followed = any(s.sign is Sign.SPOKEN and s.place.log == at.log and 0 < s.place.line - at.line <= SOON for s in cause.findings.sightings)
    doubt = "the log goes on for long after it, and does not say that it ended the job" if cause.first.went_on and not followed else ""
    report = account(
        cause,
        "address-unresolved",
        f"the host name {host} has no address here, says ssh",
        why="no host name has a colon: what follows it was taken for part of the name" if colon else "",
        help=(
            Help("name the host without its slots: a hostfile has them in a column of its own", f"mpirun -H {alone} ...")
            if colon
            else Help("ask the resolver of this machine", f"getent hosts {host}"),
        ),
        said=words_of(cause.first, "ssh"),
    )
    return msgspec.structs.replace(report, ranks=(), confidence="likely", why=doubt) if doubt else report


def same_rank(cause: Cause) -> Report:
    """As many processes as the group has came, some of them as the same rank: the others stay away, and nobody says that it failed."""
    ranks = cause.first.ranks
    report = account(
        cause,
        "rank-duplicate",
        f"more than one process came as {ranks_phrase(ranks)}, by the lines of Lightning",
        evidence=(f"{cause.first.text}; a group waits for each of its ranks",),
        help=(
            Help("see what each process is given, by the same launcher", "srun env | grep -e SLURM_PROCID -e SLURM_NTASKS -e NODE_RANK"),
            Help("and start them either by Slurm, one task for each GPU, or by Lightning, one task for each node"),
        ),
    )
    why = "each says its rank once, before it meets the others; of an earlier attempt in the same log there is no word"
    return msgspec.structs.replace(report, confidence="likely", why=why)


def _at(report: Report, error: Raised) -> Report:
    own = any(not stacks.library(frame) for frame in error.frames)
    place = stacks.place(error.frames, "") if own else ""
    return msgspec.structs.replace(report, where=re.sub(r"^, ", "", place))
