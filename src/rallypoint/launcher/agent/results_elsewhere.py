"""Results of `launch` on several nodes: what ranks elsewhere return travels to node 0 in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rallypoint.host import memory_files
from rallypoint.launcher.agent.launch_request import LaunchRequest
from rallypoint.launcher.nodes.messages import ResultOf
from rallypoint.launcher.protocol import Outcome

RESULT_MOST = 64 << 20
"""Maximum bytes of one rank's result: they go through the memory of both agents and of the lead,
beside the signs of life. What is larger is faster through a shared disk.
"""

PIECE = 256 << 10
"""Bytes of one message: on a link of 10 Mbit/s a sign of life waits for it 0.2 s."""


def pieces(outcome: Outcome, fds: Sequence[int]) -> Iterator[ResultOf]:
    """Return the messages with the payload of an outcome; the descriptors stay open."""
    size = os.fstat(fds[0]).st_size
    if size > RESULT_MOST or len(fds) > 1:
        problem = (
            f"it has {size:,} bytes, and {RESULT_MOST:,} may travel"
            if size > RESULT_MOST
            else "it has descriptors, which do not leave a machine"
        )
        yield ResultOf(outcome.rank, outcome.kind, problem=problem)
        return
    for at in range(0, size, PIECE):
        data = os.pread(fds[0], PIECE, at)
        yield ResultOf(outcome.rank, outcome.kind, data, at + len(data) >= size)


class ResultsElsewhere:
    """Pieces that have come to node 0, by rank, until the last of a rank has."""

    def __init__(self) -> None:
        self._begun: dict[int, int] = {}  # memfd of what is not whole yet

    def take(self, piece: ResultOf, request: LaunchRequest) -> None:
        """Keep a piece; tell the caller of the whole with the last one."""
        if piece.problem:
            request.tell(Outcome(piece.rank, piece.kind, piece.problem))
            return
        fd = self._begun.get(piece.rank, -1)
        if fd < 0:
            fd = self._begun[piece.rank] = memory_files.create("rallypoint-payload")
        os.write(fd, piece.data)
        if piece.is_last:
            del self._begun[piece.rank]
            request.tell(Outcome(piece.rank, piece.kind), [fd])
            os.close(fd)

    def close(self) -> None:
        """Forget what is not whole."""
        for fd in self._begun.values():
            os.close(fd)
        self._begun.clear()
