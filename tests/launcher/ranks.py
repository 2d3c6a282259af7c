"""Ranks without a launcher: processes that unpack a call, run it, and send back what came of it.

Run as a program this is a template: it imports torch once, and forks a child for every parcel that
it gets.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rallypoint.launcher.launch.marshalling import payload

DEADLINE = 60.0  # seconds for one call; most take ten milliseconds
FDS_MOST = 250
KINDS = ("value", "error", "unsendable")


class Ranks:
    """A template, and the calls that its children carry out."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self._line.settimeout(DEADLINE)

    def close(self) -> None:
        self._line.close()
        assert self._process.wait(DEADLINE) == 0

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What it returns in a rank; raises what it raises there."""
        return self.calls(1, fn, args, kwargs)[0]

    def calls(
        self,
        size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """The same parcel to several ranks, which run one after the other."""
        with payload.pack_call(fn, args, kwargs or {}) as packed:
            return [self.carry_out(packed) for _ in range(size)]

    def carry_out(self, packed: payload.Packed) -> Any:
        kind, text, fds = self.outcome(packed)
        if kind == "value":
            return payload.unpack_result(fds)
        if kind == "error":
            raise payload.unpack_error(fds)
        raise AssertionError(text)

    def outcome(self, packed: payload.Packed) -> tuple[str, str, list[int]]:
        """As it comes back: "value", "error" or "unsendable", a text with the last, and a parcel's
        descriptors.
        """
        setting = repr((os.getcwd(), sys.path)).encode()
        socket.send_fds(self._line, [setting], packed.fds)
        data, fds, _, _ = socket.recv_fds(self._line, 65536, FDS_MOST)
        assert data, "the rank ended without a word"
        kind, _, text = data.decode().partition(" ")
        return kind, text, fds


def _template(line: socket.socket) -> None:
    import torch  # noqa: F401

    gc.freeze()  # a child's rounds of the collector need not look at torch
    while True:
        setting, fds, _, _ = socket.recv_fds(line, 1 << 20, FDS_MOST)
        if not setting:
            return
        child = os.fork()
        if not child:
            try:
                _rank(line, setting, fds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(child, 0)
        if status:
            line.send(f"unsendable the rank ended with status {status}".encode())


def _rank(line: socket.socket, setting: bytes, fds: list[int]) -> None:
    folder, sys.path[:] = eval(setting)
    os.chdir(folder)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        fn, args, kwargs = payload.unpack_call(fds)
        kind, text, packed = "value", "", payload.pack_result(fn(*args, **kwargs), "fn")
    except BaseException as error:
        kind, text, packed = "error", "", payload.pack_error(error)
    with packed:
        socket.send_fds(line, [f"{kind} {text}".encode()], packed.fds)


if __name__ == "__main__":
    _template(socket.socket(fileno=int(sys.argv[1])))
