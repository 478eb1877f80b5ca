"""Change modules of PyTorch that this package does not import itself, since importing them takes a second.

In: the name of a module, and a function. Out: the function is called with the module once it is imported, before the
code that imports it goes on; at once if it is there already.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Change = Callable[[ModuleType], None]


class ChangingFinder(importlib.abc.MetaPathFinder):
    """The first to be asked for modules: has the others find one of its own, and calls the change after its code."""

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}

    def add(self, name: str, change: Change) -> None:
        self._changes[name] = change
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.get(name)
        if change is None:
            return None
        # not importlib.util.find_spec, which knows a module that is loaded again as it is, changed
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        others = (finder.find_spec(name, path, target) for finder in finders)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                change(module)

            loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


_finder = ChangingFinder()


def when_imported(name: str, change: Change) -> None:
    """Call `change` with the module `name` once it is imported; at once if it is."""
    module = sys.modules.get(name)
    if module is None:
        _finder.add(name, change)
    else:
        change(module)
