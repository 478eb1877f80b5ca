"""The dispatcher hands over no argument that equals its default: kernels and handlers of ours get shorter calls.

Every one of them whose operator has such an argument is called with all defaults spelled out, which PyTorch drops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, geometry, grid

from lazy_backend.lowering.compilation import scalars
from lazy_backend.recording import record
from lazy_backend.settings import config

aten = torch.ops.aten

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def overloads() -> dict[str, torch._ops.OpOverload]:
    """Every aten operator, as `copy_.default`."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            overload = schema.overload_name or "default"
            op = getattr(getattr(aten, name, None), overload, None)
            if isinstance(op, torch._ops.OpOverload):
                found[f"{name}.{overload}"] = op
    return found


def has_kernel_of_ours(name: str, op: torch._ops.OpOverload) -> bool:
    handler = record._handlers.get(id(op))
    # those of record.py are chosen when an operator is first seen, and hand on what they get
    if handler is not None and handler.__module__ != record.__name__:
        return True
    registered = name.removesuffix(".default")
    return any(f"aten/{registered}/{key}" in torch.library._impls for key in ("Lazy", "AutogradLazy"))


def may_be_dropped(argument: torch.Argument) -> bool:
    if not argument.has_default_value():
        return False
    # whoever asks for an option by name takes it as None anyway
    return not (argument.kwarg_only and argument.default_value is None)


def ours() -> dict[str, torch._ops.OpOverload]:
    return {
        name: op
        for name, op in overloads().items()
        if has_kernel_of_ours(name, op) and any(map(may_be_dropped, op._schema.arguments))
    }


def spelled_out(op: torch._ops.OpOverload, args: tuple[Any, ...], options: dict[str, Any]) -> Arguments:
    """The call with a value for every argument."""
    positional = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    named = [argument for argument in op._schema.arguments if argument.kwarg_only and argument.has_default_value()]
    full = (*args, *(argument.default_value for argument in positional[len(args) :]))
    return full, {**{argument.name: argument.default_value for argument in named}, **options}


def cell(device: str, count: int, state: Any) -> tuple[Any, ...]:
    return grid(device, 2, 3), state, grid(device, count * 4, 3), grid(device, count * 4, 4)


def attention(device: str) -> tuple[Any, ...]:
    return tuple(grid(device, 1, 2, 4, 8) / 64 for _ in range(3))


def made_on(*args: Any) -> Callable[[str], Arguments]:
    return lambda device: (args, {"device": torch.device(device)})


# The arguments without a default, by operator.
def compressed(device: str, shape: tuple[int, ...] = (1,)) -> tuple[torch.Tensor, ...]:
    """The parts of a compressed sparse tensor of two rows with one element, a number or a block."""
    return torch.tensor([0, 1, 1]).to(device), torch.tensor([1]).to(device), grid(device, *shape)


