"""The faults of the verdict matrix: what is done to a job, and what the first cause of its report
must then be. Data alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

Phase = Literal["start", "run", "end"]
Blames = Literal["it", "with it", "one of two", "anybody"]
Grade = Literal["right", "not known", "wrong"]

RANKS = 4
PATIENCE = 2.0
"""Seconds of torch's time-out where a fault is one that nobody hears of before it: the shortest
that a busy machine keeps.
"""
WAIT = 3.0
"""Seconds of the store's waiting calls: longer than the launcher waits for a better cause than the
first that it hears of.
"""
LATER = 5.0
"""Seconds of torch's time-out where --stall is to speak first."""
LONG = 60.0
"""Seconds of torch's time-out where it must not be what ends the job."""

LONGEST_DELAY: Mapping[Phase, float] = MappingProxyType({"start": 0.05, "run": 0.3, "end": 0.1})
"""Seconds over which the fault's moment is spread: the others are in the middle of meeting, of the
loop, of leaving.
"""


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    does: str  # a name in the job, see the script
    codes: tuple[
        str, ...
        # the first cause must have one of these; none: there is no fault, and nothing must be
        # reported
    ]
    phases: tuple[Phase, ...] = ("start", "run", "end")
    # whom the first cause must name: the rank alone, it among others, one or both of two, or nobody
    # in particular
    blames: Blames = "it"
    says: str = ""  # what the first headline must contain, a regular expression
    script: str = "verdict_program.py"
    job: Mapping[str, Any] = field(default_factory=dict)  # more for the job's VERDICT
    timeout: float = LONG  # of torch, or of the store's calls
    beside: str = ""  # what the harness provides while the job runs: a name in verdict.BESIDE
    act: str = ""  # what the harness does to the running job: a name in verdict.ACTS
    options: tuple[str, ...] = ()  # of rallypoint run


MEETING, STORE, HEALTHY, BROKEN = (
    "verdict_meeting.py",
    "verdict_store.py",
    "verdict_healthy.py",
    "verdict_broken.py",
)
SILENT = "a silent server"
EARLY: tuple[Phase, ...] = ("start",)
NOT_LATE: tuple[Phase, ...] = ("start", "run")

_met = partial(Fault, phases=EARLY, script=MEETING)
_all_met = partial(_met, blames="anybody", job={"everybody": True}, timeout=PATIENCE)
_shared = partial(Fault, phases=EARLY, script=STORE, job={"others": "wait"}, timeout=WAIT)
_at_barrier = partial(_shared, job={"others": "barrier"}, timeout=LONG)
_well = partial(Fault, codes=(), phases=EARLY, script=HEALTHY)
_helper = partial(Fault, does="nothing", phases=NOT_LATE, blames="anybody")

