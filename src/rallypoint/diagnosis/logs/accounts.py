"""One function per cause: what was seen in a log, told as a Report."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from rallypoint.diagnosis import reading, stacks
from rallypoint.diagnosis.accounts import cases, collectives, endings, exceptions, wording
from rallypoint.diagnosis.accounts.abridged import abridged
from rallypoint.diagnosis.evidence import JobEvidence, Raised, RankEvidence
from rallypoint.diagnosis.logs import phrases
from rallypoint.diagnosis.logs.sightings import Collective, Findings, Sighting, Sign
from rallypoint.diagnosis.report import Confidence, Help, Report, Said
from rallypoint.world import ranks_phrase

_KERNEL = "; the kernel, which does so when memory runs out, leaves no word there"
SAID = 8  # lines of somebody's own words
EXPLAINED, NOT_EXPLAINED = 0, 1  # the exit status of `rallypoint explain`: whether a cause is named


class Cause(msgspec.Struct, frozen=True):
    """What an account needs: the sightings that show the cause, the first one first, and what became of the others."""

    findings: Findings
    seen: tuple[Sighting, ...]
    ranks: tuple[int, ...] = ()  # at fault; () when the log does not tell
    then: str = ""
    confidence: Confidence = "certain"
    doubt: str = ""  # why it is not certain

    @property
    def first(self) -> Sighting:
        return self.seen[0]

    @property
    def who(self) -> str:
        """The subject of a sentence."""
        if self.ranks:
            return ranks_phrase(self.ranks) if len(self.ranks) > 1 or len(self.findings.ranks) != 1 else f"rank {self.ranks[0]}"
        if self.first.speaker.known:
            return self.first.speaker.name
        end = next((sighting.end for sighting in self.seen if sighting.end is not None), None)
        if end is not None and end.local_rank >= 0:
            return f"local rank {end.local_rank}"
        return "a rank" if self.findings.ranks else "the program"


class _Told(cases.Case, frozen=True):
    """The ranks of a log, for the accounts that `rallypoint run` has of the same exceptions."""

    named: str = ""

    @property
    def subject(self) -> str:
        return self.named


def raised(cause: Cause) -> Report:
    """An exception, in the words that a job of ours has for the same one."""
    error, first = cause.first.error, cause.first
    assert error is not None
    if (worker := reading.loader_killed(error)) is not None and not reading.out_of_memory(error.type, error.message):
        return _loader_killed(cause, error, *worker)
    ranks = tuple(RankEvidence(rank, rank, 0, "started", raised=error) for rank in cause.ranks or (0,))
    program = _program(error)
    case = _Told(JobEvidence(program, 1, ranks), ranks, "", named=cause.who)
    report = exceptions.raised(case, _named_as_torch_does(error))
    place = stacks.place(error.frames, stacks.root_of(program, error.frames))
    if not place and error.filename:
        found = re.search(r", line (\d+)\)$", error.message)
        place = error.filename + (f":{found.group(1)}" if found else "")
    line = next((sighting for sighting in cause.seen if sighting.error is not None and sighting.error.frames), first)
    facts = report.evidence
    said = words_of(first, cause.who)
    quoted = {one.strip() for each in said for one in each.lines}
    if (
        not report.why
        and line.error is not None
        and (frame := stacks.own_frame(line.error.frames)) is not None
        and frame.source
        and frame.source not in quoted
    ):
        report = msgspec.structs.replace(report, why=f"the line there: {wording.cut(frame.source)}")
    return msgspec.structs.replace(
        report,
        where=", ".join(filter(None, (place, cause.who if cause.ranks or first.speaker.known else ""))),
        why=cause.doubt or report.why if cause.confidence != "certain" else report.why,
        evidence=facts,
        then=cause.then,
        timeline=(),
        said=said,
        logs=_logs(cause),
        ranks=cause.ranks,
        confidence=cause.confidence,
        exit_status=EXPLAINED,
    )


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _named_as_torch_does(error: Raised) -> Raised:
    """A program that reads a launcher's variable itself gets a KeyError where init_process_group has a sentence."""
    variable = error.message.strip("'\"")
    reads = any("environ" in frame.source or (frame.file.endswith("/os.py") and frame.function == "__getitem__") for frame in error.frames)
    if error.type != "KeyError" or variable not in _VARIABLES or not reads:
        return error
    return msgspec.structs.replace(error, message=f"environment variable {variable} expected, but not set")


