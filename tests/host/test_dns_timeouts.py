"""Short look-ups are for one thread, and only for as long as they are asked for."""

from __future__ import annotations

import threading

import pytest

from rallypoint.host import dns_timeouts


def patience() -> tuple[int, int] | None:
    """The calling thread's seconds and attempts."""
    state = dns_timeouts._state()
    return (state.retrans, state.retry) if state is not None else None


def test_only_this_thread_and_only_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RES_OPTIONS='timeout:1 attempts:1'` stood in every rank's environment, and a download behind
    a resolver that needs 1.5 s failed.
    """
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    before = patience()
    if before is None:
        pytest.skip("this C library's resolver cannot be told")
    seen: list[tuple[int, int] | None] = []
    with dns_timeouts.quick_lookups():
        other = threading.Thread(target=lambda: seen.append(patience()))
        other.start()
        other.join()
        assert patience() == (1, 1)
    assert patience() == before
    assert seen == [before]
    assert before != (1, 1)


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = patience()
    monkeypatch.setenv("RES_OPTIONS", "timeout:7")
    with dns_timeouts.quick_lookups():
        assert patience() == before
