"""The run folder: private, locked while it runs, replaced or refused, and never in the
job's way.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.record import kept_file, past_run, run_list
from rallypoint.record.run_folder import (
    RunFolder,
    default_root,
    discard,
    open_run_folder,
    without_secrets,
)
from rallypoint.record.run_list import (
    KEPT_RUNS,
    is_running,
    past_runs,
    remove_old_runs,
    running_runs,
)
from rallypoint.record.torchrun_files import TorchrunFiles

SOON = 20.0  # seconds: a generous deadline for what takes milliseconds


@pytest.fixture
def said() -> list[str]:
    return []


def opened(root: Path, job: str, said: list[str], asked_for: bool = False) -> RunFolder:
    return open_run_folder(str(root / job), job, said.append, asked_for=asked_for)


HOLD = """
import sys
from rallypoint.record.run_folder import open_run_folder
folder = open_run_folder(sys.argv[1], sys.argv[2], print, asked_for=False)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_launcher(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with the run tmp_path/running-job."""
    arguments = [sys.executable, "-c", HOLD, str(tmp_path / "running-job"), "running-job"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


class Plan(msgspec.Struct):
    job: str
    environment: dict[str, str]
    rank_environment: tuple[dict[str, str], ...]


def test_it_is_private_and_holds_the_plan_without_secrets(tmp_path: Path, said: list[str]) -> None:
    folder = opened(tmp_path / "deep" / "runs", "job-1", said)
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    folder.write_plan(
        Plan(
            "job-1",
            {"WANDB_API_KEY": "abc", "OMP_NUM_THREADS": "1"},
            ({"RANK": "0", "HF_TOKEN": "x"},),
        )
    )
    plan = json.loads(Path(folder.file("plan.json")).read_text())
    assert plan["environment"] == {"WANDB_API_KEY": "***", "OMP_NUM_THREADS": "1"}
    assert plan["rank_environment"] == [{"RANK": "0", "HF_TOKEN": "***"}]
    assert os.stat(folder.file("plan.json")).st_mode & 0o777 == 0o600
    folder.write_report([{"code": "rank-raised"}])
    assert json.loads(Path(folder.file("report.json")).read_text()) == [{"code": "rank-raised"}]
    assert os.readlink(tmp_path / "deep" / "runs" / "latest") == "job-1"
    assert is_running(folder.path)
    folder.close()
    folder.close()
    assert not is_running(folder.path)
    assert sorted(os.listdir(folder.path)) == ["plan.json", "report.json"]
    assert said == []


def test_names_that_look_like_secrets() -> None:
    shown = without_secrets(
        dict.fromkeys(
            ("AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "KEYBOARD", "MONKEY", "PATH"),
            "v",
        )
    )
    assert [name for name, value in shown.items() if value == "***"] == [
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "DB_PASSWORD",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "DB_PASS", "PGPASS", "PASSPHRASE", "MYSQL_PWD", "GH_PAT", "SSH_KEY", "ENCRYPTION_KEY", "SENTRY_DSN", "DATABASE_URL",
        "OPENAI_KEY", "BASIC_AUTH", "SMTP_PW", "AWS_CREDS", "JWT", "SLACK_WEBHOOK", "REDIS_URL", "spring.datasource.key", "FERNET_KEYS",
    ],
)  # fmt: skip
def test_other_names_of_secrets(name: str) -> None:
    """These stood in plan.json as they were."""
    assert without_secrets({name: "v"}) == {name: "***"}


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "OLDPWD",
        "COMPASS",
        "BYPASS_CACHE",
        "PATH",
        "AUTHOR",
        "KEYBOARD",
        "MONKEY",
        "HOTKEYS",
        "TOKENIZERS_PARALLELISM",
        "SPAWN",
    ],
)
def test_names_that_only_look_like_them_are_shown(name: str) -> None:
    assert without_secrets({name: "v"}) == {name: "v"}


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("postgresql://ada:lovelace@db:5432/train", True),
        ("https://ghp_x@github.com/a/b", True),
        ("amqp://mq/?password=x", True),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl", True),
        ("Bearer abc", True),
        ("tcp://127.0.0.1:29500", False),
        ("https://example.org/a@b", False),
        ("a" * 200_000, False),
    ],
)
def test_a_value_that_is_a_secret_whatever_its_name(value: str, is_secret: bool) -> None:
    assert (without_secrets({"X": value})["X"] == "***") is is_secret


def test_the_default_place_is_the_users_state_folder() -> None:
    assert default_root({"HOME": "/home/ada"}) == "/home/ada/.local/state/rallypoint/runs"
    assert (
        default_root({"HOME": "/home/ada", "XDG_STATE_HOME": "/state"}) == "/state/rallypoint/runs"
    )
    assert (
        default_root({"HOME": "/home/ada", "XDG_STATE_HOME": "state"})
        == "/home/ada/.local/state/rallypoint/runs"
    )


def test_a_user_without_a_home_gets_no_folder_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with a uid of its own the record went to ./~, which `rm -r` takes for home."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert os.path.isabs(default_root({}))


def test_a_default_place_that_cannot_be_written_costs_the_record_only(
    tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = opened(tmp_path / "file", "job", said)
    assert said == [
        f"rallypoint: no record of this run is kept: {tmp_path}/file/job: Not a directory"
    ]
    folder.write_plan(Plan("job", {}, ()))
    folder.write_report([])
    assert folder.file("rank0.log") == folder.path == ""
    folder.close()


def test_a_place_that_was_asked_for_must_be_writable(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="Not a directory") as caught:
        opened(tmp_path / "file", "job", said, asked_for=True)
    assert caught.value.code == "run-folder-unwritable"


def test_a_disk_that_fills_up_costs_the_report_and_a_line(tmp_path: Path, said: list[str]) -> None:
    folder = opened(tmp_path, "job", said)
    shutil.rmtree(folder.path)
    folder.write_report([])
    assert said == [
        f"rallypoint: cannot write {folder.path}/report.json: No such file or directory; it is not kept"
    ]
    folder.close()


def test_the_same_command_again_replaces_its_run_and_nothing_else(
    tmp_path: Path, said: list[str]
) -> None:
    run = tmp_path / "out"
    run.mkdir()
    (run / "model.pt").write_text("mine")
    opened(tmp_path, "out", said, asked_for=True).close()
    (run / "rank7.log").write_text("old")
    opened(tmp_path, "out", said, asked_for=True).close()
    assert sorted(os.listdir(run)) == ["model.pt", "plan.json"]
    assert not (tmp_path / "latest").exists()


def test_a_file_that_no_run_wrote_is_not_overwritten(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "plan.json").write_text('{"my": "plan"}')
    with pytest.raises(
        UsageError, match=r"plan\.json is there already and no run wrote it"
    ) as caught:
        open_run_folder(str(tmp_path), "job", said.append, asked_for=True)
    assert caught.value.code == "run-folder-used"
    assert (tmp_path / "plan.json").read_text() == '{"my": "plan"}'


def test_the_folder_of_a_running_job_is_refused_until_it_dies(
    tmp_path: Path, said: list[str], other_launcher: subprocess.Popen[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        opened(tmp_path, "running-job", said, asked_for=True)
    assert caught.value.code == "run-folder-in-use"
    assert is_running(str(tmp_path / "running-job"))
    other_launcher.kill()
    other_launcher.wait()
    assert not is_running(str(tmp_path / "running-job"))
    opened(tmp_path, "running-job", said, asked_for=True).close()


def test_a_file_system_without_locks_costs_nothing_but_the_protection(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOLCK, as NFS without its lock service answers: nobody can tell whether a run goes on, so it
    is taken for one that does, and is not removed.
    """

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    folder = opened(tmp_path, "a-job", said)
    assert said == []
    assert sorted(os.listdir(folder.path)) == ["plan.json", "running"]
    monkeypatch.setattr(run_list, "locked_here", set())  # as another process sees it
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert is_running(folder.path)
    assert remove_old_runs(str(tmp_path), keep=0, most=0) == []
    folder.close()


def test_twice_in_one_process_is_refused_too(tmp_path: Path, said: list[str]) -> None:
    folder = opened(tmp_path, "job", said)
    with pytest.raises(UsageError):
        opened(tmp_path, "job", said, asked_for=True)
    assert is_running(folder.path)
    folder.close()


def test_a_folder_that_became_a_file_is_given_back(tmp_path: Path, said: list[str]) -> None:
    """Its lock stayed: a program that calls `launch` could not use that place again."""
    path = tmp_path / "run"
    folder = open_run_folder(str(path), "one", said.append, asked_for=True)
    shutil.rmtree(path)
    path.touch()
    folder.close()
    path.unlink()
    open_run_folder(str(path), "two", said.append, asked_for=True).close()
    assert said == []


def test_the_last_runs_are_kept_and_only_runs_of_ours_are_removed(
    tmp_path: Path, said: list[str], other_launcher: subprocess.Popen[str]
) -> None:
    os.utime(tmp_path / "running-job" / "plan.json", (1, 1))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "plan.json").write_text('{"job": "another name"}')
    (tmp_path / "empty").mkdir()
    for number in range(KEPT_RUNS + 4):
        folder = opened(tmp_path, f"job-{number:02}", said)
        os.utime(folder.file("plan.json"), (1000 + number, 1000 + number))
        folder.close()
    remove_old_runs(str(tmp_path))
    runs = past_runs(str(tmp_path))
    assert [run.job for run in runs if not run.running] == [
        f"job-{number:02}" for number in range(KEPT_RUNS + 3, 3, -1)
    ]
    assert [run.job for run in runs if run.running] == ["running-job"]
    assert foreign.exists()
    assert (tmp_path / "empty").exists()
    assert os.readlink(tmp_path / "latest") == f"job-{KEPT_RUNS + 3:02}"


