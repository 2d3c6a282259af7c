"""The first lines of every interpreter that we start.

With `-c` the interpreter puts the working directory first on `sys.path`; it is taken away before anything is imported, so that a
user's `re.py` cannot get in between.
"""

from __future__ import annotations

_CLEAN = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\n"

TEMPLATE = _CLEAN + "from rallypoint.launcher.template import serve\nserve(%d, %d)()"  # setup and orders, descriptors
# Descriptors: setup, order, control, evidence, secret, terminal, and those of the parcel.
FRESH = _CLEAN + "from rallypoint.launcher.worker import fresh\nfresh(%d, %d, %d, %d, %d, %d, %r)"
# Descriptors: the caller's line, and what there is to know.
STANDBY = _CLEAN + "from rallypoint.launcher.hired import main\nmain(%d, %d)"
HOST = _CLEAN + "from rallypoint.launcher.c10d_host import main\nmain()"
CULPRIT = _CLEAN + "from rallypoint.launcher.culprit import main\nmain()"
