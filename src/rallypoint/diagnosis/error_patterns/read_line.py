"""Single lines that tell of a failure: what each says. Only texts that were seen are listed, with
their sources in tests/logs, and what the makers of a library list themselves.
"""

from __future__ import annotations

import signal

import msgspec

from rallypoint.diagnosis.error_patterns import (
    launchers,
    mpi_words,
    python,
    refused_starts,
    services,
    shells,
    slurm_words,
    torch,
)
from rallypoint.diagnosis.error_patterns.known_line import KnownLine, line
from rallypoint.diagnosis.log_events import Collective, End, Sign
from rallypoint.diagnosis.pattern import Pattern

REPORTED = r"^(?:[ |]*rallypoint\.errors\.\w+: )?(?:error|stopped|warning(?=\[job-))\[([a-z]+(?:-[a-z]+)+|interrupted|usage)\]: (\S.*)$"
"""The headline of a report of rallypoint's own, also as the message of what `launch` raises."""

FOLDER = Pattern(
    r"^  logs (?=.*/rank\d+\.log:\d+$|(?!.*:\d+$)) *(/\S.*?)(?:/rank\d+\.log(?::\d+)?)?$"
)
"""The run folder at the end of such a report, or the log of a rank in it. A line of another log is
none: `rallypoint explain` wrote that.
"""

OURS = Pattern(f"{REPORTED}|{FOLDER.pattern}")

Told = tuple[Sign, End | Collective | None, tuple[int, ...]]
"""The content of a line: its kind, the facts in it, the ranks that it names."""


def ranks_of(listed: str) -> tuple[int, ...]:
    """Read ranks as Slurm writes them: `1-3,7`."""
    found: list[int] = []
    for part in listed.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(
                int(low), min(int(high) if high.isdigit() else int(low), int(low) + 100_000) + 1
            )
    return tuple(found)


# Windows has no signals: a crash leaves an NTSTATUS as exit code, which some show as a negative
# number.
_NTSTATUS = {
    0xC0000005: (int(signal.SIGSEGV), "access violation"),
    0xC0000006: (int(signal.SIGBUS), "in-page error"),
    0xC000001D: (int(signal.SIGILL), "illegal instruction"),
    0xC0000094: (int(signal.SIGFPE), "division of an integer by zero"),
    0xC00000FD: (int(signal.SIGSEGV), "stack overflow"),
    0xC0000374: (int(signal.SIGABRT), "heap corruption"),
    0xC0000409: (int(signal.SIGABRT), "stack buffer overrun, or an abort"),
}

_NTSTATUS_CONTROL_C = 0xC000013A


def exit_of(code: int) -> End:
    """Read how a process ended from the number that its launcher gives: -9, 137 as shells say it,
    or Windows' -1073741819.
    """
    of_windows = code & 0xFFFFFFFF
    if of_windows in _NTSTATUS:
        number, words = _NTSTATUS[of_windows]
        return End(signal=number, status=f"0x{of_windows:X} ({words})")
    if of_windows >> 28 == 0xC:
        return End(code=of_windows, status=f"0x{of_windows:X}")
    if code < 0:
        return End(signal=-code)
    return End(signal=code - 128) if 128 < code <= 128 + 31 else End(code=code)


_LINES: tuple[KnownLine, ...] = (
    line("]: ", REPORTED, Sign.REPORTED),
    *launchers.LINES,
    *slurm_words.LINES,
    *mpi_words.LINES,
    *services.LINES,
    *python.LINES,
    *torch.LINES,
    *(line(word, words, Sign.NOT_STARTED) for word, words, *_ in refused_starts.REFUSALS),
    *shells.LINES,
)
"""The first that fits a line counts: those with the fewest other meanings stand first."""


def told_by(text: str, *, of_launcher: bool = False) -> Told | None:
    """Read a line that is known; None for others. `of_launcher`: a launcher raised it, whose
    command may be any.
    """
    for known in (launchers.called(""), *_LINES) if of_launcher else _LINES:
        if known.word in text and (found := known.words.search(text)) is not None:
            return _told(known, found.groupdict())
    return None


_ENDS_BY_LAUNCHER = ("torchrun", "srun", "mpirun", "DeepSpeed", "horovodrun", "Composer", "Paddle")


def by_launcher(text: str) -> bool:
    """Tell whether a launcher says in this line how a process that it had started ended."""
    told = told_by(text)
    return told is not None and getattr(told[1], "by", "") in _ENDS_BY_LAUNCHER


def _told(known: KnownLine, facts: dict[str, str | None]) -> Told:
    ranks = ranks_of(facts.get("ranks") or "")
    if known.sign is Sign.WATCHDOG:
        elements = int(facts["elements"] or -1)
        sequence, milliseconds = int(facts["sequence"] or 0), int(facts["ms"] or 0)
        call = Collective(sequence, facts["kind"] or "", elements, milliseconds=milliseconds)
        return known.sign, call, ranks
    if known.sign not in (Sign.ENDED, Sign.KILLED_FOR_MEMORY, Sign.INTERRUPTED):
        return known.sign, None, ()
    of_memory = known.sign is Sign.KILLED_FOR_MEMORY
    end = End(signal=int(signal.SIGKILL) if of_memory else known.signal, code=known.code)
    if code := facts.get("code") or facts.get("got"):
        end = exit_of(int(code))
        if end.code == _NTSTATUS_CONTROL_C:
            return Sign.INTERRUPTED, None, ()
    elif number := facts.get("signal"):
        end = End(signal=int(number))
    elif name := facts.get("name"):
        end = End(
            signal=python.SIGNALS.get(name.capitalize())
            or int(getattr(signal, name, signal.SIGKILL))
        )
    rank = int(facts.get("rank") or (ranks[0] if len(ranks) == 1 else -1))
    end = msgspec.structs.replace(
        end,
        rank=rank,
        local_rank=int(facts.get("local") or -1),
        pid=int(facts.get("pid") or 0),
        host=facts.get("host") or "",
        by=facts.get("by") or known.by,
        first=known.first,
    )
    return known.sign, end, ranks
