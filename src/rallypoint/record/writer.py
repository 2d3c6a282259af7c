"""Writes to disks in a thread of their own: one that does not answer (a network's, whose server is gone) holds nobody up but that thread.

The kernel lets a thread that waits for such a disk go only when the process ends. So every wait here has a deadline, and what is not done
by then is left behind.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from rallypoint.clock import Clock

Answer = TypeVar("Answer")


class Writer:
    """Does what it is given, one after the other. The thread begins with the first; where none can be started, the caller does it."""

    def __init__(self, linger: float = 0.0) -> None:
        """`linger`: seconds for which the thread waits for more before it ends; for who has something to write all the time."""
        self._linger = linger
        self._changed = threading.Condition()
        self._acts: deque[Callable[[], object]] = deque()
        self._there = False  # the thread
        self._doing = False  # something, just now
        self.error: BaseException | None = None  # what escaped from an act that nobody waits for: a fault of ours

    def submit(self, act: Callable[[], object]) -> None:
        """Have it done, soon. Does not wait."""
        with self._changed:
            self._acts.append(act)
            self._changed.notify_all()
            if self._there:
                return
            self._there = True
        try:
            threading.Thread(target=self._work, name="rallypoint: disk", daemon=True).start()
        except RuntimeError:  # as many processes as this user may have, or this container
            self._linger = 0.0
            self._work()

    def end(self) -> None:
        """Nothing more will come, for now: the thread need not wait for it."""
        with self._changed:
            self._linger = 0.0
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._doing = False
                if not self._acts:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._acts or not self._linger, self._linger)
                if not self._acts:
                    self._there = False
                    return
                self._doing = True
                act = self._acts.popleft()
            try:
                act()
            except BaseException as error:
                self.error = self.error or error

    def finish(self, timeout: float) -> bool:
        """Wait until all is done. False when it was not within this many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._acts and not self._doing, timeout)

    def ask(self, act: Callable[[], Answer], timeout: float) -> Answer:
        """What it returns, or raises, after all that was submitted before. `TimeoutError` when that takes longer than this many seconds."""
        answers: list[Answer] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                answers.append(act())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self.submit(run)
        if not done.wait(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        if errors:
            raise errors[0]
        return answers[0]


# Seconds of one look whether a disk has moved. When this process is stopped (Ctrl-Z), so is the thread that writes: no more than one such
# look counts as time in which the disk gave no answer.
_WAIT_SLICE = 0.25


class Backlog:
    """What is to be written to one disk, up to so many bytes: whoever hands over more waits, as for any disk that is slow. One that moves
    nothing for too long is given up: what was handed over, and all that follows, is dropped."""

    def __init__(self, clock: Clock, most: int, patience: float, linger: float, give_up: Callable[[], None]) -> None:
        """`give_up` is called once, by who waits then. Seconds."""
        self._clock = clock
        self._most = most
        self._patience = patience
        self._give_up = give_up
        self._writer = Writer(linger)
        self._changed = threading.Condition()
        self._bytes = 0
        self._acts = 0
        self._moved = 0  # how often it has
        self._waited = 0.0  # seconds that somebody has waited since it last did
        self._seen = 0.0  # until when these were counted: several may wait at once
        self._late = -1  # what `_moved` was when somebody last waited in vain
        self.given_up = False

    def submit(self, act: Callable[[], object], size: int = 0) -> None:
        """Have it done, soon. Does not wait."""
        with self._changed:
            if self.given_up:
                return
            self._acts += 1
            self._bytes += size
        self._writer.submit(lambda: self._do(act, size))

    def _do(self, act: Callable[[], object], size: int) -> None:
        try:
            if not self.given_up:
                act()
        finally:
            with self._changed:
                self._acts -= 1
                self._bytes -= size
                self._moved += 1
                self._waited = 0.0
                self._changed.notify_all()

    def make_room(self) -> None:
        """Wait until no more than `most` bytes are left to be written."""
        if self._bytes > self._most:
            self._wait(lambda: self._bytes <= self._most, None)

    @property
    def waits(self) -> bool:
        """Whether something is still to be written."""
        return self._acts > 0 and not self.given_up

    def settle(self, timeout: float) -> bool:
        """Wait for all that was handed over. False when that takes longer, or took longer before and nothing has moved since."""
        with self._changed:
            if self._acts and self._late == self._moved:
                return False
        return self.finish(timeout)

    def finish(self, timeout: float) -> bool:
        """Wait for all that was handed over. False when it takes longer; True when it was given up: nothing will come."""
        return self._wait(lambda: not self._acts, timeout)

    def close(self) -> None:
        """Wait until all is written, or the disk is given up; nothing is handed over any more."""
        self.finish(math.inf)
        self._writer.end()

    def _wait(self, over: Callable[[], bool], timeout: float | None) -> bool:
        until = math.inf if timeout is None else self._clock.monotonic() + timeout
        with self._changed:
            while not (self.given_up or over()):
                now = self._clock.monotonic()
                if self._waited >= self._patience:
                    self.given_up = True
                    break
                if now >= until:
                    self._late = self._moved
                    return False
                look = min(until - now, self._patience - self._waited, _WAIT_SLICE)
                moved = self._moved
                self._changed.wait(look)
                if moved == self._moved:
                    later = self._clock.monotonic()
                    self._waited += min(later - max(now, self._seen), look)
                    self._seen = later
            else:
                return True
        self._give_up()
        return True
