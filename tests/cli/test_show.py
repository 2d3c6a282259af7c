"""`rallypoint show`: what a run folder holds, as a person reads it; folders that are damaged,
foreign, or still being written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.cli import main as cli
from rallypoint.cli import show
from rallypoint.diagnosis import render
from rallypoint.diagnosis.report import Help, Report, Said
from rallypoint.record.events import Event, EventLog
from rallypoint.record.kept_file import CUT
from rallypoint.record.run_folder import RunFolder, default_root, open_run_folder
from rallypoint.record.run_list import past_runs

REPORT = Report(
    code="rank-raised",
    headline="rank 1 raised ValueError: the learning rate is NaN",
    where="train.py:9 in <module>, pid 24316",
    said=(
        Said(
            "rank 1", ("Traceback (most recent call last):", "ValueError: the learning rate is NaN")
        ),
    ),
    help=(Help("look at the data"),),
    ranks=(1,),
)
RAISED = (
    Event(0.01, "job-started", details={"program": "train.py", "world_size": 2}),
    Event(1.20, "worker-started", rank=0),
    Event(1.21, "worker-started", rank=1),
    Event(1.30, "phase", rank=0, details={"phase": "joining"}),
    Event(1.31, "phase", rank=1, details={"phase": "joining"}),
    Event(
        1.90,
        "raised",
        rank=1,
        details={"type": "ValueError", "message": "the learning rate is NaN"},
    ),
    Event(
        1.95, "stop-sent", rank=0, because="rank 1 raised ValueError", details={"signal": "SIGTERM"}
    ),
    Event(2.00, "ended", rank=0, details={"signal": "SIGTERM"}),
    Event(2.01, "ended", rank=1, details={"code": 1}),
    Event(2.10, "job-ended", details={"status": 1}),
)
PLAN: dict[str, Any] = {
    "program": {"kind": "script", "target": "train.py", "args": ["--lr", "a b"]},
    "slots": 2,
    "start": "template",
    "max_restarts": 3,
    "torch": "2.13.0",
}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of its own: whatever else is kept on this machine is not looked at."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "state"


def begin(name: str, **plan: Any) -> RunFolder:
    """A run that has begun, its folder made as the launcher makes it."""
    folder = open_run_folder(
        os.path.join(default_root(os.environ), name), name, pytest.fail, asked_for=False
    )
    folder.write_plan({"job": name, **PLAN, **plan})
    return folder


def keep(
    name: str,
    events: Iterable[Event] = RAISED,
    reports: tuple[Report, ...] = (REPORT,),
    **plan: Any,
) -> Path:
    """A run that is over."""
    folder = begin(name, **plan)
    log = EventLog(folder)
    for event in events:
        log.write(event)
    log.close()
    if reports:
        folder.write_report(reports)
    Path(folder.file("rank0.log")).write_bytes(b"")
    Path(folder.file("rank1.log")).write_text("epoch 0\nepoch 1\n")
    folder.close()
    return Path(folder.path)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["show", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["show", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_all_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    path = keep("20260102-030405-ab12")
    assert (
        shown(capsys)
        == f"""\
  run      20260102-030405-ab12
  command  rallypoint run -n 2 --max-restarts 3 train.py --lr 'a b'
  ranks    2, torch 2.13.0
  began    2026-01-02 03:04:05
  ended    after 2.1 s with exit status 1: rank 1 raised ValueError: the learning rate is NaN

  +0.010s  launcher   started train.py
  +1.200s  launcher   started ranks 0-1
  +1.300s  ranks 0-1  joining
  +1.900s  rank 1     raised ValueError: the learning rate is NaN
  +1.950s  launcher   sent SIGTERM to rank 0: rank 1 raised ValueError
  +2.000s  rank 0     died: SIGTERM
  +2.010s  rank 1     exited with 1
  +2.100s  launcher   ended with 1