CALLS: dict[str, Callable[[str], Arguments]] = {
    "_validate_sparse_bsc_tensor_args.default": lambda d: ((*compressed(d, (1, 1, 1)), [2, 2]), {}),
    "_validate_sparse_bsr_tensor_args.default": lambda d: ((*compressed(d, (1, 1, 1)), [2, 2]), {}),
    "_validate_sparse_compressed_tensor_args.default": lambda d: ((*compressed(d), [2, 2], torch.sparse_csr), {}),
    "_validate_sparse_coo_tensor_args.default": lambda d: ((torch.tensor([[0, 1]]).to(d), grid(d, 2), [3]), {}),
    "_validate_sparse_csc_tensor_args.default": lambda d: ((*compressed(d), [2, 2]), {}),
    "_validate_sparse_csr_tensor_args.default": lambda d: ((*compressed(d), [2, 2]), {}),
    "_scaled_dot_product_flash_attention_for_cpu.default": lambda d: (attention(d), {}),
    "_sparse_coo_tensor_with_dims_and_tensors.default": lambda d: (
        (1, 0, [4], torch.tensor([[0, 2]]).to(d), torch.ones(2, device=d)),
        {"dtype": torch.float32, "layout": torch.sparse_coo, "device": torch.device(d)},
    ),
    "_to_copy.default": lambda d: ((grid(d, 3),), {}),
    "arange.start_step": made_on(2, 9),
    "as_strided_.default": lambda d: ((grid(d, 6), [3], [2]), {}),
    "copy_.default": lambda d: ((grid(d, 3), torch.zeros(3, device=d)), {}),
    "group_norm.default": lambda d: ((grid(d, 2, 4, 3), 2), {}),
    "gru_cell.default": lambda d: (cell(d, 3, grid(d, 2, 4)), {}),
    "histc.default": lambda d: ((grid(d, 5),), {}),
    "linalg_lu_solve.default": lambda d: (
        (*(part.to(d) for part in torch.linalg.lu_factor(torch.eye(3) + 0.5)), grid(d, 3, 2)),
        {},
    ),
    "linalg_matrix_rank.atol_rtol_float_out": lambda d: (
        (grid(d, 3, 3),),
        {"out": torch.zeros((), dtype=torch.long, device=d)},
    ),
    "linalg_matrix_rank.atol_rtol_tensor_out": lambda d: (
        (grid(d, 3, 3),),
        {"out": torch.zeros((), dtype=torch.long, device=d)},
    ),
    "linalg_matrix_rank.out": lambda d: ((grid(d, 3, 3), 0.5), {"out": torch.zeros((), dtype=torch.long, device=d)}),
    "linalg_matrix_rank.out_tol_tensor": lambda d: (
        (grid(d, 3, 3), torch.tensor(0.5).to(d)),
        {"out": torch.zeros((), dtype=torch.long, device=d)},
    ),
    "linear.out": lambda d: ((grid(d, 2, 3), grid(d, 4, 3)), {"out": torch.zeros(2, 4, device=d)}),
    "logspace.default": made_on(0, 2, 3),
    "lstm_cell.default": lambda d: (cell(d, 4, [grid(d, 2, 4), grid(d, 2, 4)]), {}),
    "max_pool1d.default": lambda d: ((grid(d, 1, 8), [2]), {}),
    "one_hot.default": lambda d: ((torch.tensor([0, 2, 1]).to(d),), {}),
    "ormqr.default": lambda d: (
        (*(part.to(d) for part in torch.geqrf(torch.eye(3) + 0.5)), grid(d, 3, 2)),
        {},
    ),
    "randint.default": made_on(9, [3]),
    "randint.generator": lambda d: ((9, [3]), {"generator": torch.Generator(), "device": torch.device(d)}),
    "randint.low": made_on(2, 9, [3]),
    "randint.low_generator": lambda d: ((2, 9, [3]), {"generator": torch.Generator(), "device": torch.device(d)}),
    "randperm.default": made_on(5),
    "randperm.generator": lambda d: ((5,), {"generator": torch.Generator(), "device": torch.device(d)}),
    "range.step": made_on(2, 9),
    "rnn_relu_cell.default": lambda d: (cell(d, 1, grid(d, 2, 4)), {}),
    "rnn_tanh_cell.default": lambda d: (cell(d, 1, grid(d, 2, 4)), {}),
    "scaled_dot_product_attention.default": lambda d: (attention(d), {}),
    "set_.source_Storage_storage_offset": lambda d: (
        (torch.zeros((), device=d), grid(d, 3).untyped_storage(), 1, []),
        {},
    ),
    "tril_indices.default": made_on(3, 4),
    "triu_indices.default": made_on(3, 4),
}  # fmt: skip
# chosen on CUDA, where there is a kernel to compare with
ON_CUDA = {
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_flash_attention.default",
}
# called by copy_ and torch.tensor, below Python; the CPU has none to compare with
BELOW_PYTHON = {"_copy_from.default"}


def test_every_operator_with_a_kernel_of_ours_is_here() -> None:
    assert set(ours()) == set(CALLS) | ON_CUDA | BELOW_PYTHON


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_every_default_spelled_out(name: str, first_sight: str) -> None:
    config.first_sight = first_sight
    op = overloads()[name]
    args, options = spelled_out(op, *CALLS[name]("lazy"))
    lazy = op(*args, **options)
    args, options = spelled_out(op, *CALLS[name]("cpu"))
    eager = op(*args, **options)
    if name.startswith("rand"):
        assert geometry(lazy) == geometry(eager)
    elif isinstance(eager, torch.Tensor) and eager.layout is not torch.strided:
        assert_same(lazy.to_dense(), eager.to_dense())
    else:
        assert_same(lazy, eager)


def test_formulas_have_the_defaults_of_the_schemas() -> None:
    for name, op in overloads().items():
        base = name.partition(".")[0].removeprefix("_foreach_").removesuffix("_")
        formula = scalars._FORMULAS.get(base)
        if formula is None or any(argument.is_out for argument in op._schema.arguments):
            continue
        declared = [a for a in op._schema.arguments if not a.kwarg_only or a.name in ("alpha", "value")]
        for parameter, argument in zip(inspect.signature(formula).parameters.values(), declared, strict=False):
            if argument.has_default_value():
                assert parameter.default == argument.default_value, (name, parameter.name)
