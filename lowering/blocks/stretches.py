"""A graph in stretches: some of them as graphs of their own, which are called regions.

In: a graph, and its nodes in an order that may run, in stretches. Out: regions, and the nodes that stay single.

Note [Stretches]
Only values with memory of their own are passed between stretches. A view costs nothing to make, so each stretch that
needs a view makes it again from its base: no region has aliasing inputs or outputs (Note [Inputs own their storage]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lazy_backend.lowering.ir.graph import Graph, Node, Value, constants_of, makes_views


class Stretches:
    """Adds to each stretch the views that it needs, and determines the outputs of each region."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._views = {value: node for node in graph.nodes if makes_views(node) for value in node.outputs}
        self._made_between: set[Node] = set()  # views that single nodes can use already
        self._parts: list[list[Node] | Node] = []

    def add_nodes(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            views = self._views_behind([node]) - self._made_between
            self._made_between |= views
            self._parts += [*self._in_program_order(views), node]

    def add_region(self, nodes: Sequence[Node]) -> None:
        self._parts.append(self._in_program_order({*nodes, *self._views_behind(nodes)}))

    def _views_behind(self, nodes: Iterable[Node]) -> set[Node]:
        """The views that `nodes` read, and the views behind those."""
        found: set[Node] = set()
        unseen = list(nodes)
        while unseen:
            for value in unseen.pop().inputs():
                view = self._views.get(value)
                if view is not None and view not in found:
                    found.add(view)
                    unseen.append(view)
        return found

    def _in_program_order(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self._places.__getitem__)

    def finish(self) -> list[Graph | Node]:
        """The parts, in order. Works backwards: the outputs of a region depend on the parts after it."""
        wanted = set(self._graph.outputs)
        finished: list[Graph | Node] = []
        for part in reversed(self._parts):
            if isinstance(part, Node):
                wanted.update(part.inputs())
                finished.append(part)
            else:
                region = self._region(part, wanted)
                wanted.update(region.inputs)
                finished.append(region)
        finished.reverse()
        return finished

    def _region(self, nodes: Sequence[Node], wanted: set[Value]) -> Graph:
        taken: dict[Value, None] = {}
        made: set[Value] = set()
        for node in nodes:
            operands = node.inputs()
            taken.update((value, None) for value in operands if value not in made)
            made.update(value for value in node.outputs if value is not None and value not in operands)
        return replace(
            self._graph,
            inputs=tuple(taken),
            held=(),
            nodes=tuple(nodes),
            outputs=tuple(sorted((made & wanted) - self._views.keys(), key=lambda value: value.number)),
            num_constants=self._graph.num_constants if any(map(constants_of, nodes)) else 0,
            num_seeds=self._graph.num_seeds if any(node.seed is not None for node in nodes) else 0,
        )
