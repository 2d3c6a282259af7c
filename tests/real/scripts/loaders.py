"""DataLoader workers of each kind, and torch's files with classes of __main__."""

import dataclasses
import io
import os

import torch
from torch.utils.data import DataLoader, Dataset


@dataclasses.dataclass
class Point:
    x: int


class Squares(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index * index, os.getpid()


def loader_of(method: str) -> str:
    workers = 2 if method == "fork" else 1  # else each imports torch
    batches = list(DataLoader(Squares(), batch_size=2, num_workers=workers, multiprocessing_context=method))
    assert torch.cat([values for values, _ in batches]).tolist() == [n * n for n in range(8)], batches
    assert len({pid for _, pids in batches for pid in pids.tolist()} - {os.getpid()}) == workers
    return f"DataLoader {method}"


def main() -> None:
    buffer = io.BytesIO()
    torch.save(Point(3), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False) == Point(3)
    print("torch.save", flush=True)
    for method in ("fork", "spawn", "forkserver"):
        print(loader_of(method), flush=True)


if __name__ == "__main__":
    main()
