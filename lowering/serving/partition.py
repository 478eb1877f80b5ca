"""Which parts of a graph are compiled, when a compiler cannot take all of it.

In: a graph and a predicate over its nodes. Out: the graph's parts in a valid order of execution: regions, which are
graphs of their own, and single nodes between them.

Note [Regions]
Nodes are taken in turns: all supported nodes that can run now form a region, then all other nodes that can run now stay
single, and so on. This respects data and effect edges, so results are the same (Note [Program order and effects]).
What is passed between parts: Note [Stretches].
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from lazy_backend.lowering.blocks.stretches import Stretches
from lazy_backend.lowering.ir.graph import Graph, Node, dependencies, makes_views
from lazy_backend.lowering.ir.passes import graph_pass

Supported = Callable[[Node], bool]


@graph_pass("split into regions")
def partition(graph: Graph, supported: Supported) -> list[Graph | Node]:
    """See Note [Regions]. `supported` is not asked about views: a compiler has to take all of them."""
    parts = Stretches(graph)
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
