"""Situations with a name, and what must be said of each: code, ranks, confidence, headline, exit
status, and the whole text.

The texts are tests/stories/reports/<name>.txt; `UPDATE_STORIES=1 pytest` writes them, a person
reads them.
"""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import late_ranks, rank_kinds, render, stacks
from rallypoint.diagnosis.catalogue import CATALOGUE
from rallypoint.diagnosis.classify import is_consequence
from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    HelperLost,
    JobEvidence,
    Meeting,
    MemoryEvidence,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.reachability import ANSWER
from rallypoint.diagnosis.root_cause import News, cause_first, diagnose, news
from rallypoint.host.probe import Blocked, Outcome, Reached, Tried

from ..search import tries

STORIES = pathlib.Path(__file__).parent.parent / "stories" / "reports"

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21933. This is "
    "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF!"
)
RESET = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:21933: Connection reset by peer. This "
    "is typically caused by a remote worker hanging or bugs in the application."
)
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"
MAIN = Frame("/home/ada/exp/train.py", 120, "<module>", "main()")
STEP = Frame("/home/ada/exp/train.py", 88, "train_step", "dist.all_reduce(loss)")
ALL_REDUCE = (
    MAIN,
    STEP,
    Frame(f"{TORCH}/c10d_logger.py", 81, "wrapper", "return func(*args, **kwargs)"),
    Frame(f"{TORCH}/distributed_c10d.py", 2936, "all_reduce", "work.wait()"),
)
BROADCAST = (
    MAIN,
    Frame("/home/ada/exp/train.py", 93, "train_step", "dist.broadcast(x, 0)"),
    Frame(f"{TORCH}/distributed_c10d.py", 2700, "broadcast", "work.wait()"),
)
RECEIVING = (
    MAIN,
    Frame("/home/ada/exp/train.py", 55, "next_stage", "dist.recv(x, 0)"),
    Frame(f"{TORCH}/c10d_logger.py", 83, "wrapper"),
    Frame(f"{TORCH}/distributed_c10d.py", 2700, "recv", "work.wait()"),
)
BARRIER = (MAIN, Frame(f"{TORCH}/distributed_c10d.py", 5120, "barrier", "work.wait()"))
JOINING = (MAIN, Frame(f"{TORCH}/distributed_c10d.py", 1899, "init_process_group", "_new_group()"))
IN_FINALLY = (
    Frame("/home/ada/exp/train.py", 122, "<module>", "dist.barrier()"),
    Frame(f"{TORCH}/distributed_c10d.py", 5120, "barrier", "work.wait()"),
)
BACKWARD = (
    MAIN,
    Frame("/home/ada/exp/train.py", 85, "train_step", "loss.backward()"),
    Frame("/venv/lib/python3.11/site-packages/torch/_tensor.py", 627, "backward"),
    Frame(
        "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward"
    ),
)
LOADING = (MAIN, Frame("/home/ada/exp/data.py", 12, "build_index", "time.sleep(60)"))


def raised(
    kind: str, message: str, frames: tuple[Frame, ...] = (MAIN, STEP), **more: Any
) -> Raised:
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        lines += [
            f'  File "{frame.file}", line {frame.line}, in {frame.function}',
            f"    {frame.source}",
        ]
    lines.append(f"{kind}: {message}" if message else kind)
    return Raised(kind, message, frames, "\n".join(lines) + "\n", **more)


def rank(
    number: int,
    code: int | None = None,
    *,
    sig: int = 0,
    order: int = 0,
    at: float = 0.0,
    **more: Any,
) -> RankEvidence:
    ended = None if code is None and not sig else Ended(code or 0, sig, at, order)
    more.setdefault("phase", "running")
    log = {"log": f"/state/runs/a1/rank{number}.log", "log_line": 40}
    return RankEvidence(number, number, 24314 + number, ended=ended, **{**log, **more})


def lost(
    number: int,
    code: int = 1,
    *,
    order: int = 1,
    at: float = 1.5,
    message: str = CLOSED,
    frames: tuple[Frame, ...] = ALL_REDUCE,
    call: str = "all_reduce",
    wait: tuple[float, float] = (0.0, 0.0),
    **more: Any,
) -> RankEvidence:
    """A rank that a lost connection ended, as an uncaught exception."""
    error = raised("RuntimeError", message, frames, at=at, call=call, wait=wait)
    return rank(number, code, order=order, at=at, raised=error, said_traceback=True, **more)


def gave_in(
    number: int,
    *,
    code: int = 0,
    sig: int = 0,
    order: int = 1,
    at: float = 1.5,
    message: str = CLOSED,
) -> RankEvidence:
    """A rank that caught the lost connection, and ended itself."""
    error = raised(
        "RuntimeError",
        message,
        ALL_REDUCE,
        at=at,
        call="all_reduce",
        caught_at=Frame("/home/ada/exp/train.py", 90, "train_step"),
    )
    return rank(number, code, sig=sig, order=order, at=at, handled=(error,))


def stopped(number: int, stack: tuple[Frame, ...] = ALL_REDUCE, **more: Any) -> RankEvidence:
    return rank(number, sent=("SIGTERM",), stack=stack, **more)


def waited(
    number: int,
    message: str = "wait timeout after 4000ms, keys: /default_pg/0//cpu//0/0",
    **more: Any,
) -> RankEvidence:
    call, frames = more.pop("call", "init_process_group"), more.pop("frames", (MAIN,))
    error = raised("torch.distributed.DistStoreError", message, frames, at=4.0, call=call)
    return rank(
        number,
        1,
        order=1,
        at=4.0,
        raised=error,
        said_traceback=True,
        **{"phase": "joining", **more},
    )


OF_FOUR = Meeting("tcp://127.0.0.1:2222", "127.0.0.1:2222", world_size=4, line="train.py:6")
TIME_IS_UP = "Timed out waiting 4000ms for recv operation to complete"


def came(number: int, *, at: float, **more: Any) -> RankEvidence:
    """Make a rank that began its all_reduce a moment before it lost the others in it."""
    error = raised("RuntimeError", CLOSED, ALL_REDUCE, at=at, wait=(0.05, 0.01), call="all_reduce")
    return rank(number, 1, order=2, at=at + 0.1, raised=error, said_traceback=True, **more)


def calls_differ(
    number: int, kind: str, other: int, theirs: str, frames: tuple[Frame, ...]
) -> RankEvidence:
    """Make a rank in which torch, with TORCH_DISTRIBUTED_DEBUG=DETAIL, has compared its call."""
    one, two = (
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType={name}, TensorShape=[1])"
        for rank, name in ((number, kind), (other, theirs))
    )
    message = f"Detected mismatch between collectives on ranks. {one}, but {two}."
    error = raised("RuntimeError", message, frames, at=1.2, call="all_reduce")
    return rank(number, 1, order=number, at=1.3, raised=error, said_traceback=True)


def job(*ranks: RankEvidence, **more: Any) -> JobEvidence:
    """Make the evidence of a job on one node. `more`: fields of the node's or the job's."""
    own = {name: more.pop(name) for name in NodeEvidence.__struct_fields__ if name in more}
    node = NodeEvidence(ranks, **{"run_dir": "/state/runs/a1", **own})
    return JobEvidence("train.py", more.pop("world_size", len(ranks)), (node,), **more)


def same(count: int, **more: Any) -> list[RankEvidence]:
    return [rank(i, order=i, **more) for i in range(count)]


class History(NamedTuple):
    name: str
    job: JobEvidence
    code: str
    ranks: tuple[int, ...]
    headline: str
    confidence: str = "certain"
    status: int = 1
    others: tuple[str, ...] = ()  # codes of the further reports


LATE_AND_CAUGHT = raised(
    "RuntimeError",
    CLOSED,
    ALL_REDUCE,
    at=4.2,
    wait=(0.05, 0.01),
    call="all_reduce",
    caught_at=MAIN,
)
VALUE = raised("ValueError", "shapes do not match: 512 and 500", at=1.2)
ASKED = raised(
    "RuntimeError",
    """\
FileNotFoundError: On WorkerInfo(id=1, name=worker1):
FileNotFoundError(2, 'No such file or directory')
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/rpc/internal.py", line 209, in _run_function
    result = python_udf.func(*python_udf.args, **python_udf.kwargs)
  File "/home/ada/exp/train.py", line 4, in load_shard
    with open(path) as file:
FileNotFoundError: [Errno 2] No such file or directory: '/data/shard7.bin'
""",
    at=1.2,
)


def in_checkpoint(number: int, *failed: tuple[int, str]) -> RankEvidence:
    """A rank that torch tells what ranks raised while they saved a checkpoint."""
    told = [
        f"""\
Traceback (most recent call last): (RANK {one})
  File "{TORCH}/checkpoint/utils.py", line 241, in all_reduce
    local_data = map_fun()
  File "{TORCH}/checkpoint/filesystem.py", line 706, in write_data
    return self._write_data(planner, file_queue)
{words}
"""
        for one, words in failed
    ]
    frames = (
        MAIN,
        Frame("/home/ada/exp/train.py", 97, "save", "dcp.save(state, checkpoint_id=path)"),
        Frame(f"{TORCH}/checkpoint/state_dict_saver.py", 196, "save", "_save_state_dict("),
        Frame(f"{TORCH}/checkpoint/utils.py", 263, "all_reduce", "raise final_result"),
    )
    kind = "torch.distributed.checkpoint.api.CheckpointException"
    message = f"CheckpointException ranks:dict_keys({[one for one, _ in failed]})\n{''.join(told)}"
    error = raised(kind, message, frames, at=2.0, member=number)
    return rank(number, 1, at=2.5, order=number, raised=error)


FULL_DISK = (1, "OSError: [Errno 28] No space left on device")
LOST = raised("OSError", "shard 3 is corrupt", at=0.4)
CHILD = (
    "Process Process-1:",
    "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap',
    "    self.run()",
    '  File "/home/ada/exp/data.py", line 9, in read',
    '    raise ValueError("bad record")',
    "ValueError: bad record",
)
TORCHRUNS = (
    "E0101 12:00:00.000000 24390 torch/distributed/elastic/multiprocessing/api.py:1003] "
    "failed (exitcode: 1) local_rank: 0 (pid: 24400) of binary: /venv/bin/python"
)
TIMER_STACK = "Thread 0x00007fa857d1eb80 (most recent call first):"
POOL = raised(
    "concurrent.futures.process.BrokenProcessPool",
    "A process in the process pool was terminated abruptly",
    at=1.2,
)
MEMORY = MemoryEvidence(
    oom_kills=1, counted=True, limit=64 << 30, killed_pids=(24316,), kernel_log_read=True
)
COUNTED = MemoryEvidence(counted=True, kernel_log_read=True)
STORE = (
    MAIN,
    Frame(
        "/venv/lib/python3.11/site-packages/rallypoint/store/client.py",
        310,
        "wait",
        "return self.ask(...)",
    ),
)
NO_KEY = raised(
    "rallypoint.errors.StoreTimeout",
    '"weights" was not there within 5 s',
    STORE,
    at=6.0,
    code="wait-timeout",
    why=("the store at tcp://127.0.0.1:41235 answered; it has 3 keys",),
    help=(("wait longer", 'store.wait("weights", timeout=60)'),),
)
AT_BARRIER = (
    MAIN,
    Frame(
        "/venv/lib/python3.11/site-packages/rallypoint/primitives/barrier.py",
        43,
        "barrier",
        "raise _timed_out(...)",
    ),
)
TOO_LATE = raised(
    "rallypoint.errors.BarrierTimeout",
    'the barrier "epoch" of 3 timed out after 5.0 s: 2 arrived (ranks 0-1), missing: rank 2 (pid 24316 on node07, running for 6 s)',
    AT_BARRIER,
    at=6.0,
    code="barrier-timeout",
)
BROKE = raised(
    "rallypoint.errors.BarrierBroken",
    'the barrier "epoch" of 3 is broken',
    AT_BARRIER,
    at=5.9,
    code="barrier-broken",
)
NOT_HAD = raised(
    "rallypoint.errors.LockTimeout",
    'the lock "checkpoint" was not had within 3 s: rank 1 (pid 24315 on gpu01) has had it for 4.0 s',
    STORE,
    at=4.0,
    code="lock-timeout",
)
NO_KEY_OF_TORCH = raised(
    "torch.distributed.DistStoreError",
    "wait timeout after 1000ms, keys: /default_pg/0//data",
    at=6.0,
)
NO_KEY_OF_PROGRAM = raised(
    "torch.distributed.DistStoreError",
    "wait timeout after 6000ms, keys: /weights",
    (MAIN,),
    at=6.0,
)
NOT_BACKWARD = raised("AttributeError", "'NoneType' object has no attribute 'backward'", at=1.4)
GAVE_UP = raised(
    "RuntimeError",
    CLOSED,
    ALL_REDUCE,
    at=1.3,
    call="all_reduce",
    caught_at=Frame("/home/ada/exp/train.py", 91, "train_step"),
)
FROM_LOSS = msgspec.structs.replace(
    raised("TrainError", "step 5 failed", at=1.4),
    traceback=raised("RuntimeError", CLOSED, ALL_REDUCE).traceback
    + "\nThe above exception was the direct cause of the following exception:\n\n"
    + raised("TrainError", "step 5 failed").traceback,
)
MESH = "Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.h:311] Connect timeout [none]"
KILLED_WORKER = "DataLoader worker (pid 24990) is killed by signal: {}. "
WORKER_GONE = msgspec.structs.replace(
    raised("RuntimeError", "DataLoader worker (pid(s) 24990) exited unexpectedly", at=1.4),
    traceback=raised("RuntimeError", KILLED_WORKER.format("Killed")).traceback
    + "\nThe above exception was the direct cause of the following exception:\n\n"
    + raised("RuntimeError", "DataLoader worker (pid(s) 24990) exited unexpectedly").traceback,
)
TOO_LARGE = raised(
    "RuntimeError",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 281474976710656 "
    "bytes. Error code 12 (Cannot allocate memory)",
)
ROOM = MemoryEvidence(counted=True, total=64 << 30, available=40 << 30)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, unhandled system error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n{}"
)
NCCL_SHM = NCCL.format(
    "Error while creating shared memory segment /dev/shm/nccl-vzIpS6 (size 9637888)"
)
NCCL_UNLOCKED = NCCL.format("Call to ibv_create_cq failed with error Cannot allocate memory")
NCCL_REFUSED = NCCL.format(
    "socketStartConnect: Connect to 10.38.10.112<21724> failed : Connection refused"
)
NCCL_PEER = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error, NCCL "
    "version 2.19.3\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nNET/IB : Got completion from peer 10.1.1.4<35372> with error 12, opcode 0, len 0, vendor err 129"
)


def of_nccl(message: str, at: float = 1.5) -> Raised:
    return raised(
        "torch.distributed.DistBackendError", message, ALL_REDUCE, at=at, call="all_reduce"
    )


NO_GROUP = raised(
    "ValueError",
    "Default process group has not been initialized, please make sure to call init_process_group.",
    at=1.9,
    call="all_reduce",
)
NO_SUCH_BACKEND = raised(
    "ValueError",
    "Unknown backend: 'nccI'",
    (MAIN,),
    at=1.2,
    call="init_process_group",
    caught_at=Frame("/home/ada/exp/train.py", 31, "main", "except Exception as error:"),
)
CUDA_FAILED = raised(
    "RuntimeError",
    "CUDA error: initialization error",
    (MAIN,),
    at=0.9,
    call="set_device",
    caught_at=Frame("/home/ada/exp/train.py", 31, "main", "except RuntimeError as error:"),
)
SEGV = (MAIN, STEP, Frame("/usr/lib/python3.11/ctypes/__init__.py", 519, "string_at"))

REFUSED_TEXT = (
    "The client socket has timed out after 3000ms while trying to connect to (10.0.0.5, 29500)."
)
AT_NODE = Meeting("tcp://10.0.0.5:29500", "10.0.0.5:29500", 1, 3, "gloo", "train.py:7", timeout=3.0)
NOT_RESOLVED = (
    "[W1122 07:49:12.0 socket.cpp:764] [c10d] The IPv6 network addresses of (node08, 29500) cannot be retrieved (gai error: -2 - "
    "Name or service not known)."
)
HOLDER = "/usr/sbin/nginx (pid 811, user root, started 9 days ago) is listening on 10.0.0.5:29500"


def seen(outcome: Outcome, number: int = 0, **more: Any) -> Reached:
    """What was at the meeting point."""
    return Reached(
        "10.0.0.5",
        29500,
        (Tried("10.0.0.5:29500", outcome, number, first=more.pop("first", b"")),),
        **more,
    )


def unmet(number: int, *, host: str = "10.0.0.5", **more: Any) -> RankEvidence:
    """A rank that torch told only that its time was up."""
    meeting = msgspec.structs.replace(
        AT_NODE, rank=number + 1, method=f"tcp://{host}:29500", address=f"{host}:29500"
    )
    error = raised(
        "torch.distributed.DistNetworkError",
        REFUSED_TEXT.replace("10.0.0.5", host),
        (MAIN,),
        at=4.0,
        call="init_process_group",
    )
    return rank(
        number,
        1,
        order=number,
        at=4.0,
        raised=error,
        said_traceback=True,
        meeting=meeting,
        phase="joining",
        **more,
    )


