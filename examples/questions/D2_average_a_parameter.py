"""Average a parameter over processes.

    python examples/questions/D2_average_a_parameter.py

What is often written for this lets every process write its tensor to one key, add one to a counter,
poll the counter until all have counted, and divide what the key holds by two: that is half of
whoever wrote last. A mean needs all the values, and everybody must be told when it cannot be had.
"""

import torch
import torch.multiprocessing as mp

import rallypoint

SIZE = 3


def parameter(rank: int) -> torch.Tensor:
    return torch.randn(1000, 100, generator=torch.Generator().manual_seed(rank))


def work(store: rallypoint.Store, rank: int) -> None:
    torch.set_num_threads(1)
    mean = store.average("w", parameter(rank), size=SIZE)
    exact = sum(parameter(other).double() for other in range(SIZE)) / SIZE
    assert mean.dtype == torch.float32
    assert torch.allclose(mean.double(), exact, rtol=0, atol=1e-6), (
        (mean.double() - exact).abs().max()
    )

    # A dict of tensors, such as a state_dict; each rank counts as often as it has seen examples.
    examples = 100 * (rank + 1)
    model = {
        "weight": torch.full((2, 3), float(rank)),
        "bias": torch.tensor(float(rank), dtype=torch.bfloat16),
    }
    model = store.average("model", model, size=SIZE, weight=examples)
    expected = sum(other * 100 * (other + 1) for other in range(SIZE)) / sum(
        100 * (other + 1) for other in range(SIZE)
    )
    assert torch.allclose(model["weight"], torch.full((2, 3), expected))
    assert model["bias"].dtype == torch.bfloat16

    # One does not come. The others go on without it at the deadline, and are told who is in the
    # mean.
    if rank == 2:
        return
    result = store.average(
        "late", torch.tensor([float(rank)]), size=SIZE, quorum=2, timeout=1.0, details=True
    )
    assert result.value.item() == 0.5
    assert (len(result.present), result.weight) == (2, 2.0)


def main() -> None:
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        processes = [mp.Process(target=work, args=(store, rank)) for rank in range(SIZE)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * SIZE
    print(f"the mean of {SIZE} ranks was exact on each, and that of 2 when one did not come")


if __name__ == "__main__":
    main()
