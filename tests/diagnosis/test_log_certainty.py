"""When a log makes a cause certain: what is earned, and what is only likely."""

from __future__ import annotations

import pytest

from rallypoint.diagnosis import confidence
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.log_events import End, Place, Sighting, Sign
from rallypoint.diagnosis.logs.reader import Reader
from rallypoint.diagnosis.logs.to_evidence import diagnose
from rallypoint.diagnosis.report import Report

OWN = Frame("/srv/train.py", 7, "main", "step()")
SITE = "/opt/py/lib/python3.11/site-packages"


def _error(kind: str, message: str, *frames: Frame) -> Raised:
    return Raised(kind, message, frames, f"{kind}: {message}")


def _library(path: str) -> Frame:
    return Frame(f"{SITE}/{path}", 12, "call")


def _told(log: str) -> Report:
    return diagnose(Reader("train.log").read([log.encode()]))[0]


@pytest.mark.parametrize(
    "error",
    [
        _error("KeyError", "'port'", OWN),
        _error("IndexError", "index 3 is out of bounds", OWN),
        _error("ValueError", "bad record 88 in shard-0003", OWN),
        _error("KeyError", "'lr'"),  # a message alone: the kind is enough
        _error(
            "ValueError", "shapes (2,3) and (4,5) must match"
        ),  # the same: such words are of the program's own data
        _error("RuntimeError", "loss is nan at step 3", OWN),
        _error(
            "RuntimeError",
            "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
            OWN,
            _library("torch/nn/functional.py"),
        ),
        _error(
            "RuntimeError",
            "Expected all tensors to be on the same device, but found cuda:0 and cpu",
            OWN,
            _library("torch/nn/functional.py"),
        ),
        _error(
            "OSError",
            "[Errno 28] No space left on device: '/ckpt/last.pt'",
            OWN,
            _library("torch/serialization.py"),
        ),
        _error(
            "ImportError",
            "cannot import name 'get_args'",
            OWN,
            _library("accelerate/utils/megatron_lm.py"),
        ),
        _error("shop.errors.OutOfStock", "no more shoes", OWN),
        _error(
            "requests.exceptions.ConnectTimeout", "the hub timed out", OWN
        ),  # of another service than the ranks'
    ],
    ids=lambda error: f"{error.type}: {error.message[:30]}",
)
def test_what_is_plainly_the_programs_own_is_certain(error: Raised) -> None:
    assert confidence.of_error(error) == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        # By the code that it left.
        (
            _error("ValueError", "bad", OWN, _library("torch/distributed/distributed_c10d.py")),
            "raised in torch/distributed/",
        ),
        (
            _error("KeyError", "'x'", OWN, _library("deepspeed/runtime/engine.py")),
            "raised in deepspeed/",
        ),
        (
            _error(
                "AttributeError",
                "x",
                OWN,
                Frame("/usr/lib/python3.11/multiprocessing/reduction.py", 60, "dump"),
            ),
            "raised in multiprocessing/",
        ),
        # By its type.
        (
            _error("lightning.fabric.utilities.exceptions.MisconfigurationException", "no", OWN),
            "Misconfiguration",
        ),
        (_error("ray.exceptions.ActorUnavailableError", "no", OWN), "ActorUnavailableError"),
        (_error("socket.gaierror", "[Errno -2] x", OWN), "gaierror"),
        # By what it speaks of.
        (_error("ValueError", "the host was not found", OWN), "the network"),
        (_error("RuntimeError", "only 2 GPUs are left", OWN), "devices"),
        (_error("OSError", "no paging space", OWN), "memory"),
        (_error("RuntimeError", "Worker 3 died", OWN), "a process that is gone"),
        (_error("AssertionError", "rank 3 has another seed", OWN), "other ranks"),
        (_error("RuntimeError", "the engine was shut down", OWN), "shut down"),
        # A library that could not be loaded is installed; the program only asks for it.
        (
            _error(
                "ImportError",
                "libcudart.so.11.0: cannot open shared object file: No such file or directory",
                OWN,
            ),
            "a library",
        ),
        (_error("OSError", "/usr/lib/libshop.so: undefined symbol: shoes_count", OWN), "a library"),
        (
            _error(
                "ImportError",
                "/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /opt/x.so)",
                OWN,
            ),
            "a library",
        ),
        (
            _error(
                "ImportError",
                "DLL load failed while importing _ext: The specified module could not be found.",
                OWN,
            ),
            "a library",
        ),
        # By what is not known of it.
        (_error("RuntimeError", "it went wrong"), "no line of the program"),
        (_error("AssertionError", "it went wrong"), "no line of the program"),
        (
            _error("ValueError", "no bf16 here", OWN, _library("transformers/training_args.py")),
            "words of transformers's",
        ),
        (
            _error("RuntimeError", "it went wrong", OWN, _library("torch/autograd/graph.py")),
            "words of torch's that are not known",
        ),
    ],
    ids=lambda one: f"{one.type}: {one.message[:30]}" if isinstance(one, Raised) else None,
)
def test_what_may_be_anybodys_fault_is_likely(error: Raised, words: str) -> None:
    assert words in confidence.of_error(error)


