from __future__ import annotations

import pytest

from rallypoint.errors import UsageError
from rallypoint.store.client import retry as retrying
from rallypoint.store.client.backoff import FIRST, MOST, ceiling, pause
from rallypoint.store.client.retry import MOST_KINDS, retry


def test_the_ceiling_doubles_up_to_its_most() -> None:
    assert [ceiling(n) for n in range(3)] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert ceiling(100) == ceiling(10**9) == MOST


def test_the_pause_is_anywhere_below_the_ceiling() -> None:
    assert pause(3, 0.0) == 0.0
    assert pause(3, 0.5) == ceiling(3) / 2


def test_retry_returns_what_comes_in_the_end() -> None:
    answers = iter([ConnectionError("a"), ConnectionRefusedError("b"), 42])

    def fn() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, int)
        return answer

    assert retry(fn) == 42


def test_retry_raises_the_last_one_with_all_of_them_counted() -> None:
    def fn() -> None:
        raise ConnectionRefusedError("nothing there")

    with pytest.raises(ConnectionRefusedError) as caught:
        retry(fn, timeout=0.05)
    assert any("x ConnectionRefusedError: nothing there" in note for note in caught.value.__notes__)


def test_retry_does_not_keep_every_message_that_is_another_each_time() -> None:
    kinds: dict[str, int] = {}
    for number in range(MOST_KINDS + 5):
        retrying._count(kinds, f"at {number} s")
    retrying._count(kinds, "at 0 s")
    assert (
        retrying._folded(kinds)
        == "2 x at 0 s; "
        + "".join(f"1 x at {number} s; " for number in range(1, MOST_KINDS))
        + "5 others"
    )


def test_retry_lets_other_exceptions_through_at_once() -> None:
    calls = []

    def fn() -> None:
        calls.append(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        retry(fn)
    assert len(calls) == 1


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_retry_needs_a_time(timeout: float) -> None:
    with pytest.raises(UsageError):
        retry(lambda: None, timeout=timeout)
