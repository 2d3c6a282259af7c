"""Reading of one log, line after line, to what is seen in it. Memory is bounded by what differs,
not by how long the log is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from rallypoint.diagnosis import classify, tracebacks
from rallypoint.diagnosis.error_patterns import (
    failure_words,
    known_line,
    launchers,
    nccl,
    read_line,
    refused_starts,
    torch,
)
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import (
    NOBODY,
    NOT_ENDED,
    NOT_RAISED,
    Collective,
    End,
    Findings,
    Place,
    Sighting,
    Sign,
    Speaker,
    of_rank,
)
from rallypoint.diagnosis.logs import prefixes
from rallypoint.diagnosis.logs.block import HEADER, WORDS, native
from rallypoint.diagnosis.logs.crash_block import Crash
from rallypoint.diagnosis.logs.launcher_tables import MpiExit, Stall, Summary, Table
from rallypoint.diagnosis.logs.line_filter import LINE_LIMIT, Line, Sifter, as_utf8, shown
from rallypoint.diagnosis.logs.rich_traceback import RichTraceback
from rallypoint.diagnosis.logs.sightings import NCCL_INFO, Sightings
from rallypoint.diagnosis.logs.stack_dump import StackDump
from rallypoint.diagnosis.logs.traceback_blocks import (
    NOT_COMPILED,
    GroupTraceback,
    Message,
    Traceback,
    headless,
    spawned,
)
from rallypoint.diagnosis.pattern import Pattern

MOST_SPOKEN = 100
"""Lines of unknown words that are kept of one log; the first ones are shown."""

# lines after "Exception ignored in:" in which the traceback of that begins; others may write
# between them
IGNORED_WITHIN = 20

# lines of a log that are all read: a paste may begin inside a traceback, whose frames have no words
# of failure
BEGINNING = 40

PARAGRAPH = 30  # lines of mpirun's paragraph on why it does not start a job, at most
NAMELESS = 4  # last lines without a process name that are kept
LAST_WORDS = 6  # lines before the launcher's word of an end, for a process that says nothing itself

_STOPPED = Pattern(
    r"(?:(?:Sending|Terminating|Unable to shutdown) process|Killing subprocess) (\d+)"
)
_LAUNCHERS = Pattern(
    r"(?:Sending|Terminating) process \d+|Killing subprocess \d+|^srun: |^slurmstepd: |^\[?[EWIF]\d{3,4} |Setting OMP_NUM_THREADS"
    r"|^[*=-]{20}|^Primary job +terminated|^a non-zero exit code|resource_tracker|semaphore_tracker|len\(cache\)"
)
# Ray's last word where it knows no more
_WORKER_DIED = "A worker died or was killed while executing a task by an unexpected system error"
JOINED = 2000  # characters at its end that are read of a traceback which became one line
# the end of it
_IN_ONE_LINE = Pattern(r"\d+, in .*? ((?:\w{1,60}\.){0,9}\w{0,60}(?:Error|Exception): .+)$")
_PLACE = Pattern(r'^ *File "(.+)", line (\d+)$')

_Open = Traceback | GroupTraceback | Message | Crash | StackDump | Table


class Reader:
    """Findings of one log, as they grow.

    `log`: its name, as a report shows it; "" for text that lies in no file. `speaker`: the
    process of the log, when its name tells.
    """

    def __init__(self, log: str, speaker: Speaker = NOBODY) -> None:
        self._log = log
        self._speaker = speaker
        self._sifter = Sifter()
        self._sifter.attentive = True
        self._first_lines = BEGINNING  # that are still to come
        self._prefixes = prefixes.Prefixes()
        self._open: dict[str, tuple[Speaker, _Open]] = {}
        self._seen = Sightings()
        self._ranks = {speaker.rank}
        self._tasks = False  # the labels of srun are of what started the ranks
        self._stopped: list[int] = []
        self._ignored: dict[str, int] = {}  # the last line "Exception ignored" of each process
        self._restarts: list[Place] = []
        self._stood: dict[str, None] = {}  # where main threads stood
        self._groups: dict[int, str] = {}  # of each rank, as its watchdog names it
        # how many processes came as each rank to a group, its size, and a line that says so
        self._members: dict[int, int] = {}
        self._came = (0, 0)
        self._last_words: tuple[str, ...] = ()
        # of no known process, and no traceback: a `sys.exit("words")` under torchrun is such a line
        self._nameless: deque[str] = deque(maxlen=NAMELESS)
        self._before: tuple[str, ...] = ()
        self._words_of = self._before_of = -1  # of which attempt these are
        self._failed = False
        self._broken = NOBODY  # the process of a watchdog's line that was broken before its facts
        self._spoke = 0
        self._spawned = (0, -1)  # a line below which the traceback of a rank begins, and the rank

    def read(self, chunks: Iterable[bytes]) -> Findings:
        """Read all of it, and tell what was seen."""
        for chunk in self._begun(as_utf8(chunks)):
            self._take_all(self._sifter.feed(chunk))
        self._take_all(self._sifter.close())
        for name, (speaker, block) in list(self._open.items()):
            cut = isinstance(block, Traceback) and not block.break_off() and not block.ignored
            if cut and not self._spoke:
                self._note(Sign.SPOKEN, block.start, speaker, HEADER)
            self._settle(name)
        if self._prefixes.loud and not self._seen.every:
            self._note(Sign.SPOKEN, 1, NOBODY, self._prefixes.loud)
        self._seen.end()
        self._count_members()
        return Findings(
            tuple(self._named(sighting) for sighting in self._seen.every),
            self._sifter.number - 1,
            tuple(sorted(self._ranks - {-1})),
            tuple(self._stopped),
            self._failed,
            self._last_words,
            self._before,
            tuple(self._restarts),
            tuple(self._stood),
        )

    def _begun(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Hold the beginning of the log back until it is seen what stands before every line."""
        head, begun = b"", False
        for chunk in chunks:
            if begun:
                yield chunk
                continue
            head += chunk
            if begun := head.count(b"\n") >= BEGINNING or len(head) > LINE_LIMIT:
                self._begin_prefixes(head, whole=False)
                yield head
        if not begun:
            self._begin_prefixes(head, whole=True)
            yield head

    def _begin_prefixes(self, head: bytes, *, whole: bool) -> None:
        lines = head[:LINE_LIMIT].split(b"\n")[:BEGINNING]
        self._prefixes.begin([text for line in lines for text in shown(line)], whole=whole)

    def _take_all(self, lines: Iterator[Line]) -> None:
        for line in lines:
            self._seen.pass_over(self._sifter.passed)
            self._take(line)
            self._sifter.attentive = bool(self._open) or self._first_lines > 0
        self._seen.pass_over(self._sifter.passed)

    def _take(self, line: Line) -> None:
        self._first_lines -= 1
        speaker, text = self._prefixes.split(line.text)
        if not speaker.known:
            speaker = self._speaker
        self._ranks.add(speaker.rank)
        if (mine := self._open.get(speaker.name)) is not None:
            taken = mine[1].take(line.number, text)
            if mine[1].done:
                self._settle(speaker.name)
            if taken and not read_line.OURS.match(text):  # a report of ours quotes what opens one
                return
        self._read_line(line.number, speaker, text)

    def _read_line(self, number: int, speaker: Speaker, text: str) -> None:
        """Read a line that belongs to nothing that is open."""
        if native(text):
            return
        if (at := text.find(HEADER)) >= 0:
            self._begin_traceback(number, speaker, text, at)
        elif (rank := spawned(text)) >= 0:
            # rpc's line has another below it
            self._spawned = (number + text.startswith("On "), rank)
        elif tracebacks.IGNORED.match(text):
            self._ignored[speaker.name] = number
        elif launchers.restarts(text):
            self._restarts.append(Place(self._log, number, number))
            self._failed = True
            self._nameless.clear()
        elif kind := next((one for one in _BLOCKS if one.begins(text)), None):
            self._begin(speaker, kind(number, text))
        elif self._first_lines > 0 and headless(text) and speaker.name not in self._open:
            traceback = Traceback(number, HEADER, headless=True)
            # A page may drop the indentation, and torchrun's table indents by two more.
            traceback.take(number, max(text, "  " + text.lstrip(), key=len))
            self._begin(speaker, traceback)
        elif (told := read_line.told_by(text)) is not None:
            self._told(Place(self._log, number, number), speaker, text, told)
        elif (member := launchers.member(text)) is not None:
            self._count_member(number, *member)
        elif (words := nccl.warning(text)) and not classify.recognised(words):
            seen = self._note(Sign.NCCL, number, speaker, words, lines=(text[:WORDS],))
            if seen is not None:
                self._seen.watch_words(speaker, seen)
                if (found := nccl.THREAD.search(text)) is not None:
                    self._seen.warned(seen, found["thread"])
        elif block := self._message(number, words or text):
            mine = self._open.get(speaker.name)  # inside a traceback it is no message of its own
            says_more = mine is not None and isinstance(mine[1], Traceback) and mine[1].says_little
            if mine is None or (says_more and failure_words.exception(text) is None):
                self._begin(speaker, block)
        elif text.rstrip().endswith("operation timeout:"):  # its facts are in the next line
            self._broken = torch.speaking(text, speaker)
        elif classify.says_lost((text,)) or classify.says_waited((text,)):
            self._note(Sign.LOST, number, torch.speaking(text, speaker), text)
        elif (found := read_line.FOLDER.match(text)) is not None:
            self._seen.name_folder(found[1])
        elif (found := _STOPPED.search(text)) is not None:
            self._stopped.append(int(found.group(1)))
            self._keep_last_words()
        else:
            self._pass_over(number, speaker, text)

    def _pass_over(self, number: int, speaker: Speaker, text: str) -> None:
        """Pass a line over that tells no cause: shown at most, when it speaks of a failure in words
        that are not known. Lines that differ by their numbers alone are not read again.
        """
        of_launcher = "ChildFailedError" in text or text.endswith(".py FAILED")
        self._failed = self._failed or of_launcher or _WORKER_DIED in text
        if "watchdog" in text and (rank := torch.speaking(text, speaker).rank) >= 0:
            self._groups.setdefault(rank, torch.group_of(text))
        speaks = self._spoke < MOST_SPOKEN and failure_words.speaks_of_failure(text)
        speaks = speaks and not self._prefixes.quiet
        speaks = speaks or launchers.ENDS_ITSELF.search(text) is not None
        if of_launcher or (not speaks and _LAUNCHERS.search(text)):
            return
        if not speaker.known and text.strip():
            self._nameless.append(text[:WORDS])
        if NCCL_INFO not in text:
            self._seen.count_line(speaker.name)
        self._seen.get_over(text)
        self._sifter.call_dull()
        if speaks and (seen := self._note(Sign.SPOKEN, number, speaker, text)) is not None:
            self._spoke += 1
            self._seen.watch_words(speaker, seen)

    def _begin_traceback(self, number: int, speaker: Speaker, text: str, at: int) -> None:
        group = GroupTraceback.HEAD.search(text[:at])
        at = group.start() if group is not None else at
        before = text[:at].strip()
        last_frame = text[-JOINED:].rpartition(' File "')[2].rpartition(", line ")[2]
        joined = _IN_ONE_LINE.match(last_frame)
        ignored = number - self._ignored.pop(speaker.name, -IGNORED_WITHIN) < IGNORED_WITHIN
        if before and not before.startswith(("Original", "Remote", "^C")):
            speaker, words = prefixes.before_traceback(text[:at], speaker)
            self._ranks.add(speaker.rank)
            if words:  # of a process of its own, which wrote them into that line
                self._read_line(number, speaker, words)
            text = HEADER
        if joined is not None:
            if not ignored:
                self._read_line(number, speaker, joined[1])
            return
        block = GroupTraceback(number) if group else Traceback(number, text)
        block.ignored = ignored
        if self._spawned[0] == number - 1:
            block.rank = self._spawned[1]
        self._begin(speaker, block)

    def _message(self, number: int, text: str) -> Traceback | Message | None:
        """Open what a line begins that has the form of an exception's last, or tells a cause. A
        program that does not compile has no traceback, but its place before that.
        """
        text = text if text.endswith("|") else GroupTraceback.BAR.sub("", text)
        # A log may be one exception, and be indented as a whole.
        named = failure_words.exception(text.lstrip() if number == 1 else text)
        if named is None:
            ends = text.endswith(" is killed by signal:")
            known = ends or classify.recognised(text) or classify.came_short(text) is not None
            return Message(number, "", text) if known else None
        kind, message = named
        for line in reversed(self._sifter.before(4) if kind.endswith(NOT_COMPILED) else ()):
            if (found := _PLACE.match(self._prefixes.split(line.text)[1])) is not None:
                message += f" ({found[1].rpartition('/')[2]}, line {found[2]})"
                return Message(line.number, kind, message, found[1])
        return Traceback.of_gathered(number, kind, message) or Message(number, kind, message)

    def _begin(self, speaker: Speaker, block: _Open) -> None:
        if speaker.name in self._open:
            self._settle(speaker.name)
        self._open[speaker.name] = (speaker, block)

    def _settle(self, name: str) -> None:
        """Note what a block tells that is at its end."""
        speaker, block = self._open.pop(name)
        if isinstance(block, Table):
            for sighting in block.sightings(speaker, self._log):
                self._see(sighting)
            return
        if isinstance(block, StackDump):
            if block.is_main and block.place:
                of = f"{speaker.name}, " if speaker.known else ""
                self._stood[f"{of}line {block.start}: {block.place}"] = None
            return
        place = Place(self._log, block.start, block.last)
        if isinstance(block, Crash):
            if block.ignored:
                self._note(Sign.SPOKEN, block.start, speaker, block.lines[0])
            else:
                self._crashed(speaker, place, block, block.error())
            return
        if block.rank >= 0:  # a group may begin below
            self._spawned = (block.last, block.rank)
        who = of_rank(block.rank) if block.rank >= 0 and speaker.rank < 0 else speaker
        # Where an exception counts ranks, all raise it, whichever began: these did.
        teller = NOBODY if block.ranks else who
        errors = block.errors()
        if block.ignored:
            errors = list(filter(classify.is_of_worker, errors))
        for error in errors:
            self._raised(Sighting(Sign.RAISED, place, teller, error=error, ranks=block.ranks))
        for _ in range(block.stray if errors else 0):
            self._seen.count_line(speaker.name)

    def _raised(self, sighting: Sighting) -> None:
        error, speaker = sighting.error, sighting.speaker
        of_launcher = launchers.of_launcher(error, speaker.rank)
        words = f"{error.type.rpartition('.')[2]}: {error.message}"
        told = read_line.told_by(words, of_launcher=of_launcher)
        by_service = told is not None and getattr(told[1], "by", "") == known_line.SERVICE
        if of_launcher or by_service or error.type == "Exception":
            self._failed = True
            if told is not None:
                self._told(sighting.place, speaker, error.message, told)
            if told is not None or of_launcher:
                return
        number = self._see(sighting)
        if classify.is_stop(error):
            self._seen.stopped(speaker)
        if number is not None:
            self._seen.watch_process(speaker, number)
            if error.type in ("ImportError", "ModuleNotFoundError"):
                self._seen.watch_import(speaker, number)

    def _crashed(self, speaker: Speaker, place: Place, block: Crash, error: Raised | None) -> None:
        if error is not None:
            # A terminal may have broken it within a word.
            if (told := read_line.told_by(error.message.replace("\n", ""))) is not None:
                self._told(place, speaker, error.message, told)
                return
            speaker = torch.speaking(error.message, speaker)
        self._see(
            Sighting(
                Sign.CRASHED,
                place,
                speaker,
                block.lines[0],
                error or NOT_RAISED,
                lines=tuple(block.lines),
            )
        )

    def _told(self, place: Place, speaker: Speaker, text: str, told: read_line.Told) -> None:
        sign, facts, ranks = told
        end = facts if isinstance(facts, End) else NOT_ENDED
        if end.by == "srun":  # it labels the lines of its tasks, and not its own
            speaker = NOBODY
        if sign is Sign.ENDED and end.by != known_line.ARGPARSE:  # which is the program itself
            self._keep_last_words()
        self._tasks |= end.by in launchers.OF_RANKS and speaker.mark[:-1].isdigit()
        collective = facts if isinstance(facts, Collective) else None
        if collective is not None and speaker.rank < 0:
            speaker = of_rank(ranks[0]) if ranks else self._broken
            self._broken = NOBODY
        new = len(self._seen.every)
        seen = self._see(
            Sighting(
                sign, place, speaker, text[:WORDS], end=end, collective=collective, ranks=ranks
            )
        )
        # These may speak of a process that is none of the job's, or is started again.
        of_others = end.by in ("the shell", "SGLang", known_line.SERVICE)
        watched = of_others or (sign is Sign.NOT_STARTED and seen == new)
        if seen is not None and watched and not end.pid:
            self._seen.watch_shell(seen, PARAGRAPH if refused_starts.by_mpirun(text) else 0)

    def _note(
        self, sign: Sign, number: int, speaker: Speaker, text: str, lines: tuple[str, ...] = ()
    ) -> int | None:
        place = Place(self._log, number, number)
        return self._see(Sighting(sign, place, speaker, text[:WORDS], lines=lines))

    def _see(self, sighting: Sighting) -> int | None:
        known = len(self._seen.every)
        self._ranks.update(sighting.ranks, (sighting.speaker.rank, sighting.end.rank))
        number = self._seen.see(sighting)
        if len(self._seen.every) > known and self._before_of != len(self._restarts):
            self._before, self._before_of = tuple(self._nameless), len(self._restarts)
        return number

    def _keep_last_words(self) -> None:
        if self._words_of != len(self._restarts):
            self._words_of = len(self._restarts)
            began = max((place.line for place in self._restarts), default=0)
            lines = [one.text[:WORDS] for one in self._sifter.before() if one.number > began]
            lines = [line for line in lines if line.strip() and not _LAUNCHERS.search(line)]
            if HEADER in lines:  # of the launcher's own exception
                lines = lines[: lines.index(HEADER)]
            own = [
                line
                for line in lines
                if not line.startswith("  ") and not self._prefixes.split(line)[0].known
            ]
            self._last_words = tuple(lines[-LAST_WORDS:] if own else self._nameless)

    # --- members of a group

    def _count_member(self, number: int, rank: int, every: int) -> None:
        self._ranks.add(rank)
        if every != self._came[0]:  # another group
            self._members, self._came = {}, (every, number)
        self._members[rank] = self._members.get(rank, 0) + 1

    def _count_members(self) -> None:
        """Note a group to which as many processes came as it has, and some as the same rank."""
        every, number = self._came
        twice = tuple(sorted(rank for rank, count in self._members.items() if count > 1))
        if twice and sum(self._members.values()) == every:
            words = f"{every} processes said so, as {len(self._members)} ranks"
            place = Place(self._log, number, number)
            self._see(Sighting(Sign.SAME_RANK, place, NOBODY, words, ranks=twice))

    def _named(self, sighting: Sighting) -> Sighting:
        if self._tasks and sighting.speaker.mark[:-1].isdigit():
            sighting = msgspec.structs.replace(sighting, speaker=NOBODY)
        if sighting.collective is None or sighting.speaker.rank not in self._groups:
            return sighting
        group = self._groups[sighting.speaker.rank]
        collective = msgspec.structs.replace(sighting.collective, group=group)
        return msgspec.structs.replace(sighting, collective=collective)


_Kinds = type[RichTraceback | Crash | StackDump | Summary | MpiExit | Stall]
_BLOCKS: tuple[_Kinds, ...] = (RichTraceback, Crash, StackDump, Summary, MpiExit, Stall)


def together(findings: Iterable[Findings]) -> Findings:
    """Join what was seen in several logs of one job."""
    every = list(findings)
    return Findings(
        tuple(sighting for one in every for sighting in one.sightings),
        sum(one.lines for one in every),
        tuple(sorted({rank for one in every for rank in one.ranks})),
        tuple(pid for one in every for pid in one.stopped),
        any(one.failed for one in every),
        next((one.last_words for one in every if one.last_words), ()),
        next((one.before for one in every if one.before), ()),
        tuple(place for one in every for place in one.restarts),
        tuple(words for one in every for words in one.stood),
    )
