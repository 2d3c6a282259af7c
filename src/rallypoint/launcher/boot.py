"""The first lines of every interpreter that we start.

With `-c` the interpreter puts the working directory first on `sys.path`; it is taken away before anything is imported, so that a
user's `re.py` cannot get in between.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_CLEAN = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\n"

TEMPLATE = _CLEAN + "from rallypoint.launcher.template import serve\nserve(%d, %d)()"  # setup and orders, descriptors
# Descriptors: setup, order, control, evidence, secret, terminal, and those of the parcel.
FRESH = _CLEAN + "from rallypoint.launcher.worker import fresh\nfresh(%d, %d, %d, %d, %d, %d, %r)"
# Descriptors: the caller's line, and what there is to know.
STANDBY = _CLEAN + "from rallypoint.launcher.hired import main\nmain(%d, %d)"
HOST = _CLEAN + "from rallypoint.launcher.c10d_host import main\nmain()"
CULPRIT = _CLEAN + "from rallypoint.launcher.culprit import main\nmain()"

_LEAD = "import os\nos.setsid()\n"


def spawn(arguments: Sequence[str], environment: Mapping[str, str], **how: Any) -> int:
    """Start this interpreter with these arguments, `-c` and one of the texts above among them, at the head of a session of its own; its
    pid. `how`: see `os.posix_spawn`. Raises OSError."""
    argv = [sys.executable, *arguments]
    try:
        return os.posix_spawn(sys.executable, argv, environment, setsid=True, **how)
    except NotImplementedError:  # a Python that was built against a C library from before 2017: see host/system_calls.py
        code = argv.index("-c") + 1
        argv[code] = _LEAD + argv[code]
        return os.posix_spawn(sys.executable, argv, environment, **how)
