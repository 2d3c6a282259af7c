"""Program or function that ranks run. A module of its own for the template, which needs no more of
a plan."""

from __future__ import annotations

from string import Template
from typing import Literal

import msgspec


class Program(msgspec.Struct, frozen=True):
    """The user's program, as `python` would be given it."""

    kind: Literal["script", "module", "command", "function"]
    target: str  # path as typed, module name, executable as typed, or the name of a function
    args: tuple[str, ...] = ()

    def for_rank(self, local_rank: int) -> Program:
        """Return the program with torchrun's macro replaced in its arguments: `${local_rank}`, and
        `$$`, which stands for one `$`."""
        if not any("$" in arg for arg in self.args):
            return self
        args = tuple(Template(arg).safe_substitute(local_rank=local_rank) for arg in self.args)
        return msgspec.structs.replace(self, args=args)


class Task(msgspec.Struct, frozen=True):
    """Function that ranks run instead of a script (`launch`). Function and arguments are in the
    payload."""

    name: str  # of the function, for people: "train"
    line: str  # where `launch` was called: "train.py:30"
    argv: tuple[str, ...]  # the caller's
    payload_fds: int  # descriptors of the payload
    folder: str  # the working directory of the caller
    paths: tuple[str, ...]  # its sys.path
    without: tuple[str, ...] = ()  # variables that the template has and the caller has not
    pass_rank: bool = False
    backend: str = ""  # "": no process group
    backend_timeout: float | None = None  # seconds; None: torch's own
    # name and text of source code that is in no file: a notebook's cells
    sources: tuple[tuple[str, str], ...] = ()
