"""Run calls on real tensors: calls that cannot be recorded, and calls seen for the first time.

In: a call whose lazy arguments all have their values. Out: the operator's results on the backing device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.device_graphs.run_order import with_runs
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta, extent, meta_of
from lazy_backend.ports.dispatcher import OpOverload, function_schema
from lazy_backend.ports.tensor_types import share_memory
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.recording.arguments import LITERALS, StandIns, with_leaves
from lazy_backend.recording.operators import traits_of
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.outside import new_data, whole_storage
from lazy_backend.tensors.sparse_tensor import SPARSE_LAYOUTS, LazySparseTensor, follow, part_of, wrap_sparse
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, ViewData
from lazy_backend.tensors.tensor import LazyTensor, assign, backing_tensor, wrap
from lazy_backend.tensors.thread_state import has_modes, run_clean, within_kernel

# The reason given in eager mode, where nothing is recorded: such a call counts no fallback and cuts nothing.
EAGER = "eager mode"


def run_at_once(
    context: DeviceContext, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str
) -> Any:
    """Run a call on the backing device, after everything recorded before it. Fallbacks count op, reason and line."""
    if reason is EAGER:
        executor.rules.check_allowed(f"{op} in eager mode")
        executor.barrier(context)
        if context.trace.at_once is None:
            context.run_at_once()
    else:
        count_fallback(op, reason)
        executor.cut(context, f"{op}: {reason}")
    call = RealCall(context)
    begin = perf_counter()
    output, _ = run_with_seed(call.run_cast if autocast_state.is_casting() else call.run, op, args, kwargs)
    metrics.observe("EagerOpExecuteTime", perf_counter() - begin)
    return call.to_lazy(output)


def run_with_seed(
    run: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, int | None]:
    """Call `run`, with a seed if the call draws random numbers from one. Returns its results, and the seed.

    A call that fails uses no seed, as it draws nothing in eager.
    """
    if not _takes_seed(op, args, kwargs):
        return run(op, args, kwargs, None), None
    drawn = draw()
    try:
        return run(op, args, kwargs, drawn[0]), drawn[0]
    except BaseException:
        take_back(drawn)
        raise


def draw() -> tuple[int, torch.Generator, torch.Tensor]:
    """A seed, the generator that it is drawn from, and the state of the generator before."""
    generator = rng.generator_in_use()
    before = generator.get_state()
    return contexts.get_rng_seed(), generator, before


def take_back(drawn: tuple[int, torch.Generator, torch.Tensor]) -> None:
    """Let a seed not have been drawn."""
    drawn[1].set_state(drawn[2])


def _takes_seed(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers, unless from the user's own generator or without one."""
    return rng.draws_random_numbers(op, args) and rng.can_seed(op) and kwargs.get("generator") is None


def wrap_result(context: DeviceContext, real: torch.Tensor, operands: list[tuple[LazyTensor, torch.Tensor]]) -> Any:
    """A lazy tensor for a result of a call that C++ ran on `operands`, where the result is not plain."""
    call = RealCall(context)
    for lazy, tensor in operands:
        call.operands.add(lazy, tensor)
    return call.to_lazy(real)


def see_calls(context: DeviceContext, num_storages: int) -> None:
    """Note that calls which C++ ran have made so many storages."""
    context.registry.register_all(())
    context.paths.create(num_storages)
    if context.aside.is_on and context.aside.is_long():
        executor.aside.end_stretch(context, "reads")


def count_fallback(op: OpOverload, reason: str) -> None:
    metrics.increment(function_schema(op).name)
    metrics.increment(f"Fallback: {op} ({reason}) at {user_site()}")


