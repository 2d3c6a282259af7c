"""Fixtures and a marker for pytest, which finds them by itself where rallypoint is installed.

pytest imports this file at its start in every project of that environment: what they need is
imported when one is used.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rallypoint import Server, Store
    from rallypoint.testing import ChaosProxy, ManualClock

MAX_BYTES = "256MiB"
"""Limit of a test's store: a test that stores without end is to fail by `store-full`, not take the
machine with it.
"""

RANKS = "ranks(nproc, backend=None, timeout=300): run the test's body in that many processes, by rallypoint.launch"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", RANKS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") is not None:
        from rallypoint.testing import ranks

        ranks.check(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    from rallypoint.testing import ranks

    ranks.run(pyfuncitem, marker)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and item.get_closest_marker("ranks") is not None:
        from rallypoint.testing import ranks

        ranks.show(item, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo[None]
) -> None:
    if (
        call.when == "call"
        and node.get_closest_marker("ranks") is not None
        and node.config.getoption("usepdb", False)
    ):
        node.config.get_terminal_writer().line(
            "the ranks have ended: this is pytest's own process, and no frame of theirs is here"
        )


@pytest.fixture
def store_server() -> Iterator[Server]:
    """A store's server in this process, of this test alone: an empty one, with a secret of its own,
    on a free port of 127.0.0.1.
    """
    from rallypoint.store.server.server import serve

    with serve(max_bytes=MAX_BYTES) as server:
        yield server


@pytest.fixture
def store(store_server: Server) -> Iterator[Store]:
    """A client of `store_server`. `rallypoint.connect(store_server.address,
    secret=store_server.secret)` makes further ones.
    """
    from rallypoint.primitives.store import connect

    with connect(store_server.address, secret=store_server.secret) as client:
        yield client


@pytest.fixture
def chaos_proxy(store_server: Server) -> Iterator[ChaosProxy]:
    """A proxy in front of `store_server`, which passes everything on until it is told otherwise.
    Connect to its address, with `same_host=False`: a client that learns of the server's Unix socket
    would go around it."""
    from rallypoint.testing.proxy import ChaosProxy

    with ChaosProxy(store_server.address) as proxy:
        yield proxy


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that moves when the test says so."""
    from rallypoint.testing.clock import ManualClock

    return ManualClock()