{render.text(REPORT)}

  rank 1's log ends:
    | epoch 0
    | epoch 1

  folder   {path}
  logs     rank1.log  16 bytes
           1 rank printed nothing
"""
    )


def test_a_run_that_was_started_again_and_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    keep("20260102-030405-ab12", [*RAISED[:-1], Event(9.8, "job-ended", details={"status": 0})])
    line = "after 9.8 s with exit status 0; before that, rank 1 raised ValueError: the learning rate is NaN"
    assert f"\n  ended    {line}\n" in shown(capsys)


@pytest.mark.parametrize("word", ["", "latest", "20260102-030406-cd34", "cd34", "path", "path/"])
def test_the_ways_to_name_a_run(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    keep("20260102-030405-ab12")
    path = keep("20260102-030406-cd34")
    os.utime(
        path / "plan.json", (2**31, 2**31)
    )  # the newest by far, whatever the clock's resolution
    words = [str(path) + word[4:]] if word.startswith("path") else [word] if word else []
    assert shown(capsys, *words).startswith("  run      20260102-030406-cd34\n")


def test_options_may_stand_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    keep("20260102-030405-ab12")
    before, after = (
        shown(capsys, "--error-format", "json", "ab12"),
        shown(capsys, "ab12", "--error-format=json"),
    )
    assert before == after


def test_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    path = keep("20260102-030405-ab12")
    told = json.loads(shown(capsys, "--error-format", "json"))
    assert (told["state"], told["exit_status"], told["code"], told["ranks"]) == (
        "ended",
        1,
        "rank-raised",
        2,
    )
    assert told["timeline"][2] == {"at": 1.3, "who": "ranks 0-1", "what": "joining"}
    assert msgspec.convert(told["reports"], tuple[Report, ...]) == (REPORT,)
    assert told["logs"][1] == {"rank": 1, "path": str(path / "rank1.log"), "size": 16, "cut": False}
    [listed] = json.loads(shown(capsys, "--list", "--error-format", "json"))
    assert listed == {name: told[name] for name in listed}


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for at, (name, events, reports) in enumerate(
        [
            ("20260102-030405-ab12", RAISED, (REPORT,)),
            ("20260102-030407-ef56", RAISED[:-1], ()),
            ("20260102-030408-0a9b", [Event(4000.0, "job-ended", details={"status": 0})], ()),
        ]
    ):
        os.utime(keep(name, events, reports) / "plan.json", (at, at))
    running = begin("20260102-030409-77aa")
    header, newest, *others = [
        re.split(r"  +", line) for line in shown(capsys, "--list").splitlines()
    ]
    running.close()
    command = "-n 2 --max-restarts 3 train.py --lr 'a b'"
    assert header == ["run", "began", "took", "ranks", "ended", "command"]
    assert newest[:2] + newest[3:] == [
        "20260102-030409-77aa",
        "2026-01-02 03:04:09",
        "2",
        "still running",
        command,
    ]
    assert others == [
        ["20260102-030408-0a9b", "2026-01-02 03:04:08", "67 min", "2", "0", command],
        ["20260102-030407-ef56", "2026-01-02 03:04:07", "2.0 s", "2", "launcher killed", command],
        ["20260102-030405-ab12", "2026-01-02 03:04:05", "2.1 s", "2", "1 rank-raised", command],
    ]


def test_a_call_of_launch_began_when_it_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    """All calls of a program had the moment of the first one, and one that ran "took" as long."""
    path = keep("20260102-030405-ab12", task={"name": "train", "line": "train.py:9"})
    at = time.mktime((2026, 1, 2, 4, 5, 6, 0, 0, -1))
    os.utime(path / "plan.json", (at, at))
    assert "  began    2026-01-02 04:05:06\n" in shown(capsys)


def test_the_list_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("20260102-030405-ab12")
    monkeypatch.setenv("COLUMNS", "110")
    head = "20260102-030405-ab12  2026-01-02 03:04:05  2.1 s  2      1 rank-raised  "
    assert shown(capsys, "--list").splitlines()[1:] == [
        f"{head}-n 2 --max-restarts 3 train.py --lr 'a",
        f"{'':{len(head)}}b'",
    ]
    monkeypatch.setenv("COLUMNS", "80")
    assert shown(capsys, "--list").splitlines()[1:] == [
        head.rstrip(),
        "    -n 2 --max-restarts 3 train.py --lr 'a b'",
    ]


def test_a_run_that_is_removed_while_it_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("20260102-030405-ab12")
    path = keep("20260102-030407-ef56")
    found = past_runs(default_root(os.environ))
    shutil.rmtree(path)
    monkeypatch.setattr(show, "past_runs", lambda root: found)
    assert re.findall(r"^\d{8}\S+", shown(capsys, "--list"), re.MULTILINE) == [
        "20260102-030405-ab12"
    ]


def test_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    folder = begin("20260102-030405-ab12")
    log = EventLog(folder)
    log.write(RAISED[0])
    told = shown(capsys)
    assert re.search(
        r"^  ended    not yet: .* running for [\d.]+ days; where its ranks are: rallypoint stacks 20260102-030405-ab12$",
        told,
        re.MULTILINE,
    )
    assert "+0.010s  launcher  started train.py\n" in told
    log.close()
    folder.close()


def test_a_launcher_that_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    """It has left its lock file, which nobody holds any more."""
    path = keep("20260102-030405-ab12", RAISED[:-1], ())
    (path / "running").touch()
    told = shown(capsys)
    assert (
        "  ended    the launcher was killed, or the machine went down; last heard of 2.0 s after the start\n"
        in told
    )
    assert json.loads(shown(capsys, "--error-format", "json"))["state"] == "killed"


def test_a_launcher_that_was_killed_before_it_had_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_run_folder(
        os.path.join(default_root(os.environ), "20260102-030405-ab12"),
        "20260102-030405-ab12",
        pytest.fail,
        asked_for=False,
    ).close()
    told = shown(capsys)
    assert "  command  not known: plan.json does not tell\n" in told
    assert "  there is no events.jsonl: nothing that happened was written down\n" in told
    assert re.search(r"  0\.0 s  -      launcher killed$", shown(capsys, "--list"), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("plan.json", b"{", "  plan.json cannot be read: "),
        ("plan.json", b'{"job": 3}', "  plan.json cannot be read: "),
        ("report.json", b"[{}]", "  report.json cannot be read: "),
        ("report.json", b"\xff", "  report.json cannot be read: "),
        ("events.jsonl", b'{"at": 1.0, "what": "job-started"}\nnonsense\n{"at"', "  1 line of events.jsonl cannot be read: "),
        ("events.jsonl", b'{"at": 1.0, "what": "of a later version"}\n' * 2, "  2 lines of events.jsonl cannot be read: "),
    ],
)  # fmt: skip
def test_what_is_damaged_is_said_and_the_rest_is_shown(
    name: str, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep("20260102-030405-ab12")
    (path / name).write_bytes(content)
    told = shown(capsys, str(path))
    assert says in told
    assert "rank1.log  16 bytes" in told
    assert "rank 1 raised ValueError" in told  # of the timeline and the report one is left


def test_a_full_disk_is_told_later_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Afterwards `show` said that the rank whose log could not be written had printed nothing, and
    gave no cause.
    """
    path = keep(
        "20260102-030405-ab12",
        (*RAISED[:6], Event(1.92, "report", details={"headline": REPORT.headline}), *RAISED[6:]),
        (),
    )
    (path / "rank0.log").chmod(CUT)
    told = shown(capsys)
    assert (
        "  logs     rank0.log  0 bytes, cut: it could not be written any more, as when a disk is full\n"
        in told
    )
    assert "printed nothing" not in told
    assert "exit status 1: rank 1 raised ValueError: the learning rate is NaN\n" in told
    assert (
        "  there is no report.json: it could not be written (a full disk?), or was removed; "
        in told
    )
    assert json.loads(shown(capsys, "--error-format", "json"))["logs"][0]["cut"]
    (path / "rank0.log").unlink()
    assert "  there is no log of rank 0: it could not be written" in shown(capsys)


