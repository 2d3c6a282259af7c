"""History of a program's runs, kept beside the runs: the parts of torch that all of its ranks
imported.

One small file for each program and environment. Whatever is wrong with it (damaged, somebody
else's, a month old), it is as if there were none: the next run then takes as long as the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence

import msgspec

from rallypoint.record.kept_file import write_whole
from rallypoint.record.run_folder import default_root

FORGOTTEN_AFTER = (
    30 * 86400.0
)  # seconds since it was written: what a program no longer imports is not imported for it for ever
MOST_BYTES = 16 * 1024  # of a file; ours have some hundred
_PART = re.compile(r"torch(\.[A-Za-z_][A-Za-z0-9_]*)+", re.ASCII)


class Learnt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Knowledge about a program."""

    program: str = ""  # for people who look into the file
    torch: str = ""
    parts: tuple[str, ...] = ()  # modules of torch to import once, in this order
    spoilt: dict[str, str] = {}  # modules of torch that are not to be imported early, and why


def path_for(environ: Mapping[str, str], kind: str, program: str, folder: str, torch: str) -> str:
    """Return the file of a program. `kind`: of `Program`. `program`: a script's path, or the name of
    a module or a function, which was started in `folder`. `torch`: its version."""
    name = os.path.realpath(program) if kind == "script" else f"{program} in {folder}"
    key = hashlib.sha256(
        "\0".join((kind, name, sys.executable, torch)).encode("utf-8", "surrogateescape")
    ).hexdigest()[:32]
    return os.path.join(os.path.dirname(default_root(environ)), "learnt", f"{key}.json")


def read(path: str, now: float) -> Learnt:
    """Return what the file says; nothing when there is none, or none that can be trusted. `now`:
    wall clock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_uid != os.geteuid()
                or now - status.st_mtime > FORGOTTEN_AFTER
            ):
                return Learnt()
            found = msgspec.json.decode(file.read(MOST_BYTES), type=Learnt)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return Learnt()
    return (
        found if all(_PART.fullmatch(name) for name in (*found.parts, *found.spoilt)) else Learnt()
    )


def add(
    path: str, program: str, torch: str, parts: Sequence[str], spoilt: Mapping[str, str], now: float
) -> None:
    """Add to the file what a run has shown. Of two runs that end at the same moment, one may be
    lost. Raises OSError."""
    before = read(path, now)
    bad = {**before.spoilt, **spoilt}
    after = Learnt(
        program,
        torch,
        tuple(name for name in dict.fromkeys((*before.parts, *parts)) if name not in bad),
        bad,
    )
    if after == before:
        return
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _remove_old(folder, now)
    write_whole(path, msgspec.json.format(msgspec.json.encode(after), indent=2) + b"\n")


def _remove_old(folder: str, now: float) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another run removes it at the same time
                if now - entry.stat(follow_symlinks=False).st_mtime > FORGOTTEN_AFTER:
                    os.unlink(entry.path)
