"""Pump of the workers' output: one file per rank, one prefixed stream for people.

`LogPump` is one thread between the workers' pipes and everything that keeps or shows their words:
the terminal, each rank's log, torchrun's files. It reads no faster than its slowest reader takes (a
pipe that fills up holds the worker, not our memory), and it never stops reading for a reason of its
own: a file that cannot be written is given up with one line, a terminal that is gone is written to
no more. A second thread writes the files. When a disk does not answer (a network's), all files are
given up.

The loop batches by itself: while one round is written, the next one collects in the pipes.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from rallypoint.clock import Clock
from rallypoint.host.threads import OwnThread
from rallypoint.record.disk_writer import LINGER, Backlog
from rallypoint.record.kept_file import KeptFile, Trouble
from rallypoint.record.line_splitter import Interruptions, LineSplitter, Piece
from rallypoint.record.screen import Screen, Sink, plain

StreamName = Literal["stdout", "stderr", "both"]

READ_SIZE = 1 << 16
"""Bytes of one read: a pipe's usual capacity, so one call empties it."""

SWEEP_BYTES = 1 << 20
"""Bytes that are read from one pipe at most before an order is carried out: as much as a pipe can
hold (fs.pipe-max-size). A rank that never stops writing must not hold the order up."""

TAIL_LINES = 40
"""Last lines kept for the report: it shows ten, and may look for the beginning of a traceback."""

TAIL_BYTES = 2048
"""Bytes kept of each of those: a line that a person reads, 80 kB a rank in all."""

BACKLOG_BYTES = 16 << 20
"""Bytes that may wait for the disk: a second of a hundred ranks that print as fast as a terminal
takes it. More holds the ranks."""

DISK_PATIENCE = 5.0
"""Seconds in which a disk that has something to write must have written some of it. A busy one
needs tenths; meanwhile ranks that print much wait, and nobody else."""

READER_LOOK = 0.25
"""Seconds between two looks whether somebody wants us to leave while the reader of our terminal
pauses."""

CLOSE_WAITS = 2.0
"""Seconds that `close` waits for a terminal that takes nothing (Ctrl-S, a stopped pager)."""


class _KeptText(Sink):
    """Text that goes to a file; None: nowhere. `lines` are counted."""

    def __init__(self, file: KeptFile | None) -> None:
        super().__init__()
        self.file = file
        self.lines = 0


class _RankLog(_KeptText):
    """A rank's log file and the last lines it said."""

    def __init__(self, file: KeptFile | None) -> None:
        super().__init__(file)
        self.said: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.said_at = 0.0
        self.begun: dict[object, bytes] = {}

    def remember(self, stream: object, piece: Piece) -> None:
        """Keep the end of what was said."""
        if piece.kind == "part":
            begun = self.begun.get(stream, b"") + piece.data[:TAIL_BYTES]
            self.begun[stream] = begun[:TAIL_BYTES]
        elif piece.kind == "lines":
            last = piece.data[:-1].rsplit(b"\n", TAIL_LINES)
            begun = self.begun.pop(stream, b"")
            if len(last) <= TAIL_LINES:
                last[0] = begun + last[0]
            self.said.extend(line[:TAIL_BYTES] for line in last[-TAIL_LINES:])

    def forget(self) -> None:
        self.said.clear()
        self.begun.clear()


class _Filter(_KeptText):
    """torchrun's filtered_stdout.log: lines of teed streams that contain one of the texts, in one
    file."""

    def __init__(self, file: KeptFile, needles: Iterable[str], header: str | None) -> None:
        """`header`: before the local rank, in brackets; None: what the stream's lines have on the
        terminal."""
        super().__init__(file)
        self._needles = tuple(needle.encode() for needle in needles)
        self._header = header
        self._begun: dict[object, bytes] = {}

    def pick(self, stream: _Stream, piece: Piece) -> None:
        if piece.kind == "part":
            self._begun[stream] = self._begun.get(stream, b"") + piece.data[:READ_SIZE]
        elif piece.kind == "lines":
            header = stream.prefix
            if self._header is not None:
                header = f"[{self._header}{stream.local_rank}]:".encode()
            data = self._begun.pop(stream, b"") + piece.data
            for line in data.splitlines(keepends=True):
                if any(needle in line for needle in self._needles):
                    self.out.append(header + line)


