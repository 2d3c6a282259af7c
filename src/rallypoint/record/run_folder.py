"""One folder for each run: what was planned, what happened, what every rank said.

    <run>/plan.json  events.jsonl  report.json  rank0.log ...  running

A job on several nodes has a folder, and in that a run folder `node<k>` for each node.

`running` is locked by the launcher while the run lasts; the lock dies with it, so a run that was
killed is not taken for a running one. Everything is private to the user. A folder that cannot be
had, or a disk that fills up, costs the record and not the job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host.fd_passing import close_fds
from rallypoint.host.state_folder import state_folder
from rallypoint.record.kept_file import Trouble, as_json, reason_of, writable, write_whole
from rallypoint.record.run_list import (
    LauncherAddress,
    elsewhere_of,
    job_in,
    locked_here,
    past_runs,
    remove_old_runs,
    root_of,
)

OURS = re.compile(r"rank\d+\.log|events\.jsonl|plan\.json|report\.json|running")
"""The names of the files that a run folder consists of. Nothing else in it is ever touched."""


SECRET = re.compile(
    r"secret|token(?!i[sz])|passw|passphrase|passcode|pgpass|credential|(?:api|access|private)_?key|authorization|cookie|webhook"
    r"|(?:database|db|redis|mongo(?:db)?|broker|amqp|mysql|postgres(?:ql)?)_ur[il]"
    r"|(?<![a-z0-9])(?:pass|pw|pat|keys?|dsn|auth|creds?|jwt|bearer)(?![a-z0-9])|(?<=[^a-z0-9])pwd(?![a-z0-9])",
    re.IGNORECASE,
)
"""Pattern in the name of a variable that is not shown with its value. Short words count only by
themselves: DB_PASS and OPENAI_KEY, not COMPASS and MONKEY; PWD and OLDPWD are folders, MYSQL_PWD is
not, and TOKENIZERS_PARALLELISM is no token."""

SECRET_VALUE = re.compile(
    r"://[^/?#\s]*@|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer\s|[?&;](?:password|pwd|token)=",
    re.IGNORECASE,
)
"""Pattern in a value that is not shown, whatever its name: a URL with a user or a password in it, a
private key, a header."""


def default_root(environ: Mapping[str, str]) -> str:
    """Return the folder of all runs: `$XDG_STATE_HOME/rallypoint/runs`, else
    `~/.local/state/rallypoint/runs`."""
    return os.path.join(state_folder(environ), "runs")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with `***` for every value that looks like a secret, by its name or by
    itself."""
    return {
        name: "***" if SECRET.search(name) or SECRET_VALUE.search(value) else value
        for name, value in environment.items()
    }


