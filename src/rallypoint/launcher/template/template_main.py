"""The first moments of a template (`template.py`): torch is imported before anything of ours that
can wait.

Every first job waits for that import. The process that started this one loads its own modules
meanwhile, and then says what else there is to import.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from rallypoint.clock import Clock
from rallypoint.host import processes
from rallypoint.launcher.worker import teardown


def main(orders_fd: int, parent: int, imports: bool) -> Callable[[], None]:
    """Serve as a template: see `template.serve`.

    `orders_fd`: a socket; `parent`: the pid of the process that has started this one, and with
    which it ends; `imports`: False for a starter of fresh interpreters.
    """
    processes.die_with(parent)
    # Descriptors of the process that started this one are not for the ranks.
    processes.close_others({0, 1, 2, orders_fd})
    teardown.register()
    clock = Clock()
    failed: BaseException | None = None  # of torch's import
    if imports:
        # Next to nothing of what torch makes as it loads can be collected, and the collector would
        # look at all of it again and again, for an eighth of the time. It is frozen before the
        # first fork.
        gc.disable()
        try:
            import torch  # noqa: F401
        except BaseException as error:
            # SystemExit, too: a `torch.py` of the user's may do anything.
            failed = error
    from rallypoint.launcher.template import template

    return template.serve(orders_fd, clock.elapsed(), failed)
