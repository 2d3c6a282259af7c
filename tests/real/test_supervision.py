"""Real jobs that are killed, interrupted, restarted: what the user reads, and that nothing
is left.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rallypoint.launcher.agent.supervisor import ONE_SIGNAL

from .conftest import RunWarm
from .job import DEADLINE, MARKER, SCRIPTS, Result, processes, run_job

pytestmark = pytest.mark.usefixtures("torch_in_parts")

Act = Callable[[subprocess.Popen[bytes]], None]


def events(state: Path) -> list[dict[str, Any]]:
    """What has happened so far in the job that writes below `state`."""
    found = list((state / "rallypoint" / "runs").glob("*-*/events.jsonl"))
    return (
        [json.loads(line) for line in found[0].read_text().splitlines(True) if line.endswith("\n")]
        if found
        else []
    )


def wait_for(condition: Callable[[], bool], what: str, launcher: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert launcher.poll() is None, (
            f"the launcher ended with {launcher.returncode} before: {what}"
        )
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.01)


def said(state: Path, launcher: subprocess.Popen[bytes], words: str, times: int = 1) -> None:
    """Wait until the ranks' logs hold these words as often as that."""

    def enough() -> bool:
        logs = (state / "rallypoint" / "runs").glob("*-*/rank*.log")
        return sum(log.read_text().count(words) for log in logs) >= times

    wait_for(enough, f"{words!r} in the logs", launcher)


SAME_LOOKS = 20
"""A process that stands in the same system call in so many looks, 10 ms apart, has got where it
waits.
"""


def standing_still(state: Path, ranks: set[int]) -> Callable[[], bool]:
    """Whether these ranks have come to where they wait: they say "joining" before they call torch,
    which takes its time to get there.
    """
    looks: list[list[str]] = []
    pids: list[int] = []

    def still() -> bool:
        pids[:] = pids or [
            e["details"]["pid"]
            for e in events(state)
            if e["what"] == "worker-started" and e["rank"] in ranks
        ]
        looks.append([Path(f"/proc/{pid}/syscall").read_text() for pid in pids])
        last = looks[-SAME_LOOKS:]
        return len(last) == SAME_LOOKS and all(
            look == last[0] and not any(one.startswith("running") for one in look) for look in last
        )

    return still


def helper(state: Path, name: str, launcher: int) -> int:
    """The pid of a process of the launcher's own."""
    if name == "agent":
        return launcher
    template = next(
        event["details"]["pid"] for event in events(state) if event["what"] == "template-started"
    )
    if name == "template":
        return int(template)
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(pid) for pid in children if int(pid) != template)