def finished(root: Path, number: int, status: int | None, size: int = 1000) -> str:
    """A run that is over. `status` None: its launcher was killed."""
    folder = root / f"job-{number:02}"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"job": folder.name}))
    ended = json.dumps({"at": 1.0, "what": "job-ended", "details": {"status": status}}) + "\n"
    (folder / "events.jsonl").write_text(
        '{"at": 0.1, "what": "x"}\n' + (ended if status is not None else "")
    )
    (folder / "rank0.log").write_bytes(b"x" * size)
    os.utime(folder / "plan.json", (1000 + number, 1000 + number))
    return str(folder)


def test_runs_that_failed_are_kept_longer(tmp_path: Path) -> None:
    """Runs that went well pushed the ones that failed out, though only these are ever looked at
    again.
    """
    runs = [finished(tmp_path, number, {0: 1, 1: None}.get(number, 0)) for number in range(10)]
    assert remove_old_runs(str(tmp_path), keep=7) == runs[2:5]
    assert remove_old_runs(str(tmp_path), keep=6) == [runs[0]]


def test_all_runs_together_have_a_size(
    tmp_path: Path, other_launcher: subprocess.Popen[str]
) -> None:
    """One job left 96 MB of log in the home, and twenty such runs were kept whatever their size."""
    runs = [finished(tmp_path, number, 0, size=1 << 20) for number in range(6)]
    assert remove_old_runs(str(tmp_path), most=(3 << 20) + (1 << 18)) == runs[:3]
    assert (
        remove_old_runs(str(tmp_path), most=1) == runs[3:5]
    )  # the last one stays, and what is running
    assert is_running(str(tmp_path / "running-job"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 1 << 30),
        ("500MiB", 500 << 20),
        ("4GiB", 4 << 30),
        ("2g", 2 << 30),
        ("1000", 1000),
        ("much", 1 << 30),
    ],
)
def test_how_much_is_kept(text: str, expected: int) -> None:
    assert run_list.bytes_to_keep({"RALLYPOINT_KEPT_BYTES": text}) == expected


