"""`launch(fn, ...)`: runs a function in the ranks of a job, and returns the results by rank.

This is the caller's half: a warm agent is taken or started (`agent_pool.py`), function and
arguments are checked and packed (`marshalling/`), and the agent starts the ranks while this process
follows the call (`call.py`).

The agent comes first, and nothing is imported before it that it does not need: the first call waits
for its template to import torch, and everything that this process loads and looks at for the call
takes a fifth as long.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

from rallypoint.clock import Clock
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host.fd_passing import OwnedFds
from rallypoint.host.processes import working_folder
from rallypoint.launcher import nested_launch
from rallypoint.launcher.launch import agent_pool, notebook_cells
from rallypoint.launcher.sizes import LARGEST_LOCAL_SIZE, LONGEST_WAIT, threads_of_a_rank

if TYPE_CHECKING:
    from rallypoint.launcher.launch.agent_pool import PooledAgent
    from rallypoint.launcher.protocol import Call

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake", "auto")
"""Backends of torch, and `auto`. A pair such as "cpu:gloo,cuda:nccl" is not checked."""

SOURCES_BYTES = 32 * 1024
"""Maximum bytes of cells that are sent: those of a notebook, and a part of what fits the packet."""


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int = 1,
    backend: str | None = None,
    pass_rank: bool = False,
    preload: Sequence[str] = (),
    timeout: float | timedelta | None = None,
    grace: float | timedelta | None = None,
    backend_timeout: float | timedelta | None = None,
    max_restarts: int = 0,
    on_failure: Literal["stop", "continue"] = "stop",
    env: Mapping[str, str | None] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    port_range: tuple[int, int] | None = None,
    nnodes: int = 1,
    node_rank: int | None = None,
    rdzv_endpoint: str = "",
    secret_file: str | os.PathLike[str] = "",
    engine: Literal["local", "ray"] = "local",
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `nproc` processes of this machine, and return what it returned
    in each, by rank.

    Every rank is forked from a process that has imported torch (and `preload`, module names) and
    nothing of the caller's: it works in a notebook, with threads, an event loop or CUDA in the
    caller, and without `if __name__ == "__main__"`. The function, its arguments and what it closes
    over are copied into each rank (cloudpickle); tensors in shared memory arrive as the same
    memory. In the ranks the environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, ...). With
    `backend` ("gloo", "nccl", "auto") the process group is open when the function starts, with this
    rank's device, and closed after it. `pass_rank=True` puts the rank in front of `args`.

    What the ranks print appears on `sys.stdout` and `sys.stderr`, with the rank in front when there
    are several. Results may be of any size; tensors come through shared memory, to the CPU.

    `timeout`: seconds for the whole call, None: none. `grace`: seconds between SIGTERM and SIGKILL
    for ranks that are to stop; without it 30 after a failure or Ctrl-C, and 1 after `timeout`. With
    it `timeout` includes it: the ranks get SIGTERM so much before, and whoever lives then is killed
    at `timeout`. `backend_timeout`: of the process group's operations. `max_restarts`: how often
    all ranks are started again after a failure; `on_failure="continue"`: let the other ranks finish
    when one fails. `env`: variables for the ranks, None removes one. `run_dir`: a folder for logs
    and report, kept; without it that of a failed call is kept among the user's runs. `port_range`:
    the port at which the ranks meet is one of these, both ends included; what gloo and NCCL listen
    on in the ranks the kernel chooses.

    With `nnodes` the job has so many nodes of `nproc` ranks each, and the program runs on each of
    them and makes the same call. `rdzv_endpoint` ("node0:29400") is where they find each other,
    `node_rank` the place of this one (0 leads), `secret_file` the secret that they share; the
    variables PET_RDZV_ENDPOINT, PET_NODE_RANK and RALLYPOINT_SECRET_FILE say the same. On node 0
    the call returns the results of all ranks, on the other nodes those of their own ranks. A result
    from another node may have 64 MiB. With `engine="ray"` one call in a program on a Ray cluster
    starts a launcher on each of `nnodes` nodes, and returns the results of all ranks.

    Raises WorkerError when ranks fail, LaunchTimeout after `timeout`, KeyboardInterrupt after
    Ctrl-C (the ranks were stopped, and where they were is on stderr); before anything of the
    caller's starts UsageError for what cannot be called or cannot cross (`launch-argument`,
    `lock-in-wrong-scope`, `mp-object-in-launch`), and EnvironmentProblem when this machine cannot
    start it. After each of them no process of the call is left. May be called from any thread, and
    in a rank.
    """
    asked = Clock().monotonic()
    try:
        _refuse_recursion()
        _check(nproc, backend, max_restarts, on_failure, preload)
        _check_nodes(nnodes, engine)
        whole, part = _times(timeout, grace)
        group_timeout = _seconds("backend_timeout", backend_timeout)
        ports = _ports(port_range)
        folder = working_folder()
        environment = environment_of_ranks(env, nproc)
        nodes, listener = b"", OwnedFds()
        if nnodes > 1 and engine == "local":
            from rallypoint.launcher.launch import several_nodes

            nodes, listener = several_nodes.settle(
                nnodes, node_rank, rdzv_endpoint, os.fspath(secret_file), whole, ports
            )
        # On Ray the agents are elsewhere.
        agent = agent_pool.acquire(tuple(preload), environment) if engine == "local" else None
        try:
            # Loaded while the template imports torch.
            from rallypoint.launcher import exception_capture
            from rallypoint.launcher.launch.call import LaunchCall, results_of
            from rallypoint.launcher.launch.marshalling import inspection, payload
            from rallypoint.launcher.program import Task
            from rallypoint.launcher.protocol import Call

            called = inspection.bind(fn, args, kwargs, pass_rank=pass_rank)
            packed = payload.pack_call(fn, called.args, called.kwargs)
        except BaseException:
            if agent is not None:
                agent_pool.release(agent)  # nothing was asked of it: the next call is faster
            raise
    except (UsageError, EnvironmentProblem) as problem:
        # Where it was noticed says nothing: the traceback ends here.
        raise problem.with_traceback(None) from problem.__cause__
    with packed, listener:
        request = Call(
            task=Task(
                name=called.name,
                line=notebook_cells.named(
                    exception_capture.line_of(exception_capture.user_frame(sys._getframe(1)))
                ),
                argv=tuple(map(str, sys.argv)),  # a program may have put anything there
                payload_fds=len(packed.fds),
                folder=folder,
                paths=tuple(path for path in sys.path if isinstance(path, str)),
                pass_rank=pass_rank,
                backend=backend or "",
                backend_timeout=group_timeout,
                sources=_sources(fn),
            ),
            preload=tuple(preload),
            nproc=nproc,
            environment={},
            max_restarts=max_restarts,
            on_failure=on_failure,
            asked=asked,
            timeout=whole,
            grace=part,
            run_dir=os.fspath(os.path.abspath(run_dir)) if run_dir is not None else "",
            port_range=ports,
            nodes=nodes,
        )
        if agent is None:
            from rallypoint.launcher.launch import on_ray

            end = on_ray.carry_out(request, packed, nnodes, dict(env or {}))
        else:
            request = request_to(agent, request, environment)
            end = LaunchCall(agent).run(request, [*packed.fds, *listener.fds])
            if nodes and end.verdict.usable and not end.verdict.size:
                several_nodes.uncount()
    results = results_of(end)
    if isinstance(results, BaseException):
        try:
            raise results
        finally:
            del results  # it, and this frame in its traceback, would keep each other
    return results