def test_events_that_end_early_are_no_launcher_that_was_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = keep("20260102-030405-ab12", RAISED[:5], ())
    (path / "events.jsonl").chmod(CUT)
    told = shown(capsys)
    assert (
        "  ended    not known: events.jsonl ends early; last heard of 1.3 s after the start\n"
        in told
    )
    assert (
        "  events.jsonl ends early: it could not be written any more, as when a disk is full\n"
        in told
    )
    assert json.loads(shown(capsys, "--error-format", "json"))["state"] == "unknown"
    assert " not known " in shown(capsys, "--list")


def test_where_it_was_started(capsys: pytest.CaptureFixture[str]) -> None:
    """The command alone, typed in another folder, starts another train.py."""
    keep(
        "20260102-030405-ab12", cwd="/srv/work", run_dir="/srv/work/runs/today", run_dir_asked=True
    )
    told = shown(capsys)
    assert (
        "  command  rallypoint run -n 2 --max-restarts 3 --run-dir runs/today train.py --lr 'a b'\n  in       /srv/work\n"
        in told
    )
    assert json.loads(shown(capsys, "--error-format", "json"))["folder"] == "/srv/work"


def test_the_command_has_all_that_changes_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """--grace, --debug-rank, --quiet, -r and -t were left out of it."""
    keep(
        "20260102-030405-ab12",
        grace=2.5,
        debug_rank=1,
        quiet=True,
        error_format="json",
        logs={"redirects": [3, 3], "tee": [0, 1]},
        rendezvous="/shared/job",
    )
    assert (
        "  command  rallypoint run -n 2 --quiet --max-restarts 3 --grace 2.5 --debug-rank 1 -r 3 -t 1:1"
        " --rdzv-endpoint file:///shared/job --error-format json train.py --lr 'a b'\n"
        in shown(capsys)
    )


