"""What is served, and recording it: once for the example inputs, and again for inputs of other shapes.

In: a function or module, and inputs. Out: `RecordedRequest`: the graph of a call, and the role of each of its inputs.

Note [Recorded again]
A request of a new shape has the function called again, perhaps much later, on another thread and in other modes. It is
to record what it would have recorded at first. So a module is copied when it begins to be served, without its weights,
and each recording is made with a copy of that copy, over the weights of that moment: neither further training nor
`train()` nor what an earlier recording left in an attribute makes a difference. A function is called as it is. Tensors
that it closes over are found again by their identity, and stand for the values they had when serving began. Autocast
and the like are as when serving began.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from lazy_backend.errors import CaptureError, LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import Graph, TensorMeta
from lazy_backend.lowering.serving.executor import GraphSignature
from lazy_backend.lowering.serving.weights import InputError
from lazy_backend.ports import trees
from lazy_backend.tensors.contexts import context_of
from lazy_backend.tensors.outside import new_data
from lazy_backend.tensors.state import DeviceContext, TensorData
from lazy_backend.tensors.tensor import LazyTensor, backing_tensor, wrap
from lazy_backend.tensors.thread_state import describe_autocast, has_python_modes, run_clean

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A recorded call. `weights`: copies of the tensors that it uses, by the names in `signature`.

    When it is recorded again, only of those that the first recording had no name for.
    """

    graph: Graph
    signature: GraphSignature
    weights: dict[str, torch.Tensor]
    constants: tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Roles:
    """How to name a recording's inputs, apart from those of the request."""

    names: Mapping[TensorData, str]  # of a module's tensors
    # tensors that a function closes over, by the names of the first recording. They are not kept alive.
    fixed: dict[weakref.ref[TensorData], str] = field(default_factory=dict)
    again: bool = False

    def find(self, source: TensorData, entered: TensorData) -> str | None:
        """The name of a tensor that has one. `entered`: itself, or its base if the graph takes that."""
        return self.names.get(source) or self.fixed.get(weakref.ref(entered))

    def add(self, entered: TensorData, count: int) -> str:
        """A name for a tensor that has none."""
        if self.again:
            return f"constant {count} of these shapes"
        return self.fixed.setdefault(weakref.ref(entered), f"constant {count}")


