"""An inductor pass that keeps copies of an overwritten input out of that input's memory.

In: the graph that inductor is about to lower. Out: the same graph, with a `clone` where one is needed.
Inductor 2.13 drops `clone`s, since its graphs are functional, and later turns functional ops back into in-place writes.
For example, `new = x.clone(); x.add_(1); new[0] = 5` becomes `new = scatter(x)` and `x.copy_(x + 1)`. Inductor then
scatters into `x` itself, since `x` is overwritten anyway (`can_inplace` in `reinplace.py`): `new` and `x` become one
tensor with the values of `x`, and no error is raised. So this pass runs after the one that drops `clone`s, and gives
such a `scatter` a `clone` of `x` again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Ops that inductor may turn into an in-place write to their first argument.
_WRITERS = frozenset(
    (
        aten.index_put.default, aten._unsafe_index_put.default, aten.slice_scatter.default, aten.select_scatter.default,
        aten.diagonal_scatter.default, aten.as_strided_scatter.default,
    )
)  # fmt: skip


def keep_copies_of_overwritten_inputs(graph: fx.Graph) -> None:
    """The pass. Changes `graph` in place."""
    final = {node.args[0]: node.args[1] for node in graph.nodes if node.target is aten.copy_.default}
    for place, last in final.items():
        if isinstance(place, fx.Node) and place.op == "placeholder":
            for user in list(place.users):
                if _writes(user, place) and _outlives(user, place, last):
                    _copy_before(graph, user, place)


def _writes(node: fx.Node, of: fx.Node) -> bool:
    """Whether inductor may turn `node` into a write to `of`."""
    if node.target in _WRITERS or _namespace(node) == "_c10d_functional":
        return bool(node.args) and node.args[0] is of
    return isinstance(node.target, torch._ops.HigherOrderOperator)


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
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function"  # getitem
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _namespace(node: fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def _copy_before(graph: fx.Graph, node: fx.Node, place: fx.Node) -> None:
    with graph.inserting_before(node):
        copy = graph.call_function(aten.clone.default, (place,))
    value = place.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    node.replace_input_with(place, copy)


@contextlib.contextmanager
def with_copies_of_overwritten_inputs() -> Iterator[None]:
    """Within this block, inductor runs the pass after the user's own passes. Internal, checked on 2.13."""
    from torch._inductor import config

    before = config.post_grad_custom_post_pass
    passes = [] if before is None else list(before) if isinstance(before, list | tuple) else [before]
    with config.patch(post_grad_custom_post_pass=[*passes, _pass()]):
        yield


@functools.cache
def _pass() -> Any:
    """The pass in the form that inductor accepts. Internal, checked on 2.13."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepCopies(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            keep_copies_of_overwritten_inputs(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return KeepCopies()
