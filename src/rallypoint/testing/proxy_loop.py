"""The chaos proxy's thread: it waits for descriptors, times of a clock and calls of other threads.

After each of these `step` runs, which moves whatever can move. Nothing in this thread may wait.
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
    """One thread with an epoll.

    `step` returns the time at which it wants to run again, or None. `at_end` runs last.
    """

    def __init__(
        self, clock: Clock, *, step: Callable[[], float | None], at_end: Callable[[], None]
    ) -> None:
        self.now = clock.monotonic
        self.events: dict[int, int] = {}  # events of this round by descriptor
        self._manual = isinstance(clock, ManualClock)
        self._unsubscribe: Callable[[], None] = lambda: None
        if isinstance(clock, ManualClock):
            self._unsubscribe = clock.when_moved(self._clock_moved)
        self._step = step
        self._at_end = at_end
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._masks: dict[int, int] = {}
        self._due: float | None = None
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
        """Run `do` and a step in the thread, wait, and return or raise what `do` does.

        `UsageError` when the thread has ended, and in a process that was forked since.
        """
        if threading.current_thread() is self._thread:
            return do()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                if self._ended:
                    raise UsageError("usage", f"{NAME} has ended")
                value = do()
            except BaseException as error:
                answer.set_exception(error)
                return
            try:
                self._due = self._step()
            finally:
                answer.set_result(value)

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

    def watch(self, fd: int, mask: int | None) -> None:
        """Wake up for the events in `mask` (0: only errors); None: no longer."""
        if mask == self._masks.get(fd):
            return
        if mask is None:
            del self._masks[fd]
            self._epoll.unregister(fd)
            self.events.pop(fd, None)  # the next descriptor may get this number
            return
        change = self._epoll.modify if fd in self._masks else self._epoll.register
        change(fd, mask)
        self._masks[fd] = mask

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
                self.events = dict(self._epoll.poll(self._patience()))
                if self.events.pop(self._wake, 0):
                    os.eventfd_read(self._wake)
                self._run_timers()
                self._due = self._step()
                self.events = {}
                while self._calls:
                    self._calls.popleft()()
        except BaseException as error:  # raised in the next caller, and by stop()
            self._crash = error
        finally:
            with self._lock:
                self._ended = True
            self._at_end()
            while self._calls:
                self._calls.popleft()()
            self._epoll.close()
            os.close(self._wake)

    def _patience(self) -> float | None:
        due = [] if self._due is None else [self._due]
        due += [self._timers[0][0]] if self._timers else []
        if not due:
            return None
        left = min(due) - self.now()
        return 0.0 if left <= 0 else None if self._manual else left

    def _clock_moved(self) -> None:
        """Return when all that is due by the clock has happened."""
        try:
            self.call(self._run_timers)
        except UsageError:
            pass  # closed meanwhile: nothing is due any more

    def _run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now():
            heapq.heappop(self._timers)[2]()

    def _raise_crash(self) -> None:
        if self._crash is not None:
            text = f"{NAME} failed: {self._crash!r}"
            raise InternalError("internal-error", text) from self._crash
