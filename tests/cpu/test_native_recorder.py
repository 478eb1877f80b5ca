"""Known calls recorded in C++: the same programs, the same results, and Python sees all that is not plain."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same
from known_calls import CALLS, FACTORIES, draws
from torch._C import DisableTorchFunctionSubclass
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import lazy_backend
from lazy_backend import config, ir_cache
from lazy_backend.cache.disk import DiskCache
from lazy_backend.errors import LazyBackendError
from lazy_backend.ports.dispatcher import dispatch_keys
from lazy_backend.recording.native import native_recorder, recorder_key
from lazy_backend.tensors.contexts import contexts

pytestmark = pytest.mark.skipif(native_recorder.extension is None, reason="known calls are recorded in Python")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with lazy_backend.config.patch(compile="off"):  # bit for bit
        yield


def _known() -> int:
    return native_recorder.counts()[0]


def _others() -> int:
    return native_recorder.counts()[1]


# ----- programs: what they return is compared with eager's


def _mlp(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    if not state:
        torch.manual_seed(0)
        state["model"] = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)).to(device)
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), 1e-2)
    inputs = (torch.arange(32.0) / (10 + step)).reshape(4, 8).to(device)
    loss = F.cross_entropy(state["model"](inputs), torch.tensor([0, 1, 2, step % 3]).to(device))
    state["optimizer"].zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    for group in state["optimizer"].param_groups:
        group["lr"] = 1e-2 / (1 + step)
    state["optimizer"].step()
    return loss.detach()


def _norms(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    if not state:
        torch.manual_seed(0)
        layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.GroupNorm(2, 4)
        state["model"] = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LayerNorm(64)).to(device)
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), 0.1, momentum=0.9)
    images = (torch.arange(72.0) * (1 + step)).sin().reshape(2, 1, 6, 6).to(device)
    loss = state["model"](images).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss.detach()


def _views(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    base = torch.arange(24.0).to(device).reshape(4, 6) * 1.5
    rows = base.unbind(0)
    left, right = base.t().split([2, 4])
    base[1:3, ::2].add_(float(step))
    flat = torch.cat([rows[0], left.reshape(-1), right[:, 1]])
    flat.masked_fill_(flat > 10, 2.0).narrow(0, 2, 3).mul_(0.5)
    return torch.stack([flat.sum(), rows[1].max(), base.var(), base[..., -1].prod()])


def _branches(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    value = torch.full((3,), float(step)).to(device)
    value = value * 2 if step % 2 else value + 3
    return value.exp() if step % 3 == 0 else value.clamp(min=1, max=5)


def _arguments(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    value = torch.linspace(-1, 1, 12).to(device).reshape(3, 4)
    likes = torch.ones_like(value), torch.zeros_like(value, dtype=torch.float64), value.to(torch.float64, copy=True)
    found = F.pad(value, [1, 2]).sum(dim=[0], keepdim=True)
    ordered, places = value.sort(dim=1, descending=step % 2 == 0)
    numbers = ordered.cumsum(0, dtype=torch.float64), places.to(torch.float64), value.div(3, rounding_mode="floor")
    return torch.cat(
        [one.double().reshape(-1) for one in (*likes, found, *numbers, value.add(value, alpha=0.5 + step))]
    )


def _gradients_of_gradients(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    value = (torch.arange(4.0) + step).to(device).requires_grad_()
    (first,) = torch.autograd.grad(value.pow(3).sum(), value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    with torch.no_grad():
        value += 1
    with torch.inference_mode():
        return torch.stack([first.detach().sum(), second.sum(), (value * 2).sum()])


def _attention(device: str, step: int, state: dict[str, Any]) -> torch.Tensor:
    operand = (torch.arange(96.0) * (1 + step)).cos().reshape(1, 2, 6, 8).to(device).requires_grad_()
    bias = torch.arange(36.0).reshape(6, 6).to(device) / 10
    attended = F.scaled_dot_product_attention(operand, operand * 2, operand.sin(), is_causal=True)
    attended = F.scaled_dot_product_attention(attended, operand, attended, attn_mask=bias, scale=0.5)
    with torch.no_grad():
        plain = F.scaled_dot_product_attention(operand, operand, operand)
    larger = F.interpolate(attended + plain, scale_factor=1.5, mode="nearest")
    (gradient,) = torch.autograd.grad(larger.square().sum(), operand)
    return gradient


PROGRAMS = (_mlp, _norms, _views, _branches, _arguments, _gradients_of_gradients, _attention)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_are_recorded_in_cpp_and_give_what_eager_gives(program: Callable[..., torch.Tensor]) -> None:
    expected_state: dict[str, Any] = {}
    state: dict[str, Any] = {}
    in_cpp = 0
    for step in range(12):
        expected = program("cpu", step, expected_state)
        known, size = _known(), contexts.get_device_context(0).trie.size
        found = program("lazy", step, state)
        lazy_backend.mark_step()
        assert torch.equal(found.cpu(), expected), step
        if step >= 7:  # each of the program's paths was taken before
            in_cpp += _known() - known
            assert contexts.get_device_context(0).trie.size == size  # the very nodes that Python made
    assert in_cpp > 0


@pytest.mark.parametrize("eager", [False, True])
def test_attention_asks_python_for_its_kernel_alone(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is recorded, or run, in C++, and refuses to drop something out as in eager."""
    monkeypatch.setattr(config, "eager", eager)
    operand = torch.ones(1, 2, 4, 8).to("lazy")
    for _ in range(2):
        operand + 1  # the first call of a step asks whether calls run at once
        others = native_recorder.counts()[1]
        F.scaled_dot_product_attention(operand, operand, operand)
        others = native_recorder.counts()[1] - others
        with pytest.raises(RuntimeError, match="do not support dropout"):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(operand, operand, operand, 0.5)
        lazy_backend.mark_step()
    assert others == 0


