"""Run a captured program again, without the Python that recorded it.

In: the arguments of a call. Out: what the body would have returned, and the state it would have left.

Note [A replay is a step]
A replay does what `mark_step` does with a trace, without the trace: it draws the seeds, takes the device's lock, makes
the storages that wait for the run, and schedules the run, in the background where steps run in the background. Errors,
poisoning, plans and compiles are those of steps. The cost depends on the graph's inputs and outputs, not its operators.
On CUDA this is where a plan with static shapes would be launched as one CUDA graph.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.execution.computations import current_settings
from lazy_backend.execution.run import Async, SyncTensorCollection
from lazy_backend.execution.sync import executor
from lazy_backend.floats.formula_program import Evaluated, FormulaProgram, Stale
from lazy_backend.floats.hyperparameters import OptimizerGuard
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of
from lazy_backend.lowering.plans.cached_computation import CachedComputation
from lazy_backend.ports import trees
from lazy_backend.precision.grad_scaler import UnsettledStep
from lazy_backend.replay.captured_state import ClearedGrad, Holder, TensorHolder
from lazy_backend.replay.state_guard import StateGuard
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.outside import new_data, upload
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, ViewData
from lazy_backend.tensors.tensor import LazyTensor, wrap
from lazy_backend.tensors.thread_state import run_clean


@dataclass(slots=True)
class Arguments:
    """What may differ among the arguments of two calls of one program."""

    tensors: tuple[LazyTensor, ...]
    floats: tuple[float, ...]
    uploads: Sequence[torch.Tensor] = ()  # what the formulas computed for this replay


# ----- where the inputs of a program come from


@dataclass(frozen=True, slots=True)
class Argument:
    """The `place`-th tensor among the arguments."""

    place: int

    def data(self, program: CapturedProgram, arguments: Arguments) -> TensorData:
        return arguments.tensors[self.place]._data


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Data that stays in place from call to call: parameters, statistics, momenta."""

    reference: weakref.ref[TensorData]
    site: str

    def is_among(self, seen: Container[TensorData]) -> bool:
        data = self.reference()
        return data is not None and data in seen

    def data(self, program: CapturedProgram, arguments: Arguments) -> TensorData:
        data = self.reference()
        if data is None:
            raise Stale(f"a tensor that it uses is gone, at {self.site}")
        return data


@dataclass(frozen=True, slots=True)
class Carried:
    """What the previous call left as its `output`-th output."""

    output: int
    meta: TensorMeta
    site: str

    def data(self, program: CapturedProgram, arguments: Arguments) -> TensorData:
        storage = program.outputs[self.output].current()
        if storage is None:
            raise Stale("a tensor that it replaces is gone, or a view of something else")
        return _data_over(storage, self.meta)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A constant that the body uploads at each call. If the program writes to it, each run gets its own copy."""

    storage: LazyStorage
    meta: TensorMeta
    is_written: bool

    def data(self, program: CapturedProgram, arguments: Arguments) -> TensorData:
        if not self.is_written:
            return _data_over(self.storage, self.meta)
        made = LazyStorage(self.storage.context, None, None, self.storage.meta)
        assert self.storage.tensor is not None
        source = self.storage.tensor
        made.tensor = run_clean(lambda: empty_of(made.meta, made.context.backing).copy_(source))
        return _data_over(made, self.meta)


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that the formulas give at each replay, as the `place`-th upload, and that is uploaded then."""

    place: int
    context: DeviceContext
    base: TensorMeta
    meta: TensorMeta
    is_written: bool

    def data(self, program: CapturedProgram, arguments: Arguments) -> TensorData:
        real = upload(self.context, arguments.uploads[self.place])
        storage = new_data(self.context, run_clean(real.clone) if self.is_written else real)
        if storage.meta is not self.base:
            raise Stale("a tensor on the CPU has another shape")
        return _data_over(storage, self.meta)


Source = Argument | HeldTensor | Carried | Uploaded | Computed


def _data_over(storage: LazyStorage, meta: TensorMeta) -> TensorData:
    return storage if meta is storage.meta else ViewData(storage.context, None, None, meta, storage)


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """A place that leads to the `number`-th tensor among the arguments, or to a view of it, as the call begins."""

    number: int
    read: Callable[[], Any]
    meta: TensorMeta

    def holds(self, arguments: Arguments) -> bool:
        tensor = self.read()
        if not isinstance(tensor, LazyTensor):
            return False
        data = tensor._data
        return data.storage is arguments.tensors[self.number]._data.storage and data.meta == self.meta


