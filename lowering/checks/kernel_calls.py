"""Calls of ATen's kernels that compilers do not look into.

In: a graph, and which of its nodes are left to ATen's own kernels. Out: a graph that calls an operator of the namespace
`lazy_backend` in their places, of which compilers know nothing but its schema.

Note [Left to kernels]
Where a compiler computes an operator wrong, this call of it alone is taken from the compiler, and the rest of the graph
stays compiled: the call becomes one of an opaque operator, whose kernel calls the operator's own. No kernel of the
compiler's reaches across it, so that a fault that only fused code has is gone, too. Such an operator may be left that
takes and returns tensors with memory of their own, or writes its operands: not one that makes views or draws random
numbers (which is opaque already), nor one with a float that is an input of the compiled code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.lowering.ir.graph import Constant, Graph, Node, Value, constants_of, map_arg, print_arg
from lazy_backend.lowering.ir.schema import Positional, schema_of
from lazy_backend.ports.dispatcher import OpOverload, base_name, overload_name

# kept here: a torch.library.Library unregisters its operators when it is destroyed
_library = torch.library.Library("lazy_backend", "FRAGMENT")
_kernel_ops: dict[tuple[OpOverload, tuple[int, ...]], OpOverload] = {}
_originals: dict[OpOverload, OpOverload] = {}
_lock = process_lock()


def can_be_left(node: Node, promoted: Collection[int] = ()) -> bool:
    """Whether a call can be left to its kernel. `promoted`: the floats that are inputs of the compiled code."""
    operands = node.inputs()
    if node.op.namespace != "aten" or node.seed is not None or not operands:
        return False
    if any(index in promoted for index in constants_of(node)):
        return False
    storages = {value.storage for value in operands}
    kinds = {result.kind for result in schema_of(node.op).returns}
    if kinds not in (set(), {"fresh"}, {"same"}):
        return False
    if any(v is not None and v not in node.mutates and v.storage in storages for v in node.outputs):
        return False  # views, of which the schema says nothing
    with contextlib.suppress(RuntimeError):  # its schema has a type that custom operators may not have
        return bool(_left(node))
    return False


def pattern_of(node: Node) -> str:
    """The operator, its arguments other than tensors, and the tensors' dtypes and ranks."""

    def described(arg: Any) -> Any:
        if isinstance(arg, Value):
            return f"{arg.meta.dtype} of {len(arg.meta.shape)}"
        return "float" if isinstance(arg, Constant) else print_arg(arg)

    return f"{node.name}{map_arg(described, (node.args, *node.kwargs))}"


def left_to_kernels(graph: Graph, places: Collection[int]) -> Graph:
    """`graph` with the nodes at these places left to their kernels. See Note [Left to kernels]."""
    if not places:
        return graph
    nodes = (_left(node) if place in places else node for place, node in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(nodes))


def _left(node: Node) -> Node:
    own = Positional(node.op)
    args = tuple(map(_as_recorded, own.of(node.args, dict(node.kwargs))))
    given = enumerate(zip(own.arguments, args, strict=True))
    numbers = tuple(
        place for place, (argument, arg) in given if str(argument.type) == "Tensor" and not isinstance(arg, Value)
    )
    return replace(node, op=_kernel_op(node.op, numbers), args=args, kwargs=())


def _as_recorded(arg: Any) -> Any:
    return tuple(map(_as_recorded, arg)) if isinstance(arg, list | tuple) else arg


def original(op: OpOverload) -> OpOverload:
    """The operator whose kernel `op` calls; `op` itself if it is not one of these operators."""
    return _originals.get(op, op)


def _kernel_op(op: OpOverload, numbers: tuple[int, ...]) -> OpOverload:
    with _lock:
        found = _kernel_ops.get((op, numbers))
        if found is None:
            found = _kernel_ops[op, numbers] = _define(op, numbers)
            _originals[found] = op
        return found


def _define(op: OpOverload, numbers: tuple[int, ...]) -> OpOverload:
    """`lazy_backend::kernel_<op>(<all arguments by position>)`. `numbers`: see `Positional`."""
    name = "_".join(("kernel", base_name(op), overload_name(op), *map(str, numbers)))
    own = Positional(op, numbers=numbers)

    def run(*values: Any) -> Any:
        args, kwargs = own.bind(values)
        made = op(*args, **kwargs)
        return None if own.returns_nothing else made

    _library.define(f"{name}({own.declared}) -> {own.returned}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lazy_backend::{name}", run, lib=_library)
    return getattr(torch.ops.lazy_backend, name).default  # type: ignore[no-any-return]
