"""Lazy tensors among PyTorch's extensions: modes, inference mode, fake tensors, subclasses, other kinds of tensors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, count, grid
from test_manners import Case, outcome, rows, scalar
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lazy_backend
from lazy_backend import LazyBackendError, LazyTensor, config


class Ops(TorchDispatchMode):
    """Lists the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


class AddForMul(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.mul.Tensor:
            return torch.ops.aten.add.Tensor(*args)
        return op(*args, **(kwargs or {}))


class Onto(TorchDispatchMode):
    """Sends every factory to a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = self.device
        return op(*args, **kwargs)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=["always", "never"])
def background(request: pytest.FixtureRequest) -> None:
    """In the background and on the calling thread, which has the user's modes."""
    lazy_backend.config.run_in_background = request.param


# ----- modes

SEEN = {
    "forward": lambda device: (grid(device, 3) * 2 + 1).sum(),
    "backward": lambda device: (grid(device, 3).requires_grad_() * 2).sum().backward(),
    "factories": lambda device: (torch.zeros(2, device=device), torch.randn(2, device=device)),
    "reads": lambda device: (grid(device, 3)[0].item(), torch.arange(3, device=device).to(torch.float32)),
    "an_upload": lambda device: torch.tensor([1.0, 2.0], device=device) + 1,
    "in_place": lambda device: grid(device, 3).add_(1)[1:].zero_(),
}  # fmt: skip


@rows(SEEN)
def test_a_dispatch_mode_sees_what_it_sees_in_eager(case: Case) -> None:
    seen = []
    for device in ("lazy", "cpu"):
        with Ops() as ops:
            case(device)
        seen.append([op for op in ops.seen if "_to_copy" not in op and "empty_strided" not in op])
    assert seen[0] == seen[1]


def test_a_dispatch_mode_does_not_see_runs(background) -> None:
    x = grid("lazy", 3)
    with Ops() as ops:
        for _ in range(4):
            y = x * 2
            lazy_backend.mark_step()
        y.tolist()
    assert [op for op in ops.seen if "copy" not in op and "detach" not in op] == ["aten.mul.Tensor"] * 4


def test_a_dispatch_mode_changes_what_is_recorded() -> None:
    x = grid("lazy", 3)
    with AddForMul():
        y = x * x
    assert_same(y, torch.arange(3.0) * 2)


def test_a_dispatch_mode_can_return_lazy_tensors() -> None:
    with Onto("lazy"):
        x = torch.ones(3) + torch.zeros(3, device="cpu")
    assert_same(x, torch.ones(3))
    assert x.is_lazy


@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_counted_once(backward: bool, background) -> None:
    totals = []
    for device in ("lazy", "cpu"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).to(device)
        with FlopCounterMode(display=False) as flops:
            loss = model(grid(device, 2, 3, 4, 4)).sum()
            if backward:
                loss.backward()
            lazy_backend.mark_step()
        totals.append(flops.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_function_mode_sees_calls() -> None:
    with Functions() as functions:
        torch.relu(grid("lazy", 3) * 2).sum()
    assert functions.seen[-3:] == ["mul", "relu", "sum"]


def test_runs_under_autocast_compute_what_was_recorded(background) -> None:
    x = grid("lazy", 4, 4)
    for _ in range(3):
        y = x @ x  # before the block, which must not act on it
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = x @ x
            lazy_backend.mark_step()
        assert_same(y, grid("cpu", 4, 4) @ grid("cpu", 4, 4))
        assert_same(z, grid("cpu", 4, 4).bfloat16() @ grid("cpu", 4, 4).bfloat16())


def test_runs_under_a_fake_mode_are_real(background) -> None:
    x = grid("lazy", 3) * 2
    with FakeTensorMode():
        lazy_backend.mark_step()
    y = x + 1
    with FakeTensorMode():
        assert y.tolist() == [1.0, 3.0, 5.0]
    assert_same(x, torch.arange(3.0) * 2)


def test_runs_under_a_function_transform(background) -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        y = (x * x).sum()
        lazy_backend.mark_step()
        return y

    assert_same(torch.func.grad(square)(grid("lazy", 3)), 2 * torch.arange(3.0))


def test_the_default_dtype_at_the_run_does_not_matter(background) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x, y = torch.ones(3, device="lazy"), torch.arange(3, device="lazy") / 3
        lazy_backend.mark_step()
        z = torch.arange(3, device="lazy") / 3
    finally:
        torch.set_default_dtype(torch.float32)
    third = torch.arange(3, dtype=torch.float64) / 3
    assert_same([x, y, z], [torch.ones(3, dtype=torch.float64), third, third])


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_type_at_the_run_does_not_matter(background) -> None:
    torch.set_default_tensor_type(torch.DoubleTensor)
    try:
        x = torch.arange(3, device="lazy") / 3
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert_same(x, torch.arange(3, dtype=torch.float64) / 3)


READS = {
    "save": lambda x: reloaded(x).tolist(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).tolist(),
    "deepcopy": lambda x: copy.deepcopy(x).tolist(),
    "repr": lambda x: repr(x).count("0."),
    "item": lambda x: (x.sum().item(), bool((x >= 0).all()), int(x[0])),
    "values": lambda x: (x.nonzero().tolist(), x[x > 1].tolist(), x.unique().tolist()),
    "dlpack": lambda x: torch.from_dlpack(x).tolist(),
    "cpu": lambda x: (x.cpu().tolist(), x.to("cpu").tolist()),
    "made": lambda x: (x.new_ones(2).tolist(), torch.zeros_like(x).tolist(), x.clone().resize_(2).tolist()),
}  # fmt: skip
MODES = {
    "inference_mode": torch.inference_mode,
    "dispatch_mode": Ops,
    "function_mode": Functions,
    "on_the_device": lambda: torch.device("lazy"),
    "on_meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
}  # fmt: skip


def reloaded(x: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_read_in_a_mode_gives_the_values(read: Callable[[torch.Tensor], Any], mode, background) -> None:
    x = grid("lazy", 3) * 2
    with mode():
        result = read(x)
    assert result == read(grid("cpu", 3) * 2)
    assert_same(x.add_(1), torch.arange(3.0) * 2 + 1)


def test_the_device_context_nests() -> None:
    with torch.device("lazy"):
        with torch.device("cpu"):
            inner = torch.zeros(1)
        assert not inner.is_lazy if isinstance(inner, LazyTensor) else inner.is_cpu
        assert torch.zeros(1).device == torch.get_default_device() == torch.device("lazy:0")


def test_a_step_under_the_default_device(background) -> None:
    torch.set_default_device("lazy")
    try:
        for _ in range(3):
            y = torch.zeros(3).fill_(2.0) + torch.arange(3) + torch.full((3,), 1.5) + torch.tensor([1.0, 2.0, 3.0])
            lazy_backend.mark_step()
    finally:
        torch.set_default_device(None)
    assert_same(y, torch.tensor([4.5, 6.5, 8.5]))


def test_training_under_the_default_device() -> None:
    torch.set_default_device("lazy")
    try:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            lazy_backend.mark_step()
    finally:
        torch.set_default_device(None)
    assert (model.weight < before).all()


# ----- inference mode

INFERENCE = {
    "detach": lambda x: x.detach(),
    "tolist": lambda x: x.tolist(),
    "repr": lambda x: len(repr(x)) > 0,
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "view": lambda x: x.view(3, 1),
    "index": lambda x: x[1:],
    "chunk": lambda x: x.chunk(3),
    "expand": lambda x: x.expand(2, 3),
    "transpose": lambda x: x.view(3, 1).t(),
    "data": lambda x: x.data,
    # a lazy tensor stays normal, where eager's becomes an inference tensor: only the values are compared
    "set_data": lambda x: (setattr(x, "data", x * 2), x.tolist())[1],
    "a_parameter": lambda x: nn.Parameter(x),
    "in_place": lambda x: x.add_(1),
    "in_place_of_a_view": lambda x: (x[1:].add_(1), x)[1],
    "deepcopy": copy.deepcopy,
    "squeeze_": lambda x: x.unsqueeze_(0),
}  # fmt: skip


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lazy_backend.eager_mode])
@rows(INFERENCE)
def test_inference_mode_over_a_normal_tensor(case: Callable[[torch.Tensor], Any], mode: Callable[[], Any]) -> None:
    made = []
    for device in ("lazy", "cpu"):
        x = grid(device, 3) * 2
        with torch.inference_mode(), mode():
            result = case(x)
        made.append([result, x, x.is_inference(), isinstance(result, torch.Tensor) and result.is_inference()])
    if case is INFERENCE["repr"] or isinstance(made[1][0], torch.Tensor) is False:
        made = [row[:1] for row in made]
    assert_same(*made)


def test_an_inference_tensor_refuses_what_eagers_refuses() -> None:
    texts = []
    for device in ("lazy", "cpu"):
        with torch.inference_mode():
            x = grid(device, 3) * 1
        texts.append(outcome(lambda _, x=x: x.add_(1), device))
        texts.append(outcome(lambda device, x=x: (x * grid(device, 3).requires_grad_()).sum(), device))
    assert texts[:2] == texts[2:]


WRITABLE = {
    "data": lambda x: x.data,
    "data_of_data": lambda x: x.data.data,
    "data_of_a_view": lambda x: x[1:].data,
    "detach": lambda x: x.detach(),
    "detach_of_a_view": lambda x: x.view(3, 1).detach(),
    "copy": copy.copy,
    "clone": lambda x: x.clone(),
    "deepcopy_of_a_view": lambda x: copy.deepcopy(x[1:]).detach_(),
}  # fmt: skip
WRITES = {
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(torch.zeros_like(x)),
    "out": lambda x: torch.add(x.clone(), 1, out=x),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(1),
    "set_": lambda x: x.set_(torch.zeros(2, device=x.device)),
    "foreach": lambda x: torch._foreach_add_([x], 1),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@rows(WRITABLE)
def test_what_is_made_of_an_inference_tensor_outside_may_be_written(case: Callable[..., Any], write: str) -> None:
    made = []
    for device in ("lazy", "cpu"):
        with torch.inference_mode():
            x = grid(device, 3) * 2
        part = case(x)
        WRITES[write](part)
        made.append([x, part, part._version > 0])
    assert_same(*made)


# Results whose memory is not that which the operator's kernel returned, or that no operator made.
APART: dict[str, Callable[[], Any]] = {
    "at_an_offset": lambda: torch.as_strided_scatter(grid("lazy", 9)[2:], torch.ones(2, device="lazy"), (2,), (1,), 3),
    "a_conjugate": lambda: torch.vdot(grid("lazy", 3) * 1j, (grid("lazy", 3) * 1j).conj()),
    "from_a_generator": lambda: torch.rand(3, device="lazy", generator=torch.Generator()),
    "drawn_in_place": lambda: torch.empty(3, device="lazy").normal_(generator=torch.Generator()),
    "resized": lambda: torch.add(grid("lazy", 3), 1, out=torch.empty(0, device="lazy")),
    "grown": lambda: torch.zeros(3, device="lazy").resize_(2),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lazy_backend.eager_mode])
@pytest.mark.parametrize("first_sight", ["run", "record"])
@rows(APART)
def test_memory_made_in_inference_mode_is_normal(case: Callable[[], Any], first_sight: str, mode: Any) -> None:
    config.first_sight = first_sight
    with mode():
        with torch.inference_mode():
            made = case()
        before = made.cpu()
        alias = made.detach()
        alias.add_(1)
        assert_same(alias.cpu(), before + 1)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [False, True])
