"""Lightning's own loop: it sees that a launcher has started the ranks, and starts none itself."""

import os
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4))
    launcher = type(trainer.strategy.cluster_environment).__name__
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, {launcher}", flush=True)


if __name__ == "__main__":
    main()
