"""A worker that was forked looks like a fresh interpreter: field by field, and where it does not,
docs/concepts/template.md says so.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.host.signals import ATTENTION_SIGNAL
from rallypoint.launcher.agent.template_messages import IMPORT_PATIENCE

from .conftest import Run, RunWarm, Write
from .job import DEADLINE, MARKER, environment, on_terminal

pytestmark = pytest.mark.usefixtures("torch_in_parts")

SCRIPTS = Path(__file__).parent / "template_scripts"
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "template.md"

OURS_IN_THE_ENVIRONMENT = {
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RALLYPOINT_FAMILY", "RALLYPOINT_JOB",
    "RALLYPOINT_STORE", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "WORLD_SIZE",
}  # fmt: skip
DIFFERENT_IN_EVERY_PROCESS = {
    "authkey", "numpy", "random/random", "random/system", "random/temporary", "random/uuid1", "random/uuid4", "torch/rand", "torch/seed",
}  # fmt: skip
INTERNAL_SIGNALS = (32, 33)  # glibc's own: no program can ask for them
CRASHES = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            key: one
            for name, inner in value.items()
            for key, one in flat(inner, f"{path}/{name}" if path else name).items()
        }
    return {path: re.sub(r" at 0x[0-9a-f]+", "", value) if isinstance(value, str) else value}


def as_given() -> None:
    """What a user's shell may have set up: signals ignored, limits, file mode, priority."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.umask(0o027)
    os.nice(3)


def look_alone(
    folder: Path, *options: str, before: Callable[[], None] | None, **extra: str
) -> dict[str, Any]:
    """What a plain `python -u` sees."""
    found = folder / "plain.json"
    subprocess.run(
        [sys.executable, "-u", SCRIPTS / "look.py", found, "--torch", *options], check=True, stdin=subprocess.DEVNULL, capture_output=True,
        env=environment(folder, "alone", extra), cwd=folder, preexec_fn=before, start_new_session=True,
    )  # fmt: skip
    return dict(json.loads(found.read_text()))


