"""Ranks that wait in init_process_group for others: who is missing is said, who cannot meet is
stopped, and nobody else hears anything.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run, RunWarm, Write
from .job import DEADLINE, on_terminal

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

AFTER = 0.5  # seconds after which the roll is called here, in place of half a minute
# `rallypoint run` in every other way.
SOONER = f"""\
import sys
import msgspec
from rallypoint.cli import main
from rallypoint.launcher.agent import agent

start = agent.run
agent.run = lambda plan: start(msgspec.structs.replace(plan, roll_call={AFTER}))
sys.exit(main.main(["run", *sys.argv[1:]]))
"""
LAUNCHER = (sys.executable, "-P", "-c", SOONER)

# Waits for a file that the test makes. In `slowly` it is the import of a package that waits.
WAITS = """\
import os
import time

def for_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""
SLOWLY = "import waits\nwaits.for_file('go')\n"
LATE = """\
import os
import signal
import time
import torch
import torch.distributed as dist

def build_index():
    while not os.path.exists("go"):
        time.sleep(0.01)

rank = int(os.environ["RANK"])
if rank == 1:
    import slowly
if rank == 2:
    try:
        torch.cuda.set_device(1000)
    except Exception:
        print("no GPU, then")
    build_index()
if rank == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.init_process_group("gloo")
dist.barrier()  # the group is open in one rank before it is in all
print("here")
dist.destroy_process_group()
"""


def events(state: Path) -> list[dict[str, Any]]:
    """What has happened so far in the only job that was started with this state."""
    found = [
        path
        for path in (state / "rallypoint" / "runs").glob("*/events.jsonl")
        if not path.parent.is_symlink()
    ]
    text = found[0].read_text() if found else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def until(state: Path, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for an event."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if (found := next((event for event in events(state) if seen(event)), None)) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not seen within {DEADLINE:g} s:\n{events(state)}")


def test_the_roll_is_called_and_nothing_is_stopped(run: Run, write: Write, tmp_path: Path) -> None:
    write("waits.py", WAITS)
    write("slowly/__init__.py", SLOWLY)
    state = tmp_path / "state"

    def complete(event: dict[str, Any]) -> bool:
        """The ranks start one after the other: an early call finds some before their own place."""
        said = "\n".join(event.get("details", {}).get("lines", ()))
        return event["what"] == "roll-call" and all(
            place in said for place in ("slowly/__init__.py:2", "in build_index", "SIGSTOP")
        )

    def act(launcher: subprocess.Popen[bytes]) -> None:
        until(state, complete)
        (tmp_path / "go").touch()
        pids = {
            event["rank"]: event["details"]["pid"]
            for event in events(state)
            if event["what"] == "worker-started"
        }
        os.kill(pids[3], signal.SIGCONT)

    result = run(
        "-n",
        "4",
        "train.py",
        cwd=write("train.py", LATE).parent,
        launcher=LAUNCHER,
        state=state,
        act=act,
    )
    assert (result.rc, [result.of(rank)[-1] for rank in range(4)]) == (0, ["here"] * 4), (
        result.everything
    )
    last = next(event for event in result.events if complete(event))["details"]["lines"]
    stopped = next(
        event["details"]["pid"]
        for event in result.events
        if event["what"] == "worker-started" and event["rank"] == 3
    )
    head, importing, swallowed, frozen = (re.sub(r"for \d+ s", "for N s", line) for line in last)
    assert head == "1 of 4 ranks has been waiting in init_process_group for N s; not there yet:"
    assert importing == "  rank 1 importing for N s: train.py:13 <module> > slowly/__init__.py:2"
    assert re.match(  # it looks and sleeps in turns; what was raised depends on the GPUs
        r"  rank 2 running for N s: train\.py:[89] in build_index( \(genericpath exists\))?; set_device had raised ",
        swallowed,
    )
    assert (
        frozen
        == f"  rank 3 running for N s: stopped (SIGSTOP), pid {stopped}: kill -CONT {stopped} lets it go on"
    )
    assert "\n".join((f"rallypoint: {last[0]}", *last[1:])) in result.err, result.everything


FITS = """\
import os
import sys
import threading
import torch
import torch.distributed as dist

rank, port, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]

def meet(*args, **kwargs):
    dist.init_process_group("gloo", *args, **kwargs)
    total = torch.ones(1)
    dist.all_reduce(total)
    met.append(int(total.item()))
    dist.destroy_process_group()

met = []
if rank < 2:
    meet(rank=rank, world_size=2)  # some, where all meet afterwards
meet()
if rank < 2:
    meet(init_method=f"file://{folder}/two", rank=rank, world_size=2)
os.environ["MASTER_ADDR"] = "localhost" if rank else "127.0.0.1"  # two names of one place
os.environ["MASTER_PORT"] = port
thread = threading.Thread(target=meet)
thread.start()
thread.join()
meet(store=dist.FileStore(f"{folder}/three", 3), rank=rank, world_size=3)
meet("env://?rank=%d&world_size=3" % ((rank + 1) % 3))  # as another rank than before
if rank == 2:
    print(met)
    sys.exit(0)
meet(init_method=f"file://{folder}/again", rank=rank, world_size=2)  # without rank 2, which has left
print(met)
"""


