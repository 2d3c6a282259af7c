"""What ranks that stand somewhere say together: groups, the sentence, a mismatch, and how it fits
on a screen.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rallypoint.diagnosis import rank_snapshot, render, stacks
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.rank_snapshot import MOST_LINES, RankStanding, Standing

SITE = "/venv/lib/python3.11/site-packages/torch"
TOP = Frame("/home/ada/exp/train.py", 60, "<module>")
WRAPPER = Frame(f"{SITE}/distributed/c10d_logger.py", 81, "wrapper")
LOAD = (TOP, Frame("/home/ada/exp/train.py", 30, "load"))


def in_collective(name: str, line: int = 42) -> tuple[Frame, ...]:
    return (
        TOP,
        Frame("/home/ada/exp/train.py", line, "step"),
        WRAPPER,
        Frame(f"{SITE}/distributed/distributed_c10d.py", 2936, name),
    )


REDUCE = in_collective("all_reduce")
LOADER = (
    TOP,
    Frame("/home/ada/exp/train.py", 30, "epoch"),
    Frame(f"{SITE}/utils/data/dataloader.py", 733, "__next__"),
    Frame(f"{SITE}/utils/data/dataloader.py", 1500, "_try_get_data"),
    Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get"),
    Frame("/usr/lib/python3.11/multiprocessing/connection.py", 257, "poll"),
    Frame("/usr/lib/python3.11/selectors.py", 415, "select"),
)


def at(
    rank: int, frames: tuple[Frame, ...], *, since: float | None = None, cpu: float = 0.0
) -> RankStanding:
    return RankStanding(
        rank, 4000 + rank, "running", 33.0, state="S", cpu=cpu, frames=frames, stands_for=since
    )


def job(*ranks: RankStanding, size: int = 0) -> Standing:
    return Standing(
        "20260101-120000-ab12",
        "train.py",
        size or len(ranks),
        ranks,
        35.0,
        run_dir="/runs/20260101-120000-ab12",
        launcher=4711,
    )


def test_the_sentence_names_who_waits_and_whom_for() -> None:
    found = job(*(at(rank, REDUCE, since=31.0) for rank in range(7)), at(7, LOADER, since=31.0))
    told = "ranks 0-6 wait in all_reduce at train.py:42 for 31 s; rank 7 is in DataLoader.__next__ at train.py:30 for 31 s"
    assert rank_snapshot.sentence(found) == told
    assert [group.numbers for group in rank_snapshot.groups(found)] == [(7,), (0, 1, 2, 3, 4, 5, 6)]


def test_since_when_is_said_only_where_it_is_known_of_all() -> None:
    found = job(at(0, REDUCE, since=31.0), at(1, REDUCE), at(2, LOAD, since=4.25))
    assert (
        rank_snapshot.sentence(found)
        == "ranks 0-1 wait in all_reduce at train.py:42; rank 2 is at train.py:30 in load for 4.2 s"
    )


def test_everybody_at_one_place() -> None:
    assert (
        rank_snapshot.sentence(job(at(0, REDUCE), at(1, REDUCE)))
        == "both ranks wait in all_reduce at train.py:42"
    )
    assert (
        rank_snapshot.sentence(job(*(at(r, LOAD) for r in range(3))))
        == "all 3 ranks are at train.py:30 in load"
    )
    assert rank_snapshot.sentence(job(at(0, LOAD))) == "rank 0 is at train.py:30 in load"
    assert rank_snapshot.sentence(job(size=4)) == "no rank has been started"


def test_one_that_works_in_a_collective_is_not_said_to_wait() -> None:
    assert (
        rank_snapshot.sentence(job(at(0, REDUCE, cpu=0.9)))
        == "rank 0 is in all_reduce at train.py:42"
    )


def test_a_wait_that_polls_is_one_place_whatever_the_library_does_inside() -> None:
    deeper = (
        *LOADER[:-1],
        Frame("/usr/lib/python3.11/multiprocessing/connection.py", 440, "_poll"),
        LOADER[-1],
    )
    (group,) = rank_snapshot.groups(job(at(0, LOADER), at(1, deeper)))
    assert group.numbers == (0, 1)
    assert group.frames[-1].function == "get"
    assert stacks.called(group.frames) == "DataLoader.__next__"


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (REDUCE, "all_reduce"),
        (LOADER, "DataLoader.__next__"),
        (LOAD, ""),
        ((TOP, Frame("/usr/lib/python3.11/threading.py", 1112, "join")), "threading.join"),
        ((TOP, Frame(f"{SITE}/_tensor.py", 581, "backward")), "torch's backward()"),
        ((TOP, Frame("/venv/lib/python3.11/site-packages/requests/api.py", 73, "get")), "requests's get()"),
        ((TOP, Frame(f"{SITE}/__init__.py", 2000, "<module>")), "the import of torch"),
        ((TOP, Frame(f"{SITE}/nn/parallel/distributed.py", 800, "__init__"), WRAPPER,
          Frame(f"{SITE}/distributed/utils.py", 293, "_sync_module_states")), "DistributedDataParallel()"),
    ],
)  # fmt: skip
def test_a_call_has_the_name_that_the_program_uses(frames: tuple[Frame, ...], name: str) -> None:
    assert stacks.called(frames) == name


def test_a_function_of_the_programs_own_is_no_collective() -> None:
    assert stacks.collective((TOP, Frame("/home/ada/exp/comm.py", 3, "all_reduce"))) is None
    assert (
        stacks.collective((TOP, Frame(f"{SITE}/distributed/distributed_c10d.py", 2500, "recv")))
        is None
    )


def test_who_cannot_go_on_by_itself_comes_first() -> None:
    stopped = msgspec.structs.replace(at(2, ()), state="T", missing="stopped")
    stuck = msgspec.structs.replace(
        at(3, ()), state="D", missing="kernel", kernel="rpc_wait_bit_killable"
    )
    found = job(at(0, REDUCE), at(1, LOAD), stopped, stuck)
    assert [group.numbers for group in rank_snapshot.groups(found)] == [(2,), (3,), (1,), (0,)]
    shown = rank_snapshot.text(found)
    assert "rank 2 is stopped by a signal (SIGSTOP, or Ctrl-Z)" in " ".join(shown.split())
    assert "kill -CONT 4002" in shown
    assert "stuck in the kernel, in rpc_wait_bit_killable" in " ".join(shown.split())


def test_processor_time_only_orders_what_is_equal() -> None:
    """NCCL's waits spin: of four that are each somewhere else the idle one comes first, of a crowd
    and an odd one the odd one does.
    """
    other = [(TOP, Frame("/home/ada/exp/train.py", line, "work")) for line in (1, 2, 3)]
    found = job(at(0, other[0], cpu=1.0), at(1, other[1], cpu=0.0), at(2, other[2], cpu=1.0))
    assert rank_snapshot.groups(found)[0].numbers == (1,)
    found = job(at(0, REDUCE, cpu=0.0), at(1, REDUCE, cpu=0.0), at(2, LOAD, cpu=1.0))
    assert rank_snapshot.groups(found)[0].numbers == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"missing": "ended", "detail": "exit code 0"}, "rank 1 has ended with exit code 0"),
        ({"missing": "not started", "pid": 0}, "rank 1 has not been started yet"),
        ({"missing": "starting"}, "rank 1 has not begun the program yet"),
        (
            {"missing": "closing"},
            "rank 1 has left the program, and is closing down the interpreter",
        ),
        (
            {"missing": "other program", "detail": "sleep 1000"},
            "rank 1 runs another program, sleep 1000",
        ),
        ({"missing": "no answer", "state": "R"}, "rank 1 does not answer; is on a processor"),
        ({"missing": "held"}, "rank 1 is held by a debugger"),
        ({"missing": "not looked into"}, "rank 1 is asleep (with --plain no rank is asked where)"),
    ],
)
def test_what_is_said_of_a_rank_without_a_stack(changes: dict[str, str], words: str) -> None:
    one = msgspec.structs.replace(at(1, ()), **changes)
    assert words in rank_snapshot.sentence(job(at(0, REDUCE), one))
    assert rank_snapshot.text(job(at(0, REDUCE), one))


# --- a mismatch


def test_different_collectives_are_a_mismatch_when_nobody_is_elsewhere() -> None:
    found = job(at(0, REDUCE, since=8.0), at(1, in_collective("broadcast", 50), since=8.0))
    wrong = rank_snapshot.mismatch(found)
    assert wrong is not None
    names = {group.collective for group in wrong.groups}
    assert (wrong.confidence, names) == ("likely", {"all_reduce", "broadcast"})
    report = rank_snapshot.stalled(found, 60.0)
    assert report.code == "collective-mismatch"
    assert report.headline.startswith(
        "rank 0 waits in all_reduce at train.py:42; rank 1 waits in broadcast at train.py:50: "
    )
    assert report.ranks == (0, 1)
    assert "collective-mismatch: the ranks are in different collectives" in rank_snapshot.text(
        found
    )
    assert rank_snapshot.as_data(found)["code"] == "collective-mismatch"


def test_a_rank_that_has_not_joined_is_in_no_other_collective() -> None:
    """Gloo lets a rank through that reaches all others, while these do not reach each other: behind
    a firewall between two nodes.
    """
    joining = in_collective("init_process_group", 9)
    found = job(at(0, REDUCE, since=8.0), at(1, joining, since=8.0), at(2, joining, since=8.0))
    assert rank_snapshot.mismatch(found) is None
    report = rank_snapshot.stalled(found, 60.0)
    assert report.code == "job-stalled"
    assert "ranks 1-2 wait in init_process_group at train.py:9" in report.headline


def test_the_same_collective_on_different_lines_is_possible_only() -> None:
    wrong = rank_snapshot.mismatch(
        job(at(0, REDUCE, since=800.0), at(1, in_collective("all_reduce", 50), since=800.0))
    )
    assert wrong is not None
    assert wrong.confidence == "possible"
    assert "on different lines" in str(wrong)


@pytest.mark.parametrize(
    "ranks",
    [
        (
            at(0, REDUCE, since=8.0),
            at(1, in_collective("broadcast"), since=8.0),
            at(2, LOAD, since=8.0),
        ),  # it may be rank 2 that all wait for
        (at(0, REDUCE, since=8.0), at(1, in_collective("broadcast"))),  # rank 1 has just come
        (at(0, REDUCE, since=8.0), at(1, REDUCE, since=8.0)),
        (
            at(0, REDUCE, since=8.0),
            msgspec.structs.replace(at(1, ()), missing="stopped", state="T"),
        ),
        (
            at(0, in_collective("recv"), since=8.0),
            at(1, in_collective("send"), since=8.0),
        ),  # they meet each other
        (),
    ],
)
def test_what_is_no_mismatch(ranks: tuple[RankStanding, ...]) -> None:
    assert rank_snapshot.mismatch(job(*ranks)) is None


def test_who_has_ended_well_does_not_hide_a_mismatch() -> None:
    gone = msgspec.structs.replace(at(2, ()), missing="ended", detail="exit code 0", state="")
    assert (
        rank_snapshot.mismatch(
            job(at(0, REDUCE, since=8.0), at(1, in_collective("barrier"), since=8.0), gone)
        )
        is not None
    )


# --- the report


def test_a_stall_is_told_with_the_odd_rank_and_what_to_type() -> None:
    found = job(*(at(rank, REDUCE, since=61.0) for rank in range(3)), at(3, LOADER, since=61.0))
    report = rank_snapshot.stalled(found, 61.0, seen=3)
    assert report.code == "job-stalled"
    told = "no rank has moved for 61 s: ranks 0-2 wait in all_reduce at train.py:42; rank 3 is in DataLoader.__next__ at train.py:30"
    assert report.headline == told
    assert report.where == "train.py:30 in epoch (torch __next__), pid 4003"
    assert report.why == "ranks 0-2 wait until rank 3 makes the same call"
    assert report.ranks == (3,)
    assert "for 61 s they were found there each of 3 times" in report.evidence
    assert (report.help[-1].command, report.exit_status) == (
        "rallypoint stacks 20260101-120000-ab12",
        0,
    )
    assert len(render.text(report).splitlines()) <= 20


def test_a_thread_that_keeps_a_rank_from_its_end_is_told() -> None:
    end = (Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown"),)
    assert (
        rank_snapshot.sentence(job(at(0, end)))
        == "rank 0 has left the program, and waits for a thread that is no daemon, at threading.py:1590"
    )
    named = msgspec.structs.replace(at(0, end), detail="metrics-uploader")
    assert "waits for metrics-uploader, a thread that is no" in rank_snapshot.sentence(job(named))


def test_who_has_ended_is_named_where_all_others_wait_in_one_call() -> None:
    gone = msgspec.structs.replace(at(2, ()), missing="ended", detail="exit code 0", state="")
    report = rank_snapshot.stalled(job(at(0, REDUCE), at(1, REDUCE), gone), 60.0)
    assert report.why == "all of them are in the same all_reduce: it has no end if it needs rank 2"


def test_a_stopped_rank_in_a_stall_comes_with_the_line_that_lets_it_go_on() -> None:
    stopped = msgspec.structs.replace(at(1, ()), state="T", missing="stopped")
    report = rank_snapshot.stalled(job(at(0, REDUCE), stopped), 60.0)
    assert report.help[0].command == "kill -CONT 4001"


# --- a screen


def test_64_ranks_fit_on_a_screen_however_they_stand() -> None:
    everywhere = [
        (
            TOP,
            *(Frame(f"/home/ada/exp/m{depth}.py", rank, f"f{depth}") for depth in range(30)),
            *REDUCE[1:],
        )
        for rank in range(64)
    ]
    for count in (1, 2, 5, 12, 13, 63, 64):
        found = job(*(at(rank, everywhere[min(rank, count - 1)], since=3.0) for rank in range(64)))
        lines = rank_snapshot.text(
            found, source=lambda file, line: "x" * 500, others=["a", "b"]
        ).splitlines()
        assert len(lines) <= MOST_LINES, count
        assert max(map(len, lines)) <= rank_snapshot.LINE_CHARACTERS
        assert "all_reduce" in lines[0]
        for group in rank_snapshot.groups(found)[:12]:
            assert any(
                line.startswith(f"rank{'s' * (len(group.numbers) > 1)} {group.numbers[0]}")
                for line in lines
            )


def test_what_ranks_say_cannot_move_the_cursor() -> None:
    evil = (TOP, Frame("/tmp/\x1b[2J\r\n.py", 3, "f\x07"))
    assert not set(rank_snapshot.text(job(at(0, evil))).replace("\n", "")) & set(
        map(chr, [*range(32), 127])
    )


FRAMES = some.lists(
    some.builds(
        Frame,
        some.sampled_from(("/a.py", f"{SITE}/x.py", "/usr/lib/python3.11/queue.py")),
        some.integers(0, 9),
        some.text(max_size=5),
    ),
    max_size=5,
).map(tuple)
RANKS = some.builds(
    RankStanding,
    some.integers(0, 300), some.integers(0, 9), some.sampled_from(("running", "joining", "done", "?")), some.floats(0, 1e6),
    state=some.sampled_from("RSDTtZ "), frames=FRAMES, stands_for=some.none() | some.floats(0, 1e6),
    missing=some.sampled_from(("", "stopped", "ended", "no answer", "other program")), cpu=some.floats(0, 64),
)  # fmt: skip


@given(some.lists(RANKS, max_size=80, unique_by=lambda rank: rank.rank))
def test_whatever_the_ranks_do_it_can_be_said(ranks: list[RankStanding]) -> None:
    found = job(*ranks, size=300)
    assert len(rank_snapshot.text(found).splitlines()) <= MOST_LINES
    assert sorted(
        number for group in rank_snapshot.groups(found) for number in group.numbers
    ) == sorted(rank.rank for rank in ranks)
    assert rank_snapshot.sentence(found)
    if any(rank.missing != "ended" for rank in ranks):
        assert rank_snapshot.stalled(found, 5.0).headline
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Standing) == found
    assert msgspec.json.encode(rank_snapshot.as_data(found))


def _asleep(rank: int, *frames: Frame, cpu: float = 0.0) -> rank_snapshot.RankStanding:
    return rank_snapshot.RankStanding(
        rank, 100 + rank, "running", state="S", cpu=cpu, frames=frames, stands_for=60.0
    )


OWN = Frame("/srv/train.py", 8, "<module>")
BACKWARD = (
    OWN,
    Frame(f"{SITE}/_tensor.py", 581, "backward"),
    Frame(f"{SITE}/autograd/graph.py", 825, "_engine_run_backward"),
)
FORWARD = (
    Frame("/srv/train.py", 20, "<module>"),
    Frame(f"{SITE}/nn/parallel/distributed.py", 1643, "forward"),
)
BARRIER = (
    Frame("/srv/train.py", 10, "<module>"),
    Frame(f"{SITE}/distributed/distributed_c10d.py", 4159, "barrier"),
)


def test_a_thread_that_an_exception_ended_stands_beside_its_rank() -> None:
    lost = msgspec.structs.replace(_asleep(1, OWN), lost="a thread died of OSError: x")
    found = rank_snapshot.Standing("j", "train.py", 2, (_asleep(0, *BARRIER), lost), 90.0)
    (line,) = (line for line in rank_snapshot.stalled(found, 60.0).evidence if "rank 1 " in line)
    assert line.endswith(" · a thread died of OSError: x")


@pytest.mark.parametrize(
    ("one", "other"), [(BACKWARD, BARRIER), (FORWARD, BACKWARD), (FORWARD, BARRIER)]
)
def test_ranks_that_made_different_numbers_of_steps(
    one: tuple[Frame, ...], other: tuple[Frame, ...]
) -> None:
    """Rank 0 waits in DDP's backward(), in which no collective is seen: it was said that rank 1 can
    go on when rank 0 comes.
    """
    found = rank_snapshot.Standing("j", "train.py", 2, (_asleep(0, *one), _asleep(1, *other)), 90.0)
    report = rank_snapshot.stalled(found, 60.0)
    assert (report.code, report.confidence, report.ranks) == (
        "collective-mismatch",
        "likely",
        (0, 1),
    )
    assert "different numbers of steps" in report.headline
    assert {help.command for help in report.help} & {"with model.join():", "model.module(batch)"}


def test_a_rank_that_computes_its_gradients_waits_for_nobody() -> None:
    found = rank_snapshot.Standing(
        "j", "train.py", 2, (_asleep(0, *BACKWARD, cpu=0.9), _asleep(1, *BARRIER)), 90.0
    )
    assert rank_snapshot.mismatch(found) is None
    assert rank_snapshot.stalled(found, 60.0).code == "job-stalled"


def test_the_rank_that_others_wait_for_comes_first_where_ddp_hides_the_wait() -> None:
    """Of two ranks, one in DDP's backward() and one in its loader, the one that waits came first."""
    ranks = (_asleep(0, *BACKWARD), _asleep(1, *LOADER))
    report = rank_snapshot.stalled(rank_snapshot.Standing("j", "train.py", 2, ranks, 90.0), 60.0)
    assert (report.code, report.ranks) == ("job-stalled", (1,))
    assert "backward() of a DDP model waits" in report.why


