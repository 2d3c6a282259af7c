"""Where every rank of a running job stands: grouped, the odd one first, and one sentence that says
it.

Pure: the agent gathers (`launcher/agent/hang_monitor.py`), this says what it shows. `rallypoint
stacks` prints it, `--stall` reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.render import plain, wrapped
from rallypoint.diagnosis.report import Confidence, Help, Report
from rallypoint.world import ranges, ranks_phrase

Missing = Literal[
    "",
    "stopped",
    "held",
    "kernel",
    "ended",
    "not started",
    "starting",
    "closing",
    "other program",
    "not looked into",
    "no answer",
]
"""Why there is no Python stack of a rank; "" when there is one."""

Source = Callable[[str, int], str]
"""The text of a line, by file and number; "" when it is not known."""

MOST_LINES = 40  # of `rallypoint stacks`: what one screen shows without scrolling
MOST_FRAMES = 8  # of one group; the outermost of more are left out: the innermost say what it does
SENTENCE_GROUPS = (
    3  # places that the sentence names; more make no sentence, and the blocks below name them
)
MOST_GROUPS = 12  # blocks of their own; the ranks at other places are counted
EVIDENCE_LINES = 7  # of a report, as everywhere
LINE_CHARACTERS = 160  # of one frame: a generated function's name may be longer
PID_CHARACTERS = 30  # of a group's list of pids, before it is cut to three
COMMAND_CHARACTERS = 60  # of another program's command line in a sentence
# Seconds for which ranks that are in different collectives must be known to stand there before it
# is called likely. A rank that is merely late leaves its collective in milliseconds; five seconds
# is more than a slow network needs for a large one.
SURELY = 5.0
AT_REST = (
    0.05  # of a processor: a rank in backward() that uses more may be at work on its gradients
)
WAITING = 0.5  # of a processor: a rank in a collective that uses less is said to wait in it

_PHASES = {
    "started": "started",
    "preparing": "before its program",
    "importing": "running",  # a program that joins no group stays in this phase
    "joining": "in init_process_group",
    "running": "running",
    "finishing": "leaving",
    "done": "leaving",
}
_STATES = {
    "R": "on a processor",
    "S": "asleep",
    "D": "in the kernel",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended",
}


class RankStanding(msgspec.Struct, frozen=True):
    """One rank at one moment. Times in seconds."""

    rank: int
    pid: int
    phase: str
    phase_for: float = 0.0  # how long it has been in its phase
    state: str = (
        ""  # of the main thread, as in /proc: R, S, D, T, t, Z; "" when there is no process
    )
    kernel: str = ""  # the kernel function that it sleeps in; "" when it runs, or we may not know
    # processors that the rank used while it was looked at; 1.0 is one of them, all of the time
    cpu: float = 0.0
    frames: tuple[Frame, ...] = ()  # the main thread's, outermost first
    stands_for: float | None = (
        None  # how long the main thread is known to have stood there at least; None: not known
    )
    missing: Missing = ""
    detail: str = ""  # the other program's command line, or how it ended


class Standing(msgspec.Struct, frozen=True):
    """All ranks of a job at one moment."""

    job: str  # what `rallypoint stacks` takes: the run's name, or the folder that was asked for
    program: str  # as typed
    world_size: int
    ranks: tuple[RankStanding, ...]
    age: float  # seconds since the job's start
    attempt: int = 0
    run_dir: str = ""
    # that paths are shown relative to, with a "/" at its end; "": the one from which `program` was
    # typed
    folder: str = ""
    launcher: int = 0  # pid

    @property
    def root(self) -> str:
        return self.folder or stacks.root_of(
            self.program, [frame for rank in self.ranks for frame in rank.frames]
        )


class Group(msgspec.Struct, frozen=True):
    """Ranks that stand at the same place, or show nothing for the same reason."""

    ranks: tuple[RankStanding, ...]
    frames: tuple[Frame, ...]  # () when there is no stack

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(one.rank for one in self.ranks)

    @property
    def first(self) -> RankStanding:
        return self.ranks[0]

    @property
    def collective(self) -> str:
        """The collective that they are in, "" when in none."""
        found = stacks.collective(self.frames)
        return found[0] if found else ""

    @property
    def hidden_wait(self) -> str:
        """Where they wait for the others without a collective in their stack; "" when one is there,
        or they may be at work.
        """
        if self.collective or self.cpu > AT_REST or (self.stands_for or 0.0) < SURELY:
            return ""
        return stacks.waits_in_ddp(self.frames)

    @property
    def stands_for(self) -> float | None:
        """How long all of them are known to have stood there."""
        known = [one.stands_for for one in self.ranks]
        return (
            min(time for time in known if time is not None) if known and None not in known else None
        )

    @property
    def cpu(self) -> float:
        return sum(one.cpu for one in self.ranks) / len(self.ranks)


def groups(standing: Standing) -> tuple[Group, ...]:
    """The ranks by place, the odd ones first.

    First who cannot go on by itself (stopped, in the kernel, silent), then who is in no collective,
    then small groups before large ones. The use of processors only orders what is equal in all
    that, the idle first: a wait of NCCL's spins.
    """
    together: dict[tuple[object, ...], list[RankStanding]] = {}
    for one in sorted(standing.ranks, key=lambda rank: rank.rank):
        frames = stacks.trimmed(one.frames)
        key = (
            (frames,)
            if frames
            else (one.missing, one.detail, one.phase if one.missing == "not looked into" else "")
        )
        together.setdefault(key, []).append(one)
    made = [Group(tuple(ranks), stacks.trimmed(ranks[0].frames)) for ranks in together.values()]
    return tuple(sorted(made, key=_oddness))


def _oddness(group: Group) -> tuple[int, int, float, int]:
    if group.first.missing in ("stopped", "held", "kernel", "no answer"):
        kind = 0
    elif group.first.missing in ("ended", "not started"):
        kind = 4
    elif group.collective:
        kind = 3
    else:  # one that may wait for the others in backward() is less odd than one elsewhere
        kind = 2 if group.hidden_wait else 1
    return kind, len(group.ranks), round(group.cpu, 1), group.first.rank


# --- in words
# --------------------------------------------------------------------------------------------------


def sentence(standing: Standing, *, since: bool = True) -> str:
    """What the ranks do, in one sentence: those that wait first, then whom they may be waiting for.
    `since`: with for how long, where that is known."""
    found = list(groups(standing))
    if not found:
        return "no rank has been started"
    present = [group for group in found if group.first.missing != "ended"]
    gone = [group for group in found if group.first.missing == "ended"]
    if not present:
        return "; ".join(_clause(group, standing, since) for group in gone[:SENTENCE_GROUPS])
    # The largest group is mostly the one that waits; the others follow as they stand in the list,
    # the odd one first.
    largest = max(present, key=lambda group: (bool(group.collective), len(group.ranks)))
    ordered = [largest, *(group for group in present if group is not largest), *gone]
    told, rest = ordered[:SENTENCE_GROUPS], ordered[SENTENCE_GROUPS:]
    if len(rest) == 1:
        told, rest = ordered, []
    text = "; ".join(_clause(group, standing, since) for group in told)
    if rest:
        numbers = [number for group in rest for number in group.numbers]
        text += f"; {ranks_phrase(numbers)} {_be(numbers)} at {len(rest)} other places"
    return text


def _clause(group: Group, standing: Standing, since: bool) -> str:
    subject = _subject(group.numbers, standing.world_size)
    known = since and group.stands_for and group.first.missing not in ("ended", "not started")
    return f"{subject} {_doing(group, standing.root)}" + (
        f" for {duration(group.stands_for)}" if known else ""
    )


def _subject(numbers: Sequence[int], world_size: int) -> str:
    if len(numbers) == world_size > 1:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    return ranks_phrase(numbers)


def _be(numbers: Sequence[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def _doing(group: Group, root: str) -> str:
    """The rest of the clause: "wait in all_reduce at train.py:42"."""
    one, be = group.first, _be(group.numbers)
    have = "has" if be == "is" else "have"
    if not group.frames:
        match one.missing:
            case "stopped":
                return f"{be} stopped by a signal (SIGSTOP, or Ctrl-Z)"
            case "held":
                return f"{be} held by a debugger"
            case "kernel":
                return f"{be} stuck in the kernel" + (f", in {one.kernel}" if one.kernel else "")
            case "ended":
                return f"{have} ended with {one.detail}"
            case "not started":
                return f"{have} not been started yet"
            case "starting":
                return f"{have} not begun the program yet"
            case "closing":
                return f"{have} left the program, and {be} closing down the interpreter"
            case "other program":
                return f"{'runs' if be == 'is' else 'run'} another program, {_cut(one.detail, COMMAND_CHARACTERS)}"
            case "not looked into":
                return (
                    f"{be} {_STATES.get(one.state, 'alive')} (with --plain no rank is asked where)"
                )
            case _:
                return f"{'does' if be == 'is' else 'do'} not answer; {be} {_STATES.get(one.state, 'alive')}"
    place = group.frames[stacks.own_index(group.frames)]
    line = f"{stacks.library_path(stacks.shown(place.file, root))}:{place.line}"
    call = stacks.called(group.frames)
    if group.collective:
        verb = ("waits" if be == "is" else "wait") if group.cpu < WAITING else be
        return f"{verb} in {call} at {line}"
    if call:
        return f"{be} in {call} at {line}"
    return f"{be} at {line}" + (f" in {place.function}" if place.function else "")


def duration(seconds: float | None) -> str:
    """`31 s`, `4 min`, `2.5 h`: what a person wants to know of it."""
    time = seconds or 0.0
    if time < 10:
        return f"{time:.1f} s"
    if time < 600:
        return f"{time:.0f} s"
    return f"{time / 60:.0f} min" if time < 5400 else f"{time / 3600:.1f} h"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


# --- the collectives do not match
# ------------------------------------------------------------------------------------


class Mismatch(msgspec.Struct, frozen=True):
    """Ranks that wait for each other in calls that do not belong together."""

    groups: tuple[Group, ...]  # each in one call at one place
    confidence: Confidence

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.collective or group.hidden_wait for group in self.groups))

    @property
    def of_steps(self) -> bool:
        """Whether some wait inside a step of DDP's, and others elsewhere."""
        return any(group.hidden_wait for group in self.groups)

    def __str__(self) -> str:
        if self.of_steps:
            return "they made different numbers of steps"
        if len(self.names) > 1:
            return "the ranks are in different collectives, and none of these returns"
        return f"the ranks called {self.names[0]} on different lines, and it does not return"


