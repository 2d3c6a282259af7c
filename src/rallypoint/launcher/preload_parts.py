"""Parts of torch that a program imports late, and which of them may be imported once, in the
template, without being asked for.

Only torch's own: what another package reads, starts or registers when it is imported (a rank's
number, a folder that is removed at exit, a handler of the root logger) is known to nobody here, so
that one is left to the ranks, or to `--preload`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence

from rallypoint.launcher import late_variables

NONE = "none"
"""Word in the place of a module's name in `--preload`: no part of torch is imported in the template unless
it is named.
"""

LEAST = 0.1
"""Seconds that the import of a part takes in a rank before it is worth learning. A fork takes
hundredths.
"""

DEADLINE = 60
"""Seconds after which the template gives up the import of a part. The slowest takes some seconds on
a busy machine.
"""

# What torch's own parts import beside torch and the standard library: its requirements, and what
# those generate.
_BROUGHT = frozenset(
    {
        "filelock", "fsspec", "functorch", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "optree", "packaging", "sympy", "torch",
        "triton", "typing_extensions",
    }
)  # fmt: skip
_GENERATED = ("_remote_module_", "_sysconfigdata_", "cython_runtime", "_cython_")

# These are there for other packages, or change the process for good: tensorboard, onnx, a compiler,
# torch's own tests.
_LEFT_TO_THE_RANKS = (
    "torch.contrib",
    "torch.onnx",
    "torch.testing",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
)


def may_be_early(name: str, brought: Iterable[str]) -> bool:
    """Tell whether a module of torch can be imported before the program begins. `brought`: the
    modules that came with it."""
    if any(name == left or name.startswith(f"{left}.") for left in _LEFT_TO_THE_RANKS):
        return False
    roots = {module.partition(".")[0] for module in brought} - _BROUGHT - sys.stdlib_module_names
    return all(root.startswith(_GENERATED) for root in roots)


def load(names: Sequence[str], unclean: Callable[[], str]) -> tuple[str, str]:
    """Import these parts in a template; return the one that made it unfit, or cannot be imported,
    and why; "" and "" when all is well. One that hangs or crashes ends the process by a signal,
    which the agent sees.

    `unclean`: returns why this process must not be forked, "" when it may.
    """
    if not names:
        return "", ""
    given = dict(os.environ)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(DEADLINE)
    try:
        for name in names:
            late_variables.parts_are_loaded = True
            try:
                __import__(name)
            except BaseException as error:  # of another release of torch, maybe, or removed from it
                return name, f"{type(error).__name__}: {error}"
            why = unclean()
            if why:
                return name, why
        return "", ""
    finally:
        signal.alarm(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        signal.signal(signal.SIGALRM, handler)
        # torch._dynamo puts TORCHINDUCTOR_CACHE_DIR there: a program that then sets it only where
        # it is missing would set nothing.
        for variable in os.environ.keys() - given.keys():
            del os.environ[variable]
        os.environ.update(given)
