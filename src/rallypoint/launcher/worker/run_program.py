"""The user's program, run as `__main__` the way `python -u` would."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.raised import Raised, cut
from rallypoint.host import archives, process_status
from rallypoint.launcher import exception_capture, interruptions
from rallypoint.launcher.program import Program
from rallypoint.launcher.protocol import AtPhase, Leaving, Uncatch, Uncaught
from rallypoint.launcher.worker import child_processes, gloo
from rallypoint.launcher.worker.traceback_output import StderrAsGiven
from rallypoint.launcher.worker.worker_hooks import Hooks

SAID_MOST = 2000  # bytes of what `sys.exit` is told of: the log has all of it

_placed: list[str] = []  # what we have put first on sys.path
# The interpreter's own __main__, kept: finalising it early would clear the frames below us.
_first_main: list[ModuleType] = []


def run(
    program: Program,
    hooks: Hooks | None,
    *,
    takes_traceback: bool,
    stderr_is_kept: bool = False,
    signal_mask: Iterable[int],
) -> None:
    """Run the program to its end. Returns, or lets the exception that left it through to the interpreter,
    which then leaves as always.

    `takes_traceback`: the launcher shows the traceback of an uncaught exception, so it does not go
    to the terminal from here. `stderr_is_kept`: stderr is a file of the user's (`-r`), which gets
    the traceback all the same. `signal_mask` is the program's: until now all signals were held
    back, so that a Ctrl-C meets the program and not our preparations.

    The interpreter's own way out matters: threads are joined, atexit handlers run, open files are
    flushed.
    """
    given = StderrAsGiven(stderr_is_kept)
    try:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
            if hooks:
                hooks.tell(AtPhase("importing"))
            code, main = load(program)
            become_main(main)
            exec(code, main.__dict__)
            if hooks:
                hooks.stop()
                tell_finishing(hooks)
        except BaseException as error:
            _end_by(hooks, error, given if takes_traceback else None)
    finally:
        sys.modules.setdefault("__main__", ModuleType("__main__"))
        gloo.let_threads_finish()


def _end_by(hooks: Hooks | None, error: BaseException, given: StderrAsGiven | None) -> NoReturn:
    """Tell what ends the program, and let it go on to the interpreter. `given`: what the launcher
    has given for stderr, when it shows the traceback itself, which it does unless the program has a
    hook of its own."""
    silent = listens = False
    try:
        if not isinstance(error, SystemExit):
            exception_capture.strip(error)
        if hooks is not None:
            hooks.stop()
            if isinstance(error, SystemExit):
                tell_exit(hooks, error)
            else:
                silent = given is not None and hooks.excepthook_is_default()
                listens = tell_uncaught(hooks, error, printed=not silent)
    except BaseException as later:
        # A signal's handler of the program's has raised: it is that by which the program ends.
        if interruptions.raised_by_handler(later):
            _end_by(hooks, later, given)
        # Its class raises wherever it is looked at. Ends by `sys.exit` cannot.
        if hooks is not None:
            kind = exception_capture.type_name(type(error))
            hooks.tell(Uncaught(Raised(kind, "<message cannot be shown>", (), ""), printed=True))
    if not isinstance(error, SystemExit):
        if given is not None and silent and listens:
            given.print_beside(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = _already_shown
    raise error


def tell_uncaught(hooks: Hooks, error: BaseException, *, printed: bool) -> bool:
    """Tell the agent of an exception that leaves the program, and take back what was told of those
    that it comes from. Returns whether the agent listens."""
    for serial in exception_capture.serials(error):
        hooks.tell(Uncatch(serial))
    hooks.tell_handled(error)
    child_processes.tell_failed()
    raised = exception_capture.raised(error, call=hooks.call_of(error))
    failed = None
    with contextlib.suppress(OSError):  # it may have run out of descriptors
        failed = process_status.failed_child(os.getpid())
    by_keyboard = isinstance(error, KeyboardInterrupt)
    return hooks.tell(Uncaught(raised, printed=printed, keyboard=by_keyboard, failed_child=failed))


def _already_shown(*_: object) -> None:
    """Do nothing: the traceback is on the screen, or the launcher has it."""


def become_main(main: ModuleType) -> None:
    """Put a module in the place of the interpreter's own `__main__`, which is kept."""
    _first_main.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    # multiprocessing's name for it, under which children send back the program's classes
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main


def exit_code(leaving: SystemExit) -> int:
    """Return as much of the code as an exit status holds."""
    if not isinstance(leaving.code, int):
        return int(leaving.code is not None)
    # Python makes -1 of a number that is no C `long`.
    return leaving.code & 0xFF if -(1 << 63) <= leaving.code < 1 << 63 else 0xFF


def tell_exit(hooks: Hooks, leaving: SystemExit) -> None:
    """Tell the agent that the program leaves by `sys.exit`, and where."""
    code = exit_code(leaving)
    if code:
        hooks.tell_handled(leaving)
    frame = stacks.own_frame(exception_capture.frames_of(leaving.__traceback__))
    line = (
        f"{exception_capture.shown_path(frame.file)}:{frame.line} in {frame.function}"
        if frame
        else ""
    )
    words = exception_capture.sayable(_said_by(leaving)) if code else ""
    hooks.tell(Leaving(code, line, cut(words, SAID_MOST)))
    if not code:
        tell_finishing(hooks)