def mismatch(standing: Standing) -> Mismatch | None:
    """Whether the ranks wait for each other in calls that do not match; None when nothing shows
    that.

    It is said only when every rank that lives is in a collective and moves no more: a rank
    elsewhere may be the one that all wait for. The same collective on different lines is often
    right (`broadcast` in both branches of an `if rank == 0`), and so is a different one in a group
    of some ranks only; what makes it suspicious is that nobody goes on. So it is never certain:
    stacks are seen here, not groups.
    """
    living = [
        group for group in groups(standing) if group.first.missing not in ("ended", "not started")
    ]
    if not living or not all(group.collective or group.hidden_wait for group in living):
        return None
    calls = {(group.collective or group.hidden_wait, _place_of(group)): group for group in living}
    if len(calls) < 2 or any(group.stands_for is None for group in living):
        return None
    long = all((group.stands_for or 0.0) >= SURELY for group in living)
    different = len({group.collective or group.hidden_wait for group in living}) > 1
    return Mismatch(tuple(living), "likely" if long and different else "possible")


def _place_of(group: Group) -> tuple[str, int]:
    frame = group.frames[stacks.own_index(group.frames)]
    return frame.file, frame.line


# --- a report
# --------------------------------------------------------------------------------------------------


def stalled(standing: Standing, seconds: float, *, seen: int = 0) -> Report:
    """No rank has moved for `seconds`. `seen`: how often their stacks were looked at meanwhile, 0
    when /proc alone shows it.

    Its code is `collective-mismatch` when that is what the stacks show, else `job-stalled`.
    """
    found = [group for group in groups(standing) if group.first.missing != "ended"]
    wrong = mismatch(standing)
    odd = found[0]
    how = (
        "none of their main threads has run"
        if not seen
        else f"they were found there each of {seen} times"
    )
    evidence = [*_lines(found, standing), f"for {duration(seconds)} {how}"]
    where = f"pid {odd.first.pid}"
    if odd.frames:
        where = f"{stacks.place(odd.frames, standing.root)}, {where}"
    again = Help("see the whole stacks, as often as you like", f"rallypoint stacks {standing.job}")
    then = "nothing was stopped: only a person can tell a long wait from one without end"
    if wrong is not None:
        return Report(
            code="collective-mismatch",
            headline=f"{sentence(standing, since=False)}: {wrong}",
            where=where,
            why=_DDP_WAITS
            if wrong.of_steps
            else "a collective returns when every rank of the group has called it, in the same order",
            confidence=wrong.confidence,
            evidence=tuple(evidence),
            then=then,
            help=(*_way_out(wrong), again),
            logs=(standing.run_dir,) if standing.run_dir else (),
            ranks=tuple(number for group in wrong.groups for number in group.numbers),
        )
    waits = [group for group in found if group.collective]
    others = [group for group in found if not group.collective]
    why = ""
    if waits and others:
        late = [number for group in others for number in group.numbers]
        waiting = [number for group in waits for number in group.numbers]
        why = f"{_subject(waiting, standing.world_size)} {_wait(waiting)} until {ranks_phrase(late)} {_make(late)} the same call"
    elif len(found) == 1 and waits:
        why = f"all of them are in the same {waits[0].collective}: what it waits for is below it, in the network or in a group of some ranks"
    return Report(
        code="job-stalled",
        headline=f"no rank has moved for {duration(seconds)}: {sentence(standing, since=False)}",
        where=where,
        why=why,
        evidence=tuple(evidence),
        then=then,
        help=(*_helps(odd), again),
        logs=(standing.run_dir,) if standing.run_dir else (),
        ranks=odd.numbers if len(found) > 1 else (),
        exit_status=0,
    )


