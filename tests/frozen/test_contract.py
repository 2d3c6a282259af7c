"""The public face of the package is what the files in tests/golden say: names, options, codes,
JSON, files, exit statuses.

A user's program, script or pipeline may rely on each line of them, so a change of one is seen by a
reviewer. Everything is reached as a user reaches it: by public names, the command line and the
files of a run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rallypoint
from rallypoint import errors, testing
from rallypoint.diagnosis.catalogue import CATALOGUE

from ..python_path import WITHOUT_TORCH, python_path
from . import golden, public_names

pytestmark = pytest.mark.usefixtures("torch_in_parts")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RALLYPOINT = (sys.executable, "-P", "-m", "rallypoint")
SECRET = ("--secret-file", "secret")
COMMANDS = ("run", "show", "serve", "explain", "stacks", "stop", "doctor")
FOREIGN = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_.*|RALLYPOINT_.*|TORCH.*|PET_.*|.*_NUM_THREADS|PYTEST_.*|SLURM_.*|COLUMNS|NO_COLOR|FORCE_COLOR|CUDA_.*"
)

VALUES = {
    "--engine": "ray",
    "--nproc-per-node": "3",
    "--preload": "json",
    "--port-range": "20000-20100",
    "--grace": "7",
    "--notice-signal": "USR2",
    "--stall": "60",
    "--on-failure": "continue",
    "--debug-rank": "1",
    "--run-dir": "kept",
    "--log-line-prefix-template": "${rank}: ",
    "--error-format": "json",
    "--max-restarts": "3",
    "--master-addr": "127.0.0.1",
    "--master-port": "29511",
    "--rdzv-id": "seven",
    "--role": "trainer",
    "--log-dir": "logs",
    "--redirects": "3",
    "--tee": "0:1",
    "--local-ranks-filter": "1",
    "--duplicate-stdout-filters": "loss,epoch",
    "--duplicate-stderr-filters": "warn",
    "--signals-to-handle": "SIGTERM",
    "--shutdown-timeout": "9",
    "--rdzv-conf": "timeout=5",
    "--local-addr": "127.0.0.1",
    "--monitor-interval": "2",
    "--start-method": "fork",
    "--event-log-handler": "null",
    "--logs-specs": "default",
    "--numa-binding": "node",
    "--nnodes": "2",
    "--secret-file": "secret",
    "--node-timeout": "10",
    "--node-rank": "0",
    "--rdzv-backend": "c10d",
    "--rdzv-endpoint": "127.0.0.1:29512",
}
"""For each option of `run` that has a value: one that is not its default."""

REFUSED = {
    "--master-addr": "192.0.2.1",
    "--nnodes": "1:2",
    "--node-rank": "1",
    "--rdzv-backend": "etcd",
}
"""For options that change nothing: a value that is refused, given by the option's variable."""

VARIABLES = {
    "--log-line-prefix-template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "--secret-file": "RALLYPOINT_SECRET_FILE",
}
"""Variables of options that are not torchrun's PET_ and the option's name."""


ALWAYS = {
    "attempt-ended", "attempt-started", "ended", "job-ended", "job-started", "port-held",
    "raised", "report", "signal-received", "stop-sent", "worker-started",
}  # fmt: skip
"""Kinds of events that the jobs below have in any case."""

MAY_BE = {"evidence-asked", "phase", "reaped", "template-started"}
"""Kinds of events that depend on what was quicker; their fields are compared when there is one."""


class Job(NamedTuple):
    """A job that has ended."""

    status: int
    out: str
    err: str
    folder: Path

    def document(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()
        ]


