"""Where every rank of a running job stands: grouped, the odd one first, and one sentence that says
it.

Pure: the agent gathers (`launcher/agent/hang_monitor.py`), this says what it shows. `rallypoint
stacks` prints it, `--stall` reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis import held_ranks, stacks
from rallypoint.diagnosis.causes.case import NODES_NAMED, name_among, on_nodes, subject
from rallypoint.diagnosis.causes.wording import shortened
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.render import plain, wrapped
from rallypoint.diagnosis.report import Confidence, Help, Report
from rallypoint.units import duration
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
    "unheard",  # the launcher on its node gave no answer
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
    detail: str = ""  # the other program's command line, how it ended, or the threads it waits for
    node: int = 0
    lost: str = ""  # what of it has failed: "a thread died of OSError: shard 3 is corrupt"
    # "KeyError: 'x', raised at train.py:12 in step": in hand when it last began to wait for others
    handles: str = ""
    host: str = ""  # of its node, in a job on several; "" when it is not known


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
    def hosts(self) -> dict[int, str]:
        """The host of each node that has a rank here."""
        return {one.node: one.host for one in self.ranks}

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
        idle = not self.collective and self.cpu <= AT_REST
        return stacks.waits_in_ddp(self.frames) if idle else ""

    @property
    def waits_in(self) -> str:
        """The call in which they are known to wait for the others; "" when in none."""
        return self.collective or ((self.stands_for or 0.0) >= SURELY and self.hidden_wait) or ""

    @property
    def stands_for(self) -> float | None:
        """How long all of them are known to have stood there."""
        known = [one.stands_for for one in self.ranks if one.stands_for is not None]
        return min(known) if len(known) == len(self.ranks) else None

    @property
    def cpu(self) -> float:
        return sum(one.cpu for one in self.ranks) / len(self.ranks)

    @property
    def be(self) -> str:
        return "is" if len(self.ranks) == 1 else "are"

    def verb(self, one: str, several: str = "") -> str:
        """Return the verb for one rank, "waits", or for several."""
        return one if len(self.ranks) == 1 else several or one.removesuffix("s")


def groups(standing: Standing) -> tuple[Group, ...]:
    """Return the ranks by place, the odd ones first.

    First come those that cannot go on by themselves (stopped, in the kernel, silent), then those
    that do not wait for others, then small groups before large ones. The use of processors only
    orders what is equal in all that, the idle first: a wait of NCCL's spins.
    """
    together: dict[tuple[object, ...], list[RankStanding]] = {}
    for one in sorted(standing.ranks, key=lambda rank: rank.rank):
        phase = one.phase if one.missing == "not looked into" else ""
        frames = stacks.trimmed(one.frames)
        key = (frames,) if frames else (one.missing, one.detail, phase)
        together.setdefault(key, []).append(one)
    made = [Group(tuple(ranks), stacks.trimmed(ranks[0].frames)) for ranks in together.values()]
    return tuple(sorted(made, key=_oddness))


def _oddness(group: Group) -> tuple[int, int, float, int]:
    kind = 3 if group.collective else 1
    if group.first.missing in ("stopped", "held", "kernel", "no answer", "unheard"):
        kind = 0
    elif group.first.missing in ("ended", "not started"):
        kind = 4
    elif group.hidden_wait:  # less odd than one elsewhere
        kind = 2
    return kind, len(group.ranks), round(group.cpu, 1), group.first.rank


# --- in words
# --------------------------------------------------------------------------------------------------


def sentence(standing: Standing, *, since: bool = True) -> str:
    """Return what the ranks do, in one sentence: those that wait first, then those which they may
    be waiting for. `since`: with for how long, where that is known."""
    found = list(groups(standing))
    if not found:
        return "no rank has been started"
    # The largest group is mostly the one that waits; the others follow as they stand in the list,
    # the odd one first, and those that have ended last.
    found.sort(key=lambda group: group.first.missing == "ended")
    present = [group for group in found if group.first.missing != "ended"]
    if present:
        largest = max(present, key=lambda group: (bool(group.collective), len(group.ranks)))
        found.sort(key=lambda group: group is not largest)
    most = SENTENCE_GROUPS + (len(found) == SENTENCE_GROUPS + 1)
    text = "; ".join(_clause(group, standing, since) for group in found[:most])
    rest = [one for group in found[most:] for one in group.ranks]
    if rest:
        others = Group(tuple(rest), ())
        text += f"; {ranks_phrase(others.numbers)} {others.be} at {len(found) - most} other places"
    return text


def _clause(group: Group, standing: Standing, since: bool) -> str:
    known = since and group.stands_for and group.first.missing not in ("ended", "not started")
    long = f" for {duration(group.stands_for or 0.0)}" if known else ""
    return f"{_placed(group, standing)} {_doing(group, standing.root)}{long}"


def _placed(group: Group, standing: Standing) -> str:
    """Return `all 4 ranks`, `ranks 0-1 and 3`, of several nodes `ranks 0-1 on gpu01`."""
    there = _by_node(group, standing)
    if len(standing.hosts) == 1 or len(group.ranks) == standing.world_size:
        return subject(group.numbers, standing.world_size)
    return on_nodes({name: [one.rank for one in ranks] for name, ranks in there.items()})


def _by_node(group: Group, standing: Standing) -> dict[str, list[RankStanding]]:
    """Return the ranks of a group on each node, by its name."""
    hosts = standing.hosts
    there: dict[str, list[RankStanding]] = {}
    for one in group.ranks:
        there.setdefault(name_among(hosts, one.node), []).append(one)
    return there


def _doing(group: Group, root: str) -> str:
    """Return the rest of the clause: "wait in all_reduce at train.py:42"."""
    one, be, have = group.first, group.be, group.verb("has", "have")
    if not group.frames:
        state = _STATES.get(one.state, "alive")
        known: dict[Missing, str] = {
            "stopped": f"{be} stopped by a signal (SIGSTOP, or Ctrl-Z)",
            "held": f"{be} held by a debugger",
            "kernel": f"{be} stuck in the kernel" + (f", in {one.kernel}" if one.kernel else ""),
            "ended": f"{have} ended with {one.detail}",
            "not started": f"{have} not been started yet",
            "starting": f"{have} not begun the program yet",
            "closing": f"{have} left the program, and {be} closing down the interpreter",
            "unheard": f"{have} not been seen: the launcher there gave no answer",
            "other program": f"{group.verb('runs')} another program, {shortened(one.detail, COMMAND_CHARACTERS)}",
            "not looked into": f"{be} {state} (with --plain no rank is asked where)",
        }
        silent = f"{group.verb('does', 'do')} not answer; {be} {state}"
        return known.get(one.missing, silent)
    place = group.frames[stacks.own_index(group.frames)]
    line = f"{stacks.library_path(stacks.shown(place.file, root))}:{place.line}"
    if place.function == "_shutdown" and place.file.endswith("/threading.py"):
        thread = f"{shortened(one.detail, COMMAND_CHARACTERS)}, " if one.detail else ""
        return f"{have} left the program, and {group.verb('waits')} for {thread}a thread that is no daemon, at {line}"
    call = stacks.called(group.frames)
    if call:
        waits = group.collective and group.cpu < WAITING
        return f"{group.verb('waits') if waits else be} in {call} at {line}"
    return f"{be} at {line}" + (f" in {place.function}" if place.function else "")


# --- the collectives do not match
# ------------------------------------------------------------------------------------


class Mismatch(msgspec.Struct, frozen=True):
    """Ranks that wait for each other in calls that do not belong together."""

    groups: tuple[Group, ...]  # each in one call at one place
    confidence: Confidence

    @property
    def of_steps(self) -> bool:
        """True when some wait inside a step of DDP's, and others elsewhere."""
        return not all(group.collective for group in self.groups)

    def __str__(self) -> str:
        names = {group.collective for group in self.groups}
        if self.of_steps:
            return "they made different numbers of steps"
        if len(names) > 1:
            return "the ranks are in different collectives, and none of these returns"
        return f"the ranks called {names.pop()} on different lines, and it does not return"


