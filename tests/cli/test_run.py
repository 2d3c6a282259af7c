from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint import launch
from rallypoint.cli import run
from rallypoint.diagnosis.report import Report
from rallypoint.launcher import plan
from rallypoint.launcher.assignment import Program
from rallypoint.launcher.plan import Options

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(target: str, *args: str, kind: str = "script") -> Report | None:
    typed = {"script": (), "module": ("-m",), "command": ("--no-python",)}[kind]
    return run.look_at(Program(kind=kind, target=target, args=args), os.environ, typed)  # type: ignore[arg-type]


def trouble(target: str, *args: str, kind: str = "script") -> Report:
    report = look(target, *args, kind=kind)
    assert report is not None
    assert (report.code, report.then) == ("start-failed", "no rank was started")
    return report


def commands(report: Report) -> list[str]:
    return [help.command for help in report.help]


# --- scripts ---------------------------------------------------------------------------------------------------------


def test_a_good_script(folder: Path) -> None:
    (folder / "train.py").write_text("import not_there\nprint('hello')\n")
    assert look("train.py") is None


def test_a_missing_script_names_the_nearest(folder: Path) -> None:
    (folder / "train.py").touch()
    (folder / "train.txt").touch()
    report = trouble("trian.py", "--lr", "0.1")
    assert (report.headline, report.exit_status) == ("trian.py is not found", 2)
    assert commands(report) == ["rallypoint run train.py --lr 0.1"]
    assert commands(trouble("train")) == ["rallypoint run train.py"]


def test_a_missing_script_in_another_folder(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "train.py").touch()
    assert commands(trouble("src/trane.py")) == ["rallypoint run src/train.py"]
    assert commands(trouble("./src/trane.py")) == ["rallypoint run ./src/train.py"]
    assert commands(trouble(str(folder / "src" / "trane.py"))) == [f"rallypoint run {folder}/src/train.py"]
    report = trouble("nowhere/train.py")
    assert report.help[0].sentence.startswith("the folder nowhere is not there either")


def test_a_module_given_as_a_script(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "train.py").touch()
    assert commands(trouble("package.train", "x"))[0] == "rallypoint run -m package.train x"


def test_python_given_as_a_script() -> None:
    assert commands(trouble("python3", "train.py", "--lr", "1")) == ["rallypoint run train.py --lr 1"]


def test_nothing_near_says_where_we_are(folder: Path) -> None:
    assert commands(trouble("train.py")) == [f"ls {folder}"]
    (folder / "nose.py").touch()  # the same ending makes no two names alike
    assert commands(trouble("such.py")) == [f"ls {folder}"]


def test_the_command_to_type_keeps_the_options(folder: Path) -> None:
    (folder / "train.py").touch()
    report = run.look_at(Program(kind="script", target="trian.py", args=("--lr", "1")), os.environ, ("-n", "2", "--fresh"))
    assert report is not None
    assert commands(report) == ["rallypoint run -n 2 --fresh train.py --lr 1"]
    report = run.look_at(Program(kind="command", target="./train.py", args=("x",)), os.environ, ("-n", "2", "--no-python"))
    assert report is not None
    assert commands(report) == ["chmod +x ./train.py", "rallypoint run -n 2 ./train.py x"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("python3", "train.py"), "rallypoint run --fresh train.py"),
        (("python", "-u", "-m", "package.train", "-u"), "PYTHONUNBUFFERED=1 rallypoint run --fresh -m package.train -u"),
        (("mpirun", "-np", "2", "train.py"), "rallypoint run --fresh -n 2 train.py"),
        (("4", "train.py", "x"), "rallypoint run --fresh -n 4 train.py x"),
        (("torchrun", "--nproc-per-node", "2", "train.py"), "rallypoint run --fresh --nproc-per-node 2 train.py"),
        (("accelerate", "launch", "train.py"), "rallypoint run --fresh train.py"),
        (("accelerate", "train.py"), "rallypoint run --fresh train.py"),
        (("bash", "job.sh"), "rallypoint run --fresh --no-python bash job.sh"),
    ],
)
def test_habits_from_elsewhere_where_the_script_stands(words: tuple[str, ...], command: str) -> None:
    report = run.look_at(Program(kind="script", target=words[0], args=words[1:]), os.environ, ("--fresh",))
    assert report is not None
    assert commands(report) == [command]


