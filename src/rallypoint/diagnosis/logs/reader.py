"""One log, line after line, to what is seen in it. Memory is bounded by what differs, not by how
long the log is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.error_patterns import schedulers
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import (
    NOBODY,
    Collective,
    End,
    Findings,
    Place,
    Sighting,
    Sign,
    Speaker,
)
from rallypoint.diagnosis.logs import prefixes
from rallypoint.diagnosis.logs.blocks import (
    HEADER,
    Crash,
    Message,
    MpiExit,
    Stall,
    Summary,
    Traceback,
    headless,
    native,
)
from rallypoint.diagnosis.logs.line_filter import Line, Sifter, as_utf8

MOST_SIGHTINGS = 2000
"""Different things of one log that are kept. What is the same but for its numbers counts as one,
and a cause is among the first.
"""

MOST_SPOKEN = 100
"""Of these, lines whose words are not known; the first ones are shown."""

WENT_ON = 12
"""Lines that the same process wrote after an error until it counts as handled: threads, exit
handlers and notes write a few.
"""

# lines between two errors of one process until the first counts as handled: what a logger wrote, it
# may raise, too
PERHAPS = 3

# lines after an error, at the end of a log, that leave open whether it was handled; one is a
# prompt, or a shell's remark
FOLLOWED = 2

# lines after "Exception ignored in:" in which the traceback of that begins; others may write
# between them
IGNORED_WITHIN = 20

# lines of a log that are all read: a paste may begin inside a traceback, whose frames have no words
# of failure
BEGINNING = 40

LAST_WORDS = 6  # lines before the launcher's word of an end, for a process that says nothing itself
WORDS = 400  # characters of one line that are kept

_Open = Traceback | Message | Crash | Summary | MpiExit | Stall
_STOPPED = re.compile(r"(?:Sending process|Terminating process|Killing subprocess) (\d+)")
_LAUNCHERS = re.compile(
    r"(?:Sending|Terminating) process \d+|Killing subprocess \d+|^srun: |^slurmstepd: |^\[?[EWIF]\d{3,4} |Setting OMP_NUM_THREADS"
    r"|^[*=-]{20}|^Primary job +terminated|^a non-zero exit code|resource_tracker|semaphore_tracker|len\(cache\)"
)
# Ray, which knows no more
_WORKER_DIED = "A worker died or was killed while executing a task by an unexpected system error"
_IGNORED = re.compile(r"(?:Exception ignored (?:in|while|on)\b|Error in atexit\._run_exitfuncs)")
_SHELL = "\0the shell"  # whose words that are watched
_SPOKEN = "\0spoken by "  # the same of lines in words that are not known
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


class Reader:
    """What is seen in one log.

    `log`: its name, as a report shows it; "" for text that lies in no file. `speaker`: whose log it
    is, when its name tells.
    """

    def __init__(self, log: str, speaker: Speaker = NOBODY) -> None:
        self._log = log
        self._speaker = speaker
        self._sifter = Sifter()
        self._sifter.attentive = True
        self._first_lines = BEGINNING  # that are still to come
        self._prefixes = prefixes.Prefixes()
        self._open: dict[str, tuple[Speaker, _Open]] = {}
        self._seen: list[Sighting] = []
        self._same: dict[object, int] = {}
        self._left_out = 0
        self._ranks: set[int] = {speaker.rank} if speaker.rank >= 0 else set()
        self._stopped: list[int] = []
        self._watched: dict[
            str, tuple[bytes, list[int], int]
        ] = {}  # errors that may be handled: mark, which, lines since
        self._ignored: dict[
            str, int
        ] = {}  # where Python said last that it ignores what a process raised
        self._restarts: list[Place] = []
        self._groups: dict[int, str] = {}
        self._members: dict[
            int, int
        ] = {}  # how many processes came as this rank, and below where the first of them says so
        self._came = (0, 0)  # the size of the group that they name, and a line
        self._last_words: tuple[str, ...] = ()
        self._bytes = 0
        self._failed = False
        self._broken = NOBODY  # the speaker of a watchdog's line that was broken before its facts
        self._spoke = 0

    def read(self, chunks: Iterable[bytes]) -> Findings:
        """All of it."""
        for chunk in as_utf8(chunks):
            self._bytes += len(chunk)
            self._take_all(self._sifter.feed(chunk))
        return self.finish()

    def finish(self) -> Findings:
        """What was seen, when the log is at its end."""
        self._take_all(self._sifter.close())
        for name in list(self._open):
            self._settle(name)
        for _, which, since in self._watched.values():
            for number in which if since >= FOLLOWED else ():
                self._seen[number] = msgspec.structs.replace(self._seen[number], followed=True)
        self._count_members()
        seen = tuple(self._with_group(sighting) for sighting in self._seen)
        lines = self._sifter.number - self._sifter.ended
        return Findings(
            seen,
            lines,
            tuple(sorted(self._ranks)),
            tuple(self._stopped),
            self._left_out,
            self._failed,
            not self._bytes,
            self._last_words,
            tuple(self._restarts),
        )

    def _take_all(self, lines: Iterator[Line]) -> None:
        for line in lines:
            if self._watched:
                self._pass(self._sifter.passed, self._sifter.passed_bytes)
            self._take(line)
            self._sifter.attentive = bool(self._open) or self._first_lines > 0
        self._pass(self._sifter.passed, self._sifter.passed_bytes if self._watched else b"")

    def _take(self, line: Line) -> None:
        self._first_lines -= self._first_lines > 0
        speaker, text = self._prefixes.split(line.text)
        if not speaker.known:
            speaker = self._speaker
        elif speaker.rank >= 0:
            self._ranks.add(speaker.rank)
        name = speaker.name
        mine = self._open.get(name)
        if mine is not None:
            taken = mine[1].take(line.number, text)
            if mine[1].done:
                self._settle(name)
            if taken:
                return
        self._fresh(line.number, speaker, text)

    def _fresh(self, number: int, speaker: Speaker, text: str) -> None:
        if native(text):
            return
        at = text.find(HEADER)
        if at >= 0:
            if (
                at > 0
                and not text[:at].isspace()
                and not text[:at].startswith(("Original", "Remote"))
            ):
                speaker, words = prefixes.before_traceback(text[:at], speaker)
                self._ranks.update((speaker.rank,) if speaker.rank >= 0 else ())
                if words:  # of somebody's own, who wrote it into that line
                    self._fresh(number, speaker, words)
                text = HEADER
            ignored = number - self._ignored.pop(speaker.name, -IGNORED_WITHIN) < IGNORED_WITHIN
            self._begin(speaker, Traceback(number, text, ignored=ignored))
        elif _IGNORED.match(text):
            self._ignored[speaker.name] = number
        elif schedulers.restarts(text):
            self._restarts.append(self._place(number))
        elif "Fatal Python error: " in text or text.startswith("terminate called"):
            self._begin(speaker, Crash(number, text))
        elif "Root Cause (first observed failure)" in text or (
            text == "Failures:" and "torch" in self._around()
        ):
            self._begin(speaker, Summary(number, text))
        elif MpiExit.begins(text):
            self._begin(speaker, MpiExit(number, text))
        elif schedulers.stalls(text):
            self._begin(speaker, Stall(number, text))
        elif self._first_lines > 0 and headless(text) and self._quiet(speaker):
            block = Traceback(number, HEADER, headless=True)
            block.take(number, "  " + text.lstrip())
            self._begin(speaker, block)
        elif (told := schedulers.told_by(text)) is not None:
            self._told(number, speaker, text, told)
        elif (member := schedulers.member(text)) is not None:
            rank, every = member
            self._ranks.add(rank)
            if every != self._came[0]:  # another group
                self._members, self._came = {}, (every, number)
            self._members[rank] = self._members.get(rank, 0) + 1
        elif (words := schedulers.nccl_warning(text)) != "" and classify.recognised(words):
            if self._quiet(speaker):
                self._begin(speaker, Message(number, "", words))
        elif words:
            self._see(
                Sighting(
                    Sign.NCCL,
                    self._place(number),
                    speaker,
                    words,
                    lines=(text[:WORDS],),
                    ranks=_pair(words),
                )
            )
        elif name_and_message := schedulers.exception(text):
            if self._quiet(speaker):
                self._begin(
                    speaker,
                    Traceback.of_gathered(number, *name_and_message)
                    or self._message(number, *name_and_message),
                )
        elif classify.recognised(text) or text.endswith(" is killed by signal:"):
            if self._quiet(speaker):
                self._begin(speaker, Message(number, "", text))
        elif text.endswith(
            ("operation timeout:", "operation timeout: ")
        ):  # the facts are in the next line
            rank = schedulers.spoken_rank(text, speaker)
            self._broken = Speaker(rank, f"rank {rank}") if rank >= 0 else speaker
        elif classify.came_short(text) is not None:
            self._begin(speaker, Message(number, "", text))
        elif classify.says_lost((text,)) or classify.says_waited((text,)):
            rank = schedulers.spoken_rank(text, speaker)
            who = Speaker(rank, f"rank {rank}") if rank >= 0 else speaker
            self._see(
                Sighting(Sign.LOST, self._place(number), who, text[:WORDS], lines=(text[:WORDS],))
            )
        elif (found := _STOPPED.search(text)) is not None:
            self._stopped.append(int(found.group(1)))
            self._keep_last_words()
        else:
            of_launcher = "ChildFailedError" in text or text.endswith(".py FAILED")
            self._failed = self._failed or of_launcher or _WORKER_DIED in text
            if "watchdog" in text and (rank := schedulers.spoken_rank(text, speaker)) >= 0:
                self._groups.setdefault(rank, schedulers.group_of(text))
            if self._spoke < MOST_SPOKEN and not of_launcher and schedulers.speaks_of_failure(text):
                self._spoken(number, speaker, text)
            elif not of_launcher and not _LAUNCHERS.search(text):
                self._pass_one(speaker.name)
                self._sifter.call_dull()

    def _count_members(self) -> None:
        """Whether those who came to a group are as many as it has, and not the ones that it has."""
        every, number = self._came
        twice = tuple(sorted(rank for rank, count in self._members.items() if count > 1))
        if twice and sum(self._members.values()) == every:
            words = f"{every} processes said so, as {len(self._members)} ranks"
            self._see(Sighting(Sign.SAME_RANK, self._place(number), NOBODY, words, ranks=twice))

    def _spoken(self, number: int, speaker: Speaker, text: str) -> None:
        """A line that speaks of a failure in words that nobody here knows. The same words again are
        passed over, but for their numbers.
        """
        self._pass_one(speaker.name)
        self._sifter.call_dull()
        seen = self._see(
            Sighting(Sign.SPOKEN, self._place(number), speaker, text[:WORDS], lines=(text[:WORDS],))
        )
        if seen is not None:
            self._spoke += 1
            mark, which, _ = self._watched.get(
                _SPOKEN + speaker.name, (speaker.mark.encode(), [], 0)
            )
            self._watched[_SPOKEN + speaker.name] = (mark, [*which, seen], 0)

    def _message(self, number: int, kind: str, message: str) -> Message:
        """A line with the form of an exception's last. A program that does not compile has no
        traceback, but its place before that.
        """
        if not kind.endswith(("SyntaxError", "IndentationError", "TabError")):
            return Message(number, kind, message)
        for line in reversed(self._sifter.before(4)):
            if (
                found := re.match(r'^ *File "(.+)", line (\d+)$', prefixes.split(line.text)[1])
            ) is not None:
                name = found[1].rpartition("/")[2]
                return Message(line.number, kind, f"{message} ({name}, line {found[2]})", found[1])
        return Message(number, kind, message)

    def _around(self) -> str:
        return " ".join(line.text for line in self._sifter.before(4))

    def _quiet(self, speaker: Speaker) -> bool:
        """Whether nothing of this speaker is open: a line inside a traceback is no message of its
        own.
        """
        return speaker.name not in self._open

    def _begin(self, speaker: Speaker, block: _Open) -> None:
        if speaker.name in self._open:
            self._settle(speaker.name)
        self._open[speaker.name] = (speaker, block)

    def _settle(self, name: str) -> None:
        """What was open is at its end."""
        speaker, block = self._open.pop(name)
        if isinstance(block, Summary):
            self._summarised(block)
        elif isinstance(block, MpiExit):
            if block.code > 0 or block.signal:
                end = (
                    schedulers.exit_of(block.code) if not block.signal else End(signal=block.signal)
                )
                end = msgspec.structs.replace(
                    end, rank=block.rank, pid=block.pid, host=block.host, by=block.by, first=True
                )
                self._see(
                    Sighting(Sign.ENDED, self._place(block.start, block.last), NOBODY, "", end=end)
                )
        elif isinstance(block, Crash):
            self._crashed(speaker, block)
        elif isinstance(block, Stall):
            ranks = tuple(sorted(block.missing or block.ready))
            self._ranks.update(block.missing | block.ready)
            whom = Collective(0, block.call)
            place = self._place(block.start, block.last)
            self._see(
                Sighting(
                    Sign.STALLED,
                    place,
                    speaker,
                    block.lines[0][:WORDS],
                    collective=whom,
                    lines=tuple(block.lines),
                    ranks=ranks,
                )
            )
        elif isinstance(block, Traceback) and block.ignored:
            return
        elif (error := block.error()) is not None:
            rank = block.rank if isinstance(block, Traceback) else -1
            who = Speaker(rank, f"rank {rank}") if rank >= 0 and speaker.rank < 0 else speaker
            lines = tuple(error.traceback.splitlines())
            place = self._place(block.start, block.last)
            if (
                isinstance(block, Traceback) and block.ranks
            ):  # every rank raises it, whoever began: these did
                self._ranks.update(block.ranks)
                self._raised(NOBODY, place, error, lines, block.times, block.ranks)
            else:
                self._raised(
                    who, place, error, lines, block.times if isinstance(block, Traceback) else 1
                )
            if isinstance(block, Traceback):
                for _ in range(block.stray):
                    self._pass_one(speaker.name)

    def _raised(
        self,
        speaker: Speaker,
        place: Place,
        error: Raised,
        lines: tuple[str, ...],
        times: int = 1,
        ranks: tuple[int, ...] = (),
    ) -> None:
        if schedulers.of_launcher(error.type) or error.type == "Exception":
            self._failed = True
            told = schedulers.told_by(f"{error.type.rpartition('.')[2]}: {error.message}")
            if told is not None:
                self._told(place.line, speaker, error.message, told, place)
            if told is not None or error.type != "Exception":
                return
        number = self._see(
            Sighting(
                Sign.RAISED, place, speaker, error=error, lines=lines, times=times, ranks=ranks
            )
        )
        if number is not None:
            mark, watched, since = self._watched.get(speaker.name, (speaker.mark.encode(), [], 0))
            if (
                speaker.known and since > PERHAPS
            ):  # who raises another error has handled the one before
                self._watch(speaker.name, mark, watched, WENT_ON + 1)
                watched = []
            self._watched[speaker.name] = (mark, [*watched, number], 0)

    def _crashed(self, speaker: Speaker, block: Crash) -> None:
        place = self._place(block.start, block.last)
        if block.what:
            message = "\n".join(block.what)
            kind = re.search(r"instance of '([^']+)'", block.lines[0])
            error = Raised(kind.group(1) if kind else "", message, (), "\n".join(block.lines))
            told = schedulers.told_by(message)
            if told is not None:
                self._told(block.start, speaker, message, told)
                return
            rank = schedulers.spoken_rank(message, speaker)
            if rank >= 0:
                speaker = Speaker(rank, f"rank {rank}")
            self._see(
                Sighting(
                    Sign.CRASHED, place, speaker, block.lines[0], error, lines=tuple(block.lines)
                )
            )
        else:
            self._see(
                Sighting(Sign.CRASHED, place, speaker, block.lines[0], lines=tuple(block.lines))
            )

    def _told(
        self,
        number: int,
        speaker: Speaker,
        text: str,
        told: schedulers.Told,
        place: Place | None = None,
    ) -> None:
        sign, facts, ranks = told
        self._ranks.update(ranks)
        if sign is Sign.ENDED:
            self._keep_last_words()
        end = facts if isinstance(facts, End) else None
        collective = facts if isinstance(facts, Collective) else None
        if text.startswith("WorkNCCL("):
            speaker, self._broken = (speaker if speaker.known else self._broken), NOBODY
        who = (
            Speaker(ranks[0], f"rank {ranks[0]}")
            if sign is Sign.WATCHDOG and speaker.rank < 0 and ranks
            else speaker
        )
        where = place or self._place(number)
        seen = self._see(
            Sighting(
                sign,
                where,
                who,
                text[:WORDS],
                end=end,
                collective=collective,
                lines=(text[:WORDS],),
                ranks=ranks,
            )
        )
        if seen is not None and end is not None and end.by == "the shell" and not end.pid:
            self._watched[_SHELL] = (b"", [*self._watched.get(_SHELL, (b"", [], 0))[1], seen], 0)

    def _summarised(self, block: Summary) -> None:
        """torchrun's table. Whoever ended by the launcher's own SIGTERM is no failure."""
        inner = dict(block.tracebacks)
        for i, failure in enumerate(block.failures):
            rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", failure.get("rank", ""))
            status = re.match(r"(-?\d+) *\(pid: (\d+)\)", failure.get("exitcode", ""))
            if rank is None or status is None:
                continue
            code, pid, number = int(status[1]), int(status[2]), int(failure["line"])
            place = self._place(number, block.last)
            end = End(
                max(code, 0),
                max(-code, 0),
                int(rank[1]),
                int(rank[2] or -1),
                pid,
                failure.get("host", ""),
                "torchrun",
                bool(failure["first"]),
            )
            self._ranks.add(end.rank)
            self._see(Sighting(Sign.ENDED, place, NOBODY, end=end))
            traceback = inner.get(i)
            error = traceback.error() if traceback is not None else None
            if (
                traceback is not None
                and error is not None
                and not schedulers.of_launcher(error.type)
            ):
                speaker = Speaker(end.rank, f"rank {end.rank}")
                self._see(Sighting(Sign.RAISED, place, speaker, error=error, lines=traceback.lines))

    def _place(self, number: int, last: int = 0) -> Place:
        return Place(self._log, number, max(last, number))

    def _see(self, sighting: Sighting) -> int | None:
        """Note it, once for all that are the same but for their numbers; its index, None when there
        is no room for it.
        """
        error = sighting.error
        words = _NUMBERS.sub("0", (error.message if error is not None else sighting.text)[:200])
        kind = error.type if error is not None else ""
        end = sighting.end
        ended = (end.rank, end.pid, end.signal, end.code, end.local_rank) if end is not None else ()
        key = (
            sighting.sign,
            sighting.speaker.name,
            kind,
            words,
            ended,
            sighting.ranks,
            error.frames[-1:] if error is not None else (),
        )
        number = self._same.get(key)
        if number is not None:
            known = self._seen[number]
            # What was handled before may leave the program now: the last one counts.
            place = sighting.place if known.went_on else known.place
            self._seen[number] = msgspec.structs.replace(
                known, times=known.times + sighting.times, place=place, went_on=False
            )
            return number
        if len(self._seen) >= MOST_SIGHTINGS:
            self._left_out += 1
            return None
        self._same[key] = len(self._seen)
        self._seen.append(sighting)
        return len(self._seen) - 1

    def _keep_last_words(self) -> None:
        if not self._last_words:
            lines = [
                line.text
                for line in self._sifter.before()
                if line.text.strip() and not _LAUNCHERS.search(line.text)
            ]
            self._last_words = tuple(line[:WORDS] for line in lines[-LAST_WORDS:])

    # --- whether the one who said it went on

    def _pass(self, count: int, passed: bytes) -> None:
        """Lines that nobody looked into."""
        if not count:
            return
        said = sum(1 for line in passed.split(b"\n") if line.strip()) if count <= WENT_ON else count
        for name, (mark, which, since) in list(self._watched.items()):
            since += passed.count(mark) if mark else said
            self._watch(name, mark, which, since)

    def _pass_one(self, name: str) -> None:
        for one in (name, _SPOKEN + name, _SHELL):
            if one in self._watched:
                mark, which, since = self._watched[one]
                self._watch(one, mark, which, since + 1)

    def _watch(self, name: str, mark: bytes, which: list[int], since: int) -> None:
        if since <= WENT_ON:
            self._watched[name] = (mark, which, since)
            return
        del self._watched[name]
        for number in which:
            self._seen[number] = msgspec.structs.replace(self._seen[number], went_on=True)

    def _with_group(self, sighting: Sighting) -> Sighting:
        if sighting.collective is None or sighting.speaker.rank not in self._groups:
            return sighting
        collective = msgspec.structs.replace(
            sighting.collective, group=self._groups[sighting.speaker.rank]
        )
        return msgspec.structs.replace(sighting, collective=collective)


def _pair(words: str) -> tuple[int, ...]:
    found = re.search(r"rank (\d+) and rank (\d+) both on", words)
    return tuple(sorted(int(number) for number in found.groups())) if found is not None else ()


def together(findings: Iterable[Findings]) -> Findings:
    """What was seen in several logs of one job."""
    every = list(findings)
    return Findings(
        tuple(sighting for one in every for sighting in one.sightings),
        sum(one.lines for one in every),
        tuple(sorted({rank for one in every for rank in one.ranks})),
        tuple(pid for one in every for pid in one.stopped),
        sum(one.left_out for one in every),
        any(one.failed for one in every),
        all(one.empty for one in every),
        next((one.last_words for one in every if one.last_words), ()),
        tuple(place for one in every for place in one.restarts),
    )
