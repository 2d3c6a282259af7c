"""Cut a byte stream into frames, within a limit.

A frame is a header of 12 bytes (the message's length, 4 bytes, and the body's, 8, little-endian),
the message, and the body. Both lengths are checked as soon as the header is there, before anything
of what they announce is read or allocated.

A body that is longer than what has arrived with its message is not collected here: `Cutter.next`
returns the frame with the part of the body that is there and `missing`, the rest, which whoever
reads the socket puts where it belongs, straight from the socket. That is why bytes of a tensor are
never copied in Python.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

HEADER = struct.Struct("<IQ")
HEADER_BYTES = HEADER.size


class FrameError(Exception):
    """The stream is not what it should be; nothing after this can be understood. `first` are the
    first bytes of the frame."""

    def __init__(self, text: str, first: bytes) -> None:
        super().__init__(text)
        self.first = first


WireFrame: TypeAlias = tuple[bytes, bytes, int]
"""One frame: the message, the beginning of the body, and how many bytes of it are still to come."""


def header(message: int, body: int = 0) -> bytes:
    """Return the header of a frame with a message and a body of these lengths, in bytes."""
    return HEADER.pack(message, body)


def framed(message: bytes, body: int = 0) -> bytes:
    """Return a message with its header, for a body of `body` bytes behind it."""
    return HEADER.pack(len(message), body) + message


class Cutter:
    """Buffer of what has arrived and is not yet a frame. Whatever is read goes into `next`, or into
    `data`; call `next` until it returns None before anything is added again, or memory grows."""

    __slots__ = ("body_bytes", "data", "message_bytes")

    def __init__(self, message_bytes: int, body_bytes: int) -> None:
        """Set the longest message and the longest body that are accepted; both may be changed
        between frames."""
        self.message_bytes = message_bytes
        self.body_bytes = body_bytes
        self.data = bytearray()

    @property
    def announced(self) -> int:
        """Return the length of header and message of the frame that has begun to arrive, 0 when not
        even its header has."""
        if len(self.data) < HEADER_BYTES:
            return 0
        length, _ = HEADER.unpack_from(self.data)
        return HEADER_BYTES + int(length)

    def skip(self) -> tuple[bytes, int]:
        """Throw the frame away that has begun to arrive. Return the beginning of its message, and
        how many bytes of message and body are missing: these must not be added."""
        _, body = HEADER.unpack_from(self.data)
        missing = self.announced + body - len(self.data)
        begun = bytes(self.data[HEADER_BYTES : HEADER_BYTES + 64])
        self.data.clear()
        return begun, missing

    def next(self, fresh: bytes = b"") -> WireFrame | None:
        """Return the next frame, None when more must arrive first. `fresh`: bytes that have just
        arrived. Raises FrameError when a length is over its limit.

        When `missing` is not 0, everything has been used, and what follows in the stream is the
        rest of the body: exactly `missing` bytes of it must not be added.
        """
        data = self.data
        size = len(fresh) - HEADER_BYTES
        if not data and 0 < size <= self.message_bytes and HEADER.unpack_from(fresh) == (size, 0):
            return fresh[HEADER_BYTES:], b"", 0  # one frame and no more, as nearly always
        data += fresh
        if len(data) < HEADER_BYTES:
            return None
        length, body = HEADER.unpack_from(data)
        if not 0 < length <= self.message_bytes or body > self.body_bytes:
            raise self._error(length, body)
        end = HEADER_BYTES + length
        if len(data) < end:
            return None
        message = bytes(data[HEADER_BYTES:end])
        there = bytes(data[end : end + body]) if body else b""
        del data[: end + len(there)]
        return message, there, body - len(there)

    def _error(self, length: int, body: int) -> FrameError:
        """Make the error for a frame of these lengths."""
        first = bytes(self.data[:64])
        if length == 0:
            return FrameError("a frame without a message", first)
        part, size, limit = "message", length, self.message_bytes
        if length <= limit:
            part, size, limit = "body", body, self.body_bytes
        text = f"a frame whose {part} has {size} bytes, {limit} are allowed"
        return FrameError(text, first)
