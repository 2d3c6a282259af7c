"""Where the ranks were to meet: init_process_group, its address, port, interface and variables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.causes.case import Case, likely
from rallypoint.diagnosis.causes.report_form import account
from rallypoint.diagnosis.causes.wording import first_line, listed
from rallypoint.diagnosis.error_patterns import python
from rallypoint.diagnosis.evidence import Meeting, Raised
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

FIRST_FREE = (
    1024  # the first port that needs no privilege, where nobody changed ip_unprivileged_port_start
)


def address_differs(case: Case, meetings: Sequence[tuple[Meeting, tuple[int, ...]]]) -> Report:
    """Tell of ranks of one group that look for each other at different places."""
    evidence = [
        f"{ranks_phrase(ranks)}: {at.address}" + (f", from {at.line}" if at.line else "")
        for at, ranks in meetings
    ]
    return account(
        case,
        "address-differs",
        f"the ranks were told {len(meetings)} different meeting points: {', '.join(at.address for at, _ in meetings[:3])}",
        where=meetings[0][0].line,
        why="init_process_group brings together only those that come to the same address",
        evidence=listed(evidence),
        help=(
            Help(
                "give every rank the same address, or leave it out: rallypoint sets MASTER_ADDR and MASTER_PORT"
            ),
        ),
    )


def meet_at_home(case: Case, home: str) -> Report:
    """Tell of ranks that look on their own machine for rank 0, which is on `home`."""
    meeting = case.first.meeting
    address, line = (meeting.address, meeting.line) if meeting else ("", "")
    return account(
        case,
        "address-loopback",
        f"{case.subject} looked for rank 0 at {address}, which is their own machine: rank 0 is on {home}",
        where=line,
        why="localhost and 127.0.0.1 are every machine's own: from another one rank 0 is not there",
        help=(
            Help("leave the address out of the program: rallypoint sets MASTER_ADDR on every node"),
        ),
    )


def stale_file(case: Case, error: Raised, path: str) -> Report:
    """Tell of a refused connection behind a file:// rendezvous: the file names processes that are
    gone.
    """
    return account(
        case,
        "store-file-stale",
        f"the rendezvous file {path} sent {case.subject} to processes that are gone",
        error,
        why="gloo was refused at an address that stands in the file: an earlier run left it",
        help=(
            Help("remove the file before a run, or use a new name for each", f"rm {path}"),
            Help("or leave init_method out"),
        ),
    )


def group_twice(case: Case, error: Raised) -> Report:
    """Tell of init_process_group in a process that has its default group."""
    first = case.first.meeting.line if case.first.meeting else ""
    why = error.why or ((f"an earlier call is at {first}",) if first else ())
    return account(
        case,
        "group-twice",
        f"{case.subject} called init_process_group a second time",
        error,
        why=why[0] if why else "",
        evidence=why[1:],
        help=tuple(Help(sentence, command) for sentence, command in error.help)
        or (Help("call it once, or close the first group before", "dist.destroy_process_group()"),),
    )


def parameter_missing(case: Case, error: Raised) -> Report:
    """Tell of an init_method that names a place alone, and no rank or world_size beside it."""
    found = classify.words_of("parameter-missing", error)
    name, scheme = found["name"].replace(" ", "_"), found["scheme"] or "tcp"
    return account(
        case,
        "init-method-invalid",
        f"{case.subject} gave init_process_group an address ({scheme}://), and no {name}",
        error,
        why="such an address says where the ranks meet, and not which of them this one is, nor how many there are",
        help=(
            Help(
                "give both",
                f'init_process_group("gloo", init_method="{scheme}://...", rank=rank, world_size=2)',
            ),
            Help(
                "or leave all three out: the launcher sets what is read then",
                'dist.init_process_group("gloo")',
            ),
        ),
    )


def store_waits(case: Case, error: Raised) -> Report:
    """Tell of a TCPStore of the program's own that waits for more processes than there are."""
    came, every = classify.came_short(error.message) or (0, 0)
    return account(
        case,
        "world-size-differs",
        f"{case.subject} made a TCPStore that waits for {every} processes, and {came} came",
        error,
        why="its third argument is how many processes use it, not how many bytes it may hold",
        evidence=(first_line(error.message, 200),),
        help=(
            Help(
                "give the number of processes, or None for a store that waits for nobody",
                "TCPStore(host, port, world_size, rank == 0)",
            ),
            Help("read more about it", "rallypoint explain tcpstore"),
        ),
    )


_LEAVE_OUT = Help(
    "or leave init_method out: a launcher sets what env:// reads",
    'dist.init_process_group("gloo")',
)


