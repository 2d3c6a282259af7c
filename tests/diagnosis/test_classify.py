"""Other programs' words, and what kind of failure they tell of."""

from __future__ import annotations

import errno
import json
import os
import traceback

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import classify, reachability, tracebacks
from rallypoint.diagnosis.evidence import Frame, Meeting, Raised
from rallypoint.errors import StoreTimeout

TWO = """\
epoch 1
Traceback (most recent call last):
  File "/a/train.py", line 7, in main
    dist.init_process_group()
    ^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/a/train.py", line 9, in <module>
    dist.destroy_process_group()
AssertionError: second""".splitlines()


def test_the_first_of_a_chain_is_the_one() -> None:
    found = tracebacks.exception_in(TWO)
    assert found is not None
    assert (found.type, found.message) == ("ValueError", "first")
    assert found.is_open  # a handled one, maybe: the text does not show what caught it
    assert found.frames == (Frame("/a/train.py", 7, "main", "dist.init_process_group()"),)


STATE_DICT = [
    "Traceback (most recent call last):",
    '  File "/a/train.py", line 7, in main',
    "RuntimeError: Error(s) in loading state_dict for Linear:",
    '\tMissing key(s) in state_dict: "weight". ',
    '\tUnexpected key(s) in state_dict: "a". ',
]


def test_a_message_goes_on_in_lines_that_are_indented() -> None:
    found = tracebacks.exception_in([*STATE_DICT, "", "epoch 2"])
    assert found is not None
    assert found.message.splitlines()[1:] == STATE_DICT[3:]
    assert found.traceback.splitlines() == STATE_DICT


@pytest.mark.parametrize(
    ("after", "went_on"),
    [
        ((), False),
        (
            ("", "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."),
            False,
        ),
        (("For debugging consider passing CUDA_LAUNCH_BLOCKING=1",), False),
        (("epoch 2",), True),
    ],
)
def test_whether_a_program_went_on_after_a_traceback(after: tuple[str, ...], went_on: bool) -> None:
    assert tracebacks.went_on([*STATE_DICT, *after]) == went_on


FROM = "The above exception was the direct cause of the following exception:"


@pytest.mark.parametrize("links", [1, 3])
def test_the_text_of_an_exception_shows_from_what_it_was_raised(links: int) -> None:
    block = ["Traceback (most recent call last):", '  File "/a/train.py", line 7, in main']
    chain = [*block, "KeyError: 'x'"]
    for link in range(links):
        chain += ["", FROM, "", *block, f"ValueError: {link}"]
    earlier = [*block, "OSError: handled", "epoch 2"]
    found = tracebacks.exception_in([*earlier, *(f"[rank1]: {line}" for line in chain)])
    assert found is not None
    assert (found.message, found.traceback) == (f"{links - 1}", "\n".join(chain))
    first = tracebacks.wrapped(found)
    assert first is not None
    assert first.type == "KeyError"


def test_the_prefix_that_torch_puts_before_each_line() -> None:
    assert tracebacks.exception_in([f"[rank2]: {line}" for line in TWO]) == tracebacks.exception_in(
        TWO
    )


def test_what_python_ignores_is_no_end() -> None:
    ignored = ["Exception ignored in: <function A.__del__ at 0x7f>", *TWO[1:]]
    assert tracebacks.exception_in(["epoch 1", *ignored]) is None
    found = tracebacks.exception_in(
        ["Traceback (most recent call last):", "KeyError: 'image'", *ignored]
    )
    assert found is not None
    assert (found.type, found.is_open) == ("KeyError", False)


def test_another_traceback_than_the_one_that_is_told() -> None:
    own = ["Traceback (most recent call last):", "KeyError: 'image'"]
    child = ["Process Process-1:", "Traceback (most recent call last):", "ValueError: bad"]
    told = "\n".join(own)
    assert tracebacks.other_traceback([*child, *own], told) == "ValueError: bad"
    # The first of a chain is no other one, also where the text told has the last one alone.
    joint = "During handling of the above exception, another exception occurred:"
    assert tracebacks.other_traceback([*child, "", joint, "", *own], told) == ""
    assert tracebacks.other_traceback([*own, "Traceback (most recent call last):"], told) == ""
    assert tracebacks.other_traceback(["--- Logging error ---", *child[1:], *own], told) == ""


