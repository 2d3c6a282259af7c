"""Wrapped functions of torch, by which a worker's program is seen from inside: where it meets the
others, which errors it catches.

Four functions are wrapped (`init_process_group`, `destroy_process_group`, `cuda.set_device`,
`multiprocessing.start_processes`), the constructor of `TCPStore`, and where a second group finds
its store. Collectives are not: torch itself logs every exception that leaves one, and its logger
has a handler of ours. `--plain` goes without all of it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rallypoint.diagnosis.evidence import CUDA_START
from rallypoint.launcher import exception_capture
from rallypoint.launcher.protocol import ChildrenFailed
from rallypoint.launcher.worker import child_processes, cuda, gloo
from rallypoint.launcher.worker.after_import import now_or_when_imported
from rallypoint.launcher.worker.agent_line import is_initialized
from rallypoint.launcher.worker.function_hooks import wrap
from rallypoint.launcher.worker.worker_hooks import AGENT_STORE, Hooks, Variable

_Original = Callable[..., Any]

_current: Hooks | None = None


def attach(hooks: Hooks) -> None:
    """Send what the wrapped functions see to `hooks` from now on."""
    global _current
    _current = hooks


def preempted() -> bool:
    """Return whether this job has been given notice that it will end soon: a signal of `rallypoint
    run --notice-signal` came, SIGUSR1 or SIGUSR2 unless another one was named. Stays true, also in
    the ranks of a restart. False outside a rank, and with `--plain`.

    Ranks come to it at different moments: let them agree (`all_reduce`) before they act on it
    together. It costs a system call.
    """
    return _current is not None and _current.preempted()


def install() -> None:
    """Wrap torch's functions in this process; torch.distributed must have been imported."""
    import torch.autograd as autograd
    import torch.cuda
    import torch.distributed as dist  # as a name: it may be no attribute of `torch` yet
    import torch.distributed.distributed_c10d as c10d
    import torch.multiprocessing

    if hasattr(c10d.init_process_group, "_rallypoint"):
        return
    wrap(c10d, "init_process_group", _init_process_group, "torch.distributed")
    wrap(c10d, "destroy_process_group", _destroy_process_group, "torch.distributed")
    # Names of torch's own, not public: without them later groups have no keys of their own, and
    # errors that are caught are not seen.
    wrap(sys.modules.get("torch.distributed.rendezvous"), "_create_c10d_store", _create_store)
    logger = getattr(sys.modules.get("torch.distributed.c10d_logger"), "_c10d_logger", None)
    if isinstance(logger, logging.Logger):
        logger.addHandler(_Listener(level=logging.DEBUG))
    wrap(getattr(dist, "TCPStore", None), "__init__", _init_store)
    wrap(getattr(dist, "Work", None), "wait", _handling_signals)
    wrap(autograd, "backward", _handling_signals)
    wrap(torch.cuda, "set_device", _set_device)
    wrap(torch.multiprocessing, "start_processes", _start_processes, "torch.multiprocessing")
    cuda.watch_first_use(_cuda_failed)
    _watch_children()


def install_when_imported() -> None:
    """Call `install` once the program has imported torch, all of it, and torch.distributed.
    Children are watched in any case.

    Some versions of torch import torch.distributed while they are being imported themselves (2.15
    does). Then `install` has to wait: what it imports of torch may need what torch does not have
    yet.
    """

    def distributed_is_there(module: ModuleType) -> None:
        if hasattr(module, "init_process_group"):  # a torch built without distributed has none
            install()

    def torch_is_there(module: ModuleType) -> None:
        now_or_when_imported("torch.distributed", distributed_is_there)

    now_or_when_imported("torch", torch_is_there)
    now_or_when_imported("multiprocessing.process", lambda module: _watch_children())


def _watch_children() -> None:
    child_processes.watch(
        lambda failed, more: (
            _current.tell(ChildrenFailed(tuple(failed), more)) if _current is not None else None
        ),
        lambda: _current.starts_interpreter() if _current is not None else None,
    )


class _Listener(logging.Handler):
    """Handler for every exception that leaves a function of torch.distributed
    (`c10d_logger._exception_logger`).
    """

    def emit(self, record: logging.LogRecord) -> None:
        if _current is not None and isinstance(record.msg, dict) and "error" in record.msg:
            name = str(record.msg.get("func_name", ""))
            if name != "init_process_group":  # joining() tells that one
                _current.caught(sys.exc_info()[1], name)


