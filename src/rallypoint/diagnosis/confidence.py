"""Confidence in a cause that was read from a log: when it is certain. Pure.

For a running job `root_cause.py` decides, and each cause by its evidence.

A log is the part of a job that somebody kept, and its words are those of programs that nobody here
may know. So `certain` is earned, by three things together; whatever lacks one of them is `likely`
at most, and says which:

1. The words. A text that only one cause leaves (torch's own "out of memory") needs no more. An
   exception without such a text is the program's own when it left the program's own code, or is of
   a kind that nothing but the program's own code and data bring about (KeyError, a shape that does
   not fit, a class of its own). What left code that deals with other processes, machines or devices
   is not, nor is what speaks of them: who raised it is then known, and what was wrong is not.
   `of_error`.
2. The place. Nothing before it speaks of a failure in words that are not known here. `of_place`.
3. The order. A process that ended, or a lost peer, before a stop: then the stop is somebody's
   answer to that. `answers`.

Who failed first is told by the launcher (torchrun's root cause, mpirun's "the first process to do
so") before it is told by the order of lines, which are of many processes, and of buffers that are
written late.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from rallypoint.diagnosis import classify, stacks, tracebacks
from rallypoint.diagnosis.causes import wording
from rallypoint.diagnosis.error_patterns import python, slurm_words
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import Findings, Place, Sighting, Sign
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.rank_kinds import Kind, Verdict
from rallypoint.diagnosis.report import Report

INTRODUCES = 2
"""Lines before an error in which its announcement stands: "ERROR: training failed:", and the
traceback. That is no failure of its own.
"""

PLACED = (
    "rank-raised",
    "rank-exited",
    "rank-killed",
    "rank-crashed",
    "start-failed",
    "interrupted",
)
"""Codes that something else may have led to; the others name their cause by torch's, NCCL's or the
kernel's own words for it.
"""

_ANNOUNCES = Pattern(
    r":\s*$|\b[Ee]xceptions?\b|\b[Tt]raceback\b|\b[Ee]rror occurr?ed\b|\berror\.?$"
    r"|\b(ERROR|CRITICAL)\b.{0,99}\b(failed|crashed|aborted)[.!]*$"  # of logger.exception
    # Hydra; torch's rpc, which shows the exception itself, ValueError('x'); a DataLoader's worker
    r"|^Error executing job|^\w+\(['\"]|^ERROR: Unexpected .* encountered in worker"
)

# Code through which a program deals with other processes, machines and devices: what leaves it may
# be anybody's fault.
_BETWEEN = Pattern(
    r"(^|/)torch/(distributed|cuda|multiprocessing)/|(^|/)torch/nn/parallel/distributed\.py$"
    r"|(^|/)(multiprocessing|concurrent/futures|asyncio)/\w+\.py$|(^|/)(socket|subprocess|ssl|selectors|socketserver)\.py$"
    r"|(^|/)(horovod|lightning|lightning_fabric|pytorch_lightning|deepspeed|accelerate|ray|vllm|sglang|megatron|mpi4py|submitit|torchx"
    r"|torchrun|torchelastic|colossalai|bagua|dask|distributed|fairscale|oneccl_bindings_for_pytorch|cupy|pynccl)/"
)
_THEIR_TYPES = Pattern(
    r"^(torch\.(distributed|cuda|multiprocessing)|horovod|lightning|lightning_fabric|pytorch_lightning|deepspeed|accelerate|ray|vllm|sglang"
    r"|mpi4py|submitit|torchx|multiprocessing|concurrent|asyncio|socket|subprocess|grpc)\b"
    r"|(^|\.)(\w*(Connection|Timeout|Socket|Network|Rendezvous|Misconfiguration|Horovod|Actor|Worker|Engine|Process|Shutdown|Cancelled|Died"
    r"|Dead|Crash|Accelerator|Nccl|NCCL|MPI)\w*|Dist\w*Error|C10dError|Ray\w*Error|gaierror)$"
)
# Kinds that a program's own code and data bring about, whatever their words; a key or a name in
# these may be called "port".
_OWN_KINDS = frozenset((
    "AttributeError", "FloatingPointError", "ImportError", "IndentationError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError",
    "NotImplementedError", "OverflowError", "RecursionError", "StopIteration", "SyntaxError", "TabError", "TypeError", "UnboundLocalError",
    "UnicodeDecodeError", "UnicodeEncodeError", "UnicodeError", "ZeroDivisionError",
))  # fmt: skip
_OF_FILES = frozenset(
    (
        "FileExistsError",
        "FileNotFoundError",
        "IsADirectoryError",
        "NotADirectoryError",
        "PermissionError",
    )
)
_OF_A_FILE = Pattern(
    r"^\[Errno \d+\] [^:]+: '"
)  # Python names the file, and what the system said of it: nothing is left open
# The loader's own words, in which Python hands on that a library could not be loaded. What is
# installed is no code of the program's.
_OF_A_LIBRARY = Pattern(
    r"undefined symbol|[Ss]ymbol not found|cannot open shared object file|failed to map segment|file too short|(invalid|wrong) ELF"
    r"|version `\w+[\w.]*' not found|cannot allocate memory in static TLS|DLL load failed|\[WinError (126|127|193|1114)\]"
    r"|[Ll]ibrary not loaded|image not found|dlopen\(|incompatible architecture|compiled using NumPy|numpy\.dtype size changed"
    r"|numpy\.core\.multiarray failed|lib\w+\.(so|dylib)\b"
)
# Of these the kind alone says nothing: everybody raises them.
_ANYBODYS = frozenset(
    (
        "AssertionError",
        "BaseException",
        "EnvironmentError",
        "Exception",
        "IOError",
        "OSError",
        "RuntimeError",
        "SystemError",
        "ValueError",
        "",
    )
)
_OF_THE_PROGRAM = Pattern(
    r"\bshapes?\b|size mismatch|\bsizes? of tensors?\b|dimension|\bdtype\b|scalar type|state_dict|out of (bounds|range)"
    r"|expected all tensors|requires? grad|inplace operation|backward through"
    r"|weights? type|must match|broadcast together|\bnan\b|NaN",
    re.IGNORECASE,
)
_OUTSIDE = (
    (
        "the network: a host, an address, a port or a connection",
        Pattern(
            r"\b(hosts?|hostname|ip address|address(es)?|ports?|sockets?|connect(ion|ions|ed|ing)?|network|unreachable|resolve|dns"
            r"|name or service|endpoint|interface|time[ds]? ?-?out|deadline|unavailable)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "devices of the machine, or their driver",
        Pattern(
            r"\b\d+ (gpus?|devices?|accelerators?)\b|\bgpus?:|\b(number|count) of (gpus?|devices?)|device[_ ]count|VISIBLE_DEVICES"
            r"|\b(gpus?|devices?) (are|is|were|was)? ?(not )?(available|requested|visible|found)"
            r"|\bno (\w+ )?(gpus?|devices?|accelerators?)\b"
            r"|machine only has|\bdrivers?\b|\b(CUDA|HIP|cuBLAS|cuDNN|XPU|NPU|NVML|GPU)\b.{0,300}\b(error|fail)|\bC(UBLAS|UDNN|UDA)_STATUS",
            re.IGNORECASE,
        ),
    ),
    (
        "memory",
        Pattern(
            r"\bmemory\b|\bpaging\b|\bswap\b|\bmmap\b|/dev/shm|\ballocat(e|ion|ing)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "a process that is gone",
        Pattern(
            r"\b(died|exited|killed|terminated|crashed|unexpectedly)\b|\b(process|worker|actor|child|server|engine|node|task)\w*\b[^.]{0,40}"
            r"\b(dead|gone|lost|failed|not (alive|running|responding))\b|exit (code|status)|return(ed)? code",
            re.IGNORECASE,
        ),
    ),
    (
        "other ranks, or the store or group in which they meet",
        Pattern(
            r"\branks?\b|\bworld[_ ]?size\b|\bpeers?\b|\bother (process|worker|node)|\b(all|across|between) (process|worker|node|gpu)"
            r"|rendezvous|\bstore\b|TCPStore|process ?group|\bcollectives?\b|communicator|\b(NCCL|gloo|c10d|MPI|Horovod)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "something that was shut down",
        Pattern(
            r"shut(ting)?[ -]?down|\b(already|been|was|is) (closed|stopped|aborted|cancell?ed)|\baborted\b",
            re.IGNORECASE,
        ),
    ),
)

_WORDS = 1500  # characters of a message that are looked into; what is longer is data


def of_error(error: Raised) -> str:
    """Return why an exception without a text that names a cause is not certain to be the program's
    own; "" when it is.
    """
    error = tracebacks.from_loader(error) or error
    module, _, kind = error.type.rpartition(".")
    theirs = bool(_THEIR_TYPES.search(error.type)) and not (
        module and not _THEIR_TYPES.match(error.type)
    )
    if theirs:
        return f"{kind} comes of what a program has to do with other processes and machines, and what was wrong there is not in the log"
    inner = error.frames[-1] if error.frames else None
    if _OF_A_LIBRARY.search(error.message):
        return "a library could not be loaded, or is not the version that is wanted: what is installed is at fault, and which part is open"
    if (
        kind in ("ImportError", "ModuleNotFoundError")
        or classify.fits("disk-full", error)
        or _OF_A_FILE.search(error.message)
        or python.NOT_PICKLED.search(error.message)
    ):
        return ""
    if inner is not None and _BETWEEN.search(inner.file):
        where = stacks.library_path(inner.file)
        return f"it was raised in {where}, which deals with other processes, machines or devices: the program may not be at fault"
    if kind in _OWN_KINDS:
        return ""
    if not (
        module or kind in _OF_FILES
    ):  # another library's own class speaks of its own hosts, which are no ranks
        text = (wording.first_line(error.message) or error.message)[:_WORDS]
        for what, words in _OUTSIDE:
            if words.search(text) and not _OF_THE_PROGRAM.search(text):
                return f"its words speak of {what}; what was wrong there is not in the log"
    if kind in _ANYBODYS and not _OF_THE_PROGRAM.search(error.message):
        if inner is None:
            return "the log has no line of the program for it"
        if stacks.library(inner):
            return f"these are words of {stacks.library(inner)}'s that are not known here, and what led to them is not in the log"
    return ""


def of_place(code: str, place: Place | None, spoken: Sequence[Sighting]) -> Sighting | None:
    """Return the first line before a cause that speaks of a failure in words that are not known;
    None when there is none, or when it does not matter: the code names its cause by itself, or the
    same process went on for long after that line.
    """
    if code not in PLACED or place is None:
        return None
    before = [
        s
        for s in spoken
        if s.place.log == place.log and s.place.line < place.line and not s.went_on
    ]
    before = [
        s for s in before if s.place.line < place.line - INTRODUCES or not _ANNOUNCES.search(s.text)
    ]
    return min(before, key=lambda s: s.place.line, default=None)


_SOON = 10
"""Lines after the words of a stop in which Slurm tells what it was for."""


def answers(stop: Sighting, seen: Iterable[Sighting]) -> bool:
    """Tell whether a launcher's stop by a signal stands after a failure in the same log: whoever
    ends a job for one sends the same. Also a stop for which Slurm names no reason, where it tells
    of a failure soon after it.
    """
    if slurm_words.cancelled_for_no_reason(stop.text):
        of_task = slurm_words.is_for_a_task(stop.text)
        for s in seen:
            soon = 0 < s.place.line - stop.place.line <= _SOON and s.place.log == stop.place.log
            if soon and (s.sign is Sign.KILLED_FOR_MEMORY or (of_task and s.sign is Sign.ENDED)):
                return True  # Slurm often tells of the failure after the stop for it
    if stop.end.by:  # Slurm names its reason: the time limit, a preemption
        return False
    failures = (
        s for s in seen if not s.went_on and s.sign in (Sign.ENDED, Sign.RAISED, Sign.WATCHDOG)
    )
    return any(s.place.log == stop.place.log and s.place.line < stop.place.line for s in failures)


def placed(report: Report, findings: Findings) -> Report:
    """Return the report as likely where the log speaks of another failure before it, in words that
    are not known here. One of rallypoint's own has seen the job itself.
    """
    signs = {s.sign for s in findings.sightings}
    if Sign.REPORTED in signs or report.confidence != "certain" or not report.logs:
        return report
    log, _, line = report.logs[0].rpartition(":")
    spoken = [
        s for s in findings.sightings if s.sign is Sign.SPOKEN and not slurm_words.is_stop(s.text)
    ]
    # What refuses to start the job says so in several lines: "srun: error: ...".
    spoken = [
        s
        for s in spoken
        if not report.headline.startswith(f"{s.text.partition(':')[0]} did not start")
    ]
    before = of_place(report.code, Place(log, int(line)), spoken)
    if before is None:
        return report
    at = f"line {before.place.line}"
    told = f"{at}: {wording.cut(before.text, 200)}"
    why = f"{at}, before it, speaks of a failure, too, in words that are not known here"
    return msgspec.structs.replace(
        report, confidence="likely", why=why, evidence=(told, *report.evidence)
    )


def of_attempts(reports: Sequence[Report]) -> tuple[Report, ...]:
    """Return the causes of attempts after which the job was started again: none of them is certain
    to have ended it.
    """
    doubt = (
        "the launcher started all ranks again after it, and the log does not say what came of that"
    )
    return tuple(
        msgspec.structs.replace(report, confidence="likely", why=doubt)
        if report.confidence == "certain" and report.exit_status == 0
        else report
        for report in reports
    )


def doubt_in_log(group: Sequence[Verdict], report: Report) -> str:
    """Return why a cause that a log shows may be none all the same; "" when nothing speaks for it."""
    first = group[0]
    if first.rank.doubt:
        return first.rank.doubt
    if first.kind is Kind.ABORTED and not any(one.rank.stack_text for one in group):
        return "torch aborts, too, when another rank has failed, and the words of this one are not in the log"
    if report.code == "rank-raised" and first.error is not None:
        return of_error(first.error)
    return ""
