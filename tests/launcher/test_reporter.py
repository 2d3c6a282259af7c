"""What the launcher says of its own, beside the ranks' words."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rallypoint.clock import Clock
from rallypoint.diagnosis import evidence, render
from rallypoint.diagnosis.evidence import (
    Ended,
    MemoryCounters,
    NodeEvidence,
    RankEvidence,
)
from rallypoint.diagnosis.report import Report
from rallypoint.launcher.agent import console, evidence_gatherer
from rallypoint.launcher.agent.console import Console
from rallypoint.launcher.agent.evidence_gatherer import EvidenceGatherer
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.reporter import Reporter
from rallypoint.launcher.job_diagnosis import Diagnosis, FailedAttempt
from rallypoint.launcher.plan import alone
from rallypoint.record.disk_writer import DiskWriter

from .test_plan import plan


class Writes(io.StringIO):
    """A stream that remembers what it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def write(self, text: str) -> int:
        self.given.append(text)
        return len(text)


def test_a_line_is_written_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newline came by itself, and the report in JSON got in between: a program could not read
    it.
    """
    stream = Writes()
    monkeypatch.setattr(sys, "stderr", stream)
    console.say_directly("rallypoint: cannot write report.json")
    assert stream.given == ["rallypoint: cannot write report.json\n"]
    monkeypatch.setattr(sys, "stderr", None)
    console.say_directly("nobody hears it")


def test_a_line_has_no_control_sequences_of_somebody_elses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.say_directly("rallypoint: refused by \x1b]0;title\x07\x1b[2Jcron")
    assert capsys.readouterr().err == "rallypoint: refused by cron\n"


@pytest.mark.parametrize("columns", ["45", "70"])
def test_a_report_is_as_wide_as_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a report of `run` got lines of 92 columns, whatever the terminal had."""
    monkeypatch.setenv("COLUMNS", columns)
    said: list[str] = []
    pump: Any = SimpleNamespace(say=said.append)
    told = object.__new__(Console)
    monkeypatch.setattr(told, "pump", pump, raising=False)
    monkeypatch.setattr(told, "_errors_fd", 2, raising=False)
    told.say_unclean("ops", "2 threads")
    headline, *rest = said[0].splitlines()
    assert headline.startswith("warning[cuda-in-template]: ")
    assert int(columns) - 15 < max(map(len, rest)) <= int(columns)


DUMP = b"""\
Current thread 0x00007f0000000000 (most recent call first):
  File "/home/ada/train.py", line 7 in load
  File "/home/ada/train.py", line 31 in <module>
"""


def test_where_a_rank_was_when_somebody_asked_is_not_where_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --on-failure continue nobody is asked for a report: the others stood in it where
    `rallypoint stacks` had seen them once.
    """
    pump: Any = SimpleNamespace(log_position=lambda rank: ("", 0, 0.0), tail=lambda rank: ())
    told = EvidenceGatherer(
        plan(nproc=1), Clock(), "", DiskWriter(), cast(Console, SimpleNamespace(pump=pump))
    )
    handle = RankHandle(0, 0)
    os.write(handle.evidence, DUMP)
    places = [told._rank(handle, asked=asked, waits=False).stack for asked in (True, False)]
    assert [[frame.line for frame in stack] for stack in places] == [[31, 7], []]
    assert told._rank(handle, asked=False, waits=False).stack_text == ""
    handle.ended = Ended(signal=11)
    assert (
        told._rank(handle, asked=False, waits=False).stack != ()
    )  # of one that crashed it is what it wrote then
    handle.close()


def test_what_the_kernel_killed_in_an_attempt_before_is_not_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart a rank that a person killed was told to have been killed for memory."""
    kills = 0
    monkeypatch.setattr(evidence, "memory_counters", lambda: MemoryCounters(kills, path="events"))
    told = EvidenceGatherer(plan(nproc=1), Clock(), "", DiskWriter(), cast(Console, None))
    kills = 1
    assert told._memory((), None, ()).oom_kills == 1
    told.begin()
    assert told._memory((), None, ()).oom_kills == 0


