"""What is seen of the program from inside a worker: where it meets the others, and errors that it catches itself.

Four functions of torch are wrapped (`init_process_group`, `destroy_process_group`, `cuda.set_device`,
`multiprocessing.start_processes`), the constructor of `TCPStore`, and where a second group finds its store; for the
collectives nothing is, since torch itself logs every exception that leaves one and we listen to that logger. `--plain` goes
without all of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import linecache
import logging
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from rallypoint.diagnosis import init_method
from rallypoint.diagnosis.evidence import CUDA_START, Meeting, Raised
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host.quick_lookups import quick_lookups
from rallypoint.launcher import channel, children, cuda, gloo, interruptions, variables, words
from rallypoint.launcher.channel import (
    AtPhase,
    Caught,
    ChildrenFailed,
    ClosesGroup,
    ForksCuda,
    Meets,
    Message,
    Noticed,
    Released,
    SetLate,
    Spawns,
)

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
FORKS_MOST = 20  # places told per worker
CAUGHT_MOST = 100  # told per worker: a program that tries again for ever must not fill the agent
RELEASE_TIMEOUT = 5.0  # seconds for the agent to give the port back; it answers in milliseconds unless it is being killed
RESOLVE_TIMEOUT = 2.0  # seconds for the name of this machine that a program gives beside the held port: torch would ask for it next
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_current: Hooks | None = None


class Hooks:
    """One worker's view, and its line to the agent."""

    def __init__(self, control: socket.socket, *, held: str, began: float, single: bool) -> None:
        self._control: socket.socket | None = control
        self._pid = os.getpid()
        self._held = held
        self._given_back = ""  # what was held, when the program has it now
        self._began = began
        self._single = single
        self._serial = 0
        self._noticed = False
        self._group_line = ""
        self._job_rank, self._job_size = (_integer(os.environ.get(name)) for name in ("RANK", "WORLD_SIZE"))  # as the launcher set them
        self._one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        self._calls = 0  # of init_process_group
        self._elsewhere: dict[str, tuple[str, str] | None] = {}  # by host: why it is not this machine, None when it is
        self._joined: Counter[int] = Counter()  # groups that this process has joined at the held socket, by their size
        self.opened_at = ""  # where `launch` was called that has opened the process group, and will close it
        self._torch_hook: object = None
        self._forks: set[str] = set()
        os.register_at_fork(before=self.forking, after_in_child=self.forget)

    def forking(self) -> None:
        """The program forks. Whether the child may use CUDA is decided now, and said only if it then tries to."""
        line, first = cuda.about_to_fork()
        if line and line not in self._forks and len(self._forks) < FORKS_MOST:
            self._forks.add(line)
            self.tell(ForksCuda(line, first))

    def forget(self) -> None:
        """In a forked child of the program: it is not the rank. The address rules still hold there, the agent hears nothing."""
        if self._control is not None:
            self._control.close()
            self._control = None
        cuda.in_forked_child(_replace)

    def tell(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Tell the agent; False when it does not listen (any more), or this process is not the rank."""
        sent: list[int] = []
        try:
            return interruptions.whole(lambda: self._post(message, fds, sent))
        except OSError as error:
            if interruptions.raised_by_handler(error):
                raise
            return False  # it is gone; the guard is about to end this process

    def _post(self, message: Message, fds: Sequence[int], sent: list[int]) -> bool:
        """`tell`, unless it is `sent`; a handler of the program's may raise."""
        if self._control is None or os.getpid() != self._pid:
            return False
        if not sent:
            channel.send(self._control, message, fds, sent=sent)
        return True

    def is_rank(self) -> bool:
        """Whether this process is the rank itself, and no child that it forked."""
        return os.getpid() == self._pid

    def preempted(self) -> bool:
        """Whether the agent has told of a notice; what a forked child knew when it was forked."""
        while self._control is not None and self.is_rank() and not self._noticed:
            try:
                message, _ = channel.receive(self._control, flags=socket.MSG_DONTWAIT)
            except OSError:  # nothing is there; or the agent is gone, and this process about to be ended
                break
            if message is None:
                break
            self._noticed = isinstance(message, Noticed)
        return self._noticed

    def stop(self) -> None:
        """The program has ended: what torch says while it is taken down is no longer the program's."""
        if variables.parts_are_loaded:  # `joining` has told what was set until then
            for name, line in variables.set_for_parts().items():
                self.tell(SetLate(name, line))
        self._serial = CAUGHT_MOST

    def excepthook_is_default(self) -> bool:
        """Whether the program left the printing of uncaught exceptions to Python (or to torch's prefixing of the same)."""
        return sys.excepthook is sys.__excepthook__ or sys.excepthook is self._torch_hook

    def call_of(self, error: BaseException) -> str:
        """The torch call that this exception, or one in its chain, left."""
        return next((one.__dict__["_rallypoint_call"] for one in words.chain(error) if "_rallypoint_call" in one.__dict__), "")

    def caught(self, error: BaseException | None, call: str) -> None:
        """An exception leaves a call of torch's. Tell it, with the except clause that will catch it, if one will."""
        if error is None or self._serial >= CAUGHT_MOST or self._control is None:
            return
        frame = words.user_frame(sys._getframe(1))

        def raised() -> Raised:
            error.__dict__["_rallypoint_call"] = call
            return words.raised(error, call=call, caught_at=words.except_line(error, frame))

        self._tell_of(error, raised)

    def clearing_up(self, *, whole: bool) -> None:
        """The program closes a group, or (`whole`) all of them, which the others hear at once. With an exception on its way they have
        lost this rank for that reason, and it may take long until it leaves the program: tell it now."""
        caller = words.current_frame(2)
        frame, error = words.user_frame(caller), words.on_its_way(caller)
        if error is None and whole and _is_initialized() and not _is_giving_up(sys.exc_info()[1]):
            by_launch = caller is not None and words.is_ours(caller.f_code.co_filename)  # with no line of the program's
            self.tell(ClosesGroup("" if by_launch else words.line_of(frame)))
        if error is None or self._serial >= CAUGHT_MOST:
            return

        def raised() -> Raised:
            return msgspec.structs.replace(words.raised(error, caught_at=words.except_line(error, frame)), on_its_way=True)

        self._tell_of(error, raised)

    def left_after(self, leaving: SystemExit) -> None:
        """`sys.exit` while an exception was handled, perhaps one that torch tells nobody of (`work.wait()`, DDP's own collectives): told
        however many were, since it is the last."""
        error = words.first_of_chain(leaving)
        if isinstance(error, Exception):
            self._tell_of(error, lambda: words.raised(error))

    def _tell_of(self, error: BaseException, raised: Callable[[], Raised]) -> None:
        """Tell of an exception, once."""
        serial, sent = self._serial + 1, list[int]()

        def tell() -> None:
            if not sent and words.is_marked(error):
                return
            try:
                if not sent:
                    self._post(Caught(serial, raised()), (), sent)
            except OSError as problem:  # the agent is gone
                if interruptions.raised_by_handler(problem):
                    raise
            words.mark(error, serial)
            self._serial = max(serial, self._serial)

        interruptions.whole(tell)

    def joining(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`init_process_group`, with the meeting point looked at first."""
        frame = words.user_frame(sys._getframe(1))
        if self.opened_at and _is_initialized():
            raise _twice(self.opened_at, words.line_of(frame))
        try:
            meeting = self._by_another_name(self._meeting(original, args, kwargs, frame))
            differs = self._differs(meeting)
            self._check(meeting)
            guarded = differs and words.except_line(_unreached(), frame) is not None
            meeting = msgspec.structs.replace(meeting, timeout=self._patience(original, args, kwargs, meeting), guarded=guarded)
            device = cuda.take_device(meeting.backend.lower())
            meeting = msgspec.structs.replace(meeting, device=device.uuid, device_name=device.name, device_how=device.how, turn=self._calls)
            self._calls += 1
            joined_before = _is_initialized()
            hook_before = sys.excepthook
            self.tell(Meets(meeting, differs))
            self.tell(AtPhase("joining"))
            for name, line in variables.set_late():
                self.tell(SetLate(name, line))
            # torch asks for the name of whom it connects to: the held store's is nobody's business.
            look_ups = quick_lookups() if self._held and not differs else contextlib.nullcontext()
            with Variable(AGENT_STORE, None if not self._held and not differs else str(not differs)), look_ups:
                result = original(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, ValueError) and _is_initialized() and self._group_line:
                error.__dict__["_rallypoint_code"] = "group-twice"
                error.__dict__["_rallypoint_why"] = (f"first opened at {self._group_line}", f"again at {words.line_of(frame)}")
            if isinstance(error, Exception):
                self.caught(error, "init_process_group")
                if self._group_line and _is_initialized():  # it was a second call, and the first one's group is as it was
                    self.tell(AtPhase("running"))
            raise
        if self._held and not differs:
            self._joined[meeting.world_size] += 1
        if not joined_before:
            self._group_line = words.line_of(frame)
        if sys.excepthook is not hook_before and hook_before in (sys.__excepthook__, self._torch_hook):
            self._torch_hook = sys.excepthook  # torch's own, which puts [rank2]: before each line; another one for each group
        self.tell(AtPhase("running"))
        return result

    def _meeting(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Meeting:
        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
        except TypeError:  # torch raises it itself, with its own words
            given = {}
        backend, rank, size = str(given.get("backend") or ""), given.get("rank", -1), given.get("world_size", -1)
        rank, size = (value if isinstance(value, int) else -1 for value in (rank, size))
        if given.get("store") is not None:
            return Meeting("store", rank=rank, world_size=size, backend=backend, line=words.line_of(frame))
        method = given.get("init_method") or "env://"
        if not isinstance(method, str):
            return Meeting("store", rank=rank, world_size=size, backend=backend, line=words.line_of(frame))
        query = parse_qs(urlsplit(method).query)  # as torch's own rendezvous handlers: what stands there counts where no argument does
        rank = rank if rank >= 0 else _integer(query.get("rank", [""])[0])
        size = size if size >= 0 else _integer(query.get("world_size", [""])[0])
        if method.startswith("env://"):
            rank = rank if rank >= 0 else _integer(os.environ.get("RANK"))
            size = size if size >= 0 else _integer(os.environ.get("WORLD_SIZE"))
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
            address = f"{host}:{port}" if host and port else ""
            line = _setting_line(frame) if address and not _same_address(address, self._held) else ""
            return Meeting("env://", address, rank, size, backend, line or words.line_of(frame))
        address = method
        if method.startswith("tcp://"):
            address = urlsplit(method).netloc.rpartition("@")[2]
        elif method.startswith("file://"):
            address = urlsplit(method).path
        return Meeting(method, address, rank, size, backend, words.line_of(frame))

    def _patience(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], meeting: Meeting) -> float:
        """Seconds that the rank gives torch to meet the others over TCP: `timeout`, or torch's default for the backend; 0: unknown."""
        if not meeting.method.startswith(("env://", "tcp://")):
            return 0.0
        try:
            given = inspect.signature(original).bind(*args, **kwargs).arguments.get("timeout")
        except TypeError:
            return 0.0
        limits: Any = sys.modules.get("torch.distributed.constants")
        usual = getattr(limits, "default_pg_nccl_timeout" if meeting.backend.lower() == "nccl" else "default_pg_timeout", None)
        seconds = getattr(given if given is not None else usual, "total_seconds", None)
        return float(seconds()) if seconds is not None else 0.0

    def prefix(self, size: int) -> str:
        """What stands before the keys of this process's next group of `size` ranks in the held store, "" for most jobs' only group.

        A group that is opened again would read its predecessor's addresses there; so would a group of all ranks that follows one of
        some. All members count the same, since they were together in each earlier group of that size."""
        number = self._joined[size]
        return f"group{number}-of-{size}" if number or size != self._job_size else ""

    def _differs(self, meeting: Meeting) -> bool:
        return (
            meeting.method.startswith(("env://", "tcp://"))
            and bool(meeting.address)
            and not _same_address(meeting.address, self._held or self._given_back)
        )

    def _by_another_name(self, meeting: Meeting) -> Meeting:
        """The held port of this machine under a name of its own (`MASTER_ADDR=socket.gethostname()`, tcp://) is the meeting at the held
        socket: `arguments_of_store` leads there. With a MASTER_ADDR that is not this machine's nobody could meet: the port is held here."""
        if not meeting.method.startswith(("env://", "tcp://")) or not self._one_node:
            return meeting
        host, _, port = meeting.address.rpartition(":")
        if port != self._held.rpartition(":")[2] or _same_address(meeting.address, self._held):
            return meeting
        if (why := self._why_elsewhere(host.strip("[]"))) is None:
            return msgspec.structs.replace(meeting, address=self._held)
        if meeting.method.startswith("tcp://"):  # another machine's port may have the same number
            return meeting
        code, sentence = why
        raise EnvironmentProblem(
            code, f"the ranks cannot meet at MASTER_ADDR={host}: {sentence}",
            why=(f"set at {meeting.line}", f"the meeting point is {self._held}, which rallypoint holds; only MASTER_ADDR was changed"),
            help=(
                ("leave MASTER_ADDR as it was set", ""),
                ("or ask this machine's resolver", f"getent hosts {host}"),
            ),
        )  # fmt: skip

    def arguments_of_store(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a `TCPStore`. At the held port of this machine, whatever name it is given, the store is there already: this one
        is a client of it, as torch makes it where an agent has the port, and goes to the one address that is listened on."""
        host, port = given.get("host_name"), given.get("port")
        if not self._held or not self._one_node or given.get("master_listen_fd") is not None or not isinstance(host, str):
            return given
        if str(port) != self._held.rpartition(":")[2]:
            return given
        if not _same_address(f"{host}:{port}", self._held) and self._why_elsewhere(host) is not None:
            return given
        return {**given, "host_name": self._held.rpartition(":")[0].strip("[]"), "is_master": False}

    def _why_elsewhere(self, host: str) -> tuple[str, str] | None:
        """As `reach.elsewhere`; each host is asked for once."""
        if host not in self._elsewhere:
            from rallypoint.host import reach

            self._elsewhere[host] = reach.elsewhere(host, RESOLVE_TIMEOUT)
        return self._elsewhere[host]

    def _check(self, meeting: Meeting) -> None:
        wrong = init_method.check(meeting.method) if meeting.method != "store" else None  # a store was given, and no URL
        if wrong is not None:
            raise UsageError(
                "init-method-invalid", wrong.headline, why=(f"given at {meeting.line}", *filter(None, (wrong.why,))),
                help=tuple((one.sentence, one.command) for one in wrong.help),
            )  # fmt: skip
        if meeting.rank >= meeting.world_size > 0 and meeting.backend.lower() not in ("mpi", "fake"):  # MPI says itself who is who
            last = meeting.world_size - 1
            raise UsageError(
                "rank-out-of-range",
                f"init_process_group was called with rank={meeting.rank} and world_size={last + 1}: the last rank of that group is {last}",
                why=(f"the launcher gave RANK={self._job_rank} and WORLD_SIZE={self._job_size}",),
                help=(
                    ("take the numbers that the launcher gave", 'rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])'),
                    ("or leave rank= and world_size= out", ""),
                ),
            )
        port = meeting.address.rpartition(":")[2]
        if meeting.method == "env://" and meeting.address and not init_method.is_port(port) and (port != "0" or meeting.world_size > 1):
            zero = "with 0 the kernel gives rank 0 a free port, and no other rank learns which"
            raise UsageError(
                "port-invalid", f"MASTER_PORT={port} is no port at which ranks can meet: 1 to 65535",
                why=(f"set at {meeting.line}", *([zero] if port == "0" else [])),
                help=(("leave MASTER_PORT as it was set: rallypoint holds a free port for init_process_group", ""),),
            )  # fmt: skip
        if meeting.method.startswith("file://"):
            self._check_file(meeting)

    def _check_file(self, meeting: Meeting) -> None:
        folder = os.path.dirname(meeting.address) or "/"
        if not os.path.isdir(folder):
            raise EnvironmentProblem(
                "init-method-invalid", f"the folder of the rendezvous file {meeting.address} does not exist",
                why=(f"given at {meeting.line}",), help=(("make the folder, the same for all ranks", f"mkdir -p {folder}"),),
            )  # fmt: skip
        try:
            found = os.stat(meeting.address)
        except FileNotFoundError:
            return
        if found.st_size and found.st_mtime < self._began:
            age = self._began - found.st_mtime
            raise EnvironmentProblem(
                "store-file-stale", f"the rendezvous file {meeting.address} is left over from an earlier run",
                why=(
                    f"it was last written {age:.0f} s before this attempt began and holds {found.st_size} bytes",
                    f"given at {meeting.line}; its ranks would look for processes that are gone",
                ),
                help=(
                    ("remove the file, or use a new name for each run", f"rm {meeting.address}"),
                    ("or leave out init_method: the launcher's own meeting point needs no file", ""),
                ),
            )  # fmt: skip

    def spawning(self) -> None:
        """The program starts ranks of its own. As the only rank it gets the held port back: its children may want the number."""
        self._spawning(words.line_of(words.user_frame(sys._getframe(1))))

    def starts_interpreter(self) -> None:
        """The program starts a process that sees nothing of ours but the environment. It may be a rank of a group of the program's own,
        which a lone rank's port is wanted for."""
        if self._single:
            self._spawning("")

    def _spawning(self, line: str) -> None:
        if self._single and (self._control is None or not self._held or _is_initialized()):
            return
        self.preempted()  # hears what may have come before the answer
        self.tell(Spawns(line))
        if not self._single or self._control is None:
            return
        self._control.settimeout(RELEASE_TIMEOUT)
        try:
            answer, _ = channel.receive(self._control)
        except TimeoutError:
            return
        finally:
            self._control.settimeout(None)
        if isinstance(answer, Released):
            self._given_back, self._held = self._held, ""

    @contextlib.contextmanager
    def following(self, start: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Arguments for `start_processes` with which the processes that the job's only rank starts tell the launcher where they are."""
        try:
            given = inspect.signature(start).bind(*args, **kwargs)
        except TypeError:  # torch raises it itself, with its own words
            given = None
        if given is None or not self._single or self._control is None or not self.is_rank():
            yield args, kwargs
            return
        from rallypoint.launcher.spawned import Spawned

        given.apply_defaults()
        with self._control.dup() as line:
            given.arguments["fn"] = Spawned(given.arguments["fn"], given.arguments["nprocs"], line, self._began)
            yield given.args, given.kwargs


def _twice(first: str, second: str) -> UsageError:
    return UsageError(
        "group-twice",
        f"init_process_group at {second}: launch(backend=...) has opened the process group already",
        why=(f"first opened for the function by launch at {first}", f"again at {second}"),
        help=(
            ("leave the second call out: the group is open when the function starts, and closed after it", ""),
            ("or open it yourself, and leave backend= out", "rallypoint.launch(train, nproc=2)"),
        ),
    )


class Variable:
    """One variable set for the length of a call; None leaves it alone."""

    def __init__(self, name: str, value: str | None) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._former = os.environ.get(self._name)
        if self._value is not None:
            os.environ[self._name] = self._value

    def __exit__(self, *_: object) -> None:
        if self._value is None:
            return
        if self._former is None:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = self._former


class _Listener(logging.Handler):
    """Hears of every exception that leaves a function of torch.distributed (`c10d_logger._exception_logger`)."""

    def emit(self, record: logging.LogRecord) -> None:
        if _current is not None and isinstance(record.msg, dict) and "error" in record.msg:
            name = str(record.msg.get("func_name", ""))
            if name != "init_process_group":  # joining() tells that one
                _current.caught(sys.exc_info()[1], name)


def attach(hooks: Hooks) -> None:
    """From now on what the wrapped functions see goes to `hooks`."""
    global _current
    _current = hooks


def preempted() -> bool:
    """Whether this job has been given notice that it will end soon: a signal of `rallypoint run --notice-signal` came, SIGUSR1 or SIGUSR2
    unless another one was named. Stays true, also in the ranks of a restart. False outside a rank, and with `--plain`.

    Ranks come to it at different moments: let them agree (`all_reduce`) before they act on it together. It costs a system call.
    """
    return _current is not None and _current.preempted()


def install() -> None:
    """Wrap torch's functions in this process; torch.distributed must have been imported."""
    import torch.distributed.distributed_c10d as c10d

    original = c10d.init_process_group
    if hasattr(original, "_rallypoint"):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return original(*args, **kwargs)
        return _current.joining(original, args, kwargs)

    init_process_group._rallypoint = True  # type: ignore[attr-defined]
    _replace("torch.distributed", original, init_process_group)
    _renew_keys()
    _lead_to_the_held_store()
    _destroy_with_care(c10d.destroy_process_group)
    _wait_with_care()
    logger = getattr(sys.modules.get("torch.distributed.c10d_logger"), "_c10d_logger", None)
    if isinstance(logger, logging.Logger):  # torch's own name, not public: without it errors that are caught are not seen
        logger.addHandler(_Listener(level=logging.DEBUG))

    import torch.cuda

    select = torch.cuda.set_device

    @functools.wraps(select)
    def set_device(*args: Any, **kwargs: Any) -> Any:
        try:
            select(*args, **kwargs)
        except Exception as error:
            if _current is not None:
                _current.caught(error, "set_device")
            raise
        cuda.chosen()

    torch.cuda.set_device = set_device
    cuda.watch_first_use(_replace, _cuda_failed)

    import torch.multiprocessing

    start: Callable[..., Any] = vars(torch.multiprocessing)["start_processes"]

    @functools.wraps(start)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return start(*args, **kwargs)
        _current.spawning()
        try:
            # A group of the program's own: its rank 0 hosts, or fails at once and does not wait for us.
            with Variable(AGENT_STORE, "False"), _current.following(start, args, kwargs) as (args, kwargs):
                return start(*args, **kwargs)
        except Exception as error:
            line = words.unguarded_line(sys._getframe(1))
            if line and getattr(error, "exit_code", 0) == 1 and kwargs.get("start_method", "spawn") != "fork":
                error.__dict__["_rallypoint_code"] = "main-unguarded"
                error.__dict__["_rallypoint_why"] = (f"{line} runs again in every new process, which imports the program anew",)
            raise

    _replace("torch.multiprocessing", start, start_processes)
    _watch_children()


def _cuda_failed(error: Exception) -> None:
    """The program's first use of CUDA has failed. In a group the others notice by themselves that this rank is gone."""
    if _current is not None and not _is_initialized():
        _current.caught(error, CUDA_START)


def _watch_children() -> None:
    children.watch(
        lambda failed, more: _current.tell(ChildrenFailed(tuple(failed), more)) if _current is not None else None,
        lambda: _current.starts_interpreter() if _current is not None else None,
    )


def _is_giving_up(error: BaseException | None) -> bool:
    """Whether this ends the program, and not well."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, Exception)


def _destroy_with_care(original: Callable[..., None]) -> None:
    import torch.distributed as dist

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        if _current is not None:
            group = args[0] if args else kwargs.get("group")
            _current.clearing_up(whole=group is None or group is dist.group.WORLD)
            gloo.let_threads_finish()
        original(*args, **kwargs)

    _replace("torch.distributed", original, destroy_process_group)


def _wait_with_care() -> None:
    """Let a signal that came in a long wait for other ranks be handled before the error that ends the wait goes on.

    After Ctrl-C the first rank that saves and leaves ends the waits of the others with "Connection closed by peer". Python runs no handler
    while an exception leaves one function after the other, so KeyboardInterrupt would come when `except KeyboardInterrupt: save()` has been
    passed. torch's own Python code runs handlers in most collectives; it has none in these two.
    """
    import torch.autograd as autograd
    import torch.distributed as dist  # as a name: it may be no attribute of `torch` yet

    work = getattr(dist, "Work", None)
    for place, name in ((work, "wait"), (autograd, "backward")):
        original = getattr(place, name, None)
        if original is not None and not hasattr(original, "_rallypoint"):
            setattr(place, name, _handling_signals(original))


def _handling_signals(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception:
            _handle_signals()
            raise

    call._rallypoint = True  # type: ignore[attr-defined]
    return call


def _handle_signals() -> None:
    """Nothing. Python runs the handlers of signals that have come when it begins a function."""


def _renew_keys() -> None:
    """A group that is opened again finds the held store as its predecessor left it; with a prefix of its own it reads none of that."""
    import torch.distributed as dist

    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")  # the attribute of that name is a function
    create: Callable[..., Any] | None = getattr(rendezvous, "_create_c10d_store", None)  # torch's own name, not public
    if create is None:
        return

    @functools.wraps(create)
    def create_store(*args: Any, **kwargs: Any) -> Any:
        store = create(*args, **kwargs)
        if _current is None or os.environ.get(AGENT_STORE) != "True":
            return store
        size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
        prefix = _current.prefix(size)
        return dist.PrefixStore(prefix, store) if prefix else store  # type: ignore[attr-defined]

    rendezvous._create_c10d_store = create_store


_STORE_ARGUMENTS = (
    "host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant", "master_listen_fd", "use_libuv",
)  # fmt: skip


def _lead_to_the_held_store() -> None:
    """Wrap the constructor of `TCPStore`, which every way to meet over TCP ends in (`env://`, `tcp://`, rpc, a program's own store)."""
    import torch.distributed as dist

    kind: Any = getattr(dist, "TCPStore", None)
    if kind is None:  # a torch that was built without it
        return
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(_STORE_ARGUMENTS, args, strict=False))
        if _current is None or len(named) < len(args) or named.keys() & kwargs.keys():  # the latter two are torch's to refuse
            original(self, *args, **kwargs)
        else:
            original(self, **_current.arguments_of_store({**named, **kwargs}))

    kind.__init__ = __init__


def _replace(package: str, original: object, replacement: object) -> None:
    """Put a function in the place of another in every loaded module of a package: `from x import f` made copies of the name."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `act` once the program has imported a module (fresh interpreters). Whoever only looks where the module is has not imported
    it, and an import that failed may be tried again."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act
        self._asking = False  # the other finders; one of the program's may ask all again

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            # Not by importlib.util: it is not there yet.
            others = [one.find_spec for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
            spec = next((found for find in others if (found := find(name, path, target)) is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._act(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install_when_imported() -> None:
    """As `install`, once the program has imported torch, all of it, and torch.distributed; nothing when it never does. Children are
    watched without it.

    Some versions of torch import torch.distributed while they are being imported themselves (2.15 does). Then `install` has to wait:
    what it imports of torch may need what torch does not have yet.
    """

    def distributed_is_there(module: ModuleType) -> None:
        if hasattr(module, "init_process_group"):  # a torch built without distributed has none
            install()

    def torch_is_there(module: ModuleType) -> None:
        _now_or_when_imported("torch.distributed", distributed_is_there)

    _now_or_when_imported("torch", torch_is_there)
    _now_or_when_imported("multiprocessing.process", lambda module: _watch_children())


def _now_or_when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


def _unreached() -> BaseException:
    """What torch raises when a meeting point is not reached; which except clause would catch that?"""
    kind = getattr(sys.modules.get("torch.distributed"), "DistNetworkError", RuntimeError)
    return kind() if isinstance(kind, type) and issubclass(kind, BaseException) else RuntimeError()


def _is_initialized() -> bool:
    module = sys.modules.get("torch.distributed")
    return bool(module is not None and module.is_initialized())


def _integer(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        return -1


def _same_address(one: str, other: str) -> bool:
    if one == other:
        return True
    (host, _, port), (held, _, held_port) = one.rpartition(":"), other.rpartition(":")
    return port == held_port and host.strip("[]") in _LOOPBACK and held.strip("[]") in _LOOPBACK


_SETTING = re.compile(
    r"""MASTER_(?:PORT|ADDR)["']\s*\]\s*=[^=]|(?:setdefault|putenv)\(\s*["']MASTER_(?:PORT|ADDR)|["']?MASTER_PORT["']?\s*[:=][^=]"""
)


def _setting_line(frame: FrameType | None) -> str:
    """`train.py:7`: the line of the program that sets MASTER_PORT or MASTER_ADDR, "" when none is found."""
    seen: set[str] = set()
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in seen and not words.is_ours(name) and "site-packages" not in name:
            seen.add(name)
            lines = linecache.getlines(name)
            hits = [number for number, text in enumerate(lines, 1) if _SETTING.search(text)]
            ports = [number for number in hits if "MASTER_PORT" in lines[number - 1]]
            if hits:
                return f"{words.shown_path(name)}:{(ports or hits)[0]}"
        frame = frame.f_back
    return ""