def test_groups_that_fit_alarm_nobody(
    run_warm: RunWarm, write: Write, tmp_path: Path, port: int
) -> None:
    """Groups of some ranks, one group after the other, from a thread, with a store, at two names of
    one place, in another order.
    """
    result = run_warm(write("train.py", FITS), str(port), str(tmp_path), nproc=3)
    assert (result.rc, result.of(0), result.of(2)) == (
        0,
        ["[2, 3, 2, 3, 3, 3, 2]"],
        ["[3, 3, 3, 3]"],
    ), result.everything
    assert re.fullmatch(
        rf"rallypoint: train\.py:\d+ sets MASTER_PORT={port}; the held port \d+ is not used\n",
        result.err,
    ), result.everything


def test_a_duplicate_rank_ends_the_job(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import os\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo', rank=min(rank, 1), world_size=3)\n",
    )
    result = run_warm(program, nproc=3)
    report = result.report.replace(
        "; nobody has come as rank 2", ""
    )  # known when rank 0 has come, too
    assert report.splitlines()[:6] == [
        "error[rank-duplicate]: ranks 1-2 called init_process_group as the same rank, 1 of 3",
        "",
        "  where  train.py:4",
        "  why    a group has each rank from 0 to 2 once",
        "         - ranks 1-2: rank=1, world_size=3, at train.py:4",
        "  then   rank 0 was stopped; it is not at fault",
    ], result.everything
    assert (result.rc, result.codes) == (1, ["rank-duplicate"]), result.everything
    assert "Traceback" not in result.err, result.everything


def test_ranks_that_give_up_before_a_misfit_has_lasted(run_warm: RunWarm, write: Write) -> None:
    """torch's own time limit is as short as ours here, and whoever waits for the empty seat is none
    of those who share one.
    """
    program = write(
        "train.py",
        "import os\nfrom datetime import timedelta\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo', rank=min(rank, 1), world_size=3, timeout=timedelta(seconds=1.9))\n",
    )
    result = run_warm(program, nproc=3)
    assert result.report.startswith(
        "error[rank-duplicate]: ranks 1-2 called init_process_group as the same rank"
    ), result.everything


def test_a_call_that_torch_refuses_is_no_disagreement(run_warm: RunWarm, write: Write) -> None:
    """For a moment one rank is there with another backend; then it has its own error, which it
    hides.
    """
    program = write(
        "train.py",
        "import os\nimport torch.distributed as dist\ntry:\n"
        "    dist.init_process_group('gloo' if os.environ['RANK'] == '0' else 'unheard_of')\nexcept Exception:\n    pass\n",
    )
    result = run_warm(program)
    assert (result.rc, result.codes) == (1, ["error-swallowed"]), result.everything
    assert "unheard_of" in result.report.splitlines()[0], result.everything


LEAVES_BETWEEN = """\
import os
import pathlib
import sys
import threading
import torch.distributed as dist
import waits

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
pathlib.Path(f"in{rank}").touch()  # the group is open in one rank before it is in all
for other in range(3):
    waits.for_file(f"in{other}")
dist.destroy_process_group()
if rank == 0:
    sys.exit(0)
if rank == 2:
    threading.Event().wait()
dist.init_process_group("gloo")
"""


def test_a_rank_that_leaves_between_two_groups(run_warm: RunWarm, write: Write) -> None:
    """It was in the first one. Rank 2 is still elsewhere, and rank 1 waits in vain all the same."""
    write("waits.py", WAITS)
    program = write("train.py", LEAVES_BETWEEN)
    result = run_warm(program, nproc=3)
    assert (result.rc, result.codes) == (1, ["rank-left-early"]), result.everything
    assert "rank 0 returned while others still needed it" in result.report
    assert "rank 1 waits in init_process_group" in result.report, result.everything


STRANGE = """\
import os
from datetime import timedelta
import torch.distributed as dist

os.environ.update(MASTER_ADDR="no-such-host.invalid", MASTER_PORT="@")
dist.init_process_group("gloo", timeout=timedelta(seconds=4))
"""


