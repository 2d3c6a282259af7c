"""A meeting place on a shared file system, instead of a port: `file://`.

    python examples/questions/B3_a_file_on_a_shared_disk.py

With `init_process_group(init_method="file:///tmp/ddp_file")` the file of a job that was killed
stays, and the next job reads in it where the dead one's ranks were: it hangs, or its connections
are refused. In a folder that is not there it waits five minutes. `--rdzv-endpoint
file:///shared/dir/job` is one job's alone while that runs: what a dead one left is recognised and
replaced, of two that start at once one has it and the other is told by whom it was taken, and a
folder that is missing is refused before anything starts. (Jobs on several machines, which would
meet there, come with multi-node support: this version starts the ranks of one.)
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HANGS = "hangs"


def start(folder: Path, place: Path, program: str) -> subprocess.Popen[str]:
    runs = Path(tempfile.mkdtemp(dir=folder))
    command = [
        sys.executable,
        "-m",
        "rallypoint",
        "run",
        "-n",
        "2",
        "--fresh",
        f"--run-dir={runs}",
        f"--rdzv-endpoint=file://{place}",
    ]
    return subprocess.Popen(
        [*command, __file__, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rank(program: str) -> None:
    """Says that it is there; the one that hangs waits to be killed."""
    print("here", flush=True)
    if program == HANGS:
        signal.pause()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = folder / "job"

        killed = start(folder, place, HANGS)
        assert killed.stdout is not None
        assert "here" in killed.stdout.readline()
        second = start(folder, place, "ends")  # while the first one runs
        _, said = second.communicate()
        assert second.returncode == 1
        assert said.startswith(
            f"error[rendezvous-in-use]: the meeting place {place} belongs to a job that is running: pid {killed.pid} on "
        )
        killed.kill()
        killed.communicate()

        third = start(folder, place, "ends")  # after it was killed; what it left is replaced
        assert (third.communicate()[1], third.returncode) == ("", 0)

        missing = start(folder, folder / "not-mounted" / "job", "ends")
        _, said = missing.communicate()
        assert missing.returncode == 1
        assert said.startswith(
            f"error[rendezvous-unwritable]: the folder {folder}/not-mounted, in which"
        )
    print(
        "a place was refused while its job ran, taken over after that was killed, and refused at once where its folder is missing"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(sys.argv[1])
    else:
        main()
