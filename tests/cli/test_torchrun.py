"""The same command lines to torchrun's own parser and to ours. The one module here that imports
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli import args as parser
from rallypoint.cli import options, run_options
from rallypoint.errors import UsageError
from rallypoint.host.devices import Look
from rallypoint.launcher import plan

torchrun = pytest.importorskip("torch.distributed.run", reason="torch is not installed")
multiprocessing = pytest.importorskip("torch.distributed.elastic.multiprocessing")

MACHINE = plan.Machine(
    cpus=4,
    gpus=Look(),
    names=("here",),
    python="python",
    torch="2.13.0",
    now=datetime(2026, 1, 1),
    suffix="a1b2",
    cwd="/",
    runs="/runs",
)


def ours(argv: list[str], environ: dict[str, str] | None = None) -> plan.Options:
    return run_options.read(parser.take_apart(argv, environ or {}))


def theirs(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str] | None = None
) -> argparse.Namespace:
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    parsed: argparse.Namespace = torchrun.parse_args(argv)
    return parsed


def streams(text: str, size: int) -> tuple[int, ...]:
    return tuple(
        int(v)
        for _, v in sorted(multiprocessing.to_map(multiprocessing.Std.from_str(text), size).items())
    )


def program_kind(args: argparse.Namespace) -> str:
    if args.run_path:
        return "script"
    return "command" if args.no_python else "module" if args.module else "script"


def compare(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str] | None = None
) -> None:
    args = theirs(argv, monkeypatch, environ)
    wanted = ours(argv, environ)
    made = plan.make(wanted, environ or {}, MACHINE)
    size = (
        torchrun.determine_local_world_size(args.nproc_per_node)
        if args.nproc_per_node.isdigit()
        else made.slots
    )
    assert made.slots == size
    assert (made.program.kind, made.program.target, list(made.program.args)) == (
        program_kind(args),
        args.training_script,
        args.training_script_args,
    )
    assert made.max_restarts == args.max_restarts
    assert made.role == args.role
    assert made.logs.redirects == streams(args.redirects, size)
    assert made.logs.tee == streams(args.tee, size)
    chosen = (
        {int(part) for part in args.local_ranks_filter.split(",")}
        if args.local_ranks_filter
        else set(range(size))
    )
    assert set(made.logs.console) == chosen & set(range(size))
    assert list(made.logs.stdout_filters) == args.duplicate_stdout_filters
    assert list(made.logs.stderr_filters) == args.duplicate_stderr_filters
    assert made.environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] == args.signals_to_handle
    assert made.grace == (30 if args.shutdown_timeout is None else args.shutdown_timeout)
    assert made.rank_environment[-1]["LOCAL_RANK"] == (
        "0" if args.virtual_local_rank else str(size - 1)
    )


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nproc-per-node 4 train.py --lr 0.1",
        "--nproc_per_node=4 train.py",
        "--nproc_per_node 2 --nnodes 1 --node_rank 0 --master_addr 127.0.0.1 --master_port 29500 train.py",
        "--nnodes=1:1 --standalone --nproc-per-node=3 train.py",
        "--standalone --max-restarts 3 train.py --max-restarts 7",
        "--max_restarts=2 --role trainer train.py --role x",
        "-m package.train --epochs 3",
        "--module package.train",
        "--no-python ./program --flag",
        "--no_python --nproc-per-node 2 bash -c true",
        "--run-path /abs/train.py --x",
        "--run_path --no-python train.py",
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id 7 train.py",
        "--rdzv_backend=static --rdzv_endpoint=127.0.0.1:29501 train.py",
        "--rdzv-conf timeout=900,read_timeout=60 train.py",
        "--nproc-per-node 4 -r 3 train.py",
        "--nproc-per-node 4 -r 0:1,2:3 -t 1:2 train.py",
        "-r3 -t1 train.py",
        "--redirects=2 --tee=0:1 --log-dir logs train.py",
        "--nproc-per-node 4 --local-ranks-filter 0,2 train.py",
        "--local_ranks_filter=0 train.py",
        "--duplicate-stdout-filters apple,or,,ange --duplicate_stderr_filters x train.py",
        "--signals-to-handle SIGTERM,SIGUSR1 train.py",
        "--shutdown-timeout 5 train.py",
        "--nproc-per-node 2 --virtual-local-rank train.py",
        "--monitor-interval 0.5 --start-method fork --event-log-handler null train.py",
        "--numa-binding node --logs-specs mine --local-addr 10.0.0.1 train.py",
        # what stands after the program is the program's
        "train.py --nproc-per-node 8 --standalone -m -h --help --nope",
        "train.py -1 --x=-2 -- ",
        "train.py --lr 1 -- --nproc-per-node 2",
        "--nproc-per-node 2 --nproc-per-node 3 train.py",
    ],
)
def test_same_meaning(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if line.endswith("-- "):
        line = line[
            :-3
            # argparse of some Python versions swallows a `--` right after the script; ours is
            # tested below
        ]
    compare(line.split(), monkeypatch)


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"PET_NPROC_PER_NODE": "3"}, "train.py"),
        ({"PET_NPROC_PER_NODE": "3"}, "--nproc-per-node 2 train.py"),
        ({"PET_MAX_RESTARTS": "4", "PET_ROLE": "actor"}, "train.py"),
        ({"PET_MODULE": "1"}, "package.train"),
        ({"PET_MODULE": "0"}, "train.py"),
        ({"PET_NO_PYTHON": "2"}, "./program"),
        ({"PET_RUN_PATH": "1"}, "train.py"),
        ({"PET_STANDALONE": "1", "PET_RDZV_BACKEND": "etcd"}, "train.py"),
        ({"PET_REDIRECTS": "0:3", "PET_TEE": "1"}, "--tee 2 train.py"),
        ({"PET_LOCAL_RANKS_FILTER": "0"}, "--nproc-per-node 2 train.py"),
        ({"PET_VIRTUAL_LOCAL_RANK": "0"}, "--virtual-local-rank --nproc-per-node 2 train.py"),
        ({"PET_SHUTDOWN_TIMEOUT": "7"}, "train.py"),
        ({"PET_SIGNALS_TO_HANDLE": "SIGTERM"}, "train.py"),
        (
            {
                "PET_NNODES": "1",
                "PET_NODE_RANK": "0",
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": "29500",
            },
            "train.py",
        ),
        ({"PET_DUPLICATE_STDOUT_FILTERS": "a,b"}, "train.py"),
        (
            {"PET_NUMA_BINDING": "nonsense", "PET_LOGS_SPECS": "nonsense"},
            "train.py",
        ),  # torchrun has no variables for these
    ],
)
def test_same_meaning_of_variables(
    environ: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(line.split(), monkeypatch, environ)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--nproc-per-node",
        "--max-restarts x train.py",
        "--master-port x train.py",
        "--start-method thread train.py",
        "--numa-binding moon train.py",
        "--standalone=1 train.py",
        "--no-such-option train.py",
        "--monitor-interval soon train.py",
    ],
)
def test_both_refuse(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        theirs(line.split(), monkeypatch)
    assert refusal.value.code == 2
    with pytest.raises(UsageError):
        ours(line.split())


def actions() -> list[Any]:
    return [a for a in torchrun.get_args_parser()._actions if a.option_strings and a.dest != "help"]


def test_every_flag_of_torchrun_is_in_the_table() -> None:
    missing = [
        spelling
        for action in actions()
        for spelling in action.option_strings
        if spelling not in options.BY_SPELLING
    ]
    assert missing == []


def test_variables_are_those_of_torchrun() -> None:
    from torch.distributed.argparse_util import check_env, env

    for action in actions():
        option = options.BY_SPELLING[action.option_strings[0]]
        variable = f"PET_{action.dest.upper()}" if isinstance(action, env | check_env) else ""
        assert (option.key, option.variable) == (action.dest, variable)


def test_flags_are_flags_and_values_values() -> None:
    for action in actions():
        assert bool(options.BY_SPELLING[action.option_strings[0]].metavar) == (action.nargs != 0), (
            action.dest
        )


def test_defaults_are_those_of_torchrun() -> None:
    made = plan.make(ours(["train.py"]), {}, MACHINE)
    args = torchrun.parse_args(["train.py"])
    assert str(made.slots) == args.nproc_per_node
    assert made.max_restarts == args.max_restarts
    assert made.role == args.role


@pytest.mark.parametrize(
    "line",
    ["--nproc 2 t.py", "--nproc=2 t.py", "--nproc_per 2 t.py", "--redirect 3 t.py", "--max-restart 2 t.py", "--standalo t.py",
     "--rdzv-b c10d t.py", "--max_restart=2 --no-p ./p"],
)  # fmt: skip
def test_abbreviations_that_torchrun_takes(line: str) -> None:
    """They were refused: a command line that has worked for years should not have to be edited."""
    whole = {
        "--nproc": "--nproc-per-node", "--nproc_per": "--nproc_per_node", "--redirect": "--redirects", "--max-restart": "--max-restarts",
        "--standalo": "--standalone", "--rdzv-b": "--rdzv-backend", "--max_restart": "--max_restarts", "--no-p": "--no-python",
    }  # fmt: skip
    words = [
        f"{whole.get(name, name)}{equals}{value}"
        for name, equals, value in (word.partition("=") for word in line.split())
    ]
    assert ours(line.split()) == ours(words)


@pytest.mark.parametrize(
    ("abbreviated", "near"),
    [
        ("--master", "--master-port"),
        ("--log", "--log-dir"),
        ("--gra", "--grace"),
        ("--run", "--run-dir"),
    ],
)
def test_an_abbreviation_of_two_options_or_of_ours_is_answered_with_a_whole_name(
    abbreviated: str, near: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        ours([abbreviated, "2", "train.py"])
    assert refusal.value.code == "option-unknown"
    assert (
        refusal.value.headline
        == f"rallypoint run has no option {abbreviated}; the nearest is {near}"
    )


@pytest.mark.parametrize("line", ["--nproc", "--max-restart=x t.py"])
def test_an_abbreviation_is_named_as_it_was_typed(line: str) -> None:
    with pytest.raises(UsageError, match=line.partition("=")[0]):
        ours(line.split())


@pytest.mark.usefixtures("torch_in_parts")
def test_a_worker_of_torchrun_finds_the_same_variables(tmp_path: Path) -> None:
    """torchrun for real, once: which variables it sets, and to what."""
    script = tmp_path / "dump.py"
    script.write_text(
        "import json, os\nif os.environ['RANK'] == '1': json.dump(dict(os.environ), open('found.json', 'w'))\n"
    )
    names = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH")
    environ = {name: os.environ[name] for name in names if name in os.environ}
    torchruns = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--role",
        "trainer",
        str(script),
    ]
    subprocess.run(
        [sys.executable, *torchruns],
        cwd=tmp_path,
        env=environ,
        check=True,
        capture_output=True,
        timeout=120,
    )
    found = {
        name: value
        for name, value in json.loads((tmp_path / "found.json").read_text()).items()
        if environ.get(name) != value
    }

    made = plan.make(ours(torchruns[2:]), environ, MACHINE)
    planned = plan.variables_of(made, plan.alone(made), 1)
    by_attempt = {
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_ERROR_FILE",
    }
    python_own = {"LC_CTYPE"}  # PEP 538
    ours_alone = {"RALLYPOINT_JOB"}
    assert found.keys() - by_attempt - python_own == planned.keys() - by_attempt - ours_alone
    both = (found.keys() & planned.keys()) - by_attempt
    different = {name for name in both if found[name] != planned[name]}
    # A random one, there as here; and torchrun says 1 where ours says how many processors a rank
    # has.
    assert different == {"TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}
