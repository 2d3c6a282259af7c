"""First code in every worker: identity, standard streams, hooks, then the program.

A fork of the template is made to look like a fresh interpreter here; where it still differs is
docs/concepts/template.md.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import hmac  # noqa: F401  # `rallypoint.connect` needs it later, when a file of this name beside the script would come first
import io
import os
import random  # noqa: F401  # as hmac
import resource
import shlex  # noqa: F401  # as hmac
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

import msgspec

from rallypoint.host import processes
from rallypoint.host.signals import EVIDENCE_SIGNAL, show_attention
from rallypoint.launcher import exception_capture, late_variables, protocol
from rallypoint.launcher.protocol import AtPhase, Debugging, ImportedPart, Setup, StartWorker
from rallypoint.launcher.worker import import_times, run_program, teardown, torch_hooks
from rallypoint.launcher.worker.after_import import now_or_when_imported
from rallypoint.launcher.worker.worker_hooks import Hooks
from rallypoint.store import discovery

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_OPENBLAS_SETTERS = (  # by how it was built: scipy's prefix, 64-bit suffix
    "scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_", "openblas_set_num_threads",
)  # fmt: skip

HIGH_DESCRIPTOR = 1040  # programs that close all descriptors go up to 1024

# Objects that live as long as the process: the evidence file behind faulthandler.
_keep: list[object] = []


class Descriptors:
    """Descriptors that come with a `StartWorker`, in this order; `secret` and `terminal` are -1
    when there is none. `payload`: those of a task."""

    def __init__(self, order: StartWorker, fds: list[int]) -> None:
        self.standard = fds[:3]
        self.others = fds[3:]
        self.control, self.evidence, *rest = self.others
        self.secret = rest.pop(0) if order.store else -1
        payload_fds = order.task.payload_fds if order.task is not None else 0
        self.terminal = rest.pop(0) if len(rest) > payload_fds else -1
        self.payload = rest


def become_rank(setup: Setup, order: StartWorker, fds: Descriptors, parent: int) -> None:
    """Give this process a session of its own, and the standard descriptors, environment and signal
    dispositions that are ordered."""
    os.setsid()
    processes.die_with(parent)
    for number in order.ignored:
        signal.signal(number, signal.SIG_IGN)
    for target, source in enumerate(fds.standard):
        os.dup2(source, target)
        os.close(source)
    for name in order.task.without if order.task is not None else ():
        os.environ.pop(name, None)
    # Not `update`, which asks the abstract base classes first: 160 kB written.
    for name, value in order.environment.items():
        os.environ[name] = value
    if order.store:  # which the user's secret file is not for
        os.environ.pop("RALLYPOINT_SECRET_FILE", None)
    # The template holds OpenBLAS at one thread, so that it may be forked.
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    if setup.openblas_threads is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = setup.openblas_threads


def forked(setup: Setup, order: StartWorker, fds: Descriptors, parent: int) -> Callable[[], None]:
    """Make a fork of the template look like a fresh interpreter, and return what runs the program.

    It runs from the template's top level, so that nothing of ours but one frame lies below the
    program.
    """
    become_rank(setup, order, fds, parent)
    _give_openblas_threads()
    _renew_streams()
    _renew_identity()
    _renew_randomness()

    def run() -> None:
        try:
            _run(setup, order, fds)
        except SystemExit as left:
            teardown.with_status(run_program.exit_code(left), interrupted=False)
            raise
        except BaseException as error:
            teardown.with_status(1, interrupted=isinstance(error, KeyboardInterrupt))
            raise
        teardown.with_status(0, interrupted=False)

    return run


def fresh(setup_fd: int, order_fd: int, others: list[int]) -> None:
    """Run the program in an interpreter of its own (`--fresh`), which has the standard descriptors in
    place. `others`: as in `Descriptors`."""
    for fd in others:
        # They came through an exec, and are not for the program's own children.
        os.set_inheritable(fd, False)
    setup = protocol.read_struct(setup_fd, Setup)
    order = protocol.read_struct(order_fd, StartWorker)
    if setup.hooks:
        torch_hooks.install_when_imported()
    _run(setup, order, Descriptors(order, [0, 1, 2, *others]))


def _run(setup: Setup, order: StartWorker, fds: Descriptors) -> None:
    control = socket.socket(fileno=_out_of_the_way(fds.control))
    if order.store:
        discovery.enter(
            order.store, _out_of_the_way(fds.secret), os.environ["RALLYPOINT_JOB"], order.rank
        )
    else:
        discovery.enter_without(order.no_store)
    if not setup.hooks:
        _wait_for_go(control)
        control.close()
        for fd in (fds.evidence, *([fds.terminal] if fds.terminal >= 0 else [])):
            os.close(fd)
        run_program.run(
            setup.program.for_rank(order.local_rank),
            None,
            takes_traceback=False,
            signal_mask=setup.signal_mask,
        )
        return
    seen = Hooks(control, held=order.held, began=order.began, single=order.single)
    torch_hooks.attach(seen)
    # closefd=False: a program that closes all descriptors gets no error about it.
    evidence = os.fdopen(_out_of_the_way(fds.evidence), "ab", buffering=0, closefd=False)
    _keep.append(evidence)
    faulthandler.enable(evidence, all_threads=True)
    faulthandler.register(EVIDENCE_SIGNAL, evidence, all_threads=True, chain=False)
    show_attention()
    _choose_debugger(order, fds.terminal, seen)
    seen.tell(AtPhase("started"))
    _wait_for_go(control)
    folder = order.task.folder if order.task is not None else run_program.folder(setup.program)
    times = import_times.ImportTimes(folder, lambda name: seen.tell(ImportedPart(name)))
    # In a fresh interpreter nothing could have been shared, and nothing was read before.
    if setup.imports:
        times.install()
        late_variables.remember(folder)
    if order.task is not None:
        from rallypoint.launcher.worker import run_function  # here: a script needs none of it

        run_function.run(order.task, order.rank, fds.payload, seen, signal_mask=setup.signal_mask)
        return
    try:
        run_program.run(
            setup.program.for_rank(order.local_rank),
            seen,
            takes_traceback=order.takes_traceback,
            stderr_is_kept=order.stderr_is_kept,
            signal_mask=setup.signal_mask,
        )
    finally:
        for imported in times.slow():
            seen.tell(imported)


def _out_of_the_way(fd: int) -> int:
    """Move a file to a high number: a program that closes all descriptors and opens its own must not
    get it for one of them, with our stacks written into the user's file."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(3, min(soft, HIGH_DESCRIPTOR) - 16))
    except OSError:  # a limit of a few descriptors: it stays where it is
        return fd
    os.close(fd)
    return high


