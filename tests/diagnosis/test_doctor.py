"""The doctor's judgement of made-up machines; and that a check that hangs, crashes or raises is a
line and not the end.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rallypoint.diagnosis.catalogue import CATALOGUE
from rallypoint.diagnosis.doctor import (
    checks,
    doctor,
    gpu_check,
    network_checks,
    peer_findings,
    storage_checks,
    trial_job,
)
from rallypoint.diagnosis.doctor.checks import ProcessLimits
from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok
from rallypoint.diagnosis.doctor.peer_findings import PeerContact, Side
from rallypoint.diagnosis.evidence import MemoryCounters
from rallypoint.diagnosis.report import Help, Report
from rallypoint.errors import StoreTimeout, StoreUnreachable
from rallypoint.host.addresses import Host
from rallypoint.host.devices import Build, Device, Found, Look, Process
from rallypoint.host.firewall import Chain, Condition, Firewall, Rule, nft_chains
from rallypoint.host.interfaces import Interface, InterfaceAddress
from rallypoint.host.resolver import Answer
from rallypoint.host.visible_devices import Visible

MIB, GIB = 1 << 20, 1 << 30
DEADLINE = 60.0  # seconds for a process that runs a check or two


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def shown(finding: Finding) -> tuple[str, str, str]:
    return finding.mark, finding.code, finding.fact


# --- this machine
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((16, 16, 0.0, 3.2), ("ok", "", "16 processors, load 3.2")),
        ((1, 1), ("ok", "", "1 processor")),
        ((16, 4), ("ok", "", "16 processors, bound to 4 of them")),
        ((16, 16, 16.0), ("ok", "", "16 processors")),
        (
            (16, 16, 0.5),
            (
                "note",
                "container-limit",
                "the container may use the time of 0.5 processors, and nproc says 16",
            ),
        ),
        (
            (16, 2, 1.5),
            (
                "note",
                "container-limit",
                "the container may use the time of 1.5 processors, and nproc says 2",
            ),
        ),
    ],
)
def test_processors(counts: tuple[int, int], expected: tuple[str, str, str]) -> None:
    assert shown(checks.judge_processors(*counts)) == expected


def test_a_quota_below_one_processor_leaves_a_rank_one_thread() -> None:
    assert checks.judge_processors(16, 16, 0.5).help[0].command == "export OMP_NUM_THREADS=1"
    assert checks.judge_processors(16, 16, 6.5).help[0].command == "export OMP_NUM_THREADS=6"


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        (
            "0::/job/rank\n",
            {
                "sys/fs/cgroup/job/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/job/rank/cpu.max": "max 100000\n",
            },
            0.5,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 0.0),
        ("0::/../outside\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (
            "4:cpu,cpuacct:/docker/x\n0::/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (
            "4:cpu:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.0,
        ),
        ("", {}, 0.0),
    ],
)
def test_a_quota_is_found_in_this_group_and_those_above(
    group: str, files: dict[str, str], quota: float, tmp_path: Path
) -> None:
    put(tmp_path, {"proc/self/cgroup": group, **files})
    assert checks.processor_quota(str(tmp_path)) == quota


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory() -> None:
    machine = MemoryCounters(total=64 * GIB, available=60 * GIB)
    assert shown(only(checks.judge_memory(machine))) == ("ok", "", "60.0 GiB free of 64.0 GiB")
    limited = msgspec.structs.replace(machine, limit=2 * GIB, current=1 * GIB + 600 * MIB)
    found = only(checks.judge_memory(limited))
    assert shown(found) == (
        "note", "host-memory-low", "424.0 MiB of memory is free, of the 2.0 GiB that this container may use (the machine has 64.0 GiB)",
    )  # fmt: skip
    assert [help.command for help in found.help] == [
        "ps -eo pid,user,rss,args --sort=-rss | head",
        "docker run --memory=64g",
    ]
    killed = only(
        checks.judge_memory(
            msgspec.structs.replace(machine, oom_kills=2, path="/sys/fs/cgroup/memory.events")
        )
    )
    assert killed.code == "rank-out-of-memory"
    assert killed.fact.startswith("the kernel has killed 2 processes of this control group")
    assert only(checks.judge_memory(MemoryCounters())).mark == "unknown"


def test_a_limit_of_memory_does_not_count_what_the_kernel_can_drop(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/meminfo": "MemTotal:       67108864 kB\nMemAvailable:   62914560 kB\n",
            "sys/fs/cgroup/job/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{GIB + 900 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {900 * MIB}\n",
            "sys/fs/cgroup/job/memory.events": "oom 1\noom_kill 3\n",
            "sys/fs/cgroup/memory.max": "max\n",
        },
    )
    killed = only(checks.memory(str(tmp_path)))  # 1.0 GiB is free, which is enough
    assert killed.fact.startswith("the kernel has killed 3 processes")
    assert killed.why == (f"oom_kill in {tmp_path / 'sys/fs/cgroup/job/memory.events'}",)
    (tmp_path / "sys/fs/cgroup/job/memory.events").write_text("oom_kill 0\n")
    assert only(checks.memory(str(tmp_path))).fact.startswith(
        "1.0 GiB free of the 2.0 GiB that this container may use"
    )


@pytest.mark.parametrize(
    ("facts", "mark", "fact"),
    [
        (
            storage_checks.Shm("", 8 * GIB, 7 * GIB),
            "ok",
            "/dev/shm has 8.0 GiB, 7.0 GiB of it free",
        ),
        (
            storage_checks.Shm("", 64 * MIB, 64 * MIB),
            "note",
            "/dev/shm has 64.0 MiB, 64.0 MiB of it free",
        ),
        (
            storage_checks.Shm("", 4 * MIB, 4 * MIB),
            "fault",
            "/dev/shm has 4.0 MiB, 4.0 MiB of it free",
        ),
        (storage_checks.Shm("", 8 * GIB, MIB), "fault", "/dev/shm has 8.0 GiB, 1.0 MiB of it free"),
        (
            storage_checks.Shm("Read-only file system"),
            "fault",
            "/dev/shm cannot be used: Read-only file system",
        ),
    ],
)
def test_shared_memory(facts: storage_checks.Shm, mark: str, fact: str) -> None:
    found = storage_checks.judge_shm(facts)
    assert shown(found) == (mark, "" if mark == "ok" else "shm-small", fact)
    assert mark == "ok" or any("--shm-size" in help.command for help in found.help)


def test_what_dead_processes_have_left_in_shared_memory_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "torch_999999999_1").write_bytes(bytes(8192))
    (tmp_path / "torch_1_2").write_bytes(bytes(8192))  # pid 1 lives
    (tmp_path / "other_999999999_1").write_bytes(bytes(8192))
    facts = storage_checks.look_at_shm(str(tmp_path))
    assert (facts.left, facts.left_bytes) == (1, 8192)
    assert (
        storage_checks.look_at_shm(str(tmp_path / "missing")).problem == "No such file or directory"
    )
    found = storage_checks.judge_shm(facts._replace(total=64 * MIB, free=8 * MIB))
    assert "1 segments of torch's, 8.0 KiB" in found.why[0]
    assert found.help[0].command == "ls -l /dev/shm/torch_*"


@pytest.mark.parametrize(
    ("facts", "mark", "fact", "command"),
    [
        (ProcessLimits((64, 64)), "fault", "a process may have 64 files open", "docker run --ulimit nofile=65536"),
        (ProcessLimits((64, 524288)), "fault", "a process may have 64 files open", "ulimit -n 65536"),
        (ProcessLimits((256, 4096)), "note", "a process may have 256 files open", "ulimit -n 4096"),
        (ProcessLimits((1024, 4096)), "ok", "1024 open files, no limit on processes", ""),
        (ProcessLimits((checks.NO_LIMIT, checks.NO_LIMIT)), "ok", "no limit on open files, no limit on processes", ""),
        (
            ProcessLimits((1024, 4096), processes=4096, processes_used=4000),
            "note", "this user may have 4096 processes and threads, and has 4000", "ulimit -u unlimited",
        ),
        (
            ProcessLimits((1024, 4096), group_processes=100, group_used=80),
            "fault", "this control group may have 100 processes and threads, and has 80", "docker run --pids-limit=-1",
        ),
        (
            ProcessLimits((1024, 4096), locked=64 << 10, infiniband=True),
            "note", "a process may lock 64.0 KiB of memory, and there is InfiniBand here", "docker run --ulimit memlock=-1",
        ),
        (ProcessLimits((1024, 4096), locked=64 << 10), "ok", "1024 open files, no limit on processes, 64.0 KiB of locked memory", ""),
        (ProcessLimits((1024, 4096), address_space=GIB), "note", "a process may have 1.0 GiB of address space", "ulimit -v unlimited"),
    ],
)  # fmt: skip
def test_limits(facts: ProcessLimits, mark: str, fact: str, command: str) -> None:
    found = only(checks.judge_limits(facts))
    assert shown(found) == (mark, "" if mark == "ok" else "limit-low", fact)
    assert ([help.command for help in found.help] or [""])[0] == command


def test_the_limits_that_are_looked_at_are_this_process_s(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/pids.max": "100",
            "sys/fs/cgroup/a/pids.current": "7",
        },
    )
    facts = checks.look_at_limits(str(tmp_path))
    assert facts.files == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (facts.group_processes, facts.group_used, facts.infiniband) == (100, 7, False)


def test_the_clock() -> None:
    assert checks.judge_clocks(1e8, "2033-05-18").mark == "ok"
    assert shown(checks.judge_clocks(-1e9, "1970-01-01")) == (
        "fault",
        "clock-wrong",
        "the clock says 1970-01-01, which is before rallypoint was installed",
    )
    assert only(checks.clocks()).mark == "ok"  # of this machine


def test_the_loopback() -> None:
    assert (
        only(network_checks.loopback()).mark == "ok"
    )  # of this machine: the suite would not run without
    down = network_checks.judge_loopback(
        "nobody can listen on 127.0.0.1: Cannot assign requested address", up=False
    )
    assert shown(down) == (
        "fault", "loopback-down", "nobody can listen on 127.0.0.1: Cannot assign requested address; the interface lo is switched off",
    )  # fmt: skip
    assert down.help[0].command == "ip link set lo up"
    lost = network_checks.judge_loopback(
        "nobody can connect to 127.0.0.1: no answer within 1 s", up=True
    )
    assert lost.why == ("the interface lo is switched on",)


@pytest.mark.parametrize(
    ("counts", "mark", "code", "words"),
    [
        (
            (32768, 60999, 0, 12, 3),
            "ok",
            "",
            "the kernel gives out 32768-60999: 12 in use, 3 connections in TIME_WAIT",
        ),
        ((32768, 60999, 0, None), "unknown", "", "not known"),
        ((1024, 60999), "ok", "", "29500, torchrun's port, is one of them"),
        ((40000, 41000, 0, 10), "note", "ports-exhausted", "991 ports are free"),
        ((32768, 60999, 28000, 10), "note", "ports-exhausted", "222 ports are free"),
    ],
)
def test_ports(counts: tuple[int, int], mark: str, code: str, words: str) -> None:
    found = only(network_checks.judge_ports(network_checks.PortCounts(*counts)))
    assert (found.mark, found.code) == (mark, code)
    assert words in found.fact


def test_the_usual_port_is_taken() -> None:
    found = only(
        network_checks.judge_ports(
            network_checks.PortCounts(32768, 60999), ("python a.py (pid 7) is listening",)
        )
    )
    assert shown(found) == (
        "note",
        "port-in-use",
        "port 29500 is taken: python a.py (pid 7) is listening",
    )


def test_ports_are_counted_by_state_and_range(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue\n"
    put(
        tmp_path,
        {
            "proc/sys/net/ipv4/ip_local_port_range": "40000\t40010\n",
            "proc/sys/net/ipv4/ip_local_reserved_ports": "80,39999-40002,40010\n",
            # 40000 listening, 40001 connected twice, 40002 in TIME_WAIT, 22 listening
            "proc/self/net/tcp": head
            + "".join(
                f"   {i}: 0100007F:{port:04X} 0100007F:0016 {state} 0:0 0:0 0 0 0 {i}\n"
                for i, (port, state) in enumerate(
                    [(40000, "0A"), (40001, "01"), (40001, "01"), (40002, "06"), (22, "0A")]
                )
            ),
        },
    )
    assert network_checks.count_ports(str(tmp_path / "absent")).used is None
    facts = network_checks.count_ports(str(tmp_path))
    assert (facts.low, facts.high, facts.reserved, facts.used, facts.waiting) == (
        40000,
        40010,
        4,
        2,
        1,
    )
    (tmp_path / "proc/self/net/tcp").write_text(head)  # a new namespace has no socket
    assert network_checks.count_ports(str(tmp_path)).used == 0


TORCH = Build("2.9.1", "12.8")


@pytest.mark.parametrize(
    ("torch", "packages", "mark", "code", "words"),
    [
        (TORCH, (), "ok", "", "Python 3.12.4, Linux 6.8.0, torch 2.9.1 (for CUDA 12.8), driver 570.1"),
        (Build("2.13.0+cpu"), (), "ok", "", "torch 2.13.0+cpu (without CUDA)"),
        (Build("2.5.1", "", "ROCm 6.2"), (), "fault", "torch-too-old", "rallypoint needs torch 2.8"),
        (None, (), "note", "torch-missing", "torch is not installed in /usr/bin/python3"),
        (
            TORCH, (checks.Package("nvidia-nccl-cu12", "2.27.5", "2.25.1"),),
            "note", "versions-differ", "NCCL 2.25.1, driver 570.1; nvidia-nccl-cu12 is 2.25.1 and torch wants 2.27.5",
        ),
        (TORCH, (checks.Package("nvidia-nccl-cu12", "2.27.5", "2.27.5"),), "ok", "", "NCCL 2.27.5"),
    ],
)  # fmt: skip
def test_versions(
    torch: Build | None, packages: tuple[checks.Package, ...], mark: str, code: str, words: str
) -> None:
    here = "rallypoint 0.1, Python 3.12.4, Linux 6.8.0"
    found = checks.judge_versions(here, "/usr/bin/python3", torch, list(packages), "570.1", (2, 8))
    assert (found.mark, found.code) == (mark, code)
    assert words in found.fact
    if code == "versions-differ":
        assert found.help[0].command == "/usr/bin/python3 -m pip install nvidia-nccl-cu12==2.27.5"


H100 = Device("GPU-0", "NVIDIA H100", 80 * GIB, 1 * GIB)


def gpus(
    *used: Device, visible: tuple[int, ...] | None = None, build: Build | None = TORCH, **more: str
) -> Found:
    look = Look(tuple(used), "570.1", more.pop("cuda", "12.8"), source="nvml", **more)  # type: ignore[arg-type]
    return Found(
        look,
        Visible(
            None if visible is None else "0",
            tuple(range(len(used))) if visible is None else visible,
        ),
        build,
    )


def test_devices() -> None:
    assert (
        gpu_check.judge_devices(Found(Look(), Visible(None, ()))).fact
        == "no NVIDIA GPU and no driver: ranks compute on the processors"
    )
    well = gpu_check.judge_devices(gpus(H100, H100))
    assert shown(well) == (
        "ok",
        "",
        "2 GPUs (NVIDIA H100), driver 570.1; nobody holds a tenth of a visible one's memory",
    )
    taken = msgspec.structs.replace(
        H100, used=70 * GIB, processes=(Process(5112, 69 * GIB, "python other.py"),)
    )
    busy = gpu_check.judge_devices(gpus(H100, taken))
    assert shown(busy) == ("note", "device-busy", "GPU 1: 70.0 GiB of 80.0 GiB in use")
    assert "GPU 1: pid 5112 (python other.py) holds 69.0 GiB of its 80.0 GiB" in busy.why
    assert busy.help[1].command == "export CUDA_VISIBLE_DEVICES=0"
    old = gpu_check.judge_devices(gpus(H100, cuda="11.4"))
    assert shown(old)[:2] == ("fault", "device-missing")
    assert "torch 2.9.1 was built for CUDA 12.8" in old.fact
    assert shown(gpu_check.judge_devices(gpus(H100, build=Build("2.13.0+cpu"))))[:2] == (
        "note",
        "device-missing",
    )
    silent = gpu_check.judge_devices(gpus(H100, problem="the driver gave no answer within 5 s"))
    assert shown(silent)[:2] == ("note", "check-overrun")


def test_folders() -> None:
    well = storage_checks.Folder("temporary files", "/tmp", "", 10 * GIB, 100_000)
    judge = storage_checks.judge_folders
    assert (
        only(judge([well], sockets="/tmp")).fact
        == "temporary files in /tmp (10.0 GiB free); sockets in /tmp"
    )
    for folder, mark, code, words in [
        (
            well._replace(problem="Read-only file system"),
            "fault",
            "folder-unusable",
            "cannot be written, /tmp: Read-only file system",
        ),
        (
            well._replace(problem="No space left on device"),
            "fault",
            "folder-unusable",
            "cannot be written, /tmp: No space left",
        ),
        (
            well._replace(free=3 * MIB),
            "note",
            "folder-unusable",
            "temporary files in /tmp: 3.0 MiB are free",
        ),
        (
            well._replace(inodes=4),
            "note",
            "folder-unusable",
            "temporary files in /tmp: 4 more files can be made",
        ),
        (
            well._replace(use="run folders", problem="Permission denied"),
            "note",
            "run-folder-unwritable",
            "Permission denied",
        ),
    ]:
        found = only(judge([folder]))
        assert (found.mark, found.code) == (mark, code)
        assert words in found.fact
    passed = only(judge([well], passed_over="/nope"))
    assert shown(passed) == (
        "note",
        "folder-unusable",
        "TMPDIR=/nope cannot be used and is passed over: No such file or directory",
    )
    none = only(judge([well], no_sockets=("/tmp: Permission denied",)))
    assert (none.mark, none.code, none.why) == (
        "fault",
        "socket-unavailable",
        ("/tmp: Permission denied",),
    )


def test_a_run_folder_that_is_not_there_yet_is_looked_for_above_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    run, _ = storage_checks.look_at_folders({"XDG_STATE_HOME": str(tmp_path / "state")})
    assert (run.path, run.problem) == (str(tmp_path / "state/rallypoint/runs"), "")
    assert run.free > 0
    assert list(tmp_path.iterdir()) == []


# --- the network
# --------------------------------------------------------------------------------------------------

LO = Interface(
    "lo",
    "loopback",
    True,
    True,
    (InterfaceAddress("127.0.0.1", "host"), InterfaceAddress("::1", "host")),
)
ETH = Interface("eth0", "ethernet", True, True, (InterfaceAddress("10.0.4.8", "global"),))


def host(*stands_for: str, **answers: Answer) -> Host:
    own = Answer("node08", stands_for, "" if stands_for else "Name or service not known", 0.012)
    return Host("node08", (LO, ETH), source={4: "10.0.4.8"}, answers={"node08": own, **answers})


def test_addresses_that_are_well_are_three_lines() -> None:
    well = host("10.0.4.8", **{"10.0.4.8": Answer("10.0.4.8", ("node08",), took=0.020)})
    found = network_checks.judge_addresses(well, well.problems())
    assert [(one.check, one.mark) for one in found] == [
        ("addresses", "ok"),
        ("names", "ok"),
        ("ipv6", "ok"),
    ]
    assert found[0].fact == "node08 is 10.0.4.8; others may reach it at 10.0.4.8 (eth0, ethernet)"
    assert found[1].fact == "10.0.4.8 is node08; the resolver answered within 0.020 s"


def test_each_problem_of_addresses_has_its_line() -> None:
    wrong = host("127.0.1.1", **{"10.0.4.8": Answer("10.0.4.8", took=3.0)})
    found = network_checks.judge_addresses(wrong, wrong.problems())
    assert [(one.check, one.mark, one.code) for one in found] == [
        ("addresses", "note", "address-loopback"),
        ("names", "note", "address-one-way"),
        ("ipv6", "ok", ""),
    ]
    assert "127.0.1.1" in found[0].fact
    assert found[0].help


def test_firewalls() -> None:
    unread = network_checks.judge_firewall(
        Firewall(unread="only root may read the firewall's rules"), (29500,), ("eth0",)
    )
    assert shown(only(unread)) == (
        "unknown",
        "",
        "not read: only root may read the firewall's rules; the check loopback tries the way on this machine, --listen and --peer that "
        "between two",
    )
    text = (Path(__file__).parents[1] / "host/nft/filter.json").read_text()
    outside = only(network_checks.judge_firewall(Firewall(nft_chains(text)), (29500,), ("eth0",)))
    assert shown(outside)[:2] == ("note", "firewall-blocks")
    assert outside.fact.startswith(
        "from another machine, a connection to port 29500 over eth0: the firewall drops it (nft: inet filter input"
    )

    def dropping(family: str, hook: str) -> Firewall:
        rule = Rule("drop", (Condition("dport", ("40000-50000",)),), "drop")
        return Firewall((Chain(f"{family} filter {hook}", (rule,), "accept", hook),))

    inside = only(network_checks.judge_firewall(dropping("ip", "input"), (22, 45000), ()))
    assert shown(inside)[:2] == ("fault", "firewall-blocks")
    assert "between processes of this machine, a connection to 127.0.0.1 port 45000" in inside.fact
    assert inside.help[0].command == "nft insert rule ip filter input iif lo accept"
    six = only(network_checks.judge_firewall(dropping("ip6", "output"), (45000,), ("eth0",)))
    assert shown(six)[:2] == ("note", "firewall-blocks")
    assert "a connection to ::1 port 45000" in six.fact
    assert six.help[0].command == "nft insert rule ip6 filter output oif lo accept"
    well = network_checks.judge_firewall(Firewall(), (22, 29500), ("eth0",))
    assert only(well).fact == "no rule of nft keeps connections from ports 22, 29500"


# --- the trial job
# --------------------------------------------------------------------------------------------------


def measured(rank: int, right: bool = True) -> trial_job.Measured:
    return trial_job.Measured(rank, 120e-6, 0.008, right)


def test_the_trial_job() -> None:
    well = trial_job.judge_trial("gloo", trial_job.TrialOutcome(3.2, (measured(0), measured(1))))
    assert (
        well.fact
        == "2 ranks over gloo: all_reduce of one number takes 120 us, of 16.0 MiB 8.0 ms (2.1 GB/s); the job took 3.2 s"
    )
    assert shown(
        trial_job.judge_trial(
            "gloo", trial_job.TrialOutcome(3.2, (measured(0), measured(1, right=False)))
        )
    )[:2] == (
        "fault",
        "cause-unknown",
    )
    report = Report(code="rank-killed", headline="rank 1 was killed", help=(Help("do"),))
    failed = trial_job.judge_trial("nccl", trial_job.TrialOutcome(3.2, reports=(report,)))
    assert (failed.mark, failed.code, failed.reports) == ("fault", "rank-killed", (report,))
    hung = trial_job.judge_trial(
        "gloo",
        trial_job.TrialOutcome(
            60.0,
            reports=(
                Report(
                    code="launch-timeout", headline="not done", help=(Help("give it more time"),)
                ),
            ),
        ),
    )
    assert "TORCH_CPP_LOG_LEVEL" in hung.reports[0].help[0].command
    refused = trial_job.judge_trial(
        "gloo",
        trial_job.TrialOutcome(
            0.1, problem="no", code="torch-too-old", why=("it is old",), help=(("install", "pip"),)
        ),
    )
    assert refused.why == ("it is old",)
    assert shown(refused) == ("fault", "torch-too-old", "2 ranks over gloo did not start: no")


def test_nccl_is_tried_with_two_gpus_and_after_gloo_alone() -> None:
    asked: list[str] = []

    def start(backend: trial_job.Backend, ranks: int, timeout: float) -> trial_job.TrialOutcome:
        asked.append(backend)
        return (
            trial_job.TrialOutcome(1.0, (measured(0), measured(1)))
            if works
            else trial_job.TrialOutcome(1.0, problem="no", code="usage")
        )

    works = True
    assert [one.mark for one in trial_job.run_trial(start, True, lambda: 2)] == ["ok", "ok"]
    assert len(trial_job.run_trial(start, True, lambda: 1)) == 1
    assert asked == ["gloo", "nccl", "gloo"]
    works = False
    assert len(trial_job.run_trial(start, True, lambda: 8)) == 1
    assert shown(only(trial_job.run_trial(start, False, lambda: 8)))[:2] == (
        "note",
        "torch-missing",
    )


# --- two machines
# --------------------------------------------------------------------------------------------------

US, OTHER = Side("node07", "0.1.0", "3.12.4", "2.9.1"), Side("node08", "0.1.0", "3.12.4", "2.9.1")


def met(**changed: object) -> PeerContact:
    well: dict[str, object] = {
        "packet": 1448, "round_trip": 0.00021, "ahead": 0.0004, "there_port": 40001, "there": "", "back_port": 40002, "back": "",
        "bulk": "", "bulk_seconds": 0.003, "name_here": ("10.0.4.8",),
    }  # fmt: skip
    well |= {
        "us": US,
        "other": OTHER,
        "address": "10.0.4.8",
        "mine": "10.0.4.7",
        "seen": "10.0.4.7",
    }
    return PeerContact(**{**well, **changed})  # type: ignore[arg-type]


def test_two_machines_that_reach_each_other() -> None:
    found = only(peer_findings.judge_peer("node08:29500", met()))
    assert found.why == (peer_findings.TORCH_IS_OPEN,)
    assert shown(found) == (
        "ok", "",
        "node08:29500: ok both ways; round trip 210 us, 256.0 KiB there and back in 3.0 ms in packets of up to 1448 bytes,"
        " clocks 400 us apart",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "code", "fact"),
    [
        (
            {"back": "nothing listens there"}, "peer-one-way",
            "n:1: node08 does not reach node07 at 10.0.4.7:40002: nothing listens there",
        ),
        ({"there": "no answer"}, "peer-one-way", "n:1: node07 does not reach node08 at 10.0.4.8:40001: no answer"),
        (
            {"bulk": "no answer came in time"}, "large-packets-lost",
            "n:1: single words come through, and 256.0 KiB at a time do not: no answer came in time",
        ),
        (
            {"bulk": None, "back": None, "broken": "it closed the connection"}, "peer-foreign",
            "n:1: node08 ended the conversation early: it closed the connection",
        ),
    ],
)  # fmt: skip
def test_two_machines_that_do_not(changed: dict[str, object], code: str, fact: str) -> None:
    assert shown(only(peer_findings.judge_peer("n:1", met(**changed)))) == ("fault", code, fact)


def test_both_directions_closed_are_two_lines_and_nat_is_named() -> None:
    there, back = peer_findings.judge_peer(
        "n:1", met(there="no answer", back="no answer", seen="203.0.113.7")
    )
    assert "node07 does not reach node08" in there.fact
    assert "at 203.0.113.7:40002" in back.fact
    assert (
        back.why[0]
        == "node08 sees this machine as 203.0.113.7, which has 10.0.4.7: addresses are translated on the way"
    )


def test_what_differs_between_two_machines_is_noted() -> None:
    other = msgspec.structs.replace(OTHER, torch="2.8.0")
    first, *notes = peer_findings.judge_peer(
        "node08:29500", met(other=other, ahead=-37.25, name_here=())
    )
    assert first.mark == "ok"
    assert [(one.code, one.fact) for one in notes] == [
        ("clock-wrong", "the clock of node08 is 37.2 s behind that of this machine"),
        ("versions-differ", "node08 has other versions: torch 2.9.1 here and 2.8.0 there"),
        (
            "address-unresolved",
            "the name node08, by which that machine knows itself, has no address here",
        ),
    ]


@pytest.mark.parametrize(
    ("problem", "code", "fact", "command"),
    [
        (
            ("port-refused", "no store at tcp://node08:29500: nothing listens there (127.0.1.1:29500)"),
            "port-refused", "node08:29500: nothing listens there (127.0.1.1:29500)",
            "rallypoint doctor --listen 29500 --secret-file F",
        ),
        (
            ("address-unreachable", "no store at tcp://node08:29500: No route to host"),
            "address-unreachable", "node08:29500: No route to host", "sudo nft list ruleset",
        ),
        (
            ("store-foreign", "no store at tcp://node08:29500: what answers is no rallypoint store"),
            "peer-foreign",
            "node08:29500: what answers there is no rallypoint doctor: what answers is no rallypoint store",
            "rallypoint doctor --listen 0 --secret-file F",
        ),
        (
            ("wrong-secret", "the store at tcp://node08:29500 has another secret than this client was given"),
            "wrong-secret", "node08:29500: it has another secret than this machine", "sha256sum F",
        ),
    ],
)  # fmt: skip
def test_machines_that_do_not_let_us_in_are_told_apart(
    problem: tuple[str, str], code: str, fact: str, command: str
) -> None:
    found = peer_findings.unconnected("node08:29500", StoreUnreachable(*problem))
    assert shown(found) == ("fault", code, fact)
    assert found.help[-1].command == command
    own = "127.0.1.1 is this machine itself, and no other"
    assert (own in found.why) == (code == "port-refused")


def test_a_listener_that_gives_no_answer_is_none() -> None:
    found = peer_findings.unconnected("node08:29500", StoreTimeout("wait-timeout", "nobody set x"))
    assert shown(found)[:2] == ("fault", "peer-foreign")
    assert found.fact.endswith("is no rallypoint doctor: no answer came in time")


def test_what_another_machine_says_is_shown_safely() -> None:
    assert "\x1b" not in doctor.text(ok("\x1b[2Jgone", "peer"))


# --- the engine
# --------------------------------------------------------------------------------------------------

_PROGRAM = """
import os, signal, time
from rallypoint.diagnosis.doctor import doctor
from rallypoint.diagnosis.doctor.finding import fault, ok
{body}
for finding in doctor.run([{checks}], wanted={wanted}):
    print(doctor.json(finding), flush=True)
