"""Writes to disks in a thread of their own: one that does not answer (a network's, whose server is gone) holds nobody up but that thread.

The kernel lets a thread that waits for such a disk go only when the process ends. So every wait here has a deadline, and what is not done
by then is left behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


class Writer:
    """Does what it is given, one after the other. The thread begins with the first; where none can be started, the caller does it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._acts: deque[Callable[[], object]] = deque()
        self._busy = False  # the thread is there, and does something or looks for more
        self.error: BaseException | None = None  # what escaped from an act that nobody waits for: a fault of ours

    def submit(self, act: Callable[[], object]) -> None:
        """Have it done, soon. Does not wait."""
        with self._changed:
            self._acts.append(act)
            if self._busy:
                return
            self._busy = True
        try:
            threading.Thread(target=self._work, name="rallypoint: disk", daemon=True).start()
        except RuntimeError:  # as many processes as this user may have, or this container
            self._work()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._acts:
                    self._busy = False
                    self._changed.notify_all()
                    return
                act = self._acts.popleft()
            try:
                act()
            except BaseException as error:
                self.error = self.error or error

    def finish(self, timeout: float) -> bool:
        """Wait until all is done. False when it was not within this many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout)

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
