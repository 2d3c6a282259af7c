"""Every request, reply and notice, as frozen structs.

A message is the small part of a frame (`wire/frames.py`), in msgpack, an array whose first element
is its number. A value travels inside the message when its encoding has at most `INLINE_BYTES`,
otherwise as the frame's body or, between two ends on one host, as a descriptor of shared memory
that accompanies the frame. An encoded value is never empty, so `value == b""` says "not here: it is
the body", and `shared > 0` says "its `shared` bytes are in the descriptor".

Shared memory goes over Unix sockets only. Each request with `shared` comes with one descriptor
(SCM_RIGHTS, with the frame's first byte): a memfd of at least that size, sealed against shrinking
and growing. `segment` is the client's own number for it: when nothing on the server needs these
bytes any more, `Freed` names it and the client may write the next value into the same pages, which
is ten times faster than fresh ones. Until then it must not write to it. The server keeps the
descriptor only as long as it needs the bytes, so it accompanies every use; numbers mean something
on one connection only, and a request that is repeated on another connection makes its memory unfit
for reuse. Segment 0 is never reported. A Value reply with `shared` comes with a descriptor
likewise; the server leaves its bytes alone until `Release`.

`seq` numbers the requests of a session from 1; `acked` says that the replies to all requests up to
that number have arrived, so that the server may forget them. A reply carries the `seq` of its
request and the store's `revision` when it was given.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, get_args

import msgspec

TAG = "rallypoint\r\n\r\n"
"""The first word of the first message of either side. With the empty line a web server, which reads
until there is one, answers at once that it does not understand, and is recognised; it would wait
for more until the deadline otherwise."""

SLOT_BITS = 40
"""Bits of a request's number that count within its slot; above them stands the slot. The sender has
one request under way in a slot, or a batch of them: `acked` speaks of the slot's own."""

VERSIONS = (1, 1)
"""The oldest and newest version of the protocol that this code speaks."""

INLINE_BYTES = 64 * 1024
"""The largest value that travels inside its message: below this a copy costs less than a second
read."""

HELLO_BYTES = 4096
"""The largest message before both sides have proved themselves; it has no body."""

MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message afterwards: a list of a million keys fits."""


Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Largest number in a request. None is ever so large: the server has room above for "all of
them"."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Limits that a server sets. The defaults, with their reasons, are in `store/limits.py`."""

    store_bytes: int  # keys and values in all
    value_bytes: int  # one encoded value
    key_bytes: int
    keys: int
    sessions: int
    waiting: int  # requests that wait, of all sessions


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Owner of a session, as people want to read it in an error."""

    host: str
    pid: int
    rank: int | None = None

    def __str__(self) -> str:
        process = f"pid {self.pid} on {self.host}"
        return process if self.rank is None else f"rank {self.rank} ({process})"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """An expected process that is not there, with everything that is known of it."""

    identity: Identity | None = None  # None: nobody has connected with this rank
    rank: int | None = None
    phase: str = (
        ""  # what the launcher saw last, in a job of ours: "importing for 41 s: train.py:3"
    )
    silent: float | None = (
        None  # seconds since the last sign of life of its session; None: it has none
    )
    ended: str = ""  # time and reason of the end of its session: "3.2 s ago: it said goodbye"

    def __str__(self) -> str:
        known = [self.phase] if self.phase else []
        gone = self.phase.startswith(
            "ended "
        )  # its process has: that its session has, too, says nothing more
        if self.ended and not gone:
            known.append(f"its session ended {self.ended}")
        elif self.silent is not None:
            known.append(f"last heard of {self.silent:.1f} s ago")
        elif (self.identity is not None or not self.phase) and not gone:
            known.append("not connected to the store")
        process = (
            f"pid {self.identity.pid} on {self.identity.host}" if self.identity is not None else ""
        )
        rank = self.rank if self.identity is None else self.identity.rank
        if rank is None:
            return f"{process} ({', '.join(known)})"
        return f"rank {rank} ({', '.join([process, *known] if process else known)})"


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A process that arrived, and the value that it brought."""

    identity: Identity
    value: bytes


