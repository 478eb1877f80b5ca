"""One call of a captured function that ran as written.

In: the function's results and the trace it left. Out: a `RecordedCall`; `binding` compares two of them.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_backend.cache.trie import TrieNode
from lazy_backend.execution.computations import current_environment
from lazy_backend.lowering.compilation.environment import Environment
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.lowering.plans.cached_computation import CachedComputation
from lazy_backend.replay.captured_state import (
    GradHolder,
    Holder,
    OptimizerGuard,
    TensorHolder,
    Unaccounted,
    Watch,
    find_tensors,
)
from lazy_backend.replay.float_recorder import FloatRecorder, RecordedFloats
from lazy_backend.replay.formula_program import ProgramRun
from lazy_backend.replay.replayed_call import Arguments
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean


class NotCapturable(Exception):
    """Why a call that was recorded cannot be replayed."""


@dataclass(frozen=True, slots=True)
class ReturnedTensor:
    """A tensor that a call returned: its storage, and its geometry.

    `kind` says what `place` indexes: the call's outputs, its trace's inputs or its tensor arguments; -1 for any other.
    """

    kind: str
    place: int
    meta: TensorMeta
    storage: weakref.ref[TensorData]

    def agrees(self, other: object) -> bool:
        return (
            isinstance(other, ReturnedTensor)
            and (self.kind, self.place, self.meta) == (other.kind, other.place, other.meta)
            and (self.kind != "other" or self.storage() is other.storage())
        )


@dataclass(frozen=True, slots=True)
class FirstUse:
    """An input as the line at `site` first used it."""

    meta: TensorMeta
    site: str


@dataclass(slots=True, eq=False)
class RecordedCall:
    """What one call did. Refers weakly to tensors."""

    context: DeviceContext
    cursor: TrieNode[Call | Cut]
    indices: tuple[int, ...]
    argument_data: list[weakref.ref[TensorData]]  # of the tensor arguments, before the body ran
    inputs: list[weakref.ref[TensorData]]
    uploads: dict[int, torch.Tensor]  # copies of the inputs that the body uploaded from the host
    arguments: dict[int, int]  # by input: which tensor argument it is
    carried: dict[int, int]  # by input: which output of the previous call it is
    constants: tuple[float, ...]
    generators: tuple[torch.Generator | None, ...]  # the source of each seed; None: torch's default one
    outputs: list[weakref.ref[LazyStorage]]
    metas: list[TensorMeta]
    returned: list[Any]  # `ReturnedTensor`s and other values
    spec: pytree.TreeSpec | None
    watch: Watch
    guards: tuple[OptimizerGuard, ...]
    floats: tuple[float, ...]  # of the arguments, then of the optimizers
    formulas: RecordedFloats
    computed: dict[int, list[int]]  # by input that the body uploaded: the nodes of `formulas` that gave its value
    settings: Environment
    bound: CachedComputation | None = None

    def calls(self) -> list[Call]:
        return [call for call in self.cursor.path() if isinstance(call, Call)]

    def entered(self, place: int) -> FirstUse:
        """The first use of an input in the trace."""
        return next(
            FirstUse(entered.meta, call.site)
            for call in self.calls()
            for entered in call.entered
            if entered.token.index == place
        )

    def constant_call(self, place: int) -> Call:
        """The call that a float of the trace belongs to."""
        for call in self.calls():
            if place < call.num_constants:
                return call
            place -= call.num_constants
        raise IndexError(place)

    def as_run(self) -> ProgramRun:
        return ProgramRun(self.formulas, self.floats, self.constants, self.computed, self.uploads, self.float_names())

    def float_names(self) -> list[str]:
        """The names of `floats`, for reasons."""
        names = [name for guard in self.guards for name in guard.names]
        return ["a float argument"] * (len(self.floats) - len(names)) + names

    def returns_like(self, other: RecordedCall) -> bool:
        """Whether both returned the same, apart from the values of what they made."""
        return self.spec == other.spec and all(map(_agree, self.returned, other.returned))

    def own_generators(self) -> list[torch.Generator]:
        return [generator for generator in self.generators if generator is not None]

    def seeds_from(self, generator: torch.Generator) -> int:
        """How many seeds were drawn from `generator`."""
        return sum((own or torch.default_generator) is generator for own in self.generators)

    def returned_outputs(self) -> set[int]:
        return {leaf.place for leaf in self.returned if isinstance(leaf, ReturnedTensor) and leaf.kind == "output"}


def _agree(a: Any, b: Any) -> bool:
    if isinstance(a, ReturnedTensor):
        return a.agrees(b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return a is b or (type(a) is type(b) and bool(a == b))


def flatten_result(result: Any) -> tuple[list[Any], pytree.TreeSpec | None]:
    """The leaves of what a body returned, detached: a replay has no autograd graph of the body."""
    if isinstance(result, LazyTensor):
        return [result.detach()], None
    leaves, spec = pytree.tree_flatten(result)
    return [leaf.detach() if isinstance(leaf, LazyTensor) else leaf for leaf in leaves], spec


# ----- what a body finds


@dataclass(slots=True, eq=False)
class Start:
    """The state that a body starts from, as far as the previous call shows where to look for it."""

    left: list[tuple[weakref.ref[LazyStorage], int]]  # by the previous call, each with the place of its output
    floats: list[tuple[float, ...] | None]
    guards: tuple[OptimizerGuard, ...]
    host_versions: list[tuple[torch.Tensor, int]]
    parameters: list[LazyTensor]
    without_grad: list[LazyTensor]
    generators: list[tuple[torch.Generator, torch.Tensor]]  # with their states
    python_generator: Any


def start_of_call(last: RecordedCall | None, left: dict[LazyStorage, int] | None) -> Start:
    """Note the state before the body runs. `left`: what replays left since `last`."""
    if last is None:
        return Start([], [], (), [], [], [], [], random.getstate())
    parameters = last.watch.parameters()
    generators = {torch.default_generator, *last.own_generators()}
    places = [(output, place) for place, output in enumerate(last.outputs)]
    if left is not None:
        places = [(weakref.ref(storage), place) for storage, place in left.items()]
    return Start(
        left=places,
        floats=[guard.floats() for guard in last.guards],
        guards=last.guards,
        host_versions=last.watch.host_versions(),
        parameters=parameters,
        without_grad=[parameter for parameter in parameters if parameter.grad is None],
        generators=[(generator, generator.get_state()) for generator in generators],
        python_generator=random.getstate(),
    )


def check_side_effects(start: Start, record: RecordedCall) -> None:
    """Raise `NotCapturable` for side effects of a body besides lazy operators, as far as they can be detected."""
    if [guard.floats() for guard in start.guards] != start.floats:
        raise NotCapturable(
            "it changes an optimizer's hyperparameters\n  step learning-rate schedules outside the captured function"
        )
    if record.formulas.problem is not None:
        raise NotCapturable(record.formulas.problem)
    if any(
        tensor._version != version and id(tensor) not in record.formulas.seen for tensor, version in start.host_versions
    ):
        raise NotCapturable("it changes an optimizer's state on the CPU unseen, which a replay would not do")
    if random.getstate() != start.python_generator or not all(
        _drew_only(record.seeds_from(generator), generator, before) for generator, before in start.generators
    ):
        raise NotCapturable(
            "it draws random numbers on the CPU\n  draw them on the lazy device, or pass them as arguments"
        )


def _drew_only(num_seeds: int, generator: torch.Generator, before: torch.Tensor) -> bool:
    """Whether drawing `num_seeds` seeds takes `generator` from the state `before` to its current state."""
    after = generator.get_state()
    try:
        generator.set_state(before)
        for _ in range(num_seeds):
            rng.draw_seed(generator)
        return torch.equal(generator.get_state(), after)
    finally:
        generator.set_state(after)


# ----- what it left


def record_call(
    context: DeviceContext,
    arguments: Arguments,
    argument_data: list[weakref.ref[TensorData]],
    start: Start,
    watch: Watch,
    made_outside: Collection[LazyStorage],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec | None,
    recorder: FloatRecorder,
) -> tuple[RecordedCall, list[LazyStorage]]:
    """The record of a call, made before its trace is synced; and the storages that it made and that are alive."""
    trace = context.trace
    indices, storages = trace.live()
    guards = tuple(OptimizerGuard(optimizer) for optimizer in watch.optimizers)
    given_floats = [guard.floats() or () for guard in guards]
    counts = [len(arguments.floats), *map(len, given_floats)]
    formulas = recorder.finish([guard.optimizer for guard in guards], counts)
    given = {data(): place for place, data in enumerate(argument_data)}
    left = {storage(): place for storage, place in start.left}
    record = RecordedCall(
        context=context,
        argument_data=argument_data,
        carried={place: left[data.storage] for place, data in enumerate(trace.inputs) if data.storage in left},
        cursor=trace.cursor,
        indices=indices,
        inputs=[weakref.ref(data) for data in trace.inputs],
        uploads={},
        arguments={place: given[data] for place, data in enumerate(trace.inputs) if data in given},
        constants=tuple(trace.constants),
        generators=rng.generators_of(trace.seeds),
        outputs=[weakref.ref(storage) for storage in storages],
        metas=[storage.meta for storage in storages],
        returned=[],
        spec=spec,
        watch=watch,
        guards=guards,
        settings=current_environment(),
        floats=arguments.floats + tuple(value for floats in given_floats for value in floats),
        formulas=formulas,
        computed={
            place: formulas.uploads[data.storage]
            for place, data in enumerate(trace.inputs)
            if data.storage in formulas.uploads
        },
    )
    formulas.uploads.clear()  # it would keep them alive
    for place, data in enumerate(trace.inputs):
        if data.storage in made_outside and data.storage.tensor is not None:
            record.uploads[place] = run_clean(data.storage.tensor.clone)
    record.returned = [_describe_returned(leaf, storages, trace.inputs, arguments) for leaf in leaves]
    return record, storages


def _describe_returned(
    leaf: Any, storages: Sequence[LazyStorage], inputs: Sequence[TensorData], arguments: Arguments
) -> Any:
    if not isinstance(leaf, LazyTensor):
        return leaf
    storage = leaf._data.storage
    kinds = (
        ("output", storages),
        ("argument", [tensor._data.storage for tensor in arguments.tensors]),
        ("input", [data.storage for data in inputs]),
    )
    for kind, among in kinds:
        if storage in among:
            return ReturnedTensor(kind, list(among).index(storage), leaf._data.meta, weakref.ref(storage))
    return ReturnedTensor("other", -1, leaf._data.meta, weakref.ref(storage))


def find_holders(
    storages: Sequence[LazyStorage],
    returned: Sequence[LazyTensor],
    parameters: Sequence[LazyTensor],
    pending: Sequence[object],
) -> list[list[tuple[TensorMeta, Holder]]] | None:
    """For each storage its holders besides the returned tensors, with their geometries; None if some stay unknown.

    `pending`: the trace's references to the storages.
    """
    try:
        found = find_tensors(storages, returned, pending)
    except Unaccounted:
        return None
    owners = {id(parameter.grad): parameter for parameter in parameters if parameter.grad is not None}
    return [[_holder(tensor, owners) for tensor in tensors] for tensors in found]


def _holder(tensor: LazyTensor, owners: dict[int, LazyTensor]) -> tuple[TensorMeta, Holder]:
    owner = owners.get(id(tensor))
    return tensor._data.meta, TensorHolder(tensor) if owner is None else GradHolder(owner)
