"""Parts of torch that the template imports for the ranks, and what the ranks show about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.plan import Plan


class PreloadedParts:
    """Parts that are imported early in this job, and parts that are better left to the ranks."""

    def __init__(self, plan: Plan) -> None:
        self.early = plan.parts
        self.spoilt: dict[str, str] = {}  # left to the ranks, and why

    def leave_out(self, names: Iterable[str], why: str) -> None:
        """Leave these parts to the ranks, in later runs of the program."""
        self.spoilt.update(dict.fromkeys(names, why))

    def import_fewer(self) -> None:
        """Leave them to the ranks also in this run: the next template imports the others only."""
        self.early = tuple(name for name in self.early if name not in self.spoilt)

    def learnt(self, ranks: Sequence[RankHandle]) -> tuple[str, ...]:
        """Return the parts that every rank has imported after the fork and that may be imported
        before it.
        """
        return tuple(
            name
            for name in (ranks[0].parts if ranks else ())  # in the order of the first
            if name not in self.spoilt and all(name in handle.parts for handle in ranks)
        )
