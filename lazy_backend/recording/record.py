"""Record operator calls: the hot path.

In: one dispatched aten call. Out: lazy tensors, made from stored metadata.
A call seen before at this point of the program takes one step down the trie: no inference, no graph, and no hashing
except of its own tokens. It allocates a key (a tuple), a tensor and a `LazyStorage`, nothing else.

Note [What is in a key]
A key holds the operator, the tokens of tensors, structural arguments (ints, bools, dtypes, strings) and, at a tensor's
first use, its geometry and alias group. A key does not hold floats (it has placeholders; the values go to the trace's
constants), seeds or user lines.

Note [First sight runs]
A call not seen before at its point of the program runs at once, on real tensors, as in eager. It is recorded with the
geometry of its real results: no inference, and eager's own errors. A trace that has left the known paths does not
return to one, so the rest of its calls run at once too. What was recorded before them runs first, without ending the
trace, and the sync then has nothing left to run. (A call that fails is not recorded, and known calls may follow it:
then the trace ends, see `defer_again`.) So the first step of a program costs what eager costs plus the recording, and
from the second step on everything is deferred. `config.first_sight = "record"` defers unseen calls too, after inferring
the metadata of their results.

Note [Eager mode]
With `config.eager` a trace starts at a root of its own, which never has children. So every call is unseen, and runs at
once like a call that cannot be recorded; where C++ may, it runs them (`Trace.at_once`). While the mode is off, it costs
nothing. A device that steps aside is in this mode for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import getprofile
from time import perf_counter
from typing import Any

import torch

from lazy_backend.cache.trie import TrieNode
from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.errors.sites import further_frames, user_site
from lazy_backend.errors.tracebacks import hide_frames
from lazy_backend.execution.run import conform
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of
from lazy_backend.lowering.ir.program import INPUTS, SLOTS, Call, Cut, Entered, Fresh, Same, Token, View
from lazy_backend.ports.dispatcher import (
    DispatchKey,
    OpOverload,
    can_decompose,
    function_schema,
    has_kernel,
    kernel_caller,
)
from lazy_backend.ports.tensor_types import address_of
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.recording.arguments import flat, mutated_arguments, operand_at
from lazy_backend.recording.at_once import EAGER, RealCall, count_fallback, run_at_once, run_with_seed
from lazy_backend.recording.describe import check_recordable, describe, num_slots_of
from lazy_backend.recording.inference import Inference
from lazy_backend.recording.operators import (
    CAST_INSIDE,
    HOST_OPERAND_OPS,
    INDEX_OPS,
    NotRecordable,
    common_ops,
    float_shaped_ops,
    id_of,
    learn,
    scalar_list_ops,
    traits_of,
)
from lazy_backend.tensors.bodies import note_device, running
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.generators import lazy_generator
from lazy_backend.tensors.outside import new_data, operand_from_outside
from lazy_backend.tensors.state import UNWRITTEN, DeviceContext, LazyStorage, TensorData, Trace, ViewData
from lazy_backend.tensors.tensor import (
    LazyTensor,
    make,
    make_view,
    poisoned,
    set_bits,
    without_memory,
    wrap,
    wrapper_arguments,
)
from lazy_backend.tensors.thread_state import run_clean, unwatched

aten = torch.ops.aten

# our own globals: 20 ns faster than attributes of `torch`, on every call
get_default_dtype = torch.get_default_dtype
is_inference_mode_enabled = torch.is_inference_mode_enabled

_NO_KWARGS: dict[str, Any] = {}

# Training steps of most models use fewer slots and inputs than this. Reserving all of them takes 0.2 ms.
_USUAL_SLOTS, _USUAL_INPUTS = 1000, 300


class _Marker:
    """Stands for a kind of argument in a key."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


# 1 == True == 1.0 and they hash alike, but they record different programs: only ints stand for themselves.
_FLOAT, _TRUE, _FALSE, _COMPLEX, _ENTER = map(_Marker, ("float", "true", "false", "complex", "enter"))
_PLAIN = frozenset((int, type(None), str, torch.dtype, torch.layout, torch.memory_format))


