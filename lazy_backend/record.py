"""Record operator calls: the hot path.

In: one dispatched aten call. Out: lazy tensors, made from stored metadata.
A call seen before at this place of the program takes one step down the trie: no inference, no graph, no hashing of
anything but its own tokens. It allocates a key (a tuple), a tensor and a `LazyStorage`, nothing else.

Note [What is in a key]
Operator, tokens of tensors, structural arguments (ints, bools, dtypes, strings) and, at a tensor's first use, its
geometry and alias group. Not in it: floats (placeholders, the values go to the trace's constants), seeds, user lines.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch

# internal, checked on 2.13: the public torch.library.opcheck asks the same, by calling the operator
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from lazy_backend import metrics, probe
from lazy_backend.cache.constants import ConstantKey, DataCacheArena
from lazy_backend.cache.trie import TrieNode
from lazy_backend.context import DeviceContext, contexts
from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.lowering import rng
from lazy_backend.lowering.ir import Constant, TensorMeta, empty_of, intern_meta, meta_of
from lazy_backend.lowering.program import INPUTS, SLOTS, Call, Cut, Entered, Fresh, Result, Same, View
from lazy_backend.lowering.schema import Operand, OpSchema, schema_of
from lazy_backend.settings import config
from lazy_backend.sites import user_site
from lazy_backend.sync import executor
from lazy_backend.tensor import (
    UNWRITTEN,
    LazyStorage,
    LazyTensor,
    TensorData,
    ViewData,
    assign,
    backing_tensor,
    make,
    poisoned,
    wrap,
    wrapper_arguments,
)
from lazy_backend.trace import Trace

aten = torch.ops.aten

# a global of ours: 20 ns less than the attribute of `torch`, on every call
get_default_dtype = torch.get_default_dtype

_NO_KWARGS: dict[str, Any] = {}
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


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

# by id: OpOverload.__hash__ is a Python function, 74 ns against 36
_handlers: dict[int, Handler] = {}


# Ops with a list of numbers, ints among floats. Other lists that start with an int hold ints only.
_scalar_list_ops: set[int] = set()

# Ops whose result may change its shape with a float, as `arange(0, 1, 0.1)`: there floats are structure, not data. What
# a custom operator does with a float nobody knows.
_float_shaped_ops: set[int] = set()
_FLOAT_SHAPED = frozenset(("aten::arange", "aten::range"))


def add_handler(op: torch._ops.OpOverload, handler: Handler) -> None:
    _handlers[id(op)] = handler


class _NotRecordable(Exception):
    """This call must run at once; the text says why."""


def dispatch(op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """`LazyTensor.__torch_dispatch__`."""
    handler = _handlers.get(id(op)) or _choose_handler(op)
    return handler(op, args, kwargs or _NO_KWARGS)


def _choose_handler(op: torch._ops.OpOverload) -> Handler:
    """How to treat an operator that arrives for the first time."""
    # composite operators arrive whole only where autograd is off altogether, in inference mode
    handler: Handler = _decompose if op._can_decompose() else record
    learn(op)
    add_handler(op, handler)
    return handler


def learn(op: torch._ops.OpOverload) -> None:
    """Note what the tokens of `op`'s arguments depend on. Before its first `record`."""
    arguments = op._schema.arguments
    if any(str(argument.type) == "List[number]" for argument in arguments):
        _scalar_list_ops.add(id(op))
    scaled = any(argument.name == "scale_factors" for argument in arguments)
    if scaled or op.namespace not in ("aten", "prims") or op._schema.name in _FLOAT_SHAPED:
        _float_shaped_ops.add(id(op))


