"""Training that is saved and goes on later, here or on another device."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same, run_program
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lazy_backend

STEPS, SAVED_AFTER = 8, 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adamw_capturable": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}  # fmt: skip


class Training:
    """A model with statistics, an optimizer with state, a schedule and random numbers."""

    def __init__(self, device: str, optimizer: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.model.to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.sync = lazy_backend.mark_step if device == "lazy" else lambda: None

    def run(self, first: int, last: int, step: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
        losses = []
        for number in range(first, last):
            inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(number)).to(self.device)
            losses.append((step or self.step)(inputs, inputs.sum(1, keepdim=True)).detach())
            self.schedule.step()
            self.sync()
        return [loss.cpu() for loss in losses]

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"].cpu())

    def without_dropout(self) -> Training:
        self.model[2].p = 0.0
        return self


def saved(state: dict[str, Any], **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file, **options)
    file.seek(0)
    return file


def values(state: Any) -> Any:
    """With tensors of any device on the CPU."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), state)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("location", ["lazy", "cpu", None])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_resumed_goes_on_as_if_it_had_not_stopped(
    optimizer: str, location: str | None, weights_only: bool
) -> None:
    whole = Training("lazy", optimizer)
    whole.run(0, SAVED_AFTER)
    file = saved(whole.state())
    expected = whole.run(SAVED_AFTER, STEPS)
    resumed = Training("lazy", optimizer, seed=9)
    resumed.load(torch.load(file, map_location=location, weights_only=weights_only))
    assert_same(resumed.run(SAVED_AFTER, STEPS), expected)
    assert_same(values(resumed.state()), values(whole.state()))


@pytest.mark.parametrize(("before", "after"), [("cpu", "lazy"), ("lazy", "cpu")])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw_fused"])
def test_a_run_moves_between_devices(optimizer: str, before: str, after: str) -> None:
    whole = Training("cpu", optimizer).without_dropout()
    first = whole.run(0, SAVED_AFTER)
    start = Training(before, optimizer).without_dropout()
    assert_same(start.run(0, SAVED_AFTER), first)
    resumed = Training(after, optimizer, seed=9).without_dropout()
    resumed.load(torch.load(saved(start.state()), map_location=after))
    assert_same(resumed.run(SAVED_AFTER, STEPS), whole.run(SAVED_AFTER, STEPS))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
def test_a_captured_step_is_resumed(optimizer: str) -> None:
    whole = Training("lazy", optimizer)
    step = lazy_backend.capture(whole.step)
    whole.run(0, SAVED_AFTER, step)
    file = saved(whole.state())
    expected = whole.run(SAVED_AFTER, STEPS, step)
    resumed = Training("lazy", optimizer, seed=9)
    resumed.load(torch.load(file, map_location="lazy"))
    assert_same(resumed.run(SAVED_AFTER, STEPS, lazy_backend.capture(resumed.step)), expected)


def test_a_captured_step_notices_a_state_that_was_loaded() -> None:
    training = Training("lazy", "adamw_fused")
    step = lazy_backend.capture(training.step)
    training.run(0, 2, step)
    file = saved(training.state())
    expected = training.run(2, STEPS, step)
    training.load(torch.load(file, map_location="lazy"))
    assert_same(training.run(2, STEPS, step), expected)


def test_the_old_file_format_resumes() -> None:
    whole = Training("lazy", "adam")
    whole.run(0, SAVED_AFTER)
    file = saved(whole.state(), _use_new_zipfile_serialization=False)
    expected = whole.run(SAVED_AFTER, STEPS)
    resumed = Training("lazy", "adam", seed=9)
    resumed.load(torch.load(file, map_location="lazy"))
    assert_same(resumed.run(SAVED_AFTER, STEPS), expected)


def parts(training: Training) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves and loads in place."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    schedule, random = training.schedule.state_dict(), torch.get_rng_state()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "random": random}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own: no process group
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw_fused"])
def test_a_distributed_checkpoint_resumes(optimizer: str, tmp_path: Path) -> None:
    whole = Training("lazy", optimizer)
    whole.run(0, SAVED_AFTER)
    checkpoint.save(parts(whole), checkpoint_id=tmp_path)
    expected = whole.run(SAVED_AFTER, STEPS)
    resumed = Training("lazy", optimizer, seed=9)
    state = parts(resumed)
    checkpoint.load(state, checkpoint_id=tmp_path)
    saved_of = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(resumed.model, resumed.optimizer, **saved_of)
    resumed.schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    assert_same(resumed.run(SAVED_AFTER, STEPS), expected)
    code = """
import sys, torch
from torch.distributed import checkpoint
state = {"model": {"0.weight": torch.zeros(8, 4)}}
checkpoint.load(state, checkpoint_id=".")
print(state["model"]["0.weight"].sum().item(), "lazy_backend" in sys.modules)
"""
    saved_weight = Training("lazy", optimizer)
    saved_weight.run(0, SAVED_AFTER)
    found = run_program(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found == f"{saved_weight.model[0].weight.sum().item()} False\n"


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_loads_where_the_package_is_not(weights_only: bool, tmp_path: Path) -> None:
    training = Training("lazy", "adam")
    training.run(0, SAVED_AFTER)
    torch.save(training.state(), tmp_path / "checkpoint.pt")
    torch.save(values(training.state()), tmp_path / "expected.pt")
    code = f"""
import sys, torch
state = torch.load("checkpoint.pt", map_location="cpu", weights_only={weights_only})
expected = torch.load("expected.pt")
leaves, spec = torch.utils._pytree.tree_flatten(state)
others, other_spec = torch.utils._pytree.tree_flatten(expected)
same = [torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)]
print(spec == other_spec, all(same), len(same) > 30, "lazy_backend" in sys.modules)
"""
    assert run_program(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True True True False\n"
