"""The same command lines and programs under torchrun and under `rallypoint run`: what a user sees
of them is compared.

They are what torch's own tests of its launcher, its elastic agent and its store look at, as far as
a user sees it. Whatever differs must stand in the table of docs/guides/from-torchrun.md, and what
stands there must differ.

`torchrun.json` records what torchrun did, for the torch and the Python that it names.
`UPDATE_TORCHRUN=1 pytest tests/contract` records it anew. With another torch or Python, torchrun
runs beside every case. With the recorded ones it runs beside one case, and must do what is
recorded.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..python_path import WITHOUT_TORCH, python_path
from ..real.job import RALLYPOINT, TORCHRUN, Result, environment, run_job

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

HERE = Path(__file__).parent
RECORD = HERE / "torchrun.json"
UPDATE = bool(os.environ.get("UPDATE_TORCHRUN"))
GUIDE = HERE.parents[1] / "docs" / "guides" / "from-torchrun.md"
DEADLINE = 300.0  # seconds for one job: a quiet machine takes a hundredth
SAID = re.compile(
    r"(|\[.*?\]:? ?|<.*?> )(say: .*)"
)  # what a program has said, with what the launcher puts in front

# What the launchers choose, and tell the ranks; MASTER_ADDR and others have a row.
CHOSEN = re.compile(
    r"MASTER_PORT|TORCHELASTIC_ERROR_FILE|XDG_STATE_HOME|TEST_OF_A_JOB|PWD|OLDPWD|SHLVL|_|OMP_NUM_THREADS|RALLYPOINT_.*"
)

# torch complains that it cannot serve at the launcher's port, and then goes on as a client; under
# ours it does not try.
TORCHS_OWN = re.compile(r"^\[[EW]\d{4} .*TCPStore.cpp.*\n", re.MULTILINE)


class Seen(NamedTuple):
    """What one launcher did."""

    result: Result
    folder: Path  # where the job ran
    out: Path  # what --log-dir named

    def text(self, name: str) -> str:
        """A file that the program has left, without the names of the folder and of the
        interpreter.
        """
        return _anywhere((self.folder / name).read_text(), self.folder)

    def said(self) -> list[str]:
        """The lines of the programs, sorted, without what the launcher put in front."""
        return sorted(
            match[2]
            for match in map(SAID.fullmatch, (self.result.out + self.result.err).splitlines())
            if match
        )

    def in_front(self) -> list[str]:
        """What stood in front of them."""
        return sorted(
            {
                match[1]
                for match in map(SAID.fullmatch, (self.result.out + self.result.err).splitlines())
                if match
            }
        )

    def logs(self) -> dict[str, str]:
        """The files of --log-dir and what is in them; that of an error is compared by itself."""
        runs = list(self.out.iterdir()) if self.out.is_dir() else []
        paths = [(run, path) for run in runs for path in sorted(run.rglob("*")) if path.is_file()]
        return {
            str(path.relative_to(run)): _told(_anywhere(path.read_text(), self.folder), path.name)
            for run, path in paths
        }


def _anywhere(text: str, folder: Path) -> str:
    """The text without what differs from machine to machine."""
    return (
        text.replace(str(folder), "FOLDER")
        .replace(sys.executable, "PYTHON")
        .replace(sysconfig.get_path("purelib"), "PACKAGES")
    )


def _told(text: str, name: str) -> str:
    if name == "error.json":
        return str(json.loads(text)["message"]["message"])
    text = TORCHS_OWN.sub("", text)
    return "".join(sorted(text.splitlines(keepends=True))) if name.startswith("filtered") else text


Facts = Mapping[str, object]  # by a name, which is that of the row when the two differ


class Case(NamedTuple):
    """A command line, and what is compared of it."""

    arguments: Sequence[str]  # OUT stands for the folder of the logs
    facts: Callable[[Seen], Facts]
    environment: Mapping[str, str] = {}
    ours: Sequence[str] = (
        "--fresh",
    )  # of ours alone: an interpreter of its own starts sooner than a template
    stdin: str | None = None
    act: Callable[[subprocess.Popen[bytes]], None] | None = None
    torch: bool = True  # its program needs torch; ours is `without_torch` else


def of_everything(seen: Seen) -> Facts:
    ranks = [
        json.loads(seen.text(f"facts{rank}.json"))
        for rank in range(3)
        if (seen.folder / f"facts{rank}.json").exists()
    ]
    found: dict[str, object] = {
        "exit status": seen.result.rc,
        "lines": seen.said(),
        "files": seen.logs(),
        "what stands in front of a line with `-t`": [text for text in seen.in_front() if text],
        "stores": [rank["stores"] for rank in ranks],
        "stdin of the ranks after the first": [rank["stdin"] for rank in ranks[1:]],
        "stdin of the first": ranks[0]["stdin"],
        "its error file": [
            bool(rank["environment"].get("TORCHELASTIC_ERROR_FILE")) for rank in ranks
        ],
    }
    for name in ("argv", "orig_argv", "path", "main", "cwd", "terminals"):
        found[name] = [rank[name] for rank in ranks]
    alone = len(ranks) == 1
    names = {name for rank in ranks for name in rank["environment"] if not CHOSEN.fullmatch(name)}
    names -= {"TORCHELASTIC_RUN_ID"} if alone else set()  # these jobs have no --rdzv-id
    given = environment(seen.out, "")
    for name in sorted(names):
        row = (
            "`TORCHELASTIC_USE_AGENT_STORE` with one rank"
            if alone and name == "TORCHELASTIC_USE_AGENT_STORE"
            else f"`{name}`"
        )
        values = [rank["environment"].get(name) for rank in ranks]
        if values != [given.get(name)] * len(ranks):
            found[row] = values
    found["variables that were taken away"] = sorted(
        name for name in given.keys() - names if not CHOSEN.fullmatch(name)
    )
    return found


def of_failure(seen: Seen) -> Facts:
    mine = json.loads(seen.text("mine.json"))["message"]
    return {
        "exit status after an exception": seen.result.rc,
        "lines": seen.said(),
        "files": {
            name: text for name, text in seen.logs().items() if not name.endswith("stderr.log")
        },
        "tracebacks": [name for name, text in seen.logs().items() if "ValueError" in text],
        "who had its SIGTERM": sorted(path.name for path in seen.folder.glob("tidied*")),
        "the launcher's error file": (
            mine["message"],
            mine["errorCode"],
            mine["extraInfo"]["py_callstack"],
        ),
    }


def of_tracebacks(seen: Seen) -> Facts:
    return {
        "it fails": seen.result.rc != 0,
        "copies": [seen.text(f"copy{rank}") for rank in range(2)],
        "files": seen.logs(),
        "tracebacks on the terminal, of ranks that raise": len(
            re.findall(r'File ".*raises.py"', seen.result.err)
        ),
    }


def of_plain(seen: Seen) -> Facts:
    return {
        "exit status of a job that fails": seen.result.rc,
        "it fails": seen.result.rc != 0,
        "lines": seen.said(),
        "what stands in front of a line of several ranks": [
            text for text in seen.in_front() if text
        ],
    }


def of_program(seen: Seen) -> Facts:
    said = seen.said()
    rows = {
        "`TORCHELASTIC_ERROR_FILE` with `--log-dir /dev/null`": r"error=\w*",
        "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`": r"share=\w*",
    }
    found: dict[str, object] = {
        name: [re.findall(text, line) for line in said] for name, text in rows.items()
    }
    return {
        **found,
        "exit status": seen.result.rc,
        "lines": [re.sub("|".join(rows.values()), "", line) for line in said],
    }


def of_signal(seen: Seen) -> Facts:
    return {
        "exit status after a signal to the launcher": seen.result.rc,
        "it fails": seen.result.rc != 0,
        "lines": seen.said(),
    }


def when_ready(process: subprocess.Popen[bytes]) -> None:
    """SIGUSR1 for the launcher when both ranks wait for it."""
    assert process.stdout is not None
    while b"ready" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    while b"ready" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    process.send_signal(signal.SIGUSR1)


MEETING = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job7")
LOGS = ("--log-dir", "OUT")
CASES: dict[str, Case] = {
    "everything": Case(
        ("--nproc-per-node", "3", "--max-restarts", "2", "--role", "trainer", *MEETING, *LOGS, "-r", "0:1,1:3", "-t", "2:3",
         "--local-ranks-filter", "0,2", "--duplicate-stdout-filters", "kept", "--duplicate-stderr-filters", "kept",
         "everything.py", "--card=${local_rank}", "a$$b", "$HOME", "--nproc-per-node", "9", "--help", "a b", "", "*"),
        of_everything, ours=(), stdin="typed\n",
    ),
    "one rank": Case(("--standalone", "everything.py"), of_everything, ours=(), stdin="typed\n"),
    "one rank, fresh, a template for lines": Case(
        ("--nproc_per_node=1", "--tee", "3", *LOGS, "everything.py"), of_everything, stdin="typed\n",
        environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank} ${other}> "},
    ),
    "a failure and a restart": Case(
        ("--nproc-per-node", "2", "--max-restart", "1", "--signals-to-handle", "SIGTERM,SIGNOTHING", "-r", "3", *LOGS, "fails.py"),
        of_failure, ours=(), environment={"TORCHELASTIC_ERROR_FILE": "mine.json"},
    ),
    "tracebacks": Case(
        ("--nproc-per-node", "4", "-r", "2:2", "-t", "3:2", "--duplicate-stderr-filters", "kept", *LOGS, "raises.py"), of_tracebacks,
        torch=False,
    ),
    "a folder": Case(("--nproc-per-node", "2", "folder", "x", "--", "-y"), of_plain, torch=False),
    "a program": Case(
        ("--nproc-per-node", "2", "--no-python", "--log-dir", os.devnull, "./program.sh", "--card=${local_rank}", "$$"), of_program,
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ours=(),
    ),
    "a signal": Case(("--nproc-per-node", "2", "--signals-to-handle", "SIGUSR1", "waits.py"), of_signal, act=when_ready, torch=False),
}  # fmt: skip


def see(case: Case, launcher: Sequence[str], again: int = 2) -> Seen:
    """Run it in a folder of its own. The programs are there under the names that the command line
    has. `again`: how often a job of torchrun's that ends in torch's own abort is run anew."""
    folder = Path(tempfile.mkdtemp(prefix="contract-", dir=_places()))
    shutil.copytree(HERE / "scripts", folder / "job")
    out = folder / "logs"
    arguments = [str(out) if word == "OUT" else word for word in case.arguments]
    env = dict(case.environment)
    if launcher != TORCHRUN and not case.torch:
        env["PYTHONPATH"] = python_path(WITHOUT_TORCH)
    result = run_job(
        arguments, state=folder / "state", launcher=launcher, env=env, stdin=case.stdin, cwd=folder / "job",
        timeout=DEADLINE, act=case.act,
    )  # fmt: skip
    if (
        launcher == TORCHRUN and result.rc != 0 and "SIGABRT" in result.err and again
    ):  # gloo's threads, at the end of a rank
        return see(case, launcher, again - 1)
    return Seen(result, folder / "job", out)


@functools.cache
def _places() -> str:
    return tempfile.mkdtemp(prefix="rallypoint-contract-")


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Iterator[None]:
    yield
    shutil.rmtree(_places(), ignore_errors=True)
    for cached in (_places, recorded):
        cached.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _record() -> None:
    if UPDATE:
        cases = {name: facts(name, TORCHRUN) for name in CASES}
        text = json.dumps({"versions": versions(), "cases": cases}, indent=1, ensure_ascii=False)
        RECORD.write_text(text + "\n", encoding="utf-8")


def facts(name: str, launcher: Sequence[str]) -> dict[str, Any]:
    """Run a case under a launcher: what is compared of it, as JSON keeps it."""
    seen = see(CASES[name], launcher)
    try:
        return dict(json.loads(json.dumps(CASES[name].facts(seen))))
    except (OSError, LookupError) as problem:
        raise AssertionError(f"{problem!r}\n\n{seen.result.everything}") from problem


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """What torchrun did in each case; empty with other versions than those of the record."""
    record = json.loads(RECORD.read_text())
    return dict(record["cases"]) if record["versions"] == versions() else {}


def versions() -> dict[str, str]:
    """The versions that a record holds for: the CPU and CUDA builds of a torch have the same
    launcher.
    """
    return {
        "torch": importlib.metadata.version("torch").partition("+")[0],
        "python": platform.python_version().rpartition(".")[0],
    }


def differences(name: str) -> dict[str, tuple[Any, Any]]:
    """What differs in a case: torchrun's, ours."""
    found = facts(name, (*RALLYPOINT, *CASES[name].ours))
    expected = recorded().get(name) or facts(name, TORCHRUN)
    names = (*expected, *(one for one in found if one not in expected))
    return {
        one: (expected.get(one), found.get(one))
        for one in names
        if expected.get(one) != found.get(one)
    }


def rows() -> set[str]:
    """The first column of the table in the guide."""
    section = GUIDE.read_text().partition("## What differs on purpose\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip() for line in lines[2:]}


@pytest.mark.timeout(600)  # with a torch that is not the recorded one, torchrun runs all cases
def test_what_torchrun_does() -> None:
    """All that is not in the table is the same, and a row that has become untrue is taken out."""
    with ThreadPoolExecutor(2) as jobs:
        cases = dict(zip(CASES, jobs.map(differences, CASES), strict=True))
    wrong = [
        f"{name}: {fact}\n  torchrun: {theirs}\n  ours:     {ours}"
        for name, found in cases.items()
        for fact, (theirs, ours) in found.items()
        if fact not in rows()
    ]
    assert not wrong, "\n".join(wrong)
    assert rows() == {fact for found in cases.values() for fact in found}


def test_the_record_is_what_torchrun_does() -> None:
    """The case that needs least: arguments, variables and exit status of a program that is not
    Python.
    """
    name = "a program"
    assert not recorded() or recorded()[name] == facts(name, TORCHRUN)