@pytest.mark.parametrize("eager", [False, True])
def test_attention_follows_the_switches_of_its_kernels(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "eager", eager)
    operand = torch.randn(1, 2, 4, 8)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH) * 2:
        with sdpa_kernel(kernel):
            found, expected = (F.scaled_dot_product_attention(*(operand.to(d),) * 3) for d in ("lazy", "cpu"))
        assert torch.equal(found.cpu(), expected)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for device in ("lazy", "cpu"):
            with pytest.raises(RuntimeError, match="No viable backend"):
                F.scaled_dot_product_attention(*(operand.to(device),) * 3)


def _random(state: dict[str, Any]) -> list[torch.Tensor]:
    """Dropouts, norms, numbers and casts of autocast, from the same seed each time."""
    if not state:
        layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout2d(0.3), torch.nn.RReLU()
        state["model"] = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(64, 3))
        state["model"].to("lazy")
    torch.manual_seed(3)
    with torch.autocast("lazy"):
        out = state["model"](torch.randn(2, 1, 6, 6).to("lazy"))
        kept = F.dropout(out, 0.2).bernoulli_(0.5) + torch.randn_like(out) + torch.rand(3, device="lazy")
        attended = F.scaled_dot_product_attention(*(out.float().view(1, 1, 2, 3),) * 3, dropout_p=0.5)
    kept.sum().backward()
    gradients = [parameter.grad for parameter in state["model"].parameters() if parameter.grad is not None]
    state["model"].zero_grad()
    state["model"][1].reset_running_stats()
    return [kept, attended, *gradients, torch.get_rng_state()]


def test_random_calls_draw_in_cpp_what_they_draw_in_python() -> None:
    state: dict[str, Any] = {}
    before = _known(), _others()
    expected = [one.cpu() for one in _random(state)]
    for _ in range(5):
        lazy_backend.mark_step()
        before = _known(), _others()
        found = _random(state)
        counted = _known() - before[0], _others() - before[1]
        assert all(map(torch.equal, [one.cpu() for one in found], expected))
    assert counted[0] > 30
    assert counted[1] == 0  # none of them goes to Python


def test_a_finalizer_in_the_midst_of_a_random_call_changes_no_number() -> None:
    state: dict[str, Any] = {}
    expected = [one.cpu() for one in _random(state)]
    kinds = (number % 5 for number in range(1 << 30))
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(3, 2, 2)
        for _ in range(30):
            _Finalized(kinds)
            assert all(map(torch.equal, [one.cpu() for one in _random(state)], expected))
            lazy_backend.mark_step()
    finally:
        gc.set_threshold(*threshold)
        gc.collect()


def test_an_exception_of_a_draw_reaches_the_program() -> None:
    value = torch.ones(8).to("lazy")
    for _ in range(4):
        F.dropout(value)
        lazy_backend.mark_step()
    torch.manual_seed(0)
    expected = F.dropout(value)
    lazy_backend.mark_step()

    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    num_raised = 0
    try:
        for delay in range(1, 60):
            torch.manual_seed(0)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay * 1e-6)
                for _ in range(20):
                    torch.manual_seed(0)
                    found = F.dropout(value)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedError:
                num_raised += 1
                torch.manual_seed(0)
                found = F.dropout(value)
            assert torch.equal(found, expected)
            lazy_backend.mark_step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_raised > 10


