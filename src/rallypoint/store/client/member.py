"""A store's client whose session stands for a living process, as the agent of a node.

Others learn of its death from its ephemeral keys: 0.5 s (`ORPHAN`) after the kernel ended its
connections, or `ttl` seconds after its last sign of life. It learns by itself, from `left`, that
others may take it for dead.

    server = Server(listeners=[listener], secret=secret, job=job, local=False)  # the lead
    server.start()                                            # in a thread, without signals
    member = Member.join([("10.0.0.1", 29500)], secret, job=job, ttl=2.0)
    changes = member.watch("node/")                           # from now on; then who is there
    present = dict(member.items("node/"))
    member.set(f"node/{name}", applicant, ephemeral=True)
    for key, value, revision in changes: ...                  # `value is ABSENT`: it is gone
    Queue(member, "lead").put(message)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Self

from rallypoint.host.probe import connecting, set_for_signs_of_life
from rallypoint.store.address import Address
from rallypoint.store.client.client import Client
from rallypoint.store.client.session import Options, Session
from rallypoint.store.discovery import checked_secret
from rallypoint.store.limits import ORPHAN

SIGNS = 10
"""Signs of life per lease. A server that stands still for three quarters of the lease must not make
a node believe that it was lost: three signs would leave two thirds."""


class Member(Client):
    """See the module. A session that was lost is not replaced: its process has been taken for dead,
    and whatever it asks raises SessionLost or StoreClosed."""

    @classmethod
    def join(
        cls,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        *,
        job: str,
        ttl: float,
        timeout: float = 10.0,
        patience: float = 0.0,
        source: str = "",
        tls: bool = False,
    ) -> Self:
        """Connect to the server of this job, which may be at any of these hosts and ports; others
        may listen at the rest of them. Tries for `timeout` seconds, and raises what
        `rallypoint.connect` does. `patience`: seconds for every later answer, if they are more.
        `source`: numeric address of this machine from which to connect. `tls`: by TLS."""
        first, *others = [Address(host, port, tls=tls) for host, port in addresses]
        options = Options(
            address=first,
            rank=None,
            job=job,
            timeout=timeout,
            ttl=ttl,
            allow_pickle=False,
            strict=False,
            same_host=False,
            signs=SIGNS,
            orphan=ORPHAN,
            others=tuple(others),
        )
        key = checked_secret(secret)
        opened = partial(connecting, source=source, set_options=set_for_signs_of_life)
        joined = cls(options, key, opened)
        joined._session.timeout = max(timeout, patience)
        return joined

    def _next_session(self) -> Session:
        if self._session.end is not None:
            self._session.end.told = False
        return super()._next_session()

    @property
    def left(self) -> float:
        """Seconds after which others may take this process for dead; 0 when they may have. To be
        asked at any time, by any thread: it costs a look at the clock."""
        return self._session.left

    @property
    def how_lost(self) -> Literal["goodbye", "connection ended", "lease over"]:
        """Why `left` is 0; see `Session.how_lost`."""
        return self._session.how_lost

    @property
    def lead_address(self) -> tuple[str, int]:
        """Numeric address and port at which the server is reached; ("", 0) without a
        connection.
        """
        connection = self._session.slots.connection
        try:
            return ("", 0) if connection is None else connection.sock.getpeername()[:2]
        except OSError:  # another thread is just closing it
            return "", 0

    @property
    def local_address(self) -> str:
        """Address of this machine by which the server is reached; "" without a connection."""
        connection = self._session.slots.connection
        try:
            return "" if connection is None else str(connection.sock.getsockname()[0])
        except OSError:  # another thread is just closing it
            return ""
