"""Serve a function or module to many threads.

In: a function of tensors and example inputs. Out: `Served`, an executor of the graphs that the function records: one
here, for the example inputs, and one for each further size of inputs, at its first request. Otherwise a call runs its
graph on real tensors, on the backing device, and touches neither the lazy device nor its trace, so calls from different
threads run concurrently. See Note [Weights are swapped whole] and Note [Shapes of requests].
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.archives import served_file
from lazy_backend.archives.served_file import SavedFunction, SavedGraph
from lazy_backend.cache.computation_cache import Key
from lazy_backend.errors import TooManyRequestsError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import reads
from lazy_backend.execution.computations import compile_policy
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.graph import Graph, meta_of
from lazy_backend.lowering.serving.executor import Executor, ExecutorConfig, GraphSignature
from lazy_backend.lowering.serving.many_shapes import ManyShapesExecutor, NotShareable, ShapeExecutor, Shapes
from lazy_backend.lowering.serving.regions import DelegateKernel, Families
from lazy_backend.lowering.serving.request_state import RequestState
from lazy_backend.lowering.serving.weights import InputError, Weights, check_tensor
from lazy_backend.servable import LoadedFunction, RecordedRequest, Servable
from lazy_backend.settings import config
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean


class Served(ManyShapesExecutor):
    """The result of `serve`. Call it like the function, with tensors on the backing device, from any thread."""

    def __init__(
        self,
        servable: Servable | LoadedFunction,
        recorded: RecordedRequest,
        spare: Mapping[str, torch.Tensor],
        how: ExecutorConfig,
        max_requests: int | None = None,
    ) -> None:
        self._servable = servable
        self._max_requests = max_requests
        # the requests under way and those that are about to be refused, in order; each change is one call of C, so that
        # an interruption leaves no place taken
        self._under_way: dict[object, None] = {}
        known = servable.state_names or frozenset()
        # names in the `state_dict` that no shape uses; names of weights that are not in the `state_dict`
        self.unused_names = known - recorded.weights.keys() - spare.keys()
        self.fixed_names = frozenset(recorded.weights.keys() - known)
        super().__init__(recorded.graph, recorded.signature, recorded.weights, recorded.constants, how, spare)

    @hide_internals
    def __call__(self, *args: Any, state: RequestState | None = None, **kwargs: Any) -> Any:
        """Run one request. Raises `InputError` for arguments that do not match the example inputs, sizes aside.

        `state`: of `state()`; takes the place of the weights that requests write. See Note [States of requests].
        Raises `TooManyRequestsError` at once, if there are `max_requests` under way.
        """
        if self._max_requests is None:
            return self.execute_tree(args, kwargs, state)
        own, under_way = object(), self._under_way
        try:
            under_way[own] = None
            if len(under_way) > self._max_requests and own not in list(under_way)[: self._max_requests]:
                metrics.increment("ServedRefused")
                raise TooManyRequestsError(
                    f"{self._max_requests} requests to {self._servable.name} are under way, as many as are allowed\n"
                    f"  at {user_site()}\n  ask again later, or serve with a larger max_requests"
                )
            answer = self.execute_tree(args, kwargs, state)
        finally:
            under_way.pop(own, None)
        return answer

    async def call(self, *args: Any, state: RequestState | None = None, **kwargs: Any) -> Any:
        """As a call, on a thread of the event loop's default executor. Cancelled before it begins, it never does."""
        return await asyncio.to_thread(self, *args, state=state, **kwargs)

    @hide_internals
    def state(self) -> RequestState:
        """Copies of the tensors that requests write, as they are now, for one sequence of requests.

        `served(x, state=state)` writes to them instead. A decoder keeps its keys and values there, in a state for each
        text. Requests with states of their own run at the same time. Raises `InputError` if requests write no tensor of
        the module or function.
        """
        return run_clean(super().state)

    @hide_internals
    def process_weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """Copies of `tensors` on the backing device, checked and folded. Lazy tensors are computed first.

        Takes a whole `state_dict`. Weights that are in no `state_dict` (non-persistent buffers, tensors of no module)
        keep their values. Raises `InputError` for names, shapes or dtypes that do not match.
        """
        chosen = {name: self.weights[name] for name in self.fixed_names}
        chosen.update((name, tensor) for name, tensor in tensors.items() if name not in self.unused_names)
        return super().process_weights({name: _copy(tensor, self.graph.device) for name, tensor in chosen.items()})

    @hide_internals
    def save(self, path: str | os.PathLike[str], weights: bool = True) -> None:
        """Write what is served to one file, which `load_served` serves in a process without the module.

        The file has the graphs of all shapes that are kept, their compiled plans, which this compiles where there are
        none yet, and the weights as they are now. Not `weights`: without those of the `state_dict`. Raises `CacheError`
        for what cannot be written as text, such as a container of a class that PyTorch does not know, and OSError.
        """
        run_clean(self._save, path, weights)

    def _save(self, path: str | os.PathLike[str], weights: bool) -> None:
        names = self._servable.state_names or frozenset()

        def kept(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: one if weights or name not in names else one.to("meta") for name, one in tensors.items()}

        recordings = self.recordings()
        plans = _plans_of([executor for _, executor, _ in recordings])
        kinds = [meta.dtype for meta in self.graph_signature.examples]
        graphs = [
            SavedGraph(one.graph, one.graph_signature, one.constants, list(map(_without_memory, shapes, kinds)), own)
            for shapes, one, own in recordings
        ]
        with self._turn:  # no request writes weights meanwhile
            current = self._current.weights
            function = SavedFunction(self._servable.name, names, graphs, kept(current.tensors), kept(current.spare))
            served_file.write(path, function, plans)

    def record_shapes(self, shapes: Shapes, inputs: Sequence[torch.Tensor]) -> ShapeExecutor:
        """Have the module recorded for these shapes. See Note [Recorded again]."""
        weights = self._current.weights

        def add(recorded: RecordedRequest) -> ShapeExecutor:
            parts = recorded.graph, recorded.signature, recorded.weights, recorded.constants
            try:
                made, dropped = run_clean(self.add_shapes, shapes, *parts)
            except NotShareable as reason:
                raise InputError(f"{self._servable.describe(inputs)} cannot be served: {reason}") from None
            metrics.increment("ServedShape")
            if dropped:
                metrics.increment("ServedShapeDropped", dropped)
            return made

        return self._servable.record_again(
            inputs,
            {**weights.tensors, **weights.spare},
            add,
            lambda: self.kept_executor(shapes),
        )