class RunFolder:
    """The folder of this run; `path` is "" when there is none, and then everything asked of it is a
    no-op."""

    def __init__(self, path: str, lock: int | None, trouble: Trouble) -> None:
        self.path = path
        self.trouble = trouble
        self._lock = lock
        self._listed = ""  # the link to it in a folder of runs

    def __repr__(self) -> str:
        state = "closed" if self._lock is None else "open"
        return f"<RunFolder {self.path}: {state}>" if self.path else "<RunFolder: none>"

    def file(self, name: str) -> str:
        """Return the path of a file in it, "" when there is no folder."""
        return os.path.join(self.path, name) if self.path else ""

    def write_plan(self, plan: Any) -> None:
        """`plan.json`: the plan as it is, values of variables that look like secrets as `***`. Call
        before anything starts."""
        shown = msgspec.to_builtins(plan)
        for name in ("environment", "rank_environment"):
            value = shown.get(name)
            if isinstance(value, dict):
                shown[name] = without_secrets(value)
            elif isinstance(value, (list, tuple)):
                shown[name] = [without_secrets(each) for each in value]
        self.write_json("plan.json", shown)

    def write_report(self, reports: Any) -> None:
        """`report.json`: the reports, first cause first."""
        self.write_json("report.json", reports)

    def announce(self, door: LauncherAddress) -> None:
        """Say in `running` where the launcher can be asked. A disk that takes nothing costs the
        answers, not the job."""
        if self._lock is None:
            return
        try:
            os.pwrite(self._lock, msgspec.json.encode(door) + b"\n", 0)
        except OSError as error:
            self.trouble(self.file("running"), error, "rallypoint stacks will not find this job")

    def list_in(self, root: str) -> None:
        """Let `running_runs(root)` find it, though it is not there. Where nothing can be written it
        is not found without its name."""
        if self._lock is None or root in (os.path.dirname(self.path), root_of(self.path)):
            return
        folder = elsewhere_of(root)
        link = os.path.join(folder, f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.symlink(self.path, link)
            self._listed = link

    def write_json(self, name: str, value: Any) -> None:
        """Write a file whole or not at all: a reader never sees half of it."""
        if not self.path:
            return
        path = self.file(name)
        text = msgspec.json.format(as_json(value), indent=2) + b"\n"
        try:
            write_whole(path, text)
        except OSError as error:
            self.trouble(path, error, "it is not kept")

    def close(self) -> None:
        """Note that the run is over, and give the lock back. May be called twice."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        locked_here.discard(self.path)
        if self._listed:
            with contextlib.suppress(OSError):
                os.unlink(self._listed)
        with contextlib.suppress(OSError):  # the folder was removed, or its disk takes nothing more
            os.unlink(self.file("running"))
        os.close(lock)


def open_run_folder(
    path: str, job: str, say: Callable[[str], None], *, asked_for: bool
) -> RunFolder:
    """Make and lock the folder of a run.

    Not `asked_for` (the default place): when it cannot be made, one line is said and the run goes
    on without a folder; older runs beside it are removed (`remove_old_runs`), and `latest` points
    here. The run folder of one of several nodes is `<job>/node<k>`.

    `asked_for` (--run-dir): a folder that is absent or empty is used; in one that holds an earlier
    run, that run is replaced (as when a command is typed again), other files in it are left alone.
    Raises `UsageError` `run-folder-used` when a file of ours would overwrite one that no run of
    ours wrote, `run-folder-in-use` when a job that still runs has it, `EnvironmentProblem`
    `run-folder-unwritable` when it cannot be made.
    """
    path = os.path.abspath(path)
    root = root_of(path)
    trouble = Trouble(say)
    try:
        for above in (root, os.path.dirname(path)):
            os.makedirs(above, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        folder = RunFolder(path, _take(path), trouble)
        try:
            write_whole(folder.file("plan.json"), msgspec.json.encode({"job": job}))
        except OSError:
            folder.close()
            raise
    except OSError as error:
        reason = reason_of(error)
        if asked_for:
            raise EnvironmentProblem(
                "run-folder-unwritable",
                f"the run folder {path} cannot be written: {reason}",
                help=writable(error, path, "--run-dir DIR"),
            ) from error
        say(f"rallypoint: no record of this run is kept: {path}: {reason}")
        return RunFolder("", None, trouble)
    if not asked_for:
        _point_latest(root, path)
        remove_old_runs(root)
    return folder


def discard(path: str) -> None:
    """Remove a run that is over and of no interest to anybody. `latest` goes back to the one before
    it."""
    shutil.rmtree(path, ignore_errors=True)
    root, above = root_of(path), os.path.dirname(path)
    if above != root:
        with contextlib.suppress(OSError):  # other nodes have theirs in it
            os.rmdir(above)
    with contextlib.suppress(OSError):  # there is none, or it is another's by now
        if os.readlink(os.path.join(root, "latest")) == os.path.relpath(path, root):
            others = past_runs(root)
            if others:
                _point_latest(root, others[0].path)
            else:
                os.unlink(os.path.join(root, "latest"))


def _take(path: str) -> int:
    """Lock the folder and clear what an earlier run left in it."""
    names = [name for name in os.listdir(path) if OURS.fullmatch(name)]
    if names and names != ["running"] and job_in(path)[0] is None:
        raise UsageError(
            "run-folder-used",
            f"{os.path.join(path, names[0])} is there already and no run wrote it",
            help=(("name a folder that is empty or not there yet", "--run-dir DIR"),),
        )
    running, lock = os.path.join(path, "running"), -1
    if path not in locked_here:
        lock = os.open(running, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if lock < 0 or not _lock(lock):
        close_fds(lock)
        raise UsageError(
            "run-folder-in-use",
            f"the run folder {path} belongs to a job that is still running",
            help=(("name another folder for this run", "--run-dir DIR"),),
        )
    for name in names:
        if name != "running":
            os.unlink(os.path.join(path, name))
    os.ftruncate(lock, 0)  # what a launcher that was killed had said in it
    locked_here.add(path)
    return lock


def _lock(fd: int) -> bool:
    """Take the record lock if nobody has it. On a file system without locks (ENOLCK) nobody can
    tell: taken as free."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _point_latest(root: str, path: str) -> None:
    """`latest` -> this run, replaced in one step. A file system without symbolic links goes without
    it."""
    link = os.path.join(root, "latest")
    temporary = f"{link}.{os.getpid()}"
    with contextlib.suppress(OSError):
        os.symlink(os.path.relpath(path, root), temporary)
        os.replace(temporary, link)