def _spoken(line: int, *, log: str = "a.log", went_on: bool = False) -> Sighting:
    return Sighting(Sign.SPOKEN, Place(log, line), text="it failed", went_on=went_on)


def test_a_failure_in_unknown_words_before_a_cause_makes_it_likely() -> None:
    cause = Place("a.log", 10)
    before = [_spoken(5), _spoken(3)]
    assert confidence.of_place("rank-raised", cause, before) is before[1]
    assert (
        confidence.of_place("rank-out-of-memory", cause, before) is None
    )  # torch's own words for it
    assert confidence.of_place("rank-raised", cause, [_spoken(11)]) is None  # what followed
    announced = Sighting(
        Sign.SPOKEN, Place("a.log", 8), text="ERROR [trainer]: Exception during training:"
    )
    assert confidence.of_place("rank-raised", cause, [announced]) is None
    assert confidence.of_place("rank-raised", cause, [announced, _spoken(9)]) == _spoken(9)
    assert (
        confidence.of_place(
            "rank-raised", cause, [_spoken(3, went_on=True), _spoken(3, log="b.log")]
        )
        is None
    )


@pytest.mark.parametrize(
    "text",
    [
        "Error executing job with overrides: ['model.lr=0.1']",
        "AttributeError(\"no attribute 'ww'\")",
        "ERROR: Unexpected segmentation fault encountered in worker.",
        "2026-11-29 12:40:37,432 | ERROR | train | training failed",
        "CRITICAL:root:Main loop crashed!",
    ],
)
def test_what_hydra_rpc_and_a_loaders_worker_say_above_a_traceback_announces_it(text: str) -> None:
    for line, found in ((9, None), (3, Sighting(Sign.SPOKEN, Place("a.log", 3), text=text))):
        said = Sighting(Sign.SPOKEN, Place("a.log", line), text=text)
        assert confidence.of_place("rank-raised", Place("a.log", 10), [said]) == found


def test_a_stop_after_a_failure_is_an_answer_to_it() -> None:
    stop = Sighting(Sign.INTERRUPTED, Place("a.log", 10), end=End(signal=15))
    ended = Sighting(Sign.ENDED, Place("a.log", 4), end=End(code=1, by="srun"))
    late = Sighting(Sign.ENDED, Place("a.log", 12), end=End(code=1, by="srun"))
    assert confidence.answers(stop, [ended])
    assert not confidence.answers(stop, [late])
    retried = Sighting(Sign.LOST, Place("a.log", 4), text="Connection refused")
    assert not confidence.answers(stop, [retried])
    overtime = Sighting(Sign.INTERRUPTED, Place("a.log", 10), end=End(by="TIME LIMIT"))
    assert not confidence.answers(overtime, [ended])


TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\n    main()\nValueError: x\n'


