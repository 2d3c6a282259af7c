"""Real jobs that wait: what `rallypoint stacks` shows of them, and that asking does them no
harm.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.diagnosis import rank_snapshot
from rallypoint.diagnosis.rank_snapshot import Standing
from rallypoint.host import process_status
from rallypoint.launcher.agent import query_socket
from rallypoint.launcher.agent.process_handles import EVIDENCE_KEPT, RankHandle
from rallypoint.record import run_list

from .conftest import RunWarm, Write
from .job import DEADLINE, Result, environment, run_job

pytestmark = pytest.mark.usefixtures("torch_in_parts")

STACKS = (sys.executable, "-P", "-m", "rallypoint", "stacks")

WAITING = """\
import os
import subprocess
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(1000)


def step():
    dist.all_reduce(torch.ones(1))


def load():
    time.sleep(1000)


dist.init_process_group("gloo")
print("is up", flush=True)
match int(os.environ["RANK"]):
    case 0 | 1:
        step()
    case 2:
        for batch in DataLoader(Slow(), num_workers=1):
            pass
    case 3:
        load()
    case 4:
        os.execvp("sleep", ["sleep", "1000"])
"""


def stacks(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user types it."""
    return subprocess.run(
        [*STACKS, *words],
        env=environment(state, "asks"),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def ask(state: Path) -> Standing | None:
    """What the command would ask, and be told; None when no job is that far yet."""
    running = run_list.running_runs(str(state / "rallypoint" / "runs"))
    door = run_list.door_of(running[0].path) if running else None
    return query_socket.ask(door.socket, DEADLINE) if door is not None else None


def wait_for(condition: Callable[[], object], what: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, f"never: {what()}"
        time.sleep(0.05)


def wait_for_sentence(state: Path, *parts: str) -> Standing:
    """Ask until the sentence has all of these parts."""
    found: list[Standing] = []

    def shown() -> bool:
        told = ask(state)
        found[:] = [told] if told is not None else []
        return told is not None and all(part in rank_snapshot.sentence(told) for part in parts)

    wait_for(shown, lambda: f"{parts} in {[rank_snapshot.sentence(one) for one in found]}")
    return found[0]


@pytest.mark.torch
def test_five_ranks_that_wait_in_their_ways(tmp_path: Path, write: Write) -> None:
    """In a collective, in a loader, in the program's own line, in another program; then one is
    stopped, then the launcher is.
    """
    script = write("train.py", WAITING)

    def act(process: subprocess.Popen[bytes]) -> None:
        found = wait_for_sentence(
            tmp_path,
            "ranks 0-1 wait in all_reduce at train.py:19",
            "rank 2 is in DataLoader.__next__ at train.py:32",
            "rank 3 is at train.py:23 in load",
            "rank 4 runs another program, sleep 1000",
        )
        pids = [one.pid for one in found.ranks]
        assert rank_snapshot.groups(found)[-1].numbers == (0, 1)  # the odd ones before
        shown = stacks(tmp_path)
        assert shown.returncode == 0
        assert len(shown.stdout.splitlines()) <= 40
        assert "    train.py:23 in load: time.sleep(1000)" in shown.stdout.splitlines()
        assert any(
            "all_reduce" in line and line.startswith("    torch/distributed/")
            for line in shown.stdout.splitlines()
        )

        os.kill(pids[0], signal.SIGSTOP)
        stopped = wait_for_sentence(
            tmp_path, "rank 0 is stopped by a signal", "rank 1 waits in all_reduce"
        )
        assert f"    kill -CONT {pids[0]}" in rank_snapshot.text(stopped).splitlines()
        os.kill(pids[0], signal.SIGCONT)
        wait_for_sentence(tmp_path, "ranks 0-1 wait in all_reduce")
        assert all(process_status.status(pid) for pid in pids)  # the one without our handler, too

        data = json.loads(stacks(tmp_path, found.job[-4:], "--error-format", "json").stdout)
        assert (data["job"], [one["pid"] for one in data["ranks"]]) == (found.job, pids)

        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: process_status.is_stopped(process.pid), lambda: "the launcher is stopped")
        silent = stacks(tmp_path)
        assert silent.returncode == 1
        assert silent.stderr.startswith("error[launcher-silent]: the launcher of job ")
        assert f"kill -CONT {process.pid}\n" in silent.stderr
        process.send_signal(signal.SIGCONT)
        wait_for_sentence(tmp_path, "ranks 0-1 wait in all_reduce")
        process.send_signal(signal.SIGINT)

    result = run_job(["-n", "5", script.name], state=tmp_path, cwd=script.parent, act=act)
    assert result.rc == 130, result.everything
    assert "         - ranks 0-1  train.py:19 in step (torch all_reduce)" in result.err.splitlines()
    over = stacks(tmp_path, result.run_dir.name)
    assert (over.returncode, over.stderr.splitlines()[0]) == (
        2,
        f"error[usage]: the job of {result.run_dir.name} is over: no launcher has its run folder {result.run_dir}",
    )
    assert stacks(tmp_path).stderr.startswith("error[usage]: no job of this user is running here\n")


@pytest.mark.torch
def test_a_stall_is_told_once_and_so_is_its_end(tmp_path: Path, write: Write) -> None:
    """Rank 1 reads a pipe that says nothing, until the stall has been told."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"""\
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    open({str(fifo)!r}).read()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    script = write("train.py", program)

    def act(process: subprocess.Popen[bytes]) -> None:
        def told() -> bool:
            found = list((tmp_path / "rallypoint" / "runs").glob("*-*/events.jsonl"))
            return bool(found) and '"stalled"' in found[0].read_text()

        wait_for(told, lambda: "a stall")
        with open(fifo, "w") as file:
            file.write("go on\n")

    result = run_job(  # on a busy machine a rank that begins may stand still for a second
        ["-n", "2", "--stall", "3", script.name], state=tmp_path, cwd=script.parent, act=act
    )
    assert result.rc == 0, result.everything
    assert result.err.count("[job-stalled]") == 1
    first = next(line for line in result.err.splitlines() if "[job-stalled]" in line)
    assert first.startswith("warning[job-stalled]: no rank has moved for ")
    assert first.endswith(
        " s: rank 0 waits in all_reduce at train.py:8; rank 1 is at train.py:7 in <module>"
    )
    asked = [event["what"] for event in result.events if event["what"] in ("stalled", "stall-over")]
    assert asked[0] == "stalled"
    assert not (result.run_dir / "report.json").exists()  # the job went well


@pytest.mark.usefixtures("without_torch")
def test_ranks_of_two_nodes_are_shown_and_their_stall_is_told_once(
    tmp_path: Path, write: Write, port: int
) -> None:
    """Ranks 0-2 wait at one place and rank 3, on node 1, at another, until it may go on; then all
    may. Both launchers are on this machine.
    """
    load, end = tmp_path / "load", tmp_path / "end"
    for fifo in (load, end):
        os.mkfifo(fifo)
    program = f"""\
import os

if os.environ["RANK"] == "3":
    open({str(load)!r}).read()
open({str(end)!r}).read()
"""
    script, key = write("train.py", program), tmp_path / "key"
    key.write_text("5" * 64)
    key.chmod(0o600)
    nodes: list[Result] = []
    host = os.uname().nodename

    def events(what: str) -> int:
        runs = tmp_path / "rallypoint" / "runs"
        kept = [path.read_text() for path in runs.glob("*-*/node?/events.jsonl")]
        return sum(f'"{what}"' in text for text in kept)

    def let_go_on(process: subprocess.Popen[bytes]) -> None:
        found = wait_for_sentence(
            tmp_path,
            f"ranks 0-1 on node 0 ({host}) and rank 2 on node 1 ({host}) are at train.py:5",
            f"rank 3 on node 1 ({host}) is at train.py:4 in <module>",
        )
        assert [(one.rank, one.node, one.host) for one in found.ranks] == [
            (rank, rank // 2, host) for rank in range(4)
        ]
        shown = stacks(tmp_path)
        assert f"rank 3  pid {found.ranks[3].pid} on node 1 ({host}) · " in shown.stdout
        assert "also running" not in shown.stdout  # the other node is of the same job
        wait_for(lambda: events("stalled") == 2, lambda: "a stall on both nodes")
        load.write_text("go on")
        wait_for(lambda: events("stall-over") == 2, lambda: "its end on both nodes")
        wait_for_sentence(tmp_path, "all 4 ranks are at train.py:5 in <module>")
        end.write_text("go on")

    def join(act: Callable[[subprocess.Popen[bytes]], None]) -> None:
        endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        job = ["--nnodes", "2", "-n", "2", *endpoint, "--secret-file", str(key), "--stall", "3"]
        nodes.append(run_job([*job, script.name], state=tmp_path, cwd=script.parent, act=act))

    join(lambda process: join(let_go_on))
    for node in nodes:
        assert node.rc == 0, node.everything
        told = [line for line in node.err.splitlines() if "[job-stalled]" in line]
        assert "no rank has moved for " in told[0]
        assert told[0].endswith(f"; rank 3 on node 1 ({host}) is at train.py:4 in <module>")
        assert sum("rank 3 on node 1" in line for line in told) == 1
        assert "rallypoint: the job goes on: rank 3 has moved" in node.err


@pytest.mark.usefixtures("without_torch")
def test_a_program_that_is_not_python_is_shown_and_not_signalled(tmp_path: Path) -> None:
    def act(process: subprocess.Popen[bytes]) -> None:
        for _ in range(2):  # the first question would have ended them
            wait_for_sentence(tmp_path, "both ranks run another program, sleep 1000")
        process.terminate()

    result = run_job(["-n", "2", "--no-python", "sleep", "1000"], state=tmp_path, act=act)
    assert result.rc == 143, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_rank_that_hangs_after_its_interpreter_is_no_other_program(
    tmp_path: Path, write: Write
) -> None:
    """A library that waits as it is unloaded, as NCCL's may: Python has put its handlers away by
    then.
    """
    script = write(
        "train.py",
        "import ctypes\nc = ctypes.CDLL(None)\nc.__cxa_atexit(ctypes.cast(c.pause, ctypes.c_void_p), None, None)\n",
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        wait_for_sentence(
            tmp_path, "rank 0 has left the program, and is closing down the interpreter"
        )
        process.terminate()

    result = run_job(["--fresh", script.name], state=tmp_path, cwd=script.parent, act=act)
    assert result.rc == 143, result.everything


@pytest.mark.usefixtures("without_torch")
def test_the_thread_for_which_the_end_of_a_rank_waits_is_named(
    tmp_path: Path, write: Write
) -> None:
    script = write(
        "train.py",
        "import threading\nstop = threading.Event()\n"
        'threading.Thread(target=stop.wait, name="prefetch", daemon=True).start()\n'
        'threading.Thread(target=stop.wait, name="uploader").start()\n'
        # A class of the program's may have its own idea of a name.
        "class Odd(threading.Thread): name = None\nOdd(target=stop.wait).start()\n",
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        found = wait_for_sentence(tmp_path, "rank 0 has left the program", "uploader")
        assert "prefetch" not in rank_snapshot.sentence(found)
        process.terminate()

    result = run_job([script.name], state=tmp_path, cwd=script.parent, act=act)
    assert result.rc == 143, result.everything


@pytest.mark.usefixtures("without_torch")
def test_where_a_rank_was_when_somebody_asked_is_not_where_it_ended(
    tmp_path: Path, write: Write
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = write("train.py", f"import os\nopen({str(fifo)!r}).read()\nos._exit(3)\n")

    def act(process: subprocess.Popen[bytes]) -> None:
        wait_for_sentence(tmp_path, "rank 0 is at train.py:2")
        with open(fifo, "w") as file:
            file.write("go on")

    result = run_job(["--fresh", script.name], state=tmp_path, cwd=script.parent, act=act)
    assert result.codes == ["rank-exited"], result.everything
    assert "train.py:2" not in result.err


@pytest.mark.usefixtures("without_torch")
def test_visitors_who_say_nothing_or_nonsense_hold_nobody_up(tmp_path: Path) -> None:
    def act(process: subprocess.Popen[bytes]) -> None:
        found = wait_for_sentence(tmp_path, "rank 0 runs another program")
        door = run_list.door_of(found.run_dir)
        assert door is not None
        assert door.pid == process.pid
        silent = [socket.socket(socket.AF_UNIX) for _ in range(32)]
        for one in silent:
            one.settimeout(DEADLINE)
            one.connect(door.socket)
        assert query_socket.ask(door.socket, DEADLINE).launcher == process.pid
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(DEADLINE)
            stranger.connect(door.socket)
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(1) == b"?"
        for one in silent:
            one.close()
        assert query_socket.ask(door.socket, DEADLINE).world_size == 1
        process.terminate()

    result = run_job(["--no-python", "sleep", "1000"], state=tmp_path, act=act)
    assert result.rc == 143, result.everything


def test_where_nobody_listens_and_where_another_version_does(tmp_path: Path) -> None:
    with pytest.raises(query_socket.DoorClosed):
        query_socket.ask(str(tmp_path / "none"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "door"))
        with pytest.raises(query_socket.DoorClosed):
            query_socket.ask(str(tmp_path / "door"))
        listener.listen()
        with pytest.raises(query_socket.LauncherSilent) as silent:
            query_socket.ask(str(tmp_path / "door"), 0.1)
        assert silent.value.pid == os.getpid()


def test_who_comes_when_few_descriptors_are_left_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job at its limit goes on: answering opened what it had none left for, and that ended the
    launcher.
    """
    door = query_socket.QuerySocket()
    try:
        sent_away: list[BaseException] = []

        def visit() -> None:
            try:
                query_socket.ask(door.path, DEADLINE)
            except query_socket.DoorClosed as error:
                sent_away.append(error)

        limit = door.fileno() + 1 + query_socket.ROOM
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        visitor = threading.Thread(target=visit)
        visitor.start()
        select.select([door], [], [], DEADLINE)
        assert door.accept_visitor() is None
        visitor.join(DEADLINE)
        assert [type(error) for error in sent_away] == [query_socket.SentAway]
    finally:
        door.close()


@pytest.mark.usefixtures("without_torch")
def test_a_job_that_is_being_stopped_does_not_stall(tmp_path: Path, write: Write) -> None:
    """Its ranks stand still within the grace, and somebody asks where. Before, they move: a first
    question may take longer than a stall. What keeps a stall from being told is tested in
    test_hang_monitor.py: a question wakes a rank so often that it hardly counts as still.
    """
    script = write(
        "deaf.py",
        "import signal, time\nheard = []\nsignal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "while not heard: time.sleep(0.01)\ntime.sleep(1000)\n",
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        wait_for_sentence(tmp_path, "rank 0 is at deaf.py:4")
        process.send_signal(signal.SIGINT)
        found = wait_for_sentence(tmp_path, "rank 0 is at deaf.py:5")
        wait_for(
            lambda: '"stop-sent"' in (Path(found.run_dir) / "events.jsonl").read_text(),
            lambda: "it is being stopped",
        )
        until = time.monotonic() + 2.0  # twice the stall's
        wait_for(lambda: ask(tmp_path) and time.monotonic() > until, lambda: "asked for as long")
        process.send_signal(signal.SIGINT)

    result = run_job(
        ["--fresh", "--stall", "1", script.name], state=tmp_path, cwd=script.parent, act=act
    )
    assert result.rc == 130, result.everything
    assert "job-stalled" not in result.err


@pytest.mark.usefixtures("without_torch")
def test_a_process_of_a_rank_that_has_failed_stands_beside_the_rank(
    tmp_path: Path, write: Write
) -> None:
    """The rank polls for what that process was to bring, and the other one waits for the rank."""
    script = write(
        "wait.py",
        "import signal, subprocess, sys\n"
        "server = subprocess.Popen([sys.executable, '-c', 'raise SystemExit(3)'])\n"
        "signal.pause()\n",
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        wait_for(
            lambda: (
                (found := ask(tmp_path)) is not None
                and any(one.lost.endswith(" ended with exit code 3") for one in found.ranks)
            ),
            lambda: f"{ask(tmp_path)}",
        )
        process.send_signal(signal.SIGINT)

    result = run_job(["-n", "1", script.name], state=tmp_path, cwd=script.parent, act=act)
    assert result.rc == 130, result.everything


# --- a rank's answers


ANSWERS = """\
import faulthandler, signal, sys
faulthandler.register(int(sys.argv[1]), int(sys.argv[2]), all_threads=True, chain=False)
def stand():
    print("up", flush=True)
    signal.pause()
while True:
    stand()
"""


@pytest.fixture
def rank() -> Iterator[RankHandle]:
    """A process that answers, behind a handle."""
    from rallypoint.host.signals import EVIDENCE_SIGNAL

    handle = RankHandle(0, 0)
    arguments = [sys.executable, "-c", ANSWERS, str(int(EVIDENCE_SIGNAL)), str(handle.evidence)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, pass_fds=[handle.evidence]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        handle.forked(process.pid)
        yield handle
        process.kill()
    handle.close()


def asked(rank: RankHandle) -> None:
    assert rank.ask()
    wait_for(lambda: rank.answered() and rank.answer(), lambda: "an answer")


def test_an_answer_is_to_the_last_question_only(rank: RankHandle) -> None:
    assert rank.answer() == ""
    asked(rank)
    first = rank.stack()
    assert [frame.function for frame in first] == [
        "stand"
    ]  # of `-c` text the top level is hidden: our own processes begin so
    assert rank.answer().count("most recent call first") == 1
    asked(rank)
    assert rank.answer().count("most recent call first") == 1
    assert rank.dump().count("most recent call first") == 2


@pytest.mark.usefixtures("without_torch")
def test_a_rank_that_executes_another_program_meanwhile_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal had a handler when the launcher looked, and none when it came: a real-time signal
    ended a healthy process.
    """
    handle = RankHandle(0, 0)
    monkeypatch.setattr(process_status, "handles", lambda pid, number: True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        handle.forked(process.pid)
        assert handle.ask()
        process.stdin.write(b"lives\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"lives\n"
    assert process.returncode == 0
    handle.close()


@pytest.mark.usefixtures("without_torch")
def test_a_rank_that_is_stopped_is_asked_once_and_answers_when_it_goes_on(rank: RankHandle) -> None:
    os.kill(rank.pid, signal.SIGSTOP)
    wait_for(lambda: process_status.is_stopped(rank.pid), lambda: "it is stopped")
    assert rank.ask()
    assert rank.ask()
    assert rank.answer() == ""
    assert rank.stack() == ()
    os.kill(rank.pid, signal.SIGCONT)
    wait_for(lambda: rank.answered() and rank.answer(), lambda: "an answer")
    assert rank.dump().count("most recent call first") == 1


def test_a_rank_that_is_asked_for_days_does_not_fill_the_memory(rank: RankHandle) -> None:
    os.ftruncate(rank.evidence, EVIDENCE_KEPT)
    os.lseek(rank.evidence, EVIDENCE_KEPT, os.SEEK_SET)
    asked(rank)
    assert len(rank.dump()) > EVIDENCE_KEPT
    asked(rank)
    assert len(rank.dump()) == len(rank.answer()) < 4096
    asked(rank)
    assert rank.dump().count("most recent call first") == 2


@pytest.mark.torch
def test_an_exception_whose_finally_waits_is_told_of_a_stall_and_of_ctrl_c(
    tmp_path: Path, write: Write
) -> None:
    """Both told of a mismatch of collectives alone: nobody saw the exception before the timeout."""
    program = """\
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def step(config):
    scale = config["x"] if os.environ["RANK"] == "1" else 1
    dist.all_reduce(torch.ones(1) * scale)


try:
    step({})
finally:
    dist.barrier()
"""
    script = write("train.py", program)

    def act(process: subprocess.Popen[bytes]) -> None:
        def told() -> bool:
            found = list((tmp_path / "rallypoint" / "runs").glob("*-*/events.jsonl"))
            return bool(found) and '"stalled"' in found[0].read_text()

        wait_for(told, lambda: "a stall")
        process.send_signal(signal.SIGINT)

    result = run_job(
        ["-n", "2", "--stall", "3", "--grace", "1", script.name],
        state=tmp_path,
        cwd=script.parent,
        act=act,
    )
    assert result.rc == 130, result.everything
    stall, ctrl_c = (" ".join(part.split()) for part in result.err.split("[interrupted]"))
    for part in (stall, ctrl_c):
        assert "KeyError: 'x', raised at train.py:9 in step" in part, result.everything
        assert "rank 1 came to train.py:16 in <module> (torch barrier)" in part, result.everything


@pytest.mark.torch
def test_a_rank_that_trains_on_in_an_except_clause_is_not_blamed_for_another(
    run_warm: RunWarm, write: Write
) -> None:
    program = """\
import os
import torch
import torch.distributed as dist


class KernelMissing(Exception):
    pass


def train(kernel):
    if kernel and rank == 1:
        raise KernelMissing("no fused kernel")
    for turn in range(3):
        if rank == 0 and turn == 2:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))


rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
try:
    train(kernel=True)
except KernelMissing:
    train(kernel=False)
"""
    result = run_warm(write("train.py", program))
    reports = json.loads((result.run_dir / "report.json").read_text())
    told = [(one["code"], one["ranks"], one["headline"]) for one in reports]
    assert told == [("rank-raised", [0], "rank 0 raised ValueError: bad batch")], result.everything
