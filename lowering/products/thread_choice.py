"""How many threads compute a compiled graph.

In: a graph. Out: 1, or None for as many as the program's operators use.

Note [Graphs on one thread]
Sharing an operator of some microseconds among threads saves little of it: an MLP's run takes 225 us on one thread and
190 on two. But a run on one thread leaves a core to Python, which records the next step meanwhile (Note [Runs beside
recording]), and recording takes as long as such a run. So a graph whose run is short is compiled for one thread, and
computed by one, wherever that is. So is one whose calls take longer to record than more threads save, if operators use
all cores: a small CNN's step takes 1.8 ms so and 2.3 on two threads, a GPT's 19 and 17. Sums are split by the number.
So it depends neither on where a run takes place nor on how long it took, but on the graph, the threads that are set
and the cores of the process that compiles; an artefact keeps it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import Arg, Graph, Node, Value, map_arg

# Graphs whose estimated run is shorter than this, in seconds, are computed by one thread.
_SHORT = 6e-4

# What one thread does in a second, as a rough guess: floating-point operations, bytes of results in what is fused,
# operators.
_OPERATIONS, _BYTES, _OPERATORS = 1.5e11, 4e10, 5e6
# How much of a thread each further one adds, and the seconds in which a call is recorded: of training steps of CNNs and
# GPTs on two cores, relative to the guess above.
_GAIN, _RECORDED = 0.65, 8.4e-6


def num_threads_for(graph: Graph, cores: int | None = None) -> int | None:
    """1 if one thread should compute `graph`, else None. Imports PyTorch's counter of operations.

    `cores`: those of this process, if Python records the next run of it meanwhile.
    """
    if graph.device.type != "cpu":
        return None
    try:
        seconds = _estimated_seconds(graph)
    except Exception:  # a formula does not know such a call
        return None
    gains_more = cores is not None and _saved_by_threads(seconds, cores) < _RECORDED * len(graph.nodes)
    return 1 if seconds < _SHORT or gains_more else None


def _saved_by_threads(seconds: float, cores: int) -> float:
    """Of a run that takes so long on one thread, the seconds that more threads save instead of recording beside it."""
    threads = torch.get_num_threads()
    if threads < cores:
        return math.inf  # there is a core for recording
    return seconds * (1 - 1 / (1 + _GAIN * (threads - 1)))


def _estimated_seconds(graph: Graph) -> float:
    num_bytes = sum(value.meta.nbytes for node in graph.nodes for value in node.outputs if value is not None)
    operations = sum(map(_operations_of, graph.nodes))
    return operations / _OPERATIONS + num_bytes / _BYTES + len(graph.nodes) / _OPERATORS


def _operations_of(node: Node) -> float:
    """The floating-point operations of products, convolutions and attention; what memory bounds counts as none."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(node.op.overloadpacket)
    if formula is not None:
        kwargs: dict[str, Any] = {name: map_arg(_shape_of, arg) for name, arg in node.kwargs}
        results = tuple(None if value is None else value.meta.shape for value in node.outputs)
        made = results[0] if len(results) == 1 else results
        return float(formula(*[map_arg(_shape_of, arg) for arg in node.args], **kwargs, out_val=made))
    if "attention" in node.name:
        query, key, *_ = (value.meta.shape for value in node.inputs() if len(value.meta.shape) > 2)
        return 4.0 * math.prod(query) * key[-2] * (2.5 if "backward" in node.name else 1.0)
    return 0.0


def _shape_of(arg: Arg) -> Any:
    return arg.meta.shape if isinstance(arg, Value) else arg
