"""Every message between an agent and the lead of a job on several nodes.

They are maps in msgpack, so that an applicant of another version of rallypoint can still be read,
and refused by name: fields of `Applicant` are only added, with a default.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal, dataclass_transform

import msgspec

from rallypoint.diagnosis.evidence import Meeting, NodeEvidence, RankEvidence
from rallypoint.diagnosis.rank_snapshot import RankStanding
from rallypoint.diagnosis.report import Report
from rallypoint.errors import Advice
from rallypoint.world import Seat


class Versions(msgspec.Struct, frozen=True):
    """Versions that the nodes of a job must share; "" for a torch that is not there."""

    rallypoint: str
    torch: str
    python: str


class Offers(msgspec.Struct, frozen=True):
    """Ports of listeners that node 0 holds already for the next attempt."""

    master_port: int
    store_port: int = 0
    tls: bool = False  # at the store


class RankView(msgspec.Struct, frozen=True):
    """The facts about one rank that the lead needs while an attempt runs."""

    rank: int
    phase: str
    lasted: float = 0.0  # seconds that the rank had been in this phase when this was sent
    meeting: Meeting | None = None  # of its last call of init_process_group
    held: bool = False  # that call looks for the others where the launcher holds a socket
    ended: tuple[int, int] | None = None  # exit code and signal; None: it lives
    failed: bool = False  # an exception has left its program
    # an error left init_process_group or set_device, and the rank has not joined since
    erred: bool = False
    joined: int = 0  # groups of all ranks that it has joined
    debugged: bool = False  # a person is at its debugger


@dataclass_transform(frozen_default=True)
class NodeMessage(msgspec.Struct, frozen=True, tag=True):
    """A message, which travels with the name of its class."""


TO_LEAD = "lead"
"""Name of the queue in which members put what they send."""

NODES = "node/"
"""Beginning of the keys of applicants, which end with their ids."""


LEADER = "leader"
"""Key of the lead's own applicant."""


def to_node(id: str) -> str:
    """Return the name of the queue of what the lead sends to this applicant."""
    return f"to/{id}"


# --- member -> lead


class Ping(NodeMessage):
    """A question for the lead's time, answered at once by `Pong` with the same number."""

    id: str
    number: int


class Applicant(NodeMessage):
    """A node that would take part. It is an ephemeral key of the member's session: when the key
    goes, the node is lost.
    """

    id: str  # random, of this agent's process
    host: str
    pid: int
    slots: int  # ranks that it has room for
    nnodes: int
    versions: Versions
    digest: str  # of the program and its arguments
    node_rank: int | None = None  # the place that was asked for; None: any
    reached: str = ""  # numeric address of the lead by which it came
    addresses: tuple[str, ...] = ()  # its own, the one that others most likely reach first
    offers: Offers | None = None  # of a node that may become node 0


class Reachable(NodeMessage):
    """The addresses of the lead that this member has connected to, an answer to `Try`."""

    id: str
    addresses: tuple[str, ...]


class Views(NodeMessage):
    """Ranks of a node about which something has changed."""

    node: int
    ranks: tuple[RankView, ...]


class Failing(NodeMessage):
    """A node that has begun to judge, or got another signal. `signal`: it is stopped from
    outside by this one.
    """

    node: int
    because: str
    signal: str = ""


class EvidenceOf(NodeMessage):
    """All that a node knows when an attempt has failed."""

    node: int
    evidence: NodeEvidence


class AllWait(NodeMessage):
    """Each living rank of a node that is stopped from outside waits for others, or (`waits` False)
    one of them goes on.
    """

    node: int
    waits: bool = True


class Notice(NodeMessage):
    """Word of a batch system that it will end the job soon, which the lead passes on to the other
    nodes.
    """

    node: int
    signal: str


class Over(NodeMessage):
    """The end of all ranks of a node, with everything that they left running.

    `well`: all with exit code 0, and none was stopped.
    """

    node: int
    well: bool


