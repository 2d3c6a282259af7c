"""Holds ports, checks each, and gives it back: one of many processes that do so beside a squatter.

Arguments: how many, a seed, the first and the last port of the range, and a folder. Each port that
it has is a file there, made so that two cannot make it: whoever was handed the same port finds it.
For every port a line of JSON goes to stdout: {"port": ..., "wrong": "" or what}.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from pathlib import Path

from rallypoint.errors import EnvironmentProblem
from rallypoint.host.ports import hold_port

CONNECT_SECONDS = (
    30.0  # to a socket of this very process: only a machine that stands still needs more than one
)


def held_and_checked(chance: random.Random, low: int, high: int, folder: Path) -> dict[str, object]:
    """One port, held for a moment; half of the time from the range, half of the time any."""
    try:
        held = hold_port(port_range=(low, high) if chance.random() < 0.5 else None)
    except EnvironmentProblem as problem:
        return {"port": 0, "wrong": f"none was had: {problem}; {'; '.join(problem.why)}"}
    mark, wrong = folder / str(held.port), ""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return {"port": held.port, "wrong": "it was handed out twice"}
    nonce = os.urandom(8)
    with socket.create_connection((held.host, held.port), timeout=CONNECT_SECONDS) as client:
        client.sendall(nonce)
        time.sleep(chance.uniform(0.0, 0.02))  # while the squatter looks for what falls free
        with socket.socket(
            fileno=held.detach()
        ) as listener:  # as it is handed over to whoever serves on it
            listener.settimeout(CONNECT_SECONDS)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                wrong = "it was lost: a connection to it came to somebody else"
            else:
                with accepted:
                    accepted.settimeout(CONNECT_SECONDS)
                    if accepted.recv(8, socket.MSG_WAITALL) != nonce:
                        wrong = "it was lost: somebody else's connection came first"
            os.unlink(mark)  # before it is given back: from then on it is anybody's
    return {"port": held.port, "wrong": wrong}


def main() -> None:
    """See above."""
    count, seed, low, high, folder = sys.argv[1:6]
    chance = random.Random(seed)
    for _ in range(int(count)):
        print(json.dumps(held_and_checked(chance, int(low), int(high), Path(folder))), flush=True)


main()
