"""`rallypoint stacks` where there is nothing to show, and what it shows of what it was told."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rallypoint.cli import main as cli
from rallypoint.cli import stacks
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.rank_snapshot import RankStanding, Standing
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.launcher.agent import query_socket
from rallypoint.record import run_folder, run_list
from rallypoint.record.run_list import LauncherAddress

from ..warm_python import WarmPopen

HOLD = """
import os
import sys
from rallypoint.record.run_folder import default_root, open_run_folder
from rallypoint.record.run_list import LauncherAddress
folder = open_run_folder(sys.argv[1], "a-job", print, asked_for=False)
if sys.argv[2:] == ["elsewhere"]:
    folder.list_in(default_root(os.environ))
elif len(sys.argv) > 2:
    folder.announce(LauncherAddress(*sys.argv[2:4], int(sys.argv[4]) or os.getpid()))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "rallypoint" / "runs"


class Launchers:
    """Processes that hold a run folder as launchers do."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def hold(self, path: Path, *door: str) -> int:
        started = WarmPopen(
            [sys.executable, "-c", HOLD, str(path), *door], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip
        self.processes.append(started)
        assert started.stdout is not None
        assert started.stdout.readline() == b"held\n"
        return started.pid


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    made = Launchers()
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stacks", "--help"]) == 0
    assert "usage: rallypoint stacks [RUN] [options]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "headline"),
    [
        ([], "error[usage]: no job of this user is running here"),
        (["a", "b"], "error[usage]: stacks takes one run, and got 2"),
        ([""], "error[usage]: stacks takes a run, and got an empty word"),
        (["/no/such/folder"], "error[usage]: /no/such/folder is no folder"),
        (["--jsno"], "error[option-unknown]: rallypoint stacks has no option --jsno"),
        (["--error-format", "xml"], "error[usage]: --error-format xml is not one of text, json"),
    ],
)
def test_wrong_usage(
    state: Path, words: list[str], headline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stacks", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(headline)


def test_errors_as_json(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stacks", "--error-format", "json"]) == 2
    assert [one["code"] for one in json.loads(capsys.readouterr().err)["reports"]] == ["usage"]


def test_the_newest_that_runs_is_asked_and_the_others_are_named(
    state: Path, launchers: Launchers
) -> None:
    for name in ("a-job-1", "a-job-2", "a-job-3"):
        launchers.hold(state / name)
        os.utime(state / name / "plan.json", (1.0, 1.0 + int(name[-1])))
    launchers.processes[2].communicate()  # the newest is over
    assert stacks.chosen(()) == (str(state / "a-job-2"), ("a-job-1",))
    assert stacks.chosen(("a-job-1",)) == (str(state / "a-job-1"), ())


def test_of_a_job_on_several_nodes_that_of_this_machine_is_asked(
    state: Path, launchers: Launchers
) -> None:
    """With a home that all nodes share the newest of them was asked: `job runs on gpu03`."""
    here = os.uname().nodename
    for node, host in enumerate(("gpu01", here, "gpu03")):
        launchers.hold(state / "a-job" / f"node{node}", "door", host, "0")
        os.utime(state / "a-job" / f"node{node}" / "plan.json", (1.0, 1.0 + node))
    for words in ((), ("a-job",), ("a-job/node1",)):
        assert stacks.chosen(words) == (str(state / "a-job" / "node1"), ())
    with pytest.raises(EnvironmentProblem) as refused:
        stacks.ask(str(state / "a-job" / "node2"))
    assert refused.value.headline == f"job a-job/node2 runs on gpu03, and this is {here}"


def test_a_job_with_a_folder_of_its_own_is_found_without_its_name(
    state: Path, launchers: Launchers, tmp_path: Path
) -> None:
    launchers.hold(state / "a-job-1")
    launchers.hold(tmp_path / "mine", "elsewhere")
    launchers.hold(tmp_path / "killed", "elsewhere")
    for path, started in (
        (state / "a-job-1", 1.0),
        (tmp_path / "mine", 2.0),
        (tmp_path / "killed", 3.0),
    ):
        os.utime(path / "plan.json", (started, started))
    assert stacks.chosen(()) == (str(tmp_path / "killed"), (str(tmp_path / "mine"), "a-job-1"))
    launchers.processes[2].kill()
    launchers.processes[2].communicate()
    assert stacks.chosen(()) == (str(tmp_path / "mine"), ("a-job-1",))
    assert [os.readlink(link) for link in (state.parent / "elsewhere").iterdir()] == [
        str(tmp_path / "mine")
    ]
    assert stacks.chosen((str(tmp_path / "mine"),)) == (str(tmp_path / "mine"), ())


def test_a_job_with_a_folder_of_its_own_leaves_no_link(state: Path, tmp_path: Path) -> None:
    folder = run_folder.open_run_folder(str(tmp_path / "mine"), "a-job", print, asked_for=True)
    folder.list_in(str(state))
    [link] = (state.parent / "elsewhere").iterdir()
    assert os.readlink(link) == folder.path
    folder.close()
    assert list((state.parent / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("door", "words", "command"),
    [
        ((), "has no socket at which it could be asked", "tail "),
        (
            ("/no/such/door.sock", "node07", "1"),
            "runs on node07, and this is ",
            "ssh node07 rallypoint stacks a-job-1",
        ),
        (
            ("/no/such/door.sock", os.uname().nodename, "1"),
            "(pid 1) runs, and its socket is not here",
            "rallypoint stacks a-job-1",
        ),
    ],
)
def test_a_launcher_that_cannot_be_asked_from_here(
    state: Path,
    launchers: Launchers,
    door: tuple[str, ...],
    words: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "ENDS_WITHIN", 0.0)
    launchers.hold(state / "a-job-1", *door)
    with pytest.raises(EnvironmentProblem) as problem:
        stacks.ask(str(state / "a-job-1"))
    assert problem.value.code == "launcher-silent"
    assert words in problem.value.headline
    assert problem.value.help[0][1].startswith(command)


def test_a_launcher_that_closes_its_door_because_it_ends(
    state: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock outlives its door by a moment, in which the socket was said to be another user's or
    another container's.
    """
    monkeypatch.setattr(stacks, "ENDS_WITHIN", 60.0)  # a busy machine's interpreter ends late
    launchers.hold(state / "a-job-1", "/no/such/door.sock", os.uname().nodename, "0")

    def ask(path: str) -> Standing:
        launcher = launchers.processes[0]
        assert launcher.stdin is not None
        launcher.stdin.close()  # it ends
        launcher.stdin = None
        return visits_ask(path)

    visits_ask = query_socket.ask
    monkeypatch.setattr(query_socket, "ask", ask)
    with pytest.raises(UsageError, match="job a-job-1 has just ended"):
        stacks.ask(str(state / "a-job-1"))


