"""Decisions of the lead that are messages: to one applicant, to some nodes, to all."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec

from rallypoint.launcher.nodes.messages import NodeMessage


@dataclass_transform(frozen_default=True)
class Decision(msgspec.Struct, frozen=True):
    """Something that the lead's thread is to do."""


Decisions = list[Decision]


class Tell(Decision):
    """Send one applicant a message."""

    id: str
    message: NodeMessage


class TellNodes(Decision):
    """Send these nodes a message."""

    nodes: tuple[int, ...]
    message: NodeMessage


class TellAll(Decision):
    """Send every applicant that is here a message, but this node (-1: all)."""

    message: NodeMessage
    but: int = -1
