"""Sparse tensors on the lazy device: made, moved, read, differentiated and given to optimizers as in eager."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_same, count, grid
from torch import nn

import lazy_backend
from lazy_backend import LazyBackendError, config, metrics
from lazy_backend.tensors.sparse_tensor import LazySparseTensor

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.sparse", "ignore:.*beta state")

Make = Callable[[str], torch.Tensor]


def dense(device: str) -> torch.Tensor:
    return torch.tensor([[0.0, 2, 0, 1], [3, 0, 0, 0], [0, 0, -1, 0], [0, 0, 0, 5]]).to(device)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def sparse(device: str, layout: str = "coo") -> torch.Tensor:
    return LAYOUTS[layout](dense(device) + 0)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def assert_as_eager(lazy: Any, eager: Any) -> None:
    """As `assert_same`, for sparse tensors too: the same elements in the same order."""
    if isinstance(eager, list | tuple):
        for one, other in zip(lazy, eager, strict=True):
            assert_as_eager(one, other)
        return
    if not isinstance(eager, torch.Tensor) or eager.layout is torch.strided:
        assert_same(lazy, eager)
        return
    assert lazy.device.type == "lazy"
    for question in ("layout", "shape", "dtype", "requires_grad", "is_sparse", "is_sparse_csr", "is_leaf"):
        assert getattr(lazy, question) == getattr(eager, question), question
    assert (lazy._nnz(), lazy.sparse_dim(), lazy.dense_dim()) == (eager._nnz(), eager.sparse_dim(), eager.dense_dim())
    if eager.layout is torch.sparse_coo:
        assert lazy.is_coalesced() == eager.is_coalesced()
    for part, expected in zip(parts(lazy.detach()), parts(eager.detach()), strict=True):
        assert_same(part, expected)


def assert_same_elements(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same elements in the same order, however indices and values lie in memory."""
    assert_same(*([part.clone(memory_format=torch.contiguous_format) for part in parts(t)] for t in (actual, expected)))


# ----- made and moved

FACTORIES: dict[str, Make] = {
    "coo_of_lists": lambda d: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 3), device=d),
    "coo_of_tensors": lambda d: torch.sparse_coo_tensor(grid(d, 1, 2, dtype=torch.int64), grid(d, 2) + 1, (4,)),
    "coo_without_size": lambda d: torch.sparse_coo_tensor(grid(d, 1, 2, dtype=torch.int64), grid(d, 2, 3)),
    "coo_without_elements": lambda d: torch.sparse_coo_tensor(size=(2, 3), device=d),
    "coo_of_a_dtype": lambda d: torch.sparse_coo_tensor([[0, 1]], [1, 2], (4,), dtype=torch.float64, device=d),
    "csr": lambda d: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), device=d),
    "csc": lambda d: torch.sparse_csc_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), device=d),
    "bsr": lambda d: torch.sparse_bsr_tensor([0, 1, 2], [0, 1], [[[1.0]], [[2.0]]], device=d),
    "compressed": lambda d: torch.sparse_compressed_tensor(
        torch.tensor([0, 1, 2]).to(d), torch.tensor([0, 1]).to(d), grid(d, 2) + 1, layout=torch.sparse_csc
    ),
    "empty": lambda d: torch.empty(2, 2, layout=torch.sparse_coo, device=d),
    "zeros": lambda d: torch.zeros(2, 2, layout=torch.sparse_coo, device=d),
    "zeros_csr": lambda d: torch.zeros(2, 2, layout=torch.sparse_csr, device=d),
    "zeros_like": lambda d: torch.zeros_like(sparse(d)),
    "spdiags": lambda d: torch.sparse.spdiags(torch.ones(1, 3), torch.tensor([1]), (3, 3)).to(d),
    "new": lambda d: sparse(d).new(grid(d, 1, 2, dtype=torch.int64), grid(d, 2), (4,)),
    "new_without_elements": lambda d: sparse(d).new(2, 3),
    "sparse_mask": lambda d: grid(d, 4, 4).sparse_mask(sparse(d)),
}  # fmt: skip


