"""scripts/: finding a Python, the stamp, taking turns, and mending, with a pip that only writes
down what it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .python_path import TORCH_WITHOUT_COMPILER, python_path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
SOON = 60.0
"""Seconds after which a process of a test is taken to hang."""

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="not a checkout: there is no scripts/")

FAKE_PIP = """
import os, pathlib, sys, time
if "--version" in sys.argv:
    sys.exit(0)
calls = pathlib.Path({calls!r})
with calls.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
gate = pathlib.Path({gate!r})
if gate.exists():
    (gate / "entered").touch()
    while (gate / "closed").exists():
        time.sleep(0.01)
if os.environ.get("FAKE_PIP_FAILS"):
    print("\\n".join("line %d" % n for n in range(1, 41)))
    sys.exit(3)
site = pathlib.Path(__file__).parent.parent
for word in sys.argv[1:]:
    if word.startswith("torch=="):
        info = site / "torch-{{}}.dist-info".format(word[7:])
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: torch\\nVersion: {{}}\\n".format(word[7:]))
        (info / "RECORD").write_text(info.name + "/METADATA,,\\n")
"""


class Checkout:
    """A folder with our scripts, and a .venv whose pip is fake. `venv`: a new one, to be copied."""

    def __init__(self, root: Path, folder: Path, venv: Path) -> None:
        self.root = root
        self._calls = folder / "calls"
        self.gate = folder / "gate"
        for name in ("environment.py", "environment.sh"):
            (root / "scripts").mkdir(exist_ok=True)
            shutil.copy(SCRIPTS / name, root / "scripts")
        (root / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["builder"]\n[project]\nname = "x"\ndependencies = ["msgspec>=1"]\n'
            '[project.optional-dependencies]\ndemo = ["scikit-learn"]\ndev = ["pytest"]\n'
        )
        (root / "constraints.txt").write_text("# pins\ntorch==2.13.0\nlightning==2.6.6\n")
        shutil.copytree(venv, root / ".venv", symlinks=True)
        (self.site / "pip").mkdir()
        (self.site / "pip" / "__init__.py").touch()
        (self.site / "pip" / "__main__.py").write_text(
            FAKE_PIP.format(calls=str(self._calls), gate=str(self.gate))
        )

    @property
    def site(self) -> Path:
        return next((self.root / ".venv" / "lib").glob("python*")) / "site-packages"

    @property
    def stamp(self) -> Path:
        return self.root / ".venv" / "rallypoint-stamp.json"

    def calls(self) -> list[str]:
        """What pip was asked for since the last look."""
        text = self._calls.read_text() if self._calls.exists() else ""
        self._calls.unlink(missing_ok=True)
        return text.splitlines()

    def start(self, *extras: str, **variables: str) -> subprocess.Popen[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in {"PYTHON", "RALLYPOINT_TORCH"}
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-B", self.root / "scripts" / "environment.py", *extras],
            env=environment | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def prepare(self, *extras: str, status: int = 0, **variables: str) -> str:
        process = self.start(*extras, **variables)
        said, _ = process.communicate(timeout=SOON)
        assert process.returncode == status, said
        return said

    def close_gate(self) -> None:
        """From now on pip waits inside until the gate is opened."""
        self.gate.mkdir(exist_ok=True)
        (self.gate / "entered").unlink(missing_ok=True)
        (self.gate / "closed").touch()

    def wait_inside(self) -> None:
        until(lambda: (self.gate / "entered").exists())

    def open_gate(self) -> None:
        shutil.rmtree(self.gate, ignore_errors=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def new_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .venv without pip: making one takes several times as long as copying it."""
    made = tmp_path_factory.mktemp("new") / ".venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", made], check=True)
    return made


@pytest.fixture
def checkout(tmp_path: Path, new_venv: Path) -> Iterator[Checkout]:
    root = tmp_path / "a folder"
    root.mkdir()
    made = Checkout(root, tmp_path, new_venv)
    yield made
    made.open_gate()


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SCRIPTS / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# finding a Python


