"""Other programs' words."""

from __future__ import annotations

import json
import traceback

from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import reading
from rallypoint.diagnosis.evidence import Frame
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
    found = reading.exception_in(TWO)
    assert found is not None
    assert (found.type, found.message) == ("ValueError", "first")
    assert found.frames == (Frame("/a/train.py", 7, "main", "dist.init_process_group()"),)


def test_the_prefix_that_torch_puts_before_each_line() -> None:
    assert reading.exception_in([f"[rank2]: {line}" for line in TWO]) == reading.exception_in(TWO)


def test_a_raise_from_means_what_it_says() -> None:
    during = "During handling of the above exception, another exception occurred"
    cause = "The above exception was the direct cause of the following exception"
    chain = [line.replace(during, cause) for line in TWO]
    found = reading.exception_in(chain)
    assert found is not None
    assert found.type == "AssertionError"


def test_a_traceback_that_was_printed_long_before_the_end_is_no_end() -> None:
    assert reading.exception_in([*TWO, *(f"epoch {i}" for i in range(reading.AFTER_END + 1))]) is None
    assert reading.exception_in(["all is well"]) is None
    assert reading.exception_in(TWO[:3]) is None


def test_an_error_of_the_store_brings_its_code() -> None:
    """Python prints the notes of an exception below it, and the last of them names the page."""
    error = StoreTimeout("wait-timeout", "no w after 5 s", why=("it has 3 keys",), help=(("wait longer", 'store.wait("w", timeout=60)'),))
    printed = "".join(traceback.format_exception(error)).splitlines()
    found = reading.exception_in(["Traceback (most recent call last):", *printed])
    assert found is not None
    assert (found.type, found.message, found.code) == ("rallypoint.errors.StoreTimeout", "no w after 5 s", "wait-timeout")
    others = reading.exception_in([*TWO, "  more   rallypoint explain wait-timeout"])
    assert others is not None
    assert others.code == ""


def test_the_file_that_record_writes() -> None:
    extra = {"py_callstack": "\n".join(TWO), "timestamp": "1"}
    full = reading.error_file(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    assert full is not None
    assert (full.type, full.message, full.frames[0].line) == ("ValueError", "x", 7)
    short = reading.error_file('{"message": "something else"}')
    assert short is not None
    assert (short.type, short.message) == ("Exception", "something else")
    assert reading.error_file("not json") is None
    assert reading.error_file("[]") is None


def test_ports_and_memory() -> None:
    assert reading.port_named("port: 33451, useIpv6: false, code: -98, name: EADDRINUSE") == 33451
    assert reading.port_named("[Errno 98] Address already in use (while attempting to bind on address ('127.0.0.1', 46073))") == 46073
    assert reading.port_named("cannot bind 0.0.0.0:6006: address already in use") == 6006
    assert reading.port_named("[Errno 98] Address already in use") == 0
    assert reading.out_of_memory("torch.OutOfMemoryError", "CUDA out of memory") == "GPU"
    assert reading.out_of_memory("MemoryError", "") == "host"
    assert reading.out_of_memory("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...") == "host"
    assert reading.out_of_memory("RuntimeError", "unable to allocate shared memory(shm) for file </torch_1>") == "shared"
    assert reading.out_of_memory("ValueError", "x") == ""


@given(some.lists(some.sampled_from(TWO) | some.text(max_size=20)), some.text())
def test_any_text_can_be_read(lines: list[str], text: str) -> None:
    reading.exception_in(lines)
    reading.error_file(text)
    reading.meaning(text, text)
