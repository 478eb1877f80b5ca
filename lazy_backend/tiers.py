"""How many plans a program's shapes get before the program is interpreted, in TorchScript's terms.

In: a strategy, in the form that `torch.jit.set_fusion_strategy` takes, or a depth. Out: the settings
`max_static_shapes` and `max_dynamic_shapes`, the only place that stores the numbers.
Source: torch/csrc/jit/runtime/profiling_graph_executor_impl.h.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.settings import config

_KINDS = ("static", "dynamic")


def get_fusion_strategy() -> list[tuple[str, int]]:
    """`[("static", k), ("dynamic", n)]`: k shapes of a program get plans of their own, then n plans serve many shapes.

    Beyond these plans, shapes that fit none are interpreted.
    """
    return [("static", config.max_static_shapes), ("dynamic", config.max_dynamic_shapes)]


@hide_internals
def set_fusion_strategy(strategy: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Set the strategy and return the previous one. A kind that is left out gets no plans; case does not matter.

    Like `torch.jit.set_fusion_strategy`, except for the order: plans for one shape always come first, since they show
    what many shapes have in common. Raises `ValueError` for another order, another kind, or a count below zero.
    """
    counts = dict.fromkeys(_KINDS, 0)
    latest = 0
    for entry in strategy:
        kind, count = entry
        name = str(kind).lower()
        if name not in _KINDS or _KINDS.index(name) < latest or isinstance(count, bool) or int(count) < 0:
            raise ValueError(
                f"set_fusion_strategy({list(strategy)!r}): {entry!r} cannot stand there\n"
                '  expected [("static", k), ("dynamic", n)] with whole numbers, in this order'
            )
        latest = _KINDS.index(name)
        counts[name] += int(count)
    before = get_fusion_strategy()
    config.max_static_shapes, config.max_dynamic_shapes = counts["static"], counts["dynamic"]
    return before


def get_bailout_depth() -> int:
    """The total number of plans that a program's shapes get before it is interpreted: the sum of the strategy's counts.

    Shapes with sizes that no symbol may have (0, 1) get up to four more.
    """
    return sum(count for _, count in get_fusion_strategy())


@hide_internals
def set_bailout_depth(depth: int) -> int:
    """Set the total number of plans that a program's shapes get, and return the previous one.

    Plans for one shape keep their number as far as `depth` allows; the rest are plans for many shapes. Raises
    `ValueError` for a depth below zero.
    """
    if isinstance(depth, bool) or int(depth) < 0:
        raise ValueError(f"set_bailout_depth({depth!r}): expected a whole number of at least 0")
    before = get_bailout_depth()
    static = min(config.max_static_shapes, int(depth))
    set_fusion_strategy([("static", static), ("dynamic", int(depth) - static)])
    return before