def waits(number: int) -> RankEvidence:
    """A rank that torch lets wait beyond its time."""
    return rank(
        number,
        meeting=msgspec.structs.replace(AT_NODE, rank=number + 1),
        phase="joining",
        stack=(MAIN,),
    )


FETCHING = (
    MAIN,
    Frame(
        "/usr/lib/python3.11/multiprocessing/queues.py",
        122,
        "get",
        "return _ForkingPickler.loads(res)",
    ),
    Frame(
        "/venv/lib/python3.11/site-packages/torch/multiprocessing/reductions.py",
        538,
        "rebuild_storage_fd",
        "fd = df.detach()",
    ),
    Frame(
        "/usr/lib/python3.11/multiprocessing/resource_sharer.py",
        57,
        "detach",
        "with _resource_sharer.get_connection(self._id) as conn:",
    ),
)
SPAWNING = (
    MAIN,
    Frame(
        "/usr/lib/python3.11/multiprocessing/popen_spawn_posix.py",
        47,
        "_launch",
        "reduction.dump(process_obj, fp)",
    ),
)
IN_SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/home/ada/exp/train.py", line 9, in work
    raise ValueError("bad batch")
ValueError: bad batch
"""
NO_RANK = "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set"
STORE_GONE = raised(
    "torch.distributed.DistNetworkError",
    "Failed to recv, got 0 bytes. Connection was likely closed.",
    (MAIN,),
    at=2.0,
)
STORE_LOG = (
    "[W1122 06:49:21.2 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=7, addr=[::ffff:10.0.0.6]:51040, "
    "remote=[::ffff:10.0.0.5]:29500): Failed to recv, got 0 bytes.",
)

HISTORIES = [
    History(
        "one-raises",
        job(stopped(0), lost(1), rank(2, 1, raised=VALUE, at=1.3), stopped(3)),
        "rank-raised",
        (2,),
        "rank 2 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "one-raises-shown",
        job(stopped(0), lost(1), rank(2, 1, raised=VALUE, at=1.3, said_traceback=True), stopped(3)),
        "rank-raised",
        (2,),
        "rank 2 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "one-raises-with-a-first-line-that-introduces-the-next",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "RuntimeError",
                    "Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "
                    '"a.weight". \n\tUnexpected key(s) in state_dict: "b.weight". ',
                ),
            )
        ),
        "rank-raised",
        (0,),
        "rank 0 raised RuntimeError: Error(s) in loading state_dict for Net: "
        'Missing key(s) in state_dict: "a.weight".',
    ),
    History(
        "one-raises-and-hangs-in-its-end",
        job(lost(0), rank(1, raised=VALUE, sent=("SIGTERM",), phase="finishing")),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "raises-in-its-handler-after-we-asked",
        job(
            rank(0, 3, at=1.0),
            rank(
                1,
                1,
                raised=raised("RuntimeError", "told to stop", at=1.2),
                sent=("SIGTERM",),
                at=1.3,
                order=1,
            ),
        ),
        "rank-exited",
        (0,),
        "rank 0 exited with code 3",
        status=3,
    ),
    History(
        "killed-peers-raise",
        job(
            lost(0),
            lost(1, message=RESET, order=2, at=1.502),
            rank(2, sig=9, at=1.498),
            lost(3, order=3, at=1.503),
            memory=COUNTED,
        ),
        "rank-killed",
        (2,),
        "rank 2 was killed by SIGKILL",
        status=137,
    ),
    History(
        "killed-peers-abort-first-in-order",
        job(
            gave_in(0, sig=6, order=0),
            gave_in(1, sig=6, order=1),
            rank(2, sig=9, order=3, at=1.6),
            gave_in(3, sig=6, order=2),
        ),
        "rank-killed",
        (2,),
        "rank 2 was killed by SIGKILL",
        status=137,
    ),
    History(
        "killed-peers-abort-unseen",
        job(
            rank(0, sig=6, order=0),
            rank(1, sig=6, order=1),
            rank(2, sig=9, order=3),
            rank(3, sig=6, order=2),
        ),
        "rank-killed",
        (2,),
        "rank 2 was killed by SIGKILL",
        status=137,
    ),
    History(
        "killed-peers-exit",
        job(gave_in(0, code=1, order=0), rank(1, 1, order=1), rank(2, sig=9, order=3), stopped(3)),
        "rank-killed",
        (2,),
        "rank 2 was killed by SIGKILL",
        status=137,
    ),
    History(
        "killed-while-we-asked-it-to-stop",
        job(lost(0, order=0), rank(1, sig=9, order=1, sent=("SIGTERM",)), memory=COUNTED),
        "rank-killed",
        (1,),
        "rank 1 was killed by SIGKILL",
        status=137,
    ),
    History(
        "killed-beneath-a-limit-on-processor-time",
        job(rank(0, sig=9), stopped(1), memory=msgspec.structs.replace(COUNTED, processor_time=60)),
        "rank-killed",
        (0,),
        "rank 0 was killed by SIGKILL",
        status=137,
    ),
    History(
        "killed-by-sigterm",
        job(rank(0, sig=15), stopped(1)),
        "rank-killed",
        (0,),
        "rank 0 was killed by SIGTERM",
        status=143,
    ),
    History(
        "a-timer-that-nobody-handles",
        job(stopped(0), rank(1, sig=14, at=1.4)),
        "rank-killed",
        (1,),
        "rank 1 was killed by SIGALRM",
        status=128 + 14,
    ),
    History(
        "faulthandler-ends-a-rank-when-its-time-is-up",
        job(stopped(0), rank(1, 1, said=("Timeout (0:00:30)!", TIMER_STACK), at=1.4)),
        "rank-exited",
        (1,),
        "rank 1 exited with code 1",
    ),
    History(
        "a-rank-that-runs-torchrun",
        job(
            stopped(0),
            rank(
                1,
                1,
                said=(TORCHRUNS,),
                left_at="train.py:12 in <module>",
                at=1.4,
            ),
        ),
        "rank-exited",
        (1,),
        "rank 1 exited with code 1",
    ),
    # Python ignores SIGPIPE, and programs that set SIG_DFL die of a peer's end
    History(
        "a-pipe-that-broke-when-its-reader-exited",
        job(rank(0, 3, at=1.4), rank(1, sig=13, order=1, at=1.5)),
        "rank-exited",
        (0,),
        "rank 0 exited with code 3",
        status=3,
    ),
    History(
        "a-pipe-that-broke-when-its-reader-raised",
        job(
            rank(0, sig=13, at=1.4),
            rank(1, 1, order=1, at=1.5, raised=raised("ValueError", "bad batch", at=1.3)),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: bad batch",
        status=1,
    ),
    History(
        "a-pipe-that-broke-alone",
        job(rank(0, 0, at=1.4), rank(1, sig=13, order=1, at=1.5)),
        "rank-killed",
        (1,),
        "rank 1 was killed by SIGPIPE",
        confidence="likely",
        status=141,
    ),
    History(
        "out-of-memory-in-the-log",
        job(
            lost(0),
            rank(1, resident=15 << 30),
            rank(2, sig=9, at=1.4, resident=19 << 30),
            stopped(3),
            memory=MEMORY,
        ),
        "rank-out-of-memory",
        (2,),
        "rank 2 was killed by the kernel for lack of memory",
        status=137,
    ),
    History(
        "out-of-memory-counted",
        job(
            lost(0), rank(1, sig=9), memory=MemoryEvidence(oom_kills=1, counted=True, limit=1 << 30)
        ),
        "rank-out-of-memory",
        (1,),
        "rank 1 was killed by the kernel for lack of memory",
        "likely",
        137,
    ),
    History(
        "killed-while-the-kernel-killed-another",
        job(
            lost(0),
            rank(1, sig=9),
            memory=MemoryEvidence(
                oom_kills=1, counted=True, killed_pids=(99,), kernel_log_read=True
            ),
        ),
        "rank-killed",
        (1,),
        "rank 1 was killed by SIGKILL",
        status=137,
    ),
    History(
        "a-loaders-worker-is-killed",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised("RuntimeError", KILLED_WORKER.format("Killed"), ALL_REDUCE, at=1.4),
            ),
            memory=COUNTED,
        ),
        "rank-killed",
        (1,),
        "a DataLoader worker of rank 1 was killed by SIGKILL",
    ),
    History(
        "a-loaders-worker-is-killed-while-its-rank-waits-for-it",
        job(stopped(0), rank(1, 1, raised=WORKER_GONE), memory=COUNTED),
        "rank-killed",
        (1,),
        "a DataLoader worker of rank 1 was killed by SIGKILL",
    ),
    History(
        "a-loaders-worker-is-killed-for-memory",
        job(
            stopped(0),
            rank(1, 1, raised=WORKER_GONE, resident=11 << 30),
            memory=msgspec.structs.replace(MEMORY, killed_pids=(24990,)),
        ),
        "rank-out-of-memory",
        (1,),
        "a DataLoader worker of rank 1 was killed by the kernel for lack of memory",
    ),
    History(
        "workers-of-two-loaders-are-killed-for-memory",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "RuntimeError",
                    KILLED_WORKER.replace("24990", "24980").format("Killed"),
                    (MAIN,),
                    at=1.4,
                ),
            ),
            rank(
                1,
                1,
                raised=raised("RuntimeError", KILLED_WORKER.format("Killed"), ALL_REDUCE, at=1.4),
                order=1,
            ),
            memory=msgspec.structs.replace(MEMORY, killed_pids=(24980, 24990)),
        ),
        "rank-out-of-memory",
        (0, 1),
        "DataLoader workers of both ranks were killed by the kernel for lack of memory",
    ),
    History(
        "workers-of-two-loaders-are-killed-one-for-memory",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "RuntimeError",
                    KILLED_WORKER.replace("24990", "24980").format("Killed"),
                    (MAIN,),
                    at=1.4,
                ),
            ),
            rank(
                1,
                1,
                raised=raised("RuntimeError", KILLED_WORKER.format("Killed"), (MAIN,), at=1.4),
                order=1,
            ),
            memory=msgspec.structs.replace(MEMORY, killed_pids=(24990,)),
        ),
        "rank-killed",
        (0,),
        "a DataLoader worker of rank 0 was killed by SIGKILL",
        others=("rank-out-of-memory",),
    ),
    History(
        "a-loaders-worker-crashes",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised("RuntimeError", KILLED_WORKER.format("Segmentation fault"), at=1.4),
            ),
        ),
        "rank-crashed",
        (1,),
        "a DataLoader worker of rank 1 crashed with SIGSEGV",
    ),
    History(
        "an-allocation-larger-than-the-machine",
        job(stopped(0), rank(1, 1, raised=TOO_LARGE), memory=ROOM),
        "rank-out-of-memory",
        (1,),
        "rank 1 asked for 256.0 TiB of memory at once, and did not get it",
    ),
    History(
        "an-allocation-beyond-ulimit",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised(
                    "numpy._core._exceptions._ArrayMemoryError",
                    "Unable to allocate 9.50 GiB for an array with shape (1275068416,) and data type float64",
                ),
            ),
            memory=msgspec.structs.replace(ROOM, address_space=8 << 30),
        ),
        "rank-out-of-memory",
        (1,),
        "rank 1 asked for 9.5 GiB of memory at once, and did not get it",
    ),
    History(
        "nccl-has-no-shared-memory",
        job(
            rank(0, 1, raised=of_nccl(NCCL_SHM)),
            rank(1, 1, order=1, raised=of_nccl(NCCL_SHM, 1.6)),
            rank(2, sig=6, order=2),
        ),
        "nccl-failed",
        (0, 1),
        "NCCL failed in ranks 0-1: Error while creating shared memory segment /dev/shm/nccl-vzIpS6 (size 9637888)",
        "likely",
    ),
    History(
        "nccl-cannot-lock-memory",
        job(rank(0, 1, raised=of_nccl(NCCL_UNLOCKED)), stopped(1)),
        "nccl-failed",
        (0,),
        "NCCL failed in rank 0: Call to ibv_create_cq failed with error Cannot allocate memory",
        "likely",
    ),
    History(
        "nccl-is-refused-by-another-machine",
        job(rank(0, 1, raised=of_nccl(NCCL_REFUSED)), stopped(1)),
        "nccl-failed",
        (0,),
        "NCCL failed in rank 0: socketStartConnect: Connect to 10.38.10.112<21724> failed : Connection refused",
        "likely",
    ),
    History(
        "nccl-lost-a-rank-that-shows-why",
        job(
            rank(0, 1, raised=of_nccl(NCCL_PEER)),
            rank(1, 1, raised=VALUE, order=1, at=1.6),
            stopped(2),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "nccl-failed-after-an-exit",
        job(rank(0, 1, raised=of_nccl(NCCL_SHM)), rank(1, 3, order=1, at=1.4)),
        "rank-exited",
        (1,),
        "rank 1 exited with code 3",
        status=3,
    ),
    History(
        "gpu-memory",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "torch.OutOfMemoryError",
                    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...",
                ),
                said_traceback=True,
            ),
            stopped(1),
        ),
        "rank-out-of-memory",
        (0,),
        "rank 0 ran out of GPU memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...",
    ),
    History(
        "an-exception-on-its-way",
        job(
            lost(0),
            rank(1, handled=(msgspec.structs.replace(VALUE, on_its_way=True),), stack=(MAIN,)),
            lost(2, order=2, at=1.502),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: shapes do not match: 512 and 500",
        "likely",
    ),
    History(
        "an-exception-on-its-way-beside-a-kill",
        job(
            rank(0, sig=9),
            rank(1, handled=(msgspec.structs.replace(VALUE, on_its_way=True),), stack=(MAIN,)),
            memory=COUNTED,
        ),
        "rank-killed",
        (0,),
        "rank 0 was killed by SIGKILL",
        status=137,
    ),
    History(
        "an-exception-that-was-caught-before-it-left",
        job(
            lost(0),
            rank(
                1,
                0,
                order=0,
                at=1.3,
                handled=(msgspec.structs.replace(VALUE, on_its_way=True),),
                phase="done",
            ),
            lost(2),
        ),
        "error-swallowed",
        (1,),
        "rank 1 caught ValueError: shapes do not match: 512 and 500 and left",
        "likely",
    ),
    History(
        "exit-after-a-loss-that-torch-told-nobody-of",
        job(
            rank(
                0,
                1,
                order=0,
                at=1.4,
                handled=(raised("RuntimeError", CLOSED, (MAIN, STEP), at=1.39),),
            ),
            rank(1, 4, order=1, at=1.4),
        ),
        "rank-exited",
        (1,),
        "rank 1 exited with code 4",
        status=4,
    ),
    History(
        "a-function-returns-early",
        msgspec.structs.replace(
            job(rank(0, 0, at=1.0, phase="done"), lost(1)), program="train", function=True
        ),
        "rank-left-early",
        (0,),
        "rank 0 returned while others still needed it",
        "likely",
    ),
    History(
        "exit-code-alone",
        job(
            lost(0),
            lost(1),
            rank(2, 3, at=1.4, left_at="train.py:10 in main", said=("epoch 3", "giving up")),
            stopped(3),
        ),
        "rank-exited",
        (2,),
        "rank 2 exited with code 3",
        status=3,
    ),
    History(
        "exit-code-and-aborts",
        job(rank(0, sig=6, order=0), rank(1, 1, order=1), rank(2, sig=6, order=2)),
        "rank-exited",
        (1,),
        "rank 1 exited with code 1",
    ),
    History(
        "two-exit-codes",
        job(rank(0, 1, order=1, at=1.1), rank(1, 7, order=0, at=1.0)),
        "rank-exited",
        (1,),
        "rank 1 exited with code 7",
        "likely",
        7,
    ),
    History(
        "all-exit-alike",
        job(*same(4, code=2, said=("usage: train.py [-h]",))),
        "rank-exited",
        (0, 1, 2, 3),
        "all 4 ranks exited with code 2",
        status=2,
    ),
    History(
        "an-argument-that-is-missing",
        job(
            *same(
                2,
                code=2,
                left_at="train.py:8 in main",
                left_saying="the following arguments are required: --lr\n",
                said=(
                    "usage: train.py [-h] --lr LR",
                    "train.py: error: the following arguments are required: --lr",
                ),
                log="/runs/1/rank0.log",
            )
        ),
        "rank-exited",
        (0, 1),
        "both ranks exited with code 2: the following arguments are required: --lr",
        status=2,
    ),
    History(
        "all-exit-alike-with-words-of-their-own",
        job(
            rank(0, 1, left_at="train.py:8 in main", left_saying="no data in /data/0"),
            rank(1, 1, order=1, left_at="train.py:8 in main", left_saying="no data in /data/1"),
        ),
        "rank-exited",
        (0, 1),
        "both ranks exited with code 1",
    ),
    History(
        "plain-traceback-in-the-log",
        job(
            rank(0, 1, said=tuple(VALUE.traceback.splitlines())),
            rank(1, 1, order=1, said=("x", f"RuntimeError: {CLOSED}")),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "plain-chain-that-began-with-a-lost-peer",  # the log alone shows from what it was raised
        job(
            rank(0, 1, said=tuple(VALUE.traceback.splitlines())),
            rank(
                1,
                1,
                order=1,
                said=(
                    "Traceback (most recent call last):",
                    '  File "train.py", line 9, in <module>',
                    f"RuntimeError: {CLOSED}",
                    "",
                    "The above exception was the direct cause of the following exception:",
                    "",
                    "Traceback (most recent call last):",
                    '  File "train.py", line 11, in <module>',
                    "StepFailed: step 1 failed",
                ),
            ),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "recorded-by-record",
        job(
            rank(
                0,
                1,
                error_file='{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"}}}',
            ),
            lost(1),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: x",
    ),
    History(
        "segfault",
        job(lost(0), rank(1, sig=11, at=1.2, stack=SEGV), stopped(2)),
        "rank-crashed",
        (1,),
        "rank 1 crashed with SIGSEGV in train.py:88 in train_step (ctypes string_at)",
        status=139,
    ),
    # torch 2.13 with gloo, in every program with DDP, where TORCH_DISTRIBUTED_DEBUG is DETAIL
    History(
        "segfault-of-ddp-under-detail",
        job(
            *(
                rank(
                    number,
                    sig=11,
                    order=number,
                    at=1.2,
                    stack=(
                        MAIN,
                        Frame(
                            "/env/lib/python3.11/site-packages/torch/nn/parallel/distributed.py",
                            1079,
                            "__init__",
                            "",
                        ),
                        Frame(
                            "/env/lib/python3.11/site-packages/torch/nn/parallel/distributed.py",
                            1473,
                            "_ddp_init_helper",
                            "",
                        ),
                    ),
                )
                for number in range(2)
            )
        ),
        "rank-crashed",
        (0, 1),
        "both ranks crashed with SIGSEGV in train.py:120 in <module> (torch __init__)",
        status=139,
    ),
    History(
        "segfault-of-a-recursion",
        job(
            lost(0),
            rank(1, sig=11, at=1.2, stack=(Frame("/home/ada/exp/tree.py", 12, "walk"),) * 100),
            stopped(2),
        ),
        "rank-crashed",
        (1,),
        "rank 1 crashed with SIGSEGV in tree.py:12 in walk",
        confidence="likely",
        status=139,
    ),
    History(
        "abort-with-words",
        job(
            lost(0),
            lost(1, order=2),
            rank(
                2,
                sig=6,
                at=1.4,
                stack=ALL_REDUCE,
                said=(
                    "terminate called after throwing an instance of 'std::runtime_error'",
                    "  what():  the index is damaged",
                ),
            ),
        ),
        "rank-crashed",
        (2,),
        "rank 2 crashed with SIGABRT in train.py:88 in train_step (torch all_reduce)",
        status=134,
    ),
    History(
        "sizes-differ",
        job(
            lost(0),
            lost(1, order=2),
            rank(
                2,
                sig=6,
                at=1.4,
                stack=ALL_REDUCE,
                said=(
                    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
                    "  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 500 vs 252",
                ),
            ),
        ),
        "collective-mismatch",
        (2,),
        "rank 2 got 500 bytes in all_reduce where its own call had room for 252",
        status=134,
    ),
    History(
        "exit-and-a-peer-that-raises-after-its-loss",
        job(
            rank(0, 1, order=1, at=1.5, raised=NOT_BACKWARD, handled=(GAVE_UP,)),
            rank(1),
            rank(2, 7, order=0, at=1.1, left_at="train.py:60 in train_step"),
        ),
        "rank-exited",
        (2,),
        "rank 2 exited with code 7",
        status=7,
    ),
    History(
        "exit-and-a-peer-that-raises-from-its-loss",
        job(
            rank(0, 1, order=1, at=1.5, raised=FROM_LOSS),
            rank(1),
            rank(2, 7, order=0, at=1.1),
        ),
        "rank-exited",
        (2,),
        "rank 2 exited with code 7",
        status=7,
    ),
    History(
        "left-early-and-a-peer-that-raises-after-its-loss",
        job(
            rank(0, 1, order=1, at=1.5, raised=NOT_BACKWARD, handled=(GAVE_UP,)),
            rank(1, sent=("SIGTERM",)),
            rank(2, 0, order=0, at=1.1),
        ),
        "rank-left-early",
        (2,),
        "rank 2 ended with exit code 0 while others still needed it",
        "likely",
    ),
    History(
        "a-loss-long-before-is-no-reason",
        job(
            rank(
                0,
                1,
                order=1,
                at=90.0,
                raised=raised("KeyError", "'lr'", at=90.0),
                handled=(GAVE_UP,),
            ),
            rank(1),
            rank(2, 0, order=0, at=1.1),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised KeyError: 'lr'",
    ),
    History(
        "a-key-that-nobody-sets-and-all-wait-for",
        job(rank(0, 1, raised=NO_KEY_OF_TORCH), rank(1, 1, order=1, raised=NO_KEY_OF_TORCH)),
        "rank-raised",
        (0, 1),
        "both ranks raised torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /default_pg/0//data",
        "likely",
    ),
    # Different numbers of steps, or tensors of different sizes: all ranks are in calls of one name.
    History(
        "all-ranks-waited-in-calls-of-one-name",
        job(
            *(
                waited(
                    number,
                    "Timed out waiting 4000ms for recv operation",
                    call="all_reduce",
                    phase="running",
                )
                for number in range(3)
            )
        ),
        "cause-unknown",
        (0, 1, 2),
        "all 3 ranks waited in all_reduce until the timeout; the cause is not known",
        "possible",
    ),
    # The other member of the group is a process that the program had started itself.
    History(
        "the-peer-is-a-process-of-the-rank",
        job(
            lost(
                0,
                dead_child=(24320, 1, 0),
                said=(
                    "Traceback (most recent call last):",
                    '  File "/home/ada/exp/train.py", line 12, in <module>',
                    "ValueError: the interval is 0",
                ),
            )
        ),
        "cause-unknown",
        (0,),
        "rank 0 lost another rank (all_reduce: Connection closed by peer); the cause is not known",
        "possible",
    ),
    History(
        "gloo-finds-addresses-of-ranks-that-are-gone",
        job(
            *(
                msgspec.structs.replace(
                    waited(number, MESH, call="init_process_group"),
                    meeting=Meeting(
                        "tcp://10.77.0.2:29555",
                        "10.77.0.2:29555",
                        number + 1,
                        3,
                        "gloo",
                        "train.py:4",
                    ),
                )
                for number in range(2)
            )
        ),
        "cause-unknown",
        (0,),
        "rank 0 did not reach another rank (init_process_group: Connect timeout); the cause is not known",
        "possible",
    ),
    History(
        "a-key-that-nobody-sets-while-the-others-wait",
        job(
            rank(0, stack=ALL_REDUCE),
            rank(1, 1, at=6.1, raised=NO_KEY_OF_TORCH),
            rank(2, stack=ALL_REDUCE),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /default_pg/0//data",
        "likely",
    ),
    # Nothing shows that rank 0 was to set it: the name may be misspelt.
    History(
        "a-key-that-nobody-sets-while-the-others-are-elsewhere",
        job(
            rank(0, stack=(MAIN,)),
            rank(1, 1, at=6.1, raised=NO_KEY_OF_PROGRAM),
            rank(2, 1, at=6.2, raised=NO_KEY_OF_PROGRAM, order=1),
        ),
        "rank-raised",
        (1, 2),
        "ranks 1-2 raised torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /weights",
        "likely",
    ),
    History(
        "monitored-barrier",
        job(
            rank(
                0,
                1,
                order=1,
                at=2.2,
                raised=raised(
                    "RuntimeError",
                    "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms",
                    at=2.1,
                ),
            ),
            rank(
                1,
                1,
                order=0,
                at=2.1,
                raised=raised(
                    "RuntimeError",
                    f"Rank 1 successfully reached monitoredBarrier, but {CLOSED}",
                    at=2.0,
                ),
            ),
            rank(2, stack=LOADING),
        ),
        "ranks-missing",
        (2,),
        "ranks 0-1 waited in a collective until the timeout; rank 2 never came",
        "likely",
    ),
    History(
        "exception-at-the-moment-of-an-exit",
        job(
            rank(0, 1, order=1, at=1.5, raised=NOT_BACKWARD), rank(1), rank(2, 7, order=0, at=1.401)
        ),
        "rank-raised",
        (0,),
        "rank 0 raised AttributeError: 'NoneType' object has no attribute 'backward'",
        "likely",
    ),
    History(
        "exception-after-a-loss-that-nobody-else-explains",
        job(
            rank(0, 1, order=1, at=1.5, raised=NOT_BACKWARD, handled=(GAVE_UP,)),
            rank(1),
            rank(2, stack=LOADING),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised AttributeError: 'NoneType' object has no attribute 'backward'",
        "likely",
    ),
    History(
        "exit-after-a-traceback-and-more",
        job(
            rank(0),
            rank(
                1,
                1,
                order=0,
                at=1.2,
                said=(
                    *raised(
                        "ValueError", "invalid literal for int() with base 10: 'x'"
                    ).traceback.splitlines(),
                    "fatal: disk quota",
                ),
            ),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: invalid literal for int() with base 10: 'x'",
        "likely",
    ),
    History(
        "no-group-since-init-process-group-failed",
        job(
            rank(
                0, 1, order=0, at=2.0, phase="joining", raised=NO_GROUP, handled=(NO_SUCH_BACKEND,)
            ),
            rank(1, phase="joining"),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: Unknown backend: 'nccI'",
    ),
    History(
        "abort-in-a-thread-of-native-code",
        job(
            lost(0),
            rank(
                1,
                sig=6,
                at=1.4,
                stack_text="Fatal Python error: Aborted\n\nThread 0x00007f41a2246b80 (most recent call first):\n"
                '  File "/home/ada/exp/train.py", line 88 in train_step\n',
            ),
        ),
        "rank-crashed",
        (1,),
        "rank 1 crashed with SIGABRT",
        status=134,
    ),
    History(
        "all-raise-alike",
        job(
            *same(
                4,
                code=1,
                raised=raised("ModuleNotFoundError", "No module named 'einops'", (MAIN,)),
                said_traceback=True,
            )
        ),
        "rank-raised",
        (0, 1, 2, 3),
        "all 4 ranks raised ModuleNotFoundError: No module named 'einops'",
    ),
    History(
        "several-raise-alike",
        job(rank(0, 1, raised=VALUE), lost(1), rank(2, 1, raised=VALUE), stopped(3)),
        "rank-raised",
        (0, 2),
        "ranks 0 and 2 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "two-causes",
        job(rank(0, 1, raised=VALUE, at=1.3), rank(1, sig=9, order=1, at=1.4), stopped(2)),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
        others=("rank-killed",),
    ),
    History(
        "database-lost",
        job(
            lost(0),
            rank(
                1,
                1,
                order=2,
                raised=raised("ConnectionResetError", "[Errno 104] Connection reset by peer"),
                said_traceback=True,
            ),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised ConnectionResetError: [Errno 104] Connection reset by peer",
        "likely",
    ),
    History(
        "syntax-error",
        job(
            *same(
                4,
                code=1,
                phase="importing",
                raised=raised(
                    "SyntaxError", "invalid syntax (train.py, line 3)", (), filename="train.py"
                ),
            )
        ),
        "start-failed",
        (0, 1, 2, 3),
        "train.py cannot be started: SyntaxError: invalid syntax (train.py, line 3)",
    ),
    History(
        "not-executable",
        job(*same(4, code=126, not_executed=13)),
        "start-failed",
        (0, 1, 2, 3),
        "train.py cannot be executed: Permission denied",
        status=126,
    ),
    History(
        "port-held-by-a-stranger",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "torch.distributed.DistNetworkError",
                    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
                    "name: EADDRINUSE, message: address already in use",
                    (MAIN,),
                    call="init_process_group",
                ),
                said_traceback=True,
                meeting=Meeting("env://", "127.0.0.1:29500", 0, 2, "gloo", "train.py:7"),
            ),
            stopped(1, phase="joining"),
            holders=(
                "python train.py (pid 5112, user ada, started 3 h ago) is listening on 0.0.0.0:29500",
            ),
        ),
        "port-in-use",
        (0,),
        "rank 0 could not listen on port 29500: it is in use",
    ),
    History(
        "port-held-by-another-rank",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised("OSError", "[Errno 98] Address already in use", errno=98),
                said_traceback=True,
            ),
            holders=("python train.py (pid 24314, user ada) is listening on 0.0.0.0:6006",),
        ),
        "port-in-use",
        (1,),
        "rank 1 could not listen on an address: it is in use",
    ),
    History(
        "error-swallowed",
        job(
            rank(0, 0, at=1.0, handled=(CUDA_FAILED,)),
            rank(1, phase="joining"),
            rank(2, phase="joining"),
            rank(3, phase="joining"),
        ),
        "error-swallowed",
        (0,),
        "rank 0 caught an error of set_device and left: RuntimeError: CUDA error: initialization error",
    ),
    History(
        "timeout-swallowed",
        job(
            rank(
                0,
                0,
                handled=(
                    raised(
                        "torch.distributed.DistStoreError",
                        "Timed out after 5 seconds waiting for clients. 3/4 clients joined.",
                        (MAIN,),
                        call="init_process_group",
                    ),
                ),
            ),
            rank(1, phase="joining"),
        ),
        "error-swallowed",
        (0,),
        "rank 0 caught an error of init_process_group and left: torch.distributed.DistStoreError: "
        "Timed out after 5 seconds waiting for clients. 3/4 clients joined.",
        "likely",
    ),
    History(
        "backend-tried-and-left",
        job(
            rank(
                0,
                0,
                handled=(
                    raised(
                        "RuntimeError",
                        "Distributed package doesn't have NCCL built in",
                        (MAIN,),
                        call="init_process_group",
                    ),
                ),
            ),
            rank(
                1,
                handled=(
                    raised(
                        "RuntimeError",
                        "Distributed package doesn't have NCCL built in",
                        (MAIN,),
                        call="init_process_group",
                    ),
                ),
            ),
        ),
        "rank-left-early",
        (0,),
        "rank 0 ended with exit code 0 while others still needed it",
        "likely",
    ),
    History(
        "left-early",
        job(rank(0, 0, at=1.0, phase="done"), lost(1), lost(2, order=2), stopped(3)),
        "rank-left-early",
        (0,),
        "rank 0 ended with exit code 0 while others still needed it",
        "likely",
    ),
    History(
        "left-before-joining",
        job(
            rank(0, 0, at=0.4, phase="importing"),
            rank(1, phase="joining"),
            rank(2, phase="joining"),
        ),
        "rank-left-early",
        (0,),
        "rank 0 ended with exit code 0 while others still needed it",
        "likely",
    ),
    History(
        "finished-beside-a-cause",
        job(rank(0, 0), rank(1, 1, order=1, raised=VALUE, said_traceback=True)),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "addresses-differ",
        job(
            waited(0, meeting=Meeting("env://", "127.0.0.1:29500", 0, 3, "gloo", "train.py:7")),
            rank(
                1,
                phase="joining",
                meeting=Meeting("env://", "127.0.0.1:29501", 1, 3, "gloo", "train.py:7"),
            ),
            rank(
                2,
                phase="joining",
                meeting=Meeting("env://", "localhost:29500", 2, 3, "gloo", "train.py:7"),
            ),
        ),
        "address-differs",
        (0, 1, 2),
        "the ranks were told 2 different meeting points: 127.0.0.1:29500, 127.0.0.1:29501",
    ),
    History(
        "stale-file",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "RuntimeError",
                    "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused, "
                    "remote=[127.0.0.1]:34227",
                    (MAIN,),
                    call="init_process_group",
                ),
                said_traceback=True,
                meeting=Meeting("file:///tmp/ddp", "/tmp/ddp", 0, 2, "gloo", "train.py:7"),
            ),
            rank(1, phase="joining"),
        ),
        "store-file-stale",
        (0,),
        "the rendezvous file /tmp/ddp sent rank 0 to processes that are gone",
        "likely",
    ),
    History(
        "stale-file-recognised",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "rallypoint.errors.EnvironmentProblem",
                    "the rendezvous file /tmp/ddp is left over from an earlier run",
                    (MAIN,),
                    code="store-file-stale",
                    why=(
                        "it was last written 300 s before this attempt began",
                        "given at train.py:7",
                    ),
                    help=(("remove the file", "rm /tmp/ddp"),),
                ),
            ),
            rank(1, phase="joining"),
        ),
        "store-file-stale",
        (0,),
        "rank 0: the rendezvous file /tmp/ddp is left over from an earlier run",
    ),
    History(
        "group-twice",
        job(
            *same(
                2,
                code=1,
                said_traceback=True,
                raised=raised(
                    "ValueError",
                    "trying to initialize the default process group twice!",
                    (MAIN,),
                    code="group-twice",
                    why=("first opened at train.py:7", "again at train.py:20"),
                ),
            )
        ),
        "group-twice",
        (0, 1),
        "both ranks called init_process_group a second time",
    ),
    History(
        "key-never-set",
        job(stopped(0), rank(1, 1, raised=NO_KEY, at=6.1), rank(2, 0, at=0.5)),
        "wait-timeout",
        (1,),
        'rank 1: "weights" was not there within 5 s',
        "likely",
    ),
    History(
        "barrier-without-one",
        job(
            rank(0, 1, raised=BROKE, order=0, at=6.1),
            rank(1, 1, raised=TOO_LATE, order=1, at=6.1),
            stopped(2),
        ),
        "barrier-timeout",
        (1,),
        f"rank 1: {TOO_LATE.message}",
        "likely",
    ),
    History(
        "barrier-without-a-cause",
        job(
            rank(0, 1, raised=BROKE, order=0, at=6.1),
            rank(1, 1, raised=BROKE, order=1, at=6.1),
            stopped(2),
        ),
        "barrier-broken",
        (0, 1),
        'ranks 0-1: the barrier "epoch" of 3 is broken',
        "likely",
    ),
    History(
        "barrier-beside-a-cause",
        job(
            rank(0, 1, raised=BROKE, order=0, at=6.1),
            rank(1, 1, raised=TOO_LATE, order=1, at=6.1),
            rank(2, 1, raised=msgspec.structs.replace(VALUE, at=7.0), order=2, at=7.1),
        ),
        "rank-raised",
        (2,),
        "rank 2 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "key-never-set-alone",
        job(rank(0, 1, raised=NO_KEY, at=6.1)),
        "wait-timeout",
        (0,),
        'rank 0: "weights" was not there within 5 s',
    ),
    History(
        "key-never-set-beside-a-cause",
        job(
            rank(0, 1, raised=NO_KEY, order=0, at=6.1),
            rank(
                1, 1, raised=msgspec.structs.replace(NO_KEY, code="store-closed"), order=1, at=6.2
            ),
            rank(2, 1, raised=msgspec.structs.replace(VALUE, at=7.0), order=2, at=7.1),
        ),
        "rank-raised",
        (2,),
        "rank 2 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "value-too-large-for-the-store",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "rallypoint.errors.LimitExceeded",
                    '"weights" has 3.0 GiB, and a value may have 2.0 GiB',
                    (*STORE[:1], msgspec.structs.replace(STORE[1], function="set")),
                    at=2.0,
                    code="value-too-large",
                    help=(("allow more", "rallypoint.serve(max_bytes=...)"),),
                ),
            ),
            rank(1, 1, raised=NO_KEY, at=6.1, order=1),
        ),
        "value-too-large",
        (0,),
        'rank 0: "weights" has 3.0 GiB, and a value may have 2.0 GiB',
    ),
    History(
        "one-never-joins",
        job(waited(0), waited(1), rank(2, phase="importing", phase_at=0.3, stack=LOADING)),
        "ranks-missing",
        (2,),
        "ranks 0-1 waited in init_process_group until the timeout; rank 2 never came",
        "likely",
    ),
    History(  # two that do not reach each other, as behind a firewall; rank 0 reaches both
        "two-are-still-in-the-call-that-the-waiting-rank-has-left",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", phase="running", frames=ALL_REDUCE),
            rank(1, phase="joining", phase_at=0.3, stack=JOINING),
            stopped(2, JOINING, phase="joining", phase_at=0.3),
        ),
        "ranks-missing",
        (1, 2),
        "rank 0 waited in all_reduce until the timeout; ranks 1-2 never came",
        "likely",
    ),
    History(
        "one-never-reduces",
        job(
            waited(
                0,
                "Timed out waiting 4000ms for recv operation to complete",
                call="all_reduce",
                phase="running",
            ),
            rank(1, stack=LOADING),
        ),
        "ranks-missing",
        (1,),
        "rank 0 waited in all_reduce until the timeout; rank 1 never came",
        "likely",
    ),
    History(
        "a-child-had-failed-before",
        job(
            stopped(0),
            rank(1, 1, raised=raised("_queue.Empty", "", (MAIN,), at=1.2), said=CHILD, at=1.3),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised _queue.Empty",
    ),
    History(
        "a-call-of-torchs-rpc-failed-in-another-rank",
        job(rank(0, 1, raised=ASKED, at=1.3), stopped(1)),
        "rank-raised",
        (1,),
        "rank 1 raised FileNotFoundError: [Errno 2] No such file or directory: '/data/shard7.bin'",
    ),
    History(
        "a-checkpoint-failed-in-one-rank",
        job(*(in_checkpoint(number, FULL_DISK) for number in range(3))),
        "rank-raised",
        (1,),
        "rank 1 raised OSError: [Errno 28] No space left on device",
    ),
    History(
        "a-checkpoint-failed-in-two-ranks",
        job(*(in_checkpoint(i, FULL_DISK, (2, "ValueError: no shards")) for i in range(3))),
        "rank-raised",
        (1,),
        "rank 1 raised OSError: [Errno 28] No space left on device",
        others=("rank-raised",),
    ),
    History(
        "a-checkpoint-failed-in-a-rank-that-has-not-raised-it",
        job(in_checkpoint(0, FULL_DISK), stopped(1), in_checkpoint(2, FULL_DISK)),
        "rank-raised",
        (1,),
        "rank 1 raised OSError: [Errno 28] No space left on device",
        "likely",
    ),
    History(
        "a-child-of-mp-spawn-was-killed-for-memory",
        job(
            rank(
                0,
                1,
                at=1.5,
                raised=raised(
                    "torch.multiprocessing.spawn.ProcessExitedException",
                    "process 1 terminated with signal SIGKILL",
                ),
            ),
            memory=MEMORY,
        ),
        "rank-raised",
        (0,),
        "rank 0 raised torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        "certain",
    ),
    History(
        "a-child-of-the-missing-rank-was-killed-for-memory",
        job(
            waited(
                0,
                "Timed out waiting 4000ms for recv operation to complete",
                call="all_reduce",
                phase="running",
            ),
            rank(1, stack=LOADING, dead_child=(24316, 0, 9)),
            memory=MEMORY,
        ),
        "ranks-missing",
        (1,),
        "rank 0 waited in all_reduce until the timeout; rank 1 never came",
        "likely",
    ),
    History(
        "a-pool-of-the-missing-rank-lost-a-task",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", phase="running"),
            rank(
                1,
                stack=(
                    MAIN,
                    Frame("/home/ada/exp/data.py", 12, "build_index"),
                    Frame("/usr/lib/python3.11/multiprocessing/pool.py", 367, "map"),
                ),
                dead_child=(24316, 3, 0),
            ),
        ),
        "ranks-missing",
        (1,),
        "rank 0 waited in all_reduce until the timeout; rank 1 never came",
        "likely",
    ),
    History(  # rank 0 alone is in a barrier
        "a-barrier-beside-ddps-backward",
        job(
            waited(0, TIME_IS_UP, call="barrier", phase="running", frames=BARRIER),
            waited(1, TIME_IS_UP, call="", phase="running", frames=BACKWARD),
            lost(2, frames=BACKWARD, call="", at=4.01, order=0, wait=(3.9, 0.0)),
        ),
        "collective-mismatch",
        (0, 1, 2),
        "the ranks waited for each other in different collectives, barrier and backward(), until the timeout",
        "likely",
    ),
    History(  # rank 1 has skipped a batch; rank 0 catches the timeout, and comes to the barrier, too
        "a-timeout-in-another-collective-was-caught",
        job(
            lost(
                0,
                frames=BARRIER,
                call="barrier",
                at=4.1,
                wait=(0.05, 0.01),
                handled=(
                    raised(
                        "RuntimeError",
                        TIME_IS_UP,
                        ALL_REDUCE[2:],
                        call="all_reduce",
                        at=4.0,
                        wait=(4.0, 0.01),
                        caught_at=STEP,
                    ),
                ),
            ),
            rank(
                1,
                1,
                order=2,
                at=4.1,
                raised=raised(
                    "RuntimeError", TIME_IS_UP, BARRIER, call="barrier", at=4.0, wait=(3.8, 0.01)
                ),
            ),
        ),
        "collective-mismatch",
        (0, 1),
        "the ranks waited for each other in different collectives, all_reduce and barrier, until the timeout",
        "likely",
    ),
    History(  # the first that gives up closes the other's connection
        "ranks-that-both-receive",
        job(
            waited(0, TIME_IS_UP, call="recv", phase="running", frames=RECEIVING),
            lost(1, frames=RECEIVING, call="recv", at=4.01, order=0, wait=(3.9, 0.0)),
        ),
        "cause-unknown",
        (0, 1),
        "both ranks waited in recv until the timeout; the cause is not known",
        "possible",
    ),
    History(
        "ranks-that-send-and-receive-with-other-tags",
        job(
            waited(
                0,
                TIME_IS_UP,
                call="send",
                phase="running",
                frames=(MAIN, Frame(f"{TORCH}/distributed_c10d.py", 2600, "send", "work.wait()")),
            ),
            waited(1, TIME_IS_UP, call="recv", phase="running", frames=RECEIVING),
        ),
        "cause-unknown",
        (0, 1),
        "both ranks waited in recv and send until the timeout; the cause is not known",
        "possible",
    ),
    History(  # when it came to its forward is not known: it may be late, and of another group
        "a-barrier-beside-ddps-forward-that-nobody-timed",
        job(
            waited(0, TIME_IS_UP, call="barrier", phase="running", frames=BARRIER),
            lost(1, frames=BACKWARD, call="", at=4.2),
        ),
        "collective-mismatch",
        (0, 1),
        "the ranks waited for each other in different collectives, barrier and backward(), until the timeout",
        "possible",
    ),
    History(  # of a DTensor
        "a-norm-of-gradients-beside-a-forward",
        job(
            waited(
                0,
                TIME_IS_UP,
                call="",
                phase="running",
                frames=(
                    MAIN,
                    Frame(
                        "/venv/lib/python3.11/site-packages/torch/nn/utils/clip_grad.py",
                        41,
                        "_no_grad_wrapper",
                    ),
                    Frame(
                        "/venv/lib/python3.11/site-packages/torch/nn/utils/clip_grad.py",
                        230,
                        "clip_grad_norm_",
                    ),
                    Frame(f"{TORCH}/_functional_collectives.py", 142, "wait_tensor"),
                ),
            ),
            lost(1, frames=BARRIER, call="barrier", at=4.01, wait=(3.9, 0.0)),
        ),
        "collective-mismatch",
        (0, 1),
        "the ranks waited for each other in different collectives, torch's clip_grad_norm_() and barrier, until the timeout",
        "likely",
    ),
    History(  # it is not the one that the launcher holds: ranks of another job might have come
        "a-group-larger-than-the-job-at-its-own-address",
        job(
            waited(0, meeting=OF_FOUR),
            rank(1, sent=("SIGTERM",), phase="joining", meeting=OF_FOUR),
        ),
        "world-size-differs",
        (0, 1),
        "both ranks called init_process_group with world_size=4, and the job has 2 ranks",
        "possible",
    ),
    History(  # more time would not help
        "the-missing-rank-was-stopped",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", phase="running"),
            rank(1, halted_by="stopped (SIGSTOP)"),
        ),
        "ranks-missing",
        (1,),
        "rank 0 waited in all_reduce until the timeout; rank 1 never came",
        "likely",
    ),
    # Either may be the odd one. With both errors it is one mismatch all the same.
    History(
        "two-ranks-in-different-calls",
        job(calls_differ(1, "BROADCAST", 0, "ALLREDUCE", BROADCAST), stopped(0)),
        "collective-mismatch",
        (1,),
        "rank 1 was in BROADCAST, and rank 0 in ALLREDUCE",
    ),
    History(
        "three-ranks-that-each-tell-the-same-mismatch",
        job(
            calls_differ(0, "ALLREDUCE", 1, "BROADCAST", ALL_REDUCE),
            calls_differ(1, "BROADCAST", 0, "ALLREDUCE", BROADCAST),
            calls_differ(2, "ALLREDUCE", 1, "BROADCAST", ALL_REDUCE),
        ),
        "collective-mismatch",
        (0, 1, 2),
        "rank 0 was in ALLREDUCE, and rank 1 in BROADCAST",
    ),
    History(
        "a-rank-keeps-a-lock",
        job(rank(0, 1, raised=NOT_HAD, at=4.1), rank(1, stack=LOADING)),
        "lock-timeout",
        (0,),
        'rank 0: the lock "checkpoint" was not had within 3 s: rank 1 (pid 24315 on gpu01) has had it for 4.0 s',
        "likely",
    ),
    History(
        "a-batch-system-signals-the-loaders-too",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised(
                    "RuntimeError",
                    "DataLoader worker (pid 24991) is killed by signal: Terminated. ",
                    at=1.2,
                ),
                at=1.3,
            ),
            interrupted_by="SIGTERM",
        ),
        "interrupted",
        (),
        "the job was stopped by SIGTERM",
        status=143,
    ),
    # Rank 1 caught it to save its state; rank 2 is on its way out of the call.
    History(
        "a-rank-that-caught-the-timeout-is-not-missing",
        job(
            waited(
                0,
                "Timed out waiting 4000ms for recv operation to complete",
                call="all_reduce",
                phase="running",
            ),
            rank(
                1,
                handled=(
                    raised(
                        "RuntimeError",
                        "Timed out waiting 4000ms for recv operation to complete",
                        at=1.3,
                        call="all_reduce",
                    ),
                ),
                stack=(MAIN,),
            ),
            rank(
                2,
                stack=(
                    MAIN,
                    Frame(f"{TORCH}/c10d_logger.py", 90, "wrapper"),
                    Frame("/usr/lib/python3.11/logging/__init__.py", 1477, "debug"),
                ),
            ),
            rank(3, stack=LOADING),
        ),
        "ranks-missing",
        (3,),
        "rank 0 waited in all_reduce until the timeout; rank 3 never came",
        "likely",
    ),
    History(
        "a-rank-came-when-the-others-had-given-up",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", phase="running"),
            waited(1, TIME_IS_UP, call="all_reduce", phase="running"),
            came(2, at=4.2, stack=LOADING),
        ),
        "ranks-missing",
        (2,),
        "ranks 0-1 waited in all_reduce until the timeout; rank 2 came too late",
        "likely",
    ),
    # Where it was asked is not known: in its except clause, as likely as before it came.
    History(
        "a-rank-that-came-late-and-caught-that",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", phase="running"),
            rank(1, stack=(MAIN,), handled=(LATE_AND_CAUGHT,)),
            now=4.4,
        ),
        "ranks-missing",
        (1,),
        "rank 0 waited in all_reduce until the timeout; rank 1 came too late",
        "likely",
    ),
    # Rank 1 was there in time, and then tried again.
    History(
        "a-rank-that-tries-again-came-in-time",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", phase="running"),
            msgspec.structs.replace(
                came(1, at=4.2),
                handled=(
                    raised(
                        "RuntimeError",
                        TIME_IS_UP,
                        ALL_REDUCE,
                        at=4.0,
                        wait=(4.0, 0.0),
                        call="all_reduce",
                        caught_at=MAIN,
                    ),
                ),
            ),
            rank(2, stack=LOADING),
        ),
        "ranks-missing",
        (2,),
        "rank 0 waited in all_reduce until the timeout; rank 2 never came",
        "likely",
    ),
    History(
        "a-rank-that-others-waited-for-joins-when-they-have-given-up",
        job(waited(0), waited(1), rank(2, phase="joining", phase_at=4.1, stack=LOADING)),
        "ranks-missing",
        (2,),
        "ranks 0-1 waited in init_process_group until the timeout; rank 2 came too late",
        "likely",
    ),
    History(
        "a-rank-that-monitored-barrier-names-came-since",
        job(
            waited(
                0,
                "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms",
                call="",
                phase="running",
            ),
            waited(1, TIME_IS_UP, call="", phase="running"),
            rank(
                2,
                1,
                raised=raised("RuntimeError", CLOSED, (MAIN,), at=4.2),
                stack=LOADING,
                order=2,
                at=4.3,
            ),
        ),
        "ranks-missing",
        (2,),
        "ranks 0-1 waited in a collective until the timeout; rank 2 came too late",
        "likely",
    ),
    # It lost the others when they had given up, in a call in which it had been all the time.
    History(
        "a-rank-that-monitored-barrier-names-was-in-another-call",
        job(
            waited(
                0,
                "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms",
                call="monitored_barrier",
                phase="running",
            ),
            waited(1, TIME_IS_UP, call="monitored_barrier", phase="running"),
            rank(
                2,
                1,
                raised=raised("RuntimeError", CLOSED, RECEIVING, at=4.05),
                order=2,
                at=4.3,
            ),
        ),
        "ranks-missing",
        (2,),
        "ranks 0-1 waited in monitored_barrier until the timeout; rank 2 never came",
        "likely",
    ),
    # A rank in recv(), and one that tries another group now and then.
    History(
        "a-rank-in-another-call-is-missing",
        job(
            waited(
                0,
                "Timed out waiting 4000ms for recv operation to complete",
                call="all_reduce",
                phase="running",
            ),
            rank(
                1,
                stack=(
                    MAIN,
                    Frame(f"{TORCH}/c10d_logger.py", 83, "wrapper"),
                    Frame(f"{TORCH}/distributed_c10d.py", 2700, "recv"),
                ),
            ),
            rank(
                2,
                handled=(
                    raised(
                        "RuntimeError",
                        "Timed out waiting 1000ms for recv operation to complete",
                        at=3.9,
                        call="barrier",
                    ),
                ),
                stack=LOADING,
            ),
        ),
        "ranks-missing",
        (1, 2),
        "rank 0 waited in all_reduce until the timeout; ranks 1-2 never came",
        "likely",
    ),
    History(
        "a-thread-of-the-rank-died-before",
        job(rank(0, 1, raised=VALUE, in_thread=LOST, at=1.3), stopped(1)),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
        "likely",
    ),
    History(
        "a-thread-of-the-rank-died-after-it",
        job(
            rank(0, 1, raised=VALUE, in_thread=msgspec.structs.replace(LOST, at=1.3), at=1.4),
            stopped(1),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "a-rank-raises-again-what-ended-its-thread",
        job(rank(0, 1, raised=VALUE, in_thread=VALUE, at=1.3), stopped(1)),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "the-kernel-killed-a-process-of-somebody-else",
        job(
            rank(0, 1, raised=POOL, at=1.3),
            memory=msgspec.structs.replace(COUNTED, killed_pids=(999999,)),
        ),
        "rank-raised",
        (0,),
        "rank 0 lost a worker process of a pool: it ended without a result",
        "likely",
    ),
    History(
        "a-rank-that-lost-one-that-gave-up-is-no-cause",
        job(
            waited(
                0,
                "Timed out waiting 4000ms for recv operation to complete",
                call="all_reduce",
                phase="running",
            ),
            lost(1, order=2, at=4.1),
            rank(2, stack=LOADING),
        ),
        "ranks-missing",
        (2,),
        "rank 0 waited in all_reduce until the timeout; rank 2 never came",
        "likely",
    ),
    History(
        "everybody-lost",
        job(lost(0, order=1, at=1.6), lost(1, order=0, at=1.5), memory=COUNTED),
        "cause-unknown",
        (1,),
        "rank 1 lost another rank (all_reduce: Connection closed by peer); the cause is not known",
        "possible",
    ),
    History(
        "nothing-seen",
        job(*same(2, code=0), stop_reason="asked to"),
        "cause-unknown",
        (),
        "the job was stopped, and no rank shows why",
    ),
    History(
        "a-rule-forbids-the-port",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "torch.distributed.DistNetworkError",
                    "The server socket has failed to listen on any local network address. port: 29501, useIpv6: false, code: -13, "
                    "name: EACCES, message: permission denied",
                ),
                said_traceback=True,
            ),
            lost(1),
        ),
        "port-unavailable",
        (0,),
        "rank 0 may not listen on port 29501: a rule of the machine's forbids it",
    ),
    History(
        "one-is-closing-down-when-the-others-lose-it",
        job(rank(0, phase="finishing", phase_at=1.0), lost(1), lost(2)),
        "rank-left-early",
        (0,),
        "rank 0 came to the end of train.py while others still needed it",
        "likely",
    ),
    History(
        "one-left-by-sys-exit-0-while-the-others-waited",
        job(
            rank(0, phase="finishing", phase_at=1.0, exit_line="train.py:12 in main"),
            lost(1),
            lost(2),
        ),
        "rank-left-early",
        (0,),
        "rank 0 left train.py by sys.exit while others still needed it",
        "likely",
    ),
    History(
        "two-have-closed-their-group-and-work-on",
        job(
            rank(0, phase="running", closed_at=1.2, closed_line="train.py:30"),
            lost(1),
            stopped(2, closed_at=1.21),
        ),
        "rank-left-early",
        (0, 2),
        "ranks 0 and 2 closed their process group while others still needed it",
        "likely",
    ),
    History(
        "one-ended-well-after-the-others-had-lost-it-and-was-at-its-end-before",
        job(rank(0, 0, phase="finishing", phase_at=1.4, at=1.7, order=1), lost(1, order=0)),
        "rank-left-early",
        (0,),
        "rank 0 ended with exit code 0 while others still needed it",
        "likely",
    ),
    History(
        "who-had-closed-its-own-group-was-not-hurt-by-those-who-closed-theirs",
        job(stopped(0, closed_at=1.2), lost(1, closed_at=1.2)),
        "cause-unknown",
        (1,),
        "rank 1 lost another rank (all_reduce: Connection closed by peer); the cause is not known",
        "possible",
    ),
    History(
        "the-group-was-open-in-two-ranks-and-closed-before-it-was-in-the-third",
        job(
            rank(
                0,
                1,
                order=1,
                at=3.5,
                phase="joining",
                phase_at=3.1,
                said_traceback=True,
                raised=raised(
                    "RuntimeError",
                    f"Gloo connectFullMesh failed with {CLOSED}",
                    (MAIN,),
                    at=3.4,
                    call="init_process_group",
                ),
            ),
            stopped(
                1, (MAIN,), phase="joining", phase_at=3.3, closed_at=3.3, closed_line="train.py:5"
            ),
            stopped(2, (MAIN,), closed_at=3.31, closed_line="train.py:5"),
        ),
        "rank-left-early",
        (1, 2),
        "ranks 1-2 closed their process group while others still needed it",
        "likely",
    ),
    History(
        "who-waits-for-a-group-was-not-hurt-by-those-who-closed-theirs",
        job(stopped(0, closed_at=1.2), waited(1)),
        "ranks-missing",
        (0,),
        "rank 1 waited in init_process_group until the timeout; rank 0 never came",
        "likely",
    ),
    History(
        "who-closed-its-group-because-of-the-loss-was-hurt-and-no-cause",
        job(stopped(0, closed_at=1.2), lost(1, closed_at=1.55), stopped(2, closed_at=1.6)),
        "rank-left-early",
        (0,),
        "rank 0 closed its process group while others still needed it",
        "likely",
    ),
    History(
        "who-leaves-by-an-exit-code-closes-its-group-for-another-reason",
        job(stopped(0, closed_at=1.2, left_at="train.py:9 in main"), lost(1)),
        "cause-unknown",
        (1,),
        "rank 1 lost another rank (all_reduce: Connection closed by peer); the cause is not known",
        "possible",
    ),
    History(
        "who-comes-to-its-end-after-the-others-were-hurt-is-no-cause",
        job(rank(0, phase="finishing", phase_at=9.0), lost(1), lost(2)),
        "cause-unknown",
        (1,),
        "rank 1 lost another rank (all_reduce: Connection closed by peer); the cause is not known",
        "possible",
    ),
    History(
        "template-killed",
        job(
            rank(0, sig=9),
            rank(1, sig=9, order=1),
            helper=HelperLost("template", 4711, Ended(signal=9, at=2.0)),
        ),
        "launcher-died",
        (),
        "rallypoint's template was ended by SIGKILL",
        status=137,
    ),
    History(
        "template-killed-for-memory",
        job(
            memory=MemoryEvidence(oom_kills=1, counted=True, limit=64 << 20),
            helper=HelperLost("template", 4711, Ended(signal=9, at=0.6)),
        ),
        "launcher-died",
        (),
        "rallypoint's template was ended by SIGKILL",
        "likely",
        137,
    ),
    History(
        "template-killed-for-memory-by-the-log",
        job(
            stopped(0),
            memory=MemoryEvidence(
                oom_kills=1, counted=True, limit=64 << 20, killed_pids=(4711,), kernel_log_read=True
            ),
            helper=HelperLost("template", 4711, Ended(signal=9, at=2.0)),
        ),
        "launcher-died",
        (),
        "rallypoint's template was ended by SIGKILL",
        status=137,
    ),
    History(
        "template-crashed",
        job(
            stopped(0),
            helper=HelperLost(
                "template",
                4711,
                Ended(signal=11, at=2.0),
                ("Fatal Python error: Segmentation fault",),
            ),
        ),
        "launcher-died",
        (),
        "rallypoint's template was ended by SIGSEGV",
        status=70,
    ),
    History(
        "template-crashed-beneath-a-limit-on-its-address-space",
        job(
            stopped(0),
            memory=MemoryEvidence(address_space=400 << 20),
            helper=HelperLost("template", 4711, Ended(signal=6, at=0.2)),
        ),
        "launcher-died",
        (),
        "rallypoint's template was ended by SIGABRT",
        status=70,
    ),
    History(
        "ctrl-c",
        job(
            stopped(0),
            stopped(1),
            stopped(2),
            rank(3, sent=("SIGINT",), stack=LOADING),
            rank(4, sent=("SIGINT",), phase="importing", phase_at=0.31),
            interrupted_by="SIGINT",
            now=12.34,
        ),
        "interrupted",
        (),
        "the job was stopped by Ctrl-C, 12.3 s after its start",
        status=130,
    ),
    History(
        "ctrl-c-beside-a-rank-that-was-stopped",
        job(
            stopped(0),
            rank(1, sent=("SIGINT",), phase_at=0.31, halted_by="stopped (SIGSTOP)"),
            stopped(2),
            interrupted_by="SIGINT",
            now=12.34,
        ),
        "interrupted",
        (),
        "the job was stopped by Ctrl-C, 12.3 s after its start",
        status=130,
    ),
    History(
        "ctrl-c-on-ranks-in-different-collectives",
        job(
            stopped(0), stopped(1, stack=BROADCAST), stopped(2), interrupted_by="SIGINT", now=12.34
        ),
        "interrupted",
        (),
        "the job was stopped by Ctrl-C, 12.3 s after its start",
        status=130,
    ),
    History(
        "ctrl-c-on-an-exception-whose-finally-waits",
        job(
            stopped(0),
            stopped(1, stack=IN_FINALLY, handles=VALUE),
            stopped(2),
            interrupted_by="SIGINT",
            now=12.34,
        ),
        "interrupted",
        (),
        "the job was stopped by Ctrl-C, 12.3 s after its start",
        status=130,
    ),
    History(
        "an-exception-whose-finally-waits-while-the-others-time-out",
        job(
            waited(0, TIME_IS_UP, call="all_reduce", frames=ALL_REDUCE),
            rank(1, stack=IN_FINALLY, handles=VALUE),
        ),
        "rank-raised",
        (1,),
        "rank 1 raised ValueError: shapes do not match: 512 and 500",
        "likely",
    ),
    History(
        "an-except-clause-that-trains-on-beside-a-rank-that-raised",
        job(
            rank(0, 1, raised=VALUE, at=1.3),
            rank(1, stack=IN_FINALLY, handles=raised("KernelMissing", "no fused kernel", at=0.2)),
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "scheduler-signals-everybody",
        job(rank(0, sig=15), rank(1, sig=15, order=1), interrupted_by="SIGTERM"),
        "interrupted",
        (),
        "the job was stopped by SIGTERM",
        status=143,
    ),
    History(
        "raised-before-ctrl-c",
        job(
            rank(0, 1, raised=VALUE, said_traceback=True),
            rank(1, sent=("SIGINT",)),
            interrupted_by="SIGINT",
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: shapes do not match: 512 and 500",
    ),
    History(
        "another-launchers-variable",
        job(rank(0, 1, raised=raised("KeyError", "'SLURM_PROCID'", (MAIN,)), said_traceback=True)),
        "rank-raised",
        (0,),
        "rank 0 raised KeyError: 'SLURM_PROCID'",
    ),
    History(
        "no-such-device",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised(
                    "torch.AcceleratorError", "CUDA error: invalid device ordinal", (MAIN,)
                ),
                said_traceback=True,
            ),
        ),
        "device-missing",
        (1,),
        "rank 1 asked for a device that is not there: torch.AcceleratorError: CUDA error: invalid device ordinal",
    ),
    History(
        "nobody-at-the-meeting-point",
        job(unmet(0), unmet(1), reached=seen("refused", 111)),
        "port-refused",
        (0, 1),
        "both ranks found nobody at 10.0.0.5:29500: nothing listens there",
    ),
    History(
        "a-firewall-refuses-what-somebody-listens-for",
        job(
            unmet(0),
            unmet(1),
            reached=seen(
                "refused",
                111,
                here=True,
                holders=(
                    "python train.py (pid 5112, user ada, started 3 h ago) is listening on 10.0.0.5:29500",
                ),
                rejected=Blocked(
                    "reject", "nft: inet filter input", "tcp dport 29500 reject", True
                ),
            ),
        ),
        "firewall-blocks",
        (0, 1),
        "both ranks could not reach 10.0.0.5:29500: the connection is refused, and somebody listens there",
    ),
    History(
        "a-firewall-may-refuse-what-somebody-listens-for",
        job(
            unmet(0),
            unmet(1),
            reached=seen(
                "refused",
                111,
                here=True,
                holders=(
                    "python train.py (pid 5112, user ada, started 3 h ago) is listening on 10.0.0.5:29500",
                ),
                rejected=Blocked(
                    "reject", "nft: inet filter input", "limit rate over 9/second reject", False
                ),
            ),
        ),
        "firewall-blocks",
        (0, 1),
        "both ranks could not reach 10.0.0.5:29500: the connection is refused, and somebody listens there",
        "likely",
    ),
    History(
        "nobody-listens-and-one-address-of-the-name-has-no-way",
        job(
            unmet(0, host="localhost"),
            unmet(1, host="localhost"),
            reached=Reached(
                "localhost",
                29500,
                (Tried("[::1]:29500", "unreachable", 99), Tried("127.0.0.1:29500", "refused", 111)),
                here=True,
                rules=("no rule of this machine's firewall drops it",),
            ),
        ),
        "port-refused",
        (0, 1),
        "both ranks found nobody at localhost:29500: nothing listens there",
    ),
    History(
        "nobody-yet-since-rank-0-is-elsewhere",
        job(
            rank(0, phase="importing", stack=LOADING),
            unmet(1, sent=()),
            reached=seen("refused", 111),
        ),
        "ranks-missing",
        (0,),
        "rank 1 waited in init_process_group until the timeout; rank 0 never came",
        "likely",
    ),
    History(
        "a-name-without-an-address",
        job(
            unmet(0, host="node08"),
            unmet(1, host="node08"),
            reached=Reached("node08", 29500, unresolved="Name or service not known"),
        ),
        "address-unresolved",
        (0, 1),
        "both ranks could not reach node08:29500: node08 has no address here (Name or service not known)",
    ),
    History(
        "a-resolver-that-answered-torch-alone",
        job(
            unmet(0, host="node08", said=(NOT_RESOLVED,)),
            reached=Reached(
                "node08",
                29500,
                unresolved="the resolver gave no answer within 0.2 s",
                unanswered=True,
            ),
        ),
        "address-unresolved",
        (0,),
        "rank 0 could not reach node08:29500: for node08 the resolver gave no answer within 0.2 s",
    ),
    History(
        "a-resolver-that-is-silent",
        job(
            unmet(0, host="node08"),
            reached=Reached(
                "node08",
                29500,
                unresolved="the resolver gave no answer within 0.2 s",
                unanswered=True,
            ),
        ),
        "address-unresolved",
        (0,),
        "rank 0 could not reach node08:29500: for node08 the resolver gave no answer within 0.2 s",
    ),
    History(
        "packets-are-dropped",
        job(unmet(0), unmet(1), reached=seen("dropped")),
        "address-unreachable",
        (0, 1),
        "both ranks could not reach 10.0.0.5:29500: no answer at all: packets to it are dropped, or it is off",
    ),
    History(
        "a-foreign-service-and-torch-hangs",
        job(
            waits(0),
            waits(1),
            reached=seen(
                "answered", first=b"<!DOCTYPE HTML>\n<html>", here=True, holders=(HOLDER,)
            ),
        ),
        "store-foreign",
        (0, 1),
        "both ranks met a foreign service at 10.0.0.5:29500: it answered '<!DOCTYPE HTML>'",
    ),
    History(
        "a-foreign-service-by-torchs-words",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "torch.distributed.DistNetworkError",
                    "Ping failed, invalid value returned from server. Expected: 30464, Got: 1347703880",
                    (MAIN,),
                    call="init_process_group",
                ),
                meeting=AT_NODE,
                said_traceback=True,
            )
        ),
        "store-foreign",
        (0,),
        "rank 0 met a foreign service at 10.0.0.5:29500: it answered 'HTTP'",
    ),
    History(
        "a-store-that-is-stopped",
        job(waits(0), waits(1), reached=seen("silent", here=True, holders=(HOLDER,), stopped=811)),
        "store-silent",
        (0, 1),
        "both ranks got no answer at 10.0.0.5:29500: its process (pid 811) is stopped (state T)",
    ),
    History(
        "somebody-who-says-nothing",
        job(waits(0), waits(1), reached=seen("silent", here=True, holders=(HOLDER,))),
        "store-silent",
        (0, 1),
        "both ranks got no answer at 10.0.0.5:29500: it accepts the connection, and says nothing",
        "likely",
    ),
    History(
        "the-meeting-point-is-well-and-a-rank-is-missing",
        job(
            rank(0, phase="importing", stack=LOADING),
            unmet(1),
            reached=seen("answered", first=ANSWER),
        ),
        "ranks-missing",
        (0,),
        "rank 1 waited in init_process_group until the timeout; rank 0 never came",
        "likely",
    ),
    History(
        "torchs-store-is-gone",
        job(
            rank(0, 1, raised=STORE_GONE, said=STORE_LOG), stopped(1), reached=seen("refused", 111)
        ),
        "store-closed",
        (0,),
        "rank 0 lost torch's store at 10.0.0.5:29500: whoever served it is gone",
    ),
    History(
        "torchs-store-takes-no-more",
        job(
            rank(0, 1, raised=STORE_GONE, said=STORE_LOG),
            stopped(1),
            reached=seen("answered", first=ANSWER),
        ),
        "value-too-large",
        (0,),
        "torch's store at 10.0.0.5:29500 closed the connection of rank 0, and goes on serving others",
        "likely",
    ),
    History(
        "the-producer-is-gone",
        job(
            stopped(0),
            rank(
                1,
                1,
                raised=raised(
                    "ConnectionRefusedError", "[Errno 111] Connection refused", FETCHING, at=1.0
                ),
                at=1.0,
            ),
        ),
        "producer-gone",
        (1,),
        "rank 1 took a tensor whose producer is gone: ConnectionRefusedError: [Errno 111] Connection refused",
    ),
    History(
        "a-process-of-a-pool-is-gone",
        job(rank(0, 1, raised=POOL, at=1.3), memory=COUNTED),
        "rank-raised",
        (0,),
        "rank 0 lost a worker process of a pool: it ended without a result",
        "likely",
    ),
    History(
        "a-process-of-a-pool-was-killed-for-memory",
        job(rank(0, 1, raised=POOL, at=1.3), memory=MEMORY),
        "rank-out-of-memory",
        (0,),
        "rank 0 lost a worker process of a pool: the kernel killed a process for lack of memory",
        "likely",
    ),
    History(
        "the-producer-hands-nothing-over",
        job(rank(0, 1, raised=raised("EOFError", "", FETCHING))),
        "producer-gone",
        (0,),
        "rank 0 took a tensor that its producer did not hand over: EOFError",
        "likely",
    ),
    History(
        "the-producer-has-no-descriptor",
        job(
            rank(
                0,
                1,
                raised=raised("EOFError", "", FETCHING),
                said=("OSError: [Errno 24] Too many open files: '/tmp'",),
            )
        ),
        "files-exhausted",
        (0,),
        "rank 0 has as many files open as it may have: EOFError",
    ),
    History(
        "no-room-for-a-descriptor",
        job(rank(0, 1, raised=raised("RuntimeError", "received 0 items of ancdata", FETCHING))),
        "files-exhausted",
        (0,),
        "rank 0 has as many files open as it may have: RuntimeError: received 0 items of ancdata",
    ),
    History(
        "a-lambda-for-a-spawned-process",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "AttributeError", "Can't pickle local object 'main.<locals>.<lambda>'", SPAWNING
                ),
            )
        ),
        "launch-argument",
        (0,),
        "rank 0 gave a new process something that cannot be pickled: Can't pickle local object 'main.<locals>.<lambda>'",
    ),
    History(
        "an-error-in-a-spawned-process",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "torch.multiprocessing.spawn.ProcessRaisedException", IN_SPAWNED, (MAIN,)
                ),
            )
        ),
        "rank-raised",
        (0,),
        "rank 0 raised ValueError: bad batch",
    ),
    History(
        "an-unguarded-main",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "torch.multiprocessing.spawn.ProcessExitedException",
                    "process 0 terminated with exit code 1",
                    (MAIN,),
                    code="main-unguarded",
                    why=(
                        "train.py:120 runs again in every new process, which imports the program anew",
                    ),
                ),
            )
        ),
        "main-unguarded",
        (0,),
        "the program starts processes whenever it is imported, so those that rank 0 spawned ended at once",
    ),
    History(
        "a-variable-that-was-removed",
        job(
            *(rank(i, 1, order=i, raised=raised("ValueError", NO_RANK, (MAIN,))) for i in range(2)),
            held_address="127.0.0.1:41235",
        ),
        "env-missing",
        (0, 1),
        "RANK is not set in both ranks, and init_process_group reads it",
    ),
    History(
        "an-interface-that-is-not-there",
        job(
            rank(
                0,
                1,
                raised=raised(
                    "RuntimeError",
                    "[enforce fail at gloo/device.cc:84] ifa != nullptr. Unable to find address for: ib7",
                    (MAIN,),
                ),
            )
        ),
        "interface-missing",
        (0,),
        "gloo in rank 0 was to use the network interface ib7, which has no address here",
    ),
]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_history(history: History) -> None:
    first, *others = diagnose(history.job)
    assert (first.code, first.ranks) == (history.code, history.ranks)
    assert (first.confidence, first.exit_status) == (history.confidence, history.status)
    assert tuple(report.code for report in others) == history.others
    if history.headline:
        assert first.headline == history.headline


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_story(history: History) -> None:
    told = render.text(diagnose(history.job)) + "\n"
    path = STORIES / f"{history.name}.txt"
    if os.environ.get("UPDATE_STORIES"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(told, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == told


def test_every_story_has_its_history() -> None:
    assert {path.stem for path in STORIES.glob("*.txt")} == {history.name for history in HISTORIES}


def test_a_line_of_the_loaders_is_not_where_a_rank_noticed() -> None:
    frames = (
        Frame(
            "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
            1275,
            "_try_get_data",
            "data = self._data_queue.get()",
        ),
    )
    report = diagnose(
        job(
            stopped(0),
            rank(1, 1, raised=raised("RuntimeError", KILLED_WORKER.format("Killed"), frames)),
        )
    )[0]
    assert report.evidence[0] == "rank 1 itself was not killed"


FINALIZER = Frame(
    "/venv/lib/python3.11/site-packages/torch/library.py",
    665,
    "_del_library",
    "captured_impls -= op_impls",
)


def member(number: int, one: RankEvidence) -> RankEvidence:
    """The rank with this number in the group that saved."""
    assert one.raised is not None
    return msgspec.structs.replace(one, raised=msgspec.structs.replace(one.raised, member=number))


@pytest.mark.parametrize(
    ("ranks", "at_fault", "headline"),
    [
        (
            (stopped(0), member(0, in_checkpoint(1, FULL_DISK)), stopped(2), member(1, in_checkpoint(3, FULL_DISK))),
            (3,),
            "rank 3 raised OSError: [Errno 28]",
        ),
        (
            tuple(member(1, in_checkpoint(number, FULL_DISK)) for number in range(3)),
            (0, 1, 2),
            "all 3 ranks raised OSError: [Errno 28]",
        ),
        (
            (stopped(0), stopped(1), member(0, in_checkpoint(2, FULL_DISK)), stopped(3)),
            (2,),
            "rank 2 raised torch.distributed.checkpoint.api.CheckpointException",
        ),
        (
            (rank(0, 1, at=1.0, order=0, raised=VALUE), in_checkpoint(1, (0, "ValueError: x")), stopped(2)),
            (0,),
            "rank 0 raised ValueError: shapes do not match",
        ),
        (
            tuple(in_checkpoint(i, *((n, "OSError: [Errno 5] Input/output error") for n in range(60))) for i in range(60)),
            tuple(range(60)),
            "all 60 ranks raised OSError: [Errno 5]",
        ),
        (
            (rank(0, sig=9, at=1.0), in_checkpoint(1, (1, f"RuntimeError: {CLOSED}")), in_checkpoint(2, (1, f"RuntimeError: {CLOSED}"))),
            (0,),
            "rank 0 was killed by SIGKILL",
        ),
    ],
    ids=["a group", "each alone", "late in a group", "a cause of its own", "a long text", "a loss"],
)  # fmt: skip
def test_what_torch_raises_of_a_checkpoint_is_of_the_ranks_that_it_names(
    ranks: tuple[RankEvidence, ...], at_fault: tuple[int, ...], headline: str
) -> None:
    """Torch counts ranks in the group that saves, and raises what it has of one in all of them."""
    first, *more = diagnose(job(*ranks))
    assert first.ranks == at_fault
    assert first.headline.startswith(headline)
    assert not more


def test_what_libraries_do_while_the_interpreter_closes_down_is_no_place() -> None:
    left = rank(1, 0, at=1.9, phase="finishing", phase_at=1.1, stack=(FINALIZER,))
    (report,) = diagnose(job(lost(0, at=1.5), left))
    assert report.where == "at the end of train.py, pid 24315"
    (report,) = diagnose(
        job(lost(0, at=1.5), msgspec.structs.replace(left, ended=Ended(3, 0, 1.9, 0)))
    )
    assert report.where == "while the interpreter was closing down, pid 24315"
    (report,) = diagnose(job(stopped(0), rank(1, 3, at=1.9, phase="running", stack=(FINALIZER,))))
    assert (
        report.where
        == "/venv/lib/python3.11/site-packages/torch/library.py:665 in _del_library, pid 24315"
    )


def test_who_left_its_program_before_a_peer_noticed_stands_before_it() -> None:
    """Its sockets are closed while the interpreter closes down, and its end is heard of later."""
    (report,) = diagnose(job(lost(0, at=1.5), rank(1, 0, at=1.9, phase="finishing", phase_at=1.1)))
    assert [(moment.at, moment.who) for moment in report.timeline] == [
        (1.1, "rank 1"),
        (1.5, "rank 0"),
    ]


@pytest.mark.parametrize(
    ("words", "confidence"),
    [
        ("basic_ios::clear: iostream error", "likely"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "likely"),
        ("[Errno 28] No space left on device", "certain"),
    ],
)
def test_a_full_disk(words: str, confidence: str) -> None:
    """torch.save's words for it say nothing of a disk, and the report was certain of them."""
    saving = Frame("/x/site-packages/torch/serialization.py", 1312, "_save", "zip_file.write()")
    error = raised("RuntimeError", words, (MAIN, saving), at=1.0)
    (report,) = diagnose(job(rank(0, raised=error), rank(1)))
    assert (report.code, report.confidence) == ("rank-raised", confidence)
    assert "df -h" in [help.command for help in report.help]


