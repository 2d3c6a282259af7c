"""Joining is pure: who comes, in which order, and what the lead decides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rallypoint.launcher.nodes import refusals
from rallypoint.launcher.nodes.decisions import Tell, TellAll
from rallypoint.launcher.nodes.joining import (
    DUPLICATE_PATIENCE,
    ROLL_CALL_OF_NODES,
    TRY_PATIENCE,
    WORDS_MOST,
    Came,
    Form,
    Joining,
    Rejected,
    Stage,
    Tick,
    Went,
)
from rallypoint.launcher.nodes.messages import (
    Applicant,
    Missing,
    Offers,
    Reachable,
    Refused,
    Try,
    Versions,
    decode,
    encode,
)
from rallypoint.world import World

VERSIONS = Versions("0.1.0", "2.13.0+cpu", "3.11.7")
LEAD = Applicant(
    "a0", "gpu00", 100, 2, 3, VERSIONS, "digest",
    reached="127.0.0.1", addresses=("10.0.0.1", "192.168.0.1"), offers=Offers(29500, 29501),
)  # fmt: skip


def applicant(number: int, **changed: Any) -> Applicant:
    own = {"id": f"a{number}", "host": f"gpu{number:02}", "addresses": (f"10.0.0.{number + 1}",)}
    return replace(LEAD, **{**own, "reached": "10.0.0.1", "offers": None, **changed})


def joining(*, nodes: int = 3, timeout: float = 600.0) -> Joining:
    return Joining(replace(LEAD, nnodes=nodes), timeout=timeout)


def come(machine: Joining, *applicants: Applicant, now: float = 1.0) -> list[Any]:
    return [decision for one in applicants for decision in machine.handle(Came(one), now)]


def refusal(decision: Any) -> tuple[str, Refused]:
    """Who is refused, and with which words."""
    assert isinstance(decision, Tell)
    assert isinstance(decision.message, Refused)
    return decision.id, decision.message


def lines_of(decision: Any) -> tuple[str, ...]:
    """What all are told of those that are missing."""
    assert isinstance(decision, TellAll)
    assert isinstance(decision.message, Missing)
    return decision.message.lines


def test_the_world_is_formed_when_all_are_here() -> None:
    machine = joining()
    assert come(machine, applicant(1, slots=4), LEAD) == []
    (form,) = come(machine, applicant(2))
    assert isinstance(form, Form)
    assert machine.state is Stage.FORMED
    assert form.world == World.of([2, 4, 2])
    assert [form.seats[f"a{node}"].node for node in range(3)] == [0, 1, 2]
    assert {seat.master_addr for seat in form.seats.values()} == {"10.0.0.1"}
    seat = form.seats["a1"]
    assert (seat.master_port, seat.store, seat.ranks) == (
        29500,
        "tcp://10.0.0.1:29501",
        range(2, 6),
    )
    assert seat.buddies == ("10.0.0.3",)
    assert machine.hosts == ("gpu00", "gpu01", "gpu02")
    assert machine.nodes == {"a0": 0, "a1": 1, "a2": 2}
    assert machine.due == math.inf


def test_another_attempt_has_the_same_places_and_other_ports() -> None:
    machine = joining(nodes=2)
    come(machine, LEAD, applicant(1, nnodes=2))
    seat = machine.seats(1, Offers(30000, 30001))["a1"]
    assert (seat.attempt, seat.node, seat.master_port) == (1, 1, 30000)
    assert seat.store == "tcp://10.0.0.1:30001"


def test_a_place_that_was_asked_for_is_given_and_the_rest_go_in_the_order_of_coming() -> None:
    machine = joining()
    (form,) = come(machine, applicant(1), applicant(2, node_rank=1), LEAD)
    assert isinstance(form, Form)
    assert [form.seats[id].node for id in ("a0", "a1", "a2")] == [0, 2, 1]


def test_a_key_that_is_told_again_changes_nothing() -> None:
    machine = joining()
    assert come(machine, LEAD, applicant(1), LEAD, applicant(1)) == []
    come(machine, applicant(2))
    assert come(machine, LEAD, applicant(2)) == []


def test_one_that_goes_before_the_world_is_formed_leaves_its_place() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1, node_rank=1), applicant(2, node_rank=5))
    machine.handle(Went("a1"), 3.0)
    (form,) = come(machine, applicant(3, node_rank=1), applicant(4))
    assert isinstance(form, Form)
    assert [form.seats[id].node for id in ("a3", "a4")] == [1, 2]


def test_who_comes_when_all_places_are_taken_is_told_that() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(2))
    (refused,) = come(machine, applicant(3))
    id, refused = refusal(refused)
    assert (id, refused.code, refused.status) == ("a3", "job-complete", 2)
    assert "gpu00 (node 0)" in refused.why[0]


def test_who_comes_while_the_job_ends_is_asked_to_come_again() -> None:
    """A pod was made anew while the others still saved their checkpoints: it ended with 2, and by
    that the whole job. Of two jobs that follow each other the second has another program.
    """
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(2))
    machine.handle(Went("a1"), 3.0)
    for late in (applicant(3), applicant(4, digest="of another program")):
        (refused,) = come(machine, late)
        id, refused = refusal(refused)
        assert (id, refused.code, refused.status) == (late.id, "job-complete", 75)


def test_the_leads_own_place_is_kept_for_it() -> None:
    """Its own applicant is a message like all others, and may come last."""
    machine = joining()
    (refused,) = come(machine, applicant(1), applicant(2), applicant(3))
    id, refused = refusal(refused)
    assert (id, refused.code) == ("a3", "job-complete")
    assert isinstance(come(machine, LEAD)[0], Form)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"versions": replace(VERSIONS, torch="2.12.1")}, "torch 2.12"),
        ({"versions": replace(VERSIONS, torch="")}, "no torch"),
        ({"versions": replace(VERSIONS, python="3.12.1")}, "Python 3.12"),
        ({"versions": replace(VERSIONS, rallypoint="0.1.1")}, "rallypoint 0.1.1"),
        ({"nnodes": 4}, "--nnodes 4"),
        ({"digest": "another"}, "another program"),
    ],
)
def test_one_that_was_started_for_something_else_is_refused_by_name(
    changed: dict[str, Any], named: str
) -> None:
    machine = joining()
    (refused,) = come(machine, LEAD, applicant(1, **changed))
    _, refused = refusal(refused)
    assert refused.code == "node-skew"
    assert "gpu01" in refused.headline
    assert named in refused.headline
    assert refused.why
    assert refused.help
    assert come(machine, applicant(2)) == []
    assert isinstance(come(machine, applicant(3))[0], Form)


def test_a_place_that_there_is_not() -> None:
    (refused,) = come(joining(), LEAD, applicant(1, node_rank=3))
    _, refused = refusal(refused)
    assert "--node-rank 3" in refused.headline


def test_torch_may_differ_in_its_last_number_and_that_is_told() -> None:
    patched = replace(VERSIONS, torch="2.13.1")
    told, form = come(joining(), LEAD, applicant(1, versions=patched), applicant(2))
    lines = lines_of(told)
    assert "torch 2.13.1 on gpu01" in lines[0]
    assert isinstance(form, Form)


def test_of_two_nodes_of_one_host_a_dead_one_has_no_place() -> None:
    """Its process was killed and started again, quicker than its session could end."""
    machine = joining()
    asked = come(machine, LEAD, applicant(1), applicant(3, host="gpu01"))
    assert asked == [Tell("a1", Try(())), Tell("a3", Try(()))]
    assert machine.handle(Reachable("a3", ()), 1.1) == []
    assert machine.handle(Went("a1"), 1.5) == []
    (form,) = come(machine, applicant(2), now=5.0)
    assert isinstance(form, Form)
    assert machine.nodes == {"a0": 0, "a3": 1, "a2": 2}


def test_a_node_that_comes_while_a_dead_one_is_asked_has_its_place() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(3, host="gpu01"))
    machine.handle(Reachable("a3", ()), 1.1)
    assert come(machine, applicant(2), applicant(4), now=1.2) == []
    form, decision = machine.handle(Went("a1"), 1.5)
    assert isinstance(form, Form)
    assert machine.nodes == {"a0": 0, "a3": 1, "a2": 2}
    id, refused = refusal(decision)
    assert (id, refused.code) == ("a4", "job-complete")


def test_two_nodes_of_one_host_that_live_have_their_places() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(2, host="gpu01"))
    assert machine.handle(Reachable("a1", ()), 1.1) == []
    (form,) = machine.handle(Reachable("a2", ()), 1.2)
    assert isinstance(form, Form)
    assert {seat.master_addr for seat in form.seats.values()} == {"10.0.0.1"}


def test_nodes_of_one_host_are_told_apart() -> None:
    here = [replace(LEAD, host="gpu01"), applicant(1, pid=7), applicant(2)]
    machine = Joining(here[0], timeout=600.0)
    come(machine, *here)
    for id in ("a1", "a2"):
        machine.handle(Reachable(id, ()), 1.1)
    (refused,) = come(machine, applicant(3))
    id, refused = refusal(refused)
    assert refused.why == ("they are gpu01 (node 0, pid 100), gpu01 (pid 7), gpu02",)


def test_two_that_ask_for_one_place_and_live() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1, node_rank=1))
    assert come(machine, applicant(2, node_rank=1), now=5.0) == []
    assert machine.handle(Tick(), 5.0 + DUPLICATE_PATIENCE / 2) == []
    assert machine.due == 5.0 + DUPLICATE_PATIENCE
    (decision,) = machine.handle(Tick(), machine.due)
    id, refused = refusal(decision)
    assert (id, refused.code) == ("a2", "node-duplicate")
    assert "gpu01 and gpu02" in refused.headline


@pytest.mark.parametrize(
    ("address", "told"), [("0.0.0.0", False), ("10.0.0.1", False), ("127.0.0.1", True)]
)
def test_a_lead_that_other_machines_do_not_reach_is_named(address: str, told: bool) -> None:
    """Each of two machines that were given localhost leads, and waits for the other."""
    machine = Joining(LEAD, timeout=600.0, listens_on=address)
    come(machine, LEAD)
    (missing,) = machine.handle(Tick(), ROLL_CALL_OF_NODES)
    lines = lines_of(missing)
    assert any("other machines do not reach" in line for line in lines) is told


def test_a_lead_that_is_alone_says_why_it_leads() -> None:
    """Each of two nodes leads where a name has the addresses of both, or both have the folder."""
    machine = Joining(LEAD, timeout=600.0, leads_since="gpu00 leads since it has the address job")
    come(machine, LEAD)
    (missing,) = machine.handle(Tick(), ROLL_CALL_OF_NODES)
    assert lines_of(missing)[-1] == "gpu00 leads since it has the address job"
    come(machine, applicant(1))
    (missing,) = machine.handle(Tick(), 2 * ROLL_CALL_OF_NODES)
    assert not any("leads since" in line for line in lines_of(missing))


def test_one_that_asks_for_the_place_of_the_lead() -> None:
    """It may come before the lead's own applicant has."""
    machine = joining()
    assert come(machine, applicant(1, node_rank=0), LEAD) == []
    (decision,) = machine.handle(Tick(), machine.due)
    id, refused = refusal(decision)
    assert (id, refused.code) == ("a1", "node-duplicate")


