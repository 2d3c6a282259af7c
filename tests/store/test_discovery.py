"""Which store a process belongs to, and where its secret is."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint.diagnosis.catalogue import page
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host import memory_files
from rallypoint.store import discovery

SECRET = b"0123456789abcdef"
ADDRESS = "unix:///run/store.sock"


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself may run in a job."""
    monkeypatch.setattr(discovery, "_place", None)
    monkeypatch.setattr(discovery, "_without", "")
    for name in ("RALLYPOINT_STORE", "RALLYPOINT_SECRET_FILE", "RALLYPOINT_JOB", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def secret_fd() -> Iterator[int]:
    fd = memory_files.create_sealed("test", SECRET)
    yield fd
    try:
        os.close(fd)
    except OSError:
        return  # the test has


def secret_file(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_that_is_made_here_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(
        [b"a secret of an odd sort, 32 byte\n", b"another one with a return here.\r", SECRET]
    )
    monkeypatch.setattr(os, "urandom", lambda _: next(made))
    assert discovery.new_secret() == SECRET


# --- in a rank


def test_a_secret_of_one_purpose_stays_whole() -> None:
    """A server strips line breaks from its secret: one that ended with one let in no node."""
    made = {discovery.derived(b"%032d" % number, "coordination") for number in range(2000)}
    assert len(made) == 2000
    assert {discovery.checked_secret(secret) for secret in made} == made


def test_a_rank_has_the_job_s_store(secret_fd: int) -> None:
    discovery.enter(ADDRESS, secret_fd, "job7", 3)
    found = discovery.current()
    assert found is not None
    assert (found.address, found.job, found.rank) == (ADDRESS, "job7", 3)
    assert (
        found.secret() == found.secret() == SECRET
    )  # the offset is shared with every rank: it must not move
    assert (found.identity.rank, found.identity.pid, found.identity.host) == (
        3,
        os.getpid(),
        os.uname().nodename,
    )
    assert SECRET.decode() not in repr(found)
    assert repr(found) == f"<Place {ADDRESS} of job job7: rank 3>"


def test_the_job_s_store_goes_before_what_the_environment_says(
    secret_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_STORE", "tcp://elsewhere:1")
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(secret_file(tmp_path)))
    discovery.enter(ADDRESS, secret_fd, "job7", 3)
    found = discovery.current()
    assert found is not None
    assert found.address == ADDRESS


def test_a_fork_of_a_rank_has_it_under_its_own_pid(secret_fd: int) -> None:
    discovery.enter(ADDRESS, secret_fd, "job7", 3)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = discovery.current()
        if found is not None:
            os.write(
                writing, pickle.dumps((found.secret(), found.identity.rank, found.identity.pid))
            )
        os._exit(0)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as file:
        os.close(writing)
        assert pickle.loads(file.read()) == (SECRET, 3, pid)


@pytest.mark.parametrize("reused", [False, True], ids=["closed", "another file has its number"])
def test_a_program_that_closed_the_descriptor(secret_fd: int, reused: bool) -> None:
    discovery.enter(ADDRESS, secret_fd, "job7", 3)
    found = discovery.current()
    assert found is not None
    os.close(secret_fd)
    if reused:
        other = memory_files.create("another")
        os.write(other, b"what a program keeps to itself")
        os.dup2(other, secret_fd)
        if other != secret_fd:
            os.close(other)
    with pytest.raises(EnvironmentProblem, match="has closed the descriptor") as caught:
        found.secret()
    assert caught.value.code == "secret-unreadable"


def test_a_job_without_a_store_says_why() -> None:
    discovery.enter_without(
        "there is no folder here in which a Unix socket can be made; /tmp: Permission denied"
    )
    assert discovery.current() is None
    error = discovery.no_store()
    assert (error.code, error.headline) == ("no-store", "this job has no store")
    assert error.why == (
        "there is no folder here in which a Unix socket can be made; /tmp: Permission denied",
    )


# --- elsewhere


def test_nowhere() -> None:
    assert discovery.current() is None
    error = discovery.no_store()
    assert error.code == "no-store"
    assert "belongs to no job" in error.headline
    commands = [command for _, command in error.help]
    assert commands == [
        "rallypoint run script.py",
        "with rallypoint.serve() as server:\n    store = rallypoint.connect(server.address, secret=server.secret)",
    ]


@pytest.mark.parametrize("file", [None, ""])
def test_an_address_without_a_secret(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a rank has started: the remedy is to pass the store itself."""
    monkeypatch.setenv("RALLYPOINT_STORE", ADDRESS)
    monkeypatch.setenv("RALLYPOINT_JOB", "job7")
    if file is not None:
        monkeypatch.setenv("RALLYPOINT_SECRET_FILE", file)
    assert discovery.current() is None
    error = discovery.no_store()
    assert "no secret for the store that RALLYPOINT_STORE names" in error.headline
    assert error.help[0][1] == "multiprocessing.Process(target=work, args=(store,))"


def test_the_address_of_a_server_and_no_secret_outside_of_any_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RALLYPOINT_STORE", "tcp://node0:41235")
    assert discovery.current() is None
    error = discovery.no_store()
    assert error.code == "secret-missing"
    assert error.help[0][1] == "export RALLYPOINT_SECRET_FILE=..."
    assert "tcp://node0:41235" in error.headline
    assert "job" not in "".join(error.__notes__)
    assert error.headline.replace("41235", "29500") in page("secret-missing")
    assert all(
        f"{sentence}: {command}" in page("secret-missing") for sentence, command in error.help
    )


def test_a_secret_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", "secret")
    assert discovery.current() is None
    error = discovery.no_store()
    assert error.code == "no-store"
    assert error.headline.endswith(": RALLYPOINT_SECRET_FILE is set, and RALLYPOINT_STORE is not")
    assert error.headline in page("no-store")
    assert error.help[0][1] == "export RALLYPOINT_STORE=tcp://HOST:PORT"


@pytest.mark.parametrize("file", [False, True])
def test_the_address_comes_from_the_environment_and_the_secret_from_the_call(
    file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not there is a variable for the secret as well."""
    if file:
        monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(tmp_path / "not there"))
    with rallypoint.serve(secret=SECRET) as server:
        monkeypatch.setenv("RALLYPOINT_STORE", server.address)
        with rallypoint.connect(secret=SECRET) as store:
            assert store.address == server.address
        with rallypoint.connect(secret_file=secret_file(tmp_path)) as store:
            assert store.address == server.address
    monkeypatch.setenv("RALLYPOINT_STORE", "nonsense")
    with pytest.raises(
        UsageError,
        match=r"^RALLYPOINT_STORE='nonsense' is not the address of a store: there is no port",
    ) as wrong:
        rallypoint.connect(secret=SECRET)
    assert wrong.value.help[0][1] == "export RALLYPOINT_STORE=tcp://nonsense:29500"
    monkeypatch.delenv("RALLYPOINT_STORE")
    with pytest.raises(UsageError, match="RALLYPOINT_STORE is not"):
        rallypoint.connect(secret=SECRET)


def test_errors_name_the_variable_that_they_are_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret_file(tmp_path, mode=0o644)
    monkeypatch.setenv("RALLYPOINT_STORE", "tcp://node0:41235")
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(path))
    found = discovery.current()
    assert found is not None
    with pytest.raises(
        EnvironmentProblem, match=f"RALLYPOINT_SECRET_FILE={path} cannot be used: its mode"
    ) as caught:
        found.secret()
    assert caught.value.help[0][1] == f"chmod 600 {path}"
    monkeypatch.setenv("RALLYPOINT_STORE", "nonsense")
    found = discovery.current()
    assert found is not None
    with pytest.raises(
        UsageError, match=r"^RALLYPOINT_STORE='nonsense' is not the address of a store"
    ) as wrong:
        found.secret()
    assert wrong.value.code == "address-malformed"
    assert wrong.value.help[0][1] == "export RALLYPOINT_STORE=tcp://nonsense:29500"


def test_a_program_of_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_JOB", "job7")
    assert discovery.current() is None
    assert "--no-python" in discovery.no_store().why[0]


def test_what_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_STORE", "tcp://node0:41235")
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(secret_file(tmp_path)))
    monkeypatch.setenv("RALLYPOINT_JOB", "job7")
    found = discovery.current()
    assert found is not None
    assert (found.address, found.job, found.rank, found.secret()) == (
        "tcp://node0:41235",
        "job7",
        None,
        SECRET,
    )
    assert found.identity.rank is None