def test_a_function_is_started_again_by_launch() -> None:
    refused = raised("MemoryError", "")
    ranks = [rank(i, 1, order=i, raised=refused, at=1.0 + i) for i in range(2)]
    first, *_ = diagnose(msgspec.structs.replace(job(*ranks), program="train", function=True))
    assert first.code == "rank-out-of-memory"
    assert "rallypoint.launch(train, nproc=1)" in [help.command for help in first.help]
    assert not any("rallypoint run" in help.command for help in first.help)


@pytest.mark.parametrize(
    ("number", "function", "why", "command"),
    [
        (0, True, "a rank's standard input is /dev/null", "rallypoint.launch(train, (answer,)"),
        (
            0,
            False,
            "rank 0 reads the launcher's standard input (--debug-rank chooses another rank): it was at its end, as in cron and under nohup",
            "printf",
        ),
        (
            1,
            False,
            "rank 0 reads the launcher's standard input (--debug-rank chooses another rank), and all others read /dev/null",
            "dist.broadcast",
        ),
    ],
)
def test_a_rank_that_asks_a_question(number: int, function: bool, why: str, command: str) -> None:
    asked = raised("EOFError", "EOF when reading a line", at=1.0)
    ranks = [stopped(i) if i != number else rank(i, 1, raised=asked, at=1.1) for i in range(2)]
    (report,) = diagnose(msgspec.structs.replace(job(*ranks), program="train", function=function))
    assert (report.code, report.confidence, report.why) == ("rank-raised", "certain", why)
    assert "".join(help.command for help in report.help).startswith(command)


