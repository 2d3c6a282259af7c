from __future__ import annotations

import socket
import sys
from pathlib import Path

from bench.harness import JOBS, Run
from bench.outcome import Outcome

from bench import soak


def test_summary_counts_what_went_wrong_by_kind() -> None:
    outcomes = [
        Outcome("a", times={"exit": 1.0}),
        Outcome("b", wrong=["it hung"], times={"exit": 3.0}),
        Outcome("b", wrong=["x", "y"]),
    ]
    assert soak.summary("kills", outcomes).splitlines() == [
        "kills: 1 of 3 right",
        "  exit: median 2.000 s, most 3.000 s (2 times)",
        "  a: 1",
        "  b: 2, 2 wrong",
    ]


def test_every_mode_can_be_asked_for() -> None:
    assert [soak.parser().parse_args([mode]).mode for mode in soak.MODES] == list(soak.MODES)


def test_a_watched_run_that_does_not_end_is_wrong_and_its_output_is_kept(tmp_path: Path) -> None:
    outcome = Outcome("hang")
    with soak._watched(
        outcome,
        [sys.executable, "-c", "import time; print('still here', flush=True); time.sleep(600)"],
        tmp_path,
    ) as run:
        assert run.wait_until(lambda: run.printed_at("still here") is not None, 30)
    assert [wrong for wrong in outcome.wrong if "had not ended" in wrong]
    assert "still here" in (tmp_path / "output").read_text()


def test_a_watched_run_that_leaves_a_process_is_wrong(tmp_path: Path) -> None:
    outcome = Outcome("leaves")
    script = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with soak._watched(outcome, [sys.executable, "-c", script], tmp_path) as run:
        assert run.wait(30) == 0
    assert [wrong for wrong in outcome.wrong if "it left" in wrong and "sleep 600" in wrong]


def test_the_squatter_takes_a_port_that_falls_free(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Run([sys.executable, str(JOBS / "squatter.py"), str(tmp_path / "count")]) as run,
    ):
        port = server.getsockname()[1]
        assert run.wait_until(lambda: run.printed_at("watching") is not None, 30)
        server.close()

        def answers() -> bool:  # the count may be of a port that another process has left
            with socket.socket() as caller:
                caller.settimeout(30)
                return (tmp_path / "count").exists() and not caller.connect_ex(("127.0.0.1", port))

        assert run.wait_until(answers, 30)
