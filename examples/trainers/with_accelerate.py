"""An Accelerate loop on the lazy device: lazy_backend's Accelerator in place of accelerate's."""

import torch
from torch import nn

from lazy_backend import metrics
from lazy_backend.integrations.accelerate import Accelerator


def train(precision: str = "no") -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    inputs = torch.randn(480, 4)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8
    )
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    losses = []
    for batch, targets in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # ends a step, every second time
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]  # read at the end


if __name__ == "__main__":
    print(train()[-5:])
    print(metrics.short_report())
