"""Autograd's rules, and what modules ask of their parameters: as eager's, or refused in the same words."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, grid
from test_manners import Case, outcome, printed, rows
from torch import nn
from torch.nn.utils import prune

import lazy_backend


@pytest.fixture(params=["always", "never"])
def background(request: pytest.FixtureRequest) -> None:
    """In the background and on the calling thread, which has the user's modes."""
    lazy_backend.config.run_in_background = request.param


# ----- autograd's rules


def leaf(device: str) -> torch.Tensor:
    return grid(device, 3).requires_grad_()


def set_grad(device: str, grad: Any, requires_grad: bool = True) -> Any:
    x = grid(device, 3).requires_grad_(requires_grad)
    x.grad = grad
    return x.grad


def twice(device: str) -> None:
    y = (leaf(device) ** 2).sum()
    y.backward()
    y.backward()


def overwritten(device: str) -> None:
    x = leaf(device)
    y = x.exp()
    z = y.sum()
    y.add_(1)
    (y * z).sum().backward()


def retained(device: str) -> Any:
    y = leaf(device) * 2
    y.retain_grad()
    (y * y).sum().backward()
    return y.grad, y.retains_grad, y.is_leaf


def hooked(device: str) -> Any:
    x, seen = leaf(device), []
    x.register_hook(lambda grad: grad * 2)
    x.register_post_accumulate_grad_hook(lambda x: seen.append(tuple(x.grad.shape)))
    (x * x).sum().backward()
    return x.grad, seen


def other(device: str) -> str:
    return "cpu" if device == "lazy" else "lazy"


AUTOGRAD = {
    "grad": lambda device: set_grad(device, grid(device, 3)),
    "no_grad": lambda device: set_grad(device, None),
    "grad_of_another_shape": lambda device: set_grad(device, grid(device, 2)),
    "grad_of_another_dtype": lambda device: set_grad(device, grid(device, 3).double()),
    "grad_that_is_a_number": lambda device: set_grad(device, 1),
    "grad_where_none_is_needed": lambda device: set_grad(device, grid(device, 3), requires_grad=False),
    "grad_that_is_itself": lambda device: setattr(x := leaf(device), "grad", x),
    "ints_need_no_grad": lambda device: grid(device, 3).long().requires_grad_(),
    "ints_made_with_grad": lambda device: torch.zeros(2, dtype=torch.int64, device=device, requires_grad=True),
    "a_result_needs_grad": lambda device: (leaf(device) * 2).requires_grad_(False),
    "in_place_on_a_leaf": lambda device: leaf(device).add_(1),
    "in_place_on_a_leafs_view": lambda device: leaf(device)[0].add_(1),
    "backward_without_graph": lambda device: grid(device, 3).sum().backward(),
    "backward_of_a_vector": lambda device: (leaf(device) * 2).backward(),
    "backward_twice": twice,
    "backward_with_another_shape": lambda device: (leaf(device) * 2).backward(torch.ones(2, device=device)),
    "backward_with_another_dtype": lambda device: (leaf(device) * 2).backward(grid(device, 3).double()),
    "backward_of_ints": lambda device: (leaf(device) * 2).long().sum().backward(),
    "grad_of_the_unused": lambda device: torch.autograd.grad((leaf(device) ** 2).sum(), leaf(device)),
    "grad_allowing_unused": lambda device: torch.autograd.grad(leaf(device).sum(), leaf(device), allow_unused=True),
    "second_order": lambda device: torch.autograd.grad(((x := leaf(device)) ** 2).sum(), x, create_graph=True),
    "batched_grads": lambda device: torch.autograd.grad(
        (x := leaf(device)) ** 2, x, torch.eye(3, device=device), is_grads_batched=True
    ),
    "retained": retained,
    "hooks": hooked,
    "data_is_detached": lambda device: [(x := leaf(device)).data.requires_grad, x.data.add_(1), x, x._version],
    "data_of_another_shape": lambda device: (setattr(x := leaf(device), "data", grid(device, 2, 2)), x)[1],
    "data_of_another_dtype": lambda device: (setattr(x := grid(device, 3), "data", grid(device, 3).double()), x)[1],
    "data_of_ints_in_a_leaf": lambda device: (setattr(x := leaf(device), "data", grid(device, 3).long()), x)[1],
    "data_shares": lambda device: (setattr(x := grid(device, 3), "data", y := grid(device, 3)), y.add_(1), x)[2],
    "data_none": lambda device: setattr(grid(device, 3), "data", None),
    "checkpoint": lambda device: (
        torch.utils.checkpoint.checkpoint(lambda y: (y * y).sum(), x := leaf(device), use_reentrant=False).backward(),
        x.grad,
    )[1],
    "gradcheck": lambda device: torch.autograd.gradcheck(torch.square, leaf(device).double().detach().requires_grad_()),
}  # fmt: skip