def test_a_node_that_was_started_again_has_the_place_of_its_dead_process() -> None:
    """Its scheduler is quicker than the lease of the process that is gone."""
    machine = joining()
    come(machine, LEAD, applicant(1, node_rank=1), applicant(3, host="gpu01", node_rank=1))
    machine.handle(Went("a1"), 2.0)
    (form,) = come(machine, applicant(2))
    assert isinstance(form, Form)
    assert form.seats["a3"].node == 1


def test_the_younger_of_two_for_one_place_is_refused_when_the_world_is_formed() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1, node_rank=1), applicant(3, node_rank=1))
    refused, form = come(machine, applicant(2))
    id, refused = refusal(refused)
    assert (id, refused.code) == ("a3", "node-duplicate")
    assert isinstance(form, Form)
    assert machine.due == math.inf


def test_after_a_while_the_missing_are_named_with_what_those_that_tried_said() -> None:
    machine = joining(nodes=5)
    come(machine, replace(LEAD, nnodes=5), applicant(1, nnodes=5, node_rank=1))
    come(machine, applicant(2, nnodes=4), applicant(3, nnodes=5, node_rank=3), now=2.0)
    machine.handle(Went("a3"), 4.0)
    machine.handle(Rejected("10.0.0.9", "its secret is another one"), 5.0)
    assert machine.handle(Tick(), ROLL_CALL_OF_NODES - 0.1) == []
    assert machine.due == ROLL_CALL_OF_NODES
    (told,) = machine.handle(Tick(), ROLL_CALL_OF_NODES)
    lines = lines_of(told)
    text = "\n".join(lines)
    assert "2 of 5 nodes" in text
    assert "nodes 2-4" in text
    assert all(host in text for host in ("gpu02", "gpu03", "10.0.0.9"))
    assert "its secret is another one" in text
    assert machine.due == 2 * ROLL_CALL_OF_NODES


