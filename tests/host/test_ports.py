"""Ports that are held, and who holds the others."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host import ports
from rallypoint.host.port_holder import PortHolder
from rallypoint.host.ports import ephemeral_range, hold_port, holders

SOON = 20.0

SERVER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A child that listens; its command line says `train.py`."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, "train.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with hold_port() as held:
        return held.port


def test_what_is_held_listens_and_nobody_else_can_have_it() -> None:
    with hold_port() as held:
        assert re.fullmatch(
            rf"<HeldPort 127\.0\.0\.1:{held.port}: listening, fd {held.fileno()}>", repr(held)
        )
        assert not os.get_inheritable(held.fileno())
        socket.create_connection(("127.0.0.1", held.port), timeout=SOON).close()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, option, 1)
                with pytest.raises(OSError, match="in use"):
                    thief.bind(("127.0.0.1", held.port))
    assert repr(held) == f"<HeldPort 127.0.0.1:{held.port}: released>"
    held.release()
    with pytest.raises(ValueError, match="released"):
        held.fileno()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=SOON)


def test_a_descriptor_that_was_handed_over_outlives_us() -> None:
    held = hold_port()
    fd = held.detach()
    held.release()
    assert "handed over" in repr(held)
    with pytest.raises(ValueError, match="handed over"):
        held.detach()
    with (
        socket.socket(fileno=fd) as listener,
        socket.create_connection(("127.0.0.1", held.port), timeout=SOON),
    ):
        listener.accept()[0].close()


def test_every_rank_of_a_big_job_fits_into_the_queue() -> None:
    with hold_port() as held:
        clients = [
            socket.create_connection(("127.0.0.1", held.port), timeout=SOON) for _ in range(300)
        ]
        for client in clients:
            client.close()


def test_the_holder_of_a_taken_port_is_named_quickly(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    with pytest.raises(EnvironmentProblem) as caught:
        hold_port(port)
    assert caught.value.code == "port-in-use"
    user = holders(port)[0].user
    line = str(caught.value).partition(" is taken: ")[2]
    assert re.fullmatch(
        rf"python[\d.]* -c import .*\(pid {process.pid}, user {user}, started [\d.]+ m?s ago\) is listening on 127\.0\.0\.1:{port}",
        line,
    )
    assert str(caught.value).startswith(f"port {port} on 127.0.0.1 is taken: ")
    assert caught.value.why == (), "one holder is named in the headline alone"
    assert caught.value.help
    took = []
    for _ in range(5):
        begun = time.thread_time()  # a busy machine is not our fault
        holders(port)
        took.append(time.thread_time() - begun)
    assert min(took) < 0.1


def test_a_listener_on_all_addresses_is_found_on_ipv6_too() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    with hold_port(host="::") as held:
        assert held.address == f"[::]:{held.port}"
        (holder,) = holders(held.port)
        assert (holder.pid, holder.state, holder.host) == (os.getpid(), "listening", "::")
        assert f"[::]:{held.port}" in holder.line()
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(held.port)
        assert caught.value.code == "port-in-use"
    with hold_port(host="::1") as held:
        socket.create_connection(("::1", held.port), timeout=SOON).close()


def test_connections_in_time_wait_do_not_count_and_are_told_apart() -> None:
    held = hold_port()
    client = socket.create_connection(("127.0.0.1", held.port), timeout=SOON)
    with socket.socket(fileno=held.detach()) as listener:
        accepted, _ = listener.accept()
        accepted.close()  # who closes first keeps the TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    left = holders(held.port)
    assert "time-wait" in {holder.state for holder in left}
    assert any(re.search(r"still in TIME_WAIT", holder.line()) for holder in left)
    hold_port(held.port).release()


def test_a_connection_that_uses_the_number_is_named() -> None:
    port = free_port()
    with hold_port() as held, socket.socket() as client:
        client.bind(("127.0.0.1", port))
        client.connect(("127.0.0.1", held.port))
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(port)
        assert f"(pid {os.getpid()}, " in str(caught.value)
        assert f"is connected from 127.0.0.1:{port} to 127.0.0.1:{held.port}" in str(caught.value)


def test_a_job_of_ours_is_named_and_its_connections_are_not() -> None:
    serve = (
        "from rallypoint.launcher.spawn import TEMPLATE; import socket, sys; one = socket.create_server(('127.0.0.1', 0)); "
        "two = socket.create_connection(one.getsockname()); three, _ = one.accept(); print(one.getsockname()[1]); sys.stdin.read()"
    )
    environ = {**os.environ, "RALLYPOINT_JOB": "job7"}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", serve],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(port)
        process.stdin.close()
    assert (
        f"port {port} on 127.0.0.1 is taken: the rallypoint job job7 (pid {process.pid}, "
        in str(caught.value)
    )
    assert caught.value.why == ()


def test_a_socket_that_is_bound_and_does_not_listen_is_said_to_be_unseen() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(bound.getsockname()[1])
        assert caught.value.code == "port-in-use"
        assert "without listening" in caught.value.why[0]


def test_what_another_address_has_is_not_blamed() -> None:
    with hold_port(host="127.0.0.2") as other, hold_port(other.port) as held:
        assert {held.host, other.host} == {holder.host for holder in holders(held.port)}
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(held.port)
        assert f"is listening on 127.0.0.1:{held.port}" in str(caught.value)
        assert caught.value.why == ()


def test_who_may_end_a_holder_is_told_how(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    with pytest.raises(EnvironmentProblem) as caught:
        hold_port(port)
    assert [command for _, command in caught.value.help] == ["", f"kill {process.pid}"]
    with hold_port() as held, pytest.raises(EnvironmentProblem) as mine:
        hold_port(held.port)
    assert [command for _, command in mine.value.help] == [""], "nobody is told to end himself"


@pytest.mark.root
def test_a_port_of_another_network_namespace_is_no_hindrance() -> None:
    with hold_port() as held:
        script = (
            "from rallypoint.host.ports import hold_port, holders\n"
            f"assert holders({held.port}) == []\n"
            f"with hold_port({held.port}, '0.0.0.0') as ours: print(ours.port, len(holders(ours.port)))"
        )
        said = subprocess.run(
            ["unshare", "-n", sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=SOON,
        )
        assert said.stdout.split() == [str(held.port), "1"]


def test_a_connection_that_no_process_has_is_in_no_other_container() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        (waiting,) = [
            holder
            for holder in ports.holders(listener.getsockname()[1])
            if holder.state == "ownerless"
        ]  # not accepted
        there, here = (f"127.0.0.1:{one.getsockname()[1]}" for one in (listener, client))
    assert (
        waiting.line()
        == f"no process has the connection from {there} to {here}: it was closed, or is not accepted yet"
    )


def test_lines_for_holders_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = PortHolder(29500, "127.0.0.1", "listening", 0, 5112, "python train.py", 1000.0)
    assert seen.line(now=1000 + 3 * 3600).endswith(
        f"python train.py (pid 5112, user {seen.user}, started 3 h ago) is listening on 127.0.0.1:29500"
    )
    assert "started 5 days ago" in seen.line(now=1000 + 5 * 86400)
    assert "started 40 s ago" in seen.line(now=1040)
    assert "started 20 min ago" in seen.line(now=2200)
    hidden = PortHolder(29500, "0.0.0.0", "listening", 54321)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (
        hidden.line()
        == "a process of user 54321 (only that user and root see which) is listening on 0.0.0.0:29500"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert (
        hidden.line()
        == "a process of user 54321 (in another container) is listening on 0.0.0.0:29500"
    )


def test_another_users_port_without_root(server: tuple[subprocess.Popen[str], int]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    _, port = server
    said = as_nobody(f"hold_port({port})")
    assert re.fullmatch(
        rf"port-in-use: port {port} on 127\.0\.0\.1 is taken: a process of user root "
        rf"\(only that user and root see which\) is listening on 127\.0\.0\.1:{port}",
        said,
    )


def test_a_port_below_1024_without_the_privilege() -> None:
    if os.geteuid() != 0:
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(81)
        assert caught.value.code == "port-forbidden"
    else:
        assert as_nobody("hold_port(81)").startswith(
            "port-forbidden: port 81 may not be bound by user nobody"
        )


@pytest.mark.root
def test_a_range_that_begins_below_1024() -> None:
    """Its ports are tried in random order: one that may not be bound was the end of it, every other
    time.
    """
    assert (
        as_nobody("print(all(hold_port(port_range=(512, 1535)).port >= 1024 for _ in range(20)))")
        == "True"
    )
    assert (
        as_nobody("hold_port(port_range=(81, 90))")
        == "port-forbidden: none of the ports 81-90 may be bound by user nobody"
    )


# landlock(7): the process gives up its right to bind TCP ports, as a sandbox does to it; root may
# not either.
LANDLOCK = """
import ctypes, os, struct, sys
from rallypoint.errors import EnvironmentProblem
from rallypoint.host.ports import hold_port
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(444, None, ctypes.c_size_t(0), 1) < 4:
    sys.exit("no landlock for ports")
