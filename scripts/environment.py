"""Make .venv hold this project and the extras named as arguments; a second run is quick and needs no network.

Run by scripts/environment.sh with any Python >= 3.11; only the standard library is there. What it promises:

- Nothing is installed while the stamp in .venv is the right one: the hash of pyproject.toml, constraints.txt, the version
  of .venv's Python and the folder (console scripts carry it). The stamp also names the extras that are there.
- A torch that is in .venv stays. Otherwise $RALLYPOINT_TORCH (a requirement) is installed if set, else the pinned version.
- An install that was interrupted, by Ctrl-C or by SIGKILL, is mended by the next run.
- Two runs at once take turns. The lock belongs to the open file, which pip holds as well: it is free when the last of
  those that may write into .venv is gone, and never longer.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

LOG_TAIL = 10
"""Lines of pip's output shown when it fails: its error and what led to it fit, its list of downloads does not."""

PIP_STOP = 10.0
"""Seconds that pip gets to end by itself after Ctrl-C (it removes its temporary files) before it is killed."""

PIP = ("-m", "pip", "--no-input", "--disable-pip-version-check")
INSTALL = ("install", "--only-binary=:all:", "--no-warn-script-location", "--no-user")
"""Wheels only. --no-user: a `user = true` in pip's configuration is meant for the system's Python, and fails in .venv."""


class Failed(Exception):
    """A step did not work; the message is what the user sees."""


class Interrupted(BaseException):
    """A signal asked us to stop."""

    def __init__(self, number: int) -> None:
        self.number = number


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