def test_an_inference_tensor_is_not_written_outside(write: str, grad: bool) -> None:
    for device in ("lazy", "cpu"):
        with torch.inference_mode():
            made = grid(device, 3) * 2
            alias = made.detach()
        for x in (made, alias, made[1:]):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                WRITES[write](x)


def test_what_is_run_in_inference_mode_stays_normal(background) -> None:
    x, unused, unwritten = grid("lazy", 3) * 2, torch.zeros(3, device="lazy"), torch.empty(3, device="lazy")
    with torch.inference_mode():
        unwritten.copy_(torch.ones(3))
        unused + 1
        lazy_backend.mark_step()
    for tensor in (x, unused, unwritten):
        tensor.add_(1)
        lazy_backend.mark_step()
    assert_same([x, unused, unwritten], [torch.arange(3.0) * 2 + 1, torch.ones(3), torch.full((3,), 2.0)])


def test_a_transformer_layer_in_inference_mode() -> None:
    eager = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    lazy = copy.deepcopy(eager).to("lazy")
    batch = torch.rand(2, 3, 8)
    moved = batch.to("lazy")
    with torch.inference_mode():
        torch.testing.assert_close(lazy(moved).cpu(), eager(batch))


def test_training_around_evaluation_in_inference_mode(background) -> None:
    def trained(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(grid(device, 2, 3)).square().sum().backward()
            optimizer.step()
            with torch.inference_mode():
                model(grid(device, 2, 3)).sum().item()
                lazy_backend.mark_step()
        return model.weight.detach().cpu()

    assert_same(trained("lazy"), trained("cpu"))


# ----- fake tensors


def test_a_fake_module_on_the_device() -> None:
    with FakeTensorMode():
        model = nn.Linear(3, 2, device="lazy")
        y = model(torch.ones(4, 3, device="lazy"))
        y.sum().backward()
    assert (y.shape, y.device.type, model.weight.grad.shape) == ((4, 2), "lazy", (2, 3))


def test_a_fake_mode_does_not_convert_lazy_tensors() -> None:
    # torch's own rule; better an error than a real tensor that passes for a fake one
    with pytest.raises(UnsupportedFakeTensorException):
        FakeTensorMode().from_tensor(grid("lazy", 3))


# ----- tensor subclasses


class Sub(torch.Tensor):
    pass


def test_a_wrapper_subclass_holds_lazy_tensors() -> None:
    x = grid("lazy", 3)
    pair = TwoTensor(x, x * 2) * 3 + 1
    assert_same([pair.a, pair.b], [torch.arange(3.0) * 3 + 1, torch.arange(3.0) * 6 + 1])
    assert pair.device == x.device


@pytest.mark.parametrize(
    "order", [lambda x, pair: x * pair, lambda x, pair: pair * x, lambda x, pair: torch.cat([x, pair])]
)
def test_a_wrapper_subclass_beside_lazy_tensors(order) -> None:
    lazy, eager = (order(grid(d, 3), TwoTensor(grid(d, 3), grid(d, 3) * 2)) for d in ("lazy", "cpu"))
    assert_same([lazy.a, lazy.b], [eager.a, eager.b])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_wrapper_subclass_is_copied(how) -> None:
    pair = how(TwoTensor(grid("lazy", 3), grid("lazy", 3) * 2))
    assert_same([pair.a, pair.b], [torch.arange(3.0), torch.arange(3.0) * 2])


def test_gradients_of_a_wrapper_subclass() -> None:
    pair = TwoTensor(grid("lazy", 3), grid("lazy", 3) * 2).requires_grad_()
    (pair * pair).sum().backward()
    assert_same([pair.grad.a, pair.grad.b], [2 * torch.arange(3.0), 4 * torch.arange(3.0)])


def test_a_module_with_a_wrapper_subclass_moves() -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach()))
    model.to("lazy")
    assert isinstance(model.weight.a, LazyTensor)
    assert model(torch.ones(1, 3, device="lazy")).b.shape == (1, 2)


