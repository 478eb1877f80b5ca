"""An Accelerate loop with accumulation, clipping and a schedule: eager's losses, no cut, one compile; saved states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import count
from torch import nn

from lazy_backend import LazyBackendError, config

BATCHES = 60


def train(
    accelerator: Any, first: int = 0, last: int = BATCHES, state: str | None = None, dropout: float = 0.0
) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1)]
    model: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES)
    inputs = torch.randn(8 * BATCHES, 4)
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    data = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    losses = []
    for number, (batch, targets) in enumerate(data):
        if not first <= number < last:
            continue
        if number == first > 0:
            accelerator.load_state(state)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients and number % 10 == 9:
            assert loss.item() > 0  # logged, as is the norm
            assert norm.item() > 0
    if last < BATCHES:
        accelerator.save_state(state)
    return [loss.item() for loss in losses]


def ours(**options: Any) -> Any:
    from lazy_backend.integrations.accelerate import Accelerator

    return Accelerator(gradient_accumulation_steps=2, **options)


def theirs(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def eager(**options: Any) -> list[float]:
    forget()
    losses = train(theirs(**options))
    forget()
    return losses


@pytest.mark.scenario
@pytest.mark.parametrize(("backend", "precision"), [("eager", "no"), ("eager", "bf16"), ("inductor", "no")])
def test_losses_are_those_of_eager(backend: str, precision: str) -> None:
    expected = eager(mixed_precision=precision)
    config.backend = backend
    is_replayed = backend == "eager"
    with (
        count("GraphCut") as cuts,
        count("Compile") as compiles,
        count("MarkStep") as steps,
        count("RegionJump") as jumps,
    ):
        losses = train(ours(capture=is_replayed, mixed_precision=precision))
    assert (jumps() > BATCHES / 2 - 5) if is_replayed else (jumps() == 0)
    assert cuts() == 0
    assert compiles() == 1
    assert steps() == BATCHES / 2
    assert losses == (expected if backend == "eager" else pytest.approx(expected, rel=1e-4))


def test_a_saved_state_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole = train(ours(), dropout=0.1)
    forget()
    state = str(tmp_path / "state")
    assert train(ours(), last=30, state=state, dropout=0.1) == whole[:30]
    forget()
    assert train(ours(), first=30, state=state, dropout=0.1) == whole[30:]


def test_the_example() -> None:
    import with_accelerate

    with count("GraphCut") as cuts, count("Compile") as compiles:
        losses = with_accelerate.train()
    assert (cuts(), compiles()) == (0, 1)
    assert losses[-1] < losses[0]


SCRIPT = """
import torch, accelerate

accelerator = accelerate.Accelerator()
model, data = torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()

import lazy_backend
print("steps:", accelerator.device, lazy_backend.metrics.counter_value("MarkStep"))
"""


@pytest.mark.scenario
def test_accelerate_launch_of_a_script_that_names_no_package_of_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = {"ACCELERATE_TORCH_DEVICE": "lazy", "LAZY_BACKEND_MARK_STEP_ON_OPTIMIZER_STEP": "1"}
    settings |= {"LAZY_BACKEND_COMPILE": "off"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True)
    assert "steps: lazy 6" in done.stdout, done.stderr


# ----- what users do wrong


def test_fp16_is_refused_with_what_to_do() -> None:
    with pytest.raises(LazyBackendError, match=r'fp16 does not work(?s:.*)test_with_accelerate\.py(?s:.*)"bf16"'):
        ours(mixed_precision="fp16")


def test_an_accelerator_that_came_before_is_told() -> None:
    theirs()
    with pytest.raises(LazyBackendError, match="accelerate is on cpu already"):
        ours()


def test_an_accelerator_of_theirs_has_its_steps_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "lazy")
    with config.patch(mark_steps="auto"), count("MarkStep") as steps:
        train(Accelerator())
    assert steps() >= 2