# As scripts/family.py, of which the last test has a DataLoader's workers and a group.
FAMILY = """\
import multiprocessing, os, subprocess, time
subprocess.Popen(["sleep", "1001"])
subprocess.Popen(["sleep", "1002"], start_new_session=True)
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
print(f"rank {os.environ['RANK']} is up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "victims", [("agent",), ("template",), ("guard",), ("agent", "template")], ids="+".join
)
def test_nothing_survives_a_launcher_s_process(
    tmp_path: Path, places: Path, request: pytest.FixtureRequest, victims: tuple[str, ...]
) -> None:
    """Neither process nor socket."""
    program = tmp_path / "train.py"
    program.write_text(FAMILY)
    family = ["family.py", "wait"] if len(victims) > 1 else [str(program)]
    if family == [str(program)]:
        request.getfixturevalue("without_torch")

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        assert sorted(path.name for path in places.glob("*/*.sock")) == ["door.sock", "store.sock"]
        for pid in [helper(tmp_path, victim, process.pid) for victim in victims]:
            os.kill(pid, signal.SIGKILL)

    result = run_job(
        ["-n", "2", *family],
        state=tmp_path,
        act=act,
        env={"XDG_RUNTIME_DIR": str(places)},
    )  # fails when a process is left
    assert list(places.iterdir()) == []
    if "agent" in victims:
        assert result.rc == -signal.SIGKILL
        assert "the launcher was killed; its" in result.err
    else:
        assert result.codes == ["launcher-died"], result.everything
        assert f"rallypoint's {victims[0]} was ended by SIGKILL" in result.report
        assert result.rc == 137


@pytest.mark.usefixtures("without_torch")
def test_a_rank_that_ignores_sigterm_does_not_outlive_the_guard(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('is up', flush=True)\ntime.sleep(1000)\n"
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        os.kill(helper(tmp_path, "guard", process.pid), signal.SIGKILL)

    result = run_job(["-n", "2", program], state=tmp_path, act=act)
    assert result.codes == ["launcher-died"], result.everything
    assert not any(
        e["what"] == "stop-sent" for e in result.events
    )  # SIGKILL at once: the grace is 30 s


def test_a_signal_to_every_process_of_the_job_leaves_handlers_their_grace(tmp_path: Path) -> None:
    """What Slurm's scancel and systemd do: SIGTERM to all at once, template, guard and c10d host
    included.
    """

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "rank 0 sleeps")
        said(tmp_path, process, "joins")
        environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        marker = (
            next(entry for entry in environ if entry.startswith(MARKER.encode()))
            .partition(b"=")[2]
            .decode()
        )
        for line in processes(marker):
            os.kill(int(line.split()[0]), signal.SIGTERM)

    result = run_job(["-n", "2", "stopping.py", "handler"], state=tmp_path, act=act)
    assert result.rc == 143, result.everything
    assert "stopped[interrupted]: the job was stopped by SIGTERM" in result.err, result.everything
    assert "rank 0 has saved" in result.out


@pytest.mark.usefixtures("without_torch")
def test_a_stranger_is_not_signalled(tmp_path: Path) -> None:
    """A process of the same user, in no session of the job and without its marker, lives on."""
    program = tmp_path / "train.py"
    program.write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '1002'], start_new_session=True)\n"
        "raise ValueError('boom')\n"
    )
    with subprocess.Popen(["sleep", "1004"], start_new_session=True) as stranger:
        try:
            result = run_job(["-n", "2", program], state=tmp_path)
            assert result.rc == 1, result.everything
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_an_exception_on_one_rank(run_warm: RunWarm) -> None:
    result = run_warm(SCRIPTS / "family.py", "raise", nproc=4)
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert "rank 1 raised ValueError: boom" in result.report
    assert "family.py:37 in main" in result.report
    # Some may have lost rank 1 before they were stopped.
    assert re.search(r"  then +rank.*they\s+are\s+not\s+at\s+fault", result.report, re.DOTALL)
    ours = [line for line in (result.out + result.err).splitlines() if "is up" not in line]
    assert len(ours) <= 25, result.everything
    log = (result.run_dir / "rank1.log").read_text()
    assert "ValueError: boom" in log
    assert f"{os.sep}src{os.sep}rallypoint{os.sep}" not in log  # only the user's frames


def test_a_crash_names_the_line(run_warm: RunWarm) -> None:
    result = run_warm(SCRIPTS / "family.py", "segfault")
    assert result.codes == ["rank-crashed"], result.everything
    assert "family.py:39 in main" in result.report


@pytest.mark.parametrize("answer", ["raise", "abort", "exit"])
def test_the_killed_rank_is_the_cause_whatever_its_peers_do(run_warm: RunWarm, answer: str) -> None:
    """The short form of `scripts/soak root-cause`."""
    steps = random.Random(answer).randrange(300)
    result = run_warm(SCRIPTS / "peers.py", answer, str(steps), nproc=4)
    assert result.codes == ["rank-killed"], result.everything
    assert "rank 1 was killed by SIGKILL" in result.report


def interrupted(
    tmp_path: Path, *manner: str, numbers: Sequence[int], options: tuple[str, ...] = ()
) -> Result:
    """Run scripts/stopping.py, and send the launcher these signals when all of its ranks wait."""

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "joins", 2)
        said(tmp_path, process, "rank 0 sleeps")
        wait_for(
            lambda: (
                "sleep" in manner
                or sum(e.get("details", {}).get("phase") == "joining" for e in events(tmp_path))
                == 2
            ),
            "two ranks join",
            process,
        )
        wait_for(standing_still(tmp_path, {1, 2}), "they wait", process)
        for number in numbers:
            time.sleep(2 * ONE_SIGNAL)  # not to synchronise: what comes sooner is no other signal
            process.send_signal(number)
            wait_for(
                lambda: any(e["what"] in ("stop-sent", "killed") for e in events(tmp_path)),
                "the first signal is passed on",
                process,
            )

    return run_job(["-n", "3", *options, "stopping.py", *manner], state=tmp_path, act=act)


def test_ctrl_c_tells_where_every_rank_was_and_all_who_wait_for_a_missing_one_end_soon(
    tmp_path: Path,
) -> None:
    """Rank 0 is gone, and torch would wait for half an hour: no grace is waited for."""
    result = interrupted(tmp_path, "plain", numbers=[signal.SIGINT], options=("--grace", "80"))
    assert result.rc == 130, result.everything
    assert not [e for e in result.events if e["what"] == "killed"]
    assert result.seconds < 60
    assert "stopped[interrupted]: the job was stopped by Ctrl-C" in result.err
    assert re.search(r"- rank 0 +stopping.py:30 in <module>", result.err), result.everything
    # One of the two may just have come from a deeper call: then they stand in two lines.
    assert re.search(
        r"- ranks? [12](-2)? +stopping.py:36 in <module> \(torch init_process_group\)", result.err
    ), result.everything
    assert "KeyboardInterrupt" not in result.err  # three tracebacks of it say nothing
    sent = [(e["rank"], e["details"]["signal"]) for e in result.events if e["what"] == "stop-sent"]
    assert sent[:3] == [(0, "SIGINT"), (1, "SIGINT"), (2, "SIGINT")], sent
    assert sorted(sent[3:]) == [(1, "SIGTERM"), (2, "SIGTERM")], sent  # 1 and 2 stand inside torch


@pytest.mark.parametrize("manner", ["get", "connect"])
def test_ctrl_c_ends_a_wait_in_torch_s_store_and_leaves_a_handler_its_time(
    tmp_path: Path, manner: str
) -> None:
    """Rank 1 stands in C++ code that the program called itself: no line of torch's Python tells so.
    Rank 0's handler has run.
    """

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "goes on", 2)
        wait_for(standing_still(tmp_path, {0, 1}), "they wait", process)
        process.send_signal(signal.SIGINT)

    result = run_job(
        ["-n", "2", "--grace", "80", "torchs_store.py", manner], state=tmp_path, act=act
    )
    assert result.rc == 130, result.everything
    sent = [(e["rank"], e["details"]["signal"]) for e in result.events if e["what"] == "stop-sent"]
    assert sent == [(0, "SIGINT"), (1, "SIGINT"), (1, "SIGTERM")], result.everything
    assert "rank 0 has saved" in result.out, result.everything
    assert "rank 0 is done" in result.out, result.everything


def test_a_handler_is_given_its_time(tmp_path: Path) -> None:
    result = interrupted(tmp_path, "handler", numbers=[signal.SIGTERM])
    assert result.rc == 143
    assert "rank 0 saves on SIGTERM" in result.out
    assert "rank 0 has saved" in result.out
    killed = [e["rank"] for e in result.events if e["what"] == "killed"]
    assert sorted(killed) == [1, 2]  # their handlers cannot run: they stand inside torch


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("flag", "async"),
        ("interrupt", "sync"),
        ("flag", "ddp"),
    ],
)
def test_who_waits_for_a_rank_that_comes_saves_when_the_job_is_stopped(
    without_compiler: None, tmp_path: Path, how: str, call: str
) -> None:
    """Rank 0 stood in all_reduce, where no handler runs, and was killed 0.2 s after the signal
    whatever `--grace` said: the checkpoint of every preempted job was lost. The long form is
    `scripts/soak stop-saves`."""

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "rank 1 computes", 2)
        wait_for(standing_still(tmp_path, {0, 1}), "rank 0 waits for rank 1", process)
        if how == "flag":
            process.terminate()
        else:  # as `timeout --foreground` and a terminal send it
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)

    arguments = ("-n", "2", "--grace", "80", "saving.py", how, call)
    result = run_job(arguments, state=tmp_path, act=act)
    assert result.rc == (143 if how == "flag" else 130), result.everything
    assert sorted(line for line in result.lines if "has saved" in line) == [
        "[0] rank 0 has saved",
        "[1] rank 1 has saved",
    ], result.everything
    assert "killed" not in result.err
    assert not [e for e in result.events if e["what"] == "killed"]


@pytest.mark.usefixtures("without_torch")
def test_what_a_rank_raises_when_the_job_is_stopped_is_said(tmp_path: Path) -> None:
    """The report was made before, and the error of a rank that lost its peer, or failed to save,
    stood in its log only.
    """
    program = tmp_path / "train.py"
    program.write_text(
        "import signal, time\ndef save(number, frame):\n    raise OSError('no space left')\nsignal.signal(signal.SIGTERM, save)\n"
        "print('is up', flush=True)\ntime.sleep(1000)\n"
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        process.terminate()

    result = run_job(["-n", "2", program], state=tmp_path, act=act)
    assert result.rc == 143, result.everything
    for rank in range(2):
        assert re.search(
            rf"^rallypoint: rank {rank} raised, while it was stopped: OSError: no space left",
            result.err,
            re.MULTILINE,
        )


@pytest.mark.usefixtures("without_torch")
def test_who_ignores_everything_is_killed_after_the_grace(tmp_path: Path) -> None:
    result = interrupted(
        tmp_path, "ignore", "sleep", numbers=[signal.SIGTERM], options=("--grace", "1")
    )
    assert result.rc == 143
    (zero,) = [e for e in result.events if e["what"] == "killed" and e["rank"] == 0]
    assert zero["because"] == "the grace of 1 s is over"
    assert re.search(
        r"^rallypoint: .* did not end and w.+ killed: the grace of 1 s is over$",
        result.err,
        re.MULTILINE,
    ), result.everything


@pytest.mark.usefixtures("without_torch")
def test_ctrl_c_twice_kills_now(tmp_path: Path) -> None:
    result = interrupted(
        tmp_path,
        "ignore",
        "sleep",
        numbers=[signal.SIGINT, signal.SIGINT],
        options=("--grace", "80"),
    )
    assert result.rc == 130
    assert {e["rank"] for e in result.events if e["what"] == "killed"} == {0, 1, 2}
    assert result.seconds < 60


@pytest.mark.usefixtures("without_torch")
def test_a_stopped_rank_is_no_obstacle(tmp_path: Path) -> None:
    result = interrupted(
        tmp_path, "frozen", "sleep", numbers=[signal.SIGTERM], options=("--grace", "80")
    )
    assert result.rc == 143
    assert result.seconds < 60
    assert re.search(r"- rank 0 +stopped \(SIGSTOP\)\n", result.err), result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT"])
def test_other_signals_stop_the_job_with_their_number(tmp_path: Path, name: str) -> None:
    program = tmp_path / "train.py"
    program.write_text("import time\nprint('is up', flush=True)\ntime.sleep(1000)\n")

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        process.send_signal(signal.Signals[name])

    result = run_job(["-n", "2", program], state=tmp_path, act=act)
    assert result.rc == 128 + signal.Signals[name]
    assert f"the job was stopped by {name}" in result.err


def test_ctrl_c_while_the_template_imports(tmp_path: Path) -> None:
    def act(process: subprocess.Popen[bytes]) -> None:
        wait_for(
            lambda: any(e["what"] == "template-started" for e in events(tmp_path)),
            "the template starts",
            process,
        )
        process.send_signal(signal.SIGINT)

    result = run_job(["-n", "2", "stopping.py", "plain"], state=tmp_path, act=act)
    assert result.rc == 130, result.everything
    assert not any(e["what"] == "worker-started" for e in result.events)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("after", [0.0, 0.003, 0.008, 0.015, 0.03, 0.06])
def test_ctrl_c_in_the_first_moments_is_quiet(tmp_path: Path, after: float) -> None:
    """Before the launcher listens, Ctrl-C ends it as it ends any program: no traceback, no crash
    inside an import, not lost.
    """
    program = tmp_path / "train.py"
    program.write_text("import time\ntime.sleep(1000)\n")

    def act(process: subprocess.Popen[bytes]) -> None:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(
            lambda: "_struct" in maps.read_text() or "msgspec" in maps.read_text(),
            "our first imports",
            process,
        )
        time.sleep(after)  # not to synchronise: any moment from here on will do
        process.send_signal(signal.SIGINT)

    result = run_job(["-n", "2", program], state=tmp_path, act=act)
    assert result.rc in (130, -signal.SIGINT), result.everything
    assert "Traceback" not in result.err, result.everything
    assert "internal-error" not in result.err


def test_a_restart_is_a_fresh_meeting_and_leaves_nothing_in_the_template(tmp_path: Path) -> None:
    result = run_job(["-n", "3", "--max-restarts", "3", "again.py", "3"], state=tmp_path)
    assert result.rc == 0, result.everything
    assert [result.out.count(f"attempt {n} of 3 sums 3") for n in range(4)] == [3, 3, 3, 3]
    ports = [e["details"]["port"] for e in result.events if e["what"] == "port-held"]
    assert len(ports) == 4
    assert result.codes == ["rank-exited"] * 3, result.everything
    assert result.err.count("error[rank-exited]: rank 0 exited with code 3") == 3
    assert "rallypoint: restarting all 3 ranks, attempt 3 of 3" in result.err
    said_by_attempt = [line for line in result.of(0) if line.startswith("template has")]
    assert len(said_by_attempt) == 4
    assert len(set(said_by_attempt)) == 1, said_by_attempt


@pytest.mark.usefixtures("without_torch")
def test_when_the_restarts_are_used_up_the_code_is_the_rank_s(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    os._exit(3)\ntime.sleep(600)\n"
    )
    result = run_job(["-n", "2", "--max-restarts", "1", program], state=tmp_path)
    assert result.rc == 3, result.everything


def test_a_group_that_is_opened_again_meets_anew(run_warm: RunWarm, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist\nfor turn in range(3):\n    dist.init_process_group('gloo')\n    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n    print(f'turn {turn} sums {x.item():g}', flush=True)\n    dist.destroy_process_group()\n"
    )
    result = run_warm(program)
    assert result.rc == 0, result.everything
    assert [result.out.count(f"turn {turn} sums 2") for turn in range(3)] == [2, 2, 2]


@pytest.mark.usefixtures("without_torch")
def test_few_descriptors_are_said_to_be_few(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("print('here')\n")
    shell = [
        'ulimit -n 64; exec "$@"',
        "sh",
        sys.executable,
        "-P",
        "-m",
        "rallypoint",
        "run",
        "-n",
        "16",
        str(program),
    ]
    result = run_job(shell, state=tmp_path, launcher=("/bin/sh", "-c"))
    assert (result.rc, result.codes) == (1, ["start-failed"]), result.everything
    assert "16 ranks cannot be started: Too many open files" in result.err
    assert "ulimit -n 4096" in result.err


@pytest.mark.usefixtures("without_torch")
def test_too_few_files_for_a_launcher_are_said_once(tmp_path: Path) -> None:
    """A second report followed the first, and the launcher ended by SIGABRT: a library that ends a
    thread could not be loaded.
    """
    program = tmp_path / "train.py"
    program.write_text("print('here')\n")
    shell = ['ulimit -n 20; exec "$@"', "sh", sys.executable, "-P", "-m", "rallypoint"]
    result = run_job(
        [*shell, "run", "-n", "4", str(program)], state=tmp_path, launcher=("/bin/sh", "-c")
    )
    assert (result.rc, result.codes) == (1, ["files-exhausted"]), result.everything
    assert "ulimit -n is 20" in result.err


@pytest.mark.usefixtures("without_torch")
def test_a_rank_that_has_no_descriptor_left_still_tells_what_it_raised(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "kept = []\nwhile True:\n    kept.append(os.open('/dev/null', os.O_RDONLY))\n"
    )
    result = run_job(["-n", "2", program], state=tmp_path)
    assert (result.rc, result.codes) == (1, ["files-exhausted"]), result.everything
    assert "train.py:5 in <module>" in result.prose, result.everything


def test_little_address_space_is_named(tmp_path: Path) -> None:
    """The import of torch fails then, or ends the template with SIGABRT, which was "please report
    it".
    """
    program = tmp_path / "train.py"
    program.write_text("print('here')\n")
    shell = ['ulimit -v 200000; exec "$@"', "sh", sys.executable, "-P", "-m", "rallypoint"]
    result = run_job(
        [*shell, "run", "-n", "2", str(program)], state=tmp_path, launcher=("/bin/sh", "-c")
    )
    assert result.codes in (["start-failed"], ["launcher-died"]), result.everything
    assert "ulimit -v lets a process map 195" in result.err
    assert "report it" not in result.err


REFUSED = """
import errno, os, sys
def refuse(path, *_, **__):
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
os.posix_spawn = refuse
from rallypoint.cli.main import main
sys.exit(main())
"""


@pytest.mark.usefixtures("without_torch")
def test_a_limit_on_processes_is_named(tmp_path: Path) -> None:
    """Below `pids.max` of a cgroup. It was an internal error, and the guard said that the launcher
    was killed.
    """
    program = tmp_path / "train.py"
    program.write_text("print('here')\n")
    result = run_job(
        ["run", "-n", "4", str(program)],
        state=tmp_path,
        launcher=(sys.executable, "-P", "-c", REFUSED),
    )
    assert (result.rc, result.codes) == (1, ["start-failed"]), result.everything
    assert "pids.max" in result.err
    assert "was killed" not in result.err


@pytest.mark.usefixtures("without_torch")
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    program = os.fsencode(tmp_path) + b"/caf\xe9.py"
    Path(os.fsdecode(program)).write_text(
        "import sys\nprint(ascii(sys.argv[1:]))\nopen('/no/caf\\udce9')\n"
    )
    result = run_job(["-n", "2", os.fsdecode(program), os.fsdecode(b"\xff")], state=tmp_path)
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert "['\\udcff']" in result.of(0) + result.of(
        1
    )  # one may be stopped before it comes to that
    assert "FileNotFoundError" in result.report


@pytest.mark.usefixtures("without_torch")
def test_names_that_ranks_choose_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    """The name of a process that failed, and the command line of one that was left running, cleared
    the screen.
    """
    program = tmp_path / "names.py"
    program.write_text(
        "import multiprocessing, os, subprocess, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    subprocess.Popen(['\\x1b[2Jsleep', '1004'], executable='/bin/sleep')\n"
        "failing = multiprocessing.get_context('fork').Process(target=sys.exit, args=(3,), name='\\x1b[2Jworker')\n"
        "failing.start()\n"
        "failing.join()\n"
    )
    result = run_job(["-n", "2", "--fresh", str(program)], state=tmp_path)
    assert result.rc == 0, result.everything
    assert "sleep 1004 (pid" in result.err
    assert "worker of rank 1" in result.err
    assert "\x1b[2J" not in result.err


@pytest.mark.usefixtures("without_torch")
def test_what_a_successful_rank_leaves_is_named_and_ended(tmp_path: Path) -> None:
    result = run_job(["-n", "2", "leaves.py"], state=tmp_path)
    assert result.rc == 0, result.everything
    pid = result.of(1)[0].split()[1]
    assert (
        f"rank 1 exited cleanly but left a process running: sleep 1003 (pid {pid}); it is stopped when the job ends"
        in result.err
    )


@pytest.mark.usefixtures("without_torch")
def test_what_a_successful_rank_leaves_stopped_is_ended_at_once(tmp_path: Path) -> None:
    """A stopped process does not act on SIGTERM: the whole grace was waited for."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os, signal, subprocess\nleft = subprocess.Popen(['sleep', '1005'])\n"
        "os.kill(left.pid, signal.SIGSTOP)\nos.waitid(os.P_PID, left.pid, os.WSTOPPED)\n"
    )
    result = run_job(["-n", "2", "--grace", "1000", program], state=tmp_path)
    assert result.rc == 0, result.everything


