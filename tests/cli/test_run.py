from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rallypoint.cli import main as cli
from rallypoint.cli import run
from rallypoint.host import resolver
from rallypoint.launcher import plan, torch_version
from rallypoint.launcher.agent import console
from rallypoint.launcher.plan import Options
from rallypoint.launcher.program import Program

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("node", [0, 1])
def test_a_wrong_option_is_shown_whole_by_node_0_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], node: int
) -> None:
    monkeypatch.setattr(run, "NODE_0_FIRST", 0.01)
    monkeypatch.setattr(console, "shares_screen", lambda: True)  # capfd's is a file
    numbers = {"PMI_SIZE": 2, "PMI_RANK": node, "MPI_LOCALRANKID": node, "MPI_LOCALNRANKS": 2}
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert cli.main(["run", "--no-such-option", "train.py"]) == 2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    said = capfd.readouterr().err
    assert said.startswith("error[option-unknown]" if node == 0 else "rallypoint: node 1 ")
    assert "--no-such-option" in said
    assert node == 0 or said.count("\n") == 1


# --- facts
# --------------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    wanted = Options(program=Program(kind="script", target="x.py"))
    machine = run.this_machine(wanted, {"XDG_STATE_HOME": "/state"})
    assert 1 <= machine.cpus <= (os.cpu_count() or 1)
    assert machine.runs == "/state/rallypoint/runs"
    assert machine.cwd == os.getcwd()
    assert (
        len(machine.suffix) == 16
    )  # 64 bits: the id marks the processes that are ended with the job
    assert (
        run.this_machine(wanted, {"XDG_STATE_HOME": "relative", "HOME": "/home/ada"}).runs
        == "/home/ada/.local/state/rallypoint/runs"
    )


def test_own_addresses_are_known_without_a_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("asked the resolver"))
    monkeypatch.setattr(resolver, "ask", lambda *_, **__: pytest.fail("asked the resolver"))
    assert "127.0.0.5" in run._own_names("127.0.0.5")
    assert "192.0.2.1" not in run._own_names("192.0.2.1")  # RFC 5737: nobody's
    for name in ("", "localhost", socket.gethostname(), socket.gethostname().upper()):
        assert socket.gethostname() in run._own_names(name)


@pytest.mark.parametrize(
    ("found", "ours"), [(("127.0.0.7",), True), (("192.0.2.1",), False), ((), False)]
)
def test_a_name_is_this_machines_by_what_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, ...], ours: bool
) -> None:
    """`--master-addr` with another name of this machine than its host name was refused as one of
    another node.
    """
    monkeypatch.setattr(
        resolver,
        "ask",
        lambda names, timeout: {name: resolver.Answer(name, found) for name in names},
    )
    assert ("head-node" in run._own_names("head-node")) == ours


# --- the command
# --------------------------------------------------------------------------------------------------


def test_dry_run_starts_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("raise SystemExit('started')\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    assert (
        cli.main(
            [
                "run",
                "-n",
                "2",
                "--fresh",
                "--dry-run",
                "--numa-binding",
                "node",
                "train.py",
                "--dry-run",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "program     train.py --dry-run\n" in out
    assert "  WORLD_SIZE=2\n" in out
    assert "--numa-binding has no effect here" in out
    assert "hunter2" not in out
    assert err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


def test_a_plan_does_not_hand_control_sequences_to_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An argument of the program with a terminal's title in it set that title."""
    (folder / "train.py").write_text("")
    assert (
        cli.main(
            ["run", "-n", "2", "--fresh", "--dry-run", "train.py", "\x1b]0;title\x07", "a\x1b[2Jb"]
        )
        == 0
    )
    assert "\x1b" not in capsys.readouterr().out


def test_trouble_is_shown_instead_of_the_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.py").write_text("print('hi'\n")
    assert cli.main(["run", "-n", "4", "--fresh", "--dry-run", "bad.py"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("SyntaxError") == 2  # headline and Python's own words, once for all ranks
    assert err.startswith("error[start-failed]: bad.py does not compile")


def test_without_torch_the_line_to_type_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "count words.py").touch()
    monkeypatch.setattr("rallypoint.launcher.torch_version.torch_version", lambda: "")
    assert cli.main(["run", "-n", "3", "--quiet", "count words.py", "--lr", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[torch-missing]: torch is not installed in ")
    assert "rallypoint run --fresh -n 3 --quiet 'count words.py' --lr 1\n" in err


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch-2.99.0+cpu.dist-info", "2.99.0+cpu"),
        ("torch-2.99.0_dirty.dist-info", "2.98"),  # its file has the version as it is compared
        ("torch.egg-info", "2.98"),
        ("torch_tools-1.0.dist-info", ""),
    ],
)
def test_the_version_of_torch_is_the_first_on_the_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    for place, kind in (("here", name), ("later", "torch-1.0.dist-info")):
        (folder / place / kind).mkdir(parents=True)
        for file in ("METADATA", "PKG-INFO"):
            (folder / place / kind / file).write_text("Metadata-Version: 2.1\nVersion: 2.98\n")
    empty = ["nowhere", "archive.zip"]
    monkeypatch.setattr("sys.path", [*empty, str(folder / "here"), str(folder / "later")])
    assert torch_version.torch_version() == (version or "1.0")
    monkeypatch.setattr("sys.path", empty)
    assert torch_version.torch_version() == ""


def test_the_plan_goes_to_the_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").touch()
    plans: list[plan.Plan] = []

    def carry_out(made: plan.Plan) -> int:
        plans.append(made)
        return 17

    monkeypatch.setattr("rallypoint.launcher.agent.agent.run", carry_out)
    assert cli.main(["run", "-n", "3", "--fresh", "train.py", "x"]) == 17
    assert (plans[0].slots, plans[0].program.args) == (3, ("x",))


# --- the engine
# --------------------------------------------------------------------------------------------------


def test_a_launcher_on_ray_that_was_killed_gives_the_status_of_its_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [(-9, b""), (0, b"")]
    monkeypatch.setattr("rallypoint.clusters.ray.launch_on_nodes", lambda *_, **__: ends)
    (folder / "train.py").touch()
    wanted = Options(program=Program(kind="script", target="train.py"), engine="ray", nproc=1)
    assert run.start(wanted, os.environ) == 137
