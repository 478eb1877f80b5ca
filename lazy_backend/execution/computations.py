"""From a path to its computation: canonical graphs, their cache, and how to compile them now.

Method names follow torch/csrc/lazy/core/lazy_graph_executor.h, in snake_case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any

from lazy_backend import metrics
from lazy_backend.cache.computation_cache import BoundedTable, ComputationCache
from lazy_backend.cache.trie import TrieNode
from lazy_backend.execution.bindings import FirstRun, Indices, bindings_of
from lazy_backend.execution.disk_cache import artefact_store, expects_hits
from lazy_backend.execution.run import SyncTensorCollection
from lazy_backend.lowering.artefacts.environment import Environment, environment, switches
from lazy_backend.lowering.compilation.request import Backend
from lazy_backend.lowering.ir.canonical import PostOrderData, fresh_slots, run_post_order
from lazy_backend.lowering.ir.graph import Graph, check_graph
from lazy_backend.lowering.ir.program import Call, Cut, Token
from lazy_backend.lowering.ir.shapes import skeleton
from lazy_backend.lowering.plans.cached_computation import CachedComputation, Computation, make_key
from lazy_backend.lowering.plans.families import Family, Form
from lazy_backend.lowering.plans.overlapping import overlap_collectives
from lazy_backend.lowering.plans.policy import ArtefactStore, CompilePolicy, FusionStrategy
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import compile_backend
from lazy_backend.tensors.state import DeviceContext


# cached, as every sync asks and settings hardly ever change: 0.5 µs instead of 2
@functools.lru_cache(maxsize=1)
def _policy(
    backend: Backend,
    compile: str,
    num_profiled_runs: int,
    compile_after_operators: int,
    max_specializations: int,
    max_compiled_nodes: int,
    store: ArtefactStore | None,
    expects_hits: bool,
    max_static_shapes: int,
    max_dynamic_shapes: int,
    max_symbols: int,
    release_delay_seconds: float | None,
    compiler_idle_seconds: float | None,
    compile_blocks_once: bool,
    compile_whole_after_seconds: float | None,
    verify_compiled: str,
) -> CompilePolicy:
    """The settings that say how to compile, as the layers below take them."""
    return CompilePolicy(
        backend=backend,
        enabled=compile != "off",
        num_profiled_runs=num_profiled_runs,
        compile_after_operators=compile_after_operators,
        max_specializations=max_specializations,
        max_compiled_nodes=max_compiled_nodes,
        background=compile == "background",
        store=store,
        expects_hits=expects_hits,
        strategy=FusionStrategy(max_static_shapes, max_dynamic_shapes, max_symbols),
        release_delay=math.inf if release_delay_seconds is None else release_delay_seconds,
        compiler_idle=math.inf if compiler_idle_seconds is None else compiler_idle_seconds,
        shares_blocks=compile_blocks_once,
        whole_after=math.inf if compile_whole_after_seconds is None else compile_whole_after_seconds,
        verify=verify_compiled,
    )


def compile_policy() -> CompilePolicy:
    """How to compile under the current settings."""
    return _policy(
        compile_backend(),
        config.compile,
        config.num_profiled_runs,
        config.compile_after_operators,
        config.max_specializations,
        config.max_compiled_nodes,
        artefact_store(),
        expects_hits(),
        config.max_static_shapes,
        config.max_dynamic_shapes,
        config.max_symbols,
        config.release_delay_seconds,
        config.compiler_idle_seconds,
        config.compile_blocks_once,
        config.compile_whole_after_seconds,
        config.verify_compiled,
    )


def current_environment() -> Environment:
    """Everything that a key depends on besides the graph, as of now."""
    return environment(compile_backend() if config.compile != "off" else None)


def current_settings() -> tuple[Any, ...]:
    """Everything that a recorded call depends on besides its arguments and the user's objects, as of now."""
    return (compile_backend() if config.compile != "off" else None, *switches())


def _cache_size() -> int:
    return int(config.computation_cache_size)


