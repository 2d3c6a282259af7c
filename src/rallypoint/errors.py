"""Every exception, in one tree by the party at fault.

`UsageError`: rallypoint was called wrongly. `EnvironmentProblem`: this machine, or the way to
another (a port, an address, a file, a connection). `InternalError`: us; it asks for a report. Each
carries the code under which `rallypoint explain` has a page, and where a user would catch a builtin
(`TimeoutError`, `ConnectionError`, `MemoryError`, `TypeError`) it is one.
"""

from __future__ import annotations

from _queue import Empty  # queue.Empty, without the 2 ms that loading its module takes
from collections.abc import Sequence
from typing import Any, Literal, Self, TypeAlias

Outcome = Literal["happened", "did not happen", "unknown"]
"""Facts about a request that got no answer."""


Advice: TypeAlias = tuple[tuple[str, str], ...]
"""Ways out of a situation: (sentence, command or "") pairs."""


class RallypointError(Exception):
    """The root of the tree.

    `code` is the kebab-case name of the situation, `why` the facts that led there, `help` what to
    do about it: (sentence, command or "") pairs. Every class below takes these, too.
    """

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        why: tuple[str, ...] = (),
        help: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(headline)
        self.code = code
        self.headline = headline
        self.why = why
        self.help = help
        # What Python prints below the headline in a traceback. `str()` stays the headline alone: it
        # stands in logs and chat messages.
        self.add_note(
            "\n".join(
                (
                    *(f"  why    {line}" for line in why),
                    *map(_help, help),
                    f"  more   rallypoint explain {code}",
                )
            )
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from `args`, which holds the headline alone: an error that crosses
        # a process must keep the rest.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _help(help: tuple[str, str]) -> str:
    sentence, command = help
    lines = command.splitlines()
    if len(lines) < 2:
        return f"  help   {sentence}: {command}" if command else f"  help   {sentence}"
    return "\n".join((f"  help   {sentence}:", *(f"             {line}" for line in lines)))


def _rebuilt(
    kind: type[RallypointError], args: tuple[object, ...], attributes: dict[str, object]
) -> RallypointError:
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
    """No conversation with a store came about: `port-refused`, `address-unresolved`,
    `address-unreachable`, `store-foreign`, `store-silent`, `wrong-secret`, `version-skew`,
    `wrong-job`. Nothing happened."""


class StoreTimeout(EnvironmentProblem, TimeoutError):
    """A deadline passed: `wait-timeout` (the server answered that what was waited for did not come;
    nothing was changed) or `store-timeout` (no answer came; `outcome` says what is known about the
    request)."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        outcome: Outcome = "did not happen",
        **more: Any,
    ) -> None:
        super().__init__(code, headline, **more)
        self.outcome = outcome


class QueueEmpty(StoreTimeout, Empty):
    """`wait-timeout`: no item came into a queue in time. Also what the standard library's queues
    raise.
    """


class _ConversationOver(EnvironmentProblem, ConnectionError):
    """A conversation with a store has ended. `outcome` as in `StoreTimeout`."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        outcome: Outcome = "unknown",
        **more: Any,
    ) -> None:
        super().__init__(code, headline, **more)
        self.outcome = outcome


class SessionLost(_ConversationOver):
    """`session-lost`: the server ended this client's session, and what it held (locks, seats,
    ephemeral keys, taken items) was released. `outcome` says whether the request that was under way
    happened; `same_server` that the store and its keys are still there (False: it is another
    server, or that is not known). The next call begins a new session."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        outcome: Outcome = "unknown",
        same_server: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(code, headline, outcome=outcome, **more)
        self.same_server = same_server


class StoreClosed(_ConversationOver):
    """`store-closed`: the server stopped in an orderly way, or this store object was closed.
    `outcome` as in `StoreTimeout`.
    """


class LimitExceeded(EnvironmentProblem, MemoryError):
    """The store refused to grow: `value-too-large`, `store-full`, `key-too-long`, `too-many-keys`,
    `too-many-waiting`. It names the limit, the size asked for and the option that raises it;
    nothing was changed, and the connection goes on."""


class ValueUnsupported(UsageError, TypeError):
    """`value-unsupported`: something in the value, named by its path, is not of the closed set; or
    `value-malformed`.
    """


class StorePickled(UsageError, TypeError):
    """`store-pickled`: a store was to be pickled, and not on its way into a new process. It carries
    its secret.
    """


class WrongType(UsageError, TypeError):
    """`wrong-type`, `integer-overflow`: the key holds something that this operation cannot be
    applied to. Nothing was changed.
    """


class FenceStale(EnvironmentProblem):
    """`fence-stale`: the token is not that of a lock which is held now. Nothing was written."""


class Compacted(EnvironmentProblem, LookupError):
    """`compacted`: changes between the revision asked for and now are no longer known. Read again
    and watch from there.
    """


class UpdateLost(EnvironmentProblem):
    """`update-lost`, with `strict=True`: somebody else changed the key between this client's read
    and its write.
    """


class UpdateLostWarning(UserWarning):
    """`update-lost`, without `strict`."""


class LockTimeout(StoreTimeout):
    """`lock-timeout`: the lock could not be acquired in time; this caller left its queue. `holder`:
    the client that has it, as text; `held_for`: seconds; `queue`: who waits in front, as texts."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        holder: str = "",
        held_for: float = 0.0,
        queue: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        super().__init__(code, headline, **more)
        self.holder = holder
        self.held_for = held_for
        self.queue = queue


