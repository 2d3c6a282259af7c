"""The store of a real job: who has its secret, what it costs when nobody asks, and that nothing of
it is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run, RunWarm, Write
from .job import Result, run_job
from .test_supervision import helper, said, wait_for

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

WAYS = pytest.mark.parametrize(
    "way", [(), ("--fresh",), ("--plain",)], ids=["template", "fresh", "plain"]
)

WHERE = """
import json, os
from rallypoint.store import discovery as place
def where():
    found = place.current()
    if found is None:
        return {"code": place.no_store().code, "headline": place.no_store().headline, "why": place.no_store().why}
    secret = found.secret()
    return {"address": found.address, "secret": secret.hex(), "rank": found.identity.rank, "own": found.identity.pid == os.getpid()}
"""


@pytest.mark.usefixtures("without_torch")
def test_a_program_of_no_python_has_none(run: Run, write: Write) -> None:
    program = write(
        "train.py",
        WHERE + "print(json.dumps({**where(), 'store': os.environ.get('RALLYPOINT_STORE')}))",
    )
    result = run("--no-python", sys.executable, program)
    assert result.rc == 0, result.everything
    found = json.loads(result.out)
    assert (found["code"], found["store"]) == ("no-store", None)
    assert "--no-python" in found["why"][0]


@pytest.mark.usefixtures("without_torch")
def test_a_restart_has_another(run: Run, write: Write, places: Path) -> None:
    program = write(
        "train.py",
        WHERE + "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(f'{os.environ[\"FOUND\"]}/{attempt}', 'w').write(json.dumps(where()))\n"
        "raise SystemExit(attempt == '0')\n",
    )
    result = run(
        "--max-restarts",
        "1",
        program,
        env={"XDG_RUNTIME_DIR": str(places), "FOUND": str(program.parent)},
    )
    assert result.rc == 0, result.everything
    first, second = (json.loads((program.parent / attempt).read_text()) for attempt in "01")
    assert first["address"] != second["address"]
    assert first["secret"] != second["secret"]


@pytest.mark.usefixtures("without_torch")
def test_a_job_without_a_place_for_a_socket_goes_on_and_says_why_when_it_is_asked(
    tmp_path: Path, write: Write
) -> None:
    program = write(
        "train.py",
        WHERE + "print(json.dumps({**where(), 'store': os.environ.get('RALLYPOINT_STORE')}))",
    )
    nowhere = (
        "import sys\nfrom rallypoint.host import unix_sockets as sockets\nfrom rallypoint.cli.main import main\n"
        "sockets._places = lambda: [('/proc/nowhere', '/tmp')]\nsys.exit(main(['run', *sys.argv[1:]]))"
    )
    result = run_job([program], state=tmp_path, launcher=(sys.executable, "-P", "-c", nowhere))
    assert result.rc == 0, result.everything
    assert json.loads(result.out) == {
        "code": "no-store",
        "headline": "this job has no store",
        "why": [
            "there is no folder here in which a Unix socket can be made; /tmp: No such file or directory"
        ],
        "store": None,
    }


# --- the secret is nowhere else


def memory_has(pid: int, wanted: bytes) -> bool:
    """Whether these bytes are in what a process has written."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            if not mode.startswith("rw"):
                continue
            begin, end = (int(one, 16) for one in span.split("-"))
            try:
                memory.seek(begin)
                if wanted in memory.read(end - begin):
                    return True
            except OSError:  # the kernel's own pages
                continue
    return False


