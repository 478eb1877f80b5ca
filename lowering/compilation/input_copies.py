"""An inductor pass that copies what is needed after its memory is overwritten.

In: the graph that inductor is about to lower. Out: the same graph, with a `clone` where one is needed.
Inductor drops `clone`s, since its graphs are functional, and later turns functional ops back into in-place writes.
So this pass runs after the one that drops `clone`s, and puts them back in three cases:

  a new value in the memory of an input   `new = x.clone(); x.add_(1); new[0] = 5` becomes `new = scatter(x)` and
      `x.copy_(x + 1)`. Inductor then scatters into `x` itself, since `x` is overwritten anyway (`can_inplace` in
      `reinplace.py`): `new` and `x` become one tensor with the values of `x`, and no error is raised.
  an input that is read after it got its last value   `old = x.clone(); x.copy_(y); y.copy_(old)` becomes
      `x.copy_(y); y.copy_(x)`: both get the values of `y`.
  an operand in memory that a kernel writes   `op(x.clone(), out=x)` of a custom operator becomes `op(x, out=x)`. See
      Note [Reads before writes] for the operators that inductor has code for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lazy_backend.ports.dispatcher import HigherOrderOperator, OpOverload, function_schema
from lazy_backend.ports.replacements.inductor import node_storage

aten = torch.ops.aten

# Ops that inductor may turn into an in-place write to their first argument.
_WRITERS = frozenset(
    (
        aten.index_put.default, aten._unsafe_index_put.default, aten.slice_scatter.default, aten.select_scatter.default,
        aten.diagonal_scatter.default, aten.as_strided_scatter.default,
    )
)  # fmt: skip


def copy_what_outlives_its_memory(graph: fx.Graph) -> None:
    """The pass. Changes `graph` in place."""
    _copy_what_is_read_late(graph)
    _copy_operands_that_kernels_overwrite(graph)
    final = {node.args[0]: node.args[1] for node in graph.nodes if node.target is aten.copy_.default}
    for place, last in final.items():
        if isinstance(place, fx.Node) and place.op == "placeholder":
            for user in list(place.users):
                if _writes(user, place) and _outlives(user, place, last):
                    with graph.inserting_before(user):
                        user.replace_input_with(place, _copy(graph, place))


def _copy_what_is_read_late(graph: fx.Graph) -> None:
    """Copy each operand that lies in the memory of an input which has its last value by then."""
    overwritten: set[int] = set()
    for node in list(graph.nodes):
        if node.op == "output":
            return
        place = node.args[0] if node.target is aten.copy_.default else None
        for operand in node.all_input_nodes:
            if operand is not place and _storage(operand) in overwritten:
                # copied where it is made: a later copy would keep inductor from writing in place before
                with graph.inserting_before(_first_after(operand)):
                    node.replace_input_with(operand, _copy(graph, operand))
        if isinstance(place, fx.Node) and place.op == "placeholder" and (storage := _storage(place)) is not None:
            overwritten.add(storage)


def _first_after(node: fx.Node) -> fx.Node:
    """Where a node may stand that takes `node`."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def _copy_operands_that_kernels_overwrite(graph: fx.Graph) -> None:
    """Copy each operand that lies in memory which the same call writes, where inductor calls a kernel for it."""
    for node in graph.nodes:
        written = _written_by_kernel(node)
        if not written:
            continue
        operands: dict[int | str, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        storages = {_storage(one) for place in written for one in _nodes_in(operands[place])}

        def copied(operand: fx.Node, storages: set[int | None] = storages) -> fx.Node:
            return _copy(graph, operand) if _storage(operand) in storages else operand

        with graph.inserting_before(node):
            for place in operands.keys() - written:
                value = fx.map_arg(operands[place], copied)
                node.update_arg(place, value) if isinstance(place, int) else node.update_kwarg(place, value)


def _written_by_kernel(node: fx.Node) -> set[int | str]:
    """The places and keywords of the operands that `node` may write, if a kernel does it."""
    if node.target is torch.ops.higher_order.auto_functionalized_v2:  # calls a custom operator that writes
        return {"_all_bases"}
    if node.target in _WRITERS and node.meta["val"].is_complex():  # inductor has no code for complex numbers
        return {0}
    return set()


def _nodes_in(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found


def _writes(node: fx.Node, of: fx.Node) -> bool:
    """Whether inductor may turn `node` into a write to `of`."""
    if node.target in _WRITERS or _namespace(node) == "_c10d_functional":
        return bool(node.args) and node.args[0] is of
    return isinstance(node.target, HigherOrderOperator)


def _outlives(node: fx.Node, place: fx.Node, last: Any) -> bool:
    """Whether `node`, or a value in the same memory, is still needed after `place` gets its `last` value."""
    made, unseen = {node}, [node]
    while unseen:
        one = unseen.pop()
        for user in one.users:
            is_other_copy = user.target is aten.copy_.default and user.args[0] is not place
            if (user.op == "output" or is_other_copy) and one is not last:
                return True
            if user not in made and (_writes(user, one) or _is_view(user)):
                made.add(user)
                unseen.append(user)
    return False


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # getitem
    return any(result.alias_info is not None for result in function_schema(node.target).returns)


def _namespace(node: fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, OpOverload) else ""


def _storage(node: fx.Node) -> int | None:
    """The identity of the memory that the graph gives `node`; None if `node` is not one tensor."""
    return node_storage(node)


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A `clone` of `node` where the graph inserts."""
    copy = graph.call_function(aten.clone.default, (node,))
    value = node.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    return copy
