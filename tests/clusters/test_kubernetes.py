"""Kubernetes: the environments of its pods, as the controllers make them, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from .pods import KUBELET, Pod

BEHIND_29500 = tuple(range(29508, 29500, -1))

TRAIN_JOB = Pod(  # pkg/runtime/framework/plugins/torch of kubeflow/trainer; the rest is JobSet's
    "digits-node-0-1",
    {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": "1",
    },
    "digits",
)
PYTORCH_JOB = (
    Pod(  # pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator 1.6 and later
        "digits-worker-0",
        {
            "PYTHONUNBUFFERED": "1",
            "MASTER_PORT": "23456",
            "MASTER_ADDR": "digits-master-0",
            "WORLD_SIZE": "8",
            "RANK": "1",
            "PET_NPROC_PER_NODE": "4",
            "PET_NODE_RANK": "1",
            "PET_NNODES": "2",
        },
    )
)
OLD_PYTORCH_JOB = Pod(  # training-operator before it knew torchrun: a pod is a rank
    "digits-worker-0",
    {
        "PYTHONUNBUFFERED": "0",
        "MASTER_PORT": "23456",
        "MASTER_ADDR": "digits-master-0",
        "WORLD_SIZE": "2",
        "RANK": "1",
    },
)
LEADER_WORKER_SET = Pod(  # pkg/utils/pod of kubernetes-sigs/lws
    "digits-0-1",
    {
        "LWS_LEADER_ADDRESS": "digits-0.digits.team",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    },
    "digits",
)
INDEXED_JOB = Pod("digits-1", {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}, "digits-pods")
JOB_SET = Pod("digits-node-0-1", {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}, "digits")
STATEFUL_SET = Pod("digits-1", {"PET_NNODES": "2"}, "digits-pods")

LEAD = "digits-0.digits-pods.team.svc.cluster.local"

PODS = {
    "TrainJob": (TRAIN_JOB, (2, 1, 4, "digits-node-0-0.digits", BEHIND_29500)),
    "PyTorchJob": (PYTORCH_JOB, (2, 1, 4, "digits-master-0", BEHIND_29500)),
    "old PyTorchJob": (OLD_PYTORCH_JOB, (2, 1, None, "digits-master-0", BEHIND_29500)),
    "LeaderWorkerSet": (LEADER_WORKER_SET, (2, 1, None, "digits-0.digits.team", BEHIND_29500)),
    "indexed Job": (INDEXED_JOB, (2, 1, None, LEAD, BEHIND_29500)),
    "JobSet": (
        JOB_SET,
        (2, 1, None, "digits-node-0-0.digits.team.svc.cluster.local", BEHIND_29500),
    ),
    "StatefulSet": (STATEFUL_SET, (2, 1, None, LEAD, BEHIND_29500)),
}


@pytest.mark.parametrize(("pod", "world"), PODS.values(), ids=PODS)
def test_each_kind_of_job_is_planned_without_flags(pod: Pod, world: tuple[object, ...]) -> None:
    assert pod.world() == world
    wanted = pod.asked()
    assert wanted.notes == ()
    assert wanted.cluster is not None
    assert wanted.cluster.name == "Kubernetes"
    assert wanted.nodes is not None
    assert wanted.nodes.job.startswith("digits")


_SAME_WITHOUT = {
    ("TrainJob", "PET_MASTER_PORT"),  # 29500 is torchrun's own
    ("TrainJob", "JOB_COMPLETION_INDEX"),  # PET_NODE_RANK says it
    ("PyTorchJob", "MASTER_PORT"),
    ("PyTorchJob", "RANK"),
    ("PyTorchJob", "PET_NODE_RANK"),
    ("PyTorchJob", "WORLD_SIZE"),
    ("PyTorchJob", "PET_NPROC_PER_NODE"),  # WORLD_SIZE / PET_NNODES
    ("old PyTorchJob", "MASTER_PORT"),
    ("LeaderWorkerSet", "LWS_WORKER_INDEX"),  # as before version 0.6: from the host name
    ("indexed Job", "JOB_COMPLETION_INDEX"),  # the host name has it, too
    ("JobSet", "JOB_COMPLETION_INDEX"),
}
"""Variables that may be missing: another says the same."""

_UNKNOWN_WITHOUT = {
    # torchrun's own rule: one rank
    ("TrainJob", "PET_NPROC_PER_NODE"): (2, 1, None, "digits-node-0-0.digits", BEHIND_29500),
    # whoever has that address leads
    ("TrainJob", "PET_NODE_RANK"): (2, None, 4, "digits-node-0-0.digits", BEHIND_29500),
    # the name of node 0 comes from this pod's own: the whole of it
    ("TrainJob", "PET_MASTER_ADDR"): (
        2,
        1,
        4,
        "digits-node-0-0.digits.team.svc.cluster.local",
        BEHIND_29500,
    ),
}
"""Variables without which less is told, and nothing wrong."""

_TELLING = [
    (kind, name)
    for kind, (pod, _) in PODS.items()
    for name in pod.environ
    if name not in (*KUBELET, "HOSTNAME", "PYTHONUNBUFFERED")
]


@pytest.mark.parametrize(("kind", "name"), _TELLING)
def test_one_missing_variable_is_an_error_or_changes_nothing(kind: str, name: str) -> None:
    pod, world = PODS[kind]
    if (kind, name) in _SAME_WITHOUT:
        assert pod.world(without=name) == world
    elif (kind, name) in _UNKNOWN_WITHOUT:
        assert pod.world(without=name) == _UNKNOWN_WITHOUT[kind, name]
    else:
        error = pod.refused(without=name)
        assert error.code == "cluster-unclear"
        assert name in error.headline or name in str(error.why)


@pytest.mark.parametrize(("kind", "name"), _TELLING)
def test_one_empty_variable_is_an_error_or_changes_nothing(kind: str, name: str) -> None:
    """As where a manifest takes a value from a ConfigMap that does not have it."""
    pod, world = PODS[kind]
    changed = pod.changed(name, "")
    if changed.complaint() is None:
        assert changed.world() in (world, _UNKNOWN_WITHOUT.get((kind, name)))
    else:
        assert name in changed.refused().headline


@pytest.mark.parametrize("kind", ["indexed Job", "JobSet", "StatefulSet"])
def test_a_job_without_a_count_is_told_the_line_for_its_manifest(kind: str) -> None:
    """With a guess of one node every pod would train alone, and all would say that they did well."""
    pod, world = PODS[kind]
    error = pod.refused(without="PET_NNODES")
    assert error.code == "cluster-unclear"
    assert '- {name: PET_NNODES, value: "2"}' in [command for _, command in error.help]
    assert pod.world("--nnodes 2", without="PET_NNODES") == world
    assert pod.world("--nnodes 1", without="PET_NNODES") == (1, 0, None)


def test_pod_0_takes_its_own_name() -> None:
    pod = Pod("digits-0", {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2"}, "digits-pods")
    assert pod.world() == (2, 0, None, LEAD, BEHIND_29500)


def test_a_job_without_a_service_is_told_so() -> None:
    error = Pod("digits-1", {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}).refused()
    assert error.code == "cluster-unclear"
    assert "subdomain" in error.headline


def test_a_pod_in_the_network_of_its_host_is_told_to_name_node_0() -> None:
    """With hostNetwork a pod has its machine's name: the number in gpu-7 is not the pod's."""
    environ = {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}
    pod = Pod("gpu-7", environ, "digits-pods")
    assert pod.refused().code == "cluster-unclear"
    named = Pod("gpu-7", {**environ, "PET_MASTER_ADDR": "digits-0.digits-pods"}, "digits-pods")
    assert named.world()[3] == "digits-0.digits-pods"


def test_a_rank_that_the_manifest_gives_names_no_other_pod() -> None:
    """A JobSet with one pod in each of its jobs: all have the number 0, and a label has the job's."""
    environ = {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
    pod = Pod("digits-node-1-0", environ, "digits")
    assert pod.refused().code == "cluster-unclear"
    named = {**environ, "PET_MASTER_ADDR": "digits-node-0-0.digits"}
    world = Pod("digits-node-1-0", named, "digits").world()
    assert world == (2, 1, None, "digits-node-0-0.digits", BEHIND_29500)


def test_a_train_job_of_one_node_needs_no_name() -> None:
    """The name of node 0, which the DNS has seconds after the pod, was taken for another machine's."""
    environ = {**TRAIN_JOB.environ, "PET_NNODES": "1", "PET_NODE_RANK": "0"}
    pod = Pod("digits-node-0-0", {**environ, "JOB_COMPLETION_INDEX": "0"}, "digits")
    wanted = pod.asked()
    assert (wanted.nodes, wanted.master_addr, wanted.nproc) == (None, "", 4)


def test_world_size_of_a_pytorch_job_that_may_count_ranks_is_not_guessed() -> None:
    error = PYTORCH_JOB.refused(without="PET_NNODES")
    assert error.code == "cluster-unclear"
    assert PYTORCH_JOB.world("--nnodes 2", without="PET_NNODES")[:2] == (2, 1)


def test_the_master_of_an_old_pytorch_job_is_told_to_be_localhost() -> None:
    environ = {**OLD_PYTORCH_JOB.environ, "RANK": "0", "MASTER_ADDR": "localhost"}
    master = Pod("digits-master-0", environ)
    assert master.world() == (2, 0, None, "digits-master-0", BEHIND_29500)
    assert Pod("digits-worker-0", {**environ, "RANK": "1"}).refused().code == "cluster-unclear"


def test_an_old_leader_worker_set_tells_the_leader_by_its_name() -> None:
    pod = Pod(
        "digits-0", {"LWS_LEADER_ADDRESS": "digits-0.digits.team", "LWS_GROUP_SIZE": "2"}, "digits"
    )
    assert pod.world()[:2] == (2, 0)


@pytest.mark.parametrize(
    ("host", "environ", "domain"),
    [
        ("notebook-0", {}, ""),  # a StatefulSet without a service: Kubeflow's notebooks
        ("trainer-7d9f8b6c5-x2x4z", {}, ""),  # a Deployment
        ("gpu-7", {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, ""),
        # a rank of torchrun's that starts a job of its own
        ("digits-0", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}, ""),
    ],
)
def test_a_pod_that_is_none_of_several_is_one_node(
    host: str, environ: Mapping[str, str], domain: str
) -> None:
    pod = Pod(host, environ, domain)
    assert pod.look() is None
    assert pod.world() == (1, 0, None)


@pytest.mark.parametrize(
    ("pod", "name", "text"),
    [
        (INDEXED_JOB, "JOB_COMPLETION_INDEX", "first"),
        (LEADER_WORKER_SET, "LWS_GROUP_SIZE", ""),
        (OLD_PYTORCH_JOB, "WORLD_SIZE", "-2"),
    ],
)
def test_a_variable_that_is_no_number_is_named(pod: Pod, name: str, text: str) -> None:
    error = pod.changed(name, text).refused()
    assert error.code == "cluster-unclear"
    assert name in error.headline
    assert any("PET_" in command for _, command in error.help)


def test_the_numbers_of_a_job_fit_together() -> None:
    pod = Pod("digits-3", {**INDEXED_JOB.environ, "JOB_COMPLETION_INDEX": "3"}, "digits-pods")
    assert pod.refused().code == "cluster-unclear"


def test_a_secret_is_asked_for_in_the_words_of_kubernetes() -> None:
    found = INDEXED_JOB.look()
    assert found is not None
    assert found.own_homes
    assert any("kubectl create secret" in command for _, command in found.secret_help)
