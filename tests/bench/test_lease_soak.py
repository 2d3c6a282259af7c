"""A short, seeded form of the soak of leases, and that it can fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import lease_soak

FROZEN = list(lease_soak.FAULTS).index("frozen")


def test_no_node_is_lost_while_the_lead_stands_still(tmp_path: Path) -> None:
    outcome = lease_soak.leases(
        random.Random(1), FROZEN, tmp_path, nodes=2, seconds=2.0, freeze=1.0
    )
    assert outcome.wrong == []
    assert 1.0 < outcome.times["longest silence"] < lease_soak.TTL


def test_a_lead_that_stands_still_for_too_long_is_told(tmp_path: Path) -> None:
    freeze = lease_soak.TTL + 0.5
    outcome = lease_soak.leases(
        random.Random(1), FROZEN, tmp_path, nodes=2, seconds=2.0, freeze=freeze
    )
    assert len(outcome.wrong) == 2, outcome
    assert all("believed to be lost" in wrong for wrong in outcome.wrong)


@pytest.mark.parametrize("fault", ["quota", "loss"])
def test_a_fault_begins_and_ends(fault: str, tmp_path: Path) -> None:
    number = list(lease_soak.FAULTS).index(fault)
    outcome = lease_soak.leases(random.Random(1), number, tmp_path, nodes=1, seconds=0.5)
    assert outcome.what == fault or outcome.what.startswith(f"{fault}: not here")
    assert outcome.wrong == []
