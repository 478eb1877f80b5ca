"""Calls that are not recorded: they run on the backing device at once, after everything recorded before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.context import DeviceContext
from lazy_backend.errors import LazyBackendError
from lazy_backend.lowering.ir import meta_of
from lazy_backend.outside import new_data
from lazy_backend.sites import user_site
from lazy_backend.sync import executor
from lazy_backend.tensor import LazyStorage, LazyTensor, ViewData, assign, backing_tensor, wrap
from lazy_backend.thread_state import clean_thread_state


def run_at_once(
    context: DeviceContext, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str
) -> Any:
    """Run a call on the backing device, after everything recorded before it. Counted with op, reason and line."""
    metrics.increment(op._schema.name)
    metrics.increment(f"Fallback: {op} ({reason}) at {user_site()}")
    executor.cut(context, f"{op}: {reason}")
    runner = _RunAtOnce(context)
    with clean_thread_state():
        output = op(
            *(runner.to_real(arg) for arg in args), **{name: runner.to_real(arg) for name, arg in kwargs.items()}
        )
    runner.update_operands()
    return runner.to_lazy(output)


class _RunAtOnce:
    """Lazy arguments as real ones and real results as lazy ones, with their aliasing."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.operands: list[tuple[LazyTensor, torch.Tensor]] = []

    def to_real(self, arg: Any) -> Any:
        if isinstance(arg, LazyTensor):
            real = backing_tensor(arg._data)
            self.operands.append((arg, real))
            return real
        if isinstance(arg, list | tuple):
            return [self.to_real(item) for item in arg]
        if isinstance(arg, torch.device) and arg.type == "lazy":
            return self.context.backing
        return arg

    def update_operands(self) -> None:
        """Follow operands that were resized."""
        for lazy, real in self.operands:
            meta = meta_of(real)
            if meta is lazy._data.meta:
                continue
            storage = lazy._data.storage
            if lazy._data is storage or not self._still_in(storage, real):
                assign(lazy, new_data(self.context, real))
            else:
                assign(lazy, ViewData(self.context, None, None, meta, storage))

    @staticmethod
    def _still_in(storage: LazyStorage, real: torch.Tensor) -> bool:
        assert storage.tensor is not None
        return real.untyped_storage()._cdata == storage.tensor.untyped_storage()._cdata

    def to_lazy(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return self._wrap(output)
        if isinstance(output, list):
            return [self.to_lazy(item) for item in output]
        if isinstance(output, tuple):
            return tuple(self.to_lazy(item) for item in output)
        return output

    def _wrap(self, real: torch.Tensor) -> torch.Tensor:
        for lazy, operand in self.operands:
            if operand is real:
                return lazy
        if real.layout != torch.strided:
            raise LazyBackendError(
                f"a {str(real.layout).removeprefix('torch.')} tensor cannot be lazy\n  at {user_site()}\n"
                "  compute it on the CPU, as in tensor.cpu()"
            )
        place = real.untyped_storage()._cdata
        for lazy, operand in self.operands:
            if operand.untyped_storage()._cdata == place:
                return wrap(ViewData(self.context, None, None, meta_of(real), lazy._data.storage))
        return wrap(new_data(self.context, real))
