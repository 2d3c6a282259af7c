"""Jobs of `rallypoint run` on the nodes of a cluster."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..python_path import WITHOUT_TORCH, python_path
from .netns import Cluster, Node, Process

PORT = 29400


TELL = """
import json, os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
names += " MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT GLOO_SOCKET_IFNAME"
told = {name: os.environ.get(name) for name in names.split()}
print("env " + json.dumps({**told, "pid": os.getpid()}), flush=True)
"""
"""Program whose ranks tell their environment and process id."""

STAY = TELL + "import time; time.sleep(600)\n"

_ENV = re.compile(r"^[^|\n]*env (\{.*\})$", re.MULTILINE)  # not where a report repeats it


class Jobs:
    """Commands of jobs with one secret and one program, in a folder that all nodes share."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.secret = self.make_secret("secret")
        self.torch = False

    def write(self, name: str, text: str) -> Path:
        """Write a file that all nodes see."""
        (self.folder / name).write_text(text)
        return self.folder / name

    def make_secret(self, name: str, mode: int = 0o600) -> Path:
        """Make a file with a secret of its own."""
        path = self.write(name, secrets.token_hex(32))
        path.chmod(mode)
        return path

    def start(
        self,
        node: Node,
        program: str = TELL,
        *options: str | Path,
        nnodes: int | None = None,
        ranks: int = 1,
        where: Sequence[str] = (),
        secret: Path | None = None,
        arguments: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start the launcher on one node. `where`: options that say where the nodes meet; c10d at
        node 0 without them.
        """
        script = self.folder / f"program{abs(hash(program)) % 10**6}.py"
        script.write_text(program)
        found = where or ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
        command = ["run", "--nnodes", str(nnodes or self.cluster.count), "-n", str(ranks), *found]
        if secret is not NO_SECRET:
            command += ["--secret-file", str(secret or self.secret)]
        command += [*map(str, options), str(script), *arguments]
        path = python_path() if self.torch else python_path(WITHOUT_TORCH)
        extra = {"PYTHONPATH": path, **(env or {})}
        warm = not self.torch and extra["PYTHONPATH"] == path
        return node.start([sys.executable, "-m", "rallypoint", *command], env=extra, warm=warm)

    @property
    def endpoint(self) -> str:
        return f"{self.cluster[0].name}:{PORT}"

    def start_all(
        self, program: str = TELL, *options: str | Path, count: int | None = None, **more: Any
    ) -> list[Process]:
        """Start the launcher on every node, or on the first `count`, each with its number as
        --node-rank.
        """
        nodes = self.cluster.nodes[:count]
        more.setdefault("nnodes", len(nodes))
        return [
            self.start(node, program, "--node-rank", str(node.number), *options, **more)
            for node in nodes
        ]


NO_SECRET = Path("no secret")


def told(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """Return what the ranks of all nodes told of their environment, in their order."""
    found = [json.loads(text) for one in processes for text in _ENV.findall(one.output())]
    return sorted(found, key=lambda each: int(each["RANK"]))


def codes(process: Process) -> list[str]:
    """Return the codes of the errors that a launcher has printed."""
    return re.findall(r"^(?:error|stopped)\[([a-z-]+)\]: ", process.output(), re.MULTILINE)
