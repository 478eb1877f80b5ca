"""One call of a captured function that ran as written.

In: the function's results and the trace it left. Out: a `RecordedCall`; `binding` compares two of them.
"""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_backend.cache.trie import TrieNode
from lazy_backend.execution.computations import current_settings
from lazy_backend.floats.float_recorder import SCHEDULED_INSIDE, FloatRecorder, RecordedFloats
from lazy_backend.floats.formula_program import ProgramRun
from lazy_backend.floats.hyperparameters import OptimizerGuard, changed_numbers, numbers_in
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.lowering.plans.cached_computation import CachedComputation
from lazy_backend.ports import trees
from lazy_backend.ports.autograd_engine import next_node_number, node_number, nodes_before, nodes_of, saves_tensors
from lazy_backend.ports.cpython import is_a, name_of
from lazy_backend.ports.tensor_types import base_of, grad_fn_of, is_leaf, version_of
from lazy_backend.replay.accounts import NotReplayable
from lazy_backend.replay.captured_state import (
    GradHolder,
    Holder,
    TensorHolder,
    Unaccounted,
    Watch,
    find_tensors,
)
from lazy_backend.replay.plain_values import is_plain, value_key
from lazy_backend.replay.reachable import Attribute, Reachable
from lazy_backend.replay.replayed_call import Arguments
from lazy_backend.replay.state_guard import Found
from lazy_backend.replay.state_places import PlacedState, PlaceNumbers
from lazy_backend.replay.structure import Root, Structure, marks_of
from lazy_backend.replay.unseen_reads import CodeThatRan
from lazy_backend.replay.value_guard import ValueGuard
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import ModesBefore, run_clean


class ReadsUnseen(NotReplayable):
    """What a call read that no guard can follow. It says nothing of earlier replays."""


@dataclass(frozen=True, slots=True)
class ReturnedTensor:
    """A tensor that a call returned: what it stands for, and its geometry.

    `kind` says what `place` indexes: the call's outputs, its trace's inputs or its tensor arguments; -1 for any other.
    """

    kind: str
    place: int
    meta: TensorMeta
    data: weakref.ref[TensorData]

    def agrees(self, other: object) -> bool:
        return (
            isinstance(other, ReturnedTensor)
            and (self.kind, self.place, self.meta) == (other.kind, other.place, other.meta)
            and (self.kind != "other" or self.data() is other.data())
        )


@dataclass(frozen=True, slots=True)
class ReturnedValue:
    """A value that a call returned and that is not a tensor.

    `key` stands for what it was then, if it can be compared by value; `copy` is of it then, as the caller may write.
    """

    value: Any
    key: Hashable | None
    copy: Any

    def agrees(self, other: object) -> bool:
        if not isinstance(other, ReturnedValue) or is_a(self.value, torch.Tensor):
            return False
        return self.key == other.key and (self.key is not None or self.value is other.value)


def _returned_value(value: Any) -> ReturnedValue:
    key = value_key(value)
    return ReturnedValue(value, key, value if key is None or is_plain(value) else copy.deepcopy(value))


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
    returned: list[ReturnedTensor | ReturnedValue]
    spec: trees.TreeSpec | None
    watch: Watch
    guards: tuple[OptimizerGuard, ...]
    floats: tuple[float, ...]  # of the arguments, then of the optimizers
    formulas: RecordedFloats
    computed: dict[int, list[int]]  # by input that the body uploaded: the nodes of `formulas` that gave its value
    settings: tuple[Any, ...]
    numbers: PlaceNumbers
    after: PlacedState = field(default_factory=PlacedState)
    argument_places: frozenset[tuple[int, int]] = (
        frozenset()
    )  # that led to an argument before or after it: both numbers
    bound: CachedComputation | None = None
    roots: tuple[Root, ...] = ()  # the modules and optimizers that it reaches or used
    reached_generators: tuple[torch.Generator, ...] = ()
    random_states: tuple[Callable[[], Any], ...] = ()  # of the random generators of the host that it reaches
    drew_unseen: str = ""  # why a replay would not draw the random numbers that the body drew
    other_devices: tuple[str, ...] = ()  # that the body computed on besides
    changed_argument: str = ""  # why what the body did with its arguments keeps it from being replayed
    unfit_read: str = ""  # why what the body read keeps it from being replayed
    changed_settings: set[str] = field(default_factory=set)  # names of entries of groups, changed unseen
    left_modes: str = ""  # why a replay would leave the thread's modes otherwise
    left_graph: str = ""  # where the body left a graph of its own that can be differentiated
    structure_change: str = ""  # what the body changed in modules and optimizers besides tensors
    unnamed: dict[Attribute, list[Hashable]] = field(default_factory=dict)  # as the call began

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
        return self.spec == other.spec and all(
            one.agrees(two) for one, two in zip(self.returned, other.returned, strict=False)
        )

    def returned_outputs(self) -> set[int]:
        return {leaf.place for leaf in self.returned if isinstance(leaf, ReturnedTensor) and leaf.kind == "output"}


