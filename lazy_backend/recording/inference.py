"""Metadata inference: what a call would return, without running it.

In: a call seen for the first time. Out: fake tensors on the backing device, or eager's error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of, extent, meta_of
from lazy_backend.lowering.ir.optimizers import is_fused_optimizer
from lazy_backend.lowering.ir.overlap import overlap, overlaps_itself
from lazy_backend.lowering.ir.schema import schema_of
from lazy_backend.ports.cpython import from_signal_handler, pass_on_interruption
from lazy_backend.ports.dispatcher import OpOverload
from lazy_backend.ports.fake_tensors import (
    FAKE_KEY,
    DependsOnValues,
    HasNoFake,
    InterruptibleFakeMode,
    cache_results,
    quiet_fake_tensors,
    unset_mode,
)
from lazy_backend.ports.table import FAKE_TENSORS
from lazy_backend.ports.tensor_types import neg_view
from lazy_backend.recording import probe
from lazy_backend.recording.arguments import StandIns, flat, mutated_arguments, with_leaves
from lazy_backend.recording.operators import NotRecordable
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean


class Inference:
    """One call on fake tensors on the backing device."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.fakes: StandIns[TensorData] = StandIns()

    def run(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of the call, as fake tensors. Raises `NotRecordable`, or eager's error."""
        if is_fused_optimizer(op):
            return None  # half of these ops have no fake kernel, and there is nothing to infer
        if not FAKE_TENSORS.fits():
            raise NotRecordable("there are no fake tensors to infer its results with")
        schema = schema_of(op)
        if schema.mutates:
            self._check_overlaps(op, args, kwargs)
        tiny = probe.try_tiny(op, args, kwargs, self._meta) if probe.checks_more_than_its_fake(op) else None
        tried = probe.try_zeros(op, args, kwargs, self._meta)
        makes_tensors = any(result.kind == "fresh" for result in schema.returns)
        if tried is None and (makes_tensors or (schema.mutates and tiny is None)):
            tried = probe.try_layout(op, args, kwargs, self._meta)
        try:
            is_view = not schema.mutates and bool(schema.returns) and all(r.kind == "view" for r in schema.returns)
            output = self._infer_view(op, args, kwargs) if is_view else self._infer(op, args, kwargs)
        except DependsOnValues:
            raise NotRecordable("its output depends on values") from None
        except (HasNoFake, NotImplementedError) as error:
            pass_on_interruption(error)
            raise NotRecordable("it has no fake kernel") from None
        except Exception as error:
            pass_on_interruption(error)
            if probe.try_ones(op, args, kwargs, self._meta):
                raise NotRecordable("its fake kernel refuses what eager takes") from None
            raise
        if rng.draws_random_numbers(op, args):
            tried = probe.try_drawing(op, args, kwargs, output, self._meta)
        output = self._laid_out_like(output, tried)
        if isinstance(tiny, torch.Tensor) and tiny.dtype != output.dtype:
            raise NotRecordable("its fake kernel gives another dtype")
        for data, fake in self.fakes:
            if tuple(fake.shape) != data.meta.shape:
                raise NotRecordable("it resizes an operand")
        return output

    def _laid_out_like(self, output: Any, tried: Any) -> Any:
        """The results with the strides and dtypes of what eager made of operands of the same geometry, if it was asked.

        Their shapes may depend on values, and are left as they are.
        """
        if isinstance(output, list | tuple) and isinstance(tried, list | tuple):
            return [self._laid_out_like(fake, real) for fake, real in zip(output, tried, strict=True)]
        if not isinstance(output, torch.Tensor) or not isinstance(tried, torch.Tensor):
            return output
        has_own_memory = self.source_of(output) is None and not tried.storage_offset() and not tried.is_conj()
        if not has_own_memory or output.shape != tried.shape:
            return output
        return torch.empty_strided(tried.shape, tried.stride(), dtype=tried.dtype, device="meta")

    def _infer_view(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Infer a view on the meta device, with eager's kernel: FakeTensor's rules accept views that eager refuses."""

        def call() -> Any:
            meta = torch.device("meta")
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, LazyTensor):
                    self.fakes.add(arg._data, _make_fake(arg._data.meta, meta))
            known = {id(data): fake for data, fake in self.fakes}

            def convert(arg: Any) -> Any:
                return known[id(arg._data)] if isinstance(arg, LazyTensor) else arg

            return op(*map(convert, args), **{name: convert(arg) for name, arg in kwargs.items()})

        output = run_clean(call)
        if op is torch.ops.aten.as_strided.default:
            _check_bounds(meta_of(output), args[0]._data.storage)
        return output

    def _check_overlaps(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise eager's error for a call that writes to memory that overlaps itself or another operand.

        Each fake operand has memory of its own, so fake operands never overlap.
        """
        written = [t._data for t in mutated_arguments(op, args, kwargs) if isinstance(t, LazyTensor)]
        operands = [t._data for t in flat([*args, *kwargs.values()]) if isinstance(t, LazyTensor)]
        if any(map(overlaps_itself, {data.meta for data in written})) or any(
            data.storage is target.storage and data is not target and overlap(data.meta, target.meta)
            for target in written
            for data in operands
        ):
            probe.try_shared(op, args, kwargs, operands, self._meta)

    def _infer(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # by data, which several tensors may share: a fake that is resized must not be used for another call
        mutated = {id(self._data_of(tensor)) for tensor in mutated_arguments(op, args, kwargs)}

        def call() -> Any:
            mode = _fake_mode(self.context)
            cache_results(mode, not schema_of(op).mutates)  # a cached result resizes no operand
            try:
                with mode:
                    fake_args = [self._fake(arg, mutated) for arg in args]
                    fake_kwargs = {name: self._fake(arg, mutated) for name, arg in kwargs.items()}
                    return op(*fake_args, **fake_kwargs)
            finally:
                # the mode's __exit__ is Python, and interrupting it would leave the thread in the mode
                unset_mode(FAKE_KEY)

        with quiet_fake_tensors():
            try:
                return run_clean(call)
            except BaseException as error:
                if not isinstance(error, Exception) or from_signal_handler(error):
                    # a fake mode notes in Python whether it is within a kernel, and would stay there
                    self.context.fake_mode = None
                    self.context.fakes.clear()
                raise

    def _meta(self, arg: Any) -> Any:
        """The pair (geometry, device) of a tensor, for `probe`; the backing device in place of the lazy one."""
        if isinstance(arg, torch.Tensor):
            return self._data_of(arg).meta, self.context.backing
        if isinstance(arg, torch.device):
            return self.context.backing if arg.type == "lazy" else arg
        return arg

    def _data_of(self, tensor: torch.Tensor) -> TensorData:
        return tensor._data if isinstance(tensor, LazyTensor) else self.context.outside[tensor]

    def _fake(self, arg: Any, mutated: set[int]) -> Any:
        if isinstance(arg, torch.Tensor):
            data = self._data_of(arg)
            return self._fake_of(data, cached=id(data) not in mutated)
        if isinstance(arg, list | tuple):
            return with_leaves(lambda item: self._fake(item, mutated), arg)
        if isinstance(arg, torch.device):
            return self.context.backing if arg.type == "lazy" else arg
        return arg

    def _fake_of(self, data: TensorData, cached: bool) -> torch.Tensor:
        """A fake tensor like `data`. Cached by geometry (making one costs 25 µs), but used only once in a call."""
        known = self.fakes.of(data)
        if known is not None:
            return known
        fakes = self.context.fakes
        fake = fakes.get(data.meta) if cached else None
        if fake is None or self.fakes.is_used(fake):
            fake = _make_fake(data.meta, self.context.backing)
            if cached:
                if len(fakes) > 4096:
                    fakes.clear()
                fakes.setdefault(data.meta, fake)
        self.fakes.add(data, fake)
        return fake

    def source_of(self, fake: torch.Tensor) -> TensorData | None:
        """The operand whose memory a fake result shares, if any."""
        return self.fakes.source_of(fake)


def _check_bounds(window: TensorMeta, storage: LazyStorage) -> None:
    """Raise what `as_strided` of a real tensor raises if the window reaches beyond the end of the storage."""
    room = extent(storage.meta) * storage.meta.dtype.itemsize
    if storage.tensor is not None:
        room = max(room, storage.tensor.untyped_storage().nbytes())
    needed = extent(window) * window.dtype.itemsize if window.numel else 0
    if needed > room:
        raise RuntimeError(
            f"setStorage: sizes {list(window.shape)}, strides {list(window.stride)}, storage offset "
            f"{window.storage_offset}, and itemsize {window.dtype.itemsize} requiring a storage size of {needed} are "
            f"out of bounds for storage of size {room}"
        )


def _fake_mode(context: DeviceContext) -> Any:
    # one per context, whose lock is held: two threads must not enter the same mode
    if context.fake_mode is None:
        context.fake_mode = InterruptibleFakeMode(allow_fallback_kernels=False, allow_non_fake_inputs=False)
    return context.fake_mode


def _make_fake(meta: TensorMeta, device: torch.device) -> Any:
    fake = empty_of(meta, device)
    fake = fake.conj() if meta.conj else fake
    return neg_view(fake) if meta.neg else fake
