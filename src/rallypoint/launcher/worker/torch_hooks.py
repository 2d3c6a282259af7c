"""Wrapped functions of torch, by which a worker's program is seen from inside: where it meets the
others, which errors it catches.

Four functions are wrapped (`init_process_group`, `destroy_process_group`, `cuda.set_device`,
`multiprocessing.start_processes`), the constructor of `TCPStore`, and where a second group finds
its store. Collectives are not: torch itself logs every exception that leaves one, and its logger
has a handler of ours. `--plain` goes without all of it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rallypoint.diagnosis.evidence import CUDA_START
from rallypoint.launcher import exception_capture
from rallypoint.launcher.protocol import ChildrenFailed
from rallypoint.launcher.worker import child_processes, cuda, gloo, loaded_modules
from rallypoint.launcher.worker.after_import import now_or_when_imported
from rallypoint.launcher.worker.agent_line import is_initialized
from rallypoint.launcher.worker.worker_hooks import AGENT_STORE, Hooks, Variable

_current: Hooks | None = None


class _Listener(logging.Handler):
    """Handler for every exception that leaves a function of torch.distributed
    (`c10d_logger._exception_logger`).
    """

    def emit(self, record: logging.LogRecord) -> None:
        if _current is not None and isinstance(record.msg, dict) and "error" in record.msg:
            name = str(record.msg.get("func_name", ""))
            if name != "init_process_group":  # joining() tells that one
                _current.caught(sys.exc_info()[1], name)


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
    import torch.distributed.distributed_c10d as c10d

    original = c10d.init_process_group
    if hasattr(original, "_rallypoint"):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return original(*args, **kwargs)
        return _current.joining(original, args, kwargs)

    init_process_group._rallypoint = True  # type: ignore[attr-defined]
    loaded_modules.replace("torch.distributed", original, init_process_group)
    _renew_keys()
    _lead_to_the_held_store()
    _destroy_with_care(c10d.destroy_process_group)
    _wait_with_care()
    logger = getattr(sys.modules.get("torch.distributed.c10d_logger"), "_c10d_logger", None)
    # torch's own name, not public: without it errors that are caught are not seen.
    if isinstance(logger, logging.Logger):
        logger.addHandler(_Listener(level=logging.DEBUG))

    import torch.cuda

    select = torch.cuda.set_device

    @functools.wraps(select)
    def set_device(*args: Any, **kwargs: Any) -> Any:
        try:
            select(*args, **kwargs)
        except Exception as error:
            if _current is not None:
                _current.caught(error, "set_device")
            raise
        cuda.chosen()

    torch.cuda.set_device = set_device
    cuda.watch_first_use(loaded_modules.replace, _cuda_failed)

    import torch.multiprocessing

    start: Callable[..., Any] = vars(torch.multiprocessing)["start_processes"]

    @functools.wraps(start)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return start(*args, **kwargs)
        _current.spawning()
        try:
            # A group of the program's own: its rank 0 hosts, or fails at once and does not wait for
            # us.
            with (
                Variable(AGENT_STORE, "False"),
                _current.following(start, args, kwargs) as (args, kwargs),
            ):
                return start(*args, **kwargs)
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

    loaded_modules.replace("torch.multiprocessing", start, start_processes)
    _watch_children()


def _cuda_failed(error: Exception) -> None:
    """Tell that the program's first use of CUDA has failed. In a group the others notice by
    themselves that this rank is gone.
    """
    if _current is not None and not is_initialized():
        _current.caught(error, CUDA_START)


def _watch_children() -> None:
    child_processes.watch(
        lambda failed, more: (
            _current.tell(ChildrenFailed(tuple(failed), more)) if _current is not None else None
        ),
        lambda: _current.starts_interpreter() if _current is not None else None,
    )


def _destroy_with_care(original: Callable[..., None]) -> None:
    import torch.distributed as dist

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        if _current is not None:
            group = args[0] if args else kwargs.get("group")
            _current.clearing_up(whole=group is None or group is dist.group.WORLD)
            gloo.let_threads_finish()
        original(*args, **kwargs)

    loaded_modules.replace("torch.distributed", original, destroy_process_group)


def _wait_with_care() -> None:
    """Let a signal that came in a long wait for other ranks be handled before the error that ends
    the wait goes on.

    After Ctrl-C the first rank that saves and leaves ends the waits of the others with "Connection
    closed by peer". Python runs no handler while an exception leaves one function after the other,
    so KeyboardInterrupt would come when `except KeyboardInterrupt: save()` has been passed. torch's
    own Python code runs handlers in most collectives; it has none in these two.
    """
    import torch.autograd as autograd
    import torch.distributed as dist  # as a name: it may be no attribute of `torch` yet

    work = getattr(dist, "Work", None)
    for place, name in ((work, "wait"), (autograd, "backward")):
        original = getattr(place, name, None)
        if original is not None and not hasattr(original, "_rallypoint"):
            setattr(place, name, _handling_signals(original))


def _handling_signals(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception:
            _handle_signals()
            raise

    call._rallypoint = True  # type: ignore[attr-defined]
    return call


def _handle_signals() -> None:
    """Do nothing: Python runs the handlers of signals that have come when it begins a function."""


def _renew_keys() -> None:
    """Give a group that is opened again keys of its own in the held store, which is as its
    predecessor left it.
    """
    import torch.distributed as dist

    # The attribute of that name is a function.
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    # torch's own name, not public.
    create: Callable[..., Any] | None = getattr(rendezvous, "_create_c10d_store", None)
    if create is None:
        return

    @functools.wraps(create)
    def create_store(*args: Any, **kwargs: Any) -> Any:
        store = create(*args, **kwargs)
        if _current is None or os.environ.get(AGENT_STORE) != "True":
            return store
        size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
        prefix = _current.prefix(size)
        return dist.PrefixStore(prefix, store) if prefix else store  # type: ignore[attr-defined]

    rendezvous._create_c10d_store = create_store


_STORE_ARGUMENTS = (
    "host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant", "master_listen_fd", "use_libuv",
)  # fmt: skip


def _lead_to_the_held_store() -> None:
    """Wrap the constructor of `TCPStore`, which every way to meet over TCP ends in (`env://`,
    `tcp://`, rpc, a program's own store).
    """
    import torch.distributed as dist

    kind: Any = getattr(dist, "TCPStore", None)
    if kind is None:  # a torch that was built without it
        return
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(_STORE_ARGUMENTS, args, strict=False))
        # Too many arguments, or one given twice, are torch's to refuse.
        if _current is None or len(named) < len(args) or named.keys() & kwargs.keys():
            original(self, *args, **kwargs)
        else:
            original(self, **_current.arguments_of_store({**named, **kwargs}))

    kind.__init__ = __init__


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