def test_a_folder_where_a_file_should_be(capsys: pytest.CaptureFixture[str]) -> None:
    path = keep("20260102-030405-ab12")
    for name in ("report.json", "events.jsonl"):
        (path / name).unlink()
        (path / name).mkdir()
    (path / "rank1.log").unlink()
    (path / "rank1.log").mkdir()
    told = shown(capsys)
    assert "  events.jsonl cannot be read: Is a directory\n" in told
    assert "  report.json cannot be read: Is a directory\n" in told


def test_what_ranks_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    path = keep(
        "20260102-030405-ab12", program={"kind": "script", "target": "a\x1b[2Jb.py", "args": []}
    )
    (path / "rank1.log").write_bytes(b"before\rafter \x1b]0;title\x07 \xff\n")
    assert "\x1b" not in shown(capsys)
    assert "\x1b" not in shown(capsys, "--list")


def test_a_long_timeline_keeps_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    keep(
        "20260102-030405-ab12",
        [Event(float(n), "attempt-started", details={"attempt": n}) for n in range(500)],
    )
    lines = [
        line for line in shown(capsys).splitlines() if "attempt" in line or "in between" in line
    ]
    assert len(lines) == 61
    assert lines[30] == "  ... 440 lines in between are in events.jsonl"
    assert lines[-1] == "  +499.000s  launcher  started attempt 499"


def test_the_logs_of_the_ranks_at_fault_come_before_larger_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = keep("20260102-030405-ab12", slots=64)
    for rank in range(2, 64):
        (path / f"rank{rank}.log").write_bytes(b"x" * 5000)
    (path / "rank7.log").write_bytes(b"x" * 3_000_000)
    told = shown(capsys)
    assert "  logs     rank1.log  16 bytes\n" in told
    assert "rank7.log  2.9 MiB\n" in told
    assert "           and 55 more\n           1 rank printed nothing\n" in told


