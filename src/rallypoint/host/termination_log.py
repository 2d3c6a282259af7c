"""Termination message of a container: what Kubernetes shows of it after its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

PATH = "/dev/termination-log"
"""File that the kubelet reads then: the default of terminationMessagePath, of which a container is
not told.
"""
MOST_BYTES = 4096
"""Bytes that the kubelet keeps of one container's message."""


def write(message: str, environ: Mapping[str, str]) -> None:
    """Leave a message in place of an earlier one. Nothing outside of Kubernetes, in a rank of a job,
    and where the kubelet has made no file or made it for another user.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or "RALLYPOINT_JOB" in environ:
        return
    with contextlib.suppress(OSError):  # not there, or not ours: the report is on stderr anyhow
        fd = os.open(PATH, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        with open(fd, "wb") as file:
            cut = message.encode("utf-8", "replace")[:MOST_BYTES]
            file.write(cut.decode("utf-8", "ignore").encode())
