"""The script sets MASTER_ADDR and MASTER_PORT itself, as most tutorials do.

    python examples/questions/B6_an_address_of_the_scripts_own.py

Under torchrun every rank then waits for a store that nobody serves: all are clients of an empty
port. Here it is as in plain torch, rank 0 listens there, and a line says that the port which
rallypoint holds is not used. Ranks that each choose another port are told at once.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import rallypoint

SCRIPT = """\
import os
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = str(@)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
dist.destroy_process_group()
"""


def run(folder: Path, text: str) -> tuple[int, str]:
    """Exit status, and what the launcher says."""
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, "-m", "rallypoint", "run", "-n", "2", "train.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_STATE_HOME": str(folder)},
    )
    return done.returncode, done.stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        with rallypoint.hold_port() as held:
            port = (
                held.port
            )  # free again in a moment: a tutorial's 29500 may be taken on this machine
        status, said = run(Path(name), SCRIPT.replace("@", str(port)))
        assert (status, len(said.splitlines())) == (0, 1), said
        assert said.startswith(f"rallypoint: train.py:6 sets MASTER_PORT={port}; the held port "), (
            said
        )

        each_its_own = SCRIPT.replace("@", f'{port} + int(os.environ["RANK"])')
        status, said = run(Path(name), each_its_own)
        assert status == 1, said
        assert (
            "\nerror[address-differs]: the ranks were told 2 different meeting points: " in said
        ), said
    print(
        "2 ranks met at the script's own port; with a port for each rank they were told at once that they cannot"
    )


if __name__ == "__main__":
    main()
