"""The pump against real pipes, terminals, full disks and readers that take their time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.clock import Clock
from rallypoint.record import log_pump
from rallypoint.record.log_pump import TAIL_BYTES, TAIL_LINES, LogPump, worker_columns

SOON = 20.0  # seconds: a generous deadline for what takes milliseconds


class Reader:
    """Reads the other end of a pipe or a terminal to its end, in a thread."""

    def __init__(self, fd: int) -> None:
        self.text = b""
        self._fd = fd
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        data = b"-"
        while data:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # EIO: the other side of a terminal is closed
                data = b""
            with self._changed:
                self.text += data
                self._ended = not data
                self._changed.notify_all()
        os.close(self._fd)

    def until(self, true: Callable[[bytes], object]) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: true(self.text), SOON), self.text[-2000:]
            return self.text

    def whole(self) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, SOON), "no end of file"
            return self.text


class Rig:
    """A pump whose stdout and stderr are pipes (or one terminal), and ranks that write what the
    test says.
    """

    def __init__(
        self, folder: Path, ranks: int = 2, terminal: bool = False, **options: object
    ) -> None:
        self.folder = folder
        if terminal:
            master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
            attributes = termios.tcgetattr(slave)
            attributes[1] &= ~termios.OPOST  # the bytes as they are written
            termios.tcsetattr(slave, termios.TCSANOW, attributes)
            self._ends = [slave]
            self.out = self.err = Reader(master)
            fds = (slave, slave)
        else:
            (out, fd1), (err, fd2) = os.pipe(), os.pipe()
            self._ends = [fd1, fd2]
            self.out, self.err = Reader(out), Reader(err)
            fds = (fd1, fd2)
        options |= {"stdout_fd": fds[0], "stderr_fd": fds[1]}
        self.pump = LogPump(str(folder), range(ranks), **options)  # type: ignore[arg-type]
        self.pump.start()

    def rank(self, rank: int, stream: str = "stdout", **options: object) -> int:
        read, write = os.pipe()
        self.pump.attach(rank, stream, read, **options)  # type: ignore[arg-type]
        return write

    def close(self) -> None:
        assert self.pump.close(SOON)
        for fd in self._ends:
            os.close(fd)
        self._ends = []

    def result(self) -> tuple[bytes, bytes]:
        """End everything; what stdout and stderr got."""
        self.close()
        return self.out.whole(), self.err.whole()

    def log(self, rank: int) -> bytes:
        return (self.folder / f"rank{rank}.log").read_bytes()


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(ranks: int = 2, **options: object) -> Rig:
        made.append(Rig(tmp_path, ranks, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rig in made:
        assert rig.pump.error is None
        rig.close()


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def write_later(fd: int, data: bytes) -> threading.Thread:
    """Write from a thread and close: a pipe takes 64 KiB before its writer waits."""

    def run() -> None:
        with contextlib.suppress(BrokenPipeError):
            write(fd, data)
        os.close(fd)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_lines_reach_the_right_stream_and_both_reach_the_log(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3)
    out, err, quiet = rig.rank(0), rig.rank(0, "stderr"), rig.rank(2)
    write(out, b"one\ntwo\n")
    rig.pump.settle(SOON)
    write(err, b"careful\n")
    rig.pump.settle(SOON)
    write(quiet, b"hello")
    os.close(quiet)
    assert rig.pump.drain(SOON)
    assert rig.result() == (b"[0] one\n[0] two\n[2] hello\n", b"[0] careful\n")
    assert rig.log(0) == b"one\ntwo\ncareful\n"
    assert rig.log(1) == b""
    assert rig.log(2) == b"hello\n"
    assert rig.pump.log_position(0)[:2] == (str(rig.folder / "rank0.log"), 3)
    assert rig.pump.tail(0) == ("one", "two", "careful")
    assert (rig.folder / "rank0.log").stat().st_mode & 0o777 == 0o600


def test_one_rank_has_no_prefix_and_its_bytes_come_as_they_are(rigs: Callable[..., Rig]) -> None:
    rig = rigs(1)
    fd = rig.rank(0)
    write(fd, b"name? ")
    rig.out.until(lambda text: text == b"name? ")
    write(fd, b"\r50%\r100%\n\xff\x00")
    rig.out.until(lambda text: text.endswith(b"\x00"))
    os.close(fd)
    assert rig.result()[0] == b"name? \r50%\r100%\n\xff\x00"
    assert rig.log(0).endswith(b"100%\n\xff\x00\n")


def test_four_ranks_at_full_speed_lose_and_mix_nothing(rigs: Callable[..., Rig]) -> None:
    rig = rigs(4)
    texts = {(rank, stream): [b"%s of %d says %d " % (stream.encode(), rank, i) + b"x" * (i * 7 % 90) for i in range(8000)]
             for rank in range(4) for stream in ("stdout", "stderr")}  # fmt: skip
    threads = [
        write_later(rig.rank(rank, stream), b"\n".join(text) + b"\n")
        for (rank, stream), text in texts.items()
    ]
    for thread in threads:
        thread.join(SOON)
    assert rig.pump.drain(SOON)
    out, err = rig.result()
    for (rank, stream), text in texts.items():
        prefix = b"[%d] " % rank
        shown = (out if stream == "stdout" else err).splitlines()
        assert [line[4:] for line in shown if line.startswith(prefix)] == text
        assert sorted(rig.log(rank).splitlines()) == sorted(
            texts[rank, "stdout"] + texts[rank, "stderr"]
        )
    assert len(out.splitlines()) == len(err.splitlines()) == 4 * 8000
    assert rig.pump.log_position(3)[1] == 16000


def test_binary_junk_passes_unharmed(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    rig = rigs(2)
    junk = os.urandom(300_000).replace(b"\r", b"") + b"\n"
    write_later(rig.rank(1, "both"), junk).join(SOON)
    assert rig.pump.drain(SOON)
    assert rig.result()[0] == b"".join(b"[1] " + line + b"\n" for line in junk[:-1].split(b"\n"))
    assert rig.log(1) == junk
    assert all(isinstance(line, str) for line in rig.pump.tail(1))


def test_a_10_mb_line_is_kept_whole_while_another_rank_talks(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    long = b"y" * 10_000_000
    talk = b"".join(b"line %d\n" % i for i in range(20_000))
    threads = [write_later(rig.rank(0), long + b"\n"), write_later(rig.rank(1), talk)]
    for thread in threads:
        thread.join(SOON)
    assert rig.pump.drain(SOON)
    shown = rig.result()[0]
    assert shown.count(b"y") == 10_000_000
    assert shown.count(b"[1] line") == 20_000
    assert rig.log(0) == long + b"\n"
    assert rig.log(1) == talk
    assert rig.pump.tail(0) == ("y" * TAIL_BYTES,)


def test_a_long_line_that_stops_halfway_does_not_hold_the_others_up(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(2)
    stuck, other = rig.rank(0), rig.rank(1)
    write_later(os.dup(stuck), b"y" * 2_000_000).join(SOON)
    rig.out.until(lambda text: text.count(b"y") == 2_000_000)
    write(other, b"hello\n")
    shown = rig.out.until(lambda text: text.endswith(b"\n[1] hello\n"))
    assert shown == b"[0] " + b"y" * 2_000_000 + b"\n[1] hello\n"
    write(stuck, b"rest\n")
    os.close(stuck)
    assert rig.result()[0] == shown + b"[0] rest\n"
    assert rig.log(0) == b"y" * 2_000_000 + b"rest\n"


def test_a_slow_reader_holds_the_ranks_and_not_our_memory(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    err = os.open(os.devnull, os.O_WRONLY)
    pump = LogPump(str(tmp_path), (0, 1), stdout_fd=write_end, stderr_fd=err)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(0, "stdout", mine)
    total, sent = 20_000_000, 0
    os.set_blocking(theirs, False)
    line = b"z" * 99 + b"\n"
    quiet_since = time.monotonic()
    while (
        sent < total and time.monotonic() - quiet_since < 0.5
    ):  # nobody reads: the pump must stop taking
        with contextlib.suppress(BlockingIOError):
            sent += os.write(theirs, line * 100)
            quiet_since = time.monotonic()
    assert sent < 1_000_000
    assert not pump.settle(0.05)
    reader = Reader(read)
    os.set_blocking(theirs, True)
    write(theirs, b"\n")
    os.close(theirs)
    assert pump.drain(SOON)
    assert pump.close(SOON)
    os.close(write_end)
    os.close(err)
    assert reader.whole().replace(b"[0] ", b"").replace(b"\n", b"").count(b"z") == (
        tmp_path / "rank0.log"
    ).read_bytes().count(b"z")


def test_a_reader_that_never_reads_does_not_keep_us_from_leaving(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    pump = LogPump("", (0, 1), stdout_fd=write_end, stderr_fd=write_end)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(0, "stdout", mine)
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"full ")
    os.set_blocking(write_end, True)
    write(theirs, b"line\n")
    os.close(theirs)
    assert not pump.drain(0.2)
    assert not pump.close(0.2)
    reader = Reader(read)  # now the thread can end
    assert pump.close(SOON)
    os.close(write_end)
    assert reader.whole().endswith(b"full [0] line\n")


def test_a_terminal_made_non_blocking_by_someone_loses_nothing(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    os.set_blocking(write_end, False)
    pump = LogPump("", (0, 1), stdout_fd=write_end, stderr_fd=write_end)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(1, "stdout", mine)
    thread = write_later(theirs, b"line\n" * 200_000)
    reader = Reader(read)
    thread.join(SOON)
    assert pump.drain(SOON)
    assert pump.error is None
    pump.close()
    os.close(write_end)
    assert reader.whole() == b"[1] line\n" * 200_000


def test_when_the_reader_has_gone_the_logs_go_on(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    os.close(read)
    err_read, err = os.pipe()
    pump = LogPump(str(tmp_path), (0, 1), stdout_fd=write_end, stderr_fd=err)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(0, "stdout", mine)
    write_later(theirs, b"line\n" * 50_000).join(SOON)
    assert pump.drain(SOON)
    pump.close()
    os.close(err)
    assert (tmp_path / "rank0.log").read_bytes() == b"line\n" * 50_000
    assert Reader(err_read).whole() == b""
    os.close(write_end)


def test_a_full_disk_costs_the_log_and_one_line(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        (tmp_path / f"rank{rank}.log").symlink_to("/dev/full")
    rig = rigs(3)
    fds = [rig.rank(rank) for rank in range(3)]
    for _ in range(3):
        write(fds[2], b"hello\n")
        assert rig.pump.settle(SOON)
    write(fds[0], b"hello\n")
    assert rig.pump.settle(SOON)
    write(fds[1], b"hello\n")
    assert rig.pump.settle(SOON)
    for fd in fds:
        os.close(fd)
    out, err = rig.result()
    assert out.count(b"hello") == 5
    full = b": No space left on device; its output is no longer kept"
    assert err == (
        b"rallypoint: cannot write %s/rank2.log" % bytes(tmp_path) + full + b"\n"
        b"rallypoint: cannot write %s/rank0.log either"
        % bytes(tmp_path)
        + full
        + b". Further such files are not named\n"
    )
    assert rig.pump.tail(2) == ("hello",) * 3
    assert rig.pump.log_position(2)[0] == ""  # its last words are not there


def _lines(rank: int, number: int) -> bytes:
    return b"".join(b"rank %d line %07d\n" % (rank, i) for i in range(number))


@pytest.mark.parametrize("backlog", [1 << 30, 1 << 16])
def test_a_disk_that_gives_no_answer_costs_the_log_and_one_line(
    rigs: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    """A FIFO that nobody reads, as the kernel's answer of a file server that is gone: write() does
    not return.
    """
    monkeypatch.setattr(log_pump, "DISK_PATIENCE", 0.5)
    monkeypatch.setattr(log_pump, "BACKLOG_BYTES", backlog)
    os.mkfifo(tmp_path / "rank0.log")
    held = os.open(tmp_path / "rank0.log", os.O_RDWR)
    rig = rigs(2)
    writers = [write_later(rig.rank(rank), _lines(rank, 20_000)) for rank in range(2)]
    for writer in writers:
        writer.join(SOON)
    assert rig.pump.drain(SOON)
    out, err = rig.result()
    assert sorted(out.splitlines()) == sorted(
        b"[%d] %s" % (rank, line) for rank in range(2) for line in _lines(rank, 20_000).splitlines()
    )
    reason = b"Connection timed out; no answer within 0.5 s, and the logs in it are not whole\n"
    assert err == b"rallypoint: cannot write %s: " % bytes(tmp_path) + reason
    assert rig.pump.log_position(0)[0] == ""
    assert rig.pump.tail(0)[-1] == "rank 0 line 0019999"
    os.set_blocking(held, False)
    while len(os.read(held, 1 << 20)) == 1 << 20:  # its writer's thread can end
        continue
    os.close(held)


def test_torchruns_files_on_a_disk_that_gives_no_answer(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pump, "DISK_PATIENCE", 3.0)
    rig = rigs(1, prefixes=["[0] "])
    held, tee = os.pipe()
    write_later(rig.rank(0, tee=tee), _lines(0, 20_000)).join(SOON)
    assert rig.pump.settle(SOON)
    out, err = rig.result()
    assert out.count(b"\n") == 20_000
    assert (
        err.count(b"no answer within 3 s, and the logs in it are not whole\n")
        == err.count(b"\n")
        == 1
    )
    os.close(held)


def test_a_slow_disk_holds_the_ranks_and_loses_nothing(
    rigs: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pump, "BACKLOG_BYTES", 1 << 16)
    os.mkfifo(tmp_path / "rank0.log")
    held = os.open(tmp_path / "rank0.log", os.O_RDWR)
    rig = rigs(1, prefixes=["[0] "])
    writer = write_later(rig.rank(0), _lines(0, 40_000))
    kept = b""
    while len(kept) < len(_lines(0, 40_000)):
        assert rig.pump._disk._bytes <= (1 << 16) + 4 * log_pump.READ_SIZE
        kept += os.read(held, 50_000)
    assert kept == _lines(0, 40_000)
    writer.join(SOON)
    assert rig.pump.drain(SOON)
    assert rig.result()[1] == b""
    os.close(held)


def test_output_into_a_full_disk_is_given_up_with_a_line(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    err_read, err = os.pipe()
    pump = LogPump(str(tmp_path), (0, 1), stdout_fd=full, stderr_fd=err)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(0, "stdout", mine)
    write(theirs, b"hello\n")
    assert pump.settle(SOON)
    write(theirs, b"again\n")
    os.close(theirs)
    assert pump.drain(SOON)
    pump.close()
    os.close(err)
    os.close(full)
    assert (
        Reader(err_read).whole()
        == b"rallypoint: cannot write the output: No space left on device; the job goes on without it\n"
    )
    assert (tmp_path / "rank0.log").read_bytes() == b"hello\nagain\n"


def test_a_prompt_is_shown_without_its_newline_and_continued(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    fd, other = rig.rank(0), rig.rank(1)
    write(fd, b"name? ")
    rig.out.until(lambda text: text == b"[0] name? ")
    write(fd, b"Ada\n")
    rig.out.until(lambda text: text == b"[0] name? Ada\n")
    write(fd, b"age? ")
    rig.out.until(lambda text: text.endswith(b"[0] age? "))
    write(other, b"hello\n")
    rig.out.until(lambda text: text.endswith(b"[1] hello\n"))
    write(fd, b"7\n")
    assert rig.pump.settle(SOON)
    os.close(fd)
    os.close(other)
    assert rig.result()[0] == b"[0] name? Ada\n[0] age? \n[1] hello\n[0] 7\n"
    assert rig.log(0) == b"name? Ada\nage? 7\n"


PROGRESS = """
import sys, time
for step in range(101):
    sys.stderr.write("\\r%3d%%|%s| %d/100" % (step, "#" * (step // 10), step))
    sys.stderr.flush()
    time.sleep(0.015)
sys.stderr.write("\\n")
"""


def progress_of(rig: Rig, ranks: int) -> None:
    children = []
    for rank in range(ranks):
        fd = rig.rank(rank, "stderr")
        children.append(subprocess.Popen([sys.executable, "-c", PROGRESS], stderr=fd))
        os.close(fd)
    try:
        assert [child.wait(SOON) for child in children] == [0] * ranks
    finally:
        for child in children:  # one that has not ended, since this has failed
            child.kill()
            child.wait()
    assert rig.pump.drain(SOON)


def test_progress_bars_are_thinned_out_and_only_the_last_is_kept(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    clock = Clock()
    progress_of(rig, 2)
    shown = rig.result()[1]
    last = b"100%|##########| 100/100"
    for rank in (0, 1):
        mine = re.findall(rb"\[%d\] (.*)\n" % rank, shown)
        assert 2 <= len(mine) <= 4 + 3 * clock.elapsed()  # two a second; of a hundred
        assert mine[-1] == last
        assert mine.count(last) == 1
        assert rig.log(rank) == last + b"\n"
    assert all(re.fullmatch(rb"\[[01]\] .*", line) for line in shown.splitlines())
    assert rig.pump.tail(0) == (last.decode(),)


def test_progress_bars_on_a_terminal_stay_in_their_rows(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    rig = rigs(4, terminal=True)
    progress_of(rig, 4)
    rig.close()
    screen = emulate(rig.out.whole())
    assert sorted(screen) == [f"[{rank}] 100%|##########| 100/100" for rank in range(4)]


def emulate(text: bytes) -> list[str]:
    """The rows that a terminal shows after these bytes: newline, \\r, cursor up and erase line are
    all that we use.
    """
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n|\r", text.decode()):
        if token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        elif token == "\r":
            column = 0
        elif token == "\x1b[A":
            row -= 1
            assert row >= 0
        elif token == "\x1b[2K":
            rows[row] = ""
        else:
            assert not token.startswith("\x1b"), token
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
            column += 1
    return [each for each in rows if each]


def test_the_live_line_stands_below_all_others_and_disappears(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    rig = rigs(2, terminal=True)
    assert rig.pump.terminal
    fd = rig.rank(0)
    rig.pump.live("rallypoint: 2 ranks · 2 importing")
    rig.out.until(lambda text: b"2 importing" in text)
    write(fd, b"one\n")
    assert rig.pump.settle(SOON)
    assert emulate(rig.out.until(lambda text: b"one" in text and text.endswith(b"importing"))) == [
        "[0] one",
        "rallypoint: 2 ranks · 2 importing",
    ]
    rig.pump.say("rallypoint: a word")
    rig.pump.live(None)
    os.close(fd)
    rig.close()
    assert emulate(rig.out.whole()) == ["[0] one", "rallypoint: a word"]


def test_the_live_row_ends_before_a_line_goes_through_a_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`| tee log` wrote behind the row, and `| less` lost its prompt by the row's next update."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    read, piped = os.pipe()
    out, err = Reader(read), Reader(master)
    pump = LogPump(str(tmp_path), (0, 1), stdout_fd=piped, stderr_fd=slave)
    pump.start()
    theirs, mine = os.pipe()
    pump.attach(0, "stdout", theirs)
    pump.live("rallypoint: 2 importing")
    err.until(lambda text: b"2 importing" in text)
    write(mine, b"one\n")
    out.until(lambda text: text == b"[0] one\n")
    pump.live("rallypoint: 1 importing")
    pump.say("rallypoint: a word")
    os.close(mine)
    assert pump.close(SOON)
    os.close(piped)
    os.close(slave)
    out.whole()
    assert b"1 importing" not in err.whole()
    assert emulate(err.whole()) == ["rallypoint: a word"]


def test_nothing_is_rewritten_where_there_is_no_terminal(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(2)
    assert not rig.pump.terminal
    rig.pump.live("rallypoint: 2 importing")
    assert rig.result() == (b"", b"")
    monkeypatch.setenv("TERM", "dumb")
    rig = rigs(2, terminal=True)
    assert not rig.pump.terminal


def test_a_terminal_that_disappears_is_no_fault(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    pump = LogPump(str(tmp_path), (0, 1), stdout_fd=slave, stderr_fd=slave)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(0, "stdout", mine)
    os.close(master)
    write(theirs, b"hello\n")
    os.close(theirs)
    assert pump.drain(SOON)
    assert pump.error is None
    pump.close()
    os.close(slave)
    assert (tmp_path / "rank0.log").read_bytes() == b"hello\n"


def test_our_own_line_comes_after_what_the_ranks_had_written(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    fd = rig.rank(1, "stderr")
    for i in range(200):
        write(fd, b"line %d\n" % i * 20)
        rig.pump.say(f"rallypoint: after {i}")
    os.close(fd)
    shown = rig.result()[1].decode().splitlines()
    at = {line: number for number, line in enumerate(shown)}
    for i in range(200):
        assert at[f"rallypoint: after {i}"] > at[f"[1] line {i}"]
    assert len(shown) == 200 * 21


def test_a_pipe_attached_between_two_words_is_read_between_them(tmp_path: Path) -> None:
    read, fd = os.pipe()
    pump = LogPump("", (0, 1), stdout_fd=fd, stderr_fd=fd)
    mine, theirs = os.pipe()
    write(theirs, b"hello\n")
    os.close(theirs)
    pump.say("rallypoint: before")
    pump.attach(0, "stdout", mine)
    pump.say("rallypoint: after")
    pump.start()
    assert pump.close(SOON)
    os.close(fd)
    assert Reader(read).whole() == b"rallypoint: before\n[0] hello\nrallypoint: after\n"


def test_a_word_that_comes_while_the_pipes_are_read_waits_for_the_next_look(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(2)
    fd = rig.rank(0, "stderr")
    look = rig.pump._sweep

    def look_and_go_on(now: float) -> None:
        look(now)
        monkeypatch.setattr(rig.pump, "_sweep", look)
        write(fd, b"late\n")
        rig.pump.say("rallypoint: after late")

    monkeypatch.setattr(rig.pump, "_sweep", look_and_go_on)
    rig.pump.say("rallypoint: first")
    rig.err.until(lambda text: b"after late" in text)
    os.close(fd)
    assert rig.result()[1] == b"rallypoint: first\n[0] late\nrallypoint: after late\n"


def test_signals_are_left_to_the_main_thread(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    assert rig.pump.settle(SOON)
    status = Path(f"/proc/self/task/{rig.pump._thread.native_id}/status").read_text()
    blocked = int(re.search(r"SigBlk:\s*(\w+)", status).group(1), 16)  # type: ignore[union-attr]
    assert blocked & 1 << (signal.SIGINT - 1)
    assert blocked & 1 << (signal.SIGTERM - 1)


def test_a_word_after_the_end_still_reaches_stderr(tmp_path: Path) -> None:
    read, fd = os.pipe()
    pump = LogPump("", (0,), stdout_fd=fd, stderr_fd=fd)
    pump.start()
    pump.close()
    pump.say("rallypoint: last word")
    os.close(fd)
    assert Reader(read).whole() == b"rallypoint: last word\n"


def test_a_pipe_that_a_grandchild_keeps_open_does_not_hold_up_the_end(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(2)
    fd = rig.rank(0)
    child = subprocess.Popen(["/bin/sh", "-c", "echo hello; sleep 60 & exec true"], stdout=fd)
    assert child.wait(SOON) == 0
    begun = time.monotonic()
    assert rig.pump.drain(SOON)
    assert time.monotonic() - begun < 5
    assert rig.pump.tail(0) == ("hello",)
    os.close(fd)
    assert rig.result()[0] == b"[0] hello\n"


def test_a_restart_goes_on_in_the_same_log_below_a_line(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    first = rig.rank(0)
    write(first, b"one\n")
    os.close(first)
    assert rig.pump.settle(SOON)
    rig.pump.attempt(1, range(2))
    second = rig.rank(0)
    write(second, b"two\n")
    os.close(second)
    assert rig.pump.drain(SOON)
    assert rig.pump.tail(0) == ("two",)
    assert rig.pump.log_position(0)[1] == 3
    rig.close()
    assert rig.log(0) == b"one\n--- attempt 1 ---\ntwo\n"


def test_a_note_is_kept_as_if_the_rank_had_said_it(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    rig.pump.note(1, "Traceback\nValueError: \udcff")
    assert rig.pump.settle(SOON)
    assert rig.pump.tail(1) == ("Traceback", "ValueError: \ufffd")
    assert rig.result() == (b"", b"")
    assert rig.log(1) == b"Traceback\nValueError: \xff\n"


def test_the_last_words_are_few_and_the_newest(rigs: Callable[..., Rig]) -> None:
    rig = rigs(2)
    fd = rig.rank(0)
    for i in range(5):
        write(fd, b"".join(b"line %d\n" % (i * 30 + j) for j in range(30)))
        assert rig.pump.settle(SOON)
    os.close(fd)
    assert rig.pump.tail(0) == tuple(f"line {i}" for i in range(150 - TAIL_LINES, 150))


def test_only_chosen_local_ranks_are_shown_and_all_are_kept(rigs: Callable[..., Rig]) -> None:
    rig = rigs(3, console={1})
    for rank in range(3):
        write_later(rig.rank(rank), b"hello\n").join(SOON)
    assert rig.pump.drain(SOON)
    assert rig.result()[0] == b"[1] hello\n"
    assert [rig.log(rank) for rank in range(3)] == [b"hello\n"] * 3


def test_tee_gets_the_same_bytes_and_the_filter_the_lines_that_match(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    rig = rigs(2)
    rig.pump.duplicate("stdout", str(tmp_path / "filtered_stdout.log"), ["apple", "pear"])
    teed = os.open(tmp_path / "stdout.log", os.O_WRONLY | os.O_CREAT)
    write_later(rig.rank(1, tee=teed), b"\rbar\ran apple\nno\r\na pe").join(SOON)
    write_later(rig.rank(0), b"an apple, not teed\n").join(SOON)
    write_later(rig.rank(1, "stderr"), b"an apple on stderr\n").join(SOON)
    assert rig.pump.drain(SOON)
    rig.pump.duplicate("stdout", str(tmp_path / "second"), ["x"])
    out, err = rig.result()
    assert (tmp_path / "stdout.log").read_bytes() == b"\rbar\ran apple\nno\r\na pe"
    assert (tmp_path / "filtered_stdout.log").read_bytes() == b"[default1]:an apple\n"
    assert b"[1] an apple\n[1] no\n" in out
    assert err == b"[1] an apple on stderr\n"


def test_a_note_after_the_end_of_a_teed_stderr_is_in_its_file(
    rigs: Callable[..., Rig], tmp_path: Path
) -> None:
    """A traceback comes by the control channel; the rank's pipe may have been read to its end
    before, and then the file of `-t` lacked the traceback.
    """
    rig = rigs(2)
    teed = os.open(tmp_path / "stderr.log", os.O_WRONLY | os.O_CREAT)
    write_later(rig.rank(1, "stderr", tee=teed), b"before\n").join(SOON)
    assert rig.pump.settle(SOON)
    assert not rig.pump._streams
    rig.pump.note(1, "ValueError: nan")
    assert rig.pump.drain(SOON)
    assert (tmp_path / "stderr.log").read_bytes() == b"before\nValueError: nan\n"
    rig.pump.attempt(1, range(2))
    rig.pump.note(1, "of the next attempt")
    rig.close()
    assert (tmp_path / "stderr.log").read_bytes() == b"before\nValueError: nan\n"


def test_the_ranks_of_another_node_have_their_own_numbers(tmp_path: Path) -> None:
    read, fd = os.pipe()
    pump = LogPump(str(tmp_path), (12,), several=True, stdout_fd=fd, stderr_fd=fd)
    pump.start()
    for number, rank in ((0, 12), (1, 4)):
        if number:
            pump.attempt(number, (rank,))
        theirs, ours = os.pipe()
        pump.attach(0, "stdout", theirs)
        write(ours, b"attempt %d\n" % number)
        os.close(ours)
        assert pump.settle(SOON)
        assert pump.tail(0) == (f"attempt {number}",)
        assert pump.log_position(0)[0] == str(tmp_path / f"rank{rank}.log")
    assert pump.close(SOON)
    os.close(fd)
    assert Reader(read).whole() == b"[12] attempt 0\n[4] attempt 1\n"
    assert (tmp_path / "rank12.log").read_bytes() == b"attempt 0\n"
    assert (tmp_path / "rank4.log").read_bytes() == b"--- attempt 1 ---\nattempt 1\n"


def test_a_prefix_of_the_users_or_none(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    """Every line had `[0] ` in front, whatever torchrun's template said, and a JSON reader behind
    the pipe could not read it.
    """
    rig = rigs(2, prefixes=("", "<b> "))
    rig.pump.duplicate("stdout", str(tmp_path / "filtered"), ["{"])
    write_later(rig.rank(0), b'{"loss": 1}\n').join(SOON)
    teed = os.open(tmp_path / "stdout.log", os.O_WRONLY | os.O_CREAT)
    write_later(rig.rank(1, tee=teed), b'{"loss": 2}\n').join(SOON)
    assert sorted(rig.result()[0].splitlines()) == [b'<b> {"loss": 2}', b'{"loss": 1}']
    assert (tmp_path / "filtered").read_bytes() == b'<b> {"loss": 2}\n'
    assert rig.log(1) == b'{"loss": 2}\n'


def test_a_fault_of_ours_is_kept_and_the_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fd = os.pipe()
    pump = LogPump(str(tmp_path), (0, 1), stdout_fd=fd, stderr_fd=fd)
    monkeypatch.setattr(pump, "_show", lambda stream, pieces: 1 // 0)
    pump.start()
    mine, theirs = os.pipe()
    pump.attach(0, "stdout", mine)
    write_later(theirs, b"line\n" * 100_000).join(SOON)  # ends only if somebody reads
    assert not pump.settle(SOON)
    assert isinstance(pump.error, ZeroDivisionError)
    assert "failed" in repr(pump)
    assert pump.close(SOON)
    os.close(fd)
    os.close(read)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    null = os.open(os.devnull, os.O_WRONLY)
    pump = LogPump(str(tmp_path), range(8), stdout_fd=null, stderr_fd=null)
    pump.start()
    ends = []
    for rank in range(8):
        mine, theirs = os.pipe()
        pump.attach(rank, "stdout", mine)
        ends.append(theirs)
    assert pump.drain(SOON)
    assert pump.close()
    assert pump.close()
    for fd in [null, *ends]:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_worker_has_the_columns_beside_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    assert worker_columns(range(1), slave) == 100
    assert worker_columns(range(16), slave) == 95
    os.close(master)
    os.close(slave)
    with open(os.devnull) as null:
        assert worker_columns(range(4), null.fileno()) == 0


def test_a_reader_that_pauses_gets_everything_in_the_end(tmp_path: Path) -> None:
    """With `| less`, or Ctrl-S, a job that failed left after ten seconds, and its report was never
    shown.
    """
    read, write_end = os.pipe()
    pump = LogPump("", (0, 1), stdout_fd=write_end, stderr_fd=write_end)
    pump.start()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"full ")
    os.set_blocking(write_end, True)
    pump.say("the report")
    looks: list[bool] = []
    readers: list[Reader] = []

    def interrupted() -> bool:
        looks.append(True)
        if len(looks) == 2:
            readers.append(Reader(read))  # the reader goes on
        return False

    pump.wait_for_reader(interrupted)
    assert len(looks) >= 2
    assert pump.close(SOON)
    os.close(write_end)
    assert readers[0].whole().endswith(b"full the report\n")


def test_a_wait_for_a_reader_can_be_ended(tmp_path: Path) -> None:
    read, write_end = os.pipe()
    pump = LogPump("", (0, 1), stdout_fd=write_end, stderr_fd=write_end)
    pump.start()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"full ")
    os.set_blocking(write_end, True)
    pump.say("the report")
    pump.wait_for_reader(lambda: True)
    Reader(read)  # now the thread can end
    assert pump.close(SOON)
    os.close(write_end)
