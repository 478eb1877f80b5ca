"""The passes from program to graph, by name, so that the input and the result of each can be inspected.

In: functions whose first argument is a program or a graph. Out: the same functions, which call each registered watcher
before and after they run. A pass runs only for new programs and graphs, so the check for watchers costs next to
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from lazy_backend.lowering.ir.graph import Graph, check_graph

P = ParamSpec("P")
R = TypeVar("R")

# (name of the pass, "before" or "after", the program or graph)
Watcher = Callable[[str, str, Any], None]

_watchers: list[Watcher] = []


@runtime_checkable
class HasGraphs(Protocol):
    """The result of a pass, if it is more than a graph."""

    def graphs(self) -> Sequence[Graph]:
        """The graphs in the result, each of which is well formed."""


def watch_passes(watcher: Watcher) -> None:
    """Call `watcher` before and after every pass from now on."""
    _watchers.append(watcher)


def check_passes() -> None:
    """From now on, run `check_graph` on every graph that a pass takes or returns. For tests."""
    if _check not in _watchers:
        watch_passes(_check)


def _check(name: str, when: str, what: Any) -> None:
    for graph in graphs_in(what):
        check_graph(graph)


def graphs_in(what: Any) -> Sequence[Graph]:
    """The graphs in an argument or result of a pass: the graph itself, the graphs among its parts, or none."""
    if isinstance(what, Graph):
        return (what,)
    if isinstance(what, HasGraphs):
        return what.graphs()
    return [part for part in what if isinstance(part, Graph)] if isinstance(what, list) else ()


def graph_pass(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as a pass, which watchers know as `name`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            for watcher in _watchers:
                watcher(name, "before", args[0])
            result = function(*args, **kwargs)
            for watcher in _watchers:
                watcher(name, "after", result)
            return result

        return run

    return decorate