def mismatch(standing: Standing) -> Mismatch | None:
    """Return how the ranks wait for each other in calls that do not match; None when nothing shows
    that.

    It is said only when every rank that lives is in a collective and moves no more: a rank
    elsewhere may be the one that all wait for. The same collective on different lines is often
    right (`broadcast` in both branches of an `if rank == 0`), and so is a different one in a group
    of some ranks only; what makes it suspicious is that nobody goes on. So it is never certain:
    stacks are seen here, not groups. Ranks in `init_process_group` may look for each other, while
    gloo has let through one that reaches all.
    """
    living = [
        group for group in groups(standing) if group.first.missing not in ("ended", "not started")
    ]
    if not all(group.waits_in and group.stands_for is not None for group in living):
        return None
    own = [group.frames[stacks.own_index(group.frames)] for group in living]
    names = [group.waits_in for group in living]
    calls = {(name, at.file, at.line) for name, at in zip(names, own, strict=True)}
    if len(calls) < 2 or "init_process_group" in names:
        return None
    long = all((group.stands_for or 0.0) >= SURELY for group in living)
    return Mismatch(tuple(living), "likely" if long and len(set(names)) > 1 else "possible")


# --- a report
# --------------------------------------------------------------------------------------------------


def stalled(standing: Standing, seconds: float, *, seen: int = 0) -> Report:
    """Tell that no rank has moved for `seconds`. `seen`: how often their stacks were looked at
    meanwhile, 0 when /proc alone shows it.

    Its code is `collective-mismatch` when that is what the stacks show, else `job-stalled`.
    """
    found = [group for group in groups(standing) if group.first.missing != "ended"]
    wrong = mismatch(standing)
    held, sure = held_ranks.apart(
        {one.rank: one.frames for group in found for one in group.ranks},
        [one.rank for one in standing.ranks if one.handles],
    )
    held = held if sure else ()
    found.sort(key=lambda group: set(held).isdisjoint(group.numbers))
    odd, doing = found[0], sentence(standing, since=False)
    how = "none of their main threads has run"
    if seen:
        how = f"they were found there each of {seen} times"
    where = f"pid {odd.first.pid}"
    if len(standing.hosts) > 1:
        where += f" on {name_among(standing.hosts, odd.first.node)}"
    if odd.frames:
        where = f"{stacks.place(odd.frames, standing.root)}, {where}"
    again = Help("see the whole stacks, as often as you like", f"rallypoint stacks {standing.job}")
    waits = [group for group in found if group.waits_in]
    others = [group for group in found if not group.waits_in]
    why = ""
    if waits and len(found) > 1 and not all(group.collective for group in waits):
        why = _DDP_WAITS
    elif wrong is not None:
        why = "a collective returns when every rank of the group has called it, in the same order"
    elif waits and others:
        late = Group(tuple(one for group in others for one in group.ranks), ())
        waiting = Group(tuple(one for group in waits for one in group.ranks), ())
        who = subject(waiting.numbers, standing.world_size)
        why = f"{who} {waiting.verb('waits')} until {ranks_phrase(late.numbers)} {late.verb('makes')} the same call"
    elif len(found) == 1 and waits:
        what = "what it waits for is below it, in the network or in a group of some ranks"
        if gone := [one.rank for one in standing.ranks if one.missing == "ended"]:
            what = f"it has no end if it needs {ranks_phrase(gone)}"
        why = f"all of them are in the same {waits[0].waits_in}: {what}"
    for one in [one for one in odd.ranks if one.rank in held][:1]:
        here = stacks.place(one.frames, standing.root)
        why = held_ranks.told(one.rank, here, one.handles.replace(standing.root, ""))
    report = Report(
        code="job-stalled",
        headline=f"no rank has moved for {duration(seconds)}: {doing}",
        where=where,
        why=why,
        evidence=(*_lines(found, standing), f"for {duration(seconds)} {how}"),
        then="nothing was stopped: only a person can tell a long wait from one without end",
        help=(*_helps(odd), again),
        logs=(standing.run_dir,) if standing.run_dir else (),
        ranks=odd.numbers if len(found) > 1 else (),
        exit_status=0,
    )
    if wrong is None:
        return report
    return replace(
        report,
        code="collective-mismatch",
        headline=f"{doing}: {wrong}",
        confidence="likely" if held else wrong.confidence,
        help=(*_way_out(wrong), again),
        ranks=tuple(number for group in wrong.groups for number in group.numbers),
        exit_status=1,
    )


