"""A node's evidence on its way to the lead: cut to what may travel, its times by the lead's clock."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis.evidence import Ended, HelperLost, JobEvidence, NodeEvidence, RankEvidence
from rallypoint.diagnosis.raised import Raised
from rallypoint.host.devices import Device

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def of_one_clock(job: JobEvidence) -> JobEvidence:
    """Return the job with all times by the lead's clock, in seconds since its start."""
    if not any(node.offset for node in job.nodes):
        return job
    return replace(job, nodes=tuple(_shifted(node, node.offset) for node in job.nodes))


# Fields that hold a moment, 0.0 when there is none.
_MOMENTS = frozenset(("at", "phase_at", "left_when", "closed_at", "now"))


def _shifted(value: Any, by: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_shifted(one, by) for one in value)
    if not isinstance(value, (NodeEvidence, RankEvidence, Raised, Ended, HelperLost)):
        return value
    changed = {
        name: (old and old + by) if name in _MOMENTS else _shifted(old, by)
        for name, old in zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)
    }
    return replace(value, **{**changed, **({"offset": 0.0} if "offset" in changed else {})})


# Bytes of the evidence of a rank that travels between nodes: of one that has failed, of any other,
# and of what a node tells beside its ranks. The logs have the rest.
FAILED_BYTES, RANK_BYTES, NODE_BYTES = 16_384, 4_096, 16_384
# Most characters of a text and most parts of a list that are kept, until it fits.
_SHORTER = ((8000, 400), (4000, 100), (2000, 60), (1000, 30), (400, 12), (160, 6), (60, 2), (20, 1))


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
        head, tail = value[:half], value[-half:]
        if "\n" in head and "\n" in tail:  # whole lines
            head, tail = head[: head.rindex("\n") + 1], tail[tail.index("\n") :]
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