@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_as_eager(name: str, first_sight: str) -> None:
    config.first_sight = first_sight
    for _ in range(2):
        assert_as_eager(FACTORIES[name]("lazy"), FACTORIES[name]("cpu"))
        lazy_backend.mark_step()


@layouts
def test_moved_to_the_device_and_back(layout: str) -> None:
    eager = sparse("cpu", layout)
    lazy = eager.to("lazy")
    assert_same_elements(lazy, eager)
    assert (lazy.layout, lazy.device.type, lazy.shape, lazy.dtype) == (eager.layout, "lazy", eager.shape, eager.dtype)
    assert lazy.to("lazy") is lazy
    back = lazy.cpu()
    assert type(back) is torch.Tensor
    assert back.device.type == "cpu"
    assert_same_elements(back, eager)


def test_an_upload_cuts_nothing() -> None:
    x = grid("lazy", 3) + 1
    with count("GraphCut") as cuts:
        sparse("cpu").to("lazy")
        sparse("cpu", "csr").to("lazy")
        assert cuts() == 0
    assert_same(x, grid("cpu", 3) + 1)


def test_what_was_uploaded_is_a_copy() -> None:
    eager = sparse("cpu")
    lazy = eager.to("lazy")
    eager._values().zero_()
    assert_as_eager(lazy, sparse("cpu"))


def test_as_a_buffer_of_a_module() -> None:
    module = nn.Module()
    module.register_buffer("adjacency", sparse("cpu"))
    module.to("lazy")
    assert_as_eager(module.adjacency, sparse("cpu"))
    module.load_state_dict({"adjacency": sparse("cpu") * 2})
    assert_as_eager(module.adjacency, sparse("cpu") * 2)
    assert module.cpu().adjacency.device.type == "cpu"


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_as_a_parameter_of_a_module(layout: str) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(sparse("cpu", layout))
    weight, expected = module.weight, sparse("cpu", layout).requires_grad_()
    weight.tag = "mine"
    for device in ("lazy", "cpu", "lazy"):
        module.to(device)
        assert module.weight is weight
        assert weight.device.type == device
        assert isinstance(weight, nn.Parameter)
        assert (weight.tag, weight.layout, weight.requires_grad) == ("mine", expected.layout, True)
        torch.sparse.mm(weight, torch.ones(4, 2).to(device)).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device.type == device
    torch.sparse.mm(expected, torch.ones(4, 2)).sum().backward()
    assert expected.grad is not None
    assert_same(weight.grad.to_dense(), expected.grad.to_dense() * 3)


def test_a_sparse_gradient_moves_with_its_module() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1, 3])).sum().backward()
    for device in ("lazy", "cpu", "lazy"):
        model.to(device)
        grad = model.weight.grad
        assert grad is not None
        assert (grad.device.type, grad.layout) == (device, torch.sparse_coo)
        assert_same(grad.to_dense(), torch.tensor([[0.0, 0], [1, 1], [0, 0], [1, 1]]))