def _loader_killed(cause: Cause, error: Raised, pid: int, number: int) -> Report:
    """A worker of a DataLoader was ended by a signal; the process that read from it raised."""
    name = wording.signal_name(number)
    worker = f"a DataLoader worker of {cause.who}"
    crashed = number in wording.CRASHES
    report = account(
        cause,
        "rank-crashed" if crashed else "rank-killed",
        f"{worker} {'crashed with' if crashed else 'was killed by'} {name}",
        why=wording.crash_words(number) if crashed else f"who sent {name} is not in the log" + (_KERNEL if name == "SIGKILL" else ""),
        evidence=(f"it had pid {pid}",),
        help=(
            Help("ask the kernel whether it was for lack of memory, on that machine", "sudo dmesg -T | grep -i 'killed process'"),
            Help("load in the process itself: then its own traceback has the line", "DataLoader(..., num_workers=0)"),
        ),
        said=words_of(cause.first, cause.who),
    )
    own = any(not stacks.library(frame) for frame in error.frames)  # mostly it is the handler of a signal, in torch
    return msgspec.structs.replace(report, where=stacks.place(error.frames) if own else "")


def killed(cause: Cause) -> Report:
    """SIGKILL, by somebody whom the log does not name."""
    end = cause.first.end
    assert end is not None
    name = wording.signal_name(end.signal)
    whose = "was" if len(cause.ranks) <= 1 else "were"
    helps = (
        Help("ask the kernel whether it was for lack of memory, on that machine", "sudo dmesg -T | grep -i 'killed process'"),
        Help("under Slurm, ask it", "sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS"),
    )
    return account(
        cause,
        "rank-killed",
        f"{cause.who} {whose} killed by {name}",
        why=f"who sent {name} is not in the log" + (_KERNEL if name == "SIGKILL" else ""),
        evidence=_by(end.by, cause),
        help=helps if name == "SIGKILL" else (),
        said=_last_words(cause),
    )


def killed_for_memory(cause: Cause) -> Report:
    """The kernel or Slurm says that it killed for lack of memory."""
    whose = "was" if len(cause.ranks) <= 1 else "were"
    slurm = any("slurm" in sighting.end.by or sighting.end.by == "srun" for sighting in cause.seen if sighting.end is not None)
    helps = [Help("lower what each rank keeps in memory: batches, caches, loader processes", "DataLoader(..., num_workers=1)")]
    if slurm:
        helps.insert(0, Help("see how much it had and how much it may have", "sacct -j JOBID --format=JobID,ReqMem,MaxRSS,State"))
        helps.append(Help("or ask Slurm for more", "#SBATCH --mem=128G"))
    if any(sighting.end.by == "Ray" for sighting in cause.seen if sighting.end is not None):
        return account(
            cause,
            "rank-out-of-memory",
            "Ray killed workers because the memory of their machine was nearly used up",
            why="Ray does so before the kernel would, at 95 % unless RAY_memory_usage_threshold says otherwise",
            evidence=tuple(wording.cut(sighting.text, 200) for sighting in cause.seen if sighting.text)[:4],
            help=(*helps, Help("or let Ray run fewer of them on one machine", "@ray.remote(num_cpus=4)")),
        )
    return account(
        cause,
        "rank-out-of-memory",
        f"{cause.who} {whose} killed by the kernel for lack of memory",
        why="the log has the word of " + ("Slurm, which limits the memory of a job" if slurm else "the kernel"),
        evidence=tuple(wording.cut(sighting.text, 200) for sighting in cause.seen if sighting.text)[:4],
        help=tuple(helps),
    )


