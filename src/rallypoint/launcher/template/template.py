"""The clean, preloaded process that workers are forked from.

It imports torch (unless it is a starter of fresh interpreters) and the preload modules, and then
does what the agent orders: fork a worker, fork a c10d host, reap. It holds no state of the job.
`serve` returns only in its children, so that they run the program from the top level of the
interpreter.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

# not the module: gevent, in a preload module, takes epoll away
from select import EPOLLIN, EPOLLOUT, epoll
from typing import NoReturn

import msgspec

from rallypoint.clock import Clock
from rallypoint.host import devices, memory_files, process_status, processes, system_calls
from rallypoint.host.fd_passing import close_fds
from rallypoint.launcher import (
    exception_capture,
    nested_launch,
    preload_parts,
    protocol,
    spawn,
)
from rallypoint.launcher.protocol import (  # fmt: skip
    Exited,
    Finish,
    Forked,
    ImportFailed,
    Importing,
    ImportParts,
    NotExecuted,
    NotForked,
    Packet,
    Ready,
    Reap,
    Reaped,
    Setup,
    StartHost,
    StartWorker,
)
from rallypoint.launcher.worker import run_program, teardown, worker
from rallypoint.launcher.worker.worker import Descriptors

# Device files whose being open means that an accelerator's driver has state which does not survive
# a fork.
_DEVICE_FILES = (
    "/dev/nvidia",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/render",
    "/dev/accel",
    "/dev/habanalabs",
    "/dev/davinci",
)


def serve(orders_fd: int, spent: float, failed: BaseException | None) -> Callable[[], None]:
    """Serve as a template; return, in a child, what the child is to run. The template itself does
    not return.

    `spent`: seconds that torch's import took; `failed`: the exception of that import.
    """
    orders = socket.socket(fileno=orders_fd)
    setup, _ = protocol.receive(orders)
    if not isinstance(setup, Setup):  # the agent is gone
        os._exit(1)
    if not _prepare(setup, orders, spent, failed):
        os._exit(1)
    return _Template(setup, orders).loop()


def _prepare(
    setup: Setup, orders: socket.socket, spent: float, failed: BaseException | None
) -> bool:
    """Import all modules that the ranks will share, and tell the agent how it went; return False
    when no process can be forked from this one."""
    if not setup.imports:
        protocol.send(orders, Ready(0.0))
        return True
    clock = Clock()
    version = name = why = ""
    former: set[str] = set()
    try:
        for name in ("torch", "torch.distributed"):
            if failed is not None:
                raise failed
            __import__(name)
            version = version or str(getattr(sys.modules[name], "__version__", ""))
            why = why or unclean()
        if setup.hooks:
            from rallypoint.launcher.worker import torch_hooks

            # before any preload module: `from torch.distributed import init_process_group` copies
            # the name
            torch_hooks.install()
        if not why:
            name, why = preload_parts.load(
                setup.parts, unclean
            )  # without the program's folder: they are torch's
        if setup.preload:
            former = set(sys.modules)
            gc.freeze()
            gc.enable()  # what these do when they are imported is not known
            # Only now: a user's `re.py` must not get between torch and its own imports.
            if setup.paths is None:
                run_program.place_folder(setup.program)
            else:
                sys.path[:] = setup.paths
        for name in () if why else setup.preload:
            nested_launch.importing = f"{name}, to be preloaded"
            protocol.send(orders, Importing(name))
            __import__(name)
            why = unclean()
            if why:
                break
    except BaseException as error:
        # SystemExit, too: a script without its `if __name__ == "__main__"` may be asked for
        exception_capture.strip(error)
        protocol.send(orders, ImportFailed(name, exception_capture.raised(error)))
        return False
    if why:
        protocol.send(orders, Ready(spent + clock.elapsed(), version, why, name))
        return False
    if setup.preload:
        nested_launch.importing = ""
        gc.collect()
    read_from = _sources(former)
    paths = {path for path, _, _ in read_from}
    teardown.prepare(
        {name for name, module in sys.modules.items() if getattr(module, "__file__", None) in paths}
    )
    gc.freeze()  # the collector never touches what is shared, so its pages stay shared
    gc.enable()
    protocol.send(orders, Ready(spent + clock.elapsed(), version, files=read_from))
    return True


def _sources(former: set[str]) -> tuple[tuple[str, int, int], ...]:
    """Return the files of the modules that came with the preload modules and are no installed
    packages: a person may be editing them."""
    found = []
    for name in sys.modules.keys() - former:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if former and path.endswith(".py") and "-packages" + os.sep not in path:
            try:
                status = os.stat(path)
            except OSError:  # it was imported from a file that is gone: nobody edits that
                continue
            found.append((path, status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))


def unclean() -> str:
    """Return why this process must not be forked, "" when it may: CUDA initialised, another thread,
    an accelerator's file open."""
    cuda = sys.modules.get("torch.cuda")
    if (cuda is not None and cuda.is_initialized()) or devices.cuda_is_up():
        return "CUDA is initialised"
    count = process_status.threads()
    if count > 1:
        return f"{count} threads"
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if target.startswith(_DEVICE_FILES):
            return f"{target} is open"
    return ""


