from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli import options
from rallypoint.errors import UsageError
from rallypoint.launcher.plan import Options


def parse(line: str | list[str], **environ: str) -> Options:
    argv = line.split() if isinstance(line, str) else line
    return options.read(options.take_apart(argv, environ))


def refused(line: str | list[str], **environ: str) -> UsageError:
    with pytest.raises(UsageError) as refusal:
        parse(line, **environ)
    return refusal.value


# --- the table -------------------------------------------------------------------------------------------------------


def test_keys_and_spellings_are_unique() -> None:
    assert len(options.BY_KEY) == len(options.TABLE)
    assert len(options.BY_SPELLING) == sum(len(option.spellings) for option in options.TABLE)


def test_every_row_says_enough() -> None:
    for option in options.TABLE:
        assert option.sentence, option.names
        assert (option.fate == "accepted") == bool(option.why), option.names
        if option.metavar and option.read is not str:
            assert option.example or not option.metavar[0].isalpha() or option.key.startswith("duplicate"), option.names


def test_every_example_is_a_good_one() -> None:
    for option in options.TABLE:
        if option.example:
            parse([*option.example.split(), "train.py"])


@pytest.mark.parametrize("name", [name for option in options.TABLE for name in option.names])
def test_help_names_every_option(name: str) -> None:
    assert any(line.startswith("  -") and name in line.replace(",", " ").split() for line in options.help_text(92).splitlines())


def test_help_is_readable_on_a_narrow_terminal() -> None:
    for columns, widest in ((92, 92), (80, 80), (50, 77)):  # the lines of use, and options' names, are not parted
        for text in (
            options.help_text(columns),
            options.serve_help_text(columns),
            options.stacks_help_text(columns),
            options.doctor_help_text(columns),
            options.show_help_text(columns),
        ):
            assert max(map(len, text.splitlines())) <= widest


@pytest.mark.parametrize("option", [o for o in options.TABLE if any("-" in n[2:] for n in o.names)], ids=lambda o: o.key)
def test_underscores_are_hyphens(option: options.Option) -> None:
    hyphened = next(name for name in option.names if "-" in name[2:])
    underscored = "--" + hyphened[2:].replace("-", "_")
    if not option.metavar:
        taken = options.take_apart([underscored, "x"], {})
        assert option.key in taken.given
    elif option.example:
        text = option.example.split()[1]
        assert parse([underscored, text, "x.py"]) == parse([hyphened, text, "x.py"]) == parse([f"{underscored}={text}", "x.py"])


# --- values ----------------------------------------------------------------------------------------------------------


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
    assert (wanted.port_range, wanted.grace, wanted.on_failure, wanted.debug_rank) == ((20000, 20100), 1.5, "continue", 1)
    assert (wanted.run_dir, wanted.plain, wanted.quiet, wanted.error_format, wanted.dry_run) == ("out", True, True, "json", True)


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
        ("--nproc_per_node two x.py", "--nproc_per_node two is not a number of ranks, nor auto, cpu or gpu"),
        ("-n xpu x.py", "-n xpu cannot be counted without torch: give their number"),
        ("--max-restarts -1 x.py", "--max-restarts -1 is less than 0"),
        ("--max-restarts 1.5 x.py", "--max-restarts 1.5 is not a whole number"),
        ("--port-range 5-1 x.py", "--port-range 5-1 ends before it starts"),
        ("--port-range 1-70000 x.py", "--port-range 1-70000 is not a range of ports: they go from 1 to 65535"),
        ("--port-range 20000 x.py", "--port-range 20000 is one port, and a range has two ends"),
        ("--master-port 70000 x.py", "--master-port 70000 is not a port: they go from 1 to 65535, and 0 means any free one"),
        ("--master-port http x.py", "--master-port http is not a port number"),
        (
            "--rdzv-endpoint localhost:99999 x.py",
            "--rdzv-endpoint localhost:99999 is not a port: they go from 1 to 65535, and 0 means any free one",
        ),
        ("--rdzv-endpoint a:b:c x.py", "--rdzv-endpoint a:b:c is not HOST or HOST:PORT"),
        ("--rdzv-endpoint :29500 x.py", "--rdzv-endpoint :29500 is not HOST or HOST:PORT"),
        ("-r 4 x.py", "-r 4 is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank"),
        ("-t 0:1,1 x.py", "-t 0:1,1 is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank"),
        ("--local-ranks-filter a x.py", "--local-ranks-filter a is not a list of local ranks"),
        ("--local-ranks-filter 0,-1 x.py", "--local-ranks-filter 0,-1 names a rank below 0"),
        ("--signals-to-handle SIGTREM x.py", "--signals-to-handle SIGTREM names 'SIGTREM', which is not a signal; the nearest is SIGTERM"),
        ("--signals-to-handle usr1 x.py", "--signals-to-handle usr1 names 'usr1', which is not a signal; the nearest is SIGUSR1"),
        ("--signals-to-handle SIGKILL x.py", "--signals-to-handle SIGKILL names SIGKILL, which no launcher can take for this"),
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
        ("PET_NPROC_PER_NODE", "two", "PET_NPROC_PER_NODE=two is not a number of ranks, nor auto, cpu or gpu"),
        ("PET_NPROC_PER_NODE", "", "PET_NPROC_PER_NODE '' is not a number of ranks, nor auto, cpu or gpu"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE=yes is neither 0 nor 1"),
        ("PET_STANDALONE", "", "PET_STANDALONE= is neither 0 nor 1"),
        ("PET_MASTER_PORT", "70000", "PET_MASTER_PORT=70000 is not a port: they go from 1 to 65535, and 0 means any free one"),
    ],
)
def test_bad_variables_are_named(variable: str, text: str, headline: str) -> None:
    assert refused("train.py", **{variable: text}).headline == headline


