"""Which parts of a graph are compiled, when a compiler cannot take all of it.

In: a graph and a predicate over its nodes. Out: the graph's parts in a valid order of execution: regions, which are
graphs of their own, and single nodes between them.

Note [Regions]
Nodes are taken in turns: all supported nodes that can run now form a region, then all other nodes that can run now stay
single, and so on. This respects data and effect edges, so results are the same (Note [Program order and effects]).
Only values with memory of their own are passed between parts. A view costs nothing to make, so each part that needs a
view makes it again from its base: no region has aliasing inputs or outputs (Note [Inputs own their storage]).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lazy_backend.lowering.ir.graph import Graph, Node, Value, constants_of, dependencies
from lazy_backend.lowering.ir.passes import graph_pass

Supported = Callable[[Node], bool]


@graph_pass("split into regions")
def partition(graph: Graph, supported: Supported) -> list[Graph | Node]:
    """See Note [Regions]. `supported` is not asked about views: a compiler has to take all of them."""
    parts = _Parts(graph)
    for turn in _turns(graph, supported):
        if supported(turn[0]):
            parts.add_region(turn)
        else:
            parts.add_nodes(turn)
    return parts.finish()


def _turns(graph: Graph, supported: Supported) -> Iterable[list[Node]]:
    """Supported and other nodes in turns, without those that make views; in program order where there is a choice."""
    producers = dependencies(graph.nodes)
    users: list[list[int]] = [[] for _ in graph.nodes]
    for place, before in enumerate(producers):
        for other in before:
            users[other].append(place)
    missing = [len(before) for before in producers]
    waiting: dict[bool, list[int]] = {True: [], False: []}

    def ready(place: int, turn: bool) -> None:
        node = graph.nodes[place]
        heapq.heappush(waiting[turn if makes_views(node) else supported(node)], place)

    turn = True
    for place, count in enumerate(missing):
        if not count:
            ready(place, turn)
    while waiting[True] or waiting[False]:
        taken: list[Node] = []
        while waiting[turn]:
            place = heapq.heappop(waiting[turn])
            if not makes_views(graph.nodes[place]):
                taken.append(graph.nodes[place])
            for user in users[place]:
                missing[user] -= 1
                if not missing[user]:
                    ready(user, turn)
        if taken:
            yield taken
        turn = not turn


def makes_views(node: Node) -> bool:
    """Whether the node does nothing but make views of its operands."""
    if node.mutates or node.seed is not None or not node.outputs:
        return False
    storages = {value.storage for value in node.inputs()}
    return all(value is not None and value.storage in storages for value in node.outputs)


class _Parts:
    """Adds to each part the views that it needs, and determines the outputs of each region."""

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
