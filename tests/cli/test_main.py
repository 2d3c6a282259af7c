from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rallypoint as rallypoint_package
from rallypoint.cli import main as cli

SOURCE = Path(cli.__file__).parents[2]
DEADLINE = 30.0  # seconds; each of these takes a tenth of one


def rallypoint(*argv: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """A real `rallypoint`, from the source that is tested."""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error"}
    start = code or "import sys; from rallypoint.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", start, *argv],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def modules_after(*argv: str) -> set[str]:
    ended = rallypoint(
        *argv,
        code="import sys; from rallypoint.cli.main import main; main(); print(*sys.modules, file=sys.stderr, flush=True)",
    )
    return set(ended.stderr.split())


def test_a_job_on_one_node_loads_no_part_for_several(tmp_path: Path) -> None:
    """They were a fifth of the processor time that a start takes, and Python's reader of metadata
    was a tenth.
    """
    (tmp_path / "train.py").touch()
    loaded = modules_after("run", "--fresh", str(tmp_path / "train.py"))
    assert "rallypoint.launcher.agent.agent" in loaded
    slow = ("rallypoint.launcher.nodes.", "rallypoint.store.server.", "importlib.metadata", "torch")
    assert [name for name in loaded if name.startswith(slow)] == []


def test_a_module_of_the_working_directory_is_not_taken_for_pythons(tmp_path: Path) -> None:
    """`python -m` puts that directory first; it was an error of ours, and a status of 70."""
    (tmp_path / "random.py").write_text("raise RuntimeError('of the user')\n")
    (tmp_path / "train.py").touch()
    started = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", "--fresh", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (started.returncode, started.stdout + started.stderr) == (0, "")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main(["-h"]) == 0
    out, err = capsys.readouterr()
    assert all(f"rallypoint {name}" in out for name in cli.COMMANDS)
    assert err == ""


@pytest.mark.parametrize("word", ["--help", "help"])
def test_help_of_a_command_by_a_word_in_front(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert cli.main([word, "serve"]) == cli.main(["serve", "--help"]) == 0
    first, second = capsys.readouterr().out.split("usage: ")[1:]
    assert first == second
    assert first.startswith("rallypoint serve")


def test_no_command_is_help_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", cli.help_text())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rallypoint {rallypoint_package.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "headline", "command"),
    [
        (
            ["rnu", "train.py"],
            "error[usage]: rallypoint has no command rnu; the nearest is run",
            "rallypoint run train.py",
        ),
        (
            ["train.py", "--lr", "1"],
            "error[usage]: rallypoint train.py: no command is given",
            "rallypoint run train.py --lr 1",
        ),
        (
            ["-n", "4", "train.py"],
            "error[usage]: rallypoint -n: no command is given",
            "rallypoint run -n 4 train.py",
        ),
        (
            ["--verison"],
            "error[option-unknown]: rallypoint has no option --verison; the nearest is --version",
            "rallypoint --version",
        ),
        (
            ["./a b"],
            "error[usage]: rallypoint ./a b: no command is given",
            "rallypoint run './a b'",
        ),
        (
            ["torchrun", "-n", "2", "train.py"],
            "error[usage]: rallypoint has no command torchrun; the nearest is run",
            "rallypoint run -n 2 train.py",
        ),
        (
            ["accelerate", "t.py"],
            "error[usage]: rallypoint has no command accelerate; the nearest is run",
            "rallypoint run t.py",
        ),
        (
            ["mpirun", "-np", "2", "python", "t.py"],
            "error[usage]: rallypoint has no command mpirun; the nearest is run",
            "rallypoint run -np 2 python t.py",
        ),
        (
            ["accelerate", "launch", "t.py"],
            "error[usage]: rallypoint has no command accelerate; the nearest is run",
            "rallypoint run launch t.py",
        ),
        (
            ["ps"],
            "error[usage]: rallypoint has no command ps; the nearest is show --list",
            "rallypoint show --list",
        ),
        (
            ["status"],
            "error[usage]: rallypoint has no command status; the nearest is show --list",
            "rallypoint show --list",
        ),
        (
            ["status"],
            "error[usage]: rallypoint has no command status; the nearest is show --list",
            "rallypoint stacks",
        ),
        (
            ["ps", "-a"],
            "error[usage]: rallypoint has no command ps; the nearest is show --list",
            "rallypoint show --list -a",
        ),
        (
            ["logs", "ab12"],
            "error[usage]: rallypoint has no command logs; the nearest is show",
            "rallypoint show ab12",
        ),
        (
            ["RUN", "--nproc", "2", "t.py"],
            "error[usage]: rallypoint has no command RUN; the nearest is run",
            "rallypoint run --nproc 2 t.py",
        ),
        (
            ["python3", "-u", "t.py"],
            "error[usage]: rallypoint has no command python3; the nearest is run",
            "rallypoint run -u t.py",
        ),
        (
            ["python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "t.py"],
            "error[usage]: rallypoint has no command python; the nearest is run",
            "rallypoint run -m torch.distributed.run --nproc_per_node 2 t.py",
        ),
        (
            ["rank-killed"],
            "error[usage]: rallypoint has no command rank-killed; the nearest is explain",
            "rallypoint explain rank-killed",
        ),
        (
            ["train.log"],
            "error[usage]: rallypoint has no command train.log; the nearest is explain",
            "rallypoint explain train.log",
        ),
        (
            ["-v"],
            "error[option-unknown]: rallypoint has no option -v; the nearest is --version",
            "rallypoint --version",
        ),
        (["--json"], "error[option-unknown]: rallypoint has no option --json", "rallypoint --help"),
        ([""], "error[usage]: rallypoint has no command ''", "rallypoint --help"),
        (
            ["version"],
            "error[usage]: rallypoint has no command version; the nearest is --version",
            "rallypoint --version",
        ),
        (
            ["serve", "--port 29500"],
            "error[usage]: --port 29500 is one word with a blank in it, and no option",
            "--port 29500",
        ),
        (
            ["doctor", "shm"],
            "error[usage]: rallypoint doctor takes options only, and got shm",
            "rallypoint doctor --only shm",
        ),
        (
            ["doctor", "ports", "shm"],
            "error[usage]: rallypoint doctor takes options only, and got ports",
            "rallypoint doctor --only ports,shm",
        ),
        (
            ["serve", "29500"],
            "error[usage]: rallypoint serve takes options only, and got 29500",
            "rallypoint serve --help",
        ),
        (
            ["explain", "--json", "x"],
            "error[option-unknown]: rallypoint explain has no option --json; the nearest is --error-format=json",
            "rallypoint explain --error-format=json x",
        ),
        (
            ["doctor", "--json", "--only", "shm"],
            "error[option-unknown]: rallypoint doctor has no option --json; the nearest is --error-format=json",
            "rallypoint doctor --error-format=json --only shm",
        ),
        (["frobnicate"], "error[usage]: rallypoint has no command frobnicate", "rallypoint --help"),
        (["run", "-n", "0", "x.py"], "error[usage]: -n 0 starts no rank", "-n 4"),
    ],
)
def test_wrong_usage(
    argv: list[str], headline: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == headline
    assert command in [line.strip() for line in lines]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        ["--error-format", "json", "-n", "0", "x.py"],
        ["--error-format=json", "--nprocs", "2", "x.py"],
    ],
)
def test_wrong_usage_as_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert cli.main(["run", *argv]) == 2
    said = json.loads(capsys.readouterr().err)
    assert said["exit_status"] == 2
    assert said["reports"][0]["code"] in ("usage", "option-unknown")
    assert said["reports"][0]["help"]