class Servable:
    """A function or module that is served. See Note [Recorded again]. Without `again`, it is recorded only once."""

    def __init__(self, module_or_fn: Callable[..., Any], again: bool = True) -> None:
        named = type(module_or_fn) if isinstance(module_or_fn, torch.nn.Module) else module_or_fn
        self.name: str = getattr(named, "__qualname__", repr(named))
        self._function: Callable[..., Any] | None = _on_lazy_device(module_or_fn)
        tensors = tensors_of(self._function) if isinstance(self._function, torch.nn.Module) else {}
        self._roles = _Roles(_names(tensors))
        self.state_names = (
            frozenset(self._function.state_dict()) if isinstance(self._function, torch.nn.Module) else None
        )
        self._copy: _ModuleCopy | None = None
        self._refusal: Exception | None = None  # why there is no copy of a module
        if again and isinstance(self._function, torch.nn.Module):
            try:
                self._copy = _ModuleCopy(self._function, tensors, self._roles.names)
            except Exception as error:  # whatever a module's own `__deepcopy__` raises
                self._refusal = error
        self._device: torch.device | None = None
        self._in_spec: trees.TreeSpec | None = None
        self._orders: list[tuple[int, ...]] = []  # of each example, its dimensions from the widest stride on
        self._modes = _Modes()

    def record(self, args: tuple[Any, ...]) -> RecordedRequest:
        """The first recording. None of the operators runs, so the call has no effect."""
        assert self._function is not None
        leaves, self._in_spec = trees.tree_flatten((args, {}))
        context = next(iter(self._roles.names)).context if self._roles.names else context_of(None)
        self._device = context.device
        given = [_example(leaf, context.device) for leaf in leaves]
        recorded = _record(context, self._function, self.name, self._roles, given, self._in_spec)
        self._orders = [_order_of(meta) for meta in recorded.signature.examples]
        return recorded

    def spare_weights(self, used: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the module's tensors that the first recording did not use, but further ones may.

        The module itself is not needed from here on.
        """
        named = {} if self._copy is None else self._roles.names
        spare = {name: run_clean(_clone_of, data) for data, name in named.items() if name not in used}
        if isinstance(self._function, torch.nn.Module):
            self._function = None
            self._roles = _Roles({}, self._roles.fixed)
        return spare

    def record_again(
        self,
        inputs: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        finish: Callable[[RecordedRequest], R],
        known: Callable[[], R | None],
    ) -> R:
        """`known`, or else what `finish` makes of a recording for these inputs; one thread at a time does either.

        Raises `InputError` if the function does not take inputs of these shapes, and `CaptureError` as `serve` does.
        """
        if self._refusal is not None:
            raise InputError(
                f"requests to {self.name} must have the shapes of the example inputs: for others a copy of the module "
                f"would be needed, and copying it raised {type(self._refusal).__name__}: {self._refusal}\n"
                "  serve a function that calls the module, as in lambda x: module(x)"
            ) from self._refusal
        context = context_of(self._device)
        context.wait_for_body()
        with context.lock:
            found = known()
            if found is None:
                found = finish(self._modes.call_in(self._record_again, context, inputs, weights))
            return found

    def _record_again(
        self,
        context: DeviceContext,
        inputs: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> RecordedRequest:
        given = [
            _example(_laid_out(one, order), context.device) for one, order in zip(inputs, self._orders, strict=True)
        ]
        function, names = self._function, self._roles.names
        if self._copy is not None:
            function, names = self._copy.over(context, weights)
        assert function is not None
        assert self._in_spec is not None
        roles = _Roles(names, self._roles.fixed, again=True)
        try:
            return _record(context, function, self.name, roles, given, self._in_spec)
        except LazyBackendError:
            raise
        except Exception as error:
            raise InputError(f"{self.describe(inputs)} cannot be recorded: {error}") from error

    def describe(self, inputs: Sequence[torch.Tensor]) -> str:
        """What is served, for inputs of these shapes."""
        return describe(self.name, inputs)


class LoadedFunction:
    """What is served from a file: it has the graphs that were saved, and can record no other."""

    def __init__(self, name: str, state_names: frozenset[str]) -> None:
        self.name, self.state_names = name, state_names

    def record_again(self, inputs: Sequence[torch.Tensor], *rest: object) -> NoReturn:
        raise InputError(
            f"{self.describe(inputs)}: the file that it was loaded from has no graph of these shapes\n"
            "  pad to shapes that it has, or ask for these before save()"
        )

    def describe(self, inputs: Sequence[torch.Tensor]) -> str:
        return describe(self.name, inputs)


def describe(name: str, inputs: Sequence[torch.Tensor]) -> str:
    return f"{name} of inputs of shape {', '.join(str(list(one.shape)) for one in inputs)}"


class _ModuleCopy:
    """A module without its weights, from which modules over given weights are made."""

    def __init__(
        self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], names: Mapping[TensorData, str]
    ) -> None:
        if len({data.storage for data in names}) < len(names) or any(data is not data.storage for data in names):
            raise ValueError("some of its tensors share memory")
        self._places: list[tuple[torch.Tensor, str]] = []  # what stands for each tensor, and the tensor's first name
        memo: dict[int, Any] = {}
        for tensor in tensors.values():
            if isinstance(tensor, LazyTensor) and id(tensor) not in memo:
                place: torch.Tensor = torch.empty(0, dtype=tensor.dtype, device="meta")
                if isinstance(tensor, torch.nn.Parameter):
                    place = torch.nn.Parameter(place, tensor.requires_grad)
                memo[id(tensor)] = place
                self._places.append((place, names[tensor._data]))
        self._module = copy.deepcopy(module, memo)
        # other tensors that it holds are those of every copy, so that what is written to one of them is not lost
        places = {id(place) for place, _ in self._places}
        held = trees.tree_leaves([list(vars(one).values()) for one in self._module.modules()])
        self._held = [one for one in held if isinstance(one, torch.Tensor) and id(one) not in places]

    def over(
        self, context: DeviceContext, weights: Mapping[str, torch.Tensor]
    ) -> tuple[torch.nn.Module, dict[TensorData, str]]:
        """A module whose tensors are `weights`, which are not copied, and the names of these tensors."""
        made: dict[str, TensorData] = {}
        memo: dict[int, Any] = {id(one): one for one in self._held}
        for place, name in self._places:
            data = made.setdefault(name, new_data(context, weights[name])) if name not in made else made[name]
            tensor: torch.Tensor = wrap(data)
            if isinstance(place, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, place.requires_grad)
            memo[id(place)] = tensor
        return copy.deepcopy(self._module, memo), {data: name for name, data in made.items()}


class _Modes:
    """The modes of the thread that begins to serve, as far as they change what is recorded."""

    def __init__(self) -> None:
        self._default_dtype = torch.get_default_dtype()
        self._autocast = describe_autocast()
        self._has_others = has_python_modes()

    def call_in(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function` in these modes. Raises `InputError` where they cannot be restored."""
        if torch.get_default_dtype() is not self._default_dtype:
            raise InputError(
                f"the default dtype is {torch.get_default_dtype()}, and was {self._default_dtype} when serving began\n"
                "  set it back before requests of new shapes"
            )
        if self._has_others and not has_python_modes():
            raise InputError(
                "serving began within a mode such as torch.device(...), without which a new shape cannot be recorded\n"
                "  call serve outside of it"
            )
        if self._has_others:
            return function(*args)
        if self._autocast is None:
            return run_clean(function, *args)
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._autocast[1:]:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast[0]))
            return function(*args)


