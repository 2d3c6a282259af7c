"""Loans of the server, which go back whatever interrupts that.

The server hands something out (an item of a queue, the task to compute something), and takes it
back when it is asked to or when the session ends. Before that comes about a signal handler may
raise, at any moment, and the server may not answer; what is held would be stuck for as long as the
process lives.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rallypoint.errors import StoreTimeout
from rallypoint.store.client.client import Client
from rallypoint.store.client.session import Session
from rallypoint.wire.messages import AnyReply, Request

Back = tuple[type[Request], tuple[Any, ...]]


class Loan:
    """Thing that the reply to one request hands out to this process, with the way to give it back.

        loan = Loan(client, give_back)
        reply, body = client.ask(Pop, ..., into=loan)
        ...
        loan.settle()  # it is this process's for good, or gone

    What is not settled goes back at the latest when nobody has this object any more: the
    keep-alive's thread sees to it.
    """

    # Class attributes: an exception may strike before all is set, and then the destructor runs.
    reply: AnyReply | None = None
    session: Session | None = None
    _settled = False

    def __init__(self, client: Client, back: Callable[[AnyReply], Back | None]) -> None:
        """Begin without a reply. `back`: makes the request that gives back what a reply has handed
        out; None when the reply has handed out nothing."""
        self._client = client
        self._pid = os.getpid()
        self._back = back

    @property
    def owed(self) -> Back | None:
        """Request that gives the thing back, if there is something to give back."""
        if self._settled or self.reply is None or not self.mine:
            return None
        return self._back(self.reply)

    @property
    def mine(self) -> bool:
        """True if the thing was handed out to this process: a forked child owes nothing."""
        return self._pid == os.getpid()

    def back_by(self, kind: type[Request], fields: tuple[Any, ...]) -> None:
        """Choose another request that gives it back."""
        self._back = lambda _: (kind, fields)

    def settle(self) -> None:
        """Note that nothing is to be given back any more."""
        self._settled = True

    def give_back(self) -> None:
        """Give the thing back, and return when the server has it. When a signal handler raises,
        which goes on from here, or there is no answer in time, the keep-alive's thread sees to it.
        When the session is over that has given it back."""
        owed = self.owed
        if owed is None:
            return
        try:
            self._client.ask(owed[0], *owed[1])
        except ConnectionError:  # SessionLost, StoreClosed, StoreUnreachable
            pass
        except StoreTimeout:
            self.give_back_later()
        except BaseException:
            self.give_back_later()
            raise
        self.settle()

    def give_back_later(self) -> None:
        """Leave it to the keep-alive's thread. Waits for nobody, and takes no lock."""
        owed = self.owed
        if owed is not None and self.session is not None:
            self.session.keep_alive.ask_later(*owed)
        self.settle()

    def __del__(self) -> None:
        self.give_back_later()