class Computations:
    """The computations of all devices. `report` is called with the report of each compile."""

    def __init__(self, report: Callable[[CompileReport], None]) -> None:
        self.cache: ComputationCache[Computation] = ComputationCache(_cache_size)
        self._families: BoundedTable[Hashable, Family] = BoundedTable(_cache_size)
        self._forms: BoundedTable[int, Form] = BoundedTable(_cache_size)
        self._report = report

    def clear(self) -> None:
        """Forget every computation, and the families of those that differ only in shapes."""
        self.cache.clear()
        self._families.clear()
        self._forms.clear()

    def note_path(self, cursor: TrieNode[Call | Cut]) -> None:
        """Count a path before it is bound, if it never was. See Note [Programs of many shapes]."""
        if not bindings_of(cursor):
            self._form_of(cursor).num_paths += 1

    def _form_of(self, cursor: TrieNode[Call | Cut]) -> Form:
        # a hash: two programs that share one would only be compiled in another order
        return self._forms.get_or_add(hash(tuple([id(getattr(call, "op", None)) for call in cursor.path()])), Form)

    def describe(self) -> list[dict[str, Any]]:
        """The cached computations for a report: name, size and what `get_debug_state` shows. Rebuilds no graph."""
        return [
            {
                "graph": f"#{computation.number}",
                "hash": computation.hash,
                "nodes": computation.executor.stored.num_nodes,
                "inputs": computation.executor.stored.num_inputs,
                "outputs": computation.executor.stored.num_outputs,
                **asdict(computation.executor.get_debug_state()),
            }
            for computation in self.cache
        ]

    def collect_roots(self, calls: Sequence[Call], indices: Sequence[int]) -> list[Token]:
        """What a graph must compute: the values behind the pending storages at `indices`."""
        fresh = fresh_slots(calls)
        return [fresh[index].token for index in indices]

    def run_post_order(
        self, context: DeviceContext, indices: Sequence[int], cursor: TrieNode[Call | Cut] | None = None
    ) -> PostOrderData:
        """The canonical graph of what is recorded on `context`, or up to `cursor`, with the outputs `indices`."""
        cursor = context.trace.cursor if cursor is None else cursor
        calls = [call for call in cursor.path() if isinstance(call, Call)]
        data = run_post_order(calls, self.collect_roots(calls, indices), context.backing)
        if config.check_graphs:
            check_graph(data.graph)
        return data

    def lookup_cached_compile(self, data: PostOrderData, settings: Environment) -> Computation:
        """The computation of this graph, made if it is new."""
        graph = overlap_collectives(data.graph) if config.overlap_collectives else data.graph
        key = make_key(graph, settings)
        found = self.cache.get(key)
        if found is not None:
            return found
        aliased = len(graph.mutated_inputs())
        metrics.observe_together({}, TensorsGraphSize=len(graph.nodes), InputOutputAliasCount=aliased)
        find_family = functools.partial(self._find_family, settings)
        return self.cache.add(key, Computation(key, graph, self._report, find_family))

    def _find_family(self, settings: Environment, graph: Graph) -> Family:
        return self._families.get_or_add((skeleton(graph), settings), lambda: Family(self._report))

    def try_run_cached_sync(self, collection: SyncTensorCollection, settings: Environment) -> CachedComputation | None:
        """The computation that this path was bound to before with the same live set and settings, if any."""
        return bindings_of(collection.cursor).computation(collection.indices, settings)

    def compile(self, collection: SyncTensorCollection, settings: Environment) -> CachedComputation:
        """Bind a path that is new with this live set to a computation. See Note [Live sets that differ]."""
        bindings, wanted = bindings_of(collection.cursor), collection.indices
        covering = bindings.covering(wanted, settings)
        bound = None if covering is None else bindings.computation(covering, settings)
        if covering is None or bound is None:
            covering = bindings.widen(wanted, settings)
            first = bindings.first_run(wanted, settings)  # None if `widen` forgot it
            bound = self._bind_new(collection, covering, settings, first)
        else:
            metrics.increment("CachedCompile")
        if covering != wanted:
            places = {index: place for place, index in enumerate(wanted)}
            bound = replace(bound, outputs=tuple(places.get(index, -1) for index in covering))
            bindings.bind(wanted, settings, bound)
        return bound

    def _bind_new(
        self, collection: SyncTensorCollection, indices: Indices, settings: Environment, first: FirstRun | None
    ) -> CachedComputation:
        """Make or find the computation with the outputs `indices`, some of which the collection wants now."""
        data = self.run_post_order(collection.context, indices, collection.cursor)
        computation = self.lookup_cached_compile(data, settings)
        bound = CachedComputation(computation, data.parameters, data.constants, data.seeds)
        if first is None:
            self.note_path(collection.cursor)
        else:
            computation.executor.note_run([first.constants[i] for i in bound.constants])
        computation.executor.form = self._form_of(collection.cursor)
        is_known = first is not None or computation.executor.runs > 0
        collection.is_new = not is_known
        metrics.increment("CachedCompile" if is_known else "UncachedCompile")
        bindings_of(collection.cursor).bind(indices, settings, bound)
        return bound
