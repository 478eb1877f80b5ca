"""Autograd over lazy tensors: the same gradients, hooks and errors as eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import NoSync, Program, Sync, SyncAt, assert_like_eager, assert_same, count, grid
from torch.utils.checkpoint import checkpoint

import lazy_backend

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaf(device: str, *shape: int) -> torch.Tensor:
    return grid(device, *shape).div_(10).requires_grad_()


@program
def backward(device: str, sync: Sync):
    x, w = leaf(device, 4, 3), leaf(device, 3, 2)
    loss = torch.tanh(x @ w).sum()
    sync()
    loss.backward()
    sync()
    return loss, x.grad, w.grad


@program
def gradients_accumulate(device: str, sync: Sync):
    w = leaf(device, 3)
    for factor in (1.0, 2.0, 3.0):
        (w * w * factor).sum().backward()
        sync()
    return (w.grad,)


@program
def gradient_set_to_zero(device: str, sync: Sync):
    w = leaf(device, 3)
    (w * w).sum().backward()
    sync()
    w.grad.zero_()
    (w**3).sum().backward()
    sync()
    return (w.grad,)


@program
def gradient_with_a_seed(device: str, sync: Sync):
    x = leaf(device, 4, 3)
    y = x.exp()
    sync()
    y.backward(grid(device, 4, 3))
    return (x.grad,)


@program
def double_backward(device: str, sync: Sync):
    x = leaf(device, 5)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    sync()
    (second,) = torch.autograd.grad((first * first).sum(), x)
    sync()
    return first, second


@program
def graph_used_twice(device: str, sync: Sync):
    x = leaf(device, 5)
    y = x.sin().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    sync()
    second = torch.autograd.grad(y, x)
    return first, second


@program
def gradient_through_views(device: str, sync: Sync):
    x = leaf(device, 4, 6)
    y = (x.t()[1:3] * x[:2, :4]).sum() + x.diagonal().prod() + x.unfold(1, 2, 2).cos().sum()
    sync()
    y.backward()
    return (x.grad,)


@program
def gradient_through_in_place(device: str, sync: Sync):
    x = leaf(device, 4, 6)
    y = x * 1
    y[1:3].mul_(2)
    sync()
    y.add_(x).relu_()
    sync()
    y.pow(2).sum().backward()
    return y, x.grad


@program
def gradient_through_indexing(device: str, sync: Sync):
    x = leaf(device, 4, 6)
    index = torch.tensor([3, 1, 1]).to(device)
    y = x[index].sum() + x.index_select(1, index).exp().sum() + torch.gather(x, 0, index[None]).sum()
    sync()
    y.backward()
    return (x.grad,)


@program
def tensor_hooks(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x * 2
    y.register_hook(lambda grad: grad * 10)
    x.register_hook(lambda grad: grad + 1)
    sync()
    y.sum().backward()
    return (x.grad,)


@program
def accumulated_gradient_hooks(device: str, sync: Sync):
    x, seen = leaf(device, 4), []
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 2))
    (x * x).sum().backward()
    sync()
    return x.grad, seen


@program
def module_hooks(device: str, sync: Sync):
    model = torch.nn.Linear(3, 2).to(device)
    seen = []
    model.register_forward_hook(lambda module, args, output: output * 2)
    model.register_full_backward_hook(lambda module, grads_in, grads_out: seen.append(grads_out[0] + 0))
    out = model(leaf(device, 4, 3))
    sync()
    out.sum().backward()
    sync()
    return out, seen, model.weight.grad


@program
def retained_gradient(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x * 3
    y.retain_grad()
    sync()
    y.sin().sum().backward()
    return x.grad, y.grad


@program
def checkpointed(device: str, sync: Sync):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.0), torch.nn.Tanh()).to(device)
    x = leaf(device, 4, 3)
    out = checkpoint(model, x, use_reentrant=False)
    sync()
    out.sum().backward()
    return out, x.grad, model[0].weight.grad


@program
def checkpointed_reentrant(device: str, sync: Sync):
    x = leaf(device, 4, 3)
    out = checkpoint(torch.sin, x, use_reentrant=True)
    sync()
    out.sum().backward()
    return out, x.grad


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class AddOneInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


@program
def custom_function(device: str, sync: Sync):
    x = leaf(device, 4)
    y = Cube.apply(x)
    sync()
    y.sum().backward()
    return y, x.grad


@program
def custom_function_in_place(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x * 2
    z = AddOneInPlace.apply(y)
    sync()
    (z * z).sum().backward()
    return y, z, x.grad


@program
def without_gradient(device: str, sync: Sync):
    x = leaf(device, 4)
    with torch.no_grad():
        y = x * 2
        x.add_(1)
    sync()
    return x, y


@program
def inference(device: str, sync: Sync):
    x = leaf(device, 4)
    with torch.inference_mode():
        y = x * 2
        y[1:].add_(1)
        sync()
        z = y.t() + 1
    return y, z


@program
def detached_branch(device: str, sync: Sync):
    x = leaf(device, 4)
    y = x * x.detach()
    sync()
    y.sum().backward()
    return (x.grad,)


@program
def batch_norm_and_conv(device: str, sync: Sync):
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.MaxPool2d(2)).to(device)
    x = leaf(device, 2, 2, 8, 8)
    out = model(x)
    sync()
    out.square().sum().backward()
    sync()
    return out, x.grad, model[0].weight.grad, model[1].running_mean, model[1].running_var


@program
def functional_gradients(device: str, sync: Sync):
    x = grid(device, 4)
    gradient = torch.func.grad(lambda t: (t**3).sum())(x)
    sync()
    return (gradient,)


@program
def vmapped(device: str, sync: Sync):
    x = grid(device, 4, 3)
    out = torch.func.vmap(lambda row: row.sin() @ row)(x)
    sync()
    return (out,)


@program
def complex_gradient(device: str, sync: Sync):
    x = torch.complex(torch.arange(3.0), torch.ones(3)).to(device).requires_grad_()
    y = (x * x.conj()).real.sum() + x.abs().sum()
    sync()
    y.backward()
    return (x.grad,)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("make_sync", [NoSync, SyncAt])
def test_like_eager(name: str, make_sync: type) -> None:
    assert_like_eager(PROGRAMS[name], make_sync())


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_like_eager(name: str) -> None:
    lazy_backend.config.backend = "aot_eager"
    for _ in range(3):
        assert_like_eager(PROGRAMS[name], NoSync())


def test_checkpoint_recomputes_the_same_dropout() -> None:
    x = torch.ones(64, device="lazy", requires_grad=True)
    out = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
    out.sum().backward()
    assert_same(x.grad, out.detach().cpu())


def test_a_backward_is_part_of_the_step() -> None:
    x = leaf("lazy", 4)
    with count("GraphCut") as cuts:
        (x * x).sum().backward()
        lazy_backend.mark_step()
    assert cuts() == 0


def test_a_gradient_is_lazy() -> None:
    x = leaf("lazy", 4)
    (x * x).sum().backward()
    assert isinstance(x.grad, lazy_backend.LazyTensor)


def error_of(function, device: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(device)
    # PyTorch's C++ prints a type's name, which is its own for each device
    return str(caught.value).split("\n")[0].replace("[LazyFloatType [4]]", "[torch.FloatTensor [4]]")


def saved_then_written(device: str) -> None:
    x = leaf(device, 4)
    y = x * 1
    z = y * y
    y.add_(1)
    z.sum().backward()


def leaf_written(device: str) -> None:
    leaf(device, 4).add_(1)


def view_of_leaf_written(device: str) -> None:
    leaf(device, 4)[1:].add_(1)


def graph_freed(device: str) -> None:
    y = leaf(device, 4).exp().sum()
    y.backward()
    y.backward()


def no_gradient(device: str) -> None:
    grid(device, 4).sum().backward()


def not_a_scalar(device: str) -> None:
    (leaf(device, 4) * 2).backward()


def inference_saved(device: str) -> None:
    with torch.inference_mode():
        x = grid(device, 4)
    leaf(device, 4) * x


def int_requires_grad(device: str) -> None:
    grid(device, 4, dtype=torch.int64).requires_grad_()


@pytest.mark.parametrize(
    "function",
    [
        saved_then_written, leaf_written, view_of_leaf_written, graph_freed, no_gradient, not_a_scalar, inference_saved,
        int_requires_grad,
    ],
)  # fmt: skip
def test_errors_like_eagers(function) -> None:
    assert error_of(function, "lazy") == error_of(function, "cpu")


def test_the_version_counter_counts_like_eagers() -> None:
    def versions(device: str) -> list[int]:
        x = grid(device, 4)
        view = x[1:]
        x.add_(1)
        view.mul_(2)
        y = x.detach()
        y.zero_()
        return [x._version, view._version, y._version]

    assert versions("lazy") == versions("cpu")


def test_a_write_through_data_is_not_tracked() -> None:
    x = leaf("lazy", 4)
    y, version = (x * x).sum(), x._version
    x.data.add_(1)
    y.backward()
    assert x._version == version
    assert_same(x.grad, 2 * x.detach().cpu())


def test_a_sync_is_no_new_version() -> None:
    x = leaf("lazy", 4)
    y = x * 1
    z = y * y
    lazy_backend.mark_step(wait=True)
    z.sum().backward()
    assert_same(x.grad, x.detach().cpu() * 2)


def test_anomaly_mode_works() -> None:
    x = leaf("lazy", 4)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        (x * x).sum().backward()
    assert_same(x.grad, x.detach().cpu() * 2)


def test_gradcheck_passes() -> None:
    x = torch.arange(1.0, 5.0, dtype=torch.float64).to("lazy").requires_grad_()
    assert torch.autograd.gradcheck(torch.sin, x)


def test_saved_tensors_hooks_see_lazy_tensors() -> None:
    seen = []

    def pack(tensor):
        seen.append(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        leaf("lazy", 4).exp()
    assert seen == [lazy_backend.LazyTensor]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.hfft(torch.complex(x, x)).sum(),  # its backward views a conjugated tensor as real
        lambda x: torch.sgn(x).sum(),  # its gradient is a zero that autograd makes up
    ],
)
def test_gradients_that_take_odd_ways(function) -> None:
    gradients = []
    for device in ("lazy", "cpu"):
        x = leaf(device, 4)
        gradients.append(torch.autograd.grad(function(x), x)[0])
    assert_same(*gradients)


# ----- views whose grad_fn is made again


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda base: base.t(),
    "select": lambda base: base[0],
    "chain": lambda base: base.t()[1:].unsqueeze(0),
    "expand": lambda base: base.expand(2, 2, 3),
    "unbind": lambda base: base.unbind()[1],
    "detach": lambda base: base.detach(),
    "data": lambda base: base.data,
}
CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "none": lambda leaf, base, view: None,
    "base written without gradients": torch.no_grad()(lambda leaf, base, view: base.add_(1)),
    "view written without gradients": torch.no_grad()(lambda leaf, base, view: view.add_(1)),
    "base written": lambda leaf, base, view: base.mul_(2),
    "view written": lambda leaf, base, view: view.mul_(2),
    "view detached": lambda leaf, base, view: view.detach_(),
    "data written": lambda leaf, base, view: base.data.add_(1),
    "data set": lambda leaf, base, view: setattr(base, "data", torch.ones(2, 3, device=base.device)),
}


def around_changes(device: str, names: tuple[str, ...], is_leaf: bool, mode: Any, view_of: Any) -> list[Any]:
    """What a view and its gradients are after changes, or the type of the error."""
    leaf = (torch.arange(6.0, device=device).reshape(2, 3) + 1).requires_grad_()
    base = leaf if is_leaf else leaf * 2
    try:
        with mode():
            view = view_of(base)
        for name in names:
            CHANGES[name](leaf, base, view)
        found = [view.requires_grad, view.is_leaf, view._is_view(), view]
        ((view * view).sum() + (base * 3).sum()).backward()
    except RuntimeError as error:
        return [type(error)]
    return [*found, leaf.grad]


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_whose_grad_fn_is_made_again(name: str, mode: Any, is_leaf: bool) -> None:
    for names in itertools.product(CHANGES, repeat=2):
        found, expected = (around_changes(device, names, is_leaf, mode, VIEWS[name]) for device in ("lazy", "cpu"))
        assert_same(found, expected)