def test_where_a_node_was_refused_more_time_is_not_the_first_advice() -> None:
    for roll, first in (
        (["refused: gpu02 was started with another program"], "read in the report of the node"),
        (["missing: node 1"], "start the same command on every node"),
    ):
        assert refusals.timed_out("1 of 2 nodes did not come", roll).help[0][0].startswith(first)


def test_a_stranger_cannot_write_lines_on_the_screens_of_the_nodes() -> None:
    """What it says of itself is shown, and anybody may say anything."""
    machine = joining()
    come(machine, LEAD)
    because = "this is the store of job 7, not of \n\x1b[2Jrallypoint: 3 of 3 nodes have come"
    machine.handle(Rejected("10.0.0.9", because), 1.0)
    (told,) = machine.handle(Tick(), ROLL_CALL_OF_NODES)
    lines = lines_of(told)
    assert lines[-1].startswith("refused: 10.0.0.9: this is the store of job 7")
    assert all(line.isprintable() for line in lines)


def test_a_node_that_comes_with_the_right_secret_at_last_is_not_named_for_it() -> None:
    machine = joining()
    come(machine, LEAD)
    machine.handle(Rejected("10.0.0.1", "it has another secret"), 1.0)
    for number in range(WORDS_MOST):
        machine.handle(Rejected(f"fd00::{number:x}", "it has another secret"), 1.0)
    machine.handle(Rejected("10.1.0.1", "it has another secret"), 1.0)
    assert len(machine._last_words) == WORDS_MOST
    come(machine, applicant(1, addresses=("10.1.0.1",)))
    (told,) = machine.handle(Tick(), ROLL_CALL_OF_NODES)
    lines = lines_of(told)
    assert "10.1.0.1" not in str(lines)
    assert "fd00::ff" in str(lines)


