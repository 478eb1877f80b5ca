"""Modules, their optimizers and their files: what reaches the device is what was built."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import assert_same, count, grid, run_program
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import lazy_backend
from lazy_backend import LazyTensor, config


class Tied(nn.Module):
    """A head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens) * self.scale)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 3) -> nn.Module:
    tokens = torch.tensor([0, 1, 2, 3]).to(device)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        lazy_backend.mark_step()
    return model


def saved(thing: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


# ----- moving a module


def test_moving_keeps_the_parameters_identity() -> None:
    model = nn.Linear(3, 2)
    weight = model.weight
    model.to("lazy")
    assert model.weight is weight
    assert isinstance(weight, LazyTensor)
    assert isinstance(weight, nn.Parameter)


def test_moving_back_keeps_the_parameters_identity() -> None:
    model = nn.Linear(3, 2)
    weight, values = model.weight, model.weight.detach().clone()
    model.to("lazy").to("cpu")
    assert model.weight is weight
    assert not isinstance(weight, LazyTensor)
    assert_same(weight.detach(), values)


@pytest.mark.parametrize(
    "back", [nn.Module.cpu, lambda model: model.to("cpu"), lambda model: model.to(torch.device("cpu"))]
)
def test_every_way_back_keeps_ties(back) -> None:
    model = back(Tied().to("lazy"))
    assert model.head.weight is model.embedding.weight


def test_moving_keeps_ties() -> None:
    model = Tied().to("lazy")
    assert model.head.weight is model.embedding.weight


def test_moving_moves_buffers() -> None:
    model = Tied().to("lazy")
    assert isinstance(model.scale, LazyTensor)
    assert model._buffers["scale"] is model.scale


def test_moving_twice_records_nothing() -> None:
    model = Tied().to("lazy")
    with count("UncachedCompile") as compiles:
        model.to("lazy")
        lazy_backend.mark_step()
    assert compiles() == 0


def test_moving_with_a_dtype() -> None:
    model = nn.Linear(3, 2).to("lazy", torch.float64)
    assert model.weight.dtype == torch.float64
    assert model(torch.ones(1, 3, dtype=torch.float64, device="lazy")).dtype == torch.float64


def test_a_lazy_module_changes_its_dtype_in_place() -> None:
    model = nn.Linear(3, 2).to("lazy")
    weight = model.weight
    model.double()
    assert model.weight is weight
    assert weight.dtype == torch.float64


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "double and back": lambda model: model.double().float(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "half and back": lambda model: model.half().float(),
    "double": lambda model: model[2].double(),
    "nothing": lambda model: model.float(),
    "the same device": lambda model: model.to(model[0].weight.device),
    "a memory format": lambda model: model.to(memory_format=torch.channels_last),
    "a function": lambda model: model._apply(lambda tensor: tensor.detach() * 2),
}


def gradients_around(convert: Callable[[nn.Module], object], device: str) -> list[torch.Tensor | int]:
    """Gradients whose backward comes after a conversion of the module, and how often a hook was called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 2)).to(device)
    calls: list[torch.Size] = []
    model[0].weight.register_hook(lambda gradient: calls.append(gradient.shape))
    x = torch.ones(1, 2, 5, 5, device=device, requires_grad=True)
    loss = model(x).pow(2).sum()
    convert(model)
    loss.backward()
    return [x.grad.cpu(), *(parameter.grad.cpu() for parameter in model.parameters()), len(calls)]


@pytest.mark.parametrize("way", ["recorded", "run", "eager mode"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_between_forward_and_backward(name: str, way: str) -> None:
    config.first_sight = "record" if way == "recorded" else "run"
    expected = gradients_around(CONVERSIONS[name], "cpu")
    for _ in range(2):
        with lazy_backend.eager_mode() if way == "eager mode" else contextlib.nullcontext():
            found = gradients_around(CONVERSIONS[name], "lazy")
        torch.testing.assert_close(found, expected)


def test_moving_moves_gradients() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    expected = model.weight.grad.clone()
    model.to("lazy")
    assert_same(model.weight.grad, expected)


def test_moving_keeps_requires_grad() -> None:
    model = nn.Linear(3, 2).requires_grad_(False).to("lazy")
    assert not model.weight.requires_grad


def test_moving_in_inference_mode_and_no_grad() -> None:
    with torch.no_grad():
        model = nn.Linear(3, 2).to("lazy")
    assert model.weight.requires_grad


def test_the_global_swap_flag_is_left_alone() -> None:
    nn.Linear(3, 2).to("lazy").cpu()
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_cpu_module_moves_as_before() -> None:
    model = nn.Linear(3, 2)
    weight = model.weight
    assert model.double().weight is weight


def test_an_optimizer_built_before_the_move_trains() -> None:
    eager, lazy = Tied(), Tied()
    lazy.load_state_dict(eager.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (eager, lazy)]
    lazy.to("lazy")
    trained(eager, optimizers[0], "cpu")
    trained(lazy, optimizers[1], "lazy")
    assert_same(lazy.embedding.weight, eager.embedding.weight)


def test_an_optimizer_survives_the_way_there_and_back() -> None:
    eager, lazy = Tied(), Tied()
    lazy.load_state_dict(eager.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, lazy)]
    trained(eager, optimizers[0], "cpu", steps=6)
    trained(lazy.to("lazy"), optimizers[1], "lazy")
    trained(lazy.cpu(), optimizers[1], "cpu")
    assert_same(lazy.embedding.weight, eager.embedding.weight)


def test_a_module_made_on_the_device_trains() -> None:
    model = nn.Linear(3, 2, device="lazy")
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, device="lazy")).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_module_made_under_the_device_context() -> None:
    with torch.device("lazy"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert all(isinstance(t, LazyTensor) for t in [*model.parameters(), *model.buffers()])


def test_to_empty() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.to_empty(device="lazy")
    nn.init.ones_(model.weight)
    assert_same(model.weight.detach(), torch.ones(2, 3))


def test_initialisation_on_the_device_has_the_right_spread() -> None:
    model = nn.Linear(64, 64, device="lazy")
    assert model.weight.abs().max().item() <= 1 / 8
    assert model.weight.std().item() > 0.05


def test_weights_tied_after_the_move() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("lazy")
    model[1].weight = model[0].weight
    model(torch.ones(1, 3, device="lazy")).sum().backward()
    assert model[0].weight.grad is model[1].weight.grad


WITHOUT_SHAPES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "linear": (lambda **options: nn.LazyLinear(3, **options), (2, 4)),
    "conv": (lambda **options: nn.LazyConv2d(3, 3, **options), (2, 4, 5, 5)),
    "conv_transpose": (lambda **options: nn.LazyConvTranspose1d(3, 3, **options), (2, 4, 5)),
    "batch_norm": (lambda **options: nn.LazyBatchNorm1d(**options), (2, 4)),
    "instance_norm": (
        lambda **options: nn.LazyInstanceNorm2d(affine=True, track_running_stats=True, **options),
        (2, 4, 5, 5),
    ),
}
without_shapes = pytest.mark.parametrize("name", WITHOUT_SHAPES)


@without_shapes
def test_a_module_without_shapes_is_moved_before_its_first_call(name: str) -> None:
    make, shape = WITHOUT_SHAPES[name]
    module = make()
    before = [*module.parameters()]
    optimizer = torch.optim.SGD(before, lr=0.1)
    module.to("lazy")
    assert [*map(id, module.parameters())] == [*map(id, before)]
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"lazy"}
    assert repr(before[0]) == "<UninitializedParameter>"

    module(grid("lazy", *shape)).sum().backward()
    optimizer.step()
    assert [*map(id, module.parameters())] == [*map(id, before)]
    assert all(type(p) is lazy_backend.LazyTensor and isinstance(p, nn.Parameter) and p.requires_grad for p in before)
    assert not type(module).__name__.startswith("Lazy")


@pytest.mark.filterwarnings("ignore:Lazy modules")
@without_shapes
def test_a_module_without_shapes_computes_as_one_with(name: str) -> None:
    make, shape = WITHOUT_SHAPES[name]
    eager = make()
    eager(grid("cpu", *shape))
    lazy = make(device="lazy")
    if name != "instance_norm":  # in eager, too, it does not learn its number of features from a state_dict
        lazy.load_state_dict(eager.state_dict())
    lazy(grid("lazy", *shape))
    lazy.load_state_dict(eager.state_dict())
    assert_same(lazy(grid("lazy", *shape)), eager(grid("cpu", *shape)))
    assert_same([b.cpu() for b in lazy.buffers()], [*eager.buffers()])


@without_shapes
def test_a_module_without_shapes_goes_back_and_forth(name: str) -> None:
    make, shape = WITHOUT_SHAPES[name]
    module = make().to("lazy").double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    copied = copy.deepcopy(module)
    pickle.loads(pickle.dumps([*module.parameters()]))
    module.cpu()
    assert all(type(p) is UninitializedParameter for p in module.parameters())
    assert module(grid("cpu", *shape, dtype=torch.float64)).device.type == "cpu"
    assert copied(grid("lazy", *shape, dtype=torch.float64)).device.type == "lazy"


def test_a_parameter_without_a_shape_keeps_its_errors_hooks_and_attributes() -> None:
    module = nn.LazyLinear(3)
    parameter = module.weight
    parameter.tag = "mine"
    module.to("lazy")
    assert parameter.tag == "mine"
    assert isinstance(parameter, UninitializedParameter)
    with pytest.raises(RuntimeError, match="Can't access the shape of an uninitialized parameter"):
        _ = parameter.shape
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        _ = parameter + 1
    assert isinstance(parameter.to("cpu"), UninitializedParameter)


def test_uninitialised_tensors_of_the_default_device() -> None:
    with torch.device("lazy"):
        assert UninitializedBuffer().device.type == "lazy"
        module = nn.LazyLinear(2)
    assert module(grid("lazy", 1, 3)).shape == (1, 2)
    assert UninitializedParameter(device="meta").device.type == "meta"


def test_parametrizations_and_weight_norm() -> None:
    eager = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    lazy = copy.deepcopy(eager).to("lazy")
    assert_same(lazy(torch.ones(1, 3).to("lazy")).detach(), eager(torch.ones(1, 3)).detach())


class Halved(nn.Module):
    """A parametrization by one tensor that has an inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Squashed(nn.Module):
    """A parametrization without an inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh()


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "with an inverse": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Halved()),
    "without an inverse": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Squashed()),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


def parametrized_amid_losses(name: str, device: str, is_captured: bool = False) -> list[object]:
    """Losses and gradients of a layer that is parametrized while graphs of earlier losses are alive."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4).to(device)
    inputs, weight, calls = grid(device, 2, 4) / 8, module.weight, []
    if is_captured and device == "lazy":
        lazy_backend.capture(module)
    if not is_captured:  # a module whose parameters have hooks is not replayed
        weight.register_hook(lambda gradient: calls.append(gradient.shape))
    weight.mark = "mine"
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(3):
        loss = module(inputs).square().sum()
        loss.backward()
    waiting = module(inputs).square().sum()
    PARAMETRIZATIONS[name](module)
    with torch.no_grad():  # random vectors differ between devices
        for buffer in module.buffers():
            buffer.copy_(grid(device, *buffer.shape) if buffer.dim() < 2 else buffer)
    found: list[object] = []

    def train() -> None:
        nonlocal loss
        loss = module(inputs).square().sum()
        loss.backward()
        optimizer.step()
        gradients = [None if one.grad is None else one.grad.cpu().clone() for one in module.parameters()]
        found.extend((loss.detach().cpu().clone(), *gradients, [one is weight for one in module.parameters()]))

    train()
    if "without" not in name:
        module.weight = torch.eye(4).to(device)
    train()
    waiting.backward()
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    train()
    return [*found, len(calls), weight.mark == "mine", module.weight.detach().cpu()]


@pytest.mark.parametrize("is_captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_a_parametrization_is_registered_while_an_earlier_loss_is_alive(name: str, is_captured: bool) -> None:
    found = parametrized_amid_losses(name, "lazy", is_captured)
    torch.testing.assert_close(found, parametrized_amid_losses(name, "cpu", is_captured), rtol=1e-4, atol=1e-4)


def test_a_sparse_parameter_that_stays_on_its_device_stays_in_graphs() -> None:
    weight = nn.Parameter(torch.eye(3).to_sparse())
    module = nn.ParameterList([weight]).to("lazy")
    loss = torch.sparse.mm(weight, grid("lazy", 3, 3)).sum()
    module.to("lazy")
    loss.backward()
    assert_same(weight.grad.to_dense(), torch.diag(grid("cpu", 3, 3).sum(1)))


def test_parameters_to_vector() -> None:
    model = nn.Linear(3, 2)
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    model.to("lazy")
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    assert_same(vector, expected)
    assert_same(nn.utils.parameters_to_vector(model.parameters()).detach(), expected * 2)


# ----- buffers


def test_batch_norm_statistics_update_once() -> None:
    eager = nn.BatchNorm1d(3)
    lazy = copy.deepcopy(eager).to("lazy")
    for _ in range(2):
        eager(grid("cpu", 4, 3))
        lazy(grid("lazy", 4, 3))
        lazy_backend.mark_step()
    assert_same(lazy.running_mean, eager.running_mean)
    assert_same(lazy.running_var, eager.running_var)
    assert_same(lazy.num_batches_tracked, eager.num_batches_tracked)


def test_batch_norm_in_eval_mode_leaves_its_statistics() -> None:
    eager = nn.BatchNorm1d(3).eval()
    lazy = copy.deepcopy(eager).to("lazy")
    assert_same(lazy(grid("lazy", 4, 3)).detach(), eager(grid("cpu", 4, 3)).detach())
    assert_same(lazy.running_mean, torch.zeros(3))


def test_a_batch_norm_statistic_is_updated_when_only_it_is_wanted() -> None:
    lazy = nn.BatchNorm1d(3).to("lazy")
    lazy(grid("lazy", 4, 3))
    lazy_backend.mark_step()
    assert lazy.running_mean.tolist() == pytest.approx([0.45, 0.55, 0.65])


# ----- state dicts


def test_state_dict_shares_with_the_module() -> None:
    model = nn.Linear(3, 2).to("lazy")
    state = model.state_dict()
    with torch.no_grad():
        model.weight.add_(1)
    assert_same(state["weight"], model.weight.detach().cpu())


@pytest.mark.parametrize(("source", "target"), [("cpu", "lazy"), ("lazy", "cpu"), ("lazy", "lazy")])
def test_load_state_dict_across_devices(source: str, target: str) -> None:
    one, other = Tied().to(source), Tied().to(target)
    weight = other.head.weight
    other.load_state_dict(one.state_dict())
    assert other.head.weight is weight
    assert_same(lazy_backend.to_cpu(other.state_dict()), lazy_backend.to_cpu(one.state_dict()))


def test_load_state_dict_by_assignment() -> None:
    model = nn.Linear(3, 2)
    model.load_state_dict(nn.Linear(3, 2).to("lazy").state_dict(), assign=True)
    assert isinstance(model.weight, LazyTensor)
    assert isinstance(model.weight, nn.Parameter)


def test_optimizer_state_dict_continues_the_same_run() -> None:
    def run(interrupt: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = Tied().to("lazy")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        trained(model, optimizer, "lazy")
        if interrupt:
            state = torch.load(saved([model.state_dict(), optimizer.state_dict()]))
            model = Tied().to("lazy")
            model.load_state_dict(state[0])
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            optimizer.load_state_dict(state[1])
        return trained(model, optimizer, "lazy").head.weight.detach().cpu()

    assert_same(run(interrupt=True), run(interrupt=False))


# ----- copies


def test_deepcopy_keeps_ties_and_values() -> None:
    model = Tied().to("lazy")
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight
    assert isinstance(twin.head.weight, nn.Parameter)
    assert_same(twin.head.weight.detach(), model.head.weight.detach().cpu())


def test_deepcopy_does_not_share() -> None:
    x = grid("lazy", 3)
    twin = copy.deepcopy(x)
    x.add_(1)
    assert twin.tolist() == [0.0, 1.0, 2.0]


def test_deepcopy_keeps_views_shared() -> None:
    x = grid("lazy", 4)
    base, view = copy.deepcopy((x, x[1:]))
    base.zero_()
    assert view.tolist() == [0.0, 0.0, 0.0]


def test_deepcopy_of_a_result_raises_like_eagers() -> None:
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(grid("lazy", 3).requires_grad_() * 2)


def test_deepcopy_keeps_gradients() -> None:
    x = grid("lazy", 3).requires_grad_()
    (x * x).sum().backward()
    assert_same(copy.deepcopy(x).grad, 2 * torch.arange(3.0))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_deepcopy_of_a_parameter_leaves_out_what_eagers_does(device: str) -> None:
    layer = nn.Linear(2, 2).to(device)
    layer(torch.ones(1, 2, device=device)).sum().backward()
    layer.weight.note = 1  # type: ignore[attr-defined]
    twin = copy.deepcopy(layer).weight
    assert isinstance(twin, nn.Parameter)
    assert twin.requires_grad
    assert twin.grad is None
    assert not hasattr(twin, "note")


def test_copy_copy_shares() -> None:
    x = grid("lazy", 3)
    shallow = copy.copy(x)
    x.add_(1)
    assert shallow.tolist() == [1.0, 2.0, 3.0]


def test_a_module_copies_shallowly() -> None:
    model = nn.Linear(3, 2).to("lazy")
    assert copy.copy(model).weight is model.weight


# ----- files


def test_save_and_load_give_a_lazy_tensor() -> None:
    x = torch.load(saved(grid("lazy", 2, 3)))
    assert isinstance(x, LazyTensor)
    assert_same(x, grid("cpu", 2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_dtypes_survive_a_file(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    assert_same(torch.load(saved(x.to("lazy"))), x)


@pytest.mark.parametrize(
    "location", ["cpu", torch.device("cpu"), {"lazy:0": "cpu"}, lambda storage, where: storage.cpu()]
)
def test_a_lazy_file_loads_on_the_cpu(location) -> None:
    x = torch.load(saved(grid("lazy", 3)), map_location=location)
    assert type(x) is torch.Tensor
    assert_same(x, torch.arange(3.0))


@pytest.mark.parametrize("location", ["lazy", "lazy:0", torch.device("lazy")])
def test_a_cpu_file_loads_on_the_device(location) -> None:
    x = torch.load(saved(torch.arange(3.0)), map_location=location)
    assert isinstance(x, LazyTensor)
    assert_same(x, torch.arange(3.0))


def test_a_file_from_a_missing_device_says_so() -> None:
    with pytest.raises(lazy_backend.DeviceError, match="there is no device lazy:3"):
        torch.load(saved(torch.arange(3.0)), map_location="lazy:3")


def test_shared_storages_stay_shared_in_a_file() -> None:
    x = grid("lazy", 4)
    base, view = torch.load(saved([x, x[1:3]]))
    base.zero_()
    assert view.tolist() == [0.0, 0.0]


def test_shared_storages_stay_shared_on_the_cpu() -> None:
    x = grid("lazy", 4)
    base, view = torch.load(saved([x, x[1:3]]), map_location="cpu")
    base.zero_()
    assert view.tolist() == [0.0, 0.0]


def test_a_shared_storage_is_written_once() -> None:
    x = torch.zeros(10_000, device="lazy")
    assert len(saved([x, x[1:], x.view(100, 100)]).getvalue()) < 45_000


def test_a_transposed_view_survives_a_file() -> None:
    assert_same(torch.load(saved(grid("lazy", 2, 3).t())), grid("cpu", 2, 3).t())


def test_requires_grad_survives_a_file() -> None:
    assert torch.load(saved(grid("lazy", 2).requires_grad_())).requires_grad


def test_a_parameter_survives_a_file() -> None:
    parameter = torch.load(saved(nn.Parameter(grid("lazy", 2))))
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, LazyTensor)


def test_a_pending_tensor_is_computed_to_be_saved() -> None:
    assert_same(torch.load(saved(torch.ones(2, device="lazy") + 1)), torch.full((2,), 2.0))


def test_a_loaded_tensor_trains() -> None:
    x = torch.load(saved(grid("lazy", 3).requires_grad_()))
    (x * x).sum().backward()
    with torch.no_grad():
        x -= x.grad
    assert x.tolist() == [0.0, -1.0, -2.0]


def test_a_whole_module_survives_a_file() -> None:
    model = Tied().to("lazy")
    loaded = torch.load(saved(model), weights_only=False)
    assert loaded.head.weight is loaded.embedding.weight
    assert_same(loaded.head.weight.detach(), model.head.weight.detach().cpu())


def test_the_legacy_format_works() -> None:
    buffer = io.BytesIO()
    torch.save(grid("lazy", 3), buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    assert_same(torch.load(buffer), torch.arange(3.0))


def test_pickle() -> None:
    x = grid("lazy", 4)
    base, view = pickle.loads(pickle.dumps((x, x[1:])))
    assert isinstance(base, LazyTensor)
    assert_same([base, view + 0], [torch.arange(4.0), torch.arange(1.0, 4.0)])


def test_save_writes_a_cpu_file(tmp_path: Path) -> None:
    lazy_backend.save({"x": grid("lazy", 3)}, tmp_path / "x.pt")
    assert type(torch.load(tmp_path / "x.pt")["x"]) is torch.Tensor


def test_a_lazy_file_loads_where_the_package_is_missing(tmp_path: Path) -> None:
    torch.save(Tied().to("lazy").state_dict(), tmp_path / "state.pt")
    code = (
        "import sys, torch; state = torch.load('state.pt', map_location='cpu'); "
        "assert 'lazy_backend' not in sys.modules; print(state['scale'].item(), type(state['scale']).__name__)"
    )
    assert run_program(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "2.0 Tensor\n"


def test_a_cpu_file_of_another_process_loads_on_the_device(tmp_path: Path) -> None:
    run_program("import torch; torch.save(torch.arange(3.0), 'x.pt')", tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert_same(torch.load(tmp_path / "x.pt", map_location="lazy"), torch.arange(3.0))


def test_a_memory_mapped_file_loads(tmp_path: Path) -> None:
    torch.save(torch.arange(3.0), tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt", map_location="lazy", mmap=True), torch.arange(3.0))