def test_another_traceback_of_a_child_that_torch_marks() -> None:
    """A DataLoader's worker of a program without a main guard: its words were not told."""
    start = "An attempt has been made to start a new process before the"
    child = ["Traceback (most recent call last):", "RuntimeError: ", f"        {start}"]
    marked = [f"[rank0]: {line}" for line in child]
    told = "Traceback (most recent call last):\nRuntimeError: DataLoader worker exited unexpectedly"
    assert tracebacks.other_traceback(marked, told) == f"RuntimeError: {start}"
    assert tracebacks.other_traceback(marked, "\n".join(child)) == ""


@pytest.mark.parametrize(
    ("message", "logged"),
    [
        ("bad \x1b[31mred\x1b[0m x", "bad red x"),
        ("x\x07y\x00z", "xyz"),
        ("a\rb", "ab"),
        ("a\x0bb\x0cc", "abc"),
        ("gr\u00f6\u00dfe \u4e2d", "gr\\xf6\\xdfe \\u4e2d"),
        ("\u4e2d\u4e2d\u4e2d", "\u4e2d\u4e2d\ufffd"),
    ],
    ids=["colours", "bell", "return", "tabulators", "a stream of ASCII", "a line that was cut"],
)
def test_one_traceback_with_controls_in_its_message_is_no_other_one(
    message: str, logged: str
) -> None:
    """The log's lines have none. Since torch 2.6 its word on a file that it does not load has bold
    letters, and everybody was told of another traceback, the very same.
    """
    lines = ["Traceback (most recent call last):", f"ValueError: {logged}"]
    told = f"Traceback (most recent call last):\nValueError: {message}\n"
    assert tracebacks.other_traceback(lines, told) == ""
    lines[1] = "ValueError: another"
    assert tracebacks.other_traceback(lines, told) == "ValueError: another"


def test_a_raise_from_means_what_it_says() -> None:
    during = "During handling of the above exception, another exception occurred"
    cause = "The above exception was the direct cause of the following exception"
    chain = [line.replace(during, cause) for line in TWO]
    found = tracebacks.exception_in(chain)
    assert found is not None
    assert found.type == "AssertionError"


def test_a_traceback_that_was_printed_long_before_the_end_is_no_end() -> None:
    assert (
        tracebacks.exception_in([*TWO, *(f"epoch {i}" for i in range(tracebacks.AFTER_END + 1))])
        is None
    )
    assert tracebacks.exception_in(["all is well"]) is None
    assert tracebacks.exception_in(TWO[:3]) is None


def test_an_error_of_the_store_brings_its_code() -> None:
    """Python prints the notes of an exception below it, and the last of them names the page."""
    error = StoreTimeout(
        "wait-timeout",
        "no w after 5 s",
        why=("it has 3 keys",),
        help=(("wait longer", 'store.wait("w", timeout=60)'),),
    )
    printed = "".join(traceback.format_exception(error)).splitlines()
    found = tracebacks.exception_in(["Traceback (most recent call last):", *printed])
    assert found is not None
    assert (found.type, found.message, found.code) == (
        "rallypoint.errors.StoreTimeout",
        "no w after 5 s",
        "wait-timeout",
    )
    others = tracebacks.exception_in([*TWO, "  more   rallypoint explain wait-timeout"])
    assert others is not None
    assert others.code == ""


