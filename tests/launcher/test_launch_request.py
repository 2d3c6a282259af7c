"""One call of `launch`, as the agent hears of its caller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rallypoint.launcher import protocol
from rallypoint.launcher.agent.launch_request import CallerGone, LaunchRequest
from rallypoint.launcher.protocol import Interrupt


def test_an_ended_caller_is_gone_though_a_process_that_it_forked_has_the_line() -> None:
    """A launcher that joined others waited for a message that nobody would send."""
    call: Any = SimpleNamespace(asked=0.0, timeout=None, grace=None)
    line, forked = protocol.pair()
    with line, forked:
        request = LaunchRequest(
            call, [1, 2], line=line, caller=-1, helpers=cast(Any, None), files_limit=(0, 0)
        )
        protocol.send(forked, Interrupt("SIGINT"))
        assert request.interrupt() == "SIGINT"
        with pytest.raises(CallerGone):
            request.interrupt()
