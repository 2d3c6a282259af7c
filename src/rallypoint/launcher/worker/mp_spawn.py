"""Process that the program starts with `torch.multiprocessing.spawn`: it tells the launcher where
it is, as a rank does.

Only the processes of a job's only rank tell it: they are the ranks of the group that the program
makes itself.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rallypoint.diagnosis.evidence import Raised
from rallypoint.host import memory_files, system_calls
from rallypoint.host.signals import EVIDENCE_SIGNAL
from rallypoint.launcher import exception_capture
from rallypoint.launcher.protocol import AtPhase, Meets, OfSpawned, Packet
from rallypoint.launcher.worker import torch_hooks
from rallypoint.launcher.worker.worker_hooks import Hooks

_keep: list[object] = []  # what must live as long as the process: the file behind faulthandler


class Spawned(NamedTuple):
    """The program's function, as the new processes get it: each first reports to the launcher.
    Pickled for the method `spawn`. `size`: how many processes are started. `control`: a line to the
    launcher, inherited by all of them. `began`: the wall clock of the attempt's start, as the rank
    has it.
    """

    function: Callable[..., Any]
    size: int
    control: socket.socket
    began: float

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the function as process `index`."""
        _report(self.control, index, self.size, self.began)
        _renew_names(self.function)
        try:
            return self.function(index, *args)
        except BaseException as error:
            exception_capture.strip(error)  # torch prints the traceback
            raise


class SpawnedHooks(Hooks):
    """Hooks of a spawned process: they tell where it meets the others. Its exceptions reach the
    launcher by the rank that started it."""

    def __init__(self, control: socket.socket, index: int, size: int, began: float) -> None:
        super().__init__(control, held="", began=began, single=False)
        self._index, self._size = index, size

    def tell(self, message: Packet, fds: Sequence[int] = (), sent: list[int] | None = None) -> bool:
        """Tell the launcher, if it is about meeting the others; False when it is not, or the
        launcher has gone.
        """
        if not isinstance(message, AtPhase | Meets):
            return False
        return super().tell(OfSpawned(self._index, self._size, os.getpid(), message), fds, sent)

    def preempted(self) -> bool:
        """Return False, as outside a rank: what the launcher says on the line is for the rank."""
        return False

    def spawning(self) -> None:
        """Do nothing: the launcher follows the processes of the rank itself, and not theirs."""

    def _tell_of(self, error: BaseException, raised: Callable[[], Raised]) -> None:
        """Do nothing: torch brings the exception to the rank."""


def _report(control: socket.socket, index: int, size: int, began: float) -> None:
    """Tell the launcher of this process. From now on it answers the evidence signal, and its
    `init_process_group` is seen.
    """
    evidence = memory_files.create(f"rallypoint-spawned{index}")
    pidfd = system_calls.pidfd_open(os.getpid())
    file = os.fdopen(evidence, "ab", buffering=0)
    _keep.append(file)
    faulthandler.register(EVIDENCE_SIGNAL, file, all_threads=True, chain=False)
    seen = SpawnedHooks(control, index, size, began)
    seen.tell(AtPhase("running"), (pidfd, evidence))
    os.close(pidfd)
    torch_hooks.attach(seen)
    torch_hooks.install()


def _renew_names(function: Callable[..., Any]) -> None:
    """Give the wrap to what took the function's name before: `from torch.distributed import
    init_process_group`. A new process imports the program first, and of its main module the
    functions have a namespace that no module has (multiprocessing.spawn runs it by runpy)."""
    import torch.distributed as dist

    wrap: Any = dist.init_process_group
    modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    for names in (getattr(function, "__globals__", {}), *modules):
        if names.get("init_process_group") is wrap.__wrapped__:
            names["init_process_group"] = wrap
