"""`finally: dist.destroy_process_group()` after an `init_process_group` that has failed.

    python examples/questions/B8_a_clean_up_that_hides_the_error.py

The clean-up fails as well, since there is no group, and its "AssertionError: Process group cannot
be None" is what Python shows last. The cause is the first exception of the chain.
"""

import contextlib
import io
import os
import socket
from datetime import timedelta

import torch.distributed as dist

import rallypoint


def train(place: str) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place}",
            rank=int(os.environ["RANK"]) + 1,
            world_size=3,
            timeout=timedelta(seconds=3),
        )
    finally:
        dist.destroy_process_group()


def main() -> None:
    report = None
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        place = f"127.0.0.1:{bound.getsockname()[1]}"
        try:
            with contextlib.redirect_stderr(
                io.StringIO()
            ):  # torch's own words on it, forty lines for each attempt
                rallypoint.launch(train, (place,), nproc=2)
        except rallypoint.WorkerError as error:
            report = error.report
    assert report is not None
    assert report.code == "port-refused", report
    assert place in report.headline, report
    assert "AssertionError" not in report.headline, report
    print(report.headline)


if __name__ == "__main__":
    main()
