"""Plan of a run as its folder has it, and the command that starts the same job again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

import msgspec

DEFAULT_GRACE = 30.0
"""Seconds of `rallypoint run --grace` when it is not given."""


class _Program(msgspec.Struct, frozen=True):
    kind: str = "script"
    target: str = ""
    args: tuple[str, ...] = ()


class _Logs(msgspec.Struct, frozen=True):
    redirects: tuple[int, ...] = ()
    tee: tuple[int, ...] = ()
    prefix: str | None = None


class _Task(msgspec.Struct, frozen=True):
    name: str = ""
    line: str = ""


class _Nodes(msgspec.Struct, frozen=True):
    count: int = 1
    rank: int | None = None
    is_host: bool | None = None
    host: str = ""
    ports: tuple[int, ...] = ()
    folder: str = ""
    local_addr: str = ""
    job: str = ""
    secret_file: str = ""
    join_timeout: float = 600.0
    timeout: float = 2.0
    tls: bool = False
    by_cluster: bool = False

    def options(self) -> Iterator[tuple[str, str]]:
        """Yield the options by which a node joins the others again."""
        if not self.by_cluster:  # else it gives the next job another place
            yield from self._place()
        yield "--local-addr", self.local_addr
        yield "--secret-file", self.secret_file
        usual = _Nodes()
        settings = []
        if self.is_host is not None:
            settings.append(f"is_host={str(self.is_host).lower()}")
        if self.join_timeout != usual.join_timeout:
            settings.append(f"join_timeout={self.join_timeout:g}")
        yield "--rdzv-conf", ",".join(settings)
        if self.timeout != usual.timeout:
            yield "--node-timeout", f"{self.timeout:g}"

    def _place(self) -> Iterator[tuple[str, str]]:
        yield "--nnodes", str(self.count)
        if self.folder:
            # the id is the end of the folder's name, too
            folder = self.folder[: -1 - len(self.job)] if self.job else self.folder
            yield "--rdzv-endpoint", f"file://{folder}"
        elif len(self.ports) > 1:  # those behind --master-port
            yield "--master-addr", self.host
        else:
            yield "--rdzv-backend", "c10d"
            host = f"[{self.host}]" if ":" in self.host else self.host
            yield "--rdzv-endpoint", ":".join((host, *map(str, self.ports)))
        if self.rank is not None:
            yield "--node-rank", str(self.rank)
        yield "--rdzv-id", self.job


class KeptPlan(msgspec.Struct, frozen=True):
    """Part of a `plan.json` that is shown: `job` alone before the job was planned."""

    job: str = ""
    program: _Program = _Program()
    slots: int = 1
    start: str = "template"
    preload: tuple[str, ...] = ()
    max_restarts: int = 0
    on_failure: str = "stop"
    grace: float = DEFAULT_GRACE
    debug_rank: int = 0
    plain: bool = False
    quiet: bool = False
    error_format: str = "text"
    master_port: int = 0
    port_range: tuple[int, int] | None = None
    stall: float | None = None
    torch: str | None = ""
    logs: _Logs = _Logs()
    rendezvous: str = ""
    nodes: _Nodes | None = None
    task: _Task | None = None
    cwd: str = ""
    run_dir: str = ""
    run_dir_asked: bool = False


def command(plan: KeptPlan) -> str:
    """Return the line that starts the job again, or the call that launched it; "" before a plan."""
    if plan.task is not None:
        nodes = "" if plan.nodes is None else f", nnodes={plan.nodes.count}"
        return f"rallypoint.launch({plan.task.name}, nproc={plan.slots}{nodes}) at {plan.task.line}"
    if not plan.program.target:
        return ""
    words = ["rallypoint", "run", "-n", str(plan.slots)]
    flags = {"--fresh": plan.start == "fresh", "--plain": plan.plain, "--quiet": plan.quiet}
    flags["--tls"] = plan.nodes is not None and plan.nodes.tls
    words += [name for name, given in flags.items() if given]
    alone = {"--rdzv-endpoint": f"file://{plan.rendezvous}" if plan.rendezvous else ""}
    asked = {
        "--preload": ",".join(plan.preload),
        "--max-restarts": plan.max_restarts or "",
        "--on-failure": plan.on_failure.removeprefix("stop"),
        "--grace": "" if plan.grace == DEFAULT_GRACE else f"{plan.grace:g}",
        "--debug-rank": plan.debug_rank or "",
        "--master-port": plan.master_port or "",
        "--port-range": "{}-{}".format(*plan.port_range) if plan.port_range else "",
        "--stall": "" if plan.stall is None else f"{plan.stall:g}",
        "-r": _streams(plan.logs.redirects),
        "-t": _streams(plan.logs.tee),
        **(dict(plan.nodes.options()) if plan.nodes is not None else alone),
        "--error-format": plan.error_format.removeprefix("text"),
        "--run-dir": _from(plan.run_dir, plan.cwd) if plan.run_dir_asked else "",
    }
    for name, value in asked.items():
        words += [name, str(value)] if value != "" else []
    if plan.logs.prefix is not None:
        words += ["--log-line-prefix-template", plan.logs.prefix]
    words += {"module": ["-m"], "command": ["--no-python"]}.get(plan.program.kind, [])
    return shlex.join([*words, plan.program.target, *plan.program.args])


def _streams(by_rank: tuple[int, ...]) -> str:
    """Return a stream map of torchrun's as one types it; "" for none."""
    if len(set(by_rank)) <= 1:
        return str(by_rank[0]) if any(by_rank) else ""
    return ",".join(f"{rank}:{streams}" for rank, streams in enumerate(by_rank) if streams)


def _from(path: str, folder: str) -> str:
    """Return a path as one types it in a folder."""
    return (
        os.path.relpath(path, folder)
        if folder and path.startswith(os.path.join(folder, ""))
        else path
    )
