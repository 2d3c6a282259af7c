"""Programs that were written for torchrun run unchanged."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import Run, RunWarm
from .job import DEADLINE, SCRIPTS, Result, run_job

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("torch_in_parts"),
    pytest.mark.timeout(3 * DEADLINE),
]

EXAMPLES = Path(__file__).parents[2] / "examples"


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed"
    )


OF_THE_MACHINE = re.compile(
    r"rallypoint: \S+ was imported 2 times, .* s each: --preload \S+"
    r"|.* No CUDA runtime is found, using CUDA_HOME=.*"  # a build for CUDA, nvcc, and no GPU
)


def complaints(result: Result) -> list[str]:
    """What was written to stderr, less what the machine decides: how slow imports are, and what
    torch misses of CUDA.
    """
    return [line for line in result.err.splitlines() if not OF_THE_MACHINE.fullmatch(line)]


CAN_COMPILE = any(map(shutil.which, ("c++", "g++", "clang++")))
SPACED = " " in sys.prefix
"""torch.compile does not quote torch's folder for the linker: it fails in one with a space."""


@pytest.fixture(scope="module")
def in_turn(torch_in_parts_of_module: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Run the programs that need torch._dynamo one after the other in one job, which imports it
    once: that is most of what they cost.

    Nothing is in the cache of what is compiled. Neither torch's headers are compiled beforehand,
    nor a program for each vector unit that the processor may have: they were two thirds of it.
    """
    folder = tmp_path_factory.mktemp("in_turn")
    programs, preload = ["fsdp.py"], ["--preload", "torch._dynamo"]
    if importlib.util.find_spec("accelerate"):
        programs.append("with_accelerate.py")
    if CAN_COMPILE and not SPACED:
        programs.append("compiled.py")
        preload += ["--preload", "torch._inductor.compile_fx"]
    if importlib.util.find_spec("lightning"):
        programs.append(f"with_lightning.py {shlex.quote(str(folder / 'lightning'))}")
        preload += ["--preload", "lightning"]
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    return run_job(
        ["-n", "2", *preload, "in_turn.py", *programs],
        state=folder / "state",
        env=env,
        timeout=2 * DEADLINE,
    )


def complaints_of(result: Result, program: str, rank: int) -> list[str]:
    """What one of the programs has written to stderr in this rank."""
    lines = [
        line.removeprefix(f"[{rank}] ")
        for line in complaints(result)
        if line.startswith(f"[{rank}] ")
    ]
    after = lines[lines.index(f"-- {program}") + 1 :]
    return list(itertools.takewhile(lambda line: not line.startswith("-- "), after))


@pytest.mark.usefixtures("without_compiler")
def test_plain_ddp(run: Run) -> None:
    result = run("-n", "2", "plain_ddp.py")
    assert (result.rc, complaints(result)) == (0, []), result.everything
    for rank in range(2):
        assert result.of(rank) == [f"rank {rank} of 2, local rank {rank}: same weights"], (
            result.everything
        )


@pytest.mark.slow
def test_fsdp(in_turn: Result) -> None:
    """The parameters are spread over the ranks, and the model learns."""
    assert in_turn.rc == 0, in_turn.everything
    for rank in range(2):
        assert in_turn.of(rank)[:2] == ["FSDP1: True", "FSDP2: True"], in_turn.everything


# A new interpreter reads and writes no file of this in another way (test_store_errors.py fails in one).
def test_what_record_wrote_is_read(run_warm: RunWarm) -> None:
    """The program shows its exception to nobody and leaves with code 1: only its error file says
    why.
    """
    record_was_read(run_warm(SCRIPTS / "recorded.py", "silent"))


def test_what_record_wrote_is_read_of_a_plain_job(run: Run) -> None:
    record_was_read(run("--plain", "-n", "2", "recorded.py", "silent"))


def record_was_read(result: Result) -> None:
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert result.report.startswith(
        "error[rank-raised]: rank 1 raised OverflowError: loss is infinite\n"
    ), result.everything
    assert "  where  recorded.py:12 in main" in result.report, result.everything
    assert "OverflowError" not in (result.run_dir / "rank1.log").read_text()
    assert (
        '"OverflowError: loss is infinite"'
        in (result.run_dir / "rank1-attempt0-error.json").read_text()
    )


def test_record_beside_an_exception_that_leaves(run_warm: RunWarm) -> None:
    result = run_warm(SCRIPTS / "recorded.py")
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert result.report.startswith(
        "error[rank-raised]: rank 1 raised OverflowError: loss is infinite\n"
    ), result.everything
    assert len(result.err.splitlines()) <= 25, result.everything


@needs("accelerate")
@pytest.mark.slow
def test_accelerate(in_turn: Result) -> None:
    assert in_turn.rc == 0, in_turn.everything
    for rank in range(2):
        assert f"process {rank} of 2: 4 batches, MULTI_CPU" in in_turn.of(rank), in_turn.everything
        assert complaints_of(in_turn, "with_accelerate.py", rank) == [], in_turn.everything


@needs("lightning")
@pytest.mark.slow
def test_lightning(in_turn: Result) -> None:
    assert in_turn.rc == 0, in_turn.everything
    for rank in range(2):
        assert in_turn.of(rank)[-1] == f"rank {rank} of 2: 4 steps, TorchElasticEnvironment", (
            in_turn.everything
        )
    assert not in_turn.codes, in_turn.everything


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="torch.compile needs a C++ compiler")
@pytest.mark.skipif(SPACED, reason="torch.compile fails where torch's folder has a space")
def test_compile_in_every_rank(in_turn: Result) -> None:
    """Its pool of compiling processes is started from the rank, and goes with it."""
    assert in_turn.rc == 0, in_turn.everything
    for rank in range(2):
        assert "128.0" in in_turn.of(rank), in_turn.everything
        assert complaints_of(in_turn, "compiled.py", rank) == [], in_turn.everything
    assert "3" in in_turn.of(0), in_turn.everything
    assert "left a process" not in in_turn.err, in_turn.everything