@rows(AUTOGRAD)
def test_autograd_rule_as_eager(case: Case) -> None:
    assert_same(outcome(case, "lazy"), outcome(case, "cpu"))


def test_a_gradient_of_another_device_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match="attempting to assign a gradient with device type 'cpu' to a tensor with device type 'lazy'"
    ):
        set_grad("lazy", grid("cpu", 3))


def test_a_value_overwritten_before_backward_is_refused() -> None:
    for device in ("lazy", "cpu"):
        with pytest.raises(RuntimeError, match=r"modified by an inplace.* is at version 1; expected version 0"):
            overwritten(device)


def test_a_cpu_tensors_data_is_not_set_to_lazy_data() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = grid("lazy", 3)
    assert_same(x, torch.ones(3))


def test_deleting_a_gradient() -> None:
    x = leaf("lazy")
    x.sum().backward()
    del x.grad
    assert x.grad is None


def test_a_gradient_is_the_very_tensor_assigned() -> None:
    x, grad = leaf("lazy"), grid("lazy", 3)
    x.grad = grad
    assert x.grad is grad


def test_saved_tensors_move_to_the_cpu_and_back(background) -> None:
    x = leaf("lazy")
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).sum()
        lazy_backend.mark_step()
    y.backward()
    assert_same(x.grad, 2 * torch.arange(3.0))


# ----- modules


def symmetric(model: nn.Linear) -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    nn.utils.parametrize.register_parametrization(model, "weight", Symmetric())
    return model


def pruned(model: nn.Linear) -> nn.Module:
    prune.l1_unstructured(model, "weight", 0.5)
    return model


norms = nn.utils.parametrizations
REPARAMETRISED = {
    "parametrize": symmetric,
    "weight_norm": norms.weight_norm,
    "orthogonal": norms.orthogonal,
    "cayley": lambda model: norms.orthogonal(model, orthogonal_map="cayley"),
    "matrix_exp": lambda model: norms.orthogonal(model, orthogonal_map="matrix_exp"),
    "old_weight_norm": nn.utils.weight_norm,
    "prune": pruned,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("made_on", ["cpu", "device"])
@pytest.mark.parametrize("change", REPARAMETRISED.values(), ids=REPARAMETRISED.keys())
def test_reparametrised_module_trains_as_eager(change: Callable[[nn.Linear], nn.Module], made_on: str) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        if made_on == "cpu":
            model = change(model).to(device)
        else:
            model = change(model.to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(grid(device, 2, 3) / 10).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses("lazy") == pytest.approx(losses("cpu"), rel=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.parametrize("normed", [norms.spectral_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize(
    "make", [lambda normed: normed(nn.Linear(3, 3)).to("lazy"), lambda normed: normed(nn.Linear(3, 3).to("lazy"))]
)
def test_a_spectral_norm_is_one(normed, make) -> None:
    # its power iteration starts from random vectors, which are not eager's
    model = make(normed)
    for _ in range(40):
        model(grid("lazy", 2, 3))
        lazy_backend.mark_step()
    assert torch.linalg.matrix_norm(model.weight, 2).item() == pytest.approx(1, rel=0.05)


def test_removing_a_parametrization() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).to("lazy"))
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_lazy


def test_a_cached_parametrization() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).to("lazy"))
    with nn.utils.parametrize.cached():
        assert model.weight is model.weight


@pytest.mark.parametrize(("source", "target"), [("cpu", "lazy"), ("lazy", "cpu")])
def test_moving_keeps_attributes_of_parameters(source: str, target: str) -> None:
    model = nn.Linear(3, 2).to(source)
    model.weight.decay = False
    model.to(target)
    assert model.weight.decay is False


@pytest.mark.parametrize(("source", "target"), [("cpu", "lazy"), ("lazy", "cpu")])
def test_moving_keeps_hooks_of_parameters(source: str, target: str) -> None:
    model, seen = nn.Linear(3, 2).to(source), []
    model.weight.register_hook(lambda grad: grad * 0)
    model.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.device.type))
    model.to(target)
    model(torch.ones(1, 3, device=target)).sum().backward()
    assert not model.weight.grad.any()
    assert seen == [target]


