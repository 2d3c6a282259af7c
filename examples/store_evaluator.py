"""One rank trains, another tests every version of the model beside it.

    rallypoint run -n 2 examples/store_evaluator.py

The trainer writes its whole `state_dict()` into the store after each round and goes on at once; the
tester is told of each version, in order, and loads it. Neither waits for the other, which no
collective could do.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import rallypoint

ROUNDS = 5


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1797 digits of scikit-learn: (1797, 64) floats in 0..1, and their labels."""
    digits = load_digits()
    return torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(
        digits.target
    ).long()


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(store: rallypoint.Store) -> None:
    images, labels = load_data()
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(1, ROUNDS + 1):
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).backward()
            optimizer.step()
        store["model"] = {"round": number, "state": model.state_dict()}


@torch.no_grad()
def test(store: rallypoint.Store) -> None:
    images, labels = load_data()
    model = build_model()
    for change in store.watch(
        "model", since=0
    ):  # from the beginning: also the versions that were written before we looked
        model.load_state_dict(change.value["state"])
        right = (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean().item()
        print(f"round {change.value['round']}: test accuracy {right:.4f}", flush=True)
        if change.value["round"] == ROUNDS:
            break


def main() -> None:
    store = rallypoint.connect()
    if os.environ["RANK"] == "0":
        train(store)
    else:
        test(store)


if __name__ == "__main__":
    main()
