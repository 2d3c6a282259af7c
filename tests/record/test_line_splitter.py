"""Where a line ends, what is an update, when a part is shown."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.record import line_splitter
from rallypoint.record.line_splitter import (
    PART_AFTER,
    UPDATE_EVERY,
    UPDATE_SETTLES,
    Interruptions,
    LineSplitter,
    Piece,
)


def text_of(pieces: list[Piece]) -> bytes:
    return b"".join(piece.data for piece in pieces if piece.kind != "update")


def test_whole_lines_come_at_once_and_together() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntwo\nthr", 0.0) == [Piece("lines", b"one\ntwo\n")]
    assert splitter.feed(b"ee\n", 0.1) == [Piece("lines", b"three\n")]
    assert splitter.due is None


def test_an_unfinished_line_is_shown_after_a_second_and_continued() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"name? ", 5.0) == []
    assert splitter.due == 5.0 + PART_AFTER
    assert splitter.expire(5.9) == []
    assert splitter.expire(6.0) == [Piece("part", b"name? ")]
    assert splitter.due is None
    assert splitter.feed(b"Ada\nnext\n", 9.0) == [Piece("lines", b"Ada\nnext\n", continues=True)]
    assert splitter.feed(b"more\n", 9.0) == [Piece("lines", b"more\n")]


def test_the_second_counts_from_the_first_byte_that_was_not_shown() -> None:
    splitter = LineSplitter()
    for tenth in range(10):
        assert splitter.feed(b".", tenth / 10) == []
    assert splitter.expire(1.0) == [Piece("part", b"..........")]
    splitter.feed(b".", 1.5)
    assert splitter.due == 1.5 + PART_AFTER


def test_a_windows_line_end_is_a_newline_also_when_it_is_cut_in_two() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\r\ntwo\r", 0.0) == [Piece("lines", b"one\n")]
    assert splitter.feed(b"\nthree\r\n", 0.01) == [Piece("lines", b"two\nthree\n")]


def test_of_the_updates_of_a_line_only_the_last_is_a_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 0%\r 50%\r100%\ndone\n", 0.0) == [Piece("lines", b"100%\ndone\n")]
    assert splitter.feed(b"10%\r20%\r30%\r\n", 0.0) == [Piece("lines", b"30%\n")]


def test_updates_are_shown_at_most_twice_a_second_and_the_newest_wins() -> None:
    splitter = LineSplitter()
    shown = []
    for step in range(1000):  # ten seconds, a hundred updates a second
        now = step / 100
        shown += [(now, piece.data) for piece in splitter.expire(now)]
        assert splitter.feed(b"\r%d%%" % (step // 10), now) == []
    assert 18 <= len(shown) <= 21
    assert all(
        later - earlier > UPDATE_EVERY - 1e-6
        for (earlier, _), (later, _) in itertools.pairwise(shown)
    )
    assert shown[-1][1] >= b"95%"
    assert splitter.feed(b"\r100%\n", 10.0) == [Piece("lines", b"100%\n")]


def test_an_update_that_is_followed_by_silence_is_shown_once() -> None:
    splitter = LineSplitter()
    splitter.feed(b"\r10%", 0.0)
    assert splitter.due == UPDATE_SETTLES
    assert splitter.expire(UPDATE_SETTLES) == [Piece("update", b"10%")]
    assert splitter.due is None
    splitter.feed(b"\r10%", 1.0)
    assert splitter.expire(2.0) == []


def test_a_line_shown_in_part_is_ended_before_updates_begin() -> None:
    splitter = LineSplitter()
    splitter.feed(b"loading", 0.0)
    splitter.expire(1.0)
    assert splitter.feed(b"...\r10%\r20%", 2.0) == [Piece("lines", b"...\n", continues=True)]
    assert splitter.feed(b"\rdone\n", 2.0) == [Piece("lines", b"done\n")]


def test_a_long_line_flows_in_parts_with_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_splitter, "LINE_LIMIT", 1000)
    splitter = LineSplitter()
    pieces, kept = [], 0
    for _ in range(200):
        pieces += splitter.feed(b"x" * 100, 0.0)
        kept = max(kept, len(splitter._pending))
    assert kept <= 1000
    pieces += splitter.feed(b"end\nnext\n", 0.0)
    assert text_of(pieces) == b"x" * 20000 + b"end\nnext\n"
    assert {piece.kind for piece in pieces[:-1]} == {"part"}
    assert splitter.feed(b"short", 0.0) == []


def test_endless_updates_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_splitter, "LINE_LIMIT", 1000)
    splitter = LineSplitter()
    for step in range(10_000):
        splitter.feed(b"\r%d of many" % step, 0.0)
        assert len(splitter._pending) < 50


def test_the_end_completes_what_was_begun() -> None:
    assert LineSplitter().finish() == []
    for said, whole in (
        (b"no newline", b"no newline\n"),
        (b"\r90%\r95%", b"95%\n"),
        (b"95%\r", b"95%\n"),
    ):
        splitter = LineSplitter()
        splitter.feed(said, 0.0)
        assert splitter.finish() == [Piece("lines", whole)]
        assert splitter.finish() == []
    splitter = LineSplitter()
    splitter.feed(b"shown", 0.0)
    splitter.expire(1.0)
    assert splitter.finish() == [Piece("lines", b"\n", continues=True)]


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b"\n")), max_size=30), st.data())
def test_no_byte_is_lost_or_moved(chunks: list[bytes], data: st.DataObject) -> None:
    chunks = [chunk.replace(b"\r", b"") for chunk in chunks]
    splitter = LineSplitter()
    now, pieces = 0.0, []
    for chunk in chunks:
        now += data.draw(st.sampled_from([0.0, 0.4, 1.5]))
        pieces += splitter.expire(now) + splitter.feed(chunk, now)
    pieces += splitter.finish()
    said = b"".join(chunks)
    assert text_of(pieces) == said + b"\n" * (said != b"" and not said.endswith(b"\n"))
    assert all(piece.data.endswith(b"\n") for piece in pieces if piece.kind == "lines")


@given(st.lists(st.text(alphabet="ab\r\n", max_size=6), max_size=20))
def test_updates_come_out_the_same_however_the_bytes_are_cut(chunks: list[str]) -> None:
    said = "".join(chunks).encode()
    whole, cut = LineSplitter(), LineSplitter()
    at_once = text_of(whole.feed(said, 0.0) + whole.finish())
    pieces = [piece for chunk in chunks for piece in cut.feed(chunk.encode(), 0.0)]
    assert text_of(pieces + cut.finish()) == at_once


def test_updates_for_a_file_come_ever_more_rarely() -> None:
    """Progress bars of 8 ranks made 1.4 million lines a day in a file, two a second for ever."""
    splitter = LineSplitter(thins=True)
    shown = []
    for tick in range(4 * 3600 * 2):
        now = tick / 2
        splitter.feed(b"\r%d%%" % tick, now)
        shown += [now] * len(splitter.expire(now))
    assert [sum(start <= at < start + 60 for at in shown) for start in (0, 600)] == [
        pytest.approx(80, abs=30),
        pytest.approx(6, abs=1),
    ]
    assert sum(at >= 3 * 3600 for at in shown) == pytest.approx(60, abs=2)
    assert [piece.data for piece in splitter.feed(b"\r100%\n", 15000.0)] == [b"100%\n"]


BLOCK = b"""\
[W1123 20:56:55.780463940 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host localhost:44829 - \
retrying (try=0, timeout=1800000ms, delay=1588ms): Interrupted system call
Exception raised from delay at /__w/pytorch/torch/csrc/distributed/c10d/socket.cpp:113 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f89b3779b8d in libc10.so)
<omitting python frames>
frame #51: _start + 0x21 (0x5643a0d74081 in python)