def crashed(cause: Cause) -> Report:
    """Native code: a signal, a dump of faulthandler's, an exception of C++."""
    first = cause.first
    end = next((sighting.end for sighting in cause.seen if sighting.end is not None and sighting.end.signal), None)
    dump = next((sighting for sighting in cause.seen if sighting.sign is Sign.CRASHED), None)
    number = end.signal if end is not None else _signal_of(dump)
    name = end.status if end is not None and end.status else wording.signal_name(number)
    stack = stacks.current_frames("\n".join(dump.lines)) if dump is not None else ()
    evidence = [
        ("called from " if i else "at ") + stacks.describe(frame)
        for i, frame in enumerate(reversed([frame for frame in stack if frame.function not in stacks.WRAPPERS][-endings.CRASH_FRAMES :]))
    ]
    error = dump.error if dump is not None else None
    if error is not None:
        evidence.append(f"an exception of C++ that nobody caught: {wording.named(error)}")
    if not stack:
        evidence.append("the log has no Python stack of it")
    helps = [Help("let Python print its stacks when it crashes again", "export PYTHONFAULTHANDLER=1")] if not stack else []
    if name == "SIGBUS":
        helps.insert(0, Help("see whether shared memory is full", "df -h /dev/shm"))
    return account(
        cause,
        "rank-crashed",
        f"{cause.who} crashed with {name}" + (f" in {stacks.place(stack)}" if stack else ""),
        why=wording.crash_words(number),
        evidence=(*evidence, *(_by(end.by, cause) if end is not None and dump is None else ())),
        help=tuple(helps),
        said=words_of(first, cause.who) if dump is not None and error is None and not stack else (),
    )


def exited(cause: Cause) -> Report:
    """An exit code that is not 0, and no word of the process on why."""
    end = cause.first.end
    assert end is not None
    helps: tuple[Help, ...] = (
        Help("see what it said: the log has none of its words on that", "torchrun --redirects 3 --log-dir logs ..."),
    )
    return account(
        cause,
        "rank-exited",
        f"{cause.who} exited with code {end.code}",
        why=cause.doubt or "no traceback or error of it stands in the log",
        evidence=_by(end.by, cause),
        help=() if cause.findings.last_words else helps,
        said=_last_words(cause),
    )


_MORE_TIME = {"PBS": "#PBS -l walltime=48:00:00", "LSF": "#BSUB -W 48:00", "Slurm": "#SBATCH --time=2-00:00:00"}


def interrupted(cause: Cause) -> Report:
    """Somebody, or the end of the job's time, stopped it."""
    first = cause.first
    end = first.end
    by = end.by if end is not None else ""
    helps: tuple[Help, ...] = ()
    if by == "TIME LIMIT":
        scheduler = next((name for name in _MORE_TIME if name in first.text), "Slurm")
        what, helps = f"{scheduler} stopped the job: its time was over", (Help("ask for more time", _MORE_TIME[scheduler]),)
    elif by:
        what = f"Slurm stopped the job: {by.lower()}"
    elif end is None or not end.signal:
        what = "the job was stopped by Ctrl-C"
    else:
        name = wording.signal_name(end.signal)
        what = f"the launcher was stopped by {name}"
        if name == "SIGHUP":
            what += ", as when the terminal or the ssh connection closes"
            helps = (Help("start it so that it outlives the terminal", "tmux new -s train"),)
        elif name == "SIGINT":
            what = "the job was stopped by Ctrl-C"
    return account(cause, "interrupted", what, why=cause.doubt, help=helps)


def reported(cause: Cause) -> Report:
    """A report of rallypoint's own, which stands in the log of a job that it ran."""
    found = re.search(r"\b(?:error|stopped)\[([a-z-]+)\]: (.+)$", cause.first.text)
    assert found is not None
    return account(
        cause,
        found.group(1),
        found.group(2),
        why="rallypoint's own report stands there, with what led to it",
        help=(Help("see it again, with its timeline and the logs of all ranks", "rallypoint show"),),
    )


