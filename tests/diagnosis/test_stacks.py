"""What faulthandler wrote, as frames; and stacks grouped by rank."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame

DUMP = """\
Thread 0x00007f41a17dc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f41a2246b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2936 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/ada/exp/train.py", line 42 in step
  File "/home/ada/exp/train.py", line 60 in <module>
  File "/venv/lib/python3.11/site-packages/rallypoint/launcher/worker.py", line 99 in run
  File "<frozen runpy>", line 88 in _run_code
  File "<string>", line 1 in <module>
"""
STEP = Frame("/home/ada/exp/train.py", 42, "step")
TOP = Frame("/home/ada/exp/train.py", 60, "<module>")


def test_frames_are_outermost_first_and_without_ours() -> None:
    frames = stacks.main_frames(DUMP)
    assert [frame.function for frame in frames] == ["<module>", "step", "wrapper", "all_reduce"]
    assert frames[:2] == (TOP, STEP)
    assert stacks.current_frames(DUMP) == frames


def test_text_that_a_program_runs_is_in_its_stack_and_our_first_line_is_not() -> None:
    frames = stacks.main_frames(
        'Current thread 0x00007f (most recent call first):\n  File "<string>", line 2 in <module>\n'
        '  File "/home/ada/exp/train.py", line 60 in <module>\n  File "<string>", line 4 in <module>\n'
    )
    assert [(frame.file, frame.line) for frame in frames] == [
        ("/home/ada/exp/train.py", 60),
        ("<string>", 2),
    ]


def test_a_stack_in_one_line_names_the_programs_line_and_the_call_it_is_in() -> None:
    root = stacks.root_of("train.py", stacks.main_frames(DUMP))
    assert root == "/home/ada/exp/"
    assert stacks.place(stacks.main_frames(DUMP), root) == "train.py:42 in step (torch all_reduce)"
    assert stacks.place((TOP, STEP)) == "/home/ada/exp/train.py:42 in step"
    assert stacks.place(()) == ""


def test_a_call_of_torchs_that_the_launcher_wraps_is_torchs() -> None:
    """As in a process of mp.spawn, whose traceback comes as a text with all frames."""
    ours = os.path.dirname(os.path.dirname(stacks.__file__))
    torch = "/venv/lib/python3.11/site-packages/torch/distributed"
    frames = (
        Frame("/home/ada/main.py", 36, "main_worker"),
        Frame(f"{ours}/launcher/worker/function_hooks.py", 23, "wrapper"),
        Frame(f"{ours}/launcher/worker/torch_hooks.py", 124, "_init_process_group"),
        Frame(f"{torch}/c10d_logger.py", 83, "wrapper"),
        Frame(f"{torch}/distributed_c10d.py", 1892, "init_process_group"),
    )
    expected = "/home/ada/main.py:36 in main_worker (torch init_process_group)"
    assert stacks.place(frames) == expected


def test_a_call_whose_decorator_is_a_function_of_its_library_is_named() -> None:
    """It was told as "(torch inner_func)"."""
    folder = "/venv/lib/python3.11/site-packages/torch/distributed/checkpoint"
    frames = (
        Frame("/srv/train.py", 13, "<module>", "dcp.load(state)"),
        Frame(f"{folder}/logger.py", 87, "wrapper"),
        Frame(f"{folder}/utils.py", 483, "inner_func"),
        Frame(f"{folder}/state_dict_loader.py", 172, "load"),
    )
    assert stacks.place(frames, "/srv/") == "train.py:13 in <module> (torch load)"


def test_a_function_that_was_typed_behind_c_is_a_place() -> None:
    """`python -c "... rallypoint.launch(f)"`; our own processes begin with a line of `-c`, and
    dataclasses write functions there, too.
    """
    typed = DUMP.replace("/home/ada/exp/train.py", "<string>").replace(
        "line 60 in <module>", "line 3 in __init__"
    )
    assert stacks.place(stacks.main_frames(typed)) == "<string>:42 in step (torch all_reduce)"
    made = DUMP.replace('train.py", line 42 in step', 'made.py", line 42 in step').replace(
        "c10d_logger.py", "logger.py"
    )
    made = made.replace(
        '"/venv/lib/python3.11/site-packages/torch/distributed/logger.py"', '"<string>"'
    )
    assert stacks.place(stacks.main_frames(made)).startswith("/home/ada/exp/made.py:42 in step")


@pytest.mark.parametrize(
    ("file", "function", "called"),
    [
        ("pandas/_libs/parsers.pyx", "pandas._libs.parsers.TextReader._read_rows", "pandas _read_rows"),
        ("pyarrow/error.pxi", "pyarrow.lib.check_status", "pyarrow check_status"),
        ("_tree.pyx", "sklearn.tree._tree.Tree.fit", "sklearn fit"),
        ("src\\lxml\\etree.pyx", "lxml.etree.parse", "lxml parse"),
        ("av/container/core.py", "av.container.core.open", "av open"),
        ("<__array_function__ internals>", "concatenate", ""),
        ("/home/ada/exp/fast.pyx", "fast.load", None),
        ("exp/data.py", "load", None),
        ("data.py", "Data.load", None),
    ],
)  # fmt: skip
def test_a_module_that_was_compiled_is_a_library(
    file: str, function: str, called: str | None
) -> None:
    """Cython leaves frames with the path that a file had where it was built; one that was compiled
    where the program runs, or by pyximport, has a path that can be opened.
    """
    compiled = Frame(file, 9, function)
    call = f" ({called})" if called else ""
    line = (
        f"{file}:9 in {function}" if called is None else f"/home/ada/exp/train.py:42 in step{call}"
    )
    assert stacks.place((TOP, STEP, compiled)) == line


def test_a_call_of_the_store_is_named_as_a_call_of_torch_is() -> None:
    """Also where rallypoint is run from its source: the program's line is not ours."""
    package = os.path.dirname(os.path.dirname(stacks.__file__))
    dump = f"""\
Current thread 0x00007f41a2246b80 (most recent call first):
  File "{package}/store/exchange.py", line 80 in ask
  File "{package}/store/client.py", line 310 in wait
  File "/home/ada/exp/train.py", line 42 in step
  File "{package}/launcher/worker.py", line 99 in run
"""
    assert (
        stacks.place(stacks.main_frames(dump))
        == "/home/ada/exp/train.py:42 in step (rallypoint wait)"
    )


