"""A structure guard notices whatever a user changes in modules and optimizers, says what, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lazy_backend.replay.structure import Structure, StructureGuard


@dataclass
class Config:
    scale: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Loader:
    """Something that is no configuration: it holds what is not plain."""

    def __init__(self) -> None:
        self.iterator = iter([1, 2])
        self.count = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
        self.plain_list = [nn.Dropout(0.5)]
        self.act = torch.tanh
        self.scale = 0.0
        self.many = 1234567
        self.table = {"a": [1, (2, 3)], 4: None}
        self.config = Config()
        self.names = {"x", "y"}
        self.memory = torch.zeros(3)
        self.loader = Loader()
        self.number = np.float64(2.0)


def changes(net: Any) -> dict[str, Callable[[], Any]]:
    """What a user may do to a net, by what the guard says then."""

    def swap() -> None:
        net.layers[0], net.layers[1] = net.layers[1], net.layers[0]

    def rename() -> None:
        net.zoom = net.__dict__.pop("number")

    return {
        "Net.layers.0 was a Linear and is a Identity": lambda: net.layers.__setitem__(0, nn.Identity()),
        "Net.layers.0 was a Linear and is a BatchNorm1d": swap,
        "Net.layers.2 was added": lambda: net.layers.append(nn.ReLU()),
        "Net.layers.1 was removed": lambda: net.layers.__delitem__(1),
        "Net.plain_list[0].training changed from True to False": lambda: net.plain_list[0].eval(),
        "Net.plain_list[0].p changed from 0.5 to 0.25": lambda: setattr(net.plain_list[0], "p", 0.25),
        "Net.act is another builtin_function_or_method": lambda: setattr(net, "act", torch.relu),
        "Net.scale changed from 0.0 to -0.0": lambda: setattr(net, "scale", -0.0),
        "Net.many changed from 1234567 to 1234567.0": lambda: setattr(net, "many", 1234567.0),
        "Net.table['a'][1][1] changed from 3 to 4": lambda: net.table["a"].__setitem__(1, (2, 4)),
        "Net.table['new'] was added": lambda: net.table.update(new=1),
        "Net.config.scale changed from 1.0 to 2.0": lambda: setattr(net.config, "scale", 2.0),
        "Net.config.sizes[2] was added": lambda: net.config.sizes.append(3),
        "Net.names": lambda: net.names.add("z"),
        "Net.memory is another Tensor": lambda: setattr(net, "memory", torch.zeros(3)),
        "Net.loader is another Loader": lambda: setattr(net, "loader", Loader()),
        "Net.number was replaced by Net.zoom": rename,
        "Net.layers.0.weight is another Parameter": lambda: setattr(
            net.layers[0], "weight", nn.Parameter(net.layers[0].weight.detach())
        ),
        "Net.layers.0.bias was a Parameter and is None": lambda: setattr(net.layers[0], "bias", None),
        "Net.layers.0.bias.requires_grad changed from True to False": lambda: net.layers[0].bias.requires_grad_(False),
        "Net.layers.0.weight._backward_hooks": lambda: net.layers[0].weight.register_hook(lambda grad: grad),
        "Net.layers.0.weight._post_accumulate_grad_hooks": lambda: net.layers[
            0
        ].weight.register_post_accumulate_grad_hook(lambda grad: None),
        "Net.layers.1.running_mean is another Tensor": lambda: setattr(net.layers[1], "running_mean", torch.zeros(3)),
        "Net.layers.0._forward_pre_hooks": lambda: net.layers[0].register_forward_pre_hook(lambda module, args: None),
        "Net.layers.0._buffers['late'] was added": lambda: net.layers[0].register_buffer("late", torch.zeros(1)),
        "a Linear became a Lines": lambda: setattr(net.layers[0], "__class__", type("Lines", (nn.Linear,), {})),
        "Net.number changed from": lambda: setattr(net, "number", np.float64(3.0)),
        "Net.forward was added": lambda: setattr(net, "forward", lambda x: x),
    }


@pytest.mark.parametrize("text", changes(None))
def test_a_change_is_noticed_and_named(text: str) -> None:
    net = Net()
    guard = StructureGuard([net])
    assert guard.holds()
    changes(net)[text]()
    assert not guard.holds()
    assert text.replace("._buffers['late']", ".late") in guard.why()
    assert not guard.holds()  # it does not get used to it


def test_what_is_put_back_holds_again() -> None:
    net = Net()
    guard = StructureGuard([net])
    act, net.act = net.act, torch.relu
    assert not guard.holds()
    net.act = act
    assert guard.holds()
    assert guard.why() == ""


def test_equal_values_in_new_objects_hold() -> None:
    net = Net()
    guard = StructureGuard([net])
    net.many = int("1234567")
    net.table = {"a": [1, (2, 3)], 4: None}
    net.config = Config()
    net.names = {"y", "x"}
    net.number = np.float64(2.0)
    net.layers._modules = dict(net.layers._modules)
    assert guard.holds()
    net.config.scale = 3.0  # the new object is looked into from now on
    assert not guard.holds()


def test_what_is_not_structure_may_change() -> None:
    net = Net()
    guard = StructureGuard([net])
    with torch.no_grad():
        net.layers[0].weight.add_(1)
    net.layers[0].weight.grad = torch.ones(3, 3)
    net.loader.count += 1
    assert guard.holds()


def test_modules_within_others_are_seen_once() -> None:
    net = Net()
    seen = [type(module).__name__ for module in StructureGuard([net, net.layers]).modules]
    assert sorted(seen) == ["BatchNorm1d", "Dropout", "Linear", "ModuleList", "Net"]


def test_a_value_that_moves_from_one_container_to_the_next_is_noticed() -> None:
    net = nn.Module()
    net.first, net.second = [1, 2], [3]  # type: ignore[assignment]
    guard = StructureGuard([net])
    net.second.insert(0, net.first.pop())  # type: ignore[operator, union-attr]
    assert not guard.holds()


def test_an_optimizer() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    guard = StructureGuard([], [optimizer])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2  # a float is another guard's
    assert guard.holds()
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    assert not guard.holds()
    assert guard.why() == "SGD.param_groups[0]['params'][2] was added"
    optimizer.param_groups[0]["params"].pop()
    assert guard.holds()
    state = dict(optimizer.state)
    optimizer.state.clear()
    assert not guard.holds()
    optimizer.state.update(state)
    assert guard.holds()
    optimizer.state[net.weight] = {"momentum_buffer": torch.zeros(3, 3)}
    assert not guard.holds()
    assert guard.why() == "SGD.state[a Parameter]['momentum_buffer'] is another Tensor"


def test_what_a_call_changes_besides_tensors() -> None:
    net = Net()
    before = Structure([net], hold_tensors=False)
    net.memory = net.memory + 1
    assert before.difference(Structure([net], hold_tensors=False)) == ""
    net.many += 1
    assert before.difference(Structure([net], hold_tensors=False)) == "Net.many changed from 1234567 to 1234568"


def test_lazy_tensors_are_not_compared() -> None:
    net = Net().to("lazy")
    guard = StructureGuard([net])
    weight = net.layers[0].weight
    net.layers[0].weight = nn.Parameter(weight.detach())
    assert not guard.holds()
    net.layers[0].weight = weight
    assert guard.holds()
