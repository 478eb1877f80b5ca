"""A lazy tensor to the rest of Python: printing, numbers, attributes, `to`, comparisons. As eager's, or refused.

Tables of programs run on both devices and end alike: the same values, or the same error in the same words.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from harness import assert_same, count, grid, live_tensors
from torch import nn
from torch.autograd import forward_ad

import lazy_backend

Case = Callable[[str], Any]


def outcome(case: Case, device: str) -> Any:
    """What the case returns on the device, or the error it raises there, with its text."""
    try:
        return case(device)
    except Exception as error:
        return type(error), str(error).replace("LazyTensor", "Tensor").replace("lazy:0", "cpu").replace("  ", " ")


def rows(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())


def scalar(value: Any, device: str) -> torch.Tensor:
    return torch.tensor(value).to(device)


# ----- printing

PRINTED = {
    "a_bool_tensor": lambda device: grid(device, 3) > 1,
    "a_complex_tensor": lambda device: torch.tensor([1 + 2j]).to(device),
    "a_conjugate": lambda device: torch.tensor([1 + 2j]).to(device).conj(),
    "a_negated_view": lambda device: torch.tensor([1 + 2j]).to(device).conj().imag,
    "bfloat16": lambda device: grid(device, 3).bfloat16(),
    "half": lambda device: grid(device, 3).half(),
    "float8": lambda device: grid(device, 3).to(torch.float8_e4m3fn),
    "int32": lambda device: grid(device, 3, dtype=torch.int32),
    "nan_and_inf": lambda device: torch.tensor([math.nan, 1e10, math.inf]).to(device),
    "a_number": lambda device: scalar(2, device),
    "rows": lambda device: grid(device, 2, 2),
    "a_large_tensor": lambda device: grid(device, 100, 100) + 0,
    "a_large_bool_tensor": lambda device: grid(device, 100, 100) > 5,
    "a_large_result": lambda device: grid(device, 100, 100).requires_grad_() * 2,
    "a_parameter_without_grad": lambda device: nn.Parameter(grid(device, 2), requires_grad=False),
    "a_parameter_list": lambda device: nn.ParameterList([nn.Parameter(grid(device, 2))]),
    "a_module": lambda device: nn.Sequential(nn.Linear(2, 3), nn.ReLU()).to(device),
}  # fmt: skip


def printed(thing: object) -> str:
    """Its repr, without the device, which the CPU's does not show; what follows it may stand on another line."""
    plain = re.sub(r",\s+device='lazy:0'", "", repr(thing)).replace("lazy:0", "cpu")
    return re.sub(r",\s+(requires_grad|grad_fn|dtype|size)=", r", \1=", plain)


@rows(PRINTED)
def test_prints_as_eager(case: Case) -> None:
    assert printed(case("lazy")) == printed(case("cpu"))


@rows(PRINTED)
def test_printing_cuts_at_most_once(case: Case) -> None:
    thing = case("lazy")
    with count("GraphCut") as cuts:
        repr(thing)
    assert cuts() <= 1


@pytest.mark.parametrize("convert", [repr, str, "{}".format, "%s".__mod__])
def test_every_way_to_print_is_repr(convert) -> None:
    assert convert(grid("lazy", 2)) == "tensor([0., 1.], device='lazy:0')"


PRINT_OPTIONS = {
    "precision": {"precision": 10},
    "sci_mode": {"sci_mode": True},
    "no_sci_mode": {"sci_mode": False},
    "edges": {"edgeitems": 1, "threshold": 2},
    "no_edges": {"edgeitems": 0, "threshold": 2},
    "narrow": {"linewidth": 40},
    "full": {"profile": "full"},
}


@rows(PRINT_OPTIONS)
def test_print_options_hold(case: dict[str, Any]) -> None:
    torch.set_printoptions(**case)
    try:
        thing = [grid("lazy", 7, 13) / 3, (grid("lazy", 13) * 1e3).requires_grad_() / 7]
        expected = [grid("cpu", 7, 13) / 3, (grid("cpu", 13) * 1e3).requires_grad_() / 7]
        assert printed(thing) == printed(expected)
    finally:
        torch.set_printoptions(profile="default")


def test_what_follows_the_numbers_wraps_as_on_other_devices() -> None:
    row = torch.full((9,), 0.125, device="lazy", requires_grad=True)
    numbers = ", ".join(["0.1250"] * 9)
    assert repr(row) == f"tensor([{numbers}],\n       device='lazy:0', requires_grad=True)"