def find_python(path: Path, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        ["/bin/bash", "-c", f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; find_python; echo "found $python"'],
        env={"PATH": f"{path}"} | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH that has coreutils' dirname, and no Python yet."""
    folder = tmp_path / "some commands"
    folder.mkdir()
    dirname = shutil.which("dirname")
    assert dirname is not None
    (folder / "dirname").symlink_to(dirname)
    return folder


def answering(place: Path, version: str, status: int) -> None:
    """A Python that answers the question of `find_python` so."""
    place.write_text(f"#!/bin/sh\necho '{version}'\nexit {status}\n")
    place.chmod(0o755)


def test_the_first_python_that_is_good_enough_is_taken(commands: Path) -> None:
    answering(commands / "python3", "3.9.2 (too old)", 1)
    answering(commands / "python3.12", "3.12.4", 0)
    answering(commands / "python3.11", "3.11.1", 0)
    assert find_python(commands) == (0, "found python3.12\n")


def test_a_python_that_is_asked_for_is_taken(commands: Path) -> None:
    answering(commands / "python3", "3.12.4", 0)
    assert find_python(commands, PYTHON=sys.executable) == (0, f"found {sys.executable}\n")


def test_one_line_says_what_was_found_and_what_to_install(commands: Path) -> None:
    answering(commands / "python3", "3.9.2 (too old)", 1)
    answering(commands / "python3.12", "3.12.4 (cannot make a virtual environment)", 1)
    status, said = find_python(commands)
    assert status != 0
    assert said == (
        "no Python 3.11 or later that can make a virtual environment: python3 3.9.2 (too old), python3.13 was not found, "
        "python3.12 3.12.4 (cannot make a virtual environment), python3.11 was not found; "
        "on Debian: apt install python3.12-venv, or set PYTHON to one\n"
    )


def test_a_python_that_is_asked_for_and_not_there_is_not_replaced_by_another(
    commands: Path,
) -> None:
    answering(commands / "python3", "3.12.4", 0)
    status, said = find_python(commands, PYTHON="/no/python")
    assert status != 0
    assert said.startswith(
        "no Python 3.11 or later that can make a virtual environment: /no/python was not found;"
    )


# the stamp


def test_first_everything_then_nothing(checkout: Checkout) -> None:
    checkout.prepare("demo")
    torch, requirements, project = checkout.calls()
    assert torch.endswith(f"--constraint {checkout.root}/constraints.txt -- torch==2.13.0")
    assert requirements.endswith("-- scikit-learn msgspec>=1 builder")
    assert project.endswith(f"--no-deps --no-index --no-build-isolation --editable {checkout.root}")
    assert all("--only-binary=:all:" in call for call in (torch, requirements, project))

    assert checkout.prepare("demo").startswith("environment: .venv is ready")
    assert checkout.calls() == []


def test_the_torch_that_was_chosen_stays(checkout: Checkout) -> None:
    """torch 2.15.0 was chosen and installed, and 2.13.0 in its place at once: lightning needs
    torch, and the pins said which.
    """
    checkout.prepare("demo", RALLYPOINT_TORCH="torch==2.15.0")
    torch, requirements, _ = checkout.calls()
    assert torch.endswith("-- torch==2.15.0")
    found = re.search(r"--constraint (.*) -- ", requirements)
    assert found
    assert Path(found[1]).read_text() == "lightning==2.6.6\n"


def test_another_extra_adds_only_that_extra(checkout: Checkout) -> None:
    checkout.prepare("demo")
    checkout.calls()
    checkout.prepare("demo", "dev")
    (requirements,) = checkout.calls()
    assert requirements.endswith("-- pytest")
    checkout.prepare("demo")
    checkout.prepare("dev", "demo")
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_asked_for_installs_again(checkout: Checkout, name: str) -> None:
    checkout.prepare("demo")
    checkout.calls()
    with (checkout.root / name).open("a") as file:
        file.write("\n# changed\n")
    checkout.prepare("demo")
    assert len(checkout.calls()) == 2  # not torch: it is there


def test_a_checkout_that_was_moved_is_installed_again(checkout: Checkout) -> None:
    checkout.prepare("demo")
    checkout.calls()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.prepare("demo")
    assert checkout.calls()[-1].endswith(f"--editable {checkout.root}")


# torch


def test_a_torch_that_is_there_is_kept(checkout: Checkout) -> None:
    info = checkout.site / "torch-2.9.0+rocm.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+rocm\n")
    assert "torch 2.9.0+rocm kept" in checkout.prepare("demo", RALLYPOINT_TORCH="torch==2.10.0")
    assert not [call for call in checkout.calls() if "torch==" in call]


def test_the_users_choice_of_torch_is_not_held_to_our_pins(checkout: Checkout) -> None:
    checkout.prepare("demo", RALLYPOINT_TORCH="torch==2.10.0")
    assert checkout.calls()[0].endswith("--no-user -- torch==2.10.0")


# failing, being interrupted, and mending


def test_the_end_of_pips_output_is_shown_when_it_fails(checkout: Checkout) -> None:
    said = checkout.prepare("demo", status=1, FAKE_PIP_FAILS="1").splitlines()
    failed = said.index("torch==2.13.0 failed:")
    assert said[failed + 1 :] == [
        *(f"  | line {n}" for n in range(31, 41)),
        f"exit status 3; the whole log is {checkout.root}/.venv.log",
    ]
    assert not checkout.stamp.exists()
    checkout.prepare("demo")
    assert checkout.stamp.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_install_that_was_interrupted_is_mended(
    checkout: Checkout, number: signal.Signals
) -> None:
    checkout.close_gate()
    process = checkout.start("demo")
    checkout.wait_inside()
    process.send_signal(number)
    if number == signal.SIGKILL:
        # pip is still there, and the lock with it: the next run must not start before it is done.
        process.communicate(timeout=SOON)
        behind = checkout.start("demo")
        assert behind.stdout is not None
        assert (
            behind.stdout.readline() == f"waiting for process {process.pid}, which is installing\n"
        )
        checkout.open_gate()
        said = behind.communicate(timeout=SOON)[0]
        assert behind.returncode == 0, said
    else:
        said, _ = process.communicate(timeout=SOON)
        assert said.endswith("interrupted; the next run goes on from here\n")
        assert process.returncode == 128 + number
        assert not checkout.stamp.exists()
        checkout.open_gate()
        said = checkout.prepare("demo")
    assert "an interrupted install is mended" in said
    assert checkout.stamp.exists()
    assert not (checkout.root / ".venv" / "rallypoint-unfinished").exists()


def test_what_was_half_installed_is_forgotten_and_a_torch_of_the_users_is_not(
    checkout: Checkout,
) -> None:
    for name, age in (("torch-2.9.0", 3600), ("half-1.0", 0), ("whole-1.0", 0)):
        info = checkout.site / f"{name}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\nVersion: 1.0\n"
        )
        if name.startswith("whole"):
            (info / "RECORD").write_text(
                f"{info.name}/METADATA,sha256=x,{(info / 'METADATA').stat().st_size}\n{info.name}/RECORD,,\n"
            )
        os.utime(info, (time.time() - age,) * 2)
    marker = checkout.root / ".venv" / "rallypoint-unfinished"
    marker.touch()
    os.utime(marker, (time.time() - 60,) * 2)
    assert "an interrupted install is mended: half " in checkout.prepare("demo")
    assert [info.name for info in sorted(checkout.site.glob("*.dist-info"))] == [
        "torch-2.9.0.dist-info",
        "whole-1.0.dist-info",
    ]


