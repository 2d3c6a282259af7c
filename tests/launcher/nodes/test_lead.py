"""The lead is pure: histories of what nodes say, and what it decides."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    HelperLost,
    Meeting,
    NodeEvidence,
    RankEvidence,
)
from rallypoint.diagnosis.rendezvous_mismatch import MISFIT_SETTLE
from rallypoint.diagnosis.report import Report
from rallypoint.launcher.nodes.all_ranks import LOOK_AFTER, ROLL_CALL_PATIENCE
from rallypoint.launcher.nodes.decisions import TellAll, TellNodes
from rallypoint.launcher.nodes.joining import Tick
from rallypoint.launcher.nodes.lead import (
    CAUSE_PATIENCE,
    EVIDENCE_PATIENCE,
    OVER_PATIENCE,
    Diagnose,
    Lead,
    Lost,
    NextAttempt,
    Phase,
)
from rallypoint.launcher.nodes.messages import (
    AllWait,
    Ask,
    Dismissed,
    EvidenceOf,
    Failing,
    Judge,
    NodeAnswer,
    Over,
    RankView,
    RollCall,
    Sentence,
    Views,
    WaitInVain,
    decode,
    encode,
)
from rallypoint.launcher.restarts import ENOUGH_TIMES, SOON_AFTER_START, Restarts
from rallypoint.world import World

HOSTS = ("gpu01", "gpu02", "gpu03")
MEETS = Meeting("env://", "10.0.0.1:29500", rank=0, world_size=6, backend="gloo", line="train.py:7")
REPORT = Report("rank-raised", "rank 5 raised ValueError")


class Play:
    """Feeds events at given times and keeps every decision."""

    def __init__(self, *, nodes: int = 3, max_restarts: int = 0) -> None:
        self.machine = Lead(
            World.of([2] * nodes), HOSTS[:nodes], now=0.0, restarts=Restarts(max_restarts), grace=5.0
        )  # fmt: skip
        self.decisions: list[Any] = []

    def at(self, now: float, *events: Any) -> list[Any]:
        fresh = [decision for event in events for decision in self.machine.handle(event, now)]
        self.decisions += fresh
        return fresh

    def judging(self, now: float = 5.0, node: int = 1, **failing: Any) -> list[Any]:
        return self.at(now, Failing(node, "rank 2 raised ValueError", **failing))

    def stopping(
        self, now: float = 5.0, *, status: int = 1, same: str = "", **failing: Any
    ) -> None:
        self.judging(now, **failing)
        self.at(
            now + 0.2, *(evidence(node) for node in range(3)), diagnosed(status, same, (REPORT,))
        )
        assert self.machine.state is Phase.STOPPING

    def tick(self) -> list[Any]:
        return self.at(self.machine.due, Tick())

    def of(self, kind: type[Any]) -> list[Any]:
        """What was decided of this kind, or told to all."""
        told = [getattr(decision, "message", decision) for decision in self.decisions]
        return [decision for decision in told if isinstance(decision, kind)]


def diagnosed(status: int, same: str = "", reports: tuple[Report, ...] = ()) -> Sentence:
    return Sentence(reports, status, same)


def message(decisions: list[Any]) -> Any:
    """The message of the only decision."""
    (decision,) = decisions
    return decision.message


def evidence(node: int) -> EvidenceOf:
    return EvidenceOf(node, NodeEvidence(node=node, host=HOSTS[node]))


def view(rank: int, phase: str = "joining", **known: Any) -> RankView:
    asked = {"meeting": replace(MEETS, rank=rank)} if phase != "started" else {}
    return RankView(rank, phase, **{**asked, **known})


def views(node: int, *changed: RankView) -> Views:
    return Views(node, changed)


def joining(node: int, **known: Any) -> Views:
    return views(node, *(view(rank, **known) for rank in (2 * node, 2 * node + 1)))


def over(*nodes: int, well: bool = False) -> list[Over]:
    return [Over(node, well) for node in nodes]


def test_a_job_that_goes_well_on_all_nodes() -> None:
    play = Play()
    assert play.machine.due == math.inf
    assert play.at(100.0, *over(1, 0, well=True)) == []
    dismissed = message(play.at(200.0, *over(2, well=True)))
    assert (dismissed.status, play.machine.state) == (0, Phase.OVER)
    assert play.machine.due == math.inf


def test_a_failure_on_one_node_is_judged_on_all() -> None:
    play = Play()
    assert play.judging() == [TellAll(Judge("rank 2 raised ValueError"), 1)]
    assert play.at(5.1, evidence(1), evidence(0)) == []
    (diagnose,) = play.at(5.2, evidence(2))
    assert isinstance(diagnose, Diagnose)
    assert {*diagnose.failed.evidence} == {0, 1, 2}
    assert (diagnose.lost, diagnose.failed.unheard) == ({}, ())
    (sentence,) = play.at(5.3, diagnosed(3, "", (REPORT,)))
    assert sentence == TellAll(Sentence((REPORT,), 3))
    assert play.at(5.5, *over(0, 1)) == []
    dismissed = message(play.at(5.6, *over(2)))
    assert dismissed == Dismissed(3, "rank 2 raised ValueError")


def test_failures_of_several_nodes_are_one_judgement() -> None:
    play = Play()
    play.judging()
    assert play.at(5.01, Failing(2, "rank 4 lost a peer")) == []
    play.at(5.2, *(evidence(node) for node in range(3)))
    play.at(5.3, diagnosed(1), Failing(0, "rank 0 lost a peer"))
    assert len(play.of(Judge)) == len(play.of(Diagnose)) == len(play.of(Sentence)) == 1


def test_a_silent_node_is_named_and_not_waited_for() -> None:
    play = Play()
    play.judging()
    play.at(5.2, evidence(0), evidence(1))
    assert play.machine.due == 5.0 + EVIDENCE_PATIENCE
    (diagnose,) = play.tick()
    assert diagnose.failed.unheard == (HOSTS[2],)
    assert play.at(6.1, evidence(2)) == []
    play.at(6.2, diagnosed(1))
    assert play.machine.state is Phase.STOPPING


def test_the_node_on_which_it_failed_is_given_longer() -> None:
    play = Play()
    play.judging()
    play.at(5.2, evidence(0), evidence(2))
    assert play.tick() == []
    assert play.machine.due == 5.0 + CAUSE_PATIENCE
    (diagnose,) = play.at(6.4, evidence(1))
    assert diagnose.failed.unheard == ()


@pytest.mark.parametrize(
    "known",
    [
        {"helper": HelperLost("template", 7, Ended(0, 9, 5.0))},
        {"problem": Report("port-in-use", "port 29500 is taken")},
    ],
)
def test_a_node_that_can_start_no_rank_forbids_another_attempt(known: dict[str, Any]) -> None:
    play = Play(max_restarts=3)
    play.judging()
    here = NodeEvidence(node=1, host="gpu02", **known)
    play.at(5.2, evidence(0), EvidenceOf(1, here), evidence(2), diagnosed(137, "", (REPORT,)))
    dismissed = message(play.at(6.0, *over(0, 1, 2)))
    assert (type(dismissed), dismissed.status) == (Dismissed, 137)


def test_a_lost_node_is_judged_without_it_and_ends_the_job() -> None:
    play = Play(max_restarts=3)
    (judge,) = play.at(5.0, Lost(2, "no packet comes back"))
    assert judge.but == -1
    assert "gpu03" in judge.message.because
    (diagnose,) = play.at(5.2, evidence(0), evidence(1))
    assert diagnose.lost == {2: "no packet comes back"}
    play.at(5.3, diagnosed(75))
    dismissed = message(play.at(5.5, *over(0, 1)))
    assert (dismissed.status, type(dismissed)) == (75, Dismissed)
    assert "gpu03" in dismissed.because


@pytest.mark.parametrize(("max_restarts", "status"), [(0, 3), (1, 75)])
def test_a_node_lost_after_a_failure_forbids_another_attempt(
    max_restarts: int, status: int
) -> None:
    """The exit status is that of the failure, unless only the loss keeps the job from going on."""
    play = Play(max_restarts=max_restarts)
    play.stopping(status=3)
    play.at(6.0, *over(0, 1))
    dismissed = message(play.at(7.0, Lost(2, "its connection ended")))
    assert dismissed.status == status


def test_what_a_lost_node_still_says_counts_no_more() -> None:
    play = Play()
    play.at(
        5.0, Lost(2, "silent"), evidence(2), *over(2), Failing(2, "rank 4 raised", signal="INT")
    )
    assert len(play.of(Judge)) == 1
    (diagnose,) = play.at(5.2, evidence(0), evidence(1))
    assert {*diagnose.failed.evidence} == {0, 1}


def test_evidence_that_came_before_its_node_was_lost_is_kept() -> None:
    play = Play()
    play.judging(node=2)
    play.at(5.1, evidence(2), Lost(2, "silent"))
    (diagnose,) = play.at(5.2, evidence(0), evidence(1))
    assert {*diagnose.failed.evidence} == {0, 1, 2}
    assert diagnose.lost == {2: "silent"}


def test_the_loss_of_a_node_that_is_done_hurts_nobody() -> None:
    play = Play()
    play.at(5.0, *over(2, well=True), Lost(2, "silent"))
    assert play.machine.state is Phase.RUNNING
    dismissed = message(play.at(9.0, *over(0, 1, well=True)))
    assert dismissed.status == 0


def test_a_node_that_is_done_gives_evidence_too() -> None:
    play = Play()
    play.at(4.0, *over(0, well=True))
    play.judging()
    assert play.at(5.1, evidence(1), evidence(2)) == []
    assert {*play.at(5.2, evidence(0))[0].failed.evidence} == {0, 1, 2}
    play.at(5.3, diagnosed(1))
    dismissed = message(play.at(5.5, *over(1, 2)))
    assert dismissed.status == 1


def test_one_that_ended_well_when_it_was_asked_still_gives_evidence() -> None:
    play = Play()
    play.judging()
    assert play.at(5.1, *over(0, well=True), evidence(1), evidence(2)) == []
    assert play.machine.state is Phase.JUDGING
    assert isinstance(play.at(5.2, evidence(0))[0], Diagnose)


def test_a_node_that_reports_by_itself_and_stops() -> None:
    """The lead was slow: the node's own patience for the sentence was over."""
    play = Play()
    play.judging()
    assert play.at(5.1, *over(1), evidence(0)) == []
    assert isinstance(play.at(5.2, evidence(2))[0], Diagnose)