@pytest.mark.usefixtures("without_torch")
@WAYS
def test_ranks_and_what_they_fork_have_it_and_no_environment_no_command_line_no_template(
    tmp_path: Path, write: Write, places: Path, way: tuple[str, ...]
) -> None:
    """Nor another program, with or without a parent that has it."""
    write("where.py", WHERE)
    program = write(
        "train.py",
        "import json, multiprocessing as mp, os, subprocess, sys, time\n"
        "from where import place, where\n"
        "def child(q): q.put(where())\n"
        "def ask(kind):\n"
        "    context = mp.get_context(kind)\n"
        "    q = context.SimpleQueue()\n"
        "    process = context.Process(target=child, args=(q,))\n"
        "    process.start()\n"
        "    answer = q.get()\n"
        "    process.join()\n"
        "    return answer\n"
        "if __name__ == '__main__':\n"
        "    kept = place.current().secret()\n"
        "    program = 'import json; from where import where; print(json.dumps(where()))'\n"
        "    executed = json.loads(subprocess.check_output([sys.executable, '-c', program], cwd=os.path.dirname(__file__)))\n"
        "    print(json.dumps({'mine': where(), 'forked': ask('fork'), 'spawned': ask('spawn'), 'executed': executed, 'pid': os.getpid(),\n"
        "          'store': os.environ['RALLYPOINT_STORE'], 'file': os.environ.get('RALLYPOINT_SECRET_FILE')}), flush=True)\n"
        "    while not os.path.exists(os.environ['GO']): time.sleep(0.01)\n",
    )
    go = tmp_path / "go"
    found: dict[str, bool] = {}

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, '"pid": ', 2)
        runs = tmp_path / "rallypoint" / "runs"
        logs = [log.read_text() for log in sorted(runs.glob("*-*/rank*.log"))]
        told = [json.loads(log[log.index("{") :].splitlines()[0]) for log in logs]
        secret = bytes.fromhex(told[0]["mine"]["secret"])
        ranks = [one["pid"] for one in told]
        template = helper(tmp_path, "template", process.pid)
        for pid in (process.pid, template, helper(tmp_path, "guard", process.pid), *ranks):
            for file in ("environ", "cmdline"):
                text = Path(f"/proc/{pid}/{file}").read_bytes()
                found[f"{file} of {pid}"] = secret in text or secret.hex().encode() in text
        found["the template"] = memory_has(template, secret)
        found["ranks"] = not all(
            memory_has(rank, secret) for rank in ranks
        )  # where it must be found: they keep it
        go.touch()

    env = {
        "XDG_RUNTIME_DIR": str(places),
        "RALLYPOINT_SECRET_FILE": "/of/another/store",
        "GO": str(go),
    }
    result = run_job(["-n", "2", *way, program], state=tmp_path, act=act, env=env)
    assert result.rc == 0, result.everything
    assert len(found) == 12
    assert {name for name, wrong in found.items() if wrong} == set()
    assert not any(event["what"] == "store-serves" for event in result.events), (
        "nobody has asked for anything"
    )
    ranks = result.values()
    assert len({one["mine"]["secret"] for one in ranks}) == 1
    for number, one in enumerate(ranks):
        assert one["store"] == one["mine"]["address"]
        assert one["store"].startswith(f"unix://{places}/rallypoint-")
        assert one["file"] is None
        assert (one["mine"]["rank"], one["mine"]["own"], len(one["mine"]["secret"])) == (
            number,
            True,
            64,
        )
        assert one["forked"] == one["mine"]
        for other in ("spawned", "executed"):
            assert one[other]["code"] == "no-store"
            assert (
                one[other]["headline"]
                == "this process has no secret for the store that RALLYPOINT_STORE names"
            )


# --- nothing is left (with a job whose launcher dies: test_supervision.py)


