"""Line from a worker to the agent: messages about its program, each sent whole and once."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from rallypoint.diagnosis.evidence import Raised
from rallypoint.launcher import exception_capture, interruptions, late_variables, protocol
from rallypoint.launcher.protocol import Caught, ClosesGroup, Handles, Noticed, Packet, SetLate

# Exceptions told per worker: a program that tries again for ever must not fill the agent.
CAUGHT_MOST = 100
_HELD = "_rallypoint_held"  # where an exception remembers its number among those told by `waits`


class AgentLine:
    """Sender of one process's messages. In a forked child of the program, which is not the rank, it
    sends none.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control: socket.socket | None = control
        self._pid = os.getpid()
        self._serial = 0
        self._noticed = False
        self._held = self._most_held = 0  # number of what the program has in hand, and the last one
        self._torch_hook: object = None  # torch's own sys.excepthook

    def tell(self, message: Packet, fds: Sequence[int] = (), sent: list[int] | None = None) -> bool:
        """Tell the agent; return False when it does not listen (any more), or this process is not
        the rank. `sent`: as in `protocol.send`; what is `sent` already is not sent again.
        """
        packets = list[int]() if sent is None else sent

        def send() -> bool:
            if self._control is None or not self.is_rank():
                return False
            if not packets:
                protocol.send(self._control, message, fds, sent=packets)
            return True

        try:
            return interruptions.whole(send)
        except OSError as error:
            if interruptions.raised_by_handler(error):
                raise
            return False  # it is gone; the guard is about to end this process

    def is_rank(self) -> bool:
        """Return whether this process is the rank itself, and no child that it forked."""
        return os.getpid() == self._pid

    def preempted(self) -> bool:
        """Return whether the agent has told of a notice. A forked child knows what was known when
        it was forked.
        """
        while self._control is not None and self.is_rank() and not self._noticed:
            try:
                message, _ = protocol.receive(self._control, flags=socket.MSG_DONTWAIT)
            except OSError:
                # No message; or the agent is gone, and the guard is about to end this process.
                break
            if message is None:
                break
            self._noticed = isinstance(message, Noticed)
        return self._noticed

    def stop(self) -> None:
        """Tell no more exceptions: the program has ended, and what torch raises while it is taken
        down is not the program's.
        """
        if late_variables.parts_are_loaded:  # `Hooks.joining` has told what was set until then
            for name, line in late_variables.set_for_parts().items():
                self.tell(SetLate(name, line))
        self._serial = CAUGHT_MOST

    def excepthook_is_default(self) -> bool:
        """Return whether Python prints uncaught exceptions, or torch with its prefix, and no hook
        of the program's.
        """
        return sys.excepthook is sys.__excepthook__ or sys.excepthook is self._torch_hook

    def call_of(self, error: BaseException) -> str:
        """Return the torch call that this exception, or one in its chain, left."""
        return next(
            (
                one.__dict__["_rallypoint_call"]
                for one in exception_capture.chain(error)
                if "_rallypoint_call" in one.__dict__
            ),
            "",
        )

    def caught(self, error: BaseException | None, call: str) -> None:
        """Tell of an exception that leaves a call of torch's, with the except clause that will
        catch it, if one will.
        """
        if error is None or self._serial >= CAUGHT_MOST or self._control is None:
            return
        # The frame of the call, and not of the logger by which torch tells of it.
        tb = error.__traceback__
        frame = exception_capture.user_frame(tb.tb_frame if tb is not None else None)

        def raised() -> Raised:
            error.__dict__["_rallypoint_call"] = call
            return exception_capture.raised(
                error, call=call, caught_at=exception_capture.except_line(error, frame)
            )

        self._tell_of(error, raised)

    def clearing_up(self, *, whole: bool) -> None:
        """Tell that the program closes a group, or (`whole`) all of them, which the other ranks
        notice at once.

        With an exception on its way, tell of that instead: it is the reason, and may take long to
        leave the program.
        """
        self.waits()
        caller = exception_capture.current_frame(3)  # past the wrapper of `function_hooks`
        frame, error = exception_capture.user_frame(caller), exception_capture.on_its_way(caller)
        if error is None and whole and is_initialized() and not _is_giving_up(sys.exc_info()[1]):
            # Closed by `launch`, and by no line of the program's.
            by_launch = caller is not None and exception_capture.is_ours(caller.f_code.co_filename)
            self.tell(ClosesGroup("" if by_launch else exception_capture.line_of(frame)))
        if error is None or self._serial >= CAUGHT_MOST:
            return

        def raised() -> Raised:
            return msgspec.structs.replace(
                exception_capture.raised(
                    error, caught_at=exception_capture.except_line(error, frame)
                ),
                on_its_way=True,
            )

        self._tell_of(error, raised)

    def waits(self) -> None:
        """Tell which exception the program has in hand when it begins to wait for other ranks, and
        when it has it no more. Where its main thread waits in C code nobody can ask it.
        """
        if sys.exc_info()[1] is None and not self._held:  # as nearly always
            return
        if threading.current_thread() is not threading.main_thread():
            return
        error = exception_capture.on_its_way(exception_capture.current_frame())
        number = 0 if error is None else error.__dict__.setdefault(_HELD, self._most_held + 1)
        if number != self._held:
            if error is None or number > CAUGHT_MOST:
                self.tell(Handles(None))
            else:
                self.tell(Handles(exception_capture.raised(error)))
            self._held, self._most_held = number, max(self._most_held, number)

    def tell_handled(self, error: BaseException) -> None:
        """Tell of the exception that was handled when `sys.exit` was called, or that `raise ... from`
        hides behind the one that leaves the program. It may be one that torch reports to nothing else
        (`work.wait()`, DDP's own collectives). It is told however many were told before: it is the
        last."""
        first = exception_capture.to_first(error)[0][-1]
        handled = first if isinstance(error, SystemExit) else first.__context__
        if isinstance(handled, Exception):
            self._tell_of(handled, lambda: exception_capture.raised(handled))

    def _tell_of(self, error: BaseException, raised: Callable[[], Raised]) -> None:
        """Tell of an exception, once."""
        serial, sent = self._serial + 1, list[int]()

        def tell() -> None:
            if not sent:
                if exception_capture.SERIAL in error.__dict__:
                    return
                self.tell(Caught(serial, raised()), sent=sent)
            error.__dict__[exception_capture.SERIAL] = serial
            self._serial = max(serial, self._serial)

        interruptions.whole(tell)


def _is_giving_up(error: BaseException | None) -> bool:
    """Return whether this exception ends the program, and not well."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, Exception)


def is_initialized() -> bool:
    """Return whether the program has opened its process group."""
    module = sys.modules.get("torch.distributed")
    return bool(module is not None and module.is_initialized())