def test_a_node_that_ends_without_saying_why_is_a_failure() -> None:
    play = Play()
    (judge,) = play.at(5.0, *over(1))
    assert judge.but == 1
    assert "gpu02" in judge.message.because


def test_another_attempt_on_all_nodes() -> None:
    play = Play(max_restarts=1)
    play.stopping()
    assert play.at(6.0, *over(0, 2)) == []
    assert play.at(6.5, *over(1)) == [NextAttempt(1, "rank 2 raised ValueError")]
    assert (play.machine.state, play.machine.attempt) == (Phase.RUNNING, 1)
    play.stopping(20.0, status=4)
    dismissed = message(play.at(21.0, *over(0, 1, 2)))
    assert (dismissed.status, dismissed.times) == (4, 0)


def test_the_same_failure_again_and_again_soon_after_each_start_ends_the_job() -> None:
    play = Play(max_restarts=9)
    now = 0.0
    for _ in range(ENOUGH_TIMES):
        now += 1.0
        play.stopping(now, same="ValueError train.py:7")
        now += 1.0
        play.at(now, *over(0, 1, 2))
    assert len(play.of(NextAttempt)) == ENOUGH_TIMES - 1
    assert play.decisions[-1].message.times == ENOUGH_TIMES


def test_the_same_failure_late_in_each_attempt_does_not() -> None:
    play = Play(max_restarts=9)
    now = 0.0
    for _ in range(2 * ENOUGH_TIMES):
        now += SOON_AFTER_START + 1.0
        play.stopping(now, same="ValueError train.py:7")
        now += 1.0
        play.at(now, *over(0, 1, 2))
    assert len(play.of(NextAttempt)) == 2 * ENOUGH_TIMES


