"""What a lazy tensor is to Python: printing, reading, factories, and the errors of what cannot be."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from harness import assert_same, count, grid

import lazy_backend
from lazy_backend import DeviceError, LazyBackendError, LazyTensor

# ----- printing and reading


def test_repr_shows_values_and_device() -> None:
    assert repr(grid("lazy", 3)) == "tensor([0., 1., 2.], device='lazy:0')"


def test_repr_shows_requires_grad() -> None:
    assert "requires_grad=True" in repr(grid("lazy", 3).requires_grad_())


def test_repr_shows_what_made_it() -> None:
    assert "grad_fn=<MulBackward0>" in repr(grid("lazy", 3).requires_grad_() * 2)


def test_repr_of_a_parameter() -> None:
    parameter = torch.nn.Parameter(grid("lazy", 2))
    assert repr(parameter) == "Parameter containing:\ntensor([0., 1.], device='lazy:0', requires_grad=True)"


def test_repr_of_an_empty_tensor() -> None:
    assert "device='lazy:0'" in repr(torch.empty(0, 3, device="lazy"))


def test_a_number_formats_like_a_number() -> None:
    assert f"{torch.tensor(1.5, device='lazy'):.3f}" == "1.500"


def test_tolist() -> None:
    assert grid("lazy", 2, 2).tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_tolist_of_a_number() -> None:
    assert torch.tensor(3, device="lazy").tolist() == 3


@pytest.mark.parametrize("value", [3, 2.5, True, 1j])
def test_item(value) -> None:
    item = torch.tensor(value, device="lazy").item()
    assert item == value
    assert type(item) is type(value)


def test_item_of_several_elements_raises_like_eagers() -> None:
    with pytest.raises(RuntimeError, match="a Tensor with 3 elements cannot be converted to Scalar"):
        grid("lazy", 3).item()


@pytest.mark.parametrize("convert", [int, float, bool, complex])
def test_python_numbers(convert) -> None:
    assert convert(torch.tensor(2.0, device="lazy") + 1) == convert(3)


def test_index_protocol() -> None:
    assert [10, 20, 30][torch.tensor(1, device="lazy")] == 20


def test_bool_of_several_elements_raises_like_eagers() -> None:
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(grid("lazy", 3))


def test_len() -> None:
    assert len(grid("lazy", 3, 2)) == 3


def test_len_of_a_number_raises_like_eagers() -> None:
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(torch.tensor(1.0, device="lazy"))


def test_iteration_gives_rows() -> None:
    assert [row.tolist() for row in grid("lazy", 2, 2)] == [[0.0, 1.0], [2.0, 3.0]]


def test_unpacking_reads_nothing() -> None:
    with count("GraphCut") as cuts:
        a, b = grid("lazy", 2, 2)
        a + b
    assert cuts() == 0


def test_in() -> None:
    x = grid("lazy", 3)
    assert 2 in x
    assert 5 not in x


def test_a_lazy_tensor_is_hashable_by_identity() -> None:
    x = grid("lazy", 3)
    assert {x: 1}[x] == 1
    assert x.clone() not in {x: 1}


def test_equal() -> None:
    x = grid("lazy", 3)
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert not torch.equal(x, grid("lazy", 4))


def test_allclose() -> None:
    assert torch.allclose(grid("lazy", 3), grid("lazy", 3) + 1e-9)


def test_assert_close() -> None:
    torch.testing.assert_close(grid("lazy", 3), grid("lazy", 3))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(grid("lazy", 3), grid("lazy", 3) + 1)


def test_numpy_raises_like_cudas() -> None:
    message = (
        "can't convert lazy:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )
    with pytest.raises(TypeError) as caught:
        grid("lazy", 3).numpy()
    assert str(caught.value) == message


def test_numpy_by_force() -> None:
    assert grid("lazy", 3).numpy(force=True).tolist() == [0.0, 1.0, 2.0]


def test_numpy_array_raises_like_cudas() -> None:
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        numpy.asarray(grid("lazy", 3))


def test_data_ptr_tells_which_tensors_share_memory() -> None:
    base = grid("lazy", 3)
    assert base.data_ptr() == base[:2].data_ptr() == base[1:].data_ptr() - 4
    assert base.data_ptr() != base.clone().data_ptr()


def test_the_class_is_not_called() -> None:
    with pytest.raises(TypeError, match=r'LazyTensor is not called: make one with device="lazy" or \.to\("lazy"\)'):
        LazyTensor()


def test_data_of_another_device_raises() -> None:
    with pytest.raises(RuntimeError, match="a lazy tensor's data cannot be set to a tensor on cpu"):
        grid("lazy", 3).data = torch.zeros(3)


def test_is_lazy() -> None:
    assert grid("lazy", 3).is_lazy
    assert lazy_backend.is_lazy(grid("lazy", 3))
    assert not lazy_backend.is_lazy(torch.zeros(3))


def test_properties_of_the_device() -> None:
    x = grid("lazy", 3)
    assert x.device == torch.device("lazy:0")
    assert x.get_device() == 0
    assert not x.is_cpu
    assert not x.is_cuda


def test_reading_shapes_runs_nothing() -> None:
    x = torch.ones(3, 4, device="lazy").t() @ torch.ones(3, 2, device="lazy")
    with count("UncachedCompile") as compiles:
        assert (x.shape, x.dim(), x.numel(), x.element_size(), x.is_contiguous()) == ((4, 2), 2, 8, 4, True)
    assert compiles() == 0


def test_a_read_runs_everything_pending_once() -> None:
    x = torch.ones(3, device="lazy")
    y = x + 1
    x.tolist()
    with count("GraphCut") as cuts:
        y.tolist()
    assert cuts() == 0


def test_a_cut_is_counted_with_its_line() -> None:
    (torch.ones(3, device="lazy") + 1).sum().item()
    names = lazy_backend.metrics.counter_names()
    assert any(name.startswith("GraphCut: item() at ") and "test_tensor.py:" in name for name in names)


def test_get_tensor_id() -> None:
    x = grid("lazy", 3)
    assert lazy_backend.get_tensor_id(x) == lazy_backend.get_tensor_id(x.detach())
    assert lazy_backend.get_tensor_id(x) != lazy_backend.get_tensor_id(x.clone())
    with pytest.raises(TypeError, match="expected a lazy tensor, got one on cpu"):
        lazy_backend.get_tensor_id(torch.zeros(3))


def test_to_cpu_keeps_the_tree() -> None:
    tree = {"a": [grid("lazy", 2), 3], "b": (torch.ones(2), None)}
    assert_same(lazy_backend.to_cpu(tree), {"a": [torch.arange(2.0), 3], "b": (torch.ones(2), None)})


# ----- factories

FACTORIES = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "zeros_int": lambda device: torch.zeros((2, 3), dtype=torch.int64, device=device),
    "zeros_scalar": lambda device: torch.zeros((), device=device),
    "ones": lambda device: torch.ones(2, 3, dtype=torch.float64, device=device),
    "full": lambda device: torch.full((2, 3), 1.5, device=device),
    "full_int": lambda device: torch.full((2,), 7, device=device),
    "full_bool": lambda device: torch.full((2,), True, device=device),
    "full_complex": lambda device: torch.full((2,), 1 + 2j, device=device),
    "full_tensor": lambda device: torch.full((2,), torch.tensor(2.5), device=device),
    "scalar_tensor": lambda device: torch.scalar_tensor(3.5, device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "arange_start": lambda device: torch.arange(2, 7, device=device),
    "arange_step": lambda device: torch.arange(1.0, 2.0, 0.3, device=device),
    "arange_dtype": lambda device: torch.arange(5, dtype=torch.float16, device=device),
    "range": lambda device: torch.linspace(0, 1, 1, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 7, device=device),
    "logspace": lambda device: torch.logspace(0, 2, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "eye_m": lambda device: torch.eye(2, 3, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 4, device=device),
    "triu_indices": lambda device: torch.triu_indices(3, 4, 1, device=device),
    "vander": lambda device: torch.vander(torch.arange(3.0, device=device)),
    "tensor": lambda device: torch.tensor([[1.0, 2.0]], device=device),
    "tensor_int": lambda device: torch.tensor([1, 2], device=device),
    "tensor_bool": lambda device: torch.tensor([True, False], device=device),
    "tensor_scalar": lambda device: torch.tensor(2.5, device=device),
    "tensor_empty": lambda device: torch.tensor([], device=device),
    "tensor_dtype": lambda device: torch.tensor([1, 2], dtype=torch.float64, device=device),
    "tensor_half": lambda device: torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device),
    "tensor_complex": lambda device: torch.tensor([1 + 2j], device=device),
    "tensor_grad": lambda device: torch.tensor([1.0], device=device, requires_grad=True),
    "tensor_numpy": lambda device: torch.tensor(numpy.arange(3), device=device),
    "as_tensor": lambda device: torch.as_tensor([1.0, 2.0], device=device),
    "as_tensor_numpy": lambda device: torch.as_tensor(numpy.arange(3), device=device),
    "as_tensor_tensor": lambda device: torch.as_tensor(torch.arange(3), device=device),
    "asarray": lambda device: torch.asarray([1.0, 2.0], device=device),
    "complex": lambda device: torch.complex(torch.ones(2, device=device), torch.zeros(2, device=device)),
    "heaviside": lambda device: torch.heaviside(torch.zeros(2, device=device), torch.ones(2, device=device)),
    "hann_window": lambda device: torch.hann_window(5, device=device),
    "bartlett_window": lambda device: torch.bartlett_window(5, device=device),
    "cartesian": lambda device: torch.cartesian_prod(*torch.arange(6, device=device).view(2, 3)),
    "meshgrid": lambda device: torch.meshgrid(*torch.arange(6, device=device).view(2, 3), indexing="ij"),
    "new_zeros": lambda device: torch.ones(2, dtype=torch.float64, device=device).new_zeros(2, 3),
    "new_ones": lambda device: torch.ones(2, device=device).new_ones((2, 3), dtype=torch.int32),
    "new_full": lambda device: torch.ones(2, device=device).new_full((2, 3), 3.25),
    "new_tensor": lambda device: torch.ones(2, dtype=torch.float64, device=device).new_tensor([1, 2]),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2, 3, device=device).t()),
    "ones_like": lambda device: torch.ones_like(torch.ones(2, 3, device=device), dtype=torch.int64),
    "full_like": lambda device: torch.full_like(torch.ones(2, 3, device=device), 7.5),
    "zeros_like_cpu": lambda device: torch.zeros_like(torch.ones(2, 3), device=device),
    "full_like_cpu": lambda device: torch.full_like(torch.ones(2, 3), 2.5, device=device),
    "as_strided": lambda device: torch.empty_strided((2, 3), (1, 2), device=device).zero_(),
    "channels_last": lambda device: torch.empty(1, 2, 3, 4, device=device, memory_format=torch.channels_last).zero_(),
    "one_hot": lambda device: torch.nn.functional.one_hot(torch.arange(3, device=device), 4),
}  # fmt: skip

SHAPES = {
    "empty": lambda device: torch.empty(2, 3, device=device),
    "empty_strided": lambda device: torch.empty_strided((2, 3), (1, 4), device=device),
    "empty_like": lambda device: torch.empty_like(torch.ones(2, 3, device=device).t(), dtype=torch.int32),
    "new_empty": lambda device: torch.ones(2, device=device).new_empty(3, 4),
    "rand": lambda device: torch.rand(2, 3, device=device),
    "randn": lambda device: torch.randn(2, 3, dtype=torch.float64, device=device),
    "randint": lambda device: torch.randint(5, (2, 3), device=device),
    "randint_low": lambda device: torch.randint(2, 5, (2, 3), device=device),
    "randperm": lambda device: torch.randperm(7, device=device),
    "rand_like": lambda device: torch.rand_like(torch.ones(2, 3, device=device)),
    "randn_like": lambda device: torch.randn_like(torch.ones(2, 3, device=device)),
    "randint_like": lambda device: torch.randint_like(torch.ones(2, 3, device=device), 5),
    "normal": lambda device: torch.normal(0.0, 1.0, (2, 3), device=device),
    "normal_tensor": lambda device: torch.normal(torch.ones(2, 3, device=device), 1.0),
    "rand_like_cpu": lambda device: torch.rand_like(torch.ones(2, 3), device=device),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_gives_eagers_values(name: str) -> None:
    made = FACTORIES[name]("lazy")
    assert all(isinstance(tensor, LazyTensor) for tensor in (made if isinstance(made, tuple) else [made]))
    assert_same(made, FACTORIES[name]("cpu"))


@pytest.mark.parametrize("name", SHAPES)
def test_factory_gives_eagers_geometry(name: str) -> None:
    made, expected = SHAPES[name]("lazy"), SHAPES[name]("cpu")
    assert isinstance(made, LazyTensor)
    assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (made.cpu().dtype, made.cpu().shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_by_the_device_context(name: str) -> None:
    if name in ("full_tensor", "zeros_like_cpu", "full_like_cpu", "as_tensor_tensor"):
        pytest.skip("makes a CPU tensor first")
    with torch.device("lazy"):
        made = FACTORIES[name](None)
    assert_same(made, FACTORIES[name]("cpu"))


def test_set_default_device() -> None:
    torch.set_default_device("lazy")
    try:
        x = torch.zeros(2) + torch.tensor([1.0, 2.0])
    finally:
        torch.set_default_device(None)
    assert isinstance(x, LazyTensor)
    assert_same(x, torch.tensor([1.0, 2.0]))


def test_the_default_dtype_counts() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        made = torch.zeros(2, device="lazy"), torch.empty(2, device="lazy"), torch.rand(2, device="lazy")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in made] == [torch.float64] * 3


def test_a_module_is_made_on_the_device() -> None:
    linear = torch.nn.Linear(3, 2, device="lazy")
    assert isinstance(linear.weight, torch.nn.Parameter)
    assert linear.weight.device == torch.device("lazy:0")


@pytest.mark.parametrize("factory", [torch.zeros, torch.empty, torch.ones, torch.rand])
def test_a_negative_size_raises_like_eagers(factory) -> None:
    texts = []
    for device in ("cpu", "lazy"):
        with pytest.raises(RuntimeError) as caught:
            factory(-1, device=device)
        texts.append(str(caught.value))
    assert texts[1] == texts[0]


def test_meta_copies() -> None:
    x = grid("lazy", 2, 3).to("meta")
    assert x.is_meta
    assert x.shape == (2, 3)


# ----- copies between devices


def test_to_returns_itself() -> None:
    x = grid("lazy", 3)
    assert x.to("lazy:0") is x
    assert x.to("lazy") is x
    assert x.to(x) is x
    assert x.to("lazy", torch.float32) is x


def test_to_copies_when_asked() -> None:
    x = grid("lazy", 3)
    y = x.to("lazy", copy=True)
    y.zero_()
    assert x.tolist() == [0.0, 1.0, 2.0]


def test_to_with_a_dtype() -> None:
    assert_same(torch.arange(3).to("lazy", torch.float64), torch.arange(3, dtype=torch.float64))
    assert_same(grid("lazy", 3).to("cpu", torch.int32), torch.arange(3, dtype=torch.int32))


def test_a_cpu_tensor_copies_from_a_lazy_one() -> None:
    target = torch.zeros(3)
    target.copy_(grid("lazy", 3))
    assert_same(target, torch.arange(3.0))


def test_a_lazy_tensor_copies_from_a_cpu_one_with_broadcast_and_cast() -> None:
    target = torch.zeros(2, 3, device="lazy")
    target.copy_(torch.arange(3))
    assert_same(target, torch.arange(3.0).expand(2, 3).clone())


def test_unwritten_memory_takes_an_upload_with_broadcast_and_cast() -> None:
    target = torch.empty(2, 3, device="lazy")
    target.copy_(torch.arange(3))
    assert_same(target, torch.arange(3.0).expand(2, 3).clone())


def test_type_as() -> None:
    assert_same(torch.arange(3).type_as(grid("lazy", 1)), torch.arange(3.0))


# ----- CPU operands


def test_cpu_scalars_mix() -> None:
    x = grid("lazy", 3)
    assert_same(x * torch.tensor(2.0) + torch.tensor(1), torch.arange(3.0) * 2 + 1)
    assert_same(torch.tensor(2.0) - x, 2 - torch.arange(3.0))


def test_a_cpu_scalar_keeps_its_promotion_rules() -> None:
    x = torch.arange(3, dtype=torch.bfloat16)
    assert_same(x.to("lazy") * torch.tensor(1.001), x * torch.tensor(1.001))


def test_a_changing_cpu_scalar_compiles_nothing_new() -> None:
    x = grid("lazy", 3)
    for value in range(4):
        y = x * torch.tensor(float(value))
        lazy_backend.mark_step()
        assert_same(y, torch.arange(3.0) * value)
    assert lazy_backend.metrics.counter_value("UncachedCompile") == 1


def test_a_cpu_scalar_written_after_its_use_does_not_change_the_past() -> None:
    x, scalar = grid("lazy", 3), torch.tensor(2.0)
    y = x * scalar
    scalar.add_(1)
    z = x * scalar
    assert_same([y, z], [torch.arange(3.0) * 2, torch.arange(3.0) * 3])


def test_a_cpu_tensor_does_not_mix() -> None:
    with pytest.raises(DeviceError) as caught:
        grid("lazy", 3) + torch.ones(3)
    first, line, advice = str(caught.value).split("\n")
    assert first == "expected all tensors to be on the same device, but found lazy:0 and cpu in aten::add"
    assert "test_tensor.py:" in line
    assert advice == "  move one of them, as in tensor.to('lazy:0')"


def below_the_device(x: torch.Tensor) -> torch.Tensor:
    """A tensor that PyTorch makes where it asks no class: it says that it is on the device, and that is all."""
    with torch._C._DisableTorchDispatch():
        return x.detach()


def without_a_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.UninitializedParameter(device=x.device)


def buffer_without_a_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.parameter.UninitializedBuffer(device=x.device)


USES_WITHOUT_VALUE: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
    "operand": (below_the_device, lambda x, odd: x + odd),
    "first operand": (below_the_device, lambda x, odd: odd * x),
    "list": (below_the_device, lambda x, odd: torch.cat([x, odd])),
    "out": (below_the_device, lambda x, odd: torch.add(x, x, out=odd)),
    "equal": (below_the_device, lambda x, odd: torch.equal(x, odd)),
    "copy_": (below_the_device, lambda x, odd: x.copy_(odd)),
    "cpu": (below_the_device, lambda x, odd: odd.cpu()),
    "item": (lambda x: below_the_device(x[0]), lambda x, odd: odd.item()),
    "parameter without a shape": (without_a_shape, lambda x, odd: odd.long()),
    "buffer without a shape": (buffer_without_a_shape, lambda x, odd: odd.long()),
}


@pytest.mark.parametrize("name", USES_WITHOUT_VALUE)
def test_a_tensor_of_the_device_without_a_value_is_named(name: str) -> None:
    make, use = USES_WITHOUT_VALUE[name]
    x = grid("lazy", 3)
    with pytest.raises(LazyBackendError, match="has no value there") as caught:
        use(x, make(x))
    _, line, advice = str(caught.value).split("\n")
    assert "test_tensor.py:" in line
    assert "same device" not in str(caught.value)
    assert advice
    assert_same(x, torch.arange(3.0))


def test_an_in_place_op_on_a_cpu_tensor_does_not_mix() -> None:
    x = torch.ones(3)
    with pytest.raises(DeviceError, match="expected all tensors to be on the same device"):
        x.add_(grid("lazy", 3))
    assert_same(x, torch.ones(3))


def test_an_in_place_op_on_a_cpu_scalar_does_not_write_the_constants_cache() -> None:
    scalar = torch.tensor(2.0)
    with pytest.raises(RuntimeError):
        scalar.add_(torch.tensor(1.0, device="lazy"))
    assert_same(grid("lazy", 3) * torch.tensor(2.0), torch.arange(3.0) * 2)


def test_a_refused_mix_leaves_nothing_in_the_trace() -> None:
    def step(mix: bool) -> None:
        x = torch.ones(3, device="lazy")
        if mix:
            with pytest.raises(DeviceError):
                x + torch.ones(3)
        y = x * 2
        lazy_backend.mark_step()
        assert_same(y, torch.full((3,), 2.0))

    step(mix=False)
    step(mix=True)
    assert lazy_backend.metrics.counter_value("UncachedCompile") == 1


def test_cpu_indices_mix() -> None:
    index = torch.tensor([2, 0])
    assert_same(grid("lazy", 3, 2)[index], grid("cpu", 3, 2)[index])


def test_a_lazy_index_into_a_cpu_tensor_raises() -> None:
    with pytest.raises(RuntimeError):
        torch.arange(3)[torch.tensor([0], device="lazy")]


def test_a_write_to_a_cpu_tensor_at_a_lazy_index_raises() -> None:
    x = torch.arange(3)
    with pytest.raises(RuntimeError):
        x[torch.tensor([0], device="lazy")] = torch.tensor(5, device="lazy")


def test_cpu_lengths_of_a_packed_sequence_mix() -> None:
    def packed(device: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pack_padded_sequence(grid(device, 3, 2, 1), torch.tensor([3, 2])).data

    assert_same(packed("lazy"), packed("cpu"))


@pytest.mark.parametrize("lengths", [lambda n, device: (n,), lambda n, device: torch.tensor([n]).to(device)])
def test_ctc_loss(lengths) -> None:
    def loss(device: str) -> torch.Tensor:
        scores, targets = grid(device, 5, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]).to(device)
        return torch.nn.functional.ctc_loss(scores, targets, lengths(5, device), lengths(2, device))

    assert_same(loss("lazy"), loss("cpu"))


# ----- several devices


def test_a_wrong_index_raises() -> None:
    with pytest.raises(DeviceError, match="there is no device lazy:7\n  devices: lazy:0 to lazy:0"):
        torch.zeros(2, device="lazy:7")


def test_two_devices_hold_tensors(two_devices) -> None:
    first, second = (torch.ones(2, device=device) for device in two_devices)
    assert (first.device, second.device) == two_devices
    assert_same([first, second + 1], [torch.ones(2), torch.full((2,), 2.0)])


def test_two_devices_do_not_mix(two_devices) -> None:
    first, second = (torch.ones(2, device=device) for device in two_devices)
    with pytest.raises(DeviceError, match="found lazy:0 and lazy:1"):
        first + second


def test_a_copy_crosses_devices(two_devices) -> None:
    x = grid("lazy:0", 2, 3) * 2
    y = x.to("lazy:1") + 1
    z = torch.zeros(2, 3, device="lazy:0")
    z.copy_(y)
    assert y.device.index == 1
    assert_same([x, y, z], [grid("cpu", 2, 3) * 2, grid("cpu", 2, 3) * 2 + 1, grid("cpu", 2, 3) * 2 + 1])


def test_like_factories_cross_devices(two_devices) -> None:
    y = torch.ones_like(grid("lazy:0", 2, 3), device="lazy:1")
    assert y.device.index == 1
    assert_same(y, torch.ones(2, 3))


def test_the_current_device_is_what_lazy_means(two_devices) -> None:
    torch.get_device_module("lazy").set_device("lazy:1")
    assert torch.zeros(2, device="lazy").device.index == 1
    assert torch.get_device_module("lazy").current_device() == 1


def test_each_thread_has_a_current_device_of_its_own(two_devices) -> None:
    lazy = torch.get_device_module("lazy")
    with lazy.device(1), ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: torch.zeros(2, device="lazy").device.index).result() == 0
        other.submit(lazy.set_device, 0).result()
        assert torch.zeros(2, device="lazy").device.index == 1


def test_mark_step_of_one_device_leaves_the_other(two_devices) -> None:
    first, second = (torch.ones(2, device=device) for device in two_devices)
    lazy_backend.mark_step("lazy:1")
    with count("GraphCut") as cuts:
        second.tolist()
    assert cuts() == 0
    with count("GraphCut") as cuts:
        first.tolist()
    assert cuts() == 1


# ----- the device module


def test_the_device_module() -> None:
    module = torch.get_device_module("lazy")
    assert module.is_available()
    assert module.device_count() == 1
    assert module.current_device() == 0
    module.synchronize()


def test_synchronize_runs_what_is_pending() -> None:
    x = torch.ones(2, device="lazy") + 1
    torch.get_device_module("lazy").synchronize()
    with count("GraphCut") as cuts:
        x.tolist()
    assert cuts() == 0


# Questions that libraries ask of a device module, each with what the answer must be on a CPU backing.
ANSWERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "memory_allocated": (lambda module: module.memory_allocated("lazy"), lambda count: count >= 4000),
    "max_memory_allocated": (lambda module: module.max_memory_allocated(), lambda count: count >= 4000),
    "memory_reserved": (lambda module: module.memory_reserved(0), lambda count: count >= 4000),
    "max_memory_reserved": (lambda module: module.max_memory_reserved(), lambda count: count >= 4000),
    "memory_stats": (
        lambda module: module.memory_stats(),
        lambda found: found["reserved_bytes.all.peak"] >= found["allocated_bytes.all.current"] >= 4000,
    ),
    "mem_get_info": (lambda module: module.mem_get_info(), lambda found: 0 < found[0] <= found[1]),
    "get_device_name": (lambda module: module.get_device_name(), bool),
    "get_device_properties": (
        lambda module: module.get_device_properties("lazy:0"),
        lambda found: found.total_memory > 1 << 20 and found.multi_processor_count == os.cpu_count(),
    ),
    "get_device_capability": (lambda module: module.get_device_capability(), lambda found: found == (0, 0)),
    "is_bf16_supported": (lambda module: module.is_bf16_supported(), lambda found: found is True),
    "get_amp_supported_dtype": (
        lambda module: module.get_amp_supported_dtype(),
        lambda found: found == [torch.bfloat16, torch.float16],
    ),
    "is_tf32_supported": (lambda module: module.is_tf32_supported(), lambda found: found is False),
    "can_device_access_peer": (lambda module: module.can_device_access_peer(0, 0), lambda found: found is True),
    "is_current_stream_capturing": (lambda module: module.is_current_stream_capturing(), lambda found: found is False),
    "empty_cache": (lambda module: module.empty_cache(), lambda found: found is None),
    "init": (lambda module: module.init(), lambda found: found is None),
    "get_rng_state_all": (lambda module: module.get_rng_state_all(), lambda states: len(states) == 1),
    "seed_all": (lambda module: module.seed_all(), lambda seed: seed == torch.initial_seed()),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="answers for the CPU")
@pytest.mark.parametrize("name", ANSWERS)
def test_the_device_module_answers(name: str) -> None:
    held = torch.ones(1000, device="lazy")
    lazy_backend.mark_step()
    ask, is_right = ANSWERS[name]
    assert is_right(ask(torch.get_device_module(held.device)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="answers for the CPU")
def test_the_most_memory_that_was_seen() -> None:
    module = torch.get_device_module("lazy")
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    large = torch.ones(10**6, device="lazy")
    lazy_backend.mark_step(wait=True)
    assert module.memory_allocated() == before + 4 * 10**6
    del large
    assert (module.memory_allocated(), module.max_memory_allocated()) == (before, before + 4 * 10**6)
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == before


def test_the_current_device_and_stream() -> None:
    lazy_backend.config.num_devices = 2
    module = torch.get_device_module("lazy")
    with module.device_of(torch.ones(1, device="lazy:1")):
        assert module.current_device() == 1
        with module.device_of(torch.ones(1)):
            assert module.current_device() == 1
    assert module.current_device() == 0
    one, other = module.Stream(), module.Stream()
    module.set_stream(one)
    try:
        with module.StreamContext(other):
            assert module.current_stream() is other
        assert module.current_stream() is one
    finally:
        module.set_stream(module.default_stream())
    assert module.current_stream() is module.default_stream()


def test_all_states_of_random_numbers_are_set() -> None:
    module = torch.get_device_module("lazy")
    states = module.get_rng_state_all()
    drawn = torch.rand(3, device="lazy").cpu()
    module.set_rng_state_all(states)
    assert_same(torch.rand(3, device="lazy"), drawn)


@pytest.mark.parametrize("where", ["always", "never"])
@pytest.mark.parametrize("backend", ["interpreted", "eager", "aot_eager"])
def test_autocast_for_the_cpu_does_not_reach_into_a_run(backend: str, where: str) -> None:
    lazy_backend.config.run_in_background = where
    lazy_backend.config.compile = "off" if backend == "interpreted" else "foreground"
    lazy_backend.config.backend = "eager" if backend == "interpreted" else backend
    x = grid("cpu", 2, 2)
    for _ in range(3):
        made = x.to("lazy") @ x.to("lazy")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lazy_backend.mark_step()
        assert_same(made, x @ x)


@pytest.mark.parametrize("is_complex", [False, True])
def test_data_may_become_a_conjugate_view(is_complex: bool) -> None:
    """A real tensor becomes a complex one that shares the view's memory; found by the fuzzer."""

    def program(device: str) -> list[object]:
        base = torch.complex(torch.arange(3.0), -torch.ones(3)).to(device)
        tensor = torch.zeros(3, dtype=torch.complex64 if is_complex else torch.float32).to(device)
        tensor.data = base.conj()
        found = [tensor.is_conj(), tensor.dtype, (tensor * 1j).cpu()]
        tensor.copy_(torch.complex(torch.ones(3), torch.arange(3.0)).to(device))
        return [*found, tensor.cpu(), base.cpu(), tensor.grad_fn, tensor.data.is_conj()]

    expected = program("cpu")
    for _ in range(3):
        found = program("lazy")
        lazy_backend.mark_step()
        assert_same(found, expected)