def test_the_line_before_is_shown() -> None:
    report = _told("the licence daemon failed on this node\nstep\nstep\nstep\n" + TRACEBACK)
    assert (report.code, report.confidence) == ("rank-raised", "likely")
    assert report.evidence[0] == "line 1: the licence daemon failed on this node"
    went_on = _told(
        "the licence daemon failed on this node\n"
        + "".join(f"step {i}\n" for i in range(30))
        + TRACEBACK
    )
    assert (went_on.code, went_on.confidence) == ("rank-raised", "certain")


@pytest.mark.parametrize(
    "line",
    [
        "ERROR 07-04 17:35:16 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
        "DataLoader worker (pid(s) 18056, 20540) exited unexpectedly",
        "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired",
        "web-1 exited with code 3",
        "the process was terminated by its supervisor: job 4 was killed",
        "collective stalled",
        "[ 1234.567890] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
        "    Reason: Error",
        "fatal: cannot go on",
        "rsync: connection to worker-2 port 873: Connection refused",
        "进程已结束,退出代码1",
        "ORTE has lost communication with a remote daemon.",
    ],
)
def test_a_line_that_speaks_of_a_failure_is_shown_though_nobody_knows_it(line: str) -> None:
    report = _told(f"step 1\nstep 2\n{line}\nstep 3\n")
    assert report.code == "cause-unknown"
    assert report.headline == "line 3 speaks of a failure; the cause is not known"
    assert report.said[0].lines[0].startswith("3: ")
    assert report.logs == ("train.log:3",)
    assert _told(line + "\n").headline == "this line speaks of a failure, and does not say why"


@pytest.mark.parametrize(
    "line",
    [
        "test error: 0.0312",
        "step 3 val_error 0.7 signal ok, exit code 0",
        "INFO retrying: the connection failed",
        "12 passed, 0 failed",
        "I0422 05:07:49 no error",
        "loss 0.3 (terminator fox is killed)",
        "E external/local_xla/cuda_dnn.cc:9261] Unable to register cuDNN factory: one has already been registered",
    ],
)
def test_a_line_that_only_sounds_so_is_not(line: str) -> None:
    assert (
        _told(f"step 1\n{line}\nstep 2\n").headline
        == "nothing in these 3 lines says that something failed"
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("WARN Container killed by YARN for exceeding memory limits.", "rank-out-of-memory"),
        ("a helper exited with status 2", "rank-exited"),
        ("worker 3 was killed by signal 9", "rank-killed"),
    ],
)
def test_a_service_may_start_again_what_it_tells_of(line: str, code: str) -> None:
    """Spark and Dask do, and the log goes on."""
    assert (_told(line + "\n").code, _told(line + "\n").confidence) == (code, "certain")
    went_on = _told(line + "\n" + "".join(f"step {i}\n" for i in range(30)))
    assert (went_on.code, went_on.confidence != "certain") == (code, True)


def test_a_line_of_unknown_words_is_shown_beside_consequences() -> None:
    lost = "[rank2]: RuntimeError: [x/pair.cc:5] Connection closed by peer [10.0.0.1]:4\n"
    report = _told("the switch was lost: node 7 is dead\n" + lost)
    assert report.code == "cause-unknown"
    assert "line 1, before that: the switch was lost: node 7 is dead" in report.evidence


ENDED_BY_9 = "E0501 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 4321) of binary: python\n"


@pytest.mark.parametrize(
    ("victim", "confidence", "of"),
    [
        ("4321 (python)", "certain", ""),
        ("999 (java)", "likely", "process 999 (java)"),
        ("999 (java), UID 0,", "likely", "process 999 (java)"),
    ],
)
@pytest.mark.parametrize("words", ["Out of memory:", "Memory cgroup out of memory:"])
def test_the_kernel_may_have_killed_another_process(
    words: str, victim: str, confidence: str, of: str
) -> None:
    killed = f"[12345.6] {words} Killed process {victim} total-vm:100kB\n"
    report = _told(f"step 1\n{killed}step 2\n{ENDED_BY_9}")
    assert (report.code, report.confidence) == ("rank-out-of-memory", confidence)
    assert report.headline.startswith("local rank 1 ")
    assert of in report.why