# Handles the calls of one operator, by recording them or otherwise: (op, args, kwargs) -> results
Handler = Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]

_handlers: dict[int, Handler] = {}  # by `id_of`


_handlers_of: dict[str, Callable[[OpOverload], Handler]] = {}  # by namespace


# By `id_of`, operators whose handlers do no more than they do, where calls run at once
_run_alike: set[int] = set()


def add_handler(
    op: OpOverload, handler: Handler, recorded_as: OpOverload | None = None, runs_alike: bool = False
) -> None:
    """Let `handler` handle the calls of `op`.

    `recorded_as`: an operator that it records with the very arguments of the call, for the recorder in C++.
    `runs_alike`: whether a call that runs at once is no more than `op` on real tensors.
    """
    _handlers[id_of(op)] = handler
    if runs_alike:
        _run_alike.add(id_of(op))
    if recorded_as is not None:
        _arriving[id_of(recorded_as)] = (op,)


# Handlers that record what is recorded by a call with the same key, whatever else they do with other calls; each with
# the arguments that it leaves out where they ask for no other device and no other layout
_recorded_alike: dict[Handler, tuple[str, ...]] = {}
# By the `id_of` an operator that is recorded, others that arrive and are recorded as it
_arriving: dict[int, tuple[OpOverload, ...]] = {}


def records_alike(*left_out: str) -> Callable[[Handler], Handler]:
    """Decorate a handler: where it records a call, it is this very call, and it does no more than the recorder in C++.

    That counts the versions of lists that are written, as `_record_list_write`, and draws a seed for a random call.
    `left_out`: arguments that are not recorded where they ask for no other device and no other layout.
    """

    def note(handler: Handler) -> Handler:
        _recorded_alike[handler] = left_out
        return handler

    return note


def recorded_alike(op: OpOverload) -> tuple[tuple[OpOverload, ...], tuple[str, ...]] | None:
    """The operators whose calls are recorded as `op`, if C++ may do it, and the arguments that are left out.

    A call of one of them that was recorded at some place is recorded there again, without looking at it more.
    """
    left_out = _recorded_alike.get(_handlers.get(id(op)) or _choose_handler(op))
    own = () if left_out is None else (op,)
    arriving = (*own, *_arriving.get(id(op), ()))
    return (arriving, left_out or ()) if arriving else None


def runs_alike(op: OpOverload) -> bool | None:
    """Whether `op` draws random numbers from a generator; None if C++ may not make its calls that run at once.

    It may where they are no more than `op` on real tensors, with a seed for the generator, and resize no operand.
    """
    handler = _handlers.get(id(op)) or _choose_handler(op)
    if op.namespace != "aten" or not (handler in _recorded_alike or id(op) in _run_alike):
        return None
    traits = traits_of(op)
    draws = traits.draws and op not in rng.DROPOUT_PLACES  # C++ takes no calls of these with dropout
    if traits.resizes or (draws and handler is not _record_random):
        return None
    return draws


def add_handlers_of(namespace: str, choose: Callable[[OpOverload], Handler]) -> None:
    """Let `choose` name the handler of each operator of a library, when it first arrives."""
    _handlers_of[namespace] = choose


