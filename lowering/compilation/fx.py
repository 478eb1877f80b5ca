"""Lower a graph to FX, which every torch.compile backend takes.

In: a graph, the values of its constants, and which of them become inputs. Out: an `fx.GraphModule` of aten calls.
Mutating and view ops are emitted as they are: AOTAutograd functionalises them, and writes inputs back in place.

Note [Strides of decompositions]
A graph was recorded with eager's strides, and asks for views that these allow. Compilers replace operators by
decompositions whose results may lie otherwise: that of `cat` in PyTorch 2.13 keeps the strides of its only operand that
is not empty, where eager's result is contiguous. Then a `view` that was possible is refused, as with the keys of a
Hugging Face model, which its cache concatenates with nothing; and `as_strided` would read other elements. So a `view`
is emitted as `reshape`, which is the same view if it is possible. Where the storage is written, a copy would miss the
write, so that the view stays one and a refusal is the compiler's error. What `as_strided` and its like read is laid out
as recorded when it is made: a copy, unless the compiler finds that it lies so.

Note [Memory written piece by piece]
A bucket of gradients of `DistributedDataParallel` is flat memory with a view for each parameter, into which its
gradient is written. AOTAutograd makes a new value of the whole bucket for each of these writes, and Inductor a kernel
that asks of every element which of all writes it belongs to: a third of the step of a small GPT. Where the pieces cover
the memory and nothing looks at it in between, each is computed apart, and they are joined and written at once.

Note [Dtypes of decompositions]
Kernels and the decompositions that compilers put in their place disagree on dtypes where operands differ in them: of a
norm of a bfloat16 input beside float32 weights, as autocast makes it, PyTorch's decompositions give statistics in
bfloat16, and a gradient of the input in float32. A later `mm` is then refused, or reads memory of one dtype as another.
So each call of such operands is run on fake tensors as the compiler will see it. Where its results have other dtypes
than were recorded, the call computes in the widest dtype of its operands and results, and its results are cast.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lazy_backend.lowering.checks.kernel_calls import original
from lazy_backend.lowering.checks.refusals import printed_call, require
from lazy_backend.lowering.checks.value_rules import ConditionArguments, checked, written_condition
from lazy_backend.lowering.compilation.scalars import can_promote, emit_promoted
from lazy_backend.lowering.devices.registration import graph_device
from lazy_backend.lowering.ir.functional import are_pieces
from lazy_backend.lowering.ir.graph import (
    Arg,
    Constant,
    Graph,
    Node,
    Value,
    constants_of,
    empty_of,
    extent,
    is_contiguous,
    map_arg,
)
from lazy_backend.lowering.ir.optimizers import can_write_out
from lazy_backend.lowering.ir.overlap import overlaps_itself
from lazy_backend.lowering.ir.rng import dropout_mask, dropout_scale, seeded_arguments, seeded_op
from lazy_backend.lowering.ir.shapes import Size
from lazy_backend.lowering.ir.windows import Pieces, without_out, written_in_pieces
from lazy_backend.lowering.recurrent.cell_operators import CELL_OPERATORS
from lazy_backend.ports.dispatcher import OpOverload, base_name, overload_name
from lazy_backend.ports.fake_tensors import FakeTensorMode, give_fake_kernel, quiet_fake_tensors
from lazy_backend.ports.replacements import inductor

aten = torch.ops.aten

_CASTS = frozenset((aten._to_copy.default, aten.copy_.default))  # frequent, and right
_VIEWS = frozenset((aten.view.default, aten._unsafe_view.default))
# Operators whose results are views, as their kernels make them, though their schemas say nothing of it: AOTAutograd
# would lose what is written through them. What does the same with a schema that says so.
_UNSAFE_VIEWS = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
# Operators that name places in their first operand's storage.
_STRIDED = frozenset(
    (
        aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
        aten._reshape_alias.default,
    )
)  # fmt: skip
# Operators on lists whose formulas take numbers, too.
_ARITHMETIC = frozenset(f"_foreach_{name}" for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv"))
# Operators that put their second operand into a view of a copy of the first one.
_SCATTERS = frozenset(
    (
        aten.diagonal_scatter.default, aten.select_scatter.default, aten.slice_scatter.default,
        aten.as_strided_scatter.default,
    )
)  # fmt: skip
# Operators that put their third operand into the first one, by places.
_PUTS = frozenset(
    (
        aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default,
        aten._index_put_impl_.default,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signature:
    """What the module takes besides the graph's inputs, in this order: `sizes` before the inputs, the rest after them.

    `sizes`: how many symbols of a symbolic graph are passed as ints.
    `scalars`: graph constants packed in one 1-d float64 tensor on the graph's device, if there are any.
    `seeds`: whether a 1-d int64 tensor of all seeds follows, on the CPU.
    `numbers`: whether all constants follow as Python floats instead (for a backend that runs the module as it is).
    """

    scalars: tuple[int, ...]
    seeds: bool
    numbers: bool
    sizes: int = 0

    @classmethod
    def of(cls, graph: Graph, promoted: Iterable[int] = (), numbers: bool = False, sizes: int = 0) -> Signature:
        """The signature of `graph` if the floats at the places `promoted` are inputs, or all floats if `numbers`."""
        return cls(() if numbers else tuple(sorted(promoted)), graph.num_seeds > 0, numbers, sizes)


def checks_values(graph: Graph, signature: Signature) -> bool:
    """Whether the module checks values by itself. See Note [Values are checked before writes]."""
    launches_graphs = graph_device(graph.device) is not None  # which read nothing on the host
    return graph.device.type == "cpu" and not launches_graphs and not signature.numbers


def to_fx(graph: Graph, constants: Sequence[float], signature: Signature, hints: Sequence[int] = ()) -> fx.GraphModule:
    """Lower `graph`. Constants that are not inputs become literals. `hints`: its symbols' values, if it has any."""
    writer = _FxWriter(graph, constants, signature, hints)
    pieces = [] if signature.numbers else written_in_pieces(graph)
    writes = {place: (one, piece) for one in pieces for place, piece in one.writes.items()}
    has_checks = checks_values(graph, signature)
    for place, node in enumerate(graph.nodes):
        if has_checks and not writer.check_values(node, place):
            continue
        if place in writes:
            writer.add_write_of_piece(node, place, *writes[place])
        else:
            writer.add(node)
    return writer.finish()


