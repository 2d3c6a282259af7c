"""Lines that are refused, and the line to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.cli import args, run_options
from rallypoint.errors import UsageError


def refused(line: str | list[str], **environ: str) -> UsageError:
    argv = line.split() if isinstance(line, str) else line
    with pytest.raises(UsageError) as refusal:
        run_options.read(args.take_apart(argv, environ))
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
        ("--nporc", "--nproc-per-node"),  # an abbreviation that torchrun takes, mistyped
        ("--num_processes", "--nproc-per-node"),
        ("--zzz", ""),
    ],
)
def test_unknown_option_names_the_nearest(word: str, near: str) -> None:
    error = refused([word, "train.py"])
    assert error.code == "option-unknown"
    assert error.headline == f"rallypoint run has no option {word}" + (
        f"; the nearest is {near}" if near else ""
    )


def test_unknown_option_shows_the_command_mended() -> None:
    error = refused(["--fresh", "--nproc-per-nod3=4", "train.py", "a b"])
    assert error.help[0] == (
        "use --nproc-per-node",
        "rallypoint run --fresh --nproc-per-node=4 train.py 'a b'",
    )
    assert error.help[1][1] == "rallypoint run train.py --nproc-per-nod3=4"


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("-np 4 train.py x", "rallypoint run -n 4 train.py x"),
        ("--fresh -np=4 train.py", "rallypoint run --fresh -n=4 train.py"),
        ("-ppn 4 train.py", "rallypoint run --nproc-per-node 4 train.py"),
        ("-npernode 4 train.py", "rallypoint run --nproc-per-node 4 train.py"),
        ("-nproc_per_node=4 train.py", "rallypoint run --nproc-per-node=4 train.py"),
        ("--no-python -np 4 python train.py", "rallypoint run --no-python -n 4 python train.py"),
        ("-n 2", "rallypoint run -n 2 train.py"),
        ("-n 2 -m", "rallypoint run -n 2 train.py"),
        ("-n 2 --no-python", "rallypoint run -n 2 --no-python ./program"),
        ("--debug 1 train.py", "rallypoint run --debug-rank 1 train.py"),
        ("--ranks 4 train.py", "rallypoint run --nproc-per-node 4 train.py"),
    ],
)
def test_habits_from_elsewhere_get_the_whole_line(line: str, mended: str) -> None:
    error = refused(line.split())
    assert error.help[0][1] == mended


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--hostfile hosts train.py", "it starts the ranks of this machine alone"),
        ("--use_env train.py", "LOCAL_RANK is always in the environment"),
        ("--mca btl tcp train.py", "there is no MPI in it"),
        ("-x LR=0.1 train.py", "every rank has the environment of this shell"),
        ("-u train.py", "that is an option of Python's"),
    ],
)
def test_an_option_of_another_launcher_says_why_it_is_not_here(line: str, reason: str) -> None:
    error = refused(line)
    assert error.headline == f"rallypoint run has no option {line.split()[0]}: {reason}"
    assert error.help == (("leave it out", ""),)


@pytest.mark.parametrize(
    ("line", "headline", "example"),
    [
        ("-n train.py --lr 1", "-n lacks its value, N: it got train.py", "-n 4"),
        (
            "--fresh --max-restarts train.py",
            "--max-restarts lacks its value, N: it got train.py",
            "--max-restarts 3",
        ),
    ],
)
def test_an_option_that_took_the_program_for_its_value(
    line: str, headline: str, example: str
) -> None:
    error = refused(line)
    assert (error.headline, error.help) == (headline, (("give, for example", example),))


def test_an_option_that_is_not_ours_may_be_the_programs() -> None:
    help = ("put the program's own options after its name", "rallypoint run train.py --epochs")
    assert refused("-n 2 --epochs 3 train.py a").help == (help,)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("-n 2 -c print(1)", "rallypoint run --no-python python -c ..."),
        ("--version", "rallypoint --version"),
    ],
)
def test_an_option_that_is_hardly_the_programs(line: str, instead: str) -> None:
    """Both were to be put behind the program's name, and nothing else."""
    assert refused(line).help[0][1] == instead


@pytest.mark.parametrize(
    ("target", "there", "lines"),
    [
        ("pkg.train.py", "", ["-m pkg.train"]),
        ("pkg.train.py", "pkg.train.py", ["-m pkg.train", "pkg.train.py"]),
        ("train.py", "train.py", ["-m train", "train.py"]),
        ("pkg/train.py", "", ["-m pkg.train"]),
        ("my-train.py", "", ["my-train.py"]),
        ("../train.py", "../train.py", ["-m train", "../train.py"]),
    ],
)
def test_a_module_with_the_ending_of_a_file(
    target: str, there: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was offered was not there."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    if there:
        Path(there).touch()
    error = refused(["-m", target, "x"])
    assert [one[1] for one in error.help] == [f"rallypoint run {line} x" for line in lines]


def test_a_name_is_not_near_for_its_dashes() -> None:
    assert "; the nearest is" not in refused(["--hosts-file", "x", "train.py"]).headline


def test_a_flag_is_not_the_nearest_of_its_opposite() -> None:
    error = refused(["--no-quiet", "train.py"])
    assert (
        error.headline
        == "rallypoint run has no option --no-quiet: --quiet is off unless it is given"
    )
    assert error.help == (("leave it out", ""),)


def test_an_option_and_its_value_in_one_word() -> None:
    error = refused(["--fresh", "--nproc-per-node 4", "train.py", "x y"])
    assert error.headline == "--nproc-per-node 4 is one word with a blank in it, and no option"
    assert error.help == (("give each word of it by itself", "--nproc-per-node 4"),)
    assert run_options.read(args.take_apart(["-- 4.py"], {})).program.target == "-- 4.py"


@pytest.mark.parametrize(
    "word", ["\u2013n", "\u2014nproc\u2011per\u2011node=2", "\u2013\u2013fresh"]
)
def test_a_dash_of_a_word_processor_is_named(word: str) -> None:
    error = refused([word, "4", "train.py"])
    assert error.code == "option-unknown"
    assert error.headline.startswith(f"{word} begins with a dash (U+201")


def test_a_program_may_begin_with_a_dash_of_any_kind_behind_two_hyphens() -> None:
    assert (
        run_options.read(args.take_apart(["--", "\u2013n.py"], {})).program.target == "\u2013n.py"
    )
    assert run_options.read(args.take_apart(["train.py", "\u2013n"], {})).program.args == (
        "\u2013n",
    )
