"""One rank fails to get its device, catches that, prints and goes home. The others wait for it.

    python examples/questions/C4_an_error_that_is_swallowed.py

With torchrun they wait until the timeout of the process group, ten or thirty minutes, and the job
may even end with status 0. Here the job ends as soon as that rank has left, and the error is the
one that it had caught.
"""

import contextlib
import io
import time

import torch
import torch.distributed as dist

import rallypoint


def train() -> None:
    try:
        if dist.get_rank() == 1:
            torch.cuda.set_device(99)
    except Exception as error:
        print(f"no device: {error}")
        return
    dist.barrier()


def failure() -> rallypoint.WorkerError:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            rallypoint.launch(train, nproc=3, backend="gloo")
    except rallypoint.WorkerError as error:
        return error
    raise AssertionError("the rank that went home was not missed")


def main() -> None:
    began = time.monotonic()
    error = failure()
    assert error.report.code == "error-swallowed", str(error)
    assert error.report.ranks == (1,)
    assert time.monotonic() - began < 60, "the timeout of the process group is 30 minutes"
    print(error.report.headline)


if __name__ == "__main__":
    main()