@pytest.mark.parametrize(
    ("message", "came"),
    [
        (
            'the barrier "b" of 4 timed out after 3.0 s: 2 arrived (ranks 0-1), missing: rank 2 (pid 7 on vm, running for 3 s)',
            {0, 1},
        ),
        (
            'the barrier "b" of 9 timed out after 3.0 s: 5 arrived (ranks 0-2, 4 and 6), 4 are missing',
            {0, 1, 2, 4, 6},
        ),
        (
            'the barrier "b" of 2 is broken: rank 1 (pid 8 on vm) died; 1 arrived (rank 0 (pid 7 on vm))',
            {0},
        ),
        (
            'the barrier "b" of 3 timed out after 3.0 s: 2 arrived (rank 0 (pid 7 on vm), 2 in rank 1 (pid 8 on vm)), 1 is missing',
            {0, 1},
        ),
        (
            'the barrier "b" of 2 timed out after 3.0 s: 1 arrived (pid 7 on vm), 1 is missing',
            set(),
        ),
        ('the barrier "b" is broken', set()),
    ],
)
def test_who_came_to_a_barrier(message: str, came: set[int]) -> None:
    assert classify.came_to_barrier(message) == came


def test_the_file_that_record_writes() -> None:
    extra = {"py_callstack": "\n".join(TWO), "timestamp": "1"}
    full = tracebacks.error_file(
        json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}})
    )
    assert full is not None
    assert (full.type, full.message, full.frames[0].line) == ("ValueError", "x", 7)
    short = tracebacks.error_file('{"message": "something else"}')
    assert short is not None
    assert (short.type, short.message) == ("Exception", "something else")
    assert tracebacks.error_file("not json") is None
    assert tracebacks.error_file("[" * 100_000) is None  # RecursionError, in Python's json
    assert tracebacks.error_file("[]") is None


def test_ports_and_memory() -> None:
    assert classify.port_named("port: 33451, useIpv6: false, code: -98, name: EADDRINUSE") == 33451
    assert (
        classify.port_named(
            "[Errno 98] Address already in use (while attempting to bind on address ('127.0.0.1', 46073))"
        )
        == 46073
    )
    assert classify.port_named("cannot bind 0.0.0.0:6006: address already in use") == 6006
    assert classify.port_named("[Errno 98] Address already in use") == 0
    assert (
        classify.memory_of(Raised("torch.OutOfMemoryError", "CUDA out of memory", (), "")) == "GPU"
    )
    assert classify.memory_of(Raised("MemoryError", "", (), "")) == "host"
    assert (
        classify.memory_of(
            Raised(
                "RuntimeError",
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...",
                (),
                "",
            )
        )
        == "host"
    )
    assert (
        classify.memory_of(
            Raised(
                "RuntimeError", "unable to allocate shared memory(shm) for file </torch_1>", (), ""
            )
        )
        == "shared"
    )
    assert classify.memory_of(Raised("ValueError", "x", (), "")) == ""


@given(some.lists(some.sampled_from(TWO) | some.text(max_size=20)), some.text())
def test_any_text_can_be_read(lines: list[str], text: str) -> None:
    tracebacks.exception_in(lines)
    tracebacks.error_file(text)
    classify.meaning(Raised(text, text, (), text))
    classify.cause_of(Raised(text, text, (), text))


LOADER = """\
Caught ValueError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/a/data.py", line 8, in __getitem__
    raise ValueError("bad image")
ValueError: bad image
"""


def test_what_a_worker_of_a_loader_raised() -> None:
    assert tracebacks.in_loader(LOADER) == ("3", "ValueError: bad image")
    assert tracebacks.in_loader("Caught a cold") == ("", "")


def fetched(kind: str, message: str, *files: str) -> Raised:
    return Raised(kind, message, tuple(Frame(file, 1, "f") for file in ("/a/train.py", *files)), "")


REDUCTIONS = "/venv/lib/python3.11/site-packages/torch/multiprocessing/reductions.py"
SHARER = "/usr/lib/python3.11/multiprocessing/resource_sharer.py"
STARTING = "/usr/lib/python3.11/multiprocessing/popen_spawn_posix.py"


def test_the_keys_of_torchs_store_as_the_program_called_them() -> None:
    told = "wait timeout after 1000ms, keys: {}"
    assert classify.keys_of_program(told.format("/a, /my key")) == ("a", "my key"), (
        "of a TCPStore of its own"
    )
    assert classify.keys_of_program(
        told.format("/default_pg/0//data") + "\nException raised from doWait"
    ) == ("data",)
    assert classify.keys_of_program(told.format("/default_pg/0//cpu//0/1")) == ()
    assert classify.not_met(told.format("/default_pg/0//cpu//0/1")) == 1


