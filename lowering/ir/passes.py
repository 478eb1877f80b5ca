"""The passes from program to graph, by name, so that one can look at what each gets and makes.

In: functions whose first argument is a program or a graph. Out: the same functions; whoever watches is called before
and after each. A pass runs for what is new, so asking whether anybody watches costs nothing that counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# (name of the pass, "before" or "after", the program or graph)
Watcher = Callable[[str, str, Any], None]

_watchers: list[Watcher] = []


def watch_passes(watcher: Watcher) -> None:
    """Have `watcher` called for every pass from now on."""
    _watchers.append(watcher)


def graph_pass(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as a pass, to be watched under `name`."""

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