class _Template:
    def __init__(self, setup: Setup, orders: socket.socket) -> None:
        self._setup = setup
        self._orders = orders
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._epoll = epoll()
        self._epoll.register(orders, EPOLLIN)
        self._unsent: deque[Packet] = deque()
        # What a rank started and left without a parent becomes this process's child, and nobody
        # else's does: that is how it is told from what the launcher's own process had started
        # before it became the launcher.
        processes.become_subreaper()
        processes.continue_at_end_of_parent()  # not SIGKILL: `_leave` ends all of that first
        # A preload module may ignore it; then the kernel would reap the ranks before they are asked.
        self._ignores_ends = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        if self._ignores_ends:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        self._orphans = system_calls.signalfd(signal.SIGCHLD)
        self._epoll.register(self._orphans, EPOLLIN)

    def _tell(self, message: Packet) -> None:
        """Tell the agent, without waiting: it may itself be waiting for us to read an order."""
        self._unsent.append(message)
        self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                protocol.send(self._orders, self._unsent[0], flags=socket.MSG_DONTWAIT)
                self._unsent.popleft()
        except BlockingIOError:  # the rest when it has read some
            self._epoll.modify(self._orders, EPOLLIN | EPOLLOUT)
            return
        except OSError:  # the agent is gone
            self._leave()
        self._epoll.modify(self._orders, EPOLLIN)

    def loop(self) -> Callable[[], None]:
        while True:
            for fd, events in self._epoll.poll():
                if fd == self._orphans:
                    self._reap_orphans()
                    continue
                if fd != self._orders.fileno():
                    self._ended(fd)
                    continue
                if events & EPOLLOUT:
                    self._send_unsent()
                if not events & ~EPOLLOUT:
                    continue
                run = self._order()
                if run is not None:
                    return run

    def _leave(self) -> NoReturn:
        """End the processes that the ranks have left here, and this one: the agent has ended
        without a word. The guard does so, too, if it lives."""
        processes.kill_family(b"", (), ancestor=os.getpid())
        os._exit(0)

    def _reap_orphans(self) -> None:
        """Reap processes that the ranks have left here and that have ended. The ranks themselves are
        reaped when the agent orders it."""
        os.read(self._orphans, 128)
        for pid in set(process_status.children(os.getpid())).difference(self._children.values()):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)

    def _order(self) -> Callable[[], None] | None:
        message, fds = protocol.receive(self._orders)
        match message:
            case StartWorker():
                return self._start(
                    message.rank, fds, lambda parent: self._worker(message, fds, parent)
                )
            case StartHost():
                return self._start(-1, fds, lambda parent: self._host(message, fds, parent))
            case ImportParts(names):
                self._import(names)
            case Reap(pid):
                self._reap(pid)
            case Finish():
                os._exit(0)
            case None:
                self._leave()
        return None

    def _start(
        self, rank: int, fds: list[int], become: Callable[[int], Callable[[], None]]
    ) -> Callable[[], None] | None:
        why, number, pid, began = "", 0, -1, 0.0
        parent = os.getpid()
        try:
            why = unclean() if self._setup.imports else ""
            began = time.monotonic()
            if not why:
                pid = os.fork()
                pidfd = system_calls.pidfd_open(pid) if pid else -1
        except OSError as error:
            number = error.errno or 0
            if pid > 0:  # no descriptor to watch it with; it waits for its `Go`, and ran nothing
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pid = -1
        if pid == 0:
            self._forget()
            return become(parent)
        took = time.monotonic() - began
        close_fds(*fds)
        if pid < 0:
            self._tell(NotForked(rank, number, why))
            return None
        self._children[pidfd] = pid
        self._tell(Forked(rank, pid, took))
        self._epoll.register(pidfd, EPOLLIN)
        return None

    def _import(self, names: tuple[str, ...]) -> None:
        """Import parts of torch between two jobs."""
        clock = Clock()
        gc.disable()
        name, why = preload_parts.load(names, unclean)
        teardown.leave_operators_registered()
        gc.freeze()
        gc.enable()
        self._tell(Ready(clock.elapsed(), unclean=why, module=name))

    def _forget(self) -> None:
        """Close, in the child, everything of the template's, and ignore what the modules ignore."""
        if self._ignores_ends:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        self._epoll.close()
        self._orders.close()
        close_fds(self._orphans, *self._children)
        self._children = {}

    def _worker(self, order: StartWorker, fds: list[int], parent: int) -> Callable[[], None]:
        descriptors = Descriptors(order, fds)
        if self._setup.imports:
            return worker.forked(self._setup, order, descriptors, parent)
        worker.become_rank(self._setup, order, descriptors, parent)
        self._execute(order, descriptors)

    def _execute(self, order: StartWorker, fds: Descriptors) -> NoReturn:
        setup = self._setup
        # Python ignores them for itself; a program expects the default.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        control = socket.socket(fileno=fds.control)
        if setup.program.kind == "command":
            answer, _ = protocol.receive(control)
            if answer is None:
                os._exit(1)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                # One that waits is the program's, not this interpreter's.
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, setup.signal_mask)
            arguments = [setup.program.target, *setup.program.for_rank(order.local_rank).args]
        else:
            told = _memory(setup), _memory(order)
            for fd in (*told, *fds.others):
                os.set_inheritable(fd, True)
            arguments = [sys.executable, "-u", "-c", spawn.FRESH % (*told, fds.others)]
        try:
            os.execvp(arguments[0], arguments)
        except OSError as error:
            protocol.send(control, NotExecuted(error.errno or 0))
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)

    def _host(self, order: StartHost, fds: list[int], parent: int) -> Callable[[], None]:
        from rallypoint.launcher.template import c10d_host

        listener, ready = fds[:2]
        if self._setup.imports:
            return lambda: c10d_host.forked(order.host, order.port, listener, ready, parent)
        os.setsid()
        for fd in (listener, ready):
            os.set_inheritable(fd, True)
        numbers = map(str, (order.port, listener, ready, parent))
        os.execv(sys.executable, [sys.executable, "-c", spawn.HOST, order.host, *numbers])

    def _ended(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        info = os.waitid(system_calls.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        if info is not None:
            self._tell(Exited(self._children[pidfd], *processes.ended(info)))

    def _reap(self, pid: int) -> None:
        for pidfd, child in self._children.items():
            if child == pid:
                del self._children[pidfd]
                os.close(pidfd)
                _, _, usage = os.wait4(pid, 0)
                self._tell(Reaped(pid, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024))
                return


def _memory(value: msgspec.Struct) -> int:
    return memory_files.create("rallypoint", protocol.exact(value))