class Jobs(NamedTuple):
    """Some short jobs, and what was seen while one of them ran."""

    ended: dict[str, Job]
    stacks: dict[str, Any]
    stopped: int  # exit status of `rallypoint stop`
    ranks: list[dict[str, str]]  # what each rank had in its environment besides what it inherited


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some programs, where all commands run."""
    folder = tmp_path_factory.mktemp("contract")
    (folder / "program.py").write_text("print('hello')\n")
    (folder / "raises.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\ntime.sleep(60)\n"
    )
    (folder / "waits.py").write_text(
        "import json, os, time\nprint(json.dumps(dict(os.environ)), flush=True)\nwhile True:\n    time.sleep(1)\n"
    )
    (folder / "job.log").write_text("[rank1]: RuntimeError: address already in use\n")
    (folder / "nothing.log").write_text("epoch 1\n")
    for name, body in {"ends": "exit $1", "dies": "kill -9 $$"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "secret").touch(0o600)
    (folder / "secret").write_text("known to both machines")
    (folder / "unknown").write_bytes(b"\x00\x01\x02\x03")
    (folder / "unknown").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def environment(torch_in_parts_of_module: None, place: Path) -> dict[str, str]:
    """The environment of all commands: nothing of another launcher's in it, and a home folder of
    its own.
    """
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
    return {**clean, "HOME": str(place), "XDG_STATE_HOME": str(place / "state")}


@pytest.fixture(scope="module")
def jobs(place: Path, environment: dict[str, str]) -> Jobs:
    """Start each of the jobs of this module, several at a time. Their programs need no torch."""
    environment = {**environment, "PYTHONPATH": python_path(WITHOUT_TORCH)}

    def job(name: str, *arguments: str) -> Job:
        folder = place / "runs" / name
        command = [*RALLYPOINT, "run", "--run-dir", str(folder), *arguments]
        done = subprocess.run(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return Job(done.returncode, done.stdout, done.stderr, folder)

    def waiting_job() -> tuple[Job, dict[str, Any], int, list[dict[str, str]]]:
        folder = place / "runs" / "stopped"
        command = [*RALLYPOINT, "run", "--fresh", "-n", "2", "--run-dir", str(folder), "waits.py"]
        with subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher:
            assert launcher.stdout is not None
            words = dict(launcher.stdout.readline().split(" ", 1) for _ in range(2))
            stacks = _command(place, environment, "stacks", "--error-format", "json", str(folder))
            stopped = _command(place, environment, "stop", str(folder))
            out, err = launcher.communicate()
        ranks = [json.loads(words[f"[{rank}]"]) for rank in range(2)]
        added = [
            {name: value for name, value in of.items() if environment.get(name) != value}
            for of in ranks
        ]
        return (
            Job(launcher.returncode, out, err, folder),
            json.loads(stacks.stdout),
            stopped.returncode,
            added,
        )

    with ThreadPoolExecutor(max_workers=3) as pool:
        waiting = pool.submit(waiting_job)
        others = {
            "a rank raises": pool.submit(
                job, "raises", "--fresh", "-n", "2", "--error-format", "json", "raises.py"
            ),
            "every rank ends with 0": pool.submit(job, "good", "--no-python", "./ends", "0"),
            "a rank exits with 7": pool.submit(job, "exits", "--no-python", "./ends", "7"),
            "a rank is killed by SIGKILL": pool.submit(job, "killed", "--no-python", "./dies"),
            "the kernel cannot execute the program": pool.submit(
                job, "unknown", "--no-python", "./unknown"
            ),
        }
        ended = {name: future.result() for name, future in others.items()}
        stopped_job, stacks, stopped, ranks = waiting.result()
    ended["the job is stopped by rallypoint stop"] = stopped_job
    return Jobs(ended, stacks, stopped, ranks)


def _command(
    place: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RALLYPOINT, *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _commands(
    place: Path, environment: dict[str, str], tasks: Sequence[tuple[Sequence[str], dict[str, str]]]
) -> list[tuple[int, str, str]]:
    """Run many short commands; each gives its exit status, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, str(HERE / "forked_commands.py")], input=json.dumps(tasks), cwd=place, env=environment, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    return [(status, out, err) for status, out, err in json.loads(done.stdout)]