def flatten_result(result: Any) -> tuple[list[Any], trees.TreeSpec | None]:
    """The leaves of what a body returned, detached: a replay has no autograd graph of the body."""
    if is_a(result, LazyTensor):
        return [result.detach()], None
    leaves, spec = trees.tree_flatten(result)
    return [leaf.detach() if is_a(leaf, LazyTensor) else leaf for leaf in leaves], spec


def unflatten_result(leaves: Sequence[Any], spec: trees.TreeSpec | None) -> Any:
    return leaves[0] if spec is None else trees.tree_unflatten(leaves, spec)


# ----- what a body finds


def graph_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor, or its base: autograd makes that of a view anew when the base was written."""
    base = base_of(tensor)
    return grad_fn_of(tensor if base is None else base)


class Given:
    """The arguments of a body that it may change besides writing to tensors, and whether a backward leaves by one.

    Of arrays, dataclasses and the like the values, of tensors the attributes, the hooks, the graph and whether they
    require gradients. A backward that goes on through the graph of an argument does what that graph was made of.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        others = [leaf for leaf in leaves if not is_a(leaf, torch.Tensor) and not is_plain(leaf)]
        self._before = [(leaf, value_key(leaf)) for leaf in others]
        self._tensors = [(leaf, marks_of(leaf)) for leaf in leaves if is_a(leaf, LazyTensor)]
        self._was_left = False
        self._graphs = [graph_of(leaf) for leaf, _ in self._tensors]
        self._has_other_graph = False
        self._nodes: set[Any] = {node for leaf, _ in self._tensors if (node := grad_fn_of(leaf)) is not None}
        self._hooks = [node.register_prehook(self._leave) for node in self._nodes]

    def _leave(self, grads: Any) -> None:
        self._was_left = True

    def see_backward(self, results: Sequence[torch.Tensor], inputs: Sequence[Any], keeps_graph: bool) -> None:
        """Note whether a backward for some inputs alone would go on through an argument, if that had another graph."""
        if not inputs or not self._nodes:
            return
        own = {id(leaf) for leaf, _ in self._tensors}
        ends = (
            {grad_fn_of(one) for one in inputs if is_a(one, torch.Tensor)} if own.issuperset(map(id, inputs)) else set()
        )
        self._was_left = self._was_left or any(node in self._nodes - ends for node in nodes_of(results))

    def end(self) -> None:
        """Watch backwards no longer, and keep no graph."""
        before = zip(self._graphs, self._tensors, strict=True)
        self._has_other_graph = any(graph_of(leaf) is not graph for graph, (leaf, _) in before)
        self._graphs.clear()
        self._nodes.clear()
        for hook in self._hooks:
            hook.remove()

    def changed(self) -> str:
        """Why what the body did with arguments would not be done by a replay; empty if it would."""
        changed = [name_of(type(leaf)) for leaf, key in self._before if value_key(leaf) != key]
        if changed:
            return f"it changes an argument, of type {changed[0]}, which a replay would not do"
        if any(marks_of(leaf) != marks for leaf, marks in self._tensors):
            return (
                "it changes the attributes, the hooks or the .grad of an argument, or whether that requires gradients\n"
                "  return torch.autograd.grad instead of leaving a .grad"
            )
        if self._has_other_graph:
            return (
                "it writes to an argument that then has another graph, which a replay would not do\n"
                "  return the new tensor instead, and differentiate inside"
            )
        if self._was_left:
            return (
                "its backward goes on through the graph of an argument, which may be another one in each call\n"
                "  pass what the argument is computed from, and compute it inside"
            )
        return ""


class MadeGraphs:
    """The graphs that a body makes, and which of their nodes its own backwards have used up.

    A replay makes no graph: a tensor that the body leaves in the state keeps the graph of the recorded call.
    """

    def __init__(self) -> None:
        self._first = next_node_number()
        self._used_up: set[tuple[int, str]] = set()  # by number and name: a node would keep its graph

    def see_backward(self, results: Sequence[torch.Tensor], inputs: Sequence[Any], keeps_graph: bool) -> None:
        """Note the nodes that a backward is about to use up: for some inputs alone, it may leave others."""
        if not keeps_graph and not inputs:
            self._used_up.update((node_number(node), node.name()) for node in nodes_of(results) if saves_tensors(node))

    def _is_left_by(self, tensor: torch.Tensor) -> bool:
        """Whether the graph of a tensor, or of its `.grad`, is one of these, and can be differentiated."""
        holder = tensor.grad if is_leaf(tensor) else tensor
        node = None if holder is None else graph_of(holder)
        if node is None or node_number(node) < self._first:
            return False
        return not any((node_number(one), one.name()) in self._used_up for one in nodes_before(node))

    def place_in(self, numbers: PlaceNumbers, found: Found) -> str:
        """Where the body left such a tensor; empty if nowhere."""
        left = {number for number, tensor in found.tensors.items() if self._is_left_by(tensor)}
        places = numbers.tensors(found.reach, found.structure.walk) if left else ()
        names = (numbers.name(place) for tensor, place in places if id(tensor) in left)
        return next(names, "its state" if left else "")