@hide_internals
def serve(
    module_or_fn: Callable[..., Any], example_inputs: Any, *, num_threads: int = 1, max_requests: int | None = None
) -> Served:
    """Make `module_or_fn` callable from many threads, with weights that can be swapped while requests run.

    `example_inputs`: the arguments of a call, as a tuple of (trees of) tensors, or one tensor. Requests have the same
    dtypes and numbers of dimensions; their sizes may differ. A module on the CPU is copied to the lazy device for
    recording. Its training mode is kept, so call `module.eval()` first. Weights have the names of the module's
    `state_dict`; any other tensor that the function uses is fixed. `num_threads`: threads that work on one request.
    `max_requests`: how many may be under way at once; any number by default. The graph is compiled like the graphs of
    steps: by `config.backend` in the background, while requests are interpreted (`wait_for_compiles` waits), unless the
    disk cache has it from an earlier process, or `config.compile` says otherwise.

    The first request of a new size has the module recorded once more, as it was when `serve` was called, so branches on
    sizes are followed; sizes with the same operators share one compiled plan. `config.max_served_shapes` sizes are
    kept. A function that is no module is called again as it is then.

    The result takes and returns tensors on the backing device, as in `served(torch.randn(1, 8))`;
    `served.swap_weights(module.state_dict())` takes effect from the next request on. Modelled on
    `torch::nativert::Executor`. Raises `CaptureError`, with the line, for anything that cannot be recorded, such as a
    read.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    return make_served(module_or_fn, args, num_threads, config.max_served_shapes, max_requests)


def make_served(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_threads: int,
    max_shapes: int,
    max_requests: int | None = None,
) -> Served:
    """As `serve`, for at most so many shapes beside those of `args`."""
    _check_bounds(num_threads, max_requests)
    servable = Servable(function, again=max_shapes > 0)
    recorded = servable.record(args)
    how = executor_config(num_threads, max_shapes)
    return run_clean(Served, servable, recorded, servable.spare_weights(recorded.weights), how, max_requests)


@hide_internals
def load_served(
    path: str | os.PathLike[str],
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    num_threads: int = 1,
    max_requests: int | None = None,
) -> Served:
    """Serve from a file that `Served.save` wrote. The module's Python is not needed, and the plans are used at once.

    `weights`: a `state_dict` in place of the saved one; needed if the file has none. Requests have the shapes that were
    saved. Compiled plans get into the cache, as by `cache.load`; those that do not fit this PyTorch, Python, processor
    or these settings are left out with a `CacheWarning`, and their graphs are compiled as by `serve`. Plans are code:
    load only files from people whose code you would run. Raises `CacheError` if the file is damaged, or names operators
    or containers that this process does not know, and OSError.
    """
    return run_clean(_load_served, path, weights or {}, num_threads, max_requests)


def _load_served(
    path: str | os.PathLike[str], given: Mapping[str, torch.Tensor], num_threads: int, max_requests: int | None
) -> Served:
    _check_bounds(num_threads, max_requests)
    saved = served_file.read(path)
    first, *others = saved.graphs
    device = first.graph.device
    unknown = given.keys() - saved.state_names
    if unknown:
        raise InputError(f"weights do not fit: unexpected {sorted(unknown)}")

    def chosen(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        missing = sorted(name for name, one in tensors.items() if one.is_meta and name not in given)
        if missing:
            raise InputError(f"{path} was saved without weights: missing {missing}\n  pass weights=module.state_dict()")
        return {
            name: check_tensor(f"weight {name!r}", _copy(given[name], device), meta_of(one), device, False)
            if name in given
            else one
            for name, one in tensors.items()
        }

    recorded = RecordedRequest(first.graph, first.signature, chosen(saved.weights), first.constants)
    how = executor_config(num_threads, max(config.max_served_shapes, len(others)))
    served = Served(LoadedFunction(saved.name, saved.state_names), recorded, chosen(saved.spare), how, max_requests)
    for one in others:
        shapes = tuple(given.shape for given in one.inputs)
        served.add_shapes(shapes, one.graph, one.signature, one.own, one.constants)
    return served


def _check_bounds(num_threads: int, max_requests: int | None) -> None:
    """Raise `ValueError` for what is no whole number from one on."""
    if not _is_positive(num_threads):
        raise ValueError(f"num_threads is {num_threads!r}\n  pass a whole number of at least 1")
    if not (max_requests is None or _is_positive(max_requests)):
        raise ValueError(
            f"max_requests is {max_requests!r}\n  pass a whole number of at least 1, or None for any number of requests"
        )


def _is_positive(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    real = reads.read(tensor._data, "weights to serve") if isinstance(tensor, LazyTensor) else tensor
    # a copy, so that further training of the tensor does not change what is served
    return run_clean(lambda: real.detach().to(device, copy=True))


def _without_memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _plans_of(executors: Sequence[Executor]) -> dict[Key, bytes]:
    """The compiled plans of these executors, as those of `load_served` look for them; compiled where there are none."""
    policy, report = executors[0].config.policy, executors[0].config.report
    if policy is None:
        return {}
    store = served_file.CollectingStore(policy.store)
    policy, families = replace(policy, background=False, store=store), Families(report)
    for one in executors:
        for region in one.delegates:
            DelegateKernel(region.region, one.constants, policy, report, families)
    return store.plans


def make_executor(graph: Graph, signature: GraphSignature, constants: Sequence[float]) -> Executor:
    """An executor without weights, for inputs of one shape. It begins to compile its graph when it is made."""
    return run_clean(Executor, graph, signature, {}, constants, executor_config())


def executor_config(num_threads: int = 1, max_shapes: int = 0) -> ExecutorConfig:
    """How to run what is served. The settings of this moment hold for every run."""
    shares = num_threads == 1 < torch.get_num_threads() and not torch.are_deterministic_algorithms_enabled()
    return ExecutorConfig(
        num_threads=num_threads,
        policy=replace(compile_policy(), num_profiled_runs=0, shares_threads=shares)
        if config.compile != "off"
        else None,
        report=executor.compile_reports.report,
        families=Families(executor.compile_reports.report) if max_shapes else None,
        max_shapes=max_shapes,
    )
