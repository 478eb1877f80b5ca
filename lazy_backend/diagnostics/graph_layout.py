"""The layout of a program's graph in the report.

In: calls, as in a run log. Out: `Layout`: each call's layer and its position in the layer, and the edges.

Note [Layers]
A call is one layer below the lowest call whose result it reads, so data flows down and the calls of a layer could run
at the same time. A call that reads nothing, or is a view of what such a call made, is right above its topmost reader,
as a weight's transpose is. Within a layer calls are at least one unit apart and as near as possible to the mean
position of what they read: the least squared displacement, found by pooling neighbours that would overlap. One pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Call = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """`x`: positions in units of a call's width. `y`: layers, from 0 at the top. `edges`: (maker or writer, reader)."""

    x: list[float]
    y: list[int]
    edges: list[tuple[int, int]]


def lay_out(calls: Sequence[Call]) -> Layout:
    """The layout of a program. See Note [Layers]."""
    operands = operands_of(calls)
    y: list[int] = []
    for sources in operands:
        y.append(1 + max((y[source] for source in sources), default=-1))
    readers: list[list[int]] = [[] for _ in calls]
    for call, sources in enumerate(operands):
        for source in sources:
            readers[source].append(call)
    for call in reversed(_floating(calls, operands)):
        if readers[call]:
            y[call] = min(y[reader] for reader in readers[call]) - 1
    layers: list[list[int]] = [[] for _ in range(max(y, default=-1) + 1)]
    for call, layer in enumerate(y):
        layers[layer].append(call)
    x = [0.0] * len(calls)
    for members in layers:
        wanted = {call: _below(call, operands, readers, y, x) for call in members}
        ordered = sorted(members, key=lambda call: (wanted[call], call))
        for call, place in zip(ordered, _spread([wanted[call] for call in ordered]), strict=True):
            x[call] = round(place, 2)
    return Layout(x, y, [(source, call) for call, sources in enumerate(operands) for source in sources])


def _floating(calls: Sequence[Call], operands: list[list[int]]) -> list[int]:
    """The calls that depend on no computation: those that read nothing, and views of their results."""
    found: dict[int, None] = {}
    for call, sources in enumerate(operands):
        if not sources or (calls[call].get("of") and all(source in found for source in sources)):
            found[call] = None
    return list(found)


def _below(call: int, operands: list[list[int]], readers: list[list[int]], y: list[int], x: list[float]) -> float:
    """The preferred x of a call: the mean of what it reads or, if nothing, of its first reader's higher operands."""
    above = operands[call]
    if not above and readers[call]:
        above = [other for other in operands[readers[call][0]] if y[other] < y[call]]
    return fmean(x[source] for source in above) if above else 0.0


def operands_of(calls: Sequence[Call]) -> list[list[int]]:
    """For each call, the earlier calls whose results or writes it reads, in order, once each."""
    maker: dict[str, int] = {}
    base: dict[str, str] = {}  # by view: the tensor whose memory it shares
    written: dict[str, int] = {}  # by base: the last call that wrote the base
    operands: list[list[int]] = []
    for place, call in enumerate(calls):
        sources = [maker[token] for token in call["reads"] if token in maker]
        sources += [written[root] for token in call["reads"] if (root := base.get(token, token)) in written]
        operands.append(sorted(set(sources)))
        for token, _ in call["makes"]:
            maker[token] = place
        for token, of in call.get("of", {}).items():
            base[token] = base.get(of, of)
        for token in call.get("writes", ()):
            maker[token] = written[base.get(token, token)] = place
    return operands


def _spread(wanted: Sequence[float]) -> list[float]:
    """Positions at least one apart, in the given order, closest to `wanted` in least squares: isotonic regression."""
    blocks: list[tuple[float, int]] = []  # mean of (wanted - rank), number of calls
    for rank, place in enumerate(wanted):
        mean, count = place - rank, 1
        while blocks and blocks[-1][0] > mean:
            other, size = blocks.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + rank for rank, mean in enumerate(means)]