def test_a_hook_of_a_tied_parameter_is_called_once_after_moves() -> None:
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    model[1].weight = model[0].weight
    handle = model[0].weight.register_hook(lambda grad: seen.append(1))
    model.to("lazy").to("lazy").double()
    model(grid("lazy", 3, dtype=torch.float64)).sum().backward()
    handle.remove()
    model(grid("lazy", 3, dtype=torch.float64)).sum().backward()
    assert seen == [1]


def test_an_optimizer_in_the_backward_pass() -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(grid(device, 3)).square().sum().backward()
            lazy_backend.mark_step()
        return [p.detach() for p in model.parameters()]

    assert_same(trained("lazy"), trained("cpu"))


@pytest.mark.parametrize(("source", "target"), [("cpu", "lazy"), ("lazy", "cpu")])
def test_weakly_referenced_parameters_move(source: str, target: str) -> None:
    model = nn.Linear(3, 2).to(source)
    reference = weakref.ref(model.weight)
    model.to(target)
    assert reference() is model.weight
    assert model.weight.device.type == target


@pytest.mark.parametrize(("source", "target"), [("cpu", "lazy"), ("lazy", "cpu")])
def test_a_module_moves_beside_a_live_graph(source: str, target: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(source)
    loss = model(torch.ones(1, 3, device=source)).sum()
    model.to(target)
    model(torch.ones(1, 3, device=target)).sum().backward()
    assert model[0].weight.grad.device.type == target
    assert loss.item() == pytest.approx(loss.item())


def test_moving_in_inference_mode_leaves_no_other_mess_than_eager() -> None:
    eager, lazy = nn.Linear(3, 2), nn.Linear(3, 2)
    with torch.inference_mode():
        eager.double()
        lazy.to("lazy")
    assert lazy.weight.is_inference() == eager.weight.is_inference()


def test_functional_call() -> None:
    state = {"weight": torch.ones(2, 3, device="lazy"), "bias": torch.zeros(2, device="lazy")}
    made = torch.func.functional_call(nn.Linear(3, 2).to("lazy"), state, (grid("lazy", 3),))
    assert_same(made, torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_an_ensemble(device: str) -> None:
    models = [nn.Linear(3, 2).to(device) for _ in range(2)]
    state = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    x = grid(device, 4, 3)
    made = torch.vmap(lambda p, b: torch.func.functional_call(skeleton, (p, b), (x,)))(*state)
    torch.testing.assert_close(made, torch.stack([model(x) for model in models]))


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(lambda x: (x * x).sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda x: x * 2 + x.sum())(x.view(3, 1)),
    "jacrev": lambda x: torch.func.jacrev(torch.square)(x),
    "jvp": lambda x: torch.func.jvp(torch.square, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: torch.func.vjp(torch.square, x)[1](torch.ones_like(x)),
    "hessian": lambda x: torch.func.hessian(lambda x: (x**3).sum())(x),
    "a_read_inside": lambda x: torch.func.grad(lambda x: (x * x if x.sum().item() > 1 else x).sum())(x),
    "a_mask_from_outside": lambda x: torch.func.grad(lambda y: y[x > 0].sum())(x),
    "an_upload_inside": lambda x: torch.vmap(lambda y: y + torch.tensor([1.0, 2.0], device=x.device))(x.view(3, 1)),
    "in_place": lambda x: torch.vmap(lambda y: y.add_(1))(x),
    "to_the_cpu_inside": lambda x: torch.vmap(lambda y: y.cpu() * 2)(x),
    "a_read_of_each": lambda x: outcome(lambda _: torch.vmap(lambda y: y.item())(x), ""),
    "a_draw_of_each": lambda x: torch.vmap(lambda y: y + torch.rand_like(y), randomness="different")(x).shape,
    "printed_inside": lambda x: printed_inside(x),
    "functionalize": lambda x: torch.func.functionalize(lambda x: x.clone().add_(1))(x),
}  # fmt: skip


def printed_inside(x: torch.Tensor) -> str:
    seen = []
    torch.vmap(lambda y: (seen.append(printed(y)), y)[1])(x)
    return seen[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_function_transform_as_eager(case: Callable[[torch.Tensor], Any]) -> None:
    assert_same(case(grid("lazy", 3)), case(grid("cpu", 3)))


def test_state_dict_hooks() -> None:
    model = nn.Linear(3, 2).to("lazy")
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(extra=torch.ones(1, device="lazy")))
    model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra"))
    state = model.state_dict()
    assert "extra" in state
    assert model.load_state_dict(state).missing_keys == []


def test_state_dict_keeps_variables() -> None:
    model = nn.Linear(3, 2).to("lazy")
    assert model.state_dict(keep_vars=True)["weight"] is model.weight


def clipped(device: str, clip: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    (model(torch.ones(2, 3, device=device)) * options.pop("scale", 100)).sum().backward()
    return clip(model.parameters(), 1.0, **options), model.weight.grad


MODULES = {
    "clip_norm": lambda device: clipped(device, nn.utils.clip_grad_norm_),
    "clip_norm_by_one": lambda device: clipped(device, nn.utils.clip_grad_norm_, foreach=False),
    "clip_norm_inf": lambda device: clipped(device, nn.utils.clip_grad_norm_, norm_type=float("inf")),
    "clip_finite": lambda device: clipped(device, nn.utils.clip_grad_norm_, error_if_nonfinite=True),
    "clip_not_finite": lambda d: clipped(d, nn.utils.clip_grad_norm_, scale=float("nan"), error_if_nonfinite=True),
    "clip_value": lambda device: clipped(device, nn.utils.clip_grad_value_),
    "total_norm": lambda device: nn.utils.get_total_norm([grid(device, 3), grid(device, 3)]),
    "a_vector_of_nothing": lambda device: nn.utils.vector_to_parameters([1.0], [nn.Parameter(grid(device, 3))]),
    "a_tensor_as_parameter": lambda device: setattr(nn.Linear(2, 2).to(device), "bias", "no tensor"),
    "a_state_of_another_shape": lambda device: nn.Linear(3, 2).to(device).load_state_dict(
        {"weight": torch.ones(3, 3, device=device), "bias": torch.ones(2, device=device)}
    ),
    "swap": lambda device: (torch.utils.swap_tensors(x := grid(device, 3), y := grid(device, 2)), x, y)[1:],
}  # fmt: skip


@rows(MODULES)
def test_module_function_as_eager(case: Case) -> None:
    assert_same(outcome(case, "lazy"), outcome(case, "cpu"))


def test_parameters_of_two_devices_make_no_vector() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        nn.utils.parameters_to_vector([nn.Parameter(grid("lazy", 3)), nn.Parameter(grid("cpu", 3))])


def test_swapping_with_a_cpu_tensor() -> None:
    x, y = nn.Parameter(grid("lazy", 3)), nn.Parameter(torch.ones(2))
    torch.utils.swap_tensors(x, y)
    assert isinstance(x, nn.Parameter)
    assert isinstance(y, nn.Parameter)
    assert_same([x.detach(), y.detach() + 1], [torch.ones(2), torch.arange(3.0) + 1])
