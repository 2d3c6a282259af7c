"""Writes to disks in a second thread, with a deadline for every wait.

The kernel lets a thread that waits for a dead file server go only when the process ends. What is
not written within the deadline is left behind with that thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from rallypoint.clock import Clock
from rallypoint.host import threads

Answer = TypeVar("Answer")

_WAIT_SLICE = 0.25
"""Seconds of one look whether a disk has moved. When this process is stopped (Ctrl-Z), so is the
thread that writes: no more than one such look counts as time in which the disk gave no answer."""

LINGER = 1.0
"""Seconds for which the thread of a job waits for more to write: starting one for each line would
cost more than to write it."""


class DiskWriter:
    """Thread that does what it is given, one after the other.

    The thread begins with the first; where none can be started, the caller does it.
    """

    def __init__(self, linger: float = 0.0) -> None:
        """`linger`: seconds for which the thread waits for more before it ends."""
        self.error: BaseException | None = (
            None  # what escaped from an act that nobody waits for: a fault of ours
        )
        self.given_up = False
        self._linger = linger
        self._changed = threading.Condition()
        self._acts: deque[tuple[Callable[[], object], int]] = deque()
        self._has_thread = False
        self._left = 0  # acts that are not done
        self._bytes = 0  # of these
        self._moved = 0  # acts that are done

    def submit(self, act: Callable[[], object], size: int = 0) -> None:
        """Have it done, soon. Does not wait."""
        with self._changed:
            if self.given_up:
                return
            self._acts.append((act, size))
            self._left += 1
            self._bytes += size
            self._changed.notify_all()
            if self._has_thread:
                return
            self._has_thread = True
        try:
            threads.start(self._work, "disk")
        except RuntimeError:  # as many processes as this user may have, or this container
            self._linger = 0.0
            self._work()

    def end(self) -> None:
        """Note that nothing more will come, for now: the thread need not wait for it."""
        with self._changed:
            self._linger = 0.0
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._acts:
                    self._changed.wait_for(lambda: self._acts or not self._linger, self._linger)
                if not self._acts:
                    self._has_thread = False
                    return
                act, size = self._acts.popleft()
            try:
                if not self.given_up:
                    act()
            except BaseException as error:
                self.error = self.error or error
            with self._changed:
                self._left -= 1
                self._bytes -= size
                self._moved += 1
                self._changed.notify_all()

    def finish(self, timeout: float) -> bool:
        """Wait until all is done. False when it was not within this many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout)

    def ask(self, act: Callable[[], Answer], timeout: float) -> Answer:
        """Return, or raise, what it does after all that was submitted before. `TimeoutError` after
        this many seconds."""
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


class Backlog(DiskWriter):
    """Bytes that are to be written to disk, up to a limit: a caller that hands over more waits.

    A disk that moves nothing for too long is given up: what was handed over, and all that follows,
    is dropped.
    """

    def __init__(
        self, clock: Clock, most: int, patience: float, linger: float, give_up: Callable[[], None]
    ) -> None:
        """`give_up` is called once, by a caller that waits then. Seconds."""
        super().__init__(linger)
        self._clock = clock
        self._most = most
        self._patience = patience
        self._give_up = give_up
        self._late = -1  # what `_moved` was when a caller last waited in vain

    def make_room(self) -> None:
        """Wait until no more than `most` bytes are left to be written."""
        if self._bytes > self._most:
            self._wait(lambda: self._bytes <= self._most, math.inf)

    @property
    def waits(self) -> bool:
        """Tell whether something is still to be written."""
        return self._left > 0 and not self.given_up

    def settle(self, timeout: float) -> bool:
        """Wait for all that was handed over. False when that takes longer, or took longer before
        and nothing has moved since."""
        with self._changed:
            if self._left and self._late == self._moved:
                return False
        return self.finish(timeout)

    def finish(self, timeout: float) -> bool:
        """Wait for all that was handed over. False when it takes longer; True when it was given up:
        nothing will come."""
        return self._wait(lambda: not self._left, timeout)

    def close(self) -> None:
        """Wait until all is written, or the disk is given up; nothing is handed over any more."""
        self.finish(math.inf)
        self.end()

    def _wait(self, over: Callable[[], bool], timeout: float) -> bool:
        until = self._clock.monotonic() + timeout
        waited, moved = 0.0, -1  # seconds since the disk last moved
        with self._changed:
            while not (self.given_up or over()):
                now = self._clock.monotonic()
                if now >= until:
                    self._late = self._moved
                    return False
                if moved != self._moved:
                    waited, moved = 0.0, self._moved
                if waited >= self._patience:
                    self.given_up = True
                    break
                look = min(until - now, _WAIT_SLICE)
                self._changed.wait(look)
                waited += min(self._clock.monotonic() - now, look)
            else:
                return True
        self._give_up()
        return True