def test_a_distribution_is_complete_when_every_file_has_its_size(
    environment: ModuleType, tmp_path: Path
) -> None:
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    assert not environment.is_complete(info)
    (tmp_path / "thing.py").write_text("x = 1\n")
    (info / "RECORD").write_text(
        "thing.py,sha256=x,6\n__pycache__/thing.pyc,,\nthing-1.0.dist-info/RECORD,,\n"
    )
    assert environment.is_complete(info)
    (tmp_path / "thing.py").write_text("x =")
    assert not environment.is_complete(info)
    (tmp_path / "thing.py").unlink()
    assert not environment.is_complete(info)


def break_python(venv: Path) -> None:
    for link in (venv / "bin").glob("python*"):
        link.unlink()
    (venv / "bin" / "python").symlink_to("/no/python")


def break_pip(venv: Path) -> None:
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/pip")))


def halve_pip(venv: Path) -> None:
    info = next(venv.glob("lib/python*/site-packages")) / "pip-23.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("pip/__init__.py,sha256=x,100\n")


def make_it_a_file(venv: Path) -> None:
    shutil.rmtree(venv)
    venv.touch()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, ""),
        (break_python, "its Python does not start or is too old"),
        (break_pip, "its pip does not start"),
        (halve_pip, "its pip is not whole"),
        (make_it_a_file, "its Python does not start or is too old"),
    ],
)
def test_a_venv_that_does_not_work_is_known(
    checkout: Checkout, environment: ModuleType, damage: Callable[[Path], None], reason: str
) -> None:
    made = environment.Environment(checkout.root)
    assert made.why_not_usable() is None
    damage(checkout.root / ".venv")
    assert made.why_not_usable() == reason


