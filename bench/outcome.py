"""How one repetition of a soak went, as data."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """`wrong` is empty when it went well; `what` counts kinds; `times` are seconds, by name;
    `counts` are added up over all repetitions.
    """

    what: str
    wrong: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


Mode = Callable[[random.Random, int, Path], Outcome]
"""Chooses with the first, is the so-manieth of the repetitions, and leaves its output in the
folder.
"""