class NodeAnswer(NodeMessage):
    """A node's answer to `Ask`."""

    node: int
    number: int
    ranks: tuple[RankEvidence, ...] = ()
    states: dict[int, str] = {}  # of ranks that did not tell where they are: why


class StandingsOf(NodeMessage):
    """Places of a node's ranks, an answer to `Ask` (`stacks`)."""

    node: int
    number: int
    ranks: tuple[RankStanding, ...]


class AskAll(NodeMessage):
    """A wish to know where the ranks of all nodes stand, answered by `Standings`."""

    node: int


class StandsStill(NodeMessage):
    """Stall of one node: none of its ranks has moved for so many seconds. `looks`: as often their
    stacks were seen meanwhile; 0: /proc alone shows it.
    """

    node: int
    seconds: float
    looks: int = 0


class GoesOn(NodeMessage):
    """Ranks that have moved on a node that stood still."""

    node: int
    ranks: tuple[int, ...]


class ResultOf(NodeMessage):
    """Piece of what the function of `launch` has returned or raised in a rank of another node. The
    lead passes it on to node 0, where the caller gets the whole.
    """

    rank: int
    kind: Literal["value", "error"]
    data: bytes = b""
    is_last: bool = True
    problem: str = ""  # why nothing more comes of it


# --- lead -> member


class Pong(NodeMessage):
    """The lead's time: seconds since its agent's start, and since 1970."""

    number: int
    now: float
    wall: float = 0.0


class Try(NodeMessage):
    """Addresses of the lead to connect to; `Reachable` says which ones answered."""

    addresses: tuple[str, ...]


class Refused(NodeMessage):
    """The end of an applicant's hope, in the parts of an error, with its exit status."""

    code: str
    headline: str
    why: tuple[str, ...] = ()
    help: Advice = ()
    status: int = 2


class Missing(NodeMessage):
    """Lines about nodes that have not come, for those that wait to print."""

    lines: tuple[str, ...]


class Seated(NodeMessage):
    """A node's place in one attempt; the attempt begins."""

    seat: Seat
    job: str  # the job's id, which is the lead's
    host: str  # name of node 0
    max_restarts: int = 0  # the lead's, which counts


class Judge(NodeMessage):
    """Failure elsewhere, or (`signal`) a stop from outside: told again, nobody waits for a grace."""

    because: str
    signal: str = ""


class Sentence(NodeMessage):
    """The reports about an attempt, the same for all nodes."""

    reports: tuple[Report, ...]
    status: int
    same: str = ""
    at: float = 0.0  # seconds of the lead's clock when the first cause was; 0: not known
    followed: tuple[str, ...] = ()  # lines about ranks that failed because of others


class WaitInVain(NodeMessage):
    """No living rank of any node goes on: those that wait are killed."""


class RollCall(NodeMessage):
    """Lines about ranks that others wait for, to be printed."""

    lines: tuple[str, ...]
    because: str


class Dismissed(NodeMessage):
    """The end of the job. `times`: equal failures in a row, too many for another attempt."""

    status: int
    because: str
    times: int = 0


class Standings(NodeMessage):
    """Places of the ranks of all nodes. `stall`: seconds for which none of them has moved, which
    is to be reported; 0.0: somebody asks.
    """

    ranks: tuple[RankStanding, ...]
    stall: float = 0.0
    looks: int = 0


class StallOver(NodeMessage):
    """Ranks that have moved since a stall was reported."""

    ranks: tuple[int, ...]


class Ask(NodeMessage):
    """A question to a node about its ranks, answered with the same number by `NodeAnswer`, or
    (`stacks`) by `StandingsOf`.
    """

    kind: Literal["stacks", "roll-call"]
    number: int
    ranks: tuple[int, ...] = ()  # of a roll call: those that others wait for


# Any, since no type checker follows a union that is made at run time.
_ANY_MESSAGE: Any = functools.reduce(operator.or_, NodeMessage.__subclasses__())
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ANY_MESSAGE)


def encode(message: NodeMessage) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> NodeMessage:
    """Decode a message. Raises `msgspec.DecodeError` for what is none."""
    message: NodeMessage = _decoder.decode(data)
    return message
