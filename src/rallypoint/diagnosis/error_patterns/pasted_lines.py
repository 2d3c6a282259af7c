"""Classic lines that name no cause by themselves: which few causes leave each of them, and how to
tell these apart. Pure.

A log has more than one line, and its cause is looked for there (`logs/`). Somebody who pastes one
line has nothing else to show.
"""

from __future__ import annotations

import re

import msgspec

from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report


class Classic(msgspec.Struct, frozen=True):
    """A line that many people meet."""

    pattern: Pattern
    headline: str
    causes: tuple[str, ...]  # the most frequent one first
    help: tuple[Help, ...]
    question: str = ""  # the page in docs/questions that goes on about it


def _classic(
    words: str, headline: str, causes: tuple[str, ...], *help: Help, question: str = ""
) -> Classic:
    return Classic(Pattern(words, re.IGNORECASE), headline, causes, help, question)


_ALL_LOGS = Help(
    "read the logs of all ranks together: the cause may stand in one of them",
    "rallypoint explain logs/*.log",
)
_STANDS = Help("or see where each rank stands while it hangs", "rallypoint run --stall 60 ...")
_LOST = (
    "another rank died or raised first: its own log has the cause, and this rank is not at fault",
    "or another rank ended its program while this one still made collective calls: the ranks made different numbers of steps",
    "or a network between two machines broke the connection",
)

