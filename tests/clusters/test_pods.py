"""Pods of a job of Kubernetes, for real: launchers in namespaces, a name server, mounted secrets.

There is no kubelet here: the tests make what it makes. `test_kubernetes.py` has what its variables
mean.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ..nodes.jobs import STAY, TELL, codes, told
from ..nodes.netns import Cluster, Process, wait_until
from ..python_path import WITHOUT_TORCH, python_path
from .pods import HOSTS, KUBELET

pytestmark = pytest.mark.nodes

SCRIPTS = Path(__file__).parent / "scripts"
DOMAIN = "team.svc.cluster.local"
PREFIX = "digits-node-0-"
"""Host names of a TrainJob's pods without their number: those of its JobSet, "digits"."""

LEAD = f"{PREFIX}0.digits.{DOMAIN}"
RAISES = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad batch')\n" + STAY
OPTIONS = "options ndots:5 timeout:1"
"""Line of a pod's /etc/resolv.conf, but for the seconds that a name server has to answer: 5 there."""

SECRET = "3f" * 32


class Namespace:
    """Pods of one job in Kubernetes, and its name server on a machine of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.zone = folder / "zone"
        self.zone.write_text("")
        server = cluster[2]
        for node in cluster.nodes[:2]:
            own = f"{node.name}.digits.{DOMAIN}\t{node.name}"
            node.set_hosts(HOSTS.format(name=own).replace("10.244.1.5", node.address))
            search = f"search {DOMAIN} svc.cluster.local cluster.local"
            node.set_resolver(f"nameserver {server.address}\n{search}\n{OPTIONS}\n")
        self.server = server.start(
            [sys.executable, str(SCRIPTS / "name_server.py"), str(self.zone)]
        )
        self.server.wait_for("^ready$")

    def publish(self) -> None:
        """Let the name of pod 0 have its address from now on."""
        draft = self.folder / "zone.new"
        draft.write_text(f"{LEAD} {self.cluster[0].address}\n")
        draft.rename(self.zone)

    def pod(
        self,
        number: int,
        program: str = TELL,
        *options: str,
        environ: Mapping[str, str] = {},
        secret: str | None = SECRET,
        mode: int = 0o400,
    ) -> Process:
        """Start a pod's container: `rallypoint run` without a word about nodes."""
        own = self.folder / f"pod{number}"
        own.mkdir()
        if secret is not None:
            (own / "secret").write_text(secret)
        script = self.folder / "program.py"
        script.write_text(program)
        mounts = ["sh", "-e", str(SCRIPTS / "pod.sh"), str(own), f"{mode:o}"]
        command = [sys.executable, "-m", "rallypoint", "run", *options, str(script)]
        kubelet = {
            **{name: value for name, value in KUBELET.items() if name not in ("PATH", "HOME")},
            "JOB_COMPLETION_INDEX": str(number),
            "PYTHONPATH": python_path(WITHOUT_TORCH),
        }
        return self.cluster[number].start(
            command, env={**kubelet, **environ}, warm=True, mounts=mounts
        )

    def message(self, number: int) -> str:
        """Return the termination message of a pod."""
        return (self.folder / f"pod{number}" / "termination-log").read_text()


JOB_SET = {"PET_NNODES": "2"}