@layouts
def test_saved_and_loaded(layout: str) -> None:
    def load(saved: str, place: str) -> tuple[Any, list[str]]:
        """The tensor, and what PyTorch warns of: since 2.14, that it checks indices where weights alone are loaded."""
        file = io.BytesIO()
        torch.save({"a": sparse(saved, layout)}, file)
        file.seek(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return torch.load(file, map_location=place)["a"], [str(warning.message) for warning in caught]

    _, expected = load("cpu", "cpu")
    for place in ("cpu", "lazy"):
        loaded, warned = load("lazy", place)
        assert loaded.device.type == place
        assert_same_elements(loaded, sparse("cpu", layout))
        assert warned == expected


@pytest.mark.parametrize("inference", [False, True])
def test_indices_are_checked_like_eagers(inference: bool) -> None:
    """What `torch.load` calls for each sparse tensor, since PyTorch 2.14."""

    def check(device: str, largest: int) -> None:
        values = torch.ones(2, device=device)
        indices = torch.tensor([0, largest]).to(device)
        rows = torch.tensor([0, 1, 2]).to(device)
        torch._validate_sparse_coo_tensor_args(indices[None], values, (3,))
        torch._validate_sparse_csr_tensor_args(rows, indices, values, (2, 3))
        torch._validate_sparse_compressed_tensor_args(rows, indices, values, (2, 3), torch.sparse_csr)

    with torch.inference_mode(inference):
        check("lazy", 2)
        with pytest.raises(RuntimeError) as expected:
            check("cpu", 3)
        with pytest.raises(RuntimeError) as found:
            check("lazy", 3)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@layouts
def test_copied(layout: str) -> None:
    lazy = sparse("lazy", layout)
    lazy.tag = "mine"
    for copied in (copy.deepcopy(lazy), copy.copy(lazy), pickle.loads(pickle.dumps(lazy)), lazy.clone()):
        assert_same_elements(copied, sparse("cpu", layout))
        assert type(copied) is LazySparseTensor
    assert copy.deepcopy(lazy).tag == copy.copy(lazy).tag == "mine"
    copied = copy.deepcopy(lazy)
    copied.values().zero_()
    assert_same_elements(lazy, sparse("cpu", layout))


@layouts
def test_printed_as_eager_with_the_device(layout: str) -> None:
    expected = repr(sparse("cpu", layout)).split()
    printed = repr(sparse("lazy", layout)).replace(" device='lazy:0',", "").split()
    assert printed == expected


def test_the_public_functions_know_it() -> None:
    lazy = sparse("lazy")
    assert lazy_backend.is_lazy(lazy)
    assert lazy.is_lazy
    lazy_backend.sync_multi([lazy])
    moved = lazy_backend.to_cpu({"sparse": lazy, "dense": grid("lazy", 3)})
    assert type(moved["sparse"]) is torch.Tensor
    assert_same(parts(moved["sparse"]), parts(sparse("cpu")))
    for ask in (lazy_backend.get_tensor_id, lambda tensor: lazy_backend.computation.get_graph_hash([tensor])):
        with pytest.raises(TypeError, match="got a sparse one, which always has its value"):
            ask(lazy)
    with pytest.raises(TypeError, match="LazySparseTensor is not called"):
        LazySparseTensor()


def test_in_inference_mode() -> None:
    for layout in LAYOUTS:
        with torch.inference_mode():
            eager, lazy = (sparse(device, layout) * 2 for device in ("cpu", "lazy"))
        assert_as_eager(lazy, eager)


# ----- operators

OPERATORS: dict[str, Make] = {
    "to_dense": lambda d: sparse(d).to_dense(),
    "coalesce": lambda d: torch.sparse_coo_tensor([[1, 0, 1]], [1.0, 2.0, 3.0], (2,), device=d).coalesce(),
    "mm": lambda d: torch.sparse.mm(sparse(d), grid(d, 4, 3)),
    "mm_csr": lambda d: torch.sparse.mm(sparse(d, "csr"), grid(d, 4, 3)),
    "mm_sparse": lambda d: torch.sparse.mm(sparse(d), sparse(d)),
    "matmul": lambda d: sparse(d) @ grid(d, 4, 3),
    "matmul_of_a_vector": lambda d: sparse(d) @ grid(d, 4),
    "dense_matmul": lambda d: grid(d, 3, 4) @ sparse(d, "csr"),
    "addmm": lambda d: torch.sparse.addmm(grid(d, 4, 3), sparse(d), grid(d, 4, 3)),
    "sampled_addmm": lambda d: torch.sparse.sampled_addmm(sparse(d, "csr"), grid(d, 4, 3), grid(d, 3, 4)),
    "softmax": lambda d: torch.sparse.softmax(sparse(d), 1),
    "log_softmax": lambda d: torch.sparse.log_softmax(sparse(d), 1),
    "sum": lambda d: torch.sparse.sum(sparse(d)),
    "sum_of_rows": lambda d: torch.sparse.sum(sparse(d), 1),
    "add": lambda d: sparse(d) + sparse(d),
    "add_to_dense": lambda d: grid(d, 4, 4) + sparse(d),
    "add_to_dense_in_place": lambda d: (grid(d, 4, 4) + 1).add_(sparse(d), alpha=-0.5),
    "mul": lambda d: sparse(d) * 2,
    "mul_by_dense": lambda d: sparse(d) * grid(d, 4, 4),
    "mul_in_place": lambda d: sparse(d).mul_(3),
    "neg": lambda d: -sparse(d),
    "sqrt": lambda d: sparse(d).abs().sqrt(),
    "t": lambda d: sparse(d).t(),
    "transpose_of_csr": lambda d: sparse(d, "csr").transpose(0, 1),
    "select": lambda d: sparse(d)[1],
    "index_select": lambda d: sparse(d).index_select(0, torch.tensor([2, 0]).to(d)),
    "cat": lambda d: torch.cat([sparse(d), sparse(d)]),
    "double": lambda d: sparse(d).double(),
    "norm": lambda d: sparse(d).norm(),
    "to_csr": lambda d: sparse(d).to_sparse_csr(),
    "zero": lambda d: sparse(d).zero_(),
    "resize_as": lambda d: torch.sparse_coo_tensor(size=(1, 1), device=d).resize_as_(sparse(d)),
    "copy": lambda d: torch.sparse_coo_tensor(size=(4, 4), device=d).copy_(sparse(d)),
    "copy_from_the_cpu": lambda d: torch.sparse_coo_tensor(size=(4, 4), device=d).copy_(sparse("cpu")),
    "values": lambda d: sparse(d).coalesce().values() * 2,
    "bmm": lambda d: torch.bmm(torch.stack([sparse(d), sparse(d)]), grid(d, 2, 4, 3)),
    "grown_in_place": lambda d: torch.sparse_coo_tensor(size=(4, 4), device=d).add_(sparse(d)),
}  # fmt: skip


@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_as_eager(name: str, first_sight: str) -> None:
    config.first_sight = first_sight
    for _ in range(3):
        assert_as_eager(OPERATORS[name]("lazy"), OPERATORS[name]("cpu"))
        lazy_backend.mark_step()


ERRORS: dict[str, Make] = {
    "add_dense_to_sparse": lambda d: sparse(d) + grid(d, 4, 4),
    "strides": lambda d: sparse(d, "csr").stride(),  # type: ignore[return-value, dict-item]
    "storage": lambda d: sparse(d).untyped_storage(),  # type: ignore[return-value, dict-item]
    "view": lambda d: sparse(d).view(16),
    "values_of_uncoalesced": lambda d: torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (2,), device=d).values(),
    "wrong_indices": lambda d: torch.sparse_coo_tensor([[7]], [1.0], (2,), device=d, check_invariants=True),
    "csr_of_a_row": lambda d: grid(d, 3).to_sparse_csr(),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_eager_refuses_is_refused(name: str) -> None:
    errors = []
    for device in ("cpu", "lazy"):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            ERRORS[name](device)
        errors.append(type(caught.value))
    assert errors[0] is errors[1]


def test_tensors_of_two_devices_are_refused_with_the_line() -> None:
    for mixed in (lambda: sparse("lazy") @ grid("cpu", 4, 2), lambda: sparse("cpu") @ grid("lazy", 4, 2)):
        with pytest.raises(LazyBackendError, match=rf"lazy:0 and cpu[\s\S]*at {__file__}"):
            mixed()


def test_an_operator_is_counted_with_its_cause_and_line() -> None:
    x, adjacency = grid("lazy", 4, 2) + 1, sparse("cpu").to("lazy")
    with count("GraphCut") as cuts:
        product = adjacency @ x
        assert cuts() == 1
    assert any("takes a sparse tensor" in name and __file__ in name for name in metrics.counter_names())
    assert_same(product, sparse("cpu") @ (grid("cpu", 4, 2) + 1))
    torch.sparse_coo_tensor([[0, 1]], grid("lazy", 2) + 1, (3,), device="lazy")
    for kind in ("Fallback: ", "GraphCut: "):
        names = [name for name in metrics.counter_names() if name.startswith(kind)]
        assert any("gives a sparse tensor" in name and __file__ in name for name in names)


def test_strict_mode_refuses_the_cut() -> None:
    x, adjacency = grid("lazy", 4, 2) + 1, sparse("cpu").to("lazy")
    with lazy_backend.strict(), pytest.raises(lazy_backend.StrictModeError, match="takes a sparse tensor"):
        adjacency @ x
    assert_same(x, grid("cpu", 4, 2) + 1)


def test_questions_and_parts_cut_nothing() -> None:
    x, lazy = grid("lazy", 4, 2) + 1, sparse("cpu").to("lazy")
    with count("GraphCut") as cuts:
        assert (lazy._nnz(), lazy.sparse_dim(), lazy.is_coalesced()) == (5, 2, True)
        made = lazy.values() * 2 + lazy.indices()[0]
        lazy.detach()
        assert cuts() == 0
    eager = sparse("cpu").coalesce()
    assert_same(made, eager.values() * 2 + eager.indices()[0])
    assert_same(x, grid("cpu", 4, 2) + 1)


@layouts
def test_values_share_the_tensors_memory(layout: str) -> None:
    results = []
    for device in ("lazy", "cpu"):
        tensor = sparse(device, layout)
        one, other = tensor.values(), tensor.values()
        one.mul_(2)
        other.add_(1)
        twice = one * 2
        one.sub_(3)
        results.append([tensor.to_dense(), twice, other, tensor])
        if device == "lazy":
            lazy_backend.mark_step()
    assert_as_eager(*results)


def test_a_tensor_shares_the_memory_it_is_made_of() -> None:
    results = []
    for device in ("lazy", "cpu"):
        values = grid(device, 2) + 1
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]]).to(device), values, (3,))
        values.mul_(5)
        results.append([tensor.to_dense(), values])
        tensor.mul_(2)
        results[-1].append(values + 1)
    assert_as_eager(*results)