def not_started(cause: Cause) -> Report:
    """The interpreter, or Slurm, did not find the program."""
    file, why = phrases.not_started(cause.first.text)
    windows = re.match(r"[A-Za-z]:\\", file) is not None
    slurm = "execve()" in cause.first.text
    by_path = (slurm or "execvp" in cause.first.text) and "/" not in file
    if by_path:
        command = f"{'srun' if slurm else 'mpiexec'} which {file}"
        help = Help("activate the environment that has it before the job, and see whether that node has it, too", command)
    else:
        help = Help("start from the folder that holds it, or type its whole path", f"dir {file}" if windows else f"ls -l {file}")
    return account(
        cause,
        "start-failed",
        f"{file} cannot be started: {why}",
        why="it was looked for on the PATH of the job" if by_path else "",
        help=(help,),
    )


def nccl(cause: Cause) -> Report:
    """NCCL gave up, and no rank shows another cause."""
    warning = next((sighting for sighting in cause.seen if sighting.sign is Sign.NCCL), None)
    error = next((sighting.error for sighting in cause.seen if sighting.error is not None), None)
    words = warning.text if warning is not None else reading.nccl_words(error.message) if error is not None else ""
    report = account(
        cause,
        "nccl-failed",
        f"NCCL failed in {cause.who}: {wording.cut(words, 140)}",
        why=cause.doubt or "no rank shows another cause before it",
        evidence=("the log has NCCL's own warning",) if warning is not None else (),
        help=collectives.nccl_helps(words),
        said=words_of(cause.first, cause.who),
    )
    place = stacks.place(error.frames) if error is not None else ""
    return msgspec.structs.replace(report, where=", ".join(filter(None, (place, ranks_phrase(cause.ranks) if cause.ranks else ""))))


_REASONS = {
    "port-refused": ("{where} refused connections until the timeout: nothing listened there", "see what listens there, on that machine"),
    "address-unreachable": ("no answer came from {where}", "see whether it can be reached at all"),
    "address-unresolved": ("the name in {where} has no address here", "ask the resolver of this machine"),
}


def unreached(cause: Cause, where: str, number: int) -> Report:
    """The meeting point could not be reached, and the log has the reason. `number`: errno, 0 for a name without an address."""
    code = "address-unresolved" if number == 0 else "port-refused" if number == 111 else "address-unreachable"
    host, _, port = where.rpartition(":") if ":" in where else (where, "", "")
    what, look = _REASONS[code]
    if not where:  # torch 1.x does not say which name it was
        what, host = "the host at which the ranks are to meet has no address here", '"$MASTER_ADDR"'
    command = {
        "port-refused": f"ss -ltnp 'sport = :{port}'",
        "address-unreachable": f"nc -vz {host} {port}",
        "address-unresolved": f"getent hosts {host}",
    }
    return account(
        cause,
        code,
        what.format(where=where),
        why="rank 0 listens there once it is in init_process_group; whether it ever was is not in the log"
        if code == "port-refused"
        else "",
        evidence=(wording.cut(cause.first.text or (wording.named(cause.first.error) if cause.first.error is not None else ""), 200),),
        help=(Help(look, command[code]),),
    )


def too_large(cause: Cause, size: int, most: int) -> Report:
    """torch's store closed a connection for the size of what came. Both in bytes. It does not say whose connection that was."""
    who = ranks_phrase(cause.ranks) if cause.ranks else "a rank"
    return account(
        cause,
        "value-too-large",
        f"{who} sent {wording.size(size)} in one value to torch's store, which takes no more than {wording.size(most)}, and was cut off",
        evidence=(wording.cut(cause.first.text, 200),),
        help=(
            Help("use the job's own store, which takes tensors and larger values", 'rallypoint.connect()["key"] = value'),
            Help("or send it with a collective", "dist.broadcast_object_list([value], src=0)"),
        ),
    )


