"""A store's server in a process of its own, which a test stops, continues and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

from ..warm_python import WarmPopen

SECRET = b"the secret of a server in a test"

_PROGRAM = """
import signal, sys
import rallypoint
{prelude}
server = rallypoint.Server(secret={secret!r}, max_bytes="512MiB")
signal.signal(signal.SIGTERM, lambda *_: server.stop("somebody asked for it"))
print(server.address, server._path, flush=True)
server.serve_forever()
"""


def add_and_tell(store: Any) -> None:
    """Run in a spawned child, with a c10d store. It stands here as a child imports all of the module
    that its function is in.
    """
    store.add("n", 1)
    store.set("timeout", str(store.timeout.total_seconds()))


class ServerProcess:
    """Serves from when it was made. `address` is tcp://, `local` unix://."""

    def __init__(self, prelude: str = "") -> None:
        """`prelude`: Python that runs there first."""
        self.secret = SECRET
        self._process = WarmPopen(
            [sys.executable, "-c", _PROGRAM.format(prelude=prelude, secret=SECRET)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address, path = self._process.stdout.readline().split()
        self.local = f"unix://{path}"
        self.pid = self._process.pid

    def stop(self) -> None:
        """Freeze it (SIGSTOP); it stands still when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        found = os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        assert found is not None
        assert found.si_status == signal.SIGSTOP

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """The orderly end; its exit status."""
        self.go_on()
        self._process.terminate()
        return self._process.wait(60.0)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
