"""One job at a time has a place on a shared file system: whose it is, who is gone, and who wins of
many that start at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.errors import EnvironmentProblem
from rallypoint.launcher import rendezvous_file
from rallypoint.launcher.rendezvous_file import (
    HIDDEN,
    ProcessIdentity,
    Record,
    fate,
    look,
    own_identity,
    take,
)

DEADLINE = 60.0  # seconds for a few interpreters that start at once; they take one

HERE = ProcessIdentity("node07", "machine-a", "boot-2", "pid:[1]", 400, 9000)
JOB = Record("20260311-101112-ab12", HERE, "ada", 1000.0)


@pytest.mark.parametrize(
    ("change", "started", "expected"),
    [
        ({}, 9000, "runs"),
        ({}, 9001, "gone"),  # another process has its pid now
        ({}, None, "gone"),
        ({}, HIDDEN, "unknown"),  # another user's
        ({"pids": "pid:[2]"}, None, "unknown"),  # in another container
        ({"boot": "boot-1"}, 9000, "gone"),  # before this machine was started again
        (
            {"boot": "boot-9", "machine": "machine-b"},
            None,
            "unknown",
        ),  # another machine of the same name
        ({"boot": "boot-9", "host": "node08"}, None, "unknown"),
        ({"boot": "boot-9", "machine": ""}, None, "unknown"),
    ],
)
def test_fate(change: dict[str, str], started: int | None, expected: str) -> None:
    former = msgspec.structs.replace(JOB, owner=msgspec.structs.replace(HERE, **change))
    assert fate(former, HERE, lambda pid: started if pid == 400 else None) == expected
    assert fate(msgspec.structs.replace(former, ended=True), HERE, lambda _: started) == "gone"


@pytest.mark.parametrize(("host", "expected"), [("node07", "gone"), ("node08", "unknown")])
def test_fate_where_no_boot_has_a_number(host: str, expected: str) -> None:
    """In a sandbox the running job of another machine was taken for gone, and its place taken."""
    owner, here = (msgspec.structs.replace(HERE, host=one, boot="") for one in (host, "node07"))
    assert fate(msgspec.structs.replace(JOB, owner=owner), here, lambda _: None) == expected


def written(folder: Path) -> list[Record]:
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return [msgspec.json.decode(path.read_bytes(), type=Record) for path in paths]


def test_a_place_says_where_the_ranks_of_each_attempt_meet(tmp_path: Path) -> None:
    place = take(str(tmp_path / "job"), "first")
    assert [(one.job, one.owner, one.address, one.ended) for one in written(tmp_path / "job")] == [
        ("first", own_identity(), "", False)
    ]
    place.publish(0, "127.0.0.1:41235")
    place.publish(1, "127.0.0.1:41236")
    (record,) = written(tmp_path / "job")
    assert (record.attempt, record.address) == (1, "127.0.0.1:41236")
    assert (
        repr(place) == f"<RendezvousFile {tmp_path}/job: job first, attempt 1, at 127.0.0.1:41236>"
    )
    with pytest.raises(EnvironmentProblem) as taken:
        take(str(tmp_path / "job"), "second")
    assert taken.value.code == "rendezvous-in-use"
    assert f"belongs to a job that is running: pid {os.getpid()} on " in str(taken.value)
    assert taken.value.why[1] == "its ranks meet at 127.0.0.1:41236, attempt 1"
    place.give_back()
    place.give_back()
    second = take(str(tmp_path / "job"), "second")
    assert [(one.job, one.ended) for one in written(tmp_path / "job")] == [("second", False)], (
        "the former record is swept"
    )
    place.publish(2, "127.0.0.1:1")
    assert written(tmp_path / "job")[0].job == "second", "who has given it back changes nothing"
    second.give_back()


def test_a_link_that_was_made_though_the_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS asks again, and hears that the name is taken, by itself: the job was refused its place,
    as another's that has its own pid.
    """
    link = os.link

    def link_twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    place = take(str(tmp_path / "job"), "first")
    assert [(one.job, one.ended) for one in written(tmp_path / "job")] == [("first", False)]
    assert os.listdir(tmp_path / "job") == ["1.json"]
    place.give_back()


