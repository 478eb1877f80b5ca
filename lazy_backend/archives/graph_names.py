"""What a compiled graph is called where there are only keys: its size and its operators.

In: the key of an artefact. Out: a text for one line.
"""

from __future__ import annotations

import re

from lazy_backend.cache.computation_cache import Key

# Operators that say nothing about what a graph is for.
_VIEWS = frozenset(("t", "view", "expand", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "alias"))
_MAX_OPERATORS = 6

_NODE = re.compile(r"^  (?:%.* = )?(\w+\.\w+(?:\.\w+)?)\(", flags=re.M)


def describe_graph(key: Key) -> str:
    """As in `35 nodes: addmm relu addmm mse_loss … _foreach_addcdiv_, for many sizes`."""
    parts = dict(key.parts)
    names = [name.split(".")[1] for name in _NODE.findall(parts.get("graph", ""))]
    shown = [name for name in names if name not in _VIEWS] or names
    if not shown:
        return "?"
    if len(shown) > _MAX_OPERATORS:
        shown = [*shown[: _MAX_OPERATORS - 2], "…", shown[-1]]
    sizes = ", for many sizes" if parts.get("sizes") else ""
    device = parts.get("device", "cpu")
    return f"{len(names)} nodes: {' '.join(shown)}{sizes}" + ("" if device == "cpu" else f", on {device}")
