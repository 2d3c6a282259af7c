"""Clusters of nodes for tests: a test that leaves a process in one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .netns import Cluster

MakeCluster = Callable[..., Cluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:  # of all folders; to take a path apart for each took as long as 200 tests
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.nodes)


def _ended(cluster: Cluster) -> None:
    """Mend the cluster for the next test; a process that this one has left is its failure."""
    left = cluster.reset()
    assert not left, "the test has left processes:\n" + "\n".join(left)


@pytest.fixture(scope="module")
def _shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(getattr(request.module, "NODES", 4), tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(_shared: Cluster) -> Iterator[Cluster]:
    """Four nodes that all tests of a module share, each time as new; NODES of a module are another
    number.
    """
    yield _shared
    _ended(_shared)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Make a cluster for this test alone: `make_cluster(count, ipv6=..., shared_home=...)`."""
    made: list[Cluster] = []

    def make(count: int = 2, **options: bool | str) -> Cluster:
        made.append(Cluster(count, tmp_path / f"cluster{len(made)}", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    try:
        for one in made:
            _ended(one)
    finally:
        for one in made:
            one.close()