_DDP_WAITS = (
    "backward() of a DDP model waits in its all_reduce of the gradients, and forward() in its broadcast of the buffers, until every "
    "rank makes the same step"
)


def _way_out(wrong: Mismatch) -> tuple[Help, ...]:
    same = "let every rank make the same calls in the same order, outside of branches that only some take"
    if not wrong.of_steps:
        return (Help(same),)
    batches = Help("give every rank as many batches", "DistributedSampler(dataset, drop_last=True)")
    if any("forward" in group.hidden_wait for group in wrong.groups):
        own = "and call the model itself where only some ranks evaluate"
        return (batches, Help(own, "model.module(batch)"))
    return (batches, Help("or let the ranks that are done answer the others", "with model.join():"))


def _helps(odd: Group) -> tuple[Help, ...]:
    if odd.first.missing == "stopped":
        there: dict[str, list[str]] = {}
        for one in odd.ranks:
            there.setdefault(_ssh(one), []).append(str(one.pid))
        go_on = f"let {'it' if len(odd.ranks) == 1 else 'them'} go on"
        return tuple(
            Help(go_on, f"{ssh}kill -CONT {' '.join(pids)}") for ssh, pids in there.items()
        )
    if odd.first.missing == "kernel":
        look = "see what the kernel waits for, mostly a disk or a network file system"
        return (Help(look, f"{_ssh(odd.first)}sudo cat /proc/{odd.first.pid}/stack"),)
    return ()