@pytest.mark.root
def test_a_job_of_another_user_whose_processes_are_hidden(tmp_path: Path) -> None:
    """Where /proc is mounted with hidepid, as on many clusters, a running job of another user's was
    taken for gone.
    """
    script = f"""
import os, subprocess
from rallypoint.launcher import rendezvous_file
from rallypoint.launcher.rendezvous_file import HIDDEN, Record
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", {str(tmp_path)!r}], check=True)
subprocess.run(["mount", "--bind", {str(tmp_path)!r}, "/proc"], check=True)
record = Record("a-job", rendezvous_file.own_identity(), "ada", 1.0)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
here = record.owner
print(rendezvous_file._started(os.getppid()) == HIDDEN, rendezvous_file._started(here.pid) == here.ticks, rendezvous_file._started(4194303))
print(rendezvous_file._in_use("/shared/job", record, "unknown", 1.0))
"""
    command = ["unshare", "--mount", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if "mount failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.stdout.splitlines() == [
        "True True None",
        f"the meeting place /shared/job belongs to {os.uname().nodename}, "
        "and from here it cannot be seen whether its job still runs",
    ], done.stderr


def test_what_a_killed_job_left_is_taken_over(tmp_path: Path) -> None:
    killed = f"take({str(tmp_path / 'job')!r}, 'killed'); os.kill(os.getpid(), 9)"
    script = f"import os; from rallypoint.launcher.rendezvous_file import take; {killed}"
    assert (
        subprocess.run([sys.executable, "-c", script], check=False, timeout=DEADLINE).returncode
        == -9
    )
    assert [(one.job, one.ended) for one in written(tmp_path / "job")] == [("killed", False)]
    take(str(tmp_path / "job"), "next").give_back()
    assert [(one.job, one.ended) for one in written(tmp_path / "job")] == [("next", True)]


def test_another_machines_is_left_alone_and_how_to_remove_it_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "3.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(JOB, address="10.0.0.7:29500"))
    )
    with pytest.raises(EnvironmentProblem) as taken:
        take(str(folder), "mine")
    assert (
        str(taken.value)
        == f"the meeting place {folder} belongs to node07, and from here it cannot be seen whether its job still runs"
    )
    assert taken.value.why[0].startswith(
        "job 20260311-101112-ab12: pid 400 on node07, started by ada "
    )
    assert taken.value.help[-1][1] == f"rm -r {folder}"
    assert os.listdir(folder) == ["3.json"]


def test_a_place_that_was_removed_by_hand_is_not_made_again(tmp_path: Path) -> None:
    place = take(str(tmp_path / "job"), "first")
    (tmp_path / "job" / "1.json").unlink()
    other = take(str(tmp_path / "job"), "second")
    place.publish(1, "127.0.0.1:41236")
    place.give_back()
    assert [(one.job, one.ended) for one in written(tmp_path / "job")] == [("second", False)]
    other.give_back()


def test_what_no_launcher_wrote_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps({"hello": "world"}))
    with pytest.raises(EnvironmentProblem) as refused:
        take(str(tmp_path), "mine")
    assert (refused.value.code, "which no launcher wrote" in str(refused.value)) == (
        "rendezvous-unwritable",
        True,
    )


def test_folders_that_will_not_do_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("torch's")
    for path, said in {
        tmp_path
        / "missing"
        / "job": f"the folder {tmp_path}/missing, in which the meeting place is to be made, does not exist",
        tmp_path
        / "file": f"the meeting place {tmp_path}/file is a file, and not one that a launcher made",
        Path(
            "/proc/job"
        ): "the meeting place /proc/job cannot be written: No such file or directory",
    }.items():
        with pytest.raises(EnvironmentProblem) as refused:
            take(str(path), "mine")
        assert (refused.value.code, str(refused.value)) == ("rendezvous-unwritable", said)
        assert refused.value.help
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """In a process of its own, which has one thread."""
    script = f"""
import signal
from rallypoint.errors import EnvironmentProblem
from rallypoint.launcher.rendezvous_file import wait_for_disk
wait_for_disk({str(tmp_path)!r})
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaped the child, and the wait failed
wait_for_disk({str(tmp_path)!r})
try: wait_for_disk("/shared/job", 0.2, lambda _: signal.pause())
except EnvironmentProblem as problem: print(problem.code, problem)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=True
    ).stdout
    assert (
        said
        == "rendezvous-unwritable the file system of the meeting place /shared/job gave no answer within 0.2 s\n"
    )


@pytest.mark.root
def test_a_folder_of_another_user() -> None:
    with tempfile.TemporaryDirectory(
        prefix="rallypoint-test-", dir="/tmp"
    ) as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        script = f"""
import os
from rallypoint.errors import EnvironmentProblem
from rallypoint.launcher import rendezvous_file
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in ({folder!r} + "/job", {folder!r}):
    try: rendezvous_file.look(path)
    except EnvironmentProblem as problem: print(problem)
