"""Results of captured modules that hold tensors in objects of a library, as a model's cache of keys and values does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Unseen, assert_same, unseen_number
from torch import nn
from torch.utils._pytree import tree_leaves

import lazy_backend
from lazy_backend import metrics
from lazy_backend.regions import results


class Layer:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.length, self.dtype = keys, keys.shape[0], keys.dtype


class Cache:
    """As those of transformers: layers with tensors, made while the model computes."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.offloads = False

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        empty = torch.tensor([], dtype=keys.dtype, device=keys.device)
        self.layers.append(Layer(torch.cat([empty, keys])))
        return self.layers[-1].keys


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, **options: Any) -> dict[str, Any]:
        cache = Cache()
        for layer in self.layers:
            x = cache.update(layer(x).tanh())
        return {"x": x * 2, "cache": cache, **options}


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_RECORDS", (__name__,))


def models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model()
    return model, lazy_backend.capture(copy.deepcopy(model).to("lazy"))


def step(model: nn.Module, device: str, number: int) -> Any:
    x = torch.linspace(-1, 1, 12 + 4 * (number % 2)).reshape(-1, 4).to(device) * float(number)
    made = model(x)
    made["x"].sum().backward()
    return made


class Box:
    """No record of a library that is known."""

    __module__ = "elsewhere"

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class Boxing(nn.Module):
    """Returns a tensor, and what `put` makes of another one."""

    def __init__(self, put: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.put = nn.Linear(4, 4), put

    def forward(self, x: torch.Tensor, boxes: bool = True) -> Any:
        y = self.linear(x)
        return y, self.put(y * x) if boxes else y * 3


def _cache_of(tensor: torch.Tensor) -> Cache:
    made = Cache()
    made.update(tensor)
    return made


def _in_two_places(tensor: torch.Tensor) -> Cache:
    made = _cache_of(tensor)
    made.more = made.layers  # type: ignore[attr-defined]
    return made


@pytest.mark.filterwarnings("ignore:the captured Boxing runs as written:lazy_backend.CaptureWarning")
@pytest.mark.parametrize(
    ("put", "get"),
    [
        (Box, lambda box: box.held),
        (lambda x: [_cache_of(x)] * 2, lambda pair: pair[1].layers[0].keys),
        (lambda x: Box(_cache_of(x)), lambda box: box.held.layers[0].keys),
        (_in_two_places, lambda cache: cache.more[0].keys),
        (lambda x: lambda: x, lambda closure: closure()),
    ],
    ids=["a user's", "twice", "within a user's", "its list twice", "a closure"],
)
@pytest.mark.parametrize("uses", ["both", "box"])
def test_gradients_flow_through_objects_that_are_not_taken_apart(put: Any, get: Any, uses: str) -> None:
    torch.manual_seed(0)
    real = Boxing(put)
    lazy = lazy_backend.capture(copy.deepcopy(real).to("lazy"))
    for number in range(6):
        weights = []
        for model, device in ((real, "cpu"), (lazy, "lazy")):
            weight = torch.ones(4, device=device, requires_grad=True)
            y, made = model(torch.linspace(-1, number, 8, device=device).reshape(2, 4) * weight)
            (get(made).sum() + (y.sum() if uses == "both" else 0)).backward()
            weights.append(weight)
        lazy_backend.mark_step()
        assert_same(weights[1].grad, weights[0].grad)
        assert_same(lazy.linear.weight.grad, real.linear.weight.grad)


def test_an_object_that_is_first_returned_by_a_later_call_is_an_error(unseen: Unseen) -> None:
    # its body is compared at the 64th call
    model = lazy_backend.capture(Boxing(lambda x: Box(x) if unseen_number() else x).to("lazy"))
    for _ in range(63):
        y, _ = model(torch.ones(2, 4, device="lazy", requires_grad=True))
        y.sum().backward()
        lazy_backend.mark_step()
    unseen(1.0)
    with pytest.raises(lazy_backend.CaptureError, match="returned a Box, which may hold tensors"):
        model(torch.ones(2, 4, device="lazy", requires_grad=True))


@pytest.mark.parametrize("count", [2, 3])
def test_a_tensor_that_is_given_several_times_has_one_gradient(count: int) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0]))

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            product = self.weight
            for one in given:
                product = product * one
            return product

    real, lazy = Product(), lazy_backend.capture(Product().to("lazy"))
    for number in range(70):  # the 64th call is compared with its body
        leaves = []
        for model, device in ((real, "cpu"), (lazy, "lazy")):
            x = torch.tensor([float(number)], device=device, requires_grad=True)
            model(*[x] * count).sum().backward()
            leaves.append(x)
        lazy_backend.mark_step()
        assert_same(leaves[1].grad, leaves[0].grad)
        assert_same(lazy.weight.grad, real.weight.grad)


def test_what_is_returned_in_an_object_is_made_anew_by_each_replay() -> None:
    real, lazy = models()
    kept = []
    for number in range(16):
        expected, found = step(real, "cpu", number), step(lazy, "lazy", number)
        lazy_backend.mark_step()
        assert type(found["cache"]) is Cache
        kept.append((expected["cache"], found["cache"]))
        for one, other in zip(real.parameters(), lazy.parameters(), strict=True):
            assert_same(other.grad, one.grad)
    assert metrics.counter_value("RegionJump") >= 8
    for expected_cache, cache in kept:  # none was written by a later call
        assert cache.offloads is False
        assert len(cache.layers) == 3
        for expected_layer, layer in zip(expected_cache.layers, cache.layers, strict=True):
            assert_same(layer.keys.detach(), expected_layer.keys.detach())
            assert (layer.length, layer.dtype) == (expected_layer.length, expected_layer.dtype)
    assert len({id(layer) for _, cache in kept for layer in cache.layers}) == 48


