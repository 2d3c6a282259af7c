"""A process that holds a port, in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.clock import Clock
from rallypoint.host.socket_addresses import address_of
from rallypoint.units import duration


class PortHolder(NamedTuple):
    """Process that has a port. `pid` 0: not visible to us; `uid` is the socket's owner, which
    everyone may see."""

    port: int
    host: str
    # "listening", "connected", "ownerless" (what is left of a connection, or its beginning),
    # "time-wait"
    state: str
    uid: int
    pid: int = 0
    command: str = ""
    started: float = 0.0  # seconds since 1970, 0 if unknown
    peer: str = ""
    # the rallypoint job that the process belongs to, if it is one of the launcher's own or a forked
    # rank
    job: str = ""

    @property
    def user(self) -> str:
        """Return the owner's name, or number where there is none."""
        return user_name(self.uid)

    def accepts_at(self, ip: str) -> bool:
        """Tell whether it listens at this address of this machine: at itself, or at all of them."""
        return (
            self.state == "listening" and same_place(self.host, ip) and ip not in ("0.0.0.0", "::")
        )

    def line(self, now: float | None = None) -> str:
        """`python train.py (pid 5112, user ada, started 3 h ago) is listening on
        127.0.0.1:29500`."""
        address = address_of(self.host, self.port)
        if self.state == "time-wait":
            return f"a connection that was closed on {address} is still in TIME_WAIT, at most 60 s"
        if self.state == "ownerless":
            return f"no process has the connection from {address} to {self.peer}: it was closed, or is not accepted yet"
        does = (
            f"is listening on {address}"
            if self.state == "listening"
            else f"is connected from {address} to {self.peer}"
        )
        if not self.pid:
            unseen = (
                "in another container"
                if os.geteuid() in (0, self.uid)
                else "only that user and root see which"
            )
            return f"a process of user {self.user} ({unseen}) {does}"
        since = (
            f", started {duration(max(0.0, (Clock().wall() if now is None else now) - self.started))} ago"
            if self.started
            else ""
        )
        return f"{self.command or 'a process'} (pid {self.pid}, user {self.user}{since}) {does}"


# in the command line of every process that the launcher starts for itself
_OURS = "from rallypoint.launcher."


def described(holder: PortHolder, pid: int) -> PortHolder:
    """Return the holder with what can be seen of its process."""
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            argv = process.cmdline() or [process.name()]
            job = ""
            if _OURS in " ".join(argv):
                with contextlib.suppress(psutil.AccessDenied):  # another user's
                    job = process.environ().get("RALLYPOINT_JOB", "")
            command = f"the rallypoint job {job}" if job else _short(argv)
            return holder._replace(pid=pid, command=command, started=process.create_time(), job=job)
    except psutil.Error:  # it ended between the two looks
        return holder._replace(pid=pid)


def _short(argv: Sequence[str]) -> str:
    """Return a command as a person would say it: no folder before the program, one line, not
    endless."""
    text = " ".join([os.path.basename(argv[0]), *argv[1:]])
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= 80 else text[:77] + "..."


def user_name(uid: int) -> str:
    """Return a user's name, or number where there is none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def same_place(held: str, ip: str) -> bool:
    """Tell whether a socket that is bound to `held` keeps others from `ip`: the same address, or
    one of the two is all of them."""
    plain = held.removeprefix("::ffff:")
    return plain == ip or {plain, ip} & {"0.0.0.0", "::"} != set()
