"""Server of torch's TCPStore on a held socket.

A process of its own: it outlives ranks, and it answers while rank 0 computes (served from rank 0,
the mesh of 64 ranks takes seven times as long). The socket was bound and was listening before any
rank started, so no rank can come too early or find another server on the port.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from rallypoint.host import dns_timeouts, processes


def forked(host: str, port: int, listener: int, ready: int, parent: int) -> None:
    """Serve in a fork of the template until killed. Writes one byte to `ready` once it serves."""
    os.setsid()
    processes.die_with(parent)
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(silence, number)
    os.close(silence)
    serve(host, port, listener, ready)


def serve(host: str, port: int, listener: int, ready: int) -> None:
    """Hand the listening descriptor to a TCPStore and sleep. The store's own thread does
    the rest.
    """
    # torch's store asks for the name of each client.
    os.environ.setdefault("RES_OPTIONS", dns_timeouts.OPTIONS)
    from datetime import timedelta

    import torch.distributed as dist

    _store = dist.TCPStore(  # type: ignore[attr-defined]  # it serves as long as somebody refers to it
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
        timeout=timedelta(seconds=60),
        use_libuv=True,
    )
    os.write(ready, b"1")
    os.close(ready)
    while True:
        signal.pause()


def main() -> None:
    """Serve in an interpreter of its own (beside fresh workers). Arguments: host, port, two
    descriptors and the parent's pid."""
    host, port, listener, ready, parent = sys.argv[1:6]
    processes.die_with(int(parent))
    gc.disable()  # of no use here, and a sixth of what the import of torch takes
    serve(host, int(port), int(listener), int(ready))