def test_a_job_that_is_stopped_from_outside_is_not_started_again() -> None:
    play = Play(max_restarts=3)
    (judge,) = play.judging(node=0, signal="SIGINT")
    assert (judge.but, judge.message.signal) == (0, "SIGINT")
    (diagnose,) = play.at(5.1, *(evidence(node) for node in range(3)))
    assert diagnose.failed.signal == "SIGINT"
    play.at(5.2, diagnosed(130))
    dismissed = message(play.at(6.0, *over(0, 1, 2)))
    assert dismissed.status == 130


def test_a_signal_that_a_batch_system_sends_to_every_node_is_one_wish() -> None:
    play = Play()
    play.judging(node=0, signal="SIGTERM")
    assert play.at(5.02, Failing(1, "the launcher got SIGTERM", signal="SIGTERM")) == []
    play.at(5.2, *(evidence(node) for node in range(3)), diagnosed(143))
    assert play.at(5.4, Failing(2, "the launcher got SIGTERM", signal="SIGTERM")) == []


@pytest.mark.parametrize("is_judged", [False, True])
def test_a_second_signal_to_one_node_is_told_to_all(is_judged: bool) -> None:
    play = Play()
    play.judging(node=0, signal="SIGINT")
    if is_judged:
        play.at(5.2, *(evidence(node) for node in range(3)), diagnosed(130))
    again = Failing(0, "the launcher got SIGINT a second time", signal="SIGINT")
    assert play.at(7.0, again) == [TellAll(Judge(again.because, "SIGINT"), 0)]


