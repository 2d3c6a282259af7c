"""Pods of Kubernetes: environment and files of a container, as the kubelet makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from rallypoint.cli import args, run_options
from rallypoint.clusters.cluster import Cluster
from rallypoint.clusters.detect import detect
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options

KUBELET = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/root",
}
"""Variables of every container."""

HOSTS = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
10.244.1.5\t{name}
"""


class Pod:
    """Environment and files of a container, as the kubelet makes them."""

    def __init__(self, host: str, environ: Mapping[str, str], domain: str = "") -> None:
        self.environ = {**KUBELET, "HOSTNAME": host, **environ}
        self._host = host
        whole = f"{host}.{domain}.team.svc.cluster.local\t{host}" if domain else host
        self._hosts = HOSTS.format(name=whole)

    def changed(self, name: str, text: str) -> Pod:
        """Return a pod like this one, with another value of a variable."""
        other = Pod(self._host, {**self.environ, name: text})
        other._hosts = self._hosts
        return other

    def text(self, path: str) -> str:
        return self._hosts if path == "/etc/hosts" else ""

    def is_open(self, fd: int) -> bool:
        return False

    def host(self) -> str:
        return self._host

    def look(self, without: str = "") -> Cluster | None:
        return detect({k: v for k, v in self.environ.items() if k != without}, self)

    def asked(self, line: str = "", without: str = "") -> Options:
        """Return what `rallypoint run` asks for in this pod."""
        return self.runs([*line.split(), "train.py"], without)

    def runs(self, words: Sequence[str], without: str = "") -> Options:
        """Return what `rallypoint run` asks for with these words behind it."""
        environ = {k: v for k, v in self.environ.items() if k != without}
        typed = args.take_apart(words, environ)
        return run_options.read(typed, lambda: detect(environ, self))

    def world(self, line: str = "", without: str = "") -> tuple[object, ...]:
        """Return what decides the world: the nodes, this one, ranks, node 0's place."""
        wanted = self.asked(line, without)
        nodes = wanted.nodes
        if nodes is None:
            return (1, 0, wanted.nproc)
        return (nodes.count, nodes.rank, wanted.nproc, nodes.host, nodes.ports)

    def complaint(self) -> UsageError | None:
        """Return why no job can be started in this pod, None when one can."""
        try:
            self.asked()
        except UsageError as error:
            return error
        return None

    def refused(self, line: str = "", without: str = "") -> UsageError:
        with pytest.raises(UsageError) as refusal:
            self.asked(line, without)
        return refusal.value
