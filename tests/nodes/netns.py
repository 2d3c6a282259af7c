"""Nodes of one machine: network namespaces, each with a link into one switch, that fail as asked.

Every namespace belongs to a process (its holder), and none has a name: clusters of several test
processes do not meet, and what a killed test process made goes with it. The switch is a bridge in
a namespace of its own; the host's network is not touched. Root, iproute2 and nftables are needed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..warm_python import WarmPopen

LOOK = 0.005
"""Seconds between two looks at a file or at /proc: no figure here is finer."""

ENDING = 10.0
"""Seconds that the last processes of a job may take to end after it: a busy machine, not a wait."""

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Directories of `ip` and `nft`, also where PATH is that of an ordinary user."""

_SPACES = ("net", "uts")
"""Namespaces by which a process is known to be of a node: one that leaves the first keeps the other."""

_LIBC = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on

_HOLD = """
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id
if [ -e /etc/machine-id ]; then mount --bind "$2/machine-id" /etc/machine-id; fi
mount -t tmpfs tmpfs /dev/shm
echo ready
exec cat
"""
"""Shell of a node's holder: it ends when its standard input does, that is with the test process."""


class NodesUnavailable(Exception):
    """This machine cannot make network namespaces, with the reason."""


def why_not() -> str:
    """Return why no node can be made here; "" when one can."""
    if os.geteuid() != 0:
        return "nodes need root"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux")):
        if shutil.which(tool, path=PATH) is None:
            return f"nodes need {package}: {tool} was not found"
    probe = "table bridge t {\n chain f {\n type filter hook forward priority 0\n }\n}\n"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", _tool("nft"), "-f", "-"],
        input=probe,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"nodes cannot be made: {done.stderr.strip()}"


def required() -> bool:
    """Return whether tests must fail, rather than be skipped, where no node can be made: in CI."""
    return os.environ.get("CI") == "true" or os.environ.get("RALLYPOINT_NODES") == "required"


def _tool(name: str) -> str:
    return shutil.which(name, path=PATH) or name


def _ordered(command: Sequence[str], text: str = "") -> str:
    """Run a tool; an exit status other than 0 is an error with what it said."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NodesUnavailable(f"{' '.join(command)}: {done.stderr.strip()}\n{text}")
    return done.stdout


def wait_until(condition: Callable[[], bool], timeout: float, look: float = LOOK) -> bool:
    """Return whether a condition came true within `timeout` seconds. A look that starts a process
    is not for each `LOOK`.
    """
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(look)
    return True


class Process:
    """A command in a node, in a session of its own, its output in a file."""

    def __init__(
        self,
        node: Node,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        warm: bool = False,
        mounts: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.argv = list(argv)
        self.path = node.folder / f"{len(node.started)}.out"
        self.began = time.monotonic()
        with self.path.open("wb") as file:
            how: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": file,
                "stderr": subprocess.STDOUT,
                "env": dict(env),
                "start_new_session": True,
            }
            self._popen: subprocess.Popen[bytes] = (
                WarmPopen(
                    argv, node=node.pid, quota=str(node.quota or ""), mounts=mounts, cwd=cwd, **how
                )
                if warm
                else subprocess.Popen(node.inside(argv, cwd), **how)
            )
        self.pid = self._popen.pid

    def __repr__(self) -> str:
        state = self._popen.poll()
        return f"<{self.node.name}: {' '.join(self.argv[:4])}, pid {self.pid}, status {state}>"

    def output(self) -> str:
        """Return all that it has printed so far, both streams."""
        return self.path.read_text("utf-8", "replace")

    def wait(self, timeout: float = 30.0) -> int:
        """Return its exit status (negative: its signal); `TimeoutError` with its output."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self!r} has not ended after {timeout:g} s; it printed:\n{self.output()}"
            ) from None

    def wait_for(self, pattern: str, timeout: float = 30.0) -> re.Match[str]:
        """Return the first match in its output (`^` and `$` at lines); `TimeoutError` without."""
        until = time.monotonic() + timeout
        while True:
            ended = self._popen.poll() is not None
            found = re.search(pattern, self.output(), re.MULTILINE)
            if found is not None:
                return found
            if ended or time.monotonic() > until:
                raise TimeoutError(f"{self!r} did not print {pattern!r} but:\n{self.output()}")
            time.sleep(LOOK)

    def running(self) -> bool:
        """Return whether it has not ended yet."""
        return self._popen.poll() is None

    def send(self, number: int) -> None:
        """Send a signal to this process alone."""
        self._popen.send_signal(number)

    def kill(self) -> int:
        """Send SIGKILL, and return the exit status."""
        self._popen.kill()
        return self.wait()

    def close(self) -> None:
        """Take its exit status, once nothing of the node lives any more."""
        self._popen.wait()


