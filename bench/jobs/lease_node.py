"""A stub of a node's agent, or of the lead, for the soak of leases (bench/lease_soak.py).

    lease_node.py lead               serves; prints its port, and a line for each node that it lost
    lease_node.py node PORT NAME TTL  joins; prints "there", and at the end how short its lease was

Both end when their standard input does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from rallypoint.host.probe import set_for_signs_of_life
from rallypoint.store.client.client import ABSENT
from rallypoint.store.client.member import Member
from rallypoint.store.server.server import Server

SECRET = b"the secret of the soak of leases"
JOB = "lease"

LOOK = 0.02  # seconds between two looks at the clock: a lease that is shorter by so much is seen


def lead() -> None:
    """Serve, and tell which nodes are lost."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    set_for_signs_of_life(listener)
    port = listener.getsockname()[1]
    with (
        Server(listeners=[listener], secret=SECRET, job=JOB, local=False),
        Member.join([("127.0.0.1", port)], SECRET, job=JOB, ttl=60.0) as member,
    ):
        changes = member.watch("node/")

        def tell() -> None:
            for key, value, _ in changes:
                if value is ABSENT:
                    print(json.dumps({"lost": key, "at": time.monotonic()}), flush=True)

        threading.Thread(target=tell, daemon=True).start()
        print(port, flush=True)
        sys.stdin.read()
        os._exit(0)


def node(port: int, name: str, ttl: float) -> None:
    """Hold a session as an agent does: an ephemeral key, and a thread that waits for a word."""
    member = Member.join([("127.0.0.1", port)], SECRET, job=JOB, ttl=ttl, timeout=60.0)
    member.set(f"node/{name}", os.getpid(), ephemeral=True)
    ended = threading.Event()
    said: list[str] = []

    def watch() -> None:
        try:
            for _ in member.watch("word/"):
                ended.set()
        except ConnectionError as error:
            said.append(str(error))

    threading.Thread(target=watch, daemon=True).start()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("there", flush=True)
    left = [member.left]
    while not ended.wait(LOOK):
        left.append(member.left)
    reconnects = member.statistics()["reconnects"]
    found = {"name": name, "least": min(left), "isolated": left.count(0.0) * LOOK}
    print(json.dumps({**found, "reconnects": reconnects, "said": said}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "lead":
        lead()
    else:
        node(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
