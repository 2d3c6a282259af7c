"""Accelerate's own loop: it finds the ranks by the environment."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for inputs, wanted in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
        optimizer.step()
    weights = gather_object([model.module.weight.tolist()])
    assert len(weights) == accelerator.num_processes
    assert all(one == weights[0] for one in weights)
    print(f"process {accelerator.process_index} of {accelerator.num_processes}: {len(loader)} batches, {accelerator.distributed_type.value}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