class _FxWriter:
    def __init__(self, graph: Graph, constants: Sequence[float], signature: Signature, hints: Sequence[int]) -> None:
        self.graph = graph
        self.constants = constants
        self.fx_graph = fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.fx_graph)
        symbols = [self.fx_graph.placeholder(f"s{place}") for place in range(signature.sizes)]
        self.symbols = [fx.Proxy(symbol, self.tracer) for symbol in symbols]
        self.sizes: dict[Size, fx.Proxy] = {}
        self.values: dict[Value, fx.Node] = {
            value: self.fx_graph.placeholder(f"input_{place}") for place, value in enumerate(graph.inputs)
        }
        made = [value for node in graph.nodes for value in node.outputs if value is not None]
        self.base_dtypes: dict[int, torch.dtype] = {}
        for value in (*graph.inputs, *made):
            self.base_dtypes.setdefault(value.storage, value.meta.dtype)  # a storage's first value is its base
        self.written = {value.storage for node in graph.nodes for value in node.mutates}
        self.strided = {node.inputs()[0].storage for node in graph.nodes if original(node.op) in _STRIDED}
        self.signature = signature
        self.compiled_dtypes = _CompiledDtypes(graph.device, constants, hints)
        self.promotes = frozenset(signature.scalars)
        self.scalars = self.fx_graph.placeholder("scalars") if self.signature.scalars else None
        self.seeds = self.fx_graph.placeholder("seeds") if self.signature.seeds else None
        numbers = range(graph.num_constants) if signature.numbers else ()
        self.numbers = [self.fx_graph.placeholder(f"c{i}") for i in numbers]

    def add(self, node: Node) -> None:
        give_fake_kernel(node.op.name())
        promoted = not self.promotes.isdisjoint(constants_of(node))
        # AOTAutograd of 2.13 cannot functionalise fused optimizers: it takes an empty tensor list as non-functional
        if promoted or (not self.signature.numbers and (can_write_out(node) or _has_list_of_numbers(node))):
            self._add_promoted(node)
        elif node.op is aten.native_dropout.default and not self.signature.numbers and self._drops(node):
            self._add_dropout(node)
        elif node.op.namespace == "lazy_backend" and base_name(node.op) in CELL_OPERATORS:
            self._add_cell(node)
        else:
            self._add_call(node)

    def check_values(self, node: Node, place: int) -> bool:
        """Write the check of what `node` refuses. Returns whether it also computes.

        See Note [Values are checked before writes].
        """
        found = checked(node)
        if found is None:
            return True

        def size(value: Value, dim: int) -> Any:
            if not self.symbols:
                return value.meta.shape[dim]
            return fx.Proxy(self.fx_graph.call_function(aten.sym_size.int, (self.values[value], dim)), self.tracer)

        call = ConditionArguments(node, lambda value: fx.Proxy(self.values[value], self.tracer), size, self._number)
        shapes = [(value, len(value.meta.shape)) for value in node.inputs()] if self.symbols else []
        sizes = [size(value, dim).node for value, rank in shapes for dim in range(rank)]
        operands = [self.values[value] for value in found.values]
        holds = written_condition(found, call).node
        self.fx_graph.call_function(require, (holds, operands, sizes, printed_call(node), place))
        return found.rule.computes

    def add_write_of_piece(self, node: Node, place: int, pieces: Pieces, piece: Value) -> None:
        """See Note [Memory written piece by piece]."""
        options: dict[str, Any] = {"dtype": piece.meta.dtype, "device": self.graph.device}
        own = self.fx_graph.call_function(aten.empty.memory_format, (list(piece.meta.shape),), options)
        self.values[piece] = own
        returning = without_out(node.op) if original(node.op) is node.op else None
        if node.op is aten.copy_.default or returning is None or not self.promotes.isdisjoint(constants_of(node)):
            self.add(node)
        else:  # what is written into `out` would be laid out as the compiler likes
            kwargs = {name: self._read(arg) for name, arg in node.kwargs if name != "out"}
            made = self._call(returning, tuple(self._read(arg) for arg in node.args), kwargs)
            self.fx_graph.call_function(aten.copy_.default, (own, made))
        if place == pieces.last:
            flat = [self.values[one] for one in pieces.in_order()]
            flat = [self.fx_graph.call_function(aten.reshape.default, (one, [-1])) for one in flat]
            whole = self.fx_graph.call_function(aten.cat.default, (flat,))
            self.fx_graph.call_function(aten.copy_.default, (self.values[pieces.base], whole))
            for maker in pieces.views:
                self.add_again(self.graph.nodes[maker])

    def add_again(self, view: Node) -> None:
        """Make a view anew, of what was written since."""
        (made,) = view.outputs
        assert made is not None
        del self.values[made]
        self.add(view)

    def _read(self, arg: Arg) -> Any:
        if isinstance(arg, Value):
            return self.values[arg]
        if isinstance(arg, Constant):
            return self.numbers[arg.index] if self.signature.numbers else self.constants[arg.index]
        if isinstance(arg, tuple):
            return [self._read(item) for item in arg]
        return self._size(arg).node if isinstance(arg, Size) else arg

    def _number(self, arg: Arg) -> Any:
        return self._size(arg) if isinstance(arg, Size) else arg

    def _size(self, size: Size) -> fx.Proxy:
        found = self.sizes.get(size)
        if found is None:
            found = self.sizes[size] = size.at(self.symbols)
        return found

    def _add_call(self, node: Node) -> None:
        args = tuple(self._read(arg) for arg in node.args)
        kwargs = {name: self._read(arg) for name, arg in node.kwargs}
        op = _UNSAFE_VIEWS.get(node.op, node.op)
        if op in _VIEWS and not self.signature.numbers and node.inputs()[0].storage not in self.written:
            op = aten.reshape.default  # see Note [Strides of decompositions]
        if node.seed is not None:
            args, kwargs = (*seeded_arguments(op, args, kwargs), self.seeds, node.seed), {}
            op = seeded_op(op)
        if op in _SCATTERS and not self.signature.numbers and overlaps_itself(node.inputs()[0].meta):
            # inductor writes into a copy that has the strides of its operand
            options: dict[str, Any] = {"memory_format": torch.contiguous_format}
            args = (self.fx_graph.call_function(aten.clone.default, (args[0],), options), *args[1:])
        if op in _PUTS and not self.signature.numbers:
            args = self._with_values_cast(node, args)
        copies = self._copies_of_recast_targets(node) if op.namespace not in ("aten", "prims") else {}
        if copies:
            args, kwargs = fx.node.map_aggregate((args, kwargs), lambda arg: copies.get(arg, arg))
        widened = None if self.signature.numbers else self.compiled_dtypes.widened(node)
        if widened is not None:
            args, kwargs = self._with_operands_cast(node, args, kwargs, widened.operands, copies)
        call = self._split(node, *args) if self._is_written_split(node) else self._call(op, args, kwargs)
        call.meta["site"] = node.site
        for target, copy in copies.items():
            self.fx_graph.call_function(aten.copy_.default, (target, copy))
        single = len(node.outputs) == 1 and not node.returns_list
        for place, value in enumerate(node.outputs):
            if value is not None and value not in self.values:
                made = call if single else self.fx_graph.call_function(operator.getitem, (call, place))
                if widened is not None and widened.results[place] != value.meta.dtype:
                    made = self._cast(made, value.meta.dtype)
                self.values[value] = self._laid_out(made, value, node)

    def _drops(self, node: Node) -> bool:
        """Whether a dropout draws a mask, of sizes that are known here or will be the operand's."""
        _, p, is_training = map(self._read, node.args)
        _, mask = node.outputs
        assert mask is not None
        return bool(is_training and p != 0 and (not self.symbols or is_contiguous(mask.meta)))

    def _add_dropout(self, node: Node) -> None:
        """See Note [Dropout in compiled graphs]."""
        source, p, _ = map(self._read, node.args)
        dropped, mask = node.outputs
        assert dropped is not None
        assert mask is not None
        size: list[Any] = list(mask.meta.shape)
        if self.symbols:  # not `source.size()`: AOTAutograd 2.13 keeps no graph that calls a method
            size = [self.fx_graph.call_function(aten.sym_size.int, (source, place)) for place in range(len(size))]
        stride = None if self.symbols else mask.meta.stride
        drawn = self._call(dropout_mask(), (size, stride, p, self.graph.device, self.seeds, node.seed), {})
        drawn.meta["site"] = node.site
        kept = self._call(aten.mul.Tensor, (source, drawn), {})
        scaled = self._call(aten.mul.Scalar, (kept, dropout_scale(p)), {})
        self.values[dropped] = self._laid_out(scaled, dropped, node)
        self.values[mask] = self._laid_out(drawn, mask, node)

    def _add_cell(self, node: Node) -> None:
        """See Note [Cells are recorded whole]."""
        _, composed, _ = CELL_OPERATORS[base_name(node.op)]
        read = map(self._read, node.args)
        results = composed(*(fx.Proxy(arg, self.tracer) if isinstance(arg, fx.Node) else arg for arg in read))
        for result, value in zip(results, node.outputs, strict=True):
            if value is not None:
                self.values[value] = self._laid_out(result.node, value, node)

    def _is_written_split(self, node: Node) -> bool:
        """Whether `unfold` splits memory that is written. See Note [Writes that compilers get wrong]."""
        if node.op is not aten.unfold.default or self.signature.numbers:
            return False
        (source,), (windows,) = node.inputs(), node.outputs
        assert windows is not None
        return source.storage in self.written and are_pieces(source.meta, windows.meta)

    def _split(self, node: Node, source: fx.Node, dim: int, size: Any, step: Any) -> fx.Node:
        """`unfold` as views whose inverses lose nothing."""
        place = dim % len(node.inputs()[0].meta.shape)
        pieces = self.fx_graph.call_function(aten.unflatten.int, (source, place, [-1, size]))
        return self.fx_graph.call_function(aten.movedim.int, (pieces, place + 1, -1))

    def _call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if op is aten.as_strided_copy.default and not self.signature.numbers:
            # inductor 2.13 reads other places if the operand is computed in the same kernel
            window = self.fx_graph.call_function(aten.as_strided.default, args, kwargs)
            return self.fx_graph.call_function(
                aten.clone.default, (window,), {"memory_format": torch.contiguous_format}
            )
        return self.fx_graph.call_function(op, args, kwargs)

    def _laid_out(self, made: fx.Node, value: Value, maker: Node) -> fx.Node:
        """`made`, which is `value`, laid out as recorded if that matters. See Note [Strides of decompositions]."""
        is_view = any(operand.storage == value.storage for operand in maker.inputs())  # of what lies as recorded
        has_gaps = extent(value.meta) != value.meta.numel  # uninitialised then, like what `empty_strided` makes
        if value.storage not in self.strided or self.signature.numbers or is_view or has_gaps:
            return made
        stride = value.meta.stride
        outermost_first = sorted(range(len(stride)), key=lambda place: stride[place], reverse=True)
        back = sorted(range(len(stride)), key=lambda place: outermost_first[place])
        made = self.fx_graph.call_function(aten.permute.default, (made, outermost_first))
        made = self.fx_graph.call_function(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
        return self.fx_graph.call_function(aten.permute.default, (made, back))

    def _cast(self, value: Any, dtype: torch.dtype) -> fx.Node:
        return self.fx_graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})

    def _with_operands_cast(
        self, node: Node, args: Any, kwargs: Any, dtype: torch.dtype, copies: dict[Any, fx.Node]
    ) -> tuple[Any, Any]:
        """The arguments with floating operands in `dtype`. Casts of operands that `node` writes are put in `copies`."""
        casts: dict[Any, fx.Node] = {
            self.values[value]: self._cast(self.values[value], dtype)
            for value in node.inputs()
            if value.meta.dtype.is_floating_point and value.meta.dtype != dtype
        }
        written = {self.values[value] for value in node.mutates}
        copies.update((operand, cast) for operand, cast in casts.items() if operand in written)
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda arg: casts.get(arg, arg))
        return args, kwargs

    def _with_values_cast(self, node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an `index_put` with its values in the dtype of what they are put into.

        `x[mask] = value` casts one value, and Inductor of 2.13 stores its bits as they are.
        """
        target, value = node.args[0], node.args[2]
        assert isinstance(target, Value)
        assert isinstance(value, Value)
        if value.meta.dtype is target.meta.dtype:
            return args
        return (*args[:2], self._cast(args[2], target.meta.dtype), *args[3:])

    def _copies_of_recast_targets(self, node: Node) -> dict[Any, fx.Node]:
        """Copies of the values that a custom operator writes and whose dtype is not that of their storage's base.

        AOTAutograd rebuilds such a view with `as_strided`, which loses the dtype (auto_functionalized_v2 of 2.13). What
        an operator of ATen's writes that is left to its kernel is copied, too.
        """
        is_left = original(node.op) is not node.op
        recast = [one for one in node.mutates if is_left or one.meta.dtype != self.base_dtypes[one.storage]]
        return {
            self.values[value]: self.fx_graph.call_function(aten.clone.default, (self.values[value],))
            for value in recast
        }

    def _add_promoted(self, node: Node) -> None:
        """See Note [Promoted scalars]."""

        def proxy(arg: Arg) -> fx.Proxy:
            return fx.Proxy(self.values[arg], self.tracer)

        def scalar(index: int) -> Any:
            # the node may have other constants that never changed: they are promoted only if they are listed
            if index not in self.signature.scalars:
                return self.constants[index]
            assert self.scalars is not None
            return aten.select.int(fx.Proxy(self.scalars, self.tracer), 0, self.signature.scalars.index(index))

        def cast(value: Any, dtype: torch.dtype) -> Any:
            return aten._to_copy.default(value, dtype=dtype) if isinstance(value, fx.Proxy) else value

        if self.symbols:
            kwargs = tuple((name, map_arg(self._number, arg)) for name, arg in node.kwargs)
            node = replace(node, args=tuple(map_arg(self._number, arg) for arg in node.args), kwargs=kwargs)
        results = emit_promoted(node, proxy, scalar, cast)
        if node.mutates:
            for target, result in zip(node.mutates, results, strict=True):
                if result is not None:
                    self.fx_graph.call_function(aten.copy_.default, (self.values[target], result.node))
        else:
            for output, result in zip(node.outputs, results, strict=True):
                assert output is not None
                self.values[output] = self._laid_out(result.node, output, node)

    def finish(self) -> fx.GraphModule:
        self.fx_graph.output(tuple(self.values[value] for value in self.graph.outputs))
        return fx.GraphModule(torch.nn.Module(), self.fx_graph)


def _has_list_of_numbers(node: Node) -> bool:
    """Whether `node` is an operator that inductor has no code for, and would call."""
    is_known = base_name(node.op).rstrip("_") in _ARITHMETIC and can_promote(node)
    return is_known and overload_name(node.op) == "ScalarList"


# ----- dtypes of what is compiled


class _CompiledDtypes:
    """Whether calls give the recorded dtypes once compiled. See Note [Dtypes of decompositions]."""

    def __init__(self, device: torch.device, constants: Sequence[float], hints: Sequence[int]) -> None:
        self.device = device
        self.constants = constants
        self.hints = hints
        self.known: dict[Hashable, _Widened | None] = {}

    def widened(self, node: Node) -> _Widened | None:
        """How `node` has to compute to give the recorded dtypes; None if it gives them as it is.

        Raises whatever the decomposition raises if it takes no operands of the wide dtype either.
        """
        floats = {value.meta.dtype for value in _floats_of(node)}
        if len(floats) < 2 or node.seed is not None or node.op in _CASTS:
            return None
        key = (node.op, map_arg(_without_identity, (node.args, node.kwargs, node.outputs)))
        if key not in self.known:
            self.known[key] = None if self._gives_what_was_recorded(node) else self._in_widest(node, floats)
        return self.known[key]

    def _gives_what_was_recorded(self, node: Node) -> bool:
        try:
            dtypes = self._dtypes(node)
        except Exception:  # it refuses operands of several dtypes
            return False
        made = {place: value for place, value in enumerate(node.outputs) if value not in node.mutates}
        return all(value is None or value.meta.dtype == dtypes[place] for place, value in made.items())

    def _in_widest(self, node: Node, floats: Iterable[torch.dtype]) -> _Widened:
        wide = functools.reduce(torch.promote_types, floats)
        return _Widened(wide, self._dtypes(node, wide))

    def _dtypes(self, node: Node, wide: torch.dtype | None = None) -> list[torch.dtype | None]:
        """Dtypes of the results, with floating operands in `wide` if it is given."""

        def fake(arg: Arg) -> Any:
            if isinstance(arg, tuple):
                return list(map(fake, arg))
            if isinstance(arg, Value):
                made = empty_of(arg.meta, self.device)
                return made if wide is None or not made.is_floating_point() else made.to(wide)
            if isinstance(arg, Constant):
                return self.constants[arg.index]
            return arg.at(self.hints) if isinstance(arg, Size) else arg

        with FakeTensorMode(), quiet_fake_tensors(), torch.no_grad():
            made = inductor.decomposed(node.op, fake(node.args), {name: fake(arg) for name, arg in node.kwargs})
        results = made if isinstance(made, list | tuple) else [made]
        return [result.dtype if isinstance(result, torch.Tensor) else None for result in results]


@dataclass(frozen=True, slots=True)
class _Widened:
    """The dtype to which a call's operands are cast, and the dtypes that its results have then."""

    operands: torch.dtype
    results: list[torch.dtype | None]


def _floats_of(node: Node) -> list[Value]:
    """Operands and results of floating dtypes."""
    values = [*node.inputs(), *(value for value in node.outputs if value is not None)]
    return [value for value in values if value.meta.dtype.is_floating_point]


def _without_identity(arg: Arg) -> Hashable:
    return arg.meta if isinstance(arg, Value) else repr(arg)
