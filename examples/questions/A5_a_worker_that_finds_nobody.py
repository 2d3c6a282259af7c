"""A worker connects to the wrong place: nobody listens there, the name is wrong, another service
has the port, packets are dropped.

    python examples/questions/A5_a_worker_that_finds_nobody.py

torch says the same of nearly all of it: "The client socket has timed out after 1000ms while trying
to connect to (host, port)", and waits for a web server for ever. Each has its own code here, with
what was seen at the address.
"""

import contextlib
import http.server
import io
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

import rallypoint


def meet(place: str) -> None:
    """In a rank: the others are looked for at a place where they are not."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place}",
        rank=int(os.environ["RANK"]) + 1,
        world_size=3,
        timeout=timedelta(seconds=3),
    )


def failure(place: str) -> rallypoint.WorkerError:
    try:
        with contextlib.redirect_stderr(
            io.StringIO()
        ):  # torch's own words on it, forty lines for each attempt
            rallypoint.launch(meet, (place,), nproc=2)
    except rallypoint.WorkerError as error:
        return error
    raise AssertionError(f"nobody was missed at {place}")


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, so that nobody else can; and not listening
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Nothing is said."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def dropped() -> Iterator[str]:
    """A listener whose queue is full drops what comes next, as a firewall does."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def main() -> None:
    found = {}
    with nobody() as place:
        found["nobody"] = failure(place)
    found["no such name"] = failure("no-such-host.invalid:29500")
    with web_server() as place:
        found["a web server"] = failure(place)
        assert f"pid {os.getpid()}" in str(found["a web server"]), found["a web server"]
    with dropped() as place:
        found["no answer"] = failure(place)
    codes = {what: error.report.code for what, error in found.items()}
    assert codes == {
        "nobody": "port-refused",
        "no such name": "address-unresolved",
        "a web server": "store-foreign",
        "no answer": "address-unreachable",
    }, found
    print("; ".join(f"{what}: {code}" for what, code in codes.items()))


if __name__ == "__main__":
    main()
