"""Record operator calls: the hot path.

In: one dispatched aten call. Out: lazy tensors, made from stored metadata.
A call seen before at this place of the program takes one step down the trie: no inference, no graph, no hashing of
anything but its own tokens. It allocates a key (a tuple), a tensor and a `LazyStorage`, nothing else.

Note [What is in a key]
Operator, tokens of tensors, structural arguments (ints, bools, dtypes, strings) and, at a tensor's first use, its
geometry and alias group. Not in it: floats (placeholders, the values go to the trace's constants), seeds, user lines.

Note [First sight runs]
A call never seen at its place runs at once, on real tensors, as in eager, and is recorded with the geometry it really
gave: no inference, and eager's own errors. A trace that has left the known paths does not come back to one, so the rest
of it runs so too; only what was recorded before has to be run first, without ending the trace. Its sync has nothing to
run. (A call that fails is not recorded, and known calls may follow it: then the trace ends, see `defer_again`.) So the
first step of a program costs what eager costs plus the recording, and from the second step on everything is deferred.
`config.first_sight = "record"` defers unseen calls too, after inferring what they will give.

Note [Eager mode]
With `config.eager` a trace starts at a root of its own that has no children and never gets any. So every call is
unseen, and runs at once as calls do that cannot be recorded; otherwise the mode costs nothing for being there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from lazy_backend.cache.trie import TrieNode
from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.errors.sites import further_frames, user_site
from lazy_backend.errors.tracebacks import hide_frames
from lazy_backend.execution import reads
from lazy_backend.execution.run import conform
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of
from lazy_backend.lowering.ir.program import INPUTS, SLOTS, Call, Cut, Entered, Fresh, Same, View
from lazy_backend.recording.arguments import flat, mutated_arguments, operand_at
from lazy_backend.recording.at_once import EAGER, RealCall, count_fallback, draw_seed_for, run_at_once
from lazy_backend.recording.describe import check_recordable, describe, num_slots_of
from lazy_backend.recording.inference import Inference
from lazy_backend.recording.operators import (
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
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.generators import lazy_generator
from lazy_backend.tensors.outside import operand_from_outside
from lazy_backend.tensors.state import UNWRITTEN, DeviceContext, LazyStorage, TensorData, Trace, ViewData
from lazy_backend.tensors.tensor import LazyTensor, make, make_view, poisoned, set_bits, wrap, wrapper_arguments
from lazy_backend.tensors.thread_state import run_clean

aten = torch.ops.aten

# globals of ours: 20 ns less than attributes of `torch`, on every call
get_default_dtype = torch.get_default_dtype
is_inference_mode_enabled = torch.is_inference_mode_enabled

_NO_KWARGS: dict[str, Any] = {}

# What the training steps of most models stay below. 0.2 ms for all of them.
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


# Treats one operator in another way than recording it as it is: (op, args, kwargs) -> results
Handler = Callable[[torch._ops.OpOverload, Sequence[Any], Mapping[str, Any]], Any]

_handlers: dict[int, Handler] = {}  # by `id_of`


def add_handler(op: torch._ops.OpOverload, handler: Handler) -> None:
    _handlers[id_of(op)] = handler


def dispatch(op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """`LazyTensor.__torch_dispatch__`."""
    if len(types) > 1:
        return NotImplemented  # another subclass's turn: Python asks the left-most operand first
    try:  # costs nothing unless something is raised
        handler = _handlers.get(id(op)) or _choose_handler(op)
        return handler(op, args, kwargs or _NO_KWARGS)
    except BaseException as error:
        hide_frames(error)
        raise


def _choose_handler(op: torch._ops.OpOverload) -> Handler:
    """How to treat an operator that arrives for the first time."""
    # composite operators arrive whole only where autograd is off altogether, in inference mode
    handler: Handler = _decompose if op._can_decompose() else record
    if op is aten._nested_tensor_from_mask_left_aligned.default:
        handler = _ask  # whether a mask could become a nested tensor: a bool
    elif op.namespace == "_c10d_functional":
        handler = _COLLECTIVE_ENDS.get(op._opname, _communicate)
    elif op._schema.name.startswith("aten::_nested_"):
        handler = _refuse_nested
    elif any(arg.is_write and str(arg.type) == "List[Tensor]" for arg in op._schema.arguments):
        handler = _record_list_write
    elif handler is record and rng.takes_generator(op):
        handler = _record_random
    learn(op)
    add_handler(op, handler)
    return handler


def prepare() -> None:
    """Look up the common operators, and make the tokens of a usual step.

    When the first lazy device is made: the first step would pay for it otherwise.
    """
    SLOTS.reserve(_USUAL_SLOTS)
    INPUTS.reserve(_USUAL_INPUTS)
    for op in common_ops():
        if id(op) not in _handlers:
            _choose_handler(op)
        traits_of(op)


def _ask(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return run_at_once(_find_context(op, args, kwargs), op, args, kwargs, "it returns a bool")


def _communicate(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A functional collective runs at once and is waited for.

    Recorded, it would be waited for by nobody: its results share memory with those of `wait_tensor`, which are views.
    """
    results = run_at_once(_find_context(op, args, kwargs), op, args, kwargs, "it communicates")
    for result in flat(results):
        run_clean(torch.ops._c10d_functional.wait_tensor, reads.read(result._data, "a collective"))
    return results