@pytest.mark.usefixtures("without_torch")
def test_on_failure_continue_tells_each_failure_once_and_lets_the_others_finish(
    tmp_path: Path,
) -> None:
    result = run_job(["-n", "4", "--on-failure", "continue", "two_fail.py"], state=tmp_path)
    assert (result.rc, result.codes) == (4, ["rank-exited", "rank-raised"]), result.everything
    kept = json.loads((result.run_dir / "report.json").read_bytes())
    assert [report["code"] for report in kept] == ["rank-exited", "rank-raised"]
    assert result.out.count("finished") == 2


@pytest.mark.torch
def test_on_failure_continue_who_loses_the_rank_that_failed_is_one_line_and_no_report(
    run_warm: RunWarm, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os, signal\nimport torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(1))\n"
    )
    result = run_warm(program, nproc=3, on_failure="continue")
    assert result.codes == ["rank-killed"], result.everything
    # Where the others' ends are read before that of rank 1, they stand in its report.
    told = ("followed rank 1: all_reduce: ", "ranks 0 and 2 lost the connection to a peer")
    assert any(words in result.err for words in told), result.everything
    kept = json.loads((result.run_dir / "report.json").read_bytes())
    assert [report["code"] for report in kept] == ["rank-killed"]


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])  # with the second one it is killed
def test_shared_memory_of_a_rank_that_is_stopped_is_unlinked(tmp_path: Path, handler: str) -> None:
    """The tracker of multiprocessing, which would do it, was killed with the rank's group."""
    program = tmp_path / "train.py"
    program.write_text(
        f"import os, pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.{handler})\n"
        "from multiprocessing import shared_memory\nmine = os.environ['RANK']\n"
        "block = shared_memory.SharedMemory(create=True, size=4096)\nfolder = pathlib.Path(sys.argv[1])\n"
        "(folder / f'new{mine}').write_text(block.name)\n(folder / f'new{mine}').rename(folder / f'block{mine}')\n"
        "while len(list(folder.glob('block*'))) < 2:\n    time.sleep(0.01)\n"
        "if mine == '1':\n    raise ValueError('bad batch')\ntime.sleep(600)\n"
    )
    result = run_job(["-n", "2", "--grace", "1", program, tmp_path], state=tmp_path)
    assert result.codes == ["rank-raised"], result.everything
    blocks = [path.read_text() for path in sorted(tmp_path.glob("block*"))]
    assert len(blocks) == 2
    assert not any(Path("/dev/shm", name).exists() for name in blocks)