@pytest.mark.parametrize(
    ("environ", "colored"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colour(
    environ: dict[str, str],
    colored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    cli.main(["run"])
    assert ("\x1b[" in capsys.readouterr().err) == colored


PRINTS = [
    ["--help"],
    ["--version"],
    ["explain"],
    ["explain", "rank-killed"],
    ["explain", "--help"],
    ["run", "--help"],
    ["run", "--fresh", "--dry-run", __file__],
    ["serve", "--help"],
]


def in_a_shell(argv: list[str], redirection: str) -> tuple[int, str, str]:
    """`rallypoint argv` with a redirection or a pipe behind it, in bash: its own exit status,
    stdout, stderr.
    """
    command = shlex.join([sys.executable, "-m", "rallypoint", *argv])
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    script = f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("argv", PRINTS, ids=" ".join)
def test_a_standard_output_that_is_full(argv: list[str]) -> None:
    assert in_a_shell(argv, "> /dev/full") == (
        1,
        "",
        "rallypoint: cannot write to stdout: No space left on device\n",
    )


@pytest.mark.parametrize("argv", PRINTS, ids=" ".join)
def test_a_standard_output_that_is_closed(argv: list[str]) -> None:
    assert in_a_shell(argv, ">&-") == (0, "", "")


def test_a_standard_output_that_lacks_a_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's words that the encoding of stdout has no bytes for were a fault of ours."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    argv = ["run", "--fresh", "--dry-run", __file__, "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n"]
    status, out, err = in_a_shell(argv, "")
    assert (status, err) == (0, "")
    assert "gr\\xfcn" in out


@pytest.mark.parametrize("argv", PRINTS, ids=" ".join)
def test_a_reader_that_goes_away_makes_no_noise(argv: list[str]) -> None:
    """A shell's status for SIGPIPE, when the reader is gone for certain before anything is
    written.
    """
    ended = rallypoint(
        *argv,
        code="import os, sys; from rallypoint.cli.main import main; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.exit(main())",
    )
    assert (ended.returncode, ended.stderr) == (141, "")


def test_the_first_line_of_a_long_list() -> None:
    status, out, err = in_a_shell(["explain"], "| head -n 1")
    assert (status in (0, 141), len(out.splitlines()), err) == (True, 1, "")


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full"])
def test_a_standard_error_that_takes_nothing(redirection: str) -> None:
    assert in_a_shell([], redirection)[:2] == (2, "")
    assert in_a_shell(["rnu"], redirection)[:2] == (2, "")


def test_closed_streams_make_no_traceback() -> None:
    closed = "import os, sys; {}; from rallypoint.cli.main import main; sys.exit(main(['run', '-n', '0', 'x.py']))"
    ended = rallypoint(code=closed.format("sys.stderr = None"))
    assert (ended.returncode, ended.stderr) == (2, "")
    ended = rallypoint(code=closed.format("sys.stdout = None"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("error[usage]: -n 0 starts no rank")


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["run", "--help"],
        ["--version"],
        ["run", "-n", "0", "x.py"],
        ["run", "--dry-run", __file__],
    ],
)
def test_nothing_heavy_is_imported(argv: list[str]) -> None:
    loaded = modules_after(*argv)
    assert "rallypoint.cli.main" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "rich", "psutil", "asyncio", "cloudpickle"})


def test_help_imports_little() -> None:
    assert modules_after("--help").isdisjoint(
        {"msgspec", "argparse", "subprocess", "rallypoint.cli.run", "rallypoint.launcher.plan"}
    )
