"""Operators on lists of tensors, taken apart.

In: consecutive calls on lists of equal length, such as an optimizer's, and groups of places in these lists. Out: the
same calls for each group, group by group.
What `_foreach` operators and fused optimizers do with one place of their lists depends on that place alone, so that the
groups may be computed one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lazy_backend.lowering.ir.graph import Arg, Node, Value
from lazy_backend.lowering.ir.optimizers import can_write_out
from lazy_backend.ports.dispatcher import function_schema


def list_length(node: Node) -> int | None:
    """The length of the lists of a call that does one thing for each place in its lists; None for any other call."""
    name = function_schema(node.op).name
    if not name.startswith("aten::_foreach_") and not can_write_out(node):
        return None
    if any(one.name == "scalars" and str(one.type) == "Tensor" for one in function_schema(node.op).arguments):
        return None  # one tensor with a number for each place
    lengths = {len(arg) for arg in _lists(node)}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    return length if len(node.outputs) in (0, length) else None


def _lists(node: Node) -> list[tuple[Arg, ...]]:
    """The lists among the arguments that have an item for each place. Those of a fused optimizer may be empty."""
    kinds = [str(argument.type) for argument in function_schema(node.op).arguments]
    listed = [arg for kind, arg in zip(kinds, node.args, strict=False) if _is_list(kind, arg)]
    return listed + [arg for _, arg in node.kwargs if isinstance(arg, tuple)]


def _is_list(kind: str, arg: Arg) -> bool:
    return isinstance(arg, tuple) and kind.startswith("List[") and len(arg) > 0


@dataclass(slots=True)
class ListCalls:
    """Consecutive calls on lists that can be taken apart together.

    `place_of`: for each storage that a list names, its place, which is the same in all lists.
    """

    length: int
    nodes: list[Node] = field(default_factory=list)
    place_of: dict[int, int] = field(default_factory=dict)
    _shared: set[int] = field(default_factory=set)  # storages of operands that are in no list
    _written: set[int] = field(default_factory=set)

    def add(self, node: Node) -> bool:
        """Add the next call; False, and nothing is added, if it does not fit."""
        if list_length(node) != self.length:
            return False
        places: dict[int, int] = {}
        listed: set[Value] = set()
        for items in (*_lists(node), node.outputs):
            for place, item in enumerate(items):
                if isinstance(item, Value):
                    listed.add(item)
                    if places.setdefault(item.storage, place) != place:
                        return False
        shared = {value.storage for value in node.inputs() if value not in listed} | self._shared
        written = {value.storage for value in node.mutates} | self._written
        agrees = all(self.place_of.get(storage, place) == place for storage, place in places.items())
        if not agrees or shared & written or shared & (self.place_of.keys() | places.keys()):
            return False
        self.place_of |= places
        self._shared, self._written = shared, written
        self.nodes.append(node)
        return True

    def of_group(self, group: Sequence[int]) -> list[Node]:
        """The calls for these places alone."""
        return [_for_places(node, group) for node in self.nodes]


def _for_places(node: Node, group: Sequence[int]) -> Node:
    listed = _lists(node)

    def some(arg: Arg) -> Arg:
        return tuple(arg[place] for place in group) if any(arg is one for one in listed) else arg

    args = tuple(map(some, node.args))
    kwargs = tuple((name, some(arg)) for name, arg in node.kwargs)
    outputs = tuple(node.outputs[place] for place in group) if node.outputs else ()
    part = replace(node, args=args, kwargs=kwargs, outputs=outputs)
    own = set(part.inputs())
    return replace(part, mutates=tuple(value for value in node.mutates if value in own))
