"""Unix sockets: private, in a place that will do, and swept when their owner is dead."""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.errors import EnvironmentProblem
from rallypoint.host import unix_sockets


@pytest.fixture
def place(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty folder that is XDG_RUNTIME_DIR; nothing may be left in it."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("TMPDIR", raising=False)
    yield folder
    assert list(folder.iterdir()) == []


def make(name: str = "a.sock") -> tuple[socket.socket, Path]:
    sock, path = unix_sockets.private_socket(name)
    return sock, Path(path)


def talk(path: Path | str, sock: socket.socket) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"hello")
        server, _ = sock.accept()
        with server:
            return server.recv(10)


def test_only_this_user_reaches_it(place: Path) -> None:
    former = os.umask(0o277)  # whatever the umask is
    try:
        sock, path = make()
    finally:
        os.umask(former)
    with sock:
        assert (path.name, path.parent.parent) == ("a.sock", place)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not os.get_inheritable(sock.fileno())
        assert talk(path, sock) == b"hello"
        unix_sockets.remove(str(path))
        unix_sockets.remove(str(path))  # as often as one likes
    assert not path.parent.exists()


def test_each_has_a_folder_of_its_own(place: Path) -> None:
    found = [make() for _ in range(3)]
    assert len({path.parent for _, path in found}) == 3
    for sock, path in found:
        sock.close()
        unix_sockets.remove(str(path))


