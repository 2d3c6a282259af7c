"""A tensor is put into a queue by a process that ends before anybody has taken it.

    python examples/questions/A4_a_producer_that_has_gone.py

`queue.get()` then raises "ConnectionRefusedError: [Errno 111] Connection refused", and no network
is involved: torch.multiprocessing sends a note where the tensor's memory is, and the process that
has it must be there when it is taken. Here the report says so; and what goes through the job's
store, or is returned by a function of `launch`, needs no producer.
"""

import contextlib
import io

import torch
import torch.multiprocessing as mp

import rallypoint


def produce(queue: mp.Queue) -> None:
    queue.put(torch.arange(8))


def consume() -> torch.Tensor:
    """In a rank: its producer has ended when the tensor is taken."""
    context = mp.get_context("fork")
    queue = context.Queue()
    producer = context.Process(target=produce, args=(queue,))
    producer.start()
    producer.join()
    taken: torch.Tensor = queue.get()
    return taken


def put(address: str, secret: bytes) -> None:
    """In a process: the tensor goes into a store, and the process ends."""
    with rallypoint.connect(address, secret=secret) as store:
        store["numbers"] = torch.arange(8)


def main() -> None:
    report = None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            rallypoint.launch(consume, nproc=1)
    except rallypoint.WorkerError as error:
        report = error.report
    assert report is not None
    assert report.code == "producer-gone", report

    with rallypoint.serve() as server:
        producer = mp.get_context("spawn").Process(target=put, args=(server.address, server.secret))
        producer.start()
        producer.join()
        with rallypoint.connect(server.address, secret=server.secret) as store:
            assert torch.equal(store["numbers"], torch.arange(8))

    assert torch.equal(rallypoint.launch(torch.arange, (8,), nproc=1)[0], torch.arange(8))
    print(
        f"{report.headline}; through a store, and as a result, it came after its producer had gone"
    )


if __name__ == "__main__":
    main()
