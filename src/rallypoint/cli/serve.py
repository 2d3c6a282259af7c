"""`rallypoint serve`: the coordination store alone, as a process."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from rallypoint.cli import args
from rallypoint.cli.args import CommandLine
from rallypoint.cli.commands import SERVE
from rallypoint.cli.output import write_out
from rallypoint.cli.port_file import PortFile
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.launcher import exits

if TYPE_CHECKING:
    import signal

    from rallypoint.host.signals import SignalLog
    from rallypoint.store.server.server import Server

SECRET_NAME = "secret"


def main(argv: list[str]) -> int:
    """`rallypoint serve` with its arguments; the exit status: 0 after SIGTERM or SIGHUP, 130 after
    Ctrl-C.
    """

    def act(line: CommandLine) -> int:
        values = args.values(line, SERVE)
        return serve(
            values["host"],
            values["port"],
            values["port_file"],
            values["secret_file"],
            values["max_bytes"],
            values["port_range"],
        )

    return args.invoke(SERVE, argv, act)


def serve(
    host: str,
    port: int,
    port_file: str | None,
    secret_file: str | None,
    max_bytes: int | None,
    port_range: tuple[int, int] | None = None,
) -> int:
    """Serve until a signal comes; the exit status."""
    import signal
    import threading

    from rallypoint.host.signals import SignalLog
    from rallypoint.store.discovery import secret_from_file
    from rallypoint.store.logger import logger
    from rallypoint.store.server.server import Server

    port_kept = (
        None if port_file is None else PortFile(port_file)
    )  # looks at it, before anything is started
    logger(loud=True)
    # First of all: between here and serving, a signal must not leave files behind.
    signals = SignalLog((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    folder = ""
    came: list[signal.Signals] = []
    try:
        if secret_file is None:
            folder, secret_file = _new_secret()
        try:
            secret = secret_from_file(secret_file)
        except EnvironmentProblem as error:
            if error.help or os.path.exists(secret_file):
                raise
            raise EnvironmentProblem(
                error.code,
                error.headline,
                help=(
                    (
                        "make one",
                        f"(umask 077 && head -c 32 /dev/urandom | base64 > {shlex.quote(secret_file)})",
                    ),
                ),
            ) from error
        try:
            server = Server(
                host=host, port=port, port_range=port_range, max_bytes=max_bytes, secret=secret
            )
        except (UsageError, EnvironmentProblem) as error:
            raise _with_options(error) from error
        try:
            if port_kept is not None:
                port_kept.write(server.address.rpartition(":")[2])
            _announce(server, secret_file)
            threading.Thread(
                target=_stop_at,
                args=(server, signals, came),
                name="rallypoint: signals",
                daemon=True,
            ).start()
            server.serve_forever()
        finally:
            server.stop()
            if port_kept is not None:
                port_kept.remove()
    finally:
        signals.close()
        if folder:
            _remove_folder(folder)
    return exits.of_signal(signal.SIGINT) if signal.SIGINT in came else 0


def _announce(server: Server, secret_file: str) -> None:
    gib = server.limits.store_bytes / 1024**3
    path = shlex.quote(os.path.abspath(secret_file))
    write_out(
        f"the store is at {server.address}, for at most {gib:.3g} GiB; its clients call rallypoint.connect() after\n"
        f"export RALLYPOINT_STORE={server.address} RALLYPOINT_SECRET_FILE={path}\n"
    )


def _with_options(error: UsageError | EnvironmentProblem) -> UsageError | EnvironmentProblem:
    """An error about what `Server` was called with, its help in terms of our options."""
    options = {
        'max_bytes="2GiB"': "--max-bytes 2GiB",
        "port=0": "--port 0",
        'host="127.0.0.1"': "--host 127.0.0.1",
    }
    help = tuple((sentence, options.get(command, command)) for sentence, command in error.help)
    if (
        error.code == "port-invalid" and not help
    ):  # --port lies outside --port-range: its reader has seen to the rest
        help = (("leave --port out: a free one of the range is taken", ""),)
    return type(error)(error.code, error.headline, why=error.why, help=help)


def _stop_at(server: Server, signals: SignalLog, came: list[signal.Signals]) -> None:
    """Wait for a signal, and stop the server."""
    import select

    while not came:
        select.select([signals], [], [])
        came += signals.read()
    server.stop(f"rallypoint serve got {came[0].name}")


def _new_secret() -> tuple[str, str]:
    """A secret in a file of its own, in a private folder: the folder, and the file's path."""
    import secrets
    import tempfile

    place, folder = os.environ.get("XDG_RUNTIME_DIR"), ""
    try:
        folder = tempfile.mkdtemp(
            prefix="rallypoint-serve-", dir=place if place and os.access(place, os.W_OK) else None
        )
        path = os.path.join(folder, SECRET_NAME)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(32)}\n")
    except OSError as error:
        if folder:
            _remove_folder(folder)
        raise EnvironmentProblem(
            "secret-unreadable",
            f"the secret cannot be kept in a file: {error}",
            help=(("name a file for it", "rallypoint serve --secret-file F"),),
        ) from error
    return folder, path


def _remove_folder(folder: str) -> None:
    """The secret's folder; it stays when somebody has put something else into it."""
    _remove(os.path.join(folder, SECRET_NAME))
    try:
        os.rmdir(folder)
    except OSError:
        pass


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # it is not there, or no longer ours to remove
        pass
