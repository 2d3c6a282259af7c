"""What all kinds of things in the store share: the revision, who is answered what, and that it
happens once.

`State` (`store/state/state.py`) is a ledger, and hands itself to the kinds: keys, queues, locks,
claims, barriers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.store.state.quotas import Budget, Large, failed
from rallypoint.store.state.waiters import NEVER, Lines, Waiter, Waiting
from rallypoint.wire.messages import (
    SLOT_BITS,
    Absent,
    Failed,
    Identity,
    Limits,
    Reply,
    Request,
    TimedOut,
)

if TYPE_CHECKING:
    from rallypoint.store.state.queues import Item

Answer = tuple[Reply, Large | None]

_ANOTHER = object()


class Kept:
    """What there is to know about a cached reply that carries a value. `loan`: see `Budget.lend`.
    `item`: the item of a queue that went out with it. `changed`: False when the request changed
    nothing although its answer is a value."""

    __slots__ = ("changed", "item", "loan")

    def __init__(self, loan: object | None, item: Item | None, changed: bool) -> None:
        self.loan = loan
        self.item = item
        self.changed = changed


class Session:
    """One client, across all its connections. The server sets `heard` at every sign of life;
    everything else belongs to the state.

    `replies` has, by seq, the answers to changing requests that are not acknowledged; None: it is
    being waited for, or nobody wants the answer any more. What follows in the list of attributes is
    what the session holds and gives back when it ends.
    """

    __slots__ = (
        "acked", "because", "claims", "deadline", "ended", "ended_at", "ephemeral", "heard", "id", "identity", "items", "kept", "locks",
        "number", "replies", "routes", "ttl", "waiting",
    )  # fmt: skip

    def __init__(self, id: bytes, identity: Identity, ttl: float, now: float) -> None:
        self.id = id
        # An object of its own, so that "was it this session?" is asked by `is`, and an entry that
        # outlives its writer keeps only this.
        self.identity = Identity(identity.host, identity.pid, identity.rank)
        self.ttl = ttl
        self.number = 0  # the how manieth of this server it is
        self.heard = now
        self.deadline = NEVER
        self.ended = False
        self.ended_at = NEVER
        self.because = ""  # it ended
        self.acked: dict[int, int] = {}  # by slot: up to which number its replies have arrived
        self.replies: dict[int, Answer | None] = {}
        self.kept: dict[int, Kept] = {}
        self.waiting: dict[int, Waiter] = {}  # by seq, in the order in which they came
        self.routes: dict[
            int, Any
        ] = {}  # by seq: the server's connection on which a request that waits has come last
        self.locks: dict[int, str] = {}  # name by token, in the order of the grants
        self.claims: dict[int, str] = {}  # likewise
        self.items: dict[int, Item] = {}  # held items of queues, by number
        self.ephemeral: dict[str, None] = {}  # keys, in the order in which they were written

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{len(self.waiting)} waiting"
        return f"<Session {self.id.hex()[:8]} of {self.identity}: {state}>"

    def acked_in_slot(self, seq: int) -> int:
        """Up to which number the replies in the slot of this one have arrived."""
        slot = seq >> SLOT_BITS
        return self.acked.get(slot, slot << SLOT_BITS)

    def happened(self, seq: int) -> bool:
        """Whether a request whose reply is kept did change something."""
        answer = self.replies[seq]
        if answer is None or isinstance(answer[0], Failed | TimedOut | Absent):
            return False
        return seq not in self.kept or self.kept[seq].changed


class Ledger:
    """One revision, one order of answers."""

    def __init__(self, limits: Limits, revision: int = 0) -> None:
        """`revision`: before any change."""
        self.revision = revision
        self.opened = 0  # how many sessions there have been
        self.woken: list[tuple[Session, Reply, Large | None]] = []
        self.budget = Budget(limits)
        self.waiting = Waiting()

    def changed(self) -> int:
        """Something that others can see has changed: the revision is one higher, and returned."""
        self.revision += 1
        return self.revision

    def failed(
        self, request: Request, code: str, text: str, **details: int | float | str
    ) -> tuple[Failed, None]:
        """The answer that it was not done. `text` is a complete sentence in lower case, `details`
        the figures in it.
        """
        return failed(request.seq, self.revision, code, text, details), None

    def wait(
        self,
        now: float,
        session: Session,
        request: Request,
        timeout: float | None,
        lines: Lines,
        names: Sequence[str],
    ) -> tuple[Failed, None] | None:
        """Let the request wait in these lines. None, which `apply` returns, or the failure when too
        many wait. Asked again (a read that is repeated after a reconnect) it keeps its place and
        its deadline."""
        if session.ended or request.seq in session.waiting:
            return None
        budget, seq, waiting = self.budget, request.seq, self.waiting
        refused = None
        if waiting.count >= budget.limits.waiting:
            refused = budget.refuse_waiter(waiting.count, seq, self.revision)
        for name in names:
            if len(name) * 4 > budget.limits.key_bytes:  # else it is surely short enough
                refused = refused or budget.refuse_name(name, seq, self.revision)
        if refused is not None:
            return refused, None
        waiter = Waiter(session, request, lines, now)
        session.waiting[seq] = waiter
        waiting.add(waiter, names, NEVER if timeout is None else now + timeout)
        return None

    def remove(self, waiter: Waiter) -> None:
        """Whatever it waited for, it does so no longer, and is not answered."""
        self.waiting.remove(waiter)
        del waiter.session.waiting[waiter.request.seq]
        waiter.session.routes.pop(waiter.request.seq, None)

    def answer(self, waiter: Waiter, reply: Reply, large: Large | None = None) -> None:
        """The end of a wait."""
        session = waiter.session
        self.waiting.remove(waiter)
        del session.waiting[waiter.request.seq]
        if waiter.request.changes:
            session.replies[reply.seq] = (reply, large)
        self.woken.append((session, reply, large))

    def answer_all(self, lines: Lines, name: str, replies: Iterable[Reply]) -> None:
        """The end of the wait of all who stand in this line, and in no other; `replies` in its
        order.
        """
        woken = self.woken
        for waiter, reply in zip(self.waiting.dismiss(lines, name), replies, strict=False):
            session, seq = waiter.session, reply.seq
            del session.waiting[seq]
            if waiter.request.changes:
                session.replies[seq] = (reply, None)
            woken.append((session, reply, None))

    def keep(
        self,
        session: Session,
        seq: int,
        thing: object,
        size: int,
        *,
        stored: bool,
        changed: bool,
        item: Item | None = None,
    ) -> None:
        """The cached reply to a changing request carries this value (`thing`: the bytes or the
        Large). `stored`: the store holds it too.
        """
        session.kept[seq] = Kept(self.budget.lend(thing, size, stored=stored), item, changed)

    def acknowledge(self, session: Session, upto: int) -> None:
        """The replies of this one's slot up to it have arrived, or nobody wants them."""
        acked = session.acked_in_slot(upto)
        if upto - acked > len(session.replies):
            numbers: Iterable[int] = [seq for seq in session.replies if acked < seq <= upto]
        else:
            numbers = range(acked + 1, upto + 1)
        session.acked[upto >> SLOT_BITS] = upto
        for seq in numbers:
            self.forget(session, seq)

    def abandon(self, session: Session, seq: int) -> None:
        """If this request waits, it does so for nobody: it is not answered."""
        waiter = session.waiting.get(seq)
        if waiter is not None:
            self.remove(waiter)

    def forget(self, session: Session, seq: int) -> None:
        """Drop a cached reply, and with it what only the reply kept alive."""
        if session.replies.pop(seq, _ANOTHER) is None:
            self.abandon(session, seq)
        if (
            session.kept
            and (kept := session.kept.pop(seq, None)) is not None
            and kept.loan is not None
        ):
            self.budget.settle(kept.loan)
