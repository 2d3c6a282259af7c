"""The chaos proxy's thread: it waits for descriptors, times of a clock and calls of other threads.

Everything that is handed in runs in this thread, one thing after another, and must not wait.
"""

from __future__ import annotations

import heapq
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rallypoint.clock import Clock
from rallypoint.errors import InternalError, UsageError
from rallypoint.testing.clock import ManualClock

T = TypeVar("T")
NAME = "the chaos proxy"


class ProxyLoop:
    """One thread with an epoll. `each_round` runs after every round, `at_end` last."""

    def __init__(
        self, clock: Clock, *, at_end: Callable[[], None], each_round: Callable[[], None]
    ) -> None:
        self.now = clock.monotonic
        self._manual = isinstance(clock, ManualClock)
        self._unsubscribe: Callable[[], None] = lambda: None
        if isinstance(clock, ManualClock):
            self._unsubscribe = clock.when_moved(self._run_due)
        self._at_end = at_end
        self._each_round = each_round
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_number = 0
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()  # none is added once the thread has ended
        self._stopping = self._ended = False
        self._crash: BaseException | None = None
        self._pid = os.getpid()
        # A daemon: a test that forgets close() must not keep its interpreter from ending.
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. May be called twice. `InternalError` when it failed."""
        if os.getpid() != self._pid:
            return
        self._unsubscribe()
        try:
            self.call(lambda: setattr(self, "_stopping", True))
        except (UsageError, InternalError):
            pass  # it has ended already; below, if that was a failure
        self._thread.join()
        self._raise_crash()

    @property
    def is_over(self) -> bool:
        """True after the thread has ended, and in a process that was forked since."""
        return self._ended or os.getpid() != self._pid

    def call(self, do: Callable[[], T]) -> T:
        """Run `do` in the thread, wait for it, and return or raise what it does.

        `UsageError` when the thread has ended, and in a process that was forked since.
        """
        if threading.current_thread() is self._thread:
            return do()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                if self._ended:
                    raise UsageError("usage", f"{NAME} has ended")
                answer.set_result(do())
            except BaseException as error:
                answer.set_exception(error)

        if os.getpid() != self._pid:
            text = f"{NAME} runs in process {self._pid}, which forked this one"
            raise UsageError("usage", text)
        with self._lock:
            if self._ended:
                self._raise_crash()
                raise UsageError("usage", f"{NAME} is closed")
            self._calls.append(run)
            # Under the lock: once the thread has ended, the number may be another descriptor's.
            os.eventfd_write(self._wake, 1)
        return answer.result()

    def watch(self, fd: int, mask: int | None, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` for the events in `mask` (0: only errors). None: no longer."""
        if mask is None:
            if self._handlers.pop(fd, None) is not None:
                self._epoll.unregister(fd)
        elif fd in self._handlers:
            self._handlers[fd] = handler
            self._epoll.modify(fd, mask)
        else:
            self._handlers[fd] = handler
            self._epoll.register(fd, mask)

    def at(self, due: float, do: Callable[[], None]) -> None:
        """Call `do()` when the clock shows `due`; about a millisecond late, never early."""
        self._timer_number += 1
        heapq.heappush(self._timers, (due, self._timer_number, do))

    def forget(self) -> None:
        """Close this process's copies of the descriptors, in a forked child."""
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping:
                # Handlers first, then calls: a descriptor that a call closes may get its number
                # again in this same round.
                found = self._epoll.poll(self._patience())
                for handler, mask in [(self._handlers.get(fd), mask) for fd, mask in found]:
                    if handler is not None:
                        handler(mask)
                self._answer()
                self._due()
                self._each_round()
        except BaseException as error:  # raised in the next caller, and by stop()
            self._crash = error
        finally:
            with self._lock:
                self._ended = True
            self._at_end()
            self._answer()
            self._epoll.close()
            os.close(self._wake)

    def _patience(self) -> float | None:
        if not self._timers:
            return None
        left = self._timers[0][0] - self.now()
        return 0.0 if left <= 0 else None if self._manual else left

    def _answer(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass  # nobody called
        while self._calls:
            self._calls.popleft()()

    def _due(self) -> None:
        now = self.now()
        due = []
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        for do in due:
            do()

    def _run_due(self) -> None:
        """Return when all that is due has happened: a manual clock was moved."""

        def run() -> None:
            while self._timers and self._timers[0][0] <= self.now():
                self._due()

        try:
            self.call(run)
        except UsageError:
            pass  # closed meanwhile: nothing is due any more

    def _raise_crash(self) -> None:
        if self._crash is not None:
            text = f"{NAME} failed: {self._crash!r}"
            raise InternalError("internal-error", text) from self._crash