def test_a_forward_gradient_is_printed() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grid("lazy", 2), grid("lazy", 2))
        assert repr(dual) == "tensor([0., 1.], device='lazy:0', tangent=tensor([0., 1.], device='lazy:0'))"


def test_printing_leaves_the_step_as_it_was() -> None:
    def step(look: bool) -> None:
        x = grid("lazy", 50, 50)
        lazy_backend.mark_step()
        if look:
            repr(x)
        y = x * 2
        lazy_backend.mark_step()
        assert y[0, 1].item() == 2

    step(look=False)
    step(look=False)
    with count("UncachedCompile") as compiles:
        step(look=True)
    assert compiles() == 0


@pytest.mark.parametrize("options", [{"precision": 2, "sci_mode": True}, {"threshold": 3, "edgeitems": 1}])
def test_print_options_count(options) -> None:
    torch.set_printoptions(**options)
    try:
        texts = [printed(grid(device, 20) / 3) for device in ("lazy", "cpu")]
    finally:
        torch.set_printoptions(profile="default")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("spec", ["", ".3f", "5.1e"])
def test_a_number_that_needs_grad_formats(spec: str) -> None:
    x = [scalar(2.5, device).requires_grad_() for device in ("lazy", "cpu")]
    assert format(x[0], spec) == format(x[1], spec)


# ----- Python's protocols

PROTOCOLS = {
    "bool_of_nothing": lambda device: bool(grid(device, 0)),
    "bool_of_one_element": lambda device: bool(torch.zeros(1, device=device)),
    "not": lambda device: not scalar(0, device),
    "int_of_several": lambda device: int(grid(device, 2)),
    "int_of_one_element": lambda device: int(grid(device, 1)),
    "float_of_a_complex": lambda device: float(scalar(1 + 2j, device)),
    "range": lambda device: list(range(scalar(3, device))),
    "index_a_list_by_a_float": lambda device: [1, 2][scalar(1.0, device)],
    "index_a_list_by_a_bool": lambda device: [1, 2][scalar(True, device)],
    "index_a_list_by_a_row": lambda device: [1, 2][torch.ones(1, dtype=torch.int64, device=device)],
    "index_a_list_by_several": lambda device: [1, 2][grid(device, 2, dtype=torch.int64)],
    "index_an_array": lambda device: numpy.arange(4)[scalar(1, device)].item(),
    "slice_by_tensors": lambda device: grid(device, 5)[scalar(1, device) : scalar(3, device)],
    "repeat_a_list": lambda device: [0] * scalar(3, device),
    "iterate": lambda device: list(grid(device, 3)),
    "iterate_a_number": lambda device: list(scalar(1, device)),
    "unpack_too_many": lambda device: (lambda a, b: a)(*grid(device, 3)),
    "star": lambda device: [*grid(device, 2, 2)],
    "reversed": lambda device: reversed(grid(device, 2, 2)),
    "reversed_number": lambda device: reversed(scalar(1, device)),
    "a_tensor_in": lambda device: scalar(2.0, device) in grid(device, 3),
    "a_string_in": lambda device: "a" in grid(device, 3),
    "none_in": lambda device: None in grid(device, 3),
    "equals_none": lambda device: grid(device, 3) == None,  # noqa: E711
    "differs_from_none": lambda device: grid(device, 3) != None,  # noqa: E711
    "less_than_none": lambda device: grid(device, 3) < None,
    "equals_a_string": lambda device: grid(device, 3) == "a",
    "equals_a_list": lambda device: grid(device, 3) == [1, 2, 3],
    "equals_a_number": lambda device: grid(device, 3) == 1,
    "a_number_is_less": lambda device: 1 < grid(device, 3),  # noqa: SIM300
    "plus_none": lambda device: grid(device, 3) + None,
    "plus_a_string": lambda device: grid(device, 3) + "a",
    "a_list_plus": lambda device: [1] + grid(device, 1),
    "sum": lambda device: sum(grid(device, 3)),
    "max": lambda device: max(grid(device, 3)),
    "sorted": lambda device: sorted(-grid(device, 3)),
    "round": lambda device: round(scalar(4.5, device)),
    "floor": lambda device: math.floor(scalar(4.5, device)),
    "sqrt": lambda device: math.sqrt(scalar(4.0, device)),
    "divmod": lambda device: divmod(scalar(4.5, device), 2),
    "abs": lambda device: abs(-grid(device, 2)),
    "format_several": lambda device: format(grid(device, 3), ".2f"),
    "a_set_of_two": lambda device: len({grid(device, 3), grid(device, 3)}),
    "tolist_of_bools": lambda device: (grid(device, 3) > 1).tolist(),
    "tolist_of_bfloat16": lambda device: (grid(device, 3) / 3).bfloat16().tolist(),
    "tolist_of_a_conjugate": lambda device: torch.tensor([1j]).to(device).conj().tolist(),
    "tolist_of_nothing": lambda device: torch.empty(0, 3, device=device).tolist(),
    "tolist_of_a_leaf": lambda device: grid(device, 3).requires_grad_().tolist(),
    "dir": lambda device: {"add", "grad", "to"} <= set(dir(grid(device, 2))),
    "sizes": lambda device: (grid(device, 2, 3).nbytes, grid(device, 2, 3).itemsize, grid(device, 2, 3).size(-1)),
    "dim_order": lambda device: grid(device, 2, 3).t().dim_order(),
    "is_set_to": lambda device: [(x := grid(device, 2)).is_set_to(x), x.is_set_to(x.clone())],
    "versions": lambda device: [(x := grid(device, 2)).add_(1)._version, x.detach()._version, x.data._version],
    "views_know_their_base": lambda device: [(x := grid(device, 2))[1:]._base is x, x._base, x[1:]._is_view()],
}  # fmt: skip