"""


def run(body: str, *checks: str, wanted: str = "('a', 'b')") -> list[dict[str, object]]:
    program = _PROGRAM.format(
        body=body, checks=", ".join(f"doctor.Check({check})" for check in checks), wanted=wanted
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_check_that_hangs_crashes_or_raises_is_a_line() -> None:
    body = """
def hang():
    os.fork()  # what it starts goes with it
    signal.pause()
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
def fail():
    raise ValueError("no such thing")
def noisy():
    print("this must not be seen")
    return [ok("well")]
"""
    found = run(
        body,
        "('a',), 0.3, hang",
        "('a',), 5.0, crash",
        "('a',), 5.0, fail",
        "('a',), 5.0, lambda: os._exit(0)",
        "('b',), 5.0, noisy",
    )
    assert [(one["check"], one["mark"], one["code"], one["fact"]) for one in found] == [
        ("a", "fault", "check-overrun", "no answer within 0.3 s"),
        ("a", "fault", "internal-error", "the check was ended by signal 11"),
        ("a", "fault", "internal-error", "the check failed: ValueError: no such thing"),
        ("a", "fault", "internal-error", "the check was ended by an exit without an answer"),
        ("b", "ok", "", "well"),
    ]


def test_only_what_is_wanted_runs_and_what_needs_a_broken_one_is_left_out() -> None:
    body = "def broken():\n    return [fault('limit-low', 'broken'), ok('fine', 'c')]\ndef never():\n    os.kill(os.getppid(), signal.SIGKILL)"
    found = run(body, "('a', 'c'), 5.0, broken", "('d',), 5.0, never", "('b',), 5.0, never, ('a',)")
    assert [(one["check"], one["mark"], one["code"]) for one in found] == [
        ("a", "fault", "limit-low"),
        ("b", "note", "limit-low"),
    ]


def test_a_large_answer_is_read_whole_and_an_endless_one_is_not() -> None:
    found = run(
        "", "('a',), 20.0, lambda: [ok('x' * 500000)]", "('b',), 20.0, lambda: [ok('x' * 5000000)]"
    )
    assert [(one["mark"], one["code"]) for one in found] == [
        ("ok", ""),
        ("fault", "internal-error"),
    ]
    assert found[0]["fact"] == "x" * 500000


# --- as people and programs see it
# -----------------------------------------------------------------------------------


def test_a_finding_as_text() -> None:
    finding = msgspec.structs.replace(
        note(
            "limit-low",
            "a process may have 256 files open",
            ("raise it for this shell", "ulimit -n 65536"),
            why=("a fact",),
        ),
        check="limits",
    )
    assert doctor.text(finding) == (
        "[!]  limits      a process may have 256 files open\n"
        "                 - a fact\n"
        "                 help   raise it for this shell:\n"
        "                            ulimit -n 65536\n"
        "                 more   rallypoint explain limit-low"
    )
    assert doctor.text(ok("fine", "shm")) == "[ok] shm         fine"
    assert doctor.text(ok("fine", "shm"), color=True).startswith("\x1b[32m[ok]\x1b[0m shm")


def test_the_report_of_a_failed_job_stands_below_its_line() -> None:
    report = Report(code="rank-killed", headline="rank 1 was killed")
    finding = msgspec.structs.replace(
        fault("rank-killed", "2 ranks over gloo failed: rank 1 was killed"),
        check="job",
        reports=(report,),
    )
    lines = doctor.text(finding).splitlines()
    assert lines[0] == "[x]  job         2 ranks over gloo failed: rank 1 was killed"
    assert "     error[rank-killed]: rank 1 was killed" in lines
    assert sum("more" in line for line in lines) == 1


def test_the_last_line() -> None:
    findings = [ok("a"), note("limit-low", "b"), fault("limit-low", "c"), fault("limit-low", "d")]
    assert doctor.summary(findings) == "2 faults, 1 note, 1 ok"
    assert doctor.summary([ok("a")]) == "1 ok"
    assert json.loads(doctor.json_summary(findings, 1)) == {
        "exit_status": 1,
        "findings": {"ok": 1, "unknown": 0, "note": 1, "fault": 2},
    }


def test_every_code_of_a_check_is_in_the_catalogue_and_every_check_on_its_page() -> None:
    folder = Path(doctor.__file__).parent
    sources = folder.glob("*.py")
    codes = {
        code
        for path in sources
        for code in re.findall(r'(?:fault|note|make)\(\s*"([a-z-]+)"', path.read_text())
    }
    assert len(codes) > 15
    assert codes - set(CATALOGUE) == set()
    page = (Path(__file__).parents[2] / "docs/reference/doctor.md").read_text()
    assert [name for name in doctor.NAMES if f"| `{name}`" not in page] == []
    checks = doctor.standard((2, 7), lambda backend, ranks, timeout: trial_job.TrialOutcome(0.0))
    assert tuple(name for check in checks for name in check.names) == doctor.NAMES
    for check in checks:
        assert re.search(
            rf"^\| `{check.names[0]}` \|.*\| {check.deadline:g} s \|$", page, re.MULTILINE
        ), check.names


def test_the_line_for_the_other_machine_can_be_typed_in_any_shell() -> None:
    """zsh takes [...] for a pattern, and refuses one that fits no file."""
    said = peer_findings.waiting(
        "node07", ("10.0.0.7", "fd00::2"), 38089, 600.0, " --secret-file s"
    )
    assert [one.command for one in said.help] == [
        "rallypoint doctor --peer 10.0.0.7:38089 --secret-file s",
        "rallypoint doctor --peer '[fd00::2]:38089' --secret-file s",
    ]
