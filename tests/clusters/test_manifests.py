"""Manifests of examples/kubernetes: the published schemas take them, and each of their pods finds the
others.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.clusters.secret_source import MOUNT
from rallypoint.launcher.plan import Options

from .pods import Pod

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
KUBERNETES = "1.34"
"""Version of the schemas: the oldest that is still maintained."""

Manifest = dict[str, Any]


def read(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def pod_specs(found: Any) -> Iterator[Manifest]:
    """Find the specs of pods in a manifest of any kind."""
    if isinstance(found, dict):
        if "containers" in found:
            yield found
        for value in found.values():
            yield from pod_specs(value)
    elif isinstance(found, list):
        for value in found:
            yield from pod_specs(value)


# --- controllers: how each makes its pods


def _own(spec: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in spec["containers"][0].get("env", ())}


def _job(job: Manifest, name: str, domain: str) -> Iterator[Pod]:
    pod = job["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    for index in range(job["completions"]):
        environ = {"JOB_COMPLETION_INDEX": str(index), **_own(pod)}
        yield Pod(f"{name}-{index}", environ, domain)


def job(manifests: list[Manifest]) -> Iterator[Pod]:
    service, made = manifests
    assert service["spec"]["selector"] == {"job-name": made["metadata"]["name"]}
    subdomain = made["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    return _job(made["spec"], made["metadata"]["name"], subdomain)


def jobset(manifests: list[Manifest]) -> Iterator[Pod]:
    (made,) = manifests
    name = made["metadata"]["name"]
    (replicated,) = made["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return _job(replicated["template"]["spec"], f"{name}-{replicated['name']}-0", name)


def trainjob(manifests: list[Manifest]) -> Iterator[Pod]:
    runtime, made = manifests
    assert made["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (pod,) = pod_specs(runtime)
    name, trainer = made["metadata"]["name"], made["spec"]["trainer"]
    for index in range(trainer["numNodes"]):
        environ = {
            **_own(pod),
            "JOB_COMPLETION_INDEX": str(index),
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        yield Pod(f"{name}-node-0-{index}", environ, name)


def pytorchjob(manifests: list[Manifest]) -> Iterator[Pod]:
    (made,) = manifests
    name, each = made["metadata"]["name"], made["spec"]["nprocPerNode"]
    replicas = made["spec"]["pytorchReplicaSpecs"]
    count = sum(one["replicas"] for one in replicas.values())
    places = [
        (kind, index)
        for kind in ("Master", "Worker")
        for index in range(replicas[kind]["replicas"])
    ]
    for rank, (kind, index) in enumerate(places):
        environ = {
            "PYTHONUNBUFFERED": "1",
            "MASTER_PORT": "23456",
            "MASTER_ADDR": f"{name}-master-0",
            "WORLD_SIZE": str(count * int(each)),
            "RANK": str(rank),
            "PET_NPROC_PER_NODE": each,
            "PET_NODE_RANK": str(rank),
            "PET_NNODES": str(count),
            **_own(replicas[kind]["template"]["spec"]),
        }
        yield Pod(f"{name}-{kind.lower()}-{index}", environ)


def leaderworkerset(manifests: list[Manifest]) -> Iterator[Pod]:
    (made,) = manifests
    name, template = made["metadata"]["name"], made["spec"]["leaderWorkerTemplate"]
    for index in range(template["size"]):
        environ = {
            "LWS_LEADER_ADDRESS": f"{name}-0.{name}.team",
            "LWS_GROUP_SIZE": str(template["size"]),
            "LWS_WORKER_INDEX": str(index),
            **_own(template["workerTemplate"]["spec"]),
        }
        yield Pod(f"{name}-0-{index}" if index else f"{name}-0", environ, name)


def statefulset(manifests: list[Manifest]) -> Iterator[Pod]:
    service, made = manifests
    spec = made["spec"]
    assert spec["serviceName"] == service["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    for index in range(spec["replicas"]):
        environ = _own(spec["template"]["spec"])
        yield Pod(f"{made['metadata']['name']}-{index}", environ, spec["serviceName"])


KINDS: dict[str, Callable[[list[Manifest]], Iterator[Pod]]] = {
    "job.yaml": job,
    "jobset.yaml": jobset,
    "trainjob.yaml": trainjob,
    "pytorchjob.yaml": pytorchjob,
    "leaderworkerset.yaml": leaderworkerset,
    "statefulset.yaml": statefulset,
}


def test_every_manifest_is_looked_at() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_pods_of_a_manifest_are_one_job(name: str) -> None:
    manifests = read(name)
    command = next(pod_specs(manifests))["containers"][0]["command"]
    assert command[:2] == ["rallypoint", "run"]
    pods = list(KINDS[name](manifests))
    asked: list[Options] = [pod.runs(command[2:]) for pod in pods]
    nodes = [one.nodes for one in asked if one.nodes is not None]
    assert [one.rank for one in nodes] == [0, 1]
    assert [one.nproc for one in asked] == [2, 2]
    assert {one.count for one in nodes} == {2}
    assert len({(one.host, one.ports, one.job) for one in nodes}) == 1
    assert nodes[0].host.split(".")[0] == pods[0].host()
    assert [one.notes for one in asked] == [(), ()]


@pytest.mark.parametrize("name", KINDS)
def test_the_secret_is_where_it_is_looked_for(name: str) -> None:
    """And has a mode that is taken. The command above each manifest makes it."""
    assert "--from-file=secret=/dev/stdin" in (FOLDER / name).read_text("utf-8")
    assert os.path.basename(MOUNT) == "secret"
    for spec in pod_specs(read(name)):
        volume = next(one for one in spec["volumes"] if "secret" in one)
        assert volume["secret"] == {"secretName": "rallypoint", "defaultMode": 0o400}
        mounts = spec["containers"][0]["volumeMounts"]
        mount = next(one for one in mounts if one["name"] == volume["name"])
        assert mount == {
            "name": volume["name"],
            "mountPath": os.path.dirname(MOUNT),
            "readOnly": True,
        }


@pytest.mark.parametrize("name", KINDS)
def test_ranks_have_their_grace_before_the_pod_is_killed(name: str) -> None:
    pod = next(KINDS[name](read(name)))
    for spec in pod_specs(read(name)):
        assert spec["terminationGracePeriodSeconds"] > pod.asked().grace


@pytest.mark.parametrize("name", KINDS)
def test_jobs_are_tried_again_when_that_may_help(name: str) -> None:
    """Exit status 2 is of a command that would be wrong again, 75 and 143 of nodes that went."""
    text = (FOLDER / name).read_text("utf-8")
    if name not in ("job.yaml", "jobset.yaml", "trainjob.yaml"):
        assert "podFailurePolicy" not in text
        return
    policies = list(_found(read(name), "podFailurePolicy"))
    assert len(policies) == 1
    (spec,) = pod_specs(read(name))
    actions = {
        value: rule["action"]
        for rule in policies[0]["rules"]
        for value in rule.get("onExitCodes", {}).get("values", ())
    }
    assert actions == {2: "FailJob", 75: "Ignore", 143: "Ignore"}
    names = {
        rule["onExitCodes"]["containerName"]
        for rule in policies[0]["rules"]
        if "onExitCodes" in rule
    }
    assert names == {spec["containers"][0]["name"]}
    assert spec["restartPolicy"] == "Never"  # podFailurePolicy asks for it


def _found(manifest: Any, key: str) -> Iterator[Any]:
    if isinstance(manifest, dict):
        if key in manifest:
            yield manifest[key]
        for value in manifest.values():
            yield from _found(value, key)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from _found(value, key)


# --- schemas


@pytest.mark.parametrize("name", KINDS)
def test_kubernetes_takes_the_manifest(name: str) -> None:
    """Kinds of Kubernetes' own, and the pods of every kind, have no field that is unknown."""
    schemas = pytest.importorskip("kubernetes_validate")
    for manifest in read(name):
        if "x-k8s.io" not in manifest["apiVersion"] and "kubeflow" not in manifest["apiVersion"]:
            schemas.validate(manifest, KUBERNETES, strict=True)
    for spec in pod_specs(read(name)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        schemas.validate(pod, KUBERNETES, strict=True)
    for policy in _found(read(name), "podFailurePolicy"):
        (spec,) = pod_specs(read(name))
        whole = {"podFailurePolicy": policy, "template": {"spec": spec}}
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": whole}
        schemas.validate(made, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("name", "place", "kind"),
    [
        ("jobset.yaml", 0, "JobsetV1alpha2JobSet"),
        ("trainjob.yaml", 0, "TrainerV1alpha1TrainingRuntime"),
        ("trainjob.yaml", 1, "TrainerV1alpha1TrainJob"),
    ],
)
def test_kubeflow_trainer_takes_the_manifest(name: str, place: int, kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = read(name)[place]
    kept = getattr(models, kind).from_dict(manifest).to_dict()
    assert _lost(manifest, kept) == []


def _lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Return the places of what a model has not taken over: fields that its schema does not have."""
    if isinstance(given, dict):
        return [
            lost
            for key, value in given.items()
            for lost in (
                _lost(value, kept[key], f"{place}.{key}")
                if isinstance(kept, dict) and key in kept
                else [f"{place}.{key}"]
            )
        ]
    if isinstance(given, list):
        pairs = zip(given, kept, strict=True)
        return [
            lost
            for number, (one, other) in enumerate(pairs)
            for lost in _lost(one, other, f"{place}[{number}]")
        ]
    return [] if given == kept else [place]
