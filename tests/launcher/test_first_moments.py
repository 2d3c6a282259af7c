"""What a first call of `launch` waits for: until a template has torch in hand, nobody on the way to
it loads what can wait.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CAN_WAIT = {
    "msgspec",
    "cloudpickle",
    "rallypoint.launcher.protocol",
    "rallypoint.launcher.plan",
    "rallypoint.wire",
    "rallypoint.diagnosis",
}
"""Each takes as long as the three modules below together."""


def loaded_by(module: str) -> set[str]:
    """The modules that this one brings along, packages by their own name."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["launch.launch", "launch.standby_main", "template.template_main"]
)
def test_the_way_to_the_template_is_short(module: str) -> None:
    assert not loaded_by(f"rallypoint.launcher.{module}") & CAN_WAIT


def test_the_template_needs_no_rules_and_no_plan() -> None:
    """It loads all of this after torch, while the first call waits."""
    loaded = loaded_by(
        "rallypoint.launcher.template.template, rallypoint.launcher.worker.run_function"
    )
    assert {
        "rallypoint.launcher.worker.torch_hooks",
        "rallypoint.launcher.launch.marshalling.payload",
    } <= loaded
    not_there = {
        "plan",
        "agent.supervisor",
        "launch.marshalling.inspection",
        "launch.marshalling.object_path",
    }
    assert not loaded & {
        "rallypoint.wire.values",
        "rallypoint.diagnosis.root_cause",
        *(f"rallypoint.launcher.{name}" for name in not_there),
    }
