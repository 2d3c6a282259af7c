"""What an attempt holds, and that it gives it back at whatever moment it ends."""

from __future__ import annotations

import os
from typing import cast

import pytest

from rallypoint.launcher.account import Account
from rallypoint.launcher.attempt import Attempt

from .test_plan import plan


@pytest.mark.parametrize("heard", [False, True])
def test_the_pipe_of_a_host_is_closed_also_when_the_job_ends_before_the_host_serves(heard: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    attempt = Attempt(plan(nproc=1), 0, began=0.0, ignored=(), hooks=True)
    attempt.hold(None)
    order = next(attempt.orders(cast(Account, None)))  # the host's: it asks the account for nothing
    for fd in order.ours:
        os.close(fd)
    if heard:
        assert not attempt.hear_host(), "whoever was to serve has ended"
    attempt.close()
    assert len(os.listdir("/proc/self/fd")) == before
