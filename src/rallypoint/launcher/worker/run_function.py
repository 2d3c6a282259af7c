"""The caller's function, run in a rank of `launch` in the place of a program."""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import signal
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Literal, NoReturn

from rallypoint.launcher import exception_capture, exits, nested_launch
from rallypoint.launcher.launch.marshalling import payload
from rallypoint.launcher.program import Task
from rallypoint.launcher.protocol import AtPhase, Outcome
from rallypoint.launcher.worker import run_program
from rallypoint.launcher.worker.worker_hooks import Hooks


def run(
    task: Task, rank: int, fds: list[int], hooks: Hooks, *, signal_mask: Iterable[int]
) -> NoReturn:
    """Run the function, send what it returned or raised, and leave. `fds`: the payload's, which are taken
    over.

    A rank leaves as a child of multiprocessing does, without the interpreter's own finalisation,
    which takes longer than many a function: threads that are no daemons are joined, atexit handlers
    run, the standard streams are flushed.
    """
    code = 0
    try:
        _enter(task, signal_mask)
        hooks.tell(AtPhase("importing"))
        _send(hooks, rank, "value", payload.pack_result(_called(task, rank, fds, hooks), task.name))
        hooks.stop()
        run_program.tell_finishing(hooks)
    except SystemExit as leaving:
        code = run_program.exit_code(leaving)
        run_program.tell_exit(hooks, leaving)
        if code == 0:
            _send(hooks, rank, "value", payload.pack_result(None, task.name))
        elif not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)  # as the interpreter does
    except BaseException as error:
        try:
            code = _failed(hooks, rank, error)
        except BaseException as later:
            # A signal's handler raised: its exception ends the function now.
            code = _failed(hooks, rank, later)
    _leave(code)


def _enter(task: Task, signal_mask: Iterable[int]) -> None:
    """Take the caller's folder, sys.path and arguments. `__main__` is empty: the caller's script is
    not run again."""
    os.chdir(task.folder)
    sys.path[:] = task.paths
    sys.argv[:] = task.argv
    run_program.become_main(ModuleType("__main__"))
    for name, text in task.sources:
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)


def _called(task: Task, rank: int, fds: list[int], hooks: Hooks) -> Any:
    nested_launch.importing = f"a module that {task.name} needs, in a rank"
    function, args, kwargs = payload.unpack_call(fds)
    nested_launch.importing = ""
    hooks.tell(AtPhase("running"))
    if task.pass_rank:
        args = (rank, *args)
    if not task.backend:
        return function(*args, **kwargs)
    from rallypoint.launcher.worker import process_group

    return process_group.called(
        lambda: function(*args, **kwargs), task.backend, task.backend_timeout, task.line, hooks
    )


def _failed(hooks: Hooks, rank: int, error: BaseException) -> int:
    """Tell an exception to the caller, which raises it, and to the agent, which judges it. Returns
    the exit status."""
    exception_capture.strip(error)
    hooks.stop()
    _send(hooks, rank, "error", payload.pack_error(error))
    if not run_program.tell_uncaught(hooks, error, printed=False):
        sys.excepthook(type(error), error, error.__traceback__)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else exits.RAISED


def _send(hooks: Hooks, rank: int, kind: Literal["value", "error"], packed: payload.Packed) -> None:
    with packed:
        if not hooks.tell(Outcome(rank, kind), packed.fds) and hooks.is_rank():
            with contextlib.suppress(OSError, ValueError):  # that one is closed, too, maybe
                print(
                    f"rallypoint: rank {rank} cannot tell its {kind}: its function closed descriptors of others",
                    file=sys.stderr,
                )
            os._exit(exits.RAISED)


def _leave(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are no daemons, as the interpreter does
        # multiprocessing's children, the store's session, what the user registered
        atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = code or exits.RAISED
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                # Closed by the function, or no longer read.
                continue
        os._exit(code)