# ----- gradients


def gradients(device: str, layout: str) -> Any:
    x = dense(device).requires_grad_()
    tensor = LAYOUTS[layout](x)
    (tensor * 2).to_dense().pow(2).sum().backward()
    return x.grad


@layouts
def test_the_gradient_of_a_conversion(layout: str) -> None:
    assert_as_eager(gradients("lazy", layout), gradients("cpu", layout))


def products(device: str) -> Any:
    left, right = sparse(device).detach().requires_grad_(), grid(device, 4, 2).requires_grad_()
    torch.sparse.mm(left, right).pow(2).sum().backward()
    torch.sparse.mm(left, right).sum().backward()
    assert left.grad is not None
    product = (left @ right).sum()
    return left.grad.clone(), left.grad.coalesce(), right.grad, *torch.autograd.grad(product, [left, right])


def test_gradients_of_a_product() -> None:
    assert_as_eager(products("lazy"), products("cpu"))


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_gradients_of_a_reduced_product(reduce: str, casts: bool) -> None:
    results = []
    for device in ("lazy", "cpu"):
        left, right = sparse(device, "csr").requires_grad_(), grid(device, 4, 2).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=casts):
            torch.sparse.mm(left, right, reduce).sum().backward()
        assert left.grad is not None
        results.append([left.grad.to_dense(), right.grad])
    assert_as_eager(*results)