_DDP_WAITS = (
    "backward() of a DDP model waits in its all_reduce of the gradients, and forward() in its broadcast of the buffers, until every "
    "rank makes the same step"
)


def _way_out(wrong: Mismatch) -> tuple[Help, ...]:
    if not wrong.of_steps:
        return (
            Help(
                "let every rank make the same calls in the same order, outside of branches that only some take"
            ),
        )
    helps = (
        Help("give every rank as many batches", "DistributedSampler(dataset, drop_last=True)"),
        Help("or let the ranks that are done answer the others", "with model.join():"),
    )
    alone = any("forward" in group.hidden_wait for group in wrong.groups)
    return (
        (
            *helps[:1],
            Help("and call the model itself where only some ranks evaluate", "model.module(batch)"),
        )
        if alone
        else helps
    )


def _wait(numbers: Sequence[int]) -> str:
    return "waits" if len(numbers) == 1 else "wait"


def _make(numbers: Sequence[int]) -> str:
    return "makes" if len(numbers) == 1 else "make"


def _helps(odd: Group) -> tuple[Help, ...]:
    if odd.first.missing == "stopped":
        return (
            Help(
                f"let {'it' if len(odd.ranks) == 1 else 'them'} go on",
                "kill -CONT " + " ".join(str(one.pid) for one in odd.ranks),
            ),
        )
    if odd.first.missing == "kernel":
        return (
            Help(
                "see what the kernel waits for, mostly a disk or a network file system",
                f"sudo cat /proc/{odd.first.pid}/stack",
            ),
        )
    return ()


