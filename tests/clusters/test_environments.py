"""Recorded environments of launchers that clusters have started: the right plan, and with any one
variable missing an error or the same right plan, never another world.

A file of `environments/` has a job: `common` variables and those of each launcher, the `files` that
it reads and its open descriptors (`fds`), and what is right: the number of `nodes`, the `place` where
they find each other (host, folder or exchange), and each launcher's `node`, `slots` and `local`.
`kept` are variables that no cluster sets, and none is without.
`but` has what is right as well when a certain variable is missing: another way to the same place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli import args, run_options
from rallypoint.clusters.detect import detect
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options

RECORDS = sorted((Path(__file__).parent / "environments").glob("*.json"))


class RecordedFiles:
    """What a launcher of a record finds on its machine."""

    def __init__(self, launcher: Mapping[str, Any]) -> None:
        self._files: dict[str, str] = launcher.get("files", {})
        self._fds: list[int] = launcher.get("fds", [])
        self._host: str = launcher.get("host", "node0")

    def text(self, path: str) -> str:
        return self._files.get(path, "")

    def is_open(self, fd: int) -> bool:
        return fd in self._fds

    def host(self) -> str:
        return self._host


def wanted(launcher: Mapping[str, Any], environ: Mapping[str, str]) -> Options:
    environ = {**launcher.get("kept", {}), **environ}
    line = args.take_apart(["train.py"], environ)
    return run_options.read(line, lambda: detect(environ, RecordedFiles(launcher)))


def world(options: Options) -> dict[str, Any]:
    """What makes a launcher part of one world and no other."""
    nodes, cluster = options.nodes, options.cluster
    return {
        "nodes": nodes.count if nodes else 1,
        "node": nodes.rank if nodes else 0,
        "place": (nodes.exchange or nodes.folder or nodes.host) if nodes else "",
        "slots": options.nproc,
        "local": list(cluster.local) if cluster and cluster.local else None,
    }


def outcome(launcher: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any] | str:
    """Return the world that a launcher would be in, or the code of the error that it ends with.

    A lead at 127.0.0.1, torchrun's own default, waits for the other hosts in vain.
    """
    try:
        found = world(wanted(launcher, environ))
    except UsageError as error:
        return error.code
    return "join-timeout" if (found["nodes"], found["place"]) == (2, "127.0.0.1") else found


def launchers() -> list[Any]:
    found = []
    for path in RECORDS:
        record = json.loads(path.read_text())
        for number, launcher in enumerate(record["launchers"]):
            environ = {**record.get("common", {}), **launcher.get("environ", {})}
            right = {
                "nodes": record["nodes"],
                "node": launcher.get("node", number),
                "place": record.get("place", ""),
                "slots": launcher.get("slots", record.get("slots")),
                "local": launcher.get("local"),
            }
            launcher = {"but": record.get("but", {}), **launcher}
            name = f"{path.stem}-{number}"
            found.append(pytest.param(record["cluster"], launcher, environ, right, id=name))
    return found


LAUNCHERS = pytest.mark.parametrize(("cluster", "launcher", "environ", "right"), launchers())


@LAUNCHERS
def test_a_recorded_environment_plans_right(
    cluster: str, launcher: dict[str, Any], environ: dict[str, str], right: dict[str, Any]
) -> None:
    options = wanted(launcher, environ)
    assert world(options) == right
    assert options.cluster is not None
    assert options.cluster.name == cluster
    assert options.cluster.because, "--dry-run says nothing of where this comes from"


ERRORS = ("cluster-unclear", "join-timeout")


def wrong_worlds(
    launcher: dict[str, Any],
    right: dict[str, Any],
    environs: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Return what is neither refused nor right, by the variable that was changed."""
    found = {name: outcome(launcher, environ) for name, environ in environs.items()}
    return {
        name: one
        for name, one in found.items()
        if one not in (*ERRORS, right, {**right, **launcher["but"].get(name, {})})
    }


@LAUNCHERS
def test_a_missing_variable_never_makes_another_world(
    cluster: str, launcher: dict[str, Any], environ: dict[str, str], right: dict[str, Any]
) -> None:
    environs = {
        missing: {name: environ[name] for name in environ if name != missing} for missing in environ
    }
    assert wrong_worlds(launcher, right, environs) == {}, cluster


@LAUNCHERS
def test_a_variable_without_a_value_never_makes_another_world(
    cluster: str, launcher: dict[str, Any], environ: dict[str, str], right: dict[str, Any]
) -> None:
    """A manifest or a shell script may set a variable to nothing."""
    environs = {empty: {**environ, empty: ""} for empty in environ}
    found = wrong_worlds(launcher, right, environs)
    assert {name: one for name, one in found.items() if one != "usage"} == {}, cluster