def test_python_names_and_signatures() -> None:
    with testing.Network() as network:
        store = network.connect(rank=0)
        store.queue("q").put(1)
        taken = store.queue("q").take()
        [watched] = [store.identity]
        lines = [
            "# rallypoint",
            *public_names.describe(rallypoint),
            "",
            "# rallypoint.testing",
            *public_names.describe(testing),
        ]
        lines += ["", "# what Queue.take gives", *public_names.members(type(taken))]
        lines += ["", "# what Store.identity gives", *public_names.members(type(watched))]
        lines += [
            "",
            "# keys of Store.status()",
            *sorted(store.status()),
            "",
            "# keys of Store.statistics()",
            *sorted(store.statistics()),
        ]
    only_there = {
        n
        for n, v in vars(errors).items()
        if isinstance(v, type)
        and issubclass(v, Exception)
        and n[0] != "_"
        and n not in rallypoint.__all__
    }
    lines += ["", "# rallypoint.errors, besides what rallypoint has", *sorted(only_there)]
    assert all(
        getattr(errors, name) is value
        for name, value in vars(rallypoint).items()
        if hasattr(errors, name) and name[0] != "_"
    )
    golden.compare("python_names.txt", lines)


def test_pytest_plugin(
    pytestconfig: pytest.Config, place: Path, environment: dict[str, str]
) -> None:
    markers = [line for line in pytestconfig.getini("markers") if line.startswith("ranks")]
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--fixtures", "--color=no", "-p", "rallypoint", "--rootdir", str(place), str(place)],
        cwd=place, env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    section = re.search(
        r"fixtures defined from rallypoint\S* -+\n(.*?)\n(?:-{5,}|={5,})", listed, re.DOTALL
    )
    assert section, listed
    fixtures = re.findall(r"^(\w+(?: \[\w+ scope\])?) -- ", section[1], re.MULTILINE)
    golden.compare(
        "pytest_plugin.txt", ["# fixtures", *sorted(fixtures), "", "# markers", *markers]
    )


def test_help_of_every_command(place: Path, environment: dict[str, str]) -> None:
    tasks: list[list[str]] = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    seen = _commands(place, environment, [(task, {}) for task in tasks])
    lines = []
    for task, (status, out, err) in zip(tasks, seen, strict=True):
        assert (status, err) == (0, "")
        lines += [
            f"$ rallypoint {' '.join(task)}",
            *out.replace(rallypoint.__version__, "VERSION").splitlines(),
            "",
        ]
    golden.compare("help.txt", lines)


def test_every_option_of_run(place: Path, environment: dict[str, str]) -> None:
    """What an option changes in `--dry-run`; and its variable, which must change the same."""
    tasks: list[tuple[list[str], dict[str, str]]] = [
        (["run", "--fresh", "--dry-run", "-n", "2", "program.py"], {})
    ]
    rows = list(_options(_commands(place, environment, [(["run", "--help"], {})])[0][1]))
    for names, has_value in rows:
        option = names[-1]
        words = [option, VALUES[option]] if has_value else [option]
        program = {"--module": "json.tool", "--no-python": "./ends", "--help": ""}.get(
            option, "program.py"
        )
        tail = [
            "--fresh",
            "--dry-run",
            *(["-n", "2"] if option != "--nproc-per-node" else []),
            *([program] if program else []),
        ]
        variable = _variable(option)
        underscored = "--" + option[2:].replace("-", "_")
        tasks.append((["run", underscored, *words[1:], *tail], {}))
        tasks.append((["run", *tail], {variable: VALUES[option] if has_value else "1"}))
        if option in REFUSED:
            tasks.append((["run", *tail], {variable: REFUSED[option]}))
        else:
            tasks.append(
                (["run", option, "", *tail] if has_value else ["run", f"{option}=1", *tail], {})
            )
    base, *seen = _commands(place, environment, tasks)
    unchanged = _steady(base, place)
    lines = ["$ rallypoint run --fresh --dry-run -n 2 program.py", *unchanged]
    for index, (names, has_value) in enumerate(rows):
        option, variable = names[-1], _variable(names[-1])
        given, by_variable, wrong = (_steady(one, place) for one in seen[3 * index : 3 * index + 3])
        lines += ["", f"$ {', '.join(names)}{f' {VALUES[option]}' if has_value else ''}"]
        if by_variable == given != unchanged:
            lines.append(f"  the same by {variable}")
        if option != "--help":
            lines += [f"  {line}" for line in given if line not in unchanged]
        how = (
            f"{variable}={REFUSED[option]}"
            if option in REFUSED
            else "empty"
            if has_value
            else "with a value"
        )
        lines.append(f"  {how}: {_code(wrong)}")
    golden.compare("options_of_run.txt", lines)