def _lines(found: Sequence[Group], standing: Standing) -> list[str]:
    """A line for each group, the odd one first: what its processes do or, where the sentence could
    not name them all, where they stand.
    """
    named = len(found) <= SENTENCE_GROUPS + 1
    rows = [
        (ranks_phrase(group.numbers), _facts(group) if named else _doing(group, standing.root))
        for group in found
    ]
    if len(rows) > EVIDENCE_LINES - 1:
        rest = [number for group in found[EVIDENCE_LINES - 2 :] for number in group.numbers]
        rows = [
            *rows[: EVIDENCE_LINES - 2],
            (ranks_phrase(rest), f"at {len(found) - EVIDENCE_LINES + 2} other places"),
        ]
    wide = max(len(who) for who, _ in rows)
    return [f"{who.ljust(wide)}  {doing}" for who, doing in rows]


# --- on a screen
# --------------------------------------------------------------------------------------------------


def text(
    standing: Standing, *, width: int = 92, source: Source | None = None, others: Sequence[str] = ()
) -> str:
    """The sentence, then a block for each group with its stack, in at most `MOST_LINES` lines.
    `source` tells the text of a program's line, from file and number, "" when it is not known;
    `others` are the names of jobs that run, too."""
    found = groups(standing)
    lines = wrapped(plain(sentence(standing)), max(width, 40))
    wrong = mismatch(standing)
    if wrong is not None:
        lines += [
            "",
            f"collective-mismatch: {wrong} ({wrong.confidence})",
            "more   rallypoint explain collective-mismatch",
        ]
    foot = ["", _foot(standing)]
    if others:
        foot.append(
            f"also running: {', '.join(others[:3])}"
            + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        )
    shown, rest = list(found[:MOST_GROUPS]), list(found[MOST_GROUPS:])
    room = MOST_LINES - len(lines) - len(foot) - (2 if rest else 0)
    blocks: list[list[str]] = []
    for frames in range(MOST_FRAMES, -1, -1):  # fewer frames of each, rather than fewer groups
        blocks = [_block(group, standing, frames, source) for group in shown]
        if sum(len(block) for block in blocks) + len(blocks) <= room:
            break
    else:
        blocks = [block[:1] for block in blocks][: room - 1]
    spaced = any(len(block) > 1 for block in blocks)
    for i, block in enumerate(blocks):
        lines += ["", *block] if spaced or i == 0 else block
    if rest:
        numbers = [number for group in rest for number in group.numbers]
        lines += [
            "",
            f"{ranks_phrase(numbers)}: at {len(rest)} other places; --error-format json has them all",
        ]
    return "\n".join([*lines, *foot])