class _Stream:
    """One pipe of one rank, and where its bytes go."""

    def __init__(
        self, log: _RankLog, name: StreamName, local_rank: int, fd: int, prefix: bytes
    ) -> None:
        self.log = log
        self.name = name
        self.local_rank = local_rank
        self.fd = fd
        self.prefix = prefix
        self.splitter = LineSplitter()
        self.interruptions = Interruptions()
        self.console: _Console | None = None
        self.tee: KeptFile | None = None
        self.filter: _Filter | None = None


class _Console:
    """A descriptor of ours that people read. Given up (`fd` None) when its reader is gone."""

    def __init__(self, fd: int) -> None:
        self.fd: int | None = fd
        self.screen = Screen(_size_of(fd))


class _Order(NamedTuple):
    """Call of the agent's thread. `ordered`: what the ranks wrote before it comes first."""

    ordered: bool
    action: Callable[[], None]
    done: threading.Event


class LogPump:
    """Pump of the workers' output. All methods may be called from any thread; only `settle`, `drain`
    and `close` wait.

    Its methods know a worker by its *local* rank. `ranks` are this node's ranks by local rank: a
    worker's log and its prefix have that number. `run_dir` "" keeps no log files. A line has a
    prefix when the job has `several` ranks. With a single rank and no prefix its bytes reach the
    terminal as they are, at once. `console` are the local ranks that are shown (None: all); the
    others still reach their logs. `prefixes`, by local rank, take the place of `[rank] `, and of
    the header in the files of `duplicate`.
    """

    def __init__(
        self,
        run_dir: str,
        ranks: Sequence[int],
        *,
        several: bool | None = None,
        prefixes: Sequence[str] | None = None,
        console: Collection[int] | None = None,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
    ) -> None:
        self.error: BaseException | None = None
        self.interrupts = False
        """A signal of the launcher's may have interrupted ranks: what torch writes of that is kept
        in their logs, and not shown."""
        self._clock = Clock()
        self._own_header = prefixes is not None
        self._several = len(ranks) > 1 if several is None else several
        self._run_dir = run_dir
        self._shown = range(len(ranks)) if console is None else console
        self._stdout = _Console(stdout_fd)
        # One text, and one cursor, when both lead to the same place.
        self._stderr = self._stdout if is_same_file(stdout_fd, stderr_fd) else _Console(stderr_fd)
        # What reads a pipe (`| tee log`, `| less`) may write to the terminal that has the live row.
        self._row_ends = _is_pipe(stdout_fd) and self._stderr is not self._stdout
        self._has_row = True
        self._trouble = Trouble(self._say_in_turn)
        self._lock = (
            threading.Lock()
        )  # of tails and line counts, and of the state once the thread is gone
        self._disk = Backlog(self._clock, BACKLOG_BYTES, DISK_PATIENCE, LINGER, self._give_up_files)
        self._torchruns: list[KeptFile] = []
        self._logs: dict[int, _RankLog] = {}  # by rank, also those of earlier attempts
        self._teed: list[_Stream] = []  # of this attempt, ended ones too: a note may come later
        self._filters: dict[StreamName, _Filter] = {}
        self._streams: dict[int, _Stream] = {}  # by descriptor
        self._orders: deque[_Order] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closing = False
        self._closed = False
        self._thread = OwnThread(self._run, "logs")
        self._name(ranks, prefixes)

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else "failed"
            if self.error
            else "running"
            if self._thread.is_alive()
            else "not started"
        )
        return f"<LogPump of {len(self._locals)} ranks, {len(self._streams)} open pipes: {state}>"

    @property
    def terminal(self) -> bool:
        """Tell whether `live` shows anything."""
        return self._stderr.screen.terminal

    def start(self) -> None:
        """Start the thread. What was said or attached before is done then."""
        self._thread.start()

    def _name(self, ranks: Sequence[int], prefixes: Sequence[str] | None) -> None:
        """Give each local rank the log and the prefix of its rank."""
        if prefixes is None:
            prefixes = [f"[{rank}] " if self._several else "" for rank in ranks]
        self._prefixes = [text.encode(errors="surrogateescape") for text in prefixes]
        self._alone = len(prefixes) == 1 and not any(prefixes)
        for rank in ranks:
            if rank not in self._logs:
                path = os.path.join(self._run_dir, f"rank{rank}.log") if self._run_dir else ""
                self._logs[rank] = _RankLog(KeptFile(path, self._trouble) if path else None)
        self._locals = [self._logs[rank] for rank in ranks]

    def attach(
        self,
        local_rank: int,
        stream: StreamName,
        fd: int,
        *,
        tee: int | None = None,
    ) -> None:
        """Read a worker's pipe from now on; the descriptors are the pump's, which closes them.

        "both" is a pipe that carries stdout and stderr; it is shown on stdout. `tee`: a descriptor
        that gets the same bytes unchanged.
        """
        self._submit(lambda: self._attach(local_rank, stream, fd, tee), ordered=False)

    def attempt(
        self, number: int, ranks: Sequence[int], prefixes: Sequence[str] | None = None
    ) -> None:
        """Note that the ranks start again: logs go on below a separator line, last words start
        anew. `ranks` and `prefixes` are as at the start; other ranks have other logs."""
        self._submit(lambda: self._attempt(number, ranks, prefixes))

    def duplicate(
        self, stream: StreamName, path: str, needles: Sequence[str], header: str = "default"
    ) -> None:
        """torchrun's --duplicate-std*-filters: from now on lines of teed streams attached later
        that contain one of `needles` go to `path` as well, as `[<header><local rank>]:line`."""
        self._submit(lambda: self._duplicate(stream, path, needles, header), ordered=False)

    def say(self, text: str) -> None:
        """Show a line of the launcher's own on stderr, after everything the ranks had written by
        now, on a line of its own."""
        self._submit(lambda: self._say_now(text))

    def live(self, text: str | None) -> None:
        """Show the row at the bottom of a terminal that is rewritten in place; None removes it.
        Elsewhere nothing happens."""
        if self.terminal and not self._closed:
            self._submit(lambda: self._live(text or ""), ordered=False)

    def note(self, local_rank: int, text: str) -> None:
        """Put text into a rank's log, its last words and the file of its teed stderr as if it had
        written it there; not on the terminal."""
        self._submit(lambda: self._note(local_rank, text))

    def tail(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines that a rank said in this attempt, oldest first, control sequences
        removed. Call `settle` first."""
        log = self._locals[local_rank]
        with self._lock:
            lines = [*log.said, *(text for text in log.begun.values() if text)]
        return tuple(plain(line) for line in lines[-TAIL_LINES:])

    def log_position(self, local_rank: int) -> tuple[str, int, float]:
        """Return a rank's log file ("" if none is kept, or its end is not), the number of lines in
        it now, of which `tail` is the last, and the seconds since something of the rank's was read.
        """
        log = self._locals[local_rank]
        with self._lock:
            path = log.file.path if log.file and not log.file.given_up else ""
            return path, log.lines, self._clock.monotonic() - log.said_at

    def settle(self, timeout: float) -> bool:
        """Wait until all that was in the pipes at this moment has been read, kept and shown.

        False if that took longer than `timeout` seconds: only a reader of our terminal that takes
        nothing, or a disk that does not answer, can be the reason. Nothing is lost then; the pump
        goes on.
        """
        return self._finish(self._flush, self._disk.settle, timeout)

    def drain(self, timeout: float) -> bool:
        """`settle`, then end all streams: unfinished lines are completed and the pipes closed.

        A pipe that a grandchild keeps open has no end to wait for: what it holds now is read, what
        is written later is not (the writer gets SIGPIPE). False as for `settle`.
        """
        return self._finish(self._end_all, self._disk.finish, timeout)

    def _finish(
        self, act: Callable[[], None], write: Callable[[float], bool], timeout: float
    ) -> bool:
        until = self._clock.monotonic() + timeout
        done = self._submit(act).wait(timeout)
        written = write(max(0.0, until - self._clock.monotonic()))
        return done and written and self.error is None

    def wait_for_reader(self, interrupted: Callable[[], bool]) -> None:
        """End all streams and wait until everything is shown, however long the reader of our
        terminal pauses. `interrupted` is asked again and again: true ends the wait. A disk cannot
        prolong it for more than its patience."""
        done = self._submit(self._end_all)
        while not done.wait(READER_LOOK) and self._thread.is_alive() and not interrupted():
            continue

    def close(self, timeout: float = CLOSE_WAITS) -> bool:
        """End the thread and close every file. Lines said later go straight to stderr. May be
        called twice.

        False if the terminal still took nothing after `timeout` seconds; the thread is left to end
        with the process.
        """
        if self._closed:
            return True
        if self._thread.is_alive():
            self._submit(self._end_all)
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout)
            if self._thread.is_alive() and self._disk.waits:
                self._thread.join(DISK_PATIENCE)  # it is not the terminal that it waits for
            if self._thread.is_alive():
                return False
        self._closed = True
        self._obey_the_rest()
        for stream in list(self._streams.values()):
            self._forget(stream)
        self._close_tees()
        for sink in (*self._logs.values(), *self._filters.values()):
            if sink.file:
                self._disk.submit(sink.file.close)
        self._disk.close()
        self._obey_the_rest()
        self._epoll.close()
        os.close(self._wake)
        return True

    def _obey_the_rest(self) -> None:
        """There is no thread any more: what was asked for before one was started, or by another
        thread just now."""
        while self._orders:
            order = self._orders.popleft()
            order.action()
            order.done.set()
        self._flush()

    # The thread.

    def _run(self) -> None:
        try:
            while not (self._closing and not self._orders):
                self._round()
            self._flush()
        except (
            BaseException
        ) as error:  # kept for the agent to report; the workers must not hang in write() meanwhile
            self.error = error
            self._discard_all()

    def _round(self) -> None:
        ready = self._wait()
        now = self._clock.monotonic()
        for stream in ready:
            self._read(stream, now)
        for stream in list(self._streams.values()):
            self._show(stream, stream.splitter.expire(now))
        self._obey(now)
        self._flush()

    def _wait(self) -> list[_Stream]:
        """Wait for bytes, orders or the time when something is due; return the streams that can be
        read."""
        due = [one.splitter.due for one in self._streams.values() if one.splitter.due is not None]
        timeout = max(0.0, min(due) - self._clock.monotonic()) if due else None
        fds = [fd for fd, _ in self._epoll.poll(timeout)]
        if self._wake in fds:
            os.eventfd_read(self._wake)
        return [self._streams[fd] for fd in fds if fd in self._streams]

    def _read(self, stream: _Stream, now: float) -> int:
        """Read once; 0 when there was nothing, or nothing will come any more."""
        try:
            data = os.read(stream.fd, READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError as error:
            if (
                error.errno != errno.EIO
            ):  # EIO: the other side of a terminal is closed, which is its end of file
                raise
            data = b""
        if not data:
            self._end(stream)
            return 0
        stream.log.said_at = now
        if stream.tee is not None:
            self._keep(stream.tee, data)
        if self._alone and stream.console is not None and stream.console.fd is not None:
            shown = stream.interruptions.feed(data) if self.interrupts else data
            if shown:
                stream.console.screen.raw(stream, shown)
        self._show(stream, stream.splitter.feed(data, now))
        return len(data)

    def _show(self, stream: _Stream, pieces: list[Piece]) -> None:
        for piece in pieces:
            stream.log.show(stream, b"", piece)
            with self._lock:
                stream.log.remember(stream, piece)
            if stream.filter is not None:
                stream.filter.pick(stream, piece)
            if stream.console is not None and stream.console.fd is not None and not self._alone:
                if self.interrupts and piece.kind != "update":
                    piece = piece._replace(data=stream.interruptions.feed(piece.data))
                    if not piece.data:
                        continue
                stream.console.screen.show(stream, stream.prefix, piece)

    def _obey(self, now: float) -> None:
        """Carry out the orders that have come."""
        swept = False
        # One that comes during the sweep may be about bytes that the sweep has passed by.
        for _ in range(len(self._orders)):
            order = self._orders.popleft()
            if order.ordered and not swept:
                self._sweep(now)
            order.action()
            order.done.set()
            swept = order.ordered  # an order without it may be a new pipe

    def _sweep(self, now: float) -> None:
        """Read what stands in the pipes now."""
        for stream in list(self._streams.values()):
            budget = SWEEP_BYTES
            while budget > 0 and (got := self._read(stream, now)):
                budget -= got

    def _end(self, stream: _Stream) -> None:
        self._show(stream, stream.splitter.finish())
        self._forget(stream)

    def _end_all(self) -> None:
        for stream in list(self._streams.values()):
            self._end(stream)
        self._flush()

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.fd]
        self._epoll.unregister(stream.fd)
        os.close(stream.fd)

    def _flush(self) -> None:
        """Hand over what was composed; logs first, because a terminal may keep us waiting. A disk
        does after that."""
        for sink in (*self._logs.values(), *self._filters.values()):
            text = sink.take()
            if text and sink.file is not None and not sink.file.given_up:
                with self._lock:
                    sink.lines += text.count(b"\n")
                self._keep(sink.file, text)
        if self._row_ends and self._stdout.screen.out:
            self._live("")
            self._row_ends, self._has_row = False, False
            self._write(self._stderr, self._stderr.screen.take())
        for console in (self._stdout, self._stderr):
            text = console.screen.take()
            if text and console.fd is not None:
                self._write(console, text)
        self._disk.make_room()

    def _keep(self, file: KeptFile, data: bytes) -> None:
        self._disk.submit(functools.partial(file.write, data), len(data))

    def _write(self, console: _Console, text: bytes) -> None:
        """Write all of it, waiting as long as it takes: this is what slows the ranks down to their
        reader."""
        rest = memoryview(text)
        while rest and console.fd is not None:
            try:
                rest = rest[os.write(console.fd, rest) :]
            except BlockingIOError:  # another process made the terminal non-blocking
                waiting = select.poll()
                waiting.register(console.fd, select.POLLOUT)
                waiting.poll()
            except OSError as error:
                console.fd = None
                # A reader that left (head, a closed terminal) is no news; a full disk under `>
                # file` is.
                if error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):
                    self._trouble("the output", error, "the job goes on without it")

    def _discard_all(self) -> None:
        """After a fault in here: keep reading, so that no worker blocks, and answer whoever
        waits."""
        while not (self._closing and not self._orders):
            fds = [fd for fd, _ in self._epoll.poll()]
            if self._wake in fds:
                os.eventfd_read(self._wake)
            for fd in fds:
                if fd in self._streams and not _discard(fd):
                    self._forget(self._streams[fd])
            while self._orders:
                order = self._orders.popleft()
                if not order.ordered:
                    order.action()
                order.done.set()

    # Orders: run by the thread, or by the caller when there is none.

    def _submit(self, action: Callable[[], None], *, ordered: bool = True) -> threading.Event:
        done = threading.Event()
        if self._closed:
            with self._lock:
                action()
                self._write(self._stderr, self._stderr.screen.take())
            done.set()
        else:
            self._orders.append(_Order(ordered, action, done))
            os.eventfd_write(self._wake, 1)
        return done

    def _live(self, text: str) -> None:
        if self._has_row:
            self._stderr.screen.live(text)

    def _attach(self, local_rank: int, name: StreamName, fd: int, tee: int | None) -> None:
        stream = _Stream(self._locals[local_rank], name, local_rank, fd, self._prefixes[local_rank])
        if local_rank in self._shown:
            stream.console = self._stderr if name == "stderr" else self._stdout
            stream.splitter = LineSplitter(thins=not stream.console.screen.terminal)
        if tee is not None:
            stream.tee = KeptFile(_path_of(tee), self._trouble, fd=tee)
            self._torchruns.append(stream.tee)
            stream.filter = self._filters.get(name) if local_rank in self._shown else None
            self._teed.append(stream)
        os.set_blocking(fd, False)
        self._streams[fd] = stream
        self._epoll.register(fd, select.EPOLLIN)

    def _close_tees(self) -> None:
        for stream in self._teed:
            if stream.tee is not None:
                self._disk.submit(stream.tee.close)
        self._teed.clear()

    def _attempt(self, number: int, ranks: Sequence[int], prefixes: Sequence[str] | None) -> None:
        self._close_tees()
        with self._lock:
            self._name(ranks, prefixes)
        for log in self._locals:
            log.break_line()
            log.out.append(b"--- attempt %d ---\n" % number)
            with self._lock:
                log.forget()

    def _duplicate(
        self, stream: StreamName, path: str, needles: Sequence[str], header: str
    ) -> None:
        before = self._filters.pop(stream, None)
        if before is not None and before.file is not None:
            self._disk.submit(before.file.close)
        if needles:
            file = KeptFile(path, self._trouble)
            self._filters[stream] = _Filter(file, needles, None if self._own_header else header)
            self._torchruns.append(file)

    def _note(self, local_rank: int, text: str) -> None:
        log = self._locals[local_rank]
        piece = Piece("lines", text.rstrip("\n").encode(errors="surrogateescape") + b"\n")
        log.show(log, b"", piece)
        with self._lock:
            log.remember(log, piece)
        for stream in self._teed:
            if stream.log is log and stream.name == "stderr" and stream.tee is not None:
                self._keep(stream.tee, piece.data)
                if stream.filter is not None:
                    stream.filter.pick(stream, piece)

    def _give_up_files(self) -> None:
        files = [*(log.file for log in self._logs.values() if log.file), *self._torchruns]
        if folders := dict.fromkeys(os.path.dirname(file.path) for file in files if file.give_up()):
            silent = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            lost = f"no answer within {DISK_PATIENCE:g} s, and the logs in it are not whole"
            self._trouble(" or ".join(folders), silent, lost)

    def _say_in_turn(self, text: str) -> None:
        """Show a line after everything that was submitted. From any thread."""
        if threading.current_thread() is self._thread:
            self._say_now(text)
        else:
            self._submit(lambda: self._say_now(text), ordered=False)

    def _say_now(self, text: str) -> None:
        if self._stderr.fd is not None:
            self._stderr.screen.show(
                self,
                b"",
                Piece("lines", text.rstrip("\n").encode(errors="backslashreplace") + b"\n"),
            )


def worker_columns(
    ranks: Sequence[int], stdout_fd: int = 1, *, prefixes: Sequence[str] | None = None
) -> int:
    """Columns that a worker's line has beside its prefix, for COLUMNS; 0 when our stdout is no
    terminal. `prefixes`: as for `LogPump`."""
    size = _size_of(stdout_fd)
    if size is None:
        return 0
    if prefixes is None:
        prefixes = [f"[{max(ranks)}] " if len(ranks) > 1 else ""]
    return max(20, size()[0] - max(map(len, prefixes)))


def _size_of(fd: int) -> Callable[[], tuple[int, int]] | None:
    """Return how to ask for a terminal's columns and rows; None for what cannot be rewritten in
    place."""
    try:
        if not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
            return None
    except OSError:
        return None

    def size() -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(fd)
        except OSError:  # it was closed meanwhile
            columns = rows = 0
        return columns or 80, rows or 24  # a terminal that does not know says 0

    return size


def is_same_file(one: int, other: int) -> bool:
    """Return whether two descriptors lead to one place. A file that was opened twice is not: its
    ends would overwrite each other.
    """
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return os.path.samestat(first, second) and not (
        stat.S_ISCHR(first.st_mode) and first.st_rdev == os.makedev(1, 3)
    )


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"descriptor {fd}"


def _discard(fd: int) -> bool:
    """Read and drop; False at the end."""
    try:
        return bool(os.read(fd, READ_SIZE))
    except BlockingIOError:
        return True
    except OSError:
        return False
