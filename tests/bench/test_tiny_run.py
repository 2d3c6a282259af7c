from __future__ import annotations

import random
from importlib import metadata
from pathlib import Path

import pytest

from bench import soak, start


def has_torch() -> bool:
    try:
        return bool(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.usefixtures("torch_in_parts"),
    pytest.mark.torch,
    pytest.mark.skipif(not has_torch(), reason="torch is not installed"),
]


def test_two_ranks_are_measured_beside_one_import() -> None:
    alone, mine = start.first_all_reduce(2, 1, {})
    assert (alone.who, mine.who, mine.note) == ("import torch", "rallypoint", "")
    assert mine.values["status"] == 0
    times = [
        alone.values["seconds"],
        mine.values["seconds"],
        mine.values["exit_seconds"],
        mine.values["fork"],
    ]
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in times)


def test_one_kill_of_the_soak(tmp_path: Path) -> None:
    outcome = soak.kills(random.Random(1), 0, tmp_path / "0", within=30.0)
    assert outcome.wrong == []
    assert "gone" in outcome.times