def test_a_job_whose_nodes_do_not_come_is_given_up() -> None:
    machine = joining(timeout=30.0)
    come(machine, LEAD, applicant(1), applicant(1, id="a9", node_rank=0))
    refused = [refusal(one) for one in machine.handle(Tick(), 30.0)]
    assert {(id, one.code, one.status) for id, one in refused} == {
        ("a0", "join-timeout", 75),
        ("a1", "join-timeout", 75),
        ("a9", "node-duplicate", 2),
    }
    assert machine.state is Stage.CLOSED
    assert machine.due == math.inf
    (late,) = come(machine, applicant(2))
    _, late = refusal(late)
    assert late.code == "join-timeout"


def test_a_node_on_the_leads_host_meets_the_others_at_an_address_that_they_reach() -> None:
    (form,) = come(joining(), LEAD, applicant(1, reached="127.0.0.1"), applicant(2))
    assert isinstance(form, Form)
    assert form.seats["a1"].master_addr == "10.0.0.1"


def test_all_nodes_on_one_host_meet_over_loopback() -> None:
    here = {"reached": "127.0.0.1"}
    (form,) = come(joining(), LEAD, applicant(1, **here), applicant(2, **here))
    assert isinstance(form, Form)
    assert form.seats["a1"].store == "tcp://127.0.0.1:29501"