"""
OWN = b"OSError: Interrupted system call\nException raised from here\n\n"
REFUSED = BLOCK.replace(b"Interrupted system call", b"Connection refused")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"before\n" + BLOCK + b"after\n", b"before\nafter\n"),
        (BLOCK + b"\nframe #1: of the program's\n", b"\nframe #1: of the program's\n"),
        (BLOCK[:-1] + b"epoch 3\nframe #2\n", b"epoch 3\nframe #2\n"),
        (BLOCK + BLOCK, b""),
        (REFUSED, REFUSED),
        (b"loss 0.3 " + BLOCK, b"loss 0.3 " + BLOCK),
        (
            b"OSError: Interrupted system call\nException raised from here\n\n",
            b"OSError: Interrupted system call\nException raised from here\n\n",
        ),
    ],
    ids=[
        "between",
        "once",
        "cut short",
        "two",
        "another reason",
        "not at a line's start",
        "not torch's",
    ],
)
def test_what_torch_writes_of_an_interrupted_wait_is_taken_out_and_nothing_else(
    said: bytes, shown: bytes
) -> None:
    """The signal that asks for stacks ends torch's pause between two attempts: 20 lines a rank
    stood above the report.
    """
    assert Interruptions().feed(said) == shown
    by_line = Interruptions()
    assert b"".join(by_line.feed(line) for line in said.splitlines(keepends=True)) == shown


def test_a_line_of_such_a_block_may_come_in_two_pieces() -> None:
    stream, at = Interruptions(), BLOCK.index(b"SourceLocation")
    assert (
        stream.feed(BLOCK[:at])
        + stream.feed(BLOCK[at:])
        + stream.feed(b"after")
        + stream.feed(b" it\n")
        == b"after it\n"
    )


@given(st.lists(st.binary(max_size=6), max_size=20))
def test_all_else_is_shown_as_it_is(chunks: list[bytes]) -> None:
    stream = Interruptions()
    assert b"".join(stream.feed(chunk) for chunk in chunks) == b"".join(chunks)