def url_incomplete(case: Case, error: Raised) -> Report:
    """Tell of an init_method without what torch needs: a host, a port, a path."""
    return account(
        case,
        "init-method-invalid",
        f"init_method names no {classify.url_lacks(error)}",
        error,
        why="torch takes it for tcp://HOST:PORT, or for file:///absolute/path",
        help=(
            Help("print what is given as init_method, just before", "print(repr(init_method))"),
            _LEAVE_OUT,
        ),
    )


def scheme_unknown(case: Case, error: Raised) -> Report:
    """Tell of an init_method that begins with a scheme for which this torch has no code."""
    scheme = classify.words_of("scheme-unknown", error)[1]
    why = "torch knows env://, tcp://HOST:PORT and file:///absolute/path"
    help = _LEAVE_OUT
    if scheme == "tcp":
        why = "on Windows torch knows only file:// before 1.8"
        meet = "let the ranks meet in a file that all of them can reach, and that is not there yet"
        help = Help(meet, "init_method='file:///D:/meet/here'")
    headline = f"init_method begins with {scheme}://, which this torch does not know"
    return account(case, "init-method-invalid", headline, error, why=why, help=(help,))


def address_cut(case: Case, error: Raised) -> Report:
    """Tell that gloo got a piece of an address: it cuts what a peer wrote by its own world_size."""
    found = classify.words_of("address-cut", error)
    whole, piece = int(found[1]), int(found[2])
    size = "a smaller" if piece < whole else "another"
    return account(
        likely(case),
        "world-size-differs",
        f"gloo got an address of {piece} bytes, where each has {whole}: a peer was given {size} world_size",
        error,
        why="each rank writes one address for each other rank, and gloo cuts what a peer wrote by its own world_size",
        help=(Help("print it in each process, just before", "print(rank, world_size)"),),
    )


def host_unresolved(case: Case, error: Raised) -> Report:
    """Tell that the host at which the ranks are to meet has no address; torch 1.x does not say
    which it was.
    """
    found = python.HOST.search(error.message)
    host = found["host"] if found else ""
    asked = '"$MASTER_ADDR"'
    what = f"the name in {host}" if host else "the host at which the ranks are to meet"
    return account(
        case,
        "address-unresolved",
        f"{what} has no address here",
        error,
        help=(Help("ask the resolver of this machine", f"getent hosts {host or asked}"),),
    )


def ssh_unresolved(case: Case, error: Raised) -> Report:
    """Tell that ssh, by which mpirun, pdsh and others start processes elsewhere, found no address."""
    host = classify.words_of("ssh-unresolved", error)["host"]
    alone = host.partition(":")[0]
    why = ""
    help = Help("ask the resolver of this machine", f"getent hosts {host}")
    if alone != host:
        why = "no host name has a colon: what follows it was taken for part of the name"
        slots = "name the host without its slots: a hostfile has them in a column of its own"
        help = Help(slots, f"mpirun -H {alone} ...")
    headline = f"the host name {host} has no address here, says ssh"
    return account(case, "address-unresolved", headline, error, why=why, help=(help,))


def ssh_failed(case: Case, error: Raised) -> Report:
    """Tell of a machine on which nothing could be started by ssh."""
    host = classify.words_of("ssh-failed", error)["host"]
    headline = f"{host} could not be reached by ssh, which starts the processes there"
    help = Help("see what ssh itself says", f"ssh -o BatchMode=yes {host} true")
    return account(case, "address-unreachable", headline, error, help=(help,))


def port_forbidden(case: Case, error: Raised) -> Report:
    """Tell of a port that the kernel refuses: below 1024 for want of a right, beyond that by a rule
    of the machine's.
    """
    port = classify.port_named(error.message) or next(
        map(int, re.findall(r"\]:(\d+)", error.message)), 0
    )
    if port >= FIRST_FREE:
        return account(
            case,
            "port-unavailable",
            f"{case.subject} may not listen on port {port}: a rule of the machine's forbids it",
            error,
            why="ports from 1024 on need no privilege, unless somebody has changed that",
            evidence=(
                "SELinux, a seccomp filter, Landlock or a BPF program of the container's refuse like this",
            ),
            help=(
                Help("see what SELinux refused, where it is on", "sudo ausearch -m avc -ts recent"),
                Help("or try another port, or leave it out: rallypoint holds a free one"),
            ),
        )
    return account(
        case,
        "port-forbidden",
        f"{case.subject} may not listen on {f'port {port}: it is for privileged users' if port else 'an address: permission denied'}",
        error,
        why="ports below 1024 need the right to bind them (CAP_NET_BIND_SERVICE)",
        evidence=()
        if port
        else (
            "which port it was is not said; from 1024 on only a rule (SELinux's, a container's) forbids one",
        ),
        help=(Help("take a port from 1024 on, or leave it out: rallypoint holds a free one"),),
    )


