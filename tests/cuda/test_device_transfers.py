"""Between the lazy device, the one behind it and the host."""

from __future__ import annotations

import copy

import pytest
import torch
from backing import BACKING, DeviceLoop, needs_gpu, needs_two_gpus
from harness import assert_same
from torch import nn

import lazy_backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_the_device_and_back(dtype: torch.dtype) -> None:
    source = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for _ in range(3):
        lazy = source.to("lazy")
        behind = lazy.to(BACKING)
        assert behind.device.type == BACKING
        assert_same(behind.cpu(), source)
        assert_same(source.to(BACKING).to("lazy"), source)
        assert_same(lazy.transpose(0, 2).to(BACKING).cpu(), source.transpose(0, 2))
        lazy_backend.mark_step()


def test_copy_in_both_directions() -> None:
    for number in range(4):
        lazy, behind = torch.zeros(3, device="lazy"), torch.full((3,), float(number), device=BACKING)
        lazy.copy_(behind)
        behind.copy_(lazy + 1)
        lazy_backend.mark_step()
        assert behind.tolist() == [number + 1.0] * 3
        assert lazy.tolist() == [float(number)] * 3


def test_a_module_goes_and_comes_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("lazy")
    model(torch.randn(8, 4, device="lazy"))
    lazy_backend.mark_step()
    model.to(BACKING)
    assert {value.device.type for value in model.state_dict().values()} == {BACKING}
    assert_same(model[0].weight.detach().cpu(), before["0.weight"])
    assert model[1].num_batches_tracked.item() == 1


def test_training_goes_on_elsewhere() -> None:
    """A checkpoint of the lazy device is one of eager. A copy of it: PyTorch shares counts of steps."""
    lazy, eager = DeviceLoop("mlp", "plain"), DeviceLoop("mlp", "eager")
    for number in range(8):
        lazy.step(number)
    eager.model.load_state_dict(lazy.model.state_dict())
    eager.optimizer.load_state_dict(copy.deepcopy(lazy.optimizer.state_dict()))
    found = [lazy.step(number).item() for number in range(8, 12)]
    assert found == pytest.approx([eager.step(number).item() for number in range(8, 12)], rel=1e-4)


@needs_gpu
def test_pinned_memory_is_left_as_it_is() -> None:
    pinned = torch.arange(1000.0).pin_memory()
    moved = pinned.to("lazy", non_blocking=True)
    fetched = (moved + 1).to("cpu", non_blocking=False)
    assert pinned.is_pinned()
    assert_same(fetched, torch.arange(1000.0) + 1)


@needs_gpu
def test_mixing_devices_is_an_error_as_in_eager() -> None:
    with pytest.raises(RuntimeError):
        torch.ones(3, device="lazy") + torch.ones(3, device="cuda")


@needs_two_gpus
def test_every_gpu_has_a_lazy_device() -> None:
    for index in range(torch.cuda.device_count()):
        x = torch.arange(4.0, device=f"lazy:{index}")
        for _ in range(3):
            y = (x * 2).sum()
            lazy_backend.mark_step()
        assert y.to(f"cuda:{index}").device.index == index
        assert y.item() == 12


@needs_two_gpus
def test_copies_between_gpus() -> None:
    for number in range(4):
        x = torch.full((1000,), float(number), device="lazy:0") + 1
        y = x.to("lazy:1") * 2
        z = y.to("lazy:0") + x
        lazy_backend.mark_step()
        assert z.sum().item() == 3000.0 * (number + 1)


@needs_two_gpus
def test_both_train_side_by_side() -> None:
    losses = []
    for index in range(2):
        torch.manual_seed(0)
        model = nn.Linear(8, 1).to(f"lazy:{index}")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for number in range(20):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)).to(f"lazy:{index}")
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lazy_backend.mark_step()
            found.append(loss.detach())
        losses.append(found)
    assert [one.item() for one in losses[0]] == [one.item() for one in losses[1]]
