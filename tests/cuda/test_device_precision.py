"""Mixed precision on the device: autocast and GradScaler do what eager does there; TF32 is what the switches say."""

from __future__ import annotations

import pytest
import torch
from backing import BACKING, graphs, needs_gpu
from torch import nn

import lazy_backend
from lazy_backend import config

INFINITE = (0, 1, 5, 11)  # steps with an infinite gradient


class ScaledLoop:
    """A model, AdamW and a scaler on a device; `step(number)` is one step."""

    def __init__(self, device: str, dtype: torch.dtype, is_captured: bool = False) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=3, enabled=dtype is torch.float16)
        if is_captured:
            lazy_backend.capture(self.model)
            lazy_backend.capture(self.optimizer)

    def step(self, number: int) -> torch.Tensor:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
        if number in INFINITE and self.scaler.is_enabled():
            x[0, 0] = float("inf")
        with torch.autocast(self.device, self.dtype):
            made = self.model(x.to(self.device))
        assert made.dtype == self.dtype
        loss: torch.Tensor = made.float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.device == "lazy":
            lazy_backend.mark_step()
        return loss.detach()


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("mode", ["off", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_as_eager_does(dtype: torch.dtype, mode: str, is_captured: bool) -> None:
    eager, lazy = ScaledLoop(BACKING, dtype), ScaledLoop("lazy", dtype, is_captured)
    with graphs(mode):
        found = torch.stack([lazy.step(number) for number in range(30)]).cpu()
    expected = torch.stack([eager.step(number) for number in range(30)]).cpu()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3, equal_nan=True)
    assert lazy.scaler.get_scale() == eager.scaler.get_scale()
    for one, other in zip(lazy.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach().cpu(), rtol=5e-2, atol=5e-3)


@needs_gpu
@pytest.mark.parametrize("compile", ["off", "foreground"])
def test_tf32_is_what_the_switch_says(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is read at each step: what was compiled or captured under another one is not used."""
    config.compile = compile
    torch.manual_seed(0)
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()

    def error() -> float:
        x, y = a.to("lazy"), b.to("lazy")
        for _ in range(5):
            z = x @ y
            lazy_backend.mark_step()
        return (z.cpu().double() - exact).abs().max().item()

    with graphs("auto"):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        fine = error()
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        coarse = error()
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        assert error() == pytest.approx(fine)
    assert coarse > 10 * fine
