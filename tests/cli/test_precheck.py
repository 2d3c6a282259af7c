"""Programs that cannot start, seen before anything is started."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.cli import precheck
from rallypoint.diagnosis.report import Report
from rallypoint.launcher.program import Program

from ..warm_python import WarmPopen

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(target: str, *args: str, kind: str = "script") -> Report | None:
    typed = {"script": (), "module": ("-m",), "command": ("--no-python",)}[kind]
    return precheck.look_at(Program(kind=kind, target=target, args=args), os.environ, typed)  # type: ignore[arg-type]


def trouble(target: str, *args: str, kind: str = "script") -> Report:
    report = look(target, *args, kind=kind)
    assert report is not None
    assert (report.code, report.then) == ("start-failed", "no rank was started")
    return report


def commands(report: Report) -> list[str]:
    return [help.command for help in report.help]


# --- scripts
# --------------------------------------------------------------------------------------------------


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


def test_a_link_to_nothing(folder: Path) -> None:
    (folder / "train.py").symlink_to("trian.py")
    assert trouble("train.py").headline == "train.py is a link to trian.py, which is not found"


def test_a_missing_script_in_another_folder(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "train.py").touch()
    assert commands(trouble("src/trane.py")) == ["rallypoint run src/train.py"]
    assert commands(trouble("./src/trane.py")) == ["rallypoint run ./src/train.py"]
    assert commands(trouble(str(folder / "src" / "trane.py"))) == [
        f"rallypoint run {folder}/src/train.py"
    ]
    # A link that leads to itself is no reason to say that there is no folder.
    (folder / "src" / "loop.py").symlink_to("loop.py")
    assert commands(trouble("src/trane.py")) == ["rallypoint run src/train.py"]
    report = trouble("nowhere/train.py")
    assert report.help[0].sentence.startswith("the folder nowhere is not there either")


def test_a_module_that_is_not_there(folder: Path) -> None:
    """It was found out by the rank, after torch had been imported, and the exit status was 1 where
    that of a missing script is 2.
    """
    (folder / "train.py").touch()
    report = trouble("trian", "--lr", "1", kind="module")
    assert (report.headline, report.exit_status) == ("the module trian is not found", 2)
    assert commands(report)[0] == "rallypoint run -m train --lr 1"
    assert commands(trouble("nothing.like.it", kind="module")) == [
        f"{sys.executable} -m pip install -e ."
    ]


@pytest.mark.parametrize(
    "name", ["train", "spaces.train", "json.tool", "json.not_there", "sys", "elsewhere"]
)
def test_a_module_that_may_be_there(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without __init__.py is one, what is inside a package is the rank's to find, and
    `sys.path` counts.
    """
    for path in ("train.py", "spaces/train.py", "other/elsewhere.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).touch()
    monkeypatch.syspath_prepend(str(folder / "other"))
    assert look(name, kind="module") is None


def test_a_finder_that_fails_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, *_: object) -> None:
            raise RuntimeError("somebody else's")

    monkeypatch.setattr(sys, "meta_path", [Broken()])
    assert look("nothing_like_it", kind="module") is None


def test_a_module_given_as_a_script(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "train.py").touch()
    assert commands(trouble("package.train", "x"))[0] == "rallypoint run -m package.train x"


def test_a_module_of_elsewhere_given_as_a_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a module's file below this folder was looked for, and not where Python finds it."""
    for path in ("other/package/train.py", "other/package/deep/__init__.py", "config/empty"):
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).touch()
    monkeypatch.syspath_prepend(str(folder / "other"))
    for name in ("package.train", "package.train.py", "package.deep"):
        module = name.removesuffix(".py")
        assert commands(trouble(name, "x")) == [f"rallypoint run -m {module} x"], name
    for name in ("package.not_there", "config.yaml", "package.train.deeper", "json.py"):
        assert commands(trouble(name)) == [f"ls {folder}"], name
    assert "package" not in sys.modules


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("python3 train.py --lr 1", "train.py --lr 1"),
        ("python -u train.py -m x", "train.py -m x"),
        ("python -u -OO -m package.train", "-m package.train"),
        ("python -W ignore train.py", "train.py"),
        ("python -uW error::UserWarning -X dev -Ximporttime=2 train.py -W x", "train.py -W x"),
        ("python -Wignore -m package.train", "-m package.train"),
        ("python -c print(1)", "FILE.py"),
        ("accelerate launch train.py", "train.py"),
        (
            "python -m torch.distributed.launch --nproc-per-node=2 train.py",
            "--nproc-per-node=2 train.py",
        ),
        ("mpirun python -u train.py", "train.py"),
    ],
)
def test_python_or_a_launcher_given_as_a_script(typed: str, right: str) -> None:
    assert commands(trouble(*typed.split())) == [f"rallypoint run {right}"]


def test_nothing_near_says_where_we_are(folder: Path) -> None:
    assert commands(trouble("train.py")) == [f"ls {folder}"]
    (folder / "nose.py").touch()  # the same ending makes no two names alike
    assert commands(trouble("such.py")) == [f"ls {folder}"]