def group_missing(case: Case, error: Raised) -> Report:
    """Tell of a call of torch.distributed in a process that has no group, or has one no more."""
    call = (
        error.call
        if error.call not in ("", "get_default_group", "get_group_size")
        else "a call of torch.distributed"
    )
    return account(
        case,
        "group-missing",
        f"{case.subject} used torch.distributed before init_process_group, or after destroy_process_group",
        error,
        why=f"{call} needs the default group, and this process has none",
        help=(
            Help("open the group before", 'dist.init_process_group("gloo")'),
            Help(
                "or, for code that also runs without one, ask first",
                "if dist.is_available() and dist.is_initialized():",
            ),
        ),
    )


def variable_missing(case: Case, error: Raised) -> Report:
    """Tell of a variable that init_process_group reads and that is not set: who removed it, when we
    had set it.
    """
    variable = classify.words_of("variable-missing", error)[1]
    line = case.first.meeting.line if case.first.meeting else ""
    ours = case.job.held_address  # rallypoint set them all
    return account(
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
            else Help(
                "start the program with a launcher, which sets it",
                f"rallypoint run -n 2 {case.job.program}",
            ),
            Help(
                "see who removes it",
                f"grep -rn 'environ' --include='*.py' . | grep -e {variable} -e clear -e pop",
            )
            if ours
            else Help(
                "or set it, with the others that init_process_group reads: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
            ),
        ),
    )


def interface_missing(case: Case, error: Raised) -> Report:
    """Tell that gloo or NCCL was to use a network interface that is not there."""
    found = classify.words_of("interface-missing", error)
    variable = "NCCL_SOCKET_IFNAME"
    headline = f"NCCL in {case.subject} found no network interface that it may use"
    if found.re.groups:
        variable = "GLOO_SOCKET_IFNAME"
        headline = f"gloo in {case.subject} was to use the network interface {found[1]}, which has no address here"
    return account(
        case,
        "interface-missing",
        headline,
        error,
        why=f"{variable}, or the program, names the interfaces by which the ranks reach each other",
        help=(
            Help("on one node no interface has to be named", f"unset {variable}"),
            Help("or see which there are, and take one of them", "ip -brief address"),
        ),
    )


_IN_ONE_RANK = Help(
    "bind it in one rank only, or give each rank its own", 'if os.environ["RANK"] == "0":'
)
_OTHER_PORT = (
    Help("on one node let torchrun take a free port", "torchrun --standalone ..."),
    Help(
        "or name another port where this one was named: MASTER_PORT, the program, the launcher's option",
        "torchrun --master-port 29501 ...",
    ),
    Help("or start the job with rallypoint, which holds a free port", "rallypoint run ..."),
)


def port_in_use(case: Case, error: Raised) -> Report:
    """Tell of EADDRINUSE: who holds the port, as far as it can be seen."""
    port, holders = classify.port_named(error.message), case.node.holders
    which = f"port {port}" if port else "an address"
    own = [
        rank
        for rank in case.node.ranks
        if any(re.search(rf"\bpid {rank.pid}\b", holder) for holder in holders)
    ]
    evidence = holders[1:]
    of_all = not port and not holders and len(case.node.ranks) > 1
    if own or of_all:
        why = "every rank that runs this line with the same number wants the same port"
        if own:
            why = f"rank {own[0].rank} of this job has it: {holders[0]}"
        helps: tuple[Help, ...] = (_IN_ONE_RANK,)
    else:
        why = holders[0] if holders else "who holds it could not be seen"
        nobody = not any("(pid " in holder or " of user " in holder for holder in holders)
        if error.type.endswith("DistNetworkError") and holders and nobody:
            why, evidence = (
                "whoever listened there has gone since",
                holders,
            )  # torch's sockets may be bound beside TIME_WAIT
        meeting = case.first.meeting
        helps = (
            Help("bind port 0, and ask the socket which number it got", "sock.getsockname()[1]"),
        )
        if meeting and error.call == "init_process_group":
            line = f" ({meeting.line})" if meeting.line else ""
            advice = f"leave the port out of the program{line}: rallypoint holds a free one for init_process_group"
            helps = (Help(advice),)
        elif case.job.log and "server socket" in error.message:
            helps = _OTHER_PORT
    if not holders:
        command = f"ss -ltnp 'sport = :{port}'" if port else "ss -ltnp"
        helps += (Help("or see who holds it, as root", command),)
    return account(
        case,
        "port-in-use",
        f"{case.subject} could not listen on {which}: it is in use",
        error,
        why=why,
        evidence=evidence,
        help=helps,
    )
