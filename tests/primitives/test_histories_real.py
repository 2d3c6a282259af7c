"""A short, seeded form of each scene of `scripts/soak primitives-kills`, with real processes; and
that the soaks can fail.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.outcome import Outcome
from bench.primitives_soak import KINDS, crowd

from bench import primitives_soak, store_soak

from ..warm_python import WarmPopen

SLACK = 10.0
"""Seconds: on a machine that is busy with other tests, what is promised on an idle one may be late.
That it comes at all is tested here.
"""

_SCENARIOS = [scenario for _, scenario, _ in KINDS]
SCENES = [
    number
    for number, kind in enumerate(KINDS)
    if kind[1] not in _SCENARIOS[:number] or (kind[1] is crowd and kind not in KINDS[:number])
]
"""Each scenario once, and a crowd by TCP as well as by a Unix socket."""


@pytest.fixture(autouse=True)
def _processes_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = SimpleNamespace(**{**vars(subprocess), "Popen": WarmPopen})
    for module in (primitives_soak, store_soak):
        monkeypatch.setattr(module, "subprocess", forks)


@pytest.mark.parametrize("number", SCENES, ids=[KINDS[number][0] for number in SCENES])
def test_nobody_is_told_what_is_not_so(tmp_path: Path, number: int) -> None:
    outcome = primitives_soak.kills(
        random.Random(number), number, tmp_path, slack=SLACK, seconds=1.0
    )
    assert outcome.wrong == []
    assert outcome.what == KINDS[number][0]


def test_a_thousand_histories_in_a_process_of_their_own(tmp_path: Path) -> None:
    outcome = primitives_soak.histories(random.Random(1), 0, tmp_path, count=20)
    assert outcome.wrong == []
    assert "20 histories" in outcome.times
    assert outcome.counts["histories"] == 20
    assert outcome.counts["lock granted"] > 20


# --- that they can fail


def test_what_comes_later_than_promised_is_wrong(tmp_path: Path) -> None:
    outcome = primitives_soak.kills(random.Random(0), 0, tmp_path, slack=-primitives_soak.PASSED_ON)
    assert ["SIGKILL to the next grant" in wrong for wrong in outcome.wrong] == [True]


def test_a_history_that_cannot_be_is_wrong_and_kept(tmp_path: Path) -> None:
    from .histories import Event

    scene = primitives_soak.Scene.__new__(primitives_soak.Scene)
    scene.folder = tmp_path
    outcome = Outcome("a scene")
    grants = [Event(who, who, "lock", "a", 0.0, 1.0, "granted", token=3) for who in "ab"]
    scene.judge(outcome, grants)
    assert ["token 3 was given twice" in wrong for wrong in outcome.wrong] == [True]
    assert len(json.loads((tmp_path / "history.json").read_bytes())) == 2


def test_a_seed_that_goes_wrong_is_named_with_how_to_replay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "checked": 1000,
        "counts": {"lock granted": 5},
        "wrong": {"77": ["exclusion: two have it", "fencing: and write"]},
    }
    fake = tmp_path / "tests" / "primitives"
    fake.mkdir(parents=True)
    (fake / "simulation.py").write_text(
        f"import sys\nprint({json.dumps(json.dumps(found))})\nsys.exit(1)\n"
    )
    monkeypatch.setattr(primitives_soak, "ROOT", tmp_path)
    outcome = primitives_soak.histories(random.Random(1), 0, tmp_path / "0")
    assert outcome.wrong == [
        "seed 77 (replay: PYTHONPATH=src:. python -m tests.primitives.simulation 77): exclusion: two have it"
    ]


def test_a_simulation_that_breaks_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives_soak, "ROOT", tmp_path)  # where there is none
    monkeypatch.delenv("PYTHONPATH", raising=False)  # which may name this checkout
    outcome = primitives_soak.histories(random.Random(1), 0, tmp_path / "0")
    assert ["exit status 1" in wrong or "No module named" in wrong for wrong in outcome.wrong] == [
        True
    ]