@pytest.mark.parametrize(
    ("argv", "headline", "command"),
    [
        (
            ["nothing"],
            "error[usage]: no run is called nothing, nor has it in its name",
            "rallypoint show --list",
        ),
        (
            ["2026"],
            "error[usage]: 2 runs have 2026 in their names",
            "rallypoint show 20260102-0304",
        ),
        (["./nowhere"], "nowhere is no folder", "rallypoint show --list"),
        (
            [os.sep],
            "error[usage]: / is no run folder: there is no plan.json in it",
            "rallypoint show --list",
        ),
        (["a", "b"], "error[usage]: show takes one run, and got 2", "rallypoint show --list"),
        ([""], "error[usage]: show takes a run, and got an empty word", "rallypoint show --list"),
        (
            ["--list", "cd34"],
            "error[usage]: --list names no run, and got cd34",
            "rallypoint show cd34",
        ),
        (
            ["--lst"],
            "error[option-unknown]: rallypoint show has no option --lst; the nearest is --list",
            "rallypoint show --list",
        ),
        (
            ["-l"],
            "error[option-unknown]: rallypoint show has no option -l; the nearest is --list",
            "rallypoint show --list",
        ),
        (["cd34", "--json"], "error[option-unknown]", "rallypoint show cd34 --error-format=json"),
        (
            ["--error-format", "text", "cd34", "--json"],
            "error[option-unknown]",
            "show --error-format text cd34 --error-format=json",
        ),
        (
            ["\u2013list"],
            "error[option-unknown]: \u2013list begins with a dash (U+2013)",
            "type it with hyphens",
        ),
    ],
)
def test_wrong_usage(
    argv: list[str], headline: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep("20260102-030405-ab12")
    keep("20260102-030406-cd34")
    told = refused(capsys, *argv)
    assert headline in told.splitlines()[0]
    assert command in told


def test_nothing_is_kept(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"error[usage]: no run is kept in {state}/rallypoint/runs\n" in refused(capsys)
    assert shown(capsys, "--list") == f"no run is kept in {state}/rallypoint/runs\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "--help")
    assert "--list" in told
    assert "run-name" not in told


def test_a_copy_of_a_run_elsewhere_is_as_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(keep("20260102-030405-ab12"), tmp_path / "attached to the issue")
    told = shown(capsys, str(tmp_path / "attached to the issue"))
    assert "  run      attached to the issue\n" in told
    assert "  began    2026-01-02 03:04:05\n" in told


def test_nothing_heavy_is_imported() -> None:
    keep("20260102-030405-ab12")
    program = (
        "import sys; from rallypoint.cli.main import main; main(['show']); "
        "print(sorted({'torch', 'numpy', 'rich', 'psutil', 'asyncio', 'subprocess', 'multiprocessing'} & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


def keep_node(job: str, node: int, offset: float, *events: Event, host: str = "") -> Path:
    """Keep the run of one of two nodes with two ranks each."""
    start = {"program": "train.py", "world_size": 4, "host": host or f"gpu0{node + 1}"}
    first = Event(0.01, "job-started", details={**start, "first": 2 * node, "offset": offset})
    root = os.path.join(default_root(os.environ), job, f"node{node}")
    folder = open_run_folder(root, job, pytest.fail, asked_for=False)
    folder.write_plan({"job": job, **PLAN})
    log = EventLog(folder)
    for event in (first, *events):
        log.write(event)
    log.close()
    folder.write_report((msgspec.structs.replace(REPORT, headline="rank 3 on gpu02 raised", ranks=(3,)),))  # fmt: skip
    for rank in (2 * node, 2 * node + 1):
        Path(folder.file(f"rank{rank}.log")).write_text(f"epoch {rank}\n")
    folder.close()
    return Path(folder.path)


def keep_nodes(job: str) -> list[Path]:
    """Keep a job on two nodes: the second one's agent started 3 s after that of node 0."""
    return [
        keep_node(
            job,
            0,
            0.0,
            *(Event(5.0, "worker-started", rank=rank) for rank in (0, 1)),
            *(Event(5.1, "phase", rank=rank, details={"phase": "joining"}) for rank in (0, 1)),
            *(Event(6.2, "stop-sent", rank=rank, because="rank 3 raised ValueError") for rank in (0, 1)),
            Event(6.4, "job-ended", details={"status": 1}),
        ),
        keep_node(
            job,
            1,
            3.0,
            *(Event(2.0, "worker-started", rank=rank) for rank in (2, 3)),
            *(Event(2.1, "phase", rank=rank, details={"phase": "joining"}) for rank in (2, 3)),
            Event(3.0, "raised", rank=3, details={"type": "ValueError", "message": "NaN"}),
            Event(3.5, "job-ended", details={"status": 75}),
        ),
    ]  # fmt: skip


NODES = """\
  +0.010s  launcher on gpu01  started train.py
  +3.010s  launcher on gpu02  started train.py
  +5.000s  launcher on gpu01  started ranks 0-1
  +5.000s  launcher on gpu02  started ranks 2-3
  +5.100s  ranks 0-3          joining
  +6.000s  rank 3             raised ValueError: NaN
  +6.200s  launcher on gpu01  sent a signal to ranks 0-1: rank 3 raised ValueError
  +6.400s  launcher on gpu01  ended with 1
  +6.500s  launcher on gpu02  ended with 75
"""


@pytest.mark.parametrize("word", ["", "latest", "20260102-030405-ab12", "folder"])
def test_a_job_on_several_nodes_is_shown_as_one(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are node 0's, and what the launcher of each node did is told apart."""
    path = keep_nodes("20260102-030405-ab12")[0].parent
    words = [str(path)] if word == "folder" else [word] if word else []
    told = shown(capsys, *words)
    assert NODES in told
    head = told.partition("\n\n")[0].splitlines()
    assert head[2:5] == [
        "  ranks    4, torch 2.13.0",
        "  node0    gpu01: ranks 0-1",
        "  node1    gpu02: ranks 2-3",
    ]
    assert head[-1] == ("  ended    after 6.5 s with exit status 1: rank 3 on gpu02 raised")
    assert "logs     node0/rank0.log  8 bytes\n" in told
    assert "node1/rank3.log  8 bytes\n" in told
    assert "there is no log" not in told


def test_two_nodes_of_one_machine_have_names_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for node in (0, 1):
        keep_node("20260102-030405-ab12", node, 0.0, host="box")
    told = shown(capsys)
    assert "+0.010s  launcher on node0 (box)  started train.py" in told
    assert "+0.010s  launcher on node1 (box)  started train.py" in told
    assert "  node1    box: ranks 2-3\n" in told


def test_one_node_of_several_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    path = keep_nodes("20260102-030405-ab12")[1]
    for word in ("20260102-030405-ab12/node1", str(path)):
        told = shown(capsys, word)
        assert "launcher on" not in told
        assert "+0.010s  launcher   started train.py" in told
        assert "there is no log" not in told


def test_nodes_that_wrote_to_another_disk_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A job whose nodes have homes of their own: this disk has one of them."""
    for path in keep_nodes("20260102-030405-ab12")[:1]:
        shutil.rmtree(path)
    document = json.loads(shown(capsys, "20260102-030405-ab12", "--error-format", "json"))
    assert document["ranks"] == 4
    assert document["exit_status"] == 75
    assert [Path(log["path"]).name for log in document["logs"]] == ["rank2.log", "rank3.log"]
