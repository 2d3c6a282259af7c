"""`rallypoint run`: a job on this node."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli import foreign, options
from rallypoint.cli.main import guarded, help_width, show, write_out
from rallypoint.errors import UsageError
from rallypoint.launcher import machine

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report
    from rallypoint.launcher.assignment import Program
    from rallypoint.launcher.plan import Machine, Options

# Compiling costs about 1 s per 2 MB of source; a larger one is generated, and its rank will say what is wrong with it.
LARGEST_CHECKED_SCRIPT = 512 * 1024  # bytes


def main(argv: list[str]) -> int:
    """`rallypoint run` with its arguments; the exit status. Errors of usage are printed, not raised."""
    asked = "text"

    def command() -> int:
        nonlocal asked
        line = options.take_apart(argv, os.environ)
        asked = line.error_format
        if line.wants_help:
            write_out(options.help_text(help_width()))
            return 0
        return start(options.read(line), os.environ, line.typed)

    return guarded(command, lambda: asked)


def start(wanted: Options, environ: Mapping[str, str], typed: Sequence[str] = ()) -> int:
    """Plan the job, look at the program before N ranks trip over it, and start; or print the plan.

    `typed`: the options as they were typed, for a line to type again.
    """
    from rallypoint.launcher import plan

    made = plan.make(wanted, environ, this_machine(wanted, environ))
    trouble = look_at(made.program, environ, typed) or look_at_log_dir(wanted.log_dir)
    if trouble:
        show(trouble, wanted.error_format)
        return trouble.exit_status
    if made.rendezvous:
        from rallypoint.launcher import rendezvous_file

        rendezvous_file.wait_for_disk(made.rendezvous)
        rendezvous_file.look(made.rendezvous)
    made = plan.with_parts(made, _source(made.program))
    if wanted.dry_run:
        write_out(plan.describe(made))
        return 0
    from rallypoint.launcher import agent

    return agent.run(made)


# --- facts -----------------------------------------------------------------------------------------------------------


def this_machine(wanted: Options, environ: Mapping[str, str]) -> Machine:
    """The facts that a plan depends on. Opens no GPU (but where no file shows them), asks no resolver, imports no torch."""
    import datetime
    import secrets

    from rallypoint.host import devices, ports
    from rallypoint.launcher.plan import Machine
    from rallypoint.record.run_folder import default_root

    seen = devices.look()
    counted = wanted.nproc in ("gpu", "auto")
    if seen.hidden and counted:
        seen = devices.look_closely()
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        gpus=seen,
        build=devices.torch_build() if seen.devices or counted else None,
        interfaces=_interfaces(),
        ephemeral=ports.ephemeral_range(),
        names=_own_names(wanted.master_addr),
        python=sys.executable,
        torch=machine.torch_version(),
        now=datetime.datetime.now(),
        suffix=secrets.token_hex(2),
        cwd=_working_folder(),
        runs=default_root(environ),
    )


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("usage", "the folder that you are in has been removed", help=(("go to one that exists", "cd ~"),)) from None


def _interfaces() -> tuple[str, ...]:
    import socket

    try:
        return tuple(name for _, name in socket.if_nameindex())
    except OSError:  # a sandbox that does not tell
        return ()


def _own_names(asked: str) -> tuple[str, ...]:
    """This machine's name, short and long, and the asked address if it is one of ours: the kernel binds no other."""
    import socket

    name = socket.gethostname()
    names = [name, name.split(".")[0]]
    if asked and asked not in names and _is_local_address(asked):
        names.append(asked)
    return tuple(dict.fromkeys(names))


def _is_local_address(text: str) -> bool:
    import ipaddress
    import socket

    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False  # a name: the resolver is not asked
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((text, 0))
    except OSError:
        return False
    return True


# --- the program, before it starts -----------------------------------------------------------------------------------


def look_at(program: Program, environ: Mapping[str, str], typed: Sequence[str] = ()) -> Report | None:
    """What is wrong with the program that can be seen without running it; None if nothing is. `typed`: the options before it."""
    if program.kind == "script":
        return look_at_script(program, typed)
    if program.kind == "command":
        return look_at_command(program, environ, typed)
    return None  # finding a module imports its parent packages: the template does that


