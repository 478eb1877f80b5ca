"""A pass for inductor: what is made of an input that the graph overwrites keeps its own memory.

In: the graph that inductor is about to lower. Out: the same, with a `clone` where one is needed.
Inductor 2.13 drops `clone`s, since its graphs have no writes, and then turns functions back into writes. Where
`new = x.clone(); x.add_(1); new[0] = 5` is left as `new = scatter(x)` and `x.copy_(x + 1)`, it scatters into `x`
itself, since that is overwritten anyway (`can_inplace` in `reinplace.py`): `new` and `x` are then one tensor, with the
values of `x`, and no error is raised. So such a `scatter` gets a `clone` of `x` again, after the pass that drops them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# What inductor may turn into a write of its first argument.
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
    """Whether inductor may make `node` a write of `of`."""
    if node.target in _WRITERS or _namespace(node) == "_c10d_functional":
        return bool(node.args) and node.args[0] is of
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _outlives(node: fx.Node, place: fx.Node, last: Any) -> bool:
    """Whether `node`, or what is made of it in the same memory, is wanted after `place` got its `last` value."""
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
    """Have inductor run the pass, after the user's own, for what is compiled within. Internal, checked on 2.13."""
    from torch._inductor import config

    before = config.post_grad_custom_post_pass
    passes = [] if before is None else list(before) if isinstance(before, list | tuple) else [before]
    with config.patch(post_grad_custom_post_pass=[*passes, _pass()]):
        yield


@functools.cache
def _pass() -> Any:
    """The pass as inductor takes it. Internal, checked on 2.13."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepCopies(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            keep_copies_of_overwritten_inputs(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return KeepCopies()
