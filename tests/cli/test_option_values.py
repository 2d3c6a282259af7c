"""What an option takes, and what is said of a value that it does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.launcher.sizes import LONGEST_WAIT

from .lines import parse, refused


@pytest.mark.parametrize(
    ("line", "nproc"),
    [
        ("-n4", 4),
        ("-n 4", 4),
        ("-n=4", 4),
        ("--nproc-per-node=4", 4),
        ("-n auto", "auto"),
        ("-n cpu", "cpu"),
        ("-n gpu", "gpu"),
        ("", None),
    ],
)
def test_number_of_ranks(line: str, nproc: int | str | None) -> None:
    assert parse(f"{line} train.py").nproc == nproc


def test_ours() -> None:
    wanted = parse(
        "-n 2 --preload a,b.c --preload a,d --port-range 20000-20100 --grace 1.5 --on-failure continue --debug-rank 1"
        " --run-dir out --plain --quiet --error-format json --dry-run train.py"
    )
    assert wanted.preload == ("a", "b.c", "d")
    assert (wanted.port_range, wanted.grace, wanted.on_failure, wanted.debug_rank) == (
        (20000, 20100),
        1.5,
        "continue",
        1,
    )
    assert (wanted.run_dir, wanted.plain, wanted.quiet, wanted.error_format, wanted.dry_run) == (
        "out",
        True,
        True,
        "json",
        True,
    )


def test_a_time_beyond_what_the_kernel_waits_is_the_longest() -> None:
    """A grace of 1e9 s, for one without an end, was an OverflowError when the job ended."""
    wanted = parse("--grace 1e9 --stall 1e300 train.py")
    assert (wanted.grace, wanted.stall) == (LONGEST_WAIT, LONGEST_WAIT)
    assert LONGEST_WAIT * 1000 < 1 << 31


def test_grace_has_three_names() -> None:
    assert parse("--shutdown-timeout 5 x.py").grace == 5
    assert parse("--shutdown-timeout 5 --grace 6 x.py").grace == 6
    assert parse("x.py", PET_SHUTDOWN_TIMEOUT="7").grace == 7
    assert parse("x.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="8").grace == 8
    assert parse("x.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="8", PET_SHUTDOWN_TIMEOUT="7").grace == 7


def test_stream_maps_of_any_rank() -> None:
    wanted = parse("-r 0:1,10:3,127:2 -t 3 x.py")
    assert (wanted.redirects, wanted.tee) == ({0: 1, 10: 3, 127: 2}, 3)


@pytest.mark.parametrize(
    ("line", "headline"),
    [
        ("-n 0 x.py", "-n 0 starts no rank"),
        ("-n -1 x.py", "-n -1 starts no rank"),
        ("-n two x.py", "-n two is not a number of ranks, nor auto, cpu or gpu"),
        ("-n 2.5 x.py", "-n 2.5 is not a number of ranks, nor auto, cpu or gpu"),
        ("-n 100000 x.py", "-n 100000 is more than one node can have: at most 4096"),
        (
            "--nproc_per_node two x.py",
            "--nproc_per_node two is not a number of ranks, nor auto, cpu or gpu",
        ),
        ("-n xpu x.py", "-n xpu cannot be counted without torch: give their number"),
        ("--max-restarts -1 x.py", "--max-restarts -1 is less than 0"),
        ("--max-restarts 1.5 x.py", "--max-restarts 1.5 is not a whole number"),
        ("--port-range 5-1 x.py", "--port-range 5-1 ends before it starts"),
        (
            "--port-range 1-70000 x.py",
            "--port-range 1-70000 is not a range of ports: they go from 1 to 65535",
        ),
        ("--port-range 20000 x.py", "--port-range 20000 is one port, and a range has two ends"),
        (
            "--master-port 70000 x.py",
            "--master-port 70000 is not a port: they go from 1 to 65535, and 0 means any free one",
        ),
        ("--master-port http x.py", "--master-port http is not a port number"),
        (
            "--rdzv-endpoint localhost:99999 x.py",
            "--rdzv-endpoint localhost:99999 is not a port: they go from 1 to 65535, and 0 means any free one",
        ),
        (
            "--master-addr a:1 x.py",
            "--master-addr a:1 is an address with a port, and the port is given with --master-port",
        ),
        (
            "--master-addr [::1]:1 x.py",
            "--master-addr [::1]:1 is an address with a port, and the port is given with --master-port",
        ),
        ("--rdzv-endpoint a:b:c x.py", "--rdzv-endpoint a:b:c is not HOST or HOST:PORT"),
        ("--rdzv-endpoint :29500 x.py", "--rdzv-endpoint :29500 is not HOST or HOST:PORT"),
        (
            "-r 4 x.py",
            "-r 4 is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank",
        ),
        (
            "-t 0:1,1 x.py",
            "-t 0:1,1 is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank",
        ),
        ("--local-ranks-filter a x.py", "--local-ranks-filter a is not a list of local ranks"),
        ("--local-ranks-filter 0,-1 x.py", "--local-ranks-filter 0,-1 names a rank below 0"),
        ("--rdzv-backend= x.py", "--rdzv-backend '' names no way to meet"),
        (
            "--signals-to-handle SIGKILL x.py",
            "--signals-to-handle SIGKILL names SIGKILL, which no launcher can take for this",
        ),
        ("--grace -1 x.py", "--grace -1 is not a number of seconds from 0 up"),
        ("--grace nan x.py", "--grace nan is not a number of seconds from 0 up"),
        ("--grace soon x.py", "--grace soon is not a number of seconds"),
        ("--on-failure ignore x.py", "--on-failure ignore is not one of stop, continue"),
        ("--preload a-b x.py", "--preload a-b names 'a-b', which is not a module's name"),
        ("--debug-rank -1 x.py", "--debug-rank -1 is less than 0"),
        ("--rdzv-conf nothing x.py", "--rdzv-conf nothing is not KEY=VALUE,KEY=VALUE"),
        ("--nnodes 0 x.py", "--nnodes 0 is less than one node"),
        ("--nnodes 2:1 x.py", "--nnodes 2:1 ends before it starts"),
        ("--nnodes two x.py", "--nnodes two is not a number of nodes, nor MIN:MAX"),
        ("--nnodes 1:1:1 x.py", "--nnodes 1:1:1 is not a number of nodes, nor MIN:MAX"),
        ("-n", "-n lacks its value, N"),
        ("--grace", "--grace lacks its value, S"),
        ("--fresh=yes x.py", "--fresh is a flag and takes no value"),
        ("--module=1 x.py", "--module is a flag and takes no value"),
        ("--nproc_per_node", "--nproc_per_node lacks its value, N"),
        ("", "rallypoint run needs a program"),
        ("-n 4", "rallypoint run needs a program"),
        ("-m", "rallypoint run needs a program"),
        ("-", "a script from standard input cannot be read by every rank"),
        ("-m --no-python x", "-m and --no-python exclude each other: a module needs Python"),
        ("-m train.py", "-m train.py is not a module's name"),
        ("-m ./pkg/train.py", "-m ./pkg/train.py is not a module's name"),
    ],
)
def test_bad_values(line: str, headline: str) -> None:
    error = refused(line)
    assert (error.code, error.headline) == ("usage", headline)
    assert error.help, "every refusal says what to do"
    assert "\n" not in error.headline


@pytest.mark.parametrize(
    ("variable", "text", "headline"),
    [
        (
            "PET_NPROC_PER_NODE",
            "two",
            "PET_NPROC_PER_NODE=two is not a number of ranks, nor auto, cpu or gpu",
        ),
        (
            "PET_NPROC_PER_NODE",
            "",
            "PET_NPROC_PER_NODE '' is not a number of ranks, nor auto, cpu or gpu",
        ),
        ("PET_STANDALONE", "yes", "PET_STANDALONE=yes is neither 0 nor 1"),
        ("PET_STANDALONE", "", "PET_STANDALONE= is neither 0 nor 1"),
        (
            "PET_MASTER_PORT",
            "70000",
            "PET_MASTER_PORT=70000 is not a port: they go from 1 to 65535, and 0 means any free one",
        ),
    ],
)
def test_bad_variables_are_named(variable: str, text: str, headline: str) -> None:
    assert refused("train.py", **{variable: text}).headline == headline


def test_the_command_line_wins_over_a_bad_variable() -> None:
    assert parse("-n 2 train.py", PET_NPROC_PER_NODE="two").nproc == 2


def test_the_module_help_shows_the_command() -> None:
    assert (
        refused(["-m", "pkg/train.py", "--lr", "1"]).help[0][1]
        == "rallypoint run -m pkg.train --lr 1"
    )


def test_a_stall_takes_longer_than_a_breath() -> None:
    assert parse("--stall 2.5 train.py").stall == 2.5
    assert parse("train.py").stall is None
    assert parse("--stall 0 train.py").stall == 0
    assert refused("--stall 0.5 train.py").headline.startswith(
        "--stall 0.5 is less than a second, and every rank stands still that long"
    )


def test_a_value_that_is_too_long_is_shown_in_part() -> None:
    headline = refused(["-n", "9" * 5000, "x.py"]).headline
    assert headline.startswith("-n 999")
    assert headline.endswith("9... is not a number of ranks, nor auto, cpu or gpu")
    assert len(headline) < 300


def test_a_log_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    assert refused(["--log-dir", str(tmp_path / "logs"), "x.py"]).headline.endswith(
        "logs is not a folder"
    )
    for there in ("/dev/null", str(tmp_path), str(tmp_path / "new")):
        assert parse(["--log-dir", there, "x.py"]).log_dir == there
