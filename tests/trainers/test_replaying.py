"""Which parts of a user's model trainers have replayed without being asked."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import count
from torch import nn

import lazy_backend
from lazy_backend.integrations.replaying import replay_known_parts


class Mine(nn.Module):
    """A class that nobody knows, around its parts."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            made = part(x)
            x = made[0] if isinstance(made, tuple) else made
        return x


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def captured(model: nn.Module) -> list[str]:
    """The names of the modules that `replay_known_parts` captures."""
    replay_known_parts(model)
    return [name for name, part in model.named_modules() if part._compiled_call_impl is not None]


def test_known_classes_are_captured_as_a_whole() -> None:
    assert captured(deep()) == [""]
    assert captured(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)) == [""]


def test_of_a_users_class_the_largest_known_parts_are() -> None:
    model = Mine(deep(), nn.Linear(4, 4), Mine(nn.Linear(4, 4), deep()), nn.LSTM(4, 4))
    assert captured(model) == ["parts.0", "parts.2.parts.1", "parts.3"]  # not a layer alone, nor a list
    assert captured(model) == ["parts.0", "parts.2.parts.1", "parts.3"]


def test_what_a_user_has_changed_is_not() -> None:
    model = Mine(deep(), deep(), nn.Sequential(deep(), deep()))
    model.parts[0].forward = lambda x: x  # type: ignore[method-assign]
    model.parts[1][1] = Mine()
    model.parts[2][0].compile(backend="eager")
    assert captured(model) == ["parts.2.0", "parts.2.1"]  # the first of them compiled


def test_an_activation_of_the_users_may_read_what_nobody_checks() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, activation=lambda x: x)
    assert captured(layer) == ["self_attn"]
    assert captured(nn.TransformerEncoderLayer(4, 2, activation=nn.functional.gelu)) == [""]


def test_known_kinds_of_modules() -> None:
    torchvision = pytest.importorskip("torchvision")
    assert captured(torchvision.models.resnet18()) == [""]


def test_parts_train_as_they_do_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # eager's fused LSTM rounds otherwise
    outcomes = []
    for device, is_replayed in (("cpu", False), ("lazy", False), ("lazy", True)):
        torch.manual_seed(0)
        model = Mine(deep(), nn.Linear(4, 4), Mine(nn.Linear(4, 4), deep()), nn.LSTM(4, 4)).to(device)
        if is_replayed:
            replay_known_parts(model)
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        with count("RegionJump") as jumps:
            for number in range(12):
                optimizer.zero_grad()
                loss = model(torch.full((3, 4), number / 7).to(device).cumsum(0)).square().mean()
                loss.backward()
                optimizer.step()
                lazy_backend.mark_step()
                losses.append(loss.detach())
                model.train(number % 5 != 3)
        assert jumps() >= 24 * is_replayed
        outcomes.append(torch.stack(losses).cpu())
    assert torch.equal(outcomes[1], outcomes[0])
    assert torch.equal(outcomes[2], outcomes[0])


def with_hook(hook: Any) -> nn.Module:
    model = deep()
    model[2].register_forward_hook(hook)
    return model


def test_hooks_of_transformers_do_only_what_is_recorded() -> None:
    """As of `enable_input_require_grads`, which gradient checkpointing calls; a hook of the user's may do more."""
    modeling_utils = pytest.importorskip("transformers.modeling_utils")
    source = "def hook(module, args, made):\n    made.requires_grad_(True)\n"
    for namespace, is_known in ((vars(modeling_utils), True), (dict(globals()), False)):
        made: dict[str, Any] = {}
        exec(compile(source, "hook.py", "exec"), namespace, made)
        model = with_hook(made["hook"]).to("lazy")
        replay_known_parts(model)
        with count("RegionJump") as jumps:
            for _ in range(6):
                model(torch.ones(3, 4, device="lazy")).sum().backward()
                lazy_backend.mark_step()
        assert (jumps() > 0) is is_known


def test_a_forward_of_the_users_is_none_of_transformers_under_its_name() -> None:
    @functools.wraps(nn.Linear.forward)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * len(found)

    found: list[int] = []
    model = Mine(deep())
    model.parts[0][0].forward = forward  # type: ignore[method-assign]
    assert captured(model) == []