def mismatch(cause: Cause, calls: Sequence[tuple[tuple[int, ...], Collective]]) -> Report:
    """Ranks of one group stood in different collectives."""
    lines = [f"{ranks_phrase(ranks)}: {_collective(call)}" for ranks, call in calls]
    (some, one), (others, other) = calls[:2]
    headline = f"{ranks_phrase(some)} stood in {one.kind}, {ranks_phrase(others)} in {other.kind}, as call {one.sequence} of one group"
    if one.kind == other.kind:
        brought = f"{ranks_phrase(some)} brought {one.elements} elements, {ranks_phrase(others)} {other.elements}"
        headline = f"{brought}, to {one.kind}, call {one.sequence}"
    return account(
        cause,
        "collective-mismatch",
        headline,
        why="every rank of a group must make the same collective calls in the same order, with as much in each",
        evidence=tuple(lines),
        help=(
            Help("look for a branch around a collective, or a loop whose length differs between ranks"),
            Help("let torch compare the calls", "export TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ),
    )


def models_differ(cause: Cause) -> Report:
    """DDP compares how many parameters each rank has, before it begins."""
    error = cause.first.error
    told = phrases.models_differ(error.message) if error is not None else None
    assert told is not None
    rank, number, other, others = told
    nothing = min(number, others) == 0
    doubt = "a model without parameters is also what a rank seems to have when their exchange broke" if nothing else ""
    report = account(
        cause,
        "collective-mismatch",
        f"rank {rank} gave DDP a model of {number} parameters, rank {other} one of {others}",
        why=doubt or "DDP averages parameter by parameter, so every rank must build the same model",
        help=(
            Help("print in each rank what it builds, before DDP", "print(rank, sum(1 for _ in model.parameters()))"),
            Help("and look for what the model depends on that differs: the rank, a file, a version, a seed"),
        ),
        said=words_of(cause.first, cause.who),
    )
    return msgspec.structs.replace(report, ranks=tuple(sorted((rank, other))), confidence="likely" if nothing else cause.confidence)


def no_handler(cause: Cause) -> Report:
    """The URL given to init_process_group begins with what this torch has no code for."""
    error = cause.first.error
    scheme = phrases.scheme_unknown(error.message) if error is not None else ""
    tcp = scheme == "tcp"
    report = account(
        cause,
        "init-method-invalid",
        f"init_method begins with {scheme}://, which this torch does not know" if scheme else "init_method is no URL that torch knows",
        why="on Windows torch knows only file:// before 1.8" if tcp else "torch knows env://, tcp://HOST:PORT and file:///absolute/path",
        help=(
            Help("let the ranks meet in a file that all of them can reach, and that is not there yet", "init_method='file:///D:/meet/here'")
            if tcp
            else Help("leave init_method out: a launcher sets what env:// reads", 'dist.init_process_group("gloo")'),
        ),
        said=words_of(cause.first, cause.who),
    )
    place = stacks.place(error.frames) if error is not None else ""
    return msgspec.structs.replace(report, where=place)


def nccl_mismatch(cause: Cause) -> Report:
    """NCCL itself sees that the ranks' calls differ."""
    ranks = phrases.mismatched(cause.first.text) or ()
    sizes = re.search(r"local size (\d+) remote size (\d+)", cause.first.text)
    why = "every rank of a group must make the same collective calls in the same order, with the same sizes"
    if sizes is not None:  # of one message, whose size NCCL also works out from its own settings
        doubt = (
            f"one rank was to get {sizes[1]} bytes where a peer sent {sizes[2]}; settings of NCCL that differ between nodes do that, too"
        )
        cause = msgspec.structs.replace(cause, confidence="likely", doubt=doubt)
    report = account(
        cause,
        "collective-mismatch",
        f"NCCL met collectives that do not match{f' at or around rank {ranks[0]}' if ranks else ''}",
        why=why,
        help=(
            Help("let torch compare the calls, and name them", "export TORCH_DISTRIBUTED_DEBUG=DETAIL"),
            Help("or let NCCL write down each call", "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL"),
        ),
        said=words_of(cause.first, cause.who),
    )
    return msgspec.structs.replace(report, ranks=ranks)


def stalled(cause: Cause) -> Report:
    """Horovod lists the calls that some ranks are in; whom it waits for it says in newer versions only."""
    first = cause.first
    call = first.collective.kind if first.collective is not None else ""
    named = any("[missing ranks" in line for line in first.lines)
    what = "never came" if named else "wait for the others"
    whom = ranks_phrase(first.ranks) if first.ranks else "some ranks"
    where = f" to {call}" if named and call else f" in {call}" if call else ""
    report = account(
        cause,
        "ranks-missing",
        f"{whom} {'have not come' if named else what}{where}, by Horovod's list of what stalls",
        help=(
            Help("see where every rank is while it hangs", "py-spy dump --pid PID"),
            Help("or end the job when that happens, so that it does not wait for ever", "export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=600"),
        ),
        said=words_of(first, first.speaker.name or "Horovod"),
    )
    return msgspec.structs.replace(report, ranks=first.ranks if named else ())


def _collective(call: Collective) -> str:
    size = f" of {call.elements} elements" if call.elements >= 0 else ""
    return f"{call.kind}{size}, call {call.sequence}"


def missing(cause: Cause, absent: Sequence[int], error: Raised) -> Report:
    """Some waited until their timeout for ranks that were alive, and silent."""
    call = error.call or "a collective"
    return account(
        cause,
        "ranks-missing",
        f"{cause.who} waited in {call} until the timeout; {ranks_phrase(absent)} never came",
        why=f"{ranks_phrase(absent)} said nothing of it, and {'was' if len(absent) == 1 else 'were'} alive when the launcher ended the job",
        evidence=(f"{cause.who} raised {wording.named(error)}",),
        help=(Help("see where every rank is while it hangs", "rallypoint run --stall 60 ..."),),
    )


def not_at_barrier(cause: Cause, ranks: Sequence[int]) -> Report:
    """`monitored_barrier` names those that it waited for in vain."""
    return account(
        cause,
        "ranks-missing",
        f"rank 0 waited in monitored_barrier until the timeout; {ranks_phrase(ranks)} never came",
        help=(
            Help(f"see where rank {ranks[0]} is meanwhile", "rallypoint run --stall 60 ..."),
            Help("or look into its log", "rallypoint explain logs/*.log"),
        ),
    )


def came_short(cause: Cause, came: int, every: int) -> Report:
    """torch's store counts who comes, and does not say who."""
    return account(
        cause,
        "ranks-missing",
        f"{came} of {every} ranks came to init_process_group before the timeout",
        help=(
            Help("see how far each rank comes", "rallypoint run --stall 60 ..."),
            Help("or look into the logs of all ranks and machines", "rallypoint explain logs/*.log"),
        ),
    )


def not_met(cause: Cause, ranks: Sequence[int], error: Raised) -> Report:
    """gloo waited until its timeout for the addresses of some ranks, each of which has a key of its own in the store. `error`: of who
    waited for the first of them."""
    key = reading.keys_waited_for(error.message)
    return account(
        cause,
        "ranks-missing",
        f"{cause.who} waited in init_process_group until the timeout; {ranks_phrase(ranks)} never came",
        why=f"the key that was waited for, {key}, is where rank {ranks[0]} leaves its address",
        help=(
            Help(f"see where rank {ranks[0]} is meanwhile", "rallypoint run --stall 60 ..."),
            Help("or look into the log of its machine", "rallypoint explain logs/*.log"),
        ),
    )


def unknown(findings: Findings, consequences: Sequence[Sighting], ended: Sequence[Sighting]) -> Report:
    """Nothing that names a cause: what the log has, and what is ruled out."""
    spoken = [sighting for sighting in findings.sightings if sighting.sign is Sign.SPOKEN]
    if not consequences and not ended and spoken:
        return _in_unknown_words(findings, spoken)
    if not consequences and not ended:
        headline = f"nothing in these {findings.lines} lines says that something failed"
        if findings.failed:
            headline = f"the launcher says that the job failed, and nothing in these {findings.lines} lines says why"
        return Report(
            code="cause-unknown",
            headline="nothing in this line says why" if findings.lines == 1 else headline,
            why="no exception, no signal, no error of torch, NCCL, Slurm or MPI was recognised",
            help=(Help("give the whole log, or the logs of all ranks", "rallypoint explain logs/*.log"),),
            exit_status=NOT_EXPLAINED,
        )
    first = (*consequences, *ended)[0]
    ranks = sorted({sighting.speaker.rank for sighting in consequences if sighting.speaker.rank >= 0})
    who = ranks_phrase(ranks) if ranks else "a rank"
    short = _in_short(first)
    evidence = ["no rank shows an error of its own, and none was ended by a signal from outside", *_what_waited(consequences)]
    before = [s for s in spoken if s.place.log == first.place.log and s.place.line < first.place.line]
    evidence += [f"line {s.place.line}, before that: {wording.cut(s.text, 200)}" for s in before[:MOST_SPOKEN]]
    helps: list[Help] = []
    unreached_at = _unreached_at(first)
    if unreached_at:
        host, port = unreached_at
        evidence[0] = "refused, dropped and unknown names look the same in torch's message"
        helps = [
            Help("see whether the name has an address", f"getent hosts {host}"),
            Help("and whether something answers there", f"nc -vz {host} {port}"),
        ]
    elif any(sighting.sign is Sign.WATCHDOG for sighting in consequences):
        helps = [
            Help(
                "let NCCL's record of calls be written at the next timeout", "export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"
            ),
            Help("or see where every rank stands", "rallypoint run --stall 60 ..."),
        ]
    elif consequences:
        helps = [
            Help("look at the logs of the other ranks and nodes, too: the cause stands in one of them", "rallypoint explain logs/*.log")
        ]
    return Report(
        code="cause-unknown",
        headline=f"{who} {short}; the cause is not known",
        why="all that the log has are consequences; this is the first",
        evidence=tuple(evidence),
        said=words_of(first, first.speaker.name or "the log"),
        help=tuple(helps),
        logs=_logs_of((first,)),
        ranks=(),
        exit_status=NOT_EXPLAINED,
    )


_UNKNOWN_WORDS = "these words name no cause that is known here"
MOST_SPOKEN = 4  # lines in words that are not known that a report shows


def in_unknown_words(report: Report) -> bool:
    """Whether a report only shows lines that speak of a failure."""
    return report.why == _UNKNOWN_WORDS


def _in_unknown_words(findings: Findings, spoken: Sequence[Sighting]) -> Report:
    """Lines that speak of a failure, and that is all: they are shown, the first ones first."""
    first = spoken[0]
    handled = all(sighting.went_on for sighting in spoken)
    loader = next((sighting for sighting in spoken if reading.loader_gone(sighting.text)), None)
    helps: list[Help] = [Help("give the whole log, or the logs of all ranks", "rallypoint explain logs/*.log")]
    if loader is not None:
        helps.insert(0, Help("load in the rank itself: then the traceback has the line that failed", "DataLoader(..., num_workers=0)"))
    elif any("eartbeat monitor" in s.text or "watchdog got stuck" in s.text for s in spoken):
        helps.insert(
            0, Help("see where every rank stands when it hangs: something holds the GPU, or Python's lock", "py-spy dump --pid PID")
        )
    several = f", and {len(spoken) - 1} more after it" if len(spoken) > 1 else ""
    headline = f"line {first.place.line} speaks of a failure{several}; the cause is not known"
    return Report(
        code="cause-unknown",
        headline=headline if findings.lines != 1 else "this line speaks of a failure, and does not say why",
        why="the log goes on for long after it, so it may have been handled" if handled else _UNKNOWN_WORDS,
        said=(
            Said(
                first.speaker.name or "the log",
                tuple(f"{s.place.line}: {wording.cut(s.text, 300)}" for s in spoken[:MOST_SPOKEN]),
            ),
        ),
        help=tuple(helps),
        logs=_logs_of((first,)),
        exit_status=NOT_EXPLAINED,
    )


def _unreached_at(sighting: Sighting) -> tuple[str, str] | None:
    words = sighting.error.message if sighting.error is not None else sighting.text
    found = re.search(r"while trying to connect to \(([^,]{1,300}), (\d+)\)", words)
    return (found.group(1), found.group(2)) if found is not None else None


def _in_short(sighting: Sighting) -> str:
    if sighting.collective is not None:
        return f"waited in {_collective(sighting.collective)} until the timeout of {sighting.collective.milliseconds / 1000:.0f} s"
    at = _unreached_at(sighting)
    if at is not None:
        return f"could not reach {at[0]}:{at[1]} in time"
    if sighting.error is not None:
        lost = reading.meaning(sighting.error.type, sighting.error.message, sighting.error.call)
        words = reading.in_short(sighting.error).removesuffix(": ")
        if lost is reading.Meaning.OWN:  # of Ray's, Horovod's or the rendezvous', which say that somebody else was first
            return f"failed after something else had ({words})"
        return f"{'waited in vain' if lost is reading.Meaning.WAITED else 'lost another rank'} ({words})"
    if sighting.end is not None:
        how = wording.signal_name(sighting.end.signal) if sighting.end.signal else f"exit code {sighting.end.code}"
        return f"ended with {how}"
    return f"lost another rank or the store ({reading.in_short(Raised('', sighting.text, (), ''))})"[:200]


def _what_waited(consequences: Sequence[Sighting]) -> list[str]:
    calls: dict[tuple[int, str], list[int]] = {}
    for sighting in consequences:
        if sighting.collective is not None and sighting.speaker.rank >= 0:
            calls.setdefault((sighting.collective.sequence, sighting.collective.kind), []).append(sighting.speaker.rank)
    lines = [f"{ranks_phrase(ranks)} timed out in {kind}, call {sequence}" for (sequence, kind), ranks in calls.items()]
    return lines[: wording.EVIDENCE_LINES - 1]


def account(
    cause: Cause,
    code: str,
    headline: str,
    *,
    why: str = "",
    evidence: tuple[str, ...] = (),
    help: tuple[Help, ...] = (),
    said: tuple[Said, ...] = (),
) -> Report:
    return Report(
        code=code,
        headline=headline,
        why=cause.doubt if cause.confidence != "certain" and cause.doubt else why,
        evidence=evidence,
        then=cause.then,
        said=said,
        help=help,
        logs=_logs(cause),
        ranks=cause.ranks,
        confidence=cause.confidence,
        exit_status=EXPLAINED,
    )


def _program(error: Raised) -> str:
    """The program's file, for the command of a help: the outermost frame that is no library's."""
    frame = next((frame for frame in error.frames if not stacks.library(frame)), None)
    name = (frame.file if frame is not None else error.filename).rpartition("/")[2]
    return name if name.endswith(".py") else "train.py"


def _by(by: str, cause: Cause) -> tuple[str, ...]:
    end = cause.first.end
    if not by or end is None:
        return ()
    where = f" on {end.host}" if end.host else ""
    pid = f", pid {end.pid}" if end.pid else ""
    return (f"{by} says so{where}{pid}",)


def _signal_of(dump: Sighting | None) -> int:
    names = {"Segmentation fault": 11, "Bus error": 7, "Floating point exception": 8, "Illegal instruction": 4}
    return next((number for name, number in names.items() if dump is not None and name in dump.text), 6)


def words_of(sighting: Sighting, who: str) -> tuple[Said, ...]:
    """Its words: of a long traceback what each exception says, and the program's own frames."""
    lines = [line for line in sighting.lines if line.strip(" ~^")]
    if not lines:
        return ()
    if len(lines) > SAID:
        lines = abridged(lines, sighting.error.type if sighting.error is not None else "", SAID)
    return (Said(who, tuple(wording.cut(line, 300) for line in lines)),)


def _last_words(cause: Cause) -> tuple[Said, ...]:
    """What stands before the launcher's word, whoever said it."""
    lines = [line for line in cause.findings.last_words if phrases.told_by(line) is None]
    return (Said("the log, before that,", tuple(wording.cut(line, 200) for line in lines)),) if lines else ()


def _logs(cause: Cause) -> tuple[str, ...]:
    return _logs_of(
        sorted(cause.seen, key=lambda sighting: sighting.place.line)[:1] if len({s.place.log for s in cause.seen}) == 1 else cause.seen[:1]
    )


def _logs_of(seen: Sequence[Sighting]) -> tuple[str, ...]:
    return tuple(f"{one.place.log}:{one.place.line}" for one in seen if one.place.log)
