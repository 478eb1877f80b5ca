"""Serve one graph: fixed weights, many callers.

In: a graph, what its inputs are (`GraphSignature`), its weights. Out: `Executor`, to be called from any thread.
Source: torch/nativert/executor/Executor.h, whose names are kept.

Note [Answers are dropped together]
To free a tensor, PyTorch gives up the GIL, which wakes a thread that waits for it: among several threads this takes as
long as a small request, once per answer. So small answers are held until there are many, and dropped one after another,
which wakes few. Not held are large ones, views of large memory, and those of a thread that has asked alone for a while.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.compilation.request import runs_module_as_is
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.interpreter.frame import ExecutionFrame, FramePool, FrameTemplate
from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.kernels import Kernel, KernelGraph, make_kernels
from lazy_backend.lowering.interpreter.layout import LayoutPlan, MemoryMeter, last_uses, plan_layout
from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.interpreter.task import GraphTask
from lazy_backend.lowering.ir.aliasing import storages_of
from lazy_backend.lowering.ir.functional import unsound_writes
from lazy_backend.lowering.ir.graph import Graph, TensorMeta, Value, empty_of
from lazy_backend.lowering.ir.rng import draw_seed
from lazy_backend.lowering.plans.policy import CompilePolicy
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.lowering.serving.argument_tree import ArgumentTree
from lazy_backend.lowering.serving.constant_folding import ConstantFolder, split_constants
from lazy_backend.lowering.serving.partition import Supported, partition
from lazy_backend.lowering.serving.regions import DelegateKernel, Families, whole_region
from lazy_backend.lowering.serving.request_state import RequestState
from lazy_backend.lowering.serving.weights import (
    CurrentWeights,
    InputError,
    Weights,
    check_kind,
    check_tensor,
    lies_as,
    process_weights,
)
from lazy_backend.ports import trees
from lazy_backend.ports.dispatcher import function_schema

# How many answers are held at most, the bytes of one, and how many requests of one thread tell that it asks alone. See
# Note [Answers are dropped together].
_MAX_HELD, _MAX_BYTES, _ALONE = 128, 4096, 1024

_NO_TURN = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """How callers see a graph's inputs and outputs.

    `weights` and `user_inputs` pair each name with its place among the graph's inputs; the place is None for a user
    input that the graph does not use. User inputs are in the order in which callers pass them, and `examples` has the
    geometry of those that the graph was made for.
    `in_spec` is the tree of (args, kwargs), `out_spec` that of a call's result, whose leaves are the graph's outputs.
    """

    weights: tuple[tuple[str, int], ...]
    user_inputs: tuple[tuple[str, int | None], ...]
    examples: tuple[TensorMeta, ...]
    in_spec: trees.TreeSpec | None = None
    out_spec: trees.TreeSpec | None = None


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """How an `Executor` runs its graph.

    `num_threads`: threads that work on one call, the caller's among them.
    `policy`: when and with what regions of nodes that are `supported` are compiled, and `report` is told of it; without
    one everything is interpreted. `families`: where the regions of graphs for several shapes find shared plans.
    `max_shapes`: shapes beside the example's that are kept, where an executor takes others.
    `max_frame_age`: seconds, by `clock`, after which an unused frame is dropped.
    """

    num_threads: int = 1
    policy: CompilePolicy | None = None
    report: Callable[[CompileReport], None] = lambda report: None
    supported: Supported = lambda node: True
    families: Families | None = None
    max_shapes: int = 64
    max_frame_age: float = 600.0
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class ProfileMetrics:
    """Seconds per run of each kernel on its own, in the order of execution. A compiled region is one kernel."""

    seconds_per_node: tuple[float, ...]
    names: tuple[str, ...]
    peak_bytes: int  # of results and buffers together

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds_per_node)

    @property
    def instances_per_type(self) -> dict[str, int]:
        return dict(Counter(self.names))

    @property
    def seconds_per_type(self) -> dict[str, float]:
        """Most expensive first."""
        totals: dict[str, float] = {}
        for name, seconds in zip(self.names, self.seconds_per_node, strict=True):
            totals[name] = totals.get(name, 0.0) + seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


class Executor:
    """Runs one graph for many callers: a frame for each run in flight, and weights that can be swapped at any time.

    `constants` are the graph's floats. Random numbers follow `torch.manual_seed`. If the graph writes a weight, as a
    batch norm in training does, runs take turns, unless each has a `RequestState`. Raises `InputError` for weights
    that do not fit.
    """

    def __init__(
        self,
        graph: Graph,
        signature: GraphSignature,
        weights: Mapping[str, torch.Tensor],
        constants: Sequence[float] = (),
        config: ExecutorConfig | None = None,
    ) -> None:
        self.graph = graph
        self._device = graph.device  # read at each request
        self.graph_signature = signature
        self.config = config or ExecutorConfig()
        self.constants = tuple(constants)
        self._expected = {name: graph.inputs[place] for name, place in signature.weights}
        self._user_values = [
            (name, None if place is None else graph.inputs[place]) for name, place in signature.user_inputs
        ]
        places = {value: place for place, (_, value) in enumerate(self._user_values)}
        self._used = [(places[value], value.meta) for value in graph.inputs if value in places]
        # a graph does not use what its function only asks for its shape, and one over nothing uses no input
        self._unused = [
            (place, signature.examples[place]) for place, (_, value) in enumerate(self._user_values) if value is None
        ]
        self._arguments = None if signature.in_spec is None else ArgumentTree(signature.in_spec)
        self._returns_one_tensor = signature.out_spec is not None and signature.out_spec.is_leaf()
        self._written = {graph.inputs[place] for place in graph.mutated_inputs()}
        self._writes_arguments = not self._written.isdisjoint(places)
        self._folder = self._split_constants()
        self.layout: LayoutPlan | None = None
        self._kernels = self._make_kernels(self._folder.remaining)
        self._graph_executor = self._make_graph_executor(self._kernels)
        self._whole = whole_region(self._kernels)
        self._frames = FramePool(
            functools.partial(_new_frame, self.layout), self.config.max_frame_age, self.config.clock
        )
        self._turn: AbstractContextManager[Any] = threading.RLock() if self._written_weights() else _NO_TURN
        self._current = CurrentWeights(self._check_weights(weights))
        self._state_slots = self._find_state_slots()
        self._held: list[list[torch.Tensor]] = []
        self._caller, self._num_to_hold = threading.get_ident(), 0

    def _split_constants(self) -> ConstantFolder:
        is_compiled = self.config.policy is not None
        return split_constants(self.graph, self._expected.values(), self.constants, leaves_views=is_compiled)

    def _written_weights(self) -> set[str]:
        return {name for name, value in self._expected.items() if value in self._written}

    def _find_state_slots(self) -> list[tuple[str, int]]:
        """The names of the tensors that a `RequestState` has, as far as the graph uses them, and their slots."""
        return [(name, self._expected[name].number) for name in sorted(self._written_weights())]

    def _make_kernels(self, graph: Graph) -> KernelGraph:
        policy, report, families = self.config.policy, self.config.report, self.config.families
        if policy is None:
            self.layout = plan_layout(graph)
            return make_kernels(self.layout.graph)
        refused = {node for node, _ in unsound_writes(graph)} if not runs_module_as_is(policy.backend) else set()
        parts = [
            DelegateKernel(part, self.constants, policy, report, families) if isinstance(part, Graph) else part
            for part in partition(graph, lambda node: node not in refused and self.config.supported(node))
        ]
        return make_kernels(graph, parts)

    def _make_graph_executor(self, kernels: KernelGraph) -> GraphExecutor:
        if self.config.num_threads > 1:
            return ParallelGraphExecutor(kernels.graph, kernels, num_threads=self.config.num_threads)
        return SerialGraphExecutor(kernels.graph, kernels)

    # ----- weights

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The current weights, as they were given."""
        return self._current.weights.tensors

    def process_weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """Check weights and compute everything that depends only on them. Raises `InputError`."""
        return self._check_weights(tensors)

    def _check_weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        return process_weights(tensors, self._expected, self._written, self._folder, self._kernels.template)

    def swap_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use other weights from the next run on. See Note [Weights are swapped whole]. Raises `InputError`."""
        self._current.weights = self.process_weights(tensors)

    def state(self) -> RequestState:
        """Copies of the weights that runs write, as they are now, for a sequence of runs of their own.

        See Note [States of requests]. Raises `InputError` if runs write no weight.
        """
        if not self._state_slots:
            raise InputError(
                "there is no state: a call writes no tensor but its arguments\n"
                "  let it write to buffers in place, as in self.keys.index_copy_(2, position, keys)"
            )
        with self._turn, torch.no_grad():
            copies = {
                name: empty_of(self._expected[name].meta, self.graph.device).copy_(self.weights[name])
                for name, _ in self._state_slots
            }
        return RequestState(copies, self._current)

    # ----- calls

    def execute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once on the user inputs, in the signature's order. Returns the graph's outputs.

        Raises `InputError`, or what a kernel raises (`NodeError`, `PlanError`).
        """
        return self._executor_for(inputs)._run(inputs)

    def _executor_for(self, inputs: Sequence[torch.Tensor]) -> Executor:
        """What runs on `inputs`, which may fit nothing: that is checked before the run."""
        return self

    def _run(
        self,
        inputs: Sequence[torch.Tensor],
        state: RequestState | None = None,
        conforming: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """`conforming`: what `_conforming` says of `inputs`, if it was asked and they conform."""
        arguments = conforming or self._conforming(inputs) or self._checked(inputs)
        own = self._in_slots(state)
        if self._state_slots:
            self._require_apart(arguments, self.weights if state is None else state.tensors)
        turn = self._turn if state is None else state
        if turn is _NO_TURN:  # to enter and leave it is a hundredth of a small request
            return self._run_in_turn(arguments, own)
        with turn:
            return self._run_in_turn(arguments, own)

    def _run_in_turn(
        self, arguments: list[torch.Tensor], own: Sequence[tuple[int, torch.Tensor]]
    ) -> list[torch.Tensor]:
        if self._whole is not None:
            return self._whole.run_whole(self._template(), arguments, own, self._seeds())
        with self._frames.frame() as frame:
            self._fill(frame, arguments)
            for slot, tensor in own:
                frame.values[slot] = tensor
            return self._graph_executor.execute_with_prefilled_frame(frame)

    def _in_slots(self, state: RequestState | None) -> list[tuple[int, torch.Tensor]]:
        """The tensors of a state that take the places of weights in a run."""
        if state is None:
            return []
        if not isinstance(state, RequestState) or state.current is not self._current:
            raise InputError(
                f"expected a state of this served function, got another {type(state).__name__}\n"
                "  take one from its state()"
            )
        tensors = state.tensors
        return [(slot, tensors[name]) for name, slot in self._state_slots]

    def execute_tree(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: RequestState | None = None) -> Any:
        """Run once on arguments that are trees of tensors, as `in_spec` describes them; returns a tree of `out_spec`.

        Keywords may come in any order. Writes to `state` instead of to weights. Raises what `execute` raises.
        """
        if self._arguments is None:
            raise InputError("the signature has no in_spec to flatten arguments by\n  call execute(inputs)")
        inputs = self._arguments.leaves(args, kwargs)
        conforming = self._conforming(inputs)  # inputs that lie as the example's have its shapes
        executor = self if conforming else self._executor_for(inputs)
        outputs = executor._run(inputs, state, conforming)
        if self._device.type == "cpu":  # elsewhere the next launch of a graph copies what is held
            self._hold(outputs)
        if executor._returns_one_tensor:
            return outputs[0]
        spec = executor.graph_signature.out_spec
        return outputs if spec is None else trees.tree_unflatten(outputs, spec)

    def _hold(self, answer: list[torch.Tensor]) -> None:
        """See Note [Answers are dropped together]."""
        caller = threading.get_ident()
        if caller != self._caller:
            self._caller, self._num_to_hold = caller, _ALONE
        if self._num_to_hold <= 0:
            return
        self._num_to_hold -= 1
        if sum([one.untyped_storage().nbytes() for one in answer]) <= _MAX_BYTES:
            held = self._held
            held.append(answer)
            if len(held) >= _MAX_HELD:
                self._held = []  # the others are dropped on return

    def validate_inputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs that the graph uses, laid out for it. Raises `InputError` for the first that does not fit."""
        return self._executor_for(inputs)._checked(inputs)

    def _conforming(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """As `_checked`, of inputs that need no copy, in a fifth of its time; None if some may."""
        if len(inputs) != len(self._user_values) or self._writes_arguments:
            return None
        used: list[torch.Tensor] = []
        device = self._device
        try:
            for place, meta in self._used:
                given = inputs[place]
                if not lies_as(given, meta, device):
                    return None
                used.append(given)
            if self._unused and not all(lies_as(inputs[place], meta, device) for place, meta in self._unused):
                return None
        except RuntimeError:  # some kinds of tensors have no strides, some no shape
            return None
        return used

    def _checked(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(inputs) != len(self._user_values):
            names = ", ".join(name for name, _ in self._user_values)
            raise InputError(f"expected {len(self._user_values)} inputs ({names}), got {len(inputs)}")
        for place, meta in self._unused:
            check_kind(f"input {self._user_values[place][0]!r}", inputs[place], meta, self.graph.device)
        used: dict[Value, torch.Tensor] = {}
        for (name, value), given in zip(self._user_values, inputs, strict=True):
            if value is not None:
                used[value] = check_tensor(
                    f"input {name!r}", given, value.meta, self.graph.device, value in self._written
                )
                if value in self._written:
                    self._require_own_memory(name, given, inputs)
        return [used[value] for value in self.graph.inputs if value in used]

    def _require_own_memory(self, name: str, given: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse a written input that shares memory with another tensor. See Note [Inputs own their storage]."""
        storages = storages_of([given])
        others = [*inputs, *self.weights.values()]
        if sum(not storages.isdisjoint(storages_of([other])) for other in others) > 1:
            raise InputError(f"input {name!r} is written and shares its memory with another input or a weight")

    def _require_apart(self, arguments: Sequence[torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
        """Refuse an input that shares memory with a weight that runs write. See Note [Inputs own their storage]."""
        storages = storages_of([written[name] for name, _ in self._state_slots])
        for (place, _), argument in zip(self._used, arguments, strict=True):
            if not storages.isdisjoint(storages_of([argument])):
                raise InputError(
                    f"input {self._user_values[place][0]!r} shares its memory with a tensor that requests write\n"
                    "  give a clone() of it"
                )

    def _fill(self, frame: ExecutionFrame, arguments: Sequence[torch.Tensor]) -> None:
        frame.fill(self._template(), arguments, self.constants, self._seeds())

    def _seeds(self) -> list[int]:
        num_seeds = self.graph.num_seeds
        return [draw_seed() for _ in range(num_seeds)] if num_seeds else []

    def _template(self) -> FrameTemplate:
        """A frame's contents before a run, with the current weights."""
        return self._current.weights.template

    # ----- inspection

    @property
    def num_execution_frames(self) -> int:
        """Frames of runs in flight, and frames kept for later runs."""
        return self._frames.num_frames

    def clear_stale_execution_frames(self) -> None:
        """Drop frames that were unused for `max_frame_age` seconds. Every run does this, too."""
        self._frames.clear_stale()

    @property
    def kernel_schemas(self) -> dict[str, torch.FunctionSchema]:
        """The schema of every operator that runs, including those in compiled regions."""
        nodes = [node for kernel in self._kernels.kernels for node in kernel.nodes]
        return {node.op.name(): function_schema(node.op) for node in nodes}

    @property
    def delegates(self) -> list[DelegateKernel]:
        """The compiled regions."""
        return [kernel for kernel in self._kernels.kernels if isinstance(kernel, DelegateKernel)]

    def benchmark_nodes(self, inputs: Sequence[torch.Tensor], warmup: int, runs: int) -> ProfileMetrics:
        """Time each kernel on its own, one after another, over `runs` runs. Writes neither inputs nor weights."""
        return self._executor_for(inputs)._benchmark(inputs, warmup, runs)

    def _benchmark(self, inputs: Sequence[torch.Tensor], warmup: int, runs: int) -> ProfileMetrics:
        arguments = self._checked(inputs)
        seconds = [0.0] * len(self._kernels.kernels)
        with self._frames.frame() as frame:
            for _ in range(warmup):
                self._time_kernels(frame, arguments, seconds.copy())
            peaks = [self._time_kernels(frame, arguments, seconds) for _ in range(runs)]
        names = tuple(map(_name, self._kernels.kernels))
        return ProfileMetrics(tuple(total / runs for total in seconds), names, max(peaks))

    def _time_kernels(self, frame: ExecutionFrame, arguments: Sequence[torch.Tensor], seconds: list[float]) -> int:
        """Run once, add each kernel's seconds to `seconds`, and return the peak memory in bytes."""
        kernels, values = self._kernels, frame.values
        self._fill(frame, arguments)
        for written in self._written:
            values[written.number] = values[written.number].clone()
        buffers = [buffer for _, buffer in frame.buffers]
        meter = MemoryMeter(foreign=storages_of(values) - storages_of(buffers))
        for place, buffer in enumerate(buffers):
            meter.hold(-1 - place, buffer)  # not a slot's number: the buffer is held throughout
        dying = last_uses(kernels.kernels, kernels.graph.outputs)
        with GraphTask(kernels, self._graph_executor.exec_info, frame).taken_over():
            for place, kernel in enumerate(kernels.kernels):
                start = time.perf_counter()
                kernel.compute(frame)
                backing_of(self.graph.device).synchronize(self.graph.device)
                seconds[place] += time.perf_counter() - start
                for value in kernel.outputs:
                    if value is not None:
                        meter.hold(value.number, values[value.number])
                for value in dying[place]:
                    meter.release(value.number)
                    values[value.number] = None
        return meter.peak


def _new_frame(layout: LayoutPlan | None) -> ExecutionFrame:
    # no method: the pool would keep its executor alive until the garbage collector runs
    return ExecutionFrame(layout.new_buffers() if layout else ())


def _name(kernel: Kernel) -> str:
    return "delegate" if isinstance(kernel, DelegateKernel) else kernel.nodes[0].name