@pytest.mark.usefixtures("without_torch")
def test_what_the_next_job_finds_it_sweeps(tmp_path: Path, write: Write, places: Path) -> None:
    """Launcher and guard are killed at once."""
    program = write(
        "train.py", "import sys, time\nprint('is up', flush=True)\ntime.sleep(float(sys.argv[1]))\n"
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path / "first", process, "is up", 2)
        guard = helper(tmp_path / "first", "guard", process.pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # neither sees the other die
            for pid in (guard, process.pid):
                os.kill(pid, number)

    run_job(
        ["-n", "2", program, "1000"],
        state=tmp_path / "first",
        act=act,
        env={"XDG_RUNTIME_DIR": str(places)},
    )
    assert len(list(places.iterdir())) == 2  # the store's, and the launcher's door
    result = run_job(
        [program, "0"], state=tmp_path / "second", env={"XDG_RUNTIME_DIR": str(places)}
    )
    assert result.rc == 0, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_store_that_cannot_be_served_is_said_and_the_job_goes_on(
    tmp_path: Path, write: Write, places: Path
) -> None:
    program = write(
        "train.py",
        "import os, socket\n"
        "with socket.socket(socket.AF_UNIX) as client:\n"
        "    client.connect(os.environ['RALLYPOINT_STORE'].removeprefix('unix://'))\n"
        "    try: print('answer', client.recv(10))\n"
        "    except ConnectionResetError: print('reset')\n",
    )
    faulty = (
        "import sys\nfrom rallypoint.launcher.agent.job_store import JobStore\nfrom rallypoint.cli.main import main\n"
        "def serve(*_): raise RuntimeError(\"can't start new thread\")\nJobStore.serve = serve\nsys.exit(main(['run', *sys.argv[1:]]))"
    )
    result = run_job(
        [program],
        state=tmp_path,
        launcher=(sys.executable, "-P", "-c", faulty),
        env={"XDG_RUNTIME_DIR": str(places)},
    )
    assert (result.rc, result.out) == (0, "reset\n"), result.everything
    assert "rallypoint: the job's store cannot be served: can't start new thread\n" in result.err


# --- in use


USES = """\
import json, multiprocessing, os, sys, rallypoint
def sample(index):
    rallypoint.connect().add('samples')
    return index
if sys.argv[1:] == ['torch']:
    import torch
    class Samples(torch.utils.data.Dataset):
        def __len__(self): return 3
        def __getitem__(self, index): return sample(index)
    weights = torch.arange(100_000, dtype=torch.bfloat16).reshape(1000, 100).t()
    equal = torch.equal
    def samples(): return torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context='fork')
else:
    weights, equal = list(range(1000)), list.__eq__
    def samples():
        with multiprocessing.get_context('fork').Pool(1) as pool: return pool.map(sample, range(3))
if __name__ == '__main__':
    store = rallypoint.connect()
    rank = int(os.environ['RANK'])
    if rank == 0: store['weights'] = weights
    same = equal(store.wait('weights', timeout=30), weights)
    store.add('ranks')
    child = os.fork()
    if child == 0:
        store.add('forks')
        rallypoint.connect().add('forks')
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    count = len(list(samples()))
    store.set(f'done/{rank}', str(store.identity))
    who = [store.wait(f'done/{other}', timeout=30) for other in range(int(os.environ['WORLD_SIZE']))]
    print(json.dumps({'same': same, 'status': status, 'samples': count, 'who': who, 'pid': os.getpid(),
        'sums': [store[name] for name in ('ranks', 'forks', 'samples')]}))
"""


# In each new interpreter, which would import torch, a pool of processes stands for a DataLoader's.
@pytest.mark.parametrize(
    ("way", "count", "kind"), [("--plain", 4, "torch"), ("--fresh", 2, "pool")]
)
def test_ranks_their_children_and_their_data_loaders_use_one_store(
    run: Run, write: Write, places: Path, way: str, count: int, kind: str
) -> None:
    program = write("train.py", USES)
    result = run("-n", str(count), way, program, kind, env={"XDG_RUNTIME_DIR": str(places)})
    one_store_was_used(result, count)
    assert [event["what"] for event in result.events].count("store-serves") == 1


def test_forked_ranks_their_children_and_their_data_loaders_use_one_store(
    run_warm: RunWarm, write: Write, tmp_path: Path
) -> None:
    result = run_warm(write("train.py", USES), "torch", nproc=4, run_dir=str(tmp_path / "run"))
    one_store_was_used(result, 4)
    assert (tmp_path / "run" / "events.jsonl").read_text().count('"store-serves"') == 1


def one_store_was_used(result: Result, count: int) -> None:
    assert result.rc == 0, result.everything
    ranks = result.values()
    assert len(ranks) == count
    host = os.uname().nodename
    for one in ranks:
        assert (one["same"], one["status"], one["samples"]) == (True, 0, 3)
        assert one["sums"] == [count, 2 * count, 3 * count]
        assert one["who"] == [
            f"rank {rank} (pid {other['pid']} on {host})" for rank, other in enumerate(ranks)
        ]


@pytest.mark.usefixtures("without_torch")
def test_what_was_stored_before_a_restart_is_not_found_after_it(
    run: Run, write: Write, places: Path
) -> None:
    program = write(
        "train.py",
        "import os, rallypoint\n"
        "store = rallypoint.connect()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    store['step'] = 7\n"
        "    raise SystemExit(1)\n"
        "print('step' in store, len(store), store.add('step'))\n",
    )
    result = run("--max-restarts", "1", program, env={"XDG_RUNTIME_DIR": str(places)})
    assert (result.rc, result.out) == (0, "False 0 1\n"), result.everything
    assert [event["what"] for event in result.events].count("store-serves") == 2


@pytest.mark.usefixtures("without_torch")
def test_a_store_goes_on_working_in_a_spawned_process_and_connect_there_says_how(
    run: Run, write: Write, places: Path
) -> None:
    program = write(
        "train.py",
        "import multiprocessing as mp, rallypoint\n"
        "def work(store):\n"
        "    store.add('n', 2)\n"
        "    try: rallypoint.connect()\n"
        "    except rallypoint.UsageError as error: store['error'] = [error.code, error.help[0][1]]\n"
        "if __name__ == '__main__':\n"
        "    store = rallypoint.connect()\n"
        "    child = mp.get_context('spawn').Process(target=work, args=(store,))\n"
        "    child.start()\n"
        "    child.join()\n"
        "    print(child.exitcode, store['n'], *store['error'])\n",
    )
    result = run(program, env={"XDG_RUNTIME_DIR": str(places)})
    assert (result.rc, result.out) == (
        0,
        "0 2 no-store multiprocessing.Process(target=work, args=(store,))\n",
    ), result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_store_that_was_exported_is_not_the_jobs_and_one_line_says_so(
    run: Run, write: Write, places: Path
) -> None:
    program = write("train.py", "import rallypoint\nprint(rallypoint.connect().address)\n")
    exported = {
        "XDG_RUNTIME_DIR": str(places),
        "RALLYPOINT_STORE": "tcp://127.0.0.1:29500",
        "RALLYPOINT_SECRET_FILE": "secret",
    }
    result = run(program, env=exported)
    assert (result.rc, result.out.startswith(f"unix://{places}/")) == (0, True), result.everything
    assert re.fullmatch(
        r"rallypoint: RALLYPOINT_STORE is not used: a job has its own store; .*\n", result.err
    ), result.everything
    assert run("--quiet", program, env=exported).err == ""


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("victim", ["launcher", "job"])
def test_a_store_in_use_takes_no_signal_and_leaves_nothing(
    tmp_path: Path, write: Write, places: Path, victim: str
) -> None:
    """A rank waits in the store when the launcher is killed, or told to stop."""
    program = write(
        "train.py",
        "import rallypoint\nstore = rallypoint.connect()\nprint('is up', store.add('n'), flush=True)\nstore.wait('never')\n",
    )

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        everything = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}

        def serves_in_a_thread() -> bool:
            threads = {int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")}
            return any(
                everything <= blocked_signals(process.pid, thread)
                for thread in threads - {process.pid}
            )

        def loop_takes_signals() -> bool:  # not while it starts a thread
            taken = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
            return not taken & blocked_signals(process.pid, process.pid)

        wait_for(serves_in_a_thread, "a thread that serves", process)
        wait_for(loop_takes_signals, "the loop takes signals", process)
        os.kill(process.pid, signal.SIGKILL if victim == "launcher" else signal.SIGTERM)

    result = run_job(
        ["-n", "2", program], state=tmp_path, act=act, env={"XDG_RUNTIME_DIR": str(places)}
    )
    assert result.rc == (-signal.SIGKILL if victim == "launcher" else 128 + signal.SIGTERM), (
        result.everything
    )
    assert list(places.iterdir()) == []


def blocked_signals(pid: int, thread: int) -> set[int]:
    """By number; glibc's own two, which nobody can block, are left out. A thread that has ended
    blocks none.
    """
    try:
        status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    mask = int(
        next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16
    )
    return {number for number in range(1, 65) if mask & (1 << (number - 1))}


@pytest.mark.usefixtures("without_torch")
def test_a_daemon_thread_that_waits_in_the_store_is_silent_at_the_end_of_its_rank(
    run: Run, write: Write, places: Path
) -> None:
    """A healthy job printed tracebacks of StoreClosed at its end, woven into each other."""
    program = write(
        "train.py",
        """
import threading, time
import rallypoint

store = rallypoint.connect()
threading.Thread(target=store.wait, args=("stop-requested",), daemon=True).start()
threading.Thread(target=lambda: list(store.watch("cfg/")), daemon=True).start()
while store.status()["waiting"] < 2:
    time.sleep(0.01)
store.barrier("both wait", 2)
print("done")
""",
    )
    result = run("-n", "2", program)
    assert result.rc == 0, result.everything
    assert sorted(result.lines) == ["[0] done", "[1] done"], result.everything
    assert "StoreClosed" not in result.everything