def test_a_progress_bar_below_a_traceback_is_no_message() -> None:
    """tqdm draws it again at the end; with it "EOF when reading a line" lost its help."""
    said = (
        "Traceback (most recent call last):",
        '  File "/home/ada/exp/train.py", line 3, in <module>',
        "    main()",
        "MemoryError",
        "  3%|3         | 3/1000 [00:05<?, ?it/s]",
    )
    (report,) = diagnose(job(rank(0, 1, said=said, phase="started", at=3.0), stopped(1)))
    assert report.headline.endswith(": MemoryError")


def test_a_batch_that_was_being_taken_when_its_loader_was_killed() -> None:
    reset = raised("ConnectionResetError", "[Errno 104] Connection reset by peer", FETCHING, at=1.2)
    taking = rank(
        1, 1, raised=reset, said=("RuntimeError: " + KILLED_WORKER.format("Killed"),), at=1.3
    )
    (report,) = diagnose(job(stopped(0), taking, memory=COUNTED))
    assert (report.code, report.headline) == (
        "rank-killed",
        "a DataLoader worker of rank 1 was killed by SIGKILL",
    )


# torch's handler of SIGCHLD raised inside an import of torch's own, which logs whatever goes wrong
# in it
CAUGHT = (
    "[rank1]:W1122 23:55:12.400000 24315 torch/autograd/profiler.py:772] Unexpected error importing torch.profiler._cupti_monitor",
    "[rank1]:W1122 23:55:12.400000 24315 torch/autograd/profiler.py:772] Traceback (most recent call last):",
    "[rank1]:W1122 23:55:12.400000 24315 torch/autograd/profiler.py:772] RuntimeError: "
    + KILLED_WORKER.format("Killed"),
)