@dataclass(slots=True, eq=False)
class Start:
    """The state that a body starts from, as far as the previous call shows where to look for it."""

    left: dict[weakref.ref[LazyStorage], int]  # by the previous call, each with the number of its output
    settings: list[list[dict[str, Any]]]  # the numbers in the groups of the previous call's optimizers
    guards: tuple[OptimizerGuard, ...]
    host_versions: list[tuple[torch.Tensor, int]]
    grads: list[tuple[LazyTensor, weakref.ref[TensorData] | None]]  # the parameters, and what their .grad stands for
    random: RandomState
    structure: Structure | None = None  # of the modules and optimizers of the previous call
    numbers: PlaceNumbers = field(kw_only=True)
    state: PlacedState = field(kw_only=True)
    values: ValueGuard = field(kw_only=True)
    unnamed: dict[Attribute, list[Hashable]] = field(kw_only=True)  # see `Reachable.left_unnamed`
    versions: dict[int, int] = field(default_factory=dict)  # of the state and of the arguments, by id
    modes: ModesBefore = field(default_factory=ModesBefore)
    graphs: MadeGraphs = field(default_factory=MadeGraphs)


def start_of_call(
    last: RecordedCall | None,
    left: dict[LazyStorage, int] | None,
    named: Iterable[Any],
    arguments: Iterable[LazyTensor],
    ran: CodeThatRan,
) -> Start:
    """Note the state before the body runs.

    `left`: what replays left since `last`. `named`: what leads to the state. `ran`: what earlier bodies ran.
    """
    reach = Reachable(named, ran)
    values, unnamed = ValueGuard(reach), reach.left_unnamed()
    if last is None:
        numbers = PlaceNumbers()
        state = numbers.state(reach, Structure((*reach.modules, *reach.optimizers)), ())
        return Start({}, [], (), [], [], RandomState(), numbers=numbers, state=state, values=values, unnamed=unnamed)
    generators = {one for one in (*last.generators, *last.reached_generators) if one is not None}
    outputs = {output: number for number, output in enumerate(last.outputs) if output() is not None}
    if left is not None:
        outputs = {weakref.ref(storage): number for storage, number in left.items()}
    structure, leaves = Structure(last.roots), last.watch.leaves()
    parameters = last.watch.parameters()
    tensors = [*reach.tensors.values(), *structure.tensors, *structure.state_tensors, *leaves, *parameters, *arguments]
    tensors += [grad for one in tensors if is_leaf(one) and (grad := one.grad) is not None]
    return Start(
        left=outputs,
        settings=[numbers_in(guard.optimizer) for guard in last.guards],
        guards=last.guards,
        host_versions=last.watch.host_versions(),
        grads=[(parameter, _grad_of(parameter)) for parameter in parameters],
        random=RandomState(generators, last.random_states),
        structure=Structure(last.roots, hold_tensors=False),
        numbers=last.numbers,
        state=last.numbers.state(reach, structure, leaves),
        values=values,
        unnamed=unnamed,
        versions={id(one): version_of(one) for one in tensors if not one.is_inference()},
    )


def _grad_of(parameter: LazyTensor) -> weakref.ref[TensorData] | None:
    grad = parameter.grad
    return weakref.ref(grad._data) if isinstance(grad, LazyTensor) else None