def test_a_rank_elsewhere_is_named_before_one_that_waits_in_backward() -> None:
    """Both stand alone: the one with the lower number, which waited, came first."""
    elsewhere = _asleep(1, Frame("/srv/train.py", 30, "<module>"))
    found = rank_snapshot.Standing("j", "train.py", 2, (_asleep(0, *BACKWARD), elsewhere), 90.0)
    report = rank_snapshot.stalled(found, 60.0)
    assert (report.code, report.ranks) == ("job-stalled", (1,))
    assert report.where.startswith("train.py:30")


# --- several nodes


def on(node: int, host: str, one: RankStanding) -> RankStanding:
    return msgspec.structs.replace(one, node=node, host=host)


def test_of_several_nodes_ranks_and_processes_are_told_with_their_hosts() -> None:
    found = job(
        on(0, "gpu01", at(0, REDUCE)),
        on(0, "gpu01", at(1, REDUCE)),
        on(1, "gpu02", at(2, REDUCE)),
        on(1, "gpu02", at(3, LOAD)),
    )
    assert rank_snapshot.sentence(found) == (
        "ranks 0-1 on gpu01 and rank 2 on gpu02 wait in all_reduce at train.py:42; "
        "rank 3 on gpu02 is at train.py:30 in load"
    )
    lines = rank_snapshot.text(found).splitlines()
    assert any(line.startswith("rank 3  pid 4003 on gpu02 · running") for line in lines)
    assert any("pids 4000-4001 on gpu01, pid 4002 on gpu02 · " in line for line in lines)
    assert "train.py, 4 ranks on 2 nodes, " in lines[-1]
    report = rank_snapshot.stalled(found, 60.0)
    assert report.where == "train.py:30 in load, pid 4003 on gpu02"


