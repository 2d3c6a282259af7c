"""Words of a scheduler, a container runtime, mpirun or ssh that did not start a job's processes."""

from __future__ import annotations

import re

from rallypoint.diagnosis.report import Help

_EVENTS = Help("read the pod's events", "kubectl describe pod POD")
_LOG_IN = Help("log in without a password, as a launcher does", "ssh -o BatchMode=yes NODE true")
_NOT_STARTED = "{by} did not start the job: {reason}"

REFUSALS: tuple[tuple[str, str, str, Help | None], ...] = (
    (
        ": error: ",
        r"^(?P<by>srun|sbatch|salloc): error: (?:Unable to (?:create step for job \d+|allocate resources"
        r"|confirm allocation for job \d+)|Batch job submission failed|Job submit/allocate failed): "
        r"(?P<reason>(?!Job/step already completing).+)$",
        _NOT_STARTED,
        Help("compare what it asks for with what there is", "sinfo -o '%P %D %c %m %G %l'"),
    ),
    (
        "launch failed: ",
        r"^(?P<by>srun): error: (?:.{1,80} )?launch failed: (?P<reason>.*cpu bind.*)$",
        _NOT_STARTED,
        Help(
            "it was called inside a job: leave that job's binding behind",
            "unset ${!SLURM_CPU_BIND@}",
        ),
    ),
    (
        "launch failed: ",
        r"^(?P<by>srun): error: (?:.{1,80} )?launch failed: (?P<reason>.+)$",
        _NOT_STARTED,
        Help("see which nodes Slurm finds at fault, and leave them out", "sinfo -R"),
    ),
    (
        " option",
        r"^(?P<by>srun|sbatch|salloc|mpirun|mpiexec): (?:Error: )?(?P<reason>(?:unrecognized|unknown|invalid) option\b.+)$",
        _NOT_STARTED,
        None,
    ),
    (
        "unable to launch the specified",
        r"^(?P<by>mpirun|mpiexec|prterun) was unable to launch the specified application as (?P<reason>it .+)$",
        _NOT_STARTED,
        None,
    ),
    ("qsub: ", r"^(?P<by>qsub): (?P<reason>(?!(?:waiting for )?job \d)\S.+)$", _NOT_STARTED, None),
    (
        "not enough slots",
        r"^There are not enough slots available in the system to satisfy the (?P<reason>\d+)",
        "mpirun did not start the job: {reason} processes are more than the slots of the nodes that it knows",
        Help("name the nodes and their slots, or allow more", "mpirun --map-by :OVERSUBSCRIBE ..."),
    ),
    (
        "unable to ",
        # Open MPI; MPICH
        r"\b(?P<reason>(?<=A process or daemon was )unable to complete a TCP connection\b"
        r"|(?<=\): )unable to (?:get host address for \S+|connect to server \S+ at port \d+))",
        "mpirun's process on a node was {reason}",
        Help(
            "see whether it reaches this one", "ssh NODE ping -c 1 $(hostname)  # where mpirun runs"
        ),
    ),
    (
        "I ",  # Open MPI; Intel MPI and MPICH, of their network
        r"^(?:At least one pair of MPI |(?:\[\d+\] )?MPI startup\(\): |\w{0,60}(?:init|open|create|exchange|provider)\w{0,60}\(\d+\)\.*: ?)"
        r"(?P<reason>processes are unable to reach each other|\w+ fabric is not available and fallback .+|OFI \w.+)",
        "MPI did not start the job: {reason}",
        Help("let it talk by TCP alone", "mpirun --mca btl self,tcp ...  # or FI_PROVIDER=tcp"),
    ),
    (
        "run as root",
        r"^(?P<by>\w+) has detected an attempt to run as (?P<reason>root)\.",
        "{by} did not start the job: it does not run as {reason}",
        Help("take another user, or allow it", "mpirun --allow-run-as-root ..."),
    ),
    # Of the state that Kubernetes tells: an event may be long over.
    (
        "eason",
        r"\b[Rr]eason\"?: +\"?(?P<reason>ErrImage(?:Never)?Pull|ImagePullBackOff"
        r"|CreateContainer(?:Config)?Error|RunContainerError)\b",
        "Kubernetes did not start the container: {reason}",
        _EVENTS,
    ),
    (
        "docker: Error response",
        r"^docker: Error response from daemon: (?P<reason>(?!.*(?:error running hook|exec: \")).+)$",
        "docker did not start the container: {reason}",
        None,
    ),
    (
        "FATAL:   ",
        r"^FATAL:   +(?P<reason>\S.+)$",
        "Apptainer did not start the container: {reason}",
        None,
    ),
    (
        "pyxis: ",
        r"\bpyxis: +(?P<reason>\[ERROR\] .+|couldn't start container|container start failed\b.*)$",
        "pyxis did not start the container: {reason}",
        None,
    ),
    (
        "ssh: connect to host ",
        r"\bssh: connect to host (?P<by>\S+) port \d+: (?P<reason>.+)$",
        "ssh did not reach {by}: {reason}",
        _LOG_IN,
    ),
    (
        "ermission denied (",
        r"^(?:(?!git@)\S{1,200}: ){0,2}Permission denied (?P<reason>\([a-z,-]{1,100}\))\.$",
        "ssh could not log in: the other machine took no key or password of this user {reason}",
        _LOG_IN,
    ),
    (
        "Host key verif",
        r"^Host key verification (?P<reason>failed)\.$",
        "ssh did not connect: the other machine's key is not the one in known_hosts, or is not there",
        _LOG_IN,
    ),
)
"""A text that the line holds, the pattern, the report's headline, and what helps."""


def read(text: str) -> tuple[str, list[Help]] | None:
    """Return the headline and the help for a line that tells of a refusal; None for others."""
    for word, words, headline, help in REFUSALS:
        if word in text and (found := re.search(words, text)) is not None:
            return headline.format_map({"by": "", **found.groupdict()}), [help] if help else []
    return None


def by_launcher(text: str) -> bool:
    """Tell whether the refusal is of what would have started the job's processes, and not of ssh,
    which a script may try beside the job.
    """
    told = read(text)
    return told is not None and not told[0].startswith("ssh ")


def by_mpirun(text: str) -> bool:
    """Tell whether mpirun refuses, which says so in a paragraph and then ends."""
    told = read(text)
    return told is not None and "mpirun" in "".join(one.command for one in told[1])