class Environment:
    """The .venv of one checkout."""

    def __init__(self, root: Path, requested: str = "", say: Callable[[str], None] = print) -> None:
        """`requested` is the user's $PYTHON: a .venv of another version is made anew for it. Without it any that works is kept."""
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = root / ".venv.log"
        self._requested = bool(requested)
        self._say = say
        self._lock = -1

    # files in .venv, so that they go with it
    @property
    def stamp(self) -> Path:
        """Written last: what it names is there, whole."""
        return self.folder / "rallypoint-stamp.json"

    @property
    def unfinished(self) -> Path:
        """There from before the first install until after the stamp."""
        return self.folder / "rallypoint-unfinished"

    def prepare(self, extras: Sequence[str]) -> None:
        """Make .venv hold the project with `extras`. Raises `Failed`; whatever ends it, the next call goes on from there."""
        began = time.monotonic()
        with self._turn():
            there = self._stamped_extras()
            wanted = sorted(set(extras) - there) if there is not None else sorted(set(extras))
            if there is not None and not wanted:
                self._line("environment: .venv is ready", began)
                return
            self.log.write_text("")
            if there is None:
                self._make_venv()
            if self.unfinished.exists():
                self._mend()
            else:
                self.unfinished.touch()
            self._install_torch()
            self._install_requirements(wanted, project=there is None)
            if there is None:
                with self._step("rallypoint, from this folder"):
                    # No index: what building it needs was installed with the requirements.
                    self._pip(
                        *INSTALL,
                        "--no-deps",
                        "--no-index",
                        "--no-build-isolation",
                        "--editable",
                        str(self.root),
                    )
            self._write_stamp(sorted({*wanted, *(there or ())}))

    # taking turns

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._lock = os.open(self.root / ".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                began = time.monotonic()
                holder = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
                self._say(f"waiting for process {holder or 'unknown'}, which is installing")
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._line("waited for our turn", began)
            except OSError as error:  # a file system without locks
                self._say(f"two runs at once cannot take turns here: {error.strerror}")
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(self._lock)
            self._lock = -1

    # the stamp

    def _digest(self) -> str | None:
        """What an installation depends on; None when .venv has no Python that starts."""
        version = self._ask("import sys; print(sys.version)")
        if version is None:
            return None
        parts = [(self.root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
        parts += [version.encode(), os.fsencode(self.root)]
        return hashlib.sha256(
            b"\0".join(hashlib.sha256(part).digest() for part in parts)
        ).hexdigest()

    def _stamped_extras(self) -> set[str] | None:
        """The extras that a stamp says are there; None when there is no stamp, or for something else."""
        try:
            stamp = json.loads(self.stamp.read_text())
            # Written on behalf of this very folder, or copied or moved here with it: the digest tells.
            if self._is_other_version() or stamp["digest"] != self._digest():
                return None
            return {str(extra) for extra in stamp["extras"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_stamp(self, extras: Sequence[str]) -> None:
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(json.dumps({"digest": self._digest(), "extras": extras}) + "\n")
        partial.replace(self.stamp)
        self.unfinished.unlink()

    # steps

    def _make_venv(self) -> None:
        began, why_not = time.monotonic(), self.why_not_usable()
        if why_not is None:
            self.stamp.unlink(missing_ok=True)
            self._line(f".venv kept, Python {self._version_of_venv()}", began)
            return
        name = f".venv for Python {'.'.join(map(str, sys.version_info[:3]))}" + (
            f" ({why_not}: made anew)" if why_not else ""
        )
        with self._step(name):
            if self.folder.is_symlink() or self.folder.is_file():
                self.folder.unlink()
            self._run([sys.executable, "-I", "-m", "venv", "--clear", str(self.folder)])

    def _install_torch(self) -> None:
        began = time.monotonic()
        there = self._ask("import importlib.metadata as m; print(m.version('torch'))")
        if there is not None:
            self._line(f"torch {there} kept", began)
            return
        own = os.environ.get("RALLYPOINT_TORCH", "")
        wanted = own or next(line for line in self._constraints() if re.match(r"torch\s*==", line))
        with self._step(wanted):
            # With the user's choice of torch goes that torch's choice of what it needs.
            self._pip(
                *INSTALL,
                *(() if own else ("--constraint", str(self.root / "constraints.txt"))),
                "--",
                wanted,
            )

    def _install_requirements(self, extras: Sequence[str], project: bool) -> None:
        settings = tomllib.loads((self.root / "pyproject.toml").read_text("utf-8"))
        optional = settings["project"].get("optional-dependencies", {})
        if unknown := set(extras) - optional.keys():
            raise Failed(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")
        wanted = [requirement for extra in extras for requirement in optional[extra]]
        if project:
            wanted += settings["project"]["dependencies"] + settings["build-system"]["requires"]
        with self._step(
            f"{len(wanted)} requirements of {', '.join((['rallypoint'] if project else []) + list(extras))}"
        ):
            # All pins but torch's: a requirement that needs torch would bring that version in the place of the one that is there.
            pins = self.folder / "rallypoint-constraints.txt"
            pins.write_text(
                "".join(
                    f"{line}\n" for line in self._constraints() if not re.match(r"torch\s*==", line)
                )
            )
            self._pip(*INSTALL, "--constraint", str(pins), "--", *wanted)

    # what is there

    def _constraints(self) -> list[str]:
        lines = (
            line.partition("#")[0].strip()
            for line in (self.root / "constraints.txt").read_text("utf-8").splitlines()
        )
        return [line for line in lines if line]

    def _version_of_venv(self) -> str:
        return self._ask("import sys; print('%d.%d.%d' % sys.version_info[:3])") or "unknown"

    def _is_other_version(self) -> bool:
        mine = "{}.{}".format(*sys.version_info[:2])
        return (
            self._requested
            and self._ask("import sys; print('%d.%d' % sys.version_info[:2])") != mine
        )

    def why_not_usable(self) -> str | None:
        """Why .venv cannot be built upon, "" when there is none, None when it can."""
        if not self.folder.exists() and not self.folder.is_symlink():
            return ""
        if self._ask("import sys; print(sys.version_info >= (3, 11))") != "True":
            return "its Python does not start or is too old"
        if self._is_other_version():
            return f"it had Python {self._version_of_venv()}"
        if (
            self._ask(
                "import runpy, sys; sys.argv = ['pip', '--version']; runpy.run_module('pip', run_name='__main__')"
            )
            is None
        ):
            return "its pip does not start"
        if any(
            info.name.startswith("pip-") and not is_complete(info) for info in self._installed()
        ):
            return "its pip is not whole"
        return None

    def _installed(self) -> list[Path]:
        """The .dist-info folders in .venv itself."""
        place = self._ask("import sysconfig; print(sysconfig.get_path('purelib'))")
        return sorted(Path(place).glob("*.dist-info")) if place else []

    def _mend(self) -> None:
        """Forget what an interrupted pip left half installed; it is then installed again, over what there is of it.

        A torch that was there before that install began is not looked at: a user may have changed a file of it.
        """
        began, since = time.monotonic(), self.unfinished.stat().st_mtime
        half = [
            info
            for info in self._installed()
            if not is_complete(info)
            and not (info.name.startswith("torch-") and info.stat().st_mtime < since)
        ]
        for info in half:
            shutil.rmtree(info)
        names = ", ".join(info.name.partition("-")[0] for info in half)
        self._line(f"an interrupted install is mended{': ' + names if names else ''}", began)

    # running things

    def _ask(self, code: str) -> str | None:
        """What .venv's Python prints for `code`; None when it fails or cannot start."""
        try:
            done = subprocess.run(
                [self.python, "-I", "-c", code],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def _pip(self, *arguments: str) -> None:
        self._run([str(self.python), "-I", *PIP, *arguments])

    def _run(self, command: Sequence[str]) -> None:
        """Run it with its output in the log. It holds the lock too, should we be killed. Raises `Failed` with the log's end."""
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                pass_fds=(self._lock,),
            )
            try:
                status = process.wait()
            except BaseException:
                _stop(process)
                raise
        if status:
            tail = self.log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL:]
            raise Failed(
                "\n".join(
                    [
                        *(f"  | {line}" for line in tail),
                        f"exit status {status}; the whole log is {self.log}",
                    ]
                )
            )

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except Failed as failure:
            raise Failed(f"{name} failed:\n{failure}") from None
        self._line(name, began)

    def _line(self, name: str, began: float) -> None:
        self._say(f"{name:<44} {time.monotonic() - began:6.1f} s")


def is_complete(info: Path) -> bool:
    """Whether every file of a distribution is there, in the size that the RECORD in its .dist-info says.

    pip writes RECORD last; what a person edited since counts as incomplete, which is why only an interrupted install asks.
    """
    try:
        with (info / "RECORD").open(newline="", encoding="utf-8") as record:
            return all(
                (info.parent / name).stat().st_size == int(size)
                for name, _, size in csv.reader(record)
                if size
            )
    except (OSError, ValueError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End pip: a terminal's Ctrl-C has reached it already, so it is first given a moment; then asked; then killed."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            return
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PIP_STOP)
            return
    finally:  # a second Ctrl-C ends up here at once
        process.kill()
        process.wait()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupted)
    environment = Environment(
        Path(__file__).resolve().parent.parent,
        requested=os.environ.get("PYTHON", ""),
        say=lambda line: print(line, flush=True),
    )
    try:
        environment.prepare(sys.argv[1:])
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or environment.folder}: {error.strerror}", file=sys.stderr)
        return 1
    except Interrupted as signalled:
        print("interrupted; the next run goes on from here", file=sys.stderr)
        return 128 + signalled.number
    return 0


if __name__ == "__main__":
    sys.exit(main())