FAULTS: Mapping[str, tuple[Fault, ...]] = MappingProxyType(
    {
        "verdict-program": (
            Fault("exception", "raises", ("rank-raised",)),
            Fault(
                "exception and peers abort",
                "raises",
                ("rank-raised",),
                NOT_LATE,
                job={"answer": "abort"},
            ),
            Fault(
                "exception and peers exit 1",
                "raises",
                ("rank-raised",),
                NOT_LATE,
                job={"answer": "exit"},
            ),
            Fault(
                "exception behind a finally",
                "raises behind a finally",
                ("rank-raised",),
                NOT_LATE,
                says="ValueError: the first error",
            ),
            Fault(
                "two exceptions",
                "raises",
                ("rank-raised",),
                blames="one of two",
                job={"other_does": "raises something else"},
            ),
            Fault("sys.exit(n)", "exits", ("rank-exited",)),
            Fault("os._exit(n)", "exits at once", ("rank-exited",)),
            Fault(
                "os._exit(n) and peers exit 1",
                "exits at once",
                ("rank-exited",),
                NOT_LATE,
                job={"answer": "exit"},
            ),
            Fault(
                "exit 0 while the others go on",
                "leaves",
                ("rank-left-early",),
                NOT_LATE,
                timeout=PATIENCE,
            ),
            Fault(
                "hang under --stall",
                "never goes on",
                ("job-stalled",),
                ("run",),
                "with it",
                options=("--stall", "1"),
                timeout=LATER,
            ),
            Fault(
                "collectives differ",
                "calls another collective",
                ("collective-mismatch",),
                ("run",),
                "with it",
                options=("--stall", "1"),
                timeout=LATER,
            ),
            Fault("a collective without a group", "reduces alone", ("group-missing",), EARLY),
            Fault(
                "a tensor whose producer has gone",
                "reads from a dead producer",
                ("producer-gone",),
                NOT_LATE,
            ),
            _all_met("parameters that DDP misses", "leaves_parameters_out", ("parameters-unused",)),
            Fault("no GPU", "asks for a GPU", ("device-missing",)),
            Fault(
                "DataLoader worker killed",
                "loses a worker",
                ("rank-killed",),
                NOT_LATE,
                says="DataLoader worker",
            ),
            Fault(
                "hang",
                "never goes on",
                ("ranks-missing", "job-stalled"),
                NOT_LATE,
                timeout=PATIENCE,
            ),
            Fault(
                "stopped (SIGSTOP)",
                "stops",
                ("ranks-missing", "job-stalled"),
                NOT_LATE,
                timeout=PATIENCE,
            ),
            _met("hang in an import", "imports_for_ever", ("ranks-missing",), timeout=PATIENCE),
            _met(
                "missing module in one rank",
                "imports_something_missing",
                ("rank-raised",),
                says="no_such_module",
            ),
            _all_met(
                "missing module in all ranks",
                "imports_something_missing",
                ("rank-raised",),
                says="no_such_module",
            ),
            _met(
                "syntax error in a module",
                "imports_something_broken",
                ("rank-raised",),
                says="SyntaxError",
            ),
            Fault(
                "no such script",
                "nothing",
                ("start-failed",),
                EARLY,
                "anybody",
                script="verdict_no_such.py",
            ),
            Fault(
                "script with a syntax error",
                "nothing",
                ("start-failed",),
                EARLY,
                "anybody",
                script=BROKEN,
            ),
        ),
        "verdict-signals": (
            Fault(
                "SIGKILL from outside",
                "is signalled",
                ("rank-killed",),
                says="SIGKILL",
                act="kill the rank",
            ),
            Fault(
                "SIGKILL and peers abort",
                "kills itself",
                ("rank-killed",),
                NOT_LATE,
                says="SIGKILL",
                job={"answer": "abort"},
            ),
            Fault(
                "SIGKILL and peers exit 1",
                "kills itself",
                ("rank-killed",),
                NOT_LATE,
                says="SIGKILL",
                job={"answer": "exit"},
            ),
            Fault(
                "SIGKILL of two",
                "kills itself",
                ("rank-killed",),
                blames="one of two",
                job={"other_does": "kills itself"},
            ),
            Fault(
                "SIGTERM from outside",
                "is signalled",
                ("rank-killed",),
                says="SIGTERM",
                act="terminate the rank",
            ),
            Fault(
                "SIGINT from outside",
                "is signalled",
                ("rank-raised", "rank-killed"),
                says="KeyboardInterrupt|SIGINT",
                act="interrupt the rank",
            ),
            Fault("SIGSEGV or SIGBUS or SIGFPE", "crashes", ("rank-crashed",)),
            Fault("abort()", "aborts", ("rank-crashed",)),
            Fault(
                "abort() and peers abort",
                "aborts",
                ("rank-crashed",),
                NOT_LATE,
                job={"answer": "abort"},
            ),
            Fault("out of memory", "wants too much", ("rank-out-of-memory",)),
        ),
        "verdict-meeting": (
            _met("init_process_group swallowed", "swallows_init", ("error-swallowed",)),
            _met(
                "unknown backend swallowed",
                "swallows_backend",
                ("error-swallowed", "backend-differs"),
                blames="with it",
            ),
            _met("set_device swallowed", "swallows_device", ("error-swallowed",)),
            _met(
                "set_device swallowed and the rank stays",
                "swallows_and_stays",
                ("error-swallowed", "ranks-missing"),
                timeout=PATIENCE,
            ),
            _all_met("port held by a stranger", "another_port", ("port-in-use",), beside=SILENT),
            _all_met(
                "name unresolved", "an_unknown_name", ("address-unresolved",), beside="a free port"
            ),
            _all_met(
                "meeting point refuses", "is_a_client", ("port-refused",), beside="a free port"
            ),
            _all_met(
                "foreign service at the meeting point",
                "is_a_client",
                ("store-foreign",),
                beside="a web server",
            ),
            _met(
                "addresses differ",
                "another_port",
                ("address-differs",),
                blames="with it",
                beside="a free port",
            ),
            _met(
                "WORLD_SIZE differs",
                "another_world",
                ("world-size-differs", "rank-out-of-range"),
                blames="with it",
                timeout=PATIENCE,
            ),
            _met("backends differ", "another_backend", ("backend-differs",), blames="with it"),
            _met(
                "RANK twice",
                "somebody_else",
                ("rank-duplicate",),
                blames="with it",
                timeout=PATIENCE,
            ),
            _met(
                "RANK beyond WORLD_SIZE",
                "beyond_the_world",
                ("rank-out-of-range",),
                blames="with it",
                timeout=PATIENCE,
            ),
            _met("MASTER_ADDR or MASTER_PORT unset", "forgets_an_address", ("env-missing",)),
            _met("init_method invalid", "invents_a_method", ("init-method-invalid",)),
            _met("init_process_group twice", "joins_twice", ("group-twice",)),
        ),
        "verdict-store": (
            _shared("death while the others wait for a key", "kills_itself", ("rank-killed",)),
            _shared("exception while the others wait for a key", "raises", ("rank-raised",)),
            _at_barrier(
                "death while the others are at a barrier", "kills_itself", ("rank-killed",)
            ),
            _at_barrier("exception while the others are at a barrier", "raises", ("rank-raised",)),
            _shared(
                "a key that nobody sets",
                "nothing",
                ("wait-timeout",),
                blames="anybody",
                timeout=PATIENCE,
            ),
            _shared("a key that is too long", "writes_a_novel", ("key-too-long",)),
            _shared("a number added to words", "adds_to_words", ("wrong-type",)),
            _at_barrier("a value that is none", "puts_a_function", ("value-unsupported",)),
        ),
        "verdict-launcher": (
            _helper(
                "template killed",
                codes=("launcher-died",),
                says="template",
                act="kill the template",
            ),
            _helper(
                "c10d host killed",
                codes=("launcher-died",),
                phases=("run",),
                says="c10d",
                act="kill the c10d host",
            ),
            Fault(
                "c10d host stopped (SIGSTOP)",
                "asks torch's store",
                ("store-silent",),
                ("run",),
                says="is stopped",
                act="stop the c10d host",
                timeout=PATIENCE,
            ),
            _helper("guard killed", codes=("launcher-died",), says="guard", act="kill the guard"),
            _helper(
                "SIGTERM to the launcher",
                codes=("interrupted",),
                says="SIGTERM",
                act="terminate the launcher",
            ),
            _helper("Ctrl-C", codes=("interrupted",), act="interrupt the launcher"),
            Fault(
                "exception and a full disk under the logs",
                "raises",
                ("rank-raised",),
                NOT_LATE,
                beside="a full disk",
            ),
            _helper(
                "--master-port held",
                codes=("port-in-use",),
                phases=EARLY,
                beside=SILENT,
                options=("--master-port", "{port}"),
            ),
            _helper(
                "--port-range exhausted",
                codes=("ports-exhausted",),
                phases=EARLY,
                beside=SILENT,
                options=("--port-range", "{port}-{port}"),
            ),
        ),
        "verdict-healthy": (
            _well("none: one rank comes late", "one_comes_late"),
            _well("none: one rank goes early", "one_goes_early"),
            _well("none: nobody closes the group", "one_leaves_the_group_open"),
            _well("none: an error is mended", "an_error_is_mended"),
            _well("none: the group is opened again", "meets_twice"),
            _well("none: two jobs of two ranks", "two_jobs_of_two"),
            _well("none: two groups in different collectives", "groups_in_turn"),
            _well(
                "none: one rank computes for long under --stall",
                "one_computes_for_long",
                options=("--stall", "1"),
            ),
            _well("none: ranks that never meet", "never_meets"),
        ),
    }
)