def _ssh(rank: RankStanding) -> str:
    """Return the beginning of a line to type that is for the rank's machine."""
    return f"ssh {rank.host} " if rank.host else ""


def _lines(found: Sequence[Group], standing: Standing) -> list[str]:
    """Return a line for each group, the odd one first: what its processes do or, where the sentence
    could not name them all, where they stand.
    """
    named = len(found) <= SENTENCE_GROUPS + 1
    most = EVIDENCE_LINES - 1 - (len(found) >= EVIDENCE_LINES)
    rows = [
        (
            ranks_phrase(group.numbers),
            _facts(group, standing) if named else _doing(group, standing.root),
        )
        for group in found[:most]
    ]
    rest = [number for group in found[most:] for number in group.numbers]
    if rest:
        rows.append((ranks_phrase(rest), f"at {len(found) - most} other places"))
    wide = max(len(who) for who, _ in rows)
    return [f"{who.ljust(wide)}  {doing}" for who, doing in rows]


# --- on a screen
# --------------------------------------------------------------------------------------------------


def text(
    standing: Standing, *, width: int = 92, source: Source | None = None, others: Sequence[str] = ()
) -> str:
    """Return the sentence, then a block for each group with its stack, in at most `MOST_LINES`
    lines. `source` tells the text of a program's line, from file and number, "" when it is not
    known; `others` are the names of jobs that run, too."""
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
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        foot.append(f"also running: {', '.join(others[:3])}{more}")
    shown, rest = found[:MOST_GROUPS], found[MOST_GROUPS:]
    if rest:
        numbers = ranks_phrase(number for group in rest for number in group.numbers)
        more = f"{numbers}: at {len(rest)} other places; --error-format json has them all"
        foot = ["", more, *foot]
    room = MOST_LINES - len(lines) - len(foot)
    blocks: list[str] = []
    for most in range(MOST_FRAMES, -1, -1):  # fewer frames of each, rather than fewer groups
        blocks = [""] * (most == 0)
        for group in shown:
            blocks += [""] * (most > 0) + _block(group, standing, most, source)
        if len(blocks) <= room:
            break
    return "\n".join([*lines, *blocks[:room], *foot])