def _variable(option: str) -> str:
    return VARIABLES.get(option) or f"PET_{option[2:].replace('-', '_').upper()}"


def _options(text: str) -> Iterator[tuple[list[str], bool]]:
    """Find the options in a command's help: their names, the long one last, and whether they have a
    value.
    """
    for line in text.splitlines():
        if found := re.match(r"  (?:(-\w), )?(--[a-z0-9-]+)( [A-Za-z<]\S*)?(?:  |$)", line):
            yield [name for name in found.group(1, 2) if name], bool(found[3])


def _steady(seen: tuple[int, str, str], place: Path) -> list[str]:
    status, out, err = seen
    text = (out + err).replace(str(place), "HERE")
    text = re.sub(r"\d{8}-\d{6}-[0-9a-f]+", "JOB", text)
    text = re.sub(r"\(torch \S+\)|\(no torch installed\)", "(torch VERSION)", text)
    text = re.sub(r"(take ports of) .*", r"\1 ...", text)  # the range is the kernel's
    text = re.sub(r"OMP_NUM_THREADS=\d+.*", "OMP_NUM_THREADS=N", text)
    return [f"exit status {status}", *(line for line in text.splitlines() if line.strip())]


def _code(lines: list[str]) -> str:
    found = re.search(r"^\w+\[([\w-]+)\]", "\n".join(lines), re.MULTILINE)
    return f"{lines[0]}{f', {found[1]}' if found else ''}"


def test_error_codes(place: Path, environment: dict[str, str]) -> None:
    """Every code, and what it means in a line."""
    listed = _command(place, environment, "explain").stdout
    golden.compare(
        "error_codes.txt", sorted(re.sub(r" +", " ", line) for line in listed.splitlines())
    )


def test_owner_of_each_error_code() -> None:
    """Whose affair each code is."""
    titles = {
        "program": "Your program", "usage": "How rallypoint was called", "machine": "This machine",
        "person": "Somebody wanted it", "launcher": "rallypoint itself",
    }  # fmt: skip
    golden.compare(
        "error_owners.txt",
        sorted(f"{cause.code}: {titles[cause.affair]}" for cause in CATALOGUE.values()),
    )


def test_json_documents(place: Path, environment: dict[str, str], jobs: Jobs) -> None:
    """Keys and kinds of values of each document for programs."""
    raised = jobs.ended["a rank raises"]
    commands: dict[str, list[str]] = {
        "show --error-format json": ["show", str(raised.folder)],
        "show --list --error-format json": ["show", "--list"],
        "doctor --error-format json": ["doctor", "--only", "versions,memory"],
        "doctor --peer --error-format json": ["doctor", "--peer", "127.0.0.1:1", *SECRET],
        "explain FILE --error-format json": ["explain", "job.log"],
        "run --error-format json, wrong usage": ["run", "--master-port", "x", "program.py"],
    }
    made: list[tuple[list[str], dict[str, str]]] = [
        (["run", "--no-python", "./ends", "0"], {})
    ]  # for the list: a run that is kept
    seen = _commands(
        place,
        environment,
        [
            *made,
            *(
                ([words[0], "--error-format", "json", *words[1:]], {})
                for words in commands.values()
            ),
        ],
    )[1:]
    lines: list[str] = []
    for name, (_, out, err) in zip(commands, seen, strict=True):
        documents = [json.loads(line) for line in (out or err).splitlines()]
        shapes = golden.merged_shapes(documents)
        if (
            name == "doctor --error-format json"
        ):  # what is found differs between machines; the next document has it all
            shapes = [line for line in shapes if "[]" not in line]
        lines += ["", f"# {name}", *shapes]
    folders = [job.folder for job in jobs.ended.values() if job.folder.exists()]
    reports = [
        json.loads((folder / "report.json").read_text())
        for folder in folders
        if (folder / "report.json").exists()
    ]
    lines += ["", "# plan.json", *golden.merged_shapes([raised.document("plan.json")])]
    lines += ["", "# report.json", *golden.merged_shapes(reports)]
    lines += [
        "",
        "# run --error-format json, on stderr",
        *golden.merged_shapes([json.loads(raised.err)]),
    ]
    for rank in jobs.stacks["ranks"]:
        rank["stands_for"] = None  # a number as soon as it is known
    lines += ["", "# stacks --error-format json", *golden.merged_shapes([jobs.stacks])]
    golden.compare("json_documents.txt", lines[1:])


