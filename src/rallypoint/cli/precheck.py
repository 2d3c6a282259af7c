"""The program, before it starts: what is wrong with it that can be seen without running it."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.cli import hints
from rallypoint.cli.option_values import is_module_name, nearest
from rallypoint.host import archives

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report
    from rallypoint.launcher.program import Program

LARGEST_CHECKED_SCRIPT = 512 * 1024
"""Bytes. Compiling costs about 1 s per 2 MB of source; a larger one is generated, and its rank will
say what is wrong with it.
"""


def look_at(
    program: Program, environ: Mapping[str, str], typed: Sequence[str] = (), ranks: int = 1
) -> Report | None:
    """Return what is wrong with the program that can be seen without running it; None if nothing
    is. `typed`: the options before it. `ranks`: how many would run it.
    """
    if program.kind == "script":
        return look_at_script(program, typed, ranks)
    if program.kind == "command":
        return look_at_command(program, environ, typed)
    return look_at_module(program, typed)


def look_at_script(program: Program, typed: Sequence[str] = (), ranks: int = 1) -> Report | None:
    """Report a script that is missing, a folder without `__main__.py`, unreadable, no regular file,
    a descriptor of this process (`/dev/stdin`) that one rank alone would have, or does not compile.
    """
    path = program.target
    descriptors = "/dev", os.path.realpath("/dev/fd")
    is_for_one = ranks > 1 and os.path.realpath(os.path.dirname(path)) in descriptors
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _missing(program, typed)
    except OSError as refusal:
        return _not_started(f"{path} cannot be opened: {refusal.strerror}")
    if archives.main_of(path):
        return None
    if stat.S_ISDIR(mode):
        helps = _near_files(program, path, typed) or [
            ("see what is in it", f"ls {shlex.quote(path)}")
        ]
        return _not_started(f"{path} is a folder without __main__.py, not a script", *helps)
    if is_for_one or not stat.S_ISREG(mode):
        return _not_started(
            f"{path} is not a file that every rank could read",
            ("save the script to a file first", ""),
        )
    if not os.access(path, os.R_OK):
        return _not_started(
            f"{path} may not be read by this user", ("let this user read it", f"chmod u+r {path}")
        )
    if path.endswith(".ipynb"):
        line = f"jupyter nbconvert --to script {shlex.quote(path)}"
        return _not_started(
            f"{path} is a notebook, not Python source", ("write its cells into a script", line)
        )
    if os.path.getsize(path) > LARGEST_CHECKED_SCRIPT or path.endswith(".pyc"):
        return None
    with open(path, "rb") as file:
        return _look_at_source(program, file.read(), typed)


def source(program: Program) -> bytes:
    """Return a script's text, as far as it is looked at; b"" for what is none."""
    if program.kind != "script":
        return b""
    inside = archives.main_of(program.target)
    if inside and not os.path.isfile(inside):  # in an archive
        return b""
    with open(inside or program.target, "rb") as file:
        return file.read(LARGEST_CHECKED_SCRIPT)


