"""Slurm of a test's own: munged, slurmctld and one slurmd per node, in the namespaces of a cluster.

Node 0 has the controller, and is where jobs are submitted; the others compute. All of its files are
in one folder, its daemons are children of the test process, and nothing of the machine's own Slurm
or munge is used. The packages are Debian's `slurm-wlm` and `munge`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.nodes.netns import Cluster, Node, Process, command_line, wait_until

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

CREDENTIAL = 5
"""Seconds that a step's credential is good for: no less is valid. A requeued job waits for as long."""

KILL_WAIT = 10
"""Seconds between SIGTERM and SIGKILL to what `scancel` ends."""

LOOK = 0.2
"""Seconds between two questions to Slurm, each of which is a process."""

READY = 20.0
"""Seconds for the daemons to know each other: a busy machine, not a wait."""

SCRIPT_HELPER = "slurmctld: slurmscriptd"
"""Title of a process that slurmctld starts for itself."""

_CONF = """\
ClusterName=ground
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
JobRequeue=1
KillWait={kill_wait}
OverTimeLimit=0
ReturnToService=2
SlurmdTimeout=300
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""

_CGROUP = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"


def why_not() -> str:
    """Return why no Slurm can be started here; "" when one can."""
    for tool, package in (("slurmctld", "slurm-wlm"), ("munged", "munge")):
        if shutil.which(tool, path=PATH) is None:
            return f"Slurm needs {package}: {tool} was not found"
    return ""


class Slurm:
    """Running Slurm on the nodes of a cluster. Use it in `with`."""

    def __init__(self, cluster: Cluster, folder: Path, cpus: int = 4) -> None:
        self.cluster = cluster
        self.folder = folder
        self.login = cluster[0]
        self.nodes = cluster.nodes[1:]
        self.daemons: list[Process] = []
        folder.mkdir(parents=True, mode=0o700)
        (folder / "state").mkdir()
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} State=UNKNOWN"
            for node in self.nodes
        ]
        self.conf = folder / "slurm.conf"
        self.conf.write_text(
            _CONF.format(
                controller=self.login.name,
                address=self.login.address,
                folder=folder,
                credential=CREDENTIAL,
                kill_wait=KILL_WAIT,
                nodes="\n".join(lines),
            )
        )
        (folder / "cgroup.conf").write_text(_CGROUP)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        munged = [
            "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munge.pid",
            f"--seed-file={self.folder}/munge.seed", f"--log-file={self.folder}/munge.log",
        ]  # fmt: skip
        self._daemon(self.login, munged)
        assert wait_until((self.folder / "munge.socket").exists, READY), self.said()
        self._daemon(self.login, ["slurmctld", "-D", "-i", "-f", str(self.conf)])
        for node in self.nodes:
            spool = self.folder / f"spool-{node.name}"
            spool.mkdir()
            self._daemon(node, ["slurmd", "-D", "-f", str(self.conf)])
        wanted = len(self.nodes)
        ready = wait_until(
            lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(wanted), READY, LOOK
        )
        assert ready, self.said()

    def _daemon(self, node: Node, argv: Sequence[str]) -> None:
        tool = shutil.which(argv[0], path=PATH) or argv[0]
        one = Process(node, [tool, *argv[1:]], self.environment(node), self.folder)
        self.daemons.append(one)
        node.started.append(one)

    def environment(self, node: Node, **extra: str) -> dict[str, str]:
        """Return the variables of a user's shell on a node: nothing of a Slurm around the tests."""
        kept = {
            name: value
            for name, value in node.environment(**extra).items()
            if not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_"))
        }
        return {**kept, "PATH": PATH, "SLURM_CONF": str(self.conf), **extra}

    def said(self) -> str:
        """Return what every daemon has written."""
        logs = sorted(self.folder.glob("*.log"))
        texts = [f"--- {log.name}\n{log.read_text('utf-8', 'replace')}" for log in logs]
        return "\n".join([*texts, *(f"--- {one!r}\n{one.output()}" for one in self.daemons)])

    def ask(self, *argv: str) -> str:
        """Return what a command of Slurm prints on the node where jobs are submitted."""
        done = subprocess.run(
            self.login.inside(argv, self.login.home),
            env=self.environment(self.login),
            capture_output=True,
            text=True,
            check=False,
        )
        return (done.stdout + done.stderr).strip()

    def submit(self, folder: Path, script: str, *options: str, env: Mapping[str, str]) -> Job:
        """Hand a batch script to sbatch; it runs in `folder`."""
        (folder / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
        output = folder / "job.out"
        argv = ["sbatch", "--parsable", "-D", str(folder), "-o", str(output), "--open-mode=append"]
        done = subprocess.run(
            self.login.inside([*argv, *options, str(folder / "job.sh")], folder),
            env=self.environment(self.login, **env),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), output)

    def processes(self) -> list[str]:
        """Return the living processes of the nodes that are none of the daemons'."""
        daemons = {one.pid for one in self.daemons}
        living = [pid for pids in self.cluster.processes().values() for pid in pids]
        lines = {pid: command_line(pid) for pid in living if pid not in daemons}
        return [f"{pid}: {line}" for pid, line in lines.items() if line != SCRIPT_HELPER]

    def close(self) -> None:
        """End the daemons and all that they have started."""
        for node in self.cluster.nodes:
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Job:
    """Batch job that was submitted."""

    def __init__(self, slurm: Slurm, number: str, output: Path) -> None:
        self.slurm = slurm
        self.number = number
        self.path = output

    def output(self) -> str:
        """Return what its script, and the steps in it, have written so far."""
        return self.path.read_text("utf-8", "replace") if self.path.exists() else ""

    def wait_for(self, pattern: str, times: int = 1, timeout: float = 40.0) -> None:
        """Wait for a pattern to be in its output so often."""
        found = wait_until(lambda: len(re.findall(pattern, self.output())) >= times, timeout)
        assert found, (
            f"{pattern!r} is not there {times} times:\n{self.output()}\n{self.slurm.said()}"
        )

    def wait(self, timeout: float = 100.0) -> str:
        """Wait for the job to leave the queue; return its output."""
        asked = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self.number}")
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        ended = wait_until(lambda: self.slurm.ask(*asked) in over, timeout, LOOK)
        assert ended, f"{self.slurm.ask(*asked)}\n{self.output()}\n{self.slurm.said()}"
        return self.output()