def test_a_folder(folder: Path) -> None:
    (folder / "app").mkdir()
    assert trouble("app").headline == "app is a folder, not a script"
    (folder / "app" / "__main__.py").touch()
    assert commands(trouble("app", "x")) == ["rallypoint run app/__main__.py x"]


def test_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")
    assert trouble("pipe.py").headline == "pipe.py is not a file that every rank could read"


def test_an_unreadable_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root may read everything
    report = trouble("train.py")
    assert report.headline == "train.py may not be read by this user"
    assert commands(report) == ["chmod u+r train.py"]


def test_a_name_that_is_too_long() -> None:
    assert trouble("x" * 5000).headline.endswith("cannot be opened: File name too long")


@pytest.mark.parametrize(
    ("source", "where", "headline", "said"),
    [
        (b"x = 1\nprint('hi'\n", "bad.py:2", "SyntaxError: '(' was never closed", "print('hi'"),
        (
            b"def f():\nreturn 1\n",
            "bad.py:2",
            "IndentationError: expected an indented block after function definition on line 1",
            "return 1",
        ),
        (b"if x:\n\ty\n        z\n", "bad.py:3", "TabError: inconsistent use of tabs and spaces in indentation", ""),
        ("x = 'café'".encode("latin-1"), "bad.py:1", "SyntaxError: (unicode error)", ""),
        (b"# coding: nonsense\n", "bad.py", "SyntaxError: ", ""),
        (b"return 3\n", "bad.py:1", "SyntaxError: 'return' outside function", "return 3"),
    ],
)
def test_a_script_that_does_not_compile(source: bytes, where: str, headline: str, said: str, folder: Path) -> None:
    (folder / "bad.py").write_bytes(source)
    report = trouble("bad.py")
    assert report.exit_status == 1
    assert report.where.startswith(where)
    assert report.headline.startswith(f"bad.py does not compile: {headline}")
    assert said in [line.strip() for line in report.said[0].lines] or not said


