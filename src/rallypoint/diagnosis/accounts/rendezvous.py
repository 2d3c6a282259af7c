"""Where the ranks were to meet: init_process_group, its address, port, interface and variables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rallypoint.diagnosis import reading
from rallypoint.diagnosis.accounts.cases import Case
from rallypoint.diagnosis.accounts.form import logs, told
from rallypoint.diagnosis.accounts.wording import first_line, listed
from rallypoint.diagnosis.evidence import Meeting, Raised
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

FIRST_FREE = 1024  # the first port that needs no privilege, where nobody changed ip_unprivileged_port_start


def address_differs(case: Case, meetings: Sequence[tuple[Meeting, tuple[int, ...]]]) -> Report:
    """Ranks of one group that look for each other at different places."""
    evidence = [f"{ranks_phrase(ranks)}: {at.address}" + (f", from {at.line}" if at.line else "") for at, ranks in meetings]
    return Report(
        code="address-differs",
        headline=f"the ranks were told {len(meetings)} different meeting points: {', '.join(at.address for at, _ in meetings[:3])}",
        where=meetings[0][0].line,
        why="init_process_group brings together only those that come to the same address",
        evidence=listed(evidence),
        then=case.then,
        help=(Help("give every rank the same address, or leave it out: rallypoint sets MASTER_ADDR and MASTER_PORT"),),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def stale_file(case: Case, error: Raised, path: str) -> Report:
    """A refused connection behind a file:// rendezvous: the file names processes that are gone."""
    return told(
        case,
        "store-file-stale",
        f"the rendezvous file {path} sent {case.subject} to processes that are gone",
        error,
        why="gloo was refused at an address that stands in the file: an earlier run left it",
        help=(Help("remove the file before a run, or use a new name for each", f"rm {path}"), Help("or leave init_method out")),
    )


def group_twice(case: Case, error: Raised) -> Report:
    """init_process_group in a process that has its default group."""
    first = case.first.meeting.line if case.first.meeting else ""
    why = error.why or ((f"an earlier call is at {first}",) if first else ())
    return told(
        case,
        "group-twice",
        f"{case.subject} called init_process_group a second time",
        error,
        why=why[0] if why else "",
        evidence=tuple(why[1:]),
        help=tuple(Help(sentence, command) for sentence, command in error.help)
        or (Help("call it once, or close the first group before", "dist.destroy_process_group()"),),
    )


def parameter_missing(case: Case, error: Raised) -> Report:
    """An init_method that names a place alone, and no rank or world_size beside it."""
    name, scheme = reading.parameter_missing(error.message)
    return told(
        case,
        "init-method-invalid",
        f"{case.subject} gave init_process_group an address ({scheme}://), and no {name}",
        error,
        why="such an address says where the ranks meet, and not which of them this one is, nor how many there are",
        help=(
            Help("give both", f'init_process_group("gloo", init_method="{scheme}://...", rank=rank, world_size=2)'),
            Help("or leave all three out: the launcher sets what is read then", 'dist.init_process_group("gloo")'),
        ),
    )


def store_waits(case: Case, error: Raised, came: int, every: int) -> Report:
    """A TCPStore of the program's own that waits for more processes than there are."""
    return told(
        case,
        "world-size-differs",
        f"{case.subject} made a TCPStore that waits for {every} processes, and {came} came",
        error,
        why="its third argument is how many processes use it, not how many bytes it may hold",
        evidence=(first_line(error.message, 200),),
        help=(
            Help("give the number of processes, or None for a store that waits for nobody", "TCPStore(host, port, world_size, rank == 0)"),
            Help("read more about it", "rallypoint explain tcpstore"),
        ),
    )


def port_forbidden(case: Case, error: Raised) -> Report:
    """A port that the kernel refuses: below 1024 for want of a right, beyond that by a rule of the machine's."""
    port = reading.port_named(error.message) or next((int(found) for found in re.findall(r"\]:(\d+)", error.message)), 0)
    if port >= FIRST_FREE:
        return told(
            case,
            "port-unavailable",
            f"{case.subject} may not listen on port {port}: a rule of the machine's forbids it",
            error,
            why="ports from 1024 on need no privilege, unless somebody has changed that",
            evidence=("SELinux, a seccomp filter, Landlock or a BPF program of the container's refuse like this",),
            help=(
                Help("see what SELinux refused, where it is on", "sudo ausearch -m avc -ts recent"),
                Help("or try another port, or leave it out: rallypoint holds a free one"),
            ),
        )
    return told(
        case,
        "port-forbidden",
        f"{case.subject} may not listen on {f'port {port}: it is for privileged users' if port else 'an address: permission denied'}",
        error,
        why="ports below 1024 need the right to bind them (CAP_NET_BIND_SERVICE)",
        evidence=() if port else ("which port it was is not said; from 1024 on only a rule (SELinux's, a container's) forbids one",),
        help=(Help("take a port from 1024 on, or leave it out: rallypoint holds a free one"),),
    )


