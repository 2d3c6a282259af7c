from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint import Server, Store

from ..store.live import DEADLINE, let_servers_be_late

# The bench, of whose soaks there is a short form here, is no part of what ships; it is imported
# from the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LONG = 3600.0
"""Seconds: a lease that no test waits for."""


@pytest.fixture(autouse=True)
def _server_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    let_servers_be_late(monkeypatch)


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve(max_bytes="128MiB") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["near", "far"])
def connect(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    made: list[Store] = []

    def make() -> Store:
        made.append(
            rallypoint.connect(
                server.address,
                secret=server.secret,
                same_host=request.param,
                timeout=DEADLINE,
                ttl=LONG,
            )
        )
        return made[-1]

    yield make
    for store in made:
        store.close()