def test_the_lock_s_descriptor_is_given_back(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sock, path = make()
    sock.close()
    unix_sockets.remove(str(path))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_first_place_that_will_do(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/that is not here")
    monkeypatch.setenv("TMPDIR", str(place))
    sock, path = make()
    with sock:
        assert path.parent.parent == place
        unix_sockets.remove(str(path))


@pytest.mark.parametrize(
    "unfit", ["relative/folder", "/" + "long/" * 30, "/not/utf\udce9", "/dev/null", ""]
)
def test_a_place_that_will_not_do_is_passed_over(
    unfit: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", unfit)
    monkeypatch.setenv("TMPDIR", str(place))
    sock, path = make()
    with sock:
        assert path.parent.parent == place
        unix_sockets.remove(str(path))


def test_the_longest_path_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte more is refused by us, in words; the system would say "AF_UNIX path too long"."""
    rest = len("/rallypoint-0123456789ab/a.sock")
    fits = str(tmp_path).ljust(unix_sockets.LONGEST_PATH - rest, "x")
    os.mkdir(fits)
    monkeypatch.setattr(unix_sockets, "_places", lambda: [(fits, "A")])
    sock, path = make()
    with sock:
        assert len(os.fsencode(path)) == unix_sockets.LONGEST_PATH
        assert talk(path, sock) == b"hello"
        unix_sockets.remove(str(path))
    monkeypatch.setattr(unix_sockets, "_places", lambda: [(fits + "x", "A")])
    with pytest.raises(EnvironmentProblem, match="no folder here") as caught:
        make()
    assert "has 108 bytes, and a socket's path at most 107" in caught.value.why[0]


def test_no_place_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        unix_sockets,
        "_places",
        lambda: [("/proc", "TMPDIR=/proc"), (str(tmp_path / "absent"), "/tmp")],
    )
    with pytest.raises(EnvironmentProblem) as caught:
        make()
    assert caught.value.code == "socket-unavailable"
    assert caught.value.why == (
        "TMPDIR=/proc: No such file or directory",
        "/tmp: No such file or directory",
    )


def owner(ends: str) -> subprocess.Popen[bytes]:
    """Another process that has made a socket, has said where, and then does `ends`."""
    program = (
        "import os, signal\nfrom rallypoint.host import unix_sockets as sockets\n"
        f"kept = sockets.private_socket('b.sock')\nprint(kept[1], flush=True)\n{ends}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )


def test_what_a_killed_owner_left_is_swept_and_a_living_one_s_is_not(place: Path) -> None:
    with owner("os.kill(os.getpid(), signal.SIGKILL)") as dead, owner("input()") as living:
        assert dead.stdout is not None
        assert living.stdout is not None
        left, used = (
            Path(process.stdout.readline().decode().strip())
            for process in (dead, living)
            if process.stdout
        )
        assert dead.wait() == -signal.SIGKILL
        mine, _ = make(), make()
        assert not left.parent.exists()
        assert used.exists(), "its owner lives"
        assert mine[1].exists(), "one's own is never looked at"
        again = [make()]
        for sock, path in (mine, _, *again):
            assert path.exists()
            sock.close()
            unix_sockets.remove(str(path))
        living.communicate(b"\n")
    unix_sockets.remove(str(used))


def test_what_is_not_ours_is_left_alone(place: Path) -> None:
    strangers = [
        place / "rallypoint-results",
        place / "rallypoint-0123456789ab",
        place / "rallypoint-0123456789ac",
    ]
    for folder in strangers:
        folder.mkdir()
    (strangers[1] / "data").write_text("not a socket")
    (strangers[2] / "lock").symlink_to("/etc/passwd")
    (place / "rallypoint-0123456789ad").symlink_to("/tmp")
    (place / "rallypoint-0123456789ae").write_text("a file")
    sock, path = make()
    sock.close()
    unix_sockets.remove(str(path))
    assert len(list(place.iterdir())) == 5
    for folder in strangers:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    for name in "de":
        (place / f"rallypoint-0123456789a{name}").unlink()


def test_somebody_else_s_is_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place / "rallypoint-0123456789ab"
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    sock, path = make()
    sock.close()
    unix_sockets.remove(str(path))
    folder.rmdir()  # it is there


def test_one_that_was_never_finished_is_swept(place: Path) -> None:
    (place / "rallypoint-0123456789ab").mkdir()  # killed between two lines
    sock, path = make()
    sock.close()
    unix_sockets.remove(str(path))


def test_a_sweep_in_the_middle_of_making_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes the folder away between any two steps: another one is made."""
    steps = []

    def step(name: str, real: object, when: Callable[..., bool] = lambda *_: True) -> object:
        def call(*arguments: object, **options: object) -> object:
            if name not in steps and when(*arguments):
                steps.append(name)
                with owner("sockets.remove(kept[1])") as other:  # sweeps, and leaves
                    other.communicate()
            return real(*arguments, **options)  # type: ignore[operator]

        return call

    monkeypatch.setattr(os, "chmod", step("chmod", os.chmod))
    monkeypatch.setattr(
        os, "open", step("open", os.open, lambda path, *_: str(path).endswith("lock"))
    )
    monkeypatch.setattr(fcntl, "lockf", step("lockf", fcntl.lockf))
    sock, path = make()
    assert steps == ["chmod", "open", "lockf"]
    assert path.parent.parent == place
    assert talk(path, sock) == b"hello"
    sock.close()
    unix_sockets.remove(str(path))


def test_a_forked_child_does_not_take_it_away(place: Path) -> None:
    sock, path = make()
    pid = os.fork()
    if pid == 0:
        unix_sockets.remove(str(path))
        os._exit(0)
    os.waitpid(pid, 0)
    assert talk(path, sock) == b"hello"
    sock.close()
    unix_sockets.remove(str(path))


def test_a_folder_of_another_machine_s_is_left_alone(place: Path) -> None:
    """On a file system that several machines share, and whose locks each sees alone, a job's start
    removed the socket of one elsewhere.
    """
    other = place / f"rallypoint-{'0' * 12}"
    other.mkdir(0o700)
    (other / "lock").write_text("another-machine\nits-boot\n")
    sock, path = make()
    with sock:
        assert (other / "lock").exists()
        owner = (path.parent / "lock").read_text().splitlines()
        assert owner[0] == os.uname().nodename
        unix_sockets.remove(str(path))
    (other / "lock").write_text(
        f"a-container\n{owner[1]}\n"
    )  # of this machine: nobody holds its lock
    sock, path = make()
    with sock:
        assert not other.exists() or owner[1] == "unknown"
        unix_sockets.remove(str(path))


def test_threads_that_make_sockets_at_once_lose_none(place: Path) -> None:
    """One thread's sweep took another's fresh folder for a dead owner's: a record lock does not
    keep out its own process.
    """

    def make_some(_: int) -> list[bool]:
        kept = []
        for _ in range(50):
            sock, path = make()
            with sock:
                kept.append(path.parent.parent == place and path.exists())
                unix_sockets.remove(str(path))
        return kept

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(all(kept) for kept in pool.map(make_some, range(4)))