attributes = ctypes.create_string_buffer(struct.pack("=QQ", 0, 1), 16)  # handled_access_net: bind TCP
ruleset = libc.syscall(444, attributes, ctypes.c_size_t(16), 0)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(446, ruleset, 0) == 0
for call in (dict(port=29511), dict(port=81), dict(port_range=(29600, 29603))):
    try:
        hold_port(**call)
    except EnvironmentProblem as problem:
        print(problem.code, problem.headline, problem.why[0], sep=": ")
"""


def test_a_rule_that_forbids_ports_is_not_taken_for_a_privilege() -> None:
    done = subprocess.run([sys.executable, "-c", LANDLOCK], capture_output=True, text=True)
    if "no landlock for ports" in done.stderr:
        pytest.skip("this kernel has no Landlock for ports (Linux 6.7)")
    assert done.returncode == 0, done.stderr
    high, low, range_ = done.stdout.splitlines()
    assert re.match(
        r"port-unavailable: port 29511 may not be bound by user \S+: a rule of this machine's forbids it: ",
        high,
    )
    assert re.match(
        r"port-unavailable: none of the ports 29600-29603 may be bound by user \S+: a rule of this machine's forbids it: ",
        range_,
    )
    expected = "port-unavailable: port 81 " if os.geteuid() == 0 else "port-forbidden: port 81 "
    assert low.startswith(expected), low


def as_nobody(call: str) -> str:
    """Run a call as user nobody; `code: headline` of what it raised."""
    script = f"""