def _on_lazy_device(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, torch.nn.Module):
        return function
    if all(isinstance(tensor, LazyTensor) for tensor in tensors_of(function).values()):
        return function
    return copy.deepcopy(function).to("lazy")


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; a tensor with several names is listed under each."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def _names(tensors: Mapping[str, torch.Tensor]) -> dict[TensorData, str]:
    """The first name of each of a module's tensors."""
    return {tensor._data: name for name, tensor in reversed(list(tensors.items())) if isinstance(tensor, LazyTensor)}


# ----- from a call to a graph and its signature


def _record(
    context: DeviceContext,
    function: Callable[..., Any],
    name: str,
    roles: _Roles,
    given: Sequence[LazyTensor],
    in_spec: trees.TreeSpec,
) -> RecordedRequest:
    """Record one call of `function`. None of its operators runs, so the call has no effect."""

    def refuse(cause: str) -> CaptureError:
        return CaptureError(f"{cause} inside {name}, which is to be served\n  at {user_site()}\n  return the tensor")

    copied, _ = trees.tree_unflatten(given, in_spec)

    def run() -> RecordedRequest:
        with torch.no_grad():
            outputs, out_spec = trees.tree_flatten(function(*copied))
            made = [_own(output, name) for output in outputs]
            return _finish(context, roles, given, made, in_spec, out_spec)

    with context.lock:
        executor.sync_tensors_graph_internal(context, "serve", is_awaited=True)
        after = context.fresh_trace()
        recording = context.trace
        try:
            try:
                # deferring: the body's writes must not happen. Nor does a recording draw numbers that the program sees
                return rng.call_drawing_from(
                    torch.Generator(), lambda: executor.rules.call_deferring(executor.rules.call_refusing, refuse, run)
                )
            finally:
                context.trace = after
        finally:
            # two `finally` blocks of plain stores, see Note [Interruption]: what was recorded must never run
            context.trace = after
            recording.changes += 1


def _order_of(meta: TensorMeta) -> tuple[int, ...]:
    """The dimensions of a tensor, from the widest stride on."""
    return tuple(sorted(range(len(meta.shape)), key=lambda dimension: -meta.stride[dimension]))


def _laid_out(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`tensor` with its dimensions in this order in memory: graphs of several shapes are alike in that, too."""
    laid = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return tensor if tensor.stride() == laid.stride() else laid.copy_(tensor.detach())


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
    roles: _Roles,
    given: Sequence[LazyTensor],
    made: Sequence[LazyTensor],
    in_spec: trees.TreeSpec,
    out_spec: trees.TreeSpec,
) -> RecordedRequest:
    """The recorded graph, and the role of each of its inputs."""
    trace = context.trace
    pending = {storage: place for place, storage in zip(*trace.live(), strict=True)}
    data = executor.computations.run_post_order(context, [pending[tensor._data.storage] for tensor in made])
    own = set(rng.generators_of([trace.seeds[place] for place in data.seeds])) - {rng.generator_in_use()}
    if own:
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
        entered = source.storage if parameter.base else source
        if source in roles.names and entered is not source:
            raise CaptureError(
                f"{roles.names[source]} shares its memory with other tensors, so it could not be swapped"
            )
        name = roles.find(source, entered)
        if name is None or not roles.again:
            name = name or roles.add(entered, len(places))
            weights[name] = run_clean(_clone_of, entered)
        places.append((name, place))
    return RecordedRequest(
        graph=data.graph,
        signature=GraphSignature(
            weights=tuple(places),
            user_inputs=tuple((f"input {place}", user_places.get(place)) for place in range(len(given))),
            examples=tuple(tensor._data.meta for tensor in given),
            in_spec=in_spec,
            out_spec=out_spec,
        ),
        weights=weights,
        constants=tuple(trace.constants[place] for place in data.constants),
    )
