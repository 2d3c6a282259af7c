"""Frames: any split of the stream gives the same ones, and what is not a frame is told at its
header.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from rallypoint.wire.frames import HEADER_BYTES, Cutter, FrameError, header

MESSAGE_BYTES = 300
BODY_BYTES = 5000

messages = some.binary(min_size=1, max_size=MESSAGE_BYTES)
bodies = (
    some.just(b"")
    | some.binary(max_size=200)
    | some.integers(201, BODY_BYTES).map(lambda size: (bytes(range(251)) * 20)[:size])
)
frames = some.lists(some.tuples(messages, bodies), max_size=8)
cuts = some.lists(some.integers(1, 900), min_size=1, max_size=12)


def stream_of(frames: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(header(len(message), len(body)) + message + body for message, body in frames)


def received(stream: bytes, cuts: list[int]) -> list[tuple[bytes, bytes]]:
    """What a reader gets that reads `stream` in pieces of these lengths, over and over, and the
    rest of a body past the cutter.
    """
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    found: list[tuple[bytes, bytes]] = []
    at = turn = 0
    while at < len(stream):
        piece = stream[at : at + cuts[turn % len(cuts)]]
        at, turn = at + len(piece), turn + 1
        cutter.data += piece
        while (frame := cutter.next()) is not None:
            message, body, missing = frame
            if missing:
                assert len(cutter.data) == 0
                assert cutter.next() is None
            found.append((message, body + stream[at : at + missing]))
            at += missing
    assert len(cutter.data) == 0
    assert cutter.next() is None
    return found


@given(frames, cuts)
@example([(b"m", b""), (b"n" * MESSAGE_BYTES, b"b" * BODY_BYTES)], [1])
def test_any_split_of_the_stream_gives_the_same_frames(
    frames: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    assert received(stream_of(frames), cuts) == frames


@given(frames, some.integers(1, 2000))
def test_a_stream_that_ends_early_gives_the_frames_before_its_end(
    frames: list[tuple[bytes, bytes]], short: int
) -> None:
    stream = stream_of(frames)[:-short]
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    cutter.data += stream
    found = []
    while (frame := cutter.next()) is not None:
        found.append(frame[:2])
    for (message, body), (whole_message, whole_body) in zip(found, frames, strict=False):
        assert message == whole_message
        assert whole_body.startswith(body)
    assert len(found) <= len(frames)
    assert len(cutter.data) < HEADER_BYTES + MESSAGE_BYTES


@given(some.lists(some.binary(max_size=100), max_size=20))
def test_random_bytes_are_frames_or_a_frame_error(pieces: list[bytes]) -> None:
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    try:
        for piece in pieces:
            cutter.data += piece
            while (frame := cutter.next()) is not None:
                assert 0 < len(frame[0]) <= MESSAGE_BYTES
                assert len(frame[1]) + frame[2] <= BODY_BYTES
    except FrameError:
        pass  # the other thing that may happen


def test_a_body_that_is_not_there_yet_is_the_callers() -> None:
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    cutter.data += header(3, 10) + b"abc" + b"1234"
    assert cutter.next() == (b"abc", b"1234", 6)
    cutter.data += header(1) + b"z"  # after the six bytes, which went elsewhere
    assert cutter.next() == (b"z", b"", 0)


@pytest.mark.parametrize(
    ("message", "body", "text"),
    [
        (0, 0, "a frame without a message"),
        (MESSAGE_BYTES + 1, 0, "a frame whose message has 301 bytes, 300 are allowed"),
        (2**32 - 1, 2**64 - 1, "a frame whose message has 4294967295 bytes, 300 are allowed"),
        (1, BODY_BYTES + 1, "a frame whose body has 5001 bytes, 5000 are allowed"),
        (1, 2**64 - 1, "a frame whose body has 18446744073709551615 bytes, 5000 are allowed"),
    ],
)
def test_a_length_over_its_limit_is_refused_at_the_header(
    message: int, body: int, text: str
) -> None:
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    cutter.data += header(1) + b"x" + header(message, body)
    assert cutter.next() == (b"x", b"", 0)
    with pytest.raises(FrameError) as caught:
        cutter.next()
    assert str(caught.value) == text
    assert caught.value.first == header(message, body)


def test_a_stranger_is_shown_by_its_first_bytes() -> None:
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    cutter.data += b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n" + b"x" * 100
    with pytest.raises(FrameError) as caught:
        cutter.next()
    assert caught.value.first.startswith(b"GET / HTTP/1.1\r\nHost: rank0")
    assert len(caught.value.first) == 64


def test_a_limit_may_be_raised_between_frames() -> None:
    cutter = Cutter(10, 0)
    cutter.data += header(10) + b"0123456789" + header(20, 1) + b"x" * 20 + b"b"
    assert cutter.next() == (b"0123456789", b"", 0)
    cutter.message_bytes, cutter.body_bytes = 20, 1
    assert cutter.next() == (b"x" * 20, b"b", 0)


def test_feeding_twice_before_asking_loses_nothing() -> None:
    cutter = Cutter(MESSAGE_BYTES, BODY_BYTES)
    cutter.data += header(200)[:5]
    assert cutter.next() is None
    for piece in (header(200)[5:] + b"m" * 100, b"m" * 100 + header(2), b"ab" + header(1) + b"c"):
        cutter.data += piece
    assert [cutter.next(), cutter.next(), cutter.next(), cutter.next()] == [
        (b"m" * 200, b"", 0),
        (b"ab", b"", 0),
        (b"c", b"", 0),
        None,
    ]


def test_a_long_message_in_small_pieces_is_not_copied_for_every_piece() -> None:
    # 48 MiB in pieces of 1 KiB: copied once it takes 0.1 s, copied for every piece more than a
    # minute (pytest ends that).
    size = 48 * 1024 * 1024
    cutter = Cutter(size, 0)
    cutter.data += header(size)
    piece = bytes(1024)
    for _ in range(size // 1024):
        assert cutter.next() is None
        cutter.data += piece
    frame = cutter.next()
    assert frame is not None
    assert len(frame[0]) == size