def test_the_command_to_type_keeps_the_options(folder: Path) -> None:
    (folder / "train.py").touch()
    report = precheck.look_at(
        Program(kind="script", target="trian.py", args=("--lr", "1")),
        os.environ,
        ("-n", "2", "--fresh"),
    )
    assert report is not None
    assert commands(report) == ["rallypoint run -n 2 --fresh train.py --lr 1"]
    report = precheck.look_at(
        Program(kind="command", target="./train.py", args=("x",)),
        os.environ,
        ("-n", "2", "--no-python"),
    )
    assert report is not None
    assert commands(report) == ["chmod +x ./train.py", "rallypoint run -n 2 ./train.py x"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("python3", "train.py"), "rallypoint run --fresh train.py"),
        (("4", "train.py", "x"), "rallypoint run --fresh -n 4 train.py x"),
        (
            ("torchrun", "--nproc-per-node", "2", "train.py"),
            "rallypoint run --fresh --nproc-per-node 2 train.py",
        ),
        (("accelerate", "train.py"), "rallypoint run --fresh train.py"),
        (("bash", "job.sh"), "rallypoint run --fresh --no-python bash job.sh"),
    ],
)
def test_habits_from_elsewhere_where_the_script_stands(
    words: tuple[str, ...], command: str
) -> None:
    report = precheck.look_at(
        Program(kind="script", target=words[0], args=words[1:]), os.environ, ("--fresh",)
    )
    assert report is not None
    assert commands(report) == [command]


def test_a_script_whose_name_begins_with_a_hyphen_and_has_a_blank_is_no_option() -> None:
    assert commands(trouble("-- 4.py", "x")) == [f"ls {os.getcwd()}"]


def test_a_folder(folder: Path) -> None:
    (folder / "app").mkdir()
    assert trouble("app").headline == "app is a folder without __main__.py, not a script"
    assert commands(trouble("app")) == ["ls app"]
    (folder / "app" / "__main__.py").write_text("optimizer")
    program = Program(kind="script", target="app")
    assert precheck.look_at(program, {}) is None
    assert precheck.source(program) == b"optimizer"


def test_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")
    assert trouble("pipe.py").headline == "pipe.py is not a file that every rank could read"


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_a_file_as_standard_input_is_for_one_rank(folder: Path, name: str) -> None:
    """Rank 1, whose standard input is empty, ran an empty program, and the job ended well."""
    (folder / "train.py").write_text("print('ran')")
    for ranks in 1, 2:
        with open("train.py") as file:
            job = WarmPopen(
                [sys.executable, "-m", "rallypoint", "run", "--fresh", "-n", str(ranks), name],
                stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            out, err = job.communicate(timeout=60)
        if ranks == 1:
            assert (job.returncode, out.count("ran")) == (0, 1), err
        else:
            assert job.returncode == 2
            assert f"{name} is not a file that every rank could read" in err


def test_an_unreadable_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").touch()
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode != os.R_OK
    )  # root may read everything
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
        (
            b"if x:\n\ty\n        z\n",
            "bad.py:3",
            "TabError: inconsistent use of tabs and spaces in indentation",
            "",
        ),
        ("x = 'café'".encode("latin-1"), "bad.py:1", "SyntaxError: (unicode error)", ""),
        (b"# coding: nonsense\n", "bad.py", "SyntaxError: ", ""),
        (b"return 3\n", "bad.py:1", "SyntaxError: 'return' outside function", "return 3"),
    ],
)
def test_a_script_that_does_not_compile(
    source: bytes, where: str, headline: str, said: str, folder: Path
) -> None:
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
def test_scripts_that_python_takes(
    source: bytes, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
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


def test_a_notebook(folder: Path) -> None:
    (folder / "my work.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4}')
    report = trouble("my work.ipynb")
    assert report.headline == "my work.ipynb is a notebook, not Python source"
    assert commands(report) == ["jupyter nbconvert --to script 'my work.ipynb'"]


def test_huge_and_compiled_scripts_are_left_to_the_rank(folder: Path) -> None:
    (folder / "huge.py").write_text("(" * (precheck.LARGEST_CHECKED_SCRIPT + 1))
    (folder / "x.pyc").write_bytes(b"\0\0\0\0")
    assert look("huge.py") is None
    assert look("x.pyc") is None


def test_a_script_nested_too_deep_is_left_to_the_rank(folder: Path) -> None:
    (folder / "deep.py").write_text("x = " + "-" * 100_000 + "1\n")
    assert look("deep.py") is None


# --- programs of any kind
# --------------------------------------------------------------------------------------------


def test_a_command_along_path() -> None:
    assert look("true", kind="command") is None
    report = trouble("no-such-program", kind="command")
    assert (report.headline, report.exit_status) == ("no-such-program is not found along PATH", 2)


def test_a_command_of_this_folder(folder: Path) -> None:
    program = folder / "tool.py"
    program.write_text("#!/bin/sh\n")
    assert commands(trouble("tool.py", "x", kind="command")) == [
        "rallypoint run --no-python ./tool.py x"
    ]
    assert commands(trouble("./tool.py", "x", kind="command")) == [
        "chmod +x ./tool.py",
        "rallypoint run ./tool.py x",
    ]
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert look("./tool.py", kind="command") is None
    assert commands(trouble("./tol.py", kind="command")) == ["rallypoint run --no-python ./tool.py"]
    assert trouble(str(folder), kind="command").headline == f"{folder} is a folder, not a program"
