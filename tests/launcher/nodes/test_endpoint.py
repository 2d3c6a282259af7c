"""Who may lead: agents of one machine claim the endpoint one after the other."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.launcher.nodes import endpoint
from rallypoint.launcher.plan import Nodes


@pytest.fixture
def ports() -> tuple[int, ...]:
    """Two free ports of this machine, as the static way has eight."""
    with ExitStack() as stack:
        socks = [stack.enter_context(closing(socket.socket())) for _ in range(2)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return tuple(sock.getsockname()[1] for sock in socks)


@pytest.fixture
def lead(ports: tuple[int, ...]) -> Iterator[endpoint.Claim]:
    claimed = endpoint.claim(Nodes(count=2, ports=ports), None)
    assert claimed is not None
    assert claimed.held.port == ports[0]
    yield claimed
    claimed.release()


@pytest.mark.usefixtures("lead")
def test_the_second_agent_without_a_place_does_not_lead_too(ports: tuple[int, ...]) -> None:
    """It took the next of the ports, and each waited for the other until the time was over."""
    assert endpoint.claim(Nodes(count=2, ports=ports), None) is None


@pytest.mark.usefixtures("lead")
def test_node_0_takes_the_next_port_when_a_stranger_has_the_first(ports: tuple[int, ...]) -> None:
    claimed = endpoint.claim(Nodes(count=2, rank=0, ports=ports), None)
    assert claimed is not None
    assert claimed.held.port == ports[1]
    claimed.release()


@pytest.mark.usefixtures("lead")
def test_node_0_advises_another_port_for_all_nodes(ports: tuple[int, ...]) -> None:
    """It was to leave the port out, which at an endpoint is a fixed one."""
    with pytest.raises(EnvironmentProblem) as caught:
        endpoint.claim(Nodes(count=2, rank=0, ports=ports[:1]), None)
    assert caught.value.code == "port-in-use"
    assert caught.value.help[0] == ("give every node the same endpoint with another port", "")


@pytest.mark.parametrize("text", ["", "ab 29400", "no-hex 29400 10.0.0.1", "ab port 10.0.0.1"])
def test_a_place_that_arrives_as_other_words_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    module = importlib.import_module("rallypoint.clusters.pmi")
    monkeypatch.setattr(module, "share", lambda environ, offer, timeout: text)
    with pytest.raises(UsageError) as caught:
        endpoint.handed_over(Nodes(count=2, rank=1, exchange="pmi"), None, {})
    assert caught.value.code == "cluster-unclear"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "job-svc"}, "has the address job-svc"),
        ({"host": "0.0.0.0"}, "has the address 0.0.0.0"),
        ({"folder": "/shared/job"}, "written into /shared/job"),
        ({"rank": 0}, ""),
        ({"is_host": True}, ""),
        ({"lead": ("10.0.0.1",)}, ""),
    ],
)
def test_why_a_node_leads_is_told_where_nobody_has_said_it(given: Any, words: str) -> None:
    told = endpoint.why_it_leads(Nodes(count=2, **given), "gpu01")
    assert words in told
    assert bool(told) is bool(words)