def values_of(device: str) -> Any:
    values = (grid(device, 3) + 1).requires_grad_()
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1]]).to(device), values, (3,))
    (tensor.coalesce().values() * 3).sum().backward()
    return values.grad


def test_gradients_through_values() -> None:
    assert_as_eager(values_of("lazy"), values_of("cpu"))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD_with_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "SparseAdam": partial(torch.optim.SparseAdam, lr=0.1),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: nn.Embedding(6, 3, sparse=True),
    "EmbeddingBag": lambda: nn.EmbeddingBag(6, 3, sparse=True),
    "EmbeddingBag_sum": lambda: nn.EmbeddingBag(6, 3, sparse=True, mode="sum"),
}  # fmt: skip


def train(device: str, make: Callable[[], nn.Module], optimizer_of: Any, sync: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = optimizer_of(model.parameters())
    seen = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        words = torch.tensor([[1, 3, 3], [step, 0, 1]]).to(device)
        model(words).pow(2).sum().backward()
        model(words).sum().backward()
        grad = next(model.parameters()).grad
        assert grad is not None
        assert grad.is_sparse
        optimizer.step()
        sync()
        seen.append(grad.detach().clone())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*seen, *[tensor for tensor in state if tensor.dim()], next(model.parameters()).detach()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_sparse_gradients(optimizer: str, module: str, backend: str) -> None:
    config.backend = backend
    lazy = train("lazy", MODULES[module], OPTIMIZERS[optimizer], lazy_backend.mark_step)
    eager = train("cpu", MODULES[module], partial(OPTIMIZERS[optimizer], **foreach(optimizer)), lambda: None)
    assert_as_eager(lazy, eager)


def foreach(optimizer: str) -> dict[str, bool]:
    """The lazy device chooses the foreach forms by itself, as CUDA does."""
    return {} if optimizer == "SparseAdam" else {"foreach": True}


def test_a_sparse_gradient_scaled_in_place() -> None:
    """As `GradScaler.unscale_` does."""
    results = []
    for device in ("lazy", "cpu"):
        weight = grid(device, 4, 2).requires_grad_()
        nn.functional.embedding(torch.tensor([1, 3]).to(device), weight, sparse=True).sum().backward()
        assert weight.grad is not None
        weight.grad._values().mul_(0.5)
        weight.grad = weight.grad.coalesce()
        results.append([weight.grad, weight.grad.to_dense()])
    assert_as_eager(*results)


def test_a_captured_step_with_sparse_gradients_is_refused_with_the_line() -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Embedding(6, 3, sparse=True).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(words: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(words).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = lazy_backend.capture(step) if device == "lazy" else step
        losses = [step(torch.tensor([1, 3, 3]).to(device)) for _ in range(4)]
        return [*losses, model.weight.detach()]

    with pytest.raises(lazy_backend.CaptureError, match=rf"gives a sparse tensor[\s\S]*at {__file__}"):
        program("lazy")


def test_memory_is_accounted_for() -> None:
    lazy_backend.mark_step()
    context = lazy_backend.tensors.contexts.context_of("lazy")
    before = context.alive().bytes
    held = torch.eye(100).to_sparse().to("lazy")
    assert context.alive().bytes - before == 100 * (2 * 8 + 4)
    del held
    assert context.alive().bytes == before


# ----- quantised tensors


QUANTIZED: dict[str, Callable[[], Any]] = {
    "quantize_per_tensor": lambda: torch.quantize_per_tensor(grid("lazy", 3), 0.1, 0, torch.qint8),
    "quantize_per_channel": lambda: torch.quantize_per_channel(
        grid("lazy", 2, 2), grid("lazy", 2) + 1, grid("lazy", 2).long(), 0, torch.qint8
    ),
    "empty": lambda: torch.empty(3, dtype=torch.qint8, device="lazy"),
    "empty_affine": lambda: torch._empty_affine_quantized(
        [3], scale=1.0, zero_point=0, dtype=torch.qint8, device="lazy"
    ),
    "empty_per_channel": lambda: torch._empty_per_channel_affine_quantized(
        [2], scales=torch.ones(2), zero_points=torch.zeros(2), axis=0, dtype=torch.qint8, device="lazy"
    ),
    "mixed": lambda: grid("lazy", 3) + quantized().to("lazy"),
    "moved_as_a_buffer": lambda: with_buffer(quantized()).to("lazy"),
    "zeros": lambda: torch.zeros(3, dtype=torch.quint8, device="lazy"),
}  # fmt: skip


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("scales", tensor)
    return module


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions", "ignore:torch.quantize")
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantised_tensor_is_refused_with_line_and_advice(name: str) -> None:
    with pytest.raises(LazyBackendError, match=r"quantised tensor cannot be lazy\n  at .*test_sparse.py:\d+\n.*CPU"):
        QUANTIZED[name]()
    assert_same(grid("lazy", 3) + 1, grid("cpu", 3) + 1)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions", "ignore:torch.quantize")
def test_a_quantised_tensor_on_the_cpu_is_as_ever() -> None:
    tensor = quantized()
    assert tensor.to("cpu", copy=True).is_quantized
    assert_same(tensor.dequantize().to("lazy"), tensor.dequantize())