NAMES: tuple[str, ...] = tuple(fault.name for faults in FAULTS.values() for fault in faults)


def named(name: str) -> Fault:
    """The fault of that name. KeyError."""
    for faults in FAULTS.values():
        for fault in faults:
            if fault.name == name:
                return fault
    raise KeyError(name)


def grade(
    fault: Fault, rank: int, other: int, reports: Sequence[Mapping[str, Any]], status: int | None
) -> tuple[Grade, str]:
    """What the first cause of `reports` is worth, and what was wrong with it ("" when it is right).

    Right: its code, the ranks that it names and its headline are the fault's. Not known: it is
    another one, and says that it does not know (cause-unknown), or that it is only likely or
    possible. Wrong: another one that is said to be certain; no report; an exit status of 0. Where
    there is no fault a report is wrong.
    """
    if status is None:
        return "wrong", "the launcher did not end"
    if not fault.codes:
        said = f"{reports[0]['code']}: {reports[0]['headline']}; " if reports else ""
        return ("wrong", f"{said}exit status {status}") if reports or status else ("right", "")
    if not reports:
        return "wrong", f"no report, exit status {status}"
    first = reports[0]
    code, confidence, ranks = (
        first["code"],
        first.get("confidence", "certain"),
        set(first.get("ranks", ())),
    )
    shown = f"{code} ({confidence}), ranks {sorted(ranks)}: {first['headline']}"
    named = {
        "it": ranks == {rank},
        "with it": rank in ranks,
        "one of two": bool(ranks) and ranks <= {rank, other},
        "anybody": True,
    }[fault.blames]
    if code in fault.codes and named and re.search(fault.says, first["headline"]):
        return ("right", "") if status else ("wrong", f"{shown}; and the exit status is 0")
    return ("not known" if code == "cause-unknown" or confidence != "certain" else "wrong"), shown
