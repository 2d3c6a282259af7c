"""Texts of NCCL about a failure, in its warnings and through torch."""

from __future__ import annotations

import re

from rallypoint.diagnosis.pattern import Pattern

CAUSES = {
    "device-shared": Pattern(r"Duplicate GPU detected", re.IGNORECASE),
    "shared-memory": Pattern(
        r"posix_fallocate failed.{0,300}No space left on device"
        # until 2.19 without the reason, which posix_fallocate gives
        r"|failed to extend /dev/shm/\S{1,100} to \d+ bytes(?![\w,])",
        re.IGNORECASE,
    ),
    "rank-out-of-range": Pattern(r"Invalid rank requested : (?P<rank>-?\d+)/(?P<size>\d+)"),
    "interface-missing": Pattern(r"Bootstrap : no socket interface found"),
    "nccl-failed": Pattern(
        r"NCCL [Ee]rror|\bnccl(SystemError|InternalError|UnhandledCudaError|InvalidUsage"
        r"|InvalidArgument|RemoteError)\b"
        r"|\bNCCL failure [\w./-]+:\d+ '"  # nccl-tests, rccl-tests
    ),
    "calls-mismatched": Pattern(
        r"Mismatched collective detected(?:.{0,300}?at and around rank (?P<rank>\d+))?"
        r"|NET/IB.{0,300}?collective mismatch error"
        r"(?:.{0,300}?local size (?P<local>\d+) remote size (?P<remote>\d+))?"
        r"|(?P<told>Cannot apply desired operation due to shape mismatches)"  # accelerate
    ),
    "npu-busy": Pattern(  # HCCL, Ascend's own
        r"EJ0001: .*Failed to initialize the HCCP process\. "
        r"Reason: Maybe the last training process is running"
        r"|\] Device acquire (?P<failed>failed)"  # Gaudi
    ),
}

REMARKS = Pattern(r"^Failed to open lib|\bcan lead to\b|\bNET/Plugin\b|is deprecated")
"""Warnings of NCCL and RCCL that nothing has to follow from: optional libraries, settings."""

_THREAD = r"(?<![\w.-])(?P<thread>[\w.-]{1,100}:\d{1,9}:\d{1,9}) \[\d{1,4}\] "
THREAD = Pattern(_THREAD)
STARTED = Pattern(rf"{_THREAD}NCCL INFO (?:Using network |.{{0,300}} Init COMPLETE)")
"""Words of a thread of NCCL's that what it had warned of before did not stop."""

WAITED = Pattern(  # HCCL, Ascend's own
    r"Remote Rank did not send the data in time|wait execution of the Notify register times out",
    re.IGNORECASE,
)
LOST = Pattern(
    r"remote process exit|ncclRemoteError|Connection closed by (remote peer|peer \[|localRank)"
    r"|NCCL communicator was aborted",
    re.IGNORECASE,
)
NAMES_PEER = Pattern(
    r"remote process exit|ncclRemoteError|closed by|Connection (refused|reset)|socketProgress"
    r"|Broken pipe|communicator was aborted"
)
"""Words that name another rank as lost: the cause is there, or between the two."""

_WARNING = Pattern(
    r"(?:\bNCCL|\b[\w/]{1,60}\.(?:h|cc|cu):\d{1,5}) WARN (?P<words>.+)$"  # without its name until 2.3
)


def warning(text: str) -> str:
    """Read a warning; "" when the line is none, or only a remark."""
    found = _WARNING.search(text) if " WARN " in text else None
    remark = found is None or REMARKS.search(found["words"])
    return found["words"] if found is not None and not remark else ""
