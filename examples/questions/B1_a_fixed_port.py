"""A job with a fixed port, 29500 say, on a machine where somebody has it; and two jobs at once.

    python examples/questions/B1_a_fixed_port.py

With torchrun the second job ends in EADDRINUSE, or joins the first one's ranks. Without any port in
the command or the script each job holds a free one from the start. Where it has to be a certain
one, it is bound before any rank exists, or the error says who has it.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile


def rank() -> None:
    """A script as it should be: no address, no port."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rallypoint", "run", "-n", "2", *options, __file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as somebody,
    ):
        port = somebody.getsockname()[1]
        jobs = [start(f"--run-dir={folder}/one"), start(f"--run-dir={folder}/two")]
        refused = start(f"--run-dir={folder}/three", f"--master-port={port}")
        _, said = refused.communicate()
        assert refused.returncode == 1, said
        headline = said.strip().splitlines()[0]
        assert re.match(
            rf"error\[port-in-use\]: port {port} on 127\.0\.0\.1 is taken: .*\(pid {os.getpid()}, user ",
            headline,
        ), said
        for job in jobs:
            _, said = job.communicate()
            assert (job.returncode, said) == (0, "")
    print(
        "two jobs at once met without a port; the one that wanted a taken port was told by whom it is taken"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank()
    else:
        main()
