"""The process that wrote a line, by its prefix: the prefixes that launchers, schedulers and
collectors of logs put before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rallypoint.diagnosis.log_events import NOBODY, Speaker, of_rank
from rallypoint.diagnosis.pattern import Pattern

# prefixes of one line: a container's time, kubectl's pod, mpirun's tag, torchrun's, torch's own,
# and one to spare
_STRIPPED = 6

# Prefixes that name no process, but stand in front.
_CARRIERS = Pattern(
    # kubectl, docker, cri-o
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? "
    r"(?:(?:stdout|stderr) [FP] |(?=\S|  )(?!\||-|INFO|WARN|ERROR|DEBUG))"
    # ctime(3): mpirun --timestamp-output, dmesg -T
    r"|\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}(?:\] |(?=\[))"
    # Determined, which puts the rank between its two marks where there are several.
    r"|\[\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?Z?\] [0-9a-f]{8} (?:\|\| |(?=\[rank=\d+\] \|\| ))"
    r"|\|\| ?(?=\S|  |$)"
    # A progress bar of tqdm's, which ends without a newline. Without a total it has its unit.
    r"|.{0,200}?\d(?: ?[A-Za-z]\w{0,20} \[[\d:]{4,12}|[kMGTPE]? \[[\d:]{4,12}<[\d:?]{1,12}), [^\]]{1,200}\](?=[^\s\]])"
    r"|.{0,200}?\beta:? +[\d:]{4,12} ?[-|/\\](?=[A-Z])"  # progressbar's, which turns
    # a bar of any kind, and behind it how a shell tells the end
    r"|.{0,300}?(?:[\d\]%]|it/s)(?=(?:Killed|Terminated|Aborted|Segmentation fault|Bus error|已杀死)(?: \(core dumped\))?$|zsh: [a-z])"
    # journald, syslog
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w.@/-]+(?:\[\d+\])?: "
    r"|> (?=\S|  |$)"  # a quotation
    # the column of a summary
    r"| {0,40}\| (?=\[rank\d+\]: )"
    # the marks of a page; "Error:" before the type
    r"|(?:[`*_#]{1,8}|[Ee]rror[:\uff1a]) ?(?=(?:[A-Za-z_]\w{0,60}\.){0,9}[A-Z]\w{0,60}(?:Error|Exception): |\[[\w,:.-]{1,60}\](?:<std|: ))"
    r"|\[pod/[^\]]+\] "  # kubectl logs --prefix
    r"|[\w.-]+[-_]\d+ +\| "  # docker compose
    # vLLM
    r"|(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[\w./-]+:\d+\]|[\w./-]+:\d+\]) ?(?=\S|  |$)"
    # torch's elastic, quoting a process
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [\w./\\-]+\.py:\d+\] (?=  File |    |[A-Z]\w*Error: )"
    # A logger that quotes ranks.
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+ - [\w.]+ - (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - (?=\[rank\d+\]: )"
    r"|[\w.-]+: (?=\[rank\d+\]:)"  # pdsh: the host
)
_SPEAKERS = (
    (
        "rank {}",
        Pattern(
            r"\[rank(\d+)\]: ?"  # torch
            r"|\[rank=(\d+)\] "
            # mpirun --tag-output, horovodrun; SageMaker has "1,mpirank:11,algo-2" in its brackets.
            # Some put a space behind it, and two are the indentation of a frame.
            r"|\[(?:[\w@.-]{1,100},)?(?:mpirank:)?(\d+)(?:,[\w.-]{1,100})?\]<std(?:err|out|diag)>:(?: (?! ))?"
            r"|\[(\d{1,4})\] (?=\S|  )(?!NCCL| {3}\d+ [a-z])"  # rallypoint, and no job of zsh's
            r"| ?(\d{1,5}): (?=\S|  |$)"  # srun --label
        ),
    ),
    (
        "local rank {}",
        Pattern(
            r"\[[A-Za-z_]{1,60}(\d{1,5})\]:(?!\d)"  # torchrun --tee: [default0]:
            r"|[a-z][\w-]{0,60}/\d{1,5} \[(\d{1,5})\]:"  # TorchX: trainer/0 [1]:
        ),
    ),
    # [trainer22|6]:RuntimeError: ...
    (
        "{}",
        Pattern(
            r"(\[[^\]\s]{1,60}\]):(?=(?:[A-Za-z_]\w{0,60}\.){0,9}[A-Z]\w{0,60}(?:Error|Exception): )"
        ),
    ),
    (
        "{} pid {}",
        Pattern(
            # SkyPilot has the number of the node; Ray has no name for a process without an actor
            r"\(([A-Za-z_]\w{0,60}(?=[ ,])|)(?:, rank=\d{1,5})?,? ?pid=(\d{1,9})(?:, ip=[\d.]{1,40})?\) ?"
        ),
    ),  # Ray, vLLM
)
"""Names that prefixes give, and the forms of these prefixes."""


def split(text: str) -> tuple[Speaker, str]:
    """Part a line into its speaker and its words. The innermost prefix names the speaker: torch
    knows its rank, what carries the log may not.
    """
    speaker, mark = NOBODY, ""
    for _ in range(_STRIPPED):
        if (found := _CARRIERS.match(text)) is not None:
            text = text[found.end() :]
            continue
        if (named := _speaker(text)) is None:
            break
        found, told = named
        mark += found.group(0)
        speaker = told if told.rank >= 0 or speaker.rank < 0 else speaker
        text = text[found.end() :]
    return (speaker._replace(mark=mark.rstrip()) if speaker.known else NOBODY), text


def _speaker(text: str) -> tuple[re.Match[str], Speaker] | None:
    for name, forms in _SPEAKERS:
        if (found := forms.match(text)) is not None:
            words = [word for word in found.groups() if word is not None]
            rank = int(words[0]) if name == "rank {}" else -1
            return found, Speaker(rank, name.format(*words).strip() if rank < 0 else f"rank {rank}")
    return None


_BEFORE_FRAMES = Pattern(
    # what a logger wrote into the line is none
    r"(?!.{0,80}?(?:Error|Exception|ERROR|WARNING|CRITICAL|INFO|DEBUG)\b.{0,80}?Traceback)"
    r"(?P<prefix>(?:\S{1,40} ){0,2}(?:\S{1,60}[:>\]]|\S{1,60} *\|) ?)"
    r"(?=(?:\[rank\d+\]: ?)?(?:  File \"[^\"]+\", line \d+|Traceback \(most recent call last\):))"
)
_FRAMES = Pattern(r"(?:\[rank\d+\]: ?)?(?:  File \"|Traceback \(most recent call last\):)")
_CLOCK = Pattern(r"\d:\d\d:\d\d")
# What is a prefix where all lines have it: a time, or a host with a number in its name.
_COMMON = Pattern(
    r"(?P<clock>\[?(?:\d{4}[-/]\d\d[-/]\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?= ))"
    r"|(?!python|\d+:|[\w.-]{0,100}(?:Error|Exception|\.\w?[a-z]{2}):)"
    r"(?=[\w.-]{0,100}\d)[\w.-]{1,100}:(?= (?!line \d|error:))"
)
# What a logger writes before each line of a program that it runs, at one level: Airflow, Prefect,
# Celery, Dask, loguru, Python's own.
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|SUCCESS|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
_QUIET = ("TRACE", "DEBUG", "INFO", "NOTICE", "SUCCESS")
_LOGGER = Pattern(
    r"(?:[\[(]?(?:\d{4}[-/]\d\d[-/]\d\d(?:, |[T ]))?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    rf"[\]):]{{0,2}} (?:[|-] )?(?:[\[{{(]?[\w.:/<>-]{{1,60}}[\]}})]? (?:[|-] )?){{0,2}}?[\[(]?(?P<level>{_LEVEL})(?:/[\w-]{{1,40}})?[\])]?:?"
    r"(?:(?: {0,8}[|-])?(?: [\w./]{1,60}(?::[\w<>.]{1,60}){0,2} [|-])?(?: |$)|(?= )|$)"
    rf"|(?P<python>{_LEVEL}):[\w.]{{1,60}}:)"
)
FEWEST = 3  # lines that show a host
MOST_PREFIXES = 64  # forms of prefixes that one log may have
LONGEST_PREFIX = 200  # characters


class Prefixes:
    """Prefixes that nobody here knows. Whatever stands before a frame of a traceback is one:
    "trainer-2:", "web  |", "10.0.0.4 [0]". Every line that begins with it, or with what differs
    from it by its numbers alone, has one, too; one that tells the time names nobody. Nor does one
    of another form, which counts where it stands before the first line of the traceback, too:
    "ERROR 2026-01-15T11:03:07Z [resource.labels.taskName: workerpool0-0] "."""

    def __init__(self) -> None:
        self._known: dict[str, re.Pattern[str]] = {}
        self._carried: set[str] = set()  # forms of what names nobody
        self._head = ""  # the form of what stands before a traceback's first line
        self._indent = 0  # of all lines
        self._level = ""  # of most lines, where a logger wrote all
        self.quiet = False  # a logger wrote the line that was parted last, at a level below WARNING
        self.loud = ""  # the first line, where a logger wrote all at level ERROR or above
        self._common: dict[str, re.Pattern[str]] = {}  # what all lines have, at most one

    def begin(self, lines: Sequence[str], *, whole: bool) -> None:
        """Note what stands before every line of the log, by its first ones: an indentation, a time
        of any form, the head that a logger writes, and a host where the `whole` log is here.
        """
        lines = [line for line in lines if line.strip()]
        self._indent = min((len(line) - len(line.lstrip(" ")) for line in lines), default=0)
        lines = [line[self._indent :] for line in lines]
        levels = [_level(_LOGGER.match(line)) for line in lines]
        self._level = max(levels, key=levels.count) if len(levels) > 1 and all(levels) else ""
        self.loud = lines[0] if self._level in ("ERROR", "CRITICAL", "FATAL") else ""
        found = _COMMON.match(lines[0]) if lines else None
        if found is None or (not found["clock"] and (len(lines) < FEWEST or not whole)):
            return
        form = re.sub(r"\d+", r"\\d+", re.escape(found[0]))
        common = re.compile(form + r"(?: (?=\S|  |$)|(?= )|$)")
        if all(common.match(line) for line in lines):
            self._common[form] = common
            of_one = all(line.startswith(found[0]) for line in lines)
            self._carried.update({form} if found["clock"] or of_one else ())

    def split(self, text: str) -> tuple[Speaker, str]:
        """Part a line by known prefixes, and by those that this log has shown so far."""
        if self._indent and text[: self._indent].isspace():
            text = text[self._indent :]
        self.quiet = False
        if self._level and _level(head := _LOGGER.match(text)) == self._level:
            self.quiet = self._level in _QUIET
            text = text[head.end() if head is not None else 0 :]
        speaker, said = split(text)
        if len(self._known) < MOST_PREFIXES and ("  File " in said or "Traceback" in said):
            self._learn(said)
        for form, known in (*self._known.items(), *self._common.items()):
            if (found := known.match(said)) is not None:
                inner, rest = split(said[found.end() :])
                # a number alone behind a time is a step's
                if inner.known and (form in self._known or re.search("[a-z]", inner.mark)):
                    return inner, rest
                rest = said[found.end() :] if inner.known else rest
                mark = found[0].rstrip()
                named = (
                    speaker
                    if speaker.known or form in self._carried or _CLOCK.search(mark)
                    else Speaker(-1, mark.rstrip(" :|>"), mark)
                )
                return named, rest
        return speaker, said

    def _learn(self, said: str) -> None:
        """Note what stands before a frame, where it has the form of a prefix, or stood before the
        first line of the traceback, too.
        """
        found = _BEFORE_FRAMES.match(said)
        prefix = found["prefix"] if found is not None else _FRAMES.split(said, maxsplit=1)[0]
        prefix = re.sub(r"\[rank\d+\]: ?$", "", prefix)  # torch's own, which names the speaker
        form = re.sub(r"\d+", r"\\d+", re.escape(prefix))
        # a bar alone stands before a member of an exception group
        if not prefix.strip(" |") or len(prefix) > LONGEST_PREFIX:
            return
        if found is None and "Traceback" in said:
            self._head = form
        elif found is not None or form == self._head:
            self._known.setdefault(form, re.compile(form))
            self._carried.update({form} if found is None else ())


def _level(head: re.Match[str] | None) -> str:
    """Return the level in a logger's head; "" for none."""
    return (head["level"] or head["python"]) if head is not None else ""


def before_traceback(said: str, speaker: Speaker) -> tuple[Speaker, str]:
    """Part what stands before a traceback in its first line: the process that the traceback is of,
    and the words that another process, or the same, wrote there.
    """
    if (found := re.search(r"\[rank(\d+)\]: ?$", said)) is not None:
        return of_rank(int(found[1]), found[0].rstrip()), said[: found.start()]
    return speaker, said.rstrip(" ,")


def of_file(path: str) -> Speaker:
    """Read the rank from the name of a log: `rank3.log`, `.../attempt_0/3/stderr.log`,
    `node-0-rank-3.out`.
    """
    found = re.search(r"(?:^|[/_.-])rank[_.-]?(\d+)\b", path) or re.search(
        r"/attempt_\d+/(\d+)/std(?:err|out)\.log$", path
    )
    return of_rank(int(found[1])) if found else NOBODY
