"""Lightning on the lazy device: an import and Trainer(accelerator="lazy"), and nothing else."""

import lightning
import torch
from torch import Tensor, nn

import lazy_backend.integrations.lightning  # makes accelerator="lazy" known


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(1, keepdim=True)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)


if __name__ == "__main__":
    options = {"precision": "bf16-mixed", "max_epochs": 3, "log_every_n_steps": 5}
    trainer = lightning.Trainer(accelerator="lazy", **options)
    trainer.fit(Regression(), data(), data())
    print(lazy_backend.metrics.short_report())