def test_a_run_with_a_folder_of_its_own_is_found_while_it_goes_on(
    tmp_path: Path, said: list[str]
) -> None:
    root = str(tmp_path / "rallypoint" / "runs")
    folder = opened(tmp_path, "away", said, asked_for=True)
    folder.list_in(root)
    assert [run.path for run in running_runs(root)] == [folder.path]
    folder.close()
    assert running_runs(root) == []
    assert os.listdir(tmp_path / "rallypoint" / "elsewhere") == []


@pytest.mark.parametrize(
    ("machine", "kept"),
    [(os.uname().nodename, False), (f"{os.uname().nodename}-2", True), ("node07", True)],
)
def test_links_of_other_machines_are_not_ours_to_judge(
    tmp_path: Path, machine: str, kept: bool
) -> None:
    """A cluster's nodes share a home, and a folder on the disk of one is nowhere on the others."""
    links = tmp_path / "elsewhere"
    links.mkdir()
    link = links / f"{machine}-4711-0123abcd"
    link.symlink_to(tmp_path / "on-a-disk-of-another-machine")
    assert running_runs(str(tmp_path / "runs")) == []
    assert link.is_symlink() == kept


def test_a_disk_that_is_gone_does_not_hide_the_runs_on_others(
    tmp_path: Path,
    said: list[str],
    other_launcher: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links, comes_back = tmp_path / "elsewhere", threading.Event()
    links.mkdir()
    for name in ("gone", "running-job"):
        (links / f"{os.uname().nodename}-4711-{name.replace('-', '_')}").symlink_to(tmp_path / name)

    def ask(path: str) -> bool:
        return comes_back.wait(30.0) if path.endswith("gone") else is_running(path)

    monkeypatch.setattr(run_list, "is_running", ask)
    monkeypatch.setattr(run_list, "LINK_TIMEOUT", 0.5)
    try:
        assert [run.path for run in running_runs(str(tmp_path / "runs"))] == [
            str(tmp_path / "running-job")
        ]
    finally:
        comes_back.set()


def test_no_folder_of_runs_is_no_runs(tmp_path: Path) -> None:
    assert past_runs(str(tmp_path / "none")) == []


def test_torchruns_files_have_torchruns_names(tmp_path: Path) -> None:
    files = TorchrunFiles(str(tmp_path / "logs"), "my/job", 2)
    files.begin(0)
    fd = files.open(0, 1, "stderr")
    os.write(fd, b"hello\n")
    os.close(fd)
    run = Path(files.path)
    assert run.parent == tmp_path / "logs"
    assert run.name.startswith("my_job_")
    assert (run / "attempt_0" / "1" / "stderr.log").read_text() == "hello\n"
    assert files.error_file(0, 1) == str(run / "attempt_0" / "1" / "error.json")
    assert files.filtered(0, "stdout") == str(run / "attempt_0" / "filtered_stdout.log")
    files.begin(1)
    assert sorted(os.listdir(run)) == ["attempt_0", "attempt_1"]
    assert TorchrunFiles(str(tmp_path / "logs"), "my/job", 2).path != files.path


def test_a_log_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="Not a directory") as caught:
        TorchrunFiles(str(tmp_path / "file"), "job", 1)
    assert caught.value.code == "log-dir-unwritable"


