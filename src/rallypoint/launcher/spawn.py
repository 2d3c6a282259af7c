"""The first lines of every interpreter that we start.

With `-c` the interpreter puts the working directory first on `sys.path`; it is taken away before
anything is imported, so that a user's `re.py` cannot get in between.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_CLEAN = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\n"

# A descriptor for its orders, the pid of the process that starts it, whether it imports torch.
TEMPLATE = (
    _CLEAN + "from rallypoint.launcher.template.template_main import main\nmain(%d, %d, %r)()"
)
# Descriptors: setup, order, and a list of those that came with the order.
FRESH = _CLEAN + "from rallypoint.launcher.worker.worker import fresh\nfresh(%d, %d, %r)"
# A descriptor, the caller's line, and its pid.
STANDBY = _CLEAN + "from rallypoint.launcher.launch.standby_main import main\nmain(%d, %d)"
HOST = _CLEAN + "from rallypoint.launcher.template.c10d_host import main\nmain()"

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a batch system sends before the end of a job, to the launcher or to every process."""

_LEAD = "import os\nos.setsid()\n"


def spawn(arguments: Sequence[str], environment: Mapping[str, str], **how: Any) -> int:
    """Start this interpreter with these arguments, `-c` and one of the texts above among them, at
    the head of a session of its own, and return its pid. `how`: see `os.posix_spawn`. Raises OSError."""
    argv = [sys.executable, *arguments]
    try:
        return os.posix_spawn(sys.executable, argv, environment, setsid=True, **how)
    except NotImplementedError:
        # A Python that was built against a C library from before 2017: see host/system_calls.py.
        code = argv.index("-c") + 1
        argv[code] = _LEAD + argv[code]
        return os.posix_spawn(sys.executable, argv, environment, **how)


def start_template(environment: Mapping[str, str], *, imports: bool) -> tuple[int, socket.socket]:
    """Start a template with this environment; return its pid, and the line to it, where it waits for
    its `Setup`. It imports torch at once, or, without `imports`, is a starter of fresh interpreters.
    For a process with one thread. Raises OSError."""
    given = dict(environment)
    if imports:
        given["OPENBLAS_NUM_THREADS"] = (
            "1"  # or it starts threads, and a process with threads must not be forked
        )
    # `channel.pair()`, which is not loaded yet.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.set_inheritable(True)
        pid = spawn(
            ["-u", "-c", TEMPLATE % (theirs.fileno(), os.getpid(), imports)],
            given,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
            # what a scheduler sends to every process of the job is the agent's to act on
            setsigmask=signal.valid_signals(),
        )
    return pid, ours
