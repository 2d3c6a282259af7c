"""`rallypoint serve`: the coordination store alone, as a process."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
from typing import TYPE_CHECKING, Any

from rallypoint.cli.args import CommandLine
from rallypoint.cli.output import write_out
from rallypoint.cli.port_file import PortFile
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.launcher import exits
from rallypoint.units import size

if TYPE_CHECKING:
    import signal

    from rallypoint.host.signals import SignalLog
    from rallypoint.store.server.server import Server

SECRET_NAME = "secret"


def main(line: CommandLine) -> int:
    """Serve; return the exit status: 0 after SIGTERM or SIGHUP, 130 after Ctrl-C."""
    values = line.values()
    port_file, secret_file = values["port_file"], values["secret_file"]
    limits = {name: values[name] for name in ("host", "port", "port_range", "max_bytes")}
    # looks at the file, before anything is started
    return serve(PortFile(port_file) if port_file else None, secret_file, limits)


def serve(port_file: PortFile | None, secret_file: str | None, limits: dict[str, Any]) -> int:
    """Serve until a signal comes; return the exit status. `limits`: arguments of `Server`."""
    import signal

    from rallypoint.host import threads
    from rallypoint.host.signals import SignalLog
    from rallypoint.store.discovery import secret_from_file
    from rallypoint.store.logger import logger
    from rallypoint.store.server.server import Server

    logger(loud=True)
    came: list[signal.Signals] = []
    with contextlib.ExitStack() as stack:
        # First of all: between here and serving, a signal must not leave files behind.
        signals = SignalLog((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        stack.callback(signals.close)
        if secret_file is None:
            secret_file = _new_secret(stack)
        secret = secret_from_file(secret_file)
        try:
            server = Server(secret=secret, **limits)
        except (UsageError, EnvironmentProblem) as error:
            raise _with_options(error) from error
        stack.callback(server.stop)
        if port_file is not None:
            stack.callback(port_file.remove)
            port_file.write(server.address.rpartition(":")[2])
        _announce(server, secret_file)
        threads.start(lambda: _stop_at(server, signals, came), "signals")
        server.serve_forever()
    return exits.of_signal(signal.SIGINT) if signal.SIGINT in came else 0


def _announce(server: Server, secret_file: str) -> None:
    path = shlex.quote(os.path.abspath(secret_file))
    clients = server.address
    for everywhere, version in (("0.0.0.0", 4), ("[::]", 6)):
        if f"//{everywhere}:" in clients:  # on another machine this would mean that machine
            from rallypoint.host.addresses import source_address

            here = source_address(version) or source_address(4) or "127.0.0.1"
            clients = clients.replace(everywhere, f"[{here}]" if ":" in here else here)
    write_out(
        f"the store is at {server.address}, for at most {size(server.limits.store_bytes)}; its clients call rallypoint.connect() after\n"
        f"export RALLYPOINT_STORE={clients} RALLYPOINT_SECRET_FILE={path}\n"
    )


def _with_options(error: UsageError | EnvironmentProblem) -> UsageError | EnvironmentProblem:
    """Return an error about what `Server` was called with, its help in terms of our options."""
    options = {
        'max_bytes="2GiB"': "--max-bytes 2GiB",
        "port=0": "--port 0",
        'host="127.0.0.1"': "--host 127.0.0.1",
    }
    help = tuple((sentence, options.get(command, command)) for sentence, command in error.help)
    if error.code == "port-invalid" and not help:  # --port lies outside --port-range
        help = (("leave --port out: a free one of the range is taken", ""),)
    return type(error)(error.code, error.headline, why=error.why, help=help)


def _stop_at(server: Server, signals: SignalLog, came: list[signal.Signals]) -> None:
    """Wait for a signal, and stop the server."""
    while not came:
        select.select([signals], [], [])
        came += signals.read()
    server.stop(f"rallypoint serve got {came[0].name}")


def _new_secret(stack: contextlib.ExitStack) -> str:
    """Write a secret to a file of its own, in a private folder, and return its path. Both are
    removed with the stack; the folder stays when there is something else in it.
    """
    import secrets
    import tempfile

    from rallypoint.store.discovery import SERVE_FOLDER_PREFIX

    place = os.environ.get("XDG_RUNTIME_DIR")
    try:
        folder = tempfile.mkdtemp(
            prefix=SERVE_FOLDER_PREFIX, dir=place if place and os.access(place, os.W_OK) else None
        )
        path = os.path.join(folder, SECRET_NAME)
        stack.callback(_remove_secret, folder, path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(32)}\n")
    except OSError as error:
        raise EnvironmentProblem(
            "secret-unreadable",
            f"the secret cannot be kept in a file: {error}",
            help=(("name a file for it", "rallypoint serve --secret-file F"),),
        ) from error
    return path


def _remove_secret(folder: str, path: str) -> None:
    with contextlib.suppress(OSError):  # it is not there, or no longer ours to remove
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
