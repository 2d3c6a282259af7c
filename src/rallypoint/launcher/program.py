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
    """A function that ranks run instead of a script (`launch`). Function and arguments are in the
    parcel.
    """

    name: str  # of the function, for people: "train"
    line: str  # where `launch` was called: "train.py:30"
    argv: tuple[str, ...]  # the caller's
    parcel: int  # how many descriptors it has
    folder: str  # the working directory of the caller
    paths: tuple[str, ...]  # its sys.path
    without: tuple[
        str, ...
    ] = ()  # variables that the template has and the caller has not (any more)
    pass_rank: bool = False
    backend: str = ""  # "": no process group
    backend_timeout: float | None = None  # seconds; None: torch's own
    sources: tuple[
        tuple[str, str], ...
    ] = ()  # name and text of what is in no file: a notebook's cells
