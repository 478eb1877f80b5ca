"""Serve a function or module to many threads.

In: a function of tensors and example inputs. Out: `Served`, an `Executor` of the graph that the function records.
Recording happens once, here. A call then runs the graph on real tensors, on the backing device, and touches neither the
lazy device nor its trace, so calls from different threads run concurrently. See Note [Weights are swapped whole].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from lazy_backend.errors import CaptureError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import reads
from lazy_backend.execution.computations import compile_policy
from lazy_backend.execution.run import SyncTensorsConfig
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.serving.executor import Executor, ExecutorConfig, GraphSignature
from lazy_backend.lowering.serving.weights import Weights
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import context_of
from lazy_backend.tensors.state import DeviceContext, TensorData
from lazy_backend.tensors.tensor import LazyTensor, backing_tensor
from lazy_backend.tensors.thread_state import run_clean

E = TypeVar("E", bound=Executor)


class Served(Executor):
    """The result of `serve`. Call it like the function, with tensors on the backing device, from any thread."""

    # names in the `state_dict` that the graph does not use; names of weights in the graph but not in the `state_dict`
    unused_names: frozenset[str] = frozenset()
    fixed_names: frozenset[str] = frozenset()

    @hide_internals
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one request. Raises `InputError` for arguments that do not match the example inputs."""
        return self.execute_tree(args, kwargs)

    @hide_internals
    def process_weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """Copies of `tensors` on the backing device, checked and folded. Lazy tensors are computed first.

        Takes a whole `state_dict`. Weights that are in no `state_dict` (non-persistent buffers, tensors of no module)
        keep their values. Raises `InputError` for names, shapes or dtypes that do not match.
        """
        chosen = {name: self.weights[name] for name in self.fixed_names}
        chosen.update((name, tensor) for name, tensor in tensors.items() if name not in self.unused_names)
        return super().process_weights({name: self._copy(tensor) for name, tensor in chosen.items()})

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        real = reads.read(tensor._data, "weights to serve") if isinstance(tensor, LazyTensor) else tensor
        # a copy, so that further training of the tensor does not change what is served
        return run_clean(lambda: real.detach().to(self.graph.device, copy=True))


@hide_internals
def serve(module_or_fn: Callable[..., Any], example_inputs: Any, *, num_threads: int = 1) -> Served:
    """Make `module_or_fn` callable from many threads, with weights that can be swapped while requests run.

    `example_inputs`: the arguments of a call, as a tuple of (trees of) tensors, or one tensor; requests must have the
    same shapes and dtypes. A module on the CPU is copied to the lazy device for recording. Its training mode is kept,
    so call `module.eval()` first. Weights have the names of the module's `state_dict`; any other tensor that the
    function uses is fixed. `num_threads`: threads that work on one request. The graph is compiled like the graphs of
    steps: by `config.backend` in the background, while requests are interpreted (`wait_for_compiles` waits), unless the
    disk cache has it from an earlier process, or `config.compile` says otherwise.

    The result takes and returns tensors on the backing device, as in `served(torch.randn(1, 8))`;
    `served.swap_weights(module.state_dict())` takes effect from the next request on. Modelled on
    `torch::nativert::Executor`. Raises `CaptureError`, with the line, for anything that cannot be recorded, such as a
    read.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    function = _on_lazy_device(module_or_fn)
    recorded = _record(function, _names(function), args, getattr(module_or_fn, "__qualname__", repr(module_or_fn)))
    served = make_executor(
        Served, recorded.graph, recorded.signature, recorded.weights, recorded.constants, num_threads
    )
    known = function.state_dict().keys() if isinstance(function, torch.nn.Module) else set()
    served.unused_names = frozenset(known - recorded.weights.keys())
    served.fixed_names = frozenset(recorded.weights.keys() - known)
    return served


def make_executor(
    kind: type[E],
    graph: Graph,
    signature: GraphSignature,
    weights: Mapping[str, torch.Tensor],
    constants: Sequence[float],
    num_threads: int = 1,
) -> E:
    """An executor that begins to compile its graph when it is made. The settings of that moment hold for every run."""
    policy = replace(compile_policy(), num_profiled_runs=0) if config.compile != "off" else None
    made = ExecutorConfig(num_threads=num_threads, policy=policy, report=executor.compile_reports.report)
    return run_clean(kind, graph, signature, weights, constants, made)


def _on_lazy_device(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, torch.nn.Module) or all(isinstance(t, LazyTensor) for t in _tensors(function).values()):
        return function
    return copy.deepcopy(function).to("lazy")


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; a tensor with several names is listed under each."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def _names(function: Callable[..., Any]) -> dict[TensorData, str]:
    """The first name of each of a module's tensors."""
    named = _tensors(function) if isinstance(function, torch.nn.Module) else {}
    return {tensor._data: name for name, tensor in reversed(named.items()) if isinstance(tensor, LazyTensor)}