@pytest.mark.torch
@pytest.mark.parametrize("ends", ["well", "by an exception"])
def test_shared_memory_of_torchs_manager_is_unlinked(tmp_path: Path, ends: str) -> None:
    """The manager, a daemon that does it 2 s after its last user, was killed with the job."""
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, torch, torch.multiprocessing\n"
        "torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "block = torch.zeros(9).share_memory_()\n"
        "print(block.untyped_storage()._share_filename_cpu_()[1].decode())\n"
        "import rallypoint\n"
        "rallypoint.connect().barrier('both are made', 2)\n"
        "assert sys.argv[1] == 'well'\n"
    )
    result = run_job(["-n", "2", program, ends], state=tmp_path)
    blocks = [Path("/dev/shm", name.strip("/")) for rank in (0, 1) for name in result.of(rank)]
    assert len(blocks) == 2, result.everything
    until = time.monotonic() + DEADLINE
    while any(block.exists() for block in blocks):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.usefixtures("without_torch")
def test_ranks_for_which_the_template_has_no_descriptors(tmp_path: Path) -> None:
    """The launcher raises its own limit, the template has that of the ranks. It died of its own
    words about that, with a traceback and exit status 70.
    """
    program = tmp_path / "train.py"
    program.write_text("import time\ntime.sleep(1000)\n")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    result = run_job(
        ["-n", "16", program],
        state=tmp_path,
        before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, most)),
    )
    assert (result.rc, result.codes) == (1, ["start-failed"]), result.everything
    assert "could not be started: Too many open files" in result.report, result.everything
    assert "ulimit -a; cat /sys/fs/cgroup/pids.max" in result.report, result.everything
    assert "Traceback" not in result.err, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_hundred_ranks_worth_of_descriptors_is_not_asked_of_the_workers(tmp_path: Path) -> None:
    """The agent raises its own limit on open files; a rank has the user's."""
    program = tmp_path / "limit.py"
    program.write_text("import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n")
    result = run_job(
        [
            'ulimit -Sn 300; exec "$@"',
            "sh",
            sys.executable,
            "-P",
            "-m",
            "rallypoint",
            "run",
            "-n",
            "2",
            program,
        ],
        state=tmp_path,
        launcher=("/bin/sh", "-c"),
    )
    assert result.of(0) == ["300"], result.everything


