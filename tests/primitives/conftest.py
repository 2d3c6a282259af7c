from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint import Server, Store

from ..store.live import DEADLINE

# The bench, of whose soaks there is a short form here, is no part of what ships; it is imported from the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LONG = 3600.0
"""Seconds: a lease that no test waits for."""


@pytest.fixture(autouse=True)
def _server_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests here read what the server says when a wait is over. On a busy machine it may say so seconds late; that a client does not
    wait for it for long is for tests/store/test_deadlines.py."""
    monkeypatch.setattr("rallypoint.store.pending.LEAST_GRACE", 5.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve(max_bytes="128MiB") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["near", "far"])
def connect(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    made: list[Store] = []

    def make() -> Store:
        made.append(rallypoint.connect(server.address, secret=server.secret, same_host=request.param, timeout=DEADLINE, ttl=LONG))
        return made[-1]

    yield make
    for store in made:
        store.close()
