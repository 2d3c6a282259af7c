"""The job's store of several nodes: ranks on the other nodes get in with what they are given."""

from __future__ import annotations

import os
import socket

import rallypoint
from rallypoint.launcher.agent.job_store import JobStore, StoreElsewhere
from rallypoint.store.discovery import derived


def test_a_rank_on_another_node_gets_in() -> None:
    """The server took only the first bytes of a derived secret, and let nobody in."""
    secret = derived(b"the secret of a job of two nodes", "store 0")
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    here, there = JobStore("job", secret, listener), StoreElsewhere(address, secret)
    try:
        here.serve([], lambda: 0.0)
        given = os.pread(there.secret, 4096, 0)
        with rallypoint.connect(there.address, secret=given, same_host=False) as store:
            assert store.add("n") == 1
    finally:
        here.stop("the test is over")
        there.stop("the test is over")