@pytest.mark.parametrize(
    ("kind", "message", "meaning"),
    [
        (
            "TypeError",
            "Expected timeout argument to be of type datetime.timedelta, got 30",
            classify.Meaning.OWN,
        ),
        ("ValueError", "timeout must be positive", classify.Meaning.OWN),
        ("RuntimeError", "Connect timeout", classify.Meaning.WAITED),
    ],
)
def test_an_argument_called_timeout_is_no_wait(
    kind: str, message: str, meaning: classify.Meaning
) -> None:
    """init_process_group(timeout=30) was "waited in vain for another rank; cause not known"."""
    error = Raised(kind, message, (), "", call="init_process_group")
    assert classify.meaning(error) is meaning


def test_a_refusal_is_a_producer_only_where_a_tensor_is_fetched() -> None:
    refused = "[Errno 111] Connection refused"
    assert classify.fits(
        "producer-gone", fetched("ConnectionRefusedError", refused, REDUCTIONS, SHARER)
    )
    assert classify.fits(
        "producer-gone", fetched("FileNotFoundError", "[Errno 2] No such file or directory", SHARER)
    )
    assert classify.fits("producer-gone", fetched("EOFError", "", REDUCTIONS))
    gone = "unable to open shared memory object </torch_812_3_0> in read-write mode: No such file or directory (2)"
    assert classify.fits("producer-gone", fetched("RuntimeError", gone, REDUCTIONS))
    assert not classify.fits(
        "producer-gone", fetched("ConnectionRefusedError", refused, "/usr/lib/python3.11/socket.py")
    )
    assert not classify.fits("producer-gone", fetched("ValueError", "x", REDUCTIONS))


def test_what_cannot_be_pickled_is_an_argument_only_where_a_process_starts() -> None:
    for message in (
        "Can't pickle local object 'main.<locals>.<lambda>'",
        "cannot pickle '_thread.lock' object",
    ):
        assert classify.fits("not-pickled", fetched("AttributeError", message, STARTING))
        assert not classify.fits("not-pickled", fetched("AttributeError", message))


def test_a_process_without_descriptors() -> None:
    for message in (
        "received 0 items of ancdata",
        "[Errno 24] Too many open files: 'x'",
        "Too many open files. Communication with ...",
    ):
        assert classify.fits("files-exhausted", fetched("RuntimeError", message))
    assert classify.fits(
        "files-exhausted", msgspec.structs.replace(fetched("OSError", "x"), errno=errno.EMFILE)
    )
    assert not classify.fits("files-exhausted", fetched("OSError", "[Errno 2] No such file"))


def test_a_spawned_process_is_read_out_of_its_launchers_message() -> None:
    message = "\n\n-- Process 5 terminated with the following error:\n" + "\n".join(TWO[1:]) + "\n"
    found = tracebacks.in_process(
        fetched("torch.multiprocessing.spawn.ProcessRaisedException", message)
    )
    assert found is not None
    place, error = found
    assert place.startswith("process 5 ")
    assert (error.type, error.message) == ("ValueError", "first")
    assert tracebacks.in_process(fetched("RuntimeError", "-- Process 5 was killed")) is None


def test_an_interface_that_gloo_does_not_find() -> None:
    words = "[enforce fail at gloo/device.cc:84] ifa != nullptr. Unable to find address for: ib7"
    found = classify.says("interface-missing", words)
    assert found is not None
    assert found[1] == "ib7"
    assert classify.says("interface-missing", "no such device") is None


def meets(method: str, address: str) -> Meeting:
    return Meeting(method, address, 1, 2, "gloo")