def test_a_worker_of_a_rank_that_the_kernel_killed_is_no_other_process() -> None:
    killed = "[2.6] Out of memory: Killed process 33 (pt_data_worker) total-vm:1kB\n"
    worker = "[rank0]: RuntimeError: DataLoader worker (pid 33) is killed by signal: Killed. \n"
    failed = ENDED_BY_9.replace("-9", "1")
    (only,) = diagnose(Reader("train.log").read([(killed + worker + failed).encode()]))
    assert (only.code, only.confidence, only.ranks) == ("rank-out-of-memory", "certain", (0,))
    assert only.headline.startswith("a DataLoader worker of rank 0 ")
    other = _told(killed.replace("33", "34") + worker + failed)
    assert other.headline.startswith("process 34 (pt_data_worker) ")
    assert other.confidence == "likely"


def test_a_kill_of_a_process_that_is_no_rank_is_told_with_its_name() -> None:
    killed = "[12345.6] Out of memory: Killed process 999 (java) total-vm:100kB\n"
    failed = ENDED_BY_9.replace("-9", "1")
    report = _told(f"{killed}[rank1]: KeyError: 'k'\n{failed}")
    assert report.confidence == "likely"
    assert report.headline.startswith("process 999 (java) ")


WORKER_ENDED = (
    "[rank0]: RuntimeError: DataLoader worker (pid 33) is killed by signal: Terminated. \n"
)


@pytest.mark.parametrize(
    "stop",
    [
        "W0501 agent/server/api.py:704] Received Signals.SIGTERM death signal, shutting down workers\n",
        "W0501 agent/server/api.py:704] Received 15 death signal, shutting down workers\n",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 10 got signal: 15\n",
        "slurmstepd: error: *** JOB 9 ON gpu-12 CANCELLED AT 2024-06-01T09:00:12 DUE TO TIME LIMIT ***\n",
    ],
)
def test_a_loaders_worker_that_ended_with_a_stop_is_no_cause(stop: str) -> None:
    """Whoever stops a job sends SIGTERM to all of its processes."""
    after = diagnose(Reader("train.log").read([f"step 1\n{stop}{WORKER_ENDED}".encode()]))
    assert [one.code for one in after] == ["interrupted"]
    before = _told(f"step 1\n{WORKER_ENDED}{stop}")
    assert (before.code, before.ranks) == ("rank-killed", (0,))
    gone = "[rank0]: RuntimeError: DataLoader worker (pid(s) 33, 34) exited unexpectedly\n"
    assert len(diagnose(Reader("train.log").read([(stop + gone).encode()]))) == 1
    closing = "".join(
        f"W0501 api.py:9] Sending process {n} closing signal SIGTERM\n" for n in range(8)
    )
    frames = "[rank{0}]: Traceback (most recent call last):\n" + "".join(
        f'[rank{{0}}]:   File "/srv/train.py", line {n}, in f{n}\n[rank{{0}}]:     f()\n'
        for n in range(9)
    )
    every = "".join((frames + gone.replace("rank0", "rank{0}")).format(rank) for rank in range(8))
    assert len(diagnose(Reader("train.log").read([(stop + closing + every).encode()]))) == 1
    # A run that was started again writes into the same log.
    later = (stop + "step 101\n" * 6 + gone).encode()
    assert len(diagnose(Reader("train.log").read([later]))) == 2
    killed = _told(stop + WORKER_ENDED.replace("Terminated", "Killed"))
    assert killed.code == "interrupted"
    assert killed.confidence == "likely"


NO_EXCEPTION = "terminate called without an active exception\n"
PEER_LOST = "[rank0]: RuntimeError: [x/pair.cc:553] Connection closed by peer [10.0.0.1]:4\n"


