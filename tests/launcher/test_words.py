"""Which exception of a chain began it, as a report names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rallypoint.launcher import words


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


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (hidden_by_finally, KeyError),
        (hidden_by_clearing_up, RuntimeError),
        (the_other_way_failed, ValueError),
        (the_other_way_failed_and_was_closed, ValueError),
        (wrapped_on_purpose, RuntimeError),
    ],
)
def test_the_first_of_a_chain(program: Callable[[], None], kind: type[Exception]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one comes out is what is asked)
        program()
    assert type(words.first_of_chain(caught.value)) is kind