def test_a_file_that_was_given_up_is_marked_on_a_full_disk(tmp_path: Path, said: list[str]) -> None:
    """A disk that is full has no room for a word about it, and a later reader must not take the
    file for whole.
    """
    import resource
    import signal

    file = kept_file.KeptFile(str(tmp_path / "rank0.log"), kept_file.Trouble(said.append))
    assert (tmp_path / "rank0.log").stat().st_mode & 0o777 == kept_file.WHOLE
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert file.write(b"x" * 1000)
        assert not file.write(b"y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "rank0.log").stat().st_mode & 0o777 == kept_file.CUT
    assert said == [
        f"rallypoint: cannot write {tmp_path}/rank0.log: File too large; its output is no longer kept"
    ]


@pytest.mark.parametrize("answer", ["an error", "success"])
def test_a_disk_that_answers_after_its_file_was_given_up_has_nothing_to_say(
    tmp_path: Path, said: list[str], answer: str
) -> None:
    """The job may be over then, and what it wrote to is somebody else's. A FIFO that is full: its
    write() does not return.
    """
    os.mkfifo(tmp_path / "rank0.log")
    reader = os.open(tmp_path / "rank0.log", os.O_RDONLY | os.O_NONBLOCK)
    file = kept_file.KeptFile(str(tmp_path / "rank0.log"), kept_file.Trouble(said.append))
    assert file.write(bytes(fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)))
    kept: list[bool] = []
    thread = threading.Thread(target=lambda: kept.append(file.write(b"more")), daemon=True)
    thread.start()
    assert file.give_up()
    assert not file.give_up()
    if answer == "success":
        os.set_blocking(reader, True)
        while os.read(reader, 1 << 16):  # to its end: the file is closed by who waited for it
            continue
    os.close(reader)
    thread.join(SOON)
    assert (kept, said) == ([False], [])


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (errno.ENOSPC, "df -h /srv; df -i /srv"),
        (errno.EDQUOT, "df -h /srv"),
        (errno.EACCES, "--run-dir DIR"),
    ],
)
def test_a_full_disk_is_not_mended_by_permissions(number: int, command: str) -> None:
    help = kept_file.writable(OSError(number, ""), "/srv/run", "--run-dir DIR")
    assert help[0][1].startswith(command)
    assert help[-1][1] == "--run-dir DIR"


