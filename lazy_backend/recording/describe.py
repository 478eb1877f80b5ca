"""Turn a call and its results into the `Call` that the trie stores.

In: the arguments, the operator's results (real or fake tensors), and which results share an operand's memory.
Out: a `Call` with tokens for tensors and `Constant`s for floats. Used only for calls seen for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.cache.trie import TrieNode
from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import further_frames, user_site
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import Constant, intern_meta, is_contiguous, meta_of
from lazy_backend.lowering.ir.program import SLOTS, Call, Cut, Entered, Fresh, Result, Same, Token, View
from lazy_backend.lowering.ir.schema import OpSchema
from lazy_backend.ports.dispatcher import OpOverload, function_schema
from lazy_backend.recording.arguments import LITERALS, mutated_arguments, operand_at, path_of, path_to
from lazy_backend.recording.operators import INDEX_OPS, NotRecordable, Traits, float_shaped_ops, traits_of
from lazy_backend.settings import config
from lazy_backend.tensors.outside import mixed_devices, quantized_error
from lazy_backend.tensors.sparse_tensor import SPARSE_LAYOUTS
from lazy_backend.tensors.state import DeviceContext, TensorData
from lazy_backend.tensors.tensor import LazyTensor, wrapper_arguments

aten = torch.ops.aten

# Why a call runs at once. See Note [Sparse tensors are opaque]
GIVES_SPARSE = "it gives a sparse tensor"

# Finds the operand whose memory a result shares, if any
SourceOf = Callable[[torch.Tensor], TensorData | None]


def check_recordable(context: DeviceContext, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `NotRecordable` for a call that must run at once, or an error for operands that no operator takes."""
    for arg in args:
        if arg.__class__ is torch.dtype and arg in _QUANTIZED:
            raise quantized_error()
    traits = traits_of(op)
    if traits.is_checked:
        _check_arguments(context, op, args, kwargs, traits)
    if config.force_fallback and function_schema(op).name in config.force_fallback.split(","):
        raise NotRecordable("config.force_fallback names it")


def _check_arguments(
    context: DeviceContext, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], traits: Traits
) -> None:
    indexed = [args[0]] if function_schema(op).name in INDEX_OPS else []
    for target in (*mutated_arguments(op, args, kwargs), *indexed):
        if target.__class__ is not LazyTensor and isinstance(target, torch.Tensor):
            raise mixed_devices(context, op, target)
    if traits.draws and rng.draws_random_numbers(op, args) and not rng.can_seed(op):
        raise NotRecordable("it draws random numbers and takes no generator")
    if op is aten.as_strided_scatter.default and not _is_whole(args[0]._data):
        raise NotRecordable("it addresses memory around its operand")
    # `index` has the tag only because of masks
    if traits.runs_at_once and (op is not aten.index.Tensor or _has_mask(args[1])):
        raise NotRecordable(traits.runs_at_once)


def _is_whole(data: TensorData) -> bool:
    """Whether `data` is all of its memory, in order."""
    return data.meta is data.storage.meta and is_contiguous(data.meta)


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def describe(
    context: DeviceContext,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    source_of: SourceOf,
    entered: tuple[Entered, ...],
) -> Call:
    """The `Call` for these arguments and their results, `output`."""
    traits = traits_of(op)
    schema = traits.schema
    converter = _Converter(context, op)
    convert = converter.convert
    call_args = tuple([arg if arg.__class__ in LITERALS else convert(arg) for arg in args])
    call_kwargs = tuple([(name, convert(arg)) for name, arg in kwargs.items()]) if kwargs else ()
    first_slot = num_slots_of(context.trace.cursor)
    results, num_made = _describe_results(context, op, args, kwargs, output, source_of, schema, first_slot)
    mutates: tuple[Token, ...] = ()
    if schema.mutates:
        written = [t._data.token for t in mutated_arguments(op, args, kwargs) if t.__class__ is LazyTensor]
        mutates = tuple(filter(None, written))
    return Call(
        op=op,
        args=call_args,
        kwargs=call_kwargs,
        results=results,
        returns_list=schema.returns_list,
        mutates=mutates,
        entered=entered,
        num_constants=converter.num_constants,
        seeded=traits.draws and rng.draws_random_numbers(op, args),
        num_slots=first_slot + num_made,
        site=user_site(),
        frames=further_frames(),
    )


_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


class _Converter:
    """Converts arguments to the form a `Call` stores: tokens, numbered constants, literals, and tuples for lists."""

    def __init__(self, context: DeviceContext, op: OpOverload) -> None:
        self.context = context
        self.floats_are_structure = id(op) in float_shaped_ops
        self.num_constants = 0

    def convert(self, arg: Any) -> Any:
        kind = arg.__class__
        if kind is LazyTensor:
            return arg._data.token
        if kind in LITERALS:
            return arg
        if kind is list or kind is tuple:
            return tuple([self.convert(item) for item in arg])
        if isinstance(arg, torch.Tensor):
            return self.context.outside[arg].token
        if isinstance(arg, list | tuple):
            return tuple([self.convert(item) for item in arg])
        if isinstance(arg, torch.device):
            return self.context.backing
        if isinstance(arg, float) and not self.floats_are_structure:
            self.num_constants += 1
            return Constant(self.num_constants - 1)
        return arg


def _describe_results(
    context: DeviceContext,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: Any,
    source_of: SourceOf,
    schema: OpSchema,
    first_slot: int,
) -> tuple[tuple[Result, ...], int]:
    """The results, and how many of them take a slot."""
    outputs = output if isinstance(output, list | tuple) else () if output is None else (output,)
    slot = first_slot
    results: list[Result] = []
    for place, given in enumerate(outputs):
        if given is None:
            results.append(None)
            continue
        if not isinstance(given, torch.Tensor):
            raise NotRecordable(f"it returns a {type(given).__name__}")
        alias = schema.returns[0 if schema.returns_list else place]
        if alias.kind == "same":
            assert alias.operand is not None
            path = path_of(alias.operand, args)
            results.append(Same(operand_at(path, args, kwargs)._data.token, path))
            continue
        if given.layout is not torch.strided:
            raise _refusal(op, given)
        source = source_of(given)
        if source is None:
            meta = intern_meta(given.shape, given.stride(), 0, given.dtype)
            results.append(Fresh(SLOTS[slot], meta, wrapper_arguments(context, meta)))
        else:
            path = path_to(source, args, kwargs)
            assert source.token is not None
            meta = meta_of(given)
            results.append(View(SLOTS[slot], meta, source.token, path, wrapper_arguments(context, meta)))
        slot += 1
    return tuple(results), slot - first_slot


def num_slots_of(cursor: TrieNode[Call | Cut]) -> int:
    """The number of slots made on the path to `cursor`."""
    call = cursor.call
    return call.num_slots if isinstance(call, Call) else 0


def _refusal(op: OpOverload, given: torch.Tensor) -> Exception:
    """Why a result of another layout cannot be recorded."""
    if given.layout in SPARSE_LAYOUTS:
        return NotRecordable(GIVES_SPARSE)
    return LazyBackendError(
        f"{op} gives a {str(given.layout).removeprefix('torch.')} tensor, which lazy tensors cannot be\n"
        f"  at {user_site()}\n  compute it on the CPU, as in tensor.cpu()"
    )
