"""Which exception of a chain began it, as a report names it; and which one is on its way while the
program clears up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rallypoint.launcher import exception_capture


def _close() -> None:
    raise AssertionError("Process group cannot be None")


def hidden_by_finally() -> None:
    try:
        raise KeyError("lr")
    finally:
        _close()


def hidden_by_clearing_up() -> None:
    try:
        raise RuntimeError("no backend")
    except Exception:
        _close()


def the_other_way_failed() -> None:
    try:
        raise ModuleNotFoundError("No module named 'flash_attn'")
    except ImportError:
        raise ValueError("shapes do not match")  # noqa: B904 (what people write)


def the_other_way_failed_and_was_closed() -> None:
    try:
        the_other_way_failed()
    finally:
        _close()


def wrapped_on_purpose() -> None:
    try:
        raise KeyError("lr")
    except Exception as error:
        raise RuntimeError("the configuration is incomplete") from error


async def _in_a_task_group() -> None:
    async def step() -> None:
        raise KeyError("lr")

    async with asyncio.TaskGroup() as group:
        group.create_task(step())


def in_a_task_group() -> None:
    """Such a group begins with the task's exception, and was told as an error of its own."""
    asyncio.run(_in_a_task_group())


def several_in_a_group() -> None:
    raise ExceptionGroup("two shards", [KeyError("lr"), ValueError("shapes do not match")])


class CacheMiss(Exception):
    pass


def with_half_the_batch(size: int = 4) -> None:
    """As after torch.OutOfMemoryError, again inside of the clause."""
    try:
        if size > 1:
            raise CacheMiss(size)
        raise ValueError("target 11 is out of bounds")
    except CacheMiss:
        with_half_the_batch(size // 2)


def on_the_cpu() -> None:
    try:
        raise RuntimeError("CUDA out of memory")
    except RuntimeError:
        int("-")


def hidden_by_an_exit_of_a_with() -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(_close)
        raise KeyError("lr")


def hidden_in_a_clause_that_raises_again() -> None:
    try:
        raise KeyError("lr")
    except KeyError:
        _close()
        raise


def hidden_in_a_clause_that_exits() -> None:
    try:
        raise KeyError("lr")
    except KeyError:
        _close()
        sys.exit(3)


def in_a_librarys_words() -> None:
    urllib.request.urlopen("file:///no/such/file")


@pytest.mark.parametrize(
    ("program", "kind", "is_open"),
    [
        (hidden_by_finally, KeyError, False),
        (hidden_by_an_exit_of_a_with, KeyError, False),
        (hidden_in_a_clause_that_raises_again, KeyError, False),
        (hidden_in_a_clause_that_exits, KeyError, False),
        (hidden_by_clearing_up, RuntimeError, True),
        (on_the_cpu, RuntimeError, True),
        (the_other_way_failed, ValueError, False),
        (the_other_way_failed_and_was_closed, ValueError, False),
        (with_half_the_batch, ValueError, False),
        (in_a_librarys_words, FileNotFoundError, False),
        (wrapped_on_purpose, RuntimeError, False),
        (in_a_task_group, KeyError, False),
        (several_in_a_group, ExceptionGroup, False),
    ],
)
def test_the_first_of_a_chain(
    program: Callable[[], None], kind: type[Exception], is_open: bool
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one comes out is what is asked)
        program()
    path, seen = exception_capture.to_first(caught.value)
    assert (type(path[-1]), seen) == (kind, is_open)
    assert exception_capture.raised(caught.value).is_open == is_open


@pytest.mark.parametrize(
    ("program", "stands_in", "module", "found"),
    [
        ("scripts/train.py", ".", "mylib/__init__.py", "."),
        ("scripts/train.py", "scripts", "mylib.py", "."),
        ("package/main.py", ".", "package/mylib.py", "package"),
        ("scripts/train.py", ".", "mylib/images.csv", None),  # a folder of data
        # a repository with the package further down: with its parent in PYTHONPATH it is an empty one
        ("scripts/train.py", ".", "mylib/setup.py", None),
        ("scripts/train.py", ".", "other.py", None),
    ],
)
def test_the_folder_of_a_module_that_lies_near_the_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    stands_in: str,
    module: str,
    found: str | None,
) -> None:
    for name in (program, module):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    source = "import mylib.net\n"
    (tmp_path / program).write_text(source)
    monkeypatch.chdir(tmp_path / stands_in)
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(compile(source, tmp_path / program, "exec"), {})
    folder = exception_capture.raised(caught.value).module_folder
    assert folder == ("" if found is None else str(tmp_path / found).removesuffix("/."))


def test_a_library_without_its_dependency_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mylib.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(compile("import mylib", "/env/lib/python3.11/site-packages/a/b.py", "exec"), {})
    assert exception_capture.raised(caught.value).module_folder == ""


def test_the_frames_of_the_first_of_a_chain_begin_where_the_program_does() -> None:
    """Its own traceback begins where it was caught. torch.save catches what a full disk raises, and
    the report named a line of torch's instead of the program's.
    """
    with pytest.raises(AssertionError) as caught:
        hidden_by_finally()
    here = sys._getframe().f_code.co_name
    frames = exception_capture.raised(caught.value).frames
    assert [frame.function for frame in frames] == [here, "hidden_by_finally"]


def _hiding() -> None:
    try:
        raise RuntimeError("Connection closed by peer")
    except RuntimeError as error:
        error.__dict__[exception_capture.SERIAL] = 1
        raise ValueError("training diverged") from None