def group_missing(case: Case, error: Raised) -> Report:
    """A call of torch.distributed in a process that has no group, or has one no more."""
    call = error.call if error.call not in ("", "get_default_group", "get_group_size") else "a call of torch.distributed"
    return told(
        case,
        "group-missing",
        f"{case.subject} used torch.distributed before init_process_group, or after destroy_process_group",
        error,
        why=f"{call} needs the default group, and this process has none",
        help=(
            Help("open the group before", 'dist.init_process_group("gloo")'),
            Help("or, for code that also runs without one, ask first", "if dist.is_available() and dist.is_initialized():"),
        ),
    )


def variable_missing(case: Case, error: Raised) -> Report:
    """init_process_group reads a variable that is not set: by whom it was removed, when we had set it."""
    variable = reading.variable_missing(error.message)
    line = case.first.meeting.line if case.first.meeting is not None else ""
    ours = bool(case.job.held_address)  # rallypoint set them all
    return told(
        case,
        "env-missing",
        f"{variable} is not set in {case.subject}, and init_process_group reads it",
        error,
        why=f"rallypoint had set {variable} when the rank started: the program, or a module of it, has removed it"
        if ours
        else "nothing that started this process had set it",
        evidence=(f"init_process_group was called at {line}",) if line and not ours else (),
        help=(
            Help(f"leave {variable} in the environment")
            if ours
            else Help("start the program with a launcher, which sets it", f"rallypoint run -n 2 {case.job.program}"),
            Help("see who removes it", f"grep -rn 'environ' --include='*.py' . | grep -e {variable} -e clear -e pop")
            if ours
            else Help("or set it, with the others that init_process_group reads: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ),
    )


def interface_missing(case: Case, error: Raised, name: str) -> Report:
    """gloo was told to use a network interface that is not there."""
    return told(
        case,
        "interface-missing",
        f"gloo in {case.subject} was to use the network interface {name}, which has no address here",
        error,
        why="GLOO_SOCKET_IFNAME, or the program, names the interfaces by which the ranks reach each other",
        help=(
            Help("on one node no interface has to be named", "unset GLOO_SOCKET_IFNAME"),
            Help("or see which there are, and take one of them", "ip -brief address"),
        ),
    )


def port_in_use(case: Case, error: Raised) -> Report:
    """EADDRINUSE: who holds the port, as far as it can be seen."""
    port, job = reading.port_named(error.message), case.job
    which = f"port {port}" if port else "an address"
    own = [rank for rank in job.ranks if any(re.search(rf"\bpid {rank.pid}\b", holder) for holder in job.holders)]
    evidence = tuple(job.holders[1:])
    if own:
        why = f"rank {own[0].rank} of this job has it: {job.holders[0]}"
        helps: tuple[Help, ...] = (Help("bind it in one rank only, or give each rank its own", 'if os.environ["RANK"] == "0":'),)
    else:
        why = job.holders[0] if job.holders else "who holds it could not be seen"
        nobody = not any("(pid " in holder or " of user " in holder for holder in job.holders)
        if error.type.endswith("DistNetworkError") and job.holders and nobody:
            why, evidence = "whoever listened there has gone since", job.holders  # torch's sockets may be bound beside TIME_WAIT
        chosen = case.first.meeting is not None and error.call == "init_process_group"
        line = f" ({case.first.meeting.line})" if chosen and case.first.meeting and case.first.meeting.line else ""
        advice = f"leave the port out of the program{line}: rallypoint holds a free one for init_process_group"
        helps = (Help(advice) if chosen else Help("bind port 0, and ask the socket which number it got", "sock.getsockname()[1]"),)
        if not job.holders:
            helps += (Help("or see who holds it, as root", f"ss -ltnp 'sport = :{port}'" if port else "ss -ltnp"),)
    return told(
        case, "port-in-use", f"{case.subject} could not listen on {which}: it is in use", error, why=why, evidence=evidence, help=helps
    )