@pytest.mark.parametrize(
    ("log", "code", "confidence", "ranks"),
    [
        # An exception, or a lost peer, is how the process came to its end.
        (NO_EXCEPTION + "[rank2]: KeyError: 'b'\n", "rank-raised", "certain", (2,)),
        (NO_EXCEPTION + PEER_LOST, "cause-unknown", "certain", ()),
        # Nothing else tells of it, or nothing else of the rank that the launcher says aborted.
        ("step 1\n" + NO_EXCEPTION, "rank-crashed", "likely", ()),
        (
            NO_EXCEPTION + PEER_LOST + ENDED_BY_9.replace("-9", "-6"),
            "rank-crashed",
            "likely",
            (),
        ),
    ],
)
def test_a_thread_that_outlives_its_process_is_no_exception_of_cpp(
    log: str, code: str, confidence: str, ranks: tuple[int, ...]
) -> None:
    report = _told(log)
    assert (report.code, report.confidence, report.ranks) == (code, confidence, ranks)


def test_a_rank_that_aborted_after_its_watchdog_is_no_cause() -> None:
    """NCCL's watchdog ends its process so."""
    timed_out = (
        "[rank2]:[E501 12:10:00.000 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=100, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
        " Timeout(ms)=600000) ran for 600042 milliseconds before timing out.\n"
    )
    table = "Root Cause (first observed failure):\n[0]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : -6 (pid: 9)\n"
    assert _told(timed_out + NO_EXCEPTION + table).code == "cause-unknown"


def test_a_process_without_a_rank_has_no_number() -> None:
    failed = "[rank1]: ValueError: b\n"
    lost = "oops [x/pair.cc:553] Connection closed by peer [10.0.0.1]:4\n"
    assert "the log does not name lost the connection to a peer" in _told(failed + lost).then
    assert "rank -1" not in _told(failed + lost + PEER_LOST).then


def _raised_in(path: str, function: str, words: str = "unknown error") -> str:
    return (
        "step 100\n[rank5]: Traceback (most recent call last):\n"
        '[rank5]:   File "/srv/train.py", line 120, in train_step\n[rank5]:     step()\n'
        f'[rank5]:   File "{SITE}/{path}", line 522, in {function}\n[rank5]:     call()\n'
        f"[rank5]: RuntimeError: CUDA error: {words}\n"
    )


@pytest.mark.parametrize(
    ("path", "function", "code", "confidence"),
    [
        ("torch/_tensor.py", "backward", "cuda-kernel-failed", "likely"),
        ("torch/cuda/__init__.py", "synchronize", "cuda-kernel-failed", "likely"),
        ("torch/cuda/__init__.py", "_lazy_init", "cuda-init-failed", "certain"),
    ],
)
def test_an_error_that_cuda_has_no_name_for_may_come_long_after_its_start(
    path: str, function: str, code: str, confidence: str
) -> None:
    report = _told(_raised_in(path, function))
    assert (report.code, report.confidence, report.ranks) == (code, confidence, (5,))


XID = "[123.4] NVRM: Xid (PCI:0000:87:00): {}, pid=1234, name=python, it has happened\n"


@pytest.mark.parametrize(
    "words",
    ["unknown error", "unspecified launch failure", "?", "CUBLAS_STATUS_EXECUTION_FAILED"],
)
@pytest.mark.parametrize(
    ("xid", "fault"),
    [
        (79, "fell off the bus"),
        (48, "ECC"),
        (94, "ECC"),
        (95, "ECC"),
        (74, "NVLink"),
        (119, "firmware"),
    ],
)
def test_a_fault_of_a_gpu_is_told_before_the_error_of_cuda(
    xid: int, fault: str, words: str
) -> None:
    raised = _raised_in("torch/_tensor.py", "backward", words)
    for log in (XID.format(xid) + raised, raised + XID.format(xid)):
        report = _told(log)
        assert (report.confidence, report.ranks) == ("likely", (5,))
        assert report.headline.startswith("the GPU 0000:87:00 ")
        assert fault in report.headline
        assert "NVRM: Xid" in report.evidence[0]


