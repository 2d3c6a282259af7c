"""What is held goes back, whatever interrupts that.

The server hands something out (an item of a queue, the task to compute something), and takes it back when it is asked to or when the
session ends. Before that comes about a signal handler may raise, at any moment, and the server may not answer; what is held would be
stuck for as long as the process lives.
"""

from __future__ import annotations

import _thread
import os
from typing import Any

from rallypoint.errors import RallypointError, StoreTimeout
from rallypoint.store.client import Client
from rallypoint.wire.messages import Request


class Loan:
    """What the server may hand out to this process, and the request that gives it back.

        loan = Loan(client)
        reply, body = client.ask(Pop, ...)
        loan.back, loan.__class__ = (Settle, ...), Owed

    Nothing is called between the answer and the last assignment, so no signal handler can come between them; the same holds for
    `loan.__class__ = Loan` behind the `ask` that ended it. (But a signal handler may run at the end of `ask(*fields)`, of `isinstance`
    and of a `with` block.) A signal at the first instruction of a method comes before everything that could be written there: so what is
    Owed goes back at the latest when nobody has this object any more. A Loan that is not has no destructor, for what a signal handler
    raises in one is lost, a Ctrl-C too.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pid = os.getpid()
        self.back: tuple[Any, ...] = ()

    @property
    def out(self) -> bool:
        """Whether it is to be given back."""
        return self.__class__ is Owed

    @property
    def mine(self) -> bool:
        """Whether it was handed out to this process: a forked child owes nothing."""
        return self._pid == os.getpid()

    def give_back(self) -> None:
        """Return when it is back. When a signal handler raises, which goes on from here, or there is no answer in time, a thread sees to
        it. When the session is over that has given it back."""
        if not (self.out and self.mine):
            return
        try:
            self._client.ask(*self.back)
        except ConnectionError:  # SessionLost, StoreClosed, StoreUnreachable
            pass
        except StoreTimeout:
            self.give_back_later()
        except BaseException:
            self.give_back_later()
            raise
        self.__class__ = Loan

    def give_back_later(self) -> None:
        """Leave it to a thread."""
        if self.out:
            release_later(self._client, *self.back)
            self.__class__ = Loan


class Owed(Loan):
    """A Loan while it is out."""

    def __del__(self) -> None:
        if self.mine:
            self.give_back_later()


def release_later(client: Client, kind: type[Request], *fields: Any) -> None:
    """Let a thread ask for it until there is an answer. May be called in a destructor: it waits for nobody and takes no lock, as
    `Thread.start` does. When the interpreter leaves there are no new threads; then the session ends, and gives it back."""
    try:
        _thread.start_new_thread(_insist, (client, kind, fields))
    except RuntimeError:
        pass


def _insist(client: Client, kind: type[Request], fields: tuple[Any, ...]) -> None:
    while True:
        try:
            client.ask(kind, *fields)
            return
        except StoreTimeout:
            continue  # a server that is frozen still has it
        except RallypointError:
            return
