"""Callers of an average whose values do not match: which parts differ, and who has which."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rallypoint.errors import BarrierBroken, BarrierMismatch
from rallypoint.primitives.average.layout import Tree
from rallypoint.primitives.average.participants import Participant, called, meeting, rank_order
from rallypoint.store.state.attendance import who
from rallypoint.wire.messages import Arrive, Identity, Met
from rallypoint.world import ranks_phrase

if TYPE_CHECKING:
    from rallypoint.store.client.client import Client

EXPLAINING = 5.0
"""Seconds to wait for the others' descriptions when values do not match."""

DESCRIPTION_BYTES = 48 * 1024
"""Maximum bytes of a compressed description: that of a state dict of some thousand tensors."""

SHOWN = 5
"""Maximum differences that an error lists."""

_Description = list[tuple[str, str, list[int]]]


def mismatch(
    store: Client, name: str, tree: Tree, participants: Sequence[Participant]
) -> BarrierMismatch:
    """Make the error for values that do not match, which is the same for all."""
    versions = sorted({one.offer.version for one in participants})
    found = _differences(_exchange(store, name, tree, len(participants)))
    if len(versions) > 1:
        numbers = ", ".join(map(str, versions))
        what = "they run different versions of rallypoint, whose averages have the versions"
        found = [f"{what} {numbers}"]
    if not found:
        groups: dict[bytes, list[Identity]] = {}
        for one in participants:
            groups.setdefault(one.offer.digest, []).append(one.identity)
        found = [f"{who(group)} have the same" for group in groups.values()]
    return BarrierMismatch(
        "average-mismatch",
        f"{called(name)} got values that do not match: {found[0]}",
        why=tuple(found[1:]),
        help=(("give all ranks the same keys, shapes and dtypes", ""),),
    )


def _exchange(
    store: Client, name: str, tree: Tree, size: int
) -> list[tuple[Identity, dict[str, str]]]:
    """Exchange descriptions of the values with the others: dtype and shape, by path."""
    mine = zlib.compress(msgspec.msgpack.encode(tree.described()))
    brought = msgspec.msgpack.encode(mine if len(mine) <= DESCRIPTION_BYTES else b"")
    stage = meeting(name, "described")
    try:
        reply, _ = store.ask(Arrive, stage, size, EXPLAINING, brought, 1, wait=EXPLAINING)
    except (BarrierBroken, BarrierMismatch):
        return []
    told = []
    for seat in reply.seats if isinstance(reply, Met) else ():
        packed = msgspec.msgpack.decode(seat.value, type=bytes)
        if packed:
            leaves = msgspec.msgpack.decode(zlib.decompress(packed), type=_Description)
            texts = {path: f"{dtype} {shape}" for path, dtype, shape in leaves}
            told.append((seat.identity, texts))
    return sorted(told, key=lambda one: rank_order(one[0]))


def _differences(told: Sequence[tuple[Identity, dict[str, str]]]) -> list[str]:
    """Return the first parts of the value that are not the same for all, and who has which."""
    found = []
    ranks = {identity.rank for identity, _ in told}
    by_rank = None not in ranks and len(ranks) == len(told)  # then the numbers say enough
    for path in sorted({path for _, leaves in told for path in leaves}):
        sides: dict[str, list[Identity]] = {}
        for identity, leaves in told:
            sides.setdefault(leaves.get(path, "nothing"), []).append(identity)
        if len(sides) == 1:
            continue
        had = []
        for what, them in sides.items():
            names = ranks_phrase(one.rank or 0 for one in them) if by_rank else who(them)
            had.append(f"{what} in {names}")
        said = f"{', '.join(had[:-1])} and {had[-1]}"
        found.append(said if path == "value" else f"{path} is {said}")  # "value": no container
    if len(found) > SHOWN:
        found[SHOWN:] = [f"and {len(found) - SHOWN} more parts differ"]
    return found
