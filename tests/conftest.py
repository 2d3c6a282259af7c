"""What every test gets: a place of its own for run folders, and a skip with its reason where the
machine lacks something.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

from rallypoint.host import devices

from .nodes import netns
from .one_process import OneProcess
from .python_path import TORCH_IN_PARTS, WITHOUT_TORCH, python_path

# An example that takes long, or examples that are slowly found, tell of the machine, not of us.
# What fails prints how to try it again. The suite tries the same examples each time;
# `--hypothesis-profile search` has pytest look for others.
settings.register_profile(
    "search",
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "rallypoint", settings.get_profile("search"), derandomize=True, database=None
)
settings.load_profile("rallypoint")


@cache
def _no_compiler() -> str:
    command = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(command[0]) is None:
        return f"no C compiler: {command[0]} was not found"
    done = subprocess.run([*command, "--version"], capture_output=True, check=False)
    return (
        ""
        if done.returncode == 0
        else f"no C compiler: {shlex.join(command)} --version ends with status {done.returncode}"
    )


@cache
def _no_gpu() -> str:
    return devices.missing(
        devices.find(os.environ, devices.look())
    )  # by files, and by what the installed torch was built for


@cache
def _no_root() -> str:
    return "" if os.geteuid() == 0 else "not root"


MISSING: dict[str, Callable[[], str]] = {
    "compiler": _no_compiler,
    "gpu": _no_gpu,
    "nodes": cache(netns.why_not),
    "root": _no_root,
}


gc.disable()  # while tests are collected: a quarter of that was the collector's, in each process


def pytest_collection_finish() -> None:
    """Keep the collector from the 400,000 objects that all the tests are: a full round of it took
    0.2 s.
    """
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in MISSING.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            if marker == "nodes" and netns.required():
                pytest.fail(reason)
            pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _signals_as_usual() -> None:
    """A suite started in the background, or with nohup, ignores SIGINT and SIGHUP, and so would the
    launchers that its tests signal.
    """
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run folders of the jobs that tests start go here, not among the user's own. A variable that
    hides faults is taken away.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(
            "PYTHONUNBUFFERED", raising=False
        )  # of containers: with it output is never lost, nor written twice
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A test that imports torch._dynamo in this process, as many of torch's parts do, would leave
    TORCHINDUCTOR_CACHE_DIR to the jobs of every later test.
    """
    inside: dict[bytes, bytes] = vars(os.environ)["_data"]
    before = inside.copy()  # dict(os.environ) decodes each: a tenth of what a small test took
    yield
    for name in inside.keys() - before.keys() - {b"PYTEST_CURRENT_TEST"}:
        del os.environb[name]
    for name, value in before.items():
        if inside.get(name) != value:
            os.environb[name] = value


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start jobs whose programs need no torch without importing it; see `without_torch/torch`."""
    monkeypatch.setenv("PYTHONPATH", python_path(WITHOUT_TORCH))


def _torch_in_parts(patch: pytest.MonkeyPatch) -> None:
    """Do nothing for scripts/matrix: there, torch is imported as users import it."""
    if not os.environ.get("RALLYPOINT_WHOLE_TORCH"):
        patch.setenv("PYTHONPATH", python_path(TORCH_IN_PARTS))


@pytest.fixture
def torch_in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start jobs whose torch loads its least used parts when one is used; see
    `torch_in_parts/sitecustomize.py`. It does nothing beside `without_torch`.
    """
    if "without_torch" not in request.fixturenames:
        _torch_in_parts(monkeypatch)


@pytest.fixture(scope="module")
def torch_in_parts_of_module() -> Iterator[None]:
    """Do what `torch_in_parts` does, for the fixtures of a module: they are made before those of a
    test.
    """
    with pytest.MonkeyPatch.context() as patch:
        _torch_in_parts(patch)
        yield


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    """Run programs that call `launch`, or import torch, one after the other in one process."""
    with OneProcess(tmp_path_factory.mktemp("programs")) as process:
        yield process