@pytest.mark.parametrize(
    "source",
    [
        "# -*- coding: latin-1 -*-\nx = 'caf\xe9'\n".encode("latin-1"),
        b"\xef\xbb\xbfx = 1\n",
        b"x = '\\d'\nassert (1, 'x')\n",
        b"",
        b"x=1\r\ny=2\r\n",
    ],
)
def test_scripts_that_python_takes(source: bytes, folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    (folder / "good.py").write_bytes(source)
    assert look("good.py") is None
    assert not recwarn.list  # the ranks give the warnings


def test_our_own_future_imports_do_not_leak(folder: Path) -> None:
    (folder / "good.py").write_text("import sys\nassert __annotations__ == {} or True\n")
    assert look("good.py") is None
    (folder / "late.py").write_text("x = 1\nfrom __future__ import annotations\n")
    assert "from __future__ imports must occur at the beginning" in trouble("late.py").headline


def test_an_archive(folder: Path) -> None:
    (folder / "app.pyz").write_bytes(b"PK\x03\x04\x00\x00")
    assert trouble("app.pyz").headline == "app.pyz is not Python source: it holds zero bytes"


def test_huge_and_compiled_scripts_are_left_to_the_rank(folder: Path) -> None:
    (folder / "huge.py").write_text("(" * (run.LARGEST_CHECKED_SCRIPT + 1))
    (folder / "x.pyc").write_bytes(b"\0\0\0\0")
    assert look("huge.py") is None
    assert look("x.pyc") is None


def test_a_script_nested_too_deep_is_left_to_the_rank(folder: Path) -> None:
    (folder / "deep.py").write_text("x = " + "-" * 100_000 + "1\n")
    assert look("deep.py") is None


# --- programs of any kind --------------------------------------------------------------------------------------------


def test_a_command_along_path() -> None:
    assert look("true", kind="command") is None
    report = trouble("no-such-program", kind="command")
    assert (report.headline, report.exit_status) == ("no-such-program is not found along PATH", 2)


def test_a_command_of_this_folder(folder: Path) -> None:
    program = folder / "tool.py"
    program.write_text("#!/bin/sh\n")
    assert commands(trouble("tool.py", "x", kind="command")) == ["rallypoint run --no-python ./tool.py x"]
    assert commands(trouble("./tool.py", "x", kind="command")) == ["chmod +x ./tool.py", "rallypoint run ./tool.py x"]
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert look("./tool.py", kind="command") is None
    assert commands(trouble("./tol.py", kind="command")) == ["rallypoint run --no-python ./tool.py"]
    assert trouble(str(folder), kind="command").headline == f"{folder} is a folder, not a program"


def test_modules_are_not_looked_for_here() -> None:
    assert look("no.such.module", kind="module") is None


# --- facts and folders -----------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    wanted = Options(program=Program(kind="script", target="x.py"))
    machine = run.this_machine(wanted, {"XDG_STATE_HOME": "/state"})
    assert 1 <= machine.cpus <= (os.cpu_count() or 1)
    assert machine.runs == "/state/rallypoint/runs"
    assert machine.cwd == os.getcwd()
    assert len(machine.suffix) == 4
    assert run.this_machine(wanted, {"XDG_STATE_HOME": "relative", "HOME": "/home/ada"}).runs == "/home/ada/.local/state/rallypoint/runs"


def test_own_addresses_are_known_without_a_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("asked the resolver"))
    assert run._is_local_address("127.0.0.5")
    assert not run._is_local_address("192.0.2.1")  # RFC 5737: nobody's
    assert not run._is_local_address("some-name.invalid")
    assert "127.0.0.5" in run._own_names("127.0.0.5")
    assert socket.gethostname() in run._own_names("")


def test_log_dir_that_is_a_file(folder: Path) -> None:
    (folder / "logs").touch()
    report = run.look_at_log_dir("logs")
    assert report is not None
    assert (report.headline, report.exit_status) == ("--log-dir logs is not a folder", 2)
    assert (
        run.look_at_log_dir("")
        is run.look_at_log_dir("/dev/null")
        is run.look_at_log_dir(str(folder))
        is run.look_at_log_dir("new")
        is None
    )


# --- the command -----------------------------------------------------------------------------------------------------


def test_dry_run_starts_and_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("raise SystemExit('started')\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    assert run.main(["-n", "2", "--fresh", "--dry-run", "--numa-binding", "node", "train.py", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "program     train.py --dry-run\n" in out
    assert "  WORLD_SIZE=2\n" in out
    assert "--numa-binding has no effect here" in out
    assert "hunter2" not in out
    assert err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


def test_trouble_is_shown_instead_of_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.py").write_text("print('hi'\n")
    assert run.main(["-n", "4", "--fresh", "--dry-run", "bad.py"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("SyntaxError") == 2  # headline and Python's own words, once for all ranks
    assert err.startswith("error[start-failed]: bad.py does not compile")


def test_the_plan_goes_to_the_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").touch()
    plans: list[plan.Plan] = []

    def carry_out(made: plan.Plan) -> int:
        plans.append(made)
        return 17

    agent = SimpleNamespace(run=carry_out)
    monkeypatch.setitem(sys.modules, "rallypoint.launcher.agent", agent)
    monkeypatch.setattr(launch, "agent", agent, raising=False)
    assert run.main(["-n", "3", "--fresh", "train.py", "x"]) == 17
    assert (plans[0].world.size, plans[0].program.args) == (3, ("x",))
