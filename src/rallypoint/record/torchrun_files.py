"""Names of the files that torchrun's --log-dir, --redirects and --tee make; opens them.

`launcher/agent/rank_streams.py` decides which rank writes to which.

    <log_dir>/<run_id>_<random>/attempt_<k>/<local_rank>/stdout.log, stderr.log, error.json
    <log_dir>/<run_id>_<random>/attempt_<k>/filtered_stdout.log, filtered_stderr.log

(torch/distributed/elastic/multiprocessing/api.py, DefaultLogsSpecs.)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from typing import Literal

from rallypoint.errors import EnvironmentProblem
from rallypoint.record.kept_file import reason_of, writable


class TorchrunFiles:
    """The folder of one run. Made at once; raises `EnvironmentProblem` `log-dir-unwritable` when
    that cannot be.

    `log_dir` "" is a new folder under TMPDIR, as torchrun does when files are asked for without a
    place.
    """

    def __init__(self, log_dir: str, run_id: str, local_size: int) -> None:
        self._local_size = local_size
        try:
            if log_dir:
                os.makedirs(log_dir, exist_ok=True)
            else:
                log_dir = tempfile.mkdtemp(prefix="torchelastic_")
            self.path = tempfile.mkdtemp(
                prefix=f"{run_id.replace('/', '_')}_", dir=os.path.abspath(log_dir)
            )
        except OSError as error:
            raise _unwritable(log_dir, error) from error

    def __repr__(self) -> str:
        return f"<TorchrunFiles {self.path}: {self._local_size} local ranks>"

    def begin(self, attempt: int) -> None:
        """Make the folders of an attempt, empty. `EnvironmentProblem` `log-dir-unwritable` as
        above."""
        folder = self.attempt(attempt)
        shutil.rmtree(
            folder, ignore_errors=True
        )  # it exists only when an attempt of that number was begun before
        try:
            for local_rank in range(self._local_size):
                os.makedirs(os.path.join(folder, str(local_rank)))
        except OSError as error:
            raise _unwritable(folder, error) from error

    def attempt(self, attempt: int) -> str:
        """Return the folder of an attempt."""
        return os.path.join(self.path, f"attempt_{attempt}")

    def open(self, attempt: int, local_rank: int, stream: Literal["stdout", "stderr"]) -> int:
        """Create a rank's file and return its descriptor (close-on-exec; the caller closes it): a
        worker's own stdout or stderr when redirected, `LogPump.attach(tee=...)` when teed.
        Appending, so that children may share it."""
        path = self.file(attempt, local_rank, stream)
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(path, error) from error

    def file(self, attempt: int, local_rank: int, stream: Literal["stdout", "stderr"]) -> str:
        """Return the path of a rank's file."""
        return os.path.join(self.attempt(attempt), str(local_rank), f"{stream}.log")

    def error_file(self, attempt: int, local_rank: int) -> str:
        """Return where @record writes: the value of TORCHELASTIC_ERROR_FILE."""
        return os.path.join(self.attempt(attempt), str(local_rank), "error.json")

    def filtered(self, attempt: int, stream: Literal["stdout", "stderr"]) -> str:
        """Return the file of --duplicate-stdout-filters or --duplicate-stderr-filters: the path for
        `LogPump.duplicate`."""
        return os.path.join(self.attempt(attempt), f"filtered_{stream}.log")


def hand_on(written: str, code: int, path: str) -> str:
    """Write what `@record` has written in a rank to the launcher's own TORCHELASTIC_ERROR_FILE,
    with the exit code in it, as torchrun does. Why that was not possible, "" when it was."""
    with contextlib.suppress(ValueError):  # not JSON: handed on as it is
        error = json.loads(written)
        if isinstance(error, dict) and isinstance(error.get("message"), dict):
            error["message"]["errorCode"] = code
            written = json.dumps(error)
    try:
        with open(path, "w") as file:
            file.write(written)
    except OSError as refusal:
        return reason_of(refusal)
    return ""


def _unwritable(path: str, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        "log-dir-unwritable",
        f"the log folder {path} cannot be written: {reason_of(error)}",
        help=writable(error, path, "--log-dir DIR"),
    )