@rows(PROTOCOLS)
def test_protocol_as_eager(case: Case) -> None:
    assert_same(outcome(case, "lazy"), outcome(case, "cpu"))


NUMPY_SCALARS = {
    "float64_times": lambda x: numpy.float64(2) * x,
    "float32_plus": lambda x: numpy.float32(2) + x,
    "int64_minus": lambda x: numpy.int64(2) - x,
    "times_float64": lambda x: x * numpy.float64(2),
    "to_the_float32": lambda x: x ** numpy.float32(2),
    "by_int64": lambda x: x // numpy.int64(2),
    "times_bool": lambda x: x * numpy.bool_(True),
    "float64_equals": lambda x: numpy.float64(2) == x,
    "float64_less": lambda x: numpy.float64(1) < x,
    "array_minus": lambda x: numpy.ones(3) - x,
}  # fmt: skip


@rows(NUMPY_SCALARS)
def test_numpy_operand_as_eager(case: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_same(
        outcome(lambda device: case(grid(device, 3)), "lazy"), outcome(lambda device: case(grid(device, 3)), "cpu")
    )


@pytest.mark.parametrize(
    "convert",
    [
        numpy.sin,
        lambda x: x * numpy.ones(3),
        lambda x: numpy.array(list(x)),
        lambda x: x.requires_grad_().numpy(),
    ],
)
def test_numpy_says_use_cpu_as_for_cuda(convert) -> None:
    with pytest.raises(TypeError, match=r"can't convert lazy:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        convert(grid("lazy", 3))


def test_numpy_by_force_of_a_conjugate_and_of_a_leaf() -> None:
    assert torch.tensor([1j]).to("lazy").conj().numpy(force=True).tolist() == [-1j]
    assert grid("lazy", 2).requires_grad_().numpy(force=True).tolist() == [0.0, 1.0]


# ----- attributes and lifetimes


def test_attributes_can_be_set() -> None:
    x = grid("lazy", 2)
    x.note = [1]
    assert x.note == [1]
    assert not hasattr(x.clone(), "note")


def test_a_users_weak_reference_dies_with_the_tensor() -> None:
    x = grid("lazy", 2)
    reference = weakref.ref(x)
    assert reference() is x
    del x
    assert reference() is None


def test_a_parameter_is_a_weak_key() -> None:
    parameter = nn.Parameter(grid("lazy", 2))
    table = torch.utils.weak.WeakTensorKeyDictionary({parameter: 1})
    assert table[parameter] == 1
    del parameter
    assert len(table) == 0


def test_manners_leave_nothing_alive() -> None:
    def be_polite() -> None:
        x = grid("lazy", 3)
        x.note = 1
        x.data = x * 2
        copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), repr(x), x.tolist(), x.numpy(force=True)
        x.untyped_storage().nbytes()
        lazy_backend.mark_step()

    be_polite()  # what is learnt at first sight stays
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        be_polite()
        assert live_tensors() == before
    finally:
        gc.enable()


# ----- `to`, in every form

TO = {
    "nothing": lambda x, device: x.to(),
    "none": lambda x, device: x.to(None),
    "dtype": lambda x, device: x.to(torch.int32),
    "dtype_by_name": lambda x, device: x.to(dtype=torch.int32),
    "dtype_non_blocking": lambda x, device: x.to(torch.int32, True),
    "dtype_copy": lambda x, device: x.to(torch.int32, False, True),
    "device": lambda x, device: x.to(torch.device(device)),
    "device_by_name": lambda x, device: x.to(device=device),
    "device_and_dtype": lambda x, device: x.to(device, torch.int32),
    "device_and_dtype_by_name": lambda x, device: x.to(dtype=torch.int32, device=device),
    "no_device_but_dtype": lambda x, device: x.to(None, torch.int32),
    "everything": lambda x, device: x.to(device, torch.int32, True, True),
    "other": lambda x, device: x.to(torch.ones(1, dtype=torch.float16, device=device)),
    "other_by_name": lambda x, device: x.to(other=torch.ones(1, dtype=torch.float16, device=device)),
    "other_on_the_cpu": lambda x, device: x.to(torch.ones(1, dtype=torch.float16)),
    "memory_format": lambda x, device: x.to(memory_format=torch.channels_last),
    "dtype_and_memory_format": lambda x, device: x.to(torch.float64, memory_format=torch.channels_last),
    "memory_format_to_the_cpu": lambda x, device: x.to("cpu", memory_format=torch.channels_last),
    "cpu_of_channels_last": lambda x, device: x.to(memory_format=torch.channels_last).cpu(),
    "cpu_of_a_transpose": lambda x, device: x.transpose(0, 1).cpu(),
    "cpu_non_blocking": lambda x, device: x.to("cpu", non_blocking=True),
    "cpu_preserving": lambda x, device: x.cpu(memory_format=torch.preserve_format),
    "double_channels_last": lambda x, device: x.double(memory_format=torch.channels_last),
    "type": lambda x, device: x.type(torch.float64),
    "type_by_name": lambda x, device: x.type("torch.DoubleTensor").cpu(),
    "type_by_its_own_name": lambda x, device: x.double().type(x.type()),
    "an_unknown_device": lambda x, device: x.to("nowhere"),
    "a_number": lambda x, device: x.to(1.5),
    "an_index": lambda x, device: x.to(0),
    "cuda": lambda x, device: x.cuda(),
    "an_absent_device": lambda x, device: x.to("cuda"),
}  # fmt: skip
UPLOADS = {
    "device": lambda x, device: x.to(device),
    "non_blocking": lambda x, device: x.to(device, non_blocking=True),
    "channels_last": lambda x, device: x.to(device, memory_format=torch.channels_last),
    "of_channels_last": lambda x, device: x.to(memory_format=torch.channels_last).to(device),
    "other": lambda x, device: x.to(torch.ones(1, dtype=torch.float16, device=device)),
    "copy": lambda x, device: x.to(torch.ones(1, device=device), copy=True),
    "copy_non_blocking": lambda x, device: torch.zeros(x.shape, device=device).copy_(x, non_blocking=True),
}  # fmt: skip
CONVERSIONS = (
    "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat", "cdouble",
)  # fmt: skip


@rows(TO)
def test_to_as_eager(case: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    lazy, eager = (outcome(lambda device: case(grid(device, 1, 2, 3, 4), device), d) for d in ("lazy", "cpu"))
    assert_same(lazy, eager)


@rows(UPLOADS)
def test_upload_as_eager(case: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
    made = case(grid("cpu", 1, 2, 3, 4), "lazy")
    assert made.is_lazy
    assert_same(made, case(grid("cpu", 1, 2, 3, 4), "cpu"))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_as_eager(name: str) -> None:
    assert_same(getattr(grid("lazy", 3), name)(), getattr(grid("cpu", 3), name)())


def test_to_returns_itself_in_every_form() -> None:
    x = grid("lazy", 3)
    same = (
        x.to(torch.device("lazy")), x.to(device="lazy"), x.to(torch.float32), x.to(dtype=torch.float32), x.float(),
        x.to(device="lazy", dtype=torch.float32, non_blocking=True), x.contiguous(), x.type(torch.float32), x.to(),
    )  # fmt: skip
    assert all(y is x for y in same)
    assert x.to(torch.float32, copy=True) is not x


def test_gradients_cross_devices() -> None:
    host, lazy = torch.ones(2, requires_grad=True), torch.ones(2, device="lazy", requires_grad=True)
    (host.to("lazy") * 2).sum().backward()
    (lazy.to("cpu") * 3).sum().backward()
    assert type(host.grad) is torch.Tensor
    assert_same([host.grad, lazy.grad], [torch.full((2,), 2.0), torch.full((2,), 3.0)])


def test_type_names_the_device() -> None:
    assert grid("lazy", 2).type() == "torch.lazy.FloatTensor"


def test_lazy_memory_is_not_pinned() -> None:
    assert not grid("lazy", 2).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.zeros(2, device="lazy", pin_memory=True)


# ----- comparisons

COMPARISONS = {
    "equal_of_other_dtypes": lambda device: torch.equal(grid(device, 3), grid(device, 3).double()),
    "equal_nan": lambda device: torch.equal(x := grid(device, 3) / 0, x),
    "allclose_nan": lambda device: torch.allclose(x := grid(device, 3) / 0, x, equal_nan=True),
    "allclose_of_other_dtypes": lambda device: torch.allclose(grid(device, 3), grid(device, 3).double()),
    "isclose": lambda device: torch.isclose(grid(device, 3), grid(device, 3) + 1e-9),
    "close_nan": lambda device: torch.testing.assert_close(x := grid(device, 3) / 0, x, equal_nan=True),
    "close_trees": lambda device: torch.testing.assert_close({"a": [grid(device, 3)]}, {"a": [grid(device, 3)]}),
    "far": lambda device: torch.testing.assert_close(grid(device, 3), grid(device, 3) + 1),
    "another_dtype": lambda device: torch.testing.assert_close(grid(device, 3), grid(device, 3).double()),
    "another_stride": lambda device: torch.testing.assert_close(
        grid(device, 2, 2), grid(device, 2, 2).t(), check_stride=True
    ),
}  # fmt: skip


@rows(COMPARISONS)
def test_comparison_as_eager(case: Case) -> None:
    assert_same(outcome(case, "lazy"), outcome(case, "cpu"))


def test_equal_does_not_mix_devices() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.equal(grid("lazy", 3), grid("cpu", 3))


def test_assert_close_sees_devices() -> None:
    with pytest.raises(AssertionError, match="device"):
        torch.testing.assert_close(grid("lazy", 3), grid("cpu", 3))
    torch.testing.assert_close(grid("lazy", 3), grid("cpu", 3), check_device=False)


# ----- making tensors from tensors

FROM_TENSORS = {
    "tensor_of_numbers": lambda device: torch.tensor([scalar(1.0, device), scalar(2.0, device)]),
    "as_tensor_of_numbers": lambda device: torch.as_tensor([scalar(1.0, device)] * 2),
    "tensor_of_ints": lambda device: torch.tensor([[scalar(1, device)], [scalar(2, device)]]),
    "stack": lambda device: torch.stack([scalar(1.0, device)] * 2),
    "as_tensor_with_dtype": lambda device: torch.as_tensor(grid(device, 3), dtype=torch.float64),
    "as_tensor_to_the_cpu": lambda device: torch.as_tensor(grid(device, 3), device="cpu"),
    "as_tensor_to_the_device": lambda device: torch.as_tensor(grid("cpu", 3), device=device),
    "as_tensor_is_itself": lambda device: torch.as_tensor(x := grid(device, 3)) is x,
    "asarray_is_itself": lambda device: torch.asarray(x := grid(device, 3)) is x,
    "asarray_copies": lambda device: torch.asarray(x := grid(device, 3), copy=True) is x,
    "asarray_to_the_cpu": lambda device: torch.asarray(grid(device, 3), device="cpu"),
    "asarray_to_the_device": lambda device: torch.asarray(grid("cpu", 3), device=device),
    "asarray_with_grad": lambda device: torch.asarray(grid(device, 3), requires_grad=True),
    "new_of_sizes": lambda device: grid(device, 1).new(2, 3).shape,
    "new_of_a_list": lambda device: grid(device, 1).new([1.0, 2.0]),
    "new_of_nothing": lambda device: grid(device, 1).new(),
    "new_empty_strided": lambda device: grid(device, 1).new_empty_strided((2, 3), (1, 2)).stride(),
    "new_zeros_with_grad": lambda device: grid(device, 1).new_zeros(2, requires_grad=True),
    "new_zeros_on_the_cpu": lambda device: grid(device, 1).new_zeros(2, device="cpu"),
    "new_ones_of_a_negative_size": lambda device: grid(device, 1).new_ones((2, -1)),
}  # fmt: skip


@rows(FROM_TENSORS)
def test_made_from_tensors_as_eager(case: Case) -> None:
    assert_same(outcome(case, "lazy"), outcome(case, "cpu"))


@pytest.mark.parametrize("make", [torch.tensor, lambda x: x.new_tensor(x), lambda x: torch.tensor(x, device="cpu")])
def test_a_copy_by_construction_is_a_copy(make) -> None:
    x = grid("lazy", 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")
        made = make(x)
    x.add_(1)
    assert_same(made, torch.arange(3.0))