def test_a_killed_loader_of_which_a_library_swallowed_the_news() -> None:
    gone = raised("RuntimeError", "DataLoader worker (pid(s) 24990) exited unexpectedly", at=1.4)
    (report,) = diagnose(job(stopped(0), rank(1, 1, raised=gone, said=CAUGHT), memory=COUNTED))
    assert (report.code, report.headline) == (
        "rank-killed",
        "a DataLoader worker of rank 1 was killed by SIGKILL",
    )
    assert "num_workers=0" not in " ".join(
        help.command for help in report.help
    )  # it would be the rank that is killed


def test_a_loader_that_exited_is_not_the_one_that_was_killed_before() -> None:
    gone = raised(
        "RuntimeError", "DataLoader worker (pid(s) 24991, 24992) exited unexpectedly", at=1.4
    )
    (report,) = diagnose(job(stopped(0), rank(1, 1, raised=gone, said=CAUGHT), memory=COUNTED))
    assert (report.code, report.help[0].command) == (
        "rank-raised",
        "DataLoader(..., num_workers=0)",
    )


@pytest.mark.parametrize(
    ("kind", "confidence"),
    [("ConnectionResetError", "likely"), ("ConnectionRefusedError", "certain")],
)
def test_a_loader_that_died_while_its_batch_was_taken_is_no_queue_of_the_programs(
    kind: str, confidence: str
) -> None:
    loader = Frame(
        "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
        1291,
        "_try_get_data",
        "data = self._data_queue.get()",
    )
    error = raised(kind, "[Errno 104] Connection reset by peer", (MAIN, loader, *FETCHING), at=1.2)
    (report,) = diagnose(job(stopped(0), rank(1, 1, raised=error, at=1.3), memory=COUNTED))
    assert (report.code, report.confidence) == ("producer-gone", confidence)
    assert report.headline.startswith(
        f"a DataLoader worker of rank 1 did not hand over its batch: {kind}"
    )
    assert report.help[-1].command == "DataLoader(..., num_workers=0)"
    (killed,) = diagnose(
        job(
            stopped(0),
            rank(1, 1, raised=error, at=1.3),
            memory=msgspec.structs.replace(MEMORY, killed_pids=(24990,)),
        )
    )
    assert killed.evidence[0] == "the kernel's log says that it killed pid 24990"
    left = "DataLoader worker (pid 24990) exited unexpectedly with exit code 3"
    text = f"{error.traceback}\nRuntimeError: {left}. Details are lost due to multiprocessing."
    told = msgspec.structs.replace(error, traceback=text)
    (report,) = diagnose(job(stopped(0), rank(1, 1, raised=told, at=1.3), memory=COUNTED))
    assert (report.why, report.evidence) == (f"then torch said: {left}", ())
    assert [help.command for help in report.help] == ["DataLoader(..., num_workers=0)"]


