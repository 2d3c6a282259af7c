"""The process that serves torch's TCPStore on a socket which listens already."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from rallypoint.launcher import c10d_host


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("2.7.0", False),
        ("2.7.1+cu126", False),
        ("2.8.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0a0+gitabc", True),
        ("3.0", True),
        ("own", True),
    ],
)
def test_the_backend_is_one_that_takes_the_socket(version: str, takes: bool) -> None:
    """With torch 2.7 every job ended: "The libuv TCPStore backend does not support initialization with an listen fd"."""
    assert c10d_host.takes_listener(version) is takes


@pytest.mark.torch
@pytest.mark.parametrize("libuv", [True, False])
def test_either_backend_serves_ranks_of_either_kind(libuv: bool) -> None:
    """Ranks do not know which backend serves them: they ask as their own torch, or USE_LIBUV, says."""
    torch_distributed = pytest.importorskip("torch.distributed")
    read, write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = (
            "from rallypoint.launcher import c10d_host\n"
            f"c10d_host.takes_listener = lambda version: {libuv}\n"
            f"c10d_host.serve('127.0.0.1', {port}, {listener.fileno()}, {write})"
        )
        host = subprocess.Popen([sys.executable, "-c", code], pass_fds=(listener.fileno(), write), stderr=subprocess.PIPE, text=True)
    os.close(write)
    try:
        assert os.read(read, 1) == b"1"
        ours, theirs = (
            torch_distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30), use_libuv=kind)
            for kind in (True, False)
        )
        ours.set("address", "tcp")
        assert (theirs.get("address"), ours.add("ranks", 1), theirs.add("ranks", 1)) == (b"tcp", 1, 2)
    finally:
        os.close(read)
        host.kill()
        _, said = host.communicate()
    assert said == ""
