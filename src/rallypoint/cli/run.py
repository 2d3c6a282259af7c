"""`rallypoint run`: a job on this node."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.cli import precheck, run_options
from rallypoint.cli.hints import retyped
from rallypoint.cli.output import rendered, write_err, write_out
from rallypoint.clusters.detect import detect
from rallypoint.errors import RallypointError, UsageError
from rallypoint.host import termination_log
from rallypoint.launcher import exits, torch_version

if TYPE_CHECKING:
    from rallypoint.cli.args import CommandLine
    from rallypoint.launcher.plan import Machine, Options

NODE_0_FIRST = 2.0
"""Seconds in which node 0 shows what is wrong with the command line of all nodes. Open MPI ends the
other tasks once one of them has failed.
"""

RESOLVE_TIMEOUT = 2.0
"""Seconds for a name given with --master-addr: one that is not answered for is not known to be this
machine's.
"""


def main(line: CommandLine) -> int:
    """Start a job; return its exit status."""
    try:
        try:
            wanted = run_options.read(line, lambda: detect(os.environ))
        except UsageError as error:
            if not _is_told_by_node_0(error, os.environ):
                raise
            return exits.USAGE
        return start(wanted, os.environ, line.typed)
    except RallypointError as error:
        from rallypoint.diagnosis import render

        termination_log.write(render.first_line(render.report_of(error)), os.environ)
        raise


def _is_told_by_node_0(error: UsageError, environ: Mapping[str, str]) -> bool:
    """Return whether node 0 shows this error on the screen of this node: here a line says it, unless
    the cluster ends this process before.
    """
    from rallypoint.diagnosis import render
    from rallypoint.launcher.agent.console import shares_screen

    cluster = detect(environ)
    if cluster is None or not (cluster.one_screen and cluster.node and shares_screen()):
        return False
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if signal.sigtimedwait({signal.SIGTERM}, NODE_0_FIRST) is None:
        line = render.in_one_line(render.report_of(error), cluster.node, os.uname().nodename)
        write_err(f"rallypoint: {line}\n")
    return True


def start(wanted: Options, environ: Mapping[str, str], typed: Sequence[str] = ()) -> int:
    """Plan the job, look at the program before N ranks trip over it, and start; or print the plan.

    `typed`: the options as they were typed, for a line to type again.
    """
    from rallypoint.launcher import plan
    from rallypoint.record import preload_history

    exchange = wanted.nodes.exchange if wanted.nodes is not None else ""  # "": flags say the place
    if exchange and wanted.cluster is not None and wanted.cluster.starts and not wanted.dry_run:
        module = importlib.import_module(f"rallypoint.clusters.{exchange}")
        return int(module.start(environ))
    try:
        here = this_machine(wanted, environ)
        made = plan.make(wanted, environ, here)
    except UsageError as error:
        if error.code != "torch-missing":
            raise
        again = retyped(("--fresh", *typed), wanted.program.target, *wanted.program.args)
        help = (*error.help, ("for a program that needs no torch, start new interpreters", again))
        raise UsageError(error.code, error.headline, why=error.why, help=help) from None
    if trouble := precheck.look_at(made.program, environ, typed, made.slots):
        from rallypoint.diagnosis import render

        write_err(rendered(trouble, wanted.error_format, sys.stderr))
        termination_log.write(render.first_line(trouble), environ)
        return trouble.exit_status
    if wanted.engine == "ray" and not wanted.dry_run:
        return _on_ray(wanted, typed)
    folder = made.rendezvous if made.nodes is None else made.nodes.folder
    if folder:
        from rallypoint.launcher import rendezvous_file

        rendezvous_file.wait_for_disk(folder)
        if made.nodes is not None and made.nodes.folder_once:
            rendezvous_file.make_above(folder)
        rendezvous_file.look(folder)
    program = made.program
    memory = preload_history.path_for(environ, program.kind, program.target, made.cwd, made.torch)
    made = plan.with_parts(
        made,
        precheck.source(made.program),
        preload_history.read(memory, here.now.timestamp()),
        memory,
    )
    if wanted.dry_run:
        from rallypoint.diagnosis.render import printable
        from rallypoint.launcher import dry_run

        write_out(printable(dry_run.describe(made)))
        return 0
    from rallypoint.launcher.agent import agent

    status = agent.run(made)
    if (step := sys.modules.get("rallypoint.clusters.slurm_step")) is not None:
        step.tell_status(status)  # loaded in a step that a batch script's launcher has started
    return status


ON_RAY = "import sys; from rallypoint.clusters import ray; ray.begin(); from rallypoint.__main__ import main; sys.exit(main())"
"""Program of a launcher in an actor of Ray's."""