def _decompose(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op.decompose(*args, **kwargs)


def record(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a call, or run it at once if it cannot be recorded. Returns what the operator returns."""
    first: Any = args[0] if args else None
    context = first._data.context if first.__class__ is LazyTensor else _find_context(op, args, kwargs)
    # an RLock, 0.14 µs: a user's __del__ may run tensor code while the garbage collector interrupts us here
    with context.lock:
        trace = context.trace
        if trace.cursor.depth >= config.max_trace_length:
            executor.reset_trim_counter(context)
            trace = context.trace
        if trace.default_dtype is not get_default_dtype():  # stored metadata may rest on it
            executor.change_default_dtype(context)
            trace = context.trace
        epoch = trace.epoch
        try:
            key: list[Any] = [id(op)]
            # `_add_tokens`, written out: a call of it costs 0.3 µs, and most arguments are tensors and numbers
            for arg in args:
                kind = arg.__class__
                if kind is LazyTensor:
                    data = arg._data
                    key.append(data.token if data.epoch is epoch else enter(trace, context, data))
                elif kind in _PLAIN:
                    key.append(arg)
                elif kind is list and arg and arg[0].__class__ is int and key[0] not in _scalar_list_ops:
                    key.append(tuple(arg))
                else:
                    _add_tokens(trace, context, op, key, (arg,))
            if kwargs:
                for name, value in kwargs.items():
                    key.append(name)
                    _add_tokens(trace, context, op, key, (value,))
            full_key = tuple(key)
            # Any: the kinds are told apart by class below, and an isinstance for the type checker would cost 40 ns
            node: Any
            result: Any
            # only now: an operand's first use may itself have recorded something
            cursor = trace.cursor
            if cursor.next_key == full_key:
                node = cursor.next
            else:
                node = cursor.children.get(full_key)
                if node is None:
                    node = _add_unseen(context, cursor, full_key, op, args, kwargs)
                cursor.next_key, cursor.next = full_key, node
            result = node.shortcut
            if result is None:
                call: Any = node.call
                if call.__class__ is Cut:
                    raise _NotRecordable(call.reason)
        except _NotRecordable as reason:
            _undo(context, trace)
            return run_at_once(context, op, args, kwargs, str(reason))
        except BaseException:
            _undo(context, trace)
            raise
        trace.cursor = node
        if context.outside:
            context.outside.clear()
        if result is None:
            if call.seeded:
                trace.seeds.append(contexts.get_rng_seed())
            return _make_results(context, trace, call, args, kwargs)
        kind = result.__class__
        if kind is Fresh:
            data = LazyStorage(context, epoch, result.token, result.meta)
            trace.pending.append(ref(data))
        elif kind is View:
            of = first if result.of_first else _operand(result.path, args, kwargs)
            data = ViewData(context, epoch, result.token, result.meta, of._data.storage)
        else:
            return _operand(result.path, args, kwargs)
        tensor = make(LazyTensor, *result.wrapper)
        tensor._data = data
        return tensor


def _undo(context: DeviceContext, trace: Trace) -> None:
    """A call that is not recorded leaves nothing behind, or the path would no longer name the program."""
    trace.roll_back()
    context.outside.clear()


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
            if id(op) in _float_shaped_ops:
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
        if op._schema.name in _HOST_OPERAND_OPS:
            raise _NotRecordable("it reads lengths on the CPU")
        is_index = in_list and op._schema.name in _INDEX_OPS
        data = _operand_from_outside(context, op, arg, is_index)
        return data.token if data.epoch is trace.epoch else enter(trace, context, data)
    if isinstance(arg, torch.device):
        # lazy:0 names the context, which owns the trie
        return "lazy" if arg.type == "lazy" else arg
    if isinstance(arg, complex):
        return (_COMPLEX, repr(arg))
    if isinstance(arg, torch.Generator):
        raise _NotRecordable("it takes its random numbers from a torch.Generator")
    raise _NotRecordable(f"it takes a {type(arg).__name__}")


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
        _record_empty(context, trace, storage)
        if data is storage:
            return data.token
    group = trace.groups.setdefault(storage, len(trace.groups))
    data.epoch = trace.epoch
    data.token = INPUTS[len(trace.inputs)]
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
        trace.pending.append(ref(data))
    elif kind is View:
        of = _operand(result.path, args, kwargs)._data
        data = ViewData(context, trace.epoch, result.token, result.meta, of.storage)
    elif kind is Same:
        return _operand(result.path, args, kwargs)
    else:
        return None
    tensor = make(LazyTensor, *result.wrapper)
    tensor._data = data
    return tensor


def _operand(path: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument at `path`: a place or a name, then a place in a list."""
    head = path[0]
    found = args[head] if head.__class__ is int else kwargs[head]  # type: ignore[index]
    for place in path[1:]:
        found = found[place]
    return found


# ----- an unseen call: infer, describe, add to the trie


def _add_unseen(
    context: DeviceContext,
    cursor: TrieNode[Call | Cut],
    key: tuple[Any, ...],
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> TrieNode[Call | Cut]:
    """Describe a call seen for the first time at this place. Errors of the operator itself are raised here."""
    call: Call | Cut
    try:
        call = _describe(context, op, args, kwargs, _entered(context, key))
    except _NotRecordable as reason:
        call = Cut(str(reason))
    return _add_node(context, cursor, key, call)


def _add_node(
    context: DeviceContext, cursor: TrieNode[Call | Cut], key: tuple[Any, ...], call: Call | Cut
) -> TrieNode[Call | Cut]:
    node = context.trie.add(cursor, key, call)
    if isinstance(call, Call) and not call.seeded:
        # most calls have one result: with it on the node, a hit does not touch the call (a cache line or two)
        node.shortcut = call.single
    return node


def _entered(context: DeviceContext, key: tuple[Any, ...]) -> tuple[Entered, ...]:
    """The inputs that a key introduces; their tokens are the latest of the trace."""
    found: list[tuple[TensorMeta, int, TensorMeta]] = []

    def visit(part: Any) -> None:
        if isinstance(part, tuple):
            if part and part[0] is _ENTER:
                found.append(part[1:])
            else:
                for item in part:
                    visit(item)

    visit(key)
    start = len(context.trace.inputs) - len(found)
    return tuple(Entered(INPUTS[start + place], meta, group, base) for place, (meta, group, base) in enumerate(found))


def _describe(
    context: DeviceContext,
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    entered: tuple[Entered, ...],
) -> Call:
    """The `Call` for these arguments. Raises `_NotRecordable`, or what eager would raise for them."""
    schema = schema_of(op)
    _refuse_quantized(args)
    mutated = _flat([_lookup(operand, args, kwargs) for operand in schema.mutates])
    indexed = [args[0]] if op._schema.name in _INDEX_OPS else []
    for target in (*mutated, *indexed):
        if isinstance(target, torch.Tensor) and not isinstance(target, LazyTensor):
            raise _mixed_devices(context, op, target)
    seeded = rng.draws_random_numbers(op, args)
    if seeded and not rng.can_seed(op):
        raise _NotRecordable("it draws random numbers and takes no generator")
    if config.force_fallback and op._schema.name in config.force_fallback.split(","):
        raise _NotRecordable("config.force_fallback names it")
    inference = _Inference(context)
    output = inference.run(op, args, kwargs, schema)
    converter = _Converter(context, op)
    call_args = tuple(converter.convert(arg) for arg in args)
    call_kwargs = tuple((name, converter.convert(arg)) for name, arg in kwargs.items())
    results = _describe_results(context, op, args, kwargs, output, inference, schema)
    return Call(
        op=op,
        args=call_args,
        kwargs=call_kwargs,
        results=results,
        returns_list=schema.returns_list,
        mutates=tuple(t._data.token for t in mutated if isinstance(t, LazyTensor) and t._data.token),
        entered=entered,
        num_constants=converter.num_constants,
        seeded=seeded,
        num_slots=_num_slots(context.trace.cursor) + sum(isinstance(result, Fresh | View) for result in results),
        site=user_site(),
    )


_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def _refuse_quantized(args: Sequence[Any]) -> None:
    if any(arg in _QUANTIZED for arg in args if isinstance(arg, torch.dtype)):
        raise LazyBackendError(
            f"a quantised tensor cannot be lazy\n  at {user_site()}\n  compute it on the CPU, as in tensor.cpu()"
        )


def _lookup(operand: Operand, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[operand.place] if operand.place < len(args) else kwargs.get(operand.name)


def _flat(arg: Any) -> list[Any]:
    if isinstance(arg, list | tuple):
        return [leaf for item in arg for leaf in _flat(item)]
    return [arg]


class _Converter:
    """Arguments of a call as they stand in a `Call`: tokens, constants in order, literals, lists as tuples."""

    def __init__(self, context: DeviceContext, op: torch._ops.OpOverload) -> None:
        self.context = context
        self.floats_are_structure = id(op) in _float_shaped_ops
        self.num_constants = 0

    def convert(self, arg: Any) -> Any:
        if isinstance(arg, LazyTensor):
            return arg._data.token
        if isinstance(arg, torch.Tensor):
            return self.context.outside[arg].token
        if isinstance(arg, list | tuple):
            return tuple(self.convert(item) for item in arg)
        if isinstance(arg, torch.device):
            return self.context.backing
        if isinstance(arg, float) and not self.floats_are_structure:
            self.num_constants += 1
            return Constant(self.num_constants - 1)
        return arg


class _Inference:
    """One call on fake tensors of the backing device."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.fakes: list[tuple[TensorData, FakeTensor]] = []

    def run(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], schema: OpSchema) -> Any:
        """What the call gives. Raises `_NotRecordable`, or eager's error."""
        if torch.Tag.dynamic_output_shape in op.tags and op is not aten.index.Tensor:  # index: only with a mask
            raise _NotRecordable("its output depends on values")
        if not has_fake_kernel(op):
            raise _NotRecordable("it has no fake kernel")
        if probe.checks_more_than_its_fake(op):
            probe.try_tiny(op, args, kwargs, self._meta)
        try:
            output = self._infer(op, args, kwargs, schema)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise _NotRecordable("its output depends on values") from None
        except (UnsupportedOperatorException, NotImplementedError):
            raise _NotRecordable("it has no fake kernel") from None
        except Exception:
            if not rng.draws_random_numbers(op, args):
                probe.try_zeros(op, args, kwargs, self._meta)
            raise
        for data, fake in self.fakes:
            if tuple(fake.shape) != data.meta.shape:
                raise _NotRecordable("it resizes an operand")
        return output

    def _infer(
        self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], schema: OpSchema
    ) -> Any:
        mutated = {id(t) for operand in schema.mutates for t in _flat(_lookup(operand, args, kwargs))}
        _fake_log.disabled = True  # it would print what is about to be raised
        try:
            with _fake_mode(self.context), torch.no_grad():
                fake_args = [self._fake(arg, mutated) for arg in args]
                fake_kwargs = {name: self._fake(arg, mutated) for name, arg in kwargs.items()}
                return op(*fake_args, **fake_kwargs)
        finally:
            _fake_log.disabled = False

    def _meta(self, arg: Any) -> Any:
        """(geometry, device) of a tensor, for `probe`."""
        if isinstance(arg, torch.Tensor):
            data = arg._data if isinstance(arg, LazyTensor) else self.context.outside[arg]
            return data.meta, self.context.backing
        if isinstance(arg, torch.device):
            return self.context.backing if arg.type == "lazy" else arg
        return arg

    def _fake(self, arg: Any, mutated: set[int]) -> Any:
        if isinstance(arg, torch.Tensor):
            data = arg._data if isinstance(arg, LazyTensor) else self.context.outside[arg]
            return self._fake_of(data, cached=id(arg) not in mutated)
        if isinstance(arg, list | tuple):
            return [self._fake(item, mutated) for item in arg]
        if isinstance(arg, torch.device):
            return self.context.backing if arg.type == "lazy" else arg
        return arg

    def _fake_of(self, data: TensorData, cached: bool) -> FakeTensor:
        """A fake of the same geometry. Kept per geometry (making one costs 25 µs), but used once in a call."""
        for known, held in self.fakes:
            if known is data:
                return held
        fakes = self.context.fakes
        fake = fakes.get(data.meta) if cached else None
        if fake is None or any(fake is used for _, used in self.fakes):
            fake = _make_fake(data.meta, self.context.backing)
            if cached:
                if len(fakes) > 4096:
                    fakes.clear()
                fakes.setdefault(data.meta, fake)
        self.fakes.append((data, fake))
        return fake

    def source_of(self, fake: torch.Tensor) -> TensorData | None:
        """The operand whose memory a fake result shares, if any."""
        place = fake.untyped_storage()._cdata
        for data, operand in self.fakes:
            if operand.untyped_storage()._cdata == place:
                return data
        return None


def _fake_mode(context: DeviceContext) -> FakeTensorMode:
    # one per context, whose lock is held: a mode is not to be entered by two threads
    if context.fake_mode is None:
        context.fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=False)
    return context.fake_mode  # type: ignore[no-any-return]


def _make_fake(meta: TensorMeta, device: torch.device) -> Any:
    fake = empty_of(meta, device)
    fake = fake.conj() if meta.conj else fake
    return torch._neg_view(fake) if meta.neg else fake


def _describe_results(
    context: DeviceContext,
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    inference: _Inference,
    schema: OpSchema,
) -> tuple[Result, ...]:
    outputs = list(output) if isinstance(output, list | tuple) else [] if output is None else [output]
    slot = _num_slots(context.trace.cursor)
    results: list[Result] = []
    for place, fake in enumerate(outputs):
        alias = schema.returns[0 if schema.returns_list else place]
        if fake is None:
            results.append(None)
            continue
        if not isinstance(fake, torch.Tensor):
            raise _NotRecordable(f"it returns a {type(fake).__name__}")
        if fake.layout != torch.strided:
            raise LazyBackendError(
                f"{op} gives a {str(fake.layout).removeprefix('torch.')} tensor, which lazy tensors cannot be\n"
                f"  at {user_site()}\n  compute it on the CPU, as in tensor.cpu()"
            )
        if alias.kind == "same":
            assert alias.operand is not None
            path = _path_of(alias.operand, args)
            results.append(Same(_operand(path, args, kwargs)._data.token, path))
            continue
        source = inference.source_of(fake)
        if source is None:
            meta = _base_meta(fake)
            results.append(Fresh(SLOTS[slot], meta, wrapper_arguments(context, meta)))
        else:
            path = _path_to(source, args, kwargs)
            assert source.token is not None
            meta = meta_of(fake)
            results.append(View(SLOTS[slot], meta, source.token, path, wrapper_arguments(context, meta)))
        slot += 1
    return tuple(results)


def _num_slots(cursor: TrieNode[Call | Cut]) -> int:
    """Slots made on the way to `cursor`."""
    return cursor.call.num_slots if isinstance(cursor.call, Call) else 0


def _base_meta(fake: torch.Tensor) -> TensorMeta:
    return intern_meta(tuple(fake.shape), tuple(fake.stride()), 0, fake.dtype)


def _path_of(operand: Operand, args: Sequence[Any]) -> tuple[int | str, ...]:
    return (operand.place,) if operand.place < len(args) else (operand.name,)


def _path_to(data: TensorData, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Where among the arguments `data` stands."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for head, arg in places:
        if isinstance(arg, LazyTensor) and arg._data is data:
            return (head,)
        if isinstance(arg, list | tuple):
            for place, item in enumerate(arg):
                if isinstance(item, LazyTensor) and item._data is data:
                    return (head, place)
    raise LazyBackendError("internal error: a result shares memory with no operand\n  please report the program")


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
    cursor = trace.cursor
    node = cursor.children.get(key)
    if node is None:
        node = context.trie.add(cursor, key, _empty_call(context, cursor, meta))
    made: Any = node.call
    trace.cursor = node
    storage.epoch = trace.epoch
    storage.token = made.single.token
    trace.pending.append(ref(storage))


def _empty_call(context: DeviceContext, cursor: TrieNode[Call | Cut], meta: TensorMeta) -> Call:
    return Call(
        op=aten.empty_strided.default,
        args=(meta.shape, meta.stride),
        kwargs=(("dtype", meta.dtype), ("device", context.backing)),
        results=(Fresh(SLOTS[_num_slots(cursor)], meta, wrapper_arguments(context, meta)),),
        returns_list=False,
        mutates=(),
        entered=(),
        num_constants=0,
        seeded=False,
        num_slots=_num_slots(cursor) + 1,
        site=user_site(),
    )


def new_unwritten(context: DeviceContext, meta: TensorMeta) -> LazyTensor:
    """A tensor whose memory is recorded at its first use, so that an upload into it leaves no trace."""
    storage = LazyStorage(context, None, UNWRITTEN, meta)
    context.register_tensor(storage)
    context.count_created()
    return wrap(storage)


def new_data(context: DeviceContext, tensor: torch.Tensor) -> LazyStorage:
    """A storage that holds `tensor`, a real tensor on the backing device that nobody else writes to."""
    base = tensor
    if tensor.storage_offset():
        base = tensor.clone()
    storage = LazyStorage(context, None, None, meta_of(base))
    storage.tensor = base
    context.register_tensor(storage)
    context.count_created()
    return storage


# Host constants that were uploaded once; read-only, shared by as many inputs as have the value.
data_cache: DataCacheArena[torch.Tensor] = DataCacheArena(config.constants_cache_entries, config.constants_cache_bytes)
_counted_before: Counter[str] = Counter()


def _data_cache_counters() -> Counter[str]:
    hits, misses = data_cache.counts()
    counted = Counter(DeviceDataCacheHit=hits, DeviceDataCacheMiss=misses)
    counted.subtract(_counted_before)
    return counted


def _reset_data_cache_counters() -> None:
    _counted_before.update(_data_cache_counters())


metrics.add_source(metrics.Source(_data_cache_counters, _reset_data_cache_counters))


def upload(context: DeviceContext, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` on the backing device; 0-d tensors come from the constants cache and must not be written."""
    tensor = tensor.detach()
    if tensor.dim() or tensor.device.type != "cpu":
        return tensor.to(context.backing, copy=True)
    key = ConstantKey(tensor.dtype, (), bytes(tensor.reshape(1).view(torch.uint8).tolist()))
    return data_cache.get_data_cache(context.index).get_device_data(key, lambda: tensor.to(context.backing, copy=True))


# Ops that take index tensors on the CPU, as they do beside a CUDA tensor.
_INDEX_OPS = frozenset(
    ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")
)


# Ops whose lengths must be on the CPU, beside a tensor on any device.
_HOST_OPERAND_OPS = frozenset(("aten::_pack_padded_sequence",))


def _operand_from_outside(context: DeviceContext, op: Any, tensor: torch.Tensor, is_index: bool) -> TensorData:
    """Data for an operand that is not lazy: a 0-d CPU tensor, or an index. Anything else is a mistake."""
    known = context.outside.get(tensor)
    if known is not None:
        return known
    if tensor.device.type != "cpu" or (tensor.dim() and not is_index):
        raise _mixed_devices(context, op, tensor)
    data = new_data(context, upload(context, tensor))
    context.outside[tensor] = data
    return data


def _mixed_devices(context: DeviceContext, op: Any, tensor: torch.Tensor) -> DeviceError:
    return DeviceError(
        f"expected all tensors to be on the same device, but found {context.device} and {tensor.device} in "
        f"{op._schema.name}\n  at {user_site()}\n  move one of them, as in tensor.to({str(context.device)!r})"
    )


def _find_context(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceContext:
    """The device of a call: that of its first lazy operand, or the one it names."""
    first = args[0] if args else None
    if first.__class__ is list and first and first[0].__class__ is LazyTensor:  # foreach ops
        return first[0]._data.context  # type: ignore[no-any-return]
    for arg in (*_flat(list(args)), *_flat(list(kwargs.values()))):
        if isinstance(arg, LazyTensor):
            return arg._data.context
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == "lazy":
        return contexts.get_device_context(device.index)
    raise LazyBackendError(f"internal error: {op} reached the lazy device without a lazy operand")


# ----- calls that are not recorded


def run_at_once(
    context: DeviceContext, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str
) -> Any:
    """Run a call on the backing device, after everything recorded before it. Counted with op, reason and line."""
    metrics.increment(op._schema.name)
    metrics.increment(f"Fallback: {op} ({reason}) at {user_site()}")
    executor.cut(context, f"{op}: {reason}")
    runner = _RunAtOnce(context)
    with torch.no_grad():
        output = op(
            *(runner.to_real(arg) for arg in args), **{name: runner.to_real(arg) for name, arg in kwargs.items()}
        )
    runner.update_operands()
    return runner.to_lazy(output)


class _RunAtOnce:
    """Lazy arguments as real ones and real results as lazy ones, with their aliasing."""

    def __init__(self, context: DeviceContext) -> None:
        self.context = context
        self.operands: list[tuple[LazyTensor, torch.Tensor]] = []

    def to_real(self, arg: Any) -> Any:
        if isinstance(arg, LazyTensor):
            real = backing_tensor(arg._data)
            self.operands.append((arg, real))
            return real
        if isinstance(arg, list | tuple):
            return [self.to_real(item) for item in arg]
        if isinstance(arg, torch.device) and arg.type == "lazy":
            return self.context.backing
        return arg

    def update_operands(self) -> None:
        """Follow operands that were resized."""
        for lazy, real in self.operands:
            meta = meta_of(real)
            if meta is lazy._data.meta:
                continue
            storage = lazy._data.storage
            if lazy._data is storage:
                moved = LazyStorage(self.context, None, None, meta)
                moved.tensor = real
                self.context.register_tensor(moved)
                assign(lazy, moved)
            else:
                assign(lazy, ViewData(self.context, None, None, meta, storage))

    def to_lazy(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return self._wrap(output)
        if isinstance(output, list):
            return [self.to_lazy(item) for item in output]
        if isinstance(output, tuple):
            return tuple(self.to_lazy(item) for item in output)
        return output

    def _wrap(self, real: torch.Tensor) -> torch.Tensor:
        for lazy, operand in self.operands:
            if operand is real:
                return lazy
        if real.layout != torch.strided:
            raise LazyBackendError(
                f"a {str(real.layout).removeprefix('torch.')} tensor cannot be lazy\n  at {user_site()}\n"
                "  compute it on the CPU, as in tensor.cpu()"
            )
        place = real.untyped_storage()._cdata
        for lazy, operand in self.operands:
            if operand.untyped_storage()._cdata == place:
                return wrap(ViewData(self.context, None, None, meta_of(real), lazy._data.storage))
        return wrap(new_data(self.context, real))
