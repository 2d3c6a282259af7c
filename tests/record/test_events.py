"""Events: written at once, read again, and ordered into a timeline."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from rallypoint.record.events import KINDS, Event, EventLog, read_events
from rallypoint.record.run_folder import RunFolder, Trouble
from rallypoint.record.timeline import Row, around, ordered, sentence, startup


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
    assert read_events(str(tmp_path / "events.jsonl")) == events == log.events
    log.close()
    log.close()
    text = (tmp_path / "events.jsonl").read_text()
    assert text.splitlines()[0] == '{"at":0.0,"what":"job-started","details":{"program":"train.py"}}'
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_line_cut_off_by_a_crash_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"at":1.0,"what":"report"}\n{"at":2.0,"wh')
    assert read_events(str(path)) == [Event(1.0, "report")]
    path.write_text('{"at":1.0,"what":"no such thing"}\n')
    with pytest.raises(msgspec.ValidationError):
        read_events(str(path))


def test_a_full_disk_costs_the_events_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    said: list[str] = []
    log = EventLog(folder(tmp_path, said))
    for at in range(3):
        log.write(Event(float(at), "evidence-asked"))
    assert said == [f"rallypoint: cannot write {tmp_path}/events.jsonl: No space left on device; events are no longer kept"]
    assert len(log.events) == 3


def test_without_a_folder_events_are_still_known() -> None:
    log = EventLog(RunFolder("", None, Trouble(lambda text: pytest.fail(text))))
    log.write(Event(0.0, "job-ended", details={"status": 0}))
    assert len(log.events) == 1


def test_details_that_are_no_json_become_text(tmp_path: Path) -> None:
    log = EventLog(folder(tmp_path, []))
    log.write(Event(0.0, "raised", 1, details={"message": tmp_path}))
    assert read_events(str(tmp_path / "events.jsonl"))[0].details == {"message": str(tmp_path)}


def test_every_kind_has_its_sentence() -> None:
    for kind in KINDS:
        assert sentence(Event(0.0, kind, 1, "because", {}))
    assert sentence(Event(0.0, "ended", 1, details={"signal": int(signal.SIGKILL)})) == "died: SIGKILL"
    assert sentence(Event(0.0, "ended", 1, details={"signal": 45})) == "died: signal 45"
    assert sentence(Event(0.0, "ended", 1, details={"code": 3})) == "exited with 3"


def failing_job() -> list[Event]:
    events = [Event(0.0, "job-started", details={"program": "train.py"}), Event(0.95, "template-ready")]
    events += [Event(1.0 + rank / 100, "worker-started", rank, details={"pid": 100 + rank}) for rank in range(4)]
    events += [Event(1.1 + rank / 100, "phase", rank, details={"phase": "importing"}) for rank in range(4)]
    events += [Event(1.2, "phase", rank, details={"phase": "running"}) for rank in (2, 0, 1, 3)]
    events += [
        Event(9.0, "raised", 1, details={"type": "ValueError", "message": "bad\nbatch"}),
        Event(9.1, "evidence-asked", because="rank 1 raised ValueError"),
        *(Event(9.2, "stop-sent", rank, "rank 1 raised ValueError", {"signal": "SIGTERM"}) for rank in (0, 2, 3)),
        *(Event(9.3 + rank / 100, "ended", rank, details={"signal": 15}) for rank in (0, 2, 3)),
        Event(9.35, "ended", 1, details={"code": 1}),
    ]
    return events


def test_a_timeline_has_few_lines_causes_first_and_ranks_folded() -> None:
    rows = around(reversed(failing_job()[:-1] + failing_job()[-1:]), 9.0)
    assert len(rows) <= 7
    assert rows == sorted(rows, key=lambda row: row.at)
    assert Row(9.0, "rank 1", "raised ValueError: bad") in rows
    assert Row(9.3, "ranks 0 and 2-3", "died: SIGTERM") in rows
    assert Row(9.35, "rank 1", "exited with 1") in rows
    assert Row(9.2, "launcher", "sent SIGTERM to ranks 0 and 2-3: rank 1 raised ValueError") in rows
    assert around(failing_job(), 9.0, most=1) == [Row(9.0, "rank 1", "raised ValueError: bad")]
    assert around([], 9.0) == []


def test_one_moment_keeps_the_order_of_writing() -> None:
    events = [Event(1.0, "ended", 2), Event(1.0, "ended", 1), Event(0.5, "ended", 0)]
    assert [event.rank for event in ordered(events)] == [0, 2, 1]


def test_how_it_came_up() -> None:
    events = failing_job()
    assert startup(events) == "template ready 0.95 s · 4 workers started 1.03 s · all joined 1.20 s"
    assert startup(events[:3]) == "template ready 0.95 s · 1 worker started 1.00 s"
    assert startup([]) == ""
    again = [*events, Event(9.4, "attempt-ended"), Event(9.5, "worker-started", 0), Event(9.9, "phase", 0, details={"phase": "running"})]
    assert startup(again) == startup(events)