def test_what_torchs_signal_handler_raised_over_it_says_who_was_killed() -> None:
    """A single rank has the terminal itself: what it said last is not known, but the traceback of
    the whole chain is.
    """
    loader = Frame(
        "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
        1291,
        "_try_get_data",
        "data = self._data_queue.get()",
    )
    error = raised(
        "ConnectionResetError",
        "[Errno 104] Connection reset by peer",
        (MAIN, loader, *FETCHING),
        at=1.2,
    )
    later = (
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        + WORKER_GONE.traceback.partition("\nThe above")[0]
    )
    (report,) = diagnose(
        job(
            rank(0, 1, raised=msgspec.structs.replace(error, traceback=error.traceback + later)),
            memory=COUNTED,
        )
    )
    assert (report.code, report.headline) == (
        "rank-killed",
        "a DataLoader worker of rank 0 was killed by SIGKILL",
    )


def test_a_log_that_was_not_kept_is_not_pointed_to() -> None:
    deep = raised(
        "ValueError",
        "bad",
        tuple(
            Frame("/home/ada/exp/train.py", line, f"level_{line}", "go()") for line in range(1, 12)
        ),
    )
    (kept,) = diagnose(job(rank(0, 1, raised=deep)))
    (lost_log,) = diagnose(job(rank(0, 1, raised=deep, log="", log_line=0)))
    assert any("more lines in rank0.log:40" in line for line in kept.said[0].lines)
    assert lost_log.logs == ("/state/runs/a1",)
    assert "".join(lost_log.said[0].lines).count("level_") == 11