def _step(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = value * 2
    return made, made.t(), made.add_(1.0), made.detach(), made.unbind(0)[0], made.to(torch.float64)


def test_what_is_made_in_cpp_is_like_what_is_made_in_python() -> None:
    value = torch.ones(2, 3).to("lazy").requires_grad_()
    described = []
    for _ in range(4):
        known = _known()
        made = _step(value)
        described.append(
            [
                (
                    type(one), one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.layout,
                    one.requires_grad, one.is_leaf, one._version, one._is_view(), one.is_inference(),
                    one.untyped_storage().nbytes(), str(dispatch_keys(one)), type(one.grad_fn).__name__,
                    one._data.meta, one._data.storage is made[0]._data.storage,
                )
                for one in made
            ]
        )  # fmt: skip
        in_cpp = _known() - known
        lazy_backend.mark_step()
    assert in_cpp >= 5
    assert described[0] == described[1] == described[3]


def test_python_sees_calls_under_a_mode() -> None:
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    value = torch.ones(3).to("lazy")
    for _ in range(4):
        with Watching():
            value.mul(2).relu()
        lazy_backend.mark_step()
    assert seen.count(torch.ops.aten.relu.default) == 4


def test_lists_of_inference_tensors_are_refused_as_in_python() -> None:
    with torch.inference_mode():
        value = torch.ones(3).to("lazy") * 2
    for _ in range(4):
        other = torch.ones(3).to("lazy")
        torch._foreach_add_([other], 1.0)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            torch._foreach_add_([value], 1.0)
        lazy_backend.mark_step()


def _choosing(device: str, step: int, ways: int) -> torch.Tensor:
    """A program that goes on in one of several ways, from its first call on and once more later."""
    way = step % ways
    x = torch.arange(1.0, 7.0 + way, device=device) if way % 2 else torch.full((6,), 2.0, device=device)
    made = [x.sin, x.cos, x.exp, x.sqrt][way % 4]() * (step + 1)
    return (made.reshape(-1, 1) if way < 4 else made.unsqueeze(0)).sum(way % 2)


@pytest.mark.parametrize("ways", [2, 3, 8])
def test_programs_that_take_turns_are_recorded_in_cpp(ways: int) -> None:
    seen = 4 * ways
    for step in range(seen):
        assert_same(_choosing("lazy", step, ways).cpu(), _choosing("cpu", step, ways))
        lazy_backend.mark_step()
    others = _others()
    for step in [*range(seen), *reversed(range(seen))]:
        found = _choosing("lazy", step, ways)
        assert _others() == others, f"step {step} went to Python"
        assert_same(found.cpu(), _choosing("cpu", step, ways))
        others = _others()  # the read's
        lazy_backend.mark_step()


def test_a_program_with_very_many_ways_to_go_on_is_what_eager_gives() -> None:
    x = torch.arange(40.0, device="lazy")
    for _ in range(3):
        for size in range(1, 31):
            assert_same(x[:size].sum().cpu(), torch.arange(float(size)).sum())
            lazy_backend.mark_step()


def test_torch_asks_lazy_tensors_for_their_function_as_before() -> None:
    class Seen(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls += 1
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    lazy = torch.ones(2, device="lazy")
    assert not torch.overrides.has_torch_function_unary(lazy)
    assert not torch.overrides.has_torch_function_variadic(lazy, torch.ones(2))
    other = torch.tensor(2.0).as_subclass(Seen)
    assert torch.overrides.has_torch_function_variadic(lazy, other)
    assert_same((lazy * other).cpu(), torch.full((2,), 2.0))
    assert Seen.calls > 0
    lazy.__torch_function__ = Seen.__torch_function__  # of one tensor, which no operator heeds on a CPU either
    assert_same((lazy + 1).cpu(), torch.full((2,), 2.0))


def test_calls_are_recorded_in_cpp_again_when_nobody_watches_them() -> None:
    layer = lazy_backend.capture(torch.nn.Linear(3, 3).to("lazy"))
    layer(torch.ones(2, 3).to("lazy")).sum().backward()  # the first call of a capture is watched
    lazy_backend.mark_step()
    value = torch.ones(3).to("lazy")
    for _ in range(4):
        known = _known()
        value.mul(2).relu()
        lazy_backend.mark_step()
    assert _known() == known + 2


def test_a_trace_is_cut_where_python_cuts_it() -> None:
    value = torch.ones(3).to("lazy")
    for _ in range(3):
        made = value
        for _ in range(30):
            made = made + 1
        lazy_backend.mark_step()
    before = lazy_backend.metrics.counter_value("TrimIrGraph")
    with lazy_backend.config.patch(max_trace_length=10), warnings.catch_warnings():
        warnings.simplefilter("ignore", lazy_backend.GraphCutWarning)
        made = value
        for _ in range(30):
            made = made + 1
        assert made.tolist() == [31.0] * 3
    assert lazy_backend.metrics.counter_value("TrimIrGraph") > before


def test_other_devices_and_other_tensors_are_refused_as_in_python() -> None:
    value = torch.ones(3).to("lazy")
    for _ in range(3):
        value + value
        lazy_backend.mark_step()
    with pytest.raises(RuntimeError, match="same device"):
        value + torch.ones(3)


# ----- copies from the host

_HOST = {
    "a batch": lambda: torch.randn(4, 3),
    "labels": lambda: torch.tensor([3, 1, 2]),
    "a mask": lambda: torch.tensor([[True, False]]),
    "half": lambda: torch.randn(3).half(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "transposed": lambda: torch.randn(4, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "every other": lambda: torch.randn(6)[::2],
    "one number": lambda: torch.tensor(2.5),
    "nothing": lambda: torch.randn(0, 3),
    "large": lambda: torch.randn(300, 100),
    "a parameter": lambda: torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda one: one.__name__)
@pytest.mark.parametrize("make", _HOST.values(), ids=_HOST)
def test_copies_from_the_host_are_as_in_eager(make: Callable[[], torch.Tensor], mode: Callable[..., Any]) -> None:
    def suggested(one: torch.Tensor) -> torch.memory_format:
        last = one.dim() == 4 and not one.is_contiguous()
        return torch.channels_last if last else torch.contiguous_format

    def described(one: torch.Tensor) -> tuple[Any, ...]:
        version = None if one.is_inference() else one._version
        bits = one.is_conj(), one.is_inference(), one.requires_grad, version, type(one.grad_fn).__name__
        return one.shape, one.storage_offset(), one.dtype, *bits

    double = torch.complex128 if make().is_complex() else torch.float64
    for wanted in ({}, {"dtype": double}, {"non_blocking": True}):
        source = make()
        with mode():
            found, expected = source.to("lazy", **wanted), source.to("cpu", copy=True, **wanted)
            assert described(found) == described(expected)
            with torch.no_grad():
                # PyTorch keeps other strides on some types of device only
                assert found.stride() == torch.empty_like(found.cpu(), memory_format=suggested(expected)).stride()
                source.detach().zero_()  # the copy was made
                assert torch.equal(found.cpu(), expected)


def test_a_batch_is_copied_in_cpp_and_counted() -> None:
    batch = torch.randn(4, 3)
    batch.to("lazy")
    lazy_backend.metrics.reset()
    before = native_recorder.counts()
    found = batch.to("lazy")
    known, others = native_recorder.counts()
    assert (known, others) == (before[0] + 1, before[1])
    assert lazy_backend.metrics.metric_data("OutboundData").total == batch.nbytes  # type: ignore[union-attr]
    assert lazy_backend.metrics.metric_data("TransferToDeviceTime").count == 1  # type: ignore[union-attr]
    assert lazy_backend.metrics.counter_value("CreateLtcTensor") == 1
    del found
    assert lazy_backend.metrics.counter_value("DestroyLtcTensor") == 1


def test_what_is_not_a_plain_copy_goes_to_python() -> None:
    value = torch.zeros(3).to("lazy")
    value.copy_(torch.ones(3))  # memory that is used
    view = torch.empty(2, 3, device="lazy")[0]
    view.copy_(torch.arange(3.0))  # a part of memory
    made = torch.vmap(lambda one: one.to("lazy"))(torch.ones(2, 3))
    assert (value.tolist(), view.tolist(), made.tolist()) == ([1.0] * 3, [0.0, 1.0, 2.0], [[1.0] * 3] * 2)
    with pytest.raises(RuntimeError, match="size"):
        torch.empty(2, device="lazy").copy_(torch.ones(3))
    with pytest.raises(RuntimeError, match="no device lazy:9"):
        torch.empty(2, device="lazy:9")
    with pytest.raises(RuntimeError, match="negative"):
        torch.empty(-2, device="lazy")
    assert torch.empty(2, 3, 4, 5, device="lazy", memory_format=torch.channels_last).stride() == (60, 1, 15, 3)


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_inference(), tensor.is_leaf


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_what_eager_makes(name: str, mode: Callable[..., Any]) -> None:
    make = FACTORIES[name]
    for _ in range(4):
        with mode():
            found, expected = ((make(device), make(device) + 1) for device in ("lazy", "cpu"))
        for one, other in zip(found, expected, strict=True):
            assert _look(one) == _look(other)
            if not draws(name):
                assert_same(one.detach().cpu(), other.detach())
        lazy_backend.mark_step()


def test_factories_are_recorded_in_cpp_with_other_numbers_too() -> None:
    for step in range(6):
        known = _known()
        values = torch.full((3,), step + 0.5, device="lazy") + torch.arange(3, device="lazy")
        if step > 2:
            assert _known() - known == 3
        lazy_backend.mark_step()
        assert_same(values.cpu(), torch.full((3,), step + 0.5) + torch.arange(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.ones(-1, device=device),
        lambda device: torch.ones(2, pin_memory=True, device=device),
        lambda device: torch.arange(0, 3, -1, device=device),
        lambda device: torch.eye(-2, device=device),
    ],
    ids=["size", "pinned", "step", "rows"],
)
def test_factories_refuse_what_eager_refuses(make: Callable[[str], torch.Tensor]) -> None:
    for _ in range(3):
        torch.ones(2, device="lazy")
        with pytest.raises(RuntimeError):
            make("lazy")
        lazy_backend.mark_step()


class _Finalized:
    """Part of a cycle; its finalizer records, reads and ends steps, when the garbage collector comes to it."""

    def __init__(self, kinds: Iterator[int]) -> None:
        self.itself = self
        self.kinds = kinds
        self.value = torch.ones(3).to("lazy")

    def __del__(self) -> None:
        made = (self.value + 1) * 2
        kind = next(self.kinds)
        if kind == 0:
            try:
                made.sum().item()
            except LazyBackendError as error:  # it is told so where the collector comes to it on the thread of a run
                if "interrupted a run" not in str(error):
                    raise
        elif kind == 1:
            lazy_backend.mark_step()


def test_finalizers_that_run_while_results_are_allocated() -> None:
    expected_state: dict[str, Any] = {}
    state: dict[str, Any] = {}
    kinds = (number % 5 for number in range(1 << 30))
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(7, 2, 2)
        for step in range(40):
            _Finalized(kinds)
            found = _mlp("lazy", step, state)
            lazy_backend.mark_step()
            assert torch.equal(found.cpu(), _mlp("cpu", step, expected_state)), step
    finally:
        gc.set_threshold(*threshold)
        gc.collect()


# What a finalizer may do where a known call allocates its results. The numbers in freed memory are overwritten.
_COLLECTED = """
import gc, sys
import torch, lazy_backend
from known_calls import CALLS, FACTORIES, draws
from lazy_backend import config, ir_cache
from lazy_backend.recording.native import native_recorder

lazy_backend.config.compile = "off"
value, other = torch.arange(12.0).reshape(3, 4).to("lazy"), torch.full((3, 4), 50.0).to("lazy")


class Collected:
    def __init__(self, action):
        self.itself, self.action = self, action

    def __del__(self):
        done.append(True)
        self.action()


def forget_after_a_step():
    lazy_backend.config.trie_limit = 1
    (other + 1).relu()
    lazy_backend.mark_step()
    lazy_backend.config.trie_limit = 1_000_000


def assign():
    given.data = given + 1


ACTIONS = {
    "nothing": lambda: None,
    "forget": ir_cache.reset,
    "forget after a step": forget_after_a_step,
    "read": lambda: (other + 1).sum().item(),
    "step": lazy_backend.mark_step,
    "fail": lambda: other.view(7),
    "assign": assign,
}


def tensors(made):
    return [one.tolist() for one in (made if isinstance(made, tuple | list) else [made] if made is not None else [])]


def expected(call, action):
    # in eager, with the finalizer before the call, and after it
    found = []
    for comes_first in (True, False):
        given, out = value.cpu(), other.cpu()
        if action == "assign" and comes_first:
            given.data = given + 1
        found.append((tensors(CALLS[call](given, out, [given, out])), given.tolist(), out.tolist()))
    if action == "assign":
        found[1] = found[1][0], (torch.tensor(found[1][1]) + 1).tolist(), found[1][2]
    return found


sys.unraisablehook = lambda unraised: None
gc.collect()
gc.freeze()
for number in range(3):
    (other + 1).relu()
    lazy_backend.mark_step()
    native_recorder._thread.join()
print(native_recorder.state)
for call, make in CALLS.items():
    for action in ACTIONS:
        for number in range(3):
            given, out = value.clone(), other.clone()
            known = native_recorder.counts()[0]
            make(given, out, [given, out])
            known = native_recorder.counts()[0] - known
            lazy_backend.mark_step()
        assert known == 1, call
        given, out = value.clone(), other.clone()
        done, both = [], [given, out]
        gc.disable()
        Collected(ACTIONS[action])
        before = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        gc.enable()
        made = make(given, out, both)
        gc.set_threshold(*before)
        assert done, (call, action)
        found = tensors(made), given.tolist(), out.tolist()
        if found not in expected(call, action):
            print(call, action, found)
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GLIBC_TUNABLES")
def test_finalizers_that_forget_what_a_call_is_compared_with(tmp_path: Any) -> None:
    freed = {"GLIBC_TUNABLES": "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0", "PYTHONMALLOC": "malloc"}
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    code = {**os.environ, **freed, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", _COLLECTED], capture_output=True, text=True, env=code, timeout=300)
    assert done.stdout.splitlines() == ["in C++", "done"], (done.returncode, done.stdout, done.stderr[-3000:])


def test_threads_that_record_on_one_device() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    expected_state: dict[str, Any] = {}
    expected = [_mlp("cpu", step, expected_state) for step in range(30)]
    found: dict[int, list[torch.Tensor]] = {}

    def train(number: int) -> None:
        state: dict[str, Any] = {}
        found[number] = []
        for step in range(30):
            found[number].append(_mlp("lazy", step, state).cpu())
            lazy_backend.mark_step()

    # modules are made one after the other: seeds are the process's
    states = threading.Lock()

    def run(number: int) -> None:
        with states:
            torch.manual_seed(0)
        train(number)

    try:
        run(0)
        threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(map(torch.equal, found[0], expected))
    assert all(len(one) == 30 for one in found.values())


@pytest.mark.parametrize("call", CALLS)
def test_a_known_call_waits_while_another_thread_holds_the_device(call: str) -> None:
    """As where a captured body runs, or what is served is recorded: nothing else gets into its program."""
    both = [torch.arange(6.0).reshape(2, 3).to("lazy"), torch.ones(2, 3).to("lazy")]
    make = functools.partial(CALLS[call], *both, both)
    for _ in range(3):
        known = _known()
        make()
        lazy_backend.mark_step()
    assert _known() > known
    context = contexts.get_device_context(0)
    thread = threading.Thread(target=make)
    with context.lock:
        thread.start()
        thread.join(0.2)
        waits, is_empty = thread.is_alive(), context.trace.is_empty()
    thread.join()
    assert waits
    assert is_empty
    assert not context.trace.is_empty()


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
def test_threads_that_capture_or_forget_meanwhile() -> None:
    """A thread makes known calls all the time, which get into no program of another thread, and are not lost."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    total, weight = torch.zeros(2).to("lazy"), torch.full((2,), 3.0).to("lazy")
    is_over = threading.Event()
    found: list[Any] = []

    def compute() -> None:
        while not is_over.is_set():
            found.append((weight * 2 + 1).relu()[1:].tolist())

    def add(value: torch.Tensor) -> torch.Tensor:
        total.add_(value)
        return (total * 2).sum()

    captured, value = lazy_backend.capture(add, verify_every=3), torch.ones(2).to("lazy")
    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        for step in range(1, 61):
            assert captured(value).item() == 4 * step
            if step % 3 == 0:
                ir_cache.reset()
                lazy_backend.config.force_fallback = ("", "aten::exp")[step % 2]
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert found
    assert all(one == [7.0] for one in found)


# ----- what looks like the same call


@torch.library.custom_op("recorded::length", mutates_args=())
def _times_length(tensor: torch.Tensor, text: str) -> torch.Tensor:
    return tensor * len(text)


@_times_length.register_fake
def _(tensor: torch.Tensor, text: str) -> torch.Tensor:
    return torch.empty_like(tensor)


ALIKE: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], tuple[Any, ...]]] = {
    "text": (_times_length, ("a", "a\0b", "", "\0")),
    "modes": (lambda value, mode: value.div(2, rounding_mode=mode), ("floor", "trunc", None)),
    "numbers": (lambda value, number: value + number, (1, True, 1.0, 1 + 0j, 2**62, -1, math.nan, -0.0)),
    "large numbers": (lambda value, number: value.long() + number, (-1, 2**64 - 1, 2**63 - 1, -(2**63))),
    "factors": (lambda value, number: value.add(value, alpha=number), (1, 1.0, 2, 0.5)),
    "dtypes": (lambda value, dtype: value.sum(0, dtype=dtype), (None, torch.float64, torch.int64)),
    "dimensions": (lambda value, sizes: value.sum(sizes), (0, [0], (0, 1), [], [-1])),
    "places": (lambda value, place: value[place], (0, None, ..., slice(0, 1), True)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_arguments_that_look_alike(name: str) -> None:
    call, arguments = ALIKE[name]
    given = torch.tensor([[1.5, -2.5], [3.0, -0.0]])
    value = given.to("lazy")
    for one, other in itertools.permutations(arguments, 2):
        for argument in (one, one, one, other, one, other, other):
            assert_same(call(value, argument), call(given, argument))
            lazy_backend.mark_step()


# ----- where it comes from

_LOOP = """
import torch, lazy_backend
from lazy_backend.recording.native import native_recorder, recorder_key
value = torch.ones(3).to("lazy")
for step in range(130):
    value = value * 0.5 + 1
    lazy_backend.mark_step()
thread = native_recorder._thread
if thread is not None:
    thread.join()
print(native_recorder.state)
print(value.tolist())
"""


def _run(folder: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LAZY_BACKEND_CACHE_DIR": str(folder), **variables}
    return subprocess.run([sys.executable, "-c", _LOOP], capture_output=True, text=True, env=environment, timeout=300)


# The program, or a process that it forks, ends while the recorder is loaded.
_ENDING = """
import atexit, os, threading, time
atexit.register(lambda: print(native.native_recorder.state))  # before the package's own function: it runs later
import torch, lazy_backend
from lazy_backend.recording import native

hand_over, loading = native._handed_over, threading.Event()


def slowly():
    loading.set()
    time.sleep(1)
    return hand_over()


native._handed_over = slowly
value = torch.ones(3).to("lazy") + 1
lazy_backend.mark_step()
loading.wait()
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "child = os.fork()\n"
        "if child == 0:\n"
        "    is_right = (torch.ones(3).to('lazy') * 2).tolist() == [2.0] * 3\n"
        "    os._exit(not is_right or native.native_recorder.state != 'in C++')\n"
        "assert os.waitpid(child, 0)[1] == 0",
    ],
    ids=["exit", "fork"],
)
def test_a_recorder_is_whole_or_not_there_when_the_program_ends_or_forks(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", _ENDING.format(end=end)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "in C++\n", "")


# The recorder is found while a captured function is watched.
_WATCHED = """
import torch, lazy_backend
from lazy_backend.recording.native import native_recorder

lazy_backend.config.compile = "off"
native_recorder._num_steps = 1  # a step looks for it only once, so that it is found below
layer = torch.nn.Linear(3, 3).to("lazy")
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
value = torch.ones(2, 3).to("lazy")


def find(*_):
    native_recorder.extension is None and native_recorder.find(may_build=False)


{captured}
for _ in range(4):
    step()
    lazy_backend.mark_step()
for _ in range(3):
    known = native_recorder.counts()[0]
    value.mul(2).relu()
    lazy_backend.mark_step()
print(native_recorder.state, native_recorder.counts()[0] - known)
"""


@pytest.mark.parametrize(
    "captured",
    [
        "layer.register_forward_hook(find); step = lazy_backend.capture(lambda: layer(value).sum())",
        "layer.register_forward_hook(find); layer = lazy_backend.capture(layer); step = lambda: layer(value).sum()",
        "optimizer.register_step_pre_hook(find); optimizer = lazy_backend.capture(optimizer)\n"
        "step = lambda: (layer(value).sum().backward(), optimizer.step())",
    ],
    ids=["function", "module", "optimizer"],
)
def test_a_recorder_that_is_found_while_somebody_watches(tmp_path: Any, captured: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED.format(captured=captured)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["in C++ 2"], (done.stdout, done.stderr)


@pytest.mark.scenario
@pytest.mark.parametrize("compiler", ["false", "/there/is/no/compiler"])
def test_without_a_compiler_that_works_calls_are_recorded_in_python(tmp_path: Any, compiler: str) -> None:
    done = _run(tmp_path, CXX=compiler)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[2.0, 2.0, 2.0]"
    assert done.stderr.count("known calls in C++ is off") == 1
    assert "ended with status" in done.stderr


@pytest.mark.scenario
def test_a_program_that_goes_on_builds_it_and_the_next_finds_it(tmp_path: Any) -> None:
    built = _run(tmp_path)
    assert built.stdout.splitlines() == ["in C++", "[2.0, 2.0, 2.0]"], built.stderr
    found = _run(tmp_path, CXX="false")
    assert found.stdout.splitlines() == ["in C++", "[2.0, 2.0, 2.0]"], found.stderr


def _library(folder: Any) -> Any:
    """The recorder that these tests use, as a file."""
    file = folder / "recorder"
    recorder = DiskCache(os.environ["LAZY_BACKEND_CACHE_DIR"], 1 << 30).get(recorder_key())
    assert recorder is not None
    file.write_bytes(recorder)
    return file


# Copies the recorder to where the compiler is asked to put it.
_COPY = 'for one; do [ "$last" = -o ] && cp {} "$one"; last="$one"; done'


def _compiler(folder: Any, script: str) -> str:
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o700)
    return str(file)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "ended with status -9"),  # as the system does when memory runs out
        ("echo 'fatal error: No space left on device' >&2; exit 1", "No space left on device"),
        ("exit 0", "No such file"),  # says that it is done, and has made nothing
    ],
    ids=["killed", "a full disk", "nothing made"],
)
def test_a_build_that_fails_is_told_once(tmp_path: Any, script: str, said: str) -> None:
    done = _run(tmp_path / "cache", CXX=_compiler(tmp_path, script), LAZY_BACKEND_BACKEND="eager")
    assert done.stdout.splitlines()[1] == "[2.0, 2.0, 2.0]", done.stderr
    assert done.stderr.count("known calls in C++ is off") == 1
    assert said in done.stderr


def test_a_cache_with_no_room_keeps_no_recorder_and_the_program_has_it(tmp_path: Any) -> None:
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    built = tmp_path / "built"
    compiler = _compiler(tmp_path, f"echo >>{built}; {_COPY.format(_library(tmp_path))}")
    done = _run(place, CXX=compiler, LAZY_BACKEND_BACKEND="eager", LAZY_BACKEND_CACHE_BYTES="1000")
    assert done.stdout.splitlines() == ["in C++", "[2.0, 2.0, 2.0]"], done.stderr
    assert built.read_text() == "\n"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_compiler_ends_with_the_program(tmp_path: Any, end: signal.Signals) -> None:
    begun = tmp_path / "begun"
    compiler = _compiler(tmp_path, f"echo $$ >{begun}.new; mv {begun}.new {begun}; sleep 100; true")
    environment = {**os.environ, "LAZY_BACKEND_CACHE_DIR": str(tmp_path / "cache"), "LAZY_BACKEND_BACKEND": "eager"}
    with subprocess.Popen([sys.executable, "-c", _LOOP], env={**environment, "CXX": compiler}) as program:
        while not begun.exists() and program.poll() is None:
            time.sleep(0.05)
        program.send_signal(end)
    building = int(begun.read_text())
    for _ in range(100):
        try:
            os.kill(building, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"{building} goes on")


def test_two_programs_at_once_build_it_once(tmp_path: Any) -> None:
    built = tmp_path / "built"
    compiler = _compiler(tmp_path, f"echo >>{built}; sleep 3; {_COPY.format(_library(tmp_path))}")
    found: list[subprocess.CompletedProcess[str]] = []
    programs = [
        threading.Thread(
            target=lambda: found.append(_run(tmp_path / "cache", CXX=compiler, LAZY_BACKEND_BACKEND="eager"))
        )
        for _ in range(2)
    ]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    assert [done.stdout.splitlines() for done in found] == [["in C++", "[2.0, 2.0, 2.0]"]] * 2, found
    assert built.read_text() == "\n"


def test_a_cache_that_others_may_write_has_no_recorder(tmp_path: Any) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(0o777)
    done = _run(place, CXX="false", LAZY_BACKEND_BACKEND="eager")
    assert done.stdout.splitlines() == ["not built yet", "[2.0, 2.0, 2.0]"], done.stderr
    assert "known calls" not in done.stderr
    assert done.stderr.count("CacheWarning") == 1, done.stderr


def test_a_recorder_is_not_built_where_nothing_is_kept(tmp_path: Any) -> None:
    done = _run(tmp_path, LAZY_BACKEND_CACHE="0")
    assert done.stdout.splitlines() == ["not built yet", "[2.0, 2.0, 2.0]"], done.stderr