# ----- where its outputs go


# A holder's `put`, and the data that it is to hold from now on; or the `put` of a `Commit`, an `UnsettledStep` or a
# `ClearedGrad`, and that itself.
Delivery = tuple[Callable[[Any, Any], None], Any]


class Output:
    """One value that a program makes, and its holders between calls."""

    __slots__ = ("meta", "holders", "context")

    def __init__(self, context: DeviceContext, meta: TensorMeta, holders: Sequence[tuple[TensorMeta, Holder]]) -> None:
        self.context = context
        self.meta = meta
        self.holders = holders  # each with its geometry over the value

    def current(self) -> LazyStorage | None:
        """The storage that the last call left; None if its holder is gone, or holds a tensor of another geometry."""
        if not self.holders:
            return None
        meta, holder = self.holders[0]
        data = holder.data()
        if data is None or (data.meta is not meta and data.meta != meta):
            return None
        storage = data.storage
        return storage if storage.meta is self.meta or storage.meta == self.meta else None

    def renew(self, deliveries: list[Delivery]) -> LazyStorage:
        """A storage for the next value. Adds the deliveries that make the holders of the last value hold this one."""
        storage = LazyStorage(self.context, None, None, self.meta)
        deliveries.extend((holder.put, _data_over(storage, meta)) for meta, holder in self.holders)
        return storage


@dataclass(frozen=True, slots=True)
class ReturnedOutput:
    """A returned tensor that is an output, or a view of one."""

    output: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class ReturnedInput:
    """A returned tensor that the call did not make: it shares the memory of an input."""

    source: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class ReturnedLiteral:
    """A returned value that is not a tensor. The caller gets a copy, unless it is always the same object."""

    value: Any
    is_shared: bool


Leaf = ReturnedOutput | ReturnedInput | ReturnedLiteral


