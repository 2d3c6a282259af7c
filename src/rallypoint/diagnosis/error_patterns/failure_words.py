"""Lines that plainly speak of a failure, whatever program wrote them."""

from __future__ import annotations

from rallypoint.diagnosis.pattern import Pattern

_EXCEPTION = Pattern(  # pytest puts an E before it
    r"^(?:E {3,12})?(?P<type>(?:[A-Za-z_]\w*\.)*_?(?:[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)|Exception)): ?(?P<message>.+)$"
)

_OF_CONDA = Pattern(r"CondaError: Run 'conda |CommandNotFoundError: Your shell ")
"""What conda says in a script before the job, and the script goes on."""

# A line that itself says that it is no failure, or that quotes: help texts, configuration, the
# source line in a traceback, a warning of Python's that is not of CUDA.
NO_FAILURE = Pattern(
    r"\b(raise|except|assert|warnings?\.warn|print|logger?\.\w+)\b ?[\w.(]*\(|\bIf you\b|--help"
    r"|:\d+: \w{0,40}Warning: (?!CUDA|Can't)|retry(ing)?\b|\bskip(ped|ping)?\b"
)

# A line that speaks of a failure plainly, whatever program wrote it. Not every "error": a metric
# has that name, and a number behind it.
_FAILURE = Pattern(
    r"\[error\]|\bmay be stuck\b|\b[Ee]rror(?: \(\d+\))?[:!](?! *[-+]?[\d.]+(?:\s|$))|\bERROR\b(?!S?: ?0\b)|\b(?:FATAL|CRITICAL|PANIC)\b"
    r"|\b\w{3,}(?:Error|Exception)(?::|$|\()|\bException\b"
    r"|\b(?:[Ff]atal|[Aa]borting|[Aa]borted|[Cc]rashed|[Ss]talled|unexpectedly|core dumped|BAD TERMINATION|segfault|[Ff]ailed)\b"
    r"|\b(?:FAILED|Evicted)\b|\b(?:Connection (?:refused|reset|closed)|Permission denied|No route to host|No such file or directory)\b"
    r"|\bcommand not found\b|\bMPI_ABORT was invoked\b|\b[Aa]n error occurred\b|\b[Uu]nhandled exception\b|\b[Ff]ailure: (?!0\b)|^Error executing job"
    r"|\b(?:[Jj]ob|[Pp]rocess|[Ww]orkers?|[Aa]ctor|[Nn]ode|[Rr]anks?|[Tt]asks?|[Cc]hild|[Ss]erver|[Ee]ngine|[Ss]tep|[Pp]od)\b.{0,60}"
    r"\b(?:died|dead|killed|terminated|lost|evicted)\b"
    r"|\b(?:[Kk]illed by|[Tt]imed out|[Uu]nable to|got stuck|shut down because|sending signal (?:TERM|KILL)|fallen off the bus|NVRM: Xid)\b"
    r"|\b(?:[Ee]xit(?:ed)?(?: with)?(?: (?:[Ee]xit )?(?:[Cc]ode|[Ss]tatus))|exitcode|EXIT CODE)\b ?[:=]? *-?(?!0\b)\d+"
    r"|\b[Ll]ost (?:communication|connection|contact) (?:with|to)\b|\bwill (?:terminate the job|now abort)\b"
    r"|\bThere are not enough slots\b|\bnot registered within the timeout\b"
    r"|non-zero (?:exit|status)|\bSIG(?:SEGV|ABRT|BUS|ILL|FPE|KILL)\b|\b(?:Reason|Status|reason|status): +(?:Error|Failed|OOMKilled)\b"
    r"|退出代码 ?-?[1-9]|\bSystemExit: [1-9]|\bdoes not know how to route\b"
)

_QUIET_LEVELS = Pattern(
    r"^(?:\S{1,40} ){0,3}\[?(?:DEBUG|INFO|TRACE)\b|NCCL INFO|\[I\d* |^I\d{4} |(?<![\d.])0 (?:errors|failed|failures)\b"
    r"|[Nn]o (?:errors?|failures?)\b"
)

# What launchers say beside the facts: of the failure that they tell in another line.
_REMARKS = Pattern(
    r"^Primary job +terminated|^a non-zero exit code\. Per user|^mpirun detected|^Please (?:see|check|look)|CLEANING UP REMAINING"
    # What many programs say on their way that go well: TensorFlow beside torch, pip.
    r"|Unable to register cu\w+ (?:factory|plugin)|Could not load dynamic library|NUMA node read from SysFS|pip's dependency resolver"
)

LONGEST = 1500  # characters of a line that may be a message; what is longer is data


def exception(text: str) -> tuple[str, str] | None:
    """Part a line with the form of an exception's last into type and message."""
    if not _OF_CONDA.match(text) and (found := _EXCEPTION.match(text)) is not None:
        return found["type"], found["message"]
    at = text.find("Error(s) in loading state_dict for ")  # a logger had it in its own form
    return ("RuntimeError", text[at:]) if at >= 0 else None


def speaks_of_failure(text: str) -> bool:
    """Tell whether a line plainly says that something failed, though its words are not known here."""
    if (
        len(text) > LONGEST
        or _QUIET_LEVELS.search(text)
        or NO_FAILURE.search(text)
        or _REMARKS.search(text)
    ):
        return False
    return _FAILURE.search(text) is not None
