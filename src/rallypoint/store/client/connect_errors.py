"""Error for a server that was not reached, made of the failures of all attempts and told apart by
its code."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.errors import Advice, StoreUnreachable
from rallypoint.host import probe, process_status
from rallypoint.store.address import Address
from rallypoint.store.client.connect import TELLING, Failure, Reason

CODES: dict[Reason, str] = {
    "refused": "port-refused",
    "unresolved": "address-unresolved",
    "unreachable": "address-unreachable",
    "foreign": "store-foreign",
    "silent": "store-silent",
    "closed": "store-silent",
    "wrong-secret": "wrong-secret",
    "version-skew": "version-skew",
    "wrong-job": "wrong-job",
    "store-relayed": "store-relayed",
    "tls-mismatch": "tls-mismatch",
    "tls-intercepted": "tls-intercepted",
    "session-lost": "session-lost",
    "store-full": "store-full",
    "store-closed": "store-closed",
}

HELP: dict[str, Advice] = {
    "port-refused": (
        (
            "is the server running, and is this its port? it prints its address when it starts",
            "rallypoint serve --port 29500",
        ),
    ),
    "address-unresolved": (
        ("ask this machine's resolver", "getent hosts {host}"),
        ("or give the address instead of the name", ""),
    ),
    "address-unreachable": (
        (
            "see which way packets to it go, and whether a firewall drops them",
            "ip route get {host}",
        ),
    ),
    "store-foreign": (("give the port of the store: rallypoint serve prints it", ""),),
    "store-silent": (
        (
            "is it a store, and is it running? a stopped process still has its port",
            "ss -ltnp 'sport = :{port}'",
        ),
    ),
    "wrong-secret": (
        (
            "give the secret of this server: server.secret, or the file",
            'rallypoint.connect(address, secret_file="...")',
        ),
    ),
    "version-skew": (
        (
            "install the same version of rallypoint on both sides",
            "python -m pip install -U rallypoint",
        ),
    ),
    "wrong-job": (("give the address of this job's own store, or leave job= out", ""),),
    "store-relayed": (
        ("give the address of the store itself: rallypoint serve prints it", ""),
        (
            "or, if that is a tunnel, a published port or NAT of your own, say so",
            "export RALLYPOINT_FORWARDED={address}",
        ),
    ),
    "tls-mismatch": (
        ("give the address as the store has it: tls:// with TLS, tcp:// without", ""),
    ),
    "tls-intercepted": (
        ("find out what stands between this machine and the store: a proxy, another host", ""),
    ),
    "store-full": (
        ("close stores that are no longer used, or start the server with a larger limit", ""),
    ),
}


WORTH_TELLING = 0.1
"""Seconds of trying: what is less was no waiting."""


def unreachable(
    addresses: Sequence[Address],
    failures: Sequence[Failure],
    since: float,
    now: float,
    *,
    look: bool = True,
) -> StoreUnreachable:
    """Make the error for `failures` (in the order they came) of the attempts between `since` and
    `now`, in seconds, to reach one server at these addresses. `look`: name who has the port, when
    that can be seen; it takes a moment."""
    address = addresses[0]
    if not failures:
        return StoreUnreachable(
            "store-silent",
            f"the store at {address} gave no answer",
            help=_help("store-silent", address),
        )
    last = failures[-1]
    told = min(reversed(failures), key=lambda failure: TELLING.index(failure.reason))
    if last.reason != told.reason and TELLING.index(told.reason) > TELLING.index("foreign"):
        # what it is like now counts, unless an earlier answer says more than that nobody answers
        told = last
    code = CODES[told.reason]
    why = [_folded(failures, since, now, len(addresses) + 3)] if len(failures) > 1 else []
    if told.first:
        why.insert(0, f"it said first: {probe.shown(told.first)}")
    help, listener = _help(code, address), told.listener
    if (
        look
        and told.reason in ("foreign", "silent", "closed")
        and (holder := None if address.path else probe.listener(address.host, address.port))
        is not None
    ):
        why.insert(0, f"on this machine {holder.line()}")
        listener = holder.pid
    standing, how = stopped(listener)
    return StoreUnreachable(
        code, _headline(addresses, told), why=(*standing, *why), help=how or help
    )


def stopped(pid: int) -> tuple[tuple[str, ...], Advice]:
    """Return why a server gives no answer and what to do, if its process, which is on this host,
    stands still. `pid`: 0 if it is not known.
    """
    if not pid or not process_status.is_stopped(pid):
        return (), ()
    return (f"the server (pid {pid}) is stopped (state T)",), (
        ("let it go on", f"kill -CONT {pid}"),
    )


def _headline(addresses: Sequence[Address], told: Failure) -> str:
    address = addresses[0]
    if len(addresses) > 1:
        return f"no store at any of {len(addresses)} addresses: {told.text} ({told.where})"
    where = f" ({told.where})" if told.where not in str(address) else ""
    if told.reason in ("refused", "unreachable", "foreign", "silent", "closed"):
        return f"no store at {address}: {told.text}{where}"
    if told.reason == "unresolved":
        return (
            f"no store at {address}: the host name {address.host} has no address here ({told.text})"
        )
    if told.reason == "wrong-secret":
        return f"the store at {address} has another secret than this client was given"
    if told.reason == "tls-intercepted":
        return f"the connection to the store at {address} is not safe: {told.text}"
    return f"the store at {address} refused this client: {told.text}"


def _folded(failures: Sequence[Failure], since: float, now: float, kinds: int) -> str:
    """Fold failures, of this many kinds at most: '14 attempts in 9.9 s: 12 x nothing listens there
    (127.0.0.1:29500), 2 x ...'"""
    counts: dict[str, int] = {}
    for failure in failures:
        line = f"{failure.text} ({failure.where})"
        counts[line] = counts.get(line, 0) + 1
    most = sorted(counts.items(), key=lambda entry: -entry[1])
    parts = [f"{count} x {line}" for line, count in most[:kinds]]
    if len(most) > kinds:
        parts.append(f"and {len(most) - kinds} more kinds")
    took = f" in {now - since:.1f} s" if now - since >= WORTH_TELLING else ""
    return f"{len(failures)} attempts{took}: {', '.join(parts)}"


def _help(code: str, address: Address) -> Advice:
    if address.path and code in ("port-refused", "store-silent", "address-unreachable"):
        look = "is its server running, and this user's? the socket's folder goes with it"
        return ((look, f"ls -l {address.path}"),)
    return tuple(
        (text, line.format(host=address.host or address.path, port=address.port, address=address))
        for text, line in HELP.get(code, ())
    )
