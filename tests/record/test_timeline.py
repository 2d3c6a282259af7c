"""Many ranks' events as lines in one order."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from rallypoint.record import timeline
from rallypoint.record.events import Event, What
from rallypoint.record.timeline import Row


def phases(at: float, phase: str, *ranks: int) -> list[Event]:
    return [
        Event(at + i / 1000, "phase", rank, details={"phase": phase})
        for i, rank in enumerate(ranks)
    ]


def test_ranks_that_do_the_same_are_a_line_though_others_are_further() -> None:
    events = [
        *phases(1.0, "importing", 0, 1),
        *phases(1.01, "joining", 0),
        *phases(1.02, "importing", 2),
        *phases(1.03, "joining", 1, 2),
    ]
    assert timeline.whole(events) == [
        Row(1.0, "ranks 0-2", "importing"),
        Row(1.01, "ranks 0-2", "joining"),
    ]


def test_a_straggler_is_seen() -> None:
    assert timeline.whole([*phases(1.0, "joining", 0, 1), *phases(7.5, "joining", 2)]) == [
        Row(1.0, "ranks 0-2", "joining (the last one at +7.500s)")
    ]


def test_nothing_is_joined_across_what_may_be_a_cause() -> None:
    raised = Event(2.0, "raised", 1, details={"type": "ValueError", "message": "x"})
    assert timeline.whole([*phases(1.0, "running", 0), raised, *phases(3.0, "running", 2)]) == [
        Row(1.0, "rank 0", "running"),
        Row(2.0, "rank 1", "raised ValueError: x"),
        Row(3.0, "rank 2", "running"),
    ]


def test_causes_of_one_kind_are_a_line_each_rank_that_shows_it() -> None:
    ends = [Event(1.0 + i / 100, "ended", i, details={"signal": "SIGTERM"}) for i in range(3)]
    assert timeline.whole([*ends, Event(1.05, "ended", 3, details={"code": 3})]) == [
        Row(1.0, "ranks 0-2", "died: SIGTERM"),
        Row(1.05, "rank 3", "exited with 3"),
    ]


def test_what_is_done_to_ranks_is_the_launchers() -> None:
    stops = [
        Event(1.0, "stop-sent", rank, "rank 3 raised ValueError", {"signal": "SIGTERM"})
        for rank in (0, 1, 2)
    ]
    assert timeline.whole(stops) == [
        Row(1.0, "launcher", "sent SIGTERM to ranks 0-2: rank 3 raised ValueError")
    ]


def test_order_is_that_of_time() -> None:
    assert [
        row.at
        for row in timeline.whole([Event(2.0, "template-ready"), Event(1.0, "template-started")])
    ] == [1.0, 2.0]


@pytest.mark.parametrize(
    "details",
    [
        {},
        {"signal": 9},
        {"signal": "SIGKILL"},
        {"signal": 41},
        {"signal": 3.5},
        {"code": "?"},
        {"pids": [1]},
    ],
)
@pytest.mark.parametrize("what", get_args(What))
def test_every_kind_of_event_has_a_sentence_whatever_is_in_it(
    what: What, details: dict[str, Any]
) -> None:
    """An event log may be damaged, or another version's."""
    event = Event(1.0, what, details=details)
    assert timeline.sentence(event)
    assert timeline.who(event) == "launcher"


@pytest.mark.parametrize(
    ("number", "says"),
    [(9, "died: SIGKILL"), ("SIGKILL", "died: SIGKILL"), (41, "died: signal 41")],
)
def test_a_signal_by_number_or_by_name(number: object, says: str) -> None:
    assert timeline.sentence(Event(1.0, "ended", 0, details={"signal": number})) == says


def test_the_end_of_a_helper_is_not_the_launchers_own() -> None:
    event = Event(
        1.0,
        "ended",
        because="the template ended by itself",
        details={"pid": 7, "code": 0, "signal": 9},
    )
    assert timeline.whole([event]) == [
        Row(1.0, "launcher", "the template ended by itself: died: SIGKILL")
    ]