class WouldDeadlock(UsageError, RuntimeError):
    """`lock-twice`: this thread holds the lock already. `lock-cycle`: the holder waits, over others
    perhaps, for a lock that this caller holds. Nobody would ever go on; this caller does not wait,
    and holds what it held."""


class LeaseLost(EnvironmentProblem):
    """`lock-lost`: the lock was passed on while this process believed to hold it. What was written
    with its token as a fence before that stands; what was written without may have met somebody
    else's."""


class LockAbandoned(EnvironmentProblem):
    """`lock-abandoned`: the last holder died while it held the lock, so what the lock guards may be
    half changed. Raised once, to the next holder; the lock is free after it."""


class _NotAllThere(EnvironmentProblem):
    """Members of a barrier have not met. `present` and `absent`: the members, as texts."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        present: tuple[str, ...] = (),
        absent: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        super().__init__(code, headline, **more)
        self.present = present
        self.absent = absent


class BarrierTimeout(_NotAllThere, StoreTimeout):
    """`barrier-timeout`: not everybody came in time. `present` and `absent`: the members, as texts.
    All others who waited get BarrierBroken at the same moment."""


class BarrierBroken(_NotAllThere, RuntimeError):
    """`barrier-broken`: somebody else at the barrier gave up or died. `barrier-missed`: this caller
    came too late for a round that was complete without it. `present` and `absent` as in
    `BarrierTimeout`. The next call is the next round."""


class BarrierMismatch(UsageError):
    """`barrier-size`, `average-mismatch`: the members that met want different things (another size,
    shape or dtype). All of them get it, and it says who wants what."""


class OnceFailed(RallypointError):
    """`once-failed`: the function that `once` ran in another process raised. `remote_type` is the
    name of the exception's class, `remote_traceback` its traceback there, as text; the headline has
    its message."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        remote_type: str = "",
        remote_traceback: str = "",
        **more: Any,
    ) -> None:
        super().__init__(code, headline, **more)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class RankKilled(EnvironmentProblem):
    """`rank-killed`, `rank-out-of-memory`: a rank of `launch` was ended by a signal. `rank`;
    `signal`: its number.
    """

    def __init__(self, code: str, headline: str, *, rank: int, signal: int, **more: Any) -> None:
        super().__init__(code, headline, **more)
        self.rank = rank
        self.signal = signal


class RankExited(RallypointError):
    """`rank-exited`: a rank of `launch` left with `sys.exit` or `os._exit` instead of returning;
    `rank-left-early`: it returned, and others still needed it. `rank`; `exit_code`, 0 as well for
    one that returned."""

    def __init__(self, code: str, headline: str, *, rank: int, exit_code: int, **more: Any) -> None:
        super().__init__(code, headline, **more)
        self.rank = rank
        self.exit_code = exit_code


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that came from another process: its traceback there,
    as text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class RemoteError(Exception):
    """Stands for an exception of another process if its own class cannot be had here. `type_name`
    is that class's full name.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name
        self.message = message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


class LaunchTimeout(EnvironmentProblem, TimeoutError):
    """`launch-timeout`: the function had not returned in all ranks within `timeout`; they were
    stopped. The text says where each was. `results`: what ranks had returned by then, by rank;
    `report`: the diagnosis."""

    def __init__(
        self,
        code: str,
        headline: str,
        *,
        results: dict[int, object],
        report: object = None,
        text: str = "",
        **more: Any,
    ) -> None:
        super().__init__(code, headline, **more)
        self.results = results
        self.report = report
        self.text = text
        if text:
            self.__notes__.clear()  # the text has them all

    def __str__(self) -> str:
        return self.text or self.headline


class WorkerError(ExceptionGroup):
    """Ranks of `launch` failed. The members are the exceptions of the ranks that are the cause,
    each with its traceback there as `__cause__`; or `RankKilled` and `RankExited` for a rank that
    had none. `str()` is the report.

    `results`: what other ranks had returned, by rank. `report`: the diagnosis, for programs.
    `ranks`: the rank of each member.
    """

    results: dict[int, object]
    report: object
    ranks: tuple[int, ...]
    text: str

    def __new__(
        cls, headline: str, members: Sequence[Exception], *, ranks: tuple[int, ...] = (), results: dict[int, object] | None = None,
        report: object = None, text: str = "",
    ) -> Self:  # fmt: skip
        self = super().__new__(cls, headline, members)
        self.ranks = ranks
        self.results = results or {}
        self.report = report
        self.text = text
        return self

    def __init__(self, headline: str, members: Sequence[Exception], **_: object) -> None:
        super().__init__(headline, members)

    def derive(self, excs: Sequence[Exception]) -> WorkerError:  # type: ignore[override]
        kept = tuple(
            rank
            for rank, member in zip(self.ranks, self.exceptions, strict=False)
            if member in excs
        )
        return WorkerError(
            self.message, excs, ranks=kept, results=self.results, report=self.report, text=self.text
        )

    def __str__(self) -> str:
        return self.text or super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        return _worker_error, (
            self.message,
            self.exceptions,
            self.ranks,
            self.results,
            self.report,
            self.text,
        )


def _worker_error(
    headline: str,
    members: Sequence[Exception],
    ranks: tuple[int, ...],
    results: dict[int, object],
    report: object,
    text: str,
) -> WorkerError:
    return WorkerError(headline, members, ranks=ranks, results=results, report=report, text=text)