import os, sys
from rallypoint.errors import EnvironmentProblem
from rallypoint.host.ports import hold_port, holders
import psutil, pwd
holders(1)  # loads what the interpreter may be unable to read as nobody
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    {call}
except EnvironmentProblem as problem:
    print(problem.code + ": " + problem.headline)
"""
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        hold_port(host="192.0.2.1")  # RFC 5737: nobody's
    assert caught.value.code == "address-unavailable"
    assert str(caught.value) == "192.0.2.1 is not an address of this machine"


def test_a_name_without_an_address() -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        hold_port(host="no-such-host.invalid")
    assert caught.value.code == "address-unresolved"
    assert str(caught.value).startswith("the host name no-such-host.invalid has no address: ")
    assert caught.value.help[0][1] == "getent hosts no-such-host.invalid"


def test_names_are_looked_up() -> None:
    with hold_port(host="localhost") as held:
        assert held.host in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("port", "port_range"),
    [
        (65536, None),
        (-1, None),
        (0, (20100, 20000)),
        (0, (0, 10)),
        (0, (1, 70000)),
        (29500, (20000, 20100)),
    ],
)
def test_numbers_that_are_no_ports(port: int, port_range: tuple[int, int] | None) -> None:
    with pytest.raises(UsageError) as caught:
        hold_port(port, port_range=port_range)
    assert caught.value.code == "port-invalid"


def test_a_range_is_honoured_until_it_is_exhausted() -> None:
    first = a_range_of(5)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(hold_port(port_range=(first, first + 3))) for _ in range(4)]
        client = stack.enter_context(socket.socket())
        client.bind(("127.0.0.1", first + 4))  # a connection takes a port as well as a server does
        client.connect(("127.0.0.1", held[0].port))
        assert sorted(each.port for each in held) == list(range(first, first + 4))
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port(port_range=(first, first + 4))
        assert caught.value.code == "ports-exhausted"
        assert str(caught.value) == f"none of the 5 ports {first}-{first + 4} is free on 127.0.0.1"
        assert caught.value.why[0].endswith("holds 5")
        assert f"(pid {os.getpid()}, " in caught.value.why[0]
        assert caught.value.help == (
            ("allow more ports (in Python port_range=)", f"--port-range {first}-{first + 49}"),
        )
        held[3].release()
        with hold_port(port_range=(first, first + 4)) as again:
            assert again.port == held[3].port


def test_an_exhausted_range_that_outgoing_connections_use_too() -> None:
    low, high = ephemeral_range()
    with hold_port() as held, pytest.raises(EnvironmentProblem) as caught:
        hold_port(port_range=(held.port, held.port))
    assert (
        str(caught.value)
        == f"port {held.port}, the only one of the range, is not free on 127.0.0.1"
    )
    assert (
        caught.value.why[-1]
        == f"every outgoing connection of this machine takes a port of {low}-{high}, too"
    )
    assert (
        ports._exhausted("127.0.0.1", 65535, 65535, True).help[0][1] == "--port-range 65526-65535"
    ), "there are none above"


def a_range_of(count: int) -> int:
    """The first of some neighbouring ports outside the kernel's own range that are all free; other
    tests look for some, too.
    """
    for first in random.sample(range(20000, 30000, count), 10000 // count):
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(hold_port(port))
            except EnvironmentProblem:
                continue
        return first
    raise AssertionError("no free range")


def test_no_descriptors_left_is_said() -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(EnvironmentProblem) as caught:
            hold_port()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.code == "port-unavailable"
    assert os.strerror(errno.EMFILE) in str(caught.value)


SQUATTER = """
import random, signal, socket, sys
first, count = int(sys.argv[1]), int(sys.argv[2])
signal.alarm(60)
order, taken = random.Random(7), {}
print("ready", flush=True)
while True:
    port = order.randrange(first, first + count)
    if port in taken and order.random() < 0.5:
        taken.pop(port).close()
        continue
    thief = socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        thief.bind(("127.0.0.1", port))
        if order.random() < 0.5:
            thief.listen()
        taken[port] = thief
    except OSError:
        thief.close()
