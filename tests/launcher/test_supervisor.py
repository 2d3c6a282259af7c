"""The supervisor is pure: histories of events, and what it decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.launcher.agent import supervisor as sv
from rallypoint.launcher.agent.supervisor import State, Supervisor
from rallypoint.launcher.plan import ROLL_CALL

WELL = (0, 0)


class Play:
    """Feeds events at given times, answers `MakeReport` with `Judged` as the agent does, and keeps
    every action.
    """

    def __init__(
        self,
        ranks: int = 4,
        *,
        max_restarts: int = 0,
        grace: float = 30.0,
        on_failure: Any = "stop",
        status: int = 1,
    ) -> None:
        self.machine = Supervisor(
            range(ranks), max_restarts=max_restarts, grace=grace, on_failure=on_failure
        )
        self.actions: list[sv.Action] = []
        self.now = 0.0
        self._ranks, self._status = ranks, status

    def at(self, now: float, *events: sv.JobEvent) -> list[sv.Action]:
        self.now = now
        fresh: list[sv.Action] = []
        for event in events:
            waiting = self.machine.handle(event, now)
            while waiting:
                action, *waiting = waiting
                fresh.append(action)
                if isinstance(action, sv.MakeReport):
                    waiting = self.machine.handle(sv.Judged(self._status), now) + waiting
        self.actions += fresh
        return fresh

    def running(self) -> Play:
        self.at(1.0, sv.Prepared())
        return self

    def joined(self) -> Play:
        self.running()
        for phase in ("joining", "running"):
            self.at(1.5, *(sv.PhaseEntered(rank, phase) for rank in range(self._ranks)))
        return self

    def of(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def status(self) -> int | None:
        leaving = self.of(sv.Leave)
        return leaving[-1].status if leaving else None


def ended(rank: int, code: int = 0, signal: int = 0, *, sure: bool = False) -> sv.RankEnded:
    return sv.RankEnded(rank, code, signal, sure, f"rank {rank} ended with {code or signal}")


def raised(rank: int, *, consequence: bool = False) -> sv.RankRaised:
    return sv.RankRaised(rank, consequence, f"rank {rank} raised ValueError")


def signalled(actions: Iterable[sv.Action]) -> list[tuple[int, str]]:
    return [
        (action.rank, action.signal) for action in actions if isinstance(action, sv.SignalGroup)
    ]


def test_a_job_that_goes_well_starts_once_and_leaves_with_0() -> None:
    play = Play(2)
    assert play.at(1.0, sv.Prepared()) == [sv.StartRanks(0, "the template is ready")]
    play.at(2.0, sv.PhaseEntered(0, "running"), sv.PhaseEntered(1, "running"))
    assert play.at(3.0, ended(0)) == [sv.CleanGroup(0, kill=False)]
    assert [type(a) for a in play.at(3.1, ended(1))] == [sv.CleanGroup, sv.CleanUp, sv.Leave]
    assert play.of(sv.CleanUp)[0].gently
    assert (play.status, play.machine.state) == (0, State.ENDED)


def test_evidence_is_asked_for_before_anything_is_stopped() -> None:
    play = Play().joined()
    first = play.at(5.0, raised(2))
    assert isinstance(first[0], sv.AskEvidence)
    assert not signalled(first)
    assert play.machine.state is State.JUDGING
    assert signalled(play.at(5.01, sv.EvidenceIn())) == []  # another cause may still arrive
    after = play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    assert isinstance(after[0], sv.MakeReport)
    assert signalled(after) == [(r, "SIGTERM") for r in (0, 1, 3)]  # rank 2 leaves by itself
    assert all(
        "rank 2 raised ValueError" in a.because for a in after if isinstance(a, sv.SignalGroup)
    )


def test_a_rank_that_has_raised_has_the_whole_grace_for_its_atexit_handlers() -> None:
    play = Play(2, grace=30.0).joined()
    play.at(5.0, raised(1), sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    assert signalled(play.at(5.1, ended(0, signal=15))) == []
    assert signalled(play.at(40.0, sv.Timer("grace"))) == [(1, "SIGKILL")]
    assert play.of(sv.SayKilled) == [sv.SayKilled((1,), "the grace of 30 s is over", asked=True)]


def test_a_rank_that_has_raised_is_signalled_when_a_person_stops_the_job() -> None:
    play = Play(2).joined()
    play.at(5.0, raised(1), sv.Signalled("SIGINT"), sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    assert signalled(play.actions) == [(0, "SIGINT"), (1, "SIGINT")]


def test_who_has_not_joined_the_others_is_given_longer_for_the_same_mistake() -> None:
    """A module that is not there: every rank finds that out, each when it comes to that line."""
    play = Play(3).running()
    play.at(5.0, raised(0), sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    assert not play.of(sv.MakeReport)
    play.at(5.2, raised(1))
    play.at(5.0 + sv.SETTLE_APART, sv.Timer("settle"))
    assert len(play.of(sv.MakeReport)) == 1


def test_who_waits_for_the_others_or_has_joined_them_makes_no_mistake_of_its_own_then() -> None:
    play = Play(3).running()
    play.at(2.0, sv.PhaseEntered(0, "joining"), sv.PhaseEntered(1, "joining"))
    play.at(5.0, raised(2), ended(2, code=1), sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    assert len(play.of(sv.MakeReport)) == 1


def test_a_consequence_waits_longer_for_its_cause() -> None:
    play = Play().running()
    play.at(5.0, raised(0, consequence=True), sv.EvidenceIn())
    assert not play.of(sv.MakeReport)
    play.at(
        5.0 + sv.SETTLE, sv.Timer("settle")
    )  # an early ring of an old timer must not cut it short
    play.at(5.2, ended(2, signal=9, sure=True))
    assert play.of(sv.CleanGroup) == [sv.CleanGroup(2, kill=True)]
    play.at(5.0 + sv.SETTLE_FOR_CAUSE, sv.Timer("settle"))
    assert len(play.of(sv.MakeReport)) == 1


def test_no_report_before_the_evidence_is_in() -> None:
    play = Play().joined()
    play.at(5.0, raised(2))
    play.at(5.1, sv.Timer("settle"))
    assert not play.of(sv.MakeReport)
    play.at(5.2, sv.EvidenceIn())
    assert len(play.of(sv.MakeReport)) == 1


def test_the_last_rank_to_die_ends_the_job_with_the_report_s_status() -> None:
    play = Play(2, status=137).running()
    play.at(5.0, ended(0, signal=9, sure=True), ended(1, code=1), sv.EvidenceIn())
    assert play.status == 137
    assert [a.rank for a in play.of(sv.CleanGroup)] == [0, 1]


def stop(play: Play, name: str = "SIGINT") -> Play:
    play.at(5.0, sv.Signalled(name), sv.EvidenceIn())
    play.actions.clear()
    return play


def look(
    play: Play, now: float, deaf: tuple[int, ...] = (), waiting: tuple[int, ...] = ()
) -> list[tuple[int, str]]:
    """What is sent when the ranks are looked at and found so."""
    play.at(now, sv.Timer("stuck"))
    assert isinstance(play.actions[-1], sv.LookWhetherStuck)
    return signalled(play.at(now, sv.Stuck(deaf, waiting)))


def test_who_waits_for_a_rank_that_goes_on_keeps_its_grace() -> None:
    """Rank 0 waited in all_reduce for a slower rank, as in most jobs at most moments, and was
    killed 0.2 s after SIGTERM: rank 1 had run its handler and was about to come, and the checkpoint
    that they agreed to write was lost."""
    play = stop(Play(2, grace=30.0, status=143).running(), "SIGTERM")
    for number in range(100):
        assert look(play, 5.2 + 0.2 * number, deaf=(0,)) == []
    assert not play.of(sv.SayKilled)
    assert signalled(play.at(35.0, sv.Timer("grace"))) == [(0, "SIGKILL"), (1, "SIGKILL")]


def test_when_all_wait_for_each_other_each_gets_the_next_signal() -> None:
    """As in init_process_group, for a rank that has not come."""
    play = stop(Play(2, grace=30.0, status=130).running())
    assert look(play, 5.2, deaf=(0, 1)) == [], (
        "one look may find all asleep while a message is on its way"
    )
    assert look(play, 5.4, deaf=(0, 1)) == [(0, "SIGTERM"), (1, "SIGTERM")]
    assert not play.of(sv.SayKilled), "whether they die of it is theirs"
    assert look(play, 5.6, deaf=(0, 1)) == [(0, "SIGKILL"), (1, "SIGKILL")]
    assert [said.ranks for said in play.of(sv.SayKilled)] == [(0, 1)]
    assert look(play, 5.8, deaf=(0, 1)) == [], "nothing stronger is left"


def test_looks_count_in_a_row() -> None:
    play = stop(Play(2).running())
    for number in range(9):
        assert look(play, 5.2 + number, deaf=(0, 1) if number % 2 else (0,)) == []


def test_who_has_run_its_handler_and_waits_then_keeps_the_grace_and_does_not_keep_others_waiting() -> (
    None
):
    play = stop(Play(2, status=143).running(), "SIGTERM")
    look(play, 5.2, deaf=(0,), waiting=(1,))
    assert look(play, 5.4, deaf=(0,), waiting=(1,)) == [(0, "SIGKILL")], "each waits for the other"
    play.at(5.5, ended(0, signal=9))
    for number in range(9):
        assert look(play, 5.7 + number, waiting=(1,)) == []


def test_the_end_of_a_rank_gives_those_who_waited_for_it_the_time_to_notice() -> None:
    """Its sockets are closed, so that their waits end with an error, and their handlers run: some
    milliseconds later.
    """
    play = stop(Play(3).running())
    look(play, 5.2, deaf=(0, 2))
    assert play.at(6.0, ended(1, code=1))[-1] == sv.SetTimer("stuck", 6.0 + sv.STUCK_AFTER)
    assert look(play, 6.2, deaf=(0, 2)) == []
    assert look(play, 6.4, deaf=(2,)) == [], "rank 0 saves"
    play.at(8.0, ended(0, code=1))
    assert look(play, 8.2, deaf=(2,)) == []
    assert look(play, 8.4, deaf=(2,)) == [(2, "SIGTERM")], "nobody is left for whom it could wait"


def test_after_a_failure_who_waits_gets_the_next_signal_at_once() -> None:
    """The rank that it waits for has failed."""
    play = Play(3).joined()
    play.at(5.0, raised(2), sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    play.actions.clear()
    assert look(play, 5.3, deaf=(0,)) == [(0, "SIGKILL")]
    assert play.of(sv.SayKilled)[0].ranks == (0,)
    assert play.of(sv.SayKilled)[0].because.startswith("it waits")


def test_ranks_that_are_watched_for_long_are_looked_at_more_rarely() -> None:
    play = stop(Play(2, grace=600.0).running())
    now, looks = 5.2, 0
    while now < 65.0:
        looks += 1
        look(play, now, deaf=(0,))
        now = play.of(sv.SetTimer)[-1].at
    assert looks < 90


@pytest.mark.parametrize("asked", ["judging", "stopping"])
def test_a_second_signal_kills_now_and_one_that_comes_with_the_first_does_not(asked: str) -> None:
    """Ctrl-C under `timeout --foreground` came from the terminal and from timeout, and ended
    `except KeyboardInterrupt: save()`.
    """
    play = Play(2, status=130).running()
    play.at(5.0, sv.Signalled("SIGINT"), *([sv.EvidenceIn()] if asked == "stopping" else []))
    assert play.at(5.0, sv.Signalled("SIGINT")) == []
    assert play.at(5.4, sv.Signalled("SIGTERM")) == []
    killed = play.at(5.6, sv.Signalled("SIGINT"))
    assert signalled(killed) == [(0, "SIGKILL"), (1, "SIGKILL")]
    assert [action.ranks for action in killed if isinstance(action, sv.SayKilled)] == [(0, 1)]


def test_a_lost_c10d_host_does_not_shorten_the_grace() -> None:
    play = Play(1, status=143).running()
    play.at(5.0, sv.Signalled("SIGTERM"), sv.EvidenceIn(), sv.HelperEnded("c10d host"))
    assert signalled(play.actions) == [(0, "SIGTERM")]


def test_ctrl_c_before_any_rank_was_started() -> None:
    play = Play(2, status=130)
    play.at(0.5, sv.Signalled("SIGINT"))
    assert play.of(sv.MakeReport) == [sv.MakeReport("interrupted", "the launcher got SIGINT")]
    assert not signalled(play.actions)
    assert play.status == 130


def test_what_would_not_die_is_given_up_and_said() -> None:
    play = Play(2, grace=1.0).running()
    play.at(5.0, raised(0), sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    play.at(6.1, sv.Timer("grace"), ended(0, code=1))
    last = play.at(6.1 + sv.KILL_PATIENCE, sv.Timer("patience"))
    assert [type(a) for a in last] == [sv.CleanUp, sv.Leave]
    assert "rank 1 would not die" in last[0].because  # type: ignore[attr-defined]


def test_who_waits_for_the_end_is_told_for_what_and_how_to_end_it() -> None:
    """For thirty seconds nothing was said, and that ranks were killed after them never."""
    play = Play(3, grace=30.0, status=130).running()
    play.at(5.0, sv.Signalled("SIGINT"), sv.EvidenceIn())
    play.at(5.1, ended(1, signal=2))
    assert not play.of(sv.SayWaiting)
    assert play.at(5.0 + sv.SILENT, sv.Timer("silent")) == [
        sv.SayWaiting((0, 2), 30.0, "Ctrl-C again")
    ]
    play.at(8.0, ended(0, signal=2))
    assert play.at(35.0, sv.Timer("grace"))[-1] == sv.SayKilled((2,), "the grace of 30 s is over")
    assert not play.at(36.0, sv.Signalled("SIGINT"))  # it is killed already


@pytest.mark.parametrize(
    ("event", "hurry", "came"),
    [
        (sv.Signalled("SIGTERM"), "a second SIGTERM", "a second signal (SIGINT)"),
        (raised(0), "Ctrl-C", "SIGINT"),
        (sv.Overdue(9.0, 5.0), "Ctrl-C", "SIGINT"),
    ],
    ids=["a batch system", "a failure", "the time is over"],
)
def test_what_ends_the_waiting(event: sv.JobEvent, hurry: str, came: str) -> None:
    play = Play(2, grace=30.0).joined()
    play.at(5.0, event, sv.EvidenceIn())
    play.at(5.0 + sv.SETTLE, sv.Timer("settle"))
    play.at(7.0, sv.Timer("silent"))
    assert [said.hurry for said in play.of(sv.SayWaiting)] == [hurry]
    killed = play.at(8.0, sv.Signalled("SIGINT"))
    assert killed[-1] == sv.SayKilled((0, 1), f"{came} has come")


def test_when_the_time_of_the_whole_job_is_over_a_grace_does_not_go_beyond_it() -> None:
    """`launch(timeout=4)` returned after 34 s when a rank ignored SIGTERM: the grace came
    on top.
    """
    play = Play(2, grace=30.0).joined()
    play.at(4.0, sv.Overdue(4.0, 1.0), sv.EvidenceIn())
    assert play.of(sv.SetTimer)[-1] == sv.SetTimer("grace", 5.0)
    assert signalled(play.at(5.0, sv.Timer("grace"))) == [(0, "SIGKILL"), (1, "SIGKILL")]


def test_the_grace_after_a_failure_ends_with_the_time_of_the_whole_job() -> None:
    play = Play(2, grace=30.0).joined()
    play.at(3.0, ended(0, code=3, sure=True), sv.EvidenceIn())
    play.at(3.0 + sv.SETTLE, sv.Timer("settle"))
    assert sv.SetTimer("grace", 33.0 + sv.SETTLE) in play.of(sv.SetTimer)
    assert play.at(4.0, sv.Overdue(4.0, 1.0)) == [sv.SetTimer("grace", 5.0)]
    assert signalled(play.at(5.0, sv.Timer("grace"))) == [(1, "SIGKILL")]


def test_of_a_grace_of_two_seconds_only_its_end_is_told() -> None:
    play = Play(2, grace=2.0).running()
    play.at(5.0, sv.Signalled("SIGINT"), sv.EvidenceIn())
    assert "silent" not in [timer.name for timer in play.of(sv.SetTimer)]
    assert play.at(7.0, sv.Timer("grace"))[-1] == sv.SayKilled((0, 1), "the grace of 2 s is over")


def test_a_restart_is_a_new_attempt_and_the_last_one_is_final() -> None:
    play = Play(2, max_restarts=1).running()
    for attempt in (0, 1):
        assert play.machine.attempt == attempt
        play.at(5.0, ended(0, code=3), sv.EvidenceIn())
        play.at(5.0 + sv.SETTLE_FOR_CAUSE, sv.Timer("settle"))
        play.at(6.0, ended(1, signal=15))
    assert [a.attempt for a in play.of(sv.StartRanks)] == [0, 1]
    assert play.of(sv.StartRanks)[1].because.startswith("attempt 1 of 1: rank 0 ended with 3")
    assert len(play.of(sv.CleanUp)) == 2
    assert play.status == 1


def test_a_restarted_job_that_then_goes_well_leaves_with_0() -> None:
    play = Play(1, max_restarts=3).running()
    play.at(5.0, ended(0, code=3), sv.EvidenceIn())
    play.at(9.0, ended(0))
    assert play.status == 0


def test_an_interrupted_job_is_not_restarted() -> None:
    play = Play(1, max_restarts=3, status=143).running()
    play.at(5.0, sv.Signalled("SIGTERM"), sv.EvidenceIn())
    play.at(5.1, ended(0, signal=15))
    assert play.status == 143
    assert len(play.of(sv.StartRanks)) == 1


def test_on_failure_continue_reports_and_lets_the_others_finish() -> None:
    play = Play(3, on_failure="continue", status=137).running()
    assert play.at(4.0, raised(1)) == []  # said when it has ended
    play.at(5.0, ended(1, signal=9, sure=True))
    assert len(play.of(sv.MakeReport)) == 1
    assert not signalled(play.actions)
    play.at(6.0, ended(0))
    assert not play.of(sv.Leave)
    play.at(7.0, ended(2))
    assert (play.of(sv.Leave)[0].status, signalled(play.actions)) == (137, [])
    assert not play.of(sv.AskEvidence)  # it would interrupt healthy ranks


def test_on_failure_continue_waits_for_the_cause_of_what_may_be_a_consequence() -> None:
    """Who had lost a peer was told first, as "the cause is not known": its parent hears of a killed
    process later than its peers do.
    """
    play = Play(4, on_failure="continue", status=137).running()
    assert play.at(5.0, ended(0, code=1))[-1] == sv.SetTimer("settle", 5.0 + sv.SETTLE_FOR_CAUSE)
    assert not play.of(sv.MakeReport)
    play.at(5.1, ended(1, signal=9, sure=True))
    assert len(play.of(sv.MakeReport)) == 1  # of both
    play.at(5.0 + sv.SETTLE_FOR_CAUSE, sv.Timer("settle"))
    assert len(play.of(sv.MakeReport)) == 1
    play.at(6.0, ended(2, code=1))
    play.at(6.0 + sv.SETTLE_FOR_CAUSE, sv.Timer("settle"))
    assert len(play.of(sv.MakeReport)) == 2
    play.at(7.0, ended(3, code=1))
    assert len(play.of(sv.MakeReport)) == 3  # nobody is left to wait for
    assert play.status == 137


def test_on_failure_continue_the_last_one_ends_well_while_a_cause_may_still_show() -> None:
    play = Play(2, on_failure="continue", status=3).running()
    play.at(5.0, ended(0, code=3), ended(1))
    assert [made.because for made in play.of(sv.MakeReport)] == ["rank 0 ended with 3"]
    assert play.status == 3


def test_on_failure_continue_when_the_last_one_fails() -> None:
    play = Play(2, on_failure="continue", status=3).running()
    play.at(5.0, ended(0), ended(1, code=3))
    assert play.status == 3


@pytest.mark.parametrize(
    "late", [False, True], ids=["others wait already", "others come to wait later"]
)
def test_a_rank_that_swallowed_its_error_and_left_is_a_failure_at_once(late: bool) -> None:
    play = Play(2).running()
    steps: list[sv.JobEvent] = [sv.Erred(0, "init_process_group"), ended(0)]
    waiting = sv.PhaseEntered(1, "joining")
    play.at(5.0, *([*steps, waiting] if late else [waiting, *steps]))
    assert play.machine.state is State.JUDGING
    assert (
        play.of(sv.AskEvidence)[0].because == "rank 0 left while rank 1 waits in init_process_group"
    )


def test_an_error_that_the_program_recovered_from_is_none() -> None:
    play = Play(2).running()
    play.at(
        2.0, sv.Erred(0, "set_device"), sv.PhaseEntered(0, "joining"), sv.PhaseEntered(1, "joining")
    )
    play.at(3.0, sv.PhaseEntered(0, "running"), sv.PhaseEntered(1, "running"), ended(0), ended(1))
    assert play.status == 0


def test_a_rank_that_never_joined_and_left_while_others_wait_for_it() -> None:
    play = Play(3).running()
    play.at(2.0, sv.PhaseEntered(0, "importing"), sv.PhaseEntered(0, "finishing"), ended(0))
    assert not play.of(sv.AskEvidence)  # nobody has asked for it
    play.at(2.5, sv.PhaseEntered(2, "joining"))  # rank 1 may come or not: rank 2 waits in vain
    assert play.machine.state is State.JUDGING
    assert (
        play.of(sv.AskEvidence)[0].because == "rank 0 left while rank 2 waits in init_process_group"
    )


def test_who_left_before_a_group_of_some_ranks_is_missed_by_nobody() -> None:
    play = Play(3).running()
    play.at(
        2.0,
        ended(0),
        sv.PhaseEntered(1, "joining", whole=False),
        sv.PhaseEntered(2, "joining", whole=False),
    )
    play.at(2.1, sv.PhaseEntered(1, "running"), sv.PhaseEntered(2, "running"), ended(1), ended(2))
    assert play.status == 0


def test_a_rank_that_was_in_the_first_group_and_left_before_the_second() -> None:
    play = Play(2).running()
    play.at(
        2.0,
        sv.PhaseEntered(0, "joining"),
        sv.PhaseEntered(1, "joining"),
        sv.PhaseEntered(0, "running"),
        ended(0),
    )
    assert not play.of(sv.AskEvidence)  # rank 1 is about to leave the call that rank 0 has left
    play.at(2.1, sv.PhaseEntered(1, "running"))
    play.at(3.0, sv.PhaseEntered(1, "joining"))
    assert (
        play.of(sv.AskEvidence)[0].because == "rank 0 left while rank 1 waits in init_process_group"
    )


# --- the roll call
# --------------------------------------------------------------------------------------------------


def test_the_roll_is_called_after_half_a_minute_and_then_ever_more_rarely() -> None:
    play = Play(2).running()
    assert play.at(5.0, sv.PhaseEntered(0, "joining")) == [
        sv.SetTimer("roll call", 5.0 + ROLL_CALL)
    ]
    called, now = [], 35.0
    while now < 5.0 + 1800:  # torch's own timeout
        _, following = play.at(now, sv.Timer("roll call"))
        called.append(now - 5.0)
        assert isinstance(following, sv.SetTimer)
        now = following.at
    assert called == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0]
    assert play.of(sv.CallRoll)[0].because == "rank 0 waits in init_process_group for 30 s"
    assert play.machine.state is State.RUNNING
    assert not play.of(sv.AskEvidence)


def test_nobody_is_called_who_has_come() -> None:
    play = Play(2).running()
    play.at(5.0, sv.PhaseEntered(0, "joining"), sv.PhaseEntered(1, "joining"))
    play.at(5.1, sv.PhaseEntered(0, "running"), sv.PhaseEntered(1, "running"))
    assert play.at(35.0, sv.Timer("roll call")) == []
    assert play.at(40.0, sv.PhaseEntered(1, "joining")) == [
        sv.SetTimer("roll call", 70.0)
    ]  # a second group


def test_each_wait_has_its_own_half_minute() -> None:
    play = Play(3).running()
    play.at(5.0, sv.PhaseEntered(0, "joining"))
    play.at(
        20.0, sv.PhaseEntered(1, "joining"), sv.Erred(0, "init_process_group")
    )  # rank 0 gave up
    assert play.at(35.0, sv.Timer("roll call")) == [sv.SetTimer("roll call", 50.0)]
    assert isinstance(play.at(50.0, sv.Timer("roll call"))[0], sv.CallRoll)


def test_the_roll_is_not_called_while_a_person_is_at_a_debugger() -> None:
    play = Play(2).running()
    play.at(5.0, sv.PhaseEntered(0, "joining"), sv.Debugged(1, waits=True))
    assert play.at(35.0, sv.Timer("roll call")) == [sv.SetTimer("roll call", 65.0)]
    play.at(60.0, sv.Debugged(1, waits=False))
    assert play.at(65.0, sv.Timer("roll call")) == [sv.SetTimer("roll call", 90.0)]
    assert isinstance(play.at(90.0, sv.Timer("roll call"))[0], sv.CallRoll)


def test_a_job_that_is_judged_calls_no_roll() -> None:
    play = Play(2).running()
    play.at(5.0, sv.PhaseEntered(0, "joining"))
    play.at(34.99, raised(1))
    assert play.at(35.0, sv.Timer("roll call")) == []


@pytest.mark.parametrize("when", ["preparing", "running", "judging"])
def test_a_lost_helper_ends_the_job(when: str) -> None:
    play = Play(1)
    if when != "preparing":
        play.running()
    if when == "judging":
        play.at(2.0, raised(0))
    play.at(3.0, sv.HelperEnded("template"))
    assert play.of(sv.MakeReport)[-1].reason == "helper"
    assert signalled(play.actions) == (
        [] if when == "preparing" else [(0, "SIGKILL")]
    )  # no grace: nothing may outlive it for long
    if when != "preparing":
        play.at(3.1, ended(0, signal=9))
    assert play.status == 1


def test_a_job_that_cannot_be_started_says_so_and_leaves() -> None:
    play = Play(4, status=1)
    play.at(0.9, sv.Impossible("torch cannot be imported"))
    assert play.of(sv.MakeReport) == [sv.MakeReport("start", "torch cannot be imported")]
    assert play.status == 1


def test_the_supervisor_introduces_itself() -> None:
    play = Play(4).running()
    play.at(2.0, ended(1))
    assert repr(play.machine) == "<Supervisor running, attempt 0, 3 of 4 ranks alive>"


RANKS = st.integers(0, 2)
EVENTS = st.one_of(
    st.builds(
        sv.PhaseEntered,
        RANKS,
        st.sampled_from(["started", "importing", "joining", "running", "finishing"]),
        st.booleans(),
    ),
    st.builds(sv.Debugged, RANKS, st.booleans()),
    st.builds(sv.Erred, RANKS, st.sampled_from(["init_process_group", "all_reduce"])),
    st.builds(sv.RankRaised, RANKS, st.booleans(), st.just("raised")),
    st.builds(sv.Signalled, st.just("SIGINT")),
    st.builds(sv.HelperEnded, st.just("guard")),
    st.builds(sv.CannotMeet, st.just("they differ")),
    st.just(sv.EvidenceIn()),
    st.builds(sv.Timer, st.sampled_from(["settle", "stuck", "grace", "roll call"])),
    st.builds(sv.Stuck, st.sets(RANKS).map(lambda ranks: tuple(sorted(ranks)))),
)


@given(
    st.lists(EVENTS, max_size=25),
    st.permutations([0, 1, 2]),
    st.sampled_from(["stop", "continue"]),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_whatever_happens_it_leaves_once_when_every_rank_has_ended(
    events: list[sv.JobEvent], order: list[int], on_failure: Any, restarts: int, code: int
) -> None:
    """Once every process has ended and all timers have rung, the launcher leaves, once, after a
    clean-up.
    """
    play = Play(3, max_restarts=restarts, on_failure=on_failure)
    play.running()
    times = itertools.count(2)
    for event in events:
        play.at(float(next(times)), event)
    for _ in range(restarts + 1):
        if play.status is not None:
            break
        for rank in order:
            play.at(float(next(times)), ended(rank, code=code))
        for event in (sv.EvidenceIn(), sv.Timer("settle")):
            play.at(float(next(times)), event)
    assert len(play.of(sv.Leave)) == 1
    assert play.machine.state is State.ENDED
    assert isinstance(play.actions[-2], sv.CleanUp)
    killed = [rank for rank, name in signalled(play.actions) if name == "SIGKILL"]
    assert len(killed) <= 3 * (restarts + 1)  # nobody is killed twice in one attempt


@given(st.lists(EVENTS, max_size=30))
def test_no_rank_is_signalled_before_evidence_was_asked_for(events: list[sv.JobEvent]) -> None:
    play = Play(3)
    play.running()
    for now, event in enumerate(events, 2):
        play.at(float(now), event)
    kinds = [type(action) for action in play.actions]
    lost = any(isinstance(event, sv.HelperEnded) for event in events)
    if sv.SignalGroup in kinds and not lost:
        assert sv.AskEvidence in kinds[: kinds.index(sv.SignalGroup)]
        assert sv.MakeReport in kinds[: kinds.index(sv.SignalGroup)]


def attempts_of(
    same: Callable[[int], str], lasts: float, *, max_restarts: int = 9
) -> tuple[int, list[sv.SayHopeless]]:
    """How many attempts a job makes whose attempts each end after so many seconds, and what is said
    of it.
    """
    machine = Supervisor(range(1), max_restarts=max_restarts, grace=30.0, on_failure="stop")
    now, made = 0.0, 0
    said: list[sv.SayHopeless] = []
    events: list[sv.JobEvent] = [sv.Prepared()]
    while events:
        for action in machine.handle(events.pop(0), now):
            match action:
                case sv.StartRanks():
                    made, now = made + 1, now + lasts
                    events += [
                        sv.RankRaised(0, False, "rank 0 raised"),
                        sv.RankEnded(0, 1, 0, True, "rank 0 ended"),
                        sv.EvidenceIn(),
                    ]
                case sv.SetTimer(name="settle", at=at):
                    now = max(now, at)
                    events.append(sv.Timer("settle"))
                case sv.MakeReport():
                    events.insert(0, sv.Judged(1, same(made)))
                case sv.SayHopeless():
                    said.append(action)
                case _:
                    pass
    return made, said


def test_the_same_failure_three_times_ends_the_restarts() -> None:
    """A typing error with --max-restarts 50 printed the same report fifty times."""
    assert attempts_of(lambda attempt: "ValueError at train.py:5", 2.0) == (3, [sv.SayHopeless(3)])


@pytest.mark.parametrize(
    ("same", "lasts"),
    [
        pytest.param(lambda attempt: f"ValueError at train.py:{attempt}", 2.0, id="another line"),
        pytest.param(lambda attempt: "", 2.0, id="from outside"),
        pytest.param(lambda attempt: "ValueError at train.py:5", 60.0, id="after a while"),
    ],
)
def test_other_failures_have_all_their_restarts(same: Callable[[int], str], lasts: float) -> None:
    assert attempts_of(same, lasts) == (10, [])


# --- one of several nodes


class Node(Play):
    """Node 1 of a job, with ranks 2 and 3, whose template is ready. The lead's sentence comes when
    the test feeds `Judged`.
    """

    def __init__(
        self, *, ready: bool = True, on_failure: Any = "stop", max_restarts: int = 3
    ) -> None:
        super().__init__()
        self.machine = Supervisor(
            range(2, 4), alone=False, max_restarts=max_restarts, grace=30.0, on_failure=on_failure
        )
        if ready:
            self.at(1.0, sv.Prepared())

    def at(self, now: float, *events: sv.JobEvent) -> list[sv.Action]:
        fresh = [action for event in events for action in self.machine.handle(event, now)]
        self.actions += fresh
        return fresh

    def failed(self) -> Node:
        """Fail rank 2, and tell the lead."""
        self.at(5.0, ended(2, 1, sure=True), sv.EvidenceIn())
        self.at(5.0 + sv.SETTLE_APART, sv.Timer("settle"))
        assert [action.reason for action in self.of(sv.MakeReport)] == ["failure"]
        return self

    def waiting(self) -> Node:
        """End every rank well."""
        self.at(4.0, ended(2), ended(3))
        assert self.machine.state is State.WAITING
        return self


def kinds(actions: Iterable[sv.Action]) -> list[type[sv.Action]]:
    return [type(action) for action in actions]


def test_ranks_are_known_by_their_numbers_in_the_job() -> None:
    node = Node().failed()
    assert signalled(node.at(6.0, sv.Judged(1))) == [(3, "SIGTERM")]


def test_a_node_whose_ranks_have_ended_waits_for_the_lead() -> None:
    node = Node()
    node.at(4.0, ended(2))
    over = node.at(4.1, ended(3))
    assert over[-2:] == [
        sv.CleanUp(True, "every rank has ended"),
        sv.AttemptOver(True),
    ]
    assert node.at(5.0, sv.JobEnded(0)) == [sv.Leave(0)]
    assert node.machine.state is State.ENDED


def test_ranks_that_end_before_the_sentence_leave_the_lead_its_time() -> None:
    node = Node().failed()
    assert kinds(node.at(5.5, ended(3, signal=6))) == [sv.CleanGroup]
    assert node.machine.state is State.STOPPING
    assert kinds(node.at(6.0, sv.Judged(7))) == [sv.CleanUp, sv.AttemptOver]
    assert not node.of(sv.AttemptOver)[0].well


def test_the_lead_starts_another_attempt_with_whatever_number() -> None:
    node = Node().failed()
    node.at(6.0, sv.Judged(1))
    node.at(6.1, ended(3, signal=15))
    assert not node.of(sv.Leave), "a restart is not decided here"
    (start,) = node.at(7.0, sv.Next(4, range(5, 7)))
    assert isinstance(start, sv.StartRanks)
    assert (start.attempt, node.machine.attempt, node.machine.state) == (4, 4, State.RUNNING)
    node.at(8.0, ended(6, 1, sure=True), sv.EvidenceIn())
    node.at(8.0 + sv.SETTLE_APART, sv.Timer("settle"))
    assert signalled(node.at(9.0, sv.Judged(1))) == [(5, "SIGTERM")]


def test_another_attempt_waits_for_the_template() -> None:
    node = Node(ready=False)
    node.at(1.0, sv.Elsewhere("rank 0 raised ValueError"), sv.EvidenceIn())
    assert [action.reason for action in node.of(sv.MakeReport)] == ["elsewhere"]
    assert kinds(node.at(1.1, sv.Judged(1))) == [sv.CleanUp, sv.AttemptOver]
    assert node.at(1.2, sv.Next(1, range(2, 4))) == []
    assert kinds(node.at(2.0, sv.Prepared())) == [sv.StartRanks]
    assert node.machine.attempt == 1


def test_a_template_that_is_ready_while_the_job_is_judged_is_remembered() -> None:
    node = Node(ready=False)
    node.at(1.0, sv.Elsewhere("rank 0 raised ValueError"), sv.Prepared(), sv.EvidenceIn())
    node.at(1.1, sv.Judged(1))
    assert kinds(node.at(1.2, sv.Next(1, range(2, 4)))) == [sv.StartRanks]


def test_a_failure_elsewhere_is_judged_here_as_well() -> None:
    node = Node()
    asked = node.at(5.0, sv.Elsewhere("rank 0 raised ValueError"))
    assert asked[0] == sv.AskEvidence("rank 0 raised ValueError")
    assert node.at(5.1, sv.EvidenceIn()) == [], "a failure here may follow"
    (report,) = node.at(5.0 + sv.SETTLE_APART, sv.Timer("settle"))
    assert report == sv.MakeReport("elsewhere", "rank 0 raised ValueError")
    assert signalled(node.at(5.5, sv.Judged(1))) == [(2, "SIGTERM"), (3, "SIGTERM")]


def test_a_failure_elsewhere_leaves_one_here_a_failure() -> None:
    node = Node()
    node.at(5.0, ended(2, 1, sure=True), sv.Elsewhere("rank 0 raised"), sv.EvidenceIn())
    node.at(5.0 + sv.SETTLE_APART, sv.Timer("settle"))
    assert [action.reason for action in node.of(sv.MakeReport)] == ["failure"]


def test_a_failure_elsewhere_after_the_end_of_all_ranks_here_is_only_told_about() -> None:
    node = Node().waiting()
    assert node.at(5.0, sv.Elsewhere("rank 0 raised ValueError")) == [
        sv.MakeReport("elsewhere", "rank 0 raised ValueError")
    ]
    assert node.at(5.5, sv.Judged(1)) == []
    assert len(node.of(sv.AttemptOver)) == 1
    assert kinds(node.at(6.0, sv.Next(1, range(2, 4)))) == [sv.StartRanks]


def test_a_signal_elsewhere_and_the_same_here_are_one() -> None:
    node = Node()
    node.at(5.0, sv.Elsewhere("node 0 got SIGINT", "SIGINT"))
    node.at(5.0 + sv.ONE_SIGNAL / 2, sv.Signalled("SIGINT"), sv.EvidenceIn())
    assert [action.reason for action in node.of(sv.MakeReport)] == ["interrupted"]
    stop = node.at(5.4, sv.Judged(130))
    assert signalled(stop) == [(2, "SIGINT"), (3, "SIGINT")]
    assert signalled(node.at(7.0, sv.Signalled("SIGINT"))) == [(2, "SIGKILL"), (3, "SIGKILL")]


def test_a_second_signal_elsewhere_kills_here_too() -> None:
    node = Node()
    node.at(5.0, sv.Elsewhere("node 0 got SIGINT", "SIGINT"), sv.EvidenceIn())
    node.at(5.2, sv.Judged(130))
    again = sv.Elsewhere("node 0 got SIGINT", "SIGINT")
    assert node.at(5.0 + sv.ONE_SIGNAL / 2, again) == [], "one wish of one person"
    assert signalled(node.at(7.0, again)) == [(2, "SIGKILL"), (3, "SIGKILL")]


def test_a_first_signal_elsewhere_does_not_kill_ranks_whose_failure_is_not_judged_yet() -> None:
    node = Node().failed()
    assert signalled(node.at(5.5, sv.Elsewhere("node 0 got SIGINT", "SIGINT"))) == []


def test_a_stop_from_outside_waits_for_ranks_on_other_nodes() -> None:
    node = Node()
    node.at(5.0, sv.Signalled("SIGTERM"), sv.EvidenceIn())
    node.at(5.1, sv.Judged(143))
    for look in range(10):
        assert kinds(node.at(6.0 + look, sv.Stuck((2, 3)))) == [sv.SetTimer]
    assert node.machine.all_wait
    node.at(20.0, sv.InVain())
    assert signalled(node.at(20.1, sv.Stuck((2, 3)))) == [(2, "SIGKILL"), (3, "SIGKILL")]


def test_a_signal_after_the_end_of_all_ranks_is_told_and_a_second_one_leaves() -> None:
    node = Node().waiting()
    (report,) = node.at(5.0, sv.Signalled("SIGTERM"))
    assert report == sv.MakeReport("interrupted", "the launcher got SIGTERM")
    assert node.at(5.1, sv.Elsewhere("node 0 got SIGTERM", "SIGTERM")) == []
    (over,) = node.at(5.2, sv.Next(1, range(2, 4)))
    assert over == sv.AttemptOver(False), "it comes too late"
    (leave,) = node.at(6.0, sv.Signalled("SIGTERM"))
    assert isinstance(leave, sv.Leave)
    assert leave.status == 128 + 15


@pytest.mark.parametrize("phase", ["preparing", "running", "judging", "stopping", "waiting"])
def test_a_node_without_its_lead_ends_its_ranks_and_leaves(phase: str) -> None:
    node = Node(ready=phase != "preparing")
    if phase == "judging":
        node.at(5.0, sv.Elsewhere("rank 0 raised"))
    elif phase == "stopping":
        node.failed().at(5.5, sv.Judged(1))
    elif phase == "waiting":
        node.waiting()
    lost = node.at(9.0, sv.Isolated("node 0 was lost"))
    ranks = {"stopping": [3], "preparing": [], "waiting": []}.get(phase, [2, 3])
    assert signalled(lost) == [(rank, "SIGKILL") for rank in ranks]
    assert lost[-1] == sv.MakeReport("isolated", "node 0 was lost")
    assert node.at(9.1, sv.Isolated("node 0 was lost")) == []
    node.at(9.2, sv.Judged(75), *(ended(rank, signal=9) for rank in ranks))
    assert len(node.of(sv.CleanUp)) == 1
    assert node.status == 75, "the ranks would have been started again"
    assert len(node.of(sv.AttemptOver)) == (phase == "waiting")


def test_a_failure_after_which_nothing_is_started_again_is_the_end_also_without_the_lead() -> None:
    node = Node(max_restarts=0).failed()
    node.at(5.5, sv.Judged(1), ended(3, signal=15))
    node.at(9.0, sv.Isolated("node 0 was lost"), sv.Judged(75))
    assert node.status == 1


def test_who_is_missing_in_init_process_group_is_not_judged_here() -> None:
    node = Node()
    assert node.at(2.0, sv.PhaseEntered(2, "joining")) == []
    assert kinds(node.at(3.0, ended(3))) == [sv.CleanGroup]
    assert node.machine.state is State.RUNNING


def test_a_dismissal_before_the_end_of_the_ranks_waits_for_it() -> None:
    node = Node().failed()
    node.at(6.0, sv.Judged(1), sv.JobEnded(75))
    assert [type(action) for action in node.at(6.5, ended(3, signal=15))][1:] == [
        sv.CleanUp,
        sv.Leave,
    ]
    assert node.status == 75


def test_without_its_guard_a_node_ends_its_ranks_before_it_hears_from_the_lead() -> None:
    node = Node()
    lost = node.at(5.0, sv.HelperEnded("guard"))
    assert signalled(lost) == [(2, "SIGKILL"), (3, "SIGKILL")]
    assert lost[-1] == sv.MakeReport("helper", "the guard has ended")
    node.at(5.1, ended(2, signal=9), ended(3, signal=9), sv.Judged(1))
    assert kinds(node.at(6.0, sv.Next(1, range(2, 4)))) == [sv.AttemptOver], "it cannot start any"


def test_a_job_that_goes_on_when_ranks_fail_is_over_after_its_last_report() -> None:
    node = Node(on_failure="continue")
    node.at(5.0, ended(2, 1, sure=True))
    assert [action.reason for action in node.of(sv.MakeReport)] == ["failure"]
    assert kinds(node.at(5.1, ended(3))) == [sv.CleanGroup]
    assert kinds(node.at(5.2, sv.Judged(1))) == [sv.CleanUp, sv.AttemptOver]
    assert not node.of(sv.AttemptOver)[0].well
