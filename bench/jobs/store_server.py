"""A store's server, alone in its process. Argument: rallypoint (torch is not imported), the same with
TLS, or TCPStore.

One line of JSON on stdout says where it is; it serves until its standard input ends.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from functools import partial

MAX_BYTES = "4GiB"  # a value of 1 GB, the one that it replaces, and room; the same on every machine


def open_files() -> None:
    """As many as can be had: root may go beyond the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limit in (65536, hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, hard)))
            return
        except (ValueError, OSError):
            continue


def say(**where: str | int) -> None:
    print(json.dumps(where), flush=True)


def rallypoint_server(*, tls: bool = False) -> None:
    import rallypoint
    from rallypoint.store.certificate import new_identity

    identity = new_identity() if tls else None
    server = rallypoint.Server(max_bytes=MAX_BYTES, identity=identity)

    def stop_with_stdin() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=stop_with_stdin, daemon=True).start()
    say(address=server.address, secret=server.secret.hex())
    server.serve_forever()


def tcp_store() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert store.libuvBackend
    say(port=store.port)
    sys.stdin.read()


if __name__ == "__main__":
    open_files()
    servers = {
        "rallypoint": rallypoint_server,
        "rallypoint, TLS": partial(rallypoint_server, tls=True),
        "TCPStore": tcp_store,
    }
    servers[sys.argv[1]]()
