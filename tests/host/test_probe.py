"""What is at an address: each way in which a connection does not come about, told apart."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from rallypoint.clock import Clock
from rallypoint.diagnosis.reachability import ANSWER, GREETING, explains
from rallypoint.host import firewall, probe, resolver
from rallypoint.host.ports import hold_port
from rallypoint.host.resolver import Answer

TIMEOUT = 1.0  # seconds for one look, which takes that long where nobody answers
SLACK = 5.0  # seconds more that a busy machine may take until the test fails

Serve = Callable[[socket.socket], None]


@contextlib.contextmanager
def service(serve: Serve) -> Iterator[int]:
    """Somebody who accepts one connection and does `serve` with it: the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(SLACK)
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(SLACK)


def at(port: int, host: str = "127.0.0.1") -> probe.Reached:
    return probe.look(host, port, GREETING, TIMEOUT)


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        found = at(port)
    assert (found.outcome, found.here, found.holders, explains(found)) == (
        "refused",
        True,
        (),
        True,
    )
    assert (
        str(found.tried[0])
        == f"127.0.0.1:{port}: nothing listens there (Connection refused, errno 111)"
    )
    assert found.seconds < TIMEOUT + SLACK


@pytest.mark.parametrize(("held_at", "hook", "blames"), [
    ("127.0.0.1", "output", True),
    ("0.0.0.0", "input", True),
    ("127.0.0.2", "input", False),  # it listens elsewhere
    ("127.0.0.1", "", False),  # it has begun meanwhile
])  # fmt: skip
def test_refused_though_somebody_listens(
    held_at: str, hook: str, blames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rule that rejects makes it, which takes root and a firewall: the refusal and the rules
    are played back, the listener is real.
    """
    with hold_port(0, held_at) as held:
        refused = probe.Tried(f"127.0.0.1:{held.port}", "refused", errno.ECONNREFUSED)
        monkeypatch.setattr(probe, "_try_all", lambda *_: (refused,))
        rule = firewall.Rule("reject", (), "reject")
        chain = firewall.Chain("inet filter all", (rule,), "accept", hook)
        rules = firewall.Firewall((chain,) if hook else ())
        monkeypatch.setattr(firewall, "read_firewall", lambda _: rules)
        found = at(held.port)
    assert (found.outcome, len(found.holders)) == ("refused", 1)
    assert (found.rejected is not None) == blames
    assert found.rejected is None or str(found.rejected).startswith(
        "the firewall rejects it (nft: "
    )


def test_packets_are_dropped() -> None:
    with socket.socket() as deaf, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # its queue is full: the kernel drops what comes
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        clock = Clock()
        found = at(deaf.getsockname()[1])
        assert (found.outcome, found.first) == ("dropped", b"")
        assert TIMEOUT <= clock.elapsed() < TIMEOUT + SLACK


def test_a_service_that_speaks_first() -> None:
    with service(lambda connection: connection.sendall(b"220 mail.example.org ready\r\n")) as port:
        found = at(port)
    assert (found.outcome, explains(found)) == ("answered", True)
    assert probe.shown(found.first) == "'220 mail.example.org ready'"
    assert f"(pid {os.getpid()}, user " in found.holders[0]


def test_a_service_that_waits_for_the_rest_of_the_line() -> None:
    def web(connection: socket.socket) -> None:
        connection.makefile("rb").readline()
        connection.sendall(b"HTTP/1.0 400 Bad request\r\n")

    with service(web) as port:
        found = at(port)
    assert (found.outcome, probe.shown(found.first)) == ("answered", "'HTTP/1.0 400 Bad request'")


def test_a_store_of_torchs_explains_nothing() -> None:
    def store(connection: socket.socket) -> None:
        if connection.recv(len(GREETING)) == GREETING:
            connection.sendall(ANSWER)

    with service(store) as port:
        found = at(port)
    assert (found.outcome, explains(found)) == ("answered", False)


def test_somebody_who_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = at(listener.getsockname()[1])
    assert (found.outcome, found.stopped) == ("silent", 0)


def test_somebody_who_hangs_up() -> None:
    with service(lambda connection: None) as port:
        found = at(port)
    assert found.outcome == "closed"


def test_where_no_thread_can_be_started_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of processes the launcher ended with an error of its own instead of the
    job's.
    """

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    looking = probe.Looking("127.0.0.1", 29500, GREETING, TIMEOUT)
    assert (looking.address, looking.result) == (("127.0.0.1", 29500), None)


def test_a_number_that_is_no_port() -> None:
    """It comes from a message, which may say anything: a traceback of the launcher's stood above
    the report.
    """
    assert probe.look("127.0.0.1", 99999, GREETING, TIMEOUT).outcome == "unreachable"
    assert probe.look("127.0.0.1", 0, GREETING, TIMEOUT).outcome == "refused"


def test_no_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(probe, "connecting", no_route)
    found = at(29500, "203.0.113.9")
    assert (found.outcome, found.here) == ("unreachable", False)
    assert (
        str(found.tried[0])
        == "203.0.113.9:29500: there is no way to it (Network is unreachable, errno 101)"
    )


def of_name(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr(resolver, "ask", lambda names, timeout: {answer.asked: answer})


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    of_name(monkeypatch, Answer("node08", error="Name or service not known"))
    found = at(29500, "node08")
    assert (found.outcome, found.unresolved, found.tried) == (
        "unresolved",
        "Name or service not known",
        (),
    )
    assert probe.elsewhere("node08", TIMEOUT) == (
        "address-unresolved",
        "node08 has no address here (Name or service not known)",
    )


def test_a_resolver_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    of_name(monkeypatch, Answer("node08", took=0.3))
    assert at(29500, "node08").unresolved == "the resolver gave no answer within 0.3 s"
    assert probe.elsewhere("node08", TIMEOUT) is None


def test_all_addresses_of_a_name_are_tried_and_the_one_that_answers_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with service(lambda connection: connection.sendall(b"SSH-2.0-x\r\n")) as port:
        of_name(monkeypatch, Answer("node08", ("127.0.0.2", "127.0.0.1")))
        found = at(port, "node08")
    assert [one.outcome for one in found.tried] == ["refused", "answered"]
    assert (found.outcome, found.address) == ("answered", f"node08:{port}")


def test_which_machine_a_host_is() -> None:
    assert probe.elsewhere("127.0.0.1", TIMEOUT) is None
    assert probe.elsewhere("203.0.113.9", TIMEOUT) == (
        "address-unavailable",
        "203.0.113.9 is not this machine: 203.0.113.9 is none of its addresses",
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        holder = probe.listener("localhost", listener.getsockname()[1])
        assert holder is not None
        assert holder.pid == os.getpid()
    assert probe.listener("203.0.113.9", 1) is None


def test_a_loop_that_must_not_wait() -> None:
    with service(lambda connection: connection.sendall(b"x")) as port:
        looking = probe.Looking("127.0.0.1", port, GREETING, TIMEOUT)
        for thread in threading.enumerate():
            if thread.name == "rallypoint: look at 127.0.0.1":
                thread.join(SLACK)
    assert looking.result is not None
    assert looking.result.outcome == "answered"
