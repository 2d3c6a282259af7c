"""The agent's one place to wait: descriptors that become readable, and times that come. Each calls
the function that was given for it.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from rallypoint.clock import Clock


class Loop:
    """Loop of one thread. A callback must not wait."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._sources: dict[int, Callable[[], object]] = {}
        self._timers: dict[str, tuple[float, Callable[[float], object]]] = {}

    @property
    def now(self) -> float:
        """Seconds since the job's start."""
        return self.clock.elapsed()

    def fileno(self) -> int:
        """Readable when something that is watched is."""
        return self._epoll.fileno()

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        """Call `act` whenever this descriptor is readable."""
        self._sources[fd] = act
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """No more; before it is closed. Nothing when it is not watched."""
        if self._sources.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def at(self, name: str, when: float, act: Callable[[float], object]) -> None:
        """Call `act` with the time at `when`, once. A later call for the same name replaces this
        one.
        """
        self._timers[name] = (when, act)

    def by(self, name: str, when: float, act: Callable[[float], object]) -> None:
        """Call `act` as `at` does, but what is due earlier under that name stays so."""
        if name not in self._timers or when < self._timers[name][0]:
            self._timers[name] = (when, act)

    def poll(
        self,
        name: str,
        is_over: Callable[[float], bool],
        then: Callable[[float], object],
        *,
        every: float,
    ) -> None:
        """Ask `is_over` from the next turn on, every so many seconds, and call `then` once it says
        so. Both get the time.
        """

        def look(now: float) -> None:
            if is_over(now):
                then(now)
            else:
                self.at(name, now + every, look)

        self.at(name, self.now, look)

    def due(self, name: str) -> float | None:
        """Return when what has this name is due; None when nothing is."""
        return self._timers[name][0] if name in self._timers else None

    def cancel(self, name: str) -> None:
        """Call nothing under this name any more."""
        self._timers.pop(name, None)

    def forget_all_but(self, *names: str) -> None:
        """Cancel every other one."""
        self._timers = {name: timer for name, timer in self._timers.items() if name in names}

    def turn(self) -> None:
        """Wait until something is readable or due, and call for all that is."""
        soonest = min((when for when, _ in self._timers.values()), default=None)
        # a call of `launch` may have years; epoll counts milliseconds in 31 bits
        timeout = None if soonest is None else max(0.0, min(soonest - self.now, 1e6))
        # In the order in which they were opened: a signal to this process comes before the ends of
        # the ranks that it was sent to as well.
        ready = [(fd, self._sources.get(fd)) for fd, _ in sorted(self._epoll.poll(timeout))]
        for fd, source in ready:
            # An earlier one of the round may have closed it, and even given its number to somebody
            # else.
            if source is not None and self._sources.get(fd) is source:
                source()
        now = self.now
        for name in [name for name, (when, _) in self._timers.items() if when <= now]:
            timer = self._timers.get(name)
            if (
                timer is None or timer[0] > now
                # an earlier one of this round ended the attempt, and all its timers, or put this
                # one off
            ):
                continue
            del self._timers[name]
            timer[1](now)

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()