def test_a_run_of_another_machine_s_is_left_to_it(tmp_path: Path) -> None:
    """On a file system whose locks each machine sees alone, a run that goes on elsewhere looked as
    if it were over, and was removed.
    """
    runs = [finished(tmp_path, number, 0) for number in range(4)]
    for number, host in ((0, "another-machine"), (1, os.uname().nodename)):
        (tmp_path / f"job-{number:02}" / "running").write_text(
            json.dumps({"socket": "/tmp/x", "host": host, "pid": 1})
        )
    assert remove_old_runs(str(tmp_path), keep=1) == runs[1:3]


def test_a_folder_of_runs_below_a_file_has_none(tmp_path: Path) -> None:
    """`HOME=/etc/passwd rallypoint show` was told of a fault in rallypoint."""
    (tmp_path / "file").write_text("")
    assert past_runs(str(tmp_path / "file" / "runs")) == []


def opened_node(root: Path, job: str, node: int, said: list[str]) -> RunFolder:
    path = str(root / job / f"node{node}")
    return open_run_folder(path, job, said.append, asked_for=False)


def test_each_node_of_a_job_has_a_run_folder_in_that_of_the_job(
    tmp_path: Path, said: list[str]
) -> None:
    """Homes are shared by machines: the second node found the run folder of its job in use."""
    root = tmp_path / "state" / "runs"
    folders = [opened_node(root, "exp7", node, said) for node in (1, 0)]
    assert said == []
    assert {run.job for run in running_runs(str(root))} == {"exp7/node0", "exp7/node1"}
    assert os.readlink(root / "latest") == "exp7/node0"
    for folder in folders:
        folder.list_in(str(root))
        folder.close()
    assert not (tmp_path / "state" / "elsewhere").exists(), "they are found where they are"
    assert [run.running for run in past_runs(str(root))] == [False, False]
    assert past_run.find(str(root), "exp7/node1") == folders[0].path
    with pytest.raises(UsageError, match="2 runs have exp7 in their names"):
        past_run.find(str(root), "exp7")
    assert {stat.S_IMODE(one.stat().st_mode) for one in (root, root / "exp7")} == {0o700}


def test_a_good_call_on_several_nodes_leaves_nothing(tmp_path: Path, said: list[str]) -> None:
    """The folder of the job stayed, empty, and `latest` led to a node's that was gone."""
    opened(tmp_path, "before", said).close()
    for node in (0, 1):
        opened_node(tmp_path, "exp7-1", node, said).close()
    for node in (1, 0):
        discard(str(tmp_path / "exp7-1" / f"node{node}"))
        assert (tmp_path / "exp7-1").exists() is (node == 1)
    assert os.readlink(tmp_path / "latest") == "before"


def test_the_nodes_of_a_job_are_removed_together(tmp_path: Path, said: list[str]) -> None:
    for number in range(3):
        for node in range(2):
            folder = opened_node(tmp_path, f"exp{number}", node, said)
            os.utime(folder.file("plan.json"), (1000 + number, 1000 + number))
            folder.close()
    still = opened_node(tmp_path, "exp0", 1, said)
    assert remove_old_runs(str(tmp_path), keep=1) == [str(tmp_path / "exp1")]
    assert not (tmp_path / "exp1").exists()
    still.close()
    assert remove_old_runs(str(tmp_path), keep=1) == [str(tmp_path / "exp2")]
