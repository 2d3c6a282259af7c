"""The program, before it starts: what is wrong with it that can be seen without running it."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli import hints
from rallypoint.cli.option_values import is_module_name, nearest
from rallypoint.host import archives

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report
    from rallypoint.launcher.program import Program

# Compiling costs about 1 s per 2 MB of source; a larger one is generated, and its rank will say
# what is wrong with it.
LARGEST_CHECKED_SCRIPT = 512 * 1024  # bytes


def look_at(
    program: Program, environ: Mapping[str, str], typed: Sequence[str] = ()
) -> Report | None:
    """What is wrong with the program that can be seen without running it; None if nothing is.
    `typed`: the options before it.
    """
    if program.kind == "script":
        return look_at_script(program, typed)
    if program.kind == "command":
        return look_at_command(program, environ, typed)
    return look_at_module(program, typed)


def look_at_script(program: Program, typed: Sequence[str] = ()) -> Report | None:
    """A script that is missing, a folder without `__main__.py`, unreadable, no regular file, or
    does not compile.
    """
    path = program.target
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
        return _not_started(f"{path} is a folder without __main__.py, not a script", helps)
    if not stat.S_ISREG(mode):
        return _not_started(
            f"{path} is not a file that every rank could read",
            [("save the script to a file first", "")],
        )
    if not os.access(path, os.R_OK):
        return _not_started(
            f"{path} may not be read by this user", [("let this user read it", f"chmod u+r {path}")]
        )
    if os.path.getsize(path) > LARGEST_CHECKED_SCRIPT or path.endswith(".pyc"):
        return None
    with open(path, "rb") as file:
        return _look_at_source(program, file.read(), typed)


def source(program: Program) -> bytes:
    """A script's text, as far as it is looked at; b"" for what is none."""
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
        return _not_started(
            f"{path} is not Python source: it holds zero bytes",
            [
                (
                    "an executable or an archive is started as a program of its own",
                    hints.retyped((*typed, "--no-python"), os.path.join(".", path), *program.args),
                )
            ],
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks say them
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return _syntax_error(path, error)
    except (RecursionError, MemoryError):
        return None  # nested too deep for us here; the rank has a whole stack for it
    return None


def _syntax_error(path: str, error: SyntaxError) -> Report:
    """The line and the place in it, as Python shows them; exit status 1, as Python's."""
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
    """A module whose first name leads nowhere. What is below a package is left to the rank: finding
    it would import the package.
    """
    top, dot, rest = program.target.partition(".")
    if _ignores_paths() or _is_there(top):
        return None
    names = {
        entry.name.removesuffix(".py")
        for entry in os.scandir()
        if entry.is_dir() or entry.name.endswith(".py")
    }
    near = nearest(top, filter(is_module_name, names))
    helps = (
        [(f"the nearest name is {near}", hints.retyped(typed, f"{near}{dot}{rest}", *program.args))]
        if near
        else []
    )
    helps.append(
        (
            "start from the folder that holds it, or install it",
            f"{sys.executable} -m pip install -e .",
        )
    )
    return _not_started(f"the module {program.target} is not found", helps)


def _ignores_paths() -> bool:
    """Whether our own interpreter was told to leave out folders that the ranks'
    interpreters have.
    """
    return bool(
        sys.flags.isolated
        or sys.flags.ignore_environment
        or sys.flags.no_user_site
        or sys.flags.no_site
    )


def _is_there(top: str) -> bool:
    """Whether a name may be that of a module, for the ranks: in this folder, along `sys.path`, or
    where an installed finder looks.
    """
    from importlib.machinery import PathFinder

    try:
        return PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None or any(
            finder.find_spec(top, None) is not None for finder in sys.meta_path
        )
    except (
        Exception
    ):  # a finder of somebody else's, or a folder that cannot be read: the rank will say it
        return True


def look_at_command(
    program: Program, environ: Mapping[str, str], typed: Sequence[str] = ()
) -> Report | None:
    """An executable that is not there, a folder, or not executable. Looked for along PATH as
    `execvp` does.
    """
    name = program.target
    places = (
        [name]
        if os.sep in name
        else [os.path.join(folder, name) for folder in os.get_exec_path(environ)]
    )
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return None
    here = os.path.join(".", name)
    if os.sep not in name:
        helps = (
            [
                (
                    "a program of this folder is named with the folder",
                    hints.retyped(typed, here, *program.args),
                )
            ]
            if os.path.isfile(name)
            else []
        )
        return _not_started(f"{name} is not found along PATH", helps)
    if os.path.isdir(name):
        return _not_started(f"{name} is a folder, not a program")
    if os.path.exists(name):
        helps = [("make it executable", f"chmod +x {name}")]
        if name.endswith(".py"):
            helps.append(
                ("or let Python run it", hints.retyped(typed, name, *program.args, as_script=True))
            )
        return _not_started(f"{name} is not executable", helps)
    return _missing(program, typed)


def look_at_log_dir(path: str) -> Report | None:
    """--log-dir names something that is there and no folder. (The run folder looks after
    itself.)
    """
    if not path or path == os.devnull or not os.path.exists(path) or os.path.isdir(path):
        return None
    from rallypoint.diagnosis.report import Help, Report

    return Report(
        code="usage",
        headline=f"--log-dir {path} is not a folder",
        help=(Help("name another", "--log-dir logs"),),
        exit_status=2,
    )


def _missing(program: Program, typed: Sequence[str]) -> Report:
    path = program.target
    headline = f"{path} is not found"
    if program.kind == "script" and program.args and (mended := _no_script(program, typed)):
        return _not_started(headline, [mended])
    helps = []
    as_file = path.replace(".", os.sep) + ".py"
    if (
        program.kind == "script"
        and is_module_name(path)
        and "." in path
        and os.path.exists(as_file)
    ):
        helps.append(
            ("a module is named with -m", hints.retyped((*typed, "-m"), path, *program.args))
        )
    helps += _near_files(program, os.path.dirname(path) or ".", typed)
    return _not_started(headline, helps or [("see what is in this folder", f"ls {os.getcwd()}")])


def _no_script(program: Program, typed: Sequence[str]) -> tuple[str, str] | None:
    """Return the help when a habit from elsewhere stands in the script's place."""
    import shutil

    name = os.path.basename(program.target)
    if name.startswith("-") and " " not in name:  # "-" alone was refused before
        return "options stand before --", hints.retyped(typed, program.target, *program.args)
    if name.isdecimal():
        return "the number of ranks is given with -n", hints.retyped(
            (*typed, "-n"), name, *program.args
        )
    if hints.is_python(name):
        return "leave it out: python is understood", hints.retyped(typed, *program.args)
    if name in hints.LAUNCHERS:
        return f"leave {name} out: this command takes its place", hints.retyped(
            typed, *program.args
        )
    if shutil.which(program.target):
        sentence = "a program that is no Python script is started with --no-python"
        return sentence, hints.retyped((*typed, "--no-python"), program.target, *program.args)
    return None


def _near_files(program: Program, folder: str, typed: Sequence[str]) -> list[tuple[str, str]]:
    """Up to three files of a folder whose names are near, as commands to type."""
    import difflib

    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        above = os.path.dirname(folder.rstrip(os.sep)) or "."
        return [(f"the folder {folder} is not there either; list what is", f"ls {above}")]
    asked = os.path.basename(program.target.rstrip(os.sep))
    if program.kind == "script":  # compared without the ending, which all of them share
        names = [name.removesuffix(".py") for name in names if name.endswith(".py")]
        near = [
            f"{name}.py"
            for name in difflib.get_close_matches(asked.removesuffix(".py"), names, n=3, cutoff=0.6)
        ]
    else:
        near = difflib.get_close_matches(asked, names, n=3, cutoff=0.6)
    prefix = "" if folder == "." and not program.target.startswith("." + os.sep) else folder
    return [
        (
            f"the nearest name is {name}" if i == 0 else "or",
            hints.retyped(typed, os.path.join(prefix, name), *program.args),
        )
        for i, name in enumerate(near)
    ]


def _not_started(headline: str, helps: Iterable[tuple[str, str]] = ()) -> Report:
    from rallypoint.diagnosis.report import Help, Report

    return Report(
        code="start-failed",
        headline=headline,
        then="no rank was started",
        help=tuple(Help(sentence=sentence, command=command) for sentence, command in helps),
        exit_status=2,
    )