def _on_ray(wanted: Options, typed: Sequence[str]) -> int:
    """Have launchers on the nodes of a Ray cluster carry the command out; return the exit status of
    node 0, or of one that has outlived it.
    """
    from rallypoint.clusters import ray

    program = (wanted.program.target, *wanted.program.args)
    nnodes = wanted.nodes.count if wanted.nodes is not None else 1
    words = ("-c", ON_RAY, "run", *typed, "--engine", "local", "-n")
    try:
        ends = ray.launch_on_nodes(
            lambda ranks: (*words, str(ranks), *program),
            nnodes=nnodes,
            nproc=wanted.nproc,
            show=_show,
        )
    except KeyboardInterrupt as interrupt:
        return exits.of_signal((*interrupt.args, signal.SIGINT)[0])
    status = next((status for status, _ in filter(None, ends) if status), 0 if all(ends) else 1)
    return status if status >= 0 else exits.of_signal(-status)


def _show(fd: int, data: bytes) -> None:
    stream = sys.stdout if fd == 1 else sys.stderr
    stream.buffer.write(data)
    stream.buffer.flush()


# --- facts
# --------------------------------------------------------------------------------------------------


def this_machine(wanted: Options, environ: Mapping[str, str]) -> Machine:
    """Return the facts that a plan depends on. Opens no GPU (but where no file shows them), asks no
    resolver, imports no torch.
    """
    import datetime
    import secrets

    from rallypoint.host import devices, ports
    from rallypoint.host.processes import working_folder
    from rallypoint.launcher.plan import Machine
    from rallypoint.record.run_folder import default_root

    seen = devices.look()
    counted = wanted.nproc in ("gpu", "auto")
    if seen.hidden and counted:
        seen = devices.look_closely()
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        all_cpus=os.cpu_count() or 0,
        gpus=seen,
        build=devices.torch_build() if seen.devices or counted else None,
        interfaces=_interfaces(),
        ephemeral=ports.ephemeral_range(),
        names=_own_names(wanted.master_addr),
        python=sys.executable,
        torch=torch_version.torch_version(),
        now=datetime.datetime.now(),
        suffix=secrets.token_hex(8),
        cwd=working_folder(),
        runs=default_root(environ),
    )


def _interfaces() -> tuple[str, ...]:
    import socket

    try:
        return tuple(name for _, name in socket.if_nameindex())
    except OSError:  # a sandbox that does not tell
        return ()


def _own_names(asked: str) -> tuple[str, ...]:
    """Return this machine's name, short and long, and the asked address or name if it is one of
    ours: the kernel binds no other. The resolver is asked only for a name that is not known.
    """
    import socket

    from rallypoint.host.loopback import LOOPBACK
    from rallypoint.host.socket_addresses import is_own, places_of

    name = socket.gethostname()
    names = [name, name.split(".")[0]]
    known = ("", *map(str.lower, names), *LOOPBACK)
    if asked.lower() not in known and is_own(places_of(asked, RESOLVE_TIMEOUT)):
        names.append(asked)
    return tuple(dict.fromkeys(names))
