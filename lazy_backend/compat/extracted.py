"""A graph extracted from the trace, to run on other inputs.

In: lazy tensors whose values are recorded. Out: `ExtractedGraph`, which computes such tensors from real inputs.
The graph hashes and cached graphs of `torch._lazy.computation` are built on it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazy_backend.computation import check_lazy
from lazy_backend.errors import LazyBackendError
from lazy_backend.execution import inspection
from lazy_backend.execution.computations import current_environment
from lazy_backend.execution.run import conform
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import Graph, TensorMeta, meta_of
from lazy_backend.lowering.plans.cached_computation import make_key
from lazy_backend.lowering.serving.executor import Executor, GraphSignature
from lazy_backend.lowering.serving.weights import InputError, check_tensor
from lazy_backend.serve import make_executor
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, ViewData
from lazy_backend.tensors.tensor import LazyTensor, backing_tensor
from lazy_backend.tensors.thread_state import run_clean


@dataclass(frozen=True, slots=True)
class Leaf:
    """One requested tensor: output or input `place` of the graph, or a view of that output or input."""

    is_output: bool
    place: int
    base: TensorMeta
    meta: TensorMeta


@dataclass(frozen=True, eq=False)
class ExtractedGraph:
    """A graph, the floats that it was recorded with, and the outputs and inputs that were requested.

    Inputs beyond the graph's own are requested tensors that already had their values.
    """

    context: DeviceContext
    graph: Graph
    constants: tuple[float, ...]
    leaves: tuple[Leaf, ...]  # one per distinct tensor
    inputs: tuple[TensorMeta, ...]

    def hash(self) -> bytes:
        """16 bytes, equal for equal programs with equal floats."""
        key = make_key(self.graph, current_environment()).hash_hex()
        parts = (key, [value.hex() for value in self.constants], self.leaves, self.inputs)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

    @functools.cached_property
    def executor(self) -> Executor:
        names = tuple((f"input {place}", place) for place in range(len(self.graph.inputs)))
        examples = tuple(value.meta for value in self.graph.inputs)
        signature = GraphSignature(weights=(), user_inputs=names, examples=examples)
        return make_executor(self.graph, signature, self.constants)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the recorded program on real `inputs` and return the requested tensors.

        Inputs that the program updates in place are updated. Raises `InputError` for inputs of another number, shape,
        dtype or device.
        """
        if len(inputs) != len(self.inputs):
            raise InputError(f"the graph has {len(self.inputs)} inputs, got {len(inputs)}")
        # an input with another memory layout than when the graph was recorded is copied
        laid = [
            check_tensor(f"input {place}", tensor, meta, self.graph.device, written=False)
            for place, (tensor, meta) in enumerate(zip(inputs, self.inputs, strict=True))
        ]
        outputs = self.executor.execute(laid[: len(self.graph.inputs)])
        return run_clean(self._results, inputs, laid, outputs)

    def _results(
        self, inputs: Sequence[torch.Tensor], laid: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        for place in self.graph.mutated_inputs():
            if meta_of(inputs[place]) is not self.inputs[place]:
                inputs[place].copy_(laid[place])
        return [self._tensor_of(leaf, inputs, laid, outputs) for leaf in self.leaves]

    def _tensor_of(
        self,
        leaf: Leaf,
        inputs: Sequence[torch.Tensor],
        laid: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        if leaf.meta is leaf.base and not leaf.is_output:
            return inputs[leaf.place]
        tensor = conform(outputs[leaf.place], leaf.base) if leaf.is_output else laid[leaf.place]
        if leaf.meta is leaf.base:
            return tensor
        storage = LazyStorage(self.context, None, None, leaf.base)
        storage.tensor = tensor
        return backing_tensor(ViewData(self.context, None, None, leaf.meta, storage))


def extract(tensors: Sequence[torch.Tensor]) -> tuple[ExtractedGraph, list[TensorData]]:
    """The graph that computes `tensors`, which stay pending, and the data that are its current inputs."""
    lazy = list({id(tensor): tensor for tensor in check_lazy(tensors)}.values())
    if not lazy:
        raise ValueError("expected at least one lazy tensor")
    context = lazy[0]._data.context
    with context.lock:
        data = inspection.post_order_of(lazy)
        trace = context.trace
        if rng.has_own_generators([trace.seeds[place] for place in data.seeds]):
            raise LazyBackendError(
                "a graph that draws random numbers from a torch.Generator cannot be extracted\n"
                "  let it draw from torch's default generator"
            )
        sources = [_entered(trace.inputs[parameter.index], parameter.base) for parameter in data.parameters]
        storages = {tensor._data.storage for tensor in lazy}
        made = [storage for storage in trace.live()[1] if storage in storages]
        leaves = tuple(_leaf(tensor, made, sources) for tensor in lazy)
        constants = tuple(trace.constants[place] for place in data.constants)
    metas = tuple(source.meta for source in sources)
    return ExtractedGraph(context, data.graph, constants, leaves, metas), sources


def _entered(data: TensorData, base: bool) -> TensorData:
    return data.storage if base else data


def _leaf(tensor: LazyTensor, made: Sequence[LazyStorage], sources: list[TensorData]) -> Leaf:
    """Where the value of `tensor` will be. A tensor that has its value and is no input of the graph joins `sources`."""
    data = tensor._data
    storage = data.storage
    if storage in made:
        return Leaf(True, made.index(storage), storage.meta, data.meta)
    if data in sources:
        return Leaf(False, sources.index(data), data.meta, data.meta)
    if storage in sources:
        return Leaf(False, sources.index(storage), storage.meta, data.meta)
    if any(source.storage is storage for source in sources):
        raise LazyBackendError(
            f"a view {data.meta} of a tensor that the graph uses as another view cannot be extracted\n"
            "  return a copy of it, as in view.clone()"
        )
    sources.append(data)
    return Leaf(False, len(sources) - 1, data.meta, data.meta)


def copies_of(sources: Sequence[TensorData]) -> list[torch.Tensor]:
    """Real tensors with the values of `sources` before the trace. Waits for the run under way, but cuts no graph."""
    for context in dict.fromkeys(source.context for source in sources):
        executor.barrier(context)
    return run_clean(lambda: [backing_tensor(source).clone() for source in sources])
