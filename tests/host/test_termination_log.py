"""Termination message of a container: what is left for `kubectl describe pod`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rallypoint.host import termination_log

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(termination_log, "PATH", str(path))
    return path


def test_a_message_takes_the_place_of_an_earlier_one(log: Path) -> None:
    log.write_text("a longer message of another program in this container")
    termination_log.write("error[rank-raised]: rank 1 raised", POD)
    assert log.read_text() == "error[rank-raised]: rank 1 raised"


def test_a_long_message_is_cut_between_two_characters(log: Path) -> None:
    log.touch()
    termination_log.write("x" + "é" * 4000, POD)
    kept = log.read_bytes()
    assert len(kept) == termination_log.MOST_BYTES - 1
    assert kept.decode() == "x" + "é" * 2047


@pytest.mark.parametrize("environ", [{}, {**POD, "RALLYPOINT_JOB": "a1"}])
def test_only_the_launcher_of_a_pod_writes(log: Path, environ: Mapping[str, str]) -> None:
    log.touch()
    termination_log.write("error", environ)
    assert log.read_text() == ""


def test_no_file_is_made(log: Path) -> None:
    termination_log.write("error", POD)
    assert not log.exists()
