"""Many streams, one text: prefixes, broken lines, and the rows at the bottom of a terminal."""

from __future__ import annotations

from rallypoint.record.line_splitter import Piece
from rallypoint.record.screen import MOST_ROWS, Screen, Sink, fit, plain, without_movements


def lines(data: bytes, continues: bool = False) -> Piece:
    return Piece("lines", data, continues)


def terminal(columns: int = 80, rows: int = 24) -> Screen:
    return Screen(lambda: (columns, rows))


def test_every_line_gets_its_prefix() -> None:
    sink = Sink()
    sink.show("a", b"[0] ", lines(b"one\n\ntwo\n"))
    assert sink.take() == b"[0] one\n[0] \n[0] two\n"
    assert sink.take() == b""


def test_a_part_is_continued_without_a_second_prefix() -> None:
    sink = Sink()
    sink.show("a", b"[0] ", Piece("part", b"name? "))
    sink.show("a", b"[0] ", lines(b"Ada\nnext\n", True))
    assert sink.take() == b"[0] name? Ada\n[0] next\n"


def test_a_part_that_somebody_came_between_is_broken_off() -> None:
    sink = Sink()
    sink.show("a", b"[0] ", Piece("part", b"name? "))
    sink.show("b", b"[1] ", lines(b"hello\n"))
    sink.show("a", b"[0] ", lines(b"Ada\n", True))
    assert sink.take() == b"[0] name? \n[1] hello\n[0] Ada\n"


def test_the_bare_end_of_a_broken_line_is_no_empty_line() -> None:
    sink = Sink()
    sink.show("a", b"[0] ", Piece("part", b"name? "))
    sink.show("b", b"[1] ", lines(b"hello\n"))
    sink.show("a", b"[0] ", lines(b"\nnext\n", True))
    assert sink.take() == b"[0] name? \n[1] hello\n[0] next\n"


def test_elsewhere_than_on_a_terminal_an_update_is_a_line_and_is_not_said_twice() -> None:
    screen = Screen()
    screen.show("a", b"[0] ", Piece("update", b"50%"))
    screen.show("b", b"[1] ", Piece("update", b"   "))
    screen.show("a", b"[0] ", Piece("update", b"100%"))
    screen.show("a", b"[0] ", lines(b"100%\ndone\n"))
    assert screen.take() == b"[0] 50%\n[0] 100%\n[0] done\n"
    screen.live("3 importing")
    assert screen.take() == b""


def test_on_a_terminal_updates_stand_in_rows_at_the_bottom_and_are_rewritten_in_place() -> None:
    screen = terminal()
    screen.show("b", b"[10] ", Piece("update", b"50%"))
    screen.show("a", b"[2] ", Piece("update", b"40%"))
    assert screen.take() == b"[2] 40%\r\n[10] 50%"
    screen.show("a", b"[2] ", Piece("update", b"60%"))
    assert screen.take() == b"\r\x1b[2K\x1b[A\x1b[2K[2] 60%\r\n[10] 50%"
    screen.show("c", b"[3] ", lines(b"hello\n"))
    assert screen.take() == b"\r\x1b[2K\x1b[A\x1b[2K[3] hello\n[2] 60%\r\n[10] 50%"
    screen.show("a", b"[2] ", lines(b"100%\n"))
    assert screen.take() == b"\r\x1b[2K\x1b[A\x1b[2K[2] 100%\n[10] 50%"
    screen.show("b", b"[10] ", lines(b"100%\n"))
    assert screen.take() == b"\r\x1b[2K[10] 100%\n"
    assert screen.take() == b""


def test_the_live_row_comes_last_and_goes_without_a_trace() -> None:
    screen = terminal()
    screen.live("rallypoint: 4 importing")
    assert screen.take() == b"rallypoint: 4 importing"
    screen.live("rallypoint: 4 importing")
    assert screen.take() == b""
    screen.show("a", b"[0] ", lines(b"hello\n"))
    assert screen.take() == b"\r\x1b[2K[0] hello\nrallypoint: 4 importing"
    screen.live("")
    assert screen.take() == b"\r\x1b[2K"


def test_rows_wait_while_somebody_is_at_a_prompt() -> None:
    screen = terminal()
    screen.live("starting")
    screen.show("a", b"[0] ", Piece("part", b"name? "))
    assert screen.take() == b"[0] name? "
    screen.show("a", b"[0] ", lines(b"Ada\n", True))
    assert screen.take() == b"Ada\nstarting"


def test_rows_fit_the_terminal() -> None:
    screen = terminal(columns=20)
    screen.show("a", b"[0] ", Piece("update", b"\x1b[32m" + "█".encode() * 100))
    assert screen.take().decode() == "[0] " + "█" * 15
    for rank in range(40):
        screen.show(rank, b"[%d] " % rank, Piece("update", b"1%"))
    rows = screen.take().split(b"\r\n")
    assert len(rows) == MOST_ROWS
    assert rows[-1] == b"... and 30 more"


def test_a_rank_cannot_move_the_cursor_of_a_shared_terminal_but_may_use_colours() -> None:
    assert without_movements(b"\x1b[2A\x1b[2K\x1b[31mred\n") == b"\x1b[31mred\x1b[0m\n"
    assert without_movements(b"\x1b[?25lhidden\x1b[H\n") == b"hidden\n"
    screen = terminal()
    screen.show("a", b"[0] ", lines(b"\x1b[Aup\n"))
    assert screen.take() == b"[0] up\n"
    screen = Screen()
    screen.show("a", b"[0] ", lines(b"\x1b[Aup\n"))
    assert screen.take() == b"[0] \x1b[Aup\n"


def test_text_for_a_report_is_safe_to_print() -> None:
    assert plain(b"\x1b[31mred\x1b[0m \xff\x00\ttab\x1b]0;title\x07") == "red \ufffd\ttab"


def test_wide_characters_count_twice() -> None:
    assert fit("日本語", 5) == "日本"
    assert fit("ab\x1b[Acd", 3) == "abc"