# ----- from a call to a graph and its signature


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    signature: GraphSignature
    weights: dict[str, torch.Tensor]
    constants: tuple[float, ...]


def _record(
    function: Callable[..., Any], names: Mapping[TensorData, str], args: tuple[Any, ...], name: str
) -> _Recorded:
    """Record one call of `function`. None of its operators runs, so the call has no effect."""
    leaves, in_spec = pytree.tree_flatten((args, {}))
    context = next(iter(names)).context if names else context_of(None)
    given = [_example(leaf, context.device) for leaf in leaves]

    def refuse(cause: str) -> CaptureError:
        return CaptureError(f"{cause} inside {name}, which is to be served\n  at {user_site()}\n  return the tensor")

    copied, _ = pytree.tree_unflatten(given, in_spec)

    def run() -> _Recorded:
        with torch.no_grad():
            outputs, out_spec = pytree.tree_flatten(function(*copied))
            made = [_own(output, name) for output in outputs]
            return _finish(context, names, given, made, in_spec, out_spec)

    with context.lock:
        executor.sync_tensors_graph_internal(context, SyncTensorsConfig(force_ltc_data=True), "serve")
        after = context.fresh_trace()
        recording = context.trace
        try:
            try:
                # deferring: the body's writes must not happen
                return executor.rules.call_deferring(executor.rules.call_refusing, refuse, run)
            finally:
                context.trace = after
        finally:
            # two `finally` blocks of plain stores, see Note [Interruption]: what was recorded must never run
            context.trace = after
            recording.changes += 1


def _example(leaf: Any, device: torch.device) -> LazyTensor:
    """A copy of an example input on the lazy device, with memory of its own."""
    if not isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"example inputs are tensors, got {type(leaf).__name__}\n  at {user_site()}\n"
            "  close over what is fixed, as in lambda x: module(x, 3)"
        )
    source = leaf.detach().cpu() if isinstance(leaf, LazyTensor) else leaf.detach()
    return source.to(device)  # type: ignore[return-value]


def _own(output: Any, name: str) -> LazyTensor:
    """A copy of a returned tensor, with memory of its own."""
    if not isinstance(output, LazyTensor):
        raise CaptureError(f"{name} returns a {type(output).__name__}, but only lazy tensors can be served")
    return output.clone()  # type: ignore[return-value]


def _clone_of(data: TensorData) -> torch.Tensor:
    return backing_tensor(data).clone()


def _finish(
    context: DeviceContext,
    names: Mapping[TensorData, str],
    given: Sequence[LazyTensor],
    made: Sequence[LazyTensor],
    in_spec: pytree.TreeSpec,
    out_spec: pytree.TreeSpec,
) -> _Recorded:
    """The recorded graph, and the role of each of its inputs."""
    trace = context.trace
    pending = {storage: place for place, storage in zip(*trace.live(), strict=True)}
    data = executor.computations.run_post_order(context, [pending[tensor._data.storage] for tensor in made])
    if rng.has_own_generators([trace.seeds[place] for place in data.seeds]):
        raise CaptureError(
            "what is to be served draws random numbers from a torch.Generator, which requests from many threads cannot "
            f"share\n  at {user_site()}\n  let it draw from torch's default generator"
        )
    examples = {tensor._data: place for place, tensor in enumerate(given)}
    user_places: dict[int, int] = {}
    weights: dict[str, torch.Tensor] = {}
    places: list[tuple[str, int]] = []
    for place, parameter in enumerate(data.parameters):
        source = trace.inputs[parameter.index]
        if source in examples:
            user_places[examples[source]] = place
            continue
        name = names.get(source, f"constant {len(places)}")
        if source in names and parameter.base and source is not source.storage:
            raise CaptureError(f"{name} shares its memory with other tensors, so it could not be swapped")
        weights[name] = run_clean(_clone_of, source.storage if parameter.base else source)
        places.append((name, place))
    return _Recorded(
        graph=data.graph,
        signature=GraphSignature(
            weights=tuple(places),
            user_inputs=tuple((f"input {place}", user_places.get(place)) for place in range(len(given))),
            in_spec=in_spec,
            out_spec=out_spec,
        ),
        weights=weights,
        constants=tuple(trace.constants[place] for place in data.constants),
    )