def _waited(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return wrap(args[0]._data, view_of=args[0])


# What follows a functional collective.
_COLLECTIVE_ENDS: dict[str, Handler] = {"wait_tensor": _waited, "_wrap_tensor_autograd": _waited}


def _refuse_nested(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise LazyBackendError(
        f"a nested tensor of strided layout cannot be lazy\n  at {user_site()}\n"
        "  use layout=torch.jagged, pad it, or compute it on the CPU"
    )


def _decompose(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # eager's own composite kernel: PyTorch also has Python decompositions, which differ here and there (an LSTM's
    # dropout in 2.13). Internal, checked on 2.13: no public way to call one kernel of an operator
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return op.decompose(*args, **kwargs)


def _record_list_write(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An in-place foreach op: autograd leaves it to the kernel to raise the version counters."""
    result = record(op, args, kwargs)
    written = [t for t in mutated_arguments(op, args, kwargs) if isinstance(t, LazyTensor) and not t.is_inference()]
    torch.autograd.graph.increment_version(written)
    return result


class _StepOut(Exception):
    """Something must be done before a call is recorded, and may wait for a run: not while the lock is held."""

    def __init__(self, action: Callable[[DeviceContext], object]) -> None:
        self.action = action


class _Interrupted(Exception):
    """A signal handler or a finalizer recorded or ran something meanwhile: the call is recorded anew, after that."""


def _record_random(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that may be given a generator: a lazy one gives the seed, any other the numbers themselves."""
    generator = lazy_generator(kwargs.get("generator") or (args[-1] if args else None))
    if generator is None:
        return record(op, args, kwargs)
    return rng.call_drawing_from(generator, record, op, *rng.without_generator(op, args, kwargs))


def record(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a call, or run it at once if it cannot be recorded. Returns what the operator returns."""
    first: Any = args[0] if args else None
    context = first._data.context if first.__class__ is LazyTensor else _find_context(op, args, kwargs)
    seed: int | None = None
    while True:  # nearly always once
        try:
            # an RLock, 0.14 µs: a user's __del__ may run tensor code while the garbage collector interrupts us here
            with context.lock:
                trace = context.trace
                changes = trace.changes  # no call since the line above: whatever comes later is seen at the commit
                interrupted = trace.unfinished
                if interrupted is not None:  # 15 ns, as for each store to it below
                    executor.finish_interrupted(context)
                    trace = context.trace
                    changes = trace.changes
                    interrupted = trace.unfinished
                if trace.cursor.depth >= config.max_trace_length:
                    raise _StepOut(executor.reset_trim_counter)
                if trace.default_dtype is not get_default_dtype():  # stored metadata may rest on it
                    raise _StepOut(executor.change_default_dtype)
                epoch = trace.epoch
                key: list[Any] = [id(op)]
                trace.unfinished = key  # see Note [Interruption]
                try:
                    # `_add_tokens`, written out: a call of it costs 0.3 µs, and most arguments are tensors and numbers
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
                    # Any: the kinds are told apart by class below, and an isinstance for the type checker would cost
                    # 40 ns
                    node: Any
                    result: Any
                    # only now: an operand's first use may itself have recorded something
                    cursor = trace.cursor
                    if cursor.next_key == full_key:
                        node = cursor.next
                    else:
                        node = cursor.branch(full_key)
                        if node is None:
                            if cursor is context.eager_root:
                                raise NotRecordable(EAGER)
                            if trace.computed or (config.first_sight == "run" and executor.rules.allows_execution):
                                made = _run_unseen(context, trace, changes, full_key, op, args, kwargs)
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
                            trace.pending.append(data)  # strongly: no known call follows in a computed trace
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
                        # before `unfinished` is put back: were this interrupted, a known call might follow in a
                        # computed trace, and nobody would compute it
                        trace.roll_back()
                        executor.defer_again(context)
                    _undo(context, trace, interrupted)
                    raise
                # the commit; no call between the question and the store
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


def _undo(context: DeviceContext, trace: Trace, interrupted: Any) -> None:
    """A call that is not recorded leaves nothing behind, or the path would no longer name the program."""
    trace.roll_back()
    trace.unfinished = interrupted
    context.outside.clear()


def _check_uninterrupted(trace: Trace, changes: int) -> None:
    """Raises `_Interrupted`, so that what rests on the state of the trace is not kept."""
    if trace.changes != changes:
        raise _Interrupted


def _add_tokens(
    trace: Trace, context: DeviceContext, op: Any, key: list[Any], args: Sequence[Any], in_list: bool = False
) -> None:
    """Append what stands for `args` in a key; floats and tensors from outside go to the trace."""
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
    """What stands for an argument of a rare type."""
    if isinstance(arg, torch.Tensor):
        if op._schema.name in HOST_OPERAND_OPS:
            raise NotRecordable("it reads lengths on the CPU")
        is_index = in_list and op._schema.name in INDEX_OPS
        data = operand_from_outside(context, op, arg, is_index)
        return data.token if data.epoch is trace.epoch else enter(trace, context, data)
    if isinstance(arg, torch.device):
        # lazy:0 names the context, which owns the trie
        return "lazy" if arg.type == "lazy" else arg
    if isinstance(arg, complex):
        return (_COMPLEX, repr(arg))
    if isinstance(arg, torch.Generator):
        raise NotRecordable("it takes its random numbers from a torch.Generator")
    raise NotRecordable(f"it takes a {type(arg).__name__}")


def enter(trace: Trace, context: DeviceContext, data: TensorData) -> Any:
    """Make `data`, which this trace has not used yet, an input; return what stands for it in the key."""
    storage = data.storage
    if data.context is not context:
        raise DeviceError(
            f"expected all tensors to be on the same device, but found {context.device} and {data.context.device}\n"
            f"  at {user_site()}\n  move one of them, as in tensor.to({str(context.device)!r})"
        )
    if storage.error is not None:
        raise poisoned(storage)
    if storage.token is UNWRITTEN and storage.tensor is None:
        if trace.cursor is context.eager_root:
            storage.tensor = run_clean(empty_of, storage.meta, context.backing)
        else:
            _record_empty(context, trace, storage)
            if data is storage:
                return data.token
    group = trace.groups.setdefault(storage, len(trace.groups))
    token = INPUTS[len(trace.inputs)]
    if data.epoch is trace.epoch:  # by a signal handler or a finalizer, meanwhile: it has its token
        raise _Interrupted
    # in this order, with no call before the last line: whatever comes in between, `roll_back` finds what was entered
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


def _run_unseen(
    context: DeviceContext,
    trace: Trace,
    changes: int,
    full_key: tuple[Any, ...],
    op: torch._ops.OpOverload,
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
        executor.catch_up(context, changes)
    _check_uninterrupted(trace, changes)
    real = RealCall(context)
    seed: int | None = None
    begin = perf_counter()
    if traits.draws:
        output, seed = _run_drawing(real, op, args, kwargs)
    else:
        output = real.run(op, args, kwargs, None)
    trace.run_seconds += perf_counter() - begin
    try:
        if traits.schema.mutates and real.resized():
            raise NotRecordable("it resizes an operand")
        call = describe(context, op, args, kwargs, output, real.source_of, entered)
    except NotRecordable as reason:
        if trace.changes != changes:
            return _return_unrecorded(context, op, real, output)
        _end_after(context, trace, full_key, op, str(reason))
        return real.to_lazy(output)  # after the cut: it changes operands, and with them what is alive
    if seed is not None:
        trace.seeds.append(seed)
    results = _make_results(context, trace, call, args, kwargs)
    _give_values(call, results, output)
    if trace.changes != changes:
        # it has run, and cannot be recorded where it stood: what came in between left the trace, or goes on there
        return _return_unrecorded(context, op, real, output)
    node = _add_node(context, cursor, full_key, call)
    # the commit, as in `record`
    if trace.changes == changes:
        trace.cursor = node
        context.outside.clear()
        return results
    return _return_unrecorded(context, op, real, output)


def _return_unrecorded(context: DeviceContext, op: torch._ops.OpOverload, real: RealCall, output: Any) -> Any:
    """The results of a call that has run while a signal handler or a finalizer recorded something."""
    _undo(context, context.trace, None)
    executor.cut(context, f"{op}: something was recorded while it ran")
    return real.to_lazy(output)


def _run_drawing(
    real: RealCall, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, int | None]:
    """What a call gives that may draw random numbers, and the seed they came from if it took one."""
    generator = rng.generator_in_use()
    before = generator.get_state()
    seed = draw_seed_for(op, args, kwargs)
    try:
        return real.run(op, args, kwargs, seed), seed
    except BaseException:
        generator.set_state(before)  # a call that fails draws nothing
        raise


def _fake_decides(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether to ask the fake kernel before running, of an op that has the trait: of a power, only for booleans."""
    if op.namespace not in ("aten", "prims") or op is aten._padded_dense_to_jagged_forward.default:
        return True
    return any(arg.dtype == torch.bool for arg in flat(list(args)) if isinstance(arg, torch.Tensor))


def _end_after(
    context: DeviceContext, trace: Trace, key: tuple[Any, ...], op: torch._ops.OpOverload, reason: str
) -> None:
    """A call that turned out not to be recordable has run already: the trace ends before it, as it will next time."""
    _add_node(context, trace.cursor, key, Cut(reason))
    _undo(context, trace, None)
    count_fallback(op, reason)
    executor.cut(context, f"{op}: {reason}")


def _give_values(call: Call, results: Any, output: Any) -> None:
    """Put the memory of real results behind the lazy ones that have memory of their own."""
    single = call.single
    if single is not None:
        if single.__class__ is Fresh:
            results._data.tensor = _owned(output, single.meta)
        return
    taken: set[int] = set()
    for result, tensor, value in zip(call.results, results or (), output or (), strict=True):
        if isinstance(result, Fresh):
            place = value.untyped_storage()._cdata
            tensor._data.tensor = _owned(value.clone() if place in taken else value, result.meta)
            taken.add(place)


def _owned(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """`value`, which was described as `meta`, as the tensor of a storage: at its start, without bits."""
    return conform(value, meta) if value.storage_offset() or value.is_conj() else value


# ----- an unseen call: infer, describe, add to the trie


def _add_unseen(
    context: DeviceContext,
    trace: Trace,
    changes: int,
    full_key: tuple[Any, ...],
    op: torch._ops.OpOverload,
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
    """The inputs that a key introduces; their tokens are the latest of the trace."""
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
            elif head.__class__ is not int:  # a list of sizes otherwise
                _find_entered(part, found)


# ----- factories and tensors from outside


def record_factory(
    context: DeviceContext, op: torch._ops.OpOverload, args: Sequence[Any], **options: Any
) -> LazyTensor:
    """Record a call without tensor operands, such as `aten.zeros`, on `context`."""
    return record(op, args, {**options, "device": context.device})  # type: ignore[no-any-return]


def _record_empty(context: DeviceContext, trace: Trace, storage: LazyStorage) -> None:
    """Record the allocation of memory that was asked for before and is used only now."""
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


def _empty_call(context: DeviceContext, cursor: TrieNode[Call | Cut], meta: TensorMeta) -> Call:
    return Call(
        op=aten.empty_strided.default,
        args=(meta.shape, meta.stride),
        kwargs=(("dtype", meta.dtype), ("device", context.backing)),
        results=(Fresh(SLOTS[num_slots_of(cursor)], meta, wrapper_arguments(context, meta)),),
        returns_list=False,
        mutates=(),
        entered=(),
        num_constants=0,
        seeded=False,
        num_slots=num_slots_of(cursor) + 1,
        site=user_site(),
        frames=further_frames(),
    )


def _find_context(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceContext:
    """The device of a call: that of its first lazy operand, or the one it names."""
    first = args[0] if args else None
    if first.__class__ is list and first and first[0].__class__ is LazyTensor:  # foreach ops
        return first[0]._data.context  # type: ignore[no-any-return]
    for arg in (*flat(list(args)), *flat(list(kwargs.values()))):
        if isinstance(arg, LazyTensor):
            return arg._data.context
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "lazy":
        return contexts.get_device_context(device.index)
    raise LazyBackendError(f"internal error: {op} reached the lazy device without a lazy operand")
