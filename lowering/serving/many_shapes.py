"""Serve inputs of many shapes: one graph for each, and the same weights for all.

In: the graph, signature and constants of the example's shapes, and those of further shapes when they are asked for.
Out: `ManyShapesExecutor`, which is the executor of the example's shapes and hands other requests on.

Note [Shapes of requests]
A function may do something else for each shape, so no graph is used for a shape that it was not recorded with: a
request of a new shape has it recorded, is interpreted, and leaves an executor to the next ones. What shapes share is
behind that: the weights, the values that are folded alike, turns where weights are written, and compiled plans (Note
[Regions compile as steps do]). A shape may use weights that the example did not; these are kept as `spare` ones. At
most `ExecutorConfig.max_shapes` further shapes are kept, and that which was not asked for longest is dropped first.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazy_backend.lowering.interpreter.frame import FrameTemplate
from lazy_backend.lowering.ir.graph import Graph, Value, meta_of
from lazy_backend.lowering.serving.constant_folding import ConstantFolder, split_constants
from lazy_backend.lowering.serving.executor import Executor, ExecutorConfig, GraphSignature
from lazy_backend.lowering.serving.weights import CurrentWeights, Weights, check_kind, check_tensor

Shapes = tuple[torch.Size, ...]


class NotShareable(ValueError):
    """The graph of a further shape cannot be served beside the example's. Says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What the executors of all shapes have in common. It refers to none of them, so no cycle keeps them alive."""

    current: CurrentWeights
    turn: AbstractContextManager[Any]
    written: frozenset[str]  # weights that the example's graph writes
    folded: Mapping[int, Value]  # the values that the example's graph folds, by number
    known: dict[Hashable, int]  # the numbers, see `ConstantFolder.number_values`


class ShapeExecutor(Executor):
    """Runs the graph of further shapes, with the weights of a `ManyShapesExecutor`.

    `own`: tensors that only this graph uses, by names that no weight has. Raises `NotShareable` if the graph writes
    tensors that the example's does not write: other shapes would not see what it wrote.
    """

    def __init__(
        self,
        shared: _Shared,
        graph: Graph,
        signature: GraphSignature,
        own: Mapping[str, torch.Tensor],
        constants: Sequence[float],
        config: ExecutorConfig,
    ) -> None:
        self._shared = shared
        self.own = own
        self._from_example: dict[Value, Value] = {}  # folded value -> the example's
        self.is_dropped = False
        self.last_use = 0
        super().__init__(graph, signature, own, constants, config)
        written = self._written_weights() - shared.written
        if written:
            names = ", ".join(map(repr, sorted(written)))
            raise NotShareable(f"it writes {names}, which it does not for the example inputs")
        self._turn = shared.turn
        self._current = shared.current

    def _find_state_slots(self) -> list[tuple[str, int]]:
        # this graph may only read what the example's writes
        names = sorted(self._shared.written.intersection(self._expected))
        return [(name, self._expected[name].number) for name in names]

    def _split_constants(self) -> ConstantFolder:
        # what the example's graph writes changes from run to run, even if this graph does not write it
        fixed = {value: name for name, value in self._expected.items() if name not in self._shared.written}
        is_compiled = self.config.policy is not None
        folder = split_constants(self.graph, fixed, self.constants, leaves_views=is_compiled)
        numbers = folder.number_values(fixed, self._shared.known)
        for value in folder.folded:
            example = self._shared.folded.get(numbers.get(value, -1))
            if example is not None:
                self._from_example[value] = example
        return folder.without(self._from_example) if self._from_example else folder

    def _check_weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        return self._shared.current.weights  # which belong to all shapes together

    def _template(self) -> FrameTemplate:
        weights = self._shared.current.weights
        template = weights.templates.get(self)
        return self.bind(weights) if template is None else template

    def bind(self, weights: Weights) -> FrameTemplate:
        """A frame's contents before a run with `weights`, which keep them for further runs."""
        held: dict[Value, torch.Tensor] = {}
        for name, value in self._expected.items():
            tensor = self._tensor(name, weights)
            written = value in self._written
            held[value] = check_tensor(f"weight {name!r}", tensor, value.meta, self.graph.device, written)
        folded = self._folder.fold(held)
        shared = {value: weights.folded[example] for value, example in self._from_example.items()}
        slots = {value.number: tensor for value, tensor in (held | folded | shared).items()}
        template = weights.templates[self] = self._kernels.template.holding(slots)
        if self.is_dropped:  # and nobody drops it once more
            weights.templates.pop(self, None)
        return template

    def _tensor(self, name: str, weights: Weights) -> torch.Tensor | None:
        for tensors in (self.own, weights.tensors, weights.spare):
            if name in tensors:
                return tensors[name]
        return None


