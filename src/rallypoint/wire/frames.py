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
        self._data = b""
        self._at = 0  # what comes before it in `_data` was returned
        self._later: list[
            bytes
            # arrived after `_data`: joined only once, or a long message would be copied for every
            # read
        ] = []
        self._later_bytes = 0
        self._need = 0  # with fewer bytes than this there is no frame yet
        # all that has arrived was returned: an attribute, for it is asked before each small request
        self.empty = True

    def __len__(self) -> int:
        """Return how many bytes have arrived and were not returned yet."""
        return len(self._data) - self._at + self._later_bytes

    @property
    def announced(self) -> int:
        """Return bytes of the header and message of the frame that has begun to arrive, 0 when no
        more than a header has."""
        return self._need if self._need > HEADER_BYTES else 0

    def skip(self) -> tuple[bytes, int]:
        """Throw the frame away that has begun to arrive. Returns the beginning of its message, and
        how many bytes of message and body are missing: these must not be fed."""
        data = b"".join((self._data[self._at :], *self._later))
        length, body = HEADER.unpack_from(data)
        self._data, self._at, self._later, self._later_bytes, self._need, self.empty = (
            b"",
            0,
            [],
            0,
            0,
            True,
        )
        return data[HEADER_BYTES : HEADER_BYTES + 64], HEADER_BYTES + length + body - len(data)

    def feed(self, data: bytes) -> None:
        """Add what was read. Call `next` until it returns None before feeding again, or memory
        grows with what is fed."""
        self.empty = False
        if self._at < len(self._data):
            self._later.append(data)
            self._later_bytes += len(data)
        else:
            self._data = data
            self._at = 0

    def next(self) -> WireFrame | None:
        """Return the next frame, None when more must arrive first. Raises FrameError when a length
        is over its limit.

        When `missing` is not 0, everything that was fed has been used, and what follows in the
        stream is the rest of the body: exactly `missing` bytes of it must not be fed.
        """
        if self._later:
            if len(self) < self._need:
                return None
            self._data = b"".join((self._data[self._at :], *self._later))
            self._at = 0
            self._later = []
            self._later_bytes = 0
        start = self._at
        there = len(self._data) - start
        if there < HEADER_BYTES:
            self._need = HEADER_BYTES
            self.empty = not there
            return None
        length, body = HEADER.unpack_from(self._data, start)
        if length > self.message_bytes or length == 0 or body > self.body_bytes:
            first = self._data[start : start + 64]
            if length == 0:
                raise FrameError("a frame without a message", first)
            what, size, limit = (
                ("message", length, self.message_bytes)
                if length > self.message_bytes
                else ("body", body, self.body_bytes)
            )
            raise FrameError(f"a frame whose {what} has {size} bytes, {limit} are allowed", first)
        end = start + HEADER_BYTES + length
        if start + there < end:
            self._need = HEADER_BYTES + length
            return None
        self._need = 0
        message = self._data[start + HEADER_BYTES : end]
        if not body:
            self._at = end
            self.empty = end == len(self._data)
            return WireFrame(message, b"", 0)
        self._at = min(end + body, start + there)
        self.empty = self._at == len(self._data)
        part = self._data[end : self._at]
        return WireFrame(message, part, body - len(part))