def _returned(leaf: Leaf, storages: Sequence[LazyStorage], inputs: Sequence[TensorData]) -> Any:
    if isinstance(leaf, ReturnedLiteral):
        return leaf.value if leaf.is_shared else copy.deepcopy(leaf.value)
    storage = storages[leaf.output] if isinstance(leaf, ReturnedOutput) else inputs[leaf.source].storage
    return wrap(_data_over(storage, leaf.meta))


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call returns. `spec` is None for a single leaf."""

    leaves: tuple[Leaf, ...]
    spec: trees.TreeSpec | None


@dataclass(frozen=True, slots=True)
class Writes:
    """What a program writes in place: tensors of the state, the .grad of parameters, arguments by place."""

    state: tuple[LazyTensor, ...]
    grads_of: tuple[LazyTensor, ...]
    arguments: tuple[int, ...]

    def count(self, arguments: Arguments) -> None:
        """Tell autograd of the writes, so that a graph that saved what was written raises its error.

        Once for each tensor, where the body may have written it several times.
        """
        tensors: list[torch.Tensor] = [arguments.tensors[place] for place in self.arguments]
        tensors += [grad for parameter in self.grads_of if (grad := parameter.grad) is not None]
        torch.autograd.graph.increment_version([*self.state, *tensors])


@dataclass(slots=True, eq=False)
class CapturedProgram:
    """A recorded program, bound to the state it works on. See Note [A replay is a step]."""

    context: DeviceContext
    bound: CachedComputation
    settings: tuple[Any, ...]
    sources: tuple[Source, ...]
    parameters: tuple[tuple[int, bool], ...]  # each the place of a source, and whether its base is wanted
    outputs: tuple[Output, ...]
    returned: Returned
    floats: FormulaProgram
    generators: tuple[torch.Generator | None, ...]  # one per seed; None: torch's default one
    state_guard: StateGuard
    optimizer_guards: tuple[OptimizerGuard, ...]
    unsettled: tuple[UnsettledStep, ...]  # the steps that a GradScaler may skip
    kept: frozenset[int]  # ids of storages that no argument may share: references would keep dead state alive
    grads_at_start: tuple[tuple[LazyTensor, bool], ...]  # whether each must have a .grad
    must_keep_grad: tuple[tuple[LazyTensor, TensorData], ...]
    cleared_grads: tuple[ClearedGrad, ...]
    argument_places: tuple[ArgumentPlace, ...]
    writes: Writes
    site: str

    def check(self, arguments: Arguments) -> Evaluated:
        """Check all that a replay relies on. Returns what the formulas give, or raises `Stale`."""
        change = self.state_guard.change()
        if change:
            raise Stale(change)
        floats = arguments.floats
        for guard in self.optimizer_guards:
            own = guard.floats()
            if own is None:
                raise Stale("an optimizer's settings changed")
            floats += own
        for parameter, has_grad in self.grads_at_start:
            if (parameter.grad is not None) is not has_grad:
                raise Stale(f"a parameter has {'no' if has_grad else 'a'} .grad")
        for parameter, data in self.must_keep_grad:
            grad = parameter.grad
            if not isinstance(grad, LazyTensor) or grad._data is not data:
                raise Stale("a parameter has another .grad")
        for output in self.outputs:
            for _, holder in output.holders:
                if not holder.holds():
                    raise Stale("a tensor that it replaces was replaced, or is held elsewhere too")
        for where in self.argument_places:
            if not where.holds(arguments):
                raise Stale("a tensor that was an argument and part of the state is only one of them")
        for tensor in arguments.tensors:
            if id(tensor._data.storage) in self.kept:
                raise Stale("an argument shares memory with the state")
        return self.floats.evaluate(floats)

    def prepare(self, arguments: Arguments) -> PreparedReplay:
        """Check and make all that a replay needs. The caller holds the context's lock, and nothing is pending.

        A run may be under way if the program `may_prepare_early`. Raises `Stale` before anything has happened.
        """
        count = self.context.locker.count  # a signal handler may replay after this: then this call begins again
        evaluated = self.check(arguments)
        arguments.uploads = evaluated.uploads
        if current_settings() != self.settings:
            raise Stale("the settings changed")
        inputs = [source.data(self, arguments) for source in self.sources]
        commit = evaluated.commit
        # done last to first, see Note [Skipped steps of a captured function]
        deliveries: list[Delivery] = [] if commit is None else [(commit.put, commit)]
        deliveries.extend((step.arm, step.values()) for step in self.unsettled)
        deliveries.extend((cleared.put, cleared) for cleared in self.cleared_grads)
        storages = [output.renew(deliveries) for output in self.outputs]
        result = self._result(storages, inputs)
        parameters = [inputs[place].storage if base else inputs[place] for place, base in self.parameters]
        return PreparedReplay(self, arguments, count, evaluated.constants, parameters, storages, deliveries, result)

    def may_prepare_early(self) -> bool:
        """Whether nothing is checked or computed that the run under way may still change."""
        return not self.floats.reads_state and not self.unsettled

    def _result(self, storages: Sequence[LazyStorage], inputs: Sequence[TensorData]) -> Any:
        leaves = [_returned(leaf, storages, inputs) for leaf in self.returned.leaves]
        spec = self.returned.spec
        return leaves[0] if spec is None else trees.tree_unflatten(leaves, spec)

    def settle(self) -> None:
        """Note the reference counts of what holds the state, after the caller has dropped its own references."""
        for output in self.outputs:
            for _, holder in output.holders:
                if isinstance(holder, TensorHolder):
                    holder.settle()
        self.state_guard.settle()

    def carried(self) -> dict[LazyStorage, int]:
        """The storages that the last call left, each with the place of its output."""
        return {storage: place for place, output in enumerate(self.outputs) if (storage := output.current())}


@dataclass(frozen=True, slots=True)
class PreparedReplay:
    """A replay that waits only for the run under way. `count`: of the device's runs, when its checks began."""

    program: CapturedProgram
    arguments: Arguments
    count: int
    constants: tuple[float, ...]
    parameters: list[TensorData]
    storages: list[LazyStorage]
    deliveries: list[Delivery]
    result: Any

    def commit(self) -> tuple[Any, Async] | None:
        """What the body would have returned, and the run; None, with nothing done, if something came in between.

        The caller holds the context's lock.
        """
        program = self.program
        if program.context.locker.count != self.count or program.context.has_pending():
            return None  # before seeds are drawn: the next attempt draws them
        seeds = [contexts.get_rng_seed(generator) for generator in program.generators]
        run = executor.replay(
            SyncTensorCollection(program.context, program.context.trace.cursor, (), [], "captured call", program.site),
            program.bound,
            self.parameters,
            self.constants,
            [seeds[place] for place in program.bound.seeds],
            self.storages,
            self.deliveries,
            self.count,
        )
        if run is None:
            return None
        program.writes.count(self.arguments)
        metrics.increment("CapturedCall")
        return self.result, run
