"""Takes every loopback port that falls free: it watches who listens, and binds and listens itself
as soon as one does not any more.

Writes the number of ports it has taken to the file in its argument, on every change. Runs until
killed.
"""

from __future__ import annotations

import os
import socket
import sys
import time

# ports held at a time; the oldest are given back, or a long run would take every port there is
KEPT = 400

_LISTEN = "0A"


def listening() -> set[int]:
    with open("/proc/net/tcp") as file:
        next(file)
        return {
            int(fields[1].rpartition(":")[2], 16)
            for line in file
            if (fields := line.split())[3] == _LISTEN
        }


def take(port: int) -> socket.socket | None:
    sock = socket.socket()
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # connections in TIME_WAIT do not keep it out
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen()
    except OSError:
        sock.close()
        return None
    return sock


held: dict[int, socket.socket] = {}
known, taken = listening(), 0
print("watching", flush=True)
while True:
    time.sleep(0.004)
    now = listening()
    for port in known - now - held.keys():
        sock = take(port)
        if sock is not None:
            held[port] = sock
            taken += 1
            with open(sys.argv[1] + ".new", "w") as file:
                file.write(str(taken))
            os.replace(sys.argv[1] + ".new", sys.argv[1])
    known = now
    while len(held) > KEPT:
        held.pop(next(iter(held))).close()