def dispatch(op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """`LazyTensor.__torch_dispatch__`."""
    if len(types) > 1:
        return NotImplemented  # another subclass's turn: Python asks the left-most operand first
    try:  # costs nothing unless something is raised
        handler = _handlers.get(id(op)) or _choose_handler(op)
        watcher = getprofile()
        if watcher is not None:
            return unwatched(watcher, handler, op, args, kwargs or _NO_KWARGS)
        return handler(op, args, kwargs or _NO_KWARGS)
    except BaseException as error:
        hide_frames(error)
        raise


# In `LazyTensor`'s namespace. By this very object the recorder in C++ knows that nobody watches calls.
INSTALLED = staticmethod(dispatch)


def _choose_handler(op: OpOverload) -> Handler:
    """Choose the handler for an operator that arrives for the first time."""
    # composite operators arrive undecomposed only where autograd is off altogether, in inference mode
    handler: Handler = _decompose if _is_composite(op) else record
    if op is aten._nested_tensor_from_mask_left_aligned.default:
        handler = _ask  # it returns a bool: whether a mask could become a nested tensor
    elif op.namespace in _handlers_of:
        handler = _handlers_of[op.namespace](op)
    elif function_schema(op).name.startswith("aten::_nested_"):
        handler = _refuse_nested
    elif any(arg.is_write and str(arg.type) == "List[Tensor]" for arg in function_schema(op).arguments):
        handler = _record_list_write
    elif handler is record and function_schema(op).name in CAST_INSIDE:
        handler = _record_uncast
    elif handler is record and rng.takes_generator(op):
        handler = _record_random
    learn(op)
    add_handler(op, handler)
    return handler


def _is_composite(op: OpOverload) -> bool:
    """Whether `op` is no more than calls of others. PyTorch has some written out in Python that have kernels, too."""
    if not can_decompose(op):
        return False
    return has_kernel(op.name(), "CompositeImplicitAutograd") or not has_kernel(op.name(), "Meta")


def prepare() -> None:
    """Look up the common operators, and make the tokens of a typical step.

    Called when the first lazy device is made: otherwise the first step would pay for this.
    """
    SLOTS.reserve(_USUAL_SLOTS)
    INPUTS.reserve(_USUAL_INPUTS)
    for op in common_ops():
        if id(op) not in _handlers:
            _choose_handler(op)
        traits_of(op)


def _ask(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return run_at_once(_find_context(op, args, kwargs), op, args, kwargs, "it returns a bool")


def _record_uncast(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a call of an operator whose kernel calls others that autocast casts, unless autocast is on."""
    if autocast_state.is_casting():
        return run_at_once(_find_context(op, args, kwargs), op, args, kwargs, "autocast casts what its kernel calls")
    return record(op, args, kwargs)


def _refuse_nested(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise LazyBackendError(
        f"a nested tensor of strided layout cannot be lazy\n  at {user_site()}\n"
        "  use layout=torch.jagged, pad it, or compute it on the CPU"
    )


def _decompose(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # eager's own composite kernel: PyTorch also has Python decompositions, which differ here and there (an LSTM's
    # dropout in 2.13)
    if has_kernel(op.name(), "CompositeImplicitAutograd"):
        return kernel_caller(op)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return op.decompose(*args, **kwargs)


@records_alike()
def _record_list_write(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record an in-place foreach op, and bump the version counters: autograd leaves that to the kernel."""
    result = record(op, args, kwargs)
    tensors = [t for t in mutated_arguments(op, args, kwargs) if isinstance(t, LazyTensor)]
    counted = [t for t in tensors if not t.is_inference()]
    torch.autograd.graph.increment_version(counted)
    if len(counted) < len(tensors) and not torch.is_inference_mode_enabled():
        raise RuntimeError(_NO_COUNTER)
    return result


# What PyTorch says where it counts the versions itself.
_NO_COUNTER = (
    "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a normal "
    "tensor before doing inplace update.See https://github.com/pytorch/rfcs/pull/17 for more details."
)


class _StepOut(Exception):
    """`action` must be done before a call is recorded, without the lock held, since it may wait for a run."""

    def __init__(self, action: Callable[[DeviceContext], object]) -> None:
        self.action = action


class _Interrupted(Exception):
    """A signal handler or a finalizer recorded or ran something in between: the call is recorded again, after that."""


@records_alike()
def _record_random(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record an op that may be given a generator: a lazy one gives the seed, any other gives the numbers themselves."""
    generator = lazy_generator(kwargs.get("generator") or (args[-1] if args else None))
    if generator is None:
        return record(op, args, kwargs)
    return rng.call_drawing_from(generator, record, op, *rng.without_generator(op, args, kwargs))


@records_alike()
def record(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a call, or run it at once if it cannot be recorded. Returns what the operator returns."""
    first: Any = args[0] if args else None
    context = first._data.context if first.__class__ is LazyTensor else _find_context(op, args, kwargs)
    seed: int | None = None
    while True:  # nearly always once
        try:
            # an RLock, 0.14 µs: a user's __del__ may run tensor code while the garbage collector interrupts us here
            with context.lock:
                trace = context.trace
                changes = trace.changes  # no call since the line above: the commit notices all later changes
                interrupted = trace.unfinished
                if interrupted is not None:  # 15 ns, and so is each store to `unfinished` below
                    executor.finish_interrupted(context)
                    trace = context.trace
                    changes = trace.changes
                    interrupted = trace.unfinished
                if trace.cursor.depth >= trace.longest:
                    if trace.at_once is None:
                        raise _StepOut(step_ends.look_at)
                    if _have_values(context, args, kwargs):
                        raise NotRecordable(EAGER)  # sooner than the key would tell
                if trace.default_dtype is not get_default_dtype():  # stored metadata may depend on it
                    raise _StepOut(executor.change_default_dtype)
                epoch = trace.epoch
                key: list[Any] = [id(op)]
                trace.unfinished = key  # see Note [Interruption]
                try:
                    # `_add_tokens`, inlined: calling it costs 0.3 µs, and most arguments are tensors and numbers
                    for arg in args:
                        kind = arg.__class__
                        if kind is LazyTensor:
                            data = arg._data
                            key.append(data.token if data.epoch is epoch else enter(trace, context, data))
                        elif kind in _PLAIN:
                            key.append(arg)
                        elif kind is list and arg and arg[0].__class__ is int and key[0] not in scalar_list_ops:
                            key.append(tuple(arg))
                        else:
                            _add_tokens(trace, context, op, key, (arg,))
                    if kwargs:
                        for name, value in kwargs.items():
                            key.append(name)
                            _add_tokens(trace, context, op, key, (value,))
                    full_key = tuple(key)
                    # Any: the code below distinguishes the kinds by class; an isinstance for the type checker would
                    # cost 40 ns
                    node: Any
                    result: Any
                    # read only now: an operand's first use may itself have recorded something
                    cursor = trace.cursor
                    if cursor.next_key == full_key:
                        node = cursor.next
                    else:
                        node = cursor.branch(full_key)
                        if node is None:
                            if cursor is context.eager_root:
                                raise NotRecordable(EAGER)
                            if trace.computed or _runs_unseen(context):
                                made = _run_unseen(context, trace, changes, interrupted, full_key, op, args, kwargs)
                                trace.unfinished = interrupted
                                return made
                            node = _add_unseen(context, trace, changes, full_key, op, args, kwargs)
                        cursor.next_key, cursor.next = full_key, node
                    result = node.shortcut
                    if result is None:
                        call: Any = node.call
                        if call.__class__ is Cut:
                            raise NotRecordable(call.reason)
                        if call.seeded:
                            seed = contexts.get_rng_seed() if seed is None else seed
                            trace.seeds.append(seed)
                        result = _make_results(context, trace, call, args, kwargs)
                    else:
                        kind = result.__class__
                        if kind is Fresh:
                            data = LazyStorage(context, epoch, result.token, result.meta)
                            trace.pending.append(data)  # strong: a computed trace meets no known call
                            result = make(LazyTensor, *result.wrapper)
                            result._data = data
                        elif kind is View:
                            of = first if result.of_first else operand_at(result.path, args, kwargs)
                            data = ViewData(context, epoch, result.token, result.meta, of._data.storage)
                            if is_inference_mode_enabled() is not of.is_inference():  # 70 ns
                                result = make_view(of, result.wrapper)
                            else:
                                result = make(LazyTensor, *result.wrapper)
                            result._data = data
                        else:
                            result = operand_at(result.path, args, kwargs)
                except BaseException as error:
                    if not isinstance(error, NotRecordable | _StepOut):
                        # before `unfinished` is restored: if this were interrupted, a known call might follow in a
                        # computed trace, and nothing would compute it
                        trace.roll_back()
                        executor.defer_again(context)
                    _undo(context, trace, interrupted)
                    raise
                # the commit; no call between the check and the store
                if trace.changes == changes:
                    trace.cursor = node
                    trace.unfinished = interrupted
                    if context.outside:
                        context.outside.clear()
                    return result
                _undo(context, trace, interrupted)
        except NotRecordable as reason:
            return run_at_once(context, op, args, kwargs, reason.args[0])
        except _Interrupted:
            continue
        except _StepOut as request:
            request.action(context)


def _have_values(context: DeviceContext, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors of a call are this device's, and have their values."""
    for arg in (*flat(list(args)), *flat(list(kwargs.values()))):
        if isinstance(arg, torch.Tensor):
            if arg.__class__ is not LazyTensor or arg._data.context is not context:
                return False
            storage = arg._data.storage
            if storage.tensor is None or storage.error is not None:
                return False
    return True


def _undo(context: DeviceContext, trace: Trace, interrupted: Any) -> None:
    """Remove what an unrecorded call left in the trace; otherwise the path would no longer identify the program."""
    trace.roll_back()
    trace.unfinished = interrupted
    context.outside.clear()


def _check_uninterrupted(trace: Trace, changes: int) -> None:
    """Raise `_Interrupted` if the trace has changed, so that nothing derived from its old state is kept."""
    if trace.changes != changes:
        raise _Interrupted


def _add_tokens(
    trace: Trace, context: DeviceContext, op: Any, key: list[Any], args: Sequence[Any], in_list: bool = False
) -> None:
    """Append the tokens of `args` to a key. The trace takes the floats, and tensors from outside."""
    epoch = trace.epoch
    for arg in args:
        kind = arg.__class__
        if kind is LazyTensor:
            data = arg._data
            key.append(data.token if data.epoch is epoch else enter(trace, context, data))
        elif kind is float:
            if id(op) in float_shaped_ops:
                key.append((_FLOAT, arg.hex()))
            else:
                trace.constants.append(arg)
                key.append(_FLOAT)
        elif kind in _PLAIN:
            key.append(arg)
        elif kind is bool:
            key.append(_TRUE if arg else _FALSE)
        elif kind is list or kind is tuple:
            inner: list[Any] = []
            _add_tokens(trace, context, op, inner, arg, True)
            key.append(tuple(inner))
        else:
            key.append(_odd_token(trace, context, op, arg, in_list))


def _odd_token(trace: Trace, context: DeviceContext, op: Any, arg: Any, in_list: bool) -> Any:
    """The token of an argument of a rare type."""
    if isinstance(arg, torch.Tensor):
        if function_schema(op).name in HOST_OPERAND_OPS:
            raise NotRecordable("it reads lengths on the CPU")
        is_index = in_list and function_schema(op).name in INDEX_OPS
        data = operand_from_outside(context, op, arg, is_index)
        return data.token if data.epoch is trace.epoch else enter(trace, context, data)
    if isinstance(arg, torch.device):
        # without the index: each context has a trie of its own
        return "lazy" if arg.type == "lazy" else arg
    if isinstance(arg, complex):
        return (_COMPLEX, repr(arg))
    if isinstance(arg, torch.Generator):
        raise NotRecordable("it takes its random numbers from a torch.Generator")
    raise NotRecordable(f"it takes a {type(arg).__name__}")


def enter(trace: Trace, context: DeviceContext, data: TensorData) -> Any:
    """Make `data`, which this trace has not used yet, an input; return its part of the key."""
    storage = data.storage
    if data.context is not context:
        raise DeviceError(
            f"expected all tensors to be on the same device, but found {context.device} and {data.context.device}\n"
            f"  at {user_site()}\n  move one of them, as in tensor.to({str(context.device)!r})"
        )
    if storage.error is not None:
        raise poisoned(storage)
    if storage.token is UNWRITTEN and storage.tensor is None:
        if storage in context.given_back:
            raise without_memory()
        if trace.cursor is context.eager_root:
            storage.tensor = run_clean(empty_of, storage.meta, context.backing)
        else:
            _record_empty(context, trace, storage)
            if data is storage:
                return data.token
    if storage.epoch is trace.epoch and storage not in trace.groups:
        _record_view_of_made(context, trace, data)
        return data.token
    group = trace.groups.setdefault(storage, len(trace.groups))
    token = INPUTS[len(trace.inputs)]
    if data.epoch is trace.epoch:  # a signal handler or a finalizer has entered it meanwhile
        raise _Interrupted
    # in this order, with no call before the last line: wherever an interruption comes, `roll_back` finds the new input
    trace.entering = data
    data.token = token
    data.epoch = trace.epoch
    trace.inputs.append(data)
    return (_ENTER, data.meta, group, storage.meta)


def _make_results(
    context: DeviceContext, trace: Trace, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    results = call.results
    if call.returns_list:
        return [_make_result(context, trace, result, args, kwargs) for result in results]
    if len(results) == 1:
        return _make_result(context, trace, results[0], args, kwargs)
    return tuple([_make_result(context, trace, result, args, kwargs) for result in results]) if results else None


def _make_result(
    context: DeviceContext, trace: Trace, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    kind = result.__class__
    data: TensorData
    if kind is Fresh:
        data = LazyStorage(context, trace.epoch, result.token, result.meta)
        trace.add_pending(data)
    elif kind is View:
        of = operand_at(result.path, args, kwargs)
        data = ViewData(context, trace.epoch, result.token, result.meta, of._data.storage)
        tensor = make_view(of, result.wrapper)
        set_bits(tensor, result.meta)
        tensor._data = data
        return tensor
    elif kind is Same:
        return operand_at(result.path, args, kwargs)
    else:
        return None
    tensor = make(LazyTensor, *result.wrapper)
    tensor._data = data
    return tensor


# ----- an unseen call: run it and describe what it gave


def _runs_unseen(context: DeviceContext) -> bool:
    """Whether calls not seen before run at once: not those of a finalizer that interrupted a run."""
    return executor.rules.runs_unseen_calls() and not context.queue.is_here()


def _run_unseen(
    context: DeviceContext,
    trace: Trace,
    changes: int,
    interrupted: Any,
    full_key: tuple[Any, ...],
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a call seen for the first time at this place, and record it. See Note [First sight runs]."""
    entered = _entered(trace, full_key)
    cursor = trace.cursor
    traits = traits_of(op)
    try:
        check_recordable(context, op, args, kwargs)
        if traits.asks_fake and _fake_decides(op, args):
            Inference(context).run(op, args, kwargs)
    except NotRecordable as reason:
        _check_uninterrupted(trace, changes)
        _add_node(context, cursor, full_key, Cut(str(reason)))
        raise
    if not trace.computed:
        if not context.locker.is_idle():
            raise _StepOut(lambda context: context.locker.wait_idle())
        executor.catch_up(context, trace, changes)
    _check_uninterrupted(trace, changes)
    real = RealCall(context)
    seed: int | None = None
    begin = perf_counter()
    if traits.draws:
        output, seed = run_with_seed(real.run, op, args, kwargs)
    else:
        output = real.run(op, args, kwargs, None)
    trace.run_seconds += perf_counter() - begin
    try:
        if traits.resizes and real.resized():
            raise NotRecordable("it resizes an operand")
        call = describe(context, op, args, kwargs, output, real.source_of, entered)
    except NotRecordable as reason:
        if trace.changes != changes:
            return _return_unrecorded(context, trace, interrupted, op, real, output)
        _end_after(context, trace, interrupted, full_key, op, str(reason))
        return real.to_lazy(output)  # after the cut: this changes operands, and with them the live set
    if seed is not None:
        trace.seeds.append(seed)
    results = _make_results(context, trace, call, args, kwargs)
    _give_values(call, results, output)
    if trace.changes != changes:
        # it has run but cannot be recorded at `cursor`: what came in between ended the trace, or continued it there
        return _return_unrecorded(context, trace, interrupted, op, real, output)
    node = _add_node(context, cursor, full_key, call)
    # the commit, as in `record`
    if trace.changes == changes:
        trace.cursor = node
        context.outside.clear()
        return results
    return _return_unrecorded(context, trace, interrupted, op, real, output)


def _return_unrecorded(
    context: DeviceContext, trace: Trace, interrupted: Any, op: OpOverload, real: RealCall, output: Any
) -> Any:
    """The results of a call during which a signal handler or a finalizer recorded something."""
    _undo(context, trace, interrupted)
    executor.cut(context, f"{op}: something was recorded while it ran")
    return real.to_lazy(output)


def _fake_decides(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether to ask the fake kernel before running an op with the trait `asks_fake`: for powers, only of booleans."""
    if op.namespace not in ("aten", "prims") or op is aten._padded_dense_to_jagged_forward.default:
        return True
    return any(arg.dtype == torch.bool for arg in flat(list(args)) if isinstance(arg, torch.Tensor))


def _end_after(
    context: DeviceContext, trace: Trace, interrupted: Any, key: tuple[Any, ...], op: OpOverload, reason: str
) -> None:
    """End the trace before a call that has run but turned out not to be recordable, as it will end next time."""
    _add_node(context, trace.cursor, key, Cut(reason))
    _undo(context, trace, interrupted)
    count_fallback(op, reason)
    executor.cut(context, f"{op}: {reason}")


def _give_values(call: Call, results: Any, output: Any) -> None:
    """Put the real results into the storages of the lazy results that have memory of their own."""
    single = call.single
    if single is not None:
        if single.__class__ is Fresh:
            results._data.tensor = _owned(output, single.meta)
        return
    taken: set[int] = set()
    for result, tensor, value in zip(call.results, results or (), output or (), strict=True):
        if isinstance(result, Fresh):
            place = address_of(value.untyped_storage())
            tensor._data.tensor = _owned(run_clean(value.clone) if place in taken else value, result.meta)
            taken.add(place)


def _owned(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """`value`, which was described as `meta`, as the tensor of a storage: at offset 0, without the conjugate bit."""
    return run_clean(conform, value, meta) if value.storage_offset() or value.is_conj() else value


# ----- an unseen call: infer, describe, add to the trie


def _add_unseen(
    context: DeviceContext,
    trace: Trace,
    changes: int,
    full_key: tuple[Any, ...],
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> TrieNode[Call | Cut]:
    """Describe a call seen for the first time at this place. Errors of the operator itself are raised here."""
    call: Call | Cut
    cursor, entered = trace.cursor, _entered(trace, full_key)
    try:
        check_recordable(context, op, args, kwargs)
        inference = Inference(context)
        output = inference.run(op, args, kwargs)
        call = describe(context, op, args, kwargs, output, inference.source_of, entered)
    except NotRecordable as reason:
        call = Cut(str(reason))
    _check_uninterrupted(trace, changes)
    return _add_node(context, cursor, full_key, call)


def _add_node(
    context: DeviceContext, cursor: TrieNode[Call | Cut], key: tuple[Any, ...], call: Call | Cut
) -> TrieNode[Call | Cut]:
    node = context.trie.add(cursor, key, call)
    if isinstance(call, Call) and not call.seeded and not _has_bits(call.single):
        # most calls have one result: with it on the node, a hit does not touch the call (a cache line or two)
        node.shortcut = call.single
    return node


def _has_bits(result: Fresh | View | Same | None) -> bool:
    return isinstance(result, View) and (result.meta.conj or result.meta.neg)


def _entered(trace: Trace, key: tuple[Any, ...]) -> tuple[Entered, ...]:
    """The inputs that a key introduces, which are the latest inputs of the trace."""
    found: list[tuple[TensorMeta, int, TensorMeta]] = []
    _find_entered(key, found)
    if not found:
        return ()
    start = len(trace.inputs) - len(found)
    return tuple(Entered(INPUTS[start + place], meta, group, base) for place, (meta, group, base) in enumerate(found))


def _find_entered(parts: tuple[Any, ...], found: list[tuple[TensorMeta, int, TensorMeta]]) -> None:
    for part in parts:
        if part.__class__ is tuple and part:
            head = part[0]
            if head is _ENTER:
                found.append(part[1:])
            elif head.__class__ is not int:  # otherwise a list of sizes
                _find_entered(part, found)


# ----- factories and tensors from outside


def record_factory(context: DeviceContext, op: OpOverload, args: Sequence[Any], **options: Any) -> LazyTensor:
    """Record a call without tensor operands, such as `aten.zeros`, on `context`."""
    if context.trace.at_once is not None and not traits_of(op).draws:
        return wrap(new_data(context, run_clean(op, *args, **options, device=context.backing)))
    return record(op, args, {**options, "device": context.device})  # type: ignore[no-any-return]


def _record_empty(context: DeviceContext, trace: Trace, storage: LazyStorage) -> None:
    """Record the allocation of memory that was requested earlier and is used only now."""
    meta = storage.meta
    key = (id(aten.empty_strided.default), meta)
    cursor, changes = trace.cursor, trace.changes
    node = cursor.follower(key)
    if node is None:
        node = context.trie.add(cursor, key, _empty_call(context, cursor, meta))
    made: Any = node.call
    tensor = run_clean(empty_of, meta, context.backing) if trace.computed else None
    trace.add_pending(storage)
    if trace.changes != changes or trace.cursor is not cursor:
        raise _Interrupted
    trace.cursor = node  # the commit, as in `record`
    storage.tensor = tensor
    storage.token = made.single.token
    storage.epoch = trace.epoch


def _record_view_of_made(context: DeviceContext, trace: Trace, data: TensorData) -> None:
    """Record how a view that is older than the trace looks into memory that the trace made.

    Only memory that was given back and taken again is younger than its views. See Note [Memory given back].
    """
    storage, meta = data.storage, data.meta
    if meta.dtype is not storage.meta.dtype or meta.conj or meta.neg:
        raise NotRecordable("it uses an older view, of another dtype, of memory that was given back")
    assert storage.token is not None
    key = (id(aten.as_strided.default), storage.token, meta)
    cursor, changes = trace.cursor, trace.changes
    node = cursor.follower(key)
    if node is None:
        node = context.trie.add(cursor, key, _view_call(context, cursor, storage.token, meta))
    made: Any = node.call
    if trace.changes != changes or trace.cursor is not cursor:
        raise _Interrupted
    trace.cursor = node  # the commit, as in `record`
    data.token = made.single.token
    data.epoch = trace.epoch


def _empty_call(context: DeviceContext, cursor: TrieNode[Call | Cut], meta: TensorMeta) -> Call:
    made = Fresh(SLOTS[num_slots_of(cursor)], meta, wrapper_arguments(context, meta))
    options = (("dtype", meta.dtype), ("device", context.backing))
    return _call_of_ours(aten.empty_strided.default, (meta.shape, meta.stride), options, made)


def _view_call(context: DeviceContext, cursor: TrieNode[Call | Cut], of: Token, meta: TensorMeta) -> Call:
    made = View(SLOTS[num_slots_of(cursor)], meta, of, (0,), wrapper_arguments(context, meta))
    return _call_of_ours(aten.as_strided.default, (of, meta.shape, meta.stride, meta.storage_offset), (), made)


def _call_of_ours(
    op: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], made: Fresh | View
) -> Call:
    """A call that nobody made: before a call of the user's, it makes what that one takes."""
    return Call(
        op=op,
        args=args,
        kwargs=kwargs,
        results=(made,),
        returns_list=False,
        mutates=(),
        entered=(),
        num_constants=0,
        seeded=False,
        num_slots=made.token.index + 1,
        site=user_site(),
        frames=further_frames(),
    )


def _find_context(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceContext:
    """The context of a call: that of its first lazy operand, or of the device that it names."""
    first = args[0] if args else None
    if first.__class__ is list and first and first[0].__class__ is LazyTensor:  # foreach ops
        return first[0]._data.context  # type: ignore[no-any-return]
    for arg in (*flat(list(args)), *flat(list(kwargs.values()))):
        if isinstance(arg, LazyTensor):
            return arg._data.context
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "lazy":
        context = contexts.get_device_context(device.index)
        context.wait_for_body()
        if running:
            note_device(context.name)
        return context
    raise LazyBackendError(
        f"internal error: {op} reached the lazy device without a lazy operand\n"
        "  please report the program and what `python -m lazy_backend` prints"
    )