def test_files_of_a_run(jobs: Jobs) -> None:
    """The files of a run folder, and what each kind of line in events.jsonl has."""
    folder = jobs.ended["a rank raises"].folder
    lines = ["# files", *sorted(path.name for path in folder.iterdir())]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for job in jobs.ended.values():
        for event in job.events() if job.folder.exists() else []:
            kinds.setdefault(event["what"], []).append(event)
    golden.compare("files_of_a_run.txt", lines)
    rows: dict[str, list[str]] = {}
    for what, events in kinds.items():
        shapes = golden.merged_shapes(events)
        rows[what] = [
            f"{what}.{line}"
            for line in shapes
            if not line.startswith(("(document)", "what:", "details:"))
        ]
    for line in golden.promised("events.txt"):  # of the others, not each is seen in each run
        what = line.partition(".")[0]
        if what not in ALWAYS and what not in kinds:
            rows.setdefault(what, []).append(line)
    rows = {what: row for what, row in rows.items() if what in ALWAYS or what in MAY_BE}
    golden.compare("events.txt", [line for _, row in sorted(rows.items()) for line in row])


def test_environment_of_a_rank(place: Path, jobs: Jobs) -> None:
    """What a rank has in its environment besides what it inherits; what differs from run to run has
    another name for it.
    """
    lines = []
    for rank, variables in enumerate(jobs.ranks):
        lines.append(f"# rank {rank} of 2")
        for name, value in sorted(variables.items()):
            value = re.sub(r"\d{8}-\d{6}-[0-9a-f]+", "JOB", value.replace(str(place), "HERE"))
            value = "FAMILY" if name == "RALLYPOINT_FAMILY" else value
            value = re.sub(r"unix:///.*", "unix:///SOCKET", value)
            lines.append(f"{name}={'N' if name in ('MASTER_PORT', 'OMP_NUM_THREADS') else value}")
    golden.compare("environment_of_a_rank.txt", lines)


def test_exit_statuses(place: Path, environment: dict[str, str], jobs: Jobs) -> None:
    commands: dict[str, list[str]] = {
        "rallypoint without a command": [],
        "a command that is not there": ["strat"],
        "run with an option that is not there": ["run", "--bogus", "program.py"],
        "run without a program": ["run", "-n", "2"],
        "run with a script that is not there": ["run", "absent.py"],
        "run --dry-run": ["run", "--fresh", "--dry-run", "program.py"],
        "run with a run folder that cannot be made": [
            "run",
            "--no-python",
            "--run-dir",
            "/proc/none",
            "./ends",
            "0",
        ],
        "show of a run that is there": ["show", str(jobs.ended["a rank raises"].folder)],
        "show of a run that is not there": ["show", "absent"],
        "stacks of a job that has ended": ["stacks", str(jobs.ended["a rank raises"].folder)],
        "stop of a job that has ended": ["stop", str(jobs.ended["a rank raises"].folder)],
        "explain of a code": ["explain", "rank-raised"],
        "explain of a log with a cause": ["explain", "job.log"],
        "explain of a log without a cause": ["explain", "nothing.log"],
        "explain of a file that is not there": ["explain", "absent.log"],
        "doctor finds nothing broken": ["doctor", "--only", "versions"],
        "doctor finds something broken": ["doctor", "--peer", "127.0.0.1:1", *SECRET],
    }
    seen = _commands(place, environment, [(words, {}) for words in commands.values()])
    lines = [f"{job.status} {name}" for name, job in jobs.ended.items()]
    lines += [
        f"{jobs.stopped} stop of a job that runs",
        *(f"{one[0]} {name}" for name, one in zip(commands, seen, strict=True)),
    ]
    golden.compare("exit_statuses.txt", lines)