# --- the handshake: Hello, Challenge, Proof, Welcome; or a Refusal instead of the second or the
# fourth ---


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """client -> server."""

    tag: str  # TAG
    oldest: int  # VERSIONS
    newest: int
    software: str  # the version of rallypoint, for people
    job: str  # "" when the client does not belong to one, or does not care
    session: bytes  # 16 random bytes, chosen by the client; the same again after a reconnect
    nonce: bytes  # 32 random bytes
    way: str = ""  # what the client connected to (`host.sockets.way_of`); "" when it does not say


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """server -> client: the server proves itself first."""

    tag: str
    version: int
    software: str
    job: str
    nonce: bytes
    proof: bytes  # HMAC-SHA256, see wire/handshake.py
    binding: bytes = b""  # SHA-256 of the server's certificate; b"" without TLS


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """client -> server."""

    proof: bytes
    ttl: float  # seconds without a sign of life after which the session ends
    identity: Identity
    resume: bool  # True: this session was welcomed before; do not begin a new one
    acked: Number
    # seconds after the end of the session's last connection at which the session ends, if that is
    # before its lease ends
    orphan: float = inf


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """server -> client: the conversation is open."""

    server: bytes  # 16 random bytes: another server (also a restarted one) has others
    software: str
    limits: Limits
    local: str  # path of the server's Unix socket, "" when it has none
    revision: int
    ttl: float  # of the session, as the server counts it


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """server -> client: no conversation. `code` is one of REFUSALS; before the server's proof it is
    only a hint.

    With `session-lost`, `known` says whether the server remembers the session, and then `happened`
    are the requests after `acked` that it did carry out; the others did not happen.
    """

    code: str
    text: str
    oldest: int = 0  # the server's VERSIONS and software, with "version-skew"
    newest: int = 0
    software: str = ""
    known: bool = False
    happened: tuple[int, ...] = ()
    passing: bool = False  # it may be over in a moment, and is worth another attempt


REFUSALS = (
    "version-skew",
    "wrong-job",
    "store-relayed",
    "tls-mismatch",
    "wrong-secret",
    "session-lost",
    "store-full",
    "store-closed",
)