def test_nodes_that_came_by_different_addresses_try_all_of_them() -> None:
    machine = joining()
    decisions = come(machine, LEAD, applicant(1), applicant(2, reached="192.168.0.1"))
    assert decisions == [
        Tell("a1", Try(("10.0.0.1", "192.168.0.1"))),
        Tell("a2", Try(("10.0.0.1", "192.168.0.1"))),
    ]
    assert machine.handle(Reachable("a1", ("10.0.0.1", "192.168.0.1")), 2.0) == []
    (form,) = machine.handle(Reachable("a2", ("192.168.0.1",)), 2.1)
    assert isinstance(form, Form)
    assert {seat.master_addr for seat in form.seats.values()} == {"192.168.0.1"}


def test_one_that_does_not_answer_reaches_the_address_by_which_it_came() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(2, reached="192.168.0.1"))
    machine.handle(Reachable("a1", ("10.0.0.1", "192.168.0.1")), 2.0)
    assert machine.due == 1.0 + TRY_PATIENCE
    (form,) = machine.handle(Tick(), machine.due)
    assert isinstance(form, Form)
    assert form.seats["a1"].master_addr == "192.168.0.1"


def test_no_address_that_all_reach() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(2, reached="192.168.0.1"))
    machine.handle(Reachable("a1", ("10.0.0.1",)), 2.0)
    refused = [refusal(one) for one in machine.handle(Reachable("a2", ("192.168.0.1",)), 2.1)]
    assert {id for id, _ in refused} == {"a0", "a1", "a2"}
    first = refused[0][1]
    assert first.code == "no-common-address"
    assert set(first.why) == {"gpu01: 10.0.0.1", "gpu02: 192.168.0.1"}
    assert machine.state is Stage.CLOSED


def test_a_second_of_one_rank_hears_too_that_no_address_is_reached_by_all() -> None:
    machine = joining()
    twice = applicant(3, node_rank=1)
    come(machine, LEAD, applicant(1, node_rank=1), twice, applicant(2, reached="192.168.0.1"))
    machine.handle(Reachable("a1", ("10.0.0.1",)), 2.0)
    told = machine.handle(Reachable("a2", ("192.168.0.1",)), 2.1)
    assert refusal(told[-1])[0] == twice.id
    assert machine.due == math.inf  # or its lead would never rest


def test_one_that_goes_while_the_others_try_is_waited_for_again() -> None:
    machine = joining()
    come(machine, LEAD, applicant(1), applicant(2, reached="192.168.0.1"))
    machine.handle(Went("a2"), 2.0)
    assert machine.state is Stage.GATHERING
    assert machine.handle(Reachable("a1", ("10.0.0.1",)), 2.1) == []
    (form,) = come(machine, applicant(3))
    assert isinstance(form, Form)
    assert form.seats["a3"].master_addr == "10.0.0.1"


@given(st.permutations(range(5)), st.sets(st.integers(1, 4)))
def test_any_order_of_coming_gives_each_place_once(order: list[int], given: set[int]) -> None:
    machine = joining(nodes=5)
    ranks = {number: number if number in given else None for number in range(1, 5)}
    all_of_them = [replace(LEAD, nnodes=5), *(
        applicant(number, nnodes=5, node_rank=ranks[number], slots=number) for number in range(1, 5)
    )]  # fmt: skip
    decisions = come(machine, *(all_of_them[number] for number in order))
    (form,) = decisions
    assert isinstance(form, Form)
    assert sorted(seat.node for seat in form.seats.values()) == [0, 1, 2, 3, 4]
    assert all(form.seats[f"a{rank}"].node == rank for rank in given)
    assert form.seats["a0"].node == 0
    assert sorted(itertools.chain(*(seat.ranks for seat in form.seats.values()))) == [*range(12)]


def test_an_applicant_of_another_version_can_be_read() -> None:
    """A field that this version does not know is no reason not to refuse the node by name."""
    import msgspec

    later = msgspec.msgpack.decode(encode(applicant(1)))
    later["a_new_field"] = 1
    assert decode(msgspec.msgpack.encode(later)) == applicant(1)