def tell_finishing(hooks: Hooks) -> None:
    """Tell the agent that the program is at its end, and for which threads the interpreter waits."""
    others = [one for one in threading.enumerate() if one is not threading.main_thread()]
    names: list[str] = []
    with contextlib.suppress(Exception):  # the program's own class may have another `name`
        names += (exception_capture.sayable(str(one.name))[:99] for one in others if not one.daemon)
    hooks.tell(AtPhase("finishing", tuple(sorted(names)[:9])))


def _said_by(leaving: SystemExit) -> str:
    """Return the text given to `sys.exit`, or argparse's message without the usage."""
    if isinstance(leaving.code, str):
        return leaving.code
    for frame, _ in deque(traceback.walk_tb(leaving.__traceback__), maxlen=1):
        # ArgumentParser.exit(status, message).
        if frame.f_globals.get("__name__") == "argparse" and frame.f_code.co_name == "exit":
            return str(frame.f_locals.get("message") or "").partition(": error: ")[2]
    return ""


def folder(program: Program) -> str:
    """Return the folder that the interpreter puts first on `sys.path`; "" when it depends on the
    working directory, and that has been removed."""
    with contextlib.suppress(FileNotFoundError):
        if _holds_main(program):
            return os.path.abspath(program.target)
        return (
            os.getcwd()
            if program.kind in ("module", "function")
            else os.path.dirname(os.path.realpath(program.target))
        )
    return ""


def place_folder(program: Program) -> None:
    """Put that folder there, once in a process: the template does it for its preload modules, which
    may lie beside the program and may change the path themselves."""
    if not sys.flags.safe_path and not _placed:
        _placed.append(folder(program))
        sys.path.insert(0, _placed[0])


def load(program: Program) -> tuple[CodeType, ModuleType]:
    """Return the program's code and its empty `__main__`; set `sys.argv` and `sys.path[0]` as the
    interpreter would."""
    sys.argv = [program.target, *program.args]
    sys.orig_argv[:] = [sys.executable, "-u", *sys.argv]
    if program.kind == "module":
        sys.argv[0] = "-m"  # a package's __init__ sees it while the module is searched
        sys.orig_argv.insert(2, "-m")
    if program.kind != "module" and not folder(program):
        gone = "the working directory has been removed"
        raise FileNotFoundError(errno.ENOENT, gone, program.target)
    place_folder(program)
    if program.kind != "module" and not _holds_main(program):
        path = os.path.abspath(program.target)
        compiled = path.endswith(".pyc")
        kind = SourcelessFileLoader if compiled else SourceFileLoader
        loader = kind("__main__", path)
        code: Any = (
            loader.get_code("__main__")
            if compiled
            else compile(loader.get_data(path), path, "exec", dont_inherit=True)
        )
        return code, _main(path, loader)
    import runpy

    # What `python -m` itself calls; its own kind of error, or an ImportError of the module's would
    # look the same.
    try:
        if program.kind == "module":
            _, spec, code = runpy._get_module_details(program.target, runpy._Error)  # type: ignore[attr-defined]
            sys.argv[0] = spec.origin
        else:
            if sys.path[0] != folder(program):  # with `python -P`, too: the program is there
                sys.path.insert(0, folder(program))
            _, spec, code = runpy._get_main_module_details()  # type: ignore[attr-defined]
    except runpy._Error as problem:  # type: ignore[attr-defined]
        text = f"{problem}{_modules_near(program.target)}"
        raise ModuleNotFoundError(text, name=program.target) from None
    return code, _main(spec.origin, spec.loader, spec)


def _modules_near(name: str) -> str:
    """Name the module that was meant, when one name in it is misspelt, or those that the package
    has, as the rest of a sentence; "" when Python found no package.
    """
    import difflib
    import pkgutil

    parts = name.split(".")
    for known in range(len(parts), 0, -1):  # the part before the misspelt name is imported
        package = ".".join(parts[:known])
        path = getattr(sys.modules.get(package), "__path__", None)
        if path is not None:
            there = [one.name for one in pkgutil.iter_modules(path)]
            near = difflib.get_close_matches("".join(parts[known : known + 1]), there, n=1)
            found = ".".join((package, *near, *parts[known + 1 :]))
            if near and found != name:
                return f"; the nearest is {found}"
            return f"; it has {', '.join(f'{package}.{one}' for one in there[:5])}" if there else ""
    return ""


def _holds_main(program: Program) -> bool:
    """Tell whether the script is a folder or an archive, in which `python` looks for
    `__main__.py`."""
    return program.kind == "script" and bool(archives.main_of(program.target))


def _main(path: str, loader: object, spec: Any = None) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __loader__=loader,
        __builtins__=builtins,
        __annotations__={},
        __spec__=spec,
        __package__=spec and spec.parent,
        __cached__=spec and spec.cached,
    )
    return main