@pytest.mark.parametrize(
    ("phase", "other", "where"),
    [
        (
            "importing",
            rank(0, sent=("SIGTERM",), phase="importing"),
            "while running (since +0.30 s)",
        ),  # nobody joins anything
        (
            "importing",
            rank(0, sent=("SIGTERM",), phase="joining"),
            "before init_process_group, in the program (since +0.30 s)",
        ),
        (
            "importing",
            lost(0, phase="running"),
            "before init_process_group, in the program (since +0.30 s)",
        ),
        (
            "joining",
            rank(0, sent=("SIGTERM",), phase="joining"),
            "in init_process_group (since +0.30 s)",
        ),
        ("started", rank(0, sent=("SIGTERM",), phase="started"), ""),  # --plain
    ],
)
def test_where_a_rank_was_that_left_without_a_word(
    phase: str, other: RankEvidence, where: str
) -> None:
    """os._exit: all that is known is its phase, and "importing" lasts until it joins a group."""
    (report,) = diagnose(job(other, rank(1, 3, phase=phase, phase_at=0.3)))
    assert (report.code, report.where) == ("rank-exited", f"{where}, pid 24315".removeprefix(", "))


def test_one_raise_is_told_in_22_lines() -> None:
    deep = tuple(
        Frame(f"/home/ada/exp/layer{i}.py", i, "forward", "x = self.inner(x)") for i in range(1, 30)
    )
    long = raised("ValueError", "too deep\n" + "more words\n" * 40, (MAIN, *deep))
    for error in (VALUE, long):
        for shown in (False, True):
            reports = diagnose(
                job(stopped(0), lost(1), rank(2, 1, raised=error, said_traceback=shown), stopped(3))
            )
            assert len(render.text(reports).splitlines()) <= 22


def test_a_long_traceback_keeps_its_ends() -> None:
    deep = tuple(
        Frame(f"/home/ada/exp/layer{i}.py", i, "forward", f"x = self.inner{i}(x)")
        for i in range(1, 30)
    )
    (report,) = diagnose(job(rank(0, 1, raised=raised("ValueError", "too deep", (MAIN, *deep)))))
    (said,) = report.said
    assert said.lines[0] == "Traceback (most recent call last):"
    assert "train.py" in said.lines[1]
    assert said.lines[3] == "... 52 more lines in rank0.log:40"
    assert said.lines[4].startswith('  File "/home/ada/exp/layer27.py"')
    assert said.lines[-1] == "ValueError: too deep"


def test_beside_a_help_a_traceback_takes_less_room() -> None:
    deep = tuple(
        Frame(f"/home/ada/exp/layer{i}.py", i, "forward", f"x = self.inner{i}(x)")
        for i in range(1, 30)
    )
    error = raised("ModuleNotFoundError", "No module named 'einops'", (MAIN, *deep))
    reports = diagnose(job(stopped(0), rank(1, 1, raised=error), stopped(2), stopped(3)))
    assert reports[0].help
    assert len(render.text(reports).splitlines()) <= 25


def test_what_is_missing_is_installed_for_the_python_of_the_ranks() -> None:
    error = raised("ModuleNotFoundError", "No module named 'einops'", (MAIN,))
    (report,) = diagnose(job(*same(2, code=1, raised=error), python="/env/bin/python3"))
    assert [help.command for help in report.help] == ["/env/bin/python3 -m pip install einops"]
    (unknown,) = diagnose(job(*same(2, code=1, raised=error)))
    assert unknown.help[1].command == "python -m pip install einops"


def test_a_child_of_mp_spawn_that_was_killed_is_told_what_the_kernel_says() -> None:
    words = "process 1 terminated with signal SIGKILL"
    error = raised("torch.multiprocessing.spawn.ProcessExitedException", words)
    counted = MemoryEvidence(counted=True)
    (report,) = diagnose(job(rank(0, 1, raised=error), memory=counted))
    assert report.evidence[0].startswith("the kernel killed nothing in this cgroup")
    assert report.help[0].command == "sudo dmesg -T | grep -i 'killed process'"


def test_what_each_rank_said_where_their_words_differ() -> None:
    ranks = [
        rank(i, 1, order=i, raised=raised("ValueError", f"sample {words} at 0x7f0{i}"))
        for i, words in enumerate(("17", "17", "2003"))
    ]
    (report,) = diagnose(job(*ranks))
    assert report.ranks == (0, 1, 2)
    assert report.headline == "all 3 ranks raised ValueError, rank 0: sample 17 at 0x7f00"
    assert report.evidence == ("rank 2: sample 2003 at 0x",)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (raised("RuntimeError", "can't start new thread", (MAIN,)), True),
        (raised("RuntimeError", "Resource temporarily unavailable", (MAIN,)), True),
        (
            raised(
                "BlockingIOError",
                "[Errno 11] Resource temporarily unavailable",
                (Frame("/usr/lib/python3.11/subprocess.py", 1883, "_execute_child", "self.pid = _fork_exec("),),
                errno=11,
            ),
            True,
        ),
        (
            raised(
                "BlockingIOError",
                "[Errno 11] Resource temporarily unavailable",
                (Frame("/home/ada/exp/train.py", 7, "main", "fcntl.flock(file, LOCK_EX | LOCK_NB)"),),
                errno=11,
            ),
            False,
        ),
    ],
    ids=["thread", "thread of C++", "process", "lock"],
)  # fmt: skip
def test_a_limit_of_threads_and_processes(error: Raised, shown: bool) -> None:
    (report,) = diagnose(job(*same(2, code=1, raised=error)))
    assert any("pids.max" in help.command for help in report.help) == shown


def test_a_crash_of_a_library_that_got_no_thread() -> None:
    said = ("libgomp: Thread creation failed: Resource temporarily unavailable",)
    (report,) = diagnose(job(rank(0, sig=11, at=1.2, stack=SEGV, said=said), stopped(1)))
    assert any(said[0] in line for line in report.evidence)
    assert any("pids.max" in help.command for help in report.help)


def test_a_module_that_lies_near_the_program_is_not_to_be_installed() -> None:
    own = raised("ModuleNotFoundError", "No module named 'mylib.net'", (MAIN,))
    own = msgspec.structs.replace(own, module_folder="/home/ada/my repo")
    (report,) = diagnose(job(*same(2, code=1, raised=own), python="/env/bin/python3"))
    assert [help.command for help in report.help] == [
        "export PYTHONPATH='/home/ada/my repo':$PYTHONPATH"
    ]
    both = msgspec.structs.replace(own, message="No module named 'datasets'")
    (report,) = diagnose(job(*same(2, code=1, raised=both), python="/env/bin/python3"))
    assert len(report.help) == 2  # the folder may be meant, or the package of that name


def test_a_barrier_that_broke_for_two_lines_is_one_cause() -> None:
    elsewhere = msgspec.structs.replace(BROKE, frames=(STEP, *AT_BARRIER[1:]))
    (report,) = diagnose(
        job(rank(0, 1, raised=BROKE), rank(1, 1, raised=elsewhere, order=1), stopped(2))
    )
    assert (report.code, report.ranks) == ("barrier-broken", (0, 1))
    assert report.evidence[-2:] == (
        "rank 0: train.py:120 in <module> (rallypoint barrier)",
        "rank 1: train.py:88 in train_step (rallypoint barrier)",
    )


AVERAGED = 'the average "m" got values that do not match: float32 [4, 4] in rank 0 and float32 [3, 4] in rank 1'


def test_what_all_who_met_were_told_at_different_lines_is_one_cause() -> None:
    errors = [
        raised(
            "rallypoint.errors.BarrierMismatch", AVERAGED, (frame,), at=1.0, code="average-mismatch"
        )
        for frame in (MAIN, STEP)
    ]
    (report,) = diagnose(job(rank(0, 1, raised=errors[0]), rank(1, 1, raised=errors[1], order=1)))
    assert (report.ranks, report.headline) == ((0, 1), f"both ranks: {AVERAGED}")
    assert report.evidence == (
        "rank 0: train.py:120 in <module>",
        "rank 1: train.py:88 in train_step",
    )
    (report,) = diagnose(job(*same(2, code=1, raised=errors[0])))
    assert report.evidence == ()


def test_who_came_to_a_barrier_is_not_said_to_have_been_elsewhere() -> None:
    """Its frames at its own exit are ours, too, and nothing that a user could look at."""
    closing = (
        Frame("/venv/lib/python3.11/site-packages/rallypoint/store/client.py", 112, "_end_all"),
    )
    ranks = (
        rank(0, sent=("SIGTERM",), stack=closing),
        rank(1, 1, raised=TOO_LATE, at=6.1),
        stopped(2, LOADING),
    )
    (report,) = diagnose(job(*ranks))
    assert report.evidence == ("rank 2  data.py:12 in build_index",)
    (report,) = diagnose(job(*ranks[:2], stopped(2, closing)))
    assert report.evidence == ("rank 2  while running",)


@pytest.mark.parametrize(
    ("others", "then"),
    [
        ((stopped(1), stopped(2)), "ranks 1-2 were stopped; they are not at fault"),
        ((rank(1, 4, order=1, left_at="train.py:9"), stopped(2)), "rank 2 was stopped"),
        (
            (
                rank(1, 4, order=1, left_at="train.py:9"),
                stopped(2, left_at="train.py:9", phase="finishing"),
            ),
            "rank 2 was leaving by the same sys.exit, and stopped",
        ),
        (
            (stopped(1), stopped(2, left_at="train.py:70")),
            "ranks 1-2 were stopped; they are not at fault",
        ),  # its handler of our SIGTERM
    ],
    ids=["one-leaves", "two-leave", "all-leave", "one-is-told-to"],
)
def test_who_was_about_to_leave_in_the_same_way_is_not_acquitted(
    others: tuple[RankEvidence, ...], then: str
) -> None:
    (report,) = diagnose(job(rank(0, 4, left_at="train.py:9"), *others))
    assert (report.code, report.then) == ("rank-exited", then)


def test_of_an_error_caught_near_the_call_only_its_words_are_quoted() -> None:
    """Its traceback, taken while it was on its way, has no line of the program."""
    inside = (
        Frame(
            f"{TORCH}/distributed_c10d.py",
            2072,
            "_new_process_group_helper",
            "raise AssertionError(...)",
        ),
    )
    error = raised(
        "AssertionError", "no such backend", inside, call="init_process_group", caught_at=STEP
    )
    (report,) = diagnose(job(rank(0, 0, handled=(error,)), rank(1, phase="joining")))
    assert report.where == "/home/ada/exp/train.py:88 in train_step, pid 24314"
    assert report.said[0].lines == ("AssertionError: no such backend",)
    assert report.evidence == ()


def test_a_rank_that_ends_late_is_still_the_cause_when_everyone_else_speaks_of_a_peer() -> None:
    """The order of ends is chance: whatever it is, the rank that was killed is named."""
    for order in range(4):
        orders = iter(i for i in range(4) if i != order)
        ranks = [
            rank(i, sig=9, order=order) if i == 2 else gave_in(i, sig=6, order=next(orders))
            for i in range(4)
        ]
        (report,) = diagnose(job(*ranks))
        assert (report.code, report.ranks) == ("rank-killed", (2,))


def test_a_rank_at_its_next_group_is_no_other_meeting_point() -> None:
    first = Meeting("tcp://127.0.0.1:29500", "127.0.0.1:29500", 0, 2, "gloo")
    second = Meeting("tcp://127.0.0.1:29501", "127.0.0.1:29501", 1, 2, "gloo", turn=1)
    one, *_ = diagnose(job(waited(0, meeting=first), stopped(1, meeting=second)))
    assert one.code != "address-differs"
    one, *_ = diagnose(
        job(waited(0, meeting=first), stopped(1, meeting=msgspec.structs.replace(second, turn=0)))
    )
    assert one.code == "address-differs"


def test_in_a_job_that_goes_on_who_lost_the_rank_that_was_told_of_is_no_cause() -> None:
    """Each was reported as "the cause is not known", with "none raised an error of its own", after
    the cause had been told.
    """
    dead = rank(1, 3, at=1.0)
    going = job(lost(0, order=2), dead, lost(2), rank(3), on_failure="continue")
    assert news(going, (1,), (1,)) == News(
        (), ("ranks 0 and 2 followed rank 1: all_reduce: Connection closed by peer",)
    )
    assert news(going, (0, 1, 2), (1,)) == News()
    assert news(job(rank(0, sig=6, at=1.5), dead, on_failure="continue"), (1,), (1,)).followed == (
        "rank 0 followed rank 1: died: SIGABRT",
    )


def test_in_a_job_that_goes_on_another_failure_is_a_cause_of_its_own() -> None:
    going = job(rank(0, 4, at=9.0), rank(1, 3, at=1.0), lost(2), rank(3), on_failure="continue")
    told = news(going, (1,), (1,))
    assert told.followed == ("rank 2 followed rank 1: all_reduce: Connection closed by peer",)
    assert [(one.code, one.ranks, one.then) for one in told.reports] == [
        ("rank-exited", (0,), "rank 3 goes on")
    ]


def test_in_a_job_that_goes_on_who_had_lost_a_peer_long_before_has_not_followed() -> None:
    told = news(
        job(lost(0, at=1.5), rank(1, 3, at=9.0), rank(2), on_failure="continue"), (1,), (1,)
    )
    assert (told.followed, [one.code for one in told.reports]) == ((), ["cause-unknown"])


@pytest.mark.parametrize(
    ("at", "codes"), [(1.0, ["rank-exited", "rank-raised"]), (3.0, ["rank-raised"])]
)
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_an_exit_before_an_exception_is_no_consequence_of_it(
    at: float, codes: list[str], on_failure: str
) -> None:
    other = rank(2, 1, at=2.1, raised=raised("ValueError", "boom", at=2.0))
    closing = rank(1, 4, at=3.0, left_when=at)  # its interpreter closed down meanwhile
    for first in (rank(1, 4, at=at), closing):
        told = diagnose(job(rank(0), first, other, on_failure=on_failure))
        assert [one.code for one in told] == codes


