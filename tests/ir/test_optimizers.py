"""Fused optimizers written out, with floats as literals and as inputs, against PyTorch's kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builder import Program, aten

from lazy_backend.lowering.compilation.fx import Signature, to_fx
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.optimizers import can_write_out

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
    "is_first_step": False,
}  # fmt: skip
ADAGRAD = {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.0, "eps": 1e-10, "maximize": False}

# operator, tensors of state per parameter, whether it counts steps, arguments
CASES: dict[str, tuple[Any, int, bool, dict[str, Any]]] = {
    "adam": (aten._fused_adam_, 2, True, ADAM),
    "adam, all": (aten._fused_adam_, 3, True, {**ADAM, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adam, small betas": (aten._fused_adam_, 2, True, {**ADAM, "beta1": 0.3, "beta2": 0.0}),
    "adamw": (aten._fused_adamw_, 2, True, {**ADAM, "weight_decay": 0.1}),
    "adamw, all": (aten._fused_adamw_, 3, True, {**ADAM, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "sgd": (aten._fused_sgd_, 0, False, {**SGD, "momentum": 0.0}),
    "sgd, decay": (aten._fused_sgd_, 0, False, {**SGD, "momentum": 0.0, "weight_decay": 0.1, "maximize": True}),
    "sgd, momentum": (aten._fused_sgd_, 1, False, {**SGD, "dampening": 0.3}),
    "sgd, nesterov": (aten._fused_sgd_, 1, False, {**SGD, "nesterov": True, "weight_decay": 0.1}),
    "sgd, first": (aten._fused_sgd_, 1, False, {**SGD, "dampening": 0.3, "is_first_step": True}),
    "adagrad": (aten._fused_adagrad_, 1, True, ADAGRAD),
    "adagrad, decay": (aten._fused_adagrad_, 1, True, {**ADAGRAD, "weight_decay": 0.1, "maximize": True}),
}
SHAPES = ((4, 3), (5,), ())


def operands(case: str, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    """Lists as the operator takes them: parameters, gradients, state (positive, as sums of squares are), steps."""
    op, states, counts, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    lists = [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(2 + states)]
    lists[2:] = [[tensor.abs() + 0.1 for tensor in tensors] for tensors in lists[2:]]
    if op is aten._fused_sgd_ and not states:
        lists.append([])
    if op in (aten._fused_adam_, aten._fused_adamw_) and states == 2:
        lists.append([])
    return [*lists, [torch.tensor(3.0) for _ in SHAPES]] if counts else lists


def program_of(case: str, lists: list[list[torch.Tensor]], overload: str, kwargs: dict[str, Any]) -> Graph:
    """The graph of one call on copies of `lists`."""
    program = Program()
    tokens = [[program.input(tensor.clone()) for tensor in tensors] for tensors in lists]
    tensors = {name: program.input(arg.clone()) for name, arg in kwargs.items() if isinstance(arg, torch.Tensor)}
    program.call(getattr(CASES[case][0], overload), *tokens, **{**kwargs, **tensors})
    return program.graph()


def written_out(graph: Graph, inputs: list[torch.Tensor], constants: list[float], promoted: frozenset[int]) -> str:
    """Run the graph as a compiler gets it. Returns its code."""
    signature = Signature.of(graph, promoted)
    module = to_fx(graph, constants, signature)
    packed = [torch.tensor([constants[place] for place in signature.scalars], dtype=torch.float64)] if promoted else []
    module(*inputs, *packed)
    return str(module.code)


def assert_written_out(
    case: str, promoted: str, dtype: torch.dtype = torch.float32, overload: str = "default", **changes: Any
) -> None:
    kwargs = {**CASES[case][3], **changes}
    lists, floats = operands(case, dtype), [value for value in kwargs.values() if isinstance(value, float)]
    graph = program_of(case, lists, overload, kwargs)
    expected, mine = copy.deepcopy(lists), copy.deepcopy(lists)
    getattr(CASES[case][0], overload)(*expected, **kwargs)
    inputs = [t for tensors in mine for t in tensors] + [a for a in kwargs.values() if isinstance(a, torch.Tensor)]
    places = {"none": [], "lr": [list(kwargs).index("lr")], "all": range(len(floats))}[promoted]
    code = written_out(graph, inputs, floats, frozenset(places))
    assert "fused" not in code
    eps = torch.finfo(dtype).eps
    for name, actual, wanted in zip(("param", "grad", "state", "state", "state"), mine, expected, strict=False):
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(
                one, other, rtol=8 * eps, atol=16 * eps, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("promoted", ["none", "lr", "all"])
@pytest.mark.parametrize("case", CASES)
def test_a_call_written_out_gives_the_kernels_values(case: str, promoted: str) -> None:
    assert_written_out(case, promoted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["adam, all", "adamw", "sgd, nesterov", "adagrad, decay"])
def test_other_types(case: str, dtype: torch.dtype) -> None:
    assert_written_out(case, "all", dtype)


@pytest.mark.parametrize("lr", [torch.tensor(0.02), torch.tensor([0.02], dtype=torch.float64)], ids=["0-d", "1-d"])
@pytest.mark.parametrize("case", ["adam", "adamw", "sgd", "sgd, momentum", "adagrad"])
def test_a_learning_rate_that_is_a_tensor(case: str, lr: torch.Tensor) -> None:
    assert_written_out(case, "none", overload="tensor_lr", lr=lr)


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("case", ["adam, all", "adamw", "sgd, momentum", "adagrad"])
def test_scaled_gradients_and_infinities_that_were_found(case: str, found: float) -> None:
    assert_written_out(case, "all", grad_scale=torch.tensor(8.0), found_inf=torch.tensor(found))


def test_without_decay_an_infinite_weight_adds_nothing() -> None:
    lists = [[torch.tensor([float("inf"), 1.0])], [torch.ones(2)], []]
    kwargs = {**SGD, "momentum": 0.0, "lr": 0.5}
    graph = program_of("sgd", lists, "default", kwargs)
    floats = [value for value in kwargs.values() if isinstance(value, float)]
    for promoted in (frozenset[int](), frozenset(range(len(floats)))):
        mine = copy.deepcopy(lists)
        written_out(graph, [t for tensors in mine for t in tensors], floats, promoted)
        assert mine[0][0].tolist() == [float("inf"), 0.5]


def test_gradients_that_stay_are_not_written() -> None:
    lists = operands("sgd")
    graph = program_of("sgd", lists, "default", CASES["sgd"][3])
    code = to_fx(graph, [0.0] * graph.num_constants, Signature.of(graph)).code
    assert code.count("aten.copy_.default(") == len(SHAPES)


def test_a_backend_that_takes_numbers_gets_the_call_itself() -> None:
    graph = program_of("adam", operands("adam"), "default", ADAM)
    assert "_fused_adam_" in to_fx(graph, [0.0] * graph.num_constants, Signature.of(graph, numbers=True)).code


def test_what_the_kernel_refuses_is_left_to_it() -> None:
    graph = program_of("sgd", operands("sgd"), "default", CASES["sgd"][3])
    (node,) = graph.nodes
    params, grads, buffers = node.args
    assert can_write_out(node)
    for args in ((params, grads[:-1], buffers), (params, (grads[1], grads[0], grads[2]), buffers)):
        assert not can_write_out(type(node)(node.op, args, node.kwargs, (), (), False, None, ""))