def _host_generators(others: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
    """The states of the random generators of Python and numpy, and of `others`."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    # the key is an array, which has no single truth value
    plain = None if state is None else (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"])
    return (random.getstate(), plain, *(read() for read in others))


def note_changes(start: Start, record: RecordedCall, last: RecordedCall | None, counts: frozenset[str]) -> None:
    """Note what the body changed besides tensors, right after it ran. `counts`: entries of groups that it followed."""
    record.left_modes = start.modes.change()
    record.drew_unseen = start.random.change(record.generators)
    for guard, before in zip(start.guards, start.settings, strict=True):
        record.changed_settings |= changed_numbers(before, numbers_in(guard.optimizer)) - counts
    if start.structure is not None and last is not None:
        record.structure_change = start.structure.difference(Structure(last.roots, hold_tensors=False))
    start.structure = None  # it refers to what the body replaced


def check_side_effects(start: Start, record: RecordedCall) -> None:
    """Raise `NotReplayable` for side effects of a body besides lazy operators, as far as they can be detected."""
    if record.other_devices:
        raise NotReplayable(
            f"it computes on {', '.join(record.other_devices)}, and not only on {record.context.name}\n"
            "  capture one function per device"
        )
    if record.changed_argument:
        raise NotReplayable(record.changed_argument)
    if record.left_modes:
        raise NotReplayable(record.left_modes)
    if record.left_graph:
        raise NotReplayable(
            f"it leaves a tensor with a graph in {record.left_graph}, which a replay would not make anew\n"
            "  leave x.detach(), or return what is to be differentiated from a captured module"
        )
    if record.structure_change:
        raise NotReplayable(
            f"its own code changes a value: {record.structure_change}\n"
            "  a replay would not do it again: keep counters outside, or in a lazy tensor"
        )
    if record.changed_settings or any(guard.floats() is None for guard in start.guards):
        raise NotReplayable(SCHEDULED_INSIDE)
    if record.formulas.problem is not None:
        raise NotReplayable(record.formulas.problem)
    if any(
        version_of(tensor) != version and id(tensor) not in record.formulas.seen
        for tensor, version in start.host_versions
    ):
        raise NotReplayable("it changes an optimizer's state on the CPU unseen, which a replay would not do")
    if record.drew_unseen:
        raise NotReplayable(record.drew_unseen)


class RandomState:
    """The states of the random number generators that a body may draw from without recording it.

    `generators`, `states`: of the user's own, as far as they are known.
    """

    def __init__(self, generators: Iterable[torch.Generator] = (), states: Sequence[Callable[[], Any]] = ()) -> None:
        self._states = states
        self._host = _host_generators(states)
        self._generators = [(one, one.get_state()) for one in {torch.default_generator, *generators}]

    def change(self, drawn: Sequence[torch.Generator | None]) -> str:
        """What else was drawn since than one seed each from `drawn`, as a reason. None: from the default generator."""
        if _host_generators(self._states) == self._host and all(
            _drew_only(sum((one or torch.default_generator) is own for one in drawn), own, before)
            for own, before in self._generators
        ):
            return ""
        return "it draws random numbers on the CPU\n  draw them on the lazy device, or pass them as arguments"


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
    spec: trees.TreeSpec | None,
    recorder: FloatRecorder,
    counts: Collection[str],
) -> tuple[RecordedCall, list[LazyStorage]]:
    """The record of a call, made before its trace is synced; and the storages that it made and that are alive."""
    trace = context.trace
    indices, storages = trace.live()
    guards = tuple(OptimizerGuard(optimizer, counts) for optimizer in watch.optimizers)
    given_floats = [recorder.given_to(guard.optimizer, guard.floats() or ()) for guard in guards]
    formulas = recorder.finish([guard.optimizer for guard in guards], [len(arguments.floats), *map(len, given_floats)])
    given = {data(): place for place, data in enumerate(argument_data)}
    left = {storage(): number for storage, number in start.left.items()}
    record = RecordedCall(
        context=context,
        argument_data=argument_data,
        numbers=start.numbers,
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
        settings=current_settings(),
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
) -> ReturnedTensor | ReturnedValue:
    if not is_a(leaf, LazyTensor):
        return _returned_value(leaf)
    storage = leaf._data.storage
    kinds = (
        ("output", storages),
        ("argument", [tensor._data.storage for tensor in arguments.tensors]),
        ("input", [data.storage for data in inputs]),
    )
    for kind, among in kinds:
        if storage in among:
            return ReturnedTensor(kind, list(among).index(storage), leaf._data.meta, weakref.ref(leaf._data))
    return ReturnedTensor("other", -1, leaf._data.meta, weakref.ref(leaf._data))


def find_holders(
    storages: Sequence[LazyStorage],
    returned: Sequence[LazyTensor],
    parameters: Sequence[LazyTensor],
    found: Iterable[LazyTensor],
    pending: Sequence[object],
) -> list[list[tuple[TensorMeta, Holder]]] | None:
    """For each storage its holders besides the returned tensors, with their geometries; None if some stay unknown.

    `pending`: the trace's references to the storages. `found`: the tensors that the function reaches.
    """
    grads = [parameter.grad for parameter in parameters]
    old = [*parameters, *found, *(grad for grad in grads if isinstance(grad, LazyTensor))]
    try:
        holding = find_tensors(storages, returned, old, pending)
    except Unaccounted:
        return None
    del old, grads
    owners = {id(parameter.grad): parameter for parameter in parameters if parameter.grad is not None}
    return [[_holder(tensor, owners) for tensor in tensors] for tensors in holding]


def _holder(tensor: LazyTensor, owners: dict[int, LazyTensor]) -> tuple[TensorMeta, Holder]:
    owner = owners.get(id(tensor))
    return tensor._data.meta, TensorHolder(tensor) if owner is None else GradHolder(owner)