@pytest.fixture(
    scope="module",
    params=[(None, {}), (as_given, {"OMP_NUM_THREADS": "999"}), (None, {"OMP_NUM_THREADS": "1"})],
    ids=["plainly", "as given", "one thread"],
)
def seen(
    torch_in_parts_of_module: None,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fresh, forked): what the same program sees alone, and as the only rank of a job."""
    from .job import run_job

    folder = tmp_path_factory.mktemp("look")
    found = folder / "plain.json"  # the same name, so that the arguments are the same
    before, env = request.param
    fresh = look_alone(folder, before=before, **env)
    found.unlink()
    result = run_job(
        ["-n", "1", SCRIPTS / "look.py", found, "--torch"],
        state=folder,
        cwd=folder,
        before=before,
        env=env,
    )
    assert (result.rc, result.out, result.err) == (0, "", ""), result.everything
    return fresh, json.loads(found.read_text())


def test_only_what_the_page_lists_differs(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = map(flat, seen)
    differs = {
        name
        for name in fresh.keys() | forked.keys()
        if fresh.get(name, "absent") != forked.get(name, "absent")
    }
    differs -= DIFFERENT_IN_EVERY_PROCESS
    # glibc's own signals, if the caller ignores them; test_signals looks at all others.
    differs -= {"status/SigIgn", "status after torch/SigIgn"}
    differs = {re.sub(r"^(descriptors|environ)( after torch)?/.*", r"\1", name) for name in differs}
    several = (
        {"status/Threads"} if fresh["threads after torch"] != "1" else set()
    )  # OpenBLAS starts none on one processor
    # Each of them is looked at in a test below.
    assert differs == several | {
        "descriptors", "environ", "faulthandler", "first environ", "gc/frozen", f"handlers after torch/{ATTENTION_SIGNAL:d}",
        f"handlers/{ATTENTION_SIGNAL:d}", "logging after torch/loggers",
        "hooks after torch", "modules", "modules after torch", "prctl/pdeathsig", "status/SigCgt", "status after torch/SigCgt",
        "sys/meta_path", "sys/path_importer_cache", "warnings",
    }  # fmt: skip


def test_the_page_lists_the_variables_that_are_read_at_load() -> None:
    from rallypoint.launcher import late_variables

    listed = set(
        re.findall(
            r"`([A-Z_]+\*?)`", PAGE.read_text().partition("\nTried, ")[0].rpartition("## ")[2]
        )
    )
    assert listed == set(late_variables._NAMES) | {
        f"{family}*" for family in late_variables._FAMILIES
    }


def test_random_state_is_a_processs_own(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = map(flat, seen)
    assert {name for name in DIFFERENT_IN_EVERY_PROCESS if fresh[name] == forked[name]} == set()


def test_the_environment_has_the_contract_and_nothing_else(
    seen: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    fresh, forked = seen
    for key in ("environ", "environ after torch"):
        assert {name for name, value in forked[key].items() if fresh[key].get(name) != value} - {
            MARKER
        } == OURS_IN_THE_ENVIRONMENT
        assert fresh[key].keys() <= forked[key].keys()


def test_no_descriptor_but_the_channel_the_evidence_and_the_secret(
    seen: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    fresh, forked = seen
    for key in ("descriptors", "descriptors after torch"):
        ours = [value for number, value in forked[key].items() if number not in fresh[key]]
        assert sorted(ours) == [["/memfd", False], ["/memfd", False], ["socket", False]]
        assert {
            number: value for number, value in forked[key].items() if number in fresh[key]
        } == fresh[key]


def test_signals(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = seen
    assert (
        forked["handlers"].pop(str(signal.SIGRTMIN + 8)) == "_block"
    )  # as Python sees them, this one is more
    assert "SIG_DFL" in fresh["handlers"].pop(str(signal.SIGRTMIN + 8))
    assert fresh["handlers"] == forked["handlers"]
    assert fresh["mask"] == forked["mask"] == []
    # SIGWINCH: of readline, which pdb imports in Python 3.13, and torch 2.8 pdb.
    internal = sum(1 << (number - 1) for number in (*INTERNAL_SIGNALS, signal.SIGWINCH))
    ours = sum(1 << (number - 1) for number in (*CRASHES, signal.SIGURG, signal.SIGRTMIN + 8))
    for key in ("status", "status after torch"):
        assert (
            int(forked[key]["SigIgn"], 16) & ~internal == int(fresh[key]["SigIgn"], 16) & ~internal
        )
        assert (
            int(forked[key]["SigCgt"], 16) & ~internal
            == int(fresh[key]["SigCgt"], 16) & ~internal | ours
        )


def test_modules(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Before its first import a worker has what torch imports; after it, only ours are more."""
    fresh, forked = seen
    assert set(fresh["modules"]) <= set(forked["modules"])
    more = {
        name.partition(".")[0]
        for name in set(forked["modules after torch"]) - set(fresh["modules after torch"])
    }
    assert more <= {"rallypoint", "msgspec", "decimal", "_decimal", "shlex"}
    assert set(fresh["modules after torch"]) <= set(forked["modules after torch"])
    assert forked["sys"]["meta_path"].startswith(
        "[<rallypoint.launcher.worker.import_times.ImportTimes object"
    )
    assert forked["sys"]["meta_path"].count(",") == fresh["sys"]["meta_path"].count(",") + 1


