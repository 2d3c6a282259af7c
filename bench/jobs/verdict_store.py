"""Four ranks share the job's store, and one of them fails while the others wait in it, as VERDICT
says (see verdict_program.py).
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from marks import mark

import rallypoint


def raises() -> None:
    raise ValueError("the learning rate is NaN")


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def writes_a_novel() -> None:
    store["x" * 5000] = 1


def adds_to_words() -> None:
    store["words"] = "four"
    store.add("words", 1)


def puts_a_function() -> None:
    store["schedule"] = {"lr": (1, raises)}


def nothing() -> None:
    """Whatever the others wait for, it does not come."""


asked: dict[str, Any] = json.loads(os.environ["VERDICT"])
rank = int(os.environ["RANK"])
store = rallypoint.connect()
mark("here")
store.barrier("all here", size=4, timeout=30.0)
if rank == asked["rank"]:
    time.sleep(asked["delay"])
    globals()[asked["does"]]()
elif asked["others"] == "wait":
    store.wait("ready", timeout=asked["timeout"])
elif asked["others"] == "barrier":
    store.barrier("epoch", size=4, timeout=asked["timeout"])
