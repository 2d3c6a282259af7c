"""Only some ports are allowed: by a firewall, or by whoever runs the cluster.

    python examples/questions/B4_a_range_of_ports.py

`--port-range A-B` keeps everything that rallypoint listens on in that range,
`hold_port(port_range=...)` and `serve(port_range=...)` do the same for programs of one's own, and
when none is left the error says who has how many. What gloo and NCCL listen on in every rank is
chosen by the kernel; `rallypoint run --dry-run --port-range A-B` says how to move that.
"""

import contextlib
import os
import subprocess
import sys
import tempfile

import rallypoint

SIZE = 3


def a_free_range() -> tuple[int, int]:
    """Neighbouring ports that nobody has now."""
    for low in range(21000 + os.getpid() % 1000, 32000, SIZE):
        with contextlib.suppress(rallypoint.EnvironmentProblem), contextlib.ExitStack() as stack:
            for port in range(low, low + SIZE):
                stack.enter_context(rallypoint.hold_port(port))
            return low, low + SIZE - 1
    raise AssertionError("no free range")


def main() -> None:
    low, high = a_free_range()
    with (
        rallypoint.hold_port(port_range=(low, high)) as first,
        rallypoint.serve(port_range=(low, high)) as server,
    ):
        last = (
            {*range(low, high + 1)} - {first.port, int(server.address.rpartition(":")[2])}
        ).pop()
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "rallypoint",
                "run",
                "--fresh",
                "--run-dir",
                folder,
                "--port-range",
                f"{low}-{high}",
                __file__,
            ]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said == f"the job meets at port {last}\n", said

        with rallypoint.hold_port(last):
            exhausted = None
            try:
                rallypoint.hold_port(port_range=(low, high))
            except rallypoint.EnvironmentProblem as error:
                exhausted = error
        assert exhausted is not None
        assert exhausted.code == "ports-exhausted"
        assert f"(pid {os.getpid()}, user " in exhausted.why[0]
        assert exhausted.why[0].endswith(f") holds {SIZE}")
    said = str(exhausted).replace(f"{low}-{high}", "A-B")
    print(
        f"a socket, a store and a job took the {SIZE} ports of the range; {said}: one process holds {SIZE}"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        print(f"the job meets at port {os.environ['MASTER_PORT']}")
    else:
        main()
