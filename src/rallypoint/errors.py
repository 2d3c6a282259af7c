"""Every exception, one tree: whose fault it was.

`UsageError`: rallypoint was called wrongly. `EnvironmentProblem`: this machine, or the way to another (a port, an address, a file,
a connection). `InternalError`: us; it asks for a report. Each carries the code under which `rallypoint explain` has a page, and
where a user would catch a builtin (`TimeoutError`, `ConnectionError`, `MemoryError`, `TypeError`) it is one.
"""

from __future__ import annotations

from typing import Literal

Outcome = Literal["happened", "did not happen", "unknown"]
"""What is known about a request that got no answer."""


class RallypointError(Exception):
    """The root of the tree.

    `code` is the kebab-case name of the situation, `help` what to do about it: (sentence, command or "") pairs.
    """

    def __init__(self, code: str, headline: str, *, why: tuple[str, ...] = (), help: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(headline)
        self.code = code
        self.headline = headline
        self.why = why
        self.help = help
        # What Python prints below the headline in a traceback. `str()` stays the headline alone: it stands in logs and chat messages.
        self.add_note("\n".join((*(f"  why    {line}" for line in why), *map(_help, help), f"  more   rallypoint explain {code}")))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from `args`, which holds the headline alone: an error that crosses a process must keep the rest.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _help(help: tuple[str, str]) -> str:
    sentence, command = help
    lines = command.splitlines()
    if len(lines) < 2:
        return f"  help   {sentence}: {command}" if command else f"  help   {sentence}"
    return "\n".join((f"  help   {sentence}:", *(f"             {line}" for line in lines)))


def _rebuilt(kind: type[RallypointError], args: tuple[object, ...], attributes: dict[str, object]) -> RallypointError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UsageError(RallypointError, ValueError):
    """rallypoint was called wrongly; nothing was started. Exit status 2."""


class EnvironmentProblem(RallypointError):
    """This machine cannot give what was asked for: a port, an address, memory, a device."""


class InternalError(RallypointError):
    """A fault in rallypoint itself. Exit status 70; the message says what to report."""


class StoreUnreachable(EnvironmentProblem, ConnectionError):
    """No conversation with a store came about: `port-refused`, `address-unresolved`, `address-unreachable`, `store-foreign`,
    `store-silent`, `wrong-secret`, `version-skew`, `wrong-job`. Nothing happened."""


class StoreTimeout(EnvironmentProblem, TimeoutError):
    """A deadline passed: `wait-timeout` (the server answered that what was waited for did not come; nothing was changed) or
    `store-timeout` (no answer came; `outcome` says what is known about the request)."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        outcome: Outcome = "did not happen",
        why: tuple[str, ...] = (),
        help: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(code, headline, why=why, help=help)
        self.outcome = outcome


class SessionLost(EnvironmentProblem, ConnectionError):
    """`session-lost`: the server ended this client's session, and what it held (locks, seats, ephemeral keys, taken items) was
    released. `outcome` says whether the request that was under way happened; `same_server` that the store and its keys are still
    there (False: it is another server, or that is not known). The next call begins a new session."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        outcome: Outcome = "unknown",
        same_server: bool = False,
        why: tuple[str, ...] = (),
        help: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(code, headline, why=why, help=help)
        self.outcome = outcome
        self.same_server = same_server


class StoreClosed(EnvironmentProblem, ConnectionError):
    """`store-closed`: the server stopped in an orderly way, or this store object was closed. `outcome` as in `StoreTimeout`."""

    def __init__(
        self, code: str, headline: str, *, outcome: Outcome = "unknown", why: tuple[str, ...] = (), help: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(code, headline, why=why, help=help)
        self.outcome = outcome


class LimitExceeded(EnvironmentProblem, MemoryError):
    """The store refused to grow: `value-too-large`, `store-full`, `key-too-long`, `too-many-keys`, `too-many-waiting`. It names the
    limit, the size asked for and the option that raises it; nothing was changed, and the connection goes on."""


class ValueUnsupported(UsageError, TypeError):
    """`value-unsupported`: something in the value, named by its path, is not of the closed set; or `value-malformed`."""


class StorePickled(UsageError, TypeError):
    """`store-pickled`: a store was to be pickled, and not on its way into a new process. It carries its secret."""


class WrongType(UsageError, TypeError):
    """`wrong-type`, `integer-overflow`: the key holds something that this operation cannot be applied to. Nothing was changed."""


class FenceStale(EnvironmentProblem):
    """`fence-stale`: the token is not that of a lock which is held now. Nothing was written."""


class Compacted(EnvironmentProblem, LookupError):
    """`compacted`: changes between the revision asked for and now are no longer known. Read again and watch from there."""


class UpdateLost(EnvironmentProblem):
    """`update-lost`, with `strict=True`: somebody else changed the key between this client's read and its write."""


class UpdateLostWarning(UserWarning):
    """`update-lost`, without `strict`."""
