"""Programs that were written for torchrun run unchanged."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import Run
from .job import SCRIPTS, Result

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

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


@pytest.mark.usefixtures("without_compiler")
def test_plain_ddp(run: Run) -> None:
    result = run("-n", "2", "plain_ddp.py")
    assert (result.rc, complaints(result)) == (0, []), result.everything
    for rank in range(2):
        assert result.of(rank) == [f"rank {rank} of 2, local rank {rank}: same weights"], (
            result.everything
        )


def test_fsdp(run: Run) -> None:
    """The parameters are spread over the ranks, and the model learns."""
    # Imported once, and not in each rank.
    result = run("-n", "2", "--preload", "torch._dynamo", "fsdp.py")
    said = ["FSDP1: True", "FSDP2: True"]
    assert (result.rc, result.of(0), result.of(1)) == (0, said, said), result.everything


# A new interpreter reads and writes no file of this in another way (test_store_errors.py fails in one).
@pytest.mark.parametrize("way", [(), ("--plain",)], ids=["template", "plain"])
def test_what_record_wrote_is_read(run: Run, way: tuple[str, ...]) -> None:
    """The program shows its exception to nobody and leaves with code 1: only its error file says
    why.
    """
    result = run(*way, "-n", "2", "recorded.py", "silent")
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


def test_record_beside_an_exception_that_leaves(run: Run) -> None:
    result = run("-n", "2", "recorded.py")
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    assert result.report.startswith(
        "error[rank-raised]: rank 1 raised OverflowError: loss is infinite\n"
    ), result.everything
    assert len(result.err.splitlines()) <= 25, result.everything


@needs("accelerate")
@pytest.mark.slow
def test_accelerate(run: Run) -> None:
    result = run("-n", "2", "with_accelerate.py")
    assert (result.rc, complaints(result)) == (0, []), result.everything
    for rank in range(2):
        assert result.of(rank) == [f"process {rank} of 2: 4 batches, MULTI_CPU"], result.everything


@needs("lightning")
@pytest.mark.slow
def test_lightning(run: Run, tmp_path: Path) -> None:
    # Imported once, and not in each rank.
    result = run("-n", "2", "--preload", "lightning", "with_lightning.py", tmp_path / "lightning")
    assert result.rc == 0, result.everything
    for rank in range(2):
        assert result.of(rank)[-1] == f"rank {rank} of 2: 4 steps, TorchElasticEnvironment", (
            result.everything
        )
    assert not result.codes, result.everything


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.skipif(
    " " in sys.prefix,
    reason="torch.compile does not quote torch's folder for the linker: it fails in one with a space",
)
def test_compile_in_every_rank(run: Run, tmp_path: Path) -> None:
    """Its pool of compiling processes is started from the rank, and goes with it.

    Nothing is in the cache. Neither torch's headers are compiled beforehand, nor a program for each
    vector unit that the processor may have: they were two thirds of this.
    """
    compiler = "torch._inductor.compile_fx"  # imported once, and not in each rank
    result = run(
        "-n",
        "2",
        "--preload",
        compiler,
        SCRIPTS / "compiled.py",
        env={
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            "TORCHINDUCTOR_VEC_ISA_OK": "0",
        },
    )
    assert (result.rc, result.of(0), result.of(1)) == (0, ["128.0", "3"], ["128.0"]), (
        result.everything
    )
    assert complaints(result) == [], result.everything