def _block(group: Group, standing: Standing, most: int, source: Source | None) -> list[str]:
    """Return what stands for a group: a line about its processes, and at most so many frames."""
    lines = [f"{ranks_phrase(group.numbers)}  {_facts(group, standing)}"]
    if not group.frames:
        lines.append(f"    {_doing(group, standing.root)}")
        lines += (f"    {help.command}" for help in _helps(group))
        lines = lines[: most + 1]
    elif most == 0:
        lines[0] += f" · {stacks.place(group.frames, standing.root)}"
    else:
        own = group.frames[stacks.own_index(group.frames)]
        frames = [one for one in group.frames if one is own or one.function not in stacks.WRAPPERS]
        # The program's own line stays, whatever lies below it.
        left_out = max(len(frames) - most, 0)
        first = [own] if frames.index(own) < left_out else []
        kept = [*first, *frames[left_out + len(first) :]]
        if left_out:
            lines.append(f"    ... {left_out} more frame{'s' * (left_out > 1)}")
        for frame in kept:
            at = replace(frame, file=stacks.shown(frame.file, standing.root))
            words = source(frame.file, frame.line) if frame is own and source is not None else ""
            lines.append(f"    {stacks.library_path(stacks.describe(at))}{words and f': {words}'}")
    return [shortened(plain(line), LINE_CHARACTERS) for line in lines]


def _facts(group: Group, standing: Standing) -> str:
    """Return `pid 41210 · running for 33 s · asleep · 0 % CPU`, of one processor."""
    first, ranks = group.first, group.ranks
    there = _by_node(group, standing)
    if len(standing.hosts) == 1:
        parts = [_pids(ranks)] if any(one.pid for one in ranks) else []
    elif len(there) > NODES_NAMED:
        parts = [f"on {len(there)} nodes"]
    else:
        each = (" ".join(filter(None, (_pids(some), "on", name))) for name, some in there.items())
        parts = [", ".join(each)]
    if first.missing in ("ended", "not started", "unheard"):
        return parts[0] if parts else "no process"
    if len({one.phase for one in ranks}) == 1:
        long = duration(min(one.phase_for for one in ranks))
        parts.append(f"{_PHASES.get(first.phase, first.phase)} for {long}")
    if first.missing in ("stopped", "held"):
        return " · ".join(parts)
    states = sorted({_STATES.get(one.state, "gone") for one in ranks})
    kernel = sorted({one.kernel for one in ranks if one.state == "D"} - {""})
    parts.append(" or ".join(states) + (f" ({', '.join(kernel)})" if kernel else ""))
    used = sorted({round(100 * bound(one.cpu for one in ranks)) for bound in (min, max)})
    parts.append(f"{'-'.join(map(str, used))} % CPU")
    held = _in_hand(group, standing.root)
    parts += [f"handles {held}"] if held else []
    parts += [one.lost for one in ranks if one.lost][:1]
    return " · ".join(parts)


def _in_hand(group: Group, root: str) -> str:
    """Return the exception that one of them has in hand, "" when none has."""
    return next((one.handles for one in group.ranks if one.handles), "").replace(root, "")


def _pids(ranks: Sequence[RankStanding]) -> str:
    """Return `pids 41210-41213`, at most three where that is long; "" when there are none."""
    pids = sorted(one.pid for one in ranks if one.pid)
    if not pids:
        return ""
    shown = pids if len(ranges(pids)) <= PID_CHARACTERS else pids[:3]
    more = f" and {len(pids) - len(shown)} more" if len(pids) > len(shown) else ""
    return f"pid{'s' * (len(pids) > 1)} {ranges(shown)}{more}"


def _foot(standing: Standing) -> str:
    ranks = f"{standing.world_size} rank{'s' * (standing.world_size != 1)}"
    if len(standing.hosts) > 1:
        ranks += f" on {len(standing.hosts)} nodes"
    attempt = f", attempt {standing.attempt}" if standing.attempt else ""
    folder = f"; logs in {standing.run_dir}" if standing.run_dir else ""
    return plain(
        f"job {standing.job}: {standing.program}, {ranks}, started {duration(standing.age)} ago{attempt}{folder}"
    )


# --- for a program
# --------------------------------------------------------------------------------------------------


def as_data(standing: Standing) -> dict[str, object]:
    """Return the same for `--error-format json`: plain data, with every rank and every frame."""
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