@pytest.mark.parametrize("make", [lambda x: x.as_subclass(Sub), lambda x: Sub([1.0, 2.0]).to("lazy")])
def test_a_plain_subclass_works_or_says_why_not(make) -> None:
    try:
        made = make(grid("lazy", 2))
    except RuntimeError as error:
        assert "a lazy tensor cannot become a Sub" in str(error)  # noqa: PT017
    else:
        assert isinstance(made + 1, Sub)


def test_as_subclass_of_its_own_classes() -> None:
    x = grid("lazy", 2)
    x.as_subclass(torch.Tensor).add_(1)
    assert x.as_subclass(LazyTensor).tolist() == [1.0, 2.0]


OVERRIDES = {
    "is_tensor": lambda device: torch.is_tensor(grid(device, 2)),
    "is_tensor_like": lambda device: torch.overrides.is_tensor_like(grid(device, 2)),
    "has_torch_function": lambda device: torch.overrides.has_torch_function((grid(device, 2),)),
    "is_storage": lambda device: torch.is_storage(grid(device, 2)),
    "is_floating_point": lambda device: torch.is_floating_point(grid(device, 2)),
    "is_nonzero": lambda device: torch.is_nonzero(scalar(1.0, device)),
    "result_type": lambda device: torch.result_type(grid(device, 2), 1.0),
    "a_parameter": lambda device: isinstance(nn.Parameter(grid(device, 2)), nn.Parameter),
    "no_parameter": lambda device: isinstance(grid(device, 2), nn.Parameter),
    "a_buffer": lambda device: isinstance(nn.Buffer(grid(device, 2)), nn.Buffer),
    "a_parameter_of_ints": lambda device: nn.Parameter(grid(device, 2).long(), requires_grad=False).requires_grad,
    "a_parameter_shares": lambda device: (x := grid(device, 2), nn.Parameter(x).detach().zero_())[0],
    "no_names": lambda device: grid(device, 2).names,
    "has_names": lambda device: grid(device, 2).has_names(),
}  # fmt: skip