@pytest.mark.parametrize("early", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("end", [{"code": 3}, {"code": 3, "left_at": "train.py:9"}, {"sig": 6}])
def test_an_end_shortly_before_an_exception_is_told_first(
    early: float, end: dict[str, Any]
) -> None:
    """The exception was told as the cause, and of the end, which was seen to be earlier, that
    nothing showed which came first.
    """
    if "left_at" in end:
        end = {**end, "left_when": 2.0 - early}
    first = rank(1, at=2.0 - early + (0.3 if "left_at" in end else 0), order=0, **end)
    other = rank(0, 1, at=2.1, order=1, raised=raised("ValueError", "boom", at=2.0))
    told = diagnose(job(other, first))
    assert [one.ranks for one in told] == [(1,), (0,)]
    assert told[0].confidence == "likely"
    assert told[0].exit_status == (3 if "code" in end else 134)
    assert "for that reason" not in told[0].then


@pytest.mark.parametrize("weak", [{"code": 3}, {"sig": 6}])
@pytest.mark.parametrize("strong", [9, 11])
@pytest.mark.parametrize(
    ("at", "ranks", "confidence"),
    [(1.0, [(1,), (0,)], "certain"), (1.9, [(0,)], "likely"), (2.1, [(0,)], "certain")],
)
def test_a_crash_is_the_certain_cause_of_what_came_later_alone(
    weak: dict[str, int], strong: int, at: float, ranks: list[tuple[int]], confidence: str
) -> None:
    """An exit, or an abort, was told as the consequence of a crash that came later. Ends are heard
    of late, those of ranks with much to give back more so: a tenth of a second shows no order.
    """
    told = diagnose(job(rank(0, sig=strong, at=2.0, order=2), rank(1, at=at, order=1, **weak)))
    assert [one.ranks for one in told] == ranks
    assert told[0].confidence == confidence
    assert ("for that reason" in told[0].then) == (at > 2.0)
    if confidence == "likely":
        assert "rank 1" in told[0].why
        assert "rank 1" in told[0].then


def test_an_abort_before_an_exit_is_no_consequence_of_it() -> None:
    told = diagnose(job(rank(0, 3, at=2.0, order=1), rank(1, sig=6, at=1.5, order=0)))
    assert [one.code for one in told] == ["rank-crashed"]
    assert told[0].ranks == (1,)


def test_a_rank_fails_for_its_peers_when_it_closes_its_group() -> None:
    """`finally: dist.destroy_process_group()`: the exception is told a moment later."""
    closing = rank(0, 1, at=2.3, order=1, closed_at=1.8, raised=raised("ValueError", "x", at=2.2))
    [told] = diagnose(job(closing, rank(1, sig=6, at=1.9, order=0)))
    assert (told.code, told.ranks, told.confidence) == ("rank-raised", (0,), "likely")


def test_an_error_that_a_rank_had_caught_long_before_its_exit_is_not_the_moment_of_its_end() -> (
    None
):
    caught = raised("ValueError", "wrong shape", at=1.0, call="all_reduce")
    one = rank(1, 3, at=9.2, order=1, handled=(caught,))
    told = diagnose(job(rank(0, sig=11, at=9.0, order=0), one))
    assert [(one.ranks, one.confidence) for one in told] == [((0,), "certain")]


@pytest.mark.parametrize(("silent", "confidence"), [(1.01, "certain"), (2.0, "likely")])
@pytest.mark.parametrize("left_at", ["", "train.py:30 in main"])
def test_a_traceback_long_before_an_exit_may_have_been_handled(
    silent: float, confidence: str, left_at: str
) -> None:
    """`logging.exception("no cache")`, and an evaluation later `sys.exit(1)`: the exception was
    told as what had ended the rank.
    """
    lines = tuple(raised("OSError", "no cache").traceback.splitlines())
    left: dict[str, Any] = {"left_at": left_at, "left_when": 3.9} if left_at else {}
    printed = rank(1, 1, at=4.0, said=lines, silent=silent, **left)
    [told] = diagnose(job(rank(0), printed, now=5.0))
    assert (told.code, told.ranks, told.confidence) == ("rank-raised", (1,), confidence)
    assert (left_at in told.why) == (not left_at or confidence == "likely")


def test_a_cause_that_is_seen_later_comes_first() -> None:
    unknown, known = (
        diagnose(job(lost(0), rank(1), on_failure="continue")),
        diagnose(job(rank(1, 3), on_failure="continue")),
    )
    assert [one.code for one in cause_first((*unknown, *known))] == ["rank-exited", "cause-unknown"]


def test_more_than_three_causes_are_not_told_one_by_one() -> None:
    ranks = [
        rank(i, 1, order=i, raised=raised("ValueError", "x", (Frame("/a.py", i, "f"),)))
        for i in range(8)
    ]
    reports = diagnose(job(*ranks))
    assert [report.ranks for report in reports] == [(0,), (1,), (2,)]
    assert reports[-1].then == "ranks 3-7 failed in other ways still: see their logs"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("mp.spawn(run, args=(2,), nprocs=2)", "rallypoint.launch(work, nproc=2, pass_rank=True)"),
        ("mp.Process(target=work).start()", "rallypoint.launch(work, nproc=2)"),
    ],
)
def test_an_unguarded_program_is_shown_a_call_that_gives_the_rank(line: str, command: str) -> None:
    """`rallypoint.launch(work, nproc=2)` was advised, which fails as it is typed for a function
    that takes its rank.
    """
    frame = Frame("/srv/train.py", 9, "<module>", line)
    error = msgspec.structs.replace(
        raised("ProcessExitedException", "process 0 terminated with exit code 1", (frame,)),
        code="main-unguarded",
    )
    (report,) = diagnose(job(rank(0, 1, raised=error)))
    assert command in [help.command for help in report.help]


@pytest.mark.parametrize(("number", "confidence"), [(1048576, "certain"), (2048, "likely")])
def test_a_store_that_waits_for_more_processes_than_there_are(number: int, confidence: str) -> None:
    """The size in bytes as TCPStore's third argument: rank 1 was blamed for having left early."""
    words = f"Timed out after 16 seconds waiting for clients. 2/{number} clients joined."
    waits = rank(0, 1, raised=raised("torch.distributed.DistStoreError", words, (MAIN,)))
    (report,) = diagnose(job(waits, rank(1, 0)))
    assert (report.code, report.ranks, report.confidence) == (
        "world-size-differs",
        (0,),
        confidence,
    )
    assert str(number) in report.headline
    assert words in report.evidence


def test_a_store_that_too_few_have_joined_has_the_right_size() -> None:
    words = "Timed out after 16 seconds waiting for clients. 1/2 clients joined."
    waits = rank(0, 1, raised=raised("torch.distributed.DistStoreError", words, (MAIN,)))
    assert diagnose(job(waits, rank(1, 0)))[0].code != "world-size-differs"


@pytest.mark.parametrize(
    ("kind", "message", "call", "expected"),
    [
        ("RuntimeError", CLOSED, "", True),
        ("RuntimeError", RESET, "all_reduce", True),
        (
            "torch.distributed.DistNetworkError",
            "Failed to recv, got 0 bytes. Connection was likely closed.",
            "",
            True,
        ),
        ("torch.distributed.DistNetworkError", "Broken pipe", "", True),
        ("RuntimeError", "Application timeout caused pair closure", "", True),
        ("RuntimeError", "Socket Timeout", "", True),
        (
            "RuntimeError",
            "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
            "",
            True,
        ),
        (
            "torch.distributed.DistBackendError",
            "ncclRemoteError: A call failed possibly due to a remote process exiting",
            "",
            True,
        ),
        (
            "RuntimeError",
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation",
            "",
            True,
        ),
        (
            "torch.distributed.DistStoreError",
            "Timed out after 5 seconds waiting for clients. 3/4 clients joined.",
            "",
            True,
        ),
        (
            "torch.distributed.DistNetworkError",
            "The client socket has timed out after 2000ms while trying to connect",
            "",
            True,
        ),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "", True),
        (
            "RuntimeError",
            "[enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 500 vs 252",
            "",
            False,
        ),
        ("ValueError", "bad shape", "", False),
        # A hub, a database and a service of the program's own.
        (
            "requests.exceptions.ConnectTimeout",
            "(Caused by ConnectTimeoutError('... timed out. (connect timeout=10)'))",
            "",
            False,
        ),
        ("RuntimeError", "FeatureStore request timed out", "", False),
        (
            "RuntimeError",
            "[gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused",
            "",
            True,
        ),
        (
            "TimeoutError",
            "the read operation timed out",
            "",
            False,
        ),  # a download of the program's own
        (
            "torch.distributed.DistNetworkError",
            "name: EADDRINUSE, message: address already in use",
            "",
            False,
        ),
        (
            "torch.distributed.DistBackendError",
            "NCCL error: unhandled cuda error: Call to CUDA function failed.",
            "barrier",
            True,
        ),
        (
            "ValueError",
            "trying to initialize the default process group twice!",
            "init_process_group",
            False,
        ),
        (
            "RuntimeError",
            "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
            "",
            True,
        ),
        ("RuntimeError", "Rank 0 exhausted all inputs.", "", False),
        ("asyncio.exceptions.IncompleteReadError", "0 bytes read on a total of 4", "", True),
    ],
)
def test_what_is_a_consequence(kind: str, message: str, call: str, expected: bool) -> None:
    assert is_consequence(Raised(kind, message, (), "", call=call)) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("wait-timeout", True),
        ("store-closed", True),
        ("value-too-large", False),
        ("group-twice", False),
    ],
)
def test_errors_of_ours_are_read_by_their_code(code: str, expected: bool) -> None:
    """Whatever the words are: `timed out` in a headline of ours is not torch's."""
    assert (
        is_consequence(
            Raised("rallypoint.errors.StoreTimeout", "Connection refused", (), "", code=code)
        )
        is expected
    )


# --- any evidence at all
# -------------------------------------------------------------------------------------------------

words = some.text(max_size=30) | some.sampled_from(
    [
        *(
            CLOSED,
            RESET,
            "address already in use port: 5",
            "Timed out waiting 4ms",
            "out of memory",
            "Traceback (most recent call last):",
        ),
        *(NCCL_SHM, NCCL_PEER, KILLED_WORKER.format("Killed"), TOO_LARGE.message),
    ]
)
frames = some.lists(some.builds(Frame, words, some.integers(0, 9), words), max_size=3).map(tuple)
errors = some.builds(
    Raised,
    some.sampled_from(
        [
            "ValueError",
            "RuntimeError",
            "ConnectionResetError",
            "SyntaxError",
            "KeyboardInterrupt",
            "torch.OutOfMemoryError",
        ]
    ),
    words,
    frames,
    words,
    at=some.floats(0, 9),
    call=some.sampled_from(["", "all_reduce", "init_process_group"]),
    on_its_way=some.booleans(),
    code=some.sampled_from(["", "group-twice", "store-file-stale", "wait-timeout", "store-closed"]),
    filename=some.sampled_from(["", "train.py"]),
)
ends = some.none() | some.builds(
    Ended,
    some.sampled_from([0, 1, 2, 3, 127, 139]),
    some.sampled_from([0, 0, 2, 6, 7, 9, 11, 15, 34, 40, 99]),
    some.floats(0, 9),
    some.integers(0, 4),
)
meetings = some.none() | some.builds(
    Meeting,
    some.sampled_from(["env://", "file:///x", "store"]),
    some.sampled_from(["", "a:1", "b:1"]),
    world_size=some.sampled_from([-1, 2, 4]),
)
evidence = some.builds(
    RankEvidence,
    some.just(0),
    some.just(0),
    some.integers(1, 9),
    some.sampled_from(["started", "importing", "joining", "running", "finishing", "done", "?"]),
    ended=ends,
    raised=some.none() | errors,
    handled=some.lists(errors, max_size=2).map(tuple),
    handles=some.none() | errors,
    meeting=meetings,
    sent=some.sampled_from([(), ("SIGTERM",)]),
    stack=frames,
    said=some.lists(words, max_size=3).map(tuple),
    not_executed=some.sampled_from([0, 0, 0, 2]),
    error_file=some.sampled_from(
        ["", "{", "[]", '{"message": "ValueError: x"}', '{"message": {"message": "x"}}']
    ),
)
jobs = some.builds(
    lambda ranks, **more: job(
        *(msgspec.structs.replace(one, rank=i, local_rank=i) for i, one in enumerate(ranks)),
        **more,
    ),
    some.lists(evidence, max_size=5),
    interrupted_by=some.sampled_from(["", "SIGINT", "SIGTERM"]),
    helper=some.none()
    | some.builds(
        HelperLost, some.just("template"), some.integers(1, 9), ends.map(lambda end: end or Ended())
    ),
    memory=some.builds(
        MemoryEvidence,
        some.integers(0, 2),
        some.booleans(),
        killed_pids=some.sampled_from([(), (1, 2, 3)]),
    ),
    holders=some.lists(words, max_size=2).map(tuple),
    on_failure=some.sampled_from(["stop", "continue"]),
    function=some.booleans(),
)


@tries(300)
@given(jobs, some.randoms(use_true_random=False))
def test_any_evidence_gives_a_report_that_does_not_depend_on_the_order_of_ranks(
    evidence: JobEvidence, chance: Any
) -> None:
    reports = diagnose(evidence)
    assert reports
    assert all(report.code in CATALOGUE for report in reports)
    assert all(0 < report.exit_status < 256 for report in reports)
    assert render.text(reports)
    shuffled = list(evidence.ranks)
    chance.shuffle(shuffled)
    assert diagnose(evidence.with_ranks(shuffled)) == reports


def test_a_module_that_is_not_there_is_wrong_usage_as_a_script_is() -> None:
    """`-m package.nothing` ended with 1, and `nothing.py` with 2."""
    missing = raised("ModuleNotFoundError", "No module named train.nothing", ())
    (report,) = diagnose(
        msgspec.structs.replace(
            job(*same(2, code=1, phase="importing", raised=missing)), program="train.nothing"
        )
    )
    assert (report.code, report.exit_status) == ("start-failed", 2)
    syntax = raised("SyntaxError", "invalid syntax (train.py, line 3)", (), filename="train.py")
    (report,) = diagnose(job(*same(2, code=1, phase="importing", raised=syntax)))
    assert (report.code, report.exit_status) == ("start-failed", 1)


@pytest.mark.parametrize(
    ("kind", "message", "line"),
    [
        ("ImportError", "attempted relative import with no known parent package", "-m "),
        ("bdb.BdbQuit", "", "--debug-rank "),
    ],
)
def test_words_of_pythons_that_say_too_little_get_a_way_out(
    kind: str, message: str, line: str
) -> None:
    (report,) = diagnose(job(rank(0, 1, raised=raised(kind, message, (MAIN,))), stopped(1)))
    assert report.code == "rank-raised"
    assert [line in help.command for help in report.help] == [True]


def test_the_signals_of_the_table_are_this_systems() -> None:
    assert (signal.SIGKILL, signal.SIGABRT) == (9, 6)


QUIT = (
    "Traceback (most recent call last):",
    '  File "/home/ada/exp/train.py", line 5, in f',
    "    print(x)",
    "bdb.BdbQuit",
)


@pytest.mark.parametrize("size", [256, 1024])
def test_the_work_grows_with_the_ranks_and_not_with_their_square(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 1,024 ranks that had lost a peer and raised was compared with each other one: 48
    seconds.
    """
    calls = 0

    def counted(error: Raised) -> object:
        nonlocal calls
        calls += 1
        return kind_of(error)

    kind_of = rank_kinds.kind_of
    monkeypatch.setattr(rank_kinds, "kind_of", counted)
    loss = raised("RuntimeError", CLOSED, at=0.9, call="all_reduce")
    own = raised("ValueError", "bad batch", at=1.0)
    ranks = [rank(i, 1, raised=own, handled=(loss,), at=1.1, order=i) for i in range(size)]
    (report,) = diagnose(job(*ranks))
    assert len(report.ranks) == size
    assert calls <= 8 * size


def test_ranks_that_waited_are_not_each_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whom monitored_barrier names was asked of each rank's error, though none was of it: with 4000
    ranks the report took 9 s.
    """
    asked = 0

    def counted(error: Raised) -> str:
        nonlocal asked
        asked += 1
        return call_of(error)

    call_of = late_ranks.call_of
    monkeypatch.setattr(late_ranks, "call_of", counted)
    there = [
        waited(i, TIME_IS_UP, call="all_reduce", frames=ALL_REDUCE, phase="running")
        for i in range(1, 256)
    ]
    (report,) = diagnose(job(rank(0, stack=LOADING), *there))
    assert (report.code, report.ranks) == ("ranks-missing", (0,))
    assert asked <= 8 * 256


def test_texts_of_a_report_are_found_once_and_not_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder that paths are shown relative to may be looked for in the stacks of all ranks."""
    asked = 0

    def counted(program: str, frames: Iterable[Frame]) -> str:
        nonlocal asked
        asked += 1
        return ""

    monkeypatch.setattr(stacks, "root_of", counted)
    for make in (
        lambda i: rank(i, 1, raised=raised("ValueError", "bad batch"), order=i),
        lambda i: rank(i, 1, raised=msgspec.structs.replace(raised("X", "y"), code="barrier-size")),
        lambda i: rank(i, 3, order=i),
        lost,
    ):
        diagnose(job(*(make(i) for i in range(256))))
    assert asked < 50


def test_what_torch_load_could_not_read_is_in_the_headline() -> None:
    """Only torch's advice was, to load with weights_only=False: this was a pointer of git-lfs."""
    message = (
        "Weights only load failed. In PyTorch 2.6, we changed the default value of the `weights_only` "
        "argument in `torch.load` from `False` to `True`. Re-running `torch.load` with `weights_only` "
        "set to `False` will likely succeed.\nPlease file an issue with the following so that we can "
        "make `weights_only=True` compatible with your use case: WeightsUnpickler error: \n\n"
        "Unsupported operand 118\n\nCheck the documentation of torch.load to learn more.\n"
    )
    error = raised("_pickle.UnpicklingError", message, (MAIN,))
    [report] = diagnose(job(rank(0, 1, raised=error), rank(1)))
    assert report.headline == (
        "rank 0 raised _pickle.UnpicklingError: Weights only load failed: Unsupported operand 118"
    )


@pytest.mark.parametrize(("finished", "code"), [(4.8, "rank-left-early"), (9.8, "cause-unknown")])
def test_a_rank_that_ran_on_after_the_loss_is_not_its_reason(finished: float, code: str) -> None:
    """One that lost its peer at 5 s and saved its state until 20 s blamed who ended well at 10 s."""
    error = raised("RuntimeError", CLOSED, ALL_REDUCE, at=5.0, call="all_reduce")
    [report] = diagnose(
        job(
            rank(0, 0, order=0, at=10.0, phase="done", phase_at=finished),
            rank(1, 1, order=1, at=20.0, raised=error),
        )
    )
    assert report.code == code


def test_a_rank_that_left_early_by_sys_exit_is_told_with_its_line() -> None:
    left = rank(0, 0, at=1.0, phase="finishing", exit_line="train.py:4 in main")
    [report] = diagnose(job(left, lost(1)))
    assert report.code == "rank-left-early"
    assert report.where.startswith("train.py:4 in main")
