"""Jobs on several nodes with --tls: what is seen on the wire, and that faults are seen as without it."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.store.certificate import client_context, new_identity

from .conftest import MakeCluster
from .jobs import PORT, STAY, TELL, Jobs, codes
from .netns import PATH, Node
from .test_failure import Running, all_say

KEY, VALUE = "the key of a checkpoint", "the token of its bucket"

SHARES = (
    TELL
    + f"""
import rallypoint
with rallypoint.connect(same_host=False) as store:  # the nodes share /tmp
    if os.environ["RANK"] == "1":
        store["{KEY}"] = "{VALUE}"
    store.wait("{KEY}")
    print(store.address, flush=True)
"""
)


@pytest.fixture
def two(make_cluster: MakeCluster, tmp_path: Path) -> Jobs:
    return Jobs(make_cluster(2), tmp_path)


@contextmanager
def captured(node: Node) -> Iterator[list[bytes]]:
    """Every frame that a node sends or gets."""
    frames: list[bytes] = []
    with node.entered():
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        sock.bind(("eth0", 0))
    ended = threading.Event()

    def read() -> None:
        while select.select([sock], [], [], 0.2)[0] or not ended.is_set():
            with contextlib.suppress(BlockingIOError):
                frames.append(sock.recv(65536, socket.MSG_DONTWAIT))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield frames
    finally:
        ended.set()
        reader.join()
        sock.close()


@pytest.mark.parametrize("tls", [True, False])
def test_what_a_job_shows_on_the_wire(two: Jobs, tls: bool) -> None:
    """Without --tls the same capture shows keys, values and hosts: the test can fail."""
    with captured(two.cluster[1]) as frames:
        each = two.start_all(SHARES, *(["--tls"] if tls else []))
        for one in each:
            assert one.wait() == 0, one.output()
    address = f"{'tls' if tls else 'tcp'}://{two.cluster[0].address}:"
    assert address in each[1].output()
    seen = b"\0".join(frames)
    shown = [word for word in (KEY, VALUE, str(two.folder), "MASTER") if word.encode() in seen]
    assert shown == ([] if tls else [KEY, VALUE]), shown
    assert (b"node1" in seen) is not tls  # of what it says when it applies for its place
    assert two.secret.read_bytes() not in seen
    assert (b"\x16\x03\x01" in seen) is tls


def test_a_killed_node_is_named_as_soon_as_without_tls(two: Jobs) -> None:
    running = Running(two, STAY, "--tls")
    at = time.monotonic()
    two.cluster[1].kill()
    all_say(running.others(1), "node-lost", r"node 1\b", at, 1.5)


def test_a_killed_lead_is_named_as_soon_as_without_tls(two: Jobs) -> None:
    running = Running(two, STAY, "--tls")
    at = time.monotonic()
    running.each[0].kill()
    all_say(running.others(0), "lead-lost", r"node 0\b", at, 1.5)


def test_a_node_that_is_cut_off_is_named_and_ends_by_itself(two: Jobs) -> None:
    running = Running(two, STAY, "--tls")
    at = time.monotonic()
    two.cluster[1].drop()
    all_say([running.each[0]], "node-lost", r"node 1\b", at, 3.0)
    all_say([running.each[1]], "node-isolated", "", at, 3.0)


@pytest.mark.parametrize("lead_has_it", [True, False])
def test_only_one_node_has_it(two: Jobs, lead_has_it: bool) -> None:
    options: tuple[list[str], list[str]] = (["--tls"], [])
    wait = ("--rdzv-conf", "join_timeout=8")
    lead = two.start(two.cluster[0], STAY, *options[not lead_has_it], *wait)
    other = two.start(two.cluster[1], STAY, *options[lead_has_it], *wait)
    assert other.wait() == 2
    assert codes(other) == ["tls-mismatch"]
    assert lead.wait() == 75
    assert codes(lead) == ["join-timeout"]
    address = two.cluster[1].address
    assert re.search(rf"refused: {re.escape(address)}: it .*speaks? TLS", lead.output())


def _intercept(near: socket.socket, node: Node, lead: str) -> None:
    """Open what a node encrypts, with another certificate, and pass it on encrypted anew."""
    with node.entered():
        far = socket.socket()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)
    with near, far, contextlib.suppress(OSError):
        far.connect((lead, PORT))
        with (
            new_identity().context.wrap_socket(near, server_side=True) as inside,
            client_context().wrap_socket(far) as outside,
        ):
            ends: dict[ssl.SSLSocket, ssl.SSLSocket] = {inside: outside, outside: inside}
            while True:
                held = [one for one in ends if one.pending()]
                for one in held or select.select(list(ends), [], [], 10)[0]:
                    data = one.recv(65536)
                    if not data:
                        return
                    ends[one].sendall(data)


def test_an_attacker_on_the_way_is_named(two: Jobs) -> None:
    """It answers at the lead's address, and the lead sees connections that arrive at its own."""
    lead, node = two.cluster[0], two.cluster[1]
    with node.entered():
        listener = socket.create_server(("0.0.0.0", 0))
        rule = (
            f"meta mark != 7 ip daddr {lead.address} tcp dport {PORT} "
            f"redirect to :{listener.getsockname()[1]}"
        )
        table = f"table ip nat {{ chain out {{ type nat hook output priority -100; {rule}\n}}\n}}\n"
        subprocess.run(["nft", "-f", "-"], input=table, text=True, check=True, env={"PATH": PATH})

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                _intercept(near, node, lead.address)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    first = two.start(lead, STAY, "--tls")
    other = two.start(node, STAY, "--tls")
    assert other.wait() == 1, other.output()
    assert codes(other) == ["tls-intercepted"]
    first.send(signal.SIGINT)
    assert first.wait() == 130
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    serving.join()