def test_the_command_line_wins_over_a_bad_variable() -> None:
    assert parse("-n 2 train.py", PET_NPROC_PER_NODE="two").nproc == 2


def test_the_module_help_shows_the_command() -> None:
    assert refused(["-m", "pkg/train.py", "--lr", "1"]).help[0][1] == "rallypoint run -m pkg.train --lr 1"


# --- unknown options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--nproc", "--nproc-per-node"),
        ("--nprocs-per-node", "--nproc-per-node"),
        ("--n_proc_per_node", "--nproc-per-node"),
        ("--redirect", "--redirects"),
        ("--max-restart", "--max-restarts"),
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
    error = refused(["--fresh", "--nproc=4", "train.py", "a b"])
    assert error.help[0] == ("use --nproc-per-node", "rallypoint run --fresh --nproc-per-node=4 train.py 'a b'")
    assert error.help[1][1] == "rallypoint run --fresh train.py 'a b' --nproc=4"


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
        ("-n 2 --epochs 3 train.py a", "rallypoint run -n 2 train.py a --epochs 3"),
        ("-n 2 -m --epochs 3 package.train", "rallypoint run train.py --epochs"),
    ],
)
def test_habits_from_elsewhere_get_the_whole_line(line: str, mended: str) -> None:
    error = refused(line.split())
    assert error.help[-1 if "--epochs" in line else 0][1] == mended


def test_a_name_is_not_near_for_its_dashes() -> None:
    assert "; the nearest is" not in refused(["--hosts-file", "x", "train.py"]).headline


# --- the program's own words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        [],
        ["--"],
        ["--", "x", "--"],
        ["--help"],
        ["-h"],
        ["-n", "8"],
        ["--nproc", "8"],
        ["--nproc-per-node=two"],
        ["--no-such"],
        ["--dry-run"],
        ["-1"],
        [""],
        ["a b", "--x=y z"],
        ["--module", "-m"],
    ],
)
@pytest.mark.parametrize("before", [[], ["-n", "2"], ["-n2", "--fresh"], ["--"], ["-n", "2", "--"]])
def test_words_after_the_program_are_untouched(before: list[str], rest: list[str]) -> None:
    wanted = parse([*before, "train.py", *rest])
    assert (wanted.program.target, list(wanted.program.args)) == ("train.py", rest)
    assert wanted.nproc == (2 if "2" in "".join(before) else None)
    assert not wanted.dry_run


@given(st.lists(st.text(max_size=6) | st.sampled_from(["--", "-n", "--help", "--fresh", "-m", "--nproc=3", "-x"])))
def test_any_words_after_the_program_are_untouched(rest: list[str]) -> None:
    assert list(parse(["-n", "3", "train.py", *rest]).program.args) == rest


@given(st.lists(st.text(max_size=8) | st.sampled_from([*options.BY_SPELLING, "4", "train.py", "--", "0:1"]), max_size=5))
def test_any_command_line_is_read_or_refused(argv: list[str]) -> None:
    line = options.take_apart(argv, {})
    try:
        options.read(line)
    except UsageError as refusal:
        error = refusal
    else:
        return
    assert error.headline
    assert error.help


def test_help_is_ours_before_the_program_only() -> None:
    assert options.take_apart(["-n", "2", "--help"], {}).wants_help
    assert options.take_apart(["-h", "train.py"], {}).wants_help
    assert not options.take_apart(["train.py", "--help"], {}).wants_help