def test_a_disk_that_answers_slowly_has_one_deadline_for_all_error_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each had its own: with 64 ranks, and a disk that took 0.4 s for each file, the report came
    after 25 s.
    """
    comes_back = threading.Event()
    asked: list[str] = []

    def read(path: str, most: int) -> str:
        asked.append(path)
        comes_back.wait(30.0)
        return path

    monkeypatch.setattr(evidence_gatherer, "text_of", read)
    writer = DiskWriter()
    told = EvidenceGatherer(plan(nproc=1), Clock(), "", writer, cast(Console, None))
    ranks: list[Any] = [SimpleNamespace(error_file=path) for path in ("first", "", "second")]
    monkeypatch.setattr(evidence_gatherer, "ERROR_FILES_TIMEOUT", 0.01)
    assert told._error_files(ranks) == ["", "", ""]
    comes_back.set()
    assert writer.finish(30.0)
    assert told._error_files(ranks) == ["", "", ""]  # nobody asks that disk again
    assert asked == ["first", "", "second"]
    told._disk_is_silent = False
    monkeypatch.setattr(evidence_gatherer, "ERROR_FILES_TIMEOUT", 30.0)
    assert told._error_files(ranks) == ["first", "", "second"]


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [((), False), (('  File "ops.py", line 3, in <module>', "    import nothing"), True)],
)
def test_a_module_to_preload_that_is_not_there_is_said_once(
    lines: tuple[str, ...], quoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback is one line, which stood under `why` already."""
    told = object.__new__(Reporter)
    monkeypatch.setattr(told, "_plan", plan(preload=("nothing",)), raising=False)
    last = "ModuleNotFoundError: No module named 'nothing'"
    report = told.import_failed("nothing", last, "\n".join((*lines, last)))
    assert report.why == f"--preload asks for it: {last}"
    assert bool(report.said) == quoted


def test_a_file_of_the_nodes_own_is_no_screen() -> None:
    read, write = os.pipe()
    try:
        assert console.shares_screen(write)
    finally:
        os.close(read)
        os.close(write)
    with tempfile.TemporaryFile() as file:  # srun --output=log.%N
        assert not console.shares_screen(file.fileno())


def test_nodes_on_one_screen_print_one_report() -> None:
    """Eight nodes under srun would print the same thirty lines eight times."""
    said: list[str] = []
    printed: list[Any] = []
    kept: list[Any] = []
    screen: Any = SimpleNamespace(
        say=said.append,
        live=lambda text: None,
        print_reports=lambda reports, before: printed.append(reports),
    )
    folder: Any = SimpleNamespace(
        write_plan=lambda plan: None, write_report=kept.append, file=lambda name: ""
    )
    cause = Report("rank-raised", "rank 5 on gpu02 raised ValueError: bad batch", ranks=(5,))
    for node, brief in ((0, ""), (1, render.in_one_line(cause, 1, "gpu02"))):
        writer = DiskWriter()
        told = Reporter(plan(nproc=1), alone(plan(nproc=1)), Clock(), folder, writer, screen)
        ranks = range(4 * node, 4 * node + 4)
        here = render.own_part(cause, node, f"gpu0{node + 1}", ranks, 0.41)
        told.show((cause,), ("ranks 0-3 followed rank 5",), here=here, brief=brief)
        assert writer.finish(30.0)
    assert said == [
        "rallypoint: ranks 0-3 followed rank 5",
        "rallypoint: ranks 0-3 followed rank 5",
        "rallypoint: node 1 (gpu02) stops: rank 5 on gpu02 raised ValueError: bad batch",
    ]
    assert [[one.here for one in reports] for reports in printed] == [
        ["node 0 (gpu01): ranks 0-3, stopped 0.4 s after it"]
    ]
    assert [reports[0].here for reports in kept] == [
        "node 0 (gpu01): ranks 0-3, stopped 0.4 s after it",
        "node 1 (gpu02): ranks 4-7; it began here, in rank 5",
    ]


def test_the_end_of_an_attempt_is_that_of_its_own_cause() -> None:
    """The lead judges one attempt after the other: the second one ended with the first one's exit
    status.
    """
    diagnosis = Diagnosis(plan(nproc=2))
    killed = RankEvidence(0, 0, 1, "running", ended=Ended(signal=9, at=1.0))
    ended = (RankEvidence(1, 1, 2, "running", ended=Ended(3, at=1.0)), killed)
    judged = [
        diagnosis.judge(
            FailedAttempt({0: NodeEvidence(ranks)}, world_size=2, attempt=attempt),
            all_again=again,
        )
        for attempt, again, ranks in (
            (0, False, ended[:1]),
            (0, False, ended),
            (1, False, ended[1:]),
        )
    ]
    assert [[one.code for one in found.reports] for found in judged] == [
        ["rank-exited"],
        ["rank-killed"],
        ["rank-killed"],
    ]
    assert [found.status for found in judged] == [3, 3, 137]
    assert judged[0].at == 1.0


def test_a_notice_says_how_long_the_cluster_lets_the_job_go_on() -> None:
    said: list[str] = []
    screen: Any = SimpleNamespace(remark=said.append)
    console.Console.say_notice(screen, "SIGUSR1", [0], [], "Slurm ends it in 60 s")
    console.Console.say_notice(screen, "SIGUSR1", [0], [])
    assert ["Slurm ends it in 60 s" in line for line in said] == [True, False]