def test_two_nodes_of_one_machine_are_told_apart() -> None:
    found = job(on(0, "gpu01", at(0, REDUCE)), on(1, "gpu01", at(1, LOAD)))
    assert rank_snapshot.sentence(found).endswith(
        "; rank 1 on node 1 (gpu01) is at train.py:30 in load"
    )


def test_ranks_on_many_nodes_are_counted() -> None:
    found = job(*(on(rank, f"gpu{rank}", at(rank, REDUCE)) for rank in range(9)), size=10)
    assert rank_snapshot.sentence(found).startswith("ranks 0-8 on 9 nodes wait in all_reduce")
    assert "\nranks 0-8  on 9 nodes · running for 33 s" in rank_snapshot.text(found)


def test_a_node_that_was_not_heard_comes_first_and_no_mismatch_is_told() -> None:
    silent = RankStanding(1, 0, "", missing="unheard", node=1, host="gpu02")
    found = job(
        on(0, "gpu01", at(0, REDUCE, since=60.0)),
        silent,
        on(2, "gpu03", at(2, in_collective("barrier"), since=60.0)),
    )
    assert rank_snapshot.groups(found)[0].numbers == (1,)
    told = "rank 1 on gpu02 has not been seen: the launcher there gave no answer"
    assert told in rank_snapshot.sentence(found)
    assert "\nrank 1  on gpu02\n    has not been seen: " in rank_snapshot.text(found)
    assert rank_snapshot.mismatch(found) is None


def test_the_line_that_lets_a_stopped_rank_go_on_is_for_its_machine() -> None:
    stopped = on(1, "gpu02", msgspec.structs.replace(at(1, ()), state="T", missing="stopped"))
    report = rank_snapshot.stalled(job(on(0, "gpu01", at(0, REDUCE)), stopped), 60.0)
    assert report.help[0].command == "ssh gpu02 kill -CONT 4001"