def train_job(number: int) -> dict[str, str]:
    """Return what Kubeflow Trainer sets in a pod."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": f"{PREFIX}0.digits",
        "PET_MASTER_PORT": "29500",
    }


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(3, tmp_path_factory.mktemp("pods"), prefix=PREFIX) as made:
        yield made


@pytest.fixture
def namespace(_cluster: Cluster, tmp_path: Path) -> Iterator[Namespace]:
    made = Namespace(_cluster, tmp_path)
    yield made
    made.server.kill()
    left = _cluster.reset()
    assert not left, "the test has left processes:\n" + "\n".join(left)


def ended(pods: list[Process]) -> list[int]:
    return [pod.wait() for pod in pods]


def publish_late(namespace: Namespace, pods: list[Process], before: str, times: int) -> None:
    asked = f"{before} {LEAD}\n"
    assert wait_until(lambda: namespace.server.output().count(asked) >= times, 20)
    assert [pod.running() for pod in pods] == [True, True]
    namespace.publish()


@pytest.mark.parametrize(
    ("kind", "before"),
    [("TrainJob", "NXDOMAIN"), ("JobSet", "no answer")],
)
def test_the_name_of_pod_0_comes_late(namespace: Namespace, kind: str, before: str) -> None:
    """A JobSet's pods make the whole name of pod 0, a TrainJob's are told a short one. The name
    server says that there is no such name, or nothing at all.
    """
    if before == "no answer":
        namespace.zone.unlink()
    environ = [JOB_SET, JOB_SET] if kind == "JobSet" else [train_job(0), train_job(1)]
    pods = [namespace.pod(number, environ=environ[number]) for number in (0, 1)]
    publish_late(namespace, pods, before, 10 if before == "NXDOMAIN" else 4)
    assert ended(pods) == [0, 0], [pod.output() for pod in pods]
    assert [(one["RANK"], one["GROUP_RANK"]) for one in told(pods)] == [("0", "0"), ("1", "1")]
    assert {one["MASTER_ADDR"] for one in told(pods)} == {namespace.cluster[0].address}
    assert namespace.message(0) == namespace.message(1) == ""


def test_a_name_that_never_comes_is_named(namespace: Namespace) -> None:
    pod = namespace.pod(1, TELL, "--rdzv-conf", "join_timeout=3", environ=JOB_SET)
    assert pod.wait() == 75
    assert codes(pod) == ["join-timeout"]
    assert LEAD in pod.output()
    assert namespace.message(1).startswith("error[join-timeout]: ")
    assert LEAD in namespace.message(1)


def test_the_headline_of_the_report_outlives_every_pod(namespace: Namespace) -> None:
    """The name of pod 0 comes late here, too."""
    pods = [namespace.pod(number, RAISES, environ=JOB_SET) for number in (0, 1)]
    publish_late(namespace, pods, "NXDOMAIN", 10)
    assert ended(pods) == [1, 1]
    for number, pod in enumerate(pods):
        message = namespace.message(number)
        assert message.startswith(f"error[rank-raised]: rank 1 on {PREFIX}1 raised ValueError")
        assert re.search(f"^{re.escape(message)}$", pod.output(), re.MULTILINE)


def test_a_drained_pod_ends_the_others_with_its_status(namespace: Namespace) -> None:
    """The manifests have a rule for 143: such a job is made anew, and not counted as failed."""
    namespace.publish()
    pods = [namespace.pod(number, STAY, environ=JOB_SET) for number in (0, 1)]
    for pod in pods:
        pod.wait_for("^.*env ")
    pods[1].send(signal.SIGTERM)
    assert ended(pods) == [143, 143]


@pytest.mark.parametrize(
    ("secret", "mode", "code", "status"),
    [
        (SECRET, 0o644, "secret-unreadable", 1),
        ("", 0o400, "secret-too-short", 2),
        (None, 0o400, "secret-missing", 2),
    ],
    ids=["0644", "empty", "missing"],
)
def test_a_secret_that_is_no_good_is_refused(
    namespace: Namespace, secret: str | None, mode: int, code: str, status: int
) -> None:
    pod = namespace.pod(0, environ=JOB_SET, secret=secret, mode=mode)
    assert pod.wait() == status, pod.output()
    assert codes(pod) == [code]
    assert namespace.message(0).startswith(f"error[{code}]: ")
    assert SECRET not in pod.output()
    if mode == 0o644:
        assert "defaultMode: 0400" in pod.output()
    if secret is None:
        assert "kubectl create secret generic rallypoint" in pod.output()


def test_pods_with_different_secrets_do_not_meet(namespace: Namespace) -> None:
    namespace.publish()
    pods = [
        namespace.pod(0, environ=JOB_SET),
        namespace.pod(1, environ=JOB_SET, secret="4e" * 32),
    ]
    assert pods[1].wait() == 2, pods[1].output()
    assert codes(pods[1]) == ["wrong-secret"]
    pods[0].send(signal.SIGTERM)
    assert pods[0].wait() == 143