def request_to(agent: PooledAgent, request: Call, environment: Mapping[str, str]) -> Call:
    """Return the request with what differs between this environment and that of the agent."""
    import msgspec  # here: the agent is started before it is loaded

    had = agent.environment
    return msgspec.structs.replace(
        request,
        task=msgspec.structs.replace(
            request.task, without=tuple(name for name in had if name not in environment)
        ),
        environment={name: value for name, value in environment.items() if had.get(name) != value},
    )


def _sources(fn: Any) -> tuple[tuple[str, str], ...]:
    """Return the texts of a notebook's cells, which a rank's traceback quotes and cannot read.

    They are those of the cell of `fn`, and of the functions beside it.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not isinstance(fn, FunctionType):
        return ()
    found: dict[str, str] = {}
    room = SOURCES_BYTES
    for one in (fn, *list(fn.__globals__.values())):
        name = one.__code__.co_filename if isinstance(one, FunctionType) else ""
        if not name or name in found or name not in linecache.cache or os.path.exists(name):
            continue
        text = "".join(linecache.getlines(name))
        room -= len(text.encode("utf-8", "replace"))
        if text and room >= 0:
            found[name] = text
    return tuple(found.items())


def _refuse_recursion() -> None:
    """Raise UsageError in a module that this very call would import: it would start itself
    again."""
    if nested_launch.importing:
        raise UsageError(
            "usage",
            f"launch was called by an import of {nested_launch.importing}: it would start itself again and again",
            help=(
                (
                    "let the program itself do it, and no import",
                    'if __name__ == "__main__":\n    rallypoint.launch(...)',
                ),
            ),
        )


def _check(
    nproc: object, backend: object, max_restarts: object, on_failure: object, preload: Any
) -> None:
    """Check options that are passed on as they are. Raises UsageError or TypeError."""
    for name, number, least in (("nproc", nproc, 1), ("max_restarts", max_restarts, 0)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                f"{name}={number!r}: a number of {'ranks' if least else 'restarts'} is an int"
            )
        if number < least:
            help = (("start one or more", "rallypoint.launch(train, nproc=2)"),) if least else ()
            raise UsageError("usage", f"{name}={number}: at least {least}", help=help)
    if isinstance(nproc, int) and nproc > LARGEST_LOCAL_SIZE:
        raise UsageError(
            "usage",
            f"nproc={nproc} is more than one machine can hold: at most {LARGEST_LOCAL_SIZE}",
        )
    if backend is not None and (
        not isinstance(backend, str) or (":" not in backend and backend not in BACKENDS)
    ):
        raise UsageError(
            "usage",
            f"backend={backend!r} is no backend of torch.distributed",
            help=(
                (
                    "take one of these, or leave it out",
                    f"backend={' | '.join(map(repr, BACKENDS[:2]))} | 'auto'",
                ),
            ),
        )
    if on_failure not in ("stop", "continue"):
        raise UsageError("usage", f"on_failure={on_failure!r}: it is 'stop' or 'continue'")
    if isinstance(preload, str) or not all(isinstance(module, str) for module in preload):
        raise TypeError(f"preload={preload!r}: a list of module names")


def _check_nodes(nnodes: object, engine: object) -> None:
    if isinstance(nnodes, bool) or not isinstance(nnodes, int):
        raise TypeError(f"nnodes={nnodes!r}: a number of nodes is an int")
    if nnodes < 1:
        raise UsageError("usage", f"nnodes={nnodes}: at least 1")
    if engine not in ("local", "ray"):
        raise UsageError(
            "usage",
            f"engine={engine!r} is none that there is: it is 'local' or 'ray'",
            help=(("leave it out, for launchers that were started on each node", ""),),
        )


def _times(timeout: Any, grace: Any) -> tuple[float | None, float | None]:
    """Return the seconds of the call, and those of its end."""
    whole, part = _seconds("timeout", timeout), _seconds("grace", grace)
    if whole is not None and part is not None and part >= whole:
        raise UsageError(
            "usage",
            f"grace={part:g} is not less than timeout={whole:g}: it is the part of that time in which the ranks have been asked to stop",
            help=(
                (
                    "give the function time, too",
                    f"rallypoint.launch(..., timeout={whole + part:g}, grace={part:g})",
                ),
            ),
        )
    return whole, part and min(part, LONGEST_WAIT)


def _ports(given: Any) -> tuple[int, int] | None:
    """Check a range of ports, both ends included."""
    if given is None:
        return None
    if not isinstance(given, Sequence) or [type(end) for end in given] != [int, int]:
        raise TypeError(f"port_range={given!r}: the first and the last port, (20000, 20100)")
    low, high = given
    if not 1 <= low <= high <= 65535:
        raise UsageError(
            "port-invalid",
            f"port_range={given!r} is no range of ports: two numbers from 1 to 65535, the smaller first",
        )
    return low, high


def _seconds(name: str, given: Any) -> float | None:
    if given is None:
        return None
    from rallypoint.store.client.arguments import positive

    return positive(name, given)


def environment_of_ranks(env: Mapping[str, str | None] | None, nproc: int) -> dict[str, str]:
    """Return the variables that all ranks have."""
    environment = dict(os.environ)
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        elif not isinstance(value, str):
            raise TypeError(f"env[{name!r}]={value!r}: a variable is text; None removes it")
        elif not name or "=" in name or "\0" in name + value:
            what = "a name must not be empty or contain '=', and neither name nor value may contain NUL"
            raise UsageError("usage", f"env[{name!r}]={value!r} is no variable: {what}")
        else:
            environment[name] = value
    if nproc > 1:
        environment.setdefault(
            "OMP_NUM_THREADS", str(threads_of_a_rank(len(os.sched_getaffinity(0)), nproc))
        )
    return environment