def test_a_file_that_is_named_and_not_there_is_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_STORE", "tcp://node0:41235")
    monkeypatch.setenv("RALLYPOINT_SECRET_FILE", str(tmp_path / "absent"))
    found = discovery.current()
    assert found is not None
    with pytest.raises(EnvironmentProblem, match="No such file") as caught:
        found.secret()
    assert caught.value.code == "secret-unreadable"
    assert f"base64 > {tmp_path / 'absent'})" in caught.value.help[0][1]


def test_a_secret_whose_folder_is_gone(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        discovery.secret_from_file(f"{tmp_path}/of the job/secret")
    assert caught.value.help[0][1].startswith(f"mkdir -p '{tmp_path}/of the job' && ")
    ended = f"{tmp_path}/{discovery.SERVE_FOLDER_PREFIX}x1/secret"
    with pytest.raises(EnvironmentProblem, match="has ended") as caught:
        discovery.secret_from_file(ended)
    assert caught.value.help[0][1] == "rallypoint serve"


# --- secrets


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_may_use(mode: int, tmp_path: Path) -> None:
    path = secret_file(tmp_path, mode=mode)
    with pytest.raises(EnvironmentProblem, match=f"its mode is {mode:04o}") as caught:
        discovery.secret_from_file(str(path))
    assert caught.value.help[0][1] == f"chmod 600 {path}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    """Root took a file of mode 0600 that another user owned, and so knew."""
    path = secret_file(tmp_path)
    os.chown(path, 65534, 65534)
    with pytest.raises(EnvironmentProblem, match=r"another user \(uid 65534\)") as caught:
        discovery.secret_from_file(str(path))
    assert caught.value.code == "secret-unreadable"


def test_nobody_is_led_to_change_a_file_that_others_need(tmp_path: Path) -> None:
    """For `--secret-file /etc/passwd` the help was `chmod 600 /etc/passwd`, which root could have
    typed.
    """
    path = secret_file(
        tmp_path, b"root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/:/sbin/nologin\n", mode=0o644
    )
    with pytest.raises(EnvironmentProblem, match="its mode is 0644") as caught:
        discovery.secret_from_file(str(path))
    assert [command for _, command in caught.value.help] == [
        "(umask 077 && head -c 32 /dev/urandom | base64 > my-secret)"
    ]


@pytest.mark.parametrize("mode", [0o600, 0o400])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
def test_line_breaks_at_the_end_do_not_count(end: bytes, mode: int, tmp_path: Path) -> None:
    assert discovery.secret_from_file(str(secret_file(tmp_path, SECRET + end, mode))) == SECRET
    assert (
        discovery.checked_secret(SECRET + end)
        == discovery.checked_secret((SECRET + end).decode())
        == SECRET
    ), "as with open(file).read()"


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """As secrets are mounted into containers."""
    link = tmp_path / "link"
    link.symlink_to(secret_file(tmp_path))
    assert discovery.secret_from_file(str(link)) == SECRET


@pytest.mark.parametrize("kind", ["folder", "pipe", "large"])
def test_what_is_no_secret(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        secret_file(tmp_path, b"x" * (discovery.SECRET_FILE_BYTES + 1))
    with pytest.raises(
        EnvironmentProblem, match=r"not a regular file|4097 bytes are no secret"
    ) as caught:
        discovery.secret_from_file(str(path))
    assert caught.value.code == "secret-unreadable"


def test_one_that_is_too_short(tmp_path: Path) -> None:
    path = secret_file(tmp_path, SECRET[:15] + b"\n")
    with pytest.raises(
        UsageError, match=r"secret has 15 bytes, and at least 16 are needed"
    ) as caught:
        discovery.secret_from_file(str(path))
    assert caught.value.code == "secret-too-short"
    assert str(path) in str(caught.value)
    assert SECRET[:15].decode() not in str(caught.value)


def test_text_is_counted_in_bytes() -> None:
    assert discovery.checked_secret("é" * 8) == "é".encode() * 8
    assert discovery.checked_secret(SECRET) == SECRET
    with pytest.raises(UsageError, match="the secret has 0 bytes"):
        discovery.checked_secret("")


@pytest.mark.parametrize("secret", [32, True, None, [1] * 32])
def test_what_is_neither_bytes_nor_text_is_no_secret(secret: object) -> None:
    """bytes(32) are 32 zeros."""
    with pytest.raises(TypeError, match=f"a secret is bytes or str, not {type(secret).__name__}"):
        discovery.checked_secret(secret)  # type: ignore[arg-type]