def look_at_script(program: Program, typed: Sequence[str] = ()) -> Report | None:
    """A script that is missing, a folder, unreadable, no regular file, or does not compile."""
    path = program.target
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _missing(program, typed)
    except OSError as refusal:
        return _not_started(f"{path} cannot be opened: {refusal.strerror}")
    if stat.S_ISDIR(mode):
        inside = os.path.join(path, "__main__.py")
        again = options.retyped(typed, inside, *program.args)
        helps = [("name the script in it", again)] if os.path.exists(inside) else _near_files(program, path, typed)
        return _not_started(f"{path} is a folder, not a script", helps)
    if not stat.S_ISREG(mode):
        return _not_started(f"{path} is not a file that every rank could read", [("save the script to a file first", "")])
    if not os.access(path, os.R_OK):
        return _not_started(f"{path} may not be read by this user", [("let this user read it", f"chmod u+r {path}")])
    if os.path.getsize(path) > LARGEST_CHECKED_SCRIPT or path.endswith(".pyc"):
        return None
    with open(path, "rb") as file:
        return _look_at_source(program, file.read(), typed)


def _source(program: Program) -> bytes:
    """A script's text, as far as it is looked at; b"" for what is none."""
    if program.kind != "script":
        return b""
    with open(program.target, "rb") as file:
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
                    options.retyped((*typed, "--no-python"), os.path.join(".", path), *program.args),
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


def look_at_command(program: Program, environ: Mapping[str, str], typed: Sequence[str] = ()) -> Report | None:
    """An executable that is not there, a folder, or not executable. Looked for along PATH as `execvp` does."""
    name = program.target
    places = [name] if os.sep in name else [os.path.join(folder, name) for folder in os.get_exec_path(environ)]
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return None
    here = os.path.join(".", name)
    if os.sep not in name:
        helps = (
            [("a program of this folder is named with the folder", options.retyped(typed, here, *program.args))]
            if os.path.isfile(name)
            else []
        )
        return _not_started(f"{name} is not found along PATH", helps)
    if os.path.isdir(name):
        return _not_started(f"{name} is a folder, not a program")
    if os.path.exists(name):
        helps = [("make it executable", f"chmod +x {name}")]
        if name.endswith(".py"):
            helps.append(("or let Python run it", options.retyped(typed, name, *program.args, as_script=True)))
        return _not_started(f"{name} is not executable", helps)
    return _missing(program, typed)


def look_at_log_dir(path: str) -> Report | None:
    """--log-dir names something that is there and no folder. (The run folder looks after itself.)"""
    if not path or path == os.devnull or not os.path.exists(path) or os.path.isdir(path):
        return None
    from rallypoint.diagnosis.report import Help, Report

    return Report(code="usage", headline=f"--log-dir {path} is not a folder", help=(Help("name another", "--log-dir logs"),), exit_status=2)


def _missing(program: Program, typed: Sequence[str]) -> Report:
    path = program.target
    headline = f"{path} is not found"
    if program.kind == "script" and program.args and (mended := _no_script(program, typed)):
        return _not_started(headline, [mended])
    helps = []
    as_file = path.replace(".", os.sep) + ".py"
    if program.kind == "script" and options.is_module_name(path) and "." in path and os.path.exists(as_file):
        helps.append(("a module is named with -m", options.retyped((*typed, "-m"), path, *program.args)))
    helps += _near_files(program, os.path.dirname(path) or ".", typed)
    return _not_started(headline, helps or [("see what is in this folder", f"ls {os.getcwd()}")])


def _no_script(program: Program, typed: Sequence[str]) -> tuple[str, str] | None:
    """What stands where the script belongs, when it is a habit from elsewhere: python, a number of ranks, a launcher, a shell."""
    import shutil

    name = os.path.basename(program.target)
    if foreign.is_python(name):
        return "leave it out: python is understood", options.mended((*typed, *program.args))
    if name.isdecimal():
        return "the number of ranks is given with -n", options.retyped((*typed, "-n"), name, *program.args)
    if name in foreign.LAUNCHERS:
        return f"leave {name} out: this command takes its place", options.mended((*typed, *foreign.after_launcher((name, *program.args))))
    if shutil.which(program.target):
        return "a program that is no Python script is started with --no-python", options.retyped(
            (*typed, "--no-python"), program.target, *program.args
        )
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
        near = [f"{name}.py" for name in difflib.get_close_matches(asked.removesuffix(".py"), names, n=3, cutoff=0.6)]
    else:
        near = difflib.get_close_matches(asked, names, n=3, cutoff=0.6)
    prefix = "" if folder == "." and not program.target.startswith("." + os.sep) else folder
    return [
        (f"the nearest name is {name}" if i == 0 else "or", options.retyped(typed, os.path.join(prefix, name), *program.args))
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