def _wait_for_go(control: socket.socket) -> None:
    """Wait until the guard knows this process: before that nothing of the program may run, or a child
    of it could be missed."""
    answer, _ = protocol.receive(control)
    if answer is None:  # the agent is gone
        os._exit(1)


def _renew_streams() -> None:
    """Make `sys.stdin`, `sys.stdout` and `sys.stderr` as `python -u` does for the descriptors that
    are there now."""
    # The interpreter chose them for all three.
    encoding, errors = (sys.stdin.encoding, sys.stdin.errors)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "wb", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            raw, encoding=encoding, errors="backslashreplace" if number == 2 else errors, newline="\n",
            line_buffering=raw.isatty(), write_through=True,
        )  # fmt: skip
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    source = io.BufferedReader(io.FileIO(0, "rb", closefd=False))
    source.raw.name = "<stdin>"
    stdin = io.TextIOWrapper(
        source, encoding=encoding, errors=errors, newline=None, write_through=True
    )
    stdin.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _renew_identity() -> None:
    """Renew what the interpreter and its modules remember of the template's process."""
    main = threading.main_thread()
    if hasattr(main, "_set_native_id"):  # Python's own after-fork work renews `ident` only
        main._set_native_id()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))


def _renew_randomness() -> None:
    """Seed the generators of numpy and torch anew: at a fork only Python's `random` does so itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if (
        torch is not None
        # its CPU generator starts at a number from the system; those of accelerators start at a
        # constant
    ):
        torch.default_generator.seed()


def _give_openblas_threads() -> None:
    """Give OpenBLAS the threads that it has in a fresh process."""
    count = _openblas_threads(os.environ, len(os.sched_getaffinity(0)))
    if count == 1:
        return
    for path in _openblas_libraries():
        library = ctypes.CDLL(path)
        name = next((name for name in _OPENBLAS_SETTERS if hasattr(library, name)), None)
        if name is not None:
            getattr(library, name)(count)


def _openblas_threads(environment: Mapping[str, str], processors: int) -> int:
    """Return how many threads OpenBLAS takes when it loads (its memory.c, `blas_get_cpu_number`):
    never more than there are processors. Without `re`, whose first use writes to 300 kB that all
    ranks share until then."""
    for name in (
        "OPENBLAS_NUM_THREADS",
        "GOTO_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_DEFAULT_NUM_THREADS",
    ):
        first = environment.get(name, "").partition(",")[0].strip()  # "4,2": of nested regions
        if first.isdecimal() and int(first) > 0:
            return min(int(first), processors)
    return processors


def _openblas_libraries() -> set[str]:
    with open("/proc/self/maps") as file:
        return {
            line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line and "/" in line
        }


def _choose_debugger(order: StartWorker, terminal: int, seen: Hooks) -> None:
    """Set up `breakpoint()`: on the terminal in the rank that has it, one line in the others; as
    PYTHONBREAKPOINT says where it is set."""
    chosen = bool(os.environ.get("PYTHONBREAKPOINT"))
    if terminal >= 0 and (chosen or not order.debugger):
        os.close(terminal)
    if not order.debugger:
        leave_out = _left_out(order.rank)
        _leave_debuggers_out(leave_out)
        if not chosen:
            sys.breakpointhook = lambda *args, **kwargs: leave_out("breakpoint()", sys._getframe(1))
    elif terminal >= 0 and not chosen:
        import pdb  # 15 ms, in the one rank that has a terminal

        hook = sys.breakpointhook = pdb.set_trace = _on_terminal(terminal, seen)
        # ipdb would read the rank's own stdin and write to its pipe.
        now_or_when_imported("ipdb", lambda module: setattr(module, "set_trace", hook))


def _left_out(rank: int) -> Callable[[str, FrameType | None], None]:
    """Return a function that says, once for each place, that a debugger is left out: it would end a
    rank whose stdin is /dev/null."""
    said: set[str] = set()

    def leave_out(what: str, frame: FrameType | None) -> None:
        place = exception_capture.line_of(exception_capture.user_frame(frame) or frame)
        if place not in said:
            said.add(place)
            print(
                f"rallypoint: {what} at {place} left out: another rank has the terminal; --debug-rank {rank}",
                file=sys.stderr,
            )

    return leave_out


def _leave_debuggers_out(leave_out: Callable[[str, FrameType | None], None]) -> None:
    """Treat `pdb.set_trace()`, ipdb and others that build on the standard library's as
    `breakpoint()`. One that has an input of its own, a socket for instance, works as always."""
    import bdb

    original = bdb.Bdb.set_trace

    def set_trace(self: bdb.Bdb, frame: FrameType | None = None, *args: Any, **kwargs: Any) -> None:
        source = getattr(self, "stdin", None)
        if source is not None and source not in (sys.stdin, sys.__stdin__):
            original(self, frame, *args, **kwargs)
        else:
            leave_out("set_trace()", frame or sys._getframe(1))

    bdb.Bdb.set_trace = set_trace  # type: ignore[method-assign]


def _on_terminal(terminal: int, seen: Hooks) -> Callable[..., None]:
    """Return a debugger on the terminal itself: the rank's own stdout is a pipe, whose lines get a
    prefix. While it waits for a line the agent knows that, and does not ask for stacks."""
    # One reader for all calls: text that was typed ahead must not be lost with it.
    ends: list[io.TextIOWrapper] = []

    def breakpointhook(*args: object, **kwargs: object) -> None:
        import pdb

        if not ends:
            ends.append(
                io.TextIOWrapper(io.BufferedReader(io.FileIO(terminal, "r", closefd=False)))
            )
            ends.append(
                io.TextIOWrapper(io.FileIO(terminal, "w", closefd=False), write_through=True)
            )

        class Debugger(pdb.Pdb):
            def get_stack(
                self, f: FrameType | None, t: TracebackType | None
            ) -> tuple[list[tuple[FrameType, int]], int]:
                stack, index = super().get_stack(f, t)
                shown: list[tuple[FrameType, int]] = []
                for frame, line in stack:
                    file, name = frame.f_code.co_filename, frame.f_code.co_name
                    if not exception_capture.is_ours(file, name, first=not shown):
                        shown.append((frame, line))
                return shown, index - len(stack) + len(shown)

            def interaction(self, *args: Any, **kwargs: Any) -> None:
                seen.take_terminal()
                try:
                    super().interaction(*args, **kwargs)
                finally:
                    seen.tell(Debugging(waits=False))

        debugger = Debugger(stdin=ends[0], stdout=ends[1])
        debugger.use_rawinput = False  # input() would write its prompt to sys.stdout
        debugger.set_trace(sys._getframe(1))

    return breakpointhook