# --- what is called in the place of torch's functions, which come first ---


def _init_process_group(original: _Original, *args: Any, **kwargs: Any) -> Any:
    if _current is None:
        return original(*args, **kwargs)
    return _current.joining(original, args, kwargs)


def _destroy_process_group(original: _Original, *args: Any, **kwargs: Any) -> None:
    import torch.distributed as dist

    if _current is not None:
        group = args[0] if args else kwargs.get("group")
        _current.clearing_up(whole=group is None or group is dist.group.WORLD)
        gloo.let_threads_finish()
    original(*args, **kwargs)


def _create_store(original: _Original, *args: Any, **kwargs: Any) -> Any:
    """Give a group that is opened again keys of its own in the held store, which is as its
    predecessor left it.
    """
    import torch.distributed as dist

    store = original(*args, **kwargs)
    if _current is None or os.environ.get(AGENT_STORE) != "True":
        return store
    prefix = _current.prefix(kwargs.get("world_size", args[3] if len(args) > 3 else -1))
    return dist.PrefixStore(prefix, store) if prefix else store  # type: ignore[attr-defined]


_STORE_ARGUMENTS = (
    "host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant", "master_listen_fd", "use_libuv",
)  # fmt: skip


def _init_store(original: _Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Lead a `TCPStore` to the held store: every way to meet over TCP ends in its constructor
    (`env://`, `tcp://`, rpc, a program's own store).
    """
    named = dict(zip(_STORE_ARGUMENTS, args, strict=False))
    # Too many arguments, or one given twice, are torch's to refuse.
    if _current is None or len(named) < len(args) or named.keys() & kwargs.keys():
        original(self, *args, **kwargs)
    else:
        original(self, **_current.arguments_of_store({**named, **kwargs}))


def _handling_signals(original: _Original, *args: Any, **kwargs: Any) -> Any:
    """Let a signal that came in a long wait for other ranks be handled before the error that ends
    the wait goes on.

    After Ctrl-C the first rank that saves and leaves ends the waits of the others with "Connection
    closed by peer". Python runs no handler while an exception leaves one function after the other,
    so KeyboardInterrupt would come when `except KeyboardInterrupt: save()` has been passed. torch's
    own Python code runs handlers in most collectives; it has none in the two that are wrapped.

    An exception that leaves it remembers when the call began and ended. One that the program has in
    hand meanwhile is told: it may be why the others wait elsewhere.
    """
    if _current is not None:
        _current.waits()
    try:
        return exception_capture.timed(original, *args, **kwargs)
    except Exception:
        _handle_signals()
        raise


def _handle_signals() -> None:
    """Do nothing: Python runs the handlers of signals that have come when it begins a function."""


def _set_device(original: _Original, *args: Any, **kwargs: Any) -> None:
    try:
        original(*args, **kwargs)
    except Exception as error:
        if _current is not None:
            _current.caught(error, "set_device")
        raise
    cuda.chosen()


def _cuda_failed(error: Exception) -> None:
    """Tell that the program's first use of CUDA has failed. In a group the others notice by
    themselves that this rank is gone.
    """
    if _current is not None and not is_initialized():
        _current.caught(error, CUDA_START)


def _start_processes(original: _Original, *args: Any, **kwargs: Any) -> Any:
    if _current is None:
        return original(*args, **kwargs)
    _current.spawning()
    try:
        # A group of the program's own: its rank 0 hosts, or fails at once and does not wait for
        # us.
        with (
            Variable(AGENT_STORE, "False"),
            _current.following(original, args, kwargs) as (args, kwargs),
        ):
            return original(*args, **kwargs)
    except Exception as error:
        line = exception_capture.unguarded_line(sys._getframe(1))
        if (
            line
            and getattr(error, "exit_code", 0) == 1
            and kwargs.get("start_method", "spawn") != "fork"
        ):
            error.__dict__["_rallypoint_code"] = "main-unguarded"
            error.__dict__["_rallypoint_why"] = (
                f"{line} runs again in every new process, which imports the program anew",
            )
        raise
