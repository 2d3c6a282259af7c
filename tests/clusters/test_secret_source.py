"""Secrets of jobs for which no file was named."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from rallypoint.clusters import secret_source
from rallypoint.clusters.cluster import Cluster
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.launcher.nodes import endpoint
from rallypoint.launcher.plan import Nodes
from rallypoint.store.discovery import secret_from_file

TWO = Nodes(count=2)
CLUSTER = Cluster(name="Two", nodes=2, node=0)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A home without a key, on a machine without a mounted secret."""
    monkeypatch.setattr(secret_source, "MOUNT", str(tmp_path / "mount" / "secret"))
    return {"HOME": str(tmp_path / "home")}


def mount(text: str, mode: int = 0o400) -> Path:
    path = Path(secret_source.MOUNT)
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_key_of_a_user_is_made_once(environ: dict[str, str]) -> None:
    path = secret_source.user_key(environ)
    assert path == f"{environ['HOME']}/.local/state/rallypoint/key"
    made = secret_from_file(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert secret_source.user_key(environ) == path
    assert secret_from_file(path) == made
    assert os.listdir(os.path.dirname(path)) == ["key"]  # no draft is left


def test_the_key_is_in_the_state_folder(environ: dict[str, str]) -> None:
    assert secret_source.key_path({**environ, "XDG_STATE_HOME": "/s"}) == "/s/rallypoint/key"
    home = f"{environ['HOME']}/.local/state/rallypoint/key"
    assert secret_source.key_path({**environ, "XDG_STATE_HOME": "relative"}) == home


def _make(
    environ: dict[str, str], go: threading.Barrier, found: multiprocessing.Queue[bytes]
) -> None:
    go.wait(30)
    found.put(secret_from_file(secret_source.user_key(environ)))


def test_nodes_that_make_the_key_together_have_one(environ: dict[str, str]) -> None:
    context = multiprocessing.get_context("fork")
    go, found = context.Barrier(4), context.Queue()
    makers = [context.Process(target=_make, args=(environ, go, found)) for _ in range(4)]
    for one in makers:
        one.start()
    secrets = {found.get(timeout=30) for _ in makers}
    for one in makers:
        one.join()
    assert len(secrets) == 1


def test_a_home_that_cannot_be_written_to_is_told(environ: dict[str, str]) -> None:
    Path(environ["HOME"]).write_text("a file where the home should be")
    with pytest.raises(EnvironmentProblem) as problem:
        secret_source.user_key(environ)
    assert problem.value.code == "secret-unreadable"


def test_what_was_named_comes_before_all(environ: dict[str, str]) -> None:
    mount("a mounted secret of this job")
    named = msgspec.structs.replace(TWO, secret_file="named")
    assert endpoint.secret_file(named, CLUSTER, environ) == "named"
    assert endpoint.secret_file(TWO, CLUSTER, environ) == secret_source.MOUNT
    assert not os.path.exists(environ["HOME"])


def test_a_key_is_made_where_nodes_may_share_a_home_alone(environ: dict[str, str]) -> None:
    assert endpoint.secret_file(TWO, None, environ) == ""  # flags by hand: name a file
    apart = msgspec.structs.replace(CLUSTER, own_homes=True)
    assert endpoint.secret_file(TWO, apart, environ) == ""
    exchange = msgspec.structs.replace(TWO, exchange="pmi")
    assert endpoint.secret_file(exchange, CLUSTER, environ) == ""
    assert endpoint.secret_file(TWO, CLUSTER, environ) == secret_source.key_path(environ)


@pytest.mark.parametrize(
    ("text", "mode", "code"),
    [
        ("a mounted secret of this job", 0o644, "secret-unreadable"),
        ("", 0o400, "secret-too-short"),
    ],
)
def test_a_mounted_secret_that_is_no_good_is_fatal(
    environ: dict[str, str], text: str, mode: int, code: str
) -> None:
    """Nothing else is tried: the other nodes have the mounted one."""
    mount(text, mode)
    file = endpoint.secret_file(TWO, CLUSTER, environ)
    with pytest.raises((UsageError, EnvironmentProblem)) as refusal:
        endpoint.job_secret(msgspec.structs.replace(TWO, secret_file=file), CLUSTER)
    assert refusal.value.code == code


def test_a_mount_whose_key_is_missing_is_fatal(environ: dict[str, str]) -> None:
    """A link to nowhere: the Secret was mounted without the key that is looked for."""
    Path(secret_source.MOUNT).parent.mkdir()
    Path(secret_source.MOUNT).symlink_to("..data/secret")
    file = endpoint.secret_file(TWO, CLUSTER, environ)
    with pytest.raises(EnvironmentProblem) as problem:
        endpoint.job_secret(msgspec.structs.replace(TWO, secret_file=file), CLUSTER)
    assert problem.value.code == "secret-unreadable"


def test_no_secret_has_the_help_of_the_cluster(environ: dict[str, str]) -> None:
    lines = (("mount a Secret", "kubectl create secret ..."),)
    cluster = Cluster(name="Apart", own_homes=True, secret_help=lines)
    assert endpoint.secret_file(TWO, cluster, environ) == ""
    with pytest.raises(UsageError) as refusal:
        endpoint.job_secret(TWO, cluster)
    assert (refusal.value.code, refusal.value.help) == ("secret-missing", lines)


READ = """
import os, sys
from rallypoint.store.discovery import secret_from_file
os.setgroups([1000]); os.setgid(1000); os.setuid(1000)
print(secret_from_file(sys.argv[1]).decode())
"""


@pytest.mark.parametrize(
    ("options", "mode", "reads"), [("ro", 0o440, True), ("rw", 0o440, False), ("ro", 0o444, False)]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_group_may_read_the_secret_of_roots_on_a_read_only_mount(
    options: str, mode: int, reads: bool
) -> None:
    """Kubernetes gives a container that is not root's its Secrets so (`fsGroup`)."""
    there = "/mnt/secret"  # of a namespace that ends with the command
    steps = (
        "mount -t tmpfs tmpfs /mnt",
        "chmod 755 /mnt",
        f"echo a mounted secret of this job > {there}",
        f"chown 0:1000 {there} && chmod {mode:o} {there}",
        f"mount -o remount,{options} /mnt",
        f"exec {shlex.quote(sys.executable)} -c '{READ}' {there}",
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", " && ".join(steps)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout == "a mounted secret of this job\n") is reads, done.stderr
    assert reads or "secret-unreadable" in done.stderr


def test_what_node_0_hands_over_is_the_place_and_secret_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exchange is a module of the cluster's: here a list in memory."""
    said: list[str] = []

    def share(environ: Mapping[str, str], text: str, *timeout: float) -> str:
        said.extend([text] if text else [])
        return said[0]

    module = ModuleType("rallypoint.clusters.in_memory")
    monkeypatch.setattr(module, "share", share, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    nodes = [Nodes(count=2, rank=rank, exchange="in_memory") for rank in (0, 1)]
    lead, secret, held = endpoint.handed_over(nodes[0], None, {})
    other, same, nothing = endpoint.handed_over(nodes[1], None, {})
    assert held is not None
    with held:
        assert nothing is None
        assert secret == same
        assert len(secret) >= 32
        assert (lead.lead, lead.ports) == (other.lead, other.ports) == (lead.lead, (held.port,))
        assert ("127.0.0.1", held.port) in endpoint.places(other)
        claim = endpoint.claim(lead, None, held)
        assert claim is not None
        assert claim.held is held