def test_where_torch_did_not_come_to() -> None:
    refused = (
        "The client socket has timed out after 3000ms while trying to connect to (node07, 29500)."
    )
    failed = "The client socket has failed to connect to any network address of (10.0.0.5, 29500)."
    assert reachability.where(fetched("DistNetworkError", refused), None) == ("node07", 29500)
    assert reachability.where(fetched("DistNetworkError", failed), None) == ("10.0.0.5", 29500)
    ping = fetched(
        "DistNetworkError",
        "Ping failed, invalid value returned from server. Expected: 30464, Got: 1347703880",
    )
    assert reachability.where(ping, meets("env://", "[::1]:29500")) == ("::1", 29500)
    assert reachability.where(ping, None) is None
    older = fetched(
        "RuntimeError",
        'nonce == returnedNonce INTERNAL ASSERT FAILED at "/pytorch/torch/csrc/distributed/c10d/TCPStore.cpp":426, '
        "please report a bug to PyTorch. Ping failed, invalid nonce returned",
    )  # torch 2.8
    assert reachability.where(older, meets("env://", "[::1]:29500")) == ("::1", 29500)
    words = reachability.of_words(older, meets("tcp://h:8080", "h:8080"))
    assert words is not None
    assert (words.address, words.first, words.outcome) == ("h:8080", b"", "answered")
    assert reachability.where(fetched("ValueError", "x"), meets("env://", "127.0.0.1:1")) is None
    assert reachability.place(meets("file:///a", "/a")) is None
    words = reachability.of_words(ping, meets("tcp://h:8080", "h:8080"))
    assert words is not None
    assert (words.address, words.first, words.outcome) == ("h:8080", b"HTTP", "answered")


def test_which_store_broke_the_connection() -> None:
    line = "[W1] [c10d] sendBytes failed on SocketImpl(fd=3, addr=[::ffff:127.0.0.1]:33186, remote=[::ffff:127.0.0.1]:41749): Broken pipe"
    broken = fetched("torch.distributed.DistNetworkError", "Broken pipe")
    assert reachability.store_of(broken, [line, "epoch 3"]) == ("127.0.0.1", 41749)
    assert reachability.store_of(broken, ["epoch 3"]) is None
    assert reachability.store_of(msgspec.structs.replace(broken, call="all_reduce"), [line]) is None
    assert reachability.store_of(fetched("BrokenPipeError", "Broken pipe"), [line]) is None


@pytest.mark.parametrize(
    ("files", "message", "own"),
    [
        (("torch/serialization.py", "torch/_weights_only_unpickler.py"), "", True),
        (("torch/serialization.py",), "Ran out of input", True),
        (("dill/_dill.py", "/usr/lib/python3.11/pickle.py"), "", True),
        (("/usr/lib/python3.11/multiprocessing/connection.py",), "Ran out of input", False),
        (("/usr/lib/python3.11/multiprocessing/connection.py",), "", False),
        (
            ("/usr/lib/python3.11/multiprocessing/queues.py", "/usr/lib/python3.11/pickle.py"),
            "",
            False,
        ),
        (("paramiko/transport.py",), "", False),
        (
            (
                "torch/multiprocessing/spawn.py",
                "torch/serialization.py",
                "torch/_weights_only_unpickler.py",
            ),
            "",
            True,
        ),
        (
            (
                "/usr/lib/python3.11/multiprocessing/process.py",
                "torch/serialization.py",
                "torch/_weights_only_unpickler.py",
            ),
            "",
            True,
        ),
        (
            ("/usr/lib/python3.11/multiprocessing/process.py", "torch/serialization.py"),
            "Ran out of input",
            True,
        ),
        (("/usr/lib/python3.11/multiprocessing/spawn.py",), "Ran out of input", False),
        (("torch/multiprocessing/queue.py",), "Ran out of input", False),
        ((), "", False),
    ],
)
def test_the_end_of_a_file_that_is_unpickled_speaks_of_no_peer(
    files: tuple[str, ...], message: str, own: bool
) -> None:
    """`torch.load` of an empty checkpoint was likely the loss of another rank: since torch 2.6 it
    reads with an unpickler of its own, which raises an EOFError without words. In a child of
    `multiprocessing` it still was, for the frames above all that a child does.
    """
    frames = tuple(Frame(os.path.join("/venv/site-packages", file), 9, "load") for file in files)
    error = Raised("EOFError", message, (Frame("/home/ada/train.py", 4, "main"), *frames), "")
    meaning = classify.Meaning.OWN if own else classify.Meaning.MAYBE_LOST
    assert classify.meaning(error) is meaning
