"""Things seen in one log, once each, and whether the process went on after an error."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rallypoint.diagnosis.error_patterns import nccl
from rallypoint.diagnosis.log_events import Sighting, Sign, Speaker
from rallypoint.diagnosis.pattern import Pattern

MOST_SIGHTINGS = 2000
"""Different things of one log that are kept. What is the same but for its numbers counts as one,
and a cause is among the first.
"""

WENT_ON = 12
"""Lines that the same process wrote after an error until it counts as handled: threads, exit
handlers and notes write a few.
"""

LONG_AFTER = 150
"""Lines that the same process wrote after an import that failed until it did without the module:
more than scripts and libraries write at the end of a job.
"""

NCCL_INFO = "NCCL INFO"
"""Words in a line of NCCL's own, which does not show that the program went on."""

# lines between two errors of one process until the first counts as handled: what a logger wrote, it
# may raise, too
PERHAPS = 3

# lines after an error, at the end of a log, that leave open whether it was handled; one is a
# prompt, or a shell's remark
FOLLOWED = 2

_SHELL = "\0the shell"  # the name under which a shell's words are watched
_LONG = "\0long after an import of "  # the same for its imports that failed
_SPOKEN = "\0spoken by "  # the same for a process's lines of unknown words
_NUMBERS = Pattern(r"0x[0-9a-f]+|\d+")


class Sightings:
    """Sightings in one log, as they grow."""

    def __init__(self) -> None:
        self.every: list[Sighting] = []
        self._same: dict[object, int] = {}
        # errors that may be handled, by process: its mark, their indices, its lines since
        self._watched: dict[str, tuple[bytes, list[int], int]] = {}
        self._warned: dict[int, set[str]] = {}  # NCCL's warnings, and its threads that had them

    def see(self, sighting: Sighting) -> int | None:
        """Keep a sighting, once for all that are the same but for their numbers; its index, None
        when there is no room for it.
        """
        error, end = sighting.error, sighting.end
        words = _NUMBERS.sub("0", (error.message if sighting.has_error else sighting.text)[:200])
        kind = (error.type, error.frames[-1:])
        ended = (end.rank, end.pid, end.signal, end.code, end.local_rank)
        key = (sighting.sign, sighting.speaker.name, kind, words, ended, sighting.ranks)
        number = self._same.get(key)
        if number is not None:
            known = self.every[number]
            # What was handled before may leave the program now: the last one counts.
            place = sighting.place if known.went_on else known.place
            # The job goes on without a program that was not started.
            went_on = known.went_on and known.sign is Sign.NOT_STARTED
            again = {"sign": sighting.sign, "place": place, "went_on": went_on}
            self.every[number] = msgspec.structs.replace(known, **again)
            return number
        if len(self.every) >= MOST_SIGHTINGS:
            return None
        self._same[key] = len(self.every)
        self.every.append(sighting)
        return len(self.every) - 1

    def _watch(self, name: str, mark: str, seen: int) -> None:
        """Count the lines of a process from here on: its errors so far may be handled."""
        which = self._watched[name][1] if name in self._watched else []
        which = which if seen in which else [*which, seen]
        self._watched[name] = (mark.encode(), which, 0)

    def watch_process(self, speaker: Speaker, seen: int) -> None:
        """Watch whether the process of an error goes on. A process that raises another error has
        handled the one before.
        """
        if speaker.known and self._watched.get(speaker.name, (b"", [], 0))[2] > PERHAPS:
            self.count_line(speaker.name, WENT_ON)
        self._watch(speaker.name, speaker.mark, seen)

    def stopped(self, speaker: Speaker) -> None:
        """Note that Ctrl-C ended a process: what it writes after that is of another run, and does
        not show that it handled the errors before.
        """
        self._watched.pop(speaker.name, None)

    def watch_import(self, speaker: Speaker, seen: int) -> None:
        """Watch whether the process of an import that failed goes on for long."""
        self._watch(_LONG + speaker.name, speaker.mark, seen)

    def watch_words(self, speaker: Speaker, seen: int) -> None:
        """Watch whether the process goes on that wrote words which are not known."""
        self._watch(_SPOKEN + speaker.name, speaker.mark, seen)

    def watch_shell(self, seen: int, paragraph: int) -> None:
        """Watch whether any process goes on after a shell's words and the lines of a paragraph."""
        self._watch(_SHELL, "", seen)
        self._add(_SHELL, -paragraph)

    def warned(self, seen: int, thread: str) -> None:
        """Note that a thread of NCCL's had a warning."""
        self._warned.setdefault(seen, set()).add(thread)

    def name_folder(self, folder: str) -> None:
        """Note the run folder that stands at the end of a report of rallypoint's own."""
        for index, sighting in enumerate(self.every):
            if sighting.sign is Sign.REPORTED and not sighting.lines:
                self.every[index] = msgspec.structs.replace(sighting, lines=(folder,))

    def end(self) -> None:
        """Note at the end of the log which processes wrote something after their error."""
        for _, which, since in self._watched.values():
            for number in which if since >= FOLLOWED else ():
                self.every[number] = msgspec.structs.replace(self.every[number], followed=True)

    def pass_over(self, passed: Sequence[bytes]) -> None:
        """Count lines that were not read."""
        for body in passed if self._warned else ():
            if NCCL_INFO.encode() in body:
                self.get_over(body.decode(errors="replace"))
        for name, (mark, _, _) in list(self._watched.items()) if passed else ():
            self._add(name, sum(mark in body and NCCL_INFO.encode() not in body for body in passed))

    def get_over(self, text: str) -> None:
        """Take NCCL's warnings back where all threads that had them were connected after that:
        they went without a plugin, or by another network.
        """
        if not self._warned or (found := nccl.STARTED.search(text)) is None:
            return
        for number, threads in list(self._warned.items()):
            threads.discard(found["thread"])
            if not threads:
                del self._warned[number]
                seen = self.every[number]
                self.every[number] = msgspec.structs.replace(seen, sign=Sign.SPOKEN, went_on=True)

    def count_line(self, name: str, count: int = 1) -> None:
        """Count lines that a process wrote."""
        for one in (name, _SPOKEN + name, _LONG + name, _SHELL):
            self._add(one, count)

    def _add(self, name: str, count: int) -> None:
        mark, which, since = self._watched.get(name, (b"", [], 0))
        long = name.startswith(_LONG)
        if since + count <= (LONG_AFTER if long else WENT_ON) and which:
            self._watched[name] = (mark, which, since + count)
            return
        self._watched.pop(name, None)
        for number in which:
            times = self.every[number].did_without + long
            went_on = {"went_on": True, "did_without": times}
            self.every[number] = msgspec.structs.replace(self.every[number], **went_on)