# The first one that fits counts, so what is more special stands above what is less.
CLASSICS = (
    _classic(
        r"gai error|gaierror|Name or service not known|name resolution|No address associated with hostname|nodename nor servname",
        "the name of a host has no address on the machine that asked",
        (
            "the name is misspelt, or belongs to another cluster, or to a Kubernetes service that does not exist",
            "or the host is not up yet: the names of pods come a while after the pods",
            "or no name server answers (Temporary failure in name resolution)",
        ),
        Help("ask on the machine where it failed", "getent hosts NAME"),
        Help("see how this machine resolves names, its own too", "rallypoint doctor --only names"),
        Help("read more about it", "rallypoint explain address-unresolved"),
    ),
    _classic(
        r"Signal 9 \(SIGKILL\)|exitcode *:? *-9\b|exit ?code[: ]+137\b",
        "a process was ended by SIGKILL",
        (
            "the kernel or the container ran out of memory: this is the most frequent cause",
            "or a launcher stopped it, because another rank had failed first: its own log has the cause",
            "or a scheduler or a person killed it (time limit, preemption, kill -9)",
        ),
        Help("see whether memory ran out", "sudo dmesg -T | grep -i 'killed process'"),
        _ALL_LOGS,
        Help("read more about it", "rallypoint explain rank-killed"),
    ),
    _classic(
        r"Signal (11|6|4|7|8) \(SIG|exitcode *:? *-(11|6|4|7|8)\b|exit ?code[: ]+(139|134)\b|^Segmentation fault|^Aborted",
        "a process crashed in native code",
        (
            "a library that was built for another version, or used from two threads or after a fork, crashed",
            "or a C++ exception of NCCL or gloo was not caught, because another rank had gone: its own log has the cause",
        ),
        Help("see the Python line at which it crashed", "python -X faulthandler train.py"),
        _ALL_LOGS,
        Help("read more about it", "rallypoint explain rank-crashed"),
    ),
    _classic(
        r"client socket has (timed out|failed to connect)|failed to connect to any network address|RendezvousConnectionError"
        r"|connection to the C10d store has failed",
        "the rank did not reach the meeting point, MASTER_ADDR:MASTER_PORT",
        (
            "nobody listens there: rank 0 was not started, has failed before, or has another address or port",
            "or the host's name has no address here, or another one than was meant",
            "or a firewall drops what is sent there; then there is no answer at all",
        ),
        Help("see on the machine of rank 0 whether anything listens", "ss -ltnp | grep 29500"),
        Help("see from the other machine what the address answers", "nc -vz MASTER_ADDR 29500"),
        Help(
            "or start the ranks with one command, which needs no address",
            "rallypoint run -n 2 train.py",
        ),
        question="connection-refused",
    ),
    _classic(
        r"Connection refused|Errno 111\b|ConnectionRefusedError|Errno 61\b",
        "nobody listens at the address that was connected to",
        (
            "a tensor was taken from a queue whose producer has ended, if the traceback ends in multiprocessing/resource_sharer.py: "
            "rallypoint explain producer-gone",
            "or a rank looked for rank 0, which is not started, not there yet, or at another port, if TCPStore, Gloo or "
            "init_process_group stands in the traceback: rallypoint explain port-refused",
            "or a server of another kind is not running (a database, wandb, a proxy), if the traceback ends in its library",
        ),
        Help(
            "look at the last frames of the traceback, or give all of it",
            "rallypoint explain train.log",
        ),
        question="connection-refused",
    ),
    _classic(
        r"collective operation timeout|Watchdog caught|Timed out waiting \d+ ?ms|Some NCCL operations have failed or timed out",
        "a collective call was not completed in time, because some rank did not make the same call",
        (
            "another rank died or raised first: its own log has the cause",
            "or the ranks make different calls, or different numbers of steps: a branch on the rank, or data of different length",
            "or one rank works longer than the timeout (a checkpoint, an evaluation, a download) while the others wait",
        ),
        _ALL_LOGS,
        _STANDS,
        Help(
            "if one rank really needs that long, raise the timeout",
            "dist.init_process_group(..., timeout=timedelta(hours=1))",
        ),
    ),
    _classic(
        r"store->get\('?\w*'?\) got error|ncclUniqueId.*(timeout|error)|(^|Error: )Socket Timeout|wait timeout after \d+ ?ms",
        "a rank waited in vain for what another rank was to write into torch's store",
        (
            "the other rank, mostly rank 0, did not come to the same call: it failed before, or works elsewhere",
            "or rank 0, which holds the store, has ended",
        ),
        _ALL_LOGS,
        _STANDS,
    ),
    _classic(
        r"RendezvousTimeout|RendezvousClosed",
        "the launchers of the nodes did not meet",
        (
            "fewer nodes came than --nnodes says, in time: one was not started, or started much later",
            "or the nodes have different --rdzv-id, --rdzv-endpoint or --nnodes",
            "or the job had ended in the others already, when this one came (RendezvousClosedError)",
        ),
        Help(
            "compare the command that each node ran, and whether each reaches the endpoint",
            "nc -vz MASTER_ADDR 29500",
        ),
    ),
    _classic(
        r"connectFullMesh",
        "the ranks met, and gloo could not connect them to each other",
        (
            "another rank ended while the group was being made: its own log has the cause",
            "or gloo chose an interface that the others do not reach (several nodes, a VPN, docker)",
            "or the job was started again with a store, or a file, of the attempt before",
        ),
        _ALL_LOGS,
        Help(
            "name the interface by which the machines reach each other",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
    ),
    _classic(
        r"Connection (closed|reset|aborted) by|Connection reset|Broken ?pipe|communicator was aborted|ncclRemoteError|got 0 bytes",
        "the process at the other end of a connection has gone",
        _LOST,
        _ALL_LOGS,
    ),
    _classic(
        r"^EOFError(: Ran out of input)?$",
        "something ended where more was expected",
        (
            "a process that was to send an object has ended: look for its own traceback",
            "or a file that was to be loaded is empty or cut off: a checkpoint that two ranks wrote at once, or a full disk",
        ),
        Help(
            "let one rank write, and the others wait",
            "if dist.get_rank() == 0: torch.save(...); dist.barrier()",
        ),
    ),
    _classic(
        r"ChildFailedError",
        "torchrun says that one of its ranks failed, and not why",
        (
            'the lines above it have the rank\'s own traceback; the table below it names the rank ("Root Cause", exitcode)',
        ),
        Help("give the whole log", "torchrun train.py 2>&1 | rallypoint explain"),
    ),
)


_ADDRESS = Pattern(
    r"(?:connect to|address of) (?:any network address of )?[(\[](?P<host>[\w.:-]{1,255})(?:, |\]:)(?P<port>\d{1,5})"
)


def _at(help: Help, address: re.Match[str]) -> Help:
    """The help with the host and the port that the line names."""
    command = help.command.replace("MASTER_ADDR", address["host"]).replace("29500", address["port"])
    return msgspec.structs.replace(help, command=command)


def report(line: str) -> Report | None:
    """Report what a line may mean that was pasted alone; None for a line that is not
    known.
    """
    classic = next((one for one in CLASSICS if one.pattern.search(line)), None)
    if classic is None:
        return None
    address = _ADDRESS.search(line)
    helps = (
        tuple(_at(one, address) for one in classic.help) if address is not None else classic.help
    )
    if classic.question:
        helps = (*helps, Help("read more about it", f"rallypoint explain {classic.question}"))
    return Report(
        code="cause-unknown",
        headline=classic.headline,
        why="this line alone does not say which of these it is" if len(classic.causes) > 1 else "",
        evidence=classic.causes,
        help=helps,
        exit_status=1,
    )
