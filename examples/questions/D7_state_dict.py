"""A whole `state_dict()` in the store, and the optimizer's, too.

    python examples/questions/D7_state_dict.py

The other process takes up training where this one stopped: what comes out is equal to what went in,
and of the same type, so that `load_state_dict` takes it, and the next step is the same step to the
last bit.
"""

import torch
import torch.multiprocessing as mp
from torch import nn

import rallypoint


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(number)
    inputs, targets = torch.randn(32, 8), torch.randint(0, 2, (32,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def go_on(store: rallypoint.Store) -> None:
    torch.set_num_threads(1)
    model, optimizer = build()
    model.load_state_dict(store["model"])
    optimizer.load_state_dict(store["optimizer"])
    store["losses there"] = [step(model, optimizer, number) for number in range(3, 6)]


def same(a: object, b: object) -> bool:
    """Equal, and of the same type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main() -> None:
    torch.set_num_threads(
        1
    )  # the process that is forked from this one could not use the threads of a pool
    model, optimizer = build()
    for number in range(3):
        step(model, optimizer, number)
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        store["model"] = model.state_dict()
        store["optimizer"] = optimizer.state_dict()
        assert same(store["model"], model.state_dict())
        assert same(store["optimizer"], optimizer.state_dict())
        process = mp.Process(target=go_on, args=(store,))
        process.start()
        process.join()
        assert process.exitcode == 0
        here = [step(model, optimizer, number) for number in range(3, 6)]
        assert store["losses there"] == here, (store["losses there"], here)
    print(
        f"{len(model.state_dict())} tensors and an optimizer's state went over; the next losses are equal: {here[-1]:.6f}"
    )


if __name__ == "__main__":
    main()
