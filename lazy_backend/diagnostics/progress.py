"""Progress, for progress bars and notebooks.

In: the history, the compiles that are under way. Out: the values that a progress bar shows; a line that a notebook
shows while the program waits for compiles.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from lazy_backend import metrics
from lazy_backend.diagnostics.history import history
from lazy_backend.lowering.plans.profiling import pending_compiles

# Syncs that are looked at for the latest plan: of several devices, some may have had nothing to run.
_LATEST = 8
# Seconds between two changes of the line in a notebook.
_PERIOD = 0.5


def progress() -> dict[str, str | int]:
    """What a progress bar may show about this package, as keyword arguments of `tqdm.set_postfix`. Reads no tensor.

    `lazy`: how the latest step ran ("interpreted", "compiled", "compiled for many shapes"; "as recorded" on its first
    sight), if `config.explain` is on. `compiling`: the number of graphs whose compile is under way or due. `cuts`: how
    often a read or a call cut a trace, since the start or the last `metrics.reset()`.

        for batch in (bar := tqdm(data)):
            ...
            lazy_backend.mark_step()
            bar.set_postfix(lazy_backend.progress())
    """
    shown: dict[str, str | int] = {}
    latest = list(itertools.islice(reversed(history.records), _LATEST))  # in one go: other threads add records
    plan = next((record.plan for record in latest if record.plan), None)
    if plan is not None:
        shown["lazy"] = plan
    return {**shown, "compiling": pending_compiles(), "cuts": metrics.counter_value("GraphCut")}


@contextlib.contextmanager
def line_while_compiling() -> Iterator[Callable[[], None]]:
    """A block that waits for compiles, and a function to call now and then meanwhile: changes a line of the notebook.

    Outside of notebooks the function does nothing.
    """
    display = _notebook_display()
    line: Any = None
    begin = shown = perf_counter()

    def change() -> None:
        nonlocal line, shown
        now = perf_counter()
        if display is None or now - shown < _PERIOD:
            return
        shown = now
        left = pending_compiles()
        text = f"lazy_backend: compiling {left} graph{'' if left == 1 else 's'}, {now - begin:.0f} s"
        if line is None:
            line = display({"text/plain": text}, raw=True, display_id=True)
        else:
            line.update({"text/plain": text}, raw=True)

    try:
        yield change
    finally:
        if line is not None:
            text = f"lazy_backend: waited {perf_counter() - begin:.1f} s for compiles"
            line.update({"text/plain": text}, raw=True)


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` in a notebook, else None. `kernel` is internal, checked on IPython 9 with ipykernel 7."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    show: Callable[..., Any] = ipython.display.display
    return show