# --- torchrun's, for several nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2",
        "--nnodes 1:2",
        "--nnodes=1:4 --standalone",
        "--node-rank 1",
        "--rdzv-backend etcd-v2",
        "--rdzv-backend=etcd",
        "--rdzv-backend c10d --rdzv-endpoint etcd://node07:2379",
    ],
)
def test_several_nodes_are_refused(line: str) -> None:
    error = refused(f"{line} train.py")
    assert error.code == "several-nodes"
    assert "comes with multi-node support" in error.headline


@pytest.mark.parametrize(
    "line", ["--nnodes 1", "--nnodes=1:1", "--node-rank 0", "--rdzv-backend static", "--rdzv-backend c10d", "--standalone"]
)
def test_one_node_is_fine(line: str) -> None:
    wanted = parse(f"{line} train.py")
    assert (wanted.master_addr, wanted.master_port, wanted.notes) == ("", 0, ())


@pytest.mark.parametrize(
    ("line", "address", "port", "ignored"),
    [
        ("--master-addr localhost --master-port 29500", "localhost", 29500, 0),
        ("--master-addr [::1]", "::1", 0, 0),
        ("--rdzv-endpoint localhost:29501", "localhost", 29501, 0),
        ("--rdzv-endpoint localhost", "localhost", 0, 0),
        ("--rdzv-endpoint [::1]:29501", "::1", 29501, 0),
        ("--rdzv-endpoint ::1", "::1", 0, 0),
        ("--rdzv-backend c10d --rdzv-endpoint node07:0 --master-port 29500", "node07", 0, 1),
        ("--rdzv-backend c10d --master-port 29500 --master-addr x", "", 0, 2),
        ("--standalone --rdzv-backend etcd --rdzv-endpoint far:1 --rdzv-id 3 --master-addr far --master-port 29500", "", 0, 5),
    ],
)
def test_meeting_point(line: str, address: str, port: int, ignored: int) -> None:
    wanted = parse(f"{line} train.py")
    assert (wanted.master_addr, wanted.master_port) == (address, port)
    assert len([note for note in wanted.notes if "is ignored with" in note]) == ignored == len(wanted.notes)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("--rdzv-endpoint file:///shared/dir/job", "/shared/dir/job"),
        ("--rdzv-backend c10d --rdzv-endpoint=file:///shared/job/", "/shared/job"),
        ("--rdzv-endpoint file:///shared/job --rdzv-id a/7", "/shared/job.a_7"),
        ("--standalone --rdzv-endpoint file:///shared/job", ""),
        ("--rdzv-endpoint localhost:29500", ""),
    ],
)
def test_a_place_on_a_shared_file_system(line: str, place: str) -> None:
    wanted = parse(f"{line} train.py")
    assert (wanted.rendezvous, wanted.master_addr) == (place, "localhost" if "localhost" in line else "")


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("file://tmp/job", "takes 'tmp' for a host: a whole path has three slashes, file:///tmp/job"),
        ("file://./job", "takes '.' for a host: a whole path has three slashes, file:///./job"),
        ("file:///", "names no place"),
        ("file://", "takes '' for a host: a whole path has three slashes, file:///"),
    ],
)
def test_a_place_that_is_none(url: str, wrong: str) -> None:
    assert refused(f"--rdzv-endpoint {url} train.py").headline == f"--rdzv-endpoint {url} {wrong}"


def test_standalone_ignores_the_id() -> None:
    assert parse("--rdzv-id 7 train.py").run_id == "7"
    wanted = parse("--standalone --rdzv-id 7 train.py")
    assert wanted.run_id == ""
    assert wanted.notes == ("--rdzv-id 7 is ignored with --standalone, as torchrun does",)


@pytest.mark.parametrize("option", [o for o in options.TABLE if o.fate == "accepted"], ids=lambda o: o.key)
def test_accepted_options_say_so_once(option: options.Option) -> None:
    text = option.example.split()[1] if option.example else "x"
    wanted = parse([option.names[0], text, "train.py"])
    assert wanted.notes == (f"{option.names[0]} has no effect here: {option.why}",)
    if option.variable:
        assert parse("train.py", **{option.variable: text}).notes == wanted.notes


def test_a_stall_takes_longer_than_a_breath() -> None:
    assert parse("--stall 2.5 train.py").stall == 2.5
    assert parse("train.py").stall is None
    assert refused("--stall 0.5 train.py").headline.startswith("--stall 0.5 is less than a second, and every rank stands still that long")