"""
        said = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        ).stdout.splitlines()
        assert said == [
            f"the folder {folder}, in which the meeting place is to be made, may not be written by this user",
            f"the meeting place {folder} may not be written by this user",
        ]
        look(folder)


def test_a_place_that_another_job_is_just_making_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = str(tmp_path / "job"), os.stat

    def made_after_a_look(path: Any, **named: Any) -> os.stat_result:
        try:
            return real(path, **named)
        finally:
            if path == place:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place)

    monkeypatch.setattr(os, "stat", made_after_a_look)
    look(place)


RACER = """
import sys
from rallypoint.errors import EnvironmentProblem
from rallypoint.launcher.rendezvous_file import take
print("ready", flush=True)
sys.stdin.readline()
had = 0
while had < int(sys.argv[2]):
    try:
        place = take(sys.argv[1], sys.argv[3])
    except EnvironmentProblem as problem:
        assert problem.code == "rendezvous-in-use", problem
        continue
    had += 1
    with open(sys.argv[1] + ".log", "a", buffering=1) as log:  # one write: whole lines
        log.write("in\\n")
        place.publish(had, "127.0.0.1:1")
        log.write("out\\n")
    place.give_back()
"""


def test_of_many_that_start_at_once_one_has_it(tmp_path: Path) -> None:
    """Four processes want the place again and again, and give it back: between two who have it
    there is never a third.
    """
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "job"), "5", str(name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        for racer in racers:
            racer.communicate(timeout=DEADLINE)
    finally:
        for racer in racers:  # one that has not ended, since this has failed
            if racer.poll() is None:
                racer.kill()
                racer.communicate()
    assert [racer.returncode for racer in racers] == [0] * 4
    order = (tmp_path / "job.log").read_text().split()
    assert order == ["in", "out"] * (4 * 5)
    assert len(written(tmp_path / "job")) == 1
    assert [name for name in os.listdir(tmp_path / "job") if name.startswith(".")] == [], (
        "nothing temporary is left"
    )


@pytest.mark.parametrize("last", ["fourth", "fifth"])
def test_of_two_that_find_a_dead_jobs_record_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Another takes it between our look and our attempt; and one that slept through a whole job
    notices that its number is old, even if a fifth job has removed its record by then.
    """
    folder = tmp_path / "job"
    folder.mkdir()
    dead = msgspec.structs.replace(JOB, owner=msgspec.structs.replace(own_identity(), ticks=1))
    (folder / "1.json").write_bytes(msgspec.json.encode(dead))
    link, places = os.link, []

    def late(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", link)
        places.append(take(str(folder), "quicker"))
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(EnvironmentProblem) as taken:
        take(str(folder), "slower")
    assert taken.value.code == "rendezvous-in-use"
    assert [(one.job, one.ended) for one in written(folder)] == [("quicker", False)]

    def later(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", link)
        places[0].give_back()
        for name in ("third", "fourth"):  # its number has been used, and swept
            places.append(take(str(folder), name))
            if name == "third":
                places[-1].give_back()
        link(source, target)
        if last == "fifth":
            places[-1].give_back()
            places.append(take(str(folder), last))

    places[0].give_back()
    monkeypatch.setattr(os, "link", later)
    with pytest.raises(EnvironmentProblem) as taken:
        take(str(folder), "asleep")
    assert taken.value.code == "rendezvous-in-use"
    assert [(one.job, one.ended) for one in written(folder)] == [(last, False)]
    places[-1].give_back()


def test_it_gives_up_when_others_are_always_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_source: str, _target: str) -> None:
        raise FileExistsError

    monkeypatch.setattr(os, "link", never)
    with pytest.raises(
        EnvironmentProblem, match=f"one after the other: tried {rendezvous_file.TRIES} times"
    ):
        take(str(tmp_path / "job"), "unlucky")
    assert os.listdir(tmp_path / "job") == []


def test_a_disk_that_dies_later_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher waited in the kernel, deaf to Ctrl-C, and its ranks with it."""
    place = take(str(tmp_path / "job"), "this")
    answers = threading.Event()
    monkeypatch.setattr(rendezvous_file, "_read", lambda path: answers.wait(60))
    monkeypatch.setattr(rendezvous_file, "DISK_TIMEOUT", 0.01)
    monkeypatch.setattr(rendezvous_file, "GIVE_BACK_TIMEOUT", 0.01)
    with pytest.raises(
        EnvironmentProblem,
        match=r"the file system of the meeting place .*/job gave no answer within 0\.01 s",
    ):
        place.publish(0, "127.0.0.1:29500")
    place.give_back()
    answers.set()
