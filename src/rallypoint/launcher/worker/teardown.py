"""The end of a forked rank: what its program has made is taken apart, what the template had
imported is left to the kernel.

The interpreter takes every module apart when it ends. For what the template has imported that costs
a rank a quarter of a second of processor time, mostly to copy pages that are about to be given
back, and nobody waits for the result. So the interpreter ends as always, in its own order: threads
are joined, `atexit` handlers run, finalizers of the program's objects are called, its modules are
taken apart. Only the template's modules are taken out of its hands, and once it has done with the
others the process leaves by C's `exit`: this calls the handlers that C and C++ libraries of the
program have registered, and flushes C's streams; those that are older than the fork are left out.
Whenever one of these steps cannot be taken, the interpreter goes its whole way.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import weakref
from _io import _IOBase
from types import FrameType, FunctionType, ModuleType
from typing import Any

FLUSH_FAILED = 120  # what Python exits with when a standard stream cannot be flushed

# Libraries that end their work in a function that they give to `Py_AtExit`, which runs after
# everything that is done here.
_NEED_THE_WHOLE_WAY = ("mpi4py",)


class _Template:
    """Modules and namespaces that the template leaves to its forks."""

    def __init__(self, modules: dict[str, ModuleType], libc: Any) -> None:
        self.libc = libc
        # The interpreter's own dict: a program may put another into `sys`.
        self.all_modules = sys.modules
        self.modules = modules
        self.namespaces = {
            id(vars(module)) for module in sys.modules.values() if isinstance(module, ModuleType)
        }


_template: _Template | None = None
_status: int | None = None  # of this process; None: its program has not ended yet
_interrupted = False  # whether it ends by the signal that an uncaught KeyboardInterrupt becomes
# The namespaces in which daemon threads run: the interpreter leaves them alone, too.
_running: set[int] = set()


def register() -> None:
    """Register the first step of the end before any other handler of `atexit`: the handler that is
    registered first runs last."""
    atexit.register(_after_all_handlers)


def prepare(own: set[str]) -> None:
    """Prepare a template for the end of its forks. `own`: the names of preload modules that belong
    to the program, which are taken apart like those that it imports itself."""
    global _template
    import ctypes

    # A profiler, perhaps, that writes its result in a handler of C's.
    if os.environ.get("LD_PRELOAD"):
        return
    # `exit` is called with the interpreter's lock: destructors of C++ (thread-local ones, and of
    # libraries that the program has loaded) may still release Python objects, and this interpreter
    # is not gone for them. Other threads that want the lock end, as they always do here.
    libc = ctypes.PyDLL(None)
    # Another C library than glibc.
    if not all(hasattr(libc, name) for name in ("on_exit", "__cxa_atexit", "fcloseall")):
        return
    # `exit` calls them last first: those of the program's libraries, then these, and no older ones.
    libc.on_exit(libc._exit, None)  # is called with the status
    libc.__cxa_atexit(libc.fcloseall, None, None)  # what `exit` does after all handlers
    leave_operators_registered()
    with contextlib.suppress(OSError, AttributeError, ValueError):  # no C++ library, or another one
        cpp = ctypes.CDLL("libstdc++.so.6")
        cout = ctypes.addressof(ctypes.c_char.in_dll(cpp, "_ZSt4cout"))
        libc.__cxa_atexit(cpp._ZNSo5flushEv, ctypes.c_void_p(cout), None)  # cout.flush()
    held = dict(sys.modules)
    # For ever: no module loses its last reference when the interpreter lets go.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    _template = _Template({name: module for name, module in held.items() if name not in own}, libc)


def leave_operators_registered() -> None:
    """Keep torch from taking the registration of each of its operators back when an interpreter
    ends: it takes 25 ms of processor time, and matters only to C++ destructors, which do not run
    here."""
    library = sys.modules.get("torch.library")
    takes_back = getattr(library, "_del_library", None)
    for finalizer in tuple(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if takes_back is not None and alive is not None and alive[1] is takes_back:
            finalizer.atexit = False


def with_status(status: int, *, interrupted: bool) -> None:
    """Note how the program of this process has ended. `interrupted`: by a KeyboardInterrupt that
    nobody has caught.
    """
    global _status, _interrupted
    _status, _interrupted = status, interrupted


def _after_all_handlers() -> None:
    global _status
    if (
        _template is None
        or _status is None
        or any(name in sys.modules for name in _NEED_THE_WHOLE_WAY)
    ):
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except Exception:  # the interpreter, which tries it again, says so
                _status = FLUSH_FAILED
    for frame in sys._current_frames().values():
        outer: FrameType | None = frame
        while outer is not None:
            _running.add(id(outer.f_globals))
            outer = outer.f_back
    gc.enable()  # or the interpreter leaves out the collection below
    gc.callbacks.append(_after_collection)


def _after_collection(phase: str, info: dict[str, int]) -> None:
    """Hide the template's modules, after the collection that comes before the interpreter takes
    modules apart. No other thread runs Python any more."""
    if phase == "stop" and sys.is_finalizing() and _template is not None:
        for name, module in _template.modules.items():
            if _template.all_modules.get(name) is module:
                del _template.all_modules[name]
        sys.__dict__["_rallypoint_end"] = _End()


class _End:
    """An object in `sys`, which is cleared when all modules have been taken apart."""

    def __del__(self) -> None:
        if _template is None:
            return
        try:
            _release_what_is_left(_template)
        finally:
            if _interrupted:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            _template.libc.exit(_status)


def _release_what_is_left(template: _Template) -> None:
    """Clear the program's namespaces that are still there, because a module of the template's knows
    a function of theirs, and flush what files are open. The interpreter would get there by taking
    the template's modules apart."""
    spared = template.namespaces | _running
    namespaces = {
        id(made.__globals__): made.__globals__
        for made in gc.get_objects()
        if type(made) is FunctionType
    }
    for number, names in namespaces.items():
        # Names with one underscore come first, as in the interpreter.
        for first in (True, False) if number not in spared else ():
            for name in [
                name
                for name in names
                if (name[:1] == "_" != name[1:2]) == first and name != "__builtins__"
            ]:
                names[name] = None
    gc.collect()
    for file in gc.get_objects():
        if issubclass(type(file), _IOBase) and not file.closed:
            with contextlib.suppress(OSError, ValueError):  # it is no longer read
                file.flush()