def test_ctrl_c_while_a_failure_is_judged_or_its_ranks_are_stopped_is_told_to_all() -> None:
    for is_judged in (False, True):
        play = Play(max_restarts=3)
        play.judging()
        if is_judged:
            play.at(5.2, *(evidence(node) for node in range(3)), diagnosed(1))
        signal = Failing(0, "the launcher got SIGINT", signal="SIGINT")
        assert play.at(5.3, signal) == [TellAll(Judge(signal.because, "SIGINT"), 0)]
        play.at(5.4, *(evidence(node) for node in range(3)), diagnosed(1))
        dismissed = message(play.at(6.0, *over(0, 1, 2)))
        assert isinstance(dismissed, Dismissed)


def test_a_node_that_does_not_end_its_ranks_is_given_up() -> None:
    play = Play()
    play.stopping()
    play.at(6.0, *over(0, 1))
    assert play.machine.due == pytest.approx(5.2 + 5.0 + OVER_PATIENCE)
    dismissed = message(play.tick())
    assert dismissed.status == 1


def test_when_no_rank_of_any_node_goes_on_all_are_told() -> None:
    play = Play()
    play.stopping(status=143, node=0, signal="SIGTERM")
    assert play.at(6.0, AllWait(0), AllWait(1)) == []
    assert isinstance(message(play.at(6.1, AllWait(2))), WaitInVain)


def test_one_rank_that_ends_or_goes_on_may_end_the_wait_of_others() -> None:
    play = Play()
    play.stopping(status=143, node=0, signal="SIGTERM")
    assert play.at(6.0, AllWait(0), AllWait(1), views(1, view(2, ended=(0, 0))), AllWait(2)) == []
    assert play.at(6.2, AllWait(0), AllWait(1, waits=False)) == []
    assert play.at(6.3, *over(1), AllWait(0)) == []
    assert isinstance(message(play.at(6.4, AllWait(2))), WaitInVain)


# --- the ranks of all nodes


def test_a_rank_that_left_well_while_ranks_of_other_nodes_wait_for_it() -> None:
    """No node can see that alone."""
    play = Play()
    play.at(3.0, joining(0), joining(1), views(2, view(4)))
    assert play.machine.due == 33.0
    play.at(4.0, views(2, view(5, "done", ended=(0, 0))))
    assert play.machine.due == 4.0 + LOOK_AFTER
    (judge,) = play.tick()
    assert judge.but == -1
    assert "rank 5 on gpu03 left" in judge.message.because


