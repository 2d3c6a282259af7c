"""The catalogue: every code, what it means in a line, and whose affair it is; the reports of what
happens before there is a rank.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from rallypoint.diagnosis.report import Help, Report

Affair = Literal["program", "usage", "machine", "launcher", "person"]
Label = Literal["error", "warning", "stopped"]


class Cause(msgspec.Struct, frozen=True):
    """One code. The code is never renamed, and never used for anything else."""

    code: str
    meaning: str  # what `rallypoint explain` lists
    # your program · how rallypoint was called · this machine · rallypoint itself · somebody wanted
    # it
    affair: Affair
    label: Label = "error"  # what stands before the code in a report


_LISTED = (
    Cause("rank-raised", "an exception left the program in a rank", "program"),
    Cause("rank-exited", "a rank ended with an exit code that is not 0", "program"),
    Cause("rank-killed", "a signal that rallypoint did not send ended a rank", "machine"),
    Cause(
        "rank-out-of-memory",
        "a rank needed more memory than there was: host, GPU or shared",
        "machine",
    ),
    Cause(
        "rank-crashed",
        "native code crashed in a rank: SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL",
        "program",
    ),
    Cause("rank-left-early", "a rank ended well while the others still needed it", "program"),
    Cause(
        "ranks-missing",
        "some ranks waited until their timeout for others that did not come",
        "program",
    ),
    Cause(
        "job-stalled",
        "no rank has moved for five minutes, or for as long as --stall says",
        "program",
        "warning",
    ),
    Cause(
        "collective-mismatch",
        "the ranks wait for each other in collectives that do not match",
        "program",
    ),
    Cause(
        "node-lost", "a node of the job was lost: its host, its network or its launcher", "machine"
    ),
    Cause("node-isolated", "this node was cut off from the others of its job", "machine"),
    Cause("lead-lost", "node 0, which leads the job, was lost", "machine"),
    Cause("ray-unavailable", "a Ray cluster cannot be used, or has no room for the job", "machine"),
    Cause("join-timeout", "not all nodes of the job came in time", "machine"),
    Cause("job-complete", "a node came to a job that has all its nodes", "usage"),
    Cause("node-duplicate", "two nodes were started with the same number", "usage"),
    Cause("node-skew", "a node was started with another program, size or version", "usage"),
    Cause(
        "cluster-unclear",
        "a cluster does not say enough of the job, or contradicts itself",
        "usage",
    ),
    Cause("no-common-address", "no address of node 0 is reached by every node", "machine"),
    Cause("cause-unknown", "the evidence names no cause", "program"),
    Cause(
        "error-swallowed",
        "a rank caught its own error in a call that it shares with the others, and went home",
        "program",
    ),
    Cause("address-differs", "the ranks were told different meeting points", "program"),
    Cause(
        "rank-duplicate", "several processes came to init_process_group as the same rank", "program"
    ),
    Cause(
        "rank-out-of-range",
        "init_process_group was called with a rank that its world_size does not have",
        "program",
    ),
    Cause(
        "world-size-differs",
        "the ranks wait for groups of another size than theirs can be",
        "program",
    ),
    Cause("backend-differs", "the ranks of one group chose different backends", "program"),
    Cause(
        "init-method-invalid",
        "the init_method given to init_process_group cannot work as it is written",
        "program",
    ),
    Cause(
        "store-file-stale",
        "the file of a file:// rendezvous is left over from an earlier run",
        "machine",
    ),
    Cause(
        "env-missing", "a variable that init_process_group reads is not set in a rank", "program"
    ),
    Cause(
        "main-unguarded",
        "a program that spawns processes does so whenever it is imported, which each of them does",
        "program",
    ),
    Cause(
        "producer-gone",
        "a tensor was taken from a process that is gone, or serves it no longer",
        "program",
    ),
    Cause("files-exhausted", "a process has as many files open as its limit allows", "machine"),
    Cause("group-twice", "init_process_group was called a second time in one process", "program"),
    Cause(
        "group-missing",
        "a call of torch.distributed was made in a process that has no group",
        "program",
    ),
    Cause(
        "parameters-unused",
        "DDP waits for gradients of parameters that took no part in the loss",
        "program",
    ),
    Cause(
        "spawn-inside-run", "every rank of the job starts ranks of its own", "program", "warning"
    ),
    Cause(
        "start-failed",
        "the program could not be started: missing, not executable, not valid Python",
        "usage",
    ),
    Cause("port-in-use", "another program holds the port", "machine"),
    Cause("ports-exhausted", "no port of the range that was asked for is free", "machine"),
    Cause("port-forbidden", "the port is one that only a privileged user may bind", "usage"),
    Cause(
        "port-invalid",
        "the number is no port, or lies outside the range that was asked for",
        "usage",
    ),
    Cause(
        "port-unavailable",
        "this machine refuses to listen on the port, for another reason than a holder",
        "machine",
    ),
    Cause(
        "address-unavailable", "the address to listen on is not one of this machine's", "machine"
    ),
    Cause("address-unresolved", "a host name has no address here", "machine"),
    Cause(
        "address-loopback",
        "this machine's own name stands for an address that no other machine reaches",
        "machine",
    ),
    Cause(
        "address-one-way",
        "DNS says one thing from name to address, and another or nothing from address to name",
        "machine",
    ),
    Cause(
        "ipv6-half-configured",
        "names have IPv6 addresses here that the machine cannot use",
        "machine",
    ),
    Cause(
        "loopback-down",
        "the interface by which processes of one machine reach each other cannot be used",
        "machine",
    ),
    Cause(
        "interface-missing",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names a network interface that is not there",
        "machine",
    ),
    Cause(
        "rendezvous-in-use",
        "the meeting place of --rdzv-endpoint file:// belongs to another job",
        "machine",
    ),
    Cause(
        "rendezvous-unwritable",
        "the meeting place of --rdzv-endpoint file:// cannot be made or written",
        "machine",
    ),
    Cause("device-missing", "an accelerator was asked for that is not there", "machine"),
    Cause("device-shared", "ranks of one group of NCCL's have the same GPU", "program"),
    Cause("device-busy", "another process has the GPU, or most of its memory", "machine"),
    Cause("cuda-init-failed", "there may be a GPU, and CUDA cannot be started on it", "machine"),
    Cause(
        "cuda-kernel-failed",
        "a CUDA kernel failed by what it was given: an index out of bounds, an address that is not its",
        "program",
    ),
    Cause("nccl-failed", "NCCL gave up, and no rank shows another cause", "machine"),
    Cause(
        "cuda-before-fork",
        "CUDA was used in a process that was forked after CUDA was up",
        "program",
    ),
    Cause(
        "cuda-in-template",
        "a module that is imported before the ranks start holds CUDA or runs a thread",
        "program",
        "warning",
    ),
    Cause(
        "limit-low", "a limit on open files, processes or memory is too low for ranks", "machine"
    ),
    Cause(
        "container-limit",
        "a container may use less of the processors than the machine seems to have",
        "machine",
    ),
    Cause("host-memory-low", "little memory is left for ranks", "machine"),
    Cause(
        "shm-small", "/dev/shm, through which batches pass, is small, full, or not there", "machine"
    ),
    Cause(
        "clock-wrong",
        "the clock of this machine is wrong, or two machines' clocks differ",
        "machine",
    ),
    Cause(
        "folder-unusable", "a folder for temporary files cannot be written, or is full", "machine"
    ),
    Cause("firewall-blocks", "a firewall rule keeps processes from each other", "machine"),
    Cause(
        "versions-differ",
        "libraries are not those that torch was built with, or two machines have different ones",
        "machine",
    ),
    Cause("check-overrun", "a check of rallypoint doctor got no answer in time", "machine"),
    Cause("peer-foreign", "what answers, or called, is no rallypoint doctor", "machine"),
    Cause(
        "peer-one-way",
        "two machines reach each other at some ports, or in one direction, only",
        "machine",
    ),
    Cause(
        "large-packets-lost",
        "small packets come through between two machines, and large ones do not",
        "machine",
    ),
    Cause("torch-missing", "there is no torch in this Python environment", "machine"),
    Cause("torch-too-old", "the torch in this Python environment is too old", "machine"),
    Cause(
        "launcher-died",
        "a process of rallypoint's own was ended from outside, or crashed",
        "launcher",
    ),
    Cause(
        "launcher-silent",
        "the launcher of a running job does not answer, or cannot be asked from here",
        "machine",
    ),
    Cause(
        "interrupted",
        "somebody stopped the job: Ctrl-C, or a signal to the launcher",
        "person",
        "stopped",
    ),
    Cause("run-folder-unwritable", "the run folder cannot be made or written", "machine"),
    Cause(
        "run-folder-used",
        "the run folder that was asked for holds files with our names that no run wrote",
        "usage",
    ),
    Cause(
        "run-folder-in-use",
        "the run folder that was asked for belongs to a job that is running",
        "usage",
    ),
    Cause("log-dir-unwritable", "the folder of --log-dir cannot be made or written", "machine"),
    Cause(
        "no-store",
        "connect() was given no address, and this process belongs to no job that has a store",
        "usage",
    ),
    Cause("address-malformed", "the text is not the address of a store", "usage"),
    Cause(
        "port-refused",
        "nothing listens at the address of a store, or where the ranks are to meet",
        "machine",
    ),
    Cause(
        "address-unreachable",
        "no answer at all comes from the address of a store, or from where the ranks are to meet",
        "machine",
    ),
    Cause(
        "store-foreign", "what answers at the address is another service, and no store", "machine"
    ),
    Cause("store-silent", "the address accepts connections, and nobody answers", "machine"),
    Cause("wrong-secret", "the client and the store do not have the same secret", "usage"),
    Cause("wrong-job", "the store belongs to another job", "usage"),
    Cause(
        "store-relayed",
        "what the client connected to is not the store but something that passes connections on to it",
        "usage",
    ),
    Cause("tls-mismatch", "one side of a connection speaks TLS, and the other does not", "usage"),
    Cause(
        "tls-intercepted",
        "something between the client and the store opens the encrypted connection",
        "machine",
    ),
    Cause(
        "version-skew",
        "the client and the store speak different versions of the protocol",
        "machine",
    ),
    Cause(
        "secret-missing",
        "an address was given, or a job or check on several machines started, without a secret",
        "usage",
    ),
    Cause(
        "secret-unreadable",
        "the secret that was named cannot be read, or others can read it, too",
        "usage",
    ),
    Cause("secret-too-short", "a secret of less than 16 bytes could be guessed", "usage"),
    Cause("socket-unavailable", "there is no folder in which a Unix socket can be made", "machine"),
    Cause(
        "store-pickled",
        "a store object, which carries a secret, was to be pickled into a file or a message",
        "usage",
    ),
    Cause("wait-timeout", "what a call of the store waited for did not come in time", "program"),
    Cause("store-timeout", "the store gave no answer in time", "machine"),
    Cause(
        "session-lost",
        "the store took a silent client for dead, and gave what it held to others",
        "program",
    ),
    Cause("store-closed", "the store was stopped, or this store object was closed", "program"),
    Cause("value-too-large", "a value is larger than the store takes", "program"),
    Cause("store-full", "what the store may hold is used up", "program"),
    Cause("key-too-long", "a key is longer than the store takes", "program"),
    Cause("too-many-keys", "the store has as many keys as it may have", "program"),
    Cause("too-many-waiting", "as many calls wait in the store as may", "program"),
    Cause("wrong-type", "a key holds something that the operation cannot be applied to", "program"),
    Cause("integer-overflow", "the sum does not fit into an integer of 64 bits", "program"),
    Cause(
        "value-unsupported", "a value contains something that the store does not take", "program"
    ),
    Cause("value-malformed", "what a key holds cannot be read as a value", "program"),
    Cause("fence-stale", "a write carried the token of a lock that is no longer held", "program"),
    Cause("compacted", "changes that a watch asked for are no longer all known", "program"),
    Cause("update-lost", "a write replaced somebody else's later change", "program"),
    Cause("once-failed", "the function that once() ran in another process raised", "program"),
    Cause("lock-timeout", "a lock of the store could not be acquired in time", "program"),
    Cause("lock-twice", "a thread asked for a lock that it holds", "program"),
    Cause("lock-cycle", "holders of locks wait for each other in a circle", "program"),
    Cause("lock-lost", "a lock was passed on while its holder believed to have it", "program"),
    Cause("lock-abandoned", "a process died while it held the lock of a shared tensor", "program"),
    Cause("barrier-timeout", "not everybody came to a barrier in time", "program"),
    Cause("barrier-broken", "somebody at a barrier gave up or died", "program"),
    Cause(
        "barrier-missed",
        "a process came too late for a round of a barrier or an average",
        "program",
    ),
    Cause("barrier-size", "callers of one barrier gave different sizes", "program"),
    Cause("average-mismatch", "what was to be averaged has different shapes or dtypes", "program"),
    Cause("average-unsupported", "what was to be averaged has no mean", "program"),
    Cause(
        "launch-timeout", "a function was not done in all ranks when its time was over", "program"
    ),
    Cause(
        "lock-in-wrong-scope",
        "a lock, event or queue for threads was to work between ranks",
        "usage",
    ),
    Cause(
        "mp-object-in-launch",
        "an object of multiprocessing was to go to a rank, which is no process of multiprocessing's",
        "usage",
    ),
    Cause(
        "launch-argument",
        "something that the function needs cannot cross into another process",
        "usage",
    ),
    Cause(
        "result-unsupported", "what the function returned cannot come back to the caller", "program"
    ),
    Cause("usage", "rallypoint was called wrongly", "usage"),
    Cause("option-unknown", "rallypoint has no such option", "usage"),
    Cause(
        "several-nodes",
        "a way for nodes to find each other, or a number of them, that rallypoint has not",
        "usage",
    ),
    Cause("internal-error", "a fault in rallypoint itself", "launcher"),
)

CATALOGUE = {cause.code: cause for cause in _LISTED}


_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _read(folder: str, name: str) -> str:
    with open(os.path.join(_FOLDER, folder, f"{name}.md"), encoding="utf-8") as file:
        return file.read()


def page(code: str) -> str:
    """Return the page that explains a code, as it stands in the package. Raises KeyError for a code
    that is not in the catalogue.
    """
    return _read("explain", CATALOGUE[code].code)


QUESTIONS = {
    "connection-refused": "why do I get ConnectionRefusedError in PyTorch multiprocessing?",
    "cuda-initialisation": "why a CUDA initialisation error with init_process_group and torch.multiprocessing?",
    "free-port": "why does DDP get stuck acquiring a free port?",
    "tcpstore": "how do I use TCPStore correctly?",
}
"""Pages that answer a question instead of explaining a code: their names, and what they answer.
They are those of docs/questions.
"""


def question(name: str) -> str:
    """Return the page that answers a question of `QUESTIONS`. Raises KeyError for another name."""
    if name not in QUESTIONS:
        raise KeyError(name)
    return _read("questions", name)


SLIP = 0.9
"""How alike two codes are, by difflib's measure, when one letter is left out, doubled or swapped:
then no other one was meant.
"""


def nearest(name: str) -> tuple[str, ...]:
    """Return up to three codes that were perhaps meant."""
    import difflib

    words = name.lower().replace("_", "-").replace(" ", "-")
    if slips := difflib.get_close_matches(words, CATALOGUE, n=1, cutoff=SLIP):
        return tuple(slips)
    near = difflib.get_close_matches(words, CATALOGUE, n=3)
    return tuple(near) or tuple(code for code in CATALOGUE if words and words in code)[:3]


def spawn_inside_run(line: str, world_size: int, program: str) -> Report:
    """Warn that the program starts ranks of its own under `-n 2` or more. `line`: "train.py:30"."""
    return Report(
        code="spawn-inside-run",
        headline=f"each of the {world_size} ranks starts ranks of its own at {line}",
        why="a program that calls mp.spawn is its own launcher; its ranks multiply with -n, and mostly ask for the same port",
        help=(
            Help("start it once, and let it spawn", f"rallypoint run -n 1 {program}"),
            Help(
                "or take mp.spawn out of it, and read RANK and WORLD_SIZE from the environment",
                'rank = int(os.environ["RANK"])',
            ),
        ),
        exit_status=0,
    )


def cuda_in_template(module: str, line: str, found: str) -> Report:
    """Warn that a preloaded module left what no fork survives, or what starts with each Python, when
    torch alone was imported. `line`: where, "pkg/ops.py:12", or ""; `found`: "CUDA is initialised",
    "2 threads".
    """
    alone = module == "torch.distributed"
    cause = "what starts with this Python" if alone else f"importing {module}"
    return Report(
        code="cuda-in-template",
        headline=f"{cause} leaves a process that must not be forked: {found}",
        where=line or "during the import, before any rank was started",
        why="a forked rank cannot use CUDA, nor locks that another thread held",
        then="the job goes on: every rank gets a fresh interpreter, which starts more slowly",
        help=(
            *(
                (
                    Help(
                        "see which thread it is: of sitecustomize, a .pth file, a tracer or debugger",
                        'python -c "import threading; print(threading.enumerate())"',
                    ),
                )
                if alone
                else (
                    Help(
                        f"do not touch CUDA, or start threads, while {module} is imported: do it in a function that the ranks call"
                    ),
                    Help("or leave the module out of --preload"),
                )
            ),
            Help("or ask for fresh interpreters, and this message goes", "--fresh"),
        ),
        exit_status=0,
    )
