"""The first code in every worker: identity, logs, last words, then yours."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import msgspec

from rallypoint.host import processes
from rallypoint.host.signals import EVIDENCE_SIGNAL
from rallypoint.launch import channel, hooks, program
from rallypoint.launch.channel import AtPhase, Setup, StartWorker

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_keep: list[object] = []  # what must live as long as the process: the evidence file behind faulthandler


class Descriptors:
    """The descriptors that come with a `StartWorker`, in this order; `terminal` is -1 when there is none for it."""

    __slots__ = ("control", "evidence", "stderr", "stdin", "stdout", "terminal")

    def __init__(self, fds: list[int]) -> None:
        self.stdin, self.stdout, self.stderr, self.control, self.evidence = fds[:5]
        self.terminal = fds[5] if len(fds) > 5 else -1


def become_rank(order: StartWorker, fds: Descriptors, parent: int) -> None:
    """Identity: a session of its own, the standard descriptors, environment and signal dispositions as given."""
    os.setsid()
    processes.die_with(parent)
    for number in order.ignored:
        signal.signal(number, signal.SIG_IGN)
    for source, target in ((fds.stdin, 0), (fds.stdout, 1), (fds.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.update(order.environment)


def forked(setup: Setup, order: StartWorker, fds: Descriptors, parent: int) -> Callable[[], None]:
    """In a fork of the template: make it look like a fresh interpreter, and return what runs the program.

    It runs from the template's top level, so that nothing of ours but one frame lies below the program.
    """
    become_rank(order, fds, parent)
    _restore_openblas(setup.openblas_threads)
    _renew_streams()
    _renew_randomness()
    return lambda: _run(setup, order, fds)


def fresh(setup_fd: int, order_fd: int, control: int, evidence: int, terminal: int) -> None:
    """In an interpreter of its own (`--fresh`), started by the starter with the standard descriptors in place."""
    setup = read_struct(setup_fd, Setup)
    order = read_struct(order_fd, StartWorker)
    if setup.hooks:
        hooks.install_when_imported()
    _run(setup, order, Descriptors([0, 1, 2, control, evidence, terminal]))


def read_struct(fd: int, kind: type[_Struct]) -> _Struct:
    """A struct from a memfd, which is closed."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=kind)


def _run(setup: Setup, order: StartWorker, fds: Descriptors) -> None:
    control = socket.socket(fileno=fds.control)
    if not setup.hooks:
        _wait_for_go(control)
        control.close()
        os.close(fds.evidence)
        program.run(setup.program, None, takes_traceback=False)
        return
    seen = hooks.Hooks(control, held=order.held, began=order.began, single=order.single)
    hooks.attach(seen)
    evidence = os.fdopen(fds.evidence, "ab", buffering=0)
    _keep.append(evidence)
    faulthandler.enable(evidence, all_threads=True)
    faulthandler.register(EVIDENCE_SIGNAL, evidence, all_threads=True, chain=False)
    _choose_debugger(order, fds.terminal)
    seen.tell(AtPhase("started"))
    _wait_for_go(control)
    program.run(setup.program, seen, takes_traceback=order.takes_traceback)


def _wait_for_go(control: socket.socket) -> None:
    """Until the guard knows this process: before that nothing of the program may run, or a child of it could be missed."""
    answer, _ = channel.receive(control)
    if answer is None:  # the agent is gone
        os._exit(1)


def _renew_streams() -> None:
    """`sys.stdin`, `sys.stdout` and `sys.stderr` as `python -u` makes them for the descriptors that are there now."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
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
    source = open(0, "rb", closefd=False)
    source.raw.name = "<stdin>"
    stdin = io.TextIOWrapper(source, encoding=sys.stdin.encoding, errors=sys.stdin.errors)
    stdin.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _renew_randomness() -> None:
    """What fresh processes have of their own. Python's `random` reseeds itself at a fork; torch's default seed is a constant."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))


def _restore_openblas(wanted: str | None) -> None:
    """The template holds OpenBLAS at one thread, so that it may be forked; here it gets what a fresh process would have."""
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    if wanted is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = wanted
    if "numpy" not in sys.modules:
        return
    count = next((int(v) for v in (wanted, os.environ.get("GOTO_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS")) if v and v.isdigit() and int(v)), 0)
    count = count or len(os.sched_getaffinity(0))
    if count == 1:
        return
    for path in _openblas_libraries():
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(count)
                break


def _openblas_libraries() -> set[str]:
    with open("/proc/self/maps") as file:
        return {line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line and "/" in line}


def _choose_debugger(order: StartWorker, terminal: int) -> None:
    """`breakpoint()`: on the terminal in the rank that has it, one line in the others, whatever PYTHONBREAKPOINT names if it is set."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return
    if not order.debugger:
        sys.breakpointhook = _skipped_breakpoint(order.rank)
    elif terminal >= 0:
        sys.breakpointhook = _terminal_debugger(terminal)


def _skipped_breakpoint(rank: int) -> Callable[..., None]:
    """A breakpoint() in a rank whose stdin is /dev/null would end it; say so and go on."""

    def skip(*args: object, **kwargs: object) -> None:
        frame = sys._getframe(1)
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        print(f"rallypoint: breakpoint() at {place} left out: the terminal belongs to another rank; --debug-rank {rank}", file=sys.stderr)

    return skip


def _terminal_debugger(terminal: int) -> Callable[..., None]:
    def debug(*args: object, **kwargs: object) -> None:
        import pdb

        reader, writer = open(terminal, closefd=False), open(terminal, "w", closefd=False)
        debugger = pdb.Pdb(stdin=reader, stdout=writer)
        debugger.use_rawinput = False
        caller: FrameType | None = sys._getframe(1)
        debugger.set_trace(caller)

    return debug