# --- requests ---


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Beginning of every request."""

    changes: ClassVar[bool] = (
        # the reply is kept until it is acknowledged, so that a repeated request is not run again
        False
    )

    seq: Number
    acked: Number


class Ping(Request, frozen=True, tag=1):
    """A sign of life. Reply: Done."""


class Get(Request, frozen=True, tag=2):
    """Read a key; with `timeout`, wait that many seconds until it exists. Reply: Value, Absent or
    TimedOut."""

    key: str
    timeout: float | None = None


class Set(Request, frozen=True, tag=3):
    """Write a key. Reply: Done with `replaced`, or Failed("fence-stale").

    `ttl`: seconds after which the key goes. `ephemeral`: it goes with the session. `fence`: the
    token of a lock that is held. `seen`: the revision of this key that the client read last (0: it
    read that there was none; None: it never read it).
    """

    changes: ClassVar[bool] = True
    key: str
    value: bytes
    shared: int = 0
    ttl: float | None = None
    ephemeral: bool = False
    fence: int | None = None
    seen: int | None = None
    segment: int = 0


class CompareAndSet(Request, frozen=True, tag=4):
    """Write a key if it is as expected. Reply: Done, or Value or Absent as it is instead.

    Expected is `expected` (the encoded value; None: absent) when `modified` is None, otherwise the
    key's revision `modified` (0: absent).
    """

    changes: ClassVar[bool] = True
    key: str
    value: bytes
    shared: int = 0
    expected: bytes | None = None
    modified: int | None = None
    ttl: float | None = None
    fence: int | None = None
    segment: int = 0


class Delete(Request, frozen=True, tag=5):
    """Remove a key. Reply: Value (what it was) if `wanted`, Done if not, Absent if there was
    none."""

    changes: ClassVar[bool] = True
    key: str
    wanted: bool = False
    fence: int | None = None


class Keys(Request, frozen=True, tag=6):
    """List the keys that begin with `prefix`, in no order: the server serves others while the client
    sorts a million. Reply: Names, or Integer when `count`."""

    prefix: str = ""
    count: bool = False


class Exists(Request, frozen=True, tag=7):
    """Tell which of `keys` exist; with `timeout`, wait until all do. Reply: Names (those that exist, in
    the order asked) or TimedOut (`missing` says which do not)."""

    keys: tuple[str, ...]
    timeout: float | None = None


class Add(Request, frozen=True, tag=8):
    """Add to an integer of 64 bits; a missing key counts as 0. Reply: Integer.

    `text`: the integer is kept as a bytes value of decimal digits, as torch's stores do.
    """

    changes: ClassVar[bool] = True
    key: str
    amount: int
    text: bool = False


class Append(Request, frozen=True, tag=9):
    """Append to a bytes value; a missing key counts as empty. Reply: Integer (its length
    afterwards)."""

    changes: ClassVar[bool] = True
    key: str
    data: bytes


class Push(Request, frozen=True, tag=10):
    """Put a value at the end of a queue. Reply: Integer (its length afterwards, 0 when a waiter
    took it at once)."""

    changes: ClassVar[bool] = True
    queue: str
    value: bytes
    shared: int = 0
    segment: int = 0


class Pop(Request, frozen=True, tag=11):
    """Take the first value of a queue, waiting `timeout` seconds (None: do not wait). Reply: Value
    (`modified` is the item's number), Absent or TimedOut. With `hold` it comes back to the front
    unless `Settle` accepts it before the session ends."""

    changes: ClassVar[bool] = True
    queue: str
    timeout: float | None = None
    hold: bool = False


class Settle(Request, frozen=True, tag=12):
    """Accept a held item of a queue, or put it back to the front. Reply: Done, Absent when it is
    not held by this session.

    `taken`: the number of the Pop that it was handed out to, so that a late Settle cannot strike
    the same item when it has come back and was handed out to this session again; 0: whichever that
    was. A Cancel of an acceptance, before its reply is acknowledged, puts the item back.
    """

    changes: ClassVar[bool] = True
    queue: str
    item: int
    accept: bool
    taken: Number = 0


class Length(Request, frozen=True, tag=13):
    """Request for the number of values in a queue. Reply: Integer."""

    queue: str


class Watch(Request, frozen=True, tag=14):
    """Read the changes after revision `since` to keys that begin with `prefix`; waits `timeout` seconds
    for the first. Reply: Changes, TimedOut, or Failed("compacted") when they are no longer all
    known. `since=None`: none, only the revision now."""

    prefix: str
    since: int | None
    timeout: float


class Claim(Request, frozen=True, tag=15):
    """`once`: the first to claim a name computes its value. Reply: Granted (compute, then Resolve),
    Value (somebody has; `modified` is its revision), Failed("once-failed") with the first one's
    error, or TimedOut."""

    changes: ClassVar[bool] = True
    name: str
    timeout: float | None


class Resolve(Request, frozen=True, tag=16):
    """The outcome of a claim: a value for everybody, or `failed` and the value is the encoded
    error; `retry`: the next waiter may try, nobody is told. `token`: that of the Granted; 0: of
    whichever claim to this name the session has. Reply: Done, Absent when the claim is no longer
    held."""

    changes: ClassVar[bool] = True
    name: str
    value: bytes
    shared: int = 0
    failed: bool = False
    retry: bool = False
    segment: int = 0
    token: Number = 0


class Lock(Request, frozen=True, tag=17):
    """Join the queue for a lock. Reply: Granted (the token is the revision at the grant), TimedOut
    with `holder` and `queue`, Failed("lock-twice") when this `owner` would wait for itself, or
    Failed("lock-cycle") when waiting for it would close a circle of owners that wait for each other.
    `timeout=0`: do not wait; None: for ever. `ttl`: seconds without a sign of life of the session
    after which the lock is passed on, and the grant is over; None: when the session ends. `timeout`
    below 0: only look whether it is held (TimedOut) or not (Absent)."""

    changes: ClassVar[bool] = True
    name: str
    # which thread of the session; what is behind "#" makes it the same one in other sessions that
    # it has
    owner: str
    timeout: float | None
    ttl: float | None = None


class Unlock(Request, frozen=True, tag=18):
    """Give a lock back. Reply: Done, Absent when it is not held with this token."""

    changes: ClassVar[bool] = True
    name: str
    token: int


class Arrive(Request, frozen=True, tag=19):
    """Arrive at a barrier. Reply: Integer (its generation) when all `size` are there, TimedOut or
    Failed("barrier-broken", "barrier-size", "barrier-missed") with the present and the absent.

    With `value` (at most `INLINE_BYTES`) all get Met instead of Integer: what all have brought, in
    the order of arrival. With `quorum` the round is complete, with the sessions that are there,
    when the timeout of the first that arrived has passed and at least `quorum` are there, or as
    soon as all are there that were at the former round and still live. A session that comes too
    late for a round that was broken, or was complete without it, is told once: "barrier-broken",
    "barrier-missed".
    """

    changes: ClassVar[bool] = True
    name: str
    size: int
    timeout: float | None
    value: bytes = b""
    quorum: int | None = None


class Status(Request, frozen=True, tag=20):
    """Request for what the server holds. Reply: State."""


class Bye(Request, frozen=True, tag=21):
    """End the session and release what it holds. Reply: Done, the last one."""

    changes: ClassVar[bool] = True


class Cancel(Request, frozen=True, tag=22):
    """No reply. The reply to request `target` will not be looked at: stop waiting; and if it has
    been given already, take back what it gave (an item of a queue, a lock, a claim)."""

    target: Number


class Release(Request, frozen=True, tag=23):
    """No reply. The shared memory that came with the replies to requests `of` has been read."""

    of: tuple[int, ...]


# --- replies ---


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Beginning of every reply."""

    seq: int
    revision: int


class Done(Reply, frozen=True, tag=1):
    """Success. `replaced`: the revision of the key that a Set wrote over (0: none). `by`: when
    that is not the revision which the client had seen and another session wrote it, who."""

    replaced: int = 0
    by: str = ""


class Value(Reply, frozen=True, tag=2):
    """A value, and the revision at which it was written."""

    modified: int
    value: bytes
    shared: int = 0


class Absent(Reply, frozen=True, tag=3):
    """Answer that there is no such thing."""


class Integer(Reply, frozen=True, tag=4):
    """A number."""

    number: int


class Names(Reply, frozen=True, tag=5):
    """Keys."""

    names: tuple[str, ...]


class Granted(Reply, frozen=True, tag=6):
    """A lock or a claim; the token is the revision of the grant."""

    token: int


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One change of a key: its encoded value, or None when it was removed. `b""` with `large`: read
    it with Get."""

    key: str
    revision: int
    value: bytes | None
    large: bool = False


class Changes(Reply, frozen=True, tag=7, gc=True):
    """Changes in order, the last of them at `until`; ask again with `since=until`."""

    changes: tuple[Change, ...]
    until: int


class TimedOut(Reply, frozen=True, tag=8, gc=True):
    """The request's own timeout passed on the server; nothing was changed by it."""

    missing: tuple[str, ...] = ()  # Exists: keys
    present: tuple[Identity, ...] = ()  # Arrive: those that are there
    absent: tuple[Member, ...] = ()  # Arrive: those that are not, as far as that is certain
    holder: Identity | None = None  # Lock, Claim
    held_for: float = 0.0  # seconds
    queue: tuple[Identity, ...] = ()  # Lock: those that wait in front
    arrived: int = 0  # Arrive: how many are there; of very many, `present` names only some


class Failed(Reply, frozen=True, tag=9, gc=True):
    """Failure: nothing was done. `code` is one of FAILURES; `text` a complete sentence; `details` the figures
    in it, by name; `present` the processes that it concerns."""

    code: str
    text: str
    details: tuple[tuple[str, int | float | str], ...] = ()
    present: tuple[Identity, ...] = ()
    value: bytes = b""  # once-failed: the encoded error
    absent: tuple[
        Member, ...
    ] = ()  # barrier-...: those that are not there, as far as that is certain


class State(Reply, frozen=True, tag=10, gc=True):
    """Contents of the server."""

    keys: int
    used_bytes: int
    sessions: int
    waiting: int
    limits: Limits


class Closing(Reply, frozen=True, tag=11):
    """Notice (`seq` 0): the server stops. Nothing more will be answered."""

    text: str


class Met(Reply, frozen=True, tag=13, gc=True):
    """Processes that are there, in the order of arrival, and those that are not. `generation` as in Integer;
    `mine`: which seat is the asker's."""

    generation: int
    mine: int
    seats: tuple[Seat, ...]
    absent: tuple[Member, ...] = ()


class Freed(Reply, frozen=True, tag=12, gc=True):
    """Notice (`seq` 0), right behind a reply: the client may write into its segments of these
    numbers again."""

    numbers: tuple[int, ...]


FAILURES = (
    "value-too-large", "store-full", "key-too-long", "too-many-keys", "too-many-waiting", "wrong-type", "integer-overflow",
    "fence-stale", "compacted", "once-failed", "lock-twice", "lock-cycle", "barrier-size", "barrier-broken", "barrier-missed",
    "store-closed", "bad-request",
)  # fmt: skip

AnyHandshake = Hello | Challenge | Proof | Welcome | Refusal
AnyRequest = (
    Ping | Get | Set | CompareAndSet | Delete | Keys | Exists | Add | Append | Push | Pop | Settle | Length | Watch | Claim | Resolve
    | Lock | Unlock | Arrive | Status | Bye | Cancel | Release
)  # fmt: skip
AnyReply = (
    Done
    | Value
    | Absent
    | Integer
    | Names
    | Granted
    | Changes
    | TimedOut
    | Failed
    | State
    | Closing
    | Freed
    | Met
)

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that the decoders raise for bytes that are no message: text that is not UTF-8 and deep
nesting are no MsgspecError."""

TAGS: dict[type[Request], int] = {kind: kind.__struct_config__.tag for kind in get_args(AnyRequest)}
"""Tag that stands first in a message of each kind. A request that is sent by the million is encoded
as `(TAGS[kind], seq, acked, *fields)`, which is the same bytes as those of the object, without the
object; fields that have a default may be left out at the end."""

CARRIERS = frozenset((Set, CompareAndSet, Push, Resolve))
"""Requests that may have a large value beside them."""

LENDS = frozenset((Get, CompareAndSet, Delete, Pop, Claim))
"""Requests that may be answered by a Value, which may come with a descriptor."""

encode = msgspec.msgpack.Encoder().encode
decode_handshake = msgspec.msgpack.Decoder(AnyHandshake).decode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode


def seq_of(begun: bytes) -> int:
    """Return the `seq` of a request of which only the beginning is there: an array, its tag, and
    this. 0 when that is no request of ours."""
    at = 2 if begun[:1] < b"\xdc" else 4
    kind = begun[at] if at < len(begun) else 0
    if not 0xCC <= kind <= 0xCF:
        return kind if kind < 0x80 else 0
    return int.from_bytes(begun[at + 1 : at + 1 + (1 << (kind - 0xCC))], "big")