def _block(group: Group, standing: Standing, most: int, source: Source | None) -> list[str]:
    head = f"{ranks_phrase(group.numbers)}  {_facts(group)}"
    if not group.frames:
        lines = [
            head,
            f"    {_doing(group, standing.root)}",
            *(f"    {help.command}" for help in _helps(group)),
        ]
        return [_cut(plain(line), LINE_CHARACTERS) for line in lines[: most + 1]]
    if most == 0:
        return [
            _cut(plain(f"{head} · {stacks.place(group.frames, standing.root)}"), LINE_CHARACTERS)
        ]
    own = group.frames[stacks.own_index(group.frames)]
    frames = [
        frame for frame in group.frames if frame is own or frame.function not in stacks.WRAPPERS
    ]
    left_out = len(frames) - most
    if left_out > 0:
        # The program's own line stays, whatever lies below it.
        at = frames.index(own)
        frames = (
            frames[-most:]
            if at >= left_out
            else [own, *frames[-(most - 1) :]]
            if most > 1
            else [own]
        )
    lines = [head]
    if left_out > 0:
        lines.append(f"    ... {left_out} more {'frame' if left_out == 1 else 'frames'}")
    for frame in frames:
        lines.append(f"    {_frame(frame, standing.root)}")
        if frame is own and source is not None and (words := source(frame.file, frame.line)):
            lines[-1] += f": {words}"
    return [_cut(plain(line), LINE_CHARACTERS) for line in lines]


def _frame(frame: Frame, root: str) -> str:
    described = stacks.describe(msgspec.structs.replace(frame, file=stacks.shown(frame.file, root)))
    return stacks.library_path(described)


def _facts(group: Group) -> str:
    """`pid 41210 · running for 33 s · asleep · 0 % CPU`, of one processor."""
    parts = []
    pids = sorted(one.pid for one in group.ranks if one.pid)
    if pids:
        shown = pids if len(ranges(pids)) <= PID_CHARACTERS else pids[:3]
        more = f" and {len(pids) - len(shown)} more" if len(pids) > len(shown) else ""
        parts.append(f"{'pid' if len(pids) == 1 else 'pids'} {ranges(shown)}{more}")
    if group.first.missing in ("ended", "not started"):
        return " · ".join(parts) or "no process"
    phases = {one.phase for one in group.ranks}
    if len(phases) == 1:
        times = [one.phase_for for one in group.ranks]
        parts.append(
            f"{_PHASES.get(group.first.phase, group.first.phase)} for {duration(min(times))}"
        )
    if group.first.missing in ("stopped", "held"):
        return " · ".join(parts)
    states = {one.state for one in group.ranks}
    parts.append(" or ".join(sorted(_STATES.get(state, "gone") for state in states)))
    kernel = {one.kernel for one in group.ranks if one.state == "D"} - {""}
    if kernel:
        parts[-1] += f" ({', '.join(sorted(kernel))})"
    low, high = (round(100 * bound(one.cpu for one in group.ranks)) for bound in (min, max))
    parts.append(f"{low} % CPU" if low == high else f"{low}-{high} % CPU")
    return " · ".join(parts)


def _foot(standing: Standing) -> str:
    ranks = f"{standing.world_size} rank{'s' * (standing.world_size != 1)}"
    attempt = f", attempt {standing.attempt}" if standing.attempt else ""
    folder = f"; logs in {standing.run_dir}" if standing.run_dir else ""
    return plain(
        f"job {standing.job}: {standing.program}, {ranks}, started {duration(standing.age)} ago{attempt}{folder}"
    )


# --- for a program
# --------------------------------------------------------------------------------------------------


def as_data(standing: Standing) -> dict[str, object]:
    """The same for `--error-format json`: plain data, with every rank and every frame."""
    wrong = mismatch(standing)
    return {
        "sentence": sentence(standing),
        "code": "collective-mismatch" if wrong is not None else "",
        "confidence": wrong.confidence if wrong is not None else "",
        "job": standing.job,
        "program": standing.program,
        "run_dir": standing.run_dir,
        "age": standing.age,
        "attempt": standing.attempt,
        "launcher": standing.launcher,
        "groups": [
            {
                "ranks": group.numbers,
                "place": _doing(group, standing.root),
                "frames": group.frames,
                "collective": group.collective,
            }
            for group in groups(standing)
        ],
        "ranks": standing.ranks,
    }
