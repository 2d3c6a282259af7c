"""Events: written at once, read again, and ordered into a timeline."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from rallypoint.record.events import Event, EventLog, What
from rallypoint.record.kept_file import Trouble
from rallypoint.record.run_folder import RunFolder
from rallypoint.record.timeline import ordered, sentence


def kept(path: Path) -> list[Event]:
    lines = (path / "events.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Event) for line in lines]


def folder(path: Path, said: list[str]) -> RunFolder:
    return RunFolder(str(path), None, Trouble(said.append))


def test_what_was_written_can_be_read(tmp_path: Path) -> None:
    log = EventLog(folder(tmp_path, []))
    events = [
        Event(0.0, "job-started", details={"program": "train.py"}),
        Event(1.5, "stop-sent", 3, "rank 1 raised ValueError", {"signal": "SIGTERM"}),
    ]
    for event in events:
        log.write(event)
    assert kept(tmp_path) == events == log.events
    log.close()
    log.close()
    text = (tmp_path / "events.jsonl").read_text()
    assert (
        text.splitlines()[0] == '{"at":0.0,"what":"job-started","details":{"program":"train.py"}}'
    )
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_the_events_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    mode = os.stat("/dev/full").st_mode
    said: list[str] = []
    log = EventLog(folder(tmp_path, said))
    for at in range(3):
        log.write(Event(float(at), "evidence-asked"))
    assert said == [
        f"rallypoint: cannot write {tmp_path}/events.jsonl: No space left on device; events are no longer kept"
    ]
    assert os.stat("/dev/full").st_mode == mode, "it is only files that are marked, no devices"
    assert len(log.events) == 3


def test_without_a_folder_events_are_still_known() -> None:
    log = EventLog(RunFolder("", None, Trouble(lambda text: pytest.fail(text))))
    log.write(Event(0.0, "job-ended", details={"status": 0}))
    assert len(log.events) == 1


def test_details_that_are_no_json_become_text(tmp_path: Path) -> None:
    log = EventLog(folder(tmp_path, []))
    log.write(Event(0.0, "raised", 1, details={"message": tmp_path}))
    assert kept(tmp_path)[0].details == {"message": str(tmp_path)}


def test_every_kind_has_its_sentence() -> None:
    for kind in get_args(What):
        assert sentence(Event(0.0, kind, 1, "because", {}))
    assert (
        sentence(Event(0.0, "ended", 1, details={"signal": int(signal.SIGKILL)})) == "died: SIGKILL"
    )
    assert sentence(Event(0.0, "ended", 1, details={"signal": 45})) == "died: signal 45"
    assert sentence(Event(0.0, "ended", 1, details={"code": 3})) == "exited with 3"


def test_one_moment_keeps_the_order_of_writing() -> None:
    events = [Event(1.0, "ended", 2), Event(1.0, "ended", 1), Event(0.5, "ended", 0)]
    assert [event.rank for event in ordered(events)] == [0, 2, 1]