def test_a_fault_of_ours_is_said_to_be_ours_and_leaves_nothing(tmp_path: Path) -> None:
    """The launcher's own loop raises in the middle of a job with children."""
    faulty = (
        "import sys\nfrom rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor\nfrom rallypoint.cli.main import main\n"
        "def fault(*_): raise RuntimeError('a fault of ours')\nRendezvousMonitor.meets = fault\nsys.exit(main(['run', *sys.argv[1:]]))"
    )
    result = run_job(
        ["-n", "2", "family.py", "wait"],
        state=tmp_path,
        launcher=(sys.executable, "-P", "-c", faulty),
    )
    assert (result.rc, result.codes) == (70, ["internal-error"]), result.everything
    assert "RuntimeError: a fault of ours" in result.err
    assert (
        "the launcher was killed" not in result.err
    )  # it cleaned up by itself; the guard had nothing to do


# `rallypoint run` in every other way; the disk of the run folder answers no more from the first
# rank's start on.
DEAD_DISK = """\
import sys
import threading
from rallypoint.cli.main import main
from rallypoint.launcher.agent import evidence_gatherer, reporter
from rallypoint.record import kept_file

reporter.DISK_TIMEOUT = evidence_gatherer.ERROR_FILES_TIMEOUT = 0.5
write = kept_file.KeptFile.write

def dead(file, data):
    if b'"worker-started"' in data:
        threading.Event().wait()
    return write(file, data)

kept_file.KeptFile.write = dead
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.mark.usefixtures("without_torch")
def test_a_disk_that_dies_in_the_middle_of_a_run_holds_nobody_up(tmp_path: Path) -> None:
    """The launcher's loop waited for it in the kernel: no rank was reaped any more, and Ctrl-C did
    nothing.
    """
    program = tmp_path / "train.py"
    program.write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('a cause')\nimport time\ntime.sleep(1000)\n"
    )
    result = run_job(
        ["-n", "2", "train.py"],
        state=tmp_path,
        cwd=tmp_path,
        launcher=(sys.executable, "-P", "-c", DEAD_DISK),
    )
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert re.search(
        r"^rallypoint: the disk of \S+ gave no answer within 0\.5 s: the record of this run is not whole$",
        result.err,
        re.M,
    ), result.everything


# The same, and the ranks' logs: not one line of theirs gets to the disk.
DEAD_LOGS = DEAD_DISK.replace("b'\"worker-started\"' in data", 'b"line" in data').replace(
    "reporter.DISK_TIMEOUT =",
    "from rallypoint.record import log_pump as logs\nlogs.DISK_PATIENCE = reporter.DISK_TIMEOUT =",
)


@pytest.mark.usefixtures("without_torch")
def test_a_disk_that_takes_no_logs_holds_nobody_up(tmp_path: Path) -> None:
    """The thread that reads the ranks' pipes waited for it: the terminal got nothing more, and
    ranks that print waited for ever.
    """
    program = tmp_path / "train.py"
    program.write_text(
        "import os, rallypoint\nfor i in range(20_000):\n    print('line', i, flush=i == 19_999)\n"
        "rallypoint.connect().barrier('printed', 2)\nif os.environ['RANK'] == '1':\n    raise ValueError('a cause')\n"
    )
    result = run_job(
        ["-n", "2", "train.py"],
        state=tmp_path,
        cwd=tmp_path,
        launcher=(sys.executable, "-P", "-c", DEAD_LOGS),
    )
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert [result.of(rank) for rank in (0, 1)] == [[f"line {i}" for i in range(20_000)]] * 2
    assert "no answer within 0.5 s, and the logs in it are not whole" in result.err, result.err


@pytest.mark.usefixtures("without_torch")
def test_when_descriptors_run_out_while_ranks_are_started_it_is_reported_once(
    tmp_path: Path,
) -> None:
    """After its report the launcher failed of the same thing again, where it took in the c10d host,
    and said so in a second one.
    """
    program = tmp_path / "train.py"
    program.write_text("")
    result = run_job(
        [
            'ulimit -n 37; exec "$@"',
            "sh",
            sys.executable,
            "-P",
            "-m",
            "rallypoint",
            "run",
            "-n",
            "3",
            "--fresh",
            program,
        ],
        state=tmp_path,
        launcher=("/bin/sh", "-c"),
    )
    assert result.rc == 1, result.everything
    assert len(result.codes) == 1, result.everything
