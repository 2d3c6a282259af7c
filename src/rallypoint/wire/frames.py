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
from typing import NamedTuple

HEADER = struct.Struct("<IQ")
HEADER_BYTES = HEADER.size

HEADS = [HEADER.pack(length, 0) for length in range(512)]
"""The header of a frame without a body, by the length of its message, for small ones: to look it up
is half the work of making it."""


class FrameError(Exception):
    """The stream is not what it should be; nothing after this can be understood. `first` are the
    first bytes of the frame."""

    def __init__(self, text: str, first: bytes) -> None:
        super().__init__(text)
        self.first = first


class WireFrame(NamedTuple):
    """One frame; `body` is the beginning of the body, `missing` how many bytes of it are still to
    come."""

    message: bytes
    body: bytes
    missing: int


def header(message: int, body: int = 0) -> bytes:
    """Return the header of a frame with a message and a body of these lengths, in bytes."""
    return HEADER.pack(message, body)


def framed(message: bytes, body: int = 0) -> bytes:
    """Return a message with its header, for a body of `body` bytes behind it."""
    size = len(message)
    return (HEADS[size] if size < len(HEADS) and not body else HEADER.pack(size, body)) + message


def single(data: bytes) -> bytes | None:
    """Return the message if `data` is exactly one small frame without a body, as most reads are."""
    size = len(data) - HEADER_BYTES
    whole = 0 < size < len(HEADS) and data.startswith(HEADS[size])
    return data[HEADER_BYTES:] if whole else None


class Cutter:
    """Buffer of what has arrived and is not yet a frame."""

    def __init__(self, message_bytes: int, body_bytes: int) -> None:
        """Set the longest message and the longest body that are accepted; both may be changed
        between frames."""
        self.message_bytes = message_bytes
        self.body_bytes = body_bytes
        self._data = bytearray()

    def __len__(self) -> int:
        """Return how many bytes have arrived and were not returned yet."""
        return len(self._data)

    @property
    def empty(self) -> bool:
        """True when all that has arrived was returned."""
        return not self._data

    @property
    def announced(self) -> int:
        """Return the length of header and message of the frame that has begun to arrive, 0 when not
        even its header has."""
        if len(self._data) < HEADER_BYTES:
            return 0
        length, _ = HEADER.unpack_from(self._data)
        return HEADER_BYTES + int(length)

    def skip(self) -> tuple[bytes, int]:
        """Throw the frame away that has begun to arrive. Return the beginning of its message, and
        how many bytes of message and body are missing: these must not be fed."""
        _, body = HEADER.unpack_from(self._data)
        missing = self.announced + body - len(self._data)
        begun = bytes(self._data[HEADER_BYTES : HEADER_BYTES + 64])
        self._data.clear()
        return begun, missing

    def feed(self, data: bytes) -> None:
        """Add what was read. Call `next` until it returns None before feeding again, or memory
        grows with what is fed."""
        self._data += data

    def next(self) -> WireFrame | None:
        """Return the next frame, None when more must arrive first. Raises FrameError when a length
        is over its limit.

        When `missing` is not 0, everything that was fed has been used, and what follows in the
        stream is the rest of the body: exactly `missing` bytes of it must not be fed.
        """
        data = self._data
        if len(data) < HEADER_BYTES:
            return None
        length, body = HEADER.unpack_from(data)
        first = bytes(data[:64])
        if length == 0:
            raise FrameError("a frame without a message", first)
        limits = (("message", length, self.message_bytes), ("body", body, self.body_bytes))
        for part, size, limit in limits:
            if size > limit:
                text = f"a frame whose {part} has {size} bytes, {limit} are allowed"
                raise FrameError(text, first)
        end = HEADER_BYTES + length
        if len(data) < end:
            return None
        message, there = bytes(data[HEADER_BYTES:end]), bytes(data[end : end + body])
        del data[: end + len(there)]
        return WireFrame(message, there, body - len(there))
