"""Admission of new connections: strangers are bounded in number, bytes and time until they have
proved themselves, and turned away in few words."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING

from rallypoint.store.logger import logger
from rallypoint.store.tls_socket import TLS_BEGINS
from rallypoint.wire.frames import Cutter, FrameError, framed
from rallypoint.wire.handshake import NONCE_BYTES, Accepting, HandshakeFailed
from rallypoint.wire.messages import HELLO_BYTES, UNDECODABLE, Hello, Proof, Refusal, encode

if TYPE_CHECKING:
    from rallypoint.store.server.connection import Peer

STRANGERS = 4096
"""Connections without proof at a time; a further one costs the oldest its place. So many ranks may
start at once on a crowded machine, each between its hello and its proof; each takes a descriptor
and some 2 kB."""

GREETING = 30.0
"""Seconds from the connection to its proof: two round trips, and, where a thousand clients come at
once, the handshakes of those before it. Longer than any attempt of a client's, so that no work for
one that still waits is thrown away."""

QUIET = 60.0
"""Seconds during which the same source is not complained about again: a scanner or a health check
comes every few seconds.
"""

LINES = 10
"""Complaints in `QUIET` seconds, about all sources; the next line says how many were left out."""

SOURCES = 1024
"""Sources that are remembered for that; the longest known is forgotten."""

NOT_HTTP = b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\nthis is a rallypoint store, not a web server\n"
"""Answer to an HTTP request: a person typed the address into a browser, and should learn what it is.
"""

NO_TLS = Refusal("tls-mismatch", "it does not speak TLS, and this client does")

HTTP_METHODS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI")

log = logger()


class TurnedAway(Exception):
    """Refusal of a stranger. `answer` is the last that is sent to it, b"" for nothing; the text is
    for the log. `is_client`: it speaks the protocol, and something about it differs."""

    def __init__(self, text: str, answer: bytes = b"", *, is_client: bool = False) -> None:
        super().__init__(text)
        self.answer = answer
        self.is_client = is_client


class Greeting:
    """The handshake of one connection, fed with what arrives."""

    __slots__ = ("_accepting", "cutter", "deadline")

    def __init__(
        self, secret: bytes, job: str, software: str, deadline: float, way: str, binding: bytes
    ) -> None:
        """`way`: the address at which the connection arrived (`way_of`). `binding`: of its TLS."""
        self.deadline = deadline
        self.cutter = Cutter(HELLO_BYTES, 0)
        self._accepting = Accepting(secret, job, software, os.urandom(NONCE_BYTES), way, binding)

    @property
    def is_challenged(self) -> bool:
        """Return whether this side has proved itself, and the other one is to."""
        return self._accepting.state == "proof"

    def receive(self) -> bytes | tuple[Hello, Proof]:
        """Return what is to be sent now that more is in the cutter (b"" for nothing yet), or both
        messages of a client that has proved itself. `cutter` may hold what was sent right behind
        the proof. Raises TurnedAway."""
        answers = []
        try:
            while (frame := self.cutter.next()) is not None:
                said = self._accepting.receive(frame[0])
                if isinstance(said, Proof):
                    assert self._accepting.hello is not None
                    return self._accepting.hello, said
                answers.append(framed(encode(said)))
        except FrameError as error:
            if error.first.startswith(HTTP_METHODS):
                raise TurnedAway("an HTTP request", NOT_HTTP) from error
            if error.first.startswith(TLS_BEGINS):
                text = "it speaks TLS (--tls), and this side does not"
                raise TurnedAway(text, framed(encode(NO_TLS)), is_client=True) from error
            began = f"{error.first[:32]!r}{'...' * (len(error.first) > 32)}"
            raise TurnedAway(f"not rallypoint's protocol: it began with {began}") from error
        except HandshakeFailed as error:
            refusal = error.refusal
            answer = framed(encode(refusal)) if refusal else b""
            raise TurnedAway(str(error), answer, is_client=refusal is not None) from error
        except UNDECODABLE as error:
            raise TurnedAway("a message that is not rallypoint's") from error
        return b"".join(answers)


class Gate:
    """All strangers, the one that came first in front; and the log, which they cannot fill."""

    def __init__(self) -> None:
        self.strangers: dict[Peer, Greeting] = {}
        self.due = float("inf")  # when the oldest must have proved itself
        self._told: OrderedDict[str, float] = (
            OrderedDict()
        )  # source: until when nothing is said about it
        self._lines = 0
        self._left_out = 0
        self._period = -QUIET  # when the count of lines began

    def __len__(self) -> int:
        return len(self.strangers)

    def admit(self, peer: Peer, greeting: Greeting) -> Peer | None:
        """Add a stranger; return the peer that has to go for it, if there are too many."""
        self.strangers[peer] = greeting
        self._look()
        return next(iter(self.strangers)) if len(self.strangers) > STRANGERS else None

    def leave(self, peer: Peer) -> None:
        """Remove a peer that has proved itself, or has gone."""
        self.strangers.pop(peer, None)
        self._look()

    def _look(self) -> None:
        self.due = next((greeting.deadline for greeting in self.strangers.values()), float("inf"))

    def oldest(self) -> Peer | None:
        return next(iter(self.strangers), None)

    def overdue(self, now: float) -> list[Peer]:
        """Return the strangers whose time is up."""
        late = []
        for peer, greeting in self.strangers.items():
            if greeting.deadline > now:
                break
            late.append(peer)
        return late

    def complain(self, source: str, text: str, now: float, what: str = "turned away") -> None:
        """Write one line into the log, unless this source had its line lately or there were too
        many lines.
        """
        if self._told.get(source, 0.0) > now:
            return
        self._told[source] = now + QUIET
        self._told.move_to_end(source)
        if len(self._told) > SOURCES:
            self._told.popitem(last=False)
        if now - self._period >= QUIET:
            if self._left_out:
                log.warning(
                    "the store left out %d more lines like these in the last minute", self._left_out
                )
            self._period, self._lines, self._left_out = now, 0, 0
        if self._lines >= LINES:
            self._left_out += 1
            return
        self._lines += 1
        line = f"the store {what} {source}: {text}"
        log.warning(
            "%s", "".join(character if character.isprintable() else "?" for character in line)
        )  # a client chose some of it
