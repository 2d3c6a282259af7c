"""A node's evidence on its way to the lead: cut to what may travel, its times by the lead's clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis.evidence import Ended, JobEvidence, NodeEvidence, RankEvidence
from rallypoint.diagnosis.raised import Raised
from rallypoint.host.devices import Device

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def of_one_clock(job: JobEvidence) -> JobEvidence:
    """Return the job with all times by the lead's clock, in seconds since its start, and the ends
    of all nodes in one order: on a node that of its kernel, between nodes that of the clock.
    """
    if len(job.nodes) == 1 and not job.nodes[0].offset:
        return job
    nodes = tuple(_shifted(node, node.offset) for node in job.nodes)
    ends = sorted(
        (rank.ended.at, node.node, rank.ended.order, rank.rank)
        for node in nodes
        for rank in node.ranks
        if rank.ended is not None
    )
    order = {number: place for place, (*_, number) in enumerate(ends)}
    return replace(job, nodes=tuple(_ordered(node, order) for node in nodes))


def _ordered(node: NodeEvidence, order: Mapping[int, int]) -> NodeEvidence:
    ranks = (
        replace(rank, ended=replace(rank.ended, order=order[rank.rank])) if rank.ended else rank
        for rank in node.ranks
    )
    return replace(node, ranks=tuple(ranks))


def _shifted(node: NodeEvidence, by: float) -> NodeEvidence:
    """Return the node's evidence with all its times later by so many seconds."""
    if not by:
        return node
    helper = node.helper
    return replace(
        node,
        ranks=tuple(_rank_shifted(rank, by) for rank in node.ranks),
        helper=helper and replace(helper, ended=_end_shifted(helper.ended, by)),
        now=node.now + by,
        offset=0.0,
    )


def _rank_shifted(rank: RankEvidence, by: float) -> RankEvidence:
    return replace(
        rank,
        phase_at=_later(rank.phase_at, by),
        ended=rank.ended and _end_shifted(rank.ended, by),
        raised=rank.raised and _error_shifted(rank.raised, by),
        handled=tuple(_error_shifted(error, by) for error in rank.handled),
        handles=rank.handles and _error_shifted(rank.handles, by),
        left_when=_later(rank.left_when, by),
        closed_at=_later(rank.closed_at, by),
    )


def _end_shifted(ended: Ended, by: float) -> Ended:
    return replace(ended, at=_later(ended.at, by))


def _error_shifted(error: Raised, by: float) -> Raised:
    return replace(error, at=_later(error.at, by))


def _later(at: float, by: float) -> float:
    """Return the later moment; 0.0 stands for none."""
    return at and at + by


# Bytes of the evidence of a rank that travels between nodes: of one that has failed, of any other,
# and of what a node tells beside its ranks. The logs have the rest.
FAILED_BYTES, RANK_BYTES, NODE_BYTES = 16_384, 4_096, 16_384
# Steps until the evidence fits: most characters of a text, and most items of a list. Some lists are
# pairs, so two items are the least.
_SHORTER = ((8000, 400), (4000, 100), (2000, 60), (1000, 30), (400, 12), (160, 6), (60, 2), (20, 2))


def cut(node: NodeEvidence) -> NodeEvidence:
    """Return the evidence no larger than may travel: long texts and lists without their middle."""
    ranks = []
    for rank in node.ranks:
        ended = rank.ended
        failed = rank.raised is not None or (ended is not None and (ended.code or ended.signal))
        ranks.append(_fitting(rank, FAILED_BYTES if failed else RANK_BYTES))
    return replace(_fitting(replace(node, ranks=()), NODE_BYTES), ranks=tuple(ranks))


def _fitting(value: _Struct, most: int) -> _Struct:
    for characters, parts in _SHORTER:
        if len(msgspec.msgpack.encode(value)) <= most:
            break
        value = _shorter(value, characters, parts)
    return value


def _shorter(value: Any, characters: int, parts: int) -> Any:
    """Return a value with the middle of its long texts and lists left out."""
    if isinstance(value, str) and len(value) > characters:
        half = characters // 2
        # whole lines, and parts of long ones: the exception's message may be one
        head = re.sub(r"\n.{0,199}\Z", "\n", value[:half])
        tail = re.sub(r"\A.{0,199}\n", "\n", value[-half:])
        return f"{head} ... {tail}"
    if isinstance(value, (tuple, list)):
        # Numbers are small, and GPUs are known by their places in the list.
        if len(value) > parts and not isinstance(value[0], (int, Device)):
            value = (*value[: parts // 2], *value[-(parts - parts // 2) :])
        return tuple(_shorter(one, characters, parts) for one in value)
    if isinstance(value, dict):
        return {name: _shorter(one, characters, parts) for name, one in value.items()}
    if isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)
        return type(value)(
            *(
                (_of_json if name == "error_file" else _shorter)(one, characters, parts)
                for name, one in fields
            )
        )
    return value


def _of_json(text: str, characters: int, parts: int) -> str:
    if len(text) <= characters:
        return text
    try:
        return msgspec.json.encode(_shorter(msgspec.json.decode(text), characters, parts)).decode()
    except (ValueError, RecursionError):
        return ""  # nobody could read it whole either
