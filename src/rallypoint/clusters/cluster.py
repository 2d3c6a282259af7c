"""Facts that a cluster tells of the job that it has started here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from rallypoint.errors import Advice

Environ = Mapping[str, str]


class Files(Protocol):
    """Parts of this machine that tell what the environment does not. Tests replace it."""

    def text(self, path: str) -> str:
        """Return what is in a file, "" when there is none that can be read."""

    def is_open(self, fd: int) -> bool:
        """Return whether this process has such a descriptor."""

    def host(self) -> str:
        """Return the name of this machine, as the kernel has it."""


class Unclear(msgspec.Struct, frozen=True):
    """Gap in what a cluster tells, or a contradiction: the job starts only when flags fill it."""

    flags: tuple[str, ...]  # keys of options ("nnodes"); with all of them given nothing is unclear
    headline: str  # subject first: the variable that is missing, or that contradicts another
    why: tuple[str, ...] = ()
    help: Advice = ()  # (sentence, command or "")


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a job that a cluster has started, as the launcher of one of its nodes finds them.

    A launcher counts as a node, also where the cluster starts one task for each rank and several
    of them on a host.
    """

    name: str  # of the cluster, as its users call it: "Slurm"
    nodes: int | None = None  # launchers of this job; None: not told
    node: int | None = None  # place of this one, from 0; None: not told
    slots: int | None = None  # ranks of this launcher; None: not told
    # Local rank of this launcher's task among the tasks on this host, and their number, where the
    # cluster starts one task for each rank.
    local: tuple[int, int] | None = None
    host: str = ""  # where node 0 listens, a name or an address; "": `exchange` tells it
    ports: tuple[int, ...] = ()  # candidates, in this order; (): those behind torchrun's 29500
    # Module of this package: its `share` hands the place and a secret from node 0 to all.
    exchange: str = ""
    starts: bool = False  # no node: the `start` of `exchange` runs this command on all nodes
    folder: str = ""  # on a shared home, where node 0 writes its place instead
    secret: str = ""  # file with the secret; "": none that this cluster names
    own_homes: bool = False  # each node has a home folder of its own: no key file is shared there
    job: str = ""  # the cluster's id of the job, and of its step and restart
    one_screen: bool = False  # what the launchers of all nodes write comes to one screen
    ends: float | None = None  # time at which the cluster ends the job
    # Seconds between SIGTERM and SIGKILL by the cluster, when it ends the job.
    kill_after: float | None = None
    left_over: bool = False  # its variables are a shell's: it has not started this process
    because: tuple[str, ...] = ()  # facts with their sources, for --dry-run
    notes: tuple[str, ...] = ()  # lines that are said at the start
    unclear: tuple[Unclear, ...] = ()
    # How the nodes of this cluster get a secret: the help of `secret-missing`.
    secret_help: Advice = ()