class Node:
    """A machine of the cluster: `eth0` with an address, a host name, /etc and a home of its own."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = f"{cluster.prefix}{number}"
        self.port = f"p{number}"  # its link's end in the switch
        self.address = f"fd77::{number + 1:x}" if cluster.ipv6 else f"10.77.0.{number + 1}"
        self.folder = cluster.folder / self.name
        self.home = cluster.folder / "home" if cluster.shared_home else self.folder / "home"
        self.started: list[Process] = []
        self.spaces: set[int] = set()
        self.quota: Path | None = None
        self.folder.mkdir(parents=True)
        self._write_etc()
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--propagation", "private",
             "sh", "-ec", _HOLD, "sh", self.name, str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._holder.pid

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}, {len(self.processes())} processes>"

    # --- made and given back, by the cluster

    def wait_until_made(self) -> None:
        """Wait for the holder to be in its namespaces."""
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise NodesUnavailable(self._holder.stderr.read().decode())
        self.spaces = _spaces_of(self.pid)

    def join_network(self) -> None:
        """Give the interfaces their addresses."""
        length = 64 if self.cluster.ipv6 else 24
        nodad = " nodad" if self.cluster.ipv6 else ""
        self.ip(
            "link set lo up",
            "link set eth0 addrgenmode none",
            f"addr add {self.address}/{length} dev eth0{nodad}",
            "link set eth0 up",
        )

    def _write_etc(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.set_hosts(self.cluster.hosts())
        self.set_resolver("")
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (self.folder / "machine-id").write_text(f"{uuid.uuid4().hex}\n")

    def reset(self) -> None:
        """Put back what a test may have changed, once nothing of the node lives any more."""
        for one in self.started:
            one.close()
            one.path.unlink(missing_ok=True)
        self.started.clear()
        shutil.rmtree(self.home, ignore_errors=True)
        self._write_etc()
        if self.quota is not None:
            self.quota.rmdir()
            self.quota = None

    def close(self) -> None:
        """End the holder; the namespaces go with it."""
        self._holder.communicate()

    # --- what runs in it

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the variables of a process in this node: the caller's, and the node's own home."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XDG_", "PYTEST_", "RALLYPOINT_", "TORCHELASTIC_", "PET_"))
        }
        return {**kept, "HOME": str(self.home), "OMP_NUM_THREADS": "1", **extra}

    def inside(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """Return the command that becomes `argv` in this node: it replaces itself, no process is
        between.
        """
        spaces = ["--target", str(self.pid), "--net", "--uts", "--mount"]
        quota = ["sh", "-c", f'echo $$ > {self.quota}/cgroup.procs && exec "$@"', "sh"]
        return [
            _tool("nsenter"), *spaces, _tool("env"), "-C", str(cwd or self.home),
            *(quota if self.quota else ()), *argv,
        ]  # fmt: skip

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        warm: bool = False,
        mounts: Sequence[str] = (),
    ) -> Process:
        """Start a command; `env` is added to the node's environment, `cwd` is its home. `warm`: one
        of Python is a fork, after `mounts` has changed what is mounted where it is.
        """
        variables = self.environment(**(env or {}))
        one = Process(self, argv, variables, cwd or self.home, warm, mounts)
        self.started.append(one)
        return one

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 30.0,
    ) -> tuple[int, str]:
        """Return the exit status of a command and what it printed."""
        one = self.start(argv, env=env, cwd=cwd)
        return one.wait(timeout), one.output()

    def ip(self, *commands: str) -> None:
        """Do what `ip` does with each line, in this node's network."""
        _ordered(
            [_tool("nsenter"), "--target", str(self.pid), "--net", _tool("ip"), "-batch", "-"],
            "".join(f"{command}\n" for command in commands),
        )

    def processes(self) -> list[int]:
        """Return the living processes of this node, whoever started them. Zombies are not alive."""
        return self.cluster.processes([self])[self]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread, and the threads that it starts, be in the node's network and have its
        host name. Their sockets stay there when the block has ended.
        """
        outside = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in _SPACES]
        try:
            for kind in _SPACES:
                fd = os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY)
                _enter(fd)
                os.close(fd)
            yield
        finally:
            for fd in outside:
                _enter(fd)
                os.close(fd)

    # --- faults; reset() of the cluster takes them back

    def unplug(self) -> None:
        """Take the link down at the switch: the node's own interface has no carrier."""
        self.cluster.switch_ip(f"link set {self.port} down")
        self.cluster.unplugged.add(self)

    def plug(self) -> None:
        """Take the link up again."""
        self.cluster.switch_ip(f"link set {self.port} up")
        self.cluster.unplugged.discard(self)

    def drop(
        self,
        *,
        sent: bool = True,
        received: bool = True,
        peer: Node | None = None,
        percent: int = 100,
    ) -> None:
        """Lose in the switch what this node sends, what it would receive, or a share of both.

        With `peer` only what goes to or comes from that one. Later calls add to earlier ones.
        """
        share = "" if percent == 100 else f"numgen random mod 100 < {percent} "
        here, there = f'"{self.port}"', f'"{peer.port}"' if peer else ""
        if sent:
            to = f"oifname {there} " if peer else ""
            self.cluster.drops.append(f"iifname {here} {to}{share}drop")
        if received:
            by = f"iifname {there} " if peer else ""
            self.cluster.drops.append(f"{by}oifname {here} {share}drop")
        self.cluster.filter()

    def limit_rate(self, rate: str) -> None:
        """Let the link carry no more than `rate` (as tc writes it: "10mbit") each way."""
        self._shape("replace", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        self.cluster.shaped.add(self)

    def unlimit_rate(self) -> None:
        """Let the link carry what the machine can."""
        self._shape("del")
        self.cluster.shaped.discard(self)

    def _shape(self, do: str, *how: str) -> None:
        enter = [_tool("nsenter"), "--target", str(self.pid), "--net"]
        for inside, device in ((self.cluster.enter_switch, self.port), (enter, "eth0")):
            _ordered([*inside, _tool("tc"), "qdisc", do, "dev", device, "root", *how])

    def add_dead_interface(self, address: str, name: str = "eth1") -> None:
        """Add an interface that is up and has an address, and on which nobody answers."""
        port = f"d{self.number}"
        self.cluster.switch_ip(
            f"link add {port} type veth peer name {name} netns {self.pid}", f"link set {port} up"
        )
        self.ip(f"addr add {address} dev {name}", f"link set {name} up")
        self.cluster.dead.append(port)

    def set_hosts(self, text: str) -> None:
        """Replace /etc/hosts."""
        (self.folder / "hosts").write_text(text)  # in place: it is mounted by its inode

    def set_resolver(self, text: str) -> None:
        """Replace /etc/resolv.conf."""
        (self.folder / "resolv.conf").write_text(text)

    def forget_names(self) -> None:
        """Let no name but localhost be found, and no name server be there."""
        self.set_hosts(LOCALHOST)
        self.set_resolver("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def call_itself_loopback(self) -> None:
        """Map the node's own name to 127.0.1.1, as Debian's installer does."""
        others = [line for line in self.cluster.hosts().splitlines() if self.name not in line]
        self.set_hosts("\n".join([*others, f"127.0.1.1 {self.name}", ""]))

    def limit_cpu(self, share: float) -> None:
        """Let all its processes together have `share` of one processor.

        `NodesUnavailable` where there is no cgroup of version 1 to do it with.
        """
        place = Path("/sys/fs/cgroup/cpu") / f"rallypoint-{self.pid}"
        try:
            place.mkdir()
            (place / "cpu.cfs_quota_us").write_text(str(int(100_000 * share)))
        except OSError as error:
            raise NodesUnavailable(f"no quota of processors: {error}") from None
        self.quota = place
        for pid in self.processes():
            (place / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        """Stop every process, again until none came to be meanwhile. One that runs on another
        processor stands a moment after its SIGSTOP.
        """
        until = time.monotonic() + ENDING
        self.signal(signal.SIGSTOP, self.processes())  # one that waits for the disk, too
        while running := [pid for pid in self.processes() if _state(pid) in ("R", "S")]:
            assert time.monotonic() < until, f"not stopped after {ENDING} s: {running}"
            self.signal(signal.SIGSTOP, running)
            time.sleep(LOOK)

    def thaw(self) -> None:
        """Send SIGCONT to every process."""
        self.signal(signal.SIGCONT, self.processes())

    def kill(self) -> None:
        """End every process at once, as a power cut does: none sees another end before."""
        self.freeze()
        while living := self.processes():
            self.signal(signal.SIGKILL, living)
            time.sleep(LOOK)

    @staticmethod
    def signal(number: int, pids: Iterable[int]) -> None:
        """Send a signal to processes; one that has ended is none."""
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


LOCALHOST = "127.0.0.1 localhost\n::1 localhost\n"


class Cluster:
    """Two to eight nodes and the switch between them. Use it in `with`."""

    def __init__(
        self,
        count: int,
        folder: Path,
        *,
        ipv6: bool = False,
        shared_home: bool = False,
        prefix: str = "node",
    ) -> None:
        self.folder = folder
        self.ipv6 = ipv6
        self.shared_home = shared_home
        self.prefix = prefix
        self.count = count
        self.drops: list[str] = []  # rules of the switch
        self.dead: list[str] = []  # ports of interfaces on which nobody answers
        self.unplugged: set[Node] = set()
        self.shaped: set[Node] = set()
        self.nodes: list[Node] = []
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.enter_switch = [_tool("nsenter"), "--target", str(self._switch.pid), "--net"]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Cluster of {self.nodes}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def _make(self) -> None:
        for number in range(self.count):
            self.nodes.append(Node(self, number))
        assert self._switch.stdout is not None
        self._switch.stdout.readline()
        for node in self.nodes:
            node.wait_until_made()
        self.switch_ip(
            "link set lo up",
            "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            "link set br0 addrgenmode none",
            "link set br0 up",
            *(
                command
                for node in self.nodes
                for command in (
                    f"link add {node.port} type veth peer name eth0 netns {node.pid}",
                    f"link set {node.port} addrgenmode none master br0 up",
                )
            ),
        )
        for node in self.nodes:
            node.join_network()

    def hosts(self) -> str:
        """Return /etc/hosts with the name of every node."""
        base = "fd77::{:x}" if self.ipv6 else "10.77.0.{}"
        lines = [f"{base.format(k + 1)} {self.prefix}{k}\n" for k in range(self.count)]
        return LOCALHOST + "".join(lines)

    def switch_ip(self, *commands: str) -> None:
        """Do what `ip` does with each line, in the network of the switch."""
        _ordered(
            [*self.enter_switch, _tool("ip"), "-batch", "-"],
            "".join(f"{command}\n" for command in commands),
        )

    def filter(self) -> None:
        """Let the switch drop what `drops` says, and nothing else."""
        rules = "".join(f"  {rule}\n" for rule in self.drops)
        chain = f" chain faults {{\n  type filter hook forward priority 0\n{rules} }}\n"
        table = f"table bridge rallypoint {{\n{chain}}}\n"
        _ordered(
            [*self.enter_switch, _tool("nft"), "-f", "-"],
            f"table bridge rallypoint\ndelete table bridge rallypoint\n{table}",
        )

    def heal(self) -> None:
        """Take back what the links and the switch do wrong."""
        broken = bool(self.drops or self.unplugged)
        if self.drops:
            self.drops.clear()
            self.filter()
        for node in [*self.unplugged]:
            node.plug()
        for node in self.nodes if broken else ():
            node.ip("neigh flush dev eth0")  # who was not found is looked for once a second
        for node in [*self.shaped]:
            node.unlimit_rate()
        for port in self.dead:
            self.switch_ip(f"link del {port}")
        self.dead.clear()

    def processes(self, nodes: Sequence[Node] | None = None) -> dict[Node, list[int]]:
        """Return the living processes of each node."""
        found: dict[Node, set[int]] = {
            # one that was just started may still be outside of its node
            node: {one.pid for one in node.started if one.running()}
            for node in (self.nodes if nodes is None else nodes)
        }
        of_space = {space: node for node in found for space in node.spaces}
        for name in os.listdir("/proc"):
            try:
                spaces = _spaces_of(int(name)) if name.isdigit() else set()
            except OSError:  # it has ended
                continue
            for node in {of_space[space] for space in spaces & of_space.keys()}:
                found[node].add(int(name))
        return {node: sorted(pids - {node.pid, os.getpid()}) for node, pids in found.items()}

    def living(self) -> list[str]:
        """Return the processes of all nodes, each described in a line."""
        return [
            f"{node.name}: pid {pid}: {command_line(pid)}"
            for node, pids in self.processes().items()
            for pid in pids
        ]

    def reset(self, patience: float = ENDING) -> list[str]:
        """Mend every fault, and end what lives `patience` seconds later; return what that was."""
        for node, pids in self.processes().items():
            node.signal(signal.SIGCONT, pids)
        self.heal()
        left: list[str] = []
        if not wait_until(lambda: not any(self.processes().values()), patience):
            left = self.living()
            for node in self.nodes:
                node.kill()
        for node in self.nodes:
            node.reset()
        return left

    def close(self) -> None:
        """End everything; the namespaces and links go with their holders."""
        for node in self.nodes:
            node.kill()
        for node in self.nodes:
            node.reset()
            node.close()
        self._switch.communicate()


def _state(pid: int) -> str:
    """Return the state of a process as /proc has it, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _spaces_of(pid: int) -> set[int]:
    return {os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in _SPACES}


def _enter(fd: int) -> None:
    if _LIBC.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def command_line(pid: int) -> str:
    """Return the command of a process with spaces between; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