def test_one_that_has_met_the_others_may_leave_before_they_have_told_of_that() -> None:
    play = Play()
    play.at(3.0, joining(0), joining(1), joining(2))
    play.at(4.0, views(2, *(view(rank, "done", ended=(0, 0), joined=1) for rank in (4, 5))))
    assert play.tick() == []
    play.at(4.1, *(views(node, *(view(rank, "running", joined=1) for rank in (2 * node, 2 * node + 1))) for node in (0, 1)))  # fmt: skip
    assert play.machine.due == math.inf
    assert not play.decisions


def test_ranks_of_two_nodes_that_look_for_each_other_at_different_places() -> None:
    play = Play()
    other = replace(MEETS, address="10.0.0.1:29555")
    play.at(3.0, joining(0), joining(1), joining(2, meeting=other))
    while play.machine.due < 3.0 + MISFIT_SETTLE:
        assert play.tick() == []
    (judge,) = play.tick()
    assert "different addresses" in judge.message.because
    (diagnose,) = play.at(6.0, *(evidence(node) for node in range(3)))
    assert diagnose.failed.misfit.code == "address-differs"


def test_one_that_tries_another_place_in_time_is_no_misfit() -> None:
    play = Play()
    other = replace(MEETS, address="10.0.0.1:29555")
    play.at(3.0, joining(0), joining(1), joining(2, meeting=other))
    play.tick()
    play.at(3.5, joining(2))
    while play.machine.due < 30.0:
        assert play.tick() == []
    assert play.at(40.0, Failing(1, "rank 2 raised")) == [TellAll(Judge("rank 2 raised"), 1)]
    (diagnose,) = play.at(40.2, *(evidence(node) for node in range(3)))
    assert diagnose.failed.misfit is None


def test_a_roll_call_asks_the_nodes_of_the_missing_and_names_rank_and_host() -> None:
    play = Play()
    play.at(3.0, joining(0), views(1, view(2)), views(2, view(4, "importing", lasted=2.0)))
    asked = play.tick()
    number = asked[0].message.number
    assert asked == [
        TellNodes((1,), Ask("roll-call", number, (3,))),
        TellNodes((2,), Ask("roll-call", number, (4, 5))),
    ]
    stack = (Frame("/job/data.py", 88, "build_index", "index = build()"),)
    play.at(33.1, NodeAnswer(1, number, (RankEvidence(3, 1, 9, "importing", stack=stack),)))
    roll = message(play.at(33.2, NodeAnswer(2, number, states={4: "stopped (SIGSTOP)"})))
    assert isinstance(roll, RollCall)
    text = "\n".join(roll.lines)
    assert "3 of 6 ranks" in roll.lines[0]
    assert "rank 3 on gpu02" in text
    assert "data.py:88" in text
    assert "rank 4 on gpu03" in text
    assert "stopped (SIGSTOP)" in text
    assert play.machine.due == 63.0
    assert play.machine.state is Phase.RUNNING


def test_a_node_that_does_not_answer_a_roll_call_is_not_waited_for() -> None:
    play = Play()
    play.at(3.0, joining(0), joining(1))
    asked = message(play.tick())
    assert asked.ranks == (4, 5)
    assert play.machine.due == 33.0 + ROLL_CALL_PATIENCE
    roll = message(play.tick())
    assert "ranks 4-5 on gpu03" in "\n".join(roll.lines)


def test_nobody_is_called_while_a_person_is_at_a_debugger() -> None:
    play = Play()
    play.at(3.0, joining(0), views(1, view(2, "running", debugged=True)))
    assert play.tick() == []
    assert play.machine.due == 63.0


def test_another_attempt_knows_nothing_of_the_ranks_before_it() -> None:
    play = Play(max_restarts=1)
    play.at(3.0, views(2, view(5, "done", ended=(0, 0))))
    play.stopping()
    play.at(6.0, *over(0, 1, 2))
    play.at(7.0, joining(0))
    assert play.machine.due == 37.0


@pytest.mark.parametrize(
    "message", [evidence(1), joining(0), NodeAnswer(1, 2, (), {3: "stopped"}), *over(1, well=True)]
)
def test_messages_come_through_as_they_were(message: Any) -> None:
    assert decode(encode(message)) == message
