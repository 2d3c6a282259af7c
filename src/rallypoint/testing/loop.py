"""One thread that waits for descriptors, for times of a clock, and for calls from other threads."""

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
Handler = Callable[[int], None]


class Loop:
    """Everything that is handed in runs in the one thread, one thing after another, and must not wait."""

    def __init__(self, name: str, clock: Clock, *, at_end: Callable[[], None], each_round: Callable[[], None]) -> None:
        """`at_end` runs last, whatever ended the thread; `each_round` after every round of things that happened."""
        self.now = clock.monotonic
        self._by_hand = isinstance(clock, ManualClock)
        self._unsubscribe = clock.when_moved(self._moved) if isinstance(clock, ManualClock) else _nothing
        self._at_end = at_end
        self._each_round = each_round
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, Handler] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_number = 0
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()  # under the lock: none is added once the thread has ended
        self._stopping = False
        self._ended = False
        self._crash: BaseException | None = None
        self._pid = os.getpid()
        # A daemon: a test that forgets close() must not keep its interpreter from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. May be called twice, from any thread but this one. `InternalError` when it had failed."""
        if os.getpid() != self._pid:
            return
        self._unsubscribe()
        try:
            self.call(self._stop)
        except (UsageError, InternalError):
            pass  # it has ended already; below, if that was a failure
        self._thread.join()
        if self._crash is not None:
            self._raise_crash()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, here or (in a forked child) for us."""
        return self._ended or os.getpid() != self._pid

    def _stop(self) -> None:
        self._stopping = True

    def call(self, do: Callable[[], T]) -> T:
        """Run `do` in the thread, wait for it, and return or raise what it does. `UsageError` when the thread has ended, and in a
        process that was forked since: the thread stayed behind."""
        if threading.current_thread() is self._thread:
            return do()
        answer: Future[T] = Future()
        self.post(do, answer)
        return answer.result()

    def post(self, do: Callable[[], T], answer: Future[T]) -> None:
        """The same without waiting."""

        def run() -> None:
            if self._ended:
                answer.set_exception(UsageError("usage", f"{self._thread.name} has ended"))
                return
            try:
                answer.set_result(do())
            except BaseException as error:
                answer.set_exception(error)

        if os.getpid() != self._pid:
            raise UsageError("usage", f"{self._thread.name} runs in process {self._pid}, which forked this one")
        with self._lock:
            if self._ended:
                if self._crash is not None:
                    self._raise_crash()
                raise UsageError("usage", f"{self._thread.name} is closed")
            self._calls.append(run)
            # Under the lock too: once the thread has ended, the descriptor may be somebody else's.
            os.eventfd_write(self._wake, 1)

    def _raise_crash(self) -> None:
        raise InternalError("internal-error", f"{self._thread.name} failed: {self._crash!r}") from self._crash

    def watch(self, fd: int, mask: int | None, handler: Handler) -> None:
        """Call `handler(events)` when one of the events in `mask` (0: only errors and hang-ups) is there. None: no longer."""
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
        """In a forked child: give up what belongs to the parent, without touching what the parent waits for."""
        self._epoll.close()
        os.close(self._wake)

    def _moved(self) -> None:
        """The clock was moved by hand: return when all that is due has happened."""
        try:
            self.call(self._all_due)
        except UsageError:
            pass  # closed meanwhile: nothing is due any more

    def _run(self) -> None:
        try:
            while not self._stopping:
                # Handlers first, then calls: a descriptor that one of them closes may get its number again in this same round.
                ready = [(self._handlers.get(fd), mask) for fd, mask in self._epoll.poll(self._patience())]
                for handler, mask in ready:
                    if handler is not None:
                        handler(mask)
                self._answer()
                self._due()
                self._each_round()
        except BaseException as error:  # told to whoever calls next, and by stop()
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
        if left <= 0:
            return 0.0
        return None if self._by_hand else left

    def _answer(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass  # nobody called
        while self._calls:
            self._calls.popleft()()

    def _due(self) -> None:
        """What is due now. What that makes due at once waits for the next round, so that descriptors have their turn."""
        due = []
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        for do in due:
            do()

    def _all_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.now():
            self._due()


def _nothing() -> None:
    """There is no clock that would tell when it is moved."""