@rows(OVERRIDES)
def test_question_as_eager(case: Case) -> None:
    assert_same(outcome(case, "lazy"), outcome(case, "cpu"))


NAMED = {
    "refine": lambda device: grid(device, 2).refine_names("a").names,
    "rename": lambda device: grid(device, 2).rename("a").names,
    "zeros": lambda device: torch.zeros(2, names=("a",), device=device).names,
    "align": lambda device: grid(device, 2).align_to("a").names,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Named tensors")
@rows(NAMED)
def test_named_tensors_as_eager(case: Case) -> None:
    assert outcome(case, "lazy") == outcome(case, "cpu")


# ----- other kinds of tensors

REFUSED = {
    "to_mkldnn": lambda x: x.to_mkldnn(),
    "nested_tensor": lambda x: torch.nested.nested_tensor([x, x[1:]]),
    "as_nested_tensor": lambda x: torch.nested.as_nested_tensor([x, x[1:]]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@rows(REFUSED)
def test_another_kind_of_tensor_is_refused_with_line_and_advice(case: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(LazyBackendError, match=r"cannot be[\s\S]*\n  at .*test_interplay.py:\d+\n  .*CPU"):
        case(grid("lazy", 2, 2))


def test_a_jagged_tensor_of_lazy_rows() -> None:
    sums = []
    for device in ("lazy", "cpu"):
        rows_ = [grid(device, 2, 3), grid(device, 4, 3)]
        jagged = torch.nested.nested_tensor(rows_, layout=torch.jagged)
        sums.append((jagged * 2).to_padded_tensor(0.0).sum().item())
    assert sums[0] == sums[1]


def test_fake_quantisation_works() -> None:
    lazy, eager = (torch.fake_quantize_per_tensor_affine(grid(d, 3) / 3, 0.1, 0, 0, 255) for d in ("lazy", "cpu"))
    assert_same(lazy, eager)


def test_a_scripted_and_a_traced_module() -> None:
    model = nn.Linear(3, 2).to("lazy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda x: x * 2 + 1, grid("lazy", 3))
        scripted = torch.jit.script(model)
    assert_same(traced(grid("lazy", 3)), torch.arange(3.0) * 2 + 1)
    assert torch.equal(scripted(grid("lazy", 3)), model(grid("lazy", 3)))


def norm_of_all(x):
    return torch.norm(x)


def norm_of_rows(x):
    return torch.norm(x, p=2, dim=-1, keepdim=True)


def norm_of_dims(x):
    return torch.norm(x, 2, [0, 1])


def frobenius_norm(x):
    return torch.functional.norm(x, "fro", [0, 1])


def nuclear_norm(x):
    return torch.norm(x, "nuc")


def is_cast(x):
    return torch.tensor(torch.is_autocast_enabled())


SCRIPTED = [
    norm_of_all,
    norm_of_rows,
    norm_of_dims,
    frobenius_norm,
    nuclear_norm,
    is_cast,
    nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), 1, enable_nested_tensor=False),
]


@pytest.mark.parametrize("case", SCRIPTED, ids=lambda case: getattr(case, "__name__", type(case).__name__))
def test_torchscript_compiles_functions_that_are_replaced(case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(case)
    assert torch.equal(scripted(grid("cpu", 3, 4)), case(grid("cpu", 3, 4)))


TRACED = {
    "export": lambda model, x: torch.export.export(model, (x,)),
    "strict_export": lambda model, x: torch.export.export(model, (x,), strict=True),
    "compile": lambda model, x: torch.compile(model)(x),
    "compile_eager": lambda model, x: torch.compile(model, backend="eager")(x),
    "make_fx": lambda model, x: make_fx(model)(x),
    "make_fx_fake": lambda model, x: make_fx(model, tracing_mode="fake")(x),
    "make_fx_symbolic": lambda model, x: make_fx(model, tracing_mode="symbolic")(x),
    "aot": lambda model, x: aot_function(torch.relu, lambda graph, _: graph)(x),
    "linearize": lambda model, x: torch.func.linearize(torch.relu, x),
    "opcheck": lambda model, x: torch.library.opcheck(torch.ops.aten.sin.default, (x,)),
}  # fmt: skip


@rows(TRACED)
def test_tracing_says_that_it_does_not_take_lazy_tensors(case) -> None:
    with pytest.raises(Exception, match="does not take lazy tensors"):
        case(nn.Linear(3, 2).to("lazy"), grid("lazy", 3))


def test_a_profiled_step_computes_the_same() -> None:
    with count("Fallback") as fallbacks, torch.profiler.profile() as profile:
        x = (grid("lazy", 3) * 2).tolist()
    assert x == [0.0, 2.0, 4.0]
    assert fallbacks() == 0
    assert len(profile.key_averages()) > 0