def test_an_error_that_a_program_causes_is_only_shown() -> None:
    raised = _raised_in("torch/_tensor.py", "backward", "an illegal memory access was encountered")
    report = _told(XID.format(31) + raised)
    assert (report.code, report.confidence) == ("cuda-kernel-failed", "certain")
    assert "the GPU" not in report.headline
    assert "NVRM: Xid" in report.evidence[0]
    # These only record that the GPU remaps rows of its memory.
    for xid in (63, 64):
        report = _told(XID.format(xid) + _raised_in("torch/_tensor.py", "backward"))
        assert "the GPU" not in report.headline
        assert "NVRM: Xid" in report.evidence[0]
    # An assert is the program's, whatever the driver says.
    asserted = _raised_in("torch/_tensor.py", "backward", "device-side assert triggered")
    index = (
        "x/Indexing.cu:1255: f: block: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    )
    for words in (asserted, asserted + index):
        for xid in (48, 63, 79):
            report = _told(XID.format(xid) + words)
            assert (report.code, report.confidence) == ("cuda-kernel-failed", "certain")
            assert "the GPU" not in report.headline
            assert "NVRM: Xid" in report.evidence[0]
    # What is no error of CUDA's has nothing to do with a GPU.
    other = _told(XID.format(79) + "[rank5]: KeyError: 'k'\n")
    assert other.headline == "rank 5 raised KeyError: 'k'"


BY_TERM = "run.sh: line 3: 1234 Terminated              timeout 3600 python train.py\n"


@pytest.mark.parametrize("line", [BY_TERM, "srun: error: gpu013: task 0: Terminated\n"])
def test_a_word_of_sigterm_that_stands_alone_is_a_stop(line: str) -> None:
    last = _told("epoch 3\n" + line)
    assert (last.code, last.confidence) == ("interrupted", "likely")
    # A script ends its own helpers so, and a failure has stops behind it.
    assert _told(line + "step 1\nstep 2\nstep 3\n").code == "cause-unknown"
    for log in (line + "[rank1]: KeyError: 'k'\n", "[rank1]: KeyError: 'k'\n" + line):
        assert _told(log).headline == "rank 1 raised KeyError: 'k'"


CHECKS = (
    "F0501 12:00:00.000000 123 shard_reader.cc:50] Check failed: n > 0 (0 vs. 0) empty shard\n",
    "F0000 00:00:1714557600.000000    123 shard_reader.cc:50] Check failed: n > 0 (0 vs. 0) empty shard\n",
    "2024-05-01 12:00:00.000000: F external/data/shard_reader.cc:50] Check failed: n > 0 (0 vs. 0) empty shard\n",
)
CHECKS_TRACE = (
    "*** Check failure stack trace: ***\n    @     0x7f0000000000  google::LogMessage::Fail()\n"
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("trace", ["", CHECKS_TRACE])
@pytest.mark.parametrize(
    ("end", "who", "lost"),
    [
        ("Aborted (core dumped)\n", "the program", ""),
        (ENDED_BY_9.replace("-9", "-6"), "local rank 1", ""),
        (ENDED_BY_9.replace("-9", "-6"), "local rank 1", PEER_LOST),
    ],
)
def test_a_check_that_failed_is_the_word_of_the_process_that_aborted(
    check: str, trace: str, end: str, who: str, lost: str
) -> None:
    report = _told(f"step 1\n{check}{trace}{lost}{end}")
    assert (report.code, report.confidence) == ("rank-crashed", "certain")
    assert report.headline.startswith(f"{who} crashed")
    assert any("n > 0 (0 vs. 0) empty shard" in line for line in report.evidence)
    assert report.said[0].lines[0] == check.strip()
    assert report.logs == ("train.log:2",)
    with_rank = _told(f"[rank3]: {check}{end}")
    assert with_rank.ranks == (3,)