def test_what_torch_leaves_at_its_import_is_there_before(
    seen: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    fresh, forked = seen
    assert forked["status"]["Threads"] == fresh["threads after torch"]
    assert sorted(forked["warnings"].split("), (")) == sorted(
        forked["warnings after torch"].split("), (")
    )
    assert forked["warnings after torch"] == fresh["warnings after torch"]
    assert forked["gc"]["frozen"] > 10_000
    assert (fresh["gc"]["enabled"], fresh["gc"]["thresholds"]) == (
        forked["gc"]["enabled"],
        forked["gc"]["thresholds"],
    )


def test_our_hold_on_it(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, forked = seen
    assert forked["prctl"]["pdeathsig"] == signal.SIGKILL
    assert forked["faulthandler"]
    assert all(
        forked["ids"][name] for name in ("session leader", "group leader", "thread", "ident")
    )
    assert f"RALLYPOINT_FAMILY={forked['environ']['RALLYPOINT_FAMILY']}" in forked["first environ"]
    assert not any(
        entry.startswith(("RANK=", "WORLD_SIZE=", "MASTER_PORT="))
        for entry in forked["first environ"]
    )  # the template's


def test_as_many_threads_as_a_fresh_process(seen: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fresh, forked = seen
    for key in ("openblas", "gomp", "threads after torch"):
        assert forked[key] == fresh[key], key
    assert forked["torch"]["threads"] == fresh["torch"]["threads"]
    assert "OPENBLAS_NUM_THREADS" not in forked["environ"]


def test_ranks_draw_different_numbers(run_warm: RunWarm, write: Write) -> None:
    program = write(
        "train.py",
        "import json, random, torch, numpy, uuid\n"
        "numbers = [torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random(), str(uuid.uuid4())]\n"
        "print(json.dumps({'all': numbers}))\n",
    )
    result = run_warm(program)
    one, other = (value["all"] for value in result.values())
    assert all(a != b for a, b in zip(one, other, strict=True)), result.everything


@pytest.mark.usefixtures("without_torch")
def test_closed_standard_descriptors_are_dev_null(run: Run, write: Write) -> None:
    program = write(
        "train.py",
        "import os, sys\nprint('lost')\nsys.stderr.write(os.readlink('/proc/self/fd/1'))\n",
    )
    result = run(program, before=lambda: os.closerange(0, 2))
    assert (result.rc, result.out, result.err) == (0, "", "/dev/null"), result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("way", [(), ("--fresh",)], ids=["template", "fresh"])
def test_children_of_the_program_get_no_descriptor_of_ours(
    run: Run, write: Write, way: tuple[str, ...]
) -> None:
    program = write(
        "train.py",
        "import os, subprocess\nprint(os.listdir('/proc/self/fd'))\nsubprocess.run(['ls', '/proc/self/fd'], close_fds=False)\n",
    )
    result = run(*way, program, stdin="")
    assert result.rc == 0, result.everything
    assert [line for line in result.lines[1:] if int(line) > 3] == [], result.everything


@pytest.mark.usefixtures("without_torch")
def test_it_may_close_every_descriptor(run: Run, write: Write) -> None:
    """As programs do that become daemons: nothing is said, and the job ends well."""
    program = write("train.py", "import os\nos.closerange(3, 256)\nprint('closed')\n")
    result = run(program, env={"PYTHONDEVMODE": "1"})
    assert (result.rc, result.out, result.err) == (0, "closed\n", ""), result.everything


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100, reason="a rank may have too few files"
)
@pytest.mark.usefixtures("without_torch")
def test_it_may_close_a_thousand_descriptors_and_open_its_own(
    run: Run, write: Write, tmp_path: Path
) -> None:
    """Where its ranks stood was written into one of the program's own files."""
    program = write(
        "train.py",
        "import os, sys\nos.closerange(3, 1024)\n"
        "files = [open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}-{i}', 'w') for i in range(1015)]\n"
        "raise ValueError('bad batch')\n",
    )
    own = tmp_path / "own"
    own.mkdir()
    result = run("-n", "2", program, own)
    assert (result.rc, result.codes, result.out) == (1, ["rank-raised"], ""), result.everything
    assert [path for path in own.iterdir() if path.stat().st_size] == []


@pytest.mark.usefixtures("without_torch")
def test_developers_mode_hears_nothing_of_us(run: Run, write: Write) -> None:
    program = write("train.py", "import gc\ngc.collect()\nprint('fine')\n")
    result = run("-n", "2", program, env={"PYTHONDEVMODE": "1"})
    assert (result.rc, sorted(result.lines), result.err) == (0, ["[0] fine", "[1] fine"], ""), (
        result.everything
    )


# --- the clean check
# --------------------------------------------------------------------------------------------------

STARTS_A_THREAD = """\
import threading, time

def begin():
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

begin()
"""


@pytest.mark.usefixtures("without_torch")
def test_a_module_that_starts_a_thread_is_named(run: Run, write: Write) -> None:
    """The job works all the same."""
    write("busy.py", STARTS_A_THREAD)
    write("outer.py", "import json\nimport busy\n")
    program = write("train.py", "import outer\nprint('done', outer.busy.__name__)\n")
    result = run("-n", "2", "--preload", "outer", program, cwd=program.parent)
    assert (result.rc, sorted(result.lines)) == (0, ["[0] done busy", "[1] done busy"]), (
        result.everything
    )
    line = "[cuda-in-template]: importing outer leaves a process that must not be forked: 2 threads"
    assert result.err.count(line) == 1, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_thread_that_starts_with_python_is_not_told_of_torch(run: Run, write: Write) -> None:
    folder = write("sitecustomize.py", STARTS_A_THREAD).parent
    program = write("train.py", "print('done')\n")
    paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    result = run("-n", "2", program, env={"PYTHONPATH": paths})
    assert (result.rc, sorted(result.lines)) == (0, ["[0] done", "[1] done"]), result.everything
    assert result.err.count("[cuda-in-template]: what starts with this Python") == 1, (
        result.everything
    )


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(("options", "times"), [((), 1), (("--quiet",), 0)])
def test_a_module_whose_import_takes_long_is_named(
    run: Run, write: Write, options: tuple[str, ...], times: int
) -> None:
    """Nothing was said of a module that hung as it was preloaded; and then also with --quiet."""
    write(
        "slow.py",
        "import sys, time\nif 'rallypoint' in sys.modules:\n    time.sleep(IMPORT_PATIENCE + 1)\n".replace(
            "IMPORT_PATIENCE", str(IMPORT_PATIENCE)
        ),
    )
    program = write("train.py", "print('done')\n")
    result = run("-n", "2", *options, "--preload", "json,slow", program, cwd=program.parent)
    assert result.rc == 0, result.everything
    line = "the template has been importing slow for 10 s"
    assert result.err.count(line) == times, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_preload_module_beside_the_script(run: Run, write: Write) -> None:
    """It is imported once, in the template, from where the program would import it."""
    write("mine.py", "import os, sys\npid = os.getpid()\nfirst = sys.path[0]\n")
    program = write(
        "train.py",
        "import json, os, sys\nimport mine\nprint(json.dumps({'same': mine.pid, 'first': mine.first == sys.path[0], 'path': sys.path}))\n",
    )
    result = run("-n", "2", "--preload", "mine", program)
    one, other = result.values()
    assert one == other, result.everything
    assert one["first"], result.everything
    assert one["path"].count(str(program.parent)) == 1, result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "ModuleNotFoundError: No module named 'mine'"),
        ("value = 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('usage: mine FILE')\n", "SystemExit: usage: mine FILE"),
    ],
    ids=["absent", "raises", "exits"],
)
def test_a_preload_module_that_cannot_be_imported_is_said_once(
    run: Run, write: Write, text: str | None, error: str
) -> None:
    program = write("train.py", "print('never')\n")
    if text is not None:
        write("mine.py", text)
    result = run("-n", "2", "--preload", "mine", program)
    assert (result.rc, result.codes, result.out) == (1, ["start-failed"], ""), result.everything
    assert error in result.err, result.everything
    assert "importlib" not in result.err, result.everything