def test_a_launcher_that_has_no_room_for_a_visitor(
    state: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ENDS_WITHIN", 0.0)
    door = query_socket.QuerySocket()
    try:
        launchers.hold(state / "a-job-1", door.path, os.uname().nodename, "1")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (0, 0))
        threading.Thread(
            target=lambda: (select.select([door], [], []), door.accept_visitor()), daemon=True
        ).start()
        with pytest.raises(
            EnvironmentProblem, match=r"\(pid 1\) took the question and closed the connection"
        ):
            stacks.ask(str(state / "a-job-1"))
    finally:
        door.close()


def test_what_a_killed_launcher_left_does_not_mislead_the_next(
    state: Path, launchers: Launchers
) -> None:
    launchers.hold(state / "a-job-1", "/of/the/first/door.sock", "node07", "1")
    launchers.processes[0].kill()
    launchers.processes[0].communicate()
    assert run_list.running_runs(str(state)) == []
    assert run_list.door_of(str(state / "a-job-1")) == LauncherAddress(
        "/of/the/first/door.sock", "node07", 1
    )
    launchers.hold(state / "a-job-1")
    assert run_list.door_of(str(state / "a-job-1")) is None


def test_the_launcher_itself_does_not_lose_its_lock_by_looking(state: Path) -> None:
    folder = run_folder.open_run_folder(str(state / "a-job-1"), "a-job-1", print, asked_for=False)
    folder.announce(LauncherAddress("/x", "node07", 1))
    assert run_list.door_of(folder.path) is None
    looked = (
        f"from rallypoint.record.run_list import is_running; print(is_running({folder.path!r}))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", looked], capture_output=True, text=True, check=True
        ).stdout
        == "True\n"
    )
    folder.close()


def test_text_has_the_programs_lines_and_json_has_everything(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    frames = (Frame(str(tmp_path / "train.py"), 2, "<module>"),)
    found = Standing(
        "a-job-1", "train.py", 1, (RankStanding(0, 4000, "running", state="S", frames=frames),), 3.0
    )
    assert "    train.py:2 in <module>: time.sleep(1000)\n" in stacks.as_text(
        found, ("another-job",)
    )
    assert "also running: another-job\n" in stacks.as_text(found, ("another-job",))
    data = json.loads(stacks.as_json(found))
    assert data["sentence"] == "rank 0 is at train.py:2 in <module>"
    assert msgspec.convert(data["ranks"], tuple[RankStanding, ...]) == found.ranks
