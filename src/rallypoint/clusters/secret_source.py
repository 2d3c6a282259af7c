"""Secret of a job where no file was named: a mounted one, or the key file of the user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from rallypoint.errors import EnvironmentProblem
from rallypoint.host.state_folder import state_folder

MOUNT = "/etc/rallypoint/secret"
"""Place where a container has the secret of its jobs."""


def mounted() -> str:
    """Return the file of the mounted secret, "" without one. One that is there and is no good is
    refused where it is read: nothing else is tried then.
    """
    return MOUNT if os.path.lexists(MOUNT) else ""


def key_path(environ: Mapping[str, str]) -> str:
    """Return the key file of the user: `$XDG_STATE_HOME/rallypoint/key`, else
    `~/.local/state/rallypoint/key`."""
    return os.path.join(state_folder(environ), "key")


def user_key(environ: Mapping[str, str]) -> str:
    """Return the key file of the user, which is made now if there is none.

    Nodes that share the home folder may make it at the same time: the file gets its name by
    link(2), which one of them is granted, and the others take what that one has made. Raises
    EnvironmentProblem `secret-unreadable` where it cannot be made.
    """
    from rallypoint.store.discovery import new_secret

    path = key_path(environ)
    if os.path.lexists(path):
        return path
    draft = f"{path}.{os.uname().nodename}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(new_secret().hex().encode() + b"\n")
                file.flush()
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as error:
        raise EnvironmentProblem(
            "secret-unreadable",
            f"the key file {path} cannot be made: {os.strerror(error.errno or 0)}",
            why=("the nodes of a job have their secret from it where none was named",),
            help=(("name a file with a secret instead", "rallypoint run --secret-file ..."),),
        ) from error
    return path