def test_where_all_wait_at_an_address_of_their_own_it_says_what_is_there(
    run: Run, write: Write, port: int
) -> None:
    program = write("train.py", STRANGE.replace("@", str(port)))
    result = run("-n", "2", "train.py", launcher=LAUNCHER, cwd=program.parent)
    assert result.codes == ["address-unresolved"], result.everything
    last = [event["details"]["lines"] for event in result.events if event["what"] == "roll-call"][
        -1
    ]
    assert last[0].endswith("and nobody is missing"), result.everything
    assert "seen from here: " in last[1], result.everything
    assert "no-such-host.invalid" in last[1], result.everything
    assert last[1].endswith("; train.py:5 names it"), result.everything
    told = next(line for line in result.err.splitlines() if line.startswith("rallypoint: "))
    assert told.startswith(
        f"rallypoint: train.py:5 sets MASTER_ADDR=no-such-host.invalid and MASTER_PORT={port}; the held port "
    ), result.everything


def test_ctrl_c_tells_what_is_wrong_with_the_address_where_all_wait(
    run: Run, write: Write, tmp_path: Path, port: int
) -> None:
    program, state = (
        write("train.py", STRANGE.replace("@", str(port)).replace("seconds=4", "seconds=1000")),
        tmp_path / "state",
    )

    def joins(rank: int, event: dict[str, Any]) -> bool:
        return event["what"] == "phase" and (event["rank"], event["details"]["phase"]) == (
            rank,
            "joining",
        )

    def act(launcher: subprocess.Popen[bytes]) -> None:
        for rank in range(2):
            until(state, functools.partial(joins, rank))
        launcher.send_signal(signal.SIGINT)

    result = run("--grace", "1", "-n", "2", "train.py", cwd=program.parent, state=state, act=act)
    assert result.rc == 130, result.everything
    seen = [
        line
        for line in result.err.partition("stopped[interrupted]")[2].splitlines()
        if "seen from here: " in line
    ]
    assert len(seen) == 1, result.everything
    assert "no-such-host.invalid" in seen[0], result.everything


def test_plain_does_not_look(run: Run, write: Write) -> None:
    program = write(
        "train.py",
        "import torch.distributed as dist\ndist.init_process_group('gloo', rank=2, world_size=2)\n",
    )
    result = run("--plain", "-n", "2", program, launcher=LAUNCHER)
    assert result.rc != 0, result.everything
    assert "rank < size" in result.err, result.everything  # torch's own words
    assert "rank-out-of-range" not in result.err, result.everything
    assert not [event for event in result.events if event["what"] in ("roll-call", "phase")], (
        result.everything
    )


# --- the terminal
# --------------------------------------------------------------------------------------------------

STARTS = """\
import os
import torch.distributed as dist
import waits

if os.environ["RANK"] == "0":
    waits.for_file("go")
dist.init_process_group("gloo")
"""
ASKS = """\
import os
import pathlib
import torch.distributed as dist

def look():
    pathlib.Path("at the prompt").touch()
    while not os.path.exists("there"):
        time.sleep(0.01)
    time.sleep(SPAN)

import time
if os.environ["RANK"] == "0":
    breakpoint()
else:
    while not os.path.exists("at the prompt"):
        time.sleep(0.01)
    pathlib.Path("there").touch()
dist.init_process_group("gloo")
"""


@pytest.mark.timeout(DEADLINE)
def test_the_live_line_counts_the_ranks_and_goes_away(write: Write, tmp_path: Path) -> None:
    write("waits.py", WAITS)
    write("train.py", STARTS)

    def react(shown: bytes, _: int) -> None:
        if (
            "rallypoint: 2 ranks · 1 importing · 1 waiting in init_process_group".encode() in shown
            and b"not there yet" in shown
        ):
            (tmp_path / "go").touch()

    status, shown = on_terminal(["-n", "2", "train.py"], tmp_path, launcher=LAUNCHER, react=react)
    assert status == 0, shown
    assert "rallypoint: 2 ranks · importing torch" in shown
    assert "waiting in init_process_group" not in shown.rpartition("\x1b[2K")[2], (
        "the row is left on the screen"
    )
    assert re.search(
        r"rallypoint: 1 of 2 ranks has been waiting in init_process_group for \d+ s; not there yet:\r\n  rank 0 running",
        shown,
    ), shown


@pytest.mark.timeout(DEADLINE)
def test_the_roll_is_not_called_while_a_person_is_at_the_debugger(
    write: Write, tmp_path: Path
) -> None:
    """Rank 1 waits several times as long as it takes to call the roll, and rank 0 is at the prompt
    all the time.
    """
    write("train.py", ASKS.replace("SPAN", str(3 * AFTER)))
    answers = [b"look()\n", b"c\n"]

    def react(shown: bytes, terminal: int) -> None:
        if answers and shown.count(b"(Pdb) ") > 2 - len(answers):
            os.write(terminal, answers.pop(0))

    status, shown = on_terminal(["-n", "2", "train.py"], tmp_path, launcher=LAUNCHER, react=react)
    assert (status, answers) == (0, []), shown
    assert "not there yet" not in shown, shown
    assert [event for event in events(tmp_path / "state") if event["what"] == "roll-call"] == []
