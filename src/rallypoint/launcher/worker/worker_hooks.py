"""Hooks of one worker: what is seen of its program at calls of torch's, and told to the agent."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rallypoint.diagnosis import stacks
from rallypoint.errors import UsageError
from rallypoint.host.dns_timeouts import quick_lookups
from rallypoint.launcher import exception_capture, late_variables, protocol
from rallypoint.launcher.protocol import (
    AtPhase,
    Debugging,
    ForksCuda,
    Meets,
    Noticed,
    Released,
    SetLate,
    Spawns,
    TerminalLeft,
    ThreadEnded,
)
from rallypoint.launcher.worker import cuda, meeting_point
from rallypoint.launcher.worker.agent_line import AgentLine, is_initialized
from rallypoint.launcher.worker.meeting_point import HeldPoint

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
MESSAGE_MOST = 500  # characters of the message of a thread's exception
# Places of forks told per worker.
FORKS_MOST = 20
# Seconds for an answer of the agent's; it answers in milliseconds unless it is being killed.
ANSWER_TIMEOUT = 5.0


class Hooks(AgentLine):
    """View of one worker's program. The wrapped functions of `torch_hooks` call these methods."""

    def __init__(self, control: socket.socket, *, held: str, began: float, single: bool) -> None:
        """`held`: host:port that the agent holds, "" for none. `began`: wall clock of the attempt's
        start. `single`: this is the job's only rank."""
        super().__init__(control)
        self._point = HeldPoint(held, began)
        self._began = began
        self._single = single
        self._group_line = ""
        self._calls = 0  # of init_process_group
        # Groups that this process has joined at the held socket, by their size.
        self._joined: Counter[int] = Counter()
        self.opened_at = (
            ""  # where `launch` was called that has opened the process group, and will close it
        )
        self._forks: set[str] = set()
        self._thread_hook = threading.excepthook
        self._lost_thread = False  # the first is told
        threading.excepthook = self.thread_ended
        os.register_at_fork(before=self.forking, after_in_child=self.forget)

    def forking(self) -> None:
        """Tell that the program forks while CUDA is up. The child is refused CUDA only if it tries
        to use it.
        """
        line, first = cuda.about_to_fork()
        if line and line not in self._forks and len(self._forks) < FORKS_MOST:
            self._forks.add(line)
            self.tell(ForksCuda(line, first))

    def thread_ended(self, told: threading.ExceptHookArgs) -> None:
        """Tell of an exception that ends a thread, and let Python print it."""
        error = told.exc_value
        try:
            if error is not None and not isinstance(error, SystemExit) and not self._lost_thread:
                self._lost_thread = True
                raised = exception_capture.raised(error)
                own = stacks.own_frame(raised.frames)
                # The log has the rest, and the evidence of a rank is small.
                self.tell(
                    ThreadEnded(
                        msgspec.structs.replace(
                            raised,
                            message=raised.message[:MESSAGE_MOST],
                            frames=(own,) if own is not None else (),
                            traceback="",
                        )
                    )
                )
        finally:
            self._thread_hook(told)

    def forget(self) -> None:
        """Close the line in a forked child of the program, which is not the rank. The address rules
        still hold there.
        """
        if self._control is not None:
            with contextlib.suppress(OSError):  # the program has closed it
                self._control.close()
            self._control = None
        cuda.in_forked_child()

    def joining(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `init_process_group`, with a look at the meeting point before."""
        frame = exception_capture.user_frame(sys._getframe(1))
        if self.opened_at and is_initialized():
            raise _twice(self.opened_at, exception_capture.line_of(frame))
        try:
            meeting = self._point.meeting(meeting_point.arguments(original, args, kwargs), frame)
            differs, held = self._point.differs(meeting), self._point.held
            guarded = differs and exception_capture.except_line(_unreached(), frame) is not None
            device = cuda.take_device(meeting.backend.lower())
            meeting = msgspec.structs.replace(
                meeting,
                guarded=guarded,
                device=device.uuid,
                device_name=device.name,
                device_how=device.how,
                turn=self._calls,
            )
            self._calls += 1
            joined_before = is_initialized()
            hook_before = sys.excepthook
            self.tell(Meets(meeting, differs))
            self.tell(AtPhase("joining"))
            for name, line in late_variables.set_late().items():
                self.tell(SetLate(name, line))
            # torch asks for the name of the host that it connects to; nobody needs the held
            # store's.
            look_ups = quick_lookups() if held and not differs else contextlib.nullcontext()
            with (
                Variable(AGENT_STORE, None if not held and not differs else str(not differs)),
                look_ups,
            ):
                result = exception_capture.timed(original, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, ValueError) and is_initialized() and self._group_line:
                error.__dict__["_rallypoint_code"] = "group-twice"
                error.__dict__["_rallypoint_why"] = (
                    f"first opened at {self._group_line}",
                    f"again at {exception_capture.line_of(frame)}",
                )
            if isinstance(error, Exception):
                self.caught(error, "init_process_group")
                # A second call failed; the group of the first is as it was.
                if self._group_line and is_initialized():
                    self.tell(AtPhase("running"))
            raise
        if held and not differs:
            self._joined[meeting.world_size] += 1
        if not joined_before:
            self._group_line = exception_capture.line_of(frame)
        if sys.excepthook is not hook_before and hook_before in (
            sys.__excepthook__,
            self._torch_hook,
        ):
            # torch's own hook, which puts [rank2]: before each line; another one for each group.
            self._torch_hook = sys.excepthook
        self.tell(AtPhase("running"))
        return result

    def prefix(self, size: int) -> str:
        """Return what stands before the keys of this process's next group of `size` ranks in the
        held store; "" for most jobs' only group.

        A group that is opened again would read its predecessor's addresses there; so would a group
        of all ranks that follows one of some. All members count the same, since they were together
        in each earlier group of that size."""
        number = self._joined[size]
        return f"group{number}-of-{size}" if number or size != self._point.job_size else ""

    def arguments_of_store(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for a `TCPStore` of the program's."""
        return self._point.arguments_of_store(given)

    def spawning(self) -> None:
        """Tell that the program starts ranks of its own. The only rank gets the held port back: its
        children may want the number.
        """
        self._spawning(exception_capture.line_of(exception_capture.user_frame(sys._getframe(1))))

    def starts_interpreter(self) -> None:
        """Give the held port back before the only rank starts a process that sees nothing of ours
        but the environment: it may be a rank of a group of the program's own."""
        if self._single:
            self._spawning("")

    def _spawning(self, line: str) -> None:
        if self._single and (self._control is None or not self._point.held or is_initialized()):
            return
        told = self.tell(Spawns(line))
        if told and self._single and self._wait_for_answer(Released):
            self._point.give_back()

    def take_terminal(self) -> None:
        """Tell that the debugger waits, and wait until nothing of the launcher's is drawn on the
        terminal: it would wipe out the prompt.
        """
        if self.tell(Debugging(waits=True)):
            self._wait_for_answer(TerminalLeft)

    def _wait_for_answer(self, kind: type[protocol.Packet]) -> bool:
        """Wait for the agent's answer; return whether it came in time."""
        assert self._control is not None
        self._control.settimeout(ANSWER_TIMEOUT)
        try:
            while (answer := protocol.receive(self._control)[0]) is not None:
                if isinstance(answer, kind):
                    return True
                self._noticed |= isinstance(answer, Noticed)
        except TimeoutError:
            return False
        finally:
            self._control.settimeout(None)
        return False

    @contextlib.contextmanager
    def following(
        self, start: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield arguments for `start_processes` with which processes of the job's only rank tell
        the launcher where they are.
        """
        try:
            given = inspect.signature(start).bind(*args, **kwargs)
        except TypeError:  # torch raises it itself, with its own words
            given = None
        if given is None or not self._single or self._control is None or not self.is_rank():
            yield args, kwargs
            return
        from rallypoint.launcher.worker.mp_spawn import Spawned

        given.apply_defaults()
        with self._control.dup() as line:
            given.arguments["fn"] = Spawned(
                given.arguments["fn"], given.arguments["nprocs"], line, self._began
            )
            yield given.args, given.kwargs


def _twice(first: str, second: str) -> UsageError:
    return UsageError(
        "group-twice",
        f"init_process_group at {second}: launch(backend=...) has opened the process group already",
        why=(f"first opened for the function by launch at {first}", f"again at {second}"),
        help=(
            (
                "leave the second call out: the group is open when the function starts, and closed after it",
                "",
            ),
            ("or open it yourself, and leave backend= out", "rallypoint.launch(train, nproc=2)"),
        ),
    )


class Variable:
    """Environment variable that is set for the length of a call; None leaves it alone."""

    def __init__(self, name: str, value: str | None) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._former = os.environ.get(self._name)
        if self._value is not None:
            os.environ[self._name] = self._value

    def __exit__(self, *_: object) -> None:
        if self._value is None:
            return
        if self._former is None:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = self._former


def _unreached() -> BaseException:
    """Return an exception of the kind that torch raises when a meeting point is not reached."""
    kind = getattr(sys.modules.get("torch.distributed"), "DistNetworkError", RuntimeError)
    return kind() if isinstance(kind, type) and issubclass(kind, BaseException) else RuntimeError()