def _closing_after() -> None:
    try:
        raise RuntimeError("bad batch")
    except RuntimeError as error:
        error.__dict__[exception_capture.SERIAL] = 1
        _close()
        raise


@pytest.mark.parametrize(("program", "serials"), [(_hiding, []), (_closing_after, [1])])
def test_what_an_exception_does_not_tell_of_is_not_taken_back(
    program: Callable[[], None], serials: list[int]
) -> None:
    """What `from None` hides may be the loss of a peer."""
    with pytest.raises((ValueError, AssertionError)) as caught:
        program()
    assert exception_capture.serials(caught.value) == serials


def test_a_member_that_was_never_raised_stands_where_its_group_was() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        raise ExceptionGroup("one shard", [KeyError("lr")])
    told = exception_capture.raised(caught.value)
    assert (told.type, told.frames[-1].source) == (
        "KeyError",
        'raise ExceptionGroup("one shard", [KeyError("lr")])',
    )


def _closing(seen: list[Exception | None]) -> None:
    seen.append(exception_capture.on_its_way(sys._getframe(1)))


def in_a_finally(seen: list[Exception | None]) -> None:
    try:
        raise ValueError("bad batch")
    finally:
        _closing(seen)


def in_a_function_that_a_finally_calls(seen: list[Exception | None]) -> None:
    def clear_up() -> None:
        _closing(seen)

    try:
        int("bad batch")
    finally:
        clear_up()


def in_an_except_clause(seen: list[Exception | None]) -> None:
    try:
        raise ValueError("bad batch")
    except Exception:
        _closing(seen)
        raise


def in_a_with(seen: list[Exception | None]) -> None:
    @contextlib.contextmanager
    def group() -> Iterator[None]:
        try:
            yield
        finally:
            _closing(seen)

    with group():
        raise ValueError("bad batch")


def when_all_is_well(seen: list[Exception | None]) -> None:
    try:
        pass
    finally:
        _closing(seen)


def long_after_another_way_was_taken(seen: list[Exception | None]) -> None:
    try:
        raise ModuleNotFoundError("No module named 'flash_attn'")
    except ImportError:
        when_all_is_well(seen)


def after_it_was_handled(seen: list[Exception | None]) -> None:
    with contextlib.suppress(ValueError):
        raise ValueError("bad batch")
    _closing(seen)


def by_sys_exit(seen: list[Exception | None]) -> None:
    try:
        sys.exit(3)
    finally:
        _closing(seen)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (in_a_finally, True),
        (in_a_function_that_a_finally_calls, True),
        (in_an_except_clause, True),
        (in_a_with, True),
        (when_all_is_well, False),
        (long_after_another_way_was_taken, False),
        (after_it_was_handled, False),
        (by_sys_exit, False),
    ],
)
def test_what_is_on_its_way(
    program: Callable[[list[Exception | None]], None], expected: bool
) -> None:
    seen: list[Exception | None] = []
    with contextlib.suppress(ValueError, SystemExit):
        program(seen)
    assert [type(one) for one in seen] == [ValueError if expected else type(None)]


def test_what_a_program_runs_by_exec_stands_in_its_traceback() -> None:
    """nanoGPT's configurator is such a text: of its error no line was left."""
    with pytest.raises(AssertionError) as caught:
        exec("steps = 10\nassert steps > 100")
    text = exception_capture.traceback_text(caught.value)
    assert 'File "<string>", line 2, in <module>' in text
    exception_capture.strip(caught.value)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][
        -1
    ] == "<module>"


def test_an_exception_of_a_frozen_dataclass_is_stripped_as_any_other() -> None:
    """It refuses that its attributes are set: that error hid the program's own."""

    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        step: int

    with pytest.raises(Frozen) as caught:
        raise Frozen(3)
    exception_capture.strip(caught.value)
    assert exception_capture.raised(caught.value).type.endswith("Frozen")


def test_a_function_that_was_typed_behind_c_is_the_programs() -> None:
    """`python -c "... rallypoint.launch(f)"`; our own processes begin with a line of `-c`."""
    scope: dict[str, Callable[[], None]] = {}
    exec(
        "def f():\n    raise ValueError('x')", scope
    )  # its code says that it stands in <string>, as that of `python -c` does
    with pytest.raises(ValueError, match="x") as caught:
        scope["f"]()
    told = exception_capture.raised(caught.value)
    assert [(frame.file, frame.line, frame.function) for frame in told.frames][-1] == (
        "<string>",
        2,
        "f",
    )
    assert 'File "<string>", line 2, in f' in told.traceback
    assert exception_capture.is_ours("<string>")
    assert exception_capture.is_ours("<string>", "__init__")


def test_a_deep_recursion_is_shown_as_far_as_python_shows_it() -> None:
    """A hundred thousand calls kept a rank busy for five seconds, and its peers waiting."""

    def descend(left: int) -> None:
        if left == 0:
            raise RecursionError("too deep")
        descend(left - 1)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        descend(5_000)
    except RecursionError as error:
        raised = exception_capture.raised(error)
    finally:
        sys.setrecursionlimit(limit)
    # Python shows the last 1,000 calls, of which all but the last are alike.
    assert "[Previous line repeated 996 more times]" in raised.traceback
    assert len(raised.frames) == exception_capture.FRAMES_MOST
