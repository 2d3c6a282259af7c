"""What an attempt holds, and that it gives it back at whatever moment it ends."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import cast

import pytest

from rallypoint.host import ports
from rallypoint.launcher.agent.attempt import Attempt, exhausted
from rallypoint.launcher.agent.rank_streams import RankStreams
from rallypoint.launcher.plan import alone

from .test_plan import plan


@pytest.mark.parametrize("heard", [False, True])
def test_the_pipe_of_a_host_is_closed_also_when_the_job_ends_before_the_host_serves(
    heard: bool,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    attempt = Attempt(plan(nproc=1), alone(plan(nproc=1)), began=0.0, ignored=())
    attempt.begin()
    order = next(attempt.orders(cast(RankStreams, None)))  # the host's: it needs no streams
    for fd in order.ours:
        os.close(fd)
    if heard:
        assert not attempt.has_host_answered(), "whoever was to serve has ended"
    attempt.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_port_is_this_process_s_until_its_host_is_forked() -> None:
    """Between the order and the fork the socket lay in the template's channel, and no process had
    it: another job was told of "a process in another container", and not how to end the job.
    """
    attempt = Attempt(plan(nproc=1), alone(plan(nproc=1)), began=0.0, ignored=())
    attempt.begin()
    port = attempt.seat.master_port
    order = next(attempt.orders(cast(RankStreams, None)))
    for fd in order.ours:
        os.close(fd)
    assert [holder.pid for holder in ports.holders(port)] == [os.getpid()]
    host = subprocess.Popen(["sleep", "60"])
    try:
        attempt.host_started(host.pid)
        assert ports.holders(port) == []
    finally:
        attempt.close()
        host.wait()


@pytest.mark.parametrize(
    ("number", "limit"),
    [(errno.EFBIG, "ulimit -a"), (errno.EMFILE, "ulimit -n")],
)
def test_what_runs_out_is_named(number: int, limit: str) -> None:
    """`ulimit -f 0`, and a sandbox that forbids memfd_create, were explained by the limit on
    descriptors.
    """
    problem = exhausted(OSError(number, os.strerror(number)), 2)
    assert [command.startswith(limit) for _, command in problem.help] == [True]