def test_the_main_thread_is_the_last_one_and_the_crashed_one_is_marked() -> None:
    dump = DUMP.replace("Current thread", "Thread").replace("Thread", "Current thread", 1)
    assert stacks.main_frames(dump)[1] == STEP
    assert [frame.function for frame in stacks.current_frames(dump)] == ["run", "wait"]


def test_a_rank_that_was_asked_twice_tells_the_later_place() -> None:
    later = DUMP.replace("line 42", "line 43")
    assert stacks.main_frames(DUMP + later)[1].line == 43
    assert len(stacks.parse(DUMP + later)) == 2


def test_of_more_threads_than_are_written_the_last_is_not_taken_for_the_main_one() -> None:
    other, main = DUMP.split("\n\n")
    assert stacks.main_frames((other + "\n\n") * 98 + main)[1] == STEP
    assert stacks.main_frames(main + "\n" + (other + "\n\n") * 99 + "...\n")[1] == STEP
    assert stacks.main_frames((other + "\n\n") * 100 + "...\n") == ()


def test_lines_of_newer_pythons_are_understood() -> None:
    dump = """\
Fatal Python error: Segmentation fault

<Cannot show all threads while the GIL is disabled>
Current thread 0x00007f41a2246b80 [train] (most recent call first):
  Garbage-collecting
  File "/a.py", line ??? in f
  ...

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x48 [0x6c1c18]

Extension modules: numpy, torch._C (total: 2)
"""
    (thread,) = stacks.parse(dump)
    assert thread.name == "train"
    assert thread.frames == (Frame("/a.py", 0, "f"),)


def test_the_odd_one_comes_first() -> None:
    groups = stacks.group({3: (TOP,), 0: (STEP,), 2: (STEP,), 1: (STEP,)})
    assert [group.ranks for group in groups] == [(3,), (0, 1, 2)]


def test_root_is_the_folder_from_which_the_program_was_typed() -> None:
    frame = Frame("/home/ada/exp/src/train.py", 1, "f")
    assert stacks.root_of("./src/train.py", [frame]) == "/home/ada/exp/"
    assert stacks.root_of("/home/ada/exp/src/train.py", [frame]) == ""
    assert stacks.root_of("other.py", [frame]) == ""
    assert stacks.describe(frame, "/home/ada/exp/") == "src/train.py:1 in f"


def test_a_dump_of_this_very_process() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read()
    assert stacks.main_frames(dump)[-1].function == "test_a_dump_of_this_very_process"


def test_the_dump_of_a_real_crash() -> None:
    program = f"import {ctypes.__name__}\ndef fall():\n    ctypes.string_at(0)\nfall()\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", file.name],
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        frames = stacks.current_frames(done.stderr)
        assert stacks.place(frames) == f"{file.name}:3 in fall (ctypes string_at)"


@given(some.lists(some.sampled_from(DUMP.splitlines()) | some.text(max_size=40)))
def test_any_text_can_be_read(lines: list[str]) -> None:
    for thread in stacks.parse("\n".join(lines)):
        stacks.place(thread.frames)
