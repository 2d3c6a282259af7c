"""Question to ranks where they are: asked by a signal, answered by stacks, given up at a
deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.process_handles import RankHandle

# Seconds between looks whether a dump is whole. The handler has no way to say so; its blocked
# signal in /proc does.
ANSWER_LOOK = 0.004


class StackQuestion:
    """One question to some ranks. It is over when each of them that lives has answered, or has no
    more time.
    """

    def __init__(self, job: Job, ranks: Iterable[RankHandle]) -> None:
        """Ask every rank that lives. One that has no handler for the question is not in `asked`."""
        job.console.expect_interruptions()
        self._job = job
        self.asked = [handle for handle in ranks if handle.alive and handle.ask()]

    def is_answered(self) -> bool:
        """Return whether every rank that lives has answered."""
        return all(handle.answered() for handle in self.asked if handle.alive)

    def wait(
        self,
        name: str,
        seconds: float,
        then: Callable[[float], object],
        also: Callable[[], bool] = lambda: True,
        limited: bool = True,
    ) -> None:
        """Call `then` when the question is over, under a timer of this name.

        `also`: another condition, looked at as often; it ends at the deadline if `limited`, else
        when it is met.
        """
        loop = self._job.loop
        until = loop.now + seconds

        def over(now: float) -> bool:
            met = also()
            if limited:
                return now >= until or (self.is_answered() and met)
            return (now >= until or self.is_answered()) and met

        loop.poll(name, over, then, every=ANSWER_LOOK)