@pytest.fixture
def without_pip(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no pip in a new .venv, which takes 5 s; where scripts/test begins without a .venv, as in
    CI, it is there that pip is made, and used.
    """
    usual = environment.Environment._run

    def run(self: Any, command: list[str]) -> None:
        usual(self, [*command, "--without-pip"] if "venv" in command else command)

    monkeypatch.setattr(environment.Environment, "_run", run)


@pytest.mark.usefixtures("without_pip")
def test_a_file_in_the_place_of_a_venv_is_replaced(
    checkout: Checkout, environment: ModuleType
) -> None:
    make_it_a_file(checkout.root / ".venv")
    made = environment.Environment(checkout.root, say=lambda line: None)
    with made._turn():
        made._make_venv()
    assert (checkout.root / ".venv" / "bin" / "python").exists()


@pytest.mark.usefixtures("without_pip")
def test_a_venv_that_does_not_work_is_made_anew(
    checkout: Checkout, environment: ModuleType
) -> None:
    checkout.prepare("demo")
    break_python(checkout.root / ".venv")
    said: list[str] = []
    made = environment.Environment(checkout.root, say=said.append)
    with pytest.raises(
        environment.Failed, match=r"^torch==2\.13\.0 failed:\n(.*\n)+.* No module named pip"
    ):
        made.prepare(["demo"])
    version = ".".join(map(str, sys.version_info[:3]))
    assert [line.rsplit(maxsplit=2)[0].strip() for line in said] == [
        f".venv for Python {version} (its Python does not start or is too old: made anew)"
    ]
    assert made._ask("print('starts')") == "starts"


# taking turns


def test_two_at_once_take_turns(checkout: Checkout) -> None:
    checkout.close_gate()
    first = checkout.start("demo")
    checkout.wait_inside()
    second = checkout.start("demo")
    assert second.stdout is not None
    assert second.stdout.readline() == f"waiting for process {first.pid}, which is installing\n"
    assert len(checkout.calls()) == 1
    checkout.open_gate()
    assert first.communicate(timeout=SOON)[0]
    said = second.communicate(timeout=SOON)[0].splitlines()
    assert (first.returncode, second.returncode) == (0, 0)
    assert said[0].startswith("waited for our turn")
    assert said[1].startswith("environment: .venv is ready")
    assert len(checkout.calls()) == 2  # all by the first


# the demo


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


needs_packages = pytest.mark.skipif(
    not has("torch", "sklearn"), reason="torch and scikit-learn are not both installed"
)


@needs_packages
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(
    not Path(sys.executable).with_name("rallypoint").exists(),
    reason="the command rallypoint is not beside this Python: not installed",
)
def test_the_demo_learns_and_says_how_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective on a tensor of Python's as a rank's last act races with its exit, and aborted
    half of the jobs. All of scikit-learn is imported, which other jobs with the digits do without.
    """
    if not os.environ.get("RALLYPOINT_WHOLE_TORCH"):
        monkeypatch.setenv("PYTHONPATH", python_path(TORCH_WITHOUT_COMPILER))
    done = subprocess.run(
        [
            sys.executable,
            SCRIPTS / "train_digits.py",
            tmp_path / "run",
            "--epochs",
            "5",
            "--lr",
            "6e-3",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(
        r"^ok: accuracy (\d\.\d\d), 4 ranks, first step after \d+\.\d s$",
        done.stdout.splitlines()[-1],
    )
    assert said is not None, done.stdout
    assert float(said[1]) >= 0.95
    steps = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[-5:-1]]
    # The store is made while the workers are forked: either may be ready first.
    assert set(steps[:2]) == {
        "the store for init_process_group answers",
        "all 4 workers are forked from the template",
    }
    assert steps[2:] == [
        "all ranks have left init_process_group",
        "all ranks have done their first step",
    ]


# the table of versions


@pytest.fixture
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", SCRIPTS / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_keeps_what_was_tried_before(matrix: ModuleType) -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text("utf-8")
    assert matrix.write_table(page, matrix.read_table(page)) == page
    written = matrix.write_table(
        page, matrix.read_table(page) | {("2.10.0", "3.14"): {"demo": "ok, 2026-11-23"}}
    )
    assert (
        f"| 2.10.0 | 3.14 | {matrix.NOT_TRIED} | ok, 2026-11-23 | {matrix.NOT_TRIED} | {matrix.NOT_TRIED} |"
        in written
    )
    numbers = [
        tuple(int(number) for number in torch.split(".")) for torch, _ in matrix.read_table(written)
    ]
    assert numbers == sorted(numbers)
    assert set(matrix.read_table(written)) == {*matrix.read_table(page), ("2.10.0", "3.14")}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("....\n61 passed in 444.21s (0:07:24)\n", "61 passed"),
        ("==== 2 failed, 59 passed, 1 skipped in 3.1s ====\n", "2 failed, 59 passed, 1 skipped"),
        (
            "=== 1 failed, 3 passed, 2 warnings, 1 error in 3.1s ===\n",
            "1 failed, 3 passed, 1 error",
        ),
        ("no tests ran in 0.01s\n", ""),
        ("Traceback\n", ""),
    ],
)
def test_the_count_of_tests(matrix: ModuleType, output: str, said: str) -> None:
    assert matrix.summary(output) == said