"""


def test_beside_a_squatter_every_port_is_ours_alone(request: pytest.FixtureRequest) -> None:
    """2,000 jobs, 8 at a time, in 300 ports that a thief grabs and frees: none fails, none
    shares. A busy machine may not come to all of them.
    """
    first = a_range_of(300)
    thief = subprocess.Popen(
        [sys.executable, "-c", SQUATTER, str(first), "300"], stdout=subprocess.PIPE, text=True
    )
    request.addfinalizer(thief.communicate)
    request.addfinalizer(thief.kill)  # the last one is called first
    assert thief.stdout is not None
    assert thief.stdout.readline() == "ready\n"
    failures: list[BaseException] = []
    holding: set[int] = set()
    lock = threading.Lock()
    end = time.monotonic() + SOON

    def jobs(any_port: bool) -> None:
        for _ in range(250):
            if time.monotonic() > end:
                return
            try:
                held = hold_port(port_range=None if any_port else (first, first + 299))
                with lock:
                    assert held.port not in holding
                    holding.add(held.port)
                socket.create_connection(("127.0.0.1", held.port), timeout=SOON).close()
                with lock:
                    holding.discard(held.port)
                held.release()
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=jobs, args=(number % 2 == 0,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.root
def test_where_nobody_could_connect_nothing_is_held() -> None:
    """Listening works without the loopback interface, and torch then tries to connect for a minute,
    with a thousand lines.
    """
    program = (
        "import rallypoint\n"
        "for host in ('127.0.0.1', 'localhost', '127.1.2.3'):\n"
        "    try: rallypoint.hold_port(host=host)\n"
        "    except rallypoint.EnvironmentProblem as problem: print(problem.code, problem.headline.partition(':')[0])\n"
        "try: rallypoint.launch(int)\n"
        "except rallypoint.EnvironmentProblem as problem: print(problem.code, problem.headline.partition(':')[0])\n"
    )
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [
        f"loopback-down nobody can connect to {ip}"
        for ip in ("127.0.0.1", "127.0.0.1", "127.1.2.3", "127.0.0.1")
    ]
    assert done.stdout.splitlines() == lines, done.stderr