def test_gradients_flow_through_what_the_object_holds() -> None:
    real, lazy = models()
    for number in range(8):
        for model, device in ((real, "cpu"), (lazy, "lazy")):
            model.zero_grad()
            made = model(torch.linspace(-1, 1, 12).reshape(3, 4).to(device) * float(number))
            (made["x"].sum() + (made["cache"].layers[0].keys ** 2).sum()).backward()
        lazy_backend.mark_step()
        for one, other in zip(real.parameters(), lazy.parameters(), strict=True):
            assert_same(other.grad, one.grad)
    assert metrics.counter_value("RegionJump") > 0


def test_an_object_that_is_an_argument_too_is_never_replayed() -> None:
    _, lazy = models()
    mine = Cache()
    for number in range(6):
        with torch.no_grad():
            made = lazy(torch.ones(3, 4, device="lazy") * float(number), mine=mine)
        lazy_backend.mark_step()
        assert type(made["mine"]) is Cache
    assert metrics.counter_value("RegionJump") == 0


class Twice(Model):
    def forward(self, x: torch.Tensor, **options: Any) -> dict[str, Any]:
        made = super().forward(x)
        return {**made, "again": made["cache"]}


@pytest.mark.filterwarnings("ignore:the captured Twice runs as written")
@pytest.mark.parametrize("gradients", [True, False])
def test_an_object_that_is_returned_twice_stays_one(gradients: bool) -> None:
    lazy = lazy_backend.capture(Twice().to("lazy"))
    for number in range(6):
        with torch.set_grad_enabled(gradients):
            made = lazy(torch.ones(3, 4, device="lazy") * float(number))
        if gradients:
            made["x"].sum().backward()
        lazy_backend.mark_step()
        assert made["again"] is made["cache"]


class Holder(Model):
    """Fills a cache of its own, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: torch.Tensor, **options: Any) -> dict[str, Any]:
        del self.cache.layers[:]
        return {"x": self.cache.update(self.layers[0](x)) * 2, "cache": self.cache}


KEPT: dict[str, Any] = {"cache": Cache()}


class Global(Model):
    def forward(self, x: torch.Tensor, **options: Any) -> dict[str, Any]:
        del KEPT["cache"].layers[:]
        return {"x": KEPT["cache"].update(self.layers[0](x)) * 2, "cache": KEPT["cache"]}


@pytest.mark.filterwarnings("ignore:the captured .* runs as written", "ignore:.* ran .* as written")
@pytest.mark.parametrize("kind", [Holder, Global])
@pytest.mark.parametrize("gradients", [True, False])
def test_an_object_that_lives_on_is_returned_itself(kind: type[Model], gradients: bool) -> None:
    module = kind().to("lazy")
    lazy = lazy_backend.capture(module)
    for number in range(8):
        x = torch.ones(3, 4, device="lazy") * float(number)
        with torch.set_grad_enabled(gradients):
            made = lazy(x)
        if gradients:
            made["x"].sum().backward()
        lazy_backend.mark_step()
        kept = module.cache if kind is Holder else KEPT["cache"]
        assert made["cache"] is kept
        assert_same(kept.layers[0].keys.detach(), module.layers[0](x).detach().cpu())
    assert metrics.counter_value("RegionJump") == 0


# Results without gradients, beside one that has them: as of vector quantisation and mixtures of experts.
BESIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "an index": lambda z: z.argmax(-1),
    "a mask": lambda z: z > 0,
    "detached": lambda z: z.detach().sigmoid(),
    "a number": lambda z: (z > 0).sum(),
    "weights and indices": lambda z: list(z.detach().topk(2)),
    "in a dict": lambda z: {"order": z.argsort(-1), "mean": z.detach().mean()},
}


@pytest.mark.parametrize("held", ["during the backward", "during the next step", "a part of it"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_result_without_a_gradient_that_the_loop_holds_is_replayed(name: str, held: str) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            z = self.linear(x)
            return z.tanh(), BESIDE[name](z)

    torch.manual_seed(0)
    real = Beside()
    lazy = lazy_backend.capture(copy.deepcopy(real).to("lazy"))
    kept: list[list[Any]] = [[], []]
    for number in range(8):
        for model, device, others in ((real, "cpu", kept[0]), (lazy, "lazy", kept[1])):
            model.zero_grad()
            z, beside = model(torch.linspace(-1, number, 12).reshape(3, 4).to(device))
            found = tree_leaves(beside)
            if held == "a part of it":
                found = [one.reshape(-1)[:1] for one in found]
                del beside
            (z.square() * found[0].reshape(-1)[0]).mean().backward()
            if held == "during the next step":
                others += found
            else:
                others += [one.cpu() for one in found]
            del found
        lazy_backend.mark_step()
        assert_same(lazy.linear.weight.grad, real.linear.weight.grad)
    assert metrics.counter_value("RegionJump") >= 10
    assert_same(kept[1], kept[0])


def test_no_elements_are_no_data() -> None:
    for dtype in (torch.float32, torch.int64):
        made = torch.tensor([], dtype=dtype, device="lazy")
        assert made.tolist() == []
        assert made.cpu().dtype == dtype
    grown = torch.cat([torch.empty(0, 3).to("lazy"), torch.ones(2, 3, device="lazy")])
    assert_same(grown, torch.ones(2, 3))
    with pytest.raises(RuntimeError):
        torch.empty(0, 3, device="lazy").copy_(torch.ones(2, 2))
