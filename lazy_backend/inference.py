"""What a call would give, without running it.

In: a call seen for the first time. Out: fake tensors of the backing device, or eager's error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from lazy_backend import probe
from lazy_backend.context import DeviceContext
from lazy_backend.describe import mutated_arguments
from lazy_backend.lowering import rng
from lazy_backend.lowering.compiler import quiet_fake_tensors
from lazy_backend.lowering.ir import TensorMeta, empty_of
from lazy_backend.lowering.optimizers import is_fused_optimizer
from lazy_backend.operators import NotRecordable
from lazy_backend.tensor import LazyTensor, TensorData
from lazy_backend.thread_state import clean_thread_state


class Inference:
    """One call on fake tensors of the backing device."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.fakes: list[tuple[TensorData, FakeTensor]] = []

    def run(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the call gives. Raises `NotRecordable`, or eager's error."""
        if is_fused_optimizer(op):
            return None  # half of them have no fake kernel, and there is nothing to infer
        tiny = probe.try_tiny(op, args, kwargs, self._meta) if probe.checks_more_than_its_fake(op) else None
        try:
            output = self._infer(op, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NotRecordable("its output depends on values") from None
        except (UnsupportedOperatorException, NotImplementedError):
            raise NotRecordable("it has no fake kernel") from None
        except Exception:
            if not rng.draws_random_numbers(op, args) and probe.try_ones(op, args, kwargs, self._meta):
                raise NotRecordable("its fake kernel refuses what eager takes") from None
            raise
        if isinstance(tiny, torch.Tensor) and tiny.dtype != output.dtype:
            raise NotRecordable("its fake kernel gives another dtype")
        for data, fake in self.fakes:
            if tuple(fake.shape) != data.meta.shape:
                raise NotRecordable("it resizes an operand")
        return output

    def _infer(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mutated = set(map(id, mutated_arguments(op, args, kwargs)))
        with quiet_fake_tensors(), clean_thread_state(), _fake_mode(self.context):
            fake_args = [self._fake(arg, mutated) for arg in args]
            fake_kwargs = {name: self._fake(arg, mutated) for name, arg in kwargs.items()}
            return op(*fake_args, **fake_kwargs)

    def _meta(self, arg: Any) -> Any:
        """(geometry, device) of a tensor, for `probe`."""
        if isinstance(arg, torch.Tensor):
            data = arg._data if isinstance(arg, LazyTensor) else self.context.outside[arg]
            return data.meta, self.context.backing
        if isinstance(arg, torch.device):
            return self.context.backing if arg.type == "lazy" else arg
        return arg

    def _fake(self, arg: Any, mutated: set[int]) -> Any:
        if isinstance(arg, torch.Tensor):
            data = arg._data if isinstance(arg, LazyTensor) else self.context.outside[arg]
            return self._fake_of(data, cached=id(arg) not in mutated)
        if isinstance(arg, list | tuple):
            return [self._fake(item, mutated) for item in arg]
        if isinstance(arg, torch.device):
            return self.context.backing if arg.type == "lazy" else arg
        return arg

    def _fake_of(self, data: TensorData, cached: bool) -> FakeTensor:
        """A fake of the same geometry. Kept per geometry (making one costs 25 µs), but used once in a call."""
        for known, held in self.fakes:
            if known is data:
                return held
        fakes = self.context.fakes
        fake = fakes.get(data.meta) if cached else None
        if fake is None or any(fake is used for _, used in self.fakes):
            fake = _make_fake(data.meta, self.context.backing)
            if cached:
                if len(fakes) > 4096:
                    fakes.clear()
                fakes.setdefault(data.meta, fake)
        self.fakes.append((data, fake))
        return fake

    def source_of(self, fake: torch.Tensor) -> TensorData | None:
        """The operand whose memory a fake result shares, if any."""
        place = fake.untyped_storage()._cdata
        for data, operand in self.fakes:
            if operand.untyped_storage()._cdata == place:
                return data
        return None


def _fake_mode(context: DeviceContext) -> FakeTensorMode:
    # one per context, whose lock is held: a mode is not to be entered by two threads
    if context.fake_mode is None:
        context.fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=False)
    return context.fake_mode  # type: ignore[no-any-return]


def _make_fake(meta: TensorMeta, device: torch.device) -> Any:
    fake = empty_of(meta, device)
    fake = fake.conj() if meta.conj else fake
    return torch._neg_view(fake) if meta.neg else fake
