"""What the options of `run` mean together."""

from __future__ import annotations

import pytest

from rallypoint.cli import options
from rallypoint.errors import UsageError

from .lines import parse, refused


@pytest.mark.parametrize(
    "line",
    [
        "--rdzv-backend etcd-v2",
        "--rdzv-backend=etcd",
        "--rdzv-backend c10d --rdzv-endpoint etcd://node07:2379",
    ],
)
def test_a_way_to_meet_that_is_not_built_is_refused(line: str) -> None:
    error = refused(f"{line} train.py")
    assert error.code == "several-nodes"


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0",
            {"count": 2, "rank": None, "host": "node0", "ports": (29400,)},
        ),
        (
            "--nnodes 2:2 --node-rank 1 --master-addr node0 --master-port 29600",
            {"count": 2, "rank": 1, "host": "node0", "ports": tuple(range(29608, 29600, -1))},
        ),
        ("--nnodes 3 --node-rank 0", {"count": 3, "rank": 0, "host": "127.0.0.1"}),
        (
            "--nnodes 2 --rdzv-endpoint file:///shared/job --rdzv-id 7 --secret-file s",
            {"folder": "/shared/job.7", "job": "7", "secret_file": "s"},
        ),
        (
            "--nnodes 2 --rdzv-conf join_timeout=30,is_host=1 --node-timeout 10 --local-addr ::1",
            {"join_timeout": 30.0, "is_host": True, "timeout": 10.0, "local_addr": "::1"},
        ),
        ("--nnodes 2 --rdzv-conf timeout=30", {"join_timeout": 30.0}),
        ("--nnodes 2 --tls", {"tls": True}),
        ("--nnodes 2", {"tls": False}),
    ],
)
def test_nodes_that_find_each_other(line: str, nodes: dict[str, object]) -> None:
    found = parse(f"{line} train.py").nodes
    assert found is not None
    assert {name: getattr(found, name) for name in nodes} == nodes


def test_tls_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.cli.run_options.find_spec", lambda name: None)
    error = refused("--nnodes 2 --tls train.py")
    assert error.code == "usage"
    assert any("rallypoint[tls]" in command for _, command in error.help)
    assert parse("--nnodes 2 train.py").nodes is not None


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("--nnodes 2 --node-rank 0", 29500),
        ("--nnodes 2 --node-rank 0 --master-port 29600", 29600),
        ("--nnodes 2 --rdzv-endpoint node0:29600", 29600),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29600", 0),
    ],
)
def test_port_where_the_ranks_of_several_nodes_meet(line: str, port: int) -> None:
    assert parse(f"{line} train.py").master_port == port


@pytest.mark.parametrize(
    "line",
    [
        "--node-rank 1",
        "--nnodes 2 --node-rank 2",
        "--nnodes 1:2",
        "--nnodes 2 --standalone",
        "--nnodes 2 --rdzv-conf join_timeout=soon",
        "--nnodes 2 --node-timeout 0.1",
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint http://node0",
    ],
)
def test_nodes_that_cannot_be_are_refused(line: str) -> None:
    assert refused(f"{line} train.py").code == "usage"


def test_a_place_that_is_not_there_is_answered_by_one_that_is() -> None:
    """Node 5 of 2 is a slip of the number far more often than a job of six nodes."""
    error = refused("--nnodes 2 --node-rank 5 train.py")
    assert [command for _, command in error.help] == ["--node-rank 1", "--nnodes 6"]


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 1",
        "--nnodes=1:1",
        "--node-rank 0",
        "--rdzv-backend static",
        "--rdzv-backend c10d",
        "--standalone",
    ],
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
        (
            "--standalone --rdzv-backend etcd --rdzv-endpoint far:1 --rdzv-id 3 --master-addr far --master-port 29500",
            "",
            0,
            5,
        ),
    ],
)
def test_meeting_point(line: str, address: str, port: int, ignored: int) -> None:
    wanted = parse(f"{line} train.py")
    assert (wanted.master_addr, wanted.master_port) == (address, port)
    assert (
        len([note for note in wanted.notes if "is ignored with" in note])
        == ignored
        == len(wanted.notes)
    )


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
    assert (wanted.rendezvous, wanted.master_addr) == (
        place,
        "localhost" if "localhost" in line else "",
    )


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        (
            "file://tmp/job",
            "takes 'tmp' for a host: a whole path has three slashes, file:///tmp/job",
        ),
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


@pytest.mark.parametrize(
    "option", [o for o in options.RUN if o.fate == "accepted"], ids=lambda o: o.key
)
def test_accepted_options_say_so_once(option: options.Option) -> None:
    text = option.example.split()[1] if option.example else "x"
    wanted = parse([option.names[0], text, "train.py"])
    assert wanted.notes == (f"{option.names[0]} has no effect here: {option.why}",)
    if option.variable:
        assert parse("train.py", **{option.variable: text}).notes == wanted.notes


def test_a_variable_that_makes_the_program_a_module_is_named() -> None:
    with pytest.raises(UsageError) as refusal:
        parse("train.py", PET_MODULE="1")
    assert (
        refusal.value.headline
        == "train.py is not a module's name, and PET_MODULE=1 says that the program is one"
    )
    assert refusal.value.help == (("leave that to -m", "unset PET_MODULE"),)


@pytest.mark.parametrize(
    ("text", "known", "wrong"),
    [
        (
            "SIGTERM,SIGTREM",
            ("SIGTERM",),
            "'SIGTREM', which is not a signal; the nearest is SIGTERM",
        ),
        ("usr1", (), "'usr1', which is not a signal; the nearest is SIGUSR1"),
        ("15,SIGUSR1", ("SIGUSR1",), "'15', which is not a signal; the nearest is SIGTERM"),
        ("99", (), "'99', which is not a signal"),
        ("SIGTERM,", ("SIGTERM",), "'', which is not a signal"),
    ],
)
def test_an_unknown_signal_is_left_out_with_a_line(
    text: str, known: tuple[str, ...], wrong: str
) -> None:
    """torchrun warns of it and runs; it was refused here."""
    wanted = parse(f"--signals-to-handle {text} train.py")
    assert wanted.signals == known
    assert wanted.notes == (f"--signals-to-handle names {wrong}: it is left out",)


def test_several_nodes_need_a_port_after_that_of_the_ranks() -> None:
    with pytest.raises(UsageError):
        parse("--nnodes 2 --node-rank 0 --master-addr node0 --master-port 65535 train.py")
    parse("-n 2 --master-port 65535 train.py")