def _copy_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in a copy of its memory."""
    copied = whole_storage(tensor).clone()
    return copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class RealCall:
    """One call on real tensors: makes lazy arguments real and real results lazy, and keeps their aliasing."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.operands: StandIns[LazyTensor] = StandIns()
        self.sparse_operands: list[LazySparseTensor] = []
        self._is_complex = False  # whether an operand is complex or a negated view, so far

    def run(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None) -> Any:
        """Run the operator, and return its results. Its random numbers are drawn from `seed` if there is one.

        PyTorch's own kernels need a clean thread state only if modes are active, or if Python code runs, and the state
        of a kernel only if there is something to conjugate: setting it takes 1 µs.
        """
        if self.context.backing.type == "cpu":
            return self._run_as_needed(op, args, kwargs, seed)
        return with_runs(self.context.backing, lambda: self._run_as_needed(op, args, kwargs, seed))

    def _run_as_needed(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None) -> Any:
        if seed is not None or not traits_of(op).is_aten or has_modes():
            return run_clean(self._run, op, args, kwargs, seed)
        real_args, real_kwargs = self._make_real(op, args, kwargs)
        if not self._is_complex:
            return op(*real_args, **real_kwargs)
        with within_kernel():
            return op(*real_args, **real_kwargs)

    def run_cast(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None) -> Any:
        """`run` with autocast on: the operator's kernel may call others that autocast has rules for."""

        def run() -> Any:
            with torch.autocast(self.context.backing.type, autocast_state.lower_dtype(), cache_enabled=False):
                return self._run(op, args, kwargs, seed)

        return with_runs(self.context.backing, lambda: run_clean(run))

    def _run(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int | None) -> Any:
        real_args, real_kwargs = self._make_real(op, args, kwargs)
        if seed is not None:
            return rng.run_seeded(op, [seed], 0, self.context.backing, real_args, real_kwargs)
        return op(*real_args, **real_kwargs)

    def _make_real(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Mapping[str, Any]]:
        to_real = self._to_own_real if traits_of(op).resizes else self._to_real
        real_args = [arg if arg.__class__ in LITERALS else to_real(arg) for arg in args]
        return real_args, {name: to_real(arg) for name, arg in kwargs.items()} if kwargs else kwargs

    def source_of(self, real: torch.Tensor) -> TensorData | None:
        """The operand whose memory a result shares, if any."""
        lazy = self.operands.source_of(real)
        return None if lazy is None else lazy._data

    def resized(self) -> bool:
        """Whether the call changed the geometry of an operand."""
        return any(meta_of(real) is not lazy._data.meta for lazy, real in self.operands)

    def _to_own_real(self, arg: Any) -> Any:
        """`_to_real`, with tensors that only this call knows: other lazy tensors may stand for the same one."""
        if arg.__class__ is LazyTensor:
            known = self.operands.of(arg)
            return self._add(arg, backing_tensor(arg._data).detach()) if known is None else known
        return with_leaves(self._to_own_real, arg) if isinstance(arg, list | tuple) else self._to_real(arg)

    def _to_real(self, arg: Any) -> Any:
        if arg.__class__ is LazyTensor:
            return self._add(arg, backing_tensor(arg._data))
        if isinstance(arg, torch.Tensor):
            self._is_complex = self._is_complex or arg.is_complex()
            if isinstance(arg, LazySparseTensor):
                self.sparse_operands.append(arg)
                return arg._real
            outside = self.context.outside.get(arg)
            return arg if outside is None else backing_tensor(outside)
        if isinstance(arg, list | tuple):
            return with_leaves(self._to_real, arg)
        if isinstance(arg, torch.device) and arg.type == "lazy":
            return self.context.backing
        return arg

    def _add(self, lazy: LazyTensor, real: torch.Tensor) -> torch.Tensor:
        meta = lazy._data.meta
        if meta.dtype.is_complex or meta.neg:
            self._is_complex = True
        self.operands.add(lazy, real)
        return real

    def _update_operands(self) -> None:
        """Update the lazy operands that the call resized."""
        for sparse in self.sparse_operands:
            follow(sparse)
        for lazy, real in self.operands:
            meta = meta_of(real)
            if meta is not lazy._data.meta:
                assign(lazy, self._resized_data(lazy._data.storage, real, meta))

    def _resized_data(self, storage: LazyStorage, real: torch.Tensor, meta: TensorMeta) -> TensorData:
        """Data for `real`, which was resized: in the same memory, or in memory of its own if that was too small."""
        assert storage.tensor is not None
        is_shared = share_memory(real, storage.tensor)
        if is_shared and extent(meta) * meta.dtype.itemsize <= extent(storage.meta) * storage.meta.dtype.itemsize:
            return ViewData(self.context, None, None, meta, storage)
        if is_shared:  # what else stands for the old memory sees it as it is now
            storage.tensor = run_clean(_copy_memory, storage.tensor)
        return new_data(self.context, real)

    def to_lazy(self, output: Any) -> Any:
        """The results as lazy tensors that no trace has recorded. Resized operands are updated as well."""
        self._update_operands()
        return self._convert(output)

    def _convert(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return self._wrap(output)
        if isinstance(output, list):
            return [self._convert(item) for item in output]
        if isinstance(output, tuple):
            return tuple(self._convert(item) for item in output)
        return output

    def _wrap(self, real: torch.Tensor) -> torch.Tensor:
        for lazy, operand in self.operands:
            if operand is real:
                return lazy
        for sparse in self.sparse_operands:
            if sparse._real is real:
                return sparse
        if real.layout in SPARSE_LAYOUTS:
            return wrap_sparse(self.context, real, self._storages())
        if real.layout != torch.strided:
            raise LazyBackendError(
                f"a {str(real.layout).removeprefix('torch.')} tensor cannot be lazy\n  at {user_site()}\n"
                "  compute it on the CPU, as in tensor.cpu()"
            )
        source = self.operands.source_of(real)
        if source is not None:
            return wrap(ViewData(self.context, None, None, meta_of(real), source._data.storage), view_of=source)
        for sparse in self.sparse_operands:
            part = part_of(sparse, real)
            if part is not None:
                return part
        if real.storage_offset():  # eager puts the result inside a larger storage, as `as_strided_scatter` does
            whole = new_data(self.context, run_clean(whole_storage, real))
            return wrap(ViewData(self.context, None, None, meta_of(real), whole))
        return wrap(new_data(self.context, real))

    def _storages(self) -> list[LazyStorage]:
        """The storages of all operands."""
        dense = [lazy._data.storage for lazy, _ in self.operands]
        return dense + [storage for sparse in self.sparse_operands for storage in sparse._parts.values()]
