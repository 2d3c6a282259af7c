"""Folder in which a user's programs keep what outlives them."""

from __future__ import annotations

import os
from collections.abc import Mapping


def state_folder(environ: Mapping[str, str]) -> str:
    """Return the folder of rallypoint's state: `$XDG_STATE_HOME/rallypoint`, else
    `~/.local/state/rallypoint`."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification: a relative path is to be ignored
        # "~" stays where the user has no entry in passwd: a folder of that name is a trap
        state = os.path.join("/", environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "rallypoint")
