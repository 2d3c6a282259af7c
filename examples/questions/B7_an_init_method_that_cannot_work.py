"""An `init_method` that cannot work as it is written: two slashes for three, http for tcp, a file
that an earlier run left.

    python examples/questions/B7_an_init_method_that_cannot_work.py

torch waits five minutes for some of it, and meets the processes of an earlier run by another. Here
the corrected text is in the message.
"""

import os
import tempfile
from pathlib import Path

import torch.distributed as dist

import rallypoint

WRONG = {
    "file://tmp/meeting": 'init_method="file:///tmp/meeting"',
    "http://127.0.0.1:29500": 'init_method="tcp://127.0.0.1:29500"',
    "tcp://127.0.0.1:99999": 'init_method="tcp://127.0.0.1:29500"',
    "127.0.0.1:29500": 'init_method="tcp://127.0.0.1:29500"',
}


def meet(method: str) -> None:
    dist.init_process_group("gloo", init_method=method, rank=int(os.environ["RANK"]), world_size=2)


def failure(method: str) -> rallypoint.WorkerError:
    try:
        rallypoint.launch(meet, (method,), nproc=2)
    except rallypoint.WorkerError as error:
        return error
    raise AssertionError(f"{method} was taken")


def main() -> None:
    for method, correct in WRONG.items():
        report = failure(method).report
        assert report.code == "init-method-invalid", report
        assert report.help[0].command == correct, report

    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "meeting"
        left.write_bytes(b"the addresses of processes that are gone")
        os.utime(left, (0, 0))
        report = failure(f"file://{left}").report
        assert report.code == "store-file-stale", report
        assert report.help[0].command == f"rm {left}", report
    print(
        f"{len(WRONG)} methods were corrected, and a file of an earlier run was refused: {report.code}"
    )


if __name__ == "__main__":
    main()
