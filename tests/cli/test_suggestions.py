"""Lines that are refused, and the line to type instead."""

from __future__ import annotations

import pytest

from rallypoint.cli import parser, request
from rallypoint.errors import UsageError


def refused(line: str | list[str], **environ: str) -> UsageError:
    argv = line.split() if isinstance(line, str) else line
    with pytest.raises(UsageError) as refusal:
        request.read(parser.take_apart(argv, environ))
    return refusal.value


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--nprocs-per-node", "--nproc-per-node"),
        ("--n_proc_per_node", "--nproc-per-node"),
        ("--prelaod", "--preload"),
        ("--dryrun", "--dry-run"),
        ("--no_pyhton", "--no-python"),
        ("--nprocs", "--nproc-per-node"),
        ("--num_processes", "--nproc-per-node"),
        ("--zzz", ""),
    ],
)
def test_unknown_option_names_the_nearest(word: str, near: str) -> None:
    error = refused([word, "train.py"])
    assert error.code == "option-unknown"
    assert error.headline == f"rallypoint run has no option {word}" + (f"; the nearest is {near}" if near else "")


def test_unknown_option_shows_the_command_mended() -> None:
    error = refused(["--fresh", "--nproc-per-nod3=4", "train.py", "a b"])
    assert error.help[0] == ("use --nproc-per-node", "rallypoint run --fresh --nproc-per-node=4 train.py 'a b'")
    assert error.help[1][1] == "rallypoint run --fresh train.py 'a b' --nproc-per-nod3=4"


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("-np 4 train.py x", "rallypoint run -n 4 train.py x"),
        ("-np4 train.py", "rallypoint run -n 4 train.py"),
        ("--fresh -np=4 train.py", "rallypoint run --fresh -n 4 train.py"),
        ("-ppn 4 train.py", "rallypoint run --nproc-per-node 4 train.py"),
        ("-npernode 4 train.py", "rallypoint run --nproc-per-node 4 train.py"),
        ("-nproc_per_node=4 train.py", "rallypoint run --nproc-per-node=4 train.py"),
        ("-nproc 4 -nnodes 1 train.py", "rallypoint run --nproc-per-node 4 --nnodes 1 train.py"),
        ("-np 4 python3 -u train.py --lr 1", "PYTHONUNBUFFERED=1 rallypoint run -n 4 train.py --lr 1"),
        ("--no-python -np 4 python train.py", "rallypoint run --no-python -n 4 python train.py"),
        ("--hostfile hosts -n 2 train.py", "rallypoint run -n 2 train.py"),
        ("-H a,b -n 2 train.py", "rallypoint run -n 2 train.py"),
        ("--use_env --nproc_per_node=2 train.py -x", "rallypoint run --nproc_per_node=2 train.py -x"),
        ("--mca btl tcp --bind-to none -n 2 train.py", "rallypoint run -n 2 train.py"),
        ("-x LR=0.1 -x PATH -n 2 train.py", "LR=0.1 rallypoint run -n 2 train.py"),
        (
            "--multi_gpu --num_machines 1 --mixed_precision=fp16 --num_processes 2 train.py --resume",
            "ACCELERATE_MIXED_PRECISION=fp16 rallypoint run --nnodes 1 --nproc-per-node 2 train.py --resume",
        ),
        ("-n train.py --lr 1", "rallypoint run -n 4 train.py --lr 1"),
        ("--fresh --max-restarts train.py", "rallypoint run --fresh --max-restarts 3 train.py"),
        ("-n 2", "rallypoint run -n 2 train.py"),
        ("-n 2 -m", "rallypoint run -n 2 train.py"),
        ("-n 2 --no-python", "rallypoint run -n 2 --no-python ./program"),
        ("\u2013n 4 train.py", "rallypoint run -n 4 train.py"),
        ("-n 4 \u2014nproc\u2011per\u2011node=2 train.py --lr 1", "rallypoint run -n 4 --nproc-per-node=2 train.py --lr 1"),
        ("\u2013\u2013fresh train.py", "rallypoint run --fresh train.py"),
        ("--no-fresh -n 2 train.py", "rallypoint run -n 2 train.py"),
        ("--debug train.py", "rallypoint run --debug-rank 0 train.py"),
        ("--debug 1 train.py", "rallypoint run --debug-rank 1 train.py"),
        ("--ranks 4 train.py", "rallypoint run --nproc-per-node 4 train.py"),
        ("-p 29500 train.py", "rallypoint run train.py -p 29500"),
        ("-n 2 --epochs 3 train.py a", "rallypoint run -n 2 train.py a --epochs 3"),
        ("-n 2 -m --epochs 3 package.train", "rallypoint run train.py --epochs"),
    ],
)
def test_habits_from_elsewhere_get_the_whole_line(line: str, mended: str) -> None:
    error = refused(line.split())
    assert error.help[-1 if "--epochs" in line else 0][1] == mended


def test_a_name_is_not_near_for_its_dashes() -> None:
    assert "; the nearest is" not in refused(["--hosts-file", "x", "train.py"]).headline


def test_a_flag_is_not_the_nearest_of_its_opposite() -> None:
    error = refused(["--no-quiet", "train.py"])
    assert error.headline == "rallypoint run has no option --no-quiet: --quiet is off unless it is given"
    assert [line for _, line in error.help] == ["rallypoint run train.py", "rallypoint run train.py --no-quiet"]
    assert refused(["--no-fresh", "train.py", "--no-fresh"]).help[0] == ("leave it out", "rallypoint run train.py --no-fresh")


def test_an_option_and_its_value_in_one_word() -> None:
    error = refused(["--fresh", "--nproc-per-node 4", "train.py", "x y"])
    assert error.headline == "--nproc-per-node 4 is one word with a blank in it, and no option"
    assert error.help == (("give each word of it by itself", "rallypoint run --fresh --nproc-per-node 4 train.py 'x y'"),)
    assert request.read(parser.take_apart(["-- 4.py"], {})).program.target == "-- 4.py"


def test_a_program_may_begin_with_a_dash_of_any_kind_behind_two_hyphens() -> None:
    assert request.read(parser.take_apart(["--", "\u2013n.py"], {})).program.target == "\u2013n.py"
    assert request.read(parser.take_apart(["train.py", "\u2013n"], {})).program.args == ("\u2013n",)