def _look_at_source(program: Program, source: bytes, typed: Sequence[str]) -> Report | None:
    import warnings

    path = program.target
    if b"\0" in source:
        line = hints.retyped((*typed, "--no-python"), os.path.join(".", path), *program.args)
        return _not_started(
            f"{path} is not Python source: it holds zero bytes",
            ("an executable or an archive is started as a program of its own", line),
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks say them
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return _syntax_error(path, error)
    except (RecursionError, MemoryError):
        pass  # nested too deep for us here; the rank has a whole stack for it
    return None


def _syntax_error(path: str, error: SyntaxError) -> Report:
    """Report the line and the place in it, as Python shows them; exit status 1, as Python's."""
    import traceback

    from rallypoint.diagnosis.report import Report, Said

    said = tuple("".join(traceback.format_exception_only(error)).rstrip("\n").splitlines())
    return Report(
        code="start-failed",
        headline=f"{path} does not compile: {type(error).__name__}: {error.msg}",
        where=f"{path}:{error.lineno}" if error.lineno else path,
        said=(Said(who="Python", lines=said),),
        then="no rank was started",
        exit_status=1,
    )


def look_at_module(program: Program, typed: Sequence[str] = ()) -> Report | None:
    """Report a module whose first name leads nowhere. What is below a package is left to the rank:
    finding it would import the package.
    """
    top, dot, rest = program.target.partition(".")
    flags = sys.flags  # told to leave out folders that the ranks' interpreters have
    if flags.isolated or flags.ignore_environment or flags.no_user_site or flags.no_site:
        return None
    if top in sys.builtin_module_names or _is_there(top):
        return None
    near = nearest(top, filter(is_module_name, (name.removesuffix(".py") for name in os.listdir())))
    line = hints.retyped(typed, f"{near}{dot}{rest}", *program.args)
    helps = [(f"the nearest name is {near}", line)] if near else []
    helps.append(
        (
            "start from the folder that holds it, or install it",
            f"{sys.executable} -m pip install -e .",
        )
    )
    return _not_started(f"the module {program.target} is not found", *helps)


def _is_there(name: str) -> bool:
    """Tell whether a name may be that of a module, for the ranks: in this folder, along `sys.path`,
    or where an installed finder looks. No package is imported.
    """
    folders: Any = [os.getcwd(), *sys.path]
    try:
        for part in name.split("."):
            specs = (finder.find_spec(part, folders) for finder in sys.meta_path)
            spec = next(filter(None, specs), None)
            if spec is None:
                return False
            folders = spec.submodule_search_locations or ()
    except Exception:  # of a foreign finder, or an unreadable folder: the rank will say it
        return True
    return True


def look_at_command(
    program: Program, environ: Mapping[str, str], typed: Sequence[str] = ()
) -> Report | None:
    """Report an executable that is not there, a folder, or not executable. It is looked for along
    PATH as `execvp` does.
    """
    name, args = program.target, program.args
    if shutil.which(name, path=os.pathsep.join(os.get_exec_path(environ))):
        return None
    if os.sep not in name:
        line = hints.retyped(typed, os.path.join(".", name), *args)
        help = ("a program of this folder is named with the folder", line)
        return _not_started(
            f"{name} is not found along PATH", *([help] if os.path.isfile(name) else [])
        )
    if os.path.isdir(name):
        return _not_started(f"{name} is a folder, not a program")
    if not os.path.exists(name):
        return _missing(program, typed)
    helps = [("make it executable", f"chmod +x {name}")]
    if name.endswith(".py"):
        helps.append(("or let Python run it", hints.retyped(typed, name, *args, as_script=True)))
    return _not_started(f"{name} is not executable", *helps)


def _missing(program: Program, typed: Sequence[str]) -> Report:
    path = program.target
    target = f" is a link to {os.readlink(path)}, which" if os.path.islink(path) else ""
    headline = f"{path}{target} is not found"
    helps = []
    if program.kind == "script":
        if program.args and (mended := _no_script(program, typed)):
            return _not_started(headline, mended)
        name = path.removesuffix(".py")
        if "." in name and is_module_name(name) and _is_there(name):
            helps.append(
                ("a module is named with -m", hints.retyped((*typed, "-m"), name, *program.args))
            )
    helps += _near_files(program, os.path.dirname(path) or ".", typed)
    return _not_started(headline, *(helps or [("see what is in this folder", f"ls {os.getcwd()}")]))


def _no_script(program: Program, typed: Sequence[str]) -> tuple[str, str] | None:
    """Return the help when a habit from elsewhere stands in the script's place."""
    name, args = os.path.basename(program.target), program.args
    if name.isdecimal():
        return "the number of ranks is given with -n", hints.retyped((*typed, "-n"), name, *args)
    if hints.is_python(name) or name in hints.LAUNCHERS:
        rest = hints.without_launchers((name, *args))
        if rest[:1] == ["-c"]:
            return "save the code to a file first, and start that", hints.retyped(typed, "FILE.py")
        left_out = " ".join((name, *args[: len(args) - len(rest)]))
        return f"leave {left_out} out: this command takes its place", hints.retyped(typed, *rest)
    if shutil.which(program.target):
        return (
            "a program that is no Python script is started with --no-python",
            hints.retyped((*typed, "--no-python"), program.target, *args),
        )
    return None


def _near_files(program: Program, folder: str, typed: Sequence[str]) -> list[tuple[str, str]]:
    """Return up to three files of a folder whose names are near, as commands to type."""
    try:
        names = sorted(
            filter(lambda one: os.path.isfile(os.path.join(folder, one)), os.listdir(folder))
        )
    except OSError:
        above = os.path.dirname(folder.rstrip(os.sep)) or "."
        return [(f"the folder {folder} is not there either; list what is", f"ls {above}")]
    asked = os.path.basename(program.target.rstrip(os.sep))
    ending = ".py" if program.kind == "script" else ""  # all scripts share it
    stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    near = difflib.get_close_matches(asked.removesuffix(ending), stems, n=3, cutoff=0.6)
    prefix = "" if folder == "." and not program.target.startswith("." + os.sep) else folder
    found = []
    for i, stem in enumerate(near):
        name = f"{stem}{ending}"
        line = hints.retyped(typed, os.path.join(prefix, name), *program.args)
        found.append(("or" if i else f"the nearest name is {name}", line))
    return found


def _not_started(headline: str, *helps: tuple[str, str]) -> Report:
    from rallypoint.diagnosis.report import Help, Report

    return Report(
        code="start-failed",
        headline=headline,
        then="no rank was started",
        help=tuple(Help(*help) for help in helps),
        exit_status=2,
    )