# --- what is noticed
# --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_torch")
def test_a_slow_import_is_named_once_at_the_end(run: Run, write: Write) -> None:
    """The package, though a module of the program's own imports it; not with --preload, and not
    under --plain.
    """
    packages = write("site-packages/heavy/__init__.py", "").parent.parent
    write("site-packages/heavy/parts.py", "import time\ntime.sleep(1.05)\n")
    write("mine.py", "import heavy.parts\n")
    program = write("train.py", "import mine\nprint('done')\n")
    env = {
        "PYTHONPATH": os.pathsep.join(
            [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    }
    result = run("-n", "2", program, env=env)
    assert re.fullmatch(
        r"rallypoint: heavy\.parts was imported 2 times, \d+\.\d s each: --preload heavy\.parts\n",
        result.err,
    ), result.everything
    for way in (("--preload", "heavy.parts"), ("--plain",)):
        result = run("-n", "2", *way, program, env=env)
        assert (result.rc, result.err) == (0, ""), result.everything


SETS = (
    "import os, settings\nos.environ['OMP_NUM_THREADS'] = '2'\nos.environ['NCCL_DEBUG'] = 'WARN'\n"
)
MEETS = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"


def told_of_variables(run: Run, write: Write, text: str, *way: str, **env: str) -> list[str]:
    """The lines about variables of a job of this program, whose `settings` sets TORCH_LOGS."""
    write("settings.py", "import os; os.environ.update({'TORCH_LOGS': '+distributed'})\n")
    program = write("train.py", text)
    result = run("-n", "2", *way, program, env=env, cwd=program.parent)
    assert result.rc == 0, result.everything
    return sorted(line for line in result.err.splitlines() if line.startswith("rallypoint: "))


def test_a_variable_that_is_set_too_late_is_said_once(run: Run, write: Write) -> None:
    assert told_of_variables(run, write, SETS + MEETS) == [
        f"rallypoint: {line} after torch was imported in the template: export it, or --fresh"
        for line in ("settings.py:1 sets TORCH_LOGS", "train.py:2 sets OMP_NUM_THREADS")
    ]


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("way", "env"),
    [
        ((), {"OMP_NUM_THREADS": "2", "TORCH_LOGS": "+distributed"}),
        (("--fresh", "-n", "1"), {}),
    ],
    ids=["set before", "fresh"],
)
def test_a_variable_that_is_not_set_too_late_is_not_said(
    run: Run, write: Write, way: tuple[str, ...], env: dict[str, str]
) -> None:
    assert told_of_variables(run, write, SETS + "import torch\n", *way, **env) == []


# --- breakpoint()
# --------------------------------------------------------------------------------------------------

STOPS = "import os\nvalue = int(os.environ['RANK'])\nfor _ in range(2):\n    breakpoint()\nprint('value', value)\n"


def typed_at_the_prompts(
    arguments: list[str], answers: list[bytes], folder: Path, **env: str
) -> tuple[int, str]:
    """Run a job on a terminal, and type an answer at every `(Pdb) `: (exit status, what the
    terminal showed).
    """
    waiting = list(answers)

    def react(shown: bytes, keyboard: int) -> None:
        if waiting and shown.count(b"(Pdb) ") > len(answers) - len(waiting):
            os.write(keyboard, waiting.pop(0) + b"\n")

    status, shown = on_terminal(arguments, folder, env=env, react=react)
    # The row of the start had been wiped out together with the prompt, which then was not seen.
    assert "\x1b[2K" not in shown[shown.find("(Pdb) ") :], shown
    return status, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n")


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
@pytest.mark.parametrize("rank", [0, 1])
def test_breakpoint_on_the_terminal(write: Write, tmp_path: Path, rank: int) -> None:
    program = write("train.py", STOPS)
    chosen = ["--debug-rank", str(rank)] if rank else []
    status, shown = typed_at_the_prompts(
        ["-n", "2", *chosen, str(program)], [b"value += 40", b"c", b"c"], tmp_path
    )
    assert status == 0, shown
    assert f"[{rank}] value {rank + 40}" in shown, shown
    assert f"[{1 - rank}] value {1 - rank}" in shown, shown
    assert (
        shown.count(
            f"breakpoint() at train.py:4 left out: another rank has the terminal; --debug-rank {1 - rank}"
        )
        == 1
    ), shown
    assert re.search(r"^\(Pdb\) ", shown, re.MULTILINE), shown  # no prefix


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
def test_breakpoint_of_a_rank_alone(write: Write, tmp_path: Path) -> None:
    status, shown = typed_at_the_prompts(
        [str(write("train.py", STOPS))], [b"value += 40", b"c", b"c"], tmp_path
    )
    assert status == 0, shown
    assert "\nvalue 40" in shown, shown


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
def test_breakpoint_as_the_user_has_set_it(write: Write, tmp_path: Path) -> None:
    write("hook.py", "def stop():\n    print('my own')\n")
    program = write("train.py", STOPS)
    status, shown = typed_at_the_prompts(
        ["-n", "2", str(program)], [], tmp_path, PYTHONBREAKPOINT="hook.stop"
    )
    assert (status, shown.count("my own")) == (0, 4), shown
    status, shown = typed_at_the_prompts(
        ["-n", "2", str(program)], [], tmp_path, PYTHONBREAKPOINT="0"
    )
    assert (status, "Pdb" in shown, "left out" in shown) == (0, False, False), shown


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
@pytest.mark.parametrize(("rank", "debugger"), [(0, "pdb"), (1, "pdb"), (0, "ipdb")])
def test_set_trace_of_a_debugger_is_a_breakpoint(
    write: Write, tmp_path: Path, rank: int, debugger: str
) -> None:
    """`import pdb; pdb.set_trace()` let the other rank read /dev/null, and the job ended by its
    BdbQuit. `where` showed our frames. ipdb read the pipe of the rank that has the terminal.
    """
    write(
        "ipdb.py", "import bdb, sys\ndef set_trace():\n    bdb.Bdb().set_trace(sys._getframe(1))\n"
    )
    stop = f"import {debugger}; {debugger}.set_trace()"
    program = write("train.py", STOPS.replace("breakpoint()", stop))
    chosen = ["--debug-rank", str(rank)] if rank else []
    status, shown = typed_at_the_prompts(
        ["-n", "2", *chosen, str(program)], [b"value += 40", b"where", b"c", b"c"], tmp_path
    )
    assert status == 0, shown
    assert f"[{rank}] value {rank + 40}" in shown, shown
    assert f"[{1 - rank}] value {1 - rank}" in shown, shown
    assert (
        shown.count(
            f"set_trace() at train.py:4 left out: another rank has the terminal; --debug-rank {1 - rank}"
        )
        == 1
    ), shown
    assert "worker.py" not in shown, shown
    assert "program.py" not in shown, shown


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(DEADLINE)
def test_a_debugger_with_an_input_of_its_own_works_in_every_rank(run: Run, write: Write) -> None:
    """remote_pdb, for instance, which listens at a port."""
    text = "import io, pdb\nsaid = io.StringIO()\npdb.Pdb(stdin=io.StringIO('c\\n'), stdout=said).set_trace()\n"
    text += "print('(Pdb)' in said.getvalue())\n"
    result = run("-n", "2", write("train.py", text))
    assert (result.rc, result.of(0), result.of(1)) == (0, ["True"], ["True"]), result.everything
