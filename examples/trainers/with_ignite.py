"""Ignite on the lazy device: lazy_backend's trainer and evaluator in place of Ignite's; lazy metrics."""

import torch
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from torch import nn

from lazy_backend import metrics
from lazy_backend.integrations.ignite import create_supervised_evaluator, create_supervised_trainer


def train(amp_dtype: torch.dtype | None = None) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(80, 4)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8
    )
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, amp_dtype=amp_dtype)
    error = MeanSquaredError(device="lazy")
    evaluator = create_supervised_evaluator(model, {"error": error}, amp_dtype=amp_dtype)
    losses: list[torch.Tensor] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine: Engine) -> None:
        losses.append(engine.state.output)

    trainer.run(data, max_epochs=3)
    return [loss.item() for loss in losses], evaluator.run(data).metrics["error"]


if __name__ == "__main__":
    losses, error = train()
    print(losses[-5:], error)
    print(metrics.short_report())