class ManyShapesExecutor(Executor, ABC):
    """The executor of the example's shapes, and of others as requests ask for them. See Note [Shapes of requests].

    `spare`: weights that the example's graph does not use.
    """

    def __init__(
        self,
        graph: Graph,
        signature: GraphSignature,
        weights: Mapping[str, torch.Tensor],
        constants: Sequence[float],
        config: ExecutorConfig,
        spare: Mapping[str, torch.Tensor],
    ) -> None:
        self._spare = {name: meta_of(tensor) for name, tensor in spare.items()}
        self._example_shapes: Shapes = tuple(torch.Size(meta.shape) for meta in signature.examples)
        self._others: dict[
            Shapes, ShapeExecutor
        ] = {}  # changed only where shapes are recorded, by one thread at a time
        self._uses = itertools.count(1)
        super().__init__(graph, signature, {**weights, **spare}, constants, config)
        self._shared = self._make_shared()

    def _make_shared(self) -> _Shared:
        known: dict[Hashable, int] = {}
        names = {value: name for name, value in self._expected.items()}
        numbers = self._folder.number_values(names, known, adds=True)
        folded = {numbers[value]: value for value in self._folder.folded}
        return _Shared(self._current, self._turn, frozenset(self._written_weights()), folded, known)

    # ----- weights

    def _check_weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """As `Executor` does, for all shapes. A spare weight that is not given keeps its value."""
        weights = super()._check_weights({name: one for name, one in tensors.items() if name not in self._spare})
        spare = {
            name: check_tensor(f"weight {name!r}", tensors[name], meta, self.graph.device, False)
            if name in tensors
            else self._current.weights.spare[name]
            for name, meta in self._spare.items()
        }
        weights = replace(weights, spare=spare)
        for other in list(self._others.values()):
            other.bind(weights)
        return weights

    # ----- shapes

    def _executor_for(self, inputs: Sequence[torch.Tensor]) -> Executor:
        try:
            shapes = tuple([tensor.shape for tensor in inputs])
        except (AttributeError, RuntimeError):  # a nested tensor has no shape
            return self  # which says what is wrong
        if shapes == self._example_shapes or not self.config.max_shapes:
            return self
        found = self._others.get(shapes)
        if found is None:
            self._check_kinds(inputs)
            found = self.record_shapes(shapes, inputs)
        found.last_use = next(self._uses)
        return found

    def _check_kinds(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `InputError` for inputs that differ from the examples in more than sizes."""
        signature = self.graph_signature
        if len(inputs) != len(signature.examples):
            self._checked(inputs)  # raises
        for (name, _), given, meta in zip(signature.user_inputs, inputs, signature.examples, strict=True):
            check_kind(f"input {name!r}", given, meta, self.graph.device, any_sizes=True)

    @abstractmethod
    def record_shapes(self, shapes: Shapes, inputs: Sequence[torch.Tensor]) -> ShapeExecutor:
        """The executor for these shapes, which nobody has asked for yet, or another thread just now."""

    def kept_executor(self, shapes: Shapes) -> ShapeExecutor | None:
        """The executor for shapes that are not the example's, if they were recorded and are kept."""
        return self._others.get(shapes)

    def add_shapes(
        self,
        shapes: Shapes,
        graph: Graph,
        signature: GraphSignature,
        own: Mapping[str, torch.Tensor],
        constants: Sequence[float],
    ) -> tuple[ShapeExecutor, int]:
        """An executor for further shapes, and how many others were dropped for it. For one thread at a time."""
        made = ShapeExecutor(self._shared, graph, signature, own, constants, self.config)
        made.last_use = next(self._uses)
        self._others[shapes] = made  # from here on others find it
        dropped = sorted(self._others, key=lambda key: self._others[key].last_use)[: -self.config.max_shapes]
        for key in dropped:
            other = self._others.pop(key)
            other.is_dropped = True
            self._current.weights.templates.pop(other, None)
            for region in other.delegates:
                region.drop()
        return made, len(dropped)

    def recordings(self) -> list[tuple[Shapes, Executor, Mapping[str, torch.Tensor]]]:
        """The shapes that are kept, the example's first, the executor of each, and the tensors that it alone uses."""
        others = [(shapes, other, other.own) for shapes, other in list(self._others.items())]
        return [(self._example_shapes, self, {}), *others]

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of inputs that were recorded and are kept: the example's, then the others in order of arrival."""
        return [tuple(map(tuple, shapes)) for shapes in (self._example_shapes, *self._others)]

    # ----- frames, of all shapes

    @property
    def num_execution_frames(self) -> int:
        """Frames of runs in flight, and frames kept for later runs."""
        return sum(one._frames.num_frames for one in (self, *self._others.copy().values()))

    def clear_stale_execution_frames(self) -> None:
        """Drop frames that were unused for `max_frame_age` seconds. Every run does this for its shapes, too."""
        for one in (self, *self._others.copy().values()):
            one._frames.clear_stale()
